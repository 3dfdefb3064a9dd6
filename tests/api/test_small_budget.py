# SPDX-License-Identifier: Apache-2.0
"""A budget smaller than a chunk: chunks get smaller, and the budget holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio.lowlevel
import pytest
import torch

from actorsnap import Options, StateDict, sync
from actorsnap.runtime.host import Host

MIB = 1 << 20
SMALL = Options(fsync=False, memory_budget_bytes=3 * MIB)


@pytest.fixture(autouse=True)
def _own_budget() -> Iterator[None]:
    host = Host.get()
    before = host.resources.budget.limit_bytes
    host.resources.budget.peak_bytes = 0
    yield
    host.resources.set_budget(before)
    host.submit(anyio.lowlevel.checkpoint()).future.result()  # the next test reads it


def peak_bytes() -> int:
    return Host.get().resources.budget.peak_bytes


def test_async_take(tmp_path: Path) -> None:
    state = {"s": StateDict(x=torch.arange(4 * MIB))}
    sync.Snapshot.async_take(tmp_path / "s", state, options=SMALL).wait()
    assert 0 < peak_bytes() <= 3 * MIB  # it was 16 MiB


def test_a_restore_into_strided_memory(tmp_path: Path) -> None:
    x = torch.arange(4 * MIB).view(2048, 2048)
    sync.Snapshot.take(tmp_path / "s", {"s": StateDict(x=x)}, options=Options(fsync=False))
    Host.get().resources.budget.peak_bytes = 0
    target = torch.zeros_like(x).t()
    sync.Snapshot(tmp_path / "s", options=SMALL).restore({"s": StateDict(x=target)})
    assert torch.equal(target, x)
    assert 0 < peak_bytes() <= 3 * MIB  # it was 16 MiB
