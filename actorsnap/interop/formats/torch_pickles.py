# SPDX-License-Identifier: Apache-2.0
"""Unpickles what ``torch.save`` pickles of tensors and plain values, and executes nothing else.

It accepts what torch's weights-only unpickler does, and numbers of numpy; but what a pickle calls
are functions of this module, which check what they are given: torch's own may allocate what a
number in the pickle asks for, hash tuples that end the process, or keep objects for later calls.
"""

from __future__ import annotations

import pickle
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import cache
from io import BytesIO
from typing import Any, ClassVar, Final

import torch
from torch import _weights_only_unpickler

from actorsnap.interop.formats.checked_pickles import (
    CheckedUnpickler,
    Omitted,
    Refusal,
    WholeModule,
)
from actorsnap.interop.formats.numpy_pickles import STAND_INS, STATEFUL

_OPCODES: Final = (
    *(pickle.GLOBAL, pickle.NEWOBJ, pickle.REDUCE, pickle.BUILD, pickle.APPEND, pickle.APPENDS),
    *(pickle.SETITEM, pickle.SETITEMS, pickle.MARK, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2),
    *(pickle.TUPLE3, pickle.NONE, pickle.NEWFALSE, pickle.NEWTRUE, pickle.EMPTY_TUPLE),
    *(pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.EMPTY_SET, pickle.BININT, pickle.BININT1),
    *(pickle.BININT2, pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINSTRING),
    *(pickle.BINPERSID, pickle.BINGET, pickle.LONG_BINGET, pickle.BINPUT, pickle.LONG_BINPUT),
    *(pickle.LONG1, pickle.PROTO, pickle.STOP),
)
"""Opcodes of protocols 2 and 3 that torch's unpickler knows."""


