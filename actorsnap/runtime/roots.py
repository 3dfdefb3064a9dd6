# SPDX-License-Identifier: Apache-2.0
"""A root: the folder of one training run's snapshots, and the manager's records about them.

Names and records are in ``format.steps``. A name is never reused for other content, so commit
objects, marks and records of runs are read once per process.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

import anyio
import msgspec

from actorsnap.actors.abandonable import AbandonableTasks, first_error
from actorsnap.actors.snapshot_reader import find_commit, is_complete
from actorsnap.errors import (
    ActorSnapError,
    FormatError,
    ObjectExists,
    ObjectNotFound,
    StorageError,
    UnsupportedFormat,
    describe,
)
from actorsnap.format.manifest import Commit
from actorsnap.format.steps import (
    MANAGER_FOLDER,
    MarkKind,
    MarkName,
    PinMark,
    RunRecord,
    StepName,
    decode_record,
    encode_record,
    is_rest,
    marked,
    marks_prefix,
    parse_intent_key,
    parse_run_key,
    run_key,
)
from actorsnap.log import Log
from actorsnap.options import Options
from actorsnap.planning.keeping import StoredStep
from actorsnap.planning.marks import Facts, Pin
from actorsnap.runtime.host import Host, Script
from actorsnap.runtime.location import Location, linked_step, make_location, open_location
from actorsnap.runtime.maintenance import is_of_another_host, may_run
from actorsnap.runtime.marks import MarksReader
from actorsnap.runtime.process import host_id
from actorsnap.runtime.source import MAX_SMALL_READS, OpenSource, Source, opened_storage
from actorsnap.runtime.texts import size_text
from actorsnap.storage.base import CLEANUP_S, ObjectInfo, Storage, for_each
from actorsnap.storage.registry import folder_and_name
from actorsnap.storage.wire import is_unreachable

logger = Log(__name__)

METADATA_KEY = "manager"
"""Key of the manager's entry in a snapshot's metadata."""

_LATEST = "latest"

_MAX_CLAIMS = 100
"""Tries to take a generation while other managers take theirs."""

_QUIET_S = 15 * 60.0
"""A save of another host that has stored nothing for as long counts as dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The keys below ``.manager/``: one look, which reads no object.

    Attributes:
        generations: Those with a run record.
        intents: Deletions that have begun, with the storage's time of the intent, 0 if unknown.
        marks: By snapshot, with strangers and temporaries.
        rests: Keys that a killed process left.
    """

    generations: frozenset[int]
    intents: Mapping[StepName, float]
    marks: Mapping[StepName, Sequence[ObjectInfo]]
    rests: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The contents of a root, by name only: with or without commit objects.

    Attributes:
        names: Folders with a snapshot's name.
        runs: By generation; those that were read.
    """

    names: Collection[StepName]
    records: Records
    runs: Mapping[int, RunRecord]

    @property
    def parents(self) -> dict[int, StepName | None]:
        return {
            generation: StepName.parse(run.restored_from) if run.restored_from else None
            for generation, run in self.runs.items()
        }

    @property
    def newest_generation(self) -> int:
        """0 if nothing was ever saved."""
        stored = [name.generation for name in self.names]
        return max([*self.records.generations, *stored], default=0)


