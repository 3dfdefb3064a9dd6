# SPDX-License-Identifier: Apache-2.0
"""Byte sources and sinks of tensors and arrays, dtype names, and refusals of tensors.

Bytes are in C order. They are accessed in place, or copied where layout or device require that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from actorsnap.format.geometry import Box, extent_bytes, flat_range_boxes
from actorsnap.format.manifest import CompositeLayout, MemoryFormat, TensorType
from actorsnap.state import devices
from actorsnap.state.devices import Lane, ReturnLane
from actorsnap.state.sources import (
    ByteSink,
    Cut,
    HostMemory,
    Pinner,
    copy_bytes,
    memory_at,
    writable,
)

TensorOrArray: TypeAlias = torch.Tensor | np.ndarray[Any, Any]

PLAIN_TYPES: Final = frozenset({torch.Tensor, torch.nn.Parameter})

DTYPES: Final[dict[str, torch.dtype]] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
"""dtypes by their names in manifests."""

DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}

QUANTIZED: Final[frozenset[torch.dtype]] = frozenset(
    DTYPES[name] for name in ("qint8", "quint8", "qint32", "quint4x2", "quint2x4") if name in DTYPES
)

SPARSE_LAYOUTS: Final[dict[torch.layout, CompositeLayout]] = {
    torch.sparse_coo: "sparse_coo",
    torch.sparse_csr: "sparse_csr",
    torch.sparse_csc: "sparse_csc",
    torch.sparse_bsr: "sparse_bsr",
    torch.sparse_bsc: "sparse_bsc",
}

CARRIERS: Final[dict[int, torch.dtype]] = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
"""A dtype by item size that every kernel can copy. Not all copy sub-byte dtypes."""

_MEMORY_FORMATS: Final[dict[MemoryFormat | None, torch.memory_format]] = {
    None: torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}


def empty_tensor(
    path: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    memory_format: MemoryFormat | None = None,
) -> torch.Tensor:
    """Returns an uninitialised tensor.

    Raises:
        MemoryError: Names the leaf at ``path``.
    """
    # torch.empty warns that complex32 is experimental.
    made = torch.int32 if dtype is torch.complex32 else dtype
    try:
        strided = _MEMORY_FORMATS[memory_format]
        tensor = torch.empty(shape, dtype=made, device=device, memory_format=strided)
    except RuntimeError as error:
        nbytes = prod(shape) * dtype.itemsize
        raise MemoryError(f"{path!r}: no memory for {nbytes} bytes") from error
    return tensor if made is dtype else tensor.view(dtype)


def memory_format_of(tensor: torch.Tensor) -> MemoryFormat | None:
    """Returns None if row-major or not dense."""
    if tensor.ndim == 4:
        name: MemoryFormat = "channels_last"
    elif tensor.ndim == 5:
        name = "channels_last_3d"
    else:
        return None
    is_so = tensor.is_contiguous(memory_format=_MEMORY_FORMATS[name])
    return name if is_so and not tensor.is_contiguous() else None


def slices_of(box: Box) -> tuple[slice, ...]:
    return tuple([slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True)])


def is_addressable(tensor: torch.Tensor) -> bool:
    """Whether the C-order bytes are contiguous in CPU memory."""
    # Called for every leaf, so it calls no function of ours.
    return tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def has_conj_or_neg_bit(tensor: torch.Tensor) -> bool:
    """Whether the values differ from the memory: torch conjugates and negates on access."""
    return tensor.is_conj() or tensor.is_neg()


def storage_bytes(tensor: torch.Tensor, start: int, nbytes: int) -> torch.Tensor | None:
    """Returns bytes at address ``start``; None if the tensor's storage lacks them."""
    storage = tensor.untyped_storage()
    offset = start - storage.data_ptr()
    if offset < 0 or offset + nbytes > storage.nbytes():
        return None
    raw = tensor.new_empty(0, dtype=torch.uint8)
    return raw.set_(storage, offset, (nbytes,), (1,))


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a dense tensor, detached and in its carrier dtype, for copies."""
    tensor = tensor.detach()  # makes autograd leaves and inference tensors writable
    if has_conj_or_neg_bit(tensor):
        # copy_ resolves these only in the tensor's own dtype.
        return tensor
    return tensor.view(CARRIERS[tensor.itemsize])


def _elements(buffer: memoryview, owner: TensorOrArray) -> tuple[Any, bool]:
    """Returns a buffer as flat elements like ``owner``'s, and whether they are a copy.

    Unaligned buffers are copied: kernels of torch may fault on them.
    """
    if isinstance(owner, np.ndarray):
        return np.frombuffer(buffer, owner.dtype), False
    flat = torch.frombuffer(writable(buffer), dtype=torch.uint8)
    is_copy = flat.data_ptr() % owner.itemsize != 0
    if is_copy:
        flat = flat.clone()
    return flat.view(owner.dtype), is_copy


_TILE = 512
"""4,096 x 4,096 transposed floats take 60 ms in tiles of this width, else 400 ms."""


def _copy(out: Any, source: Any) -> None:
    """Copies elements; one side is contiguous.

    If rows of ``out`` run across the source's memory, each element is in another page. The pages of
    a tile stay cached for the next row.
    """
    if isinstance(out, np.ndarray):
        np.copyto(out, source)
        return
    columns = source.shape[-1] if source.ndim > 1 else 1
    if columns <= _TILE or source.stride(-1) <= 1 or source.numel() // columns < _TILE // 16:
        out.copy_(source)
        return
    for first in range(0, columns, _TILE):
        tile = slice(first, first + _TILE)
        out[..., tile].copy_(source[..., tile])


class _Copied:
    __slots__ = ()
    is_addressable = False

    @property
    def pinner(self) -> Pinner | None:
        """See ``sources.ByteSink``."""
        return None

    def view(self, start: int, stop: int) -> memoryview:
        raise TypeError("these bytes are not contiguous in CPU memory; copy them")


def _write_context(value: TensorOrArray) -> Callable[[], AbstractContextManager[None]]:
    """Returns a factory of contexts that order writes in the caller's current stream."""
    calls = devices.calls
    if isinstance(value, torch.Tensor) and calls.has(value):
        return calls.current(value.device)
    return nullcontext


