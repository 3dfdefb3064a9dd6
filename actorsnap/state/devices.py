# SPDX-License-Identifier: Apache-2.0
"""All calls to devices; copies between CUDA and host (``docs/decisions/0013-staging-copies.md``).

Another kind of device needs a class like ``Cuda`` here, a choice between them in place of
``calls``, and states of random generators.

- *Order.* ``Lane.mark`` records events on the caller's streams. Copies run on one other stream per
  device, which waits for them. Restores copy within the caller's stream. Only worker threads wait
  for a device.
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
from itertools import groupby
from typing import Any, Final

import torch

from actorsnap.log import Log
from actorsnap.state.sources import Cut, Pinner, writable

_log = Log(__name__)

_SLAB_BYTES: Final = 4 << 20
"""Maximum size of a slab, in bytes. Copies of this size saturate the bus."""

_DIRECT_BYTES: Final = 1 << 20
"""Minimum size of a tensor that is not packed, in bytes."""


class Lane:
    """Copies from one device, for one call: from sources whose ``copier`` it is."""

    def __init__(self, calls: Cuda, device: torch.device) -> None:
        self._calls = calls
        self._device = device
        self._ready: CudaEvent | None = None

    @property
    def pinner(self) -> Pinner:
        """Pins the memory that is copied into."""
        return self._calls.pinner(self._device)

    def mark(self) -> None:
        """Makes copies wait for the work that the calling thread has queued."""
        self._ready = self._calls.mark(self._device)

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """See ``Cuda``. ``mark`` must follow."""
        return self._calls.twin(tensor)

    def begin(self, out: memoryview, cuts: Sequence[Cut]) -> Callable[[], None]:
        """Begins copies; returns a function that waits for their end. Call it once.

        Args:
            out: Must live until then, as must the sources.
            cuts: Of ``tensors.DeviceSource``, ascending by ``at``.

        Raises:
            Exception: An error of the device, here or later. All copies have ended then.
        """
        assert self._ready is not None
        host = torch.frombuffer(out, dtype=torch.uint8)
        stream = self._calls.stream(self._device)
        with stream.entered():
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


class ReturnLane:
    """Copies to one device, in the stream that was the caller's when this was made."""

    def __init__(self, calls: Cuda, device: torch.device) -> None:
        self._calls = calls
        self._device = device
        self._entered = calls.current(device)
        self.pinner: Pinner = calls.pinner(device)

    def copy(self, memory: memoryview, cuts: Sequence[Cut]) -> None:
        """Copies from ``memory``; blocks until that ends. For worker threads.

        Args:
            cuts: Of ``tensors.DeviceSink``, ascending by ``at``.
        """
        host = torch.frombuffer(writable(memory), dtype=torch.uint8)
        with self._entered():
            slabs = [self._send(host, run) for run in _runs(cuts)]
            mark = self._calls.mark(self._device)
        mark.wait()
        del slabs  # until now, work in the stream may use them

    def _send(self, host: torch.Tensor, run: Sequence[Cut]) -> torch.Tensor | None:
        first, last = run[0], run[-1]
        part = host[first.at : last.at + last.nbytes]
        if len(run) > 1:
            with contextlib.suppress(torch.OutOfMemoryError):  # then one by one
                slab = self._calls.slab(part, self._device)
                pieces = slab.split([cut.nbytes for cut in run])
                torch._foreach_copy_([_flat(cut) for cut in run], list(pieces))
                return slab
        for cut in run:
            _flat(cut).copy_(host[cut.at : cut.at + cut.nbytes], non_blocking=True)
        return None


def _runs(cuts: Iterable[Cut]) -> Iterator[list[Cut]]:
    """Yields cuts to copy at once: a large one, or neighbours that fit a slab."""
    run: list[Cut] = []
    end = 0
    for cut in _fitting(cuts):
        is_flat = cut.source.is_flat
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
    return cut.nbytes >= _DIRECT_BYTES and cut.source.is_flat


def _bring(stream: CudaStream, host: torch.Tensor, run: Sequence[Cut]) -> None:
    first, last = run[0], run[-1]
    are_flat = all([cut.source.is_flat for cut in run])
    slab = None
    if len(run) > 1 or not are_flat:
        try:
            slab = stream.empty(last.at + last.nbytes - first.at)
        except torch.OutOfMemoryError:
            if not are_flat:
                raise
    if slab is None:  # one tensor, or the device is full
        for cut in run:
            stream.copy(host[cut.at : cut.at + cut.nbytes], _flat(cut))
        return
    for is_flat, group in groupby(run, lambda cut: cut.source.is_flat):
        cuts = list(group)
        if is_flat:
            start, stop = cuts[0].at - first.at, cuts[-1].at + cuts[-1].nbytes - first.at
            stream.pack(slab[start:stop], [_flat(cut) for cut in cuts])
            continue
        for cut in cuts:
            at = cut.at - first.at
            for part, elements in cut.source.pairs(cut.start, slab[at : at + cut.nbytes]):
                stream.copy(elements, part)
    stream.copy(host[first.at : last.at + last.nbytes], slab)


