# SPDX-License-Identifier: Apache-2.0
"""A simulated world: many ranks of one save in one process, on any anyio backend.

Real actors and machines; only the network (``network``) and the ranks' processes are
simulated. Under trio's virtual clock an hour of waiting takes no time, and a seed repeats a
run. ``tests/actors/test_simulation.py`` shows what can be done with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio

from actorsnap.actors.abandonable import AbandonableTasks
from actorsnap.actors.budget import Budget
from actorsnap.actors.commit import CommitActor
from actorsnap.actors.items import SaveContext
from actorsnap.actors.rounds import CoordinatorActor
from actorsnap.actors.saver import Saver
from actorsnap.actors.staging import StagingActor
from actorsnap.actors.trace import ProgressBoard
from actorsnap.errors import StorageError
from actorsnap.format.compression import Codec
from actorsnap.format.manifest import SaveRecord, features_of
from actorsnap.planning.packing import PackingRules, RankPlan
from actorsnap.protocol.failure import Failure
from actorsnap.protocol.rounds import Coordinator
from actorsnap.protocol.save import Assignment, PlanCache, SaveDecisions, aborted
from actorsnap.release import RELEASE
from actorsnap.state.capture import capture
from actorsnap.storage.base import Capabilities, RunBlocking, Storage
from actorsnap.testing.faults import FaultyStorage, Verb
from tests.support.network import SimulatedNetwork

__all__ = ["PATIENCE_S", "SimulatedSave"]

PATIENCE_S = 10.0
"""A rank that hears nothing waits for so long beyond the deadline, which the coordinator keeps."""

_MIB = 1 << 20


@dataclass(kw_only=True)
class SimulatedSave:
    """One save by ``len(states)`` ranks.

    Args:
        storages: One per rank; the coordinator uses the first one's.
        states: Each rank's app state.
        replicated: Globs, the same on all ranks.
        network: Between the ranks; a perfect one if None.
        late_s: How much later than the others a rank begins.
        release_of: Releases of ranks that run another one.
        copies: As in ``async_take``.
        resumed: Dead attempts whose objects are used.
        codec: See ``PackingRules``.
        step, metadata: As in ``take``.
        memory, remembered: What coordinator and ranks know from the save before.

    Attributes:
        outcomes: Of the ranks that have theirs: None is committed.
        told_s: The loop's time when they had it.
        memory, learned: For the next save.
    """

    storages: Sequence[Storage]
    states: Sequence[Mapping[str, Any]]
    run_blocking: RunBlocking
    attempt: str
    replicated: Sequence[str] = ()
    network: SimulatedNetwork | None = None
    late_s: Mapping[int, float] = field(default_factory=dict)
    timeout_s: float = 60.0
    overwrite: bool = False
    copies: bool = False
    resumed: tuple[str, ...] = ()
    codec: Codec | None = None
    step: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    budget_bytes: int = 64 * _MIB
    chunk_bytes: int = 2 * _MIB
    release_of: Mapping[int, str] = field(default_factory=dict)
    memory: PlanCache = field(default_factory=PlanCache)
    remembered: Mapping[int, tuple[bytes, RankPlan]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.outcomes: dict[int, Failure | None] = {}
        self.told_s: dict[int, float] = {}
        self.learned: dict[int, tuple[bytes, RankPlan]] = {}
        self.staged: set[int] = set()
        self.causes: list[BaseException] = []
        self.participants: dict[int, Saver] = {}
        self.budgets = [Budget(self.budget_bytes) for _ in self.states]
        self._network = self.network or SimulatedNetwork(len(self.states))
        self._processes = [anyio.CancelScope() for _ in self.states]
        self._stopped_until_s = [0.0] * len(self.states)

    async def run(self) -> dict[int, Failure | None]:
        """Runs until nothing happens any more; returns ``outcomes``."""
        async with anyio.create_task_group() as tasks:
            for rank in range(len(self.states)):
                tasks.start_soon(self._run_process, rank)
        return self.outcomes

    def kill(self, rank: int) -> None:
        """Ends the rank's process, as SIGKILL does: nothing is cleaned up."""
        self.stop(rank, math.inf)
        self._processes[rank].cancel()

    def stop(self, rank: int, for_s: float) -> None:
        """Stops the rank's process for so long, as SIGSTOP does. What it has asked of the
        storage goes on."""
        self._stopped_until_s[rank] = anyio.current_time() + for_s
        self._network.silence(rank, for_s)

    async def _run_process(self, rank: int) -> None:
        with self._processes[rank]:
            await anyio.sleep(self.late_s.get(rank, 0.0))
            label = f"simulated {self.attempt} rank {rank}"
            async with anyio.create_task_group() as left:
                errands = AbandonableTasks(left, run_blocking=self.run_blocking, label=label)
                await self._save(rank, errands)

    async def _save(self, rank: int, errands: AbandonableTasks) -> None:
        storage = FaultyStorage(self.storages[rank], before=partial(self._pass, rank))

        async def open_storage(_: Assignment) -> Storage:
            return storage

        memory = self.memory.copy()
        captured = capture(
            self.states[rank],
            replicated=self.replicated,
            ranks=range(len(self.states)),
            rank=rank,
        )
        board = ProgressBoard(f"simulated rank {rank}")
        context = SaveContext(
            rank=rank,
            copies=self.copies,
            num_uploaders=2,
            num_threads=2,
            budget=self.budgets[rank],
            errands=errands,
            board=board,
            on_staged=lambda: self.staged.add(rank),
            on_failure=self.causes.append,
            timeout_s=self.timeout_s,
            release=self.release_of.get(rank, RELEASE),
        )
        participant = self.participants[rank] = Saver(
            context,
            captured,
            end=self._network.participant(rank),
            staging=StagingActor(
                captured.leaves,
                copies=self.copies,
                budget=self.budgets[rank],
                run_blocking=errands.run_blocking,
                num_copiers=2 if self.copies else 1,
                board=board,
            ),
            open_storage=open_storage,
            remembered=self.remembered.get(rank),
            has_owners=len(self.states) > 1,
            owners=self._owners if rank == 0 and len(self.states) > 1 else None,
        )
        self._network.begin(rank)
        async with anyio.create_task_group() as tasks:
            if rank == 0:
                tasks.start_soon(self._coordinator(storage, context, memory).run)
            failure = await participant.run()
        self.outcomes[rank] = failure
        self.told_s[rank] = anyio.current_time()
        if participant.remembered is not None:
            self.learned[rank] = participant.remembered
            if rank == 0:
                self.memory = memory
        self._network.silence(rank)

    def _owners(self) -> bytes:
        return self._decisions.owners()

    def _coordinator(
        self, storage: Storage, context: SaveContext, memory: PlanCache
    ) -> CoordinatorActor:
        save = SaveRecord(
            world_size=len(self.states),
            features=features_of(
                is_compressed=self.codec is not None, has_owners=len(self.states) > 1
            ),
            step=self.step,
            metadata=dict(self.metadata),
        )
        can = Capabilities() if self.codec is not None else storage.capabilities
        common = Assignment(
            attempt=self.attempt,
            url=b"simulated",
            fsync=True,
            save=save,
            rules=PackingRules(
                chunk_bytes=self.chunk_bytes,
                max_objects=2,
                min_object_bytes=_MIB,
                min_write_bytes=can.min_write_bytes,
                max_writes=can.max_writes,
                has_joined_writers=can.has_joined_writers,
                codec=self.codec,
            ),
            resumed=self.resumed,
        )
        self._decisions = decisions = SaveDecisions(common, release=RELEASE, memory=memory)
        end = self._network.coordinator()

        committer = CommitActor(
            context,
            save.commit(attempt=self.attempt, created="2026-01-01T00:00:00.000000Z"),
            storage,
            overwrite=self.overwrite,
            suspicion=end.suspicion,
            deadline=anyio.current_time() + self.timeout_s,
            has_values=lambda: decisions.has_values,
        )
        return CoordinatorActor(
            machine=Coordinator(world_size=len(self.states)),
            end=end,
            decisions=decisions,
            aborted=aborted,
            timeout_s=self.timeout_s,
            committer=committer,
        )

    async def _pass(self, rank: int, verb: Verb, key: str) -> None:
        """Lets a living process' operation through to the storage."""
        while (rest_s := self._stopped_until_s[rank] - anyio.current_time()) > 0:
            if math.isinf(rest_s):
                raise StorageError(op=verb, key=key, backend="simulated", detail="killed")
            await anyio.sleep(rest_s)
