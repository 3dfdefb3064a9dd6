# SPDX-License-Identifier: Apache-2.0
"""A store that answers at once."""

from __future__ import annotations

import socket
from typing import Any

import torch.distributed as dist

_dist: Any = dist  # the stubs of its stores are not exported


def serve_store(**options: Any) -> Any:
    """Opens a ``TCPStore`` of this process, at a free port of 127.0.0.1.

    The thread that serves a ``TCPStore`` looks up the name of each client that connects. By itself
    it listens on IPv6, where the name of a local IPv4 client is a question to the machine's
    resolver: a lost answer stops the store, thus all ranks, for 5 s.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    port = listener.getsockname()[1]
    return _dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        **options,
    )
