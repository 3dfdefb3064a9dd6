# SPDX-License-Identifier: Apache-2.0
"""Real processes that pass the rounds of a call together (see ``tests.worlds``)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from actorsnap.errors import ActorSnapError, StorageError
from actorsnap.options import Options
from actorsnap.protocol.failure import Stage
from actorsnap.protocol.messages import CallKind, Label
from actorsnap.protocol.rounds import Continue
from actorsnap.runtime.broadcast import Broadcaster, obstacle
from actorsnap.runtime.host import Host, Script
from actorsnap.runtime.rounds import Arrive, Rounds, call_together
from actorsnap.runtime.script import run_sync
from actorsnap.runtime.team import find_team
from tests.worlds import Rank, World

__all__ = ["direct_go"]

OPTIONS = Options(timeout_s=60, lost_after_s=3)
NUM_ROUNDS = 3
LABEL = Label(CallKind.RESTORE, "/snapshot")


class Joined:
    """Decides what all ranks have brought along, joined."""

    stage = Stage.READ

    def __init__(self, num_rounds: int = NUM_ROUNDS) -> None:
        self._num_rounds = num_rounds

    def decide(self, round: int, payloads: Mapping[int, bytes]) -> Continue:
        return Continue(common=b"".join(payloads.values()), is_last=round == self._num_rounds - 1)


def go(me: Rank, trouble: str, whom: int) -> dict[str, Any]:
    """Three rounds, broadcasts before the last; ``whom`` has ``trouble`` before the second."""
    me.join_gloo()
    team = find_team(None, None)
    assert team is not None
    assert obstacle() == ""
    data = bytearray(b"0123456789" if me.rank == 0 else bytes(10))
    store = team.connection()

    def wait_for_others() -> None:
        """Until all are beyond the first round: what rank 0 has said may not have left it yet."""
        store.set(f"passed-{me.rank}", b"")
        store.wait([f"passed-{rank}" for rank in range(me.world)])

    async def share(host: Host, scope: str) -> None:
        broadcaster = Broadcaster(
            host,
            team.connection,
            name=scope,
            rank=me.rank,
            num_ranks=me.world,
            lost_after_s=OPTIONS.lost_after_s,
        )
        await broadcaster.meet()
        await broadcaster.broadcast(memoryview(data), 0)
        if trouble == "kill in a broadcast" and me.rank == whom:
            os.kill(os.getpid(), signal.SIGKILL)
        await broadcaster.broadcast(memoryview(data), 0)
        await broadcaster.close(is_done=True)

    def body(rounds: Rounds) -> Script[list[str]]:
        decided = [(yield from rounds.arrive(b"%d" % me.rank, then=Stage.READ))]
        if trouble and me.rank == whom:
            if trouble == "storage":
                raise StorageError(op="read", key="k", backend="b")
            if trouble == "other":
                raise ValueError("boom")
            if trouble == "interrupt":
                raise KeyboardInterrupt
            if trouble == "kill":
                wait_for_others()
                os.kill(os.getpid(), signal.SIGKILL)
        if trouble == "kill":
            wait_for_others()
        decided.append((yield from rounds.arrive()))

        async def work(host: Host, _: Arrive) -> None:
            await share(host, rounds.scope)

        yield from rounds.perform(work)
        decided.append((yield from rounds.arrive()))
        return [payload.decode() for payload in decided]

    said: dict[str, Any] = {}
    began = time.monotonic()
    try:
        said["decided"] = run_sync(call_together(team, LABEL, OPTIONS, Joined(), body), name="go")
    except (ActorSnapError, KeyboardInterrupt) as error:
        said["error"] = [type(error).__name__, str(error)]
        said["cause"] = repr(error.__cause__)
        said["notes"] = getattr(error, "__notes__", [])
    said["took_s"] = time.monotonic() - began
    said["data"] = data.decode()
    if not trouble.startswith("kill"):
        # The next call goes as if nothing had been.
        said["again"] = run_sync(
            call_together(team, LABEL, OPTIONS, Joined(1), lambda rounds: rounds.arrive(b"x")),
            name="again",
        ).decode()
        dist.barrier()
    team.port.close()
    return said


def direct_go(num_ranks: int, trouble: str, whom: int) -> list[Any]:
    world = World(num_ranks, go, trouble=trouble, whom=whom)
    try:
        others = [
            rank
            for number, rank in enumerate(world.ranks)
            if not trouble.startswith("kill") or number != whom
        ]
        return [rank.result() for rank in others]
    finally:
        world.end()
