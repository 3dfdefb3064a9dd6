# SPDX-License-Identifier: Apache-2.0
"""Identities and checks of processes, usable memory and cores."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import psutil


@functools.cache
def host_id() -> str:
    """8 hex digits for this machine and process namespace."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        parts.append(file.read().strip())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def is_running(pid: int) -> bool:
    """A zombie is not running."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True  # no permission


def listens_at(port: int) -> bool:
    return any(
        connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        for connection in psutil.Process().net_connections(kind="tcp")
    )


os.register_at_fork(after_in_child=host_id.cache_clear)  # maybe another namespace


_MAX_DEFAULT_BUDGET = 64 << 30

_LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
"""Ranks on this machine, set by torchrun, Open MPI and Slurm."""


def default_budget_bytes(environ: Mapping[str, str] = os.environ) -> int:
    """Returns this rank's share of 60 % of the free memory, from 64 MiB to 64 GiB.

    The ranks that a launcher starts on one machine have equal shares.
    """
    free = psutil.virtual_memory().available
    limit = cgroup_free_bytes()
    if limit is not None:
        free = min(free, limit)
    share = free * 6 // 10 // _ranks_here(1, environ)
    return max(64 << 20, min(_MAX_DEFAULT_BUDGET, share))


def _ranks_here(unknown: int, environ: Mapping[str, str]) -> int:
    """Returns the number of ranks on this machine by their launcher; else ``unknown``."""
    counts = [environ.get(name, "") for name in _LOCAL_RANKS]
    return next((int(text) for text in counts if text.isdecimal() and int(text)), unknown)


def cgroup_free_bytes(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Returns the bytes left by this process' cgroup and its parents (v2 or v1).

    Page cache counts as free: the kernel drops it before it refuses memory.

    Args:
        membership: Lists the cgroups of this process.
        root: Mount point of the cgroup folders.

    Returns:
        None without a limit.
    """
    free: list[int] = []
    for folder, is_v2 in _cgroups(membership, root):
        limit_name, usage_name, prefix = (
            ("memory.max", "memory.current", "")
            if is_v2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        )
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / limit_name).read_text())  # "max" raises ValueError: no limit
            used = int((folder / usage_name).read_text())
            cached = _cached_bytes(folder / "memory.stat", prefix)
            free.append(max(0, limit - max(0, used - cached)))
    return min(free, default=None)


def _cgroups(membership: Path, root: Path) -> Iterator[tuple[Path, bool]]:
    """Yields memory cgroups and their parents, and whether they are v2."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        is_v2 = number == "0"
        if not is_v2 and "memory" not in controllers.split(","):
            continue
        mount = root if is_v2 else root / "memory"
        # In a container the path may be the host's, with only the mount's top present.
        inside = PurePosixPath(path.lstrip("/"))
        for folder in (inside, *inside.parents):
            yield mount / folder, is_v2


def _cached_bytes(stat: Path, prefix: str) -> int:
    wanted = {f"{prefix}inactive_file", f"{prefix}active_file"}
    try:
        fields = [line.split() for line in stat.read_text().splitlines()]
        return sum(int(value) for name, value in fields if name in wanted)
    except (OSError, ValueError):
        return 0


def usable_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def has_cores(num_ranks: int, environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether each rank here has a second core.

    Args:
        num_ranks: Number of ranks of the job: all are local unless a launcher sets a number.
    """
    return usable_cores() >= 2 * _ranks_here(num_ranks, environ)
