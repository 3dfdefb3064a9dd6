"""The body of every public call, written once for callers of both kinds.

Each is a ``Script``: plain code that runs in the caller's thread, where ``state_dict`` and
``load_state_dict`` belong, and that yields what must run on the runtime's loop. ``snapshot``
drives the scripts with ``await``, ``sync`` by blocking.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import anyio
import msgspec

from actorsnap.actors.budget import Budget
from actorsnap.actors.reader import Request
from actorsnap.errors import (
    ActorSnapError,
    ChecksumMismatch,
    FormatError,
    IncompatibleState,
    ObjectNotFound,
    UsageError,
)
from actorsnap.format.checksum import crc32c
from actorsnap.format.layout import attempt_of
from actorsnap.format.manifest import (
    BLOCK_BYTES,
    COMMIT_KEY,
    BytesEntry,
    Commit,
    Entry,
    RankManifest,
    Stored,
    TensorEntry,
    decode_commit,
)
from actorsnap.format.validate import check_json
from actorsnap.options import Options, from_env
from actorsnap.runtime.host import Host, Script, wait_done
from actorsnap.runtime.place import (
    Place,
    Source,
    collect_garbage,
    committed_attempt,
    open_place,
    open_ready_place,
)
from actorsnap.runtime.saving import SaveJob
from actorsnap.state.capture import capture
from actorsnap.state.restore import KeyRestore, entries_by_key, read_one
from actorsnap.state.stateful import (
    RNGState,
    Stateful,
    is_module,
    load_state,
    validate_app_state,
)
from actorsnap.state.tree import escape
from actorsnap.storage.registry import absolute, check_url, is_ready

__all__ = [
    "AppState",
    "RestoreReport",
    "Source",
    "VerifyReport",
    "await_pending",
    "collect",
    "delete",
    "find_snapshots",
    "get_manifest",
    "get_state_dict_for_key",
    "load_index",
    "make_place",
    "read_object",
    "restore",
    "take",
    "verify",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")
AppState: TypeAlias = Mapping[str, Stateful]
Step: TypeAlias = Callable[[Host], Coroutine[Any, Any, T]]


class RestoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a restore left out; all empty if everything fitted.

    Attributes:
        missing: Paths of the app state that the snapshot lacks; they keep their values.
        unexpected: Paths of the snapshot that a module has no place for; not read.
        mismatched: A line per leaf whose kind, dtype or shape differs; they keep their values.
        nbytes: Bytes read into place.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    nbytes: int = 0

    @property
    def is_complete(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a verification found.

    Attributes:
        level: ``quick`` (index, existence and sizes) or ``full`` (every byte).
        num_objects: Data objects looked at.
        nbytes: Bytes compared with checksums.
        problems: An error per damaged or missing object.
    """

    level: str
    num_objects: int
    nbytes: int
    problems: tuple[ActorSnapError, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems


def make_place(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None) -> Place:
    """Checks a path and its options as callers give them.

    Raises:
        UsageError: the path is empty, or no path; or the options are no dict.
    """
    url = check_url(path)
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise UsageError(f"storage_options must be a dict, not {storage_options!r}")
    return Place(url=url, at=absolute(url), storage_options=dict(storage_options or {}))


def resolve_options(options: Options | None) -> Options:
    if options is None:
        return from_env()
    if not isinstance(options, Options):
        raise UsageError(f"options must be actorsnap.Options, not {type(options).__name__}")
    return options


def take(
    path: str | os.PathLike[str],
    app_state: AppState,
    *,
    is_async: bool,
    replicated: Sequence[str],
    overwrite: bool,
    metadata: Mapping[str, Any] | None,
    storage_options: Mapping[str, Any] | None,
    options: Options | None,
) -> Script[SaveJob]:
    """Captures in the caller's thread; returns when stored, or, if async, when staged."""
    options = resolve_options(options)
    place = make_place(path, storage_options)
    if isinstance(replicated, str):
        raise UsageError(f"replicated must be a list of globs: [{replicated!r}]")
    if not isinstance(replicated, Sequence) or not all(isinstance(g, str) for g in replicated):
        raise UsageError(f"replicated must be a list of globs, not {replicated!r}")
    checked_metadata = _check_metadata(metadata)
    host = Host.get()
    # Refuses bad URLs before state_dict() runs; mostly without a step in between.
    if is_ready(place.at):
        open_ready_place(host, place, fsync=options.fsync)
    else:
        yield lambda host: open_place(host, place, fsync=options.fsync)
    captured = capture(app_state, replicated=replicated, allow_pickle=options.allow_pickle)
    job = SaveJob(
        host,
        place=place,
        captured=captured,
        copies=is_async,
        overwrite=overwrite,
        metadata=checked_metadata,
        options=options,
    )
    del captured
    try:
        job.start()
        yield lambda _: _await_or_cancel(job, job.staged if is_async else job.finished)
    except BaseException:
        # Ctrl-C just now may have met nobody who waits for the save.
        job.cancel("the caller was interrupted")
        concurrent.futures.wait([job.finished])
        raise
    return job


def _check_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    if metadata is not None and not isinstance(metadata, Mapping):
        raise UsageError(f"metadata must be a JSON object, not a {type(metadata).__name__}")
    checked = dict(metadata or {})
    check_json(checked, "metadata")
    try:
        again = msgspec.json.decode(msgspec.json.encode(checked))
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise UsageError(f"metadata must be a JSON object: {error}") from error
    if again != checked:
        raise UsageError(
            "metadata must come back from JSON as it was: use str keys, lists instead of "
            "tuples, and finite numbers"
        )
    return checked


async def _await_or_cancel(job: SaveJob, future: concurrent.futures.Future[T]) -> T:
    """Waits for a step of a save; a caller who goes away takes the save along."""
    try:
        await wait_done(future)
    except BaseException:
        job.cancel("the caller was cancelled")
        with anyio.CancelScope(shield=True):
            await wait_done(job.finished)
        raise
    return future.result()


def await_pending(job: SaveJob, future: concurrent.futures.Future[T]) -> Script[T]:
    """Waits for a step of a save; a caller who goes away leaves it running."""
    job.check_process()

    async def step() -> T:
        await wait_done(future)
        return future.result()

    result: T = yield lambda _: step()
    return result


def load_index(source: Source) -> Script[tuple[Commit, dict[int, RankManifest]]]:
    """Reads commit object and rank manifests."""

    async def step(host: Host) -> tuple[Commit, dict[int, RankManifest]]:
        if source.commit is not None and len(source.manifests) == source.commit.world_size:
            return source.commit, source.manifests
        async with source.opened(host) as (_, reader):
            return await source.index(reader)

    index: tuple[Commit, dict[int, RankManifest]] = yield step
    return index


def get_manifest(source: Source) -> Script[dict[str, Entry]]:
    """Every entry of every rank, by ``"<rank>/<path>"``."""
    _, manifests = yield from load_index(source)
    return {
        f"{rank}/{entry.path}": entry
        for rank, manifest in manifests.items()
        for entry in manifest.entries
    }


def delete(source: Source) -> Script[None]:
    """The commit object first: what is left behind by a crash is garbage, not a ruin."""

    async def step(host: Host) -> None:
        began_s = time.time()
        async with source.opened(host) as (storage, reader):
            attempt = None
            # A damaged snapshot can be deleted; what is none cannot.
            with contextlib.suppress(ChecksumMismatch):
                attempt = (await reader.commit()).attempt
            await storage.delete([COMMIT_KEY])
            # Not what another take is writing: it would commit a ruin.
            await collect_garbage(host, storage, began_s=began_s, superseded=attempt)
        source.commit = None
        source.manifests = {}

    yield step


def collect(source: Source, *, force: bool) -> Script[tuple[list[str], list[str]]]:
    """Deletes garbage at the URL; with ``force`` also attempts that may be running.

    Returns:
        The keys deleted, and the unfinished attempts that were left.
    """

    async def step(host: Host) -> tuple[list[str], list[str]]:
        async with source.opened(host) as (storage, _):
            deleted = await collect_garbage(host, storage, force=force)
            left = {attempt_of(info.key) async for info in storage.list("")}
            left -= {None, await committed_attempt(storage)}
            return deleted, sorted(str(attempt) for attempt in left)

    found: tuple[list[str], list[str]] = yield step
    return found


class _NullSink:
    """Takes bytes and only counts them: for verification."""

    is_addressable = False

    def __init__(self, nbytes: int, count: Callable[[int], None]) -> None:
        self.nbytes = nbytes
        self._count = count

    def view(self, start: int, stop: int) -> memoryview:
        raise AssertionError("not addressable")

    def copy_from(self, start: int, data: memoryview) -> None:
        self._count(len(data))


class _Meter:
    """Adds up what worker threads have done, and reports it to the caller's ``progress``."""

    def __init__(self, progress: Callable[[int, int], None] | None) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._done = self._total = 0

    def begin(self, total: int) -> None:
        self._total = total
        self.add(0)

    def add(self, nbytes: int) -> None:
        if self._progress is not None:
            with self._lock:
                self._done += nbytes
                self._progress(self._done, self._total)


def verify(
    source: Source, *, level: str, progress: Callable[[int, int], None] | None = None
) -> Script[VerifyReport]:
    """Checks a snapshot; ``progress`` gets bytes compared, and bytes in all, on any thread."""
    if level not in ("quick", "full"):
        raise UsageError(f'level must be "quick" or "full", not {level!r}')

    async def step(host: Host) -> VerifyReport:
        async with source.opened(host) as (storage, reader):
            commit = await reader.commit()
            problems: list[ActorSnapError] = []
            num_objects = done = 0
            total = 0
            meter = _Meter(progress)
            work: list[tuple[RankManifest, int, list[Stored]]] = []
            for rank in range(commit.world_size):
                try:
                    manifest = await reader.manifest(rank)
                except FormatError as error:
                    problems.append(error)
                    continue
                leaves: list[list[Stored]] = [[] for _ in manifest.objects]
                for entry in manifest.entries:
                    if isinstance(entry, TensorEntry | BytesEntry):
                        leaves[entry.data.object].append(entry.data)
                work.extend((manifest, number, held) for number, held in enumerate(leaves))
                total += sum(at.stop - at.start for held in leaves for at in held)
            await host.run_blocking(meter.begin, total)
            for manifest, number, held in work:
                record = manifest.objects[number]
                num_objects += 1
                try:
                    info = await storage.stat(record.key)
                    if info.size != record.size:
                        raise ChecksumMismatch(
                            key=record.key,
                            detail=f"has {info.size} bytes, was written with {record.size}",
                        )
                    if level == "full":
                        header = await storage.get(record.key, 0, record.header_bytes)
                        if crc32c(header) != record.header_crc32c:
                            raise ChecksumMismatch(
                                key=record.key, detail="the safetensors header differs"
                            )
                        pool = source.fetcher(host, storage, verify=True)
                        requests = [
                            Request(manifest, at, _NullSink(at.stop - at.start, meter.add))
                            for at in held
                        ]
                        await pool.fetch(requests)
                        done += record.size
                except ObjectNotFound as error:
                    missing = ChecksumMismatch(key=record.key, detail="the object is missing")
                    missing.__cause__ = error
                    problems.append(missing)
                except FormatError as error:
                    problems.append(error)
                except BaseExceptionGroup as group:
                    damage, other = group.split(FormatError)
                    if damage is None or other is not None:
                        raise
                    problems.append(_leaves(damage)[0])
            return VerifyReport(
                level=level, num_objects=num_objects, nbytes=done, problems=tuple(problems)
            )

    report: VerifyReport = yield step
    return report


def _leaves(group: BaseExceptionGroup[Any]) -> list[Any]:
    found: list[Any] = []
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            found.extend(_leaves(error))
        else:
            found.append(error)
    return found


def restore(source: Source, app_state: AppState, *, strict: bool) -> Script[RestoreReport]:
    """Compares everything, then reads everything, then hands over key by key."""
    validate_app_state(app_state)
    _, manifests = yield from load_index(source)
    by_key = entries_by_key(manifests[0].entries)
    # The global order of state_dict calls; generators last, as other loads may draw numbers.
    keys = sorted(app_state, key=lambda key: (isinstance(app_state[key], RNGState), key))
    missing = [escape(key) for key in keys if key not in by_key]
    unexpected: list[str] = []
    mismatched: list[str] = []
    restores: list[tuple[Stateful, KeyRestore]] = []
    for key in keys:
        if key not in by_key:
            continue
        stateful = app_state[key]
        part = KeyRestore(
            key,
            by_key[key],
            # A generator that only this process has is no reason to refuse the others.
            target=None if isinstance(stateful, RNGState) else stateful.state_dict(),
            allow_pickle=source.options.allow_pickle,
            include_unexpected=not is_module(stateful),
        )
        missing.extend(part.missing)
        if is_module(stateful):
            unexpected.extend(part.unexpected)
        mismatched.extend(part.mismatched)
        restores.append((stateful, part))
    if strict and (missing or unexpected or mismatched):
        raise IncompatibleState(missing=missing, unexpected=unexpected, mismatched=mismatched)
    parts = [part for _, part in restores]
    nbytes: int = yield lambda host: _fetch(host, source, manifests[0], parts)
    for stateful, part in restores:
        load_state(stateful, part.build(), strict=strict)
    return RestoreReport(
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        mismatched=tuple(mismatched),
        nbytes=nbytes,
    )


def get_state_dict_for_key(source: Source, key: str) -> Script[Any]:
    """One stateful's state dict, built fresh on the CPU."""
    _, manifests = yield from load_index(source)
    by_key = entries_by_key(manifests[0].entries)
    if key not in by_key:
        raise UsageError(
            f"the snapshot has no key {key!r}; it has {', '.join(map(repr, sorted(by_key)))}"
        )
    part = KeyRestore(key, by_key[key], target=None, allow_pickle=source.options.allow_pickle)
    yield lambda host: _fetch(host, source, manifests[0], [part])
    return part.build()


def read_object(
    source: Source, path: str, out: Any, *, memory_budget_bytes: int | None
) -> Script[Any]:
    """One leaf or subtree, into ``out`` or fresh."""
    if not isinstance(path, str):
        raise UsageError(f"path must be a str as in get_manifest, not {path!r}")
    if memory_budget_bytes is not None and memory_budget_bytes < BLOCK_BYTES:
        raise UsageError(f"memory_budget_bytes must be at least {BLOCK_BYTES} (one block)")
    _, manifests = yield from load_index(source)
    rank, _, rest = path.partition("/")
    if rank.isascii() and rank.isdecimal() and rest:
        # A top-level key that reads like a number is escaped, so this is a rank.
        if int(rank) not in manifests:
            raise UsageError(f"{path!r}: the snapshot has the ranks 0 to {len(manifests) - 1}")
        manifest, path = manifests[int(rank)], rest
    else:
        manifest = manifests[0]
    part = read_one(manifest.entries, path, out, source.options.allow_pickle)
    yield lambda host: _fetch(host, source, manifest, [part], memory_budget_bytes)
    return part.build()


async def _fetch(
    host: Host,
    source: Source,
    manifest: RankManifest,
    parts: Sequence[KeyRestore],
    memory_budget_bytes: int | None = None,
) -> int:
    """Reads what the parts want; returns the number of bytes."""
    requests = [Request(manifest, stored, sink) for part in parts for stored, sink in part.reads]
    changes: dict[str, Any] = {}
    if memory_budget_bytes is not None:
        changes = {
            "budget": Budget(memory_budget_bytes),
            "chunk_bytes": min(memory_budget_bytes, source.options.chunk_bytes),
            "num_fetchers": 1,
        }
    if requests:
        async with source.opened(host) as (storage, _):
            await source.fetcher(host, storage, **changes).fetch(requests)
    return sum(request.stored.stop - request.stored.start for request in requests)


def find_snapshots(source: Source) -> Script[dict[str, Commit | FormatError | None]]:
    """The snapshots one level below the URL, by name.

    Returns:
        The commit object; what is wrong with it; or None where there are unfinished attempts
        only.
    """

    async def step(host: Host) -> dict[str, Commit | FormatError | None]:
        found: dict[str, Commit | FormatError | None] = {}
        async with source.opened(host) as (storage, _):
            async for info in storage.list(""):
                name, _, key = info.key.partition("/")
                if key == COMMIT_KEY:
                    try:
                        found[name] = decode_commit(await storage.get(info.key))
                    except FormatError as error:
                        found[name] = error
                elif attempt_of(key) is not None:
                    found.setdefault(name, None)
        return found

    found: dict[str, Commit | FormatError | None] = yield step
    return found
