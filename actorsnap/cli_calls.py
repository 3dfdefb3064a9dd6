# SPDX-License-Identifier: Apache-2.0
"""Arguments, calls, errors and exit codes that all commands share."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.markup import escape as quote

from actorsnap import cli_output as output
from actorsnap.errors import (
    ActorSnapError,
    FormatError,
    IncompatibleState,
    MissingPackage,
    NotASnapshot,
    StorageError,
    UnsupportedFormat,
    UsageError,
    notes_of,
)
from actorsnap.format.foreign import CONTAINS_SNAPSHOTS
from actorsnap.options import Options, from_env
from actorsnap.runtime import maintenance, reading
from actorsnap.runtime.bars import Amount, Display
from actorsnap.runtime.host import Host, Script
from actorsnap.runtime.location import Location, make_location, open_location
from actorsnap.runtime.roots import Root
from actorsnap.runtime.script import run_sync
from actorsnap.runtime.source import Source
from actorsnap.storage.registry import canonical, check_url

T = TypeVar("T")

_TIMEOUT, _DAY_S = "ACTORSNAP_TIMEOUT_S", "86400"
"""The variable of the time limit, and the largest one, which is the default of commands."""

err = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, including errors.")]
PathArgument = Annotated[str, typer.Argument(help="A snapshot's path or URL.", metavar="PATH")]
StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="KEY=VALUE",
        help="Storage option. Repeatable. VALUE may be JSON.",
    ),
]


class NothingFound(Exception):
    """The object of the command does not exist."""


class NotConfirmed(Exception):
    """The user did not confirm."""


class Pinned(Exception):
    """A pin protects a step from the deletion."""


def options() -> Options:
    # Large snapshots take hours. Ctrl-C ends the command.
    return from_env({_TIMEOUT: _DAY_S, **os.environ})


def make_source(path: str, option: list[str] | None) -> Source:
    location = make_location(path, parse_storage_options(option))
    return Source(location, options())


def parse_storage_options(given: list[str] | None, flag: str = "--option") -> dict[str, Any]:
    """Parses the options.

    Raises:
        UsageError: An option is not ``key=value``. Only a name is repeated: the rest may be secret.
    """
    found: dict[str, Any] = {}
    for text in given or ():
        key, equals, value = text.partition("=")
        if not key or not equals:
            name = text if re.fullmatch("[a-z_]{1,32}", text) else ""
            raise UsageError(f"{flag}{f' {name}' * bool(name)}: write KEY=VALUE")
        if key in found:
            raise UsageError(f"the storage option {key!r} is given twice")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def run(script: Script[T]) -> T:
    return run_sync(script, name="cli")


@contextmanager
def errors(damaged: int = 4, *, interrupted: str = "interrupted") -> Iterator[None]:
    """Turns errors into a line and an exit code, and keeps them as its cause.

    Args:
        damaged: Exit code for damage.
        interrupted: Text to print after Ctrl-C.
    """
    try:
        yield
        sys.stdout.flush()
    except (NothingFound, NotConfirmed, Pinned) as error:
        print_error("\n".join([str(error), *getattr(error, "__notes__", ())]))
        raise typer.Exit(3 if isinstance(error, NothingFound) else 5) from error
    except ActorSnapError as error:
        text = output.visible("\n".join([str(error), *getattr(error, "__notes__", ())]))
        if isinstance(error, UsageError) and "allow_pickle" in text:
            text += "\nOn the command line: set ACTORSNAP_ALLOW_PICKLE=true"
        elif isinstance(error, StorageError) and "Options.timeout_s" in text:
            text += f"\nOn the command line: set {_TIMEOUT}, in seconds (default: {_DAY_S}, a day)"
        print_error(text)
        raise typer.Exit(_exit_code(error, damaged)) from error
    except KeyboardInterrupt as error:
        err.print(quote(output.visible("\n".join([interrupted, *notes_of(error)]))))
        raise typer.Exit(130) from error
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if isinstance(error, OSError) and _is_of_output(error):
            raise  # to the program's end
        # Python would exit with 1, which scripts take for damage.
        sys.stderr.write(output.visible(traceback.format_exc()))
        raise typer.Exit(70) from error


def _is_of_output(error: OSError) -> bool:
    """Returns whether a write of the commands' modules failed: they only write to stdout."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith("actorsnap.cli")


def recover_command(path: str) -> str:
    """Returns the command that writes a lost commit object again, for a message."""
    return f"`actorsnap recover {shlex.quote(output.one_line(path))}`"


def require_folder(root: str) -> None:
    """Raises ``NothingFound`` if a local root does not exist: its name may be misspelled."""
    folder = canonical(check_url(root))
    if folder.startswith("/") and not os.path.lexists(folder):
        raise NothingFound(f"{root} does not exist: check the path")


