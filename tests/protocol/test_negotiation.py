"""What is decided in the steps of a restore."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from actorsnap.errors import IncompatibleState, SnapshotReplaced
from actorsnap.planning.exchange import ReadMode, ReadPlan, Want, Wants
from actorsnap.protocol.gathering import Decision
from actorsnap.protocol.messages import Stage
from actorsnap.protocol.negotiation import Comparison, Negotiation, Ready, Totals, Weighed

MIB = 1 << 20
WANTS = Wants((Want("model", None, b"d", 9 * MIB),), 2 * MIB, "")


def decide(negotiation: Negotiation, step: int, *ranks: Any) -> Decision:
    return negotiation.decide(step, [msgspec.msgpack.encode(own) for own in ranks])


def ready(attempt: str = "a") -> Ready:
    return Ready("/s", attempt)


def test_the_steps_of_a_shared_restore() -> None:
    negotiation = Negotiation(mode=ReadMode.SHARED)
    assert decide(negotiation, 0, ready(), ready()) == Decision(Stage.COMPARE)
    decision = decide(negotiation, 1, *[Comparison(WANTS)] * 2)
    plan = msgspec.msgpack.decode(decision.payload, type=ReadPlan)
    assert (plan.mode, plan.num_rounds) == (ReadMode.SHARED, 5)
    stages = [negotiation.decide(2 + step, [b"", b""]).stage for step in range(7)]
    assert stages == [Stage.READ] * 5 + [Stage.LOAD, None]


def test_the_steps_of_a_direct_restore() -> None:
    negotiation = Negotiation(mode=ReadMode.AUTO)
    decide(negotiation, 1, *[Comparison(WANTS)] * 2)
    stages = [negotiation.decide(2 + step, [b"", b""]).stage for step in range(2)]
    assert stages == [Stage.LOAD, None]


def test_ranks_that_have_read_different_attempts() -> None:
    with pytest.raises(SnapshotReplaced):
        decide(Negotiation(mode=ReadMode.AUTO), 0, ready(), ready("b"))


def test_what_does_not_fit_is_named_with_its_rank() -> None:
    with pytest.raises(IncompatibleState) as caught:
        decide(
            Negotiation(mode=ReadMode.AUTO),
            1,
            Comparison(WANTS, missing=("m/a", "m/b")),
            Comparison(WANTS, missing=("m/b", "m/c"), mismatched=("m/d: other",)),
            Comparison(WANTS, missing=("m/b",)),
            Comparison(WANTS, missing=("m/b",)),
        )
    assert caught.value.missing == ("m/b", "rank 0: m/a", "rank 1: m/c")
    assert caught.value.mismatched == ("rank 1: m/d: other",)


def test_a_dry_run_adds_up() -> None:
    negotiation = Negotiation(mode=ReadMode.AUTO, is_dry_run=True)
    decide(negotiation, 1, *[Comparison(WANTS, missing=("m/a",))] * 2)
    weighed = (Weighed(10, 12, 3), Weighed(10, 10, 1))
    decision = decide(negotiation, 2, *weighed)
    assert decision.stage is None
    totals = msgspec.msgpack.decode(decision.payload, type=Totals)
    assert totals == Totals(weighed, ("m/a",), (), ())


def test_what_has_a_place_on_no_rank_is_unexpected() -> None:
    def unplaced(**paths: tuple[str, ...]) -> Comparison:
        return Comparison(WANTS, unplaced=paths)

    stages = unplaced(m=("m/1",)), unplaced(m=("m/0",)), unplaced(other=())
    negotiation = Negotiation(mode=ReadMode.AUTO)
    assert decide(negotiation, 1, *stages).stage is Stage.READ
    with pytest.raises(IncompatibleState) as caught:
        decide(negotiation, 1, unplaced(m=("m/1", "m/2")), unplaced(m=("m/0", "m/2")))
    assert caught.value.unexpected == ("m/2",)
    with pytest.raises(IncompatibleState) as caught:
        decide(negotiation, 1, unplaced(m=("m/2",)), unplaced(other=()))
    assert caught.value.unexpected == ("rank 0: m/2",)
