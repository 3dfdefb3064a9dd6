"""Writers of objects in Google Cloud Storage: one upload, or components that are composed.

Decides which objects of the bucket store a writer's ranges, which older ones have the same bytes,
and how they become one. Must not know: the verbs of a storage, requests (``gs_client``). ``gs`` has
the rules in words.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import anyio
import anyio.lowlevel
import msgspec

from actorsnap.errors import ObjectExists, StorageError, UsageError
from actorsnap.format.checksum import combine
from actorsnap.log import Log
from actorsnap.storage.base import CLEANUP_S, ObjectWriter, check_write
from actorsnap.storage.gs_client import GsClient, Resource
from actorsnap.storage.many import try_each

__all__ = ["MIN_WRITE_BYTES", "GsWriter", "Sources", "GsUpload", "find_sources"]

logger = Log(__name__)

MIN_WRITE_BYTES = 1 << 20
"""Least bytes of a write: smaller ones only make the tree of composing deeper."""

_MAX_SOURCES = 32
_COMPONENT_CLASS = "STANDARD"
# Tries to delete components; more of them are not worth the object.
_CLEANUP_TRIES = 3

Sources: TypeAlias = Mapping[tuple[int, int, int], str]
"""Names of objects with an older one's bytes, by their offset there, size and CRC32C."""


