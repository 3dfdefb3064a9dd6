# SPDX-License-Identifier: Apache-2.0
"""Restores a lost commit object.

Implements "A lost commit object" of ``docs/format.md``. Checks every manifest and byte before it
writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from shlex import quote

import msgspec

from actorsnap.actors.commit import check_stored, commit_alone
from actorsnap.actors.snapshot_reader import find_commit, read_commits
from actorsnap.errors import (
    ActorSnapError,
    ChecksumMismatch,
    FormatError,
    NotASnapshot,
    ObjectExists,
    UsageError,
)
from actorsnap.format.layout import Attempt, manifest_key, parse_manifest_key
from actorsnap.format.manifest import (
    COMMIT_KEY,
    OLDER_COMMIT_KEY,
    Commit,
    ManifestRecord,
    RankManifest,
    SaveRecord,
    decode_commit,
    encode_commit,
    features_in,
)
from actorsnap.format.tables import decode_lone_rank_manifest
from actorsnap.log import Log
from actorsnap.runtime.host import Host, Script
from actorsnap.runtime.location import check_flag
from actorsnap.runtime.maintenance import find_attempts, find_claims, find_collectable
from actorsnap.runtime.manifests import ManifestStream, OwnerCheck, index_progress
from actorsnap.runtime.process import host_id
from actorsnap.runtime.source import OpenSource, Source, opened_storage
from actorsnap.runtime.verify import DataCheck, load_entry_check
from actorsnap.storage.base import Storage

logger = Log(__name__)

_MAX_NOTES = 20
"""Limit of an error's notes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverCall:
    attempt: str | None = None
    world_size: int | None = None
    force: bool = False
    replace_damaged: bool = False

    def __post_init__(self) -> None:
        if self.attempt is not None and not isinstance(self.attempt, str):
            raise UsageError(f"attempt must be the name of a folder, not {self.attempt!r}")
        if self.world_size is not None and (
            type(self.world_size) is not int or self.world_size < 1
        ):
            raise UsageError(f"world_size must be an integer of at least 1: {self.world_size!r}")
        check_flag("force", self.force)
        check_flag("replace_damaged", self.replace_damaged)


class RecoverReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a recovery.

    Attributes:
        attempt: Name of the recovered attempt.
        world_size: Number of ranks that saved.
        step: The ``step`` passed to ``take``.
        created: Start of the attempt, in UTC and ISO 8601 format.
        num_objects: Number of data objects.
        nbytes: Bytes compared with checksums.
    """

    attempt: str
    world_size: int
    step: int | None
    created: str
    num_objects: int
    nbytes: int


def recover(
    source: Source, call: RecoverCall, *, progress: Callable[[int, int], None] | None = None
) -> Script[RecoverReport]:
    """Writes the commit object again. ``progress`` is as in ``verify``."""

    async def step(host: Host) -> RecoverReport | list[ActorSnapError]:
        async with source.opened(host, "recover") as opened:
            errands = opened.errands
            job = _Recovery(opened, call)
            found = await errands.run(job.find, progress)
            if isinstance(found, list):
                return found
            commit, report = found
            # An unfinished write goes to the attempt's folder.
            location, scratch = source.location, commit.attempt
            async with opened_storage(host, location, errands, scratch=scratch) as target:
                await errands.run(job.write, target, commit)
            return report

    ended: RecoverReport | list[ActorSnapError] = yield step
    if isinstance(ended, list):
        raise _join_problems(ended, source.location.display_url)
    logger.info("%s: recovered %s", source.location.display_url, ended.attempt)
    return ended


def _join_problems(problems: Sequence[ActorSnapError], url: str) -> ActorSnapError:
    """Returns the first problem, with the others as notes."""
    error = problems[0]
    for other in problems[1 : _MAX_NOTES + 1]:
        error.add_note(str(other))
    if len(problems) > _MAX_NOTES + 1:
        error.add_note(f"... and {len(problems) - _MAX_NOTES - 1} more")
    error.add_note(f"recover of {url}: nothing was written")
    return error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """Possibly the lost snapshot.

    Attributes:
        ranks: With a manifest, sorted.
        nbytes: Size of its folder.
        save: None: by a development version before 0.1.
        problem: Why it cannot be the snapshot.
    """

    attempt: Attempt
    ranks: Sequence[int]
    nbytes: int
    save: SaveRecord | None = None
    problem: ActorSnapError | None = None

    def __str__(self) -> str:
        hours = (time.time() - self.attempt.created_s) / 3600
        step = "" if self.save is None or self.save.step is None else f", step {self.save.step}"
        return f"{self.attempt}: {hours:.1f} hours old, {self.nbytes} bytes{step}"


class _Recovery:
    def __init__(self, opened: OpenSource, call: RecoverCall) -> None:
        self._opened = opened
        self._storage = opened.storage
        self._call = call
        self._sizes: list[int] = []  # of rank manifests

    async def find(
        self, progress: Callable[[int, int], None] | None
    ) -> tuple[Commit, RecoverReport] | list[ActorSnapError]:
        """Returns the commit object to write and a report, or the damage.

        Raises:
            UsageError: The caller has to choose or confirm.
            ObjectExists: A snapshot is committed.
            NotASnapshot: There is nothing to recover.
        """
        try:
            await self._check_replaceable()
            chosen = await self._choose()
            await self._refuse_running(chosen.attempt)
            await self._opened.errands.run_blocking(load_entry_check)
            check = DataCheck(self._opened, level="full", progress=progress)
            stream, commit, problems = await self._read_manifests(chosen, check, progress)
            if problems:
                return problems
            commit = await self._with_owners(commit, stream)
            # Raises if this release could not read it.
            decode_commit(encode_commit(commit))
        except ChecksumMismatch as error:
            return [error]  # raised inside ``opened``, it would look like a deleted snapshot
        if problems := await check.run(stream, is_complete=True):
            return problems
        return commit, RecoverReport(
            attempt=commit.attempt,
            world_size=commit.world_size,
            step=commit.step,
            created=commit.created,
            num_objects=check.num_objects,
            nbytes=check.nbytes,
        )

    async def _with_owners(self, commit: Commit, stream: ManifestStream) -> Commit:
        """Leaves out a damaged or wrong owner index: the snapshot is readable without it."""
        try:
            check = await OwnerCheck.begin(self._opened.reader, commit)
            if check.index is not None:
                await stream.each(check.add)
            for error in check.problems:
                raise error
        except FormatError as error:
            logger.warning("%s; the snapshot is recovered without it", error)
            return commit.without_owners()
        return commit

    async def write(self, target: Storage, commit: Commit) -> None:
        """Creates the commit object, or replaces the damaged one.

        Raises:
            ObjectExists: Another snapshot was committed meanwhile.
            ObjectNotFound: The attempt was deleted meanwhile.
        """
        await check_stored(target, commit.attempt, self._sizes)
        commits = await read_commits(target)
        is_damaged = isinstance(commits.newer, FormatError)
        if is_damaged:
            await self._check_replaceable()  # raises if the caller did not ask to replace it
        await commit_alone(target, commit, overwrite=is_damaged)
        if commits.older is not None:
            # The other name is valid now. A damaged object here would count if only the newer were
            # lost.
            await target.delete([OLDER_COMMIT_KEY])

    async def _check_replaceable(self) -> None:
        """Checks that the commit object is missing, or damaged and replaceable.

        Raises:
            ObjectExists: It is intact.
            ChecksumMismatch: It is damaged, and may not be replaced.
        """
        try:
            commit = await find_commit(self._storage)
        except ChecksumMismatch as error:
            if self._call.replace_damaged:
                return
            error.add_note(
                "The damaged commit object named one of the attempts there. "
                "--replace-damaged, or recover(replace_damaged=True) in Python, replaces "
                "it with one for the complete attempt"
            )
            raise
        if commit is not None:
            raise ObjectExists(
                op="recover",
                key=COMMIT_KEY,
                backend=self._storage.url,
                detail=f"the commit object is intact and names {commit.attempt}: there is nothing "
                "to recover. If `actorsnap verify --full` finds damage, delete the snapshot with "
                "`actorsnap rm`, and copy a backup to its place with `actorsnap cp`",
            )

    async def _choose(self) -> _Candidate:
        """Returns the only complete attempt.

        Raises:
            UsageError: There are several; or the world size is needed.
            NotASnapshot, ChecksumMismatch, FormatError: No attempt is complete.
        """
        names = await find_attempts(self._storage)
        if not names:
            await self._opened.reader.own_commit()  # raises
            await self._check_replaceable()  # raises if a commit came just now
        if self._call.attempt is not None:
            if self._call.attempt not in names:
                raise UsageError(
                    f"there is no attempt {self._call.attempt!r} in {self._storage.url}, but "
                    f"{', '.join(names)}"
                )
            names = [self._call.attempt]
        found = [await self._examine(name) for name in names]
        complete = [each for each in found if each.problem is None]
        if len(complete) == 1:
            return complete[0]
        if complete:
            raise UsageError(
                f"{len(complete)} attempts in {self._storage.url} are complete; choose one by "
                "attempt=NAME (--attempt NAME):\n" + "\n".join(map(str, complete))
            )
        found.sort(key=lambda each: (bool(each.ranks), each.attempt.created_s), reverse=True)
        first, *others = [each.problem for each in found if each.problem is not None]
        for problem in others[:_MAX_NOTES]:
            first.add_note(str(problem))
        raise first

    async def _examine(self, name: str) -> _Candidate:
        attempt = Attempt.parse(name)
        assert attempt is not None
        ranks: list[int] = []
        nbytes = 0
        async for info in self._storage.list(f"{name}/"):
            nbytes += info.size
            rank = parse_manifest_key(name, info.key)
            if rank is not None:
                ranks.append(rank)
        ranks.sort()
        save, problem = None, None
        try:
            if not ranks:
                url = self._opened.source.location.display_url
                raise NotASnapshot(
                    key=url,
                    detail=f"the attempt {name} cannot be recovered: its save or copy ended before "
                    f"all data was stored. `actorsnap rm --garbage {quote(url)}` frees its space",
                    found="unfinished",
                )
            manifest, _ = await self._opened.reader.use_manifest(
                manifest_key(name, ranks[0]), decode_lone_rank_manifest
            )
            save = None if isinstance(manifest.save, msgspec.UnsetType) else manifest.save
            self._check_ranks(name, ranks, save)
        except (FormatError, UsageError) as error:
            problem = error
        return _Candidate(attempt=attempt, ranks=ranks, nbytes=nbytes, save=save, problem=problem)

    def _check_ranks(self, name: str, ranks: Sequence[int], save: SaveRecord | None) -> None:
        """Raises unless there is a manifest per rank."""
        recorded = None if save is None else save.world_size
        given = self._call.world_size
        if recorded is None and given is None:
            count = len(ranks)
            raise UsageError(
                f"{name} in {self._storage.url} was saved by a development version, which "
                f"did not record the number of ranks. There are {count} rank manifests; if "
                f"{count} ranks saved it, pass world_size={count} (--world-size {count})"
            )
        if recorded is not None and given is not None and recorded != given:
            raise UsageError(
                f"{name} in {self._storage.url} was saved with world_size={recorded}, not "
                f"{given}: leave out world_size (--world-size)"
            )
        world_size = given or recorded or 0
        missing = next((n for n, rank in enumerate(ranks) if rank != n), len(ranks))
        if missing < world_size:
            raise ChecksumMismatch(
                key=manifest_key(name, missing),
                detail=f"the rank manifest is missing; {world_size} ranks saved",
            )
        if len(ranks) > world_size:
            raise FormatError(
                key=manifest_key(name, ranks[world_size]),
                detail=f"a rank manifest too many; {world_size} ranks saved",
            )

    async def _refuse_running(self, attempt: Attempt) -> None:
        """Raises UsageError if the attempt, or a copy of it to here, may still commit."""
        if self._call.force:
            return
        name = str(attempt)
        claims = await find_claims(self._storage, await find_attempts(self._storage))
        owners = [name, *claims.copies.get(name, ())]
        dead = await find_collectable(self._opened.host, owners)
        for owner in owners:
            made_by = Attempt.parse(owner)
            if owner in dead or made_by is None:
                continue
            verb = "saved" if owner == name else "copied"
            what = f"{name} in {self._storage.url} may still be {verb}"
            if made_by.host == host_id():
                why = f"process {made_by.pid} of this host is running"
            else:
                hours = (time.time() - made_by.created_s) / 3600
                why = f"another host began {hours:.1f} hours ago, and may go on until 24 are over"
            raise UsageError(
                f"{what}: {why}. If its job has ended, or these files are a copy of a snapshot, "
                "pass force=True (--force)"
            )

    async def _read_manifests(
        self,
        chosen: _Candidate,
        check: DataCheck,
        progress: Callable[[int, int], None] | None,
    ) -> tuple[ManifestStream, Commit, list[ActorSnapError]]:
        """Gives all manifests to ``check``; returns the commit object to write, and the damage."""
        reader, name = self._opened.reader, str(chosen.attempt)
        problems: list[ActorSnapError] = []
        records: list[ManifestRecord] = []
        saves: list[SaveRecord | None] = []  # of the first manifest
        features: set[str] = set()
        show = index_progress(len(chosen.ranks), progress)

        def note(record: ManifestRecord) -> None:
            records.append(record)
            show(record)

        def take(manifest: RankManifest) -> None:
            save = None if isinstance(manifest.save, msgspec.UnsetType) else manifest.save
            if not saves:
                saves.append(save)
            if _common_part(saves[0]) != _common_part(save):
                detail = "it is of another save: world size, features, fsync or step differ"
                problems.append(FormatError(key=records[-1].key, detail=detail))
            if save is None:
                features.update(features_in([manifest]))
            check.add(manifest)

        stream = ManifestStream(reader, name, None, chosen.ranks, problems.append)
        await stream.each(take, on_record=note)
        save = saves[0] if saves else None
        if save is None:
            save = SaveRecord(world_size=len(records), features=tuple(sorted(features)))
        self._sizes = [record.size for record in records]
        commit = save.commit(
            attempt=name,
            created=chosen.attempt.created,
            manifests=() if "tables" in save.features else tuple(records),
        )
        return stream, commit, problems


def _common_part(save: SaveRecord | None) -> SaveRecord | None:
    """Returns what is equal on all ranks."""
    return None if save is None else msgspec.structs.replace(save, metadata={})
