# SPDX-License-Identifier: Apache-2.0
"""What ranks and directors do in ``test_dcp_ranks.py`` (see ``tests.worlds``)."""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict as state_dicts
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from actorsnap import ModelState, Options, StateDict
from actorsnap.interop import dcp as ours
from actorsnap.interop.dcp import ActorsnapReader, ActorsnapWriter, installed
from actorsnap.runtime import partial_index
from actorsnap.storage.base import Storage
from actorsnap.sync import Snapshot
from actorsnap.testing.faults import FaultyStorage
from tests.api.faults import faulty, faulty_url
from tests.ranks.models import STATES, step
from tests.ranks.restores import Watch
from tests.worlds import LIMIT_S, Rank, World

__all__ = ["direct", "direct_dies"]

dcp: Any = dist.checkpoint  # its stubs export little

OPTIONS = Options(timeout_s=60, lost_after_s=2)


def join(me: Rank, folder: str, store: str) -> None:
    if store == "file":
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=me.rank,
            world_size=me.world,
            timeout=datetime.timedelta(seconds=LIMIT_S),
        )
    else:
        me.join_gloo()


def plain(value: Any) -> Any:
    """A state dict with whole tensors, to compare and to keep."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    return value.clone() if isinstance(value, torch.Tensor) else value


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _parts(kind: str) -> tuple[Any, Any]:
    state = STATES[kind]()
    return state["model"], state.get("optim") or torch.optim.AdamW(state["model"].parameters())


def _state_dict(model: Any, optimizer: Any) -> dict[str, Any]:
    model_state, optim_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optim_state, "step": 7}


def train(me: Rank, path: str, folder: str, kind: str) -> Any:
    """Saves, trains on, loads: everything is as it was."""
    model, optimizer = _parts(kind)
    before = plain(_state_dict(model, optimizer))
    dcp.save(_state_dict(model, optimizer), storage_writer=ActorsnapWriter(path))
    step(model, optimizer, 5)
    state = _state_dict(model, optimizer)
    assert not same(plain(state), before)
    dcp.load(state, storage_reader=ActorsnapReader(path))
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    assert same(plain(_state_dict(model, optimizer)), before)
    if me.rank == 0:
        torch.save(before, Path(folder) / "before.pt")
    return len(list(Path(path).rglob("*")))


def load(me: Rank, path: str, folder: str, kind: str) -> Any:
    """Other ranks, perhaps of another number and mesh, read it."""
    model, optimizer = _parts(kind)
    state = _state_dict(model, optimizer)
    dcp.load(state, storage_reader=ActorsnapReader(path))
    assert same(plain(state), torch.load(Path(folder) / "before.pt"))
    return True


def torchs(me: Rank, path: str, folder: str, kind: str) -> Any:
    """Saves with torch's writer, with and without collectives."""
    model, optimizer = _parts(kind)
    dcp.save(_state_dict(model, optimizer), checkpoint_id=path)
    dcp.save(_state_dict(model, optimizer), checkpoint_id=path + "-alone", use_collectives=False)
    before = plain(_state_dict(model, optimizer))
    if me.rank == 0:
        torch.save(before, Path(folder) / "before.pt")
    return True


def restore(me: Rank, path: str, folder: str, kind: str) -> Any:
    """Restores what ``torchs`` has saved, without DCP."""
    model, optimizer = _parts(kind)
    step(model, optimizer, 5)
    state = {"train": ModelState(model, optimizer, flatten=False)}
    names = {"model": "train/model", "optim": "train/optim"}
    report = Snapshot(path).restore(state, rename=names)
    assert report.is_complete
    assert same(plain(_state_dict(model, optimizer)), torch.load(Path(folder) / "before.pt"))
    step(model, optimizer, 6)
    inner = model.module if kind == "ddp" else model  # torch's names have no prefix
    Snapshot(path).restore({"model": inner, "optim": optimizer})
    assert same(plain(_state_dict(model, optimizer)), torch.load(Path(folder) / "before.pt"))
    return True


