# SPDX-License-Identifier: Apache-2.0
"""Describes distributed tensors as boxes.

Also finds plain leaves that DistributedDataParallel or a mesh keeps equal. Calls no collective:
meshes and placements suffice. It must not know paths, entries or storage.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cache
from typing import Any, TypeAlias, TypeGuard

import msgspec
import torch

from actorsnap.format.geometry import Box, Placed, Placement, place
from actorsnap.format.manifest import TensorType
from actorsnap.format.owners import Grid, Layout, MeshCut
from actorsnap.state import xla_shards
from actorsnap.state.optim import ModelState, plain_name
from actorsnap.state.tensors import DTYPE_NAMES, QUANTIZED, plain_address, refusal, tensor_type

_Parameter = torch.nn.Parameter

Ranks: TypeAlias = tuple[int, ...]
"""Global ranks, ascending."""


class LocalPiece(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A box that this process holds.

    Attributes:
        box: In global index space.
        tensor: Its elements, in the distributed tensor's memory; requires no gradient.
        holders: Ranks that hold this box with equal values; None if only this rank does.
        is_stored: False if another rank stores the box.
        address: Address of the tensor's C-order bytes in CPU memory; 0: unknown.
    """

    box: Box
    tensor: torch.Tensor
    holders: Ranks | None
    is_stored: bool = True
    address: int = 0


