"""Lower CPU and disk priority for a thread.

On Linux only: elsewhere a priority applies to the whole process.
"""

from __future__ import annotations

import contextlib
import os
import sys

__all__ = ["lower"]

_NICE = 19
"""Nice value of lowered threads. With two threads on a core, the lowered one gets a seventieth of
the other's time. The kernel derives the I/O priority from it: the lowest of the usual class
(``ioprio_set(2)``)."""


def lower(thread: int) -> None:
    """Lowers the thread with this native id, irreversibly. Does nothing if the system refuses.

    The thread no longer preempts others (``SCHED_BATCH``).
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, _NICE)
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
