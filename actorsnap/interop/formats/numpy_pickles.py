"""Reads numbers and arrays of numpy in a pickle, without numpy's unpickling.

torch's weights-only unpickler refuses what rebuilds them. Here the same unpickler gets stand-ins,
which check what they are given: dtypes of numbers only, and as many bytes as they need. It runs
with a namespace of its own, so that ``torch.load`` elsewhere in the process accepts no more than
before.
"""

from __future__ import annotations

import pickle
from math import prod
from types import FunctionType
from typing import Any, Final

import numpy as np
from torch import _weights_only_unpickler

_NUMBERS: Final = frozenset(
    {
        *("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"),
        *("f2", "f4", "f8", "c8", "c16"),
    }
)


class _Dtype:
    """Stands for ``numpy.dtype``."""

    held: np.dtype[Any]

    def __new__(cls, name: Any, align: Any = False, copy: Any = False) -> _Dtype:
        if name not in _NUMBERS:
            raise pickle.UnpicklingError(f"The numpy dtype {name!r:.80} is not one of numbers.")
        dtype = super().__new__(cls)
        dtype.held = np.dtype(name)
        return dtype

    def __setstate__(self, state: Any) -> None:
        _, order, *rest = state
        if order not in ("<", ">", "|", "=") or any(rest[:3]):
            raise pickle.UnpicklingError("A numpy dtype is not one of numbers.")
        if order in ("<", ">"):
            self.held = self.held.newbyteorder(order)


class _Array(np.ndarray[Any, Any]):
    """Stands for ``numpy.ndarray``."""

    def __new__(cls, *args: Any) -> _Array:
        raise pickle.UnpicklingError("An array of numpy is not built as numpy does it.")

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        held = dtype.held
        if (
            type(data) is not bytes
            or any([type(size) is not int or size < 0 for size in shape])
            or prod(shape) * held.itemsize != len(data)
        ):
            raise pickle.UnpicklingError("The bytes of a numpy array do not fit its shape.")
        checked: Any = (1, tuple(shape), held, bool(is_fortran), data)
        super().__setstate__(checked)


def _reconstruct(kind: Any, shape: Any, code: Any) -> _Array:
    if kind is not _Array:
        raise pickle.UnpicklingError(f"{kind!r:.80} is no array of numpy.")
    return np.empty(0, np.uint8).view(_Array)


def _scalar(dtype: _Dtype, data: Any) -> np.generic:
    held = dtype.held
    if type(data) is not bytes or len(data) != held.itemsize:
        raise pickle.UnpicklingError("The bytes of a numpy number do not fit its dtype.")
    number: np.generic = np.frombuffer(data, held).astype(held.newbyteorder("="))[0]
    return number


def _empty_bytes() -> bytes:
    """Stands for ``bytes``, which old protocols call for empty ones."""
    return b""


_STAND_INS: Final[dict[str, Any]] = {
    "builtins.bytes": _empty_bytes,
    "numpy.dtype": _Dtype,
    "numpy.ndarray": _Array,
    **{
        f"numpy.{core}.multiarray.{name}": function
        for core in ("core", "_core")
        for name, function in (("scalar", _scalar), ("_reconstruct", _reconstruct))
    },
}


def _allowed() -> dict[str, Any]:
    """Returns the stand-ins, and what the program itself allowed."""
    return {**_STAND_INS, **_weights_only_unpickler._get_user_allowed_globals()}


class InertUnpickler(_weights_only_unpickler.Unpickler):
    """torch's weights-only unpickler, which also reads numbers and arrays of numpy."""

    load = FunctionType(
        _weights_only_unpickler.Unpickler.load.__code__,
        {**vars(_weights_only_unpickler), "_get_user_allowed_globals": _allowed},
        "load",
    )


def real(value: object) -> object:
    """Returns numpy's own object for a stand-in, in the byte order of the machine."""
    if isinstance(value, _Dtype):
        return value.held
    if isinstance(value, _Array):
        return np.array(value, value.dtype.newbyteorder("="), subok=False)
    return value
