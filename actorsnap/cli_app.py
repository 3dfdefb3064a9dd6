# SPDX-License-Identifier: Apache-2.0
"""The program's name, options and commands, without their code.

The modules of the commands take half a second to import. ``--help`` and ``--version`` do not need
them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from actorsnap.cli_streams import print_json_error
from actorsnap.release import RELEASE

COMMANDS: Final[Mapping[str, str]] = {
    "ls": "List the objects of a snapshot, or the snapshots in a folder.",
    "inspect": "Show the contents of a snapshot as a tree with shapes, dtypes and sizes.",
    "verify": "Check that a snapshot is intact. Exit code 1 if it is damaged.",
    "diff": "Compare two snapshots by checksums, without reading data. Exit code 1 if they differ.",
    "cat": "Print one object of a snapshot. Without --raw, long byte strings are truncated.",
    "cp": "Copy a snapshot, or continue an interrupted copy. Other formats are converted.",
    "convert": "Convert a checkpoint of torch.save, DCP, torchsnapshot or Hugging Face.",
    "export": "Export a snapshot to the format of another program.",
    "rm": "Delete snapshots, or only the garbage at their paths.",
    "recover": "Write a lost commit object again, after verifying all checksums. Exit code 1 if "
    "damaged.",
    "trace": "Show how a save or restore spent its time. Pass one file for each rank.",
    "steps": "List the steps of a run. With --keep, show which steps would stay, and why.",
    "prune": "Delete the steps of a run that no policy keeps. Needs --yes.",
    "best": "Print the URL of the step with the best value of a metric. Exit code 3 if no step "
    "has it.",
    "latest": "Print the URL of the newest step of a run. Exit code 3 if there is none.",
    "pin": "Protect a step from deletion.",
    "unpin": "Remove the pins of a step.",
    "record": "Add metrics to a saved step.",
    "save-now": "Ask the job that saves to ROOT to save soon. Its manager needs watch_requests_s.",
}
"""The first line of each command's docstring, in the order of ``--help``."""

EXIT_CODES = {
    0: "done. verify: the snapshot is intact. diff: the snapshots are equal",
    1: "verify, recover: the snapshot is damaged. diff: the snapshots differ",
    2: "bad usage, or no such object",
    3: "no committed snapshot. verify --all: or one lacks only its commit object. best, "
    "--keep best: no step has the metric. rm --garbage: no garbage either",
    4: "the storage failed; the output cannot be written; the destination exists; the snapshot is "
    "damaged (except for verify); a newer release or a package is needed. recover: the commit "
    "object is intact",
    5: "not done, or done only in part. rm: not confirmed, a step is pinned, or attempts remain. "
    "prune: a later run began meanwhile, or the time limit was reached",
    70: "a bug, or out of memory. Prints a traceback",
    130: "interrupted",
}

EPILOG = "\n\n".join(
    ["Exit codes:", *[f"{code}: {meaning}" for code, meaning in EXIT_CODES.items()]]
)


DONE: Final = f"{__name__}.done"
"""The key in a context's ``meta`` of the fields that an error's JSON has next to ``error``."""


_OTHER_WAYS: Final[Mapping[tuple[object, object], str]] = {
    ("prune", "--dry-run"): "Without --yes, it only lists the steps that it would delete",
    ("rm", "--dry-run"): "Without --yes, it asks before it deletes",
    ("convert", "--to"): "It writes a snapshot. `actorsnap export --to` writes other formats",
}
"""Hints by a command and an option that it does not have."""


class Commands(TyperGroup):
    """Prints the error that ended a command also as JSON on stdout, with ``--json``."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[__name__] = "--json" in args
        return super().parse_args(ctx, args)

    def make_context(self, info_name: Any, args: list[str], *more: Any, **extra: Any) -> Any:
        is_json = "--json" in args
        try:
            return super().make_context(info_name, args, *more, **extra)
        except KeyboardInterrupt as error:
            end = _interrupted()
            if is_json:
                _print_json(error, end.exit_code)
            raise end from error

    def invoke(self, ctx: Any) -> Any:
        try:
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt as error:  # before or after the command's own handler
                raise _interrupted() from error
        except typer.Exit as end:
            if ctx.meta[__name__] and end.__cause__ is not None:
                _print_json(end.__cause__, end.exit_code, ctx.meta.get(DONE, {}))
            raise
        except Exception as error:
            # Typer brings its own copy of click, or click, and reads arguments by pydantic.
            if isinstance(getattr(error, "message", None), str):
                error.message = error.message.replace("Value error, ", "", 1)  # type: ignore[attr-defined]
                option = getattr(error, "option_name", None)
                if hint := _OTHER_WAYS.get((ctx.invoked_subcommand, option)):
                    error.message += f". {hint}"  # type: ignore[attr-defined]
                    error.possibilities = None  # type: ignore[attr-defined]
            if ctx.meta[__name__] and hasattr(error, "format_message"):
                _print_json(error, getattr(error, "exit_code", 2))
            raise


def _interrupted() -> typer.Exit:
    """Typer exits without a word."""
    sys.stderr.write("interrupted\n")
    return typer.Exit(130)


def _print_json(error: BaseException, code: int, done: Mapping[str, Any] = {}) -> None:
    from actorsnap.errors import ActorSnapError, notes_of, text_of

    message = error.format_message() if hasattr(error, "format_message") else text_of(error)
    fields = error.fields if isinstance(error, ActorSnapError) else {}
    print_json_error(type(error).__name__, code, message, notes_of(error), fields, done)


app = typer.Typer(
    cls=Commands,
    epilog=EPILOG,
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    help="Inspect, verify, compare, copy, convert, export, recover and delete snapshots.",
    pretty_exceptions_enable=False,
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"actorsnap {RELEASE}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def add_outlines() -> None:
    """Adds commands that only have a name and a summary."""
    for name, summary in COMMANDS.items():
        app.command(name, help=summary)(_common)
