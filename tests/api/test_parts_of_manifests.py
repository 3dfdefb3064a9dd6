# SPDX-License-Identifier: Apache-2.0
"""Rank manifests that are read in parts: what comes back, and what that costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from actorsnap import Options, StateDict
from actorsnap.errors import ChecksumMismatch, FormatError, IncompatibleState
from actorsnap.format.layout import manifest_key
from actorsnap.format.manifest import CompositeEntry, ContainerEntry, ValueEntry, ViewEntry
from actorsnap.format.tables import PREFIX_BYTES, decode_rank_manifest, encode_rank_manifest
from actorsnap.planning.packing import Item
from actorsnap.planning.shared_reads import ReadMode
from actorsnap.protocol.restore import RestoreDecisions
from actorsnap.runtime.location import make_location, resolve_options
from actorsnap.runtime.partial_index import FEW_RANKS
from actorsnap.runtime.restore import Overwritten, RestoreCall, restore_by
from actorsnap.runtime.rounds import Alone
from actorsnap.runtime.script import run_sync
from actorsnap.runtime.source import Source
from actorsnap.state.sources import Captured, HostMemory, Leaf
from actorsnap.storage.fs import FsStorage
from actorsnap.sync import Snapshot
from tests.support.many import ATTEMPT, Many

RANKS = FEW_RANKS + 4
LOADED = 8
FAST = Options(fsync=False)
_NOWHERE = HostMemory(0, 0, None)
_INDICES = np.array([[0, 3], [1, 2]])
_PARTS = (("indices", "int64", (2, 2), 32), ("values", "float32", (2,), 8))
_VALUES = np.array([0.5, 0.25], dtype="<f4")


class Reads(dict[str, list[int]]):
    """The sizes of what was read of each object."""

    def of(self, rank: int) -> list[int]:
        return self.get(manifest_key(ATTEMPT, rank), [])


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    found = Reads()
    get = FsStorage.get

    async def counted(self: Any, key: str, *args: Any) -> bytes:
        found.setdefault(key, []).append(0)
        data = await get(self, key, *args)
        found[key][-1] = len(data)
        return data

    monkeypatch.setattr(FsStorage, "get", counted)
    return found


class _WithOwn(Many):
    """Each rank has leaves of its own on the last pages: containers, too, and a sparse tensor."""

    def captured(self, rank: int) -> Captured:
        captured = super().captured(rank)
        captured.parts.insert(150, ContainerEntry(path="more/empty", type="list"))
        captured.parts.extend(
            [
                ContainerEntry(path="own/queue", type="list"),
                ContainerEntry(path="own/queue/0", type="dict"),
                ValueEntry(path="own/queue/1", value=rank),
                ContainerEntry(path="own/queue/2", type="tuple"),
                CompositeEntry(
                    path="own/sparse",
                    layout="sparse_coo",
                    dtype="float32",
                    shape=(4, 4),
                    parts=("indices", "values"),
                    parameters={"is_coalesced": True},
                ),
                Leaf(
                    Item("own/sparse@indices", "int64", (2, 2), 32, 8), _NOWHERE, "tensor", "int64"
                ),
                Leaf(
                    Item("own/sparse@values", "float32", (2,), 8, 4), _NOWHERE, "tensor", "float32"
                ),
                ContainerEntry(path="own/state", type="dict"),
            ]
        )
        return captured

    def _bytes_of(self, item: Item, part: Any, nbytes: int) -> bytes:
        if item.path.startswith("own/"):
            return (_INDICES if item.path.endswith("indices") else _VALUES).tobytes()
        return super()._bytes_of(item, part, nbytes)


def sharded(whole: torch.Tensor, rank: int, ranks: int = LOADED) -> DTensor:
    mesh = DeviceMesh("cpu", torch.arange(ranks), _init_backend=False, _rank=rank)
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    rows = -(-len(whole) // ranks)
    local = whole[rows * rank : rows * rank + rows].clone()
    return DTensor(local, DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=False)


def restore(folder: Path, rank: int, state: dict[str, Any]) -> Any:
    """Restores as one rank of many would."""
    source = Source(make_location(folder, None), resolve_options(None))
    rounds = Alone(RestoreDecisions(mode=ReadMode.DIRECT), rank=rank)
    return run_sync(
        restore_by(rounds, source, RestoreCall(app_state=state), Overwritten()), name="restore"
    )


def test_one_tensor_costs_a_prefix_and_a_page_of_each_manifest(
    tmp_path: Path, reads: Reads
) -> None:
    many = Many("fsdp", RANKS, 300)
    many.write(tmp_path)
    path = many.paths[150]
    assert torch.equal(
        Snapshot(tmp_path, options=FAST).read_object(path), torch.from_numpy(many.value(path))
    )
    for rank in range(1, RANKS):
        size = (tmp_path / manifest_key(ATTEMPT, rank)).stat().st_size
        prefix, page = reads.of(rank)
        assert prefix == PREFIX_BYTES < size // 2
        assert 0 < page < size // 10


@pytest.mark.parametrize("tensors", [3, 300])
def test_pages_within_the_prefix_cost_nothing(tmp_path: Path, reads: Reads, tensors: int) -> None:
    """A manifest that is shorter than the prefix is read whole; so are those after it, at once."""
    many = Many("fsdp", RANKS, tensors)
    many.write(tmp_path)
    path = many.paths[0]
    found = Snapshot(tmp_path, options=FAST).read_object(path)
    assert torch.equal(found, torch.from_numpy(many.value(path)))
    refused = [rank for rank in range(1, RANKS) if len(reads.of(rank)) > 1]
    if tensors > 3:
        assert not refused
    else:
        assert 0 < len(refused) <= 16  # that were read at the same time
    for rank in range(1, RANKS):
        size = (tmp_path / manifest_key(ATTEMPT, rank)).stat().st_size
        assert sum(reads.of(rank)) == min(size, PREFIX_BYTES)


@pytest.mark.slow
def test_a_table_longer_than_the_prefix(tmp_path: Path) -> None:
    many = Many("fsdp", RANKS, 3000, width=1)
    many.write(tmp_path)
    head = (tmp_path / manifest_key(ATTEMPT, 3)).read_bytes().index(b"\n")
    assert head > PREFIX_BYTES
    path = many.paths[1500]
    found = Snapshot(tmp_path, options=FAST).read_object(path)
    assert torch.equal(found, torch.from_numpy(many.value(path)))


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_a_rank_that_wants_boxes_of_others_reads_little_of_its_own(
    tmp_path: Path, reads: Reads, kind: str
) -> None:
    """Its private leaves come back, and containers, which are in no owner index."""
    many = _WithOwn(kind, RANKS, 300)
    many.write(tmp_path)
    rank = 7
    names = [path.removeprefix("model/") for path in many.paths]
    zeros = torch.full(many.shape, -1.0)
    state = {
        "model": StateDict({name: sharded(zeros, rank) for name in names}),
        "own": StateDict(queue=[{}, -1, ()], state={}, sparse=None),
        "extra": StateDict(lr=0.0, step=0, list=[0]),
        "more": StateDict(empty=[1]),
    }
    report = restore(tmp_path, rank, state)
    assert report.missing == report.unexpected == report.mismatched == ()
    own = state["own"]
    assert (own["queue"], own["state"]) == ([{}, rank, ()], {})
    assert dict(state["more"]) == {"empty": []}
    assert set(own) == {"queue", "sparse", "state"}
    expected = torch.zeros(4, 4)
    expected[0, 1], expected[3, 2] = 0.5, 0.25
    assert torch.equal(own["sparse"].to_dense(), expected)
    assert dict(state["extra"]) == {"list": [rank], "lr": 0.5, "step": 7}
    for name, path in zip(names, many.paths, strict=True):
        whole = torch.from_numpy(many.value(path))
        local = state["model"][name].to_local()
        assert torch.equal(local, sharded(whole, rank).to_local()), path
    size = (tmp_path / manifest_key(ATTEMPT, rank)).stat().st_size
    assert sum(reads.of(rank)) < PREFIX_BYTES + size // 4
    asked = [each for each in range(RANKS) if reads.of(each)]
    assert all(len(reads.of(each)) == 1 for each in asked if each != rank)


class _WithOptimizer(Many):
    """Two of three tensors are under a key of their own."""

    def __init__(self, kind: str, ranks: int, tensors: int) -> None:
        super().__init__(kind, ranks, tensors)
        optimizer = [f"optim/state/{n}" for n in range(2 * tensors)]
        self._numbers |= {path: tensors + n for n, path in enumerate(optimizer)}
        self.paths += optimizer


def test_parts_of_lower_ranks(tmp_path: Path) -> None:
    """They come first, and without the containers that the rank's own manifest has."""
    many = _WithOptimizer("hsdp", RANKS, 100)
    many.write(tmp_path)
    rank = 12
    paths = [path for path in many.paths if path.startswith("model/")]
    names = [path.removeprefix("model/") for path in paths]
    zeros = torch.zeros(many.shape)
    state = {"model": StateDict({name: sharded(zeros, rank, RANKS) for name in names})}
    restore(tmp_path, rank, state)
    for name, path in zip(names, paths, strict=True):
        whole = torch.from_numpy(many.value(path))
        local = state["model"][name].to_local()
        assert torch.equal(local, sharded(whole, rank, RANKS).to_local()), path


