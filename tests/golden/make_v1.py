# SPDX-License-Identifier: Apache-2.0
"""Makes ``tests/golden/v1``, a snapshot of format version 1 with everything that the version has.

It was run once, by the first release; what it made is checked in and must be readable for ever,
so neither this file nor the snapshot is ever changed. ``app_state`` is what must come back: it
uses no random numbers and nothing of the rest of the tests, which may change. For a new kind of
leaf or a new version, write a new file beside it.

``python -m tests.golden.make_v1 FOLDER`` makes one again; time and attempt are fixed, too.
"""

from __future__ import annotations

import datetime
import sys
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from actorsnap import Options, StateDict
from actorsnap.format.layout import Attempt
from actorsnap.planning import packing
from actorsnap.runtime import local_engine
from actorsnap.runtime.resources import Attempts
from actorsnap.sync import Snapshot

METADATA = {"made by": "tests/golden/make_v1.py", "step": 7, "nested": [1, 2.5, None, {"ü": True}]}

DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    *(f"uint{bits}" for bits in range(1, 8)),
    *(f"int{bits}" for bits in range(1, 8)),
)


def _tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    data = bytes((37 * n + 11) % 251 % (2 if dtype is torch.bool else 256) for n in range(count))
    tensor = torch.empty(shape, dtype=dtype)
    if count:
        raw = torch.empty(0, dtype=torch.uint8)
        raw.set_(tensor.untyped_storage(), 0, (count,), (1,))
        raw.copy_(torch.tensor(list(data), dtype=torch.uint8))
    return tensor


def _dense() -> dict[str, Any]:
    state: dict[str, Any] = {name: _tensor(getattr(torch, name), 3, 4) for name in DTYPES}
    state["0-d"] = _tensor(torch.float32)
    state["empty"] = torch.empty(2, 0, 3, dtype=torch.int16)
    state["parameter"] = torch.nn.Parameter(_tensor(torch.float32, 5))
    state["frozen"] = torch.nn.Parameter(_tensor(torch.bfloat16, 2), requires_grad=False)
    state["buffer"] = torch.nn.Buffer(_tensor(torch.float32, 2))
    state["requires grad"] = _tensor(torch.float64, 2).requires_grad_()
    state["transposed"] = _tensor(torch.int32, 3, 4).t()
    return state


def _views() -> dict[str, Any]:
    base = _tensor(torch.float32, 6, 4)
    span = _tensor(torch.int16, 30)
    return {
        "base": base,
        "row": base[1],
        "column": base[:, 2],
        "transposed": base.t(),
        "as int": base.view(torch.int32)[2:],
        "left": span[:20],
        "right": span[10:],
        "expanded": _tensor(torch.uint8, 1, 3).expand(4, 3),
    }


def _sparse() -> dict[str, Any]:
    matrix = torch.zeros(6, 4)
    matrix[0, 1], matrix[2, 3], matrix[5, 0] = 1.5, -2.25, 0.125
    indices, values = torch.tensor([[0, 0, 1], [1, 1, 0]]), torch.tensor([1.0, 2.0, 4.0])
    return {
        "coo": matrix.to_sparse_coo(),
        "coo uncoalesced": torch.sparse_coo_tensor(indices, values, (2, 2)),
        "csr": matrix.to_sparse_csr(),
        "csc": matrix.to_sparse_csc(),
        "bsr": matrix.to_sparse_bsr((2, 2)),
        "bsc": matrix.to_sparse_bsc((3, 2)),
    }


def _quantized() -> dict[str, Any]:
    values = torch.arange(12.0).reshape(3, 4) / 8 - 0.5
    scales, zero_points = torch.tensor([0.5, 0.25, 0.125]), torch.tensor([0, 1, 2])
    channel, tensor = torch.quantize_per_channel, torch.quantize_per_tensor
    return {
        "qint8": tensor(values, 0.25, 3, torch.qint8),
        "quint8": tensor(values, 0.25, 3, torch.quint8),
        "qint32": tensor(values, 0.25, 3, torch.qint32),
        "channel": channel(values, scales.double(), zero_points, 0, torch.qint8),
        "packed": channel(values, scales, zero_points.float(), 0, torch.quint4x2),
    }


