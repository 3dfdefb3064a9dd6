# SPDX-License-Identifier: Apache-2.0
"""Shows ranges of several objects as one object, for leaves of other formats that are in pieces."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

import msgspec

from actorsnap.storage.base import (
    ObjectInfo,
    Storage,
    check_range,
    num_bytes,
    range_end,
    slice_views,
)
from actorsnap.storage.wrapper import Wrapper


class KeyRange(msgspec.Struct, frozen=True, gc=False):
    """Bytes ``[start, stop)`` of an object."""

    key: str
    start: int
    stop: int


class JoinedStorage(Wrapper):
    """Adds readable objects to ``inner``, each of which consists of pieces of others, in order.

    They cannot be listed, written or deleted.
    """

    def __init__(self, inner: Storage, joined: Mapping[str, Sequence[KeyRange]]) -> None:
        super().__init__(inner)
        self._joined = joined
        self._starts = {
            key: list(accumulate([piece.stop - piece.start for piece in pieces], initial=0))
            for key, pieces in joined.items()
        }

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if key not in self._joined:
            return await super().get(key, start, stop)
        check_range(start, stop)
        stop = range_end(key, start, stop, self._starts[key][-1])
        parts = [
            await super(JoinedStorage, self).get(piece.key, piece.start, piece.stop)
            for piece in self._pieces(key, start, stop)
        ]
        return b"".join(parts)

    async def read_into(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        if key not in self._joined:
            await super().read_into(key, offset, views)
            return
        at = 0
        for piece in self._pieces(key, offset, offset + num_bytes(views)):
            end = at + piece.stop - piece.start
            await super().read_into(piece.key, piece.start, slice_views(views, at, end))
            at = end

    def read_into_blocking(
        self, key: str, offset: int, batches: Iterable[Sequence[memoryview]]
    ) -> None:
        if key not in self._joined:
            super().read_into_blocking(key, offset, batches)
            return
        for views in batches:
            at = 0
            for piece in self._pieces(key, offset, offset + num_bytes(views)):
                end = at + piece.stop - piece.start
                part = slice_views(views, at, end)
                super().read_into_blocking(piece.key, piece.start, [part])
                at = end
            offset += at

    async def stat(self, key: str) -> ObjectInfo:
        """A joined object is as new as its newest piece."""
        if key not in self._joined:
            return await super().stat(key)
        infos = [await super(JoinedStorage, self).stat(piece.key) for piece in self._joined[key]]
        newest_s = max([info.modified_s for info in infos], default=0.0)
        return ObjectInfo(key=key, size=self._starts[key][-1], modified_s=newest_s)

    def _pieces(self, key: str, start: int, stop: int) -> Iterator[KeyRange]:
        """Yields the non-empty pieces of bytes ``[start, stop)``."""
        starts = self._starts[key]
        range_end(key, start, stop, starts[-1])
        for number in range(max(0, bisect_right(starts, start) - 1), len(starts) - 1):
            first, piece = starts[number], self._joined[key][number]
            if first >= stop:
                return
            low, high = max(start, first), min(stop, starts[number + 1])
            if low < high:
                at = piece.start - first
                yield KeyRange(piece.key, at + low, at + high)
