# SPDX-License-Identifier: Apache-2.0
"""What each world of ``dist_world`` checks. Collectives are the tests' own, never the package's."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import empty as sharded_empty
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torch.distributed._shard.sharding_spec.chunk_sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.api import ShardingStrategy, StateDictType
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from actorsnap import Options
from actorsnap.format.geometry import Box, covers_exactly
from actorsnap.format.manifest import ContainerEntry, Entry, ValueEntry
from actorsnap.planning.ownership import held_boxes
from actorsnap.planning.shared_reads import ReadMode
from actorsnap.protocol.restore import RestoreDecisions
from actorsnap.runtime.location import Location
from actorsnap.runtime.restore import Overwritten, RestoreCall, restore_by
from actorsnap.runtime.rounds import Alone
from actorsnap.runtime.script import run_sync
from actorsnap.runtime.source import Source
from actorsnap.state.capture import capture
from actorsnap.state.distributed import (
    Describer,
    Replica,
    Replication,
    Sharding,
    replication,
)
from actorsnap.state.lazy import find_lazy
from actorsnap.state.objects import encode_inline
from actorsnap.state.optim import ModelState, prime_optimizer
from actorsnap.state.tree import Container, flatten
from tests.state.saved import Part, Saved

CASES: dict[str, tuple[int, Callable[[], None]]] = {}


def case(world: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(function: Callable[[], None]) -> Callable[[], None]:
        CASES[function.__name__] = (world, function)
        return function

    return add


# What every distributed tensor must fulfil --------------------------------------------------


def full(tensor: Any) -> torch.Tensor | None:
    """The whole, on every rank of the mesh, by torch's own collectives."""
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            if tensor.device_mesh.get_coordinate() is None:
                return None
            found: torch.Tensor = tensor.full_tensor()
            return found.clone()
        whole = torch.empty(tensor.size(), dtype=tensor.dtype)
        ranks = dist.get_process_group_ranks(tensor._process_group)
        tensor.gather(ranks[0], whole if dist.get_rank() == ranks[0] else None)
        dist.broadcast(whole, ranks[0], group=tensor._process_group)
        return whole


def check(name: str, tensor: Any, members: Iterable[int] | None = None) -> Sharding:
    """Boxes cover the whole once, holders are who holds them, values and memory are right."""
    rank = dist.get_rank()
    found = Describer().describe(tensor)
    assert isinstance(found, Sharding), f"{name}: {found}"
    assert found.global_shape == tuple(tensor.shape), name
    whole = full(tensor)
    for piece in found.pieces:
        assert whole is not None
        assert tuple(piece.tensor.shape) == piece.box.sizes
        assert type(piece.tensor) is torch.Tensor
        assert not piece.tensor.requires_grad
        index = tuple(
            slice(o, o + s) for o, s in zip(piece.box.offsets, piece.box.sizes, strict=True)
        )
        assert torch.equal(piece.tensor, whole[index]), f"{name}: {piece.box}"
        assert piece.holders is None or rank in piece.holders
        assert piece.holders is None or list(piece.holders) == sorted(set(piece.holders))
    mine = [(p.box.offsets, p.box.sizes, p.holders or (rank,)) for p in found.pieces]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    by_box: dict[Any, set[int]] = {}
    said: dict[Any, set[Any]] = {}
    for other, pieces in enumerate(everyone):
        if members is not None and other not in members:
            continue
        for offsets, sizes, holders in pieces:
            by_box.setdefault((offsets, sizes), set()).add(other)
            said.setdefault((offsets, sizes), set()).add(holders)
    shape = tuple(tensor.shape)
    assert covers_exactly(Box.whole(shape), [Box(*key) for key in by_box]), (name, everyone)
    assert by_box, name
    for key, ranks in by_box.items():
        if isinstance(tensor, DTensor):
            assert said[key] == {tuple(sorted(ranks))}, (name, key, said[key], ranks)
    if found.layout is not None and found.pieces:
        at = found.layout.mesh.position(rank)
        assert at is not None, name
        assert held_boxes(found.layout, shape, at) == [p.box for p in found.pieces], name
        assert tuple(found.layout.mesh) == tuple(tensor._spec.mesh.mesh.flatten().tolist()), name
    # What is written into the pieces is in the tensor.
    if found.dtype.startswith("float") and whole is not None:
        for piece in found.pieces:
            piece.tensor.add_(1)
        again = full(tensor)
        assert again is not None
        assert torch.equal(again, whole + 1), name
        for piece in found.pieces:
            piece.tensor.sub_(1)
    return found


