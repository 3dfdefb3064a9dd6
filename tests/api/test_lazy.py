# SPDX-License-Identifier: Apache-2.0
"""Lazy staging: what is saved is the state at the call, although the trainer goes on at once.

The copies of these tests wait for the test (``Copies``), so that whatever the trainer does before
one is surely before it. The last tests take the fence out, and then the look at versions too, and
see that the others would notice.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio.lowlevel
import pytest
import torch

import actorsnap
from actorsnap import Options, SnapshotAborted, StateChanged, StateDict, UsageError
from actorsnap.actors import staging
from actorsnap.actors.fence import Fence
from actorsnap.protocol.failure import Failure, Stage
from actorsnap.runtime.host import Host
from actorsnap.runtime.taking import _Gate
from actorsnap.runtime.uploader_client import find_uploader
from actorsnap.state.lazy import LazyState, _warn_of_uncounted
from actorsnap.state.optim import ModelState
from actorsnap.state.sources import gather
from actorsnap.sync import Snapshot
from actorsnap.testing import FaultyStorage
from tests.api.facades import Facade, each_facade
from tests.api.faults import faulty, faulty_url
from tests.api.same import assert_same
from tests.api.slow_storage import gated
from tests.api.test_process import run_script
from tests.pages import ROOT, blocks
from tests.support.cases import mostly_slow

pytestmark = pytest.mark.usefixtures("forker")

MIB = 1 << 20
PATIENCE_S = 180.0
CHUNKS = Options(chunk_bytes=2 * MIB, fsync=False, offload="thread")
PROCESS = Options(chunk_bytes=2 * MIB, fsync=False, offload="process")
WIDTH = 768  # a layer is a chunk


class Copies:
    """Lets copies pass one by one, or all."""

    def __init__(self) -> None:
        self._allowed = threading.Semaphore(0)
        self._is_open = False
        self.num_begun = 0

    def let(self, count: int) -> None:
        self._allowed.release(count)

    def open(self) -> None:
        self._is_open = True
        self._allowed.release(1000)

    def pass_through(self) -> None:
        self.num_begun += 1
        if not self._is_open:
            assert self._allowed.acquire(timeout=PATIENCE_S), "nobody has let this copy pass"


@contextmanager
def before_each_copy(do: Callable[[], object]) -> Iterator[None]:
    def copy(*arguments: Any) -> None:
        do()
        gather(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "gather", copy)
        yield


@contextmanager
def held_copies() -> Iterator[Copies]:
    copies = Copies()
    try:
        with before_each_copy(copies.pass_through):
            yield copies
    finally:
        copies.open()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.002)


def fence_of(pending: Any) -> Any:
    return pending._save.fence


def is_awaited(pending: Any) -> bool:
    """Whether a step waits at the fence."""
    fence: Fence = fence_of(pending)
    return any(watch.is_awaited for watch in list(fence._watches))


def wait_until_awaited(pending: Any) -> None:
    wait_until(lambda: is_awaited(pending))


class Trainer:
    """A model, its optimizers, and what is saved of it."""

    def __init__(self, num_layers: int = 2, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        layers: list[torch.nn.Module] = []
        for _ in range(num_layers):
            layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH)]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=0.1, **options
        )
        self.data = torch.randn(4, WIDTH)
        self.step()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optimizer, "own": StateDict(step=1)}

    def forward_and_backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.data).square().sum().backward()

    def step(self) -> None:
        self.forward_and_backward()
        self.optimizer.step()

    def copy(self) -> dict[str, Any]:
        return {key: copied(value.state_dict()) for key, value in self.state.items()}

    def num_hooks(self) -> int:
        optimizer = self.optimizer
        return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: copied(item) for name, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else value


def values_of(state: Any) -> Any:
    """Without what ``copied`` does not keep: kinds of tensors and of containers."""
    if isinstance(state, torch.Tensor):
        return state.detach()
    if isinstance(state, dict):
        return {name: values_of(item) for name, item in state.items()}
    return [values_of(item) for item in state] if isinstance(state, list) else state


def assert_saved(url: str, expected: dict[str, Any]) -> None:
    snapshot = Snapshot(url)
    for key, value in expected.items():
        assert_same(values_of(snapshot.get_state_dict_for_key(key)), value, key)


def in_thread(function: Callable[[], object]) -> Future[object]:
    """Runs in a thread of its own that nobody waits for."""
    done: Future[object] = Future()

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


# What waits for what


@each_facade
def test_the_step_waits_for_the_copies_and_the_call_does_not(api: Facade) -> None:
    trainer = Trainer()
    expected = trainer.copy()
    with held_copies() as copies:
        url = "memory://lazy/waits"
        pending = api.run(
            api.Snapshot.async_take(
                url, trainer.state, stage="lazy", options=CHUNKS, overwrite=True
            )
        )
        pending.guard(trainer.optimizer)
        trainer.forward_and_backward()
        step = in_thread(trainer.optimizer.step)
        wait_until(lambda: is_awaited(pending))
        assert not step.done()
        assert not pending.done()
        copies.open()
        step.result(PATIENCE_S)
        api.run(pending.wait())
    assert_saved(url, expected)
    assert trainer.num_hooks() == 0


@each_facade
def test_staged_waits_for_all_copies(api: Facade) -> None:
    trainer = Trainer()
    expected = trainer.copy()
    url = "memory://lazy/staged"
    pending = api.run(
        api.Snapshot.async_take(url, trainer.state, stage="lazy", options=CHUNKS, overwrite=True)
    )
    api.run(pending.staged())
    trainer.step()
    api.run(pending.wait())
    assert_saved(url, expected)


def test_what_else_may_change_is_copied_before_the_call_returns() -> None:
    """Large enough to be chunks of their own; and with a normalisation in the model."""
    big = torch.arange(4.0 * MIB)
    trainer = Trainer()
    state = {**trainer.state, "ema": StateDict(big=big, blob=bytearray(9 * MIB))}
    expected = trainer.copy()
    url = "memory://lazy/eager"
    with held_copies() as copies, ThreadPoolExecutor(1) as thread:
        call = thread.submit(
            Snapshot.async_take, url, state, stage="lazy", options=CHUNKS, overwrite=True
        )
        num_eager = -(-(16 + 9) // 2)
        copies.let(num_eager - 1)
        wait_until(lambda: copies.num_begun >= num_eager)
        assert not call.done()
        while not call.done():  # copies that nobody awaits may overtake the last of these
            copies.let(1)
            time.sleep(0.05)
        pending = call.result(PATIENCE_S)
        big.zero_()
        state["ema"]["blob"][:] = bytes(9 * MIB)
        trainer.model.train()
        trainer.model(trainer.data)  # changes the statistics
        assert not pending.done()
        copies.open()
        pending.wait()
    assert_saved(url, expected)
    found = Snapshot(url).get_state_dict_for_key("ema")
    assert torch.equal(found["big"], torch.arange(4.0 * MIB))
    assert found["blob"] == bytearray(9 * MIB)


def test_a_step_waits_for_its_own_tensors_only_and_they_come_first() -> None:
    """Of two optimizers the one that steps first was guarded last."""
    trainer = Trainer(num_layers=4)
    models = [trainer.model[:4], trainer.model[4:]]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    expected = copied(trainer.model.state_dict())
    url = "memory://lazy/own"
    with held_copies() as copies:
        # An object, and so chunks, of its own for each half.
        pending = Snapshot.async_take(
            url, {"a": models[0], "b": models[1]}, stage="lazy", options=CHUNKS, overwrite=True
        )
        pending.guard(*optimizers)
        trainer.forward_and_backward()
        step = in_thread(optimizers[1].step)
        wait_until(lambda: is_awaited(pending))
        # One copy may be under way; the three chunks of "b" come before the rest of "a".
        fence = fence_of(pending)
        wait_until(lambda: fence._backlog is not None)
        first = len(fence._backlog._queue)
        copies.let(3 + Host.get().num_workers)
        step.result(PATIENCE_S)
        assert fence._backlog._left
        assert first >= len(fence._backlog._left)
        other = in_thread(optimizers[0].step)
        wait_until(lambda: is_awaited(pending))
        assert not other.done()
        copies.open()
        other.result(PATIENCE_S)
        pending.wait()
    found = [Snapshot(url).get_state_dict_for_key(key) for key in "ab"]
    values = [*found[0].values(), *found[1].values()]
    for value, other_value in zip(values, expected.values(), strict=True):
        assert torch.equal(value, other_value)


@pytest.mark.blocking
async def test_the_hook_may_block_the_loop_that_the_save_was_begun_on() -> None:
    trainer = Trainer()
    expected = trainer.copy()
    url = "memory://lazy/loop"
    delay = before_each_copy(lambda: time.sleep(0.01))
    with delay:
        pending = await actorsnap.Snapshot.async_take(
            url, trainer.state, stage="lazy", options=CHUNKS, overwrite=True
        )
        pending.guard(trainer.optimizer)
        trainer.step()
        await pending
    await asyncio.to_thread(assert_saved, url, expected)


@pytest.mark.parametrize("options", [CHUNKS, PROCESS], ids=["thread", "process"])
def test_a_budget_below_the_state(options: Options, tmp_path: Path, own_budget: None) -> None:
    """The call returns at once, and the step waits until uploads have made room."""
    trainer = Trainer(num_layers=4)  # some 28 MiB
    expected = trainer.copy()
    small = Options(
        chunk_bytes=2 * MIB,
        fsync=False,
        offload=options.offload,
        memory_budget_bytes=4 * MIB,
        num_uploaders=2,
    )
    budget = Host.get().resources.budget
    budget.peak_bytes = 0
    for number in range(2):
        pending = Snapshot.async_take(
            tmp_path / str(number), trainer.state, stage="lazy", options=small
        )
        with pending.guard(trainer.optimizer):
            trainer.step()
            pending.wait()
        assert_saved(f"{tmp_path}/{number}", expected)
        expected = trainer.copy()
    assert 0 < budget.peak_bytes <= 4 * MIB


def test_a_full_budget_holds_the_step_and_not_the_call(own_budget: None) -> None:
    trainer = Trainer(num_layers=4)
    expected = trainer.copy()
    small = Options(chunk_bytes=2 * MIB, memory_budget_bytes=4 * MIB)
    with gated() as (url, gate):
        pending = Snapshot.async_take(url, trainer.state, stage="lazy", options=small)
        pending.guard(trainer.optimizer)
        gate.wait_until_held()
        step = in_thread(trainer.optimizer.step)
        wait_until(lambda: is_awaited(pending))
        assert not step.done()
        gate.open()
        step.result(PATIENCE_S)
        pending.wait()
        assert_saved(url, expected)


def test_several_snapshots_and_a_small_budget(own_budget: None) -> None:
    """Each step waits for all saves that its optimizer was guarded for; none for another's turn."""
    trainer, other = Trainer(num_layers=3), Trainer(num_layers=3, seed=1)
    small = Options(chunk_bytes=2 * MIB, memory_budget_bytes=4 * MIB)
    expected = [one.copy() for one in (trainer, other, trainer)]
    urls = [f"memory://lazy/several-{number}" for number in range(3)]
    pending = []
    for url, one in zip(urls, (trainer, other, trainer), strict=True):
        taken = Snapshot.async_take(url, one.state, stage="lazy", options=small, overwrite=True)
        taken.guard(one.optimizer)
        pending.append(taken)
    steps = [in_thread(other.step), in_thread(trainer.step)]
    for step in steps:
        step.result(PATIENCE_S)
    for url, saved, taken in zip(urls, expected, pending, strict=True):
        taken.wait()
        assert_saved(url, saved)
    trainer.step()
    assert trainer.num_hooks() == other.num_hooks() == 0


