# SPDX-License-Identifier: Apache-2.0
"""Merges the marks of a snapshot: its late metrics and its pins.

Marks are merged in the order of their numbers, so all readers get the same result. An expiry counts
by the storage's clock, where it has one: from the time at which the mark was stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from actorsnap.format.steps import MarkName, MetricsMark, PinMark, StepName


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A snapshot that must not be deleted.

    Attributes:
        holder: Who pinned it (user, host and process), for people.
        until_s: When it expires, in seconds since 1970; None: never.
        key: Key of its mark, at the root.
    """

    name: StepName
    reason: str
    holder: str
    until_s: float | None
    key: str

    @property
    def step(self) -> int:
        """The pinned step."""
        return self.name.step

    def __str__(self) -> str:
        expiry = "" if self.until_s is None else f", until {_text_of_time(self.until_s)}"
        return f"pinned: {self.reason} ({self.holder}{expiry})"


def _text_of_time(time_s: float) -> str:
    try:
        return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError, OSError):  # after the year 9999
        return f"{time_s:.6g} s after 1970"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMark:
    """A mark at a root. ``stored_s``: by the storage's clock, since 1970; 0 if unknown."""

    name: MarkName
    record: PinMark | MetricsMark
    stored_s: float


@dataclass(frozen=True, slots=True)
class Facts:
    """The merged marks of a snapshot: the newest value of each metric, and all pins."""

    metrics: Mapping[str, float | str] = field(default_factory=dict)
    pins: tuple[Pin, ...] = ()

    def pins_at(self, now_s: float) -> tuple[Pin, ...]:
        """Returns the pins that have not expired."""
        return tuple(pin for pin in self.pins if pin.until_s is None or now_s < pin.until_s)


def facts_of(marks: Iterable[StoredMark]) -> Facts:
    """Merges the marks of one snapshot."""
    metrics: dict[str, float | str] = {}
    pins: list[Pin] = []
    for mark in sorted(marks, key=lambda mark: (mark.name.number, mark.name.nonce)):
        record = mark.record
        if isinstance(record, MetricsMark):
            metrics.update(record.metrics)
            continue
        begun_s = mark.stored_s or record.created_s
        pins.append(
            Pin(
                name=mark.name.of,
                reason=record.reason,
                holder=record.holder,
                until_s=None if record.for_s is None else begun_s + record.for_s,
                key=mark.name.key,
            )
        )
    return Facts(metrics, tuple(pins))
