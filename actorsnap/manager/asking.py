# SPDX-License-Identifier: Apache-2.0
"""A manager's part in agreements: saves that rank 0 decides for all ranks.

The trainer's thread counts its calls; on rank 0 it also asks the policies. A wish becomes an
agreement on the runtime's loop (``actors.agreeing``), without the trainer. A single rank decides
for the call that it is in, without the loop.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import anyio
import msgspec

from actorsnap.actors.agreeing import Agreement, Decide, explain_late
from actorsnap.errors import ActorSnapError, RestoreAborted, UsageError, describe
from actorsnap.format.requests import check_reason
from actorsnap.log import Log
from actorsnap.manager.events import EventBoard, EventKind
from actorsnap.manager.results import Metrics
from actorsnap.options import Options
from actorsnap.planning.cadence import (
    AskedPolicy,
    Improvements,
    SaveCosts,
    SaveHistory,
    SaveNotice,
    SavePolicy,
    parts_of,
)
from actorsnap.protocol.agreement import Agreed, Calls, Entered, Wish, Wishes
from actorsnap.protocol.failure import Failure, Stage, save_aborted
from actorsnap.protocol.messages import CallKind, Failed, Label, SaveWanted
from actorsnap.protocol.rounds import Continue
from actorsnap.runtime.host import Call, Host, Script
from actorsnap.runtime.notices import Notice, Watcher
from actorsnap.runtime.rounds import Rounds, Topic, call_together, fail_next
from actorsnap.runtime.save import Save
from actorsnap.runtime.team import Team, label_of
from actorsnap.transport.invitations import InvitedCall, Listener
from actorsnap.transport.store import StorePort

logger = Log(__name__)

_LEAST_BOUND_S = 1.0
"""Least time that an agreement gets, even at the end of a notice's grace."""

_NOTICE_PAUSE_S = 1.0
"""Time between agreements about a notice. About other wishes: the bound of one."""

_HALF_OF_GRACE = "half of the time that a notice gives"

_EXAMPLE = 'CheckpointManager(..., notices=[notices.signals("SIGTERM")])'


@dataclass(frozen=True, slots=True, kw_only=True)
class AskSettings:
    """Where wishes come from.

    Attributes:
        find: Returns the team of the manager's calls.
        take_requests: Returns and removes the shell's requests at the root.
        watch_requests_s: Interval of looks for them; None: no look.
        options: Of the manager's calls.
        look_at_metrics: Called with those of each step, on rank 0.
        topic: Of the manager's calls.
    """

    find: Callable[[], Team | None]
    take_requests: Callable[[], Awaitable[Sequence[str]]]
    notices: Sequence[Watcher] | None = None
    watch_requests_s: float | None = None
    options: Options
    look_at_metrics: Callable[[Mapping[str, object]], None] = lambda _: None
    topic: Topic = field(default_factory=Topic)