class Sharding(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A distributed tensor and its pieces in this process.

    Attributes:
        kind: ``type`` of its entries.
        ranks: All ranks that have the tensor, or an empty part.
        pieces: In order of memory, without overlaps. Empty outside of the mesh or for an empty
            shard.
        layout: Implies the boxes of all ranks, by their global numbers; None if irregular.
        write_back: Copies restored pieces to their device; None if they are the tensor's memory.
    """

    global_shape: tuple[int, ...]
    dtype: str
    kind: TensorType
    requires_grad: bool
    ranks: Ranks
    pieces: tuple[LocalPiece, ...]
    layout: Layout | None = None
    write_back: Callable[[], None] | None = None


class Describer:
    """Computes each distinct layout once.

    Refers to meshes; create one per pass over an app state.
    """

    def __init__(self) -> None:
        # By mesh first: torch computes the hash of one in Python code.
        self._layouts: dict[int, dict[object, _Described]] = {}
        self._meshes: list[Any] = []  # keeps them, and so their ids
        self._ranks_of = cache(_mesh_ranks)
        self._dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)

    def describe(self, tensor: torch.Tensor) -> Sharding | str | None:
        """Returns None for tensors that are not distributed.

        If a tensor cannot be described, returns reason and remedy, to append to its path.
        """
        if type(tensor) is self._dtensor and not xla_shards.is_loaded():  # nearly all
            return self._describe_dtensor(tensor)
        if xla_shards.is_global(tensor):  # torch_xla's class is a DTensor, too
            return _describe_xla_tensor(tensor)
        if _is_dtensor(tensor):
            return self._describe_dtensor(tensor)
        if _is_sharded_tensor(tensor):
            return _describe_sharded_tensor(tensor)
        return None

    def _describe_dtensor(self, tensor: Any) -> Sharding | str:
        spec = tensor._spec
        cuts = _cuts_of(spec.placements)
        if isinstance(cuts, str):
            return cuts
        mesh = spec.mesh
        layouts = self._layouts.get(id(mesh))
        if layouts is None:
            self._meshes.append(mesh)
            layouts = self._layouts[id(mesh)] = {}
        # Not tensor.shape, which takes four times as long.
        key = (cuts, getattr(spec, "shard_order", None), spec.shape)
        found = layouts.get(key)
        if found is None:
            shape = tuple(spec.shape)
            try:
                found = _layout_of(spec, shape, self._ranks_of(mesh))
            except ValueError as error:
                return f"is a DTensor with an unsupported layout: {error}; distribute it again"
            layouts[key] = found
        shape, placed, expected, holders, ranks, layout = found
        dtype = tensor.dtype
        if not placed:
            return _sharding(tensor, dtype, shape, ranks, (), layout)
        local = tensor._local_tensor
        address = plain_address(local) if local.is_cpu else 0
        if address and local.dtype is dtype:  # nearly all
            if local.requires_grad:
                local = local.detach()
        else:
            local = _local(tensor)
            why = _local_refusal(local, tensor)
            if why is not None:
                return why
        if local.shape != expected:
            return (
                f"is a DTensor of shape {shape} with placements {tuple(spec.placements)} whose "
                f"local tensor has the shape {tuple(local.shape)} here, not {expected}; make it "
                "with distribute_tensor(...), or pass shape= and stride= to DTensor.from_local"
            )
        if 0 in expected:
            local = local.reshape(shape)
        if len(placed) == 1:
            piece = LocalPiece(placed[0].box, local, holders, True, address)
            pieces: tuple[LocalPiece, ...] = (piece,)
        else:
            pieces = tuple([LocalPiece(p.box, _narrow(local, p.local), holders) for p in placed])
        return _sharding(tensor, dtype, shape, ranks, pieces, layout)


def is_distributed(value: object) -> TypeGuard[torch.Tensor]:
    return _is_dtensor(value) or _is_sharded_tensor(value) or xla_shards.is_global(value)


def _is_dtensor(value: object) -> bool:
    # The import takes long. Without the module there are no DTensors.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _is_sharded_tensor(value: object) -> bool:
    module = sys.modules.get("torch.distributed._shard.sharded_tensor")
    return module is not None and isinstance(value, module.ShardedTensor)


def _sharding(
    tensor: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    ranks: Ranks,
    pieces: tuple[LocalPiece, ...],
    layout: Layout | None = None,
    write_back: Callable[[], None] | None = None,
) -> Sharding | str:
    if dtype in QUANTIZED:
        return f"is a sharded tensor of dtype {dtype}, which cannot be stored"
    # As isinstance, which runs Python code: wrapped tensors have the flag.
    is_parameter = getattr(tensor, "_is_param", False) or issubclass(type(tensor), _Parameter)
    kind: TensorType = "parameter" if is_parameter else tensor_type(tensor)
    requires_grad = tensor.requires_grad
    return Sharding(
        shape, DTYPE_NAMES[dtype], kind, requires_grad, ranks, pieces, layout, write_back
    )


def _local(tensor: Any) -> torch.Tensor:
    local = tensor._local_tensor
    if type(local).__name__ == "AsyncCollectiveTensor":
        # A collective may still run.
        local = local.wait()
    detached: torch.Tensor = local.detach()
    return detached


def _local_refusal(local: torch.Tensor, outer: torch.Tensor) -> str | None:
    why = refusal(local)
    if why is None and local.layout is not torch.strided:
        why = f"has the layout {local.layout}; convert it with x.to_dense()"
    if why is None and local.dtype is not outer.dtype:
        why = f"has the dtype {local.dtype}, not {outer.dtype}; create the outer tensor again"
    return None if why is None else f"is a {type(outer).__name__} whose local tensor {why}"


def _narrow(local: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != local.shape[dim]:
            local = local.narrow(dim, offset, size)
    return local


def _cuts_of(placements: Sequence[Any]) -> tuple[object, ...] | str:
    """Returns a key of placements, or why they are refused."""
    cuts: list[object] = []
    for placement in placements:
        kind = type(placement)
        if kind.__name__ == "Shard":
            cuts.append((kind, placement.dim))  # hashed faster than the placement
        elif kind.__name__ in ("_StridedShard", "Replicate"):
            cuts.append((kind, placement))
        else:
            return _placement_refusal(placement)
    return tuple(cuts)


def _placement_refusal(placement: Any) -> str:
    if placement.is_partial():
        return (
            f"is a DTensor with the placement {placement!r}: its values are still to be "
            "reduced over the mesh. Save x.full_tensor(), or "
            "x.redistribute(placements=[...]) with Shard and Replicate"
        )
    kind = type(placement)
    return (
        f"is a DTensor with the placement {placement!r} ({kind.__module__}.{kind.__name__}); "
        "save x.redistribute(placements=[...]) with Shard and Replicate"
    )


_Described: TypeAlias = tuple[
    tuple[int, ...], list[Placed], tuple[int, ...], Ranks | None, Ranks, "Layout | None"
]
"""The shape, the boxes held here, the local shape that they imply, their holders, all ranks of the
mesh, and the layout."""


def _layout_of(spec: Any, shape: tuple[int, ...], all_ranks: Ranks) -> _Described:
    mesh = spec.mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return shape, [], (), None, all_ranks, None
    ranks = mesh.mesh
    placements = spec.placements
    axes = range(len(placements))
    kinds = [type(placement).__name__ for placement in placements]
    order = getattr(spec, "shard_order", None)
    if order is not None and "_StridedShard" not in kinds:
        cutting = [axis for entry in order for axis in entry.mesh_dims]
    else:  # left to right
        cutting = [axis for axis in axes if kinds[axis] != "Replicate"]
    for axis in cutting:
        # Process groups sort their ranks, so torch mixes two orders unless they agree.
        along = ranks[tuple([slice(None) if a == axis else coordinate[a] for a in axes])].tolist()
        if along != sorted(along):
            raise ValueError(f"the ranks along axis {axis} of the mesh, {along}, are not rising")
    cuts = [
        Placement(
            placements[axis].dim,
            ranks.shape[axis],
            coordinate[axis],
            int(getattr(placements[axis], "split_factor", 1)),
        )
        for axis in cutting
    ]
    layout = None
    if (grid := _grid_of(ranks)) is not None:
        found = [MeshCut(axis, c.dim, c.groups) for axis, c in zip(cutting, cuts, strict=True)]
        layout = Layout(grid, tuple(found))
    if 0 not in shape:
        # Along axes that cut nothing, all ranks hold the same.
        ranks = ranks[tuple([coordinate[a] if a in cutting else slice(None) for a in axes])]
    holders = tuple(sorted(ranks.flatten().tolist()))
    placed, local_shape = place(shape, cuts)
    return shape, placed, local_shape, holders if len(holders) > 1 else None, all_ranks, layout


def _grid_of(ranks: torch.Tensor) -> Grid | None:
    """Returns the ranks of a mesh as a grid, if they are at regular distances."""
    start = int(ranks.flatten()[0])
    expected = torch.tensor(start, dtype=ranks.dtype)
    axes: list[tuple[int, int]] = []
    for axis, count in enumerate(ranks.shape):
        step = int(ranks.select(axis, 1).flatten()[0]) - start if count > 1 else 1
        axes.append((count, step))
        along = torch.arange(count, dtype=ranks.dtype) * step
        expected = expected.unsqueeze(-1) + along
    grid = Grid(start, tuple(axes))
    is_rising = all(step > 0 for _, step in axes)
    is_regular = is_rising and grid.is_valid(grid.last + 1) and bool((expected == ranks).all())
    return grid if is_regular else None


def _describe_sharded_tensor(tensor: Any) -> Sharding | str:
    metadata = tensor.metadata()
    shape = tuple(metadata.size)
    pieces = []
    for shard in tensor.local_shards():
        local = shard.tensor.detach()
        why = _local_refusal(local, tensor)
        if why is not None:
            return why
        if 0 in shape:
            pieces = [LocalPiece(Box.whole(shape), local.reshape(shape), None)]
        elif local.numel():
            box = Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes))
            if tuple(local.shape) != box.sizes or not Box.whole(shape).contains(box):
                return (
                    f"is a ShardedTensor of shape {shape} with a local shard of shape "
                    f"{tuple(local.shape)} at {box.offsets}, but of shape {box.sizes} in its "
                    "metadata; create it again with init_from_local_shards"
                )
            pieces.append(LocalPiece(box, local, None))
    ranks = {shard.placement.rank() for shard in metadata.shards_metadata}
    return _sharding(tensor, tensor.dtype, shape, tuple(sorted(ranks)), tuple(pieces))


def _describe_xla_tensor(tensor: torch.Tensor) -> Sharding | str:
    found = xla_shards.find_pieces(tensor)
    pieces = []
    for box, local, is_stored in found.pieces:
        why = _local_refusal(local, tensor)
        if why is not None:
            return why
        pieces.append(LocalPiece(box, local, None, is_stored))
    shape = tuple(tensor.shape)
    return _sharding(
        tensor, tensor.dtype, shape, found.ranks, tuple(pieces), write_back=found.write_back
    )


class Replica(msgspec.Struct, frozen=True, gc=False):
    """The ranks on which a leaf is the same.

    Attributes:
        ranks: None for all ranks of the job.
        rank_zero_wins: Whether the first rank's value counts: DistributedDataParallel broadcasts
            buffers before each forward pass, and ``fully_shard`` leaves them alone.
    """

    ranks: Ranks | None
    rank_zero_wins: bool = False


class Replication(dict[str, "Replica | None"]):
    """Replicas by name, and by prefix of names; prefixes are empty or end in a dot.

    Names join the keys below the top-level key by dots: ``state.3.step``. None excludes a name from
    prefixes.
    """

    def find(self, name: str) -> Replica | None:
        """Returns None for a leaf that may be private to this rank."""
        if name in self:
            return self[name]
        while name:
            name = name.rpartition(".")[0]
            if f"{name}." in self:
                return self[f"{name}."]
        return self.get("")


def replication(app_state: Mapping[str, object]) -> dict[str, Replication]:
    """Finds plain leaves that are the same on several ranks, by key of the app state.

    - Leaves under DistributedDataParallel, anywhere in a module.
    - Plain buffers after ``fully_shard``.
    - Plain leaves of a torch optimizer over DTensors: the ranks of a mesh step together.
    - State of a torch optimizer whose parameters DistributedDataParallel keeps equal, unless no
      optimizer of the app state has some trainable parameters of its module: other ranks may step
      those (``ZeroRedundancyOptimizer.optim``).

    LBFGS is left out: its steps depend on the loss.
    """
    synchronised: dict[int, Ranks | None] = {}
    stepped = {
        id(parameter)
        for value in app_state.values()
        for optimizer in getattr(value, "optimizers", (value,))
        if isinstance(optimizer, torch.optim.Optimizer)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for value in app_state.values():
        model = value if isinstance(value, torch.nn.Module) else getattr(value, "model", None)
        if isinstance(model, torch.nn.Module):
            _add_parameters(model, stepped, synchronised)
    result = {}
    for key, value in app_state.items():
        match value:
            case torch.nn.Module():
                result[key] = _of_module(value)
            case torch.optim.Optimizer():
                result[key] = _of_optimizer(value, synchronised)
            case ModelState():
                result[key] = _of_model_state(value, synchronised)
    return {key: replicas for key, replicas in result.items() if replicas}


def _ranks_of(group: Any) -> Ranks | None:
    import torch.distributed as dist

    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    return None if len(ranks) == dist.get_world_size() else ranks


def _synchronised_modules(module: torch.nn.Module) -> list[tuple[str, Any, Ranks | None]]:
    """Returns name, module and ranks of each DistributedDataParallel of several ranks."""
    distributed = sys.modules.get("torch.nn.parallel.distributed")
    if distributed is None:
        return []
    modules = [
        (name, inner, _ranks_of(inner.process_group))
        for name, inner in module.named_modules(remove_duplicate=False)
        if isinstance(inner, distributed.DistributedDataParallel)
    ]
    return [item for item in modules if item[2] is None or len(item[2]) > 1]


def _add_parameters(
    module: torch.nn.Module, stepped: Set[int], found: dict[int, Ranks | None]
) -> None:
    for _, ddp, ranks in _synchronised_modules(module):
        held = [
            parameter
            for name, parameter in ddp.module.named_parameters()
            if name not in ddp.parameters_to_ignore and not is_distributed(parameter)
        ]
        if all(id(parameter) in stepped for parameter in held if parameter.requires_grad):
            found.update((id(parameter), ranks) for parameter in held)


def _of_module(module: torch.nn.Module, prefix: str = "", *, is_plain: bool = False) -> Replication:
    """``is_plain``: names, which get ``prefix``, are those of the unwrapped model."""
    result = Replication()

    def name_of(*parts: str) -> str:
        name = ".".join([part for part in parts if part])
        name = plain_name(module, name) if is_plain else name
        # The wrapper's hooks remove its name from state dict keys.
        return prefix + name.replace("_checkpoint_wrapped_module.", "")

    for name, ddp, ranks in _synchronised_modules(module):
        # The placeholder makes plain names work for a prefix.
        result[name_of(name, "module", "?").removesuffix("?")] = Replica(ranks)
        for buffer, _ in ddp.named_buffers(remove_duplicate=False):
            result[name_of(name, buffer)] = Replica(ranks, rank_zero_wins=True)
        for ignored in ddp.parameters_to_ignore:
            result[name_of(name, "module", ignored)] = None
    for name in _buffers_after_fully_shard(module):
        result[name_of(name)] = Replica(None, rank_zero_wins=True)
    return result


def _buffers_after_fully_shard(module: torch.nn.Module) -> Iterator[str]:
    """Yields plain buffers whose module's parameters are on one mesh of all ranks."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not torch.distributed.is_initialized():
        return
    world_size = torch.distributed.get_world_size()
    is_whole: dict[str, bool] = {}
    for name, inner in module.named_modules(remove_duplicate=False):
        is_whole[name] = is_whole.get(name.rpartition(".")[0], False)
        if isinstance(inner, fsdp.FSDPModule):
            parameters: Iterable[Any] = inner.parameters()
            meshes = {each.device_mesh for each in parameters if _is_dtensor(each)}
            is_whole[name] = len(meshes) == 1 and meshes.pop().size() == world_size
        if is_whole[name]:
            for buffer, value in inner.named_buffers(name, recurse=False, remove_duplicate=False):
                if not is_distributed(value):
                    yield buffer


def _mesh_ranks(mesh: Any) -> Ranks:
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def _of_parameters(
    parameters: Iterable[Any], synchronised: Mapping[int, Ranks | None]
) -> list[Replica | None]:
    """Returns the replicas of their plain optimizer states; None if private."""
    ranks_of = cache(_mesh_ranks)

    def find(parameter: Any) -> Replica | None:
        if _is_dtensor(parameter):
            ranks = ranks_of(parameter.device_mesh)
            return Replica(ranks) if len(ranks) > 1 else None
        if id(parameter) in synchronised:
            return Replica(synchronised[id(parameter)])
        return None

    return [find(parameter) for parameter in parameters]


def _parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    # Other optimizers may shard their state in plain tensors, or step differently per rank.
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim.") or kind is torch.optim.LBFGS:
        return []
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _of_optimizer(
    optimizer: torch.optim.Optimizer, synchronised: Mapping[int, Ranks | None]
) -> Replication:
    found = _of_parameters(_parameters(optimizer), synchronised)
    if found and found[0] is not None and all(replica == found[0] for replica in found):
        return Replication({"": found[0]})
    return Replication({f"state.{n}.": replica for n, replica in enumerate(found) if replica})


def _of_model_state(state: ModelState, synchronised: Mapping[int, Ranks | None]) -> Replication:
    result = _of_module(state.model, "model.", is_plain=True)
    found = [_parameters(optimizer) for optimizer in state.optimizers]
    held = [parameter for parameters in found for parameter in parameters]
    replicas = dict(zip(map(id, held), _of_parameters(held, synchronised), strict=True))
    kinds = set(replicas.values())
    if all(found) and len(kinds) == 1 and None not in kinds:
        result["optim."] = kinds.pop()
        return result
    for name, parameter in state.model.named_parameters():
        replica = replicas.get(id(parameter))
        if replica is not None:
            fqn = plain_name(state.model, name).replace("_checkpoint_wrapped_module.", "")
            for section in ("state", "param_groups"):
                result[f"optim.{section}.{fqn}."] = replica
    return result
