# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint (DCP) over actorsnap. See ``docs/migrate/dcp.md``.

Has all names of torch's module: those that are not defined here are torch's.
"""

from __future__ import annotations

from typing import Any

import torch.distributed.checkpoint

from actorsnap.interop.dcp.calls import AsyncCheckpointerType, async_save, load, save
from actorsnap.interop.dcp.installing import install, installed, uninstall
from actorsnap.interop.dcp.reader import ActorsnapReader
from actorsnap.interop.dcp.stager import ActorsnapStager
from actorsnap.interop.dcp.writer import ActorsnapWriter

__all__ = [
    "ActorsnapReader",
    "ActorsnapStager",
    "ActorsnapWriter",
    "AsyncCheckpointerType",
    "async_save",
    "install",
    "installed",
    "load",
    "save",
    "uninstall",
]

_OURS = {"FileSystemWriter": ActorsnapWriter, "FileSystemReader": ActorsnapReader}


def __getattr__(name: str) -> Any:
    return _OURS.get(name) or getattr(torch.distributed.checkpoint, name)
