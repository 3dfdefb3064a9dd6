# SPDX-License-Identifier: Apache-2.0
"""What capture makes of an app state as a whole."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import actorsnap.state.distributed
from actorsnap.errors import UsageError
from actorsnap.format.geometry import Box
from actorsnap.format.manifest import (
    BytesEntry,
    ContainerEntry,
    TensorEntry,
    ValueEntry,
    ViewEntry,
)
from actorsnap.state import capture as capturing
from actorsnap.state.capture import HeldLeaf, capture, capture_leaves
from actorsnap.state.restore.build import prepare
from actorsnap.state.sources import Leaf
from actorsnap.state.stateful import StateDict
from tests.state.stored import Memory
from tests.support.cases import slow


def paths(app_state: dict[str, Any], **options: Any) -> list[str]:
    return [e.path for e in Memory(capture(app_state, **options)).entries]


def test_keys_stand_in_sorted_order() -> None:
    captured = capture({"b": StateDict(y=1, x=2), "a/%": StateDict(v=3)})
    assert [e.path for e in Memory(captured).entries] == ["a%2F%25/v", "b/y", "b/x"]


def test_parts_keep_traversal_order() -> None:
    x = torch.ones(4)
    app_state = {"s": StateDict(a=x[1:], b=1, c=[x], d={}, e=x[:2], f="t" * 5000)}
    kinds = [(e.path, type(e)) for e in Memory(capture(app_state)).entries]
    assert kinds == [
        ("s/a", ViewEntry),
        ("s/b", ValueEntry),
        ("s/c", ContainerEntry),
        ("s/c/0", TensorEntry),
        ("s/d", ContainerEntry),
        ("s/e", ViewEntry),
        ("s/f", BytesEntry),
    ]


def test_leaves_are_the_parts_with_bytes() -> None:
    captured = capture({"s": StateDict(a=1, b=torch.ones(3), c=b"x" * 5000)})
    assert [leaf.item.path for leaf in captured.leaves] == ["s/b", "s/c"]
    tensor, raw = (leaf.item for leaf in captured.leaves)
    assert (tensor.dtype, tensor.shape, tensor.nbytes, tensor.itemsize) == ("float32", (3,), 12, 4)
    assert (raw.dtype, raw.shape, raw.nbytes, raw.itemsize) == ("uint8", (5000,), 5000, 1)


class Broken:
    def state_dict(self) -> dict[str, Any]:
        raise KeyError("mine")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def test_an_error_of_a_state_dict_is_the_users_with_a_note() -> None:
    with pytest.raises(KeyError, match="mine") as caught:
        capture({"ok": StateDict(), "bad": Broken()})
    assert any("'bad'" in note for note in caught.value.__notes__)


def replicated(*globs: str) -> set[str]:
    state = {
        "model": StateDict(w=torch.ones(1), deep={"w": torch.ones(1), "b": 1}),
        "optim": StateDict({"0": torch.ones(1), "a/b": b"x" * 5000}),
    }
    entries = Memory(capture(state, replicated=list(globs))).entries
    return {e.path for e in entries if not isinstance(e, ContainerEntry) and e.replicated}


@pytest.mark.parametrize(
    ("glob", "expected"),
    [
        ("model/*", {"model/w"}),
        ("model/**", {"model/w", "model/deep/w", "model/deep/b"}),
        ("**/w", {"model/w", "model/deep/w"}),
        ("model/**/w", {"model/w", "model/deep/w"}),
        ("*/w", {"model/w"}),
        ("**", {"model/w", "model/deep/w", "model/deep/b", "optim/%30", "optim/a%2Fb"}),
        ("optim/0", {"optim/%30"}),
        ("optim/a%2Fb", {"optim/a%2Fb"}),
        ("model/d*/b", {"model/deep/b"}),
        ("model.w", set()),
    ],
)
def test_replicated_globs(glob: str, expected: set[str]) -> None:
    assert replicated(glob) == expected


@pytest.fixture
def unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has not warned of any glob."""
    monkeypatch.setattr(capturing, "_unmatched", set())


@pytest.mark.usefixtures("unwarned")
def test_a_glob_without_a_match_is_a_warning_on_rank_0_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert replicated("model/**", "nothing/*", "**/w") != set()
        for rank in (7, 4, 4):
            capture({"model": StateDict(w=1)}, replicated=["other"], ranks=(4, 7), rank=rank)
            assert caplog.text.count("'other' matches no leaf") == (rank == 4)
    assert "'nothing/*' matches no leaf" in caplog.text
    assert len(caplog.records) == 2


@pytest.mark.usefixtures("unwarned")
@pytest.mark.parametrize(
    ("glob", "name"), [("modle/**", "model"), ("model/deep/wieght", "model/deep/w"), ("xyz/*", "")]
)
def test_a_misspelled_glob_has_a_suggestion(
    caplog: pytest.LogCaptureFixture, glob: str, name: str
) -> None:
    with caplog.at_level(logging.WARNING):
        replicated(glob)
    hint = f"; did you mean {name!r}?" if name else ""
    assert caplog.messages == [f"replicated={glob!r} matches no leaf of the app state{hint}"]


