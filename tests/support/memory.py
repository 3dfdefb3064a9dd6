# SPDX-License-Identifier: Apache-2.0
"""Memory of this process, for tests that measure how it grows."""

from __future__ import annotations

import ctypes
import gc

from actorsnap.runtime.host import Host

__all__ = ["return_free_memory"]


def return_free_memory() -> None:
    """Returns free memory to the kernel, so that what is allocated next counts as growth.

    A worker that has run a thousand tests holds hundreds of MiB that are free but resident.
    """
    gc.collect()
    Host.get().resources.arena.trim()
    ctypes.CDLL(None).malloc_trim(0)
