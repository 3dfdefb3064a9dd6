# SPDX-License-Identifier: Apache-2.0
"""torchsnapshot's calls over snapshots of ours, and over those that it wrote itself."""

from __future__ import annotations

import fnmatch
import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from actorsnap import Options, StorageError, UsageError
from actorsnap import sync as ours
from actorsnap.interop.torchsnapshot import (
    DictEntry,
    ObjectEntry,
    PendingSnapshot,
    PrimitiveEntry,
    RNGState,
    Snapshot,
    StateDict,
    TensorEntry,
)
from actorsnap.interop.torchsnapshot.rss_profiler import measure_rss_deltas
from actorsnap.interop.torchsnapshot.snapshots import _our_glob
from actorsnap.state.capture import _glob_regex
from actorsnap.storage.wrapper import Wrapper
from tests.api.faults import faulty, faulty_url
from tests.formats.test_torchsnapshot import DATA, is_equal
from tests.formats.written_by_torchsnapshot import make_model, make_optimizer, make_values
from tests.support.cases import slow
from tests.support.memory import return_free_memory
from tests.worlds import Director

TRUSTED = Options(allow_pickle=True)


def make_app_state() -> dict[str, Any]:
    """What ``data/torchsnapshot/slabs`` was saved from."""
    model = make_model()
    optimizer = make_optimizer(model)
    values = StateDict(**make_values())
    return {"model": model, "optimizer": optimizer, "values": values, "rng": RNGState()}


def saved_state(app_state: dict[str, Any]) -> dict[str, Any]:
    return {key: stateful.state_dict() for key, stateful in app_state.items()}


def test_round_trip(tmp_path: Path) -> None:
    app_state = make_app_state()
    snapshot = Snapshot.take(str(tmp_path / "s"), app_state, options=TRUSTED)
    assert (snapshot.path, snapshot.pg) == (str(tmp_path / "s"), None)
    saved = saved_state(app_state)
    other = make_app_state()
    for parameter in other["model"].parameters():
        parameter.data.zero_()
    other["values"] = StateDict(newer=1, mask=torch.zeros(3), bfloat16=torch.zeros(4).bfloat16())
    in_place = other["values"]["bfloat16"]
    torch.rand(1)
    snapshot.restore(other)
    assert other["values"].pop("newer") == 1
    assert other["values"]["bfloat16"] is in_place
    for key in ("model", "optimizer", "rng"):
        assert is_equal(other[key].state_dict(), saved[key])
    assert {name: other["values"][name] for name in saved["values"]}.keys() == make_values().keys()
    for name, value in make_values().items():
        assert is_equal(other["values"][name], value)
    found = Snapshot(snapshot.path, options=TRUSTED).get_state_dict_for_key("values")
    assert is_equal(found, saved["values"])


def test_a_module_is_strict_unless_told(tmp_path: Path) -> None:
    snapshot = Snapshot.take(str(tmp_path), {"m": torch.nn.Linear(2, 2)})
    larger = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(Exception, match="weight"):
        snapshot.restore({"m": larger})
    snapshot.restore({"m": larger}, strict=False)


@pytest.mark.parametrize("who", ["torchsnapshot", "actorsnap"])
def test_manifest_is_that_of_torchsnapshot(tmp_path: Path, who: str) -> None:
    if who == "actorsnap":
        snapshot = Snapshot.take(str(tmp_path), make_app_state(), options=TRUSTED)
    else:
        snapshot = Snapshot(str(DATA / "slabs"))
    text = (DATA / "slabs" / ".snapshot_metadata").read_text()
    theirs = json.loads(text)["manifest"]
    found = snapshot.metadata.manifest
    assert snapshot.get_manifest() == found
    # Keys that collide as text: it pickles the dict.
    assert found.keys() == theirs.keys()
    for path, record in found.items():
        expected = theirs[path]
        if isinstance(record, ObjectEntry):
            assert expected["type"] == "object", path
            continue
        assert record.type == expected["type"], path
        if isinstance(record, PrimitiveEntry):
            assert record.serialized_value == expected["serialized_value"], path
            assert record.readable == expected["readable"], path
        elif isinstance(record, DictEntry):
            assert list(record.keys) == expected["keys"], path
        elif isinstance(record, TensorEntry):
            assert record.dtype == expected["dtype"], path
            assert list(record.shape) == expected["shape"], path
            if who == "torchsnapshot":
                assert record.location == expected["location"], path
    assert (snapshot.metadata.world_size, snapshot.metadata.version) == (1, "0.1.0")


