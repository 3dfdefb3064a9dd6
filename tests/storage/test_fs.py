# SPDX-License-Identifier: Apache-2.0
"""Storage in a folder: the contract, and durability, descriptors, errors and crashes."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import anyio
import anyio.to_thread
import pytest
from blockbuster import blockbuster_ctx

from actorsnap.errors import (
    AccessDenied,
    ChecksumMismatch,
    ObjectExists,
    ObjectNotFound,
    StorageError,
    StorageFull,
    UsageError,
)
from actorsnap.storage import StorageContext, open_storage, posix
from actorsnap.storage import fs as fs_module
from actorsnap.storage.fs import FsStorage
from actorsnap.testing import StorageConformance, bounded, run_blocking_in_thread
from actorsnap.testing.conformance import MakeStorage, keys_in, listed, pattern, views_of

T = TypeVar("T")

OF_TESTS = ["actorsnap.testing"]

REPOSITORY = Path(__file__).parents[2]


def context(*, durable: bool = True) -> StorageContext:
    return StorageContext(run_blocking=run_blocking_in_thread, durable=durable)


def fs(root: Path, *, durable: bool = True) -> FsStorage:
    return FsStorage(str(root), context(durable=durable))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root that does not exist, nor does its parent."""
    return tmp_path / "runs" / "step-1"


def descriptors() -> dict[str, str]:
    """This process's open files, without the listing's own."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            found[number] = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue
    return found


@pytest.fixture
def no_open_files(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Fails the test if a file below ``tmp_path`` is open at its end, or when called."""

    def check() -> None:
        assert [to for to in descriptors().values() if str(tmp_path) in to] == []

    yield check
    check()


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture(autouse=True)
def _blockbuster(request: pytest.FixtureRequest) -> Iterator[None]:
    """As for all tests, but frames of ``actorsnap.testing``, such as ``bounded``, do not count."""
    if request.node.get_closest_marker("blocking") is not None:
        yield
        return
    with blockbuster_ctx("actorsnap", excluded_modules=OF_TESTS):
        yield


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    backend: str = request.param
    return backend


@pytest.mark.few
class TestFs(StorageConformance):
    @pytest.fixture(params=[True, False], ids=["durable", "scratch"])
    def make_storage(
        self, root: Path, request: pytest.FixtureRequest, no_open_files: Callable[[], None]
    ) -> MakeStorage:
        return lambda: open_storage(f"fs://{root}", context(durable=request.param))


# --- durability ------------------------------------------------------------------------------


