# SPDX-License-Identifier: Apache-2.0
"""Requests at a root, for saves of the manager that runs there. On the runtime's loop."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress

from actorsnap.errors import ObjectNotFound, UsageError
from actorsnap.format.requests import (
    REQUESTS_FOLDER,
    RequestRecord,
    check_reason,
    decode_request,
    encode_request,
    request_key,
)
from actorsnap.runtime.host import Host
from actorsnap.runtime.process import host_id
from actorsnap.runtime.roots import Root
from actorsnap.runtime.source import OpenSource

_EXAMPLE = '--reason "before the upgrade"'


async def put_request(opened: OpenSource, reason: str) -> None:
    """Raises UsageError for a bad reason."""
    text = check_reason(reason, _EXAMPLE)
    record = RequestRecord(reason=text, created_s=time.time(), host=host_id())
    key = request_key(secrets.token_hex(8))
    await opened.storage.put_if_absent(key, encode_request(record))


async def take_requests(root: Root) -> list[str]:
    """Returns the reasons and removes the requests. Without requests, only lists the folder."""
    found: list[str] = []
    async with root.source.opened(Host.get(), "look for requests") as opened:
        storage = opened.storage
        keys = [info.key async for info in storage.list(f"{REQUESTS_FOLDER}/")]
        for key in keys:
            # Another manager took it; or it has a reason that `save-now` refuses.
            with suppress(ObjectNotFound, UsageError):
                record = decode_request(bytes(await storage.get(key)))
                if record is not None:
                    found.append(check_reason(record.reason, _EXAMPLE))
        if keys:
            await storage.delete(keys)
    return found
