"""Copies tensors from CUDA devices to the host (``docs/decisions/0013-staging-copies.md``).

- *Order.* ``Lanes.mark`` records events on the caller's streams. Copies run on one other stream per
  device, which waits for them. Only worker threads wait for a device.
- *Device memory.* Tensors stay alive until their copies end; ``record_stream`` would delay reuse
  for longer. Slabs belong to the copy stream and are reused in its order.
- *Few copies.* Large contiguous tensors are copied directly; others are packed into a slab.
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

__all__ = ["CopyStream", "Cuda", "DeviceCalls", "Event", "Lane", "Lanes"]

_SLAB_BYTES: Final = 4 << 20
"""Maximum size of a slab, in bytes. Copies of this size saturate the bus."""

_DIRECT_BYTES: Final = 1 << 20
"""Minimum size of a tensor that is not packed, in bytes."""


class Event(Protocol):
    def wait(self) -> None:
        """Blocks until the device reaches this point. Releases the GIL.

        Raises ``RuntimeError`` if earlier work of the stream failed.
        """
        ...


class CopyStream(Protocol):
    """Work on a device, in order, after the calls return. The caller keeps tensors alive."""

    def wait_for(self, event: Event) -> None:
        """Makes later work wait for ``event``, of any stream."""
        ...

    def empty(self, nbytes: int) -> torch.Tensor:
        """Returns ``uint8`` memory for later work; may be dropped after the last call with it.

        Raises ``torch.OutOfMemoryError``.
        """
        ...

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> None:
        """Copies elements. One side may be host memory if both are contiguous bytes."""
        ...

    def pack(self, out: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        """Concatenates flat tensors of bytes on the device."""
        ...

    def mark(self) -> Event: ...


class DeviceCalls(Protocol):
    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on a device of this kind."""
        ...

    def mark(self, device: torch.device) -> Event:
        """Returns the current end of the caller's stream."""
        ...

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy on the same device, made on the caller's stream.

        Raises ``torch.OutOfMemoryError``.
        """
        ...

    def stream(self, device: torch.device) -> CopyStream:
        """Returns the device's one stream for copies."""
        ...

    def current(self, device: torch.device) -> Callable[[], AbstractContextManager[None]]:
        """Returns a factory of contexts that select the caller's stream in any thread."""
        ...

    def pinner(self, device: torch.device) -> Pinner:
        """Returns a pinner for all devices, which calls this one."""
        ...

    def own_pinner(self) -> Pinner | None:
        """Returns the pinner of the caller's device; None if none is in use."""
        ...


class Lanes:
    """One per device, for one call."""

    def __init__(self, calls: DeviceCalls) -> None:
        self._calls = calls
        self._lanes: dict[torch.device, Lane] = {}

    def of(self, tensor: torch.Tensor) -> Lane | None:
        """Returns None for another kind of device."""
        if not self._calls.has(tensor):
            return None
        lane = self._lanes.get(tensor.device)
        if lane is None:
            lane = self._lanes[tensor.device] = Lane(self._calls, tensor.device)
        return lane

    def mark(self) -> None:
        """Makes copies wait for the work that the calling thread has queued."""
        for lane in self._lanes.values():
            lane.mark()


class Lane:
    """Copies from one device. Implements ``DeviceCopier``."""

    def __init__(self, calls: DeviceCalls, device: torch.device) -> None:
        self._calls = calls
        self._device = device
        self._ready: Event | None = None

    @property
    def pinner(self) -> Pinner:
        return self._calls.pinner(self._device)

    def mark(self) -> None:
        self._ready = self._calls.mark(self._device)

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """See ``DeviceCalls``. ``mark`` must follow."""
        return self._calls.twin(tensor)

    def begin(self, out: memoryview, cuts: Sequence[Cut]) -> Callable[[], None]:
        """Sources of ``cuts`` are ``tensors.DeviceSource``."""
        assert self._ready is not None
        host = torch.frombuffer(out, dtype=torch.uint8)
        stream = self._calls.stream(self._device)
        try:
            stream.wait_for(self._ready)
            for run in _runs(cuts):
                _bring(stream, host, run)
            return stream.mark().wait
        except BaseException:
            # Unfinished copies still write to memory that is about to be reused.
            with contextlib.suppress(Exception):
                stream.mark().wait()
            raise


def _runs(cuts: Iterable[Cut]) -> Iterator[list[Cut]]:
    """Yields cuts to copy at once: a large one, or neighbours that fit a slab."""
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
    first, last = run[0], run[-1]
    flat = _flat(first)
    if len(run) == 1 and flat is not None:
        stream.copy(host[first.at : first.at + first.nbytes], flat)
        return
    try:
        slab = stream.empty(last.at + last.nbytes - first.at)
    except torch.OutOfMemoryError:
        # The device is full: copy tensor by tensor.
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


class Cuda:
    """Without CUDA in torch, only ``has`` is called."""

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


# CUDA allocates memory on the thread's current device. In worker threads that is the first one,
# which another process may own. So each call sets its own device.


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
                # Else CUDA would report the error with this thread's next kernel.
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device=self._device)
                raise OSError(f"cudaHostRegister of {nbytes} bytes failed with error {error}")

    def unpin(self, address: int) -> None:
        # CUDA may be gone when the interpreter exits.
        with contextlib.suppress(RuntimeError), torch.cuda.device(self._device):
            torch.cuda.cudart().cudaHostUnregister(address)


_PORTABLE: Final = 1
"""``cudaHostRegisterPortable``: for all devices."""


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        # Blocking: the waiting thread does not spin.
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
"""Tests replace it."""
