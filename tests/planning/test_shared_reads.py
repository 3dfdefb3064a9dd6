"""Who reads what when ranks want the same: who shares, in which rounds, and the cutting."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.format.checksum import MAX_BLOCK_BYTES
from actorsnap.planning.restore import Range
from actorsnap.planning.shared_reads import (
    MIN_SHARING_RANKS,
    Exchange,
    ExchangeTurn,
    ReadInterest,
    ReadMode,
    ReadPlan,
    Runs,
    Want,
    count_rounds,
    cut,
    plan_exchange,
    runs_of,
    shares_of,
    want_of,
)

MIB = 1 << 20
MODEL = want_of("model", None, [Range("o", 0, 5 * MIB), Range("o", 5 * MIB, 6 * MIB)])
OPTIM = want_of("optim", None, [Range("p", 0, MIB)])

sizes = st.one_of(
    st.integers(0, 3 * MIB),
    st.integers(0, 30).map(lambda n: n * MIB),
    st.integers(0, 40),
)


def laid_out(sizes: list[int]) -> list[Range]:
    """Ranges one behind the other, with gaps."""
    ranges, at = [], 0
    for number, size in enumerate(sizes):
        ranges.append(Range("o", at, at + size))
        at += size + number % 3
    return ranges


@given(
    st.lists(sizes, max_size=30),
    st.integers(1, 9),
    st.integers(2 * MIB, 20 * MIB),
    st.integers(0, 3),
)
def test_every_byte_is_in_one_piece(
    sizes: list[int], num_readers: int, piece_bytes: int, more: int
) -> None:
    ranges = laid_out(sizes)
    total = sum(sizes)
    rounds = more + count_rounds(total, num_readers=num_readers, piece_bytes=piece_bytes)
    pieces = cut(ranges, num_readers=num_readers, num_rounds=rounds)
    assert len(pieces) == num_readers * rounds
    reached = [0] * len(ranges)
    for piece in pieces:  # in order, so that each range is read from its first byte to its last
        assert sum(part.stop - part.start for part in piece) <= piece_bytes
        for part in piece:
            assert part.start == reached[part.request] < part.stop
            assert part.start % MAX_BLOCK_BYTES == 0
            reached[part.request] = part.stop
    assert reached == sizes
    for piece in pieces:
        share = total / len(pieces)
        assert abs(sum(part.stop - part.start for part in piece) - share) <= MAX_BLOCK_BYTES


def test_a_small_request_is_not_cut_a_large_one_is() -> None:
    pieces = cut(laid_out([MIB - 1, 8 * MIB + 5, 7]), num_readers=3, num_rounds=4)
    parts = [[(part.request, part.start, part.stop) for part in piece] for piece in pieces]
    assert [part for piece in parts for part in piece if part[0] == 0] == [(0, 0, MIB - 1)]
    assert len([part for piece in parts for part in piece if part[0] == 1]) == 9
    assert len(pieces) == 12


def wants(*alike: Want, **changes: object) -> ReadInterest:
    values = {"alike": alike, "piece_bytes": 4 * MIB, "obstacle": ""}
    return ReadInterest(**(values | changes))  # type: ignore[arg-type]


def test_the_digest_tells_what_is_wanted() -> None:
    digests = {
        want_of("m", None, ranges).digest
        for ranges in (
            [],
            [Range("a", 0, 1)],
            [Range("a", 0, 2)],
            [Range("b", 0, 1)],
            [Range("a", 0, 1), Range("a", 1, 2)],
            [Range("a", 1, 2), Range("a", 0, 1)],
        )
    }
    assert len(digests) == 6
    assert want_of("m", None, [Range("a", 3, 9)]).nbytes == 6


def test_auto_shares_where_many_want_the_same() -> None:
    few = plan_exchange([wants(MODEL)] * (MIN_SHARING_RANKS - 1), ReadMode.AUTO)
    assert few.mode is ReadMode.DIRECT
    assert few.reason == (
        "all 7 ranks want the same 6291456 bytes, which each of them reads: with "
        "Options.read_mode 'auto' 8 or more share"
    )
    many = plan_exchange([wants(MODEL, OPTIM)] * MIN_SHARING_RANKS, ReadMode.AUTO)
    turn = ExchangeTurn(1, (Exchange(None, ("model", "optim")),))
    assert many == ReadPlan(ReadMode.SHARED, many.reason, 4 * MIB, (turn,))
    assert many.reason == "all 8 ranks want the same 7340032 bytes, and read each of them once"


def test_only_what_is_wanted_alike_is_shared() -> None:
    other = want_of("model", None, [Range("o", 0, 4)])
    plan = plan_exchange(
        [wants(MODEL, OPTIM), wants(other, OPTIM, piece_bytes=2 * MIB)], ReadMode.SHARED
    )
    assert plan.turns == (ExchangeTurn(1, (Exchange(None, ("optim",)),)),)
    assert plan.piece_bytes == 2 * MIB


def hsdp(copies: int, shards: int, *more: Want, nbytes: int = 40 * MIB) -> list[ReadInterest]:
    """What ranks of a mesh of two axes want: their shard, of two keys."""
    found = []
    for rank in range(copies * shards):
        own = runs_of(range(rank % shards, copies * shards, shards))
        ranges = [Range(f"shard-{rank % shards}", 0, nbytes)]
        found.append(wants(want_of("model", own, ranges), want_of("optim", own, ranges), *more))
    return found


def test_auto_decides_for_each_set_and_says_so() -> None:
    plan = plan_exchange(hsdp(4, 2, MODEL), ReadMode.AUTO)
    assert plan.turns == (ExchangeTurn(1, (Exchange(None, ("model",)),)),)
    assert plan.reason == (
        "all 8 ranks want the same 6291456 bytes, and read each of them once; 2 x 4 ranks want "
        "the same 167772160 bytes, which each of them reads: with Options.read_mode 'auto' 8 or "
        "more share"
    )
    plan = plan_exchange(hsdp(4, 2, MODEL), ReadMode.SHARED)
    assert plan.reason == (
        "all 8 ranks want the same 6291456 bytes, 2 x 4 ranks want the same 167772160 bytes, and "
        "read each of them once"
    )


def test_the_sets_of_a_mesh_share_in_the_same_rounds() -> None:
    plan = plan_exchange(hsdp(2, 4, MODEL), ReadMode.SHARED)
    everybody, copies = plan.turns
    assert everybody == ExchangeTurn(1, (Exchange(None, ("model",)),))
    assert copies == ExchangeTurn(14, (Exchange(((0, 2, 4),), ("model", "optim"), 4, 1),))
    for rank in range(8):
        first, second = shares_of(plan, rank, 8)
        assert first.members == tuple(range(8))
        assert second.members == (rank % 4, rank % 4 + 4)


@pytest.mark.parametrize(("copies", "shards"), [(8, 128), (128, 8), (2, 2048)])
def test_a_plan_for_many_ranks_is_small(copies: int, shards: int) -> None:
    """It goes to every rank, whatever the number of sets."""
    plan = plan_exchange(hsdp(copies, shards, MODEL), ReadMode.SHARED)
    assert len(plan.turns) == 2
    assert len(msgspec.msgpack.encode(plan)) < 250
    (want, *_) = hsdp(copies, shards)[-1].alike
    assert len(msgspec.msgpack.encode(want)) < 50


def test_a_set_that_not_all_agree_on_reads_for_itself() -> None:
    ranks = hsdp(2, 2)
    ranks[3] = wants(want_of("model", ((1, 2, 2),), [Range("other", 0, 5)]))
    plan = plan_exchange(ranks, ReadMode.SHARED)
    assert plan.turns == (ExchangeTurn(14, (Exchange(((0, 2, 2),), ("model", "optim")),)),)
    assert [bool(share.members) for share in shares_of(plan, 3, 4)] == [False]


def test_ranks_as_runs() -> None:
    assert runs_of([3]) == ((3, 1, 0),)
    assert runs_of(range(5, 90, 4)) == ((5, 22, 4),)
    assert runs_of([0, 1, 2, 8, 9, 10]) == ((0, 3, 1), (8, 3, 1))


@st.composite
def claims(draw: st.DrawFn) -> list[ReadInterest]:
    """Ranks that want things alike with any others: partitions, and sets that overlap."""
    num_ranks = draw(st.integers(2, 12))
    some = st.sets(st.integers(0, num_ranks - 1), min_size=2).map(
        lambda found: tuple(sorted(found))
    )
    sets = draw(st.lists(some, max_size=5, unique=True))
    order = draw(st.permutations(range(num_ranks)))
    size = draw(st.integers(1, num_ranks))
    sets += [
        tuple(sorted(group))
        for group in (order[at : at + size] for at in range(0, num_ranks, size))
    ]
    alike: list[list[Want]] = [[] for _ in range(num_ranks)]
    for number, members in enumerate(dict.fromkeys(sets)):
        ranks: Runs | None = None if len(members) == num_ranks else runs_of(members)
        keys = draw(st.sets(st.sampled_from("abc"), min_size=1))
        for key, rank in itertools.product(sorted(keys), members):
            odd = draw(st.integers(0, 20)) == 0
            nbytes = draw(st.integers(0, 3)) * MIB if odd else (number * 7 + 1) * MIB
            alike[rank].append(want_of(key, ranks, [Range(f"{key}{number}", 0, nbytes)]))
    return [wants(*own) for own in alike]


@given(claims(), st.randoms(use_true_random=False))
def test_who_shares_agrees_with_all_that_it_shares_with(
    ranks: list[ReadInterest], rng: random.Random
) -> None:
    plan = plan_exchange(ranks, ReadMode.SHARED)
    assert plan_exchange([wants(*shuffled(own, rng)) for own in ranks], ReadMode.SHARED) == plan
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=ReadPlan)
    shares = [shares_of(decoded, rank, len(ranks)) for rank in range(len(ranks))]
    shared: set[Want] = set()
    for rank, own in enumerate(shares):
        own_shared: set[Want] = set()
        assert [share.num_rounds for share in own] == [turn.num_rounds for turn in plan.turns]
        for turn, share in enumerate(own):
            assert share.members == () or rank in share.members
            # All members are there in the same turn, with equal wants of each key.
            for member in share.members:
                assert shares[member][turn] == share
            alike = [want for want in ranks[rank].alike if want.ranks == share.ranks]
            mine = [want for want in alike if want.key in share.keys]
            assert sorted(want.key for want in mine) == list(share.keys)
            for member in share.members:
                assert set(mine) <= set(ranks[member].alike)
            nbytes = sum(want.nbytes for want in mine)
            least = count_rounds(
                nbytes, num_readers=max(1, len(share.members)), piece_bytes=4 * MIB
            )
            assert least <= share.num_rounds
            assert not own_shared.intersection(mine)
            own_shared.update(mine)
        shared |= own_shared
    # And whatever could be shared is.
    for want in {want for own in ranks for want in own.alike if want.nbytes}:
        holders = [rank for rank, own in enumerate(ranks) if want in own.alike]
        named = range(len(ranks)) if want.ranks is None else spread(want.ranks)
        assert (want in shared) == (len(holders) > 1 and holders == list(named))


def shuffled(own: ReadInterest, rng: random.Random) -> list[Want]:
    return rng.sample(own.alike, len(own.alike))


def spread(ranks: Runs) -> list[int]:
    return [first + step * n for first, count, step in ranks for n in range(count)]


def test_why_it_is_direct() -> None:
    def reason(*ranks: ReadInterest, mode: ReadMode = ReadMode.SHARED) -> str:
        plan = plan_exchange(ranks, mode)
        assert plan == ReadPlan(ReadMode.DIRECT, plan.reason)
        return plan.reason

    both = wants(MODEL)
    assert reason(both, both, mode=ReadMode.DIRECT) == "Options.read_mode is 'direct'"
    assert reason(both) == "there is one rank"
    assert reason(both, wants(OPTIM)) == "there is nothing that several of 2 ranks want alike"
    assert reason(both, wants(MODEL, obstacle="no gloo")).endswith("rank 1: no gloo")
