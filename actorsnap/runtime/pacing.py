# SPDX-License-Identifier: Apache-2.0
"""Measures training steps and slows down uploaders for ``Options.max_slowdown``.

``protocol/pacing.py`` decides. Steps, reported by the trainer's thread, take microseconds: only a
changed pace wakes the runtime's loop.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import anyio

from actorsnap.actors.items import Pace
from actorsnap.log import Log
from actorsnap.options import Options
from actorsnap.protocol.pacing import PaceController, is_behind
from actorsnap.runtime.host import Host
from actorsnap.runtime.save import Save

logger = Log(__name__)

_TICK_S = 0.5


class Step:
    """See ``step``."""

    __slots__ = ("_begun_s",)

    def __enter__(self) -> None:
        self._begun_s = time.perf_counter()

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if exc_type is None:
            _Pacer.get().end_step(time.perf_counter() - self._begun_s)


def step() -> Step:
    """Marks a training step, for ``Options.max_slowdown``: ``with actorsnap.step(): ...``.

    Measures the time of the step, including any ``await``. Steps that raise do not count. Mark
    every step, even while no save is running. Always mark the same work, without evaluations. Use
    it in one training loop per process. The call takes microseconds and never blocks.
    """
    return Step()


def watch(save: Save) -> None:
    """Applies ``max_slowdown`` from staging to the save's end."""
    if save.options.max_slowdown is not None:
        _Pacer.get().watch(save, save.options.max_slowdown)


@contextmanager
def paced(options: Options, stored: Callable[[], float]) -> Iterator[Pace | None]:
    """Applies ``max_slowdown`` to other work than a save. On the runtime's loop.

    Args:
        stored: Returns the stored share of the bytes. After half of ``timeout_s``, nothing pauses.

    Yields:
        The pace for the chunks of the work; None without ``max_slowdown``.
    """
    if options.max_slowdown is None:
        yield None
        return
    pacer = _Pacer.get()
    number = pacer.begin(partial(_is_late, stored, time.monotonic(), options.timeout_s))
    try:
        yield pacer.begin_storing(number, options.max_slowdown).resources.pace
    finally:
        pacer.end(number)


def _is_late(stored: Callable[[], float], begun_s: float, timeout_s: float, now_s: float) -> bool:
    return is_behind(stored=stored(), elapsed=(now_s - begun_s) / timeout_s)


class _Pacer:
    """Paces the work of this process. Thread-safe."""

    _instance: _Pacer | None = None

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._controller = PaceController()
        self._numbers = itertools.count()
        self._works: dict[int, Callable[[float], bool]] = {}
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
        """Drops the instance in a forked child, where its lock may be held."""
        cls._instance = None

    def end_step(self, seconds: float) -> None:
        self._num_steps += 1
        with self._controlling() as controller:
            controller.end_step(seconds)

    def begin(self, is_late: Callable[[float], bool]) -> int:
        """Returns a number for the work, which is ``is_late`` by ``time.monotonic``."""
        number = next(self._numbers)
        with self._controlling():
            self._works[number] = is_late
        return number

    def begin_storing(self, number: int, limit: float) -> Host:
        self._host = host = Host.get()
        with self._controlling() as controller:
            controller.begin_storing(number, limit)
        if not self._is_ticking:
            self._is_ticking = True
            host.serve(self._tick())
        return host

    def watch(self, save: Save, limit: float) -> None:
        def stored() -> float:
            return save.board.latest.stored_bytes / max(1, save.board.latest.total_bytes)

        timeout_s = save.options.timeout_s
        number = self.begin(partial(_is_late, stored, time.monotonic(), timeout_s))
        with self._controlling() as controller:
            controller.begin_staging(number)

        def on_staged(staged: concurrent.futures.Future[None]) -> None:
            if staged.exception() is None:
                self.begin_storing(number, limit)

        def on_finished(_: object) -> None:
            self.end(number)
            is_staged = save.staged.done() and save.staged.exception() is None
            # A short save may end within a step.
            if not self._num_steps and not self._has_warned and is_staged:
                self._has_warned = True
                logger.warning(
                    "%s: max_slowdown has no effect: no step was marked (actorsnap.step())",
                    save.label,
                )

        save.staged.add_done_callback(on_staged)
        save.finished.add_done_callback(on_finished)

    def end(self, number: int) -> None:
        with self._controlling() as controller:
            self._works.pop(number, None)
            controller.end(number)

    async def _tick(self) -> None:
        last_s = time.monotonic()
        try:
            while self._works:
                await anyio.sleep(_TICK_S)
                now_s = time.monotonic()
                with self._controlling() as controller:
                    controller.pass_time(now_s - last_s, is_behind=self._is_any_behind(now_s))
                last_s = now_s
        finally:
            self._is_ticking = False
            # After a stop of the runtime, hanging saves may never end.
            for number in tuple(self._works):
                self.end(number)

    def _is_any_behind(self, now_s: float) -> bool:
        return any(is_late(now_s) for is_late in tuple(self._works.values()))

    @contextmanager
    def _controlling(self) -> Iterator[PaceController]:
        """Locks the controller; applies a changed duty before the lock is released, in order."""
        with self._lock:
            before = self._controller.duty
            yield self._controller
            duty = self._controller.duty
            if duty != before:
                assert self._host is not None
                logger.debug("uploaders work for %.0f %% of the time", 100 * duty)
                self._host.call_soon(partial(self._host.resources.set_duty, duty))


os.register_at_fork(after_in_child=_Pacer.forget)
