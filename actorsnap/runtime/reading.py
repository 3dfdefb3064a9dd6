"""Scripts that read without an app state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar

from actorsnap.actors.budget import Budget
from actorsnap.actors.fetcher import RangeRequest
from actorsnap.errors import SnapshotReplaced, UsageError, did_you_mean
from actorsnap.format.checksum import MAX_BLOCK_BYTES
from actorsnap.format.manifest import Commit, Entry, RankManifest
from actorsnap.log import Log
from actorsnap.planning.index import Index, named_entries, named_ranks
from actorsnap.runtime.host import Host, Script
from actorsnap.runtime.source import Source
from actorsnap.runtime.tracing import Observation
from actorsnap.state.restore.aliasing import mark_written
from actorsnap.state.restore.allocation import Wanted
from actorsnap.state.restore.build import KeyRestore, prepare, read_one
from actorsnap.state.restore.match import entries_by_key
from actorsnap.state.tree import escape

logger = Log(__name__)

T = TypeVar("T")
P = ParamSpec("P")

_MAX_TRIES = 3
"""Tries, if the snapshot is replaced meanwhile."""


def begins_anew(
    script: Callable[Concatenate[Source, P], Script[T]],
) -> Callable[Concatenate[Source, P], Script[T]]:
    """Starts a reading call again if the snapshot is replaced.

    All tries share one ``timeout_s``. Format errors name the snapshot.
    """

    @functools.wraps(script)
    def wrapped(source: Source, /, *args: P.args, **kwargs: P.kwargs) -> Script[T]:
        source = source.for_one_call()
        with source.naming():
            for _ in range(_MAX_TRIES - 1):
                try:
                    return (yield from script(source, *args, **kwargs))
                except SnapshotReplaced as error:
                    if error.is_deleted:
                        raise
                    logger.info("%s Reading the new one", error)
            return (yield from script(source, *args, **kwargs))

    return wrapped


@begins_anew
def load_index(source: Source) -> Script[tuple[Commit, dict[int, RankManifest]]]:
    return (yield from source.perform("read", lambda opened: source.index(opened.reader)))


def load_view(source: Source, rank: int) -> Script[Index]:
    """Reads the index as one rank sees it; merges manifests on a worker thread."""
    _, manifests = yield from load_index(source)
    return (yield from _view(source, manifests, rank))


def _view(source: Source, manifests: dict[int, RankManifest], rank: int) -> Script[Index]:
    if len(manifests) == 1:
        return source.view(manifests, rank)
    view: Index = yield lambda host: host.run_blocking(source.view, manifests, rank)
    return view


def get_manifest(source: Source) -> Script[dict[str, Entry]]:
    """Returns all entries, by ``"<rank>/<path>"`` or ``"<rank>/<path>@<offsets>"``."""
    _, manifests = yield from load_index(source)
    return {
        f"{rank}/{name}": entry
        for rank, manifest in manifests.items()
        for name, entry in named_entries(manifest).items()
    }


@begins_anew
def get_state_dict_for_key(source: Source, key: str) -> Script[Any]:
    """Returns the state dict of one stateful, in new CPU memory."""
    index = yield from load_view(source, 0)
    by_key = entries_by_key(index.entries)
    if key not in by_key:
        for path, ranks in index.held_by_other_ranks.items():
            if path.partition("/")[0] == escape(key):
                raise UsageError(
                    f"only {named_ranks(ranks)} saved the key {key!r}, each for itself; "
                    f"read_object('{ranks[0]}/{escape(key)}') reads it"
                )
        hint = did_you_mean(key, by_key) or f"it has {', '.join(map(repr, sorted(by_key)))}"
        raise UsageError(f"the snapshot has no key {key!r}; {hint}")
    part = prepare(escape(key), by_key[key], target=None, allow_pickle=source.options.allow_pickle)
    return (yield from _read(source, index, part))


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
    _, manifests = yield from load_index(source)
    rank, _, rest = path.partition("/")
    number = 0
    if rank.isascii() and rank.isdecimal() and rest:
        # A rank: top-level keys that look like numbers are escaped.
        if int(rank) not in manifests:
            raise UsageError(f"{path!r}: the snapshot has the ranks 0 to {len(manifests) - 1}")
        number, path = int(rank), rest
    index = yield from _view(source, manifests, number)
    part = read_one(
        index.entries, path, out, source.options.allow_pickle, index.held_by_other_ranks
    )
    return (yield from _read(source, index, part, memory_budget_bytes, owns_memory=out is None))


def _read(
    source: Source,
    index: Index,
    part: KeyRestore,
    memory_budget_bytes: int | None = None,
    *,
    owns_memory: bool = True,
) -> Script[Any]:
    mark([part])
    wanted = part.memory.reads
    yield lambda host: fetch_wanted(
        host, source, index, wanted, memory_budget_bytes, owns_memory=owns_memory
    )
    return part.build()


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
