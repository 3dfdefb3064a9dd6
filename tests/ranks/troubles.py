# SPDX-License-Identifier: Apache-2.0
"""What ranks and directors do in ``test_troubles.py`` (see ``tests.worlds``)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from actorsnap import ActorSnapError, Options, StateDict
from actorsnap.storage.base import Storage, StorageContext
from actorsnap.storage.registry import open_storage, register
from actorsnap.sync import Snapshot
from actorsnap.testing.faults import FaultyStorage
from tests.api.faults import faulty, faulty_url
from tests.held.actorsnap_raising import KINDS, Raising
from tests.worlds import Rank, World

LOST_AFTER_S = 3.0
OPTIONS = Options(timeout_s=60.0, lost_after_s=LOST_AFTER_S, fsync=False)
_MIB = 1 << 20


def state(rank: int, fill: float = 1.0) -> dict[str, Any]:
    """Large enough that all ranks write to one object, and something of each rank's own."""
    shared = {f"w{n}": torch.full((_MIB,), fill + n) for n in range(2)}
    return {"model": StateDict(shared), "own": StateDict({"x": torch.full((7,), float(rank))})}


def warnings() -> list[str]:
    """Returns the list that gets all warnings of this process from now on."""
    texts: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    logging.disable(logging.NOTSET)
    logging.getLogger("actorsnap").addHandler(Lines(logging.WARNING))
    return texts


def outcome(work: Callable[[], Any]) -> dict[str, Any]:
    """How a call ended, and how long it took."""
    began = time.monotonic()
    said: dict[str, Any] = {"error": "", "text": ""}
    try:
        work()
    except Exception as error:
        said = {"error": type(error).__name__, "text": str(error)}
        said["cause"] = type(error.__cause__).__name__
        if isinstance(error, ActorSnapError):
            said |= {name: error.fields.get(name) for name in ("rank", "stage", "key")}
    return {**said, "seconds": time.monotonic() - began}


def takes(path: str, rank: int, **more: Any) -> dict[str, Any]:
    arguments = {"replicated": ["model/**"], "options": OPTIONS, **more}
    return outcome(lambda: Snapshot.take(path, state(rank), **arguments))


def loses_the_store(me: Rank, path: str) -> dict[str, Any]:
    me.join_gloo()
    assert takes(path, me.rank)["error"] == ""
    me.say("ready")
    me.hear()
    return takes(path, me.rank, overwrite=True)


def direct_loses_the_store(num_ranks: int, path: str) -> list[Any]:
    world = World(num_ranks, loses_the_store, path=path)
    try:
        for rank in world.ranks:
            rank.hear()
        world.server.kill()
        for rank in world.ranks:
            rank.tell()
        return world.results()
    finally:
        world.end()


class _Raising:
    def state_dict(self) -> dict[str, Any]:
        raise KeyError("no such thing")

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


class _Slow:
    def state_dict(self) -> dict[str, Any]:
        time.sleep(3.2)
        return {}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


class _Collective:
    """A stateful whose state_dict all ranks have to call."""

    def state_dict(self) -> dict[str, Any]:
        total = torch.ones(1)
        dist.all_reduce(total)
        return {"total": total}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


def _apart(url: str, context: StorageContext) -> Storage:
    """A path that is another folder on each rank."""
    return open_storage(f"{url.removeprefix('apart://')}-{dist.get_rank()}", context)


register("apart", _apart)


