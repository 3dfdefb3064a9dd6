# SPDX-License-Identifier: Apache-2.0
"""The command line, and its commands that only read.

Results go to stdout, everything else to stderr. Columns are aligned on a terminal, otherwise
separated by tabs. Control characters are escaped. With ``--json``, stdout has only JSON: the
result, or ``{"error": ...}``. ``cli_app.EXIT_CODES`` has the exit codes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import msgspec
import typer

from actorsnap import cli_copies, cli_damage, cli_deletion, cli_roots
from actorsnap import cli_output as output
from actorsnap.cli_app import app as app
from actorsnap.cli_calls import (
    JsonOption,
    PathArgument,
    StorageOption,
    both_sides,
    err,
    errors,
    make_source,
    options,
    parse_storage_options,
    progress,
    run,
)
from actorsnap.errors import (
    AccessDenied,
    NotASnapshot,
    SnapshotReplaced,
    StorageError,
    UsageError,
)
from actorsnap.format.foreign import CONTAINS_SNAPSHOTS
from actorsnap.format.manifest import (
    Commit,
    RankManifest,
    ValueEntry,
)
from actorsnap.runtime import maintenance, reading, tracefile
from actorsnap.runtime.source import Source
from actorsnap.runtime.treemap import Treemap


@app.command()
def ls(path: PathArgument, as_json: JsonOption = False, option: StorageOption = None) -> None:
    """List the objects of a snapshot, or the snapshots in a folder."""
    with errors():
        source = make_source(path, option)
        listed = output.JsonList()

        def show(commit: Commit, manifest: RankManifest) -> None:
            leaves = {p: leaf for p, leaf in output.leaves_of(manifest).items() if leaf.counts}
            if not as_json:
                output.print_columns([p, *output.describe(leaf)] for p, leaf in leaves.items())
                return
            if manifest.rank == 0:
                listed.begin()
            for each, leaf in leaves.items():
                listed.add({"path": each, **leaf.as_json()})

        try:
            run(reading.each_manifest(source, _only_one(source, show)))
        except (NotASnapshot, AccessDenied) as error:
            if isinstance(error, AccessDenied) and error.op != "list":
                raise
            failed: dict[str, StorageError] = {}
            # One level only: a folder that cannot be listed does not hide the others.
            found = run(maintenance.find_snapshots(source, failed=failed))
            if isinstance(error, NotASnapshot):
                if not (found or failed) or error.found in ("unfinished", "foreign"):
                    _explain(error, path)
                    raise
            elif not found:
                raise
            sizes = run(maintenance.measure_folders(source, found))
            both = {**found, **failed}
            listed_all = {name: both[name] for name in sorted(both, key=maintenance.natural_order)}
            if as_json:
                output.print_json(
                    [
                        output.snapshot_json(name, each, sizes.get(name))
                        for name, each in listed_all.items()
                    ]
                )
            else:
                output.print_columns(output.snapshot_rows(listed_all, sizes))
            if failed:
                raise typer.Exit(4) from None
            return
        if as_json:
            listed.end()


def _explain(error: NotASnapshot, path: str) -> None:
    """Describes a folder without snapshots as ``ls`` sees it."""
    if error.detail.startswith(CONTAINS_SNAPSHOTS):
        names = error.detail.removeprefix(CONTAINS_SNAPSHOTS)
        raise NotASnapshot(
            key=error.key,
            detail="no snapshot is directly in this folder; there are some further down: " + names,
            found=error.found,
        ) from error
    if os.path.isdir(path):
        with os.scandir(path) as entries:
            links = sorted(entry.name for entry in entries if entry.is_symlink())
        if links:
            error.add_note(f"`actorsnap ls` does not follow symbolic links, such as {links[0]}")


def _only_one(
    source: Source, look: Callable[[Commit, RankManifest], object]
) -> Callable[[Commit, RankManifest], object]:
    """Raises ``SnapshotReplaced`` if a snapshot is replaced after some of it was printed."""
    attempts: list[str] = []

    def checked(commit: Commit, manifest: RankManifest) -> None:
        attempts[1:] = [commit.attempt]
        if attempts[0] != commit.attempt:
            raise SnapshotReplaced(url=source.location.display_url, is_deleted=False)
        look(commit, manifest)

    return checked


@app.command()
def inspect(
    path: PathArgument,
    as_json: JsonOption = False,
    depth: Annotated[
        int | None,
        typer.Option(min=1, help="Number of levels to show. Deeper levels are summed up."),
    ] = None,
    is_whole: Annotated[
        bool,
        typer.Option("--all", help="Show every leaf. Do not fold lists of values or groups."),
    ] = False,
    html: Annotated[
        str | None,
        typer.Option(metavar="OUT", help="Write an HTML page that shows what takes up the space."),
    ] = None,
    option: StorageOption = None,
) -> None:
    """Show the contents of a snapshot as a tree with shapes, dtypes and sizes."""
    with errors():
        if html is not None:
            _write_page(path, html, as_json, option)
            return
        source = make_source(path, option)
        objects = output.DataObjects()

        def add(commit: Commit, manifest: RankManifest) -> None:
            if manifest.rank == 0:  # also of a snapshot that has replaced another one
                objects.clear()
                trees.clear()
            objects.add(manifest)
            if not as_json:
                trees.add(commit, manifest)

        with output.Trees(depth, is_folded=not is_whole) as trees, progress("reading") as bar:
            if as_json:
                document = output.JsonManifests(path)

                def show(commit: Commit, manifest: RankManifest) -> None:
                    bar.close()
                    document.add(commit, objects, manifest)

                run(reading.each_manifest(source, add, _only_one(source, show), progress=bar))
                document.end()
                return
            commit = run(reading.each_manifest(source, add, progress=bar))
            bar.close()
            output.write_lines(output.overview(path, commit, objects))
            sys.stdout.writelines(trees.lines())


def _write_page(path: str, to: str, as_json: bool, option: list[str] | None) -> None:
    objects, treemap = output.DataObjects(), Treemap()

    def add(_: Commit, manifest: RankManifest) -> None:
        if manifest.rank == 0:  # also of a snapshot that has replaced another one
            objects.clear()
            treemap.clear()
        objects.add(manifest)
        treemap.add(manifest)

    with progress("reading") as bar:
        commit = run(reading.each_manifest(make_source(path, option), add, progress=bar))
    _write_file(to, treemap.page(output.overview(path, commit, objects)).encode())
    if as_json:
        output.print_json({"written": to})
    else:
        output.write_lines([f"wrote {to}"])


@app.command()
def diff(
    a: Annotated[str, typer.Argument(help="A snapshot's path or URL.", metavar="A")],
    b: Annotated[str, typer.Argument(help="Another snapshot's path or URL.", metavar="B")],
    as_json: JsonOption = False,
    a_option: Annotated[
        list[str] | None,
        typer.Option("--a-option", metavar="KEY=VALUE", help="Storage option for A."),
    ] = None,
    b_option: Annotated[
        list[str] | None,
        typer.Option("--b-option", metavar="KEY=VALUE", help="Storage option for B."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            metavar="KEY=VALUE",
            help="Storage option for A and B, unless --a-option or --b-option sets it. Does not "
            "apply to a local path.",
        ),
    ] = None,
) -> None:
    """Compare two snapshots by checksums, without reading data. Exit code 1 if they differ."""
    with errors():
        num_leaves = num_rows = 0
        listed: list[dict[str, Any]] = []

        def compare(rank: int, *manifests: RankManifest | None) -> None:
            nonlocal num_leaves, num_rows
            left, right = ({} if m is None else output.leaves_of(m) for m in manifests)
            both = left | right
            rows = [
                row
                for path in sorted(both)
                if (row := output.describe_difference(path, left, right))
            ]
            if as_json:
                listed.extend(map(output.difference_json, rows))
            else:
                output.print_columns(rows)
            num_leaves += sum(leaf.counts for leaf in both.values())
            num_rows += len(rows)

        flags = ("--a-option", "--b-option")
        left_there, right = both_sides(a, b, a_option, b_option, option, flags)
        run(reading.each_pair(left_there, Source(right, options()), compare))
        leaves = output.count_of(num_leaves, "leaf", "leaves")
        if as_json:
            output.print_json(
                {"equal": not num_rows, "num_leaves": num_leaves, "differences": listed}
            )
            raise typer.Exit(1 if num_rows else 0)
        if num_rows:
            err.print(f"{output.count_of(num_rows, 'difference', 'differences')} in {leaves}")
            raise typer.Exit(1)
        output.write_lines([f"equal: {leaves}"])


@app.command()
def cat(
    path: PathArgument,
    object: Annotated[
        str,
        typer.Argument(help="Object, as `ls` prints it. The rank is optional.", metavar="OBJECT"),
    ],
    raw: Annotated[bool, typer.Option("--raw", help="Print all bytes, unchanged.")] = False,
    as_json: JsonOption = False,
    option: StorageOption = None,
) -> None:
    """Print one object of a snapshot. Without --raw, long byte strings are truncated."""
    with errors():
        if raw and as_json:
            raise UsageError("--raw and --json cannot be combined")
        entry = None if raw else _find_value(make_source(path, option), object)
        if entry is not None:
            value: Any = entry.value
        else:
            from actorsnap.sync import Snapshot  # torch

            storage_options = parse_storage_options(option)
            snapshot = Snapshot(path, storage_options=storage_options, options=options())
            value = snapshot.read_object(object)
        if raw:
            data = output.raw_bytes(value)
            sys.stdout.flush()
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        elif as_json:
            output.print_json(output.value_json(value))
        else:
            sys.stdout.write(f"{output.value_text(value)}\n")


def _find_value(source: Source, path: str) -> ValueEntry | None:
    """Returns the entry of a number, text, bool or None, which needs no torch to be read."""
    rank, _, rest = path.partition("/")
    if not (rest and rank.isascii() and rank.isdecimal()):
        rank, rest = "0", path
    if int(rank) >= run(reading.load_commit(source)).world_size:
        return None
    entry = run(reading.get_manifest(source, int(rank))).get(f"{int(rank)}/{rest}")
    if isinstance(entry, ValueEntry) and isinstance(entry.value, _PLAIN):
        return entry
    return None


_PLAIN = (str, int, float, type(None))


@app.command()
def trace(
    file: Annotated[
        list[str], typer.Argument(help="Files written by Options.trace.", metavar="FILE...")
    ],
    html: Annotated[
        str | None, typer.Option(metavar="OUT", help="Write an HTML page with the timeline.")
    ] = None,
    merged: Annotated[
        str | None, typer.Option(metavar="OUT", help="Write one trace with all events.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show how a save or restore spent its time. Pass one file for each rank."""
    with errors():
        found = tracefile.merge([tracefile.read(path) for path in file])
        for path in (html, merged):
            if path is not None:
                _refuse_trace(path)
        if html is not None and html == merged:
            raise UsageError(f"--html and --merged would both write {html}")
        tables = []
        summaries = tracefile.summaries(found)
        for summary in summaries:
            tables.append((_title(summary), [*_stage_rows(summary)]))
            tables.append(("longest waits", [*_wait_rows(summary)]))
        if merged is not None:
            _write_file(merged, msgspec.json.encode(found))
        if html is not None:
            _write_file(html, tracefile.page(found, tables).encode())
        written = {"written": html, "merged": merged}
        if html is not None or merged is not None:
            if as_json:
                output.print_json({name: path for name, path in written.items() if path})
            else:
                output.write_lines([f"wrote {path}" for path in written.values() if path])
        elif as_json:
            output.print_json(msgspec.to_builtins(summaries))
        else:
            for title, rows in tables:
                output.write_lines([title])
                output.print_columns(rows)


