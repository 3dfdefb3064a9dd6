# SPDX-License-Identifier: Apache-2.0
"""What this process is."""

from __future__ import annotations

import socket

from actorsnap.runtime.process import listens_at


def test_a_server_of_this_process_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert listens_at(port)
        with socket.create_connection(("127.0.0.1", port)) as client:
            assert not listens_at(client.getsockname()[1])
    assert not listens_at(port)
