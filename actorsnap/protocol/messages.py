"""Messages between ranks and the coordinator during a save or a restore.

Between processes they are encoded as msgpack arrays, because one process receives the messages of
thousands of ranks. Within a process they are passed as objects. Both ends are of the same release:
``protocol.save.Joined`` names it, and the coordinator refuses another one. Messages do not name
their attempt: the transport separates saves.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from actorsnap.protocol.failure import Failure
from actorsnap.protocol.labels import Label

__all__ = [
    "Aborted",
    "Absent",
    "Arrived",
    "Ask",
    "AskLabel",
    "Failed",
    "FromCoordinator",
    "Labelled",
    "Proceed",
    "Repeat",
    "ToCoordinator",
]


class _Message(msgspec.Struct, frozen=True, array_like=True):
    pass


# To the coordinator -------------------------------------------------------------------------


class Labelled(_Message, frozen=True, tag="l"):
    """The answer to ``AskLabel``."""

    rank: int
    label: Label


class Arrived(_Message, frozen=True, tag="a"):
    """The rank is ready for ``round`` (``protocol.rounds``).

    Attributes:
        payload: Input of the decision; msgpack.
        num_asked: Number of ``Ask`` messages that the rank has answered in this round.
    """

    rank: int
    round: int
    payload: bytes = b""
    num_asked: int = 0


class Failed(_Message, frozen=True, tag="f"):
    """The rank cannot continue.

    Attributes:
        left: Digest of the label of the call that the rank has left without an answer of rank 0.
    """

    rank: int
    failure: Failure
    left: bytes = b""


# To a rank ----------------------------------------------------------------------------------


class AskLabel(_Message, frozen=True, tag="B"):
    """Send your label: it differs from rank 0's."""


class Absent(_Message, frozen=True, tag="W"):
    """These ranks have not made the call yet."""

    ranks: tuple[int, ...]


class Ask(_Message, frozen=True, tag="Q"):
    """The decision needs more data of this rank, which arrives at the same round again.

    Attributes:
        num_asked: 1 for the first ``Ask`` of the round, then one more each time.
    """

    round: int
    payload: bytes
    num_asked: int


class Proceed(_Message, frozen=True, tag="P"):
    """Every rank has arrived at ``round``.

    Attributes:
        payload: The decision for this rank; msgpack.
        next_round: The next round that this rank takes part in.
        is_last: There is no next round: the call has succeeded.
    """

    round: int
    payload: bytes = b""
    next_round: int = 0
    is_last: bool = False


class Repeat(_Message, frozen=True, tag="R"):
    """Another process continues as the coordinator: send your last message again."""


class Aborted(_Message, frozen=True, tag="X"):
    """The attempt ended without commit.

    Attributes:
        label: Digest of the label of the call that has ended, for a rank that did not make it.
    """

    failure: Failure
    label: bytes = b""


ToCoordinator: TypeAlias = Labelled | Arrived | Failed
FromCoordinator: TypeAlias = AskLabel | Absent | Ask | Proceed | Repeat | Aborted
