# SPDX-License-Identifier: Apache-2.0
"""Exports in object storage: which bytes pass through the client, and what is compared."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from actorsnap import ChecksumMismatch, Options, StateDict, UsageError
from actorsnap import Snapshot as AsyncSnapshot
from actorsnap.interop.exports import export_torch
from actorsnap.storage.base import StorageContext
from actorsnap.storage.registry import find_opener
from actorsnap.storage.s3_bucket import S3Bucket, Sent
from actorsnap.sync import Snapshot
from actorsnap.testing import run_blocking_in_thread
from tests.servers.fake_gcs import FakeGcsServer
from tests.servers.moto import MotoServer
from tests.support.proxy import FaultProxy

MIB = 1 << 20
PART = 5 * MIB


@pytest.fixture(scope="module", params=["moto", pytest.param("ceph", marks=pytest.mark.slow)])
def s3(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def state(num: int = 3, mib: int = 8) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"w{n}": torch.randn(mib * MIB // 4) for n in range(num)}


def sent_bytes(proxy: FaultProxy) -> int:
    """Bodies of uploads; not the XML of control calls."""
    asked = proxy.exchanges()
    return sum(each.bytes_up for each in asked if each.method == "PUT")


async def fetch(url: str, options: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of an export."""
    opener = await run_blocking_in_thread(find_opener, url)
    storage = opener(StorageContext(run_blocking=run_blocking_in_thread, options=options))
    found: dict[str, torch.Tensor] = {}
    folder.mkdir()
    async for info in storage.list(""):
        (folder / info.key).write_bytes(await storage.get(info.key))
        if info.key.endswith(".safetensors"):
            found |= load_file(folder / info.key)
    await storage.aclose()
    return found


async def test_s3_copies_whole_objects_and_ranges(s3: Any, tmp_path: Path) -> None:
    tensors = state()
    source, target = s3.make_bucket(), s3.make_bucket()
    with FaultProxy(s3.endpoint) as proxy:
        options = s3.storage_options(proxy)
        url = s3.url(source, "run")
        save = Options(min_object_bytes=16 * MIB, max_objects=1)
        snapshot = await AsyncSnapshot.take(
            url, {"model": StateDict(tensors)}, storage_options=options, options=save
        )
        proxy.forget()
        report = await snapshot.export_hf(s3.url(target, "a"), storage_options=options)
        # A whole object: nothing but heads of requests.
        assert sent_bytes(proxy) < 20_000
        assert report.copied_bytes == report.nbytes
        proxy.forget()
        rename = {f"model/w{number}": f"model/v{number}" for number in range(len(tensors))}
        await snapshot.export_hf(s3.url(source, "b"), storage_options=options, rename=rename)
        down = sum(each.bytes_down for each in proxy.exchanges())
        assert sent_bytes(proxy) < PART + 20_000  # the first part, with the header
        assert down < PART + 20_000
        proxy.forget()
        report = await snapshot.export_hf(
            s3.url(target, "c"), storage_options=options, max_shard_bytes=9 * MIB
        )
        assert len(report.files) == 4
        assert sent_bytes(proxy) < 3 * (4096 + PART) + 20_000
    direct = s3.storage_options()
    for number, (bucket, name) in enumerate([(target, "a"), (source, "b"), (target, "c")]):
        found = await fetch(s3.url(bucket, name), direct, tmp_path / str(number))
        assert len(found) == 3
        for each, tensor in found.items():
            assert torch.equal(tensor, tensors[f"w{each[1:]}"])


def test_s3_joins_and_casts_by_streaming(s3: Any, tmp_path: Path) -> None:
    """Also from a local folder, and to one: between storages every byte is compared."""
    options = s3.storage_options()
    tensors = state(2)
    near = Snapshot.take(tmp_path / "s", {"model": StateDict(tensors)})
    url = s3.url(s3.make_bucket(), "run")
    report = near.export_hf(f"{url}/hf", storage_options=options, dtype="float16")
    assert report.copied_bytes == 0
    again = Snapshot(f"{url}/hf", storage_options=options)
    found = again.get_state_dict_for_key("model")
    assert all(torch.equal(found[n], t.half()) for n, t in tensors.items())
    export_torch(again, f"{url}/x.pt", key="model", storage_options=options)
    file = Snapshot(f"{url}/x.pt", storage_options=options)
    report = file.export_hf(f"{url}/again", storage_options=options)
    assert report.copied_bytes > 0
    for far in (file, Snapshot(f"{url}/again", storage_options=options)):
        found = far.get_state_dict_for_key("model")
        assert all(torch.equal(found[n], t.half()) for n, t in tensors.items())
    with pytest.raises(UsageError, match="is part of what is exported"):
        again.export_hf(f"{url}/hf", storage_options=options, overwrite=True)
    again.export_hf(tmp_path / "hf")
    near_again = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(near_again[n], t.half()) for n, t in tensors.items())


def test_s3_tells_checksums_of_copies(moto: MotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the server says that it copied other bytes, the export fails, and is deleted."""
    options = moto.storage_options()
    url = moto.url(moto.make_bucket(), "run")
    app_state = {"model": StateDict(state(2))}
    snapshot = Snapshot.take(url, app_state, storage_options=options)
    original = S3Bucket.copy_range

    async def copied(self: Any, *args: Any) -> Sent:
        sent = await original(self, *args)
        return sent._replace(crc32c="AAAAAA==")

    monkeypatch.setattr(S3Bucket, "copy_range", copied)
    with pytest.raises(ChecksumMismatch, match="verify --full"):
        snapshot.export_hf(f"{url}-hf", storage_options=options)
    monkeypatch.undo()
    snapshot.export_hf(f"{url}-hf", storage_options=options)  # nothing is left


async def test_google_copies_whole_objects(fake_gcs: FakeGcsServer, tmp_path: Path) -> None:
    tensors = state(4)
    bucket = fake_gcs.make_bucket()
    with FaultProxy(fake_gcs.endpoint) as proxy:
        options = fake_gcs.storage_options(proxy)
        save = Options(min_object_bytes=16 * MIB, max_objects=2)
        snapshot = await AsyncSnapshot.take(
            fake_gcs.url(bucket, "run"),
            {"model": StateDict(tensors)},
            storage_options=options,
            options=save,
        )
        proxy.forget()
        report = await snapshot.export_hf(fake_gcs.url(bucket, "hf"), storage_options=options)
        asked = proxy.exchanges()
        assert len(report.files) == 3
        assert sum("/rewriteTo/" in each.target for each in asked) == 2
        assert sum(each.bytes_up for each in asked) < 50_000
        assert report.copied_bytes > 32 * MIB
        # With other names all passes through, and is compared.
        other = await snapshot.export_hf(
            fake_gcs.url(bucket, "hf2"),
            storage_options=options,
            rename=lambda path: re.sub("/w", "/v", path),
        )
        assert other.copied_bytes == 0
    found = await fetch(fake_gcs.url(bucket, "hf"), fake_gcs.storage_options(), tmp_path / "a")
    assert all(torch.equal(found[n], t) for n, t in tensors.items())
