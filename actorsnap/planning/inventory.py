# SPDX-License-Identifier: Apache-2.0
"""A rank's inventory, and checks that ranks agree about sharded tensors.

A *scope* is a list of items that several ranks hold; inventories name it by a digest. Private items
are not named. Contents are not compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Any

import msgspec

from actorsnap.errors import UsageError
from actorsnap.format.owners import Layout
from actorsnap.planning.packing import Item
from actorsnap.wording import named_ranks

_DIGEST_BYTES = 12
"""Every rank sends two per save; ranks are not adversaries."""

_MAX_LINES = 50
"""Limit of an error message, which goes to every rank."""


class Scope(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Items that a rank holds together with other ranks, with equal values.

    Attributes:
        ranks: The holders, rising. Each lists this scope, perhaps with other items. None: all
            ranks; one that lists no such scope has no such items.
    """

    ranks: tuple[int, ...] | None
    digest: bytes
    nbytes: int


class Inventory(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The items of a rank. Names each scope once.

    Attributes:
        private_bytes: Bytes of the items in no scope.
        sharded: Digest of the rank's ``Sharded`` list; empty if the list is empty.
        outline: Digest of its ``Outline``; empty without one.
        has_values: Its manifest needs the feature ``values``.
    """

    private_bytes: int
    scopes: tuple[Scope, ...] = ()
    globs: tuple[str, ...] = ()
    sharded: bytes = b""
    outline: bytes = b""
    has_values: bool = False


class Sharded(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor that several ranks hold parts of, as one of them describes it.

    Attributes:
        shape: The whole tensor's.
        ranks, num_ranks: ``ranks_digest`` and number of the ranks that hold parts, also empty ones.
        layout: Implies the parts of all these ranks; None if it does not, see ``Outline.boxes``.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    ranks: bytes
    num_ranks: int
    layout: Layout | None = None


class ShardedTable(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A list of ``Sharded`` as it is sent: tensors refer to their kind.

    Decoded tensors share the shapes and layouts of their kinds. With one of each per tensor, the
    garbage collector would take longer than the plan.

    Attributes:
        kinds: The first tensor of each dtype, shape, ranks and layout.
        numbers: Positions in ``kinds``, by tensor.
    """

    paths: tuple[str, ...]
    kinds: tuple[Sharded, ...]
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, tensors: Sequence[Sharded]) -> ShardedTable:
        known: dict[tuple[str, bytes, int, int], int] = {}
        kinds: list[Sharded] = []
        numbers: list[int] = []
        for tensor in tensors:
            # By identity, because the hash of a layout takes long. Tensors captured together share
            # both; a kind that is there twice does no harm.
            key = tensor.dtype, tensor.ranks, id(tensor.shape), id(tensor.layout)
            number = known.get(key)
            if number is None:
                number = known[key] = len(kinds)
                kinds.append(tensor)
            numbers.append(number)
        return cls(tuple([tensor.path for tensor in tensors]), tuple(kinds), tuple(numbers))

    def tensors(self) -> tuple[Sharded, ...]:
        """Returns the list."""
        fields = [(k.dtype, k.shape, k.ranks, k.num_ranks, k.layout) for k in self.kinds]
        return tuple(
            [
                Sharded(path, *fields[number])
                for path, number in zip(self.paths, self.numbers, strict=True)
            ]
        )


