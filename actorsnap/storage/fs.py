# SPDX-License-Identifier: Apache-2.0
"""Storage in a folder of a POSIX file system: plain paths, ``fs://path``, ``file:///path``.

Implements the write order of ``docs/format.md``. The path is taken verbatim: no ``%`` decoding, no
``~``. Functions named ``..._blocking`` run on worker threads.

- A key is a path below the root: ``a`` and ``a/b`` cannot both exist; a component has at most 255
  bytes.
- Writers create objects under their final key. ``put`` and ``put_if_absent`` write
  ``.<name>.<nonce>.tmp`` first (a leading dot is not doubled), next to the key or, at the root, in
  ``scratch``. Temporaries left by a crash are listed and deleted like objects.
- Durable means: fsynced are the file, its folder, and each folder above it, up to the root's
  parent, whose entries this instance has not yet seen on disk. A deletion is fsynced if the
  object's folder stays.
- ``list`` ignores symbolic links; other verbs follow them.
- Folders, including the root, vanish with their last object. A writer that loses this race creates
  them again.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, MutableSequence, Sequence
from contextlib import contextmanager, suppress

import anyio

from actorsnap.errors import ObjectNotFound, StorageError, UsageError
from actorsnap.log import Log
from actorsnap.storage.base import (
    CLEANUP_S,
    BackendWriter,
    Capabilities,
    ObjectInfo,
    ObjectWriter,
    Storage,
    StorageContext,
    check_key,
    check_no_options,
    check_range,
    check_size,
    num_bytes,
    range_end,
    slice_views,
    truncated,
)
from actorsnap.storage.posix import (
    CREATE_TRIES,
    Descriptor,
    Folders,
    copy_range,
    open_for_reading,
    pread_into,
    publish_exclusively,
    pwrite_from,
    simplify_path,
    temporary_path,
    translate_os_error,
    unlink_object,
    walk,
    working_folder,
)
from actorsnap.storage.wrapper import unwrapped
from actorsnap.wording import printable

logger = Log(__name__)

_MIN_COPY_BYTES = 64 << 10
"""Below this a read and a write cost no more than the copy's system calls."""

# Objects per thread hop of list and delete: cheap, and soon cancelled.
_BATCH = 256


