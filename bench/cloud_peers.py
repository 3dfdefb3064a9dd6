# SPDX-License-Identifier: Apache-2.0
"""One adapter per client of an object store, and per library that saves a state with one.

Each does what the library's own documents tell a user to do, and nothing smarter, with its
defaults where nothing is said here. One that is not installed, or does not get along with a
server, gives the reason instead of a number. Where a client is given ranges, they are of 16 MiB
and four at a time.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import importlib
import io
import json
import os
import shutil
import socket
import subprocess
import sysconfig
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import anyio
import torch

from actorsnap import Options, StateDict
from actorsnap.format.checksum import crc32c
from actorsnap.storage.base import Storage, StorageContext
from actorsnap.storage.registry import open_storage
from actorsnap.sync import Snapshot
from bench.local import RAW
from bench.state import State
from tests.servers.base import S3Server, Server

__all__ = [
    "OBJECT_CLIENTS",
    "STATE_CLIENTS",
    "Actorsnap",
    "ActorsnapStorage",
    "ObjectClient",
    "Raw",
    "StateClient",
]

MIB = 1 << 20
PART = 16 * MIB
AT_ONCE = 4

View = memoryview


def bucket_and_key(url: str) -> tuple[str, str]:
    bucket, _, key = url.partition("://")[2].partition("/")
    return bucket, key


def parts(size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, PART):
        yield start, min(size, start + PART)


async def at_once(size: int, work: Callable[[int, int], Awaitable[None]]) -> None:
    """Works on the parts of something, some at a time."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(start: int, stop: int) -> None:
        async with limit:
            await work(start, stop)

    async with asyncio.TaskGroup() as group:
        for start, stop in parts(size):
            group.create_task(one(start, stop))


class Client(ABC):
    """What all have in common.

    Attributes:
        name: Its name in the rows.
        schemes: Of the servers that it speaks to.
    """

    name: str
    schemes: frozenset[str] = frozenset({"s3"})

    @abstractmethod
    def open(self, server: Server) -> None:
        """Imports and makes what it needs; raises if that cannot be had. The environment names
        the server, too (``Server.env``)."""

    def close(self) -> None:
        """Ends threads and connections."""
        return


class ObjectClient(Client):
    """Puts bytes into an object, and gets them back into memory that is there."""

    @abstractmethod
    def upload(self, url: str, data: bytes) -> None: ...

    @abstractmethod
    def download(self, url: str, target: View) -> None: ...


class StateClient(Client):
    """Saves a flat state dict below a URL, and loads it back in place."""

    @abstractmethod
    def save(self, state: State, url: str) -> None: ...

    @abstractmethod
    def load(self, url: str, target: State) -> None: ...

    def before_save(self, state: State) -> None:
        """What of saving is not counted."""
        return

    def after_load(self, target: State) -> None:
        """What of loading is not counted."""
        return


# Objects ------------------------------------------------------------------------------------


