"""Messages between a trainer and its uploader process.

The trainer captures and stages. The process runs the participant, the coordinator on rank 0, and
the storage. See ``docs/decisions/0011-uploader-process.md``. Tensor bytes travel through the arena,
never here.

Both ends are of the same release. A state's ``Structure`` is sent once. A save then sends its
digest and the small values that have changed since. Chunks are not described: each end packs the
same items by the same plan and rules, and numbers the chunks as in ``packing.write_order``.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from actorsnap.format.manifest import MemoryFormat
from actorsnap.planning.inventory import Sharded
from actorsnap.planning.packing import Item, PackingRules, RankPlan
from actorsnap.protocol.failure import EncodedError

__all__ = [
    "AbsenceAsked",
    "AbsenceReported",
    "Alive",
    "AttemptsEnded",
    "Begun",
    "CancelSave",
    "ChangeEnvironment",
    "ChangeLogLevel",
    "ChangePace",
    "ChunksReleased",
    "ChunksStaged",
    "EndReceived",
    "EndSave",
    "Finished",
    "FromProcess",
    "LeaveTeam",
    "Logged",
    "MessageSent",
    "Progressed",
    "ProcessStarted",
    "Recorded",
    "Remember",
    "Save",
    "StagingEnded",
    "StagingFailed",
    "StagingWaits",
    "StagingWanted",
    "Structure",
    "TakeOver",
    "TakeOverPrepared",
    "TeamRank",
    "ToProcess",
    "TurnAsked",
    "TurnGiven",
]


class Structure(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An app state without its values: the leaves with bytes, as columns, and the other entries.

    Attributes:
        items, kinds, dtypes: One per leaf with bytes, in traversal order; see ``Leaf``.
        requires_grad: Indices of the leaves that require gradients.
        holders: Sets of ranks with the indices of the leaves that these ranks share.
        rank_zero_wins: Indices of the leaves of which rank 0's value is authoritative.
        memory_formats: By leaf index, where there is one.
        attributes: By leaf index, where there are some; JSON.
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


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    pass


class Alive(_Frame, frozen=True, tag="a"):
    """Heartbeat without news, in either direction."""


class AttemptsEnded(_Frame, frozen=True, tag="A"):
    """Attempts of the sender have committed or can no longer commit, in either direction.

    The receiver may delete their garbage too.
    """

    attempts: list[str]


# Frames to the process ----------------------------------------------------------------------


class Remember(_Frame, frozen=True, tag="r"):
    """Defines a structure that saves will name, with its current values.

    Attributes:
        values: One entry each, as JSON.
        forgotten: Digest of a structure that no later save will name, or empty.
    """

    digest: bytes
    structure: Structure
    values: list[bytes]
    forgotten: bytes = b""


class TeamRank(_Frame, frozen=True):
    """The rank of a save with several ranks.

    Attributes:
        team: Number of the trainer's team.
    """

    team: int
    rank: int
    world_size: int


class Save(_Frame, frozen=True, tag="s"):
    """Begins a save.

    Attributes:
        number: Number of the save, in all frames about it.
        values: Values that differ from those in ``Remember``: index among the values, and entry.
        url, at, storage_options: See ``runtime.location.Location``.
        options, metadata: As msgpack, and as JSON.
        left_s: Seconds left of ``Options.timeout_s``.
        step: See ``SaveRequest``.
        budget_bytes: Budget of the trainer's process, in bytes.
        after: The attempt of a process that died in this save, or empty.
        records: Send ``Recorded`` at the end.
        team: None if this is the only rank.
    """

    number: int
    structure: bytes
    values: list[tuple[int, bytes]]
    url: str
    at: bytes
    storage_options: dict[str, Any]
    options: bytes
    left_s: float
    budget_bytes: int
    overwrite: bool
    resume: bool
    metadata: bytes
    step: int | None = None
    after: str = ""
    records: bool = False
    team: TeamRank | None = None


class ChunksStaged(_Frame, frozen=True, tag="c"):
    """Chunks are in the arena: the number of each, and its offset there.

    The offset is None for a chunk of header bytes only.
    """

    number: int
    chunks: list[tuple[int, int | None]]


class StagingWaits(_Frame, frozen=True, tag="w"):
    """The trainer waits for memory: begin to store."""

    number: int


class StagingEnded(_Frame, frozen=True, tag="e"):
    """All chunks were staged."""

    number: int


class StagingFailed(_Frame, frozen=True, tag="f"):
    """Staging has failed; no more chunks follow."""

    number: int
    error: tuple[EncodedError, ...]


class CancelSave(_Frame, frozen=True, tag="x"):
    """Aborts the save, if it is not too late."""

    number: int
    reason: str


class ChangeEnvironment(_Frame, frozen=True, tag="v"):
    """Environment variables that the trainer has set or deleted since: they may be credentials."""

    variables: list[tuple[bytes, bytes | None]]


class ChangeLogLevel(_Frame, frozen=True, tag="l"):
    """Sets the minimum level of lines for the trainer's log, after the application changed it."""

    level: int


