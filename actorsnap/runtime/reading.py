"""Scripts that read without an app state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ParamSpec, TypeVar

import msgspec

from actorsnap.actors.budget import Budget
from actorsnap.actors.fetcher import RangeRequest
from actorsnap.errors import UsageError, did_you_mean
from actorsnap.format.checksum import MAX_BLOCK_BYTES
from actorsnap.format.manifest import Commit, Entry, ManifestRecord, RankManifest, ValueEntry
from actorsnap.log import Log
from actorsnap.planning.index import (
    Elsewhere,
    Index,
    ShardedEntry,
    Wants,
    ancestors,
    named_entries,
    named_ranks,
)
from actorsnap.runtime.host import Host, Script
from actorsnap.runtime.manifests import ManifestStream, in_turn, index_progress
from actorsnap.runtime.partial_index import FEW_RANKS, PartialIndex
from actorsnap.runtime.source import MAX_SMALL_READS, OpenSource, Source, begins_anew
from actorsnap.runtime.tracing import Observation
from actorsnap.state.restore.aliasing import mark_written
from actorsnap.state.restore.allocation import Wanted
from actorsnap.state.restore.build import KeyRestore, prepare, read_one, resolve
from actorsnap.state.restore.match import entries_by_key
from actorsnap.state.tree import escape

logger = Log(__name__)

T = TypeVar("T")
P = ParamSpec("P")

_MAX_SHARDS = 1 << 17
"""Shards whose entries are in memory together."""


@begins_anew
def load_commit(source: Source) -> Script[Commit]:
    return (yield from source.perform("read", lambda opened: opened.reader.commit()))


@begins_anew
def each_manifest(
    source: Source,
    *looks: Callable[[Commit, RankManifest], object],
    rank: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Script[Commit]:
    """Calls each of ``looks`` with all rank manifests in rank order, or with one.

    Few are in memory at a time. Calls are on worker threads; they see another commit object if the
    snapshot was replaced meanwhile.

    Args:
        progress: Gets the bytes read for the first look, and an estimate of all.
    """

    async def perform(opened: OpenSource) -> Commit:
        reader = opened.reader
        commit = await reader.commit()
        if rank is not None and not 0 <= rank < commit.world_size:
            raise UsageError(f"the snapshot has the ranks 0 to {commit.world_size - 1}, not {rank}")

        async def read(each: int) -> tuple[RankManifest, ManifestRecord]:
            return await reader.recorded_manifest(commit, each)

        ranks = range(commit.world_size) if rank is None else (rank,)
        stream = ManifestStream(ranks, read, opened.errands.run_blocking)
        note = index_progress(len(ranks), progress)
        if commit.world_size <= FEW_RANKS:
            await stream.each(lambda manifest: None)  # raises before the first look
        for look in looks:
            await stream.each(partial(look, commit), on_record=note)
            note = index_progress(len(ranks), None)
        return commit

    return (yield from source.perform("read", perform))


def get_manifest(source: Source, rank: int | None = None) -> Script[dict[str, Entry]]:
    """Returns all entries, by ``"<rank>/<path>"`` or ``"<rank>/<path>@<offsets>"``."""
    if rank is not None and type(rank) is not int:
        raise UsageError(f"rank must be an int, not {rank!r}")
    found: dict[str, Entry] = {}

    def take(_: Commit, manifest: RankManifest) -> None:
        if manifest.rank == (rank or 0):
            found.clear()
        for name, entry in named_entries(manifest).items():
            found[f"{manifest.rank}/{name}"] = entry

    yield from each_manifest(source, take, rank=rank)
    return found


def each_pair(
    left: Source,
    right: Source,
    take: Callable[[int, RankManifest | None, RankManifest | None], object],
) -> Script[None]:
    """Calls ``take`` with the manifests of each rank in two snapshots, ordered by rank as text.

    Raises:
        UsageError: One is of another format, without checksums.
    """

    async def step(host: Host) -> None:
        async with left.opened(host, "read") as one, right.opened(host, "read") as other:
            commits: list[Commit] = []
            for opened in (one, other):
                with opened.source.naming():
                    commits.append(await opened.reader.commit())
                if opened.reader.foreign is not None:
                    url = opened.source.location.display_url
                    raise UsageError(
                        f"{url} has no checksums to compare, because another program wrote it: "
                        "`actorsnap cp` makes a snapshot of it"
                    )

            async def read(rank: int) -> list[Any]:
                found: list[Any] = [rank]
                for opened, commit in zip((one, other), commits, strict=True):
                    with opened.source.naming():
                        found.append(
                            await opened.reader.manifest(commit, rank)
                            if rank < commit.world_size
                            else None
                        )
                return found

            async def use(found: list[Any]) -> None:
                await one.errands.run_blocking(take, *found)

            ranks = sorted(range(max(commit.world_size for commit in commits)), key=str)
            await one.errands.run(in_turn, ranks, read, use)

    yield step


@begins_anew
def get_state_dict_for_key(source: Source, key: str) -> Script[Any]:
    """Returns the state dict of one stateful, in new CPU memory."""
    view = yield from _begin(source, 0)
    by_key = entries_by_key(view.index.entries)
    if key not in by_key:
        for path, ranks in view.index.held_by_other_ranks.items():
            if path.partition("/")[0] == escape(key):
                raise UsageError(
                    f"only {named_ranks(ranks)} saved the key {key!r}, each for itself; "
                    f"read_object('{ranks[0]}/{escape(key)}') reads it"
                )
        hint = did_you_mean(key, by_key) or f"it has {', '.join(map(repr, sorted(by_key)))}"
        raise UsageError(f"the snapshot has no key {key!r}; {hint}")

    def find(index: Index, root: str) -> KeyRestore:
        entries = entries_by_key(index.entries)[key] if root == escape(key) else index.entries
        return prepare(root, entries, target=None, allow_pickle=source.options.allow_pickle)

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
        raise UsageError(f"{typed!r}: the snapshot has the ranks 0 to {view.index.world_size - 1}")
    root = resolve(view.index.entries, path, view.index.held_by_other_ranks)

    def find(index: Index, root: str) -> KeyRestore:
        return read_one(
            index.entries, root, out, source.options.allow_pickle, index.held_by_other_ranks
        )

    owns_memory = out is None
    return (
        yield from _read_below(
            source, view, root, find, memory_budget_bytes, owns_memory=owns_memory
        )
    )


@dataclass(frozen=True, slots=True)
class _View:
    """What a rank may read.

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


