# SPDX-License-Identifier: Apache-2.0
"""The leaves of a snapshot, and the tree that they form, as people read them."""

from __future__ import annotations

import html
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Self

from actorsnap.errors import UsageError
from actorsnap.format.manifest import (
    BytesEntry,
    Commit,
    CompositeEntry,
    ContainerEntry,
    Entry,
    RankManifest,
    TensorEntry,
    ValueEntry,
    ViewEntry,
    is_same_content,
)
from actorsnap.planning.index import named_entries
from actorsnap.runtime.host import Script
from actorsnap.runtime.reading import each_manifest
from actorsnap.runtime.source import Source, Written
from actorsnap.runtime.texts import count_of, one_line, preformatted, size_text
from actorsnap.state.objects import Opaque, Refused, decode_inline
from actorsnap.state.tree import parent_of, unescape

MAX_VALUE = 60
"""Longest value that is shown whole, in characters."""

_MIN_ALIKE = 4
"""Groups next to each other that are shown once, if they hold the same leaves."""

_MANY_RANKS = 8
"""Number of ranks above which equal trees are shown once."""

_SPOOL_BYTES = 16 << 20


@dataclass(slots=True)
class ListedLeaf:
    """An entry with its own path, and the entries that complete it."""

    entry: Entry
    parts: list[Entry] = field(default_factory=list)
    base: Entry | None = None
    """Base of a view."""

    @property
    def counts(self) -> bool:
        """Whether this is a leaf of the app state, not a container."""
        return not isinstance(self.entry, ContainerEntry)

    @property
    def nbytes(self) -> int:
        return sum(
            entry.data.stop - entry.data.start
            for entry in (self.entry, *self.parts)
            if isinstance(entry, TensorEntry | BytesEntry)
        )

    def has_values_of(self, other: ListedLeaf) -> bool:
        """The values are equal (up to CRC32C's collisions)."""
        ours, theirs = self._content(), other._content()
        return len(ours) == len(theirs) and all(map(_is_same, ours, theirs))

    def _content(self) -> list[Entry]:
        entries = [self.entry, *self.parts]
        if self.base is not None and self.base not in self.parts:
            entries.append(self.base)
        return entries

    def as_json(self) -> dict[str, Any]:
        entry = self.entry
        shown = [n for n in ("type", "dtype", "shape", "value") if n in entry.__struct_fields__]
        kind = type(entry).__struct_config__.tag
        fields: dict[str, Any] = {name: getattr(entry, name) for name in shown}
        return {"kind": kind, **fields, "nbytes": self.nbytes}


def _is_same(ours: Entry, theirs: Entry) -> bool:
    if isinstance(ours, TensorEntry | BytesEntry) and isinstance(theirs, TensorEntry | BytesEntry):
        return is_same_content(ours.data, theirs.data)
    return ours == theirs


def leaves_of(manifest: RankManifest) -> dict[str, ListedLeaf]:
    """Returns containers and leaves by ``<rank>/<path>``, in order."""
    leaves: dict[str, ListedLeaf] = {}
    rank = manifest.rank
    by_name = named_entries(manifest)
    for name, entry in by_name.items():
        if parent_of(entry.path) == entry.path:
            base = by_name[entry.of] if isinstance(entry, ViewEntry) else None
            leaves[f"{rank}/{name}"] = ListedLeaf(entry, base=base)
    for entry in manifest.entries:
        parent = parent_of(entry.path)
        if parent != entry.path:
            leaves[f"{rank}/{parent}"].parts.append(entry)
    return leaves


def describe(leaf: ListedLeaf) -> list[str]:
    """Returns columns: the type, and size or kin."""
    entry = leaf.entry
    match entry:
        case TensorEntry() | ViewEntry() | CompositeEntry():
            cells = [f"{entry.dtype}[{', '.join(map(str, entry.shape))}]"]
            if not isinstance(entry, ViewEntry) or leaf.parts:
                cells.append(size_text(leaf.nbytes))
            if isinstance(entry, TensorEntry) and entry.offsets is not None:
                cells.append(f"at {entry.offsets} of {entry.global_shape}")
            elif isinstance(entry, ViewEntry):
                cells.append(f"view of {entry.of}")
            elif isinstance(entry, CompositeEntry):
                cells.append(entry.layout)
            return cells
        case BytesEntry():
            return [entry.type, size_text(leaf.nbytes)]
        case ValueEntry():
            return [shorten(_value_text(entry))]
        case ContainerEntry():
            return [_container_text(entry)]
    raise AssertionError(entry)


