"""Failures carry an error from the rank that met it to all others."""

import msgspec
import pytest

from actorsnap import errors
from actorsnap.errors import ActorSnapError, SnapshotAborted
from actorsnap.protocol.messages import Failure, Stage

_STORAGE = {"op": "put", "key": "k", "backend": "file:///x", "detail": "d", "retryable": True}
_FORMAT = {"key": "k", "detail": "d"}
EXAMPLES: list[ActorSnapError] = [
    errors.UsageError("bad input"),
    errors.StorageError(**_STORAGE),  # type: ignore[arg-type]
    errors.ObjectNotFound(**_STORAGE),  # type: ignore[arg-type]
    errors.ObjectExists(**_STORAGE),  # type: ignore[arg-type]
    errors.AccessDenied(**_STORAGE),  # type: ignore[arg-type]
    errors.StorageFull(**_STORAGE),  # type: ignore[arg-type]
    errors.Throttled(**_STORAGE),  # type: ignore[arg-type]
    errors.FormatError(**_FORMAT),
    errors.UnsupportedFormat(**_FORMAT),
    errors.ChecksumMismatch(**_FORMAT),
    errors.ChecksumMismatch(**_FORMAT, url="s3://bucket/run"),
    errors.NotASnapshot(**_FORMAT, found="absent"),
    errors.IncompatibleState(missing=["a"], mismatched=["b: c"], is_untouched=False),
    errors.SnapshotReplaced(url="u", is_deleted=True),
    errors.SnapshotAborted(reason="r", rank=3, stage="store", key="k", may_be_committed=True),
    errors.StateChanged(path="model/weight", rank=3),
    errors.RestoreAborted(reason="r", rank=3, stage="read", key="k"),
]


def test_there_is_an_example_of_every_error() -> None:
    kinds = {getattr(errors, name) for name in errors.__all__}
    named = {kind for kind in kinds if isinstance(kind, type)}
    assert {type(error) for error in EXAMPLES} == named - {ActorSnapError}


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_on_the_other_side(error: ActorSnapError) -> None:
    failure = Failure.of(error, stage=Stage.STORE, rank=3, key="k")
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(failure), type=Failure)
    assert sent == failure
    again = sent.to_error()
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.fields == error.fields


def test_other_failures_are_aborts_that_say_where() -> None:
    failure = Failure(reason="r", stage=Stage.STAGE, rank=2, key="k", may_be_visible=True)
    error = failure.to_error()
    assert isinstance(error, SnapshotAborted)
    assert (error.reason, error.rank, error.stage, error.key) == ("r", 2, "stage", "k")
    assert error.may_be_committed


def test_text_that_utf8_cannot_say_travels_all_the_same() -> None:
    """A path may hold any bytes, and a key any surrogates."""
    error = errors.IncompatibleState(missing=["\ud800", "a"], mismatched=["b: \udcff"])
    for failure in (
        Failure.of(error, stage=Stage.STORE, rank=3, key="\ud800"),
        Failure(reason="\udcff is full", stage=Stage.STORE, key="\udcff"),
    ):
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(failure), type=Failure)
        assert sent == failure
        assert type(sent.to_error()) in (errors.IncompatibleState, SnapshotAborted)
    assert "\\udcff is full" in sent.reason