async def _complete(opened: OpenSource, begun: PartialIndex, wants: Wants) -> Index:
    return await begun.complete(
        opened.reader, opened.errands.run_blocking, wants, at_once=MAX_SMALL_READS
    )


def _look_below(
    source: Source, begun: PartialIndex, roots: Iterable[str], unread: Iterable[str] = ()
) -> Script[Index]:
    """Returns the index with everything at and below the paths.

    Args:
        unread: Tensors whose shards are not wanted.
    """
    exact = set(roots)
    above = {parent for root in exact for parent in ancestors(root)}

    @cache
    def names(path: str) -> bool:
        path = path.partition("@")[0]
        return path in exact or path in above or any(each in exact for each in ancestors(path))

    wants = Wants(names, {path: () for path in unread})
    return (
        yield from source.perform(
            "read", lambda opened: _complete(opened, begun, wants), begun.commit.attempt
        )
    )


def _read_below(
    source: Source,
    view: _View,
    root: str,
    find: Callable[[Index, str], KeyRestore],
    memory_budget_bytes: int | None = None,
    *,
    owns_memory: bool = True,
) -> Script[Any]:
    """Reads what ``find`` allocates; of many shards, some tensors after the other."""
    read = partial(_read, source, memory_budget_bytes=memory_budget_bytes, owns_memory=owns_memory)
    begun = view.begun
    if begun is None:
        part = find(view.index, root)
        yield from read(view.index, [part])
        return part.build()
    below = f"{root}/"
    unread = [
        entry.path
        for entry in view.index.entries
        if isinstance(entry, Elsewhere | ShardedEntry)
        and (entry.path.startswith(below) or entry.path == root)
    ]
    at_once = max(1, _MAX_SHARDS // view.index.world_size)
    if len(unread) <= at_once:
        index = yield from _look_below(source, begun, [root])
        part = find(index, root)
        yield from read(index, [part])
        return part.build()
    index = yield from _look_below(source, begun, [root], unread)
    sharded = [entry.path for entry in index.entries if isinstance(entry, ShardedEntry)]
    left = [path for path in sharded if path.startswith(below)]
    index = _with_values_for(index, frozenset(left))
    part = find(index, root)
    yield from read(index, [part])
    for at in range(0, len(left), at_once):
        paths = left[at : at + at_once]
        index = yield from _look_below(source, begun, paths)
        found = {path: find(index, path) for path in paths}
        yield from read(index, list(found.values()))
        part.match.values.update({path: each.build() for path, each in found.items()})
    return part.build()


def _with_values_for(index: Index, paths: Collection[str]) -> Index:
    entries = [ValueEntry(path=e.path) if e.path in paths else e for e in index.entries]
    return msgspec.structs.replace(index, entries=tuple(entries))


def _read(
    source: Source,
    index: Index,
    parts: Sequence[KeyRestore],
    *,
    memory_budget_bytes: int | None = None,
    owns_memory: bool = True,
) -> Script[None]:
    mark(parts)
    wanted = [want for part in parts for want in part.memory.reads]
    yield lambda host: fetch_wanted(
        host, source, index, wanted, memory_budget_bytes, owns_memory=owns_memory
    )


def mark(parts: Iterable[KeyRestore]) -> None:
    """Marks memory as written: even a failed restore may write to it."""
    mark_written(each.target for part in parts for each in part.memory.destinations)


async def fetch_wanted(
    host: Host,
    source: Source,
    index: Index,
    wanted: Iterable[Wanted],
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
    requests = [RangeRequest(index, want.stored, want.sink) for want in wanted]
    changes: dict[str, Any] = {}
    if memory_budget_bytes is not None:
        changes = {
            "budget": Budget(memory_budget_bytes),
            "chunk_bytes": min(memory_budget_bytes, source.options.chunk_bytes),
            "num_fetchers": 1,
        }
    if on_read is not None:
        changes["on_read"] = on_read
    if requests:
        watch = observation or Observation("read")
        async with source.opened(host, "read", index.attempt, watch.on_retry) as opened:
            fetcher = opened.fetcher(recorder=watch.recorder, **changes)
            if owns_memory:
                await opened.errands.run(fetcher.fetch, requests)
            else:
                await fetcher.fetch(requests)
