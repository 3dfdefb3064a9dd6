# SPDX-License-Identifier: Apache-2.0
"""``actorsnap.testing.check_resume``: finds each kind of state that a job forgets."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from actorsnap import RNGState, StateDict, UsageError
from actorsnap.testing import check_resume
from tests.pages import ROOT, all_blocks

SAMPLES = torch.linspace(-1, 1, 40).reshape(10, 4)


class Batches:
    """Shuffled batches of two, epoch after epoch."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.order = torch.empty(0, dtype=torch.int64)
        self.position = 0

    def take(self) -> torch.Tensor:
        if self.position >= len(self.order):
            self.order = torch.randperm(len(SAMPLES), generator=self.generator)
            self.position = 0
        self.position += 2
        return SAMPLES[self.order[self.position - 2 : self.position]]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.position = state["order"], state["position"]


class GeneratorState:
    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["state"])


class Ema:
    """An average of an author who did not think of ``state_dict``."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.shadow[name].lerp_(parameter.detach(), 0.1)


class Trainer:
    def __init__(self, *forgotten: str) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.batches = Batches(self.generator)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        average = get_ema_multi_avg_fn(0.9)
        self.ema = AveragedModel(self.model, multi_avg_fn=average, use_buffers=True)
        self.progress = StateDict(samples=0)
        app_state: dict[str, Any] = {
            "generator": GeneratorState(self.generator),
            **{k: v for k, v in vars(self).items() if k not in ("generator", "app_state")},
            "rng": RNGState(),
        }
        self.app_state = {k: v for k, v in app_state.items() if k not in forgotten}

    def step(self) -> Any:
        batch = self.batches.take()
        loss = self.model(batch).square().mean()
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.ema.update_parameters(self.model)
        self.progress["samples"] += len(batch)
        return {"batch": batch, "loss": loss.detach()}


def complaint(make: Any, **settings: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        check_resume(make, **settings)
    return str(caught.value)


@pytest.mark.parametrize(("steps", "more"), [(1, 1), (3, 4), (5, 5), (7, 9)])
def test_a_trainer_that_forgets_nothing(steps: int, more: int) -> None:
    check_resume(Trainer, steps=steps, more=more)


@pytest.mark.parametrize(
    ("forgotten", "first"),
    [
        ("generator", "generator"),
        ("batches", "batches/order"),
        ("model", "model/0.weight"),
        ("optimizer", "optimizer/state/0/momentum_buffer"),
        ("scheduler", "scheduler/last_epoch"),
        ("scaler", "scaler/scale"),
        ("ema", "ema/n_averaged"),
        ("progress", "progress/samples"),
        ("rng", "random generators/torch"),
    ],
)
def test_names_what_is_forgotten(forgotten: str, first: str) -> None:
    text = complaint(lambda: Trainer(forgotten), steps=3)
    assert f"differs right after the restore, first at {first}:\n" in text
    advice = "Put RNGState()" if forgotten == "rng" else f"Put trainer.{forgotten}"
    assert f"\n{advice} into the app state, which has " in text


def test_the_values_are_named() -> None:
    text = complaint(lambda: Trainer("progress", "scheduler"), steps=3)
    assert "\n  scheduler/last_epoch: 0, not 3\n" in text
    assert "\n  progress/samples: 0, not 6\n" in text
    assert "app state, which has 'batches', 'ema', 'generator', 'model'" in text


def test_state_of_a_class_without_state_dict() -> None:
    class Own(Trainer):
        def __init__(self) -> None:
            super().__init__()
            self.shadow = Ema(self.model)

        def step(self) -> Any:
            self.shadow.update(self.model)
            return super().step()

    text = complaint(Own)
    assert "first at shadow/shadow/0.weight:\n" in text
    assert "\n  shadow/shadow/0.weight: float32 tensor (4, 4), of other values\n" in text


def test_a_stateful_that_leaves_something_out() -> None:
    class Forgetful(Batches):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "epoch": getattr(self, "epoch", 0)}

        def take(self) -> torch.Tensor:
            self.epoch = getattr(self, "epoch", 0) + 1
            return super().take()

    class Own(Trainer):
        def __init__(self) -> None:
            super().__init__()
            self.batches = self.app_state["batches"] = Forgetful(self.generator)

    text = complaint(Own)
    assert "first at batches/epoch:\n  batches/epoch: 0, not 3" in text
    assert "It is 'batches' of the app state: its state_dict or load_state_dict leaves" in text


def test_what_only_the_steps_show() -> None:
    """The position of an iterator."""

    class Own(Trainer):
        def __init__(self) -> None:
            super().__init__()
            self.rows: Iterator[int] | None = None

        def step(self) -> Any:
            self.rows = self.rows or itertools.count()
            return {**super().step(), "row": next(self.rows)}

    text = complaint(Own, steps=2)
    assert "differs at step 1 after the restore, first at step/row:" in text
    assert "step/row: 0, not 2" in text


@pytest.mark.parametrize("kind", ["python", "numpy", "numpy_old"])
def test_other_generators(kind: str) -> None:
    class Own(Trainer):
        def __init__(self) -> None:
            super().__init__()
            self.augment: Any = {
                "python": lambda: random.Random(1),
                "numpy": lambda: np.random.default_rng(1),
                "numpy_old": lambda: np.random.RandomState(1),  # type: ignore[no-untyped-call]
            }[kind]()

        def step(self) -> Any:
            draw = self.augment.random if kind != "numpy_old" else self.augment.random_sample
            return {**super().step(), "x": draw()}

    assert "differs right after the restore, first at augment:" in complaint(Own)


def test_generators_that_are_not_used_may_differ() -> None:
    class Plain:
        def __init__(self) -> None:
            self.state = StateDict(n=random.random())
            torch.rand(3)
            self.app_state = {"state": self.state}

        def step(self) -> Any:
            self.state["n"] += 1
            return self.state["n"]

    check_resume(Plain)


def test_looking_draws_no_numbers() -> None:
    class Drawing(StateDict):
        def state_dict(self) -> dict[str, Any]:
            torch.rand(1)
            return super().state_dict()

    class Own(Trainer):
        def __init__(self) -> None:
            super().__init__()
            self.drawing = self.app_state["drawing"] = Drawing(x=1)

    check_resume(Own)


def test_what_may_differ() -> None:
    class Own(Trainer):
        def __init__(self) -> None:
            super().__init__()
            self.started_s = random.random()

    assert "pass ignore=['started_s']" in complaint(Own)
    check_resume(Own, ignore=["started*"])


def test_cycles_and_the_path(tmp_path: Path) -> None:
    class Own(Trainer):
        def __init__(self) -> None:
            super().__init__()
            self.me = {"again": self}

    check_resume(Own, path=tmp_path / "kept")
    assert (tmp_path / "kept/actorsnap.json").exists()


def test_bad_input() -> None:
    with pytest.raises(UsageError, match="more must be an integer of at least 1"):
        check_resume(Trainer, more=0)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_torchdatas_loader(num_workers: int) -> None:
    """In an epoch, at its end and over it."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    class Rows:
        """Begins an epoch in ``load_state_dict``, if ``is_early``."""

        def __init__(self, *, is_early: bool) -> None:
            dataset = torch.utils.data.TensorDataset(SAMPLES)
            self.loader = torchdata.StatefulDataLoader(
                dataset, batch_size=2, shuffle=True, num_workers=num_workers
            )
            self.is_early = is_early
            self.batches: Iterator[Any] = iter(())

        def take(self) -> Any:
            for batch in self.batches:
                return batch
            self.batches = iter(self.loader)
            return next(self.batches)

        def state_dict(self) -> Any:
            return self.loader.state_dict()

        def load_state_dict(self, state: Any) -> None:
            self.loader.load_state_dict(state)
            if self.is_early:
                self.batches = iter(self.loader)

    class Own:
        def __init__(self, *forgotten: str, is_early: bool = True) -> None:
            self.rows = Rows(is_early=is_early)
            app_state = {"rows": self.rows, "rng": RNGState()}
            self.app_state = {k: v for k, v in app_state.items() if k not in forgotten}

        def step(self) -> Any:
            return self.rows.take(), torch.rand(1)

    for steps in (3, 5, 7):
        check_resume(Own, steps=steps, more=9)
    assert "first at rows/" in complaint(lambda: Own("rows"))
    text = complaint(lambda: Own(is_early=False))
    assert "at step 1 after the restore, first at step/1" in text
    assert "A data loader draws one when it begins to iterate" in text
    assert "first at random generators/torch" in complaint(lambda: Own("rng"))


def test_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    """What docs/howto/exact-resume.md shows is what happens."""
    names: dict[str, Any] = {}
    for kind, block in all_blocks((ROOT / "docs/howto/exact-resume.md").read_text()):
        if kind == "python":
            exec(compile(block, f"resume.md: {block[:60]!r}", "exec"), names)
        else:
            assert capsys.readouterr().out == block
