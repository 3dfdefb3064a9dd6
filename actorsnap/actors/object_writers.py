# SPDX-License-Identifier: Apache-2.0
"""The objects that a rank writes in one save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass

import anyio

from actorsnap.actors.checksum_ledger import ChecksumLedger
from actorsnap.actors.trace import Recorder, Work
from actorsnap.errors import ObjectNotFound, StorageError
from actorsnap.format.layout import chunk_key
from actorsnap.planning.packing import Item, ObjectPlan
from actorsnap.protocol.save import Assignment, Token
from actorsnap.storage.base import ObjectWriter, Storage, for_each

_MAX_OPENING = 16


@dataclass(eq=False, repr=False)
class RankObjects:
    """A rank's objects and their checksums, numbered as its plans.

    With a codec, each chunk is a separate object: there is nothing to open.
    """

    plans: Sequence[ObjectPlan]
    items: InitVar[Sequence[Item]]
    storage: Storage
    assignment: Assignment
    recorder: Recorder

    def __post_init__(self, items: Sequence[Item]) -> None:
        plans = self.plans
        self.ledgers = [ChecksumLedger(plan, [items[i] for i in plan.items]) for plan in plans]
        self._attempt = self.assignment.attempt
        self._is_compressed = self.assignment.rules.codec is not None
        self._number_of = {plan.key: number for number, plan in enumerate(plans)}
        self._writers: dict[int, ObjectWriter] = {}
        self._opened = [anyio.Event() for _ in plans]
        self._ended: set[int] = set()
        self._other_keys: list[str] = []

    async def open(self) -> tuple[Token, ...]:
        """Opens this rank's own objects; returns the tokens of those that others join.

        Cancellation: Open objects stay open until ``delete``.
        """
        opens = [number for number, plan in enumerate(self.plans) if plan.opens]
        # Each may cost a request, and joining ranks wait for all of them.
        if not self._is_compressed:
            await for_each(opens, self._open, at_once=_MAX_OPENING)
        return tuple(
            Token.of(self._attempt, self.plans[number].key, self._token(number))
            for number in opens
            if self.plans[number].has_joiners
        )

    async def _open(self, number: int) -> None:
        plan = self.plans[number]
        name = plan.key.removeprefix(f"{self._attempt}/")
        older = [f"{attempt}/{name}" for attempt in self.assignment.resumed]
        with self.recorder.row("objects") as row:
            self._writers[number] = await self.storage.writer(plan.key, plan.size, older=older)
            row.note(Work.OPEN, plan.key)
        self._opened[number].set()

    def _token(self, number: int) -> bytes:
        return b"" if self._is_compressed else self._writers[number].token

    async def join(self, tokens: Sequence[Token]) -> None:
        """Opens objects of other ranks."""
        if self._is_compressed:
            return
        for key, token in [each.opened(self._attempt) for each in tokens]:
            number = self._number_of[key]
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
        await self._opened[number].wait()
        return self._writers[number]

    async def complete(self, number: int) -> None:
        """Makes an object that this rank opened durable."""
        if self._is_compressed:
            return
        with self.recorder.row("objects") as row:
            await self._writers[number].complete()
            row.note(Work.COMPLETE, self.plans[number].key)
        self._ended.add(number)

    async def release(self, number: int) -> None:
        """Makes this rank's part of another rank's object as durable as a joiner can."""
        if not self._is_compressed:
            await self._writers[number].release()
            self._ended.add(number)

    async def put(self, key: str, data: bytes) -> None:
        """Stores an additional object, which ``delete`` removes too."""
        self._other_keys.append(key)
        await self.storage.put(key, [memoryview(data)])

    async def delete(self) -> None:
        """Deletes the objects that this rank opened or put; aborts those that it joined."""
        for number, writer in self._writers.items():
            if number not in self._ended:
                await writer.abort()
        if self._is_compressed:
            keys = [chunk_key(plan.key, c.start) for plan in self.plans for c in plan.chunks]
        else:
            keys = [plan.key for plan in self.plans if plan.opens]
        # The manifest first: an interrupted deletion must not look complete.
        keys = [*self._other_keys, *keys]
        if keys:
            await self.storage.delete(keys)
