# SPDX-License-Identifier: Apache-2.0
"""Storage in any file system of fsspec: ``abfs://``, ``hf://``, ``sftp://``, ...

For schemes without a backend here; ``fsspec+s3://`` forces fsspec's. Needs ``actorsnap[fsspec]``
and the implementation's package, which gets the ``storage_options``.

- Asynchronous implementations are awaited on the storage's event loop. Others run on worker
  threads, with one instance per thread.
- An object has one writer, with one blocking stream: bytes that come too early wait in a temporary
  file (``TMPDIR``).
- Where an implementation moves files by itself (local, sftp, smb, ...), a small object is written
  next to its place and moved. Elsewhere one write is one object.
- ``put_if_absent`` looks, creates and reads back: of two concurrent writers both may believe that
  they succeeded, and the later object stays, unless ``mode="create"`` is honoured. No checksum is
  sent. Durability and the ends of cancelled requests are the implementation's.
"""

from __future__ import annotations

import re
import secrets
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from io import BufferedRandom
from typing import Any, TypeVar

import anyio
from fsspec import (
    AbstractFileSystem,
    available_protocols,
    get_filesystem_class,
    registry,
    url_to_fs,
)
from fsspec.spec import AbstractBufferedFile

from actorsnap.errors import (
    AccessDenied,
    ActorSnapError,
    MissingPackage,
    ObjectExists,
    ObjectNotFound,
    StorageError,
    Throttled,
    UsageError,
    describe,
)
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
    check_range,
    check_size,
    copy_into,
    flat,
    num_bytes,
    range_end,
    slice_views,
    truncated,
    try_each,
)
from actorsnap.storage.network import RetryPolicy, RetryStorage
from actorsnap.storage.registry import without_secrets

logger = Log(__name__)

T = TypeVar("T")

_FORCED = "fsspec+"
# Of one request; they are copied into the caller's memory.
_PIECE_BYTES = 16 << 20
_MAX_CONCURRENCY = 16
# How often a folder may be deleted before its use.
_CREATE_TRIES = 20
_POLICY = RetryPolicy(max_attempts=5, first_delay_s=0.5, max_delay_s=10.0)

_SECRET_NAME = re.compile("key|secret|token|pass|credential|sas|connection_string", re.IGNORECASE)


def has_implementation(scheme: str) -> bool:
    """Whether fsspec knows ``scheme``, installed or not."""
    name = scheme.removeprefix(_FORCED)
    return name in registry or name in available_protocols()


def open_fsspec(url: str, context: StorageContext) -> Storage:
    place = url.removeprefix(_FORCED)
    scheme = place.partition("://")[0]
    try:
        implementation = get_filesystem_class(scheme)
    except ImportError as error:
        cause = error.__cause__
        missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
        if missing and missing in str(error):  # fsspec's hint names the module: so PyPI has it
            raise MissingPackage(
                f"{scheme}:// needs the package {missing!r}, which is not installed: "
                f"pip install {missing}"
            ) from None
        raise MissingPackage(
            f"{scheme}:// needs a package that is not installed: {error}"
        ) from error
    except Exception as error:
        raise UsageError(f"{scheme}:// cannot be loaded: {error!r}") from error
    storage = FsspecStorage(place.rstrip("/"), implementation, context)
    return RetryStorage(storage, policy=_POLICY, on_retry=context.on_retry)


