# SPDX-License-Identifier: Apache-2.0
"""This process' place in a group of ranks, kept for later saves."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
import weakref
from dataclasses import replace
from datetime import timedelta
from typing import Any

from actorsnap.actors.roll import Caller, Roll
from actorsnap.log import Log
from actorsnap.options import Options
from actorsnap.planning.packing import RankPlan
from actorsnap.protocol.messages import Aborted, CallKind, Label
from actorsnap.protocol.roll import RollCall
from actorsnap.protocol.save import PlanCache
from actorsnap.protocol.uploader import LeaveTeam, TakeOver
from actorsnap.runtime.host import Host
from actorsnap.runtime.process import listens_at
from actorsnap.state.process_group import Group, find_group, find_prefix, has_queues
from actorsnap.transport.ends import RelayedEnds
from actorsnap.transport.meeting import Meeting
from actorsnap.transport.store import CONNECT_S, StorePort

logger = Log(__name__)

_AGAIN_S = 10.0
"""The store has hardly come back, and no rank is starting."""

_ANSWER = timedelta(seconds=30)


class TeamMemory:
    """A rank, and its memory of the last save. On the loop only.

    Attributes:
        memory: The coordinator's.
        remembered: The rank's plan and its digest.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.memory = PlanCache()
        self.remembered: tuple[bytes, RankPlan] | None = None


class Team(TeamMemory):
    """One process in a group of ranks that save together.

    Args:
        before: The team to replace, whose store is gone.

    Attributes:
        ranks: Global ranks, in group order.
        store: Weak: the store may host the server, and its end belongs to the job.
        address: The store's, for another process.
        number: Unique in this process.
    """

    def __init__(self, group: Group, *, before: Team | None = None) -> None:
        super().__init__(group.rank, group.world_size)
        self.ranks = group.ranks
        self.address = group.address
        self.store = weakref.ref(group.store)
        self.number = next(_numbers)
        self._has_warned = False
        self._connection: Any = None
        self._prefix: str | None = None
        self._connecting = threading.Lock()
        self._host = Host.get()
        self._pid = os.getpid()
        self.port: StorePort = StorePort(
            group.store,
            namespace=group.name,
            rank=group.rank,
            world_size=group.world_size,
            call_soon=self._host.call_soon,
            first_number=0 if before is None else before.port.next_number,
            connect_s=CONNECT_S if before is None else _AGAIN_S,
        )

    @property
    def is_stale(self) -> bool:
        """The store is gone or the runtime was restarted."""
        if self._pid != os.getpid():
            return False  # ``begin`` raises
        return self.port.is_broken or self._host is not Host.get()

    @functools.cached_property
    def hosts_store(self) -> bool:
        return self.address is not None and listens_at(self.address.port)

    def close(self) -> None:
        """Closes the mailbox and leaves the uploader process. Does not wait."""
        self.port.close(0.0)
        uploader = self._host.resources.uploader
        if uploader is not None and self._pid == os.getpid():
            with contextlib.suppress(RuntimeError):  # both have ended
                self._host.call_soon(lambda: uploader.send(LeaveTeam(self.number)))

    def connection(self) -> Any:
        """Returns a connection for calls that do not wait for ranks. Thread-safe; blocks.

        Raises:
            RuntimeError: The store is gone or does not answer.
        """
        with self._connecting:
            if self._connection is None:
                store = self.store()
                if store is None:
                    raise RuntimeError("the job's store is gone")
                connection = store.clone()
                connection.set_timeout(_ANSWER)
                self._connection = connection
            return self._connection

    def begin(
        self,
        label: Label | None,
        options: Options,
        *,
        begun_s: float | None = None,
        joins_promptly: bool = False,
        topic: bytes = b"",
    ) -> TeamCall:
        """Takes the number of the next call, and reports its label. Close the result.

        Runs in the caller's thread, where calls have the same order on all ranks. A rank with a
        number must send a message for it, even if only that the call failed.

        Args:
            label: None for bad input: the call must fail.
            begun_s: Start of ``Options.timeout_s``, of ``time.monotonic``; None: now.
            joins_promptly: All ranks must have begun after ``Options.lost_after_s``, not only after
                ``timeout_s``.
            topic: The call fails if a rank has left it (``leave``). Empty: none.

        Raises:
            UsageError: In a fork of the owner's process.
        """
        call = TeamCall(
            self,
            label,
            options,
            time.monotonic() if begun_s is None else begun_s,
            joins_promptly,
            topic,
        )
        self._host.submit(call.start())
        return call

    def join(
        self,
        label: Label | None,
        options: Options,
        *,
        begun_s: float | None = None,
        joins_promptly: bool = False,
        topic: bytes = b"",
    ) -> Membership:
        """See ``begin``."""
        call = self.begin(
            label, options, begun_s=begun_s, joins_promptly=joins_promptly, topic=topic
        )
        return Membership(self, call)

    def leave(self, topic: bytes, how: str) -> None:
        """Informs the others that this rank makes no more calls about ``topic``.

        From any thread; does not wait.
        """
        with contextlib.suppress(RuntimeError):  # the runtime was stopped
            self._host.call_soon(lambda: self.port.invitations.leave(topic, how))

    @property
    def can_be_continued(self) -> bool:
        """Another process of this rank could open its mailbox later."""
        if self.address is None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "rank %d: saves of these ranks are not detached, their trainers wait for them: the "
                "ranks' store is no TCPStore, and has no address. Pass a TCPStore as store=",
                self.rank,
            )
        return self.address is not None and not self.hosts_store

    async def take_over(self, number: int, call: TeamCall) -> TakeOver:
        """Returns the data to continue this rank's part of ``call`` elsewhere.

        Only after a message from rank 0.

        Raises:
            RuntimeError: The store does not answer.
        """
        assert self.address is not None
        if self._prefix is None:
            self._prefix = await self._host.run_blocking(lambda: find_prefix(self.connection()))
        session = self.port.session
        assert session is not None
        return TakeOver(
            number=number,
            host=self.address.host,
            port=self.address.port,
            prefix=self._prefix,
            name=self.port.namespace,
            session=session,
            call=call.number,
        )