# Torn writes


def train_while_copies_dawdle(seed: int, options: Options, folder: Path) -> None:
    """Some steps of a random model, with random delays in the copies and in the trainer."""
    draw = random.Random(seed)
    kinds: list[dict[str, Any]] = [{}, {"foreach": True}, {"fused": True}, {"foreach": False}]
    trainer = Trainer(draw.randint(1, 3), seed, **draw.choice(kinds))
    state = trainer.state
    optimizers = [trainer.optimizer]
    if draw.random() < 0.5:  # tied, and an optimizer of its own
        head = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        trainer.model.append(head)
        optimizers.append(torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.5))
        state |= {"optim2": optimizers[1], "again": StateDict(weight=head.weight)}
    with before_each_copy(lambda: time.sleep(draw.random() * 0.01)):
        for number in range(2):
            expected = {key: copied(value.state_dict()) for key, value in state.items()}
            url = f"{folder}/{seed}-{number}"
            pending = Snapshot.async_take(url, state, stage="lazy", options=options)
            pending.guard(*draw.sample(optimizers, len(optimizers)))
            for _ in range(draw.randint(1, 3)):
                trainer.forward_and_backward()
                for optimizer in draw.sample(optimizers, len(optimizers)):
                    time.sleep(draw.random() * 0.005)
                    optimizer.step()
            pending.wait()
            assert_saved(url, expected)


