# SPDX-License-Identifier: Apache-2.0
"""The torn-write test: ``async_take`` saves what the tensors held when it was called.

The storage holds every byte back until the trainer has overwritten all of its memory, so that a
byte that is read after staging is surely a wrong one. The last test takes staging out, and
sees that the others would notice.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import actorsnap
from actorsnap import ChecksumMismatch, FormatError, Options, StateDict
from actorsnap.actors import staging, uploader
from actorsnap.actors.items import StagedChunk
from actorsnap.actors.staging import StagingActor
from actorsnap.actors.trace import Row
from actorsnap.planning.packing import Chunk
from actorsnap.state.sources import Gathering, gather
from actorsnap.storage.wrapper import WriterWrapper
from actorsnap.sync import PendingSnapshot, Snapshot
from tests.api.facades import Facade, each_facade
from tests.api.same import assert_same
from tests.api.slow_storage import GatedWriter, gated
from tests.api.states import CASES, dense, scribble

MIB = 1 << 20
SMALL_CHUNKS = Options(chunk_bytes=2 * MIB, fsync=False)


def saved_state(pending: Any, key: str = "s") -> dict[Any, Any]:
    state: dict[Any, Any] = Snapshot(pending.path).get_state_dict_for_key(key)
    return state


@each_facade
@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_leaf_is_saved_as_it_was(api: Facade, case: str) -> None:
    state = CASES[case]()
    with gated() as (url, gate):
        pending = api.run(api.Snapshot.async_take(url, {"s": StateDict(state)}))
        scribble(state)
        gate.open()
        api.run(pending.wait())
    assert_same(saved_state(pending), CASES[case]())


@each_facade
def test_containers_changed_after_the_call(api: Facade) -> None:
    nested = {"step": 1, "log": [1, 2], "blob": bytearray(b"x" * 9000), "lr": {"base": 0.1}}
    state = StateDict(nested)
    with gated() as (url, gate):
        pending = api.run(api.Snapshot.async_take(url, {"s": state}))
        state["step"] = 2
        state["log"].append(3)
        state["lr"].clear()
        state["blob"].clear()  # also: nothing holds its memory any more
        state["new"] = torch.ones(3)
        gate.open()
        api.run(pending.wait())
    expected = {"step": 1, "log": [1, 2], "blob": bytearray(b"x" * 9000), "lr": {"base": 0.1}}
    assert_same(saved_state(pending), expected)


@each_facade
def test_memory_is_let_go_once_it_is_copied(api: Facade) -> None:
    """A trainer may free what it saved; that memory must not live on until the commit."""
    array = np.arange(50_000)
    tensor = torch.from_numpy(np.arange(3_000_000.0))
    owners: list[weakref.ref[Any]] = [weakref.ref(array), weakref.ref(tensor)]
    owners.append(weakref.ref(tensor.untyped_storage()))
    state = StateDict(array=array, views=[tensor, tensor[:7], tensor[::2]])
    with gated() as (url, gate):
        pending = api.run(api.Snapshot.async_take(url, {"s": state}))
        api.run(pending.staged())
        del array, tensor, state
        gc.collect()
        assert all(owner() is None for owner in owners)
        assert not pending.done()
        gate.open()
        api.run(pending.wait())


def big() -> dict[str, Any]:
    """Above torch's and torchsnapshot's special sizes; with views, in one storage of 160 MiB."""
    flat = torch.arange(40 * MIB, dtype=torch.int32)
    return {
        "whole": flat.view(torch.float32),
        "row": flat.view(1024, -1)[7],
        "small": torch.arange(5),
        "transposed": flat[: 4 * MIB].view(2048, 2048).t(),
    }


def save_160_mib(folder: str | None = None) -> None:
    state = big()
    with gated(folder) as (url, gate):
        pending = Snapshot.async_take(url, {"s": StateDict(state)}, options=Options(fsync=False))
        scribble(state)
        gate.open()
        saved = pending.wait()
    del state
    found, expected = saved.get_state_dict_for_key("s"), big()
    for name, tensor in expected.items():
        assert torch.equal(found[name].view(torch.int32), tensor.view(torch.int32)), name
    assert found["row"].untyped_storage().data_ptr() == found["whole"].untyped_storage().data_ptr()


def test_160_mib(tmp_path: Path) -> None:
    save_160_mib(str(tmp_path / "s"))


def strided_and_plain(mib: int) -> dict[str, Any]:
    rows = mib * 256 // 2
    return {
        "plain": dense(torch.float32, rows, 1024, seed=1),
        "transposed": dense(torch.bfloat16, 1024, rows, seed=2).t(),
        "numpy": np.random.default_rng(3).standard_normal((64, 1000))[:, ::3],
    }


def test_state_larger_than_the_budget() -> None:
    """Only what fits is copied ahead; the call returns when the last byte is."""
    expected, state = strided_and_plain(24), strided_and_plain(24)
    budget = 6 * MIB
    total = sum(value.nbytes for value in expected.values())
    options = Options(chunk_bytes=2 * MIB, memory_budget_bytes=budget)
    with (
        gated() as (url, gate),
        _thread() as thread,
        _budget_restored(),
    ):
        call: Future[PendingSnapshot] = thread.submit(
            Snapshot.async_take, url, {"s": StateDict(state)}, options=options
        )
        gate.wait_until_held()
        # Nothing is stored, and the budget holds a fifth: the trainer must still wait.
        assert not call.done()
        gate.open()
        pending = call.result(timeout=60)
        scribble(state)
        pending.wait()
    assert total > 3 * budget
    assert_same(saved_state(pending), expected)


def test_writes_while_the_rest_of_a_large_state_is_uploaded() -> None:
    """As above, but the last copies are surely stored after the trainer wrote."""
    expected, state = strided_and_plain(24), strided_and_plain(24)
    budget, chunk = 8 * MIB, 2 * MIB
    total = sum(value.nbytes for value in expected.values())
    options = Options(chunk_bytes=chunk, memory_budget_bytes=budget)
    with gated(free_bytes=total - budget + 2 * chunk) as (url, gate), _budget_restored():
        pending = Snapshot.async_take(url, {"s": StateDict(state)}, options=options)
        scribble(state)
        gate.wait_until_held()
        assert not pending.done()
        gate.open()
        pending.wait()
    assert gate.num_held >= 1
    assert_same(saved_state(pending), expected)


@pytest.mark.parametrize("when", ["returned", "staged"])
def test_threads_write_all_the_time(when: str) -> None:
    """Trainers that never stop, through every way that torch and numpy have to write."""

    def build() -> dict[str, Any]:
        matrix = dense(torch.float32, 512, 1024, seed=1).nan_to_num_()
        array = np.random.default_rng(2).standard_normal(200_000)
        return {
            "matrix": matrix,
            "row": matrix[3],
            "columns": matrix[:, 5:9],
            "bf16": torch.randn(300, 700, generator=torch.Generator().manual_seed(3)).bfloat16(),
            "float8": dense(torch.float8_e4m3fn, 4096, seed=4),
            "flags": dense(torch.bool, 4096, seed=5),
            "complex": torch.view_as_complex(matrix[100:200].clone().view(-1, 2)),
            "array": array,
            "tied": torch.from_numpy(array)[10:20],
        }

    state, expected = build(), build()

    def write(stop: threading.Event, wrote: threading.Barrier) -> None:
        for turn in range(1_000_000):
            state["matrix"].mul_(1.5)
            state["row"].fill_(turn)
            state["columns"].zero_()
            state["bf16"].add_(1)
            state["float8"].view(torch.uint8).bitwise_xor_(0x55)
            state["flags"].logical_not_()
            state["complex"].conj_physical_().add_(1j)
            state["array"][:] = turn
            np.multiply(state["array"], 2, out=state["array"])
            if turn == 0:
                wrote.wait(60)
            if stop.is_set():
                return

    stop, wrote = threading.Event(), threading.Barrier(4)
    with gated() as (url, gate), ThreadPoolExecutor(3) as threads:
        pending = Snapshot.async_take(url, {"s": StateDict(state)}, options=SMALL_CHUNKS)
        if when == "staged":
            pending.staged()
        writers = [threads.submit(write, stop, wrote) for _ in range(3)]
        try:
            wrote.wait(60)
            gate.open()
            pending.wait()
        finally:
            stop.set()
        for writer in writers:
            writer.result(60)
    assert_same(saved_state(pending), expected)


async def test_a_task_of_the_same_loop_trains_on() -> None:
    """The async form: the trainer is another task, and runs while the save is stored."""
    state, expected = strided_and_plain(2), strided_and_plain(2)
    with gated() as (url, gate):
        pending = await actorsnap.Snapshot.async_take(url, {"s": StateDict(state)})
        await pending.staged()
        scribble(state)
        gate.open()
        await pending
        found = await actorsnap.Snapshot(pending.path).get_state_dict_for_key("s")
    assert_same(found, expected)


def test_two_snapshots_of_a_moving_state_at_once() -> None:
    state = {"x": torch.full((512, 1024), 1.0)}
    with gated() as (first_url, first_gate), gated() as (second_url, second_gate):
        first = Snapshot.async_take(first_url, {"s": StateDict(state)}, options=SMALL_CHUNKS)
        state["x"].fill_(2.0)
        second = Snapshot.async_take(second_url, {"s": StateDict(state)}, options=SMALL_CHUNKS)
        state["x"].fill_(3.0)
        second_gate.open()
        second.wait()
        first_gate.open()
        first.wait()
    assert torch.equal(saved_state(first)["x"], torch.full((512, 1024), 1.0))
    assert torch.equal(saved_state(second)["x"], torch.full((512, 1024), 2.0))


def test_blocking_take_reads_the_memory_itself() -> None:
    """The other half of the promise: ``take`` copies nothing that lies in order."""
    copied: list[int] = []

    def count(gatherings: Sequence[Gathering]) -> None:
        copied.extend(len(each.out) for each in gatherings)
        gather(gatherings)

    state = {"plain": dense(torch.float32, 1024, 1024), "small": dense(torch.int8, 7)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "gather", count)
        Snapshot.take("memory://consistency/blocking", {"s": StateDict(state)}, overwrite=True)
        assert copied == []
        with gated() as (url, gate):
            gate.open()
            Snapshot.async_take(url, {"s": StateDict(state)}).wait()
        assert sum(copied) == sum(value.nbytes for value in state.values())


# Without staging ------------------------------------------------------------------------------


@contextmanager
def staging_taken_out() -> Iterator[None]:
    """Chunks are copied when their turn to be stored comes, behind the gate, instead of before."""
    late: dict[int, Callable[[], Any]] = {}
    store = uploader.UploaderActor._store

    def copy_later(gatherings: Sequence[Gathering]) -> None:
        late.update((id(each.out), partial(gather, [each])) for each in gatherings)

    async def store_late(self: Any, staged: StagedChunk, row: Row) -> None:
        if staged.lease is not None:
            nbytes = staged.chunk.stop - staged.chunk.start
            writer = await self.objects.writer_of(staged.chunk.object)
            await writer.inner.storage.gate.pass_through(nbytes)  # below the outermost wrapper
            late.pop(id(staged.lease.view))()
        await store(self, staged, row)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "gather", copy_later)
        patch.setattr(uploader.UploaderActor, "_store", store_late)
        # The gate stands before the copy now, and each byte passes it once.
        patch.setattr(GatedWriter, "write_at", WriterWrapper.write_at)
        yield
    assert not late


WITH_MEMORY = sorted(set(CASES) - {"empty"})


@pytest.mark.blocking  # the copy that comes too late runs on the loop
@pytest.mark.parametrize("case", WITH_MEMORY)
def test_without_staging_the_torn_write_is_seen(case: str) -> None:
    # Sparse indices that were overwritten make no tensor at all.
    torn = pytest.raises((AssertionError, FormatError), match="other values|is not|negative index")
    with torn, staging_taken_out():
        test_every_kind_of_leaf_is_saved_as_it_was(Facade("sync", Snapshot), case)


@pytest.mark.blocking
@pytest.mark.parametrize(
    "test",
    [
        save_160_mib,
        test_writes_while_the_rest_of_a_large_state_is_uploaded,
        test_two_snapshots_of_a_moving_state_at_once,
        lambda: test_threads_write_all_the_time("staged"),
    ],
)
def test_without_staging_the_larger_ones_fail(test: Callable[[], None]) -> None:
    with pytest.raises(AssertionError), staging_taken_out():
        test()


def test_live_memory_instead_of_copies_is_noticed(tmp_path: Path) -> None:
    """Staging that sends the trainer's own memory, as a blocking take does: read too late, and
    torn or not, whichever side is faster."""

    async def send_live_memory(self: Any, chunk: Chunk) -> Any:
        self.copies = False
        return await original(self, chunk)

    original = StagingActor._prepare
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StagingActor, "_prepare", send_live_memory)
        # Torn, or whole and of a later step; or other bytes were hashed than were written.
        noticed = "whole|differs from what was saved"
        with pytest.raises((ChecksumMismatch, AssertionError), match=noticed):
            save_160_mib(f"{tmp_path}/s")


# Helpers --------------------------------------------------------------------------------------


@contextmanager
def _thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


@contextmanager
def _budget_restored() -> Iterator[None]:
    """The budget is the process': other tests shall have theirs."""
    from actorsnap.runtime.host import Host

    before = Host.get().resources.budget.limit_bytes
    try:
        yield
    finally:
        Host.get().resources.set_budget(before)


def test_the_gate_holds() -> None:
    """The tests above are worth nothing if it does not."""
    with gated() as (url, gate):
        pending = Snapshot.async_take(url, {"s": StateDict(x=torch.ones(3))})
        gate.wait_until_held()
        assert not pending.done()
        gate.open()
        pending.wait()
    assert gate.num_held >= 1
