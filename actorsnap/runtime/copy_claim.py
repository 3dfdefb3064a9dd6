"""The claim of a copy on the attempt that it writes (``docs/format.md``, "Claims").

A claim keeps collectors and other copies away from the attempt. It lists the complete objects, for
a copy that resumes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import anyio

from actorsnap.actors.abandonable import AbandonableTasks, first_error
from actorsnap.errors import FormatError, StorageError
from actorsnap.format.layout import copy_claim_key, encode_copy_claim
from actorsnap.runtime.garbage import Claims, find_attempts, find_claims, find_collectable
from actorsnap.runtime.host import Host
from actorsnap.storage.base import Storage

__all__ = ["CopyClaim", "naming_side"]

_BEAT_S = 15.0
"""Interval between renewals of a copy's claim, in seconds."""

_STALE_S = 120.0
"""Age at which an unrenewed claim counts as dead, also if its process cannot be checked, in
seconds. A copy that cannot renew its own claim gives up earlier."""

_LOOK_S = 0.5
"""Interval between checks whether another copy or a collection has ended, in seconds."""


class CopyClaim:
    """The claim of the copy ``copier`` on ``attempt``.

    Attributes:
        copier: The attempt in whose folder the claim is.
    """

    def __init__(
        self, host: Host, target: Storage, copier: str, attempt: str, errands: AbandonableTasks
    ) -> None:
        self.copier = copier
        self._host = host
        self._target = target
        self._attempt = attempt
        self._errands = errands
        self._stored: set[str] = set()
        self._noted: frozenset[str] = frozenset()
        self._has_news = anyio.Event()
        self._renewing = anyio.Lock()
        self._renewed_s = 0.0

    @property
    def is_current(self) -> bool:
        """Whether the claim in the storage lists all complete objects."""
        return self._noted == self._stored

    def add(self, keys: Collection[str]) -> None:
        """Notes that objects are complete."""
        self._stored.update(keys)
        self._has_news.set()

    def remove(self, key: str) -> None:
        """Notes that an object is about to be deleted."""
        self._stored.discard(key)

    def clear(self) -> None:
        """Notes that all objects are about to be deleted."""
        self._stored, self._noted = set(), frozenset()

    async def renew(self) -> None:
        # In sequence: an older claim must not overwrite a newer one.
        async with self._renewing:
            begun_s, stored = anyio.current_time(), frozenset(self._stored)
            with self._writing():
                key = copy_claim_key(self.copier, self._attempt)
                await self._target.put(key, [memoryview(encode_copy_claim(stored))])
            self._renewed_s, self._noted = begun_s, stored

    async def keep(self) -> None:
        """Renews the claim periodically, and soon after each completed object."""
        while True:
            with anyio.move_on_after(_BEAT_S):
                await self._has_news.wait()
            self._has_news = anyio.Event()
            self.check_renewed()
            await self.renew()

    def check_renewed(self) -> None:
        """Raises ``StorageError`` if others may have taken this copy for dead."""
        if anyio.current_time() - self._renewed_s > _STALE_S / 2:
            raise self.refused(
                "this copy stood still too long: another copy may have replaced it",
                retryable=True,
            )

    async def withdraw(self) -> None:
        await self._target.delete_folder(self.copier)

    async def take_turn(self) -> Claims:
        """Waits for collections, and makes sure that no other copy writes the same attempt.

        Copies claim before they look, so of two copies at least one sees the other. The younger
        one gives up when it sees the older. The older one waits, because the younger one may
        have looked before.

        Raises:
            StorageError: an older copy is running; retryable.
        """
        while True:
            with self._writing():
                claims = await find_claims(self._target, await find_attempts(self._target))
            copiers = claims.copies.get(self._attempt, {})
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
                await self._errands.clean_up(self.withdraw)
                raise self.refused(
                    f"another copy of this snapshot to there is under way ({rivals[0]}). Wait for "
                    "it; if it died on another machine, try again in a few minutes",
                    retryable=True,
                )
            if not rivals and not await self._alive(claims.collections):
                return claims
            await anyio.sleep(_LOOK_S)

    async def _alive(self, attempts: Sequence[str]) -> list[str]:
        dead = await find_collectable(self._host, attempts)
        return [name for name in attempts if name not in dead]

    def refused(self, detail: str, *, retryable: bool = False) -> StorageError:
        return StorageError(
            op="copy",
            key=self._attempt,
            backend=self._target.url,
            detail=detail,
            retryable=retryable,
        )

    def _writing(self) -> AbstractContextManager[None]:
        return naming_side("the copy's destination", self._target.url)


@contextmanager
def naming_side(name: str, url: str) -> Iterator[None]:
    """Adds the name of the storage, source or destination, to errors."""
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
        raise named from error
