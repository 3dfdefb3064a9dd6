"""A simulated world: many ranks of one save in one process, on any anyio backend.

Real actors and machines over the in-process transport; only the ranks' processes are missing.
Under trio's virtual clock an hour of waiting takes no time, and a seed repeats a run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio

from actorsnap.actors.budget import Budget
from actorsnap.actors.coordinator import CommitTemplate, CoordinatorActor
from actorsnap.actors.errands import Errands
from actorsnap.actors.session import ParticipantActor, SaveSettings
from actorsnap.actors.trace import ProgressBoard
from actorsnap.planning.packing import PackingRules
from actorsnap.protocol.coordinator import CoordinatorMachine
from actorsnap.protocol.messages import Failure
from actorsnap.protocol.participant import ParticipantMachine, StartStoring
from actorsnap.release import RELEASE
from actorsnap.state.capture import capture
from actorsnap.storage.base import RunBlocking, Storage
from actorsnap.transport.inproc import InprocTransport

__all__ = ["SimulatedSave"]

_MIB = 1 << 20


@dataclass(kw_only=True)
class SimulatedSave:
    """One save by ``len(states)`` ranks.

    Args:
        storages: One per rank; the coordinator uses the first one's.
        states: Each rank's app state.
        replicated: Globs, the same on all ranks.
        release_of: Releases of ranks that run another one.
        copies: As in ``async_take``.
    """

    storages: Sequence[Storage]
    states: Sequence[Mapping[str, Any]]
    run_blocking: RunBlocking
    attempt: str
    replicated: Sequence[str] = ()
    timeout_s: float = 60.0
    overwrite: bool = False
    copies: bool = False
    budget_bytes: int = 64 * _MIB
    chunk_bytes: int = 2 * _MIB
    release_of: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.staged: set[int] = set()
        self.causes: list[BaseException] = []
        self.participants: dict[int, ParticipantActor] = {}
        self.budgets = [Budget(self.budget_bytes) for _ in self.states]

    async def run(self) -> list[Failure | None]:
        """Runs to the end; returns each rank's outcome."""
        outcomes: dict[int, Failure | None] = {}
        async with anyio.create_task_group() as tasks:
            label = f"simulated {self.attempt}"
            errands = Errands(tasks, run_blocking=self.run_blocking, label=label)
            await self._run(errands, outcomes)
        return [outcomes[rank] for rank in range(len(self.states))]

    async def _run(self, errands: Errands, outcomes: dict[int, Failure | None]) -> None:
        world_size = len(self.states)
        transport = InprocTransport(world_size)

        async def run_rank(rank: int) -> None:
            outcomes[rank] = await self.participants[rank].run()

        for rank, state in enumerate(self.states):
            self.participants[rank] = ParticipantActor(
                machine=ParticipantMachine(rank=rank, release=self.release_of.get(rank, RELEASE)),
                end=transport.participant(rank),
                open_storage=self._opener(rank),
                captured=capture(
                    state, replicated=self.replicated, ranks=range(world_size), rank=rank
                ),
                settings=SaveSettings(
                    copies=self.copies,
                    num_uploaders=2,
                    num_copiers=2,
                ),
                budget=self.budgets[rank],
                errands=errands,
                board=ProgressBoard(f"simulated rank {rank}"),
                on_staged=self._staged(rank),
                on_failure=self.causes.append,
            )
        coordinator = CoordinatorActor(
            machine=CoordinatorMachine(
                attempt=self.attempt,
                url="simulated",
                world_size=world_size,
                release=RELEASE,
                rules=PackingRules(
                    chunk_bytes=self.chunk_bytes, max_objects=2, min_object_bytes=_MIB
                ),
            ),
            end=transport.coordinator(),
            storage=self.storages[0],
            errands=errands,
            template=CommitTemplate(
                attempt=self.attempt,
                created="2026-01-01T00:00:00.000000Z",
                world_size=world_size,
                fsync=True,
                metadata={},
                overwrite=self.overwrite,
            ),
            timeout_s=self.timeout_s,
            on_failure=self.causes.append,
        )
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(coordinator.run)
                for rank in range(world_size):
                    tasks.start_soon(run_rank, rank)
        finally:
            transport.close()

    def _opener(self, rank: int) -> Callable[[StartStoring], Awaitable[Storage]]:
        async def open_storage(_: StartStoring) -> Storage:
            return self.storages[rank]

        return open_storage

    def _staged(self, rank: int) -> Callable[[], None]:
        return lambda: self.staged.add(rank)
