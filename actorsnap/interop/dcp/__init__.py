"""torch.distributed.checkpoint (DCP) over actorsnap. See ``docs/dcp.md``."""

from actorsnap.interop.dcp.reader import ActorsnapReader
from actorsnap.interop.dcp.stager import ActorsnapStager
from actorsnap.interop.dcp.writer import ActorsnapWriter

__all__ = ["ActorsnapReader", "ActorsnapStager", "ActorsnapWriter"]
