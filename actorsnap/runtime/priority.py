"""How little a thread takes of the CPU and the disk while others want them.

On Linux only: elsewhere a priority is the whole process'.
"""

from __future__ import annotations

import contextlib
import os
import sys

__all__ = ["lower"]

_NICE = 19
"""A seventieth of the time of a thread that was not lowered, where both want the same core. The
kernel takes a thread's I/O priority from it, the lowest of the usual class (``ioprio_set(2)``)."""


def lower(thread: int) -> None:
    """Lowers the thread with this native id; it cannot be undone. Nothing where that is refused.

    Nor does it take a core from who has one (``SCHED_BATCH``).
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, _NICE)
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
