"""Plans the reads of ranks that want the same bytes: every rank reads all, or each reads a part.

*Direct*: every rank reads all bytes that it wants. *Shared*: the ranks of a set read common bytes
once, in pieces, and send the pieces to each other. A set is all ranks of the group, or the holders
of the same shards: the copies of a mesh. A round is one piece per rank. A piece fits a buffer, so
memory does not grow with the ranks.

An *exchange* is the sharing within one set. A rank's exchanges run in consecutive *turns*; sets
without a common rank share a turn and its rounds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import TypeAlias

import msgspec

from actorsnap.format.checksum import MAX_BLOCK_BYTES
from actorsnap.planning.restore import Part, Range

__all__ = [
    "MIN_SHARING_RANKS",
    "Exchange",
    "ReadMode",
    "ReadPlan",
    "Runs",
    "ReadShare",
    "ExchangeTurn",
    "Want",
    "ReadInterest",
    "count_rounds",
    "cut",
    "plan_exchange",
    "runs_of",
    "shares_of",
    "want_of",
]

MIN_SHARING_RANKS = 8
"""Smallest number of ranks that share in mode ``AUTO``.

Fewer ranks do not keep a storage busy enough to pay for the messages.
"""

Runs: TypeAlias = tuple[tuple[int, int, int], ...]
"""Ranks of the group as runs of (first rank, count, step).

