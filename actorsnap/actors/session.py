"""The participant actor: one rank's part in one save, from inventory to outcome.

It owns the rank's ``ParticipantMachine``, feeds it events, and performs its commands with a
staging actor and a pool of uploader actors under one cancel scope. What to do next is
never decided here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import anyio
import anyio.abc
from anyio.streams.memory import MemoryObjectReceiveStream

from actorsnap.actors.budget import Budget
from actorsnap.actors.errands import Errands, first_error
from actorsnap.actors.items import StagedChunk
from actorsnap.actors.reader import find_commit
from actorsnap.actors.staging import StagingActor
from actorsnap.actors.trace import Phase, ProgressBoard
from actorsnap.actors.uploader import ChecksumLedger, UploaderActor, checksums_of
from actorsnap.errors import ActorSnapError, ObjectNotFound, StorageError, UsageError
from actorsnap.format.checksum import crc32c
from actorsnap.format.layout import manifest_key
from actorsnap.format.manifest import (
    CompositeEntry,
    Entry,
    ObjectRecord,
    RankManifest,
    ViewEntry,
    encode_rank_manifest,
)
from actorsnap.planning.packing import (
    ObjectPlan,
    RankPlan,
    canonical,
    check_memory,
    pack,
    write_order,
)
from actorsnap.planning.save import Division, classes_of, copies_digest, sharded_digest, take_stock
from actorsnap.protocol.messages import Failure, Stage, Token
from actorsnap.protocol.participant import (
    AnnounceStaged,
    Begun,
    CancelRequested,
    ChunkStored,
    CompleteObject,
    CoordinatorLost,
    DiscardObjects,
    Finish,
    JoinObjects,
    Looked,
    LookForCommit,
    ManifestStored,
    ObjectCompleted,
    ObjectReleased,
    ObjectsOpened,
    ObjectWork,
    ParticipantCommand,
    ParticipantEvent,
    ParticipantMachine,
    Planned,
    ReleaseObject,
    Send,
    StagingEnded,
    StartStoring,
    StepFailed,
    StopWork,
    StoreManifest,
    TakeStock,
)
from actorsnap.state.capture import Captured, Leaf
from actorsnap.state.tensors import ByteSource, MemorySource, PartSource
from actorsnap.state.tree import part_path
from actorsnap.storage.base import ObjectWriter, Storage
from actorsnap.storage.many import for_each
from actorsnap.transport.base import Broken, Lost, ParticipantEnd

__all__ = ["ParticipantActor", "Remembered", "SaveSettings"]

logger = logging.getLogger(__name__)

_RELEASED = MemorySource(0, 0, None)
_LOOK_S = 10.0
"""Bound of the look whether a commit is visible, when nobody can tell any more."""

_MAX_OPENING = 16

_HEAD_START_S = 0.002
"""Uploaders leave the GIL and the CPUs to the trainer for so long after it was woken: else it
comes to run a switch interval (5 ms) later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSettings:
    """How a rank saves.

    Attributes:
        copies: Copy everything before it is stored, so that the trainer may go on.
        num_uploaders: Chunks hashed and written at once.
        num_copiers: Chunks copied at once.
    """

    copies: bool
    num_uploaders: int
    num_copiers: int


@dataclass(frozen=True, slots=True)
class Remembered:
    """What a rank knows from its group's last save.

    Attributes:
        plan: By its digest.
        division: How it tells what others may hold as well apart.
        sharded: Its ``Inventory.sharded``, which that holds for.
    """

    plan: tuple[bytes, RankPlan]
    division: Division
    sharded: bytes


