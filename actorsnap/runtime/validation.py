"""Checks of arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from actorsnap.errors import UsageError
from actorsnap.format.manifest import check_json
from actorsnap.options import Options, from_env
from actorsnap.runtime.location import Location
from actorsnap.storage.registry import absolute, check_url, without_secrets

__all__ = [
    "AppState",
    "check_flag",
    "check_metadata",
    "check_step",
    "make_location",
    "resolve_options",
]


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
