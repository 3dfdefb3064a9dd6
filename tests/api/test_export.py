# SPDX-License-Identifier: Apache-2.0
"""``Snapshot.export_hf``: what is written, refused, left behind; servers: ``tests/cloud``."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import load_file

from actorsnap import (
    ChecksumMismatch,
    ExportReport,
    ObjectExists,
    Options,
    Snapshot,
    StateDict,
    UsageError,
    sync,
)
from actorsnap.interop.exports import export_torch
from actorsnap.storage.posix import copy_range
from actorsnap.storage.wrapper import Wrapper
from actorsnap.testing import FaultyStorage
from tests.api.faults import faulty, faulty_url
from tests.formats.checkpoints import write_repo
from tests.support.cases import slow

INDEX = "model.safetensors.index.json"


class Net(torch.nn.Module):
    """Tied weights, a buffer, an integer, an empty and a strided parameter, an extra state."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = torch.nn.Embedding(300, width)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range(4)])
        self.norm = torch.nn.BatchNorm1d(width)
        self.narrow = torch.nn.Linear(width, width, dtype=torch.bfloat16)
        self.turned = torch.nn.Parameter(torch.randn(width, 5).t())
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))
        self.head = torch.nn.Linear(width, 300, bias=False)
        self.head.weight = self.embed.weight

    def get_extra_state(self) -> Any:
        return {"version": 2}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"version": 2}