class RootSource(Source):
    """A source whose storage stays open from one operation to the next, until ``close``.

    A manager looks at its root after each save: over a network, it keeps its connections.
    """

    def __init__(self, location: Location, options: Options) -> None:
        super().__init__(location, options)
        self._kept: tuple[Host, Storage] | None = None
        self._users: list[AbandonableTasks] = []
        self._is_closed = False

    @asynccontextmanager
    async def _open(self, host: Host, errands: AbandonableTasks) -> AsyncIterator[Storage]:
        if self._is_closed:
            async with opened_storage(host, self.location, errands) as storage:
                yield storage
            return
        kept = self._storage_of(host)
        if kept is None:
            opened = await open_location(host, self.location, fsync=True, on_retry=self._note_retry)
            # Another operation may have opened it meanwhile.
            kept = self._storage_of(host) or opened
        self._kept = host, kept
        self._users.append(errands)
        try:
            yield kept
        finally:
            self._users.remove(errands)
            await self._close_if_over()

    def _storage_of(self, host: Host) -> Storage | None:
        """A fork has its own host."""
        return self._kept[1] if self._kept is not None and self._kept[0] is host else None

    async def close(self) -> None:
        """Closes the storage after its last operation. Later operations open their own."""
        self._is_closed = True
        await self._close_if_over()

    async def _close_if_over(self) -> None:
        if self._users or not self._is_closed:
            return
        kept, self._kept = self._kept, None
        if kept is not None:
            with anyio.move_on_after(CLEANUP_S, shield=True):
                try:
                    await kept[1].aclose()
                except ActorSnapError as error:
                    logger.warning("%s: not closed: %s", self.location.display_url, error)

    def _note_retry(self, error: StorageError, delay_s: float) -> None:
        for errands in self._users:
            errands.note_retry(error, delay_s)