class FsspecStorage(Storage):
    """Objects as files below a folder. See the module.

    Cancellation: at once for asynchronous implementations, else when the thread returns.
    """

    def __init__(
        self, url: str, implementation: type[AbstractFileSystem], context: StorageContext
    ) -> None:
        self.url = without_secrets(url)
        self.capabilities = Capabilities(has_joined_writers=False, has_conditional_put=False)
        self._place = url
        self._options = dict(context.options)
        self._is_async: bool = implementation.async_impl
        self._moves = not self._is_async and implementation.mv is not AbstractFileSystem.mv
        self._run = context.run_blocking
        self._scratch = context.scratch
        self._opening = anyio.Lock()
        self._async_fs: Any = None
        root = implementation._strip_protocol(url)
        self._prefix = f"{root.rstrip('/')}/" if root else ""

    async def put(self, key: str, views: Sequence[memoryview]) -> None:
        """Writes a whole object. Atomicity: by a move, or the implementation's.

        Cancellation: it is the old or the new one, or garbage remains next to it.
        """
        check_key(key)
        with self._translate_errors("put", key):
            await self._put(key, b"".join(flat(views)), "overwrite")

    async def put_if_absent(self, key: str, data: bytes) -> None:
        """Atomicity: see the module."""
        path = self._path(key)
        with self._translate_errors("put_if_absent", key):
            if await self._call("exists", path):
                raise FileExistsError(f"{key!r} exists already")
            await self._put(key, data, "create")
            if await self._call("cat_file", path) != data:
                raise FileExistsError("another writer has replaced it")

    async def _put(self, key: str, data: bytes, mode: str) -> None:
        path = self._path(key)
        if not self._moves:
            await self._with_folder(path, lambda: self._call("pipe_file", path, data, mode=mode))
            return
        folder, _, name = key.rpartition("/")
        neighbour = f"{folder or self._scratch}/.{name}.{secrets.token_hex(4)}.tmp".lstrip("/")
        temporary = self._path(neighbour)
        try:
            await self._with_folder(temporary, lambda: self._call("pipe_file", temporary, data))
            await self._with_folder(path, lambda: self._call("mv", temporary, path))
        except BaseException:
            with anyio.move_on_after(CLEANUP_S, shield=True), suppress(Exception):
                await self._call("rm_file", temporary)
            raise

    async def writer(self, key: str, size: int, *, older: Sequence[str] = ()) -> ObjectWriter:
        check_size(size)
        path = self._path(key)
        with self._translate_errors("writer", key):
            if await self._call("exists", path):
                raise FileExistsError(f"{key!r} exists already")
        return _FsspecWriter(self, key, path, size)

    async def join_writer(self, token: bytes) -> ObjectWriter:
        raise UsageError(f"{self.url}: an object of fsspec has one writer")

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        check_range(start, stop)
        path = self._path(key)
        with self._translate_errors("get", key):
            if start == 0 and stop is None:
                return bytes(await self._call("cat_file", path))
            if stop is None or start == stop:
                stop = range_end(key, start, stop, await self._size(path))
            return b"" if start == stop else await self._range(key, path, start, stop)

    async def read_into(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        check_range(offset, None)
        path = self._path(key)
        with self._translate_errors("read_into", key):
            if not num_bytes(views):
                await self._size(path)
            for start in range(0, num_bytes(views), _PIECE_BYTES):
                piece = slice_views(views, start, start + _PIECE_BYTES)
                first, last = offset + start, offset + start + num_bytes(piece)
                copy_into(memoryview(await self._range(key, path, first, last)), piece)

    async def _range(self, key: str, path: str, start: int, stop: int) -> bytes:
        try:
            data = bytes(await self._call("cat_file", path, start=start, end=stop))
        except FileNotFoundError:
            raise
        except Exception:
            # Some refuse a range beyond the end, each in its own way.
            size = await self._size(path)
            if size < stop:
                raise truncated(key, stop, size) from None
            raise
        if len(data) != stop - start:
            raise truncated(key, stop, start + len(data))
        return data

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Yields objects in key order, as they were at the first step.

        All infos of the prefix's folder are in memory.
        """
        folder, slash, _ = prefix.rpartition("/")
        try:
            path = self._path(folder) if slash else self._root
        except UsageError:
            return  # no key starts with it
        with self._translate_errors("list", prefix):
            await self._drop_listings()
            try:
                files = await self._call("find", path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return
        infos = [
            ObjectInfo(key=key, size=info["size"] or 0, modified_s=_modified_s(info))
            for name, info in files.items()
            if (key := self._key(name)).startswith(prefix) and info["type"] == "file"
        ]
        for info in sorted(infos, key=lambda info: info.key):
            yield info

    async def delete(self, keys: Sequence[str]) -> None:
        """Deletes objects, then empty folders. All are tried. Cancellation: some are deleted."""
        paths = {key: self._path(key) for key in keys}

        async def delete(key: str) -> None:
            with self._translate_errors("delete", key):
                # Object stores do not report a missing object, others raise.
                with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                    await self._call("rm_file", paths[key])

        await try_each(paths, delete, at_once=_MAX_CONCURRENCY)
        if not self._is_async:
            await self._prune({path.rpartition("/")[0] for path in paths.values()})

    async def _prune(self, folders: set[str]) -> None:
        root = self._root
        for folder in sorted(folders, key=len, reverse=True):
            with suppress(Exception):  # not empty, or no folder
                while len(folder) > len(root):
                    await self._call("rmdir", folder)
                    folder = folder.rpartition("/")[0]

    async def list_folders(self, folder: str = "") -> Sequence[str]:
        path = self._path(folder) if folder else self._root
        await self._drop_listings()
        with self._translate_errors("list", folder):
            try:
                infos = await self._call("ls", path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
            return sorted(
                info["name"].rstrip("/").rpartition("/")[2]
                for info in infos
                if info["type"] == "directory"
            )

    async def delete_folder(self, folder: str) -> Sequence[str]:
        keys = await super().delete_folder(folder)
        if not self._is_async:
            await self._prune({self._path(folder)})
        return keys

    async def stat(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with self._translate_errors("stat", key):
            info = await self._info(path)
        return ObjectInfo(key=key, size=info["size"] or 0, modified_s=_modified_s(info))

    async def aclose(self) -> None:
        fs, self._async_fs = self._async_fs, None
        # fsspec has no verb for it: the clients of gcsfs and http, s3fs, and adlfs.
        for name in ("_session", "_s3", "service_client"):
            client = getattr(fs, name, None)
            if client is not None:
                await client.close()

    # --- fsspec --------------------------------------------------------------------------------

    async def _call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        if self._is_async:
            fs = await self._async()
            return await getattr(fs, f"_{verb}")(*args, **kwargs)
        return await self._run(self._call_blocking, verb, args, kwargs)

    def _call_blocking(self, verb: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        # fsspec keeps one instance of a synchronous implementation per thread.
        fs, _ = url_to_fs(self._place, **self._options)
        return getattr(fs, verb)(*args, **kwargs)

    async def _async(self) -> Any:
        async with self._opening:
            if self._async_fs is None:
                self._async_fs = await self._run(self._open_async_blocking)
            return self._async_fs

    def _open_async_blocking(self) -> AbstractFileSystem:
        fs, _ = url_to_fs(self._place, asynchronous=True, skip_instance_cache=True, **self._options)
        return fs

    async def _drop_listings(self) -> None:
        if self._is_async:
            (await self._async()).invalidate_cache()
        else:
            await self._run(self._call_blocking, "invalidate_cache", (), {})

    async def _with_folder(self, path: str, do: Callable[[], Awaitable[T]]) -> T:
        """Awaits ``do``; makes the folder of ``path`` if it is missing."""
        for _ in range(_CREATE_TRIES):
            try:
                return await do()
            except FileNotFoundError:
                await self._make_folder(path.rpartition("/")[0])
        return await do()

    async def _make_folder(self, folder: str) -> None:
        # In object stores the first part is a bucket.
        first = folder.partition("/")[0]
        if first and not await self._call("exists", first):
            raise FileNotFoundError(f"there is no {first!r}")
        with suppress(FileNotFoundError):  # a folder above was deleted: the caller tries again
            await self._call("makedirs", folder, exist_ok=True)

    async def _open_stream(self, path: str) -> Any:
        return await self._with_folder(path, lambda: self._run(self._open_stream_blocking, path))

    def _open_stream_blocking(self, path: str) -> Any:
        # Not shared: a connection may do only one thing at a time.
        fs, _ = url_to_fs(self._place, skip_instance_cache=not self._is_async, **self._options)
        return fs.open(path, "wb")

    # --- paths ---------------------------------------------------------------------------------

    @property
    def _root(self) -> str:
        return self._prefix.rstrip("/") or self._prefix

    def _path(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _key(self, name: str) -> str:
        return name.removeprefix(self._prefix).lstrip("/")

    async def _info(self, path: str) -> Mapping[str, Any]:
        await self._drop_listings()
        info: Mapping[str, Any] = await self._call("info", path)
        if info["type"] != "file":
            raise FileNotFoundError("it is a folder")
        return info

    async def _size(self, path: str) -> int:
        return int((await self._info(path))["size"])

    # --- errors --------------------------------------------------------------------------------

    @contextmanager
    def _translate_errors(self, op: str, key: str) -> Iterator[None]:
        try:
            yield
        except ActorSnapError:
            raise
        # Includes errors of its libraries.
        except Exception as error:
            raise self._error(op, key, error) from error

    def _error(self, op: str, key: str, error: Exception) -> StorageError:
        text = describe(error)
        for name, value in self._options.items():
            if isinstance(value, str) and value and _SECRET_NAME.search(name):
                text = text.replace(value, "...")
        detail = text.replace(self._place, self.url)
        if isinstance(error, ModuleNotFoundError) and error.name:
            scheme, package = self.url.partition("://")[0], error.name.partition(".")[0]
            detail = f"{scheme}:// needs the package {package}: pip install {package} ({detail})"
        status = getattr(error, "status", getattr(error, "status_code", None))
        kind: type[StorageError] = StorageError
        retryable = isinstance(error, TimeoutError | ConnectionError)
        if isinstance(error, FileExistsError):
            kind = ObjectExists
        elif isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
            if op in _READS:
                kind = ObjectNotFound
            else:
                detail = f"is there the bucket, or the folder? {detail}"
        elif isinstance(error, PermissionError) or status in (401, 403):
            kind = AccessDenied
        elif isinstance(error, NotImplementedError) or status in (405, 501):
            detail = f"it cannot be done there; is the place read-only? {detail}"
        elif status in (429, 503):
            kind, retryable = Throttled, True
        elif isinstance(status, int):
            retryable = retryable or status == 408 or status >= 500
        return kind(op=op, key=key, backend=self.url, detail=detail, retryable=retryable)


_READS = frozenset({"get", "read_into", "stat"})


class _FsspecWriter(BackendWriter):
    """One stream. States: open -> completed, aborted or broken."""

    def __init__(self, storage: FsspecStorage, key: str, path: str, size: int) -> None:
        super().__init__(key, size, b"", url=storage.url, is_opener=True)
        self._storage = storage
        self._path = path
        self._turn = anyio.Lock()
        self._stream: Any = None
        self._position = 0
        self._early: dict[int, int] = {}  # offset -> bytes, in the temporary file
        self._file: BufferedRandom | None = None
        self._fault = ""

    async def write_at(
        self, offset: int, views: Sequence[memoryview], crc32c: int | None = None
    ) -> None:
        """Sends ``views``, or keeps them for later.

        Cancellation: when the thread returns; the object can then only be aborted.
        """
        self._check_write(offset, views)
        async with self._turn:
            self._require_open("write_at")
            with self._break_on_error("write_at"):
                if offset == 0 and self._stream is None and self.size:
                    self._stream = await self._storage._open_stream(self._path)
                await self._storage._run(self._write_blocking, offset, flat(views))

    def _write_blocking(self, offset: int, views: Sequence[memoryview]) -> None:
        if offset != self._position:
            self._keep(offset, views)
            return
        for view in views:
            self._send(view)
        buffer = bytearray(min(_PIECE_BYTES, max(self._early.values(), default=0)))
        while self._position in self._early:
            rest = self._early.pop(self._position)
            assert self._file is not None
            self._file.seek(self._position)
            while rest:
                view = memoryview(buffer)[: min(rest, len(buffer))]
                self._file.readinto(view)
                self._send(view)
                rest -= view.nbytes

    def _keep(self, offset: int, views: Sequence[memoryview]) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile()
        self._file.seek(offset)
        for view in views:
            self._file.write(view)
        if views:
            self._early[offset] = num_bytes(views)

    def _send(self, view: memoryview) -> None:
        self._stream.write(view)
        self._position += view.nbytes

    async def complete(self) -> None:
        """Ends the stream. Atomicity: the implementation's."""
        async with self._turn:
            self._require_open("complete")
            if self._position != self.size:
                raise self._error(
                    "complete", f"byte {self._position} of {self.size} was never written"
                )
            with self._break_on_error("complete"):
                if self._stream is None:
                    await self._storage._put(self.key, b"", "overwrite")
                else:
                    await self._storage._run(self._stream.close)
                stored_bytes = await self._storage._size(self._path)
            if stored_bytes != self.size:
                raise self._error("complete", f"{stored_bytes} bytes are there, not {self.size}")
            self._end()

    async def abort(self) -> None:
        """Drops the stream and deletes the object. No effect after ``complete``."""
        if self._has_ended:
            return
        with anyio.move_on_after(CLEANUP_S, shield=True):
            async with self._turn:
                stream = self._stream
                self._end()
                if stream is None:
                    return
                try:
                    await self._storage._run(_drop, stream)
                    await self._storage.delete([self.key])
                except StorageError as error:
                    logger.warning("%s: aborted object %s stays: %s", self._url, self.key, error)

    def _end(self) -> None:
        self._has_ended = True
        self._stream = None
        if self._file is not None:
            self._file.close()

    def _require_open(self, op: str) -> None:
        if self._has_ended:
            raise self._ended(op)
        if self._fault:
            raise self._error(op, f"the stream broke before: {self._fault}")

    @contextmanager
    def _break_on_error(self, op: str) -> Iterator[None]:
        """Marks the stream as broken by a failure: how many bytes it took is unknown."""
        try:
            with self._storage._translate_errors(op, self.key):
                yield
        except StorageError as error:
            self._fault = error.detail
            raise type(error)(**{**error.fields, "retryable": False}) from error


def _drop(stream: Any) -> None:
    """Ends a stream, if possible without creating its object."""
    with suppress(Exception):
        stream.discard()
    if isinstance(stream, AbstractBufferedFile):
        stream.closed = True  # or garbage collection would send the rest
    else:
        with suppress(Exception):
            stream.close()


def _modified_s(info: Mapping[str, Any]) -> float:
    for name in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = info.get(name)
        if isinstance(value, str):
            with suppress(ValueError):
                value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return 0.0
