# SPDX-License-Identifier: Apache-2.0
"""Snapshots of many ranks, read by one process: whatever was cut is whole again, or a shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import actorsnap
from actorsnap import IncompatibleState, Options, RNGState, StateDict, UsageError
from actorsnap.format.geometry import Box
from actorsnap.format.manifest import CompositeEntry, ContainerEntry, Entry, ValueEntry
from actorsnap.planning.shared_reads import ReadMode
from actorsnap.protocol.restore import RestoreDecisions
from actorsnap.runtime.location import Location
from actorsnap.runtime.restore import Overwritten, RestoreCall, RestoreReport, restore_by
from actorsnap.runtime.rounds import Alone
from actorsnap.runtime.script import run_sync
from actorsnap.runtime.source import Source
from actorsnap.state.optim import prime_optimizer
from actorsnap.storage.base import StorageContext
from actorsnap.storage.registry import open_storage
from actorsnap.sync import Snapshot
from actorsnap.testing import run_blocking_in_thread
from tests.api.facades import Facade, each_facade
from tests.api.same import assert_same
from tests.state.saved import ATTEMPT, Part, Saved
from tests.state.test_distributed import fake_rank, index
from tests.support.world import SimulatedSave

MIB = 1 << 20


def rows_of(path: str, whole: torch.Tensor, world: int, rank: int) -> Part:
    """What a rank has of a tensor that is cut along its first dim."""
    size = len(whole) // world
    box = Box((rank * size, *[0] * (whole.ndim - 1)), (size, *whole.shape[1:]))
    return Part(path, whole[index(box)], box, tuple(whole.shape))


def module(fill: float = 0.0) -> nn.Linear:
    made = nn.Linear(4, 8)
    for parameter in made.parameters():
        nn.init.constant_(parameter, fill)
    return made


WEIGHT = torch.arange(32.0).view(8, 4)
BIAS = torch.arange(8.0)


def written(folder: Path, *more: list[Part | Entry], world: int = 2) -> Path:
    """A module that ``world`` ranks cut by rows, and what else each of them saved."""
    ranks: list[list[Part | Entry]] = []
    for rank in range(world):
        parts: list[Part | Entry] = [
            ContainerEntry(path="model", type="ordered_dict"),
            rows_of("model/weight", WEIGHT, world, rank),
            rows_of("model/bias", BIAS, world, rank),
        ]
        ranks.append(parts + (more[rank] if more else []))
    return Saved(ranks).write(folder)


def restored_by(
    rank: int, path: Path, app_state: Any, *, strict: bool = True, options: Options | None = None
) -> RestoreReport:
    """What the rank of a larger group does."""
    location = Location(display_url=str(path), url=str(path), storage_options={})
    source = Source(location, options or Options())
    steps = Alone(RestoreDecisions(mode=ReadMode.AUTO), rank=rank)
    return run_sync(
        restore_by(steps, source, RestoreCall(app_state=app_state, strict=strict), Overwritten()),
        name="restore",
    )


@each_facade
def test_one_process_reads_what_many_cut(api: Facade, tmp_path: Path) -> None:
    snapshot = api.Snapshot(written(tmp_path))
    target = module()
    held = target.weight.data_ptr()
    report = api.run(snapshot.restore({"model": target}))
    assert report.is_complete
    assert report.nbytes == (32 + 8) * 4
    assert target.weight.data_ptr() == held
    assert torch.equal(target.weight, WEIGHT)
    assert torch.equal(target.bias, BIAS)
    assert torch.equal(api.run(snapshot.read_object("model/weight")), WEIGHT)
    assert torch.equal(api.run(snapshot.read_object("1/model/weight")), WEIGHT)
    out = torch.zeros(4, 8).T
    assert api.run(snapshot.read_object("model/weight", out)) is out
    assert torch.equal(out, WEIGHT)
    found = api.run(snapshot.get_state_dict_for_key("model"))
    assert list(found) == ["weight", "bias"]
    assert torch.equal(found["bias"], BIAS)
    manifest = api.run(snapshot.get_manifest())
    assert manifest["1/model/weight"].offsets == (4, 0)
    for level in ("quick", "full"):
        assert api.run(snapshot.verify(level)).ok


def test_damage_in_a_shard_names_the_tensor(tmp_path: Path) -> None:
    saved = Saved(
        [
            [
                rows_of("m/w", torch.arange(3 * MIB), 3, 0),
                rows_of("m/w", torch.arange(3 * MIB), 3, 2),
            ],
            [rows_of("m/w", torch.arange(3 * MIB), 3, 1)],
        ]
    )
    key = saved.manifests[1].objects[0].key
    saved.data[key][4096 + 5 * MIB] ^= 1
    snapshot = Snapshot(saved.write(tmp_path))
    assert sorted(snapshot.get_manifest()) == ["0/m/w@0", "0/m/w@2097152", "1/m/w"]
    with pytest.raises(Exception, match="block 10 of 'm/w'"):
        snapshot.read_object("m/w")
    report = snapshot.verify("full")
    assert [problem.key for problem in report.problems] == [key]  # type: ignore[attr-defined]


def test_distributed_targets_read_their_boxes(tmp_path: Path) -> None:
    path = written(tmp_path, world=4)
    for rank in range(3):
        with fake_rank(rank, 3):
            mesh = DeviceMesh("cpu", torch.arange(3))
            state = StateDict(
                weight=distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0)], src_data_rank=None),
                bias=torch.zeros(8),
            )
            weight = state["weight"]
            report = restored_by(rank, path, {"model": state})
            assert state["weight"] is weight
            local = weight.to_local()
            assert torch.equal(local, WEIGHT[3 * rank : 3 * rank + len(local)])
            assert torch.equal(state["bias"], BIAS)
            assert report.is_complete
            out = distribute_tensor(torch.zeros(8, 4), mesh, [Shard(1)], src_data_rank=None)
            assert Snapshot(path).read_object("model/weight", out) is out
            held = out.to_local().shape[1]
            assert torch.equal(out.to_local(), WEIGHT[:, 2 * rank : 2 * rank + held])


def test_large_shards_of_a_grid_become_rows(tmp_path: Path) -> None:
    whole = torch.arange(2048 * 1024, dtype=torch.int32).view(2048, 1024)
    boxes = [Box((r, c), (1024, 512)) for r in (0, 1024) for c in (0, 512)]
    saved = Saved([[Part("s/w", whole[index(box)], box, tuple(whole.shape))] for box in boxes])
    path = saved.write(tmp_path)
    for rank in range(4):
        with fake_rank(rank, 4):
            mesh = DeviceMesh("cpu", torch.arange(4))
            zeros = torch.zeros_like(whole)
            state = StateDict(w=distribute_tensor(zeros, mesh, [Shard(0)], src_data_rank=None))
            report = restored_by(rank, path, {"s": state})
            assert torch.equal(state["w"].to_local(), whole[512 * rank : 512 * rank + 512])
            assert report.nbytes == 2 * MIB


def test_another_global_shape_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    with fake_rank(0, 2):
        mesh = DeviceMesh("cpu", torch.arange(2))
        larger = distribute_tensor(torch.zeros(9, 4), mesh, [Shard(0)], src_data_rank=None)
        state = StateDict(weight=larger, bias=torch.zeros(8))
        with pytest.raises(IncompatibleState) as caught:
            restored_by(0, path, {"model": state})
        (line,) = caught.value.mismatched
        assert line.startswith("model/weight: global shape (8, 4)")
        assert not state["bias"].any()
        report = restored_by(0, path, {"model": state}, strict=False)
        assert len(report.mismatched) == 1
        assert not larger.to_local().any()
        assert torch.equal(state["bias"], BIAS)


def test_an_optimizer_of_shards_needs_its_state_first(tmp_path: Path) -> None:
    def entries(rank: int) -> list[Part | Entry]:
        return [
            ValueEntry(path="opt/state/0/step", value=3, replicated=True),
            rows_of("opt/state/0/momentum_buffer", WEIGHT, 2, rank),
            ContainerEntry(path="opt/param_groups", type="list"),
            ValueEntry(path="opt/param_groups/0/lr", value=0.5, replicated=True),
            ValueEntry(path="opt/param_groups/0/momentum", value=0.9, replicated=True),
            ContainerEntry(path="opt/param_groups/0/params", type="list"),
            ValueEntry(path="opt/param_groups/0/params/0", value=0, replicated=True),
        ]

    path = written(tmp_path, entries(0), entries(1))
    with fake_rank(1, 2):
        mesh = DeviceMesh("cpu", torch.arange(2))
        zeros = distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0)], src_data_rank=None)
        parameter = nn.Parameter(zeros)
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        with pytest.raises(IncompatibleState, match="prime_optimizer") as caught:
            restored_by(1, path, {"opt": optimizer})
        assert len(caught.value.mismatched) == 1
        report = restored_by(1, path, {"opt": optimizer}, strict=False)
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert len(report.mismatched) == 1
        prime_optimizer(optimizer)
        restored_by(1, path, {"opt": optimizer})
        buffer = optimizer.state[parameter]["momentum_buffer"]
        assert torch.equal(buffer.to_local(), WEIGHT[4:])
    # Plain parameters take whole tensors.
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(8, 4))], lr=0.1, momentum=0.9)
    restored_by(0, path, {"opt": plain})
    assert torch.equal(plain.state_dict()["state"][0]["momentum_buffer"], WEIGHT)


def test_parts_of_a_sparse_tensor_may_be_with_several_ranks(tmp_path: Path) -> None:
    sparse = torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse().coalesce()
    entry = CompositeEntry(
        path="s/x",
        layout="sparse_coo",
        dtype="float32",
        shape=(2, 2),
        parts=("indices", "values"),
        parameters={"is_coalesced": True},
        replicated=True,
    )
    indices = Part("s/x@indices", sparse.indices(), replicated=True)
    values = Part("s/x@values", sparse.values(), replicated=True)
    path = written(tmp_path, [entry, indices], [values])
    for rank in range(3):
        state = StateDict(x=torch.zeros(2, 2).to_sparse())
        restored_by(rank, path, {"s": state})
        assert torch.equal(state["x"].to_dense(), sparse.to_dense())


def private(rank: int) -> list[Part | Entry]:
    return [
        ValueEntry(path="progress/rank", value=rank),
        ValueEntry(path="progress/step", value=7),
        *([ValueEntry(path="progress/first", value=1)] if rank == 0 else []),
    ]


def test_each_rank_gets_its_own_back(tmp_path: Path) -> None:
    path = written(tmp_path, private(0), private(1))
    for rank in range(2):
        state = StateDict(rank=-1, step=-1)
        restored_by(rank, path, {"progress": state})
        assert (state["rank"], state["step"]) == (rank, 7)
    snapshot = Snapshot(path)
    assert snapshot.read_object("1/progress/rank") == 1
    assert snapshot.read_object("progress/rank") == 0
    with pytest.raises(UsageError, match="only rank 0 saved 'progress/first'.*'0/progress/first'"):
        snapshot.read_object("1/progress/first")


def test_what_only_other_ranks_have_is_explained(tmp_path: Path) -> None:
    path = written(tmp_path, private(0), private(1))
    state = StateDict(rank=-1, step=-1, own=5)
    with pytest.raises(IncompatibleState) as caught:
        restored_by(2, path, {"progress": state})
    assert caught.value.missing == ("progress/own",)
    (line,) = caught.value.mismatched
    assert line.startswith(
        "progress: the snapshot has values only for ranks 0 and 1 (saved by 2 ranks)"
    )
    assert "progress/rank" in line
    assert "replicated=[...]" in line
    restored_by(2, path, {"progress": state}, strict=False)
    # What all had saved alike is for a new rank too.
    assert dict(state) == {"rank": -1, "step": 7, "own": 5}


@pytest.mark.parametrize("key", ["progress", "position"])
def test_what_only_other_ranks_have_is_listed_once(tmp_path: Path, key: str) -> None:
    """Whether this rank has other leaves of the key in the snapshot or none."""
    alone: list[Part | Entry] = [
        ContainerEntry(path="position", type="dict"),
        ValueEntry(path="position/sample", value=1),
    ]
    path = written(tmp_path, private(0), [*private(1), *alone])
    target = {key: StateDict(rank=-1, step=-1) if key == "progress" else StateDict(sample=-1)}
    with pytest.raises(IncompatibleState) as caught:
        restored_by(2, path, target)
    assert caught.value.missing == ()
    (line,) = caught.value.mismatched
    text = str(caught.value)
    assert "rename=" not in text
    assert text.count("strict=False") == 1
    report = restored_by(2, path, target, strict=False)
    assert (report.missing, report.mismatched) == ((), (line,))
    assert "strict=False" not in line


class Counting:
    """A stateful of its own kind, which gets all or nothing."""

    def __init__(self) -> None:
        self.loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"rank": -1, "step": -1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def test_no_stateful_gets_a_state_with_holes(tmp_path: Path) -> None:
    path = written(tmp_path, private(0), private(1))
    counting = Counting()
    with pytest.raises(IncompatibleState, match="values only for ranks 0 and 1"):
        restored_by(5, path, {"progress": counting})
    report = restored_by(5, path, {"progress": counting}, strict=False)
    assert len(report.mismatched) == 1
    assert counting.loaded is None
    restored_by(1, path, {"progress": counting})
    assert counting.loaded == {"rank": 1, "step": 7}


def test_generators_are_each_ranks_own(tmp_path: Path) -> None:
    more: list[list[Part | Entry]] = [
        [
            ContainerEntry(path="rng/python", type="tuple"),
            ValueEntry(path="rng/python/0", value=rank),
        ]
        for rank in range(2)
    ]
    path = written(tmp_path, *more)
    for strict in (True, False):
        target = {"rng": RNGState(), "model": module()}
        before = RNGState().state_dict()
        report = restored_by(2, path, target, strict=strict)
        assert report.is_complete
        (line,) = report.kept
        assert line.startswith("rng: rank 2 keeps the states of its random generators")
        assert "ranks 0 and 1 of 2" in line
        assert_same(RNGState().state_dict(), before)
    with pytest.raises(IncompatibleState) as caught:
        restored_by(2, path, {"other": RNGState()})
    assert caught.value.missing == ("other",)


def test_generators_that_are_partly_alike_are_kept_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that did not save would get Python's generator, seeded alike, without torch's."""
    more: list[list[Part | Entry]] = [
        [
            ValueEntry(path="rng/python/version", value=3),
            Part("rng/python/words", torch.zeros(625, dtype=torch.int64)),
            ValueEntry(path="rng/python/gauss_next", value=None),
            Part("rng/torch", torch.full_like(torch.get_rng_state(), rank)),
        ]
        for rank in range(2)
    ]
    path = written(tmp_path, *more)
    before = RNGState().state_dict()
    with caplog.at_level("INFO", "actorsnap"):
        report = restored_by(2, path, {"rng": RNGState()})
    (line,) = report.kept
    (logged,) = [record for record in caplog.records if line in record.getMessage()]
    assert logged.levelname == "INFO"
    assert logged.getMessage().endswith("Seed them")
    assert_same(RNGState().state_dict(), before)


