# SPDX-License-Identifier: Apache-2.0
"""Plans the reads of ranks that want the same bytes: every rank reads all, or each reads a part.

*Direct*: every rank reads all bytes that it wants. *Shared*: the ranks of a set (all ranks, or the
copies of a mesh) read common ranges once, in pieces that fit a buffer, one per rank and round, and
send the pieces to each other.

A rank of several sets shares with one after the other, in *turns*. Sets without a common rank share
a turn and its rounds.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import msgspec

from actorsnap.format.checksum import MAX_BLOCK_BYTES
from actorsnap.planning.restore import Part, Range

MIN_SHARING_RANKS = 8
"""Fewer ranks do not keep a storage busy enough to pay for the messages."""


class ReadMode(StrEnum):
    """How ranks read common bytes; ``AUTO`` chooses per set of ranks."""

    AUTO = "auto"
    DIRECT = "direct"
    SHARED = "shared"


class RankSet(NamedTuple):
    """Names a set of ranks: a message that lists them would grow with the job."""

    num_ranks: int
    digest: bytes


class RangesDigest(msgspec.Struct, frozen=True, array_like=True):
    """The ranges of one top-level key that a rank wants in common with others.

    Attributes:
        ranks: Those likely to want the same ranges, including this one.
        digest: Equal if the ranges are.
    """

    key: str
    ranks: RankSet
    digest: bytes
    nbytes: int


class ReadInterest(msgspec.Struct, frozen=True, array_like=True):
    """A rank's message about the ranges that it wants in common with others.

    Attributes:
        digests: At most one per key and ranks.
        piece_bytes: Largest piece that fits its memory; at least two of the largest blocks.
        obstacle: Why it cannot send bytes to other ranks, or empty.
    """

    digests: tuple[RangesDigest, ...]
    piece_bytes: int
    obstacle: str


class SharedTurn(msgspec.Struct, frozen=True, array_like=True):
    """One rank's part in a turn.

    Attributes:
        num_rounds: The same on all ranks.
        ranks: Those that share, including this one; None if it only arrives at the rounds.
    """

    num_rounds: int
    ranks: RankSet | None = None
    keys: tuple[str, ...] = ()


class SharedReadPlan(msgspec.Struct, frozen=True, array_like=True):
    """How one rank reads.

    Attributes:
        mode: ``DIRECT``, or ``SHARED`` if any ranks share.
    """

    mode: ReadMode
    reason: str
    piece_bytes: int = 0
    turns: tuple[SharedTurn, ...] = ()

    @property
    def num_rounds(self) -> int:
        return sum(turn.num_rounds for turn in self.turns)


def rank_set(ranks: Sequence[int]) -> RankSet:
    """Returns the name of a set of rising ranks."""
    encoded = struct.pack(f"<{len(ranks)}I", *ranks)
    return RankSet(len(ranks), hashlib.blake2b(encoded, digest_size=8).digest())


def digest_ranges(key: str, ranks: RankSet, ranges: Iterable[Range]) -> RangesDigest:
    """Returns the digest of ``ranges``, which all ranks must list in the same order."""
    digest, nbytes = hashlib.blake2b(digest_size=16), 0
    for each in ranges:
        digest.update(f"{each.key}\0{each.start}\0{each.stop}\0".encode())
        nbytes += each.stop - each.start
    return RangesDigest(key, ranks, digest.digest(), nbytes)


def plan_shared_reads(interests: Sequence[ReadInterest], mode: ReadMode) -> list[SharedReadPlan]:
    """Returns each rank's plan."""
    num_ranks = len(interests)

    def read_directly(reason: str) -> list[SharedReadPlan]:
        return [SharedReadPlan(ReadMode.DIRECT, reason)] * num_ranks

    if mode is ReadMode.DIRECT:
        return read_directly("Options.read_mode is 'direct'")
    if num_ranks == 1:
        return read_directly("there is one rank")
    sets = _find_sets(interests)
    if not sets:
        return read_directly(f"no bytes are wanted by several of the {num_ranks} ranks")
    for rank, own in enumerate(interests):
        if own.obstacle:
            return read_directly(f"rank {rank} cannot send bytes to others: {own.obstacle}")
    min_ranks = MIN_SHARING_RANKS if mode is ReadMode.AUTO else 2
    sharing = [each for each in sets if len(each.members) >= min_ranks]
    reason = _explain(sharing, [each for each in sets if len(each.members) < min_ranks], num_ranks)
    if not sharing:
        return read_directly(reason)
    piece_bytes = min(own.piece_bytes for own in interests)
    turns = [_plan_turn(each, num_ranks, piece_bytes) for each in _in_turns(sharing, num_ranks)]
    return [
        SharedReadPlan(ReadMode.SHARED, reason, piece_bytes, own)
        for own in zip(*turns, strict=True)
    ]