def _container_text(entry: ContainerEntry) -> str:
    if entry.type == "record":
        return ".".join(map(str, decode_inline(entry.attributes, entry.path)))
    return entry.type


def _value_text(entry: ValueEntry) -> str:
    if isinstance(entry.value, Refused):
        return "refused"
    if isinstance(entry.value, dict | list | Opaque):  # not JSON
        return repr(decode_inline(entry.value, entry.path))
    return json.dumps(entry.value, ensure_ascii=False)


def shorten(text: str) -> str:
    return text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 3] + "..."


@dataclass(slots=True, eq=False)
class Node:
    """A path component.

    Attributes:
        text: Shown instead of what the node is.
    """

    leaf: ListedLeaf | None = None
    children: dict[str, Node] = field(default_factory=dict)
    num_leaves: int = 0
    nbytes: int = 0
    text: str = ""

    @property
    def is_value(self) -> bool:
        return self.leaf is not None and isinstance(self.leaf.entry, ValueEntry)


def tree_of(leaves: Mapping[str, ListedLeaf]) -> Node:
    root = Node()
    for path, leaf in leaves.items():
        node = root
        line = [root]
        for name in path.split("/")[1:]:
            node = node.children.setdefault(name, Node())
            line.append(node)
        node.leaf = leaf
        nbytes = leaf.nbytes
        for node in line:
            node.num_leaves += leaf.counts
            node.nbytes += nbytes
    return root


def fold(root: Node) -> None:
    """Shortens lists of values and groups of similar leaves, which optimizers have many of.

    A list or tuple of plain values becomes one line. Of ``_MIN_ALIKE`` or more groups next to each
    other that hold leaves of the same names and kinds (in any shape), the first stays. One line
    counts the others, and notes whether their sizes differ.
    """
    nodes = [root]
    for node in nodes:  # grows: parents come before children
        nodes.extend(node.children.values())
    kinds: dict[Node, int] = {}
    for node in reversed(nodes):
        _fold_values(node)
        _fold_groups(node, kinds)
        kinds[node] = _kind_of(node, kinds)


def _fold_values(node: Node) -> None:
    entry = None if node.leaf is None else node.leaf.entry
    if not isinstance(entry, ContainerEntry) or entry.type not in ("list", "tuple"):
        return
    if node.children and all(child.is_value for child in node.children.values()):
        shown = islice(node.children.values(), MAX_VALUE)  # of more, the text is cut anyway
        values = ", ".join([" ".join(describe(child.leaf)) for child in shown if child.leaf])
        first, last = "[]" if entry.type == "list" else "()"
        comma = "," if entry.type == "tuple" and len(node.children) == 1 else ""
        node.text = f"{first}{values}{comma}{last}"
        if len(node.text) > MAX_VALUE:
            leaves = count_of(node.num_leaves, "leaf", "leaves")
            node.text = f"{shorten(node.text)}  ({entry.type}, {leaves})"
        node.children = {}


def _fold_groups(node: Node, kinds: Mapping[Node, int]) -> None:
    runs: list[list[str]] = []
    for name, child in node.children.items():
        if runs and child.children and _are_alike(child, node.children[runs[-1][0]], kinds):
            runs[-1].append(name)
        else:
            runs.append([name])
    if all(len(names) < _MIN_ALIKE for names in runs):
        return
    folded: dict[str, Node] = {}
    for names in runs:
        shown = names if len(names) < _MIN_ALIKE else names[:1]
        folded |= {name: node.children[name] for name in shown}
        if others := [node.children[name] for name in names[len(shown) :]]:
            rest = Node(
                num_leaves=sum(other.num_leaves for other in others),
                nbytes=sum(other.nbytes for other in others),
            )
            differ = any(other.nbytes != node.children[names[0]].nbytes for other in others)
            sizes = ", of other sizes" if differ else ""
            rest.text = f"({len(others)} like {names[0]}{sizes}, {_sums(rest)})"
            folded[f"{names[1]} ... {names[-1]}"] = rest
    node.children = folded