def groups(me: Rank, path: str, folder: str) -> Any:
    """Two groups save at once; then each rank for itself; then with another coordinator."""
    half = me.world // 2
    groups = [dist.new_group([*range(half)]), dist.new_group([*range(half, me.world)])]
    number = me.rank // half
    ranks = [*range(number * half, (number + 1) * half)]
    group = groups[number]
    mesh = init_device_mesh("cpu", (2, half), mesh_dim_names=("a", "b"))["b"]
    whole = torch.arange(12.0).reshape(6, 2) + 100 * number
    state = {"x": distribute_tensor(whole, mesh, [Shard(0)]), "own": {"n": number}}
    for times in range(2):
        where = f"{path}-{number}-{times}"
        dcp.save(state, storage_writer=ActorsnapWriter(where), process_group=group)
    assert Snapshot(where).get_manifest()
    loaded: dict[str, Any] = {"x": distribute_tensor(whole * 0, mesh, [Shard(0)]), "own": {"n": -1}}
    dcp.load(loaded, storage_reader=ActorsnapReader(where), process_group=group)
    assert torch.equal(loaded["x"].full_tensor(), whole)
    assert loaded["own"]["n"] == number
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = f"{path}-alone-{me.rank}"
        dcp.save({"r": me.rank}, storage_writer=ActorsnapWriter(alone), no_dist=True)
        mine = {"r": -1}
        dcp.load(mine, storage_reader=ActorsnapReader(alone), no_dist=True)
        assert mine == {"r": me.rank}
        last = f"{path}-{number}-last"
        dcp.save_state_dict(
            state, ActorsnapWriter(last), process_group=group, coordinator_rank=half - 1
        )
    Snapshot(last).verify("full")
    return ranks


def alone(me: Rank, path: str, folder: str) -> Any:
    """Saves without collectives: values are each rank's own."""
    mesh = init_device_mesh("cpu", (me.world,))
    whole = torch.arange(16.0)
    state = {"x": distribute_tensor(whole, mesh, [Shard(0)]), "a": {"rank": me.rank}}
    dcp.save(state, storage_writer=ActorsnapWriter(path), use_collectives=False)
    loaded: dict[str, Any] = {
        "x": distribute_tensor(whole * 0, mesh, [Shard(0)]),
        "a": {"rank": -1},
    }
    dcp.load(loaded, storage_reader=ActorsnapReader(path))
    assert torch.equal(loaded["x"].full_tensor(), whole)
    return loaded["a"]["rank"]


def cached(me: Rank, path: str, folder: str) -> Any:
    """Plans are cached: all unchanged, or on some ranks."""
    mesh = init_device_mesh("cpu", (me.world,))
    seen = []
    for number in range(4):
        whole = torch.arange(16.0) + number
        state: dict[str, Any] = {
            "x": distribute_tensor(whole, mesh, [Shard(0)]),
            "a": {"n": number},
        }
        if number == 3 and me.rank == 1:
            state["only"] = {"here": torch.ones(2)}
        where = f"{path}-{number}"
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=ActorsnapWriter(where), planner=planner)
        loaded: dict[str, Any] = {
            "x": distribute_tensor(whole * 0, mesh, [Shard(0)]),
            "a": {"n": -1},
        }
        dcp.load(loaded, storage_reader=ActorsnapReader(where))
        assert torch.equal(loaded["x"].full_tensor(), whole)
        seen.append(loaded["a"]["n"])
    only = {"only": {"here": torch.zeros(2)}}
    dcp.load(only, storage_reader=ActorsnapReader(where))
    assert only["only"]["here"].sum() == 2
    return seen