class ActorsnapStorage(ObjectClient):
    """The storage under test, without the snapshots: parts and ranges as those of the others."""

    name = "actorsnap storage"
    schemes = frozenset({"s3", "gs"})

    def open(self, server: Server) -> None:
        self._options = server.storage_options()
        self._runner = asyncio.Runner()

    def _storage(self, url: str) -> Storage:
        async def run_blocking(fn: Callable[..., Any], /, *args: Any) -> Any:
            return await anyio.to_thread.run_sync(fn, *args)

        return open_storage(url, StorageContext(run_blocking=run_blocking, options=self._options))

    def upload(self, url: str, data: bytes) -> None:
        folder, _, key = url.rpartition("/")
        self._runner.run(self._upload(self._storage(folder), key, memoryview(data)))

    async def _upload(self, storage: Storage, key: str, data: View) -> None:
        writer = await storage.writer(key, len(data))

        async def send(start: int, stop: int) -> None:
            await writer.write_at(start, [data[start:stop]])

        await at_once(len(data), send)
        await writer.complete()
        await storage.aclose()

    def download(self, url: str, target: View) -> None:
        folder, _, key = url.rpartition("/")
        self._runner.run(self._download(self._storage(folder), key, target))

    async def _download(self, storage: Storage, key: str, target: View) -> None:
        async def receive(start: int, stop: int) -> None:
            await storage.read_into(key, start, [target[start:stop]])

        await at_once(len(target), receive)
        await storage.aclose()

    def num_bytes(self, url: str) -> int:
        """Of all objects below ``url``, whoever made them."""
        return self._runner.run(self._num_bytes(self._storage(url)))

    async def _num_bytes(self, storage: Storage) -> int:
        found = sum([info.size async for info in storage.list("")])
        await storage.aclose()
        return found

    def delete_below(self, url: str) -> None:
        """Deletes them."""
        self._runner.run(self._delete_below(self._storage(url)))

    async def _delete_below(self, storage: Storage) -> None:
        await storage.delete([info.key async for info in storage.list("")])
        await storage.aclose()

    def close(self) -> None:
        self._runner.close()


class Raw(ObjectClient):
    """The limit: threads that compute the CRC32C of each part, with nothing in between.

    No signatures, retries, deadlines or event loop; eight at a time, as actorsnap begins.
    """

    name = RAW

    _THREADS = 8

    def open(self, server: Server) -> None:
        assert isinstance(server, S3Server)
        self._host = server.endpoint.partition("://")[2]
        self._here = threading.local()
        self._connections: list[http.client.HTTPConnection] = []
        self._pool = ThreadPoolExecutor(self._THREADS)

    def _request(
        self, method: str, target: str, body: View | bytes = b"", **headers: str
    ) -> http.client.HTTPResponse:
        connection: http.client.HTTPConnection | None = getattr(self._here, "connection", None)
        if connection is None:
            connection = self._here.connection = http.client.HTTPConnection(self._host)
            self._connections.append(connection)
        connection.request(method, target, body, headers)
        response = connection.getresponse()
        if response.status >= 300:
            raise RuntimeError(f"{method}: {response.status}")
        return response

    def upload(self, url: str, data: bytes) -> None:
        view, target = memoryview(data), "/" + "/".join(bucket_and_key(url))
        begun = self._request("POST", f"{target}?uploads").read().decode()
        upload_id = begun.partition("<UploadId>")[2].partition("<")[0]

        def send(start: int, stop: int) -> str:
            part = view[start:stop]
            checksum = base64.b64encode(crc32c(part).to_bytes(4, "big")).decode()
            where = f"{target}?partNumber={start // PART + 1}&uploadId={upload_id}"
            headers = {"x-amz-checksum-crc32c": checksum}
            response = self._request("PUT", where, part, **headers)
            response.read()
            return response.headers["ETag"]

        etags = list(self._pool.map(lambda part: send(*part), parts(len(data))))
        named = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag></Part>"
            for number, etag in enumerate(etags, 1)
        )
        whole = f"<CompleteMultipartUpload>{named}</CompleteMultipartUpload>".encode()
        self._request("POST", f"{target}?uploadId={upload_id}", whole).read()

    def download(self, url: str, target: View) -> None:
        source = "/" + "/".join(bucket_and_key(url))

        def receive(start: int, stop: int) -> int:
            response = self._request("GET", source, Range=f"bytes={start}-{stop - 1}")
            connection, rest = self._here.connection, target[start:stop]
            early = response.readinto(rest[: len(response.peek())])
            while early < len(rest):
                received = connection.sock.recv_into(rest[early:], 0, socket.MSG_WAITALL)
                if not received:
                    raise RuntimeError("the object ends early")
                early += received
            # http.client does not know that the body has come.
            response.length = 0
            response.read()
            return crc32c(target[start:stop])

        list(self._pool.map(lambda part: receive(*part), parts(len(target))))

    def close(self) -> None:
        self._pool.shutdown()
        for connection in self._connections:
            connection.close()