def check_all(state: Mapping[str, Any], members: Iterable[int] | None = None) -> dict[str, Any]:
    """Checks every distributed tensor in a state dict; returns them by name."""
    seen: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key in value:
                walk(f"{prefix}.{key}", value[key])
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                walk(f"{prefix}.{number}", item)
        elif isinstance(value, torch.Tensor) and Describer().describe(value) is not None:
            seen[prefix[1:]] = check(prefix, value, members)

    walk("", state)
    return seen


class Net(nn.Module):
    """Sizes that no mesh divides."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up = nn.Linear(5, width)
        self.down = nn.Linear(width, 7)
        self.norm = nn.BatchNorm1d(7)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.norm(self.down(torch.relu(self.up(x))))  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, size: int = 5) -> None:
    for _ in range(2):
        model(torch.randn(4, size)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


# DTensor ------------------------------------------------------------------------------------


@case(4)
def dtensors() -> None:
    meshes = {
        "1d": init_device_mesh("cpu", (4,)),
        "2d": init_device_mesh("cpu", (2, 2)),
        "apart": DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]])),
        "3d": init_device_mesh("cpu", (2, 1, 2)),
    }
    r, s0, s1 = Replicate(), Shard(0), Shard(1)
    strided = _StridedShard(0, split_factor=2)
    layouts: dict[str, list[list[Any]]] = {
        "1d": [[s0], [s1], [r], [_StridedShard(0, split_factor=3)]],
        "2d": [[s0, s0], [s0, s1], [s1, s0], [r, s0], [s0, r], [r, r], [strided, s0], [strided, r]],
        "apart": [[s0, s1], [r, s1], [s0, s0]],
        "3d": [[r, strided, s0], [s0, s1, r], [s1, s1, s1], [strided, r, s0]],
    }
    for name, mesh in meshes.items():
        for placements in layouts[name]:
            for shape in ((8, 6), (5, 3), (1, 2), (3, 0, 2), (13, 2, 3)):
                whole = torch.randn(shape)
                tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
                check(f"{name} {placements} {shape}", tensor)
    scalar = distribute_tensor(torch.tensor(3.0), meshes["2d"], [r, r])
    assert check("scalar", scalar).pieces[0].holders == (0, 1, 2, 3)


@case(4)
def sub_meshes() -> None:
    rank = dist.get_rank()
    mesh = DeviceMesh("cpu", torch.tensor([0, 2]))
    found = check("sub", distribute_tensor(torch.randn(5, 2), mesh, [Shard(0)]))
    assert bool(found.pieces) == (rank in (0, 2))
    empty = Describer().describe(distribute_tensor(torch.randn(0, 2), mesh, [Shard(0)]))
    assert isinstance(empty, Sharding)
    assert [p.holders for p in empty.pieces] == ([(0, 2)] if rank in (0, 2) else [])
    # Slices of one mesh: two tensors of the same name, one in each half of the job.
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    halves = ((0, 1), (2, 3))
    check("tp", distribute_tensor(torch.randn(5), both["tp"], [Shard(0)]), halves[rank // 2])
    held = check("dp", distribute_tensor(torch.randn(5), both["dp"], [Replicate()]), (0, 2))
    assert [p.holders for p in held.pieces] == [(rank % 2, rank % 2 + 2)]
    # torch itself places by two orders then.
    turned = distribute_tensor(
        torch.randn(4), DeviceMesh("cpu", torch.tensor([1, 0, 3, 2])), [Shard(0)]
    )
    found_turned = Describer().describe(turned)
    assert isinstance(found_turned, str)
    assert "rising" in found_turned
    flat = both._flatten("all")
    check("flat", distribute_tensor(torch.randn(6), flat, [Shard(0)]))


@case(2)
def refusals() -> None:
    mesh = init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    found = Describer().describe(partial)
    assert isinstance(found, str)
    assert "Partial" in found
    assert "full_tensor()" in found
    uneven = DTensor.from_local(torch.ones(3 + dist.get_rank()), mesh, [Shard(0)], run_check=False)
    if dist.get_rank() == 1:
        uneven = DTensor.from_local(
            torch.ones(4), mesh, [Shard(0)], shape=torch.Size([7]), stride=(1,)
        )
        found = Describer().describe(uneven)
        assert isinstance(found, str)
        assert "distribute_tensor" in found
    inner = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    nested = DTensor(inner, inner._spec, requires_grad=False)
    found = Describer().describe(nested)
    assert isinstance(found, str)
    assert "subclass" in found or "sharded" in found
    spec = DTensorSpec(mesh, (Replicate(),), TensorMeta(torch.Size([3, 3]), (3, 1), torch.float32))
    found = Describer().describe(DTensor(torch.eye(3).to_sparse(), spec, requires_grad=False))
    assert isinstance(found, str)
    assert "to_dense" in found
    # A collective that nobody waited for is waited for.
    pending = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).redistribute(
        placements=[Replicate()], async_op=True
    )
    ready = Describer().describe(pending)
    assert isinstance(ready, Sharding)
    assert ready.pieces[0].tensor.tolist() == [0, 1, 2, 3]


# Models -------------------------------------------------------------------------------------


def check_model(model: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    before = {name: full(p) for name, p in model.named_parameters() if isinstance(p, DTensor)}
    prime_optimizer(optimizer)
    primed = {name: type(value) for name, value in flat(optimizer.state_dict()).items()}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            whole, old = full(parameter), before[name]
            assert whole is None or (old is not None and torch.equal(whole, old))
    train(model, optimizer)
    assert primed == {name: type(value) for name, value in flat(optimizer.state_dict()).items()}
    names = check_all(model.state_dict())
    assert names
    assert any(found.kind == "parameter" for found in map(describe_or_fail, model.parameters()))
    states = check_all(optimizer.state_dict())
    assert len(states) == 2 * len(names), (sorted(states), sorted(names))
    state = ModelState(model, optimizer)
    inside = check_all(state.state_dict())
    assert len(inside) == len(names) + len(states)
    ranks = tuple(range(dist.get_world_size()))
    found = replicated_by(optimizer)
    assert found is not None
    assert found.find("state.0.step") == Replica(ranks)
    # A state goes back into another copy of the model, without a step.
    saved = copy.deepcopy(state.state_dict())
    train(model, optimizer)
    state.load_state_dict(saved)
    same(state.state_dict(), saved)


def replicated_by(stateful: object) -> Replication | None:
    return replication({"": stateful}).get("")


def describe_or_fail(tensor: torch.Tensor) -> Sharding:
    found = Describer().describe(tensor)
    if found is None:
        return Sharding((), "", "tensor", False, (), ())
    assert isinstance(found, Sharding)
    return found


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, inner in items:
        found.update(flat(inner, f"{prefix}.{key}"))
    return found


def same(left: Any, right: Any) -> None:
    a, b = flat(left), flat(right)
    assert a.keys() == b.keys()
    for name, value in a.items():
        other = b[name]
        if isinstance(value, DTensor):
            value, other = value.to_local(), other.to_local()
        elif isinstance(value, ShardedTensor):
            value = torch.cat([s.tensor.flatten() for s in value.local_shards()] or [torch.ones(0)])
            other = torch.cat([s.tensor.flatten() for s in other.local_shards()] or [torch.ones(0)])
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other), name
        else:
            assert value == other, name


@case(4)
def fsdp2() -> None:
    model = Net()
    fully_shard(model.up)
    fully_shard(model)
    check_model(model)


@case(4)
def fsdp2_other_dim() -> None:
    model = nn.Sequential(nn.Linear(8, 3, bias=False), nn.Linear(3, 5, bias=False))
    fully_shard(model[0], shard_placement_fn=lambda p: Shard(1))
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 8)
    check_all(model.state_dict())
    check_all(optimizer.state_dict())


@case(4)
def hsdp() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Net()
    fully_shard(model, mesh=mesh)
    check_model(model)
    found = describe_or_fail(model.up.weight)
    rank = dist.get_rank()
    assert [p.holders for p in found.pieces] == [(rank % 2, rank % 2 + 2)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel(), "norm": SequenceParallel()}


@case(2)
def tensor_parallel() -> None:
    model = parallelize_module(Block(), init_device_mesh("cpu", (2,)), dict(PLAN))
    optimizer = torch.optim.Adam(model.parameters())
    torch.manual_seed(3)
    train(model, optimizer, 6)
    names = check_all(model.state_dict())
    assert len(names) == 6
    assert check_all(optimizer.state_dict())
    assert check_all(ModelState(model, optimizer).state_dict())


@case(4)
def fsdp2_and_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = parallelize_module(Block(), mesh["tp"], {"up": PLAN["up"], "down": PLAN["down"]})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 6)
    placements = model.up.weight.placements
    assert type(placements[0]).__name__ == "_StridedShard", placements
    # What only FSDP shards lies on a mesh per tensor-parallel rank: each covers the whole.
    peers = (dist.get_rank() % 2, dist.get_rank() % 2 + 2)
    for part in (
        model.state_dict(),
        optimizer.state_dict(),
        ModelState(model, optimizer).state_dict(),
    ):
        for name, value in flat(part).items():
            if isinstance(value, DTensor):
                check(name, value, peers if value.device_mesh.ndim == 1 else None)
    assert len(describe_or_fail(model.up.weight).pieces) == 1
    assert describe_or_fail(model.norm.weight).pieces[0].holders is None


# Older ways -----------------------------------------------------------------------------------


def filled(tensor: Any) -> Any:
    for shard in tensor.local_shards():
        shard.tensor.copy_(torch.randn(shard.tensor.shape))
    return tensor


@case(4)
def sharded_tensors() -> None:
    rank = dist.get_rank()
    for dim, shape in ((0, (10, 3)), (1, (3, 9)), (0, (4, 3))):
        spec = ChunkShardingSpec(dim=dim, placements=[f"rank:{n}/cpu" for n in (2, 0, 1, 3)])
        check(f"chunks {shape}", filled(sharded_empty(spec, *shape)))
    boxes = [((0, 0), (3, 2), 0), ((0, 2), (3, 3), 1), ((3, 0), (4, 5), 1), ((7, 0), (1, 5), 3)]
    spec2 = EnumerableShardingSpec(
        [
            ShardMetadata(shard_offsets=list(o), shard_sizes=list(s), placement=f"rank:{n}/cpu")
            for o, s, n in boxes
        ]
    )
    found = check("boxes", filled(sharded_empty(spec2, 8, 5)))
    assert len(found.pieces) == {0: 1, 1: 2, 2: 0, 3: 1}[rank]
    shards = [LocalShard.from_tensor_and_offsets(torch.full((1, 2), rank + 0.5), [rank, 0], rank)]
    check("local", init_from_local_shards(shards, 4, 2))


@case(4)
def fsdp1() -> None:
    for strategy, mesh in (
        (ShardingStrategy.FULL_SHARD, None),
        (ShardingStrategy.FULL_SHARD, init_device_mesh("cpu", (4,))),
        (ShardingStrategy.HYBRID_SHARD, init_device_mesh("cpu", (2, 2))),
    ):
        model = FullyShardedDataParallel(
            Net(),
            sharding_strategy=strategy,
            device_mesh=mesh,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        train(model, optimizer)
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        names = check_all(model.state_dict())
        assert len(names) >= 7, names
        assert check_all(FullyShardedDataParallel.optim_state_dict(model, optimizer))
        state = ModelState(model, optimizer)
        saved = copy_of(state.state_dict())
        check_all(saved)
        train(model, optimizer)
        state.load_state_dict(copy_of(saved))
        same(state.state_dict(), saved)
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
        assert not check_all(model.state_dict())


@case(4)
def fsdp1_flat() -> None:
    model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    (found,) = check_all(model.state_dict()).values()
    assert len(found.global_shape) == 1


def copy_of(value: Any) -> Any:
    """A copy; ShardedTensors cannot be copied by deepcopy."""
    if isinstance(value, Mapping):
        return {key: copy_of(inner) for key, inner in value.items()}
    if isinstance(value, ShardedTensor):
        shards = [LocalShard(s.tensor.clone(), s.metadata) for s in value.local_shards()]
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            shards, value.metadata(), process_group=value._process_group
        )
    return value.clone() if isinstance(value, torch.Tensor) else value


@case(2)
def ddp() -> None:
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, optimizer)
    found = replicated_by(model)
    assert found is not None
    for name in model.state_dict():
        rank_zero_wins = "running" in name or "batches" in name
        assert found.find(name) == Replica(None, rank_zero_wins=rank_zero_wins), name
    assert replicated_by(optimizer) is None
    keys = {"m": model, "o": optimizer, "l": torch.optim.LBFGS(model.parameters())}
    both = replication(keys)
    assert both.keys() == {"m", "o"}
    assert both["o"].find("param_groups.0.lr") == Replica(None)
    # Names without wrappers, and whose state those are.
    compiled: Any = torch.compile(model, backend="eager")
    state = ModelState(compiled, optimizer)
    names = state.state_dict()
    assert set(names["model"]) == set(Net().state_dict())
    assert "state.up.weight.exp_avg" in names["optim"]
    whole = replication({"s": state})["s"]
    assert whole.find("model.up.weight") == Replica(None)
    assert whole.find("model.norm.running_mean") == Replica(None, rank_zero_wins=True)
    assert whole.find("optim.state.up.weight.step") == Replica(None)
    plain = ModelState(Net(), ())
    assert replicated_by(plain) is None
    plain = ModelState(net := Net(), torch.optim.Adam(net.parameters(), lr=0.1))
    plain.load_state_dict(names)
    same(plain.state_dict()["optim"], names["optim"])


@case(4)
def ddp_inside() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    rank = dist.get_rank()
    inner = Net()
    ignored = "down.weight"
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, [ignored])
    model = nn.ModuleDict(
        {"a": DistributedDataParallel(inner, process_group=mesh.get_group("dp")), "b": Net()}
    )
    found = replicated_by(model)
    assert found is not None
    peers = (rank // 2 * 2, rank // 2 * 2 + 1)
    assert found.find("a.module.up.weight") == Replica(peers)
    assert found.find("a.module.norm.running_var") == Replica(peers, rank_zero_wins=True)
    assert found.find("a.module.down.weight") is None
    assert found.find("b.up.weight") is None
    optimizer = torch.optim.Adam(model.parameters())
    parts = replication({"m": model, "o": optimizer})["o"]
    order = [name for name, _ in model.named_parameters()]
    assert parts.find(f"state.{order.index('a.module.up.bias')}.step") == Replica(peers)
    assert parts.find(f"state.{order.index('a.module.down.weight')}.step") is None
    assert parts.find(f"state.{order.index('b.up.weight')}.step") is None
    named = replication({"s": ModelState(model, optimizer)})["s"]
    assert named.find("model.a.up.weight") == Replica(peers)
    assert named.find("model.a.down.weight") is None
    assert named.find("optim.state.a.up.weight.exp_avg") == Replica(peers)
    assert named.find("optim.state.a.down.weight.exp_avg") is None


# Restores -------------------------------------------------------------------------------------


def saved_by_all(folder: Path, state: Any) -> None:
    """Rank 0 writes a snapshot of what every rank holds, under the key ``s``."""
    rank = dist.get_rank()
    own: list[Part | Entry] = []
    for path, value in zip(*flatten("s", state), strict=True):
        if isinstance(value, Container):
            own.append(ContainerEntry(path=path, type=value.type))
        elif not isinstance(value, torch.Tensor):
            own.append(ValueEntry(path=path, value=encode_inline(value, path), replicated=True))
        elif isinstance(found := Describer().describe(value), Sharding):
            own += [
                Part(path, piece.tensor.clone(), piece.box, found.global_shape)
                for piece in found.pieces
                if rank == (piece.holders or (rank,))[0]
            ]
        elif rank == 0:
            own.append(Part(path, value.detach().clone(), replicated=True))
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    if rank == 0:
        Saved(ranks).write(folder)
    dist.barrier()


def check_restored(state: ModelState, change: Callable[[], None]) -> None:
    """A state comes back into the model it was saved from, after ``change``."""
    shared: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    folder = Path(shared[0])
    try:
        before = copy_of(state.state_dict())
        saved_by_all(folder, before)
        change()
        source = Source(
            Location(display_url=str(folder), url=str(folder), storage_options={}), Options()
        )
        # Their own ways: the store of this group is a file, which carries no messages.
        steps = Alone(RestoreDecisions(mode=ReadMode.DIRECT), rank=dist.get_rank())
        script = restore_by(steps, source, RestoreCall(app_state={"s": state}), Overwritten())
        report = run_sync(script, name="restore")
        assert report.is_complete
        assert report.nbytes > 0
        same(state.state_dict(), before)
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)


@case(4)
def restored() -> None:
    def fsdp2(mesh: DeviceMesh | None) -> nn.Module:
        model = Net()
        fully_shard(model.up, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def fsdp1(mesh: DeviceMesh | None) -> nn.Module:
        model = FullyShardedDataParallel(
            Net(), device_mesh=mesh, use_orig_params=True, device_id=torch.device("cpu")
        )
        kind = StateDictType.SHARDED_STATE_DICT
        FullyShardedDataParallel.set_state_dict_type(model, kind)
        return model

    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for model in (fsdp2(None), fsdp2(hybrid), fsdp1(None)):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        train(model, optimizer)
        state = ModelState(model, optimizer)
        check_restored(state, lambda model=model, opt=optimizer: train(model, opt))  # type: ignore[misc]


# Steps that no counter shows ----------------------------------------------------------------


@case(2)
def lazy_steps() -> None:
    """A step of a lazily staged model is seen, or what it changes was copied before."""
    kinds: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
        lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.RMSprop(p, foreach=True),
    ]
    rank = dist.get_rank()
    for number, kind in enumerate(kinds):
        model = nn.Linear(6, 6)
        fully_shard(model)
        optimizer = kind(model.parameters())
        for _ in range(2):  # without a state, and with it
            app_state = {"m": model, "o": optimizer}
            leaves = capture(app_state, ranks=(0, 1), rank=rank).leaves
            before = [leaf.source for leaf in leaves]
            lazy = find_lazy(app_state, leaves)
            model(torch.ones(2, 6)).square().sum().backward()
            optimizer.step()
            for n, leaf in enumerate(leaves):
                if leaf.item.path.startswith("m/") and n not in lazy.eager:
                    is_copied = leaf.source is not before[n]
                    assert is_copied or lazy.changed([n]) == n, (number, leaf.item.path)