def wrong(me: Rank, path: str, what: str) -> dict[str, Any]:
    """One thing is wrong with one rank; then all save again, to the same path."""
    me.join_gloo()
    odd = me.rank == 1
    app: Any = state(me.rank)
    more: dict[str, Any] = {"replicated": ["model/**"], "options": OPTIONS}
    storage: AbstractContextManager[None] = nullcontext()
    where: Any = path
    match what:
        case "path" if odd:
            where = ""
        case "step" if odd:
            more["step"] = True
        case "step of rank 0" if me.rank == 0:
            more["step"] = True
        case "step of rank 0":
            time.sleep(0.5)  # rank 0 has refused its call by then
        case "options" if odd:
            more["options"] = "fast"
        case "raises":
            app["z"] = _Collective()
            if odd:
                app["b"] = _Raising()
        case "slow" if me.rank == 0:
            app["slow"] = _Slow()
            more["options"] = Options(fsync=False, lost_after_s=4.0)
        case "stuck":
            more["options"] = Options(fsync=False, timeout_s=2.0)
            if odd:
                app["slow"] = _Slow()
        case "globs" if odd:
            more["replicated"] = ["model/w0"]
        case "part" | "no part" | "shared":
            mesh = init_device_mesh("cpu", (me.world,))
            whole = distribute_tensor(torch.arange(12.0), mesh, [Shard(0)])
            app["sharded"] = StateDict({"x": torch.ones(12) if odd else whole})
            if what == "no part" and odd:
                del app["sharded"]["x"]
            if what == "shared":
                more["replicated"] = ["model/**", "sharded/**"]
        case "shape" if odd:
            app["model"]["w1"] = torch.zeros(5)
        case "keys":
            app[f"only{me.rank}"] = StateDict({"x": torch.full((3,), float(me.rank))})
        case "leaf" if odd:
            app["own"]["x"] = object()
        case "storage":
            where = faulty_url(path)
            if odd:
                storage = faulty(lambda inner: FaultyStorage(inner, fail_at=1))
        case "storage of rank 0":
            where = faulty_url(path)
            if me.rank == 0:
                storage = faulty(
                    lambda inner: FaultyStorage(inner, fail_at=1, fail_verbs=["put_if_absent"])
                )
        case "not shared":
            where = "apart://" + path
        case "not shared, nothing shared":
            where, more["replicated"] = "apart://" + path, []
        case "never":
            # Connecting may take longer than this rank's patience.
            assert takes(path, me.rank)["error"] == ""
            more |= {"options": Options(timeout_s=4.0), "overwrite": True}
    with storage:
        if what == "never" and odd:
            dist.barrier()
            first = None
        else:
            first = outcome(lambda: Snapshot.take(where, app, **more))
            if what == "never":
                dist.barrier()
    if what == "never":
        return {"first": first}
    found = {}
    if what == "keys":
        assert first is not None
        assert first["error"] == "", first
        snapshot = Snapshot(path)
        names = [name for name in snapshot.get_manifest() if name.startswith(f"{me.rank}/only")]
        found = {name: snapshot.read_object(name).tolist() for name in names if name.endswith("/x")}
        dist.barrier()
    again = takes(path, me.rank, overwrite=True)
    dist.barrier()
    return {"first": first, "again": again, "found": found}


def fails_in_the_background(me: Rank, path: str) -> list[str]:
    """What a rank logs of a save that fails after its state is staged."""
    me.join_gloo()
    lines = warnings()
    pending = Snapshot.async_take(f"apart://{path}", state(me.rank), options=OPTIONS)
    said = outcome(pending.wait)
    assert said["error"] == "SnapshotAborted"
    return [line for line in lines if said["text"] in line]


def direct_fails_in_the_background(num_ranks: int, **arguments: Any) -> list[Any]:
    world = World(num_ranks, fails_in_the_background, **arguments)
    try:
        return world.results()
    finally:
        world.end()


def direct_wrong(num_ranks: int, **arguments: Any) -> list[Any]:
    world = World(num_ranks, wrong, **arguments)
    try:
        return world.results()
    finally:
        world.end()


def two_at_once(me: Rank, path: str) -> dict[str, Any]:
    """Two saves in flight, and a third with the same structure: it says little."""
    me.join_gloo()
    from actorsnap.runtime.team import find_team

    app = state(me.rank)
    # With heartbeats so seldom that few of them count.
    options = Options(timeout_s=30.0, fsync=False)
    arguments: dict[str, Any] = {"replicated": ["model/**"], "options": options}
    pending = [Snapshot.async_take(f"{path}-{n}", app, **arguments) for n in range(2)]
    snapshots = [one.wait() for one in reversed(pending)]
    team = find_team(None, None)
    assert team is not None
    before = team.port.statistics.bytes_sent
    app["model"]["w0"].fill_(5.0)
    Snapshot.take(f"{path}-2", app, **arguments)
    after = team.port.statistics.bytes_sent
    dist.barrier()
    return {"paths": [s.path for s in snapshots], "bytes": after - before}


def direct_two_at_once(num_ranks: int, path: str) -> list[Any]:
    world = World(num_ranks, two_at_once, path=path)
    try:
        return world.results()
    finally:
        world.end()