The ranks along one axis of a mesh are one run.
"""


class ReadMode(StrEnum):
    """How ranks read common bytes; ``AUTO`` chooses per set of ranks."""

    AUTO = "auto"
    DIRECT = "direct"
    SHARED = "shared"


class Want(msgspec.Struct, frozen=True, array_like=True):
    """The bytes of one top-level key that a rank wants in common with other ranks.

    Attributes:
        ranks: The ranks likely to want the same bytes, including this one; None: every rank of the
            group.
        digest: Digest of the ranges; equal if the ranges are.
        nbytes: Bytes of the ranges.
    """

    key: str
    ranks: Runs | None
    digest: bytes
    nbytes: int


class ReadInterest(msgspec.Struct, frozen=True, array_like=True):
    """The common bytes that a rank wants, and its ability to pass bytes on.

    Attributes:
        alike: At most one per key and ranks.
        piece_bytes: Largest piece that fits its memory; at least two of the largest checksum
            blocks.
        obstacle: The reason why it cannot pass bytes on; empty if it can.
    """

    alike: tuple[Want, ...]
    piece_bytes: int
    obstacle: str


class Exchange(msgspec.Struct, frozen=True, array_like=True):
    """Sharing within each of several sets of ranks at equal distances: the copies of one mesh.

    Attributes:
        ranks: Ranks of the first set; None: every rank of the group.
        keys: The keys whose bytes are shared, rising.
        step: Distance between the ranks of a set and those of the next one.
    """

    ranks: Runs | None
    keys: tuple[str, ...]
    num_sets: int = 1
    step: int = 0


class ExchangeTurn(msgspec.Struct, frozen=True, array_like=True):
    """Exchanges of sets without a common rank. All ranks take part in its rounds."""

    num_rounds: int
    exchanges: tuple[Exchange, ...]


class ReadPlan(msgspec.Struct, frozen=True, array_like=True):
    """How the ranks read.

    Attributes:
        mode: ``DIRECT``, or ``SHARED`` if any bytes are shared.
        reason: Explanation for people.
        piece_bytes: Largest piece.
        turns: Empty if direct.
    """

    mode: ReadMode
    reason: str
    piece_bytes: int = 0
    turns: tuple[ExchangeTurn, ...] = ()

    @property
    def num_rounds(self) -> int:
        return sum(turn.num_rounds for turn in self.turns)


class ReadShare(msgspec.Struct, frozen=True):
    """One rank's part in a turn.

    Attributes:
        num_rounds: Number of rounds of the turn.
        ranks: As in the rank's own ``Want``.
        members: The same ranks, listed, rising; empty if the rank only waits for others.
        keys: The keys whose bytes are shared.
    """

    num_rounds: int
    ranks: Runs | None = ()
    members: tuple[int, ...] = ()
    keys: tuple[str, ...] = ()


def runs_of(ranks: Sequence[int]) -> Runs:
    """Returns rising ``ranks`` as runs."""
    runs: list[tuple[int, int, int]] = []
    at = 0
    while at < len(ranks):
        end = at + 1
        step = ranks[end] - ranks[at] if end < len(ranks) else 0
        while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        runs.append((ranks[at], end - at, step))
        at = end
    return tuple(runs)


def want_of(key: str, ranks: Runs | None, ranges: Iterable[Range]) -> Want:
    """Returns the ``Want`` for ``key``; all ranks must list ``ranges`` in the same order."""
    digest, nbytes = hashlib.blake2b(digest_size=16), 0
    for found in ranges:
        digest.update(f"{found.key}\0{found.start}\0{found.stop}\0".encode())
        nbytes += found.stop - found.start
    return Want(key, ranks, digest.digest(), nbytes)


class _Set(msgspec.Struct, frozen=True):
    """Ranks that want the same bytes."""

    ranks: Runs | None
    members: tuple[int, ...]
    keys: tuple[str, ...]
    nbytes: int


def plan_exchange(wants: Sequence[ReadInterest], mode: ReadMode) -> ReadPlan:
    """Returns the plan for these wants, given in rank order.

    ``mode`` comes from the coordinator's caller. ``SHARED`` shares only bytes that several ranks
    want and can pass on.
    """
    num_ranks = len(wants)
    if mode is ReadMode.DIRECT:
        return ReadPlan(ReadMode.DIRECT, "Options.read_mode is 'direct'")
    if num_ranks == 1:
        return ReadPlan(ReadMode.DIRECT, "there is one rank")
    sets = _sets(wants)
    if not sets:
        return ReadPlan(
            ReadMode.DIRECT, f"there is nothing that several of {num_ranks} ranks want alike"
        )
    for rank, own in enumerate(wants):
        if own.obstacle:
            return ReadPlan(
                ReadMode.DIRECT, f"what is read cannot be passed on: rank {rank}: {own.obstacle}"
            )
    least = MIN_SHARING_RANKS if mode is ReadMode.AUTO else 2
    sharing = [one for one in sets if len(one.members) >= least]
    reason = _reason(sharing, [one for one in sets if len(one.members) < least], num_ranks)
    if not sharing:
        return ReadPlan(ReadMode.DIRECT, reason)
    piece_bytes = min(own.piece_bytes for own in wants)
    turns = tuple(_turn(found, piece_bytes) for found in _in_turns(sharing, num_ranks))
    return ReadPlan(ReadMode.SHARED, reason, piece_bytes, turns)


def shares_of(plan: ReadPlan, rank: int, num_ranks: int) -> list[ReadShare]:
    """Returns the part of ``rank`` in each turn."""
    shares = []
    for turn in plan.turns:
        share = ReadShare(turn.num_rounds)
        for exchange in turn.exchanges:
            for ranks in _each_set(exchange):
                members = _members(ranks, num_ranks)
                if rank in members:
                    share = ReadShare(turn.num_rounds, ranks, members, exchange.keys)
        shares.append(share)
    return shares


def count_rounds(nbytes: int, *, num_readers: int, piece_bytes: int) -> int:
    """Returns the fewest rounds in which ``cut`` makes pieces of at most ``piece_bytes``."""
    # Cuts move to the next block of the largest size: pieces grow by up to one such block.
    return -(-nbytes // (num_readers * (piece_bytes - MAX_BLOCK_BYTES)))


def cut(ranges: Sequence[Range], *, num_readers: int, num_rounds: int) -> list[tuple[Part, ...]]:
    """Cuts the ranges into pieces of nearly the same size.

    Args:
        ranges: In the same order on all ranks. Empty ones are dropped.
        num_readers: Number of ranks that read.
        num_rounds: Number of pieces per reader.

    Returns:
        The pieces, each as parts of the ranges. Reader ``i % num_readers`` reads number ``i`` in
        round ``i // num_readers``. Parts begin at multiples of the largest checksum block, counted
        from the first byte of their range.
    """
    total = sum(found.stop - found.start for found in ranges)
    num_pieces = num_readers * num_rounds
    pieces: list[list[Part]] = [[] for _ in range(num_pieces)]
    begin = 0
    for index, found in enumerate(ranges):
        size = found.stop - found.start
        low = 0
        while low < size:
            # A block belongs to the piece in whose equal share of all bytes it begins.
            number = (begin + low) * num_pieces // total
            end = -(-(number + 1) * total // num_pieces)
            high = min(size, low + -(-(end - begin - low) // MAX_BLOCK_BYTES) * MAX_BLOCK_BYTES)
            pieces[number].append(Part(index, low, high))
            low = high
        begin += size
    return [tuple(parts) for parts in pieces]


def _members(ranks: Runs | None, num_ranks: int) -> tuple[int, ...]:
    if ranks is None:
        return tuple(range(num_ranks))
    return tuple(first + step * number for first, count, step in ranks for number in range(count))


def _moved(ranks: Runs, by: int) -> Runs:
    return tuple((first + by, count, step) for first, count, step in ranks)


def _each_set(exchange: Exchange) -> Iterator[Runs | None]:
    for number in range(exchange.num_sets):
        ranks = exchange.ranks
        yield None if ranks is None else _moved(ranks, number * exchange.step)


def _sets(wants: Sequence[ReadInterest]) -> list[_Set]:
    """Returns the sets of at least two ranks that want the same bytes; large ones first."""
    brought: dict[Want, list[int]] = {}
    for rank, own in enumerate(wants):
        for want in own.alike:
            if want.nbytes:
                brought.setdefault(want, []).append(rank)
    alike: dict[Runs | None, tuple[tuple[int, ...], list[Want]]] = {}
    for want, ranks in brought.items():
        found = tuple(ranks)
        if len(found) > 1 and found == _members(want.ranks, len(wants)):
            alike.setdefault(want.ranks, (found, []))[1].append(want)
    sets = [
        _Set(ranks, members, tuple(sorted(want.key for want in own)), sum(w.nbytes for w in own))
        for ranks, (members, own) in alike.items()
    ]
    return sorted(sets, key=lambda one: (-len(one.members), one.keys, one.members))


def _in_turns(sets: Sequence[_Set], num_ranks: int) -> list[list[_Set]]:
    """Gives each set the first turn after the last turn of any of its ranks."""
    free = [0] * num_ranks
    turns: list[list[_Set]] = []
    for one in sets:
        at = max(free[rank] for rank in one.members)
        for rank in one.members:
            free[rank] = at + 1
        turns += [[] for _ in range(at + 1 - len(turns))]
        turns[at].append(one)
    return turns


def _turn(sets: Sequence[_Set], piece_bytes: int) -> ExchangeTurn:
    num_rounds = max(
        count_rounds(one.nbytes, num_readers=len(one.members), piece_bytes=piece_bytes)
        for one in sets
    )
    exchanges: list[Exchange] = []
    for one in sets:
        longer = _joined(exchanges[-1], one) if exchanges else None
        if longer is None:
            exchanges.append(Exchange(one.ranks, one.keys))
        else:
            exchanges[-1] = longer
    return ExchangeTurn(num_rounds, tuple(exchanges))


def _joined(exchange: Exchange, one: _Set) -> Exchange | None:
    """Returns the exchange extended by one set; None if the set is not at the next position."""
    if exchange.ranks is None or one.ranks is None or exchange.keys != one.keys:
        return None
    by = one.ranks[0][0] - exchange.ranks[0][0]
    step = exchange.step if exchange.num_sets > 1 else by
    if by != step * exchange.num_sets or _moved(exchange.ranks, by) != one.ranks:
        return None
    return Exchange(exchange.ranks, exchange.keys, exchange.num_sets + 1, step)


def _reason(sharing: Sequence[_Set], reading: Sequence[_Set], num_ranks: int) -> str:
    said = []
    if sharing:
        said.append(f"{_described(sharing, num_ranks)}, and read each of them once")
    if reading:
        said.append(
            f"{_described(reading, num_ranks)}, which each of them reads: with Options.read_mode "
            f"'auto' {MIN_SHARING_RANKS} or more share"
        )
    return "; ".join(said)


def _described(sets: Sequence[_Set], num_ranks: int) -> str:
    """Describes the bytes in common, by the number of ranks that want them."""
    found: dict[int, list[int]] = {}
    for one in sets:
        found.setdefault(len(one.members), []).append(one.nbytes)
    return ", ".join(
        ("all " if size == num_ranks else f"{len(sizes)} x " if len(sizes) > 1 else "")
        + f"{size} ranks want the same {sum(sizes)} bytes"
        for size, sizes in found.items()
    )
