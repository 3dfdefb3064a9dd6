# SPDX-License-Identifier: Apache-2.0
"""Reads of ranks that want the same bytes: the ranks that share, the rounds and the pieces."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.format.checksum import MAX_BLOCK_BYTES
from actorsnap.planning.restore import Part, Range
from actorsnap.planning.shared_reads import (
    MIN_SHARING_RANKS,
    RangesDigest,
    RankSet,
    ReadInterest,
    ReadMode,
    SharedReadPlan,
    SharedTurn,
    count_rounds,
    digest_ranges,
    plan_shared_reads,
    rank_set,
    split_ranges,
)

MIB = 1 << 20

MEMBERS: dict[RankSet, list[int]] = {}


def everybody(num_ranks: int) -> RankSet:
    return rank_set(range(num_ranks))


def model(num_ranks: int) -> RangesDigest:
    ranges = [Range("o", 0, 5 * MIB), Range("o", 5 * MIB, 6 * MIB)]
    return digest_ranges("model", everybody(num_ranks), ranges)


def optim(num_ranks: int) -> RangesDigest:
    return digest_ranges("optim", everybody(num_ranks), [Range("p", 0, MIB)])


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
    by_round = split_ranges(ranges, num_readers=num_readers, num_rounds=rounds)
    assert [len(pieces) for pieces in by_round] == [num_readers] * rounds
    pieces = [piece for pieces in by_round for piece in pieces]
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
    by_round = split_ranges(laid_out([MIB - 1, 8 * MIB + 5, 7]), num_readers=3, num_rounds=4)
    parts = [part for pieces in by_round for piece in pieces for part in piece]
    assert [part for part in parts if part.request == 0] == [Part(0, 0, MIB - 1)]
    assert len([part for part in parts if part.request == 1]) == 9


def interest(
    *digests: RangesDigest, piece_bytes: int = 4 * MIB, obstacle: str = ""
) -> ReadInterest:
    return ReadInterest(digests, piece_bytes, obstacle)


def common_plan(interests: Sequence[ReadInterest], mode: ReadMode) -> SharedReadPlan:
    """The plan, which is the same for all ranks."""
    plan, *others = plan_shared_reads(interests, mode)
    assert len(others) == len(interests) - 1
    assert all(other == plan for other in others)
    return plan


def test_different_ranges_have_different_digests() -> None:
    digests = {
        digest_ranges("m", everybody(2), ranges).digest
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
    assert digest_ranges("m", everybody(2), [Range("a", 3, 9)]).nbytes == 6


def test_auto_shares_where_many_want_the_same() -> None:
    few = common_plan([interest(model(7))] * (MIN_SHARING_RANKS - 1), ReadMode.AUTO)
    assert few.mode is ReadMode.DIRECT
    assert few.reason == (
        "all 7 ranks want the same 6291456 bytes, which each of them reads: with "
        "Options.read_mode 'auto' 8 or more share"
    )
    many = common_plan([interest(model(8), optim(8))] * MIN_SHARING_RANKS, ReadMode.AUTO)
    turn = SharedTurn(1, everybody(8), ("model", "optim"))
    assert many == SharedReadPlan(ReadMode.SHARED, many.reason, 4 * MIB, (turn,))
    assert many.reason == "all 8 ranks want the same 7340032 bytes, and read each of them once"


def test_only_what_is_wanted_alike_is_shared() -> None:
    other = digest_ranges("model", everybody(2), [Range("o", 0, 4)])
    plan = common_plan(
        [interest(model(2), optim(2)), interest(other, optim(2), piece_bytes=2 * MIB)],
        ReadMode.SHARED,
    )
    assert plan.turns == (SharedTurn(1, everybody(2), ("optim",)),)
    assert plan.piece_bytes == 2 * MIB


def hsdp(copies: int, shards: int) -> list[ReadInterest]:
    """Each rank of a mesh wants its shard of two keys, and all want the same model."""
    num_ranks = copies * shards
    found = []
    for rank in range(num_ranks):
        own = rank_set(range(rank % shards, num_ranks, shards))
        ranges = [Range(f"shard-{rank % shards}", 0, 40 * MIB)]
        shard = [digest_ranges(key, own, ranges) for key in ("model", "optim")]
        found.append(interest(*shard, model(num_ranks)))
    return found


def test_auto_decides_for_each_set_and_says_so() -> None:
    plan = common_plan(hsdp(4, 2), ReadMode.AUTO)
    assert plan.turns == (SharedTurn(1, everybody(8), ("model",)),)
    assert plan.reason == (
        "all 8 ranks want the same 6291456 bytes, and read each of them once; 2 x 4 ranks want "
        "the same 167772160 bytes, which each of them reads: with Options.read_mode 'auto' 8 or "
        "more share"
    )
    plan, *_ = plan_shared_reads(hsdp(4, 2), ReadMode.SHARED)
    assert plan.reason == (
        "all 8 ranks want the same 6291456 bytes, 2 x 4 ranks want the same 167772160 bytes, and "
        "read each of them once"
    )


def test_the_sets_of_a_mesh_share_in_the_same_rounds() -> None:
    for rank, plan in enumerate(plan_shared_reads(hsdp(2, 4), ReadMode.SHARED)):
        first, second = plan.turns
        assert first == SharedTurn(1, everybody(8), ("model",))
        assert second == SharedTurn(14, rank_set([rank % 4, rank % 4 + 4]), ("model", "optim"))


@pytest.mark.parametrize(("copies", "shards"), [(8, 128), (128, 8), (2, 2048)])
def test_a_plan_for_many_ranks_is_small(copies: int, shards: int) -> None:
    """Every rank gets one, whatever the number of sets."""
    for plan in plan_shared_reads(hsdp(copies, shards), ReadMode.SHARED):
        assert len(plan.turns) == 2
        assert len(msgspec.msgpack.encode(plan)) < 250
    (digest, *_) = hsdp(copies, shards)[-1].digests
    assert len(msgspec.msgpack.encode(digest)) < 50


def test_a_set_that_not_all_agree_on_reads_for_itself() -> None:
    ranks = hsdp(2, 2)
    ranks[3] = interest(digest_ranges("model", rank_set([1, 3]), [Range("other", 0, 5)]))
    plans = plan_shared_reads(ranks, ReadMode.SHARED)
    sharing = SharedTurn(14, rank_set([0, 2]), ("model", "optim"))
    assert [plan.turns for plan in plans] == [(sharing,), (SharedTurn(14),)] * 2


def test_a_plan_for_irregular_sets_is_small() -> None:
    order = random.Random(1).sample(range(4096), 4096)
    interests: dict[int, ReadInterest] = {}
    for at in range(0, 4096, 512):
        members = sorted(order[at : at + 512])
        own = digest_ranges("model", rank_set(members), [Range(f"shard-{at}", 0, MIB)])
        interests |= dict.fromkeys(members, interest(own))
    plans = plan_shared_reads([interests[rank] for rank in range(4096)], ReadMode.SHARED)
    assert {len(plan.turns) for plan in plans} == {1}
    assert max(len(msgspec.msgpack.encode(plan)) for plan in plans) < 250


@st.composite
def all_interests(draw: st.DrawFn) -> list[ReadInterest]:
    """Ranks with common interests: partitions, and sets that overlap."""
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
    digests: list[list[RangesDigest]] = [[] for _ in range(num_ranks)]
    for number, members in enumerate(dict.fromkeys(sets)):
        ranks = rank_set(members)
        MEMBERS[ranks] = list(members)
        keys = draw(st.sets(st.sampled_from("abc"), min_size=1))
        for key, rank in itertools.product(sorted(keys), members):
            odd = draw(st.integers(0, 20)) == 0
            nbytes = draw(st.integers(0, 3)) * MIB if odd else (number * 7 + 1) * MIB
            digests[rank].append(digest_ranges(key, ranks, [Range(f"{key}{number}", 0, nbytes)]))
    return [interest(*own) for own in digests]


@given(all_interests(), st.randoms(use_true_random=False))
def test_who_shares_agrees_with_all_that_it_shares_with(
    ranks: list[ReadInterest], rng: random.Random
) -> None:
    plans = plan_shared_reads(ranks, ReadMode.SHARED)
    shuffled = [interest(*rng.sample(own.digests, len(own.digests))) for own in ranks]
    assert plan_shared_reads(shuffled, ReadMode.SHARED) == plans
    encoded = msgspec.msgpack.encode(plans)
    assert msgspec.msgpack.decode(encoded, type=list[SharedReadPlan]) == plans
    shared: set[RangesDigest] = set()
    for rank, plan in enumerate(plans):
        own_shared: set[RangesDigest] = set()
        assert [t.num_rounds for t in plan.turns] == [t.num_rounds for t in plans[0].turns]
        for number, turn in enumerate(plan.turns):
            members = [] if turn.ranks is None else MEMBERS[turn.ranks]
            assert members == [] or rank in members
            # All members are there in the same turn, with equal ranges of each key.
            for member in members:
                assert plans[member].turns[number] == turn
            alike = [digest for digest in ranks[rank].digests if digest.ranks == turn.ranks]
            mine = [digest for digest in alike if digest.key in turn.keys]
            assert sorted(digest.key for digest in mine) == list(turn.keys)
            for member in members:
                assert set(mine) <= set(ranks[member].digests)
            nbytes = sum(digest.nbytes for digest in mine)
            least = count_rounds(nbytes, num_readers=max(1, len(members)), piece_bytes=4 * MIB)
            assert least <= turn.num_rounds
            assert not own_shared.intersection(mine)
            own_shared.update(mine)
        shared |= own_shared
    # And whatever could be shared is.
    for digest in {digest for own in ranks for digest in own.digests if digest.nbytes}:
        holders = [rank for rank, own in enumerate(ranks) if digest in own.digests]
        assert (digest in shared) == (len(holders) > 1 and holders == MEMBERS[digest.ranks])


def test_why_it_is_direct() -> None:
    def reason(*ranks: ReadInterest, mode: ReadMode = ReadMode.SHARED) -> str:
        plan = common_plan(ranks, mode)
        assert plan == SharedReadPlan(ReadMode.DIRECT, plan.reason)
        return plan.reason

    both = interest(model(2))
    assert reason(both, both, mode=ReadMode.DIRECT) == "Options.read_mode is 'direct'"
    assert reason(both) == "there is one rank"
    assert reason(both, interest(optim(2))) == "no bytes are wanted by several of the 2 ranks"
    obstacle = interest(model(2), obstacle="no gloo")
    assert reason(both, obstacle) == "rank 1 cannot send bytes to others: no gloo"
