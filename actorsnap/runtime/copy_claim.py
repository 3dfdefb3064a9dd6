# SPDX-License-Identifier: Apache-2.0
"""The claim of a copy on the attempt that it writes (``docs/format.md``, "Claims").

Keeps collectors and other copies away, and lists complete objects for a resume.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import anyio

from actorsnap.actors.abandonable import AbandonableTasks, first_error, garbage_left
from actorsnap.errors import FormatError, StorageError, notes_of
from actorsnap.format.layout import copy_claim_key, encode_copy_claim
from actorsnap.runtime.host import Host
from actorsnap.runtime.maintenance import Claims, find_attempts, find_claims, find_collectable
from actorsnap.storage.base import Storage

_BEAT_S = 15.0
"""Interval between renewals."""

_STALE_S = 120.0
"""Age at which an unrenewed claim counts as dead. A copy that cannot renew gives up earlier."""

_LOOK_S = 0.5
"""Interval of looking for the end of another copy or a collection."""


@dataclass(eq=False, repr=False)
class CopyClaim:
    """The claim of a copy on ``attempt``.

    Attributes:
        copier: The attempt with the claim in its folder.
    """

    host: Host
    target: Storage
    copier: str
    attempt: str
    errands: AbandonableTasks

    def __post_init__(self) -> None:
        self._stored: set[str] = set()
        self._noted: frozenset[str] = frozenset()
        self._has_news = anyio.Event()
        self._renewing = anyio.Lock()
        self._renewed_s = 0.0

    @property
    def is_current(self) -> bool:
        return self._noted == self._stored

    @property
    def has_objects(self) -> bool:
        """Whether there are complete objects, for a resume."""
        return bool(self._stored)

    def add(self, keys: Collection[str]) -> None:
        """Notes complete objects."""
        self._stored.update(keys)
        self._has_news.set()

    def remove(self, key: str) -> None:
        """Call before deleting the object."""
        self._stored.discard(key)

    def clear(self) -> None:
        """Call before deleting all objects."""
        self._stored, self._noted = set(), frozenset()

    async def renew(self) -> None:
        # An older claim must not overwrite a newer one.
        async with self._renewing:
            begun_s, stored = anyio.current_time(), frozenset(self._stored)
            with self._writing():
                key = copy_claim_key(self.copier, self.attempt)
                await self.target.put(key, [memoryview(encode_copy_claim(stored))])
            self._renewed_s, self._noted = begun_s, stored

    async def keep(self) -> None:
        """Renews periodically, and soon after each complete object."""
        while True:
            with anyio.move_on_after(_BEAT_S):
                await self._has_news.wait()
            self._has_news = anyio.Event()
            self.check_renewed()
            await self.renew()

    def check_renewed(self) -> None:
        """Raises ``StorageError`` if others may take this copy for dead."""
        if anyio.current_time() - self._renewed_s > _STALE_S / 2:
            raise self.refused(
                "this copy stood still too long: another copy may have replaced it", retryable=True
            )

    async def withdraw(self) -> None:
        await self.target.delete_folder(self.copier)

    async def take_turn(self) -> Claims:
        """Waits for collections; ensures that no other copy writes the attempt.

        Copies claim, then look, so of two at least one sees the other. The younger gives up; the
        older waits, because the younger may have looked before.

        Raises:
            StorageError: an older copy is running; retryable.
        """
        while True:
            with self._writing():
                claims = await find_claims(self.target, await find_attempts(self.target))
            copiers = claims.copies.get(self.attempt, {})
            mine = copiers.get(self.copier)
            if mine is None:
                raise self.refused("the claim of this copy was deleted", retryable=True)
            fresh = [
                name
                for name, info in copiers.items()
                if name != self.copier and mine.modified_s - info.modified_s < _STALE_S
            ]
            rivals = await self._alive(fresh)
            if any(rival < self.copier for rival in rivals):
                await self.errands.clean_up(self.withdraw, garbage_left(self.target.url))
                raise self.refused(
                    f"another copy of this snapshot to there is under way ({rivals[0]}). Wait for "
                    "it; if it died on another machine, try again in a few minutes",
                    retryable=True,
                )
            if not rivals and not await self._alive(claims.collections):
                return claims
            await anyio.sleep(_LOOK_S)

    async def _alive(self, attempts: Sequence[str]) -> list[str]:
        dead = await find_collectable(self.host, attempts)
        return [name for name in attempts if name not in dead]

    def refused(self, detail: str, *, retryable: bool = False) -> StorageError:
        return StorageError(
            op="copy",
            key=self.attempt,
            backend=self.target.url,
            detail=detail,
            retryable=retryable,
        )

    def _writing(self) -> AbstractContextManager[None]:
        return naming_side("the copy's destination", self.target.url)


@contextmanager
def naming_side(name: str, url: str) -> Iterator[None]:
    """Adds source or destination to errors."""
    try:
        yield
    except (FormatError, StorageError, ExceptionGroup) as error:
        found = first_error(error)
        if not isinstance(found, FormatError | StorageError):
            raise
        fields = {**found.fields, "detail": f"{name}: {found.detail}"}
        named = type(found)(**fields)
        if isinstance(named, FormatError):
            named.name_snapshot(url)
        for note in notes_of(found):  # such as the number of tries
            named.add_note(note)
        raise named from error
