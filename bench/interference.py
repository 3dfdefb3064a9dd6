# SPDX-License-Identifier: Apache-2.0
"""What does a save cost a trainer that goes on: the time it is blocked, and what its steps lose?

As ``bench/local.py``: one JSON line per row (``ROWS``), contenders in turns, ratios between medians
of one run, and what was saved is loaded back and compared outside the clock. In each turn a
contender's steps during the save are compared with those before and behind it
(``bench/trainer.py``).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from actorsnap import Options, StateDict
from actorsnap.runtime.host import Host
from actorsnap.sync import Snapshot
from bench.child import in_child
from bench.cloud import Sink, new_url, running
from bench.limits import RawCopy, RawFiles
from bench.local import RAW, Contest, Need, Setting, emit, facts_of, folder, note, ratio
from bench.ranks import module_of
from bench.savers import ActorsnapAwaited, ActorsnapBy, DcpBy, Nothing, Saver, Slow, TorchsnapshotBy
from bench.state import State, compare, llama, scramble, state_bytes
from bench.trainer import Disturbance, Trainer, disturb
from bench.world import Here, World
from tests.support.proxy import FaultProxy

__all__ = ["ROWS"]

UPLOAD_S = 10.0
"""So long the slow network takes for the state."""

MAX_SLOWDOWN = 0.02
NUM_SAVES = 6
NUM_RANKS = 2
RAW_WRITE = "raw write"
PACE_LIMITS = (None, 0.1, 0.05)
PACED = {"compression": "zstd:3", "chunk_bytes": 4 << 20}
"""What makes a save disturb: cores and the GIL are wanted for seconds, chunk by chunk."""

NUM_PACED_SAVES = 4


def local_savers() -> list[Saver]:
    return [
        ActorsnapBy("actorsnap"),
        ActorsnapBy("actorsnap process", offload="process"),
        ActorsnapBy("actorsnap thread", offload="thread"),
        ActorsnapAwaited("actorsnap await"),
        DcpBy("thread"),
        DcpBy("process"),
        TorchsnapshotBy(),
    ]


def slow_savers() -> list[Saver]:
    return [
        Nothing(UPLOAD_S),
        ActorsnapBy("actorsnap"),
        ActorsnapBy("actorsnap, max_slowdown", max_slowdown=MAX_SLOWDOWN),
        ActorsnapBy("actorsnap thread", offload="thread"),
        ActorsnapBy("actorsnap thread, max_slowdown", offload="thread", max_slowdown=MAX_SLOWDOWN),
        DcpBy("thread"),
        TorchsnapshotBy(),
    ]


@contextmanager
def opened(contest: Contest, savers: Sequence[Saver], slow: Slow | None) -> Iterator[list[Saver]]:
    """Those that can be had; the others are noted as missing."""
    ready: list[Saver] = []
    try:
        for saver in savers:
            try:
                saver.open(slow)
            except Exception as exc:
                contest.out(saver.name, exc)
            else:
                ready.append(saver)
        yield ready
    finally:
        for saver in ready:
            saver.close()


class Race:
    """Savers in turns beside one trainer, and the raw copy."""

    def __init__(self, state: State, new_place: Callable[[], AbstractContextManager[str]]) -> None:
        self.contest = Contest()
        self.found: dict[str, list[Disturbance]] = {}
        self._state = state
        self._target = {name: torch.zeros_like(t) for name, t in state.items()}
        self._trainer = Trainer(state)
        self._new_place = new_place
        self._raw = RawCopy(state)

    def add(self, saver: Saver) -> None:
        self.contest.add(saver.name, lambda: self._run(saver))

    def play(self, repeat: int) -> None:
        self.contest.add(RAW, self._copy)
        self.contest.play(repeat)

    def _copy(self) -> float:
        begin = time.perf_counter()
        self._raw.run()
        elapsed = time.perf_counter() - begin
        self._raw.check()
        return elapsed

    def _run(self, saver: Saver) -> float:
        with self._new_place() as url:
            found = disturb(self._trainer, saver, self._state, self._target, url)
        note(f"    {saver.name}: {shown(found)}")
        self.found.setdefault(saver.name, []).append(found)
        return found.lost_s

    def median(self, name: str, of: Callable[[Disturbance], float]) -> float | None:
        """Over the counted rounds."""
        counted = self.found.get(name, [])[1:]
        return statistics.median([of(found) for found in counted]) if counted else None

    def facts(self) -> dict[str, Any]:
        names = [name for name in self.contest.runs if name != RAW]

        def ms(of: Callable[[Disturbance], float]) -> dict[str, float]:
            medians = {name: self.median(name, of) for name in names}
            return {n: round(1e3 * s, 1) for n, s in medians.items() if s is not None}

        return {
            "blocked_ms": ms(lambda found: found.blocked_s),
            "extra_ms": ms(lambda found: found.extra_s),
            "committed_ms": ms(lambda found: found.committed_s),
            "steps": {n: self.found[n][-1].num_steps for n in names if n in self.found},
        }


def shown(found: Disturbance) -> str:
    return (
        f"blocked {found.blocked_s * 1e3:.0f} ms, extra {found.extra_s * 1e3:.0f} ms in "
        f"{found.num_steps} steps ({found.inflation:.1%}), committed {found.committed_s:.2f} s"
    )


# A local save -------------------------------------------------------------------------------


def row_local(setting: Setting) -> None:
    """Second save on: round 0 is the first."""
    note("trainer, tmpfs")
    state = llama(setting.gib)

    @contextmanager
    def new_place() -> Iterator[str]:
        with folder(setting.tmpfs) as path:
            yield str(path / "snapshot")

    race = Race(state, new_place)
    with opened(race.contest, local_savers(), None) as savers:
        for saver in savers:
            race.add(saver)
        race.play(setting.repeat)
    medians = race.contest.medians()
    limit = medians.get(RAW)
    names = [name for name in medians if name != RAW]
    emit(
        "trainer, tmpfs",
        ratios={f"{name}, lost / raw copy": ratio(medians[name], limit) for name in names},
        needs={
            f"{name}, lost / raw copy": Need(1.25, at_least=False)
            for name in ("actorsnap", "actorsnap process", "actorsnap await")
        },
        missing=race.contest.missing,
        **race.facts(),
        **facts_of(state, race.contest.seconds, "tmpfs"),
    )


# A slow network -----------------------------------------------------------------------------


def row_slow(setting: Setting) -> None:
    """``Nothing`` takes part: how far its step time is from one is what the machine does."""
    row = f"trainer, {UPLOAD_S:g} s of upload"
    note(row)
    state = llama(setting.gib)
    with (
        running(Sink) as server,
        FaultProxy(server.endpoint, bytes_per_s=state_bytes(state) / UPLOAD_S) as proxy,
    ):
        stand_back([proxy.pid, *server.pids])

        @contextmanager
        def new_place() -> Iterator[str]:
            try:
                yield new_url(server, "kept")
            finally:
                server.empty("kept")

        race = Race(state, new_place)
        with opened(race.contest, slow_savers(), Slow(server, proxy)) as savers:
            for saver in savers:
                race.add(saver)
            race.play(setting.repeat)
    names = list(race.found)
    step_times = {name: [1 + found.inflation for found in race.found[name][1:]] for name in names}
    emit(
        row,
        ratios={
            f"{name}, step time": statistics.median(values) if values else None
            for name, values in step_times.items()
        },
        needs={"actorsnap, step time": Need(1.02, at_least=False)},
        missing=race.contest.missing,
        rounds={n: [round(value, 3) for value in values] for n, values in step_times.items()},
        **race.facts(),
        **facts_of(state, race.contest.seconds, "sink"),
    )


def stand_back(pids: Sequence[int]) -> None:
    """Lets others have the CPU before these, which stand for machines elsewhere."""
    for pid in pids:
        with suppress(OSError):  # a kernel without groups; each of these is in one of its own
            Path(f"/proc/{pid}/autogroup").write_text("19")


# Lazy staging -------------------------------------------------------------------------------


def row_lazy(setting: Setting) -> None:
    """A forward and backward pass of three times the copy, then an optimizer's step."""
    note("trainer, lazy staging")
    state = llama(setting.gib)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    module = module_of(state)
    parameters = dict(module.named_parameters())
    for parameter in parameters.values():
        parameter.grad = parameter.detach()  # shares its memory
    optimizer = torch.optim.SGD(parameters.values(), lr=1e-3)
    trainer, raw, contest = Trainer({}), RawCopy(state), Contest()
    taken_ms: list[float] = []

    def copy() -> float:
        begin = time.perf_counter()
        raw.run()
        return time.perf_counter() - begin

    def lazy(offload: str) -> float:
        waits: list[float] = []
        first = optimizer.register_step_pre_hook(lambda *_: waits.append(time.perf_counter()))
        expected = {name: tensor.detach().clone() for name, tensor in parameters.items()}
        options = Options(fsync=False, offload=offload)
        with folder(setting.tmpfs) as path:
            begin = time.perf_counter()
            pending = Snapshot.async_take(
                path / "snapshot", {"model": module}, stage="lazy", options=options
            )
            pending.guard(optimizer)
            taken_s = time.perf_counter() - begin
            last = optimizer.register_step_pre_hook(lambda *_: waits.append(time.perf_counter()))
            while time.perf_counter() - begin < 3 * copy_s:
                trainer.step()
            optimizer.step()
            pending.wait()
            first.remove()
            last.remove()
            scramble(target)
            Snapshot(path / "snapshot").restore({"model": StateDict(target)})
        compare(expected, target)
        taken_ms.append(round(taken_s * 1e3, 2))
        return taken_s + waits[1] - waits[0]

    copy_s = copy()
    for offload in ("process", "thread"):
        contest.add(f"actorsnap {offload}", partial(lazy, offload))
    contest.add(RAW, copy)
    contest.play(setting.repeat)
    medians = contest.medians()
    limit = medians.get(RAW)
    names = [name for name in medians if name != RAW]
    emit(
        "trainer, lazy staging",
        ratios={f"{name}, blocked / raw copy": ratio(medians[name], limit) for name in names},
        needs={"actorsnap process, blocked / raw copy": Need(0.04, at_least=False)},
        missing=contest.missing,
        taken_ms=taken_ms,
        **facts_of(state, contest.seconds, "tmpfs"),
    )


