"""What a trainer and its uploader process say to each other, on the connection between them.

The trainer captures and stages; the process does all else of a save, as a process of its own would
do it: it runs the participant, on rank 0 the coordinator, and the storage. See
``docs/decisions/0011-uploader-process.md``. Bytes of tensors travel through the arena, never here.

Both ends are of the same release. What a state is like is said once, as a ``Structure`` with a
digest; a save then names the digest, and the small values that differ from those that came with
it. Chunks are not described at all: each end packs the same items by the same plan and rules, and
counts the chunks in ``packing.write_order``.
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
    "Ready",
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
        requires_grad: Indices of those leaves that do.
        holders: Ranks that hold the same, and the indices of what they hold.
        rank_zero_wins: Indices of those of which rank 0's value counts.
        memory_formats: Of leaves that have one, by index.
        attributes: Of leaves that have some, by index, as JSON.
        entries: The finished entries but for values, with their positions among all parts, as JSON.
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
    """Nothing is new, in either direction."""


class AttemptsEnded(_Frame, frozen=True, tag="A"):
    """Attempts of this end's own have committed, or cannot any more, in either direction: what they
    have left is the other's to collect as well."""

    attempts: list[str]


# Frames to the process ----------------------------------------------------------------------


class Remember(_Frame, frozen=True, tag="r"):
    """A structure that saves will name, and its values as they are now.

    Attributes:
        values: An entry each, as JSON.
        forgotten: Digest of the one that no save will name any more, or empty.
    """

    digest: bytes
    structure: Structure
    values: list[bytes]
    forgotten: bytes = b""


class TeamRank(_Frame, frozen=True):
    """The rank of a save among others.

    Attributes:
        team: Number of the trainer's team.
    """

    team: int
    rank: int
    world_size: int


class Save(_Frame, frozen=True, tag="s"):
    """Begin a save.

    Attributes:
        number: Of the save, in all frames about it.
        values: Those that differ from what ``Remember`` said: number among the values, entry.
        url, at, storage_options: See ``runtime.place.Place``.
        options, metadata: As msgpack, and as JSON.
        left_s: Seconds until ``Options.timeout_s`` is over.
        step: See ``SaveRequest``.
        budget_bytes: Of the trainer's process.
        after: The attempt of a process that died in this save, or empty.
        records: Say at the end what was done.
        team: None where this is the only rank.
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
    """Chunks lie in the arena: number of each, and its offset there, or None if it has no bytes
    but the object's header."""

    number: int
    chunks: list[tuple[int, int | None]]


class StagingWaits(_Frame, frozen=True, tag="w"):
    """The trainer waits for memory: store what there is."""

    number: int


class StagingEnded(_Frame, frozen=True, tag="e"):
    """All chunks were staged."""

    number: int


class StagingFailed(_Frame, frozen=True, tag="f"):
    """No more chunks come."""

    number: int
    error: tuple[EncodedError, ...]


class CancelSave(_Frame, frozen=True, tag="x"):
    """Abort the save, if it is not too late."""

    number: int
    reason: str


class ChangeEnvironment(_Frame, frozen=True, tag="v"):
    """Variables that the trainer has set since, or deleted: a storage may find its credentials
    there."""

    variables: list[tuple[bytes, bytes | None]]


class ChangeLogLevel(_Frame, frozen=True, tag="l"):
    """Lines from this level on go to the trainer's log: its application has changed that since."""

    level: int


class ChangePace(_Frame, frozen=True, tag="p"):
    """Uploaders work for this share of the time from now on; see ``pacing``."""

    duty: float


class EndSave(_Frame, frozen=True, tag="E"):
    """Ends a save of several ranks: the trainer has concluded it."""

    number: int
    reason: str


class EndReceived(_Frame, frozen=True, tag="m"):
    """An end of the rank's mailbox gave an item (``transport.relay``).

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
    """Open the rank's mailbox if the trainer ends before the save; prepare for that now.

    Attributes:
        host, port: Of the TCPStore below all prefixes.
        prefix: Of all keys.
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
    """The trainer's team makes no more calls: see ``TeamRank.team``."""

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


class Ready(_Frame, frozen=True, tag="r"):
    """The process listens."""

    release: str


class MessageSent(_Frame, frozen=True, tag="m"):
    """Send a message by the rank's mailbox.

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
        error: Why the process cannot do it; empty if it can.
    """

    number: int
    error: str


class Begun(_Frame, frozen=True, tag="b"):
    """The save has begun: from now on it may leave something behind. On rank 0 it has a name."""

    number: int
    attempt: str


class StagingWanted(_Frame, frozen=True, tag="w"):
    """How the state is cut into chunks. All ranks have joined.

    Attributes:
        attempt, at: What is saved, and where: rank 0's.
    """

    number: int
    rules: PackingRules
    plan: RankPlan
    attempt: str = ""
    at: bytes = b""


class ChunksReleased(_Frame, frozen=True, tag="c"):
    """These chunks' memory is not looked at any more."""

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
        error: None if it is committed.
        is_unanswered: See ``CommitTurn.release``.
    """

    number: int
    error: tuple[EncodedError, ...] | None
    is_unanswered: bool = False


class Recorded(_Frame, frozen=True, tag="t"):
    """What the process did, for the trainer's trace; before ``Finished``.

    Attributes:
        retries: How often the storage was asked again.
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
    Ready
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