def count_rounds(nbytes: int, *, num_readers: int, piece_bytes: int) -> int:
    """Returns the fewest rounds whose pieces have at most ``piece_bytes``."""
    # Cuts move to multiples of the largest block: pieces grow by up to one.
    return -(-nbytes // (num_readers * (piece_bytes - MAX_BLOCK_BYTES)))


def split_ranges(
    ranges: Sequence[Range], *, num_readers: int, num_rounds: int
) -> list[list[list[Part]]]:
    """Splits ranges into pieces of nearly the same size.

    Args:
        ranges: In the same order on all ranks. Empty ones are dropped.

    Returns:
        Per round and reader, a piece as parts of the ranges. Parts begin at multiples of the
            largest checksum block, counted from the first byte of their range.
    """
    total = sum(each.stop - each.start for each in ranges)
    num_pieces = num_readers * num_rounds
    pieces: list[list[Part]] = [[] for _ in range(num_pieces)]
    begin = 0
    for index, each in enumerate(ranges):
        size = each.stop - each.start
        low = 0
        while low < size:
            # A block belongs to the piece in whose equal share of all bytes it begins.
            number = (begin + low) * num_pieces // total
            end = -(-(number + 1) * total // num_pieces)
            high = min(size, low + -(-(end - begin - low) // MAX_BLOCK_BYTES) * MAX_BLOCK_BYTES)
            pieces[number].append(Part(index, low, high))
            low = high
        begin += size
    return [pieces[at : at + num_readers] for at in range(0, num_pieces, num_readers)]


@dataclass(frozen=True, slots=True)
class _Sharing:
    ranks: RankSet
    members: list[int]
    keys: tuple[str, ...]
    nbytes: int


def _find_sets(interests: Sequence[ReadInterest]) -> list[_Sharing]:
    """Returns the sets of at least two ranks that want the same ranges; large ones first."""
    ranks_of: dict[RangesDigest, list[int]] = {}
    for rank, own in enumerate(interests):
        for digest in own.digests:
            if digest.nbytes:
                ranks_of.setdefault(digest, []).append(rank)
    common: dict[RankSet, list[RangesDigest]] = {}
    members_of: dict[RankSet, list[int]] = {}
    for digest, members in ranks_of.items():
        if len(members) < 2 or len(members) != digest.ranks.num_ranks:
            continue
        # Members agree about the set; so these are all of it, or others.
        if members == members_of.get(digest.ranks) or rank_set(members) == digest.ranks:
            members_of[digest.ranks] = members
            common.setdefault(digest.ranks, []).append(digest)
    sets = [
        _Sharing(
            ranks=ranks,
            members=members_of[ranks],
            keys=tuple(sorted(each.key for each in digests)),
            nbytes=sum(each.nbytes for each in digests),
        )
        for ranks, digests in common.items()
    ]
    return sorted(sets, key=lambda each: (-len(each.members), each.keys, each.members))


def _in_turns(sets: Sequence[_Sharing], num_ranks: int) -> list[list[_Sharing]]:
    """Gives each set the first turn after the last turn of any of its ranks."""
    first_free = [0] * num_ranks
    turns: list[list[_Sharing]] = []
    for each in sets:
        number = max(first_free[rank] for rank in each.members)
        for rank in each.members:
            first_free[rank] = number + 1
        if number == len(turns):
            turns.append([])
        turns[number].append(each)
    return turns


def _plan_turn(sets: Sequence[_Sharing], num_ranks: int, piece_bytes: int) -> list[SharedTurn]:
    num_rounds = max(
        count_rounds(each.nbytes, num_readers=len(each.members), piece_bytes=piece_bytes)
        for each in sets
    )
    parts = [SharedTurn(num_rounds)] * num_ranks
    for each in sets:
        for rank in each.members:
            parts[rank] = SharedTurn(num_rounds, each.ranks, each.keys)
    return parts


def _explain(sharing: Sequence[_Sharing], reading: Sequence[_Sharing], num_ranks: int) -> str:
    parts = []
    if sharing:
        parts.append(f"{_describe(sharing, num_ranks)}, and read each of them once")
    if reading:
        parts.append(
            f"{_describe(reading, num_ranks)}, which each of them reads: with Options.read_mode "
            f"'auto' {MIN_SHARING_RANKS} or more share"
        )
    return "; ".join(parts)


def _describe(sets: Sequence[_Sharing], num_ranks: int) -> str:
    nbytes_of: dict[int, list[int]] = {}
    for each in sets:
        nbytes_of.setdefault(len(each.members), []).append(each.nbytes)
    return ", ".join(
        ("all " if size == num_ranks else f"{len(nbytes)} x " if len(nbytes) > 1 else "")
        + f"{size} ranks want the same {sum(nbytes)} bytes"
        for size, nbytes in nbytes_of.items()
    )
