# SPDX-License-Identifier: Apache-2.0
"""Replaces the functions that numpy's pickles of numbers and arrays call.

The stand-ins check their arguments: only dtypes of numbers, and exactly the bytes they need.
"""

from __future__ import annotations

import pickle
from math import prod
from typing import Any, Final

import numpy as np

from actorsnap.interop.formats.checked_pickles import Refusal

_NUMBERS: Final = frozenset(
    {
        *("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"),
        *("f2", "f4", "f8", "c8", "c16"),
    }
)

_MAX_DIMS = 64
"""numpy's own limit."""


class _Dtype:
    """Replaces ``numpy.dtype``."""

    held: np.dtype[Any]

    def __new__(cls, name: Any, align: Any = False, copy: Any = False) -> _Dtype:
        if type(name) is not str or name not in _NUMBERS:
            shown = repr(name[:80]) if isinstance(name, str) else f"of a {type(name).__name__}"
            raise Refusal(f"a numpy array or number has the dtype {shown}, which is not a number")
        dtype = super().__new__(cls)
        dtype.held = np.dtype(name)
        return dtype

    def __setstate__(self, state: Any) -> None:
        _, order, *rest = state
        if order not in ("<", ">", "|", "=") or any(rest[:3]):
            raise Refusal("an array or number of numpy has a dtype of several fields, or objects")
        if order in ("<", ">"):
            self.held = self.held.newbyteorder(order)


class _Array(np.ndarray[Any, Any]):
    """Replaces ``numpy.ndarray``."""

    def __new__(cls, *args: Any) -> _Array:
        raise pickle.UnpicklingError("it makes an array of numpy in another way than numpy")

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        held = _held(dtype)
        if (
            type(data) is not bytes
            or type(shape) is not tuple
            or len(shape) > _MAX_DIMS
            or any([type(size) is not int or size < 0 for size in shape])
            or prod(shape) * held.itemsize != len(data)
        ):
            raise pickle.UnpicklingError("the bytes of an array of numpy do not fit its shape")
        checked: Any = (1, tuple(shape), held, bool(is_fortran), data)
        super().__setstate__(checked)


def _reconstruct(kind: Any, shape: Any, code: Any) -> _Array:
    if kind is not _Array:
        raise pickle.UnpicklingError("it makes an array of numpy of another class")
    return np.empty(0, np.uint8).view(_Array)


def _scalar(dtype: _Dtype, data: Any) -> np.generic:
    held = _held(dtype)
    if type(data) is not bytes or len(data) != held.itemsize:
        raise pickle.UnpicklingError("the bytes of a number of numpy do not fit its dtype")
    number: np.generic = np.frombuffer(data, held).astype(held.newbyteorder("="))[0]
    return number


def _held(dtype: object) -> np.dtype[Any]:
    if not isinstance(dtype, _Dtype):
        raise pickle.UnpicklingError("a number or array of numpy has no dtype")
    return dtype.held


def _empty_bytes() -> bytes:
    """Replaces ``bytes``, which old protocols call to make empty ones."""
    return b""


STAND_INS: Final[dict[str, Any]] = {
    "builtins.bytes": _empty_bytes,
    "numpy.dtype": _Dtype,
    "numpy.ndarray": _Array,
    **{
        f"numpy.{core}.multiarray.{name}": function
        for core in ("core", "_core")
        for name, function in (("scalar", _scalar), ("_reconstruct", _reconstruct))
    },
}


STATEFUL: Final = (_Dtype, _Array)
"""Classes whose ``__setstate__`` a pickle may call."""


def real(value: object) -> object:
    """Returns numpy's own object for a stand-in, in the byte order of the machine."""
    if isinstance(value, _Dtype):
        return value.held
    if isinstance(value, _Array):
        return np.array(value, value.dtype.newbyteorder("="), subok=False)
    return value
