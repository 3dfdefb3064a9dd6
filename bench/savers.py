# SPDX-License-Identifier: Apache-2.0
"""One adapter per asynchronous save, to a folder or to S3: begin, ask, wait, load back.

As ``bench/peers.py``: each does what the library's own documents tell a user to do.
"""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import os
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import actorsnap.sync
from actorsnap import Options, Snapshot, StateDict, warm_up
from bench.state import State, state_bytes
from tests.servers.base import S3Server, free_port
from tests.support.proxy import FaultProxy

__all__ = [
    "ActorsnapAwaited",
    "ActorsnapBy",
    "DcpBy",
    "Nothing",
    "Saver",
    "Saving",
    "Slow",
    "TorchsnapshotBy",
]


@dataclass(frozen=True, slots=True)
class Saving:
    """A save that the trainer does not wait for: ``is_done`` returns at once, ``wait`` raises."""

    is_done: Callable[[], bool]
    wait: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Slow:
    """A server, and a proxy before it that is slow. Saves go through that, loads do not."""

    server: S3Server
    proxy: FaultProxy


class Saver(ABC):
    """One way to save a flat state dict while the trainer goes on."""

    name: str

    def open(self, slow: Slow | None) -> None:
        """Imports and starts what it needs; raises if that cannot be had.

        Args:
            slow: Where URLs of S3 lead; None: URLs are folders.
        """
        self.slow = slow

    @abstractmethod
    def begin(self, state: State, url: str) -> Saving:
        """Returns when the state may be changed again."""

    @abstractmethod
    def load(self, url: str, target: State) -> None:
        """Loads into the memory of ``target``'s tensors."""

    def close(self) -> None:
        """Ends background processes and threads."""
        return


class ActorsnapBy(Saver):
    """The library under test, through its blocking facade."""

    def __init__(self, name: str, **options: Any) -> None:
        self.name = name
        self.options = Options(fsync=False, **options)

    def _storage_options(self, *, is_slow: bool) -> dict[str, Any] | None:
        slow = self.slow
        return (
            None if slow is None else slow.server.storage_options(slow.proxy if is_slow else None)
        )

    def warm_up(self, state: State) -> None:
        actorsnap.sync.warm_up(state_bytes(state), options=self.options)

    def begin(self, state: State, url: str) -> Saving:
        pending = actorsnap.sync.Snapshot.async_take(
            url,
            {"model": StateDict(state)},
            storage_options=self._storage_options(is_slow=True),
            options=self.options,
        )
        return Saving(pending.done, pending.wait)

    def load(self, url: str, target: State) -> None:
        options = self._storage_options(is_slow=False)
        snapshot = actorsnap.sync.Snapshot(url, storage_options=options)
        snapshot.restore({"model": StateDict(target)})


class ActorsnapAwaited(ActorsnapBy):
    """The same through asyncio. The loop runs while ``begin`` and ``wait`` do."""

    def open(self, slow: Slow | None) -> None:
        super().open(slow)
        self._runner = asyncio.Runner()

    def warm_up(self, state: State) -> None:
        self._runner.run(warm_up(state_bytes(state), options=self.options))

    def begin(self, state: State, url: str) -> Saving:
        async def take() -> Any:
            return await Snapshot.async_take(
                url,
                {"model": StateDict(state)},
                storage_options=self._storage_options(is_slow=True),
                options=self.options,
            )

        async def end() -> None:
            await pending

        pending = self._runner.run(take())
        return Saving(pending.done, lambda: self._runner.run(end()))

    def close(self) -> None:
        self._runner.close()


class Nothing(Saver):
    """Saves nothing for some seconds: what is measured then is the machine."""

    name = "nothing"

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def begin(self, state: State, url: str) -> Saving:
        self._saved = {name: tensor.clone() for name, tensor in state.items()}
        end = time.perf_counter() + self._seconds
        return Saving(lambda: time.perf_counter() >= end, lambda: None)

    def load(self, url: str, target: State) -> None:
        for name, tensor in self._saved.items():
            target[name].copy_(tensor)
        del self._saved


class DcpBy(Saver):
    """``torch.distributed.checkpoint.async_save``, by a thread or by a process."""

    def __init__(self, way: str) -> None:
        self.name = f"dcp {way}"
        self._way = way

    def open(self, slow: Slow | None) -> None:
        super().open(slow)
        self._dcp: Any = importlib.import_module("torch.distributed.checkpoint")
        self._by: Any = importlib.import_module("torch.distributed.checkpoint._fsspec_filesystem")
        types: Any = importlib.import_module("torch.distributed.checkpoint.state_dict_saver")
        self._type = types.AsyncCheckpointerType(self._way)
        warnings.filterwarnings("ignore", module=r"torch\.distributed")
        self._made_group = False
        if self._way == "process":
            # Its process joins a group of its own, made as this one's was.
            dist: Any = importlib.import_module("torch.distributed")
            if not dist.is_initialized():
                address = f"tcp://127.0.0.1:{free_port()}"
                dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
                self._made_group = True

    def _fsspec_options(self, *, is_slow: bool) -> dict[str, Any]:
        assert self.slow is not None
        server = self.slow.server
        return {
            "endpoint_url": self.slow.proxy.endpoint if is_slow else server.endpoint,
            "key": server.access_key,
            "secret": server.secret_key,
            "client_kwargs": {"region_name": server.region},
        }

    def begin(self, state: State, url: str) -> Saving:
        if self.slow is None:
            writer = self._dcp.FileSystemWriter(url, sync_files=False)
        else:
            options = self._fsspec_options(is_slow=True)
            writer = self._by.FsspecWriter(url, sync_files=False, **options)
        future: Future[Any] = self._dcp.async_save(
            {"model": state}, storage_writer=writer, async_checkpointer_type=self._type
        )
        return Saving(future.done, future.result)

    def load(self, url: str, target: State) -> None:
        if self.slow is None:
            reader = self._dcp.FileSystemReader(url)
        else:
            reader = self._by.FsspecReader(url, **self._fsspec_options(is_slow=False))
        self._dcp.load({"model": target}, storage_reader=reader)

    def close(self) -> None:
        if self._made_group:
            # Its process waits for ever else.
            for process in multiprocessing.active_children():
                process.terminate()
            importlib.import_module("torch.distributed").destroy_process_group()


class TorchsnapshotBy(Saver):
    name = "torchsnapshot"

    def open(self, slow: Slow | None) -> None:
        super().open(slow)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._ts: Any = importlib.import_module("torchsnapshot")

    def _app_state(self, state: State) -> dict[str, Any]:
        stateful = self._ts.StateDict()
        stateful.update(state)
        return {"model": stateful}

    def begin(self, state: State, url: str) -> Saving:
        if self.slow is not None:
            os.environ.update(self.slow.server.env(self.slow.proxy))
        pending = self._ts.Snapshot.async_take(url, self._app_state(state))
        return Saving(pending.done, pending.wait)

    def load(self, url: str, target: State) -> None:
        if self.slow is not None:
            os.environ.update(self.slow.server.env())
        app_state = self._app_state(target)
        self._ts.Snapshot(url).restore(app_state)
        for name, tensor in app_state["model"].items():
            if tensor is not target[name]:
                target[name].copy_(tensor)
