# SPDX-License-Identifier: Apache-2.0
"""Rows, trees, JSON, differences and values for the command line.

See ``cli`` for columns and control characters.
"""

from __future__ import annotations

import base64
import json
import math
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from actorsnap.actors.formats import format_of
from actorsnap.errors import FormatError, StorageError, UnsupportedFormat, UsageError
from actorsnap.format.manifest import Commit, ObjectRecord, RankManifest, ViewEntry
from actorsnap.runtime.outline import MAX_VALUE, ListedLeaf, shorten
from actorsnap.runtime.outline import Trees as Trees
from actorsnap.runtime.outline import describe as describe
from actorsnap.runtime.outline import leaves_of as leaves_of
from actorsnap.runtime.texts import age_text as age_text
from actorsnap.runtime.texts import count_of as count_of
from actorsnap.runtime.texts import one_line as one_line
from actorsnap.runtime.texts import size_text as size_text
from actorsnap.runtime.texts import visible as visible
from actorsnap.state.tree import flatten, unflatten

if TYPE_CHECKING:
    from actorsnap.runtime.verify import VerifyReport

_UNFINISHED = "no commit object: a save is in progress, did not end, or lost its commit object"

_MAX_ALIGNED = 60
"""Widest cell that moves the next column, in characters."""


def write_lines(lines: Iterable[str]) -> None:
    sys.stdout.writelines(_ended(lines))


def _ended(lines: Iterable[str]) -> Iterator[str]:
    return (f"{one_line(line)}\n" for line in lines)


def print_columns(rows: Iterable[Sequence[str]]) -> None:
    """Prints rows: aligned on a terminal, otherwise separated by tabs.

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
    """Returns the parts of a line that describes a verification without problems."""
    objects = count_of(report.num_objects, "data object", "data objects")
    if not report.has_checksums:
        what = f"all {size_text(report.nbytes)} of data were read"
        if not full:
            what = "the files have the sizes that their index needs, and no data was read"
        return [objects, f"{what}; this format has no checksums: there is nothing to compare with"]
    return [objects, f"{size_text(report.nbytes)} compared with checksums"] if full else [objects]


def report_json(report: VerifyReport) -> dict[str, Any]:
    """Returns the numbers of a verification for ``print_json``."""
    return _fields(report, "level", "has_checksums", "num_objects", "nbytes")


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


def difference_json(row: Sequence[str]) -> dict[str, Any]:
    """Returns a row of ``describe_difference`` for ``print_json``."""
    sign, _, path = row[0].partition(" ")
    change = {"-": "only in A", "+": "only in B", "!": "other shape or type", "~": "other values"}
    return {"path": path, "change": change[sign], "detail": " ".join(row[1:])}


def snapshot_rows(
    found: Mapping[str, Commit | FormatError | StorageError | None], sizes: Mapping[str, int]
) -> Iterator[list[str]]:
    """Yields columns: name, age, size, then the state or the description of the snapshot."""
    now_s = time.time()
    for name, commit in found.items():
        size = size_text(sizes[name]) if name in sizes else "-"
        if isinstance(commit, Commit):
            age = "-"
            with suppress(FormatError):  # of the time only
                age = f"{age_text(now_s - commit.created_at().timestamp())} old"
            step = [] if commit.step is None else [f"step {commit.step}"]
            metadata = [shorten(json.dumps(commit.metadata))] if commit.metadata else []
            yield [name, age, size, f"world size {commit.world_size}", *step, *metadata]
        else:
            state = state_of(commit)
            yield [name, "-", size, state if commit is None else f"{state}: {commit}"]


def snapshot_json(
    name: str, commit: Commit | FormatError | StorageError | None, nbytes: int | None
) -> dict[str, Any]:
    sized = {"name": name, "nbytes": nbytes}
    if isinstance(commit, Commit):
        fields = _fields(commit, "created", "world_size", "step", "metadata")
        return {**sized, "state": "committed", **fields}
    detail = _UNFINISHED if commit is None else str(commit)
    return {**sized, "state": state_of(commit), "detail": detail}


def state_of(commit: FormatError | StorageError | None) -> str:
    """Returns the state of a folder that is not a readable snapshot."""
    if commit is None:
        return "unfinished"
    if isinstance(commit, StorageError):
        return "not readable"
    return "newer format" if isinstance(commit, UnsupportedFormat) else "damaged"


class _Shortened:
    """Prints as the beginning of long bytes."""

    def __init__(self, value: bytes | bytearray) -> None:
        self._text = f"{value[: MAX_VALUE // 4]!r}... ({size_text(len(value))})"

    def __repr__(self) -> str:
        return self._text


def _shorten_bytes(value: object) -> object:
    is_long = isinstance(value, bytes | bytearray) and len(value) > MAX_VALUE
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


def value_json(value: Any) -> Any:
    """Returns a value for ``print_json``: numbers that JSON lacks as text, bytes in base64.

    Raises:
        UsageError: The value cannot be shown.
    """
    match value:
        case float() if not math.isfinite(value):
            return repr(value)
        case None | bool() | int() | float() | str():
            return value
        case bytes() | bytearray():
            return {"base64": base64.b64encode(value).decode()}
        case dict():
            return {str(key): value_json(each) for key, each in value.items()}
        case list() | tuple():
            return [value_json(each) for each in value]
    try:
        dense = value.to_dense() if getattr(value, "is_sparse", False) else value
        if hasattr(dense, "tolist") and hasattr(dense, "dtype"):
            dtype = str(dense.dtype).removeprefix("torch.")
            items = value_json(dense.tolist())
            return {"dtype": dtype, "shape": list(dense.shape), "data": items}
    except (NotImplementedError, RuntimeError, RecursionError) as error:
        raise UsageError(f"the value cannot be printed; use --raw: {error}") from error
    return {"type": type(value).__name__, "text": value_text(value)}


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
