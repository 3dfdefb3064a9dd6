# SPDX-License-Identifier: Apache-2.0
"""An error in another process or on another rank has its class, fields, text, notes and causes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, get_type_hints

import msgspec
import pytest

from actorsnap import errors
from actorsnap.errors import ActorSnapError, SnapshotAborted, StorageError, UsageError
from actorsnap.protocol.failure import (
    EncodedError,
    Failure,
    Stage,
    decode,
    encode,
    encode_value,
    restore_aborted,
)
from actorsnap.protocol.messages import Aborted, Failed, FromCoordinator, ToCoordinator
from actorsnap.protocol.uploader import Finished, FromProcess
from tests.held.actorsnap_raising import KINDS

CLASSES = sorted(
    {
        found
        for _, found in inspect.getmembers(errors, inspect.isclass)
        if issubclass(found, ActorSnapError) and found is not ActorSnapError
    },
    key=lambda found: found.__name__,
)

VALUES: dict[Any, list[Any]] = {
    str: ["", "model/layer", "\N{SNOWMAN}"],
    bool: [True, False],
    bool | None: [True, False, None],
    int: [3, 0],
    int | None: [3, None],
    float | None: [1.5, None],
    str | None: ["k", None],
    Sequence[str]: [("a", "b: c"), ()],
    Sequence[tuple[str, str]]: [(("url", "why"),), ()],
}
"""Examples of each type that a parameter of an error has."""


def examples(kind: Callable[..., ActorSnapError]) -> Iterator[ActorSnapError]:
    """Yields errors of a class that differ in all fields."""
    hints = get_type_hints(kind.__init__)
    for number in range(3):
        given: dict[str, Any] = {}
        for name in inspect.signature(kind).parameters:
            values = VALUES[hints[name]]
            given[name] = values[number % len(values)]
        yield kind(**given)


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: list(it) if isinstance(it, tuple) else it for name, it in fields.items()}


def assert_same(found: BaseException | None, sent: BaseException | None) -> None:
    assert type(found) is type(sent)
    if found is None or sent is None:
        return
    if isinstance(found, ActorSnapError) and isinstance(sent, ActorSnapError):
        own = {"fields": _plain(found.fields)}
        assert {**vars(found), **own} == {**vars(sent), "fields": _plain(sent.fields)}
    assert str(found) == str(sent)
    assert errors.notes_of(found) == errors.notes_of(sent)
    assert_same(found.__cause__, sent.__cause__)


def through_process(error: BaseException) -> Exception:
    """Returns the trainer's error for one of its uploader process."""
    sent = msgspec.msgpack.encode(Finished(7, encode(error)))
    frame = msgspec.msgpack.decode(sent, type=FromProcess)
    return decode(frame.error)


def through_rank(failure: Failure) -> Exception:
    """Returns the error of another rank, which gets the failure through the coordinator."""
    sent = msgspec.msgpack.encode(Failed(3, failure))
    failed = msgspec.msgpack.decode(sent, type=ToCoordinator)
    sent = msgspec.msgpack.encode(Aborted(failed.failure))
    aborted = msgspec.msgpack.decode(sent, type=FromCoordinator)
    assert aborted.failure == failure
    assert hash(aborted.failure) == hash(failure)
    raised: Exception = aborted.failure.to_error()
    return raised


@pytest.mark.parametrize("is_cause", [False, True], ids=["raised", "cause"])
@pytest.mark.parametrize("where", ["own rank", "other rank"])
@pytest.mark.parametrize("engine", ["thread", "process"])
@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_arrives_as_it_is(
    kind: type[ActorSnapError], engine: str, where: str, is_cause: bool
) -> None:
    for error in examples(kind):
        error.__cause__ = StorageError(op="put", key="k", backend="b", detail="no room")
        error.__cause__.__cause__ = OSError(28, "no space", "/x")
        error.add_note("look there")
        raised: Exception = error
        if is_cause:
            key = (error.key if isinstance(error, StorageError) else "") or "k"
            raised = SnapshotAborted(reason=str(error), rank=3, stage="store", key=key)
            raised.__cause__ = error
        found = raised
        if where == "other rank":
            make = Failure.caused_by if is_cause else Failure.of
            failure = make(error, stage=Stage.STORE, rank=3, key="k")
            found = through_rank(failure)
        if engine == "process":
            found = through_process(found)
        assert_same(found, raised)


