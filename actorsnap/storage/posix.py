# SPDX-License-Identifier: Apache-2.0
"""System calls of a durable folder of files. All functions block."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from actorsnap.errors import (
    AccessDenied,
    ObjectExists,
    ObjectNotFound,
    StorageError,
    StorageFull,
    UsageError,
)
from actorsnap.storage.base import ENDED, ObjectInfo, flat, num_bytes

# How often creation may lose against a concurrent prune of the folder.
CREATE_TRIES = 100
# Views per call, on Linux and macOS.
IOV_MAX = 1024
_NAME_MAX = 255
_LINK_UNSUPPORTED = {
    errno.EPERM,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EMLINK,
    errno.EINVAL,
}
_COPY_UNSUPPORTED = {
    errno.EXDEV,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.EINVAL,
    errno.EPERM,
}
_BUFFER_BYTES = 1 << 20
_RENAME_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
_RETRYABLE = {errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT}
_READING = {"get", "read_into", "stat", "join_writer"}


class NoFolderError(FileNotFoundError):
    """A folder for an object could not be created, although nothing has its name."""


class Descriptor:
    """A file descriptor that its last user closes.

    A number closed during a write may be reused for another file, which the write would then hit.
    So a use after ``close`` raises EBADF.
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
                raise OSError(errno.EBADF, ENDED)
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
        """Closes, or lets the last user close. Idempotent."""
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


class Folders:
    """Makes and removes folders, and records which need an fsync.

    ``_unsynced`` maps a folder to the version of its newest entry, until an fsync without a change
    of version: else a concurrent ``sync`` could return too early.
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
        """Marks the folders from the root's parent to ``folder``, on first use: also existing ones,
        whose creator may have crashed before the fsync."""
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
        """Creates ``folder`` and missing parents.

        Raises:
            NotADirectoryError: One of them is a file.
            NoFolderError: The file system refuses to create one, or concurrent deletes win too
                often.
        """
        missing = [folder]
        for _ in range(CREATE_TRIES + 2 * folder.count("/")):
            try:
                os.mkdir(missing[-1])
            except FileNotFoundError:
                missing.append(os.path.dirname(missing[-1]))
                continue
            except FileExistsError:
                if not os.path.isdir(missing[-1]) and os.path.lexists(missing[-1]):
                    raise NotADirectoryError(errno.ENOTDIR, "is a file", missing[-1]) from None
            else:
                parent = os.path.dirname(missing[-1])
                with self._lock:
                    self._created_in.add(parent)
                    self._unsynced[parent] = next(self._versions)
            missing.pop()
            if not missing:
                return
        raise NoFolderError(errno.ENOENT, "folders are deleted while they are created", folder)

    def sync(self, folder: str) -> None:
        """Makes the entries of ``folder`` and its parents durable."""
        if not self._durable:
            return
        is_first = True
        while True:
            with self._lock:
                version = self._unsynced.get(folder)
                is_ours = folder in self._created_in
            if is_first or version is not None:
                try:
                    fsync_folder(folder)
                except PermissionError:
                    # An unreadable parent that others made is theirs to sync.
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

    def sync_entries(self, folder: str) -> None:
        if self._durable:
            fsync_folder(folder)

    def prune(self, folder: str) -> None:
        """Removes empty folders, from ``folder`` up to the root."""
        while True:
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                pass  # a crash may have left its parent empty
            except OSError:
                return  # not empty, or not ours to remove
            with self._lock:
                self._seen.discard(folder)
            if folder == self._root:
                return
            folder = os.path.dirname(folder)

    def prune_below(self, folder: str) -> None:
        """``prune`` for ``folder`` and all folders in it; follows no links."""
        for path, _, _ in os.walk(folder, topdown=False):
            self.prune(path)


def walk(folder: str, prefix: str, name_prefix: str = "") -> Iterator[ObjectInfo]:
    """Yields the regular files below ``folder`` in key order; ignores links."""
    named: list[tuple[str, os.DirEntry[str]]] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(name_prefix):
                    # With its slash, a folder sorts like its keys.
                    is_folder = entry.is_dir(follow_symlinks=False)
                    named.append((f"{entry.name}/" if is_folder else entry.name, entry))
    except FileNotFoundError:
        return
    named.sort(key=lambda item: item[0])
    for name, entry in named:
        if name.endswith("/"):
            try:
                yield from walk(entry.path, prefix + name)
            except NotADirectoryError:
                continue  # replaced since the scan
        else:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # deleted or renamed since the scan
            if stat.S_ISREG(status.st_mode):
                yield ObjectInfo(key=prefix + name, size=status.st_size, modified_s=status.st_mtime)


@contextmanager
def open_for_reading(path: str) -> Iterator[int]:
    # Opening a pipe must not hang; no effect on files.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise FileNotFoundError(errno.ENOENT, "not a regular file")
        yield fd
    finally:
        os.close(fd)


def unlink_object(path: str) -> None:
    try:
        os.unlink(path)
    except OSError as error:
        # Linux and macOS report a folder differently. A read-only mount does not look whether the
        # object exists.
        if error.errno not in (errno.EISDIR, errno.EPERM, errno.EACCES, errno.EROFS):
            raise
        if stat.S_ISDIR(os.lstat(path).st_mode):
            return
        raise


def working_folder(path: str) -> str:
    # getcwd only reads the kernel's memory; abspath counts as blocking for any path.
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise UsageError(
            f"{path!r} is relative to the working folder, which was deleted: pass an absolute "
            "path, or change to a folder that exists"
        ) from error


def simplify_path(path: str) -> str:
    """Only the kernel can resolve ``..``."""
    return "/" + "/".join(part for part in path.split("/") if part not in ("", "."))


def temporary_path(path: str) -> str:
    folder, name = os.path.split(path)
    ending = f".{secrets.token_hex(8)}.tmp"
    stem = os.fsencode(name if name.startswith(".") else f".{name}")[: _NAME_MAX - len(ending)]
    # Drops the rest of a cut character.
    return os.path.join(folder, stem.decode(errors="ignore") + ending)


def publish_exclusively(temporary: str, path: str) -> None:
    """Links or renames ``temporary`` to ``path``, or raises ``FileExistsError``."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        # NFS repeats a call whose answer was lost and meets its own link.
        if not os.path.samestat(os.lstat(temporary), os.lstat(path)):
            raise
    except OSError as error:
        if error.errno not in _LINK_UNSUPPORTED:
            raise
        try:
            rename_exclusively(temporary, path)
        except OSError as second:
            if second.errno not in _RENAME_UNSUPPORTED:
                raise
            raise OSError(
                errno.ENOTSUP,
                "the file system has neither hard links nor an exclusive rename, so a commit "
                "could not be atomic; store snapshots on another file system",
            ) from error


