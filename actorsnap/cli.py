"""The command line: inspects, checks, compares, prints, copies, recovers and deletes snapshots.

Output goes to stdout, progress and errors to stderr. On a terminal columns are aligned; in a pipe
they are separated by tabs. Terminal control characters are escaped. Exit codes, for scripts:

    0    done; verify: intact; diff: equal
    1    verify, recover: damaged; diff: different; rm: not confirmed, or complete attempts kept
    2    bad usage, or no such object in the snapshot
    3    no committed snapshot; rm --garbage: and no garbage
    4    the storage failed or refused; or the snapshot is damaged (except for verify), or needs a
         newer release or a package that is not installed
    130  interrupted
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.markup import escape as quote
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from actorsnap.errors import (
    ActorSnapError,
    ChecksumMismatch,
    FormatError,
    IncompatibleState,
    NotASnapshot,
    UnsupportedFormat,
    UsageError,
)
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
from actorsnap.options import Options, from_env
from actorsnap.planning.index import named_entries
from actorsnap.release import RELEASE
from actorsnap.runtime import maintenance, reading, timeline, tracefile, validation
from actorsnap.runtime import recover as recovery
from actorsnap.runtime import verify as verification
from actorsnap.runtime.copy import CopyEvent, CopyEventKind
from actorsnap.runtime.host import Script
from actorsnap.runtime.script import run_sync
from actorsnap.runtime.source import Source
from actorsnap.runtime.verify import VerifyReport
from actorsnap.state.objects import decode_inline
from actorsnap.state.tensors import bytes_of
from actorsnap.state.tree import flatten, parent_of, unflatten
from actorsnap.sync import Snapshot

__all__ = ["main"]

T = TypeVar("T")

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Look at, check, compare, copy, recover and delete actorsnap snapshots.",
    pretty_exceptions_enable=False,
)

err = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)

JsonOption = Annotated[bool, typer.Option("--json", help="For scripts.")]
PathArgument = Annotated[str, typer.Argument(help="A snapshot's path or URL.")]
StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="KEY=VALUE",
        help="Option for the storage's backend; may be repeated. JSON values are parsed.",
    ),
]

_MAX_ALIGNED = 60
"""Widest cell that moves the next column, in characters."""

_MAX_VALUE = 60


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Paths and values may have characters that the terminal's encoding lacks.
            stream.reconfigure(errors="backslashreplace")
    app()


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"actorsnap {RELEASE}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the release."),
    ] = False,
) -> None:
    pass


@app.command()
def ls(path: PathArgument, as_json: JsonOption = False, option: StorageOption = None) -> None:
    """List a snapshot's objects or, for a folder of snapshots, its snapshots."""
    with _errors():
        source = _source(path, option)
        try:
            _, manifests = _run(reading.load_index(source))
        except NotASnapshot as error:
            found = _run(maintenance.find_snapshots(source))
            if not found or error.found in ("unfinished", "foreign"):
                raise
            if as_json:
                _print_json([_snapshot_json(name, commit) for name, commit in found.items()])
            else:
                _print_columns(_snapshot_rows(found))
            return
        leaves = {path: leaf for path, leaf in _leaves(manifests).items() if leaf.counts}
        if as_json:
            _print_json([{"path": path, **leaf.as_json()} for path, leaf in leaves.items()])
        else:
            _print_columns([path, *_describe(leaf)] for path, leaf in leaves.items())


def _snapshot_rows(found: dict[str, Commit | FormatError | None]) -> Iterator[list[str]]:
    for name, commit in found.items():
        if isinstance(commit, Commit):
            step = [] if commit.step is None else [f"step {commit.step}"]
            metadata = [_cut(json.dumps(commit.metadata))] if commit.metadata else []
            yield [name, commit.created, f"world size {commit.world_size}", *step, *metadata]
        elif commit is None:
            yield [name, "unfinished"]
        else:
            yield [name, f"damaged: {commit}"]


