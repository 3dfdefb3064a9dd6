# SPDX-License-Identifier: Apache-2.0
"""Saves that the uploader process makes: what is saved, what travels, what each death leads to."""

from __future__ import annotations

import logging
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from actorsnap import (
    ObjectExists,
    Options,
    Phase,
    SnapshotAborted,
    StateDict,
    StorageError,
    StorageFull,
    UsageError,
    shutdown,
)
from actorsnap.planning.packing import Item, ObjectPlan, pack
from actorsnap.protocol.uploader import BeginSave
from actorsnap.runtime import taking, tracefile, uploader_client
from actorsnap.runtime.host import Host
from actorsnap.runtime.location import make_location
from actorsnap.runtime.save import Save
from actorsnap.runtime.uploader_client import Uploader, find_uploader
from actorsnap.state.sources import Captured
from actorsnap.sync import PendingSnapshot, Snapshot, warm_up
from tests.api.faults import Barrier, BarrierStorage, faulty, faulty_url
from tests.conftest import LeakCheck
from tests.support import forker
from tests.support.cases import mostly_slow, slow
from tests.support.shm import shared_files

ROOT = Path(__file__).parents[2]
HELD = ROOT / "tests" / "held"
OFFLOADED = Options(offload="process", fsync=False)
BY_THREAD = Options(offload="thread", fsync=False)
PATIENCE_S = 180.0

pytestmark = pytest.mark.usefixtures("forker")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, no_leaks: LeakCheck) -> Iterator[None]:
    """A runtime, and so a process, of the test's own."""
    shutdown()
    no_leaks.restart()
    monkeypatch.syspath_prepend(HELD)
    others = children()  # servers of other tests
    yield
    shutdown()
    no_leaks.assert_none()
    assert children() - others == set()


def children() -> set[psutil.Process]:
    found = psutil.Process().children()
    return {child for child in found if child.status() != psutil.STATUS_ZOMBIE}


