"""docs/protocol.md says what the source says."""

from __future__ import annotations

import pytest

from docs.generate_protocol import PAGE, parts, render


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert render(page) == page, "run: make docs"


def test_diagrams_show_what_tables_and_rules_lead_to() -> None:
    coordinator = parts()["coordinator diagram"]
    assert "[*] --> joining" in coordinator
    assert "committing --> committed : CommitWritten" in coordinator
    # By way of `_assign_if_known`, and of `_abort` where the plan fails.
    [stores] = [line for line in coordinator.splitlines() if "joining --> storing" in line]
    assert stores.split(" : ")[1].split(", ") == [
        "Items",
        "Join",
        "Offer",
        "ShardedTensors",
    ]
    assert "storing --> committed" not in coordinator
    assert "committed --> [*]" in coordinator
    rank = parts()["rank diagram"]
    assert "looking --> aborted : Aborted, Looked" in rank
    assert "reported --> looking : CoordinatorLost" in rank
    assert "storing --> looking" not in rank
    assert "failed --> [*]" not in rank


def test_a_page_without_a_part_is_refused() -> None:
    with pytest.raises(LookupError, match="rank diagram"):
        render("<!-- begin nonsense -->\n<!-- end -->")