class Root:
    """Reads a root. On the runtime's loop, except ``snapshot``.

    Attributes:
        damaged: Committed snapshots that this process found damaged here, with the reasons: a quick
            look does not see each damage.
    """

    def __init__(self, location: Location, options: Options) -> None:
        self.source = RootSource(location, options)
        self.marks = MarksReader(location.display_url)
        self._runs: dict[int, RunRecord] = {}
        self._commits: dict[StepName, Commit | FormatError] = {}
        self._warned: set[str] = set()
        self.damaged: dict[StepName, str] = {}
        self._complete: set[StepName] = set()  # warned of

    @property
    def url(self) -> str:
        """Without secrets."""
        return self.source.location.display_url

    @property
    def places(self) -> tuple[Root, ...]:
        """Where its snapshots can be, the nearest first."""
        return (self,)

    def is_durable(self, name: StepName) -> bool:
        """Returns whether a committed snapshot is at the root itself, when last read."""
        return True

    def url_of(self, name: StepName) -> str:
        """Without secrets."""
        return _join(self.url, name)

    def snapshot(self, name: StepName) -> Source:
        """Returns the snapshot of this name, which may not exist."""
        location = self.source.location
        return Source(
            replace(
                location,
                url=_join(location.url, name),
                display_url=self.url_of(name),
            ),
            self.source.options,
        )

    async def list(self, opened: OpenSource) -> Listing:
        """Lists the root, and reads the records of runs that can be in a timeline."""
        listing = await self.look(opened)
        oldest = min([name.generation for name in listing.names], default=0)
        wanted = [g for g in listing.records.generations if g >= oldest and g not in self._runs]
        await for_each(wanted, partial(self._read_run, opened), at_once=2 * MAX_SMALL_READS)
        return self._with_runs(listing)

    async def look(self, opened: OpenSource) -> Listing:
        """Lists the root and the records, at the same time; reads none."""
        names: list[StepName] = []
        found: list[Records] = []

        async def list_names() -> None:
            parsed = map(StepName.parse, await opened.storage.list_folders())
            names.extend(name for name in parsed if name is not None)

        async def list_records() -> None:
            found.append(await self.list_records(opened))

        await for_each([list_names, list_records], lambda look: look(), at_once=2)
        return self._with_runs(Listing(names=names, records=found[0], runs={}))

    async def list_records(self, opened: OpenSource) -> Records:
        generations: set[int] = set()
        intents: dict[StepName, float] = {}
        marks: dict[StepName, list[ObjectInfo]] = {}
        others: list[str] = []
        async for info in opened.storage.list(f"{MANAGER_FOLDER}/"):
            generation, intent = parse_run_key(info.key), parse_intent_key(info.key)
            name = marked(info.key)
            if generation is not None:
                generations.add(generation)
            elif intent is not None:
                intents[intent] = info.modified_s
            elif name is not None:
                marks.setdefault(name, []).append(info)
            else:
                others.append(info.key)
        for name in intents:
            # Another process may have deleted the commit object.
            self._commits.pop(name, None)
        newest = max(generations, default=0)
        return Records(
            generations=frozenset(generations),
            intents=intents,
            marks=marks,
            rests=[key for key in others if is_rest(key, newest)],
        )

    async def read_run(self, opened: OpenSource, listing: Listing, generation: int) -> Listing:
        """Reads the record of one more run."""
        await self._read_run(opened, generation)
        if generation not in self._runs:
            listing = replace(
                listing,
                records=replace(
                    listing.records, generations=listing.records.generations - {generation}
                ),
            )
        return self._with_runs(listing)

    async def _read_run(self, opened: OpenSource, generation: int) -> None:
        key = run_key(generation)
        try:
            data = await opened.storage.get(key)
        except ObjectNotFound:
            return
        self._runs[generation] = self._decode_run(data, generation)

    def _with_runs(self, listing: Listing) -> Listing:
        known = listing.records.generations
        return replace(listing, runs={g: run for g, run in self._runs.items() if g in known})

    async def read_facts(self, opened: OpenSource, listing: Listing) -> dict[StepName, Facts]:
        """Returns what marks say about the snapshots of a listing."""
        marks = listing.records.marks
        return await self.marks.read(
            opened, {name: marks[name] for name in listing.names if name in marks}
        )

    def link_latest(self, name: StepName) -> None:
        """Makes ``latest`` at a local root a link to the snapshot. For people: nothing reads it.

        Leaves anything else of that name alone.
        """
        folder = self.source.location.canonical
        if not folder.startswith("/"):
            return
        path = f"{folder}/{_LATEST}"
        try:
            if os.path.lexists(path) and linked_step(path) is None:
                self.warn_once(
                    f"{path} is not the manager's link to its latest snapshot, and stays"
                )
                return
            _relink(path, str(name), f"{folder}/{MANAGER_FOLDER}/{_LATEST}.tmp")
        except OSError as error:
            logger.debug("%s: no link %s: %s", self.url, _LATEST, error)

    def warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)

    def forget(self, name: StepName) -> None:
        """After its deletion."""
        self._commits.pop(name, None)
        self.damaged.pop(name, None)

    def _decode_run(self, data: bytes, generation: int) -> RunRecord:
        """Returns a damaged record as that of a fresh start: it must not stop all later runs."""
        try:
            return decode_record(data, RunRecord, run_key(generation))
        except FormatError as error:
            logger.warning(
                "%s: it is not known which snapshot generation %d continued; earlier ones count as "
                "abandoned, and stay: %s",
                *(self.url, generation, describe(error)),
            )
            return RunRecord(generation=generation, created_s=0.0, host="", pid=0, world_size=1)

    async def read_commits(
        self,
        opened: OpenSource,
        names: Iterable[StepName],
        *,
        has_newer: bool = False,
        failed: dict[StepName, StorageError] | None = None,
    ) -> dict[StepName, Commit | FormatError]:
        """Returns commit objects, or how they are damaged. Leaves out unfinished saves.

        Args:
            failed: Takes the errors of reads that failed, instead of raising the first. Raised
                nevertheless: the storage cannot be reached.

        Raises:
            UnsupportedFormat: A newer release saved one, unless ``has_newer``.
        """
        found: dict[StepName, Commit | FormatError] = {}

        async def read(name: StepName) -> None:
            commit = self._commits.get(name)
            if commit is None:
                try:
                    commit = await find_commit(opened.storage, folder=str(name))
                except UnsupportedFormat as error:
                    error.name_snapshot(self.url_of(name))
                    if not has_newer:
                        raise
                    found[name] = error
                    return
                except FormatError as error:
                    error.name_snapshot(self.url_of(name))
                    commit = error
                except StorageError as error:
                    if failed is None or is_unreachable(error):
                        raise
                    failed[name] = error
                    return
                if commit is None:
                    return
                self._commits[name] = commit
            found[name] = commit

        await for_each(names, read, at_once=2 * MAX_SMALL_READS)
        return found

    async def is_committed(self, opened: OpenSource, name: StepName) -> bool:
        """Looks now."""
        return await find_commit(opened.storage, folder=str(name)) is not None

    async def has_complete(self, opened: OpenSource, name: StepName) -> bool:
        """Returns whether an attempt lacks at most the commit object."""
        storage, run_blocking = opened.storage, opened.errands.run_blocking
        for attempt in await storage.list_folders(str(name)):
            if await is_complete(storage, run_blocking, f"{name}/{attempt}"):
                return True
        return False

    async def may_be_saving(self, opened: OpenSource, name: StepName) -> bool:
        """Returns whether a save of an earlier manager may still commit the snapshot.

        Without its data, the commit would be damaged. On other hosts, a save counts as dead when it
        has stored nothing for ``_QUIET_S``.
        """
        attempts = await opened.storage.list_folders(str(name))
        if await may_run(opened.host, attempts):
            return True
        stored = [
            info.modified_s
            for attempt in filter(is_of_another_host, attempts)
            async for info in opened.storage.list(f"{name}/{attempt}/")
        ]
        return time.time() - max(stored, default=0.0) < _QUIET_S

    async def warn_of_complete(
        self, opened: OpenSource, name: StepName, remedy: str = "makes it a snapshot"
    ) -> None:
        """Warns once of a snapshot that lacks only the commit object: it stays, and takes space.

        Unless its save may still be running: it commits soon.

        Args:
            remedy: What ``actorsnap recover`` does.
        """
        if name in self._complete:
            return
        if await may_run(opened.host, await opened.storage.list_folders(str(name))):
            return
        self._complete.add(name)
        size = sum([info.size async for info in opened.storage.list(f"{name}/")])
        logger.warning(
            "%s is complete, but was not committed, and stays (%s): `actorsnap recover` %s, "
            "`actorsnap rm --garbage` deletes it",
            *(self.url_of(name), size_text(size), remedy),
        )

    async def claim_generation(
        self, opened: OpenSource, *, restored_from: StepName | None, world_size: int
    ) -> int:
        """Begins a run: takes the next generation, which supersedes all earlier ones."""
        generation = (await self.look(opened)).newest_generation
        for _ in range(_MAX_CLAIMS):
            generation += 1
            record = RunRecord(
                generation=generation,
                created_s=time.time(),
                host=host_id(),
                pid=os.getpid(),
                world_size=world_size,
                restored_from=None if restored_from is None else str(restored_from),
            )
            try:
                await opened.storage.put_if_absent(run_key(generation), encode_record(record))
            except ObjectExists:
                continue
            self._runs[generation] = record
            return generation
        raise ObjectExists(
            op="begin a run",
            key=run_key(generation),
            backend=self.url,
            detail=f"{_MAX_CLAIMS} other managers began a run here at the same time",
        )

    async def is_superseded(self, opened: OpenSource, generation: int) -> bool:
        """Returns whether a later manager has begun a run. One request."""
        # Generations are taken in order.
        try:
            await opened.storage.stat(run_key(generation + 1))
        except ObjectNotFound:
            return False
        return True


