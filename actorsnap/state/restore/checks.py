# SPDX-License-Identifier: Apache-2.0
"""Checks entries before memory is allocated for them (``docs/format.md``, "Entries").

Completes ``format/manifest.py``, which does not know all dtypes or the limits of torch and numpy.
It must not know targets or how entries are restored.
"""

from __future__ import annotations

from math import prod
from typing import Final, NoReturn

import numpy as np
import torch

from actorsnap.errors import FormatError
from actorsnap.format.geometry import Box, extent_bytes
from actorsnap.format.manifest import CompositeEntry, TensorEntry, ViewEntry
from actorsnap.planning.index import AnyEntry, ShardedEntry
from actorsnap.state.composite import part_shape
from actorsnap.state.objects import NUMPY_DTYPES
from actorsnap.state.tensors import DTYPES, QUANTIZED
from actorsnap.state.tree import part_path

NUMPY_KINDS: Final = frozenset({"numpy", "numpy_scalar"})
_TENSOR_KINDS: Final = frozenset({"tensor", "parameter", "buffer"})
_MAX_BYTES = 1 << 62


def fail(path: str, detail: str) -> NoReturn:
    raise FormatError(key=path, detail=detail)


def itemsize_of(entry: TensorEntry | ViewEntry | ShardedEntry) -> int:
    """Returns the bytes of an element of a checked entry."""
    is_numpy = entry.type in NUMPY_KINDS
    return (NUMPY_DTYPES[entry.dtype] if is_numpy else DTYPES[entry.dtype]).itemsize


def _check_kind(entry: TensorEntry | ViewEntry | ShardedEntry) -> torch.dtype | None:
    """Checks type, dtype and dims; returns the torch dtype, None for numpy's."""
    kind = entry.type
    if min(entry.shape, default=0) < 0:  # entries of other formats never passed our decoder
        fail(entry.path, f"no tensor has shape {entry.shape}")
    dtype: torch.dtype | None
    if kind in _TENSOR_KINDS:
        dtype = DTYPES.get(entry.dtype)
        if dtype is None or dtype in QUANTIZED:
            fail(entry.path, f"no dense tensor has dtype {entry.dtype!r:.80}")
        if entry.requires_grad and not (dtype.is_floating_point or dtype.is_complex):
            fail(entry.path, f"a tensor of dtype {entry.dtype} cannot require gradients")
        return dtype
    if kind not in NUMPY_KINDS or entry.dtype not in NUMPY_DTYPES:
        fail(entry.path, f"no {kind!r:.80} has dtype {entry.dtype!r:.80}")
    try:
        np.empty([0] * len(entry.shape))
    except ValueError as error:
        fail(entry.path, f"there is no such array: {error}")
    return None


def check_tensor(entry: TensorEntry) -> torch.dtype | None:
    """Returns the torch dtype, None for numpy's."""
    dtype = _check_kind(entry)
    nbytes = entry.data.stop - entry.data.start
    itemsize = itemsize_of(entry) if dtype is None else dtype.itemsize
    shape = entry.shape
    if prod(shape) * itemsize != nbytes:
        fail(entry.path, f"{nbytes} bytes are no {entry.dtype} of shape {shape}")
    if entry.type == "numpy_scalar" and shape:
        fail(entry.path, f"a numpy scalar has no shape {shape}")
    if entry.offsets is not None or entry.global_shape is not None:
        fail(entry.path, "it is a shard, and stands alone")
    # A product of zero does not bound other sizes.
    if nbytes == 0 and prod([size for size in shape if size]) >= _MAX_BYTES:
        fail(entry.path, f"no tensor has shape {shape}")
    return dtype


def check_sharded(entry: ShardedEntry) -> torch.dtype | None:
    """See ``check_tensor``."""
    dtype = _check_kind(entry)
    itemsize = itemsize_of(entry)
    shape = entry.shape
    if prod([size for size in shape if size]) * itemsize >= _MAX_BYTES:
        fail(entry.path, f"no tensor has shape {shape}")
    cut, sizes = entry.shards.cut, entry.shards.columns.sizes
    if not cut.is_within(shape) or [n * itemsize for n in cut.volumes] != sizes.tolist():
        whole = Box.whole(shape)
        for box, nbytes in zip(cut.boxes, sizes, strict=True):
            if box.ndim != whole.ndim or not whole.contains(box) or box.volume * itemsize != nbytes:
                fail(entry.path, f"{nbytes} bytes are not a shard {box} of {entry.dtype} {shape}")
    return dtype


def check_view(view: ViewEntry, base: AnyEntry | None) -> torch.dtype | None:
    """``base`` is checked. See ``check_tensor``."""
    if not isinstance(base, TensorEntry):
        fail(view.path, f"it is a view of {view.of!r}, which is not a tensor entry")
    dtype = _check_kind(view)
    base_bytes = base.data.stop - base.data.start
    itemsize = itemsize_of(view)
    shape, strides = view.shape, view.strides
    if (
        prod([size for size in shape if size]) * itemsize >= _MAX_BYTES
        or max(strides, default=0) >= _MAX_BYTES
        or view.offset + extent_bytes(shape, strides, itemsize) > base_bytes
        or (view.type == "numpy_scalar" and shape)
    ):
        fail(
            view.path,
            f"no {view.dtype} in {base_bytes} bytes has shape {shape}, strides {strides} and "
            f"offset {view.offset}",
        )
    return dtype


def check_composite(entry: CompositeEntry) -> None:
    if entry.type not in _TENSOR_KINDS or entry.dtype not in DTYPES:
        fail(entry.path, f"no {entry.layout!r} has type {entry.type!r} and dtype {entry.dtype!r}")


def check_part(composite: CompositeEntry, part: str, found: TensorEntry | ViewEntry | None) -> None:
    """Checks that ``found``, a checked entry, fits ``composite``."""
    if found is None or found.type != "tensor":
        fail(composite.path, f"it has no part {part!r}")
    try:
        must = part_shape(composite.dtype, composite.shape, part)
    except ValueError as error:
        fail(composite.path, str(error))
    if must is not None and must != (found.dtype, found.shape):
        path = part_path(composite.path, part)
        fail(path, f"it is a {found.dtype} {found.shape}, not a {must[0]} {must[1]}")