def one_store(me: Rank, path: str) -> dict[str, Any]:
    """Ranks 0 and 1 are one job, 2 and 3 another, at one store."""
    job, rank = divmod(me.rank, 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    store: Any = dist.PrefixStore(f"job{job}", me.store())  # type: ignore[attr-defined]
    snapshot = Snapshot.take(
        f"{path}-{job}", state(rank, fill=float(job)), replicated=["model/**"], store=store
    )
    me.say(None)
    me.hear()
    return {"path": snapshot.path}


def direct_one_store(path: str) -> list[Any]:
    world = World(4, one_store, path=path)
    try:
        for rank in world.ranks:
            said = rank.hear()
            assert said is None, said
        for rank in world.ranks:
            rank.tell()
        return world.results()
    finally:
        world.end()


def odd_names(me: Rank, path: str) -> dict[str, Any]:
    """A path that is no UTF-8, and a key that is none either."""
    me.join_gloo()
    url = f"{path}-\udcff"
    app = {"\ud800": StateDict({"x": torch.full((5,), 3.0)}), **state(me.rank)}
    globs = ["\ud800/**", "%ud800/**", "model/**"]
    said = [outcome(lambda: Snapshot.take(url, app, replicated=globs, options=OPTIONS))]
    app["\ud800"]["x"].zero_()
    said.append(outcome(lambda: Snapshot(url, options=OPTIONS).restore(app)))
    said.append(outcome(lambda: Snapshot.take(url, app, options=OPTIONS)))
    dist.barrier()
    return {"said": said, "x": app["\ud800"]["x"].tolist()}


def direct_odd_names(num_ranks: int, path: str) -> list[Any]:
    world = World(num_ranks, odd_names, path=path)
    try:
        return world.results()
    finally:
        world.end()


def group_of_some(me: Rank, path: str) -> dict[str, Any]:
    """Ranks 1 and 3 save what they share; a tensor that lies on all ranks they cannot."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    me.join_gloo()
    group = dist.new_group([1, 3])
    mesh = init_device_mesh("cpu", (4,))
    spread = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    said = {}
    if me.rank in (1, 3):
        said["refused"] = outcome(
            lambda: Snapshot.take(path, {"a": StateDict({"t": spread})}, group=group)
        )
        said["saved"] = takes(path, me.rank, group=group)
    else:
        said["refused"] = outcome(lambda: Snapshot.take(path, state(0), group=group))
    dist.barrier()
    return said


def direct_group_of_some(path: str) -> list[Any]:
    world = World(4, group_of_some, path=path)
    try:
        return world.results()
    finally:
        world.end()


class _Unspeakable:
    def state_dict(self) -> dict[str, Any]:
        raise KINDS["Unspeakable"]()

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


def odd_endings(me: Rank, path: str, cells: list[tuple[str, str, int]]) -> list[Any]:
    """Per cell, the verb of one rank's storage raises in a save or a restore by all ranks."""
    me.join_gloo()
    takes(f"{path}-whole", me.rank)
    said = []
    for number, (verb, kind, rank) in enumerate(cells):
        raises: AbstractContextManager[None] = nullcontext()
        there = f"{path}-{number}"
        if me.rank == rank:
            raises = faulty(lambda inner, verb=verb, kind=kind: Raising(inner, verb, KINDS[kind]))  # type: ignore[misc]
        app: dict[str, Any] = state(me.rank)
        with raises:
            if verb == "read_into":
                url = faulty_url(f"{path}-whole")
                app = state(me.rank, fill=-1.0)
                first = outcome(lambda: Snapshot(url, options=OPTIONS).restore(app))  # noqa: B023
                there = f"{path}-whole"
            elif verb == "state_dict":
                if me.rank == rank:
                    app["odd"] = _Unspeakable()
                first = outcome(
                    lambda: Snapshot.take(there, app, replicated=["model/**"], options=OPTIONS)  # noqa: B023
                )
            else:
                first = takes(faulty_url(there), me.rank)
        dist.barrier()
        again = takes(there, me.rank, overwrite=True)
        said.append({"first": first, "again": again["error"]})
    return said


def direct_odd_endings(num_ranks: int, **arguments: Any) -> list[Any]:
    world = World(num_ranks, odd_endings, **arguments)
    try:
        return world.results()
    finally:
        world.end()
