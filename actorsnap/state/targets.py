"""What a leaf of the app state can take: in place, by a copy, or not at all.

Decides whether a stored tensor fits a target (kind, dtype, shape), and how its bytes get
there without touching autograd. It must not know entries, paths or storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from actorsnap.format.geometry import Box
from actorsnap.state.distributed import Sharding, is_distributed
from actorsnap.state.memory import ByteSink, MemorySink
from actorsnap.state.sharing import Region
from actorsnap.state.tensors import (
    CARRIERS,
    DTYPE_NAMES,
    QUANTIZED,
    StridedSink,
    TensorSink,
    carried,
    empty_tensor,
    refusal,
    sink_of_array,
    sink_of_tensor,
    tensor_type,
)

__all__ = [
    "Target",
    "assign_array",
    "assign_box",
    "assign_composite",
    "assign_tensor",
    "box_difference",
    "describe",
    "difference",
    "is_injective",
    "is_writable",
    "mark_written",
    "region_of",
    "sink_of",
    "span_sink",
    "stand_in",
    "strided_sink",
    "tensor_over",
    "typed",
]

Target = torch.Tensor | np.ndarray[Any, Any]
"""What can be restored in place."""


def describe(value: object) -> str:
    """Returns what kind of leaf ``value`` is, for people."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return f"{str(value.layout).removeprefix('torch.')} tensor"
        return "tensor"
    if isinstance(value, np.ndarray):
        return "numpy array"
    return type(value).__qualname__


def difference(target: Target, kind: str, dtype: str, shape: tuple[int, ...]) -> str | None:
    """Returns how a target differs from what is stored, or None.

    Args:
        target: A tensor or array of the app state.
        kind: What is stored, as ``describe`` puts it.
        dtype: Of what is stored; a numpy type string for arrays.
        shape: Of what is stored.
    """
    if isinstance(target, torch.Tensor) and not target.is_meta:
        why = refusal(target)
        if why is not None:
            return f"{kind} in the snapshot; the app state's {why}"
    if describe(target) != kind:
        return f"{kind} in the snapshot, {describe(target)} in the app state"
    lines = []
    if isinstance(target, torch.Tensor):
        have = DTYPE_NAMES[target.dtype][0]
    else:
        have = target.dtype.str
    if have != dtype:
        lines.append(f"dtype {dtype} in the snapshot, {have} in the app state")
    if tuple(target.shape) != shape:
        lines.append(f"shape {shape} in the snapshot, {tuple(target.shape)} in the app state")
    return "; ".join(lines) or None


def box_difference(
    target: Sharding | str, kind: str, dtype: str, shape: tuple[int, ...]
) -> str | None:
    """As ``difference``, for a distributed target that ``state.distributed`` has described."""
    if isinstance(target, str):
        return f"{kind} in the snapshot; the app state's {target}"
    if kind != "tensor":
        return f"{kind} in the snapshot, distributed tensor in the app state"
    lines = []
    if target.dtype != dtype:
        lines.append(f"dtype {dtype} in the snapshot, {target.dtype} in the app state")
    if target.global_shape != shape:
        lines.append(
            f"global shape {shape} in the snapshot, {target.global_shape} in the app state"
        )
    return "; ".join(lines) or None


