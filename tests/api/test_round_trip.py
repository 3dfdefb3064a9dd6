# SPDX-License-Identifier: Apache-2.0
"""What was saved comes back: every kind of leaf, real training state, and each public call.

All of it through both facades, on the file system and in memory. Nothing here fails on purpose:
faults, bad input and cancellation have files of their own.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import os
import random
import string
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import actorsnap
import actorsnap.sync
from actorsnap import (
    FormatError,
    IncompatibleState,
    NotASnapshot,
    ObjectExists,
    Options,
    Phase,
    RNGState,
    StateDict,
    UsageError,
    from_env,
)
from actorsnap.format.manifest import TensorEntry, ValueEntry, ViewEntry
from actorsnap.state import capture
from actorsnap.storage.memory import forget_space
from tests.api.facades import Facade, each_facade, each_place
from tests.api.same import assert_same
from tests.api.slow_storage import gated
from tests.api.states import CASES, DTYPES, dense, scribble

_numbers = itertools.count()


@pytest.fixture
def scheme() -> str:
    return "memory"  # unless `each_place` says otherwise


@pytest.fixture
def place(scheme: str, tmp_path: Path) -> Iterator[str]:
    """A URL at which nothing is."""
    name = f"round-trip-{next(_numbers)}"
    yield str(tmp_path / "snapshot") if scheme == "fs" else f"memory://{name}/snapshot"
    forget_space(name)


def addresses(value: Any, path: str = "") -> dict[str, int]:
    """Path -> where the first element lies, of all dense tensors and arrays below ``value``."""
    found: dict[str, int] = {}
    if isinstance(value, Mapping):
        for key, child in value.items():
            found |= addresses(child, f"{path}/{key!r}")
    elif isinstance(value, list | tuple):
        for index, child in enumerate(value):
            found |= addresses(child, f"{path}/{index}")
    elif isinstance(value, torch.Tensor) and value.layout is torch.strided:
        found[path] = value.data_ptr()
    elif isinstance(value, np.ndarray):
        found[path] = value.ctypes.data
    return found


# Every kind of leaf ---------------------------------------------------------------------------


@pytest.mark.few
@each_facade
@each_place
@pytest.mark.parametrize("is_async", [False, True], ids=["take", "async_take"])
@pytest.mark.parametrize("case", CASES)
def test_leaves_come_back_fresh(api: Facade, case: str, is_async: bool, place: str) -> None:
    state, expected = CASES[case](), CASES[case]()
    if is_async:
        pending = api.run(api.Snapshot.async_take(place, {"s": StateDict(state)}))
        snapshot = api.run(pending.wait())
    else:
        snapshot = api.run(api.Snapshot.take(place, {"s": StateDict(state)}))
    assert_same(state, expected)  # saving changes nothing
    assert_same(api.run(snapshot.get_state_dict_for_key("s")), expected)
    assert api.run(api.Snapshot(place).verify("full")).ok


@pytest.mark.few
@each_facade
@each_place
@pytest.mark.parametrize("case", CASES)
def test_leaves_come_back_in_place(api: Facade, case: str, place: str) -> None:
    api.run(api.Snapshot.take(place, {"s": StateDict(CASES[case]())}))
    target = StateDict(CASES[case]())
    scribble(target.data)
    before = addresses(target.data)
    report = api.run(api.Snapshot(place).restore({"s": target}))
    assert report.is_complete
    assert_same(target.data, CASES[case]())
    after = addresses(target.data)
    before.pop("/'channel-packed'", None)  # torch cannot copy into packed elements
    before.pop("/'stepped'", None)  # negative strides: saved apart from what it is a view of
    assert {path: after[path] for path in before} == before
    assert before or case in ("values", "sparse")


def test_every_dtype_of_this_torch_is_tried() -> None:
    assert {"bfloat16", "float8_e8m0fnu", "uint64", "complex32", "bool"} <= set(DTYPES)
    assert {"float4_e2m1fn_x2", "bits16", "int4", "uint1"} <= set(DTYPES)


def test_shared_memory_is_stored_once_and_restored_shared(place: str) -> None:
    base = torch.arange(3_000_000, dtype=torch.float32)
    state = {"a": base, "b": base[10:20], "c": base.view(1000, 3000).t()}
    snapshot = actorsnap.sync.Snapshot.take(place, {"s": StateDict(state)})
    entries = snapshot.get_manifest()
    assert [type(entries[f"0/s/{name}"]) for name in "abc"] == [TensorEntry, ViewEntry, ViewEntry]
    fresh = snapshot.get_state_dict_for_key("s")
    fresh["a"][10] = -1.0
    assert fresh["b"][0] == -1.0
    assert fresh["c"][10, 0] == -1.0


def test_memory_shared_by_two_statefuls(place: str) -> None:
    weight = dense(torch.float32, 6, 2)
    app_state = {"ema": StateDict(w=weight.t()), "model": StateDict(w=weight)}
    snapshot = actorsnap.sync.Snapshot.take(place, app_state)
    assert_same(snapshot.get_state_dict_for_key("model"), {"w": weight})
    assert_same(snapshot.get_state_dict_for_key("ema"), {"w": weight.t()})
    separate = {"ema": StateDict(w=torch.zeros(2, 6)), "model": StateDict(w=torch.zeros(6, 2))}
    snapshot.restore(separate)
    assert_same(separate["ema"]["w"], weight.t().contiguous())
    assert_same(separate["model"]["w"], weight)


ODD_KEYS = [
    *("", ".", "..", "a/b", "A", "a", "__metadata__", "%", "=small", "0", "-1", "a@b", "a\\b"),
    *("🦜" * 60, "k" * 10_000, "\ud800", "new\nline", "nul\x00", " ", "con", "ключ"),
]


@each_facade
@each_place
def test_top_level_keys(api: Facade, place: str) -> None:
    """They become names in storage, whatever is in them."""
    app_state = {
        key: StateDict(n=n, x=dense(torch.int32, 3 if n % 4 else 300_000, seed=n))
        for n, key in enumerate(ODD_KEYS)
    }
    snapshot = api.run(api.Snapshot.take(place, app_state))
    for number, key in enumerate(ODD_KEYS):
        found = api.run(snapshot.get_state_dict_for_key(key))
        assert_same(found, app_state[key].data)
        assert found["n"] == number


def test_targets_of_other_layouts_are_restored_in_place(place: str) -> None:
    value = dense(torch.float32, 40, 50)
    snapshot = actorsnap.sync.Snapshot.take(place, {"s": StateDict(x=value, y=value.clone().t())})
    target = StateDict(x=torch.zeros(50, 40).t(), y=torch.zeros(50, 40))
    before = addresses(target.data)
    snapshot.restore({"s": target})
    assert_same(target["x"], value)
    assert_same(target["y"], value.t())
    assert addresses(target.data) == before


# Training -------------------------------------------------------------------------------------


class Training:
    """A small network with dropout, AdamW, a schedule, and data drawn at random."""

    def __init__(self, seed: int, *, is_primed: bool = True) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(12, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.Dropout(0.3),
            torch.nn.GELU(),
            torch.nn.Linear(16, 1),
        )
        self.model.register_buffer("not_saved", torch.zeros(1), persistent=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, amsgrad=True)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=20)
        self.progress = StateDict(step=0)
        if is_primed:
            self.losses(1)

    @property
    def app_state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "progress": self.progress,
            "rng": RNGState(),
        }

    def losses(self, num_steps: int) -> list[float]:
        """Trains on; the loss of each step."""
        found = []
        for _ in range(num_steps):
            x = torch.randn(8, 12) * random.random() + float(np.random.standard_normal())
            loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.progress["step"] += 1
            found.append(loss.item())
        return found


@each_facade
@each_place
@pytest.mark.parametrize("is_primed", [True, False], ids=["primed", "fresh"])
def test_training_resumes_bit_exact(api: Facade, is_primed: bool, place: str) -> None:
    first = Training(1)
    first.losses(5)
    pending = api.run(api.Snapshot.async_take(place, first.app_state))
    expected = first.losses(5)
    api.run(pending.wait())

    second = Training(2, is_primed=is_primed)
    before = addresses(second.model.state_dict())
    report = api.run(api.Snapshot(place).restore(second.app_state))
    assert report.is_complete
    assert second.progress["step"] == 6
    assert addresses(second.model.state_dict()) == before
    assert second.losses(5) == expected
    assert_same(second.model.state_dict(), first.model.state_dict())
    assert_same(second.optimizer.state_dict(), first.optimizer.state_dict())
    assert_same(second.schedule.state_dict(), first.schedule.state_dict())


@each_facade
def test_taking_draws_no_number(api: Facade, place: str) -> None:
    """RNGState says so; the other statefuls may draw as many as they like."""

    class Noisy(StateDict):
        def state_dict(self) -> dict[str, Any]:
            self["noise"] = draw()
            return super().state_dict()

        def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
            super().load_state_dict(state_dict)
            draw()

    def draw() -> list[Any]:
        return [random.random(), float(np.random.random()), torch.rand(3), random.gauss(0, 1)]

    def seed() -> None:
        random.seed(7)
        np.random.seed(7)
        torch.manual_seed(7)
        # Half of a pair: the other half is state, too.
        random.gauss(0, 1)
        np.random.standard_normal()

    app_state = {"a": Noisy(), "rng": RNGState(), "z": Noisy()}
    seed()
    expected = [draw(), draw()]
    seed()
    snapshot = api.run(api.Snapshot.take(place, app_state))
    assert_same([draw(), draw()], expected)
    for _ in range(2):
        draw()
        api.run(snapshot.restore(app_state))
        assert_same([draw(), draw()], expected)


# Parts of an app state ------------------------------------------------------------------------


@each_facade
def test_subset_of_keys(api: Facade, place: str) -> None:
    first, other = Training(1), Training(2)
    api.run(api.Snapshot.take(place, first.app_state))
    untouched = copy.deepcopy(other.optimizer.state_dict())
    api.run(api.Snapshot(place).restore({"model": other.model}))
    assert_same(other.model.state_dict(), first.model.state_dict())
    assert_same(other.optimizer.state_dict(), untouched)


def _saved_modules() -> dict[str, Any]:
    torch.manual_seed(3)
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3), "gone": torch.nn.Linear(1, 1)})
    return {"model": model, "extra": StateDict(x=torch.ones(2), y=1)}


@each_facade
def test_strict_names_everything_and_changes_nothing(api: Facade, place: str) -> None:
    api.run(api.Snapshot.take(place, _saved_modules()))
    target = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 4).half(), "new": torch.nn.Linear(1, 1)})
    extra = StateDict(x=torch.zeros(2), z=torch.zeros(3))
    before = copy.deepcopy([target.state_dict(), extra.data])
    app_state = {"model": target, "extra": extra, "more": StateDict(q=1)}
    with pytest.raises(IncompatibleState) as raised:
        api.run(api.Snapshot(place).restore(app_state))
    error = raised.value
    assert set(error.missing) == {"model/new.weight", "model/new.bias", "extra/z", "more"}
    assert set(error.unexpected) == {"model/gone.weight", "model/gone.bias"}
    assert len(error.mismatched) == 2
    for part in ("model/a.weight", "(3, 2)", "(4, 2)", "float16", "float32"):
        assert part in error.mismatched[0]
    for named in (*error.missing, *error.unexpected, *error.mismatched):
        assert named in str(error)
    assert_same([target.state_dict(), extra.data], before)


@each_facade
def test_not_strict_restores_the_rest_and_reports(api: Facade, place: str) -> None:
    saved = _saved_modules()
    api.run(api.Snapshot.take(place, saved))
    target = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3), "new": torch.nn.Linear(1, 1)})
    kept = copy.deepcopy(target["new"].state_dict())
    extra, more = StateDict(x=torch.zeros(5), z=torch.zeros(3)), StateDict(q=1)
    app_state = {"model": target, "extra": extra, "more": more}
    report = api.run(api.Snapshot(place).restore(app_state, strict=False))
    assert not report.is_complete
    assert set(report.missing) == {"model/new.weight", "model/new.bias", "extra/z", "more"}
    assert set(report.unexpected) == {"model/gone.weight", "model/gone.bias"}
    assert [line.partition(":")[0] for line in report.mismatched] == ["extra/x"]
    assert report.nbytes == 4 * (2 * 3 + 3)
    assert_same(target["a"].state_dict(), saved["model"]["a"].state_dict())
    assert_same(target["new"].state_dict(), kept)
    assert_same(extra.data, {"x": torch.zeros(5), "z": torch.zeros(3), "y": 1})
    assert more.data == {"q": 1}


@each_facade
def test_what_a_stateful_lacks_is_handed_over(api: Facade, place: str) -> None:
    """Unexpected for modules only: others, like a fresh optimizer, take what they are given."""
    api.run(api.Snapshot.take(place, {"s": StateDict(CASES["typed"]())}))
    empty = StateDict()
    assert api.run(api.Snapshot(place).restore({"s": empty})).is_complete
    assert_same(empty.data, CASES["typed"]())
    assert empty["parameter"].data_ptr() == empty["tied"].data_ptr()


# Reading parts --------------------------------------------------------------------------------


@pytest.fixture
def shelf(place: str) -> str:
    """The URL of a snapshot with something of everything in it."""
    state: dict[Any, Any] = {
        "w": dense(torch.float32, 600, 700),
        "f8": dense(torch.float8_e5m2, 64),
        "deep": {"list": [1, {"x": dense(torch.int16, 4)}], "none": None},
        1: "int",
        "1": "str",
        "a/b": "slash",
        "blob": bytes(range(256)) * 20,
        "array": np.arange(12.0).reshape(3, 4),
    }
    app_state = {"model": StateDict(state), "7": StateDict(n=7)}
    actorsnap.sync.Snapshot.take(place, app_state)
    return place


@each_facade
@each_place
def test_read_object(api: Facade, shelf: str) -> None:
    snapshot = api.Snapshot(shelf)
    weight = dense(torch.float32, 600, 700)
    tree = {"list": [1, {"x": dense(torch.int16, 4)}], "none": None}
    for path, expected in {
        "0/model/w": weight,
        "model/w": weight,
        "0/model/1": "int",
        "0/model/%31": "str",
        "model/a/b": "slash",
        "model/a%2Fb": "slash",
        "model/blob": bytes(range(256)) * 20,
        "model/deep/none": None,
        "%37/n": 7,
        "0/%37/n": 7,
        "model/deep": tree,
        "0/model/deep/list": tree["list"],
    }.items():
        assert_same(api.run(snapshot.read_object(path)), expected, path)
    within_a_mib = api.run(snapshot.read_object("model/w", memory_budget_bytes=1 << 20))
    assert_same(within_a_mib, weight)
    everything = api.run(snapshot.get_state_dict_for_key("model"))
    assert_same(api.run(snapshot.read_object("model")), everything)


@each_facade
@each_place
@pytest.mark.parametrize("budget", [None, 1 << 20])
def test_read_object_into(api: Facade, shelf: str, budget: int | None) -> None:
    snapshot, weight = api.Snapshot(shelf), dense(torch.float32, 600, 700)

    def read(path: str, out: Any) -> Any:
        return api.run(snapshot.read_object(path, out, memory_budget_bytes=budget))

    parameter = torch.nn.Parameter(torch.zeros(600, 700))
    for out in (torch.zeros(600, 700), torch.zeros(700, 600).t(), parameter):
        address = out.data_ptr()
        assert read("model/w", out) is out
        assert_same(out.detach(), weight)
        assert out.data_ptr() == address
    array = np.zeros((3, 4))
    assert read("model/array", array) is array
    assert_same(array, np.arange(12.0).reshape(3, 4))
    for wrong in (torch.zeros(700, 600), torch.zeros(600, 700, dtype=torch.float64), array):
        with pytest.raises(IncompatibleState):
            read("model/w", wrong)
    with pytest.raises(IncompatibleState, match="container"):
        read("model/deep", torch.zeros(1))
    with pytest.raises(UsageError, match="share memory"):
        read("model/w", torch.zeros(1, 700).expand(600, 700))
    with pytest.raises(UsageError, match="must be a tensor"):
        read("model/w", [1.0])


@each_facade
def test_no_such_path(api: Facade, shelf: str) -> None:
    snapshot = api.Snapshot(shelf)
    with pytest.raises(UsageError, match=r"no path 'model/ww'.*'model/w'"):
        api.run(snapshot.read_object("model/ww"))
    with pytest.raises(UsageError, match="only rank 0$"):
        api.run(snapshot.read_object("3/model/w"))
    with pytest.raises(UsageError, match=r"no key 'modle'; did you mean 'model'"):
        api.run(snapshot.get_state_dict_for_key("modle"))
    with pytest.raises(UsageError, match=r"no key 'rng'; it has .*'7', 'model'"):
        api.run(snapshot.get_state_dict_for_key("rng"))
    with pytest.raises(UsageError, match="memory_budget_bytes must be at least 1048576"):
        api.run(snapshot.read_object("model/w", memory_budget_bytes=5))


@each_facade
def test_manifest(api: Facade, shelf: str) -> None:
    entries = api.run(api.Snapshot(shelf).get_manifest())
    entry, value = entries["0/model/w"], entries["0/model/%31"]
    assert isinstance(entry, TensorEntry)
    assert (entry.dtype, entry.shape) == ("float32", (600, 700))
    assert isinstance(value, ValueEntry)
    assert value.value == "str"
    assert all(path.startswith(("0/model", "0/%37")) for path in entries)


@each_facade
@each_place
@pytest.mark.parametrize("call", ["take", "async_take"])
def test_step(api: Facade, place: str, call: str) -> None:
    for step in (7, 0, (1 << 63) - 1, None):
        saved = api.run(
            getattr(api.Snapshot, call)(place, {"s": StateDict(x=1)}, step=step, overwrite=True)
        )
        if call == "async_take":
            api.run(saved.wait())
        assert api.run(api.Snapshot(place).step) == step


@each_facade
@each_place
def test_metadata(api: Facade, place: str) -> None:
    metadata = {"step": 3, "loss": 0.25, "tags": ["a", None, True], "nested": {"ключ": [1, {}]}}
    snapshot = api.run(api.Snapshot.take(place, {"s": StateDict(x=1)}, metadata=metadata))
    for found in (api.run(snapshot.metadata), api.run(api.Snapshot(place).metadata)):
        assert json.dumps(found, sort_keys=True) == json.dumps(metadata, sort_keys=True)
    again = api.run(api.Snapshot.take(place, {"s": StateDict(x=1)}, overwrite=True))
    assert api.run(again.metadata) == {}


@each_facade
@pytest.mark.parametrize(
    "metadata", [{"x": (1, 2)}, {1: 2}, {"x": float("nan")}, {"x": object()}, {"x": b"bytes"}]
)
def test_metadata_that_json_would_change(api: Facade, place: str, metadata: Any) -> None:
    with pytest.raises(UsageError, match="metadata"):
        api.run(api.Snapshot.take(place, {"s": StateDict(x=1)}, metadata=metadata))
    with pytest.raises(NotASnapshot):
        api.run(api.Snapshot(place).verify())


@each_facade
@each_place
def test_verify_and_delete(api: Facade, place: str) -> None:
    state = StateDict(x=dense(torch.float32, 500_000), y=1)
    snapshot = api.run(api.Snapshot.take(place, {"s": state}))
    quick, full = api.run(snapshot.verify()), api.run(snapshot.verify("full"))
    assert (quick.level, quick.num_objects, quick.nbytes, quick.ok) == ("quick", 1, 0, True)
    assert (full.level, full.num_objects, full.ok) == ("full", 1, True)
    assert full.nbytes > 2_000_000
    with pytest.raises(UsageError, match="quick"):
        api.run(snapshot.verify("thorough"))
    api.run(snapshot.delete())
    for call in (snapshot.verify, snapshot.delete, api.Snapshot(place).get_manifest):
        with pytest.raises(NotASnapshot) as raised:
            api.run(call())
        assert raised.value.found == "absent"
    assert place.startswith("memory:") or not os.path.exists(place)
    api.run(api.Snapshot.take(place, {"s": state}))  # the place is free again


def test_full_verification_finds_one_flipped_bit(tmp_path: Path) -> None:
    state = {"s": StateDict(x=dense(torch.int8, 3_000_000), y=dense(torch.int8, 100))}
    actorsnap.sync.Snapshot.take(tmp_path / "s", state)
    (data,) = (tmp_path / "s").glob("*/data/s/*.safetensors")
    raw = bytearray(data.read_bytes())
    raw[-2_000_000] ^= 4
    data.write_bytes(raw)
    snapshot = actorsnap.sync.Snapshot(tmp_path / "s")
    assert snapshot.verify("quick").ok
    report = snapshot.verify("full")
    assert not report.ok
    (problem,) = report.problems
    assert "'s/x'" in str(problem)
    assert "0-0.safetensors" in str(problem)


# Pending snapshots ----------------------------------------------------------------------------


@each_facade
def test_pending_snapshot(api: Facade) -> None:
    with gated() as (url, gate):
        state = StateDict(x=dense(torch.float32, 1000))
        pending = api.run(api.Snapshot.async_take(url, {"s": state}))
        assert pending.path == url
        assert url in repr(pending)
        assert not pending.done()
        api.run(pending.staged())
        with pytest.raises(NotASnapshot) as raised:
            api.run(api.Snapshot(url).get_manifest())
        assert raised.value.found in ("unfinished", "absent")
        gate.open()
        snapshot = api.run(pending.wait())
        assert pending.done()
        assert snapshot.path == url
        again = api.run(pending.wait())  # as often as you like
        api.run(pending.staged())
        assert_same(api.run(again.get_state_dict_for_key("s")), state.data)


@each_facade
def test_events_end_with_the_outcome(api: Facade, place: str) -> None:
    state = StateDict(x=dense(torch.float32, 3_000_000))
    options = Options(chunk_bytes=2 << 20)
    pending = api.run(api.Snapshot.async_take(place, {"s": state}, options=options))
    seen = api.all(pending.events())
    assert seen[-1].phase is Phase.COMMITTED
    assert all(event.phase in (Phase.STAGING, Phase.STORING) for event in seen[:-1])
    total = seen[-1].total_bytes
    assert total > 12_000_000
    assert seen[-1].staged_bytes == seen[-1].hashed_bytes == seen[-1].stored_bytes == total
    counts = [(e.staged_bytes, e.hashed_bytes, e.stored_bytes) for e in seen]
    assert counts == sorted(counts)
    assert api.all(pending.events()) == seen[-1:]  # late listeners get the last state
    api.run(pending.wait())


async def test_a_pending_snapshot_is_awaitable(place: str) -> None:
    snapshot = await (await actorsnap.Snapshot.async_take(place, {"s": StateDict(x=1)}))
    assert isinstance(snapshot, actorsnap.Snapshot)
    assert await snapshot.get_state_dict_for_key("s") == {"x": 1}


async def test_two_listeners_and_two_waiters() -> None:
    with gated() as (url, gate):
        pending = await actorsnap.Snapshot.async_take(url, {"s": StateDict(x=torch.ones(9))})
        outcomes: list[str] = []

        async def listen() -> None:
            outcomes.append([event.phase async for event in pending.events()][-1])

        async def wait() -> None:
            outcomes.append((await pending.wait()).path)

        async with anyio.create_task_group() as tasks:
            for job in (listen, listen, wait, wait):
                tasks.start_soon(job)
            gate.open()
        assert sorted(outcomes) == sorted([Phase.COMMITTED, Phase.COMMITTED, url, url])


def test_a_dropped_handle_does_not_stop_the_save(place: str) -> None:
    actorsnap.sync.Snapshot.async_take(place, {"s": StateDict(x=torch.ones(1000))})
    actorsnap.shutdown()
    assert actorsnap.sync.Snapshot(place).verify("full").ok


# Options of take ------------------------------------------------------------------------------


@each_facade
@each_place
def test_overwrite(api: Facade, place: str) -> None:
    api.run(api.Snapshot.take(place, {"s": StateDict(x=1)}))
    with pytest.raises(ObjectExists, match="overwrite=True"):
        api.run(api.Snapshot.take(place, {"s": StateDict(x=2)}))
    assert api.run(api.Snapshot(place).read_object("s/x")) == 1
    api.run(api.Snapshot.take(place, {"t": StateDict(x=3)}, overwrite=True))
    assert set(api.run(api.Snapshot(place).get_manifest())) == {"0/t/x"}
    if not place.startswith("memory:"):
        assert len(os.listdir(place)) == 2, "the older attempt was left"


@each_facade
def test_replicated_globs(
    api: Facade, place: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "_unmatched", set())
    app_state = {"model": StateDict({"a": {"w": torch.ones(2)}, "b": 1}), "s": StateDict(x=1)}
    globs = ["model/**", "nothing/*"]
    api.run(api.Snapshot.take(place, app_state, replicated=globs))
    api.run(api.Snapshot.take(place, app_state, replicated=globs, overwrite=True))
    entries = api.run(api.Snapshot(place).get_manifest())
    assert entries["0/model/a/w"].replicated
    assert entries["0/model/b"].replicated
    assert not entries["0/s/x"].replicated
    assert caplog.text.count("'nothing/*' matches no leaf") == 1
    with pytest.raises(UsageError, match=r"\['model/\*\*'\]"):
        api.run(api.Snapshot.take(place, app_state, replicated="model/**"))


class Thing:
    """No kind of leaf that a snapshot knows."""

    def __init__(self, value: int) -> None:
        self.value = value


@each_facade
def test_allow_pickle(api: Facade, place: str) -> None:
    app_state = {"s": StateDict(thing=Thing(3), things=[Thing(4)], x=torch.ones(2))}
    with pytest.raises(UsageError) as refused:
        api.run(api.Snapshot.take(place, app_state))
    for part in ("'s/thing'", "'s/things/0'", "Thing", "convert it", "allow_pickle=True"):
        assert part in str(refused.value)
    trusting = Options(allow_pickle=True)
    api.run(api.Snapshot.take(place, app_state, options=trusting))
    with pytest.raises(UsageError, match=r"(?s)allow_pickle.*'s/thing'.*'s/things/0'"):
        api.run(api.Snapshot(place).restore(app_state))
    assert_same(api.run(api.Snapshot(place).read_object("s/x")), torch.ones(2))
    found = api.run(api.Snapshot(place, options=trusting).get_state_dict_for_key("s"))
    assert isinstance(found["thing"], Thing)
    assert found["things"][0].value == 4
    target = StateDict(thing=Thing(0), things=[Thing(0)], x=torch.zeros(2))
    api.run(api.Snapshot(place, options=trusting).restore({"s": target}))
    assert target["thing"].value == 3


@each_facade
def test_options_by_environment(api: Facade, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app_state = {"s": StateDict(thing=Thing(3))}
    with pytest.raises(UsageError):
        api.run(api.Snapshot.take(place, app_state))
    monkeypatch.setenv("ACTORSNAP_ALLOW_PICKLE", "true")
    monkeypatch.setenv("ACTORSNAP_CHUNK_BYTES", str(3 << 20))
    assert from_env() == Options(allow_pickle=True, chunk_bytes=3 << 20)
    api.run(api.Snapshot.take(place, app_state))
    assert api.run(api.Snapshot(place).read_object("s/thing")).value == 3
    # Options that are given stand for all: the environment is not asked.
    with pytest.raises(UsageError, match="allow_pickle"):
        api.run(api.Snapshot(place, options=Options()).read_object("s/thing"))
    monkeypatch.setenv("ACTORSNAP_CHUNK_BYTES", "many")
    with pytest.raises(UsageError, match="ACTORSNAP_CHUNK_BYTES='many'"):
        api.Snapshot(place)
    monkeypatch.delenv("ACTORSNAP_CHUNK_BYTES")
    monkeypatch.setenv("ACTORSNAP_FSNYC", "0")
    with pytest.raises(UsageError, match="did you mean 'ACTORSNAP_FSYNC'"):
        api.Snapshot(place)


def test_fsync_off_is_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    original = os.fsync

    def fsync(fd: int) -> None:
        synced.append(fd)
        original(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "fdatasync", fsync)
    state = {"s": StateDict(x=torch.ones(3))}
    actorsnap.sync.Snapshot.take(tmp_path / "on", state)
    assert len(synced) >= 4  # data object, manifest, commit object, folders
    synced.clear()
    actorsnap.sync.Snapshot.take(tmp_path / "off", state, options=Options(fsync=False))
    assert synced == []
    on, off = (
        json.loads((tmp_path / name / "actorsnap.json").read_bytes()) for name in ("on", "off")
    )
    assert "fsync" not in on
    assert off["fsync"] is False


def test_verification_can_be_turned_off(tmp_path: Path) -> None:
    actorsnap.sync.Snapshot.take(tmp_path / "s", {"s": StateDict(x=torch.zeros(4))})
    (data,) = (tmp_path / "s").glob("*/data/*/*.safetensors")
    raw = bytearray(data.read_bytes())
    raw[-1] ^= 1
    data.write_bytes(raw)
    with pytest.raises(FormatError):
        actorsnap.sync.Snapshot(tmp_path / "s").read_object("s/x")
    blind = actorsnap.sync.Snapshot(tmp_path / "s", options=Options(verify=False))
    assert blind.read_object("s/x").view(torch.int32)[-1] == 1 << 24


@each_facade
@pytest.mark.parametrize(
    "form", ["str", "Path", "file://", "fs://", "relative", "fs://relative", "slash"]
)
def test_forms_of_a_path(
    api: Facade, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "a b%20ü" / "s"
    forms: dict[str, Any] = {
        "str": str(place),
        "Path": place,
        "file://": f"file://{place}",
        "fs://": f"fs://{place}",
        "relative": "a b%20ü/s",
        "fs://relative": "fs://a b%20ü/s",
        "slash": f"{place}/",
    }
    snapshot = api.run(api.Snapshot.take(forms[form], {"s": StateDict(x=form)}))
    monkeypatch.chdir("/")  # what was relative is still the same place
    assert api.run(snapshot.read_object("s/x")) == form
    assert (place / "actorsnap.json").is_file()
    assert snapshot.path == os.fspath(forms[form])
    assert api.run(api.Snapshot(place).read_object("s/x")) == form


def test_a_url_that_pathlib_damaged(place: str) -> None:
    with pytest.raises(UsageError, match="lost a slash"):
        actorsnap.sync.Snapshot.take(Path(place), {"s": StateDict(x=1)})


# Random states --------------------------------------------------------------------------------

_texts = st.text(
    st.one_of(
        st.sampled_from(string.ascii_letters + string.digits + "/%@._-\x00\n\\\ud800\udfff🦜é"),
        st.characters(),
    ),
    max_size=12,
)
_keys = st.one_of(
    _texts,
    st.integers(),
    st.sampled_from(["__metadata__", "", "..", "1", "-1", "%31", "%true", "%null", "%f0x1p0"]),
    st.none(),
    st.booleans(),
    st.floats(allow_nan=False),
)
_shapes = st.lists(st.integers(0, 4), max_size=3)


@st.composite
def _tensors(draw: st.DrawFn) -> torch.Tensor:
    name = draw(st.sampled_from(sorted(DTYPES)))
    tensor = dense(DTYPES[name], *draw(_shapes), seed=draw(st.integers(0, 99)))
    if tensor.dim() >= 2 and draw(st.booleans()):
        tensor = tensor.transpose(0, -1)
    if tensor.dim() and tensor.shape[0] > 1 and draw(st.booleans()):
        tensor = tensor[1:]
    if tensor.dtype in (torch.float32, torch.bfloat16) and draw(st.booleans()):
        return torch.nn.Parameter(tensor.contiguous(), requires_grad=draw(st.booleans()))
    return tensor


@st.composite
def _arrays(draw: st.DrawFn) -> Any:
    dtype = draw(st.sampled_from(["<f4", ">f8", "?", "<i2", "<u8", "<c8", "<U3", "S2", "<M8[s]"]))
    shape = draw(_shapes)
    array = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 99, shape).astype(dtype)
    return array[::-1] if len(shape) > 0 and draw(st.booleans()) else array


_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 200), 1 << 200),
    st.floats(),
    st.complex_numbers(),
    _texts,
    st.binary(max_size=20),
    st.integers(4090, 4100).map(bytes),
    st.binary(max_size=9).map(bytearray),
    _tensors(),
    _arrays(),
)
_trees = st.recursive(
    _leaves,
    lambda children: st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(_keys, children, max_size=4),
        st.lists(st.tuples(_texts, children), max_size=3).map(OrderedDict),
    ),
    max_leaves=12,
)
_app_states = st.dictionaries(
    _texts, st.dictionaries(_keys, _trees, max_size=5), min_size=1, max_size=3
)


@settings(suppress_health_check=list(HealthCheck))
@given(state=_app_states, is_async=st.booleans())
def test_random_states(state: dict[str, Any], is_async: bool) -> None:
    name = f"random-{next(_numbers)}"
    app_state = {key: StateDict(value) for key, value in state.items()}
    expected = copy.deepcopy(state)
    targets = {key: StateDict(copy.deepcopy(value)) for key, value in state.items()}
    for target in targets.values():
        scribble(target.data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if is_async:
            snapshot = actorsnap.sync.Snapshot.async_take(f"memory://{name}", app_state).wait()
        else:
            snapshot = actorsnap.sync.Snapshot.take(f"memory://{name}", app_state)
        assert_same(state, expected)
        for key, value in expected.items():
            assert_same(snapshot.get_state_dict_for_key(key), value, key)
        assert snapshot.restore(targets).is_complete
    for key, value in expected.items():
        assert_same(targets[key].data, value, key)
    assert snapshot.verify("full").ok
    forget_space(name)


@pytest.mark.few
@pytest.mark.parametrize("offload", ["thread", "process"])
@each_facade
def test_names_that_utf8_cannot_say(
    api: Facade, tmp_path: Path, offload: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Paths of any bytes, a key and a glob with lone surrogates; errors and logs name them, too."""
    url = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    options = Options(offload=offload, trace=f"{url}.json")
    state = {"\ud800": StateDict(x=torch.arange(3.0))}
    target = {"\ud800": StateDict(x=torch.zeros(3))}
    globs = ["\ud800/**", "%ud800/**"]
    snapshot = api.run(api.Snapshot.take(url, state, replicated=globs))
    assert api.run(snapshot.restore(target)).is_complete
    assert_same(target["\ud800"].state_dict(), state["\ud800"].state_dict())
    with pytest.raises(ObjectExists):
        api.run(api.Snapshot.take(url, state))
    with caplog.at_level(logging.INFO, "actorsnap"):
        pending = api.run(
            api.Snapshot.async_take(url, state, replicated=globs, overwrite=True, options=options)
        )
        assert api.run(pending.wait()).path == url
    assert ": committed, " in caplog.text
    assert "given up" not in caplog.text
    assert "is lost" not in caplog.text
    assert caplog.text.isascii()
    assert json.loads(Path(f"{url}.json").read_bytes())["otherData"]
    with pytest.raises(ObjectExists):
        api.run(api.run(api.Snapshot.async_take(url, state, options=options)).wait())