def _pinner_of(value: TensorOrArray) -> Pinner | None:
    calls = devices.calls
    if isinstance(value, torch.Tensor) and calls.has(value):
        return calls.pinner(value.device)
    return None


class StridedMemory(_Copied):
    """A value that is not contiguous, on a device, or lazily conjugated. A source and a sink.

    Writes leave autograd's state alone.

    Attributes:
        owner: A tensor in its carrier dtype; or an array with any strides.
    """

    __slots__ = ("_shape", "_writing", "itemsize", "nbytes", "owner")

    def __init__(self, value: TensorOrArray) -> None:
        self.itemsize = value.itemsize
        self.nbytes = value.nbytes
        self.owner: Any = carried(value) if isinstance(value, torch.Tensor) else value
        self._shape: tuple[int, ...] = tuple(value.shape)
        self._writing = _write_context(value)

    @property
    def pinner(self) -> Pinner | None:
        return _pinner_of(self.owner)

    def pairs(self, start: int, flat: Any) -> list[tuple[Any, Any]]:
        """Returns views of the owner, and the parts of ``flat`` that hold their elements.

        ``flat`` holds the bytes from ``start`` on, in any dtype.
        """
        owner = self.owner
        flat = flat.view(owner.dtype)
        first = start // self.itemsize
        stop = first + len(flat)
        if isinstance(owner, torch.Tensor) and owner.is_contiguous():
            return [(owner.view(-1)[first:stop], flat)]
        pairs = []
        at = 0
        for box in flat_range_boxes(self._shape, first, stop):
            end = at + box.volume
            pairs.append((owner[slices_of(box)], flat[at:end].reshape(box.sizes)))
            at = end
        return pairs

    def copy_into(self, start: int, out: memoryview) -> None:
        if len(out) == 0:
            return
        flat, is_copy = _elements(out, self.owner)
        for part, elements in self.pairs(start, flat):
            _copy(elements, part)
        if is_copy:
            copy_bytes(out, memory_at(flat.data_ptr(), len(out), flat))

    def copy_from(self, start: int, data: memoryview) -> None:
        if len(data) == 0:
            return
        flat, _ = _elements(data, self.owner)
        with self._writing():
            for part, elements in self.pairs(start, flat):
                _copy(part, elements)


