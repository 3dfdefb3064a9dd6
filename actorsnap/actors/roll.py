# SPDX-License-Identifier: Apache-2.0
"""Adds the roll call of ``protocol.roll`` to the transport's ends. On the loop only."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence

import anyio

from actorsnap.log import Log
from actorsnap.protocol.failure import Failure, Stage, explain_loss
from actorsnap.protocol.messages import (
    Aborted,
    Absent,
    Arrived,
    AskLabel,
    Failed,
    FromCoordinator,
    Label,
    Labelled,
    Proceed,
    ToCoordinator,
)
from actorsnap.protocol.roll import (
    NO_LABEL,
    REMIND_AFTER_S,
    SETTLE_S,
    RollCall,
    RollState,
    aborted,
    awaiting,
    overdue,
)
from actorsnap.protocol.rounds import TakenOver
from actorsnap.transport.ends import Began, Broken, CoordinatorEnd, ParticipantEnd, PeerLost

logger = Log(__name__)

_EARLIER_S = 0.05
"""Lead over the deadline of the call's actor, which names no absent rank."""

_LISTEN_S = 0.05
"""Time to receive queued messages after the deadline."""

_PATIENCE_S = 3.0
"""Extra wait for rank 0 beyond the deadline; shorter than other limits."""


def _warn(label: Label, rank: int, absent: Sequence[int], *, is_connected: bool = True) -> None:
    logger.warning(
        "snapshot %s rank %d: %s",
        *(label.url, rank, awaiting(label, absent, is_connected=is_connected)),
        extra={"snapshot": label.url, "rank": rank},
    )


class Caller:
    """A rank's end of a call; a ``ParticipantEnd``.

    A rank withdraws if rank 0 has not answered by the deadline, or if it is cancelled or loses rank
    0 before rank 0 has called: nothing was or will be written. If rank 0 calls later, it gets the
    reason. If rank 0 has ended another call that this rank never made, the rank continues with the
    next.

    Args:
        timeout_s, limit: Time from ``begin`` until rank 0 must have answered; name of the option.
        renew: Begins the next call and calls ``move``; returns False if it has begun already.
        is_connected: Returns whether the other ranks can be heard.

    Attributes:
        has_proceeded: All ranks have made the call and passed its first round.
    """

    def __init__(
        self,
        end: ParticipantEnd,
        *,
        rank: int,
        label: Label,
        timeout_s: float,
        limit: str = "timeout_s",
        renew: Callable[[], bool] = lambda: False,
        is_connected: Callable[[], bool] = lambda: True,
    ) -> None:
        self._is_connected = is_connected
        self.has_proceeded = False
        self._end = end
        self._renew = renew
        # Until the first message of rank 0.
        self._sent: list[ToCoordinator] | None = []
        self._rank = rank
        self._label = label
        self._is_waiting = rank > 0
        self._alarms_s = [*REMIND_AFTER_S, timeout_s + _PATIENCE_S]
        self._timeout_s = timeout_s
        self._limit = limit
        self._begun_s = math.inf
        self._absent: Sequence[int] = ()
        self._failure: Failure | None = None
        self._withdrawn: Failure | None = None
        self._listening: anyio.CancelScope | None = None

    def has_coordinator(self) -> bool:
        return self._end.has_coordinator()

    def begin(self, elapsed_s: float = 0.0) -> None:
        self._begun_s = anyio.current_time() - elapsed_s

    def move(self, end: ParticipantEnd) -> None:
        """Continues with the end of the next call."""
        self._end = end

    async def repeat(self) -> None:
        for message in self._sent or ():
            await self._end.send(message)

    async def send(self, message: ToCoordinator) -> None:
        leaves = False
        if isinstance(message, Failed):
            self._failure = message.failure
            is_cancelled = message.failure.stage is Stage.CANCEL
            leaves = is_cancelled and self._is_waiting and not self.has_coordinator()
            if leaves:
                message = Failed(self._rank, message.failure, self._label.digest)
                self._withdrawn = message.failure
        if self._sent is not None:
            self._sent.append(message)
        await self._end.send(message)
        if leaves and self._listening is not None:
            self._listening.cancel()

    def _is_behind(self, ended: bytes) -> bool:
        """Whether this rank has not made the call ``ended``."""
        return self._is_waiting and self._failure is None and ended not in (b"", self._label.digest)

    async def receive(self) -> FromCoordinator | PeerLost | Broken | TakenOver:
        while self._withdrawn is None:
            message: FromCoordinator | PeerLost | Broken | TakenOver | None = None
            end = self._end
            with anyio.CancelScope(deadline=self._alarm_s()) as self._listening:
                try:
                    message = await end.receive()
                except anyio.ClosedResourceError:
                    if end is self._end:
                        raise
                    continue
            match message:
                case None:
                    if self._withdrawn is None:
                        await self._on_alarm()
                case AskLabel():
                    await self._end.send(Labelled(self._rank, self._label))
                case Absent():
                    self._absent = message.ranks
                    _warn(self._label, self._rank, message.ranks)
                case Aborted() if self._is_behind(message.label) and self._renew():
                    await self.repeat()
                case PeerLost() if self._is_waiting and (message.how or not self.has_coordinator()):
                    reason = explain_loss(message.rank, message.silent_s, message.how)
                    reason += f"; it had not called {self._label}"
                    failure = aborted(self._label, reason, 0)
                    left = NO_LABEL if message.how else self._label.digest
                    await self._end.send(Failed(self._rank, failure, left))
                    return Aborted(failure)
                case _:
                    self._is_waiting = False
                    self._sent = None
                    self.has_proceeded = self.has_proceeded or isinstance(message, Proceed)
                    return message
        failure, self._withdrawn, self._is_waiting = self._withdrawn, None, False
        return Aborted(failure)

    def _alarm_s(self) -> float:
        if not self._is_waiting or not self._alarms_s:
            return math.inf
        return max(self._begun_s + min(self._alarms_s), anyio.current_time() + _LISTEN_S)

    async def _on_alarm(self) -> None:
        after_s = min(self._alarms_s)
        self._alarms_s.remove(after_s)
        has_coordinator = self.has_coordinator()
        if after_s > self._timeout_s:
            if self._failure is None:
                absent = self._absent if has_coordinator else [0]
                self._failure = overdue(
                    self._label,
                    absent,
                    self._timeout_s,
                    self._limit,
                    is_connected=self._is_connected(),
                )
            left = b"" if has_coordinator else self._label.digest
            await self._end.send(Failed(self._rank, self._failure, left))
            self._withdrawn = self._failure
        elif not has_coordinator:  # otherwise rank 0 reports the absent ranks
            _warn(self._label, self._rank, [0], is_connected=self._is_connected())


