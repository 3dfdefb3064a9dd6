"""Identity of this process and its host, and checks of other processes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import socket

import psutil

__all__ = ["host_id", "is_running", "listens_at"]


@functools.cache
def host_id() -> str:
    """8 hex digits for this machine and process namespace, as in attempt names."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        parts.append(file.read().strip())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def is_running(pid: int) -> bool:
    """Returns whether the process is alive; a zombie is not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True  # no permission to check it


def listens_at(port: int) -> bool:
    """Returns whether this process listens at the TCP port."""
    return any(
        connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        for connection in psutil.Process().net_connections(kind="tcp")
    )


os.register_at_fork(after_in_child=host_id.cache_clear)  # the namespace may differ
