"""What the machines of a save, of a restore and of the trainers' line have in common.

Events that come to several of them, and commands that several give: each means the same in all.
What only one of them hears or wants stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from actorsnap.protocol.failure import Failure
from actorsnap.protocol.messages import FromCoordinator, ToCoordinator

__all__ = [
    "CoordinatorLost",
    "DeadlinePassed",
    "Finish",
    "LookForCommit",
    "Looked",
    "RankLost",
    "Send",
    "SendToRank",
    "StepFailed",
]

# Events -------------------------------------------------------------------------------------


class DeadlinePassed(msgspec.Struct, frozen=True):
    """The time that the caller allowed is over.

    Attributes:
        timeout_s: For people.
        trouble: The last error of a storage, for people; empty if there was none.
    """

    timeout_s: float
    trouble: str = ""

    @property
    def is_over(self) -> str:
        """The beginning of every reason."""
        trouble = f"; {self.trouble}" if self.trouble else ""
        return f"timeout_s={self.timeout_s:g} is over{trouble}"

    def reason(self, absent: Sequence[int]) -> str:
        """Why it ends where these ranks are waited for."""
        named = ", ".join(map(str, absent[:16])) + (" ..." if len(absent) > 16 else "")
        return (
            f"{self.is_over}; still waiting for rank(s) {named}. Raise "
            "Options.timeout_s if the storage is that slow"
        )


class RankLost(msgspec.Struct, frozen=True):
    """A rank that was heard before was not heard for ``silent_s``; 0.0 if it has left."""

    rank: int
    silent_s: float

    @property
    def reason(self) -> str:
        """For people."""
        if not self.silent_s:
            return f"rank {self.rank} has left: its process ended"
        return (
            f"rank {self.rank} was not heard for {self.silent_s:.0f} s: it was killed or stopped, "
            "or its machine or network is gone"
        )


class CoordinatorLost(msgspec.Struct, frozen=True):
    """The coordinator was not heard for a while, or cannot be reached any more.

    Attributes:
        reason: For people.
        rank: 0 if it is silent; None where this end carries nothing any more, whoever's fault.
    """

    reason: str
    rank: int | None = None

    @classmethod
    def silent(cls, rank: int, silent_s: float) -> CoordinatorLost:
        """It was not heard for ``silent_s``; 0.0 if it has left."""
        how = f"was not heard for {silent_s:.0f} s" if silent_s else "has left: its process ended"
        return cls(f"rank {rank}, which coordinates, {how}", rank)


class StepFailed(msgspec.Struct, frozen=True):
    """Any command's work failed."""

    failure: Failure


class Looked(msgspec.Struct, frozen=True):
    """The ending of ``LookForCommit``; None if the storage did not answer."""

    is_committed: bool | None


# Commands -----------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True):
    """Send ``message`` to the coordinator."""

    message: ToCoordinator


class SendToRank(msgspec.Struct, frozen=True):
    """Send ``message`` to ``rank``."""

    rank: int
    message: FromCoordinator


class LookForCommit(msgspec.Struct, frozen=True):
    """Look whether the commit object names this attempt."""


class Finish(msgspec.Struct, frozen=True):
    """The end: committed, or aborted with a failure."""

    failure: Failure | None
