# SPDX-License-Identifier: Apache-2.0
"""Calls that rank 0 opens at any time, over the mailboxes of a ``StorePort``.

Ordinary calls are numbered in the order in which the callers make them. Rank 0 numbers invited
calls separately: -2, -3, ... Number -1 marks messages outside of any call. A rank that has not
communicated yet says hello when an invitation comes, or when it has a message.

Invited calls are short: they have a bound in place of heartbeats. Rank 0 refuses messages for a
call that has ended, so a rank that joins late does not wait. On the runtime's loop only.

Ordinary calls may have a topic, too. A rank that leaves a topic does not join later calls about it,
and reports that: rank 0 to all ranks, the others to rank 0.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import anyio

from actorsnap.log import Log
from actorsnap.protocol.failure import Failure, Stage
from actorsnap.protocol.messages import (
    Aborted,
    Arrived,
    Failed,
    FromCoordinator,
    Invite,
    SaveWanted,
    ToCoordinator,
)
from actorsnap.protocol.roll import NO_LABEL
from actorsnap.transport.ends import Message, PeerLost, RelayedEnds

logger = Log(__name__)

NO_CALL = -1

_MAX_KEPT = 16
"""Invitations kept for listeners that come later."""


class Mail(Protocol):
    """The part of a ``StorePort`` that invited calls use."""

    rank: int
    world_size: int

    @property
    def left(self) -> Collection[int]:
        """Ranks that have closed their ports."""
        ...

    def send_up(self, number: int, message: ToCoordinator) -> None: ...
    def send_down(self, to: int, number: int, message: FromCoordinator) -> None: ...

    def on_gone(self, topic: bytes, rank: int, how: str) -> None:
        """The rank has left the topic."""
        ...


class InvitedCall:
    """A rank's part in a call; a ``RelayLink`` of its ends. Close it.

    Attributes:
        deadline: On rank 0: the loop's time at which the bound is over.
    """

    def __init__(self, invitations: Invitations, number: int, bound_s: float) -> None:
        self.number = number
        self.bound_s = bound_s
        self.rank = invitations.rank
        self.world_size = invitations.world_size
        self.ends = RelayedEnds(self, rank=self.rank)
        self._invitations = invitations
        self.deadline = math.inf

    def post(self, to: int | None, message: Message) -> None:
        if self.rank == (to or 0):
            self.ends.put(to is None, message)
        else:
            self._invitations.send(to, self.number, message)

    async def suspicion(self) -> str | None:
        """Rank 0 may have been stopped while the others gave it up."""
        if anyio.current_time() <= self.deadline:
            return None
        return f"rank 0 was stopped: {self.bound_s:g} s are over"

    def close(self) -> None:
        self._invitations.end(self)
        self.ends.close()


@dataclass(frozen=True, slots=True)
class Listener:
    """Receives what concerns a topic.

    Attributes:
        invited: Called on ranks other than 0; closes the call.
        wanted: Called on rank 0.
    """

    invited: Callable[[InvitedCall], None]
    wanted: Callable[[SaveWanted], None]


class Invitations:
    """The invited calls of one port."""

    def __init__(self, mail: Mail) -> None:
        self.rank = mail.rank
        self.world_size = mail.world_size
        self._mail = mail
        self._open: dict[int, InvitedCall] = {}
        self._listeners: dict[bytes, Listener] = {}
        self._kept: deque[tuple[int, Invite] | SaveWanted] = deque(maxlen=_MAX_KEPT)
        # By topic: the ranks that have left it, and how. None: this rank has.
        self._gone: dict[bytes, dict[int, str] | None] = {}
        self._last = NO_CALL
        self._missed = NO_CALL  # the last failed save that this rank was told of
        self._broken: str | None = None
        self._num_topics: dict[str, int] = {}

    def make_topic(self, name: str) -> bytes:
        """Returns the next topic of this name, equal on ranks that make them in the same order.

        From any thread.
        """
        number = self._num_topics[name] = self._num_topics.get(name, 0) + 1
        return hashlib.blake2b(f"{number} {name}".encode(), digest_size=8).digest()

    def listen(self, topic: bytes, listener: Listener) -> None:
        """Receives messages about ``topic``, also those that came before."""
        self._listeners[topic] = listener
        kept, self._kept = self._kept, deque(maxlen=_MAX_KEPT)
        for each in kept:
            if isinstance(each, SaveWanted):
                self._on_wanted(each)
            else:
                self._on_invite(*each)

    def invite(self, topic: bytes, bound_s: float) -> InvitedCall:
        """Opens a call of all ranks. On rank 0."""
        self._last -= 1
        call = self._begin(self._last, bound_s)
        call.deadline = anyio.current_time() + bound_s
        for rank in range(1, self.world_size):
            self._mail.send_down(rank, call.number, Invite(topic, bound_s))
        for rank in sorted(self._mail.left):
            call.ends.put(True, PeerLost(rank=rank, silent_s=0.0))
        return call

    def want(self, wanted: SaveWanted) -> None:
        """Reports the wish to rank 0. On other ranks."""
        self._mail.send_up(NO_CALL, wanted)

    def leave(self, topic: bytes, how: str) -> None:
        """Informs the ranks that would wait for this one; ``how`` is for messages."""
        self._gone[topic] = None
        failure = Failure(reason=how, stage=Stage.JOIN, rank=self.rank)
        if self.rank:
            self._mail.send_up(NO_CALL, Failed(self.rank, failure, topic))
            return
        for rank in range(1, self.world_size):
            if rank not in self._mail.left:
                self._mail.send_down(rank, NO_CALL, Aborted(failure, topic))

    # For the port

    def gone(self, topic: bytes) -> Mapping[int, str]:
        """Returns the ranks that have left the topic, and how."""
        return self._gone.get(topic) or {}

    def on_message(self, number: int, message: ToCoordinator | FromCoordinator) -> None:
        call = self._open.get(number)
        if isinstance(message, SaveWanted):
            self._on_wanted(message)
        elif isinstance(message, Invite):
            self._on_invite(number, message)
        elif number == NO_CALL and isinstance(message, Failed):
            self._on_gone(message.left, message.rank, message.failure.reason)
        elif number == NO_CALL and isinstance(message, Aborted):
            self._on_gone(message.label, 0, message.failure.reason)
        elif call is not None:
            call.ends.put(isinstance(message, Arrived | Failed), message)
        elif isinstance(message, Arrived):
            failure = Failure(reason="rank 0 has ended the call", stage=Stage.JOIN, rank=0)
            self._mail.send_down(message.rank, number, Aborted(failure))

    def on_early(self, number: int, message: object) -> None:
        """A message of a call that has not begun here: warns of a save that failed without it."""
        match message:
            case Aborted(failure, left) | Failed(_, failure, left):
                if left == NO_LABEL and failure.error is None and number > self._missed:
                    self._missed = number
                    why = failure.reason
                    logger.warning("rank %d: a save of the other ranks failed: %s", self.rank, why)

    def lose(self, rank: int) -> None:
        """The rank has closed its port, or another process continues as rank 0."""
        for call in [*self._open.values()]:
            call.ends.put(rank != 0, PeerLost(rank=rank, silent_s=0.0))
        if rank == 0:
            self._kept.clear()

    def break_off(self, reason: str) -> None:
        self._broken = reason
        for call in [*self._open.values()]:
            call.ends.break_off(reason)

    # For calls

    def send(self, to: int | None, number: int, message: Message) -> None:
        if to is None:
            self._mail.send_up(number, message)  # type: ignore[arg-type]
        else:
            self._mail.send_down(to, number, message)  # type: ignore[arg-type]

    def end(self, call: InvitedCall) -> None:
        self._open.pop(call.number, None)

    def _begin(self, number: int, bound_s: float) -> InvitedCall:
        call = self._open[number] = InvitedCall(self, number, bound_s)
        if self._broken is not None:
            call.ends.break_off(self._broken)
        return call

    def _on_invite(self, number: int, invite: Invite) -> None:
        listener = self._listeners.get(invite.topic)
        if listener is None:
            self._kept.append((number, invite))
        elif number not in self._open:
            listener.invited(self._begin(number, invite.bound_s))

    def _on_gone(self, topic: bytes, rank: int, how: str) -> None:
        gone = self._gone.setdefault(topic, {})
        if gone is not None:
            gone[rank] = how
            self._mail.on_gone(topic, rank, how)

    def _on_wanted(self, wanted: SaveWanted) -> None:
        listener = self._listeners.get(wanted.topic)
        if listener is None:
            self._kept.append(wanted)
        else:
            listener.wanted(wanted)