@contextmanager
def opened_root(path: str, option: list[str] | None) -> Iterator[Root]:
    require_folder(path)
    root = Root(make_location(path, parse_storage_options(option)), options())
    try:
        yield root
    finally:
        run(_close(root))


def _close(root: Root) -> Script[None]:
    yield lambda _: root.source.close()


def why_unfinished(source: Source, path: str) -> tuple[str, str]:
    """Returns the state of a folder without a commit object, and the reason or the remedy."""
    if any(leftover.is_complete for leftover in run(maintenance.find_leftovers(source))):
        # A complete attempt may be a snapshot that lost its commit object.
        return "complete", (
            f"only the commit object is missing; {recover_command(path)} writes it again. If this "
            "is a run's newest step, do it before you restart the job"
        )
    return "unfinished", "a save is in progress, or did not end"


def no_snapshot(root: str) -> str:
    return f"{root} has no committed snapshot"


def raise_empty(root: str, source: Source) -> NoReturn:
    """Raises ``NothingFound`` for a folder without snapshots, and says where some are."""
    require_folder(root)
    try:
        run(reading.load_commit(source))
    except NotASnapshot as error:
        further_down = ""
        if error.detail.startswith(CONTAINS_SNAPSHOTS):
            names = error.detail.removeprefix(CONTAINS_SNAPSHOTS)
            further_down = f" directly in it; there are some further down: {names}"
        raise NothingFound(no_snapshot(root) + further_down) from error
    raise NothingFound(f"{root} is one snapshot, not a folder of them: leave out --all")


def print_stop(names: Sequence[str]) -> None:
    """Reports that a command does not look at these snapshots."""
    if names:
        number = output.count_of(len(names), "snapshot was", "snapshots were")
        text = f"stopped: the storage cannot be reached; {number} not looked at, from {names[0]} on"
        err.print(quote(output.visible(text)))


def print_error(text: str) -> None:
    """Prints an error for people, on stderr."""
    err.print(f"[red]error:[/] {quote(output.visible(text))}")


def is_confirmed(question: str) -> bool:
    """Asks the user. The end of the input counts as a no. Ctrl-C is raised."""
    try:
        return typer.confirm(question, err=True)
    except typer.Abort as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        sys.stderr.write("\n")
        return False


def _exit_code(error: ActorSnapError, damaged: int) -> int:
    match error:
        case MissingPackage():
            return 4
        case UsageError():
            return 2
        case NotASnapshot() | IncompatibleState():
            return 3
        case UnsupportedFormat():
            return 4
        case FormatError():
            return damaged
    return 4


class Bar(Display):
    """A progress bar. Can be called from any thread."""

    def __init__(self, what: str) -> None:
        self._amount = Amount(what, 0, 0)
        super().__init__(lambda: [self._amount], has_lines=False)

    def __call__(self, done: int, total: int) -> None:
        self._amount = self._amount._replace(done_bytes=done, total_bytes=total)

    def close(self) -> None:
        """Removes the bar before the end of the call, so that output can be printed."""
        self.__exit__()


def progress(what: str) -> Bar:
    """Returns a bar for a ``with`` statement, shown if stderr is a terminal."""
    return Bar(what)


@contextmanager
def advising(advice: str) -> Iterator[None]:
    """Adds the advice to the error for a folder of snapshots."""
    try:
        yield
    except NotASnapshot as error:
        if CONTAINS_SNAPSHOTS in error.detail:
            error.add_note(advice)
        raise


def both_sides(
    source: str,
    to: str,
    src_option: list[str] | None,
    dst_option: list[str] | None,
    option: list[str] | None,
    flags: tuple[str, str] = ("--src-option", "--dst-option"),
) -> tuple[Source, Location]:
    """Returns where a command reads and where it writes, or what it compares.

    Local paths take no options: ``option`` is for the other side.

    Raises:
        UsageError: A storage does not take its options. Raised before any I/O.
    """
    both = parse_storage_options(option)
    own = parse_storage_options(src_option, flags[0]), parse_storage_options(dst_option, flags[1])
    are_local = [_is_local(source), _is_local(to)]
    left, right = [
        make_location(url, given if is_local and not all(are_local) else both | given)
        for url, given, is_local in zip((source, to), own, are_local, strict=True)
    ]
    run(_check_options(left, right))
    return Source(left, options()), right


def _is_local(url: str) -> bool:
    return canonical(check_url(url)).startswith("/")


def _check_options(*locations: Location) -> Script[None]:
    """Raises ``UsageError`` for options that a storage does not take."""

    async def check(host: Host) -> None:
        for location in locations:
            await (await open_location(host, location, fsync=True)).aclose()

    yield check
