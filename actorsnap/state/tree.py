# SPDX-License-Identifier: Apache-2.0
"""Flattens state dicts into paths and leaves, and rebuilds them (``docs/format.md``, "Paths").

Pure: it must not know torch, entries or storage. Containers are exactly ``dict``, ``OrderedDict``,
``Counter``, ``defaultdict``, ``list``, ``tuple`` and ``deque``, and records. Leaves are subclasses,
whose type would be lost, dicts with a key without token, defaultdicts with a factory of the
program, and long lists of plain values, whose paths would fill the snapshot.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isnan
from typing import Any, Final, TypeAlias, get_args

from actorsnap.errors import FormatError, UsageError
from actorsnap.format.manifest import MAX_NESTING, ContainerType
from actorsnap.state.records import Rebuild, class_of, fields_of, is_record

Key: TypeAlias = str | int | bool | float | None
_Children: TypeAlias = tuple[list[str], Iterable[object]]

CONTAINER_TYPES: Final[Mapping[type, ContainerType]] = {
    dict: "dict",
    OrderedDict: "ordered_dict",
    Counter: "counter",
    list: "list",
    tuple: "tuple",
    defaultdict: "defaultdict",
    deque: "deque",
}
DICT_TYPES: Final[Mapping[str, Callable[[Any], Any]]] = {
    "dict": dict,
    "ordered_dict": OrderedDict,
    "counter": Counter,
}
FACTORIES: Final[Mapping[str, Callable[[], Any]]] = {
    kind.__name__: kind
    for kind in (
        *(bool, int, float, complex, str, bytes, bytearray),
        *(list, tuple, dict, set, frozenset, deque, OrderedDict, Counter),
    )
}
"""Factories of a defaultdict that is stored."""

AS_RECORDS: Final = Rebuild()
"""Rebuilds no class."""

_KINDS: dict[type, ContainerType | None] = dict(CONTAINER_TYPES)
"""Kinds of the classes that were seen; None for leaves. A call per leaf would take longer."""

_MAX_KINDS = 1024
_LISTS = frozenset({"list", "tuple", "deque"})
_PLAIN_TYPES = frozenset({str, int, bool, float, type(None)})
"""Types of dict keys with tokens, and of items of long lists that are one leaf."""

_MAX_PLAIN_ITEMS = 256
"""Maximum number of plain items that are flattened."""

_ORDINARY = re.compile(r"[0-9]*[A-Za-z_.][A-Za-z0-9_.\-]*").fullmatch
"""Matches keys that are their own token."""
_SPECIAL = re.compile("[%/@\ud800-\udfff]")
_INTEGER = re.compile(r"-?[0-9]+", re.ASCII).fullmatch
_ESCAPED = re.compile(r"%u([0-9a-f]{4})|%([0-9A-F]{2})")
_FIXED_TOKENS: Final[Mapping[str, Key]] = {
    "%": "",
    "%null": None,
    "%true": True,
    "%false": False,
}
_HUGE = 1 << 12_000
"""Bound of integer keys; Python refuses to print much longer ones."""


@dataclass(slots=True, eq=False)
class Container:
    """A container that paths do not imply.

    ``metadata`` is torch's ``_metadata`` of a module's state dict; a deque's ``maxlen``; the name
    of a defaultdict's factory; module and qualified name of a record's class.
    """

    type: ContainerType
    metadata: object = None


def _escape_char(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"%u{code:04x}" if code > 0xFF else f"%{code:02X}"


def _escape_str(key: str) -> str:
    if _ORDINARY(key):
        return key
    if not key:
        return "%"
    if _INTEGER(key):
        return f"%{ord(key[0]):02X}{key[1:]}"
    return _SPECIAL.sub(_escape_char, key)


def escape(key: Key) -> str:
    """Returns the token of a dict key or list index, unique among keys."""
    kind = type(key)
    if kind is str:
        return _escape_str(key)  # type: ignore[arg-type]
    if kind is int:
        return str(key)
    if key is None:
        return "%null"
    if kind is bool:
        return "%true" if key else "%false"
    if kind is float:
        return f"%f{key.hex()}"  # type: ignore[union-attr]
    raise TypeError(f"a key of type {kind.__name__} has no token")


def unescape(token: str) -> Key:
    """Raises ``FormatError`` if no key has this token."""
    if _ORDINARY(token):
        return token
    if token in _FIXED_TOKENS:
        return _FIXED_TOKENS[token]
    key: Key
    try:
        if _INTEGER(token):
            key = int(token)  # Python refuses 4301 digits and more
        elif token.startswith("%f"):
            key = float.fromhex(token[2:])
        else:
            key = _ESCAPED.sub(lambda match: chr(int(match[1] or match[2], 16)), token)
        if token and escape(key) == token:
            return key
    except (ValueError, OverflowError):
        pass
    raise FormatError(key=token, detail="no key has this path component")


def join(*keys: Key) -> str:
    return "/".join([escape(key) for key in keys])


def human(path: str, separator: str = "/") -> str:
    """Returns a path as typed: its keys as text, joined by ``separator``."""
    if "%" not in path:
        return path.replace("/", separator)
    return separator.join([str(unescape(token)) for token in path.split("/")])


def part_path(path: str, part: str) -> str:
    return f"{path}@{part}"


def parent_of(path: str) -> str:
    """Returns the path of the entry that ``path`` is a part of, else ``path``."""
    # An "@" in a key is escaped.
    return path.partition("@")[0]


def kind_of(node: object) -> ContainerType | None:
    """Returns None for a leaf. Further leaves have no child paths."""
    try:
        return _KINDS[type(node)]
    except KeyError:
        return _learn(type(node))


def _learn(kind: type) -> ContainerType | None:
    if len(_KINDS) > _MAX_KINDS:  # classes made by a running program are not kept for ever
        _KINDS.clear()
        _KINDS.update(CONTAINER_TYPES)
    found = _KINDS[kind] = CONTAINER_TYPES.get(kind) or ("record" if is_record(kind) else None)
    return found


def _children(path: str, node: object, kind: ContainerType) -> _Children | None:
    """Returns paths and values; None for a leaf."""
    if kind == "record":
        fields = fields_of(node)
        if fields is None:
            return None
        return [f"{path}/{_escape_str(name)}" for name in fields], fields.values()
    paths = _child_paths(path, node)
    if paths is None:
        return None
    assert isinstance(node, dict | list | tuple | deque)
    return paths, node.values() if isinstance(node, dict) else node


def metadata_of(node: Any, kind: ContainerType) -> object:
    """Returns ``Container.metadata``."""
    match kind:
        case "ordered_dict":
            return getattr(node, "_metadata", None)
        case "deque":
            return node.maxlen
        case "defaultdict":
            return getattr(node.default_factory, "__name__", None)
        case "record":
            return list(class_of(node))
    return None


def has_plain_factory(node: defaultdict[Any, Any]) -> bool:
    factory = node.default_factory
    return factory is None or FACTORIES.get(getattr(factory, "__name__", "")) is factory


def _child_paths(path: str, node: object) -> list[str] | None:
    """Returns None for a leaf."""
    prefix = path + "/"
    if not isinstance(node, dict):
        assert isinstance(node, list | tuple | deque)
        if len(node) > _MAX_PLAIN_ITEMS and _PLAIN_TYPES.issuperset(map(type, node)):
            return None
        return [f"{prefix}{index}" for index in range(len(node))]
    if type(node) is defaultdict and not has_plain_factory(node):
        return None
    kinds = set(map(type, node))
    if kinds == {str}:
        return [prefix + _escape_str(key) for key in node]
    if keys_without_token(node):
        return None
    return [prefix + escape(key) for key in node]


def keys_without_token(node: Mapping[Any, object]) -> list[object]:
    """Returns the keys without a token, which make the dict a leaf."""
    without: list[object] = []
    nans: list[object] = []
    for key in node:
        kind = type(key)
        if kind not in _PLAIN_TYPES or (kind is int and abs(key) >= _HUGE):
            without.append(key)
        elif kind is float and isnan(key):
            nans.append(key)
    # Several NaN keys would share one token.
    return without + nans if len(nans) > 1 else without


def _shown(path: str) -> str:
    return repr(path if len(path) <= 200 else f"{path[:120]}...{path[-70:]}")


def flatten(root: str, value: object) -> tuple[list[str], list[object]]:
    """Returns the paths and leaves of a state, in traversal order; ``root`` is its path.

    Empty containers, and all but plain dicts, precede their children as ``Container``.

    Raises:
        UsageError: A container contains itself, or containers nest deeper than 900.
    """
    paths: list[str] = []
    values: list[object] = []
    # Recursion would hit the program's limit before ours.
    outer: list[tuple[Iterator[tuple[str, object]], int]] = []
    active: set[int] = set()
    kinds = _KINDS
    siblings: Iterator[tuple[str, object]] = iter([(root, value)])
    while True:
        for path, node in siblings:
            try:
                kind = kinds[type(node)]
            except KeyError:
                kind = _learn(type(node))
            if kind is None or (children := _children(path, node, kind)) is None:
                paths.append(path)
                values.append(node)
                continue
            if kind != "dict" or not children[0]:
                paths.append(path)
                values.append(Container(kind, metadata_of(node, kind)))
            if not children[0]:
                continue
            if id(node) in active:
                raise UsageError(
                    f"the {kind} at {_shown(path)} contains itself; a snapshot holds trees. "
                    "Break the cycle, or leave it out of the state dict"
                )
            if len(outer) >= MAX_NESTING:
                raise UsageError(
                    f"containers nest deeper than {MAX_NESTING} at {_shown(path)}; "
                    "use fewer levels, or leave this out of the state dict"
                )
            outer.append((siblings, id(node)))
            active.add(id(node))
            # zip reuses its tuple; a list of pairs would burden the garbage collector.
            siblings = zip(*children, strict=True)
            break
        else:
            if not outer:
                return paths, values
            siblings, done = outer.pop()
            active.discard(done)


@dataclass(slots=True, eq=False)
class _Branch:
    """A container under construction; children are in order of appearance."""

    path: str
    kind: str
    metadata: object = None
    keys: list[Key] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


class Skeleton:
    """Builds containers from paths, and checks them. Containers precede their children."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._branches: dict[str, _Branch] = {}
        self._leaves: set[str] = set()

    def __contains__(self, path: str) -> bool:
        return path in self._leaves or path in self._branches

    def is_leaf(self, path: str) -> bool:
        return path in self._leaves

    def num_items(self, path: str) -> int:
        """Returns 0 if ``path`` is not a container."""
        branch = self._branches.get(path)
        return 0 if branch is None else len(branch.keys)

    def further_keys(self, state: object) -> list[tuple[str, object]]:
        """Returns path and value of each dict key that only ``state`` has.

        Compares common containers, but not the items of lists.
        """
        further: list[tuple[str, object]] = []
        shared = [(self._root, state)]
        for path, node in shared:  # grows
            branch = self._branches.get(path)
            kind = kind_of(node)
            if branch is None or kind is None:
                continue
            is_list = kind in _LISTS
            children = _children(path, node, kind)
            if children is None or is_list != (branch.kind in _LISTS):
                continue
            if (kind == "record" or branch.kind == "record") and (
                metadata_of(node, kind) != branch.metadata
            ):
                continue
            for child, value in zip(*children, strict=True):
                if kind_of(value) is not None and child in self._branches:
                    shared.append((child, value))
                elif not is_list and child not in self:
                    further.append((child, value))
        return further

    def add_leaf(self, path: str) -> None:
        """Adds a leaf, and missing plain dicts above it.

        Raises:
            FormatError: The path cannot be decoded, exists already, or does not fit its containers.
        """
        self._check_new(path)
        if path != self._root:
            self._attach(path)
        elif self._branches:
            raise FormatError(key=path, detail="a leaf has children")
        self._leaves.add(path)

    def add_container(self, path: str, kind: str, metadata: object = None) -> None:
        """Adds a container.

        Raises:
            FormatError: See ``add_leaf``; or the type is unknown.
        """
        self._check_new(path)
        if kind not in get_args(ContainerType):
            raise FormatError(key=path, detail=f"unknown container type {kind!r}")
        if not _is_metadata(kind, metadata):
            raise FormatError(key=path, detail=f"no {kind} has the attributes {metadata!r:.200}")
        self._open(path, kind).metadata = metadata

    def refusals(self, rebuild: Rebuild) -> list[str]:
        """Returns a line per record that cannot be rebuilt."""
        lines = []
        for branch in self._branches.values():
            if branch.kind == "record":
                metadata: Any = branch.metadata
                names = [str(key) for key in branch.keys]
                if why := rebuild.why_not(metadata[0], metadata[1], names):
                    lines.append(f"{branch.path!r} {why}")
        return lines

    def _check_new(self, path: str) -> None:
        if path in self._leaves or path in self._branches:
            raise FormatError(key=path, detail="two entries have this path")

    def _attach(self, path: str) -> None:
        parent, _, token = path.rpartition("/")
        branch = self._branches.get(parent)
        if branch is None:
            branch = self._open(parent, "dict")
        key = token if _ORDINARY(token) else self._decode(path, token)
        if branch.kind in _LISTS and (type(key) is not int or key < 0):
            raise FormatError(key=path, detail=f"a {branch.kind} has no item {token!r}")
        branch.keys.append(key)
        branch.paths.append(path)

    def _open(self, path: str, kind: str) -> _Branch:
        missing = []
        at = path
        while at not in self._branches:
            missing.append(at)
            if at in self._leaves:
                raise FormatError(key=path, detail=f"{_shown(at)} is a leaf and has children")
            if at == self._root:
                break
            # Bounds the quadratic time that prefixes of a long path take.
            if len(missing) > MAX_NESTING or "/" not in at:
                raise FormatError(
                    key=path, detail=f"does not lie below {_shown(self._root)}, or too deep"
                )
            at = at.rpartition("/")[0]
        for at in reversed(missing):
            branch = _Branch(at, kind if at == path else "dict")
            if at != self._root:
                self._attach(at)
            self._branches[at] = branch
        return self._branches[path]

    @staticmethod
    def _decode(path: str, token: str) -> Key:
        try:
            return unescape(token)
        except FormatError as error:
            raise FormatError(key=path, detail=f"{token!r} is not a token of any key") from error

    def build(self, values: Mapping[str, object], rebuild: Rebuild = AS_RECORDS) -> object:
        """Returns the containers, filled with values.

        Leaves without a value are left out, and containers of which all children are.

        Raises:
            UsageError: See ``Rebuild.record``. Names the path.
            FormatError: The children do not fit a container.
        """
        built: dict[str, object] = {}
        # Outer containers were added first.
        for branch in reversed(self._branches.values()):
            keys: list[Key] = []
            children: list[object] = []
            for key, path in zip(branch.keys, branch.paths, strict=True):
                if path in values:
                    children.append(values[path])
                elif path in built:
                    children.append(built.pop(path))
                else:
                    continue
                keys.append(key)
            if keys or not branch.keys or branch.path == self._root:
                built[branch.path] = _build(branch, keys, children, rebuild)
        if self._root in built:
            return built[self._root]
        return values[self._root]


