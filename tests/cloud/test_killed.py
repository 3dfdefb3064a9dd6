# SPDX-License-Identifier: Apache-2.0
"""SIGKILL at every operation of a save into a bucket: the older snapshot or the new one is there,
and what else is, unfinished uploads among it, is garbage that can be collected.

How a kill leaves components, and how those are collected, is in ``tests/api/test_resume.py``.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actorsnap.cli import app
from actorsnap.sync import Snapshot
from tests.api.places import leftovers, number_at
from tests.api.zygote import Zygote
from tests.cloud.places import Store, uploads_of
from tests.servers.base import S3Server
from tests.support.cases import slow


@pytest.fixture(scope="module")
def zygote(store: Store) -> Iterator[Zygote]:
    """Its children find the server in the environment, and so does this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in store.env().items():
            patch.setenv(name, value)
        with Zygote(imports=["actorsnap.storage.gs", "actorsnap.storage.s3_client"]) as zygote:
            yield zygote


@pytest.mark.parametrize("store", ["ceph", slow("fake_gcs")], indirect=True)
@pytest.mark.parametrize(
    ("how", "when", "step"),
    [
        ("take", "after", 8),  # every eighth operation
        slow("take", "after", 1),
        slow("take", "before", 1),
        slow("async_take", "after", 1),
    ],
)
def test_killed_at_an_operation_of_a_save_that_replaces(
    zygote: Zygote, store: Store, how: str, when: str, step: int
) -> None:
    bucket = store.make_bucket()
    found, num_uploads = [], 0
    for at in itertools.count(1, step):
        url = store.url(bucket, f"run-{at}")
        assert zygote.call("save", url=url, number=1).result() == ""
        ending = zygote.call(
            "save_and_die_at_operation",
            url=url,
            number=2,
            how=how,
            overwrite=True,
            at=at,
            when=when,
        )
        found.append(asyncio.run(number_at(url)))
        if not ending.was_killed:
            assert ending.result() == ""
            break
        num_uploads += len(uploads_of(store, bucket))
        collected = CliRunner().invoke(app, ["rm", "--garbage", "--force", url])
        assert collected.exit_code == 0, collected.output
        assert asyncio.run(leftovers(url)) == []
        assert uploads_of(store, bucket) == []
        assert asyncio.run(number_at(url)) == found[-1]
    # The last writing operation but one commits: behind it what was replaced is deleted.
    commit = 1 if when == "before" else 2
    if step == 1:
        assert found == [1] * (len(found) - 3) + [commit, 2, 2]
    else:
        assert found == [1] * found.count(1) + [2] * found.count(2)
        assert found[0] == 1
    if isinstance(store, S3Server) and step == 1:
        assert num_uploads >= 2


@pytest.mark.parametrize("store", ["ceph"], indirect=True)
def test_a_copy_that_was_killed_leaves_no_uploads_behind_the_next(
    zygote: Zygote, store: Store, tmp_path: Path
) -> None:
    bucket = store.make_bucket()
    source, to = str(tmp_path / "source"), store.url(bucket, "run")
    assert zygote.call("save", url=source, number=1).result() == ""
    at = 0
    while not uploads_of(store, bucket):
        at += 1
        ending = zygote.call("copy_and_die_at_operation", source=source, to=to, at=at, when="after")
        assert ending.was_killed
    Snapshot(source).copy_to(to)
    assert asyncio.run(number_at(to)) == 1
    assert uploads_of(store, bucket) == []
