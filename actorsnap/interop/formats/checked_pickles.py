# SPDX-License-Identifier: Apache-2.0
"""Unpickles untrusted data: no pickle ends the process, or takes far more than its size.

It calls and imports nothing. Subclasses decide what a global and a call mean.
"""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict
from collections.abc import Iterable
from io import BytesIO
from typing import Any, ClassVar, Final

_PythonUnpickler: Any = pickle._Unpickler

_LEFT_OUT = (
    # Allocate a bytearray before its bytes are read.
    *(pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
    # Return what the program has registered with ``copyreg``.
    *(pickle.EXT1, pickle.EXT2, pickle.EXT4),
    # Makes a dict with keys at once; no protocol in use has it.
    pickle.DICT,
)

_DICTS: Final = frozenset([dict, OrderedDict, Counter])

_MAX_KEY_DEPTH = 32
"""Largest depth of tuples in a key. Python hashes them recursively, at any depth."""

_LARGE_BITS = 64
_MAX_LARGE = 10_000
"""Numbers of more bits in keys. They can be chosen to have one hash, so that a dict takes hours."""

_SMALL = 64
"""Number of items that are free: a call with this many takes longer than copying them."""

_FREE = 10_000
_PER_BYTE = 4


class Refusal(pickle.UnpicklingError):
    """A pickle needs something that may be harmless, and that only the caller can allow.

    Attributes:
        name: Name of a global that the caller can allow; empty for something else.
    """

    def __init__(self, why: str, *, name: str = "") -> None:
        super().__init__(why)
        self.name = name


class Omitted:
    """Replaces a value that a pickle makes with a refused global. Drops everything in it."""

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal

    def append(self, item: object) -> None: ...

    def extend(self, items: object) -> None: ...

    def __setitem__(self, key: object, item: object) -> None: ...


class WholeModule(Refusal):
    """A pickle needs a module's class.

    Attributes:
        module: Name of the module's class.
        is_all: Nothing precedes it, so that the pickle is likely to hold nothing else.
    """

    def __init__(self, module: str, *, is_all: bool) -> None:
        super().__init__("it holds a whole module")
        self.module = module
        self.is_all = is_all


class CheckedUnpickler(_PythonUnpickler):  # type: ignore[misc]
    """Reads the next pickle in ``file``.

    It is the one in Python. The one in C allocates what a number in the pickle asks for, up to
    34 GB, and hashes tuples however deep they are, which can end the process.
    """

    dispatch: ClassVar = {
        code: load
        for code, load in _PythonUnpickler.dispatch.items()
        if bytes([code]) not in _LEFT_OUT
    }

    def __init__(self, file: BytesIO, **how: Any) -> None:
        super().__init__(file, **how)
        self._num_large = 0
        self._left = _FREE + _PER_BYTE * (file.getbuffer().nbytes - file.tell())

    def spend(self, num_items: int) -> None:
        """Counts items that are copied or hashed. References let a few bytes do that often.

        Raises:
            pickle.UnpicklingError: There are far more than the pickle has bytes.
        """
        if num_items > _SMALL:
            self._left -= num_items
            if self._left < 0:
                raise pickle.UnpicklingError("it would take far more memory or time than its size")

    def check_keys(self, keys: Iterable[object]) -> None:
        """Checks what is going to be hashed.

        Raises:
            pickle.UnpicklingError: That could end the process, or take hours.
        """
        for key in keys:
            if type(key) is not str:
                self._check_key(key)

    def _check_key(self, key: object) -> None:
        items, num_hashed = [key], 1
        for _ in range(_MAX_KEY_DEPTH):
            for item in items:
                self._num_large += type(item) is int and item.bit_length() > _LARGE_BITS
            if self._num_large > _MAX_LARGE:
                raise pickle.UnpicklingError("too many keys are numbers of more than 64 bits")
            inner = [item for item in items if isinstance(item, tuple)]
            if not inner:
                return
            num_hashed += sum(map(len, inner))
            self.spend(num_hashed)
            items = [item for each in inner for item in each]
        raise pickle.UnpicklingError("the key of a dict is tuples in tuples, too deep")

    def load(self) -> Any:
        """Is two times as fast as the method that it replaces: the bytes need no frames."""
        read = self.read = self._file_read
        self.readline = self._file_readline
        self.metastack: list[Any] = []
        self.stack: list[Any] = []
        self.append = self.stack.append
        self.proto = 0
        dispatch = self.dispatch
        try:
            while code := read(1):
                dispatch[code[0]](self)
        except pickle._Stop as stop:  # type: ignore[attr-defined]
            return stop.value
        raise EOFError("it is truncated")

    def _load_frame(self) -> None:
        self.read(8)

    def _load_append(self) -> None:
        self._check_list(self.stack[-2])
        self.load_append()

    def _load_appends(self) -> None:
        self._check_list(self.metastack[-1][-1])
        self.load_appends()

    def _load_setitem(self) -> None:
        self._check_dict(self.stack[-3])
        self.check_keys(self.stack[-2:-1])
        self.load_setitem()

    def _load_setitems(self) -> None:
        self._check_dict(self.metastack[-1][-1])
        self.check_keys(self.stack[::2])  # all since the last mark
        self.load_setitems()

    def _load_additems(self) -> None:
        self.check_keys(self.stack)
        self.load_additems()

    def _load_frozenset(self) -> None:
        self.check_keys(self.stack)
        self.load_frozenset()

    @staticmethod
    def _check_list(target: object) -> None:
        if type(target) is not list:
            raise pickle.UnpicklingError(f"it appends to a {type(target).__name__}, not to a list")

    @staticmethod
    def _check_dict(target: object) -> None:
        if type(target) not in _DICTS:
            raise pickle.UnpicklingError(f"it sets a key of a {type(target).__name__}, not a dict")

    dispatch[pickle.FRAME[0]] = _load_frame
    dispatch[pickle.APPEND[0]] = _load_append
    dispatch[pickle.APPENDS[0]] = _load_appends
    dispatch[pickle.SETITEM[0]] = _load_setitem
    dispatch[pickle.SETITEMS[0]] = _load_setitems
    dispatch[pickle.ADDITEMS[0]] = _load_additems
    dispatch[pickle.FROZENSET[0]] = _load_frozenset