@pytest.mark.parametrize("world_size", [1, 2])
def test_generators_that_were_saved_alike_are_each_ranks_own(
    tmp_path: Path, world_size: int
) -> None:
    """One rank saved, or all were seeded alike: a new rank would draw the numbers of rank 0."""
    saved = RNGState().state_dict()
    entries: list[Part | Entry] = [Part("rng/torch", saved["torch"])]
    path = written(tmp_path, *[entries] * world_size, world=world_size)
    torch.rand(1)
    before = RNGState().state_dict()
    report = restored_by(world_size, path, {"rng": RNGState()})
    (line,) = report.kept
    assert line.startswith(f"rng: rank {world_size} keeps the states of its random generators")
    assert_same(RNGState().state_dict(), before)
    assert not restored_by(world_size - 1, path, {"rng": RNGState()}).kept
    assert_same(RNGState().state_dict(), saved)


def test_generators_that_are_said_to_be_replicated_go_to_all_ranks(tmp_path: Path) -> None:
    saved = RNGState().state_dict()
    Snapshot.take(tmp_path, {"rng": RNGState()}, replicated=["rng/**"])
    torch.rand(1)
    assert not restored_by(1, tmp_path, {"rng": RNGState()}).kept
    assert_same(RNGState().state_dict(), saved)


