# SPDX-License-Identifier: Apache-2.0
"""Saves of tensors on devices, on one that is simulated: order, memory, and number of copies."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from actorsnap import Options, SnapshotAborted, StateDict
from actorsnap.actors import staging
from actorsnap.planning.packing import Piece
from actorsnap.runtime.host import Host
from actorsnap.state import devices
from actorsnap.state.capture import capture
from actorsnap.state.sources import Gathering, gather
from actorsnap.state.tensors import bytes_of
from actorsnap.sync import Snapshot, warm_up
from tests.state.fake_device import FakeDevices, FakeEvent, FakeStream, fake_devices

KIB, MIB = 1 << 10, 1 << 20
THREAD = Options(offload="thread", fsync=False)
PROCESS = Options(offload="process", fsync=False)


@pytest.fixture
def fake() -> Iterator[FakeDevices]:
    with fake_devices() as found:
        yield found


def save(path: Path, state: dict[str, Any], options: Options = THREAD) -> dict[str, Any]:
    """Saves asynchronously, overwrites everything once staged, and reads what was saved."""
    pending = Snapshot.async_take(str(path), {"s": StateDict(state)}, options=options)
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.zero_()
    pending.wait()
    assert Host.get().resources.arena.lent_bytes == 0
    return saved(path)


def saved(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = Snapshot(str(path)).get_state_dict_for_key("s")
    return found


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 1


@pytest.mark.parametrize("options", [THREAD, PROCESS], ids=["thread", "process"])
def test_saves_what_streams_write_by_then(
    fake: FakeDevices, tmp_path: Path, options: Options
) -> None:
    """The kernel that makes the value has not even begun when ``async_take`` is called."""
    x, y = fake.put(torch.zeros(600_000)), fake.put(torch.zeros(100))
    fake.launch(lambda: x.fill_(7.0))
    fake.launch(lambda: y.fill_(8.0))
    found = save(tmp_path / "s", {"x": x, "y": y}, options)
    assert found["x"].unique().tolist() == [7.0]
    assert found["y"].unique().tolist() == [8.0]


def test_what_is_launched_once_staged_is_not_saved(fake: FakeDevices, tmp_path: Path) -> None:
    x = fake.put(torch.full((600_000,), 1.0))
    pending = Snapshot.async_take(str(tmp_path / "s"), {"s": StateDict({"x": x})}, options=THREAD)
    fake.launch(lambda: x.fill_(2.0))
    fake.synchronize()
    pending.wait()
    assert saved(tmp_path / "s")["x"].unique().tolist() == [1.0]


@pytest.mark.parametrize("is_full", [False, True])
def test_what_is_eager_of_a_lazy_save_is_copied_on_the_device(
    fake: FakeDevices, tmp_path: Path, is_full: bool
) -> None:
    """Statistics of a forward that is about to run; the caller waits only if it is full."""
    x, y = fake.put(torch.zeros(600_000)), fake.put(torch.zeros(30, 20))
    fake.launch(lambda: [x.fill_(7.0), y.fill_(8.0)])
    fake.is_full = is_full
    fake.refuses_to_pin = is_full  # what is copied in the caller's thread is small
    state = {"x": x, "y": y if is_full else y.t()}
    pending = Snapshot.async_take(
        str(tmp_path / "s"), {"s": StateDict(state)}, options=THREAD, stage="lazy"
    )
    fake.launch(lambda: [x.fill_(1.0), y.fill_(1.0)])
    pending.staged()
    fake.synchronize()
    pending.wait()
    found = saved(tmp_path / "s")
    assert found["x"].unique().tolist() == [7.0]
    assert found["y"].unique().tolist() == [8.0]


def test_a_blocking_take_waits_as_well(fake: FakeDevices, tmp_path: Path) -> None:
    x = fake.put(torch.zeros(100))
    fake.launch(lambda: x.fill_(7.0))
    Snapshot.take(str(tmp_path / "s"), {"s": StateDict({"x": x})}, options=THREAD)
    assert saved(tmp_path / "s")["x"].unique().tolist() == [7.0]


def test_the_caller_waits_for_no_device(fake: FakeDevices, tmp_path: Path) -> None:
    """Not by an event, and not for the whole device: only workers wait."""
    import threading

    waited: list[str] = []

    def wait(self: FakeEvent) -> None:
        waited.append(threading.current_thread().name)
        self.stream.run(self.position)

    x = fake.put(numbers(600_000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeEvent, "wait", wait)
        save(tmp_path / "s", {"x": x})
    assert waited
    assert all(name.startswith("actorsnap-worker") for name in waited)


@pytest.mark.parametrize(
    "forget",
    [
        lambda patch: patch.setattr(FakeStream, "wait_for", lambda self, event: None),
        lambda patch: patch.setattr(FakeEvent, "wait", lambda self: None),
        lambda patch: patch.setattr(devices.Lane, "mark", _mark_nothing),
    ],
    ids=["behind the caller's stream", "for the copies", "the mark"],
)
def test_without_a_wait_the_torn_read_is_seen(
    fake: FakeDevices, tmp_path: Path, forget: Callable[[pytest.MonkeyPatch], None]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        forget(patch)
        with pytest.raises(AssertionError):
            test_saves_what_streams_write_by_then(fake, tmp_path, THREAD)


def _mark_nothing(self: devices.Lane) -> None:
    ready: Any = FakeEvent(FakeStream(FakeDevices(), self._device))
    self._ready = ready


class Gathered:
    """A stateful whose tensors nobody else holds."""

    def __init__(self, make: Callable[[], dict[str, torch.Tensor]]) -> None:
        self._make = make

    def state_dict(self) -> dict[str, Any]:
        return self._make()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def test_tensors_are_held_until_they_are_copied(fake: FakeDevices, tmp_path: Path) -> None:
    state = Gathered(
        lambda: {
            "large": fake.put(numbers(600_000)),
            "small": fake.put(numbers(9)),
            "strided": fake.put(numbers(40, 30).t()),
        }
    )
    Snapshot.async_take(str(tmp_path / "s"), {"s": state}, options=THREAD).wait()
    found = saved(tmp_path / "s")
    assert torch.equal(found["large"], numbers(600_000))
    assert torch.equal(found["small"], numbers(9))
    assert torch.equal(found["strided"], numbers(40, 30).t())
    gc.collect()
    assert all(memory.unique().tolist() == [0x55] for memory in fake._memory), "all are free"


BASE = numbers(4, 6, 8, 10)
COMPLEX = torch.complex(BASE, -BASE)

# What lies on the device, and the view of it that is saved.
LAYOUTS: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = {
    "plain": (BASE, lambda x: x),
    "channels_last": (BASE.to(memory_format=torch.channels_last), lambda x: x),
    "permuted": (BASE, lambda x: x.permute(3, 1, 0, 2)),
    "sliced": (BASE, lambda x: x[1:, ::2, 2:7]),
    "offset": (BASE, lambda x: x.view(-1)[3:]),
    "scalar": (BASE, lambda x: x[0, 0, 0, 0]),
    "expanded": (BASE, lambda x: x[:, :1].expand(4, 5, 8, 10)),
    "empty": (BASE, lambda x: x[:0]),
    "bool": (BASE > 100, lambda x: x),
    "int8": (BASE.to(torch.int8), lambda x: x[..., :7]),
    "bfloat16": (BASE.bfloat16(), lambda x: x.transpose(1, 2)),
    "float8": (BASE.to(torch.float8_e4m3fn), lambda x: x.transpose(1, 2)),
    "double": (BASE.double(), lambda x: x.transpose(0, 3)),
    "complex": (COMPLEX, lambda x: x),
    "conj": (COMPLEX, lambda x: x.conj()),
    "neg": (COMPLEX, lambda x: x.conj().imag),
    "large": (numbers(1500, 1400), lambda x: x.t()),
}


def test_every_layout_and_dtype(fake: FakeDevices, tmp_path: Path) -> None:
    state = {name: view(fake.put(value)) for name, (value, view) in LAYOUTS.items()}
    Snapshot.async_take(str(tmp_path / "s"), {"s": StateDict(state)}, options=THREAD).wait()
    found = saved(tmp_path / "s")
    for name, (value, view) in LAYOUTS.items():
        assert found[name].dtype is view(value).dtype, name
        # In bytes: some of these dtypes cannot be compared.
        assert bytes_of(found[name]) == bytes_of(view(value)), name
    assert fake.counts.strided > 0


def test_views_of_shared_memory_are_copied_once(fake: FakeDevices, tmp_path: Path) -> None:
    whole = fake.put(numbers(100_000))
    state = {"a": whole[:70_000], "b": whole[50_000:]}
    fake.launch(lambda: whole.add_(1.0))
    found = save(tmp_path / "s", state)
    assert torch.equal(found["a"], numbers(100_000)[:70_000] + 1)
    assert torch.equal(found["b"], numbers(100_000)[50_000:] + 1)
    assert sum(fake.counts.bus) == 400_000


def test_small_tensors_cross_the_bus_together(fake: FakeDevices, tmp_path: Path) -> None:
    state = {f"t{i}": fake.put(torch.full((KIB,), float(i))) for i in range(2000)}
    found = save(tmp_path / "s", state)
    for i in range(2000):
        assert found[f"t{i}"].unique().tolist() == [float(i)]
    assert sum(fake.counts.bus) == 2000 * 4 * KIB
    assert len(fake.counts.bus) <= 4
    assert sum(fake.counts.packed) == 2000
    assert fake.counts.strided == 0


def test_large_tensors_are_read_once(fake: FakeDevices, tmp_path: Path) -> None:
    """Straight to the host: no slab in between."""
    state = {f"t{i}": fake.put(numbers(MIB // 2 if i % 2 else 10)) for i in range(9)}
    save(tmp_path / "s", state)
    assert fake.counts.packed == []
    assert fake.counts.strided == 0
    assert sorted(fake.counts.bus) == [40] * 5 + [2 * MIB] * 4


def test_strided_ones_are_packed_in_parts_that_fit(fake: FakeDevices, tmp_path: Path) -> None:
    value = numbers(3000, 1100)
    found = save(tmp_path / "s", {"x": fake.put(value.t())})
    assert torch.equal(found["x"], value.t())
    assert max(fake.counts.bus) <= 4 * MIB


def test_cuts_that_do_not_fit_together(fake: FakeDevices) -> None:
    """An odd number of bytes before elements of four."""
    state = {"a": torch.arange(7, dtype=torch.int8), "b": numbers(5, 3), "c": numbers(2, 3)}
    there = {"a": fake.put(state["a"]), "b": fake.put(state["b"]).t(), "c": fake.put(state["c"])}
    leaves = capture({"s": StateDict(there)}).leaves
    pieces = [Piece(i, 0, leaf.item.nbytes) for i, leaf in enumerate(leaves)]
    fake.refuses_to_pin = True  # for what the arena has not lent nobody does
    out = bytearray(7 + 60 + 24)
    sources = [leaf.source for leaf in leaves]
    gather([Gathering(sources, pieces, memoryview(out), lambda pinner: None)])
    assert out == bytes_of(state["a"]) + bytes_of(state["b"].t()) + bytes_of(state["c"])


def test_one_source_alone(fake: FakeDevices) -> None:
    """As leaves are hashed that other ranks may have, too."""
    fake.refuses_to_pin = True
    (leaf,) = capture({"s": StateDict({"x": fake.put(numbers(30, 20).t())})}).leaves
    out = bytearray(400)
    leaf.source.copy_into(80, memoryview(out))
    assert out == bytes_of(numbers(30, 20).t())[80:480]


def test_host_and_several_devices_in_one_state(fake: FakeDevices, tmp_path: Path) -> None:
    state: dict[str, Any] = {}
    for i in range(30):
        state[f"t{i}"] = numbers(50 + i) if i % 3 == 2 else fake.put(numbers(50 + i), i % 3)
    late = fake.put(torch.zeros(5), 1)
    fake.launch(lambda: late.fill_(3.0), 1)
    found = save(tmp_path / "s", {**state, "late": late, "step": 4})
    for i in range(30):
        assert torch.equal(found[f"t{i}"], numbers(50 + i))
    assert found["late"].unique().tolist() == [3.0]
    assert found["step"] == 4
    assert len(fake._copying) == 2


def test_a_full_device_is_no_reason_to_fail(fake: FakeDevices, tmp_path: Path) -> None:
    fake.is_full = True
    found = save(tmp_path / "s", {f"t{i}": fake.put(numbers(i + 1)) for i in range(20)})
    for i in range(20):
        assert torch.equal(found[f"t{i}"], numbers(i + 1))
    assert len(fake.counts.bus) == 20


def test_a_full_device_and_a_tensor_that_needs_a_slab(fake: FakeDevices, tmp_path: Path) -> None:
    fake.is_full = True
    with pytest.raises(SnapshotAborted, match="full") as caught:
        save(tmp_path / "s", {"x": fake.put(numbers(30, 20).t())})
    assert caught.value.stage == "stage"


@pytest.mark.few
@pytest.mark.parametrize("options", [THREAD, PROCESS], ids=["thread", "process"])
@pytest.mark.parametrize(("call", "number"), [("copy", 1), ("copy", 2), ("pack", 1), ("mark", 1)])
def test_a_copy_that_fails_aborts_the_save(
    fake: FakeDevices, tmp_path: Path, options: Options, call: str, number: int
) -> None:
    state = {"x": fake.put(numbers(600_000)), **{f"t{i}": fake.put(numbers(9)) for i in range(9)}}
    fake.fails_at = (call, number)
    with pytest.raises(SnapshotAborted, match="illegal memory access") as caught:
        save(tmp_path / "s", dict(state), options)
    assert caught.value.stage == "stage"
    assert caught.value.rank == 0
    for stream in fake._copying.values():
        assert stream.done == len(stream.work), "the memory is lent to others by now"
    assert Host.get().resources.arena.lent_bytes == 0
    fake.fails_at = None
    assert torch.equal(save(tmp_path / "s", dict(state), options)["x"], numbers(600_000))


@pytest.mark.parametrize("options", [THREAD, PROCESS], ids=["thread", "process"])
def test_memory_is_pinned_once_and_unpinned_when_it_is_given_up(
    fake: FakeDevices, tmp_path: Path, options: Options
) -> None:
    arena = Host.get().resources.arena
    assert arena.pinned_bytes == 0
    state = {"x": fake.put(numbers(600_000))}
    save(tmp_path / "s1", dict(state), options)
    first = dict(fake.pinned)
    assert sum(first.values()) == arena.pinned_bytes > 0
    save(tmp_path / "s2", dict(state), options)
    assert fake.pinned == first, "the same blocks again"
    arena.trim()
    assert fake.pinned == {}
    assert arena.pinned_bytes == 0


def test_a_warm_up_pins(fake: FakeDevices, tmp_path: Path) -> None:
    warm_up(4 * MIB, options=Options(offload="thread", chunk_bytes=2 * MIB))
    warm = dict(fake.pinned)
    assert sum(warm.values()) == 4 * MIB
    state = {"x": fake.put(numbers(MIB // 2 - 4 * KIB))}  # one chunk
    save(tmp_path / "s", state, Options(offload="thread", chunk_bytes=2 * MIB))
    assert fake.pinned == warm


def test_memory_that_no_device_copies_into_is_not_pinned(fake: FakeDevices, tmp_path: Path) -> None:
    save(tmp_path / "s", {"x": numbers(600_000)})
    assert fake.pinned == {}


def test_pinning_may_be_refused(
    fake: FakeDevices, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake.refuses_to_pin = True
    state = {f"x{i}": fake.put(numbers(600_000)) for i in range(4)}
    found = save(tmp_path / "s", state, Options(offload="thread", chunk_bytes=2 * MIB))
    assert torch.equal(found["x3"], numbers(600_000))
    lines = [line for line in caplog.messages if "is not pinned" in line]
    assert lines == ["staging memory is not pinned: copies from devices are slower: not today"]


def test_a_restore_comes_behind_what_was_launched_before(fake: FakeDevices, tmp_path: Path) -> None:
    """The trainer's last kernels still use the tensors that are restored into."""
    values = {"x": numbers(600_000), "strided": numbers(40, 30), "small": numbers(3)}
    save(tmp_path / "s", {name: fake.put(value) for name, value in values.items()})
    target = {
        "x": fake.put(torch.zeros(600_000)),
        "strided": fake.put(torch.zeros(30, 40)).t(),
        "small": fake.put(torch.zeros(3), 1),
    }
    fake.launch(lambda: [target["x"].fill_(-1.0), target["strided"].fill_(-1.0)])
    fake.launch(lambda: target["small"].fill_(-1.0), 1)
    Snapshot(str(tmp_path / "s")).restore({"s": StateDict(target)})
    fake.synchronize()
    for name, value in values.items():
        assert torch.equal(target[name], value)


