# SPDX-License-Identifier: Apache-2.0
"""Commands that write a snapshot elsewhere: ``cp``, ``convert`` and ``export``."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any

import msgspec
import typer
from rich.markup import escape as quote

from actorsnap import cli_output as output
from actorsnap.actors.formats import NOT_OURS, format_of
from actorsnap.actors.snapshot_reader import find_commit
from actorsnap.cli_calls import (
    JsonOption,
    advising,
    both_sides,
    err,
    errors,
    no_snapshot,
    options,
    print_error,
    print_stop,
    progress,
    raise_empty,
    run,
    why_unfinished,
)
from actorsnap.errors import (
    ChecksumMismatch,
    FormatError,
    StorageError,
    UsageError,
    describe,
)
from actorsnap.format.foreign import is_of_snapshot
from actorsnap.format.layout import MAX_SHARD_BYTES
from actorsnap.format.manifest import (
    BytesEntry,
    Commit,
    CompositeEntry,
    RankManifest,
    TensorEntry,
    ValueEntry,
    ViewEntry,
)
from actorsnap.planning.renaming import function_of
from actorsnap.runtime import copy as copying
from actorsnap.runtime import maintenance, reading
from actorsnap.runtime.copy import SOURCE, CopyEvent, CopyEventKind, CopyReport
from actorsnap.runtime.location import Location
from actorsnap.runtime.roots import copy_records, damage_of
from actorsnap.runtime.source import OpenSource, Source
from actorsnap.storage.registry import folder_and_name
from actorsnap.storage.wire import is_unreachable
from actorsnap.wording import did_you_mean

_COPY_A_RUN = "To copy a whole run, add --all"

_MAX_LEFT_OUT = 5
"""Number of values that an export names one by one."""

_MAX_LOOKED_AT = 1000
"""Number of objects at a copy's destination that are searched for other files."""


OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing snapshot or export at DST.")
]
SourceOption = Annotated[
    list[str] | None,
    typer.Option("--src-option", metavar="KEY=VALUE", help="Storage option for SRC."),
]
TargetOption = Annotated[
    list[str] | None,
    typer.Option("--dst-option", metavar="KEY=VALUE", help="Storage option for DST."),
]
BothOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="KEY=VALUE",
        help="Storage option for SRC and DST, unless --src-option or --dst-option sets it. Does "
        "not apply to a local path.",
    ),
]


class ExportFormat(StrEnum):
    HF = "hf"
    TORCH = "torch"
    DCP = "dcp"


_FORMATS_BY_OTHER_NAMES = {"safetensors": "hf", "transformers": "hf", "pt": "torch", "pth": "torch"}


def _parse_format(text: str) -> ExportFormat:
    try:
        return ExportFormat(text)
    except ValueError:
        meant = _FORMATS_BY_OTHER_NAMES.get(text.strip("."), text.lower())
        hint = did_you_mean(meant, list(ExportFormat))
        raise typer.BadParameter(
            f"{text!r} is not one of 'hf', 'torch', 'dcp'{f'; {hint}' if hint else '.'}"
        ) from None


def register(app: typer.Typer) -> None:
    for command in (cp, convert, export):
        app.command()(command)


def cp(
    source: Annotated[str, typer.Argument(help="A snapshot's path or URL.", metavar="SRC")],
    to: Annotated[
        str,
        typer.Argument(
            help="Path or URL of the copy itself, not of the folder above it.", metavar="DST"
        ),
    ],
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace an existing snapshot or export at DST. If it is the same snapshot, "
            "compare sizes, not bytes.",
        ),
    ] = False,
    all: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Copy each snapshot in the folder SRC, such as a run, with pins and metrics, to "
            "the folder DST. Snapshots that are already there are not sent again.",
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON, a line per event; with --all, per snapshot."),
    ] = False,
    src_option: SourceOption = None,
    dst_option: TargetOption = None,
    option: BothOption = None,
) -> None:
    """Copy a snapshot, or continue an interrupted copy. Other formats are converted."""
    with errors(interrupted="interrupted; run the command again to continue"):
        source_there, target = both_sides(source, to, src_option, dst_option, option)
        if all:
            _copy_all(source_there, target, (source, to), overwrite=overwrite, as_json=as_json)
            return
        _refuse_folder(target, to, may_have_files=overwrite)
        with progress("copying") as update:

            def show(event: CopyEvent) -> None:
                update(event.done_bytes, event.total_bytes)
                if as_json and event.kind is not CopyEventKind.MOVED:
                    sys.stdout.write(json.dumps(msgspec.to_builtins(event)) + "\n")
                    sys.stdout.flush()

            with advising(_COPY_A_RUN):
                report = run(copying.copy(source_there, target, overwrite=overwrite, on_event=show))
        if as_json:
            output.write_lines([json.dumps({"kind": "done", **msgspec.to_builtins(report)})])
        elif report.was_there:
            quoted = shlex.quote(output.one_line(to))
            output.write_lines(
                [
                    f"{to} already holds this snapshot; nothing was changed: all objects exist and "
                    "have the right sizes. `actorsnap verify --full "
                    f"{quoted}` compares their bytes; if it finds damage, delete the copy "
                    f"(`actorsnap rm {quoted}`) and copy again"
                ]
            )
        else:
            output.write_lines([f"copied {_copied_text(report)}"])