def test_what_no_rank_has_is_compared_nevertheless(tmp_path: Path) -> None:
    """Nobody stored the rows that the rank wants: the tensor's shape differs."""
    many = Many("fsdp", RANKS, 40)
    many.write(tmp_path)
    zeros = torch.zeros(many.shape[0] * 2, many.shape[1])
    names = [path.removeprefix("model/") for path in many.paths]
    state = {"model": StateDict({name: sharded(zeros, LOADED - 1) for name in names})}
    with pytest.raises(IncompatibleState) as caught:
        restore(tmp_path, LOADED - 1, state)
    assert caught.value.missing == ()
    assert len(caught.value.mismatched) == len(names)
    line = caught.value.mismatched[0]
    assert line.startswith(f"{many.paths[0]}: global shape {many.shape} in the snapshot")


def test_a_rank_without_elements_asks_nobody(tmp_path: Path, reads: Reads) -> None:
    """Rows of 19 ranks are on 13 of them. The others take part, and compare nothing."""
    many = Many("fsdp", RANKS, 300)
    many.write(tmp_path)
    rank = 15
    names = [path.removeprefix("model/") for path in many.paths]
    tensors = {name: sharded(torch.zeros(many.shape), rank, 19) for name in names}
    assert all(not tensor.to_local().numel() for tensor in tensors.values())
    state = {"model": StateDict(tensors), "extra": StateDict(lr=0.0, step=0, list=[0])}
    report = restore(tmp_path, rank, state)
    assert report.missing == report.unexpected == report.mismatched == ()
    assert all(state["model"][name] is tensors[name] for name in names)
    assert dict(state["extra"]) == {"list": [rank], "lr": 0.5, "step": 7}
    assert [each for each in range(RANKS) if reads.of(each)] == [rank]
    assert sum(reads.of(rank)) < 2 * PREFIX_BYTES
    tensors[names[0]] = sharded(torch.zeros(0, 8), rank, 19)  # of no rows anywhere
    with pytest.raises(IncompatibleState) as caught:
        restore(tmp_path, rank, {"model": StateDict(tensors)})
    (line,) = caught.value.mismatched
    assert line.startswith(f"{many.paths[0]}: global shape {many.shape} in the snapshot")


