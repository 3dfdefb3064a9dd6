# SPDX-License-Identifier: Apache-2.0
"""DCP's ``save``, ``async_save`` and ``load``, over snapshots without DCP's planning.

    from actorsnap.interop import dcp

replaces ``import torch.distributed.checkpoint as dcp``. A call that passes a planner, writer,
reader or stager goes through torch's function, with classes of this package for the others.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import inspect
import io
import os
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch.distributed.checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.logger import _dcp_logger, _get_msg_dict
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.stateful import Stateful

from actorsnap.errors import ActorSnapError, UsageError, describe
from actorsnap.interop.dcp.reader import ActorsnapReader, PlannedReads, load_catalog
from actorsnap.interop.dcp.writer import (
    ActorsnapWriter,
    telling_overwrite,
    write_marker,
)
from actorsnap.interop.formats.dcp_metadata import BYTES_IO, TOP, DcpMark
from actorsnap.options import Options
from actorsnap.planning.shared_reads import ReadMode, SharedReadPlan
from actorsnap.protocol.failure import Stage
from actorsnap.protocol.messages import CallKind, Label
from actorsnap.protocol.restore import Comparison, Ready, RestoreDecisions
from actorsnap.runtime import taking
from actorsnap.runtime.host import Host, Script
from actorsnap.runtime.location import resolve_options
from actorsnap.runtime.rounds import Rounds, call_together
from actorsnap.runtime.save import Save
from actorsnap.runtime.script import drive_sync
from actorsnap.runtime.shared_reads import RestoreReads
from actorsnap.runtime.source import Source, begins_anew
from actorsnap.runtime.team import find_team
from actorsnap.runtime.tracing import Observation
from actorsnap.state.capture import capture
from actorsnap.state.process_group import Group, is_initialized
from actorsnap.state.restore.allocation import Allocation
from actorsnap.state.restore.build import KeyRestore
from actorsnap.state.sources import Captured
from actorsnap.tracebacks import short_traceback, shorten

_torch: Any = torch.distributed.checkpoint  # its stubs export little

AsyncCheckpointerType = _torch.state_dict_saver.AsyncCheckpointerType
"""torch's: ``THREAD`` stores in a thread, ``PROCESS`` in the uploader process."""

FuncT = TypeVar("FuncT", bound=Callable[..., Any])
_takes_storage_second: Callable[[FuncT], FuncT] = _torch.utils._api_bc_check
"""Also accepts the writer or reader as the second argument, with a warning, as DCP does."""