def seeds(start: int, num_quick: int, num: int) -> list[Any]:
    """The first ones, and slow ones."""
    slow = range(start + num_quick, start + num)
    marked = [pytest.param(seed, marks=pytest.mark.slow) for seed in slow]
    return [*range(start, start + num_quick), *marked]


@pytest.mark.few(5)
@pytest.mark.parametrize("seed", seeds(0, 12, 25))
def test_the_state_at_the_call_is_what_is_saved(seed: int, tmp_path: Path) -> None:
    train_while_copies_dawdle(seed, CHUNKS, tmp_path)


@pytest.mark.parametrize("seed", seeds(100, 3, 5))
def test_the_state_at_the_call_is_what_a_process_saves(seed: int, tmp_path: Path) -> None:
    train_while_copies_dawdle(seed, PROCESS, tmp_path)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=1e-3, max_iter=3),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "compiled": lambda p: torch.optim.AdamW(p),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
@pytest.mark.parametrize("kind", mostly_slow(OPTIMIZERS, *OPTIMIZERS.keys() - {"compiled"}))
def test_optimizers_of_many_kinds(kind: str) -> None:
    trainer = Trainer()
    trainer.optimizer = optimizer = OPTIMIZERS[kind](trainer.model.parameters())

    def closure() -> float:
        optimizer.zero_grad()
        loss = trainer.model(trainer.data).square().sum()
        loss.backward()
        return float(loss.detach())

    step: Any = optimizer.step
    if kind == "compiled":
        step = torch.compile(optimizer.step, backend="eager")
    closure()
    step(closure) if kind == "lbfgs" else step()
    for number in range(2):
        expected = trainer.copy()
        url = f"memory://lazy/kind-{number}"
        with held_copies() as copies:
            pending = Snapshot.async_take(
                url, trainer.state, stage="lazy", options=CHUNKS, overwrite=True
            )
            pending.guard(optimizer)
            stepped = in_thread(lambda: step(closure) if kind == "lbfgs" else step())
            wait_until_awaited(pending)
            assert not stepped.done()
            copies.open()
            stepped.result(PATIENCE_S)
            pending.wait()
        assert_saved(url, expected)
        assert trainer.num_hooks() == 0


