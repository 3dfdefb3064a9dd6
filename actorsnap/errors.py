# SPDX-License-Identifier: Apache-2.0
"""Every error that actorsnap raises, in one tree.

Programs read an error's fields; its message is for people, and adds advice. Errors can be pickled.
"""

# Must import nothing from the package but texts: every layer raises these errors.
#
#     ActorSnapError
#     ├── UsageError (ValueError)            bad input, raised before any I/O
#     │   └── MissingPackage
#     ├── StorageError(op, key, backend)
#     │   ├── ObjectNotFound (FileNotFoundError)
#     │   ├── ObjectExists (FileExistsError)
#     │   ├── AccessDenied (PermissionError)
#     │   ├── StorageFull
#     │   └── Throttled
#     ├── FormatError(key, url)
#     │   ├── UnsupportedFormat
#     │   ├── ChecksumMismatch
#     │   └── NotASnapshot(found)
#     ├── IncompatibleState(missing, unexpected, mismatched, hints)
#     ├── SnapshotReplaced(url, is_deleted)
#     ├── SnapshotAborted(reason, rank, stage, key, may_be_committed)
#     │   └── StateChanged(path)
#     ├── RestoreAborted(reason, rank, stage, key)
#     ├── NoValidSnapshot(url, skipped)
#     └── RootTaken(url, generation)

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Any, TypeVar

from actorsnap.wording import format_list, is_initial_lr

T = TypeVar("T")

_COMMIT_KEYS = ("actorsnap.json", ".actorsnap")
"""``format.manifest.COMMIT_KEYS``, which imports this module."""

__all__ = [
    "AccessDenied",
    "ActorSnapError",
    "ChecksumMismatch",
    "FormatError",
    "IncompatibleState",
    "MissingPackage",
    "NoValidSnapshot",
    "NotASnapshot",
    "ObjectExists",
    "ObjectNotFound",
    "RestoreAborted",
    "RootTaken",
    "SnapshotAborted",
    "SnapshotReplaced",
    "StateChanged",
    "StorageError",
    "StorageFull",
    "Throttled",
    "UnsupportedFormat",
    "UsageError",
]


def text_of(error: BaseException) -> str:
    """Returns ``str(error)``, or a substitute if the error's ``__str__`` raises."""
    try:
        return str(error)
    except BaseException as failure:  # an unreportable error would hang its waiters
        return f"<its __str__ raises {type(failure).__name__}>"


def attribute_of(error: BaseException, name: str) -> Any:
    """Returns an attribute of an exception, or None if it is missing or reading it raises."""
    try:
        return getattr(error, name, None)
    except BaseException:  # see ``text_of``
        return None


def notes_of(error: BaseException) -> list[str]:
    """Returns the notes of an exception. Never raises."""
    notes = attribute_of(error, "__notes__")
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []


def describe(error: BaseException) -> str:
    """Returns the class, message and notes of an exception, joined by ``"; "``. Never raises."""
    name, text = type(error).__name__, text_of(error)
    return "; ".join([f"{name}: {text}" if text else name, *notes_of(error)])