def rename_exclusively(source: str, target: str) -> None:
    function: Callable[..., int] | None = getattr(
        ctypes.CDLL(None, use_errno=True), "renameat2", None
    )
    if function is None:
        raise OSError(errno.ENOSYS, "no renameat2 in the C library")
    at_fdcwd, rename_noreplace = -100, 1
    if function(at_fdcwd, os.fsencode(source), at_fdcwd, os.fsencode(target), rename_noreplace):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), source, None, target)


def fsync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network and FUSE file systems neither have nor need an fsync of folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(fd)


def pread_into(fd: int, offset: int, views: Sequence[memoryview]) -> int:
    """Reads from byte ``offset`` until ``views`` are full or the file ends; returns the number of
    bytes. Python itself repeats calls after EINTR."""
    return _transfer(os.preadv, fd, offset, views)


def copy_range(source: int, start: int, target: int, offset: int, nbytes: int) -> None:
    """Copies bytes between files. XFS, Btrfs and others share the blocks: nothing is written.

    That takes offsets of equal position in a block; the kernel copies what has others.
    """
    while nbytes:
        try:
            num = os.copy_file_range(source, target, nbytes, start, offset)
        except OSError as error:
            if error.errno not in _COPY_UNSUPPORTED:
                raise
            buffer = memoryview(bytearray(min(nbytes, _BUFFER_BYTES)))
            num = pread_into(source, start, [buffer])
            pwrite_from(target, offset, [buffer[:num]])
        if not num:
            raise OSError(errno.EIO, "the source ended during the copy")
        start, offset, nbytes = start + num, offset + num, nbytes - num


def pwrite_from(fd: int, offset: int, views: Sequence[memoryview]) -> None:
    wanted = num_bytes(views)
    written = _transfer(os.pwritev, fd, offset, views)
    if written != wanted:
        raise OSError(errno.EIO, f"the file system took {written} of {wanted} bytes")


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    offset: int,
    views: Sequence[memoryview],
) -> int:
    pending = flat(views)
    pending.reverse()  # the next view is popped from the end
    done = 0
    while pending:
        batch = pending[: -IOV_MAX - 1 : -1]
        moved = call(fd, batch, offset + done)
        if moved == 0:
            break
        done += moved
        while pending and moved >= pending[-1].nbytes:
            moved -= pending.pop().nbytes
        if moved:
            pending[-1] = pending[-1][moved:]
    return done


