"""Events and commands shared by several machines."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from actorsnap.protocol.messages import FromCoordinator

__all__ = [
    "CoordinatorLost",
    "DeadlinePassed",
    "RankLost",
    "SendToRank",
]

# Events -------------------------------------------------------------------------------------


class DeadlinePassed(msgspec.Struct, frozen=True):
    """The call's deadline has passed.

    Attributes:
        timeout_s: The time limit, in seconds; for people.
        trouble: The last storage error, for people; empty if there was none.
    """

    timeout_s: float
    trouble: str = ""

    @property
    def is_over(self) -> str:
        """Common beginning of all reasons."""
        trouble = f"; {self.trouble}" if self.trouble else ""
        return f"timeout_s={self.timeout_s:g} is over{trouble}"

    def reason(self, absent: Sequence[int]) -> str:
        """Returns why the call ends while these ranks are awaited."""
        named = ", ".join(map(str, absent[:16])) + (" ..." if len(absent) > 16 else "")
        return (
            f"{self.is_over}; still waiting for rank(s) {named}. Raise "
            "Options.timeout_s if the storage is that slow"
        )


class RankLost(msgspec.Struct, frozen=True):
    """A rank was silent for ``silent_s``; 0.0 if it has left."""

    rank: int
    silent_s: float

    @property
    def reason(self) -> str:
        if not self.silent_s:
            return f"rank {self.rank} has left: its process ended"
        return (
            f"rank {self.rank} was not heard for {self.silent_s:.0f} s: it was killed or stopped, "
            "or its machine or network is gone"
        )


class CoordinatorLost(msgspec.Struct, frozen=True):
    """The coordinator was silent for a while, or can no longer be reached.

    Attributes:
        reason: For people.
        rank: 0 if it is silent; None if this end has failed.
    """

    reason: str
    rank: int | None = None

    @classmethod
    def silent(cls, rank: int, silent_s: float) -> CoordinatorLost:
        """Returns the event for a coordinator silent for ``silent_s``; 0.0 if it has left."""
        how = f"was not heard for {silent_s:.0f} s" if silent_s else "has left: its process ended"
        return cls(f"rank {rank}, which coordinates, {how}", rank)


# Commands -----------------------------------------------------------------------------------


class SendToRank(msgspec.Struct, frozen=True):
    """Send ``message`` to ``rank``."""

    rank: int
    message: FromCoordinator
