# SPDX-License-Identifier: Apache-2.0
"""Makes tracebacks of public calls short: they end where the user's code called actorsnap.

An error of actorsnap is complete in its message, fields, notes and causes, and so is a group of
them; a user who reads 25 frames of a runtime before it learns nothing more. Errors of user code
that actorsnap called (``load_state_dict``) keep the frames of that code, and so does Ctrl-C. Other
errors are bugs, and keep all frames.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import ParamSpec, TypeVar

from actorsnap.errors import ActorSnapError
from actorsnap.log import Log

logger = Log(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_OURS = "actorsnap"
_PLUMBING = ("anyio", "asyncio", "concurrent", "contextlib", "threading")
"""Top-level modules whose frames are dropped between frames of ours."""


def short_traceback(function: Callable[P, T], doc: str | None = None) -> Callable[P, T]:
    """Returns the function with short tracebacks and, if given, another docstring."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (Exception, KeyboardInterrupt) as error:
            shorten(error)
            raise  # without this frame

    call.__doc__ = doc or function.__doc__
    return call


def shorten(error: BaseException) -> None:
    """Drops frames of actorsnap from the tracebacks of an error and of its causes.

    The whole traceback is logged at DEBUG. Nothing else of the errors is changed.
    """
    frames = list(_frames(error.__traceback__))
    is_no_bug = isinstance(error, ActorSnapError | KeyboardInterrupt)
    if not is_no_bug and (not frames or _is_ours(frames[-1])):
        return
    logger.debug("the whole traceback of the next error", exc_info=error)
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        if each is error or isinstance(each, ActorSnapError | BaseExceptionGroup):
            each.__traceback__ = _without_ours(each.__traceback__)
        left.append(each.__cause__)
        if isinstance(each, BaseExceptionGroup):
            left += each.exceptions


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _without_ours(traceback: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    is_inside = True
    for each in _frames(traceback):
        is_inside = _is_ours(each) or (is_inside and _top_module(each) in _PLUMBING)
        if not is_inside:
            kept.append(each)
    found: TracebackType | None = None
    for each in reversed(kept):
        found = TracebackType(found, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return found


def _is_ours(traceback: TracebackType) -> bool:
    return _top_module(traceback) == _OURS


def _top_module(traceback: TracebackType) -> str:
    return str(traceback.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
