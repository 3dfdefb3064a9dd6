# SPDX-License-Identifier: Apache-2.0
"""The bodies of the calls that save.

Each is a ``Script``: runs in the caller's thread, where ``state_dict`` belongs, and yields steps
for the runtime's loop. ``snapshot`` drives it with ``await``, ``sync`` by blocking.
"""

from __future__ import annotations

import concurrent.futures
import os
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeVar

import anyio

from actorsnap.actors.fence import Fence, Watch
from actorsnap.actors.trace import Work
from actorsnap.errors import UsageError, text_of
from actorsnap.format.compression import check_available
from actorsnap.log import Log
from actorsnap.options import Options, chunk_within
from actorsnap.protocol.failure import Failure, Stage
from actorsnap.protocol.messages import CallKind, Label
from actorsnap.runtime import pacing
from actorsnap.runtime.bars import Output, of_save, shown, when_ended
from actorsnap.runtime.host import Host, Script, wait_done
from actorsnap.runtime.local_engine import LocalEngine
from actorsnap.runtime.location import (
    AppState,
    Location,
    check_flag,
    check_metadata,
    check_step,
    make_location,
    open_location,
    open_ready_location,
    resolve_options,
)
from actorsnap.runtime.process import has_cores
from actorsnap.runtime.remote_engine import RemoteEngine
from actorsnap.runtime.save import Save, SaveRequest
from actorsnap.runtime.team import Membership, Team, TeamCall, find_team
from actorsnap.runtime.tracing import observe
from actorsnap.runtime.uploader_client import Uploader, find_uploader, find_usable_uploader
from actorsnap.state import devices
from actorsnap.state.capture import capture
from actorsnap.state.lazy import StepHook, check_optimizer, find_lazy
from actorsnap.state.process_group import global_rank, likely_ranks
from actorsnap.state.sources import Captured
from actorsnap.storage.registry import find_opener, is_ready

T = TypeVar("T")

logger = Log(__name__)

_STAGES = ("eager", "lazy")

