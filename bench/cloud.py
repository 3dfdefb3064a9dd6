# SPDX-License-Identifier: Apache-2.0
"""Object stores: what does the client cost, and who is faster on a real server?

As ``bench/local.py``: one JSON line per row (``ROWS``), contenders in turns, ratios between
medians of one run, and what was sent is read back and compared outside the clock. The sink is
``bench/sink.py``, which costs nothing, so that the client is seen alone; the other servers are
those of the tests. CPU seconds are those of this process and of the programs that it runs.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from actorsnap import Options, Phase, Snapshot, StateDict
from actorsnap.sync import Snapshot as SyncSnapshot
from bench import sink
from bench.cloud_peers import (
    OBJECT_CLIENTS,
    STATE_CLIENTS,
    Actorsnap,
    ActorsnapStorage,
    Client,
    ObjectClient,
    Raw,
    StateClient,
)
from bench.local import (
    OURS,
    RAW,
    Contest,
    Need,
    Setting,
    best_of,
    child,
    emit,
    facts_of,
    folder,
    note,
    ratio,
    status_kib,
)
from bench.state import State, compare, llama, scramble, state_bytes
from tests.servers.base import GcsServer, S3Server, Server, ServerFailed
from tests.servers.ceph import CephServer
from tests.servers.fake_gcs import FakeGcsServer
from tests.support.proxy import Exchange, FaultProxy

MIB = 1 << 20
GIB = 1 << 30

LATENCY_S = 0.05
RATE_MIB_S = 200
BUDGET_MIB = 256
SPARE_MIB = 64
LIMIT_S = 120
"""Of one contender's way up and down."""

ServerT = TypeVar("ServerT", bound=Server)

_numbers = count(1)


# Servers ------------------------------------------------------------------------------------


class Sink(S3Server):
    """``bench/sink.py`` in a process of its own, as S3.

    It throws away what is sent to the buckets of ``make_bucket``, and keeps that of ``kept``.
    """

    @classmethod
    def missing(cls) -> str | None:
        return None

    def _launch(self) -> None:
        # -I: nothing of the environment; -S: no packages.
        self._spawn(sys.executable, "-I", "-S", sink.__file__, str(self.port))

    def empty(self, bucket: str) -> None:
        """Lets go what was kept."""
        request = urllib.request.Request(f"{self.endpoint}/{bucket}", method="DELETE")
        urllib.request.urlopen(request).close()


class GcsSink(GcsServer):
    """The same, as Google Cloud Storage."""

    @classmethod
    def missing(cls) -> str | None:
        return None

    def _launch(self) -> None:
        self._spawn(sys.executable, "-I", "-S", sink.__file__, str(self.port))


@contextmanager
def running(kind: type[ServerT]) -> Iterator[ServerT]:
    """A server, which the environment of this process names, too.

    Raises:
        ServerFailed: it cannot run here.
    """
    if reason := kind.missing():
        raise ServerFailed(f"{kind.__name__}: {reason}")
    before = dict(os.environ)
    with folder(Path("/dev/shm")) as path, kind(path) as server:
        os.environ.update(server.env())
        try:
            yield server
        finally:
            os.environ.clear()
            os.environ.update(before)


def new_url(server: Server, bucket: str) -> str:
    return server.url(bucket, f"run-{next(_numbers)}")


# Contenders ---------------------------------------------------------------------------------


class Task(ABC):
    """One contender's way up and down, over and over."""

    def __init__(self, name: str) -> None:
        self.name = name

    def before(self) -> None:
        """What of the way up is not counted."""
        return

    @abstractmethod
    def up(self, url: str) -> None: ...

    @abstractmethod
    def spoil(self) -> None:
        """Overwrites the memory that ``down`` fills."""

    @abstractmethod
    def down(self, url: str) -> None: ...

    @abstractmethod
    def check(self) -> None:
        """Raises unless what came down is what went up. Not counted, like ``before``."""


