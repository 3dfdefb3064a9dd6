# SPDX-License-Identifier: Apache-2.0
"""Storages that raise anything, in any verb, during any call: one clear error, or a true result.

A cell of the table is a verb, an exception and a public call. Two endings are right: an error of
actorsnap that names the verb; or, where the verb only cleans up, a result that is whole. A wrong
result, the exception of the storage itself in the caller, and a call that ends by
``timeout_s`` are failures.
"""

from __future__ import annotations

import errno
import itertools
import os
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import anyio
import pytest
import torch

from actorsnap import ActorSnapError, Options, Snapshot, SnapshotAborted, StateDict, StorageError
from actorsnap.format.layout import Attempt
from actorsnap.runtime.process import host_id
from actorsnap.storage.base import ObjectInfo, ObjectWriter, Storage, StorageContext
from actorsnap.storage.memory import forget_space
from actorsnap.storage.registry import open_storage
from actorsnap.storage.wrapper import TranslatedStorage, Wrapper, without_blocking_io
from actorsnap.testing import run_blocking_in_thread
from tests.api.faults import faulty, faulty_url
from tests.api.places import assert_idle, number_at, number_of, state
from tests.held.actorsnap_raising import KINDS, Raising
from tests.support.cases import mostly_slow

T = TypeVar("T")
P = ParamSpec("P")

OPTIONS = Options(fsync=False, timeout_s=60.0)
WIDE = Options(fsync=False, timeout_s=60.0, chunk_bytes=2 << 20)
HOST = host_id()
_numbers = itertools.count()

VERBS = (
    "put",
    "put_if_absent",
    "writer",
    "write_at",
    "reuse",
    "complete",
    "abort",
    "get",
    "read_into",
    "list",
    "delete",
    "list_folders",
    "delete_folder",
    "stat",
    "aclose",
)
CLEANUP = frozenset({"abort", "aclose", "delete", "delete_folder", "list", "list_folders"})
"""Verbs without which a save, a copy or a restore can still succeed."""


NUM_FLOATS = 3000


def small(number: int) -> dict[str, StateDict]:
    return state(number, num_floats=NUM_FLOATS)


def new_url() -> str:
    return f"memory://odd-endings-{next(_numbers)}"


async def number_there(url: str) -> int | None:
    return await number_at(url, num_floats=NUM_FLOATS)


# What lies at a place before the call. ``there`` is its URL through a healthy storage.


async def nothing(there: str) -> None:
    pass


async def a_snapshot(there: str) -> None:
    await Snapshot.take(there, small(1), options=OPTIONS)


async def a_dead_attempt(there: str) -> None:
    dead = Attempt(created_s=1, host=HOST, pid=os.getpid(), nonce="00000000")
    storage = open_storage(there, StorageContext(run_blocking=run_blocking_in_thread))
    await storage.put(f"{dead}/data/left", [memoryview(b"left")])


# Calls, by the URL through the storage that raises. Each returns what checks its result.

Check = Callable[[], Awaitable[None]]


def has(there: str, number: int | None) -> Check:
    async def check() -> None:
        assert await number_there(there) == number

    return check


def is_true(found: bool) -> Check:
    async def check() -> None:
        assert found

    return check


async def take(url: str, there: str) -> Check:
    await Snapshot.take(url, small(2), options=OPTIONS)
    return has(there, 2)


async def async_take(url: str, there: str) -> Check:
    pending = await Snapshot.async_take(url, small(2), overwrite=True, options=OPTIONS)
    await pending.wait()
    return has(there, 2)


async def resume(url: str, there: str) -> Check:
    await Snapshot.take(url, small(2), resume=True, options=OPTIONS)
    return has(there, 2)


async def restore(url: str, there: str) -> Check:
    target = small(-1)
    await Snapshot(url, options=OPTIONS).restore(target)
    return is_true(number_of(target) == 1)


async def restore_unverified(url: str, there: str) -> Check:
    target = small(-1)
    await Snapshot(url, options=Options(verify=False, timeout_s=60.0)).restore(target)
    return is_true(number_of(target) == 1)


