"""Real processes that go through the steps of a call together (see ``tests.worlds``)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from actorsnap.errors import ActorSnapError, StorageError
from actorsnap.options import Options
from actorsnap.protocol.gathering import Decision
from actorsnap.protocol.messages import Stage
from actorsnap.runtime.broadcast import Broadcaster, obstacle_of
from actorsnap.runtime.gathering import Steps, go_through
from actorsnap.runtime.host import Host, Script, run_sync
from actorsnap.runtime.ranks import find_team
from tests.worlds import Rank, World

__all__ = ["direct_go"]

OPTIONS = Options(timeout_s=15, lost_after_s=1.5)
NUM_STEPS = 3


def decide(step: int, payloads: Sequence[bytes]) -> Decision:
    return Decision(Stage.READ if step < NUM_STEPS - 1 else None, b"".join(payloads))


def go(me: Rank, trouble: str, whom: int) -> dict[str, Any]:
    """Three steps, and a broadcast in the last one; ``whom`` has ``trouble`` in the second."""
    me.join_gloo()
    team = find_team(None, None)
    assert team is not None
    assert obstacle_of(team.process_group) == ""
    data = bytearray(b"0123456789" if me.rank == 0 else bytes(10))
    broadcaster = Broadcaster(Host.get(), team.process_group, patience_s=10)

    def body(steps: Steps) -> Script[list[str]]:
        decided = [(yield from steps.arrive(b"%d" % me.rank))]
        if trouble and me.rank == whom:
            if trouble == "storage":
                raise StorageError(op="read", key="k", backend="b")
            if trouble == "other":
                raise ValueError("boom")
            if trouble == "interrupt":
                raise KeyboardInterrupt
            if trouble == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        decided.append((yield from steps.arrive()))
        if trouble == "kill in a broadcast" and me.rank == whom:
            os.kill(os.getpid(), signal.SIGKILL)
        yield from steps.perform(lambda *_: broadcaster(memoryview(data), 0))
        decided.append((yield from steps.arrive()))
        return [payload.decode() for payload in decided]

    said: dict[str, Any] = {}
    began = time.monotonic()
    try:
        said["decided"] = run_sync(go_through(team, OPTIONS, decide, body), name="go")
    except (ActorSnapError, KeyboardInterrupt) as error:
        said["error"] = [type(error).__name__, str(error)]
        said["cause"] = repr(error.__cause__)
        said["notes"] = getattr(error, "__notes__", [])
    said["took_s"] = time.monotonic() - began
    said["data"] = data.decode()
    if not trouble.startswith("kill"):
        # The next call goes as if nothing had been.
        said["again"] = run_sync(
            go_through(
                team, OPTIONS, lambda *_: Decision(None, b"x"), lambda steps: steps.arrive()
            ),
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