@pytest.mark.parametrize("is_full", [False, True])
def test_small_tensors_are_restored_together(
    fake: FakeDevices, tmp_path: Path, is_full: bool
) -> None:
    """Parts of one tensor, too: a view of the whole comes from the same stored bytes."""
    values = {f"t{i}": numbers(100 + i % 7) + i for i in range(2000)}
    save(tmp_path / "s", {name: fake.put(value) for name, value in values.items()})
    target = {name: fake.put(torch.zeros_like(value)) for name, value in values.items()}
    fake.is_full = is_full
    Snapshot(tmp_path / "s").restore({"s": StateDict(target)})
    for name, value in values.items():
        assert torch.equal(target[name], value), name
    nbytes = sum(value.nbytes for value in values.values())
    assert fake.counts.slabs == ([] if is_full else [nbytes])


def test_a_restore_pins_the_memory_that_it_reads_into(fake: FakeDevices, tmp_path: Path) -> None:
    value = numbers(1_000_000)
    Snapshot.take(tmp_path / "s", {"s": StateDict(x=value)}, options=THREAD)
    assert fake.pinned == {}
    target = fake.put(torch.zeros_like(value))
    Snapshot(tmp_path / "s").restore({"s": StateDict(x=target)})
    assert torch.equal(target, value)
    assert sum(fake.pinned.values()) >= value.nbytes
    assert fake.counts.slabs == [], "large ones go straight into the tensor"


