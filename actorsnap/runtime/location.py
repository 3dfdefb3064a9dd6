# SPDX-License-Identifier: Apache-2.0
"""Locations of snapshots and their storages; checks of arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from actorsnap.errors import StorageError, UsageError
from actorsnap.format.manifest import check_json
from actorsnap.format.steps import MANAGER_FOLDER, StepName
from actorsnap.options import Options, from_env
from actorsnap.protocol.uploader import SentLocation
from actorsnap.runtime.host import Host
from actorsnap.storage.base import RunBlocking, Storage, StorageContext
from actorsnap.storage.registry import (
    absolute,
    canonical,
    check_url,
    find_opener,
    is_ready,
    without_secrets,
)
from actorsnap.storage.wrapper import translate_opening
from actorsnap.wording import printable

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

    @property
    def log_url(self) -> str:
        """``url`` for log lines, without secrets; ``display_url`` may depend on the folder."""
        return printable(without_secrets(self.url) if self.url else self.display_url)

    @property
    def place(self) -> SentLocation:
        """The form for the uploader process."""
        url = self.url.encode("utf-8", "surrogatepass")
        return SentLocation(printable(self.display_url), url, self.storage_options)

    @classmethod
    def at(cls, place: SentLocation) -> Location:
        return cls(
            display_url=place.display_url,
            url=place.url.decode("utf-8", "surrogatepass"),
            storage_options=place.storage_options,
        )


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
    url = location.url
    opener = find_opener(url) if is_ready(url) else await host.run_blocking(find_opener, url)
    blocking = run_blocking or host.run_blocking
    return _open(host, location, opener, fsync, blocking, scratch, on_retry)


def open_ready_location(host: Host, location: Location, *, fsync: bool) -> Storage:
    """``open_location`` for a backend that ``is_ready``."""
    return _open(host, location, find_opener(location.url), fsync, host.run_blocking)


def _open(
    host: Host,
    location: Location,
    opener: Callable[[StorageContext], Storage],
    fsync: bool,
    run_blocking: RunBlocking,
    scratch: str = "",
    on_retry: OnRetry | None = None,
) -> Storage:
    context = StorageContext(
        options=location.storage_options,
        run_blocking=run_blocking,
        run_io=host.run_io,
        durable=fsync,
        on_retry=on_retry,
        scratch=scratch,
    )
    return translate_opening(location.display_url, lambda: opener(context))


AppState: TypeAlias = Mapping[str, Any]
"""``Stateful`` objects by key. Not typed: a type checker infers ``dict[str, object]`` for a dict
display with several classes.
"""


def make_location(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None
) -> Location:
    """Checks path and options.

    Raises:
        UsageError: the path is empty or no path; or the options are no dict.
    """
    url = check_url(path)
    if storage_options is not None and not isinstance(storage_options, Mapping):
        # The value may contain secrets.
        raise UsageError(f"storage_options must be a dict, not {type(storage_options).__name__}")
    return Location(
        display_url=without_secrets(url),
        url=absolute(url),
        storage_options=dict(storage_options or {}),
    )


def check_destination(location: Location) -> None:
    """Refuses local places where a snapshot would get in a manager's way. Blocks.

    Raises:
        UsageError: A link to a step, such as the manager's ``latest``; or the root of a run.
    """
    folder, url = location.canonical, location.display_url
    if not folder.startswith("/"):
        return
    is_link = os.path.islink(folder)
    step = StepName.parse(os.path.basename(os.path.realpath(folder))) if is_link else None
    if step is not None:
        raise UsageError(
            f"{url} is a link to {step}, and a snapshot written there would replace that step of a "
            "run. Choose another path; to replace the step, name it instead of the link"
        )
    if os.path.isdir(f"{folder}/{MANAGER_FOLDER}"):
        raise UsageError(
            f"{url} is the root of a CheckpointManager's run, and a snapshot there would hide the "
            "run's steps. Save with the manager, or to a folder in it, such as "
            f"{url.rstrip('/')}/mine"
        )


def linked_step(path: str) -> StepName | None:
    """Returns the step next to a link that the link points to; None if it is no such link."""
    try:
        return StepName.parse(os.readlink(path))
    except (OSError, ValueError):
        return None


def resolve_options(options: Options | None) -> Options:
    if options is None:
        return from_env()
    if not isinstance(options, Options):
        raise UsageError(f"options must be actorsnap.Options, not {type(options).__name__}")
    return options


def check_flag(name: str, value: object) -> None:
    if type(value) is not bool:
        raise UsageError(f"{name} must be True or False, not {value!r}")


def check_step(step: object) -> int | None:
    if step is None or (type(step) is int and 0 <= step < 1 << 63):
        return step
    raise UsageError(f"step must be an integer of at least 0, or None, not {step!r}")


def check_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    if metadata is not None and not isinstance(metadata, Mapping):
        raise UsageError(f"metadata must be a JSON object, not a {type(metadata).__name__}")
    checked = dict(metadata or {})
    check_json(checked, "metadata")
    try:
        again = msgspec.json.decode(msgspec.json.encode(checked))
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise UsageError(f"metadata must be a JSON object: {error}") from error
    if again != checked:
        raise UsageError(
            "metadata must not change in a JSON round trip: use str keys, lists instead of "
            "tuples, and finite numbers"
        )
    return checked
