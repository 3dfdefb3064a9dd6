# SPDX-License-Identifier: Apache-2.0
"""Plans a file that is assembled from fragments: which bytes are copied inside a storage, which are
sent, and in which writes.

Must not know what a fragment is, only its size, where it may well be cut, and which stored bytes it
equals. ``size`` and offsets are in bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec

_MAX_COPY_BYTES = 64 << 20
"""Largest size of one copy: several run at a time. A multiple of every file system's block."""


class Origin(msgspec.Struct, frozen=True, gc=False):
    """Bytes ``[start, stop)`` of a stored object."""

    key: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Fragment(msgspec.Struct, frozen=True, gc=False):
    """Neighbouring bytes of a file.

    Attributes:
        step: The fragment is best cut at multiples of it, from its start.
        origins: Stored bytes that equal the fragment, in order; empty if there are none.
    """

    size: int
    step: int = 1
    origins: tuple[Origin, ...] = ()


class Write(msgspec.Struct, frozen=True, gc=False):
    """Bytes ``[start, stop)`` of a file; ``origin``: to copy, else they are sent."""

    start: int
    stop: int
    origin: Origin | None = None


class Assembly:
    """A file of fragments.

    Attributes:
        starts: Offsets of each fragment, and the file's size.
    """

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        self.fragments = fragments
        self.starts = list(accumulate([each.size for each in fragments], initial=0))

    @property
    def size(self) -> int:
        return self.starts[-1]

    @property
    def whole_object(self) -> Origin | None:
        """The stored bytes that equal the whole file, if they are next to each other."""
        runs = list(self._runs())
        is_whole = len(runs) == 1 and runs[0][1].nbytes == self.size
        return runs[0][1] if is_whole else None

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yields number, and start and stop in it, of the fragments in bytes ``[start, stop)``."""
        number = max(bisect_right(self.starts, start) - 1, 0)
        while number < len(self.fragments) and self.starts[number] < stop:
            first = self.starts[number]
            low, high = max(start, first), min(stop, self.starts[number + 1])
            if low < high:
                yield number, low - first, high - first
            number += 1

    def writes(
        self,
        start: int,
        stop: int,
        *,
        chunk_bytes: int,
        least_bytes: int,
        copies: bool,
    ) -> list[Write]:
        """Returns the writes of bytes ``[start, stop)``, rising.

        Each has at least ``least_bytes``, unless it ends the file. What is sent is cut into about
        ``chunk_bytes``.

        Args:
            copies: Whether stored bytes may be copied.
        """
        found: list[Write] = []
        at = start
        for first, origin in self._runs() if copies else ():
            last = min(first + origin.nbytes, stop)
            begin = max(first, start)
            if begin > at:
                # What is sent before it must be long enough.
                begin = max(begin, at + least_bytes)
            is_enough = last - begin >= least_bytes or last == self.size
            if begin >= last or not is_enough:
                continue
            found += self._sent(at, begin, chunk_bytes, least_bytes)
            source = origin.start + begin - first
            found += _copies(begin, last, origin.key, source, least_bytes)
            at = last
        return found + self._sent(at, stop, chunk_bytes, least_bytes)

    def _runs(self) -> Iterator[tuple[int, Origin]]:
        """Yields the longest stored runs and their place in the file."""
        place, run = 0, Origin("", 0, 0)
        for start, fragment in zip(self.starts, self.fragments, strict=False):
            at = start
            for origin in fragment.origins:
                if not origin.nbytes:
                    continue
                follows = at == place + run.nbytes and origin.start == run.stop
                if origin.key == run.key and follows:
                    run = Origin(run.key, run.start, origin.stop)
                else:
                    if run.nbytes:
                        yield place, run
                    place, run = at, origin
                at += origin.nbytes
        if run.nbytes:
            yield place, run

    def _sent(self, start: int, stop: int, chunk_bytes: int, least_bytes: int) -> list[Write]:
        chunk_bytes = max(chunk_bytes, least_bytes)
        writes: list[Write] = []
        least_rest = 0 if stop == self.size else least_bytes
        while stop - start > chunk_bytes:
            high = min(start + chunk_bytes, stop - least_rest)
            cut = self._cut(start + least_bytes, high, stop - least_rest)
            if cut is None:
                break
            writes.append(Write(start, cut))
            start = cut
        if start < stop:
            writes.append(Write(start, stop))
        return writes

    def _cut(self, low: int, high: int, limit: int) -> int | None:
        """Returns the last good cut in ``[low, high]``, else the first one up to ``limit``."""
        if high < low:
            return None
        number = min(bisect_right(self.starts, high) - 1, len(self.fragments) - 1)
        first, step = self.starts[number], self.fragments[number].step
        cut = first + (high - first) // step * step
        if cut < low:
            cut = min(cut + step, self.starts[number + 1])
        return cut if low <= cut <= limit else None


def _copies(start: int, stop: int, key: str, source: int, least_bytes: int) -> list[Write]:
    cuts = [start]
    step = max(_MAX_COPY_BYTES, least_bytes)
    cut = start + step - start % step
    while stop - cut >= least_bytes and cut < stop:
        if cut - cuts[-1] >= least_bytes:
            cuts.append(cut)
        cut += step
    cuts.append(stop)
    return [
        Write(low, high, Origin(key, source + low - start, source + high - start))
        for low, high in zip(cuts, cuts[1:], strict=False)
    ]
