# SPDX-License-Identifier: Apache-2.0
"""Rounds that real processes pass together, over a TCPStore and gloo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.rounds import OPTIONS
from tests.worlds import Director


@pytest.fixture(scope="module")
def director() -> Iterator[Director]:
    with Director("tests.ranks.rounds") as director:
        yield director


def test_all_pass(director: Director) -> None:
    for said in director.play("direct_go", num_ranks=3, trouble="", whom=-1):
        assert said["decided"] == ["012", "", ""]
        assert said["data"] == "0123456789"
        assert said["again"] == "xxx"


@pytest.mark.parametrize("whom", [0, 1])
def test_what_one_raises_all_raise(director: Director, whom: int) -> None:
    found = director.play("direct_go", num_ranks=2, trouble="storage", whom=whom)
    for rank, said in enumerate(found):
        assert said["error"] == ["StorageError", "StorageError (read of 'k' in b)"]
        assert said["cause"] == "None"
        note = f"actorsnap: rank {whom} was the first to fail, in stage 'read'"
        assert said["notes"] == ([] if rank == whom else [note])
        assert said["took_s"] < OPTIONS.timeout_s
        assert said["again"] == "xx"


def test_what_is_no_error_of_ours_is_the_cause_of_one(director: Director) -> None:
    found = director.play("direct_go", num_ranks=2, trouble="other", whom=1)
    message = "restore aborted: ValueError: boom (rank 1, stage 'read')"
    assert [said["error"] for said in found] == [["RestoreAborted", message]] * 2
    assert [said["cause"] for said in found] == ["ValueError('boom')"] * 2
    assert [said["again"] for said in found] == ["xx", "xx"]


@pytest.mark.few(1)
@pytest.mark.parametrize("whom", [0, 1])
def test_who_is_interrupted_takes_leave(director: Director, whom: int) -> None:
    found = director.play("direct_go", num_ranks=2, trouble="interrupt", whom=whom)
    message = f"restore aborted: the caller was interrupted (rank {whom}, stage 'cancel')"
    assert found[whom]["error"][0] == "KeyboardInterrupt"
    assert found[1 - whom]["error"] == ["RestoreAborted", message]
    assert found[1 - whom]["took_s"] < OPTIONS.timeout_s
    assert [said["again"] for said in found] == ["xx", "xx"]


@pytest.mark.few(1)
@pytest.mark.parametrize("whom", [0, 2])
@pytest.mark.parametrize("trouble", ["kill", "kill in a broadcast"])
def test_a_killed_rank_is_named(director: Director, trouble: str, whom: int) -> None:
    found = director.play("direct_go", num_ranks=3, trouble=trouble, whom=whom)
    assert len(found) == 2
    for said in found:
        assert said["error"][0] == "RestoreAborted"
        assert said["error"][1].startswith(f"restore aborted: rank {whom}")
        assert "sent nothing for" in said["error"][1]
        assert said["error"][1].endswith(f"(rank {whom}, stage 'read')")
