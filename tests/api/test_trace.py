# SPDX-License-Identifier: Apache-2.0
"""``Options.trace``: where the time of a save and of a restore went, as a file."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

from actorsnap import (
    IncompatibleState,
    Options,
    Snapshot,
    SnapshotAborted,
    StateDict,
    StorageError,
    UsageError,
)
from actorsnap.options import from_env
from actorsnap.runtime.host import Host
from actorsnap.runtime.tracing import observe
from actorsnap.storage.base import Storage, StorageContext
from actorsnap.storage.network import RetryPolicy, RetryStorage
from actorsnap.storage.registry import open_storage, register
from actorsnap.testing.faults import FaultyStorage, Verb
from tests.api.facades import FACADES, Facade, each_facade
from tests.api.faults import Barrier, BarrierStorage, faulty, faulty_url
from tests.support.memory import return_free_memory

MIB = 1 << 20
SYNC = FACADES[1]

Json = dict[str, Any]


@pytest.fixture(autouse=True)
def _own_budget() -> Iterator[None]:
    host = Host.get()
    before = host.resources.budget.limit_bytes
    yield
    host.resources.set_budget(before)
    host.submit(anyio.lowlevel.checkpoint()).future.result()


def state(num_mib: int = 12) -> dict[str, StateDict]:
    return {"model": StateDict(w=torch.arange(num_mib * MIB // 4, dtype=torch.float32), step=7)}


def options(trace: Path, **more: Any) -> Options:
    return Options(fsync=False, chunk_bytes=2 * MIB, trace=str(trace), **more)


def events_of(path: Path) -> list[Json]:
    """All events of a file, each checked against the format."""
    events: list[Json] = json.loads(path.read_bytes())["traceEvents"]
    ends: dict[tuple[int, int], int] = {}
    for event in events:
        assert event["ph"] in ("X", "M", "i", "C")
        assert isinstance(event["name"], str)
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        if event["ph"] != "M":
            assert type(event["ts"]) is int
        if event["ph"] == "X":
            assert event["dur"] >= 0
            # Perfetto drops what lies across another span of its row.
            row = event["pid"], event["tid"]
            assert event["ts"] >= ends.get(row, 0)
            ends[row] = event["ts"] + event["dur"]
    return events


def about(path: Path) -> Json:
    found: Json = json.loads(path.read_bytes())["otherData"]["actorsnap"][0]
    return found


def spans(events: list[Json], name: str) -> list[Json]:
    return [event for event in events if event["ph"] == "X" and event["name"] == name]


def marks(events: list[Json], name: str) -> list[Json]:
    return [event for event in events if event["ph"] == "i" and event["name"] == name]


def covered(found: list[Json]) -> dict[str, list[tuple[int, int]]]:
    """Byte ranges by key."""
    ranges = defaultdict(list)
    for args in (event["args"] for event in found):
        ranges[args["key"]].append((args["offset"], args["offset"] + args["bytes"]))
    return {key: sorted(of_key) for key, of_key in ranges.items()}


def is_over(a: Json, b: Json) -> bool:
    """Whether two spans overlap in time."""
    return bool(a["ts"] < b["ts"] + b["dur"] and b["ts"] < a["ts"] + a["dur"])


@each_facade
def test_bytes_of_each_stage_add_up_to_the_objects(api: Facade, tmp_path: Path) -> None:
    trace, snap = tmp_path / "save.json", tmp_path / "snap"
    pending = api.run(api.Snapshot.async_take(snap, state(), options=options(trace)))
    api.run(pending.wait())
    sizes = {str(path.relative_to(snap)): path.stat().st_size for path in snap.rglob("data/**/*.*")}
    assert sum(sizes.values()) > 12 * MIB
    events = events_of(trace)
    for name in ("stage", "hash", "store"):
        ranges = covered(spans(events, name))
        assert {key: of_key[-1][1] for key, of_key in ranges.items()} == sizes
        for of_key in ranges.values():
            assert of_key[0][0] == 0
            assert all(a[1] == b[0] for a, b in pairwise(of_key))
    assert len(marks(events, "staged")) == 1


def test_staging_hashing_and_storing_are_seen_to_overlap(tmp_path: Path) -> None:
    trace = tmp_path / "save.json"

    def wrap(inner: Storage) -> Storage:
        return FaultyStorage(inner, latency_s={Verb.WRITE_AT: 0.02}, has_blocking_io=False)

    with faulty(wrap):
        SYNC.Snapshot.async_take(
            faulty_url(tmp_path / "snap"),
            state(48),
            options=options(trace, memory_budget_bytes=8 * MIB),
        ).wait()
    events = events_of(trace)
    stores = spans(events, "store")
    for name in ("stage", "hash"):
        assert any(is_over(span, store) for span in spans(events, name) for store in stores)
    rows = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"caller 0", "participant 0", "coordinator 0", "staging 0", "uploader 1"} <= rows
    peak = max(e["args"]["leased bytes"] for e in events if e["name"] == "leased bytes")
    assert 2 * MIB <= peak <= 8 * MIB
    assert any(row["kind"] == "wait for memory" for row in about(trace)["actors"])


@pytest.mark.parametrize("offload", ["thread", "process"])
def test_staged_is_said_once_and_without_a_limit_nobody_waits_for_the_pace(
    offload: str, tmp_path: Path
) -> None:
    trace = tmp_path / "t.json"
    given = options(trace, offload=offload)
    SYNC.Snapshot.async_take(tmp_path / "s", state(), options=given).wait()
    marks = [event["name"] for event in events_of(trace) if event["ph"] == "i"]
    assert marks == ["staged"]
    assert "wait for the pace" not in {row["kind"] for row in about(trace)["actors"]}


def test_totals_of_actors_are_those_of_their_spans(tmp_path: Path) -> None:
    trace = tmp_path / "save.json"
    SYNC.Snapshot.async_take(tmp_path / "snap", state(), options=options(trace)).wait()
    stored = sum(event["args"]["bytes"] for event in spans(events_of(trace), "store"))
    rows = [row for row in about(trace)["actors"] if row["kind"] == "store"]
    assert sum(row["nbytes"] for row in rows) == stored
    assert sum(row["seconds"] for row in rows) > 0


def test_what_is_not_copied_is_not_staged(tmp_path: Path) -> None:
    trace = tmp_path / "save.json"
    SYNC.Snapshot.take(tmp_path / "snap", state(), options=options(trace))
    events = events_of(trace)
    assert spans(events, "store")
    assert not spans(events, "stage")


def test_a_failure_leaves_a_valid_file_that_says_why(tmp_path: Path) -> None:
    trace = tmp_path / "save.json"
    storages = []

    def wrap(inner: Storage) -> Storage:
        storages.append(FaultyStorage(inner, fail_at=3, fail_verbs=[Verb.WRITE_AT]))
        return storages[-1]

    with faulty(wrap), pytest.raises(SnapshotAborted) as caught:
        SYNC.Snapshot.take(faulty_url(tmp_path / "snap"), state(), options=options(trace))
    assert storages[0].was_hit
    assert about(trace)["outcome"] == "aborted"
    assert about(trace)["error"] == f"SnapshotAborted: {caught.value}"
    (mark,) = marks(events_of(trace), "store failed")
    assert mark["args"]["key"] == caught.value.key


def test_a_cancelled_save_leaves_a_valid_file(tmp_path: Path) -> None:
    trace = tmp_path / "save.json"
    barrier = Barrier(2, verbs=frozenset({"write_at"}))
    with faulty(lambda inner: BarrierStorage(inner, barrier, has_blocking_io=False)):
        pending = SYNC.Snapshot.async_take(
            faulty_url(tmp_path / "snap"), state(), options=options(trace)
        )
        assert barrier.wait_reached()
        pending.cancel()
        barrier.release()
        with pytest.raises(SnapshotAborted):
            pending.wait()
    assert about(trace)["outcome"] == "aborted"
    assert spans(events_of(trace), "stage")


def retrying(inner: str, context: StorageContext) -> Storage:
    faults = FaultyStorage(
        open_storage(inner, context),
        fail_at=2,
        fail_verbs=[Verb.WRITE_AT],
        error=StorageError(op="write_at", key="k", backend=inner, detail="busy", retryable=True),
        has_blocking_io=False,
    )
    policy = RetryPolicy(first_delay_s=0.001, max_delay_s=0.001)
    return RetryStorage(faults, policy=policy, on_retry=context.on_retry)


register("retrying", lambda url, context: retrying(url.removeprefix("retrying://"), context))


def test_retries_are_counted_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = tmp_path / "save.json"
    with caplog.at_level(logging.INFO, "actorsnap"):
        SYNC.Snapshot.take(f"retrying://{tmp_path}/snap", state(), options=options(trace))
    assert about(trace)["retries"] == 1
    (mark,) = marks(events_of(trace), "retry")
    assert (mark["args"]["op"], mark["args"]["key"]) == ("write_at", "k")
    (record,) = [record for record in caplog.records if "trying again" in record.message]
    assert vars(record)["key"] == "k"


def test_one_line_is_logged_per_save_with_totals_as_fields(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "actorsnap"):
        SYNC.Snapshot.take(tmp_path / "snap", state(), options=Options(fsync=False))
    (record,) = caplog.records
    fields = vars(record)
    assert fields["snapshot"] == str(tmp_path / "snap")
    assert fields["rank"] == 0
    assert fields["attempt"] in record.message
    assert fields["stored_bytes"] == fields["total_bytes"] > 12 * MIB
    assert fields["total_s"] >= fields["staged_s"] >= 0


def test_a_trace_that_cannot_be_written_is_logged_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    trace = tmp_path / "file" / "save.json"
    SYNC.Snapshot.take(tmp_path / "snap", state(1), options=options(trace))
    assert "what was recorded of it is lost" in caplog.text


@each_facade
def test_a_relative_trace_lies_where_the_process_was_at_the_call(
    api: Facade, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, later = tmp_path / "{begun}", tmp_path / "later"
    begun.mkdir()
    later.mkdir()
    monkeypatch.chdir(begun)
    relative = Options(trace="traces/{name}.json", fsync=False)
    pending = api.run(api.Snapshot.async_take("snap", state(1), options=relative))
    monkeypatch.chdir(later)
    api.run(pending.wait())
    assert about(begun / "traces" / "snap.json")["url"] == "snap"
    assert not list(later.iterdir())


def test_names_are_filled_in(tmp_path: Path) -> None:
    trace = tmp_path / "traces" / "{op}-{name}-{rank:03d}.json"
    SYNC.Snapshot.take(tmp_path / "step-1", state(1), options=options(trace))
    assert [path.name for path in trace.parent.iterdir()] == ["save-step-1-000.json"]


@pytest.mark.parametrize("template", ["t.json", "{rank}.json", "{{rank}}.json"])
def test_each_rank_has_a_file(template: str, tmp_path: Path) -> None:
    host = Host.get()
    for rank in (0, 1):
        seen = observe("save", Options(trace=str(tmp_path / template)))
        assert seen is not None
        host.submit(
            seen.end(host, url="s", rank=rank, world_size=2, outcome="committed")
        ).future.result()
    assert len(list(tmp_path.iterdir())) == 2


def test_bad_options_are_refused_early() -> None:
    with pytest.raises(UsageError, match="{rank}, {op}, {name}"):
        Options(trace="{rnk}.json")
    with pytest.raises(UsageError, match="Options.otel"):
        Options(otel="yes")


def test_the_environment_asks_for_a_trace() -> None:
    assert from_env({"ACTORSNAP_TRACE": "t.json"}).trace == "t.json"
    assert from_env({}).trace is None


@each_facade
@pytest.mark.parametrize("has_blocking_io", [True, False])
def test_a_restore_shows_what_was_read_and_verified(
    api: Facade, has_blocking_io: bool, tmp_path: Path
) -> None:
    trace, snap = tmp_path / "restore.json", tmp_path / "snap"
    SYNC.Snapshot.take(snap, state(), options=Options(fsync=False))
    target = {"model": StateDict(w=torch.zeros(3 * MIB), step=0)}

    def wrap(inner: Storage) -> Storage:
        return FaultyStorage(inner, has_blocking_io=has_blocking_io)

    with faulty(wrap):
        api.run(api.Snapshot(faulty_url(snap), options=options(trace)).restore(target))
    assert target["model"]["w"][-1] == 3 * MIB - 1
    events = events_of(trace)
    for name in ("read", "verify"):
        ((_, ranges),) = covered(spans(events, name)).items()
        assert sum(stop - start for start, stop in ranges) == 12 * MIB
        assert all(a[1] == b[0] for a, b in pairwise(ranges))
    found = about(trace)
    assert (found["op"], found["outcome"]) == ("restore", "restored")
    assert found["attempt"]
    (caller,) = {e["tid"] for e in events if e["ph"] == "M" and e["args"].get("name") == "caller 0"}
    did = [e["name"] for e in events if e["ph"] == "X" and e["tid"] == caller]
    assert did == ["index", "compare", "agree", "wait for the reads", "load"]


@pytest.mark.parametrize("offload", ["thread", "process"])
def test_memory_of_a_call_is_measured(tmp_path: Path, offload: str) -> None:
    trace = tmp_path / "{op}.json"
    SYNC.Snapshot.async_take(
        tmp_path / "snap", state(64), options=options(trace, offload=offload)
    ).wait()
    found = StateDict()
    return_free_memory()
    SYNC.Snapshot(tmp_path / "snap", options=options(trace)).restore({"model": found})
    events = events_of(tmp_path / "restore.json")
    measured = [event["args"] for event in events if event["name"] == "resident bytes"]
    described = about(tmp_path / "restore.json")
    peak = max(args["resident bytes"] for args in measured)
    assert described["memory_peak_bytes"] == max(peak, described["memory_begin_bytes"])
    # Half of the fresh tensors: the others may lie in pages that a test before has left.
    assert peak - described["memory_begin_bytes"] > 32 * MIB
    assert found.data
    names = {event["name"] for event in events_of(tmp_path / "save.json") if event["ph"] == "C"}
    of_uploader = "resident bytes of the uploader process"
    assert (of_uploader in names, "resident bytes" in names) == (offload == "process", True)


def test_what_cannot_be_read_in_place_is_placed(tmp_path: Path) -> None:
    trace, snap = tmp_path / "restore.json", tmp_path / "snap"
    w = torch.arange(MIB).view(1024, 1024)
    SYNC.Snapshot.take(snap, {"m": StateDict(w=w)}, options=Options(fsync=False))
    target = torch.zeros_like(w).t()
    SYNC.Snapshot(snap, options=options(trace)).restore({"m": StateDict(w=target)})
    assert torch.equal(target, w)
    for name in ("read", "place"):
        found = spans(events_of(trace), name)
        assert sum(event["args"]["bytes"] for event in found) == 8 * MIB


def test_a_failed_restore_leaves_a_valid_file(tmp_path: Path) -> None:
    trace, snap = tmp_path / "restore.json", tmp_path / "snap"
    SYNC.Snapshot.take(snap, state(1), options=Options(fsync=False))
    with pytest.raises(IncompatibleState):
        SYNC.Snapshot(snap, options=options(trace)).restore({"absent": StateDict(x=1)})
    events_of(trace)
    assert about(trace)["outcome"] == "failed"
    assert about(trace)["error"].startswith("IncompatibleState")


async def test_a_cancelled_restore_leaves_a_valid_file(tmp_path: Path) -> None:
    trace, snap = tmp_path / "restore.json", tmp_path / "snap"
    await Snapshot.take(snap, state(), options=Options(fsync=False))
    barrier = Barrier(2, verbs=frozenset({"read_into"}))
    with faulty(lambda inner: BarrierStorage(inner, barrier, has_blocking_io=False)):
        snapshot = Snapshot(faulty_url(snap), options=options(trace))
        restoring = asyncio.create_task(snapshot.restore(state()))
        assert await asyncio.to_thread(barrier.wait_reached)
        restoring.cancel()
        barrier.release()
        with pytest.raises(asyncio.CancelledError):
            await restoring
        with anyio.fail_after(60):
            while not trace.exists():  # noqa: ASYNC110  # written behind it
                await anyio.sleep(0.01)
    assert about(trace)["outcome"] == "cancelled"
    assert spans(events_of(trace), "index")
