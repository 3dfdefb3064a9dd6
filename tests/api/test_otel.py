# SPDX-License-Identifier: Apache-2.0
"""``Options.otel``: saves as spans and metrics, where the application wants them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from actorsnap import Options, SnapshotAborted, StateDict
from actorsnap.storage.base import Storage
from actorsnap.sync import Snapshot
from actorsnap.testing.faults import FaultyStorage, Verb
from tests.api.faults import faulty, faulty_url
from tests.support import forker

pytestmark = pytest.mark.usefixtures("forker")

ROOT = Path(__file__).parents[2]


class Seen:
    """What an application's provider gets."""

    def __init__(self) -> None:
        self.spans = InMemorySpanExporter()
        self.metrics = InMemoryMetricReader()

    def named(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.spans.get_finished_spans() if span.name == name]
        return span

    def points(self, name: str) -> list[Any]:
        data = self.metrics.get_metrics_data()
        assert data is not None
        return [
            point
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    found = Seen()
    tracers, meters = TracerProvider(), MeterProvider([found.metrics])
    tracers.add_span_processor(SimpleSpanProcessor(found.spans))
    # Providers of the process can be set once only.
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: tracers)
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: meters)
    monkeypatch.setattr(trace, "get_tracer", tracers.get_tracer)
    monkeypatch.setattr(metrics, "get_meter", meters.get_meter)
    yield found
    tracers.shutdown()
    meters.shutdown()


def state() -> dict[str, StateDict]:
    return {"model": StateDict(w=torch.arange(1 << 20))}


def test_a_save_is_a_span_below_that_of_its_caller(tmp_path: Path, seen: Seen) -> None:
    tracer = trace.get_tracer("trainer")
    with tracer.start_as_current_span("step"):
        Snapshot.async_take(tmp_path / "s", state(), options=Options(fsync=False)).wait()
    step, save, store = map(seen.named, ("step", "actorsnap.save", "actorsnap.store"))
    assert save.parent is not None
    assert save.parent.span_id == step.context.span_id
    assert save.attributes is not None
    assert save.attributes["actorsnap.outcome"] == "committed"
    assert save.attributes["actorsnap.url"] == str(tmp_path / "s")
    assert store.parent is not None
    assert store.parent.span_id == save.context.span_id
    assert store.attributes is not None
    stored = store.attributes["actorsnap.bytes"]
    assert isinstance(stored, int)
    assert stored > 8 << 20
    assert None not in (save.start_time, store.start_time, store.end_time, save.end_time)
    assert save.start_time <= store.start_time <= store.end_time <= save.end_time  # type: ignore[operator]


def test_metrics_count_bytes_and_seconds(tmp_path: Path, seen: Seen) -> None:
    Snapshot.take(tmp_path / "s", state(), options=Options(fsync=False))
    moved = {
        point.attributes["actorsnap.kind"]: point.value for point in seen.points("actorsnap.moved")
    }
    assert moved["hash"] == moved["store"] > 8 << 20
    (duration,) = seen.points("actorsnap.duration")
    assert duration.count == 1
    assert duration.attributes == {"actorsnap.op": "save", "actorsnap.outcome": "committed"}


def test_a_failed_save_is_an_error(tmp_path: Path, seen: Seen) -> None:
    def wrap(inner: Storage) -> Storage:
        return FaultyStorage(inner, fail_at=1, fail_verbs=[Verb.WRITE_AT])

    with faulty(wrap), pytest.raises(SnapshotAborted):
        Snapshot.take(faulty_url(tmp_path / "s"), state(), options=Options(fsync=False))
    save = seen.named("actorsnap.save")
    assert save.status.status_code is trace.StatusCode.ERROR
    assert {event.name for event in save.events} >= {"store failed", "exception"}


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        # As with OTEL_PYTHON_TRACER_PROVIDER of a package that is not there.
        ("get_tracer_provider", StopIteration),
        ("get_tracer", RuntimeError),
        ("get_tracer", SystemExit),
    ],
)
def test_a_provider_that_raises_is_logged_only(
    tmp_path: Path,
    seen: Seen,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked: str,
    error: type[BaseException],
) -> None:
    def refuse(*args: object) -> None:
        raise error("no exporter")

    monkeypatch.setattr(trace, asked, refuse)
    Snapshot.take(tmp_path / "s", state(), options=Options(fsync=False))
    Snapshot(tmp_path / "s").restore(state())
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


def test_off_is_off(tmp_path: Path, seen: Seen) -> None:
    Snapshot.take(tmp_path / "s", state(), options=Options(fsync=False, otel="off"))
    assert not seen.spans.get_finished_spans()


def loaded_by(setup: str, options: str) -> set[str]:
    """Modules of OpenTelemetry in a process that has saved."""
    script = f"""
import sys, torch
{setup}
from actorsnap import Options, StateDict
from actorsnap.sync import Snapshot
Snapshot.take("memory://x", {{"s": StateDict(x=torch.ones(3))}}, options=Options({options}))
print(*[name for name in sys.modules if name.startswith(("opentelemetry", "actorsnap"))])
"""
    command = forker.command("-W", "error", "-c", script)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {name for name in done.stdout.split() if name.startswith("opentelemetry")}


def test_nothing_is_imported_unless_it_is_wanted() -> None:
    assert not loaded_by("", "")
    assert "opentelemetry.trace" in loaded_by("", "otel='on'")


def test_the_api_alone_is_no_provider() -> None:
    assert "opentelemetry.metrics" not in loaded_by("import opentelemetry.trace", "")


def test_without_the_package_on_says_what_to_install() -> None:
    with pytest.raises(AssertionError, match=r"pip install 'actorsnap\[otel\]'"):
        loaded_by("sys.modules['opentelemetry.trace'] = None", "otel='on'")