def find_pins(source: Source) -> Script[tuple[Pin, ...]]:
    """Returns the pins of a snapshot that have not expired. Only a step of a root can have some."""
    url, canonical = source.location.url, source.location.canonical
    if canonical.startswith("/"):
        url = os.path.realpath(url if url.startswith("/") else canonical)  # of `latest`, too
    place = folder_and_name(url)
    name = None if place is None else StepName.parse(place[1])
    if place is None or name is None:
        return ()
    location = make_location(place[0], source.location.storage_options)

    async def perform(opened: OpenSource) -> tuple[Pin, ...]:
        infos = [info async for info in opened.storage.list(marks_prefix(name))]
        facts = await MarksReader(location.display_url).read(opened, {name: infos})
        return facts[name].pins_at(time.time())

    return (yield from Source(location, source.options).perform("list", perform))


def copy_records(source: Source, to: Source) -> Script[None]:
    """Copies run records, pins and metrics from a root to another one. Deletes none there.

    Records of a tier become those of its root. Pins keep their end; expired ones are left out.

    Raises:
        ObjectExists: Another run has saved there; nothing was written.
    """

    async def read(opened: OpenSource) -> dict[str, bytes]:
        found: dict[str, bytes] = {}

        async def get(info: ObjectInfo) -> None:
            with suppress(ObjectNotFound):  # unpinned meanwhile
                data = _copied_record(info, await opened.storage.get(info.key))
                if data is not None:
                    found[info.key] = data

        listed = [info async for info in opened.storage.list(f"{MANAGER_FOLDER}/")]
        infos = [info for info in listed if parse_run_key(info.key) or MarkName.parse(info.key)]
        await for_each(infos, get, at_once=MAX_SMALL_READS)
        return found

    found = yield from source.perform("list", read)

    async def write(opened: OpenSource) -> None:
        there = {info.key async for info in opened.storage.list(f"{MANAGER_FOLDER}/")}
        for key in sorted(there & {*found}):
            if parse_run_key(key) and await opened.storage.get(key) != found[key]:
                raise ObjectExists(
                    op="copy",
                    key=key,
                    backend=to.location.display_url,
                    detail="another run has saved there, or this one was continued there and here: "
                    "copy to another folder",
                )

        async def put(key: str) -> None:
            with suppress(ObjectExists):
                await opened.storage.put_if_absent(key, found[key])

        await for_each(sorted({*found} - there), put, at_once=MAX_SMALL_READS)

    yield from to.perform("copy", write)


