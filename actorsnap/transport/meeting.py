# SPDX-License-Identifier: Apache-2.0
"""A store with queues for ranks whose own store has none.

Jobs that begin with ``init_method="file://..."`` have a FileStore. The group's rank 0 hosts a
TCPStore, and publishes its address in the FileStore.
"""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from typing import Any

_CONNECT = timedelta(seconds=300)


class Meeting:
    """The store of a group; hosted by its rank 0, as long as this lives.

    Args:
        store: Of the job; has ``get`` and ``set``. Not used once the ranks have met.
        name: Unique at ``store`` and equal on all ranks.
    """

    def __init__(self, store: Any, *, name: str, rank: int) -> None:
        self._store = store
        self._key = f"actorsnap/meeting/{name}"
        self._is_host = rank == 0
        self._server: Any = None
        self._address: tuple[str, int] | None = None
        self._lock = threading.Lock()

    def clone(self) -> Any:
        """Connects; blocks until rank 0 has published its address. Imports torch.

        Raises:
            RuntimeError: No address within the store's timeout, or no answer at the address.
        """
        with self._lock:
            if self._address is None:
                self._address = self._host() if self._is_host else self._find()
                self._store = None
        host, port = self._address
        return _tcp_store(host, port, is_master=False)

    def _host(self) -> tuple[str, int]:
        self._server = _tcp_store("127.0.0.1", 0, is_master=True)
        port = int(self._server.port)
        self._store.set(self._key, f"{socket.gethostname()} {socket.getfqdn()} {port}")
        return "127.0.0.1", port

    def _find(self) -> tuple[str, int]:
        name, address, port = self._store.get(self._key).decode().split()
        return "127.0.0.1" if name == socket.gethostname() else address, int(port)


def _tcp_store(host: str, port: int, *, is_master: bool) -> Any:
    import torch.distributed

    dist: Any = torch.distributed  # the type stubs lack the stores
    return dist.TCPStore(host, port, is_master=is_master, timeout=_CONNECT, wait_for_workers=False)
