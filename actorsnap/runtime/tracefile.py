# SPDX-License-Identifier: Apache-2.0
"""A recording on disk, as JSON in Chrome's trace event format ("Trace Event Format", Google), for
``chrome://tracing``, https://ui.perfetto.dev and ``actorsnap trace``.

A process of the format is a rank, a thread is a row. Times are microseconds since the epoch: files
of several ranks can be merged. ``summaries`` and ``page`` show what a file contains.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Annotated, Any, TypeAlias

import msgspec

from actorsnap.actors.trace import Recorder, is_wait
from actorsnap.errors import UsageError
from actorsnap.runtime import pages

_VERSION = 1

Int: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""An int of at most 64 bits."""


class ActorTotals(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of work or wait of one actor."""

    actor: str
    kind: str
    count: Int
    nbytes: Int
    seconds: float


class About(msgspec.Struct, frozen=True, kw_only=True):
    """The call of a trace.

    Attributes:
        op: ``save`` or ``restore``.
        outcome: Save: ``committed`` or ``aborted``. Restore: ``restored``, ``failed`` or
            ``cancelled``.
        error: Class and text.
        begin_us, end_us: Since the epoch.
        retries: Repeated storage requests.
        memory_begin_bytes, memory_peak_bytes: Resident memory of the caller's process: before the
            first work on bytes, and the most that was seen until the end. 0: unknown.
        dropped: Spans beyond the limit, counted in ``actors`` only.
        actors: In row order.
    """

    version: Int = _VERSION
    op: str
    url: str
    attempt: str
    rank: Int
    world_size: Int
    outcome: str
    error: str = ""
    begin_us: Int
    end_us: Int
    retries: Int = 0
    memory_begin_bytes: Int = 0
    memory_peak_bytes: Int = 0
    dropped: Int = 0
    actors: tuple[ActorTotals, ...] = ()

    @property
    def seconds(self) -> float:
        return (self.end_us - self.begin_us) / 1e6


class TraceEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A span (``X``), mark (``i``), sample (``C``) or name (``M``)."""

    ph: str
    name: str
    pid: Int
    tid: Int
    ts: Int | None = None
    dur: Int | None = None
    cat: str | None = None
    s: str | None = None
    args: dict[str, Any] = {}


class TraceFile(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Events and their calls: several in merged files."""

    trace_events: list[TraceEvent]
    display_time_unit: str = "ms"
    other_data: dict[str, list[About]] = {}

    @property
    def abouts(self) -> list[About]:
        return self.other_data.get("actorsnap", [])


def trace_of(recorder: Recorder, about: About, *, epoch_ns: int) -> TraceFile:
    """Returns the trace of one call.

    Args:
        epoch_ns: Offset of the recorder's clock to the epoch.
    """
    about = msgspec.structs.replace(
        about,
        dropped=sum(row.num_dropped for row in recorder.rows),
        actors=tuple(_totals(recorder)),
    )
    events = [*_names(recorder, about), *_events(recorder, about.rank, epoch_ns)]
    return TraceFile(trace_events=events, other_data={"actorsnap": [about]})


def _totals(recorder: Recorder) -> Iterator[ActorTotals]:
    for row in recorder.rows:
        for kind, totals in tuple(row.totals.items()):
            yield ActorTotals(
                actor=row.name,
                kind=kind,
                count=totals.count,
                nbytes=totals.nbytes,
                seconds=totals.spent_ns / 1e9,
            )


def _names(recorder: Recorder, about: About) -> Iterator[TraceEvent]:
    pid = about.rank
    title = f"rank {about.rank}: {about.op} {about.url}"
    yield TraceEvent(ph="M", name="process_name", pid=pid, tid=0, args={"name": title})
    yield TraceEvent(ph="M", name="process_sort_index", pid=pid, tid=0, args={"sort_index": pid})
    for number, row in enumerate(recorder.rows, 1):
        yield TraceEvent(ph="M", name="thread_name", pid=pid, tid=number, args={"name": row.name})
        order = {"sort_index": number}
        yield TraceEvent(ph="M", name="thread_sort_index", pid=pid, tid=number, args=order)


def _events(recorder: Recorder, pid: int, epoch_ns: int) -> Iterator[TraceEvent]:
    for number, row in enumerate(recorder.rows, 1):
        for span in tuple(row.spans):
            # Both ends are rounded down: adjacent spans never overlap.
            ts = (span.begin_ns + epoch_ns) // 1000
            dur = (span.end_ns + epoch_ns) // 1000 - ts
            args: dict[str, Any] = {}
            if span.key:
                args = {"key": span.key, "offset": span.offset, "bytes": span.nbytes}
            cat = "wait" if is_wait(span.kind) else "work"
            yield TraceEvent(
                ph="X", name=span.kind, cat=cat, pid=pid, tid=number, ts=ts, dur=dur, args=args
            )
    for mark in tuple(recorder.marks):
        ts = (mark.at_ns + epoch_ns) // 1000
        yield TraceEvent(
            ph="i", name=mark.name, cat="mark", s="p", pid=pid, tid=0, ts=ts, args=mark.details
        )
    for sample in tuple(recorder.samples):
        ts = (sample.at_ns + epoch_ns) // 1000
        value = {sample.name: sample.value}
        yield TraceEvent(ph="C", name=sample.name, pid=pid, tid=0, ts=ts, args=value)


def write(path: str, trace: TraceFile) -> None:
    """Writes a trace atomically; creates its folder. Blocks.

    Raises:
        OSError: writing failed, or ``path`` is not a regular file.
    """
    folder = os.path.dirname(path) or "."
    os.makedirs(folder, exist_ok=True)
    if os.path.exists(path) and not os.path.isfile(path):
        # Root would replace a device such as /dev/null.
        raise OSError(errno.EEXIST, "no regular file", path)
    # Unique: concurrent calls may write to the same path.
    unfinished = os.path.join(folder, f".actorsnap-{secrets.token_hex(8)}.tmp")
    try:
        with open(unfinished, "wb") as file:
            file.write(msgspec.json.encode(trace))
        os.replace(unfinished, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(unfinished)
        raise


def read(path: str) -> TraceFile:
    """Reads a file of ``write``. Blocks.

    Raises:
        UsageError: the file is missing or no trace of actorsnap.
    """
    try:
        with open(path, "rb") as file:
            trace = msgspec.json.decode(file.read(), type=TraceFile)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not a trace of actorsnap: {error}") from error
    if not trace.abouts:
        raise UsageError(f"{path} is not a trace of actorsnap: it does not describe a call")
    return trace


def merge(traces: Sequence[TraceFile]) -> TraceFile:
    """Merges traces. Each call has its own rows, even on one rank."""
    events: list[TraceEvent] = []
    num_rows: dict[int, int] = {}
    for trace in traces:
        before = dict(num_rows)
        for event in trace.trace_events:
            if event.tid and before.get(event.pid):
                event = msgspec.structs.replace(event, tid=event.tid + before[event.pid])
            num_rows[event.pid] = max(num_rows.get(event.pid, 0), event.tid)
            events.append(event)
    abouts = [about for trace in traces for about in trace.abouts]
    return TraceFile(trace_events=events, other_data={"actorsnap": abouts})


_NUM_LONGEST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTotals:
    """One kind of work or wait, over all actors of a call.

    Attributes:
        nbytes: Bytes processed.
        spent_s: Sum over all actors; exceeds ``busy_s`` if several worked at once.
        busy_s: Time with at least one actor in this stage.
    """

    kind: str
    nbytes: int
    spent_s: float
    busy_s: float
    is_wait: bool

    @property
    def bytes_per_s(self) -> float:
        """Per second of ``busy_s``; 0 if no bytes are counted."""
        return self.nbytes / self.busy_s if self.busy_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Longest:
    """A long wait of one actor; ``at_s``: since the start of the call."""

    actor: str
    kind: str
    seconds: float
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The time spent in one call on one rank.

    Attributes:
        stages: Work in order of its start, then waits by time spent.
        moving_s: Time with at least one actor processing bytes.
        overlapping_s: Time with several stages processing bytes.
        longest: The longest waits.
    """

    about: About
    stages: tuple[StageTotals, ...]
    moving_s: float
    overlapping_s: float
    longest: tuple[Longest, ...]


def summaries(trace: TraceFile) -> list[Summary]:
    # They may be missing from an edited file.
    calls = chain(_events_by_call(trace), repeat([]))
    return [_summary(events, about) for about, events in zip(trace.abouts, calls, strict=False)]


def _events_by_call(trace: TraceFile) -> list[list[TraceEvent]]:
    """Returns events in the order of ``abouts``: calls of a rank may overlap."""
    calls: list[list[TraceEvent]] = []
    for event in trace.trace_events:
        if event.ph == "M" and event.name == "process_name":
            calls.append([])
        if calls:
            calls[-1].append(event)
    return calls


def _summary(events: Sequence[TraceEvent], about: About) -> Summary:
    actors = {e.tid: str(e.args.get("name")) for e in events if e.name == "thread_name"}
    spans = [event for event in events if event.ph == "X"]
    waits = [event for event in spans if event.cat == "wait"]
    waits.sort(key=lambda event: -(event.dur or 0))
    moving = [event for event in spans if event.cat == "work" and event.args.get("bytes")]
    layers = [interval for of_kind in _by_kind(moving).values() for interval in _union(of_kind)]
    return Summary(
        about=about,
        stages=tuple(_stages(about, spans)),
        moving_s=_covered_us(layers, 1) / 1e6,
        overlapping_s=_covered_us(layers, 2) / 1e6,
        longest=tuple(
            Longest(
                actor=actors.get(event.tid, str(event.tid)),
                kind=event.name,
                seconds=(event.dur or 0) / 1e6,
                at_s=((event.ts or 0) - about.begin_us) / 1e6,
            )
            for event in waits[:_NUM_LONGEST]
        ),
    )


def _stages(about: About, spans: Sequence[TraceEvent]) -> Iterator[StageTotals]:
    nbytes: dict[str, int] = {}
    spent_s: dict[str, float] = {}
    for row in about.actors:
        nbytes[row.kind] = nbytes.get(row.kind, 0) + row.nbytes
        spent_s[row.kind] = spent_s.get(row.kind, 0.0) + row.seconds
    of_kind = _by_kind(spans)
    first = {kind: min(event.ts or 0 for event in events) for kind, events in of_kind.items()}
    work = sorted((kind for kind in spent_s if not is_wait(kind)), key=lambda k: first.get(k, 0))
    waits = sorted((kind for kind in spent_s if is_wait(kind)), key=lambda k: -spent_s[k])
    for kind in [*work, *waits]:
        yield StageTotals(
            kind=kind,
            nbytes=nbytes[kind],
            spent_s=spent_s[kind],
            busy_s=sum(end - begin for begin, end in _union(of_kind.get(kind, ()))) / 1e6,
            is_wait=is_wait(kind),
        )


def _by_kind(spans: Iterable[TraceEvent]) -> dict[str, list[TraceEvent]]:
    found: dict[str, list[TraceEvent]] = {}
    for event in spans:
        found.setdefault(event.name, []).append(event)
    return found


def _union(events: Iterable[TraceEvent]) -> list[tuple[int, int]]:
    """Returns when at least one event lasts, in order."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(((e.ts or 0), (e.ts or 0) + (e.dur or 0)) for e in events):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _covered_us(intervals: Iterable[tuple[int, int]], depth: int) -> int:
    """Returns how long at least ``depth`` intervals overlap."""
    steps = sorted(step for begin, end in intervals for step in ((begin, 1), (end, -1)))
    total, now, since = 0, 0, 0
    for at, change in steps:
        if now >= depth:
            total += at - since
        now, since = now + change, at
    return total


def page(trace: TraceFile, tables: Iterable[tuple[str, Sequence[Sequence[str]]]]) -> str:
    """Returns an HTML page of the trace.

    Args:
        tables: Above the trace: title and rows, the header first.
    """
    return pages.fill("timeline.html", trace.trace_events, tables)