def _flat(cut: Cut) -> torch.Tensor:
    flat: torch.Tensor = cut.source.flat
    return flat if cut.nbytes == len(flat) else flat[cut.start : cut.start + cut.nbytes]


class Cuda:
    """Without CUDA in torch, only ``has`` and ``own_pinner`` are called."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[torch.device, CudaStream] = {}

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on a device of this kind."""
        return tensor.is_cuda

    def mark(self, device: torch.device) -> CudaEvent:
        """Returns the current end of the caller's stream."""
        return CudaEvent(torch.cuda.current_stream(device))

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy on the same device, made on the caller's stream.

        Raises ``torch.OutOfMemoryError``.
        """
        return tensor.detach().clone()

    def slab(self, memory: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns a copy on a device, made on the caller's stream; ``memory`` must live until then.

        Raises ``torch.OutOfMemoryError``.
        """
        return memory.to(device, non_blocking=True)

    def stream(self, device: torch.device) -> CudaStream:
        """Returns the device's one stream for copies."""
        with self._lock:
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = CudaStream(device)
            return stream

    def current(self, device: torch.device) -> Callable[[], AbstractContextManager[None]]:
        """Returns a factory of contexts that select the caller's stream in any thread."""
        return partial(_entered, torch.cuda.current_stream(device))

    def pinner(self, device: torch.device) -> Pinner:
        """Returns a pinner for all devices, which calls this one."""
        return _CudaPinner(device)

    def own_pinner(self) -> Pinner | None:
        """Returns the pinner of the caller's device; None if none is in use."""
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


class CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        # Blocking: the waiting thread does not spin.
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)

    def wait(self) -> None:
        """Blocks until the device reaches this point. Releases the GIL.

        Raises ``RuntimeError`` if earlier work of the stream failed.
        """
        with torch.cuda.device(self._device):
            self.event.synchronize()


class CudaStream:
    """Work on a device, in order, after the calls return. The caller keeps tensors alive.

    Other calls are made within ``entered``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def entered(self) -> AbstractContextManager[None]:
        """Makes the device and this stream the thread's current ones."""
        return _entered(self._stream)

    def wait_for(self, event: CudaEvent) -> None:
        """Makes later work wait for ``event``, of any stream."""
        self._stream.wait_event(event.event)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Returns ``uint8`` memory for later work; may be dropped after the last call with it.

        Raises ``torch.OutOfMemoryError``.
        """
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> None:
        """Copies elements. One side may be host memory if both are contiguous bytes."""
        out.copy_(source, non_blocking=True)

    def pack(self, out: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        """Concatenates flat tensors of bytes on the device."""
        torch.cat(list(sources), out=out)

    def mark(self) -> CudaEvent:
        return CudaEvent(self._stream)


calls = Cuda()
"""Tests replace it."""


def synchronize(device: torch.device) -> None:
    """Waits for the caller's stream, of a device of another kind."""
    torch.accelerator.current_stream(device).synchronize()


def generator_states() -> dict[str, list[torch.Tensor]]:
    """Returns the states of random generators, by names in ``GENERATORS``."""
    return {"cuda": torch.cuda.get_rng_state_all()} if torch.cuda.is_initialized() else {}


def _set_cuda_generators(states: list[torch.Tensor]) -> None:
    num_devices = torch.cuda.device_count()
    if len(states) > num_devices:
        _log.warning(
            "the snapshot has random states of %d CUDA devices, this process has %d; "
            "the rest is not restored",
            len(states),
            num_devices,
        )
    for device, state in enumerate(states[:num_devices]):
        torch.cuda.set_rng_state(state.cpu(), device)


GENERATORS: Final[dict[str, Callable[[Any], None]]] = {"cuda": _set_cuda_generators}
"""Functions that set states, by name in a snapshot."""


def fork_generators(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """Keeps the states of the CPU's generator and of those of the tensors' devices."""
    used = {tensor.device for tensor in tensors}
    return torch.random.fork_rng([device for device in used if device.type == "cuda"])