# The first save -----------------------------------------------------------------------------


def row_first(setting: Setting) -> None:
    """In processes of their own: each has a first save once."""
    note("trainer, first save")
    found: dict[str, list[float]] = {}
    blocked_ms: dict[str, list[list[float]]] = {}
    for turn in range(setting.repeat):
        for way in ("warm_up", "cold"):
            times = in_child(first, way=way, gib=setting.gib, root=str(setting.tmpfs))
            ms = [round(1e3 * seconds, 1) for seconds in times]
            note(f"  {turn} {way}: blocked {ms} ms")
            found.setdefault(way, []).append(times[0] / statistics.median(times[1:]))
            blocked_ms.setdefault(way, []).append(ms)
    emit(
        "trainer, first save",
        ratios={f"{way}, first / later": statistics.median(found[way]) for way in found},
        needs={"warm_up, first / later": Need(1.3, at_least=False)},
        missing={},
        gib=setting.gib,
        blocked_ms=blocked_ms,
    )


def first(way: str, gib: float, root: str) -> list[float]:
    """Blocked seconds of each save."""
    state = llama(gib)
    saver = ActorsnapBy("actorsnap")
    saver.open(None)
    if way == "warm_up":
        saver.warm_up(state)
        wait_ready(for_ranks=False)
    times: list[float] = []
    for _ in range(NUM_SAVES):
        with folder(Path(root)) as path:
            begin = time.perf_counter()
            saving = saver.begin(state, str(path / "snapshot"))
            times.append(time.perf_counter() - begin)
            saving.wait()
    return times


