"""The protocol's benchmark on small jobs: a repeated save sends little, and no inventory."""

from __future__ import annotations

import pytest

from bench.protocol import markdown, measure


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