def _snapshot_json(name: str, commit: Commit | FormatError | None) -> dict[str, Any]:
    if isinstance(commit, Commit):
        return {
            "name": name,
            "state": "committed",
            "created": commit.created,
            "world_size": commit.world_size,
            "step": commit.step,
            "metadata": commit.metadata,
        }
    if commit is None:
        return {"name": name, "state": "unfinished"}
    return {"name": name, "state": "damaged", "detail": str(commit)}


@app.command()
def inspect(
    path: PathArgument,
    as_json: JsonOption = False,
    depth: Annotated[
        int | None, typer.Option(min=1, help="Levels of the tree to show; below, sums only.")
    ] = None,
    option: StorageOption = None,
) -> None:
    """Show the contents of a snapshot: a tree with shapes, dtypes and sizes."""
    with _errors():
        commit, manifests = _run(reading.load_index(_source(path, option)))
        if as_json:
            _print_json(_as_json(path, commit, manifests))
            return
        _write(_overview(path, commit, manifests))
        for rank, manifest in manifests.items():
            root = _tree_of(_leaves({rank: manifest}))
            if commit.world_size > 1:
                root = _Node(children={f"rank {rank}": root})
            _write(_draw(root, depth or sys.maxsize))


def _objects(manifests: dict[int, RankManifest]) -> list[ObjectRecord]:
    """Returns the data objects, each once, even if several ranks wrote it."""
    found: dict[str, ObjectRecord] = {}
    for manifest in manifests.values():
        for record in manifest.objects:
            chunks = {*found.get(record.key, record).chunks, *record.chunks}
            ordered = sorted(chunks, key=lambda chunk: chunk.start)
            found[record.key] = msgspec.structs.replace(record, chunks=tuple(ordered))
    return list(found.values())


def _overview(path: str, commit: Commit, manifests: dict[int, RankManifest]) -> Iterator[str]:
    objects = _objects(manifests)
    total = sum(record.size for record in objects)
    yield f"{path}  {_size(total)} in {_count(len(objects), 'data object', 'data objects')}"
    stored = sum(size for record in objects for _, size in record.stored)
    if stored != total:
        yield f"compressed to {_size(stored)}, {stored / total:.0%}"
    yield f"created {commit.created}, world size {commit.world_size}, format {commit.version}"
    if not commit.fsync:
        yield "written with fsync=False: may not have survived a power loss"
    if commit.step is not None:
        yield f"step {commit.step}"
    if commit.metadata:
        yield f"metadata {json.dumps(commit.metadata, ensure_ascii=False)}"


@app.command()
def verify(
    path: PathArgument,
    full: Annotated[
        bool, typer.Option("--full", help="Compare every byte, and check that it can be restored.")
    ] = False,
    option: StorageOption = None,
) -> None:
    """Check that a snapshot is intact. Exit code 1 if it is damaged."""
    with _errors(damaged=1):
        source = _source(path, option)
        report: VerifyReport
        if full:
            with _progress("verifying") as update:
                report = _run(verification.verify(source, level="full", progress=update))
        else:
            report = _run(verification.verify(source, level="quick"))
        for problem in report.problems:
            err.print(f"[red]damaged[/] {quote(_visible(str(problem)))}")
        if not report.ok:
            raise typer.Exit(1)
        checked = f", {_size(report.nbytes)} compared with checksums" if full else ""
        _write([f"ok: {_count(report.num_objects, 'data object', 'data objects')}{checked}"])


@app.command()
def diff(
    a: Annotated[str, typer.Argument(help="A snapshot's path or URL.")],
    b: Annotated[str, typer.Argument(help="Another snapshot's path or URL.")],
    option: StorageOption = None,
) -> None:
    """Compare two snapshots by their checksums, without reading data. Exit code 1 if different."""
    with _errors():
        left, right = (
            _leaves(_run(reading.load_index(_source(path, option)))[1]) for path in (a, b)
        )
        both = left | right
        rows = [row for path in sorted(both) if (row := _difference(path, left, right))]
        _print_columns(rows)
        leaves = _count(sum(leaf.counts for leaf in both.values()), "leaf", "leaves")
        if rows:
            err.print(f"{_count(len(rows), 'difference', 'differences')} in {leaves}")
            raise typer.Exit(1)
        _write([f"equal: {leaves}"])


