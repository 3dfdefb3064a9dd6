# SPDX-License-Identifier: Apache-2.0
"""A device on the CPU, as unkind as an asynchronous one can be.

Work on its streams is done as late as it may be: when somebody waits for an event behind it. It
knows addresses only, as a device does: memory of a tensor that nobody holds any more is
overwritten, as an allocator that lends it again would have it. So a wait that is forgotten, or a
tensor that is dropped too early, shows in the bytes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import pytest
import torch

from actorsnap.format.geometry import extent_bytes
from actorsnap.runtime.host import shutdown
from actorsnap.state import devices
from actorsnap.state.sources import memory_at

__all__ = ["Counts", "FakeDevices", "FakeStream", "fake_devices"]

_is_cpu = torch.Tensor.is_cpu
_device = torch.Tensor.device


class _Token:
    """Lives as long as some tensor refers to the memory."""


@dataclass
class Counts:
    """What was asked of all streams for copies."""

    bus: list[int] = field(default_factory=list)
    """Bytes of each copy to the host."""

    packed: list[int] = field(default_factory=list)
    """Number of tensors of each call."""

    strided: int = 0
    """Copies within the device, of what does not lie in order."""

    slabs: list[int] = field(default_factory=list)
    """Bytes of each copy from the host to a slab."""


class FakeEvent:
    def __init__(self, stream: FakeStream) -> None:
        self.stream = stream
        self.position = len(stream.work)

    def wait(self) -> None:
        self.stream.run(self.position)


class FakeStream:
    def __init__(self, devices: FakeDevices, device: torch.device) -> None:
        self.devices = devices
        self.device = device
        self.work: list[Callable[[], object]] = []
        self.done = 0
        self._slabs: list[torch.Tensor] = []

    def run(self, until: int) -> None:
        with self.devices.lock:
            while self.done < until:
                work = self.work[self.done]
                self.done += 1
                work()

    def launch(self, work: Callable[[], object]) -> None:
        """As a kernel: done some time later."""
        with self.devices.lock:
            self.work.append(work)

    def entered(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def drained(self) -> Iterator[None]:
        """Copies within it wait for the device, as those that block do."""
        self.run(len(self.work))
        yield

    def wait_for(self, event: object) -> None:
        assert isinstance(event, FakeEvent)
        self.launch(event.wait)

    def empty(self, nbytes: int) -> torch.Tensor:
        with self.devices.lock:
            if self.devices.is_full:
                raise torch.OutOfMemoryError("the device is full")
            # Reused in the order of the stream, which this does not need to show.
            self._slabs.append(torch.full((nbytes,), 0xAB, dtype=torch.uint8))
            return self._slabs[-1]

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> None:
        self.devices.maybe_fail("copy")
        if self.devices.is_there(out):
            self.devices.counts.strided += 1
        else:
            self.devices.check_bus(out, source)
        to, from_ = _by_address(out), _by_address(source)
        self.launch(lambda: to.copy_(from_))

    def pack(self, out: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        self.devices.maybe_fail("pack")
        assert out.nbytes == sum(source.nbytes for source in sources)
        self.devices.counts.packed.append(len(sources))
        to, parts = _by_address(out), [_by_address(source) for source in sources]
        self.launch(lambda: torch.cat(parts, out=to))

    def mark(self) -> FakeEvent:
        self.devices.maybe_fail("mark")
        return FakeEvent(self)


class FakePinner:
    def __init__(self, devices: FakeDevices) -> None:
        self._devices = devices

    def pin(self, address: int, nbytes: int) -> None:
        if self._devices.refuses_to_pin:
            raise OSError("not today")
        with self._devices.lock:
            for start, size in self._devices.pinned.items():
                assert address >= start + size or address + nbytes <= start, "pinned twice"
            self._devices.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        with self._devices.lock:
            del self._devices.pinned[address]


class FakeDevices:
    """Stands in for ``devices.Cuda``; makes the tensors that lie there.

    Attributes:
        is_full: No slab can be had.
        fails_at: Kind and number of the call that fails, counted from 1.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.counts = Counts()
        self.pinned: dict[int, int] = {}
        self.refuses_to_pin = False
        self.is_full = False
        self.fails_at: tuple[str, int] | None = None
        self._callers: dict[torch.device, FakeStream] = {}
        self._num_calls: dict[str, int] = {}
        self._copying: dict[torch.device, FakeStream] = {}
        self._memory: list[torch.Tensor] = []
        self._places: dict[int, torch.device] = {}

    # What the copies ask for

    def has(self, tensor: torch.Tensor) -> bool:
        return self.device_of(tensor) is not None

    def mark(self, device: torch.device) -> FakeEvent:
        return FakeEvent(self.current_stream(device))

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.is_full:
            raise torch.OutOfMemoryError("the device is full")
        made = self.put(torch.zeros_like(tensor, device="cpu"), tensor.device.index)
        to, from_ = _by_address(made), _by_address(tensor)
        self.launch(lambda: to.copy_(from_), tensor.device.index)
        return made

    def slab(self, memory: torch.Tensor, device: torch.device) -> torch.Tensor:
        if self.is_full:
            raise torch.OutOfMemoryError("the device is full")
        self.counts.slabs.append(memory.nbytes)
        return memory.clone()

    def stream(self, device: torch.device) -> FakeStream:
        with self.lock:
            return self._copying.setdefault(device, FakeStream(self, device))

    def current(self, device: torch.device) -> Callable[[], AbstractContextManager[None]]:
        return self.current_stream(device).drained

    def pinner(self, device: torch.device) -> FakePinner:
        return FakePinner(self)

    def own_pinner(self) -> FakePinner:
        return FakePinner(self)

    # What tests do

    def current_stream(self, device: torch.device) -> FakeStream:
        return self._callers.setdefault(device, FakeStream(self, device))

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        if tensor.layout is not torch.strided:
            return None
        return self._places.get(tensor.untyped_storage().data_ptr())

    def put(self, value: torch.Tensor, index: int = 0) -> torch.Tensor:
        """Returns a tensor on a device, with the values and strides of ``value``."""
        nbytes = extent_bytes(value.shape, value.stride(), value.itemsize)
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        self._memory.append(memory)
        address, token = memory.data_ptr(), _Token()
        # To be seen in floats, too.
        weakref.finalize(token, memory.fill_, 0x55)
        raw = torch.frombuffer(memory_at(address, nbytes, token), dtype=torch.uint8)
        self._places[raw.untyped_storage().data_ptr()] = torch.device("cuda", index)
        there = raw.view(value.dtype).as_strided(value.shape, value.stride())
        there.copy_(value)
        return there

    def launch(self, work: Callable[[], object], index: int = 0) -> None:
        """A kernel on the caller's current stream."""
        self.current_stream(torch.device("cuda", index)).launch(work)

    def synchronize(self) -> None:
        """Does all there is to do."""
        for stream in (*self._callers.values(), *self._copying.values()):
            stream.run(len(stream.work))

    # What streams ask

    def is_there(self, tensor: torch.Tensor) -> bool:
        """Whether it lies on a device."""
        slabs = [slab for stream in self._copying.values() for slab in stream._slabs]
        return self.has(tensor) or any(_lies_in(tensor, slab) for slab in slabs)

    def check_bus(self, out: torch.Tensor, source: torch.Tensor) -> None:
        assert out.dtype is source.dtype is torch.uint8
        assert out.is_contiguous()
        assert source.is_contiguous()
        start = out.data_ptr()
        if not self.refuses_to_pin:
            assert any(
                low <= start and start + out.nbytes <= low + size
                for low, size in self.pinned.items()
            )
        self.counts.bus.append(out.nbytes)

    def maybe_fail(self, kind: str) -> None:
        with self.lock:
            number = self._num_calls[kind] = self._num_calls.get(kind, 0) + 1
            if self.fails_at == (kind, number):
                raise RuntimeError("CUDA error: an illegal memory access was encountered")


def _lies_in(tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def _by_address(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements; does not keep them."""
    if tensor.is_conj():
        return _by_address(tensor.conj()).conj()
    if tensor.is_neg():
        return torch._neg_view(_by_address(torch._neg_view(tensor)))
    nbytes = extent_bytes(tensor.shape, tensor.stride(), tensor.itemsize)
    raw = torch.frombuffer(memory_at(tensor.data_ptr(), nbytes, None), dtype=torch.uint8)
    return raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


@contextmanager
def fake_devices() -> Iterator[FakeDevices]:
    """Puts them in the place of CUDA. All that is pinned is unpinned at the end."""
    fake = FakeDevices()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "calls", fake)
        patch.setattr(
            torch.Tensor,
            "is_cpu",
            property(lambda tensor: not fake.has(tensor)),
            raising=False,
        )
        patch.setattr(
            torch.Tensor,
            "device",
            property(lambda tensor: fake.device_of(tensor) or _device.__get__(tensor)),
            raising=False,
        )
        try:
            yield fake
        finally:
            shutdown()
    assert fake.pinned == {}
