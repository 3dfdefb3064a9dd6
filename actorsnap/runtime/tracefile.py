"""A recording on disk, as JSON in Chrome's trace event format ("Trace Event Format", Google), for
``chrome://tracing``, https://ui.perfetto.dev and ``actorsnap trace``.

A process of the format is a rank, a thread is a row. Times are microseconds since the epoch: files
of several ranks can be merged.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Annotated, Any, TypeAlias

import msgspec

from actorsnap.actors.trace import Recorder, Wait
from actorsnap.errors import UsageError

__all__ = ["About", "ActorTotals", "TraceEvent", "TraceFile", "merge", "read", "trace_of", "write"]

_VERSION = 1

Int: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""At most 64 bits."""


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
                kind=str(kind),
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
            cat = "wait" if isinstance(span.kind, Wait) else "work"
            yield TraceEvent(
                ph="X", name=str(span.kind), cat=cat, pid=pid, tid=number, ts=ts, dur=dur, args=args
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
        OSError: writing failed, or ``path`` is no regular file.
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
    return TraceFile(
        trace_events=events,
        other_data={"actorsnap": list(_all_abouts(traces))},
    )


def _all_abouts(traces: Iterable[TraceFile]) -> Iterator[About]:
    for trace in traces:
        yield from trace.abouts