def test_sharded_and_replicated_entries() -> None:
    manifest: dict[str, Any] = dict(Snapshot(str(DATA / "ranks")).get_manifest())
    theirs = json.loads((DATA / "ranks" / ".snapshot_metadata").read_text())["manifest"]
    assert manifest.keys() == theirs.keys()
    for path in ("0/sharded/rows", "1/sharded/columns"):
        shards = [[list(s.offsets), list(s.sizes)] for s in manifest[path].shards]
        assert shards == [[s["offsets"], s["sizes"]] for s in theirs[path]["shards"]]
    for path, record in manifest.items():
        if path.startswith("0/shared/replicated"):
            assert record.replicated or isinstance(record, ObjectEntry)


def test_read_object(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = make_values()
    snapshot = Snapshot.take(str(tmp_path), {"values": StateDict(**values)}, options=TRUSTED)
    for source in (snapshot, Snapshot(str(DATA / "slabs"), options=TRUSTED)):
        for path, record in source.get_manifest().items():
            if path.startswith("0/values/") and not isinstance(record, ObjectEntry):
                value: Any = values
                for token in path.split("/")[2:]:
                    name = token.replace("%2F", "/").replace("%25", "%")
                    if isinstance(value, list):
                        value = value[int(name)]
                    else:
                        value = next(item for key, item in value.items() if str(key) == name)
                assert is_equal(source.read_object(path), value), path
        out = torch.zeros(4, 3)
        assert source.read_object("0/values/transposed", out, memory_budget_bytes=10) is out
        assert torch.equal(out, values["transposed"])
        assert source.read_object("0/values/bool", obj_out=7) is True
        assert is_equal(source.read_object("0/values/tuple", 7), values["tuple"])
        other = torch.zeros(4, 3, dtype=torch.float64)
        assert is_equal(source.read_object("0/values/transposed", other), values["transposed"])
        assert "obj_out is not used" in caplog.text
        for path in ("0/values/absent", "values/bool", "0", "x/values/bool"):
            with pytest.raises(RuntimeError, match="does not exist in the snapshot's manifest"):
                source.read_object(path)
        with pytest.raises(AssertionError, match="is absent in both manifest.*values"):
            source.get_state_dict_for_key("absent")


class Effectful:
    def state_dict(self) -> dict[str, Any]:
        torch.rand(2)
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        torch.rand(3)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("key", ["a", "z"])
def test_the_generator_is_the_same_after_both(tmp_path: Path, is_async: bool, key: str) -> None:
    app_state = {key: RNGState(), "effectful": Effectful(), "model": torch.nn.Linear(1, 1)}
    before = torch.get_rng_state()
    if is_async:
        snapshot = Snapshot.async_take(str(tmp_path), app_state).wait()
    else:
        snapshot = Snapshot.take(str(tmp_path), app_state)
    assert torch.equal(torch.get_rng_state(), before)
    after_take = torch.rand(1)
    snapshot.restore(app_state)
    assert torch.equal(torch.rand(1), after_take)
    with pytest.raises(RuntimeError, match="Multiple RNGState"):
        snapshot.restore({"a": RNGState(), "b": RNGState()})


def test_restores_a_generator_that_torchsnapshot_saved() -> None:
    snapshot = Snapshot(str(DATA / "slabs"))
    snapshot.restore({"rng": RNGState()})
    state = snapshot.get_state_dict_for_key("rng")["rng_state"]
    assert torch.equal(torch.get_rng_state(), state)


def test_async_take(tmp_path: Path) -> None:
    state = StateDict(x=torch.zeros(1 << 16))
    pending = Snapshot.async_take(path=str(tmp_path / "s"), app_state={"s": state})
    state["x"].fill_(7)
    assert isinstance(pending, PendingSnapshot)
    assert (pending.path, pending.pg) == (str(tmp_path / "s"), None)
    snapshot = pending.wait()
    assert pending.done()
    assert not snapshot.read_object("0/s/x").any()


class Broken(Wrapper):
    async def put(self, key: str, views: Sequence[memoryview]) -> None:
        raise StorageError(op="put", key=key, backend=self.url, detail="sorry")


def test_a_failed_save_leaves_the_older_one(tmp_path: Path) -> None:
    Snapshot.take(str(tmp_path / "s"), {"s": StateDict(x=1)})
    Snapshot.take(str(tmp_path / "s"), {"s": StateDict(x=2)})
    with faulty(Broken):
        state = StateDict(x=torch.ones(3))
        pending = Snapshot.async_take(faulty_url(tmp_path / "s"), {"s": state})
        with pytest.raises(
            RuntimeError, match="Encountered exception while taking snapshot.*\n.*sorry"
        ):
            pending.wait()
    assert Snapshot(str(tmp_path / "s")).read_object("0/s/x") == 2
    assert ours.Snapshot(tmp_path / "s").verify("full").ok


def test_memory_of_a_block_is_measured() -> None:
    deltas: list[int] = []
    threads = threading.active_count()
    return_free_memory()
    with measure_rss_deltas(deltas, timedelta(hours=1)):
        held = np.ones(64 << 20, np.uint8)
    assert len(deltas) == 2
    assert deltas[-1] >= deltas[0] + held.nbytes * 0.9
    assert threading.active_count() == threads
    with measure_rss_deltas(deltas := [], timedelta(microseconds=1)):
        while len(deltas) < 3:
            time.sleep(0)


def test_mistakes(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    app_state: dict[str, Any] = {"s": StateDict(x=1)}
    for call in (Snapshot.take, Snapshot.async_take):
        with pytest.raises(TypeError, match="Expected Stateful in app_state for key s, got"):
            call(path, {"s": 1})
        with pytest.raises(UsageError, match="_custom_tensor_prepare_func"):
            call(path, app_state, _custom_tensor_prepare_func=print)
        for glob in ("s/?", "s/[ab]"):
            with pytest.raises(UsageError, match=r"only \* is supported"):
                call(path, app_state, replicated=[glob])
        with pytest.raises(UsageError, match="allow_pickle"):
            call(path, {"s": StateDict(x=Effectful())})
    snapshot = Snapshot(path)
    with pytest.raises(TypeError, match="Expected Stateful"):
        snapshot.restore({"s": 1})
    for missing in (
        lambda: snapshot.metadata,
        lambda: snapshot.restore(app_state),
        lambda: snapshot.read_object("0/s/x"),
        lambda: snapshot.get_state_dict_for_key("s"),
    ):
        with pytest.raises(RuntimeError, match=r"Failed to read \.snapshot_metadata.*are there"):
            missing()


@given(
    glob=st.lists(st.sampled_from(["a", "b", "/", "*", "a/*/b", "**"]), max_size=5).map("".join),
    path=st.lists(st.sampled_from(["a", "b", "/", "a/b"]), max_size=6).map("".join),
)
@example("a/*/b", "a/b")
def test_globs_match_what_they_match_there(glob: str, path: str) -> None:
    pattern = re.compile(_glob_regex(_our_glob(glob)), re.DOTALL)
    assert bool(pattern.fullmatch(path)) == fnmatch.fnmatchcase(path, glob)


@pytest.fixture(scope="module")
def director() -> Iterator[Director]:
    with Director("tests.interop.torchsnapshot_ranks") as director:
        yield director


@pytest.mark.usefixtures("forker")
@pytest.mark.parametrize(("num_ranks", "name"), [(3, "job"), (2, "globs"), slow(4, "subgroup")])
def test_ranks(director: Director, tmp_path: Path, num_ranks: int, name: str) -> None:
    director.play("direct", num_ranks=num_ranks, name=name, folder=str(tmp_path))
