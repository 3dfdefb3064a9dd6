# SPDX-License-Identifier: Apache-2.0
"""Restores by several real ranks: what is read, by whom, and one outcome whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actorsnap.runtime import tracefile
from actorsnap.sync import Snapshot
from tests.ranks.models import MODULES
from tests.ranks.restores import TIMEOUT_S
from tests.support.cases import slow
from tests.worlds import Director

FILLED = [[1.0], [2.0], [3.0], [4.0]]


@pytest.fixture(scope="module")
def director() -> Iterator[Director]:
    with Director("tests.ranks.restores", *MODULES) as director:
        yield director


@pytest.mark.parametrize(
    ("num_ranks", "kind", "mode"),
    [
        (2, "ddp", "direct"),
        (2, "ddp", "shared"),
        slow(4, "ddp", "shared"),
        slow(4, "hsdp", "shared"),
        slow(4, "stages", "direct"),
        slow(4, "halves", "direct"),
        slow(2, "fsdp2", "auto"),
        slow(2, "zero", "direct"),
        slow(2, "pipeline", "shared"),
        (4, "fsdp2_and_tp", "auto"),
        (4, "two_meshes", "shared"),
        slow(4, "experts", "auto"),
    ],
)
def test_what_was_saved_is_restored(
    director: Director, tmp_path: Path, num_ranks: int, kind: str, mode: str
) -> None:
    found = director.play(
        "direct_restore", num_ranks=num_ranks, kind=kind, path=str(tmp_path / "s"), mode=mode
    )
    plan = found[0]["plan"]
    for said in found:
        assert all(said["equal"].values()), said["equal"]
        assert said["is_complete"]
        assert said["plan"] == plan
    assert [said["bytes_read"] for said in found] == list(plan["bytes_read_by_rank"])
    assert sum(said["nbytes"] for said in found) == plan["bytes_needed"]
    if kind == "ddp":
        state = found[0]["nbytes"]
        times = 1 if mode == "shared" else num_ranks
        assert plan["mode"] == mode
        assert plan["bytes_read"] / (times * state) == pytest.approx(1.0, abs=0.02)
        assert found[0]["read_amplification"] == pytest.approx(times / num_ranks, abs=0.02)
    elif mode == "shared" and kind == "hsdp":  # each shard has two holders
        assert plan["mode"] == "shared"
        assert "2 x 2 ranks want the same" in plan["reason"]
        assert plan["bytes_read"] / plan["bytes_needed"] == pytest.approx(0.5, abs=0.02)
    else:
        assert plan["bytes_read"] / plan["bytes_needed"] == pytest.approx(1.0, abs=0.02)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("num_ranks", "kind", "mode"),
    [(2, "ddp", "shared"), (2, "fsdp2", "auto"), (4, "hsdp", "shared")],
)
def test_what_was_compressed_is_restored(
    director: Director, tmp_path: Path, num_ranks: int, kind: str, mode: str
) -> None:
    found = director.play(
        "direct_restore",
        num_ranks=num_ranks,
        kind=kind,
        path=str(tmp_path / "s"),
        mode=mode,
        compression="zstd",
    )
    for said in found:
        assert all(said["equal"].values()), said["equal"]
        assert said["is_complete"]
    plan = found[0]["plan"]
    assert [said["bytes_read"] for said in found] == list(plan["bytes_read_by_rank"])
    assert not list(tmp_path.rglob("*.safetensors"))
    assert list(tmp_path.rglob("*.chunks/*"))


def test_what_was_compressed_is_cut_otherwise(director: Director, tmp_path: Path) -> None:
    path = tmp_path / "s"
    found = director.play("direct_cut_otherwise", num_ranks=2, path=str(path), compression="zstd")
    assert found == [{"columns": True, "all": True, "rows": True}] * 2
    assert list(path.rglob("*.chunks/*"))
    # One process gets what both have.
    snapshot = Snapshot(path)
    assert snapshot.verify("full").ok
    whole = torch.randn(6001, 300, generator=torch.Generator().manual_seed(4))
    assert torch.equal(snapshot.get_state_dict_for_key("m")["w"], whole)
    few = snapshot.read_object("m/w", memory_budget_bytes=1 << 20)
    assert torch.equal(few, whole)


@pytest.mark.slow
@pytest.mark.few(1)
def test_sixteen_ranks_save_and_twelve_and_one_restore(director: Director, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    for num_ranks, most in ((16, 8), (12, 12), (1, 16)):
        found = director.play("direct_many", num_ranks=num_ranks, path=path, saves=num_ranks == 16)
        for said in found:
            assert said["wrong"] == []
            assert said["step"] == 3
            assert said["is_complete"]
        read = [said["manifests"] for said in found]
        assert max(read) <= most, read
    assert Snapshot(path).verify("full").ok


@pytest.mark.parametrize("flatten", [True, False])
def test_distributed_optimizer_states_restore_in_their_own_form_only(
    director: Director, tmp_path: Path, flatten: bool
) -> None:
    found = director.play("direct_forms", num_ranks=2, path=str(tmp_path / "s"), flatten=flatten)
    for said in found:
        assert said["error"] == "IncompatibleState"
        assert said["is_untouched"]
        (line,) = said["mismatched"]
        for text in (said["text"], line):
            assert f"train/optim: saved with flatten={flatten}" in text
            assert f"ModelState(model, optimizers, flatten={flatten})" in text
        assert said["model"]
        assert said["optimizer is kept"]
        assert said["same form"]


def test_after_an_evaluation(director: Director, tmp_path: Path) -> None:
    found = director.play("direct_evaluated", num_ranks=2, path=str(tmp_path))
    assert found == [[True, True]] * 2


def test_buffers_after_fully_shard_restore_on_other_numbers_of_ranks(
    director: Director, tmp_path: Path
) -> None:
    path = str(tmp_path / "s")
    for num_ranks in (2, 3, 1):
        found = director.play(
            "direct_buffers", num_ranks=num_ranks, path=path, saves=num_ranks == 2
        )
        assert found == [[1.0]] * num_ranks  # rank 0's


def test_each_rank_writes_a_trace_of_its_own(director: Director, tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    said = director.play(
        "direct_restore",
        num_ranks=2,
        kind="ddp",
        path=str(tmp_path / "s"),
        mode="shared",
        trace=str(traces / "{op}.json"),
    )
    found = {path.name: tracefile.read(str(path)) for path in traces.iterdir()}
    assert found.keys() == {"save-0.json", "save-1.json", "restore-0.json", "restore-1.json"}
    abouts = {name: trace.abouts[0] for name, trace in found.items()}
    assert len({about.attempt for about in abouts.values()}) == 1
    for name, trace in found.items():
        rank = int(name[-6])
        assert (abouts[name].rank, abouts[name].world_size) == (rank, 2)
        assert {event.pid for event in trace.trace_events} == {rank}

    def moved(op: str, kind: str) -> list[int]:
        rows = [abouts[f"{op}-{rank}.json"].actors for rank in (0, 1)]
        return [sum(row.nbytes for row in own if row.kind == kind) for own in rows]

    assert moved("restore", "read") == [own["bytes_read"] for own in said]
    one, other = moved("save", "store")
    assert one == pytest.approx(other, rel=0.1)  # each stores half of it
    assert one > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("strict", [True, False])
def test_stages_are_cut_anew(director: Director, tmp_path: Path, strict: bool) -> None:
    """Layers of other stages are not unexpected; what has a place on no rank is."""
    found = director.play("direct_stages", path=str(tmp_path / "s"), strict=strict)
    for rank, said in enumerate(found):
        for name in ("one", "two", "four"):
            assert said[name]["error"] == ""
            assert said[name]["planned"] == []
        whole = {str(n): [n + 1.0] for n in range(4)}
        if rank < 3:  # five rows on four ranks: the last one has none
            assert said["one"]["values"] == whole
        assert said["four"]["values"] == {str(rank): [rank + 1.0]}
        lines = {
            "fewer": ["m/3.weight", "m/3.bias"],
            "more": ["m/4.weight", "m/4.bias"],
        }
        for name, paths in lines.items():
            assert said[name]["planned"] == paths
            assert said[name]["error"] == ("IncompatibleState" if strict else "")
            kept = {n: [float(n) - 9.0] for n in said[name]["values"]}
            restored = {n: whole.get(n, kept[n]) for n in kept}
            if rank < 3:
                assert said[name]["values"] == (kept if strict else restored)


def test_a_store_is_enough_to_share(director: Director, tmp_path: Path) -> None:
    found = director.play("direct_without_group", path=str(tmp_path / "s"))
    assert [said["values"] for said in found] == [FILLED] * 2
    assert sum(said["bytes_read"] for said in found) == found[0]["nbytes"]
    assert all(said["bytes_read"] > 0 for said in found)


def test_a_rank_cancelled_in_a_round_leaves_the_job_in_step(
    director: Director, tmp_path: Path
) -> None:
    """What it leaves out does not meet what the job sends next, nor the next exchange."""
    found = director.play("direct_cancelled", path=str(tmp_path / "s"))
    assert [said["error"] for said in found] == ["RestoreAborted", ""]
    for said in found:
        assert said["sent"] == [[0.0] * 3, [1.0] * 3, [2.0] * 3]
        assert said["again"] == ""
        assert said["values"] == FILLED
        assert said["left"] == []


@pytest.mark.few(1)
@pytest.mark.parametrize("whom", [0, 2])
def test_a_rank_killed_in_a_broadcast_is_named_and_the_others_go_on(
    director: Director, tmp_path: Path, whom: int
) -> None:
    found = director.play("direct_killed", path=str(tmp_path / "s"), whom=whom)
    assert len(found) == 2
    for said in found:
        assert said["error"] == "RestoreAborted"
        assert (said["fields"]["rank"], said["fields"]["stage"]) == (whom, "read")
        # Where rank 0 lives it says it to all; else each counts the seconds itself.
        assert said["text"] == found[0]["text"] or whom == 0
        assert said["total"] == 2
        assert said["again"] == ""
        assert said["values"] == FILLED
        assert said["left"] == []


def play(director: Director, path: Path, trouble: str, whom: int = 1, **more: Any) -> list[Any]:
    arguments = {"num_ranks": 2, "mode": "shared", **more}
    said: list[Any] = director.play(
        "direct_play", path=str(path / "s"), trouble=trouble, whom=whom, **arguments
    )
    return said


def test_rounds_of_pieces(director: Director, tmp_path: Path) -> None:
    """Pieces of 2 MiB: more rounds than one, and tensors that are cut."""
    for said in play(director, tmp_path, "", whom=-1, num_ranks=3):
        assert said["error"] == ""
        assert said["model"] == FILLED
        assert said["model again"] == FILLED


@pytest.mark.few
@pytest.mark.parametrize("mode", ["direct", "shared"])
@pytest.mark.parametrize("whom", [0, 1])
@pytest.mark.parametrize("trouble", ["storage", "index"])
def test_a_storage_error_on_one_rank(
    director: Director, tmp_path: Path, trouble: str, whom: int, mode: str
) -> None:
    found = play(director, tmp_path, trouble, whom, mode=mode)
    for said in found:
        assert said["error"] == "StorageError"
        assert said["text"] == found[0]["text"]
        overwritten = [note for note in said["notes"] if "overwritten" in note]
        assert len(overwritten) == (trouble == "storage")
        assert said["took_s"] < TIMEOUT_S
        calls = 0 if trouble == "index" else 2
        assert said["calls"] == ["state_dict"] * calls
        assert said["again"] == ""
        assert said["model again"] == FILLED


@pytest.mark.parametrize("name", ["state_dict", "load_state_dict"])
def test_who_raises_keeps_no_rank_waiting(director: Director, tmp_path: Path, name: str) -> None:
    found = play(director, tmp_path, f"raise {name}")
    stage = "compare" if name == "state_dict" else "load"
    for said in found:
        assert said["error"] == "RestoreAborted"
        assert said["text"].startswith("restore aborted: ValueError")
        assert "'a'" in said["text"]
        assert f"(rank 1, stage '{stage}'" in said["text"]
        assert said["cause"] == "ValueError"
        assert said["calls"].count(name) == 2
        assert said["again"] == ""


def test_a_mismatch_on_one_rank(director: Director, tmp_path: Path) -> None:
    for rank, said in enumerate(play(director, tmp_path, "mismatch")):
        assert said["error"] == "IncompatibleState"
        (line,) = said["fields"]["mismatched"]
        assert line.startswith("rank 1: model/w1: ")
        assert said["fields"]["is_untouched"]
        assert said["model"] == [[0.0], [0.0 if rank == 1 else 1.0], [2.0], [3.0]]
        assert said["calls"] == ["state_dict"] * 2
        assert said["again"] == ""


def test_bad_input_on_one_rank(director: Director, tmp_path: Path) -> None:
    found = play(director, tmp_path, "input", whom=0)
    assert found[0]["text"].startswith("rank 0: ")
    assert {said["error"] for said in found} == {"UsageError"}
    assert found[0]["text"] == found[1]["text"]
    assert [said["calls"] for said in found] == [[], []]
    assert [said["again"] for said in found] == ["", ""]


@pytest.mark.few(1)
@pytest.mark.parametrize("whom", [0, 1])
def test_one_takes_while_the_other_restores(director: Director, tmp_path: Path, whom: int) -> None:
    for said in play(director, tmp_path, "takes", whom):
        assert said["error"] == "UsageError"
        assert "make the same calls in the same order" in said["text"]
        assert said["took_s"] < TIMEOUT_S
        assert said["again"] == ""


@pytest.mark.parametrize(
    ("trouble", "whom"),
    [
        ("kill state_dict", 2),
        *(
            slow(*case)  # see test_falls.py
            for case in (
                ("kill state_dict", 0),
                ("kill load_state_dict", 0),
                ("kill load_state_dict", 2),
                ("kill read", 0),
                ("kill read", 2),
            )
        ),
    ],
)
def test_a_rank_is_killed(director: Director, tmp_path: Path, trouble: str, whom: int) -> None:
    """The others' collectives break down with gloo, or they are told by rank 0."""
    found = play(director, tmp_path, trouble, whom, num_ranks=3)
    assert len(found) == 2
    for said in found:
        assert said["error"] == "RestoreAborted"
        assert said["took_s"] < TIMEOUT_S
        if trouble == "kill read":
            assert said["fields"]["rank"] == whom


def test_replaced_between_ranks(director: Director, tmp_path: Path) -> None:
    for said in play(director, tmp_path, "replaced"):
        assert said["error"] == ""
        assert said["model"] == [[11.0], [12.0], [13.0], [14.0]]
        assert said["x"] == 11.0
        # Nobody was asked for a state before all had read the same.
        assert said["calls"] == ["state_dict", "load_state_dict"] * 2
