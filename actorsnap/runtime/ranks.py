"""This process' place in a group of ranks, kept from save to save.

Holds what outlives a save: the port to the other ranks' mailboxes, and what the save before
has left to be remembered. It decides nothing.
"""

from __future__ import annotations

import os
import threading
import weakref
from datetime import timedelta
from typing import Any

from actorsnap.actors.session import Remembered
from actorsnap.protocol.coordinator import Memory
from actorsnap.protocol.messages import FromCoordinator, ToCoordinator
from actorsnap.runtime.host import Host
from actorsnap.state.group import Group, find_group
from actorsnap.transport.store import StorePort, StoreSave

__all__ = ["Team", "find_team"]

_AGAIN_S = 10.0
_ANSWER = timedelta(seconds=30)


class Team:
    """One process among those that save together.

    Attributes:
        rank: Of this process, in the group.
        world_size: Of the group.
        ranks: All of them in the whole job, in the order of the group.
        store: A weak reference: the store may host the server, whose end is the job's business.
        memory: What the coordinator knows from the save before. On the loop only.
        remembered: What the rank knows from the save before. On the loop only.
    """

    def __init__(self, group: Group, *, before: Team | None = None) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
        self.ranks = group.ranks
        self.store = weakref.ref(group.store)
        self._connection: Any = None
        self._connecting = threading.Lock()
        self._host = Host.get()
        self._pid = os.getpid()
        self.memory = Memory()
        self.remembered: Remembered | None = None
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

    def begin(self, *, lost_after_s: float) -> StoreSave[Any, Any]:
        """Takes the number of the next call that all ranks make together. Close it at the end.

        In the caller's thread: there, calls are made in the same order on all ranks. Whoever
        has taken a number must say something with it, and be it that the call has failed.

        Raises:
            UsageError: in a process forked from the one that the group was found in.
        """
        return self.port.begin(lost_after_s=lost_after_s)


_teams: dict[tuple[str, int], Team] = {}
_lock = threading.Lock()


def find_team(group: Any, store: Any) -> Team | None:
    """The team of a call; None where there is but one rank.

    The same one from call to call; a new one where the store of the last one went away.

    Raises:
        UsageError: see ``state.group.find_group``.
    """
    found = find_group(group, store)
    if found is None:
        return None
    key = (found.name, id(found.store))
    with _lock:
        for gone in [k for k, team in _teams.items() if team.store() is None]:
            _teams.pop(gone).port.close(0.0)
        team = _teams.get(key)
        if team is None:
            team = _teams[key] = Team(found)
        elif team.is_stale:
            # The others may not have noticed, and count on.
            team.port.close(0.0)
            team = _teams[key] = Team(found, before=team)
        return team
