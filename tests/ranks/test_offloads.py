# SPDX-License-Identifier: Apache-2.0
"""Saves of many ranks by their uploader processes. Real processes over gloo.

What they save is what threads save. Whatever dies, all ranks have one outcome in time, the job can
save there again, and no process and no memory is left behind.
"""

from __future__ import annotations

import inspect
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actorsnap import errors
from actorsnap.sync import Snapshot
from tests.held import actorsnap_raising
from tests.ranks.assembled import assemble
from tests.ranks.models import MODULES
from tests.ranks.offloads import LOST_AFTER_S
from tests.support import forker
from tests.support.cases import slow
from tests.worlds import ROOT, Director

pytestmark = pytest.mark.usefixtures("forker")

LEAVES = """
import sys, torch
from actorsnap import Options, StateDict
from actorsnap.sync import Snapshot
state = {"own": StateDict(x=torch.ones(10_000_000))}
options = eval(f"Options({sys.argv[2]})")
pending = Snapshot.async_take(sys.argv[1], state, options=options)
"""


@pytest.fixture(scope="module")
def director() -> Iterator[Director]:
    with Director("tests.ranks.offloads", *MODULES) as director:
        yield director


@pytest.fixture(autouse=True)
def _no_names() -> Iterator[None]:
    before = set(os.listdir("/dev/shm"))
    yield
    left = set(os.listdir("/dev/shm")) - before
    # Other programs' ones come and go, and benchmarks'.
    assert [name for name in left if "actorsnap" in name and "bench" not in name] == []


def check_alike(said: list[dict[str, Any]], error: str, *words: str) -> None:
    """All ranks have the same error."""
    for rank in said:
        assert rank["error"] == error, rank
        for word in words:
            assert word in rank["text"], rank
    assert len({rank["text"] for rank in said}) == 1, said


def check_saved(path: Path, number: int) -> None:
    assert Snapshot(str(path)).verify("full").ok
    found = assemble(path)
    assert set(found.tensors["model/w0"].tolist()) == {float(number)}
    assert found.num_duplicates == 0


def kinds(director: Director, tmp_path: Path, num_ranks: int, *names: str) -> None:
    said = director.play("direct_kinds", num_ranks=num_ranks, path=str(tmp_path), names=names)
    pids = {one["pid"] for rank in said for one in rank}
    assert len(pids) == num_ranks  # one each, for all of them
    for number, name in enumerate(names):
        thread, process = (Snapshot(f"{tmp_path}/{name}-{how}") for how in ("thread", "process"))
        assert process.verify("full").ok
        assert process.get_manifest() == thread.get_manifest()
        # Rank 0's process gets the messages of all ranks.
        assert max(rank[number]["nbytes"] for rank in said) <= 1024 * (1 + num_ranks)
        if name == "experts":
            continue  # of one name, and not the same
        one, again = assemble(tmp_path / f"{name}-process"), assemble(tmp_path / f"{name}-again")
        assert one.num_duplicates == again.num_duplicates
        assert (one.num_duplicates > 0) == (name in ("tied", "fsdp2_and_tp"))
        left: dict[Any, torch.Tensor] = {**one.tensors, **one.private}
        right: dict[Any, torch.Tensor] = {**again.tensors, **again.private}
        assert left.keys() == right.keys()
        for leaf, value in left.items():
            expected = value * 2 if value.is_floating_point() else value
            assert torch.equal(right[leaf], expected), leaf


@pytest.mark.parametrize("names", [["ddp", "fsdp2"], slow(["sharded_tensor", "pipeline"])])
def test_processes_save_what_threads_save(
    director: Director, tmp_path: Path, names: list[str]
) -> None:
    kinds(director, tmp_path, 2, *names)


@pytest.mark.slow
def test_processes_save_what_threads_save_of_four_ranks(director: Director, tmp_path: Path) -> None:
    """Shards that meshes repeat, and names that lie on several meshes."""
    kinds(director, tmp_path, 4, "hsdp", "tied", "experts", "fsdp2_and_tp", "tensor_parallel")


