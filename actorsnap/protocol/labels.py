"""The label of a call that all ranks make together: its kind, its path and its step.

Ranks send a short digest of the label with their first heartbeat; ``protocol.roll`` compares. This
module defines the label and its text for people.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import StrEnum

import msgspec

__all__ = ["CallKind", "Label", "named_ranks"]

_MAX_SHOWN_URL = 160
_MAX_RUNS = 8


class CallKind(StrEnum):
    """Kind of a call, named as the method."""

    TAKE = "take"
    ASYNC_TAKE = "async_take"
    RESTORE = "restore"
    PLAN_RESTORE = "plan_restore"

    @property
    def is_save(self) -> bool:
        return self in (CallKind.TAKE, CallKind.ASYNC_TAKE)


class Label(msgspec.Struct, frozen=True, array_like=True):
    """Identifies a call; must be equal on all ranks.

    Attributes:
        url: Normalised URL of the path, without secrets.
        step: The caller's step; None if not given.
    """

    kind: CallKind
    url: str
    step: int | None = None

    @property
    def digest(self) -> bytes:
        """8-byte digest of the label."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=8).digest()

    def __str__(self) -> str:
        url = self.url
        if len(url) > _MAX_SHOWN_URL:
            url = "..." + url[-_MAX_SHOWN_URL:]
        step = "" if self.step is None else f", step={self.step}"
        return f"{self.kind}({url!r}{step})"


def named_ranks(ranks: Sequence[int]) -> str:
    """Returns ascending ranks as text: ``"ranks 0 and 2 to 7"``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    shown = [
        f"{run[0]}"
        if len(run) == 1
        else f"{run[0]} {'to' if run[1] - run[0] > 1 else 'and'} {run[1]}"
        for run in runs[:_MAX_RUNS]
    ]
    if len(runs) > _MAX_RUNS:
        shown.append("others")
    text = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"
