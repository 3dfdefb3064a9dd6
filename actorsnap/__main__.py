# SPDX-License-Identifier: Apache-2.0
"""The program ``actorsnap``; also ``python -m actorsnap``."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn


def main() -> None:
    _check_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # The encoding may lack characters.
            stream.reconfigure(errors="backslashreplace")
    try:
        from actorsnap.cli_app import COMMANDS, add_outlines, app
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        sys.stderr.write("error: the command needs typer: pip install 'actorsnap[cli]'\n")
        sys.exit(4)
    if COMMANDS.keys() & sys.argv[1:] or "_ACTORSNAP_COMPLETE" in os.environ:
        import actorsnap.cli  # noqa: F401  # adds the commands
    else:
        add_outlines()
    _end(app)


def _check_streams() -> None:
    """Ends if stdout or stderr is closed: the next file that is opened would take its number."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)
    for name in ("stderr", "stdout"):
        if getattr(sys, name) is None:
            if sys.stderr is not None:
                sys.stderr.write(f"error: {name} is closed\n")
            sys.exit(4)


def _end(app: Callable[..., object]) -> NoReturn:
    """Runs the program. A failure to write its output must not look like damage, which is 1."""
    end = SystemExit(0)
    try:
        try:
            app(prog_name="actorsnap")
        except SystemExit as ended:
            end = ended
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
    except OSError as error:
        _discard_output()
        with suppress(OSError):
            sys.stderr.write(f"error: the output cannot be written: {error.strerror}\n")
        end = SystemExit(4)
    raise end


def _discard_output() -> None:
    """Python writes the rest of a buffer when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