def _difference(path: str, left: dict[str, _Leaf], right: dict[str, _Leaf]) -> list[str] | None:
    if path not in right:
        return [f"- {path}", *_describe(left[path])]
    if path not in left:
        return [f"+ {path}", *_describe(right[path])]
    was, now = left[path], right[path]
    descriptions = ["  ".join(_describe(leaf)) for leaf in (was, now)]
    if descriptions[0] != descriptions[1]:
        return [f"! {path}", " -> ".join(descriptions)]
    if not was.has_values_of(now):
        # Checksums cover the memory that views share, not each view.
        is_view = isinstance(was.entry, ViewEntry)
        return [f"~ {path}", *_describe(was), f"other values{' in that memory' * is_view}"]
    return None


@app.command()
def cat(
    path: PathArgument,
    object: Annotated[str, typer.Argument(help="As `ls` prints it; the rank may be left out.")],
    raw: Annotated[bool, typer.Option("--raw", help="Print all bytes, unchanged.")] = False,
    option: StorageOption = None,
) -> None:
    """Print one object of a snapshot; only the beginning of long bytes, unless --raw."""
    with _errors():
        snapshot = Snapshot(path, storage_options=_storage_options(option), options=_options())
        value = snapshot.read_object(object)
        if raw:
            data = _raw_bytes(value)
            sys.stdout.flush()
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        else:
            sys.stdout.write(f"{_text_of(value)}\n")


@app.command()
def cp(
    source: Annotated[str, typer.Argument(help="A snapshot's path or URL.", metavar="SRC")],
    to: Annotated[str, typer.Argument(help="The destination, in any storage.", metavar="DST")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace another snapshot that is there.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="For scripts: a line for each event.")
    ] = False,
    src_option: Annotated[
        list[str] | None,
        typer.Option("--src-option", metavar="KEY=VALUE", help="For the backend of SRC."),
    ] = None,
    dst_option: Annotated[
        list[str] | None,
        typer.Option("--dst-option", metavar="KEY=VALUE", help="For the backend of DST."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="For both, unless overridden."),
    ] = None,
) -> None:
    """Copy a snapshot; an interrupted copy continues."""
    with _errors():
        both = _storage_options(option)
        src_options = both | _storage_options(src_option)
        snapshot = Snapshot(source, storage_options=src_options, options=_options())
        with _progress("copying") as update:

            def show(event: CopyEvent) -> None:
                update(event.done_bytes, event.total_bytes)
                if as_json and event.kind is not CopyEventKind.MOVED:
                    sys.stdout.write(json.dumps(msgspec.to_builtins(event)) + "\n")
                    sys.stdout.flush()

            report = snapshot.copy_to(
                to,
                overwrite=overwrite,
                storage_options=both | _storage_options(dst_option),
                on_event=show,
            )
        if as_json:
            _write([json.dumps({"kind": "done", **msgspec.to_builtins(report)})])
        elif report.was_there:
            _write([f"{to} is that snapshot already"])
        else:
            objects = _count(report.num_copied, "object", "objects")
            kept = f"; {_size(report.skipped_bytes)} were there" * bool(report.num_skipped)
            _write([f"copied {objects}, {_size(report.copied_bytes)}{kept}"])