_AUTO_BYTES = 64 << 20
"""Minimum size of a state for the uploader process: for smaller ones a thread costs the trainer
less time (0011). With two trainers on two cores, processes saved no time and commits took ten times
as long: the uploaders only got idle CPU time (0012).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeCall:
    """The arguments of ``Snapshot.take``.

    Attributes:
        refusal: Fails the save on all ranks before it calls ``state_dict``.
        capture: Replaces the capture of ``app_state``; gets all global ranks and this one. Its
            error fails the save on all ranks.
        returns_failed: Other ranks may have returned before the save failed, so this one returns as
            well: ``Save.finished`` has the error.
        joins_promptly, topic: See ``Team.begin``.
        nonce, method: See ``Label``.
        output: Shows the progress of earlier saves, too; None: of this one only.
    """

    path: str | os.PathLike[str]
    app_state: AppState
    replicated: Sequence[str]
    overwrite: bool
    resume: bool
    step: int | None
    stage: str = "eager"
    metadata: Mapping[str, Any] | None
    storage_options: Mapping[str, Any] | None
    options: Options | None
    group: Any
    store: Any
    refusal: Exception | None = None
    progress: bool = False
    capture: Callable[[Sequence[int], int], Captured] | None = None
    returns_failed: bool = False
    joins_promptly: bool = False
    topic: bytes = b""
    nonce: str = ""
    method: str = ""
    output: Output | None = None
    begun_s: float = field(default_factory=time.monotonic)


def take(call: TakeCall, *, is_async: bool) -> Script[Save]:
    """Returns when the snapshot is stored; if async, when the state or its eager part is staged."""
    team = find_team(call.group, call.store)
    if team is None:
        save = yield from _prepare(call, is_async, ranks=(global_rank(),))
    else:
        save = yield from _prepare_in_team(call, is_async, team)
    save.output = (call.output or Output()) if call.progress and save.rank == 0 else None
    if save.output is not None:
        save.finished.add_done_callback(when_ended(save.output, of_save(save.board), save.url))
    returns_failed, is_lazy = call.returns_failed, call.stage == "lazy"
    del call
    try:
        if is_async:
            pacing.watch(save)
        save.start()
        if save.fence is not None:
            Guard(Host.get(), save.fence, save.fence.lazy.must_wait)
        awaited = save.eager_staged if is_async else save.finished
        # Raised through the loop: an error raised by the future keeps the caller's frames and so
        # the app state alive.
        if not awaited.done() or awaited.exception() is not None:
            yield from _shown(save, _step(lambda: _await_or_cancel(save, awaited)), awaited)
    except BaseException as error:
        # Ctrl-C may have come while no step waited.
        save.cancel("the caller was interrupted")
        concurrent.futures.wait([save.finished])
        is_returned = returns_failed and (is_lazy or _has_begun_everywhere(save))
        if not (is_returned and isinstance(error, Exception)):
            if not isinstance(error, Exception):
                error.add_note(_ending_of(save))
            raise
        logger.error("%s: %s", save.label, error)
    return save


def _ending_of(save: Save) -> str:
    """Returns how an interrupted save has ended, for the user."""
    error = save.finished.exception()
    if error is None:
        return f"The snapshot {save.url} was committed before the interruption."
    if getattr(error, "may_be_committed", True):
        return f"{text_of(error)}. Older snapshots at other paths are intact."
    return (
        "The save was aborted. Nothing was committed, and older snapshots are intact. Its files "
        "are deleted; any that remain are ignored."
    )


def _has_begun_everywhere(save: Save) -> bool:
    """Returns whether other ranks may have staged already."""
    call = None if save.membership is None else save.membership.call
    return isinstance(call, TeamCall) and call.participant.has_proceeded


def warm_up(nbytes: int, options: Options | None) -> Script[None]:
    """Prepares memory, code and the uploader process for async saves of ``nbytes``."""
    chosen = resolve_options(options)
    if type(nbytes) is not int or nbytes < 0:
        raise UsageError(f"nbytes must be an integer of at least 0, not {nbytes!r}")

    pinner = devices.calls.own_pinner()

    async def step(host: Host) -> None:
        host.resources.set_budget(chosen.memory_budget_bytes)
        is_wanted = chosen.offload == "process" or chosen.detach
        num_ranks = likely_ranks()
        if is_wanted or (chosen.offload == "auto" and _pays(nbytes, num_ranks)):
            with suppress(OSError):  # the first save reports it
                find_uploader(host).start()
        await host.run_blocking(find_opener, os.sep)
        chunk_bytes = chunk_within(chosen.chunk_bytes, host.resources.budget.limit_bytes)
        count = -(-nbytes // chunk_bytes)
        await host.run_blocking(host.resources.arena.warm_up, [chunk_bytes] * count, pinner)

    yield step


def _prepare(
    call: TakeCall,
    is_async: bool,
    ranks: Sequence[int],
    membership: Membership | None = None,
) -> Script[Save]:
    if call.refusal is not None:
        raise call.refusal
    options = resolve_options(call.options)
    if options.compression is not None:
        check_available()
    location = make_location(call.path, call.storage_options)
    replicated = call.replicated
    if isinstance(replicated, str):
        raise UsageError(f"replicated must be a list of globs: [{replicated!r}]")
    if not isinstance(replicated, Sequence) or not all(isinstance(g, str) for g in replicated):
        raise UsageError(f"replicated must be a list of globs, not {replicated!r}")
    check_flag("overwrite", call.overwrite)
    check_flag("resume", call.resume)
    check_flag("progress", call.progress)
    step = check_step(call.step)
    if call.stage not in _STAGES:
        raise UsageError(f"stage must be 'eager' or 'lazy', not {call.stage!r}")
    metadata = check_metadata(call.metadata)
    host = Host.get()
    observation = observe("save", options)
    # Refuses bad URLs before state_dict() runs; usually without a step.
    if is_ready(location.url):
        open_ready_location(host, location, fsync=options.fsync)
    else:
        yield lambda host: open_location(host, location, fsync=options.fsync)
    rank = ranks[0 if membership is None else membership.team.rank]
    if call.capture is not None:
        captured = call.capture(ranks, rank)
    else:
        captured = capture(
            call.app_state,
            replicated=replicated,
            allow_pickle=options.allow_pickle,
            ranks=ranks,
            rank=rank,
        )
    fence = None
    if call.stage == "lazy":
        leaves = captured.leaves
        lazy = find_lazy(call.app_state, leaves, is_guarded=_was_guarded)
        fence = Fence(lazy, leaves)
    observation.caller.note(Work.CAPTURE)
    request = SaveRequest(
        location=location,
        overwrite=call.overwrite,
        resume=call.resume,
        step=step,
        metadata=metadata,
        options=options,
        begun_s=call.begun_s,
    )
    save = Save(host, request, membership=membership, fence=fence, observation=observation)
    if call.capture is None:
        save.keys = tuple(sorted(call.app_state))
    if is_async:
        uploader = _choose_uploader(host, location, options, captured, save.world_size)
        if uploader is not None:
            save.engine = RemoteEngine(save, captured, uploader)
            return save
    save.engine = LocalEngine(save, captured, copies=is_async)
    return save


def _choose_uploader(
    host: Host, location: Location, options: Options, captured: Captured, num_ranks: int
) -> Uploader | None:
    """None: it should not or cannot make the save."""
    nbytes = sum([leaf.item.nbytes for leaf in captured.leaves])
    is_auto = options.offload == "auto" and not options.detach
    if is_auto and not _pays(nbytes, num_ranks):
        return None
    uploader = find_usable_uploader(host, [location], options)
    if uploader is not None and is_auto and not uploader.is_ready:
        # For the next save; this one does not wait.
        host.call_soon(uploader.start)
        return None
    return uploader


def _pays(nbytes: int, num_ranks: int) -> bool:
    """Returns whether an uploader process costs less than threads."""
    return nbytes >= _AUTO_BYTES and has_cores(num_ranks)


def _prepare_in_team(call: TakeCall, is_async: bool, team: Team) -> Script[Save]:
    """Like ``_prepare``, but an error becomes a save that fails on all ranks."""
    options = call.options if isinstance(call.options, Options) else Options()
    membership = team.join(
        _label_of(call, is_async),
        options,
        begun_s=call.begun_s,
        joins_promptly=call.joins_promptly,
        topic=call.topic,
    )
    try:
        return (yield from _prepare(call, is_async, team.ranks, membership))
    except Exception as error:
        failure = Failure.of(error, stage=Stage.CAPTURE, rank=team.rank)
        return _failing(call, failure, error, membership, options)
    except BaseException as error:
        reason = "the caller was interrupted"
        failure = Failure(reason=reason, stage=Stage.CANCEL, rank=team.rank)
        save = _failing(call, failure, error, membership, options)
        save.start()
        raise


def _label_of(call: TakeCall, is_async: bool) -> Label | None:
    """None for bad input, which ``_prepare`` refuses."""
    kind = CallKind.ASYNC_TAKE if is_async else CallKind.TAKE
    try:
        url = make_location(call.path, None).canonical
        return Label(kind, url, check_step(call.step), call.nonce, call.method)
    except Exception:  # __fspath__ may raise anything
        return None


def _failing(
    call: TakeCall,
    failure: Failure,
    cause: BaseException,
    membership: Membership,
    options: Options,
) -> Save:
    request = SaveRequest(
        location=Location(display_url=str(call.path), url="", storage_options={}),
        options=options,
        begun_s=call.begun_s,
    )
    save = Save(Host.get(), request, membership=membership)
    save.engine = LocalEngine(save, failure, copies=False, cause=cause)
    return save


async def _await_or_cancel(save: Save, future: concurrent.futures.Future[T]) -> T:
    """Cancellation: cancels the save and waits for its end."""
    try:
        await wait_done(future)
    except BaseException:
        save.cancel("the caller was interrupted")
        with anyio.CancelScope(shield=True):
            await wait_done(save.finished)
        raise
    return future.result()


def await_staged(save: Save) -> Script[None]:
    """Waits until the trainer may overwrite its tensors; speeds up lazy copies."""
    save.check_process()
    fence = save.fence
    if fence is not None and not save.staged.done():
        Host.get().call_soon(fence.copy_now)
    yield from await_pending(save, save.staged)


def guard(save: Save, optimizers: Sequence[Any]) -> Guard:
    """Makes each optimizer's next step wait for the tensors that it changes."""
    save.check_process()
    return Guard(Host.get(), save.fence, optimizers)