@pytest.mark.slow
def test_saves_of_all_ways_in_any_order(director: Director, tmp_path: Path) -> None:
    said = director.play("direct_mixture", num_ranks=2, path=str(tmp_path))
    assert [rank["restored"] for rank in said] == [0.0, 0.0]
    assert said[0]["by_process"] == [True, False, True, False, True, True, True]
    assert [rank["child"] for rank in said] == [0, 0]  # a forked one is refused
    for rank in said:
        assert not rank["leaks"]
        assert rank["names"] == [0, 0]
    for number in (0, 1, 2, 3, 4, 7):
        check_saved(tmp_path / str(number), number)
    compressed = Snapshot(str(tmp_path / "5"))
    assert compressed.verify("full").ok
    assert set(compressed.read_object("model/w0").tolist()) == {5.0}
    assert list(tmp_path.glob("5/*/data/*/*.chunks/*"))


def test_saves_to_one_path_commit_in_the_order_of_their_calls(
    director: Director, tmp_path: Path
) -> None:
    director.play("direct_overwrites", num_ranks=2, path=str(tmp_path))
    for number in range(4):
        check_saved(tmp_path / str(number), 1)


def test_each_rank_decides_for_itself_where_it_is_left_to_the_runtime(
    director: Director, tmp_path: Path
) -> None:
    """Ranks that save by threads and ranks that save by their processes make one snapshot."""
    said = director.play("direct_auto", num_ranks=2, path=str(tmp_path))
    neither, both, first, second = (False, False), (True, True), (True, False), (False, True)
    by_process = [
        neither,  # it is small
        neither,  # there is no process yet
        both,
        first,  # rank 1's part is small
        second,
        both,  # lazily
        second,
        second,  # rank 0 is told to save by threads
        both,  # rank 1 is told to save by its process
        neither,
    ]
    for number, expected in enumerate(by_process):
        outcomes = [rank[number] for rank in said]
        assert [rank["error"] for rank in outcomes] == ["", ""], (number, outcomes)
        assert tuple(rank["by_process"] for rank in outcomes) == expected, number
        check_saved(tmp_path / str(number), number)
    cancelled = [rank[10] for rank in said]
    if cancelled[0]["error"]:  # else the commit was faster
        check_alike(cancelled, "SnapshotAborted", "cancel")
    for number, interrupted in ((13, 1), (14, 1), (15, 0), (16, 0)):
        check_alike([said[1 - interrupted][number]], "SnapshotAborted", "interrupted")
        # Not at the deadline.
        assert max(rank[number]["seconds"] for rank in said) < 10.0, (number, said)
    for number in (11, 12, 17, 18):
        assert [rank[number]["error"] for rank in said] == ["", ""]
        check_saved(tmp_path / str(number), number)


def test_warm_up_gets_the_processes_of_ranks_ready(director: Director, tmp_path: Path) -> None:
    assert director.play("direct_warmed", num_ranks=2, path=str(tmp_path / "s")) == [True, True]


@pytest.mark.parametrize(
    "options", ["detach=True", pytest.param("offload='process'", marks=pytest.mark.slow)]
)
def test_ranks_exit_behind_a_save(tmp_path: Path, options: str) -> None:
    """Rank 0 hosts the store, so it waits also for what is detached."""
    path = tmp_path / "s"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            forker.command("-c", LEAVES, str(path), options),
            cwd=ROOT,
            env={**os.environ, **job, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=180)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    assert not any("aborted" in each or "Traceback" in each for each in said), said
    assert sorted(assemble(path).private) == [(0, "own/x"), (1, "own/x")]


def test_ranks_at_a_store_without_an_address_do_not_detach(
    director: Director, tmp_path: Path
) -> None:
    """Their processes save all the same; the trainers are told once that they wait."""
    for said in director.play("direct_plain", num_ranks=2, path=str(tmp_path)):
        [line] = said["lines"]
        assert "the ranks' store is no TCPStore, and has no address" in line
        assert said["num_by_process"] == 3
    for number in range(3):
        check_saved(tmp_path / str(number), 1)