@pytest.mark.parametrize("what", ["missing", "cut off", "a flipped bit", "of another rank"])
def test_a_bad_manifest(tmp_path: Path, what: str) -> None:
    many = Many("fsdp", RANKS, 300)
    many.write(tmp_path)
    path = tmp_path / manifest_key(ATTEMPT, 9)
    data = path.read_bytes()
    at = data.index(many.paths[150].encode())
    if what == "missing":
        path.unlink()
    else:
        path.write_bytes(
            {
                "cut off": data[:at],
                "a flipped bit": data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :],
                "of another rank": (tmp_path / manifest_key(ATTEMPT, 8)).read_bytes(),
            }[what]
        )
    kind = FormatError if what == "of another rank" else ChecksumMismatch
    with pytest.raises(kind) as caught:
        Snapshot(tmp_path, options=FAST).read_object(many.paths[150])
    assert caught.value.key == manifest_key(ATTEMPT, 9)


def test_views_of_views_are_not_followed(tmp_path: Path, reads: Reads) -> None:
    """No save writes them, and each would cost a look at all entries before it."""
    Many("fsdp", RANKS, 300).write(tmp_path)
    key = manifest_key(ATTEMPT, 7)
    manifest = decode_rank_manifest((tmp_path / key).read_bytes(), key)
    (view,) = [entry for entry in manifest.entries if isinstance(entry, ViewEntry)]
    chain = [
        msgspec.structs.replace(view, path=f"{view.path}{n or ''}", of=f"{view.path}{n + 1}")
        for n in range(1000)
    ]
    entries = (*[entry for entry in manifest.entries if entry is not view], *chain)
    (tmp_path / key).write_bytes(
        encode_rank_manifest(msgspec.structs.replace(manifest, entries=entries))
    )
    with pytest.raises(FormatError, match="no tensor") as caught:
        Snapshot(tmp_path, options=FAST).read_object(f"7/{view.path}")
    assert caught.value.key == key
    assert len(reads.of(7)) < 5
