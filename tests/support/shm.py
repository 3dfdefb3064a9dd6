# SPDX-License-Identifier: Apache-2.0
"""Names of shared memory on this machine."""

from __future__ import annotations

import os

__all__ = ["shared_files"]


def shared_files() -> set[str]:
    """Not folders, where benchmarks beside this test save to."""
    return {entry.name for entry in os.scandir("/dev/shm") if entry.is_file()}
