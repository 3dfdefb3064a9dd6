# SPDX-License-Identifier: Apache-2.0
"""Commands that find and repair damage: ``verify`` and ``recover``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import typer
from rich.markup import escape as quote

from actorsnap import cli_output as output
from actorsnap.cli_calls import (
    JsonOption,
    PathArgument,
    StorageOption,
    advising,
    err,
    errors,
    make_source,
    no_snapshot,
    opened_root,
    print_error,
    print_stop,
    progress,
    raise_empty,
    run,
    why_unfinished,
)
from actorsnap.errors import (
    ActorSnapError,
    FormatError,
    NotASnapshot,
    StorageError,
    UnsupportedFormat,
)
from actorsnap.format.manifest import Commit
from actorsnap.format.steps import MANAGER_FOLDER, StepName
from actorsnap.manager import looking
from actorsnap.runtime import maintenance
from actorsnap.runtime import recover as recovery
from actorsnap.runtime import verify as verification
from actorsnap.runtime.source import Source
from actorsnap.runtime.verify import VerifyReport
from actorsnap.storage.wire import is_unreachable


def register(app: typer.Typer) -> None:
    for command in (verify, recover):
        app.command()(command)


def verify(
    path: PathArgument,
    full: Annotated[
        bool,
        typer.Option(
            "--full", help="Verify all checksums and values. Pickled leaves are not unpickled."
        ),
    ] = False,
    all: Annotated[
        bool, typer.Option("--all", help="Check each snapshot in the folder PATH, such as a run.")
    ] = False,
    as_json: JsonOption = False,
    option: StorageOption = None,
) -> None:
    """Check that a snapshot is intact. Exit code 1 if it is damaged."""
    with errors(damaged=1):
        if all:
            _verify_all(path, full=full, as_json=as_json, option=option)
            return
        source = make_source(path, option)
        report: VerifyReport
        level = "full" if full else "quick"
        advice = f"`actorsnap verify --all {shlex.quote(path)}` checks each of them"
        try:
            with progress("verifying") as update, advising(advice):
                report = run(verification.verify(source, level=level, progress=update))
        except FormatError as error:
            if not as_json or isinstance(error, NotASnapshot | UnsupportedFormat):
                raise
            report = VerifyReport(level=level, num_objects=0, nbytes=0, problems=(error,))
        if as_json:
            problems = [str(problem) for problem in report.problems]
            state = "ok" if report.ok else "damaged"
            document = {"path": path, **output.report_json(report), "state": state}
            document["problems"] = problems
            if report.ok:
                document["num_unused"], document["unused_bytes"] = _unused(source)
            output.print_json(document)
            raise typer.Exit(0 if report.ok else 1)
        if not report.ok:
            output.print_columns([path, "damaged", str(problem)] for problem in report.problems)
            raise typer.Exit(1)
        output.write_lines([f"ok: {', '.join(output.checked_text(report, full=full))}"])
        number, nbytes = _unused(source)
        if number:
            objects = output.count_of(number, "unused object", "unused objects")
            command = f"rm --garbage {shlex.quote(output.one_line(path))}"
            output.write_lines(
                [
                    f"{objects} of other attempts, {output.size_text(nbytes)}: `actorsnap "
                    f"{command}` deletes those of saves that ended"
                ]
            )


def _unused(source: Source) -> tuple[int, int]:
    """Returns number and bytes of unused objects; zeros if they cannot be listed."""
    try:
        return run(maintenance.measure_unused(source))
    except (FormatError, StorageError):  # also of another format
        return 0, 0


def recover(
    path: PathArgument,
    attempt: Annotated[
        str | None, typer.Option(metavar="NAME", help="Attempt to use, if several are complete.")
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Number of ranks that saved, if a development version did not record it.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Recover an attempt that may still be running.")
    ] = False,
    replace_damaged: Annotated[
        bool, typer.Option("--replace-damaged", help="Replace a damaged commit object.")
    ] = False,
    as_json: JsonOption = False,
    option: StorageOption = None,
) -> None:
    """Write a lost commit object again, after verifying all checksums. Exit code 1 if damaged."""
    with errors(damaged=1):
        call = recovery.RecoverCall(
            attempt=attempt, world_size=world_size, force=force, replace_damaged=replace_damaged
        )
        with progress("verifying") as update:
            report = run(recovery.recover(make_source(path, option), call, progress=update))
        if as_json:
            output.print_json(msgspec.to_builtins(report))
        else:
            step = "" if report.step is None else f", step {report.step}"
            output.write_lines(
                [
                    f"recovered {path}: {report.attempt}, world size {report.world_size}{step}",
                    f"{output.count_of(report.num_objects, 'data object', 'data objects')}, "
                    f"{output.size_text(report.nbytes)} compared with checksums",
                ]
            )
        _note_place(path, option)


def _note_place(path: str, option: list[str] | None) -> None:
    """Reports whether a restart of the run continues from the recovered step."""
    root, _, last = path.rstrip("/").rpartition("/")
    name = StepName.parse(last)
    if name is None:
        return
    with suppress(ActorSnapError), opened_root(root or ".", option) as opened:
        infos = run(looking.steps(opened, is_complete=True, failed={}))
        state = next((info.state for info in infos if info.name == name), "")
        in_run = [info.name for info in infos if info.state == "committed"]
        if state == "abandoned":
            text = (
                f"{name} is abandoned: the run has continued from an older step, and no restart "
                f"continues from this one. Snapshot({path!r}) can restore it. To keep a step in "
                "the run, recover it before you restart the job"
            )
        elif in_run and in_run[-1] == name:
            text = (
                f"a restart continues from {name}. A job that has already restored an older step "
                "abandons this one with its next save"
            )
        else:
            return
        err.print(quote(output.visible(text)))


def _verify_all(root: str, *, full: bool, as_json: bool, option: list[str] | None) -> None:
    """Checks every snapshot in a folder, and the records of a run. Exit code 1 if one is damaged, 3
    if there is no snapshot, or one lacks only its commit object.
    """
    failed: dict[str, StorageError] = {}
    found = run(maintenance.find_snapshots(make_source(root, option), failed=failed))
    names = sorted({*found, *failed}, key=maintenance.natural_order)
    checked: list[_Checked] = []
    for name in names:
        if name in failed:
            each = _unreadable(name, failed[name])
        else:
            each = _check(root, name, found[name], full, option)
        checked.append(each)
        if not as_json:
            output.print_columns([[each.name, each.state, *each.details]])
            sys.stdout.flush()
        if each.is_last:
            break
    if not checked:
        raise_empty(root, make_source(root, option))
    left = names[len(checked) :]
    if not left and any(map(StepName.parse, names)):
        records = _check_records(make_source(root, option))
        checked += records
        if not as_json:
            output.print_columns([each.name, each.state, *each.details] for each in records)
            sys.stdout.flush()
    if as_json:
        output.print_json(
            [
                {"name": each.name, **each.checked, "state": each.state, "problems": each.problems}
                for each in [*checked, *[_Checked(name, "not looked at") for name in left]]
            ]
        )
    print_stop(left)
    if any(each.state == "damaged" for each in checked):
        raise typer.Exit(1)
    if any(each.state in ("newer format", "not readable") for each in checked):
        raise typer.Exit(4)
    if not any(each.state == "ok" for each in checked):
        print_error(no_snapshot(root))  # the JSON is complete
        raise typer.Exit(3)
    if any(each.state == "complete" for each in checked):
        raise typer.Exit(3)


@dataclass(frozen=True, slots=True)
class _Checked:
    """The result of checking one snapshot."""

    name: str
    state: str
    details: Sequence[str] = ()
    problems: Sequence[str] = ()
    checked: Mapping[str, Any] = field(default_factory=dict)
    is_last: bool = False  # the storage cannot be reached


def _check(
    root: str, name: str, commit: Commit | FormatError | None, full: bool, option: list[str] | None
) -> _Checked:
    path = f"{root.rstrip('/')}/{name}"
    source = make_source(path, option)
    try:
        if commit is None:
            return _check_unfinished(name, path, source)
        with progress(f"verifying {name}") as update:
            report = run(
                verification.verify(source, level="full", progress=update)
                if full
                else verification.verify(source, level="quick")
            )
    except NotASnapshot:  # deleted meanwhile
        return _Checked(name, "unfinished")
    except FormatError as error:
        return _Checked(name, output.state_of(error), [str(error)], [str(error)])
    except StorageError as error:
        return _unreadable(name, error)
    checked = output.report_json(report)
    problems = [str(problem) for problem in report.problems]
    if problems:
        more = [f"and {len(problems) - 1} more"] if len(problems) > 1 else []
        return _Checked(name, "damaged", [problems[0], *more], problems, checked)
    return _Checked(name, "ok", output.checked_text(report, full=full), checked=checked)


def _check_records(source: Source) -> list[_Checked]:
    """Returns the damaged files of a run next to its steps."""
    try:
        damaged = run(looking.damaged_records(source))
    except StorageError as error:
        return [_unreadable(MANAGER_FOLDER, error)]
    return [_Checked(key, "damaged", [why], [why]) for key, why in damaged.items()]


def _check_unfinished(name: str, path: str, source: Source) -> _Checked:
    state, why = why_unfinished(source, path)
    if state == "unfinished":
        return _Checked(name, state)
    why += ". If an `actorsnap rm` was interrupted, `actorsnap rm --garbage --yes` deletes the rest"
    return _Checked(name, state, [why], [why])


def _unreadable(name: str, error: StorageError) -> _Checked:
    text = [str(error)]
    return _Checked(name, output.state_of(error), text, text, is_last=is_unreachable(error))
