# SPDX-License-Identifier: Apache-2.0
"""A managed run in object storage, throttled and restarted: nothing is lost, nothing is left."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from actorsnap import StateDict
from actorsnap.manager import every, keep
from actorsnap.manager.sync import CheckpointManager
from tests.cloud.places import Store, keys_of, uploads_of
from tests.support.proxy import Answer, Exchange, FaultProxy, Rule

pytestmark = pytest.mark.slow

_COMMIT = r"step-\d+\.g\d+(/|%2F)actorsnap\.json"

PATTERNS: dict[str, dict[str, dict[str, str]]] = {
    "s3": {
        "list": {"method": "GET", "pattern": "list-type=2"},
        "commit": {"method": "PUT", "pattern": _COMMIT},
        "record": {"method": "PUT", "pattern": r"\.manager/"},
        "delete": {"method": "POST", "pattern": r"\?delete"},
    },
    "gs": {
        "list": {"method": "GET", "pattern": r"/o\?prefix"},
        "commit": {"method": "POST", "pattern": rf"/upload/.*{_COMMIT}"},
        "record": {"method": "POST", "pattern": r"/upload/.*\.manager%2F"},
        "delete": {"method": "POST", "pattern": "/batch/"},
    },
}
"""Requests of a manager."""


class Job:
    """A trainer whose state shows the step that it is of."""

    def __init__(self, store: Store, bucket: str, proxy: FaultProxy | None = None) -> None:
        self.state = StateDict(weight=torch.zeros(1000), step=-1)
        self.manager = CheckpointManager(
            store.url(bucket, "run"),
            {"train": self.state},
            save=every.steps(1),
            keep=keep.last(3),
            min_valid=1,
            storage_options=store.storage_options(proxy),
        )

    def train(self, *steps: int) -> None:
        for step in steps:
            self.state["weight"].fill_(step)
            self.state["step"] = step
            self.manager.maybe_save(step)

    def resume(self) -> int:
        found = self.manager.restore_latest()
        if found is None:
            return 0
        assert found.skipped == ()
        assert self.state["step"] == found.step
        assert torch.equal(self.state["weight"], torch.full((1000,), float(found.step)))
        return found.step + 1


@pytest.fixture(params=["ceph", "moto", "fake_gcs"])
def managed_store(request: pytest.FixtureRequest) -> Store:
    server: Store = request.getfixturevalue(request.param)
    return server


@pytest.fixture
def proxy(managed_store: Store) -> Iterator[FaultProxy]:
    with FaultProxy(managed_store.endpoint) as proxy:
        yield proxy


def test_thirty_throttled_saves(managed_store: Store, proxy: FaultProxy) -> None:
    bucket = managed_store.make_bucket()
    patterns = PATTERNS[managed_store.scheme]
    rules: list[Rule] = []
    for last in (9, 19, 29):  # three jobs
        # Of each kind: the first, and two in the middle of the job.
        for which in patterns.values():
            for skip, times in ((0, 1), (5, 2)):
                rules.append(
                    proxy.add(
                        Answer(status=503),
                        method=which["method"],
                        pattern=which["pattern"],
                        skip=skip,
                        times=times,
                    )
                )
        job = Job(managed_store, bucket, proxy)
        first = job.resume()
        assert first == last - 9
        job.train(*range(first, last + 1))
        job.manager.close()
        assert job.manager.status().failed_deletes == {}
    assert all(rule.num_hits for rule in rules), [rule for rule in rules if not rule.num_hits]
    for rule in rules:
        rule.remove()
    last_job = Job(managed_store, bucket)
    assert last_job.resume() == 30
    # The third job continued step 19.
    assert last_job.manager.all_steps() == [19, 27, 28, 29]
    last_job.manager.close()
    assert uploads_of(managed_store, bucket) == []
    folders = {key.split("/")[1] for key in keys_of(managed_store, bucket)}
    names = {"step-0000000019.g2", *(f"step-00000000{step}.g3" for step in (27, 28, 29))}
    assert folders == {".manager", *names}
    records = [key for key in keys_of(managed_store, bucket) if "/.manager/" in key]
    assert records == [f"run/.manager/runs/0000000{n}.json" for n in (1, 2, 3)]


def test_requests_of_a_pass(managed_store: Store, proxy: FaultProxy) -> None:
    """What was seen once is not read again, however many snapshots stay."""
    bucket = managed_store.make_bucket()
    job = Job(managed_store, bucket)
    job.train(*range(8))
    job.manager.close()
    looker = Job(managed_store, bucket, proxy).manager
    looker.explain(keep.all())
    proxy.forget()
    assert len(looker.explain(keep.all())) == 3
    asked = [described(each) for each in proxy.exchanges()]
    # The root, its records, and on S3 its unfinished uploads.
    assert len(asked) == (3 if managed_store.scheme == "s3" else 2), asked
    looker.close()


def described(exchange: Exchange) -> str:
    return f"{exchange.method} {re.sub('[?].*', '', exchange.target)}"
