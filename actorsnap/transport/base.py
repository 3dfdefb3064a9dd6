"""What a transport must do.

A transport carries messages between the participants (one per rank) and the coordinator of
one save. It keeps the order of messages between two parties, gives no message of one save to
another, may lose everything after a party is gone, and knows nothing of what the messages
mean. What it notices about the parties themselves comes out of ``receive`` too, in order
with the messages: ``Lost`` and ``Broken``.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from actorsnap.protocol.messages import FromCoordinator, ToCoordinator

__all__ = ["Began", "Broken", "CoordinatorEnd", "Lost", "Moved", "ParticipantEnd"]


class Began(msgspec.Struct, frozen=True, kw_only=True):
    """A rank takes part in this save, as its first heartbeat says. Given once per rank, to the
    coordinator, before any message of the rank.

    Attributes:
        tag: What the rank began the save with.
    """

    rank: int
    tag: bytes


class Lost(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="Lost"):
    """A rank that took part in this save is not heard any more. Given once per rank.

    A rank that was never heard, in this save or one before, is not lost: the deadline is for
    those.

    Attributes:
        rank: Who; at a participant's end always 0, the coordinator's.
        silent_s: For how long; 0.0 if it has taken its leave.
    """

    rank: int
    silent_s: float


class Broken(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="Broken"):
    """This end carries nothing any more. Given once, and nothing comes after it.

    Attributes:
        reason: For people.
    """

    reason: str


class Moved(msgspec.Struct, frozen=True):
    """This end continues an end of another process; messages to or from that one may be lost."""


class ParticipantEnd(Protocol):
    """A rank's end."""

    async def send(self, message: ToCoordinator) -> None:
        """Hands a message over; returns when it is queued."""

    async def receive(self) -> FromCoordinator | Lost | Broken | Moved:
        """The next message. Cancellation: no message is lost."""

    def has_coordinator(self) -> bool:
        """Whether rank 0 has begun this save as well, as far as this end has heard."""


class CoordinatorEnd(Protocol):
    """The coordinator's end."""

    async def send(self, rank: int, message: FromCoordinator) -> None:
        """Hands a message over; returns when it is queued."""

    async def receive(self) -> ToCoordinator | Began | Lost | Broken | Moved:
        """The next message of any rank. Cancellation: no message is lost."""

    async def absence(self) -> str | None:
        """Returns why the ranks may have given this process up; None if they have no reason to.

        Looks now: a process that was stopped does not notice it.
        """
