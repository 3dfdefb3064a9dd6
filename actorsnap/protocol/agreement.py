# SPDX-License-Identifier: Apache-2.0
"""Agreement of the ranks on the call of ``maybe_save`` that serves a wish of rank 0.

Calls are counted, not steps: all ranks make the same calls. Rank 0 invites all ranks to one round
(``protocol.rounds``). Each arrives with the number of calls that it has entered, and holds its next
call until the answer: the greatest number plus one, or never.

1. No rank can have entered the agreed call: a rank that has arrived enters one more call at most,
and waits in it. So there is no race, regardless of delays.
2. The runtime's thread arrives, so a rank whose trainer waits for other ranks answers too.
3. ``close`` is the last call. After it, a rank answers that it is closed, and nothing is agreed.
4. The answer and its effect are the same on all ranks: each rank knows from the number of the call
whether a save has begun since.

Must not know clocks: their readings are handed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import msgspec

from actorsnap.protocol.failure import Failure, Stage
from actorsnap.wording import named_ranks


class Entered(msgspec.Struct, frozen=True, array_like=True):
    """A rank's payload: the number of calls that it has entered.

    Attributes:
        is_closed: Whether the rank makes no more calls.
    """

    calls: int
    is_closed: bool = False


class Agreed(msgspec.Struct, frozen=True, array_like=True):
    """The decision, for all ranks.

    Attributes:
        at: Number of the call that serves the wishes.
        since: A save begun in this call or later serves them too.
        stops: ``should_stop`` becomes true at that call.
        is_late: A notice leaves no time for a save, also at the end.
    """

    at: int
    since: int
    reason: str
    saves: bool
    stops: bool = False
    is_late: bool = False


class Wish(msgspec.Struct, frozen=True):
    """A save that a policy, a caller or a notice asks for.

    Attributes:
        since: See ``Agreed``.
        until_s: End of a notice's grace, by rank 0's clock.
    """

    reason: str
    since: int
    is_notice: bool = False
    until_s: float = math.inf


HasTime = Callable[[float, int], bool]
"""Returns whether a save can be stored before a time, after this number of calls."""


class Wishes:
    """The wishes that rank 0 has not served yet.

    Args:
        saves_on_notice: A notice asks for a save; False: it only stops the loop.
    """

    def __init__(self, *, saves_on_notice: bool) -> None:
        self._saves_on_notice = saves_on_notice
        self._waiting: list[Wish] = []
        self._has_stopped = False
        self._agreed_at = -1

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple([wish.reason for wish in self._waiting])

    @property
    def has_notice(self) -> bool:
        return any(wish.is_notice for wish in self._waiting)

    @property
    def until_s(self) -> float:
        """The earliest end of a grace."""
        return min([wish.until_s for wish in self._waiting], default=math.inf)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, wish: Wish) -> bool:
        """Returns whether it is new, and no agreed save will serve it.

        Any number of notices make one save.
        """
        if wish.is_notice and self._has_stopped:
            return False
        if not wish.is_notice and wish.since <= self._agreed_at:
            return False
        for number, other in enumerate(self._waiting):
            if (other.reason, other.is_notice) == (wish.reason, wish.is_notice):
                self._waiting[number] = msgspec.structs.replace(
                    other,
                    since=max(other.since, wish.since),
                    until_s=min(other.until_s, wish.until_s),
                )
                return False
        self._waiting.append(wish)
        return True

    def saved(self, call: int) -> None:
        """Drops the wishes that a save begun in ``call`` serves. A notice stays: it also stops."""
        self._waiting = [w for w in self._waiting if w.is_notice or w.since > call]

    def agreed(self, agreed: Agreed, wishes: Iterable[Wish]) -> None:
        """Drops the wishes of an agreement."""
        done = [*wishes]
        self._has_stopped |= any(wish.is_notice for wish in done)
        self._waiting = [
            wish
            for wish in self._waiting
            if wish not in done and not (wish.is_notice and self._has_stopped)
        ]
        if agreed.saves:
            self._agreed_at = agreed.at
            self.saved(agreed.at)

    def decide(
        self, payloads: Mapping[int, Entered], has_time: HasTime
    ) -> tuple[Agreed | Failure, tuple[Wish, ...]]:
        """Returns the decision, and the wishes that it is about.

        Args:
            payloads: Payloads of all ranks.
        """
        wishes = tuple(self._waiting)
        closed = [rank for rank, entered in payloads.items() if entered.is_closed]
        if closed:
            reason = f"the manager was closed on {named_ranks(closed)}"
            return Failure(reason=reason, stage=Stage.JOIN, rank=closed[0]), ()
        counts = [entered.calls for entered in payloads.values()]
        at = max(counts) + 1
        notices = [wish for wish in wishes if wish.is_notice]
        until_s = min([wish.until_s for wish in notices], default=math.inf)
        is_late = not has_time(until_s, at - min(counts))
        to_save = [w for w in wishes if not w.is_notice or self._saves_on_notice]
        return (
            Agreed(
                at=at,
                since=max([wish.since for wish in to_save], default=0),
                reason=", ".join(dict.fromkeys(wish.reason for wish in wishes)),
                saves=bool(to_save) and not is_late,
                stops=bool(notices),
                is_late=is_late,
            ),
            wishes,
        )


class Calls:
    """A rank's count of its calls, and what it has to do in them.

    Two threads use it without a lock. The trainer's counts a call, then looks whether it must hold;
    the runtime's begins to hold, then reads the count. So one of them sees the other.

    Attributes:
        entered: Number of calls that the trainer has entered.
        saved: The last call in which a save was begun; -1: none.
        held: The agreement for whose answer the next call waits; None: no wait.
        should_stop: A notice was served.
        is_late: Nothing is saved any more: a notice left no time.
    """

    __slots__ = ("agreed", "entered", "held", "is_closed", "is_late", "saved", "should_stop")

    def __init__(self) -> None:
        self.entered = 0
        self.saved = -1
        self.is_closed = False
        self.held: int | None = None
        self.agreed: list[Agreed] = []
        self.should_stop = False
        self.is_late = False

    # The trainer's thread

    def enter(self, *, closes: bool = False) -> bool:
        """Counts a call. Returns whether it has something to serve, or must hold first.

        Args:
            closes: It is the last one.
        """
        if closes:
            self.is_closed = True  # before the count, see ``hold``
        self.entered += 1
        return self.held is not None or bool(self.agreed)

    def serve(self) -> str:
        """Returns why the call that was entered has to save; empty if it has not."""
        # Also an earlier call, if the answer came after the rank had given it up.
        due = [each for each in self.agreed if each.at <= self.entered]
        reasons: dict[str, None] = {}
        for each in due:
            self.agreed.remove(each)
            self.should_stop |= each.stops
            self.is_late |= each.is_late
            if each.saves and each.since > self.saved:
                reasons[each.reason] = None
        return ", ".join(reasons)

    # The runtime's thread

    def hold(self, number: int) -> Entered:
        """Makes the next call wait; returns the number of calls entered."""
        self.held = number
        entered = self.entered
        # Read last: a count that includes ``close`` must not look open.
        return Entered(entered, self.is_closed)

    def release(self, number: int) -> None:
        """Lets the next call pass."""
        if self.held == number:
            self.held = None

    def agree(self, agreed: Agreed) -> None:
        """Notes the answer; before ``release``."""
        self.agreed.append(agreed)
