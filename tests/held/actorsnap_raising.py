# SPDX-License-Identifier: Apache-2.0
"""A storage of another package that raises anything but a ``StorageError``.

``raising://<verb>.<kind>/folder/snapshot`` is on the local file system. Each call of the verb
raises the exception of that kind (``of-<class>``: of that class of ``errors``); where there is a
``RAISING_RANK``, on that rank only.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any, ParamSpec, TypeVar, get_type_hints

from actorsnap import errors
from actorsnap.errors import ActorSnapError, SnapshotAborted, StorageError
from actorsnap.storage.base import Storage, StorageContext
from actorsnap.storage.fs import open_fs
from actorsnap.storage.wrapper import Wrapper, without_blocking_io

T = TypeVar("T")
P = ParamSpec("P")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Unshowable(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no words")


class Bare(BaseException):
    """Of no known class."""


class Speechless(BaseException):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class Unreadable(OSError):
    @property
    def errno(self) -> int:  # type: ignore[override]
        raise KeyError("errno")


class Unnoted(Exception):
    __notes__: Any

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class Derived(StorageError):
    """Made in another way than the errors of actorsnap."""

    def __init__(self, code: int) -> None:
        super().__init__(op="?", key="?", backend="?", detail=f"code {code}")


class Fieldless(StorageError):
    def __init__(self) -> None:
        Exception.__init__(self, "no fields")


def _mistyped() -> StorageError:
    fields: dict[str, Any] = {"key": PurePath("k"), "detail": ValueError("no text")}
    return StorageError(op="?", backend="?", **fields)


def _emptied() -> StorageError:
    """Of a class of ours, without what its constructor sets."""
    error = StorageError(op="?", key="?", backend="?")
    vars(error).clear()
    return error


KINDS: Mapping[str, Callable[[], BaseException]] = {
    "CancelledError": asyncio.CancelledError,
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": lambda: SystemExit(3),
    "GeneratorExit": GeneratorExit,
    "StopIteration": lambda: StopIteration("done"),
    "StopAsyncIteration": lambda: StopAsyncIteration("done"),
    "OSError": lambda: OSError(errno.EIO, "broken"),
    "StorageFull": lambda: OSError(errno.ENOSPC, "no room"),
    "FileNotFoundError": lambda: FileNotFoundError(errno.ENOENT, "no credentials file"),
    "FileExistsError": lambda: FileExistsError(errno.EEXIST, "a lock file"),
    "TimeoutError": TimeoutError,
    "ConnectionResetError": lambda: ConnectionResetError(errno.ECONNRESET, "reset"),
    "MemoryError": MemoryError,
    "RuntimeError": lambda: RuntimeError("raw"),
    "ValueError": lambda: ValueError("raw"),
    "AssertionError": AssertionError,
    "NotImplementedError": NotImplementedError,
    "Unspeakable": Unspeakable,
    "Unshowable": lambda: Unshowable("but it has words"),
    "Bare": lambda: Bare("bare"),
    "Speechless": Speechless,
    "Unreadable": lambda: Unreadable(errno.EIO, "broken"),
    "Unnoted": Unnoted,
    "Derived": lambda: Derived(3),
    "Fieldless": Fieldless,
    "Mistyped": _mistyped,
    "Emptied": _emptied,
    "SnapshotAborted": lambda: SnapshotAborted(reason="raw", rank=7, stage="store"),
    "ExceptionGroup": lambda: ExceptionGroup("several", [ValueError("first"), OSError("second")]),
    "BaseExceptionGroup": lambda: BaseExceptionGroup(
        "several", [asyncio.CancelledError(), KeyboardInterrupt()]
    ),
}


_VALUES: Mapping[Any, Any] = {
    str: "model/layer \N{SNOWMAN}",
    bool: True,
    bool | None: True,
    int: 3,
    int | None: 3,
    float | None: 1.5,
    str | None: "k",
    Sequence[str]: ("a", "b: c"),
    Sequence[tuple[str, str]]: (("url", "why"),),
}


def error_of_class(name: str) -> ActorSnapError:
    """An error of a public class, with a cause and a note, and a value in each field."""
    kind = getattr(errors, name)
    hints = get_type_hints(kind.__init__)
    error: ActorSnapError = kind(
        **{field: _VALUES[hints[field]] for field in inspect.signature(kind).parameters}
    )
    error.__cause__ = OSError(errno.EIO, "broken", "/x")
    error.add_note("look there")
    return error


class Raising(Wrapper):
    """Raises in each call of one verb.

    Attributes:
        was_hit: It has raised.
    """

    def __init__(
        self,
        inner: Storage,
        verb: str,
        make: Callable[[], BaseException],
        *,
        has_blocking_io: bool = True,
    ) -> None:
        super().__init__(inner)
        if not has_blocking_io:
            self.capabilities = without_blocking_io(inner.capabilities)
        self._verb = verb
        self._make = make
        self.was_hit = False

    async def around(
        self, op: str, key: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        self._strike(op)
        return await call(*args, **kwargs)

    def around_blocking(
        self, op: str, key: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        self._strike(op)
        return call(*args, **kwargs)

    def _strike(self, op: str) -> None:
        if op == self._verb:
            self.was_hit = True
            raise self._make()


def open_raising(url: str, context: StorageContext) -> Storage:
    what, _, path = url.removeprefix("raising://").partition("/")
    verb, _, kind = what.partition(".")
    inner = open_fs(f"/{path}", context)
    if os.environ.get("RAISING_RANK", "") not in ("", os.environ.get("RANK")):
        return inner
    of_class = partial(error_of_class, kind.removeprefix("of-"))
    return Raising(inner, verb, of_class if kind.startswith("of-") else KINDS[kind])
