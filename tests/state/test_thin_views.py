# SPDX-License-Identifier: Apache-2.0
"""Views that lie thinly in a large memory are stored without what lies between them."""

from __future__ import annotations

from typing import Any

import torch

from actorsnap.format.manifest import TensorEntry
from tests.state.stored import Memory, store

SIDE = 300


def matrix() -> torch.Tensor:
    return torch.arange(SIDE * SIDE, dtype=torch.float32).view(SIDE, SIDE)


def check(state: dict[str, torch.Tensor], stored_bytes: int) -> tuple[Memory, dict[str, Any]]:
    memory = store(state)
    assert len(memory.data) - 4096 == stored_bytes
    fresh = memory.restore("s")
    assert all(torch.equal(fresh[key], state[key]) for key in state)
    target = {key: torch.zeros_like(value) for key, value in state.items()}
    memory.restore("s", target)
    assert all(torch.equal(target[key], state[key]) for key in state)
    return memory, fresh


def are_shared(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_a_row_and_a_column_that_cross() -> None:
    m = matrix()
    _, fresh = check({"row": m[0, :4], "column": m[:, 0]}, 16 + 4 * SIDE)
    assert not are_shared(fresh["row"], fresh["column"])


def test_what_is_dense_stays_shared() -> None:
    m = matrix()
    state = {"column": m[:, 0], "row": m[0, :8], "part": m[0, 4:12], "whole": m[0, :12]}
    memory, fresh = check(state, 48 + 4 * SIDE)
    paths = {entry.path for entry in memory.entries if isinstance(entry, TensorEntry)}
    assert paths == {"s/column", "s/whole"}
    assert are_shared(fresh["row"], fresh["part"])


def test_one_column_twice_stays_shared() -> None:
    m = matrix()
    state = {"a": m[:, 0], "row": m[0, :4], "b": m[:, 0]}
    _, fresh = check(state, 16 + 4 * SIDE)
    assert are_shared(fresh["a"], fresh["b"])


def test_what_repeats_itself_is_stored_once_beside_a_column() -> None:
    m = matrix()
    check({"column": m[:, 0], "expanded": m[0, :2].expand(50, 2)}, 8 + 4 * SIDE)


def test_a_span_with_few_gaps_is_stored_whole() -> None:
    m = matrix()
    state = {"even": m[:, ::2], "some": m[:, 100:200]}
    _, fresh = check(state, m[:, ::2].stride(0) * 4 * (SIDE - 1) + 4 * (SIDE - 1))
    assert are_shared(fresh["even"], fresh["some"])


def test_many_columns_are_no_matrix() -> None:
    m = torch.zeros(200, 5000)
    check({str(i): m[:, i * 10] for i in range(150)}, 150 * 200 * 4)


def test_one_column_under_many_names_is_stored_once() -> None:
    m = matrix()
    check({"row": m[0, :4], **{str(i): m[:, 0] for i in range(1000)}}, 16 + 4 * SIDE)
