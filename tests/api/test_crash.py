"""SIGKILL at every write of a save: the old snapshot or the new one, never a mixture or an error.

Real processes on the real file system. Each sweep goes on until a run survives.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.zygote import Ending, Zygote


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as zygote:
        yield zygote


each_save = pytest.mark.parametrize(
    ("how", "when"),
    [
        ("take", "before"),
        ("async_take", "after"),
        pytest.param("take", "after", marks=pytest.mark.slow),
        pytest.param("async_take", "before", marks=pytest.mark.slow),
    ],
)


def sweep(zygote: Zygote, folder: Path, function: str, **how: Any) -> tuple[int, list[Any]]:
    """Kills at 1, 2, ...; returns how many runs were killed, and what each next one found."""
    overwrite = how["overwrite"]
    found: list[Any] = []
    for at in itertools.count(1):
        url = str(folder / f"{how['when']}-{at}")
        if overwrite:
            assert zygote.call("save", url=url, number=1).result() == ""
        ending = zygote.call(function, url=url, number=2, at=at, **how)
        found.append(check(zygote, url, ending, overwrite=overwrite))
        if not ending.was_killed:
            ending.result()
            assert found[-1]["found"] == 2
            assert found[-1]["left_before"] == []
            return at - 1, found
    raise AssertionError("unreachable")


def check(zygote: Zygote, url: str, ending: Ending, *, overwrite: bool) -> dict[str, Any]:
    """The next process finds the old or the new, and leaves nothing but its own."""
    next_one: dict[str, Any] = zygote.call("look_and_save_again", url=url, number=3).result()
    assert next_one["found"] in ((1, 2) if overwrite else (None, 2))
    if next_one["found"] is None:
        assert next_one["says"] in ("unfinished", "absent")
    assert next_one["then"] == 3
    assert next_one["left"] == []
    return next_one


@each_save
def test_killed_at_a_storage_operation_of_a_first_save(
    zygote: Zygote, tmp_path: Path, how: str, when: str
) -> None:
    num_killed, found = sweep(
        zygote, tmp_path, "save_and_die_at_operation", how=how, overwrite=False, when=when
    )
    # Two data objects are written and completed, then the manifest, then the commit.
    assert num_killed >= 6
    # Only what comes after the commit's effect is a snapshot.
    commit = None if when == "before" else 2
    assert [one["found"] for one in found] == [None] * (num_killed - 1) + [commit, 2]
    assert "unfinished" in [one["says"] for one in found]


@each_save
def test_killed_at_a_storage_operation_of_a_save_that_replaces(
    zygote: Zygote, tmp_path: Path, how: str, when: str
) -> None:
    num_killed, found = sweep(
        zygote, tmp_path, "save_and_die_at_operation", how=how, overwrite=True, when=when
    )
    # After the commit there is one more: what was replaced is deleted.
    assert num_killed >= 7
    commit = 1 if when == "before" else 2
    assert [one["found"] for one in found] == [1] * (num_killed - 2) + [commit, 2, 2]


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_a_storage_operation_of_a_compressed_save(
    zygote: Zygote, tmp_path: Path, when: str
) -> None:
    num_killed, found = sweep(
        zygote,
        tmp_path,
        "save_and_die_at_operation",
        how="async_take",
        overwrite=True,
        when=when,
        compression="zstd",
    )
    # Two chunks, the manifest, the commit, and what was replaced is deleted.
    assert num_killed >= 5
    commit = 1 if when == "before" else 2
    assert [one["found"] for one in found] == [1] * (num_killed - 2) + [commit, 2, 2]


SYSTEM_CALLS = [
    pytest.param("torn", True, "take"),
    pytest.param("before", False, "take", marks=pytest.mark.slow),
    pytest.param("before", True, "take", marks=pytest.mark.slow),
    pytest.param("after", False, "take", marks=pytest.mark.slow),
    pytest.param("after", True, "take", marks=pytest.mark.slow),
    pytest.param("before", True, "async_take", marks=pytest.mark.slow),
    pytest.param("torn", False, "async_take", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("when", "overwrite", "how"), SYSTEM_CALLS)
def test_killed_at_a_system_call(
    zygote: Zygote, tmp_path: Path, how: str, when: str, overwrite: bool
) -> None:
    num_killed, found = sweep(
        zygote, tmp_path, "save_and_die_at_system_call", how=how, overwrite=overwrite, when=when
    )
    assert num_killed > 20
    temporaries = [key for one in found for key in one["left_before"] if key.endswith(".tmp")]
    assert temporaries, "no run was killed while a temporary lay there"