def _are_alike(node: Node, other: Node, kinds: Mapping[Node, int]) -> bool:
    return bool(other.children) and kinds[node] == kinds[other]


def _kind_of(node: Node, kinds: Mapping[Node, int]) -> int:
    """Returns a number that nodes with the same names and kinds of leaves below share."""
    entry = None if node.leaf is None else node.leaf.entry
    kind: tuple[object, ...] = (type(entry), getattr(entry, "type", None))
    if isinstance(entry, TensorEntry | ViewEntry | CompositeEntry):
        kind = (type(entry), entry.dtype)
    # Of a rest, the leaves differ by number only.
    below = [(name, kinds.get(child, 0)) for name, child in node.children.items()]
    return hash((kind, tuple(below)))


def _sums(node: Node) -> str:
    return f"{count_of(node.num_leaves, 'leaf', 'leaves')}, {size_text(node.nbytes)}"


def draw_tree(root: Node, max_depth: int) -> Iterator[str]:
    # No recursion: states may nest as deeply as Python's limit.
    levels = [iter(root.children.items())]
    left = [len(root.children)]
    while levels:
        found = next(levels[-1], None)
        if found is None:
            levels.pop()
            left.pop()
            continue
        left[-1] -= 1
        indent = "".join("│   " if more else "    " for more in left[:-1])
        yield f"{indent}{'├── ' if left[-1] else '└── '}{_label(*found)}"
        if len(levels) < max_depth:
            levels.append(iter(found[1].children.items()))
            left.append(len(found[1].children))


def _label(name: str, node: Node) -> str:
    if node.text:
        return f"{name}  {node.text}"
    if not node.children:
        return "  ".join([name, *(describe(node.leaf) if node.leaf is not None else ())])
    container = None if node.leaf is None else node.leaf.entry
    kind = f"{_container_text(container)}, " if isinstance(container, ContainerEntry) else ""
    return f"{name}  ({kind}{_sums(node)})"


