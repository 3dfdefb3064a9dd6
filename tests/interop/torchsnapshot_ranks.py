# SPDX-License-Identifier: Apache-2.0
"""What ranks and directors do in ``test_torchsnapshot.py`` (see ``tests.worlds``)."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from actorsnap.interop.torchsnapshot import Snapshot, StateDict
from tests.formats.test_torchsnapshot import is_equal
from tests.worlds import Rank, World

__all__ = ["direct"]


def make_ddp(seed: int, group: Any = None) -> Any:
    torch.manual_seed(seed)
    model = DistributedDataParallel(torch.nn.Linear(4, 3), process_group=group)
    optimizer = torch.optim.Adagrad(model.parameters())
    return model, optimizer


def replicated_in(snapshot: Snapshot) -> list[str]:
    manifest = snapshot.get_manifest()
    return sorted(path for path, entry in manifest.items() if getattr(entry, "replicated", False))


def job(me: Rank, folder: str) -> None:
    """Each rank has a path of its own: rank 0's counts. Two ranks restore other ranks' state."""
    model, optimizer = make_ddp(0)
    app_state = {"model": model, "optimizer": optimizer, "own": StateDict(rank=me.rank)}
    snapshot = Snapshot.take(f"{folder}/{me.rank}", app_state, replicated=["optimizer/**"])
    assert snapshot.path == f"{folder}/0"
    pending = Snapshot.async_take(f"{folder}/b{me.rank}", app_state, replicated=["optimizer/**"])
    assert pending.path == f"{folder}/b0"
    assert pending.wait().metadata.world_size == me.world
    names = {path.split("/")[1] for path in replicated_in(snapshot)}
    assert names == {"model", "optimizer"}
    assert all(path.startswith("0/") for path in replicated_in(snapshot))
    other, another = make_ddp(1 + me.rank)
    own = StateDict(rank=-1)
    snapshot.restore({"model": other, "optimizer": another, "own": own})
    assert is_equal(other.state_dict(), model.state_dict())
    assert is_equal(another.state_dict(), optimizer.state_dict())
    assert own["rank"] == me.rank
    assert snapshot.read_object(f"{me.rank}/own/rank") == me.rank
    assert snapshot.get_state_dict_for_key("own") == {"rank": me.rank}
    assert snapshot.get_state_dict_for_key("own", replicate_from_rank0=True) == {"rank": 0}
    weight = snapshot.read_object(f"{me.rank}/model/module.weight")
    assert torch.equal(weight, model.state_dict()["module.weight"])


def globs(me: Rank, folder: str) -> None:
    """Those that all ranks pass count."""
    state = StateDict(foo=torch.ones(2), qux={"a": torch.ones(1)}, bar=torch.ones(1))
    mine = [["s/foo", "s/qux/*"], ["s/foo", "s/bax"]][me.rank]
    snapshot = Snapshot.take(f"{folder}/s", {"s": state}, replicated=mine)
    assert replicated_in(snapshot) == ["0/s/foo"]
    snapshot = Snapshot.take(f"{folder}/s", {"s": state}, replicated=["**"])
    assert replicated_in(snapshot) == ["0/s/bar", "0/s/foo", "0/s/qux/a"]
    state[f"only{me.rank}"] = torch.ones(1)
    snapshot = Snapshot.take(f"{folder}/s", {"s": state}, replicated=["**"])
    manifest = snapshot.get_manifest()
    assert {path for path in manifest if "only" in path} == {"0/s/only0", "0/s/only1"}
    assert torch.equal(snapshot.read_object("0/s/only1"), torch.ones(1))


def subgroup(me: Rank, folder: str) -> None:
    """All but the last rank save, and all restore."""
    group = dist.new_group(list(range(me.world - 1)), backend="gloo")
    saved: Any = torch.nn.Linear(4, 3)
    torch.nn.init.ones_(saved.weight)
    torch.nn.init.zeros_(saved.bias)
    if me.rank < me.world - 1:
        model = DistributedDataParallel(saved, process_group=group)
        Snapshot.take(f"{folder}/s", {"m": model}, pg=group)
        snapshot = Snapshot(f"{folder}/s", pg=group)
        assert snapshot.metadata.world_size == me.world - 1
        snapshot.restore({"m": model})
    dist.barrier()
    other, _ = make_ddp(me.rank)
    Snapshot(f"{folder}/s").restore({"m": other})
    assert is_equal(other.module.state_dict(), saved.state_dict())


def _work(me: Rank, name: str, folder: str) -> None:
    me.join_gloo()
    globals()[name](me, folder)
    dist.destroy_process_group()


def direct(num_ranks: int, **arguments: Any) -> list[Any]:
    world = World(num_ranks, functools.partial(_work, **arguments))
    try:
        return world.results()
    finally:
        world.end()
