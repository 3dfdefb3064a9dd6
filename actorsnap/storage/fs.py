"""Storage in a folder of a POSIX file system: plain paths, ``fs://path``, ``file:///path``.

Decides how each verb becomes system calls that survive a crash; implements the write order of
``docs/format.md`` for file systems. The path is taken verbatim: no ``%`` decoding, no ``~``.
Must not know: snapshots, attempts, retries.

Rules:

- A key is a path below the root. Thus ``a`` and ``a/b`` cannot both exist, unlike on object
  stores, and a component has at most 255 bytes.
- Objects of writers lie under their final key from the start; nothing refers to them before
  they are complete. ``put`` and ``put_if_absent`` write ``.<name>.<nonce>.tmp`` beside the
  key first (the leading dot is not doubled: ``.actorsnap`` has ``.actorsnap.<nonce>.tmp``).
  Of a crash, such a temporary may be left. ``list`` shows it like any other object, and
  ``delete`` takes it away, so that a collector of garbage needs no verb of its own.
- Durable means: the file is fsynced, then its folder, then each folder above it, up to the
  parent of the root, whose entries this instance has not yet seen on disk.
- ``list`` passes over symbolic links and never leaves the root; other verbs follow links that
  someone else placed there.
- Folders vanish with their last object, the root too. Creators that lose a race against this
  make the folder again.

All system calls run through ``context.run_blocking``. Functions that run on a worker thread
end in ``_blocking`` or are plain functions below the classes.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import logging
import os
import secrets
import stat
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import anyio

from actorsnap.errors import (
    AccessDenied,
    ChecksumMismatch,
    ObjectExists,
    ObjectNotFound,
    StorageError,
    StorageFull,
    UsageError,
)
from actorsnap.storage.base import (
    Capabilities,
    ObjectInfo,
    ObjectWriter,
    Storage,
    StorageContext,
    check_key,
)
from actorsnap.storage.vectored import num_bytes, pread_into, pwrite_from

__all__ = ["FsStorage", "open_fs"]

logger = logging.getLogger(__name__)

# Creating a file loses against a concurrent prune of its folder at most this often.
_CREATE_TRIES = 100
# Objects per thread hop of list and delete: long enough to be cheap, short enough to cancel.
_BATCH = 256
# How long cleanup may wait for a worker thread when the caller is cancelled.
_CLEANUP_S = 30.0
# One read of the kernel returns at most this.
_MAX_READ = 0x7FFFF000
_NAME_MAX = 255

_LINK_UNSUPPORTED = {
    errno.EPERM,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EMLINK,
    errno.EINVAL,
}
_RENAME_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
_RETRYABLE = {
    errno.EAGAIN,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ESTALE,
    errno.ETIMEDOUT,
}
_READING = {"get", "read_into", "stat", "join_writer"}


def open_fs(url: str, context: StorageContext) -> FsStorage:
    """Opens a folder. It need not exist; the first write creates it and its parents.

    Raises:
        UsageError: the URL names no path or a remote host, or options were given.
    """
    if context.options:
        names = ", ".join(sorted(map(str, context.options)))
        raise UsageError(f"file system storage takes no storage_options, but got: {names}")
    path = url
    if url.startswith("fs://"):
        path = url.removeprefix("fs://")
    elif url.startswith("file://"):
        path = url.removeprefix("file://").removeprefix("localhost")
        if not path.startswith("/"):
            raise UsageError(
                f"{url!r} names a host; a local file URL has three slashes: file:///path"
            )
    if not path:
        raise UsageError(f"{url!r} names no path")
    return FsStorage(path, context)


class FsStorage(Storage):
    """Objects as files below a root folder. The module's docstring has the rules."""

    def __init__(self, root: str, context: StorageContext) -> None:
        # Absolute now: the process may change its working folder while a save is running.
        # (getcwd only looks into the kernel's memory; abspath counts as blocking for any path.)
        self.root = os.path.normpath(root if os.path.isabs(root) else f"{os.getcwd()}/{root}")
        self.url = self.root
        self.capabilities = Capabilities(has_blocking_io=True)
        self._run = context.run_blocking
        self._durable = context.durable
        self._folders = _Folders(self.root, durable=context.durable)
        self._open: weakref.WeakSet[_Descriptor] = weakref.WeakSet()

    async def put(self, key: str, views: Sequence[memoryview]) -> None:
        """Writes a whole small object, replacing an older one.

        Atomicity: by rename of a temporary. Cancellation: the object is the old one or the
        new one; no temporary is left.

        Raises:
            StorageFull: no space is left; the older object is unchanged.
            AccessDenied: the folder cannot be written.
            StorageError: the operation failed. If only the last fsync failed, the new object
                may be visible.
        """
        await self._run(self._put_blocking, check_key(key), views)

    def _put_blocking(self, key: str, views: Sequence[memoryview]) -> None:
        with self._mapped("put", key):
            path = self._path(key)
            with self._temporary(path, views) as temporary:
                os.rename(temporary, path)
            self._folders.sync(os.path.dirname(path))

    async def put_if_absent(self, key: str, data: bytes) -> None:
        """Creates a whole small object unless the key exists.

        Atomicity: by a hard link to a temporary, or an exclusive rename where links are not
        supported. Cancellation: the object exists whole or not at all.

        Raises:
            ObjectExists: the key exists; it is unchanged.
            StorageFull: no space is left.
            AccessDenied: the folder cannot be written.
            StorageError: the operation failed, or the file system has neither hard links nor
                an exclusive rename. If only the last fsync failed, the object may be visible.
        """
        await self._run(self._put_if_absent_blocking, check_key(key), data)

    def _put_if_absent_blocking(self, key: str, data: bytes) -> None:
        with self._mapped("put_if_absent", key):
            path = self._path(key)
            with self._temporary(path, [memoryview(data)]) as temporary:
                _publish_exclusively(temporary, path)
            self._folders.sync(os.path.dirname(path))

    async def writer(self, key: str, size: int) -> ObjectWriter:
        """Creates the file at its full size, for positional writes.

        Cancellation: nothing is left.

        Raises:
            ObjectExists: the key exists, complete or not.
            StorageFull, AccessDenied, StorageError: it cannot be created.
        """
        if size < 0:
            raise UsageError(f"an object cannot have {size} bytes")
        writer = _FsWriter(self, check_key(key), size, is_opener=True)
        try:
            await self._run(writer._create_blocking)
        except BaseException:
            # Cancelled after the file was created: nobody else can take it away.
            if writer._is_created:
                with anyio.move_on_after(_CLEANUP_S, shield=True):
                    await self._run(writer._discard_blocking)
            writer._descriptor.close_quietly()
            raise
        return writer

    async def join_writer(self, token: bytes) -> ObjectWriter:
        """Opens the file of another party's writer. Its ``abort`` only closes it here.

        Each of its writes is durable when it returns, if the storage is: the opener's fsync
        does not reach what another machine still holds in its cache.

        Raises:
            ObjectNotFound: the other party aborted.
            AccessDenied, StorageError: it cannot be opened.
        """
        writer = _FsWriter(self, check_key(os.fsdecode(token)), 0, is_opener=False)
        try:
            await self._run(writer._join_blocking)
        except BaseException:
            writer._descriptor.close_quietly()
            raise
        return writer

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes ``[start, stop)`` of an object.

        Raises:
            ObjectNotFound: no such object.
            ChecksumMismatch: the object ends before ``stop``, or before ``start``.
            AccessDenied, StorageError: it cannot be read.
        """
        if start < 0 or (stop is not None and stop < start):
            raise UsageError(f"not a range of bytes: [{start}, {stop})")
        return await self._run(self._get_blocking, check_key(key), start, stop)

    def _get_blocking(self, key: str, start: int, stop: int | None) -> bytes:
        with self._mapped("get", key), _opened_for_reading(self._path(key)) as fd:
            size = os.fstat(fd).st_size
            end = size if stop is None else stop
            if max(start, end) > size:
                raise _truncated(key, max(start, end), size)
            parts: list[bytes] = []
            position = start
            while position < end:
                part = os.pread(fd, min(end - position, _MAX_READ), position)
                if not part:  # somebody cut the file after fstat
                    raise _truncated(key, end, position)
                parts.append(part)
                position += len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)

    async def read_into(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        """Fills ``views`` from byte ``offset`` on.

        Cancellation: comes through only when the read has ended, so the views are free.

        Raises:
            ObjectNotFound: no such object.
            ChecksumMismatch: the object ends before the views are full.
            AccessDenied, StorageError: it cannot be read.
        """
        await self._run(self.read_into_blocking, key, offset, views)

    def read_into_blocking(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        """``read_into`` for worker threads."""
        check_key(key)
        if offset < 0:
            raise UsageError(f"not an offset: {offset}")
        with self._mapped("read_into", key), _opened_for_reading(self._path(key)) as fd:
            wanted = num_bytes(views)
            size = os.fstat(fd).st_size
            # pread_into would find the end, too, but not for an empty read beyond it.
            if offset + wanted > size:
                raise _truncated(key, offset + wanted, size)
            done = pread_into(fd, offset, views)
            if done != wanted:
                raise _truncated(key, offset + wanted, offset + done)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Objects in key order, temporaries included, folder by folder.

        Holds one folder's names in memory at a time and no descriptor between two items.

        Raises:
            AccessDenied, StorageError: a folder cannot be read, or the root is a file.
        """
        infos = self._walk(prefix)
        while True:
            batch = await self._run(self._list_batch_blocking, prefix, infos)
            for info in batch:
                yield info
            if len(batch) < _BATCH:
                return

    def _list_batch_blocking(
        self, prefix: str, infos: Iterator[ObjectInfo]
    ) -> Sequence[ObjectInfo]:
        with self._mapped("list", prefix):
            return tuple(itertools.islice(infos, _BATCH))

    def _walk(self, prefix: str) -> Iterator[ObjectInfo]:
        parent, _, name_prefix = prefix.rpartition("/")
        if parent:
            try:
                check_key(parent)
            except UsageError:
                return  # no key starts with it
        elif prefix.startswith("/"):
            return
        try:
            folder = self._path(parent) if parent else self.root
            yield from _walk(folder, f"{parent}/" if parent else "", name_prefix)
        except NotADirectoryError:
            # The prefix goes through an object, so it names nothing; unless the root is one.
            if os.path.isdir(self.root):
                return
            raise

    async def delete(self, keys: Sequence[str]) -> None:
        """Deletes objects, then folders that became empty, up to the root.

        All keys are tried; the first error is raised at the end. Cancellation: some are
        deleted.

        Raises:
            AccessDenied, StorageError: an object cannot be deleted.
        """
        for key in keys:
            check_key(key)
        failures: Sequence[StorageError] = ()
        for start in range(0, len(keys), _BATCH):
            failures = [
                *failures,
                *await self._run(self._delete_blocking, keys[start : start + _BATCH]),
            ]
        if failures:
            raise failures[0]

    def _delete_blocking(self, keys: Sequence[str]) -> Sequence[StorageError]:
        failures = []
        folders = set()
        for key in keys:
            try:
                with self._mapped("delete", key):
                    path = self._path(key)
                    folders.add(os.path.dirname(path))
                    _unlink_object(path)
            except ObjectNotFound:
                pass
            except StorageError as error:
                failures.append(error)
        # The deepest first, so that each folder is looked at once its children are gone.
        for folder in sorted(folders, key=len, reverse=True):
            self._folders.prune(folder)
        return failures

    async def stat(self, key: str) -> ObjectInfo:
        """Size and time of one object.

        Raises:
            ObjectNotFound: no such object.
            AccessDenied, StorageError: it cannot be looked at.
        """
        return await self._run(self._stat_blocking, check_key(key))

    def _stat_blocking(self, key: str) -> ObjectInfo:
        with self._mapped("stat", key):
            found = os.stat(self._path(key))
            if not stat.S_ISREG(found.st_mode):
                raise FileNotFoundError(errno.ENOENT, "not a regular file")
            return ObjectInfo(key=key, size=found.st_size, modified_s=found.st_mtime)

    async def aclose(self) -> None:
        """Closes the descriptors of writers that were neither completed nor aborted."""
        descriptors = [*self._open]
        self._open.clear()
        if descriptors:
            with anyio.move_on_after(_CLEANUP_S, shield=True):
                await self._run(_close_all, descriptors)

    def _path(self, key: str) -> str:
        path = os.path.join(self.root, key)
        os.fsencode(path)  # raises for lone surrogates, which no file name can hold
        return path

    @contextmanager
    def _mapped(self, op: str, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise _storage_error(error, op=op, key=key, root=self.root) from error
        except UnicodeEncodeError as error:
            raise StorageError(
                op=op, key=key, backend=self.url, detail="the key is no valid file name"
            ) from error

    def _create(self, path: str) -> int:
        """Creates ``path`` and the folders that it needs."""
        folder = os.path.dirname(path)
        self._folders.note(folder)
        for _ in range(_CREATE_TRIES):
            try:
                return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            except FileNotFoundError:
                # Not there yet, or pruned by a concurrent delete between the two calls.
                self._folders.make(folder)
        raise OSError(errno.ESTALE, "the folder vanishes again and again: who deletes it?", path)

    @contextmanager
    def _temporary(self, path: str, views: Sequence[memoryview]) -> Iterator[str]:
        """A complete, fsynced file beside ``path``; gone afterwards unless it was renamed."""
        temporary = _temporary_path(path)
        fd = self._create(temporary)
        try:
            try:
                pwrite_from(fd, 0, views)
                if self._durable:
                    os.fsync(fd)
            finally:
                os.close(fd)
            yield temporary
        finally:
            # A temporary that cannot be removed is garbage, not a failure of the operation,
            # which may just have made its object visible.
            with suppress(OSError):
                os.unlink(temporary)


class _FsWriter(ObjectWriter):
    """A file at its final key. States: open -> completed or aborted."""

    def __init__(self, storage: FsStorage, key: str, size: int, *, is_opener: bool) -> None:
        self.key = key
        self.size = size
        with storage._mapped("writer", key):
            self._path = storage._path(key)
        self.token = os.fsencode(key)
        self._storage = storage
        self._is_opener = is_opener
        self._is_created = False
        self._is_ended = False
        self._descriptor = _Descriptor()

    async def write_at(self, offset: int, views: Sequence[memoryview]) -> None:
        """Writes ``views`` at byte ``offset``.

        Raises:
            StorageFull, StorageError: the write failed, or the writer was ended.
        """
        await self._storage._run(self.write_at_blocking, offset, views)

    def write_at_blocking(self, offset: int, views: Sequence[memoryview]) -> None:
        """``write_at`` for worker threads."""
        stop = offset + num_bytes(views)
        if offset < 0 or stop > self.size:
            raise UsageError(f"[{offset}, {stop}) is outside of {self.key!r}, {self.size} bytes")
        with self._mapped("write_at"), self._descriptor.use() as fd:
            pwrite_from(fd, offset, views)
            if self._storage._durable and not self._is_opener:
                os.fsync(fd)

    async def complete(self) -> None:
        """Fsyncs the file, then the folders that lead to it, and closes it.

        Cancellation: comes through when the work is done; ``abort`` still removes the file.

        Raises:
            StorageError: something is not durable, or the writer was ended. Abort it.
        """
        if not self._is_opener:
            raise UsageError(f"{self.key!r}: only the opener of an object completes it")
        await self._storage._run(self._complete_blocking)
        self._is_ended = True

    def _complete_blocking(self) -> None:
        with self._mapped("complete"):
            with self._descriptor.use() as fd:
                if self._storage._durable:
                    os.fsync(fd)
            self._storage._folders.sync(os.path.dirname(self._path))
            # Network file systems report late failures of writes here.
            self._descriptor.close()

    async def abort(self) -> None:
        """Closes the file and, for the opener, removes it. Without effect after an ending."""
        if self._is_ended:
            return
        self._is_ended = True
        with anyio.move_on_after(_CLEANUP_S, shield=True):
            await self._storage._run(self._discard_blocking)

    def _create_blocking(self) -> None:
        with self._mapped("writer"):
            fd = self._storage._create(self._path)
            self._adopt(fd)
            self._is_created = True
            try:
                os.ftruncate(fd, self.size)
            except BaseException:
                self._is_created = False
                self._discard_blocking()
                raise

    def _join_blocking(self) -> None:
        with self._mapped("join_writer"):
            self._adopt(os.open(self._path, os.O_WRONLY))
            with self._descriptor.use() as fd:
                self.size = os.fstat(fd).st_size

    def _discard_blocking(self) -> None:
        # The name goes first: what cannot be closed in time must at least not be found.
        if self._is_opener:
            try:
                os.unlink(self._path)
            except FileNotFoundError:
                pass
            except OSError as error:
                logger.warning(
                    "%s: aborted object %s stays: %s", self._storage.url, self.key, error
                )
        self._descriptor.close_quietly()
        if self._is_opener:
            self._storage._folders.prune(os.path.dirname(self._path))

    def _adopt(self, fd: int) -> None:
        self._descriptor.open(fd)
        self._storage._open.add(self._descriptor)

    @contextmanager
    def _mapped(self, op: str) -> Iterator[None]:
        with self._storage._mapped(op, self.key):
            try:
                yield
            except _Closed:
                raise StorageError(
                    op=op,
                    key=self.key,
                    backend=self._storage.url,
                    detail="the writer was completed or aborted",
                ) from None


class _Closed(Exception):
    """The descriptor is closed or about to be."""


class _Descriptor:
    """A file descriptor that closes when asked to and no thread uses it any more.

    A number that is closed while a write is on its way may be reused for another file, and
    the write would land there. Closes itself when collected.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = -1
        self._users = 0
        self._is_closing = False

    def open(self, fd: int) -> None:
        self._fd = fd

    @contextmanager
    def use(self) -> Iterator[int]:
        with self._lock:
            if self._is_closing or self._fd < 0:
                raise _Closed
            self._users += 1
        try:
            yield self._fd
        finally:
            with self._lock:
                self._users -= 1
                fd = self._take()
            if fd >= 0:
                os.close(fd)

    def close(self) -> None:
        """Closes, or lets the last user close. Raises what ``close`` reports; idempotent."""
        with self._lock:
            self._is_closing = True
            fd = self._take()
        if fd >= 0:
            os.close(fd)

    def close_quietly(self) -> None:
        with suppress(OSError):
            self.close()

    def _take(self) -> int:
        if not self._is_closing or self._users:
            return -1
        fd, self._fd = self._fd, -1
        return fd

    def __del__(self) -> None:
        self.close_quietly()


class _Folders:
    """Makes and removes folders, and knows which of them still need an fsync.

    ``_unsynced`` maps a folder to the version of its newest entry that may not be on disk. A
    folder is struck off only if its version did not change during the fsync, and only after
    it: else a concurrent ``sync`` could return before the entry is durable.
    """

    def __init__(self, root: str, *, durable: bool) -> None:
        self._root = root
        self._durable = durable
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        self._unsynced: dict[str, int] = {}
        self._created_in: set[str] = set()
        self._versions = itertools.count()

    def note(self, folder: str) -> None:
        """Marks the way from the root's parent to ``folder``, on its first use.

        Also where the folders exist: who made them may have crashed before the fsync.
        """
        if not self._durable:
            return
        with self._lock:
            while folder not in self._seen:
                self._seen.add(folder)
                self._unsynced.setdefault(os.path.dirname(folder), next(self._versions))
                if folder == self._root:
                    break
                folder = os.path.dirname(folder)

    def make(self, folder: str) -> None:
        """Creates ``folder`` and what is missing above it.

        Raises:
            NotADirectoryError: one of them is a file.
            FileNotFoundError: concurrent deletes win too often.
        """
        wanted = [folder]
        for _ in range(_CREATE_TRIES + 2 * folder.count("/")):
            try:
                os.mkdir(wanted[-1])
            except FileNotFoundError:
                wanted.append(os.path.dirname(wanted[-1]))
                continue
            except FileExistsError:
                if not os.path.isdir(wanted[-1]) and os.path.lexists(wanted[-1]):
                    raise NotADirectoryError(errno.ENOTDIR, "is a file", wanted[-1]) from None
            else:
                parent = os.path.dirname(wanted[-1])
                with self._lock:
                    self._created_in.add(parent)
                    self._unsynced[parent] = next(self._versions)
            wanted.pop()
            if not wanted:
                return
        raise FileNotFoundError(errno.ENOENT, "folders vanish while they are made", folder)

    def sync(self, folder: str) -> None:
        """Makes the entries of ``folder``, and all that lead to it, durable."""
        if not self._durable:
            return
        is_first = True
        while True:
            with self._lock:
                version = self._unsynced.get(folder)
                is_ours = folder in self._created_in
            if is_first or version is not None:
                try:
                    _fsync_folder(folder)
                except PermissionError:
                    # A parent that others made and we cannot read is theirs to make durable.
                    if is_first or is_ours:
                        raise
                with self._lock:
                    if version is not None and self._unsynced.get(folder) == version:
                        del self._unsynced[folder]
            is_first = False
            parent = os.path.dirname(folder)
            if parent == folder:
                return
            folder = parent

    def prune(self, folder: str) -> None:
        """Removes ``folder`` and its parents, up to the root, while they are empty."""
        while True:
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                pass  # its parent may have been left empty by a crash
            except OSError:
                return  # not empty, or not ours to remove: no object is concerned
            with self._lock:
                self._seen.discard(folder)
            if folder == self._root:
                return
            folder = os.path.dirname(folder)


def _walk(folder: str, prefix: str, name_prefix: str = "") -> Iterator[ObjectInfo]:
    """The regular files below ``folder`` in key order; links are passed over."""
    found: list[tuple[str, os.DirEntry[str]]] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(name_prefix) and not entry.is_symlink():
                    # With its slash, a folder sorts where its keys do.
                    is_folder = entry.is_dir(follow_symlinks=False)
                    found.append((f"{entry.name}/" if is_folder else entry.name, entry))
    except FileNotFoundError:
        return
    found.sort(key=lambda item: item[0])
    for name, entry in found:
        if name.endswith("/"):
            try:
                yield from _walk(entry.path, prefix + name)
            except NotADirectoryError:
                continue  # replaced since the scan
        else:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # deleted, or a temporary renamed, since the scan
            if stat.S_ISREG(status.st_mode):
                yield ObjectInfo(key=prefix + name, size=status.st_size, modified_s=status.st_mtime)


@contextmanager
def _opened_for_reading(path: str) -> Iterator[int]:
    # O_NONBLOCK: opening a pipe that lies there must not hang; it does nothing to files.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise FileNotFoundError(errno.ENOENT, "not a regular file")
        yield fd
    finally:
        os.close(fd)


def _unlink_object(path: str) -> None:
    try:
        os.unlink(path)
    except (IsADirectoryError, PermissionError):
        # A folder is no object; Linux and macOS say so differently.
        if stat.S_ISDIR(os.lstat(path).st_mode):
            return
        raise


def _temporary_path(path: str) -> str:
    folder, name = os.path.split(path)
    ending = f".{secrets.token_hex(8)}.tmp"
    stem = os.fsencode(name if name.startswith(".") else f".{name}")[: _NAME_MAX - len(ending)]
    # A character may have been cut in the middle: drop the rest of it.
    return os.path.join(folder, stem.decode(errors="ignore") + ending)


def _publish_exclusively(temporary: str, path: str) -> None:
    """Gives the finished ``temporary`` the name ``path`` unless that exists.

    Raises:
        FileExistsError: it exists.
    """
    try:
        os.link(temporary, path)
    except FileExistsError:
        # NFS repeats a call whose answer was lost and then meets its own link.
        if not os.path.samestat(os.lstat(temporary), os.lstat(path)):
            raise
    except OSError as error:
        if error.errno not in _LINK_UNSUPPORTED:
            raise
        try:
            _rename_exclusively(temporary, path)
        except OSError as second:
            if second.errno not in _RENAME_UNSUPPORTED:
                raise
            raise OSError(
                errno.ENOTSUP,
                "the file system has neither hard links nor an exclusive rename, so a commit "
                "could not be atomic; store snapshots on another file system",
            ) from error


def _rename_exclusively(source: str, target: str) -> None:
    """``renameat2`` with ``RENAME_NOREPLACE``, which Python does not offer.

    Raises:
        OSError: ENOSYS where the C library lacks it; else what it reports.
    """
    function: Callable[..., int] | None = getattr(
        ctypes.CDLL(None, use_errno=True), "renameat2", None
    )
    if function is None:
        raise OSError(errno.ENOSYS, "no renameat2 in the C library")
    at_fdcwd, rename_noreplace = -100, 1
    if function(at_fdcwd, os.fsencode(source), at_fdcwd, os.fsencode(target), rename_noreplace):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), source, None, target)


def _fsync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network and FUSE file systems have no fsync for folders, and need none.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(fd)


def _close_all(descriptors: Sequence[_Descriptor]) -> None:
    for descriptor in descriptors:
        descriptor.close_quietly()


def _truncated(key: str, wanted: int, size: int) -> ChecksumMismatch:
    return ChecksumMismatch(
        key=key, detail=f"truncated: {wanted} bytes are needed, the object has {size}"
    )


def _storage_error(error: OSError, *, op: str, key: str, root: str) -> StorageError:
    """The one place where the system's errors become the package's."""
    number = error.errno or 0
    said = error.strerror or str(error)

    def make(kind: type[StorageError], detail: str) -> StorageError:
        return kind(
            op=op, key=key, backend=root, detail=detail, retryable=number in _RETRYABLE or None
        )

    if number == errno.ENOENT:
        return make(ObjectNotFound, "no such object")
    if number == errno.EEXIST:
        return make(ObjectExists, "the object exists already")
    if number == errno.ENOTDIR:
        if os.path.lexists(root) and not os.path.isdir(root):
            return make(StorageError, f"{root} is a file; name a folder")
        if op in _READING or op == "delete":
            return make(ObjectNotFound, "no such object")
        return make(StorageError, _parent_file(key, root))
    if number == errno.EISDIR:
        return make(StorageError, "a folder has this name: other keys begin with it")
    if number == errno.EROFS:
        return make(AccessDenied, f"{said}; remount it for writing or store elsewhere")
    if number in (errno.EACCES, errno.EPERM):
        return make(
            AccessDenied,
            f"{said}; check owner and mode of the folder, this process has uid {os.geteuid()}",
        )
    if number in (errno.ENOSPC, errno.EDQUOT):
        return make(StorageFull, f"{said}; {_free(root)}. Delete old snapshots or store elsewhere")
    if number == errno.ENAMETOOLONG:
        return make(
            StorageError, f"the key is too long: at most {_NAME_MAX} bytes between two slashes"
        )
    if number in (errno.EMFILE, errno.ENFILE):
        return make(StorageError, f"{said}; raise the limit of open files (ulimit -n)")
    return make(StorageError, said)


def _parent_file(key: str, root: str) -> str:
    parts = key.split("/")[:-1]
    for end in range(1, len(parts) + 1):
        parent = "/".join(parts[:end])
        if os.path.isfile(os.path.join(root, parent)):
            return f"a parent is a file: {parent!r} is an object, so no key can lie below it"
    return f"a parent of {root} is a file"


def _free(root: str) -> str:
    """What is left where ``root`` lies, in words; the root itself may not exist yet."""
    folder = root
    while folder != os.path.dirname(folder) and not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    try:
        status = os.statvfs(folder)
    except OSError:
        return "the free space is unknown"
    return f"{status.f_bavail * status.f_frsize} bytes are free"
