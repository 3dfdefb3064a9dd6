# SPDX-License-Identifier: Apache-2.0
"""Describes foreign files as a rank manifest: what all readers of ``actorsnap.formats`` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from actorsnap.actors.formats import Place
from actorsnap.errors import FormatError, UsageError
from actorsnap.format.layout import dtype_itemsize
from actorsnap.format.manifest import (
    BytesEntry,
    ContainerEntry,
    ContainerType,
    Entry,
    ObjectRecord,
    RankManifest,
    Stored,
    TensorEntry,
    ValueEntry,
    ViewEntry,
)
from actorsnap.state import objects
from actorsnap.state.tree import escape
from actorsnap.storage.joined import KeyRange
from actorsnap.storage.unpacked import Packed

DEFAULT_KEY = "model"
"""Top-level key of a checkpoint that has no top level: tensors by name."""


class Description:
    """Collects the entries of one rank, in traversal order.

    Paths are escaped and begin with a top-level key. Ranges are checked when all are known
    (``actors.formats``).
    """

    def __init__(self, place: Place, rank: int = 0) -> None:
        self._place = place
        self._rank = rank
        self._numbers: dict[str, int] = {}
        self._objects: list[ObjectRecord] = []
        self.entries: list[Entry] = []
        self.joined: dict[str, tuple[KeyRange, ...]] = {}
        self.packed: dict[str, Packed] = {}

    def stored(self, key: str, start: int, stop: int) -> Stored:
        """Returns bytes ``[start, stop)`` of a file that ``Place.find`` has found."""
        number = self._numbers.get(key)
        if number is None:
            number = self._add_object(key, self._place.used[key].size)
        return Stored(number, start, stop, ())

    def stored_in_pieces(self, key: str, pieces: Sequence[KeyRange]) -> Stored:
        """Returns bytes that are in several files; ``key`` is a new name, for all of them."""
        assert key not in self._numbers
        self.joined[key] = tuple(pieces)
        size = sum([piece.stop - piece.start for piece in pieces])
        return Stored(self._add_object(key, size), 0, size, ())

    def stored_packed(self, piece: KeyRange, packed: Packed, start: int, stop: int) -> Stored:
        """Returns bytes ``[start, stop)`` of what a stream in a file holds.

        Raises:
            FormatError: A file has the name that stands for the stream.
        """
        key = f"{piece.key}/{piece.start}"
        if key in self._place.used:
            detail = f"the stream in {piece.key!r} at byte {piece.start} has the same name"
            raise FormatError(key=key, detail=detail)
        if key not in self._numbers:
            self.joined[key] = (piece,)
            self.packed[key] = packed
            self._add_object(key, packed.size)
        return Stored(self._numbers[key], start, stop, ())

    def _add_object(self, key: str, size: int) -> int:
        number = self._numbers[key] = len(self._objects)
        self._objects.append(ObjectRecord(key=key, size=size, header_bytes=0, header_crc32c=0))
        return number

    def tensor(
        self,
        path: str,
        dtype: str,
        shape: Sequence[int],
        stored: Stored,
        *,
        offsets: Sequence[int] | None = None,
        global_shape: Sequence[int] | None = None,
        **fields: Any,
    ) -> None:
        """Adds a dense tensor, or a shard of one; ``fields`` are those of ``TensorEntry``.

        Raises:
            FormatError: The dtype is unknown.
        """
        if dtype_itemsize(dtype) is None:
            raise FormatError(key=path, detail=f"this release has no dtype {dtype!r:.80}")
        self.entries.append(
            TensorEntry(
                path=path,
                dtype=dtype,
                shape=tuple(shape),
                data=stored,
                offsets=None if offsets is None else tuple(offsets),
                global_shape=None if global_shape is None else tuple(global_shape),
                **fields,
            )
        )

    def view(self, path: str, of: str, dtype: str, **fields: Any) -> None:
        """Adds a view of a tensor; ``fields`` are those of ``ViewEntry``."""
        self.entries.append(ViewEntry(path=path, of=of, dtype=dtype, **fields))

    def container(self, path: str, kind: ContainerType, attributes: Any = None) -> None:
        self.entries.append(ContainerEntry(path=path, type=kind, attributes=attributes))

    def value(self, path: str, value: object, *, allow_pickle: bool = False, **fields: Any) -> None:
        """Adds a plain value, or an array or number of numpy; with ``allow_pickle`` any object.

        Raises:
            UsageError: It is not a plain value; names its class.
        """
        try:
            encoded = objects.encode_inline(value, path)
        except objects.NotInline as error:
            if allow_pickle or objects.numpy_kind(value) is not None:
                self.entries.append(ValueEntry(path=path, value=objects.Opaque(value), **fields))
                return
            raise UsageError(
                f"{path!r} is of type {error.kind}, which is not a plain value: convert the "
                "checkpoint with the program that wrote it"
            ) from error
        self.entries.append(ValueEntry(path=path, value=encoded, **fields))

    def refused(self, path: str, reason: UsageError) -> None:
        """Adds a value that raises ``reason`` when it is restored, read or copied."""
        self.entries.append(ValueEntry(path=path, value=objects.Refused(str(reason))))

    def pickled(self, path: str, stored: Stored, **fields: Any) -> None:
        """Adds a whole file of ``torch.save``, which is read only if the caller allows pickles."""
        self.entries.append(BytesEntry(path=path, type="pickle", data=stored, **fields))

    def manifest(self, optimizers: Mapping[str, str] | None = None) -> RankManifest:
        return RankManifest(
            attempt="",
            rank=self._rank,
            objects=tuple(self._objects),
            entries=tuple(self.entries),
            optimizers=dict(optimizers or {}),
        )


def path_of(*keys: str | int) -> str:
    """Returns the path of nested keys; the first one is top-level."""
    return "/".join([escape(key) for key in keys])
