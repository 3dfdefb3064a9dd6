# SPDX-License-Identifier: Apache-2.0
"""Restores of snapshots of more ranks than read all manifests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from actorsnap import Options, StateDict
from actorsnap.errors import ChecksumMismatch, FormatError, IncompatibleState
from actorsnap.format.layout import manifest_key
from actorsnap.format.manifest import (
    COMMIT_KEY,
    ContainerEntry,
    ValueEntry,
    decode_commit,
    encode_commit,
)
from actorsnap.format.owners import decode_owners, deflate_owners, encode_owners, owners_key
from actorsnap.runtime.partial_index import FEW_RANKS
from actorsnap.state.sources import Captured
from actorsnap.storage.fs import FsStorage
from actorsnap.sync import Snapshot
from tests.support.many import ATTEMPT, Many

RANKS = FEW_RANKS + 4
FAST = Options(fsync=False)


def state_of(many: Many) -> dict[str, Any]:
    names = [path.removeprefix("model/") for path in many.paths]
    zeros = {name: torch.full(many.shape, -1.0) for name in names}
    return {"model": StateDict(zeros), "extra": StateDict(lr=0.0, step=0)}


def read_keys(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of all objects that are read as a whole or in a range, from now on."""
    keys: list[str] = []
    get = FsStorage.get

    async def counted(self: Any, key: str, *args: Any) -> bytes:
        keys.append(key)
        return await get(self, key, *args)

    monkeypatch.setattr(FsStorage, "get", counted)
    return keys


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "fsdp_tp", "ddp"])
def test_one_process_restores_all_of_it(tmp_path: Path, kind: str, older: bool) -> None:
    many = Many(kind, RANKS, 20, older=older)
    many.write(tmp_path)
    state = state_of(many)
    report = Snapshot(tmp_path, options=FAST).restore(state)
    assert report.kept == ()
    for path in many.paths:
        expected = torch.from_numpy(many.value(path))
        assert torch.equal(state["model"][path.removeprefix("model/")], expected)
    assert (state["extra"]["step"], state["extra"]["lr"]) == (7, 0.5)
    assert state["extra"]["list"] == [0]
    plan = Snapshot(tmp_path).plan_restore(state_of(many))
    assert plan.missing == plan.unexpected == plan.mismatched == ()


class _WithContainers(Many):
    """Each rank has a list of its own, with empty containers in it."""

    def captured(self, rank: int) -> Captured:
        captured = super().captured(rank)
        captured.parts.extend(
            [
                ContainerEntry(path="own/queue", type="list"),
                ContainerEntry(path="own/queue/0", type="dict"),
                ValueEntry(path="own/queue/1", value=rank),
                ContainerEntry(path="own/queue/2", type="tuple"),
                ContainerEntry(path="own/state", type="dict"),
            ]
        )
        return captured


@pytest.mark.parametrize("older", [False, True])
def test_empty_containers_stay(tmp_path: Path, older: bool) -> None:
    """They are in no owner index: a list without them would be shorter."""
    _WithContainers("fsdp", RANKS, 3, older=older).write(tmp_path)
    snapshot = Snapshot(tmp_path, options=FAST)
    own = {"queue": [{}, 0, ()], "state": {}}
    assert snapshot.get_state_dict_for_key("own") == own
    assert snapshot.read_object("7/own/queue") == [{}, 7, ()]
    state = {"own": StateDict(queue=[{}, -1, ()], state={})}
    assert snapshot.restore(state).missing == ()
    assert dict(state["own"]) == own


def test_what_is_not_wanted_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Many("fsdp", RANKS, 20).write(tmp_path)
    keys = read_keys(monkeypatch)
    state = {"extra": StateDict(lr=0.0)}
    Snapshot(tmp_path, options=FAST).restore(state)
    assert state["extra"]["lr"] == 0.5
    index = {key for key in keys if not key.startswith(f"{ATTEMPT}/data")}
    assert index <= {COMMIT_KEY, owners_key(ATTEMPT), manifest_key(ATTEMPT, 0)}


def test_few_ranks_need_no_owner_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = Many("fsdp", 8, 20).write(tmp_path)
    keys = read_keys(monkeypatch)
    Snapshot(many, options=FAST).restore(state_of(Many("fsdp", 8, 20)))
    manifests = [manifest_key(ATTEMPT, rank) for rank in range(8)]
    index = [key for key in keys if "/data/" not in key]
    assert sorted(index) == sorted([COMMIT_KEY, *manifests])


def test_missing_and_unexpected_leaves_are_named(tmp_path: Path) -> None:
    many = Many("fsdp", RANKS, 20)
    many.write(tmp_path)
    module = torch.nn.Linear(8, many.shape[0], bias=True)
    with pytest.raises(IncompatibleState) as caught:
        Snapshot(tmp_path).restore({"model": module, "extras": StateDict(x=1)})
    assert caught.value.missing == ("extras", "model/weight", "model/bias")
    assert set(caught.value.unexpected) == set(many.paths)
    assert "extra" in str(caught.value)


def flipped(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


def of_another_attempt(data: bytes) -> bytes:
    owners = decode_owners(data, attempt=ATTEMPT, world_size=RANKS)
    return encode_owners(ATTEMPT.replace("2026", "2025"), RANKS, deflate_owners(owners))


def of_another_save(data: bytes) -> bytes:
    """Says that the ranks have other tensors."""
    with TemporaryDirectory() as folder:
        Many("fsdp", RANKS, 21).write(Path(folder))
        return (Path(folder) / owners_key(ATTEMPT)).read_bytes()


BAD: dict[str, tuple[Callable[[bytes], bytes] | None, type[FormatError]]] = {
    "missing": (None, ChecksumMismatch),
    "a flipped bit": (flipped, ChecksumMismatch),
    "empty": (lambda data: b"", ChecksumMismatch),
    "of another attempt": (of_another_attempt, FormatError),
    "of another save": (of_another_save, FormatError),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_owner_index_is_refused(tmp_path: Path, what: str) -> None:
    many = Many("fsdp", RANKS, 20)
    many.write(tmp_path)
    damage, kind = BAD[what]
    path = tmp_path / owners_key(ATTEMPT)
    good = path.read_bytes()
    path.unlink()
    if damage is not None:
        path.write_bytes(damage(good))
    state = state_of(many)
    with pytest.raises(kind) as caught:
        Snapshot(tmp_path, options=FAST).restore(state)
    assert caught.value.key == owners_key(ATTEMPT)
    assert all((tensor == -1).all() for tensor in state["model"].values())


def test_without_the_feature_all_manifests_are_read(tmp_path: Path) -> None:
    many = Many("fsdp", RANKS, 20)
    many.write(tmp_path)
    commit = decode_commit((tmp_path / COMMIT_KEY).read_bytes())
    features = tuple([each for each in commit.features if each != "owners"])
    changed = encode_commit(type(commit)(**{**_fields(commit), "features": features}))
    (tmp_path / COMMIT_KEY).write_bytes(changed)
    (tmp_path / owners_key(ATTEMPT)).unlink()
    state = state_of(many)
    Snapshot(tmp_path, options=FAST).restore(state)
    assert torch.equal(
        next(iter(state["model"].values())), torch.from_numpy(many.value(many.paths[0]))
    )


def _fields(commit: Any) -> dict[str, Any]:
    return {name: getattr(commit, name) for name in commit.__struct_fields__}
