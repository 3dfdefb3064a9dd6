# SPDX-License-Identifier: Apache-2.0
"""``plan_restore``: what a restore would read, without reading it."""

from __future__ import annotations

from inspect import signature
from pathlib import Path

import pytest
import torch

from actorsnap import IncompatibleState, NotASnapshot, Options, RestorePlan, StateDict, UsageError
from actorsnap.storage.base import Storage
from actorsnap.testing import FaultyStorage
from actorsnap.testing.faults import Verb
from tests.api.facades import Facade, each_facade
from tests.api.faults import faulty, faulty_url

MIB = 1 << 20
FAST = Options(fsync=False, chunk_bytes=2 * MIB)


def saved() -> dict[str, StateDict]:
    return {
        "model": StateDict(w=torch.arange(5 * MIB, dtype=torch.uint8), b=torch.ones(10)),
        "step": StateDict(n=7),
    }


@each_facade
def test_it_reads_no_data_and_changes_nothing(api: Facade, tmp_path: Path) -> None:
    api.run(api.Snapshot.take(tmp_path, saved(), options=FAST))
    target = {"model": StateDict(w=torch.zeros(5 * MIB, dtype=torch.uint8), b=torch.zeros(10))}
    storages: list[FaultyStorage] = []

    def wrap(inner: Storage) -> FaultyStorage:
        storages.append(FaultyStorage(inner))
        return storages[-1]

    with faulty(wrap):
        snapshot = api.Snapshot(faulty_url(tmp_path), options=FAST)
        plan = api.run(snapshot.plan_restore(target))
        (storage,) = storages
        assert storage.counts[Verb.READ_INTO] == 0
        assert not target["model"]["w"].any()
        assert plan == RestorePlan(
            mode="direct",
            reason="there is one rank",
            bytes_needed=5 * MIB + 40,
            bytes_read=plan.bytes_read,
            num_requests=plan.num_requests,
            bytes_read_by_rank=(plan.bytes_read,),
        )
        assert plan.is_complete
        assert 1.0 <= plan.read_amplification < 1.01
        api.run(snapshot.restore(target))
        assert storage.counts[Verb.READ_INTO] == plan.num_requests == 4


@each_facade
def test_it_says_what_does_not_fit(api: Facade, tmp_path: Path) -> None:
    api.run(api.Snapshot.take(tmp_path, saved(), options=FAST))
    target = {
        "model": StateDict(w=torch.zeros(3), b=torch.zeros(10), c=torch.zeros(1)),
        "more": StateDict(),
    }
    snapshot = api.Snapshot(tmp_path)
    plan = api.run(snapshot.plan_restore(target))
    assert not plan.is_complete
    assert plan.bytes_needed == 40
    with pytest.raises(IncompatibleState) as caught:
        api.run(snapshot.restore(target))
    error = caught.value
    assert (plan.missing, plan.unexpected, plan.mismatched) == (
        error.missing,
        error.unexpected,
        error.mismatched,
    )
    with pytest.raises(NotASnapshot):
        api.run(api.Snapshot(tmp_path / "nowhere").plan_restore(target))


@each_facade
def test_it_takes_the_arguments_of_a_restore(api: Facade, tmp_path: Path) -> None:
    api.run(api.Snapshot.take(tmp_path, saved(), options=FAST))
    target = {"model": StateDict(w=torch.zeros(3), b=torch.zeros(10))}
    snapshot = api.Snapshot(tmp_path)
    plan, same = signature(snapshot.plan_restore), signature(snapshot.restore)
    assert {*plan.parameters} == {*same.parameters}
    found = [
        api.run(snapshot.plan_restore(target, strict=strict, progress=True))
        for strict in (True, False)
    ]
    assert found[0] == found[1]
    assert len(found[1].mismatched) == 1
    with pytest.raises(UsageError, match="strict"):
        api.run(snapshot.plan_restore(target, strict="no"))