class DeviceSource(StridedMemory):
    """A tensor on a device, copied with others of its lane; see ``gather``.

    Attributes:
        is_flat: Whether its memory is in C order.
        flat: These bytes, if so.
    """

    __slots__ = ("copier", "flat", "is_flat")

    def __init__(self, tensor: torch.Tensor, lane: Lane) -> None:
        super().__init__(tensor)
        self.copier = lane
        owner = self.owner
        self.is_flat = owner.is_contiguous() and not has_conj_or_neg_bit(owner)
        self.flat = flat_bytes(owner) if self.is_flat else None

    def copy_into(self, start: int, out: memoryview) -> None:
        if len(out):
            self.copier.begin(out, [Cut(self, start, 0, len(out))])()


class FlatDeviceSource(_Copied):
    """A ``DeviceSource`` of a plain tensor whose memory is in C order: nearly all are.

    Torch is asked for views where copies are made, on worker threads.
    """

    __slots__ = ("copier", "nbytes", "owner")
    is_flat = True

    def __init__(self, tensor: torch.Tensor, lane: Lane) -> None:
        self.owner = tensor
        self.nbytes = tensor.nbytes
        self.copier = lane

    @property
    def flat(self) -> torch.Tensor:
        return flat_bytes(self.owner)

    def copy_into(self, start: int, out: memoryview) -> None:
        if len(out):
            self.copier.begin(out, [Cut(self, start, 0, len(out))])()