@_takes_storage_second
@short_traceback
def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Saves as ``torch.distributed.checkpoint.save`` does; returns when the snapshot is committed.

    Args:
        storage_writer: An ``ActorsnapWriter`` sets the options; others are passed to torch.

    Returns:
        What torch returns; read from the snapshot on first use.

    Raises:
        CheckpointException: Its ``failures`` has the error of ``Snapshot.take``.
        Exception: Any error of a ``state_dict``.
    """
    writer = storage_writer or ActorsnapWriter()
    if not (use_collectives and _is_native(writer, ActorsnapWriter, planner, DefaultSavePlanner)):
        metadata: Metadata = _torch.save(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=writer,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
            use_collectives=use_collectives,
        )
        return metadata
    writer.reset(checkpoint_id)
    call = _take_call(writer, state_dict, process_group, no_dist=no_dist)
    raising = _raising_as_dcp("save", call.group)
    with _telling_logger("save", call.path), raising, telling_overwrite(writer.overwrite):
        saved = drive_sync(taking.take(call, is_async=False))
    if writer.marker and saved.rank == 0:
        drive_sync(writer.mark())
    writer.save_id = saved.attempt
    return SavedMetadata(saved.source(), saved.rank, writer.storage_meta())


@_takes_storage_second
@short_traceback
def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: Any = None,
    async_checkpointer_type: Any = AsyncCheckpointerType.THREAD,
    async_stager: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Any:
    """Copies the state, and saves it in the background, as ``Snapshot.async_take`` does.

    Args:
        storage_writer: See ``save``.
        async_checkpointer_type: ``PROCESS`` stores in actorsnap's uploader process.

    Returns:
        A ``concurrent.futures.Future`` of ``save``'s result and errors; or what torch returns, if
        it makes the call.

    Raises:
        CheckpointException, Exception: See ``save``.
    """
    writer = storage_writer or ActorsnapWriter()
    is_native = _is_native(writer, ActorsnapWriter, planner, DefaultSavePlanner)
    if not is_native or async_stager is not None or not use_collectives:
        return _torch.async_save(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=writer,
            planner=planner,
            process_group=process_group,
            async_checkpointer_type=async_checkpointer_type,
            async_stager=async_stager,
            no_dist=no_dist,
            use_collectives=use_collectives,
        )
    writer.reset(checkpoint_id)
    if async_checkpointer_type is AsyncCheckpointerType.PROCESS:
        options = msgspec.structs.replace(resolve_options(writer.options), offload="process")
        return begin_save(writer, state_dict, process_group, no_dist=no_dist, options=options)[1]
    return begin_save(writer, state_dict, process_group, no_dist=no_dist)[1]


def begin_save(
    writer: ActorsnapWriter,
    state_dict: Mapping[str, Any],
    process_group: Any = None,
    *,
    no_dist: bool = False,
    options: Options | None = None,
    trained: Mapping[str, Any] | None = None,
) -> tuple[Save, concurrent.futures.Future[Metadata]]:
    """Begins an ``async_save`` that DCP does not plan.

    Args:
        options: Instead of the writer's.
        trained: Modules and optimizers by any name. Their leaves are staged lazily: wait for
            ``taking.await_staged`` before an optimizer steps.

    Returns:
        The save, and its outcome as callers of DCP get it.

    Raises:
        CheckpointException, Exception: See ``save``.
    """
    call = _take_call(writer, state_dict, process_group, no_dist=no_dist)
    if options is not None:
        call = replace(call, options=options)
    if trained is not None:
        call = replace(call, stage="lazy", app_state=trained)
    raising = _raising_as_dcp("save", call.group)
    with _telling_logger("async_save", call.path), raising, telling_overwrite(writer.overwrite):
        saving = drive_sync(taking.take(call, is_async=True))
    result: concurrent.futures.Future[Metadata] = concurrent.futures.Future()

    def settle(finished: concurrent.futures.Future[None]) -> None:
        error = finished.exception()
        if error is None:
            meta = StorageMeta(checkpoint_id=call.path, save_id=saving.attempt)
            result.set_result(SavedMetadata(saving.source(), saving.rank, meta))
        else:
            result.set_exception(_as_dcp("save", error, saving.rank))

    def mark(finished: concurrent.futures.Future[None]) -> None:
        if finished.exception() is None and writer.marker and saving.rank == 0:
            writing = saving.host.submit(write_marker(saving.host, saving.location))
            finished = writing.future
        finished.add_done_callback(settle)

    saving.finished.add_done_callback(mark)
    return saving, result


@_takes_storage_second
@short_traceback
def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: Any = None,
    planner: Any = None,
    process_group: Any = None,
    no_dist: bool = False,
) -> None:
    """Loads as ``torch.distributed.checkpoint.load`` does: into tensors in place, replacing others.

    All ranks load, or raise. Ranges that many ranks need are read once, as in ``Snapshot.restore``.

    Args:
        storage_reader: An ``ActorsnapReader`` sets the options; others are passed to torch.

    Raises:
        CheckpointException: Its ``failures`` has the error: one of ``Snapshot.restore``, or of
            torch's planner for a missing key or another size.
        Exception: Any error of a ``load_state_dict``.
    """
    reader = storage_reader or ActorsnapReader()
    is_native = _is_native(reader, ActorsnapReader, planner, DefaultLoadPlanner)
    if not is_native:
        _torch.load(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_reader=reader,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
        )
        return
    reader.reset(checkpoint_id)
    group = _group(process_group, no_dist=no_dist)
    with _telling_logger("load", reader.path), _raising_as_dcp("load", group):
        loaded = drive_sync(_load(reader.source(), state_dict, group, reader.rank))
    for key in sorted(state_dict):
        if isinstance(state_dict[key], Stateful):
            state_dict[key].load_state_dict(loaded[key])
        else:
            state_dict[key] = loaded[key]


def _group(process_group: Any, *, no_dist: bool) -> Any:
    """Returns the ``group`` of ``Snapshot.take``: this rank alone where DCP means that."""
    is_alone = no_dist or not is_initialized()
    return Group.of_one() if is_alone else process_group


def _is_native(storage: Any, kind: type, planner: Any, default: type) -> bool:
    if type(storage) is not kind:
        return False
    return planner is None or (type(planner) is default and _is_default(planner, default()))


_NO_EFFECT = {"dedup_replicated_tensors", "dedup_save_to_lowest_rank", "enable_plan_caching"}
"""Options of a planner that do not change what is saved."""


def _is_default(planner: Any, default: Any) -> bool:
    # torch's function also knows the options of later versions.
    names = inspect.signature(type(default)).parameters.keys() - _NO_EFFECT
    return all(getattr(planner, name, None) == getattr(default, name, None) for name in names)


@contextlib.contextmanager
def _telling_logger(name: str, path: Any) -> Iterator[None]:
    """Logs a call as torch's function would, for handlers of DCP's logger (``dcp_logger``)."""
    began_ns = time.time_ns()
    message = {**_get_msg_dict(name, checkpoint_id=path), "log_exceptions": True}
    _dcp_logger.debug({**message, "event": "start", "time": began_ns})
    try:
        yield
    except BaseException as error:
        failed = {"event": "exception", "error": str(error), "time": time.time_ns()}
        _dcp_logger.error({**message, **failed})
        raise
    now_ns = time.time_ns()
    ended = {"event": "end", "time": now_ns, "times_spent": now_ns - began_ns}
    _dcp_logger.debug({**message, **ended})


class CheckpointFailed(CheckpointException):
    """DCP's exception with the text of a single error: all ranks raised the same, or one failed."""

    def __str__(self) -> str:
        return describe(next(iter(self.failures.values()))[0])


