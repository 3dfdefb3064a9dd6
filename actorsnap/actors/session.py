"""The participant actor: one rank's part in one save, from inventory to outcome.

It owns the rank's ``ParticipantMachine``, feeds it events, and performs its commands with a
staging actor and a pool of uploader actors under one cancel scope. What to do next is
never decided here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio
import anyio.abc
from anyio.streams.memory import MemoryObjectReceiveStream

from actorsnap.actors.budget import Budget
from actorsnap.actors.compressing import CompressedStore, Sampler
from actorsnap.actors.errands import Errands, first_error
from actorsnap.actors.fence import Fence
from actorsnap.actors.items import StagedChunk, Stager, Staging, StagingOrder, release_leases
from actorsnap.actors.ledger import ChecksumLedger, entries_of
from actorsnap.actors.objects import RankObjects
from actorsnap.actors.pace import Pace
from actorsnap.actors.reader import find_commit
from actorsnap.actors.staging import StagingActor, sources_of
from actorsnap.actors.stock import CopyHashes, Stock
from actorsnap.actors.trace import Phase, ProgressBoard, Recorder, Row, Work, row_of
from actorsnap.actors.uploader import UploaderActor
from actorsnap.errors import ActorSnapError, StateChanged, StorageError, UsageError, describe
from actorsnap.format.checksum import crc32c
from actorsnap.format.frames import check_available
from actorsnap.format.layout import manifest_key
from actorsnap.format.manifest import RankManifest, SaveRecord, encode_rank_manifest
from actorsnap.lines import Lines
from actorsnap.planning.compression import Sampled, sample_bytes
from actorsnap.planning.inventory import Division, sharded_digest, take_stock
from actorsnap.planning.packing import ObjectPlan, RankPlan, check_memory, pack, write_order
from actorsnap.protocol.calls import (
    CoordinatorLost,
    Finish,
    Looked,
    LookForCommit,
    Send,
    StepFailed,
)
from actorsnap.protocol.messages import Failure, Stage
from actorsnap.protocol.participant import (
    AnnounceStaged,
    Begun,
    CancelRequested,
    ChunkStored,
    CompleteObject,
    DiscardObjects,
    JoinObjects,
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
    StagingEnded,
    StartStoring,
    StopWork,
    StoreManifest,
    TakeStock,
)
from actorsnap.state.leaves import Captured, Leaf
from actorsnap.state.memory import MemorySource
from actorsnap.storage.base import Storage
from actorsnap.storage.foreign_errors import ends_this_task
from actorsnap.transport.base import Broken, Lost, ParticipantEnd

__all__ = ["ParticipantActor", "Remembered", "SaveSettings"]

logger = Lines(__name__)

_RELEASED = MemorySource(0, 0, None)
_LOOK_S = 10.0
"""Bound of the look whether a commit is visible, when nobody can tell any more."""

_MAX_BESIDE_BYTES = 64 << 20
"""So much memory is taken for compressed chunks beside a budget that is lent elsewhere."""

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
        pace: See ``UploaderActor``.
        samples_level: A plain save compresses samples at this level of zstd; None: it does not.
        step: The caller's, for the rank manifest; None if it gave none.
    """

    copies: bool
    num_uploaders: int
    num_copiers: int
    pace: Pace | None = None
    samples_level: int | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """How long it took to store a rank's objects.

    Attributes:
        nbytes: Of them, before compression.
        seconds: From the first byte until all were complete.
        sampled: What samples have shown, if some were compressed.
    """

    nbytes: int
    seconds: float
    sampled: Sampled | None


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
        stager: Stages elsewhere; here where None.
        fence: Stages lazily; see ``StagingActor``.
        on_eager_staged: Called when all is copied that is not to be copied lazily.
        remembered: From the group's last save.
        deadline: The loop's time when it gives up waiting for the coordinator's first word;
            None waits for ever.
        recorder: Gets what is done when, if anybody wants to know.

    Attributes:
        remembered: For the next save; None before this one has a plan.
        measured: None before all is stored.
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
        stager: Stager | None = None,
        fence: Fence | None = None,
        on_eager_staged: Callable[[], None] = lambda: None,
        remembered: Remembered | None = None,
        deadline: float | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.remembered: Remembered | None = None
        self.measured: Measured | None = None
        self._stager = stager
        self._fence = fence
        self._on_eager_staged = on_eager_staged
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
        self._recorder = recorder
        self._on_staged = on_staged
        self._on_failure = on_failure
        # At most one event per chunk and object, and a few more, are under way.
        self._events_in, self._events_out = anyio.create_memory_object_stream[ParticipantEvent](64)
        self._control_in, self._control_out = anyio.create_memory_object_stream[ParticipantCommand](
            1
        )
        self._attempt = ""
        self._resumed: tuple[str, ...] = ()
        self._save: SaveRecord  # once there is something to store
        self._level: int | None = None
        self._compressed: CompressedStore | None = None
        self._sampler: Sampler | None = None
        self._began_storing = 0.0
        # Per scope, the indices of its leaves; the same order as in the inventory.
        self._scopes: list[list[int]] = []
        self._division: Division = None
        self._sharded = b""
        self._copies = CopyHashes()
        self._plans: tuple[ObjectPlan, ...] = ()
        self._maybe_objects: RankObjects | None = None
        self._ledgers: list[ChecksumLedger] = []
        self._work_scope = anyio.CancelScope()
        self._work_ended = anyio.Event()
        self._has_work = False
        self._has_stopped = False
        self._staged: MemoryObjectReceiveStream[StagedChunk] | None = None
        # A cancellation, and that the others have ended it.
        self._wishes: deque[ParticipantEvent] = deque()
        self._has_wishes = anyio.Event()
        self._is_cancelled = False
        self._is_ended = False
        self._row: Row | None = None
        self._outcome: Finish | None = None

    def request_cancel(self, reason: str) -> None:
        """Asks for an abort. The commit may win nevertheless. Call on the loop only."""
        if not self._is_cancelled:
            self._is_cancelled = True
            self._wish(CancelRequested(reason))

    def end(self, failure: Failure) -> None:
        """Ends it without the coordinator, or, beside that, for all. The commit may have won
        nevertheless. Call on the loop only."""
        if not self._is_ended:
            self._is_ended = True
            beside = self._machine.rank == 0
            lost = CoordinatorLost(failure.reason, failure.rank)
            self._wish(StepFailed(failure) if beside else lost)

    def _wish(self, event: ParticipantEvent) -> None:
        self._wishes.append(event)
        self._has_wishes.set()

    async def run(self) -> Failure | None:
        """Takes part until the outcome.

        Returns:
            None if committed, else why not. Never raises for an operating failure.
        Cancellation: writers are closed, objects discarded, as in an abort.
        """
        if self._recorder is not None:
            self._row = self._recorder.add_row("participant")
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._receive_messages)
                tasks.start_soon(self._pass_wishes)
                tasks.start_soon(self._await_deadline)
                tasks.start_soon(self._guard, Stage.JOIN, None, self._begin)
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

    async def _begin(self) -> None:
        captured, before, division = self._captured, self._before, None
        if isinstance(captured, Failure):
            await self._post(StepFailed(captured))
            return
        if before is not None and before.sharded == sharded_digest(captured.sharded):
            division = before.division
        await self._take_stock(division)

    async def _take_stock(self, division: Division) -> None:
        captured = self._captured
        assert isinstance(captured, Captured)
        copies = None if self._stager is None else await self._stager.hash_copies(division)
        await self._post(await self._run_blocking(self._begun, captured, division, copies))

    def _begun(
        self, captured: Captured, division: Division, copies: tuple[bytes, ...] | None
    ) -> Begun:
        stock = Stock.of(captured, self._leaves, division)
        if copies is None:
            copies = self._copies.take(stock, self._leaves)
        inventory, lists = take_stock(
            [leaf.item for leaf in self._leaves],
            stock.scopes,
            globs=captured.globs,
            sharded=captured.sharded,
            division=division,
        )
        self._scopes, self._division = [indices for _, indices in stock.scopes], division
        self._sharded = inventory.sharded
        plan = None if self._before is None else self._before.plan
        return Begun(inventory, lists, plan, captured.sharded, copies)

    async def _receive_messages(self) -> None:
        while True:
            match await self._end.receive():
                case Lost() as lost:
                    await self._post(CoordinatorLost.silent(lost.rank, lost.silent_s))
                case Broken() as broken:
                    await self._post(CoordinatorLost(broken.reason))
                    return
                case message:
                    await self._post(message)

    async def _pass_wishes(self) -> None:
        while True:
            await self._has_wishes.wait()
            self._has_wishes = anyio.Event()
            while self._wishes:
                await self._post(self._wishes.popleft())

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
                        self._guard, Stage.JOIN, None, self._take_stock, command.division
                    )
                case StartStoring():
                    # From now on the coordinator's deadline counts, or that it is silent.
                    self._patience.cancel()
                    if self._row is not None:
                        self._row.note(Work.AGREE)
                    self._has_work = True
                    tasks.start_soon(self._work, command)
                case AnnounceStaged():
                    if self._recorder is not None:
                        self._recorder.mark("staged")
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
        except BaseException as error:
            if ends_this_task(error):
                raise
            cause = first_error(error)
            if not isinstance(cause, ActorSnapError):
                logger.debug("%s: %s failed", self._board.label, stage, exc_info=cause)
            self._on_failure(cause)
            if isinstance(cause, StorageError) and cause.key:
                key = cause.key
            if self._recorder is not None:
                self._recorder.mark(f"{stage} failed", key=key or "", error=describe(cause))
            reason = str(cause) if isinstance(cause, ActorSnapError) else describe(cause)
            rank = self._machine.rank
            failure = Failure(reason=reason, stage=stage, rank=rank, key=key)
            if isinstance(cause, StateChanged):
                failure = Failure.of(
                    StateChanged(path=cause.path, rank=rank), stage=stage, rank=rank
                )
            await self._post(StepFailed(failure))

    async def _perform_controls(self, tasks: anyio.abc.TaskGroup) -> None:
        try:
            async for command in self._control_out:
                match command:
                    case CompleteObject():
                        number = command.object
                        key = self._plans[number].key
                        tasks.start_soon(self._guard, Stage.STORE, key, self._complete, number)
                    case ReleaseObject():
                        number = command.object
                        key = self._plans[number].key
                        tasks.start_soon(self._guard, Stage.STORE, key, self._release, number)
                    case JoinObjects():
                        join = self._objects.join
                        tasks.start_soon(self._guard, Stage.STORE, None, join, command.tokens)
                    case StoreManifest():
                        key = manifest_key(self._attempt, self._machine.rank)
                        tasks.start_soon(self._guard, Stage.STORE, key, self._store_manifest, key)
                        return
        finally:
            # All is stored, or the work was stopped: then neither the threads nor the memory of
            # chunks that wait may depend on a write that hangs.
            self._has_stopped = True
            if self._staged is not None:
                release_leases(self._staged)

    async def _start(self, command: StartStoring, tasks: anyio.abc.TaskGroup) -> None:
        self._attempt, self._resumed = command.attempt, command.resumed
        self._save = command.save
        self._level = command.rules.compression
        plan = (command.digest, command.plan)
        self.remembered = Remembered(plan, self._division, self._sharded)
        if self._stager is not None:
            self._stager.prepare(command, self._division)
        self._storage = await self._open_storage(command)
        try:
            self._plans = await self._run_blocking(self._pack, command)
        except UsageError as error:
            failure = Failure.of(error, stage=Stage.PLAN, rank=self._machine.rank)
            await self._post(StepFailed(failure))
            return
        self._maybe_objects = RankObjects(
            self._plans,
            self._storage,
            attempt=self._attempt,
            resumed=self._resumed,
            is_compressed=self._level is not None,
            recorder=self._recorder,
        )
        self._ledgers = [
            ChecksumLedger(plan, [self._leaves[index].item for index in plan.items])
            for plan in self._plans
        ]
        self._board.plan(self._nbytes)
        work = [ObjectWork(len(p.chunks), p.opens, p.is_shared) for p in self._plans]
        await self._post(Planned(tuple(work)))

        tasks.start_soon(self._move_bytes)

    async def _move_bytes(self) -> None:
        """Runs the staging actor and the uploaders over one bounded stream."""
        order = write_order(self._plans)
        self._prepare_compression(len(order))
        copies, num_uploaders = self._settings.copies, self._settings.num_uploaders
        # Copies are bounded by the budget; views of live memory need only keep up.
        staged_in, staged_out = anyio.create_memory_object_stream[StagedChunk](
            len(order) + 1 if copies else 2 * num_uploaders
        )
        self._staged = staged_out
        may_store, begin = anyio.Event(), anyio.Event()
        if not copies:
            may_store.set()
        staging = self._staging(
            StagingOrder(objects=self._plans, chunks=order, out=staged_in, full=may_store)
        )
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._guard, Stage.STAGE, None, self._stage, staging)
                tasks.start_soon(self._guard, Stage.STORE, None, self._open)
                tasks.start_soon(self._begin_storing, may_store, begin)
                for _ in range(num_uploaders):
                    uploader = UploaderActor(
                        chunks=staged_out.clone(),
                        writer_of=self._objects.writer_of,
                        ledgers=self._ledgers,
                        begin=begin,
                        run_blocking=self._errands.run_bulk,
                        report=self._report_chunk,
                        is_stopped=lambda: self._has_stopped,
                        has_blocking_io=self._storage.capabilities.has_blocking_io,
                        resumes=bool(self._resumed),
                        board=self._board,
                        pace=self._settings.pace,
                        compressed=self._compressed,
                        sampler=self._sampler,
                        recorder=self._recorder,
                    )
                    tasks.start_soon(self._guard, Stage.STORE, None, uploader.run)
        finally:
            self._staged = None
            with staged_out:
                release_leases(staged_out)
        if not copies:
            # The trainer's own memory was read until the last chunk was written.
            await self._post(StagingEnded())

    def _prepare_compression(self, num_chunks: int) -> None:
        if self._level is not None:
            at_once = None
            if self._stager is not None:
                # The budget is lent to the copies, which are made elsewhere.
                largest = max(
                    [c.stop - c.start for plan in self._plans for c in plan.chunks], default=1
                )
                at_once = max(1, _MAX_BESIDE_BYTES // largest)
            self._compressed = CompressedStore(
                self._storage,
                level=self._level,
                budget=self._budget,
                run_blocking=self._errands.run_bulk,
                num_threads=self._settings.num_copiers,
                at_once=at_once,
            )
            return
        level, nbytes = self._settings.samples_level, sample_bytes(self._nbytes)
        if level is not None and nbytes:
            self._sampler = Sampler(
                num_chunks=num_chunks,
                nbytes=nbytes,
                level=level,
                num_threads=self._settings.num_copiers,
            )

    @property
    def _objects(self) -> RankObjects:
        assert self._maybe_objects is not None
        return self._maybe_objects

    @property
    def _nbytes(self) -> int:
        return sum(plan.nbytes for plan in self._plans)

    def _staging(self, order: StagingOrder) -> Staging:
        if self._stager is not None:
            return self._stager.make(order)
        copies = self._settings.copies
        return StagingActor(
            order,
            sources=[sources_of(plan, self._leaves) for plan in self._plans],
            copies=copies,
            budget=self._budget,
            run_blocking=self._run_blocking,
            num_copiers=self._settings.num_copiers if copies else 1,
            board=self._board,
            recorder=self._recorder,
            fence=self._fence,
            on_eager_staged=self._on_eager_staged,
        )

    async def _open(self) -> None:
        tokens = await self._objects.open()
        if tokens:
            await self._post(ObjectsOpened(tokens))

    async def _begin_storing(self, may_store: anyio.Event, begin: anyio.Event) -> None:
        """Lets uploaders begin when staging permits; each waits for what it writes to itself."""
        await may_store.wait()
        if self._settings.copies:
            await anyio.sleep(_HEAD_START_S)
        self._began_storing = anyio.current_time()
        begin.set()

    async def _stage(self, staging: Staging) -> None:
        await staging.run()
        if self._settings.copies:
            for leaf in self._leaves:
                leaf.source = _RELEASED  # from now on the trainer may free its memory, too
            await self._post(StagingEnded())

    async def _report_chunk(self, number: int) -> None:
        await self._post(ChunkStored(number))

    def _pack(self, command: StartStoring) -> tuple[ObjectPlan, ...]:
        if self._level is not None:
            check_available()  # rank 0 has seen only its own installation
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
        await self._objects.complete(number)
        await self._post(ObjectCompleted(number))

    async def _release(self, number: int) -> None:
        await self._objects.release(number)
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
        seconds = anyio.current_time() - self._began_storing
        sampled = None if self._sampler is None else self._sampler.result
        self.measured = Measured(nbytes=self._nbytes, seconds=seconds, sampled=sampled)
        with row_of(self._recorder, "objects") as row:
            data = await self._run_blocking(self._encode_manifest)
            await self._objects.put(key, data)
            if row is not None:
                row.note(Work.MANIFEST, key, 0, len(data))
        await self._post(ManifestStored(len(data), crc32c(data)))

    def _encode_manifest(self) -> bytes:
        assert isinstance(self._captured, Captured)
        for ledger in self._ledgers:
            ledger.check_complete()
        return encode_rank_manifest(
            RankManifest(
                attempt=self._attempt,
                rank=self._machine.rank,
                objects=tuple([ledger.to_record() for ledger in self._ledgers]),
                entries=entries_of(self._captured.parts, self._plans, self._ledgers),
                save=self._save,
                optimizers=self._captured.optimizers,
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
        if self._maybe_objects is not None:
            await self._maybe_objects.delete()
