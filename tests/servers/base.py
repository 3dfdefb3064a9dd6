# SPDX-License-Identifier: Apache-2.0
"""What every server of the tests has in common: processes in a folder, an address on loopback.

A server is started once for all tests that ask for it (``fixtures.py``), runs as the current
user, keeps everything in its folder, and dies with the test process, also when that is killed.
How the backends name their options is known here and nowhere else in this folder.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, ClassVar, Self

import botocore.session
from botocore.config import Config

from tests.support.proxy import FaultProxy

__all__ = [
    "HOST",
    "GcsServer",
    "S3Server",
    "Server",
    "ServerFailed",
    "free_port",
    "missing_programs",
]

HOST = "127.0.0.1"

_bucket_numbers = itertools.count(1)
_session = botocore.session.get_session()
"""Of all clients: it reads botocore's large files once."""


class ServerFailed(Exception):
    """A server did not start, or a command about it failed; the text ends with its logs."""


def free_port() -> int:
    """A port of loopback that nobody listens on.

    Below those that the kernel gives to connections: none of these takes it before the server
    has bound it.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port


def missing_programs(*programs: str) -> str | None:
    """Which of ``programs`` are not on the path, as a reason to skip; None if all are."""
    missing = [program for program in programs if shutil.which(program) is None]
    return f"not on the path: {', '.join(missing)}" if missing else None


class Server(abc.ABC):
    """One server, of one or more processes.

    Args:
        folder: Where it keeps everything; exists, and stays when the server is stopped.
    """

    scheme: ClassVar[str]
    start_within_s: ClassVar[float] = 60.0

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._processes: list[subprocess.Popen[bytes]] = []

    @classmethod
    @abc.abstractmethod
    def missing(cls) -> str | None:
        """What this machine lacks to run it; None: nothing."""

    @abc.abstractmethod
    def _launch(self) -> None:
        """Starts the processes with ``_spawn``."""

    @abc.abstractmethod
    def make_bucket(self) -> str:
        """Makes a bucket that no other test has. Returns its name."""

    @abc.abstractmethod
    def storage_options(self, through: FaultProxy | None = None) -> dict[str, Any]:
        """actorsnap's options for it, or for a proxy that is in front of it."""

    @abc.abstractmethod
    def env(self, through: FaultProxy | None = None) -> dict[str, str]:
        """The same as environment variables: for other processes and other clients."""

    @property
    def endpoint(self) -> str:
        """Its address, as a URL without a path."""
        return f"http://{HOST}:{self.port}"

    @property
    def pids(self) -> list[int]:
        """Of its processes, while it runs."""
        return [process.pid for process in self._processes]

    def url(self, bucket: str, path: str = "") -> str:
        """Where ``path`` in ``bucket`` is, as actorsnap is told it."""
        return f"{self.scheme}://{bucket}/{path}".rstrip("/")

    def start(self) -> None:
        """Returns when the server answers.

        Raises:
            ServerFailed: It died, or did not answer within ``start_within_s``. Nothing runs on.
        """
        try:
            self._launch()
            self._wait_until_it_answers()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kills it: what it stores is of no use to anyone."""
        while self._processes:
            process = self._processes.pop()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def logs(self) -> str:
        """The end of each log in the folder."""
        return "\n".join(
            f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}"
            for log in sorted(self.folder.glob("*.log"))
        )

    def _spawn(self, *command: str, env: dict[str, str] | None = None) -> None:
        """Starts a process that dies with this one; its output goes to a log in the folder.

        The kernel kills it when the thread that started it ends: the main thread, in a test.
        """
        with open(self.folder / f"{Path(command[0]).name}.log", "ab") as log:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *command],
                cwd=self.folder,
                env=os.environ | (env or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)

    def _run(self, *command: str, within_s: float = 30.0) -> str:
        """Runs a command to its end. Returns what it printed."""
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=within_s)
        except subprocess.TimeoutExpired:
            raise ServerFailed(f"{command[0]} took over {within_s} s\n{self.logs()}") from None
        if done.returncode:
            raise ServerFailed(f"{' '.join(command)}: {done.stderr}\n{self.logs()}")
        return done.stdout

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + self.start_within_s
        while not self._answers():
            for process in self._processes:
                if process.poll() is not None:
                    raise ServerFailed(f"{process.args!r} ended\n{self.logs()}")
            if time.monotonic() > deadline:
                raise ServerFailed(f"no answer in {self.start_within_s} s\n{self.logs()}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(self.endpoint, timeout=5).close()
        except urllib.error.HTTPError:
            return True  # any status will do
        except OSError:
            return False
        return True


class S3Server(Server):
    """A server that speaks S3, with one user who may do everything."""

    scheme = "s3"
    region: ClassVar[str] = "us-east-1"
    access_key: ClassVar[str] = "ACTORSNAPTESTKEY"
    secret_key: ClassVar[str] = "a-secret/that+no-log-may-show"

    def make_bucket(self) -> str:
        bucket = f"bucket-{next(_bucket_numbers)}"
        client = self.client()
        client.create_bucket(Bucket=bucket)
        client.close()
        return bucket

    def client(self, through: FaultProxy | None = None, **options: Any) -> Any:
        """A blocking botocore client: an independent look at what is stored.

        ``options`` go to ``create_client``, for instance other keys. To be closed.
        """
        config = Config(
            s3={"addressing_style": "path"},
            retries={"total_max_attempts": 1},
            # Over TLS checksums come as trailers by default, which Ceph does not understand.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        defaults = {
            "endpoint_url": (through or self).endpoint,
            "region_name": self.region,
            "aws_access_key_id": self.access_key,
            "aws_secret_access_key": self.secret_key,
            "verify": through and through.ca_file,
            "config": config,
        }
        return _session.create_client("s3", **(defaults | options))

    def storage_options(self, through: FaultProxy | None = None) -> dict[str, Any]:
        options = {
            "endpoint_url": (through or self).endpoint,
            "region": self.region,
            "addressing_style": "path",
            "access_key_id": self.access_key,
            "secret_access_key": self.secret_key,
        }
        if through is not None and through.ca_file is not None:
            options["ca_bundle"] = through.ca_file
        return options

    def env(self, through: FaultProxy | None = None) -> dict[str, str]:
        found = {
            "AWS_ENDPOINT_URL": (through or self).endpoint,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        if through is not None and through.ca_file is not None:
            found["AWS_CA_BUNDLE"] = through.ca_file
        return found


class GcsServer(Server):
    """A server that speaks the JSON interface of Google Cloud Storage, for everyone."""

    scheme = "gs"
    project: ClassVar[str] = "actorsnap-tests"

    def make_bucket(self, name: str = "") -> str:
        bucket = name or f"bucket-{next(_bucket_numbers)}"
        request = urllib.request.Request(
            f"{self.endpoint}/storage/v1/b?project={self.project}",
            data=json.dumps({"name": bucket}).encode(),
            headers={"content-type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=30).close()
        return bucket

    def storage_options(self, through: FaultProxy | None = None) -> dict[str, Any]:
        options: dict[str, Any] = {"endpoint_url": (through or self).endpoint, "anonymous": True}
        if through is not None and through.ca_file is not None:
            options["ca_bundle"] = through.ca_file
        return options

    def env(self, through: FaultProxy | None = None) -> dict[str, str]:
        return {"STORAGE_EMULATOR_HOST": (through or self).endpoint}
