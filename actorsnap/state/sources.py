# SPDX-License-Identifier: Apache-2.0
"""A captured app state, and byte sources and sinks: how saving and storage access its bytes.

The uploader process imports this module, so it must not import torch. See
``docs/decisions/0013-staging-copies.md`` for ``gather``.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, TypeAlias

import msgspec
import numpy as np

from actorsnap.format.manifest import (
    BytesEntry,
    CompositeEntry,
    ContainerEntry,
    Entry,
    MemoryFormat,
    Stored,
    TensorEntry,
    ViewEntry,
    encodes_values,
    needs_values,
)
from actorsnap.planning.inventory import Outline, Sharded
from actorsnap.planning.packing import Item, ItemBox, Piece
from actorsnap.state.tree import part_path

if TYPE_CHECKING:
    from actorsnap.state.devices import Lane, ReturnLane  # imports torch


class Pinner(Protocol):
    """Pins host memory for a device: copies are then asynchronous and faster."""

    def pin(self, address: int, nbytes: int) -> None:
        """Raises ``OSError`` on failure."""
        ...

    def unpin(self, address: int) -> None: ...


class _Bytes(Protocol):
    """The C-order bytes of a leaf. Keeps its memory alive.

    Attributes:
        is_addressable: Whether the bytes are contiguous in CPU memory, so that ``view`` works.
    """

    @property
    def nbytes(self) -> int: ...
    @property
    def is_addressable(self) -> bool: ...
    def view(self, start: int, stop: int) -> memoryview:
        """Returns bytes ``[start, stop)`` in place, as unsigned bytes. Only if addressable."""
        ...


class ByteSource(_Bytes, Protocol):
    def copy_into(self, start: int, out: memoryview) -> None:
        """Copies bytes from ``start`` on into ``out``. Blocks; for worker threads.

        Large copies release the GIL. Unless addressable, both ends are multiples of the item size.
        """
        ...


class ByteSink(_Bytes, Protocol):
    """Memory for restored bytes. Views are writable.

    Attributes:
        pinner: Pins memory that ``copy_from`` then copies faster; None: no such memory.
    """

    @property
    def pinner(self) -> Pinner | None: ...
    def copy_from(self, start: int, data: memoryview) -> None:
        """Copies ``data`` to bytes from ``start`` on; see ``copy_into``."""
        ...


# One ctypes array type per power of two: creation takes long. A slot for the owner is cheaper for
# the garbage collector than an instance dict.
_WINDOWS: Final[list[Any]] = [
    type(
        "Window",
        (ctypes.Array,),
        {"_type_": ctypes.c_ubyte, "_length_": 1 << bits, "__slots__": ("owner",)},
    )
    for bits in range(63)
]


def memory_at(address: int, nbytes: int, owner: object) -> memoryview:
    """Returns a view that keeps ``owner`` alive."""
    if nbytes == 0:
        return memoryview(bytearray())
    window = _WINDOWS[(nbytes - 1).bit_length()].from_address(address)
    window.owner = owner
    view = memoryview(window).cast("B")
    return view if len(view) == nbytes else view[:nbytes]


def writable(memory: memoryview) -> memoryview:
    """Returns the same memory. Only to read: ``torch.frombuffer`` warns of read-only memory."""
    if not memory.readonly:
        return memory
    raw = np.frombuffer(memory, np.uint8)
    return memory_at(raw.ctypes.data, raw.nbytes, raw)


def copy_bytes(out: memoryview, data: memoryview) -> None:
    if len(data) < 4096:
        out[:] = data
    else:  # releases the GIL, unlike the assignment
        np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(data, np.uint8))


class HostMemory(msgspec.Struct, frozen=True, gc=False, eq=False):
    address: int
    nbytes: int
    owner: object
    is_addressable: ClassVar[bool] = True
    pinner: ClassVar[Pinner | None] = None

    def view(self, start: int, stop: int) -> memoryview:
        return memory_at(self.address + start, stop - start, self.owner)

    def copy_into(self, start: int, out: memoryview) -> None:
        copy_bytes(out, self.view(start, start + len(out)))

    def copy_from(self, start: int, data: memoryview) -> None:
        copy_bytes(self.view(start, start + len(data)), data)


class MemoryPart(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Bytes ``[at, at + nbytes)`` of memory that has many such parts.

    A view is one object for the garbage collector; one of ``HostMemory`` is three.
    """

    memory: memoryview
    at: int
    nbytes: int
    is_addressable: ClassVar[bool] = True
    pinner: ClassVar[Pinner | None] = None

    def view(self, start: int, stop: int) -> memoryview:
        return self.memory[self.at + start : self.at + stop]

    def copy_into(self, start: int, out: memoryview) -> None:
        copy_bytes(out, self.view(start, start + len(out)))

    def copy_from(self, start: int, data: memoryview) -> None:
        copy_bytes(self.view(start, start + len(data)), data)


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


