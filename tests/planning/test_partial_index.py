# SPDX-License-Identifier: Apache-2.0
"""What a rank reads with an owner index is what it would take from all manifests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from actorsnap.errors import FormatError
from actorsnap.format.geometry import Box
from actorsnap.format.manifest import (
    Commit,
    ContainerEntry,
    RankManifest,
    TensorEntry,
    ValueEntry,
    ViewEntry,
)
from actorsnap.format.owners import Grid, Layout, MeshCut, Owners
from actorsnap.planning.index import Elsewhere, Index, ShardedEntry, Wants, index_of
from actorsnap.planning.packing import Item
from actorsnap.protocol.restore import leaves_alike
from actorsnap.runtime.partial_index import PartialIndex
from actorsnap.state.sources import Leaf
from tests.planning.test_ownership import (
    ATTEMPT,
    MIB,
    NOWHERE,
    SHAPES,
    World,
    boxes_in,
    layouts,
    stored_again,
)
from tests.support.cases import examples


class Reader:
    """Counts the manifests that are read."""

    def __init__(self, owners: Owners | None, manifests: list[RankManifest]) -> None:
        self.stored, self.manifests = owners, manifests
        self.asked: list[int] = []

    async def owners(self, commit: Commit) -> tuple[Owners, bytes] | None:
        return None if self.stored is None else (self.stored, b"")

    async def manifest(
        self, commit: Commit, rank: int, wants: Callable[[str], bool] | None = None
    ) -> RankManifest:
        self.asked.append(rank)
        kept = [e for e in self.manifests[rank].entries if wants is None or wants(e.path)]
        return replace(self.manifests[rank], entries=tuple(kept))

    async def entries(
        self, commit: Commit, rank: int, paths: Collection[str], *, with_containers: bool = False
    ) -> RankManifest:
        containers = {e.path for e in self.manifests[rank].entries if type(e) is ContainerEntry}
        wanted = {*paths, *containers} if with_containers else {*paths}
        return await self.manifest(commit, rank, wanted.__contains__)


async def _now(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def read(reader: Any, rank: int, wants: Wants, num_ranks: int = 1) -> Index:
    """One of ``num_ranks`` reads its index; the others are as if they had agreed with it."""
    world = len(reader.manifests)
    features = () if reader.stored is None else ("owners",)
    commit: Any = Commit(
        version=1, features=features, world_size=world, attempt=ATTEMPT, created=""
    )

    async def run() -> Index:
        async def begin(each: int) -> PartialIndex:
            return await PartialIndex.begin(reader, _now, commit, each, num_ranks)

        contents = [(await begin(each)).contents() for each in range(world)]
        reader.asked.clear()
        alike = leaves_alike(contents) if num_ranks > world and all(contents) else ()
        return await (await begin(rank)).complete(reader, _now, wants, alike, at_once=3)

    return anyio.run(run)


def wants_of(names: Collection[str], boxes: Mapping[str, tuple[Box, ...]]) -> Wants:
    above = {p[:at] for p in names for at, c in enumerate(p) if c == "/"}
    return Wants(lambda path: path.partition("@")[0] in {*names, *above}, boxes)


def places(index: Index, entry: Any) -> Any:
    """An entry without the numbers of objects."""
    if isinstance(entry, ShardedEntry):
        return replace(entry, shards=()), {
            (s.box, index.objects[s.data.object].part, s.data.start, s.is_disputed)
            for s in entry.shards
        }
    if isinstance(entry, TensorEntry):
        where = index.objects[entry.data.object].part, entry.data.start
        return replace(entry, data=replace(entry.data, object=0)), where
    return entry


@given(st.data(), st.booleans())
@settings(max_examples=examples(300), deadline=None)
def test_a_part_of_the_index_is_that_part_of_all_of_it(data: st.DataObject, is_older: bool) -> None:
    draw = data.draw
    size = draw(st.integers(2, 10), "world")
    world = World(size)
    shapes: dict[str, tuple[int, ...]] = {}
    for number in range(draw(st.integers(0, 4))):
        path = f"model/{number}"
        shapes[path] = draw(SHAPES)
        world.lay_out(path, shapes[path], draw(layouts(size, len(shapes[path]))))
    is_step_alike = draw(st.booleans())
    for rank in range(size):
        for path, kind in (("model", "dict"), ("own", "dict"), ("own/list", "list")):
            world.add(rank, ContainerEntry(path=path, type=kind))  # type: ignore[arg-type]
        world.add(rank, ValueEntry(path="own/step", value=7 if is_step_alike else rank))
        if draw(st.booleans()):
            world.add(rank, ValueEntry(path=f"own/{rank % 3}", value=rank))
            world.add(rank, ValueEntry(path="own/list/0", value=rank))
        if draw(st.integers(0, 3)):
            world.add(rank, ValueEntry(path="common", value=1, replicated=True))
            base = Item("base", "uint8", (4 * MIB,), 4 * MIB, 1, True, is_whole=True)
            parted = Item("parted", "uint8", (4, MIB), 4 * MIB, 1, True)
            world.add(rank, Leaf(base, NOWHERE, "tensor", "uint8"))
            world.add(rank, Leaf(parted, NOWHERE, "tensor", "uint8"))
            fields: Any = {"dtype": "uint8", "shape": (1,), "strides": (1,)}
            world.add(rank, ViewEntry(path="view", of="base", replicated=True, **fields))
        if draw(st.booleans()):
            shapes["listed"] = (30, 4)
            world.add_box(rank, "listed", (30, 4), Box((2 * rank, 0), (2, 3)))
    owners, manifests = world.save()
    rank = draw(st.integers(0, size + 1), "rank")
    known = sorted({e.path for m in manifests for e in m.entries})
    names = draw(st.sets(st.sampled_from(known)), "names")
    boxes = {
        path: tuple(draw(st.lists(boxes_in(shape), max_size=1)))
        for path, shape in shapes.items()
        if draw(st.booleans())
    }
    wants = wants_of(names, boxes)
    reader = Reader(None if is_older else owners, manifests)
    found = read(reader, rank, wants, num_ranks=size + 2)
    whole = index_of(dict(enumerate(manifests)), rank=rank)
    expected = {entry.path: entry for entry in whole.entries}
    got = {entry.path: entry for entry in found.entries}
    assert len(got) == len(found.entries)
    for path in names & expected.keys():
        if isinstance(expected[path], ContainerEntry) and not any(
            name.startswith(f"{path}/") and name in got for name in names
        ):
            continue  # it would be empty
        entry, full = got[path], expected[path]
        if isinstance(full, ShardedEntry) and path in boxes:
            assert isinstance(entry, ShardedEntry)
            parts = {s.box for s in full.shards if wants.has_part(path, s.box.offsets, s.box.sizes)}
            # A rank that needs all boxes to know which are right has more.
            assert parts <= {shard.box for shard in entry.shards} <= {s.box for s in full.shards}
            shards = tuple([s for s in full.shards if s.box in {t.box for t in entry.shards}])
            full = replace(full, shards=shards)
        assert places(found, entry) == places(whole, full), path
    for path, entry in got.items():
        if not isinstance(entry, Elsewhere):
            assert path in expected
    if "view" in names:
        assert "base" in got or "base" not in expected
    unheld = {path: set(ranks) for path, ranks in found.held_by_other_ranks.items()}
    for path, ranks in whole.held_by_other_ranks.items():
        if path in names:
            assert unheld[path] == set(ranks)


def mesh_of(ranks: int, rows: int) -> tuple[Owners, list[RankManifest]]:
    world = World(ranks)
    layout = Layout(Grid(0, ((ranks, 1),)), (MeshCut(0, 0),))
    for number in range(100):
        world.lay_out(f"model/{number}", (rows, 4), layout)
    for rank in range(ranks):
        world.add(rank, ValueEntry(path="own", value=rank))
    return world.save()


def wanted_rows(start: int, stop: int) -> Wants:
    names = [f"model/{number}" for number in range(100)]
    return wants_of(
        {*names, "own"}, {path: (Box((start, 0), (stop - start, 4)),) for path in names}
    )


def test_only_ranks_that_have_something_are_asked() -> None:
    owners, manifests = mesh_of(24, 48)
    for rank, wants, asked in (
        (5, wanted_rows(10, 12), {5}),
        (5, wanted_rows(11, 15), {5, 6, 7}),
        (20, wanted_rows(3, 9), {20, 1, 2, 3, 4}),
        (24, wanted_rows(0, 2), {0}),
        (5, wanted_rows(0, 48), set(range(24))),
    ):
        reader = Reader(owners, manifests)
        read(reader, rank, wants)
        assert sorted(reader.asked) == sorted(asked)


@pytest.mark.parametrize("lies", ["lacks", "has more", "elsewhere"])
def test_manifests_that_contradict_the_owners_are_refused(lies: str) -> None:
    owners, manifests = mesh_of(24, 48)
    entries = list(manifests[7].entries)
    at = next(n for n, e in enumerate(entries) if e.path == "model/50")
    entry: Any = entries[at]
    if lies == "lacks":
        del entries[at]
    elif lies == "elsewhere":
        entries[at] = replace(entry, offsets=(12, 0))
    else:
        entries.append(replace(entry, offsets=(40, 0)))
    manifests[7] = replace(manifests[7], entries=tuple(entries))
    for rank, wants in ((6, wanted_rows(12, 16)), (7, wanted_rows(14, 16))):
        with pytest.raises(FormatError, match=r"rank 7 .*'model/50'.*owner index") as caught:
            read(Reader(owners, manifests), rank, wants)
        assert caught.value.key == f"{ATTEMPT}/owners.json"
    read(Reader(owners, manifests), 3, wanted_rows(6, 8))  # it does not ask rank 7


def test_leaves_alike() -> None:
    a, b, c = b"a" * 8, b"b" * 8, b"c" * 8
    assert leaves_alike([a + b + c] * 3) == (0, 1, 2)
    assert leaves_alike([a + b + c, a + c + c]) == (0, 2)
    assert leaves_alike([a, a[:7] + b"x"]) == ()


def test_stored_again() -> None:
    owners, manifests = mesh_of(20, 41)
    index = stored_again(owners, 20)
    for manifest in manifests:
        assert index.difference(manifest) is None
        assert index.contradiction(manifest, index.paths) is None