def _copied_text(report: CopyReport) -> str:
    objects = output.count_of(report.num_copied, "object", "objects")
    kept = f"; {output.size_text(report.skipped_bytes)} were there" * bool(report.num_skipped)
    return f"{objects}, {output.size_text(report.copied_bytes)}{kept}"


def _copy_all(
    source: Source, to: Location, names: tuple[str, str], *, overwrite: bool, as_json: bool
) -> None:
    """Copies every snapshot in a folder, oldest step first. Exit code 4 if one was not copied."""
    _refuse_source(source.location, to, names)
    target = Source(to, options())
    failed: dict[str, StorageError] = {}
    found = run(maintenance.find_snapshots(source, failed=failed))
    if not (found or failed):
        raise_empty(names[0], source)
    if run(target.perform("look", _is_taken)):
        raise UsageError(f"{names[1]} is a snapshot: with --all, name the folder of the copies")
    _refuse_inside(to, names[1])
    # Before the steps: without them, a manager there would not know what continued what.
    run(copy_records(source, target))
    remedies: Counter[str] = Counter()
    num_there = 0
    in_order = sorted({*found, *failed}, key=maintenance.natural_order)
    for num_seen, name in enumerate(in_order, 1):
        if found.get(name, "failed") is None:
            _print_copy(name, "unfinished", "not copied", {}, as_json)
            path = f"{names[0].rstrip('/')}/{name}"
            state, why = why_unfinished(source.below(name), path)
            if state == "complete":
                err.print(quote(output.visible(f"{name} is {state}, but not copied: {why}")))
            continue
        try:
            report = _copy_quietly(
                source.below(name), target.below(name).location, overwrite, f"copying {name}"
            )
        except (FormatError, StorageError) as error:
            what, remedy = _failure(error, names[0])
            remedies[remedy] += 1
            _print_copy(name, "failed", what, {}, as_json)
            if isinstance(error, StorageError) and is_unreachable(error):
                left = in_order[num_seen:]
                for name in left if as_json else ():
                    _print_copy(name, "not looked at", "", {}, as_json)
                print_stop(left)
                break
            continue
        num_there += 1
        state = "was there" if report.was_there else "copied"
        text = "" if report.was_there else _copied_text(report)
        _print_copy(name, state, text, msgspec.to_builtins(report), as_json)
    for remedy, number in remedies.items():
        text = output.count_of(number, "snapshot was", "snapshots were")
        err.print(f"[red]{text} not copied[/]; {quote(output.visible(remedy))}")
    if remedies:
        raise typer.Exit(4)
    if not num_there:
        print_error(no_snapshot(names[0]))
        raise typer.Exit(3)


def _failure(error: FormatError | StorageError, root: str) -> tuple[str, str]:
    """Returns why a snapshot was not copied, and the remedy."""
    if isinstance(error, ChecksumMismatch) and error.detail.startswith(SOURCE):
        command = f"verify --all --full {shlex.quote(output.one_line(root))}"
        text = f"{type(error).__name__}: {damage_of(error)}"
        return text, f"the source is damaged: `actorsnap {command}` lists all damage"
    if isinstance(error, StorageError) and error.retryable:
        return describe(error), "run the command again to continue"
    return describe(error), "remove the cause, then run the command again"


def _refuse_source(source: Location, to: Location, names: tuple[str, str]) -> None:
    """Refuses to copy a folder to itself, or into itself."""
    here, there = source.canonical, to.canonical
    if here.startswith("/") and there.startswith("/"):
        here, there = os.path.realpath(here), os.path.realpath(there)
    elif source.storage_options != to.storage_options:
        return  # maybe another server
    if f"{there}/".startswith(f"{here.rstrip('/')}/"):
        what = "is the source" if there == here else f"is inside the source {names[0]}"
        raise UsageError(f"{names[1]} {what}: name another folder for the copies")


