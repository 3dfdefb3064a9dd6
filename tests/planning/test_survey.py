# SPDX-License-Identifier: Apache-2.0
"""What manifests add up to: objects, batches of them, and holes in sharded tensors."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.errors import FormatError
from actorsnap.format.geometry import Box
from actorsnap.format.manifest import (
    ObjectRecord,
    RankManifest,
    Stored,
    StoredChunk,
    TensorEntry,
)
from actorsnap.planning.survey import Survey, reduced
from tests.state.saved import Part, Saved
from tests.support.many import Many

_HEADER = 4096


def surveyed(manifests: Sequence[RankManifest]) -> Survey:
    survey = Survey()
    for manifest in manifests:
        survey.add(manifest)
    return survey


def saved(*boxes: Box, shape: tuple[int, ...] = (4, 2)) -> list[FormatError]:
    parts = [[Part("m/w", torch.zeros(box.sizes), box, shape)] for box in boxes]
    return list(surveyed([*Saved(parts).manifests.values()]).holes())


def test_holes_are_found_over_all_ranks() -> None:
    top, bottom, left = Box((0, 0), (2, 2)), Box((2, 0), (2, 2)), Box((0, 0), (4, 1))
    assert saved(top, bottom) == []
    # Two meshes may cut tensors of one name differently: no element is missing.
    assert saved(top, bottom, left) == []
    (hole,) = saved(top, left)
    assert hole.key == "m/w"
    assert "from (2, 1) up to (4, 2)" in hole.detail


@st.composite
def some_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[Box]]]:
    """The boxes of two tensors of one shape, per rank: a grid's, some left out, some others."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size)))}) for size in shape]
    runs = [list(zip(cut, cut[1:] or cut, strict=False)) for cut in cuts]
    cells = [
        Box(tuple([a for a, _ in cell]), tuple([b - a for a, b in cell])) for cell in product(*runs)
    ]
    order = draw(st.permutations(cells))
    more = draw(st.lists(st.sampled_from(cells), max_size=2))
    if len(cells) > 1 and draw(st.booleans()):
        order = order[1:]
    per_rank = [[box] for box in (*order, *more)]
    if draw(st.booleans()):
        per_rank = [[box for boxes in per_rank for box in dict.fromkeys(boxes)]]
    return shape, per_rank


@given(some_boxes(), some_boxes())
def test_holes_are_those_of_the_elements(
    first: tuple[tuple[int, ...], list[list[Box]]], second: tuple[tuple[int, ...], list[list[Box]]]
) -> None:
    manifests: list[RankManifest] = []
    (shape, ours), (other_shape, theirs) = first, second
    expected = set()
    paths = {"a": (shape, ours), "b": (shape, ours), "c": (other_shape, theirs)}
    for path, (whole, per_rank) in paths.items():
        held = np.zeros(whole, bool)
        for box in [box for boxes in per_rank for box in boxes]:
            held[tuple(map(slice, box.offsets, box.stops))] = True
        if not held.all():
            expected.add(path)
    for rank in range(max(len(ours), len(theirs))):
        entries = [
            TensorEntry(
                path=path,
                dtype="uint8",
                shape=box.sizes,
                data=Stored(0, _HEADER, _HEADER + box.volume, ()),
                global_shape=whole,
                offsets=box.offsets,
            )
            for path, (whole, per_rank) in paths.items()
            for box in (per_rank[rank] if rank < len(per_rank) else ())
        ]
        manifests.append(manifest(rank, *entries))
    assert {error.key for error in surveyed(manifests).holes()} == expected


def manifest(
    rank: int, *entries: TensorEntry, key: str = "A/data/x", size: int = _HEADER + 8
) -> RankManifest:
    record = ObjectRecord(key=key, size=size, header_bytes=_HEADER, header_crc32c=0)
    return RankManifest(attempt="A", rank=rank, objects=(record,), entries=entries)


def test_ranks_that_disagree() -> None:
    survey = surveyed([manifest(0), manifest(1), manifest(2, size=_HEADER)])
    (error,) = survey.contradictions
    assert error.key == "A/data/x"
    assert "ranks disagree" in error.detail
    other = StoredChunk(0, _HEADER + 8, 1)
    record = ObjectRecord(
        key="A/data/x", size=_HEADER + 8, header_bytes=_HEADER, header_crc32c=0, chunks=(other,)
    )
    compressed = RankManifest(attempt="A", rank=1, objects=(record,))
    assert len(surveyed([manifest(0), compressed]).contradictions) == 1
    assert len(surveyed([compressed, manifest(2)]).contradictions) == 1
    alike = surveyed([compressed, compressed])
    assert alike.contradictions == []
    assert list(alike.objects["A/data/x"].stored_objects) == [("A/data/x/0", _HEADER + 8)]


@given(
    st.lists(st.lists(st.integers(0, 5), max_size=4, unique=True), max_size=8), st.integers(1, 9)
)
def test_each_object_is_in_one_batch_with_all_its_ranks(
    lists: list[list[int]], max_leaves: int
) -> None:
    manifests = [
        RankManifest(
            attempt="A",
            rank=rank,
            objects=tuple([manifest(rank, key=f"A/data/{n}").objects[0] for n in numbers]),
            entries=tuple(
                [
                    TensorEntry(path=f"p{n}", dtype="uint8", shape=(1,), data=Stored(at, 0, 1, ()))
                    for at, n in enumerate(numbers)
                ]
            ),
        )
        for rank, numbers in enumerate(lists)
    ]
    batches = list(surveyed(manifests).batches(500 * max_leaves))
    keys = [key for batch in batches for key in batch.keys]
    assert sorted(keys) == sorted({f"A/data/{n}" for numbers in lists for n in numbers})
    for batch in batches:
        numbers = {int(key.rpartition("/")[2]) for key in batch.keys}
        assert batch.ranks == tuple([r for r, own in enumerate(lists) if numbers & {*own}])
        found = [reduced(manifests[rank], batch.keys) for rank in batch.ranks]
        leaves = [entry.path for each in found for entry in each.entries]
        assert len(leaves) <= max_leaves or len(batch.keys) == 1
        assert {f"p{n}" for n in numbers} == set(leaves)


def test_memory_is_that_of_objects_and_ranks() -> None:
    """Not of ranks times tensors: what stays of a tensor is a joined box."""

    def kept(ranks: int) -> int:
        survey = Survey()
        tracemalloc.start()
        try:
            added = 0
            for manifest in Many("fsdp", ranks, 300).manifests():
                held = tracemalloc.get_traced_memory()[0]
                survey.add(manifest)
                added += tracemalloc.get_traced_memory()[0] - held
            assert list(survey.holes()) == []
            return added
        finally:
            tracemalloc.stop()

    small, large = kept(8), kept(64)
    assert large - small < 56 * 2000, "the 300 entries of a rank take a hundred times as much"
