# SPDX-License-Identifier: Apache-2.0
"""One adapter per library: save, load in place, save in the background.

Each adapter does what the library's own documents tell a user to do, and nothing smarter. A
library that is not installed, or cannot work here, gives the reason instead of a number.
"""

from __future__ import annotations

import asyncio
import importlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, cast

import torch

from bench.state import State

__all__ = ["PEERS", "Actorsnap", "ActorsnapAwait", "Adapter"]

Fsync = Literal["never", "option"]


def _copy_into(target: State, loaded: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in target.items():
        tensor.copy_(loaded[name])


class Adapter(ABC):
    """One way to save a flat state dict into a folder and to load it back in place.

    Attributes:
        name: Its name in the rows.
        fsync: Whether it can be told to make files durable before it returns.
        slow_with_many: Why it is left out where there are 100,000 tensors, or empty.
    """

    name: str
    fsync: Fsync = "never"
    slow_with_many: str = ""

    @abstractmethod
    def prepare(self) -> None:
        """Imports what it needs; raises if that cannot be had."""

    @abstractmethod
    def save(self, state: State, folder: Path, *, fsync: bool) -> None: ...

    @abstractmethod
    def load(self, folder: Path, target: State) -> None:
        """Loads into the memory of ``target``'s tensors."""

    def async_save(self, state: State, folder: Path) -> Callable[[], None]:
        """Returns when the state may be changed again; what it returns waits for the end."""
        raise NotImplementedError

    @property
    def has_async(self) -> bool:
        return type(self).async_save is not Adapter.async_save

    def close(self) -> None:
        """Ends background processes and threads."""
        return


class TorchSave(Adapter):
    name = "torch.save"

    def prepare(self) -> None:
        return

    def save(self, state: State, folder: Path, *, fsync: bool) -> None:
        torch.save(state, folder / "state.pt")

    def load(self, folder: Path, target: State) -> None:
        _copy_into(target, torch.load(folder / "state.pt", mmap=False, weights_only=True))


class Safetensors(Adapter):
    name = "safetensors"

    def prepare(self) -> None:
        self._st: Any = importlib.import_module("safetensors.torch")

    def save(self, state: State, folder: Path, *, fsync: bool) -> None:
        self._st.save_file(state, folder / "state.safetensors")

    def load(self, folder: Path, target: State) -> None:
        _copy_into(target, self._st.load_file(folder / "state.safetensors"))


class Dcp(Adapter):
    name = "dcp"
    fsync: Fsync = "option"

    def prepare(self) -> None:
        self._dcp: Any = importlib.import_module("torch.distributed.checkpoint")
        # "torch.distributed is unavailable or uninitialized, assuming ... single process"
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")

    def _writer(self, folder: Path, *, fsync: bool) -> Any:
        return self._dcp.FileSystemWriter(folder, sync_files=fsync)

    def save(self, state: State, folder: Path, *, fsync: bool) -> None:
        self._dcp.save({"model": state}, storage_writer=self._writer(folder, fsync=fsync))

    def load(self, folder: Path, target: State) -> None:
        self._dcp.load({"model": target}, storage_reader=self._dcp.FileSystemReader(folder))

    def async_save(self, state: State, folder: Path) -> Callable[[], None]:
        future = cast(
            "Future[Any]",
            self._dcp.async_save(
                {"model": state}, storage_writer=self._writer(folder, fsync=False)
            ),
        )

        def wait() -> None:
            future.result()

        return wait


class DcpTuned(Dcp):
    name = "dcp tuned"
    slow_with_many = "writes one file per tensor"

    def _writer(self, folder: Path, *, fsync: bool) -> Any:
        return self._dcp.FileSystemWriter(
            folder, single_file_per_rank=False, thread_count=2, sync_files=fsync
        )


class Torchsnapshot(Adapter):
    name = "torchsnapshot"
    slow_with_many = "writes one file per tensor (slabs are off by default in 0.1.0)"

    def prepare(self) -> None:
        with warnings.catch_warnings():
            # torch.jit.script is deprecated; torchsnapshot 0.1.0 uses it when imported.
            warnings.simplefilter("ignore")
            self._ts: Any = importlib.import_module("torchsnapshot")

    def _app_state(self, state: State) -> dict[str, Any]:
        stateful = self._ts.StateDict()
        stateful.update(state)
        return {"model": stateful}

    def save(self, state: State, folder: Path, *, fsync: bool) -> None:
        self._ts.Snapshot.take(str(folder / "snapshot"), self._app_state(state))

    def load(self, folder: Path, target: State) -> None:
        app_state = self._app_state(target)
        self._ts.Snapshot(str(folder / "snapshot")).restore(app_state)
        for name, tensor in app_state["model"].items():
            if tensor is not target[name]:
                target[name].copy_(tensor)

    def async_save(self, state: State, folder: Path) -> Callable[[], None]:
        pending = self._ts.Snapshot.async_take(str(folder / "snapshot"), self._app_state(state))

        def wait() -> None:
            pending.wait()

        return wait


class TorchCheckpointing(Adapter):
    name = "torch_checkpointing"

    def prepare(self) -> None:
        self._tc: Any = importlib.import_module("torch_checkpointing")
        config: Any = importlib.import_module("torch_checkpointing.config")
        storage: Any = importlib.import_module("torch_checkpointing.storage.filesystem")
        # Direct I/O, its default, fails with EINVAL on ext4 for sizes that are no multiple of
        # the block.
        place = storage.LocalFileSystemStorageConfig(use_direct_io=False)
        manager = self._tc.CheckpointManager
        self._sync: Any = manager(
            manager.Config(save=config.SyncCheckpointSaverConfig(), storage_config=place)
        )
        self._async_config: Any = manager.Config(
            save=config.AsyncCheckpointSaverConfig(), storage_config=place
        )
        self._async: Any = None

    def save(self, state: State, folder: Path, *, fsync: bool) -> None:
        self._sync.save(str(folder / "checkpoint"), {"model": state})

    def load(self, folder: Path, target: State) -> None:
        self._sync.load(str(folder / "checkpoint"), into={"model": target}, strict=True)

    def async_save(self, state: State, folder: Path) -> Callable[[], None]:
        if self._async is None:
            self._async = self._tc.CheckpointManager(self._async_config)
        # Its contract: the trainer takes `manager.lock()` before it changes its tensors, so
        # blocked time is until that lock is free again.
        future = self._async.save(str(folder / "checkpoint"), {"model": state})
        with self._async.lock():
            pass

        def wait() -> None:
            future.result()

        return wait

    def close(self) -> None:
        if self._async is not None:
            self._async.close()
            self._async = None


class Actorsnap(Adapter):
    """The library under test, through its blocking facade."""

    name = "actorsnap"
    fsync: Fsync = "option"

    def __init__(self, *, verify: bool = True) -> None:
        self._verify = verify
        if not verify:
            self.name = "actorsnap verify=False"

    def prepare(self) -> None:
        self._api: Any = importlib.import_module("actorsnap")
        self._sync: Any = importlib.import_module("actorsnap.sync")

    def _options(self, *, fsync: bool) -> Any:
        return self._api.Options(fsync=fsync, verify=self._verify)

    def app_state(self, state: State) -> dict[str, Any]:
        return {"model": self._api.StateDict(state)}

    def save(self, state: State, folder: Path, *, fsync: bool) -> None:
        self._sync.Snapshot.take(
            str(folder / "snapshot"), self.app_state(state), options=self._options(fsync=fsync)
        )

    def load(self, folder: Path, target: State) -> None:
        app_state = self.app_state(target)
        snapshot = self._sync.Snapshot(str(folder / "snapshot"), options=self._options(fsync=False))
        snapshot.restore(app_state)
        for name, tensor in app_state["model"].items():
            if tensor.data_ptr() != target[name].data_ptr():
                raise RuntimeError(f"{name} was not restored in place")

    def async_save(self, state: State, folder: Path) -> Callable[[], None]:
        pending = self._sync.Snapshot.async_take(
            str(folder / "snapshot"), self.app_state(state), options=self._options(fsync=False)
        )
        pending.staged()

        def wait() -> None:
            pending.wait()

        return wait


class ActorsnapAwait(Actorsnap):
    """The same through asyncio: what a trainer that is a coroutine sees."""

    name = "actorsnap await"

    def prepare(self) -> None:
        super().prepare()
        self._runner = asyncio.Runner()

    def async_save(self, state: State, folder: Path) -> Callable[[], None]:
        async def begin() -> Any:
            pending = await self._api.Snapshot.async_take(
                str(folder / "snapshot"), self.app_state(state), options=self._options(fsync=False)
            )
            await pending.staged()
            return pending

        async def end() -> None:
            await pending.wait()

        pending = self._runner.run(begin())

        def wait() -> None:
            self._runner.run(end())

        return wait

    def close(self) -> None:
        self._runner.close()


PEERS: tuple[type[Adapter], ...] = (
    TorchSave,
    Safetensors,
    Dcp,
    DcpTuned,
    Torchsnapshot,
    TorchCheckpointing,
)
