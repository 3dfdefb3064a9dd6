# SPDX-License-Identifier: Apache-2.0
"""Marks are merged alike in any order, and pins expire by the storage's clock."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.format.steps import MarkKind, MarkName, MetricsMark, PinMark, StepName
from actorsnap.planning.marks import Facts, StoredMark, facts_of

NAME = StepName(500, 2)


def metrics(number: int, nonce: str = "00", **values: float | str) -> StoredMark:
    name = MarkName(NAME, MarkKind.METRICS, number, nonce)
    # Its clock is wrong: order is by number.
    record = MetricsMark(metrics=values, created_s=-float(number))
    return StoredMark(name=name, record=record, stored_s=0.0)


def pin(for_s: float | None, *, created_s: float = 0.0, stored_s: float = 0.0) -> StoredMark:
    record = PinMark(reason="paper", holder="me", created_s=created_s, for_s=for_s)
    name = MarkName(NAME, MarkKind.PIN, 0, "ff")
    return StoredMark(name=name, record=record, stored_s=stored_s)


def test_the_later_value_counts() -> None:
    marks = [metrics(0, loss=3.0, top=1.0), metrics(2, loss=1.0), metrics(1, loss="nan")]
    assert facts_of(marks).metrics == {"loss": 1.0, "top": 1.0}


@given(
    st.lists(
        st.builds(metrics, st.integers(0, 3), st.sampled_from(["01", "02"]), loss=st.floats(0, 9)),
        unique_by=lambda mark: (mark.name.number, mark.name.nonce),
    ),
    st.randoms(),
)
def test_in_any_order(marks: list[StoredMark], order: random.Random) -> None:
    shuffled = [*marks, pin(None)]
    order.shuffle(shuffled)
    assert facts_of(shuffled) == facts_of([*marks, pin(None)])


def test_expiry() -> None:
    facts = facts_of([pin(60.0, created_s=1e9, stored_s=1000.0)])
    assert facts.pins_at(1059.0) == facts.pins
    assert facts.pins_at(1060.0) == ()
    assert facts_of([pin(60.0, created_s=1000.0)]).pins_at(1059.0) != ()  # the storage has no clock
    assert facts_of([pin(None)]).pins_at(1e12) != ()
    assert Facts().pins_at(0.0) == ()


@pytest.mark.parametrize(
    ("for_s", "expiry"),
    [
        (None, ""),
        (86400.0, ", until 2001-09-10 01:46 UTC"),
        (1e13, ", until 1.0001e+13 s after 1970"),
    ],
)
def test_text_of_a_pin(for_s: float | None, expiry: str) -> None:
    (found,) = facts_of([pin(for_s, stored_s=1e9)]).pins
    assert str(found) == f"pinned: paper (me{expiry})"