class Cut(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Bytes ``[start, start + nbytes)`` of a source, or sink; at ``at`` in host memory."""

    source: Any
    start: int
    at: int
    nbytes: int


class Gathering(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Pieces to copy into ``out``, back to back.

    Attributes:
        sources: By item.
        pin: Called before a device copies into ``out``.
    """

    sources: Sequence[ByteSource]
    pieces: Iterable[Piece]
    out: memoryview
    pin: Callable[[Pinner], None]


def gather(gatherings: Iterable[Gathering]) -> None:
    """Makes all copies. Blocks; for worker threads.

    Devices copy at the same time: only the end of all copies is waited for.

    Raises:
        Exception: An error of a device. All copies have ended then.
    """
    with contextlib.ExitStack() as waits:  # calls all of them, even after an error
        for each in gatherings:
            _begin(each, waits)


def _begin(gathering: Gathering, waits: contextlib.ExitStack) -> None:
    """Makes copies, but only begins those from devices."""
    sources, out = gathering.sources, gathering.out
    to = int(np.frombuffer(out, np.uint8).ctypes.data)
    here: list[tuple[int, int, int]] = []
    others: list[Cut] = []
    on_devices: dict[Lane, list[Cut]] = {}
    at = 0
    for piece in gathering.pieces:
        source: Any = sources[piece.item]
        start = piece.start
        nbytes = piece.stop - start
        if type(source) is PartSource:
            source, start = source.whole, source.start + start
        if type(source) is HostMemory:
            here.append((to + at, source.address + start, nbytes))
        else:
            copier = getattr(source, "copier", None)
            cuts = others if copier is None else on_devices.setdefault(copier, [])
            cuts.append(Cut(source, start, at, nbytes))
        at += nbytes
    for copier, cuts in on_devices.items():
        gathering.pin(copier.pinner)
        waits.callback(copier.begin(out, cuts))
    for where, address, size in here:
        ctypes.memmove(where, address, size)
    for cut in others:
        cut.source.copy_into(cut.start, out[cut.at : cut.at + cut.nbytes])


def scatter(memory: memoryview, cuts: Iterable[Cut]) -> None:
    """Copies from ``memory``. Blocks; for worker threads.

    Args:
        cuts: Cuts of sinks, ascending by ``at``.
    """
    on_devices: dict[ReturnLane, list[Cut]] = {}
    for cut in cuts:
        sink, view = cut.source, memory[cut.at : cut.at + cut.nbytes]
        if sink.is_addressable:
            sink.view(cut.start, cut.start + cut.nbytes)[:] = view
        elif (lane := getattr(sink, "lane", None)) is not None:
            on_devices.setdefault(lane, []).append(cut)
        else:
            sink.copy_from(cut.start, view)
    for lane, found in on_devices.items():
        lane.copy(memory, found)


class Leaf(msgspec.Struct, gc=False, eq=False):
    """A leaf with bytes.

    Not garbage-collected: walks over 100,000 leaves took half of the time of a capture.

    Attributes:
        source: Its bytes; keeps their memory alive.
        kind, dtype: ``type`` and ``dtype`` of the entry; a ``bytes`` entry has no dtype.
        holders: Group ranks with the same value, if some but not all have it.
        rank_zero_wins: Whether values may differ and this rank, the first, stores its own.
    """

    item: Item
    source: ByteSource
    kind: Any
    dtype: str
    requires_grad: bool = False
    holders: tuple[int, ...] = ()
    rank_zero_wins: bool = False
    memory_format: MemoryFormat | None = None
    attributes: dict[str, Any] | None = None

    @property
    def scope(self) -> tuple[int, ...] | None:
        """Ranks that share the writing; None for all, ``()`` for this rank alone."""
        return None if self.item.replicated and not self.rank_zero_wins else self.holders

    def entry(self, stored: Stored, box: ItemBox | None = None) -> TensorEntry | BytesEntry:
        item = self.item
        if not self.dtype:
            return BytesEntry(
                path=item.path, type=self.kind, data=stored, replicated=item.replicated
            )
        place = item if box is None else box
        return TensorEntry(
            path=item.path,
            dtype=self.dtype,
            shape=place.shape,
            data=stored,
            type=self.kind,
            requires_grad=self.requires_grad,
            global_shape=place.global_shape,
            offsets=place.offsets,
            replicated=item.replicated,
            memory_format=self.memory_format,
            attributes=self.attributes,
        )


Part: TypeAlias = Leaf | Entry


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured app state. Refers to the app state's own memory.

    Attributes:
        parts: Leaves with bytes, and finished entries, in traversal order of sorted keys.
        globs: Globs of replicated leaves, sorted.
        sharded: Tensors that this rank and others hold parts of.
        optimizers: See ``RankManifest``.
    """

    parts: list[Part] = field(default_factory=list)
    globs: tuple[str, ...] = ()
    sharded: tuple[Sharded, ...] = ()
    optimizers: dict[str, str] = field(default_factory=dict)

    @property
    def leaves(self) -> list[Leaf]:
        """The parts that have bytes, in order."""
        return [part for part in self.parts if type(part) is Leaf]

    @property
    def scopes(self) -> dict[tuple[int, ...] | None, list[int]]:
        """Indices of leaves by ``Leaf.scope``, except private ones."""
        scopes: dict[tuple[int, ...] | None, list[int]] = {}
        for index, leaf in enumerate(self.leaves):
            if leaf.scope != ():
                scopes.setdefault(leaf.scope, []).append(index)
        return scopes

    @property
    def has_values(self) -> bool:
        """Whether the snapshot needs the feature ``values``."""
        for part in self.parts:
            if type(part) is Leaf:
                attributes = part.attributes
                if part.kind == "values" or (attributes and encodes_values([*attributes.values()])):
                    return True
            elif needs_values(part):
                return True
        return False

    @property
    def outline(self) -> Outline:
        """The leaves that the rank will store and that neither layouts nor scopes imply."""
        laid_out = {tensor.path for tensor in self.sharded if tensor.layout is not None}
        private: list[str] = []
        common: list[str] = []
        follows: list[tuple[str, str]] = []
        boxes: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        for part in self.parts:
            if isinstance(part, Leaf):
                item = part.item
                if part.scope != ():
                    continue
                if item.offsets is not None:
                    if item.path not in laid_out:
                        boxes.append((item.path, item.offsets, item.shape))
                else:
                    (common if item.replicated else private).append(item.path)
            elif not isinstance(part, ContainerEntry):
                if not part.replicated:
                    private.append(part.path)
                elif isinstance(part, ViewEntry):
                    follows.append((part.path, part.of))
                elif isinstance(part, CompositeEntry):
                    # The parts of one may be stored by several ranks.
                    follows.append((part.path, part_path(part.path, part.parts[0])))
                else:
                    common.append(part.path)
        return Outline(
            tuple([path for path in private if "@" not in path]),
            tuple(common),
            tuple(follows),
            tuple(boxes),
        )
