# SPDX-License-Identifier: Apache-2.0
"""Turns an app state into leaves with bytes and finished entries (``docs/format.md``, "Entries").

Runs in the caller's thread and copies no tensor: the result refers to live memory. It must not know
objects, plans or storage.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import tzinfo
from itertools import chain, islice
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from actorsnap.errors import UsageError, call_user_code, text_of
from actorsnap.format.geometry import Box, c_strides
from actorsnap.format.manifest import (
    CompositeEntry,
    ContainerEntry,
    ContainerType,
    TensorType,
    ValueEntry,
    ViewEntry,
)
from actorsnap.format.owners import Grid, Layout
from actorsnap.log import Log
from actorsnap.planning.inventory import Sharded, ranks_digest
from actorsnap.planning.packing import Item
from actorsnap.state import devices, objects, sharing, xla_shards
from actorsnap.state.composite import is_composite, take_apart
from actorsnap.state.distributed import (
    Describer,
    LocalPiece,
    Replica,
    Replication,
    Sharding,
    replication,
)
from actorsnap.state.optim import ModelState, class_names, parts_of, plain_name, submodules_of
from actorsnap.state.sharing import Extents, Region, region_of
from actorsnap.state.sources import ByteSource, Captured, HostMemory, Leaf, Part
from actorsnap.state.stateful import RNGState, is_stateful, validate_app_state
from actorsnap.state.tensors import (
    DTYPE_NAMES,
    PLAIN_TYPES,
    DeviceSource,
    FlatDeviceSource,
    StridedMemory,
    as_bytes,
    is_addressable,
    memory_format_of,
    plain_address,
    refusal,
    storage_bytes,
    tensor_type,
)
from actorsnap.state.tree import (
    CONTAINER_TYPES,
    Container,
    escape,
    flatten,
    human,
    join,
    keys_without_token,
    parent_of,
    part_path,
)
from actorsnap.wording import did_you_mean, printable

_log = Log(__name__)

_INLINE = frozenset({str, int, float, bool, type(None)})
_CPU = torch.device("cpu")

_MAX_COMPARED = 2000
"""Number of names in which a similar one is looked for."""

_MAX_SHOWN = 20
"""Refused leaves that an error names, as ``IncompatibleState`` does."""


def capture(
    app_state: Mapping[str, Any],
    *,
    replicated: Sequence[str] = (),
    allow_pickle: bool = False,
    ranks: Sequence[int] = (0,),
    rank: int = 0,
) -> Captured:
    """Reads the state of every stateful, without copying tensors.

    ``state_dict`` may be collective: keys are visited in sorted order. With several ranks, the
    other calls are made even after one raised, so that no rank hangs.

    Args:
        replicated: Globs of paths of leaves that are the same on every rank. ``*`` matches within a
            path component, ``**`` any components.
        allow_pickle: Whether to pickle leaves that cannot be stored otherwise.
        ranks, rank: Global ranks that save together, and that of this process.

    Raises:
        UsageError: The app state is malformed, or some leaves cannot be stored. Names the first 20.
        Exception: A ``state_dict`` raised it; a note names the key.
    """
    validate_app_state(app_state)
    globs = _Globs(replicated)
    states = _read_states(app_state, is_alone=len(ranks) == 1)
    replicas = replication(app_state) if len(ranks) > 1 else {}
    collector = _Collector(globs, allow_pickle, ranks, rank, _attributes_in(app_state))
    for key in sorted(states):
        collector.add_state(escape(key), states[key], replicas.get(key))
    collector.raise_refusals()
    collector.mark_devices()
    captured = Captured(
        collector.finish(),
        tuple(sorted(map(printable, set(replicated)))),
        tuple(collector.sharded),
        {path: class_names(found) for path, found in optimizers_in(app_state).items()},
    )
    if rank == ranks[0]:
        globs.warn_unmatched(chain(states, (leaf.item.path for leaf in captured.leaves)))
    return captured


@dataclass(frozen=True, slots=True)
class HeldLeaf:
    """A value that this rank stores; plain containers are taken apart.

    Attributes:
        path: Escaped.
        box: Box of a shard, whose tensor is ``value``: its place in a tensor of ``global_shape``.
    """

    path: str
    value: object
    box: Box | None = None
    global_shape: tuple[int, ...] = ()


def capture_leaves(
    leaves: Iterable[HeldLeaf],
    containers: Mapping[str, ContainerType],
    *,
    replicated: bool,
    allow_pickle: bool,
) -> Captured:
    """Captures leaves that other code has assigned to this rank; divides nothing with other ranks.

    Args:
        containers: Types of containers above the leaves, by path, outer ones first.
        replicated: Other ranks may read the leaves; False: they are private.

    Raises:
        UsageError: Some leaves cannot be stored. Names the first 20.
    """
    collector = _Collector(_Globs(()), allow_pickle, (0,), 0, {})
    for path, kind in containers.items():
        collector.add_container(path, kind)
    for leaf in leaves:
        if leaf.box is None:
            collector.add_state(leaf.path, leaf.value, are_replicated=replicated)
        else:
            collector.add_shard(leaf)
    collector.raise_refusals()
    collector.mark_devices()
    parts = collector.finish()
    for part in parts:
        if type(part) is Leaf and part.item.replicated:
            part.rank_zero_wins = True  # this rank writes all of it
    return Captured(parts)


def optimizers_in(app_state: Mapping[str, Any]) -> dict[str, tuple[torch.optim.Optimizer, ...]]:
    """Returns optimizers by the path of their state; those of a ``ModelState`` share one."""
    return {
        join(key, "optim") if isinstance(value, ModelState) else escape(key): optimizers
        for key, value in app_state.items()
        if (optimizers := parts_of(value)[1])
    }


def _attributes_in(app_state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the attributes of modules' parameters, which state dicts lack, by path."""
    attributes: dict[str, dict[str, Any]] = {}
    for key, value in app_state.items():
        module, _ = parts_of(value)
        if module is None:
            continue
        held = [part._parameters.values() for part in submodules_of([module])]
        if not any([vars(each) for parameters in held for each in parameters if each is not None]):
            continue  # nearly all models
        for name, parameter in module.named_parameters(remove_duplicate=False):
            path = join(key, name)
            if isinstance(value, ModelState):
                path = join(key, "model", plain_name(module, name))
            if (encoded := objects.encode_attributes(parameter, path)) is not None:
                attributes[path] = encoded
    return attributes