class ObjectTask(Task):
    """One object, from memory and to memory."""

    def __init__(self, client: ObjectClient, data: bytes, target: np.ndarray[Any, Any]) -> None:
        super().__init__(client.name)
        self._client, self._data, self.target = client, data, target

    def up(self, url: str) -> None:
        self._client.upload(f"{url}/object", self._data)

    def spoil(self) -> None:
        self.target.fill(0xA5)

    def down(self, url: str) -> None:
        self._client.download(f"{url}/object", self.target.data)

    def check(self) -> None:
        if not np.array_equal(self.target, np.frombuffer(self._data, np.uint8)):
            raise RuntimeError("what was downloaded is not what was uploaded")


class StateTask(Task):
    """A state, and another one to load into."""

    def __init__(self, client: StateClient, state: State, target: State) -> None:
        super().__init__(client.name)
        self._client, self._state, self._target = client, state, target

    def before(self) -> None:
        self._client.before_save(self._state)

    def up(self, url: str) -> None:
        self._client.save(self._state, url)

    def spoil(self) -> None:
        scramble(self._target)

    def down(self, url: str) -> None:
        self._client.load(url, self._target)

    def check(self) -> None:
        self._client.after_load(self._target)
        compare(self._state, self._target)


def tasks_of(clients: Sequence[Client], state: State, data: bytes) -> list[Task]:
    """What clients of states do with ``state``, and clients of objects with ``data``."""
    target = copy_of(state)
    buffer = np.zeros(len(data), np.uint8)
    tasks: list[Task] = []
    for client in clients:
        if isinstance(client, StateClient):
            tasks.append(StateTask(client, state, target))
        else:
            assert isinstance(client, ObjectClient)
            tasks.append(ObjectTask(client, data, buffer))
    return tasks


def copy_of(state: State) -> State:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


@dataclass(slots=True)
class Costs:
    """Of each contender's runs, the first one included, which does not count."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: dict[str, list[float]] = field(default_factory=dict)

    def of(self, name: str, work: Callable[[], object]) -> float:
        """Runs ``work``; returns its seconds."""
        cpu_s, begin_s = _cpu_s(), time.perf_counter()
        work()
        elapsed = time.perf_counter() - begin_s
        self.cpu_s.setdefault(name, []).append(_cpu_s() - cpu_s)
        self.seconds.setdefault(name, []).append(elapsed)
        return elapsed


def _cpu_s() -> float:
    """Of this process and of the programs that it has run."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + used.ru_utime + used.ru_stime


