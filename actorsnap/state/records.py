# SPDX-License-Identifier: Apache-2.0
"""Instances of dataclasses, namedtuples and enums as named records (``docs/format.md``, "Records").

A record names its class; it is rebuilt only for a class that the caller has allowed. Nothing here
imports a module or looks up a name. It must not know paths, entries or torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, Flag
from typing import Any, Final

from actorsnap.errors import UsageError, call_user_code, text_of

_BUILTIN_BASES: Final = (
    *(dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float, complex),
    BaseException,
)
_OWN_STATES: Final = ("state_dict", "__torch_function__", "__array__")
"""Attributes of classes that have more than their fields: modules, tensors, arrays."""

_ABSENT: Final[Any] = object()


@dataclass(frozen=True)
class NamedRecord:
    """A stored dataclass instance, namedtuple or enum member, without its class.

    ``Snapshot.read_object`` and ``get_state_dict_for_key`` return it for classes that are not in
    ``Options.allowed_types``. Saving a ``NamedRecord`` stores the same record again.

    Attributes:
        module: Module of the class.
        qualname: Qualified name of the class.
        fields: Values by name, in order. An enum member has ``name`` and, if its value is a plain
            one, ``value``. A flag has only ``value``.
    """

    module: str
    qualname: str
    fields: Mapping[str, Any]

    def __hash__(self) -> int:
        return hash((self.module, self.qualname, *self.fields))

    def __repr__(self) -> str:
        fields = ", ".join([f"{name}={value!r}" for name, value in self.fields.items()])
        return f"<{class_name(self.module, self.qualname)}({fields})>"


def is_record(kind: type) -> bool:
    """Whether instances are their fields, which may be any leaves or containers."""
    if issubclass(kind, Enum):
        return False
    return _is_namedtuple(kind) or (
        dataclasses.is_dataclass(kind)
        and not issubclass(kind, _BUILTIN_BASES)
        and not any([hasattr(kind, name) for name in _OWN_STATES])
    )


def _is_namedtuple(kind: type) -> bool:
    names = getattr(kind, "_fields", None)
    return (
        issubclass(kind, tuple)
        and type(names) is tuple
        and all([type(name) is str for name in names])
        and callable(getattr(kind, "_make", None))
    )


def class_of(value: object) -> tuple[str, str]:
    """Returns module and qualified name of a record's class."""
    if type(value) is NamedRecord:
        return value.module, value.qualname
    return type(value).__module__, type(value).__qualname__


def class_name(module: str, qualname: str) -> str:
    """Returns a printable name, without control characters that a snapshot may contain."""
    return repr(f"{module}.{qualname}")[1:-1]


def fields_of(value: object) -> dict[str, Any] | None:
    """Returns the fields of a record; None if one has no value."""
    kind: Any = type(value)
    if kind is NamedRecord:
        return dict(value.fields)  # type: ignore[attr-defined]
    if isinstance(value, tuple):
        names: Sequence[str] = kind._fields
        return dict(zip(names, value, strict=True)) if len(names) == len(value) else None
    names = [each.name for each in dataclasses.fields(kind)]
    found = {name: getattr(value, name, _ABSENT) for name in names}
    return None if any([held is _ABSENT for held in found.values()]) else found


def fields_of_member(member: Enum) -> dict[str, Any]:
    """Returns the fields of an enum member: its name, and the value if it is a plain one."""
    value = member._value_
    if isinstance(member, Flag):
        return {"value": int(value)}
    fields: dict[str, Any] = {"name": member._name_}
    if type(value) in (int, float, bool) or (type(value) is str and len(value) <= 256):
        fields["value"] = value
    return fields


