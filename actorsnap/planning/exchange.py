"""Plans how ranks read what they want alike: each for itself, or each a part of it for all.

*Direct*: every rank reads what it wants. *Shared*: what all ranks want is read once, in pieces
that the ranks take in turn, and is passed on over the process group. One round is a piece of
each rank; a piece is small enough for a buffer, so memory does not grow with the ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from actorsnap.format.checksum import MAX_BLOCK_BYTES
from actorsnap.planning.restore import Part, Range

__all__ = [
    "MIN_SHARING_RANKS",
    "ReadMode",
    "ReadPlan",
    "Want",
    "Wants",
    "count_rounds",
    "cut",
    "plan_exchange",
    "want_of",
]

MIN_SHARING_RANKS = 8
"""So many ranks that want the same share it: fewer do not keep a storage busy enough for the
passing on to pay."""


class ReadMode(StrEnum):
    """How ranks read what all of them want; ``AUTO`` chooses one of the others."""

    AUTO = "auto"
    DIRECT = "direct"
    SHARED = "shared"


class Want(msgspec.Struct, frozen=True, array_like=True):
    """What a rank wants of one top-level key as every other rank is likely to want it.

    Attributes:
        digest: Of the ranges, the same on two ranks if these are.
        nbytes: Of the ranges.
    """

    key: str
    digest: bytes
    nbytes: int


class Wants(msgspec.Struct, frozen=True, array_like=True):
    """What a rank wants, and what it could do for others.

    Attributes:
        keys: What all may want alike, by key.
        grouped_bytes: What it wants as only some of the ranks do: shards that a mesh
            replicates over some of its axes.
        piece_bytes: The largest piece that it has memory for; at least two of the largest checksum
            blocks.
        obstacle: Why it cannot pass bytes on; empty if it can.
    """

    keys: tuple[Want, ...]
    grouped_bytes: int
    piece_bytes: int
    obstacle: str


class ReadPlan(msgspec.Struct, frozen=True, array_like=True):
    """How the ranks read.

    Attributes:
        mode: ``DIRECT`` or ``SHARED``.
        reason: Why, for people.
        keys: The keys whose common bytes are shared, rising; none if direct.
        piece_bytes: For ``cut``.
        num_rounds: Likewise.
    """

    mode: ReadMode
    reason: str
    keys: tuple[str, ...] = ()
    piece_bytes: int = 0
    num_rounds: int = 0


def want_of(key: str, ranges: Iterable[Range]) -> Want:
    """What a rank wants of ``key``, given the ranges in an order that all ranks have."""
    digest, nbytes = hashlib.blake2b(digest_size=16), 0
    for found in ranges:
        digest.update(f"{found.key}\0{found.start}\0{found.stop}\0".encode())
        nbytes += found.stop - found.start
    return Want(key, digest.digest(), nbytes)


def plan_exchange(wants: Sequence[Wants], mode: ReadMode) -> ReadPlan:
    """The plan for ranks that want this, in rank order.

    Args:
        mode: What the coordinator's caller asks for. ``SHARED`` still shares only what all
            ranks want, if they can pass it on.
    """

    def direct(reason: str) -> ReadPlan:
        return ReadPlan(ReadMode.DIRECT, reason)

    num_ranks = len(wants)
    common = set(wants[0].keys).intersection(*(own.keys for own in wants[1:]))
    nbytes = sum(want.nbytes for want in common)
    obstacle = next(
        (f"rank {rank}: {own.obstacle}" for rank, own in enumerate(wants) if own.obstacle), ""
    )
    if mode is ReadMode.DIRECT:
        return direct("Options.read_mode is 'direct'")
    if num_ranks == 1:
        return direct("there is one rank")
    if not nbytes:
        return direct(f"there is nothing that all {num_ranks} ranks want alike")
    if obstacle:
        return direct(f"what is read cannot be passed on: {obstacle}")
    if mode is ReadMode.AUTO and num_ranks < MIN_SHARING_RANKS:
        return direct(
            f"{num_ranks} ranks want the same {nbytes} bytes; with Options.read_mode 'auto' "
            f"{MIN_SHARING_RANKS} or more share them"
        )
    reason = f"all {num_ranks} ranks want the same {nbytes} bytes, and read each of them once"
    if any(own.grouped_bytes for own in wants):
        reason += "; what only some of them want alike, each of these reads"
    piece_bytes = min(own.piece_bytes for own in wants)
    return ReadPlan(
        ReadMode.SHARED,
        reason,
        tuple(sorted(want.key for want in common if want.nbytes)),
        piece_bytes,
        count_rounds(nbytes, num_readers=num_ranks, piece_bytes=piece_bytes),
    )


def count_rounds(nbytes: int, *, num_readers: int, piece_bytes: int) -> int:
    """The rounds that ``cut`` makes of ``nbytes``."""
    # A cut is put on the next block of the largest size: pieces get up to one such block larger.
    return -(-nbytes // (num_readers * (piece_bytes - MAX_BLOCK_BYTES)))


def cut(ranges: Sequence[Range], *, num_readers: int, piece_bytes: int) -> list[tuple[Part, ...]]:
    """Cuts what is wanted into pieces of nearly the same size.

    Args:
        ranges: In an order that all ranks have. Empty ones are dropped.
        piece_bytes: Bound of a piece; more than the largest checksum block.

    Returns:
        The pieces, each as parts of the ranges. Reader ``i % num_readers`` reads number ``i``
        in round ``i // num_readers``. Parts begin at multiples of the largest checksum
        block, counted from the first byte of their range.
    """
    total = sum(found.stop - found.start for found in ranges)
    num_pieces = num_readers * count_rounds(total, num_readers=num_readers, piece_bytes=piece_bytes)
    pieces: list[list[Part]] = [[] for _ in range(num_pieces)]
    begin = 0
    for index, found in enumerate(ranges):
        size = found.stop - found.start
        low = 0
        while low < size:
            # Each such block belongs to the piece in whose equal share of all bytes it begins.
            number = (begin + low) * num_pieces // total
            end = -(-(number + 1) * total // num_pieces)
            high = min(size, low + -(-(end - begin - low) // MAX_BLOCK_BYTES) * MAX_BLOCK_BYTES)
            pieces[number].append(Part(index, low, high))
            low = high
        begin += size
    return [tuple(parts) for parts in pieces]
