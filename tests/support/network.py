# SPDX-License-Identifier: Apache-2.0
"""A transport between simulated ranks that is as bad as a real one may be.

Messages are late and come twice; those of two parties keep their order, others do not. A
rank can fall silent, for a while or for ever, and an end can break. What is drawn comes from
one random generator, so that a seed repeats a run. For use on one event loop.

It must not know what the messages mean.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from typing import Any

import anyio
import anyio.lowlevel

from actorsnap.protocol.messages import FromCoordinator, ToCoordinator
from actorsnap.transport.ends import Began, Broken, CoordinatorEnd, ParticipantEnd, PeerLost

__all__ = ["SimulatedNetwork"]


class _Inbox:
    """What is on its way to one end.

    Args:
        owner: The rank whose process holds the end.
    """

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self._items: list[tuple[float, int, Any]] = []
        self._numbers = itertools.count()
        self._changed = anyio.Event()
        self._asleep_until_s = 0.0
        self._is_broken = False

    def put(self, at_s: float, item: Any) -> None:
        if not self._is_broken:
            heapq.heappush(self._items, (at_s, next(self._numbers), item))
            self._changed.set()

    def sleep_until(self, at_s: float) -> None:
        self._asleep_until_s = at_s

    def break_off(self, reason: str) -> None:
        self._items.clear()
        self.put(0.0, Broken(reason=reason))
        self._is_broken = True

    async def receive(self) -> Any:
        await anyio.lowlevel.checkpoint_if_cancelled()
        while True:
            due_s = max(self._items[0][0], self._asleep_until_s) if self._items else math.inf
            if due_s <= anyio.current_time():
                return heapq.heappop(self._items)[2]
            self._changed = anyio.Event()
            with anyio.CancelScope(deadline=due_s):
                await self._changed.wait()


class SimulatedNetwork:
    """All ends of one save.

    Args:
        world_size: Ranks.
        rng: Draws what happens.
        max_delay_s: Of a message between two processes; less than ``lost_after_s``.
        repeats: The share of these that come twice, the second time late.
        lost_after_s: A rank that began, and then was silent for so long, is ``PeerLost``.
    """

    def __init__(
        self,
        world_size: int,
        *,
        rng: random.Random | None = None,
        max_delay_s: float = 0.0,
        repeats: float = 0.0,
        lost_after_s: float = 30.0,
    ) -> None:
        self.lost_after_s = lost_after_s
        self._rng = rng or random.Random(0)
        self._max_delay_s = max_delay_s
        self._repeats = repeats
        self._up = _Inbox(0)
        self._down = [_Inbox(rank) for rank in range(world_size)]
        self._begun: set[int] = set()
        self._lost: set[int] = set()
        self._broken: set[int] = set()
        self._asleep_until_s = [0.0] * world_size
        self._away_s = 0.0
        self._arrives_s: dict[tuple[int, _Inbox], float] = {}

    def participant(self, rank: int) -> ParticipantEnd:
        """The end of ``rank``."""
        return _Participant(self, rank)

    def coordinator(self) -> CoordinatorEnd:
        """The coordinator's end."""
        return _Coordinator(self)

    def begin(self, rank: int, tag: bytes = b"") -> None:
        """The rank takes part from now on: its silence will be noticed."""
        self._begun.add(rank)
        if tag:
            self._carry(rank, self._up, Began(rank=rank, tag=tag))

    def silence(self, rank: int, for_s: float = math.inf) -> None:
        """The rank says and hears nothing for so long; the others notice if that is too long.
        Call it, too, when the rank has its outcome: it says no more that it is there."""
        now = anyio.current_time()
        if rank == 0:
            self._away_s = max(self._away_s, for_s)
        self._asleep_until_s[rank] = now + for_s
        for inbox in self._inboxes(rank):
            inbox.sleep_until(now + for_s)
        if for_s <= self.lost_after_s or rank not in self._begun or rank in self._lost:
            return
        self._lost.add(rank)
        lost = PeerLost(rank=rank, silent_s=self.lost_after_s)
        for inbox in self._down[1:] if rank == 0 else [self._up]:
            inbox.put(now + self.lost_after_s, lost)

    def break_off(self, rank: int, reason: str) -> None:
        """The rank cannot reach the others any more, knows it, and falls silent for them."""
        self.silence(rank)
        self._asleep_until_s[rank] = 0.0
        self._broken.add(rank)
        for inbox in self._inboxes(rank):
            inbox.sleep_until(0.0)
            inbox.break_off(reason)

    def _inboxes(self, rank: int) -> list[_Inbox]:
        return [self._down[rank], *([self._up] if rank == 0 else [])]

    def _carry(self, sender: int, inbox: _Inbox, message: object) -> None:
        if sender in self._broken or math.isinf(self._asleep_until_s[sender]):
            return
        at_s = max(anyio.current_time(), self._asleep_until_s[sender])
        is_local = sender == inbox.owner
        if not is_local:
            at_s += self._rng.random() * self._max_delay_s
        at_s = max(at_s, self._arrives_s.get((sender, inbox), 0.0))
        self._arrives_s[sender, inbox] = at_s
        inbox.put(at_s, message)
        if not is_local and self._rng.random() < self._repeats:
            inbox.put(at_s + self._rng.random() * self._max_delay_s, message)


class _Participant:
    def __init__(self, network: SimulatedNetwork, rank: int) -> None:
        self._network = network
        self._rank = rank

    async def send(self, message: ToCoordinator) -> None:
        await anyio.lowlevel.checkpoint()
        self._network._carry(self._rank, self._network._up, message)

    async def receive(self) -> FromCoordinator | PeerLost | Broken:
        item: FromCoordinator | PeerLost | Broken = await self._network._down[self._rank].receive()
        return item

    def has_coordinator(self) -> bool:
        return 0 in self._network._begun


class _Coordinator:
    def __init__(self, network: SimulatedNetwork) -> None:
        self._network = network

    async def send(self, rank: int, message: FromCoordinator) -> None:
        await anyio.lowlevel.checkpoint()
        self._network._carry(0, self._network._down[rank], message)

    async def receive(self) -> ToCoordinator | Began | PeerLost | Broken:
        item: ToCoordinator | Began | PeerLost | Broken = await self._network._up.receive()
        return item

    async def suspicion(self) -> str | None:
        away_s = self._network._away_s
        return "given up by the others" if away_s > self._network.lost_after_s else None