class DeviceSink(_Copied):
    """Bytes ``[at, at + nbytes)`` of the memory of a tensor on a device.

    Args:
        flat: Of ``flat_bytes``.
    """

    __slots__ = ("_whole", "_at", "nbytes", "lane")
    is_flat = True

    def __init__(self, flat: torch.Tensor, lane: ReturnLane, at: int, nbytes: int) -> None:
        self._whole = flat
        self._at = at
        self.nbytes = nbytes
        self.lane = lane

    @property
    def pinner(self) -> Pinner | None:
        return self.lane.pinner

    @property
    def flat(self) -> torch.Tensor:
        if self.nbytes == len(self._whole):
            return self._whole
        return self._whole[self._at : self._at + self.nbytes]

    def copy_from(self, start: int, data: memoryview) -> None:
        if len(data):
            self.lane.copy(data, [Cut(self, start, 0, len(data))])


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a contiguous tensor, detached."""
    return tensor.detach().view(-1).view(torch.uint8)


class ExtentSink(StridedMemory):
    """Takes the stored memory of a strided view, and keeps the view's elements.

    With dims sorted by stride, memory order is C order, so a range of memory holds a flat range of
    elements.

    Args:
        tensor: Takes the elements, which must not share memory.
        strides: Strides of the view, of the shape of ``tensor``. Only elements along strides of 0
            may share memory.
    """

    __slots__ = ("_strides",)

    def __init__(self, tensor: torch.Tensor, strides: Sequence[int]) -> None:
        super().__init__(tensor)
        self.nbytes = extent_bytes(tensor.shape, strides, tensor.itemsize)
        steps = [stride if n > 1 else 0 for n, stride in zip(tensor.shape, strides, strict=True)]
        dims = sorted(range(tensor.ndim), key=steps.__getitem__, reverse=True)
        self.owner = self.owner.permute(dims)
        self._strides: list[int] = [steps[dim] for dim in dims]
        # Other dims repeat elements.
        self._shape = tuple([tensor.shape[dim] for dim in dims if steps[dim]])

    def pairs(self, start: int, flat: Any) -> list[tuple[Any, Any]]:
        low = start // self.itemsize
        first, stop = self._num_before(low), self._num_before(low + len(flat))
        pairs = []
        for box in flat_range_boxes(self._shape, first, stop):
            part = self.owner[slices_of(box)]
            at = sum([o * step for o, step in zip(box.offsets, self._strides, strict=False)])
            pairs.append((part, flat[at - low :].as_strided(part.shape, self._strides)))
        return pairs

    def _num_before(self, at: int) -> int:
        before = 0
        count = prod(self._shape)
        for size, stride in zip(self._shape, self._strides, strict=False):
            count //= size
            if at >= size * stride:
                return before + size * count
            before += at // stride * count
            at %= stride
        return before + min(at, 1)


class BoxSink(_Copied):
    """Takes a range of the C-order bytes of a box, and copies it to overlapping tensors.

    Args:
        box: In the index space of a larger tensor.
        start, nbytes: The range, relative to the box's first byte.
        targets: Boxes of the same space and their tensors, of any strides and device, whose
            elements must not share memory. Bytes outside of these boxes are dropped.
    """

    __slots__ = ("_box", "_start", "_targets", "nbytes")

    def __init__(
        self, box: Box, start: int, nbytes: int, targets: Sequence[tuple[Box, torch.Tensor]]
    ) -> None:
        self.nbytes = nbytes
        self._box = box
        self._start = start
        self._targets = [
            (held, carried(tensor), _write_context(tensor)) for held, tensor in targets
        ]

    @property
    def pinner(self) -> Pinner | None:
        return _pinner_of(self._targets[0][1])

    def copy_from(self, start: int, data: memoryview) -> None:
        if len(data) == 0:
            return
        owner = self._targets[0][1]
        flat, _ = _elements(data, owner)
        first = (self._start + start) // owner.itemsize
        at = 0
        for local in flat_range_boxes(self._box.sizes, first, first + len(flat)):
            elements = flat[at : at + local.volume].view(local.sizes)
            at += local.volume
            offsets = [a + b for a, b in zip(local.offsets, self._box.offsets, strict=True)]
            run = Box(tuple(offsets), local.sizes)
            for held, tensor, writing in self._targets:
                shared = run.intersect(held)
                if shared is not None:
                    part = tensor[slices_of(shared.relative_to(held))]
                    with writing():
                        part.copy_(elements[slices_of(shared.relative_to(run))].view(part.dtype))


class ClippedSink(_Copied):
    """Takes ``nbytes`` bytes; passes those from ``skip`` on to ``inner``.

    The others only need memory for verification.
    """

    __slots__ = ("_inner", "_skip", "nbytes")

    def __init__(self, inner: ByteSink, skip: int, nbytes: int) -> None:
        self._inner = inner
        self._skip = skip
        self.nbytes = nbytes

    @property
    def pinner(self) -> Pinner | None:
        return self._inner.pinner

    def copy_from(self, start: int, data: memoryview) -> None:
        low = max(start, self._skip)
        high = min(start + len(data), self._skip + self._inner.nbytes)
        if low < high:
            self._inner.copy_from(low - self._skip, data[low - start : high - start])


def as_bytes(value: TensorOrArray) -> HostMemory | StridedMemory:
    """Returns the bytes in place. To write, elements must not share memory."""
    if isinstance(value, np.ndarray):
        if value.flags.c_contiguous:
            return HostMemory(value.ctypes.data, value.nbytes, value)
    elif is_addressable(value):
        return HostMemory(value.data_ptr(), value.nbytes, value)
    return StridedMemory(value)


def bytes_of(value: TensorOrArray) -> bytearray:
    """Returns a copy in C order."""
    source = as_bytes(value)
    out = bytearray(source.nbytes)
    source.copy_into(0, memoryview(out))
    return out


def tensor_type(tensor: torch.Tensor) -> TensorType:
    if type(tensor) is torch.nn.Parameter:
        return "parameter"
    # Set by torch.nn.Buffer, which returns a plain tensor.
    return "buffer" if getattr(tensor, "_is_buffer", False) else "tensor"


def address_of(tensor: torch.Tensor) -> int:
    """Returns the address of a plain tensor's memory, or 0."""
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a torch.func wrapper, or an emptied storage
        return 0