async def read_object(url: str, there: str) -> Check:
    found = await Snapshot(url, options=OPTIONS).read_object("0/model/weight")
    return is_true(torch.equal(found, small(1)["model"]["weight"]))


async def verify(url: str, there: str) -> Check:
    report = await Snapshot(url, options=OPTIONS).verify("full")
    return is_true(report.ok and report.num_objects > 0 and report.nbytes > NUM_FLOATS * 4)


async def copy_from(url: str, there: str) -> Check:
    to = new_url()
    try:
        await Snapshot(url, options=OPTIONS).copy_to(to)
    except ActorSnapError:
        assert await number_there(to) is None
        raise
    return has(to, 1)


async def copy_to(url: str, there: str) -> Check:
    source = new_url()
    await a_snapshot(source)
    await Snapshot(source, options=OPTIONS).copy_to(url)
    return has(there, 1)


async def delete(url: str, there: str) -> Check:
    await Snapshot(url, options=OPTIONS).delete()
    return has(there, None)


Prepare = Callable[[str], Awaitable[None]]
Perform = Callable[[str, str], Awaitable[Check]]

CALLS: dict[str, tuple[Prepare, Perform, frozenset[str]]] = {
    "take": (nothing, take, CLEANUP),
    "async_take": (a_snapshot, async_take, CLEANUP),
    "resume": (a_dead_attempt, resume, CLEANUP - {"list_folders"}),
    "restore": (a_snapshot, restore, frozenset({"aclose"})),
    "restore_unverified": (a_snapshot, restore_unverified, frozenset({"aclose"})),
    "read_object": (a_snapshot, read_object, frozenset({"aclose"})),
    "verify": (a_snapshot, verify, frozenset({"aclose"})),
    "verify_unlisted": (a_snapshot, verify, frozenset({"aclose"})),
    "copy_from": (a_snapshot, copy_from, frozenset({"aclose"})),
    "copy_to": (nothing, copy_to, CLEANUP - {"list", "list_folders"}),
    "delete": (a_snapshot, delete, frozenset({"aclose"})),
}
"""Per call: what lies at its place, the call, and the verbs that it can do without."""


class _Unlisted(Wrapper):
    """A list has no data objects, as if they were links."""

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        async for info in super().list(prefix):
            if "/data/" not in info.key:
                yield info


def _below(call: str, inner: Storage) -> Storage:
    return _Unlisted(inner) if call == "verify_unlisted" else inner


async def _play(call: str, verb: str, kind: str, *, has_blocking_io: bool = True) -> bool:
    """Plays a cell; returns whether the verb was called at all."""
    prepare, perform, dispensable = CALLS[call]
    there = new_url()
    await prepare(there)
    before = await number_there(there)
    opened: list[Raising] = []

    def wrap(inner: Storage) -> Storage:
        below = _below(call, inner)
        opened.append(Raising(below, verb, KINDS[kind], has_blocking_io=has_blocking_io))
        return opened[0]

    error: ActorSnapError | None = None
    with faulty(wrap):
        try:
            check = await perform(faulty_url(there), there)
        except ActorSnapError as raised:
            error = raised
    assert_idle()
    (storage,) = opened
    if error is None:
        assert verb in dispensable or not storage.was_hit, "a success without the verb"
        await check()
        return storage.was_hit
    assert storage.was_hit
    assert isinstance(error, StorageError | SnapshotAborted), error
    assert f"{verb} of " in str(error), error
    assert "timeout_s" not in str(error), error
    if isinstance(error, SnapshotAborted):
        assert error.rank == 0
        assert error.stage in ("join", "store", "commit")
        assert error.key is not None
        assert isinstance(error.__cause__, StorageError)
    number = await number_there(there)
    assert number == before or (call == "delete" and number is None)
    return True


async def _sweep(call: str, kind: str, verbs: tuple[str, ...]) -> None:
    first = next(_numbers)
    wrong: list[str] = []
    for verb in verbs:
        for has_blocking_io in (True, False) if verb in ("write_at", "read_into") else (True,):
            try:
                await _play(call, verb, kind, has_blocking_io=has_blocking_io)
            except (Exception, pytest.fail.Exception) as error:
                said = "".join(traceback.format_exception(error)[-2:])
                wrong.append(f"{verb} (blocking: {has_blocking_io}): {said}")
            except BaseException as error:  # it would end the test run
                wrong.append(f"{verb}: {type(error)} in the caller")
    for number in range(first, next(_numbers)):
        forget_space(f"odd-endings-{number}")
    assert not wrong, "\n".join([f"{call}, {kind}:", *wrong])


