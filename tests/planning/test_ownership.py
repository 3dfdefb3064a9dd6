# SPDX-License-Identifier: Apache-2.0
"""The owners that the index names are those whose manifests have the boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorsnap.actors.checksum_ledger import manifest_of
from actorsnap.errors import ChecksumMismatch, FormatError, UsageError
from actorsnap.format.geometry import Box
from actorsnap.format.manifest import (
    ContainerEntry,
    ObjectRecord,
    RankManifest,
    SaveRecord,
    Stored,
    TensorEntry,
    ValueEntry,
    ViewEntry,
)
from actorsnap.format.owners import (
    Grid,
    Holders,
    Kept,
    Layout,
    Listed,
    MeshCut,
    Owned,
    Owners,
    RankBox,
    Tensor,
    decode_owners,
    deflate_owners,
    encode_owners,
    grids_of,
)
from actorsnap.planning.index import Wants
from actorsnap.planning.inventory import (
    Sharded,
    build_inventory,
    check_sharded,
    on_several_meshes,
    ranks_digest,
)
from actorsnap.planning.ownership import OwnerIndex, held_boxes, owners_of
from actorsnap.planning.packing import Item, ObjectPlan, PackingRules, pack
from actorsnap.planning.save import plan_save
from actorsnap.state.sources import Captured, HostMemory, Leaf
from tests.support.cases import examples

ATTEMPT = "20260101T000000-0123abcd-1-89abcdef"
MIB = 1 << 20
RULES = PackingRules(chunk_bytes=2 * MIB, max_objects=2, min_object_bytes=2 * MIB)
NOWHERE = HostMemory(0, 0, None)


@dataclass
class _Ledger:
    """Has no checksums."""

    plan: ObjectPlan

    def check_complete(self) -> None:
        pass

    def stored(self, item: int, number: int) -> Stored:
        return Stored(number, self.plan.starts[item], self.plan.ends[item], ())

    def to_record(self) -> ObjectRecord:
        return ObjectRecord(key=self.plan.key, size=0, header_bytes=4096, header_crc32c=0)


@dataclass
class World:
    """A save of many ranks, from what they captured to their manifests."""

    size: int
    captured: list[Captured] = field(init=False)

    def __post_init__(self) -> None:
        self.captured = [Captured(sharded=()) for _ in range(self.size)]
        self._sharded: list[list[Sharded]] = [[] for _ in range(self.size)]

    def add(self, rank: int, part: Any) -> None:
        self.captured[rank].parts.append(part)

    def lay_out(self, path: str, shape: tuple[int, ...], layout: Layout) -> None:
        """Adds a DTensor; as ``state.distributed`` and ``state.capture`` do."""
        mesh = sorted(layout.mesh)
        cut = {each.axis for each in layout.cuts}
        for rank in mesh:
            self._sharded[rank].append(
                Sharded(path, "float32", shape, ranks_digest(tuple(mesh)), len(mesh), layout)
            )
            at = layout.mesh.position(rank)
            assert at is not None
            own = [
                range(count) if 0 in shape or axis not in cut else [at[axis]]
                for axis, count in enumerate(layout.mesh.counts)
            ]
            steps = [step for _, step in layout.mesh.axes]
            holders = sorted(
                layout.mesh.start + sum(a * s for a, s in zip(each, steps, strict=True))
                for each in product(*own)
            )
            for box in held_boxes(layout, shape, at):
                self.add(
                    rank,
                    self._piece(path, shape, box, tuple(holders), len(mesh) < self.size),
                )

    def add_box(self, rank: int, path: str, shape: tuple[int, ...], box: Box) -> None:
        """Adds a shard that follows from no mesh."""
        self._sharded[rank].append(Sharded(path, "float32", shape, b"all", 1))
        self.add(rank, self._piece(path, shape, box, (), False))

    @staticmethod
    def _piece(
        path: str,
        shape: tuple[int, ...],
        box: Box,
        holders: tuple[int, ...],
        is_whole: bool,
    ) -> Leaf:
        nbytes = box.volume * 4
        item = Item(path, "float32", box.sizes, nbytes, 4, False, box.offsets, shape, is_whole)
        held = holders if len(holders) > 1 else ()
        return Leaf(item, NOWHERE, "tensor", "float32", holders=held)

    def save(self) -> tuple[Owners, list[RankManifest]]:
        captured = [
            Captured(each.parts, sharded=tuple(sharded))
            for each, sharded in zip(self.captured, self._sharded, strict=True)
        ]
        inventories, lists, tensors, outlines = [], {}, {}, {}
        for each in captured:
            inventory, own = build_inventory(
                [leaf.item for leaf in each.leaves],
                each.scopes.items(),
                sharded=each.sharded,
                outline=each.outline,
            )
            inventories.append(inventory)
            lists.update(own)
            outlines[inventory.outline] = each.outline
            if each.sharded:
                tensors[inventory.sharded] = each.sharded
        ranks_of = {
            digest: [r for r, i in enumerate(inventories) if i.sharded == digest]
            for digest in tensors
        }
        together = [(ranks_of[digest], held) for digest, held in tensors.items()]
        check_sharded(together)
        plan = plan_save(inventories, lists, RULES, on_several_meshes(together))
        owners = owners_of(inventories, lists, tensors, outlines, plan.ranks, RULES)
        manifests = []
        for rank, each in enumerate(captured):
            plans = pack(
                [leaf.item for leaf in each.leaves],
                attempt=ATTEMPT,
                rank=rank,
                rules=RULES,
                scopes=list(each.scopes.values()),
                plan=plan.ranks[rank],
            )
            ledgers: list[Any] = [_Ledger(each) for each in plans]
            save = SaveRecord(world_size=self.size)
            manifests.append(manifest_of(each, ledgers, attempt=ATTEMPT, rank=rank, save=save))
        return owners, manifests


def stored_again(owners: Owners, world_size: int) -> OwnerIndex:
    data = encode_owners(ATTEMPT, world_size, deflate_owners(owners))
    again = decode_owners(data, attempt=ATTEMPT, world_size=world_size)
    assert again == owners
    return OwnerIndex(again, world_size)


def members(grids: Sequence[Grid]) -> set[int]:
    return {rank for grid in grids for rank in grid}


def scan(manifests: Sequence[RankManifest], path: str, wanted: Box | None) -> set[int]:
    """The ranks whose manifests have a box of the path that intersects ``wanted``."""
    return {
        manifest.rank
        for manifest in manifests
        for entry in manifest.entries
        if entry.path == path
        and isinstance(entry, TensorEntry)
        and entry.offsets is not None
        and (
            wanted is None
            or 0 in entry.shape
            or Box(entry.offsets, entry.shape).intersect(wanted) is not None
        )
    }


@st.composite
def layouts(draw: st.DrawFn, world: int, ndim: int) -> Layout:
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    while prod(counts) > world:
        counts.pop()
        counts = counts or [world]
    # Of an outer mesh: each axis skips ranks.
    order = draw(st.permutations(range(len(counts))))
    steps, reach = [1] * len(counts), 0
    for axis in order:
        room = (world - 1 - reach) // max(1, counts[axis] - 1)
        steps[axis] = reach + 1
        if counts[axis] > 1:
            if room <= reach:
                counts[axis] = 1
                steps[axis] = 1
                continue
            steps[axis] = draw(st.integers(reach + 1, min(room, 2 * reach + 2)))
            reach += (counts[axis] - 1) * steps[axis]
    start = draw(st.integers(0, world - 1 - reach))
    axes = draw(st.permutations(range(len(counts))))
    cutting = axes[: draw(st.integers(0, len(axes) if ndim else 0))]
    cuts = [
        MeshCut(axis, draw(st.integers(0, ndim - 1)), draw(st.sampled_from([1, 1, 2, 3])))
        for axis in cutting
    ]
    return Layout(Grid(start, tuple(zip(counts, steps, strict=True))), tuple(cuts))


WIDTHS = st.sampled_from([(), (1 << 16,), (1 << 18,)])
"""Large rows: ranks that hold the same divide such tensors."""

SHAPES = st.lists(st.one_of(st.integers(0, 7), st.integers(8, 40)), max_size=3).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    low = [draw(st.integers(0, max(0, size - 1))) for size in shape]
    sizes = [draw(st.integers(0, size - at)) for at, size in zip(low, shape, strict=True)]
    return Box(tuple(low), tuple(sizes))


@given(st.data())
@settings(max_examples=examples(300))
def test_owners_by_the_index_are_those_of_all_manifests(data: st.DataObject) -> None:
    draw = data.draw
    size = draw(st.integers(2, 12), "world")
    world = World(size)
    shapes: dict[str, tuple[int, ...]] = {}
    for number in range(draw(st.integers(0, 4))):
        path = f"model/{number}"
        shapes[path] = (*draw(SHAPES), *draw(WIDTHS))
        layout = draw(layouts(size, len(shapes[path])))
        world.lay_out(path, shapes[path], layout)
    for rank in range(size):
        world.add(rank, ContainerEntry(path="model", type="dict"))
        world.add(rank, ValueEntry(path="lr", value=0.1))
        if draw(st.booleans()):
            world.add(rank, ValueEntry(path=f"own/{rank % 3}", value=rank))
        if draw(st.integers(0, 3)):
            world.add(rank, ValueEntry(path="common", value=1, replicated=True))
            nbytes = 4 * MIB
            whole = Item("base", "uint8", (nbytes,), nbytes, 1, True, is_whole=True)
            parted = Item("parted", "uint8", (4, MIB), nbytes, 1, True)
            world.add(rank, Leaf(whole, NOWHERE, "tensor", "uint8"))
            world.add(rank, Leaf(parted, NOWHERE, "tensor", "uint8"))
            world.add(
                rank,
                ViewEntry(
                    path="view", of="base", dtype="uint8", shape=(1,), strides=(1,), replicated=True
                ),
            )
        if draw(st.booleans()):
            shapes["listed"] = (30, 4)
            width = draw(st.integers(1, 3))
            world.add_box(rank, "listed", (30, 4), Box((2 * rank, 0), (2, width)))
    owners, manifests = world.save()
    index = stored_again(owners, size)
    for manifest in manifests:
        assert index.difference(manifest) is None, manifest
    for path, shape in {**shapes, "parted": (4, MIB)}.items():
        for wanted in (None, Box.whole(shape), draw(boxes_in(shape)), draw(boxes_in(shape))):
            expected = scan(manifests, path, wanted)
            if path == "parted":  # ranks that stored all of it
                expected |= set(members(index.ranks_with(path))) - scan(manifests, path, None)
            assert members(index.ranks_with(path, wanted)) == expected, (path, wanted)
    of_values = {
        path: {m.rank for m in manifests if any(e.path == path for e in m.entries)}
        for path in ("common", "base", "view")
    }
    assert {path: members(index.ranks_with(path)) for path in of_values} == of_values
    held = [{e.path for e in m.entries if e.path.startswith("own/")} for m in manifests]
    assert "lr" in index.private_everywhere
    for path in ("own/0", "own/1", "own/2"):
        own = {rank for rank, paths in enumerate(held) if path in paths}
        assert members(index.private.get(path, ())) == own
        assert (path in index.private_everywhere) == (len(own) == size)


@given(st.data())
@settings(max_examples=examples(300))
def test_lookups_where_several_axes_cut_one_dim(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 60))
    counts = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    groups = [data.draw(st.integers(1, 5)) for _ in counts]
    low = data.draw(st.integers(0, size - 1))
    high = data.draw(st.integers(low + 1, size))
    axes = [(count, prod(counts[at + 1 :])) for at, count in enumerate(counts)]
    cuts = [MeshCut(axis, 0, number) for axis, number in enumerate(groups)]
    layout = Layout(Grid(0, tuple(axes)), tuple(cuts))
    index = index_of(layout, (size,))
    wanted = Box((low,), (high - low,))
    expected = set()
    for rank in layout.mesh:
        at = layout.mesh.position(rank)
        assert at is not None
        if any(box.intersect(wanted) for box in held_boxes(layout, (size,), at)):
            expected.add(rank)
    assert members(index.ranks_with("w", wanted)) == expected
    held = {at for at in layout.mesh if held_boxes(layout, (size,), layout.mesh.position(at) or ())}
    assert members(index.ranks_with("w")) == held


def index_of(layout: Layout, *shapes: tuple[int, ...]) -> OwnerIndex:
    tensors = tuple([Tensor("w" * (n + 1), shape) for n, shape in enumerate(shapes)])
    owners = Owners(layouts=(layout,), placed=(Owned((Holders(0),), tensors),))
    return stored_again(owners, layout.mesh.last + 1)


@given(st.sets(st.integers(0, 60)))
def test_any_ranks_are_grids(ranks: set[int]) -> None:
    grids = grids_of(sorted(ranks))
    assert [rank for grid in grids for rank in grid] == sorted(ranks)
    assert all(grid.is_valid(61) for grid in grids)
    for rank in range(61):
        assert any(grid.position(rank) is not None for grid in grids) == (rank in ranks)


def test_regular_ranks_are_one_grid() -> None:
    stage = [64 * outer + 8 + inner for outer in range(100) for inner in range(8)]
    assert grids_of(stage) == (Grid(8, ((100, 64), (8, 1))),)


@pytest.mark.parametrize("cut_axis", [0, 1])
def test_a_mesh_costs_no_bytes_per_rank(cut_axis: int) -> None:
    """Also where replicas divide the tensors, and cut one."""
    sizes = []
    for shards in (4, 64):
        axes = ((4, shards), (shards, 1)) if cut_axis else ((shards, 4), (4, 1))
        layout = Layout(Grid(0, axes), (MeshCut(cut_axis, 0),))
        world = World(4 * shards)
        for number in range(9):
            world.lay_out(f"model/{number}", (8 * shards, 50_000 + 999 * number), layout)
        owners, manifests = world.save()
        index = stored_again(owners, world.size)
        assert [m.rank for m in manifests if index.difference(m)] == []
        assert any(region.part for placed in owners.placed for region in placed.regions)
        assert not owners.listed
        sizes.append(deflate_owners(owners)[0])
    assert sizes[1] - sizes[0] < 100


def test_the_index_of_thousands_of_ranks_is_small() -> None:
    layout = Layout(Grid(0, ((8192, 1),)), (MeshCut(0, 0),))
    parts = ("attention.wq", "attention.wk", "attention.wo", "feed_forward.w1", "ffn_norm")
    tensors = [
        Tensor(f"model/layers.{layer}.{part}.weight", (8192, 8192))
        for layer in range(180)
        for part in parts
    ]
    own = Kept((Grid(0, ((8192, 1),)),), ("step", "rng"))
    owners = Owners(
        layouts=(layout,), placed=(Owned((Holders(0),), tuple(tensors)),), private=(own,)
    )
    assert len(encode_owners(ATTEMPT, 8192, deflate_owners(owners))) < 5000
    index = stored_again(owners, 8192)
    assert index.private_everywhere == ("step", "rng")
    assert index.ranks_with(tensors[7].path) == (Grid(0, ((8192, 1),)),)
    wanted = Box((17, 0), (3, 8192))
    assert index.ranks_with(tensors[7].path, wanted) == (Grid(17, ((3, 1),)),)


HUGE = 1 << 60
LINE = Layout(Grid(0, ((4, 1),)), (MeshCut(0, 0),))


def placed(*regions: Holders, layout: Layout = LINE, shape: tuple[int, ...] = (8, 8)) -> Owners:
    return Owners(layouts=(layout,), placed=(Owned(regions, (Tensor("w", shape),)),))


BAD = {
    "a mesh of absurd size": placed(layout=Layout(Grid(0, ((HUGE, 1),)), (MeshCut(0, 0),))),
    "a mesh outside of the world": placed(layout=Layout(Grid(1, ((4, 1),)))),
    "ranks of a mesh repeat": placed(layout=Layout(Grid(0, ((2, 1), (2, 1))))),
    "an axis without ranks": placed(layout=Layout(Grid(0, ((0, 1),)))),
    "a negative rank": placed(layout=Layout(Grid(-1))),
    "a cut along no axis": placed(layout=Layout(Grid(0, ((4, 1),)), (MeshCut(1, 0),))),
    "two cuts along an axis": placed(
        layout=Layout(Grid(0, ((4, 1),)), (MeshCut(0, 0), MeshCut(0, 1)))
    ),
    "absurdly many groups": placed(layout=Layout(Grid(0, ((4, 1),)), (MeshCut(0, 0, HUGE),))),
    "a dim that the tensor lacks": placed(Holders(0), shape=()),
    "a negative size": placed(Holders(0), shape=(-8,)),
    "a tensor of absurd size": placed(Holders(0), shape=(HUGE, HUGE)),
    "an absent layout": placed(Holders(1)),
    "a region outside of the mesh": placed(Holders(0, (2,), (3,))),
    "a region of other dims": placed(Holders(0, (0, 0), (1, 1))),
    "a region twice": placed(Holders(0), Holders(0)),
    "regions with a position in common": placed(Holders(0, (0,), (3,)), Holders(0, (2,), (2,))),
    "an empty part": placed(Holders(0, part=(3, 3))),
    "a path twice": Owners(
        layouts=(LINE,), placed=(Owned((Holders(0),), (Tensor("w", (8,)), Tensor("w", (8,)))),)
    ),
    "a box of an absent rank": Owners(listed=(Listed("w", (RankBox(4, (0,), (1,)),)),)),
    "a box without a size": Owners(listed=(Listed("w", (RankBox(0, (0,), ()),)),)),
    "a negative offset": Owners(listed=(Listed("w", (RankBox(0, (-1,), (1,)),)),)),
    "boxes of several dims": Owners(
        listed=(Listed("w", (RankBox(0, (0,), (1,)), RankBox(1, (0, 0), (1, 1)))),)
    ),
    "an entry of absurdly many ranks": Owners(private=(Kept((Grid(0, ((HUGE, 1),)),), ("w",)),)),
    "a rank of an entry twice": Owners(private=(Kept((Grid(0, ((2, 1),)),) * 2, ("w",)),)),
    "a rank of an entry twice, by other steps": Owners(
        private=(Kept((Grid(0, ((2, 1),)), Grid(0, ((2, 2),))), ("w",)),)
    ),
    "more ranks of an entry than there are": Owners(
        common=(Kept((Grid(0, ((4, 1),)), Grid(0)), ("w",)),)
    ),
    "a common path twice": Owners(common=(Kept((Grid(0),), ("w", "w")),)),
    "an empty path": Owners(common=(Kept((Grid(0),), ("",)),)),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_index_is_refused(what: str) -> None:
    data = encode_owners(ATTEMPT, 4, deflate_owners(BAD[what]))
    with pytest.raises(FormatError) as caught:
        decode_owners(data, attempt=ATTEMPT, world_size=4)
    assert caught.value.key == f"{ATTEMPT}/owners.json"


def test_an_index_of_absurd_work_is_refused() -> None:
    """A few hundred bytes must not stand for hours of lookups."""
    deep = Layout(Grid(0, ((1 << 10, 1),)), (MeshCut(0, 0, 1 << 10),))
    sizes = [(1 << 21) + number for number in range(17)]
    tensors = tuple([Tensor(f"w{number}", (size,)) for number, size in enumerate(sizes)])
    alike = tuple([Tensor(f"w{number}", (1 << 21,)) for number in range(17)])
    holders = [Holders(0, (number,), (1,)) for number in range(17)]
    everybody = Grid(0, ((1 << 20, 1),))
    absurd = {
        "17 shapes": (Owned((Holders(0),), tensors),),
        "17 regions": (Owned(tuple(holders), tensors[:1]),),
        "17 groups": tuple([Owned((Holders(0),), (tensor,)) for tensor in tensors]),
    }
    for placed in absurd.values():
        with pytest.raises(FormatError, match="17825792 steps"):
            stored_again(Owners(layouts=(deep,), placed=placed), 1 << 20)
    stored_again(Owners(layouts=(deep,), placed=(Owned((Holders(0),), tensors[:16]),)), 1 << 20)
    stored_again(Owners(layouts=(deep,), placed=(Owned((Holders(0),), alike),)), 1 << 20)
    own = tuple([Kept((everybody,), (f"own{number}",)) for number in range(17)])
    with pytest.raises(FormatError, match="steps"):
        stored_again(Owners(private=own), 1 << 20)
    parts = Layout(everybody)
    shared = tuple([Owned((Holders(0, part=(0, 1)),), (tensor,)) for tensor in tensors])
    with pytest.raises(FormatError, match="steps"):
        stored_again(Owners(layouts=(parts,), placed=shared), 1 << 20)


def test_the_index_of_another_save_is_refused() -> None:
    size, body = deflate_owners(placed(Holders(0)))
    good = encode_owners(ATTEMPT, 4, (size, body))
    bad = {
        "of attempt": encode_owners("another", 4, (size, body)),
        "of 5 ranks": encode_owners(ATTEMPT, 5, (size, body)),
        "stand for": encode_owners(ATTEMPT, 4, (1 << 40, body)),
        "inflated": encode_owners(ATTEMPT, 4, (size - 1, body)),
        "incorrect": encode_owners(ATTEMPT, 4, (size, b"x" + body)),
        "inflated, not": encode_owners(ATTEMPT, 4, (size, body[:-9])),
    }
    for why, data in bad.items():
        with pytest.raises(FormatError, match=why):
            decode_owners(data, attempt=ATTEMPT, world_size=4)
    for at in range(0, len(good), 7):
        damaged = bytearray(good)
        damaged[at] ^= 1
        with pytest.raises(ChecksumMismatch):
            decode_owners(bytes(damaged), attempt=ATTEMPT, world_size=4)


def test_what_deflates_too_well_is_stored_as_it_is() -> None:
    owners = Owners(common=(Kept((Grid(0),), ("x" * (4 << 20),)),))
    size, body = deflate_owners(owners)
    assert len(body) > size > 4 << 20
    stored_again(owners, 1)


def test_manifests_that_contradict_the_index() -> None:
    world = World(4)
    world.lay_out("w", (8, 8), LINE)
    owners, manifests = world.save()
    index = OwnerIndex(owners, 4)
    lost = msgspec.structs.replace(manifests[2], entries=())
    assert index.difference(lost) == (
        "rank 2 has 'w' from (4, 0) up to (6, 8) according to the owner index"
    )
    more = [*manifests[1].entries, ValueEntry(path="x")]
    assert "does not have 'x'" in str(
        index.difference(msgspec.structs.replace(manifests[1], entries=tuple(more)))
    )


def test_one_tensor_on_the_same_ranks_has_one_layout() -> None:
    other = Layout(LINE.mesh, (MeshCut(0, 1),))
    parts = [Sharded("w", "float32", (8, 8), b"all", 4, each) for each in (LINE, other)]
    with pytest.raises(UsageError, match="other placements on rank 0 than on rank 2"):
        check_sharded([([0, 1], parts[:1]), ([2, 3], parts[1:])])


@pytest.mark.parametrize("boxes", [{}, {"w": (Box((0, 0), (0, 4)),)}])
def test_one_rank_has_all_of_an_empty_tensor(boxes: dict[str, tuple[Box, ...]]) -> None:
    layout = Layout(Grid(4, ((4, 1),)), (MeshCut(0, 0),))
    owned = Owned((Holders(0),), (Tensor("w", (0, 4)),))
    index = OwnerIndex(Owners(layouts=(layout,), placed=(owned,)), 8)
    wants = Wants(lambda path: True, boxes)
    assert index.ranks_to_ask(wants, ["w"], {0}) == (4,)
    assert index.ranks_to_ask(wants, ["w"], {0, 6}) == ()
