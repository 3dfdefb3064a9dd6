# SPDX-License-Identifier: Apache-2.0
"""Names and records at a root, which holds the snapshots of one training run.

    <root>/step-0000000500.g8/           a snapshot: step 500, saved by generation 8
    <root>/.manager/runs/00000008.json   ``RunRecord``: the process of generation 8
    <root>/.manager/deleting/step-0000000500.g8.json   ``DeleteIntent``: it is being deleted
    <root>/.manager/marks/step-0000000500.g8/pin-00000000-<nonce>.json       ``PinMark``
    <root>/.manager/marks/step-0000000500.g8/metrics-00000001-<nonce>.json   ``MetricsMark``

Each manager that begins to write at the root gets a number, its *generation*. It is a part of each
name, so a name is never reused for other content: a run that goes back to step 300 and saves step
500 again uses another name. Generations order runs without clocks.

A *mark* is a fact that was added to a snapshot after its commit. Each mark is a separate object
that never changes, so several writers need no lock: readers merge the marks. A mark's number is the
number of marks that its writer saw, so later marks have greater numbers, without clocks.

Records are sealed like commit objects. Unknown fields are skipped, so newer releases may add some.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, TypeVar

import msgspec

from actorsnap.errors import ChecksumMismatch, FormatError
from actorsnap.format.layout import MAX_BYTES
from actorsnap.format.manifest import seal, unseal

MAX_STEP = MAX_BYTES
"""The greatest step that a commit object can hold, and the greatest generation."""

MANAGER_FOLDER = ".manager"

_RUNS, _DELETING, _JSON = f"{MANAGER_FOLDER}/runs/", f"{MANAGER_FOLDER}/deleting/", ".json"
_MARKS = f"{MANAGER_FOLDER}/marks/"

_STEP_NAME = re.compile(r"step-([0-9]{10,19})\.g([0-9]{1,19})")
_SHORT_NAME = re.compile(r"step[-_]?([0-9]{1,19})(?:\.g[0-9]+)?")
_RUN = re.compile(r"[0-9]{8,19}")
_RUN_REST = re.compile(r"\.([0-9]{8,19})\.json\.[0-9a-f]+\.tmp")
_MARK = re.compile(r"(pin|metrics)-([0-9]{8,19})-([0-9a-f]{16})")

_Generation = Annotated[int, msgspec.Meta(ge=1, le=MAX_STEP)]

T = TypeVar("T", bound="RunRecord | DeleteIntent | PinMark | MetricsMark")


@dataclass(frozen=True, slots=True)
class StepName:
    """A snapshot's folder at a root. Names have no order of their own: see ``keeping.timeline``."""

    step: int
    generation: int

    @classmethod
    def parse(cls, name: str) -> StepName | None:
        """Returns the parts of a name, or None if this module does not write such names."""
        match = _STEP_NAME.fullmatch(name)
        if match is None:
            return None
        parsed = cls(int(match[1]), int(match[2]))
        is_bounded = parsed.step <= MAX_STEP and 1 <= parsed.generation <= MAX_STEP
        return parsed if is_bounded and str(parsed) == name else None

    def __str__(self) -> str:
        return f"{names_prefix(self.step)}{self.generation}"


def parse_short_name(name: str) -> int | None:
    """Returns the step of a name that a person may write for a folder, such as ``step-350``."""
    match = _SHORT_NAME.fullmatch(name)
    step = None if match is None else int(match[1])
    return step if step is not None and step <= MAX_STEP else None


def names_prefix(step: int) -> str:
    """Returns what the names of all snapshots of ``step`` begin with."""
    return f"step-{step:010d}.g"


def run_key(generation: int) -> str:
    return f"{_RUNS}{generation:08d}{_JSON}"


def parse_run_key(key: str) -> int | None:
    """Returns the generation; None if ``key`` is not a run record's."""
    text = key.removeprefix(_RUNS).removesuffix(_JSON)
    if not _RUN.fullmatch(text):
        return None
    generation = int(text)
    return generation if 1 <= generation <= MAX_STEP and run_key(generation) == key else None


def intent_key(name: StepName) -> str:
    return f"{_DELETING}{name}{_JSON}"


