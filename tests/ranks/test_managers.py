"""``CheckpointManager`` on several real ranks: one outcome on all, whatever happens to one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.managers import OPTIONS
from tests.worlds import Director

each_size = pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def director() -> Iterator[Director]:
    with Director("tests.ranks.managers") as director:
        yield director


def play(director: Director, path: Path, scenario: str, num_ranks: int, **more: Any) -> list[Any]:
    arguments = {"what": scenario, "path": str(path / "run"), **more}
    said: list[Any] = director.play("direct_managers", num_ranks=num_ranks, **arguments)
    assert len(said) == num_ranks
    return said


def same(said: list[Any], *names: str) -> list[Any]:
    """What all ranks agree on."""
    found = [[one[name] for name in names] for one in said]
    assert all(one == found[0] for one in found), found
    return found[0]


@each_size
@pytest.mark.parametrize("whose", [0, 1])
def test_all_fall_back_together(
    director: Director, tmp_path: Path, num_ranks: int, whose: int
) -> None:
    said = play(director, tmp_path, "falls_back", num_ranks, whose=whose)
    assert same(said, "error", "found", "skipped", "steps") == [
        "",
        10,
        ["step-0000000020.g1"],
        [0, 10, 20, 30],
    ]
    for rank, one in enumerate(said):
        assert one["state"] == [10, 10.0, 1000.0 * (rank + 1) + 10]


@each_size
def test_all_find_nothing_or_nothing_whole(
    director: Director, tmp_path: Path, num_ranks: int
) -> None:
    said = play(director, tmp_path, "finds_none", num_ranks)
    for one in said:
        assert (one["nothing"]["error"], one["nothing"]["found"]) == ("", None)
        assert one["damaged"]["error"] == "NoValidSnapshot"
        assert one["is_fresh"]
    (text,) = same([one["damaged"] for one in said], "text")
    assert text.count("ChecksumMismatch") == 2


@each_size
def test_all_learn_that_the_root_is_taken(
    director: Director, tmp_path: Path, num_ranks: int
) -> None:
    said = play(director, tmp_path, "is_taken", num_ranks)
    error, _, then, steps = same(said, "error", "text", "then", "steps")
    assert (error, then, steps) == ("RootTaken", 10, [0, 10, 20])


@each_size
def test_a_rank_with_another_step(director: Director, tmp_path: Path, num_ranks: int) -> None:
    said = play(director, tmp_path, "differs", num_ranks)
    assert same(said, "steps") == [[20, 40]]
    for number in (0, 1):
        outcomes = [one["said"][number] for one in said]
        error, text = same(outcomes, "error", "text")
        assert error == "UsageError"
        assert "step" in text
        assert all(one["seconds"] < OPTIONS.timeout_s / 2 for one in outcomes)


@each_size
@pytest.mark.parametrize(
    ("trouble", "whom"), [("list_folders", 0), ("stat", 0), ("metrics", 0), ("metrics", 1)]
)
def test_the_trouble_of_one_is_raised_by_all(
    director: Director, tmp_path: Path, num_ranks: int, trouble: str, whom: int
) -> None:
    said = play(director, tmp_path, "has_trouble", num_ranks, trouble=trouble, whom=whom)
    error, text, steps = same(said, "error", "text", "steps")
    assert error in ("StorageError", "SnapshotAborted", "UsageError")
    assert ("no such metric" if trouble == "metrics" else "a scripted fault") in text
    assert steps == [0, 20]
    assert all(one["seconds"] < OPTIONS.timeout_s / 2 for one in said)


@each_size
def test_nothing_due_sends_no_message(director: Director, tmp_path: Path, num_ranks: int) -> None:
    for one in play(director, tmp_path, "is_idle", num_ranks):
        assert one["after"] == one["before"]
        assert one["requests"] == []
        assert one["then"] > one["after"]


@pytest.mark.parametrize("sizes", [[2, 3, 2], pytest.param([3, 2, 3], marks=pytest.mark.slow)])
def test_another_number_of_ranks_resumes(
    director: Director, tmp_path: Path, sizes: list[int]
) -> None:
    worlds = director.play("direct_resumes_with", sizes=sizes, path=str(tmp_path / "run"))
    for number, (size, said) in enumerate(zip(sizes, worlds, strict=True)):
        assert len(said) == size
        error, found, steps = same(said, "error", "found", "steps")
        assert (error, found) == ("", 20 * number - 10 if number else None)
        assert steps == [10 * step for step in range(2 * number + 2)]
