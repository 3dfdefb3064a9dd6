"""torch.distributed.checkpoint (DCP) over actorsnap. See ``docs/dcp.md``."""

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
