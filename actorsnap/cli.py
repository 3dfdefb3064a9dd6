"""The command line: looks at snapshots, checks, compares, prints and deletes them.

Output goes to stdout, progress and errors to stderr. Exit codes, for scripts:

    0  done; verify: whole; diff: equal
    1  verify: damaged; diff: different
    2  bad usage, or no such object in the snapshot
    3  no committed snapshot there
    4  the storage failed, or refused
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.markup import escape as quote
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.tree import Tree

from actorsnap.errors import (
    ActorSnapError,
    FormatError,
    IncompatibleState,
    NotASnapshot,
    UsageError,
)
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
)
from actorsnap.runtime import calls
from actorsnap.runtime.calls import VerifyReport
from actorsnap.runtime.host import Script, run_sync
from actorsnap.runtime.place import Source
from actorsnap.state.tensors import bytes_of
from actorsnap.sync import Snapshot

__all__ = ["main"]

T = TypeVar("T")

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Look at, check, compare and delete actorsnap snapshots.",
    pretty_exceptions_enable=False,
)

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

PathArgument = Annotated[str, typer.Argument(help="A snapshot's path or URL.")]


def main() -> None:
    """The entry point of ``actorsnap`` and ``python -m actorsnap``."""
    try:
        app()
    except BrokenPipeError:
        # `actorsnap ls X | head`: nobody reads on.
        sys.stderr.close()
        raise SystemExit(0) from None


@app.command()
def ls(path: PathArgument) -> None:
    """List a snapshot's objects; or, for a folder of snapshots, the snapshots in it."""
    with _errors():
        source = _source(path)
        try:
            commit, manifests = _run(calls.load_index(source))
        except NotASnapshot as error:
            found = _run(calls.find_snapshots(source))
            if not found:
                raise error
            for name, nested in found:
                out.print(f"{name}\t{_one_line(nested)}", markup=False)
            return
        del commit
        for rank, entry in _leaves(manifests):
            out.print(f"{rank}/{entry.path}\t{_describe(entry)}", markup=False)