class ChangePace(_Frame, frozen=True, tag="p"):
    """Sets the share of the time in which uploaders work; see ``pacing``."""

    duty: float


class EndSave(_Frame, frozen=True, tag="E"):
    """Ends a save of several ranks: the trainer has concluded it."""

    number: int
    reason: str


class EndReceived(_Frame, frozen=True, tag="m"):
    """An end of the rank's mailbox has received an item (``transport.relay``).

    Attributes:
        to_coordinator: It is the coordinator's end.
    """

    number: int
    to_coordinator: bool
    item: bytes


class AbsenceReported(_Frame, frozen=True, tag="q"):
    """The answer to ``AbsenceAsked``; see ``CoordinatorEnd.absence``."""

    number: int
    reason: str | None


class TurnGiven(_Frame, frozen=True, tag="t"):
    """The answer to ``TurnAsked``; see ``CommitTurn.wait``."""

    number: int
    is_unanswered: bool


class TakeOver(_Frame, frozen=True, tag="T"):
    """Prepares for opening the rank's mailbox if the trainer ends before the save.

    Attributes:
        host, port: Address of the underlying TCPStore.
        prefix: Prefix of all keys.
        name: See ``StorePort.namespace``.
        session: See ``StorePort.session``.
        call: Number of the call in the team.
    """

    number: int
    host: str
    port: int
    prefix: str
    name: str
    session: bytes
    call: int


class LeaveTeam(_Frame, frozen=True, tag="L"):
    """The trainer's team makes no more calls; see ``TeamRank.team``."""

    team: int


ToProcess: TypeAlias = (
    Remember
    | LeaveTeam
    | Save
    | ChunksStaged
    | StagingWaits
    | StagingEnded
    | StagingFailed
    | CancelSave
    | ChangeEnvironment
    | ChangeLogLevel
    | ChangePace
    | EndSave
    | EndReceived
    | AbsenceReported
    | TurnGiven
    | TakeOver
    | AttemptsEnded
    | Alive
)


# Frames from the process --------------------------------------------------------------------


class ProcessStarted(_Frame, frozen=True, tag="r"):
    """The process listens."""

    release: str


class MessageSent(_Frame, frozen=True, tag="m"):
    """Sends a message through the rank's mailbox.

    Attributes:
        to: The rank; None: the coordinator.
        message: See ``transport.relay.encode_item``.
    """

    number: int
    to: int | None
    message: bytes


class AbsenceAsked(_Frame, frozen=True, tag="q"):
    """Asks for ``AbsenceReported``."""

    number: int


class TurnAsked(_Frame, frozen=True, tag="u"):
    """Asks for ``TurnGiven``, before the commit of a save that overwrites."""

    number: int


class TakeOverPrepared(_Frame, frozen=True, tag="T"):
    """The answer to ``TakeOver``.

    Attributes:
        error: Why the process cannot take over; empty if it can.
    """

    number: int
    error: str


class Begun(_Frame, frozen=True, tag="b"):
    """The save has begun, and may leave garbage from now on. On rank 0 the attempt has a name."""

    number: int
    attempt: str


class StagingWanted(_Frame, frozen=True, tag="w"):
    """All ranks have joined: the rules and plan for packing the state.

    Attributes:
        attempt, at: Name and location of the attempt, as set by rank 0.
    """

    number: int
    rules: PackingRules
    plan: RankPlan
    attempt: str = ""
    at: bytes = b""


class ChunksReleased(_Frame, frozen=True, tag="c"):
    """The memory of these chunks is no longer used."""

    number: int
    chunks: list[int]


class Progressed(_Frame, frozen=True, tag="p"):
    """Bytes done since the last frame."""

    number: int
    hashed: int
    stored: int


class Finished(_Frame, frozen=True, tag="f"):
    """The outcome.

    Attributes:
        error: None if committed.
        is_unanswered: See ``CommitTurn.release``.
    """

    number: int
    error: tuple[EncodedError, ...] | None
    is_unanswered: bool = False


class Recorded(_Frame, frozen=True, tag="t"):
    """Activities of the process, for the trainer's trace; sent before ``Finished``.

    Attributes:
        retries: Number of retried storage requests.
        record: See ``actors.trace.Record``, as msgpack.
    """

    number: int
    attempt: str
    retries: int
    record: bytes


class Logged(_Frame, frozen=True, tag="l"):
    """A line for the trainer's log, with its fields."""

    level: int
    logger: str
    text: str
    fields: dict[str, str | int | float | None] = {}


FromProcess: TypeAlias = (
    ProcessStarted
    | MessageSent
    | AbsenceAsked
    | TurnAsked
    | TakeOverPrepared
    | Begun
    | StagingWanted
    | ChunksReleased
    | Progressed
    | Recorded
    | Finished
    | Logged
    | AttemptsEnded
    | Alive
)