@app.command()
def rm(
    path: PathArgument,
    garbage: Annotated[
        bool,
        typer.Option(
            "--garbage",
            help="Only leftovers of unfinished attempts. Without a commit object, complete "
            "attempts are deleted only after a question, or with --yes.",
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="With --garbage: also attempts that may be running."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    option: StorageOption = None,
) -> None:
    """Delete a snapshot, or only the garbage at its path."""
    with _errors():
        source = _source(path, option)
        if garbage:
            _collect(source, path, force=force, yes=yes)
            return
        if force:
            raise UsageError("--force needs --garbage; to skip the question use --yes")
        what = _what_to_delete(source, path)
        if not yes:
            typer.confirm(f"Delete {what}?", abort=True, err=True)
        _run(maintenance.delete(source))
        _write([f"deleted {path}"])


def _collect(source: Source, path: str, *, force: bool, yes: bool) -> None:
    leftovers = _run(maintenance.find_leftovers(source))
    for leftover in leftovers:
        state = "complete" if leftover.is_complete else "incomplete"
        age = _age(time.time() - leftover.created_s)
        err.print(f"{leftover.attempt}  {_size(leftover.nbytes)}, {age} old, {state}")
    complete = [each.attempt for each in leftovers if each.is_complete]
    doomed = [each for each in leftovers if each.is_complete and (each.is_garbage or force)]
    is_confirmed = yes
    if doomed and not yes and sys.stdin.isatty():
        what = _count(len(doomed), "attempt is", "attempts are")
        err.print(f"{what} complete: {quote(_recover(path))} makes a snapshot of one again.")
        is_confirmed = typer.confirm("Delete what is complete, too?", err=True)
    expendable = complete if is_confirmed else []
    report = _run(maintenance.collect(source, force=force, expendable=expendable))
    if not report.deleted and not report.kept and not report.left:
        _run(reading.load_index(source))  # raises if there is nothing at all
    objects = _count(len(report.deleted), "object", "objects")
    _write([f"deleted {objects} of unfinished attempts"])
    for attempt in report.left:
        err.print(f"left {quote(attempt)}: it may be running, elsewhere (see --force)")
    advice = f"{quote(_recover(path))} makes a snapshot of it again; --yes deletes it"
    if report.is_damaged:
        advice = (
            "The snapshot here is damaged. Move the attempt's folder to another path and run "
            "`actorsnap recover` there; `actorsnap rm` without --garbage deletes all"
        )
    for attempt in report.kept:
        err.print(f"kept {quote(attempt)}: it is complete. {advice}")
    if report.kept:
        raise typer.Exit(1)


def _recover(path: str) -> str:
    return f"`actorsnap recover {shlex.quote(_one_line(path))}`"


def _age(seconds: float) -> str:
    for unit, unit_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


@app.command()
def recover(
    path: PathArgument,
    attempt: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which, if several attempts are complete.")
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Ranks that saved it, if an older release did."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also an attempt that may still be running.")
    ] = False,
    replace_damaged: Annotated[
        bool, typer.Option("--replace-damaged", help="Replace a damaged commit object.")
    ] = False,
    option: StorageOption = None,
) -> None:
    """Write a lost commit object again, after comparing every byte. Exit code 1 if damaged."""
    with _errors(damaged=1):
        call = recovery.RecoverCall(
            attempt=attempt, world_size=world_size, force=force, replace_damaged=replace_damaged
        )
        with _progress("verifying") as update:
            report = _run(recovery.recover(_source(path, option), call, progress=update))
        step = "" if report.step is None else f", step {report.step}"
        _write(
            [
                f"recovered {path}: {report.attempt}, world size {report.world_size}{step}",
                f"{_count(report.num_objects, 'data object', 'data objects')}, "
                f"{_size(report.nbytes)} compared with checksums",
            ]
        )


@app.command()
def trace(
    file: Annotated[list[str], typer.Argument(help="Files written by Options.trace.")],
    html: Annotated[
        str | None, typer.Option(metavar="OUT", help="Write a page with the timeline.")
    ] = None,
    merged: Annotated[
        str | None, typer.Option(metavar="OUT", help="Write one trace with all events.")
    ] = None,
) -> None:
    """Show how the time of a save or restore was spent; of several ranks: one file each."""
    with _errors():
        found = tracefile.merge([tracefile.read(path) for path in file])
        tables = []
        for summary in timeline.summaries(found):
            tables.append((_title(summary), [*_stage_rows(summary)]))
            tables.append(("longest waits", [*_wait_rows(summary)]))
        if merged is not None:
            _write_file(merged, msgspec.json.encode(found))
        if html is not None:
            _write_file(html, timeline.page(found, tables).encode())
        if html is None and merged is None:
            for title, rows in tables:
                _write([title])
                _print_columns(rows)


