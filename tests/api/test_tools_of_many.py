# SPDX-License-Identifier: Apache-2.0
"""Snapshots of many ranks: each tool's result, from a few manifests at a time."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from actorsnap import StateDict, cli
from actorsnap.errors import ChecksumMismatch, FormatError, UsageError
from actorsnap.format.layout import manifest_key
from actorsnap.format.manifest import COMMIT_KEY
from actorsnap.format.owners import owners_key
from actorsnap.options import Options
from actorsnap.planning.survey import Survey
from actorsnap.runtime import manifests, partial_index
from actorsnap.state.restore import reads
from actorsnap.state.sources import Captured, Leaf
from actorsnap.storage.base import ObjectInfo, Storage
from actorsnap.storage.fs import FsStorage
from actorsnap.storage.registry import open_storage, register
from actorsnap.storage.wrapper import Wrapper, without_blocking_io
from actorsnap.sync import Snapshot
from tests.api.test_recover import files_in
from tests.support.many import ATTEMPT, Many

KINDS = ["fsdp", "hsdp", "fsdp_tp", "ddp"]


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each manifest were large."""
    monkeypatch.setattr(manifests, "BATCH_BYTES", 1)
    monkeypatch.setattr(partial_index, "FEW_RANKS", 1)
    monkeypatch.setattr(reads, "MAX_PLANNED_READS", 24)
    batches = Survey.batches
    monkeypatch.setattr(Survey, "batches", lambda survey: batches(survey, 1))


class _Stages(Many):
    """Each rank is a stage of a pipeline, with tensors that no other rank has."""

    def captured(self, rank: int) -> Captured:
        captured = super().captured(rank)
        others = set(self.paths) - set(self.paths[rank :: self.ranks])
        return Captured(
            [p for p in captured.parts if not isinstance(p, Leaf) or p.item.path not in others]
        )


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_each_tool_has_the_same_result(tmp_path: Path, kind: str, older: bool) -> None:
    many = Many(kind, 6, 12, older=older)
    snapshot = Snapshot(many.write(tmp_path / "s"))
    report = snapshot.verify("full")
    assert report.problems == ()
    assert report.num_objects == len(list((tmp_path / "s" / ATTEMPT).glob("data/**/*.safetensors")))
    for path in many.paths:
        assert np.array_equal(snapshot.read_object(path).detach().numpy(), many.value(path))
    model = snapshot.read_object("4/model")
    whole = snapshot.get_state_dict_for_key("model")
    for state in (model, whole):
        found = {
            f"model/layers.{name}": value
            for name, value in _flat(state, "").items()
            if value is not None
        }
        assert len(found) == len(many.paths)
    assert list(_flat(whole, "")) == [path.removeprefix("model/") for path in many.paths]
    for path in many.paths:
        name = path.removeprefix("model/")
        assert np.array_equal(_flat(whole, "")[name].detach().numpy(), many.value(path))
    assert snapshot.read_object("3/extra/list") == [3]
    assert snapshot.step == 7
    entries = snapshot.get_manifest()
    assert snapshot.get_manifest(rank=5) == {
        name: entry for name, entry in entries.items() if name.startswith("5/")
    }
    with pytest.raises(UsageError, match="ranks 0 to 5"):
        snapshot.get_manifest(rank=6)
    with pytest.raises(UsageError, match="ranks 0 to 5"):
        snapshot.read_object("6/model")
    with pytest.raises(UsageError, match="did you mean 'model/layers"):
        snapshot.read_object(many.paths[0] + "s")
    copied = snapshot.copy_to(tmp_path / "copy")
    assert copied.num_copied == sum(1 for p in (tmp_path / "s").rglob("*") if p.is_file()) - 1
    (tmp_path / "copy" / COMMIT_KEY).unlink()
    again = Snapshot(tmp_path / "copy")
    assert again.recover(force=True).num_objects == report.num_objects
    assert (tmp_path / "copy" / COMMIT_KEY).read_bytes() == (
        tmp_path / "s" / COMMIT_KEY
    ).read_bytes()


def _flat(state: Any, prefix: str) -> dict[str, Any]:
    if not isinstance(state, dict):
        return {prefix: state}
    return {
        name: value
        for key, below in state.items()
        for name, value in _flat(below, f"{prefix}/{key}" if prefix else key).items()
    }


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


def test_stages_of_a_pipeline_are_intact(tmp_path: Path) -> None:
    many = _Stages("ddp", 4, 12)
    snapshot = Snapshot(many.write(tmp_path))
    assert snapshot.verify("full").problems == ()
    found = _flat(snapshot.get_state_dict_for_key("model"), "")
    assert set(found) == {path.removeprefix("model/") for path in many.paths}


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("damage", [_cut, _flip, Path.unlink])
@pytest.mark.parametrize("what", ["manifest", "owners", "data"])
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], None], what: str) -> None:
    snapshot = Snapshot(Many("fsdp", 6, 4).write(tmp_path))
    data = next((tmp_path / ATTEMPT).glob("data/**/*3-*.safetensors"))
    places = {
        "manifest": manifest_key(ATTEMPT, 3),
        "owners": owners_key(ATTEMPT),
        "data": str(data.relative_to(tmp_path)),
    }
    damage(tmp_path / places[what])
    for level in ("quick", "full"):
        problems = snapshot.verify(level).problems
        if (level, what, damage) == ("quick", "data", _flip):
            assert problems == ()
        else:
            assert {problem.key for problem in problems} == {places[what]}  # type: ignore[attr-defined]
    with pytest.raises((ChecksumMismatch, FormatError)):
        snapshot.copy_to(tmp_path / "copy")
    assert not (tmp_path / "copy" / COMMIT_KEY).exists()


