# SPDX-License-Identifier: Apache-2.0
"""Resuming: what a dead save left is not sent again, and never trusted."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

from actorsnap import ActorSnapError, ObjectExists, Options, Snapshot, SnapshotAborted, StateDict
from actorsnap.errors import UsageError
from actorsnap.runtime import maintenance
from actorsnap.storage.base import ObjectWriter, Storage, num_bytes
from actorsnap.storage.memory import MemoryStorage, forget_space
from actorsnap.storage.registry import find_opener
from actorsnap.storage.wrapper import Wrapper, WriterWrapper
from actorsnap.testing import FaultyStorage
from tests.api.faults import Barrier, BarrierStorage, faulty, faulty_url
from tests.api.places import leftovers
from tests.api.zygote import Zygote
from tests.servers.base import S3Server, Server
from tests.servers.ceph import CephServer
from tests.servers.fake_gcs import FakeGcsServer
from tests.servers.moto import MotoServer
from tests.support.cases import slow

MIB = 1 << 20
CHUNK = 2 * MIB
OPTIONS = Options(chunk_bytes=CHUNK, num_uploaders=1, fsync=False)
_numbers = itertools.count()


@pytest.fixture
def url() -> Iterator[str]:
    name = f"resume-{next(_numbers)}"
    yield f"memory://{name}/s"
    forget_space(name)


def state(seed: int, num_chunks: int = 5) -> dict[str, StateDict]:
    """An object of a few chunks, and a small one; both differ in every block with the seed."""
    numbers = torch.Generator().manual_seed(seed)
    weight = torch.randint(0, 256, (num_chunks * CHUNK,), dtype=torch.uint8, generator=numbers)
    return {"model": StateDict(weight=weight), "progress": StateDict(step=seed)}


async def assert_holds(url: str, expected: dict[str, StateDict], **how: Any) -> None:
    """Fails unless ``expected`` is committed, bit for bit."""
    snapshot = Snapshot(url, **how)
    assert (await snapshot.verify("full")).ok
    target = state(-1, expected["model"]["weight"].numel() // CHUNK)
    await snapshot.restore(target)
    assert torch.equal(target["model"]["weight"], expected["model"]["weight"])
    assert target["progress"]["step"] == expected["progress"]["step"]


class Counting(Wrapper):
    """Counts the bytes that are sent for data objects."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.num_bytes = 0

    def wrap_writer(self, inner: ObjectWriter) -> ObjectWriter:
        return _CountingWriter(self, inner)


class _CountingWriter(WriterWrapper):
    storage: Counting

    async def write_at(
        self, offset: int, views: Sequence[memoryview], crc32c: int | None = None
    ) -> None:
        await self.inner.write_at(offset, views, crc32c)
        self.storage.num_bytes += num_bytes(views)


class Unaborted(Wrapper):
    """A dead process aborts nothing."""

    def wrap_writer(self, inner: ObjectWriter) -> ObjectWriter:
        return _UnabortedWriter(self, inner)


class _UnabortedWriter(WriterWrapper):
    async def abort(self) -> None:
        pass


Wrap = Callable[[Storage], Storage]


async def take(url: str, app_state: dict[str, StateDict], wrap: Wrap, **how: Any) -> None:
    with faulty(wrap):
        await Snapshot.take(faulty_url(url), app_state, options=OPTIONS, **how)


async def die(url: str, app_state: dict[str, StateDict], **fault: Any) -> FaultyStorage:
    """A save whose storage is gone for good, for this process, from one operation on."""
    opened: list[FaultyStorage] = []

    def wrap(inner: Storage) -> Storage:
        opened.append(FaultyStorage(Unaborted(inner), is_lasting=True, **fault))
        return opened[0]

    try:
        await take(url, app_state, wrap, resume=True)
    except SnapshotAborted:
        assert opened[0].was_hit
    return opened[0]


async def sent_by(url: str, app_state: dict[str, StateDict], **how: Any) -> int:
    """Bytes that a resumed save sends."""
    opened: list[Counting] = []

    def wrap(inner: Storage) -> Storage:
        opened.append(Counting(inner))
        return opened[0]

    await take(url, app_state, wrap, resume=True, **how)
    return opened[0].num_bytes


async def test_only_what_is_missing_is_sent(url: str) -> None:
    await die(url, state(1), fail_at=4, fail_verbs=["write_at"])
    sent = await sent_by(url, state(1))
    assert 2 * CHUNK <= sent < 3 * CHUNK
    await assert_holds(url, state(1))
    assert await leftovers(url) == []
    assert len(await MemoryStorage(url.split("/")[2], "s").list_folders()) == 1


async def test_without_resume_everything_is_sent(url: str) -> None:
    await die(url, state(1), fail_at=4, fail_verbs=["write_at"])
    opened: list[Counting] = []

    def wrap(inner: Storage) -> Storage:
        opened.append(Counting(inner))
        return opened[0]

    await take(url, state(1), wrap)
    assert opened[0].num_bytes > 5 * CHUNK
    await assert_holds(url, state(1))


