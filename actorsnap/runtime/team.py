"""This process' place in a group of ranks.

Keeps the state that outlives a save: the port to the other ranks' mailboxes, and the plan of the
last save. It decides nothing.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import weakref
from datetime import timedelta
from typing import Any

from actorsnap.actors.roll import Caller, Roll
from actorsnap.log import Log
from actorsnap.options import Options
from actorsnap.planning.packing import RankPlan
from actorsnap.protocol.labels import CallKind, Label
from actorsnap.protocol.messages import Aborted, FromCoordinator, ToCoordinator
from actorsnap.protocol.plan_cache import PlanCache
from actorsnap.protocol.roll import RollMachine
from actorsnap.protocol.uploader import LeaveTeam, TakeOver, TeamRank
from actorsnap.runtime.host import Host
from actorsnap.runtime.process import listens_at
from actorsnap.state.process_group import Group, find_group, find_prefix
from actorsnap.transport.ends import CoordinatorEnd, ParticipantEnd
from actorsnap.transport.relay import RelayedEnds
from actorsnap.transport.store import StorePort, StoreSave

__all__ = ["TeamCall", "Membership", "RelayedCall", "RelayedTeam", "Team", "find_team", "open_port"]

logger = Log(__name__)

_AGAIN_S = 10.0
_ANSWER = timedelta(seconds=30)


class Team:
    """One process in a group of ranks that save together.

    Args:
        before: The team whose store is gone and that this one replaces.

    Attributes:
        rank: This process' rank in the group.
        world_size: Size of the group.
        ranks: Global ranks of the group, in group order.
        store: A weak reference: the store may host the server, and its end belongs to the job.
        address: Address of the store for another process of this rank; None if it has none.
        number: Number of this object in this process.
        memory: The coordinator's memory of the last save. On the loop only.
        remembered: The rank's plan in the last save, with its digest. On the loop only.
    """

    def __init__(self, group: Group, *, before: Team | None = None) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
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
        self.memory = PlanCache()
        self.remembered: tuple[bytes, RankPlan] | None = None
        # A store that is gone has most likely not come back, and no rank is starting.
        again: dict[str, Any] = {}
        if before is not None:
            again = {"first_number": before.port.next_number, "connect_s": _AGAIN_S}
        self.port: StorePort[Any, Any] = StorePort(
            group.store,
            namespace=group.name,
            rank=group.rank,
            world_size=group.world_size,
            up=ToCoordinator,
            down=FromCoordinator,
            call_soon=self._host.call_soon,
            **again,
        )

    @property
    def is_stale(self) -> bool:
        """Whether the store is gone or the runtime was restarted."""
        if self._pid != os.getpid():
            return False  # the mailbox is the parent's, and ``begin`` raises for it
        return self.port.is_broken or self._host is not Host.get()

    @functools.cached_property
    def hosts_store(self) -> bool:
        """Whether the store's server runs in this process."""
        return self.address is not None and listens_at(self.address.port)

    def close(self) -> None:
        """Closes the mailbox and removes the team from the uploader process. Does not wait."""
        self.port.close(0.0)
        uploader = self._host.resources.uploader
        if uploader is not None and self._pid == os.getpid():
            with contextlib.suppress(RuntimeError):  # runtime and uploader process have ended
                self._host.call_soon(lambda: uploader.send(LeaveTeam(self.number)))

    def connection(self) -> Any:
        """Returns a connection to the store for calls that do not wait for other ranks, always
        the same one. Thread-safe; blocks.

        Raises:
            RuntimeError: the store is gone or does not answer.
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

    def warn_once(self, text: str) -> None:
        """Logs a warning, once per team."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s", text)

    def begin(self, label: Label | None, options: Options) -> TeamCall:
        """Takes the number of the next common call of all ranks, and reports its label
        (``protocol.roll``). The result must be closed.

        Runs in the caller's thread, where calls have the same order on all ranks. A rank that has
        taken a number must send a message for it, even if only that the call has failed.

        Args:
            label: None for bad input: the call must then fail.

        Raises:
            UsageError: in a process forked from the owner of the group.
        """
        tag = b"" if label is None else label.digest
        save = self.port.begin(lost_after_s=options.lost_after_s, tag=tag)
        shown = Label(CallKind.TAKE, "") if label is None else label

        def renew() -> bool:
            """Begins the next call in place of this one, unless it has begun already."""
            # Without a label this rank cannot know that the call that ended is another one.
            following = None if label is None else self.port.begin_after(call.store_save)
            if following is None:
                return False
            call.move(following)
            caller.move(following.participant)
            return True

        async def renew_all(aborted: Aborted) -> bool:
            old = save.coordinator
            assert old is not None
            assert roll is not None
            if call.number != save.number or not renew():
                return False
            for rank in range(1, self.world_size):
                self.port.send_late(rank, save.number, aborted)
            following = call.store_save.coordinator
            assert following is not None
            roll.move(following)
            await caller.repeat()
            return True

        caller = Caller(
            save.participant,
            rank=self.rank,
            label=shown,
            timeout_s=options.timeout_s,
            renew=renew,
        )
        roll = None
        if save.coordinator is not None:
            machine = RollMachine(label=shown, world_size=self.world_size)
            roll = Roll(
                save.coordinator,
                machine=machine,
                timeout_s=options.timeout_s,
                renew=renew_all,
            )
        call = TeamCall(save, caller, roll)

        async def start() -> None:
            for end in (caller, roll):
                if end is not None:
                    end.begin()

        self._host.submit(start())
        return call

    def join(self, label: Label | None, options: Options) -> Membership:
        """Takes part in a save. See ``begin``."""
        return Membership(self, self.begin(label, options))

    def _find_prefix(self) -> str:
        return find_prefix(self.connection())

    @property
    def can_be_continued(self) -> bool:
        """Whether another process of this rank can open its mailbox after this one has ended."""
        if self.address is None:
            self.warn_once(
                "saves of these ranks are not detached, their trainers wait for them: the ranks' "
                "store is no TCPStore, and has no address. Pass a TCPStore as store="
            )
        return self.address is not None and not self.hosts_store

    def as_rank(self) -> TeamRank:
        """Returns the description of the rank for the uploader process."""
        return TeamRank(self.number, self.rank, self.world_size)

    async def take_over(self, number: int, call: TeamCall) -> TakeOver:
        """Returns the data with which another process continues this rank's part of a call. Only
        after a message from rank 0.

        Raises:
            RuntimeError: the store does not answer.
        """
        assert self.address is not None
        if self._prefix is None:
            self._prefix = await self._host.run_blocking(self._find_prefix)
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
    """This process' view of a common call of all ranks.

    Attributes:
        participant: This rank's end.
        coordinator: The coordinator's end, on rank 0.
    """

    def __init__(
        self,
        save: StoreSave[Any, Any],
        participant: ParticipantEnd,
        coordinator: CoordinatorEnd | None,
    ) -> None:
        self._save = save
        self._is_closed = False
        self.participant = participant
        self.coordinator = coordinator

    @property
    def store_save(self) -> StoreSave[Any, Any]:
        """The transport's part of the call."""
        return self._save

    @property
    def number(self) -> int:
        """The number of the call, equal on all ranks."""
        return self._save.number

    def move(self, save: StoreSave[Any, Any]) -> None:
        """Continues as another call. On the loop only."""
        self._save.close()
        self._save = save
        if self._is_closed:
            save.close()

    @property
    def scope(self) -> str:
        """See ``transport.store.StoreSave``."""
        return self._save.scope

    def close(self) -> None:
        """Ends the call on this rank. Thread-safe and idempotent."""
        self._is_closed = True
        self._save.close()


