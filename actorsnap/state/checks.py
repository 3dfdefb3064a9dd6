"""Whether entries can be believed, before memory is taken for them.

Decides about one entry at a time: dtype, shape and byte range must agree, and a view must
stay in its base (``docs/format.md``, "Entries"). ``format/validate.py`` has looked at a whole
manifest before; what is checked here is what this layer would otherwise crash on, or
allocate for. It must not know targets or how entries are restored.
"""

from __future__ import annotations

from math import prod
from typing import Final, NoReturn

import numpy as np
import torch

from actorsnap.errors import FormatError
from actorsnap.format.checksum import is_block_count
from actorsnap.format.geometry import Box
from actorsnap.format.manifest import Stored, TensorEntry, ViewEntry
from actorsnap.planning.index import ShardedEntry
from actorsnap.state.objects import NUMPY_DTYPES
from actorsnap.state.tensors import DTYPES, QUANTIZED, extent_bytes

__all__ = [
    "NUMPY_KINDS",
    "TENSOR_KINDS",
    "check_kind",
    "check_sharded",
    "check_stored",
    "check_tensor",
    "check_view",
    "fail",
]

TENSOR_KINDS: Final = frozenset({"tensor", "parameter", "buffer"})
NUMPY_KINDS: Final = frozenset({"numpy", "numpy_scalar"})

_MAX_BYTES = 1 << 62
_MANY_DIMS = 32
"""Dims that every release of numpy has."""


def fail(path: str, detail: str) -> NoReturn:
    """Raises FormatError for the entry ``path``."""
    raise FormatError(key=path, detail=detail)


def check_stored(path: str, data: Stored) -> int:
    """Returns the number of stored bytes, or raises FormatError."""
    start, stop = data.start, data.stop
    if not 0 <= start <= stop < _MAX_BYTES or not is_block_count(stop - start, len(data.crc32c)):
        fail(path, f"no bytes lie at [{start}, {stop}) with {len(data.crc32c)} checksums")
    return stop - start


def check_kind(entry: TensorEntry | ViewEntry | ShardedEntry) -> torch.dtype | None:
    """Checks type, dtype and number of dims; returns the torch dtype, None for numpy's."""
    kind = entry.type
    dtype: torch.dtype | None
    if kind in TENSOR_KINDS:
        dtype = DTYPES.get(entry.dtype)
        if dtype is None or dtype in QUANTIZED:
            fail(entry.path, f"no dense tensor has dtype {entry.dtype!r:.80}")
        if entry.requires_grad and not (dtype.is_floating_point or dtype.is_complex):
            fail(entry.path, f"a tensor of dtype {entry.dtype} cannot require gradients")
        return dtype
    if kind not in NUMPY_KINDS or entry.dtype not in NUMPY_DTYPES:
        fail(entry.path, f"no {kind!r:.80} has dtype {entry.dtype!r:.80}")
    if len(entry.shape) > _MANY_DIMS:
        try:
            np.empty([0] * len(entry.shape))
        except ValueError as error:
            fail(entry.path, f"there is no such array: {error}")
    return None


def check_tensor(entry: TensorEntry) -> torch.dtype | None:
    """As ``check_kind``; also checks that the bytes are those of the shape."""
    dtype = check_kind(entry)
    data = entry.data
    nbytes = check_stored(entry.path, data)
    if dtype is not None:
        itemsize = dtype.itemsize
    else:
        itemsize = NUMPY_DTYPES[entry.dtype][0].itemsize
    shape = entry.shape
    if min(shape, default=0) < 0 or prod(shape) * itemsize != nbytes:
        fail(entry.path, f"{nbytes} bytes are no {entry.dtype} of shape {shape}")
    if entry.type == "numpy_scalar" and shape:
        fail(entry.path, f"a numpy scalar has no shape {shape}")
    if entry.offsets is not None or entry.global_shape is not None:
        fail(entry.path, "it is a shard, and stands alone")
    # A product of zero says nothing about the other sizes.
    if nbytes == 0 and prod([size for size in shape if size]) >= _MAX_BYTES:
        fail(entry.path, f"no tensor has shape {shape}")
    return dtype


def check_sharded(entry: ShardedEntry) -> torch.dtype | None:
    """As ``check_tensor``, of a whole and all of its shards."""
    dtype = check_kind(entry)
    itemsize = NUMPY_DTYPES[entry.dtype][0].itemsize if dtype is None else dtype.itemsize
    shape = entry.shape
    if min(shape, default=0) < 0 or prod([n for n in shape if n]) * itemsize >= _MAX_BYTES:
        fail(entry.path, f"no tensor has shape {shape}")
    whole = Box.whole(shape)
    for box, data in [(shard.box, shard.data) for shard in entry.shards]:
        nbytes = check_stored(entry.path, data)
        if box.ndim != whole.ndim or not whole.contains(box) or box.volume * itemsize != nbytes:
            fail(entry.path, f"{nbytes} bytes are no shard {box} of {entry.dtype} {shape}")
    return dtype


def check_view(view: ViewEntry, base_bytes: int) -> None:
    """Raises FormatError where a view is none of ``base_bytes`` bytes."""
    dtype = check_kind(view)
    itemsize = NUMPY_DTYPES[view.dtype][0].itemsize if dtype is None else dtype.itemsize
    shape, strides = view.shape, view.strides
    if (
        len(shape) != len(strides)
        or min(shape, default=0) < 0
        or min(strides, default=0) < 0
        or view.offset < 0
        or prod([size for size in shape if size]) * itemsize >= _MAX_BYTES
        or max(strides, default=0) >= _MAX_BYTES
        or view.offset + extent_bytes(shape, strides, itemsize) > base_bytes
        or (view.type == "numpy_scalar" and shape)
    ):
        fail(
            view.path,
            f"no {view.dtype} in {base_bytes} bytes has shape {shape}, strides {strides} and "
            f"offset {view.offset}",
        )