def test_the_end_of_a_save_is_the_same_for_its_other_ranks() -> None:
    """Where one rank's engine has ended, and the others have to end as well."""
    ended = SnapshotAborted(reason="r", rank=2, stage="store", key="k", may_be_committed=True)
    ended.__cause__ = UsageError("bad input")
    changed = errors.StateChanged(path="model/weight", rank=2)
    for error in (ended, changed, UsageError("bad input")):
        failure = Failure.of_save(error, stage=Stage.JOIN, rank=0)
        assert failure.may_be_visible is (error is ended)
        assert failure.rank == (0 if isinstance(error, UsageError) else 2)
        assert_same(through_rank(failure), error)


def test_other_failures_are_aborts_that_say_where() -> None:
    failure = Failure(reason="r", stage=Stage.STAGE, rank=2, key="k", may_be_visible=True)
    error = failure.to_error()
    assert isinstance(error, SnapshotAborted)
    assert (error.reason, error.rank, error.stage, error.key) == ("r", 2, "stage", "k")
    assert error.may_be_committed
    assert error.__cause__ is None
    restore = restore_aborted("r", Stage.READ, 1, ValueError("odd"))
    assert_same(through_rank(restore).__cause__, ValueError("odd"))


class Evil(Exception):
    """Raises at each look."""

    def __getattribute__(self, name: str) -> Any:
        if name != "__class__":
            raise KeyboardInterrupt(name)
        return super().__getattribute__(name)


class EvilText(str):
    __slots__ = ()

    def __str__(self) -> str:
        raise ValueError

    encode = __str__  # type: ignore[assignment]


class EvilItems(dict[str, Any]):
    def items(self) -> Any:
        raise ValueError


def of_fields(**fields: Any) -> ActorSnapError:
    error = UsageError("x")
    error.fields = fields
    return error


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    "make",
    [
        *KINDS.values(),
        Evil,
        lambda: ValueError(EvilText("x")),
        lambda: ValueError("\ud800"),
        lambda: OSError(2**80, "huge"),
        lambda: of_fields(message=10**5000),
        lambda: of_fields(message=ENDLESS),
        lambda: of_fields(message=EvilItems(a=1)),
        lambda: of_fields(message={object(): {1: ValueError}}, x=bytearray(3)),
        lambda: UnicodeDecodeError("utf8", b"x", 0, 1, "odd"),
        lambda: KeyError("k"),
    ],
)
def test_odd_exceptions_travel_too(make: Any) -> None:
    """None of them keeps the encoder or the decoder from an error of the same name or text."""
    error: BaseException = make()
    for found in (
        through_process(error),
        through_rank(Failure.of(error, stage=Stage.STORE)),
        through_rank(Failure.caused_by(error, stage=Stage.STORE)),
    ):
        assert isinstance(found, Exception)
        errors.describe(found)


def test_values_become_what_msgpack_has() -> None:
    class Number(float):
        pass

    value = {"a": (1, EvilText("x"), Number(1.5)), 2: {"deep": object()}, "huge": -(2**64)}
    assert encode_value(value) == {
        "a": [1, "x", 1.5],
        "2": {"deep": "<object>"},
        "huge": "-0x10000000000000000",
    }


def test_text_that_utf8_cannot_say_travels_all_the_same() -> None:
    """A path may hold any bytes, and a key any surrogates."""
    error = errors.IncompatibleState(missing=["\ud800", "a"], mismatched=["b: \udcff"])
    found = through_rank(Failure.of(error, stage=Stage.STORE, rank=3, key="\ud800"))
    assert isinstance(found, errors.IncompatibleState)
    assert found.missing == ("\\ud800", "a")
    failure = Failure(reason="\udcff is full", stage=Stage.STORE, key="\udcff")
    assert "\\udcff is full" in str(through_rank(failure))


def test_a_circle_of_causes_ends() -> None:
    first, second = ValueError("first"), OSError(5, "second")
    first.__cause__, second.__cause__ = second, first
    assert [link.text for link in encode(first)] == ["first", "[Errno 5] second"]
    links: list[Exception] = [ValueError(str(number)) for number in range(100)]
    for error, cause in pairwise(links):
        error.__context__ = cause
    assert len(encode(links[0])) < 20
    links[0].__suppress_context__ = True
    assert len(encode(links[0])) == 1


def test_classes_that_another_process_lacks() -> None:
    class Own(StorageError):
        pass

    error = Own(op="put", key="k", backend="b", detail="d")
    assert str(through_process(error)) == "Own: d (put of 'k' in b)"
    found = through_rank(Failure.of(error, stage=Stage.STORE, rank=1))
    assert isinstance(found, SnapshotAborted)
    assert str(found.__cause__) == "Own: d (put of 'k' in b)"
    for kind in ("describe", "print", "KeyboardInterrupt", "", "Any"):
        assert str(decode([EncodedError(kind, "text")])) == f"{kind}: text"
