"""Summaries of a trace: numbers, and a self-contained HTML page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import chain, repeat

import msgspec

from actorsnap.runtime.tracefile import About, TraceEvent, TraceFile

__all__ = ["Longest", "StageTotals", "Summary", "page", "summaries"]

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
    """In the order of ``abouts``: calls of a rank may overlap."""
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
    by_kind: dict[str, list[TraceEvent]] = {}
    for event in moving:
        by_kind.setdefault(event.name, []).append(event)
    layers = [interval for of_kind in by_kind.values() for interval in _union(of_kind)]
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
    first: dict[str, int] = {}
    of_kind: dict[str, list[TraceEvent]] = {}
    for event in spans:
        of_kind.setdefault(event.name, []).append(event)
        first[event.name] = min(first.get(event.name, event.ts or 0), event.ts or 0)
    work = sorted((kind for kind in spent_s if not _is_wait(kind)), key=lambda k: first.get(k, 0))
    waits = sorted((kind for kind in spent_s if _is_wait(kind)), key=lambda k: -spent_s[k])
    for kind in [*work, *waits]:
        yield StageTotals(
            kind=kind,
            nbytes=nbytes[kind],
            spent_s=spent_s[kind],
            busy_s=sum(end - begin for begin, end in _union(of_kind.get(kind, ()))) / 1e6,
            is_wait=_is_wait(kind),
        )


def _is_wait(kind: str) -> bool:
    return kind.startswith("wait ")


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
    template = files("actorsnap.runtime").joinpath("timeline.html").read_text("utf-8")
    # "</script" would end the script, even in a string.
    events = msgspec.json.encode(trace.trace_events).decode().replace("<", "\\u003c")
    # Last: the escaped events cannot contain the placeholder.
    filled = template.replace("/*events*/[]", events)
    return filled.replace("<!--tables-->", "".join(_table(*table) for table in tables))


def _table(title: str, rows: Sequence[Sequence[str]]) -> str:
    lines = []
    for number, row in enumerate(rows):
        tag = "th" if number == 0 else "td"
        lines.append("<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row))
    return f"<h2>{html.escape(title)}</h2>\n<table>\n" + "\n".join(lines) + "\n</table>\n"
