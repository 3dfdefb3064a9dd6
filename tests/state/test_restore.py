# SPDX-License-Identifier: Apache-2.0
"""What fits, what is read, and what ``build`` returns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.errors import FormatError, IncompatibleState, UsageError
from actorsnap.format.manifest import (
    BytesEntry,
    CompositeEntry,
    ContainerEntry,
    Entry,
    Stored,
    TensorEntry,
    ValueEntry,
    ViewEntry,
)
from actorsnap.state.capture import capture
from actorsnap.state.restore.build import KeyRestore, prepare, read_one
from actorsnap.state.restore.match import entries_by_key
from actorsnap.state.stateful import Matching, StateDict, matching_of
from tests.state.stored import Memory, store
from tests.state.test_tree import same

# Fitting --------------------------------------------------------------------------------------


def opened(memory: Memory, target: object | None, **options: Any) -> KeyRestore:
    return prepare("s", memory.key("s"), target=target, allow_pickle=False, **options)


def test_every_difference_is_found_before_anything_is_read() -> None:
    memory = store(
        {
            "dtype": torch.ones(2),
            "shape": torch.ones(2, 3),
            "both": torch.ones(2),
            "kind": np.ones(2),
            "value": 1,
            "text": "x" * 5000,
            "sparse": torch.eye(3).to_sparse(),
            "layout": torch.eye(3).to_sparse_csr(),
            "subclass": torch.ones(2),
            "array": np.ones(2),
            "good": torch.ones(1),
            "only stored": torch.ones(1),
        }
    )
    target: dict[str, Any] = {
        "dtype": torch.zeros(2, dtype=torch.bfloat16),
        "shape": torch.zeros(3, 2),
        "both": torch.zeros(3, dtype=torch.int64),
        "kind": torch.zeros(2, dtype=torch.float64),
        "value": torch.zeros(1),
        "text": torch.zeros(1),
        "sparse": torch.zeros(3, 3),
        "layout": torch.eye(3).to_sparse_csc(),
        "subclass": torch.zeros(2).as_subclass(type("DTensor", (torch.Tensor,), {})),
        "array": np.zeros(2, "f4"),
        "good": torch.zeros(1),
        "only here": 5,
    }
    before = {key: value for key, value in target.items()}
    restore = opened(memory, target, matching=Matching.LEAVES)
    assert restore.match.missing == ["s/only here"]
    assert restore.match.unplaced == ["s/only stored"]
    lines = dict(line.split(": ", 1) for line in restore.match.mismatched)
    assert lines["s/dtype"] == "dtype float32 in the snapshot, bfloat16 in the app state"
    assert lines["s/shape"] == "shape (2, 3) in the snapshot, (3, 2) in the app state"
    assert lines["s/both"].count(" in the app state") == 2
    assert lines["s/kind"] == "numpy array in the snapshot, tensor in the app state"
    assert lines["s/value"] == "int in the snapshot, tensor in the app state"
    assert lines["s/text"] == "str in the snapshot, tensor in the app state"
    assert lines["s/sparse"] == "sparse_coo tensor in the snapshot, tensor in the app state"
    assert lines["s/layout"].startswith("sparse_csr tensor in the snapshot, sparse_csc tensor")
    assert "the tensor subclass" in lines["s/subclass"]
    assert lines["s/array"] == "dtype <f8 in the snapshot, <f4 in the app state"
    assert len(lines) == 10
    assert len(restore.memory.reads) == 1
    memory.fill(restore.memory.reads)
    result = restore.build()
    for name in (*(line.removeprefix("s/") for line in lines), "good"):
        assert result[name] is before[name]
    assert target["good"] == 1
    assert list(result) == [k for k in target if k != "only here"]
    # Where keys have to match, a tensor has to fit a tensor; another kind is replaced.
    restore = opened(memory, target, matching=Matching.KEYS)
    assert restore.match.missing == ["s/only here"]
    assert restore.match.unexpected == []
    replaced = {"s/kind", "s/value", "s/text"}
    assert {line.partition(": ")[0] for line in restore.match.mismatched} == set(lines) - replaced
    memory.fill(restore.memory.reads)
    result = restore.build()
    assert result["only stored"] == 1
    assert result["only here"] == 5
    assert list(result) == [*(k for k in target if k != "only here"), "only stored", "only here"]
    # Where nothing has to match, everything is.
    restore = opened(memory, target, matching=Matching.NOTHING)
    assert restore.match.missing == restore.match.unexpected == restore.match.mismatched == []
    memory.fill(restore.memory.reads)
    result = restore.build()
    assert "only here" not in result
    assert [name for name, value in result.items() if value is before.get(name)] == ["good"]


def test_unexpected_leaves_can_be_left_out() -> None:
    memory = store({"a": torch.ones(1), "b": {"c": torch.ones(1), "d": [1, 2]}, "e": [], "f": (1,)})
    restore = opened(memory, {"a": torch.zeros(1)}, matching=Matching.LEAVES)
    assert restore.match.unplaced == ["s/b/c", "s/b/d/0", "s/b/d/1", "s/f/0"]
    assert len(restore.memory.reads) == 1
    memory.fill(restore.memory.reads)
    assert restore.build() == {"a": torch.ones(1), "e": []}


def test_without_a_target_nothing_is_missing() -> None:
    restore = opened(store({"a": 1}), None)
    assert (restore.match.missing, restore.match.unexpected, restore.match.mismatched) == (
        [],
        [],
        [],
    )


def test_an_empty_target() -> None:
    memory = store({"a": 1})
    restore = opened(memory, {}, matching=Matching.LEAVES)
    assert restore.match.unplaced == ["s/a"]
    assert restore.build() == {}
    assert memory.restore("s", {}) == {"a": 1}


def test_values_replace_values_of_any_kind() -> None:
    memory = store({"a": 1, "b": torch.ones(2), "c": None, "d": np.ones(2)})
    result = memory.restore("s", {"a": "x", "b": None, "c": 3.5, "d": 7})
    assert result["a"] == 1
    assert torch.equal(result["b"], torch.ones(2))
    assert result["c"] is None
    assert result["d"].tolist() == [1, 1]


def test_containers_follow_the_snapshot() -> None:
    state = OrderedDict(z=(1, [2, ()]), a={"x": {}}, m=0)
    keys: dict[Any, Any] = {2: "i", "2": "s", None: 0, True: 1, 0.5: 2}
    state["m"] = keys
    memory = store({"v": state})
    result = memory.restore("s", {"v": {"a": {"x": 0}, "z": (5, [6])}}, check=lambda _: None)
    # A leaf of the target where the snapshot has an (empty) container has no place.
    assert same(result["v"], state)


def test_further_keys_of_dicts_are_kept() -> None:
    memory = store({"a": {"x": 1}, "l": [1], "leaf": 3})
    target = {
        "a": {"x": 0, "y": 5},
        "l": [0, 7],
        "leaf": {"below": 1},
        "new": OrderedDict(k=(1, 2)),
    }
    restore = opened(memory, target)
    assert restore.match.missing == ["s/new", "s/a/y"]
    expected = {
        "a": {"x": 1, "y": 5},
        "l": [1],
        "leaf": 3,
        "new": OrderedDict(k=(1, 2)),
    }
    assert same(restore.build(), expected)


def test_meta_targets_are_built_fresh_on_the_cpu() -> None:
    memory = store({"w": torch.ones(2), "x": (y := torch.ones(3)), "z": y, "q": torch.ones(4)})
    target = {name: torch.zeros(n, device="meta") for name, n in zip("wxz", (2, 3, 3), strict=True)}
    result = memory.restore("s", {**target, "q": torch.zeros(4)})
    assert torch.equal(result["w"], torch.ones(2))
    assert result["x"].data_ptr() == result["z"].data_ptr()
    with pytest.raises(AssertionError):
        memory.restore("s", {**target, "q": torch.zeros(5, device="meta")})


def test_nothing_of_a_target_is_touched_before_its_bytes_come() -> None:
    x = torch.ones(4, 3)
    memory = store(
        {"a": x, "b": x.t(), "c": torch.ones(3).expand(4, 3), "d": torch.eye(3).to_sparse()}
    )
    target = {
        "a": torch.zeros(4, 3),
        "b": torch.zeros(3, 4),
        "c": torch.zeros(3).expand(4, 3),
        "d": torch.zeros(3, 3).to_sparse(),
    }
    opened(memory, target)
    assert all(not value.to_dense().any() for value in target.values())


# torch's own statefuls ------------------------------------------------------------------------


def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(3):
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model, optimizer, scheduler


def test_a_model_with_its_optimizer_and_scheduler_continues() -> None:
    model, optimizer, scheduler = trained(0)
    app_state = {"model": model, "optim": optimizer, "sched": scheduler}
    memory = Memory(capture(app_state))

    def continued(model: Any, optimizer: Any, scheduler: Any) -> list[float]:
        torch.manual_seed(9)
        losses = []
        for _ in range(3):
            loss = model(torch.randn(8, 4)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
        return [*losses, scheduler.get_last_lr()[0]]

    expected = continued(model, optimizer, scheduler)
    for stepped in (True, False):
        other = trained(1)
        if not stepped:
            other = (other[0], torch.optim.AdamW(other[0].parameters(), lr=1, amsgrad=True), None)
            other = (*other[:2], torch.optim.lr_scheduler.CosineAnnealingLR(other[1], 3))
        pointers = [p.data_ptr() for p in other[0].parameters()]
        for key, stateful in zip(("model", "optim", "sched"), other, strict=True):
            restore = prepare(
                key,
                memory.key(key),
                target=stateful.state_dict(),
                allow_pickle=False,
                matching=matching_of(stateful),
            )
            assert (
                restore.match.missing == restore.match.unexpected == restore.match.mismatched == []
            )
            memory.fill(restore.memory.reads)
            stateful.load_state_dict(restore.build())
        assert [p.data_ptr() for p in other[0].parameters()] == pointers
        assert continued(*other) == expected


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 3)
        self.head = torch.nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("rest", torch.zeros(3))


def test_tied_weights() -> None:
    model = Tied()
    memory = Memory(capture({"m": model}))
    assert len(memory.data) - 4096 == 7 * 3 * 4 + 12
    other = Tied()
    restore = prepare("m", memory.key("m"), target=other.state_dict(), allow_pickle=False)
    assert memory.fill(restore.memory.reads) == 7 * 3 * 4 + 12
    other.load_state_dict(restore.build())
    assert torch.equal(other.head.weight, model.embed.weight)
    assert other.head.weight is other.embed.weight


# A part of a key --------------------------------------------------------------------------------


@pytest.fixture
def memory() -> Memory:
    x = torch.arange(6.0).view(2, 3)
    state = {
        "w": x,
        "tied": x.t(),
        "deep": {0: [torch.ones(2), "text"], "0.w": 1, "a/b": {"c": np.arange(3)}},
        "7": "str key",
        "sparse": torch.eye(2).to_sparse(),
        "both": {1: "int", "1": "str"},
    }
    return Memory(capture({"s": StateDict(state), "t": StateDict(w=x[1:])}))


def read(memory: Memory, path: str, out: object | None = None) -> Any:
    restore = read_one(memory.entries, path, out, False)
    memory.fill(restore.memory.reads)
    return restore.build()


def test_one_leaf_is_read_alone(memory: Memory) -> None:
    restore = read_one(memory.entries, "s/deep/0/0", None, False)
    assert memory.fill(restore.memory.reads) == 8
    assert torch.equal(restore.build(), torch.ones(2))
    assert read(memory, "s/deep/0/1") == "text"
    assert torch.equal(read(memory, "s/tied"), torch.arange(6.0).view(2, 3).t())
    assert torch.equal(read(memory, "t/w"), torch.arange(3.0, 6.0).view(1, 3))
    assert torch.equal(read(memory, "s/sparse").to_dense(), torch.eye(2))


def test_a_subtree_is_read_alone(memory: Memory) -> None:
    deep = read(memory, "s/deep")
    assert list(deep) == [0, "0.w", "a/b"]
    assert read(memory, "s/deep/a%2Fb")["c"].tolist() == [0, 1, 2]
    assert list(read(memory, "t")) == ["w"]


def test_paths_as_people_write_them(memory: Memory) -> None:
    assert read(memory, "s/7") == "str key"
    assert read(memory, "s/%37") == "str key"
    assert read(memory, "s/deep/a/b")["c"].tolist() == [0, 1, 2]
    assert read(memory, "s/both/1") == "int"  # the exact path comes first
    with pytest.raises(UsageError, match=r"no path 's/deep/0/9'; did you mean .*'s/deep/0/"):
        read(memory, "s/deep/0/9")
    with pytest.raises(UsageError, match="a part of 's/sparse'"):
        read(memory, "s/sparse@values")
    ambiguous = store({"a": {"b/c": 1, "b": {"%": 2}}, "a/b": {"c": 3}, "x/y": 1})
    with pytest.raises(UsageError, match="several paths.*'s/a%2Fb/c', 's/a/b%2Fc'"):
        read(ambiguous, "s/a/b/c")


def test_reading_into_a_tensor_or_array(memory: Memory) -> None:
    out = torch.zeros(3, 2).t()
    assert read(memory, "s/w", out) is out
    assert torch.equal(out, torch.arange(6.0).view(2, 3))
    array = np.zeros(3, dtype=np.int64)
    assert read(memory, "s/deep/a%2Fb/c", array) is array
    assert array.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("path", "out", "error"),
    [
        ("s/w", torch.zeros(3, 2), IncompatibleState),
        ("s/w", torch.zeros(2, 3).double(), IncompatibleState),
        ("s/w", np.zeros((2, 3), "f4"), IncompatibleState),
        ("s/deep", torch.zeros(2), IncompatibleState),
        ("s/7", torch.zeros(2), IncompatibleState),
        ("s/w", [], UsageError),
        ("s/w", torch.zeros(3).expand(2, 3), UsageError),
        ("s/w", torch.zeros(2, 3, device="meta"), UsageError),
        ("s/deep/a%2Fb/c", np.broadcast_to(np.int64(1), (3,)), UsageError),
    ],
)
def test_an_out_that_cannot_take_the_leaf(
    memory: Memory, path: str, out: object, error: type[Exception]
) -> None:
    with pytest.raises(error):
        read_one(memory.entries, path, out, False)


def test_entries_by_key() -> None:
    x = torch.ones(3)
    state = {
        "a/%": StateDict(v=x),
        "0": StateDict(),
        "b": StateDict(v=x[1:], s=torch.eye(2).to_sparse()),
    }
    keys = entries_by_key(Memory(capture(state)).entries)
    assert {key: [e.path for e in entries] for key, entries in keys.items()} == {
        "0": ["%30"],
        "a/%": ["a%2F%25/v"],
        "b": ["b/v", "b/s", "b/s@indices", "b/s@values", "a%2F%25/v"],
    }
    with pytest.raises(FormatError):
        entries_by_key([ValueEntry(path="0/a")])


# Malformed entries ------------------------------------------------------------------------------

TENSOR = TensorEntry(path="s/a", dtype="float32", shape=(2,), data=Stored(0, 0, 8, (1,)))
VIEW = ViewEntry(path="s/b", of="s/a", dtype="float32", shape=(1,), strides=(1,))
PARTS: list[Any] = [
    CompositeEntry(
        path="s/c",
        layout="sparse_coo",
        dtype="float32",
        shape=(2, 2),
        parts=("indices", "values"),
        parameters={"is_coalesced": True},
    ),
    TensorEntry(path="s/c@indices", dtype="int64", shape=(2, 0), data=Stored(0, 0, 0, ())),
    TensorEntry(path="s/c@values", dtype="float32", shape=(0,), data=Stored(0, 0, 0, ())),
]
QUANTIZED: list[Any] = [
    CompositeEntry(
        path="s/q",
        layout="quantized_tensor",
        dtype="quint4x2",
        shape=(1, 1 << 50),
        parts=("int_repr",),
        parameters={"scale": 1.0, "zero_point": 0},
    ),
    TensorEntry(path="s/q@int_repr", dtype="uint8", shape=(2,), data=Stored(0, 0, 2, (1,))),
]


def changed(entry: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(entry, **fields)


MALFORMED: dict[str, list[Entry]] = {
    "unknown dtype": [changed(TENSOR, dtype="float31")],
    "quantized dtype": [changed(TENSOR, dtype="qint8")],
    "numpy dtype of a tensor": [changed(TENSOR, dtype="<f4")],
    "torch dtype of an array": [changed(TENSOR, type="numpy")],
    "object array": [changed(TENSOR, type="numpy", dtype="|O8", shape=(1,))],
    "size": [changed(TENSOR, shape=(3,))],
    "huge": [changed(TENSOR, shape=(1 << 60,))],
    "huge and empty": [changed(TENSOR, shape=(1 << 62, 1 << 62, 0), data=Stored(0, 0, 0, ()))],
    "negative and empty": [changed(TENSOR, shape=(0, -1), data=Stored(0, 0, 0, ()))],
    "gradient of integers": [changed(TENSOR, dtype="int32", requires_grad=True)],
    "shard": [changed(TENSOR, offsets=(0,), global_shape=(4,))],
    "scalar with a shape": [changed(TENSOR, type="numpy_scalar", dtype="<f4")],
    "twice": [TENSOR, TENSOR],
    "twice, two kinds": [TENSOR, ValueEntry(path="s/a")],
    "leaf with children": [TENSOR, ValueEntry(path="s/a/b")],
    "bad token": [changed(TENSOR, path="s/%zz")],
    "bad index": [ContainerEntry(path="s/l", type="list"), ValueEntry(path="s/l/x")],
    "container type": [ContainerEntry(path="s/l", type="set")],  # type: ignore[arg-type]
    "attributes": [ContainerEntry(path="s/l", type="dict", attributes={"$": "x", "v": 1})],
    "value": [ValueEntry(path="s/v", value={"$": "int", "v": "x"})],
    "view of nothing": [VIEW],
    "view of a value": [ValueEntry(path="s/a"), VIEW],
    "view of a view": [TENSOR, VIEW, changed(VIEW, path="s/c", of="s/b")],
    "view outside": [TENSOR, changed(VIEW, shape=(3,))],
    "view outside by stride": [TENSOR, changed(VIEW, shape=(2,), strides=(2,))],
    "view outside by offset": [TENSOR, changed(VIEW, offset=8)],
    "view outside by dtype": [TENSOR, changed(VIEW, dtype="float64", shape=(2,))],
    "huge view": [TENSOR, changed(VIEW, shape=(1 << 40, 1 << 40), strides=(0, 0))],
    "huge empty view": [TENSOR, changed(VIEW, shape=(0, 1 << 62), strides=(1, 1 << 62))],
    "view of numpy dtype": [TENSOR, changed(VIEW, type="numpy")],
    "composite without parts": PARTS[:1],
    "composite, part missing": PARTS[:2],
    "composite, dtype": [changed(PARTS[0], dtype="float31"), *PARTS[1:]],
    "composite, part is no tensor": [*PARTS[:2], ValueEntry(path="s/c@values")],
    "composite, part twice": [*PARTS, PARTS[2]],
    "quantized, huge": QUANTIZED,
    "quantized, no such dtype": [changed(QUANTIZED[0], dtype="float32"), QUANTIZED[1]],
    "list as a gap": [TENSOR, changed(TENSOR, path="s")],
    "too deep": [ValueEntry(path="s/" + "a/" * 1000)],
}


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("with_target", [False, True])
def test_malformed_entries_are_format_errors(name: str, with_target: bool) -> None:
    target = {"a": torch.zeros(2), "b": torch.zeros(1)} if with_target else None
    with pytest.raises(FormatError) as caught:
        prepare("s", MALFORMED[name], target=target, allow_pickle=True)
    assert caught.value.key.startswith("s")


MALFORMED_BYTES: dict[str, tuple[list[Entry], Callable[[Any], None]]] = {
    "coo dtype": ([changed(PARTS[0], dtype="float64"), *PARTS[1:]], lambda _: None),
    "coo shape": ([changed(PARTS[0], shape=(2,)), *PARTS[1:]], lambda _: None),
    "coo parameters": ([changed(PARTS[0], parameters={}), *PARTS[1:]], lambda _: None),
}


@pytest.mark.parametrize("name", MALFORMED_BYTES)
def test_parts_that_do_not_fit_are_format_errors(name: str) -> None:
    entries, fill = MALFORMED_BYTES[name]
    restore = prepare("s", entries, target=None, allow_pickle=False)
    fill(restore.memory.reads)
    with pytest.raises(FormatError, match="s/c"):
        restore.build()


sizes = st.one_of(st.integers(-1, 4), st.sampled_from([1 << 31, 1 << 62, 1 << 63]))
dims = st.lists(sizes, max_size=3).map(tuple)
any_path = st.sampled_from(["s", "s/a", "s/b", "s/a/b", "s/l/0", "s/l/1", "s/a@p", "x/a", "s/%"])
any_stored = st.tuples(st.integers(0, 4), st.integers(0, 12), st.sampled_from([(), (1,)])).map(
    lambda drawn: Stored(0, drawn[0], drawn[0] + drawn[1], drawn[2])
)
any_type = st.sampled_from(["tensor", "parameter", "buffer", "numpy", "numpy_scalar"])
any_dtype = st.sampled_from(["float32", "uint8", "<f4", "|u1", "quint8", "nonsense"])
any_entry = st.one_of(
    st.builds(
        TensorEntry,
        path=any_path,
        dtype=any_dtype,
        shape=dims,
        data=any_stored,
        type=any_type,
        requires_grad=st.booleans(),
    ),
    st.builds(
        ViewEntry,
        path=any_path,
        of=any_path,
        dtype=any_dtype,
        shape=dims,
        strides=dims,
        offset=sizes,
        type=any_type,
    ),
    st.builds(ValueEntry, path=any_path),
    st.builds(ContainerEntry, path=any_path, type=st.sampled_from(["dict", "list", "tuple"])),
    st.builds(BytesEntry, path=any_path, type=st.sampled_from(["str", "numpy"]), data=any_stored),
)


@given(st.lists(any_entry, max_size=5), st.booleans())
def test_any_entries_end_in_a_state_or_a_format_error(entries: list[Any], in_place: bool) -> None:
    target = {"a": torch.zeros(2), "b": np.zeros((), "f4"), "l": [0]} if in_place else None
    try:
        restore = prepare("s", entries, target=target, allow_pickle=False)
        for stored, sink in [(want.stored, want.sink) for want in restore.memory.reads]:
            assert sink.nbytes == stored.stop - stored.start <= 16
            sink.copy_from(0, memoryview(bytes(sink.nbytes)))
        restore.build()
    except FormatError:
        pass
