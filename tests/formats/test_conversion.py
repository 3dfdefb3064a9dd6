# SPDX-License-Identifier: Apache-2.0
"""Copies of checkpoints of other formats: snapshots of ours, with checksums."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from actorsnap import ObjectExists, Options, Snapshot
from actorsnap.actors import formats
from actorsnap.actors.formats import Foreign, Place
from actorsnap.errors import StorageError
from actorsnap.interop.formats.describing import Description
from actorsnap.storage.fs import FsStorage
from tests.formats.checkpoints import is_same, make_model, training_state, write_safetensors


async def test_converts_all(tmp_path: Path) -> None:
    model, optimizer, saved = training_state()
    long = {"text": "x" * 5000, "losses": [float(number) for number in range(1000)]}
    torch.save({**saved, "long": long}, tmp_path / "x.pt")
    events: list[Any] = []
    source = Snapshot(tmp_path / "x.pt")
    report = await source.copy_to(tmp_path / "copy", on_event=events.append)
    copied = Snapshot(tmp_path / "copy")
    verified = await copied.verify("full")
    assert (verified.ok, verified.has_checksums) == (True, True)
    assert verified.nbytes > 0
    other, another, _ = training_state(1)
    await copied.restore({"model": other, "optimizer": another})
    assert is_same(other, model)
    assert str(another.state_dict()) == str(optimizer.state_dict())
    assert await copied.read_object("epoch") == 3
    assert await copied.get_state_dict_for_key("long") == long
    assert (await copied.get_manifest()).keys() == (await source.get_manifest()).keys()
    kinds = [event.kind for event in events]
    assert (kinds[0], kinds[-1]) == ("begun", "committed")
    assert events[-1].done_bytes == events[-1].total_bytes
    assert kinds.count("copied") == report.num_copied
    size = sum(path.stat().st_size for path in (tmp_path / "copy").rglob("*") if path.is_file())
    assert report.copied_bytes == size - (tmp_path / "copy" / "actorsnap.json").stat().st_size


async def test_large_tensors(tmp_path: Path) -> None:
    """Several chunks and objects, small memory, and data objects that safetensors opens."""
    state = {f"w{number}": torch.randn(1 << 20) for number in range(6)}
    write_safetensors(tmp_path / "model.safetensors", state)
    options = Options(chunk_bytes=2 << 20, min_object_bytes=4 << 20, max_objects=3)
    await Snapshot(tmp_path, options=options).copy_to(tmp_path / "copy")
    found = await Snapshot(tmp_path / "copy").get_state_dict_for_key("model")
    assert all(torch.equal(found[name], state[name]) for name in state)
    files = list((tmp_path / "copy").rglob("*.safetensors"))
    assert len(files) == 3
    assert {name for file in files for name in load_file(file)} == state.keys()


async def test_shared_memory_is_kept(tmp_path: Path) -> None:
    big = torch.arange(100.0).view(10, 10)
    torch.save({"s": {"a": big, "b": big.t(), "c": big[2:4]}}, tmp_path / "x.pt")
    await Snapshot(tmp_path / "x.pt").copy_to(tmp_path / "copy")
    found = await Snapshot(tmp_path / "copy").get_state_dict_for_key("s")
    assert torch.equal(found["b"], big.t())
    assert len({value.untyped_storage().data_ptr() for value in found.values()}) == 1


async def test_pickled_values(tmp_path: Path) -> None:
    value = argparse.Namespace(lr=0.1)
    torch.save({"model": {"w": torch.ones(3)}, "args": value}, tmp_path / "x.pt")
    options = Options(allow_pickle=True)
    await Snapshot(tmp_path / "x.pt", options=options).copy_to(tmp_path / "copy")
    assert await Snapshot(tmp_path / "copy", options=options).read_object("args") == value


async def read_ranks(place: Place) -> Foreign | None:
    """Two ranks: halves of a tensor, what both have, and a leaf of each; all in one file."""
    if not place.file.endswith(".ranks"):
        return None
    await place.find(place.file)
    manifests = []
    for rank in range(2):
        told = Description(place, rank)
        half = told.stored(place.file, 4 * rank, 4 * rank + 4)
        told.tensor("m/half", "uint8", (4,), half, offsets=(4 * rank,), global_shape=(8,))
        told.tensor("m/both", "uint8", (4,), told.stored(place.file, 8, 12), replicated=True)
        fields = {"shape": (2,), "strides": (2,), "replicated": True}
        told.view("m/every_other", "m/both", "uint8", **fields)
        own = told.stored(place.file, 12 + 4 * rank, 16 + 4 * rank)
        told.tensor("m/own", "uint8", (4,), own)
        told.value("m/rank", rank)
        manifests.append(told.manifest())
    return Foreign(format="ranks", manifests=tuple(manifests), step=9, metadata={"a": 1})


async def test_several_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(formats._BUILT_IN, "ranks", f"{__name__}:read_ranks")
    formats._readers.cache_clear()
    path = tmp_path / "x.ranks"
    path.write_bytes(bytes(range(20)))
    source = Snapshot(path)
    await source.copy_to(tmp_path / "copy")
    copied = Snapshot(tmp_path / "copy")
    for snapshot in (source, copied):
        for rank in range(2):
            found = await snapshot.read_object(f"{rank}/m")
            assert {name: bytes(value) for name, value in found.items() if name != "rank"} == {
                "half": bytes(range(8)),
                "both": bytes(range(8, 12)),
                "every_other": bytes([8, 10]),
                "own": bytes(range(12 + 4 * rank, 16 + 4 * rank)),
            }
            assert found["rank"] == rank
        assert (await snapshot.step, await snapshot.metadata) == (9, {"a": 1})
        assert (await snapshot.verify("full")).ok
    # What both ranks have is stored once.
    entries = await copied.get_manifest()
    assert "0/m/both" in entries
    assert "1/m/both" not in entries
    formats._readers.cache_clear()


async def test_another_snapshot_there(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", make_model(0).state_dict())
    await Snapshot.take(tmp_path / "copy", {"model": make_model(1)})
    with pytest.raises(ObjectExists, match="overwrite"):
        await Snapshot(tmp_path).copy_to(tmp_path / "copy")
    await Snapshot(tmp_path).copy_to(tmp_path / "copy", overwrite=True)
    model = make_model(2)
    await Snapshot(tmp_path / "copy").restore({"model": model})
    assert is_same(model, make_model(0))
    assert len(list((tmp_path / "copy").iterdir())) == 2


@pytest.mark.parametrize("operation", ["writer", "put", "put_if_absent"])
async def test_a_failure_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    write_safetensors(tmp_path / "model.safetensors", make_model().state_dict())

    async def fail(self: FsStorage, key: str, *args: object, **kwargs: object) -> None:
        raise StorageError(op=operation, key=key, backend=self.url, detail="injected")

    monkeypatch.setattr(FsStorage, operation, fail)
    with pytest.raises(Exception, match="injected|sub-exception"):
        await Snapshot(tmp_path).copy_to(tmp_path / "copy")
    monkeypatch.undo()
    left = [path.name for path in (tmp_path / "copy").rglob("*") if path.is_file()]
    if operation == "put_if_absent":  # it may have committed
        assert "actorsnap.json" not in left
    else:
        assert not left
    await Snapshot(tmp_path).copy_to(tmp_path / "copy")