def _refuse_trace(path: str) -> None:
    """Refuses to overwrite a trace: ``--html traces/*.json`` would name the first one."""
    if not os.path.isfile(path):
        return
    try:
        tracefile.read(path)
    except UsageError:
        return
    raise UsageError(f"{path} is a trace, and would be lost: write to another file")


def _write_file(path: str, data: bytes) -> None:
    is_open = False
    try:
        with open(path, "wb") as file:
            is_open = True
            file.write(data)
    except OSError as error:
        if is_open and os.path.isfile(path):  # no device
            os.unlink(path)
        raise StorageError(op="write", key="", backend=path, detail=str(error.strerror)) from error


def _title(summary: tracefile.Summary) -> str:
    about = summary.about
    text = f"{about.op} {about.url} rank {about.rank}: {about.outcome} after {about.seconds:.3f} s"
    if summary.moving_s:
        share = summary.overlapping_s / summary.moving_s
        text += f", {share:.0%} of {summary.moving_s:.3f} s with bytes overlap"
    if about.memory_peak_bytes:
        grown = about.memory_peak_bytes - about.memory_begin_bytes
        text += f", memory up to {output.size_text(about.memory_peak_bytes)}"
        text += f" ({output.size_text(grown)} more than before)"
    if about.retries:
        text += f", {output.count_of(about.retries, 'retry', 'retries')}"
    if about.dropped:
        text += f", {output.count_of(about.dropped, 'span', 'spans')} not shown"
    return text


def _stage_rows(summary: tracefile.Summary) -> Iterator[list[str]]:
    yield ["stage", "busy", "of all", "actors' time", "bytes", "per s"]
    for stage in summary.stages:
        yield [
            stage.kind,
            f"{stage.busy_s:.3f} s",
            f"{stage.busy_s / (summary.about.seconds or 1):.0%}",
            f"{stage.spent_s:.3f} s",
            output.size_text(stage.nbytes) if stage.nbytes else "-",
            output.size_text(stage.bytes_per_s) if stage.bytes_per_s else "-",
        ]


def _wait_rows(summary: tracefile.Summary) -> Iterator[list[str]]:
    yield ["actor", "waits for", "seconds", "at"]
    for wait in summary.longest:
        what = wait.kind.removeprefix("wait for ")
        yield [wait.actor, what, f"{wait.seconds:.3f} s", f"{wait.at_s:.3f} s"]


for _commands in (cli_copies, cli_damage, cli_deletion, cli_roots):
    _commands.register(app)
