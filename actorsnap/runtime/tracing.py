# SPDX-License-Identifier: Apache-2.0
"""Observes a call: records it and exports the recording at its end, to a file (``Options.trace``)
and OpenTelemetry (``Options.otel``), or from the uploader process to the trainer. Errors of a sink
are logged and never fail the call.

OpenTelemetry gets a span for the call, in the caller's span; in it a span per kind of work, from
first to last byte, and an event per mark. Only its API is used, imported if a call asks for it or
the application has imported it.
"""

from __future__ import annotations

import functools
import os
import string
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import msgspec

from actorsnap.actors.trace import (
    MAX_SPANS,
    NULL_RECORDER,
    Record,
    Recorder,
    Sample,
    Totals,
    is_wait,
)
from actorsnap.errors import MissingPackage, StorageError
from actorsnap.log import Log
from actorsnap.options import Options
from actorsnap.release import RELEASE
from actorsnap.runtime import tracefile
from actorsnap.runtime.host import Host, wait_done
from actorsnap.runtime.tracefile import About
from actorsnap.wording import printable

logger = Log(__name__)

Sink: TypeAlias = Callable[[Recorder, About, int], None]
"""Exports a recording, given the call and the recorder's offset to the epoch in nanoseconds. On a
worker thread.
"""

_PATIENCE_S = 5.0
"""Longest wait for a sink."""

_NAME = "actorsnap"
_APIS = ("opentelemetry.trace", "opentelemetry.metrics")


def observe(op: str, options: Options) -> Observation:
    """Begins to observe a call if the options ask for it. In the caller's thread.

    Raises:
        MissingPackage: ``Options.otel`` is ``"on"`` without OpenTelemetry.
    """
    sinks: list[Sink] = []
    if options.trace is not None:
        sinks.append(functools.partial(_write_trace, _working_folder(), options.trace))
    try:
        telemetry = _find_telemetry(op, options.otel)
    except MissingPackage:
        raise
    except Exception:  # of any provider
        logger.warning("OpenTelemetry is not used for this %s", op, exc_info=True)
        telemetry = None
    if telemetry is not None:
        sinks.append(telemetry.export)
    return Observation(op, sinks)


class Observation:
    """The observation of one call on one rank.

    Args:
        op: ``save`` or ``restore``.
        sinks: Without any, nothing is recorded.
        process: Whose memory is measured, as the trace names it.

    Attributes:
        recorder: For the call's actors.
        caller: The row of the caller's thread.
        attempt: Written or read, once known.
    """

    def __init__(self, op: str, sinks: Sequence[Sink] = (), process: str = "") -> None:
        self.is_watched = bool(sinks)
        self.recorder = NULL_RECORDER
        self._memory: _MemoryWatch | None = None
        if sinks:
            self._memory = _MemoryWatch(f"resident bytes {process}".strip())
            self.recorder = Recorder(time.monotonic_ns, self._memory.look)
            self._memory.samples = self.recorder.samples
        self.caller = self.recorder.add_row("caller")
        self.attempt = ""
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._num_retries = 0
        self._op = op
        self._sinks = sinks

    def on_retry(self, error: StorageError, delay_s: float) -> None:
        """See ``StorageContext``."""
        self._num_retries += 1
        self.recorder.mark(
            "retry",
            op=error.op,
            key=error.key,
            error=type(error).__name__,
            delay_s=round(delay_s, 6),
        )

    def adopt(self, record: Record, num_retries: int) -> None:
        """Adds another process' recording."""
        self.recorder.adopt(record)
        self._num_retries += num_retries

    async def end(
        self,
        host: Host,
        *,
        url: str,
        rank: int,
        world_size: int,
        outcome: str,
        error: str = "",
    ) -> None:
        """Exports the recording; the outcome is reported afterwards. Never raises. Waits for a
        limited time if a disk or exporter hangs.

        Args:
            url, rank, world_size, outcome, error: See ``About``.
        Cancellation: ignored.
        """
        if self._memory is None:
            return
        about = About(
            op=self._op,
            url=printable(url),
            attempt=self.attempt,
            rank=rank,
            world_size=world_size,
            outcome=outcome,
            error=printable(error),
            begin_us=(self.recorder.begin_ns + self._epoch_ns) // 1000,
            end_us=(time.monotonic_ns() + self._epoch_ns) // 1000,
            retries=self._num_retries,
        )
        call = host.submit(host.run_blocking(self._hand_over, about))
        with anyio.move_on_after(_PATIENCE_S, shield=True):
            await wait_done(call.future)

    def _hand_over(self, about: About) -> None:
        assert self._memory is not None
        self._memory.measure(time.monotonic_ns())
        about = msgspec.structs.replace(
            about,
            memory_begin_bytes=self._memory.begin_bytes,
            memory_peak_bytes=self._memory.peak_bytes,
        )
        for sink in self._sinks:
            try:
                sink(self.recorder, about, self._epoch_ns)
            except (Exception, SystemExit):  # of any exporter
                logger.warning("%s: what was recorded of it is lost", about.url, exc_info=True)
        # Handles of the call and its storage may reference it for long.
        self.recorder.clear()


