# SPDX-License-Identifier: Apache-2.0
"""The command that deletes snapshots and garbage: ``rm``."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import msgspec
import typer
from rich.markup import escape as quote

from actorsnap import cli_output as output
from actorsnap.actors.formats import NOT_OURS, format_of
from actorsnap.cli_app import DONE
from actorsnap.cli_calls import (
    JsonOption,
    NotConfirmed,
    Pinned,
    StorageOption,
    advising,
    err,
    errors,
    is_confirmed,
    make_source,
    recover_command,
    run,
)
from actorsnap.errors import (
    AccessDenied,
    ActorSnapError,
    ChecksumMismatch,
    NotASnapshot,
    UsageError,
)
from actorsnap.format.layout import Attempt
from actorsnap.runtime import maintenance, reading
from actorsnap.runtime.roots import find_pins
from actorsnap.runtime.source import Source


def register(app: typer.Typer) -> None:
    app.command()(rm)


def rm(
    context: typer.Context,
    paths: Annotated[
        list[str], typer.Argument(help="Paths or URLs of snapshots.", metavar="PATH...")
    ],
    garbage: Annotated[
        bool,
        typer.Option(
            "--garbage",
            help="Delete only leftovers of unfinished attempts. If there is no commit object, "
            "complete attempts are deleted only after you confirm, or with --yes.",
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Delete pinned steps, too. With --garbage: include attempts that may be running.",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: JsonOption = False,
    option: StorageOption = None,
) -> None:
    """Delete snapshots, or only the garbage at their paths.

    Exit code 5 if anything was left undeleted.
    """
    with errors():
        sources = {path: make_source(path, option) for path in paths}
        for path, source in sources.items():
            _refuse_link(source, path)
        if garbage:
            collected = {
                path: _collect(source, path, force=force, yes=yes, as_json=as_json)
                for path, source in sources.items()
            }
            if as_json:
                output.print_json(
                    [
                        {"path": path, **msgspec.to_builtins(found)}
                        for path, found in collected.items()
                    ]
                )
            if any(found.kept or found.left for found in collected.values()):
                raise typer.Exit(5)
            return
        try:
            if not force:
                for path, source in sources.items():
                    _refuse_pinned(source, path)
            what = [_what_to_delete(source, path) for path, source in sources.items()]
        except (ActorSnapError, Pinned) as error:
            if len(sources) > 1:
                error.add_note("nothing was deleted")
            raise
        if not yes:
            question = f"Delete {what[0]}?"
            if len(what) > 1:
                for each in what:
                    err.print(quote(output.one_line(each)))
                question = f"Delete these {len(what)}?"
            if not is_confirmed(question):
                raise NotConfirmed(
                    "not confirmed, so nothing was deleted; --yes skips the question"
                )
        deleted: list[str] = []
        context.meta[DONE] = {"deleted": deleted}
        for path, source in sources.items():
            try:
                if not force:
                    _refuse_pinned(source, path)  # since the question
                _delete(source, path)
            except (ActorSnapError, Pinned, KeyboardInterrupt) as error:
                others = [each for each in sources if each != path and each not in deleted]
                if others:
                    error.add_note(f"not tried: {', '.join(others)}")
                raise
            deleted.append(path)
            if not as_json:
                output.write_lines([f"deleted {path}"])
                sys.stdout.flush()
        if as_json:
            output.print_json({"deleted": deleted})


def _delete(source: Source, path: str) -> None:
    """Deletes a snapshot. If that is interrupted, names the command that deletes the rest."""
    try:
        with _advising_garbage(source, path):
            run(maintenance.delete(source))
    except NotASnapshot:
        raise
    except (ActorSnapError, KeyboardInterrupt) as error:
        if isinstance(error, AccessDenied) and _is_whole(source):
            error.add_note(f"{path} is unchanged")
            raise
        error.add_note(
            f"the commit object of {path} may be deleted, and its data not: "
            f"{_garbage_command(path)} deletes the rest. For a snapshot that another host has "
            "saved in the last 24 hours, that needs --force, too"
        )
        raise


def _is_whole(source: Source) -> bool:
    """Returns whether the commit object, which is deleted first, is there."""
    try:
        run(reading.load_commit(Source(source.location, source.options)))
    except ActorSnapError:
        return False
    return True


@contextmanager
def _advising_garbage(source: Source, path: str) -> Iterator[None]:
    """Names the command that deletes attempts to the caller who wants them deleted."""
    try:
        yield
    except NotASnapshot as error:
        leftovers = run(maintenance.find_leftovers(source)) if error.found == "unfinished" else []
        if not leftovers:
            raise
        attempts = output.count_of(len(leftovers), "attempt", "attempts")
        raise NotASnapshot(
            key=error.key,
            found=error.found,
            detail=f"there is no commit object, only {attempts}. A save did not end, a copy left "
            f"the commit object out, or an `actorsnap rm` was interrupted or is running. "
            f"{_garbage_command(path)} deletes what is left",
        ) from error


def _garbage_command(path: str) -> str:
    return f"`actorsnap rm --garbage --yes {shlex.quote(output.one_line(path))}`"


def _refuse_link(source: Source, path: str) -> None:
    """Refuses a link, such as a manager's ``latest``: it may point elsewhere by now."""
    folder = source.location.canonical
    if os.path.islink(folder):
        raise UsageError(
            f"{path} is a link to {os.readlink(folder)}, and nothing was deleted: name the "
            "snapshot itself"
        )