@pytest.mark.parametrize("level", ["quick", "full"])
def test_sizes_come_from_a_list(
    tmp_path: Path, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request for each is for those that the list does not show right, such as links."""
    snapshot = Snapshot(Many("fsdp", 6, 4).write(tmp_path / "s"))
    asked: list[str] = []
    stat = FsStorage.stat

    async def counted(storage: FsStorage, key: str) -> ObjectInfo:
        asked.append(key)
        return await stat(storage, key)

    monkeypatch.setattr(FsStorage, "stat", counted)
    assert snapshot.verify(level).ok
    assert asked == []
    data = sorted((tmp_path / "s" / ATTEMPT).glob("data/**/*.safetensors"))
    linked, cut, lost = data[0], data[1], data[2]
    linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(tmp_path / "elsewhere")
    _cut(cut)
    lost.unlink()
    problems = sorted(map(str, snapshot.verify(level).problems))
    keys = [str(each.relative_to(tmp_path / "s")) for each in (linked, cut, lost)]
    assert sorted(asked) == keys
    assert len(problems) == 2
    assert keys[1] in problems[0]
    assert "was written with" in problems[0]
    assert keys[2] in problems[1]
    assert "is missing" in problems[1]


class _Flaky(Wrapper):
    """Bits of each rank manifest flip on the way, once."""

    def __init__(self, inner: Storage, flipped: list[str]) -> None:
        super().__init__(inner)
        self.capabilities = without_blocking_io(inner.capabilities)
        self._flipped = flipped

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        data = await super().get(key, start, stop)
        if "/manifest/" in key and key not in self._flipped:
            self._flipped.append(key)
            data = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
        return data


@pytest.mark.parametrize("tool", ["verify", "copy", "get_manifest", "diff"])
def test_a_manifest_that_is_damaged_on_the_way_is_read_again(tmp_path: Path, tool: str) -> None:
    folder = Many("fsdp", 24, 4).write(tmp_path / "s")
    flipped: list[str] = []

    def open_flaky(url: str, context: Any) -> Storage:
        return _Flaky(open_storage(url.partition("://")[2], context), flipped)

    scheme = f"flaky-{tool.replace('_', '-')}"
    register(scheme, open_flaky)
    snapshot = Snapshot(f"{scheme}://{folder}")
    if tool == "verify":
        assert snapshot.verify("quick").problems == ()
    elif tool == "copy":
        snapshot.copy_to(tmp_path / "copy")
        assert files_in(tmp_path / "copy") == files_in(Path(folder))
    elif tool == "get_manifest":
        assert list(snapshot.get_manifest()) == list(Snapshot(folder).get_manifest())
    else:
        found = CliRunner().invoke(cli.app, ["diff", f"{scheme}://{folder}", str(folder)])
        assert (found.exit_code, found.stdout) == (0, f"equal: {24 * 9} leaves\n")
    assert len(flipped) == 24


def test_ranks_that_are_alike_are_shown_once(tmp_path: Path) -> None:
    Many("fsdp", 12, 4).write(tmp_path)
    shown = CliRunner().invoke(cli.app, ["inspect", str(tmp_path)])
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    assert [line for line in lines if line.startswith(("└── rank", "ranks"))] == [
        "└── rank 0  (9 leaves, 272 B)",
        "ranks 1 to 10, each like rank 0  (9 leaves, 272 B)",
        "└── rank 11  (9 leaves, 144 B)",
    ]
    document = json.loads(CliRunner().invoke(cli.app, ["inspect", str(tmp_path), "--json"]).stdout)
    assert len(document["objects"]) == 12
    assert [entry["rank"] for entry in document["entries"]] == sorted(list(range(12)) * 12)
    same = CliRunner().invoke(cli.app, ["diff", str(tmp_path), str(tmp_path)])
    assert same.stdout == f"equal: {12 * 9} leaves\n"


@pytest.mark.parametrize("tool", ["verify", "read_object", "restore", "get_state_dict_for_key"])
def test_memory_does_not_grow_with_ranks_times_tensors(
    tmp_path: Path, tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "BATCH_BYTES", 1)
    monkeypatch.setattr(reads, "MAX_PLANNED_READS", 256)
    many = Many("fsdp", 96, 200)
    snapshot = Snapshot(many.write(tmp_path, has_data=False), options=Options(verify=False))
    names = [path.removeprefix("model/") for path in many.paths]
    state = {"model": StateDict({name: torch.empty(many.shape) for name in names})}
    calls: dict[str, Callable[[], object]] = {
        "verify": snapshot.verify,
        "read_object": lambda: snapshot.read_object(many.paths[7]),
        "restore": lambda: snapshot.restore(state),
        "get_state_dict_for_key": lambda: snapshot.get_state_dict_for_key("model"),
    }
    call = calls[tool]
    tracemalloc.start()
    try:
        call()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 << 20, "the entries of all ranks take about 15 MB"
