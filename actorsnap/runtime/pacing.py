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
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import anyio

from actorsnap.log import Log
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

    Measures its time, also across an ``await``; steps that raise do not count. Mark all steps, with
    and without a running save, and always the same work, without evaluations. One training loop per
    process. Takes microseconds; never blocks.
    """
    return Step()


def watch(save: Save) -> None:
    """Applies ``max_slowdown`` from staging to the save's end."""
    if save.options.max_slowdown is not None:
        _Pacer.get().watch(save, save.options.max_slowdown)


class _Pacer:
    """Of this process. Thread-safe."""

    _instance: _Pacer | None = None

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._controller = PaceController()
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
        """In a forked child, where the lock may be held."""
        cls._instance = None

    def end_step(self, seconds: float) -> None:
        self._num_steps += 1
        with self._controlling() as controller:
            controller.end_step(seconds)

    def watch(self, save: Save, limit: float) -> None:
        number = next(self._numbers)
        with self._controlling() as controller:
            self._saves[number] = save, time.monotonic()
            controller.begin_staging(number)

        def on_staged(staged: concurrent.futures.Future[None]) -> None:
            if staged.exception() is not None:
                return
            self._host = host = Host.get()
            with self._controlling() as controller:
                controller.begin_storing(number, limit)
            if not self._is_ticking:
                self._is_ticking = True
                host.serve(self._tick())

        def on_finished(_: object) -> None:
            self._end(number)
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

    def _end(self, number: int) -> None:
        with self._controlling() as controller:
            self._saves.pop(number, None)
            controller.end(number)

    async def _tick(self) -> None:
        last_s = time.monotonic()
        try:
            while self._saves:
                await anyio.sleep(_TICK_S)
                now_s = time.monotonic()
                with self._controlling() as controller:
                    controller.pass_time(now_s - last_s, is_behind=self._is_any_behind(now_s))
                last_s = now_s
        finally:
            self._is_ticking = False
            # After a stop of the runtime, hanging saves may never end.
            for number in tuple(self._saves):
                self._end(number)

    def _is_any_behind(self, now_s: float) -> bool:
        return any(
            is_behind(
                stored=save.board.latest.stored_bytes / max(1, save.board.latest.total_bytes),
                elapsed=(now_s - begun_s) / save.options.timeout_s,
            )
            for save, begun_s in self._saves.values()
        )

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
