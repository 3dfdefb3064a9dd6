# SPDX-License-Identifier: Apache-2.0
"""The protocol's benchmark on small jobs: a repeated save sends little, and no inventory."""

from __future__ import annotations

import pytest

from bench.protocol import markdown, measure, measure_agreement


@pytest.mark.parametrize("job", ["DDP", "FSDP", "HSDP"])
def test_a_repeated_save_sends_no_inventory(job: str) -> None:
    rows = small, large = [measure(job, ranks, 100) for ranks in (16, 64)]
    for row in rows:
        # In a first save of DDP rank 0 lists all tensors: to itself.
        assert (row["first"]["up"]["largest"] > 5000) == (job == "HSDP")
        assert row["repeated"]["up"]["largest"] < 500
    growth = large["repeated"]["up"]["nbytes"] / small["repeated"]["up"]["nbytes"]
    assert growth < 4.4, "more than linear in ranks"
    assert f"protocol {job}, x4 ranks" in markdown(rows)


def test_an_agreement_is_linear_and_three_messages_a_rank_at_most() -> None:
    small, large = measure_agreement(64), measure_agreement(256)
    for row in (small, large):
        assert row["ok"]
        for which in ("first", "repeated"):
            assert row[which]["up_most_of_a_rank"] <= 3
            assert row[which]["down_most_of_a_rank"] <= 3
    for which in ("first", "repeated"):
        for way in ("up", "down"):
            growth = large[which][way]["nbytes"] / small[which][way]["nbytes"]
            assert growth < 4.4, "more than linear in ranks"