class Calls:
    """The system calls that matter for durability, in order, with paths instead of numbers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.seen: list[tuple[str, str]] = []
        self._base = root.parent.parent
        for name in ("fsync", "link", "mkdir", "open", "pwritev", "rename", "unlink"):
            self._record(monkeypatch, name, getattr(os, name))

    def _record(self, monkeypatch: pytest.MonkeyPatch, name: str, call: Callable[..., Any]) -> None:
        def recorded(first: Any, *args: Any, **kwargs: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else first
            result = call(first, *args, **kwargs)
            creates = name != "open" or (args and args[0] & os.O_CREAT)
            if creates and str(path).startswith(str(self._base)):
                self.seen.append((name, self._short(str(path))))
            return result

        monkeypatch.setattr(os, name, recorded)

    def _short(self, path: str) -> str:
        short = os.path.relpath(path, self._base)
        return "TEMPORARY" if short.endswith(".tmp") else short

    def take(self) -> list[tuple[str, str]]:
        seen, self.seen = self.seen, []
        return seen

    def synced(self) -> list[str]:
        return [path for name, path in self.take() if name == "fsync"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, root: Path) -> Calls:
    return Calls(monkeypatch, root)


@bounded(10)
async def test_a_written_object_is_fsynced_before_the_folders_that_lead_to_it(
    root: Path, calls: Calls
) -> None:
    storage = fs(root)
    writer = await storage.writer("a/b/key", 3)
    assert calls.take()[-5:] == [
        ("mkdir", "runs"),
        ("mkdir", "runs/step-1"),
        ("mkdir", "runs/step-1/a"),
        ("mkdir", "runs/step-1/a/b"),
        ("open", "runs/step-1/a/b/key"),
    ]
    await writer.write_at(0, [memoryview(b"abc")])
    assert calls.take() == [("pwritev", "runs/step-1/a/b/key")]
    await writer.complete()
    assert calls.take() == [
        ("fsync", "runs/step-1/a/b/key"),
        ("fsync", "runs/step-1/a/b"),
        ("fsync", "runs/step-1/a"),
        ("fsync", "runs/step-1"),
        ("fsync", "runs"),
        ("fsync", "."),
    ]


@bounded(10)
async def test_known_folders_are_fsynced_once(root: Path, calls: Calls) -> None:
    storage = fs(root)
    await storage.put("a/1", [memoryview(b"x")])
    calls.take()
    await storage.put("a/2", [memoryview(b"x")])
    assert calls.synced() == ["TEMPORARY", "runs/step-1/a"]
    await storage.put("b/1", [memoryview(b"x")])
    assert calls.synced() == ["TEMPORARY", "runs/step-1/b", "runs/step-1"]
    await storage.delete(["b/1"])
    await storage.put("b/1", [memoryview(b"x")])
    assert calls.synced() == ["TEMPORARY", "runs/step-1/b", "runs/step-1"]


@bounded(10)
async def test_folders_of_others_are_fsynced_on_first_use(root: Path, calls: Calls) -> None:
    """Who made them may have crashed before the fsync."""
    (root / "a").mkdir(parents=True)
    calls.take()
    await fs(root).put("a/1", [memoryview(b"x")])
    assert calls.synced() == ["TEMPORARY", "runs/step-1/a", "runs/step-1", "runs"]


@bounded(10)
async def test_a_put_is_fsynced_before_it_is_renamed(root: Path, calls: Calls) -> None:
    await fs(root).put("key", [memoryview(b"x")])
    seen = [call for call in calls.take() if call[0] != "mkdir"]
    # The first open fails for want of a folder, and is not recorded.
    assert seen[:5] == [
        ("open", "TEMPORARY"),
        ("pwritev", "TEMPORARY"),
        ("fsync", "TEMPORARY"),
        ("rename", "TEMPORARY"),
        ("fsync", "runs/step-1"),
    ]


@bounded(10)
async def test_put_if_absent_is_fsynced_before_it_is_linked(root: Path, calls: Calls) -> None:
    await fs(root).put_if_absent("key", b"x")
    seen = [call for call in calls.take() if call[0] != "mkdir"]
    assert seen[:6] == [
        ("open", "TEMPORARY"),
        ("pwritev", "TEMPORARY"),
        ("fsync", "TEMPORARY"),
        ("link", "TEMPORARY"),
        ("unlink", "TEMPORARY"),
        ("fsync", "runs/step-1"),
    ]


@bounded(10)
async def test_a_joined_writer_is_durable_when_it_is_released(root: Path, calls: Calls) -> None:
    storage = fs(root)
    writer = await storage.writer("key", 6)
    joined = await storage.join_writer(writer.token)
    calls.take()
    await joined.write_at(3, [memoryview(b"def")])
    await joined.release()
    assert calls.take() == [("pwritev", "runs/step-1/key"), ("fsync", "runs/step-1/key")]
    await writer.abort()


@bounded(10)
async def test_scratch_storage_never_fsyncs(root: Path, calls: Calls) -> None:
    storage = fs(root, durable=False)
    await storage.put("a/put", [memoryview(b"x")])
    await storage.put_if_absent("a/absent", b"x")
    writer = await storage.writer("a/written", 2)
    joined = await storage.join_writer(writer.token)
    await writer.write_at(0, [memoryview(b"x")])
    await joined.write_at(1, [memoryview(b"y")])
    await writer.complete()
    assert calls.seen
    assert calls.synced() == []


@pytest.mark.parametrize("verb", ["put", "put_if_absent", "complete"])
@bounded(10)
async def test_a_failed_fsync_fails_the_verb(
    root: Path, verb: str, monkeypatch: pytest.MonkeyPatch, no_open_files: Callable[[], None]
) -> None:
    storage = fs(root)
    writer = await storage.writer("written", 1)

    def fail(fd: int) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    call = {
        "put": lambda: storage.put("key", [memoryview(b"x")]),
        "put_if_absent": lambda: storage.put_if_absent("key", b"x"),
        "complete": writer.complete,
    }[verb]
    with pytest.raises(StorageError, match="Input/output error") as raised:
        await call()
    assert raised.value.op == verb
    assert isinstance(raised.value.__cause__, OSError)
    await writer.abort()
    assert await keys_in(storage) == []


@bounded(10)
async def test_file_systems_without_fsync_of_folders(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def refuse_folders(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(fd)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    await fs(root).put("key", [memoryview(b"x")])
    assert await keys_in(fs(root)) == ["key"]


@bounded(20)
async def test_an_entry_made_during_an_fsync_is_not_forgotten(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder made while its parent is being fsynced needs a second fsync."""
    storage = fs(root)
    await storage.put("first", [memoryview(b"x")])
    folders = storage._folders
    # Another thread is about to make this one; without that, its first use would mark it.
    folders.note(str(root / "late"))
    real = os.fsync
    synced: list[str] = []

    def make_meanwhile(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        synced.append(path)
        if path == str(root) and not (root / "late").exists():
            folders.make(str(root / "late"))
        real(fd)

    monkeypatch.setattr(os, "fsync", make_meanwhile)
    await storage.put("a/key", [memoryview(b"x")])
    synced.clear()
    await storage.put("late/key", [memoryview(b"x")])
    assert str(root) in synced


@bounded(10)
async def test_an_empty_read_beyond_the_end_is_no_short_read(root: Path) -> None:
    storage = fs(root)
    await storage.put("key", [memoryview(b"abc")])
    await storage.read_into("key", 99, [memoryview(bytearray())])
    with pytest.raises(ChecksumMismatch, match="truncated"):
        await storage.read_into("key", 3, [memoryview(bytearray(1))])


@bounded(10)
async def test_links_to_folders_and_to_files_are_not_listed(root: Path, tmp_path: Path) -> None:
    storage = fs(root)
    await storage.put("a/key", [memoryview(b"x")])
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(b"x")
    (root / "folder").symlink_to(tmp_path / "outside")
    (root / "file").symlink_to(root / "a" / "key")
    assert await keys_in(storage) == ["a/key"]


# --- descriptors, leftovers ------------------------------------------------------------------


@pytest.mark.usefixtures("no_open_files")
class TestNothingIsLeftOpen:
    @bounded(10)
    async def test_when_the_writer_is_cancelled_while_it_is_created(self, root: Path) -> None:
        """The result of a function that ran may be lost to cancellation."""

        async def run_then_cancel(fn: Callable[..., T], /, *args: Any) -> T:
            result = await run_blocking_in_thread(fn, *args)
            if fn.__name__ in ("_create_blocking", "_join_blocking"):
                scope.cancel()
                await anyio.lowlevel.checkpoint()
            return result

        storage = FsStorage(str(root), StorageContext(run_blocking=run_then_cancel))
        with anyio.CancelScope() as scope:
            await storage.writer("folder/key", 10)
        assert scope.cancelled_caught
        assert files_below(root.parent) == []
        await fs(root).put("key", [memoryview(b"x")])
        with anyio.CancelScope() as scope:
            await storage.join_writer(b"key")
        assert scope.cancelled_caught

    @bounded(10)
    async def test_when_ftruncate_fails(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(fd: int, size: int) -> NoReturn:
            raise OSError(errno.EFBIG, "File too large")

        monkeypatch.setattr(os, "ftruncate", fail)
        with pytest.raises(StorageError, match="File too large"):
            await fs(root).writer("key", 10)
        assert files_below(root.parent) == []

    @bounded(10)
    async def test_when_it_is_completed_aborted_or_closed(
        self, root: Path, no_open_files: Callable[[], None]
    ) -> None:
        storage = fs(root)
        writer = await storage.writer("one", 0)
        await writer.complete()
        no_open_files()
        writer = await storage.writer("two", 0)
        joined = await storage.join_writer(writer.token)
        await writer.abort()
        await joined.abort()
        no_open_files()
        left = [await storage.writer("three", 0), await storage.join_writer(b"three")]
        await storage.aclose()
        no_open_files()
        assert len(left) == 2

    @bounded(10)
    async def test_when_a_writer_is_forgotten(self, root: Path) -> None:
        storage = fs(root)
        writer = await storage.writer("key", 0)
        await storage.join_writer(writer.token)
        del writer
        # The worker thread holds its last function until it gets another one.
        assert await keys_in(storage) == ["key"]
        gc.collect()
        assert [to for to in descriptors().values() if str(root) in to] == []

    @bounded(10)
    async def test_when_reads_fail(self, root: Path) -> None:
        storage = fs(root)
        await storage.put("key", [memoryview(b"x")])
        with pytest.raises(ChecksumMismatch):
            await storage.get("key", 0, 2)
        with pytest.raises(ChecksumMismatch):
            await storage.read_into("key", 0, [memoryview(bytearray(2))])

    @pytest.mark.parametrize("name", ["pwritev", "fsync", "rename", "link"])
    @bounded(10)
    async def test_and_no_temporary_when_a_put_fails(
        self, root: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*args: object) -> NoReturn:
            raise OSError(errno.EIO, "Input/output error")

        storage = fs(root)
        call = storage.put_if_absent("key", b"x")
        if name == "rename":
            call.close()
            call = storage.put("key", [memoryview(b"x")])
        monkeypatch.setattr(os, name, fail)
        with pytest.raises(StorageError, match="Input/output error"):
            await call
        assert files_below(root) == []


@bounded(10)
async def test_a_descriptor_in_use_is_closed_by_its_last_user(root: Path) -> None:
    """A number closed under a running write could belong to another file by then."""
    storage = fs(root)
    writer = await storage.writer("key", 3)
    assert isinstance(writer, fs_module._FsWriter)
    with writer._descriptor.use() as fd:
        await writer.abort()
        os.fstat(fd)  # still open
        with pytest.raises(StorageError, match="completed, released or aborted"):
            await writer.write_at(0, [memoryview(b"abc")])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@bounded(10)
async def test_abort_after_a_cancelled_complete_removes_the_object(root: Path) -> None:
    async def run_then_cancel(fn: Callable[..., T], /, *args: Any) -> T:
        result = await run_blocking_in_thread(fn, *args)
        if fn.__name__ == "_complete_blocking":
            scope.cancel()
            await anyio.lowlevel.checkpoint()
        return result

    storage = FsStorage(str(root), StorageContext(run_blocking=run_then_cancel))
    writer = await storage.writer("key", 1)
    with anyio.CancelScope() as scope:
        await writer.complete()
    assert scope.cancelled_caught
    await writer.abort()
    assert await keys_in(storage) == []


@bounded(10)
async def test_abort_works_under_cancellation(root: Path) -> None:
    storage = fs(root)
    writer = await storage.writer("folder/key", 1)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await writer.abort()
    assert files_below(root.parent) == []


@bounded(10)
async def test_misuse_of_a_writer(root: Path) -> None:
    storage = fs(root)
    writer = await storage.writer("key", 3)
    joined = await storage.join_writer(writer.token)
    for offset, data in ((-1, b"a"), (1, b"abc"), (4, b"")):
        with pytest.raises(UsageError):
            await writer.write_at(offset, [memoryview(data)])
    with pytest.raises(UsageError, match="only the opener"):
        await joined.complete()
    await joined.abort()
    await writer.write_at(0, [memoryview(b"abc")])
    await writer.complete()
    await writer.abort()
    for call in (writer.complete(), writer.write_at(0, [memoryview(b"x")])):
        with pytest.raises(StorageError, match="completed, released or aborted"):
            await call
    assert await storage.get("key") == b"abc"
    with pytest.raises(UsageError):
        await storage.writer("negative", -1)
    with pytest.raises(UsageError):
        await storage.join_writer(b"../outside")


# --- vectored I/O ----------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 7, 1000])
@bounded(20)
async def test_short_transfers_go_on(
    root: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_calls = 0

    def short(call: Callable[..., int]) -> Callable[..., int]:
        def some(fd: int, views: Sequence[memoryview], offset: int) -> int:
            nonlocal num_calls
            num_calls += 1
            assert len(views) <= posix.IOV_MAX
            return call(fd, [view[: max(1, most // len(views))] for view in views[:1]], offset)

        return some

    monkeypatch.setattr(os, "pwritev", short(os.pwritev))
    monkeypatch.setattr(os, "preadv", short(os.preadv))
    storage = fs(root)
    data = pattern(3_000)
    await storage.put("key", views_of(data, 13))
    target = bytearray(len(data))
    await storage.read_into("key", 0, views_of(target, 17))
    assert target == data
    assert num_calls >= 2 * len(data) // 17


@bounded(10)
async def test_a_write_that_takes_nothing_is_an_error(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwritev", lambda fd, views, offset: 0)
    with pytest.raises(StorageError, match="took 0 of 1 bytes"):
        await fs(root).put("key", [memoryview(b"x")])


@bounded(10)
async def test_a_file_cut_while_it_is_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = fs(root)
    await storage.put("key", [memoryview(b"0123456789")])
    real_preadv, real_pread = os.preadv, os.pread

    def cut_preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        os.truncate(root / "key", 4)
        return real_preadv(fd, views, offset)

    def cut_pread(fd: int, size: int, offset: int) -> bytes:
        os.truncate(root / "key", 4)
        return real_pread(fd, size, offset)

    monkeypatch.setattr(os, "preadv", cut_preadv)
    with pytest.raises(ChecksumMismatch, match="truncated: 10 bytes are needed.*has 4"):
        await storage.read_into("key", 0, [memoryview(bytearray(10))])
    os.truncate(root / "key", 10)
    monkeypatch.setattr(os, "pread", cut_pread)
    with pytest.raises(ChecksumMismatch, match="truncated: 10 bytes are needed.*has 4"):
        await storage.get("key", 0, 10)


@bounded(10)
async def test_views_of_other_formats_count_in_bytes(root: Path) -> None:
    storage = fs(root)
    data = pattern(96)
    grid = memoryview(data).cast("B").cast("i", shape=[4, 6])
    await storage.put("key", [memoryview(data).cast("q"), grid])
    assert await storage.get("key") == data + data
    target = bytearray(96)
    await storage.read_into("key", 96, [memoryview(target).cast("i")])
    assert target == data


# --- list ------------------------------------------------------------------------------------


@bounded(10)
async def test_links_are_not_listed_but_read(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    storage = fs(root)
    await storage.put("a/key", [memoryview(b"x")])
    (root / "folder").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    (root / "loop").symlink_to(root)
    os.mkfifo(root / "pipe")
    assert await keys_in(storage) == ["a/key"]
    assert await keys_in(storage, "fo") == []
    assert await storage.get("file") == b"secret"
    with pytest.raises(ObjectNotFound):
        await storage.get("pipe")
    with pytest.raises(ObjectNotFound):
        await storage.stat("pipe")


@bounded(10)
async def test_the_root_may_be_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    storage = fs(tmp_path / "link")
    await storage.put("key", [memoryview(b"x")])
    assert await keys_in(storage) == ["key"]
    assert (tmp_path / "real" / "key").read_bytes() == b"x"


@bounded(10)
async def test_temporaries_are_listed_and_can_be_deleted(root: Path) -> None:
    storage = fs(root)
    await storage.put_if_absent(".actorsnap", b"x")
    (root / ".actorsnap.0123456789abcdef.tmp").write_bytes(b"left over")
    assert await keys_in(storage) == [".actorsnap", ".actorsnap.0123456789abcdef.tmp"]
    info = (await listed(storage, ".actorsnap."))[0]
    assert info.modified_s == pytest.approx((root / info.key).stat().st_mtime)
    await storage.delete([info.key])
    assert await keys_in(storage) == [".actorsnap"]


@pytest.mark.parametrize(
    ("key", "start"),
    [
        (".actorsnap", ".actorsnap."),
        ("folder/manifest", ".manifest."),
        ("x" * 255, ".xxxx"),
        ("é" * 127, ".éé"),
    ],
)
def test_names_of_temporaries(key: str, start: str) -> None:
    path = posix.temporary_path(f"/folder/{key}")
    folder, name = os.path.split(path)
    assert folder == os.path.dirname(f"/folder/{key}")
    assert name.startswith(start)
    assert name.endswith(".tmp")
    assert len(os.fsencode(name)) <= 255
    assert path != posix.temporary_path(f"/folder/{key}")


@bounded(10)
async def test_keys_with_the_longest_names(root: Path) -> None:
    storage = fs(root)
    for key in ("x" * 255, "é" * 127, "folder/" + "y" * 255):
        await storage.put(key, [memoryview(b"x")])
        await storage.delete([key])
        await storage.put_if_absent(key, b"x")
    assert len(await keys_in(storage)) == 3


@bounded(10)
async def test_deep_keys(root: Path) -> None:
    key = "/".join(["d"] * 400)
    storage = fs(root)
    await storage.put(key, [memoryview(b"x")])
    assert await keys_in(storage) == [key]
    await storage.delete([key])
    assert files_below(root.parent) == []


# --- delete ----------------------------------------------------------------------------------


@bounded(10)
async def test_the_root_vanishes_with_its_last_object_and_its_parent_stays(root: Path) -> None:
    storage = fs(root)
    await storage.put("a/b/c", [memoryview(b"x")])
    await storage.put("a/d", [memoryview(b"x")])
    await storage.delete(["a/b/c"])
    assert files_below(root) == ["a", "a/d"]
    await storage.delete(["a/d"])
    assert files_below(root.parent) == []
    assert root.parent.is_dir()


@bounded(10)
async def test_empty_folders_left_by_a_crash_go_with_a_repeated_delete(root: Path) -> None:
    (root / "a" / "b").mkdir(parents=True)
    await fs(root).delete(["a/b/gone"])
    assert files_below(root.parent) == []


@bounded(10)
async def test_folders_are_no_objects(root: Path) -> None:
    storage = fs(root)
    await storage.put("a/key", [memoryview(b"x")])
    await storage.delete(["a"])
    assert await keys_in(storage) == ["a/key"]
    with pytest.raises(StorageError, match="a folder has this name"):
        await storage.put("a", [memoryview(b"x")])
    assert files_below(root) == ["a", "a/key"]


@bounded(10)
async def test_creators_make_a_pruned_folder_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder vanishes between mkdir and open, twice."""
    storage = fs(root)
    real = os.open
    num_vanished = 0

    def open_after_prune(path: str, flags: int, mode: int = 0o777) -> int:
        nonlocal num_vanished
        if flags & os.O_CREAT and num_vanished < 2 and (root / "folder").is_dir():
            num_vanished += 1
            (root / "folder").rmdir()
            root.rmdir()
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", open_after_prune)
    await storage.put("folder/key", [memoryview(b"x")])
    assert num_vanished == 2
    assert await storage.get("folder/key") == b"x"


@bounded(10)
async def test_a_folder_that_vanishes_for_ever_is_an_error(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def never_there(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", never_there)
    with pytest.raises(StorageError, match="vanishes again and again") as raised:
        await fs(root).put("key", [memoryview(b"x")])
    assert raised.value.retryable


# --- errors ----------------------------------------------------------------------------------


@bounded(10)
async def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"x")
    storage = fs(path)
    for call in (
        keys_in(storage),
        keys_in(storage, "folder/"),
        storage.get(".actorsnap"),
        storage.put("key", [memoryview(b"x")]),
        storage.writer("a/key", 1),
        storage.delete(["key"]),
    ):
        with pytest.raises(StorageError, match="is a file") as raised:
            await call
        assert not isinstance(raised.value, ObjectNotFound)
    assert path.read_bytes() == b"x"
    with pytest.raises(StorageError, match="is a file"):
        await fs(path / "below").put("key", [memoryview(b"x")])


@bounded(10)
async def test_a_parent_that_is_an_object(root: Path) -> None:
    storage = fs(root)
    await storage.put("a", [memoryview(b"x")])
    for call in (
        storage.put("a/b", [memoryview(b"x")]),
        storage.put_if_absent("a/b/c", b"x"),
        storage.writer("a/b", 1),
    ):
        with pytest.raises(StorageError, match="a parent is a file: 'a' is an object"):
            await call
    with pytest.raises(ObjectNotFound):
        await storage.get("a/b")
    await storage.delete(["a/b"])
    assert await keys_in(storage, "a/") == []
    assert await keys_in(storage) == ["a"]


@bounded(10)
async def test_names_that_are_too_long(root: Path) -> None:
    storage = fs(root)
    for key in ("x" * 256, "é" * 128):
        for call in (
            storage.put(key, [memoryview(b"x")]),
            storage.put_if_absent(key, b"x"),
            storage.writer(key, 1),
            storage.get(key),
        ):
            with pytest.raises(StorageError, match="at most 255 bytes"):
                await call


@bounded(10)
async def test_lone_surrogates_in_a_key(root: Path) -> None:
    for call in (fs(root).put("\ud800", [memoryview(b"x")]), fs(root).writer("\ud800", 1)):
        with pytest.raises(StorageError, match="not a valid file name"):
            await call


@bounded(10)
async def test_the_full_disk(root: Path) -> None:
    os.makedirs(root)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(root)]
    done = await anyio.run_process(mount, check=False)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.decode().strip()}")
    try:
        storage = fs(root)
        await storage.put("older", [memoryview(b"older")])
        for call in (
            storage.put("older", views_of(bytes(2 << 20), 4096)),
            storage.put_if_absent("absent", bytes(2 << 20)),
        ):
            with pytest.raises(StorageFull, match=r"\d+ bytes were left .* Delete old") as raised:
                await call
            assert isinstance(raised.value.__cause__, OSError)
        assert await storage.get("older") == b"older"
        assert await keys_in(storage) == ["older"]
        writer = await storage.writer("written", 2 << 20)
        with pytest.raises(StorageFull) as raised:
            await writer.write_at(0, [memoryview(bytes(2 << 20))])
        assert (raised.value.op, raised.value.key) == ("write_at", "written")
        await writer.abort()
        await storage.put("fits", [memoryview(bytes(500_000))])
        assert await keys_in(storage) == ["fits", "older"]
        await storage.aclose()
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.run_process(["umount", str(root)])


def run_child(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Runs a coroutine ``main(storage)`` in another process, on the root in ``args[0]``."""
    start = """
    import os, signal, sys
    import anyio
    from actorsnap.errors import *
    from actorsnap.storage import StorageContext, fs
    from actorsnap.storage.fs import FsStorage
    from actorsnap.testing import run_blocking_in_thread

    context = StorageContext(run_blocking=run_blocking_in_thread)
    storage = FsStorage(sys.argv[1], context)
    """
    return subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(start) + textwrap.dedent(code) + "\nanyio.run(main)\n",
            *map(str, args),
        ],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        timeout=300,
        capture_output=True,
        text=True,
        check=False,
    )


def test_permission_denied(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "folder").mkdir(parents=True)
    (root / "key").write_bytes(b"x")
    (root / "key").chmod(0)
    (root / "folder" / "other").write_bytes(b"x")
    (root / "folder").chmod(0o555)
    root.chmod(0o555)
    # The child gives root's rights up, for which modes do not count; it must still get here.
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == "root" or os.geteuid() == folder.stat().st_uid:
            if not folder.stat().st_mode & 0o001:
                folder.chmod(folder.stat().st_mode | 0o001)
    done = run_child(
        """
        async def main():
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            calls = {
                "get": lambda: storage.get("key"),
                "put": lambda: storage.put("new", [memoryview(b"x")]),
                "put_if_absent": lambda: storage.put_if_absent("new", b"x"),
                "writer": lambda: storage.writer("new", 1),
                "writer ": lambda: storage.writer("a/b", 1),
                "delete": lambda: storage.delete(["folder/other"]),
            }
            for name, call in calls.items():
                try:
                    await call()
                except AccessDenied as error:
                    assert isinstance(error, PermissionError)
                    assert error.op == name.strip(), error
                    assert "check owner and mode" in str(error), error
                    assert not error.retryable
                    print(name, "denied")
        """,
        root,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 6, done.stdout
    assert files_below(root) == ["folder", "folder/other", "key"]


def test_a_full_error_is_picklable() -> None:
    error = posix.translate_os_error(
        OSError(errno.ENOSPC, "No space left on device"), op="put", key="k", root="/none/at/all"
    )
    assert pickle.loads(pickle.dumps(error)).fields == error.fields


@pytest.mark.parametrize(
    ("number", "kind", "retryable", "words"),
    [
        (errno.ENOENT, ObjectNotFound, False, "no such object"),
        (errno.EEXIST, ObjectExists, False, "exists already"),
        (errno.EACCES, AccessDenied, False, "check owner and mode"),
        (errno.EPERM, AccessDenied, False, "check owner and mode"),
        (errno.EROFS, AccessDenied, False, "remount it"),
        (errno.ENOSPC, StorageFull, False, "bytes were left"),
        (errno.EDQUOT, StorageFull, False, "a quota of bytes or of files is used up"),
        (errno.ENAMETOOLONG, StorageError, False, "at most 255 bytes"),
        (errno.EMFILE, StorageError, True, "ulimit -n"),
        (errno.EIO, StorageError, False, "Input/output error"),
        (errno.ESTALE, StorageError, True, ""),
    ],
)
def test_errors_of_the_system(
    number: int, kind: type[StorageError], retryable: bool, words: str, tmp_path: Path
) -> None:
    given = OSError(number, os.strerror(number))
    error = posix.translate_os_error(given, op="put", key="k", root=str(tmp_path / "a" / "b"))
    assert type(error) is kind
    assert (error.op, error.key, error.backend) == ("put", "k", str(tmp_path / "a" / "b"))
    assert error.retryable is retryable
    assert words in str(error)


@pytest.mark.parametrize(("key", "kind"), [("missing", None), ("key", AccessDenied)])
@bounded(10)
async def test_only_what_exists_cannot_be_deleted_on_a_read_only_mount(
    root: Path, key: str, kind: type[StorageError] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = fs(root)
    await storage.put("key", [memoryview(b"x")])
    # Linux refuses before it looks for the file.
    monkeypatch.setattr(os, "unlink", refuse(errno.EROFS))
    with nullcontext() if kind is None else pytest.raises(kind):
        await storage.delete([key])


# --- put_if_absent ---------------------------------------------------------------------------


def refuse(number: int) -> Callable[..., NoReturn]:
    def call(*args: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
@bounded(10)
async def test_an_exclusive_rename_where_links_are_not_supported(
    root: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refuse(number))
    storage = fs(root)
    await storage.put_if_absent("key", b"first")
    with pytest.raises(ObjectExists):
        await storage.put_if_absent("key", b"second")
    assert await storage.get("key") == b"first"
    assert files_below(root) == ["key"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS])
@bounded(10)
async def test_no_fallback_that_is_not_atomic(
    root: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refuse(errno.EPERM))
    monkeypatch.setattr(posix, "rename_exclusively", refuse(number))
    with pytest.raises(StorageError, match="neither hard links nor an exclusive rename"):
        await fs(root).put_if_absent("key", b"x")
    assert files_below(root) == []


@bounded(10)
async def test_a_link_whose_answer_was_lost(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS repeats the call and meets the link that its first try made."""
    real = os.link

    def link_twice(source: str, target: str) -> None:
        real(source, target)
        real(source, target)

    monkeypatch.setattr(os, "link", link_twice)
    await fs(root).put_if_absent("key", b"x")
    assert files_below(root) == ["key"]


RACE = """
async def main():
    await anyio.to_thread.run_sync(sys.stdin.readline)
    won = []
    for n in range(100):
        try:
            await storage.put_if_absent(f"{n}/.actorsnap", sys.argv[2].encode() * 2000)
            won.append(n)
        except ObjectExists:
            pass
    print(*won)
"""


def test_two_processes_race_for_each_key(root: Path) -> None:
    code = textwrap.dedent(
        """
        import sys
        import anyio, anyio.to_thread
        from actorsnap.errors import ObjectExists
        from actorsnap.storage import StorageContext
        from actorsnap.storage.fs import FsStorage
        from actorsnap.testing import run_blocking_in_thread
        storage = FsStorage(
            sys.argv[1], StorageContext(run_blocking=run_blocking_in_thread, durable=False)
        )
        print("ready", flush=True)
        """
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code + RACE + "\nanyio.run(main)\n", str(root), name],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b", "c")
    ]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        outputs = [child.communicate(timeout=300)[0] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    won = [[int(word) for word in output.split()] for output in outputs]
    assert sorted(n for numbers in won for n in numbers) == list(range(100))
    for name, numbers in zip("abc", won, strict=True):
        for n in numbers:
            assert (root / f"{n}" / ".actorsnap").read_bytes() == name.encode() * 2000
    assert len(files_below(root)) == 200


# --- crashes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["put", "put_if_absent"])
def test_a_crash_before_publication_leaves_a_listed_temporary(root: Path, verb: str) -> None:
    call = {
        "put": 'storage.put(".actorsnap", [memoryview(b"x")])',
        "put_if_absent": 'storage.put_if_absent(".actorsnap", b"x")',
    }[verb]
    done = run_child(
        f"""
        def die(*args):
            os.kill(os.getpid(), signal.SIGKILL)
        fs.os.link = fs.os.rename = die
        async def main():
            await {call}
        """,
        root,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr

    async def collect() -> None:
        storage = fs(root)
        left = await keys_in(storage, ".actorsnap")
        assert len(left) == 1
        assert left[0].startswith(".actorsnap.")
        assert left[0].endswith(".tmp")
        with pytest.raises(ObjectNotFound):
            await storage.get(".actorsnap")
        await storage.put_if_absent(".actorsnap", b"y")
        await storage.delete(left)
        assert await keys_in(storage) == [".actorsnap"]

    anyio.run(collect)


def test_a_crash_while_writing_leaves_an_object_that_a_second_writer_meets(root: Path) -> None:
    done = run_child(
        """
        async def main():
            writer = await storage.writer("attempt/key", 10)
            await writer.write_at(0, [memoryview(b"01234")])
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        root,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr

    async def look() -> None:
        storage = fs(root)
        with pytest.raises(ObjectExists):
            await storage.writer("attempt/key", 10)
        await storage.delete(["attempt/key"])
        assert files_below(root.parent) == []

    anyio.run(look)


# --- opening ---------------------------------------------------------------------------------


@bounded(10)
async def test_nothing_is_created_before_the_first_write(root: Path) -> None:
    storage = fs(root)
    assert await keys_in(storage) == []
    await storage.delete(["key"])
    with pytest.raises(ObjectNotFound):
        await storage.get("key")
    await storage.aclose()
    assert not root.parent.exists()


def test_options_are_refused_by_name(root: Path) -> None:
    with pytest.raises(UsageError, match="endpoint, region"):
        open_storage(
            str(root),
            StorageContext(
                run_blocking=run_blocking_in_thread, options={"region": 1, "endpoint": 2}
            ),
        )


@pytest.mark.blocking  # getcwd, once per opening
@bounded(10)
async def test_a_relative_root_stays_when_the_working_folder_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    storage = open_storage("relative/root", context())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    await storage.put("key", [memoryview(b"x")])
    assert (tmp_path / "relative" / "root" / "key").exists()