class RelayedCall:
    """A ``TeamCall`` whose mailbox another process owns."""

    def __init__(self, ends: RelayedEnds) -> None:
        self.participant = ends.participant
        self.coordinator = ends.coordinator
        self.close = ends.close


class RelayedTeam:
    """A ``Team`` whose mailbox another process owns."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.memory = PlanCache()
        self.remembered: tuple[bytes, RankPlan] | None = None


def open_port(frame: TakeOver, team: RelayedTeam, store: Any) -> StorePort[Any, Any]:
    """Opens the mailbox of a rank whose process has ended. On the loop only."""
    return StorePort(
        store,
        namespace=frame.name,
        rank=team.rank,
        world_size=team.world_size,
        up=ToCoordinator,
        down=FromCoordinator,
        call_soon=Host.get().call_soon,
        first_number=frame.call,
        session=frame.session,
    )


class Membership:
    """A rank's part in one save of its team.

    Attributes:
        call: The common call.
        memory: The coordinator's memory of the last save.
    """

    def __init__(self, team: Team | RelayedTeam, call: TeamCall | RelayedCall) -> None:
        self.team = team
        self.call = call
        self.memory = team.memory.copy()


_numbers = itertools.count()
_teams: dict[tuple[str, int], Team] = {}
_lock = threading.Lock()


def find_team(group: Any, store: Any) -> Team | None:
    """Returns the team of a call; None for a single rank.

    Calls share one team. A new one replaces it if its store is gone.

    Raises:
        UsageError: see ``state.process_group.find_group``.
    """
    found = find_group(group, store)
    if found is None:
        return None
    key = (found.name, id(found.store))
    with _lock:
        for gone in [k for k, team in _teams.items() if team.store() is None]:
            _teams.pop(gone).close()
        team = _teams.get(key)
        if team is None:
            team = _teams[key] = Team(found)
        elif team.is_stale:
            # Other ranks may not have noticed, and continue its numbers.
            team.close()
            team = _teams[key] = Team(found, before=team)
        return team
