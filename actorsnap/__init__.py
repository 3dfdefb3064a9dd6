"""actorsnap: an asyncio-native, actor-based checkpoint runtime for PyTorch.

Public names only. The same calls for ordinary scripts are in ``actorsnap.sync``.
"""

from actorsnap.actors.trace import Phase, Progress
from actorsnap.errors import (
    AccessDenied,
    ActorSnapError,
    ChecksumMismatch,
    FormatError,
    IncompatibleState,
    NotASnapshot,
    ObjectExists,
    ObjectNotFound,
    RestoreAborted,
    SnapshotAborted,
    SnapshotReplaced,
    StorageError,
    StorageFull,
    Throttled,
    UnsupportedFormat,
    UsageError,
)
from actorsnap.options import Options, from_env
from actorsnap.release import RELEASE as __version__
from actorsnap.runtime.copying import CopyEvent, CopyEventKind, CopyReport
from actorsnap.runtime.host import shutdown
from actorsnap.runtime.restoring import RestorePlan, RestoreReport
from actorsnap.runtime.upkeep import VerifyReport
from actorsnap.snapshot import PendingSnapshot, Snapshot
from actorsnap.state.optim import prime_optimizer
from actorsnap.state.stateful import RNGState, StateDict, Stateful

__all__ = [
    "AccessDenied",
    "ActorSnapError",
    "ChecksumMismatch",
    "CopyEvent",
    "CopyEventKind",
    "CopyReport",
    "FormatError",
    "IncompatibleState",
    "NotASnapshot",
    "ObjectExists",
    "ObjectNotFound",
    "Options",
    "PendingSnapshot",
    "Phase",
    "Progress",
    "RNGState",
    "RestorePlan",
    "RestoreReport",
    "Snapshot",
    "RestoreAborted",
    "SnapshotAborted",
    "SnapshotReplaced",
    "StateDict",
    "Stateful",
    "StorageError",
    "StorageFull",
    "Throttled",
    "UnsupportedFormat",
    "UsageError",
    "VerifyReport",
    "__version__",
    "from_env",
    "prime_optimizer",
    "shutdown",
]
