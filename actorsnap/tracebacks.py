# SPDX-License-Identifier: Apache-2.0
"""Makes tracebacks of public calls short: they end where the user's code called actorsnap.

An error of actorsnap is complete in its message, fields, notes and causes: 25 frames of a runtime
add nothing to it. Nor do they to:

- a ``TypeError`` about arguments that a public call does not take
- an ``OSError`` that is the cause of another error, and groups of errors
- an error of another class that is raised ``from`` its cause, and so translates it. ``from None``
  marks other errors that are raised on purpose.

A cause of an error of actorsnap is not shown either if no frame of it is left: it was raised in
actorsnap, and the error translates it. Programs find it in ``__context__``. ``SnapshotAborted`` and
``RestoreAborted`` keep their cause, whose class is the reason.

Errors of user code that actorsnap called (``load_state_dict``) keep the frames of that code, and so
does Ctrl-C. All other errors and causes are bugs, and keep all frames.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType, TracebackType
from typing import Any, ParamSpec, TypeVar

from actorsnap.errors import ActorSnapError, RestoreAborted, SnapshotAborted
from actorsnap.log import Log
from actorsnap.wording import did_you_mean

logger = Log(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_OURS = "actorsnap"
_OTHER_NAMES = {"dtype": "cast", "every": "save", "save_every": "save"}
"""Parameters by names that users expect and that are spelled unlike them."""

_ABORTED = (SnapshotAborted, RestoreAborted)
_TRANSLATED = (ActorSnapError, BaseExceptionGroup, OSError)

_PLUMBING = ("anyio", "asyncio", "concurrent", "contextlib", "logging", "threading")
"""Top-level modules whose frames are dropped between frames of ours."""


def short_traceback(function: Callable[P, T], doc: str | None = None) -> Callable[P, T]:
    """Returns the function with short tracebacks and, if given, another docstring."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except BaseException as error:  # of torch's CheckpointException, Exception is no base
            is_misuse = isinstance(error, TypeError) and not _fit(function, args, kwargs)
            if is_misuse and (hint := _hint(function, args, kwargs)):
                error.args = (f"{error}; {hint}",)
            shorten(error, is_misuse=is_misuse)
            raise  # without this frame

    call.__doc__ = doc or function.__doc__
    return call


def _fit(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the function has such parameters."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _hint(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Returns advice about the first name that is no parameter, or about a metric; or nothing."""
    names = [*inspect.signature(function).parameters]
    near = {name: other for name, other in _OTHER_NAMES.items() if other in names}
    unknown = [name for name in kwargs if name not in names]
    if hint := next((did_you_mean(near.get(name, name), names) for name in unknown), ""):
        return hint
    if "metrics" in names and (unknown or (args and isinstance(args[-1], dict))):
        example = f"{{{unknown[0]!r}: ...}}" if unknown else "{...}"
        return f"did you mean metrics={example}?"
    return ""


def short_namespace(kind: type[T]) -> type[T]:
    """Shortens the tracebacks of the classes and static methods in a class that only holds them.

    Python's TypeErrors name them as the user calls them: ``every.steps``.
    """
    for key, value in [*vars(kind).items()]:
        name = f"{kind.__name__}.{key}"
        if isinstance(value, type):
            value.__init__ = short_traceback(value.__init__)  # type: ignore[misc]
            name_methods(value, name)
        elif isinstance(value, staticmethod):
            value.__func__.__qualname__ = name
            setattr(kind, key, staticmethod(short_traceback(value.__func__)))
    return kind


def name_methods(kind: type, name: str) -> None:
    """Makes Python's TypeErrors name the methods of a base class as the user calls them.

    Otherwise they would name ``kind``, which the user has never seen.
    """
    for key, method in vars(kind).items():
        if isinstance(method, FunctionType):
            for each in (method, getattr(method, "__wrapped__", method)):
                each.__qualname__ = f"{name}.{key}"


def shorten(error: BaseException, *, is_misuse: bool = False) -> None:
    """Drops frames of actorsnap from the tracebacks of an error and of its causes.

    The whole traceback is logged at DEBUG. A cause that the error translates moves to
    ``__context__``, suppressed. Nothing else of the errors is changed.

    Args:
        is_misuse: The error is no bug, whatever its class.
    """
    if not is_misuse and not _is_no_bug(error, (ActorSnapError, KeyboardInterrupt)):
        return
    logger.debug("the whole traceback of the next error", exc_info=error)
    seen: set[int] = set()
    found: list[BaseException] = []
    left = [error]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if each is error or _is_no_bug(each, _TRANSLATED):
            each.__traceback__ = _without_ours(each.__traceback__)
        left += _shown_with(each)
        found.append(each)
    for each in found:
        if isinstance(each, ActorSnapError) and not isinstance(each, _ABORTED):
            _hide_cause(each)


def _shown_with(error: BaseException) -> list[BaseException]:
    """Returns the cause or context that a traceback shows, and the members of a group."""
    shown = error.__cause__ if error.__suppress_context__ else error.__context__
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return [*members] if shown is None else [shown, *members]


def _hide_cause(error: ActorSnapError) -> None:
    below = _shown_with(error)
    left = [*below]
    seen = {id(error)}
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if each.__traceback__ is not None or not isinstance(each, _TRANSLATED):
            return
        left += _shown_with(each)
    if below:
        error.__cause__, error.__context__ = None, below[0]


def _is_no_bug(error: BaseException, kinds: tuple[type[BaseException], ...]) -> bool:
    """Whether an error is one of ``kinds``, or raised ``from``, or raised by other code."""
    frames = [*_frames(error.__traceback__)]
    if isinstance(error, kinds) or (frames and not _is_ours(frames[-1])):
        return True
    # ``runtime.script`` takes one error out of a group, which becomes its cause.
    return error.__suppress_context__ and not isinstance(error.__cause__, BaseExceptionGroup)


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