def _is_metadata(kind: str, metadata: Any) -> bool:
    match kind:
        case "deque":
            return metadata is None or (type(metadata) is int and 0 <= metadata <= sys.maxsize)
        case "defaultdict":
            return metadata is None or (type(metadata) is str and metadata in FACTORIES)
        case "record":
            return type(metadata) is list and list(map(type, metadata)) == [str, str]
    return True


def _build(
    branch: _Branch, keys: list[Key], children: list[object], rebuild: Rebuild = AS_RECORDS
) -> object:
    metadata: Any = branch.metadata
    if branch.kind in _LISTS:
        order = sorted(range(len(keys)), key=keys.__getitem__)  # type: ignore[arg-type]
        items = [children[i] for i in order]
        if branch.kind == "deque":
            if metadata is not None and len(items) > metadata:
                detail = f"a deque of at most {metadata} items has {len(items)}"
                raise FormatError(key=branch.path, detail=detail)
            return deque(items, metadata)
        return tuple(items) if branch.kind == "tuple" else items
    held = dict(zip(keys, children, strict=True))
    if branch.kind == "defaultdict":
        return defaultdict(FACTORIES.get(metadata), held)
    if branch.kind == "record":
        try:
            fields = {str(key): value for key, value in held.items()}
            return rebuild.record(metadata[0], metadata[1], fields)
        except UsageError as error:
            raise UsageError(f"{branch.path!r} {error}") from error
    result = DICT_TYPES[branch.kind](held)
    if branch.kind == "ordered_dict" and branch.metadata is not None:
        result._metadata = branch.metadata
    return result


def unflatten(root: str, items: Iterable[tuple[str, object]]) -> object:
    """Rebuilds a flattened state.

    Raises:
        FormatError: The paths do not make a tree.
    """
    skeleton = Skeleton(root)
    values: dict[str, object] = {}
    for path, value in items:
        if isinstance(value, Container):
            skeleton.add_container(path, value.type, value.metadata)
        else:
            skeleton.add_leaf(path)
            values[path] = value
    return skeleton.build(values)
