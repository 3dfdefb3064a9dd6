"""The fence between a lazy staging and the steps that would change what it has not copied yet.

It lives on the runtime's loop: the staging actor takes chunks from it and says what it has copied.
A trainer's thread waits for a ``Watch``, which needs nothing of that thread, nor of a loop that may
run there. What is copied when is ``planning.backlog``'s to decide.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio

from actorsnap.errors import StateChanged
from actorsnap.planning.backlog import Backlog, leaves_in
from actorsnap.planning.packing import Chunk, ObjectPlan
from actorsnap.state.captured import Leaf

if TYPE_CHECKING:
    from actorsnap.state.lazy import LazyState  # imports torch, which the uploader process has not

__all__ = ["Fence", "Watch"]


class Watch:
    """Somebody's interest in some leaves.

    Attributes:
        leaves: In the order in which they will be changed.
        passed: Set when all of them are copied, or nobody copies any more.
    """

    def __init__(self, leaves: Sequence[int]) -> None:
        self.leaves = leaves
        self.passed = threading.Event()
        self.is_awaited = False
        self.chunks: set[int] | None = None  # once it is planned


class Fence:
    """What of one rank's state is not copied yet. Used on the runtime's loop, but for ``is_open``
    and ``lazy``.

    Args:
        lazy: The leaves that are staged lazily.
        leaves: All, for their paths.

    Attributes:
        is_open: Nobody has to wait any more.
    """

    def __init__(self, lazy: LazyState, leaves: Sequence[Leaf]) -> None:
        self.lazy = lazy
        self.is_open = False
        self._paths = [leaf.item.path for leaf in leaves]
        self._watches: list[Watch] = []
        self._is_hurried = False
        # May be changed from now on.
        self._passed: set[int] = set()
        self._chunks: Sequence[Chunk] = ()
        self._numbers: dict[tuple[int, int], int] = {}
        self._leaves_of: Sequence[frozenset[int]] = ()
        self._staged: frozenset[int] = frozenset()
        self._backlog: Backlog | None = None
        self._has_news: anyio.Event

    @property
    def has_eager(self) -> bool:
        """Whether there is anything for which the caller of the save must wait."""
        return bool(self.lazy.eager)

    @property
    def has_eager_left(self) -> bool:
        """Whether any of that is not copied yet."""
        return self.has_eager if self._backlog is None else self._backlog.has_eager_left

    def watch(self, watch: Watch) -> None:
        """Begins to watch; the leaves are copied in their turn, behind those watched before."""
        if self.is_open:
            watch.passed.set()
            return
        self._watches.append(watch)
        if self._backlog is not None:
            self._backlog.will_touch(watch.leaves)
            self._look_at(watch)

    def hurry(self, watch: Watch | None = None) -> None:
        """Notes that somebody waits, for all that is left where there is no watch."""
        if watch is None:
            self._is_hurried = True
        else:
            watch.is_awaited = True
            if self._backlog is not None and watch.chunks:
                self._backlog.promote(watch.chunks)
        self._tell()

    def open(self) -> None:
        """Lets everybody pass: all is copied, or nothing will be any more."""
        self.is_open = True
        for watch in self._watches:
            watch.passed.set()
        self._watches.clear()
        self.lazy.release()

    # For the staging actor

    def plan(self, objects: Sequence[ObjectPlan], chunks: Sequence[Chunk]) -> None:
        """Takes notice of what this rank copies; the rest is others'."""
        self._has_news = anyio.Event()
        self._chunks = chunks
        self._numbers = {(chunk.object, chunk.index): n for n, chunk in enumerate(chunks)}
        self._leaves_of = leaves_in(objects, chunks)
        self._staged = frozenset().union(*self._leaves_of)
        self._backlog = Backlog(self._leaves_of, eager=self.lazy.eager)
        for watch in list(self._watches):
            self._backlog.will_touch(watch.leaves)
            self._look_at(watch)

    async def next_chunk(self, copier: int) -> Chunk | None:
        """The next chunk to copy, when it is time; None at the end.

        While nobody waits, one copier at a time works: the CPU is the trainer's.

        Args:
            copier: Number of the one who asks; 0 always works.

        Raises:
            StateChanged: there is nothing to copy any more: a change came first.
        """
        assert self._backlog is not None
        while copier and not self._wants_all():
            await self._has_news.wait()
        number = self._backlog.take()
        if self._backlog.is_handed_out:
            self._tell()
        if number is None:
            return None
        self._check(self._leaves_of[number])  # memory that was given back must not be read
        return self._chunks[number]

    def finish(self, chunk: Chunk) -> None:
        """Notes that a chunk was copied, and lets pass who has waited for that only.

        Raises:
            StateChanged: what was copied may be of a later step.
        """
        assert self._backlog is not None
        number = self._numbers[chunk.object, chunk.index]
        self._check(self._leaves_of[number])
        self._backlog.finish(number)
        for watch in list(self._watches):
            if watch.chunks is not None and number in watch.chunks:
                watch.chunks.remove(number)
                self._look_at(watch)
        if not self._backlog.has_eager_left:
            self._tell()

    def check(self) -> None:
        """Looks once more at what no watch has let pass: a write may have been under way.

        Raises:
            StateChanged: there was one.
        """
        self._check(self._staged - self._passed)

    def _check(self, leaves: frozenset[int]) -> None:
        changed = self.lazy.changed(leaves)
        if changed is not None:
            raise StateChanged(path=self._paths[changed])

    def _look_at(self, watch: Watch) -> None:
        assert self._backlog is not None
        if watch.chunks is None:
            watch.chunks = self._backlog.left_of(watch.leaves)
            if watch.is_awaited:
                self._backlog.promote(watch.chunks)
        if not watch.chunks:
            self._watches.remove(watch)
            # A write may have been under way while it was copied; ``check`` finds it, if it stays.
            fresh = self._staged.intersection(watch.leaves) - self._passed
            self._passed |= fresh - {self.lazy.changed(fresh)}
            watch.passed.set()

    def _wants_all(self) -> bool:
        assert self._backlog is not None
        return (
            self._is_hurried
            or self._backlog.has_eager_left
            or self._backlog.is_handed_out
            or any([watch.is_awaited for watch in self._watches])
        )

    def _tell(self) -> None:
        if self._backlog is not None:
            self._has_news.set()
            self._has_news = anyio.Event()