def _copy_quietly(source: Source, to: Location, overwrite: bool, what: str) -> CopyReport:
    """Copies a snapshot, with a bar but without events."""
    with progress(what) as update:
        return run(
            copying.copy(
                source,
                to,
                overwrite=overwrite,
                on_event=lambda event: update(event.done_bytes, event.total_bytes),
            )
        )


def _print_copy(name: str, state: str, detail: str, report: Mapping[str, Any], json_: bool) -> None:
    if json_:
        more = report or {"detail": detail}
        output.write_lines([json.dumps({"name": name, "state": state, **more})])
    else:
        output.print_columns([[name, state, *[detail] * bool(detail)]])
    sys.stdout.flush()


def _refuse_folder(target: Location, to: str, *, may_have_files: bool) -> None:
    """Refuses a folder of snapshots or other files, and one inside a snapshot: the copy would be
    mixed with them.
    """
    there = Source(target, options())
    try:
        found = run(maintenance.find_snapshots(there, failed={}))
        names = [name for name, commit in found.items() if isinstance(commit, Commit)]
        what = "snapshots"
        if not names and not may_have_files:
            names, what = run(there.perform("list", _find_other_file)), "other files"
        if run(there.perform("look", _is_taken)):
            return
        _refuse_inside(target, to)
    except (FormatError, StorageError):
        return  # the copy reports it
    if not names:
        return
    raise UsageError(
        f"{to} has {what} in it, such as {output.one_line(names[0])}: name the copy itself, as in "
        f"{to.rstrip('/')}/NAME"
    )


def _refuse_inside(target: Location, to: str) -> None:
    above = folder_and_name(target.url)
    if above is not None:
        parent = Source(replace(target, url=above[0], display_url=above[0]), options())
        if run(parent.perform("look", _is_taken)):
            raise UsageError(
                f"{to} is in a snapshot, which would contain the copy: choose another place"
            )


async def _find_other_file(opened: OpenSource) -> list[str]:
    """Returns one of the first objects that no snapshot's writer has stored, if any."""
    num_seen = 0
    async for info in opened.storage.list(""):
        if not is_of_snapshot(info.key):
            return [info.key]
        num_seen += 1
        if num_seen >= _MAX_LOOKED_AT:
            break
    return []


async def _is_taken(opened: OpenSource) -> bool:
    """Returns whether there is a commit object, intact or not."""
    try:
        return await find_commit(opened.storage) is not None
    except FormatError:
        return True


def convert(
    source: Annotated[str, typer.Argument(help="A checkpoint's path or URL.", metavar="SRC")],
    to: Annotated[str, typer.Argument(help="Path or URL of the new snapshot.", metavar="DST")],
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
    src_option: SourceOption = None,
    dst_option: TargetOption = None,
    option: BothOption = None,
) -> None:
    """Convert a checkpoint of torch.save, DCP, torchsnapshot or Hugging Face.

    Works like `cp`, and prints a summary.
    """
    with errors(interrupted="interrupted; run the command again to continue"):
        source_there, target = both_sides(source, to, src_option, dst_option, option)
        commit = run(reading.load_commit(source_there))
        _copy_quietly(source_there, target, overwrite, "converting")
        num_tensors = num_values = num_bytes = 0

        def count(_: Commit, manifest: RankManifest) -> None:
            nonlocal num_tensors, num_values, num_bytes
            for entry in manifest.entries:
                is_tensor = isinstance(entry, TensorEntry | ViewEntry | CompositeEntry)
                num_tensors += is_tensor and "@" not in entry.path
                num_values += isinstance(entry, ValueEntry | BytesEntry)
                if isinstance(entry, TensorEntry | BytesEntry):
                    num_bytes += entry.data.stop - entry.data.start

        copied = Source(target, options())
        run(reading.each_manifest(copied, count))
        if as_json:
            output.print_json(
                {
                    "url": copied.location.url,
                    "format": format_of(commit),
                    "num_tensors": num_tensors,
                    "num_values": num_values,
                    "nbytes": num_bytes,
                }
            )
            return
        tensors = output.count_of(num_tensors, "tensor", "tensors")
        values = output.count_of(num_values, "value", "values")
        since = "from now on " if commit.version == NOT_OURS else ""
        output.write_lines(
            [
                f"read {source}: {format_of(commit)}",
                f"wrote {to}: {tensors}, {values}, {output.size_text(num_bytes)}; nothing was "
                "refused or left out",
                f"{since}every byte has a checksum: restores compare them, and so does "
                f"`actorsnap verify --full {shlex.quote(output.one_line(to))}`",
            ]
        )


