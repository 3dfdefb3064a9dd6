# SPDX-License-Identifier: Apache-2.0
"""torchsnapshot's measurement of memory: of any code, without a trace."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import psutil


@contextmanager
def measure_rss_deltas(
    rss_deltas: list[int], interval: timedelta = timedelta(milliseconds=100)
) -> Iterator[None]:
    """Appends the growth of the process's resident memory since the start, until the block ends.

    The last value is that of the end, also after an error.

    Args:
        rss_deltas: Gets bytes. ``max(rss_deltas)`` is the peak; a shorter one is missed.
        interval: Time between two values.
    """
    process = psutil.Process()
    base: int = process.memory_info().rss
    has_ended = threading.Event()

    def measure() -> None:
        rss_deltas.append(process.memory_info().rss - base)

    def watch() -> None:
        while not has_ended.wait(interval.total_seconds()):
            measure()

    measure()
    thread = threading.Thread(target=watch, name="actorsnap-rss", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
        measure()
