# SPDX-License-Identifier: Apache-2.0
"""The program ``actorsnap``; also ``python -m actorsnap``.

It imports within ``main``, which catches Ctrl-C.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn


def main() -> None:
    try:
        _main()
    except KeyboardInterrupt:  # while modules are imported; later the commands catch it
        sys.stderr.write("interrupted\n")
        _exit("KeyboardInterrupt", 130)


def _exit(error: str, code: int, message: str = "") -> NoReturn:
    """Exits without the commands' modules; prints the error as JSON if that was asked for."""
    if "--json" in sys.argv:
        from actorsnap.cli_streams import print_json_error

        print_json_error(error, code, message)
    sys.exit(code)


def _main() -> None:
    from actorsnap.cli_streams import prepare_streams
    from actorsnap.release import RELEASE

    prepare_streams()
    try:
        from actorsnap.cli_app import COMMANDS, add_outlines, app
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        if sys.argv[1:] == ["--version"]:
            print(f"actorsnap {RELEASE}")
            sys.exit()
        message = "the command needs typer: pip install 'actorsnap[cli]'"
        sys.stderr.write(f"error: {message}\n")
        _exit("ModuleNotFoundError", 4, message)
    if COMMANDS.keys() & sys.argv[1:] or "_ACTORSNAP_COMPLETE" in os.environ:
        import actorsnap.cli  # noqa: F401  # adds the commands
    else:
        add_outlines()
    _end(app)


def _end(app: Callable[..., object]) -> NoReturn:
    """Runs the program. A failure to write its output must not look like damage, which is 1."""
    from contextlib import suppress

    end = SystemExit(0)
    try:
        try:
            app(prog_name="actorsnap")
        except SystemExit as ended:
            end = ended
        sys.stdout.flush()
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