def plain_address(tensor: torch.Tensor) -> int:
    """Returns the address of the C-order bytes of a plain tensor, on any device.

    Returns 0 for any other tensor: ``refusal`` and ``is_addressable`` must decide then.
    """
    # Called for every leaf, so it calls no function of ours.
    dtype = tensor.dtype
    if (
        type(tensor) not in PLAIN_TYPES
        or tensor.is_nested
        or tensor.layout is not torch.strided
        or dtype in QUANTIZED
        or not tensor.is_contiguous()
        or (dtype.is_complex and tensor.is_conj())
        or tensor.is_neg()
    ):
        return 0
    try:
        start = tensor.data_ptr()
        end = tensor.storage_offset() * tensor.itemsize + tensor.nbytes
        # False: the storage was resized.
        return start if end <= tensor.untyped_storage().nbytes() else 0
    except RuntimeError:  # a torch.func wrapper, or an emptied storage
        return 0


def refusal(tensor: torch.Tensor) -> str | None:
    """Returns why a tensor cannot be stored, with a remedy; else None."""
    kind = type(tensor)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind not in PLAIN_TYPES:
        if isinstance(tensor, UninitializedTensorMixin):
            return f"is not initialised ({name}); run the module once before saving it"
        return (
            f"is of the tensor subclass {name}; only Tensor, Parameter and Buffer are saved: "
            "convert it to a plain tensor, or save the tensors that it wraps"
        )
    if tensor.is_nested:
        return "is a nested tensor; save its values and offsets, or x.to_padded_tensor(...)"
    if torch._is_functional_tensor(tensor):
        return (
            "has no memory (torch.func.functionalize, or a compiler, wraps it); save what the "
            "function returns, or torch._from_functional_tensor(x)"
        )
    if tensor.dtype in QUANTIZED and not tensor.is_quantized:
        dtype = DTYPE_NAMES[tensor.dtype]
        plain = dtype[1:] if dtype[1:] in DTYPES else "uint8"
        return (
            f"has the dtype {dtype}, but no scale and zero point (a view of other bytes); save "
            f"x.view(torch.{plain})"
        )
    if tensor.is_quantized and not tensor.is_meta:
        try:
            tensor.qscheme()
        except RuntimeError:
            dtype = DTYPE_NAMES[tensor.dtype]
            return (
                f"has the dtype {dtype}, but no scale and zero point (torch.empty gives none); "
                "save x.int_repr()"
            )
    if tensor.layout is not torch.strided and tensor.layout not in SPARSE_LAYOUTS:
        return f"has the layout {tensor.layout}; convert it with x.to_dense()"
    if tensor.is_meta:
        return "is on the meta device and has no data; materialise it with x.to_empty(...)"
    if tensor.layout is torch.strided and tensor.nbytes and tensor.dtype not in QUANTIZED:
        if tensor._is_zerotensor():
            return "has no memory (zeros that autograd has not made yet); save x.clone()"
        try:
            held_bytes = tensor.untyped_storage().nbytes()
        except NotImplementedError:
            return "has no memory (a transformation of torch.func wraps it); save what that returns"
        end = tensor.storage_offset() * tensor.itemsize + extent_bytes(
            tensor.shape, tensor.stride(), tensor.itemsize
        )
        if end > held_bytes:
            return "has lost its memory (its storage was resized); restore it before saving"
    return None