def open_fs(url: str, context: StorageContext) -> FsStorage:
    check_no_options(context, "file system")
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
    """Objects as files below a root folder. See the module."""

    def __init__(self, root: str, context: StorageContext) -> None:
        # Absolute: the process may change its working folder during a save.
        self.root = simplify_path(root if os.path.isabs(root) else f"{working_folder(root)}/{root}")
        self.url = printable(self.root)
        self.capabilities = Capabilities(has_blocking_io=True, min_copy_bytes=_MIN_COPY_BYTES)
        self._run = context.run_blocking
        self._durable = context.durable
        self._scratch = context.scratch
        self._folders = Folders(self.root, durable=context.durable)
        self._open: weakref.WeakSet[Descriptor] = weakref.WeakSet()

    async def put(self, key: str, views: Sequence[memoryview]) -> None:
        """Writes a small object, replacing an older one.

        Atomicity: by rename. Cancellation: the object is the old or the new one.

        Raises:
            StorageError: After a failed fsync the new object may be visible.
        """
        await self._run(self._put_blocking, "put", check_key(key), views, os.rename)

    async def put_if_absent(self, key: str, data: bytes) -> None:
        """Creates a small object unless the key exists.

        Atomicity: by a hard link to a temporary, or an exclusive rename. Cancellation: the object
        exists whole or not at all.

        Raises:
            ObjectExists: The key exists; it is unchanged.
            StorageError: Also if the file system supports neither. After a failed fsync the object
                may be visible.
        """
        views = [memoryview(data)]
        await self._run(
            self._put_blocking, "put_if_absent", check_key(key), views, publish_exclusively
        )

    def _put_blocking(
        self, op: str, key: str, views: Sequence[memoryview], publish: Callable[[str, str], None]
    ) -> None:
        with self._translate_errors(op, key):
            path = self._path(key)
            with self._temporary(path, views) as temporary:
                publish(temporary, path)
            self._folders.sync(os.path.dirname(path))

    async def writer(self, key: str, size: int, *, older: Sequence[str] = ()) -> ObjectWriter:
        """Creates the file at its full size. Cancellation: nothing is left.

        Raises:
            ObjectExists: The key exists, complete or not.
        """
        check_size(size)
        writer = _FsWriter(self, check_key(key), size, is_opener=True)
        return await self._open_writer(writer, writer._create_blocking)

    async def copying_writer(
        self, key: str, size: int, *, source: Storage, sample: str
    ) -> ObjectWriter | None:
        """Copies within one file system: in the kernel, by reflinks where the file system can."""
        check_size(size)
        origin = unwrapped(source)
        if not isinstance(origin, FsStorage):
            return None
        writer = _FsWriter(self, check_key(key), size, is_opener=True, origin=origin)
        opened = await self._open_writer(writer, writer._create_blocking)
        if await self._run(writer._is_beside_blocking, check_key(sample)):
            return opened
        await opened.abort()
        return None

    async def join_writer(self, token: bytes) -> ObjectWriter:
        """Opens the file of another party's writer. ``abort`` only closes it.

        Raises:
            ObjectNotFound: The other party aborted.
        """
        writer = _FsWriter(self, check_key(os.fsdecode(token)), 0, is_opener=False)
        return await self._open_writer(writer, writer._join_blocking)

    async def _open_writer(self, writer: _FsWriter, blocking: Callable[[], None]) -> ObjectWriter:
        try:
            await self._run(blocking)
        except BaseException:
            # Perhaps cancelled after the creation: no other task removes the file.
            if writer._is_created:
                await writer.abort()
            writer._descriptor.close_quietly()
            raise
        return writer

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        check_range(start, stop)
        return await self._run(self._get_blocking, check_key(key), start, stop)

    def _get_blocking(self, key: str, start: int, stop: int | None) -> bytes:
        with self._translate_errors("get", key), open_for_reading(self._path(key)) as fd:
            end = range_end(key, start, stop, os.fstat(fd).st_size)
            data = bytearray(end - start)
            num_read = pread_into(fd, start, [memoryview(data)])
            if num_read < len(data):  # the file was cut after fstat
                raise truncated(key, end, start + num_read)
            return bytes(data)

    async def read_into(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        """Cancellation: after the read has ended, so the views are free."""
        await self._run(self.read_into_blocking, key, offset, [views])

    def read_into_blocking(
        self, key: str, offset: int, batches: Iterable[Sequence[memoryview]]
    ) -> None:
        check_key(key)
        check_range(offset, None)
        with self._translate_errors("read_into", key), open_for_reading(self._path(key)) as fd:
            for views in batches:
                # Most batches are one view that one call fills. Python code between two calls makes
                # threads wait for each other's GIL.
                wanted = views[0].nbytes if len(views) == 1 else num_bytes(views)
                done = os.preadv(fd, views, offset) if len(views) == 1 else 0
                if done < wanted:
                    done += pread_into(fd, offset + done, slice_views(views, done, wanted))
                if done < wanted:
                    raise truncated(key, offset + wanted, os.fstat(fd).st_size)
                offset += wanted

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Yields objects in key order, temporaries included.

        Holds one folder's names in memory, and no descriptor between items.
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
        with self._translate_errors("list", prefix):
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
            yield from walk(folder, f"{parent}/" if parent else "", name_prefix)
        except NotADirectoryError:
            # The prefix goes through an object, so it names nothing, unless it is the root.
            if os.path.isdir(self.root):
                return
            raise

    async def delete(self, keys: Sequence[str]) -> None:
        """Deletes objects, then folders that became empty, up to the root.

        Durable, except for the removal of folders. All keys are tried, then the first error is
        raised. Cancellation: some are deleted.
        """
        for key in keys:
            check_key(key)
        failures: list[StorageError] = []
        for start in range(0, len(keys), _BATCH):
            await self._run(self._delete_blocking, keys[start : start + _BATCH], failures)
        if failures:
            raise failures[0]

    def _delete_blocking(
        self, keys: Sequence[str], failures: MutableSequence[StorageError]
    ) -> None:
        folders = set()
        for key in keys:
            with self._collect_failure(key, failures):
                path = self._path(key)
                folders.add(os.path.dirname(path))
                unlink_object(path)
        # The deepest first, so that each folder comes after its children.
        for folder in sorted(folders, key=len, reverse=True):
            self._folders.prune(folder)
            with self._collect_failure("", failures):
                self._folders.sync_entries(folder)

    @contextmanager
    def _collect_failure(self, key: str, failures: MutableSequence[StorageError]) -> Iterator[None]:
        """Ignores a missing object, and a folder that was pruned."""
        try:
            with self._translate_errors("delete", key):
                yield
        except ObjectNotFound:
            pass
        except StorageError as error:
            failures.append(error)

    async def list_folders(self, folder: str = "") -> Sequence[str]:
        return await self._run(self._list_folders_blocking, folder and check_key(folder))

    def _list_folders_blocking(self, folder: str) -> Sequence[str]:
        with self._translate_errors("list", folder):
            try:
                with os.scandir(self._path(folder) if folder else self.root) as entries:
                    return sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
            except FileNotFoundError:
                return []
            except NotADirectoryError:
                if os.path.isdir(self.root):
                    return []  # an object has the name
                raise

    async def delete_folder(self, folder: str) -> Sequence[str]:
        keys = await super().delete_folder(folder)
        await self._run(self._folders.prune_below, self._path(folder))
        return keys

    async def stat(self, key: str) -> ObjectInfo:
        return await self._run(self._stat_blocking, check_key(key))

    def _stat_blocking(self, key: str) -> ObjectInfo:
        with self._translate_errors("stat", key):
            status = os.stat(self._path(key))
            if not stat.S_ISREG(status.st_mode):
                raise FileNotFoundError(errno.ENOENT, "not a regular file")
            return ObjectInfo(key=key, size=status.st_size, modified_s=status.st_mtime)

    async def aclose(self) -> None:
        descriptors = [*self._open]
        self._open.clear()
        if descriptors:
            with anyio.move_on_after(CLEANUP_S, shield=True):
                await self._run(_close_all, descriptors)

    def _path(self, key: str) -> str:
        path = os.path.join(self.root, key)
        os.fsencode(path)  # raises for lone surrogates
        return path

    @contextmanager
    def _translate_errors(self, op: str, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise translate_os_error(error, op=op, key=key, root=self.root) from error
        except UnicodeEncodeError as error:
            raise StorageError(
                op=op, key=key, backend=self.url, detail="the key is not a valid file name"
            ) from error

    def _create(self, path: str) -> int:
        folder = os.path.dirname(path)
        self._folders.note(folder)
        for _ in range(CREATE_TRIES):
            try:
                return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            except FileNotFoundError:
                # Missing, or pruned by a concurrent delete between the two calls.
                self._folders.make(folder)
        raise OSError(errno.ESTALE, "the folder vanishes again and again: who deletes it?", path)

    @contextmanager
    def _temporary(self, path: str, views: Sequence[memoryview]) -> Iterator[str]:
        """Yields a fsynced file; deletes it unless it was renamed."""
        folder, name = os.path.split(path)
        if folder == self.root:
            folder = os.path.join(folder, self._scratch)
        temporary = temporary_path(os.path.join(folder, name))
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
            # A temporary that remains is garbage, not a failure: the object may be visible.
            with suppress(OSError):
                os.unlink(temporary)


def _close_all(descriptors: Sequence[Descriptor]) -> None:
    for descriptor in descriptors:
        descriptor.close_quietly()


class _FsWriter(BackendWriter):
    def __init__(
        self,
        storage: FsStorage,
        key: str,
        size: int,
        *,
        is_opener: bool,
        origin: FsStorage | None = None,
    ) -> None:
        with storage._translate_errors("writer", key):
            self._path = storage._path(key)
        super().__init__(key, size, os.fsencode(key), url=storage.url, is_opener=is_opener)
        self._storage = storage
        self._origin = origin
        self._is_created = False
        self._descriptor = Descriptor()

    async def write_at(
        self, offset: int, views: Sequence[memoryview], crc32c: int | None = None
    ) -> None:
        """The kernel does not check ``crc32c``."""
        await self._storage._run(self.write_at_blocking, offset, views)

    def write_at_blocking(self, offset: int, views: Sequence[memoryview]) -> None:
        self._check_write(offset, views)
        with self._storage._translate_errors("write_at", self.key), self._descriptor.use() as fd:
            pwrite_from(fd, offset, views)

    async def copy_from(self, offset: int, key: str, start: int, stop: int) -> int | None:
        """Copies in the kernel; nothing is compared."""
        self._check_range(offset, offset + stop - start)
        await self._storage._run(self._copy_blocking, offset, check_key(key), start, stop)
        return None

    def _copy_blocking(self, offset: int, key: str, start: int, stop: int) -> None:
        assert self._origin is not None
        with (
            self._origin._translate_errors("read_into", key),
            open_for_reading(self._origin._path(key)) as source,
        ):
            size = os.fstat(source).st_size
            if size < stop:
                raise truncated(key, stop, size)
            with (
                self._storage._translate_errors("copy_from", self.key),
                self._descriptor.use() as fd,
            ):
                copy_range(source, start, fd, offset, stop - start)

    def _is_beside_blocking(self, sample: str) -> bool:
        """Whether an object of the origin is on the file system of this one."""
        assert self._origin is not None
        with self._origin._translate_errors("stat", sample):
            device = os.stat(self._origin._path(sample)).st_dev
        with self._storage._translate_errors("writer", self.key), self._descriptor.use() as fd:
            return os.fstat(fd).st_dev == device

    async def complete(self) -> None:
        """Fsyncs the file and the folders above it, and closes it.

        Cancellation: after the work is done; ``abort`` still removes the file.

        Raises:
            ObjectNotFound: The file was deleted meanwhile.
            StorageError: Something is not durable; the writer must be aborted.
        """
        self._require_opener()
        await self._storage._run(self._complete_blocking, "complete")
        self._has_ended = True

    async def release(self) -> None:
        """Fsyncs and closes the file: the opener's fsync does not reach another machine's cache."""
        self._require_joined()
        await self._storage._run(self._complete_blocking, "release")
        self._has_ended = True

    def _complete_blocking(self, op: str) -> None:
        with self._storage._translate_errors(op, self.key):
            with self._descriptor.use() as fd:
                if self._storage._durable:
                    os.fsync(fd)
                if self._is_opener and not os.fstat(fd).st_nlink:
                    raise FileNotFoundError(errno.ENOENT, "deleted", self._path)
            if self._is_opener:
                self._storage._folders.sync(os.path.dirname(self._path))
            # Network file systems report late write failures here.
            self._descriptor.close()

    async def abort(self) -> None:
        """Closes the file; the opener removes it. No effect after an ending."""
        if self._has_ended:
            return
        self._has_ended = True
        with anyio.move_on_after(CLEANUP_S, shield=True):
            await self._storage._run(self._discard_blocking)

    def _create_blocking(self) -> None:
        with self._storage._translate_errors("writer", self.key):
            fd = self._storage._create(self._path)
            self._adopt(fd)
            self._is_created = True
            os.ftruncate(fd, self.size)

    def _join_blocking(self) -> None:
        with self._storage._translate_errors("join_writer", self.key):
            self._adopt(os.open(self._path, os.O_WRONLY))
            with self._descriptor.use() as fd:
                self.size = os.fstat(fd).st_size

    def _discard_blocking(self) -> None:
        # The name goes first: a file that cannot be closed must not be found.
        if self._is_opener:
            try:
                os.unlink(self._path)
            except FileNotFoundError:
                pass
            except OSError as error:
                logger.warning("%s: aborted object %s stays: %s", self._url, self.key, error)
        self._descriptor.close_quietly()
        if self._is_opener:
            self._storage._folders.prune(os.path.dirname(self._path))

    def _adopt(self, fd: int) -> None:
        self._descriptor.open(fd)
        self._storage._open.add(self._descriptor)
