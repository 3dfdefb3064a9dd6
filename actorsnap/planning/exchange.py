"""Plans how ranks read what they want alike: each for itself, or each a part of it for all.

*Direct*: every rank reads what it wants. *Shared*: what the ranks of a set want alike is read
once, in pieces that they take in turn, and is passed on among them. A set is all ranks of the
group, or those that hold the same shards: the copies of a mesh. One round is a piece of each
rank; a piece is small enough for a buffer, so memory does not grow with the ranks.

An *exchange* is what one set shares. A rank's exchanges run in *turns*, one after the other;
those of sets that have no rank in common share a turn, and its rounds.
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
    "Share",
    "Turn",
    "Want",
    "Wants",
    "count_rounds",
    "cut",
    "plan_exchange",
    "runs_of",
    "shares_of",
    "want_of",
]

MIN_SHARING_RANKS = 8
"""So many ranks that want the same share it: fewer do not keep a storage busy enough for the
passing on to pay."""

Runs: TypeAlias = tuple[tuple[int, int, int], ...]
"""Ranks of the group, said shortly: of each run its first rank, how many, and the step between
them. The ranks along one axis of a mesh are one run."""


class ReadMode(StrEnum):
    """How ranks read what several of them want; ``AUTO`` chooses, for each set of ranks."""

    AUTO = "auto"
    DIRECT = "direct"
    SHARED = "shared"


class Want(msgspec.Struct, frozen=True, array_like=True):
    """What a rank wants of one top-level key as other ranks are likely to want it.

    Attributes:
        ranks: Those ranks, with this one; None: every rank of the group.
        digest: Of the ranges, the same on two ranks if these are.
        nbytes: Of the ranges.
    """

    key: str
    ranks: Runs | None
    digest: bytes
    nbytes: int


class Wants(msgspec.Struct, frozen=True, array_like=True):
    """What a rank wants, and what it could do for others.

    Attributes:
        alike: What others may want alike; at most one by key and ranks.
        piece_bytes: The largest piece that it has memory for; at least two of the largest checksum
            blocks.
        obstacle: Why it cannot pass bytes on; empty if it can.
    """

    alike: tuple[Want, ...]
    piece_bytes: int
    obstacle: str


class Exchange(msgspec.Struct, frozen=True, array_like=True):
    """What is shared within each of some sets of ranks that are as far from each other as the
    next ones: the copies of one mesh.

    Attributes:
        ranks: Of the first set; None: every rank of the group.
        keys: The keys whose bytes are shared, rising.
        num_sets: How many.
        step: Between the ranks of a set and those of the next one.
    """

    ranks: Runs | None
    keys: tuple[str, ...]
    num_sets: int = 1
    step: int = 0


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """Exchanges of sets that have no rank in common. All ranks pass its rounds."""

    num_rounds: int
    exchanges: tuple[Exchange, ...]


class ReadPlan(msgspec.Struct, frozen=True, array_like=True):
    """How the ranks read.

    Attributes:
        mode: ``DIRECT``, or ``SHARED`` if something is shared.
        reason: Why, for people.
        piece_bytes: No piece has more.
        turns: What is shared; none if direct.
    """

    mode: ReadMode
    reason: str
    piece_bytes: int = 0
    turns: tuple[Turn, ...] = ()

    @property
    def num_rounds(self) -> int:
        """Of all turns."""
        return sum(turn.num_rounds for turn in self.turns)


class Share(msgspec.Struct, frozen=True):
    """One rank's part in a turn.

    Attributes:
        num_rounds: Of the turn.
        ranks: As in the rank's own ``Want``.
        members: The same, each of them, rising; none if the rank only waits for others.
        keys: What is shared.
    """

    num_rounds: int
    ranks: Runs | None = ()
    members: tuple[int, ...] = ()
    keys: tuple[str, ...] = ()


def runs_of(ranks: Sequence[int]) -> Runs:
    """``ranks``, which rise, as runs."""
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
    """What a rank wants of ``key``, given the ranges in an order that all ranks have."""
    digest, nbytes = hashlib.blake2b(digest_size=16), 0
    for found in ranges:
        digest.update(f"{found.key}\0{found.start}\0{found.stop}\0".encode())
        nbytes += found.stop - found.start
    return Want(key, ranks, digest.digest(), nbytes)


class _Set(msgspec.Struct, frozen=True):
    """Ranks that want the same."""

    ranks: Runs | None
    members: tuple[int, ...]
    keys: tuple[str, ...]
    nbytes: int


def plan_exchange(wants: Sequence[Wants], mode: ReadMode) -> ReadPlan:
    """The plan for ranks that want this, in rank order.

    Args:
        mode: What the coordinator's caller asks for. ``SHARED`` still shares only what is
            wanted alike, if it can be passed on.
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


def shares_of(plan: ReadPlan, rank: int, num_ranks: int) -> list[Share]:
    """What ``rank`` does in each turn."""
    shares = []
    for turn in plan.turns:
        share = Share(turn.num_rounds)
        for exchange in turn.exchanges:
            for ranks in _each_set(exchange):
                members = _members(ranks, num_ranks)
                if rank in members:
                    share = Share(turn.num_rounds, ranks, members, exchange.keys)
        shares.append(share)
    return shares


def count_rounds(nbytes: int, *, num_readers: int, piece_bytes: int) -> int:
    """The fewest rounds in which ``cut`` makes no larger pieces."""
    # A cut is put on the next block of the largest size: pieces get up to one such block larger.
    return -(-nbytes // (num_readers * (piece_bytes - MAX_BLOCK_BYTES)))


def cut(ranges: Sequence[Range], *, num_readers: int, num_rounds: int) -> list[tuple[Part, ...]]:
    """Cuts what is wanted into pieces of nearly the same size.

    Args:
        ranges: In an order that all ranks have. Empty ones are dropped.

    Returns:
        The pieces, each as parts of the ranges. Reader ``i % num_readers`` reads number ``i``
        in round ``i // num_readers``. Parts begin at multiples of the largest checksum
        block, counted from the first byte of their range.
    """
    total = sum(found.stop - found.start for found in ranges)
    num_pieces = num_readers * num_rounds
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


def _sets(wants: Sequence[Wants]) -> list[_Set]:
    """The sets of at least two ranks all of which want the same; large ones first."""
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
    """Gives each set the first turn in which none of its ranks is taken, or later."""
    free = [0] * num_ranks
    turns: list[list[_Set]] = []
    for one in sets:
        at = max(free[rank] for rank in one.members)
        for rank in one.members:
            free[rank] = at + 1
        turns += [[] for _ in range(at + 1 - len(turns))]
        turns[at].append(one)
    return turns


def _turn(sets: Sequence[_Set], piece_bytes: int) -> Turn:
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
    return Turn(num_rounds, tuple(exchanges))


def _joined(exchange: Exchange, one: _Set) -> Exchange | None:
    """The exchange with one set more; None if that is not where the next one would be."""
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
    """Who wants how much alike, by the number of ranks that do."""
    found: dict[int, list[int]] = {}
    for one in sets:
        found.setdefault(len(one.members), []).append(one.nbytes)
    return ", ".join(
        ("all " if size == num_ranks else f"{len(sizes)} x " if len(sizes) > 1 else "")
        + f"{size} ranks want the same {sum(sizes)} bytes"
        for size, sizes in found.items()
    )
