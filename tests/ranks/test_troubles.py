# SPDX-License-Identifier: Apache-2.0
"""One outcome on all ranks, whatever happens to one of them. Real processes over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.assembled import Assembled, assemble
from tests.support.cases import slow
from tests.worlds import Director


@pytest.fixture(scope="module")
def director() -> Iterator[Director]:
    with Director("tests.ranks.troubles") as director:
        yield director


def check_whole(path: Path, num_ranks: int, fill: float = 1.0) -> Assembled:
    """The snapshot has what ``troubles.state`` says."""
    found = assemble(path)
    for n in range(2):
        expected = torch.full((1 << 20,), fill + n)
        assert torch.equal(found.tensors[f"model/w{n}"], expected)
    for rank in range(num_ranks):
        assert torch.equal(found.private[rank, "own/x"], torch.full((7,), float(rank)))
    assert max(found.nbytes) <= 1.05 * sum(found.nbytes) / num_ranks
    return found


def is_clean(path: Path) -> bool:
    """Whether only the committed attempt's folder is left."""
    return len([entry for entry in path.iterdir() if entry.is_dir()]) == 1


def test_the_store_goes_away(director: Director, tmp_path: Path) -> None:
    said = director.play("direct_loses_the_store", num_ranks=3, path=str(tmp_path / "s"))
    for rank in said:
        assert rank["error"] == "SnapshotAborted"
        # Who notices at once, between the saves, tries to connect again.
        assert "the job's store" in rank["text"]
        assert "its host, rank 0 or torchrun, has most likely ended" in rank["text"]
        assert rank["seconds"] < 60
    check_whole(tmp_path / "s", 3)


def test_a_failure_in_the_background_is_logged_once(director: Director, tmp_path: Path) -> None:
    lines = director.play("direct_fails_in_the_background", num_ranks=3, path=str(tmp_path / "s"))
    assert [len(each) for each in lines] == [1, 0, 0]


def _wrong(director: Director, path: Path, what: str, error: str, *words: str) -> list[Any]:
    """All ranks end the same way, and then save to the same path."""
    said = director.play("direct_wrong", num_ranks=3, what=what, path=str(path))
    for rank in said:
        assert rank["first"]["error"] == error, rank["first"]
        assert rank["first"]["cause"] != error  # not itself once more
        for word in words:
            assert word in rank["first"]["text"]
        assert rank["again"]["error"] == ""
    assert len({rank["first"]["text"] for rank in said}) == 1
    check_whole(path, 3)
    assert is_clean(path)
    return [rank["first"] for rank in said]


@pytest.mark.parametrize(
    ("what", "word"),
    [
        ("path", "path"),
        ("step", "step must be an integer of at least 0, or None, not True"),
        slow("step of rank 0", "step must be an integer of at least 0, or None, not True"),
        slow("options", "options must be actorsnap.Options"),
        ("leaf", "'own/x'"),
        ("globs", "replicated= is ['model/**'] on rank 0, ['model/w0'] on rank 1"),
        ("part", "'sharded/x' is sharded over 3 ranks, but not sharded in the app state of rank 1"),
        slow("no part", "'sharded/x' is sharded over 3 ranks, but is in the app state of ranks 0 "),
        slow("shared", "'sharded/x' is sharded over 3 ranks, but not sharded in the app state of"),
        ("shape", "'model/w1' is float32 (1048576,) on rank 0, float32 (5,) on rank 1"),
    ],
)
def test_bad_input_on_one_rank(director: Director, tmp_path: Path, what: str, word: str) -> None:
    found = _wrong(director, tmp_path / "s", what, "UsageError", word)
    if what not in ("globs", "part", "no part", "shared", "shape"):  # several ranks disagree
        rank = 0 if what == "step of rank 0" else 1
        assert {each["text"].partition(": ")[0] for each in found} == {f"rank {rank}"}


def test_state_dict_raises_on_one_rank(director: Director, tmp_path: Path) -> None:
    """The collective state_dict of a later key does not hang the others."""
    found = _wrong(director, tmp_path / "s", "raises", "SnapshotAborted", "rank 1", "no such thing")
    assert [rank["cause"] for rank in found] == ["KeyError"] * 3
    assert found[0]["stage"] == "capture"
    assert "state_dict() of 'b' in the app state raised this" in found[0]["text"]


def test_state_dict_of_one_rank_does_not_end(director: Director, tmp_path: Path) -> None:
    text = "still waiting for rank 1. A state_dict() call there has not ended"
    _wrong(director, tmp_path / "s", "stuck", "SnapshotAborted", text)


def test_state_dict_takes_long_on_rank_0(director: Director, tmp_path: Path) -> None:
    """As long as ``lost_after_s``, nearly: rank 0 does not take itself for stopped."""
    said = director.play("direct_wrong", num_ranks=3, what="slow", path=str(tmp_path / "s"))
    assert [rank["first"]["error"] for rank in said] == [""] * 3, said


def test_a_storage_error_on_one_rank(director: Director, tmp_path: Path) -> None:
    found = _wrong(director, tmp_path / "s", "storage", "SnapshotAborted", "rank 1")
    assert [rank["cause"] for rank in found] == ["StorageError"] * 3
    assert found[0]["rank"] == 1


def test_the_commit_fails(director: Director, tmp_path: Path) -> None:
    found = _wrong(director, tmp_path / "s", "storage of rank 0", "SnapshotAborted", "rank 0")
    assert [rank["cause"] for rank in found] == ["StorageError"] * 3
    assert found[2]["stage"] == "commit"


