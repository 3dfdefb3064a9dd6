# SPDX-License-Identifier: Apache-2.0
"""Code of the application that raises what means something else to its caller."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from actorsnap import Options, sync
from tests.api.facades import Facade, each_facade

FAST = Options(fsync=False, timeout_s=30.0)


KINDS: dict[str, BaseException] = {
    "CancelledError": asyncio.CancelledError("mine"),
    "StopIteration": StopIteration(3),
    "GeneratorExit": GeneratorExit(),
    "group": BaseExceptionGroup("several", [asyncio.CancelledError()]),
}


class Stateful:
    """Raises in one of its methods."""

    def __init__(self, error: BaseException | None = None, where: str = "") -> None:
        self.error, self.where = error, where
        self.tensor = torch.zeros(10)

    def state_dict(self) -> dict[str, Any]:
        if self.where == "state_dict":
            assert self.error is not None
            raise self.error
        return {"t": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.where == "load_state_dict":
            assert self.error is not None
            raise self.error


@pytest.fixture
def saved(tmp_path: Path) -> str:
    url = str(tmp_path / "saved")
    sync.Snapshot.take(url, {"mine": Stateful()}, options=FAST)
    return url


def assert_named(error: RuntimeError, kind: str, method: str) -> None:
    assert type(KINDS[kind]).__name__ in str(error)
    assert error.__cause__ is KINDS[kind]
    assert any(f"{method}() of 'mine' in the app state" in note for note in error.__notes__)


@each_facade
@pytest.mark.parametrize("call", ["take", "async_take"])
@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_in_a_save(api: Facade, call: str, kind: str, tmp_path: Path) -> None:
    app_state = {"mine": Stateful(KINDS[kind], "state_dict")}
    with pytest.raises(RuntimeError) as caught:
        api.run(getattr(api.Snapshot, call)(tmp_path / "s", app_state, options=FAST))
    assert_named(caught.value, kind, "state_dict")


@each_facade
@pytest.mark.parametrize("method", ["state_dict", "load_state_dict"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_restore(api: Facade, method: str, kind: str, saved: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        api.run(api.Snapshot(saved).restore({"mine": Stateful(KINDS[kind], method)}))
    assert_named(caught.value, kind, method)


@each_facade
@pytest.mark.parametrize("kind", KINDS)
def test_a_callback_of_a_copy(api: Facade, kind: str, saved: str, tmp_path: Path) -> None:
    def report(event: object) -> None:
        raise KINDS[kind]

    with pytest.raises(RuntimeError) as caught:
        api.run(api.Snapshot(saved).copy_to(tmp_path / "copy", on_event=report))
    assert type(KINDS[kind]).__name__ in str(caught.value)
    assert "actorsnap: on_event of the copy raised this" in caught.value.__notes__


@each_facade
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_and_exit_pass(api: Facade, kind: type[BaseException], tmp_path: Path) -> None:
    with pytest.raises(kind):
        api.run(api.Snapshot.take(tmp_path / "s", {"mine": Stateful(kind(), "state_dict")}))
