# SPDX-License-Identifier: Apache-2.0
"""Keeps steps of the trainer from changing state that lazy staging has not copied yet.

A trainer's thread waits for a ``Watch``; all else runs on the runtime's loop.
``planning.lazy_order`` decides the order of copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import anyio

from actorsnap.errors import StateChanged
from actorsnap.planning.lazy_order import Backlog, leaves_in
from actorsnap.planning.packing import Chunk, ObjectPlan
from actorsnap.state.sources import Leaf

if TYPE_CHECKING:
    from actorsnap.state.lazy import LazyState  # imports torch, which the uploader process lacks


class Watch:
    """A request to copy some leaves.

    Attributes:
        leaves: In the order in which they will be changed.
        passed: Set when all of them are copied, or copying has ended.
    """

    def __init__(self, leaves: Sequence[int]) -> None:
        self.leaves = leaves
        self.passed = threading.Event()
        self.is_awaited = False
        self.chunks: set[int] | None = None  # set when planned


class Fence:
    """Uncopied state of one rank. On the runtime's loop, except ``is_open`` and ``lazy``.

    Attributes:
        is_open: No step has to wait any more.
        on_eager_staged: Called, perhaps repeatedly, when everything but the lazy part is copied.
    """

    def __init__(self, lazy: LazyState, leaves: Sequence[Leaf]) -> None:
        self.lazy = lazy
        self.is_open = False
        self.on_eager_staged: Callable[[], None] = lambda: None
        self._paths = [leaf.item.path for leaf in leaves]
        self._watches: list[Watch] = []
        self._copies_all = False
        # Leaves that the trainer may change from now on.
        self._passed: set[int] = set()
        self._chunks: Sequence[Chunk] = ()
        self._numbers: dict[tuple[int, int], int] = {}
        self._leaves_of: Sequence[frozenset[int]] = ()
        self._staged: frozenset[int] = frozenset()
        self._backlog: Backlog | None = None
        self._has_news: anyio.Event

    @property
    def has_eager(self) -> bool:
        """Whether there are leaves that the caller of the save must wait for."""
        return bool(self.lazy.eager)

    @property
    def has_eager_left(self) -> bool:
        return self.has_eager if self._backlog is None else self._backlog.has_eager_left

    def watch(self, watch: Watch) -> None:
        """Adds a watch; its leaves are copied after those of earlier watches."""
        if self.is_open:
            watch.passed.set()
            return
        self._watches.append(watch)
        if self._backlog is not None:
            self._backlog.will_touch(watch.leaves)
            self._release_if_copied(watch)

    def copy_now(self, watch: Watch | None = None) -> None:
        """Copies a watch's leaves first because a caller waits; None: everything."""
        if watch is None:
            self._copies_all = True
        else:
            watch.is_awaited = True
            if self._backlog is not None and watch.chunks:
                self._backlog.promote(watch.chunks)
        self._wake_copiers()

    def open(self) -> None:
        self.is_open = True
        for watch in self._watches:
            watch.passed.set()
        self._watches.clear()
        self.lazy.release()

    def plan(self, objects: Sequence[ObjectPlan], chunks: Sequence[Chunk]) -> None:
        self._has_news = anyio.Event()
        self._chunks = chunks
        self._numbers = {(chunk.object, chunk.index): n for n, chunk in enumerate(chunks)}
        self._leaves_of = leaves_in(objects, chunks)
        self._staged = frozenset().union(*self._leaves_of)
        self._backlog = Backlog(self._leaves_of, eager=self.lazy.eager)
        for watch in list(self._watches):
            self._backlog.will_touch(watch.leaves)
            self._release_if_copied(watch)
        if not self._backlog.has_eager_left:
            self.on_eager_staged()

    async def next_chunk(self, copier: int) -> Chunk | None:
        """Returns the next chunk to copy, when it is due; None at the end.

        Until a caller waits, only copier 0 works: the trainer needs the CPU.

        Raises:
            StateChanged: The next leaves were changed before they were copied.
        """
        assert self._backlog is not None
        while copier and not self._wants_all():
            await self._has_news.wait()
        number = self._backlog.take()
        if self._backlog.is_handed_out:
            self._wake_copiers()
        if number is None:
            return None
        self._check(self._leaves_of[number])  # released memory must not be read
        return self._chunks[number]

    def finish(self, chunk: Chunk) -> None:
        """Records a copied chunk, and releases watches that waited only for it.

        Raises:
            StateChanged: The copied bytes may be of a later step.
        """
        assert self._backlog is not None
        number = self._numbers[chunk.object, chunk.index]
        self._check(self._leaves_of[number])
        self._backlog.finish(number)
        for watch in list(self._watches):
            if watch.chunks is not None and number in watch.chunks:
                watch.chunks.remove(number)
                self._release_if_copied(watch)
        if not self._backlog.has_eager_left:
            self.on_eager_staged()
            self._wake_copiers()

    def check(self) -> None:
        """Checks again the leaves that no watch has released.

        Raises:
            StateChanged: A write may have been in progress.
        """
        self._check(self._staged - self._passed)

    def _check(self, leaves: frozenset[int]) -> None:
        changed = self.lazy.changed(leaves)
        if changed is not None:
            raise StateChanged(path=self._paths[changed])

    def _release_if_copied(self, watch: Watch) -> None:
        assert self._backlog is not None
        if watch.chunks is None:
            watch.chunks = self._backlog.left_of(watch.leaves)
            if watch.is_awaited:
                self._backlog.promote(watch.chunks)
        if not watch.chunks:
            self._watches.remove(watch)
            # A write may have been in progress during the copy; ``check`` detects it later.
            fresh = self._staged.intersection(watch.leaves) - self._passed
            self._passed |= fresh - {self.lazy.changed(fresh)}
            watch.passed.set()

    def _wants_all(self) -> bool:
        assert self._backlog is not None
        return (
            self._copies_all
            or self._backlog.has_eager_left
            or self._backlog.is_handed_out
            or any([watch.is_awaited for watch in self._watches])
        )

    def _wake_copiers(self) -> None:
        if self._backlog is not None:
            self._has_news.set()
            self._has_news = anyio.Event()
