"""Saves and restores as OpenTelemetry spans and metrics.

Everything is derived from a recorder at the end of a call: a span for the call, as a child of the
caller's span; in it a span per kind of work, from first to last byte, and an event per mark. Chunks
have no spans; trace files do. Only the API is used, which the application configures. It is
imported if a call asks for it or the application has imported it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from actorsnap.actors.trace import Recorder, Totals, Wait
from actorsnap.errors import UsageError
from actorsnap.release import RELEASE
from actorsnap.runtime.tracefile import About

__all__ = ["Telemetry", "find"]

_NAME = "actorsnap"
_APIS = ("opentelemetry.trace", "opentelemetry.metrics")


def find(op: str, mode: str) -> Telemetry | None:
    """Returns the telemetry of a call; None if it is off.

    Args:
        op: ``save`` or ``restore``.
        mode: ``Options.otel``.

    Raises:
        UsageError: ``mode`` is ``"on"``, and OpenTelemetry is not installed.
    """
    if mode == "off":
        return None
    if mode == "auto" and not _is_configured():
        return None
    try:
        for name in _APIS:
            import_module(name)
    except ImportError as error:
        raise UsageError(
            'Options.otel="on" needs OpenTelemetry: pip install actorsnap[otel]'
        ) from error
    return Telemetry(op)


def _is_configured() -> bool:
    """Returns whether the application has imported the API and set a provider."""
    trace, metrics = map(sys.modules.get, _APIS)
    providers = []
    if trace is not None:
        providers.append(trace.get_tracer_provider())
    if metrics is not None:
        providers.append(metrics.get_meter_provider())
    # The API's own providers are placeholders.
    return any(not type(provider).__module__.startswith(_APIS) for provider in providers)


class Telemetry:
    """The telemetry of one call. Created in the caller's thread, whose span is the parent."""

    def __init__(self, op: str) -> None:
        from opentelemetry import context

        self._op = op
        self._parent = context.get_current()

    def export(self, recorder: Recorder, about: About, epoch_ns: int) -> None:
        """Exports spans and metrics. Thread-safe."""
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
    """Returns the attributes with few values, by which metrics can be grouped."""
    return {f"{_NAME}.op": about.op, f"{_NAME}.outcome": about.outcome}


def _by_kind(recorder: Recorder, *, has_waits: bool = False) -> dict[str, Totals]:
    """Returns the totals over all rows."""
    found: dict[str, Totals] = {}
    for row in recorder.rows:
        for kind, totals in tuple(row.totals.items()):
            if isinstance(kind, Wait) and not has_waits:
                continue
            of_all = found.setdefault(str(kind), Totals(totals.begin_ns))
            of_all.begin_ns = min(of_all.begin_ns, totals.begin_ns)
            of_all.end_ns = max(of_all.end_ns, totals.end_ns)
            of_all.count += totals.count
            of_all.nbytes += totals.nbytes
            of_all.spent_ns += totals.spent_ns
    return found
