# SPDX-License-Identifier: Apache-2.0
"""Marks of snapshots at a root: puts, merges and removes them. See ``format.steps``.

A pin and a deletion can run at the same time. The deletion stores its intent, then lists the marks;
the pin stores its mark, then looks for an intent. So one of the two sees the other: the deletion
spares the snapshot, or the pin waits for the end of the deletion and checks whether the snapshot
still exists.
"""

from __future__ import annotations

import getpass
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

import anyio

from actorsnap.errors import FormatError, ObjectNotFound, StorageError, UsageError
from actorsnap.format.steps import (
    MarkKind,
    MarkName,
    MetricsMark,
    PinMark,
    StepName,
    decode_record,
    encode_record,
    intent_key,
    marks_prefix,
)
from actorsnap.log import Log
from actorsnap.planning.marks import Facts, Pin, StoredMark, facts_of
from actorsnap.runtime.source import MAX_SMALL_READS, OpenSource
from actorsnap.storage.base import ObjectInfo, Storage, for_each

logger = Log(__name__)

_MAX_WAIT_S = 15.0
"""For the end of a deletion that began before a pin."""

_POLL_S = 0.2


class MarksReader:
    """Reads marks. They never change, so each is read once."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._known: dict[str, StoredMark] = {}

    async def read(
        self, opened: OpenSource, listed: Mapping[StepName, Sequence[ObjectInfo]]
    ) -> dict[StepName, Facts]:
        """Returns the facts about each snapshot that has marks."""
        infos = {info.key: info for found in listed.values() for info in found}

        async def read(info: ObjectInfo) -> None:
            name = MarkName.parse(info.key)
            if name is None:
                return
            try:
                data = await opened.storage.get(info.key)
            except ObjectNotFound:
                return
            record: PinMark | MetricsMark
            try:
                if name.kind is MarkKind.METRICS:
                    record = decode_record(data, MetricsMark, info.key)
                else:
                    record = decode_record(data, PinMark, info.key)
            except FormatError as error:
                logger.warning("%s: a damaged mark: %s", self._url, error)
                if name.kind is MarkKind.METRICS:
                    return
                # Somebody wanted to keep the snapshot.
                record = PinMark(reason="an unreadable pin", holder=info.key, created_s=0.0)
            self._known[info.key] = StoredMark(name=name, record=record, stored_s=info.modified_s)

        new = [info for key, info in infos.items() if key not in self._known]
        await for_each(new, read, at_once=2 * MAX_SMALL_READS)
        return {
            name: facts_of([self._known[info.key] for info in found if info.key in self._known])
            for name, found in listed.items()
        }


async def put_metrics(storage: Storage, name: StepName, metrics: Mapping[str, float | str]) -> None:
    """Stores late metrics of a snapshot."""
    record = MetricsMark(metrics=dict(metrics), created_s=time.time())
    await _put(storage, name, MarkKind.METRICS, record)


async def put_pin(
    storage: Storage,
    url: str,
    name: StepName,
    *,
    reason: str,
    holder: str,
    for_s: float | None,
    is_committed: Callable[[], Awaitable[bool]],
) -> Pin:
    """Pins a committed snapshot.

    Args:
        is_committed: Looks for the snapshot.

    Raises:
        UsageError: It is not there, or was deleted at the same time.
        StorageError: A deletion of it began before, and has not ended.
    """
    record = PinMark(reason=reason, holder=holder, created_s=time.time(), for_s=for_s)
    stored = await _put(storage, name, MarkKind.PIN, record)
    try:
        await _wait_for_deletion(storage, url, name)
        if not await is_committed():
            raise UsageError(f"{url}/{name} cannot be pinned: it was deleted")
    except BaseException:
        with anyio.CancelScope(shield=True), suppress(Exception):
            await storage.delete([stored.key])
        raise
    (pin,) = facts_of([StoredMark(name=stored, record=record, stored_s=0.0)]).pins
    return pin


async def _put(
    storage: Storage, name: StepName, kind: MarkKind, record: PinMark | MetricsMark
) -> MarkName:
    found = [MarkName.parse(info.key) async for info in storage.list(marks_prefix(name))]
    number = max([mark.number + 1 for mark in found if mark is not None], default=0)
    mark = MarkName(name, kind, number, secrets.token_hex(8))
    await storage.put(mark.key, [memoryview(encode_record(record))])
    return mark


async def _wait_for_deletion(storage: Storage, url: str, name: StepName) -> None:
    for _ in range(int(_MAX_WAIT_S / _POLL_S)):
        try:
            await storage.stat(intent_key(name))
        except ObjectNotFound:
            return
        await anyio.sleep(_POLL_S)
    raise StorageError(
        op="pin",
        key=str(name),
        backend=url,
        detail="a deletion of it has begun and does not end. If no job deletes there now, "
        "`actorsnap prune ROOT --keep all --yes` ends it; then pin again",
        retryable=True,
    )


def own_holder() -> str:
    """Returns this process for people. May ask a directory service: not on the loop."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):  # no name for this number
        user = str(os.getuid()) if hasattr(os, "getuid") else "unknown"
    return f"{user}@{socket.gethostname()}:{os.getpid()}"