def exported(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of an export; each is where the index says, and nowhere else."""
    if not (folder / INDEX).exists():
        assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
        single: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
        return single
    index = json.loads((folder / INDEX).read_text())
    found: dict[str, torch.Tensor] = {}
    files = {path.name for path in folder.iterdir()} - {INDEX}
    assert files == set(index["weight_map"].values())
    for file in files:
        tensors = load_file(folder / file)
        assert {index["weight_map"][name] for name in tensors} == {file}
        assert not found.keys() & tensors.keys()
        found |= tensors
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    return found


def expected(net: Net, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    state = {k: v for k, v in net.state_dict().items() if isinstance(v, torch.Tensor)}
    del state["head.weight"]
    if dtype is None:
        return state
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in state.items()}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("max_shard_bytes", [5 * 10**9, 100_000])
@pytest.mark.parametrize("dtype", [None, torch.float16])
async def test_equals_the_state_dict(
    tmp_path: Path, compression: str | None, max_shard_bytes: int, dtype: torch.dtype | None
) -> None:
    net = Net()
    options = Options(compression=compression, min_object_bytes=100_000)
    snapshot = await Snapshot.take(
        tmp_path / "s", {"model": net, "at": StateDict(step=1)}, options=options
    )
    report = await snapshot.export_hf(tmp_path / "hf", dtype=dtype, max_shard_bytes=max_shard_bytes)
    assert isinstance(report, ExportReport)
    assert_same(exported(tmp_path / "hf"), expected(net, dtype))
    assert report.tied == {"embed.weight": ("head.weight",)}
    of_model, at = report.left_out
    assert of_model.startswith("model/_extra_state")
    assert at == "at"
    assert report.nbytes == sum(path.stat().st_size for path in (tmp_path / "hf").iterdir())
    assert len(report.files) >= 3 or max_shard_bytes > 100_000
    named = await snapshot.export_hf(tmp_path / "named", "model")
    assert named.left_out == (of_model,)
    if compression or dtype:
        # Of these, what is no float: a counter of 8 bytes.
        assert report.copied_bytes == 0
    else:
        # All but headers and runs of tensors below 64 KiB.
        assert report.copied_bytes > 65_536


async def test_an_unchanged_object_is_copied_as_a_whole(tmp_path: Path) -> None:
    state = {f"w{n}": torch.randn(1 << 18) for n in range(4)}
    snapshot = await Snapshot.take(tmp_path / "s", {"model": StateDict(state)})
    report = await snapshot.export_hf(tmp_path / "hf")
    (data,) = (tmp_path / "s").rglob("*.safetensors")
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == data.read_bytes()
    assert report.copied_bytes == report.nbytes - 4096  # the header is written last


async def test_rename_and_keys_below(tmp_path: Path) -> None:
    net = Net()
    await Snapshot.take(tmp_path / "s", {"train": StateDict(model=net.state_dict(), step=3)})
    snapshot = Snapshot(tmp_path / "s")
    await snapshot.export_hf(tmp_path / "a", "train/model")
    assert_same(exported(tmp_path / "a"), expected(net))
    await snapshot.export_hf(tmp_path / "b", rename={"train/model/layers.": "model/h."})
    found = exported(tmp_path / "b")
    assert found.keys() == {f"h.{n}.{kind}" for n in range(4) for kind in ("weight", "bias")}
    with pytest.raises(UsageError, match="no path 'modle'"):
        await snapshot.export_hf(tmp_path / "c", "modle")
    for export in (snapshot.export_hf, partial(export_torch, snapshot)):
        with pytest.raises(UsageError, match="no path that begins with 'train/modle'; did you"):
            await export(tmp_path / "c", rename={"train/modle": "model"})
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
async def test_casts_of_views(tmp_path: Path, dtype: torch.dtype) -> None:
    """Of one memory, with different strides; larger than what is converted at a time."""
    whole = torch.randn(600, 700)
    state = {"whole": whole, "turned": whole.t(), "part": whole[1:9:2, 3:5]}
    snapshot = await Snapshot.take(tmp_path / "s", {"model": StateDict(state)})
    await snapshot.export_hf(tmp_path / "hf", dtype=dtype)
    assert_same(exported(tmp_path / "hf"), {k: v.to(dtype) for k, v in state.items()})


async def test_another_format_is_exported(tmp_path: Path) -> None:
    state = {f"w{n}": torch.randn(30_000) for n in range(6)}
    (tmp_path / "repo").mkdir()
    write_repo(tmp_path / "repo", state)
    report = await Snapshot(tmp_path / "repo").export_hf(tmp_path / "hf")
    assert_same(exported(tmp_path / "hf"), state)
    assert report.copied_bytes >= 4 * 30_000 * 5


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.eye(3).to_sparse(), "sparse coo tensor"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.zeros(2).numpy(), "numpy array"),
    ],
)
async def test_refused_before_a_byte(tmp_path: Path, value: Any, what: str) -> None:
    state = StateDict(good=torch.ones(3), odd=value)
    snapshot = await Snapshot.take(tmp_path / "s", {"model": state})
    with pytest.raises(UsageError, match=f"model/odd.*{what}"):
        await snapshot.export_hf(tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    await snapshot.export_hf(tmp_path / "hf", rename=lambda p: None if "odd" in p else p)
    assert exported(tmp_path / "hf").keys() == {"good"}


@pytest.mark.parametrize("bad", [{"dtype": "int8"}, {"max_shard_bytes": 0}, {"key": ""}])
async def test_bad_arguments(tmp_path: Path, bad: dict[str, Any]) -> None:
    snapshot = await Snapshot.take(tmp_path / "s", {"model": Net()})
    with pytest.raises(UsageError, match=next(iter(bad))):
        await snapshot.export_hf(tmp_path / "hf", **bad)


async def test_the_destination_is_a_folder(tmp_path: Path) -> None:
    await Snapshot.take(tmp_path / "s", {"model": Net()})
    with pytest.raises(UsageError, match="is the name of a file.*name the folder"):
        await Snapshot(tmp_path / "s").export_hf(tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()


async def test_what_is_there(tmp_path: Path) -> None:
    """Other files stay; an older export is refused, or replaced as a whole."""
    net = Net()
    snapshot = await Snapshot.take(tmp_path / "s", {"model": net})
    hf = tmp_path / "hf"
    hf.mkdir()
    (hf / "config.json").write_text("{}")
    await snapshot.export_hf(hf, max_shard_bytes=100_000)
    for max_shard_bytes in (5 * 10**9, 100_000):
        with pytest.raises(ObjectExists, match="overwrite=True"):
            await snapshot.export_hf(hf, max_shard_bytes=max_shard_bytes)
    await snapshot.export_hf(hf, overwrite=True)
    assert {path.name for path in hf.iterdir()} == {"config.json", "model.safetensors"}
    (hf / "config.json").unlink()
    assert_same(exported(hf), expected(net))


async def test_damage_is_found_where_bytes_are_read(tmp_path: Path) -> None:
    state = StateDict(w=torch.randn(1 << 20))
    snapshot = await Snapshot.take(tmp_path / "s", {"model": state})
    (data,) = (tmp_path / "s").rglob("*.safetensors")
    content = bytearray(data.read_bytes())
    content[-5] ^= 1
    data.write_bytes(content)
    with pytest.raises(ChecksumMismatch, match="'model/w'"):
        await snapshot.export_hf(tmp_path / "hf", dtype="bfloat16")
    assert not (tmp_path / "hf").exists()
    # The kernel copies it as it is; the docs say so.
    await snapshot.export_hf(tmp_path / "hf")
    data.write_bytes(content[:-7])
    with pytest.raises(ChecksumMismatch, match="truncated"):
        await snapshot.export_hf(tmp_path / "hf", overwrite=True)
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("max_shard_bytes", [100_000, slow(5 * 10**9)])
async def test_every_operation_fails(tmp_path: Path, max_shard_bytes: int) -> None:
    """After any failure there is no index and no file; after the last one, all."""
    net = Net(32)
    snapshot = await Snapshot.take(tmp_path / "s", {"model": net})
    for k in itertools.count(1):
        storage: FaultyStorage | None = None

        def wrap(inner: Any, k: int = k) -> FaultyStorage:
            nonlocal storage
            storage = FaultyStorage(inner, fail_at=k)
            return storage

        hf = tmp_path / f"hf{k}"
        with faulty(wrap):
            try:
                await snapshot.export_hf(faulty_url(hf), max_shard_bytes=max_shard_bytes // 4)
            except Exception:
                assert storage is not None
                assert storage.was_hit
        assert storage is not None
        if not storage.was_hit:
            assert_same(exported(hf), expected(net))
            break
        if hf.exists() and (hf / INDEX).exists():
            assert_same(exported(hf), expected(net))  # the cleaning up, or the end, failed
        else:
            assert not hf.exists() or not (hf / "model.safetensors").exists()
    assert k > 5


async def test_cancelled(tmp_path: Path) -> None:
    snapshot = await Snapshot.take(tmp_path / "s", {"model": Net()})
    stalled = threading.Event()

    class Stalls(Wrapper):
        """One file is complete before the last write stalls."""

        num_complete = 0

        async def around(self, op: str, key: str, call: Any, *args: Any, **kwargs: Any) -> Any:
            self.num_complete += op == "complete"
            if op == "complete" and self.num_complete > 1:
                stalled.set()
                await anyio.sleep_forever()
            return await call(*args, **kwargs)

    with faulty(Stalls):
        url = faulty_url(tmp_path / "hf")
        task = asyncio.ensure_future(snapshot.export_hf(url, max_shard_bytes=100_000))
        assert await asyncio.to_thread(stalled.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not (tmp_path / "hf").exists()


def test_sync_and_memory(tmp_path: Path) -> None:
    """Compressed and cast, with memory for two chunks."""
    state = {f"w{n}": torch.randn(1 << 20) for n in range(6)}
    options = Options(compression="zstd", chunk_bytes=2 << 20, memory_budget_bytes=4 << 20)
    snapshot = sync.Snapshot.take(tmp_path / "s", {"model": StateDict(state)}, options=options)
    report = snapshot.export_hf(tmp_path / "hf", dtype="bfloat16")
    assert report.num_tensors == 6
    found = exported(tmp_path / "hf")
    assert all(torch.equal(found[n], t.bfloat16()) for n, t in state.items())


def test_copies_where_the_kernel_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.EXDEV, "no")

    monkeypatch.setattr("actorsnap.storage.posix._BUFFER_BYTES", 1000)
    monkeypatch.setattr(os, "copy_file_range", refuse)
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_bytes(bytes(range(256)) * 20)
    with source.open("rb") as one, target.open("wb") as other:
        copy_range(one.fileno(), 100, other.fileno(), 50, 3333)
        with pytest.raises(OSError, match="ended"):
            copy_range(one.fileno(), 5000, other.fileno(), 4000, 3333)
    assert target.read_bytes()[50:3383] == source.read_bytes()[100:3433]
