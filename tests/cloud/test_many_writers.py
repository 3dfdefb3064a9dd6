# SPDX-License-Identifier: Apache-2.0
"""Several processes that save to one URL: against each other, and together."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from actorsnap.sync import Snapshot
from tests.api.places import leftovers, number_at
from tests.api.zygote import Zygote
from tests.cloud.places import Store, is_state, keys_of, state, uploads_of
from tests.cloud.ranks import NUM_FLOATS
from tests.support.cases import slow
from tests.worlds import Director


@pytest.fixture(scope="module")
def zygotes() -> list[Zygote]:
    return [Zygote.shared(), Zygote.shared(1)]


@pytest.mark.parametrize(
    ("name", "overwrite"),
    [
        slow("ceph", False),
        ("fake_gcs", False),
        slow("ceph", True),
        slow("fake_gcs", True),
    ],
)
def test_of_two_that_save_one_commits(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    zygotes: list[Zygote],
    tmp_path: Path,
    name: str,
    overwrite: bool,
) -> None:
    server: Store = request.getfixturevalue(name)
    for variable, value in server.env().items():
        monkeypatch.setenv(variable, value)
    bucket = server.make_bucket()
    fifos = [str(tmp_path / name) for name in ("a", "b")]
    for fifo in fifos:
        os.mkfifo(fifo)
    url, num_rounds = server.url(bucket, "run"), 3
    for number, zygote in enumerate(zygotes, 1):
        zygote.start(
            "race",
            url=url,
            number=number,
            overwrite=overwrite,
            fifos=fifos if number == 1 else fifos[::-1],
            num_rounds=num_rounds,
            env=server.env(),
        )
    outcomes = [zygote.end().result() for zygote in zygotes]
    for n, pair in enumerate(zip(*outcomes, strict=True)):
        place = f"{url}/{n}"
        found = asyncio.run(number_at(place))
        committed = [number for number, error in enumerate(pair, 1) if not error]
        assert found in committed
        assert len(committed) == 1 or overwrite
        assert set(pair) <= {"", "ObjectExists", "SnapshotAborted"}
        assert asyncio.run(leftovers(place)) == []
    assert uploads_of(server, bucket) == []


@pytest.fixture(scope="module")
def director() -> Iterator[Director]:
    with Director("tests.cloud.ranks") as director:
        yield director


@pytest.mark.parametrize("name", [slow("ceph"), slow("rclone"), "fake_gcs"])
def test_ranks_write_one_object_together(
    request: pytest.FixtureRequest, director: Director, name: str
) -> None:
    server: Store = request.getfixturevalue(name)
    bucket = server.make_bucket()
    url = server.url(bucket, "run")
    said = director.play("direct_take", num_ranks=2, url=url, env=server.env())
    # Each wrote a part of the one large object.
    assert said == [[True], [True]]
    assert sum("model" in key for key in keys_of(server, bucket)) == 1
    target = state(-1, num_floats=NUM_FLOATS)
    Snapshot(url, storage_options=server.storage_options()).restore(target)
    assert is_state(target, 1, num_floats=NUM_FLOATS)
