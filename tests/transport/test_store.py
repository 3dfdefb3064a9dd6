# SPDX-License-Identifier: Apache-2.0
"""The store transport inside one process: two ports on one store."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, cast

import anyio
import msgspec
import pytest

from actorsnap.protocol.messages import Arrived, Proceed
from actorsnap.transport.ends import Began, Broken, PeerLost
from actorsnap.transport.mailbox import Frame, Kind
from actorsnap.transport.store import StoreCoordinator, StorePort, StoreSave
from tests.conftest import LeakCheck
from tests.support.cases import slow
from tests.support.store_server import serve_store


def ask(rank: int, data: bytes = b"") -> Arrived:
    return Arrived(rank, 0, data)


def tell(text: str) -> Proceed:
    return Proceed(0, text.encode())


Opener = Callable[..., StorePort]


class DictStore:
    """Queues of this process. (``HashStore`` wakes any one waiter at a push, maybe another
    queue's, so two mailboxes cannot wait at it.)"""

    def __init__(self) -> None:
        self._queues: dict[str, deque[bytes]] = defaultdict(deque)
        self._changed = threading.Condition()

    def clone(self) -> DictStore:
        return self

    def set_timeout(self, timeout: object) -> None: ...

    def queue_len(self, key: str) -> int:
        return len(self._queues[key])

    def queue_push(self, key: str, value: bytes) -> None:
        with self._changed:
            self._queues[key].append(value)
            self._changed.notify_all()

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: self._queues[key], 20 if block else 0)
            return self._queues[key].popleft()


@pytest.fixture(params=["tcp", "dict"])
def store(request: pytest.FixtureRequest) -> Any:
    if request.param == "dict":
        return DictStore()
    return serve_store()


@pytest.fixture
def open_port() -> Iterator[Opener]:
    opened: list[StorePort] = []

    def make(store: Any, rank: int, **options: Any) -> StorePort:
        port = StorePort(
            store,
            namespace="job",
            rank=rank,
            world_size=options.pop("world_size", 2),
            call_soon=cast(Any, asyncio.get_running_loop().call_soon_threadsafe),
            **options,
        )
        opened.append(port)
        return port

    yield make
    for port in opened:
        port.close()


def coordinator(save: StoreSave) -> Any:
    assert save.coordinator is not None
    return save.coordinator


async def received(end: Any, within_s: float = 60.0) -> Any:
    with anyio.fail_after(within_s):
        return await end.receive()


async def nothing(end: Any) -> None:
    with anyio.move_on_after(0.15):
        pytest.fail(f"unexpected: {await end.receive()}", pytrace=False)


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(60):
        while not holds():  # noqa: ASYNC110 - threads change it
            await anyio.sleep(0.005)


async def closed(port: StorePort) -> None:
    await anyio.to_thread.run_sync(port.close)


def raw(store: Any, rank: int, frame: Frame | bytes) -> None:
    data = frame if isinstance(frame, bytes) else msgspec.msgpack.encode(frame)
    store.queue_push(f"actorsnap/job/{rank}", data)


def session_of(port: StorePort) -> bytes:
    return port._token


def left_in(store: Any) -> list[int]:
    return [store.queue_len(f"actorsnap/job/{rank}") for rank in (0, 1)]


async def test_messages_keep_their_order(store: Any, open_port: Opener) -> None:
    ports = [open_port(store, rank) for rank in (0, 1)]
    saves = [port.begin() for port in ports]
    for number in range(100):
        await saves[1].participant.send(ask(1, b"%d" % number))
    for number in range(100):
        assert await received(saves[0].coordinator) == ask(1, b"%d" % number)
        await coordinator(saves[0]).send(1, tell(str(number)))
    for number in range(100):
        assert await received(saves[1].participant) == tell(str(number))
    for save in saves:
        save.close()
    # A heartbeat or leave that comes after its receiver's leave stays in the mailbox.
    await until(lambda: [port._mailbox.beat for port in ports] == [None, None])
    ports[0].send_down(1, 1, tell("after the last heartbeat"))
    await until(lambda: 1 in ports[1]._kept)
    await closed(ports[1])
    await until(lambda: 1 in ports[0]._left)
    await closed(ports[0])
    sent, got = (port.statistics for port in ports)
    assert (sent.messages_sent, got.messages_received) == (101, 101)
    assert (got.messages_sent, sent.messages_received) == (100, 100)
    assert got.bytes_sent < 100 * 40
    assert left_in(store) == [0, 0]