class TeamCall:
    """This process' part in a call; ``coordinator`` on rank 0 only.

    If a call with this number ended without this rank, takes the next number.
    """

    def __init__(
        self,
        team: Team,
        label: Label | None,
        options: Options,
        begun_s: float,
        joins_promptly: bool = False,
        topic: bytes = b"",
    ) -> None:
        timeout_s, limit = options.timeout_s, "timeout_s"
        if joins_promptly and options.lost_after_s < timeout_s:
            timeout_s, limit = options.lost_after_s, "lost_after_s"
        self._port = team.port
        self._begun_s = begun_s
        self._has_label = label is not None
        label = label or Label(CallKind.TAKE, "")
        tag = label.digest if self._has_label else b""
        self._save = self._port.begin(lost_after_s=options.lost_after_s, tag=tag, topic=topic)
        self._is_closed = False
        self.participant = Caller(
            self._save.participant,
            rank=team.rank,
            label=label,
            timeout_s=timeout_s,
            limit=limit,
            renew=self._renew,
            is_connected=lambda: self._port.is_connected,
        )
        self.coordinator: Roll | None = None
        if self._save.coordinator is not None:
            self.coordinator = Roll(
                self._save.coordinator,
                roll_call=RollCall(
                    label=label, world_size=team.world_size, is_known=self._has_label
                ),
                timeout_s=timeout_s,
                limit=limit,
                renew=self._renew_all,
                is_connected=lambda: self._port.is_connected,
            )

    @property
    def number(self) -> int:
        """Equal on all ranks."""
        return self._save.number

    @property
    def scope(self) -> str:
        """See ``transport.store.StoreSave``."""
        return self._save.scope

    async def start(self) -> None:
        """Starts the clocks, which show the time since ``begun_s``."""
        elapsed_s = time.monotonic() - self._begun_s
        self.participant.begin(elapsed_s)
        if self.coordinator is not None:
            self.coordinator.begin(elapsed_s)

    def close(self) -> None:
        """Thread-safe and idempotent."""
        self._is_closed = True
        self._save.close()

    def _renew(self) -> bool:
        """Takes the next number, unless it has begun."""
        # Without a label, the call that ended may be this one.
        following = self._port.begin_after(self._save) if self._has_label else None
        if following is None:
            return False
        self._save.close()
        self._save = following
        if self._is_closed:
            following.close()
        self.participant.move(following.participant)
        return True

    async def _renew_all(self, aborted: Aborted) -> bool:
        """``_renew`` on rank 0; sends ``aborted`` to ranks of the old number."""
        ended = self.number
        if not self._renew():
            return False
        for rank in range(1, self._port.world_size):
            self._port.send_down(rank, ended, aborted)
        assert self.coordinator is not None
        assert self._save.coordinator is not None
        self.coordinator.move(self._save.coordinator)
        await self.participant.repeat()
        return True


def open_port(frame: TakeOver, team: TeamMemory, store: Any) -> StorePort:
    """Opens the mailbox of a rank whose process has ended."""
    return StorePort(
        store,
        namespace=frame.name,
        rank=team.rank,
        world_size=team.world_size,
        call_soon=Host.get().call_soon,
        first_number=frame.call,
        session=frame.session,
    )


class Membership:
    """A rank's part in one save.

    Attributes:
        call: ``RelayedEnds`` if another process owns the mailbox.
        memory: A copy for this save.
    """

    def __init__(self, team: TeamMemory, call: TeamCall | RelayedEnds) -> None:
        self.team = team
        self.call = call
        self.memory = team.memory.copy()


_numbers = itertools.count()
_teams: dict[tuple[str, int], Team] = {}
_meetings: weakref.WeakKeyDictionary[Any, dict[str, Meeting]] = weakref.WeakKeyDictionary()
"""Meetings by store without queues, and name of the group."""

_lock = threading.Lock()


def label_of(url: str, team: Team | None) -> str:
    """Returns the beginning of a log line about ``url``; of several ranks, it names this one."""
    return url if team is None else f"{url} rank {team.rank}"


def find_team(group: Any, store: Any) -> Team | None:
    """Returns the team, shared while its store lives; None for a single rank.

    Raises:
        UsageError: See ``state.process_group.find_group``.
    """
    found = find_group(group, store)
    if found is None:
        return None
    with _lock:
        if not has_queues(found.store):
            meetings = _meetings.setdefault(found.store, {})
            if found.name not in meetings:
                meetings[found.name] = Meeting(found.store, name=found.name, rank=found.rank)
            found = replace(found, store=meetings[found.name])
        key = (found.name, id(found.store))
        for gone in [k for k, team in _teams.items() if team.store() is None]:
            _teams.pop(gone).close()
        team = _teams.get(key)
        if team is None:
            team = _teams[key] = Team(found)
        elif team.is_stale:
            # Others may continue its numbers.
            team.close()
            team = _teams[key] = Team(found, before=team)
        return team
