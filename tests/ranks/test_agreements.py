# SPDX-License-Identifier: Apache-2.0
"""Saves that rank 0 decides: real ranks save at the same call or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.agreements import LOST_AFTER_S, OPTIONS
from tests.worlds import Director

each_size = pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])

HOLD_S = LOST_AFTER_S + 4.0 + 1.0
"""The bound of a hold, and the time of a save."""


@pytest.fixture(scope="module")
def director() -> Iterator[Director]:
    with Director("tests.ranks.agreements") as director:
        yield director


def play(director: Director, path: Path, scenario: str, num_ranks: int, **more: Any) -> list[Any]:
    arguments = {"what": scenario, "path": str(path / "run"), **more}
    said: list[Any] = director.play("direct_agreements", num_ranks=num_ranks, **arguments)
    assert len(said) == num_ranks
    return said


def same(said: list[Any], *names: str) -> list[Any]:
    """What all ranks agree on."""
    found = [[one[name] for name in names] for one in said]
    assert all(one == found[0] for one in found), found
    return found[0]


@pytest.mark.parametrize(
    ("num_ranks", "whom", "lag_s"),
    [
        (2, 1, 0.0),
        pytest.param(2, 0, 0.03, marks=pytest.mark.slow),
        pytest.param(2, 1, 0.03, marks=pytest.mark.slow),
        pytest.param(3, 2, 0.03, marks=pytest.mark.slow),
    ],
)
def test_a_request_on_one_rank_is_one_save_on_all(
    director: Director, tmp_path: Path, num_ranks: int, whom: int, lag_s: float
) -> None:
    said = play(director, tmp_path, "request_on", num_ranks, whom=whom, lag_s=lag_s)
    error, saved, steps = same(said, "error", "saved", "steps")
    assert error == ""
    (step,) = saved
    assert int(step) > 10
    assert steps == [int(step)]
    assert saved[step] == ("signal" if whom == 0 else f"signal (rank {whom})")
    for one in said:
        assert one["kinds"][:4] == ["agreed", "decided", "staged", "committed"]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_requests_of_all_at_once(director: Director, tmp_path: Path, num_ranks: int) -> None:
    said = play(director, tmp_path, "requests_by_all", num_ranks)
    saved, steps = same(said, "saved", "steps")
    # A request that comes when the others are agreed on may be a save of its own.
    assert 1 <= len(saved) <= num_ranks
    assert steps == [int(step) for step in saved]
    asked = ["by 0", *(f"by {rank} (rank {rank})" for rank in range(1, num_ranks))]
    assert all(any(each in reason for reason in saved.values()) for each in asked)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_clocks_of_rank_0(director: Director, tmp_path: Path, num_ranks: int) -> None:
    said = play(director, tmp_path, "clocks", num_ranks)
    error, saved, steps = same(said, "error", "saved", "steps")
    assert error == ""
    assert steps == [int(step) for step in saved][-3:] or len(steps) == len(saved)
    by_clock = [int(step) for step, reason in saved.items() if "0.01 minutes" in reason]
    assert {int(step) for step in saved} - {*by_clock} <= {100, 200}
    assert len(by_clock) >= 2


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "whom"), [(2, 1), (2, 0), (2, -1), (3, 2), (3, -1)])
def test_a_notice_saves_once_and_stops_all_at_one_call(
    director: Director, tmp_path: Path, num_ranks: int, whom: int
) -> None:
    said = play(director, tmp_path, "notice_on", num_ranks, whom=whom, grace_s=25.0, save_s=0.0)
    error, saved, step, stops, unwatched = same(
        said, "error", "saved", "step", "stops", "is_unwatched"
    )
    assert (error, stops, unwatched) == ("", True, True)
    assert 10 < step < 100
    assert [int(each) for each in saved] == [2, step]
    assert same(said, "steps") == [[2, step]]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_notice_without_time_stops_without_a_save(
    director: Director, tmp_path: Path, num_ranks: int
) -> None:
    said = play(director, tmp_path, "notice_on", num_ranks, whom=1, grace_s=3.0, save_s=2.5)
    error, saved, step, stops, steps = same(said, "error", "saved", "step", "stops", "steps")
    assert (error, stops, steps) == ("", True, [2])
    assert list(saved) == ["2"]
    assert step < 100
    assert all("no time" in one["agreed"] for one in said)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_close_serves_what_was_agreed(director: Director, tmp_path: Path, num_ranks: int) -> None:
    said = play(director, tmp_path, "ends_first", num_ranks)
    assert same(said, "error", "saved", "steps", "is_freed") == ["", {}, [15], True]


@pytest.mark.parametrize(
    ("num_ranks", "whom", "late"),
    [
        (2, 1, 0),
        (2, 0, 1),
        pytest.param(2, 1, 1, marks=pytest.mark.slow),
        pytest.param(2, 0, 0, marks=pytest.mark.slow),
        pytest.param(3, 2, 0, marks=pytest.mark.slow),
        pytest.param(3, 2, 1, marks=pytest.mark.slow),
    ],
)
def test_close_serves_a_request_after_the_last_call(
    director: Director, tmp_path: Path, num_ranks: int, whom: int, late: int
) -> None:
    said = play(director, tmp_path, "asks_last", num_ranks, whom=whom, late=late)
    assert same(said, "text", "error", "saved", "steps") == ["", "", {}, [15]]
    assert all("unserved" not in one["kinds"] for one in said)
    assert all("saves: at the end" in one["agreed"] for one in said)


@pytest.mark.parametrize("whom", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_that_leaves_with_an_error_ends_the_agreed_save(
    director: Director, tmp_path: Path, whom: int
) -> None:
    said = play(director, tmp_path, "leaves", 2, whom=whom, is_agreed=True)
    other = said[1 - whom]
    assert said[whom]["error"] == "Mistake"
    assert (other["error"], other["rank"], other["stage"]) == ("SnapshotAborted", whom, "join")
    assert "left the manager with an error" in other["text"]
    assert other["seconds"] < OPTIONS.timeout_s / 4
    assert [kind for kind, _ in other["events"]] == ["agreed", "decided", "failed"]
    assert same(said, "steps") == [[]]


@pytest.mark.slow
@pytest.mark.parametrize("whom", [0, 1])
def test_a_rank_that_leaves_in_an_agreement_stops_no_other(
    director: Director, tmp_path: Path, whom: int
) -> None:
    said = play(director, tmp_path, "leaves", 2, whom=whom, is_agreed=False)
    assert said[1 - whom]["error"] in ("", "SnapshotAborted")
    assert said[1 - whom]["seconds"] < 4 * LOST_AFTER_S
    assert same(said, "steps") == [[]]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_other_calls_come_between(director: Director, tmp_path: Path, num_ranks: int) -> None:
    said = play(director, tmp_path, "restores_between", num_ranks)
    assert same(said, "error", "steps") == ["", [10, 11]]


@each_size
def test_nothing_due_sends_no_message_and_an_agreement_few(
    director: Director, tmp_path: Path, num_ranks: int
) -> None:
    said = play(director, tmp_path, "is_idle", num_ranks)
    for rank, one in enumerate(said):
        assert one["after"] == one["before"]
        assert one["requests"] == 0
        sent, received, _ = one["cost"]
        if rank == 0:
            assert sent <= 2 * (num_ranks - 1)
        else:
            assert sent <= 2
            assert received == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "whom", "where"),
    [(2, 1, "arrived"), (3, 2, "arrived"), (3, 0, "arrived"), (2, 0, "arrived")],
)
def test_a_rank_killed_in_an_agreement(
    director: Director, tmp_path: Path, num_ranks: int, whom: int, where: str
) -> None:
    said = play(director, tmp_path, "dies", num_ranks, dying=whom, whom=whom, where=where)
    for rank, one in enumerate(said):
        if rank != whom:
            assert (one["error"], one["saved"]) == ("", [])
            assert one["step"] == 15 + 400
            assert one["longest_s"] < HOLD_S


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "whom", "where"),
    [
        (2, 0, "arrived"),
        (3, 0, "arrived"),
        (2, 1, "arrived"),
        (2, 1, "answered"),
        (2, 0, "answered"),
    ],
)
def test_a_rank_stopped_in_an_agreement(
    director: Director, tmp_path: Path, num_ranks: int, whom: int, where: str
) -> None:
    said = play(
        director,
        tmp_path,
        "stops",
        num_ranks,
        stopped=whom,
        stop_s=2 * LOST_AFTER_S + 4.0,
        whom=whom,
        where=where,
    )
    firsts = [one["first"] for one in said]
    (error,) = same(firsts, "error")
    assert error in ("", "UsageError", "SnapshotAborted"), firsts
    assert all(one["seconds"] < OPTIONS.timeout_s / 2 for one in firsts)
    # Whatever it was, the next request is served by all.
    error, saved = same(said, "error", "saved")
    assert error == ""
    assert len(saved) >= 1


@pytest.mark.slow
def test_an_answer_that_reaches_one_rank_too_late_fails_the_save_on_all(
    director: Director, tmp_path: Path
) -> None:
    said = play(director, tmp_path, "stops", 3, stopped=0, stop_s=10.0, whom=0, where="half")
    first, second, late = said
    for one in (first, second):
        assert one["first"]["error"] == "SnapshotAborted"
    assert late["first"]["error"] == ""
    assert late["then"]["error"] == "SnapshotAborted"
    assert same(said, "steps") == [[]]


@pytest.mark.slow
def test_a_rank_that_never_calls_again(director: Director, tmp_path: Path) -> None:
    first, _ = play(director, tmp_path, "never_calls_again", 2, closes=False)
    assert first["error"] == "SnapshotAborted"
    assert first["seconds"] < 6.0 + 3.0
    assert "rank 1" in first["text"]


@pytest.mark.slow
def test_a_rank_that_has_closed(director: Director, tmp_path: Path) -> None:
    first, _ = play(director, tmp_path, "never_calls_again", 2, closes=True)
    assert (first["error"], first["saved"], first["step"]) == ("", [], 215)
    assert first["longest_s"] < 1.0
    assert "the manager was closed on rank 1" in first["agreed"]
    # It asks once, and reports what it cannot serve.
    assert first["kinds"] == ["not_agreed", "unserved"]
    assert first["seconds"] < LOST_AFTER_S


@pytest.mark.slow
def test_a_notice_does_not_wait_for_the_pause_after_a_failure(
    director: Director, tmp_path: Path
) -> None:
    said = play(director, tmp_path, "asks_in_vain", 2)
    error, saved, step, stops = same(said, "error", "saved", "step", "stops")
    assert (error, stops) == ("", True)
    assert list(saved) == [str(step)]
    assert said[0]["kinds"][0] == "not_agreed"
    assert all(one["seconds"] < 6.0 for one in said)


@pytest.mark.parametrize(
    ("grace_s", "limit"),
    [
        (None, "2 s (Options.lost_after_s)"),
        pytest.param(3.0, "half of the time that a notice gives", marks=pytest.mark.slow),
    ],
)
def test_warnings_name_the_rank_and_the_limit(
    director: Director, tmp_path: Path, grace_s: float | None, limit: str
) -> None:
    texts, _ = play(director, tmp_path, "is_alone", 2, grace_s=grace_s)
    label = f"{tmp_path / 'run'} rank 0: "
    assert all(text.startswith(label) for text in texts)
    notice, not_agreed, closed, unserved = [text.removeprefix(label) for text in texts]
    assert notice == "notice: spot"
    assert not_agreed.startswith("no save was agreed on: rank 1 did not answer within ")
    assert limit in not_agreed
    assert closed.startswith("closed without the other ranks: lost_after_s=2 has passed; still ")
    assert "waiting for rank 1 to call CheckpointManager.close(" in closed
    assert unserved == "closed without the save that was asked for: spot"


@pytest.mark.slow
def test_a_notice_shortens_the_wait_for_a_silent_rank(director: Director, tmp_path: Path) -> None:
    said = play(director, tmp_path, "hurries", 2)
    error, stops, steps = same(said, "error", "stops", "steps")
    # The grace is over when rank 1 answers.
    assert (error, stops, steps) == ("", True, [])
    assert 2.5 < said[0]["waited_s"] < 5.0
