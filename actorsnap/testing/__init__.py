# SPDX-License-Identifier: Apache-2.0
"""Tools for tests of actorsnap, of its plugins and of training jobs. Public and stable.

Only ``StorageConformance``, imported on first use, needs pytest and hypothesis.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import anyio
import anyio.to_thread

from actorsnap.testing.faults import FaultyStorage, ThrottledStorage
from actorsnap.testing.resume import Resumable, check_resume

if TYPE_CHECKING:
    from actorsnap.testing.conformance import StorageConformance

__all__ = [
    "FaultyStorage",
    "Resumable",
    "StorageConformance",
    "ThrottledStorage",
    "bounded",
    "check_resume",
    "run_blocking_in_thread",
]

P = ParamSpec("P")
T = TypeVar("T")


async def run_blocking_in_thread(fn: Callable[..., T], /, *args: Any) -> T:
    """Runs ``fn`` on anyio's worker threads; a ``RunBlocking``.

    Cancellation: only before ``fn`` has begun.
    """
    return await anyio.to_thread.run_sync(functools.partial(fn, *args))


def bounded(
    limit_s: float,
) -> Callable[[Callable[P, Awaitable[None]]], Callable[P, Awaitable[None]]]:
    """Fails an async test with ``TimeoutError`` after ``limit_s``."""

    def decorate(test: Callable[P, Awaitable[None]]) -> Callable[P, Awaitable[None]]:
        @functools.wraps(test)
        async def run(*args: P.args, **kwargs: P.kwargs) -> None:
            with anyio.fail_after(limit_s):
                await test(*args, **kwargs)

        return run

    return decorate


def __getattr__(name: str) -> Any:
    if name != "StorageConformance":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if "actorsnap.testing.conformance" not in sys.modules:
        try:
            import hypothesis  # noqa: F401
            import pytest
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"StorageConformance needs {error.name}: pip install pytest hypothesis",
                name=error.name,
            ) from None

        # Before the import, so that failures show the compared values.
        pytest.register_assert_rewrite("actorsnap.testing.conformance")
    from actorsnap.testing.conformance import StorageConformance

    return StorageConformance