@dataclass(frozen=True, slots=True)
class Rebuild:
    """How a restore rebuilds records.

    Attributes:
        types: The allowed classes, by module and qualified name.
        is_strict: Refuse a record of another class; False: it stays a ``NamedRecord``.
    """

    types: Mapping[tuple[str, str], type] = field(default_factory=dict)
    is_strict: bool = False

    @classmethod
    def of(cls, types: Iterable[type], *, is_strict: bool) -> Rebuild:
        return cls({(kind.__module__, kind.__qualname__): kind for kind in types}, is_strict)

    def why_not(self, module: str, qualname: str, names: Iterable[str]) -> str | None:
        """Returns why a record with these fields cannot be rebuilt, or None if it can."""
        kind: Any = self.types.get((module, qualname))
        if kind is None:
            if not self.is_strict:
                return None
            return f"is a {class_name(module, qualname)}, which is not in allowed_types"
        names = set(names)
        if issubclass(kind, Enum):
            known, needed = {"name", "value"}, {"value" if issubclass(kind, Flag) else "name"}
        elif issubclass(kind, tuple):
            known = set(kind._fields)
            needed = known - set(kind._field_defaults)
        else:
            parts = dataclasses.fields(kind)
            known = {part.name for part in parts}
            needed = {
                part.name
                for part in parts
                if part.init
                and part.default is dataclasses.MISSING
                and part.default_factory is dataclasses.MISSING
            }
        told = []
        if further := sorted(names - known):
            remedy = f"add {'them' if len(further) > 1 else 'it'} back"
            told.append(f"no longer has {_listed(further)}: {remedy}")
        if lacking := sorted(needed - names):
            has = "have" if len(lacking) > 1 else "has"
            remedy = f"make {'them' if len(lacking) > 1 else 'it'} optional"
            told.append(f"needs {_listed(lacking)}, which {has} no saved value: {remedy}")
        if not told:
            return None
        return f"is a {class_name(module, qualname)}, which {', and '.join(told)}"

    def record(self, module: Any, qualname: Any, fields: dict[str, Any]) -> object:
        """Returns an instance of an allowed class, else a ``NamedRecord``.

        Fields of a dataclass have the saved values afterwards, whatever its constructor does.

        Raises:
            UsageError: The class is not allowed, has other fields, or its constructor raised.
            ValueError: It is not a record.
        """
        if type(module) is not str or type(qualname) is not str:
            raise ValueError("a record names its class by two strings")
        why = self.why_not(module, qualname, fields)
        kind: Any = self.types.get((module, qualname))
        if why is not None:
            raise UsageError(f"{why}. {HINT}" if kind is None else f"{why}, or {FIELDS_HINT}")
        if kind is None:
            return NamedRecord(module, qualname, fields)
        try:
            return call_user_code(_instance, kind, fields)
        except Exception as error:
            text = f"{type(error).__name__}: {text_of(error)}"
            raise UsageError(
                f"is a {class_name(module, qualname)}, which cannot be rebuilt from the saved "
                f"fields ({text})"
            ) from error


HINT: Final = (
    "Pass the classes in options=Options(allowed_types=[...]); read_object shows the fields "
    "without them"
)


FIELDS_HINT: Final = "read the saved fields with read_object, without allowed_types"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join([repr(name) for name in names[:5]])
    return f"the field{'s' if len(names) > 1 else ''} {shown}{', ...' if len(names) > 5 else ''}"


def _instance(kind: Any, fields: dict[str, Any]) -> object:
    if issubclass(kind, Enum):
        return _member(kind, fields)
    if issubclass(kind, tuple):
        values = {**kind._field_defaults, **fields}
        return tuple.__new__(kind, [values[name] for name in kind._fields])
    parts = [part for part in dataclasses.fields(kind) if part.name in fields]
    value = kind(**{part.name: fields[part.name] for part in parts if part.init})
    if type(value) is not kind:
        raise TypeError(f"the constructor returned a {type(value).__qualname__}")
    for part in parts:
        if getattr(value, part.name, _ABSENT) is not fields[part.name]:
            object.__setattr__(value, part.name, fields[part.name])  # it may be frozen
    return value


def _member(kind: type[Enum], fields: dict[str, Any]) -> Enum:
    if issubclass(kind, Flag):
        flag = kind(fields["value"])
        if type(flag) is not kind or flag._value_ != fields["value"]:
            raise ValueError(f"there is no {kind.__qualname__} of value {fields['value']!r:.80}")
        return flag
    name = fields["name"]
    member = kind.__members__.get(name) if type(name) is str else None
    if member is None:
        raise ValueError(f"there is no {kind.__qualname__} named {name!r:.80}")
    return member