def reshard(me: Rank, path: str, folder: str) -> Any:
    """Every placement into every other, on one and two axes, uneven."""
    flat = init_device_mesh("cpu", (me.world,))
    square = init_device_mesh("cpu", (2, me.world // 2))
    layouts: list[tuple[Any, Any]] = [
        (flat, [Shard(0)]),
        (flat, [Shard(1)]),
        (flat, [Replicate()]),
        (square, [Shard(0), Shard(1)]),
        (square, [Shard(1), Shard(0)]),
        (square, [Replicate(), Shard(0)]),
        (square, [Shard(1), Replicate()]),
    ]
    whole = torch.arange(7 * 9.0).reshape(7, 9)
    state = {str(n): distribute_tensor(whole, *layout) for n, layout in enumerate(layouts)}
    dcp.save(state, storage_writer=ActorsnapWriter(path))
    for shift in range(len(layouts)):
        loaded: dict[str, Any] = {
            str(n): distribute_tensor(whole * 0, *layouts[(n + shift) % len(layouts)])
            for n in range(len(layouts))
        }
        dcp.load(loaded, storage_reader=ActorsnapReader(path))
        for value in loaded.values():
            assert torch.equal(value.full_tensor(), whole)
    return True


def native(me: Rank, path: str, folder: str, kind: str) -> Any:
    """``save``, ``async_save`` and ``load`` with one import changed; no collective is called."""
    model, optimizer = _parts(kind)
    before = plain(_state_dict(model, optimizer))
    counted = Counted()
    state = _state_dict(model, optimizer)
    state["generator"] = {"own": torch.full((1 << 22,), me.rank, dtype=torch.uint8)}
    with counted:
        metadata = ours.save(state, checkpoint_id=path)
        future = ours.async_save(state, checkpoint_id=path + "-async")
        future.result()
    dist.barrier()
    for where in (path, path + "-async"):
        step(model, optimizer, 5)
        state = _state_dict(model, optimizer)
        state["generator"] = {"own": torch.zeros(1 << 22, dtype=torch.uint8)}
        options = Options(read_mode="direct" if where == path else "shared")
        with counted:
            ours.load(state, storage_reader=ActorsnapReader(where, options=options))
        assert len(state.pop("generator")["own"].unique()) == 1  # no mixture
        assert same(plain(state), before)
    listed: Any = metadata.state_dict_metadata["model.0.weight"]
    assert listed.size[0] == 37
    torchs = _state_dict(model, optimizer)
    dcp.load(torchs, storage_reader=ActorsnapReader(path))
    assert same(plain(torchs), before)
    if me.rank == 0:
        torch.save(before, Path(folder) / "before.pt")
    return counted.calls


_WIDE = {f"layer{n}": torch.arange(40.0 * 6).reshape(40, 6) + 1000 * n for n in range(7)}
_WIDE["narrow"] = torch.arange(15.0).reshape(3, 5)  # some ranks have none of it


def _wide(layouts: list[tuple[Any, Any]], scale: float = 1.0) -> dict[str, Any]:
    model = {
        name: distribute_tensor(value * scale, *layouts[number % len(layouts)])
        for number, (name, value) in enumerate(_WIDE.items())
    }
    plain = {"x": torch.arange(9.0) * scale, "lr": 0.1 * scale, "hyper": {"betas": (0.9, scale)}}
    return {"model": model, "plain": plain, "step": 7 * scale, "top": torch.ones(4) * scale}


def many_save(me: Rank, path: str, folder: str) -> Any:
    """A number of ranks at which a snapshot is read by its owner index."""
    flat = init_device_mesh("cpu", (me.world,))
    square = init_device_mesh("cpu", (2, me.world // 2))
    layouts: list[tuple[Any, Any]] = [
        (flat, [Shard(0)]),
        (square, [Replicate(), Shard(0)]),
        (square, [Shard(1), Shard(0)]),
        (flat, [Replicate()]),
    ]
    state = _wide(layouts)
    # Some leaves are in the state of one rank only.
    state[f"of{me.rank}"] = {"rank": me.rank, "x": torch.full((3,), float(me.rank))}
    ours.save(state, checkpoint_id=f"{path}-ours")
    dcp.save(state, storage_writer=ActorsnapWriter(f"{path}-torch"))
    dcp.save(state, storage_writer=ActorsnapWriter(f"{path}-alone"), use_collectives=False)
    return True


def many_load(me: Rank, path: str, folder: str, saved_by: int, few: int | None = None) -> Any:
    if few is not None:
        partial_index.FEW_RANKS = few
    flat = init_device_mesh("cpu", (me.world,))
    layouts: list[tuple[Any, Any]] = [(flat, [Shard(1)]), (flat, [Shard(0)])]
    begun = []
    begin = partial_index.PartialIndex.begin

    def counted(*args: Any) -> Any:
        begun.append(args)
        return begin(*args)

    setattr(partial_index.PartialIndex, "begin", counted)  # noqa: B010
    expected = plain(_wide(layouts))
    for where in ("ours", "torch", "alone"):
        for load in (ours.load, dcp.load):
            state = _wide(layouts, 0.0)
            others = range(saved_by) if where != "alone" else [me.rank]
            state |= {f"of{n}": {"rank": -1, "x": torch.zeros(3)} for n in others}
            load(state, storage_reader=ActorsnapReader(f"{path}-{where}"))
            for n in others:
                of = state.pop(f"of{n}")
                assert of["rank"] == n
                assert of["x"].tolist() == [n] * 3
            assert same(plain(state), expected), (where, load)
    return len(begun)


class Counted:
    """Counts collectives of objects, which DCP's planning consists of."""

    calls = 0
    _names = ("gather_object", "scatter_object_list", "broadcast_object_list", "all_gather_object")

    def __enter__(self) -> None:
        self._before = {name: getattr(dist, name) for name in self._names}
        for name in self._names:
            setattr(dist, name, functools.partial(self._call, self._before[name]))

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return function(*args, **kwargs)

    def __exit__(self, *_: object) -> None:
        for name, function in self._before.items():
            setattr(dist, name, function)


def state_dict_options(me: Rank, path: str, folder: str) -> Any:
    """Round trips of torch's state dicts, with each of their options, through take and restore."""
    names = state_dicts
    cases: dict[str, dict[str, Any]] = {
        "default": {},
        "cpu_offload": {"cpu_offload": True},
        "full_state_dict": {"full_state_dict": True},
        "on rank 0": {"full_state_dict": True, "cpu_offload": True},
        "flatten_optimizer_state_dict": {"flatten_optimizer_state_dict": True},
        "ignore_frozen_params": {"ignore_frozen_params": True},
    }  # flat and full at once: torch 2.13 raises a KeyError for its own state dict
    found = {}
    for case, given in cases.items():
        options = names.StateDictOptions(**given)
        (saved, trained), (model, optimizer) = _parts("fsdp2"), _parts("fsdp2")
        expected = plain(_state_dict(saved, trained))
        is_partial = "ignore_frozen_params" in given
        for one in (saved, model):
            one[0].weight.requires_grad_(not is_partial)
        step(model, optimizer, 5)
        assert not same(plain(_state_dict(model, optimizer)), expected)
        state = StateDict(
            zip(
                ("model", "optim"),
                names.get_state_dict(saved, trained, options=options),
                strict=True,
            )
        )
        where = f"{path}-{case}"
        replicated = [] if case == "on rank 0" else ["**"]
        Snapshot.take(where, {"train": state}, replicated=replicated, options=OPTIONS)
        target = StateDict(
            zip(
                ("model", "optim"),
                names.get_state_dict(model, optimizer, options=options),
                strict=True,
            )
        )
        Snapshot(where, options=OPTIONS).restore({"train": target})
        if case == "on rank 0":
            given |= {"broadcast_from_rank0": True}
            # The others were given nothing to save, and need nothing.
            assert me.rank == 0 or target.data == {"model": {}, "optim": {}}
        # Not set_state_dict: it takes a rank without a state dict out of the broadcast.
        options = names.StateDictOptions(**given, strict=not is_partial)
        names.set_model_state_dict(model, target["model"], options=options)
        names.set_optimizer_state_dict(model, optimizer, target["optim"], options=options)
        now = plain(_state_dict(model, optimizer))
        if is_partial:  # torch does not load the frozen parameter, nor its optimizer's state
            assert "0.weight" not in target["model"]
            for each in (now, expected):
                del each["model"]["0.weight"]
                each["optim"]["state"].pop("0.weight", None)
        found[case] = same(now, expected)
    return found


def submodules(me: Rank, path: str, folder: str) -> Any:
    """Parts of a model, with and without the prefixes of their names."""
    names = state_dicts
    saved, _ = _parts("fsdp2")
    expected = plain(names.get_model_state_dict(saved))
    found = {}
    for keep in (True, False):
        options = names.StateDictOptions(keep_submodule_prefixes=keep, strict=False)
        model, optimizer = _parts("fsdp2")
        step(model, optimizer, 5)

        def part(of: Any, options: Any = options) -> dict[str, Any]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # both are deprecated
                return dict(names.get_model_state_dict(of, submodules={of[1]}, options=options))

        where = f"{path}-{keep}"
        Snapshot.take(where, {"part": StateDict(part(saved))}, options=OPTIONS)
        target = StateDict(part(model))
        assert ("1.up.weight" in target) == keep
        Snapshot(where, options=OPTIONS).restore({"part": target})
        if keep:
            names.set_model_state_dict(model, target.data, options=options)
        else:
            names.set_model_state_dict(
                model, {f"1.{name}": value for name, value in target.items()}, options=options
            )
        now = plain(names.get_model_state_dict(model))
        found[str(keep)] = [name for name in expected if same(now[name], expected[name])]
    return found


def torch_file(me: Rank, path: str, folder: str) -> Any:
    """All ranks load one file of ``torch.save``, which has more than they knew of."""
    model, optimizer = _parts("fsdp2")
    before = plain(_state_dict(model, optimizer))
    file = f"{path}.pt"
    if me.rank == 0:
        # A table that has grown, which only the program knows how to fit in.
        torch.save({**before, "table": {"rows": torch.arange(1 << 20)}}, file)
    dist.barrier()
    step(model, optimizer, 5)
    watch = Watch()
    state = _state_dict(model, optimizer)
    table = StateDict()
    target = {
        "model": StateDict(state["model"]),
        "optim": StateDict(state["optim"]),
        "table": table,
    }
    options = Options(read_mode="shared", timeout_s=60, chunk_bytes=2 << 20)
    with faulty(watch):
        report = Snapshot(faulty_url(file), options=options).restore(target)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=target["model"].data,
        optim_state_dict=target["optim"].data,
    )
    assert same(plain(_state_dict(model, optimizer)), {**before, "step": 7})
    assert torch.equal(table["rows"], torch.arange(1 << 20))
    return {
        "bytes_read": watch.bytes_read,
        "nbytes": report.nbytes,
        "size": Path(file).stat().st_size,
    }


def asynchronous(me: Rank, path: str, folder: str, how: str) -> Any:
    """torch's ``async_save`` in a thread or a process, with and without our classes named."""
    mesh = init_device_mesh("cpu", (me.world,))
    kind = dcp.state_dict_saver.AsyncCheckpointerType[how]
    for number in range(3):
        whole = torch.arange(16.0) + number
        state: dict[str, Any] = {
            "x": distribute_tensor(whole, mesh, [Shard(0)]),
            "a": {"n": number},
        }
        where = f"{path}-{number}"
        writer: dict[str, Any] = {"storage_writer": ActorsnapWriter(where)}
        with installed() if number == 2 else contextlib.nullcontext():
            if number == 2:
                writer = {"checkpoint_id": where}
            future = dcp.async_save(state, async_checkpointer_type=kind, **writer)
            state["x"].to_local().zero_()
            future.result()
        loaded: dict[str, Any] = {
            "x": distribute_tensor(whole * 0, mesh, [Shard(0)]),
            "a": {"n": -1},
        }
        dcp.load(loaded, storage_reader=ActorsnapReader(where))
        assert torch.equal(loaded["x"].full_tensor(), whole)
        assert loaded["a"]["n"] == number
    executor: Any = importlib.import_module(f"{dcp.__name__}._async_process_executor")
    executor._CHECKPOINT_PROCESS = None  # ends it
    return True


def mixed(me: Rank, path: str, folder: str) -> Any:
    """What torch's own writer leaves when a rank fails in the same way."""

    class FailingTorch(dcp.FileSystemWriter):  # type: ignore[misc]
        def write_data(self, plan: Any, planner: Any) -> Any:
            if me.rank == 1:
                raise ValueError("injected")
            return super().write_data(plan, planner)

    dcp.save(_fault_state(me, 1), checkpoint_id=path)
    with contextlib.suppress(CheckpointException):
        dcp.save(_fault_state(me, 2), storage_writer=FailingTorch(path))
    loaded = _fault_state(me, -1)
    dcp.load(loaded, checkpoint_id=path)
    return sorted({*loaded["a"]["w"].tolist(), *loaded["x"].full_tensor().tolist()})


class Failing(ActorsnapWriter):
    """Fails in one hook on one rank."""

    def __init__(self, path: str, hook: str, me: Rank, rank: int) -> None:
        super().__init__(path, options=OPTIONS)
        self._hook = hook if rank == me.rank else ""

    def _fail(self, hook: str) -> None:
        if hook == self._hook:
            raise ValueError(f"injected into {hook}")

    def set_up_storage_writer(self, *args: Any, **kwargs: Any) -> None:
        self._fail("set_up_storage_writer")
        super().set_up_storage_writer(*args, **kwargs)

    def prepare_local_plan(self, plan: Any) -> Any:
        self._fail("prepare_local_plan")
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: Any) -> Any:
        self._fail("prepare_global_plan")
        return super().prepare_global_plan(plans)

    def write_data(self, plan: Any, planner: Any) -> Any:
        self._fail("before_write_data")
        if self._hook == "resolve_data":

            def fail(item: Any) -> Any:
                raise ValueError("injected into resolve_data")

            planner.resolve_data = fail
        result = super().write_data(plan, planner)
        self._fail("after_write_data")
        return result

    def finish(self, *args: Any, **kwargs: Any) -> None:
        self._fail("finish")
        super().finish(*args, **kwargs)


class FailingPlanner(DefaultSavePlanner):
    """Fails in one method on one rank, or kills it there."""

    def __init__(self, hook: str, me: Rank, rank: int) -> None:
        super().__init__()
        self._hook = hook if rank == me.rank else ""

    def _fail(self, hook: str) -> None:
        if hook == self._hook:
            raise ValueError(f"injected into {hook}")

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        self._fail("set_up_planner")
        super().set_up_planner(*args, **kwargs)

    def create_local_plan(self) -> Any:
        self._fail("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: Any) -> Any:
        self._fail("create_global_plan")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: Any) -> Any:
        self._fail("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, item: Any) -> Any:
        if self._hook == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(item)


class FailingState:
    """A stateful that fails or is killed when it is saved."""

    def __init__(self, hook: str, me: Rank, rank: int) -> None:
        self._hook = hook if rank == me.rank else ""

    def state_dict(self) -> dict[str, Any]:
        if self._hook == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._hook:
            raise ValueError("injected into state_dict")
        return {"v": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class FailingReader(ActorsnapReader):
    def __init__(self, path: str, hook: str, me: Rank, rank: int) -> None:
        super().__init__(path, options=OPTIONS)
        self._hook = hook if rank == me.rank else ""

    def _read_metadata(self, meta: Any) -> Any:
        if self._hook == "read_metadata":
            raise ValueError("injected into read_metadata")
        return super()._read_metadata(meta)

    def read_data(self, plan: Any, planner: Any) -> Any:
        if self._hook == "read_data":
            raise ValueError("injected into read_data")
        return super().read_data(plan, planner)


def _fault_state(me: Rank, number: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (me.world,))
    whole = torch.full((8,), float(number))
    return {
        "x": distribute_tensor(whole, mesh, [Shard(0)]),
        "a": {"n": number, "w": whole.clone()},
    }


def fault(me: Rank, path: str, folder: str, hook: str, rank: int) -> Any:
    """Fails to replace a snapshot, which stays whole: the old one or the new one."""
    dcp.save(_fault_state(me, 1), storage_writer=ActorsnapWriter(path))
    said: dict[str, Any] = {}
    try:
        dcp.save(_fault_state(me, 2), storage_writer=Failing(path, hook, me, rank))
    except CheckpointException as error:
        said["failed"] = sorted(error.failures)
        said["errors"] = {str(r): str(e[0]) for r, e in error.failures.items()}
        said["kinds"] = {str(r): type(e[0]).__name__ for r, e in error.failures.items()}
    loaded = _fault_state(me, -1)
    dcp.load(loaded, storage_reader=ActorsnapReader(path))
    numbers = {loaded["a"]["n"], *loaded["a"]["w"].tolist(), *loaded["x"].full_tensor().tolist()}
    said["numbers"] = sorted(numbers)
    dist.barrier()
    # The next save is as if nothing had been.
    dcp.save(_fault_state(me, 3), storage_writer=ActorsnapWriter(path, options=OPTIONS))
    dist.barrier()
    said["folders"] = len([each for each in Path(path).iterdir() if each.is_dir()])
    return said


def cached_fault(me: Rank, path: str, folder: str) -> Any:
    """A rank fails before ``write_data``, between saves with cached plans."""
    said = []
    for number in range(5):
        planner = FailingPlanner("finish_plan" if number == 2 else "", me, 1)
        planner._enable_plan_caching = True
        writer = ActorsnapWriter(path, options=OPTIONS)
        with contextlib.suppress(CheckpointException):
            dcp.save(_fault_state(me, number), storage_writer=writer, planner=planner)
        loaded = _fault_state(me, -1)
        dcp.load(loaded, storage_reader=ActorsnapReader(path))
        said.append(loaded["a"]["n"])
        dist.barrier()
    return said


PLANNER = ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan")


def fails(me: Rank, path: str, folder: str, way: str, hook: str, rank: int) -> Any:
    """A planner, the state or the storage fails on a rank. The older snapshot stays whole."""
    ours.save(_fault_state(me, 1), checkpoint_id=path)
    dist.barrier()
    state = _fault_state(me, 2)
    where, planner = path, None
    if hook in PLANNER:
        planner = FailingPlanner(hook, me, rank)
    elif hook == "state_dict":
        state["failing"] = FailingState(hook, me, rank)
    else:
        where = faulty_url(path)

    def wrap(inner: Storage) -> Storage:
        return FaultyStorage(inner, fail_at=1 if rank == me.rank else None, fail_verbs=[hook])

    writer = ActorsnapWriter(where, options=OPTIONS)
    said: dict[str, Any] = {}
    with faulty(wrap):
        try:
            if way == "async":
                ours.async_save(state, storage_writer=writer, planner=planner).result()
            else:
                save = dcp.save if way == "torch" else ours.save
                save(state, storage_writer=writer, planner=planner)
        except CheckpointException as error:
            found = error.failures
            said["failed"] = sorted(found)
            said["errors"] = {str(r): str(e[0]) for r, e in found.items()}
    dist.barrier()
    loaded = _fault_state(me, -1)
    ours.load(loaded, checkpoint_id=path)
    numbers = {loaded["a"]["n"], *loaded["a"]["w"].tolist(), *loaded["x"].full_tensor().tolist()}
    said["numbers"] = sorted(numbers)
    dist.barrier()
    ours.save(_fault_state(me, 3), checkpoint_id=path)
    dist.barrier()
    said["folders"] = len([each for each in Path(path).iterdir() if each.is_dir()])
    return said


def dies(me: Rank, path: str, folder: str, way: str) -> Any:
    """Rank 1 is killed while it saves; the other rank's call ends."""
    join(me, folder, "tcp")
    ours.save(_fault_state(me, 1), checkpoint_id=path)
    state = _fault_state(me, 2)
    planner = None
    if way == "torch":
        planner = FailingPlanner("killed", me, 1)
    else:
        state["failing"] = FailingState("killed", me, 1)
    try:
        ours.save(state, storage_writer=ActorsnapWriter(path, options=OPTIONS), planner=planner)
    except CheckpointException as error:
        return {str(r): type(e[0]).__name__ for r, e in error.failures.items()}
    except RuntimeError as error:
        return {"gloo": type(error).__name__}
    return None


def direct_dies(**arguments: Any) -> Any:
    world = World(2, dies, **arguments)
    try:
        assert world.ranks[1].dies()
        return world.ranks[0].result()
    finally:
        world.end()


def read_fault(me: Rank, path: str, folder: str, hook: str, rank: int) -> Any:
    if not hook.startswith("no_snapshot"):
        dcp.save(_fault_state(me, 1), storage_writer=ActorsnapWriter(path))
    try:
        if hook == "no_snapshot of ours":
            ours.load(_fault_state(me, -1), checkpoint_id=path)
        dcp.load(_fault_state(me, -1), storage_reader=FailingReader(path, hook, me, rank))
    except CheckpointException as error:
        return {
            "failed": sorted(error.failures),
            "kinds": sorted({type(e[0]).__name__ for e in error.failures.values()}),
            "text": str(error),
        }
    return None


CASES: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        *(train, load, groups, alone, cached, reshard, fault, read_fault),
        *(native, asynchronous, mixed, fails, many_save, many_load, cached_fault),
        *(torchs, state_dict_options, submodules, torch_file),
        restore,
    )
}


def case(
    me: Rank,
    name: str,
    path: str,
    folder: str,
    store: str,
    env: dict[str, str] | None = None,
    **arguments: Any,
) -> Any:
    os.environ |= env or {}
    join(me, folder, store)
    said = CASES[name](me, path, folder, **arguments)
    dist.barrier()
    dist.destroy_process_group()
    return said


def direct(num_ranks: int, **arguments: Any) -> list[Any]:
    world = World(num_ranks, case, **arguments)
    try:
        return world.results()
    finally:
        world.end()
