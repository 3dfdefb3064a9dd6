# SPDX-License-Identifier: Apache-2.0
"""All rows: ``bench/local.py``, ``bench/tracing.py`` and ``bench/compression.py`` in one process,
``bench/ranks.py`` with many, ``bench/cloud.py`` with object stores, ``bench/interference.py``
beside a trainer, ``bench/memory.py``, ``bench/staging.py``, ``bench/gpu.py``, ``bench/manager.py``,
``bench/scale.py`` with thousands of ranks that are not there, ``bench/formats.py`` with checkpoints
of other programs, ``bench/training.py`` with a model of 7B parameters and its optimizer.

Prints one JSON line per row on standard output, progress on standard error.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from bench import (
    cloud,
    compression,
    formats,
    gpu,
    interference,
    local,
    manager,
    memory,
    ranks,
    scale,
    staging,
    tracing,
    training,
)
from bench.local import Setting, child_memory, machine, note
from bench.peers import PEERS

ROWS = (
    local.ROWS
    | ranks.ROWS
    | cloud.ROWS
    | tracing.ROWS
    | compression.ROWS
    | interference.ROWS
    | memory.ROWS
    | staging.ROWS
    | gpu.ROWS
    | manager.ROWS
    | scale.ROWS
    | formats.ROWS
    | training.ROWS
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the Llama-like state")
    parser.add_argument("--repeat", type=int, default=5, help="counted rounds per row")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--dir", nargs="+", choices=["tmpfs", "disk"], default=["tmpfs", "disk"])
    names = [peer.name for peer in PEERS]
    parser.add_argument("--peers", nargs="*", choices=names, default=names)
    parser.add_argument("--tmpfs-dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--disk-dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--small-count", type=int, default=100_000)
    parser.add_argument("--child-memory", help=argparse.SUPPRESS)
    parser.add_argument("--child-cloud-memory", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()

    # So that `finally` and with it the removal of folders also follows a polite kill.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if args.child_memory:
        child_memory(args.child_memory, args.gib, args.tmpfs_dir)
        return
    if args.child_cloud_memory:
        way, url = args.child_cloud_memory
        cloud.child_memory(way, url, args.gib)
        return
    setting = Setting(
        gib=args.gib,
        repeat=args.repeat,
        small_count=args.small_count,
        tmpfs=args.tmpfs_dir,
        disk=args.disk_dir,
        places=tuple(args.dir),
        peers=tuple(args.peers),
    )
    note(machine())
    for name in args.rows:
        ROWS[name](setting)


if __name__ == "__main__":
    main()