# Without the fence


def test_a_step_that_is_not_guarded_aborts_the_save(tmp_path: Path) -> None:
    trainer = Trainer()
    url = str(tmp_path / "s")
    Snapshot.take(url, {"own": StateDict(old=True)}, options=CHUNKS)
    for options in (CHUNKS, PROCESS):
        with held_copies() as copies:
            pending = Snapshot.async_take(
                url, trainer.state, stage="lazy", options=options, overwrite=True
            )
            trainer.step()
            copies.open()
            with pytest.raises(StateChanged, match=r"pending\.guard\(optimizer\)") as caught:
                pending.wait()
        assert caught.value.path.partition("/")[0] in ("model", "optim")
        assert caught.value.path in str(caught.value)
        assert caught.value.rank == 0
        assert isinstance(caught.value, SnapshotAborted)
        with pytest.raises(StateChanged):
            pending.staged()
        # What was there is there, and nothing of the attempt is left.
        assert Snapshot(url).get_state_dict_for_key("own") == {"old": True}
        assert len(os.listdir(url)) == 2


def test_a_first_step_that_moves_no_counter_is_told_by_the_state_it_makes() -> None:
    trainer = Trainer()
    trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=0.1, fused=True)
    with held_copies() as copies:
        pending = Snapshot.async_take(
            "memory://lazy/first", trainer.state, stage="lazy", options=CHUNKS, overwrite=True
        )
        for parameter in trainer.model.parameters():
            trainer.optimizer.state[parameter]  # a look, which leaves an empty state
        trainer.step()
        copies.open()
        with pytest.raises(StateChanged):
            pending.wait()


# Steps that no version counter shows


def with_fused_sgd(momentum: float) -> Trainer:
    trainer = Trainer(num_layers=5)  # too much to be copied in the caller's thread
    trainer.optimizer = torch.optim.SGD(
        trainer.model.parameters(), lr=0.1, momentum=momentum, fused=True
    )
    trainer.step()
    return trainer