class Boto3(ObjectClient):
    name = "boto3"

    def open(self, server: Server) -> None:
        assert isinstance(server, S3Server)
        boto3: Any = importlib.import_module("boto3")
        config: Any = importlib.import_module("botocore.config")
        self._client: Any = boto3.client(
            "s3",
            endpoint_url=server.endpoint,
            region_name=server.region,
            aws_access_key_id=server.access_key,
            aws_secret_access_key=server.secret_key,
            config=config.Config(s3={"addressing_style": "path"}),
        )

    def upload(self, url: str, data: bytes) -> None:
        self._client.upload_fileobj(io.BytesIO(data), *bucket_and_key(url))

    def download(self, url: str, target: View) -> None:
        self._client.download_fileobj(*bucket_and_key(url), _Into(target))

    def close(self) -> None:
        self._client.close()


class _Into(io.RawIOBase):
    """A file that is a memoryview."""

    def __init__(self, target: View) -> None:
        self._target = target
        self._at = 0

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        assert whence == os.SEEK_SET
        self._at = offset
        return offset

    def write(self, data: Any) -> int:
        self._target[self._at : self._at + len(data)] = data
        self._at += len(data)
        return len(data)


class Aiobotocore(ObjectClient):
    """As it comes: it takes bytes, and gives bytes."""

    name = "aiobotocore"

    def open(self, server: Server) -> None:
        assert isinstance(server, S3Server)
        session: Any = importlib.import_module("aiobotocore.session")
        config: Any = importlib.import_module("aiobotocore.config")
        self._runner = asyncio.Runner()
        self._made: Any = session.get_session().create_client(
            "s3",
            endpoint_url=server.endpoint,
            region_name=server.region,
            aws_access_key_id=server.access_key,
            aws_secret_access_key=server.secret_key,
            config=config.AioConfig(s3={"addressing_style": "path"}),
        )
        self._client: Any = self._runner.run(self._made.__aenter__())

    def upload(self, url: str, data: bytes) -> None:
        self._runner.run(self._upload(*bucket_and_key(url), data))

    async def _upload(self, bucket: str, key: str, data: bytes) -> None:
        where = {"Bucket": bucket, "Key": key}
        where["UploadId"] = (await self._client.create_multipart_upload(**where))["UploadId"]
        sent: dict[int, str] = {}

        async def send(start: int, stop: int) -> None:
            number = start // PART + 1
            body = data[start:stop]
            answer = await self._client.upload_part(**where, PartNumber=number, Body=body)
            sent[number] = answer["ETag"]

        await at_once(len(data), send)
        named = [{"PartNumber": number, "ETag": etag} for number, etag in sorted(sent.items())]
        await self._client.complete_multipart_upload(**where, MultipartUpload={"Parts": named})

    def download(self, url: str, target: View) -> None:
        self._runner.run(self._download(*bucket_and_key(url), target))

    async def _download(self, bucket: str, key: str, target: View) -> None:
        async def receive(start: int, stop: int) -> None:
            answer = await self._client.get_object(
                Bucket=bucket, Key=key, Range=f"bytes={start}-{stop - 1}"
            )
            async with answer["Body"] as body:
                target[start:stop] = await body.read()

        await at_once(len(target), receive)

    def close(self) -> None:
        self._runner.run(self._made.__aexit__(None, None, None))
        self._runner.close()


