# SPDX-License-Identifier: Apache-2.0
"""Runs a call's work in a storage that may hang, and stops waiting for it on cancellation.

A thread in a system call cannot be stopped: a write to a dead NFS server may never return. So each
step is an errand, a separate task. An abandoned errand keeps leased memory and descriptors until
its threads return. Safe for steps that do not write to the caller's memory; reads into tensors are
always awaited.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import anyio.abc

from actorsnap.errors import ActorSnapError, StorageError, describe
from actorsnap.log import Log
from actorsnap.storage.base import RunBlocking, ends_this_task

logger = Log(__name__)

T = TypeVar("T")

_GRACE_S = 2.0
_CLEANUP_S = 30.0
"""Limit of a clean-up; after the call's deadline only the grace period."""

_CLOSE_S = 5.0


class AbandonableTasks:
    """The errands of one call. On the loop only.

    Args:
        tasks: Ends when the last errand has returned.
        run_cpu: Runs calls that move bytes; None: ``run_blocking``.
        on_retry: See ``StorageContext``.
        deadline: The loop's time at which the call, clean-up included, has to end.

    Attributes:
        run_blocking, run_cpu: The given ones; their running calls are counted for messages.
        how_far: Returns how far the call came, for a message; empty if unknown.
    """

    def __init__(
        self,
        tasks: anyio.abc.TaskGroup,
        *,
        run_blocking: RunBlocking,
        run_cpu: RunBlocking | None = None,
        label: str,
        on_retry: Callable[[StorageError, float], None] | None = None,
        deadline: float = math.inf,
    ) -> None:
        self._tasks = tasks
        self.run_blocking = self._counted(run_blocking)
        self.run_cpu = self._counted(run_cpu or run_blocking)
        self.how_far: Callable[[], str] = str
        self._label = label
        self._on_retry = on_retry
        self._deadline = deadline
        self._retried: tuple[StorageError, float] | None = None
        self._num_calls = 0
        self._abandoned: list[anyio.Event] = []

    def _counted(self, run: RunBlocking) -> RunBlocking:
        async def counted(fn: Callable[..., T], /, *args: Any) -> T:
            self._num_calls += 1
            try:
                return await run(fn, *args)
            finally:
                self._num_calls -= 1

        return counted

    def note_retry(self, error: StorageError, delay_s: float) -> None:
        """``StorageContext.on_retry`` of the call's storages."""
        self._retried = error, anyio.current_time()
        if self._on_retry is not None:
            self._on_retry(error, delay_s)

    @property
    def trouble(self) -> str:
        """The last error that led to a retry, or empty."""
        if self._retried is None:
            return ""
        error, noted_s = self._retried
        return f"{anyio.current_time() - noted_s:.1f} s ago the storage failed: {error}"

    async def run(self, step: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Awaits ``step(*args)`` in a separate task.

        Cancellation: Cancels the step and waits for the grace period. A step that completes within
        it is not cancelled; one that hangs is abandoned with a warning.
        """
        scope = anyio.CancelScope(shield=True)  # cancelled by the caller only
        ended = anyio.Event()
        results: list[T] = []
        errors: list[Exception] = []

        async def perform() -> None:
            try:
                with scope:
                    results.append(await step(*args))
            except Exception as error:
                errors.append(error)
            except BaseException as error:
                if ends_this_task(error):
                    raise
                # It must neither end the runtime nor pass for a cancellation.
                plain = RuntimeError(f"{self._label}: {describe(first_error(error))}")
                plain.__cause__ = error
                errors.append(plain)
            finally:
                ended.set()

        self._tasks.start_soon(perform)
        try:
            await ended.wait()
        except anyio.get_cancelled_exc_class():
            scope.cancel()
            with anyio.move_on_after(_GRACE_S, shield=True):
                await ended.wait()
            if not ended.is_set():
                self._abandoned.append(ended)
                logger.warning(
                    "%s: the storage hangs, %d calls have not returned; continuing without them",
                    self._label,
                    self._num_calls,
                )
            if not results and not errors:
                raise
        if errors:
            raise errors.pop()
        return results.pop()

    async def clean_up(
        self, step: Callable[[], Awaitable[None]], consequence: str = "garbage was left"
    ) -> None:
        """Runs ``step`` despite cancellation, for a bounded time; never raises its error.

        ``consequence`` is logged if the step fails.

        After an abandoned errand the step is abandoned too, and runs once that has returned.
        """
        remaining_s = self._deadline - anyio.current_time()
        limit_s = max(_GRACE_S, min(remaining_s, _CLEANUP_S))
        await self._end(step, limit_s, consequence)

    async def close(self, aclose: Callable[[], Awaitable[None]]) -> None:
        """``clean_up`` for closing a storage, within half of the remaining time.

        A storage that hangs must leave time for the caller's next step.
        """
        deadline = min(self._deadline, anyio.current_effective_deadline())
        remaining_s = deadline - anyio.current_time()
        limit_s = min(remaining_s / 2, _CLOSE_S) if remaining_s > 0 else _GRACE_S
        await self._end(aclose, limit_s, "the storage was not closed")

    async def _end(
        self, step: Callable[[], Awaitable[None]], limit_s: float, consequence: str
    ) -> None:
        if self._abandoned:
            earlier, ended = tuple(self._abandoned), anyio.Event()
            self._abandoned.append(ended)
            self._tasks.start_soon(self._end_later, earlier, step, consequence, ended)
            return
        with anyio.move_on_after(limit_s, shield=True) as scope:
            await self.run(self._tidy, step, consequence)
        if scope.cancelled_caught:
            logger.warning("%s: %s: it took over %.3g s", self._label, consequence, limit_s)

    async def _end_later(
        self,
        earlier: tuple[anyio.Event, ...],
        step: Callable[[], Awaitable[None]],
        consequence: str,
        ended: anyio.Event,
    ) -> None:
        try:
            with anyio.CancelScope(shield=True):
                for other in earlier:
                    await other.wait()
                await self._tidy(step, consequence)
        finally:
            ended.set()

    async def _tidy(self, step: Callable[[], Awaitable[None]], consequence: str) -> None:
        try:
            await step()
        except Exception as error:  # any error
            first = first_error(error)
            if isinstance(first, ActorSnapError):
                logger.warning("%s: %s (%s)", self._label, consequence, first)
            else:
                logger.warning("%s: %s", self._label, consequence, exc_info=True)


def garbage_left(url: str) -> str:
    """Returns the consequence of a failed clean-up of a snapshot's objects, with a remedy."""
    return f"garbage was left at {url}; `actorsnap rm --garbage {shlex.quote(url)}` deletes it"


def first_error(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
