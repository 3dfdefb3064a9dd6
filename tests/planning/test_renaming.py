# SPDX-License-Identifier: Apache-2.0
"""Other paths for an index: what a rename does to containers, views, parts and optimizers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.errors import UsageError
from actorsnap.format.manifest import ContainerEntry, Stored, TensorEntry, ValueEntry, ViewEntry
from actorsnap.planning.index import Index
from actorsnap.planning.renaming import check_used, function_of, renamed


def index_of(*entries: Any) -> Index:
    return Index(
        attempt="a",
        world_size=1,
        objects=(),
        entries=entries,
        held_by_other_ranks={"optim/state/0": (1,)},
        optimizers={"optim": "torch.optim.Adam"},
    )


def value(path: str) -> ValueEntry:
    return ValueEntry(path=path, value=1)


def view(path: str, of: str) -> ViewEntry:
    return ViewEntry(path=path, of=of, dtype="uint8", shape=(4,), strides=(1,))


def paths(index: Index) -> list[str]:
    return [entry.path for entry in index.entries]


@pytest.mark.parametrize(
    ("rename", "path", "new"),
    [
        ("module.", "model/module.fc.weight", "model/fc.weight"),
        ("module.", "model/encoder.module.weight", "model/encoder.module.weight"),
        ("module.", "module.x", "module.x"),
        ({"state_dict": "model"}, "state_dict/fc", "model/fc"),
        ({"state_dict": "model"}, "state_dict", "model"),
        ({"state_dict": "model"}, "state_dict_ema/fc", "state_dict_ema/fc"),
        ({"a": "x", "a/b": "y"}, "a/b/c", "y/c"),
        ({"optim/0": "optim"}, "optim/0/state", "optim/state"),
        ({"optim/0": "optim"}, "optim/01/state", "optim/01/state"),
        ({"model/module.": "model/"}, "model/module.fc", "model/fc"),
        ({"model/": ""}, "model/fc/w", "fc/w"),
        ({"model/fc1": "model/encoder"}, "model/fc1.weight", "model/encoder.weight"),
        ({"model/fc1": "model/encoder"}, "model/fc1", "model/encoder"),
        ({"model/fc1": "model/encoder"}, "model/fc10.weight", "model/fc10.weight"),
        ({"model/fc1": "model/a", "model/fc1.0": "model/b"}, "model/fc1.0.w", "model/b.w"),
        ({"model": "net"}, "model.ema/fc", "model.ema/fc"),
        ({"top": ""}, "top/fc/w", "fc/w"),
        ({"model/0": "layer"}, "model/0.weight", "layer/weight"),
        ({"model/0": "layer"}, "model/0.a.weight", "layer/a.weight"),
        ({"model/0": "layer"}, "model/0/weight", "layer/weight"),
        ({"model/0.": "layer."}, "model/0.weight", "layer.weight"),
        (lambda path: path.replace("_orig_mod.", ""), "m/a._orig_mod.b", "m/a.b"),
        (lambda path: None, "m/a", None),
    ],
)
def test_one_path(rename: Any, path: str, new: str | None) -> None:
    assert function_of(rename)(path) == new


@pytest.mark.parametrize("rename", ["", 3, {"": "a"}, {"a": None}, ["a"]])
def test_no_rename(rename: Any) -> None:
    with pytest.raises(UsageError, match="rename must"):
        function_of(rename)


KNOWN = ["model", "model/fc1.weight", "model/fc1.bias", "optim", "optim/0@storage"]


@pytest.mark.parametrize(
    "rename",
    [
        None,
        "module.",
        lambda path: path,
        {"model/fc1": "model/a"},
        {"model/fc1.": "model/a."},
        {"optim/0": "optim"},
        {"model": "net", "model/fc1": "model/a"},
    ],
)
def test_used(rename: Any) -> None:
    check_used(rename, KNOWN)


@pytest.mark.parametrize(
    ("rename", "match"),
    [
        ({"model/fcl": "model/a"}, "begins with 'model/fcl'; did you mean 'model/fc1'"),
        ({"model": "net", "modle/fc1": "a"}, "begins with 'modle/fc1'; did you mean 'model/fc1'"),
        ({"fc": "model/a"}, "begins with 'fc'; it has the keys 'model', 'optim'"),
        ({"fc1": "layer"}, r"with 'fc1'; did you mean 'model/fc1'\?"),
        ({"layer": "model/fc1"}, r"app state: pass rename=\{'model/fc1': 'layer'\}"),
    ],
)
def test_unused(rename: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        check_used(rename, KNOWN)


def test_all_that_has_a_path() -> None:
    data = Stored(0, 0, 4, (1,))
    found = renamed(
        index_of(
            ContainerEntry(path="state", type="ordered_dict"),
            TensorEntry(path="state/w@storage", dtype="uint8", shape=(4,), data=data),
            ViewEntry(
                path="state/w", of="state/w@storage", dtype="uint8", shape=(4,), strides=(1,)
            ),
            ContainerEntry(path="optim", type="list"),
            value("optim/0"),
        ),
        {"state": "model", "optim": "other"},
    )
    assert paths(found) == ["model", "model/w@storage", "model/w", "other", "other/0"]
    (moved,) = [entry for entry in found.entries if isinstance(entry, ViewEntry)]
    assert moved.of == "model/w@storage"
    assert found.held_by_other_ranks == {"other/state/0": (1,)}
    assert found.optimizers == {"other": "torch.optim.Adam"}


def test_containers_precede_what_moves_into_them() -> None:
    found = renamed(
        index_of(value("b/x"), ContainerEntry(path="a", type="ordered_dict"), value("a/y")),
        {"b": "a"},
    )
    assert paths(found) == ["a", "a/x", "a/y"]


@pytest.mark.parametrize(
    ("entries", "rename", "match"),
    [
        (
            (value("a"), value("b")),
            {"b": "a"},
            "of 'b': 'a' would be two leaves, because 'a' has that path",
        ),
        ((value("a"),), {"a": ""}, "no path"),
        ((value("a"),), lambda path: 3, "returned 3 for 'a'"),
        (
            (
                TensorEntry(path="a", dtype="uint8", shape=(4,), data=Stored(0, 0, 4, (1,))),
                view("b", "a"),
            ),
            lambda path: None if path == "a" else path,
            "leaves out 'a', whose memory 'b' shares",
        ),
    ],
)
def test_refused(entries: Any, rename: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        renamed(index_of(*entries), rename)


@given(st.sets(st.text("ab/", min_size=1).filter(lambda p: "//" not in p and p.strip("/") == p)))
def test_an_injection_and_its_inverse(names: set[str]) -> None:
    leaves = [name for name in names if not any(n.startswith(f"{name}/") for n in names)]
    index = index_of(*map(value, leaves))
    there = renamed(index, lambda path: f"x/{path}")
    assert renamed(there, lambda path: path.removeprefix("x/")) == index
