# SPDX-License-Identifier: Apache-2.0
"""Which cases of a test are slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

__all__ = ["examples", "mostly_slow", "slow"]


def examples(number: int) -> int:
    """Number of examples of a property: in `make test` a quarter of those in `make test-all`."""
    default = settings.default
    assert default is not None
    is_fast = default.max_examples < 100  # see pytest_configure in tests/conftest.py
    return number // 4 if is_fast else number


def slow(*values: Any, id: str | None = None) -> Any:
    """A case of a parametrized test that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def mostly_slow(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """All these cases of one parameter; those that are not named in ``fast`` are slow."""
    cases = list(cases)
    assert all(case in cases for case in fast)
    return [case if case in fast else slow(case) for case in cases]
