"""Who reads what when ranks want the same: the choice of the mode, and the cutting."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actorsnap.format.checksum import MAX_BLOCK_BYTES
from actorsnap.planning.exchange import (
    MIN_SHARING_RANKS,
    ReadMode,
    ReadPlan,
    Wants,
    count_rounds,
    cut,
    plan_exchange,
    want_of,
)
from actorsnap.planning.restore import Range

MIB = 1 << 20
MODEL = want_of("model", [Range("o", 0, 5 * MIB), Range("o", 5 * MIB, 6 * MIB)])
OPTIM = want_of("optim", [Range("p", 0, MIB)])

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
)
def test_every_byte_is_in_one_piece(sizes: list[int], num_readers: int, piece_bytes: int) -> None:
    ranges = laid_out(sizes)
    pieces = cut(ranges, num_readers=num_readers, piece_bytes=piece_bytes)
    total = sum(sizes)
    rounds = count_rounds(total, num_readers=num_readers, piece_bytes=piece_bytes)
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
    pieces = cut(laid_out([MIB - 1, 8 * MIB + 5, 7]), num_readers=3, piece_bytes=2 * MIB)
    parts = [[(part.request, part.start, part.stop) for part in piece] for piece in pieces]
    assert [part for piece in parts for part in piece if part[0] == 0] == [(0, 0, MIB - 1)]
    assert len([part for piece in parts for part in piece if part[0] == 1]) == 9
    assert len(pieces) == 12


def wants(*keys: object, **changes: object) -> Wants:
    values = {"keys": keys, "grouped_bytes": 0, "piece_bytes": 4 * MIB, "obstacle": ""}
    return Wants(**(values | changes))  # type: ignore[arg-type]


def test_the_digest_tells_what_is_wanted() -> None:
    digests = {
        want_of("m", ranges).digest
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
    assert want_of("m", [Range("a", 3, 9)]).nbytes == 6


def test_auto_shares_where_many_want_the_same() -> None:
    few = plan_exchange([wants(MODEL)] * (MIN_SHARING_RANKS - 1), ReadMode.AUTO)
    assert few.mode is ReadMode.DIRECT
    assert "7 ranks want the same 6291456 bytes" in few.reason
    many = plan_exchange([wants(MODEL, OPTIM)] * MIN_SHARING_RANKS, ReadMode.AUTO)
    assert many == ReadPlan(ReadMode.SHARED, many.reason, ("model", "optim"), 4 * MIB, 1)
    assert "all 8 ranks want the same 7340032 bytes" in many.reason


def test_only_what_all_want_is_shared() -> None:
    other = want_of("model", [Range("o", 0, 4)])
    plan = plan_exchange(
        [wants(MODEL, OPTIM), wants(other, OPTIM, grouped_bytes=5, piece_bytes=2 * MIB)],
        ReadMode.SHARED,
    )
    assert plan.keys == ("optim",)
    assert plan.piece_bytes == 2 * MIB
    assert "what only some of them want alike, each of these reads" in plan.reason


def test_why_it_is_direct() -> None:
    def reason(*ranks: Wants, mode: ReadMode = ReadMode.SHARED) -> str:
        plan = plan_exchange(ranks, mode)
        assert plan == ReadPlan(ReadMode.DIRECT, plan.reason)
        return plan.reason

    both = wants(MODEL)
    assert reason(both, both, mode=ReadMode.DIRECT) == "Options.read_mode is 'direct'"
    assert reason(both) == "there is one rank"
    assert reason(both, wants(OPTIM)) == "there is nothing that all 2 ranks want alike"
    assert reason(both, wants(MODEL, obstacle="nccl only")).endswith("rank 1: nccl only")
