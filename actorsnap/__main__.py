# SPDX-License-Identifier: Apache-2.0
"""The program ``actorsnap``; also ``python -m actorsnap``."""

from __future__ import annotations

import io
import os
import sys


def main() -> None:
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
    app(prog_name="actorsnap")


if __name__ == "__main__":
    main()