@pytest.mark.parametrize("options", [THREAD, PROCESS], ids=["thread", "process"])
def test_many_chunks_through_little_memory(
    fake: FakeDevices, tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads copy several chunks at once, but hold none while they wait for memory."""
    sizes: list[list[int]] = []

    def note(gatherings: Sequence[Gathering]) -> None:
        sizes.append([len(each.out) for each in gatherings])
        gather(gatherings)

    monkeypatch.setattr(staging, "gather", note)
    budget_bytes = Host.get().resources.budget.limit_bytes
    few = msgspec.structs.replace(options, chunk_bytes=2 * MIB, memory_budget_bytes=5 * MIB)
    state = {f"t{i}": fake.put(numbers(MIB // 2 + i)) for i in range(20)}
    try:
        found = save(tmp_path / "few", dict(state), few)
    finally:
        Host.get().resources.set_budget(budget_bytes)
    for i in range(20):
        assert torch.equal(found[f"t{i}"], numbers(MIB // 2 + i))
    assert max(map(sum, sizes)) <= 5 * MIB
    sizes.clear()
    state = {f"t{i}": fake.put(numbers(MIB // 2 + i)) for i in range(20)}
    save(tmp_path / "much", dict(state), msgspec.structs.replace(few, memory_budget_bytes=None))
    assert [len(each) >= 20 for each in sizes] == [True]


@pytest.mark.parametrize("options", [THREAD, PROCESS], ids=["thread", "process"])
def test_threads_copy_several_chunks_of_host_memory_at_once(
    tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But each thread has several turns, so that all of them end together."""
    turns: list[int] = []

    def note(gatherings: Sequence[Gathering]) -> None:
        turns.append(len(gatherings))
        gather(gatherings)

    monkeypatch.setattr(staging, "gather", note)
    num_chunks = 8 * Host.get().num_workers
    state = {f"t{i}": numbers(MIB // 2) + i for i in range(num_chunks)}
    found = save(tmp_path / "s", dict(state), msgspec.structs.replace(options, chunk_bytes=2 * MIB))
    assert all(torch.equal(found[f"t{i}"], numbers(MIB // 2) + i) for i in range(num_chunks))
    assert sum(turns) >= num_chunks
    assert num_chunks / 4 <= len(turns) <= num_chunks / 2 + 1


@pytest.mark.parametrize("options", [THREAD, PROCESS], ids=["thread", "process"])
def test_lazy_staging(fake: FakeDevices, tmp_path: Path, options: Options) -> None:
    """Of parameters that a kernel has yet to write; and statistics that the next one writes."""
    fake.refuses_to_pin = True  # what is copied in the call goes to memory that is not pinned
    model = torch.nn.Sequential(torch.nn.Linear(1000, 600), torch.nn.BatchNorm1d(600))
    for parameter in model.parameters():
        parameter.data = fake.put(torch.zeros_like(parameter))
        fake.launch(partial(parameter.data.fill_, 7.0))
        parameter.grad = torch.ones_like(parameter)
    mean = model[1].running_mean = fake.put(torch.zeros(600))
    fake.launch(lambda: mean.fill_(8.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    pending = Snapshot.async_take(str(tmp_path / "s"), {"m": model}, stage="lazy", options=options)
    fake.launch(lambda: mean.fill_(9.0))
    with pending.guard(optimizer):
        optimizer.step()
        pending.wait()
    found = Snapshot(str(tmp_path / "s")).get_state_dict_for_key("m")
    for name, value in found.items():
        if name != "1.num_batches_tracked" and name != "1.running_var":
            assert value.unique().tolist() == [8.0 if name == "1.running_mean" else 7.0], name