def state(number: int, nbytes: int = 1 << 20) -> dict[str, StateDict]:
    weight = torch.full((nbytes // 4,), float(number))
    return {"model": StateDict(weight=weight, step=number, name=f"number {number}")}


def number_at(url: object) -> int:
    """Which ``state`` is saved there, every byte checked."""
    snapshot = Snapshot(str(url))
    assert snapshot.verify("full").ok
    found = snapshot.get_state_dict_for_key("model")
    assert found["name"] == f"number {found['step']}"
    assert set(found["weight"].tolist()) == {float(found["step"])}
    return int(found["step"])


def save(url: object, number: int, options: Options = OFFLOADED) -> PendingSnapshot:
    return Snapshot.async_take(str(url), state(number), options=options)


def uploader() -> Uploader:
    return find_uploader(Host.get())


def process() -> psutil.Process:
    pid = uploader().pid
    assert pid is not None
    return psutil.Process(pid)


class Holds:
    """Holds operations of a ``held://`` storage in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def hold(self, operation: str) -> None:
        (self._folder / f"hold-{operation}").touch()

    def wait_held(self, operation: str) -> None:
        """Returns when the operation waits; until the next call it is not seen again."""
        held = self._folder / f"held-{operation}"
        wait_until(held.exists)
        held.unlink()

    def let(self, operation: str) -> None:
        (self._folder / f"hold-{operation}").unlink()

    def fail(self, operation: str) -> None:
        (self._folder / f"fail-{operation}").touch()


@pytest.fixture
def holds(tmp_path: Path) -> Holds:
    return Holds(tmp_path)


def wait_until(condition: object) -> None:
    deadline = time.monotonic() + PATIENCE_S
    assert callable(condition)
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.01)


# What is saved, and what travels


def test_one_trace_shows_what_both_processes_did(tmp_path: Path) -> None:
    trace = tmp_path / "save.json"
    options = msgspec.structs.replace(OFFLOADED, trace=str(trace))
    Snapshot.async_take(f"{tmp_path}/s", state(1, 8 << 20), options=options).wait()
    assert uploader().pid is not None
    (summary,) = tracefile.summaries(tracefile.read(str(trace)))
    moved = {stage.kind: stage.nbytes for stage in summary.stages}
    assert moved["hash"] == moved["store"] >= moved["stage"] >= 8 << 20
    did = {row.actor: row.kind for row in summary.about.actors}
    assert {"caller 0", "staging 0", "uploader 0", "coordinator 0"} <= did.keys()
    assert summary.about.attempt in {path.name for path in (tmp_path / "s").iterdir()}
    # One clock: what was stored was staged before.
    assert 0 < summary.moving_s < summary.about.seconds


def test_a_line_of_the_process_keeps_its_fields(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "actorsnap"):
        save(tmp_path / "s", 1).wait()
    (record,) = [record for record in caplog.records if ": committed, " in record.message]
    fields = vars(record)
    assert fields["snapshot"] == str(tmp_path / "s")
    assert fields["staged_bytes"] == fields["stored_bytes"] == fields["total_bytes"] > 1 << 20


def test_what_the_process_saves_is_what_was_given(tmp_path: Path) -> None:
    shared = torch.arange(1000.0)
    model = torch.nn.Linear(64, 64)
    given = {
        "module": model,
        "odd": StateDict(
            transposed=torch.arange(12.0).reshape(3, 4).t(),
            empty=torch.empty(0, 3),
            half=torch.ones(5, dtype=torch.bfloat16),
            tied=[shared, shared[10:20]],
            sparse=torch.eye(4).to_sparse(),
            data=b"\0\xff" * 3000,
            values={"lr": 0.1, "nan": float("nan"), "big": 1 << 100, "none": None},
        ),
    }
    for offloaded, name in ((True, "process"), (False, "thread")):
        options = Options(offload="process" if offloaded else "thread", fsync=False)
        Snapshot.async_take(f"{tmp_path}/{name}", given, options=options).wait()
    assert uploader().pid is not None
    one, other = Snapshot(f"{tmp_path}/process"), Snapshot(f"{tmp_path}/thread")
    assert one.verify("full").ok
    assert one.get_manifest() == other.get_manifest()


def test_the_process_has_no_torch_and_a_process_group_of_its_own(tmp_path: Path) -> None:
    save(tmp_path / "s", 1).wait()
    found = process()
    assert not any("torch" in mapped.path for mapped in found.memory_maps())
    assert os.getpgid(found.pid) == found.pid != os.getpgid(0)
    # Else Linux would share out the CPU among two sessions, whatever the priorities.
    assert os.getsid(found.pid) == os.getsid(0)


def test_only_bulk_work_of_the_process_leaves_the_cpu_to_others(tmp_path: Path) -> None:
    save(tmp_path / "s", 1).wait()
    found = process()
    nice = [os.getpriority(os.PRIO_PROCESS, thread.id) for thread in found.threads()]
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    assert nice.count(19) >= 2
    assert nice.count(usual) >= 4  # what a trainer may be waiting for: the loop, and short calls
    here = [os.getpriority(os.PRIO_PROCESS, thread.id) for thread in psutil.Process().threads()]
    assert set(here) == {usual}


def test_chunks_are_given_back_many_at_a_time(tmp_path: Path) -> None:
    options = Options(offload="process", fsync=False, chunk_bytes=2 << 20)
    Snapshot.async_take(str(tmp_path / "s"), state(1, 64 << 20), options=options).wait()
    link = uploader()._link
    assert link is not None
    assert link.received_frames < 16  # of 32 chunks


def test_chunks_are_given_back_at_once_where_memory_is_short(tmp_path: Path) -> None:
    options = Options(
        offload="process", fsync=False, chunk_bytes=2 << 20, memory_budget_bytes=8 << 20
    )
    Snapshot.async_take(str(tmp_path / "s"), state(1, 64 << 20), options=options).wait()
    link = uploader()._link
    assert link is not None
    assert link.received_frames > 24


def test_a_structure_is_sent_once_and_later_only_what_changes(tmp_path: Path) -> None:
    tensors = {f"layer.{number}.weight": torch.ones(4) for number in range(8_000)}
    given = StateDict(**tensors, step=0, rates=[0.1, 0.2])
    passed = []
    for step in range(3):
        given["step"] = step
        Snapshot.async_take(f"{tmp_path}/{step}", {"m": given}, options=OFFLOADED).wait()
        link = uploader()._link
        assert link is not None
        passed.append(link.sent_bytes + link.received_bytes)
        assert Snapshot(f"{tmp_path}/{step}").get_state_dict_for_key("m")["step"] == step
    assert passed[0] > 200_000
    assert passed[1] - passed[0] <= 4096
    assert passed[2] - passed[1] <= 4096


def test_an_equal_state_is_packed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(items: Sequence[Item], **kwargs: Any) -> tuple[ObjectPlan, ...]:
        calls.append(len(items))
        return pack(items, **kwargs)

    monkeypatch.setattr("actorsnap.runtime.uploader_client.pack", counted)
    for number in range(3):
        save(tmp_path / str(number), number).wait()
    Snapshot.async_take(str(tmp_path / "other"), state(4, 2 << 20), options=OFFLOADED).wait()
    save(tmp_path / "again", 5).wait()
    assert calls == [1, 1, 1]
    assert [number_at(tmp_path / name) for name in ("0", "1", "2", "other", "again")] == [
        *(0, 1, 2, 4, 5)
    ]


@pytest.mark.slow  # of three such saves: above
def test_saves_with_less_memory_than_their_state(tmp_path: Path) -> None:
    """Three at once, each larger than the budget: in their order, and none waits for ever."""
    options = Options(
        offload="process", fsync=False, memory_budget_bytes=8 << 20, chunk_bytes=2 << 20
    )
    host = Host.get()
    before = host.resources.budget.limit_bytes
    pending = [
        Snapshot.async_take(f"{tmp_path}/{number}", state(number, 24 << 20), options=options)
        for number in range(3)
    ]
    for each in pending:
        each.wait()
    assert host.resources.budget.leased_bytes == 0
    assert host.resources.budget.peak_bytes <= 8 << 20
    assert [number_at(tmp_path / str(number)) for number in range(3)] == [0, 1, 2]
    host.resources.set_budget(before)


def test_the_first_save_behind_a_warm_up_makes_no_block_and_no_process(tmp_path: Path) -> None:
    warm_up(40 << 20, options=OFFLOADED)
    wait_until(lambda: uploader().pid is not None)
    arena, pid = Host.get().resources.arena, uploader().pid
    before = os.fstat(arena.share()).st_blocks * 512
    assert before == arena.free_bytes == 48 << 20
    Snapshot.async_take(str(tmp_path / "s"), state(1, 40 << 20), options=OFFLOADED).wait()
    assert os.fstat(arena.share()).st_blocks * 512 == before
    assert uploader().pid == pid
    for bad in (-1, 1.5, True):
        with pytest.raises(UsageError, match="nbytes"):
            warm_up(bad)  # type: ignore[arg-type]


def test_auto_takes_the_process_for_large_states_once_it_is_there(tmp_path: Path) -> None:
    large = {"s": StateDict(x=torch.zeros(16 << 20))}
    options = Options(fsync=False)
    assert options.offload == "auto"
    save(tmp_path / "small", 1, options).wait()
    assert not uploader().is_ready
    attempts = []
    for number in range(2):
        Snapshot.async_take(str(tmp_path / str(number)), large, options=options).wait()
        wait_until(lambda: uploader().is_ready)
        [entry] = {path.name for path in (tmp_path / str(number)).iterdir()} - {"actorsnap.json"}
        attempts.append(int(entry.split("-")[2]))
    assert attempts == [os.getpid(), uploader().pid]
    save(tmp_path / "later", 1, options).wait()
    [entry] = {path.name for path in (tmp_path / "later").iterdir()} - {"actorsnap.json"}
    assert int(entry.split("-")[2]) == os.getpid()


def test_many_saves_leave_nothing_behind(tmp_path: Path, no_leaks: LeakCheck) -> None:
    for number in range(5):
        save(tmp_path / f"first {number}", number).wait()
    no_leaks.restart()
    found, arena = process(), Host.get().resources.arena
    before = (arena.lent_bytes, arena.free_bytes, found.num_fds(), found.num_threads())
    for number in range(30):
        save(tmp_path / str(number), number).wait()
    assert process() == found
    assert (arena.lent_bytes, arena.free_bytes, found.num_fds(), found.num_threads()) == before
    no_leaks.assert_none()


def test_progress_is_told(tmp_path: Path) -> None:
    pending = save(tmp_path / "s", 1)
    last = list(pending.events())[-1]
    assert last.phase is Phase.COMMITTED
    assert last.staged_bytes == last.hashed_bytes == last.stored_bytes == last.total_bytes > 1 << 20


def test_what_only_this_process_can_open_is_saved_here(tmp_path: Path) -> None:
    save("memory://offload/s", 1).wait()
    pending = Snapshot.async_take(
        str(tmp_path / "s"), state(1), options=OFFLOADED, storage_options={}
    )
    pending.wait()
    assert number_at("memory://offload/s") == number_at(tmp_path / "s") == 1


class Mode(StrEnum):
    FAST = "fast"


CIRCLE: dict[str, Any] = {}
CIRCLE["self"] = CIRCLE


@pytest.mark.parametrize(
    "given",
    [
        {"auth": ("me", "secret")},
        {"size": 1 << 70},
        {"when": {1, 2}},
        {"f": print},
        {1: 2},
        {"modes": [{"x": Mode.FAST}]},
        {"modes": {Mode.FAST: 1}},
        CIRCLE,
    ],
)
def test_what_the_process_would_get_otherwise_is_opened_here(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: dict[str, Any]
) -> None:
    def chosen(storage_options: dict[str, Any]) -> Uploader | None:
        location = make_location(tmp_path / "s", storage_options)
        options = Options(offload="process")
        return taking._choose_uploader(Host.get(), location, options, Captured(), num_ranks=1)

    assert chosen({"auth": ["me", 1, None, 0.5], "nested": {"a": True}}) is uploader()
    assert not caplog.records
    assert chosen(given) is None
    assert "no uploader process for it" in caplog.text
    assert "secret" not in caplog.text


def test_an_unknown_place_is_refused() -> None:
    with pytest.raises(UsageError, match="offload"):
        Options(offload="gpu")


# Errors and cancellation


def test_an_error_of_the_storage_arrives_with_its_fields_and_cause(
    tmp_path: Path, holds: Holds
) -> None:
    holds.fail("writer")
    with pytest.raises(SnapshotAborted) as caught:
        save(f"held://{tmp_path}/s", 1).wait()
    error = caught.value
    assert (error.rank, error.stage) == (0, "store")
    assert error.key is not None
    cause = error.__cause__
    assert isinstance(cause, StorageFull)
    assert (cause.op, cause.key, cause.detail) == ("writer", error.key, "no room")
    assert (cause.retryable, cause.retry_after_s) == (False, 1.5)
    assert isinstance(cause.__cause__, ValueError)
    assert str(cause.__cause__) == "the client's own error"


@pytest.mark.parametrize(
    ("verb", "kind", "stage"),
    [
        slow("get", "KeyboardInterrupt", "join"),
        ("writer", "SystemExit", "store"),
        ("write_at", "CancelledError", "store"),
        slow("put", "Unspeakable", "store"),
        slow("put", "Speechless", "store"),
        slow("complete", "Unreadable", "store"),
        slow("write_at", "Mistyped", "store"),
        slow("list", "Fieldless", "commit"),
        slow("list", "CancelledError", "commit"),
        ("put_if_absent", "BaseExceptionGroup", "commit"),
    ],
)
def test_odd_endings_in_the_process(tmp_path: Path, verb: str, kind: str, stage: str) -> None:
    """What the storage raises ends the save, and not the process."""
    with pytest.raises(SnapshotAborted, match=rf"the storage raised .*\({verb} of ") as caught:
        save(f"raising://{verb}.{kind}{tmp_path}/s", 1).wait()
    assert (caught.value.rank, caught.value.stage) == (0, stage)
    assert caught.value.key is not None
    assert isinstance(caught.value.__cause__, StorageError)
    save(f"raising://aclose.{kind}{tmp_path}/s", 2).wait()
    assert number_at(tmp_path / "s") == 2
    assert uploader().incarnation == 1


def test_the_process_has_the_environment_of_the_call(
    tmp_path: Path, holds: Holds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where credentials may be, or be renewed, when it runs already."""
    monkeypatch.setenv("HELD_DETAIL", "at first")
    holds.fail("writer")
    details = []
    for change in (None, b"then \xff", b"", None):
        with pytest.raises(SnapshotAborted) as caught:
            save(f"held://{tmp_path}/s", 1).wait()
        assert isinstance(caught.value.__cause__, StorageFull)
        details.append(caught.value.__cause__.detail)
        if change is None:
            monkeypatch.delenv("HELD_DETAIL")
        else:
            monkeypatch.setitem(os.environb, b"HELD_DETAIL", change)
    assert details == ["at first", "no room", "then \\udcff", ""]
    assert uploader().incarnation == 1


def test_a_path_that_is_taken(tmp_path: Path) -> None:
    save(tmp_path / "s", 1).wait()
    with pytest.raises(ObjectExists, match="overwrite=True"):
        save(tmp_path / "s", 2).wait()
    assert number_at(tmp_path / "s") == 1


def test_a_bad_disk_is_the_same_error_as_without_the_process(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = []
    for options in (OFFLOADED, Options(fsync=False)):
        with pytest.raises((StorageError, SnapshotAborted)) as caught:
            save(tmp_path / "file" / "s", 1, options).wait()
        said = f"{caught.value.fields} {type(caught.value.__cause__)} {caught.value.__cause__}"
        found.append(re.sub(r"\d{8}T\d{6}(-\w+){3}", "ATTEMPT", said))
    assert found[0] == found[1]
    assert "ATTEMPT" in found[0]


def test_a_save_that_is_cancelled_leaves_nothing(tmp_path: Path, holds: Holds) -> None:
    holds.hold("manifest")
    pending = save(f"held://{tmp_path}/s", 1)
    holds.wait_held("manifest")
    pending.cancel()
    with pytest.raises(SnapshotAborted) as caught:
        pending.wait()
    assert (caught.value.stage, caught.value.may_be_committed) == ("cancel", False)
    assert [path for path in (tmp_path / "s").rglob("*") if path.is_file()] == []
    assert Host.get().resources.arena.lent_bytes == 0


def test_ctrl_c_just_before_a_save_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it yet, and nobody would ever end it."""

    def interrupted(self: Save) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Save, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path / "s", 1)
    assert not (tmp_path / "s").exists()
    assert Host.get().resources.arena.lent_bytes == 0
    save(tmp_path / "s", 2).wait()
    assert number_at(tmp_path / "s") == 2


# Deaths


@pytest.mark.parametrize(
    ("operation", "compression"),
    [
        slow("writer", None),
        slow("manifest", None),
        ("manifest", "zstd"),  # what is compressed lies beside the arena, not in it
        slow("commit", None),
        ("committed", None),
    ],
)
def test_a_save_whose_process_is_killed_is_made_by_another_one(
    tmp_path: Path, holds: Holds, operation: str, compression: str | None
) -> None:
    holds.hold(operation)
    options = Options(offload="process", fsync=False, compression=compression)
    pending = save(f"held://{tmp_path}/s", 1, options)
    holds.wait_held(operation)
    first = process()
    holds.let(operation)
    first.kill()
    pending.wait()
    assert number_at(tmp_path / "s") == 1
    assert process().pid != first.pid
    assert Host.get().resources.arena.lent_bytes == 0


def test_the_process_stores_the_step(tmp_path: Path) -> None:
    state = {"s": StateDict(x=torch.ones(3))}
    pending = Snapshot.async_take(tmp_path / "s", state, step=9, options=OFFLOADED)
    assert pending.wait().step == 9


def test_a_save_that_begins_while_a_dead_process_is_waited_for_is_made_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one does not know what the first was told, nor what was sent to nobody."""
    save(tmp_path / "first", 1).wait()
    is_dead, goes_on = threading.Event(), threading.Event()
    end = uploader_client._end

    def held(dead: subprocess.Popen[bytes]) -> str:
        is_dead.set()
        assert goes_on.wait(PATIENCE_S)
        return end(dead)

    monkeypatch.setattr(uploader_client, "_end", held)
    process().kill()
    assert is_dead.wait(PATIENCE_S)
    with ThreadPoolExecutor(1) as thread:
        pending = thread.submit(save, tmp_path / "s", 2)
        wait_until(lambda: uploader()._saves)
        goes_on.set()
        pending.result().wait()
    assert number_at(tmp_path / "s") == 2


def test_a_save_that_kills_two_processes_is_aborted_by_name(tmp_path: Path, holds: Holds) -> None:
    holds.hold("manifest")
    pending = save(f"held://{tmp_path}/s", 1)
    for _ in range(2):
        holds.wait_held("manifest")
        process().kill()
    with pytest.raises(SnapshotAborted, match="SIGKILL") as caught:
        pending.wait()
    assert (caught.value.stage, caught.value.rank) == ("store", 0)
    assert Host.get().resources.arena.lent_bytes == 0
    holds.let("manifest")
    save(f"held://{tmp_path}/t", 2).wait()  # by a third one
    assert number_at(tmp_path / "t") == 2


def test_a_process_without_memory_aborts_the_save_and_lives(tmp_path: Path) -> None:
    """A new segment of the arena is more than it may map. Who is killed for memory is killed."""
    save(tmp_path / "0", 0).wait()
    first = process()
    first.rlimit(psutil.RLIMIT_AS, (first.memory_info().vms, -1))
    large = {"model": StateDict(weight=torch.zeros(260 << 18))}
    with pytest.raises(SnapshotAborted, match="cannot map .* bytes of staging memory") as caught:
        Snapshot.async_take(str(tmp_path / "1"), large, options=OFFLOADED).wait()
    assert (caught.value.rank, caught.value.stage) == (0, "stage")
    assert isinstance(caught.value.__cause__, MemoryError)
    assert os.listdir(tmp_path) == ["0"]
    first.rlimit(psutil.RLIMIT_AS, (-1, -1))
    save(tmp_path / "2", 2).wait()
    assert process() == first
    assert [number_at(tmp_path / name) for name in "02"] == [0, 2]


def test_three_saves_that_need_all_memory_wait_for_each_other(tmp_path: Path) -> None:
    """Each is larger than the budget, so that none can be staged before it is stored in part."""
    budget_bytes = 16 << 20
    options = msgspec.structs.replace(
        OFFLOADED, memory_budget_bytes=budget_bytes, chunk_bytes=4 << 20
    )

    def run(number: int) -> None:
        path = str(tmp_path / str(number))
        Snapshot.async_take(path, state(number, 40 << 20), options=options).wait()

    save(tmp_path / "first", 0, options).wait()
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(run, range(3)))
    budget = Host.get().resources.budget
    assert budget.peak_bytes <= budget_bytes
    assert (budget.leased_bytes, budget.num_waiting) == (0, 0)
    # Blocks are powers of two: the last chunk of each may lie in one of up to twice its size.
    assert Host.get().resources.arena.peak_bytes <= budget_bytes + 3 * options.chunk_bytes // 2
    # Only now: a read may go beyond the budget where saves hold all of it.
    assert [number_at(tmp_path / str(number)) for number in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("dies", [slow(False), True])
def test_a_copy_that_fails_here_is_the_saves_error(
    tmp_path: Path, holds: Holds, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """Also where the process dies before it has heard that."""

    def fail(*args: object) -> None:
        if dies:
            process().kill()
        raise ValueError("no such device")

    monkeypatch.setattr("actorsnap.actors.staging.gather", fail)
    with pytest.raises(SnapshotAborted, match="no such device") as caught:
        save(tmp_path / "s", 1).wait()
    assert caught.value.stage == "stage"
    assert isinstance(caught.value.__cause__, ValueError)
    assert Host.get().resources.arena.lent_bytes == 0


def test_a_fault_at_this_end_leaves_no_save_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise ValueError("a fault of this program")

    with monkeypatch.context() as patched:
        patched.setattr("actorsnap.runtime.remote_engine.RemoteEngine._on_staging_wanted", fail)
        with pytest.raises(SnapshotAborted, match="uploader process"):
            save(tmp_path / "s", 1).wait()
    save(tmp_path / "t", 2).wait()
    assert number_at(tmp_path / "t") == 2


def test_a_process_that_is_stopped_is_replaced(
    tmp_path: Path, holds: Holds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploader_client, "_SILENT_S", 1.0)
    monkeypatch.setattr(uploader_client, "_LOOK_S", 0.6)
    holds.hold("manifest")
    pending = save(f"held://{tmp_path}/s", 1)
    holds.wait_held("manifest")
    first = process()
    first.send_signal(signal.SIGSTOP)
    wait_until(lambda: uploader().pid not in (None, first.pid))
    monkeypatch.setattr(uploader_client, "_SILENT_S", 60.0)
    holds.let("manifest")
    pending.wait()
    assert number_at(tmp_path / "s") == 1


@pytest.mark.parametrize("how", ["no such program", "it ends at once", "an odd path"])
def test_without_a_process_that_starts_it_is_saved_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    if how == "no such program":
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    elif how == "it ends at once":
        monkeypatch.setattr(uploader_client, "_BOOT", "raise SystemExit(3)")
    else:
        monkeypatch.setattr(sys, "path", [*sys.path, "no\0path"])
    with caplog.at_level(logging.WARNING):
        for number in range(2):
            save(tmp_path / str(number), number).wait()
    assert "cannot be started" in caplog.text or "exit status 3" in caplog.text
    assert [number_at(tmp_path / str(number)) for number in range(2)] == [0, 1]
    assert not uploader().is_usable


def test_a_process_that_is_not_there_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save ends at its own deadline; the process is there for later ones."""
    monkeypatch.setattr(
        uploader_client, "_BOOT", f"import time; time.sleep(3); {uploader_client._BOOT}"
    )
    impatient = Options(offload="process", fsync=False, timeout_s=1.0)
    with pytest.raises(SnapshotAborted) as caught:
        save(tmp_path / "s", 1, impatient).wait()
    assert caught.value.reason == (
        "timeout_s=1 has passed, and the uploader process has not begun the save"
    )
    assert not uploader().is_ready
    assert not uploader()._saves
    save(tmp_path / "s", 2).wait()
    assert number_at(tmp_path / "s") == 2


def test_the_process_gets_the_time_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deadline counts from the call, not from when the process is there."""
    monkeypatch.setattr(
        uploader_client, "_BOOT", f"import time; time.sleep(2); {uploader_client._BOOT}"
    )
    frames: list[BeginSave] = []
    send = Uploader.send

    def sent(self: Uploader, frame: Any) -> None:
        if isinstance(frame, BeginSave):
            frames.append(frame)
        send(self, frame)

    monkeypatch.setattr(Uploader, "send", sent)
    for number in range(2):
        save(tmp_path / str(number), number).wait()
    first, second = [OFFLOADED.timeout_s - frame.left_s for frame in frames]
    assert first > 2.0
    assert 0.0 < second < first


def test_what_is_no_text_in_the_search_path_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path, None])
    save(tmp_path / "s", 1).wait()
    assert process().is_running()


def test_without_shared_memory_it_is_saved_here(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 26, before[1]))
    try:
        save(tmp_path / "s", 1).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "no uploader process for it: [Errno 27] File too large" in caplog.text
    assert number_at(tmp_path / "s") == 1


@pytest.mark.parametrize("closed", [slow("2"), "0 1 2", slow("0 1 2, later")])
def test_a_trainer_without_standard_streams_has_a_process(tmp_path: Path, closed: str) -> None:
    """As a daemon is started."""
    streams, is_later = closed.partition(",")[0].split(), closed.endswith("later")
    body = f"""
        import os, sys
        import torch
        from actorsnap import Options, StateDict
        from actorsnap.runtime.host import Host
        from actorsnap.runtime.uploader_client import find_uploader
        from actorsnap.sync import Snapshot
        uploader = find_uploader(Host.get())
        if {is_later}:
            os.closerange(0, 3)
        for name in "ab":
            app = {{"model": StateDict(x=torch.ones(3))}}
            options = Options(offload="process", fsync=False)
            Snapshot.async_take(f"{{sys.argv[1]}}/{{name}}", app, options=options).wait()
        assert uploader.is_ready and uploader.incarnation == 1
    """
    closing = "" if is_later else " ".join(f"{stream}>&-" for stream in streams)
    command = [sys.executable, "-c", textwrap.dedent(body), str(tmp_path)]
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {closing}', "sh", *command], cwd=ROOT, check=False
    )
    assert done.returncode == 0
    assert Snapshot(str(tmp_path / "b")).verify("full").ok


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_for_the_trainer(tmp_path: Path, holds: Holds, number: signal.Signals) -> None:
    """A terminal sends Ctrl-C to all of them, and a system that preempts a job SIGTERM."""
    holds.hold("manifest")
    pending = save(f"held://{tmp_path}/s", 1)
    holds.wait_held("manifest")
    first = process()
    first.send_signal(number)
    time.sleep(0.1)
    holds.let("manifest")
    pending.wait()
    save(tmp_path / "t", 2).wait()
    assert process() == first


