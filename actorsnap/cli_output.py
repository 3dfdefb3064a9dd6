"""Rows, trees, JSON, differences and values for the command line.

See ``cli`` for columns and control characters.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import msgspec

from actorsnap.actors.formats import format_of
from actorsnap.errors import FormatError, UsageError
from actorsnap.format.manifest import (
    BytesEntry,
    Commit,
    CompositeEntry,
    ContainerEntry,
    Entry,
    ObjectRecord,
    RankManifest,
    TensorEntry,
    ValueEntry,
    ViewEntry,
    is_same_content,
)
from actorsnap.planning.index import named_entries
from actorsnap.state.objects import Opaque, Refused, decode_inline
from actorsnap.state.tree import flatten, parent_of, unflatten

if TYPE_CHECKING:
    from actorsnap.runtime.verify import VerifyReport

_MAX_VALUE = 60
_MAX_ALIGNED = 60
"""Widest cell that moves the next column, in characters."""

_MANY_RANKS = 8
"""Of more ranks, trees that are alike are printed once."""

_SPOOL_BYTES = 16 << 20

_STEERING = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Escapes terminal control characters except line ends."""
    return _STEERING.sub(lambda m: m[0] if m[0] == "\n" else ascii(m[0])[1:-1], text)


def one_line(text: str) -> str:
    return visible(text).replace("\n", "\\n")


def write_lines(lines: Iterable[str]) -> None:
    sys.stdout.writelines(_ended(lines))


def _ended(lines: Iterable[str]) -> Iterator[str]:
    return (f"{one_line(line)}\n" for line in lines)


def print_columns(rows: Iterable[Sequence[str]]) -> None:
    """Aligns cells on a terminal; else separates them by tabs.

    ``rich.table`` would cut paths at the terminal's width: see decision 0001.
    """
    if not sys.stdout.isatty():
        sys.stdout.writelines("\t".join(map(one_line, row)) + "\n" for row in rows)
        return
    cells = [[one_line(cell) for cell in row] for row in rows]
    widths = [0] * max(map(len, cells), default=0)
    for row in cells:
        for number, cell in enumerate(row[:-1]):
            if len(cell) <= _MAX_ALIGNED:
                widths[number] = max(widths[number], len(cell))
    for row in cells:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        sys.stdout.write(line.rstrip() + "\n")


def print_json(document: object) -> None:
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


class JsonList:
    """Prints a list item by item, as ``print_json`` would."""

    def __init__(self) -> None:
        self._is_empty = True

    def begin(self, before: str = "") -> None:
        self._is_empty = True
        sys.stdout.write(f"{before}[")

    def add(self, item: object, indent: str = "  ") -> None:
        sys.stdout.write("\n" if self._is_empty else ",\n")
        self._is_empty = False
        text = json.dumps(item, indent=2)
        sys.stdout.write(indent + text.replace("\n", f"\n{indent}"))

    def end(self, after: str = "\n", indent: str = "") -> None:
        sys.stdout.write(f"]{after}" if self._is_empty else f"\n{indent}]{after}")