def _title(summary: timeline.Summary) -> str:
    about = summary.about
    text = f"{about.op} {about.url} rank {about.rank}: {about.outcome} after {about.seconds:.3f} s"
    if summary.moving_s:
        share = summary.overlapping_s / summary.moving_s
        text += f", {share:.0%} of {summary.moving_s:.3f} s with bytes overlap"
    if about.retries:
        text += f", {_count(about.retries, 'retry', 'retries')}"
    if about.dropped:
        text += f", {_count(about.dropped, 'span', 'spans')} not shown"
    return text


def _stage_rows(summary: timeline.Summary) -> Iterator[list[str]]:
    yield ["stage", "busy", "of all", "actors' time", "bytes", "per s"]
    for stage in summary.stages:
        yield [
            stage.kind,
            f"{stage.busy_s:.3f} s",
            f"{stage.busy_s / (summary.about.seconds or 1):.0%}",
            f"{stage.spent_s:.3f} s",
            _size(stage.nbytes) if stage.nbytes else "-",
            _size(stage.bytes_per_s) if stage.bytes_per_s else "-",
        ]


def _wait_rows(summary: timeline.Summary) -> Iterator[list[str]]:
    yield ["actor", "waits for", "seconds", "at"]
    for wait in summary.longest:
        what = wait.kind.removeprefix("wait for ")
        yield [wait.actor, what, f"{wait.seconds:.3f} s", f"{wait.at_s:.3f} s"]


def _write_file(path: str, data: bytes) -> None:
    try:
        with open(path, "wb") as file:
            file.write(data)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error


def _what_to_delete(source: Source, path: str) -> str:
    """Describes the snapshot for a question. Damaged snapshots can be deleted, other folders
    cannot."""
    try:
        commit, manifests = _run(reading.load_index(source))
    except ChecksumMismatch:
        return f"the damaged snapshot {path}"
    total = sum(record.size for record in _objects(manifests))
    return f"the snapshot {path} ({_size(total)}, created {commit.created})"


# Calls ----------------------------------------------------------------------------------------


def _options() -> Options:
    # Copying or verifying a large snapshot takes hours, and Ctrl-C ends it.
    return from_env({"ACTORSNAP_TIMEOUT_S": "86400", **os.environ})


def _source(path: str, option: list[str] | None) -> Source:
    location = validation.make_location(path, _storage_options(option))
    return Source(location, _options())


def _storage_options(given: list[str] | None) -> dict[str, Any]:
    """Returns ``storage_options`` from the command line.

    Raises:
        UsageError: An option is not ``key=value``. The message does not repeat it: it may be a
            secret.
    """
    found: dict[str, Any] = {}
    for text in given or ():
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError("a storage option must be key=value")
        if key in found:
            raise UsageError(f"the storage option {key!r} is given twice")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def _run(script: Script[T]) -> T:
    return run_sync(script, name="cli")


@contextmanager
def _errors(damaged: int = 4) -> Iterator[None]:
    """Turns the library's errors into a line and an exit code."""
    try:
        yield
        sys.stdout.flush()
    except ActorSnapError as error:
        text = _visible("\n".join([str(error), *getattr(error, "__notes__", ())]))
        if isinstance(error, UsageError) and "allow_pickle" in text:
            text += "\nOn the command line: set ACTORSNAP_ALLOW_PICKLE=true"
        err.print(f"[red]error:[/] {quote(text)}")
        raise typer.Exit(_exit_code(error, damaged)) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:
        # `actorsnap ls X | head`: nobody reads the rest, including buffered output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None


def _exit_code(error: ActorSnapError, damaged: int) -> int:
    match error:
        case UsageError():
            return 2
        case NotASnapshot() | IncompatibleState():
            return 3
        case UnsupportedFormat():
            return 4
        case FormatError():
            return damaged
    return 4


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Shows a bar on stderr if that is a terminal. The yielded function may be called from any
    thread."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


# Output ---------------------------------------------------------------------------------------

_STEERING = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def _visible(text: str) -> str:
    """Returns ``text`` with terminal control characters escaped; line ends stay."""
    return _STEERING.sub(lambda m: m[0] if m[0] == "\n" else ascii(m[0])[1:-1], text)