@contextmanager
def about_to_replace(tmp_path: Path, holds: Holds, options: Options) -> Iterator[None]:
    """A save has seen the older snapshot, and commits behind the block."""
    url = tmp_path / "s"
    arguments: dict[str, Any] = {"overwrite": True, "options": options}
    if options.offload == "process":
        holds.hold("commit")
        pending = Snapshot.async_take(f"held://{url}", state(2), **arguments)
        holds.wait_held("commit")
        yield
        holds.let("commit")
    else:
        barrier = Barrier(2, verbs=frozenset({"put"}))  # behind the rank manifest's
        with faulty(lambda inner: BarrierStorage(inner, barrier)):
            pending = Snapshot.async_take(faulty_url(url), state(2), **arguments)
        barrier.wait_reached()
        yield
        barrier.release()
    pending.wait()


@pytest.mark.few(1)
@pytest.mark.parametrize("first", [OFFLOADED, BY_THREAD], ids=["process", "thread"])
def test_what_trainer_and_process_leave_the_other_one_collects(
    tmp_path: Path, holds: Holds, first: Options
) -> None:
    """One replaces what it has not seen: it came behind its look at what was there."""
    other = BY_THREAD if first is OFFLOADED else OFFLOADED
    Snapshot.take(tmp_path / "s", state(1))
    with about_to_replace(tmp_path, holds, first):
        Snapshot.async_take(tmp_path / "s", state(3), overwrite=True, options=other).wait()
        assert number_at(tmp_path / "s") == 3
    assert number_at(tmp_path / "s") == 2
    assert len([each for each in (tmp_path / "s").iterdir() if each.is_dir()]) == 1


