# SPDX-License-Identifier: Apache-2.0
"""Messages between ranks and the coordinator during a save or a restore, without the payloads of
rounds (``protocol.save``, ``protocol.restore``).

msgpack arrays between processes, objects within one. Both ends are of the same release
(``protocol.save.Joined``). The transport separates calls: messages do not name theirs.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import TypeAlias

import msgspec

from actorsnap.protocol.failure import Failure

_MAX_SHOWN_URL = 160


class CallKind(StrEnum):
    """Named as the method."""

    TAKE = "take"
    ASYNC_TAKE = "async_take"
    RESTORE = "restore"
    PLAN_RESTORE = "plan_restore"
    BEGIN_RUN = "CheckpointManager.save"
    RESTORE_LATEST = "CheckpointManager.restore_latest"
    RESTORE_STEP = "CheckpointManager.restore"
    CLOSE = "CheckpointManager.close"

    @property
    def is_save(self) -> bool:
        """Whether a failure is a ``SnapshotAborted``."""
        return self in (CallKind.TAKE, CallKind.ASYNC_TAKE, CallKind.BEGIN_RUN)


class Label(msgspec.Struct, frozen=True, array_like=True):
    """Identifies a call; must be equal on all ranks.

    Attributes:
        url: Normalised, without secrets.
        step: The caller's, if given.
        nonce: Distinguishes calls that repeat an earlier one.
        method: Of a manager, that the user called. Shown instead of ``kind``; not compared.
    """

    kind: CallKind
    url: str
    step: int | None = None
    nonce: str = ""
    method: str = ""

    @property
    def is_by_policy(self) -> bool:
        """Whether a ``save=`` policy decides if a rank makes the call."""
        return self.method == "maybe_save"

    @property
    def digest(self) -> bytes:
        """8 bytes, sent with heartbeats."""
        compared = msgspec.msgpack.encode((self.kind, self.url, self.step, self.nonce))
        return hashlib.blake2b(compared, digest_size=8).digest()

    def __str__(self) -> str:
        url = self.url
        if len(url) > _MAX_SHOWN_URL:
            url = "..." + url[-_MAX_SHOWN_URL:]
        step = "" if self.step is None else f", step={self.step}"
        call = f"CheckpointManager.{self.method}" if self.method else self.kind
        return f"{call}({url!r}{step})"


class Labelled(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    """The answer to ``AskLabel``."""

    rank: int
    label: Label


class Arrived(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """The rank is ready for ``round`` (``protocol.rounds``).

    Attributes:
        payload: Input of the decision.
        num_asked: Number of ``Ask`` messages answered in this round.
    """

    rank: int
    round: int
    payload: bytes = b""
    num_asked: int = 0


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """The rank cannot continue.

    Attributes:
        left: Label digest of a call that the rank left without an answer of rank 0. Outside of any
            call: the topic that it has left (``transport.invitations``).
    """

    rank: int
    failure: Failure
    left: bytes = b""


class AskLabel(msgspec.Struct, frozen=True, array_like=True, tag="B"):
    """Send your label: it differs from rank 0's."""


class Absent(msgspec.Struct, frozen=True, array_like=True, tag="W"):
    """These ranks have not made the call yet."""

    ranks: tuple[int, ...]


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="Q"):
    """The decision needs more data of this rank, which arrives at the same round again."""

    round: int
    payload: bytes
    num_asked: int


class Proceed(msgspec.Struct, frozen=True, array_like=True, tag="P"):
    """Every rank has arrived at ``round``.

    Attributes:
        payload: The decision for this rank.
        next_round: The rank's.
        is_last: The call has succeeded.
    """

    round: int
    payload: bytes = b""
    next_round: int = 0
    is_last: bool = False


class Repeat(msgspec.Struct, frozen=True, array_like=True, tag="R"):
    """Another process continues as the coordinator: send your last message again."""


class Aborted(msgspec.Struct, frozen=True, array_like=True, tag="X"):
    """The attempt ended without commit.

    Attributes:
        label: Digest of the ended call's label, for a rank that did not make it. Outside of any
            call: the topic that rank 0 has left.
    """

    failure: Failure
    label: bytes = b""


class SaveWanted(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """The rank wants a save (``protocol.agreement``). Outside of any call.

    Attributes:
        topic: See ``Invite``.
        since: See ``protocol.agreement.Agreed``.
        grace_s: Time left of a notice, from now; None: no limit.
    """

    rank: int
    topic: bytes
    reason: str
    since: int
    is_notice: bool = False
    grace_s: float | None = None


class Invite(msgspec.Struct, frozen=True, array_like=True, tag="I"):
    """Take part in a call of one round, at once and outside the order of other calls.

    Attributes:
        topic: Digest of the purpose, equal on all ranks.
        bound_s: Time after which rank 0 gives up.
    """

    topic: bytes
    bound_s: float


ToCoordinator: TypeAlias = Labelled | Arrived | Failed | SaveWanted
FromCoordinator: TypeAlias = AskLabel | Absent | Ask | Proceed | Repeat | Aborted | Invite