def test_the_readmes_app_state_goes_from_two_ranks_to_three(tmp_path: Path) -> None:
    """Each rank saves its generators, and the third one has none to take over."""

    def trainer() -> dict[str, Any]:
        model = nn.Linear(2, 2)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
        return {
            "model": model,
            "optimizer": optimizer,
            "progress": StateDict(step=3),
            "rng": RNGState(),
        }

    context = StorageContext(run_blocking=run_blocking_in_thread, durable=False)
    state = trainer()
    ranks = [state, {**state, "rng": OtherGenerator()}]

    async def save() -> None:
        storage = open_storage(tmp_path, context)
        world = SimulatedSave(
            storages=[storage] * 2,
            states=ranks,
            run_blocking=run_blocking_in_thread,
            attempt=ATTEMPT,
            replicated=["model/**", "optimizer/**", "progress/**"],
        )
        assert await world.run() == dict.fromkeys(range(2))
        await storage.aclose()

    anyio.run(save)
    for rank in range(3):
        target = trainer()
        report = restored_by(rank, tmp_path, target)
        assert report.is_complete
        assert len(report.kept) == (rank == 2)
        assert_same(target["model"].state_dict(), state["model"].state_dict())


class OtherGenerator(RNGState):
    """Another process' generators."""

    def state_dict(self) -> dict[str, Any]:
        before = torch.get_rng_state()
        torch.manual_seed(1)
        state = super().state_dict()
        torch.set_rng_state(before)
        return state