class S3torchconnector(ObjectClient):
    name = "s3torchconnector"

    def open(self, server: Server) -> None:
        assert isinstance(server, S3Server)
        api: Any = importlib.import_module("s3torchconnector")
        self._checkpoint: Any = api.S3Checkpoint(
            server.region,
            endpoint=server.endpoint,
            s3client_config=api.S3ClientConfig(force_path_style=True),
        )

    def upload(self, url: str, data: bytes) -> None:
        view = memoryview(data)
        with self._checkpoint.writer(url) as writer:
            for start, stop in parts(len(data)):
                writer.write(view[start:stop])

    def download(self, url: str, target: View) -> None:
        with self._checkpoint.reader(url) as reader:
            rest = target
            while rest:
                received = reader.readinto(rest)
                if not received:
                    raise RuntimeError("the object ends early")
                rest = rest[received:]


class Obstore(ObjectClient):
    """Without SHA-256 of what is sent, which is its default and slower."""

    name = "obstore"
    schemes = frozenset({"s3", "gs"})

    def open(self, server: Server) -> None:
        self._api: Any = importlib.import_module("obstore")
        self._server = server
        self._runner = asyncio.Runner()

    def _store(self, bucket: str) -> Any:
        stores: Any = importlib.import_module("obstore.store")
        server, plain = self._server, {"allow_http": True}
        if not isinstance(server, S3Server):
            # The only way to name an emulator.
            key = {"gcs_base_url": server.endpoint, "disable_oauth": True}
            key |= {"client_email": "", "private_key": "", "private_key_id": ""}
            return stores.GCSStore(
                bucket, service_account_key=json.dumps(key), client_options=plain
            )
        return stores.S3Store(
            bucket,
            endpoint=server.endpoint,
            region=server.region,
            access_key_id=server.access_key,
            secret_access_key=server.secret_key,
            virtual_hosted_style_request=False,
            unsigned_payload=True,
            client_options=plain,
        )

    def upload(self, url: str, data: bytes) -> None:
        bucket, key = bucket_and_key(url)
        options = {"chunk_size": PART, "max_concurrency": AT_ONCE, "use_multipart": True}
        self._api.put(self._store(bucket), key, data, **options)

    def download(self, url: str, target: View) -> None:
        bucket, key = bucket_and_key(url)
        self._runner.run(self._download(self._store(bucket), key, target))

    async def _download(self, store: Any, key: str, target: View) -> None:
        async def receive(start: int, stop: int) -> None:
            found = await self._api.get_range_async(store, key, start=start, end=stop)
            target[start:stop] = memoryview(found)

        await at_once(len(target), receive)

    def close(self) -> None:
        self._runner.close()


class Fsspec(ObjectClient):
    """s3fs and gcsfs: whole objects."""

    def __init__(self, scheme: str) -> None:
        self.name = {"s3": "s3fs", "gs": "gcsfs"}[scheme]
        self.schemes = frozenset({scheme})

    def open(self, server: Server) -> None:
        fsspec: Any = importlib.import_module("fsspec")
        self._fs: Any = fsspec.filesystem(server.scheme, **fsspec_options(server))

    def upload(self, url: str, data: bytes) -> None:
        self._fs.pipe_file(url, data)

    def download(self, url: str, target: View) -> None:
        target[:] = self._fs.cat_file(url)


def fsspec_options(server: Server) -> dict[str, Any]:
    if not isinstance(server, S3Server):
        # Read when gcsfs is imported. Else it asks Google's own servers, over gRPC and without a
        # deadline, what kind of bucket it is.
        os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
        return {"endpoint_url": server.endpoint, "token": "anon", "project": "benchmark"}
    return {
        "endpoint_url": server.endpoint,
        "key": server.access_key,
        "secret": server.secret_key,
        "client_kwargs": {"region_name": server.region},
    }


class GoogleCloudStorage(ObjectClient):
    name = "google-cloud-storage"
    schemes = frozenset({"gs"})

    def open(self, server: Server) -> None:
        storage: Any = importlib.import_module("google.cloud.storage")
        credentials: Any = importlib.import_module("google.auth.credentials")
        self._client: Any = storage.Client(
            project="benchmark",
            credentials=credentials.AnonymousCredentials(),
            client_options={"api_endpoint": server.endpoint},
        )

    def _blob(self, url: str) -> Any:
        bucket, key = bucket_and_key(url)
        return self._client.bucket(bucket).blob(key)

    def upload(self, url: str, data: bytes) -> None:
        self._blob(url).upload_from_file(io.BytesIO(data), size=len(data))

    def download(self, url: str, target: View) -> None:
        self._blob(url).download_to_file(_Into(target))

    def close(self) -> None:
        self._client.close()


