"""A root: the folder of one training run's snapshots, and the manager's records about them.

Names and records are in ``format.steps``. A name is never reused for other content, so commit
objects and records of runs are read once per process.

Deletion of a snapshot: an intent, a second look, the commit object, the other objects, the intent.
A process killed in between leaves an intent or a folder without a commit object, and the next pass
of any manager continues.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial

from actorsnap.actors.abandonable import first_error
from actorsnap.actors.snapshot_reader import find_commit, is_complete
from actorsnap.errors import (
    ActorSnapError,
    FormatError,
    ObjectExists,
    ObjectNotFound,
    UnsupportedFormat,
)
from actorsnap.format.manifest import COMMIT_KEY, Commit
from actorsnap.format.steps import (
    MANAGER_FOLDER,
    DeleteIntent,
    RunRecord,
    StepName,
    decode_record,
    encode_record,
    intent_key,
    is_intent_rest,
    parse_intent_key,
    parse_run_key,
    run_key,
)
from actorsnap.log import Log
from actorsnap.options import Options
from actorsnap.planning.keeping import StoredStep
from actorsnap.runtime.location import Location
from actorsnap.runtime.process import host_id
from actorsnap.runtime.source import MAX_SMALL_READS, OpenSource, Source
from actorsnap.storage.base import for_each

logger = Log(__name__)

METADATA_KEY = "manager"
"""Key of the manager's entry in a snapshot's metadata."""

_MAX_CLAIMS = 100
"""Tries to take a generation while other managers take theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The contents of a root, by name only: with or without commit objects.

    Attributes:
        names: Folders with a snapshot's name.
        runs: By generation; only those whose snapshots may be in a timeline.
        intents: Deletions that have begun.
        temporaries: Keys of intents that a killed process did not store.
    """

    names: Collection[StepName]
    runs: Mapping[int, RunRecord]
    intents: Collection[StepName]
    temporaries: Collection[str] = ()

    @property
    def parents(self) -> dict[int, StepName | None]:
        return {
            generation: StepName.parse(run.restored_from) if run.restored_from else None
            for generation, run in self.runs.items()
        }

    @property
    def newest_generation(self) -> int:
        """0 if nothing was ever saved."""
        return max([*self.runs, *(name.generation for name in self.names)], default=0)


@dataclass(slots=True)
class Deletions:
    """The outcome of a pass.

    Attributes:
        deleted: Snapshots that are gone.
        failed: By name, those that are still there, or partly.
        is_superseded: A later manager has begun a run, so some were not deleted.
    """

    deleted: list[StepName] = field(default_factory=list)
    failed: dict[StepName, Exception] = field(default_factory=dict)
    is_superseded: bool = False


class Root:
    """Reads and changes a root. On the runtime's loop, except ``snapshot``."""

    def __init__(self, location: Location, options: Options) -> None:
        self.source = Source(location, options)
        self._runs: dict[int, RunRecord] = {}
        self._commits: dict[StepName, Commit | FormatError] = {}

    @property
    def url(self) -> str:
        """Without secrets."""
        return self.source.location.display_url

    def snapshot(self, name: StepName) -> Source:
        """Returns the snapshot of this name, which may not exist."""
        location = self.source.location
        return Source(
            replace(
                location,
                url=_join(location.url, name),
                display_url=_join(location.display_url, name),
            ),
            self.source.options,
        )

    async def list(self, opened: OpenSource) -> Listing:
        """Lists the root and the records, at the same time, and reads new records of runs."""
        storage = opened.storage
        names: list[StepName] = []
        intents: list[StepName] = []
        temporaries: list[str] = []
        generations: list[int] = []

        async def list_names() -> None:
            parsed = map(StepName.parse, await storage.list_folders())
            names.extend(name for name in parsed if name is not None)

        async def list_records() -> None:
            async for info in storage.list(f"{MANAGER_FOLDER}/"):
                generation, intent = parse_run_key(info.key), parse_intent_key(info.key)
                if generation is not None:
                    generations.append(generation)
                elif intent is not None:
                    intents.append(intent)
                elif is_intent_rest(info.key):
                    temporaries.append(info.key)

        await for_each([list_names, list_records], lambda look: look(), at_once=2)

        async def read(generation: int) -> None:
            key = run_key(generation)
            try:
                data = await storage.get(key)
            except ObjectNotFound:
                return
            self._runs[generation] = decode_record(data, RunRecord, key)

        for name in intents:
            # Another process may have deleted the commit object.
            self._commits.pop(name, None)
        new = [each for each in generations if each not in self._runs]
        await for_each(new, read, at_once=2 * MAX_SMALL_READS)
        runs = {each: self._runs[each] for each in generations if each in self._runs}
        return Listing(names=names, runs=runs, intents=intents, temporaries=temporaries)

    async def read_commits(
        self, opened: OpenSource, names: Iterable[StepName]
    ) -> dict[StepName, Commit | FormatError]:
        """Returns commit objects, or why they cannot be read. Leaves out unfinished saves."""
        found: dict[StepName, Commit | FormatError] = {}

        async def read(name: StepName) -> None:
            commit = self._commits.get(name)
            if commit is None:
                try:
                    commit = await find_commit(opened.storage, folder=str(name))
                except UnsupportedFormat:
                    raise
                except FormatError as error:
                    error.name_snapshot(_join(self.url, name))
                    commit = error
                if commit is None:
                    return
                self._commits[name] = commit
            found[name] = commit

        await for_each(names, read, at_once=MAX_SMALL_READS)
        return found

    async def claim_generation(
        self, opened: OpenSource, *, restored_from: StepName | None, world_size: int
    ) -> int:
        """Begins a run: takes the next generation, which supersedes all earlier ones."""
        generation = (await self.list(opened)).newest_generation
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

    async def delete(
        self,
        opened: OpenSource,
        doomed: Mapping[StepName, DeleteIntent],
        rests: Collection[StepName],
        begun: Collection[StepName],
        generation: int,
    ) -> Deletions:
        """Deletes snapshots, unless the manager is superseded. A failure does not stop the others.

        Args:
            rests: Names of which folders without a commit object go, and intents. Without an intent
                a complete attempt stays: it may have lost its commit object.
            begun: Names with an intent of an earlier pass.
        """
        storage, result = opened.storage, Deletions()

        async def intend(name: StepName) -> None:
            await storage.put(intent_key(name), [memoryview(encode_record(doomed[name]))])

        async def delete(name: StepName) -> None:
            commit = await find_commit(storage, folder=str(name))
            # As late as possible: what a later manager restores from must not go.
            if await self.is_superseded(opened, generation):
                result.is_superseded = True
            elif (
                name not in doomed and name not in begun and await self._has_complete(opened, name)
            ):
                logger.info("%s/%s: kept, `actorsnap recover` can use it", self.url, name)
            elif commit is None or (name in doomed and commit.attempt == doomed[name].attempt):
                if commit is not None:
                    await storage.delete([f"{name}/{COMMIT_KEY}"])
                await storage.delete_folder(str(name))
                self._commits.pop(name, None)
                if name in doomed:
                    result.deleted.append(name)
            await storage.delete([intent_key(name)])

        async def attempt(work: Callable[[StepName], Awaitable[None]], name: StepName) -> None:
            try:
                await work(name)
            except Exception as error:
                result.failed[name] = error

        await for_each(doomed, partial(attempt, intend), at_once=MAX_SMALL_READS)
        remaining = [name for name in (*doomed, *rests) if name not in result.failed]
        await for_each(remaining, partial(attempt, delete), at_once=MAX_SMALL_READS)
        return result

    async def _has_complete(self, opened: OpenSource, name: StepName) -> bool:
        storage, run_blocking = opened.storage, opened.errands.run_blocking
        for attempt in await storage.list_folders(str(name)):
            if await is_complete(storage, run_blocking, f"{name}/{attempt}"):
                return True
        return False


def stored_step(name: StepName, commit: Commit) -> StoredStep:
    """Returns the facts that policies judge by."""
    noted = commit.metadata.get(METADATA_KEY)
    metrics = noted.get("metrics") if isinstance(noted, dict) else None
    return StoredStep(
        name=name,
        created_s=datetime.fromisoformat(commit.created).timestamp(),
        metrics={
            key: number
            for key, value in (metrics if isinstance(metrics, dict) else {}).items()
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


def damage_of(problems: Sequence[ActorSnapError], name: StepName) -> str:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{problems[0]}{more}" if problems else f"{name} is damaged"


def _join(url: str, name: StepName) -> str:
    return f"{url.rstrip('/')}/{name}"