def parse_intent_key(key: str) -> StepName | None:
    """Returns the snapshot's name; None if ``key`` is not an intent's."""
    name = StepName.parse(key.removeprefix(_DELETING).removesuffix(_JSON))
    return name if name and intent_key(name) == key else None


def is_rest(key: str, newest_generation: int) -> bool:
    """Returns whether ``key`` is a temporary that a killed process did not store.

    Of an intent; or of the record of a generation that is no longer the newest and cannot be taken.
    Marks and their temporaries go with the snapshot.
    """
    if key.startswith(_DELETING):
        return parse_intent_key(key) is None
    match = _RUN_REST.fullmatch(key.removeprefix(_RUNS)) if key.startswith(_RUNS) else None
    return match is not None and int(match[1]) < newest_generation


class MarkKind(StrEnum):
    PIN = "pin"
    METRICS = "metrics"


@dataclass(frozen=True, slots=True)
class MarkName:
    """The name of a mark. ``nonce``: 16 hex digits."""

    of: StepName
    kind: MarkKind
    number: int
    nonce: str

    @property
    def key(self) -> str:
        return f"{marks_prefix(self.of)}{self.kind}-{self.number:08d}-{self.nonce}{_JSON}"

    @classmethod
    def parse(cls, key: str) -> MarkName | None:
        """Returns None if ``key`` is not a mark's."""
        folder, _, last = key.removeprefix(_MARKS).partition("/")
        of, match = StepName.parse(folder), _MARK.fullmatch(last.removesuffix(_JSON))
        if of is None or match is None:
            return None
        parsed = cls(of, MarkKind(match[1]), int(match[2]), match[3])
        return parsed if parsed.key == key else None


def marks_prefix(name: StepName) -> str:
    """Returns the prefix of the keys of a snapshot's marks."""
    return f"{_MARKS}{name}/"


def marked(key: str) -> StepName | None:
    """Returns the snapshot of a key below ``marks/``, also of a temporary or a stranger's."""
    if not key.startswith(_MARKS):
        return None
    return StepName.parse(key.removeprefix(_MARKS).partition("/")[0])


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The manager that began a generation.

    Attributes:
        created_s: In seconds since 1970, by its own clock: for people, not for order.
        restored_from: Name of the snapshot that it continued; None for a fresh start.
        tier_of: URL of the root, in the copy of the record at a tier: for people.
    """

    generation: _Generation
    created_s: float
    host: str
    pid: int
    world_size: Annotated[int, msgspec.Meta(ge=1)]
    restored_from: str | None = None
    tier_of: str | None = None


class DeleteIntent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The decision to delete a snapshot, stored before its first object goes.

    Attributes:
        attempt: The attempt that was judged; another one at the same name stays. Empty if the
            commit object could not be read.
        generation: Generation of the manager that decided.
        reason: For people.
    """

    attempt: str
    generation: _Generation
    reason: str


class PinMark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A snapshot must not be deleted.

    Attributes:
        holder: Who pinned it: a user and a host, for people.
        created_s: In seconds since 1970, by the holder's clock.
        for_s: Seconds after which the pin expires; None: never.
    """

    reason: str
    holder: str
    created_s: float
    for_s: float | None = None


class MetricsMark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Metrics that were known only after the save. NaN and infinities as text, as in commits."""

    metrics: dict[str, float | str]
    created_s: float


_encoder = msgspec.json.Encoder(order="deterministic")


def encode_record(record: RunRecord | DeleteIntent | PinMark | MetricsMark) -> bytes:
    return seal(_encoder.encode(record))


def decode_record(data: bytes | bytearray | memoryview, kind: type[T], key: str) -> T:
    """Decodes a record; errors name ``key``.

    Raises:
        ChecksumMismatch: It is damaged, or another program wrote it.
        FormatError: It is intact, but not a ``kind``.
    """
    body = unseal(bytes(data))
    if body is None:
        raise ChecksumMismatch(key=key, detail="the record is damaged: its checksum does not match")
    try:
        return msgspec.json.decode(body, type=kind)
    except (ValueError, RecursionError) as error:  # as in manifest.py
        raise FormatError(key=key, detail=str(error)) from error