def _read_states(app_state: Mapping[str, Any], *, is_alone: bool) -> dict[str, Any]:
    """Random generators come first and are reset afterwards."""
    states: dict[str, Any] = {}
    failed: Exception | None = None
    generators = {key for key, value in app_state.items() if isinstance(value, RNGState)}
    try:
        for key in sorted(app_state, key=lambda key: (key not in generators, key)):
            try:
                states[key] = call_user_code(app_state[key].state_dict)
            except Exception as error:
                error.add_note(f"actorsnap: state_dict() of {key!r} in the app state raised this")
                if is_alone:
                    raise
                failed = failed or error
        if failed is not None:
            raise failed
    finally:
        for key in sorted(generators)[:1]:
            if key in states:
                app_state[key].load_state_dict(states[key])
    return states


_unmatched: set[str] = set()
"""Globs of which this process has warned."""


class _Globs:
    def __init__(self, globs: Sequence[str]) -> None:
        if isinstance(globs, str) or not all(isinstance(glob, str) for glob in globs):
            raise UsageError(f"replicated must be a list of globs, not {globs!r}")
        self._matched: set[str] = set()
        self._match_all = list(globs) == ["**"]
        self.patterns = {glob: re.compile(_glob_regex(glob), re.DOTALL).fullmatch for glob in globs}

    def match(self, path: str) -> bool:
        """Whether any glob matches the path, escaped or as typed."""
        if self._match_all:  # usual; a regular expression per leaf takes a tenth of a capture
            return True
        typed = human(path) if "%" in path else path
        has_match = False
        for glob, matches in self.patterns.items():
            if matches(path) or (typed is not path and matches(typed)):
                has_match = True
                self._matched.add(glob)
        return has_match

    def warn_unmatched(self, names: Iterable[str]) -> None:
        """Warns once in this process of each glob without a match."""
        # An app state may have no leaves, so "**" need not match.
        known_globs = {*self._matched, *_unmatched, "**"}
        unmatched = [glob for glob in self.patterns if glob not in known_globs]
        _unmatched.update(unmatched)
        known = [*islice(names, _MAX_COMPARED)] if unmatched else []
        for glob in unmatched:
            hint = did_you_mean(glob.rstrip("/*"), known)
            _log.warning(
                "replicated=%r matches no leaf of the app state%s",
                *(glob, f"; {hint}" if hint else ""),
            )


