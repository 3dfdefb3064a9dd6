# SPDX-License-Identifier: Apache-2.0
"""A described state comes back as it was captured, but for its bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from actorsnap import StateDict
from actorsnap.protocol.uploader import Structure
from actorsnap.runtime.structure import describe_state, rebuild_state
from actorsnap.state.capture import capture
from actorsnap.state.sources import Captured, Leaf


def captured(**values: Any) -> Captured:
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    state = StateDict(weight=weight, view=weight.detach()[0], empty={}, data=b"\0" * 5000, **values)
    return capture(
        {"a": state, "b": StateDict(sparse=torch.eye(3).to_sparse())}, replicated=["b/**"]
    )


def told(found: Captured) -> list[object]:
    """Everything but where bytes lie."""
    return [
        (part.item, part.kind, part.dtype, part.requires_grad, part.scope)
        if isinstance(part, Leaf)
        else part
        for part in found.parts
    ]


def test_what_is_described_comes_back() -> None:
    given = captured(step=3, rate=0.1, nan=float("nan"), big=1 << 100, none=None)
    described = describe_state(given)
    data = msgspec.msgpack.encode(described.structure)
    again = rebuild_state(msgspec.msgpack.decode(data, type=Structure), described.values)
    assert told(again) == told(given)
    assert (again.globs, again.sharded) == (given.globs, given.sharded)
    assert any(isinstance(part, Leaf) and part.requires_grad for part in again.parts)


def test_who_else_holds_a_leaf_comes_back() -> None:
    given = captured(step=3)
    first, second, third, *_ = given.leaves
    first.holders, second.holders, third.holders = (0, 2), (1, 3), (0, 2)
    second.rank_zero_wins = True
    described = describe_state(given)
    again = rebuild_state(described.structure, described.values)
    who = [
        (leaf.holders, leaf.rank_zero_wins, leaf.scope)
        for state in (again, given)
        for leaf in state.leaves
    ]
    assert who[: len(who) // 2] == who[len(who) // 2 :]
    assert {holders for holders, *_ in who} == {(), (0, 2), (1, 3)}
    assert again.scopes == given.scopes
    assert describe_state(captured(step=3)).digest != described.digest


def test_values_make_no_other_structure() -> None:
    one, other = describe_state(captured(step=3)), describe_state(captured(step=4))
    assert one.digest == other.digest
    assert [a != b for a, b in zip(one.values, other.values, strict=True)].count(True) == 1


def test_whatever_else_differs_makes_another_structure() -> None:
    states: list[dict[str, Any]] = [
        {},
        {"step": 3},
        {"more": torch.ones(1)},
        {"more": torch.ones(2)},
        {"more": torch.ones(2, dtype=torch.int64)},
        {"more": torch.nn.Parameter(torch.ones(2))},
        {"more": torch.ones(2, requires_grad=True)},
        {"more": []},
        {"more": ()},
    ]
    assert len({describe_state(captured(**values)).digest for values in states}) == len(states)