def count_of(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def size_text(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def age_text(seconds: float) -> str:
    for unit, unit_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


@dataclass(slots=True)
class ListedLeaf:
    """An entry with its own path, and the entries that complete it."""

    entry: Entry
    parts: list[Entry] = field(default_factory=list)
    base: Entry | None = None
    """Of a view."""

    @property
    def counts(self) -> bool:
        """It is a leaf of the app state, not a container."""
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
        return {"kind": kind, **_fields(entry, *shown), "nbytes": self.nbytes}


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
    return text if len(text) <= _MAX_VALUE else text[: _MAX_VALUE - 3] + "..."


@dataclass(slots=True)
class Node:
    """A path component."""

    leaf: ListedLeaf | None = None
    children: dict[str, Node] = field(default_factory=dict)
    num_leaves: int = 0
    nbytes: int = 0


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
    if not node.children:
        return "  ".join([name, *(describe(node.leaf) if node.leaf is not None else ())])
    container = None if node.leaf is None else node.leaf.entry
    kind = f"{_container_text(container)}, " if isinstance(container, ContainerEntry) else ""
    return (
        f"{name}  ({kind}{count_of(node.num_leaves, 'leaf', 'leaves')}, {size_text(node.nbytes)})"
    )


class JsonManifests:
    """Prints manifests as one document: all data objects, then the entries rank by rank."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._list = JsonList()
        self._has_begun = False

    def add(self, commit: Commit, objects: DataObjects, manifest: RankManifest) -> None:
        if not self._has_begun:
            self._has_begun = True
            names = ("created", "world_size", "attempt", "fsync", "step", "metadata")
            head = {
                "path": self._path,
                "format_version": commit.version,
                **_fields(commit, *names),
            }
            sys.stdout.write(json.dumps(head, indent=2).removesuffix("\n}"))
            self._list.begin(',\n  "objects": ')
            for record in objects.records:
                self._list.add(msgspec.to_builtins(record), "    ")
            self._list.end("", "  ")
            self._list.begin(',\n  "entries": ')
        for entry in manifest.entries:
            self._list.add({"rank": manifest.rank, **msgspec.to_builtins(entry)}, "    ")

    def end(self) -> None:
        self._list.end("\n}\n", "  ")


def checked_text(report: VerifyReport, *, full: bool) -> list[str]:
    """Returns what a verification without problems has checked, for a line."""
    objects = count_of(report.num_objects, "data object", "data objects")
    if not report.has_checksums:
        what = f"all {size_text(report.nbytes)} of data were read"
        if not full:
            what = "the files have the sizes that their index needs, and no data was read"
        return [objects, f"{what}; this format has no checksums: there is nothing to compare with"]
    return [objects, f"{size_text(report.nbytes)} compared with checksums"] if full else [objects]


def _fields(of: object, *names: str) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names}


class DataObjects:
    """The data objects of all ranks, each once, even if several wrote it."""

    def __init__(self) -> None:
        self._found: dict[str, ObjectRecord] = {}

    def add(self, manifest: RankManifest) -> None:
        for record in manifest.objects:
            before = self._found.get(record.key)
            if before is None:
                self._found[record.key] = record
            elif record.chunks:
                chunks = sorted({*before.chunks, *record.chunks}, key=lambda chunk: chunk.start)
                self._found[record.key] = msgspec.structs.replace(record, chunks=tuple(chunks))

    def clear(self) -> None:
        self._found = {}

    @property
    def records(self) -> Collection[ObjectRecord]:
        return self._found.values()

    @property
    def nbytes(self) -> int:
        return sum(record.size for record in self.records)


def overview(path: str, commit: Commit, objects: DataObjects) -> Iterator[str]:
    total, count = objects.nbytes, len(objects.records)
    yield f"{path}  {size_text(total)} in {count_of(count, 'data object', 'data objects')}"
    stored = sum(size for record in objects.records for _, size in record.stored)
    if stored != total:
        yield f"compressed to {size_text(stored)}, {stored / total:.0%}"
    yield f"created {commit.created}, world size {commit.world_size}, {format_of(commit)}"
    if not commit.fsync:
        yield "written with fsync=False: may not have survived a power loss"
    if commit.step is not None:
        yield f"step {commit.step}"
    if commit.metadata:
        yield f"metadata {json.dumps(commit.metadata, ensure_ascii=False)}"


class Trees:
    """The trees of all ranks, which are printed at the end; many are kept in a file.

    Of many ranks, one whose leaves are those of an earlier rank, at other offsets or with other
    values, is only counted.
    """

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
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
            leaves = count_of(root.num_leaves, "leaf", "leaves")
            self._shown[alike] = rank, f"{leaves}, {size_text(root.nbytes)}"
        if commit.world_size > 1:
            root = Node(children={f"rank {rank}": root})
        self._file.writelines(_ended(draw_tree(root, self._max_depth)))

    def print(self) -> None:
        self._end_run()
        self._file.seek(0)
        shutil.copyfileobj(self._file, sys.stdout)

    def _end_run(self) -> None:
        if self._run is not None:
            first, last, (like, sums) = self._run
            ranks = f"rank {first}" if first == last else f"ranks {first} to {last}, each"
            self._file.writelines(_ended([f"{ranks} like rank {like}  ({sums})"]))
            self._run = None


def _outline_of(entry: Entry) -> tuple[object, ...]:
    """Returns what a tree shows of an entry that is no dense tensor, without values."""
    match entry:
        case BytesEntry():
            return entry.path, entry.type, entry.data.stop - entry.data.start
        case ContainerEntry():
            return entry.path, _container_text(entry)
        case ValueEntry():
            return entry.path, ""
    return entry.path, entry.dtype, entry.shape, type(entry)


def describe_difference(
    path: str, left: Mapping[str, ListedLeaf], right: Mapping[str, ListedLeaf]
) -> list[str] | None:
    if path not in right:
        return [f"- {path}", *describe(left[path])]
    if path not in left:
        return [f"+ {path}", *describe(right[path])]
    was, now = left[path], right[path]
    descriptions = ["  ".join(describe(leaf)) for leaf in (was, now)]
    if descriptions[0] != descriptions[1]:
        return [f"! {path}", " -> ".join(descriptions)]
    if not was.has_values_of(now):
        # Checksums cover the memory that views share.
        is_view = isinstance(was.entry, ViewEntry)
        return [f"~ {path}", *describe(was), f"other values{' in that memory' * is_view}"]
    return None


def snapshot_rows(found: dict[str, Commit | FormatError | None]) -> Iterator[list[str]]:
    for name, commit in found.items():
        if isinstance(commit, Commit):
            step = [] if commit.step is None else [f"step {commit.step}"]
            metadata = [shorten(json.dumps(commit.metadata))] if commit.metadata else []
            yield [name, commit.created, f"world size {commit.world_size}", *step, *metadata]
        elif commit is None:
            yield [name, "unfinished"]
        else:
            yield [name, f"damaged: {commit}"]


def snapshot_json(name: str, commit: Commit | FormatError | None) -> dict[str, Any]:
    if isinstance(commit, Commit):
        fields = _fields(commit, "created", "world_size", "step", "metadata")
        return {"name": name, "state": "committed", **fields}
    if commit is None:
        return {"name": name, "state": "unfinished"}
    return {"name": name, "state": "damaged", "detail": str(commit)}


class _Shortened:
    """Prints as the beginning of long bytes."""

    def __init__(self, value: bytes | bytearray) -> None:
        self._text = f"{value[: _MAX_VALUE // 4]!r}... ({size_text(len(value))})"

    def __repr__(self) -> str:
        return self._text


def _shorten_bytes(value: object) -> object:
    is_long = isinstance(value, bytes | bytearray) and len(value) > _MAX_VALUE
    return _Shortened(value) if is_long else value  # type: ignore[arg-type]


def value_text(value: Any) -> str:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    paths, leaves = flatten("v", value)
    value = unflatten("v", zip(paths, map(_shorten_bytes, leaves), strict=True))
    try:
        return repr(value)
    except (NotImplementedError, RuntimeError) as error:  # some dtypes of torch
        raise UsageError(f"the value cannot be printed; use --raw: {error}") from error


def raw_bytes(value: Any) -> bytes:
    match value:
        case bytes() | bytearray():
            return bytes(value)
        case str():
            return value.encode("utf-8", "surrogatepass")
    from actorsnap.state.tensors import bytes_of  # torch

    try:
        return bytes(bytes_of(value))
    except Exception as error:
        what = f"a value of type {type(value).__name__}"
        raise UsageError(f"{what} has no raw bytes; leave out --raw") from error
