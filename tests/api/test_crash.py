# SPDX-License-Identifier: Apache-2.0
"""SIGKILL at every write of a save: the old snapshot or the new one, never a mixture or an error.

Real processes on the real file system. Each sweep goes on until a run survives.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from actorsnap import sync
from actorsnap.format.manifest import OLDER_COMMIT_KEY
from tests.api.places import make_both, make_older, number_at, state
from tests.api.zygote import Ending, Zygote
from tests.support.cases import slow


@pytest.fixture(scope="module")
def zygote() -> Zygote:
    return Zygote.shared()


HOWS = [("take", "before"), ("async_take", "after"), ("take", "after"), ("async_take", "before")]


def sweep(
    zygote: Zygote, folder: Path, function: str, step: int = 1, **how: Any
) -> tuple[int, list[Any]]:
    """Kills at 1, 1 + step, ...; returns how many were killed, and what each next one found."""
    overwrite = how["overwrite"]
    found: list[Any] = []
    for at in itertools.count(1, step):
        url = str(folder / f"{how['when']}-{at}")
        if overwrite:
            assert zygote.call("save", url=url, number=1).result() == ""
        ending = zygote.call(function, url=url, number=2, at=at, **how)
        found.append(check(zygote, url, ending, overwrite=overwrite))
        if not ending.was_killed:
            ending.result()
            assert found[-1]["found"] == 2
            assert found[-1]["left_before"] == []
            return len(found) - 1, found
    raise AssertionError("unreachable")


def check(zygote: Zygote, url: str, ending: Ending, *, overwrite: bool) -> dict[str, Any]:
    """The next process finds the old or the new, and leaves nothing but its own.

    Where nothing was committed, it also leaves an attempt that only lacks the commit object.
    """
    next_one: dict[str, Any] = zygote.call("look_and_save_again", url=url, number=3).result()
    assert next_one["found"] in ((1, 2) if overwrite else (None, 2))
    if next_one["found"] is None:
        assert next_one["says"] in ("unfinished", "absent")
    assert next_one["then"] == 3
    assert next_one["left"] == ([] if next_one["found"] else complete(next_one["left_before"]))
    return next_one


def complete(keys: list[str]) -> list[str]:
    """The keys of attempts whose rank manifest is there."""
    attempts = {key.partition("/")[0] for key in keys if key.endswith("/manifest/0.json")}
    return [key for key in keys if key.partition("/")[0] in attempts]


@pytest.mark.parametrize(("how", "when"), [HOWS[0], *(slow(*how) for how in HOWS[1:])])
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


@pytest.mark.parametrize(("how", "when"), [HOWS[1], *(slow(*how) for how in HOWS[::2] + HOWS[3:])])
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


@pytest.mark.slow
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
    ("torn", True, "take", 3),  # every third call
    slow("torn", True, "take", 1),
    slow("before", False, "take", 1),
    slow("before", True, "take", 1),
    slow("after", False, "take", 1),
    slow("after", True, "take", 1),
    slow("before", True, "async_take", 1),
    slow("torn", False, "async_take", 1),
]


@pytest.mark.parametrize(("when", "overwrite", "how", "step"), SYSTEM_CALLS)
def test_killed_at_a_system_call(
    zygote: Zygote, tmp_path: Path, how: str, when: str, overwrite: bool, step: int
) -> None:
    num_killed, found = sweep(
        zygote,
        tmp_path,
        "save_and_die_at_system_call",
        step,
        how=how,
        overwrite=overwrite,
        when=when,
    )
    assert num_killed > 20 // step
    temporaries = [key for one in found for key in one["left_before"] if key.endswith(".tmp")]
    assert temporaries or step > 1, "no run was killed while a temporary lay there"


# Commit objects of the older name -------------------------------------------------------------


@pytest.mark.parametrize("when", [slow("before"), "after"])
def test_killed_while_an_older_snapshot_is_replaced(
    zygote: Zygote, tmp_path: Path, when: str
) -> None:
    found = []
    for at in itertools.count(1):
        url = tmp_path / str(at)
        assert zygote.call("save", url=str(url), number=1).result() == ""
        make_older(url)
        how = {"how": "take", "overwrite": True, "at": at, "when": when}
        ending = zygote.call("save_and_die_at_operation", url=str(url), number=2, **how)
        found.append(check(zygote, str(url), ending, overwrite=True))
        assert not (url / OLDER_COMMIT_KEY).exists()
        if not ending.was_killed:
            ending.result()
            break
    numbers = [one["found"] for one in found]
    assert numbers == sorted(numbers)
    # Killed while both names were there, or when the older name was gone and its folder was not.
    between = [one["left_before"] for one in found if one["found"] == 2 and one["left_before"]]
    assert any(OLDER_COMMIT_KEY in keys for keys in between)
    if when == "after":
        assert any(OLDER_COMMIT_KEY not in keys for keys in between)


@pytest.mark.few(1)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("has_both", [True, False])
def test_killed_while_an_older_snapshot_is_deleted(
    zygote: Zygote, tmp_path: Path, when: str, has_both: bool
) -> None:
    number = 2 if has_both else 1
    found = []
    for at in itertools.count(1):
        url = tmp_path / str(at)
        sync.Snapshot.take(url, state(1))
        if has_both:
            asyncio.run(make_both(url, 2))
        else:
            make_older(url)
        ending = zygote.call("delete_and_die_at_operation", url=str(url), at=at, when=when)
        # Never what was replaced.
        found.append(asyncio.run(number_at(url)))
        assert found[-1] in (number, None)
        if not ending.was_killed:
            ending.result()
            assert not url.exists()
            break
        sync.Snapshot.take(url, state(3), overwrite=found[-1] is not None)
        assert asyncio.run(number_at(url)) == 3
        assert not (url / OLDER_COMMIT_KEY).exists()
    assert found[0] == (number if when == "before" or has_both else None)
    assert len(found) >= (6 if has_both else 4)


@pytest.mark.slow  # a copy, and an older snapshot: the others have them
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("has_both", [True, False])
def test_killed_while_a_copy_replaces_an_older_snapshot(
    zygote: Zygote, tmp_path: Path, when: str, has_both: bool
) -> None:
    source, number = tmp_path / "source", 2 if has_both else 1
    sync.Snapshot.take(source, state(5))
    make_older(source)
    found: list[int] = []
    for at in itertools.count(1):
        to = tmp_path / str(at)
        sync.Snapshot.take(to, state(1))
        if has_both:
            asyncio.run(make_both(to, 2))
        else:
            make_older(to)
        ending = zygote.call(
            "copy_and_die_at_operation", source=str(source), to=str(to), at=at, when=when
        )
        found.append(asyncio.run(number_at(to)) or 0)
        assert found[-1] in (number, 5)
        if not ending.was_killed:
            ending.result()
            assert found[-1] == 5
            break
        sync.Snapshot(source).copy_to(to, overwrite=True)
        assert asyncio.run(number_at(to)) == 5
        sync.Snapshot.take(to, state(3), overwrite=True)
        assert not (to / OLDER_COMMIT_KEY).exists()
    assert found[0] == number  # in between, the order of operations may differ
    assert len(found) > 8
