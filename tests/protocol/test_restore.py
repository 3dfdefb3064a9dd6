# SPDX-License-Identifier: Apache-2.0
"""The decisions of a restore."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from actorsnap.errors import IncompatibleState, SnapshotReplaced
from actorsnap.planning.shared_reads import (
    RangesDigest,
    ReadInterest,
    ReadMode,
    SharedReadPlan,
    rank_set,
)
from actorsnap.protocol.failure import Stage
from actorsnap.protocol.restore import Comparison, ReadCost, Ready, RestoreDecisions, RestoreTotals
from actorsnap.protocol.rounds import Continue

MIB = 1 << 20
INTEREST = ReadInterest((RangesDigest("model", rank_set([0, 1]), b"d", 9 * MIB),), 2 * MIB, "")


def decide(decisions: RestoreDecisions, round: int, *ranks: Any) -> Continue:
    payloads = {rank: msgspec.msgpack.encode(own) for rank, own in enumerate(ranks)}
    return decisions.decide(round, payloads)


def stages_after(decisions: RestoreDecisions, num_rounds: int) -> list[Stage | None]:
    """The stages that the rounds from 2 on lead to; None after the last round."""
    stages: list[Stage | None] = []
    for number in range(num_rounds):
        decision = decisions.decide(2 + number, {0: b"", 1: b""})
        stages.append(None if decision.is_last else decisions.stage)
    return stages


def ready(attempt: str = "a") -> Ready:
    return Ready("/s", attempt)


def test_the_rounds_of_a_shared_restore() -> None:
    decisions = RestoreDecisions(mode=ReadMode.SHARED)
    assert decide(decisions, 0, ready(), ready()) == Continue()
    assert str(decisions.stage) == "compare"
    decision = decide(decisions, 1, *[Comparison(INTEREST)] * 2)
    for rank in range(2):
        plan = msgspec.msgpack.decode(decision.payloads[rank], type=SharedReadPlan)
        assert (plan.mode, plan.num_rounds) == (ReadMode.SHARED, 5)
    assert stages_after(decisions, 7) == [Stage.READ] * 5 + [Stage.LOAD, None]


def test_the_rounds_of_a_direct_restore() -> None:
    decisions = RestoreDecisions(mode=ReadMode.AUTO)
    decide(decisions, 1, *[Comparison(INTEREST)] * 2)
    assert stages_after(decisions, 2) == [Stage.LOAD, None]


def test_ranks_that_have_read_different_attempts() -> None:
    with pytest.raises(SnapshotReplaced):
        decide(RestoreDecisions(mode=ReadMode.AUTO), 0, ready(), ready("b"))


def test_what_does_not_fit_is_named_with_its_rank() -> None:
    with pytest.raises(IncompatibleState) as caught:
        decide(
            RestoreDecisions(mode=ReadMode.AUTO),
            1,
            Comparison(INTEREST, missing=("m/a", "m/b")),
            Comparison(
                INTEREST, missing=("m/b", "m/c"), mismatched=("m/d: other",), hints=("rename m",)
            ),
            Comparison(INTEREST, missing=("m/b", "m/e")),
            Comparison(INTEREST, missing=("m/b", "m/e")),
        )
    lines = ("m/b", "rank 0: m/a", "rank 1: m/c", "ranks 2 and 3: m/e")
    assert caught.value.missing == lines
    assert caught.value.mismatched == ("rank 1: m/d: other",)
    assert caught.value.hints == ("rank 1: rename m",)


def test_a_dry_run_adds_up() -> None:
    decisions = RestoreDecisions(mode=ReadMode.AUTO, is_dry_run=True)
    decide(decisions, 1, *[Comparison(INTEREST, missing=("m/a",))] * 2)
    weighed = (ReadCost(10, 12, 3), ReadCost(10, 10, 1))
    decision = decide(decisions, 2, *weighed)
    assert decision.is_last
    totals = msgspec.msgpack.decode(decision.common, type=RestoreTotals)
    assert totals == RestoreTotals(weighed, ("m/a",), (), ())


def test_what_has_a_place_on_no_rank_is_unexpected() -> None:
    def unplaced(**paths: tuple[str, ...]) -> Comparison:
        return Comparison(INTEREST, unplaced=paths)

    stages = unplaced(m=("m/1",)), unplaced(m=("m/0",)), unplaced(other=())
    decisions = RestoreDecisions(mode=ReadMode.AUTO)
    decide(decisions, 1, *stages)
    assert decisions.stage is Stage.READ
    with pytest.raises(IncompatibleState) as caught:
        decide(decisions, 1, unplaced(m=("m/1", "m/2")), unplaced(m=("m/0", "m/2")))
    assert caught.value.unexpected == ("m/2",)
    with pytest.raises(IncompatibleState) as caught:
        decide(decisions, 1, unplaced(m=("m/2",)), unplaced(other=()))
    assert caught.value.unexpected == ("rank 0: m/2",)