OBJECT_CLIENTS: tuple[Callable[[], ObjectClient], ...] = (
    Boto3,
    Aiobotocore,
    S3torchconnector,
    Obstore,
    lambda: Fsspec("s3"),
    lambda: Fsspec("gs"),
    GoogleCloudStorage,
)


# States -------------------------------------------------------------------------------------


class Actorsnap(StateClient):
    """The library under test, through its blocking facade."""

    name = "actorsnap"
    schemes = frozenset({"s3", "gs"})

    def __init__(self, options: Options | None = None) -> None:
        self._options = options

    def open(self, server: Server) -> None:
        self._storage_options = server.storage_options()

    def save(self, state: State, url: str) -> None:
        app_state = {"model": StateDict(state)}
        Snapshot.take(url, app_state, storage_options=self._storage_options, options=self._options)

    def load(self, url: str, target: State) -> None:
        app_state = {"model": StateDict(target)}
        Snapshot(url, storage_options=self._storage_options, options=self._options).restore(
            app_state
        )
        for name, tensor in app_state["model"].items():
            if tensor.data_ptr() != target[name].data_ptr():
                raise RuntimeError(f"{name} was not restored in place")


class SafetensorsBy(StateClient):
    """safetensors in memory, and an object by a client."""

    def __init__(self, client: ObjectClient) -> None:
        self._client = client
        self._sizes: dict[str, int] = {}
        self.name = f"safetensors + {client.name}"
        self.schemes = client.schemes

    def open(self, server: Server) -> None:
        self._st: Any = importlib.import_module("safetensors.torch")
        self._client.open(server)

    def save(self, state: State, url: str) -> None:
        data = self._st.save(state)
        self._sizes[url] = len(data)
        self._client.upload(f"{url}/state.safetensors", data)

    def load(self, url: str, target: State) -> None:
        data = bytearray(self._sizes[url])
        self._client.download(f"{url}/state.safetensors", memoryview(data))
        # Not `safetensors.torch.load`: that one wants bytes, and copies them.
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
        for name, tensor in target.items():
            start, stop = header[name]["data_offsets"]
            found = memoryview(data)[begin + start : begin + stop]
            tensor.copy_(torch.frombuffer(found, dtype=tensor.dtype).view(tensor.shape))

    def close(self) -> None:
        self._client.close()


class TorchSave(StateClient):
    """torch.save and torch.load on s3torchconnector's files, as its documents have it."""

    name = "torch.save + s3torchconnector"

    def open(self, server: Server) -> None:
        self._connector = S3torchconnector()
        self._connector.open(server)

    def save(self, state: State, url: str) -> None:
        with self._connector._checkpoint.writer(f"{url}/state.pt") as writer:
            torch.save(state, writer)

    def load(self, url: str, target: State) -> None:
        with self._connector._checkpoint.reader(f"{url}/state.pt") as reader:
            loaded = torch.load(reader, weights_only=True)
        for name, tensor in target.items():
            tensor.copy_(loaded[name])


