"""Flattens state dicts into paths and leaves, and rebuilds them (``docs/format.md``, "Paths").

Pure: it must not know torch, entries or storage. Containers are exactly ``dict``, ``OrderedDict``,
``Counter``, ``list`` and ``tuple``. Leaves are subclasses (a namedtuple), whose type would be lost,
dicts with a key without token, and long lists of plain values, whose paths would fill the snapshot.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isnan
from typing import Any, Final, TypeAlias

from actorsnap.errors import FormatError, UsageError
from actorsnap.format.manifest import MAX_NESTING, ContainerType

Key: TypeAlias = str | int | bool | float | None

CONTAINER_TYPES: Final[Mapping[type, ContainerType]] = {
    dict: "dict",
    OrderedDict: "ordered_dict",
    Counter: "counter",
    list: "list",
    tuple: "tuple",
}
DICT_TYPES: Final[Mapping[str, Callable[[Any], Any]]] = {
    name: kind for kind, name in CONTAINER_TYPES.items() if issubclass(kind, dict)
}
_LISTS = frozenset({"list", "tuple"})
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

    ``metadata`` is torch's ``_metadata`` of a module's state dict.
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


def _child_paths(path: str, node: object) -> list[str] | None:
    """Returns None for a leaf."""
    prefix = path + "/"
    if not isinstance(node, dict):
        assert isinstance(node, list | tuple)
        if len(node) > _MAX_PLAIN_ITEMS and _PLAIN_TYPES.issuperset(map(type, node)):
            return None
        return [f"{prefix}{index}" for index in range(len(node))]
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
    siblings: Iterator[tuple[str, object]] = iter([(root, value)])
    while True:
        for path, node in siblings:
            kind = CONTAINER_TYPES.get(type(node))
            children = None if kind is None else _child_paths(path, node)
            if children is None:
                paths.append(path)
                values.append(node)
                continue
            assert kind is not None
            assert isinstance(node, dict | list | tuple)
            metadata = getattr(node, "_metadata", None) if kind == "ordered_dict" else None
            if kind != "dict" or not children:
                paths.append(path)
                values.append(Container(kind, metadata))
            if not children:
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
            siblings = zip(children, node.values() if isinstance(node, dict) else node, strict=True)
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
        """Returns 0 if ``path`` is no container."""
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
            kind = CONTAINER_TYPES.get(type(node))
            if branch is None or kind is None:
                continue
            is_list = kind in _LISTS
            children = _child_paths(path, node)
            if children is None or is_list != (branch.kind in _LISTS):
                continue
            assert isinstance(node, dict | list | tuple)
            values = node.values() if isinstance(node, dict) else node
            for child, value in zip(children, values, strict=True):
                if type(value) in CONTAINER_TYPES and child in self._branches:
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
        if kind not in CONTAINER_TYPES.values():
            raise FormatError(key=path, detail=f"unknown container type {kind!r}")
        self._open(path, kind).metadata = metadata

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
            raise FormatError(key=path, detail=f"{token!r} is no token of any key") from error

    def build(self, values: Mapping[str, object]) -> object:
        """Returns the containers, filled with values.

        Leaves without a value are left out, and containers of which all children are.
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
                built[branch.path] = _build(branch, keys, children)
        if self._root in built:
            return built[self._root]
        return values[self._root]


def _build(branch: _Branch, keys: list[Key], children: list[object]) -> object:
    if branch.kind in _LISTS:
        order = sorted(range(len(keys)), key=keys.__getitem__)  # type: ignore[arg-type]
        items = [children[i] for i in order]
        return tuple(items) if branch.kind == "tuple" else items
    result = DICT_TYPES[branch.kind](dict(zip(keys, children, strict=True)))
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
