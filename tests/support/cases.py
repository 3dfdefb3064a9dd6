# SPDX-License-Identifier: Apache-2.0
"""Which cases of a test are slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["mostly_slow", "slow"]


def slow(*values: Any, id: str | None = None) -> Any:
    """A case of a parametrized test that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def mostly_slow(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """All these cases of one parameter; those that are not named in ``fast`` are slow."""
    cases = list(cases)
    assert all(case in cases for case in fast)
    return [case if case in fast else slow(case) for case in cases]
