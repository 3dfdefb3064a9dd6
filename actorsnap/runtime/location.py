"""Locations of snapshots, and their storages."""

from __future__ import annotations

from collections.abc import (
    Callable,
)
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from actorsnap.errors import (
    StorageError,
)
from actorsnap.runtime.host import Host
from actorsnap.storage.base import RunBlocking, Storage, StorageContext
from actorsnap.storage.registry import (
    canonical,
    find_opener,
    is_ready,
    open_storage,
)
from actorsnap.storage.wrapper import translate_opening

__all__ = ["Location", "OnRetry", "open_location", "open_ready_location"]

OnRetry: TypeAlias = Callable[[StorageError, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """The location of a snapshot.

    Attributes:
        display_url: Without secrets, for messages.
        url: Independent of the working folder.
    """

    display_url: str
    url: str = field(repr=False)
    storage_options: dict[str, Any] = field(repr=False)  # maybe secret

    @property
    def canonical(self) -> str:
        """The form in which ranks compare places."""
        return canonical(self.url)


async def open_location(
    host: Host,
    location: Location,
    *,
    fsync: bool,
    run_blocking: RunBlocking | None = None,
    scratch: str = "",
    on_retry: OnRetry | None = None,
) -> Storage:
    """Opens the storage, without I/O. Imports backends on a worker thread.

    Args:
        run_blocking: None: the host's.
        scratch, on_retry: See ``StorageContext``.

    Raises:
        UsageError: unknown scheme or option.
        StorageError: another package's factory failed.
    """
    context = _context(host, location, fsync, run_blocking or host.run_blocking, scratch, on_retry)
    if is_ready(location.url):
        return translate_opening(location.display_url, lambda: open_storage(location.url, context))
    opener = await host.run_blocking(find_opener, location.url)
    return translate_opening(location.display_url, lambda: opener(context))


def open_ready_location(host: Host, location: Location, *, fsync: bool) -> Storage:
    """``open_location`` for a backend that ``is_ready``."""
    context = _context(host, location, fsync, host.run_blocking)
    return translate_opening(location.display_url, lambda: open_storage(location.url, context))


def _context(
    host: Host,
    location: Location,
    fsync: bool,
    run_blocking: RunBlocking,
    scratch: str = "",
    on_retry: OnRetry | None = None,
) -> StorageContext:
    return StorageContext(
        options=location.storage_options,
        run_blocking=run_blocking,
        run_io=host.run_io,
        durable=fsync,
        on_retry=on_retry,
        scratch=scratch,
    )
