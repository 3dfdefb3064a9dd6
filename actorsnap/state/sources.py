"""Bytes in CPU memory, where they come from and go to: what saving and storing see of tensors.

The uploader process loads this, and no torch: nothing here may import it.

``gather`` is how staging copies. A piece costs it one call that releases the GIL, and no view or
tensor: ``docs/decisions/0013-staging-copies.md``.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Final, Protocol

import msgspec
import numpy as np

from actorsnap.planning.packing import Piece

__all__ = [
    "ByteSink",
    "ByteSource",
    "Cut",
    "DeviceCopier",
    "MemorySink",
    "MemorySource",
    "PartSource",
    "Pinner",
    "copy_bytes",
    "gather",
    "memory_at",
]


class ByteSource(Protocol):
    """The C-order bytes of a leaf that is stored. Keeps the leaf's memory alive.

    Attributes:
        nbytes: Their number.
        is_addressable: Whether they lie contiguous in CPU memory, so that ``view`` works.
    """

    @property
    def nbytes(self) -> int: ...
    @property
    def is_addressable(self) -> bool: ...
    def view(self, start: int, stop: int) -> memoryview:
        """Returns bytes ``[start, stop)`` in place, as unsigned bytes. Only if addressable."""
        ...

    def copy_into(self, start: int, out: memoryview) -> None:
        """Copies bytes ``[start, start + len(out))`` into ``out``.

        Blocks; for worker threads. Large copies release the GIL. Unless the source is
        addressable, both ends are multiples of the item size.
        """
        ...


class ByteSink(Protocol):
    """Where the C-order bytes of a leaf are restored into. Keeps its memory alive.

    Attributes:
        nbytes: Their number.
        is_addressable: Whether they lie contiguous in writable CPU memory.
    """

    @property
    def nbytes(self) -> int: ...
    @property
    def is_addressable(self) -> bool: ...
    def view(self, start: int, stop: int) -> memoryview:
        """Returns bytes ``[start, stop)`` in place, writable. Only if addressable."""
        ...

    def copy_from(self, start: int, data: memoryview) -> None:
        """Copies ``data`` to bytes ``[start, start + len(data))``. As ``copy_into``."""
        ...


# One ctypes array type per power of two: a type per size would take long to make. A slot for
# the owner costs the garbage collector less than an instance dict.
_WINDOWS: Final[list[Any]] = [
    type(
        "Window",
        (ctypes.Array,),
        {"_type_": ctypes.c_ubyte, "_length_": 1 << bits, "__slots__": ("owner",)},
    )
    for bits in range(63)
]


def memory_at(address: int, nbytes: int, owner: object) -> memoryview:
    """Returns ``nbytes`` bytes at ``address``; the view keeps ``owner`` alive.

    One way for every dtype, without torch's dispatcher, in a fraction of its time.
    """
    if nbytes == 0:
        return memoryview(bytearray())
    window = _WINDOWS[nbytes.bit_length()].from_address(address)
    window.owner = owner
    return memoryview(window).cast("B")[:nbytes]


def copy_bytes(out: memoryview, data: memoryview) -> None:
    if len(data) < 4096:
        out[:] = data
    else:  # unlike the assignment, this lets other threads run
        np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(data, np.uint8))


class Cut(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Bytes ``[start, start + nbytes)`` of a source, which go to ``at`` in some memory."""

    source: Any
    start: int
    at: int
    nbytes: int


class Pinner(Protocol):
    """Lets a device reach memory of this process: copies become asynchronous, and faster."""

    def pin(self, address: int, nbytes: int) -> None:
        """Raises ``OSError`` where that cannot be had."""
        ...

    def unpin(self, address: int) -> None: ...


class DeviceCopier(Protocol):
    """Copies out of the sources that have it as their ``copier``, many by one call.

    Attributes:
        pinner: Of the memory that is copied into.
    """

    @property
    def pinner(self) -> Pinner: ...

    def begin(self, out: memoryview, cuts: Sequence[Cut]) -> Callable[[], None]:
        """Begins to copy; blocks for no device.

        Args:
            out: Must live, as the sources, until the copies have ended.
            cuts: By rising ``at``, which counts from the begin of ``out``.

        Returns:
            What waits for their end. It must be called once.

        Raises:
            Exception: what the device says, here or from the returned call. No copy is under way
                any more then.
        """
        ...


class MemorySource(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Bytes that lie contiguous in CPU memory."""

    address: int
    nbytes: int
    owner: object
    is_addressable: ClassVar[bool] = True

    def view(self, start: int, stop: int) -> memoryview:
        return memory_at(self.address + start, stop - start, self.owner)

    def copy_into(self, start: int, out: memoryview) -> None:
        copy_bytes(out, self.view(start, start + len(out)))


class PartSource(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Bytes ``[start, start + nbytes)`` of another source."""

    whole: ByteSource
    start: int
    nbytes: int

    @property
    def is_addressable(self) -> bool:
        return self.whole.is_addressable

    def view(self, start: int, stop: int) -> memoryview:
        return self.whole.view(self.start + start, self.start + stop)

    def copy_into(self, start: int, out: memoryview) -> None:
        self.whole.copy_into(self.start + start, out)


class MemorySink(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Contiguous CPU memory to restore into."""

    address: int
    nbytes: int
    owner: object
    is_addressable: ClassVar[bool] = True

    def view(self, start: int, stop: int) -> memoryview:
        return memory_at(self.address + start, stop - start, self.owner)

    def copy_from(self, start: int, data: memoryview) -> None:
        copy_bytes(self.view(start, start + len(data)), data)


def gather(
    sources: Sequence[ByteSource],
    pieces: Iterable[Piece],
    out: memoryview,
    pin: Callable[[Pinner], None],
) -> None:
    """Copies pieces into ``out``, back to back. Blocks; for worker threads.

    Devices copy at the same time as this thread.

    Args:
        sources: Per item.
        pin: Is called before a device copies into ``out``.

    Raises:
        Exception: what a device says. Nothing writes to ``out`` any more.
    """
    to = int(np.frombuffer(out, np.uint8).ctypes.data)
    here: list[tuple[int, int, int]] = []
    others: list[Cut] = []
    on_devices: dict[DeviceCopier, list[Cut]] = {}
    at = 0
    for piece in pieces:
        source: Any = sources[piece.item]
        start = piece.start
        nbytes = piece.stop - start
        if type(source) is PartSource:
            source, start = source.whole, source.start + start
        if type(source) is MemorySource:
            here.append((to + at, source.address + start, nbytes))
        else:
            copier = getattr(source, "copier", None)
            cuts = others if copier is None else on_devices.setdefault(copier, [])
            cuts.append(Cut(source, start, at, nbytes))
        at += nbytes
    with contextlib.ExitStack() as waits:  # all of them are called, whatever fails
        for copier, cuts in on_devices.items():
            pin(copier.pinner)
            waits.callback(copier.begin(out, cuts))
        for where, address, size in here:
            ctypes.memmove(where, address, size)
        for cut in others:
            cut.source.copy_into(cut.start, out[cut.at : cut.at + cut.nbytes])
