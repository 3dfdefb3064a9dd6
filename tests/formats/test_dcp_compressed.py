# SPDX-License-Identifier: Apache-2.0
"""Snapshots of folders that DCP wrote through its ``ZStandard`` extension."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import actorsnap
from actorsnap import Options, StateDict, UsageError
from actorsnap.actors.formats import Place
from actorsnap.errors import (
    ChecksumMismatch,
    FormatError,
    SnapshotReplaced,
    StorageFull,
    UnsupportedFormat,
)
from actorsnap.format import compression
from actorsnap.storage import unpacked
from actorsnap.sync import Snapshot
from tests.formats.checkpoints import is_same, training_state

dcp: Any = torch.distributed.checkpoint  # its stubs export little
zstd = pytest.importorskip(compression._MODULE)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


class Zstd(StreamTransformExtension):
    """What torch's ``ZStandard`` does, without its library."""

    name = "stream.zstd"
    frame_bytes = 1 << 30

    @staticmethod
    def from_descriptor(version: str) -> Zstd:
        return Zstd()

    @staticmethod
    def registry_name() -> str:
        return Zstd.name

    def get_descriptor(self) -> str:
        return f"{self.name}/1"

    def transform_to(self, output: Any) -> Any:
        step = self.frame_bytes

        class Writer(io.BytesIO):
            def close(self) -> None:
                if not self.closed:
                    data = self.getvalue()
                    for start in range(0, len(data), step):
                        output.write(zstd.compress(data[start : start + step]))
                super().close()

        return Writer()

    def transform_from(self, input: Any) -> Any:  # noqa: A002  # as torch names it
        raise NotImplementedError


def save(state: dict[str, Any], path: Path) -> None:
    writer = dcp.FileSystemWriter(path, _extensions=[Zstd()], overwrite=True)
    dcp.save(state, storage_writer=writer, no_dist=True)


def change_item(path: Path, fqn: str, change: Callable[[bytes], bytes]) -> None:
    """Rewrites the stream of an item, at the end of its file, and ``.metadata``."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    (index,) = [index for index in metadata.storage_data if index.fqn == fqn]
    info = metadata.storage_data[index]
    file = path / info.relative_path
    data = file.read_bytes()
    stream = change(data[info.offset : info.offset + info.length])
    file.write_bytes(data + stream)
    info.offset, info.length = len(data), len(stream)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def zip_of(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def nameless() -> set[str]:
    """Returns the temporary files without a name that this process has open."""
    held = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            held.add(os.readlink(f"/proc/self/fd/{number}"))
    return {name for name in held if name.endswith("(deleted)")}


@pytest.fixture(autouse=True)
def temporary_files() -> Iterator[None]:
    """None is left, whatever happens to a read."""
    before = nameless()
    yield
    assert nameless() <= before


@pytest.mark.parametrize("frame_bytes", [1 << 30, 700], ids=["one frame", "many frames"])
def test_reads_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frame_bytes: int) -> None:
    monkeypatch.setattr(Zstd, "frame_bytes", frame_bytes)
    model, optimizer, saved = training_state(0)
    saved["odd"] = {
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "empty": torch.ones(0, 3),
        "scalar": torch.tensor(7),
        "bf16": torch.randn(3).bfloat16(),
        "with tensors": (torch.ones(2), {"a": torch.zeros(3), "b": "z" * 5000}),
    }
    save(saved, tmp_path / "old")
    snapshot = Snapshot(tmp_path / "old")
    report = snapshot.verify("full")
    assert (report.ok, report.has_checksums) == (True, False)
    snapshot.copy_to(tmp_path / "new")
    assert Snapshot(tmp_path / "new").verify("full").has_checksums
    for url in ("old", "new"):
        other, another, _ = training_state(1)
        addresses = [parameter.data_ptr() for parameter in other.parameters()]
        snapshot = Snapshot(tmp_path / url)
        snapshot.restore({"model": other, "optimizer": another}, strict=False)
        assert [parameter.data_ptr() for parameter in other.parameters()] == addresses
        assert is_same(other, model)
        assert str(another.state_dict()) == str(optimizer.state_dict())
        odd = snapshot.get_state_dict_for_key("odd")
        assert odd["transposed"].stride() == (1, 4)
        assert str(odd) == str(saved["odd"])
        assert snapshot.read_object("odd/scalar").item() == 7


def sharded(path: Path, whole: torch.Tensor, rows: int) -> None:
    """A folder with a tensor in parts of some rows each."""
    path.mkdir()
    chunks, data, places = [], b"", {}
    for start in range(0, len(whole), rows):
        part = whole[start : start + rows].clone()
        stream = zstd.compress(zip_of(part))
        offsets = torch.Size([start, 0])
        chunks.append(ChunkStorageMetadata(offsets, part.shape))
        info = _StorageInfo("a.distcp", len(data), len(stream), ["stream.zstd/1"])
        places[MetadataIndex("t", offsets, len(chunks) - 1)] = info
        data += stream
    properties = TensorProperties(dtype=whole.dtype)
    tensor = TensorStorageMetadata(properties, whole.shape, chunks)
    metadata = Metadata({"t": tensor}, storage_data=places)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    (path / "a.distcp").write_bytes(data)


def test_unpacks_each_item_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many reads of an item, at the same time, wait for one temporary file."""
    created: list[str] = []
    most_held = 0

    class Counted(unpacked._File):
        def __init__(self, key: str, packed: unpacked.Packed) -> None:
            nonlocal most_held
            super().__init__(key, packed)
            created.append(key)
            most_held = max(most_held, len(nameless()) - num_before)

    num_before = len(nameless())
    monkeypatch.setattr(unpacked, "_File", Counted)
    whole = torch.randn(12, 400_000)
    sharded(tmp_path / "a", whole, 6)
    target = StateDict(t=torch.zeros(12, 400_000))
    Snapshot(tmp_path / "a", options=Options(chunk_bytes=2 << 20)).restore({"model": target})
    assert target["t"].equal(whole)
    assert len(created) == 2
    created.clear()
    most_held = 0
    monkeypatch.setattr(unpacked, "_MAX_FILES", 1)
    sharded(tmp_path / "b", whole, 1)
    one = Snapshot(tmp_path / "b", options=Options(num_uploaders=1))
    assert one.read_object("model/t").equal(whole)
    assert (len(created), most_held) == (12, 2)


