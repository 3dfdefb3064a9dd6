# SPDX-License-Identifier: Apache-2.0
"""The interface of a storage backend.

A storage is a flat space of objects under one URL. Keys are relative, ``/``-separated, without
empty, ``.`` and ``..`` components. Verbs are stateless, except for ``writer``, and safe to call
concurrently from tasks of one event loop.

Every failure is a ``StorageError`` subclass with ``op``, ``key`` and ``backend``; other exceptions
are converted, with less detail (``wrapper.py``). A backend never returns partial data as
success. ``actorsnap.testing.StorageConformance`` tests these rules.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Protocol, TypeVar

import anyio
import anyio.lowlevel

from actorsnap.errors import ActorSnapError, ChecksumMismatch, StorageError, UsageError
from actorsnap.format.layout import is_well_formed_key
from actorsnap.planning.packing import least_write_bytes

T = TypeVar("T")

CLEANUP_S = 30.0
"""Time for cleanup after a cancellation, in seconds. The rest is garbage."""


ENDED = "the writer was completed, released or aborted"


class RunBlocking(Protocol):
    """Runs a blocking function on a worker thread.

    Cancellation: takes effect once the function has returned, because it may hold the caller's
    memory.
    """

    async def __call__(self, fn: Callable[..., T], /, *args: Any) -> T: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageContext:
    """The environment of a backend.

    Attributes:
        run_io: Runs interruptible network calls, more at a time than there are cores. None:
            ``run_blocking``.
        options: ``storage_options``; backends refuse unknown names.
        durable: False lets a backend skip fsync (scratch tiers).
        on_retry: Called on the loop before each retry with the error and the wait in seconds; must
            not block.
        scratch: Folder for temporary files of objects at the root; empty: none.
    """

    run_blocking: RunBlocking
    run_io: RunBlocking | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    durable: bool = True
    on_retry: Callable[[StorageError, float], None] | None = None
    scratch: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The properties of a backend.

    Attributes:
        has_blocking_io: ``Storage.read_into_blocking`` and ``ObjectWriter.write_at_blocking`` work,
            from any thread.
        min_write_bytes: Smallest size of a ``write_at``, except at the object's end.
        max_writes: Largest number of ranges per object, over all its writers; None: no limit.
        max_object_bytes: None: no limit.
        has_joined_writers: ``join_writer`` works: several ranks may write one object.
        checks_crc32c: ``write_at`` refuses bytes that do not have its CRC32C.
        has_conditional_put: ``put_if_absent`` is atomic against every other writer.
        preferred_parallel_objects: Objects to write at a time.
        min_copy_bytes: Smallest size of a write or copy of a ``copying_writer``, except at the
            object's end. None: it copies whole objects only.
    """

    has_blocking_io: bool = False
    min_write_bytes: int = 1
    max_writes: int | None = None
    max_object_bytes: int | None = None
    has_joined_writers: bool = True
    checks_crc32c: bool = False
    has_conditional_put: bool = True
    preferred_parallel_objects: int = 4
    min_copy_bytes: int | None = None

    def least_write_bytes(self, size: int) -> int:
        """Returns the smallest ``write_at`` to an object of ``size`` bytes, except at its end.

        ``offset // least_write_bytes(size)`` is different for each write.
        """
        return least_write_bytes(
            size, min_write_bytes=self.min_write_bytes, max_writes=self.max_writes
        )

    def least_copy_bytes(self, size: int) -> int:
        """Like ``least_write_bytes``, for a write or copy of a ``copying_writer``."""
        return least_write_bytes(
            size, min_write_bytes=self.min_copy_bytes or 1, max_writes=self.max_writes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """``size`` in bytes; ``modified_s`` since the epoch, 0.0 if unknown."""

    key: str
    size: int
    modified_s: float = 0.0


def check_key(key: str) -> str:
    """Returns ``key`` if it is well-formed.

    Raises:
        UsageError: It is malformed, or has a NUL or a backslash.
    """
    if not is_well_formed_key(key):
        raise UsageError(f"not a storage key: {key[:200]!r}")
    return key


def check_no_options(context: StorageContext, storage: str) -> None:
    """Raises ``UsageError`` for ``storage_options``, which the backend does not take."""
    if context.options:
        names = ", ".join(sorted(map(str, context.options)))
        raise UsageError(f"{storage} storage takes no storage_options, but got: {names}")


def check_size(size: int) -> None:
    if size < 0:
        raise UsageError(f"an object cannot have {size} bytes")


def check_range(start: int, stop: int | None) -> None:
    if start < 0 or (stop is not None and stop < start):
        raise UsageError(f"not a range of bytes: [{start}, {stop})")


def truncated(key: str, wanted: int, size: int | None = None) -> ChecksumMismatch:
    """Returns the error for an object that should have ``wanted`` bytes."""
    actual = "fewer" if size is None else size
    return ChecksumMismatch(
        key=key, detail=f"truncated: {wanted} bytes are needed, the object has {actual}"
    )


def range_end(key: str, start: int, stop: int | None, size: int) -> int:
    """Returns the end of the range ``[start, stop)`` of an object of ``size`` bytes.

    Raises:
        ChecksumMismatch: The object ends before ``start`` or ``stop``.
    """
    end = size if stop is None else stop
    if max(start, end) > size:
        raise truncated(key, max(start, end), size)
    return end


def flat(views: Sequence[memoryview]) -> list[memoryview]:
    """Returns the non-empty views as one-dimensional views of unsigned bytes.

    Raises:
        TypeError: A view is not C-contiguous.
    """
    # Empty views cannot be cast, and a system call with only empty views looks like end of file.
    return [
        view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")
        for view in views
        if view.nbytes
    ]


def num_bytes(views: Sequence[memoryview]) -> int:
    return sum(view.nbytes for view in views)


def slice_views(views: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    parts = []
    for view in flat(views):
        if start < view.nbytes and stop > 0:
            parts.append(view[max(start, 0) : stop])
        start, stop = start - view.nbytes, stop - view.nbytes
    return parts


def copy_into(data: memoryview, views: Sequence[memoryview]) -> None:
    position = 0
    for view in flat(views):
        view[:] = data[position : position + view.nbytes]
        position += view.nbytes


class ObjectWriter(ABC):
    """Positional writes to one new object of known size.

    Life: ``Storage.writer`` -> ``write_at`` of disjoint ranges that cover the object, in any order
    and concurrently -> ``complete`` or ``abort`` (once). A writer from ``Storage.join_writer`` ends
    in ``release`` or ``abort`` before the opener completes.

    Attributes:
        size: Bytes of the finished object.
        token: Opaque; ``Storage.join_writer`` in any process or rank joins the object with it.
    """

    key: str
    size: int
    token: bytes

    @abstractmethod
    async def write_at(
        self, offset: int, views: Sequence[memoryview], crc32c: int | None = None
    ) -> None:
        """Writes ``views`` back to back at byte ``offset``.

        The views are not kept. After a failure, the range may be written again.
        Cancellation: the range may hold any mixture of old and new bytes; the object can only be
        aborted.

        Args:
            views: C-contiguous; at least ``Capabilities.least_write_bytes(size)`` bytes, unless
                they end the object.
            crc32c: CRC32C of all bytes, if known.

        Raises:
            StorageError: Retryable if ``checks_crc32c`` and other bytes arrived: write the range
                again.
        """

    def write_at_blocking(self, offset: int, views: Sequence[memoryview]) -> None:
        """``write_at`` for worker threads; only if ``has_blocking_io``."""
        raise NotImplementedError

    async def reuse(self, offset: int, views: Sequence[memoryview], crc32c: int) -> bool:
        """Takes ``views`` from an ``older`` object if the storage finds the same checksum there.

        True guarantees as much as ``write_at``. After False, the bytes must be written.

        Raises:
            StorageError: Retryable; ask again.
        """
        return False

    async def copy_from(self, offset: int, key: str, start: int, stop: int) -> int | None:
        """Copies bytes ``[start, stop)`` of an object of the source to byte ``offset``.

        Only for writers of ``Storage.copying_writer``. Guarantees as much as ``write_at``; the
        bytes do not pass through this process, or at least are not checked by it.

        Returns:
            The CRC32C of the copied bytes, as the storage reports it, or None.

        Raises:
            ObjectNotFound: No such object.
            ChecksumMismatch, StorageError: The object ends before ``stop``.
            StorageError: The copy failed.
        """
        raise NotImplementedError

    @abstractmethod
    async def complete(self) -> None:
        """Makes the object readable under its key, and durable.

        The object survives a crash of this process and, if the storage is ``durable``, of the
        machine. Atomicity: on object stores, the key appears here, whole; on file systems, a
        partial file may be visible before.
        """

    @abstractmethod
    async def release(self) -> None:
        """Ends a joined writer. Its bytes are durable after the opener's ``complete``."""

    @abstractmethod
    async def abort(self) -> None:
        """Frees the written bytes as far as possible. Never raises StorageError."""


class BackendWriter(ObjectWriter):
    """State and errors of the built-in writers.

    ``is_opener`` is False for a joined writer.
    """

    def __init__(self, key: str, size: int, token: bytes, *, url: str, is_opener: bool) -> None:
        self.key = key
        self.size = size
        self.token = token
        self._url = url
        self._is_opener = is_opener
        self._has_ended = False

    async def release(self) -> None:
        self._require_joined()
        self._has_ended = True
        await anyio.lowlevel.checkpoint()

    def _check_write(self, offset: int, views: Sequence[memoryview]) -> int:
        """Returns the end of a write, which must be inside an open object."""
        return self._check_range(offset, offset + num_bytes(views))

    def _check_range(self, offset: int, stop: int) -> int:
        if offset < 0 or stop > self.size:
            raise UsageError(f"[{offset}, {stop}) is outside of {self.key!r}, {self.size} bytes")
        if self._has_ended:
            raise self._ended("write_at")
        return stop

    def _require_opener(self) -> None:
        if not self._is_opener:
            raise UsageError(f"{self.key!r}: only the opener of an object completes it")

    def _require_joined(self) -> None:
        if self._is_opener:
            raise UsageError(f"{self.key!r}: the opener of an object completes or aborts it")

    def _ended(self, op: str) -> StorageError:
        return self._error(op, ENDED)

    def _error(self, op: str, detail: str, *, retryable: bool = False) -> StorageError:
        return StorageError(
            op=op, key=self.key, backend=self._url, detail=detail, retryable=retryable
        )


class Storage(ABC):
    """One place under one URL. The module's docstring has the rules.

    Attributes:
        url: For messages; without credentials.
        capabilities: Constant.
    """

    url: str
    capabilities: Capabilities

    @abstractmethod
    async def put(self, key: str, views: Sequence[memoryview]) -> None:
        """Writes a small object, replacing an older one.

        Atomicity: a reader sees the older or the new object, even after a crash. Durable.
        """

    @abstractmethod
    async def put_if_absent(self, key: str, data: bytes) -> None:
        """Creates a small object unless the key exists.

        Atomicity: of concurrent callers, in any process, exactly one succeeds; a reader sees
        nothing or the whole object. Durable.

        Raises:
            ObjectExists: The key exists; it is unchanged.
        """

    @abstractmethod
    async def writer(self, key: str, size: int, *, older: Sequence[str] = ()) -> ObjectWriter:
        """Opens a new object of ``size`` bytes for positional writes.

        Args:
            older: Sources of ``ObjectWriter.reuse``, the newest first: keys of objects of dead
                writers, complete or not. If such a writer is still alive, it may fail.

        Raises:
            ObjectExists: The key exists, and the backend can detect that cheaply. Others raise it
                in ``write_at`` or ``complete``, or replace the object.
        """

    async def copying_writer(
        self, key: str, size: int, *, source: Storage, sample: str
    ) -> ObjectWriter | None:
        """Opens a new object that ``copy_from`` may fill with ranges of objects in ``source``.

        Args:
            source: The storage to copy from; may be wrapped.
            sample: Key of an object in ``source``, to find out whether the storage copies it.

        Returns:
            The writer, or None if the storage cannot copy from ``source``.

        Raises:
            ObjectExists: See ``writer``.
        """
        return None

    @abstractmethod
    async def join_writer(self, token: bytes) -> ObjectWriter:
        """Returns a writer to an object that another party opened.

        After the opener's abort, this call or a write raises ``StorageError``; or the written bytes
        stay invisible and are deleted with the key's folder.

        Raises:
            UsageError: ``has_joined_writers`` is False.
        """

    @abstractmethod
    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Returns the bytes ``[start, stop)`` of an object; if ``stop`` is None, to its end.

        Raises:
            ObjectNotFound: No such object.
            ChecksumMismatch: The object ends before ``stop``.
        """

    @abstractmethod
    async def read_into(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        """Fills ``views`` back to back from byte ``offset`` on.

        Raises:
            ObjectNotFound: No such object.
            ChecksumMismatch: The object ends before the views are full; their content is
                unspecified.
        """

    def read_into_blocking(
        self, key: str, offset: int, batches: Iterable[Sequence[memoryview]]
    ) -> None:
        """``read_into`` for worker threads; only if ``has_blocking_io``.

        Requests a batch when the previous one is full, so a generator can process bytes while they
        are in the CPU's cache.
        """
        raise NotImplementedError

    @abstractmethod
    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Yields the objects whose key starts with the string ``prefix``, in key order.

        Incomplete objects may appear. A place that does not exist is empty.
        """

    @abstractmethod
    async def delete(self, keys: Sequence[str]) -> None:
        """Deletes objects, and leftovers of writers that died.

        Ignores missing keys. Folders vanish with their last object.
        """

    async def list_folders(self, folder: str = "") -> Sequence[str]:
        """Returns the sorted names of the folders directly in ``folder``; ``""`` is the root.

        ``a/b/c`` is in the folder ``a/b``, which is in ``a``. Includes empty folders of storages
        that have them.
        """
        start = f"{folder}/" if folder else ""
        keys = [info.key.removeprefix(start) async for info in self.list(start)]
        return sorted({key.partition("/")[0] for key in keys if "/" in key})

    async def delete_folder(self, folder: str) -> Sequence[str]:
        """Deletes a folder with all objects below it; returns their keys.

        A missing folder is ignored. Cancellation: some objects are deleted.
        """
        keys = [info.key async for info in self.list(f"{check_key(folder)}/")]
        await self.delete(keys)
        return keys

    @abstractmethod
    async def stat(self, key: str) -> ObjectInfo:
        """Returns the size and the modification time of one object.

        Raises:
            ObjectNotFound: No such object.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Releases clients, connections and descriptors. Idempotent. No other call may follow."""


class StorageFactory(Protocol):
    """An entry of the entry-point group ``actorsnap.storage``, by scheme.

    Does no I/O. An unused storage need not be closed.
    """

    def __call__(self, url: str, context: StorageContext) -> Storage: ...


async def size_below(storage: Storage, prefix: str) -> int:
    """Returns the bytes of all objects whose keys begin with ``prefix``."""
    return sum([info.size async for info in storage.list(prefix)])


async def for_each(
    items: Iterable[T], perform: Callable[[T], Awaitable[object]], *, at_once: int
) -> None:
    """Awaits ``perform`` for the items in order, ``at_once`` at a time.

    Raises:
        ExceptionGroup: Errors of ``perform``; the others were cancelled.
        RuntimeError: Some have not ended: a task group swallows a ``CancelledError`` even without a
            cancellation.
    """
    waiting = iter(items)
    num_begun = num_done = 0

    async def work(first: T) -> None:
        nonlocal num_begun, num_done
        for item in chain([first], waiting):
            num_begun += 1
            await perform(item)
            num_done += 1

    async with anyio.create_task_group() as tasks:
        for item in islice(waiting, at_once):
            tasks.start_soon(work, item)
    if num_done != num_begun:
        await anyio.lowlevel.checkpoint_if_cancelled()
        raise RuntimeError(f"{num_begun - num_done} operations ended without a result or an error")


async def try_each(
    items: Iterable[T], perform: Callable[[T], Awaitable[object]], *, at_once: int
) -> None:
    """``for_each``, but a failure does not stop the others; raises the first one."""
    failures: list[ActorSnapError] = []

    async def attempt(item: T) -> None:
        try:
            await perform(item)
        except ActorSnapError as error:
            failures.append(error)

    await for_each(items, attempt, at_once=at_once)
    if failures:
        raise failures[0]


def ends_this_task(error: BaseException) -> bool:
    """Whether an exception ends its coroutine: the task was cancelled or is being closed.

    Other ``CancelledError`` are failures: aiohttp raises one when its session is closed.
    """
    if isinstance(error, Exception):
        return False
    if isinstance(error, GeneratorExit) and not _runs_in_a_task():
        return True  # garbage collection of an unfinished coroutine
    cancelled = anyio.get_cancelled_exc_class()
    if isinstance(error, BaseExceptionGroup):
        is_cancelled = error.subgroup(cancelled) is not None
    else:
        is_cancelled = isinstance(error, cancelled)
    return is_cancelled and anyio.current_effective_deadline() == -math.inf


def _runs_in_a_task() -> bool:
    try:
        anyio.get_current_task()
    except (AttributeError, RuntimeError):  # no task, no event loop
        return False
    return True
