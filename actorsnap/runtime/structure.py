# SPDX-License-Identifier: Apache-2.0
"""Describes a captured app state for the uploader process, and back."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from actorsnap.format.manifest import Entry, ValueEntry
from actorsnap.protocol.uploader import Structure
from actorsnap.state.sources import Captured, HostMemory, Leaf, Part

_ELSEWHERE = HostMemory(0, 0, None)
"""Placeholder for leaves whose bytes come through the arena."""


class Described(msgspec.Struct, frozen=True):
    """A state without tensor bytes.

    Attributes:
        digest: Identifies the structure.
        values: Value entries as JSON.
    """

    digest: bytes
    structure: Structure
    values: list[bytes]


_entries = msgspec.json.Decoder(list[tuple[int, Entry]])
_value = msgspec.json.Decoder(ValueEntry)


def describe_state(captured: Captured) -> Described:
    """Blocks; for worker threads."""
    leaves = captured.leaves
    holders: dict[tuple[int, ...], list[int]] = {}
    for number, leaf in enumerate(leaves):
        if leaf.holders:
            holders.setdefault(leaf.holders, []).append(number)
    entries: list[tuple[int, Entry]] = []
    values: list[int] = []
    encoded: list[bytes] = []
    encode = msgspec.json.encode
    for number, part in enumerate(captured.parts):
        kind = type(part)
        if kind is ValueEntry:
            values.append(number)
            encoded.append(encode(part))
        elif kind is not Leaf:
            entries.append((number, part))  # type: ignore[arg-type]
    structure = Structure(
        globs=captured.globs,
        sharded=captured.sharded,
        optimizers=captured.optimizers,
        items=[leaf.item for leaf in leaves],
        kinds=[leaf.kind for leaf in leaves],
        dtypes=[leaf.dtype for leaf in leaves],
        requires_grad=[number for number, leaf in enumerate(leaves) if leaf.requires_grad],
        holders=list(holders.items()),
        rank_zero_wins=[number for number, leaf in enumerate(leaves) if leaf.rank_zero_wins],
        memory_formats={
            n: leaf.memory_format for n, leaf in enumerate(leaves) if leaf.memory_format
        },
        attributes=encode(
            [(n, leaf.attributes) for n, leaf in enumerate(leaves) if leaf.attributes]
        ),
        entries=encode(entries),
        values=values,
    )
    digest = blake2b(msgspec.msgpack.encode(structure), digest_size=16).digest()
    return Described(digest, structure, encoded)


def rebuild_state(structure: Structure, values: list[bytes]) -> Captured:
    """Returns the state; its leaves have no bytes."""
    size = len(structure.items) + len(structure.values)
    entries = _entries.decode(structure.entries)
    parts: list[Part | None] = [None] * (size + len(entries))
    for number, entry in entries:
        parts[number] = entry
    for number, value in zip(structure.values, values, strict=True):
        parts[number] = _value.decode(value)
    columns = zip(structure.items, structure.kinds, structure.dtypes, strict=True)
    leaves = [Leaf(item, _ELSEWHERE, kind, dtype) for item, kind, dtype in columns]
    for number in structure.requires_grad:
        leaves[number].requires_grad = True
    for ranks, numbers in structure.holders:
        for number in numbers:
            leaves[number].holders = ranks
    for number in structure.rank_zero_wins:
        leaves[number].rank_zero_wins = True
    for number, memory_format in structure.memory_formats.items():
        leaves[number].memory_format = memory_format
    for number, attributes in msgspec.json.decode(structure.attributes):
        leaves[number].attributes = attributes
    remaining = iter(leaves)
    whole = [next(remaining) if part is None else part for part in parts]
    return Captured(whole, structure.globs, structure.sharded, structure.optimizers)
