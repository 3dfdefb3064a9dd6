# SPDX-License-Identifier: Apache-2.0
"""What ranks and directors do in ``test_offloads.py`` (see ``tests.worlds``)."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import msgspec
import psutil
import torch
import torch.distributed as dist

from actorsnap import ActorSnapError, Options, StateDict
from actorsnap.errors import notes_of
from actorsnap.protocol.uploader import Subject
from actorsnap.runtime import taking, uploader_client
from actorsnap.runtime.host import Host
from actorsnap.runtime.remote_engine import RemoteEngine
from actorsnap.runtime.save import Save
from actorsnap.runtime.uploader_client import Uploader, find_uploader
from actorsnap.sync import PendingSnapshot, Snapshot, warm_up
from tests.ranks.models import STATES
from tests.ranks.troubles import outcome, state
from tests.worlds import ROOT, Rank, World

_dist: Any = dist  # the stubs of its stores are not exported

__all__ = [
    "LOST_AFTER_S",
    "direct_auto",
    "direct_dying_processes",
    "direct_dying_trainers",
    "direct_detached",
    "direct_died_before_the_commit",
    "direct_errors",
    "direct_kinds",
    "direct_mixture",
    "direct_overwrites",
    "direct_plain",
    "direct_stopped_after_staging",
    "direct_stopped_trainer",
    "direct_unlike",
    "direct_warmed",
]

LOST_AFTER_S = 5.0
BY_PROCESS = Options(offload="process", fsync=False, timeout_s=30.0, lost_after_s=LOST_AFTER_S)
COMPRESSED = msgspec.structs.replace(BY_PROCESS, compression="zstd")
BY_AUTO = msgspec.structs.replace(BY_PROCESS, offload="auto")
BY_THREAD = msgspec.structs.replace(BY_PROCESS, offload="thread")
DETACHED = msgspec.structs.replace(BY_PROCESS, offload="auto", detach=True)
GLOBS = ["model/**"]


def _pid() -> int | None:
    return find_uploader(Host.get()).pid


def _exchanged() -> int:
    """Bytes between trainer and process."""
    link = find_uploader(Host.get())._link
    assert link is not None
    return link.sent_bytes + link.received_bytes


def _writer_of(path: str) -> int:
    """The process of rank 0 that made the snapshot."""
    [attempt] = {entry.name for entry in Path(path).iterdir()} - {"actorsnap.json"}
    return int(attempt.split("-")[2])


# What is saved


def kinds(me: Rank, path: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """Each state by threads and by processes, the latter twice: the state has changed meanwhile."""
    me.join_gloo()
    said = []
    for name in names:
        app, where = STATES[name](), f"{path}/{name}"
        pending = [
            Snapshot.async_take(f"{where}-{how}", app, options=options)
            for how, options in (("thread", BY_THREAD), ("process", BY_PROCESS))
        ]
        for one in pending:
            one.wait()
        before = _exchanged()
        with torch.no_grad():
            for value in app.values():
                for tensor in _tensors(value.state_dict()):
                    tensor.mul_(2)
        again = Snapshot.async_take(f"{where}-again", app, options=BY_PROCESS)
        with torch.no_grad():
            for value in app.values():
                for tensor in _tensors(value.state_dict()):
                    tensor.fill_(-1)
        again.wait()
        said.append({"nbytes": _exchanged() - before, "pid": _pid()})
        dist.barrier()
    return said


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if hasattr(value, "local_shards"):
        return [shard.tensor for shard in value.local_shards()]
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return [getattr(value, "_local_tensor", value).detach()]
    return []


def overwrites(me: Rank, path: str) -> None:
    """A large save and a small one to one path, by each pair of ways."""
    me.join_gloo()
    warm_up(1 << 20, options=BY_PROCESS)
    wait_until(lambda: find_uploader(Host.get()).is_ready)
    ways = itertools.product((BY_THREAD, BY_PROCESS), repeat=2)
    for number, (large, small) in enumerate(ways):
        where = f"{path}/{number}"
        app = {**state(me.rank), "more": StateDict(x=torch.ones(20 << 20))}
        app["model"]["w0"].fill_(0)
        first = Snapshot.async_take(where, app, replicated=GLOBS, options=large, overwrite=True)
        app = state(me.rank)
        app["model"]["w0"].fill_(1)
        last = Snapshot.async_take(where, app, replicated=GLOBS, options=small, overwrite=True)
        last.wait()
        first.wait()
    dist.barrier()


def direct_overwrites(num_ranks: int, path: str) -> list[Any]:
    world = World(num_ranks, overwrites, path=path)
    try:
        return world.results()
    finally:
        world.end()


def direct_kinds(num_ranks: int, **arguments: Any) -> list[Any]:
    world = World(num_ranks, kinds, **arguments)
    try:
        return world.results()
    finally:
        world.end()


def mixture(me: Rank, path: str) -> dict[str, Any]:
    """Saves of each way, and a restore, one behind the other, and several at a time."""
    me.join_gloo()
    app = state(me.rank)
    # Nobody falls here; but connecting to the store may take seconds, for each team.
    by_process, by_thread, by_detached, compressed = (
        msgspec.structs.replace(options, lost_after_s=30.0)
        for options in (BY_PROCESS, BY_THREAD, DETACHED, COMPRESSED)
    )
    warm_up(1 << 20, options=by_process)
    wait_until(lambda: find_uploader(Host.get()).is_ready)
    made: dict[str, PendingSnapshot] = {}

    def begin(number: int, options: Options) -> None:
        app["model"]["w0"].fill_(number)
        where = f"{path}/{number}"
        made[where] = Snapshot.async_take(where, app, replicated=GLOBS, options=options)

    begin(0, by_process)
    made[f"{path}/0"].wait()
    assert not _has_torch(psutil.Process(_pid()))  # only a detached save needs it
    begin(1, by_thread)
    begin(2, by_detached)
    app["model"]["w0"].fill_(3)
    Snapshot.take(f"{path}/3", app, replicated=GLOBS, options=by_process)
    begin(4, by_process)
    lazy = Snapshot.async_take(
        f"{path}/lazy", app, replicated=GLOBS, options=by_process, stage="lazy"
    )
    lazy.staged()
    made["lazy"] = lazy
    made[f"{path}/0"].wait().restore(app)
    restored = float(app["model"]["w0"][0])
    begin(5, compressed)
    for one in made.values():
        one.wait()
    dist.barrier()
    # Not those of a process that was forked.
    child = os.fork()
    if child == 0:
        how = outcome(lambda: begin(6, by_process))
        os._exit(0 if how["error"] == "UsageError" else 1)
    _, status = os.waitpid(child, 0)
    begin(7, by_process)
    made[f"{path}/7"].wait()
    group = dist.new_group([1, 0])
    base: Any = me.store()
    before: Any = None
    for number in range(8, 40):  # in turn as three teams, one of which lasts for one save
        turns: Any = [{}, {"group": group}, {}, {"store": _dist.PrefixStore(f"p{number}", base)}]
        where = f"{path}/many"
        more: Any = {"replicated": GLOBS, "overwrite": True, **turns[number % 4]}
        Snapshot.async_take(where, app, options=by_process, **more).wait()
        if number == 19:
            time.sleep(1.5)  # in which what is left of others goes
            before = _held()
    deadline = time.monotonic() + 20
    while any(map(_exceeds, _held(), before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    dist.barrier()
    are_by_process = [_writer_of(f"{path}/{n}") == _pid() for n in (0, 1, 2, 3, 4, 5, 7)]
    return {
        "restored": restored,
        "by_process": are_by_process,
        "child": status,
        "leaks": any(map(_exceeds, _held(), before)),
        "names": [names for _, _, names in _held()],
    }


def _has_torch(process: psutil.Process) -> bool:
    return any("libtorch" in mapped.path for mapped in process.memory_maps())


def _exceeds(now: list[int], then: list[int]) -> bool:
    return any(count > limit for count, limit in zip(now, then, strict=True))


def _held() -> list[list[int]]:
    """Descriptors and threads of trainer and process, and what of shared memory has a name."""
    found = []
    for pid in (os.getpid(), _pid()):
        process = psutil.Process(pid)
        names = [m.path for m in process.memory_maps() if m.path.startswith("/dev/shm/")]
        found.append([process.num_fds(), process.num_threads(), len(names)])
    return found


def direct_mixture(num_ranks: int, path: str) -> list[Any]:
    world = World(num_ranks, mixture, path=path)
    try:
        return world.results()
    finally:
        world.end()


def unlike(me: Rank, path: str, cases: Sequence[str]) -> list[dict[str, Any]]:
    """One thing is wrong on one rank; then all save to that path."""
    me.join_gloo()
    said = []
    for number, case in enumerate(cases):
        rank, what = case.split(" ", 1)
        app: Any = state(me.rank)
        by = BY_THREAD if "among threads" in what else BY_PROCESS
        arguments: dict[str, Any] = {"replicated": GLOBS, "options": by}
        is_odd = me.rank == int(rank)
        where = f"{path}/{number}"
        if is_odd and what == "by thread":
            arguments["options"] = BY_THREAD
        elif is_odd and what == "options":
            arguments["options"] = "fast"
        elif is_odd and what == "leaf":
            app["own"]["x"] = object()

        first = outcome(functools.partial(_call_unlike, me, path, where, case, app, arguments))
        arguments = {"replicated": GLOBS, "options": BY_PROCESS, "overwrite": True}
        again = outcome(
            functools.partial(_call_unlike, me, path, where, "", state(me.rank), arguments)
        )
        said.append({"first": first, "again": again})
    return said


def _call_unlike(
    me: Rank, path: str, where: str, case: str, app: Any, arguments: dict[str, Any]
) -> None:
    if case == f"{me.rank} restores":
        Snapshot(f"{path}/0").restore(app)
        return
    if case.startswith(f"{me.rank} is interrupted"):
        start = mock.patch.object(Save, "start", side_effect=KeyboardInterrupt)
        with start, suppress(KeyboardInterrupt):
            Snapshot.async_take(where, app, **arguments)
        return
    pending = Snapshot.async_take(where, app, **arguments)
    if case == f"{me.rank} is cancelled":
        pending.cancel()
    pending.wait()


def errors_of_rank_1(me: Rank, path: str, names: Sequence[str]) -> list[dict[str, list[Any]]]:
    """Per class of errors, what the ranks get, by engine, if the storage of rank 1 raises it."""
    sys.path.insert(0, str(ROOT / "tests" / "held"))
    me.join_gloo()
    os.environ |= {"RAISING_RANK": "1", "RANK": str(me.rank)}
    said: list[dict[str, list[Any]]] = []
    for name in names:
        found = {}
        for engine, options in (("thread", BY_THREAD), ("process", BY_PROCESS)):
            url = f"raising://put.of-{name}{path}/{name}-{engine}"
            before = _pid()
            try:
                Snapshot.async_take(url, state(me.rank), options=options).wait()
            except ActorSnapError as error:
                found[engine] = _chain(error)
            assert (engine == "process") <= (_pid() is not None and before in (None, _pid()))
        said.append(found)
        dist.barrier()
    return said


def _chain(error: BaseException | None) -> list[Any]:
    """An error and its causes, also those not shown: classes, texts, fields, notes."""
    if error is None:
        return []
    fields = repr(error.fields) if isinstance(error, ActorSnapError) else ""
    link = [type(error).__name__, str(error), fields, notes_of(error)]
    return [link, *_chain(error.__cause__ or error.__context__)]


def direct_errors(num_ranks: int, **arguments: Any) -> list[Any]:
    world = World(num_ranks, errors_of_rank_1, **arguments)
    try:
        return world.results()
    finally:
        world.end()


def direct_unlike(num_ranks: int, path: str, cases: Sequence[str]) -> list[Any]:
    world = World(num_ranks, unlike, path=path, cases=cases)
    try:
        return world.results()
    finally:
        world.end()


def auto(me: Rank, path: str) -> list[dict[str, Any]]:
    """Saves that are left to the runtime: whose process took part, and how they ended."""
    me.join_gloo()
    pays = mock.patch.object(taking, "_pays", side_effect=lambda nbytes, _: nbytes >= 20 << 20)
    add = mock.patch.object(Uploader, "add", autospec=True, side_effect=Uploader.add)
    said: list[dict[str, Any]] = []

    def save(
        *large: int,
        options: Sequence[Options] = (BY_AUTO, BY_AUTO),
        stage: Literal["eager", "lazy"] = "eager",
        cancelled: int | None = None,
        interrupted: int | None = None,
    ) -> None:
        app, number = state(me.rank), len(said)
        app["model"]["w0"].fill_(number)
        if me.rank in large:
            app["own"]["x"] = torch.full((5 << 20,), float(number))

        def work() -> None:
            pending = Snapshot.async_take(
                f"{path}/{number}", app, replicated=GLOBS, options=options[me.rank], stage=stage
            )
            if me.rank == cancelled:
                pending.cancel()
            else:
                pending.staged()
                app["model"]["w0"].fill_(-1)
            pending.wait()

        before = added.call_count
        with ExitStack() as stack:
            if me.rank == interrupted:
                start = mock.patch.object(Save, "start", side_effect=KeyboardInterrupt)
                stack.enter_context(start)
                stack.enter_context(suppress(KeyboardInterrupt))
            began = time.monotonic()
            ended: dict[str, Any] = {"error": "", "text": ""}
            ended = outcome(work)
        ended["seconds"] = time.monotonic() - began
        said.append({**ended, "by_process": added.call_count > before})
        dist.barrier()

    with pays, add as added:
        save()
        save(0, 1)
        wait_until(lambda: find_uploader(Host.get()).is_ready)
        dist.barrier()
        save(0, 1)
        save(0)
        save(1)
        save(0, 1, stage="lazy")
        save(1, stage="lazy")
        save(0, 1, options=(BY_THREAD, BY_AUTO))
        save(0, options=(BY_AUTO, BY_PROCESS))
        save(1, options=(BY_AUTO, BY_THREAD))
        save(1, cancelled=1)
        save(0, options=(BY_AUTO, BY_THREAD))
        save(1, options=(BY_AUTO, BY_PROCESS))
        save(1, interrupted=1)
        save(0, interrupted=1)
        save(1, interrupted=0)
        save(0, interrupted=0)
        save(0, 1)
        save(1)
    return said


def warmed(me: Rank, path: str) -> bool:
    """Whether the first save that is left to the runtime is by the process."""
    me.join_gloo()
    pays = mock.patch.object(taking, "_pays", return_value=True)
    add = mock.patch.object(Uploader, "add", autospec=True, side_effect=Uploader.add)
    with pays, add as added:
        warm_up(1 << 20, options=BY_AUTO)
        wait_until(lambda: find_uploader(Host.get()).is_ready)
        dist.barrier()
        Snapshot.async_take(path, state(me.rank), replicated=GLOBS, options=BY_AUTO).wait()
    return added.call_count == 1


def direct_warmed(num_ranks: int, path: str) -> list[Any]:
    world = World(num_ranks, warmed, path=path)
    try:
        return world.results()
    finally:
        world.end()


def direct_auto(num_ranks: int, path: str) -> list[Any]:
    world = World(num_ranks, auto, path=path)
    try:
        return world.results()
    finally:
        world.end()


class _Plain:
    """A store of some other kind, which has no address."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def clone(self) -> _Plain:
        return _Plain(self._store.clone())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def plain(me: Rank, path: str) -> dict[str, Any]:
    """Saves at a store that processes cannot find."""
    os.environ |= {"RANK": str(me.rank), "WORLD_SIZE": str(me.world)}
    store = _Plain(me.store())
    # Ranks that only look, and the class has no method itself.
    for name in ("queue_push", "queue_pop", "queue_len", "set_timeout"):
        setattr(store, name, getattr(store._store, name))
    logging.disable(logging.NOTSET)
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("actorsnap").addHandler(handler)
    add = mock.patch.object(Uploader, "add", autospec=True, side_effect=Uploader.add)
    with add as added:
        for number, options in enumerate((BY_PROCESS, DETACHED, DETACHED)):
            Snapshot.async_take(
                f"{path}/{number}", state(me.rank), replicated=GLOBS, options=options, store=store
            ).wait()
    me.say({"lines": lines, "num_by_process": added.call_count})
    me.hear()  # the store is this rank's
    return {}


