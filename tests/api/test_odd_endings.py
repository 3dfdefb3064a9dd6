"""Storages that raise anything, in any verb, during any call: one clear error, or a true result.

A cell of the table is a verb, an exception and a public call. Two endings are right: an error of
actorsnap that names the verb; or, where the verb only cleans up, a result that is whole. A wrong
result, the exception of the storage itself in the caller, and a call that ends by
``timeout_s`` are failures.
"""

from __future__ import annotations

import itertools
import os
import traceback
from collections.abc import Awaitable, Callable

import pytest
import torch

from actorsnap import ActorSnapError, Options, Snapshot, SnapshotAborted, StateDict, StorageError
from actorsnap.format.layout import Attempt
from actorsnap.runtime.process import host_id
from actorsnap.storage.base import Storage, StorageContext
from actorsnap.storage.foreign_errors import TranslatedStorage
from actorsnap.storage.memory import forget_space
from actorsnap.storage.registry import open_storage
from actorsnap.testing import run_blocking_in_thread
from tests.api.faults import faulty, faulty_url
from tests.api.places import assert_idle, number_at, number_of, state
from tests.held.actorsnap_raising import KINDS, Raising

OPTIONS = Options(fsync=False, timeout_s=60.0)
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
    "copy_from": (a_snapshot, copy_from, frozenset({"aclose"})),
    "copy_to": (nothing, copy_to, CLEANUP - {"list", "list_folders"}),
    "delete": (a_snapshot, delete, frozenset({"aclose"})),
}
"""Per call: what lies at its place, the call, and the verbs that it can do without."""


async def _play(call: str, verb: str, kind: str, *, has_blocking_io: bool = True) -> bool:
    """Plays a cell; returns whether the verb was called at all."""
    prepare, perform, dispensable = CALLS[call]
    there = new_url()
    await prepare(there)
    before = await number_there(there)
    opened: list[Raising] = []

    def wrap(inner: Storage) -> Storage:
        opened.append(Raising(inner, verb, KINDS[kind], has_blocking_io=has_blocking_io))
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


@pytest.mark.parametrize("call", CALLS)
async def test_a_cancelled_error_of_the_storage_is_its_failure(call: str) -> None:
    """In every verb: aiohttp raises it in requests of a session that was closed."""
    await _sweep(call, "CancelledError", VERBS)


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
        ("take", "stat"),
        ("resume", "reuse"),
        ("restore_unverified", "read_into"),
        ("read_object", "read_into"),
        ("verify", "read_into"),
        ("verify", "stat"),
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
        return Raising(inner, verb, KINDS["CancelledError"], has_blocking_io=False)

    with faulty(wrap), pytest.raises((ActorSnapError, RuntimeError), match=r"\w") as caught:
        await perform(faulty_url(there), there)
    assert "timeout_s" not in str(caught.value)
    assert_idle()


async def test_every_verb_is_called_by_some_call() -> None:
    called: set[str] = set()
    for call in ("take", "resume", "async_take", "restore", "delete"):
        for verb in VERBS:
            if verb not in called and await _play(call, verb, "RuntimeError"):
                called.add(verb)
    # Nothing of one rank fails between opening an object and its end.
    assert called == set(VERBS) - {"abort"}
