# SPDX-License-Identifier: Apache-2.0
"""docs/protocol.md says what the source says."""

from __future__ import annotations

import pytest

from docs.generate_protocol import PAGE, parts, render


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert render(page) == page, "run: make docs"


def test_diagrams_show_what_tables_and_rules_lead_to() -> None:
    coordinator = parts()["rounds coordinator diagram"]
    assert "[*] --> gathering" in coordinator
    assert "committing --> passed : Continue" in coordinator
    # By way of `_decide_if_all_arrived`: ranks that skip rounds may have arrived before.
    assert "deciding --> committing : Arrived, Continue" in coordinator
    assert "gathering --> passed" not in coordinator
    assert "passed --> [*]" not in coordinator  # the outcome is repeated
    rank = parts()["rounds rank diagram"]
    assert "waiting --> working : Ask, Proceed" in rank
    assert "failed --> ended : Aborted, Lost, Proceed" in rank
    assert "failed --> working" not in rank
    assert "failed --> [*]" not in rank
    assert "ended --> [*]" in rank


def test_a_page_without_a_part_is_refused() -> None:
    with pytest.raises(LookupError, match="rank diagram"):
        render("<!-- begin nonsense -->\n<!-- end -->")