def region_of(target: Target) -> Region | None:
    """Returns how a dense target lies in memory; None if strides cannot tell."""
    if isinstance(target, torch.Tensor):
        if target.is_neg() or target.is_conj():
            return None
        return Region(target.data_ptr(), target.itemsize, tuple(target.shape), target.stride())
    itemsize = target.itemsize
    if any(stride < 0 or stride % itemsize for stride in target.strides):
        return None
    strides = tuple([stride // itemsize for stride in target.strides])
    return Region(target.ctypes.data, itemsize, target.shape, strides)


def is_writable(target: Target) -> bool:
    """Whether every element can be written by itself: it exists, and shares no memory."""
    if isinstance(target, torch.Tensor):
        if target.is_meta:
            return False
        if target.is_contiguous():
            return True
        shape, strides = tuple(target.shape), target.stride()
    else:
        if not target.flags.writeable:
            return False
        shape = target.shape
        strides = tuple([abs(stride) // target.itemsize for stride in target.strides])
    return is_injective(shape, strides)


def is_injective(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether surely no two elements share memory, and dims nest: a stride spans the smaller."""
    if 0 in shape:
        return True
    reach = 0
    dims = [(stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1]
    for stride, size in sorted(dims):
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def sink_of(target: Target) -> ByteSink:
    """Returns the way into a writable dense target."""
    if isinstance(target, torch.Tensor):
        return sink_of_tensor(target)
    return sink_of_array(target)


def strided_sink(target: Target, strides: Sequence[int]) -> ByteSink | None:
    """Returns the way from a strided view's memory into a writable target; None: there is none."""
    tensor = tensor_over(target)
    return None if tensor is None else StridedSink(tensor, strides)


def tensor_over(target: Target) -> torch.Tensor | None:
    """Returns a writable target as a tensor of the same bytes; None: there is none."""
    if isinstance(target, torch.Tensor):
        return target
    if region_of(target) is None:
        return None
    name = str(CARRIERS[target.itemsize]).removeprefix("torch.")
    return torch.from_numpy(target.view(name))


def span_sink(start: int, nbytes: int, targets: Sequence[Target]) -> ByteSink | None:
    """Returns the way into the memory that targets lie in; None if it is not all theirs."""
    first = targets[0]
    if not isinstance(first, torch.Tensor) or first.is_cpu:
        return MemorySink(start, nbytes, targets)
    storage = first.untyped_storage()
    offset = start - storage.data_ptr()
    if offset < 0 or offset + nbytes > storage.nbytes():
        return None
    raw = torch.empty(0, dtype=torch.uint8, device=first.device)
    return TensorSink(raw.set_(storage, offset, (nbytes,), (1,)))


def typed(tensor: torch.Tensor, kind: str, requires_grad: bool) -> torch.Tensor:
    """Returns a fresh tensor as the Parameter, Buffer or Tensor that was saved."""
    if kind == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    if requires_grad:
        tensor.requires_grad_()
    return torch.nn.Buffer(tensor) if kind == "buffer" else tensor


def stand_in(target: Target) -> object:
    """Returns a target of the same kind with uninitialised memory of its own.

    Sparse and quantized tensors have none: they are made anew, from their parts.
    """
    if isinstance(target, np.ndarray):
        return np.empty_like(target)
    if is_distributed(target):
        return torch.empty_like(target)
    if target.layout is not torch.strided or target.dtype in QUANTIZED:
        return None
    fresh = empty_tensor(target.shape, target.dtype, target.device)
    return typed(fresh, tensor_type(target), target.requires_grad)


def mark_written(targets: Iterable[Target]) -> None:
    """Lets autograd know that targets are written to, which it cannot see.

    A graph that was built on their old values then refuses to run backward.
    """
    torch.autograd.graph.increment_version(
        [
            target
            for target in targets
            if isinstance(target, torch.Tensor) and not target.is_inference()
        ]
    )


# Copies, after all bytes are there ------------------------------------------------------------


def _copy(target: torch.Tensor, value: torch.Tensor) -> None:
    into = carried(target)
    into.copy_(value if into.dtype is value.dtype else carried(value))


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    flat = [
        # A clone has regular strides also where a dim of one element has odd ones.
        carried(x).clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
        for x in (a, b)
    ]
    return torch.equal(*flat)


def assign_tensor(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Copies ``value`` into ``target``; returns the one that has the value then.

    A target that repeats its memory takes the value only if that repeats in the same way.
    """
    if target.is_meta:
        return value
    if is_writable(target):
        _copy(target, value)
        return target
    base, part = target, value
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if size > 1 and stride == 0:
            base, part = base.narrow(dim, 0, 1), part.narrow(dim, 0, 1)
    if not is_writable(base) or not _same_bytes(value, part.expand(value.shape)):
        return value
    _copy(base, part)
    return target


def assign_box(target: torch.Tensor, whole: torch.Tensor, box: Box) -> None:
    """Copies the elements of ``whole`` in ``box`` into ``target``, which holds that box."""
    index = [slice(o, o + size) for o, size in zip(box.offsets, box.sizes, strict=True)]
    _copy(target, whole[tuple(index)])


def assign_array(target: Any, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Copies ``value`` into ``target`` if that is an equal, writable array; else returns it."""
    if (
        type(target) is np.ndarray
        and target.dtype == value.dtype
        and target.shape == value.shape
        and is_writable(target)
    ):
        np.copyto(target, value)
        return target
    return value


def assign_composite(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Copies a sparse or quantized ``value`` into ``target`` where torch can; else returns it."""
    try:
        # Detached, a sparse tensor would not keep what is copied into it. An inference tensor
        # may be written in inference mode only; leaving that mode turns gradients on.
        with torch.inference_mode(target.is_inference()), torch.no_grad():
            target.copy_(value)
    except (NotImplementedError, RuntimeError):
        # Another number of elements, another quantization scheme, packed elements.
        return value
    return target
