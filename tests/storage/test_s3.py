"""Storage in buckets: the contract, and what only this backend promises."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from actorsnap.storage import Storage, StorageContext, open_storage
from actorsnap.storage.s3_client import S3Options, shared_client
from actorsnap.testing import StorageConformance, run_blocking_in_thread
from actorsnap.testing.conformance import MakeStorage

_numbers = itertools.count()


@pytest.fixture(scope="session")
def moto() -> Iterator[dict[str, Any]]:
    """``storage_options`` of a moto server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                with urllib.request.urlopen(url, timeout=5):
                    break
            except urllib.error.HTTPError:
                break
            except OSError:
                assert time.monotonic() < deadline, "moto does not answer"
                time.sleep(0.05)
        yield {
            "endpoint_url": url,
            "region": "us-east-1",
            "access_key_id": "testing",
            "secret_access_key": "a-secret-of-this-test",
        }
    finally:
        server.kill()
        server.wait()


def opened(url: str, options: dict[str, Any]) -> Storage:
    context = StorageContext(run_blocking=run_blocking_in_thread, options=options)
    return open_storage(url, context)


async def make_bucket(options: dict[str, Any]) -> str:
    name = f"bucket-{next(_numbers)}"
    client = shared_client(S3Options(**options), run_blocking_in_thread)
    try:
        await client.call("create_bucket", Bucket=name)
    finally:
        await client.release()
    return name


class TestMoto(StorageConformance):
    num_many = 1010
    num_examples = 5

    @pytest.fixture
    def make_storage(self, moto: dict[str, Any]) -> MakeStorage:
        bucket = anyio.run(make_bucket, moto)
        return lambda: opened(f"s3://{bucket}/some/prefix", moto)