def await_pending(save: Save, future: concurrent.futures.Future[T]) -> Script[T]:
    """Cancellation: the save continues."""
    save.check_process()

    async def wait() -> T:
        await wait_done(future)
        return future.result()

    return (yield from _shown(save, _step(wait), future))


def _step(work: Callable[[], Coroutine[Any, Any, T]]) -> Script[T]:
    result: T = yield lambda _: work()
    return result


def _shown(save: Save, script: Script[T], awaited: concurrent.futures.Future[Any]) -> Script[T]:
    return shown(
        *(script, of_save(save.board), save.url),
        is_on=save.output is not None,
        output=save.output,
        has_end=awaited is save.finished,
    )


_guarded: weakref.WeakSet[Any] = weakref.WeakSet()


def _was_guarded(optimizer: Any) -> bool:
    """Returns whether any save guarded the optimizer in this process.

    If its steps do not change version counters, a lazy save copies its tensors late only then, and
    guards it.
    """
    return optimizer in _guarded


class Guard:
    """The hooks of ``PendingSnapshot.guard`` in optimizers.

    A hook removes itself after the first step that finds everything copied or the save ended. As a
    context manager, this removes the remaining hooks on exit.
    """

    def __init__(self, host: Host, fence: Fence | None, optimizers: Sequence[Any]) -> None:
        self._hooks: list[StepHook] = []
        # Also without a fence, for the next save.
        for optimizer in optimizers:
            check_optimizer(optimizer)
            with suppress(TypeError):  # other optimizers: no weak references
                _guarded.add(optimizer)
        if fence is None:
            return
        try:
            for optimizer in optimizers:
                gate = _Gate(host, fence, optimizer)
                self._hooks.append(StepHook(optimizer, gate.wait))
                gate.begin()
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Removes the hooks. A later step that changes uncopied tensors aborts the save. Do not
        call this while an optimizer steps in another thread.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


