"""The storage seam: what a backend must do, and how strictly.

A storage is a flat, object-store shaped space under one URL (the snapshot's). Keys are
relative, ``/``-separated, free of empty, ``.`` and ``..`` components (``check_key``). Verbs
are stateless, except for ``writer``. All are safe to call concurrently from tasks of one
event loop. This module knows nothing of snapshots, tensors, retries or budgets; those are
policies (``wrappers.py``) or callers.

Every failure is raised as a ``StorageError`` subclass with ``op``, ``key`` and ``backend``. The
runtime turns any other exception, and an answer of another type, into one (``translated.py``), but
knows less about it. A backend never returns partial data as success.
``actorsnap.testing.StorageConformance`` is this docstring as a test suite; every backend, also a
stranger's, must pass it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from actorsnap.errors import StorageError, UsageError
from actorsnap.planning.packing import least_write_bytes

__all__ = [
    "Capabilities",
    "ObjectInfo",
    "ObjectWriter",
    "RunBlocking",
    "Storage",
    "StorageContext",
    "StorageFactory",
    "check_key",
]

T = TypeVar("T")


class RunBlocking(Protocol):
    """Runs a blocking function on a worker thread and awaits its result.

    Cancellation: the await is cancelled only after the function has returned, because the
    function may hold memory of the caller.
    """

    async def __call__(self, fn: Callable[..., T], /, *args: Any) -> T: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageContext:
    """What a backend is opened with.

    Attributes:
        options: The caller's ``storage_options``; unknown names are refused by the backend.
        run_blocking: Where blocking calls go; the loop is never blocked.
        run_waiting: The same for calls that wait for a network, and can be made to return: more
            of them run at a time than there are cores. None: ``run_blocking``.
        durable: False lets a backend skip fsync (scratch tiers).
        on_retry: Called on the loop with the error and the wait in seconds, whenever something is
            to be tried again; must not block.
        scratch: A folder for what a crash may leave of writing an object at the root: who
            collects the garbage of the folder's owner collects that, too. Empty for none.
    """

    run_blocking: RunBlocking
    run_waiting: RunBlocking | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    durable: bool = True
    on_retry: Callable[[StorageError, float], None] | None = None
    scratch: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What the planner and the actors may rely on.

    Attributes:
        has_blocking_io: ``Storage.read_into_blocking`` and ``ObjectWriter.write_at_blocking``
            may be called from any thread. Spares a thread hop per chunk; the async verbs
            must work all the same.
        min_write_bytes: Least size of a ``write_at``, but of the one that ends the object.
        max_writes: Most ranges that one object is written in, those of joined writers included;
            None for any number. See ``least_write_bytes``.
        max_object_bytes: Most bytes of an object; None for any number.
        has_joined_writers: Several ranks may write one object: ``join_writer`` works.
        checks_crc32c: A ``write_at`` whose bytes have another CRC32C than it says is refused.
        has_conditional_put: ``put_if_absent`` is atomic against every other writer.
        preferred_parallel_objects: How many objects written at once use the backend well.
    """

    has_blocking_io: bool = False
    min_write_bytes: int = 1
    max_writes: int | None = None
    max_object_bytes: int | None = None
    has_joined_writers: bool = True
    checks_crc32c: bool = False
    has_conditional_put: bool = True
    preferred_parallel_objects: int = 4

    def least_write_bytes(self, size: int) -> int:
        """The least size of a ``write_at`` to an object of ``size`` bytes, but for the one that
        ends it. The planner's chunks are no smaller, and so no more than ``max_writes``.

        ``offset // least_write_bytes(size)`` is another number for every write.
        """
        return least_write_bytes(
            size, min_write_bytes=self.min_write_bytes, max_writes=self.max_writes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """Key, size in bytes and modification time (seconds since the epoch, 0.0 if unknown)."""

    key: str
    size: int
    modified_s: float = 0.0


def check_key(key: str) -> str:
    """Returns ``key`` if it is well-formed.

    Raises:
        UsageError: it is empty, absolute, or has an empty, ``.`` or ``..`` component, a NUL
            or a backslash.
    """
    if not key or "\0" in key or "\\" in key or any(c in ("", ".", "..") for c in key.split("/")):
        raise UsageError(f"not a storage key: {key[:200]!r}")
    return key


class ObjectWriter(ABC):
    """Positional writes to one new object of known size.

    Life: ``Storage.writer`` -> ``write_at`` in any order and concurrently, of disjoint ranges
    that together cover the object, no smaller and no more of them than the capabilities allow
    -> ``complete`` or ``abort`` (once). A writer from ``Storage.join_writer`` ends in
    ``release`` or ``abort`` before the opener completes.

    Attributes:
        key: The object key.
        size: Bytes of the finished object.
        token: Opaque bytes by which ``Storage.join_writer``, in another process or on
            another rank, writes to the same object. Only the opener completes or aborts.
    """

    key: str
    size: int
    token: bytes

    @abstractmethod
    async def write_at(
        self, offset: int, views: Sequence[memoryview], crc32c: int | None = None
    ) -> None:
        """Writes ``views`` back to back at byte ``offset``.

        The views are read before this returns and not kept. The same range may be written
        again after a failure. Cancellation: the range may hold any mixture of old and new
        bytes; the object can only be aborted.

        Args:
            offset: In bytes, from the object's start.
            views: C-contiguous; together at least ``Capabilities.least_write_bytes(size)``, or up
                to the object's end.
            crc32c: Of all their bytes, if the caller knows it.

        Raises:
            StorageError: it failed; also, retryable, where ``checks_crc32c``: what arrived does
                not have this CRC32C. The range must be written again.
        """

    def write_at_blocking(self, offset: int, views: Sequence[memoryview]) -> None:
        """``write_at`` for worker threads; only where ``has_blocking_io``."""
        raise NotImplementedError

    async def reuse(self, offset: int, views: Sequence[memoryview], crc32c: int) -> bool:
        """Takes ``views`` from an older object instead of ``write_at``, if that has just them.

        Only where the object was opened with ``older`` ones. True promises as much as a
        ``write_at`` that has returned: the storage itself compared the bytes by a checksum. After
        False they must be written. To be overridden where a storage can copy by itself.

        Args:
            offset, views: See ``write_at``.
            crc32c: Of all their bytes.

        Raises:
            StorageError: the storage is to be asked again.
        """
        return False

    @abstractmethod
    async def complete(self) -> None:
        """Makes the object durable and readable under its key.

        When it returns, the object survives a crash of this process and, if the storage was
        opened ``durable``, of the machine. Atomicity: on object stores the key appears here,
        whole; on file systems a partial file may be seen before, which is why nothing refers
        to an object before it is complete.
        """

    @abstractmethod
    async def release(self) -> None:
        """Ends a joined writer; its opener does not call this.

        When it returns, what was written here is as durable as ``complete`` makes what the
        opener wrote, once that returns too.
        """

    @abstractmethod
    async def abort(self) -> None:
        """Frees what was written, as far as the storage allows. Never raises StorageError."""


class Storage(ABC):
    """One place under one URL. See the module's docstring for the rules.

    Attributes:
        url: For messages; never has credentials in it.
        capabilities: Fixed for the life of the instance.
    """

    url: str
    capabilities: Capabilities

    @abstractmethod
    async def put(self, key: str, views: Sequence[memoryview]) -> None:
        """Writes a whole small object, replacing an older one.

        Atomicity: a reader sees the older object or the new one, never a mixture, also after
        a crash. Durable when it returns.
        """

    @abstractmethod
    async def put_if_absent(self, key: str, data: bytes) -> None:
        """Creates a whole small object unless the key exists.

        Atomicity: of any number of concurrent callers, in any processes, exactly one
        succeeds, and a reader sees nothing or the whole object. Durable when it returns.

        Raises:
            ObjectExists: the key exists; it is unchanged.
        """

    @abstractmethod
    async def writer(self, key: str, size: int, *, older: Sequence[str] = ()) -> ObjectWriter:
        """Opens a new object of ``size`` bytes for positional writes.

        Args:
            key: Its name.
            size: In bytes.
            older: Names that dead writers gave to objects that may have the same bytes, the newest
                first. Complete or not, a storage that can makes them a source for
                ``ObjectWriter.reuse``; a writer of them that lives after all may fail then.

        Raises:
            ObjectExists: where the backend can tell cheaply that the key exists. Some tell when
                the object is made, in ``write_at`` or ``complete``; some replace it then.
        """

    @abstractmethod
    async def join_writer(self, token: bytes) -> ObjectWriter:
        """A writer to an object that another party opened. It must not complete or abort.

        Who comes late, after the opener has aborted, gets a ``StorageError`` here or when he
        writes; or what he writes is seen by nobody, and goes with the folder of the key.

        Raises:
            UsageError: not ``has_joined_writers``.
        """

    @abstractmethod
    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes ``[start, stop)`` of an object; to its end where ``stop`` is None.

        Raises:
            ObjectNotFound: no such object.
            ChecksumMismatch: the object ends before ``stop``.
        """

    @abstractmethod
    async def read_into(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        """Fills all ``views``, back to back, from byte ``offset`` on.

        Raises:
            ObjectNotFound: no such object.
            ChecksumMismatch: the object ends before the views are full. The views' content
                is then unspecified.
        """

    def read_into_blocking(
        self, key: str, offset: int, batches: Iterable[Sequence[memoryview]]
    ) -> None:
        """``read_into`` for worker threads; only where ``has_blocking_io``.

        Batches are filled one after the other. Each is asked for when the one before is full,
        so that a generator may look at bytes while they are in the CPU's cache.
        """
        raise NotImplementedError

    @abstractmethod
    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """All objects whose key starts with ``prefix`` (a string prefix, ``""`` for all), in
        key order. Objects of writers that are not complete may or may not appear. A place
        that does not exist lists as empty. Read-after-write: completed objects appear."""

    @abstractmethod
    async def delete(self, keys: Sequence[str]) -> None:
        """Deletes objects, and what writers that died before they were complete left of them, where
        a storage keeps that. Keys that do not exist are passed over. Folders that become empty
        vanish with their last object."""

    async def list_folders(self, folder: str = "") -> Sequence[str]:
        """The names of the folders directly in ``folder``, sorted; of the root for ``""``.

        A folder is what keys have before a slash: ``a/b/c`` lies in ``a/b``, which lies in
        ``a``. Where folders exist by themselves, empty ones are named, too. To be overridden
        where a storage can tell without listing all objects.
        """
        start = f"{folder}/" if folder else ""
        keys = [info.key.removeprefix(start) async for info in self.list(start)]
        return sorted({key.partition("/")[0] for key in keys if "/" in key})

    async def delete_folder(self, folder: str) -> Sequence[str]:
        """Deletes all objects in ``folder`` and below; returns their keys.

        Where folders exist by themselves, the empty ones vanish, too. A folder that does not
        exist is passed over. Cancellation: some are deleted.
        """
        keys = [info.key async for info in self.list(f"{check_key(folder)}/")]
        await self.delete(keys)
        return keys

    @abstractmethod
    async def stat(self, key: str) -> ObjectInfo:
        """Size and time of one object.

        Raises:
            ObjectNotFound: no such object.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Releases clients, connections and descriptors. Idempotent; other calls may not
        follow."""


class StorageFactory(Protocol):
    """What the entry-point group ``actorsnap.storage`` names, per scheme.

    It does no I/O. A storage of which no verb was called need not be closed: saves open one to
    check URL and options.
    """

    def __call__(self, url: str, context: StorageContext) -> Storage: ...
