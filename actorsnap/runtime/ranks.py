"""This process' place in a group of ranks, kept from save to save.

Holds what outlives a save: the port to the other ranks' mailboxes, and what the save before
has left to be remembered. It decides nothing.
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
from actorsnap.lines import Lines
from actorsnap.options import Options
from actorsnap.planning.packing import RankPlan
from actorsnap.protocol.frames import LeaveTeam, TakeOver, TeamRank
from actorsnap.protocol.labels import CallKind, Label
from actorsnap.protocol.memory import Memory
from actorsnap.protocol.messages import FromCoordinator, ToCoordinator
from actorsnap.protocol.roll import RollMachine
from actorsnap.runtime.host import Host
from actorsnap.runtime.process import listens_at
from actorsnap.state.process_group import Group, find_group, find_prefix
from actorsnap.transport.base import CoordinatorEnd, ParticipantEnd
from actorsnap.transport.relay import RelayedEnds
from actorsnap.transport.store import StorePort, StoreSave

__all__ = ["Call", "Membership", "RelayedCall", "RelayedTeam", "Team", "find_team", "open_port"]

logger = Lines(__name__)

_AGAIN_S = 10.0
_ANSWER = timedelta(seconds=30)


class Team:
    """One process among those that save together.

    Args:
        before: The one whose store went away.

    Attributes:
        rank: Of this process, in the group.
        world_size: Of the group.
        ranks: All of them in the whole job, in the order of the group.
        store: A weak reference: the store may host the server, whose end is the job's business.
        address: Where another process of this rank finds it; None where it cannot.
        number: Of this object, in this process.
        memory: What the coordinator knows from the save before. On the loop only.
        remembered: The rank's plan of the save before, by its digest. On the loop only.
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
        self.memory = Memory()
        self.remembered: tuple[bytes, RankPlan] | None = None
        # Where the store went away it has most likely not come back, and nobody starts up.
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
        """Whether the store went away, or the runtime was started anew."""
        if self._pid != os.getpid():
            return False  # the mailbox is the parent's, and ``begin`` says so
        return self.port.is_broken or self._host is not Host.get()

    @functools.cached_property
    def hosts_store(self) -> bool:
        """Whether the store ends with this process."""
        return self.address is not None and listens_at(self.address.port)

    def close(self) -> None:
        """Gives the place up, in this process and its uploader process. Does not wait."""
        self.port.close(0.0)
        uploader = self._host.uploader
        if uploader is not None and self._pid == os.getpid():
            with contextlib.suppress(RuntimeError):  # the runtime is gone, and so is the process
                self._host.call_soon(lambda: uploader.send(LeaveTeam(self.number)))

    def connection(self) -> Any:
        """A connection to the store for calls that do not wait for other ranks; always the same
        one. From any thread; blocks.

        Raises:
            RuntimeError: the store is gone, or does not answer.
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
        """Logs what is said of this team for all saves."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s", text)

    def begin(self, label: Label | None, options: Options) -> Call:
        """Takes the number of the next call that all ranks make together, and reports which call
        it is (``protocol.roll``). Close it at the end.

        In the caller's thread: there, calls are made in the same order on all ranks. Whoever
        has taken a number must say something with it, and be it that the call has failed.

        Args:
            label: None if the call's input is bad: it must then fail.

        Raises:
            UsageError: in a process forked from the one that the group was found in.
        """
        tag = b"" if label is None else label.digest
        save = self.port.begin(lost_after_s=options.lost_after_s, tag=tag)
        shown = Label(CallKind.TAKE, "") if label is None else label
        caller = Caller(save.participant, rank=self.rank, label=shown, timeout_s=options.timeout_s)
        roll = None
        if save.coordinator is not None:
            machine = RollMachine(label=shown, world_size=self.world_size)
            roll = Roll(save.coordinator, machine=machine, timeout_s=options.timeout_s)

        async def start() -> None:
            for end in (caller, roll):
                if end is not None:
                    end.begin()

        self._host.submit(start())
        return Call(save, caller, roll)

    def join(self, label: Label | None, options: Options) -> Membership:
        """Takes part in a save: see ``begin``."""
        return Membership(self, self.begin(label, options))

    def _find_prefix(self) -> str:
        return find_prefix(self.connection())

    @property
    def can_be_continued(self) -> bool:
        """Whether another process of this rank can open its mailbox when this one ends."""
        if self.address is None:
            self.warn_once(
                "saves of these ranks are not detached, their trainers wait for them: the ranks' "
                "store is no TCPStore, and has no address. Pass store= one"
            )
        return self.address is not None and not self.hosts_store

    def as_rank(self) -> TeamRank:
        """Returns the rank as the uploader process gets to know it."""
        return TeamRank(self.number, self.rank, self.world_size)

    async def take_over(self, number: int, call: Call) -> TakeOver:
        """Returns what another process needs to continue this rank's part of a call, once
        something has come from rank 0.

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


class Call:
    """A call that all ranks make together, as this process sees it.

    Attributes:
        participant: This rank's end.
        coordinator: On rank 0.
    """

    def __init__(
        self,
        save: StoreSave[Any, Any],
        participant: ParticipantEnd,
        coordinator: CoordinatorEnd | None,
    ) -> None:
        self._save = save
        self.participant = participant
        self.coordinator = coordinator

    @property
    def number(self) -> int:
        """The same on all ranks."""
        return self._save.number

    @property
    def scope(self) -> str:
        """See ``transport.store.StoreSave``."""
        return self._save.scope

    def close(self) -> None:
        """Ends it here. From any thread; again does nothing."""
        self._save.close()


class RelayedCall:
    """A call whose mailbox another process owns; see ``Call``."""

    def __init__(self, ends: RelayedEnds) -> None:
        self.participant = ends.participant
        self.coordinator = ends.coordinator
        self.close = ends.close


class RelayedTeam:
    """A rank among others, where another process owns its mailbox; see ``Team``."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.memory = Memory()
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
        call: Whose number all ranks have taken.
        memory: What this save's coordinator knows from the one before.
    """

    def __init__(self, team: Team | RelayedTeam, call: Call | RelayedCall) -> None:
        self.team = team
        self.call = call
        self.memory = team.memory.copy()


_numbers = itertools.count()
_teams: dict[tuple[str, int], Team] = {}
_lock = threading.Lock()


def find_team(group: Any, store: Any) -> Team | None:
    """The team of a call; None where there is but one rank.

    The same one from call to call; a new one where the store of the last one went away.

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
            # The others may not have noticed, and count on.
            team.close()
            team = _teams[key] = Team(found, before=team)
        return team
