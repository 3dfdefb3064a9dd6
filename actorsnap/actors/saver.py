# SPDX-License-Identifier: Apache-2.0
"""One rank's part in one save, from its inventory to the outcome.

``Saver._save`` is the script; bytes move from staging to the uploaders over one bounded stream.
``protocol.save`` defines the rounds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager

import anyio
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream

from actorsnap.actors.abandonable import first_error
from actorsnap.actors.checksum_ledger import manifest_of
from actorsnap.actors.commit import is_committed
from actorsnap.actors.compressor import CompressedStore
from actorsnap.actors.crew import Crew
from actorsnap.actors.items import SaveContext, StagedChunk, Staging, StagingOrder, release_leases
from actorsnap.actors.object_writers import RankObjects
from actorsnap.actors.rounds import ParticipantActor
from actorsnap.actors.trace import Phase, Work
from actorsnap.actors.uploader import UploaderActor
from actorsnap.errors import ActorSnapError, StateChanged, UsageError, describe
from actorsnap.format.compression import check_available
from actorsnap.format.layout import manifest_key
from actorsnap.format.owners import owners_key
from actorsnap.format.tables import encode_rank_manifest
from actorsnap.log import Log
from actorsnap.planning.inventory import (
    Inventory,
    Outline,
    ShardedTable,
    build_inventory,
    digest_of,
)
from actorsnap.planning.packing import Item, ObjectPlan, RankPlan, check_memory, pack, write_order
from actorsnap.protocol.failure import Failure, Stage
from actorsnap.protocol.rounds import Participant
from actorsnap.protocol.save import (
    Assignment,
    Details,
    Joined,
    ManifestStored,
    Question,
    Token,
    aborted,
    decode,
    encode,
)
from actorsnap.state.sources import Captured, HostMemory
from actorsnap.storage.base import Storage, ends_this_task
from actorsnap.transport.ends import ParticipantEnd

logger = Log(__name__)

_RELEASED = HostMemory(0, 0, None)


class Saver:
    """Takes part in one save.

    Args:
        captured: The rank's state; a ``Failure``: this rank only reports it.
        open_storage: Opens the location that the coordinator names; the caller owns the storage.
        remembered: The plan of the group's last save, with its digest.
        has_owners: The snapshot has an owner index.
        owners: Returns it, or None to commit without it; for the rank that stores it.

    Attributes:
        remembered: For the next save; None before this one has a plan.
    """

    def __init__(
        self,
        context: SaveContext,
        captured: Captured | Failure,
        *,
        end: ParticipantEnd,
        staging: Staging,
        open_storage: Callable[[Assignment], Awaitable[Storage]],
        remembered: tuple[bytes, RankPlan] | None = None,
        has_owners: bool = False,
        owners: Callable[[], bytes | None] | None = None,
    ) -> None:
        self.remembered: tuple[bytes, RankPlan] | None = None
        self._context = context
        self._rank = rank = context.rank
        self._errands = context.errands
        self._recorder = context.recorder
        self._rounds = ParticipantActor(
            machine=Participant(rank=rank), end=end, aborted=aborted, timeout_s=context.timeout_s
        )
        self._captured = Captured() if isinstance(captured, Failure) else captured
        self._leaves = self._captured.leaves
        self._staging: Staging | None = staging
        self._open_storage = open_storage
        self._before = remembered
        self._has_owners = has_owners
        self._owners = owners
        self._work_scope = anyio.CancelScope()
        # Why the work ends: the first reason counts.
        self._failure: Failure | None = captured if isinstance(captured, Failure) else None
        self._has_stopped = False
        self._objects: RankObjects | None = None

    def request_cancel(self, reason: str) -> None:
        """Requests an abort; the commit may still win. On the loop only."""
        self._failure = self._failure or Failure(reason=reason, stage=Stage.CANCEL, rank=self._rank)
        self._work_scope.cancel()

    async def run(self) -> Failure | None:
        """Returns the failure; None if committed. Never raises for an operating failure.

        Cancellation: Writers are closed and objects discarded, as in an abort.
        """
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._rounds.run)
                tasks.start_soon(self._work)
                outcome = await self._rounds.wait()
                tasks.cancel_scope.cancel()
        except BaseException:
            await self._discard()
            raise
        finally:
            # Errors and their frames may refer to this object: release the trainer's memory now.
            self._leaves, self._captured, self._staging = [], Captured(), None
        failure = outcome.failure
        if failure is not None and outcome.is_unknown:
            return await self._look_for_commit(failure)
        if failure is not None and not failure.may_be_visible:
            await self._discard()
        return failure

    async def _work(self) -> None:
        if self._failure is None:
            with self._work_scope:
                try:
                    await self._errands.run(self._save)
                except BaseException as error:
                    self._note_failure(error, Stage.STORE, None)
        if self._failure is not None:
            await self._rounds.fail(self._failure)

    @contextmanager
    def _during(self, stage: Stage, key: str | None = None) -> Iterator[None]:
        """Records the stage and object of an error, which ends the work."""
        try:
            yield
        except BaseException as error:
            self._note_failure(error, stage, key)
            raise

    def _note_failure(self, error: BaseException, stage: Stage, key: str | None) -> None:
        if ends_this_task(error):
            raise error
        # An error raised by a round at the end of the call is the outcome.
        if self._failure is None and not self._rounds.is_over:
            self._failure = self._failure_of(first_error(error), stage, key)
        # A sibling may hang in the storage: it is abandoned.
        self._work_scope.cancel()

    def _failure_of(self, error: BaseException, stage: Stage, key: str | None) -> Failure:
        rank = self._rank
        if not isinstance(error, ActorSnapError):
            logger.debug("%s: %s failed", self._context.board.label, stage, exc_info=error)
        self._context.on_failure(error)
        failure = Failure.caused_by(error, stage=stage, rank=rank, key=key)
        self._recorder.mark(f"{stage} failed", key=failure.key or "", error=describe(error))
        if isinstance(error, StateChanged):
            return Failure.of(StateChanged(path=error.path, rank=rank), stage=stage, rank=rank)
        if stage is Stage.PLAN and isinstance(error, UsageError):
            return Failure.of(error, stage=stage, rank=rank)
        return failure

    async def _save(self) -> None:
        with self._during(Stage.JOIN), self._recorder.row("participant") as row:
            scopes, assignment = await self._join()
            row.note(Work.AGREE)
        assert self._staging is not None
        self._staging.prepare(assignment)
        storage = await self._open_storage(assignment)
        with self._during(Stage.PLAN):
            plans = await self._errands.run_blocking(self._pack, assignment, scopes)
        items = [leaf.item for leaf in self._leaves]
        objects = self._objects = RankObjects(plans, items, storage, assignment, self._recorder)
        self._context.board.plan(sum(plan.nbytes for plan in plans))
        await self._store_objects(objects)
        if assignment.shares_objects:
            await self._rounds.arrive()
            await self._complete_shared(objects)
        async with anyio.create_task_group() as tasks:
            if self._owners is not None:
                tasks.start_soon(self._store_owners, objects, self._owners)
            stored = await self._store_manifest(objects)
        await self._rounds.arrive(encode(stored), commits=True)

    async def _join(self) -> tuple[list[list[int]], Assignment]:
        """Returns this rank's leaves by scope, and its part of the plan."""
        # ``answer`` outlives this call: it must not refer to the trainer's memory.
        sharded, before = self._captured.sharded, self._before
        outline = await self._errands.run_blocking(self._take_outline)
        scopes, inventory, lists = await self._errands.run_blocking(self._take_inventory, outline)
        remembered = b"" if before is None else before[0]

        def answer(payload: bytes) -> bytes:
            question = decode(payload, Question)
            return encode(
                Details(
                    inventory if question.inventory else None,
                    {digest: lists[digest] for digest in question.lists},
                    ShardedTable.of(sharded) if question.sharded else None,
                    outline if question.outline else None,
                )
            )

        joined = Joined(self._context.release, digest_of(inventory), remembered)
        payload = await self._rounds.arrive(encode(joined), then=Stage.STORE, answer=answer)
        assignment = decode(payload, Assignment)
        if assignment.plan is None:
            assert before is not None
            assignment = msgspec.structs.replace(assignment, plan=before[1])
        assert assignment.plan is not None
        self.remembered = (assignment.digest, assignment.plan)
        return scopes, assignment

    async def _store_objects(self, objects: RankObjects) -> None:
        """Stages and stores all chunks; completes objects that only this rank writes."""
        context, plans, order = self._context, objects.plans, write_order(objects.plans)
        copies, num_uploaders = context.copies, context.num_uploaders
        # The budget bounds copies; views of live memory only need to keep the uploaders busy.
        staged_in, staged_out = anyio.create_memory_object_stream[StagedChunk](
            len(order) + 1 if copies else 2 * num_uploaders
        )
        may_store = anyio.Event()
        staging_order = StagingOrder(plans, order, staged_in, may_store)
        pending = [len(plan.chunks) for plan in plans]

        def report(number: int) -> None:
            pending[number] -= 1
            assert pending[number] >= 0
            if not pending[number] and not plans[number].has_joiners:
                tasks.start_soon(self._finish, objects, number)

        compressed = None
        codec = objects.assignment.rules.codec
        if codec is not None:
            compressed = CompressedStore(
                objects.storage,
                codec=codec,
                budget=context.budget,
                run_blocking=self._errands.run_cpu,
                num_threads=context.num_threads,
                max_bytes=context.max_compressed_bytes,
            )
        try:
            async with anyio.create_task_group() as watch:
                watch.start_soon(self._release_when_stopped, staged_out)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._stage, staging_order)
                    tasks.start_soon(self._open_objects, objects)

                    async def upload(crew: Crew) -> None:
                        uploader = UploaderActor(
                            context,
                            objects,
                            chunks=staged_out.clone(),
                            may_store=may_store,
                            report=report,
                            is_stopped=lambda: self._has_stopped,
                            compressed=compressed,
                        )
                        await uploader.run(crew)

                    Crew(tasks, upload, objects.storage, num_uploaders).start()
                watch.cancel_scope.cancel()
        finally:
            with staged_out:
                release_leases(staged_out)
        if not copies:
            # The trainer's own memory was read until now.
            self._announce_staged()

    async def _release_when_stopped(self, staged: MemoryObjectReceiveStream[StagedChunk]) -> None:
        """The work may stop while a write hangs."""
        try:
            await anyio.sleep_forever()
        finally:
            self._has_stopped = True
            release_leases(staged)

    async def _open_objects(self, objects: RankObjects) -> None:
        tokens = await objects.open()
        if objects.assignment.shares_objects:
            payload = await self._rounds.arrive(encode(tokens))
            await objects.join(decode(payload, tuple[Token, ...]))

    async def _stage(self, order: StagingOrder) -> None:
        assert self._staging is not None
        with self._during(Stage.STAGE):
            await self._staging.run(order)
        if self._context.copies:
            for leaf in self._leaves:
                leaf.source = _RELEASED  # the trainer may free its memory now
            self._announce_staged()

    def _announce_staged(self) -> None:
        self._recorder.mark("staged")
        self._context.board.enter(Phase.STORING)
        self._context.on_staged()

    async def _complete_shared(self, objects: RankObjects) -> None:
        async with anyio.create_task_group() as tasks:
            for number, plan in enumerate(objects.plans):
                if plan.has_joiners:
                    tasks.start_soon(self._finish, objects, number)

    async def _finish(self, objects: RankObjects, number: int) -> None:
        plan = objects.plans[number]
        with self._during(Stage.STORE, plan.key):
            await (objects.complete(number) if plan.opens else objects.release(number))

    async def _store_manifest(self, objects: RankObjects) -> ManifestStored:
        attempt, save = objects.assignment.attempt, objects.assignment.save
        key = manifest_key(attempt, self._rank)

        def encode_manifest() -> bytes:
            manifest = manifest_of(
                self._captured, objects.ledgers, attempt=attempt, rank=self._rank, save=save
            )
            return encode_rank_manifest(manifest)

        with self._during(Stage.STORE, key), self._recorder.row("objects") as row:
            data = await self._errands.run_blocking(encode_manifest)
            await objects.put(key, data)
            row.note(Work.MANIFEST, key, 0, len(data))
        return ManifestStored(len(data))

    async def _store_owners(self, objects: RankObjects, owners: Callable[[], bytes | None]) -> None:
        key = owners_key(objects.assignment.attempt)
        with self._during(Stage.STORE, key), self._recorder.row("objects") as row:
            data = await self._errands.run_blocking(owners)
            if data is not None:
                await objects.put(key, data)
                row.note(Work.MANIFEST, key, 0, len(data))

    def _take_outline(self) -> Outline | None:
        return self._captured.outline if self._has_owners else None

    def _take_inventory(
        self, outline: Outline | None
    ) -> tuple[list[list[int]], Inventory, Mapping[bytes, tuple[Item, ...]]]:
        captured, scopes = self._captured, self._captured.scopes
        inventory, lists = build_inventory(
            [leaf.item for leaf in self._leaves],
            scopes.items(),
            globs=captured.globs,
            sharded=captured.sharded,
            outline=outline,
            has_values=captured.has_values,
        )
        return list(scopes.values()), inventory, lists

    def _pack(self, assignment: Assignment, scopes: list[list[int]]) -> tuple[ObjectPlan, ...]:
        if assignment.rules.codec is not None:
            check_available()  # rank 0 has checked its own installation only
        assert assignment.plan is not None
        plans = pack(
            [leaf.item for leaf in self._leaves],
            attempt=assignment.attempt,
            rank=self._rank,
            rules=assignment.rules,
            scopes=scopes,
            plan=assignment.plan,
        )
        if self._context.copies or not all(leaf.source.is_addressable for leaf in self._leaves):
            check_memory(plans, assignment.rules, self._context.budget.limit_bytes)
        return plans

    async def _look_for_commit(self, failure: Failure) -> Failure | None:
        objects = self._objects
        assert objects is not None
        if await is_committed(objects.storage, self._errands, objects.assignment.attempt):
            return None
        return Failure(
            reason=failure.reason, stage=Stage.COMMIT, rank=failure.rank, may_be_visible=True
        )

    async def _discard(self) -> None:
        if self._objects is not None:
            await self._errands.clean_up(self._objects.delete)