def direct_plain(num_ranks: int, path: str) -> list[Any]:
    world = World(num_ranks, plain, path=path)
    try:
        return [rank.hear() for rank in world.ranks]
    finally:
        world.end()


# What dies


def obey(me: Rank, cannot_start: Sequence[int] = (), how: str = "") -> None:
    """Saves as the director says, in a storage that it holds."""
    sys.path.insert(0, str(ROOT / "tests" / "held"))
    uploader_client._SILENT_S = 10.0
    if me.rank in cannot_start:
        uploader_client._BOOT = "raise SystemExit(3)"
    if how == "torchrun":
        me.follow_torchrun()
    else:
        me.join_gloo()
    pending: PendingSnapshot | None = None
    app = {**state(me.rank), "more": StateDict(x=torch.ones(5 << 20))}
    while True:
        signal.alarm(120)
        order = me.hear()
        match order["do"]:
            case "begin":
                options = DETACHED if order["detach"] else BY_PROCESS

                def begin(order: Any = order, options: Options = options) -> None:
                    nonlocal pending
                    app["model"]["w0"].fill_(order["number"])
                    pending = Snapshot.async_take(
                        order["path"],
                        app,
                        replicated=GLOBS,
                        options=options,
                        overwrite=order["overwrite"],
                    )
                    app["model"]["w0"].fill_(-1)

                me.say({**outcome(begin), "pid": _pid()})
            case "stop in the next":
                _stop_in_the_next()
                me.say({"error": ""})
            case "die before the commit":
                _die_before_the_commit()
                me.say({"error": ""})
            case "wait":
                assert pending is not None
                me.say(outcome(pending.wait))


