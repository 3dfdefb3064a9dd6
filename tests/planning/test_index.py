# SPDX-License-Identifier: Apache-2.0
"""One rank's view of many manifests: what it may read, where that lies, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, islice
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.errors import FormatError
from actorsnap.format.checksum import block_checksums
from actorsnap.format.geometry import Box
from actorsnap.format.manifest import (
    BytesEntry,
    CompositeEntry,
    ContainerEntry,
    Entry,
    ObjectRecord,
    RankManifest,
    Stored,
    TensorEntry,
    ValueEntry,
    ViewEntry,
)
from actorsnap.planning.index import Index, ShardedEntry, index_of

_crcs = count()


def at(object: int = 0, crc: int | None = None) -> Stored:
    return Stored(object, 0, 4, (next(_crcs) if crc is None else crc,))


def value(path: str, held: Any = 0, *, replicated: bool = False) -> ValueEntry:
    return ValueEntry(path=path, value=held, replicated=replicated)


def tensor(path: str, crc: int | None = None, **members: Any) -> TensorEntry:
    data = members.pop("data", None) or at(crc=crc)
    return TensorEntry(path=path, dtype="int8", shape=(4,), data=data, **members)


def shard(path: str, offset: int, of: int = 8, **members: Any) -> TensorEntry:
    return tensor(path, global_shape=(of,), offsets=(offset,), **members)


def record(name: str) -> ObjectRecord:
    return ObjectRecord(key=name, size=4, header_bytes=0, header_crc32c=0)


def world(
    *ranks: Sequence[Entry], objects: Sequence[Sequence[str]] = ()
) -> dict[int, RankManifest]:
    return {
        rank: RankManifest(
            attempt="a",
            rank=rank,
            objects=tuple([record(name) for name in (objects[rank] if objects else [f"o{rank}"])]),
            entries=tuple(entries),
        )
        for rank, entries in enumerate(ranks)
    }


def paths(index: Index) -> list[str]:
    return [entry.path for entry in index.entries]


def keys(index: Index) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """Per path, the objects' keys and checksums."""
    found: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for entry in index.entries:
        stored: list[Stored] = []
        if isinstance(entry, ShardedEntry):
            stored = [each.data for each in entry.shards]
        elif isinstance(entry, TensorEntry | BytesEntry):
            stored = [entry.data]
        found[entry.path] = [(index.objects[each.object].key, each.crc32c) for each in stored]
    return found


def test_one_rank_is_everybodys_and_costs_nothing() -> None:
    manifests = world([tensor("m/a"), value("m/b")])
    for rank in (0, 5):
        index = index_of(manifests, rank=rank)
        assert index.entries is manifests[0].entries
        assert index.objects is manifests[0].objects
        assert not index.held_by_other_ranks


def test_shards_are_joined_over_all_ranks() -> None:
    manifests = world(
        [shard("m/w", 0, crc=10)],
        [shard("m/w", 4, crc=11), value("m/v")],
        objects=[["x", "y"], ["y", "x"]],
    )
    for rank, order in ((0, [0, 4]), (1, [4, 0]), (2, [0, 4])):
        index = index_of(manifests, rank=rank)
        (entry,) = [e for e in index.entries if e.path == "m/w"]
        assert isinstance(entry, ShardedEntry)
        assert entry.shape == (8,)
        assert [each.box.offsets[0] for each in entry.shards] == order
        assert sorted(keys(index)["m/w"]) == [("x", (10,)), ("y", (11,))]


def test_one_rank_with_shards() -> None:
    manifests = world([shard("m/w", 0), shard("m/w", 4), value("m/v")])
    for rank in (0, 1):
        index = index_of(manifests, rank=rank)
        assert paths(index) == ["m/w", "m/v"]
        assert not index.held_by_other_ranks