def export(
    source: Annotated[str, typer.Argument(help="A snapshot's path or URL.", metavar="SRC")],
    to: Annotated[str, typer.Argument(help="A folder, or a file for --to torch.", metavar="DST")],
    format: Annotated[
        ExportFormat,
        typer.Option(
            "--to",
            parser=_parse_format,
            autocompletion=lambda: [*ExportFormat],
            metavar="FORMAT",
            help="hf: safetensors files for from_pretrained; torch: a file for torch.load; dcp: a "
            "folder for torch.distributed.checkpoint.load.",
        ),
    ],
    key: Annotated[
        str | None,
        typer.Option(
            help="Part of the app state to export. Default: model for hf, otherwise everything."
        ),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(metavar="OLD=NEW", help="Replace a prefix of paths. Repeatable."),
    ] = None,
    leave_out: Annotated[
        list[str] | None,
        typer.Option(
            "--leave-out", metavar="PATH", help="Leave out a key or path, such as rng. Repeatable."
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="hf: dtype for floating-point tensors, such as bfloat16.")
    ] = None,
    max_shard_bytes: Annotated[
        int, typer.Option(min=1, metavar="N", help="hf: largest size of the tensors in one file.")
    ] = MAX_SHARD_BYTES,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
    src_option: SourceOption = None,
    dst_option: TargetOption = None,
    option: BothOption = None,
) -> None:
    """Export a snapshot to the format of another program."""
    from actorsnap.interop import exports  # torch
    from actorsnap.sync import Snapshot

    with errors():
        source_there, target = both_sides(source, to, src_option, dst_option, option)
        src_options = source_there.location.storage_options
        snapshot = Snapshot(source, storage_options=src_options, options=options())
        renames = _renames(rename)
        left_out = _RenameWithout(leave_out, renames) if leave_out else None
        common: dict[str, Any] = {
            "rename": renames if left_out is None else left_out,
            "overwrite": overwrite,
            "storage_options": target.storage_options,
            "progress": sys.stderr.isatty(),
        }
        if format is ExportFormat.HF:
            report = snapshot.export_hf(
                to, key, dtype=dtype, max_shard_bytes=max_shard_bytes, **common
            )
        elif dtype is not None or max_shard_bytes != MAX_SHARD_BYTES:
            raise UsageError("--dtype and --max-shard-bytes need --to hf")
        elif format is ExportFormat.TORCH:
            report = exports.export_torch(snapshot, to, key=key, **common)
        else:
            report = exports.export_dcp(snapshot, to, key=key, **common)
        for each in left_out.unused if left_out else ():
            err.print(quote(output.visible(f"--leave-out {each}: the snapshot has no such path")))
        if as_json:
            output.print_json(msgspec.to_builtins(report))
            return
        tensors = output.count_of(report.num_tensors, "tensor", "tensors")
        files = output.count_of(len(report.files), "file", "files")
        output.write_lines([f"exported {tensors} to {files}, {output.size_text(report.nbytes)}"])
        for name, others in report.tied.items():
            err.print(quote(output.visible(f"{', '.join(others)}: tied to {name}, not written")))
        values = [path for path in report.left_out if "/" in path]
        for path in values[:_MAX_LEFT_OUT]:
            err.print(quote(output.visible(f"left out {path!r}: it is not a tensor")))
        if len(values) > _MAX_LEFT_OUT:
            more = output.count_of(len(values) - _MAX_LEFT_OUT, "more value", "more values")
            err.print(f"left out {more}; --json names all")
        for path in sorted({*report.left_out} - {*values}):
            text = f"left out {path!r}: without --key, only 'model' is exported"
            err.print(quote(output.visible(text)))


class _RenameWithout:
    """A rename that leaves out some paths of the snapshot, and gives others new names.

    Attributes:
        unused: Paths to leave out that match no path of the snapshot.
    """

    def __init__(self, paths: Sequence[str], renames: Mapping[str, str] | None) -> None:
        self._paths = [path.strip("/") for path in paths]
        self._change = function_of(renames or {})
        self.unused = dict.fromkeys(self._paths)

    def __call__(self, path: str) -> str | None:
        for each in self._paths:
            if path == each or path.startswith((f"{each}/", f"{each}.")):
                self.unused.pop(each, None)
                return None
        return self._change(path)


def _renames(given: list[str] | None) -> dict[str, str] | None:
    if not given:
        return None
    found: dict[str, str] = {}
    for text in given:
        old, equals, new = text.partition("=")
        if not old or not equals:
            raise UsageError(f"--rename must be OLD=NEW, not {text!r}")
        found[old] = new
    return found
