# SPDX-License-Identifier: Apache-2.0
"""Puts the classes of this package in the place of DCP's file system writer and reader.

For code that names ``FileSystemWriter`` or passes only ``checkpoint_id=``: torch chooses from a
fixed list of classes, by their names in its modules.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator
from typing import Any

from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint._async_process_executor import (
    _ProcessBasedAsyncCheckpointExecutor,
)

from actorsnap.errors import UsageError
from actorsnap.interop.dcp.reader import ActorsnapReader
from actorsnap.interop.dcp.writer import ActorsnapWriter, can_open
from actorsnap.tracebacks import short_traceback

_PACKAGE = "torch.distributed.checkpoint"

_PLACES = ("", ".filesystem", "._storage_utils", ".format_utils")
"""Modules of the package that hold the names, in torch 2.9 to 2.13."""

_SUBCLASSING = ("._fsspec_filesystem", ".hf_storage", ".quantized_hf_storage")
"""Modules that derive classes from the names, and so must be imported before."""

_replaced: list[tuple[Any, str, Any]] = []
_lock = threading.Lock()


@short_traceback
def install(**defaults: Any) -> None:
    """Makes ``FileSystemWriter`` and ``FileSystemReader`` of torch write and read snapshots.

    Affects code that looks the names up afterwards, and calls with ``checkpoint_id=`` only. Modules
    that have imported a class by name keep torch's, as do instances.

    Args:
        defaults: Keywords of ``ActorsnapWriter``; ``storage_options`` and ``options`` also apply to
            readers.

    Raises:
        UsageError: It is installed already, or a keyword is unknown.
    """
    allowed = {"storage_options", "options", "metadata", "process_group", "marker"}
    if unknown := sorted(defaults.keys() - allowed):
        raise UsageError(f"install() has no argument {unknown[0]!r}; it has {sorted(allowed)}")
    common = {k: v for k, v in defaults.items() if k in ("storage_options", "options")}
    ActorsnapWriter(**defaults)  # checks them
    with _lock:
        if _replaced:
            raise UsageError("actorsnap.interop.dcp is installed already; uninstall() undoes it")
        for name in _SUBCLASSING:
            with contextlib.suppress(ImportError):  # of fsspec or safetensors
                importlib.import_module(_PACKAGE + name)
        _InstalledWriter.defaults, _InstalledReader.defaults = defaults, common
        for place in _PLACES:
            module = importlib.import_module(_PACKAGE + place)
            for name, ours in (
                ("FileSystemWriter", _InstalledWriter),
                ("FileSystemReader", _InstalledReader),
            ):
                _replace(module, name, ours)
        _replace(state_dict_saver, "_ProcessBasedAsyncCheckpointExecutor", _InstalledExecutor)


def _replace(module: Any, name: str, ours: type) -> None:
    if hasattr(module, name):
        _replaced.append((module, name, getattr(module, name)))
        setattr(module, name, ours)


def uninstall() -> None:
    """Undoes ``install``. Idempotent."""
    with _lock:
        while _replaced:
            setattr(*_replaced.pop())


@contextlib.contextmanager
def installed(**defaults: Any) -> Iterator[None]:
    """``install`` for a ``with`` block. Affects all threads."""
    install(**defaults)
    try:
        yield
    finally:
        uninstall()


class _InstalledWriter(ActorsnapWriter):
    defaults: dict[str, Any] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(self.defaults | kwargs))


class _InstalledExecutor(_ProcessBasedAsyncCheckpointExecutor):
    """Names the writer: nothing is installed in the process that makes the save."""

    def execute_save(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("storage_writer") is None and can_open(kwargs.get("checkpoint_id")):
            kwargs["storage_writer"] = _InstalledWriter(kwargs["checkpoint_id"])
        return super().execute_save(*args, **kwargs)


class _InstalledReader(ActorsnapReader):
    defaults: dict[str, Any] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(self.defaults | kwargs))
