"""The body of every public call, written once for callers of both kinds.

Each is a ``Script``: plain code that runs in the caller's thread, where ``state_dict`` and
``load_state_dict`` belong, and that yields what must run on the runtime's loop. ``snapshot``
drives the scripts with ``await``, ``sync`` by blocking.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import anyio
import msgspec
import torch

from actorsnap.actors.budget import Budget
from actorsnap.actors.reader import Request, SnapshotReader, find_commit
from actorsnap.errors import (
    ActorSnapError,
    ChecksumMismatch,
    FormatError,
    IncompatibleState,
    NotASnapshot,
    ObjectNotFound,
    SnapshotReplaced,
    UnsupportedFormat,
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
    find_attempts,
    open_place,
    open_ready_place,
)
from actorsnap.runtime.saving import SaveJob
from actorsnap.state.capture import capture
from actorsnap.state.claims import disputes
from actorsnap.state.restore import KeyRestore, entries_by_key, read_one
from actorsnap.state.stateful import (
    RNGState,
    Stateful,
    adapts,
    can_assign,
    loader,
    matching_of,
    torch_complaints,
    validate_app_state,
)
from actorsnap.state.targets import mark_written
from actorsnap.state.tree import escape, join
from actorsnap.storage.base import RunBlocking, Storage
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
P = ParamSpec("P")
AppState: TypeAlias = Mapping[str, Stateful]
Step: TypeAlias = Callable[[Host], Coroutine[Any, Any, T]]

_MAX_TRIES = 3
"""Reading begins anew so often where one snapshot after the other is replaced."""


class RestoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a restore left out; all empty if everything fitted.

    Attributes:
        missing: Paths of the app state that the snapshot lacks, of modules and of dicts in a
            ``StateDict``; they keep their values.
        unexpected: Paths of the snapshot that a module has no place for; not restored.
        mismatched: A line per leaf of a module or ``StateDict`` whose kind, dtype or shape
            differs; they keep their values. Or per optimizer that cannot take what was saved;
            it keeps all its values. Or per two leaves of modules that share memory in the app
            state only: it holds the value that was loaded last.
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
    _check_flag("overwrite", overwrite)
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


def _check_flag(name: str, value: object) -> None:
    if type(value) is not bool:
        raise UsageError(f"{name} must be True or False, not {value!r}")


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


def _begins_anew(
    script: Callable[Concatenate[Source, P], Script[T]],
) -> Callable[Concatenate[Source, P], Script[T]]:
    """Makes a reading call begin anew where the snapshot is replaced while it reads."""

    @functools.wraps(script)
    def wrapped(source: Source, /, *args: P.args, **kwargs: P.kwargs) -> Script[T]:
        for _ in range(_MAX_TRIES - 1):
            try:
                return (yield from script(source, *args, **kwargs))
            except SnapshotReplaced as error:
                if error.is_deleted:
                    raise
                logger.info("%s Reading the new one", error)
        return (yield from script(source, *args, **kwargs))

    return wrapped


@_begins_anew
def load_index(source: Source) -> Script[tuple[Commit, dict[int, RankManifest]]]:
    """Reads commit object and rank manifests."""

    async def step(host: Host) -> tuple[Commit, dict[int, RankManifest]]:
        async with source.opened(host, "read") as (_, reader, errands):
            return await errands.run(source.index, reader)

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
        async with source.opened(host, "delete") as (storage, reader, errands):

            async def perform() -> None:
                attempt = None
                try:
                    attempt = (await reader.commit()).attempt
                except (NotASnapshot, UnsupportedFormat):
                    raise
                except FormatError:
                    logger.info("%s: deleting a damaged snapshot", source.place.url, exc_info=True)
                await storage.delete([COMMIT_KEY])
                # Not what another take is writing: it would commit a ruin.
                await collect_garbage(host, storage, superseded=attempt)

            await errands.run(perform)

    yield step


def collect(source: Source, *, force: bool) -> Script[tuple[list[str], list[str]]]:
    """Deletes garbage at the URL; with ``force`` also attempts that may be running.

    Returns:
        The keys deleted, and the unfinished attempts that were left.
    """

    async def step(host: Host) -> tuple[list[str], list[str]]:
        async with source.opened(host, "collect") as (storage, _, errands):

            async def perform() -> tuple[list[str], list[str]]:
                deleted = await collect_garbage(host, storage, force=force)
                left = set(await find_attempts(storage))
                with contextlib.suppress(ChecksumMismatch):  # which is its own cannot be told
                    commit = await find_commit(storage)
                    if commit is not None:
                        left.discard(commit.attempt)
                return deleted, sorted(left)

            return await errands.run(perform)

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


@_begins_anew
def verify(
    source: Source, *, level: str, progress: Callable[[int, int], None] | None = None
) -> Script[VerifyReport]:
    """Checks a snapshot; ``progress`` gets bytes compared, and bytes in all, on any thread."""
    if level not in ("quick", "full"):
        raise UsageError(f'level must be "quick" or "full", not {level!r}')

    async def step(host: Host) -> VerifyReport:
        async with source.opened(host, "verify") as (storage, reader, errands):
            return await errands.run(perform, host, storage, reader, errands.run_blocking)

    async def perform(
        host: Host, storage: Storage, reader: SnapshotReader, run_blocking: RunBlocking
    ) -> VerifyReport:
        commit = await reader.commit()
        problems: list[ActorSnapError] = []
        num_objects = done = 0
        total = 0
        meter = _Meter(progress)
        work: list[tuple[RankManifest, int, list[Stored]]] = []
        for named in commit.manifests:
            try:
                manifest = await reader.manifest(named)
            except FormatError as error:
                problems.append(error)
                continue
            leaves: list[list[Stored]] = [[] for _ in manifest.objects]
            for entry in manifest.entries:
                if isinstance(entry, TensorEntry | BytesEntry):
                    leaves[entry.data.object].append(entry.data)
            work.extend((manifest, number, held) for number, held in enumerate(leaves))
            total += sum(at.stop - at.start for held in leaves for at in held)
        await run_blocking(meter.begin, total)
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
                    pool = source.fetcher(host, storage, verify=True, run_blocking=run_blocking)
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
        if problems:
            await reader.check_replaced()
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


@_begins_anew
def restore(source: Source, app_state: AppState, *, strict: bool) -> Script[RestoreReport]:
    """Compares everything, then reads everything, then hands over key by key."""
    _check_flag("strict", strict)
    validate_app_state(app_state)
    _, manifests = yield from load_index(source)
    by_key = entries_by_key(manifests[0].entries)
    # The global order of state_dict calls; generators last, as other loads may draw numbers.
    keys = sorted(app_state, key=lambda key: (isinstance(app_state[key], RNGState), key))
    missing = [escape(key) for key in keys if key not in by_key]
    unexpected: list[str] = []
    mismatched: list[str] = []
    states: dict[str, Any] = {}
    parts: dict[str, KeyRestore] = {}
    adapting: dict[str, KeyRestore] = {}

    def compare(key: str, apart: Iterable[str] = ()) -> KeyRestore:
        return KeyRestore(
            key,
            by_key[key],
            target=states[key],
            allow_pickle=source.options.allow_pickle,
            matching=matching_of(app_state[key]),
            apart=apart,
        )

    for key in keys:
        if key not in by_key:
            continue
        stateful = app_state[key]
        # A generator that only this process has is no reason to refuse the others.
        states[key] = None if isinstance(stateful, RNGState) else stateful.state_dict()
        part = compare(key)
        stuck = _stuck_on_meta(key, stateful, part)
        mismatched.extend(stuck)
        if isinstance(stateful, torch.optim.Optimizer) and (stuck or part.mismatched):
            mismatched.extend(part.mismatched)
            continue  # it takes all or nothing
        if (part.missing or part.unexpected or part.mismatched) and adapts(stateful):
            adapting[key] = part
            # Fresh: what is adapted may go to another place than the one that has its name.
            part = KeyRestore(
                key, by_key[key], target=None, allow_pickle=source.options.allow_pickle
            )
        missing.extend(part.missing)
        unexpected.extend(part.unexpected)
        mismatched.extend(part.mismatched)
        parts[key] = part
    shared, apart = _settle(app_state, parts)
    mismatched.extend(shared)
    for key, paths in apart.items():
        parts[key] = compare(key, paths)
    if strict and (missing or unexpected or mismatched):
        raise IncompatibleState(missing=missing, unexpected=unexpected, mismatched=mismatched)
    loaders = {key: loader(app_state[key], strict=strict) for key in parts}
    nbytes: int = yield lambda host: _fetch(host, source, manifests[0], list(parts.values()))
    for index, (key, part) in enumerate(parts.items()):
        state = part.build()
        try:
            if key in adapting:
                left_out = _load_adapting(key, loaders[key], state, adapting[key], strict=strict)
                missing.extend(left_out.missing)
                unexpected.extend(left_out.unexpected)
                mismatched.extend(left_out.mismatched)
            else:
                loaders[key](state)
        except Exception as error:
            loaded = ", ".join(map(repr, list(parts)[:index])) or "none"
            error.add_note(
                f"actorsnap: load_state_dict() of {key!r} in the app state raised this; "
                f"keys that were loaded before: {loaded}"
            )
            raise
    return RestoreReport(
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        mismatched=tuple(mismatched),
        nbytes=nbytes,
    )


def _stuck_on_meta(key: str, stateful: Stateful, part: KeyRestore) -> list[str]:
    """A line per leaf on meta in whose place a stateful cannot put what is restored."""
    if can_assign(stateful):
        return []
    if isinstance(stateful, torch.optim.Optimizer):
        held = [p for group in stateful.param_groups for p in group["params"]]
        if any(parameter.is_meta for parameter in held):
            return [
                f"{escape(key)}: its parameters are on the meta device, and its state would go "
                "there; make the optimizer after the module was restored"
            ]
    kind = type(stateful).__qualname__
    return [
        f"{path}: it is on the meta device, and a {kind} cannot take over another tensor; "
        "materialise it with to_empty(...)"
        for path in part.on_meta
    ]


def _settle(
    app_state: AppState, parts: Mapping[str, KeyRestore]
) -> tuple[list[str], dict[str, set[str]]]:
    """Finds memory that leaves share in the app state, but not in the snapshot.

    A module's parameters keep it, as a module computes with the memory that it has; else the
    first leaf does.

    Returns:
        A line per leaf of a module that had to give way to another module's or its own; and,
        by key, the paths of all that get memory of their own.
    """
    # Of two modules' leaves the last one wins, as when load_state_dict copies.
    in_modules = [key for key in parts if isinstance(app_state[key], torch.nn.Module)]
    others = [key for key in parts if key not in in_modules]
    # load_state_dict copies a module's leaf into the memory it has, wherever it was read to.
    fixed = [claim for key in in_modules for claim in parts[key].claims]
    claims = [claim for key in others for claim in parts[key].claims]
    lines: dict[str, None] = {}
    apart: dict[str, set[str]] = {}
    key_of = {escape(key): key for key in parts}
    for owner, other in disputes(claims, fixed):
        key = key_of[other.path.partition("/")[0]]
        apart.setdefault(key, set()).add(other.path)
        if key in in_modules:
            lines[
                f"{owner.path}, {other.path}: they share memory in the app state, but not in the "
                "snapshot"
            ] = None
    return list(lines), apart


def _load_adapting(
    key: str, load: Callable[[Any], Any], state: Any, compared: KeyRestore, *, strict: bool
) -> RestoreReport:
    """Lets a module decide what it can make of a state; returns what it left out.

    Raises:
        IncompatibleState: strict, and torch says that something does not fit.
    """
    try:
        keys = load(state)
    except RuntimeError as error:
        complaints = [f"{key}: {line}" for line in torch_complaints(error)]
        if not complaints:
            raise
        if strict:
            raise IncompatibleState(mismatched=complaints, is_untouched=False) from error
        # torch tells no more than that, but has loaded all that does fit.
        return RestoreReport(
            missing=tuple(compared.missing),
            unexpected=tuple(compared.unexpected),
            mismatched=tuple(complaints),
        )
    return RestoreReport(
        missing=tuple(join(key, name) for name in getattr(keys, "missing_keys", ())),
        unexpected=tuple(join(key, name) for name in getattr(keys, "unexpected_keys", ())),
    )


@_begins_anew
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


@_begins_anew
def read_object(
    source: Source, path: str, out: Any, *, memory_budget_bytes: int | None
) -> Script[Any]:
    """One leaf or subtree, into ``out`` or fresh."""
    if not isinstance(path, str):
        raise UsageError(f"path must be a str as in get_manifest, not {path!r}")
    if memory_budget_bytes is not None and (
        type(memory_budget_bytes) is not int or memory_budget_bytes < BLOCK_BYTES
    ):
        raise UsageError(
            f"memory_budget_bytes must be at least {BLOCK_BYTES} (one block), as an int, "
            f"not {memory_budget_bytes!r}"
        )
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
    # Before the first byte: a restore that fails may have written some.
    mark_written(claim.target for part in parts for claim in part.claims)
    changes: dict[str, Any] = {}
    if memory_budget_bytes is not None:
        changes = {
            "budget": Budget(memory_budget_bytes),
            "chunk_bytes": min(memory_budget_bytes, source.options.chunk_bytes),
            "num_fetchers": 1,
        }
    if requests:
        async with source.opened(host, "read", manifest.attempt) as (storage, _, _):
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
        async with source.opened(host, "list") as (storage, _, errands):

            async def perform() -> None:
                async for info in storage.list(""):
                    name, _, key = info.key.partition("/")
                    if key == COMMIT_KEY:
                        try:
                            found[name] = decode_commit(await storage.get(info.key))
                        except FormatError as error:
                            found[name] = error
                    elif attempt_of(key) is not None:
                        found.setdefault(name, None)

            await errands.run(perform)
        return found

    found: dict[str, Commit | FormatError | None] = yield step
    return found