class Dcp(StateClient):
    """``torch.distributed.checkpoint`` on s3fs or gcsfs."""

    def __init__(self, scheme: str) -> None:
        self.name = {"s3": "dcp + s3fs", "gs": "dcp + gcsfs"}[scheme]
        self.schemes = frozenset({scheme})

    def open(self, server: Server) -> None:
        self._dcp: Any = importlib.import_module("torch.distributed.checkpoint")
        self._fs: Any = importlib.import_module("torch.distributed.checkpoint._fsspec_filesystem")
        self._options = fsspec_options(server)
        importlib.import_module(self.name.partition(" + ")[2])
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")

    def save(self, state: State, url: str) -> None:
        # Files of an object store cannot be synced: it would sync all disks instead.
        writer = self._fs.FsspecWriter(url, sync_files=False, **self._options)
        self._dcp.save({"model": state}, storage_writer=writer)

    def load(self, url: str, target: State) -> None:
        reader = self._fs.FsspecReader(url, **self._options)
        self._dcp.load({"model": target}, storage_reader=reader)


class Torchsnapshot(StateClient):
    """Its plugins take nothing but the environment's word for where the server is."""

    name = "torchsnapshot"
    schemes = frozenset({"s3", "gs"})

    def open(self, server: Server) -> None:
        if server.scheme == "gs":
            raise RuntimeError("its plugin speaks to www.googleapis.com only")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._ts: Any = importlib.import_module("torchsnapshot")

    def _app_state(self, state: State) -> dict[str, Any]:
        stateful = self._ts.StateDict()
        stateful.update(state)
        return {"model": stateful}

    def save(self, state: State, url: str) -> None:
        self._ts.Snapshot.take(url, self._app_state(state))

    def load(self, url: str, target: State) -> None:
        app_state = self._app_state(target)
        self._ts.Snapshot(url).restore(app_state)
        for name, tensor in app_state["model"].items():
            if tensor is not target[name]:
                target[name].copy_(tensor)


class Rclone(StateClient):
    """``rclone copy`` of a folder in memory. What is between the folder and the tensors, which a
    user waits for as well, is not counted."""

    name = "rclone copy"
    schemes = frozenset({"s3", "gs"})

    def open(self, server: Server) -> None:
        self._st: Any = importlib.import_module("safetensors.torch")
        path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
        program = shutil.which("rclone", path=path)
        if program is None:
            raise RuntimeError("rclone is not installed")
        self._program = program
        self._folder = Path(mkdtemp(prefix="actorsnap-bench-", dir="/dev/shm"))
        self._remote = f":{'s3' if isinstance(server, S3Server) else 'gcs'}"
        if isinstance(server, S3Server):
            self._flags = {
                "s3-provider": "Other",
                "s3-endpoint": server.endpoint,
                "s3-region": server.region,
                "s3-access-key-id": server.access_key,
                "s3-secret-access-key": server.secret_key,
            }
        else:
            self._flags = {
                "gcs-endpoint": f"{server.endpoint}/storage/v1/",
                "gcs-anonymous": "true",
            }

    def _copy(self, source: str, target: str) -> None:
        flags = [f"--{name}={value}" for name, value in self._flags.items()]
        command = [self._program, "copy", "--config=/dev/null", *flags, source, target]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])

    def before_save(self, state: State) -> None:
        (self._folder / "up").mkdir(exist_ok=True)
        self._st.save_file(state, self._folder / "up" / "state.safetensors")

    def after_load(self, target: State) -> None:
        path = self._folder / "down" / "state.safetensors"
        for name, tensor in self._st.load_file(path).items():
            target[name].copy_(tensor)
        shutil.rmtree(path.parent)

    def save(self, state: State, url: str) -> None:
        bucket, key = bucket_and_key(url)
        self._copy(str(self._folder / "up"), f"{self._remote}:{bucket}/{key}")

    def load(self, url: str, target: State) -> None:
        bucket, key = bucket_and_key(url)
        self._copy(f"{self._remote}:{bucket}/{key}", str(self._folder / "down"))

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


STATE_CLIENTS: tuple[Callable[[], StateClient], ...] = (
    *((lambda make=make: SafetensorsBy(make())) for make in OBJECT_CLIENTS),
    TorchSave,
    lambda: Dcp("s3"),
    lambda: Dcp("gs"),
    Torchsnapshot,
    Rclone,
)