class ParticipantActor:
    """Takes part in one save.

    Args:
        machine: Fresh.
        end: The transport's end of this rank.
        open_storage: Opens where the coordinator says; the storage stays the caller's.
        captured: The rank's state. Dropped as soon as it is staged and the manifest built. Or
            why there is none: then this rank only tells that.
        errands: Where all work of this rank runs that may hang.
        on_staged: Called when the trainer may overwrite its tensors.
        on_failure: Gets the exception behind a failure before anybody is told.
        remembered: From the group's last save.
        deadline: The loop's time when it gives up waiting for the coordinator's first word;
            None waits for ever.

    Attributes:
        remembered: For the next save; None before this one has a plan.
    """

    def __init__(
        self,
        *,
        machine: ParticipantMachine,
        end: ParticipantEnd,
        open_storage: Callable[[StartStoring], Awaitable[Storage]],
        captured: Captured | Failure,
        settings: SaveSettings,
        budget: Budget,
        errands: Errands,
        board: ProgressBoard,
        on_staged: Callable[[], None],
        on_failure: Callable[[BaseException], None],
        remembered: Remembered | None = None,
        deadline: float | None = None,
    ) -> None:
        self.remembered: Remembered | None = None
        self._before = remembered
        self._machine = machine
        self._end = end
        self._open_storage = open_storage
        self._storage: Storage  # once there is something to store
        self._captured = captured
        self._leaves: list[Leaf] = [] if isinstance(captured, Failure) else captured.leaves
        self._deadline = math.inf if deadline is None else deadline
        self._patience = anyio.CancelScope()
        self._settings = settings
        self._budget = budget
        self._errands = errands
        self._run_blocking = errands.run_blocking
        self._board = board
        self._on_staged = on_staged
        self._on_failure = on_failure
        # At most one event per chunk and object, and a few more, are under way.
        self._events_in, self._events_out = anyio.create_memory_object_stream[ParticipantEvent](64)
        self._control_in, self._control_out = anyio.create_memory_object_stream[ParticipantCommand](
            1
        )
        self._attempt = ""
        self._resumed: tuple[str, ...] = ()
        # Per scope, the indices of its leaves; the same order as in the inventory.
        self._scopes: list[list[int]] = []
        self._division: Division = None
        self._sharded = b""
        # Of the leaves that others may hold as well: taken once.
        self._checksums: dict[int, list[int]] = {}
        self._objects: tuple[ObjectPlan, ...] = ()
        self._number_of: dict[str, int] = {}
        self._ledgers: list[ChecksumLedger] = []
        self._writers: dict[int, ObjectWriter] = {}
        self._opened: list[anyio.Event] = []
        self._ended: set[int] = set()
        self._manifest_key: str | None = None
        self._work_scope = anyio.CancelScope()
        self._work_ended = anyio.Event()
        self._has_work = False
        self._has_stopped = False
        self._staged: MemoryObjectReceiveStream[StagedChunk] | None = None
        self._cancel_reason: str | None = None
        self._cancel_wanted = anyio.Event()
        self._outcome: Finish | None = None

    def request_cancel(self, reason: str) -> None:
        """Asks for an abort. The commit may win nevertheless. Call on the loop only."""
        if self._cancel_reason is None:
            self._cancel_reason = reason
            self._cancel_wanted.set()

    async def run(self) -> Failure | None:
        """Takes part until the outcome.

        Returns:
            None if committed, else why not. Never raises for an operating failure.
        Cancellation: writers are closed, objects discarded, as in an abort.
        """
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._receive_messages)
                tasks.start_soon(self._await_cancel)
                tasks.start_soon(self._await_deadline)
                await self._handle(await self._begin(), tasks)
                while self._outcome is None:
                    await self._handle(await self._events_out.receive(), tasks)
                tasks.cancel_scope.cancel()
        finally:
            if self._outcome is None:
                await self._discard_objects()
            # Errors and their frames may refer to this actor; the trainer's memory goes now.
            self._leaves, self._captured = [], Captured()
            self._events_in.close()
            self._events_out.close()
            self._control_in.close()
            self._control_out.close()
        assert self._outcome is not None
        return self._outcome.failure

    async def _begin(self) -> Begun | StepFailed:
        if isinstance(self._captured, Failure):
            return StepFailed(self._captured)
        return await self._run_blocking(self._take_first_stock, self._captured)

    async def _take_stock_again(self, division: Division) -> None:
        assert isinstance(self._captured, Captured)
        await self._post(await self._run_blocking(self._take_stock, self._captured, division))

    def _take_first_stock(self, captured: Captured) -> Begun:
        before, division = self._before, None
        if before is not None and before.sharded == sharded_digest(captured.sharded):
            division = before.division
        return self._take_stock(captured, division)

    def _take_stock(self, captured: Captured, division: Division) -> Begun:
        class_of = classes_of(captured.sharded, division)
        scopes: dict[tuple[int, ...] | None, list[int]] = {}
        classes: dict[int, list[int]] = {}
        items = [leaf.item for leaf in self._leaves]
        for index, leaf in enumerate(self._leaves):
            if leaf.scope != ():
                scopes.setdefault(leaf.scope, []).append(index)
            elif leaf.is_copied and leaf.item.path in class_of:
                classes.setdefault(class_of[leaf.item.path], []).append(index)
                if index not in self._checksums:
                    self._checksums[index] = checksums_of(leaf.source)
        found = list(scopes.items())
        copies = []
        for indices in classes.values():
            indices.sort(key=lambda index: canonical(items[index]))  # not as this rank has them
            found.append(((), indices))
            copies.append(copies_digest([self._checksums[index] for index in indices]))
        self._scopes, self._division = [indices for _, indices in found], division
        inventory, lists = take_stock(
            items, found, globs=captured.globs, sharded=captured.sharded, division=division
        )
        self._sharded = inventory.sharded
        plan = None if self._before is None else self._before.plan
        return Begun(inventory, lists, plan, captured.sharded, tuple(copies))

    async def _receive_messages(self) -> None:
        while True:
            match await self._end.receive():
                case Lost() as lost:
                    reason = (
                        f"rank {lost.rank}, which coordinates, was not heard for "
                        f"{lost.silent_s:.0f} s"
                    )
                    await self._post(CoordinatorLost(reason, lost.rank))
                case Broken() as broken:
                    await self._post(CoordinatorLost(broken.reason))
                    return
                case message:
                    await self._post(message)

    async def _await_cancel(self) -> None:
        await self._cancel_wanted.wait()
        await self._events_in.send(CancelRequested(self._cancel_reason or ""))

    async def _await_deadline(self) -> None:
        with self._patience:
            await anyio.sleep_until(self._deadline)
            reason = "timeout_s is over, and rank 0, which coordinates, has said nothing"
            await self._post(CoordinatorLost(reason, 0))

    async def _handle(self, event: ParticipantEvent, tasks: anyio.abc.TaskGroup) -> None:
        for command in self._machine.handle(event):
            match command:
                case Send():
                    await self._end.send(command.message)
                case TakeStock():
                    tasks.start_soon(
                        self._guard, Stage.JOIN, None, self._take_stock_again, command.division
                    )
                case StartStoring():
                    # From now on the coordinator's deadline counts, or that it is silent.
                    self._patience.cancel()
                    self._has_work = True
                    tasks.start_soon(self._work, command)
                case AnnounceStaged():
                    self._board.enter(Phase.STORING)
                    self._on_staged()
                case CompleteObject() | ReleaseObject() | JoinObjects() | StoreManifest():
                    await self._control_in.send(command)
                case LookForCommit():
                    tasks.start_soon(self._look_for_commit)
                case StopWork():
                    await self._stop_work()
                case DiscardObjects():
                    await self._discard_objects()
                case Finish():
                    self._outcome = command

    async def _post(self, event: ParticipantEvent) -> None:
        await self._events_in.send(event)

    async def _work(self, command: StartStoring) -> None:
        """Everything that ``StopWork`` stops, in one scope."""
        try:
            with self._work_scope:
                await self._errands.run(self._store_all, command)
        finally:
            self._work_ended.set()

    async def _store_all(self, command: StartStoring) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._perform_controls, tasks)
            tasks.start_soon(self._guard, Stage.STORE, None, self._start, command, tasks)

    async def _guard(
        self, stage: Stage, key: str | None, step: Callable[..., Awaitable[None]], *args: object
    ) -> None:
        """Turns a step's exception into an event; the first one recorded is the cause."""
        try:
            await step(*args)
        except Exception as error:
            cause = first_error(error)
            if not isinstance(cause, ActorSnapError):
                logger.debug("%s: %s failed", self._board.label, stage, exc_info=cause)
            self._on_failure(cause)
            if isinstance(cause, StorageError) and cause.key:
                key = cause.key
            reason = str(cause) if isinstance(cause, ActorSnapError) else repr(cause)
            failure = Failure(reason=reason, stage=stage, rank=self._machine.rank, key=key)
            await self._post(StepFailed(failure))

    async def _perform_controls(self, tasks: anyio.abc.TaskGroup) -> None:
        try:
            async for command in self._control_out:
                match command:
                    case CompleteObject():
                        number = command.object
                        key = self._objects[number].key
                        tasks.start_soon(self._guard, Stage.STORE, key, self._complete, number)
                    case ReleaseObject():
                        number = command.object
                        key = self._objects[number].key
                        tasks.start_soon(self._guard, Stage.STORE, key, self._release, number)
                    case JoinObjects():
                        tasks.start_soon(self._guard, Stage.STORE, None, self._join, command.tokens)
                    case StoreManifest():
                        key = manifest_key(self._attempt, self._machine.rank)
                        tasks.start_soon(self._guard, Stage.STORE, key, self._store_manifest, key)
                        return
        finally:
            # All is stored, or the work was stopped: then neither the threads nor the memory of
            # chunks that wait may depend on a write that hangs.
            self._has_stopped = True
            if self._staged is not None:
                _release_leases(self._staged)

    async def _start(self, command: StartStoring, tasks: anyio.abc.TaskGroup) -> None:
        self._attempt, self._resumed = command.attempt, command.resumed
        plan = (command.digest, command.plan)
        self.remembered = Remembered(plan, self._division, self._sharded)
        self._storage = await self._open_storage(command)
        try:
            self._objects = await self._run_blocking(self._pack, command)
        except UsageError as error:
            failure = Failure.of(error, stage=Stage.PLAN, rank=self._machine.rank)
            await self._post(StepFailed(failure))
            return
        self._number_of = {plan.key: number for number, plan in enumerate(self._objects)}
        self._opened = [anyio.Event() for _ in self._objects]
        self._ledgers = [
            ChecksumLedger(plan, [self._leaves[i].item.is_shard for i in plan.items])
            for plan in self._objects
        ]
        self._board.plan(sum(plan.nbytes for plan in self._objects))
        work = [ObjectWork(len(p.chunks), p.opens, p.is_shared) for p in self._objects]
        await self._post(Planned(tuple(work)))

        tasks.start_soon(self._move_bytes)

    async def _move_bytes(self) -> None:
        """Runs the staging actor and the uploaders over one bounded stream."""
        order = write_order(self._objects)
        copies, num_uploaders = self._settings.copies, self._settings.num_uploaders
        # Copies are bounded by the budget; views of live memory need only keep up.
        staged_in, staged_out = anyio.create_memory_object_stream[StagedChunk](
            len(order) + 1 if copies else 2 * num_uploaders
        )
        self._staged = staged_out
        may_store, begin = anyio.Event(), anyio.Event()
        if not copies:
            may_store.set()
        staging = StagingActor(
            objects=self._objects,
            order=order,
            sources=[self._sources(plan) for plan in self._objects],
            copies=copies,
            out=staged_in,
            budget=self._budget,
            full=may_store,
            run_blocking=self._run_blocking,
            num_copiers=self._settings.num_copiers if copies else 1,
            board=self._board,
        )
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._guard, Stage.STAGE, None, self._stage, staging)
                tasks.start_soon(self._guard, Stage.STORE, None, self._open_writers)
                tasks.start_soon(self._begin_storing, may_store, begin)
                for _ in range(num_uploaders):
                    uploader = UploaderActor(
                        chunks=staged_out.clone(),
                        writer_of=self._writer_of,
                        ledgers=self._ledgers,
                        begin=begin,
                        run_blocking=self._run_blocking,
                        report=self._report_chunk,
                        is_stopped=lambda: self._has_stopped,
                        has_blocking_io=self._storage.capabilities.has_blocking_io,
                        resumes=bool(self._resumed),
                        board=self._board,
                    )
                    tasks.start_soon(self._guard, Stage.STORE, None, uploader.run)
        finally:
            self._staged = None
            with staged_out:
                _release_leases(staged_out)
        if not copies:
            # The trainer's own memory was read until the last chunk was written.
            await self._post(StagingEnded())

    async def _open_writers(self) -> None:
        opens = [number for number, plan in enumerate(self._objects) if plan.opens]
        # Each may cost a request, and who joins waits for the last one.
        await for_each(opens, self._open_writer, at_once=_MAX_OPENING)
        tokens = [
            Token.of(self._attempt, self._objects[number].key, self._writers[number].token)
            for number in opens
            if self._objects[number].is_shared
        ]
        if tokens:
            await self._post(ObjectsOpened(tuple(tokens)))

    async def _begin_storing(self, may_store: anyio.Event, begin: anyio.Event) -> None:
        """Lets uploaders begin when staging permits; each waits for what it writes to itself."""
        await may_store.wait()
        if self._settings.copies:
            await anyio.sleep(_HEAD_START_S)
        begin.set()

    async def _open_writer(self, number: int) -> None:
        plan = self._objects[number]
        name = plan.key.removeprefix(f"{self._attempt}/")
        older = [f"{attempt}/{name}" for attempt in self._resumed]
        self._writers[number] = await self._storage.writer(plan.key, plan.size, older=older)
        self._opened[number].set()

    async def _join(self, tokens: Sequence[Token]) -> None:
        for key, token in [each.opened(self._attempt) for each in tokens]:
            number = self._number_of[key]
            try:
                self._writers[number] = await self._storage.join_writer(token)
            except ObjectNotFound as error:
                raise StorageError(
                    op="join_writer",
                    key=key,
                    backend=self._storage.url,
                    detail="another rank has created this object, and this rank does not see it: "
                    "save to a path on storage that all ranks share",
                ) from error
            self._opened[number].set()

    async def _writer_of(self, number: int) -> ObjectWriter:
        await self._opened[number].wait()
        return self._writers[number]

    def _sources(self, plan: ObjectPlan) -> list[ByteSource]:
        return [
            source if box is None else PartSource(source, box.start, stop - start)
            for source, box, start, stop in zip(
                [self._leaves[item].source for item in plan.items],
                plan.boxes,
                plan.starts,
                plan.ends,
                strict=True,
            )
        ]

    async def _stage(self, staging: StagingActor) -> None:
        await staging.run()
        if self._settings.copies:
            for leaf in self._leaves:
                leaf.source = _RELEASED  # from now on the trainer may free its memory, too
            await self._post(StagingEnded())

    async def _report_chunk(self, number: int) -> None:
        await self._post(ChunkStored(number))

    def _pack(self, command: StartStoring) -> tuple[ObjectPlan, ...]:
        objects = pack(
            [leaf.item for leaf in self._leaves],
            attempt=self._attempt,
            rank=self._machine.rank,
            rules=command.rules,
            scopes=self._scopes,
            plan=command.plan,
        )
        if self._settings.copies or not all(leaf.source.is_addressable for leaf in self._leaves):
            check_memory(objects, command.rules, self._budget.limit_bytes)
        return objects

    async def _complete(self, number: int) -> None:
        await self._writers[number].complete()
        self._ended.add(number)
        await self._post(ObjectCompleted(number))

    async def _release(self, number: int) -> None:
        await self._writers[number].release()
        self._ended.add(number)
        await self._post(ObjectReleased(number))

    async def _look_for_commit(self) -> None:
        found: bool | None = None
        with anyio.move_on_after(_LOOK_S):
            try:
                commit = await self._errands.run(find_commit, self._storage)
                found = commit is not None and commit.attempt == self._attempt
            except Exception as error:  # whatever a backend raises
                logger.warning(
                    "%s: whether it is committed is unknown: %s", self._board.label, error
                )
        await self._post(Looked(found))

    async def _store_manifest(self, key: str) -> None:
        data = await self._run_blocking(self._encode_manifest)
        self._manifest_key = key
        await self._storage.put(key, [memoryview(data)])
        await self._post(ManifestStored(len(data), crc32c(data)))

    def _encode_manifest(self) -> bytes:
        places: list[list[tuple[int, int]]] = [[] for _ in self._leaves]
        for number, plan in enumerate(self._objects):
            for position, item in enumerate(plan.items):
                places[item].append((number, position))
        entries: list[Entry] = []
        leaves = iter(places)
        absent: set[str] = set()
        assert isinstance(self._captured, Captured)
        for part in self._captured.parts:
            if not isinstance(part, Leaf):
                entries.append(part)
                continue
            found = next(leaves)
            if not found:
                absent.add(part.item.path)
            for number, position in found:
                stored = self._ledgers[number].stored(position, number)
                entries.append(part.entry(stored, self._objects[number].boxes[position]))
        if absent:
            entries = [entry for entry in entries if not _refers_to(entry, absent)]
        return encode_rank_manifest(
            RankManifest(
                attempt=self._attempt,
                rank=self._machine.rank,
                objects=tuple(
                    ObjectRecord(
                        key=plan.key,
                        size=plan.size,
                        header_bytes=len(plan.header),
                        header_crc32c=crc32c(plan.header),
                    )
                    for plan in self._objects
                ),
                entries=tuple(entries),
            )
        )

    async def _stop_work(self) -> None:
        if self._has_work:
            self._work_scope.cancel()
            await self._work_ended.wait()

    async def _discard_objects(self) -> None:
        """Deletes what this rank wrote. Bounded, and failing is only logged: it is garbage."""
        await self._errands.clean_up(self._delete_objects)

    async def _delete_objects(self) -> None:
        for number, writer in self._writers.items():
            if number not in self._ended:
                await writer.abort()
        keys = [plan.key for plan in self._objects if plan.opens]
        if self._manifest_key is not None:
            keys.append(self._manifest_key)
        if keys:
            await self._storage.delete(keys)


def _refers_to(entry: Entry, absent: set[str]) -> bool:
    """Whether an entry is worth nothing here, because another rank stores what it refers to."""
    match entry:
        case ViewEntry():
            return entry.of in absent
        case CompositeEntry():
            # Its parts may be with several ranks: it stands with the first one.
            return part_path(entry.path, entry.parts[0]) in absent
    return False


def _release_leases(staged: MemoryObjectReceiveStream[StagedChunk]) -> None:
    """Empties the stream; only after a failure is anything in it."""
    while True:
        try:
            chunk = staged.receive_nowait()
        except (anyio.WouldBlock, anyio.EndOfStream):
            return
        if chunk.lease is not None:
            chunk.lease.release()