@pytest.mark.parametrize("world_size", [1, 3])
async def test_what_simulated_ranks_saved_comes_back(tmp_path: Path, world_size: int) -> None:
    large = torch.arange(3 * MIB // 4, dtype=torch.int32)
    context = StorageContext(run_blocking=run_blocking_in_thread, durable=False)
    storage = open_storage(tmp_path, context)
    states = [
        {
            "model": StateDict(large=large.clone(), small=torch.arange(7.0), tied=None, step=3),
            "own": StateDict(x=torch.full((5,), float(rank)), rank=rank),
        }
        for rank in range(world_size)
    ]
    for state in states:
        state["model"]["tied"] = state["model"]["small"]
    world = SimulatedSave(
        storages=[storage] * world_size,
        states=states,
        run_blocking=run_blocking_in_thread,
        attempt=ATTEMPT,
        replicated=["model/**"],
    )
    assert await world.run() == dict.fromkeys(range(world_size))
    await storage.aclose()
    snapshot = actorsnap.Snapshot(tmp_path)
    state = {
        "model": StateDict(large=torch.zeros_like(large), small=None, tied=None, step=0),
        "own": StateDict(x=torch.zeros(5), rank=-1),
    }
    report = await snapshot.restore(state)
    assert report.is_complete
    assert torch.equal(state["model"]["large"], large)
    assert torch.equal(state["model"]["tied"], torch.arange(7.0))
    assert state["model"]["tied"].data_ptr() == state["model"]["small"].data_ptr()
    assert state["own"]["rank"] == 0
    assert (await snapshot.verify("full")).ok
    last = world_size - 1
    assert torch.equal(await snapshot.read_object(f"{last}/own/x"), torch.full((5,), float(last)))