def call_user_code(fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Calls the application's code in the application's own thread.

    Raises:
        RuntimeError: The code raised an exception that the caller would mistake for a cancellation
            or the end of a generator. ``KeyboardInterrupt`` and ``SystemExit`` are passed on.
    """
    try:
        return fn(*args, **kwargs)
    except BaseException as error:
        is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
        if is_plain or isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise RuntimeError(describe(error)) from error


class ActorSnapError(Exception):
    """Base class of all errors. ``fields`` holds the constructor's keyword arguments."""

    def __init__(self, message: str, /, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __post_init__(self) -> None:
        """Initializes the base class of a subclass that is a dataclass."""
        ActorSnapError.__init__(self, self._text(), **vars(self))

    def _text(self) -> str:
        raise NotImplementedError

    def __copy__(self) -> ActorSnapError:
        attributes = {**vars(self), "fields": {**self.fields}}
        if notes := notes_of(self):
            attributes["__notes__"] = notes
        fresh = _rebuild((type(self), self.args, attributes), [])
        fresh.__cause__ = self.__cause__
        return fresh

    def __reduce__(self) -> tuple[Any, ...]:
        """Keeps the causes, which Python's exceptions lose when they are pickled."""
        return _rebuild, ((type(self), self.args, vars(self)), _portable_causes(self))


def _rebuild(
    own: tuple[type[ActorSnapError], tuple[Any, ...], dict[str, Any]], causes: list[Any]
) -> ActorSnapError:
    """Reverses ``__reduce__`` without calling the constructor, which a subclass may change."""
    kind, args, attributes = own
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(attributes)
    cause: BaseException | None = None
    for each in reversed(causes):
        link = each if isinstance(each, BaseException) else _rebuild(each, [])
        link.__cause__ = cause
        cause = link
    error.__cause__ = cause
    return error


def _portable_causes(error: BaseException) -> list[Any]:
    """Returns the chain of causes, unlinked; one that cannot be pickled becomes a description."""
    found: list[Any] = []
    seen = [error]
    while (cause := seen[-1].__cause__) is not None and not any(cause is each for each in seen):
        seen.append(cause)
        if isinstance(cause, ActorSnapError):
            found.append((type(cause), cause.args, vars(cause)))
            continue
        try:
            found.append(_copied(cause))
        except Exception:  # a foreign class may do anything
            found.append(RuntimeError(describe(cause)))
    return found


class _Pickler(pickle.Pickler):
    """Drops the causes of our errors inside a foreign error: a group may contain its own effect."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ActorSnapError):
            return _rebuild, ((type(obj), obj.args, vars(obj)), [])
        return NotImplemented


def _copied(error: BaseException) -> Any:
    pickled = io.BytesIO()
    _Pickler(pickled).dump(error)
    return pickle.loads(pickled.getvalue())


def is_same(error: BaseException | None, other: BaseException | None) -> bool:
    """Returns whether both are the same error of this package, or copies of it."""
    return (
        isinstance(error, ActorSnapError)
        and isinstance(other, ActorSnapError)
        and type(error) is type(other)
        and error.fields == other.fields
    )


def set_cause(error: BaseException, cause: BaseException) -> None:
    """Sets the cause of an error that arrived as a copy.

    If the error is a copy of ``cause`` itself, it gets the cause and traceback of ``cause``.
    """
    if is_same(error, cause):
        error.__traceback__ = cause.__traceback__
        error.__cause__ = cause.__cause__
    else:
        error.__cause__ = cause


@dataclass(eq=False, repr=False)
class UsageError(ActorSnapError, ValueError):
    """The call cannot work as written. Nothing is saved or restored."""

    message: str

    def _text(self) -> str:
        return self.message


class MissingPackage(UsageError):
    """The call needs a package that is not installed. The message has the ``pip`` command."""


@dataclass(kw_only=True, eq=False, repr=False)
class StorageError(ActorSnapError):
    """A storage operation failed.

    Attributes:
        op: The storage operation (``put``, ``write_at``, ``read_into``, ...).
        key: The object's key, relative to the snapshot; empty for the storage as a whole.
        backend: URL of the storage, without credentials.
        detail: The backend's message, and advice.
        retryable: Whether the same call may succeed later.
        retry_after_s: Wait that the storage requested, in seconds, or None.
    """

    op: str
    key: str
    backend: str
    detail: str = ""
    retryable: bool = False
    retry_after_s: float | None = None

    def _text(self) -> str:
        where = f"{self.key!r} in {self.backend}" if self.key else self.backend
        if not self.key and self.detail.startswith(f"{where} "):
            return self.detail
        return f"{self.detail or type(self).__name__} ({self.op} of {where})"


class ObjectNotFound(StorageError, FileNotFoundError):
    """No object has that key."""

    __str__ = Exception.__str__


class ObjectExists(StorageError, FileExistsError):
    """An object with this key exists, and the call must not replace it."""

    __str__ = Exception.__str__


class AccessDenied(StorageError, PermissionError):
    """The storage refused the operation for lack of permission."""

    __str__ = Exception.__str__


class StorageFull(StorageError):
    """The storage has no space or quota left."""


@dataclass(kw_only=True, eq=False, repr=False)
class Throttled(StorageError):
    """The storage asked to slow down."""

    retryable: bool = True


@dataclass(kw_only=True, eq=False, repr=False)
class FormatError(ActorSnapError):
    """Stored data violates the format specification.

    Attributes:
        key: Key of the invalid object, or path of the leaf.
        detail: Description of the violation.
        url: URL of the snapshot, without secrets; empty if unknown.
    """

    key: str
    detail: str
    url: str = ""

    def name_snapshot(self, url: str) -> None:
        """Adds the snapshot's URL to the fields and the message, unless they already have one."""
        if not self.url:
            self.url = self.fields["url"] = url
            self.message = self._text()
            self.args = (self.message,)

    def _text(self) -> str:
        return f"{self.key}: {self.detail}" + (f" (snapshot {self.url})" if self.url else "")


class UnsupportedFormat(FormatError):
    """The object has a newer format, or needs a feature that this release lacks."""


class ChecksumMismatch(FormatError):
    """Bytes are missing, or differ from the bytes that were written."""

    def _text(self) -> str:
        text = f"{self.key}: {self.detail}"
        if not self.url:
            return text
        url = quote(self.url)
        older = (
            "restore an older one. If it is a copy, verify its source (`actorsnap verify --full`), "
            f"delete the copy (`actorsnap rm {url}`) and copy again"
        )
        if self.key in _COMMIT_KEYS:
            return (
                f"{text}. The snapshot {self.url} is damaged: `actorsnap recover {url} "
                f"--replace-damaged` writes it again, if the rest is intact. Otherwise {older}"
            )
        return (
            f"{text}. The snapshot {self.url} is damaged: {older}. `actorsnap verify {url} --full` "
            "shows all damage"
        )


@dataclass(kw_only=True, eq=False, repr=False)
class NotASnapshot(FormatError):
    """There is no committed snapshot at the URL.

    Attributes:
        key: The URL.
        found: What is there instead: ``"absent"`` (nothing), ``"unfinished"`` (only attempts that
            never committed), ``"foreign"`` (a checkpoint or file of another library), ``"part"`` (a
            folder or file inside a snapshot) or ``"unknown"``.
    """

    found: str

    def _text(self) -> str:
        return f"{self.key}: {self.detail}"


@dataclass(kw_only=True, eq=False, repr=False)
class IncompatibleState(ActorSnapError):
    """The app state and the snapshot do not match.

    Attributes:
        missing: Paths that the snapshot lacks.
        unexpected: Paths of the snapshot that have no place in the app state.
        mismatched: One line for each leaf whose kind, dtype or shape differs, or the message that a
            module's own loading code raised.
        is_untouched: Whether nothing was changed. False if only the ``load_state_dict`` of a module
            that adapts its input could detect the mismatch.
        misfit: What does not fit: ``"app_state"``, ``"out"`` of ``read_object``, or ``"ranks"``,
            if they stored different values of one leaf.
        hints: Lines that compare names of the snapshot with missing ones, and suggest arguments.
    """

    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    mismatched: Sequence[str] = ()
    is_untouched: bool = True
    misfit: str = "app_state"
    hints: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.missing = tuple(self.missing)
        self.unexpected = tuple(self.unexpected)
        self.mismatched = tuple(self.mismatched)
        self.hints = tuple(self.hints)
        super().__post_init__()

    def _text(self) -> str:
        lines = [
            f"{_MISFITS.get(self.misfit, self.misfit)}; "
            f"{'nothing was changed' if self.is_untouched else 'parts of it were overwritten'}. "
            f"{self._advice()}".rstrip(),
            *format_list("missing in the snapshot", self.missing),
            *format_list("unexpected in the snapshot", self.unexpected),
            *format_list("mismatched", self.mismatched),
            *format_list("hints", self.hints),
        ]
        return "\n".join(lines)

    def _advice(self) -> str:
        if self.misfit == "ranks":
            return ""  # each line has its own
        if self.misfit == "out":
            return "Pass an out of the saved dtype and shape, or none."
        advice = ["strict=False restores what matches and reports the rest."]
        if not all(map(is_initial_lr, self.missing)):
            advice.append("If leaves have other names, rename= of Snapshot.restore maps them.")
        if any(_DTYPES.search(line) for line in self.mismatched):
            advice.append("cast=True of Snapshot.restore converts floating-point dtypes.")
        return " ".join(advice)


_DTYPES = re.compile("dtype b?float[0-9a-z_]+ in the snapshot, b?float[0-9a-z_]+ in the app state$")

_MISFITS = {
    "app_state": "the app state does not fit the snapshot",
    "out": "out does not fit the snapshot",
    "ranks": "the snapshot has several values for a part that is to be read",
}


@dataclass(kw_only=True, eq=False, repr=False)
class SnapshotReplaced(ActorSnapError):
    """The snapshot was replaced or deleted while it was read. Nothing is damaged.

    Attributes:
        is_deleted: True if no snapshot is committed at the URL now. False if another snapshot is:
            reading again may succeed, although the call has already retried several times.
    """

    url: str
    is_deleted: bool

    def _text(self) -> str:
        what = "deleted" if self.is_deleted else "replaced"
        return f"the snapshot {self.url} was {what} while it was read; what was read is incomplete"


@dataclass(kw_only=True, eq=False, repr=False)
class _Aborted(ActorSnapError):
    reason: str
    rank: int | None = None
    stage: str = ""
    key: str | None = None

    def _text(self) -> str:
        known = [
            f"rank {self.rank}" if self.rank is not None else "",
            f"stage {self.stage!r}" if self.stage else "",
            f"key {self.key!r}" if self.key and repr(self.key) not in self.reason else "",
        ]
        where = ", ".join(filter(None, known))
        return f"{self.reason} ({where})" if where else self.reason


@dataclass(kw_only=True, eq=False, repr=False)
class SnapshotAborted(_Aborted):
    """A save ended without a commit. Older snapshots are untouched.

    Attributes:
        reason: Why the save ended.
        rank: Rank on which the failure began, or None.
        stage: ``capture``, ``join``, ``stage``, ``store``, ``commit`` or ``cancel``.
        key: Key of the object concerned, or None.
        may_be_committed: True if the commit failed or was not answered, so that the snapshot may
            exist or may still appear.
        step: Step of the save, if a ``CheckpointManager`` raises it after the call that saved.
    """

    may_be_committed: bool = False
    step: int | None = None

    def name_step(self, step: int) -> None:
        self.step = step
        self.message = self._text()
        self.args = (self.message,)

    def _text(self) -> str:
        doubt = (
            ". The snapshot may be committed nevertheless: check the path before you delete or "
            "retry"
        )
        start = "snapshot aborted: "
        if self.step is not None:
            start = f"snapshot of step {self.step} aborted: "
        return f"{start}{super()._text()}{doubt if self.may_be_committed else ''}"


class StateChanged(SnapshotAborted):
    """A tensor was changed before ``async_take(stage="lazy")`` had copied it.

    Attributes:
        path: Path of the leaf in the app state of the rank ``rank``.
    """

    def __init__(self, *, path: str, rank: int | None = None) -> None:
        self.path = path
        super().__init__(
            reason=f"the tensor {path!r} was changed before its lazy staging had ended. Guard all "
            "optimizers that train it (pending.guard(optimizer)), or wait for pending.staged() "
            "before the step",
            rank=rank,
            stage="stage",
            key=path,
        )
        self.fields = {"path": path, "rank": rank}


@dataclass(kw_only=True, eq=False, repr=False)
class RestoreAborted(_Aborted):
    """A restore by several ranks failed on one rank, and therefore ended on all.

    Tensors may be partly overwritten if the stage is ``read`` or ``load``.

    Attributes:
        reason: Why the restore ended.
        rank: Rank on which the failure began, or None.
        stage: ``join``, ``compare``, ``read``, ``load`` or ``cancel``.
        key: Top-level key concerned, or None.
    """

    def _text(self) -> str:
        return f"restore aborted: {super()._text()}"


@dataclass(kw_only=True, eq=False, repr=False)
class NoValidSnapshot(ActorSnapError):
    """A root has snapshots, but none of them is intact.

    Attributes:
        url: URL of the root.
        skipped: URL of each snapshot and why it was skipped, newest first.
    """

    url: str
    skipped: Sequence[tuple[str, str]]

    def __post_init__(self) -> None:
        self.skipped = tuple((url, why) for url, why in self.skipped)
        super().__post_init__()

    def _text(self) -> str:
        lines = [f"{url}: {why}" for url, why in self.skipped]
        return "\n".join(
            [
                f"there is no intact snapshot at {self.url}. To copy one back from a backup, first "
                "delete the damaged one with `actorsnap rm`. `actorsnap verify URL --full` shows "
                "all damage; allow_fresh=True starts from nothing.",
                *format_list("damaged", lines),
            ]
        )


@dataclass(kw_only=True, eq=False, repr=False)
class RootTaken(ActorSnapError):
    """Another manager has begun a run at the same root after this one.

    Attributes:
        url: URL of the root.
        generation: Generation of the manager that raises this error. That manager no longer saves
            or deletes anything.
    """

    url: str
    generation: int

    def _text(self) -> str:
        return (
            f"another manager saves to {self.url} now, and this one (generation "
            f"{self.generation}) stops. If both jobs should run, give each its own root; if this "
            "one is a leftover, end it"
        )
