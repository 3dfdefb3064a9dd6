# SPDX-License-Identifier: Apache-2.0
"""What real processes do that speak through a store (see ``tests.worlds``).

Ranks do their messages on the real runtime's thread, while their main thread is the trainer.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from actorsnap import UsageError
from actorsnap.protocol.messages import Arrived, Proceed
from actorsnap.runtime.host import Host
from actorsnap.state.process_group import Group, find_group
from actorsnap.transport.ends import Broken, PeerLost
from actorsnap.transport.store import StorePort, StoreSave
from tests.worlds import LIMIT_S, Rank, World

DONE = Proceed(-1, is_last=True)


# What a rank can be told


def open_port(found: Group | None, **options: Any) -> StorePort:
    assert found is not None
    return StorePort(
        found.store,
        namespace=found.name,
        rank=found.rank,
        world_size=found.world_size,
        call_soon=Host.get().call_soon,
        **options,
    )


def on_loop(work: Callable[[], Any]) -> Any:
    return Host.get().submit(work()).future


async def ping(save: StoreSave, rank: int, count: int) -> int:
    """As a participant: ``count`` questions and answers, until all are done."""
    answers = 0
    for number in range(count):
        await save.participant.send(Arrived(rank, number))
    while (answer := await save.participant.receive()) != DONE:
        assert answer == Proceed(answers), answer
        answers += 1
    return answers


async def answer(save: StoreSave, world_size: int, count: int) -> None:
    """As the coordinator: answers everybody, in any order, then ends the save."""
    assert save.coordinator is not None
    seen = dict.fromkeys(range(world_size), 0)
    while any(n < count for n in seen.values()):
        asked = await save.coordinator.receive()
        assert isinstance(asked, Arrived), asked
        assert asked.round == seen[asked.rank]
        seen[asked.rank] += 1
        await save.coordinator.send(asked.rank, Proceed(asked.round))
    for rank in seen:
        await save.coordinator.send(rank, DONE)


async def first_trouble(save: StoreSave, world_size: int) -> dict[str, Any]:
    """What the decisive end of this rank is told about others; the coordinator ends the save."""
    end = save.participant if save.coordinator is None else save.coordinator
    while True:
        item = await end.receive()
        if item == DONE:
            return {"done": True}
        if isinstance(item, PeerLost) and save.coordinator is not None:
            for rank in range(1, world_size):
                await save.coordinator.send(rank, DONE)
        if isinstance(item, PeerLost):
            return {"lost": item.rank, "silent_s": item.silent_s, "at": time.monotonic()}
        if isinstance(item, Broken):
            return {"broken": item.reason, "at": time.monotonic()}


def exchange(port: StorePort, count: int) -> tuple[int, list[float]]:
    """One save of pings, while this thread trains: answers, and sums of all_reduce."""
    sums: list[float] = []
    with port.begin() as save:
        calls = [on_loop(lambda: ping(save, port.rank, count))]
        if save.coordinator is not None:
            calls.append(on_loop(lambda: answer(save, port.world_size, count)))
        if dist.is_initialized():
            for step in range(40):
                tensor = torch.full((1000,), float(dist.get_rank() + step))
                dist.all_reduce(tensor)
                sums.append(tensor[-1].item())
        return [call.result(timeout=LIMIT_S) for call in calls][0], sums


def threads_of_ports() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("actorsnap-store")]


def environ_of(me: Rank) -> dict[str, str]:
    return {"RANK": str(me.rank), "WORLD_SIZE": str(me.world)}


def saves(me: Rank, how: str) -> dict[str, Any]:
    """Two saves in a group that is found in one of the ways there are."""
    environ = environ_of(me)
    if how == "gloo":
        me.join_gloo()
        found = find_group()
    elif how == "given":
        found = find_group(store=me.store(), environ=environ)
    else:
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(me.port)}
        environ |= {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "1"}
        if how == "agent":
            environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        found = find_group(environ=environ)
        assert find_group(environ=environ) == found
    assert found is not None
    port = open_port(found)
    done = [exchange(port, 50) for _ in range(2)]
    if dist.is_initialized():
        dist.barrier()
    me.say(None)
    me.hear()  # rank 0 may host the store
    port.close()
    statistics = port.statistics
    if dist.is_initialized():
        dist.destroy_process_group()
    return {
        "answers": [answers for answers, _ in done],
        "sums": done[-1][1],
        "name": found.name,
        "ranks": found.ranks,
        "sent": statistics.messages_sent,
        "threads": threads_of_ports(),
    }


def sub_groups(me: Rank) -> dict[str, Any]:
    """Two disjoint groups save at the same time, over one server, and all ranks too."""
    me.join_gloo()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[me.rank % 2]
    try:
        find_group(groups[1 - me.rank % 2])
        refused = ""
    except UsageError as error:
        refused = str(error)
    found, whole = find_group(mine), find_group()
    assert found is not None
    ports = [open_port(found), open_port(whole)]
    answers = [exchange(port, 20)[0] for port in ports]
    dist.barrier()
    for port in ports:
        port.close()
    dist.barrier()
    dist.destroy_process_group()
    return {
        "answers": answers,
        "name": found.name,
        "ranks": found.ranks,
        "rank": found.rank,
        "refused": refused,
    }


def wait_for_trouble(me: Rank, lost_after_s: float) -> dict[str, Any]:
    """Takes part until somebody is lost; then, when told, in another save."""
    port = open_port(find_group(store=me.store(), environ=environ_of(me)))
    with port.begin(lost_after_s=lost_after_s) as save:
        if save.coordinator is None:
            on_loop(lambda: save.participant.send(Arrived(me.rank, 0))).result()
        call = on_loop(lambda: first_trouble(save, me.world))
        end = save.participant if save.coordinator is None else save.coordinator
        others = {0} if save.coordinator is None else set(range(1, me.world))
        while not others <= end._heard.keys():
            time.sleep(0.01)
        me.say("ready")
        try:
            trouble = call.result(timeout=LIMIT_S)
        finally:
            me.say(None)
        me.hear()
        if save.coordinator is None:
            on_loop(lambda: save.participant.send(Arrived(me.rank, 1, b"late"))).result()
    again: Any = None
    if "broken" not in trouble and me.world == 2:
        again, _ = exchange(port, 10)
    port.close()
    return {**trouble, "again": again, "threads": threads_of_ports()}


def fork_in_the_middle(me: Rank) -> dict[str, Any]:
    """A rank forks, and the child tries the port, closes it, and exits."""
    port = open_port(find_group(store=me.store(), environ=environ_of(me)))
    exchange(port, 5)
    into_child = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = "nothing"
        try:
            port.begin()
        except UsageError as error:
            said = str(error)
        port.close()
        os.write(into_child[1], said.encode())
        del port
        sys.exit(0)  # the interpreter ends as it does, with what it inherited
    status = os.waitpid(pid, 0)[1]
    said = os.read(into_child[0], 4096).decode()
    answers, _ = exchange(port, 5)
    port.close()
    return {"said": said, "status": status, "answers": answers}


# Directors: they make a world, and do to it what ranks cannot do to themselves


def direct_saves(num_ranks: int, how: str) -> dict[str, Any]:
    world = World(num_ranks, saves, how=how)
    try:
        for rank in world.ranks:
            said = rank.hear()
            assert said is None, said["error"]
        for rank in reversed(world.ranks):
            rank.tell()
        return {"ranks": world.results(), "keys": world.num_keys()}
    finally:
        world.end()


def only_join(me: Rank, how: str) -> None:
    if how == "gloo":
        me.join_gloo()
        dist.barrier()
    me.say(None)
    me.hear()


def direct_keys(num_ranks: int, how: str) -> int:
    """What is in the store when nobody saves."""
    world = World(num_ranks, only_join, how=how)
    try:
        for rank in world.ranks:
            rank.hear()
        return world.num_keys()
    finally:
        world.end()


def direct_sub_groups() -> list[Any]:
    world = World(4, sub_groups)
    try:
        return world.results()
    finally:
        world.end()


def direct_trouble(num_ranks: int, whom: str, how: str) -> dict[str, Any]:
    """One process is killed or stopped; what the others say, and when."""
    world = World(num_ranks, wait_for_trouble, lost_after_s=2.4)
    victim = world.server if whom == "server" else world.ranks[int(whom)]
    others = [rank for rank in world.ranks if rank is not victim]
    try:
        for rank in world.ranks:
            assert rank.hear() == "ready"
        began = time.monotonic()
        victim.kill(signal.SIGSTOP if how == "stop" else signal.SIGKILL)
        for rank in others:
            assert rank.hear() is None
        if how == "stop":
            victim.kill(signal.SIGCONT)
            others = world.ranks
        for rank in others:
            rank.tell()
        return {"began": began, "ranks": [rank.result() for rank in others]}
    finally:
        world.end()


def direct_fork() -> list[Any]:
    world = World(2, fork_in_the_middle)
    try:
        return world.results()
    finally:
        world.end()
