# SPDX-License-Identifier: Apache-2.0
"""``CheckpointManager`` on several real ranks: one outcome on all, whatever happens to one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actorsnap import IncompatibleState, StateDict
from actorsnap.manager.sync import CheckpointManager
from actorsnap.sync import Snapshot
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


def test_all_fall_back_from_a_step_that_vanishes(director: Director, tmp_path: Path) -> None:
    said = play(director, tmp_path, "vanishes", 2)
    assert same(said, "error", "found") == ["", 10]
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
    assert text.count("differs from what was saved") == 2


@pytest.mark.parametrize(
    ("has_it", "call", "says"),
    [
        (0, "restore_latest", "rank 0 finds /proc/self/cwd/run/step-0000000010.g1, and this rank"),
        (0, "restore", "rank 0 finds /proc/self/cwd/run/step-0000000010.g1, and this rank"),
        (1, "restore_latest", "this rank sees snapshots at /proc/self/cwd/run, and rank 0"),
    ],
)
def test_a_root_that_only_one_rank_sees(
    director: Director, tmp_path: Path, has_it: int, call: str, says: str
) -> None:
    for rank in (0, 1):
        (tmp_path / "run" / str(rank)).mkdir(parents=True)
    with CheckpointManager(tmp_path / f"run/{has_it}/run", options=OPTIONS) as manager:
        manager.save(10, app_state={"train": StateDict(weight=torch.ones(300), step=10)})
    said = play(director, tmp_path, "not_shared", 2, call=call)
    error, text, rank, stage = same(said, "error", "text", "rank", "stage")
    assert (error, rank, stage) == ("RestoreAborted", 1, "join")
    assert says in text
    assert "use a path on storage that all ranks share" in text
    assert "delete" not in text


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


@pytest.mark.parametrize(
    ("num_saved", "path"), [(0, "/run'"), (1, "/run/step-0000000005.g1'")], ids=["first", "second"]
)
def test_a_rank_with_another_policy(
    director: Director, tmp_path: Path, num_saved: int, path: str
) -> None:
    waits, passes = play(director, tmp_path, "has_another_policy", 2, num_saved=num_saved)
    assert (waits["error"], passes["error"]) == ("SnapshotAborted", "")
    assert "waiting for rank 1 to call CheckpointManager.maybe_save('" in waits["text"]
    assert (
        f"{path}, step=5): every rank has to call it, with the same save= policy" in waits["text"]
    )


def test_messages_name_the_managers_calls(director: Director, tmp_path: Path) -> None:
    said = play(director, tmp_path, "call_by_other_names", 2)
    assert same(said, "steps") == [[0]]
    assert same([one["said"][0] for one in said], "error") == [""]
    error, text = same([one["said"][1] for one in said], "error", "text")
    assert error == "UsageError"
    assert re.search(
        r"rank 0: CheckpointManager\.maybe_save\('[^']+', step=10\); "
        r"rank 1: CheckpointManager\.save\('[^']+', step=10\)",
        text,
    )


@each_size
@pytest.mark.parametrize(
    ("trouble", "whom", "raised", "begun"),
    [
        ("list_folders", 0, "StorageError", [0]),
        ("stat", 0, "SnapshotAborted", [0]),
        ("put_if_absent", 0, "SnapshotAborted", []),
        ("metrics", 0, "SnapshotAborted", [0]),
        ("metrics", 1, "SnapshotAborted", [0]),
    ],
)
def test_the_trouble_of_one_is_raised_by_all(
    director: Director,
    tmp_path: Path,
    num_ranks: int,
    trouble: str,
    whom: int,
    raised: str,
    begun: list[int],
) -> None:
    said = play(director, tmp_path, "has_trouble", num_ranks, trouble=trouble, whom=whom)
    error, text, steps = same(said, "error", "text", "steps")
    assert error == raised
    if raised == "SnapshotAborted" and trouble != "metrics":
        assert same(said, "rank", "stage") == [0, "join"]
    if trouble == "put_if_absent":
        assert same(said, "cause") == ["StorageError"]
    assert ("no such metric" if trouble == "metrics" else "a scripted fault") in text
    assert steps == [*begun, 20]
    assert all(one["seconds"] < OPTIONS.timeout_s / 2 for one in said)


@each_size
@pytest.mark.parametrize(
    ("trouble", "stage"), [("write", "eager"), ("write", "lazy"), ("metrics", "lazy")]
)
def test_a_failure_in_the_background_is_raised_by_all_in_one_call(
    director: Director, tmp_path: Path, num_ranks: int, trouble: str, stage: str
) -> None:
    said = play(director, tmp_path, "fails_apart", num_ranks, trouble=trouble, stage=stage)
    error, raised, saved, steps = same(said, "error", "raised", "saved", "steps")
    assert error == ""
    ((step, text),) = raised
    assert step == 4
    assert "rank 1" in text
    assert ("no such metric" if trouble == "metrics" else "a scripted fault") in text
    assert (saved, steps) == ([0, 2, 6, 8], [0, 4, 6, 8])  # the call that raises saves its step
    assert all(one["all_s"] < OPTIONS.timeout_s / 4 for one in said)


def test_a_failure_that_only_close_can_raise(director: Director, tmp_path: Path) -> None:
    said = play(director, tmp_path, "fails_apart", 2, trouble="write", stage="eager", ends_at=3)
    error, raised, saved, steps = same(said, "error", "raised", "saved", "steps")
    assert (error, raised) == ("SnapshotAborted", [])
    assert (saved, steps) == ([0, 2], [0, 3])  # it saves the last step first


@pytest.mark.few
@each_size
@pytest.mark.parametrize("whom", [1, 0])
@pytest.mark.parametrize(
    ("how", "then", "calls"),
    [
        ("closes", "saves twice", 2),
        ("fails", "waits", 1),
        ("unsaved", "saves", 1),
        ("closes", "restores", 1),
        ("closes", "closes", 0),
    ],
)
def test_a_rank_that_ends_early_is_named_by_the_others_at_once(
    director: Director,
    tmp_path: Path,
    num_ranks: int,
    whom: int,
    how: str,
    then: str,
    calls: int,
) -> None:
    said = play(director, tmp_path, "ends_early", num_ranks, whom=whom, how=how, then=then)
    assert same(said, "found", "steps") == [10, [0, 10, 20, 30]]
    did = {
        "closes": "closed its manager after step 10",
        "fails": "left its manager with an error after step 10: ValueError: bad batch",
        "unsaved": "closed its manager after step 12",
    }[how]
    for rank, one in enumerate(said):
        if rank == whom:
            # Its process lives on, and learns of failed saves.
            warned = f"rank {whom}: a save of the other ranks failed: rank {whom} {did}; it had not"
            assert all(text.startswith(warned) for text in one["texts"])
            assert bool(one["texts"]) == (then not in ("restores", "closes"))
            continue
        *failed, closed = one["said"]
        assert len(failed) == calls
        for each in failed:
            assert each["error"] == ("RestoreAborted" if then == "restores" else "SnapshotAborted")
            assert (each["rank"], each["stage"]) == (whom, "join")
            assert f"rank {whom} {did}; it had not called " in each["text"]
        assert closed["error"] == ""
        assert all(each["seconds"] < OPTIONS.lost_after_s for each in one["said"])


@pytest.mark.parametrize("whom", [1, 0])
def test_a_rank_that_ends_early_while_the_others_save(
    director: Director, tmp_path: Path, whom: int
) -> None:
    """Its last step is not saved, so its ``close`` asks the others."""
    said = play(director, tmp_path, "ends_early", 2, whom=whom, how="unsaved", then="waits")
    assert same(said, "found", "steps") == [10, [0, 10, 20, 30]]
    failed, closed = said[1 - whom]["said"]
    assert (failed["error"], failed["rank"], failed["stage"]) == ("SnapshotAborted", whom, "join")
    assert f"rank {whom} has closed its CheckpointManager, and had not called" in failed["text"]
    assert closed["error"] == ""


@each_size
@pytest.mark.parametrize("what", ["goes_back", "save", "restore_latest", "restore"])
def test_the_objection_of_one_is_raised_by_all(
    director: Director, tmp_path: Path, num_ranks: int, what: str
) -> None:
    said = play(director, tmp_path, "objects", num_ranks, case=what, whom=1)
    error, text, found, steps = same(said, "error", "text", "found", "steps")
    assert error == "UsageError"
    assert ("must not go back" if what == "goes_back" else "no app state") in text
    assert (found, steps) == (10, [0, 10, 30])
    assert all(one["seconds"] < OPTIONS.timeout_s / 4 for one in said)


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


def test_a_tier_that_all_see(director: Director, tmp_path: Path) -> None:
    tier = str(tmp_path / "tier")
    said = play(director, tmp_path, "has_tier", 2, tiers=[tier, tier])
    assert same(said, "error", "found", "skipped", "place") == ["", 20, [], "tier"]
    # Rank 1's data is damaged at the tier: found while restoring.
    thirds = [one["third"] for one in said]
    assert same(thirds, "found", "skipped") == [20, ["step-0000000020.g1"]]
    assert [one["state"][-1] for one in thirds] == [1020.0, 2020.0]
    assert same(said, "then") == ["run"]


@pytest.mark.parametrize("others", ["other", ""])
def test_a_tier_that_one_rank_does_not_see(director: Director, tmp_path: Path, others: str) -> None:
    tiers = [str(tmp_path / "tier"), others and str(tmp_path / others)]
    said = play(director, tmp_path, "has_tier", 2, tiers=tiers)
    error, text = same(said, "error", "text")
    assert error == "UsageError"
    assert "rank 1 " in text
    assert "must be seen by all ranks" in text
    assert not [*tmp_path.glob("*/step-*")]


@each_size
def test_xlas_calls(director: Director, tmp_path: Path, num_ranks: int) -> None:
    said = play(director, tmp_path, "like_xla", num_ranks)
    error, taken, steps, epoch, weight = same(said, "error", "taken", "steps", "epoch", "weight")
    assert (error, steps, epoch, weight) == ("", [0, 10], 0, [0.0])
    assert [step for step, is_taken in enumerate(taken) if is_taken] == [0, 10, 12]
    (num_bytes,) = same(said, "num_bytes")
    assert 300 * 4 < num_bytes < 4096 + 2 * 300 * 4  # once, after a header


def test_rank_0_shows_progress(director: Director, tmp_path: Path) -> None:
    said = play(director, tmp_path, "shows_progress", 2)
    assert [one["num_shown"] > 0 for one in said] == [True, False]


def test_a_layer_that_drifted_apart_is_no_damage(director: Director, tmp_path: Path) -> None:
    """The snapshot is whole: no older one is restored in its place."""
    path = str(tmp_path / "run")
    _, two, four = director.play("direct_resumes_with", sizes=[4, 2, 4], path=path, what="drifts")
    error, text = same(two, "error", "text")
    assert error == "IncompatibleState"
    assert "rank 1: model/norm.weight: ranks stored different values" in text
    assert "(32,) up to (64,)" in text
    assert "the mesh and number of ranks of the save" in text
    assert "older" not in text
    assert "actorsnap rm" not in text
    for one in two:
        assert one["norm"] == [-1.0], "nothing is changed"
        assert len(one["plan"]) == 1
        assert "model/norm.weight: ranks stored different values" in one["plan"][0]
        assert (one["earlier"], one["now"]) == ("", [1.0])
    # Rank 0 gets back its own part, which is as wide now.
    assert [one["left"] for one in two] == [[2.0], [-1.0]]
    assert [len(one["lenient"]) for one in two] == [0, 1]
    assert same(four, "error") == [""]
    assert [one["norm"] for one in four] == [[2.0 + one["tp"]] for one in four]
    found = Snapshot(f"{path}/step-0000000010.g1")
    assert found.verify("full").ok
    with pytest.raises(IncompatibleState, match="several values for a part"):
        found.read_object("model/norm.weight")


@each_size
def test_what_all_ranks_find_names_no_rank_as_the_first(
    director: Director, tmp_path: Path, num_ranks: int
) -> None:
    said = play(director, tmp_path, "does_not_fit", num_ranks)
    for one in said:
        notes = [*one["unfit"], *one["absent"]]
        assert not [note for note in notes if "the first to fail" in note]


def test_a_root_that_is_a_file_is_one_error_on_all(director: Director, tmp_path: Path) -> None:
    for lines in play(director, tmp_path, "finds_a_file", 2):
        text = "".join(lines)
        assert "this is a file; a snapshot is a folder" in text
        assert "ExceptionGroup" not in text
        assert "direct cause" not in text


def test_a_process_group_that_ends_before_the_manager(director: Director, tmp_path: Path) -> None:
    for rank, texts in enumerate(play(director, tmp_path, "ends_the_group", 2)):
        assert not [text for text in texts if "did not answer" in text]
        (text,) = [text for text in texts if "destroy_process_group" in text]
        assert text == (
            f"{tmp_path / 'run'} rank {rank}: destroy_process_group() was called before the "
            "manager was closed: call it after the with block, or saves fail"
        )
