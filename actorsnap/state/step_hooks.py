"""Hooks before an optimizer's step that remove themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from actorsnap.errors import UsageError

__all__ = ["StepHook", "check_optimizer"]


def check_optimizer(optimizer: Any) -> None:
    """Raises ``UsageError`` if it takes no step hooks."""
    is_bare = isinstance(optimizer, torch.optim.Optimizer) and not hasattr(
        optimizer, "_optimizer_step_pre_hooks"
    )  # a wrapper that has not initialised its base class
    if (
        is_bare
        or not callable(getattr(optimizer, "register_step_pre_hook", None))
        or not hasattr(optimizer, "param_groups")
    ):
        raise UsageError(
            f"guard takes torch.optim.Optimizers, not {type(optimizer).__qualname__}; guard "
            "the optimizer inside of it, or wait for staged() before its step"
        )


class StepHook:
    """Calls ``before`` before each step of an optimizer, until it returns True.

    Hooks must not be removed while torch iterates over them. So a post-step hook removes the
    pre-step hook, and the last one removes all post-step hooks.

    Args:
        optimizer: Passes ``check_optimizer``.
        before: Runs in the thread of the step. If it raises, so does the step, before any change.
    """

    def __init__(self, optimizer: Any, before: Callable[[], bool]) -> None:
        self._before: Callable[[], bool] | None = before
        self._post_handle: Any = None
        # Compiled steps call the hook uncompiled.
        hook = torch.compiler.disable(self._before_step)
        self._handle = optimizer.register_step_pre_hook(hook)

    def remove(self) -> None:
        """The optimizer must not step meanwhile."""
        self._before = None
        self._handle.remove()
        if self._post_handle is not None:
            self._post_handle.remove()

    def _before_step(self, optimizer: Any, args: object, kwargs: object) -> None:
        before = self._before
        if before is not None and before():
            self._before = before = None
        if before is None and self._post_handle is None:
            after = torch.compiler.disable(self._after_step)
            after.actorsnap_hook = self
            self._post_handle = optimizer.register_step_post_hook(after)

    def _after_step(self, optimizer: Any, args: object, kwargs: object) -> None:
        self._handle.remove()
        hooks = optimizer._optimizer_step_post_hooks
        if next(reversed(hooks), None) == self._post_handle.id:
            # The iteration ends here, so all can be removed.
            for after in list(hooks.values()):
                if (hook := getattr(after, "actorsnap_hook", None)) is not None:
                    hook._post_handle.remove()