@contextlib.contextmanager
def _raising_as_dcp(step: str, group: Any) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        ranks = range(1)
        if not isinstance(group, Group):
            ranks = range(torch.distributed.get_world_size(group))
            if not isinstance(error, ActorSnapError):  # this rank's own
                ranks = ranks[torch.distributed.get_rank(group) :][:1]
        raise _as_dcp(step, error, *ranks) from error


def _as_dcp(step: str, error: BaseException, *ranks: int) -> CheckpointException:
    """Returns what callers of DCP catch: of the rank that failed, or of all that raise ``error``.

    Args:
        ranks: That raise ``error``, if it does not name the rank that failed.
    """
    shorten(error)
    if isinstance(error, UsageError):  # may list leaves, a line each
        error.message = re.sub(rf"(?m)^( *'){TOP}/", r"\1", error.message)
        error.args = (error.message,)
    stack = traceback.extract_tb(error.__traceback__)
    failed = getattr(error, "rank", None)
    failures = dict.fromkeys(ranks if failed is None else [failed], (error, stack))
    failure = CheckpointFailed(step, failures)
    failure.__cause__ = error
    return failure


# Saving


def _take_call(
    writer: ActorsnapWriter, state_dict: Mapping[str, Any], process_group: Any, *, no_dist: bool
) -> taking.TakeCall:
    if writer.path is None:
        raise UsageError("no path: pass checkpoint_id=, or storage_writer=ActorsnapWriter(path)")
    allow_pickle = resolve_options(writer.options).allow_pickle
    return taking.TakeCall(
        path=writer.path,
        app_state={},
        capture=partial(_capture, state_dict, allow_pickle=allow_pickle),
        replicated=(),
        overwrite=writer.overwrite,
        resume=False,
        step=writer.step,
        metadata=writer.metadata | DcpMark().metadata(),
        storage_options=writer.storage_options,
        options=writer.options,
        group=_group(process_group, no_dist=no_dist),
        store=None,
    )


def _capture(
    state_dict: Mapping[str, Any], ranks: Sequence[int], rank: int, *, allow_pickle: bool
) -> Captured:
    """Captures as DCP does: leaves of one name are equal on all ranks.

    Those that are not (states of random generators) are one rank's, never parts of several.

    Raises:
        UsageError: Two leaves have one name: DCP could not load either.
    """
    parts = _app_state(state_dict)
    captured = capture(
        parts,
        replicated=["**"],
        allow_pickle=allow_pickle,
        ranks=ranks,
        rank=rank,
    )
    for leaf in captured.leaves:
        if leaf.item.replicated:
            leaf.item = msgspec.structs.replace(leaf.item, is_whole=True)
    counts = Counter([name for part in parts.values() for name in part.names])
    if twice := sorted([name for name, count in counts.items() if count > 1]):
        raise UsageError(
            f"{', '.join(map(repr, twice[:10]))}: torch.distributed.checkpoint joins keys by dots, "
            "and makes them str, so two leaves of the state dict have this name; rename one"
        )
    return captured