class Asking:
    """The calls of one manager on this rank, and on rank 0 the wishes.

    Attributes:
        improvements: Improvements of rank 0.
        outcome: Outcome of the last agreement, for people.
    """

    def __init__(
        self,
        policy: SavePolicy,
        url: str,
        events: EventBoard,
        settings: AskSettings,
    ) -> None:
        parts = [part for part in parts_of(policy) if isinstance(part, AskedPolicy)]
        has_notice = any(isinstance(part, SaveNotice) for part in parts)
        self._watchers = _checked_watchers(settings.notices)
        # Equal on all ranks; the watchers of a rank may be its own.
        if has_notice and settings.notices is None:
            raise UsageError(f"every.notice() is never due: pass the watchers too, {_EXAMPLE}")
        self.calls = Calls()
        self.improvements = Improvements(policy)
        self.outcome = ""
        self._policies = parts
        self._url = url
        self._events = events
        self._settings = settings
        self._wishes = Wishes(saves_on_notice=has_notice)
        self._costs = SaveCosts()
        self._begun_s = time.monotonic()
        self._num_saves = 0
        self._stored_s = -math.inf
        self._is_saving = False
        self._last_save: Save | None = None
        self._next_s = math.inf
        self._flags: deque[Wish] = deque()
        self._is_watching = False
        self._is_attached = False
        self._decides = False
        self._asks = False
        self._team: Team | None = None
        self._port: StorePort | None = None
        self._host: Host | None = None
        self._topic = b""
        self._agreement: Agreement | None = None
        self._is_negotiating = False
        self._pause: anyio.CancelScope | None = None
        self._call: InvitedCall | None = None
        self._told: dict[str, SaveWanted] = {}
        self._has_left = False
        self._may_agree = True
        self._request_watch: Call[None] | None = None

    # From any thread, also from a signal handler: no lock, no log

    def request(self, reason: str) -> None:
        """Asks for a save in the next call that the ranks agree on.

        Raises:
            UsageError: The reason is not a line of text.
        """
        text = check_reason(reason, 'request("before the upgrade")')
        self._flag(Wish(text, since=self.calls.entered + 1))

    def on_notice(self, notice: Notice) -> None:
        grace_s = notice.grace_s
        until_s = math.inf if grace_s is None else time.monotonic() + grace_s
        try:
            reason = check_reason(notice.reason, "")
        except UsageError:  # of a watcher that the user wrote: the notice counts
            reason = "a notice"
        wish = Wish(reason, since=self.calls.entered, is_notice=True, until_s=until_s)
        self._flag(wish)

    def _flag(self, wish: Wish) -> None:
        self._flags.append(wish)
        if self._port is not None:
            self._run_on_loop(self._collect)

    def _run_on_loop(self, callback: Callable[[], None]) -> None:
        assert self._host is not None
        with suppress(Exception):  # a fork, or the runtime was stopped
            self._host.call_soon(callback)

    # The trainer's thread

    def watch(self) -> None:
        """Starts the watchers, once."""
        if self._is_watching:
            return
        started: list[Watcher] = []
        try:
            for watcher in self._watchers:
                watcher.start(self.on_notice)
                started.append(watcher)
        except BaseException:
            for watcher in started:
                watcher.stop()
            raise
        self._is_watching = True

    def enter(self, metrics: Metrics, *, is_due: bool) -> bool:
        """Counts a call; returns whether ``serve`` has anything to do. Takes microseconds.

        Args:
            is_due: The call saves anyway.
        """
        has_more = self.calls.enter()
        if self._asks:
            self._ask(metrics, is_due=is_due)
        return has_more or not self._is_attached or (self._port is None and bool(self._flags))

    def serve(self, metrics: Metrics = None, *, is_due: bool = False) -> Script[str]:
        """Holds the call if rank 0 asks; returns why it has to save, or ""."""
        if not self._is_attached:
            self._begun_s = time.monotonic()
            self._attach(self._settings.find())
            if self._asks:
                self._ask(metrics, is_due=is_due)
        while self.calls.held is not None:
            yield lambda _: self._wait_for_release()
        if self._port is None:
            self._decide_alone()
        reason = self.calls.serve()
        if reason:
            self._find_next()  # until it begins
        self._costs.leave(time.monotonic())
        return reason

    def _attach(self, team: Team | None) -> None:
        self.watch()
        self._is_attached = True
        self._decides = team is None or team.rank == 0
        # Step policies need no clock.
        self._asks = self._decides and bool(self._policies or self._watchers)
        self._team = team
        if team is not None:
            self._host = Host.get()
            port = team.port
            self._topic = port.invitations.make_topic(self._url)
            listener = _listener(self, self._host)
            self._run_on_loop(lambda: port.invitations.listen(self._topic, listener))
            self._port = port
            self._run_on_loop(self._collect)
        every_s = self._settings.watch_requests_s
        if self._decides:
            self._find_next()
            if every_s is not None and self._request_watch is None:
                self._request_watch = Host.get().submit(self._watch_requests(every_s))

    async def _watch_requests(self, every_s: float) -> None:
        while True:
            try:
                for reason in await self._settings.take_requests():
                    self.request(reason)
            except Exception as error:
                logger.warning("%s: cannot check for requests: %s", self._label, describe(error))
            await anyio.sleep(every_s)

    def _ask(self, metrics: Metrics, *, is_due: bool) -> None:
        """Asks the policies, on rank 0."""
        now = time.monotonic()
        self._costs.enter(now, is_pending=self._is_pending)
        reason = ""
        if now >= self._next_s:
            self._next_s = math.inf  # until a save has begun
            history = self._history
            reason = ", ".join(p.reason for p in self._policies if p.due_s(history) <= now)
        if metrics is not None and self.improvements:
            found = metrics() if callable(metrics) else metrics
            better = self.improvements.judge(found)
            self._settings.look_at_metrics(found)
            reason = ", ".join(filter(None, [reason, better]))
        # Among ranks, the save of this call serves it too.
        if reason and not (is_due and self._port is not None):
            self._flag(Wish(reason, since=self.calls.entered))

    def _decide_alone(self) -> None:
        self._collect()
        if self._wishes:
            entered = Entered(self.calls.entered - 1)
            agreed, wishes = self._wishes.decide({0: entered}, self._has_time)
            assert isinstance(agreed, Agreed)
            self._wishes.agreed(agreed, wishes)
            self.calls.agree(agreed)
            self._note(agreed)

    async def _wait_for_release(self) -> None:
        if self._agreement is not None:
            await self._agreement.released()

    def begin_save(self, step: int, reason: str) -> float:
        """A save begins, on all ranks in the same call; returns the time."""
        if self._is_attached and (team := self._settings.find()) is not self._team:
            self._attach(team)  # the store was replaced
        self._events.post(EventKind.DECIDED, step, reason)
        call = self.calls.saved = self.calls.entered
        if self._port is not None:
            self._run_on_loop(lambda: self._forget(call))
        else:
            self._wishes.saved(call)
        self._begun_s = time.monotonic()
        self._num_saves += 1
        self._is_saving = True
        self._find_next()
        return self._begun_s

    def abandon_save(self, step: int, error: BaseException) -> None:
        """Notes that the save failed before the trainer could continue."""
        self._is_saving = False
        self._events.post(EventKind.FAILED, step, describe(error))
        self._find_next()

    def _forget(self, call: int) -> None:
        self._told.clear()
        self._wishes.saved(call)

    def has_begun(self, save: Save, step: int, begun_s: float) -> None:
        """Notes that the save is staged and the trainer continues."""
        now = time.monotonic()
        self._last_save = save
        self._is_saving = False
        self._costs.staged(now - begun_s)
        self._costs.leave(now)
        if not save.finished.done() or save.finished.exception() is None:
            self._events.post(EventKind.STAGED, step)
        save.finished.add_done_callback(lambda _: self._on_finished(save, step, begun_s))

    def _on_finished(self, save: Save, step: int, begun_s: float) -> None:
        """On any thread."""
        error = save.finished.exception()
        if error is None:
            self._events.post(EventKind.COMMITTED, step)
        else:
            self._events.post(EventKind.FAILED, step, describe(error))
        if self._last_save is save:
            self._stored_s = time.monotonic()
            if error is None:
                self._costs.stored(self._stored_s - begun_s)
            self._find_next()

    def close(self, *, has_failed: bool) -> Script[str]:
        """Enters the last call; returns why it has to save, or "". Call once."""
        if self._is_watching:
            for watcher in self._watchers:
                watcher.stop()
        if self._request_watch is not None:
            self._request_watch.cancel()
        if not self._is_attached:
            return ""
        self.calls.enter(closes=True)
        if not has_failed:
            return (yield from self.serve())
        # A program that ends with an error must not wait for others, nor they for it.
        self._has_left = True
        if self._port is not None:
            self._run_on_loop(self._fail_agreed)
        return ""

    def agree_at_end(self) -> Script[str]:
        """Returns why all ranks save in ``close``, or "": a rank may have a wish alone.

        Fails with a warning if a rank does not come within ``lost_after_s``.
        """
        team = self._settings.find() if self._is_attached else None
        if team is None:
            return ""
        label = Label(CallKind.CLOSE, self._url)

        def body(rounds: Rounds) -> Script[bytes]:
            payload = yield self._wishes_at_end
            return (yield from rounds.arrive(payload))

        try:
            payload = yield from call_together(
                team,
                label,
                self._settings.options,
                _DecisionsAtEnd(self._decide_at_end),
                body,
                topic=self._settings.topic,
                joins_promptly=True,
            )
        except ActorSnapError as error:
            level = logging.WARNING if self.waiting or self.calls.agreed else logging.INFO
            why = error.reason if isinstance(error, RestoreAborted) else describe(error)
            logger.log(level, "%s: closed without the other ranks: %s", self._label, why)
            return ""
        if not payload:
            return ""
        agreed = msgspec.msgpack.decode(payload, type=Agreed)
        self._note(agreed)
        self.calls.agree(msgspec.structs.replace(agreed, at=self.calls.entered))
        return self.calls.serve()

    async def report_unserved(self) -> None:
        """Logs each request for a save that was not met."""
        for reason in self.waiting:
            self._events.post(EventKind.UNSERVED, detail=reason)
            logger.warning(
                "%s: closed without the save that was asked for: %s", self._label, reason
            )

    @property
    def _label(self) -> str:
        return label_of(self._url, self._team)

    @property
    def _is_pending(self) -> bool:
        return self._last_save is not None and not self._last_save.finished.done()

    @property
    def _history(self) -> SaveHistory:
        return SaveHistory(
            begun_s=self._begun_s,
            num_saves=self._num_saves,
            is_pending=self._is_saving or self._is_pending,
            stored_s=self._stored_s,
            cost_s=self._costs.cost_s,
        )

    def _find_next(self) -> None:
        if self._decides:
            history = self._history
            self._next_s = min([p.due_s(history) for p in self._policies], default=math.inf)

    @property
    def due_in_s(self) -> float | None:
        """Seconds until a clock makes a save due; None: none does, or it was asked for already."""
        return None if self._next_s == math.inf else max(0.0, self._next_s - time.monotonic())

    @property
    def waiting(self) -> tuple[str, ...]:
        """Reasons of the saves that were asked for here and have not begun."""
        flags = [wish.reason for wish in [*self._flags]]
        return tuple(dict.fromkeys([*self._wishes.reasons, *[*self._told], *flags]))

    def _has_time(self, until_s: float, num_steps: int) -> bool:
        if until_s == math.inf:
            return True
        now = time.monotonic()
        in_flight_s = now - self._begun_s if self._is_pending else None
        return self._costs.has_time(until_s - now, num_steps=num_steps, in_flight_s=in_flight_s)

    # On the runtime's loop; a single rank's trainer calls some of them

    def _collect(self) -> None:
        """Takes wishes from the threads of this process."""
        while self._flags:
            wish = self._flags.popleft()
            if wish.is_notice and not self.calls.should_stop:
                self._events.post(EventKind.NOTICE, detail=wish.reason)
                logger.warning("%s: notice: %s", self._label, wish.reason)
            if self._decides:
                self._wishes.add(wish)
            else:
                self._tell(wish)
        self._negotiate_soon()

    def _tell(self, wish: Wish) -> None:
        assert self._port is not None
        if wish.reason in self._told:
            return
        left_s = wish.until_s - time.monotonic()
        wanted = self._told[wish.reason] = SaveWanted(
            rank=self._port.rank,
            topic=self._topic,
            reason=wish.reason,
            since=wish.since,
            is_notice=wish.is_notice,
            grace_s=None if left_s == math.inf else max(0.0, left_s),
        )
        if not self.calls.is_closed:  # else it comes with ``close``
            self._port.invitations.want(wanted)

    async def _wishes_at_end(self, _: Host) -> bytes:
        self._collect()
        return msgspec.msgpack.encode([*self._told.values()])

    def _decide_at_end(self, payloads: Mapping[int, bytes]) -> bytes:
        for payload in payloads.values():
            for wanted in msgspec.msgpack.decode(payload, type=list[SaveWanted]):
                self._on_wanted(wanted)
        if not self._wishes:
            return b""
        entered = Entered(self.calls.entered - 1)
        agreed, wishes = self._wishes.decide({0: entered}, self._has_time)
        assert isinstance(agreed, Agreed)
        self._wishes.agreed(agreed, wishes)
        return msgspec.msgpack.encode(agreed)

    def _fail_agreed(self) -> None:
        """After ``close``: the others must not wait for this rank in a call that it never makes."""
        calls, team = self.calls, self._team
        due = [each for each in calls.agreed if each.saves and each.since > calls.saved]
        calls.agreed.clear()
        if due and team is not None:
            reason = "it left the manager with an error before a save that the ranks agreed on"
            fail_next(team, self._settings.options, save_aborted(reason, Stage.JOIN, team.rank))

    def _on_wanted(self, wanted: SaveWanted) -> None:
        grace_s = wanted.grace_s
        wish = Wish(
            f"{wanted.reason} (rank {wanted.rank})",
            wanted.since,
            wanted.is_notice,
            math.inf if grace_s is None else time.monotonic() + grace_s,
        )
        if self._wishes.add(wish) and wish.is_notice:
            self._events.post(EventKind.NOTICE, detail=wish.reason)
        self._negotiate_soon()

    def _negotiate_soon(self) -> None:
        if not self._decides or self._port is None or not self._wishes or not self._can_agree:
            return
        if self._wishes.has_notice:
            assert self._host is not None
            if self._pause is not None:
                self._pause.cancel()
            if self._call is not None and self._bound_s() < self._call.bound_s:
                self._host.submit(self._hurry(self._call, self._bound_s()))
        if not self._is_negotiating:
            self._is_negotiating = True
            assert self._host is not None
            self._host.submit(self._negotiate())

    async def _negotiate(self) -> None:
        """Makes agreements until no wish is left."""
        try:
            while self._wishes and self._can_agree:
                bound_s = self._bound_s()
                if isinstance(await self._agree(bound_s), Failure) and self._can_agree:
                    pause_s = _NOTICE_PAUSE_S if self._wishes.has_notice else bound_s
                    with anyio.move_on_after(pause_s) as self._pause:
                        await anyio.sleep_forever()
                    self._pause = None
        except Exception:
            logger.exception("%s: a defect in an agreement", self._label)
            raise
        finally:
            self._is_negotiating = False

    @property
    def _can_agree(self) -> bool:
        """Whether all ranks make more calls, as far as is known. Else the wishes wait for
        ``close``."""
        return self._may_agree and not self.calls.is_closed

    async def _hurry(self, call: InvitedCall, bound_s: float) -> None:
        """Ends an agreement that a notice cannot wait for."""
        await anyio.sleep(bound_s)
        if self._call is call:
            reason = explain_late("a rank", bound_s, _HALF_OF_GRACE)
            call.ends.put(True, Failed(0, Failure(reason=reason, stage=Stage.JOIN)))

    def _bound_s(self) -> float:
        left_s = self._wishes.until_s - time.monotonic()
        return min(self._settings.options.lost_after_s, max(_LEAST_BOUND_S, left_s / 2))

    async def _agree(self, bound_s: float) -> Agreed | Failure:
        assert self._port is not None
        decided: list[Wish] = []

        def decide(entered: Mapping[int, Entered]) -> Agreed | Failure:
            answer, wishes = self._wishes.decide(entered, self._has_time)
            decided.extend(wishes)
            self._may_agree = not any(each.is_closed for each in entered.values())
            return answer

        call = self._call = self._port.invitations.invite(self._topic, bound_s)
        try:
            answer = await self._take_part(call, decide)
        finally:
            self._call = None
        if isinstance(answer, Agreed):
            self._wishes.agreed(answer, decided)
        return answer

    def _on_invited(self, call: InvitedCall) -> None:
        assert self._host is not None
        self._host.submit(self._take_part(call))

    async def _take_part(self, call: InvitedCall, decide: Decide | None = None) -> Agreed | Failure:
        is_short = call.bound_s < self._settings.options.lost_after_s
        limit = _HALF_OF_GRACE if is_short else "Options.lost_after_s"
        agreement = self._agreement = Agreement(call, self.calls, decide, self._note, limit)
        try:
            return await agreement.run()
        finally:
            call.close()
            if self._has_left:
                self._fail_agreed()

    def _note(self, answer: Agreed | Failure) -> None:
        if isinstance(answer, Failure):
            self.outcome = f"not agreed: {answer.reason}"
            self._events.post(EventKind.NOT_AGREED, detail=answer.reason)
            logger.warning("%s: no save was agreed on: %s", self._label, answer.reason)
            return
        self._told.clear()
        what = "stops" if answer.stops else "saves"
        if answer.stops and answer.saves:
            what = "saves and stops"
        elif answer.is_late:
            what = "stops without a save: no time"
        self.outcome = f"call {answer.at} {what}: {answer.reason}"
        self._events.post(EventKind.AGREED, detail=self.outcome)


