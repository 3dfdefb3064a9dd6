"""Measures training steps, and slows down uploaders for ``Options.max_slowdown``.

``protocol/pacing.py`` decides; this module has the clock and the lock. Steps are reported by the
trainer's thread and take some microseconds: the runtime's loop is woken only if the pace changes.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import threading
import time
from functools import partial

import anyio

from actorsnap.log import Log
from actorsnap.protocol.pacing import (
    PacingEvent,
    PacingMachine,
    SavingBegan,
    SavingEnded,
    Schedule,
    StagingBegan,
    StepEnded,
    TimePassed,
)
from actorsnap.runtime.host import Host
from actorsnap.runtime.save import Save

__all__ = ["Step", "step", "watch"]

logger = Log(__name__)

_TICK_S = 0.5


class Step:
    """A training step, from enter to exit. See ``step``."""

    __slots__ = ("_begun_s",)

    def __enter__(self) -> None:
        self._begun_s = time.perf_counter()

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if exc_type is None:
            _Pacer.get().step_ended(time.perf_counter() - self._begun_s)


def step() -> Step:
    """Marks a training step, for ``Options.max_slowdown``: ``with actorsnap.step(): ...``.

    Measures its time, also across an ``await``; a step that raises does not count. Mark all steps,
    with and without a running save, and always the same work; leave out evaluations. One training
    loop per process. Takes some microseconds and never blocks.
    """
    return Step()


def watch(save: Save) -> None:
    """Applies the save's ``max_slowdown`` from its staging to its end."""
    if save.options.max_slowdown is not None:
        _Pacer.get().watch(save, save.options.max_slowdown)


def _is_staged(save: Save) -> bool:
    return save.staged.done() and save.staged.exception() is None


class _Pacer:
    """The pacer of this process. Thread-safe."""

    _instance: _Pacer | None = None

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._machine = PacingMachine()
        self._numbers = itertools.count()
        self._saves: dict[int, tuple[Save, float]] = {}
        self._host: Host | None = None
        self._num_steps = 0
        self._has_warned = False
        self._is_ticking = False

    @classmethod
    def get(cls) -> _Pacer:
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    @classmethod
    def forget(cls) -> None:
        """In a forked child: the saves are the parent's, and the lock may be held."""
        cls._instance = None

    def step_ended(self, seconds: float) -> None:
        self._num_steps += 1
        self._handle(StepEnded(seconds))

    def watch(self, save: Save, limit: float) -> None:
        number = next(self._numbers)
        with self._lock:
            self._saves[number] = save, time.monotonic()
        self._handle(StagingBegan(number))

        def began(staged: concurrent.futures.Future[None]) -> None:
            if staged.exception() is not None:
                return
            self._host = host = Host.get()
            self._handle(SavingBegan(number, limit))
            if not self._is_ticking:
                self._is_ticking = True
                host.serve(self._tick())

        def ended(_: object) -> None:
            self._forget(number)
            # A short save may end within a step.
            if not self._num_steps and not self._has_warned and _is_staged(save):
                self._has_warned = True
                logger.warning(
                    "%s: max_slowdown has no effect: no step was marked (actorsnap.step())",
                    save.label,
                )

        save.staged.add_done_callback(began)
        save.finished.add_done_callback(ended)

    def _forget(self, number: int) -> None:
        with self._lock:
            self._saves.pop(number, None)
        self._handle(SavingEnded(number))

    async def _tick(self) -> None:
        last_s = time.monotonic()
        try:
            while self._saves:
                await anyio.sleep(_TICK_S)
                now_s = time.monotonic()
                self._handle(TimePassed(now_s - last_s, self._schedules(now_s)))
                last_s = now_s
        finally:
            self._is_ticking = False
            # If the runtime was stopped, saves that hang may never end.
            for number in tuple(self._saves):
                self._forget(number)

    def _schedules(self, now_s: float) -> list[Schedule]:
        with self._lock:
            saves = tuple(self._saves.values())
        return [
            Schedule(
                save.board.latest.stored_bytes / max(1, save.board.latest.total_bytes),
                (now_s - begun_s) / save.options.timeout_s,
            )
            for save, begun_s in saves
        ]

    def _handle(self, event: PacingEvent) -> None:
        with self._lock:
            for command in self._machine.handle(event):
                assert self._host is not None
                logger.debug("uploaders work for %.0f %% of the time", 100 * command.duty)
                # While holding the lock, to keep the order of the commands.
                self._host.call_soon(partial(self._host.set_duty, command.duty))


os.register_at_fork(after_in_child=_Pacer.forget)
