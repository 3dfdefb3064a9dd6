# SPDX-License-Identifier: Apache-2.0
"""Ranks that are out of phase, and ranks that do not call. Real processes over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.models import MODULES
from tests.support.cases import slow
from tests.worlds import Director

NUM_RANKS = 3


@pytest.fixture(scope="module")
def director() -> Iterator[Director]:
    with Director("tests.ranks.phases", *MODULES) as director:
        yield director


@pytest.mark.parametrize(
    ("case", "offload", "others", "odd"),
    [
        ("step", "thread", "async_take('{s}', step=2)", "async_take('{s}', step=3)"),
        slow("step", "process", "async_take('{s}', step=2)", "async_take('{s}', step=3)"),
        ("path", "thread", "async_take('{s}')", "async_take('{t}')"),
        slow("path", "process", "async_take('{s}')", "async_take('{t}')"),
        ("kind", "thread", "async_take('{s}', step=2)", "take('{s}', step=2)"),
        slow("kind", "process", "async_take('{s}', step=2)", "take('{s}', step=2)"),
        ("restore", "thread", "take('{s}', step=2)", "restore('{s}')"),
        ("restore of what is not there", "thread", "async_take('{s}')", "restore('{gone}')"),
        slow("restore of what is not there", "process", "async_take('{s}')", "restore('{gone}')"),
        ("other restore", "thread", "restore('{s}')", "restore('{gone}')"),
        ("other existing restore", "thread", "restore('{s}')", "restore('{t}')"),
        ("dry run", "thread", "restore('{s}')", "plan_restore('{s}')"),
    ],
)
def test_a_rank_out_of_phase_is_everybodys_error(
    director: Director, tmp_path: Path, case: str, offload: str, others: str, odd: str
) -> None:
    said = director.play(
        "direct_out_of_phase", num_ranks=NUM_RANKS, path=str(tmp_path), case=case, offload=offload
    )
    paths = {name: f"{tmp_path}/{name}" for name in ("s", "t", "gone")}
    shown = f"ranks 0 and 2: {others.format(**paths)}; rank 1: {odd.format(**paths)}. "
    for rank in said:
        assert rank["first"]["error"] == "UsageError", rank["first"]
        assert shown in rank["first"]["text"]
        assert "or whose manager has another save= policy" in rank["first"]["text"]
        assert rank["first"]["seconds"] < 30
        assert rank["changed"] == []
        assert rank["again"]["error"] == "", rank["again"]
        assert rank["restored"]["error"] == "", rank["restored"]
        assert set(rank["value"]) == {4.0}
        assert rank["step"] == 4
    assert len({rank["first"]["text"] for rank in said}) == 1


def test_paths_that_are_spelled_otherwise_are_equal(director: Director, tmp_path: Path) -> None:
    said = director.play(
        "direct_out_of_phase",
        num_ranks=NUM_RANKS,
        path=str(tmp_path),
        case="spelling",
        offload="thread",
    )
    assert [rank["first"]["error"] for rank in said] == [""] * NUM_RANKS, said
    assert [rank["again"]["error"] for rank in said] == [""] * NUM_RANKS


@pytest.mark.parametrize(
    ("call", "offload"),
    [("take", "thread"), slow("async_take", "process"), slow("restore", "thread")],
)
def test_only_rank_0_calls(director: Director, tmp_path: Path, call: str, offload: str) -> None:
    said = director.play(
        "direct_late",
        num_ranks=NUM_RANKS,
        path=str(tmp_path),
        call=call,
        whom=[0],
        offload=offload,
    )
    step = "" if call == "restore" else ", step=2"
    text = f"waiting for ranks 1 and 2 to call {call}('{tmp_path}/s'{step}): every rank has to"
    assert len(said[0]["lines"]) == 3
    assert all(text in line for line in said[0]["lines"]), said[0]["lines"]
    first = said[0]["first"]
    assert first["error"] == ("RestoreAborted" if call == "restore" else "SnapshotAborted")
    assert f"timeout_s=3 has passed; still {text}" in first["text"]
    assert [rank["first"] for rank in said[1:]] == [None, None]
    check_late(said, whom=[0])


def check_late(said: list[Any], whom: list[int]) -> None:
    """A rank that calls late gets the error of the ranks that had called, at once."""
    texts = {rank["first" if n in whom else "late"]["text"] for n, rank in enumerate(said)}
    assert len(texts) == 1, texts
    assert all(rank["late"]["seconds"] < 5.0 for rank in said if rank["late"] is not None)
    assert [rank["again"]["error"] for rank in said] == [""] * NUM_RANKS


@pytest.mark.parametrize(
    ("call", "offload"),
    [slow("take", "thread"), slow("async_take", "process"), ("restore", "thread")],
)
def test_rank_0_does_not_call(director: Director, tmp_path: Path, call: str, offload: str) -> None:
    said = director.play(
        "direct_late",
        num_ranks=NUM_RANKS,
        path=str(tmp_path),
        call=call,
        whom=[1, 2],
        offload=offload,
    )
    for rank in said[1:]:
        assert len(rank["lines"]) == 3
        assert all(f"waiting for rank 0 to call {call}(" in line for line in rank["lines"])
        assert "still waiting for rank 0 to call" in rank["first"]["text"]
    check_late(said, whom=[1, 2])


@pytest.mark.slow  # as above, of another rank
def test_all_that_wait_name_who_is_absent(director: Director, tmp_path: Path) -> None:
    said = director.play(
        "direct_late",
        num_ranks=NUM_RANKS,
        path=str(tmp_path),
        call="take",
        whom=[0, 2],
        offload="thread",
    )
    for rank in (0, 2):
        assert len(said[rank]["lines"]) == 3
        assert all("waiting for rank 1 to call take(" in line for line in said[rank]["lines"])
    assert said[0]["first"]["text"] == said[2]["first"]["text"]
    assert "still waiting for rank 1 to call take(" in said[0]["first"]["text"]
    check_late(said, whom=[0, 2])


@pytest.mark.few(2)
@pytest.mark.parametrize("offload", ["thread", "process"])
@pytest.mark.parametrize("whom", [[1], [1, 2], [0], [0, 2]])
def test_ranks_that_have_skipped_a_call_are_back_at_the_next(
    director: Director, tmp_path: Path, whom: list[int], offload: str
) -> None:
    following = ["save", "save", "restore"]
    check_skipped(director, tmp_path, whom, offload, "save", following)


@pytest.mark.few(1)
@pytest.mark.parametrize("whom", [[0], [0, 2], [1]])
@pytest.mark.parametrize(
    ("missed", "following"),
    [("save", ["restore", "save", "restore"]), ("restore", ["save", "save", "restore"])],
)
def test_the_next_call_after_a_skipped_one_may_be_of_another_kind(
    director: Director, tmp_path: Path, whom: list[int], missed: str, following: list[str]
) -> None:
    check_skipped(director, tmp_path, whom, "thread", missed, following)


def check_skipped(
    director: Director,
    path: Path,
    whom: list[int],
    offload: str,
    missed: str,
    following: list[str],
) -> None:
    """All calls after the skipped one succeed."""
    said = director.play(
        "direct_skipped",
        num_ranks=NUM_RANKS,
        path=str(path),
        whom=whom,
        offload=offload,
        missed=missed,
        following=following,
    )
    for number, rank in enumerate(said):
        if number not in whom:
            assert "still waiting for rank" in rank["first"]["text"]
        assert [call["error"] for call in rank["again"]] == ["", "", ""], rank["again"]
        assert set(rank["value"]) == {4.0}
