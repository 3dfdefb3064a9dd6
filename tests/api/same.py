# SPDX-License-Identifier: Apache-2.0
"""Deep comparison that knows what a snapshot promises: types, bits, order, layouts.

``==`` is of no use here: ``1 == True == 1.0``, ``NaN != NaN``, and tensors compare by element.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

__all__ = ["assert_same", "raw_bytes"]

_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The C-order bytes of a dense tensor, whatever its dtype, strides and laziness."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.numel() == 0:
        return b""
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if tensor.dtype.itemsize == 16:
        return tensor.contiguous().numpy().tobytes()
    return tensor.view(carrier[tensor.dtype.itemsize]).contiguous().numpy().tobytes()


def assert_same(found: Any, expected: Any, path: str = "") -> None:
    """Fails where two states differ in type, value, bits, order of keys or tensor properties."""
    assert type(found) is type(expected), f"{path}: {type(found)} is no {type(expected)}"
    if isinstance(expected, torch.Tensor):
        _assert_same_tensor(found, expected, path)
    elif isinstance(expected, dict):
        keys = [[(type(key), key) for key in one] for one in (found, expected)]
        assert keys[0] == keys[1], f"{path}: other keys, or in another order"
        if isinstance(expected, OrderedDict):
            metadata = [getattr(one, "_metadata", None) for one in (found, expected)]
            assert_same(metadata[0], metadata[1], f"{path}._metadata")
        for key, value in expected.items():
            assert_same(found[key], value, f"{path}/{key!r:.40}")
    elif isinstance(expected, list | tuple) and type(expected) is not torch.Size:
        assert len(found) == len(expected), f"{path}: {len(found)} items, not {len(expected)}"
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{path}/{index}")
    elif isinstance(expected, float):
        assert struct.pack(">d", found) == struct.pack(">d", expected), f"{path}: {found}"
    elif isinstance(expected, complex):
        assert struct.pack(">dd", found.real, found.imag) == struct.pack(
            ">dd", expected.real, expected.imag
        ), f"{path}: {found}"
    elif isinstance(expected, np.ndarray | np.generic):
        assert found.dtype == expected.dtype, f"{path}: {found.dtype} is not {expected.dtype}"
        assert found.shape == expected.shape, f"{path}: {found.shape} is not {expected.shape}"
        assert found.tobytes() == expected.tobytes(), f"{path}: other values"
    else:
        assert found == expected, f"{path}: {found!r:.80} is not {expected!r:.80}"


def _assert_same_tensor(found: torch.Tensor, expected: torch.Tensor, path: str) -> None:
    for name in ("dtype", "shape", "layout", "requires_grad", "device"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one == other, f"{path}: {name} is {one}, not {other}"
    is_buffer = [getattr(tensor, "_is_buffer", False) for tensor in (found, expected)]
    assert is_buffer[0] == is_buffer[1], f"{path}: a Buffer became none, or the reverse"
    for name, one, other in zip(_names(expected), _parts(found), _parts(expected), strict=True):
        assert one.dtype == other.dtype, f"{path}@{name}: {one.dtype} is not {other.dtype}"
        assert one.shape == other.shape, f"{path}@{name}: {one.shape} is not {other.shape}"
        assert raw_bytes(one) == raw_bytes(other), f"{path}@{name}: other values"
    if expected.layout is torch.sparse_coo:
        assert found.is_coalesced() == expected.is_coalesced(), path
    if expected.dtype in _QUANTIZED:
        assert found.qscheme() == expected.qscheme(), path
        if expected.qscheme() is torch.per_tensor_affine:
            assert found.q_scale() == expected.q_scale(), path
            assert found.q_zero_point() == expected.q_zero_point(), path
        else:
            assert found.q_per_channel_axis() == expected.q_per_channel_axis(), path


def _names(tensor: torch.Tensor) -> list[str]:
    if tensor.layout is torch.sparse_coo:
        return ["indices", "values"]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return ["crow_indices", "col_indices", "values"]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return ["ccol_indices", "row_indices", "values"]
    if tensor.dtype in _QUANTIZED and tensor.qscheme() not in (torch.per_tensor_affine,):
        return ["int_repr", "scales", "zero_points"]
    return ["int_repr"] if tensor.dtype in _QUANTIZED else ["values"]


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout is not torch.strided:
        return [getattr(tensor, name)() for name in _names(tensor)]
    if tensor.dtype not in _QUANTIZED:
        return [tensor]
    if tensor.dtype in (torch.quint4x2, torch.quint2x4):
        storage = tensor.untyped_storage()
        values = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (len(storage),), (1,))
    else:
        values = tensor.int_repr()
    if tensor.qscheme() is torch.per_tensor_affine:
        return [values]
    return [values, tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
