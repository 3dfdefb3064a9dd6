# SPDX-License-Identifier: Apache-2.0
"""Encodes exceptions for other processes and ranks, and describes why an attempt failed.

Encoding never raises, whatever the exception's methods do: the receiver would wait until the
deadline.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any

import msgspec

from actorsnap import errors
from actorsnap.errors import (
    ActorSnapError,
    RestoreAborted,
    SnapshotAborted,
    StateChanged,
    StorageError,
    UsageError,
    attribute_of,
    describe,
    notes_of,
    set_cause,
    text_of,
)
from actorsnap.wording import printable

_MAX_CAUSES = 8
"""Limit of a chain."""

_MAX_DEPTH = 8
"""Limit of containers in a field, which may contain themselves."""

_OS_FIELDS = ("errno", "strerror", "filename")


class Stage(StrEnum):
    CAPTURE = "capture"
    JOIN = "join"
    PLAN = "plan"
    STAGE = "stage"
    STORE = "store"
    COMMIT = "commit"
    COMPARE = "compare"
    READ = "read"
    LOAD = "load"
    CANCEL = "cancel"


class EncodedError(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One exception of a chain.

    Attributes:
        fields: Of an ``ActorSnapError``; number, text and file name of an ``OSError``; msgpack.
    """

    kind: str
    text: str
    fields: bytes = b""
    notes: tuple[str, ...] = ()


def encode(error: BaseException) -> tuple[EncodedError, ...]:
    """Encodes an error and its causes. Never raises."""
    chain: list[BaseException] = []
    seen: object = error
    while isinstance(seen, BaseException) and len(chain) < _MAX_CAUSES:
        if any(seen is other for other in chain):
            break  # causes can form a cycle
        chain.append(seen)
        seen = _cause_of(seen)
    return tuple([_encode_one(link) for link in chain])


def _cause_of(error: BaseException) -> object:
    cause = attribute_of(error, "__cause__")
    if cause is not None or attribute_of(error, "__suppress_context__"):
        return cause
    return attribute_of(error, "__context__")


def _encode_one(error: BaseException) -> EncodedError:
    try:
        fields: object = None
        if isinstance(error, ActorSnapError):
            fields = attribute_of(error, "fields")
        elif isinstance(error, OSError) and isinstance(attribute_of(error, "errno"), int):
            fields = {name: attribute_of(error, name) for name in _OS_FIELDS}
        return EncodedError(
            kind=type(error).__name__,
            text=printable(text_of(error)),
            fields=msgspec.msgpack.encode(encode_value(fields)) if fields else b"",
            notes=tuple([printable(note) for note in notes_of(error)]),
        )
    except BaseException as failure:  # see ``text_of``
        return EncodedError("Exception", f"<encoding it raises {type(failure).__name__}>")


def encode_value(value: Any, max_depth: int = _MAX_DEPTH) -> Any:
    """Returns a form of ``value`` for msgpack; other objects by their class name."""
    kind = type(value)
    if value is None or kind in (bool, float, bytes):
        return value
    if issubclass(kind, str):
        return printable(str.__str__(value))
    if issubclass(kind, int):
        number = int.__int__(value)
        return number if -(2**63) <= number < 2**63 else hex(number)
    if issubclass(kind, float):
        return float.__float__(value)
    if max_depth and issubclass(kind, dict):
        return {
            str(encode_value(name, 0)): encode_value(item, max_depth - 1)
            for name, item in value.items()
        }
    if max_depth and issubclass(kind, list | tuple):
        return [encode_value(item, max_depth - 1) for item in value]
    return f"<{kind.__name__}>"


def decode(chain: Sequence[EncodedError]) -> Exception:
    """Reverses ``encode``; a class that is neither ours nor built in becomes ``RuntimeError``."""
    assert chain
    cause: Exception | None = None
    for link in reversed(chain):
        error = _decode_one(link)
        for note in link.notes:
            error.add_note(note)
        error.__cause__ = cause
        cause = error
    return error


