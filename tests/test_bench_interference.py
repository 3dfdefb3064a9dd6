# SPDX-License-Identifier: Apache-2.0
"""The benchmark beside a trainer, on a small state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from actorsnap import shutdown
from bench.savers import ActorsnapAwaited, ActorsnapBy, DcpBy, Saver, Saving
from bench.state import State, llama
from bench.trainer import Trainer, disturb
from tests.support.cases import slow


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)
    shutdown()


@pytest.fixture(scope="module")
def state() -> State:
    return llama(0.004)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "saver",
    [
        ActorsnapBy("process", offload="process"),
        slow(ActorsnapBy("thread", offload="thread", max_slowdown=0.02)),
        slow(ActorsnapAwaited("awaited")),
        DcpBy("thread"),
    ],
    ids=lambda saver: saver.name,
)
def test_a_save_is_disturbed_and_compared(saver: Saver, state: State, tmp_path: Path) -> None:
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    saver.open(None)
    try:
        found = disturb(Trainer(state), saver, state, target, str(tmp_path / "s"))
    finally:
        saver.close()
    assert 0.0 < found.blocked_s <= found.committed_s
    assert found.lost_s == found.blocked_s + found.extra_s
    assert found.inflation == 0.0 or found.num_steps > 0


class Late(ActorsnapBy):
    """Saves what the trainer has made of the state meanwhile."""

    def begin(self, state: State, url: str) -> Saving:
        is_saved = False

        def is_done() -> bool:
            nonlocal is_saved
            if not is_saved:
                is_saved = True
                return False
            super(Late, self).begin(state, url).wait()
            return True

        return Saving(is_done, lambda: None)


def test_what_was_saved_late_is_found(state: State, tmp_path: Path) -> None:
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    late = Late("late")
    late.open(None)
    with pytest.raises(RuntimeError, match="differs from what was saved"):
        disturb(Trainer(state), late, state, target, str(tmp_path / "s"))