def _glob_regex(glob: str) -> str:
    pieces = []
    for piece in re.split(r"(\*\*/|\*\*|\*)", glob):
        wild = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}
        pieces.append(wild.get(piece) or re.escape(piece))
    return "".join(pieces)


class _RankGroup(NamedTuple):
    """Global ranks of a group; the numbers in it of the ranks that save together; and a digest.

    ``is_member``: whether this rank is one of them.
    """

    ranks: tuple[int, ...]
    members: tuple[int, ...]
    digest: bytes
    is_member: bool


class _Collector:
    """Turns leaves into parts, and leaves that share memory into views."""

    def __init__(
        self,
        globs: _Globs,
        allow_pickle: bool,
        ranks: Sequence[int],
        rank: int,
        attributes: Mapping[str, dict[str, Any]],
    ) -> None:
        self.sharded: list[Sharded] = []
        self._ranks = ranks
        self._rank = rank
        first, step = ranks[0], ranks[1] - ranks[0] if len(ranks) > 1 else 1
        is_regular = list(ranks) == [first + number * step for number in range(len(ranks))]
        self._step = step if is_regular else None
        self._numbers = {global_rank: number for number, global_rank in enumerate(ranks)}
        self._everybody = tuple(range(len(ranks)))
        self._groups: dict[int, _RankGroup] = {}
        self._layouts: dict[int, tuple[Layout, Layout]] = {}
        self._attributes = attributes
        self._describer = Describer()
        self._globs = globs if globs.patterns else None
        self._allow_pickle = allow_pickle
        self._parts: list[Part] = []
        self._refused: list[str] = []
        self._extents: defaultdict[torch.device, Extents] = defaultdict(Extents)
        self._cpu = self._extents[_CPU]
        self._repeating: list[int] = []
        self._lanes: dict[torch.device, devices.Lane] = {}
        self._waits: set[torch.device] = set()

    def add_state(
        self,
        root: str,
        state: object,
        replicas: Replication | None = None,
        *,
        are_replicated: bool = False,
    ) -> None:
        paths, values = flatten(root, state)
        parts = self._parts
        globs = self._globs
        may_be_global = xla_shards.is_loaded()
        for path, value in zip(paths, values, strict=True):
            kind = type(value)
            replicated = are_replicated or (
                globs is not None and kind is not Container and globs.match(path)
            )
            if replicas is not None and not replicated and kind is not Container:
                replica = replicas.find(human(path.partition("/")[2], "."))
                if replica is not None:
                    members = self._members(replica.ranks)
                    replicated = len(members) == len(self._ranks)
                    is_common = replicated and not replica.rank_zero_wins
                    if not is_common and self._add_replica(path, value, replica, members):
                        continue
            is_plain = kind is torch.Tensor or kind is torch.nn.Parameter
            if is_plain and not (may_be_global and xla_shards.is_global(value)):
                self._add_tensor(path, value, replicated)  # type: ignore[arg-type]
            elif kind in _INLINE:
                self._add_value(path, value, replicated)
            elif kind is Container:
                parts.append(self._container(path, value))  # type: ignore[arg-type]
            elif kind is np.ndarray or isinstance(value, np.generic):
                self._add_array(path, value, replicated)
            elif isinstance(value, torch.Tensor):
                self._add_distributed(path, value)
            else:
                self._add_value(path, value, replicated)

    def add_container(self, path: str, kind: ContainerType) -> None:
        self._parts.append(ContainerEntry(path=path, type=kind))

    def add_shard(self, leaf: HeldLeaf) -> None:
        tensor, box = leaf.value, leaf.box
        assert isinstance(tensor, torch.Tensor)
        assert box is not None
        why = refusal(tensor)
        if why is None and is_composite(tensor):
            why = f"is a shard with dtype {tensor.dtype} and layout {tensor.layout}; make it dense"
        if why is not None:
            self._refuse(leaf.path, why)
            return
        whole = Sharding(
            leaf.global_shape,
            DTYPE_NAMES[tensor.dtype],
            tensor_type(tensor),
            tensor.requires_grad,
            (),
            (LocalPiece(box, tensor.detach(), None),),
        )
        self._add_pieces(leaf.path, whole, tensor, self._group(whole.ranks))

    def _refuse(self, path: str, why: str | None) -> None:
        self._refused.append(f"{path!r} {why}")

    def raise_refusals(self) -> None:
        if not self._refused:
            return
        count = len(self._refused)
        lines = self._refused[:_MAX_SHOWN]
        if count > _MAX_SHOWN:
            lines.append(f"... and {count - _MAX_SHOWN} more")
        some = "a leaf" if count == 1 else f"{count} leaves"
        shown = "\n".join(f"  {line}" for line in lines)
        raise UsageError(f"{some} of the app state cannot be saved:\n{shown}")

    def _container(self, path: str, container: Container) -> ContainerEntry:
        attributes = None
        if container.metadata is not None:
            try:
                attributes = objects.encode_inline(container.metadata, path)
            except objects.NotInline as error:
                self._refuse(
                    path,
                    f"has an attribute _metadata with a {error.kind} in it; "
                    "delete the attribute, or save dict(...) of the state",
                )
        return ContainerEntry(path=path, type=container.type, attributes=attributes)

    def _add_value(self, path: str, value: object, replicated: bool) -> None:
        try:
            kind, encoded = objects.encode(value, path)
        except objects.NotInline as error:
            if not self._allow_pickle and isinstance(error.value, _TORCH_STATEFULS):
                self._refuse(path, _as_own_key(value, error))
            else:
                self._pickle_or_refuse(path, value, _why_not_inline(value, error), replicated)
            return
        if kind is None:
            self._parts.append(ValueEntry(path=path, value=encoded, replicated=replicated))
        else:
            self._add_bytes(path, kind, encoded, replicated)

    def _add_bytes(self, path: str, kind: str, data: bytes | bytearray, replicated: bool) -> None:
        raw = np.frombuffer(data, np.uint8)
        item = Item(path, "uint8", (raw.nbytes,), raw.nbytes, 1, replicated, is_whole=True)
        self._parts.append(Leaf(item, as_bytes(raw), kind, ""))

    def _pickle_or_refuse(self, path: str, value: object, why: str, replicated: bool) -> None:
        if not self._allow_pickle:
            can_help = objects.can_be_pickled(value)
            self._refuse(path, f"{why}, or {_ALLOW_PICKLE if can_help else _LEAVE_OUT}")
            return
        try:
            data = objects.pickled(value)
        except Exception as error:  # runs the value's own code
            name = type(value).__qualname__
            text = f"has the type {name} and cannot be pickled: {text_of(error)}"
            self._refuse(path, f"{text}; {_LEAVE_OUT}")
        else:
            self._add_bytes(path, "pickle", data, replicated)

    def _add_array(self, path: str, value: Any, replicated: bool) -> None:
        array = np.asarray(value)
        kind: TensorType = "numpy" if type(value) is np.ndarray else "numpy_scalar"
        name = objects.numpy_name(array.dtype)
        if name is not None:
            dtype = array.dtype.name
            item = Item(path, dtype, array.shape, array.nbytes, array.itemsize, replicated)
            if array.nbytes and (region := region_of(array)) is not None:
                self._track(region, _CPU)
            self._parts.append(Leaf(item, as_bytes(array), kind, name))
            return
        try:
            if kind == "numpy_scalar":
                raise objects.NotInline(value)
            data = objects.array_to_npy(array)
        except objects.NotInline:
            why = (
                f"is a numpy {'array' if kind == 'numpy' else 'scalar'} of dtype {array.dtype}, "
                "which cannot be stored as it is; convert it to another dtype"
                f"{'' if kind == 'numpy' else ', or to an array with np.asarray(x)'}"
            )
            self._pickle_or_refuse(path, value, why, replicated)
        else:
            self._add_bytes(path, "numpy", data, replicated)

    def _track(self, region: Region, device: torch.device) -> None:
        """Adds the memory of the next part."""
        self._extents[device].add(len(self._parts), region.start, region.stop)
        if region.repeats:
            self._repeating.append(len(self._parts))

    def _add_tensor(self, path: str, tensor: torch.Tensor, replicated: bool) -> None:
        start = plain_address(tensor)
        if not start and (tensor.is_nested or is_composite(tensor) or not tensor.is_cpu):
            why = refusal(tensor)
            if why is not None:
                self._refuse(path, why)
                return
            if is_composite(tensor):
                self._add_composite(path, tensor, replicated)
                return
        kind = tensor_type(tensor)
        self._add_dense(path, tensor, start, kind, tensor.requires_grad, replicated)

    def _add_composite(self, path: str, tensor: torch.Tensor, replicated: bool) -> None:
        split = take_apart(tensor)
        if isinstance(split, str):
            self._refuse(path, split)
            return
        layout, parameters, parts = split
        self._parts.append(
            CompositeEntry(
                path=path,
                layout=layout,
                dtype=DTYPE_NAMES[tensor.dtype],
                shape=tuple(tensor.shape),
                parts=tuple([name for name, _ in parts]),
                parameters={k: objects.encode_inline(v, path) for k, v in parameters.items()},
                type=tensor_type(tensor),
                requires_grad=tensor.requires_grad,
                replicated=replicated,
            )
        )
        for name, part in parts:
            self._add_dense(
                part_path(path, name),
                part,
                plain_address(part),
                "tensor",
                False,
                replicated,
                is_whole=True,
            )

    def _add_dense(
        self,
        path: str,
        tensor: torch.Tensor,
        start: int,
        kind: TensorType,
        requires_grad: bool,
        replicated: bool,
        is_whole: bool = False,
    ) -> None:
        """``start``: see ``plain_address``."""
        name, itemsize = DTYPE_NAMES[tensor.dtype], tensor.itemsize
        nbytes = tensor.nbytes
        item = Item(
            path, name, tuple(tensor.shape), nbytes, itemsize, replicated, None, None, is_whole
        )
        source: ByteSource
        if nbytes == 0:
            source = HostMemory(0, 0, None)
        elif start and tensor.is_cpu:  # nearly all tensors: nothing here may be slow
            source = HostMemory(start, nbytes, tensor)
            self._cpu.add(len(self._parts), start, start + nbytes)
        elif start and devices.calls.has(tensor):  # nor here
            device = tensor.device
            source = FlatDeviceSource(tensor, self._lane(device))
            self._extents[device].add(len(self._parts), start, start + nbytes)
        elif (why := refusal(tensor)) is not None:
            self._refuse(path, why)
            return
        else:
            source = self._copied(tensor)
            if (region := region_of(tensor)) is not None:
                self._track(region, tensor.device)
        leaf = Leaf(item, source, kind, name, requires_grad)
        if len(item.shape) > 3 or kind == "parameter" or self._attributes:
            self._annotate(leaf, tensor, tensor)
        self._parts.append(leaf)

    def _annotate(self, leaf: Leaf, tensor: torch.Tensor, whole: torch.Tensor) -> None:
        """Sets the memory format of ``tensor``, and the attributes of ``whole``."""
        if tensor.ndim > 3:
            leaf.memory_format = memory_format_of(tensor)
        path = leaf.item.path
        leaf.attributes = self._attributes.get(path)
        if leaf.kind == "parameter" and leaf.attributes is None:
            leaf.attributes = objects.encode_attributes(whole, path)

    def _add_distributed(self, path: str, tensor: torch.Tensor) -> None:
        sharding = self._describer.describe(tensor)
        if not isinstance(sharding, Sharding):
            self._refuse(path, sharding or refusal(tensor))
            return
        group = self._group(sharding.ranks)
        if len(group.members) < len(sharding.ranks):
            absent = sorted(set(sharding.ranks) - self._numbers.keys())
            self._refuse(
                path,
                f"lies on rank(s) {', '.join(map(str, absent[:16]))} too, which do not take part "
                "in this save; pass a group that has all of them, or save x.full_tensor()",
            )
            return
        self._add_pieces(path, sharding, tensor, group)

    def _add_pieces(
        self, path: str, whole: Sharding, tensor: torch.Tensor, group: _RankGroup
    ) -> None:
        """Adds the pieces of a tensor that the ranks of ``group`` have."""
        shape, dtype, num_ranks = whole.global_shape, whole.dtype, len(whole.ranks)
        if group.is_member:
            layout = self._layout(whole.layout)
            self.sharded.append(Sharded(path, dtype, shape, group.digest, num_ranks, layout))
        # Other meshes may have boxes of this name. Equal ones are recognised if uncut.
        is_whole = num_ranks < len(self._ranks)
        for piece in whole.pieces:
            if not piece.is_stored:
                continue
            box, part = piece.box, piece.tensor
            nbytes, itemsize = part.nbytes, part.itemsize
            item = Item(
                path, dtype, box.sizes, nbytes, itemsize, False, box.offsets, shape, is_whole
            )
            holders = () if piece.holders is None else self._members(piece.holders)
            start = piece.address
            source = HostMemory(start, nbytes, part) if start else self._source(part)
            leaf = Leaf(item, source, whole.kind, dtype, whole.requires_grad, holders)
            if len(shape) > 3 or whole.kind == "parameter" or self._attributes:
                self._annotate(leaf, part, tensor)
            self._parts.append(leaf)

    def _layout(self, layout: Layout | None) -> Layout | None:
        """Returns the layout in group ranks; None if the group's ranks are irregular."""
        if layout is None or self._step is None:
            return None
        found = self._layouts.get(id(layout))
        if found is None:
            step, mesh = self._step, layout.mesh
            axes = tuple([(count, at // step if count > 1 else 1) for count, at in mesh.axes])
            own = Layout(Grid((mesh.start - self._ranks[0]) // step, axes), layout.cuts)
            # Keeps the layout, and so its id.
            found = self._layouts[id(layout)] = (layout, own)
        return found[1]

    def _source(self, tensor: torch.Tensor) -> ByteSource:
        if start := plain_address(tensor):
            if tensor.is_cpu:
                return HostMemory(start, tensor.nbytes, tensor)
            if devices.calls.has(tensor):
                return FlatDeviceSource(tensor, self._lane(tensor.device))
        return as_bytes(tensor) if is_addressable(tensor) else self._copied(tensor)

    def _copied(self, tensor: torch.Tensor) -> StridedMemory:
        if devices.calls.has(tensor):
            return DeviceSource(tensor, self._lane(tensor.device))
        if not tensor.is_cpu:
            self._waits.add(tensor.device)
        return StridedMemory(tensor)

    def _lane(self, device: torch.device) -> devices.Lane:
        lane = self._lanes.get(device)
        if lane is None:
            lane = self._lanes[device] = devices.Lane(devices.calls, device)
        return lane

    def _members(self, ranks: tuple[int, ...] | None) -> tuple[int, ...]:
        """Returns the group ranks of global ranks, rising; None means all."""
        return self._everybody if ranks is None else self._group(ranks).members

    def _group(self, ranks: tuple[int, ...]) -> _RankGroup:
        """Describes ranks once: the tensors of a mesh share the tuple.

        By identity, because the hash of thousands of ranks takes longer than all else of a tensor.
        """
        found = self._groups.get(id(ranks))
        if found is None:
            numbers = self._numbers
            members = tuple(sorted([numbers[rank] for rank in ranks if rank in numbers]))
            digest, is_member = ranks_digest(ranks), self._rank in ranks
            found = self._groups[id(ranks)] = _RankGroup(ranks, members, digest, is_member)
        return found

    def _add_replica(
        self, path: str, value: object, replica: Replica, members: tuple[int, ...]
    ) -> bool:
        """Adds a tensor that only ``members`` hold, or of which the first rank's value counts.

        Returns False for any other leaf.
        """
        if type(value) not in PLAIN_TYPES:
            return False
        assert isinstance(value, torch.Tensor)
        if is_composite(value) or value.is_nested:
            return False
        why = refusal(value)
        if why is not None:
            self._refuse(path, why)
            return True
        name, kind = DTYPE_NAMES[value.dtype], tensor_type(value)
        shape = tuple(value.shape)
        if len(members) == len(self._ranks):
            if self._ranks[0] != self._rank:
                return True  # the first rank stores it
            item = Item(path, name, shape, value.nbytes, value.itemsize, replicated=True)
            source = self._source(value)
            leaf = Leaf(item, source, kind, name, value.requires_grad, rank_zero_wins=True)
            self._annotate(leaf, value, value)
            self._parts.append(leaf)
            return True
        # One box, so that any rank can restore it. With rank_zero_wins a rank names itself only:
        # another group may use the same name for another buffer.
        holders = None
        ranks: tuple[int, ...] = (self._rank,)
        if not replica.rank_zero_wins:
            holders = ranks = tuple([self._ranks[i] for i in members])
        piece = LocalPiece(Box.whole(shape), value, holders)
        whole = Sharding(shape, name, kind, value.requires_grad, ranks, (piece,))
        self._add_pieces(path, whole, value, self._group(ranks))
        return True

    def mark_devices(self) -> None:
        """Orders copies after the work that this thread has queued on devices.

        Synchronizes devices without a lane.
        """
        for lane in self._lanes.values():
            lane.mark()
        for device in self._waits:
            devices.synchronize(device)

    def finish(self) -> list[Part]:
        replaced: dict[int, list[Part]] = {}
        extents = self._extents.values()
        for group in sharing.find_groups(extents, self._repeating, self._region_of):
            self._share(group, replaced)
        if not replaced:
            return self._parts
        parts: list[Part] = []
        for number, part in enumerate(self._parts):
            parts.extend(replaced.get(number) or [part])
        return parts

    def _leaf(self, number: int) -> Leaf:
        leaf = self._parts[number]
        assert isinstance(leaf, Leaf)
        return leaf

    def _region_of(self, number: int) -> Region:
        leaf = self._leaf(number)
        if isinstance(leaf.source, HostMemory):
            shape = leaf.item.shape
            return Region(leaf.source.address, leaf.item.itemsize, shape, c_strides(shape))
        assert isinstance(leaf.source, StridedMemory | FlatDeviceSource)
        region = region_of(leaf.source.owner)
        assert region is not None
        return region

    def _share(self, group: sharing.AliasGroup, replaced: dict[int, list[Part]]) -> None:
        members = [self._leaf(number) for number in group.members]
        # A view needs its base.
        replicated = all([leaf.item.replicated for leaf in members])
        base = None if group.base is None else self._leaf(group.base)
        if base is None:
            source = _span(group, members)
            if source is None:
                return
            path = part_path(parent_of(members[0].item.path), "storage")
            size = group.stop - group.start
            item = Item(path, "uint8", (size,), size, 1, replicated, is_whole=True)
            replaced[group.members[0]] = [Leaf(item, source, "tensor", "uint8")]
        else:
            path = base.item.path
            base.item = msgspec.structs.replace(base.item, replicated=replicated, is_whole=True)
        for number, leaf in zip(group.members, members, strict=True):
            if leaf is base:
                continue
            region = self._region_of(number)
            item = leaf.item
            view = ViewEntry(
                path=item.path,
                of=path,
                dtype=leaf.dtype,
                shape=item.shape,
                strides=c_strides(item.shape) if group.same else region.strides,
                offset=region.start - group.start,
                type=leaf.kind,
                requires_grad=leaf.requires_grad,
                replicated=replicated,
            )
            replaced.setdefault(number, []).append(view)


_LEAVE_OUT = "leave it out of the state dict"


_ALLOW_PICKLE = "allow pickle with options=Options(allow_pickle=True)"


def _as_own_key(value: object, error: objects.NotInline) -> str:
    """Returns the reason and remedy for a module or an optimizer in the state of another one."""
    culprit = error.value
    key, held = "optimizer", "optimizer"
    if isinstance(culprit, torch.nn.Module):
        key, held = "model", "module"
    has = "has the type" if culprit is value else "holds a value of type"
    return f'{has} {error.kind}; put the {held} itself into the app state: {{"{key}": {held}}}'


_TORCH_STATEFULS = (torch.nn.Module, torch.optim.Optimizer)


def _why_not_inline(value: object, error: objects.NotInline) -> str:
    """Returns the reason and a remedy."""
    culprit = error.value
    is_key = False
    if isinstance(value, dict) and type(value) in CONTAINER_TYPES:
        for key in keys_without_token(value):
            is_key = key is culprit
            if is_key and type(culprit) is not int:
                return (
                    f"is a dict with the key {key!r:.80} of type {error.kind}, which needs pickle; "
                    "convert it to a str or an int"
                )
            if isinstance(culprit, torch.Tensor | np.ndarray | np.generic):
                shown = f"{key!r:.80} of type {type(key).__qualname__}"
                return (
                    f"is a dict with the key {shown} and a {error.kind} in it; tensors and "
                    "arrays need keys of type str, int, float, bool or None; convert its keys"
                )
    is_in = "has a key that is" if is_key else "is" if culprit is value else "holds"
    if isinstance(culprit, torch.Tensor | np.ndarray | np.generic) and culprit is not value:
        return (
            f"is a {type(value).__qualname__} with a {error.kind} in it; only dicts, lists, "
            "tuples, deques and records of these hold tensors and arrays: use one of them"
        )
    if type(culprit) is defaultdict:
        return (
            f"{is_in} a defaultdict with the factory {culprit.default_factory!r:.80}; only builtin "
            "types are stored as one: convert it to a dict"
        )
    if isinstance(culprit, tzinfo):
        return (
            f"{is_in} a time in the zone {culprit!s:.80}, which needs a database to read: convert "
            "it with astimezone(datetime.timezone.utc)"
        )
    if type(culprit) is int:
        return (
            f"{is_in} an int of {culprit.bit_length()} bits; at most {objects.MAX_INT_BITS} "
            "are stored: convert it to bytes"
        )
    has = "has the type" if culprit is value else "holds a value of type"
    has = "has a key of type" if is_key else has
    if is_stateful(culprit):
        return f"{has} {error.kind}; put it itself into the app state, under a key of its own"
    return (
        f"{has} {error.kind}, which needs pickle; convert it to tensors, arrays, numbers, "
        "strings, bytes, dicts, lists, tuples or a dataclass"
    )


def _span(group: sharing.AliasGroup, members: Sequence[Leaf]) -> ByteSource | None:
    """Returns None if one tensor cannot cover the memory of a group."""
    size = group.stop - group.start
    sources: list[Any] = [leaf.source for leaf in members]
    for source in sources:
        owner = source.owner
        if not isinstance(owner, torch.Tensor) or owner.is_cpu:
            return HostMemory(group.start, size, sources)
        raw = storage_bytes(owner, group.start, size)
        if raw is not None:
            is_packed = isinstance(source, DeviceSource | FlatDeviceSource)
            return DeviceSource(raw, source.copier) if is_packed else StridedMemory(raw)
    # Storages overlap by other means than torch's: each is stored separately.
    return None