@pytest.mark.few
@pytest.mark.parametrize("options", [CHUNKS, PROCESS], ids=["thread", "process"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "ModelState"])
def test_what_a_fused_sgd_trains_is_copied_before_the_call_returns(
    wrap: bool,
    momentum: float,
    options: Options,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    trainer = with_fused_sgd(momentum)
    url = str(tmp_path / "s")
    _warn_of_uncounted.cache_clear()
    for _ in range(2):
        state = {"all": ModelState(trainer.model, trainer.optimizer)} if wrap else trainer.state
        expected = {key: copied(value.state_dict()) for key, value in state.items()}
        with held_copies() as copies:
            take = partial(Snapshot.async_take, url, state, stage="lazy", options=options)
            begun = in_thread(partial(take, overwrite=True))
            wait_until(lambda copies=copies, begun=begun: copies.num_begun > 0 or begun.done())  # type: ignore[misc]
            assert not begun.done(), "its tensors are not copied yet"
            copies.open()
            pending: Any = begun.result(PATIENCE_S)
            trainer.step()
            pending.wait()
        assert_saved(url, expected)
    (line,) = [r.getMessage() for r in caplog.records if "change no version counter" in r.msg]
    assert "SGD" in line
    assert "pending.guard(optimizer)" in line


def test_a_fused_sgd_that_was_guarded_before_is_lazy_and_guarded_by_the_call() -> None:
    trainer = with_fused_sgd(0.9)
    for number in range(3):
        expected = trainer.copy()
        url = "memory://lazy/sgd-guarded"
        with held_copies() as copies:
            if number == 0:
                copies.open()
            pending = Snapshot.async_take(
                url, trainer.state, stage="lazy", options=CHUNKS, overwrite=True
            )
            if number < 2:
                pending.guard(trainer.optimizer)
            trainer.forward_and_backward()
            stepped = in_thread(trainer.optimizer.step)
            if number:
                wait_until_awaited(pending)
                assert not stepped.done(), "its tensors are not copied yet"
            copies.open()
            stepped.result(PATIENCE_S)
            pending.wait()
        assert_saved(url, expected)
        assert trainer.num_hooks() == 0


def test_memory_that_is_given_back_is_not_read() -> None:
    trainer = Trainer(num_layers=3)
    with held_copies() as copies:
        pending = Snapshot.async_take(
            "memory://lazy/moved", {"model": trainer.model}, stage="lazy", options=CHUNKS
        )
        fence = fence_of(pending)
        wait_until(lambda: copies.num_begun == 1)
        under_way = fence._backlog._left - set(fence._backlog._queue)
        for number, path in enumerate(fence._paths):
            if not fence._backlog.left_of([number]) & under_way:
                trainer.model.state_dict()[path.removeprefix("model/")].share_memory_()
        begun = copies.num_begun
        copies.open()
        with pytest.raises(StateChanged):
            pending.wait()
    assert copies.num_begun == begun


def test_the_error_stays_what_it_is_on_its_way() -> None:
    error = StateChanged(path="model/x", rank=1)
    for found in (
        Failure.of_save(error, stage=Stage.JOIN, rank=0).to_error(),
        pickle.loads(pickle.dumps(error)),
    ):
        assert isinstance(found, StateChanged)
        assert (found.path, found.rank, str(found)) == ("model/x", 1, str(error))


@pytest.mark.parametrize("is_guarded", [False, True])
def test_a_change_behind_its_own_copies_counts_too(is_guarded: bool) -> None:
    """It may have begun before they had ended: its counter moves at its end. A guard lets steps
    pass, not what came before them."""
    trainer = Trainer(num_layers=3)
    with held_copies() as copies:
        pending = Snapshot.async_take(
            "memory://lazy/behind",
            {"model": trainer.model},
            stage="lazy",
            options=CHUNKS,
            overwrite=True,
        )
        if is_guarded:
            pending.guard(trainer.optimizer)
        fence = fence_of(pending)
        copies.let(2)
        wait_until(lambda: copies.num_begun == 3)
        left = fence._backlog._left
        copied_leaves = [n for n in range(len(fence._paths)) if not fence._backlog.left_of([n])]
        assert left
        paths = [fence._paths[n].removeprefix("model/") for n in copied_leaves]
        with torch.no_grad():
            next(p for name, p in trainer.model.named_parameters() if name in paths).add_(1)
        copies.open()
        with pytest.raises(StateChanged):
            pending.wait()


def test_somebody_else_writes_while_a_guarded_step_waits() -> None:
    trainer = Trainer()
    with held_copies() as copies:
        pending = Snapshot.async_take(
            "memory://lazy/else", trainer.state, stage="lazy", options=CHUNKS, overwrite=True
        )
        pending.guard(trainer.optimizer)
        with torch.no_grad():
            trainer.model.get_parameter("2.weight").add_(1)
        step = in_thread(trainer.optimizer.step)
        wait_until_awaited(pending)
        copies.open()
        step.result(PATIENCE_S)
        with pytest.raises(StateChanged) as caught:
            pending.wait()
    assert caught.value.path == "model/2.weight"


@contextmanager
def fence_taken_out() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Gate, "wait", lambda self: True)
        patch.setattr(Fence, "watch", lambda self, watch: None)
        yield


