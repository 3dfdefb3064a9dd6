"""The objects that a rank writes in one save: opened or joined, completed or released, or deleted.

``actors.saver`` decides when; what is written to them, it must not know.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from actorsnap.actors.compressing import CompressedObject
from actorsnap.actors.trace import Recorder, Work
from actorsnap.errors import ObjectNotFound, StorageError
from actorsnap.format.layout import chunk_key
from actorsnap.planning.packing import ObjectPlan
from actorsnap.protocol.messages import Token
from actorsnap.storage.base import ObjectWriter, Storage
from actorsnap.storage.many import for_each

__all__ = ["RankObjects"]

_MAX_OPENING = 16


class RankObjects:
    """A rank's objects, by their numbers among its plans.

    Args:
        storage: Stays the caller's.
        attempt: The attempt that they belong to.
        resumed: Dead attempts, the newest first, whose objects are used.
        is_compressed: Each chunk is an object of its own: there is nothing to open.
        recorder: Records what is done when.

    Attributes:
        plans, storage, attempt: As given.
    """

    def __init__(
        self,
        plans: Sequence[ObjectPlan],
        storage: Storage,
        *,
        attempt: str,
        resumed: Sequence[str],
        is_compressed: bool,
        recorder: Recorder,
    ) -> None:
        self.plans = plans
        self.storage = storage
        self.attempt = attempt
        self._resumed = resumed
        self._is_compressed = is_compressed
        self._recorder = recorder
        self._number_of = {plan.key: number for number, plan in enumerate(plans)}
        self._writers: dict[int, ObjectWriter] = {}
        self._opened = [anyio.Event() for _ in plans]
        self._ended: set[int] = set()
        self._beside: list[str] = []

    async def open(self) -> tuple[Token, ...]:
        """Opens those that are this rank's to open; returns the tokens of those that others join.

        Raises:
            StorageError: one could not be opened.
        Cancellation: what is open stays so until ``delete``.
        """
        opens = [number for number, plan in enumerate(self.plans) if plan.opens]
        # Each may cost a request, and who joins waits for the last one.
        await for_each(opens, self._open, at_once=_MAX_OPENING)
        return tuple(
            Token.of(self.attempt, self.plans[number].key, self._writers[number].token)
            for number in opens
            if self.plans[number].has_joiners
        )

    async def _open(self, number: int) -> None:
        plan = self.plans[number]
        name = plan.key.removeprefix(f"{self.attempt}/")
        older = [f"{attempt}/{name}" for attempt in self._resumed]
        with self._recorder.row("objects") as row:
            self._writers[number] = (
                CompressedObject(plan.key, plan.size)
                if self._is_compressed
                else await self.storage.writer(plan.key, plan.size, older=older)
            )
            row.note(Work.OPEN, plan.key)
        self._opened[number].set()

    async def join(self, tokens: Sequence[Token]) -> None:
        """Opens objects of other ranks.

        Raises:
            StorageError: one could not be opened.
        """
        for key, token in [each.opened(self.attempt) for each in tokens]:
            number = self._number_of[key]
            if self._is_compressed:
                self._writers[number] = CompressedObject(key, self.plans[number].size)
                self._opened[number].set()
                continue
            try:
                self._writers[number] = await self.storage.join_writer(token)
            except ObjectNotFound as error:
                raise StorageError(
                    op="join_writer",
                    key=key,
                    backend=self.storage.url,
                    detail="another rank has created this object, and this rank does not see it: "
                    "save to a path on storage that all ranks share",
                ) from error
            self._opened[number].set()

    async def writer_of(self, number: int) -> ObjectWriter:
        """The object's writer, as soon as it is open."""
        await self._opened[number].wait()
        return self._writers[number]

    async def complete(self, number: int) -> None:
        """Makes an object durable that this rank has opened."""
        with self._recorder.row("objects") as row:
            await self._writers[number].complete()
            row.note(Work.COMPLETE, self.plans[number].key)
        self._ended.add(number)

    async def release(self, number: int) -> None:
        """Makes what was written to an object of another rank as durable as a joiner can."""
        await self._writers[number].release()
        self._ended.add(number)

    async def put(self, key: str, data: bytes) -> None:
        """Stores an object beside them, which goes with them."""
        self._beside.append(key)
        await self.storage.put(key, [memoryview(data)])

    async def delete(self) -> None:
        """Deletes what this rank has opened or put; what it has joined, it gives up.

        Raises:
            StorageError: something is left.
        """
        for number, writer in self._writers.items():
            if number not in self._ended:
                await writer.abort()
        if self._is_compressed:
            keys = [chunk_key(plan.key, c.start) for plan in self.plans for c in plan.chunks]
        else:
            keys = [plan.key for plan in self.plans if plan.opens]
        # The manifest first: what is left if this is interrupted does not look complete.
        keys = [*self._beside, *keys]
        if keys:
            await self.storage.delete(keys)