def wait_ready(*, for_ranks: bool) -> None:
    """The uploader process starts beside the trainer's first steps."""
    uploader, deadline = Host.get().resources.uploader, time.monotonic() + 60.0
    while uploader is not None and time.monotonic() < deadline:
        if uploader.is_ready if for_ranks else uploader.is_ready:
            return
        time.sleep(0.1)


# The pace ----------------------------------------------------------------------------------


def row_pace(setting: Setting) -> None:
    """Saves that compress hard, beside one trainer, each limit in a process of its own.

    What the controller learns holds for the next save, so the first one is not counted.
    """
    note("trainer, pace")
    found: dict[str, list[list[float]]] = {}
    for turn in range(setting.repeat):
        for offload in ("process", "thread"):
            for limit in PACE_LIMITS:
                name = f"{offload}, max_slowdown {limit}"
                saves = in_child(
                    pace, offload=offload, limit=limit, gib=setting.gib, root=str(setting.tmpfs)
                )
                note(f"  {turn} {name}: " + "; ".join(f"{i:+.1%} {s:.1f} s" for i, s in saves))
                found.setdefault(name, []).extend(saves[1:])
    emit(
        "trainer, pace",
        ratios={n: 1 + statistics.median(i for i, _ in saves) for n, saves in found.items()},
        needs={
            name: Need(1.0 + limit, at_least=False)
            for name in found
            for limit in PACE_LIMITS
            if limit is not None and name.endswith(str(limit))
        },
        missing={},
        gib=setting.gib,
        committed_s={n: round(statistics.median(s for _, s in v), 2) for n, v in found.items()},
        rounds={n: [round(1 + i, 3) for i, _ in saves] for n, saves in found.items()},
    )


