# SPDX-License-Identifier: Apache-2.0
"""Life and death of processes, and how snapshots share one: forks, exits, many at once."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

from actorsnap import Options, PendingSnapshot, Snapshot, SnapshotAborted, StateDict
from actorsnap.runtime.host import Host
from actorsnap.storage.memory import forget_space
from actorsnap.testing import FaultyStorage
from tests.api.faults import Barrier, BarrierStorage, faulty, faulty_url
from tests.api.places import assert_idle, assert_whole, number_at, number_of, state
from tests.api.zygote import ROOT, Zygote
from tests.support import forker
from tests.support.cases import slow

pytestmark = pytest.mark.usefixtures("forker")

MIB = 1 << 20
FAST = Options(fsync=False)


@pytest.fixture(scope="module")
def zygote() -> Zygote:
    return Zygote.shared()


@pytest.fixture
def own_budget() -> Iterator[None]:
    """The budget belongs to the process: tests that change it put it back."""
    host = Host.get()
    before = host.resources.budget.limit_bytes
    yield
    host.resources.set_budget(before)
    host.submit(anyio.lowlevel.checkpoint()).future.result()  # the next test reads it


# Forks


def test_a_fork_while_a_snapshot_is_pending(zygote: Zygote, tmp_path: Path) -> None:
    found = zygote.call("fork_with_pending", url=str(tmp_path)).result()
    for name in ("wait", "staged", "guard", "done", "cancel", "events"):
        assert found["child"][name].startswith("UsageError: this object belongs to process"), name
    assert "open the snapshot again in the child" in found["child"]["wait"]
    # The child has a runtime of its own, and works.
    assert found["child"]["saved"] == ""
    assert found["child"]["restored"] == 1
    assert found["child"]["read"] == 1
    # The parent noticed nothing.
    assert found["parent"] == 2


def test_a_child_that_exits_does_not_wait_for_the_parents_snapshots(
    zygote: Zygote, tmp_path: Path
) -> None:
    assert zygote.call("fork_and_exit", url=str(tmp_path)).result() == {"child": 0, "parent": 2}


# Exits


def run_script(body: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    head = """
        import sys, torch
        import actorsnap, actorsnap.sync
        from actorsnap import Options, StateDict
        from tests.api.faults import faulty, faulty_url, _scheme
        from tests.api.places import state
    """
    return subprocess.run(
        forker.command("-c", textwrap.dedent(head) + textwrap.dedent(body), *map(str, arguments)),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_interpreter_exits_with_pending_snapshots(tmp_path: Path) -> None:
    """They are finished first: through a slow storage, so that there is something to wait for."""
    done = run_script(
        """
        from actorsnap.testing import FaultyStorage
        _scheme.wrap = lambda inner: FaultyStorage(inner, latency_s={"put": 0.3})
        for number in (1, 2):
            actorsnap.sync.Snapshot.async_take(faulty_url(f"{sys.argv[1]}/{number}"), state(number))
        print("last line")
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "last line\n"
    assert "waiting for the pending snapshot before exit" in done.stderr
    assert "Traceback" not in done.stderr
    for number in (1, 2):
        asyncio.run(assert_whole(tmp_path / str(number), number))


@pytest.mark.parametrize("offload", [slow("thread"), "process"])
def test_the_interpreter_exits_and_aborts_what_is_pending(tmp_path: Path, offload: str) -> None:
    """What is in the storage before stays what it is, and nothing of the aborted one is left."""
    asyncio.run(Snapshot.take(str(tmp_path / "s"), state(1)))
    before = sorted(tmp_path.rglob("*"))
    done = run_script(
        f"""
        sys.path.insert(0, {str(ROOT / "tests" / "held")!r})
        open(sys.argv[1] + "/hold-manifest", "x").close()
        options = actorsnap.Options(at_exit="abort", offload={offload!r}, fsync=False)
        actorsnap.sync.Snapshot.async_take(
            f"held://{{sys.argv[1]}}/s", state(2), overwrite=True, options=options
        )
        print("last line")
        """,
        tmp_path,
    )
    (tmp_path / "hold-manifest").unlink()
    (tmp_path / "held-manifest").unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "last line\n"
    assert "aborting the pending snapshot before exit" in done.stderr
    assert "waiting for the pending" not in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(tmp_path.rglob("*")) == before
    asyncio.run(assert_whole(tmp_path / "s", 1))


def test_the_interpreter_exits_with_a_snapshot_that_fails(tmp_path: Path) -> None:
    """Nobody asked for it: it is an error in the log, and the exit code is the script's."""
    done = run_script(
        """
        from actorsnap.testing import FaultyStorage
        _scheme.wrap = lambda inner: FaultyStorage(
            inner, latency_s={"put": 0.3}, fail_at=1, fail_verbs=["put"]
        )

        async def main():
            await actorsnap.Snapshot.async_take(faulty_url(sys.argv[1] + "/s"), state(1))

        import asyncio
        asyncio.run(main())
        raise SystemExit(3)
        """,
        tmp_path,
    )
    assert done.returncode == 3, done.stderr
    assert "snapshot aborted: a scripted fault" in done.stderr
    assert "(rank 0, stage 'store'" in done.stderr
    assert os.listdir(tmp_path) == []


# In one process


