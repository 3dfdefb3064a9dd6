# SPDX-License-Identifier: Apache-2.0
"""Paths, escaping, containers: every tree comes back as it was, and no two paths are equal."""

from __future__ import annotations

import math
from collections import OrderedDict, UserDict, defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.errors import FormatError, UsageError
from actorsnap.state.tree import (
    Container,
    Skeleton,
    escape,
    flatten,
    human,
    join,
    part_path,
    unescape,
    unflatten,
)

ODD_KEYS = [
    *("", "%", "/", "@", "a/b", "a%b", "a@b", "..", ".", "__metadata__", "-", "1", "-1", "-0"),
    *("007", "1.5", "0.weight", "²", "١", "%true", "%null", "%f0x1", "%31", "true", "null", "\x00"),
    *("\ud800", "a\udfffb", "\ud83d\ude00", "😀", "x" * 10_000, "/" * 10_000, "9" * 5_000, "\n"),
    *(0, 1, -1, 10**400, None, True, False),
    *(0.0, -0.0, 1.0, 1.5, math.inf, -math.inf, math.nan, 5e-324, 1e308),
]

texts = st.text(alphabet=st.characters(exclude_categories=()), max_size=8)
keys = st.one_of(
    texts, st.integers(), st.booleans(), st.none(), st.floats(), st.sampled_from(ODD_KEYS)
)
leaves = st.one_of(st.integers(), st.just("leaf"))


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.lists(st.tuples(keys, children), max_size=4)
    return st.one_of(
        pairs.map(dict),
        pairs.map(OrderedDict),
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
    )


trees = st.recursive(leaves, containers, max_leaves=20)


def same(a: object, b: object) -> bool:
    """Equality that tells types, order, -0.0 and NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict) and isinstance(b, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a.hex() == b.hex()
    return a == b


@given(st.lists(keys, max_size=5))
def test_paths_lead_back_to_their_keys(path_keys: list[Any]) -> None:
    path = join("root", *path_keys)
    assert same([unescape(token) for token in path.split("/")], ["root", *path_keys])
    path.encode()  # no surrogate is left
    assert "@" not in path


@given(keys, keys)
def test_different_keys_have_different_tokens(a: Any, b: Any) -> None:
    assert (escape(a) == escape(b)) == same(a, b)


def test_odd_keys_have_tokens_of_their_own() -> None:
    tokens = [escape(key) for key in ODD_KEYS]
    assert len(set(tokens)) == len(tokens)
    for key, token in zip(ODD_KEYS, tokens, strict=True):
        assert same(unescape(token), key)
        assert token
        assert "/" not in token


@given(st.text(alphabet="%ufd80123456789ABCabc@/-.xp+truenl", max_size=10))
def test_a_token_is_decoded_only_if_it_is_the_token_of_its_key(token: str) -> None:
    try:
        key = unescape(token)
    except FormatError:
        return
    assert escape(key) == token


@pytest.mark.parametrize(
    "token",
    ["", "%2f", "%41", "%zz", "%ud8", "%u0041", "a/b", "a@b", "00", "-0", "%f1", "%f0x1p+0"]
    + ["%f0x1.0p+99999", "%True", "\ud800", "%uD800", "9" * 5000, "%%", "a%"],
)
def test_tokens_of_no_key_are_refused(token: str) -> None:
    with pytest.raises(FormatError):
        unescape(token)


@given(trees)
def test_trees_come_back_as_they_were(tree: Any) -> None:
    paths, values = flatten("root", tree)
    assert len(set(paths)) == len(paths)
    assert same(unflatten("root", zip(paths, values, strict=True)), tree)


def test_flatten_names_only_containers_that_paths_do_not_tell() -> None:
    paths, values = flatten("k", {"a": {"b": 1}, "c": {}, "d": [1], "e": OrderedDict(f=1)})
    shown = {
        p: v.type if isinstance(v, Container) else v for p, v in zip(paths, values, strict=True)
    }
    assert shown == {
        **{"k/a/b": 1, "k/c": "dict", "k/d": "list", "k/d/0": 1},
        **{"k/e": "ordered_dict", "k/e/f": 1},
    }


def test_module_metadata_is_kept() -> None:
    state = OrderedDict(a=1)
    state._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    paths, values = flatten("k", state)
    back = unflatten("k", zip(paths, values, strict=True))
    assert back._metadata == {"": {"version": 2}}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "value",
    [defaultdict(lambda: 1, a=1), UserDict(a=1), {1}, {(1, 2): 3}, {b"k": 1}]
    + [{math.nan: 1, float("nan"): 2}, {10**5000: 1}],
)
def test_other_containers_are_leaves(value: object) -> None:
    assert flatten("k", {"v": value}) == (["k/v"], [value])


def test_a_cycle_is_named() -> None:
    inner: list[Any] = [1]
    state = {"a": [{"b": inner}]}
    inner.append(state["a"])
    with pytest.raises(UsageError, match="'k/a/0/b/1' contains itself"):
        flatten("k", state)


def test_the_same_container_twice_is_no_cycle() -> None:
    shared = [1]
    paths, _ = flatten("k", {"a": shared, "b": [shared, shared]})
    assert len(paths) == 7


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_nesting_has_a_limit_and_no_recursion() -> None:
    paths, values = flatten("k", nested(900))
    back: Any = unflatten("k", zip(paths, values, strict=True))
    for _ in range(900):
        (back,) = back
    assert back == 1
    with pytest.raises(UsageError, match="deeper than 900 at 'k/0/0"):
        flatten("k", nested(901))


def test_human_paths() -> None:
    assert human(join("optim", "state", 0, "a.b")) == "optim/state/0/a.b"
    assert human(join("m", "0", "x/y")) == "m/0/x/y"


@pytest.mark.parametrize(
    ("items", "match"),
    [
        ([("k/a", 1), ("k/a", 2)], "two entries"),
        ([("k/a", 1), ("k/a/b", 2)], "leaf"),
        ([("k/a/b", 1), ("k/a", 2)], "two entries"),
        ([("k/a", Container("list")), ("k/a/b", 1)], "no item"),
        ([("k/a", Container("list")), ("k/a/-1", 1)], "no item"),
        ([("k/a", Container("set"))], "unknown container"),  # type: ignore[arg-type]
        ([("k/%zz", 1)], "not a token"),
        ([("j/a", 1)], "does not lie below"),
        ([("k", 1), ("k/a", 1)], "leaf"),
        ([("k/a", 1), ("k", 1)], "two entries"),
        ([("k/" + "a/" * 901 + "b", 1)], "too deep"),
        ([("k//a", 1)], "not a token"),
    ],
)
def test_paths_that_make_no_tree_are_refused(items: list[Any], match: str) -> None:
    with pytest.raises(FormatError, match=match):
        unflatten("k", items)


def test_a_skeleton_leaves_out_what_has_no_value() -> None:
    skeleton = Skeleton("k")
    skeleton.add_container("k/l", "list")
    for path in ("k/l/0", "k/l/1", "k/l/2", "k/d/x"):
        skeleton.add_leaf(path)
    skeleton.add_container("k/e", "tuple")
    assert skeleton.build({"k/l/2": "c", "k/l/0": "a"}) == {"l": ["a", "c"], "e": ()}


def test_items_of_sequences_stand_by_index() -> None:
    items = [("k", Container("tuple")), ("k/1", "b"), ("k/10", "d"), ("k/2", "c"), ("k/0", "a")]
    assert unflatten("k", items) == ("a", "b", "c", "d")


def test_part_paths_cannot_be_taken_for_keys() -> None:
    with pytest.raises(FormatError):
        unescape(part_path("a", "values"))
