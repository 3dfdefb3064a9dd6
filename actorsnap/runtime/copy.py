# SPDX-License-Identifier: Apache-2.0
"""The script of ``Snapshot.copy_to``.

The copy has the source's object keys, so manifests and commit object are byte-identical. Each byte
in transit is compared with the source's checksums, which the destination gets, too.

A garbage collection at the destination would take the attempt for dead. So the copy has its own
attempt, whose claim protects the copied one and lists its complete objects for a resume
(``docs/format.md``, "Claims"). Only one copy at a time writes an attempt.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import msgspec

from actorsnap.actors.abandonable import first_error, garbage_left
from actorsnap.actors.commit import commit_alone
from actorsnap.actors.items import Pace
from actorsnap.actors.snapshot_reader import find_commit, missing_is_damage, read_intact
from actorsnap.errors import (
    ChecksumMismatch,
    FormatError,
    NotASnapshot,
    ObjectExists,
    ObjectNotFound,
    StorageError,
    UnsupportedFormat,
    call_user_code,
)
from actorsnap.format.checksum import combine, crc32c
from actorsnap.format.layout import decode_copy_claim
from actorsnap.format.manifest import COMMIT_KEY, Commit, ManifestRecord, RankManifest
from actorsnap.format.owners import owners_key
from actorsnap.log import Log
from actorsnap.options import chunk_within
from actorsnap.planning.copy import (
    ByteRange,
    CopyPlan,
    ObjectCopy,
    data_copies,
    plan_copy,
    reusable,
    split_writes,
)
from actorsnap.planning.survey import Batch, Survey, holdings_of, reduced
from actorsnap.planning.transfers import FIRST_AT_ONCE
from actorsnap.runtime.bars import Amount, shown
from actorsnap.runtime.copy_claim import CopyClaim, naming_side
from actorsnap.runtime.host import Host, Script
from actorsnap.runtime.location import Location, check_destination, check_flag
from actorsnap.runtime.maintenance import Claims, collect_garbage, find_attempts, find_claims
from actorsnap.runtime.manifests import ManifestStream, OwnerCheck
from actorsnap.runtime.source import OpenSource, Source, begins_anew, opened_storage
from actorsnap.runtime.texts import size_text
from actorsnap.storage.base import ObjectWriter, Storage, for_each

if TYPE_CHECKING:
    from actorsnap.runtime.convert import Conversion

logger = Log(__name__)

SOURCE = "the copy's source"
"""Beginning of the details of errors at the source."""

_UNCLAIMED = (
    "objects of the same attempt are there, and `actorsnap cp` did not write them. If they are "
    "complete, `actorsnap recover` makes a snapshot of them; else delete them by `actorsnap rm "
    "--garbage` (by `actorsnap rm` where the commit object is damaged), or copy to another path"
)


class CopyEventKind(StrEnum):
    """Kinds of ``CopyEvent``."""

    BEGUN = "begun"
    MOVED = "moved"
    COPIED = "copied"
    SKIPPED = "skipped"
    COMMITTED = "committed"


class CopyEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a copy.

    Attributes:
        kind: ``begun``: the amount of work is known. ``moved``: bytes have arrived. ``copied``: an
            object is complete. ``skipped``: an object was complete before. ``committed``: the last
            event.
        key: Key of the object. Empty if the event concerns no object.
        nbytes: Size of the object, or bytes moved. Otherwise 0.
        done_bytes: Bytes of the snapshot that are copied so far. Skipped bytes count as copied.
        total_bytes: Bytes of the whole snapshot.
    """

    kind: CopyEventKind
    key: str = ""
    nbytes: int = 0
    done_bytes: int = 0
    total_bytes: int = 0


class CopyReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a copy.

    Attributes:
        attempt: Name of the attempt, the same on both sides.
        was_there: True if the copy was already committed, so nothing was done.
        num_copied: Number of objects sent.
        copied_bytes: Size of the objects sent.
        num_skipped: Number of objects that an interrupted copy had completed.
        skipped_bytes: Size of the objects that an interrupted copy had completed.
    """

    attempt: str
    was_there: bool = False
    num_copied: int = 0
    copied_bytes: int = 0
    num_skipped: int = 0
    skipped_bytes: int = 0


@begins_anew
def copy(
    source: Source,
    to: Location,
    *,
    overwrite: bool,
    on_event: Callable[[CopyEvent], object] | None = None,
    pace: Pace | None = None,
    progress: bool = False,
) -> Script[CopyReport]:
    """Copies a snapshot. Calls ``on_event`` on worker threads, one at a time.

    Args:
        pace: Paces the chunks.
    """
    check_flag("progress", progress)
    latest = CopyEvent(kind=CopyEventKind.BEGUN)

    def note(event: CopyEvent) -> None:
        nonlocal latest
        latest = event
        if on_event is not None:
            on_event(event)

    script = _copy(source, to, overwrite, note if progress else on_event, pace)
    return (
        yield from shown(
            script,
            lambda: [Amount("copying", latest.done_bytes, latest.total_bytes)],
            source.location.display_url,
            is_on=progress,
        )
    )


def _copy(
    source: Source,
    to: Location,
    overwrite: bool,
    on_event: Callable[[CopyEvent], object] | None,
    pace: Pace | None,
) -> Script[CopyReport]:

    async def step(host: Host) -> CopyReport:
        copier = host.resources.attempts.new()
        try:
            async with source.opened(host, "copy") as opened:
                errands = opened.errands
                await errands.run(errands.run_blocking, check_destination, to)
                async with opened_storage(host, to, errands, scratch=str(copier)) as target:
                    job = _Copy(opened, target, str(copier), on_event, pace)
                    errands.how_far = job.how_far
                    return await errands.run(job.run, overwrite)
        finally:
            host.resources.attempts.end(copier)

    report: CopyReport = yield step
    return report


@dataclass(eq=False, repr=False)
class _Copy:
    opened: OpenSource
    target: Storage
    copier: str
    on_event: Callable[[CopyEvent], object] | None
    pace: Pace | None

    def __post_init__(self) -> None:
        opened = self.opened
        self._host, self._storage, self._errands = opened.host, opened.storage, opened.errands
        self._reporting = anyio.Lock()
        self._attempt = ""  # these two are set by ``run``
        self._claim: CopyClaim
        self._stream: ManifestStream  # these three by ``_plan``
        self._batches: list[Batch] = []
        self._first: list[ObjectCopy] = []
        self._num_copied = self._copied_bytes = 0
        self._num_skipped = self._skipped_bytes = 0
        self._done_bytes = self._total_bytes = 0
        options, budget = opened.source.options, opened.host.resources.budget
        self._chunk_bytes = chunk_within(options.chunk_bytes, budget.limit_bytes)
        self._at_once = min(options.num_uploaders, FIRST_AT_ONCE)
        self._moving = anyio.CapacityLimiter(self._at_once)

    def how_far(self) -> str:
        """Describes the bytes that were copied; empty if there are none."""
        if not self._done_bytes:
            return ""
        text = f"{size_text(self._done_bytes)} of {size_text(self._total_bytes)} were copied"
        if self.opened.reader.foreign is None:
            text += "; the next copy continues after the complete objects"
        return text

    async def run(self, overwrite: bool) -> CopyReport:
        """Runs the copy.

        Raises:
            ActorSnapError: nothing was committed; a later copy may resume.
        """
        with self._reading():
            commit = await self.opened.reader.commit()
        if self.opened.reader.foreign is not None:
            return await self._convert(commit, overwrite)
        with self._reading():
            plan = await self._plan(commit)
        self._attempt = commit.attempt
        self._claim = CopyClaim(self._host, self.target, self.copier, commit.attempt, self._errands)
        there = CopyReport(attempt=commit.attempt, was_there=True)
        if await self._is_there(commit, plan, overwrite):
            return there
        if await self._has_unclaimed():
            # Another copy may have committed.
            if await self._is_there(commit, plan, overwrite):
                return there
            # Before the first claim: with one, the next copy would adopt these objects.
            raise self._claim.refused(_UNCLAIMED)
        try:
            async with anyio.create_task_group() as tasks:
                await self._claim.renew()
                tasks.start_soon(self._claim.keep)
                earlier = await self._claim.take_turn()
                was_there = await self._is_there(commit, plan, overwrite)
                if not was_there:
                    await self._perform(commit, plan, earlier, overwrite)
                tasks.cancel_scope.cancel()
        except BaseException as error:
            await self._leave(error)
            raise
        await self._clean_up(self._claim.withdraw)
        if was_there:
            return there
        return CopyReport(
            attempt=commit.attempt,
            num_copied=self._num_copied,
            copied_bytes=self._copied_bytes,
            num_skipped=self._num_skipped,
            skipped_bytes=self._skipped_bytes,
        )

    async def _leave(self, error: BaseException) -> None:
        """After a failure: withdraws the claim, unless it protects objects for a resume."""
        claim = self._claim
        if not claim.has_objects:
            await self._clean_up(self._withdraw_if_empty)
        elif not claim.is_current:
            await self._clean_up(claim.renew)
        if claim.has_objects and isinstance(error, Exception):
            first_error(error).add_note(
                f"actorsnap: complete objects in {self.target.url} stay for the next copy; "
                "`actorsnap rm --garbage` deletes them"
            )

    async def _clean_up(self, step: Callable[[], Awaitable[None]]) -> None:
        await self._errands.clean_up(step, garbage_left(self.target.url))

    async def _withdraw_if_empty(self) -> None:
        if not await self._sizes():
            await self._claim.withdraw()

    async def _convert(self, source: Commit, overwrite: bool) -> CopyReport:
        """Copies a checkpoint of another format."""
        self._attempt = self.copier
        await self._is_there(source, CopyPlan(sizes={}, whole=()), overwrite)

        async def note_moved(key: str, nbytes: int) -> None:
            await self._report_event(CopyEventKind.MOVED, key, nbytes)

        async def note_copied(key: str, nbytes: int) -> None:
            self._num_copied += 1
            self._copied_bytes += nbytes
            await self._report_event(CopyEventKind.COPIED, key, nbytes)

        # With torch, which the uploader process lacks and a snapshot does not need.
        convert = await self._errands.run_blocking(import_module, "actorsnap.runtime.convert")
        job: Conversion = convert.Conversion(
            self.opened, self.target, self.copier, on_moved=note_moved, on_copied=note_copied
        )
        await self._errands.run_blocking(job.plan)
        self._total_bytes = job.total_bytes
        await self._report_event(CopyEventKind.BEGUN)
        try:
            commit = await job.run()
            with self._writing():
                replaced, was_vacant = await self._find_replaced(overwrite)
        except BaseException:
            await self._clean_up(self._delete_attempt)
            raise
        try:
            with self._writing():
                await commit_alone(self.target, commit, overwrite=overwrite)
        except ObjectExists:
            await self._clean_up(self._delete_attempt)
            raise
        # It was compared before the commit; a change from now on is of no interest.
        self.opened.reader.foreign = None
        logger.info("%s: committed a conversion of %s", self.target.url, self._storage.url)
        await self._clean_up(partial(self._collect, replaced, was_vacant))
        await self._report_event(CopyEventKind.COMMITTED)
        return CopyReport(
            attempt=commit.attempt, num_copied=self._num_copied, copied_bytes=self._copied_bytes
        )

    async def _delete_attempt(self) -> None:
        await self.target.delete_folder(self._attempt)

    async def _collect(self, replaced: Sequence[str], was_vacant: bool) -> None:
        await collect_garbage(
            self._host,
            self.target,
            committed=self._attempt,
            superseded=replaced,
            was_vacant=was_vacant,
        )

    async def _plan(self, commit: Commit) -> CopyPlan:
        reader = self.opened.reader
        survey, records = Survey(), list[ManifestRecord]()
        check = await OwnerCheck.begin(reader, commit)

        def take(manifest: RankManifest) -> None:
            holdings = holdings_of(manifest)
            survey.add(manifest, holdings)
            check.add(manifest, holdings)

        self._stream = ManifestStream(reader, commit.attempt, commit, range(commit.world_size))
        await self._stream.each(take, on_record=records.append)
        for error in (*survey.contradictions, *check.problems):
            raise error
        owners = None if check.encoded is None else (owners_key(commit.attempt), check.encoded)
        plan = plan_copy(survey.objects.values(), records, owners)
        self._batches = [*survey.batches()]
        # Of a small snapshot, all is checked before anything is written.
        self._first = await self._copies_of(self._batches[0]) if self._batches else []
        return plan

    async def _copies_of(self, batch: Batch) -> list[ObjectCopy]:
        keys = frozenset(batch.keys)
        parts: list[RankManifest] = []
        await self._stream.each(lambda m: parts.append(reduced(m, keys)), batch.ranks)
        return await self._host.run_blocking(data_copies, parts, keys)

    async def _perform(
        self, commit: Commit, plan: CopyPlan, earlier: Claims, overwrite: bool
    ) -> None:
        self._total_bytes = plan.total_bytes
        await self._report_event(CopyEventKind.BEGUN)
        kept = await self._resume(plan, earlier)
        for number, batch in enumerate(self._batches):
            if number == 0:
                copies, self._first = self._first, []
            else:
                with self._reading():
                    copies = await self._copies_of(batch)
            await self._copy_all(copies, kept)
        await self._copy_all(plan.whole, kept)
        await self._check_complete(plan)
        replaced, was_vacant = await self._commit(commit, overwrite)
        logger.info("%s: committed a copy of %s", self.target.url, self._storage.url)

        async def collect() -> None:
            for copier in earlier.copies[self._attempt]:
                if copier != self.copier:
                    await self.target.delete_folder(copier)
            await self._collect(replaced, was_vacant)

        await self._clean_up(collect)
        await self._report_event(CopyEventKind.COMMITTED)

    async def _is_there(self, commit: Commit, plan: CopyPlan, overwrite: bool) -> bool:
        """Returns whether the whole snapshot is committed at the destination.

        Raises:
            ObjectExists: another or a damaged snapshot is there and ``overwrite`` is false; or this
                one is damaged or has another commit object.
            UnsupportedFormat, NotASnapshot: this release cannot replace it.
        """
        what = "another snapshot is committed there"
        try:
            with self._writing():
                older = await find_commit(self.target)
            if older is None:
                return False
            if older.attempt == commit.attempt:
                # Damaged objects would be replaced while committed.
                await self._check_committed(older, commit, plan)
                return True
        except (UnsupportedFormat, NotASnapshot):
            raise
        except FormatError as error:
            what = f"there is a damaged snapshot ({error})"
        if not overwrite:
            raise ObjectExists(
                op="copy",
                key=COMMIT_KEY,
                backend=self.target.url,
                detail=f"{what}. Copy to another path, delete it, or pass overwrite=True (on the "
                "command line --overwrite): it stays valid until the copy is committed",
            )
        return False

    async def _check_committed(self, there: Commit, commit: Commit, plan: CopyPlan) -> None:
        """Raises ObjectExists if the committed attempt is not what a copy would write."""
        if there != commit:
            what = "this snapshot is committed there, but the commit object differs (recovered?)"
        else:
            lacking = await self._lacking(plan)
            if lacking is None:
                return
            what = f"this snapshot is committed there, but {lacking} is missing or of another size"
        raise ObjectExists(
            op="copy",
            key=COMMIT_KEY,
            backend=self.target.url,
            detail=f"{what}. Verify the source (`actorsnap verify --full`), delete the copy "
            "(`actorsnap rm`) and copy again, or copy to another path",
        )

    async def _has_unclaimed(self) -> bool:
        """Returns whether objects of the attempt are there without a claim."""
        if not await self._sizes():
            return False
        with self._writing():
            # The first claim is enough.
            for owner in await find_attempts(self.target):
                claims = await find_claims(self.target, [owner])
                if self._attempt in claims.copies:
                    return False
        return True

    async def _resume(self, plan: CopyPlan, earlier: Claims) -> frozenset[str]:
        """Deletes unusable objects of an interrupted copy; returns the keys of the others.

        Raises:
            StorageError: no copy has written the objects.
        """
        found = await self._sizes()
        claims = earlier.copies[self._attempt]
        others = [info for name, info in claims.items() if name != self.copier]
        if found and not others:
            await self._clean_up(self._claim.withdraw)
            raise self._claim.refused(_UNCLAIMED)
        if not others:
            return frozenset()
        with self._writing():
            noted: list[str] = []
            for info in others:
                try:
                    noted += decode_copy_claim(await self.target.get(info.key))
                except ObjectNotFound:
                    logger.debug("%s: %s is gone", self.target.url, info.key)
            kept = reusable(plan, found, noted)
            # Some keys are not listed, but may exist partially.
            keys = dict.fromkeys([*found, *(key for key, _ in plan.objects)])
            await self.target.delete([key for key in keys if key not in kept])
        # The next resume needs these, too.
        self._claim.add(kept)
        return kept

    async def _check_complete(self, plan: CopyPlan) -> None:
        """Checks all objects before the commit: a forced deletion ignores claims.

        Raises:
            StorageError: objects are missing, or others may take this copy for dead.
        """
        num_done = self._num_copied + self._num_skipped
        num_objects = len(plan.sizes) + len(plan.whole)
        if num_done != num_objects:
            raise self._incomplete("", f"{num_done} of {num_objects} objects")
        if lacking := await self._lacking(plan):
            raise StorageError(
                op="copy",
                key=lacking,
                backend=self.target.url,
                detail="the object was deleted or changed before the copy was committed",
            )
        self._claim.check_renewed()

    async def _lacking(self, plan: CopyPlan) -> str | None:
        """Returns an object that is missing at the destination, or has another size there."""
        found = await self._sizes()
        return next((key for key, size in plan.objects if found.get(key) != size), None)

    async def _sizes(self) -> dict[str, int]:
        with self._writing():
            listed = self.target.list(f"{self._attempt}/")
            return {info.key: info.size async for info in listed}

    async def _commit(self, commit: Commit, overwrite: bool) -> tuple[list[str], bool]:
        """Commits the copy.

        Returns:
            The replaced attempt, if known, and whether there was no commit object before.
        """
        try:
            with self._writing():
                replaced, was_vacant = await self._find_replaced(overwrite)
                await commit_alone(self.target, commit, overwrite=overwrite)
        except ObjectExists:
            await self._clean_up(self._discard)
            raise
        return replaced, was_vacant

    async def _find_replaced(self, overwrite: bool) -> tuple[list[str], bool]:
        """Returns the attempt that a commit replaces; see ``_commit``."""
        if not overwrite:
            return [], True
        try:
            older = await find_commit(self.target)
        except ChecksumMismatch:
            logger.info("%s: replacing a damaged snapshot", self.target.url)
            return [], False
        return ([], True) if older is None else ([older.attempt], False)

    async def _discard(self) -> None:
        """Deletes attempt and claim."""
        self._claim.clear()
        await self.target.delete_folder(self._attempt)
        await self._claim.withdraw()

    async def _copy_all(self, objects: Sequence[ObjectCopy], kept: frozenset[str]) -> None:
        async def perform(copied: ObjectCopy) -> None:
            if copied.key in kept and await self._is_whole(copied):
                self._num_skipped += 1
                self._skipped_bytes += copied.size
                await self._report_event(CopyEventKind.SKIPPED, copied.key, copied.size)
            else:
                await self._copy_one(copied, is_left=copied.key in kept)
                self._num_copied += 1
                self._copied_bytes += copied.size
                await self._report_event(CopyEventKind.COPIED, copied.key, copied.size)

        at_once = self.target.capabilities.preferred_parallel_objects
        await for_each(objects, perform, at_once=at_once)

    async def _copy_one(self, copied: ObjectCopy, *, is_left: bool) -> None:
        with self._writing():
            if is_left:
                self._claim.remove(copied.key)
                await self.target.delete([copied.key])
            writer = await self.target.writer(copied.key, copied.size)
        moved_bytes = 0

        async def move(spans: tuple[ByteRange, ...]) -> None:
            nonlocal moved_bytes
            await self._move(copied, spans, writer)
            moved_bytes += spans[-1].stop - spans[0].start

        try:
            await self._for_each_write(copied, move)
            if moved_bytes != copied.size:
                raise self._incomplete(copied.key, f"{moved_bytes} of {copied.size} bytes")
            with self._writing():
                await writer.complete()
        except BaseException:
            await self._clean_up(writer.abort)
            raise
        self._claim.add([copied.key])

    async def _is_whole(self, copied: ObjectCopy) -> bool:
        """Returns whether all bytes at the destination match."""

        async def check(spans: tuple[ByteRange, ...]) -> None:
            nbytes = spans[-1].stop - spans[0].start
            with await self._host.resources.budget.lease(nbytes) as lease:
                with self._writing():
                    await self._read(self.target, copied, spans, lease.view)

        is_whole = True
        try:
            await self._for_each_write(copied, check)
        except* ChecksumMismatch as group:
            logger.info("sent again: %s", group.exceptions[0])
            is_whole = False
        return is_whole

    async def _for_each_write(
        self, copied: ObjectCopy, perform: Callable[[tuple[ByteRange, ...]], Awaitable[None]]
    ) -> None:
        """Calls ``perform`` for each write, several at a time."""
        limits = self.target.capabilities
        writes = split_writes(
            copied,
            chunk_bytes=self._chunk_bytes,
            min_write_bytes=limits.min_write_bytes,
            max_writes=limits.max_writes,
        )

        async def in_turn(spans: tuple[ByteRange, ...]) -> None:
            async with self._moving:
                await perform(spans)

        await for_each(writes, in_turn, at_once=self._at_once)

    async def _move(
        self, copied: ObjectCopy, spans: tuple[ByteRange, ...], writer: ObjectWriter
    ) -> None:
        start = spans[0].start
        nbytes = spans[-1].stop - start
        # The memory first: a chunk that waits for memory would prolong the burst of the uploaders,
        # and these may hold the memory until the burst ends.
        with await self._host.resources.budget.lease(nbytes) as lease:
            async with self._working():
                with self._reading():
                    checksum = await self._read(self._storage, copied, spans, lease.view)
                with self._writing():
                    await writer.write_at(start, [lease.view], checksum)
        await self._report_event(CopyEventKind.MOVED, copied.key, nbytes)

    async def _read(
        self, storage: Storage, copied: ObjectCopy, spans: tuple[ByteRange, ...], view: memoryview
    ) -> int:
        """Reads into ``view`` and verifies; returns the checksum.

        Raises:
            ChecksumMismatch: bytes are missing or differ.
        """

        async def read() -> int:
            await storage.read_into(copied.key, spans[0].start, [view])
            return await self._errands.run_blocking(_verify_spans, copied.key, spans, view)

        with missing_is_damage(copied.key):
            return await read_intact(storage, read)

    async def _report_event(self, kind: CopyEventKind, key: str = "", nbytes: int = 0) -> None:
        if kind in (CopyEventKind.MOVED, CopyEventKind.SKIPPED):
            self._done_bytes += nbytes
        if self.on_event is None:
            return
        async with self._reporting:
            event = CopyEvent(
                kind=kind,
                key=key,
                nbytes=nbytes,
                done_bytes=self._done_bytes,
                total_bytes=self._total_bytes,
            )
            try:
                await self._host.run_blocking(call_user_code, self.on_event, event)
            except Exception as error:
                error.add_note("actorsnap: on_event of the copy raised this")
                raise

    def _working(self) -> AbstractAsyncContextManager[object]:
        return nullcontext() if self.pace is None else self.pace.working()

    def _reading(self) -> AbstractContextManager[None]:
        return naming_side(SOURCE, self._storage.url)

    def _writing(self) -> AbstractContextManager[None]:
        return naming_side("the copy's destination", self.target.url)

    def _incomplete(self, key: str, what: str) -> StorageError:
        detail = f"only {what} were copied, and nothing failed"
        return StorageError(op="copy", key=key, backend=self.target.url, detail=detail)


def _verify_spans(key: str, spans: tuple[ByteRange, ...], view: memoryview) -> int:
    """Verifies span by span; returns the total checksum."""
    first = spans[0].start
    total = 0
    for span in spans:
        if crc32c(view[span.start - first : span.stop - first]) != span.crc32c:
            raise ChecksumMismatch(
                key=key,
                detail=f"the bytes from {span.start} up to {span.stop} differ from what was saved",
            )
        total = combine(total, span.crc32c, span.stop - span.start)
    return total
