"""Interface of a transport.

A transport carries messages between the participants (one per rank) and the coordinator of one
save. It keeps the order of messages between two parties, never mixes saves, and knows nothing of
the messages' meaning. It may lose messages after a party is gone. ``receive`` also returns its own
observations, ``PeerLost`` and ``Broken``, in order with the messages.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from actorsnap.protocol.messages import FromCoordinator, ToCoordinator
from actorsnap.protocol.rounds import TakenOver

__all__ = ["Began", "Broken", "CoordinatorEnd", "PeerLost", "ParticipantEnd"]


class Began(msgspec.Struct, frozen=True, kw_only=True):
    """A rank takes part in this save, by its first heartbeat.

    Received once per rank, by the coordinator, before any message of the rank.

    Attributes:
        tag: The tag with which the rank began the save.
    """

    rank: int
    tag: bytes


class PeerLost(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="PeerLost"):
    """A rank that took part in this save has fallen silent. Received once per rank.

    A rank that was never heard, in this save or one before, is not lost: the deadline covers it.

    Attributes:
        rank: The lost rank; at a participant's end always 0, the coordinator's.
        silent_s: Seconds of silence; 0.0 if the rank has sent *bye*.
    """

    rank: int
    silent_s: float


class Broken(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="Broken"):
    """This end has failed. Received once, as the last item.

    Attributes:
        reason: Text for people.
    """

    reason: str


class ParticipantEnd(Protocol):
    """A rank's end."""

    async def send(self, message: ToCoordinator) -> None:
        """Queues a message."""

    async def receive(self) -> FromCoordinator | PeerLost | Broken | TakenOver:
        """Returns the next message. Cancellation: no message is lost."""

    def has_coordinator(self) -> bool:
        """Returns whether rank 0 is known to have begun this save."""


class CoordinatorEnd(Protocol):
    """The coordinator's end."""

    async def send(self, rank: int, message: FromCoordinator) -> None:
        """Queues a message."""

    async def receive(self) -> ToCoordinator | Began | PeerLost | Broken | TakenOver:
        """Returns the next message of any rank. Cancellation: no message is lost."""

    async def absence(self) -> str | None:
        """Returns why the ranks may have given this process up; None if they have no reason to.

        Checks at the time of the call: a process that was stopped does not notice it.
        """