def test_opening_reads_the_beginning_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"a": torch.randn(1 << 20), "b": torch.randn(1 << 20)}, tmp_path)
    num_read = 0
    get_all = Place.get_all

    async def counting(place: Place, ranges: Any) -> list[bytes]:
        nonlocal num_read
        num_read += sum([stop - start for _, start, stop in ranges])
        return await get_all(place, ranges)

    monkeypatch.setattr(Place, "get_all", counting)
    Snapshot(tmp_path).get_manifest()
    assert 0 < num_read < 300_000


def flipped(stream: bytes) -> bytes:
    at = len(stream) // 2
    return stream[:at] + bytes([stream[at] ^ 1]) + stream[at + 1 :]


LARGE = torch.arange(300_000) * 0x9E3779B97F4A7C15 % 0x7FFFFFFFFFFFFFE7  # does not compress

DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "truncated": (lambda stream: stream[:-100], "zstd stream is (truncated|damaged)"),
    "garbage": (lambda stream: stream[:300_000] + b"x" * 10, "zstd stream is"),
    "a flipped bit": (flipped, "do not match its checksum|zstd stream is damaged"),
    "more behind it": (lambda stream: stream + zstd.compress(bytes(1 << 20)), "of more than"),
    "shorter": (
        lambda stream: zstd.compress(zip_of(LARGE)[:2_000_000]),
        "truncated: 24.* bytes are needed",
    ),
    "without a directory": (
        lambda stream: zstd.compress(zip_of(LARGE)[:2_400_900]),
        "the zip directory at its end is missing",
    ),
    "another directory": (
        lambda stream: zstd.compress(zip_of(LARGE)[::-1].replace(b"0/atad", b"1/atad", 1)[::-1]),
        "data/0 is not the 2400000 bytes from byte",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found(tmp_path: Path, damage: str) -> None:
    change, message = DAMAGES[damage]
    save({"a": {"x": LARGE, "y": torch.ones(3)}}, tmp_path)
    change_item(tmp_path, "a.x", change)
    snapshot = Snapshot(tmp_path)
    assert snapshot.read_object("a/y").equal(torch.ones(3))
    with pytest.raises(
        ChecksumMismatch, match=f"__0_0.distcp/.*'a.x' in __0_0.distcp.*({message})"
    ):
        snapshot.read_object("a/x")
    assert not snapshot.verify("full").ok


def _replaced(stream: bytes, _: bytes) -> bytes:
    return stream


def test_what_is_no_tensor_is_found_when_opened(tmp_path: Path) -> None:
    streams = {
        "bomb": zstd.compress(bytes(1 << 26)),
        "a file": zstd.compress(b"x" * 100_000),
        "cut": zstd.compress(zip_of(LARGE))[:50],
        "another shape": zstd.compress(zip_of(torch.ones(2))),
    }
    for name, stream in streams.items():
        save({"a": {"x": LARGE}}, tmp_path / name)
        change_item(tmp_path / name, "a.x", partial(_replaced, stream))
        with pytest.raises(FormatError, match=r"'a\.x' in __0_0\.distcp"):
            Snapshot(tmp_path / name).get_manifest()


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
@pytest.mark.parametrize("times", [1, 100])
def test_a_folder_that_is_saved_again_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """The call begins again; it gives up if that goes on and on."""
    numbers = iter(range(1, 1000))
    left = times

    def save_again() -> float:
        number = float(next(numbers))
        save({"a": {"x": torch.full((1000,), number)}}, tmp_path)
        later = time.time_ns() + int(number) * 1000
        for path in tmp_path.iterdir():
            os.utime(path, ns=(later, later))
        return number

    last = save_again()
    unpack = unpacked.UnpackedStorage._unpack

    async def unpack_later(storage: unpacked.UnpackedStorage, key: str) -> unpacked._File:
        nonlocal left, last
        if left:
            left -= 1
            last = await anyio.to_thread.run_sync(save_again)
        return await unpack(storage, key)

    monkeypatch.setattr(unpacked.UnpackedStorage, "_unpack", unpack_later)
    snapshot = Snapshot(tmp_path)
    if times == 1:
        assert snapshot.read_object("a/x").equal(torch.full((1000,), last))
        assert last == 2
        return
    with pytest.raises(SnapshotReplaced):
        snapshot.read_object("a/x")


def test_a_full_temporary_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"a": {"x": torch.ones(3)}}, tmp_path)

    def pwrite(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(StorageFull, match=r"'a\.x' in __0_0.*No space left.*TMPDIR"):
        Snapshot(tmp_path).read_object("a/x")


def test_needs_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"a": {"x": torch.ones(3)}}, tmp_path)
    monkeypatch.setattr(compression, "_MODULE", "no_such_module")
    compression._zstd.cache_clear()
    try:
        with pytest.raises(UnsupportedFormat, match=r"'a\.x'.*pip install 'actorsnap\[zstd\]'"):
            Snapshot(tmp_path).get_manifest()
    finally:
        compression._zstd.cache_clear()