def pace(offload: str, limit: float | None, gib: float, root: str) -> list[tuple[float, float]]:
    """Inflation of the steps and seconds until the commit, of each save."""
    state = llama(gib)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    saver = ActorsnapBy("actorsnap", offload=offload, max_slowdown=limit, **PACED)
    saver.open(None)
    trainer = Trainer(state)
    found: list[tuple[float, float]] = []
    for _ in range(NUM_PACED_SAVES):
        with folder(Path(root)) as path:
            one = disturb(trainer, saver, state, target, str(path / "snapshot"))
        found.append((one.inflation, one.committed_s))
    return found


# Several ranks ------------------------------------------------------------------------------


def rank_savers() -> list[Saver]:
    return [
        ActorsnapBy("actorsnap"),
        ActorsnapBy("actorsnap process", offload="process"),
        ActorsnapBy("actorsnap thread", offload="thread"),
        DcpBy("thread"),
    ]


def row_ranks(setting: Setting) -> None:
    """A trainer on each rank, with a state of its own; all numbers are means over ranks."""
    note(f"trainers, {NUM_RANKS} ranks, tmpfs")
    contest = Contest()
    found: dict[str, list[list[Disturbance]]] = {}
    with World(NUM_RANKS) as world:
        nbytes = sum(world.call(hold, setting.gib / NUM_RANKS))

        def turn(name: str) -> float:
            with folder(setting.tmpfs) as path:
                ranks = world.call(disturb_rank, name, str(path / "snapshot"))
            note(f"    {name}: {'; '.join(map(shown, ranks))}")
            found.setdefault(name, []).append(ranks)
            return statistics.mean(rank.lost_s for rank in ranks)

        for saver in rank_savers():
            contest.add(saver.name, partial(turn, saver.name))

        def write() -> float:
            with folder(setting.tmpfs) as path:
                return statistics.mean(world.call(write_rank, str(path)))

        contest.add(RAW, lambda: statistics.mean(world.call(copy_rank)))
        contest.add(RAW_WRITE, write)
        contest.play(setting.repeat)
    medians = contest.medians()
    limit, write_s = medians.get(RAW), medians.pop(RAW_WRITE, None)
    emit(
        f"trainers, {NUM_RANKS} ranks, tmpfs",
        ratios={f"{n}, lost / raw copy": ratio(medians[n], limit) for n in medians if n != RAW},
        needs={"actorsnap, lost / raw copy": Need(4, at_least=False)},
        missing=contest.missing,
        gib=round(nbytes / 2**30, 3),
        # Both cores are busy: a step loses all CPU time that the save needs.
        limit=None if limit is None or write_s is None else round((limit + write_s) / limit, 2),
        committed_ms={
            name: round(
                1e3 * statistics.median(max(r.committed_s for r in one) for one in runs[1:])
            )
            for name, runs in found.items()
        },
        seconds={name: round(median, 4) for name, median in medians.items()},
        all_seconds={name: [round(s, 4) for s in runs] for name, runs in contest.seconds.items()},
    )


def hold(here: Here, gib: float) -> int:
    """Makes what the others use; returns the bytes of the rank's state."""
    state = {f"rank {here.rank}.{name}": tensor for name, tensor in llama(gib).items()}
    savers = {saver.name: saver for saver in rank_savers()}
    for saver in savers.values():
        saver.open(None)
        if isinstance(saver, ActorsnapBy):
            saver.warm_up(state)
    wait_ready(for_ranks=True)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    here.held |= {"state": state, "target": target, "savers": savers}
    here.held |= {"trainer": Trainer(state), "raw": RawCopy(state)}
    here.held["files"] = RawFiles(state)
    return state_bytes(state)


def disturb_rank(here: Here, name: str, url: str) -> Disturbance:
    held = here.held
    saver = held["savers"][name]
    return disturb(held["trainer"], saver, held["state"], held["target"], url, meet=dist.barrier)


def write_rank(here: Here, path: str) -> float:
    own = Path(path) / str(here.rank)
    own.mkdir()
    span = here.timed(lambda: here.held["files"].save(here.held["state"], own))
    return span.end_s - span.begin_s


def copy_rank(here: Here) -> float:
    span = here.timed(here.held["raw"].run)
    here.held["raw"].check()
    return span.end_s - span.begin_s


ROWS: dict[str, Callable[[Setting], None]] = {
    "trainer-local": row_local,
    "trainer-ranks": row_ranks,
    "trainer-slow": row_slow,
    "trainer-lazy": row_lazy,
    "trainer-first": row_first,
    "trainer-pace": row_pace,
}
