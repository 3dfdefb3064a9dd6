# SPDX-License-Identifier: Apache-2.0
"""Copies of errors, and errors from other processes, have all that the original has."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap import ActorSnapError, StorageError, UsageError, errors
from actorsnap.errors import ChecksumMismatch
from actorsnap.format.manifest import COMMIT_KEYS
from actorsnap.runtime.script import _unwrap_group
from actorsnap.wording import did_you_mean, named_ranks

CLASSES = [getattr(errors, name) for name in errors.__all__]
COPIES: list[Callable[[Any], Any]] = [
    copy.copy,
    copy.deepcopy,
    lambda error: pickle.loads(pickle.dumps(error)),
    _unwrap_group,  # what a public call raises
]

text = st.text(max_size=8)
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    str: text,
    bool: st.booleans(),
    bool | None: st.none() | st.booleans(),
    int: st.integers(),
    int | None: st.none() | st.integers(),
    float | None: st.none() | st.floats(allow_nan=False),
    str | None: st.none() | text,
    Sequence[str]: st.lists(text, max_size=2),
    Sequence[tuple[str, str]]: st.lists(st.tuples(text, text), max_size=2),
}


def fields_of(kind: type[ActorSnapError]) -> st.SearchStrategy[ActorSnapError]:
    if kind is ActorSnapError:
        return st.builds(kind, text, key=text, rank=st.integers())
    hints = get_type_hints(kind.__init__)
    return st.builds(
        kind, **{name: VALUES[hints[name]] for name in inspect.signature(kind).parameters}
    )


foreign = st.sampled_from([ValueError("odd"), OSError(28, "no space", "/x"), KeyError("k")])
instances = st.sampled_from(CLASSES).flatmap(fields_of)


class Unportable(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__("has no pickle")


def assert_same(found: BaseException | None, made: BaseException | None) -> None:
    assert type(found) is type(made)
    if found is None or made is None:
        return
    assert str(found) == str(made)
    assert found.args == made.args
    assert errors.notes_of(found) == errors.notes_of(made)
    if isinstance(found, ActorSnapError):
        assert vars(found) == vars(made)
    assert_same(found.__cause__, made.__cause__)


@pytest.mark.parametrize("copied", COPIES)
@given(made=instances, causes=st.lists(instances | foreign, max_size=2), notes=st.lists(text))
def test_a_copy_has_everything(
    copied: Callable[[Any], Any], made: ActorSnapError, causes: list[Any], notes: list[str]
) -> None:
    for note in notes:
        made.add_note(note)
    for error, cause in zip([made, *causes], causes, strict=False):
        error.__cause__ = cause if cause is not error else None
    found = copied(made)
    assert found is not made
    assert_same(found, made)
    before = len(errors.notes_of(made))
    found.add_note("of the copy")
    found.fields["more"] = 1
    assert len(errors.notes_of(made)) == before
    assert "more" not in made.fields
    for error in causes:
        error.__cause__ = None


@pytest.mark.parametrize("copied", COPIES[1:3])
def test_a_cause_that_cannot_be_pickled(copied: Callable[[Any], Any]) -> None:
    made, between = UsageError("bad"), StorageError(op="put", key="k", backend="b")
    made.__cause__, between.__cause__ = between, Unportable(1, 2)
    found = copied(made)
    assert str(found.__cause__) == str(between)
    assert str(found.__cause__.__cause__) == "Unportable: has no pickle"


def test_causes_in_a_circle() -> None:
    made, other = UsageError("a"), UsageError("b")
    made.__cause__, other.__cause__ = other, made
    for copied in COPIES:
        assert str(copied(made).__cause__) == "b"


def test_a_group_that_holds_the_error_it_caused() -> None:
    """What a worker thread's error is after its task group, and the call, raised it."""
    made = UsageError("a")
    made.__cause__ = ExceptionGroup("some", [made, ValueError("odd")])
    for copied in COPIES:
        group = copied(made).__cause__
        assert [repr(each) for each in group.exceptions] == ["UsageError('a')", "ValueError('odd')"]


def test_a_subclass_with_a_constructor_of_its_own() -> None:
    class Own(StorageError):
        def __init__(self, number: int) -> None:
            super().__init__(op="put", key=str(number), backend="b")

    found = copy.copy(Own(5))
    assert (type(found), found.key) == (Own, "5")


def test_only_a_lost_commit_object_is_recovered() -> None:
    """A file of another format has no slash in its name, either."""
    for key in (*COMMIT_KEYS, "model.safetensors", "a/manifest/0.json"):
        error = ChecksumMismatch(key=key, detail="differs", url="/run/model")
        is_lost = "is damaged: `actorsnap recover /run/model --replace-damaged`" in str(error)
        assert is_lost == (key in COMMIT_KEYS)
        assert "restore an older one. If it is a copy, verify its source" in str(error)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0 and 1"),
        ([0, 2, 3], "ranks 0, 2 and 3"),
        ([7, 0, 3, 2, 4], "ranks 0, 2 to 4 and 7"),
        (list(range(1, 8)), "ranks 1 to 7"),
        (list(range(0, 40, 2)), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and others"),
    ],
)
def test_ranks_as_people_write_them(ranks: list[int], text: str) -> None:
    assert named_ranks(ranks) == text


def test_similar_names() -> None:
    known = ["alpha", "alphb", "alphc", "other"]
    assert did_you_mean("alph", known, limit=3) == "did you mean 'alphc', 'alphb' or 'alpha'?"
    assert did_you_mean("alph", known[:2], limit=3) == "did you mean 'alphb' or 'alpha'?"
    assert did_you_mean("alph", known[:1], limit=3) == "did you mean 'alpha'?"
    assert did_you_mean("zzz", known) == ""