class Roll:
    """The coordinator's end of a call; a ``CoordinatorEnd``.

    If a rank has left another call that rank 0 never made, rank 0 continues with the next.

    Args:
        renew: Begins the next call, sends ``Aborted`` to all other ranks in this one, and calls
            ``move``; returns False if the next call has begun already.
        is_connected: See ``Caller``.
    """

    def __init__(
        self,
        end: CoordinatorEnd,
        *,
        roll_call: RollCall,
        timeout_s: float,
        limit: str = "timeout_s",
        renew: Callable[[Aborted], Awaitable[bool]] | None = None,
        is_connected: Callable[[], bool] = lambda: True,
    ) -> None:
        self._is_connected = is_connected
        self._end = end
        self._renew = renew
        self._roll_call = roll_call
        self._timeout_s = timeout_s
        self._limit = limit
        self._begun_s = math.inf
        self._settled_s = math.inf
        self._has_refused = False

    def begin(self, elapsed_s: float = 0.0) -> None:
        self._begun_s = anyio.current_time() - elapsed_s

    async def suspicion(self) -> str | None:
        return await self._end.suspicion()

    def move(self, end: CoordinatorEnd) -> None:
        self._end = end
        self._roll_call = self._roll_call.renewed()
        self._settled_s = math.inf

    async def send(self, rank: int, message: FromCoordinator) -> None:
        if isinstance(message, Aborted):
            message = Aborted(message.failure, self._roll_call.label_for(rank))
        await self._end.send(rank, message)

    async def _continues(self, message: Failed) -> bool:
        if self._renew is None or message.left in (b"", self._roll_call.label.digest):
            return False
        return await self._renew(Aborted(message.failure, message.left))

    async def receive(self) -> ToCoordinator | PeerLost | Broken | TakenOver:
        """After ``Failed`` for a refused call, returns only ``PeerLost`` and ``Broken``."""
        while True:
            message: ToCoordinator | Began | PeerLost | Broken | TakenOver | None = None
            with anyio.CancelScope(deadline=self._alarm_s()):
                message = await self._end.receive()
            if message is None:
                await self._on_alarm()
            elif passed := await self._filter(message):
                return passed
            refusal = self._roll_call.refusal
            if refusal is not None and not self._has_refused:
                self._has_refused = True
                return Failed(0, refusal)
            if self._roll_call.state is RollState.SETTLING:
                self._settled_s = min(self._settled_s, anyio.current_time() + SETTLE_S)

    async def _filter(
        self, message: ToCoordinator | Began | PeerLost | Broken | TakenOver
    ) -> ToCoordinator | PeerLost | Broken | TakenOver | None:
        roll_call = self._roll_call
        match message:
            case Began(rank=rank, tag=digest):
                if roll_call.on_called(rank, digest):
                    await self._send_own(rank, AskLabel())
            case Labelled(rank, label):
                roll_call.on_labelled(rank, label)
            case Failed(rank, failure) if not roll_call.is_over:
                if not await self._continues(message):
                    roll_call.on_failed(rank, failure)
            case PeerLost(rank=rank, silent_s=silent_s, how=how) if not roll_call.is_over:
                roll_call.on_lost(rank, silent_s, how)
            case PeerLost() | Broken() if roll_call.is_over:
                return message
            case Arrived(rank=rank) if not roll_call.has_called(rank):
                pass  # the rank has left another call, which had this number
            case _ if roll_call.state in (RollState.CALLING, RollState.CALLED):
                return message
            case _:
                pass  # it may belong to another call
        return None

    async def _send_own(self, rank: int, message: FromCoordinator) -> None:
        with anyio.CancelScope(shield=True):
            await self._end.send(rank, message)

    @property
    def _deadline_s(self) -> float:
        return self._begun_s + self._timeout_s - min(_EARLIER_S, self._timeout_s / 2)

    def _alarm_s(self) -> float:
        if self._roll_call.is_over:
            return math.inf
        remind_s = self._begun_s + self._roll_call.remind_after_s
        due_s = min(remind_s, self._settled_s, self._deadline_s)
        return max(due_s, anyio.current_time() + _LISTEN_S)

    async def _on_alarm(self) -> None:
        now = anyio.current_time()
        if now >= self._deadline_s:
            self._roll_call.on_deadline(
                self._timeout_s, self._limit, is_connected=self._is_connected()
            )
        elif now >= self._settled_s:
            self._roll_call.on_settled()
        else:
            absent, waiting = self._roll_call.remind()
            _warn(self._roll_call.label, 0, absent, is_connected=self._is_connected())
            for rank in waiting:
                await self._send_own(rank, Absent(absent))
