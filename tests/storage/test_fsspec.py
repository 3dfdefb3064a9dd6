# SPDX-License-Identifier: Apache-2.0
"""Storage by fsspec: the contract on several implementations, and what is weaker there."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from actorsnap import sync
from actorsnap.errors import AccessDenied, NotASnapshot, ObjectExists, StorageError, UsageError
from actorsnap.storage import Storage, StorageContext
from actorsnap.storage.fsspec import open_fsspec
from actorsnap.storage.registry import find_opener
from actorsnap.testing import StorageConformance, bounded, run_blocking_in_thread
from actorsnap.testing.conformance import MakeStorage, keys_in, pattern

SECRET = "a-secret-that-no-log-may-show"

_numbers = itertools.count()


class AsyncMemory(AsyncFileSystem):  # type: ignore[misc]
    """An asynchronous object store in memory; its streams are blocking, as all are."""

    protocol = "asyncmemory"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._inner = MemoryFileSystem()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("asyncmemory://").strip("/")

    def _at(self, path: str) -> str:
        return f"asyncmemory/{path}"

    async def _cat_file(
        self,
        path: str,
        version_id: str | None = None,  # as s3fs has it
        start: int | None = None,
        end: int | None = None,
    ) -> bytes:
        assert version_id is None
        found: bytes = self._inner.cat_file(self._at(path), start, end)
        return found

    async def _pipe_file(
        self, path: str, value: bytes, mode: str = "overwrite", **options: Any
    ) -> None:
        if path.endswith("/locked"):
            raise PermissionError(f"the key {self.storage_options.get('account_key')} is wrong")
        self._inner.pipe_file(self._at(path), value, mode=mode)

    async def _info(self, path: str, **options: Any) -> dict[str, Any]:
        return {**self._inner.info(self._at(path)), "name": path}

    async def _ls(self, path: str, detail: bool = True, **options: Any) -> list[dict[str, Any]]:
        found = self._inner.ls(self._at(path))
        return [{**info, "name": info["name"].removeprefix("/asyncmemory/")} for info in found]

    async def _rm_file(self, path: str, **options: Any) -> None:
        self._inner.rm_file(self._at(path))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        assert not self.asynchronous
        return self._inner.open(self._at(path), mode)


fsspec.register_implementation("asyncmemory", AsyncMemory)


def opened(url: str, **options: Any) -> Storage:
    return open_fsspec(url, StorageContext(run_blocking=run_blocking_in_thread, options=options))


@pytest.fixture
def memory() -> str:
    """The URL of an empty place."""
    return f"fsspec+memory://test-{next(_numbers)}"


@pytest.fixture
def asyncmemory() -> str:
    return f"asyncmemory://test-{next(_numbers)}"


@pytest.mark.few
class TestFsspecMemory(StorageConformance):
    @pytest.fixture
    def make_storage(self, memory: str) -> MakeStorage:
        return lambda: opened(f"{memory}/prefix")


@pytest.mark.few
class TestFsspecLocal(StorageConformance):
    num_many = 100

    @pytest.fixture
    def make_storage(self, tmp_path: Path) -> MakeStorage:
        return lambda: opened(f"fsspec+file://{tmp_path}/folder")


@pytest.mark.few
class TestFsspecAsync(StorageConformance):
    @pytest.fixture
    def make_storage(self, asyncmemory: str) -> MakeStorage:
        return lambda: opened(f"{asyncmemory}/prefix")


# --- schemes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("nowhere://host/path", "unknown storage scheme 'nowhere'.* which is installed"),
        ("fsspec+nowhere://host/path", "unknown storage scheme 'fsspec.nowhere'"),
        ("abfs://container/path", "abfs:// needs the package 'adlfs',.*: pip install adlfs$"),
    ],
)
def test_schemes_that_cannot_be_opened(url: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        find_opener(url)(StorageContext(run_blocking=run_blocking_in_thread))


def test_without_fsspec_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorsnap.storage.registry.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"unknown storage scheme 'abfs'.*actorsnap\[fsspec\]"):
        find_opener("abfs://container/path")


# --- streams ------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["rising", "falling", "random"])
@bounded(30)
async def test_writes_in_any_order_one_after_the_other(memory: str, order: str) -> None:
    storage = opened(memory)
    data = pattern(100_003)
    starts = [*range(0, len(data), 10_000)]
    if order == "falling":
        starts.reverse()
    elif order == "random":
        random.Random(1).shuffle(starts)
    writer = await storage.writer("key", len(data))
    for start in starts:
        await writer.write_at(start, [memoryview(data)[start : start + 10_000]])
    await writer.complete()
    assert await storage.get("key") == data
    await storage.aclose()


@bounded(30)
async def test_a_gap_is_missed(memory: str) -> None:
    storage = opened(memory)
    writer = await storage.writer("key", 30)
    for offset in (0, 20):
        await writer.write_at(offset, [memoryview(bytes(10))])
    with pytest.raises(StorageError, match="byte 10 of 30"):
        await writer.complete()
    await writer.abort()
    assert await keys_in(storage) == []
    await storage.aclose()


class Broken:
    """A stream that takes some bytes and then fails."""

    def __init__(self) -> None:
        self.is_discarded = False

    def write(self, view: memoryview) -> int:
        raise TimeoutError("the line is dead")

    def discard(self) -> None:
        self.is_discarded = True

    def close(self) -> None:
        pass


@bounded(30)
async def test_a_stream_that_broke_is_not_gone_on_with(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = opened(memory)
    stream = Broken()
    monkeypatch.setattr(MemoryFileSystem, "_open", lambda *args, **options: stream)
    writer = await storage.writer("key", 20)
    with pytest.raises(StorageError, match="the line is dead") as raised:
        await writer.write_at(0, [memoryview(bytes(10))])
    assert not raised.value.retryable
    with pytest.raises(StorageError, match="broke before"):
        await writer.write_at(10, [memoryview(bytes(10))])
    with pytest.raises(StorageError, match="broke before"):
        await writer.complete()
    await writer.abort()
    assert stream.is_discarded
    await storage.aclose()


# --- promises -----------------------------------------------------------------------------------


@bounded(30)
async def test_a_writer_that_was_replaced_notices(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = opened(memory)
    assert not storage.capabilities.has_conditional_put
    assert not storage.capabilities.has_joined_writers
    pipe = MemoryFileSystem.pipe_file

    def raced(self: Any, path: str, value: bytes, mode: str = "overwrite") -> None:
        pipe(self, path, b"of another writer")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", raced)
    with pytest.raises(ObjectExists, match="another writer"):
        await storage.put_if_absent("key", b"ours")
    await storage.aclose()


@bounded(30)
async def test_a_folder_above_vanishes_while_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = LocalFileSystem.makedirs
    lost = iter([FileNotFoundError(2, "No such file or directory")])

    def makedirs(self: Any, path: str, exist_ok: bool = False) -> None:
        for error in lost:
            raise error
        make(self, path, exist_ok=exist_ok)

    monkeypatch.setattr(LocalFileSystem, "makedirs", makedirs)
    storage = opened(f"fsspec+file://{tmp_path}")
    await storage.put("a/b/c", [memoryview(b"x")])
    assert await storage.get("a/b/c") == b"x"
    await storage.aclose()


@bounded(30)
async def test_secrets_are_not_shown(asyncmemory: str) -> None:
    url = asyncmemory.replace("://", f"://user:{SECRET}@")
    storage = opened(f"{url}/folder?sig={SECRET}", account_key=SECRET)
    with pytest.raises(AccessDenied, match=r"the key \.\.\. is wrong") as raised:
        await storage.put("locked", [memoryview(b"x")])
    assert SECRET not in str(raised.value)
    assert SECRET not in raised.value.backend
    await storage.aclose()


def test_handles_do_not_show_secrets() -> None:
    for url in (f"sftp://user:{SECRET}@host/run", f"https://host/run?sig={SECRET}"):
        snapshot = sync.Snapshot(url)
        shown = f"{snapshot!r} {snapshot.path} {snapshot._source.location!r}"
        assert "host/run" in shown
        assert SECRET not in shown


@pytest.fixture
def http(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A server of the files of a folder: asynchronous, without ranges, and nobody may write."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", tmp_path
    server.shutdown()
    thread.join()
    server.server_close()


@bounded(30)
async def test_a_web_server_is_read_only(http: tuple[str, Path]) -> None:
    url, folder = http
    (folder / "key").write_bytes(b"0123456789")
    storage = opened(url)
    assert await storage.get("key") == b"0123456789"
    with pytest.raises(StorageError, match="read-only"):
        await storage.put("other", [memoryview(b"x")])
    await storage.aclose()


# --- snapshots ----------------------------------------------------------------------------------


class Weights:
    def __init__(self, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        self.state = {f"w{n}": torch.randn(3 << 18, generator=made) for n in range(24)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.state = state


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["memory", "asyncmemory", "local"])
def test_snapshots(memory: str, asyncmemory: str, tmp_path: Path, kind: str) -> None:
    places = {"memory": memory, "asyncmemory": asyncmemory, "local": f"fsspec+file://{tmp_path}/a"}
    url = f"{places[kind]}/run"
    snapshot = sync.Snapshot.take(url, {"model": Weights(1)})
    found = Weights(2)
    sync.Snapshot(url).restore({"model": found})
    for name, tensor in Weights(1).state.items():
        assert torch.equal(found.state[name], tensor)
    assert not snapshot.verify("full").problems
    sync.Snapshot.take(url, {"model": Weights(3)}, overwrite=True)
    sync.Snapshot(url).delete()
    with pytest.raises(NotASnapshot):
        sync.Snapshot(url).get_manifest()