@pytest.mark.parametrize("call", mostly_slow(CALLS, "async_take", "restore", "copy_to"))
async def test_a_cancelled_error_of_the_storage_is_its_failure(call: str) -> None:
    """In every verb: aiohttp raises it in requests of a session that was closed."""
    await _sweep(call, "CancelledError", VERBS)


@pytest.mark.few
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", CALLS)
async def test_odd_endings(call: str, kind: str) -> None:
    """Every eighth verb, others for each kind."""
    start = (list(KINDS).index(kind) + list(CALLS).index(call)) % 8
    await _sweep(call, kind, VERBS[start::8])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", CALLS)
async def test_all_odd_endings(call: str, kind: str) -> None:
    await _sweep(call, kind, VERBS)


@pytest.mark.parametrize(
    ("call", "verb"),
    [
        ("take", "write_at"),
        ("take", "list"),
        ("resume", "reuse"),
        ("restore_unverified", "read_into"),
        ("read_object", "read_into"),
        ("verify", "read_into"),
        ("verify", "list"),
        ("verify_unlisted", "stat"),
        ("verify", "get"),
        ("copy_from", "read_into"),
        ("copy_to", "write_at"),
        ("copy_to", "writer"),
    ],
)
async def test_what_moves_bytes_counts_them(
    call: str, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a wrapper that lets a ``CancelledError`` through, too, nothing succeeds with less."""
    monkeypatch.delattr(TranslatedStorage, "around")
    prepare, perform, _ = CALLS[call]
    there = new_url()
    await prepare(there)

    def wrap(inner: Storage) -> Storage:
        below = _below(call, inner)
        return Raising(below, verb, KINDS["CancelledError"], has_blocking_io=False)

    with faulty(wrap), pytest.raises((ActorSnapError, RuntimeError), match=r"\w") as caught:
        await perform(faulty_url(there), there)
    assert "timeout_s" not in str(caught.value)
    assert_idle()


class _Answering(Wrapper):
    """Answers with ``answer`` in one verb."""

    def __init__(self, inner: Storage, verb: str, answer: Any) -> None:
        super().__init__(inner)
        self.capabilities = without_blocking_io(inner.capabilities)
        self._verb = verb
        self._answer = answer

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        return cast("bytes", self._instead("get", await super().get(key, start, stop)))

    async def stat(self, key: str) -> ObjectInfo:
        return cast("ObjectInfo", self._instead("stat", await super().stat(key)))

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        async for info in super().list(prefix):
            yield cast("ObjectInfo", self._instead("list", info))

    async def list_folders(self, folder: str = "") -> Sequence[str]:
        found = await super().list_folders(folder)
        return cast("Sequence[str]", self._instead("list_folders", found))

    async def delete_folder(self, folder: str) -> Sequence[str]:
        found = await super().delete_folder(folder)
        return cast("Sequence[str]", self._instead("delete_folder", found))

    async def writer(self, key: str, size: int, *, older: Sequence[str] = ()) -> ObjectWriter:
        opened = await super().writer(key, size, older=older)
        return cast("ObjectWriter", self._instead("writer", opened))

    def _instead(self, verb: str, answer: object) -> object:
        return self._answer if verb == self._verb else answer


@pytest.mark.few
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("verb", "answer"),
    [
        ("get", None),
        ("get", "text"),
        ("stat", None),
        ("stat", ("key", 3)),
        ("stat", ObjectInfo(key="k", size=-1)),
        ("list", None),
        ("list", "a key"),
        ("list", ObjectInfo(key="elsewhere/k", size=1)),
        ("list_folders", None),
        ("list_folders", [1]),
        ("delete_folder", None),
        ("writer", None),
        ("writer", object()),
    ],
)
async def test_odd_answers(call: str, verb: str, answer: object) -> None:
    """An answer that is none of the verb's ends like a failure of the verb."""
    prepare, perform, _ = CALLS[call]
    there = new_url()
    await prepare(there)
    ended: Check | ActorSnapError
    with faulty(lambda inner: _Answering(inner, verb, answer)):
        try:
            ended = await perform(faulty_url(there), there)
        except ActorSnapError as error:
            ended = error
    assert_idle()
    if isinstance(ended, ActorSnapError):
        assert "the storage answered with" in str(ended)
        assert f"{verb} of " in str(ended)
    else:
        await ended()


@pytest.mark.parametrize("length", [0, 1, 5000])
async def test_a_part_of_other_length_than_was_asked_for(tmp_path: Path, length: int) -> None:
    await Snapshot.take(tmp_path / "s", small(1), options=OPTIONS)
    (tmp_path / "file").write_bytes(b"torch" * 1000)

    class Lengthy(Wrapper):
        async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
            return bytes(length) if stop is not None else await super().get(key, start, stop)

    with faulty(Lengthy), pytest.raises(StorageError, match=rf"answered with {length} bytes, not"):
        await Snapshot(faulty_url(tmp_path / "s"), options=OPTIONS).verify("full")


class _Blaming(Wrapper):
    """The first of two requests fails; the second one, cancelled for that, ends in a group."""

    def __init__(self, inner: Storage, verb: str) -> None:
        super().__init__(inner)
        self.capabilities = without_blocking_io(inner.capabilities)
        self._verb = verb
        self._waits = anyio.Event()
        self.num_cancelled = 0

    async def around(
        self, op: str, key: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if op != self._verb:
            return await call(*args, **kwargs)
        if self._waits.is_set():
            raise OSError(errno.EIO, "broken")
        self._waits.set()
        try:
            await anyio.sleep_forever()
        except BaseException as error:
            self.num_cancelled += 1
            raise BaseExceptionGroup("several", [error, KeyboardInterrupt()]) from None
        raise AssertionError


_LARGE = {"model": StateDict(a=torch.ones(600_000), b=torch.zeros(600_000))}


async def _call_at(call: str, url: str, there: str) -> None:
    """A call that has two requests at a time; ``url`` is the place ``there`` as it is tested."""
    match call:
        case "take":
            await Snapshot.take(url, _LARGE, options=WIDE)
        case "async_take":
            await (await Snapshot.async_take(url, _LARGE, options=WIDE)).wait()
        case "restore":
            await Snapshot(url, options=WIDE).restore(_LARGE)
        case "verify":
            await Snapshot(url, options=WIDE).verify("full")
        case "copy_from":
            await Snapshot(url, options=WIDE).copy_to(f"{there}-copy")
        case _:
            await Snapshot(there, options=WIDE).copy_to(f"{url}-copy")


@pytest.mark.parametrize(
    ("call", "verb"),
    [
        ("take", "write_at"),
        ("async_take", "write_at"),
        ("restore", "read_into"),
        ("verify", "read_into"),
        ("copy_from", "read_into"),
        ("copy_to", "write_at"),
    ],
)
async def test_a_group_with_a_cancellation(call: str, verb: str, tmp_path: Path) -> None:
    """Clients made of task groups raise one when they are cancelled: it is no other ending."""
    there = str(tmp_path / "s")
    if call not in ("take", "async_take"):
        await Snapshot.take(there, _LARGE, options=WIDE)
    opened: list[_Blaming] = []

    def wrap(inner: Storage) -> Storage:
        opened.append(_Blaming(inner, verb))
        return opened[0]

    with faulty(wrap), pytest.raises((StorageError, SnapshotAborted), match="Errno 5.* broken"):
        await _call_at(call, faulty_url(there), there)
    assert opened[0].num_cancelled == 1
    assert_idle()


async def test_every_verb_is_called_by_some_call() -> None:
    called: set[str] = set()
    for call in ("take", "resume", "async_take", "restore", "verify_unlisted", "delete"):
        for verb in VERBS:
            if verb not in called and await _play(call, verb, "RuntimeError"):
                called.add(verb)
    # Nothing of one rank fails between opening an object and its end.
    assert called == set(VERBS) - {"abort"}