_NEW_OPCODES: Final = (
    *(pickle.BINBYTES, pickle.SHORT_BINBYTES, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8),
    *(pickle.BINBYTES8, pickle.ADDITEMS, pickle.FROZENSET, pickle.NEWOBJ_EX),
    *(pickle.STACK_GLOBAL, pickle.MEMOIZE, pickle.FRAME, pickle.BYTEARRAY8),
    *(pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
)
"""Opcodes of later protocols."""


class TorchUnpickler(CheckedUnpickler):
    """Reads the next pickle in ``file``.

    With ``omits``, a value that needs an unknown global is ``Omitted``. ``load`` raises
    ``Refusal`` for what the caller may allow, and any exception if the pickle is damaged.
    """

    dispatch: ClassVar = {code[0]: CheckedUnpickler.dispatch[code[0]] for code in _OPCODES}

    def __init__(
        self, file: BytesIO, persistent_load: Callable[[Any], Any], *, omits: bool = False
    ) -> None:
        super().__init__(file, encoding="utf-8")
        self.persistent_load = persistent_load
        self._omits = omits
        self._omitted: Refusal | None = None

    def load(self) -> Any:
        try:
            return super().load()
        except Refusal:
            raise
        except Exception as error:
            if self._omitted is not None:  # a tensor, for example, that cannot be made without it
                raise self._omitted from error
            raise

    def find_class(self, module: str, name: str) -> Any:
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        place = f"{module}.{name}"
        kind = _loaded_class(module, name)
        if kind is not None and issubclass(kind, torch.nn.Module):
            # Before the caller is asked to allow it: its tensors would be out of reach.
            root = next((each[0] for each in [*self.metastack, self.stack] if each), None)
            if isinstance(root, Omitted):  # most likely a module of a class that is not loaded
                raise WholeModule(root.refusal.name, is_all=True)
            is_all = not any(self.metastack) and self.stack in ([], ["module"])
            raise WholeModule(module_name(kind), is_all=is_all)
        is_blocked = module in _weights_only_unpickler._blocklisted_modules
        for known in () if is_blocked else (_METHODS, _known(), _allowed(), STAND_INS):
            if place in known:
                return known[place]
        why = f"its pickle needs {place:.200}, which plain tensors and values do not need"
        refusal = Refusal(why, name="" if is_blocked else place[:200])
        if is_blocked or not self._omits:
            raise refusal
        self._omitted = self._omitted or refusal
        return Omitted(refusal)

    def _load_newobj(self) -> None:
        arguments = self.stack.pop()
        kind = self.stack[-1]
        if isinstance(kind, type) and id(kind) not in _CALLED and _is_in(kind, _allowed()):
            self.stack[-1] = kind.__new__(kind, *arguments)
        else:
            self.stack[-1] = self._called(kind, arguments)

    def _load_reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._called(self.stack[-1], arguments)

    def _called(self, function: Any, arguments: Any) -> Any:
        if type(arguments) is not tuple:
            raise pickle.UnpicklingError("it calls a function without a tuple of arguments")
        self._spend_on(arguments)
        if type(function) is Omitted:
            return Omitted(function.refusal)
        if _is_in(function, _METHODS):
            return function(self, *arguments)
        if id(function) in _CALLED or _is_in(function, _allowed()):
            return function(*arguments)
        raise pickle.UnpicklingError(f"it calls a {type(function).__name__}")

    def _spend_on(self, arguments: tuple[Any, ...]) -> None:
        """Counts what a call may copy."""
        self.spend(len(arguments))
        for each in arguments:
            if isinstance(each, str | bytes | bytearray | list | tuple | dict | set):
                self.spend(len(each))

    def _load_build(self) -> None:
        state: Any = self.stack.pop()
        target: Any = self.stack[-1]
        kind = type(target)
        if kind is Omitted:
            return
        if isinstance(state, tuple):
            self._spend_on(state)
        if kind is torch.Tensor:
            target.set_(*state)
        elif kind is torch.nn.Parameter:
            # Of torch 0.3 and before: without hooks in their second place.
            plain = state if len(state) == 4 else (*state[:2], OrderedDict(), *state[3:])
            target.__setstate__(plain)
        elif kind is OrderedDict:
            if "_metadata" in _checked(state, dict):
                target._metadata = state["_metadata"]
        elif kind in STATEFUL:
            target.__setstate__(state)
        elif _is_in(kind, _allowed()):
            _set_state(target, state)
        else:
            raise pickle.UnpicklingError(f"it sets the state of a {kind.__name__}")

    @staticmethod
    def _check_list(target: object) -> None:
        if type(target) is not Omitted:
            CheckedUnpickler._check_list(target)

    @staticmethod
    def _check_dict(target: object) -> None:
        if type(target) is not Omitted:
            CheckedUnpickler._check_dict(target)

    def _set(self, items: Any = ()) -> set[Any]:
        self.check_keys(_checked(items, list, tuple, set))
        return set(items)

    def _counter(self, items: Any = ()) -> Counter[Any]:
        self.check_keys(_checked(items, dict, tuple))
        return Counter(items)

    def _ordered_dict(self, items: Any = ()) -> OrderedDict[Any, Any]:
        pairs = [_checked(pair, list, tuple) for pair in _checked(items, list, tuple)]
        self.check_keys([key for key, _ in pairs])
        return OrderedDict(pairs)

    def _typed(self, function: Any, kind: Any, arguments: Any, state: Any) -> Any:
        """Leaves out attributes of the tensor, which are not restored."""
        made = self._called(function, arguments)
        return made if type(made) is kind else made.as_subclass(kind)

    def _refuse_opcode(self) -> None:
        raise Refusal(
            f"its pickle is of protocol {self.proto}, and only that of torch.save's default, 2, is "
            "read without being executed"
        )

    def _refuse_number(self) -> None:
        raise Refusal("a number in its pickle has more than 255 bytes")

    dispatch[pickle.LONG4[0]] = _refuse_number
    dispatch[pickle.NEWOBJ[0]] = _load_newobj
    dispatch[pickle.REDUCE[0]] = _load_reduce
    dispatch[pickle.BUILD[0]] = _load_build
    for code in _NEW_OPCODES:
        dispatch[code[0]] = _refuse_opcode


def module_name(kind: type) -> str:
    """Returns the name of a module's class as users write it."""
    if getattr(torch.nn, kind.__qualname__, None) is kind:
        return f"torch.nn.{kind.__qualname__}"
    return f"{kind.__module__}.{kind.__qualname__}"


def _loaded_class(module: str, name: str) -> type | None:
    """Returns a class if its module is imported already; runs no code of it."""
    found = vars(sys.modules[module]).get(name) if module in sys.modules else None
    return found if isinstance(found, type) else None


def _allowed() -> Mapping[str, Any]:
    """Returns what the program allowed by ``torch.serialization.add_safe_globals``."""
    allowed: Mapping[str, Any] = _weights_only_unpickler._get_user_allowed_globals()
    return allowed


def is_allowed(kind: type) -> bool:
    """Whether the program allowed objects of a class."""
    return _is_in(kind, _allowed())


def _is_in(value: object, known: Mapping[str, Any]) -> bool:
    return any(value is each for each in known.values())


def _checked(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise pickle.UnpicklingError(f"it has a {type(value).__name__} in place of items")
    return value


def _set_state(target: Any, state: Any) -> None:
    """Does what ``pickle`` does, for an object of a class that the program allowed."""
    if hasattr(target, "__setstate__"):
        target.__setstate__(state)
        return
    fields, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    vars(target).update(fields or {})
    for name, value in (slots or {}).items():
        setattr(target, name, value)


def _encode(text: str, encoding: str) -> bytes:
    """Stands for ``_codecs.encode``, which pickles of bytes call. Other encodings multiply them."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError("it encodes something else than bytes")
    return text.encode("latin-1")


def _bytearray(content: Any = b"", encoding: str = "latin-1") -> bytearray:
    return bytearray(content if type(content) is bytes else _encode(content, encoding))


def _complex(real: float = 0.0, imaginary: float = 0.0) -> complex:
    return complex(_number(real), _number(imaginary))


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise pickle.UnpicklingError("a complex number is not made of numbers")
    return float(value)


def _layout(name: str) -> Any:
    found = getattr(torch, name.removeprefix("torch."), None) if type(name) is str else None
    if not isinstance(found, torch.layout):
        raise pickle.UnpicklingError("it names no layout of torch")
    return found


def _without_hooks(function: Callable[..., Any], at: int) -> Callable[..., Any]:
    """Returns ``function`` with fresh hooks: a pickle could chain tensors by them."""

    def rebuild(*arguments: Any) -> Any:
        return function(*arguments[:at], OrderedDict(), *arguments[at + 1 :])

    return rebuild


def _parameter(data: Any, requires_grad: Any, hooks: Any = None, state: Any = None) -> Any:
    """Leaves out hooks and attributes, which are not restored."""
    return torch.nn.Parameter(data, requires_grad)


def _sparse_tensor(layout: Any, data: Any) -> Any:
    """Differs from torch's in that no later ``torch.load`` checks the tensor, without its data."""
    if type(layout) is not torch.layout:
        raise pickle.UnpicklingError("it names no layout of torch")
    if layout == torch.sparse_coo:
        indices, values, size, *rest = data
        is_coalesced = rest[0] if rest else None
        return torch.sparse_coo_tensor(
            indices, values, size, check_invariants=False, is_coalesced=is_coalesced
        )
    indices, others, values, size = data
    return torch.sparse_compressed_tensor(
        indices, others, values, size, layout=layout, check_invariants=False
    )


_FUNCTIONS: Final[dict[str, Any]] = {
    "_codecs.encode": _encode,
    "builtins.bytearray": _bytearray,
    "builtins.complex": _complex,
    "torch.Size": torch.Size,
    "torch.device": torch.device,
    "torch.nn.parameter.Parameter": torch.nn.Parameter,
    "torch.serialization._get_layout": _layout,
    "torch._utils._rebuild_tensor": torch._utils._rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _without_hooks(torch._utils._rebuild_tensor_v2, 5),
    "torch._utils._rebuild_tensor_v3": _without_hooks(torch._utils._rebuild_tensor_v3, 5),
    "torch._utils._rebuild_qtensor": _without_hooks(torch._utils._rebuild_qtensor, 6),
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_sparse_tensor": _sparse_tensor,
    "torch._utils._rebuild_meta_tensor_no_storage": (torch._utils._rebuild_meta_tensor_no_storage),
}

_METHODS: Final[dict[str, Any]] = {
    "builtins.set": TorchUnpickler._set,
    "collections.Counter": TorchUnpickler._counter,
    "collections.OrderedDict": TorchUnpickler._ordered_dict,
    "torch._tensor._rebuild_from_type_v2": TorchUnpickler._typed,
}
"""Called with the unpickler, which checks keys and counts."""

_CALLED: Final = frozenset(map(id, (*_FUNCTIONS.values(), *STAND_INS.values())))


@cache
def _known() -> Mapping[str, Any]:
    """Returns the globals by name: functions, and torch's constants and storage types."""
    constants = {
        name: value
        for name, value in _weights_only_unpickler._get_allowed_globals().items()
        if name in ("torch.Tensor", "torch.storage.UntypedStorage") or not callable(value)
    }
    return {**constants, **_FUNCTIONS}
