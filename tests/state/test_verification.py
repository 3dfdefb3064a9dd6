# SPDX-License-Identifier: Apache-2.0
"""What a restore would refuse, found without bytes and without memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
import torch

from actorsnap.format.geometry import Box
from actorsnap.format.manifest import CompositeEntry, ContainerEntry, RankManifest, ValueEntry
from actorsnap.planning.index import index_of
from actorsnap.state.restore import verification
from actorsnap.state.restore.verification import verify_entries
from tests.state.saved import Part, Saved

BAD = ValueEntry(path="k/bad", value={"$": "dtype", "v": "float99"})


def rows(path: str, rank: int, num_ranks: int, fill: float) -> Part:
    return Part(path, torch.full((1, 4), fill), Box((rank, 0), (1, 4)), (num_ranks, 4))


def world(num_ranks: int) -> Saved:
    return Saved(
        [
            [
                rows("k/w", rank, num_ranks, rank),
                Part(f"k/all{rank}", torch.ones(2), replicated=True),
                Part("k/own", torch.full((3,), float(rank))),
            ]
            for rank in range(num_ranks)
        ]
    )


def with_entry(saved: Saved, rank: int, entry: Any) -> dict[int, RankManifest]:
    manifest = saved.manifests[rank]
    entries = (*manifest.entries, entry)
    return saved.manifests | {rank: msgspec.structs.replace(manifest, entries=entries)}


@pytest.mark.parametrize("num_ranks", [1, 2, 7])
def test_a_good_one(num_ranks: int) -> None:
    assert verify_entries(world(num_ranks).manifests).problems == {}


@pytest.mark.parametrize("rank", [0, 3, 39])
def test_what_one_rank_keeps_to_itself(rank: int) -> None:
    (problem,) = verify_entries(with_entry(world(40), rank, BAD)).problems.values()
    assert problem.key == "k/bad"


@pytest.mark.parametrize("rank", [0, 3])
def test_attributes_of_one_ranks_shard(rank: int) -> None:
    saved = world(4)
    manifest = saved.manifests[rank]
    entries = tuple(
        msgspec.structs.replace(entry, attributes={"tp": {"$": "dtype", "v": "float99"}})
        if entry.path == "k/w"
        else entry
        for entry in manifest.entries
    )
    changed = {rank: msgspec.structs.replace(manifest, entries=entries)}
    (problem,) = verify_entries(saved.manifests | changed).problems.values()
    assert problem.key == "k/w"


def test_a_leaf_below_a_leaf_of_another_rank() -> None:
    below = ValueEntry(path="k/all5/below", value=1, replicated=True)
    problems = verify_entries(with_entry(world(8), 2, below)).problems.values()
    assert {problem.key for problem in problems} <= {"k/all5", "k/all5/below"}
    assert problems


def test_tensors_of_several_meshes_are_no_problem() -> None:
    """Nobody gets the whole, but each rank what it stored."""
    saved = Saved([[rows("k/w", rank % 2, 2, rank)] for rank in range(4)])
    assert verify_entries(saved.manifests).problems == {}


def test_parts_in_other_manifests() -> None:
    """In a list of which a rank that did not save gets nothing, too."""
    sparse = CompositeEntry(
        path="k/list/0",
        layout="sparse_coo",
        dtype="float32",
        shape=(3,),
        parts=("indices", "values"),
        parameters={"is_coalesced": True},
        replicated=True,
    )
    a_list = ContainerEntry(path="k/list", type="list")
    saved = Saved(
        [
            [
                a_list,
                sparse,
                Part("k/list/0@indices", torch.zeros(1, 1).long(), replicated=True),
                Part("k/list/1", torch.ones(1)),
            ],
            [Part("k/list/0@values", torch.ones(1), replicated=True)],
        ]
    )
    found = verify_entries(saved.manifests)
    assert found.problems == {}
    (leaf,) = found.doubtful.values()
    part = leaf.restore()
    saved.fill(leaf.index, part.memory.reads)
    assert part.build().to_dense().tolist() == [1.0, 0.0, 0.0]


def test_the_work_grows_with_the_entries_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merging all manifests for each of a thousand ranks would take hours."""
    num_looked_at = 0

    def counted(manifests: Mapping[int, RankManifest], *, rank: int) -> Any:
        nonlocal num_looked_at
        num_looked_at += sum(len(manifest.entries) for manifest in manifests.values())
        return index_of(manifests, rank=rank)

    monkeypatch.setattr(verification, "index_of", counted)
    saved = Saved(
        [
            [Part("k/all", torch.ones(1), replicated=True), Part("k/own", torch.ones(1))]
            if rank
            else [Part("k/own", torch.ones(1))]
            for rank in range(100)
        ]
    )
    assert verify_entries(saved.manifests).problems == {}
    assert num_looked_at < 1000
