# SPDX-License-Identifier: Apache-2.0
"""Memory that leaves share is stored once, and shared again after a restore."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.format.manifest import TensorEntry, ViewEntry
from actorsnap.state.capture import capture
from actorsnap.state.restore.build import prepare
from actorsnap.state.sharing import Region, touched_without_gaps
from actorsnap.state.stateful import Matching, StateDict
from tests.state.stored import Memory, store


def base() -> torch.Tensor:
    return torch.arange(24, dtype=torch.float32).view(4, 6)


State = dict[str, Any]


def unaligned() -> State:
    data = bytearray(range(40))
    return {
        "a": np.frombuffer(data, np.uint8),
        "b": np.frombuffer(data, np.int32, count=5, offset=3),
    }


def numpy_and_tensor() -> State:
    array = np.arange(6.0)
    return {"array": array, "tensor": torch.from_numpy(array), "part": array[1:4]}


# Each: a state, the bytes that are stored, and the paths of tensor entries.
SHARED: dict[str, tuple[Callable[[], State], int, set[str]]] = {
    "same tensor": (lambda: (x := base()) is not None and {"a": x, "b": x}, 96, {"s/a"}),
    "slice first": (
        lambda: (x := base()) is not None and {"a": x[1:3], "b": x},
        96,
        {"s/b"},
    ),
    "transposed": (lambda: (x := base()) is not None and {"a": x.t(), "b": x}, 96, {"s/b"}),
    "only transposed": (
        lambda: (x := base()) is not None and {"a": x.t(), "b": x.t()},
        96,
        {"s/a"},
    ),
    "overlapping slices": (
        lambda: (x := base().view(-1)) is not None and {"a": x[:10], "b": x[6:20]},
        80,
        {"s/a@storage"},
    ),
    "other dtype": (
        lambda: (x := base()) is not None and {"a": x, "b": x.view(torch.int16)[:, 3]},
        96,
        {"s/a"},
    ),
    "expanded": (lambda: {"a": torch.arange(6.0).expand(1000, 6)}, 24, {"s/a@storage"}),
    "scalar expanded": (lambda: {"a": torch.tensor(2.5).expand(50, 60)}, 4, {"s/a@storage"}),
    "expanded and its base": (
        lambda: (x := torch.arange(6.0)) is not None and {"a": x.expand(9, 6), "b": x},
        24,
        {"s/b"},
    ),
    "windows": (
        lambda: {"a": torch.arange(100.0).unfold(0, 20, 1)},
        400,
        {"s/a@storage"},
    ),
    "interleaved columns": (
        lambda: (x := base()) is not None and {"a": x[:, 0], "b": x[:, 1]},
        32,
        {"s/a", "s/b"},
    ),
    "interleaved and whole": (
        lambda: (x := base()) is not None and {"a": x[:, 0], "b": x[:, 1], "c": x},
        96,
        {"s/c"},
    ),
    "rows of a whole": (
        lambda: (x := base()) is not None and {"a": x, "b": x[1], "c": x[3]},
        96,
        {"s/a"},
    ),
    "neighbours": (
        lambda: (x := base()) is not None and {"a": x[:2], "b": x[2:]},
        96,
        {"s/a", "s/b"},
    ),
    "chain": (
        lambda: (
            (x := base().view(-1)) is not None
            and {"a": x[0:8], "b": x[6:14], "c": x[12:20], "d": x[20:]}
        ),
        96,
        {"s/a@storage", "s/d"},
    ),
    "numpy": (numpy_and_tensor, 48, {"s/array"}),
    "unaligned": (unaligned, 40, {"s/a"}),
    "unaligned tensors": (
        lambda: {key: torch.from_numpy(array) for key, array in unaligned().items()},
        40,
        {"s/a"},
    ),
    "empty parts": (
        lambda: (x := base()) is not None and {"a": x[:0], "b": x[:, :0], "c": x},
        96,
        {"s/a", "s/b", "s/c"},
    ),
    "strided with gaps": (
        lambda: (x := base()) is not None and {"a": x[:, ::2], "b": x[:, 2:5:2]},
        92,
        {"s/a@storage"},
    ),
}


def pattern(state: State) -> list[tuple[str, str, bool]]:
    """Which leaves share memory, found by writing."""

    def flip(value: Any) -> Any:
        array = value.detach().numpy() if isinstance(value, torch.Tensor) else value
        if array.size and array.flags.writeable:
            raw = np.lib.stride_tricks.as_strided(array)
            first = raw[(0,) * raw.ndim]
            old = first.copy()
            raw[(0,) * raw.ndim] = first + 1
            return old
        return None

    def snapshot(value: Any) -> bytes:
        value = value.detach().numpy() if isinstance(value, torch.Tensor) else value
        return bytes(value.tobytes())

    found = []
    for a, b in itertools.permutations(state, 2):
        before = snapshot(state[b])
        value = state[a].detach().numpy() if isinstance(state[a], torch.Tensor) else state[a]
        index = (0,) * value.ndim
        old = flip(state[a])
        found.append((a, b, snapshot(state[b]) != before))
        if old is not None:
            value[index] = old
    return found


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a.dtype == b.dtype and bool(np.array_equal(a, b))


def zeroed(state: State) -> State:
    for value in state.values():
        array = value.numpy() if isinstance(value, torch.Tensor) else value
        raw = np.lib.stride_tricks.as_strided(array, writeable=True)
        raw[...] = 0
    return state


@pytest.mark.parametrize("name", SHARED)
def test_shared_memory(name: str) -> None:
    make, stored_bytes, stored_paths = SHARED[name]
    state = make()
    memory = store(state)
    tensors = {e.path for e in memory.entries if isinstance(e, TensorEntry)}
    assert tensors == stored_paths
    assert len(memory.data) - 4096 == stored_bytes
    # Fresh, in place, and into targets that share nothing.
    fresh = memory.restore("s")
    assert list(fresh) == list(state)
    assert all(equal(fresh[key], state[key]) for key in state)
    if name not in ("expanded", "scalar expanded", "windows", "unaligned", "unaligned tensors"):
        assert pattern(fresh) == pattern(make())
    same = zeroed(make())
    result = memory.restore("s", same)
    for key in state:
        assert result[key] is same[key]
        assert equal(same[key], state[key])
    apart = {
        key: value.clone().contiguous() if isinstance(value, torch.Tensor) else value.copy()
        for key, value in zeroed(make()).items()
    }
    result = memory.restore("s", apart)
    for key in state:
        assert result[key] is apart[key]
        assert equal(apart[key], state[key])


@pytest.mark.parametrize("name", ["same tensor", "slice first", "chain", "expanded and its base"])
def test_aliased_targets_are_read_once(name: str) -> None:
    make, stored_bytes, _ = SHARED[name]
    memory = store(make())
    restore = prepare("s", memory.key("s"), target=make(), allow_pickle=False)
    assert memory.fill(restore.memory.reads) == stored_bytes


def test_strided_targets_of_one_memory_are_read_once() -> None:
    x = base()
    memory = store({"a": x, "b": x})
    tied = torch.zeros(6, 4).t()
    restore = prepare("s", memory.key("s"), target={"a": tied, "b": tied}, allow_pickle=False)
    assert memory.fill(restore.memory.reads) == x.nbytes
    assert restore.build()["b"] is tied
    assert torch.equal(tied, x)


def test_bytes_between_leaves_are_not_overwritten() -> None:
    make, _, _ = SHARED["strided with gaps"]
    memory = store(make())
    whole = torch.full((4, 6), -1.0)
    target = {"a": whole[:, ::2], "b": whole[:, 2:5:2]}
    memory.restore("s", target)
    assert torch.equal(whole[:, ::2], base()[:, ::2])
    assert (whole[:, 1::2] == -1).all()


def test_one_view_of_several_into_a_target_of_its_own() -> None:
    x = base()
    memory = store({"a": x, "b": x[1:3], "c": x.t()})
    entries = memory.key("s")
    target = {"b": torch.zeros(2, 6, requires_grad=True), "c": torch.zeros(4, 6).t()}
    restore = prepare("s", entries, target=target, allow_pickle=False, matching=Matching.LEAVES)
    memory.fill(restore.memory.reads)
    result = restore.build()
    assert list(result) == ["b", "c"]
    assert result["b"] is target["b"]
    assert torch.equal(target["b"], x[1:3])
    assert torch.equal(target["c"], x.t())


def test_plain_values_into_expanded_targets() -> None:
    constant = store({"v": torch.full((5, 4), 3.0), "w": torch.arange(4.0).repeat(5, 1)})
    target = {"v": torch.zeros(1, 1).expand(5, 4), "w": torch.zeros(4).expand(5, 4)}
    result = constant.restore("s", target)
    assert result["v"] is target["v"]
    assert result["w"] is target["w"]
    assert (target["v"] == 3).all()
    assert torch.equal(target["w"][4], torch.arange(4.0))
    varied = store({"v": base()})
    target = {"v": torch.zeros(6).expand(4, 6)}
    result = varied.restore("s", target)
    assert result["v"] is not target["v"]
    assert torch.equal(result["v"], base())
    assert (target["v"] == 0).all()


def test_keys_may_share_memory_too() -> None:
    x = base()
    memory = Memory(capture({"b": StateDict(v=x), "a": StateDict(w=x[1:])}))
    assert len(memory.data) - 4096 == 96
    kinds = {e.path: type(e) for e in memory.entries}
    assert kinds == {"a/w": ViewEntry, "b/v": TensorEntry}
    assert torch.equal(memory.restore("a")["w"], x[1:])
    target = {"w": torch.zeros(3, 6)}
    assert memory.restore("a", target)["w"] is target["w"]
    assert torch.equal(target["w"], x[1:])
    assert torch.equal(memory.restore("b")["v"], x)


def test_a_group_is_replicated_as_a_whole(caplog: pytest.LogCaptureFixture) -> None:
    x = base()
    state = {"s": StateDict(a=x, b=x[1:], c=torch.ones(1))}
    flags = {
        e.path: getattr(e, "replicated")  # noqa: B009
        for e in Memory(capture(state, replicated=["s/a", "s/c"])).entries
    }
    assert flags == {"s/a": False, "s/b": False, "s/c": True}
    flags = {
        e.path: getattr(e, "replicated")  # noqa: B009
        for e in Memory(capture(state, replicated=["s/*"])).entries
    }
    assert flags == {"s/a": True, "s/b": True, "s/c": True}
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_many_columns_of_one_matrix() -> None:
    x = torch.randn(50, 300)
    memory = store({f"c{i}": x[:, i] for i in range(300)})
    assert len(memory.data) - 4096 <= x.nbytes
    back = memory.restore("s")
    assert all(torch.equal(back[f"c{i}"], x[:, i]) for i in range(300))


slices = st.tuples(
    st.integers(0, 30), st.integers(1, 4), st.integers(1, 4), st.integers(0, 6), st.integers(0, 6)
)


@given(st.lists(slices, min_size=1, max_size=5), st.booleans())
def test_any_views_of_one_memory(views: list[tuple[int, int, int, int, int]], apart: bool) -> None:
    def make() -> State:
        memory = torch.arange(90, dtype=torch.int32)
        return {
            str(i): memory.as_strided((n, m), (s, t), offset)
            for i, (offset, n, m, s, t) in enumerate(views)
        }

    state = make()
    memory = store(state)
    fresh = memory.restore("s")
    assert all(equal(fresh[key], state[key]) for key in state)
    whole = torch.full((90,), -1, dtype=torch.int32)
    target: State
    if apart:
        target = {k: torch.zeros(v.shape, dtype=torch.int32) for k, v in state.items()}
    else:
        target = {
            str(i): whole.as_strided((n, m), (s, t), offset)
            for i, (offset, n, m, s, t) in enumerate(views)
        }
    result = memory.restore("s", target)
    assert all(equal(result[key], state[key]) for key in state)
    if not apart:
        # Every element is its own index, so the values tell what was shown.
        touched = {int(i) for value in state.values() for i in value.reshape(-1)}
        written = {int(i) for i in (whole != -1).nonzero()}
        assert written <= touched


def test_regions() -> None:
    whole = Region(100, 4, (2, 3), (3, 1))
    assert (whole.stop, whole.nbytes, whole.is_contiguous, whole.repeats) == (124, 24, True, False)
    expanded = Region(100, 4, (5, 3), (0, 1))
    assert (expanded.stop, expanded.is_contiguous, expanded.repeats) == (112, False, True)
    assert touched_without_gaps([expanded, Region(112, 4, (3,), (1,))], 100, 124)
    assert not touched_without_gaps([expanded, Region(116, 4, (2,), (1,))], 100, 124)
    assert not touched_without_gaps([Region(100, 4, (3,), (2,))], 100, 120)
    assert Region(0, 4, (1, 3), (9, 1)).is_contiguous
    assert Region(0, 4, (0, 3), (9, 1)).stop == 0