def test_what_only_one_rank_does(director: Director, tmp_path: Path) -> None:
    cases = {
        "1 leaf": ("UsageError", "'own/x'"),
        "0 leaf": ("UsageError", "'own/x'"),
        "1 by thread": ("", ""),
        "0 by thread": ("", ""),
        "1 options": ("UsageError", "options must be"),
        "0 options": ("UsageError", "options must be"),
        "1 restores": ("UsageError", "same calls in the same order"),
        "0 restores": ("UsageError", "same calls in the same order"),
        "1 is cancelled": ("SnapshotAborted", "cancel"),
        "0 is cancelled": ("SnapshotAborted", "cancel"),
        "1 is interrupted": ("SnapshotAborted", "the caller was interrupted"),
        "0 is interrupted": ("SnapshotAborted", "the caller was interrupted"),
        "1 is interrupted among threads": ("SnapshotAborted", "the caller was interrupted"),
        "0 is interrupted among threads": ("SnapshotAborted", "the caller was interrupted"),
    }
    said = director.play("direct_unlike", num_ranks=2, path=str(tmp_path), cases=list(cases))
    for number, (case, (error, word)) in enumerate(cases.items()):
        first = [rank[number]["first"] for rank in said]
        if "interrupted" in case:
            del first[int(case[0])]  # its caller has got the interrupt
            assert first[0]["seconds"] < LOST_AFTER_S
        if word == "cancel" and not first[0]["error"]:
            check_alike(first, "")  # the commit was faster
        else:
            check_alike(first, error, word)
        assert max(rank["seconds"] for rank in first) < 30
        assert [rank[number]["again"]["error"] for rank in said] == ["", ""], said
        assert Snapshot(f"{tmp_path}/{number}").verify("full").ok


def dying(director: Director, tmp_path: Path, *cases: tuple[int, str, str]) -> list[Any]:
    said = director.play("direct_dying_processes", num_ranks=3, path=str(tmp_path), cases=cases)
    for number, one in enumerate(said):
        assert [rank["error"] for rank in one["again"]] == [""] * 3, one
        check_saved(tmp_path / str(number) / "s", number + 100)
    return [one["ended"] for one in said]


def test_a_process_is_killed(director: Director, tmp_path: Path) -> None:
    """Before all have stored, and when the commit is there."""
    other, committed = dying(
        director, tmp_path, (1, "SIGKILL", "manifest"), (0, "SIGKILL", "committed")
    )
    check_alike(other, "SnapshotAborted", "rank 1", "SIGKILL")
    assert max(rank["seconds"] for rank in other) < LOST_AFTER_S  # nobody has to wait for it
    assert [rank["error"] for rank in committed] == [""] * 3, committed


@pytest.mark.slow
def test_another_process_is_killed(director: Director, tmp_path: Path) -> None:
    """The one that coordinates, and one when the commit is only to be written."""
    leader, committing = dying(
        director, tmp_path, (0, "SIGKILL", "manifest"), (2, "SIGKILL", "commit")
    )
    check_alike(leader, "SnapshotAborted", "rank 0", "SIGKILL")
    assert [rank["error"] for rank in committing] == [""] * 3, committing


@pytest.mark.slow
def test_a_process_is_stopped(director: Director, tmp_path: Path) -> None:
    other, leader = dying(
        director, tmp_path, (1, "SIGSTOP", "manifest"), (0, "SIGSTOP", "manifest")
    )
    check_alike(other, "SnapshotAborted", "rank 1")
    for rank in leader:
        assert rank["error"] == "SnapshotAborted", leader
        assert rank["seconds"] < 30


@pytest.mark.parametrize("ranks", [pytest.param([1], marks=pytest.mark.slow), [0]])
def test_a_rank_whose_process_cannot_be_started_takes_part_itself(
    director: Director, tmp_path: Path, ranks: list[int]
) -> None:
    [said] = director.play(
        "direct_dying_processes",
        num_ranks=2,
        path=str(tmp_path),
        cases=[(0, "", "manifest")],
        cannot_start=ranks,
    )
    for when in ("ended", "again"):
        assert [rank["error"] for rank in said[when]] == ["", ""], said
    check_saved(tmp_path / "0" / "s", 100)