def test_equal_boxes_stand_once_the_own_first_and_others_are_nobodys() -> None:
    same = world([shard("w", 0, crc=1)], [shard("w", 0, crc=1)], [shard("w", 4)])
    assert [keys(index_of(same, rank=rank))["w"][0][0] for rank in (0, 1)] == ["o0", "o1"]
    differ = world([shard("w", 0, crc=1)], [shard("w", 0, crc=2)], [shard("w", 4)])
    for rank, boxes in ((0, [0, 4]), (1, [0, 4]), (2, [4]), (3, [4])):
        entry = index_of(differ, rank=rank).entries[0]
        assert isinstance(entry, ShardedEntry)
        assert sorted(each.box.offsets[0] for each in entry.shards) == boxes
        disputed = [each.box.offsets[0] for each in entry.shards if each.is_disputed]
        assert disputed == ([0] if rank < 2 else [])
    assert keys(index_of(differ, rank=1))["w"][0] == ("o1", (2,))


def rows(start: int, stop: int, elements: bytes, columns: int = 1) -> TensorEntry:
    held = elements[start * columns : stop * columns]
    return TensorEntry(
        path="w",
        dtype="int8",
        shape=(stop - start, columns),
        data=Stored(0, 0, len(held), block_checksums(memoryview(held), 1 << 20)),
        global_shape=(len(elements) // columns, columns),
        offsets=(start, 0),
    )


def boxes_of(manifests: dict[int, RankManifest], rank: int) -> list[tuple[int, int, bool]]:
    entry = index_of(manifests, rank=rank).entries[0]
    assert isinstance(entry, ShardedEntry)
    return [(each.box.offsets[0], each.box.stops[0], each.is_disputed) for each in entry.shards]


def test_of_one_tensor_that_meshes_cut_in_other_ways_one_of_them_counts() -> None:
    whole = bytes(range(12))
    cuts = [(0, 6), (6, 12), (0, 4), (4, 8), (8, 12)]
    manifests = world(*[[rows(*cut, whole)] for cut in cuts])
    for rank in range(6):
        found = boxes_of(manifests, rank)
        assert sorted(found) in (
            [(0, 6, False), (6, 12, False)],
            [(0, 4, False), (4, 8, False), (8, 12, False)],
        )


@pytest.mark.parametrize("at", [0, 5, 11])
def test_of_tensors_that_meshes_cut_in_other_ways_each_rank_has_its_own(at: int) -> None:
    one, other = bytes(range(12)), bytearray(range(12))
    other[at] += 100
    cuts = [(0, 6), (6, 12), (0, 12)]
    tensors = [one, one, bytes(other)]
    manifests = world(*[[rows(*cut, t)] for cut, t in zip(cuts, tensors, strict=True)])
    for rank, (start, stop) in enumerate(cuts):
        assert boxes_of(manifests, rank) == [(start, stop, True)]
    assert boxes_of(manifests, 3) == []


def test_rows_and_columns_of_a_tensor_are_not_known_to_be_the_same() -> None:
    column = TensorEntry(
        path="w", dtype="int8", shape=(4, 1), data=at(), global_shape=(4, 2), offsets=(0, 0)
    )
    other = msgspec.structs.replace(column, offsets=(0, 1))
    manifests = world([rows(0, 4, bytes(8), 2)], [column], [other])
    assert boxes_of(manifests, 0) == [(0, 4, True)]
    assert boxes_of(manifests, 3) == []


def test_shards_of_different_tensors_are_no_tensor() -> None:
    with pytest.raises(FormatError, match="ranks 0 and 1"):
        index_of(world([shard("w", 0)], [shard("w", 4, of=9)]), rank=0)


def test_what_is_replicated_is_everybodys() -> None:
    manifests = world(
        [value("m/n", replicated=True), tensor("m/a", crc=7, replicated=True)],
        [
            value("m/n", replicated=True),
            BytesEntry(path="m/b", type="str", data=at(), replicated=True),
        ],
    )
    for rank in range(4):
        index = index_of(manifests, rank=rank)
        assert sorted(paths(index)) == ["m/a", "m/b", "m/n"]
        assert keys(index)["m/a"] == [("o0", (7,))]
        assert keys(index)["m/b"][0][0] == "o1"
        assert not index.held_by_other_ranks


def test_the_rest_is_private() -> None:
    manifests = world(
        [value("m/n", 0), tensor("m/only0")], [value("m/n", 1), value("m/more")], [value("m/n", 2)]
    )
    assert paths(index_of(manifests, rank=1)) == ["m/n", "m/more"]
    assert index_of(manifests, rank=1).held_by_other_ranks == {"m/only0": (0,)}
    beyond = index_of(manifests, rank=3)
    assert paths(beyond) == []
    assert beyond.held_by_other_ranks == {"m/n": (0, 1, 2), "m/only0": (0,), "m/more": (1,)}


def test_what_all_saved_alike_is_for_new_ranks_too() -> None:
    def of(rank: int, crc: int) -> list[Entry]:
        return [
            ContainerEntry(path="s", type="ordered_dict"),
            value("s/step", 3),
            tensor("s/same", crc=1, data=at(0, 1)),
            tensor("s/other", crc=rank),
            CompositeEntry(
                path="s/q",
                layout="quantized_tensor",
                dtype="qint8",
                shape=(4,),
                parts=("int_repr",),
            ),
            ViewEntry(
                path="s/q@int_repr", of="s/q@storage", dtype="int8", shape=(4,), strides=(1,)
            ),
            tensor("s/q@storage", crc=crc),
        ]

    index = index_of(world(of(0, 5), of(1, 5)), rank=2)
    assert paths(index) == ["s", "s/step", "s/same", "s/q", "s/q@int_repr", "s/q@storage"]
    assert index.held_by_other_ranks == {"s/other": (0, 1)}
    # What a leaf is made of counts as well.
    index = index_of(world(of(0, 5), of(1, 6)), rank=2)
    assert paths(index) == ["s", "s/step", "s/same"]


UNCHECKED = Stored(0, 0, 4, ())
"""Bytes of another format, without checksums."""


def test_without_checksums_nothing_is_alike() -> None:
    entries: list[Entry] = [value("s/step", 3), tensor("s/w", data=UNCHECKED)]
    index = index_of(world(entries, entries), rank=2)
    assert paths(index) == ["s/step"]
    assert index.held_by_other_ranks == {"s/w": (0, 1)}


def test_without_checksums_other_cuts_are_other_tensors() -> None:
    cuts = [(0, 6), (6, 12), (0, 12)]
    manifests = world(
        *[
            [
                TensorEntry(
                    path="w",
                    dtype="int8",
                    shape=(stop - start,),
                    data=Stored(0, 0, stop - start, ()),
                    global_shape=(12,),
                    offsets=(start,),
                )
            ]
            for start, stop in cuts
        ]
    )
    for rank, (start, stop) in enumerate(cuts):
        assert boxes_of(manifests, rank) == [(start, stop, True)]


@pytest.mark.parametrize("kind", ["list", "tuple", "deque", "record"])
def test_a_list_that_would_lose_an_item_is_left_out(kind: Any) -> None:
    def of(rank: int) -> list[Entry]:
        return [
            ContainerEntry(path="s/l", type=kind),
            value("s/l/0", rank),
            value("s/l/1", "x"),
            ContainerEntry(path="s/d", type=kind),
            value("s/d/0", 1),
            ContainerEntry(path="s/empty", type=kind),
        ]

    manifests = world(of(0), of(1))
    index = index_of(manifests, rank=2)
    assert paths(index) == ["s/d", "s/d/0", "s/empty"]
    assert index.held_by_other_ranks == {"s/l/0": (0, 1), "s/l/1": (0, 1)}
    assert index_of(manifests, rank=1).entries == manifests[1].entries


def test_containers_come_with_what_is_in_them() -> None:
    manifests = world(
        [value("n", 1)],
        [
            ContainerEntry(path="m", type="ordered_dict"),
            ContainerEntry(path="m/l", type="tuple"),
            shard("m/l/0", 0, of=4),
            ContainerEntry(path="m/private", type="ordered_dict"),
            value("m/private/x"),
        ],
    )
    assert paths(index_of(manifests, rank=0)) == ["n", "m", "m/l", "m/l/0"]


def test_the_order_is_everybodys_and_then_the_own() -> None:
    names = [f"m/{n}" for n in "qwertyuio"]
    parts = [names[:3], names[3:6], names[6:]]
    ranks: list[list[Entry]] = [
        [
            value("m/z", replicated=True),
            *[tensor(path, replicated=True) for path in part],
            value("m/x", replicated=True),
        ]
        for part in parts
    ]
    manifests = world(*ranks)
    for rank in range(4):
        assert paths(index_of(manifests, rank=rank)) == ["m/z", *names, "m/x"]
    turned = world([shard("a", 0), shard("b", 0)], [shard("b", 4), shard("c", 0), shard("a", 4)])
    assert paths(index_of(turned, rank=0)) == ["c", "a", "b"]
    assert paths(index_of(turned, rank=1)) == ["b", "c", "a"]


@st.composite
def worlds(draw: st.DrawFn) -> dict[int, RankManifest]:
    names = [f"k/{n}" for n in "abcdefgh"]
    everybodys = draw(st.sets(st.sampled_from(names)))
    cut = draw(st.sets(st.sampled_from(names))) - everybodys
    size = draw(st.integers(1, 4))
    ranks: list[list[Entry]] = [[] for _ in range(size)]
    for name in sorted(everybodys):
        ranks[draw(st.integers(0, size - 1))].append(tensor(name, replicated=True))
    for name in sorted(cut):
        for part in range(draw(st.integers(1, 3))):
            ranks[draw(st.integers(0, size - 1))].append(shard(name, 4 * part, of=12))
    for entries in ranks:
        for name in sorted(draw(st.sets(st.sampled_from(names))) - everybodys - cut):
            entries.append(tensor(name) if draw(st.booleans()) else value(name, next(_crcs)))
        entries[:] = draw(st.permutations(entries))
    return world(*ranks, objects=[draw(st.permutations(["x", "y", f"o{r}"])) for r in range(size)])


@given(worlds(), st.integers(0, 5))
def test_every_rank_gets_its_own_and_everybodys(
    manifests: dict[int, RankManifest], rank: int
) -> None:
    index = index_of(manifests, rank=rank)
    found = keys(index)
    assert len(found) == len(index.entries)
    expected: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for manifest in manifests.values():
        for entry in manifest.entries:
            is_private = not isinstance(entry, TensorEntry) or (
                not entry.replicated and entry.offsets is None
            )
            if is_private and manifest.rank != rank and len(manifests) > 1:
                continue
            held = expected.setdefault(entry.path, [])
            if isinstance(entry, TensorEntry):
                key = manifest.objects[entry.data.object].key
                held.append((key, entry.data.crc32c))
    assert {path: sorted(held) for path, held in found.items()} == {
        path: sorted(held) for path, held in expected.items()
    }
    for joined in index.entries:
        if isinstance(joined, ShardedEntry):
            boxes = [each.box for each in joined.shards]
            assert len(set(boxes)) == len(boxes)
            assert all(Box.whole(joined.shape).contains(box) for box in boxes)
    for path, ranks in index.held_by_other_ranks.items():
        assert path not in found
        for other, manifest in manifests.items():
            assert (other in ranks) == (path in [e.path for e in manifest.entries])
    if rank in manifests:
        own = list(dict.fromkeys(entry.path for entry in manifests[rank].entries))
        assert [path for path in found if path in set(own)] == own
        names = {record.key for record in islice(index.objects, len(manifests[rank].objects))}
        assert names == {record.key for record in manifests[rank].objects}


def test_classes_of_optimizers_are_the_ranks_own_then_those_of_the_lowest() -> None:
    manifests = world([value("o")], [value("o")], [value("o")])
    assert index_of(manifests, rank=1).optimizers == {}, "nothing is recorded in older snapshots"
    recorded = [{"a": "A0"}, {"a": "A1", "b": "B1"}, {"b": "B2", "c": "C2"}]
    manifests = {
        rank: msgspec.structs.replace(manifest, optimizers=recorded[rank])
        for rank, manifest in manifests.items()
    }
    for rank, expected in enumerate(["A0 B1 C2", "A1 B1 C2", "A0 B2 C2", "A0 B1 C2"]):
        found = index_of(manifests, rank=rank).optimizers
        assert " ".join(found[path] for path in "abc") == expected
    assert index_of({0: manifests[0]}, rank=0).optimizers == {"a": "A0"}