class _MemoryWatch:
    """Measures the resident memory of this process while a call works.

    On worker threads before and after their work, when the memory that it needed is still in use;
    not by a thread or timer of its own, which would have to be stopped however a call ends.
    """

    _INTERVAL_NS = 5_000_000
    """Shortest time between two looks: one takes 10 µs."""

    def __init__(self, name: str) -> None:
        self.samples: list[Sample] = []
        self._name = name
        self._looked_ns = 0
        self.begin_bytes = self.peak_bytes = 0

    def look(self, now_ns: int) -> None:
        """Measures, unless it has just done so. Blocks for some microseconds."""
        if now_ns - self._looked_ns >= self._INTERVAL_NS:
            self.measure(now_ns)

    def measure(self, now_ns: int) -> None:
        self._looked_ns = now_ns
        nbytes = _resident_bytes()
        self.begin_bytes = self.begin_bytes or nbytes
        self.peak_bytes = max(self.peak_bytes, nbytes)
        if len(self.samples) < MAX_SPANS:
            self.samples.append(Sample(now_ns, self._name, nbytes))


def _resident_bytes() -> int:
    """Returns the resident memory of this process; 0 if the system does not report it."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGESIZE")
    return 0


def _working_folder() -> str:
    with suppress(OSError):  # it may be deleted
        return os.getcwd()
    return ""


def _write_trace(
    folder: str, template: str, recorder: Recorder, about: About, epoch_ns: int
) -> None:
    """``folder`` was the working folder at the call."""
    trace = tracefile.trace_of(recorder, about, epoch_ns=epoch_ns)
    tracefile.write(os.path.join(folder, _path(template, about)), trace)


def _path(template: str, about: About) -> str:
    name = about.url.rstrip("/").rpartition("/")[2]
    named = {field for _, field, _, _ in string.Formatter().parse(template)}
    if about.world_size > 1 and "rank" not in named:
        stem, suffix = os.path.splitext(template)
        template = f"{stem}-{{rank}}{suffix}"
    return template.format_map({"rank": about.rank, "op": about.op, "name": name})


def _find_telemetry(op: str, mode: str) -> _Telemetry | None:
    """Returns None if ``mode``, ``Options.otel``, or a missing provider turns it off.

    Raises:
        MissingPackage: ``mode`` is ``"on"`` without OpenTelemetry.
    """
    if mode == "off":
        return None
    if mode == "auto" and not _is_configured():
        return None
    try:
        for name in _APIS:
            import_module(name)
    except ImportError as error:
        name = error.name or ""
        is_absent = isinstance(error, ModuleNotFoundError) and name.startswith("opentelemetry")
        raise MissingPackage(
            "Options.otel=\"on\" needs OpenTelemetry: pip install 'actorsnap[otel]'"
        ) from (None if is_absent else error)
    return _Telemetry(op)


def _is_configured() -> bool:
    """The application has imported the API and set a provider."""
    trace, metrics = map(sys.modules.get, _APIS)
    providers = []
    if trace is not None:
        providers.append(trace.get_tracer_provider())
    if metrics is not None:
        providers.append(metrics.get_meter_provider())
    # The API's own are placeholders.
    return any(not type(provider).__module__.startswith(_APIS) for provider in providers)


class _Telemetry:
    """The telemetry of one call, made in the caller's thread: its span is the parent."""

    def __init__(self, op: str) -> None:
        from opentelemetry import context

        self._op = op
        self._parent = context.get_current()

    def export(self, recorder: Recorder, about: About, epoch_ns: int) -> None:
        """Thread-safe."""
        self._export_spans(recorder, about, epoch_ns)
        self._export_metrics(recorder, about)

    def _export_spans(self, recorder: Recorder, about: About, epoch_ns: int) -> None:
        from opentelemetry import trace

        tracer = trace.get_tracer(_NAME, RELEASE)
        span = tracer.start_span(
            f"{_NAME}.{self._op}",
            context=self._parent,
            start_time=about.begin_us * 1000,
            attributes=_attributes(about)
            | {
                f"{_NAME}.url": about.url,
                f"{_NAME}.attempt": about.attempt,
                f"{_NAME}.rank": about.rank,
                f"{_NAME}.world_size": about.world_size,
                f"{_NAME}.memory_begin_bytes": about.memory_begin_bytes,
                f"{_NAME}.memory_peak_bytes": about.memory_peak_bytes,
            },
        )
        inside = trace.set_span_in_context(span, self._parent)
        for kind, totals in sorted(_by_kind(recorder).items(), key=lambda item: item[1].begin_ns):
            child = tracer.start_span(
                f"{_NAME}.{kind}",
                context=inside,
                start_time=totals.begin_ns + epoch_ns,
                attributes={
                    f"{_NAME}.bytes": totals.nbytes,
                    f"{_NAME}.count": totals.count,
                    f"{_NAME}.spent_s": totals.spent_ns / 1e9,
                },
            )
            child.end(totals.end_ns + epoch_ns)
        for mark in tuple(recorder.marks):
            span.add_event(mark.name, mark.details, timestamp=mark.at_ns + epoch_ns)
        if about.error:
            kind, _, text = about.error.partition(": ")
            details = {"exception.type": kind, "exception.message": text}
            span.add_event("exception", details, timestamp=about.end_us * 1000)
            span.set_status(trace.StatusCode.ERROR, about.error)
        span.end(about.end_us * 1000)

    def _export_metrics(self, recorder: Recorder, about: About) -> None:
        from opentelemetry import metrics

        meter = metrics.get_meter(_NAME, RELEASE)
        attributes = _attributes(about)
        meter.create_histogram(f"{_NAME}.duration", unit="s").record(about.seconds, attributes)
        spent = meter.create_counter(f"{_NAME}.spent", unit="s")
        moved = meter.create_counter(f"{_NAME}.moved", unit="By")
        for kind, totals in _by_kind(recorder, has_waits=True).items():
            of_kind = attributes | {f"{_NAME}.kind": kind}
            spent.add(totals.spent_ns / 1e9, of_kind)
            if totals.nbytes:
                moved.add(totals.nbytes, of_kind)
        meter.create_counter(f"{_NAME}.retries", unit="{retry}").add(about.retries, attributes)


def _attributes(about: About) -> dict[str, Any]:
    """Returns attributes with few values, to group metrics."""
    return {f"{_NAME}.op": about.op, f"{_NAME}.outcome": about.outcome}


def _by_kind(recorder: Recorder, *, has_waits: bool = False) -> dict[str, Totals]:
    """Sums over all rows."""
    found: dict[str, Totals] = {}
    for row in recorder.rows:
        for kind, totals in tuple(row.totals.items()):
            if is_wait(kind) and not has_waits:
                continue
            of_all = found.setdefault(str(kind), Totals(totals.begin_ns))
            of_all.begin_ns = min(of_all.begin_ns, totals.begin_ns)
            of_all.end_ns = max(of_all.end_ns, totals.end_ns)
            of_all.count += totals.count
            of_all.nbytes += totals.nbytes
            of_all.spent_ns += totals.spent_ns
    return found
