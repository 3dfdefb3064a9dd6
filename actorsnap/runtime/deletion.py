# SPDX-License-Identifier: Apache-2.0
"""Deletes snapshots of a root.

An intent for each; then a second look, for a later run and for pins; then the commit objects, which
ends the snapshots; then the other objects; then intents and marks. A process killed in between
leaves an intent or a folder without a commit object, and the next pass of any manager continues.

Several snapshots take each step together: a storage that deletes many keys per request gets few.
If that fails, each goes alone, so one that cannot be deleted does not stop the others.

In a snapshot's folder only the keys of attempts and commit objects go; other files are the user's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from actorsnap.actors.snapshot_reader import find_commit
from actorsnap.errors import FormatError, StorageFull, describe
from actorsnap.format.foreign import is_of_snapshot
from actorsnap.format.manifest import COMMIT_KEY
from actorsnap.format.steps import DeleteIntent, StepName, encode_record, intent_key
from actorsnap.log import Log
from actorsnap.planning.marks import Pin
from actorsnap.runtime.roots import Listing, Records, Root
from actorsnap.runtime.source import MAX_SMALL_READS, OpenSource
from actorsnap.storage.base import for_each

logger = Log(__name__)

_MAX_TOGETHER = 1000
"""Snapshots per look. The look must not be old when the last commit object goes."""

_MAX_KEYS = 10_000
"""Keys in memory, about."""


@dataclass(slots=True)
class Deletions:
    """The outcome of a pass, also of one that ran out of time.

    Attributes:
        deleted: Snapshots that are gone.
        failed: By name, those that are still there, or partly.
        spared: Pinned or changed since they were judged.
        left: Not begun, or not ended: for the next pass.
        is_superseded: A later manager has begun a run, so some were not deleted.
    """

    deleted: list[StepName] = field(default_factory=list)
    failed: dict[StepName, Exception] = field(default_factory=dict)
    spared: dict[StepName, tuple[Pin, ...]] = field(default_factory=dict)
    left: list[StepName] = field(default_factory=list)
    is_superseded: bool = False


class Deleter:
    """Deletes under a generation, unless there is a later one.

    Args:
        listing: As judged.
        result: Gets the outcome while it runs: it may be cancelled at any time.
        heeds_pins: False deletes pinned snapshots too.
        before: Called for each snapshot that goes, right before its commit object is deleted.
    """

    def __init__(
        self,
        root: Root,
        opened: OpenSource,
        listing: Listing,
        generation: int,
        result: Deletions,
        *,
        heeds_pins: bool = True,
        before: Callable[[StepName], Awaitable[None]] | None = None,
    ) -> None:
        self._root = root
        self._opened = opened
        self._storage = opened.storage
        self._listing = listing
        self._generation = generation
        self._result = result
        self._heeds_pins = heeds_pins
        self._before = before

    async def delete(
        self, doomed: Mapping[StepName, DeleteIntent], rests: Collection[StepName]
    ) -> None:
        """Deletes ``doomed``, in their order, and what earlier passes and saves left.

        Args:
            rests: Names of which folders without a commit object go, and intents. Without an intent
                a complete attempt stays: it may have lost its commit object.
        """
        names = [*doomed]
        self._result.left = [*names]
        await self._end_rests(rests)
        for start in range(0, len(names), _MAX_TOGETHER):
            if self._result.is_superseded:
                self._result.left.clear()
                return
            await self._delete_some({n: doomed[n] for n in names[start : start + _MAX_TOGETHER]})

    async def _delete_some(self, doomed: Mapping[StepName, DeleteIntent]) -> None:
        unnoted: set[StepName] = set()

        async def intend(name: StepName) -> None:
            data = encode_record(doomed[name])
            try:
                await self._storage.put(intent_key(name), [memoryview(data)])
            except StorageFull:
                unnoted.add(name)  # only a deletion frees space

        changed: set[StepName] = set()

        async def look(name: StepName) -> None:
            # Without a commit object: another process is deleting it.
            if await self._attempt_of(name) not in (None, doomed[name].attempt):
                changed.add(name)

        begun = await self._each(doomed, intend)
        begun = await self._each(begun, look)
        # As late as possible.
        records = await self._look_again()
        pins = await self._pins(records, unnoted)
        spared = {name: pins[name] for name in begun if name in pins}
        noted = {*records.intents, *unnoted}
        spared |= {name: () for name in begun if name in changed or name not in noted}
        going = [] if self._result.is_superseded else [n for n in begun if n not in spared]
        if self._before is not None:
            going = await self._each(going, self._before)
        gone = await self._together(going, self._delete_commits, self._delete_commit)
        for name in gone:
            self._root.forget(name)
        ended = await self._together(gone, self._delete_objects, self._delete_folder)
        self._result.deleted += ended
        self._result.spared |= spared
        over = {*ended, *spared, *self._result.failed, *(begun if not going else ())}
        self._result.left = [name for name in self._result.left if name not in over]
        marks = [info.key for name in ended for info in records.marks.get(name, ())]
        kept = [name for name in begun if name not in going]
        await self._delete_keys([*map(intent_key, [*ended, *kept]), *marks])

    async def _attempt_of(self, name: StepName) -> str | None:
        """Returns the attempt of the commit object; empty if it cannot be read."""
        try:
            commit = await find_commit(self._storage, folder=str(name))
        except FormatError:
            return ""
        return None if commit is None else commit.attempt

    async def _look_again(self) -> Records:
        records = await self._root.list_records(self._opened)
        # Also by key: some file systems list late.
        is_superseded = max(records.generations, default=0) > self._generation
        if is_superseded or await self._root.is_superseded(self._opened, self._generation):
            self._result.is_superseded = True
        return records

    async def _pins(
        self, records: Records, unnoted: Collection[StepName]
    ) -> dict[StepName, tuple[Pin, ...]]:
        """Returns the pins that count: by the storage's clock, which has just dated the intents."""
        if not self._heeds_pins:
            return {}
        names = {*records.intents, *unnoted}
        marked = {name: records.marks[name] for name in names if name in records.marks}
        facts = await self._root.marks.read(self._opened, marked)
        now_s = max(records.intents.values(), default=0.0)
        return {name: pins for name, found in facts.items() if (pins := found.pins_at(now_s))}

    async def _delete_commits(self, names: Sequence[StepName]) -> None:
        await self._storage.delete([f"{name}/{COMMIT_KEY}" for name in names])

    async def _delete_commit(self, name: StepName) -> None:
        await self._delete_commits([name])

    async def _delete_objects(self, names: Sequence[StepName]) -> None:
        """Deletes all objects of several snapshots. Empty folders go with a later pass."""
        waiting: list[str] = []

        async def gather(name: StepName) -> None:
            waiting.extend((await self._list_objects(name))[0])
            if len(waiting) >= _MAX_KEYS:
                keys = [*waiting]
                waiting.clear()
                await self._storage.delete(keys)

        await for_each(names, gather, at_once=MAX_SMALL_READS)
        await self._delete_keys(waiting)

    async def _delete_keys(self, keys: Sequence[str]) -> None:
        if keys:
            await self._storage.delete(keys)

    async def _delete_folder(self, name: StepName) -> None:
        own, others = await self._list_objects(name)
        # Only file systems have empty folders.
        if not others and (not own or self._storage.capabilities.has_blocking_io):
            await self._storage.delete_folder(str(name))
        else:
            await self._delete_keys(own)

    async def _list_objects(self, name: StepName) -> tuple[list[str], list[str]]:
        """Returns the keys of a snapshot, and those of other writers in its folder."""
        start = f"{name}/"
        keys = [info.key async for info in self._storage.list(start)]
        own = [key for key in keys if is_of_snapshot(key.removeprefix(start))]
        if len(own) == len(keys):
            return own, []
        others = [key for key in keys if not is_of_snapshot(key.removeprefix(start))]
        self._root.warn_once(
            f"{self._root.url}/{others[0]} stays, with its folder: no manager wrote it"
        )
        return own, others

    # What was left

    async def _end_rests(self, rests: Collection[StepName]) -> None:
        """Ends deletions and saves of killed processes."""
        begun = self._listing.records.intents
        if not rests:
            return
        await self._look_again()
        if self._result.is_superseded:
            return
        unused: list[StepName] = []

        async def look(name: StepName) -> None:
            if await self._attempt_of(name) is None:
                if name in begun:
                    unused.append(name)
                elif await self._root.has_complete(self._opened, name):
                    await self._root.warn_of_complete(self._opened, name)
                elif not await self._root.may_be_saving(self._opened, name):
                    unused.append(name)

        seen = await self._each(rests, look)
        await self._each(unused, self._delete_folder)
        ended = [name for name in seen if name not in self._result.failed]
        await self._delete_keys([intent_key(name) for name in ended if name in begun])

    async def end_marks(self) -> None:
        """Deletes marks of snapshots that are gone, and temporaries of killed processes."""
        listing = self._listing
        stored = {(name.generation, name.step) for name in listing.names}
        newest = max(stored, default=(0, 0))
        # A later save may still take its name.
        orphans = [
            name
            for name in listing.records.marks
            if name not in listing.names and (name.generation, name.step) < newest
        ]
        gone: list[StepName] = []

        async def look(name: StepName) -> None:
            # Listings may be late.
            if await self._attempt_of(name) is None:
                gone.append(name)

        await self._each(orphans, look)
        keys = [info.key for name in gone for info in listing.records.marks[name]]
        await self._delete_keys([*keys, *listing.records.rests])

    # Failures

    async def _each(
        self, names: Iterable[StepName], work: Callable[[StepName], Awaitable[None]]
    ) -> list[StepName]:
        """Returns those that succeeded, in order."""
        wanted = [*names]
        failed = self._result.failed

        async def attempt(name: StepName) -> None:
            try:
                await work(name)
            except Exception as error:
                failed[name] = error

        await for_each(wanted, attempt, at_once=MAX_SMALL_READS)
        return [name for name in wanted if name not in failed]

    async def _together(
        self,
        names: Sequence[StepName],
        many: Callable[[Sequence[StepName]], Awaitable[None]],
        one: Callable[[StepName], Awaitable[None]],
    ) -> list[StepName]:
        """``_each`` by a call for all; if that fails, or there is only one, by a call for each."""
        if len(names) > 1:
            try:
                await many(names)
            except Exception as error:
                logger.info("%s: deleting one by one: %s", self._root.url, describe(error))
            else:
                return [*names]
        return await self._each(names, one)
