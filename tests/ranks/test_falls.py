# SPDX-License-Identifier: Apache-2.0
"""One rank of a trainer is killed or stopped, at each step of a save and of a restore.

Real processes over gloo. Whatever happens, the others have one outcome in time, what was saved
before can be restored bit for bit, and the job saves to the same path again. There is no other
snapshot than what was said to be one.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.falls import LOST_AFTER_S, STEPS, TIMEOUT_S, Step
from tests.ranks.models import MODULES
from tests.support.cases import slow
from tests.worlds import Director

KINDS = ("fsdp2", "ddp", "tensor_parallel", "sharded_tensor")
FIRST = ("fsdp2", "ddp")
"""These fall in saves to new paths, the others in saves that replace a snapshot."""


def check(step: Step, how: str, is_first: bool, said: dict[str, Any]) -> None:
    call = "SnapshotAborted" if step.is_save else "RestoreAborted"
    stopped = [said["victim"]] if how == "stop" else []
    for other in (*said["others"], *stopped):
        assert other["seconds"] < TIMEOUT_S, other
        assert other["error"] == ("" if step.is_decided else call), other
    others = said["others"]
    # Where rank 0 lives it says it to all; else each counts the seconds itself, at its own stage.
    assert step.victim == 0 or len({other["text"] for other in others}) == 1
    if not step.is_decided:
        for other in others:
            assert other["rank"] == step.victim
            assert other["stage"] in ("join", "compare", "read", "load", "store", "commit")
            assert f"rank {step.victim}" in other["text"]
            assert "sent nothing for" in other["text"]
        assert min(other["seconds"] for other in others) > LOST_AFTER_S / 2
    assert said["is_committed"] == (step.is_decided or not (step.is_save and is_first))
    for rank in said["restored"]:
        assert rank["error"] == "", rank
        assert rank["is_equal"]
    for rank in said["saved"]:
        assert rank["error"] == "", rank
    nbytes = said["nbytes"]
    assert max(nbytes) <= 1.05 * sum(nbytes) / len(nbytes)


def fall(path: Path, steps: Sequence[Step], *cases: tuple[str, int, str]) -> None:
    """Plays those cases, of kind, number of ranks and trouble, two at once: most of the time a
    rank that fell is waited for. Sixteen processes on two cores would miss heartbeats."""

    def play(case: tuple[str, int, str]) -> Any:
        kind, num_ranks, how = case
        with Director("tests.ranks.falls", *MODULES, is_shared=False) as director:
            return director.play(
                "direct_falls",
                num_ranks=num_ranks,
                kind=kind,
                path=str(path / kind),
                how=how,
                is_first=kind in FIRST,
                steps=steps,
            )

    with ThreadPoolExecutor(2) as threads:
        for (kind, num_ranks, how), found in zip(cases, threads.map(play, cases), strict=True):
            assert len(found) == len(steps)
            for step, said in zip(steps, found, strict=True):
                try:
                    check(step, how, kind in FIRST, said)
                except AssertionError as error:
                    error.add_note(f"{how} of {kind} on {num_ranks} ranks at {step}")
                    raise


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_rank_falls_at_every_step(tmp_path: Path, how: str, num_ranks: int) -> None:
    """Every kind of trainer at every step; two or three minutes each."""
    fall(tmp_path, STEPS, *((kind, num_ranks, how) for kind in KINDS))


@pytest.mark.parametrize("case", [("fsdp2", 2, "kill"), slow(("sharded_tensor", 4, "stop"))])
def test_a_rank_falls(tmp_path: Path, case: tuple[str, int, str]) -> None:
    """A rank and the coordinator, in a save and a restore."""
    steps = [
        Step("save", 1, "chunk stored"),
        Step("restore", 0, "coordinator", "Arrived", 4),
    ]
    assert set(steps) < set(STEPS)
    fall(tmp_path, steps, case)


def test_a_coordinator_that_was_given_up_blames_itself(tmp_path: Path) -> None:
    """The others left in consequence."""
    with Director("tests.ranks.falls", *MODULES) as director:
        first, *others = director.play("direct_given_up", num_ranks=3, path=str(tmp_path / "s"))
    for rank in others:
        assert rank["error"] == "SnapshotAborted"
        assert "rank 0, the coordinator, sent nothing for" in rank["text"]
        assert rank["rank"] == 0
    assert first["error"] == "SnapshotAborted"
    assert "rank 0, which coordinates, was stopped for" in first["text"]
    assert first["rank"] == 0