async def test_a_message_larger_than_the_store_takes(store: Any, open_port: Opener) -> None:
    saves = [open_port(store, rank).begin() for rank in (0, 1)]
    large = ask(1, bytes(range(256)) * (9 << 12))
    await saves[1].participant.send(ask(1))
    await saves[1].participant.send(large)
    await saves[1].participant.send(ask(1))
    assert [await received(saves[0].coordinator) for _ in range(3)] == [ask(1), large, ask(1)]


async def test_messages_to_oneself_stay_here(store: Any, open_port: Opener) -> None:
    port = open_port(store, 0)
    save = port.begin()
    question, answer = ask(0), tell("x")
    await save.participant.send(question)
    assert await received(save.coordinator) is question
    await coordinator(save).send(0, answer)
    assert await received(save.participant) is answer
    assert port.statistics.messages_sent == 0


async def test_what_comes_before_its_save_is_begun_waits(store: Any, open_port: Opener) -> None:
    ports = [open_port(store, rank) for rank in (0, 1)]
    early = [ports[1].begin() for _ in range(3)]
    for number in (2, 0, 1):
        await early[number].participant.send(ask(1, b"%d" % number))
    await until(lambda: len(ports[0]._kept) == 3)
    for number in range(3):
        save = ports[0].begin()
        assert save.number == number
        assert await received(save.coordinator) == ask(1, b"%d" % number)
        await nothing(save.coordinator)


async def test_an_answer_may_come_before_the_rank_does(store: Any, open_port: Opener) -> None:
    first = open_port(store, 0).begin()
    await coordinator(first).send(1, tell("aborted"))
    assert await received(open_port(store, 1).begin().participant) == tell("aborted")


async def test_late_and_repeated_frames(store: Any, open_port: Opener) -> None:
    ports = [open_port(store, rank) for rank in (0, 1)]
    saves = [port.begin() for port in ports]
    payload = msgspec.msgpack.encode(ask(1))
    frame = Frame(Kind.UP, 1, session_of(ports[0]), 0, payload)
    for _ in range(2):
        raw(store, 0, frame)
        assert await received(saves[0].coordinator) == ask(1)
    saves[0].close()
    following = ports[0].begin()
    raw(store, 0, frame)
    await until(lambda: ports[0].statistics.num_dropped == 1)
    await nothing(following.coordinator)
    for end in (saves[0].participant, saves[0].coordinator):
        with pytest.raises(anyio.ClosedResourceError):
            await received(end)
    with pytest.raises(anyio.ClosedResourceError):
        await saves[0].participant.send(ask(0))


async def test_a_rank_may_be_many_saves_behind(store: Any, open_port: Opener) -> None:
    ports = [open_port(store, rank) for rank in (0, 1)]
    for number in range(40):
        await ports[1].begin().participant.send(ask(1, b"%d" % number))
    await until(lambda: len(ports[0]._kept) == 40)
    for number in range(40):
        assert await received(ports[0].begin().coordinator) == ask(1, b"%d" % number)