def train_with_late_copies(url: str) -> None:
    trainer = Trainer()
    expected = trainer.copy()
    with held_copies() as copies:
        pending = Snapshot.async_take(
            url, trainer.state, stage="lazy", options=CHUNKS, overwrite=True
        )
        pending.guard(trainer.optimizer)
        step = in_thread(trainer.step)
        wait_until(lambda: is_awaited(pending) or step.done())
        copies.open()
        step.result(PATIENCE_S)
        pending.wait()
    assert_saved(url, expected)


def test_with_the_fence_all_is_well() -> None:
    train_with_late_copies("memory://lazy/late")


def test_without_the_fence_the_versions_tell() -> None:
    with fence_taken_out(), pytest.raises(StateChanged):
        train_with_late_copies("memory://lazy/late")


def test_without_both_the_torn_write_is_seen() -> None:
    with fence_taken_out(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(LazyState, "changed", lambda self, leaves: None)
        with pytest.raises(AssertionError, match="other values"):
            train_with_late_copies("memory://lazy/late")


# Hooks


def test_hooks_go_when_the_save_fails_and_training_goes_on(tmp_path: Path) -> None:
    trainer = Trainer()
    with faulty(lambda inner: FaultyStorage(inner, fail_at=1, fail_verbs=["writer"])):
        pending = Snapshot.async_take(
            faulty_url(str(tmp_path / "s")), trainer.state, stage="lazy", options=CHUNKS
        )
        pending.guard(trainer.optimizer)
        trainer.step()
        with pytest.raises(SnapshotAborted, match="a scripted fault"):
            pending.wait()
    trainer.step()
    assert trainer.num_hooks() == 0


def test_a_cancelled_save_lets_the_step_go() -> None:
    trainer = Trainer()
    with gated() as (url, _), _small_budget():
        pending = Snapshot.async_take(url, trainer.state, stage="lazy", options=CHUNKS)
        pending.guard(trainer.optimizer)
        step = in_thread(trainer.optimizer.step)
        wait_until(lambda: is_awaited(pending))
        pending.cancel()
        step.result(PATIENCE_S)
        with pytest.raises(SnapshotAborted):
            pending.wait()
    assert trainer.num_hooks() == 0


def test_a_dropped_handle_keeps_the_fence() -> None:
    trainer = Trainer()
    expected = trainer.copy()
    url = "memory://lazy/dropped"
    with held_copies() as copies:
        pending = Snapshot.async_take(
            url, trainer.state, stage="lazy", options=CHUNKS, overwrite=True
        )
        pending.guard(trainer.optimizer)
        save = pending._save
        step = in_thread(trainer.optimizer.step)
        wait_until_awaited(pending)
        del pending
        gc.collect()
        assert not step.done()
        copies.open()
        step.result(PATIENCE_S)
        save.finished.result(PATIENCE_S)
    assert trainer.num_hooks() == 0
    assert_saved(url, expected)


def test_hooks_of_others_stay_where_they_are() -> None:
    trainer = Trainer()
    called: list[str] = []
    trainer.optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    url = "memory://lazy/others"
    for _ in range(2):
        first = Snapshot.async_take(
            url, trainer.state, stage="lazy", options=CHUNKS, overwrite=True
        )
        first.guard(trainer.optimizer)
        second = Snapshot.async_take(
            url + "-2", trainer.state, stage="lazy", options=CHUNKS, overwrite=True
        )
        second.guard(trainer.optimizer)
        trainer.optimizer.register_step_pre_hook(lambda *_: called.append("later"))
        trainer.optimizer.register_step_post_hook(lambda *_: called.append("after"))
        trainer.step()
        trainer.step()
        first.wait()
        second.wait()
    assert called.count("before") == 4
    assert called.count("later") == called.count("after") == 6
    assert trainer.num_hooks() == 5


def test_hooks_of_several_guards_go_behind_one_step() -> None:
    trainer = Trainer()
    for number in range(2):
        pending = [
            Snapshot.async_take(
                f"memory://lazy/together-{number}-{k}", trainer.state, stage="lazy", options=CHUNKS
            )
            for k in range(2)
        ]
        for one in [*pending, pending[0]]:
            one.guard(trainer.optimizer)
        trainer.step()
        assert trainer.num_hooks() == 0
        for one in pending:
            one.wait()


def test_a_guard_that_is_left_early_waits_no_more() -> None:
    trainer = Trainer()
    with held_copies() as copies:
        pending = Snapshot.async_take(
            "memory://lazy/early", trainer.state, stage="lazy", options=CHUNKS, overwrite=True
        )
        with pending.guard(trainer.optimizer):
            assert trainer.num_hooks() == 1
        assert trainer.num_hooks() == 0
        trainer.step()
        copies.open()
        with pytest.raises(StateChanged):
            pending.wait()


def test_parameters_that_come_behind_the_guard_are_waited_for() -> None:
    trainer = Trainer(num_layers=2)
    first, last = list(trainer.model[0].parameters()), list(trainer.model[2].parameters())
    optimizer = trainer.optimizer = torch.optim.SGD(first, lr=0.1)
    expected = copied(trainer.model.state_dict())
    url = "memory://lazy/added"
    with held_copies() as copies:
        pending = Snapshot.async_take(
            url, {"model": trainer.model}, stage="lazy", options=CHUNKS, overwrite=True
        )
        pending.guard(optimizer)
        optimizer.add_param_group({"params": last})
        step = in_thread(trainer.step)
        wait_until(lambda: is_awaited(pending))
        copies.open()
        step.result(PATIENCE_S)
        pending.wait()
    assert_saved(url, {"model": expected})


def test_a_guard_of_an_eager_save_has_nothing_to_do() -> None:
    trainer = Trainer()
    pending = Snapshot.async_take("memory://lazy/none", trainer.state, overwrite=True)
    with pending.guard(trainer.optimizer) as guard:
        assert isinstance(guard, actorsnap.Guard)
        trainer.step()
    pending.wait()
    assert trainer.num_hooks() == 0


class Wrapper(torch.optim.Optimizer):
    """Has the hooks' methods, but no place for hooks."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.param_groups = inner.param_groups


@pytest.mark.parametrize("stage", ["lazy", "eager"])
@each_facade
def test_bad_arguments(api: Facade, stage: str) -> None:
    with pytest.raises(UsageError, match="stage must be 'eager' or 'lazy', not 'later'"):
        api.run(api.Snapshot.async_take("memory://lazy/bad", {}, stage="later"))
    trainer = Trainer()
    pending = api.run(
        api.Snapshot.async_take(
            "memory://lazy/bad", trainer.state, stage=stage, options=CHUNKS, overwrite=True
        )
    )
    with pytest.raises(UsageError, match=r"guard takes torch.optim.Optimizers, not Sequential"):
        pending.guard(trainer.optimizer, trainer.model)
    with pytest.raises(UsageError, match=r"guard takes torch.optim.Optimizers, not Wrapper"):
        pending.guard(trainer.optimizer, Wrapper(trainer.optimizer))
    assert trainer.num_hooks() == 0
    api.run(pending.wait())


def test_an_interrupt_in_a_waiting_hook() -> None:
    """It comes out of ``step``, which has changed nothing; the save goes on, and so does the
    fence."""
    trainer = Trainer()
    expected = trainer.copy()
    url = "memory://lazy/interrupt"
    with held_copies() as copies:
        pending = Snapshot.async_take(
            url, trainer.state, stage="lazy", options=CHUNKS, overwrite=True
        )
        pending.guard(trainer.optimizer)
        trainer.forward_and_backward()
        main = threading.get_ident()

        def interrupt() -> None:
            wait_until(lambda: is_awaited(pending))
            signal.pthread_kill(main, signal.SIGINT)

        interrupted = in_thread(interrupt)
        with pytest.raises(KeyboardInterrupt):
            trainer.optimizer.step()
        interrupted.result(PATIENCE_S)
        step = in_thread(trainer.optimizer.step)
        time.sleep(0.01)
        assert not step.done()
        copies.open()
        step.result(PATIENCE_S)
        pending.wait()
    assert_saved(url, expected)
    assert trainer.num_hooks() == 0


# Lives of others


def test_memory_is_kept_until_it_is_copied_and_let_go_then() -> None:
    trainer = Trainer()
    expected = trainer.copy()
    kept = weakref.ref(trainer.model.get_parameter("0.weight").untyped_storage())
    with gated() as (url, gate):
        with held_copies() as copies:
            pending = Snapshot.async_take(url, trainer.state, stage="lazy", options=CHUNKS)
            guard = pending.guard(trainer.optimizer)
            del trainer
            gc.collect()
            assert kept() is not None
            copies.open()
            pending.staged()
        del guard
        gc.collect()
        assert kept() is None
        assert not pending.done()
        gate.open()
        pending.wait()
        assert_saved(url, expected)


def test_the_uploader_process_dies_amid_the_copies(tmp_path: Path) -> None:
    """The next one gets what is copied already, and waits for the rest as the step does."""
    trainer = Trainer()
    expected = trainer.copy()
    url = str(tmp_path / "s")
    uploader = find_uploader(Host.get())
    with held_copies() as copies:
        pending = Snapshot.async_take(url, trainer.state, stage="lazy", options=PROCESS)
        pending.guard(trainer.optimizer)
        copies.let(2)
        wait_until(lambda: copies.num_begun >= 3)
        first = uploader.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: uploader.pid not in (None, first))
        step = in_thread(trainer.step)
        wait_until_awaited(pending)
        copies.open()
        step.result(PATIENCE_S)
        pending.wait()
    assert_saved(url, expected)


SCRIPT = """
    import os, time, torch
    from actorsnap.actors import staging
    copy = staging.gather
    def dawdle(*arguments):
        time.sleep(0.05)
        copy(*arguments)
    staging.gather = dawdle
    torch.set_num_threads(1)  # those of a pool are not in a forked child
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.weight.grad = torch.ones_like(model.weight)
    torch.nn.init.constant_(model.weight, 0.5)
    pending = actorsnap.sync.Snapshot.async_take(
        sys.argv[1], {"model": model}, stage="lazy", options=Options(chunk_bytes=2 << 20)
    )
    pending.guard(optimizer)
"""


def saved_weight(url: Path) -> list[float]:
    values: list[float] = Snapshot(url).get_state_dict_for_key("model")["weight"].flatten().tolist()
    return values


def test_the_interpreter_exits_with_copies_to_make(tmp_path: Path) -> None:
    done = run_script(SCRIPT, tmp_path / "s")
    assert done.returncode == 0, done.stderr
    assert "waiting for the pending snapshot before exit" in done.stderr
    assert set(saved_weight(tmp_path / "s")) == {0.5}


def test_a_forked_child_steps_without_the_fence(tmp_path: Path) -> None:
    """It has the hooks, and nobody copies there."""
    done = run_script(
        SCRIPT
        + """
    child = os.fork()
    if child == 0:
        optimizer.step()
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    optimizer.step()
    pending.wait()
""",
        tmp_path / "s",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "7\n"
    assert set(saved_weight(tmp_path / "s")) == {0.5}


def _set_budget(host: Host, nbytes: int) -> None:
    host.resources.set_budget(nbytes)
    host.submit(anyio.lowlevel.checkpoint()).future.result()  # the next test reads it


@contextmanager
def _small_budget() -> Iterator[None]:
    host = Host.get()
    before = host.resources.budget.limit_bytes
    _set_budget(host, 4 * MIB)
    try:
        yield
    finally:
        _set_budget(host, before)


@pytest.fixture
def own_budget() -> Iterator[None]:
    with _small_budget():
        yield


def test_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "saving.md").read_text()
    (block,) = [block for block in blocks(text, "python") if 'stage="lazy"' in block]
    names: dict[str, Any] = {}
    exec(block, names)
    found = names["snapshot"].get_state_dict_for_key("optim")
    assert found["state"][0]["step"] == 2