@contextmanager
def limited() -> Iterator[None]:
    """Some clients wait without a deadline. In the main thread only.

    Raises:
        TimeoutError: ``LIMIT_S`` are over.
    """

    def late(*_: object) -> None:
        raise TimeoutError(f"took over {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Match:
    """Contenders on one server, up and down in the same turns.

    Those that do not speak its protocol are no contenders; those that cannot be had, or fail,
    are missing.
    """

    def __init__(self, server: Server, clients: Sequence[Client], nbytes: int) -> None:
        self.contest = Contest()
        self.ups, self.downs = Costs(), Costs()
        self._server = server
        self._nbytes = nbytes
        self._storage = ActorsnapStorage()  # looks what is there, and deletes it
        self._storage.open(server)
        self.clients: list[Client] = []
        for client in clients:
            if server.scheme not in client.schemes:
                continue
            try:
                client.open(server)
            except Exception as error:
                self._out(client.name, error)
            else:
                self.clients.append(client)

    def __enter__(self) -> Match:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self.clients:
            client.close()
        self._storage.close()

    def _out(self, name: str, error: Exception) -> None:
        note(f"  {name}: {type(error).__name__}: {error}")
        self.contest.out(name, error)

    def rehearse(self, tasks: Sequence[Task], bucket: str) -> None:
        """Each once; who fails does not come on."""
        for task in tasks:
            url = new_url(self._server, bucket)
            try:
                with limited():
                    task.up(url)
                    task.spoil()
                    task.down(url)
                    task.check()
            except Exception as error:
                self._out(task.name, error)
            else:
                self._storage.delete_below(url)

    def play(self, tasks: Sequence[Task], bucket: str, repeat: int) -> None:
        for task in tasks:
            self.contest.add(task.name, partial(self._run, task, bucket))
        self.contest.play(repeat)

    @limited()
    def _run(self, task: Task, bucket: str) -> float:
        """Returns the seconds of both ways: what is slow in either is measured once."""
        url = new_url(self._server, bucket)
        task.before()
        elapsed = self.ups.of(task.name, lambda: task.up(url))
        if (found := self._storage.num_bytes(url)) < self._nbytes:
            raise RuntimeError(f"{found} of {self._nbytes} bytes are stored")
        task.spoil()
        elapsed += self.downs.of(task.name, lambda: task.down(url))
        task.check()
        self._storage.delete_below(url)
        return elapsed

    def emit(
        self, row: str, costs: Costs, needs: dict[str, Need], *, state: State, place: str
    ) -> None:
        """One way. Ratios that need not reach anything are told, too."""
        names = self.contest.seconds
        gib = self._nbytes / GIB
        seconds = {name: costs.seconds[name][1:] for name in names}
        cpu = {name: statistics.median(costs.cpu_s[name][1:]) / gib for name in names}
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        ours = medians.get(OURS)
        peers = [name for name in medians if name != RAW and not name.startswith(OURS)]
        best, best_s = best_of(medians, peers)
        emit(
            row,
            ratios={
                "client CPU s/GiB": cpu.get(OURS),
                "GiB/s": ratio(gib, ours),
                "of raw": ratio(medians.get(RAW), ours),
                "x best peer": ratio(best_s, ours),
                **{f"x {name}": ratio(medians[name], ours) for name in peers},
            },
            needs=needs,
            missing=self.contest.missing,
            best_peer=best,
            cpu_s_per_gib={name: round(value, 3) for name, value in cpu.items()},
            **facts_of(state, seconds, place),
        )


# The client alone ---------------------------------------------------------------------------

UPLOAD_NEEDS = {
    "client CPU s/GiB": Need(0.33, at_least=False),
    "GiB/s": Need(2.0),
    "x boto3": Need(4.0),
    "x s3torchconnector": Need(3.5),
}
DOWNLOAD_NEEDS = {
    "client CPU s/GiB": Need(0.42, at_least=False),
    "x obstore": Need(1.3),
    "x boto3": Need(4.0),
}
SAMPLE_GIB = 1 / 32


def zeros(gib: float) -> State:
    """A state that the sink gives back, which remembers nothing."""
    state = llama(gib)
    for tensor in state.values():
        tensor.fill_(0.0)  # in memory of its own: torch.zeros would share one page
    return state


def sink_rows(
    setting: Setting, kind: type[Server], row: str, needs: tuple[dict[str, Need], dict[str, Need]]
) -> None:
    """Up and down with zeros; before, random bytes have to come back."""
    note(row)
    state, sample = zeros(setting.gib), llama(SAMPLE_GIB)
    nbytes = state_bytes(state)
    clients = [Actorsnap(), ActorsnapStorage(), Raw(), *(make() for make in OBJECT_CLIENTS)]
    with running(kind) as server, Match(server, clients, nbytes) as match:
        data = os.urandom(state_bytes(sample))
        match.rehearse(tasks_of(match.clients, sample, data), "kept")
        tasks = tasks_of(match.clients, state, b"\0" * nbytes)
        match.play(tasks, server.make_bucket(), setting.repeat)
        match.emit(f"{row} upload", match.ups, needs[0], state=state, place="sink")
        match.emit(f"{row} download", match.downs, needs[1], state=state, place="sink")


def row_sink(setting: Setting) -> None:
    sink_rows(setting, Sink, "cloud sink", (UPLOAD_NEEDS, DOWNLOAD_NEEDS))


def row_sink_gs(setting: Setting) -> None:
    sink_rows(setting, GcsSink, "cloud sink gs", ({}, {}))


# Real servers -------------------------------------------------------------------------------


def server_rows(setting: Setting, kind: type[Server], place: str) -> None:
    note(f"cloud {place}")
    state = llama(setting.gib)
    clients = [Actorsnap(), *(make() for make in STATE_CLIENTS)]
    needs = {"x best peer": Need(1.0)}
    with running(kind) as server, Match(server, clients, state_bytes(state)) as match:
        match.play(tasks_of(match.clients, state, b""), server.make_bucket(), setting.repeat)
        match.emit(f"cloud {place} take", match.ups, needs, state=state, place=place)
        match.emit(f"cloud {place} restore", match.downs, needs, state=state, place=place)


def row_ceph(setting: Setting) -> None:
    server_rows(setting, CephServer, "ceph")


def row_fake_gcs(setting: Setting) -> None:
    server_rows(setting, FakeGcsServer, "fake-gcs")


# A slow network -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trace:
    """A save: when each kind of work began and ended, in seconds from the call on.

    Attributes:
        seconds: Until it was committed.
        returned_s: Until the caller had the outcome: garbage was looked for then.
    """

    seconds: float
    returned_s: float
    spans: dict[str, tuple[float, float]]

    @property
    def overlap(self) -> float:
        """For how much of the save staging, hashing and storing were all under way."""
        begin = max(begin for begin, _ in self.spans.values())
        end = min(end for _, end in self.spans.values())
        return max(0.0, end - begin) / self.seconds


async def traced_take(url: str, state: State, storage_options: dict[str, Any]) -> Trace:
    """Saves with staging memory for a quarter: the rest is staged while that is stored.

    The budget is the process's, and stays.
    """
    begin_s = time.perf_counter()
    pending = await Snapshot.async_take(
        url,
        {"model": StateDict(state)},
        storage_options=storage_options,
        options=Options(memory_budget_bytes=state_bytes(state) // 4),
    )
    counted = [(time.perf_counter() - begin_s, event) async for event in pending.events()]
    await pending
    returned_s = time.perf_counter() - begin_s
    kinds = ("staged", "hashed", "stored")
    committed_s = min(at for at, event in counted if event.phase == Phase.COMMITTED)
    return Trace(
        committed_s,
        returned_s,
        {kind: span_of([(at, getattr(e, f"{kind}_bytes")) for at, e in counted]) for kind in kinds},
    )


def span_of(counted: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """When a counter was last seen at zero, and first at its last value."""
    last = counted[-1][1]
    return (
        max((at for at, value in counted if value == 0), default=0.0),
        min(at for at, value in counted if value == last),
    )


def slow_row(setting: Setting, kind: type[S3Server], place: str) -> None:
    row = f"cloud {place}, {LATENCY_S * 1e3:.0f} ms, {RATE_MIB_S} MiB/s"
    note(row)
    state = zeros(setting.gib)
    target = copy_of(state)
    traces: list[Trace] = []
    contest = Contest()
    with (
        running(kind) as server,
        FaultProxy(server.endpoint, latency_s=LATENCY_S, bytes_per_s=RATE_MIB_S * MIB) as proxy,
    ):
        bucket = server.make_bucket()

        def run() -> float:
            url = new_url(server, bucket)
            traces.append(asyncio.run(traced_take(url, state, server.storage_options(proxy))))
            scramble(target)
            snapshot = SyncSnapshot(url, storage_options=server.storage_options())
            snapshot.restore({"model": StateDict(target)})
            compare(state, target)
            snapshot.delete()
            return traces[-1].seconds

        contest.add(OURS, run)
        contest.play(setting.repeat)
    ideal_s = state_bytes(state) / (RATE_MIB_S * MIB)
    counted = traces[1:]
    last = counted[-1].spans if counted else {}
    emit(
        row,
        ratios={
            "x bytes / bandwidth": ratio(contest.medians().get(OURS), ideal_s),
            "all at once, of the time": (
                statistics.median(trace.overlap for trace in counted) if counted else None
            ),
        },
        needs={
            "x bytes / bandwidth": Need(1.1, at_least=False),
            "all at once, of the time": Need(0.5),
        },
        missing=contest.missing,
        ideal_s=round(ideal_s, 4),
        last_run_returned_s=round(counted[-1].returned_s, 4) if counted else None,
        last_run_spans_s={kind: [round(at, 3) for at in span] for kind, span in last.items()},
        **facts_of(state, contest.seconds, place),
    )


def row_slow(setting: Setting) -> None:
    slow_row(setting, Sink, "sink")
    slow_row(setting, CephServer, "ceph")


# One tensor of many -------------------------------------------------------------------------

TENSOR_BYTES = MIB
NUM_READ = 8


def row_one(setting: Setting) -> None:
    note("cloud read one tensor")
    num_tensors = max(2 * NUM_READ, round(setting.gib * GIB / TENSOR_BYTES))
    generator = torch.Generator().manual_seed(20260104)
    state = {
        f"t{i}": torch.rand(TENSOR_BYTES // 4, generator=generator) for i in range(num_tensors)
    }
    opening: list[Exchange] = []
    most_bytes = most_requests = 0.0
    with running(Sink) as server, FaultProxy(server.endpoint) as proxy:
        url = new_url(server, "kept")
        app_state = {"model": StateDict(state)}
        SyncSnapshot.take(url, app_state, storage_options=server.storage_options())
        for index in range(0, num_tensors, num_tensors // NUM_READ):
            name = f"t{index}"
            proxy.forget()
            snapshot = SyncSnapshot(url, storage_options=server.storage_options(proxy))
            snapshot.get_manifest()
            opening = proxy.exchanges()
            proxy.forget()
            compare({name: state[name]}, {name: snapshot.read_object(f"model/{name}")})
            reading = proxy.exchanges()
            most_requests = max(most_requests, len(reading))
            most_bytes = max(most_bytes, sum(each.bytes_down for each in reading))
    emit(
        "cloud read one tensor",
        ratios={
            "bytes transferred / needed": most_bytes / TENSOR_BYTES,
            "requests after opening": most_requests,
        },
        needs={
            "bytes transferred / needed": Need(1.1, at_least=False),
            "requests after opening": Need(3, at_least=False),
        },
        missing={},
        tensors=num_tensors,
        opening_requests=len(opening),
        opening_bytes=sum(each.bytes_down for each in opening),
    )


# Memory -------------------------------------------------------------------------------------


def child_memory(way: str, url: str, gib: float) -> None:
    """In a process of its own: by how much a save or a restore raises the peak of resident memory.

    The environment names the server. Imports are made before; threads, buffers and the rest of
    a first call count.
    """
    state = zeros(gib)
    app_state = {"model": StateDict(state)}
    options = Options(memory_budget_bytes=BUDGET_MIB * MIB)
    gc.collect()
    before = status_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    if way == "up":
        SyncSnapshot.take(url, app_state, options=options)
    else:
        SyncSnapshot(url, options=options).restore(app_state)
    growth = status_kib("VmHWM") - before
    if any(tensor.any() for tensor in state.values()):
        raise RuntimeError("what was restored is not what was saved")
    print(json.dumps({"growth_mib": round(growth / 1024, 1)}))


def row_memory(setting: Setting) -> None:
    note("cloud extra memory")
    gib = 4 * setting.gib
    growth: dict[str, float] = {}
    missing: dict[str, str] = {}
    with running(Sink) as server:
        url = new_url(server, server.make_bucket())
        for way in ("up", "down"):
            try:
                found = child("--child-cloud-memory", way, url, "--gib", str(gib))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                missing[way] = str(error)[:200]
                continue
            growth[way] = found["growth_mib"]
            note(f"  {way}: {growth[way]:.0f} MiB")
    emit(
        f"cloud extra memory, {gib:g} GiB, budget {BUDGET_MIB} MiB",
        ratios={way: growth.get(way) for way in ("up", "down")},
        needs={way: Need(BUDGET_MIB + SPARE_MIB, at_least=False) for way in ("up", "down")},
        missing=missing,
        unit="MiB of peak resident memory above the state",
        growth_mib=growth,
    )


ROWS: dict[str, Callable[[Setting], None]] = {
    "cloud-sink": row_sink,
    "cloud-sink-gs": row_sink_gs,
    "cloud-ceph": row_ceph,
    "cloud-fake-gcs": row_fake_gcs,
    "cloud-slow": row_slow,
    "cloud-one": row_one,
    "cloud-memory": row_memory,
}