def _one_line(text: str) -> str:
    return _visible(text).replace("\n", "\\n")


def _write(lines: Iterable[str]) -> None:
    """Prints lines in batches: a manifest may have a million of them."""
    lines = iter(lines)
    while batch := list(islice(lines, 10_000)):
        sys.stdout.write("".join([f"{_one_line(line)}\n" for line in batch]))


def _print_columns(rows: Iterable[Sequence[str]]) -> None:
    """Prints cells aligned on a terminal, with tabs between them in a pipe.

    Does not use ``rich.table``, which cuts paths at the terminal's width: see decision 0001.
    """
    if not sys.stdout.isatty():
        sys.stdout.writelines("\t".join(map(_one_line, row)) + "\n" for row in rows)
        return
    cells = [[_one_line(cell) for cell in row] for row in rows]
    widths = [0] * max(map(len, cells), default=0)
    for row in cells:
        for number, cell in enumerate(row[:-1]):
            if len(cell) <= _MAX_ALIGNED:
                widths[number] = max(widths[number], len(cell))
    for row in cells:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        sys.stdout.write(line.rstrip() + "\n")


@dataclass(slots=True)
class _Leaf:
    """An entry with its own path, and the entries that complete it."""

    entry: Entry
    parts: list[Entry] = field(default_factory=list)
    base: Entry | None = None
    """The entry that a view refers to."""

    @property
    def counts(self) -> bool:
        """Whether it is a leaf of the app state; the others are containers."""
        return not isinstance(self.entry, ContainerEntry)

    @property
    def nbytes(self) -> int:
        """Number of stored bytes."""
        return sum(
            entry.data.stop - entry.data.start
            for entry in (self.entry, *self.parts)
            if isinstance(entry, TensorEntry | BytesEntry)
        )

    def has_values_of(self, other: _Leaf) -> bool:
        """Whether the values are equal (up to CRC32C's collisions)."""
        ours, theirs = self._content(), other._content()
        return len(ours) == len(theirs) and all(map(_is_same, ours, theirs))

    def _content(self) -> list[Entry]:
        entries = [self.entry, *self.parts]
        if self.base is not None and self.base not in self.parts:
            entries.append(self.base)
        return entries

    def as_json(self) -> dict[str, Any]:
        entry = self.entry
        found: dict[str, Any] = {"kind": type(entry).__struct_config__.tag}
        match entry:
            case TensorEntry() | ViewEntry() | CompositeEntry():
                found |= {"type": entry.type, "dtype": entry.dtype, "shape": entry.shape}
            case BytesEntry():
                found["type"] = entry.type
            case ValueEntry():
                found["value"] = entry.value
        return {**found, "nbytes": self.nbytes}


def _is_same(ours: Entry, theirs: Entry) -> bool:
    if isinstance(ours, TensorEntry | BytesEntry) and isinstance(theirs, TensorEntry | BytesEntry):
        return is_same_content(ours.data, theirs.data)
    return ours == theirs


def _leaves(manifests: dict[int, RankManifest]) -> dict[str, _Leaf]:
    """Returns containers and leaves by ``<rank>/<path>``, in order; parts belong to their
    leaves."""
    leaves: dict[str, _Leaf] = {}
    for rank, manifest in manifests.items():
        by_name = named_entries(manifest)
        for name, entry in by_name.items():
            if parent_of(entry.path) == entry.path:
                base = by_name[entry.of] if isinstance(entry, ViewEntry) else None
                leaves[f"{rank}/{name}"] = _Leaf(entry, base=base)
        for entry in manifest.entries:
            parent = parent_of(entry.path)
            if parent != entry.path:
                leaves[f"{rank}/{parent}"].parts.append(entry)
    return leaves