def _numpy() -> dict[str, Any]:
    counted = np.arange(24).reshape(4, 6)
    structured = np.zeros(3, dtype=[("x", "<i4"), ("y", "<f8", (2,))])
    structured["x"] = [1, 2, 3]
    names = ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
    return {
        **{name: counted[:2, :3].astype(name) for name in names},
        "fortran": np.asfortranarray(counted.astype("<f4")),
        "reversed": counted.astype("<i2")[::-1, ::2],
        "0-d": np.array(7.5),
        "float32 scalar": np.float32(1.25),
        "bool scalar": np.bool_(True),
        "big endian": counted.astype(">f4"),
        "text": np.array(["a", "bcd", ""]),
        "dates": np.array(["2026-01-01", "NaT"], dtype="datetime64[D]"),
        "structured": structured,
    }


def _values() -> dict[str, Any]:
    return {
        "none": None,
        "true": True,
        "int": -5,
        "int64": -(1 << 63),
        "big": 3**200,
        "float": 0.1,
        "whole float": 3.0,
        "minus zero": -0.0,
        "nan": float("nan"),
        "inf": -float("inf"),
        "complex": complex(float("inf"), -0.0),
        "str": "straße 🦜 \x00",
        "surrogate": "lone \ud800",
        "bytes": b"\x00\xff",
        "bytearray": bytearray(b"abc"),
        "long bytes": bytes(range(256)) * 17,
        "long bytearray": bytearray(4097),
        "long str": "é\ud800" * 2000,
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:3"),
        "size": torch.Size([2, 3]),
        "layout": torch.sparse_csr,
        "memory format": torch.channels_last,
        "npdtype": np.dtype([("x", "<f4"), ("y", "<i2", (3,))]),
    }


def _containers() -> dict[Any, Any]:
    ordered: OrderedDict[str, Any] = OrderedDict(z=1, a=_tensor(torch.float32, 2))
    ordered._metadata = {"": {"version": 1}, "layer": {"version": None}}  # type: ignore[attr-defined]
    return {
        "ordered": ordered,
        "empty": [{}, [], (), OrderedDict()],
        "nested": (1, [2, {"x": (_tensor(torch.int8, 2),)}]),
        1: "int",
        "1": "str",
        -1: "minus",
        False: "bool",
        None: "none",
        0.5: "float",
        "": "empty",
        "..": "dots",
        "a/b": "slash",
        "%": "percent",
        "a@b": "at",
        "__metadata__": _tensor(torch.int8, 1),
        "ключ 🦜": _tensor(torch.int64, 150),
        "\ud800": "surrogate",
    }


def app_state() -> dict[str, StateDict]:
    """What the snapshot holds; built anew by each call."""
    with warnings.catch_warnings():  # of torch, about layouts and dtypes
        warnings.simplefilter("ignore")
        return {
            "dense": StateDict(_dense()),
            "views": StateDict(_views()),
            "sparse": StateDict(_sparse()),
            "quantized": StateDict(_quantized()),
            "numpy": StateDict(_numpy()),
            "values": StateDict(_values()),
            "con/tain ers": StateDict(_containers()),
            "pickled": StateDict(date=datetime.date(2026, 1, 2), names={"a"}),
        }


def make(folder: Path) -> None:
    """Takes the snapshot."""
    attempt = Attempt(created_s=1_767_225_600, host="00000000", pid=1, nonce="00000000")
    with (
        mock.patch.object(Attempts, "new", return_value=attempt),
        mock.patch.object(local_engine, "utc", return_value="2026-01-01T00:00:00.000000Z"),
        # Keys of less than 1 MiB share an object. This is to be small, and to have several.
        mock.patch.object(packing, "_SMALL_KEY_BYTES", 1000),
    ):
        Snapshot.take(
            folder,
            app_state(),
            replicated=["values/**"],
            metadata=METADATA,
            options=Options(fsync=False, allow_pickle=True, chunk_bytes=2 << 20),
        )


if __name__ == "__main__":
    make(Path(sys.argv[1]))