@pytest.mark.parametrize(
    ("victim", "is_called"),
    [
        (1, True),
        pytest.param(0, True, marks=pytest.mark.slow),
        pytest.param(0, False, marks=pytest.mark.slow),
        pytest.param(1, False, marks=pytest.mark.slow),
    ],
)
def test_a_trainer_is_killed(
    director: Director, tmp_path: Path, victim: int, is_called: bool
) -> None:
    """Its process ends, too, and the others hear of it."""
    said = director.play(
        "direct_dying_trainers",
        num_ranks=3,
        path=str(tmp_path),
        victims=[victim],
        is_called=is_called,
    )
    for rank in said["others"]:
        assert rank["error"] == "SnapshotAborted", rank
        assert rank["rank"] == victim
        assert rank["seconds"] < 30
        assert "heard for 0 s" not in rank["text"]
        assert re.search("ended|nothing for [1-9]", rank["text"]), rank["text"]
    check_saved(tmp_path / "s", 1)  # the one before


@pytest.mark.slow
def test_a_trainer_is_stopped_while_it_stages(director: Director, tmp_path: Path) -> None:
    said = director.play("direct_stopped_trainer", num_ranks=3, path=str(tmp_path), victim=1)
    check_alike(said["others"], "SnapshotAborted", "rank 1", "or stopped")
    assert said["stopped"]["text"] == said["others"][0]["text"]
    assert [rank["error"] for rank in said["again"]] == [""] * 3
    check_saved(tmp_path / "s", 3)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_trainer_that_is_stopped_after_it_has_staged_is_lost(
    director: Director, tmp_path: Path, victim: int
) -> None:
    """Its process goes on, but heartbeats are the trainer's."""
    said = director.play(
        "direct_stopped_after_staging", num_ranks=3, path=str(tmp_path), victim=victim
    )
    for rank in [*said["others"], said["stopped"]]:
        assert rank["error"] == "SnapshotAborted", said
        assert rank is said["stopped"] or f"rank {victim}" in rank["text"], said
    assert [rank["error"] for rank in said["again"]] == [""] * 3
    check_saved(tmp_path / "s", 3)


def test_processes_commit_what_all_trainers_had_staged(director: Director, tmp_path: Path) -> None:
    said = director.play("direct_detached", num_ranks=3, path=str(tmp_path))
    assert said == {"was_alive": True, "is_committed": True}
    check_saved(tmp_path / "s", 1)
    assert len(assemble(tmp_path / "s").private) == 6


@pytest.mark.slow  # as above, of one trainer
def test_rank_0s_trainer_dies_before_the_commit_of_a_detached_save(
    director: Director, tmp_path: Path
) -> None:
    said = director.play("direct_died_before_the_commit", num_ranks=2, path=str(tmp_path))
    assert said["is_committed"], said
    assert [rank["error"] for rank in said["others"]] == [""], said
    check_saved(tmp_path / "s", 1)


_CLASSES = sorted(
    name
    for name, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.ActorSnapError) and kind is not errors.ActorSnapError
)


@pytest.mark.parametrize("names", [["StorageFull", "UsageError"], slow(_CLASSES)], ids=len)
def test_each_error_arrives(director: Director, tmp_path: Path, names: list[str]) -> None:
    """From a thread or the process of rank 1, at rank 1 and at rank 0: the same error, with the
    storage's own as a cause, which has its class, text, fields, notes and cause."""
    said = director.play("direct_errors", num_ranks=2, path=str(tmp_path), names=names)
    for number, name in enumerate(names):
        made = actorsnap_raising.error_of_class(name)
        for engine in ("thread", "process"):
            other, own = (rank[number][engine] for rank in said)
            assert own == other, (name, engine)
            assert own[0][0] == "SnapshotAborted"
            assert "rank 1" in own[0][1]
            expected = [name, str(made), repr(made.fields), errors.notes_of(made)]
            assert expected in own[1:], (name, engine, own)
            assert own[-1][:2] == ["OSError", str(made.__cause__)], (name, engine)
        # All but the names of the attempts.
        assert {link[0] for link in said[0][number]["thread"]} == {
            link[0] for link in said[0][number]["process"]
        }
