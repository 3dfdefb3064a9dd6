# SPDX-License-Identifier: Apache-2.0
"""The program's streams: none may be closed, and a reader that exits does not end a command.

Imports nothing else from the package, because it runs first.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any


def prepare_streams() -> None:
    _check_streams()
    sys.stdout, sys.stderr = _wrap(sys.stdout), _wrap(sys.stderr)


def print_json_error(
    kind: str,
    code: int,
    message: str,
    notes: Sequence[str] = (),
    fields: Mapping[str, Any] = {},
    done: Mapping[str, Any] = {},
) -> None:
    """Prints the error that ended a command as JSON, on stdout, with what the command had done."""
    found = {"type": kind, "exit_code": code, "message": message, "notes": notes, "fields": fields}
    sys.stdout.write(json.dumps({"error": found, **done}, default=repr) + "\n")
    sys.stdout.flush()


def _check_streams() -> None:
    """Exits if stdout or stderr is closed: the next opened file would get its descriptor."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)
    for name in ("stderr", "stdout"):
        if getattr(sys, name) is None:
            if sys.stderr is not None:
                sys.stderr.write(f"error: {name} is closed\n")
            sys.exit(4)


class _LastingFile(io.FileIO):
    """A stream that drops output once its reader is gone, so that the command continues.

    Otherwise ``rm A B C | head -1`` could end before it has deleted B, and ``verify`` without its
    exit code.
    """

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return memoryview(data).nbytes


def _wrap(stream: Any) -> Any:
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_LastingFile(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors="backslashreplace",  # the encoding may lack characters
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