def _die_before_the_commit() -> None:
    """This process is killed when the process asks it whether rank 0 was given up."""

    answer = RemoteEngine._answer

    async def answer_or_die(self: RemoteEngine, subject: Subject) -> None:
        if subject == "suspicion":
            os.kill(os.getpid(), signal.SIGKILL)
        await answer(self, subject)

    RemoteEngine._answer = answer_or_die  # type: ignore[method-assign]


def _stop_in_the_next() -> None:
    """This process is stopped when it is to stage."""
    pack: Any = Uploader.pack

    def stopping(*args: Any) -> Any:
        Uploader.pack = pack  # type: ignore[method-assign]
        # This thread: it could go on for a moment, before another one stops all.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return pack(*args)

    Uploader.pack = stopping  # type: ignore[assignment, method-assign]


class Held:
    """Holds operations of what lies in a folder; see ``tests/held``."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def hold(self, operation: str) -> None:
        (self._folder / f"hold-{operation}").touch()

    def wait_held(self, operation: str) -> None:
        wait_until((self._folder / f"held-{operation}").exists)

    def let(self, operation: str) -> None:
        (self._folder / f"hold-{operation}").unlink()
        (self._folder / f"held-{operation}").unlink(missing_ok=True)


def wait_until(condition: Callable[[], bool], *, within_s: float = 40.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _end(world: World, begun: Sequence[Any]) -> None:
    """Ends all ranks; no process of theirs is left."""
    world.end()
    wait_until(lambda: all(is_gone(rank["pid"]) for rank in begun if rank["pid"]))


def _tell_all(world: World, order: dict[str, Any]) -> list[Any]:
    signal.alarm(120)
    world.num_keys()  # the server may live on
    for rank in world.ranks:
        rank.tell(order)
    return [rank.hear() for rank in world.ranks]


def _order(path: str, number: int, *, detach: bool = False, overwrite: bool = True) -> Any:
    where = {"path": f"held://{path}", "overwrite": overwrite}
    return {"do": "begin", "number": number, "detach": detach, **where}


def _begin(world: World, path: str, number: int, **how: bool) -> list[Any]:
    begun: list[Any] = _tell_all(world, _order(path, number, **how))
    assert not any(rank["error"] for rank in begun), begun
    return begun


def direct_dying_processes(
    num_ranks: int, path: str, cases: Sequence[Sequence[Any]], cannot_start: Sequence[int] = ()
) -> list[Any]:
    """A process dies in one save after the other; each time the job then saves there again.

    Args:
        cases: Whose process, by which signal, while which operation is held.
    """
    world = World(num_ranks, obey, cannot_start=cannot_start)
    said = []
    begun: list[Any] = []
    try:
        for number, (victim, how, operation) in enumerate(cases):
            folder = f"{path}/{number}"
            os.mkdir(folder)
            held = Held(folder)
            held.hold(operation)
            begun = _begin(world, f"{folder}/s", number, overwrite=False)
            held.wait_held(operation)
            if how:
                pid = begun[victim]["pid"]
                os.kill(pid, getattr(signal, how))
                if how == "SIGKILL":
                    time.sleep(0.3)  # its trainer hears of it
            held.let(operation)
            ended = _tell_all(world, {"do": "wait"})
            if how:
                wait_until(functools.partial(is_gone, pid))
            begun = _begin(world, f"{folder}/s", number + 100)
            again = _tell_all(world, {"do": "wait"})
            said.append({"ended": ended, "again": again})
    finally:
        _end(world, begun)
    return said


def direct_dying_trainers(
    num_ranks: int, path: str, victims: Sequence[int], is_called: bool
) -> dict[str, Any]:
    """Trainers are killed, behind a save that was well: while a save of theirs is held, or before
    they call it. Says what the others do, and what is left of processes."""
    world = World(num_ranks, obey)
    held = Held(path)
    begun: list[Any] = []
    try:
        begun = _begin(world, f"{path}/s", 1)
        said = _tell_all(world, {"do": "wait"})
        assert not any(rank["error"] for rank in said), said
        if is_called:
            held.hold("manifest")
            _begin(world, f"{path}/s", 2)
            held.wait_held("manifest")
        for victim in victims:
            world.ranks[victim].kill()
        others = [rank for n, rank in enumerate(world.ranks) if n not in victims]
        for rank in others:
            rank.tell({"do": "wait"} if is_called else _order(f"{path}/s", 2))
        if is_called:
            wait_until(lambda: all(is_gone(world.ranks[victim].pid) for victim in victims))
            time.sleep(0.5)  # their processes hear of it
            held.let("manifest")
        answers = [rank.hear() for rank in others]
        pids = [begun[victim]["pid"] for victim in victims]
        wait_until(lambda: all(map(is_gone, pids)))
        return {"others": answers}
    finally:
        _end(world, begun)


def direct_stopped_trainer(num_ranks: int, path: str, victim: int) -> dict[str, Any]:
    """A trainer is stopped before it has staged, and goes on when the others are done."""
    world = World(num_ranks, obey)
    try:
        _begin(world, f"{path}/s", 1)
        said = _tell_all(world, {"do": "wait"})
        assert not any(rank["error"] for rank in said), said
        world.ranks[victim].tell({"do": "stop in the next"})
        world.ranks[victim].hear()
        for rank in world.ranks:
            rank.tell(_order(f"{path}/s", 2))
        others = [rank for n, rank in enumerate(world.ranks) if n != victim]
        assert [rank.hear()["error"] for rank in others] == [""] * len(others)  # they have staged
        for rank in others:
            rank.tell({"do": "wait"})
        answers = [rank.hear() for rank in others]
        world.ranks[victim].kill(signal.SIGCONT)
        stopped = world.ranks[victim].hear()
        if not stopped["error"]:  # it has staged before it heard of the abort
            world.ranks[victim].tell({"do": "wait"})
            stopped = world.ranks[victim].hear()
        _begin(world, f"{path}/s", 3)
        again = _tell_all(world, {"do": "wait"})
        return {"others": answers, "stopped": stopped, "again": again}
    finally:
        world.end()


def direct_stopped_after_staging(num_ranks: int, path: str, victim: int) -> dict[str, Any]:
    """A trainer is stopped when all have staged, for longer than ``lost_after_s``."""
    world = World(num_ranks, obey)
    held = Held(path)
    begun: list[Any] = []
    try:
        begun = _begin(world, f"{path}/s", 1)
        said = _tell_all(world, {"do": "wait"})
        assert not any(rank["error"] for rank in said), said
        held.hold("manifest")
        _begin(world, f"{path}/s", 2)
        held.wait_held("manifest")
        world.ranks[victim].kill(signal.SIGSTOP)
        others = [rank for n, rank in enumerate(world.ranks) if n != victim]
        for rank in others:
            rank.tell({"do": "wait"})
        time.sleep(1.5 * LOST_AFTER_S)
        held.let("manifest")
        answers = [rank.hear() for rank in others]
        world.ranks[victim].kill(signal.SIGCONT)
        world.ranks[victim].tell({"do": "wait"})
        stopped = world.ranks[victim].hear()
        begun = _begin(world, f"{path}/s", 3)
        again = _tell_all(world, {"do": "wait"})
        return {"others": answers, "stopped": stopped, "again": again}
    finally:
        _end(world, begun)


def direct_died_before_the_commit(num_ranks: int, path: str) -> dict[str, Any]:
    """Rank 0's trainer is killed while its process waits for its answer, just before the commit of
    a detached save; the store's server lives, as torchrun's."""
    world = World(num_ranks, obey, how="torchrun")
    held = Held(path)
    begun: list[Any] = []
    try:
        held.hold("manifest")
        begun = _begin(world, f"{path}/s", 1, detach=True)
        held.wait_held("manifest")
        world.ranks[0].tell({"do": "die before the commit"})
        world.ranks[0].hear()
        held.let("manifest")
        os.waitpid(world.ranks[0].pid, 0)
        for rank in world.ranks[1:]:
            rank.tell({"do": "wait"})
        answers = [rank.hear() for rank in world.ranks[1:]]
        wait_until(lambda: is_gone(begun[0]["pid"]))
        is_committed = (Path(path) / "s" / "actorsnap.json").exists()
        world.ranks = world.ranks[1:]
        return {"others": answers, "is_committed": is_committed}
    finally:
        _end(world, begun)


def direct_detached(num_ranks: int, path: str) -> dict[str, Any]:
    """All trainers are killed when they have staged; the store's server lives, as torchrun's."""
    world = World(num_ranks, obey, how="torchrun")
    held = Held(path)
    try:
        held.hold("manifest")
        begun = _begin(world, f"{path}/s", 1, detach=True)
        held.wait_held("manifest")
        for rank in world.ranks:
            rank.kill()
            os.waitpid(rank.pid, 0)
        pids = [rank["pid"] for rank in begun]
        was_alive = not any(map(is_gone, pids))
        held.let("manifest")
        wait_until(lambda: all(map(is_gone, pids)))
        is_committed = (Path(path) / "s" / "actorsnap.json").exists()
        world.ranks = []
        return {"was_alive": was_alive, "is_committed": is_committed}
    finally:
        world.end()