@pytest.mark.parametrize("what", ["not shared", "not shared, nothing shared"])
def test_a_path_that_is_not_shared(director: Director, tmp_path: Path, what: str) -> None:
    found = _wrong(
        director, tmp_path / "s", what, "SnapshotAborted", "storage that all ranks share"
    )
    assert found[0]["rank"] in (0, 1, 2)


def test_other_keys_on_each_rank(director: Director, tmp_path: Path) -> None:
    said = director.play("direct_wrong", num_ranks=3, what="keys", path=str(tmp_path / "s"))
    assert [rank["first"]["error"] for rank in said] == [""] * 3
    # It is the second save that lies there now, without these keys.
    assert [rank["again"]["error"] for rank in said] == [""] * 3
    for rank, one in enumerate(said):
        assert one["found"] == {f"{rank}/only{rank}/x": [float(rank)] * 3}


def test_names_that_utf8_cannot_say(director: Director, tmp_path: Path) -> None:
    for rank in director.play("direct_odd_names", num_ranks=2, path=str(tmp_path / "s")):
        assert [one["error"] for one in rank["said"]] == ["", "", "ObjectExists"], rank["said"]
        assert rank["x"] == [3.0] * 5


@pytest.mark.slow  # as in test_phases.py
def test_a_rank_never_arrives(director: Director, tmp_path: Path) -> None:
    said = director.play("direct_wrong", num_ranks=3, what="never", path=str(tmp_path / "s"))
    assert said[1]["first"] is None
    for rank in (0, 2):
        first = said[rank]["first"]
        assert first["error"] == "SnapshotAborted"
        assert "still waiting for rank 1 to call take(" in first["text"]
        assert first["rank"] == 1
        assert first["seconds"] < 30


def test_two_saves_at_once_and_one_that_repeats(director: Director, tmp_path: Path) -> None:
    path = tmp_path / "s"
    said = director.play("direct_two_at_once", num_ranks=3, path=str(path))
    for rank in said:
        assert rank["paths"] == [f"{path}-1", f"{path}-0"]
    for n in range(2):
        check_whole(tmp_path / f"s-{n}", 3)
    assert assemble(tmp_path / "s-2").tensors["model/w0"][0] == 5.0
    # Without the tokens of shared objects and the heartbeats it would be less.
    assert max(rank["bytes"] for rank in said[1:]) <= 600, [rank["bytes"] for rank in said]


def test_two_jobs_at_one_store(director: Director, tmp_path: Path) -> None:
    director.play("direct_one_store", path=str(tmp_path / "s"))
    for job in range(2):
        check_whole(tmp_path / f"s-{job}", 2, fill=float(job))


def test_a_group_of_some_ranks(director: Director, tmp_path: Path) -> None:
    said = director.play("direct_group_of_some", path=str(tmp_path / "s"))
    for rank in (1, 3):
        assert said[rank]["saved"]["error"] == ""
        refused = said[rank]["refused"]
        assert refused["error"] == "UsageError"
        assert "lies on rank(s) 0, 2 too, which do not take part" in refused["text"]
    for rank in (0, 2):
        assert said[rank]["refused"]["error"] == "UsageError"
        assert "not a member of group" in said[rank]["refused"]["text"]
    found = assemble(tmp_path / "s")
    assert [float(found.private[n, "own/x"][0]) for n in range(2)] == [1.0, 3.0]


_CELLS = [
    ("writer", "CancelledError", 0),
    ("join_writer", "KeyboardInterrupt", 1),
    ("write_at", "CancelledError", 1),
    ("release", "SystemExit", 1),
    ("complete", "GeneratorExit", 0),
    ("put", "Unspeakable", 1),
    ("list", "CancelledError", 0),
    ("put_if_absent", "BaseExceptionGroup", 0),
    ("read_into", "CancelledError", 1),
    ("read_into", "KeyboardInterrupt", 0),
    ("state_dict", "Unspeakable", 1),
]


def test_odd_endings_of_a_storage_on_one_rank(director: Director, tmp_path: Path) -> None:
    """Whatever it raises, all ranks end alike, and know where it was."""
    path = tmp_path / "s"
    said = director.play("direct_odd_endings", num_ranks=2, path=str(path), cells=_CELLS)
    for number, (verb, kind, rank) in enumerate(_CELLS):
        firsts = [one[number]["first"] for one in said]
        cell = f"{verb} {kind} on rank {rank}: {firsts}"
        assert {first["error"] for first in firsts} <= {"SnapshotAborted", "StorageError"}, cell
        assert len({first["text"] for first in firsts}) == 1, cell
        assert ("Unspeakable" if verb == "state_dict" else f"{verb} of ") in firsts[0]["text"], cell
        if firsts[0]["error"] == "SnapshotAborted":
            assert {first["rank"] for first in firsts} == {rank}, cell
            assert firsts[0]["stage"] in ("capture", "join", "store", "commit"), cell
            causes = {first["cause"] for first in firsts}
            assert causes <= {"StorageError"} or verb == "state_dict", (cell, causes)
        assert max(first["seconds"] for first in firsts) < 40, cell  # of 60
        assert {one[number]["again"] for one in said} == {""}, cell
    check_whole(tmp_path / "s-whole", 2)
    check_whole(tmp_path / "s-0", 2)
