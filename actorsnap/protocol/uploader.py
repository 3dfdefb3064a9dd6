# SPDX-License-Identifier: Apache-2.0
"""Frames between a trainer and its uploader process, which are of the same release.

The trainer captures and stages; the process runs the participant, the coordinator and the storage
(``docs/decisions/0011-uploader-process.md``). Tensor bytes travel through the arena. A state's
``Structure`` is sent once; later saves send its digest and changed values. Both ends pack equal
items by equal plans and rules, and number the chunks as ``packing.write_order``.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from actorsnap.format.manifest import MemoryFormat
from actorsnap.planning.inventory import Sharded
from actorsnap.planning.packing import Item, PackingRules, RankPlan
from actorsnap.protocol.failure import EncodedError


class Structure(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An app state without its values.

    Attributes:
        items, kinds, dtypes: One per leaf with bytes, in traversal order; see ``Leaf``.
        requires_grad, rank_zero_wins: Leaf indices.
        holders: Sets of ranks, each with the indices of the leaves that they share.
        memory_formats, attributes: By leaf index, where present; attributes as JSON.
        entries: The other entries without values, with their positions among all parts; JSON.
        values: Positions of the values.
        optimizers: See ``RankManifest``.
    """

    globs: tuple[str, ...]
    sharded: tuple[Sharded, ...]
    optimizers: dict[str, str]
    items: list[Item]
    kinds: list[str]
    dtypes: list[str]
    requires_grad: list[int]
    holders: list[tuple[tuple[int, ...], list[int]]]
    rank_zero_wins: list[int]
    memory_formats: dict[int, MemoryFormat]
    attributes: bytes
    entries: bytes
    values: list[int]


class _SaveFrame(msgspec.Struct, frozen=True, array_like=True):
    """``number`` identifies the save in all frames."""

    number: int


