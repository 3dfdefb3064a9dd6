# SPDX-License-Identifier: Apache-2.0
"""Progress of a running call, and a record of its actors' work.

A ``ProgressBoard`` holds the latest state only: a slow reader never delays a save. A ``Recorder``
keeps timings; an unobserved call uses ``NULL_RECORDER``. Must not know files; clocks are passed in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple, ParamSpec, TypeAlias, TypeVar

import msgspec

from actorsnap.log import Log

T = TypeVar("T")
P = ParamSpec("P")

logger = Log(__name__)


class Phase(StrEnum):
    """Phases of a save; see ``Progress``."""

    STAGING = "staging"
    STORING = "storing"
    COMMITTED = "committed"
    ABORTED = "aborted"


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a save on this rank. Counters are bytes before compression and never decrease.

    Attributes:
        phase: ``staging`` until the trainer may overwrite its tensors, then ``storing``, then
            ``committed`` or ``aborted``.
        total_bytes: Bytes that this rank stores, including headers. 0 until they are planned.
        staged_bytes: Bytes copied so far.
        hashed_bytes: Bytes whose checksums are computed.
        stored_bytes: Bytes stored so far.
    """

    phase: Phase = Phase.STAGING
    total_bytes: int = 0
    staged_bytes: int = 0
    hashed_bytes: int = 0
    stored_bytes: int = 0

    @property
    def is_last(self) -> bool:
        """Whether the save has ended: committed or aborted."""
        return self.phase in (Phase.COMMITTED, Phase.ABORTED)


class ProgressBoard:
    """The latest ``Progress`` of one save.

    Args:
        label: Prefix of every log line: snapshot, attempt and rank.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self._lock = threading.Lock()
        self._latest = Progress()
        self._listeners: list[Callable[[], None]] = []

    @property
    def latest(self) -> Progress:
        return self._latest

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Calls ``listener`` after each change; returns a function that ends the subscription.

        The listener runs on the runtime's thread and must not block.
        """
        with self._lock:
            self._listeners.append(listener)

        def unsubscribe() -> None:
            with self._lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return unsubscribe

    def plan(self, total_bytes: int) -> None:
        self._change(total_bytes=total_bytes)

    def add(self, *, staged: int = 0, hashed: int = 0, stored: int = 0) -> None:
        now = self._latest
        self._change(
            staged_bytes=now.staged_bytes + staged,
            hashed_bytes=now.hashed_bytes + hashed,
            stored_bytes=now.stored_bytes + stored,
        )

    def enter(self, phase: Phase) -> None:
        if not self._latest.is_last:
            logger.debug("%s: %s", self.label, phase)
            self._change(phase=phase)

    def _change(self, **fields: object) -> None:
        with self._lock:
            self._latest = msgspec.structs.replace(self._latest, **fields)
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener()


class Work(StrEnum):
    AGREE = "agree"
    CAPTURE = "capture"
    STAGE = "stage"
    OPEN = "open"
    HASH = "hash"
    COMPRESS = "compress"
    STORE = "store"
    REUSE = "reuse"
    COMPLETE = "complete"
    MANIFEST = "manifest"
    COMMIT = "commit"
    INDEX = "index"
    COMPARE = "compare"
    READ = "read"
    DECOMPRESS = "decompress"
    VERIFY = "verify"
    PLACE = "place"
    LOAD = "load"


class Wait(StrEnum):
    """Trace files and other processes know them by the first word; see ``is_wait``."""

    MEMORY = "wait for memory"
    THREAD = "wait for a thread"
    ROOM = "wait for room"
    CHUNK = "wait for a chunk"
    OBJECT = "wait for an object"
    PACE = "wait for the pace"
    READS = "wait for the reads"


Kind: TypeAlias = Work | Wait


def is_wait(kind: str) -> bool:
    return kind.startswith("wait ")


MAX_SPANS = 20_000
"""Spans of a row: some megabytes of memory. Totals continue beyond it."""

_MIN_WAIT_NS = 20_000
"""Shortest wait that is recorded as a span; shorter ones only count."""


class Span(NamedTuple):
    """An activity on ``nbytes`` bytes of the object ``key`` from ``offset``."""

    kind: str
    begin_ns: int
    end_ns: int
    key: str
    offset: int
    nbytes: int


class Mark(NamedTuple):
    at_ns: int
    name: str
    details: dict[str, str | int | float]


class Sample(NamedTuple):
    at_ns: int
    name: str
    value: int


@dataclass(slots=True)
class Totals:
    begin_ns: int
    count: int = 0
    nbytes: int = 0
    spent_ns: int = 0
    end_ns: int = 0


class RowRecord(msgspec.Struct, array_like=True):
    """The recorded content of a row."""

    name: str
    spans: list[Span] = []
    totals: dict[str, Totals] = {}
    num_dropped: int = 0


class Record(msgspec.Struct, frozen=True, array_like=True):
    """Content of a recorder, for another process of the machine."""

    rows: list[RowRecord]
    marks: list[Mark]
    samples: list[Sample]


