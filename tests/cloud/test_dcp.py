# SPDX-License-Identifier: Apache-2.0
"""``torch.distributed.checkpoint`` over snapshots in object storage (``actorsnap.interop.dcp``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from actorsnap import NotASnapshot, ObjectExists, SnapshotAborted
from actorsnap.interop import dcp as ours
from actorsnap.interop.dcp import ActorsnapReader, ActorsnapWriter, installed
from actorsnap.sync import Snapshot
from tests.cloud.places import Store, keys_of, requests_of, uploads_of
from tests.ranks.models import MODULES
from tests.support.proxy import Answer, FaultProxy
from tests.worlds import Director

dcp: Any = torch.distributed.checkpoint  # its stubs export little

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


def _state(scale: float = 1.0) -> dict[str, Any]:
    large = torch.arange(5 << 20, dtype=torch.float32) * scale
    return {"model": {"w": large, "b": torch.ones(5) * scale}, "n": scale}


def _is(state: dict[str, Any], scale: float) -> bool:
    expected = _state(scale)
    return (
        torch.equal(state["model"]["w"], expected["model"]["w"])
        and torch.equal(state["model"]["b"], expected["model"]["b"])
        and state["n"] == scale
    )


def test_each_way_in(store: Store) -> None:
    bucket, options = store.make_bucket(), store.storage_options()
    urls = [store.url(bucket, name) for name in ("native", "async", "writer", "installed")]
    ours.save(_state(2), storage_writer=ActorsnapWriter(urls[0], storage_options=options))
    future = ours.async_save(
        _state(2), storage_writer=ActorsnapWriter(urls[1], storage_options=options)
    )
    assert future.result().state_dict_metadata["model.b"].size == (5,)
    dcp.save(_state(2), storage_writer=ActorsnapWriter(urls[2], storage_options=options))
    with installed(marker=True, storage_options=options):
        dcp.save(_state(2), checkpoint_id=urls[3])
        back = _state(0)
        dcp.load(back, checkpoint_id=urls[3])
        assert _is(back, 2)
    for url in urls:
        for load in (ours.load, dcp.load):
            back = _state(0)
            load(back, storage_reader=ActorsnapReader(url, storage_options=options))
            assert _is(back, 2)
        assert Snapshot(url, storage_options=options).verify("full").ok
    assert "installed/.metadata" in keys_of(store, bucket)


@pytest.mark.few
@pytest.mark.parametrize("save", [dcp.save, ours.save], ids=["torch", "ours"])
def test_overwriting_and_failing(store: Store, store_proxy: FaultProxy, save: Any) -> None:
    bucket, options = store.make_bucket(), store.storage_options()
    url = store.url(bucket, "run")
    back = _state(0)
    with pytest.raises(CheckpointException) as caught:
        ours.load(back, storage_reader=ActorsnapReader(url, storage_options=options))
    assert isinstance(caught.value.failures[0][0], NotASnapshot)
    for scale in (1, 2):
        save(_state(scale), storage_writer=ActorsnapWriter(url, storage_options=options))
    with pytest.raises(CheckpointException, match="Checkpoint already exists") as caught:
        save(
            _state(3), storage_writer=ActorsnapWriter(url, overwrite=False, storage_options=options)
        )
    assert isinstance(caught.value.failures[0][0], ObjectExists)
    kept = keys_of(store, bucket)
    proxied = store.storage_options(store_proxy) | {"max_attempts": 2}
    refusal = store_proxy.fault(Answer(status=403), **requests_of(store).commit)
    with refusal as rule, pytest.raises(CheckpointException) as caught:
        save(_state(3), storage_writer=ActorsnapWriter(url, storage_options=proxied))
    assert rule.num_hits
    assert isinstance(caught.value.failures[0][0], SnapshotAborted)
    ours.load(back, storage_reader=ActorsnapReader(url, storage_options=options))
    assert _is(back, 2)
    assert keys_of(store, bucket) == kept
    assert not uploads_of(store, bucket)


@pytest.fixture(scope="module")
def director() -> Iterator[Director]:
    imports = ("torch.distributed.checkpoint.state_dict", "actorsnap.interop.dcp")
    with Director("tests.interop.dcp_ranks", *MODULES, *imports) as director:
        yield director


@pytest.mark.slow  # each way in is above, ranks are in tests/interop
@pytest.mark.usefixtures("forker")
@pytest.mark.parametrize(
    ("name", "case"),
    [("ceph", "train"), ("fake_gcs", "train"), ("moto", "train"), ("ceph", "native")],
)
def test_ranks(
    request: pytest.FixtureRequest,
    director: Director,
    tmp_path: Any,
    name: str,
    case: str,
) -> None:
    server: Store = request.getfixturevalue(name)
    url = server.url(server.make_bucket(), "s")
    common = {"path": url, "folder": str(tmp_path), "store": "tcp", "env": server.env()}
    director.play("direct", num_ranks=2, name=case, kind="fsdp2", **common)
    assert director.play("direct", num_ranks=4, name="load", kind="fsdp2", **common) == [True] * 4
    assert Snapshot(url, storage_options=server.storage_options()).verify("full").ok