def _describe(leaf: _Leaf) -> list[str]:
    """What a leaf or container is, in columns: the type, and size or kin."""
    entry = leaf.entry
    match entry:
        case TensorEntry() | ViewEntry() | CompositeEntry():
            cells = [f"{entry.dtype}[{', '.join(map(str, entry.shape))}]"]
            if not isinstance(entry, ViewEntry) or leaf.parts:
                cells.append(_size(leaf.nbytes))
            if isinstance(entry, TensorEntry) and entry.offsets is not None:
                cells.append(f"at {entry.offsets} of {entry.global_shape}")
            elif isinstance(entry, ViewEntry):
                cells.append(f"view of {entry.of}")
            elif isinstance(entry, CompositeEntry):
                cells.append(entry.layout)
            return cells
        case BytesEntry():
            return [entry.type, _size(leaf.nbytes)]
        case ValueEntry():
            return [_cut(_value_text(entry))]
        case ContainerEntry():
            return [entry.type]
    raise AssertionError(entry)


def _value_text(entry: ValueEntry) -> str:
    if isinstance(entry.value, dict | list):  # JSON cannot represent it
        return repr(decode_inline(entry.value, entry.path))
    return json.dumps(entry.value, ensure_ascii=False)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_VALUE else text[: _MAX_VALUE - 3] + "..."


@dataclass(slots=True)
class _Node:
    """A path component: the leaf at it, and the components below."""

    leaf: _Leaf | None = None
    children: dict[str, _Node] = field(default_factory=dict)
    num_leaves: int = 0
    nbytes: int = 0


def _tree_of(leaves: Mapping[str, _Leaf]) -> _Node:
    root = _Node()
    for path, leaf in leaves.items():
        node = root
        line = [root]
        for name in path.split("/")[1:]:
            node = node.children.setdefault(name, _Node())
            line.append(node)
        node.leaf = leaf
        nbytes = leaf.nbytes
        for node in line:
            node.num_leaves += leaf.counts
            node.nbytes += nbytes
    return root


def _draw(root: _Node, max_depth: int) -> Iterator[str]:
    # An explicit stack: states may nest as deeply as Python's own limit.
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


def _label(name: str, node: _Node) -> str:
    if not node.children:
        return "  ".join([name, *(_describe(node.leaf) if node.leaf is not None else ())])
    container = None if node.leaf is None else node.leaf.entry
    kind = f"{container.type}, " if isinstance(container, ContainerEntry) else ""
    return f"{name}  ({kind}{_count(node.num_leaves, 'leaf', 'leaves')}, {_size(node.nbytes)})"


def _print_json(document: object) -> None:
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _as_json(path: str, commit: Commit, manifests: dict[int, RankManifest]) -> dict[str, Any]:
    return {
        "path": path,
        "format_version": commit.version,
        "created": commit.created,
        "world_size": commit.world_size,
        "attempt": commit.attempt,
        "fsync": commit.fsync,
        "step": commit.step,
        "metadata": commit.metadata,
        "objects": [msgspec.to_builtins(record) for record in _objects(manifests)],
        "entries": [
            {"rank": rank, **msgspec.to_builtins(entry)}
            for rank, manifest in manifests.items()
            for entry in manifest.entries
        ],
    }


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


class _Shortened:
    """Prints as the beginning of long bytes."""

    def __init__(self, value: bytes | bytearray) -> None:
        self._text = f"{value[: _MAX_VALUE // 4]!r}... ({_size(len(value))})"

    def __repr__(self) -> str:
        return self._text


def _shortened(value: object) -> object:
    is_long = isinstance(value, bytes | bytearray) and len(value) > _MAX_VALUE
    return _Shortened(value) if is_long else value  # type: ignore[arg-type]


def _text_of(value: Any) -> str:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    paths, leaves = flatten("v", value)
    value = unflatten("v", zip(paths, map(_shortened, leaves), strict=True))
    try:
        return repr(value)
    except (NotImplementedError, RuntimeError) as error:  # torch has dtypes that it cannot print
        raise UsageError(f"the value cannot be printed; use --raw: {error}") from error


def _raw_bytes(value: Any) -> bytes:
    match value:
        case bytes() | bytearray():
            return bytes(value)
        case str():
            return value.encode("utf-8", "surrogatepass")
    try:
        return bytes(bytes_of(value))
    except Exception as error:
        what = f"a value of type {type(value).__name__}"
        raise UsageError(f"{what} has no raw bytes; leave out --raw") from error


if __name__ == "__main__":
    main()