def test_an_error_names_some_of_many_refused_leaves() -> None:
    with pytest.raises(UsageError) as caught:
        capture({"s": StateDict({f"x{i:02}": object() for i in range(60)})})
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("60 leaves")
    assert len(lines) == 22
    assert "'s/x19'" in lines[20]
    assert lines[21] == "  ... and 40 more"


def test_one_string_of_globs_is_refused() -> None:
    with pytest.raises(UsageError, match="list of globs"):
        capture({"s": StateDict(a=1)}, replicated="model/**")


def test_leaves_and_sources_agree() -> None:
    captured = capture({"s": StateDict(a=torch.ones(2, 3).t(), b=torch.ones(3).expand(4, 3))})
    for leaf in captured.leaves:
        assert isinstance(leaf, Leaf)
        assert leaf.source.nbytes == leaf.item.nbytes


@pytest.mark.parametrize("num_tensors", [20_000, slow(100_000)])
def test_very_many_small_tensors(num_tensors: int) -> None:
    memory = torch.arange(num_tensors * 4, dtype=torch.float32).view(num_tensors, 4)
    state = {f"layers.{i}.weight": row for i, row in enumerate(memory)}
    captured = capture({"m": StateDict(state)})
    assert len(captured.leaves) == len(captured.parts) == num_tensors
    stored = Memory(captured)
    target = {name: torch.zeros(4) for name in state}
    restore = prepare("m", stored.key("m"), target=target, allow_pickle=False)
    assert len(restore.memory.reads) == num_tensors
    assert stored.fill(restore.memory.reads) == memory.nbytes
    result = restore.build()
    assert all(result[name] is tensor for name, tensor in target.items())
    assert torch.equal(torch.stack(list(target.values())), memory)


def test_leaves_that_are_assigned_to_this_rank() -> None:
    """The coordinator need not hear of them: they are in no scope."""
    leaves = [
        HeldLeaf("a/x", torch.ones(4)),
        HeldLeaf("a/y", torch.ones(2, 3), Box((2, 0), (2, 3)), (4, 3)),
        HeldLeaf("b/0/n", 7),
    ]
    captured = capture_leaves(leaves, {"b": "list"}, replicated=True, allow_pickle=False)
    assert captured.scopes == {}
    whole, shard = captured.leaves
    assert whole.item.replicated
    assert (shard.item.offsets, shard.item.global_shape) == ((2, 0), (4, 3))
    assert not captured.sharded
    kinds = [type(part).__name__ for part in captured.parts]
    assert kinds == ["ContainerEntry", "Leaf", "Leaf", "ValueEntry"]
    private = capture_leaves(leaves, {}, replicated=False, allow_pickle=False)
    assert not any(leaf.item.replicated for leaf in private.leaves)
    sparse = HeldLeaf("s", torch.eye(2).to_sparse(), Box((0, 0), (2, 2)), (4, 2))
    with pytest.raises(UsageError, match="'s' is a shard"):
        capture_leaves([sparse], {}, replicated=True, allow_pickle=False)


def test_a_mesh_is_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mesh of thousands of ranks has hundreds of tensors, and optimizer states next to them."""
    mesh = DeviceMesh("cpu", torch.arange(6), _init_backend=False, _rank=2)
    parameters = []
    for number in range(40):
        shape = (6, 3 + number % 5)
        local = torch.ones(1, shape[1])
        meta = TensorMeta(torch.Size(shape), (shape[1], 1), torch.float32)
        spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)
        parameters.append(torch.nn.Parameter(DTensor(local, spec, requires_grad=False)))
    optimizer = torch.optim.SGD(parameters)
    optimizer.state.update({p: {"count": torch.tensor(1.0)} for p in parameters})
    looked: list[object] = []

    def counting(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def counted(it: Any) -> Any:
            looked.append(it)
            return call(it)

        return counted

    for module, name in ((actorsnap.state.distributed, "_mesh_ranks"), (capturing, "ranks_digest")):
        monkeypatch.setattr(module, name, counting(getattr(module, name)))
    app_state = {
        "model": StateDict(**{str(n): p for n, p in enumerate(parameters)}),
        "optimizer": optimizer,
    }
    captured = capture(app_state, ranks=range(6), rank=2)
    assert len(captured.sharded) == 40
    assert {each.num_ranks for each in captured.sharded} == {6}
    counts = [leaf for leaf in captured.leaves if leaf.item.path.endswith("/count")]
    assert len(counts) == 40
    assert all(leaf.item.replicated for leaf in counts)
    # The tensors', and the optimizer's of parameters.
    assert looked.count(mesh) == 2
    assert len(looked) <= 2 + 2