def translate_os_error(error: OSError, *, op: str, key: str, root: str) -> StorageError:
    number = error.errno or 0
    reason = error.strerror or str(error)

    def make(kind: type[StorageError], detail: str) -> StorageError:
        return kind(op=op, key=key, backend=root, detail=detail, retryable=number in _RETRYABLE)

    if number == errno.ENOENT:
        if isinstance(error, NoFolderError):
            return make(StorageError, _describe_missing_folder(error.filename))
        return make(ObjectNotFound, "no such object")
    if number == errno.EEXIST:
        if obstacle := _describe_non_object(os.path.join(root, key)):
            return make(StorageError, f"{obstacle}, not an object; remove it")
        return make(ObjectExists, "the object exists already")
    if number == errno.ENOTDIR:
        obstacle = _describe_obstacle(root)
        if os.path.lexists(root) and obstacle:
            return make(StorageError, f"{obstacle}; name a folder")
        if op in _READING or op == "delete":
            return make(ObjectNotFound, "no such object")
        return make(StorageError, obstacle or _describe_parent(key, root))
    if number == errno.EISDIR:
        return make(StorageError, "a folder has this name: other keys begin with it")
    if number == errno.EROFS:
        return make(AccessDenied, f"{reason}; remount it for writing or store elsewhere")
    if number in (errno.EACCES, errno.EPERM):
        return make(
            AccessDenied,
            f"{reason}; check owner and mode of the file or folder: this process has uid "
            f"{os.geteuid()}",
        )
    if number == errno.ENOSPC:
        return make(
            StorageFull,
            f"{reason}: {_describe_free_space(root)}. Delete old snapshots (of a run: "
            "`actorsnap prune ROOT --keep last:1`; others: `actorsnap rm PATH`) or store elsewhere",
        )
    if number == errno.EDQUOT:
        return make(
            StorageFull,
            f"{reason}: a quota of bytes or of files is used up, `quota -s` shows yours. Delete "
            "old snapshots or store elsewhere",
        )
    if number == errno.ENAMETOOLONG:
        what = "path" if _is_too_long(root) else "key"
        return make(
            StorageError, f"the {what} is too long: at most {_NAME_MAX} bytes between two slashes"
        )
    if number in (errno.EMFILE, errno.ENFILE):
        return make(StorageError, f"{reason}; raise the limit of open files (ulimit -n)")
    if number == errno.EFBIG:
        return make(StorageError, f"{reason}: {_describe_file_limit()}")
    return make(StorageError, reason)


def _describe_file_limit() -> str:
    import resource  # which only POSIX has

    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit_bytes == resource.RLIM_INFINITY:
        return "the file system holds no file of this size; store elsewhere"
    return (
        f"this process may write files of at most {limit_bytes} bytes; raise the limit (ulimit -f)"
    )


def _describe_parent(key: str, root: str) -> str:
    parts = key.split("/")[:-1]
    for end in range(1, len(parts) + 1):
        parent = "/".join(parts[:end])
        if os.path.isfile(os.path.join(root, parent)):
            return f"a parent is a file: {parent!r} is an object, so no key can be below it"
    return f"a parent of {key!r} is not a folder"


def _describe_missing_folder(folder: str) -> str:
    above = folder
    while not os.path.isdir(above):
        folder, above = above, os.path.dirname(above)
    return (
        f"the folder {folder} cannot be created: the file system of {above} allows no new "
        "folders, or another process deletes them; save to another place"
    )


def _describe_obstacle(path: str) -> str:
    """Describes the file or dangling link in a folder's place; empty if it has a folder."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    if os.path.isdir(path):
        return ""
    return _describe_non_object(path) or f"{path} is a file"


def _describe_non_object(path: str) -> str:
    """Describes the folder or dangling link in an object's place; empty if it has neither."""
    if os.path.isdir(path):
        return f"{path} is a folder"
    is_dangling = os.path.islink(path) and not os.path.exists(path)
    return f"{path} is a symbolic link to nothing" if is_dangling else ""


def _is_too_long(path: str) -> bool:
    try:
        os.lstat(path)
    except OSError as error:
        return error.errno == errno.ENAMETOOLONG
    return False


def _describe_free_space(root: str) -> str:
    folder = root
    while folder != os.path.dirname(folder) and not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    try:
        status = os.statvfs(folder)
    except OSError:
        return "the free space is unknown"
    nbytes = status.f_bavail * status.f_frsize
    if nbytes and status.f_files and not status.f_favail:  # f_files is 0 if not counted
        return "no inodes are free, so no file can be created"
    return f"{nbytes} bytes were left when it failed"
