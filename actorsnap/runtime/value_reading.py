# SPDX-License-Identifier: Apache-2.0
"""Scripts that read values of a snapshot, without an app state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, ParamSpec, TypeVar

from actorsnap.actors.budget import Budget
from actorsnap.actors.fetcher import RangeRequest
from actorsnap.errors import UsageError
from actorsnap.format.checksum import MAX_BLOCK_BYTES
from actorsnap.log import Log
from actorsnap.planning.index import (
    Index,
    Wants,
    ancestors,
)
from actorsnap.planning.renaming import renamed
from actorsnap.runtime.host import Host, Script
from actorsnap.runtime.partial_index import PartialIndex
from actorsnap.runtime.source import MAX_SMALL_READS, OpenSource, Source, begins_anew
from actorsnap.runtime.tracing import Observation
from actorsnap.state.restore.aliasing import mark_written
from actorsnap.state.restore.build import KeyRestore, prepare, read_one, resolve
from actorsnap.state.restore.match import entries_by_key
from actorsnap.state.restore.reads import Reads
from actorsnap.state.tree import escape, unescape
from actorsnap.wording import did_you_mean, named_ranks

logger = Log(__name__)

T = TypeVar("T")
P = ParamSpec("P")


@begins_anew
def find_keys(source: Source) -> Script[list[str]]:
    """Returns the top-level keys that any rank saved."""
    index = (yield from _begin(source, 0)).index
    held = {path.partition("/")[0] for path in index.held_by_other_ranks}
    return sorted({*entries_by_key(index.entries), *[str(unescape(token)) for token in held]})


@begins_anew
def get_state_dict_for_key(source: Source, key: str) -> Script[Any]:
    """Returns the state dict of one stateful, in new CPU memory."""
    view = yield from _begin(source, 0)
    by_key = entries_by_key(view.index.entries)
    if key not in by_key:
        for path, ranks in view.index.held_by_other_ranks.items():
            if path.partition("/")[0] == escape(key):
                raise UsageError(
                    f"only {named_ranks(ranks)} saved the key {key!r}; "
                    f"read_object('{ranks[0]}/{escape(key)}') reads rank {ranks[0]}'s"
                )
        hint = did_you_mean(key, by_key) or f"it has {', '.join(map(repr, sorted(by_key)))}"
        raise UsageError(f"the snapshot has no key {key!r}; {hint}")

    def find(index: Index) -> KeyRestore:
        entries = entries_by_key(index.entries)[key]
        return prepare(
            escape(key),
            entries,
            target=None,
            allow_pickle=source.options.allow_pickle,
            rebuild=source.rebuild(is_strict=False),
        )

    return (yield from _read_below(source, view, escape(key), find))


@begins_anew
def read_object(
    source: Source, path: str, out: Any, *, memory_budget_bytes: int | None
) -> Script[Any]:
    """Reads a leaf or subtree, into ``out`` or new memory."""
    if not isinstance(path, str):
        raise UsageError(f"path must be a str as in get_manifest, not {path!r}")
    if memory_budget_bytes is not None and (
        type(memory_budget_bytes) is not int or memory_budget_bytes < MAX_BLOCK_BYTES
    ):
        raise UsageError(
            f"memory_budget_bytes must be at least {MAX_BLOCK_BYTES} (one block), as an int, "
            f"not {memory_budget_bytes!r}"
        )
    rank, _, rest = path.partition("/")
    number, typed = 0, path
    if rank.isascii() and rank.isdecimal() and rest:
        # A rank: top-level keys that look like numbers are escaped.
        number, path = int(rank), rest
    view = yield from _begin(source, number)
    if number >= view.index.world_size:
        ranks = named_ranks(range(view.index.world_size))
        raise UsageError(f"{typed!r}: the snapshot has only {ranks}")
    is_layer = _is_layer(view.index, path)
    try:
        root = path
        if not is_layer:
            root = resolve(view.index.entries, path, view.index.held_by_other_ranks)
    except UsageError:
        yield from _check_absent(source, view.begun, path)
        raise

    def find(index: Index) -> KeyRestore:
        if is_layer:
            index = renamed(index, lambda path: _below_layer(path, root))
        return read_one(
            index.entries,
            root,
            out,
            source.options.allow_pickle,
            index.held_by_other_ranks,
            source.rebuild(is_strict=False),
        )

    owns_memory = out is None
    return (
        yield from _read_below(
            source, view, root, find, memory_budget_bytes, owns_memory=owns_memory
        )
    )


def _is_layer(index: Index, path: str) -> bool:
    """Whether ``path`` is no leaf and no container, but the first part of names (``model/fc1``)."""
    if "/" not in path:
        return False
    paths = [entry.path for entry in index.entries]
    is_named = any(other == path or other.startswith(f"{path}/") for other in paths)
    return not is_named and any(other.startswith(f"{path}.") for other in paths)


def _below_layer(path: str, layer: str) -> str:
    """Returns the path of a leaf as if the layer were a container."""
    return f"{layer}/{path[len(layer) + 1 :]}" if path.startswith(f"{layer}.") else path


@dataclass(frozen=True, slots=True)
class _View:
    """The part of a snapshot that a rank may read.

    Attributes:
        begun: None if the index is whole; else leaves of others are ``Elsewhere`` in it.
    """

    index: Index
    begun: PartialIndex | None


def _begin(source: Source, rank: int) -> Script[_View]:
    async def read(opened: OpenSource) -> _View:
        begun = await source.begin_index(opened, rank, num_ranks=1)
        if isinstance(begun, Index):
            return _View(begun, None)
        wants = Wants(lambda path: False, {})
        return _View(await _complete(opened, begun, wants), begun)

    return (yield from source.perform("read", read))


def _check_absent(source: Source, begun: PartialIndex | None, path: str) -> Script[None]:
    """Raises ``FormatError`` if a manifest has a path that the index lacks."""
    if begun is None:
        return

    async def look(opened: OpenSource) -> None:
        run_blocking = opened.errands.run_blocking
        await begun.check_absent(opened.reader, run_blocking, path, at_once=MAX_SMALL_READS)

    yield from source.perform("read", look, begun.commit.attempt)


async def _complete(opened: OpenSource, begun: PartialIndex, wants: Wants) -> Index:
    return await begun.complete(
        opened.reader, opened.errands.run_blocking, wants, at_once=MAX_SMALL_READS
    )


def _look_below(source: Source, begun: PartialIndex, root: str) -> Script[Index]:
    """Returns the index with everything at and below the path."""
    above = set(ancestors(root))

    @cache
    def names(path: str) -> bool:
        path = path.partition("@")[0]
        is_below = root in ancestors(path) or path.startswith(f"{root}.")
        return is_below or path == root or path in above

    wants = Wants(names, {})
    return (
        yield from source.perform(
            "read", lambda opened: _complete(opened, begun, wants), begun.commit.attempt
        )
    )


def _read_below(
    source: Source,
    view: _View,
    root: str,
    find: Callable[[Index], KeyRestore],
    memory_budget_bytes: int | None = None,
    *,
    owns_memory: bool = True,
) -> Script[Any]:
    """Reads what ``find`` allocates."""
    index = view.index
    if view.begun is not None:
        index = yield from _look_below(source, view.begun, root)
    part = find(index)
    mark([part])
    yield lambda host: fetch_wanted(
        host, source, index, part.memory.reads, memory_budget_bytes, owns_memory=owns_memory
    )
    return part.build()


def mark(parts: Iterable[KeyRestore]) -> None:
    """Marks memory as written: even a failed restore may write to it."""
    mark_written(each.target for part in parts for each in part.memory.destinations)


async def fetch_wanted(
    host: Host,
    source: Source,
    index: Index,
    wanted: Reads,
    memory_budget_bytes: int | None = None,
    observation: Observation | None = None,
    *,
    owns_memory: bool = False,
    on_read: Callable[[int], None] | None = None,
) -> None:
    """Reads ranges into marked memory.

    Args:
        on_read: See ``FetcherPool``.
        owns_memory: No memory is the caller's: a read that hangs may be abandoned.
    """
    changes: dict[str, Any] = {}
    if memory_budget_bytes is not None:
        changes = {
            "budget": Budget(memory_budget_bytes),
            "chunk_bytes": min(memory_budget_bytes, source.options.chunk_bytes),
            "num_fetchers": 1,
        }
    if on_read is not None:
        changes["on_read"] = on_read
    batches = wanted.batches()

    def next_batch() -> list[RangeRequest]:
        return [RangeRequest(index, each.stored, each.sink) for each in next(batches, ())]

    if not wanted:
        return
    watch = observation or Observation("read")
    async with source.opened(host, "read", index.attempt, watch.on_retry) as opened:
        fetcher = opened.fetcher(recorder=watch.recorder, **changes)
        requests = await host.run_blocking(next_batch)
        while requests:
            if owns_memory:
                await opened.errands.run(fetcher.fetch, requests)
            else:
                await fetcher.fetch(requests)
            requests = await host.run_blocking(next_batch)