def _copied_record(info: ObjectInfo, data: bytes) -> bytes | None:
    """Returns the record that a copy stores; None for an expired pin. A damaged one stays."""
    name = MarkName.parse(info.key)
    with suppress(FormatError):
        if name is None:
            run = decode_record(data, RunRecord, info.key)
            return encode_record(msgspec.structs.replace(run, tier_of=None))
        if name.kind is MarkKind.PIN:
            pin = decode_record(data, PinMark, info.key)
            if pin.for_s is not None:
                now_s = time.time()  # the copy's time begins when it is stored
                left_s = (info.modified_s or pin.created_s) + pin.for_s - now_s
                copied = msgspec.structs.replace(pin, created_s=now_s, for_s=left_s)
                return encode_record(copied) if left_s > 0 else None
    return data


def _relink(path: str, name: str, scratch: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(scratch)
    os.symlink(name, scratch)
    os.rename(scratch, path)


def stored_step(name: StepName, commit: Commit, facts: Facts | None = None) -> StoredStep:
    """Returns the facts that policies judge by. Metrics of marks replace those of the save."""
    noted = commit.metadata.get(METADATA_KEY)
    metrics = noted.get("metrics") if isinstance(noted, dict) else None
    late = {} if facts is None else facts.metrics
    return StoredStep(
        name=name,
        created_s=commit.created_at().timestamp(),
        metrics={
            key: number
            for key, value in {**(metrics if isinstance(metrics, dict) else {}), **late}.items()
            if (number := _stored_number(value)) is not None
        },
    )


def _stored_number(value: object) -> float | None:
    """JSON has no NaN and infinities: they are stored as text."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else None


def is_damage(error: BaseException) -> bool:
    """Returns whether an older snapshot may help: this one is damaged or gone."""
    error = first_error(error)
    if isinstance(error, UnsupportedFormat):
        return False
    return isinstance(error, FormatError | ObjectNotFound) or (
        getattr(error, "is_deleted", False) is True
    )


def damage_of(error: BaseException) -> str:
    """Returns what is damaged, without the advice: the caller goes on with an older snapshot."""
    error = first_error(error)
    return f"{error.key}: {error.detail}" if isinstance(error, FormatError) else describe(error)


def _join(url: str, name: StepName) -> str:
    return f"{url.rstrip('/')}/{name}"
