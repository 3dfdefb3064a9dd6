"""Byte views, and vectored positional I/O on descriptors.

Turns sequences of views into system calls: flat bytes, at most ``IOV_MAX`` views a call, repeated
after a short transfer. All functions block and are for worker threads. It must not know keys,
errors of the package, or an event loop.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

__all__ = ["IOV_MAX", "copy_into", "flat", "num_bytes", "pread_into", "pwrite_from", "slice_views"]

# The kernel's limit on views per call: 1024 on Linux and macOS.
IOV_MAX = 1024


def flat(views: Sequence[memoryview]) -> list[memoryview]:
    """Returns the same bytes as one-dimensional views of unsigned bytes, without empty ones.

    Raises:
        TypeError: a view is not C-contiguous.
    """
    # Empty views cannot be cast, and a call of empty views looks like the end of the file.
    return [
        view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")
        for view in views
        if view.nbytes
    ]


def num_bytes(views: Sequence[memoryview]) -> int:
    """Returns the bytes of all views together."""
    return sum(view.nbytes for view in views)


def slice_views(views: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    """Returns the bytes ``[start, stop)`` of all views together."""
    found = []
    for view in flat(views):
        if start < view.nbytes and stop > 0:
            found.append(view[max(start, 0) : stop])
        start, stop = start - view.nbytes, stop - view.nbytes
    return found


def copy_into(data: memoryview, views: Sequence[memoryview]) -> int:
    """Fills ``views`` from ``data``, back to back; returns the number of bytes copied."""
    position = 0
    for view in flat(views):
        part = data[position : position + view.nbytes]
        view[: part.nbytes] = part
        position += part.nbytes
    return position


def pread_into(fd: int, offset: int, views: Sequence[memoryview]) -> int:
    """Reads from byte ``offset`` until ``views`` are full or the file ends.

    Returns:
        The number of bytes read; less than the views hold only at the file's end.

    Raises:
        OSError: of ``preadv``. EINTR does not occur: Python repeats the call.
    """
    return _transfer(os.preadv, fd, offset, views)


def pwrite_from(fd: int, offset: int, views: Sequence[memoryview]) -> None:
    """Writes all bytes of ``views``, back to back, at byte ``offset``.

    Raises:
        OSError: of ``pwritev``; bytes written before stay.
    """
    wanted = num_bytes(views)
    written = _transfer(os.pwritev, fd, offset, views)
    if written != wanted:
        raise OSError(errno.EIO, f"the file system took {written} of {wanted} bytes")


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    offset: int,
    views: Sequence[memoryview],
) -> int:
    pending = flat(views)
    pending.reverse()  # so that the next view is popped from the end
    done = 0
    while pending:
        batch = pending[: -IOV_MAX - 1 : -1]
        moved = call(fd, batch, offset + done)
        if moved == 0:
            break
        done += moved
        while pending and moved >= pending[-1].nbytes:
            moved -= pending.pop().nbytes
        if moved:
            pending[-1] = pending[-1][moved:]
    return done
