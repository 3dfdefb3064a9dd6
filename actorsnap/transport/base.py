"""What a transport must do.

A transport carries messages between the participants (one per rank) and the coordinator. It
keeps the order of messages between two parties, may lose everything after a party is gone,
and knows nothing of what the messages mean.
"""

from __future__ import annotations

from typing import Protocol

from actorsnap.protocol.messages import FromCoordinator, ToCoordinator

__all__ = ["CoordinatorEnd", "ParticipantEnd"]


class ParticipantEnd(Protocol):
    """A rank's end."""

    async def send(self, message: ToCoordinator) -> None:
        """Hands a message over; returns when it is queued."""

    async def receive(self) -> FromCoordinator:
        """The next message. Cancellation: no message is lost."""


class CoordinatorEnd(Protocol):
    """The coordinator's end."""

    async def send(self, rank: int, message: FromCoordinator) -> None:
        """Hands a message over; returns when it is queued."""

    async def receive(self) -> ToCoordinator:
        """The next message of any rank. Cancellation: no message is lost."""