class Row:
    """Sequential activities of one actor. Made by a ``Recorder``.

    A span begins at the end of the previous one: call sites follow the work they describe. Used by
    one task, or a thread working for it, at a time.
    """

    def __init__(
        self, name: str, clock: Callable[[], int], on_work: Callable[[int], None] | None = None
    ) -> None:
        self.record = RowRecord(name)
        self._clock = clock
        self._on_work = on_work
        self._since_ns = clock()

    def restart(self) -> None:
        """Excludes the time since the last span."""
        self._since_ns = self._clock()

    def note(self, kind: Kind, key: str = "", offset: int = 0, nbytes: int = 0) -> None:
        """Records the time since the last span as ``kind``."""
        begin_ns, end_ns = self._since_ns, self._clock()
        self._since_ns = end_ns
        record = self.record
        totals = record.totals.get(kind)
        if totals is None:
            totals = record.totals[kind] = Totals(begin_ns)
        totals.count += 1
        totals.nbytes += nbytes
        totals.spent_ns += end_ns - begin_ns
        totals.end_ns = end_ns
        if isinstance(kind, Wait) and end_ns - begin_ns < _MIN_WAIT_NS:
            return
        if len(record.spans) < MAX_SPANS:
            record.spans.append(Span(kind, begin_ns, end_ns, key, offset, nbytes))
        else:
            record.num_dropped += 1

    def look(self) -> None:
        """Calls ``on_work``. On worker threads only."""
        if self._on_work is not None:
            self._on_work(self._since_ns)

    def around(
        self, fn: Callable[P, T], kind: Kind, key: str, offset: int, nbytes: int
    ) -> Callable[P, T]:
        """Wraps ``fn`` for a worker thread: records the wait for the thread, and the call."""

        def noted(*args: P.args, **kwargs: P.kwargs) -> T:
            self.note(Wait.THREAD)
            self.look()
            result = fn(*args, **kwargs)
            self.note(kind, key, offset, nbytes)
            self.look()
            return result

        return noted


class Recorder:
    """Activities of all actors of one call on one rank. Rows are made on one thread at a time.

    Args:
        clock: Returns nanoseconds; the same for all processes of a machine.
        on_work: Called with the time before and after each call on a worker thread, there.
    """

    def __init__(
        self, clock: Callable[[], int], on_work: Callable[[int], None] | None = None
    ) -> None:
        self.begin_ns = clock()
        self.rows: list[RowRecord] = []
        self.marks: list[Mark] = []
        self.samples: list[Sample] = []
        self._clock = clock
        self._on_work = on_work
        self._idle: dict[str, list[Row]] = {}
        self._num: dict[str, int] = {}

    def add_row(self, actor: str) -> Row:
        number = self._num.get(actor, 0)
        self._num[actor] = number + 1
        row = Row(f"{actor} {number}", self._clock, self._on_work)
        self.rows.append(row.record)
        return row

    @contextmanager
    def row(self, actor: str) -> Iterator[Row]:
        """Yields an idle row of such an actor."""
        idle = self._idle.setdefault(actor, [])
        if idle:
            row = idle.pop(0)
            row.restart()
        else:
            row = self.add_row(actor)
        try:
            yield row
        finally:
            idle.insert(0, row)

    def record(self) -> Record:
        return Record([row for row in self.rows if row.totals], self.marks, self.samples)

    def adopt(self, record: Record) -> None:
        self.rows += record.rows
        self.marks += record.marks
        self.samples += record.samples

    def clear(self) -> None:
        """Releases all content."""
        self.rows.clear()
        self.marks.clear()
        self.samples.clear()
        self._idle.clear()

    def mark(self, name: str, **details: str | int | float) -> None:
        """Records an event; on any thread."""
        if len(self.marks) < MAX_SPANS:
            self.marks.append(Mark(self._clock(), name, details))

    def sample(self, name: str, measure: Callable[[], int]) -> None:
        """Records a quantity; on any thread."""
        if len(self.samples) < MAX_SPANS:
            self.samples.append(Sample(self._clock(), name, measure()))


class _NullRow(Row):
    def __init__(self) -> None:
        super().__init__("", lambda: 0)

    def restart(self) -> None:
        """Does nothing."""

    def note(self, kind: Kind, key: str = "", offset: int = 0, nbytes: int = 0) -> None:
        """Does nothing."""

    def around(
        self, fn: Callable[P, T], kind: Kind, key: str, offset: int, nbytes: int
    ) -> Callable[P, T]:
        return fn


class _NullRecorder(Recorder):
    def __init__(self) -> None:
        super().__init__(lambda: 0)
        self._row = _NullRow()

    def add_row(self, actor: str) -> Row:
        return self._row

    @contextmanager
    def row(self, actor: str) -> Iterator[Row]:
        yield self._row

    def adopt(self, record: Record) -> None:
        """Does nothing."""

    def mark(self, name: str, **details: str | int | float) -> None:
        """Does nothing."""

    def sample(self, name: str, measure: Callable[[], int]) -> None:
        """Does not even call ``measure``, which may cost microseconds."""


NULL_RECORDER: Final[Recorder] = _NullRecorder()