async def test_what_changed_is_sent_anew(url: str) -> None:
    await die(url, state(1), fail_at=5, fail_verbs=["write_at"])
    changed = state(1)
    changed["model"]["weight"][CHUNK + CHUNK // 2] += 1
    changed["progress"]["step"] = 2
    sent = await sent_by(url, changed)
    assert 2 * CHUNK <= sent < 3.5 * CHUNK  # one that changed, and one that was missing
    await assert_holds(url, changed)


async def test_another_state_is_saved_as_it_is(url: str) -> None:
    await die(url, state(1), fail_at=5, fail_verbs=["write_at"])
    other = state(2, num_chunks=7)
    assert await sent_by(url, other) > 7 * CHUNK
    await assert_holds(url, other)


async def test_an_older_attempt_that_has_more_is_used_too(url: str) -> None:
    await die(url, state(1), fail_at=5, fail_verbs=["write_at"])
    await die(url, state(1), fail_at=2, fail_verbs=["reuse"])
    assert await sent_by(url, state(1)) < 2 * CHUNK
    await assert_holds(url, state(1))


@pytest.mark.parametrize("fail_when", [slow("before"), "after"])
async def test_killed_at_every_operation_and_resumed_twice(url: str, fail_when: str) -> None:
    for k in itertools.count(1):
        at = f"{url}/{k}"
        first = await die(at, state(1, 2), fail_at=k, fail_when=fail_when)
        if not first.was_hit:
            break
        for changed in (1, 3):
            with suppress(ObjectExists):
                await die(at, state(changed, 2), fail_at=k + changed, fail_when=fail_when)
        is_there = await is_committed(at)
        await sent_by(at, state(4, 2), overwrite=is_there)
        await assert_holds(at, state(4, 2))
        assert await leftovers(at) == []
    assert k > 8


async def is_committed(url: str) -> bool:
    try:
        await Snapshot(url).get_manifest()
    except ActorSnapError:
        return False
    return True


async def test_a_save_that_runs_is_not_resumed(url: str) -> None:
    barrier = Barrier(3, verbs=frozenset({"write_at"}))
    with faulty(lambda inner: BarrierStorage(inner, barrier)):
        pending = await Snapshot.async_take(faulty_url(url), state(1), options=OPTIONS)
        assert await asyncio.to_thread(barrier.wait_reached)
    assert await sent_by(url, state(1)) > 5 * CHUNK
    barrier.release()
    with pytest.raises(ObjectExists):
        await pending.wait()
    await assert_holds(url, state(1))


@contextmanager
def on_another_host() -> Iterator[None]:
    """Within, saves of this process look like those of another one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maintenance, "host_id", lambda: "0" * 8)
        yield


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("at", "overwrite"),
    # A writer, writes, the end of the object, a manifest, and a commit that replaces another.
    [(2, False), (5, False), (8, False), (9, False), (5, True), (8, True), (9, True), (10, True)],
)
async def test_a_zombie_that_goes_on_changes_nothing(url: str, at: int, overwrite: bool) -> None:
    """It saves another state, and is held at one of its operations meanwhile."""
    verbs = frozenset({"writer", "write_at", "complete", "put"})
    barrier = Barrier(at, verbs=verbs)
    with faulty(lambda inner: BarrierStorage(inner, barrier)):
        pending = await Snapshot.async_take(
            faulty_url(url), state(2), overwrite=overwrite, options=OPTIONS
        )
        assert await asyncio.to_thread(barrier.wait_reached)
    with on_another_host():
        await sent_by(url, state(1))
    await assert_holds(url, state(1))
    barrier.release()
    try:
        await pending.wait()
    except ActorSnapError:
        await assert_holds(url, state(1))
    else:
        assert overwrite
        await assert_holds(url, state(2))


async def test_resume_must_be_a_bool(url: str) -> None:
    with pytest.raises(UsageError, match="resume"):
        await Snapshot.take(url, state(1), resume="yes")  # type: ignore[arg-type]


# --- object stores --------------------------------------------------------------------------------

PART = 10 * MIB


@pytest.fixture(scope="module")
def zygote() -> Zygote:
    return Zygote.shared()


@pytest.fixture(params=[pytest.param("moto", marks=pytest.mark.slow), "ceph"])
def server(request: pytest.FixtureRequest) -> S3Server:
    server = request.getfixturevalue(request.param)
    assert isinstance(server, MotoServer | CephServer)
    return server


def test_a_killed_upload_is_resumed(zygote: Zygote, server: S3Server) -> None:
    url = server.url(server.make_bucket(), "step-1")
    options = {**server.storage_options(), "part_bytes": PART}
    ending = zygote.call("save_model_and_die", url=url, storage_options=options, seed=1, at=4)
    assert ending.was_killed
    sent = asyncio.run(_resume(url, options))
    # Of 60 MiB in parts of 10 to 12, three were there.
    assert 23 * MIB < sent < 31 * MIB


async def _resume(url: str, options: dict[str, Any]) -> int:
    sent = await sent_by(url, state(1, 30), storage_options=options)
    await assert_holds(url, state(1, 30), storage_options=options)
    return sent


@pytest.mark.parametrize(
    ("at", "missing_bytes"),
    # Some components of one or two MiB are there; all of the object; or it is composed of them.
    [(21, 21 * MIB), slow(32, 0), slow(33, 60 * MIB)],
)
def test_killed_components_are_resumed(
    zygote: Zygote, fake_gcs: FakeGcsServer, at: int, missing_bytes: int
) -> None:
    url = fake_gcs.url(fake_gcs.make_bucket(), "step-1")
    options = fake_gcs.storage_options()
    ending = zygote.call("save_model_and_die", url=url, storage_options=options, seed=1, at=at)
    assert ending.was_killed
    find_opener(url)  # imports the backend, here and not on the event loop
    sent = asyncio.run(_resume(url, options))
    assert missing_bytes <= sent < missing_bytes + MIB


@pytest.mark.parametrize("name", [slow("moto"), "fake_gcs"])
def test_garbage_of_a_killed_upload_is_collected(
    zygote: Zygote, request: pytest.FixtureRequest, name: str
) -> None:
    server: Server = request.getfixturevalue(name)
    url = server.url(server.make_bucket(), "step-1")
    options = server.storage_options()
    arguments = {"url": url, "storage_options": options}
    assert zygote.call("save_model_and_die", **arguments, seed=1, at=2).was_killed
    assert zygote.call("folders_and_garbage", **arguments).result() == [1, 1, 0]
