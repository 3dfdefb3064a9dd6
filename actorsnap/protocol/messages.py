"""What ranks and the coordinator say to each other while a snapshot is taken.

Encoded as msgpack between processes; passed as they are inside one. Both ends are of the
same release: ``Join`` names it, and the coordinator refuses another one. Every message but
the first names the attempt, so that late ones of an older attempt are told apart.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

import msgspec

from actorsnap.format.manifest import ManifestRecord
from actorsnap.planning.packing import Item

__all__ = [
    "Aborted",
    "Assign",
    "Committed",
    "Failed",
    "Failure",
    "FromCoordinator",
    "Join",
    "Stage",
    "Staged",
    "Stored",
    "ToCoordinator",
]


class Stage(StrEnum):
    """Where in a save something failed."""

    CAPTURE = "capture"
    JOIN = "join"
    STAGE = "stage"
    STORE = "store"
    COMMIT = "commit"
    CANCEL = "cancel"


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why an attempt ends without commit; the same on every rank.

    Attributes:
        reason: For people.
        stage: Where it began.
        rank: On which rank, or None.
        key: The object concerned, or None.
        already_exists: The commit lost against another one: reported as ``ObjectExists``.
        may_be_visible: The commit failed in a way that may have left the commit object in
            place. What it names must then stay, or readers would find a broken snapshot.
    """

    reason: str
    stage: Stage
    rank: int | None = None
    key: str | None = None
    already_exists: bool = False
    may_be_visible: bool = False


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="m"):
    pass


class Join(_Message, frozen=True, kw_only=True, tag="join"):
    """A rank takes part. ``inventory`` is in traversal order."""

    rank: int
    release: str
    inventory: tuple[Item, ...]


class Staged(_Message, frozen=True, kw_only=True, tag="staged"):
    """The rank's trainer may overwrite its tensors."""

    attempt: str
    rank: int


class Stored(_Message, frozen=True, kw_only=True, tag="stored"):
    """All objects of the rank and its manifest are durable."""

    attempt: str
    rank: int
    manifest: ManifestRecord


class Failed(_Message, frozen=True, kw_only=True, tag="failed"):
    """The rank cannot go on."""

    attempt: str | None
    rank: int
    failure: Failure


class Assign(_Message, frozen=True, kw_only=True, tag="assign"):
    """What a rank writes: its inventory without the items ``skip`` (indices)."""

    attempt: str
    skip: tuple[int, ...]


class Committed(_Message, frozen=True, kw_only=True, tag="committed"):
    """The snapshot is visible and durable."""

    attempt: str


class Aborted(_Message, frozen=True, kw_only=True, tag="aborted"):
    """The attempt ended without commit."""

    attempt: str
    failure: Failure


ToCoordinator: TypeAlias = Join | Staged | Stored | Failed
FromCoordinator: TypeAlias = Assign | Committed | Aborted
