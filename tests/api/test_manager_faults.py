"""A managed run that is killed, or whose storage fails, at every operation; and two managers.

The run makes six saves and a rewind, and deletes what its policy gives up: ``tests.api.managed``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from actorsnap.format.steps import StepName
from tests.api import managed
from tests.api.zygote import Zygote

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote("tests.api.managed") as zygote:
        yield zygote


@pytest.mark.parametrize(
    ("when", "writes_only", "stride"),
    [
        ("after", True, 2),
        pytest.param("before", True, 1, marks=slow),
        pytest.param("after", True, 1, marks=slow),
        pytest.param("before", False, 1, marks=slow),
        pytest.param("after", False, 1, marks=slow),
    ],
)
def test_killed_at_an_operation(
    zygote: Zygote, tmp_path: Path, when: str, writes_only: bool, stride: int
) -> None:
    found = set()
    for at in itertools.count(1, stride):
        root, log = tmp_path / str(at) / "run", tmp_path / f"{at}.log"
        arguments = {"root": str(root), "log": str(log)}
        ending = zygote.call("run_and_die", at=at, when=when, writes_only=writes_only, **arguments)
        managed.assert_none_lost(root, log)
        expected = managed.timeline_of(managed.committed_in(log), root)[-1:]
        said = zygote.call("resume", **arguments).result()
        assert said["found"] == (str(expected[0]) if expected else None), at
        assert said["skipped"] == []
        if expected:
            # Saved by the first process before the rewind, or after it.
            assert said["state"] == [expected[0].step, expected[0].generation - 1]
        managed.assert_none_lost(root, log)
        managed.assert_only_kept(root, log, StepName.parse(said["found"] or ""))
        found.add(said["found"])
        if not ending.was_killed:
            ending.result()
            break
    assert at > (35 if writes_only else 100)
    assert found >= {None, "step-0000000001.g1", "step-0000000003.g1", "step-0000000004.g2"}