class Outline(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The leaves that a rank will store and that neither layouts nor scopes imply.

    Attributes:
        private, common: Paths of leaves that only this rank may read, and that all may.
        follows: Paths of entries that are stored with the leaf at a second path.
        boxes: Path, offsets and sizes.
    """

    private: tuple[str, ...] = ()
    common: tuple[str, ...] = ()
    follows: tuple[tuple[str, str], ...] = ()
    boxes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()


_encoder = msgspec.msgpack.Encoder()


def digest_of(value: Any) -> bytes:
    """Returns 12 bytes, equal in every process."""
    return blake2b(_encoder.encode(value), digest_size=_DIGEST_BYTES).digest()


@functools.lru_cache
def ranks_digest(ranks: tuple[int, ...]) -> bytes:
    """Returns an 8-byte digest; cached, as a thousand tensors may share their ranks."""
    return digest_of(ranks)[:8]


def build_inventory(
    items: Sequence[Item],
    scopes: Iterable[tuple[tuple[int, ...] | None, Sequence[int]]],
    *,
    globs: Sequence[str] = (),
    sharded: Sequence[Sharded] = (),
    outline: Outline | None = None,
    has_values: bool = False,
) -> tuple[Inventory, dict[bytes, tuple[Item, ...]]]:
    """Returns a rank's inventory, and the item lists of its scopes by digest.

    Args:
        scopes: Per scope, its ranks and the indices of its items.
        sharded: The tensors that the rank holds a part of, including empty parts.
        has_values: See ``Inventory``.
    """
    private_bytes = sum([item.nbytes for item in items])
    listed: list[Scope] = []
    lists: dict[bytes, tuple[Item, ...]] = {}
    for ranks, indices in scopes:
        held = tuple([items[index] for index in indices])
        nbytes = sum([item.nbytes for item in held])
        digest = digest_of(held)
        private_bytes -= nbytes
        listed.append(Scope(ranks, digest, nbytes))
        lists[digest] = held
    inventory = Inventory(
        private_bytes,
        tuple(listed),
        tuple(globs),
        digest_of(sharded) if sharded else b"",
        b"" if outline is None else digest_of(outline),
        has_values,
    )
    return inventory, lists


def on_several_meshes(
    lists: Sequence[tuple[Sequence[int], Sequence[Sharded]]],
) -> frozenset[str]:
    """Returns the paths that may name several tensors; see ``check_sharded``."""
    meshes: dict[str, set[bytes]] = {}
    for _, tensors in lists:
        for tensor in tensors:
            meshes.setdefault(tensor.path, set()).add(tensor.ranks)
    return frozenset([path for path, ranks in meshes.items() if len(ranks) > 1])


def check_sharded(
    lists: Sequence[tuple[Sequence[int], Sequence[Sharded]]],
    unsharded: Callable[[Collection[str]], Mapping[str, Sequence[int]]] = lambda paths: {},
) -> None:
    """Checks that ranks agree about sharded tensors, and that every holder has them.

    Args:
        lists: Each distinct list of sharded tensors, with the ranks that report it, rising.
        unsharded: Returns the ranks that have other leaves under these paths.

    Raises:
        UsageError: Ranks disagree about dtypes or shapes, or a rank that holds a part lacks the
            tensor: that part would be lost. Names all.
    """
    seen: dict[str, tuple[Sharded, int]] = {}
    complaints: list[str] = []
    disputed: set[str] = set()
    holders: dict[Sharded, list[Sequence[int]]] = {}
    for ranks, tensors in lists:
        for tensor in tensors:
            first, by = seen.setdefault(tensor.path, (tensor, ranks[0]))
            holders.setdefault(tensor, []).append(ranks)
            if first.ranks == tensor.ranks and first.layout != tensor.layout:
                disputed.add(tensor.path)
                complaints.append(
                    f"{tensor.path!r} has other placements on rank {by} than on rank {ranks[0]}"
                )
            if (first.dtype, first.shape) != (tensor.dtype, tensor.shape):
                disputed.add(tensor.path)
                complaints.append(
                    f"{tensor.path!r} is {first.dtype} {first.shape} on rank {by}, "
                    f"{tensor.dtype} {tensor.shape} on rank {ranks[0]}"
                )
    lacking = {
        tensor: ranks_of
        for tensor, ranks_of in holders.items()
        if tensor.path not in disputed and sum(map(len, ranks_of)) < tensor.num_ranks
    }
    others = unsharded({tensor.path for tensor in lacking}) if lacking else {}
    for tensor, ranks_of in lacking.items():
        where = named_ranks(chain.from_iterable(ranks_of))
        what = f"but is in the app state of {where} only"
        if found := others.get(tensor.path):
            what = (
                f"but not sharded in the app state of {named_ranks(found)}: shard it there as on "
                f"{where} (fully_shard, distribute_tensor)"
            )
        complaints.append(f"{tensor.path!r} is sharded over {tensor.num_ranks} ranks, {what}")
    refuse(
        complaints,
        "the ranks disagree about sharded tensors. Different tensors need different names "
        "(pipeline stages: name each layer as in the whole model):",
    )


def refuse(complaints: Sequence[str], title: str) -> None:
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