@dataclass(eq=False, repr=False)
class _Gate:
    host: Host
    fence: Fence
    optimizer: Any
    _shape: tuple[int, ...] = ()
    _watch: Watch = field(default_factory=partial(Watch, ()))

    def begin(self) -> None:
        """Watches the tensors that the next step changes."""
        fence, optimizer = self.fence, self.optimizer
        if not fence.is_open:
            self._shape = _shape_of(optimizer)
            watch = self._watch = Watch(fence.lazy.touched_by(optimizer))
            self.host.call_soon(lambda: fence.watch(watch))

    def wait(self) -> bool:
        """Blocks until the step's tensors are copied; returns True."""
        is_forked = self.host.pid != os.getpid()
        if not self.fence.is_open and not is_forked:
            if _shape_of(self.optimizer) != self._shape:
                self.begin()  # new parameters or state
            fence, watch = self.fence, self._watch
            if not watch.passed.is_set():
                self.host.call_soon(lambda: fence.copy_now(watch))
                # Set for every outcome of the save. Ctrl-C interrupts.
                watch.passed.wait()
        return True


def _shape_of(optimizer: Any) -> tuple[int, ...]:
    """Changes when an optimizer gets parameters or state."""
    counts = [len(group["params"]) for group in optimizer.param_groups]
    return (*counts, len(getattr(optimizer, "state", ())))