async def test_a_cancelled_read_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asyncio.to_thread(save, {"a": {"x": torch.randn(4 << 20)}}, tmp_path)
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()
    append = unpacked._File.append

    def noting(file: unpacked._File, *args: Any) -> None:
        loop.call_soon_threadsafe(begun.set)
        append(file, *args)

    monkeypatch.setattr(unpacked._File, "append", noting)
    reading = asyncio.ensure_future(actorsnap.Snapshot(tmp_path).read_object("a/x"))
    await begun.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert await actorsnap.Snapshot(tmp_path).read_object("a/x") is not None


def test_damaged_values_and_other_extensions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"a": {"x": [1, 2], "y": "z" * 5000}}, tmp_path / "values")
    data = (tmp_path / "values" / "__0_0.distcp").read_bytes()
    (tmp_path / "values" / "__0_0.distcp").write_bytes(data[:10] + bytes(len(data) - 10))
    with pytest.raises(FormatError, match="zstd stream is"):
        Snapshot(tmp_path / "values").get_manifest()
    monkeypatch.setattr(Zstd, "name", "stream.mine")
    save({"a": {"x": 1}}, tmp_path / "unknown")
    with pytest.raises(UsageError, match=r"stream\.mine/1"):
        Snapshot(tmp_path / "unknown").get_manifest()
