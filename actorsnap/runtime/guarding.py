"""``PendingSnapshot.guard``: steps of optimizers wait for what is still to be copied."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

from actorsnap.actors.fence import Fence, Watch
from actorsnap.runtime.host import Host
from actorsnap.state.step_hooks import StepHook, check_optimizer

__all__ = ["Guard", "was_guarded"]

_guarded: weakref.WeakSet[Any] = weakref.WeakSet()


def was_guarded(optimizer: Any) -> bool:
    """Whether the trainer has guarded the optimizer in this process, in any save.

    Of an optimizer whose steps move no version counter a lazy save copies the tensors late only
    then, and guards it itself.
    """
    return optimizer in _guarded


class Guard:
    """The hooks that ``PendingSnapshot.guard`` has put into optimizers.

    Each takes itself out behind the first step that finds everything copied, or the save ended.
    As a context manager it takes out at the end what is still there.
    """

    def __init__(self, host: Host, fence: Fence | None, optimizers: Sequence[Any]) -> None:
        self._hooks: list[StepHook] = []
        # Also where there is nothing to wait for: the next save may be a lazy one.
        for optimizer in optimizers:
            check_optimizer(optimizer)
            with suppress(TypeError):  # one without weak references is not torch's
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
        """Takes the hooks out: from now on steps do not wait, and what they change before it is
        copied aborts the save. Not while one of the optimizers steps in another thread."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class _Gate:
    """What one optimizer waits for."""

    def __init__(self, host: Host, fence: Fence, optimizer: Any) -> None:
        self._host = host
        self._fence = fence
        self._optimizer = optimizer
        self._shape: tuple[int, ...] = ()
        self._watch = Watch(())

    def begin(self) -> None:
        """Watches what the optimizer will change."""
        fence, optimizer = self._fence, self._optimizer
        if not fence.is_open:
            self._shape = _shape_of(optimizer)
            watch = self._watch = Watch(fence.lazy.touched_by(optimizer))
            self._host.call_soon(lambda: fence.watch(watch))

    def wait(self) -> bool:
        """Blocks the thread of a step until what it will change is copied; then True."""
        if (
            not self._fence.is_open and self._host.pid == os.getpid()
        ):  # a forked child saves nothing
            if _shape_of(self._optimizer) != self._shape:
                self.begin()  # it has got parameters or state meanwhile
            self._await(self._watch)
        return True

    def _await(self, watch: Watch) -> None:
        if not watch.passed.is_set():
            fence = self._fence
            self._host.call_soon(lambda: fence.hurry(watch))
            # The runtime's loop sets it, whatever becomes of the save; a Ctrl-C ends it.
            watch.passed.wait()


def _shape_of(optimizer: Any) -> tuple[int, ...]:
    """Changes where an optimizer gets parameters or state."""
    counts = [len(group["params"]) for group in optimizer.param_groups]
    return (*counts, len(getattr(optimizer, "state", ())))