def _refuse_pinned(source: Source, path: str) -> None:
    """Raises ``Pinned`` if a pin protects the step now."""
    pins = run(find_pins(source))
    if pins:
        raise Pinned(f"{path} is {', '.join(map(str, pins))}, and stays; unpin it, or use --force")


def _collect(
    source: Source, path: str, *, force: bool, yes: bool, as_json: bool
) -> maintenance.Collected:
    leftovers = run(maintenance.find_leftovers(source))
    folder = quote(output.one_line(path.rstrip("/")))
    for leftover in leftovers:
        state = "complete" if leftover.is_complete else "incomplete"
        size, age = output.size_text(leftover.nbytes), _age_text(leftover.attempt)
        err.print(f"{folder}/{leftover.attempt}  {size}, {age}, {state}")
    complete = [each.attempt for each in leftovers if each.is_complete]
    doomed = [each for each in leftovers if each.is_complete and (each.is_garbage or force)]
    may_delete = yes
    if doomed and not yes and sys.stdin.isatty():
        what = output.count_of(len(doomed), "attempt is", "attempts are")
        err.print(f"{what} complete: {quote(recover_command(path))} makes a snapshot of one again.")
        may_delete = is_confirmed("Delete what is complete, too?")
    deletable = complete if may_delete else []
    report = run(maintenance.collect(source, force=force, deletable=deletable))
    if not report.deleted and not report.kept and not report.left:
        with advising("rm --garbage takes the snapshots' paths, one or several"):
            run(reading.load_commit(source))  # raises if empty
    objects = output.count_of(len(report.deleted), "object", "objects")
    if not as_json:
        output.write_lines([f"deleted {objects} of unfinished attempts at {path}"])
        sys.stdout.flush()
    for attempt in report.left:
        err.print(
            f"left {folder}/{quote(attempt)}, {_age_text(attempt)}: it may be running (see --force)"
        )
    advice = f"{quote(recover_command(path))} makes a snapshot of it again; --yes deletes it"
    if report.is_damaged:
        advice = (
            "The snapshot here is damaged. Move the attempt's folder to another path and run "
            "`actorsnap recover` there; `actorsnap rm` without --garbage deletes all"
        )
    for attempt in report.kept:
        err.print(f"kept {folder}/{quote(attempt)}: it is complete. {advice}")
    return report


def _age_text(name: str) -> str:
    attempt = Attempt.parse(name)
    assert attempt is not None
    return f"{output.age_text(time.time() - attempt.created_s)} old"


def _what_to_delete(source: Source, path: str) -> str:
    """Describes a snapshot to delete. Refuses folders that are not snapshots."""
    try:
        objects = output.DataObjects()
        with _advising_garbage(source, path):
            commit = run(reading.each_manifest(source, lambda _, manifest: objects.add(manifest)))
    except ChecksumMismatch:
        return f"the damaged snapshot {path}"
    if commit.version == NOT_OURS:
        raise UsageError(
            f"{path} is not a snapshot: another program wrote it ({format_of(commit)}), and rm "
            "deletes only snapshots"
        )
    size = output.size_text(objects.nbytes)
    return f"the snapshot {path} ({size}, created {commit.created})"