class _DecisionsAtEnd:
    """The round of ``close``."""

    stage = Stage.JOIN

    def __init__(self, decide: Callable[[Mapping[int, bytes]], bytes]) -> None:
        self._decide = decide

    def decide(self, round: int, payloads: Mapping[int, bytes]) -> Continue:
        return Continue(common=self._decide(payloads), is_last=True)


def _checked_watchers(notices: object) -> Sequence[Watcher]:
    if notices is None:
        return ()
    if not isinstance(notices, list | tuple):
        raise UsageError(f"notices must be a list of watchers, not {notices!r}: {_EXAMPLE}")
    for watcher in notices:
        if not callable(getattr(watcher, "start", None)):
            raise UsageError(
                f"notices must be a list of watchers; {watcher!r} is not one: {_EXAMPLE}"
            )
    return tuple(notices)


def _listener(asking: Asking, host: Host) -> Listener:
    """Keeps neither the manager nor its app state alive; without it, answers that it is closed."""
    found, calls = weakref.ref(asking), asking.calls

    async def decline(call: InvitedCall) -> None:
        try:
            await Agreement(call, calls).run()
        finally:
            call.close()

    def invited(call: InvitedCall) -> None:
        if (me := found()) is not None:
            me._on_invited(call)
        else:
            calls.is_closed = True
            host.submit(decline(call))

    def wanted(message: SaveWanted) -> None:
        if (me := found()) is not None:
            me._on_wanted(message)

    return Listener(invited=invited, wanted=wanted)