async def test_a_failure_that_nobody_waits_for_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = str(tmp_path / "s")
    with (
        caplog.at_level(logging.ERROR, "actorsnap"),
        faulty(lambda inner: FaultyStorage(inner, fail_at=1, fail_verbs=["put"])),
    ):
        pending = await Snapshot.async_take(faulty_url(url), state(1), options=FAST)
        with anyio.fail_after(60):
            progress = [one async for one in pending.events()]
    assert progress[-1].phase == "aborted"
    (record,) = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert url in record.getMessage()
    assert "attempt" in record.getMessage()
    assert "rank 0" in record.getMessage()
    assert "a scripted fault" in record.getMessage()
    with pytest.raises(SnapshotAborted):
        await pending.wait()


async def test_what_the_caller_is_told_is_not_logged_as_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = str(tmp_path / "s")
    barrier = Barrier(1, verbs=frozenset({"put"}))
    with caplog.at_level(logging.WARNING, "actorsnap"):
        with faulty(lambda inner: FaultyStorage(inner, fail_at=1, fail_verbs=["put"])):
            with pytest.raises(SnapshotAborted):
                await Snapshot.take(faulty_url(url), state(1), options=FAST)
        with faulty(lambda inner: BarrierStorage(inner, barrier)):
            pending = await Snapshot.async_take(faulty_url(url), state(1), options=FAST)
            assert await asyncio.to_thread(barrier.wait_reached)
            pending.cancel()
            with pytest.raises(SnapshotAborted):
                await pending.wait()
    assert caplog.records == []


async def test_two_snapshots_in_flight(tmp_path: Path) -> None:
    """The second one overtakes the first one, which is held up; neither mixes with the other."""
    first, second = str(tmp_path / "1"), str(tmp_path / "2")
    barrier = Barrier(1, verbs=frozenset({"put_if_absent"}))
    app_state = state(1)
    with faulty(lambda inner: BarrierStorage(inner, barrier)):
        slow = await Snapshot.async_take(faulty_url(first), app_state, options=FAST)
        for key, stateful in state(2).items():  # the trainer goes on in the same memory
            for name, value in stateful.items():
                if isinstance(value, torch.Tensor):
                    app_state[key][name].copy_(value)
                else:
                    app_state[key][name] = value
        assert await asyncio.to_thread(barrier.wait_reached)
        quick = await Snapshot.async_take(second, app_state, options=FAST)
        await quick.wait()
        assert not slow.done()
        assert await number_at(first) is None
        barrier.release()
        await slow.wait()
    await assert_whole(first, 1)
    await assert_whole(second, 2)
    assert_idle()


@pytest.mark.few
@pytest.mark.parametrize("scheme", ["fs", "memory"])
async def test_many_snapshots_and_a_small_budget(
    tmp_path: Path, scheme: str, own_budget: None
) -> None:
    """Twenty at once, with memory for hardly two: all of them get through, first come first."""
    options = Options(fsync=False, memory_budget_bytes=2 * MIB, chunk_bytes=2 * MIB)
    place = f"{tmp_path}/" if scheme == "fs" else "memory://many/"
    pending: dict[int, PendingSnapshot] = {}
    order: list[int] = []

    async def save(number: int) -> None:
        pending[number] = await Snapshot.async_take(
            f"{place}{number}", state(number), options=options
        )
        order.append(number)
        await pending[number].wait()

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(save, number)
    assert sorted(order) == list(range(20))
    for number in range(20):
        assert await number_at(f"{place}{number}") == number
    assert_idle()
    forget_space("many")


async def test_snapshots_of_one_task_are_staged_in_order(tmp_path: Path, own_budget: None) -> None:
    options = Options(fsync=False, memory_budget_bytes=2 * MIB, chunk_bytes=2 * MIB)
    pending = []
    with anyio.fail_after(60):
        for number in range(20):
            taken = await Snapshot.async_take(
                tmp_path / str(number), state(number), options=options
            )
            await taken.staged()  # at once: async_take returns when it is
            pending.append(taken)
        for number, taken in enumerate(pending):
            target = state(-1)
            await (await taken.wait()).restore(target)
            assert number_of(target) == number
    assert_idle()


@pytest.mark.few
@pytest.mark.parametrize("scheme", ["fs", "memory"])
@pytest.mark.parametrize("chunk_mib", [2, 16])
async def test_a_state_larger_than_the_budget(
    tmp_path: Path, scheme: str, chunk_mib: int, own_budget: None
) -> None:
    """It goes through in chunks, on save and on load, one at a time if need be."""
    limit = 4 * MIB
    options = Options(
        fsync=False, memory_budget_bytes=limit, chunk_bytes=chunk_mib * MIB, num_uploaders=2
    )
    url = str(tmp_path / "s") if scheme == "fs" else f"memory://larger-{chunk_mib}/s"
    tensors = {str(n): torch.full((2 * MIB,), float(n)) for n in range(8)}  # 64 MiB
    budget = Host.get().resources.budget
    budget.peak_bytes = 0
    with anyio.fail_after(60):
        pending = await Snapshot.async_take(url, {"model": StateDict(tensors)}, options=options)
    for tensor in tensors.values():
        tensor.zero_()
    with anyio.fail_after(60):
        await pending.wait()
    assert 0 < budget.peak_bytes <= max(limit, chunk_mib * MIB)
    assert_idle()

    budget.peak_bytes = 0
    # Every other element of a wider tensor: what cannot be read into in place.
    target: dict[str, Any] = {name: torch.zeros(2 * MIB, 2)[:, 0] for name in tensors}
    with anyio.fail_after(60):
        await Snapshot(url, options=options).restore({"model": StateDict(target)})
    for name, tensor in target.items():
        assert torch.equal(tensor, torch.full((2 * MIB,), float(name)))
    assert 0 < budget.peak_bytes <= max(limit, chunk_mib * MIB)
    assert_idle()
    forget_space(f"larger-{chunk_mib}")
