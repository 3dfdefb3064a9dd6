"""The bodies of the calls that save, written once for callers of both kinds.

Each is a ``Script``: plain code that runs in the caller's thread, where ``state_dict`` belongs,
and that yields what must run on the runtime's loop. ``snapshot`` drives the scripts with
``await``, ``sync`` by blocking.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import anyio

from actorsnap.errors import (
    UsageError,
)
from actorsnap.options import Options
from actorsnap.runtime.host import Host, Script, wait_done
from actorsnap.runtime.inputs import (
    AppState,
    check_flag,
    check_metadata,
    make_place,
    resolve_options,
)
from actorsnap.runtime.place import (
    open_place,
    open_ready_place,
)
from actorsnap.runtime.saving import SaveJob
from actorsnap.state.capture import capture
from actorsnap.storage.registry import is_ready

__all__ = [
    "await_pending",
    "take",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")


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
    check_flag("overwrite", overwrite)
    checked_metadata = check_metadata(metadata)
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
