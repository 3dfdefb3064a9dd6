"""Copies out of the memory of CUDA devices: on which stream, behind what, how many at once.

Copies into it, which a restore makes, need no more than the caller's own stream (``current``).

What CUDA has to do is asked for through ``DeviceCalls``, a handful of calls; the rest is written
once, and CI runs it on a device that is simulated (``tests/state/fake_device.py``).

- *Order.* A call marks where the caller's current streams are when it is made (``Lanes.mark``).
  Copies run on one stream of our own per device, which waits for those marks. No thread of the
  caller's waits for a device; a worker thread does, until the last of its copies has ended.
- *Memory of the device.* Whoever copies holds the tensors until that, so that the allocator cannot
  give their memory away: no ``record_stream``, which would keep it from reuse for longer. What is
  allocated here belongs to our stream, and is reused in the order of the stream.
- *Few copies.* Large contiguous tensors go straight to the host. Others are first packed into a
  slab on the device, and cross the bus as one.

See ``docs/decisions/0013-staging-copies.md``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Final, Protocol

import torch

from actorsnap.state.sources import Cut, Pinner

__all__ = ["CopyStream", "Cuda", "DeviceCalls", "Event", "Lane", "Lanes", "Reached"]

_SLAB_BYTES: Final = 4 << 20
"""So much device memory a worker thread packs into: the bus is at its speed with less."""

_DIRECT_BYTES: Final = 1 << 20
"""From here on a tensor is copied by itself: packing would read and write it once more."""


class Event(Protocol):
    """A point in the order of a stream."""

    def wait(self) -> None:
        """Blocks the thread, without the GIL, until the device is there.

        Raises:
            RuntimeError: work before it has failed.
        """
        ...


class CopyStream(Protocol):
    """Work on a device, done in the order of these calls. They return before it is done.

    Tensors are live memory until then; nothing here holds them.
    """

    def wait_for(self, event: Event) -> None:
        """What follows begins behind ``event``, which may be another stream's."""
        ...

    def empty(self, nbytes: int) -> torch.Tensor:
        """Memory for what follows, ``uint8``. It may be dropped at once after the last call.

        Raises:
            torch.OutOfMemoryError: the device has no more.
        """
        ...

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> None:
        """Copies elements; one of both may lie in host memory if both are contiguous bytes."""
        ...

    def pack(self, out: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        """Copies flat tensors of bytes on the device into one, back to back."""
        ...

    def mark(self) -> Event:
        """Where the stream is now."""
        ...


class DeviceCalls(Protocol):
    """All that is asked of CUDA."""

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in memory of such a device."""
        ...

    def mark(self, device: torch.device) -> Event:
        """Where the calling thread's current stream is now."""
        ...

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the same device, in the order of the calling thread's current stream.

        Raises:
            torch.OutOfMemoryError: the device has no more.
        """
        ...

    def stream(self, device: torch.device) -> CopyStream:
        """The one for copies; always the same one."""
        ...

    def current(self, device: torch.device) -> Callable[[], AbstractContextManager[None]]:
        """Within what this makes, work of any thread goes to the stream that is the calling
        thread's current one now."""
        ...

    def pinner(self, device: torch.device) -> Pinner:
        """Pins memory for all devices, in the name of this one."""
        ...

    def own_pinner(self) -> Pinner | None:
        """The one of the calling thread's current device, if this process uses any."""
        ...


class Reached(Protocol):
    """The tensor of a cut.

    Attributes:
        itemsize: What begin and end of each of its cuts are multiples of.
        flat: Its bytes, or None where they do not lie in order.
    """

    @property
    def itemsize(self) -> int: ...
    @property
    def flat(self) -> torch.Tensor | None: ...
    def pairs(self, start: int, flat: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Returns views of the tensor, and the parts of ``flat``, its bytes from ``start`` on,
        that hold their elements."""
        ...


class Lanes:
    """The devices that a call meets, each with what its copies wait for."""

    def __init__(self, calls: DeviceCalls) -> None:
        self._calls = calls
        self._lanes: dict[torch.device, Lane] = {}

    def of(self, tensor: torch.Tensor) -> Lane | None:
        """The lane of the device that a tensor lies on, if that is such a device."""
        if not self._calls.has(tensor):
            return None
        lane = self._lanes.get(tensor.device)
        if lane is None:
            lane = self._lanes[tensor.device] = Lane(self._calls, tensor.device)
        return lane

    def mark(self) -> None:
        """Copies wait for what the calling thread has begun by now. Called before any begins."""
        for lane in self._lanes.values():
            lane.mark()


class Lane:
    """The copies of one call out of one device. A ``DeviceCopier``."""

    def __init__(self, calls: DeviceCalls, device: torch.device) -> None:
        self._calls = calls
        self._device = device
        self._ready: Event | None = None

    @property
    def pinner(self) -> Pinner:
        return self._calls.pinner(self._device)

    def mark(self) -> None:
        """See ``Lanes.mark``."""
        self._ready = self._calls.mark(self._device)

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device, which ``mark`` has to follow; see ``DeviceCalls``."""
        return self._calls.twin(tensor)

    def begin(self, out: memoryview, cuts: Sequence[Cut]) -> Callable[[], None]:
        """See ``DeviceCopier``. What cuts have as sources is ``Reached``."""
        assert self._ready is not None
        host = torch.frombuffer(out, dtype=torch.uint8)
        stream = self._calls.stream(self._device)
        try:
            stream.wait_for(self._ready)
            for run in _runs(cuts):
                _bring(stream, host, run)
            return stream.mark().wait
        except BaseException:
            # What was begun still uses memory that will be lent to others. A device that fails
            # here, too, does nothing any more.
            with contextlib.suppress(Exception):
                stream.mark().wait()
            raise


def _runs(cuts: Iterable[Cut]) -> Iterator[list[Cut]]:
    """Neighbours in host memory that cross the bus as one: a large cut, or what fits a slab."""
    run: list[Cut] = []
    end = 0
    for cut in _fitting(cuts):
        is_flat = cut.source.flat is not None
        first = run[0].at if run else cut.at
        if run and (
            cut.at != end
            or _is_direct(run[0])
            or _is_direct(cut)
            or cut.at + cut.nbytes - first > _SLAB_BYTES
            or not (is_flat or (cut.at - first) % cut.source.itemsize == 0)
        ):
            yield run
            run = []
        run.append(cut)
        end = cut.at + cut.nbytes
    if run:
        yield run


def _fitting(cuts: Iterable[Cut]) -> Iterator[Cut]:
    """Cuts what has to be packed, so that it fits a slab."""
    for cut in cuts:
        if cut.nbytes <= _SLAB_BYTES or _is_direct(cut):
            yield cut
            continue
        for skip in range(0, cut.nbytes, _SLAB_BYTES):
            nbytes = min(_SLAB_BYTES, cut.nbytes - skip)
            yield Cut(cut.source, cut.start + skip, cut.at + skip, nbytes)


def _is_direct(cut: Cut) -> bool:
    return cut.nbytes >= _DIRECT_BYTES and cut.source.flat is not None


def _bring(stream: CopyStream, host: torch.Tensor, run: Sequence[Cut]) -> None:
    """Copies a run to its place in host memory."""
    first, last = run[0], run[-1]
    flat = _flat(first)
    if len(run) == 1 and flat is not None:
        stream.copy(host[first.at : first.at + first.nbytes], flat)
        return
    try:
        slab = stream.empty(last.at + last.nbytes - first.at)
    except torch.OutOfMemoryError:
        # The model fills the device: slower, tensor by tensor.
        flats = [(cut, _flat(cut)) for cut in run]
        if any([flat is None for _, flat in flats]):
            raise
        for cut, flat in flats:
            assert flat is not None
            stream.copy(host[cut.at : cut.at + cut.nbytes], flat)
        return
    flats_of_slab: list[torch.Tensor] = []
    begun = 0

    def pack(until: int) -> None:
        nonlocal begun
        if flats_of_slab:
            stream.pack(slab[begun:until], flats_of_slab)
            flats_of_slab.clear()
        begun = until

    for cut in run:
        at = cut.at - first.at
        flat = _flat(cut)
        if flat is not None:
            flats_of_slab.append(flat)
            continue
        pack(at)
        for part, elements in cut.source.pairs(cut.start, slab[at : at + cut.nbytes]):
            stream.copy(elements, part)
        begun = at + cut.nbytes
    pack(slab.numel())
    stream.copy(host[first.at : last.at + last.nbytes], slab)


def _flat(cut: Cut) -> torch.Tensor | None:
    flat: torch.Tensor | None = cut.source.flat
    return None if flat is None else flat[cut.start : cut.start + cut.nbytes]


# CUDA ---------------------------------------------------------------------------------------


class Cuda:
    """The real one. Where torch has no CUDA nothing here is called but ``has``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[torch.device, _CudaStream] = {}

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def mark(self, device: torch.device) -> Event:
        return _CudaEvent(torch.cuda.current_stream(device))

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def stream(self, device: torch.device) -> CopyStream:
        with self._lock:
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = _CudaStream(device)
            return stream

    def current(self, device: torch.device) -> Callable[[], AbstractContextManager[None]]:
        return partial(_entered, torch.cuda.current_stream(device))

    def pinner(self, device: torch.device) -> Pinner:
        return _CudaPinner(device)

    def own_pinner(self) -> Pinner | None:
        if not torch.cuda.is_initialized():
            return None
        return _CudaPinner(torch.device("cuda", torch.cuda.current_device()))


# A call of CUDA takes memory on the thread's current device, which is the first one in worker
# threads and may be another process': so each of these makes its own device the current one.


@contextlib.contextmanager
def _entered(stream: torch.cuda.Stream) -> Iterator[None]:
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


class _CudaPinner:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pin(self, address: int, nbytes: int) -> None:
        with torch.cuda.device(self._device):
            error = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))
            if error:
                # CUDA keeps the error, for the next kernel of this thread to report.
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device=self._device)
                raise OSError(f"cudaHostRegister of {nbytes} bytes failed with error {error}")

    def unpin(self, address: int) -> None:
        # At the interpreter's exit there may be no CUDA any more, and nothing to be done.
        with contextlib.suppress(RuntimeError), torch.cuda.device(self._device):
            torch.cuda.cudart().cudaHostUnregister(address)


_PORTABLE: Final = 1
"""``cudaHostRegisterPortable``: pinned for all devices."""


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        # Blocking: who waits leaves the core to others.
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)

    def wait(self) -> None:
        with torch.cuda.device(self._device):
            self.event.synchronize()


class _CudaStream:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        with torch.cuda.device(self._device):
            self._stream.wait_event(event.event)

    def empty(self, nbytes: int) -> torch.Tensor:
        # Of the memory that the allocator keeps for this stream.
        with _entered(self._stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> None:
        with _entered(self._stream):
            out.copy_(source, non_blocking=True)

    def pack(self, out: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        with _entered(self._stream):
            torch.cat(list(sources), out=out)

    def mark(self) -> Event:
        return _CudaEvent(self._stream)


calls: DeviceCalls = Cuda()
"""Whom all copies ask. Tests put another one here."""