class Alive(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """Heartbeat, in either direction. The process sends the first one when it listens."""


class AttemptsEnded(msgspec.Struct, frozen=True, array_like=True, tag="A"):
    """Attempts of the sender have committed or can no longer commit; in either direction."""

    attempts: list[str]


class Configure(msgspec.Struct, frozen=True, array_like=True, tag="v"):
    """Changes settings of the process.

    Attributes:
        variables: Environment variables that were set or deleted; may be credentials.
    """

    variables: list[tuple[bytes, bytes | None]] = []
    log_level: int | None = None
    duty: float | None = None


class SentLocation(msgspec.Struct, frozen=True, array_like=True):
    """See ``runtime.location.Location``."""

    display_url: str
    url: bytes
    storage_options: dict[str, Any]


class BeginSave(_SaveFrame, frozen=True, tag="s"):
    """Begins a save.

    Attributes:
        structure: None: the one sent before with this digest.
        values: Value entries as JSON, by index; without a structure only the changed ones.
        left_s: Rest of ``Options.timeout_s``.
        previous_attempt: The attempt of a process that died in this save, or empty.
        forgotten: Digest of a structure that no later save uses, or empty.
    """

    digest: bytes
    structure: Structure | None
    values: list[tuple[int, bytes]]
    place: SentLocation
    options: bytes
    left_s: float
    budget_bytes: int
    overwrite: bool
    resume: bool
    metadata: bytes
    step: int | None = None
    previous_attempt: str = ""
    forgotten: bytes = b""
    is_recorded: bool = False
    team: int | None = None
    rank: int = 0
    world_size: int = 1


class BeginCopy(_SaveFrame, frozen=True, tag="C"):
    """Begins a copy of a snapshot, which ends by ``CancelSave`` or ``CopyEnded``.

    Attributes:
        is_paced: By the duty of ``Configure``.
    """

    source: SentLocation
    to: SentLocation
    options: bytes
    is_paced: bool


class Staged(_SaveFrame, frozen=True, tag="c"):
    """Progress of staging.

    Attributes:
        chunks: New chunks: number, and offset in the arena; None if it has header bytes only.
        is_waiting: The trainer waits for memory: begin to store.
    """

    chunks: list[tuple[int, int | None]] = []
    is_waiting: bool = False
    is_last: bool = False
    error: tuple[EncodedError, ...] = ()


class CancelSave(_SaveFrame, frozen=True, tag="x"):
    """Aborts the save, if it is not too late.

    Attributes:
        is_concluded: The trainer has ended the call of all ranks.
    """

    reason: str
    is_concluded: bool = False


class EndReceived(_SaveFrame, frozen=True, tag="m"):
    """An end of the rank's mailbox has received an item (``transport.ends``)."""

    to_coordinator: bool
    item: bytes


Subject: TypeAlias = Literal["turn", "suspicion"]
Answer: TypeAlias = bool | str | None
"""The result of ``CommitTurn.wait`` or ``CoordinatorEnd.suspicion``."""


class Answered(_SaveFrame, frozen=True, tag="n"):
    """Answers ``AnswerWanted``."""

    subject: Subject
    answer: Answer


class TakeOver(_SaveFrame, frozen=True, tag="T"):
    """Prepares for opening the rank's mailbox if the trainer ends before the save.

    Attributes:
        name, session: ``namespace`` and ``session`` of the ``StorePort``.
    """

    host: str
    port: int
    prefix: str
    name: str
    session: bytes
    call: int


class LeaveTeam(msgspec.Struct, frozen=True, array_like=True, tag="L"):
    """The trainer's team makes no more calls."""

    team: int


ToSave: TypeAlias = Staged | CancelSave | EndReceived | Answered | TakeOver
ToProcess: TypeAlias = (
    ToSave | BeginSave | BeginCopy | Configure | LeaveTeam | AttemptsEnded | Alive
)


class AnswerWanted(_SaveFrame, frozen=True, tag="q"):
    """Asks for ``Answered``, before a commit."""

    subject: Subject


class MessageSent(_SaveFrame, frozen=True, tag="m"):
    """Sends a message through the rank's mailbox.

    Attributes:
        to: The rank; None: the coordinator.
    """

    to: int | None
    message: bytes


class TakeOverPrepared(_SaveFrame, frozen=True, tag="T"):
    """Answers ``TakeOver``.

    Attributes:
        error: Why the process cannot take over, or empty.
    """

    error: str


class Begun(_SaveFrame, frozen=True, tag="b"):
    """The save has begun, and may leave garbage. Only rank 0's attempt has a name yet."""

    attempt: str


class StagingWanted(_SaveFrame, frozen=True, tag="w"):
    """All ranks have joined: the rules and plan for packing the state.

    Attributes:
        attempt, url: Name and location of the attempt, as set by rank 0.
    """

    rules: PackingRules
    plan: RankPlan
    attempt: str = ""
    url: bytes = b""


class Progressed(_SaveFrame, frozen=True, tag="p"):
    """Progress since the last such frame.

    Attributes:
        hashed, stored: In bytes.
        released: Chunks whose memory is no longer used.
    """

    hashed: int
    stored: int
    released: list[int]


class Finished(_SaveFrame, frozen=True, tag="f"):
    """The outcome.

    Attributes:
        error: None if committed.
        is_unanswered: See ``CommitTurn.release``.
    """

    error: tuple[EncodedError, ...] | None
    is_unanswered: bool = False
    record: bytes = b""
    retries: int = 0


class CopyMoved(_SaveFrame, frozen=True, tag="M"):
    """Progress of a copy."""

    done_bytes: int
    total_bytes: int


class CopyEnded(_SaveFrame, frozen=True, tag="E"):
    """The outcome of a copy: an error or a ``CopyReport``."""

    error: tuple[EncodedError, ...] | None
    report: bytes = b""


class Logged(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    """A line for the trainer's log."""

    level: int
    logger: str
    text: str
    fields: dict[str, str | int | float | None] = {}


FromSave: TypeAlias = (
    Begun
    | MessageSent
    | AnswerWanted
    | TakeOverPrepared
    | StagingWanted
    | Progressed
    | Finished
    | CopyMoved
    | CopyEnded
)
FromProcess: TypeAlias = FromSave | Logged | AttemptsEnded | Alive
