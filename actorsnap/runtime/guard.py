"""``PendingSnapshot.guard``: steps wait until their tensors are copied."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

from actorsnap.actors.fence import Fence, Watch
from actorsnap.runtime.host import Host
from actorsnap.state.lazy import StepHook, check_optimizer

__all__ = ["Guard", "was_guarded"]

_guarded: weakref.WeakSet[Any] = weakref.WeakSet()


def was_guarded(optimizer: Any) -> bool:
    """Returns whether any save guarded the optimizer in this process.

    If its steps do not change version counters, a lazy save copies its tensors late only then, and
    guards it.
    """
    return optimizer in _guarded


class Guard:
    """The hooks of ``PendingSnapshot.guard`` in optimizers.

    A hook removes itself after the first step that finds everything copied or the save ended; the
    context manager removes the others on exit.
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
        """Removes the hooks. A later step that changes uncopied tensors aborts the save. Not while
        an optimizer steps in another thread.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class _Gate:
    def __init__(self, host: Host, fence: Fence, optimizer: Any) -> None:
        self._host = host
        self._fence = fence
        self._optimizer = optimizer
        self._shape: tuple[int, ...] = ()
        self._watch = Watch(())

    def begin(self) -> None:
        """Watches the tensors that the next step changes."""
        fence, optimizer = self._fence, self._optimizer
        if not fence.is_open:
            self._shape = _shape_of(optimizer)
            watch = self._watch = Watch(fence.lazy.touched_by(optimizer))
            self._host.call_soon(lambda: fence.watch(watch))

    def wait(self) -> bool:
        """Blocks until the step's tensors are copied; returns True."""
        if (
            not self._fence.is_open and self._host.pid == os.getpid()
        ):  # a forked child does not wait
            if _shape_of(self._optimizer) != self._shape:
                self.begin()  # new parameters or state
            fence, watch = self._fence, self._watch
            if not watch.passed.is_set():
                self._host.call_soon(lambda: fence.hurry(watch))
                # Set for every outcome of the save. Ctrl-C interrupts.
                watch.passed.wait()
        return True


def _shape_of(optimizer: Any) -> tuple[int, ...]:
    """Changes when an optimizer gets parameters or state."""
    counts = [len(group["params"]) for group in optimizer.param_groups]
    return (*counts, len(getattr(optimizer, "state", ())))