def _decode_one(link: EncodedError) -> Exception:
    with suppress(Exception):  # the fields do not fit the class
        fields = msgspec.msgpack.decode(link.fields) if link.fields else {}
        if "errno" in fields:
            return OSError(*[fields[name] for name in _OS_FIELDS])
        own = getattr(errors, link.kind, None)
        kind = own or getattr(builtins, link.kind, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            return kind(link.text) if own is None else kind(**fields)
    return RuntimeError(f"{link.kind}: {link.text}")


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why an attempt or a restore failed; the same on every rank.

    Attributes:
        stage, rank: Of the first failure.
        error: Raised on every rank. None: a ``SnapshotAborted`` with the fields above.
        causes: Causes of that error; see ``encode``.
        may_be_visible: The failed commit may have left the commit object. The objects that it names
            must then stay, or readers would find a broken snapshot.
    """

    reason: str
    stage: Stage
    rank: int | None = None
    key: str | None = None
    error: EncodedError | None = None
    causes: tuple[EncodedError, ...] = ()
    may_be_visible: bool = False

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "reason", printable(self.reason))
        if self.key is not None:
            msgspec.structs.force_setattr(self, "key", printable(self.key))

    @classmethod
    def of(
        cls, error: BaseException, *, stage: Stage, rank: int | None = None, key: str | None = None
    ) -> Failure:
        """See ``caused_by`` for foreign errors."""
        if not isinstance(error, ActorSnapError):
            return cls.caused_by(error, stage=stage, rank=rank, key=key)
        first, *causes = encode(error)
        return cls(
            reason=first.text, stage=stage, rank=rank, key=key, error=first, causes=tuple(causes)
        )

    @classmethod
    def caused_by(
        cls,
        error: BaseException,
        *,
        stage: Stage,
        rank: int | None = None,
        key: str | None = None,
        may_be_visible: bool = False,
    ) -> Failure:
        """Returns a failure that is raised as a ``SnapshotAborted`` caused by ``error``."""
        own_key = attribute_of(error, "key") if isinstance(error, StorageError) else None
        return cls(
            reason=text_of(error) if isinstance(error, ActorSnapError) else describe(error),
            stage=stage,
            rank=rank,
            key=own_key if own_key and isinstance(own_key, str) else key,
            causes=encode(error),
            may_be_visible=may_be_visible,
        )

    @classmethod
    def of_save(cls, error: BaseException, *, stage: Stage, rank: int) -> Failure:
        """Returns the failure of a save that ended with ``error``, for its other ranks."""
        if isinstance(error, StateChanged):
            return cls.of(error, stage=Stage.STAGE, rank=error.rank)
        if not isinstance(error, SnapshotAborted):
            return cls.of(error, stage=stage, rank=rank)
        return cls(
            reason=error.reason,
            stage=Stage(error.stage),
            rank=error.rank,
            key=error.key,
            causes=encode(error)[1:],
            may_be_visible=error.may_be_committed,
        )

    def to_error(
        self, *, cause: BaseException | None = None, names_rank: bool = False
    ) -> ActorSnapError:
        """Returns a new error.

        Args:
            cause: This rank's own error; see ``set_cause``.
            names_rank: Put the rank in front of the text of a ``UsageError``, which all ranks
                raise.
        """
        error = None if self.error is None else decode([self.error, *self.causes])
        if not isinstance(error, ActorSnapError):
            decoded = error or (decode(self.causes) if self.causes else None)
            error = SnapshotAborted(
                reason=self.reason,
                rank=self.rank,
                stage=str(self.stage),
                key=self.key,
                may_be_committed=self.may_be_visible,
            )
            error.__cause__ = decoded
        if cause is not None:
            set_cause(error, cause)
        if isinstance(error, UsageError) and names_rank and self.rank is not None:
            error.message = error.fields["message"] = f"rank {self.rank}: {error.message}"
            error.args = (error.message,)
        return error


def restore_aborted(
    reason: str, stage: Stage, rank: int | None, cause: BaseException | None = None
) -> Failure:
    error = RestoreAborted(reason=reason, rank=rank, stage=str(stage))
    error.__cause__ = cause
    return Failure.of(error, stage=stage, rank=rank)


def save_aborted(
    reason: str, stage: Stage, rank: int | None, cause: BaseException | None = None
) -> Failure:
    """Returns a failure that is raised as a ``SnapshotAborted``."""
    causes = () if cause is None else encode(cause)
    return Failure(reason=reason, stage=stage, rank=rank, causes=causes)


def explain_loss(rank: int, silent_s: float, how: str = "") -> str:
    """Describes a rank that was silent for ``silent_s`` seconds; 0.0: it has left.

    Args:
        how: It only takes no part in the call: what it did instead.
    """
    if how:
        return f"rank {rank} {how}"
    if not silent_s:
        return f"rank {rank} has left: its process ended"
    return (
        f"rank {rank} sent nothing for {silent_s:.0f} s: it was killed or stopped, or its machine "
        "or network is down"
    )


def explain_coordinator_loss(silent_s: float) -> str:
    """``explain_loss`` of rank 0."""
    how = f"sent nothing for {silent_s:.0f} s" if silent_s else "has left: its process ended"
    return f"rank 0, the coordinator, {how}"