class _SavedPart:
    """A value of a state dict, as a stateful to save.

    Args:
        key: In the state dict; None: ``value`` has leaves of its top level.

    Attributes:
        names: DCP's, of the leaves, after ``state_dict``.
    """

    def __init__(self, key: str | None, value: Any) -> None:
        self._key = key
        self._value = value
        self.names: list[str] = []

    def state_dict(self) -> Any:
        value = self._value
        self.names = []
        return self._storable(
            self._key, value.state_dict() if isinstance(value, Stateful) else value
        )

    def _storable(self, name: str | None, value: Any) -> Any:
        """Returns a state dict as DCP names it: with str keys, and plain containers."""
        prefix = "" if name is None else f"{name}."
        if isinstance(value, Mapping):
            found: dict[str, Any] = {}
            for key, item in value.items():
                if str(key) in found:
                    self.names += [f"{prefix}{key}"] * 2
                found[str(key)] = self._storable(f"{prefix}{key}", item)
            return found
        if type(value) is list:
            return [self._storable(f"{prefix}{n}", item) for n, item in enumerate(value)]
        self.names.append(str(name))
        return (BYTES_IO, value.getvalue()) if type(value) is io.BytesIO else value

    def load_state_dict(self, state_dict: Any) -> None:
        raise NotImplementedError


def _app_state(state_dict: Mapping[str, Any]) -> dict[str, _SavedPart]:
    """Returns one stateful per key. Tensors and values at the top level share one."""
    if TOP in state_dict:
        raise UsageError(f"the key {TOP!r} of a state dict is reserved; rename it")
    parts: dict[str, _SavedPart] = {}
    top: dict[Any, Any] = {}
    for key, value in state_dict.items():
        if isinstance(value, Stateful | Mapping):
            if str(key) in parts:
                raise UsageError(f"two keys of the state dict are {str(key)!r} as str; rename one")
            parts[str(key)] = _SavedPart(str(key), value)
        else:
            top[key] = value
    if top or not parts:
        parts[TOP] = _SavedPart(None, top)
    return parts


class SavedMetadata(Metadata):
    """The metadata of a saved snapshot, read from it on first use."""

    def __init__(self, source: Source, rank: int, storage_meta: StorageMeta | None) -> None:
        self.storage_meta = storage_meta
        object.__setattr__(self, "_origin", (source, rank))

    @short_traceback
    def __getattribute__(self, name: str) -> Any:
        if name in ("state_dict_metadata", "planner_data") and name not in vars(self):
            source, rank = vars(self)["_origin"]
            catalog = drive_sync(load_catalog(source, rank))
            vars(self).update(vars(catalog.metadata(self.storage_meta)))
        return object.__getattribute__(self, name)

    def __reduce__(self) -> Any:
        return Metadata, (self.state_dict_metadata, self.planner_data, None, self.storage_meta)


# Loading


@begins_anew
def _load(
    source: Source, state_dict: Mapping[str, Any], group: Any, view: int | None
) -> Script[dict[str, Any]]:
    """Fills a state dict with all ranks, in the rounds of ``protocol.restore``."""
    label = Label(CallKind.RESTORE, source.location.canonical)
    decisions = RestoreDecisions(mode=ReadMode(source.options.read_mode))
    team = find_team(group, None)

    def body(rounds: Rounds) -> Script[dict[str, Any]]:
        catalog = yield from load_catalog(source, rounds.rank if view is None else view)
        ready = Ready(source.location.display_url, catalog.index.attempt)
        yield from rounds.arrive(msgspec.msgpack.encode(ready), then=Stage.COMPARE)
        loaded = {
            key: value.state_dict() if isinstance(value, Stateful) else value
            for key, value in sorted(state_dict.items())
        }
        planner = DefaultLoadPlanner()
        planner.set_up_planner(loaded, catalog.metadata(), rounds.rank == 0)
        planned = PlannedReads(catalog, planner.create_local_plan(), planner, source)
        parts = {
            key: KeyRestore(None, Allocation(reads=wanted))  # type: ignore[arg-type]
            for key, wanted in planned.wanted.items()
        }
        reads = RestoreReads(source, catalog.index, parts, rounds.team, Observation("restore"))
        compared = msgspec.msgpack.encode(Comparison(reads.interest(Host.get())))
        payload = yield from rounds.arrive(compared, then=Stage.READ)
        how = msgspec.msgpack.decode(payload, type=SharedReadPlan)
        planned.mark()
        yield from rounds.perform(lambda host, arrive: reads.read(host, how, arrive, rounds.scope))
        planned.finish()
        yield from rounds.arrive(then=Stage.LOAD)
        yield from rounds.arrive()
        return loaded

    return (yield from call_together(team, label, source.options, decisions, body))
