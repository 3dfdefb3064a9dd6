"""A rank's inventory, and the checks that ranks agree about the tensors that they hold parts of.

A *scope* is a list of items that ranks hold together. An inventory names it by its digest,
whatever its length; the list itself is sent once. Items of one rank only are not named at all.

Meshes, DistributedDataParallel and the caller declare that ranks hold the same. Contents are never
compared: tensors of one name on several meshes are private (``docs/decisions``, 0007).

It must not know who writes what (``save``), nor what the ranks say to each other.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Any

import msgspec

from actorsnap.errors import UsageError
from actorsnap.planning.index import named_ranks
from actorsnap.planning.packing import Item

__all__ = [
    "Inventory",
    "Scope",
    "Sharded",
    "build_inventory",
    "check_sharded",
    "digest_of",
    "index_runs",
    "inventory_digest",
    "item_digest",
    "on_several_meshes",
    "ranks_digest",
    "refuse",
    "sharded_digest",
]

_DIGEST_BYTES = 12
"""Every rank sends two in each save. None of them is an adversary's."""

_MAX_LINES = 50
"""Of an error message, which goes to every rank."""


class Scope(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Items that a rank holds together with others, all with equal values.

    Attributes:
        ranks: Who holds them, rising; each of them lists this scope, though perhaps not the
            same items. None: all ranks of the job, and one that lists no such scope has none.
        digest: Of the item list, by ``item_digest``.
        nbytes: Of the items.
    """

    ranks: tuple[int, ...] | None
    digest: bytes
    nbytes: int


class Inventory(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a rank holds. Names each scope once.

    Attributes:
        private_bytes: Of the items that, as far as is declared, no other rank holds.
        scopes: The rest.
        globs: What the caller has called replicated: the same everywhere.
        sharded: Digest of its ``Sharded``; empty if there are none.
    """

    private_bytes: int
    scopes: tuple[Scope, ...] = ()
    globs: tuple[str, ...] = ()
    sharded: bytes = b""


class Sharded(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor of which several ranks hold parts, as each of them says it.

    Attributes:
        path, dtype: Of the tensor.
        shape: Of the whole one.
        ranks: Digest of those who hold parts, also empty ones; by ``ranks_digest``.
        num_ranks: How many they are.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    ranks: bytes
    num_ranks: int


_encoder = msgspec.msgpack.Encoder()


def digest_of(value: Any) -> bytes:
    """Returns 12 bytes that stand for a value that msgpack can say."""
    return blake2b(_encoder.encode(value), digest_size=_DIGEST_BYTES).digest()


def item_digest(items: Sequence[Item]) -> bytes:
    """Returns 12 bytes that stand for a list of items; the same in every process."""
    return digest_of(items)


def inventory_digest(inventory: Inventory) -> bytes:
    """Returns 12 bytes that stand for an inventory."""
    return digest_of(inventory)


@functools.lru_cache
def ranks_digest(ranks: tuple[int, ...]) -> bytes:
    """Returns 8 bytes that stand for some ranks: a thousand tensors may lie on as many."""
    return digest_of(ranks)[:8]


def sharded_digest(sharded: Sequence[Sharded]) -> bytes:
    """Returns 12 bytes that stand for what a rank says of sharded tensors; none for nothing."""
    return digest_of(sharded) if sharded else b""


def build_inventory(
    items: Sequence[Item],
    scopes: Iterable[tuple[tuple[int, ...] | None, Sequence[int]]],
    *,
    globs: Sequence[str] = (),
    sharded: Sequence[Sharded] = (),
) -> tuple[Inventory, dict[bytes, tuple[Item, ...]]]:
    """Returns a rank's inventory, and the item lists of its scopes by digest.

    Args:
        items: All that the rank holds.
        scopes: Who holds each, and the indices of its items. What is in none is private.
        globs: What the caller has called replicated.
        sharded: The tensors of which it holds a part, also an empty one. No others.
    """
    private_bytes = sum([item.nbytes for item in items])
    found: list[Scope] = []
    lists: dict[bytes, tuple[Item, ...]] = {}
    for ranks, indices in scopes:
        held = tuple([items[index] for index in indices])
        nbytes = sum([item.nbytes for item in held])
        digest = item_digest(held)
        private_bytes -= nbytes
        found.append(Scope(ranks, digest, nbytes))
        lists[digest] = held
    return Inventory(private_bytes, tuple(found), tuple(globs), sharded_digest(sharded)), lists


def on_several_meshes(
    lists: Sequence[tuple[Sequence[int], Sequence[Sharded]]],
) -> frozenset[str]:
    """Returns the paths that may name several tensors. Arguments as for ``check_sharded``."""
    meshes: dict[str, set[bytes]] = {}
    for _, tensors in lists:
        for tensor in tensors:
            meshes.setdefault(tensor.path, set()).add(tensor.ranks)
    return frozenset([path for path, found in meshes.items() if len(found) > 1])


def check_sharded(
    lists: Sequence[tuple[Sequence[int], Sequence[Sharded]]],
) -> None:
    """Sees that ranks agree about the tensors that they hold parts of, and all have them.

    Args:
        lists: What differs from rank to rank, and the ranks that say so, rising.

    Raises:
        UsageError: Ranks disagree about the dtype or shape of a tensor, or some lack one that
            they hold a part of: that part would be lost. Names all.
    """
    seen: dict[str, tuple[Sharded, int]] = {}
    complaints: list[str] = []
    disputed: set[str] = set()
    having: dict[Sharded, list[Sequence[int]]] = {}
    for ranks, tensors in lists:
        for tensor in tensors:
            first, by = seen.setdefault(tensor.path, (tensor, ranks[0]))
            having.setdefault(tensor, []).append(ranks)
            if (first.dtype, first.shape) != (tensor.dtype, tensor.shape):
                disputed.add(tensor.path)
                complaints.append(
                    f"{tensor.path!r} is {first.dtype} {first.shape} on rank {by}, "
                    f"{tensor.dtype} {tensor.shape} on rank {ranks[0]}"
                )
    for tensor, found in having.items():
        if tensor.path not in disputed and sum(map(len, found)) < tensor.num_ranks:
            complaints.append(
                f"{tensor.path!r} lies on {tensor.num_ranks} ranks, but is in the app state of "
                f"{named_ranks(sorted(chain.from_iterable(found)))} only"
            )
    refuse(
        complaints,
        "the ranks disagree about tensors that they hold parts of. What is not one tensor needs a "
        "key of its own in the app state (pipeline stages: one key per stage):",
    )


def refuse(complaints: Sequence[str], title: str) -> None:
    """Raises ``UsageError`` with the complaints, the first of many, unless there are none."""
    if not complaints:
        return
    more = len(complaints) - _MAX_LINES
    lines = [title, *complaints[:_MAX_LINES], *([f"... and {more} more"] if more > 0 else [])]
    raise UsageError("\n  ".join(lines))


def index_runs(indices: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Returns the indices as rising runs ``(start, stop)``."""
    runs: list[tuple[int, int]] = []
    for index in sorted(indices):
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return tuple(runs)