@app.command()
def inspect(
    path: PathArgument,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Show what a snapshot holds: a tree with shapes, dtypes and sizes."""
    with _errors():
        commit, manifests = _run(calls.load_index(_source(path)))
        if as_json:
            out.print(json.dumps(_as_json(path, commit, manifests), indent=2), markup=False)
            return
        objects = [record for m in manifests.values() for record in m.objects]
        total = sum(record.size for record in objects)
        root = Tree(f"[bold]{quote(path)}[/]  {_size(total)} in {len(objects)} data object(s)")
        root.add(
            f"created {commit.created}, world size {commit.world_size}, format {commit.version}"
        )
        if not commit.fsync:
            root.add("[yellow]written with fsync=False: may not have survived a power loss[/]")
        if commit.metadata:
            root.add(f"metadata {quote(json.dumps(commit.metadata))}")
        for rank, manifest in manifests.items():
            top = root if commit.world_size == 1 else root.add(f"rank {rank}")
            nodes: dict[str, Tree] = {}
            for entry in manifest.entries:
                _add_to_tree(top, nodes, entry)
        out.print(root)


@app.command()
def verify(
    path: PathArgument,
    full: Annotated[bool, typer.Option("--full", help="Compare every byte.")] = False,
) -> None:
    """Check that a snapshot is whole. Exit code 1 if it is damaged."""
    with _errors(damaged=1):
        with _progress("verifying") as update:
            report: VerifyReport = _run(
                calls.verify(_source(path), level="full" if full else "quick", progress=update)
            )
        for problem in report.problems:
            err.print(f"[red]damaged[/] {quote(str(problem))}")
        if not report.ok:
            raise typer.Exit(1)
        checked = f", {_size(report.nbytes)} compared with checksums" if full else ""
        out.print(f"ok: {report.num_objects} data object(s){checked}")


@app.command()
def diff(
    a: Annotated[str, typer.Argument(help="A snapshot's path or URL.")],
    b: Annotated[str, typer.Argument(help="Another one's.")],
) -> None:
    """Compare two snapshots by their checksums, without reading data. Exit code 1 if different."""
    with _errors():
        left, right = (
            {f"{rank}/{e.path}": e for rank, e in _leaves(_run(calls.load_index(_source(p)))[1])}
            for p in (a, b)
        )
        different = 0
        for path in sorted(left.keys() | right.keys()):
            if path not in right:
                line = f"- {path}\t{_describe(left[path])}"
            elif path not in left:
                line = f"+ {path}\t{_describe(right[path])}"
            elif _describe(left[path]) != _describe(right[path]):
                line = f"! {path}\t{_describe(left[path])} -> {_describe(right[path])}"
            elif _content(left[path]) != _content(right[path]):
                line = f"~ {path}\t{_describe(left[path])}: other values"
            else:
                continue
            different += 1
            out.print(line, markup=False)
        if different:
            err.print(f"{different} of {len(left.keys() | right.keys())} leaves differ")
            raise typer.Exit(1)
        out.print(f"equal: {len(left)} leaves")


@app.command()
def cat(
    path: PathArgument,
    object: Annotated[str, typer.Argument(help="As `ls` prints it; the rank may be left out.")],
    raw: Annotated[bool, typer.Option("--raw", help="The bytes themselves.")] = False,
) -> None:
    """Print one object of a snapshot."""
    with _errors():
        value = Snapshot(path).read_object(object)
        if raw:
            sys.stdout.buffer.write(_raw_bytes(value))
            sys.stdout.buffer.flush()
        else:
            out.print(value if isinstance(value, str) else repr(value), markup=False)


@app.command()
def rm(
    path: PathArgument,
    garbage: Annotated[
        bool, typer.Option("--garbage", help="Only what unfinished attempts left.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="With --garbage: also attempts that may be running."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a snapshot, or only the garbage beside it."""
    with _errors():
        source = _source(path)
        if garbage:
            deleted = _run(calls.collect(source, force=force))
            out.print(f"deleted {len(deleted)} object(s) of unfinished attempts")
            return
        if force:
            raise UsageError("--force goes with --garbage; to skip the question use --yes")
        if not yes:
            typer.confirm(f"Delete the snapshot {path}?", abort=True)
        _run(calls.delete(source))
        out.print(f"deleted {path}", markup=False)


def _source(path: str) -> Source:
    return Source(calls.make_place(path, None), calls.resolve_options(None))


def _run(script: Script[T]) -> T:
    return run_sync(script, name="cli")


@contextmanager
def _errors(damaged: int = 4) -> Iterator[None]:
    """Turns the library's errors into a line and an exit code."""
    try:
        yield
    except ActorSnapError as error:
        err.print(f"[red]error:[/] {quote(str(error))}")
        raise typer.Exit(_exit_code(error, damaged)) from error


def _exit_code(error: ActorSnapError, damaged: int) -> int:
    match error:
        case UsageError():
            return 2
        case NotASnapshot() | IncompatibleState():
            return 3
        case FormatError():
            return damaged
    return 4


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _leaves(manifests: dict[int, RankManifest]) -> Iterator[tuple[int, Entry]]:
    for rank, manifest in manifests.items():
        for entry in manifest.entries:
            if not isinstance(entry, ContainerEntry):
                yield rank, entry


def _describe(entry: Entry) -> str:
    match entry:
        case TensorEntry() | ViewEntry() | CompositeEntry():
            text = f"{entry.dtype}[{', '.join(map(str, entry.shape))}]"
            if isinstance(entry, TensorEntry):
                text += f"\t{_size(entry.data.stop - entry.data.start)}"
                if entry.offsets is not None:
                    text += f"\tat {entry.offsets} of {entry.global_shape}"
            elif isinstance(entry, ViewEntry):
                text += f"\tview of {entry.of}"
            else:
                text += f"\t{entry.layout}"
            return text
        case BytesEntry():
            return f"{entry.type}\t{_size(entry.data.stop - entry.data.start)}"
        case ValueEntry():
            text = json.dumps(entry.value)
            return text if len(text) <= 60 else text[:57] + "..."
        case ContainerEntry():
            return entry.type
    raise AssertionError(entry)


def _content(entry: Entry) -> object:
    """What is equal exactly if the values are (up to CRC32C's collisions)."""
    if isinstance(entry, TensorEntry | BytesEntry):
        return (entry.data.stop - entry.data.start, entry.data.crc32c)
    return entry


def _one_line(commit: Commit) -> str:
    return f"created {commit.created}\tworld size {commit.world_size}"


def _add_to_tree(top: Tree, nodes: dict[str, Tree], entry: Entry) -> None:
    parent, at = top, ""
    *folders, name = entry.path.split("/")
    for folder in folders:
        at = f"{at}/{folder}" if at else folder
        if at not in nodes:
            nodes[at] = parent.add(f"[bold]{quote(folder)}[/]")
        parent = nodes[at]
    text = "  ".join(_describe(entry).split("\t"))
    nodes[entry.path] = parent.add(f"{quote(name)}  [dim]{quote(text)}[/]")


def _as_json(path: str, commit: Commit, manifests: dict[int, RankManifest]) -> dict[str, Any]:
    return {
        "path": path,
        "format_version": commit.version,
        "created": commit.created,
        "world_size": commit.world_size,
        "attempt": commit.attempt,
        "fsync": commit.fsync,
        "metadata": commit.metadata,
        "objects": [msgspec.to_builtins(r) for m in manifests.values() for r in m.objects],
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


def _raw_bytes(value: Any) -> bytes:
    match value:
        case bytes() | bytearray():
            return bytes(value)
        case str():
            return value.encode("utf-8", "surrogatepass")
    try:
        return bytes(bytes_of(value))
    except Exception as error:
        raise UsageError(f"a {type(value).__name__} has no raw bytes; leave out --raw") from error


if __name__ == "__main__":
    main()