class Trees:
    """The trees of all ranks, drawn; many are kept in a file.

    Args:
        max_depth: None: all levels.
        is_folded: See ``fold``.

    With many ranks, a rank is only counted if an earlier one has the same leaves, perhaps at other
    offsets or with other values.
    """

    def __init__(self, max_depth: int | None = None, *, is_folded: bool = True) -> None:
        self._max_depth = max_depth or sys.maxsize
        self._is_folded = is_folded
        self._shown: dict[int, tuple[int, str]] = {}
        self._run: tuple[int, int, tuple[int, str]] | None = None
        self._file = tempfile.SpooledTemporaryFile(_SPOOL_BYTES, "w+", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def clear(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._shown, self._run = {}, None

    def add(self, commit: Commit, manifest: RankManifest) -> None:
        rank = manifest.rank
        alike = 0
        if commit.world_size > _MANY_RANKS:
            alike = hash(
                tuple(
                    [
                        (entry.path, entry.dtype, entry.shape)
                        if type(entry) is TensorEntry  # most: without a call
                        else _outline_of(entry)
                        for entry in manifest.entries
                    ]
                )
            )
            if (like := self._shown.get(alike)) is not None:
                if self._run is not None and self._run[2] == like:
                    self._run = (self._run[0], rank, like)
                else:
                    self._end_run()
                    self._run = (rank, rank, like)
                return
        self._end_run()
        root = tree_of(leaves_of(manifest))
        if alike:
            self._shown[alike] = rank, _sums(root)
        if self._is_folded:
            fold(root)
        if commit.world_size > 1:
            root = Node(children={f"rank {rank}": root})
        self._write(draw_tree(root, self._max_depth))

    def lines(self) -> Iterator[str]:
        """Yields lines with their ends, without control characters."""
        self._end_run()
        self._file.seek(0)
        yield from self._file

    def _write(self, lines: Iterable[str]) -> None:
        self._file.writelines(f"{one_line(line)}\n" for line in lines)

    def _end_run(self) -> None:
        if self._run is not None:
            first, last, (like, sums) = self._run
            ranks = f"rank {first}" if first == last else f"ranks {first} to {last}, each"
            self._write([f"{ranks} like rank {like}  ({sums})"])
            self._run = None


def _outline_of(entry: Entry) -> tuple[object, ...]:
    """Returns what a tree shows of an entry that is not a dense tensor, without values."""
    match entry:
        case BytesEntry():
            return entry.path, entry.type, entry.data.stop - entry.data.start
        case ContainerEntry():
            return entry.path, _container_text(entry)
        case ValueEntry():
            return entry.path, ""
    return entry.path, entry.dtype, entry.shape, type(entry)


class SnapshotTree:
    """A drawing of a snapshot's contents: ``print`` it, or show it in a notebook."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return preformatted(self._text)


def draw(source: Source, *, depth: int | None, rank: int | None) -> Script[SnapshotTree]:
    """Draws the trees of all ranks, or of one.

    Raises:
        UsageError: A bad argument, or no such rank.
    """
    for name, value, least in (("depth", depth, 1), ("rank", rank, 0)):
        if value is not None and (type(value) is not int or value < least):
            raise UsageError(f"{name} must be an int of at least {least}, not {value!r}")
    contents: dict[str, int] = {}
    with Trees(depth) as trees:

        def add(commit: Commit, manifest: RankManifest) -> None:
            if manifest.rank == (rank or 0):  # also of a snapshot that has replaced another one
                trees.clear()
                contents.clear()
            trees.add(commit, manifest)
            _add_sizes(manifest, contents)

        commit = yield from each_manifest(source, add, rank=rank)
        if rank is None:
            source.note(commit, contents=contents)
        return SnapshotTree("".join(trees.lines()).removesuffix("\n"))


def _add_sizes(manifest: RankManifest, contents: dict[str, int]) -> None:
    """Adds the bytes of a manifest's entries by top-level key, as in paths."""
    for entry in manifest.entries:
        key = entry.path.partition("/")[0].partition("@")[0]
        nbytes = 0
        if isinstance(entry, TensorEntry | BytesEntry):
            nbytes = entry.data.stop - entry.data.start
        contents[key] = contents.get(key, 0) + nbytes


def table_of(source: Source, call: str) -> str:
    """Returns an HTML table of what earlier calls have read or written; reads nothing.

    Args:
        call: The call that reads the contents, for the user.
    """
    commit, nbytes = source.seen
    rows = {"path": source.location.display_url}
    if commit is None and source.written is not None:
        is_packed = source.options.compression is not None
        rows |= _written_rows(source.written, is_packed=is_packed)
    elif commit is None:
        rows["contents"] = f"not read yet: {call}"
    else:
        rows |= {"created": commit.created, "world size": str(commit.world_size)}
        if commit.step is not None:
            rows["step"] = str(commit.step)
        if nbytes is not None:
            rows["size"] = size_text(nbytes)
        if commit.metadata:
            rows["metadata"] = json.dumps(commit.metadata, ensure_ascii=False)
        contents = source.seen_contents
        if contents is None:
            rows["contents"] = f"not read yet: {call}"
        else:
            named = [(str(unescape(key)), size_text(n)) for key, n in sorted(contents.items())]
            rows["keys"] = ", ".join([f"{key} ({size})" for key, size in named])
    cells = [
        f"<tr><th>{name}</th><td>{html.escape(one_line(text))}</td></tr>"
        for name, text in rows.items()
    ]
    return f"<table>{''.join(cells)}</table>"


def _written_rows(written: Written, *, is_packed: bool) -> dict[str, str]:
    rows = {"world size": str(written.world_size)}
    if written.step is not None:
        rows["step"] = str(written.step)
    if written.nbytes:
        # Not "size", as of a handle that has read: that includes the index.
        before = " before compression" if is_packed else ""
        rows["data"] = f"{size_text(written.nbytes)}{before}"
    if written.keys:
        rows["keys"] = ", ".join(written.keys)
    if written.metadata:
        rows["metadata"] = json.dumps(written.metadata, ensure_ascii=False)
    return rows