async def test_rubbish_does_not_stop_the_thread(
    store: Any, open_port: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    ports = [open_port(store, rank) for rank in (0, 1)]
    saves = [port.begin() for port in ports]
    session = session_of(ports[0])
    wrong = msgspec.msgpack.encode(tell("not for a coordinator"))
    rubbish: list[Frame | bytes] = [
        b"",
        b"\xff" * 100,
        msgspec.msgpack.encode([99, 1, b"x"]),
        Frame(Kind.UP, 1, session, 0, wrong),
        Frame(Kind.UP, 1, session, 0, b"\xc1"),
        Frame(Kind.BEAT, 1, session, payload=b"rubbish"),
        Frame(Kind.UP, 7, session, 0, msgspec.msgpack.encode(ask(7))),
        Frame(Kind.STOP, 0, b"another"),
    ]
    for frame in rubbish:
        raw(store, 0, frame)
    await saves[1].participant.send(ask(1))
    assert await received(saves[0].coordinator) == ask(1)
    statistics = ports[0].statistics
    assert statistics.num_dropped + statistics.num_undecodable == len(rubbish)
    assert "dropped a frame" in caplog.text


async def test_what_an_earlier_job_left_is_not_taken(store: Any, open_port: Opener) -> None:
    old = b"oldoldol"
    raw(store, 0, Frame(Kind.HELLO, 1, b"its-rank"))
    raw(store, 0, Frame(Kind.UP, 1, old, 0, msgspec.msgpack.encode(ask(1, b"old"))))
    raw(store, 1, Frame(Kind.WELCOME, 0, old, payload=b"its-rank"))
    raw(store, 1, Frame(Kind.DOWN, 0, old, 0, msgspec.msgpack.encode(tell("old"))))
    raw(store, 1, Frame(Kind.BYE, 0, old))
    saves = [open_port(store, rank).begin() for rank in (0, 1)]
    await saves[1].participant.send(ask(1, b"new"))
    assert await received(saves[0].coordinator) == ask(1, b"new")
    await coordinator(saves[0]).send(1, tell("new"))
    assert await received(saves[1].participant) == tell("new")


async def test_a_rank_takes_its_leave(store: Any, open_port: Opener) -> None:
    ports = [open_port(store, rank) for rank in (0, 1)]
    saves = [port.begin() for port in ports]
    await saves[1].participant.send(ask(1))
    assert await received(saves[0].coordinator) == ask(1)
    await closed(ports[1])
    assert isinstance(await received(saves[1].participant), Broken)
    assert await received(saves[0].coordinator) == PeerLost(rank=1, silent_s=0.0)
    assert await received(coordinator(ports[0].begin())) == PeerLost(rank=1, silent_s=0.0)
    # It comes back.
    again = open_port(store, 1, first_number=2).begin()
    await again.participant.send(ask(1, b"again"))
    await until(lambda: 2 in ports[0]._kept)
    assert await received(coordinator(ports[0].begin())) == ask(1, b"again")


async def test_the_coordinator_takes_its_leave(store: Any, open_port: Opener) -> None:
    ports = [open_port(store, rank) for rank in (0, 1)]
    saves = [port.begin() for port in ports]
    await saves[1].participant.send(ask(1))
    assert await received(saves[0].coordinator) == ask(1)
    await closed(ports[0])
    assert await received(saves[1].participant) == PeerLost(rank=0, silent_s=0.0)
    saves[1].close()
    # A new port of it has a session of its own.
    new = open_port(store, 0, first_number=1).begin()
    following = ports[1].begin()
    await following.participant.send(ask(1, b"following"))
    assert await received(new.coordinator) == ask(1, b"following")


async def test_a_rank_leaves_a_topic(store: Any, open_port: Opener) -> None:
    ports = [open_port(store, rank, world_size=3) for rank in (0, 1)]
    begun = [port.begin(tag=b"tag", topic=b"topic") for port in ports]
    await begun[1].participant.send(ask(1))
    assert await received(begun[0].coordinator) == Began(rank=0, tag=b"tag")
    assert await received(begun[0].coordinator) == Began(rank=1, tag=b"tag")
    assert await received(begun[0].coordinator) == ask(1)
    waiting, other = ports[0].begin(topic=b"topic"), ports[0].begin(topic=b"other")
    ports[1].invitations.leave(b"topic", "closed it")
    lost = PeerLost(rank=1, silent_s=0.0, how="closed it")
    assert await received(waiting.coordinator) == lost
    assert await received(coordinator(ports[0].begin(topic=b"topic"))) == lost
    # It goes on with what it has begun, and with other topics.
    await begun[1].participant.send(ask(1, b"more"))
    assert await received(begun[0].coordinator) == ask(1, b"more")
    ports[1].begin(number=other.number, tag=b"tag")
    assert await received(other.coordinator) == Began(rank=1, tag=b"tag")


async def test_the_coordinator_leaves_a_topic(store: Any, open_port: Opener) -> None:
    ports = [open_port(store, rank) for rank in (0, 1)]
    begun = [port.begin(topic=b"topic") for port in ports]
    await begun[1].participant.send(ask(1))
    assert await received(begun[0].coordinator) == ask(1)
    await coordinator(begun[0]).send(1, tell("begun"))
    waiting = ports[1].begin(topic=b"topic")
    ports[0].invitations.leave(b"topic", "closed it")
    lost = PeerLost(rank=0, silent_s=0.0, how="closed it")
    assert await received(waiting.participant) == lost
    assert await received(ports[1].begin(topic=b"topic").participant) == lost
    await coordinator(begun[0]).send(1, tell("more"))
    assert await received(begun[1].participant) == tell("begun")
    assert await received(begun[1].participant) == tell("more")


@pytest.mark.parametrize("store", [slow("tcp"), "dict"], indirect=True)
async def test_silence(store: Any, open_port: Opener) -> None:
    ports = [open_port(store, rank, world_size=3) for rank in (0, 1)]
    save, other = (port.begin(lost_after_s=1.2) for port in ports)
    await other.participant.send(ask(1))
    assert await received(save.coordinator) == ask(1)
    # It is heard as long as the save is in flight there, and rank 2, never heard, is not lost.
    with anyio.move_on_after(2.5):
        pytest.fail(f"unexpected: {await save.participant.receive()}", pytrace=False)
    assert coordinator(save)._heard.keys() == {1}
    other.close()
    found = await received(save.coordinator)
    assert isinstance(found, PeerLost)
    assert found.rank == 1
    assert 1.2 < found.silent_s < 60
    await nothing(save.coordinator)


@pytest.mark.few(1)
async def test_who_is_late_is_not_lost(store: Any, open_port: Opener) -> None:
    """A rank that others wait for says that it is there, and stops when nobody waits."""
    ports = [open_port(store, rank) for rank in (0, 1)]
    with ports[0].begin() as first, ports[1].begin() as other:
        await other.participant.send(ask(1))
        assert await received(first.coordinator) == ask(1)
    for early, late in ((0, 1), (1, 0)):
        save = ports[early].begin(lost_after_s=1.2)
        end = save.participant if save.coordinator is None else save.coordinator
        with anyio.move_on_after(2.5):
            pytest.fail(f"unexpected: {await end.receive()}", pytrace=False)
        save.close()
        await until(lambda: [port._mailbox.beat for port in ports] == [None, None])
        ports[late].begin().close()


@pytest.mark.few
@pytest.mark.parametrize("gone", [0, 1])
async def test_who_is_gone_since_the_save_before_is_lost(
    store: Any, open_port: Opener, gone: int
) -> None:
    ports = [open_port(store, rank) for rank in (0, 1)]
    with ports[0].begin() as first, ports[1].begin() as other:
        await other.participant.send(ask(1))
        assert await received(first.coordinator) == ask(1)
    ports[gone]._mailbox.stop()  # as if killed: it takes no leave
    save = ports[1 - gone].begin(lost_after_s=0.6)
    end = save.participant if save.coordinator is None else save.coordinator
    lost = await received(end)
    assert isinstance(lost, PeerLost)
    assert lost.rank == gone
    save.close()


@pytest.mark.few
@pytest.mark.parametrize("first", [0, 1])
async def test_the_coordinator_hears_once_of_every_rank_that_begins(
    store: Any, open_port: Opener, first: int
) -> None:
    ports = [open_port(store, each, beat_s=0.05) for each in (0, 1)]
    saves: list[Any] = [None, None]
    for rank in (first, 1 - first):
        saves[rank] = ports[rank].begin(tag=bytes([rank + 1]))
        await anyio.sleep(0.3)
    await saves[1].participant.send(ask(1))
    found = [await received(coordinator(saves[0])) for _ in range(3)]
    ranks = [found.pop(found.index(Began(rank=rank, tag=bytes([rank + 1])))) for rank in (0, 1)]
    assert len(ranks) == 2
    assert found == [ask(1)]
    await anyio.sleep(0.3)  # more heartbeats
    await nothing(coordinator(saves[0]))


class HoldingStore(DictStore):
    """Holds pushes while it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.goes = threading.Event()
        self.goes.set()
        self.is_holding = threading.Event()

    def queue_push(self, key: str, value: bytes) -> None:
        if not self.goes.is_set():
            self.is_holding.set()
            assert self.goes.wait(60)
        super().queue_push(key, value)


async def test_the_end_of_a_save_does_not_hide_the_begin_of_the_next(open_port: Opener) -> None:
    """Nor if both wait for a slow store."""
    store = HoldingStore()
    ports = [open_port(store, rank) for rank in (0, 1)]
    with ports[0].begin() as first, ports[1].begin() as other:
        await other.participant.send(ask(1))
        assert await received(first.coordinator) == ask(1)
        store.goes.clear()
        await other.participant.send(ask(1))
        await until(store.is_holding.is_set)
    await until(lambda: not ports[1]._open)
    following = ports[1].begin(tag=b"t")
    await until(lambda: 1 in ports[1]._open)
    await following.participant.send(ask(1, b"following"))
    store.goes.set()
    await until(lambda: 1 in ports[0]._kept)
    save = ports[0].begin()
    assert await received(save.coordinator) == Began(rank=1, tag=b"t")
    assert await received(save.coordinator) == ask(1, b"following")


def test_only_one_save_follows_another(open_port: Opener) -> None:
    """A call that is renewed and the caller's next one never get the same number."""

    async def run() -> None:
        port = open_port(DictStore(), 0)
        first = port.begin(lost_after_s=7.0, tag=b"t")
        second = port.begin_after(first)
        assert second is not None
        assert (second.number, second.tag, second.lost_after_s) == (1, b"t", 7.0)
        assert port.begin_after(first) is None
        assert port.begin().number == 2
        await closed(port)

    asyncio.run(run())


@pytest.mark.few
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_killed", [False, True])
async def test_another_process_continues_a_rank(
    store: Any, open_port: Opener, rank: int, is_killed: bool
) -> None:
    """Nobody is lost, and what is sent meanwhile waits in the mailbox."""
    ports = [open_port(store, each, beat_s=0.1) for each in (0, 1)]
    saves = [port.begin(lost_after_s=1.0) for port in ports]
    await saves[1].participant.send(ask(1))
    assert await received(saves[0].coordinator) == ask(1)
    await coordinator(saves[0]).send(1, tell("go"))
    assert await received(saves[1].participant) == tell("go")
    session = ports[rank].session
    if is_killed:
        ports[rank]._mailbox.stop(is_continued=True)  # takes no leave
        await until(lambda: not ports[rank]._mailbox._threads[1].is_alive())
    else:
        await anyio.to_thread.run_sync(lambda: ports[rank].close(is_continued=True))
    await anyio.sleep(0.3)
    if rank == 0:
        await saves[1].participant.send(ask(1, b"more"))
    else:
        await coordinator(saves[0]).send(1, tell("more"))
    await anyio.sleep(0.3)
    number = saves[rank].number
    successor = open_port(store, rank, session=session, first_number=number, beat_s=0.1)
    saves[rank] = successor.begin(lost_after_s=1.0, number=number)
    if rank == 0:
        assert await received(saves[0].coordinator) == ask(1, b"more")
        await coordinator(saves[0]).send(1, tell("done"))
        assert await received(saves[1].participant) == tell("done")
    else:
        assert await received(saves[1].participant) == tell("more")
        await saves[1].participant.send(ask(1, b"done"))
        assert await received(saves[0].coordinator) == ask(1, b"done")
    with anyio.move_on_after(1.5):
        end = saves[1].participant if rank == 0 else coordinator(saves[0])
        pytest.fail(f"unexpected: {await end.receive()}", pytrace=False)


async def test_numbers_that_are_agreed_upon_elsewhere(store: Any, open_port: Opener) -> None:
    ports = [open_port(store, rank) for rank in (0, 1)]
    for number in (3, 4, 11, 500):
        saves = [port.begin(number=number) for port in ports]
        assert [save.number for save in saves] == [number] * 2
        await saves[1].participant.send(ask(1, b"%d" % number))
        assert await received(saves[0].coordinator) == ask(1, b"%d" % number)
        for save in saves:
            save.close()
    # What comes for one that was left out waits for nobody, and no number is kept in mind.
    raw(store, 0, Frame(Kind.UP, 1, session_of(ports[0]), 7, msgspec.msgpack.encode(ask(1))))
    await until(lambda: ports[0].statistics.num_dropped == 1)
    assert (ports[0]._kept, ports[0]._registered_below) == ({}, 501)


class SlowToListen(DictStore):
    """The connection of the thread that receives stands late."""

    def __init__(self, shared: DictStore) -> None:
        super().__init__()
        self._shared = shared
        self.connects = threading.Event()

    def clone(self) -> DictStore:
        if threading.current_thread().name == "actorsnap-store-receive":
            assert self.connects.wait(60)
        return self._shared


async def test_who_cannot_listen_yet_says_nothing(open_port: Opener) -> None:
    shared = DictStore()
    slow = SlowToListen(shared)
    first = open_port(shared, 0).begin(lost_after_s=0.4)
    late = open_port(slow, 1).begin(lost_after_s=0.4)
    await late.participant.send(ask(1))
    with anyio.move_on_after(1.5):
        pytest.fail(f"unexpected: {await coordinator(first).receive()}", pytrace=False)
    assert shared.queue_len("actorsnap/job/0") == 0
    slow.connects.set()
    assert await received(coordinator(first)) == ask(1)


@pytest.mark.few(1)
async def test_a_process_that_was_stopped_reads_before_it_judges(
    store: Any, open_port: Opener
) -> None:
    now = [0.0]
    ports = [open_port(store, 0, clock=lambda: now[0]), open_port(store, 1, beat_s=0.05)]
    saves = [port.begin(lost_after_s=4) for port in ports]
    await saves[1].participant.send(ask(1))
    assert await received(saves[0].coordinator) == ask(1)
    for _ in range(2):
        now[0] += 3600
        with anyio.move_on_after(0.6):
            pytest.fail(f"unexpected: {await coordinator(saves[0]).receive()}", pytrace=False)


async def test_a_coordinator_that_was_stopped_knows_it(store: Any, open_port: Opener) -> None:
    now = [0.0]
    end, has_beaten = await beating(store, open_port, now)
    for step_s, text in ((19, None), (21, "was stopped for 21 s"), (1, "was stopped for 21 s")):
        now[0] += step_s
        suspicion = await end.suspicion()
        assert (suspicion is None) if text is None else (text in str(suspicion))
        await until(has_beaten)


async def beating(
    store: Any, open_port: Opener, now: list[float]
) -> tuple[StoreCoordinator, Callable[[], bool]]:
    """Returns an end, and whether its port has sent a heartbeat at the present time."""
    port = open_port(store, 0, beat_s=0.01, clock=lambda: now[0])
    end = coordinator(port.begin(lost_after_s=30))
    await until(lambda: port.is_connected and bool(port._open))

    def has_beaten() -> bool:
        return now[0] in (port._beaten_s, *port._mailbox.beaten)

    await until(has_beaten)
    return end, has_beaten


async def test_a_coordinator_that_asks_for_no_messages_was_not_stopped(
    store: Any, open_port: Opener
) -> None:
    """While it calls ``state_dict()``, for instance: its heartbeats go on."""
    now = [0.0]
    end, has_beaten = await beating(store, open_port, now)
    for _ in range(10):
        now[0] += 10
        await until(has_beaten)
    assert await end.suspicion() is None


async def test_a_message_that_cannot_be_encoded_breaks_its_save_only(
    store: Any, open_port: Opener
) -> None:
    ports = [open_port(store, rank) for rank in (0, 1)]
    bad, good = ports[1].begin(), ports[1].begin()
    await bad.participant.send(ask(1))
    await until(lambda: 0 in ports[0]._kept)
    await bad.participant.send(ask(1, object()))  # type: ignore[arg-type]
    assert isinstance(await received(bad.participant), Broken)
    ports[0].begin()
    await good.participant.send(ask(1, b"good"))
    assert await received(coordinator(ports[0].begin())) == ask(1, b"good")


async def test_a_cancelled_receive_loses_nothing(store: Any, open_port: Opener) -> None:
    saves = [open_port(store, rank).begin() for rank in (0, 1)]
    got: list[Any] = []
    for number in range(50):
        await saves[1].participant.send(ask(1, b"%d" % number))
    with anyio.fail_after(60):
        while len(got) < 50:
            with anyio.move_on_after(0.0002):
                got.append(await coordinator(saves[0]).receive())
    assert got == [ask(1, b"%d" % number) for number in range(50)]


async def test_closing(store: Any, open_port: Opener, no_leaks: LeakCheck) -> None:
    port = open_port(store, 0)
    save = port.begin()
    await until(lambda: port.is_connected)
    no_leaks.restart()
    raw(store, 0, b"unread")
    for _ in range(2):
        await closed(port)
    assert port.is_broken
    assert not [t for t in threading.enumerate() if t.name.startswith("actorsnap-store")]
    assert left_in(store) == [0, 0]
    for end in (save.participant, save.coordinator):
        found = await received(end)
        assert isinstance(found, Broken)
        assert "closed" in found.reason
        await nothing(end)
    assert isinstance(await received(port.begin().participant), Broken)


class FakeStore:
    """Fails or hangs as it is told."""

    def __init__(self, *, push: Exception | None = None, pop: Exception | None = None) -> None:
        self._push, self._pop = push, pop
        self.go = threading.Event()

    def clone(self) -> FakeStore:
        return self

    def set_timeout(self, timeout: object) -> None: ...

    def queue_len(self, key: str) -> int:
        return 0

    def queue_push(self, key: str, value: bytes) -> None:
        if self._push is not None:
            raise self._push
        self.go.wait()

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        if self._pop is not None:
            raise self._pop
        self.go.wait()
        raise RuntimeError("the end")


class QueueEmptyError(RuntimeError):
    """As torch calls it."""


@pytest.mark.parametrize(
    ("store", "reason"),
    [
        (FakeStore(pop=OSError("reset\nby peer")), "(OSError: reset)"),
        (FakeStore(push=ConnectionError("reset")), "(ConnectionError: reset)"),
        (FakeStore(pop=QueueEmptyError("queue is empty")), "two jobs use one store"),
    ],
)
async def test_a_store_that_fails(store: FakeStore, reason: str, open_port: Opener) -> None:
    port = open_port(store, 1)
    saves = [port.begin(), port.begin()]
    for save in saves:
        found = await received(save.participant)
        assert isinstance(found, Broken)
        assert reason in found.reason
        await save.participant.send(ask(1))
    assert port.is_broken
    assert isinstance(await received(port.begin().participant), Broken)
    store.go.set()


async def test_a_store_that_hangs(open_port: Opener, caplog: pytest.LogCaptureFixture) -> None:
    store = FakeStore()
    port = open_port(store, 1)
    with port.begin() as save, contextlib.suppress(TimeoutError):
        await received(save.participant, within_s=0.05)
    port.close(0.0)
    assert not caplog.records  # no time has passed
    began = time.monotonic()
    await anyio.to_thread.run_sync(port.close, 0.2)
    assert time.monotonic() - began < 20
    (line,) = [record.getMessage() for record in caplog.records if "answer" in record.msg]
    assert line.startswith("rank 1: the job's store did not answer within 0.2 s")
    store.go.set()