class GsUpload(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The state shared by the writers of one object; encoded, it is the token.

    Attributes:
        nonce: In the name of the folder of components.
        older: Keys of older objects.
    """

    key: str
    size: int
    nonce: str
    older: tuple[str, ...] = ()


async def find_sources(client: GsClient, key: str, names: Sequence[str]) -> Sources:
    """Returns the leftovers of dead writers of the objects ``names``, the newest first.

    A request per object. The service has computed the checksums of all that it stores.
    """
    found: dict[tuple[int, int, int], str] = {}
    for name in names:
        try:
            async for page in client.pages("writer", key, name):
                for each in page.resources:
                    part = re.fullmatch(
                        r"|\.[0-9a-f]{16}\.parts/([0-9a-f]{16})", each.name.removeprefix(name)
                    )
                    if part is not None:
                        offset = int(part[1] or "0", 16)
                        found.setdefault((offset, each.size, each.crc32c), each.name)
        except StorageError as error:
            if error.retryable:
                raise
            logger.info("%s: %s is not resumed: %s", client.url, name, error)
    return found


class GsWriter(ObjectWriter):
    """One object, or components of a future one. States: open -> composed -> ended.

    Args:
        name: The object's, in the bucket.
        sources: Objects to copy from.
    """

    def __init__(
        self, client: GsClient, upload: GsUpload, name: str, *, sources: Sources, is_opener: bool
    ) -> None:
        self.key = upload.key
        self.size = upload.size
        self.token = msgspec.msgpack.encode(upload)
        self._client = client
        self._name = name
        self._folder = f"{name}.{upload.nonce}.parts/"
        self._sources = sources
        self._is_opener = is_opener
        self._stored: dict[int, Resource] = {}  # by this writer, by offset
        self._leftovers: set[str] = set()  # components that are known
        self._has_begun = False  # something may be there under the object's name
        self._is_made = False
        self._is_ended = False
        self._num_cleanups = 0

    async def write_at(
        self, offset: int, views: Sequence[memoryview], crc32c: int | None = None
    ) -> None:
        """Uploads ``views``. Cancellation: an object may be left, which ``abort`` deletes.

        Raises:
            AccessDenied, StorageError: it failed, or the writer was ended.
        """
        num = self._check(offset, views)
        if not num:
            return
        crc = await self._client.crc32c(views) if crc32c is None else crc32c
        upload = partial(self._client.upload, "write_at", self.key, views=views, crc=crc)
        self._stored[offset] = await self._store(offset, num, upload)

    async def reuse(self, offset: int, views: Sequence[memoryview], crc32c: int) -> bool:
        """Copies an older object of exactly these bytes. Cancellation: see ``write_at``."""
        num = self._check(offset, views)
        source = self._sources.get((offset, num, crc32c))
        if source is None:
            return False
        copy = partial(self._client.copy, "reuse", self.key, source=source)
        try:
            copied = await self._store(offset, num, copy)
        except StorageError as error:
            if error.retryable:
                raise
            # Mostly it is gone: a garbage collection was faster.
            logger.info("%s: %s is not resumed: %s", self._client.url, source, error)
            return False
        if (copied.size, copied.crc32c) != (num, crc32c):
            return False  # its writer lives after all
        self._stored[offset] = copied
        return True

    def _check(self, offset: int, views: Sequence[memoryview]) -> int:
        """Returns the number of bytes of a write."""
        num = check_write(self, offset, views) - offset
        if self._is_ended:
            raise self._error("write_at", "the writer was completed, released or aborted")
        if self._has_components:
            return num
        if not self._is_opener:
            raise self._error("write_at", "so small an object is one write, of its opener")
        if num < self.size:
            raise UsageError(f"{self.key!r}: an object of {self.size} bytes is one write")
        return num

    @property
    def _has_components(self) -> bool:
        return self.size >= MIN_WRITE_BYTES

    async def _store(
        self, offset: int, num: int, make: Callable[..., Awaitable[Resource]]
    ) -> Resource:
        """Stores a range as a component, or as the object if it is the whole one."""
        if self._is_opener and num == self.size:
            return await self._create(make)
        name = f"{self._folder}{offset:016x}"
        self._leftovers.add(name)
        return await make(name=name, storage_class=_COMPONENT_CLASS)

    async def _create(self, make: Callable[..., Awaitable[Resource]]) -> Resource:
        """Creates the object. Replaces only an object of an earlier try.

        Raises:
            ObjectExists: there is one.
        """
        is_again, self._has_begun = self._has_begun, True
        try:
            return await make(
                name=self._name,
                storage_class=self._client.options.storage_class,
                if_absent=not is_again,
            )
        except ObjectExists:
            self._has_begun = False
            raise

    async def complete(self) -> None:
        """Composes one object of the components and deletes them.

        Atomicity: the service's; an object of one write exists already. Cancellation: the object
        may exist; ``abort`` deletes it. May be called again after a failure.

        Raises:
            AccessDenied, StorageError: it failed, or some bytes were never written.
        """
        if not self._is_opener:
            raise UsageError(f"{self.key!r}: only the opener of an object completes it")
        if not self._is_made:
            await self._make()
            self._is_made = True
        self._num_cleanups += 1
        try:
            await self._delete("complete", self._leftovers)
        except StorageError as error:
            if error.retryable and self._num_cleanups < _CLEANUP_TRIES:
                raise
            logger.warning("%s: components of %s stay: %s", self._client.url, self.key, error)
        self._is_ended = True

    async def _make(self) -> None:
        if not self.size:
            upload = partial(self._client.upload, "complete", self.key, views=(), crc=0)
            await self._create(upload)
            return
        stored: Mapping[int, Resource] = self._stored
        if self._has_components and _find_gap(stored, self.size) is not None:
            stored = await self._list_components()  # joined writers have written, too
        if (at := _find_gap(stored, self.size)) is not None:
            raise self._error(
                "complete", f"byte {at} of {self.size} was never written, or written twice"
            )
        parts = [stored[offset] for offset in sorted(stored)]
        if parts[0].name != self._name:
            await self._compose(parts)

    async def _list_components(self) -> Mapping[int, Resource]:
        found = {}
        async for page in self._client.pages("complete", self.key, self._folder):
            for each in page.resources:
                self._leftovers.add(each.name)
                offset = each.name.removeprefix(self._folder)
                if re.fullmatch("[0-9a-f]{16}", offset):
                    found[int(offset, 16)] = each
        return found

    async def _compose(self, parts: Sequence[Resource]) -> None:
        crc = 0
        for part in parts:
            crc = combine(crc, part.crc32c, part.size)
        names = [part.name for part in parts]
        level = 0
        while len(names) > _MAX_SOURCES:
            level += 1
            names = await self._compose_level(names, level)
        compose = partial(self._client.compose, "complete", self.key, sources=names)
        whole = await self._create(compose)
        if (whole.size, whole.crc32c) != (self.size, crc):
            raise self._error(
                "complete",
                f"{whole.size} bytes with CRC32C {whole.crc32c:08x} were composed, "
                f"not {self.size} with {crc:08x}",
                retryable=True,
            )

    async def _compose_level(self, names: Sequence[str], level: int) -> list[str]:
        groups = {
            f"{self._folder}level-{level}-{start // _MAX_SOURCES}": names[
                start : start + _MAX_SOURCES
            ]
            for start in range(0, len(names), _MAX_SOURCES)
        }
        self._leftovers.update(groups)

        async def compose(name: str) -> None:
            await self._client.compose(
                "complete", self.key, name, groups[name], storage_class=_COMPONENT_CLASS
            )

        await try_each(groups, compose, at_once=self._client.options.max_concurrency)
        return list(groups)

    async def release(self) -> None:
        """Ends a joined writer, whose writes are durable already."""
        if self._is_opener:
            raise UsageError(f"{self.key!r}: the opener of an object completes or aborts it")
        await anyio.lowlevel.checkpoint()
        self._is_ended = True

    async def abort(self) -> None:
        """Deletes all written objects, for the opener. No effect after an ending."""
        is_ended, self._is_ended = self._is_ended, True
        if is_ended or not self._is_opener:
            return
        with anyio.move_on_after(CLEANUP_S, shield=True):
            try:
                if self._has_components:
                    await self._list_components()
                await self._delete(
                    "abort", [*self._leftovers, *([self._name] if self._has_begun else [])]
                )
            except StorageError as error:
                logger.warning("%s: aborted object %s stays: %s", self._client.url, self.key, error)

    async def _delete(self, op: str, names: Collection[str]) -> None:
        await self._client.delete(op, dict.fromkeys(names, self.key))

    def _error(self, op: str, detail: str, *, retryable: bool = False) -> StorageError:
        return StorageError(
            op=op, key=self.key, backend=self._client.url, detail=detail, retryable=retryable
        )


def _find_gap(stored: Mapping[int, Resource], size: int) -> int | None:
    """Returns the first of ``size`` bytes that is not stored exactly once, or None."""
    position = 0
    for offset in sorted(stored):
        if offset != position:
            return min(offset, position)
        position += stored[offset].size
    return None if position == size else min(position, size)
