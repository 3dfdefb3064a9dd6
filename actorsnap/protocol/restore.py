# SPDX-License-Identifier: Apache-2.0
"""The decisions of a restore and of its dry run, over ``protocol.rounds``.

0. *Ready*: Each rank has checked its input and begun to read the index of the same attempt. Only
then ``state_dict()`` is called, which may be collective. Decides which private leaves are equal on
all ranks, if more ranks restore than saved.
1. *Compared*: Each rank has compared its app state with the snapshot. Decides whether to continue,
and how to read (``planning.shared_reads``). A dry run ends with the next round, *weighed*, which
adds up the costs.
2. In shared mode one round per piece, for all turns: each rank has read its piece, if any, and
sends it.
3. *Read*: All data is in place. Only then ``load_state_dict()`` is called.
4. *Loaded*: The last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeVar

import msgspec

from actorsnap.errors import IncompatibleState, SnapshotReplaced
from actorsnap.planning.shared_reads import ReadInterest, ReadMode, plan_shared_reads
from actorsnap.protocol.failure import Stage
from actorsnap.protocol.rounds import Continue
from actorsnap.wording import named_ranks

T = TypeVar("T")


class Ready(msgspec.Struct, frozen=True, array_like=True):
    """A rank can begin.

    Attributes:
        contents: Of each rank that saved, if more ranks restore than saved: ``CONTENT_BYTES`` per
            leaf that all ranks saved for themselves.
    """

    url: str
    attempt: str
    contents: bytes = b""


CONTENT_BYTES = 8


class Alike(msgspec.Struct, frozen=True, array_like=True):
    """The numbers of those leaves that have equal contents on all ranks."""

    leaves: tuple[int, ...]


def leaves_alike(contents: Sequence[bytes]) -> tuple[int, ...]:
    """Returns the numbers of the leaves with equal contents; all lists have the same length."""
    first = int.from_bytes(contents[0], "little")
    differs = 0
    for each in set(contents):
        differs |= first ^ int.from_bytes(each, "little")
    size = len(contents[0])
    found = differs.to_bytes(size, "little")
    starts = range(0, size, CONTENT_BYTES)
    return tuple([n for n, at in enumerate(starts) if not any(found[at : at + CONTENT_BYTES])])


class Comparison(msgspec.Struct, frozen=True, array_like=True):
    """A rank has compared its app state with the snapshot.

    Attributes:
        missing, unexpected, mismatched, hints: As in ``IncompatibleState``; empty if allowed.
        unplaced: By escaped key of the app state, paths that are unexpected unless another rank
            with that key has a place for them; empty if allowed.
    """

    interest: ReadInterest
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    unplaced: dict[str, tuple[str, ...]] = {}
    hints: tuple[str, ...] = ()


class ReadCost(msgspec.Struct, frozen=True, array_like=True):
    """Cost of a rank's reads: bytes needed in its app state, bytes and requests to the storage."""

    bytes_needed: int
    bytes_read: int
    num_requests: int


class RestoreTotals(msgspec.Struct, frozen=True, array_like=True):
    ranks: tuple[ReadCost, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]


class RestoreDecisions:
    """See ``actors.rounds.Decisions``; rank 0's ``mode`` applies to all ranks."""

    def __init__(self, *, mode: ReadMode, is_dry_run: bool = False) -> None:
        self.stage = Stage.JOIN
        self._mode = mode
        self._is_dry_run = is_dry_run
        self._compared: list[Comparison] = []
        self._read = 2

    def decide(self, round: int, payloads: Mapping[int, bytes]) -> Continue:
        """Decides any round.

        Raises:
            SnapshotReplaced: The ranks have read different attempts.
            IncompatibleState: Some rank's state does not fit.
        """
        if round == 0:
            return self._on_ready(_decode(payloads, Ready))
        if round == 1:
            return self._on_compared(_decode(payloads, Comparison))
        if self._is_dry_run:
            return self._on_costs(_decode(payloads, ReadCost))
        if round <= self._read:
            return self._enter(Stage.READ if round < self._read else Stage.LOAD)
        return Continue(is_last=True)

    def _enter(self, stage: Stage) -> Continue:
        self.stage = stage
        return Continue()

    def _on_ready(self, ranks: Sequence[Ready]) -> Continue:
        first = ranks[0]
        for own in ranks:
            if own.attempt != first.attempt:
                raise SnapshotReplaced(url=own.url, is_deleted=False)
        self.stage = Stage.COMPARE
        contents = [own.contents for own in ranks if own.contents]
        if not contents:
            return Continue()
        return Continue(common=msgspec.msgpack.encode(Alike(leaves_alike(contents))))

    def _on_compared(self, ranks: list[Comparison]) -> Continue:
        self._compared = ranks
        if not self._is_dry_run:
            missing, unexpected, mismatched = _merged(ranks)
            if missing or unexpected or mismatched:
                raise IncompatibleState(
                    missing=missing,
                    unexpected=unexpected,
                    mismatched=mismatched,
                    hints=_merged_lines([own.hints for own in ranks]),
                )
        plans = plan_shared_reads([own.interest for own in ranks], self._mode)
        self._read = 2 + plans[0].num_rounds
        self.stage = Stage.READ
        return Continue(payloads=dict(enumerate(map(msgspec.msgpack.encode, plans))))

    def _on_costs(self, ranks: Sequence[ReadCost]) -> Continue:
        totals = RestoreTotals(tuple(ranks), *_merged(self._compared))
        return Continue(common=msgspec.msgpack.encode(totals), is_last=True)


def _decode(payloads: Mapping[int, bytes], kind: type[T]) -> list[T]:
    decoder = msgspec.msgpack.Decoder(kind)
    return [decoder.decode(payloads[rank]) for rank in sorted(payloads)]


_Lines: TypeAlias = tuple[str, ...]


def _merged(ranks: Sequence[Comparison]) -> tuple[_Lines, _Lines, _Lines]:
    return (
        _merged_lines([own.missing for own in ranks]),
        _merged_lines(_unexpected(ranks)),
        _merged_lines([own.mismatched for own in ranks]),
    )


def _unexpected(ranks: Sequence[Comparison]) -> list[_Lines]:
    nowhere: dict[str, set[str]] = {}
    for own in ranks:
        for key, paths in own.unplaced.items():
            nowhere.setdefault(key, set(paths)).intersection_update(paths)
    return [
        own.unexpected
        + tuple(path for key in own.unplaced for path in own.unplaced[key] if path in nowhere[key])
        for own in ranks
    ]


def _merged_lines(ranks: Sequence[_Lines]) -> _Lines:
    """Merges lines; one that not all ranks have names its ranks."""
    owners: dict[str, dict[int, None]] = {}
    for rank, own in enumerate(ranks):
        for line in own:
            owners.setdefault(line, {})[rank] = None
    common = [line for line, own in owners.items() if len(own) == len(ranks)]
    others = [(named_ranks(own), line) for line, own in owners.items() if len(own) < len(ranks)]
    return (*common, *[f"{names}: {line}" for names, line in others])