# The trainer


def trainer(body: str, *arguments: object) -> subprocess.Popen[str]:
    """A process that saves; prints the pid of its uploader first."""
    head = f"""
        import os, signal, sys, time
        sys.path.insert(0, {str(HELD)!r})
        import torch
        from actorsnap import Options, StateDict
        from actorsnap.runtime.host import Host
        from actorsnap.runtime.uploader_client import find_uploader
        from actorsnap.sync import Snapshot
        OFFLOADED = Options(offload="process", fsync=False)
        def save(url, number, options=OFFLOADED):
            state = dict(weight=torch.full((1 << 18,), float(number)))
            state |= dict(step=number, name=f"number {{number}}")
            app = {{"model": StateDict(**state)}}
            return Snapshot.async_take(url, app, options=options)
        DETACHED = Options(detach=True, fsync=False)
        def pid():
            return find_uploader(Host.get()).pid
    """
    script = ["-c", textwrap.dedent(head) + textwrap.dedent(body), *map(str, arguments)]
    return subprocess.Popen(forker.command(*script), cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_trainer_that_is_killed_leaves_no_process_and_no_memory(
    tmp_path: Path, holds: Holds
) -> None:
    shm = shared_files()
    holds.hold("manifest")
    with trainer(
        "p = save(sys.argv[1], 1); print(pid(), os.getpid(), flush=True); p.wait()",
        f"held://{tmp_path}/s",
    ) as parent:
        assert parent.stdout is not None
        process, killed = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        holds.wait_held("manifest")
        killed.kill()
    process.wait(PATIENCE_S)
    assert shared_files() - shm == set()
    assert [path for path in (tmp_path / "s").rglob("*") if path.is_file()] == []


def test_a_fork_of_the_trainer_holds_neither_process_nor_saves(tmp_path: Path) -> None:
    """As workers of a data loader are: also one that outlives the trainer."""
    with trainer(
        """
        os.setsid()
        save(sys.argv[1] + "/0", 0).wait()
        first = pid()
        if os.fork() == 0:
            time.sleep(120)
            os._exit(0)
        save(sys.argv[1] + "/1", 1).wait()
        print(first, pid(), os.getpid(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
    ) as parent:
        assert parent.stdout is not None
        first, second, group = parent.stdout.readline().split()
        assert first == second
        try:
            psutil.Process(int(first)).wait(PATIENCE_S)
        finally:
            os.killpg(int(group), signal.SIGKILL)
    assert number_at(tmp_path / "1") == 1


def test_a_trainer_that_dies_while_its_process_starts_leaves_none(tmp_path: Path) -> None:
    """Although a child of it holds the link open."""
    with trainer(
        """
        os.setsid()
        find_uploader(Host.get())
        Host.get().call_soon(find_uploader(Host.get()).start)
        while pid() is None:
            time.sleep(0.001)
        print(pid(), os.getpid(), flush=True)
        if os.fork() == 0:
            time.sleep(120)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    ) as parent:
        assert parent.stdout is not None
        pid, group = (int(number) for number in parent.stdout.readline().split())
        process = psutil.Process(pid)
        try:
            process.wait(30)
        finally:
            os.killpg(group, signal.SIGKILL)


def test_an_exit_with_a_pending_save_finishes_it(tmp_path: Path) -> None:
    with trainer("save(sys.argv[1], 1); print(pid(), flush=True)", tmp_path / "s") as parent:
        assert parent.stdout is not None
        process = psutil.Process(int(parent.stdout.readline()))
    assert parent.returncode == 0
    assert number_at(tmp_path / "s") == 1
    process.wait(PATIENCE_S)


@pytest.mark.parametrize("how", ["is killed", slow("exits")])
def test_a_detached_save_is_committed_without_the_trainer(
    tmp_path: Path, holds: Holds, how: str
) -> None:
    holds.hold("manifest")
    end = "os.kill(os.getpid(), signal.SIGKILL)" if how == "is killed" else ""
    with trainer(
        f"p = save(sys.argv[1], 1, DETACHED); p.staged(); print(pid(), flush=True); {end}",
        f"held://{tmp_path}/s",
    ) as parent:
        assert parent.stdout is not None
        process = psutil.Process(int(parent.stdout.readline()))
    assert parent.returncode == (-signal.SIGKILL if end else 0)
    holds.wait_held("manifest")
    assert process.is_running()
    holds.let("manifest")
    process.wait(PATIENCE_S)
    assert number_at(tmp_path / "s") == 1


def test_sigterm_after_the_trainers_end_aborts_a_detached_save(
    tmp_path: Path, holds: Holds
) -> None:
    holds.hold("manifest")
    with trainer(
        "save(sys.argv[1], 1, DETACHED).staged(); print(pid(), flush=True)",
        f"held://{tmp_path}/s",
    ) as parent:
        assert parent.stdout is not None
        process = psutil.Process(int(parent.stdout.readline()))
    holds.wait_held("manifest")
    for _ in range(5):  # ignored until it has noticed the end
        process.terminate()
        time.sleep(0.2)
    holds.let("manifest")
    process.wait(PATIENCE_S)
    assert [path for path in (tmp_path / "s").rglob("*") if path.is_file()] == []


def test_exit_waits_for_a_detached_save_that_no_process_makes(tmp_path: Path, holds: Holds) -> None:
    holds.hold("manifest")
    with trainer(
        """
        from actorsnap.runtime import uploader_client
        uploader_client._BOOT = "raise SystemExit(3)"
        save(sys.argv[1], 1, DETACHED).staged()
        """,
        f"held://{tmp_path}/s",
    ) as parent:
        holds.wait_held("manifest")
        with pytest.raises(subprocess.TimeoutExpired):
            parent.wait(1.0)
        holds.let("manifest")
    assert parent.returncode == 0
    assert number_at(tmp_path / "s") == 1


def test_a_stopped_runtime_lets_detached_saves_go(tmp_path: Path, holds: Holds) -> None:
    holds.hold("manifest")
    options = Options(detach=True, fsync=False)
    pending = save(f"held://{tmp_path}/s", 1, options)
    holds.wait_held("manifest")
    left = process()
    shutdown()
    with pytest.raises(SnapshotAborted, match="goes on") as caught:
        pending.wait()
    assert caught.value.may_be_committed
    save(tmp_path / "t", 2).wait()  # by another one; it gets other memory
    holds.let("manifest")
    left.wait(PATIENCE_S)
    assert [number_at(tmp_path / name) for name in "st"] == [1, 2]


NOTEBOOK = """
import asyncio, sys, types
main = types.ModuleType("__main__")
sys.modules["__main__"] = main  # as a kernel's: without a file, with a loop that runs
async def run_cells():
    code = compile(sys.stdin.read(), "<cell 1>", "exec", flags=0x2000)  # await at top level
    cell = eval(code, vars(main))
    if cell is not None:
        await cell
asyncio.run(run_cells())
"""


@pytest.mark.parametrize("how", mostly_slow(["-m", "-c", "script", "stdin", "notebook"], "script"))
def test_the_users_main_is_not_imported(tmp_path: Path, how: str) -> None:
    take = "Snapshot.async_take(path, state, options=options)"
    facade, wait = ("actorsnap.sync", f"{take}.wait()")
    if how == "notebook":
        facade, wait = ("actorsnap", f"await (await {take}).wait()")
    text = textwrap.dedent(
        f"""
        with open({str(tmp_path / "imports")!r}, "a") as file:
            file.write("x")
        import torch
        from actorsnap import Options, StateDict
        from actorsnap.runtime.host import Host
        from actorsnap.runtime.uploader_client import find_uploader
        from {facade} import Snapshot
        path, state = {str(tmp_path / "s")!r}, {{"s": StateDict(x=torch.ones(3))}}
        options = Options(offload="process")
        {wait}
        assert find_uploader(Host.get()).is_ready
        """
    )
    (tmp_path / "train.py").write_text(text)
    command = {
        "-m": ["-m", "train"],
        "-c": ["-c", text],
        "script": ["train.py"],
        "stdin": ["-"],
        "notebook": ["-c", NOTEBOOK],
    }[how]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=text if how in ("stdin", "notebook") else "",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "imports").read_text() == "x"
    assert Snapshot(str(tmp_path / "s")).verify("full").ok
