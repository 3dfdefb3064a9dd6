# SPDX-License-Identifier: Apache-2.0
"""Splits sparse and quantized tensors into dense parts, without copies, and assembles them.

Implements "Composite layouts and their parts" of ``docs/format.md``.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final, TypeAlias

import torch

from actorsnap.format.geometry import c_strides
from actorsnap.format.manifest import COMPOSITE_PARTS, CompositeLayout
from actorsnap.state.tensors import DTYPE_NAMES, DTYPES, QUANTIZED, SPARSE_LAYOUTS

_COMPRESSED: Final = {name: kind for kind, name in SPARSE_LAYOUTS.items() if name != "sparse_coo"}

_INT_REPR: Final = {"qint8": torch.int8, "quint8": torch.uint8, "qint32": torch.int32}
_PACKED: Final = {"quint4x2": 2, "quint2x4": 4}
"""Elements per byte."""


def is_composite(tensor: torch.Tensor) -> bool:
    return tensor.layout is not torch.strided or tensor.dtype in QUANTIZED


_Parts: TypeAlias = tuple[CompositeLayout, dict[str, Any], list[tuple[str, torch.Tensor]]]


def take_apart(tensor: torch.Tensor) -> _Parts | str:
    """Splits a composite into layout, parameters and parts, which share its memory.

    Returns the reason if that is impossible.
    """
    tensor = tensor.detach()
    if tensor.dtype in QUANTIZED:
        return _take_quantized_apart(tensor)
    layout: CompositeLayout = SPARSE_LAYOUTS[tensor.layout]
    parameters: dict[str, Any] = {}
    if layout == "sparse_coo":
        parameters["is_coalesced"] = tensor.is_coalesced()
        # The public accessors refuse uncoalesced tensors.
        parts = [tensor._indices(), tensor._values()]
    else:
        parts = [getattr(tensor, name)() for name in COMPOSITE_PARTS[layout]]
    return layout, parameters, list(zip(COMPOSITE_PARTS[layout], parts, strict=True))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the integers of a quantized tensor, in its own memory."""
    name = DTYPE_NAMES[tensor.dtype]
    storage = tensor.untyped_storage()
    if name in _PACKED:
        size = _packed_bytes(tensor.shape, name)
        raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return raw.set_(storage, 0, (size,), (1,))
    raw = torch.empty(0, dtype=_INT_REPR[name], device=tensor.device)
    return raw.set_(storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def _packed_bytes(shape: Sequence[int], name: str) -> int:
    # torch pads rows to whole bytes.
    per_byte = _PACKED[name]
    return prod(shape[:-1]) * -(-shape[-1] // per_byte) if shape else 1


def _take_quantized_apart(tensor: torch.Tensor) -> _Parts | str:
    name = DTYPE_NAMES[tensor.dtype]
    if name in _PACKED and not (tensor.is_contiguous() and tensor.storage_offset() == 0):
        return f"is a view of packed {name} elements; clone the tensor"
    scheme = tensor.qscheme()
    parts = [("int_repr", _raw(tensor))]
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        parameters = {"scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
        return "quantized_tensor", parameters, parts
    parts.append(("scales", tensor.q_per_channel_scales().detach()))
    parts.append(("zero_points", tensor.q_per_channel_zero_points().detach()))
    return "quantized_channel", {"axis": tensor.q_per_channel_axis()}, parts


def part_shape(dtype: str, shape: Sequence[int], part: str) -> tuple[str, tuple[int, ...]] | None:
    """Returns the required dtype and shape; None if the whole implies none."""
    if part != "int_repr":
        return None
    if dtype in _PACKED:
        return "uint8", (_packed_bytes(shape, dtype),)
    if dtype in _INT_REPR:
        return DTYPE_NAMES[_INT_REPR[dtype]], tuple(shape)
    raise ValueError(f"{dtype} is not a quantized dtype")


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    # Deprecation warnings of torch must not prevent reading where they are errors.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@_without_warnings()
def assemble(
    layout: str,
    dtype: str,
    shape: Sequence[int],
    parameters: Mapping[str, Any],
    parts: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """Assembles a tensor in the memory of its parts.

    Raises:
        ValueError, RuntimeError: The parts do not fit.
    """
    kind = DTYPES[dtype]
    size = tuple(shape)
    if "values" in parts and parts["values"].dtype != kind:
        raise ValueError(f"values are {parts['values'].dtype}, not {kind}")
    if layout == "sparse_coo":
        return torch.sparse_coo_tensor(
            parts["indices"],
            parts["values"],
            size,
            device="cpu",
            is_coalesced=bool(parameters["is_coalesced"]),
            check_invariants=True,
        )
    if layout in _COMPRESSED:
        compressed, plain, values = [parts[name] for name in COMPOSITE_PARTS[layout]]
        return torch.sparse_compressed_tensor(
            compressed,
            plain,
            values,
            size,
            layout=_COMPRESSED[layout],
            device="cpu",
            check_invariants=True,
        )
    if kind not in QUANTIZED:
        raise ValueError(f"{dtype} is not a quantized dtype")
    if layout == "quantized_tensor":
        scale, zero_point = parameters["scale"], parameters["zero_point"]
        if type(scale) is not float or type(zero_point) is not int:
            raise ValueError("scale or zero_point is not a number")
        result = torch._empty_affine_quantized(
            (0,), scale=scale, zero_point=zero_point, dtype=kind, device="cpu"
        )
    else:
        axis = parameters["axis"]
        scales, zero_points = parts["scales"], parts["zero_points"]
        if type(axis) is not int or not 0 <= axis < len(size):
            raise ValueError(f"axis {axis!r} is not one of {len(size)} dims")
        if not scales.shape == zero_points.shape == (size[axis],):
            raise ValueError(f"{tuple(scales.shape)} scales for {size[axis]} channels")
        result = torch._empty_per_channel_affine_quantized(
            [length if dim == axis else 0 for dim, length in enumerate(size)],
            scales=scales,
            zero_points=zero_points,
            axis=axis,
            dtype=kind,
            device="cpu",
        )
    raw = parts["int_repr"]
    strides = raw.stride()
    if dtype in _PACKED:
        strides = c_strides(size)
        if raw.storage_offset():  # torch would count it in elements, several per byte
            raw = raw.clone()
    return result.set_(raw.untyped_storage(), raw.storage_offset(), size, strides)
