"""The bodies of the calls that save, written once for callers of both kinds.

Each is a ``Script``: plain code that runs in the caller's thread, where ``state_dict`` belongs,
and that yields what must run on the runtime's loop. ``snapshot`` drives the scripts with
``await``, ``sync`` by blocking.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio

from actorsnap.errors import ActorSnapError, UsageError
from actorsnap.options import Options
from actorsnap.protocol.messages import Failure, Stage
from actorsnap.runtime.host import Host, Script, wait_done
from actorsnap.runtime.inputs import (
    AppState,
    check_flag,
    check_metadata,
    make_place,
    resolve_options,
)
from actorsnap.runtime.place import Place, open_place, open_ready_place
from actorsnap.runtime.ranks import Team, find_team
from actorsnap.runtime.saving import Membership, SaveJob
from actorsnap.state.capture import capture
from actorsnap.state.group import global_rank
from actorsnap.storage.registry import is_ready

__all__ = ["TakeCall", "await_pending", "take"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeCall:
    """The arguments of ``Snapshot.take``, as the caller gave them."""

    path: str | os.PathLike[str]
    app_state: AppState
    replicated: Sequence[str]
    overwrite: bool
    resume: bool
    metadata: Mapping[str, Any] | None
    storage_options: Mapping[str, Any] | None
    options: Options | None
    group: Any
    store: Any


def take(call: TakeCall, *, is_async: bool) -> Script[SaveJob]:
    """Captures in the caller's thread; returns when stored, or, if async, when staged."""
    team = find_team(call.group, call.store)
    if team is None:
        job = yield from _prepare(call, is_async, ranks=(global_rank(),))
    else:
        job = yield from _prepare_in_team(call, is_async, team)
    del call
    try:
        job.start()
        yield lambda _: _await_or_cancel(job, job.staged if is_async else job.finished)
    except BaseException:
        # Ctrl-C just now may have met nobody who waits for the save.
        job.cancel("the caller was interrupted")
        concurrent.futures.wait([job.finished])
        raise
    return job


def _prepare(
    call: TakeCall,
    is_async: bool,
    ranks: Sequence[int],
    membership: Membership | None = None,
) -> Script[SaveJob]:
    """Checks everything, then captures the app state."""
    options = resolve_options(call.options)
    place = make_place(call.path, call.storage_options)
    replicated = call.replicated
    if isinstance(replicated, str):
        raise UsageError(f"replicated must be a list of globs: [{replicated!r}]")
    if not isinstance(replicated, Sequence) or not all(isinstance(g, str) for g in replicated):
        raise UsageError(f"replicated must be a list of globs, not {replicated!r}")
    check_flag("overwrite", call.overwrite)
    check_flag("resume", call.resume)
    metadata = check_metadata(call.metadata)
    host = Host.get()
    # Refuses bad URLs before state_dict() runs; mostly without a step in between.
    if is_ready(place.at):
        open_ready_place(host, place, fsync=options.fsync)
    else:
        yield lambda host: open_place(host, place, fsync=options.fsync)
    captured = capture(
        call.app_state,
        replicated=replicated,
        allow_pickle=options.allow_pickle,
        ranks=ranks,
        rank=ranks[0 if membership is None else membership.team.rank],
    )
    return SaveJob(
        host,
        place=place,
        captured=captured,
        copies=is_async,
        overwrite=call.overwrite,
        resume=call.resume,
        metadata=metadata,
        options=options,
        membership=membership,
    )


def _prepare_in_team(call: TakeCall, is_async: bool, team: Team) -> Script[SaveJob]:
    """As ``_prepare``; but what fails here becomes a save that fails on all ranks."""
    options = call.options if isinstance(call.options, Options) else Options()
    save = team.begin(lost_after_s=options.lost_after_s)
    membership = Membership(team, save)
    try:
        return (yield from _prepare(call, is_async, team.ranks, membership))
    except Exception as error:
        failure = _failure_of(error, team.rank)
        return _failing(call, failure, error, membership, options)
    except BaseException as error:
        reason = "the caller was interrupted"
        failure = Failure(reason=reason, stage=Stage.CANCEL, rank=team.rank)
        job = _failing(call, failure, error, membership, options)
        job.start()
        raise


def _failure_of(error: Exception, rank: int) -> Failure:
    if isinstance(error, ActorSnapError):
        return Failure.of(error, stage=Stage.CAPTURE, rank=rank)
    said = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return Failure(reason=said, stage=Stage.CAPTURE, rank=rank)


def _failing(
    call: TakeCall,
    failure: Failure,
    cause: BaseException,
    membership: Membership,
    options: Options,
) -> SaveJob:
    return SaveJob(
        Host.get(),
        place=Place(url=str(call.path), at="", storage_options={}),
        captured=failure,
        copies=False,
        overwrite=False,
        resume=False,
        metadata={},
        options=options,
        membership=membership,
        cause=cause,
    )


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
