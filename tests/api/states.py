# SPDX-License-Identifier: Apache-2.0
"""States for tests: one small builder per kind of leaf. Each call builds equal, separate memory.

``golden`` snapshots and round trips use the same cases, so a kind that is added here is tested
in all of them.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["CASES", "DTYPES", "dense", "quantized", "scribble", "sparse"]

_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})

DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype not in _QUANTIZED
}
"""Every dense dtype of this torch, by name."""


def dense(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """A contiguous tensor of any dtype; its bits are drawn at random, booleans are valid."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    if dtype is torch.bool:
        raw &= 1
    tensor = torch.empty(shape, dtype=dtype)
    if count:
        flat = torch.empty(0, dtype=torch.uint8)
        flat.set_(tensor.untyped_storage(), 0, (count,), (1,)).copy_(torch.from_numpy(raw))
    return tensor


def sparse() -> dict[str, torch.Tensor]:
    """All sparse layouts, with values that are no plain multiples of each other."""
    matrix = torch.zeros(6, 4)
    matrix[0, 1], matrix[2, 3], matrix[5, 0] = 1.5, -2.25, 3e-7
    uncoalesced = torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 1], [1, 1, 0]]), torch.tensor([1.0, 2.0, 4.0]), (2, 2)
    )
    return {
        "coo": matrix.to_sparse_coo(),
        "coo-uncoalesced": uncoalesced,
        "coo-hybrid": torch.sparse_coo_tensor(
            torch.tensor([[0, 2]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), (3, 2)
        ).coalesce(),
        "coo-empty": torch.zeros(3, 3).to_sparse_coo(),
        "csr": matrix.to_sparse_csr(),
        "csc": matrix.to_sparse_csc(),
        "bsr": matrix.to_sparse_bsr((2, 2)),
        "bsc": matrix.to_sparse_bsc((3, 2)),
    }


def quantized() -> dict[str, torch.Tensor]:
    """Per-tensor and per-channel, incl. dtypes with several elements in a byte."""
    values = torch.linspace(-2.0, 2.0, 12).reshape(3, 4)
    scales, zero_points = torch.tensor([0.5, 0.25, 0.125]), torch.tensor([0, 1, 2])
    found = {
        name: torch.quantize_per_tensor(values, 0.1, 3, getattr(torch, name))
        for name in ("qint8", "quint8", "qint32")
    }
    found["channel"] = torch.quantize_per_channel(
        values, scales.double(), zero_points, 0, torch.qint8
    )
    float_zero_points = zero_points.float()
    found["channel-packed"] = torch.quantize_per_channel(
        values, scales, float_zero_points, 0, torch.quint4x2
    )
    return found


def _views() -> dict[str, Any]:
    base = dense(torch.float32, 8, 6, seed=1)
    return {
        "base": base,
        "row": base[2],
        "columns": base[:, 1:3],
        "transposed": base.t(),
        "as-int": base.view(torch.int32),
        "same": base,
    }


def _shared_span() -> dict[str, Any]:
    storage = dense(torch.int64, 100, seed=2)
    return {"left": storage[:60], "right": storage[40:].clone()[:50], "overlap": storage[30:90]}


def _strided() -> dict[str, Any]:
    return {
        "transposed": dense(torch.bfloat16, 5, 7, seed=3).t(),
        "stepped": dense(torch.float16, 9, 8, seed=4)[::2, 1::3],
        "permuted": dense(torch.int32, 3, 4, 5, seed=5).permute(2, 0, 1),
        "channels-last": dense(torch.float32, 2, 3, 4, 5, seed=6).to(
            memory_format=torch.channels_last
        ),
        "expanded": dense(torch.float32, 4, 1, seed=7).expand(4, 6),
        "expanded-0d": dense(torch.float64, seed=8).expand(3, 3),
        "unfolded": dense(torch.uint8, 20, seed=9).unfold(0, 5, 2),
        "conjugated": dense(torch.complex64, 6, seed=10).conj(),
        "negated": dense(torch.complex64, 6, seed=11).conj().imag,
    }


def _typed() -> dict[str, Any]:
    weight = torch.nn.Parameter(dense(torch.float32, 3, 2, seed=12))
    return {
        "parameter": weight,
        "frozen": torch.nn.Parameter(dense(torch.float16, 4, seed=13), requires_grad=False),
        "tied": weight,
        "buffer": torch.nn.Buffer(dense(torch.float32, 3, seed=14)),
        "leaf": dense(torch.float64, 2, seed=15).requires_grad_(),
    }


def _numpy() -> dict[str, Any]:
    draw = np.random.default_rng(16)
    array = draw.standard_normal((4, 5))
    big = np.arange(6, dtype=">f4").reshape(2, 3)
    structured = np.zeros(3, dtype=[("x", "<i4"), ("y", "<f8", (2,))])
    structured["x"] = [1, 2, 3]
    return {
        "float64": array,
        "fortran": np.asfortranarray(array),
        "stepped": array[::2, ::-1],
        "view": array[1:3],
        "bool": draw.integers(0, 2, 5).astype(bool),
        "uint16": draw.integers(0, 9, (2, 2)).astype(np.uint16),
        "0-d": np.array(7.5),
        "empty": np.empty((0, 3), np.int8),
        "scalar": np.float32(1.25),
        "scalar-bool": np.bool_(True),
        "complex": np.array([1 + 2j, complex("nan")]),
        "big-endian": big,
        "text": np.array(["a", "bcd", ""]),
        "dates": np.array(["2026-01-01", "NaT"], dtype="datetime64[D]"),
        "structured": structured,
    }


def _values() -> dict[str, Any]:
    return {
        "none": None,
        "true": True,
        "false": False,
        "zero": 0,
        "minus": -1,
        "int64": -(1 << 63),
        "uint64": (1 << 64) - 1,
        "big": 3**900,
        "float": 0.1,
        "minus-zero": -0.0,
        "subnormal": 5e-324,
        "nan": float("nan"),
        "inf": float("inf"),
        "minus-inf": -float("inf"),
        "complex": complex(float("nan"), -0.0),
        "str": "straße 🦜 \u2028 \x00",
        "surrogate": "lone \ud800",
        "long-str": "é" * 5000,
        "bytes": b"\x00\xff",
        "long-bytes": bytes(range(256)) * 40,
        "bytearray": bytearray(b"abc"),
        "long-bytearray": bytearray(5000),
        "empty-str": "",
        "empty-bytes": b"",
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:3"),
        "size": torch.Size([2, 3]),
        "layout": torch.sparse_csr,
        "memory-format": torch.channels_last,
        "npdtype": np.dtype("<f4"),
    }


def _keys() -> dict[Any, Any]:
    return {
        1: "int",
        "1": "str",
        -7: "int",
        "-7": "str",
        "01": "str",
        False: "bool",
        None: "none",
        "None": "str",
        2.5: "float",
        "2.5": "str",
        float("inf"): "inf",
        "": "empty",
        ".": "dot",
        "..": "dots",
        "a/b": "slash",
        "a%2Fb": "percent",
        "%": "percent alone",
        "@": "at",
        "a@b": "at",
        "__metadata__": dense(torch.float32, 2, seed=17),
        "ключ": "unicode",
        "🦜": dense(torch.int8, 2, seed=18),
        "\ud83d": dense(torch.int8, 3, seed=19),
        "new\nline": "control",
        "k" * 10_000: dense(torch.float32, 1, seed=20),
    }


def _containers() -> dict[str, Any]:
    ordered: OrderedDict[str, Any] = OrderedDict(z=1, a=dense(torch.float32, 2, seed=21))
    ordered._metadata = {"": {"version": 1}, "layer": {"version": None}}  # type: ignore[attr-defined]
    deep: Any = dense(torch.float32, 1, seed=22)
    for level in range(60):
        deep = [deep] if level % 2 else {"next": deep}
    return {
        "ordered": ordered,
        "empty": [{}, [], (), OrderedDict()],
        "tuple": (1, (2, [3, dense(torch.int16, 2, seed=23)]), None),
        "long": list(range(30)),
        "deep": deep,
        "groups": [{"params": [0, 1], "lr": 1e-3, "betas": (0.9, 0.999)}],
    }


CASES: Mapping[str, Callable[[], dict[Any, Any]]] = {
    "dtypes": lambda: {
        name: dense(dtype, 3, 5, seed=number) for number, (name, dtype) in enumerate(DTYPES.items())
    },
    "0-d": lambda: {name: dense(dtype, seed=1) for name, dtype in DTYPES.items()},
    "empty": lambda: {
        "1-d": torch.empty(0),
        "n-d": torch.empty(3, 0, 5, dtype=torch.bfloat16),
        "complex": torch.empty(0, 2, dtype=torch.complex128),
    },
    "strided": _strided,
    "views": _views,
    "shared span": _shared_span,
    "typed": _typed,
    "sparse": lambda: dict(sparse()),
    "quantized": lambda: dict(quantized()),
    "numpy": _numpy,
    "values": _values,
    "keys": _keys,
    "containers": _containers,
}
"""Name -> a builder of a state dict."""


def scribble(value: Any, seen: set[int] | None = None) -> None:
    """Inverts every bit of the memory of every leaf that has memory, in place."""
    seen = set() if seen is None else seen
    if isinstance(value, dict):
        for item in value.values():
            scribble(item, seen)
    elif isinstance(value, list | tuple) and type(value) is not torch.Size:
        for item in value:
            scribble(item, seen)
    elif isinstance(value, torch.Tensor):
        for part in _memories(value.detach()):
            storage = part.untyped_storage()
            if len(storage) and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                raw = torch.empty(0, dtype=torch.uint8)
                raw.set_(storage, 0, (len(storage),), (1,)).bitwise_not_()
    elif isinstance(value, np.ndarray):
        base = value
        while isinstance(base.base, np.ndarray):
            base = base.base
        if base.nbytes and base.ctypes.data not in seen:
            seen.add(base.ctypes.data)
            raw_array = np.lib.stride_tricks.as_strided(
                base.reshape(-1, order="A").view(np.uint8), writeable=True
            )
            np.invert(raw_array, out=raw_array)
    elif isinstance(value, bytearray):
        value[:] = bytes(byte ^ 0xFF for byte in value)


def _memories(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


# torch warns once per process about some of these (sparse CSR, quantized, complex32): let it do
# so here, so that warnings as errors are about actorsnap everywhere else.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for _build in CASES.values():
        _build()
