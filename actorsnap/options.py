"""Options of all calls, frozen and checked on construction. Defaults stand here only."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from actorsnap.errors import UsageError

__all__ = ["MIN_CHUNK_BYTES", "Options", "chunk_within", "from_env"]

_MIB = 1 << 20
MIN_CHUNK_BYTES = 2 * _MIB
"""Two checksum blocks."""

MIN_LOST_AFTER_S = 0.5
"""Less than a busy machine may keep a thread waiting."""

_MAX_TIMEOUT_S = 24 * 3600


_READ_MODES = ("auto", "direct", "shared")
"""``planning.exchange.ReadMode``, which is above this module."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How snapshots are taken and restored. All sizes are bytes, all times seconds.

    Attributes:
        fsync: Wait for the disk before a snapshot counts as saved. False is for scratch
            tiers; the snapshot says so for ever. What replaces a snapshot taken with True
            waits for the disk all the same.
        verify: Compare every byte that is read with its checksum.
        allow_pickle: Store and load objects outside the safe set with pickle. Loading a
            pickle runs code of whoever wrote it.
        timeout_s: A take that has not committed by then is aborted, on all ranks, and so is a
            restore by several; reading or deleting fails with ``StorageError``. At most a day.
        lost_after_s: A rank that was heard in a save or restore, and then not for so long, is
            lost: that ends on all other ranks.
        memory_budget_bytes: Memory for staging copies. There is one budget per process,
            shared by all snapshots: a value given here applies to all from now on. At least
            2 MiB. None leaves it as it is; at first it is 60 % of the memory that is free when
            the runtime starts, counting the cgroups' limits, and at most 64 GiB.
        chunk_bytes: The unit of staging and I/O; at least 2 MiB. Smaller where the budget is.
        num_uploaders: Chunks hashed and written, or fetched, at once.
        max_objects: Data objects written in parallel, per top-level key.
        min_object_bytes: A key is spread over more objects only if each gets this much.
        read_mode: How ranks restore what several of them want alike, all or those with the
            same shards: ``"direct"``, each reads it; ``"shared"``, they read each byte once and
            pass it on among them, over gloo; ``"auto"``, shared by 8 ranks or more. Rank 0's
            holds for all.
        max_gap_bytes: Two wanted ranges with at most so many unwanted bytes between them
            are read by one request.
    """

    fsync: bool = True
    verify: bool = True
    allow_pickle: bool = False
    timeout_s: float = 3600.0
    lost_after_s: float = 30.0
    memory_budget_bytes: int | None = None
    chunk_bytes: int = 16 * _MIB
    num_uploaders: int = 8
    max_objects: int = 4
    min_object_bytes: int = 64 * _MIB
    read_mode: str = "auto"
    max_gap_bytes: int = 64 * 1024

    def __post_init__(self) -> None:
        for name in ("fsync", "verify", "allow_pickle"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"Options.{name} must be True or False")
        self._check_seconds("timeout_s", 0.0)
        self._check_seconds("lost_after_s", MIN_LOST_AFTER_S)
        self._check("chunk_bytes", MIN_CHUNK_BYTES)
        self._check("num_uploaders", 1)
        self._check("max_objects", 1)
        self._check("min_object_bytes", 1)
        self._check("max_gap_bytes", 0)
        if self.read_mode not in _READ_MODES:
            modes = ", ".join(map(repr, _READ_MODES))
            raise UsageError(f"Options.read_mode must be one of {modes}, not {self.read_mode!r}")
        if self.memory_budget_bytes is not None:
            self._check("memory_budget_bytes", MIN_CHUNK_BYTES)

    def _check_seconds(self, name: str, above: float) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not above < value <= _MAX_TIMEOUT_S:
            raise UsageError(f"Options.{name} must lie in ({above:g}, {_MAX_TIMEOUT_S}]")

    def _check(self, name: str, minimum: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise UsageError(f"Options.{name} must be an integer of at least {minimum}")


def chunk_within(chunk_bytes: int, budget_bytes: int) -> int:
    """The size of chunks that fit into the budget, with the memory that is mapped for them."""
    if chunk_bytes <= budget_bytes:
        return chunk_bytes
    # Staging memory comes in powers of two.
    return max(MIN_CHUNK_BYTES, 1 << (budget_bytes.bit_length() - 1))


def from_env(environ: Mapping[str, str] | None = None) -> Options:
    """Options from ``ACTORSNAP_<NAME>`` variables: the only reader of the environment.

    Raises:
        UsageError: a variable cannot be read as its option, or is a misspelt one. Others that
            begin alike are somebody else's.
    """
    source = os.environ if environ is None else environ
    types: dict[str, Any] = {field.name: field.type for field in msgspec.structs.fields(Options)}
    values: dict[str, Any] = {}
    for variable, text in source.items():
        if not variable.startswith("ACTORSNAP_"):
            continue
        name = variable.removeprefix("ACTORSNAP_").lower()
        if name not in types:
            if meant := difflib.get_close_matches(name, types, n=1, cutoff=0.8):
                raise UsageError(f"{variable}: did you mean ACTORSNAP_{meant[0].upper()}?")
            continue
        try:
            values[name] = msgspec.convert(text, types[name], strict=False)
        except msgspec.ValidationError as error:
            raise UsageError(f"{variable}={text!r}: {error}") from error
    return Options(**values)
