"""actorsnap: an asyncio-native, actor-based checkpoint runtime for PyTorch.

Public names only. ``actorsnap.sync`` has the same calls for ordinary scripts.

Names are imported on first use: the uploader process, and other packages' storages in it, import
this module without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actorsnap import sync as sync
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
        StateChanged,
        StorageError,
        StorageFull,
        Throttled,
        UnsupportedFormat,
        UsageError,
    )
    from actorsnap.options import Options, from_env
    from actorsnap.release import RELEASE as __version__
    from actorsnap.runtime.copy import CopyEvent, CopyEventKind, CopyReport
    from actorsnap.runtime.host import shutdown
    from actorsnap.runtime.pacing import step
    from actorsnap.runtime.recover import RecoverReport
    from actorsnap.runtime.restore import RestorePlan, RestoreReport
    from actorsnap.runtime.taking import Guard
    from actorsnap.runtime.verify import VerifyReport
    from actorsnap.snapshot import PendingSnapshot, Snapshot, warm_up
    from actorsnap.state.optim import ModelState, prime_optimizer
    from actorsnap.state.stateful import RNGState, StateDict, Stateful

__all__ = [
    "AccessDenied",
    "ActorSnapError",
    "ChecksumMismatch",
    "CopyEvent",
    "CopyEventKind",
    "CopyReport",
    "FormatError",
    "Guard",
    "IncompatibleState",
    "ModelState",
    "NotASnapshot",
    "ObjectExists",
    "ObjectNotFound",
    "Options",
    "PendingSnapshot",
    "Phase",
    "Progress",
    "RNGState",
    "RecoverReport",
    "RestorePlan",
    "RestoreReport",
    "Snapshot",
    "RestoreAborted",
    "SnapshotAborted",
    "SnapshotReplaced",
    "StateChanged",
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
    "step",
    "warm_up",
]

_HOMES = {
    "Phase": "actorsnap.actors.trace",
    "Progress": "actorsnap.actors.trace",
    "AccessDenied": "actorsnap.errors",
    "ActorSnapError": "actorsnap.errors",
    "ChecksumMismatch": "actorsnap.errors",
    "FormatError": "actorsnap.errors",
    "IncompatibleState": "actorsnap.errors",
    "NotASnapshot": "actorsnap.errors",
    "ObjectExists": "actorsnap.errors",
    "ObjectNotFound": "actorsnap.errors",
    "RestoreAborted": "actorsnap.errors",
    "SnapshotAborted": "actorsnap.errors",
    "SnapshotReplaced": "actorsnap.errors",
    "StateChanged": "actorsnap.errors",
    "StorageError": "actorsnap.errors",
    "StorageFull": "actorsnap.errors",
    "Throttled": "actorsnap.errors",
    "UnsupportedFormat": "actorsnap.errors",
    "UsageError": "actorsnap.errors",
    "Options": "actorsnap.options",
    "from_env": "actorsnap.options",
    "CopyEvent": "actorsnap.runtime.copy",
    "CopyEventKind": "actorsnap.runtime.copy",
    "CopyReport": "actorsnap.runtime.copy",
    "Guard": "actorsnap.runtime.taking",
    "shutdown": "actorsnap.runtime.host",
    "step": "actorsnap.runtime.pacing",
    "RecoverReport": "actorsnap.runtime.recover",
    "RestorePlan": "actorsnap.runtime.restore",
    "RestoreReport": "actorsnap.runtime.restore",
    "VerifyReport": "actorsnap.runtime.verify",
    "PendingSnapshot": "actorsnap.snapshot",
    "Snapshot": "actorsnap.snapshot",
    "warm_up": "actorsnap.snapshot",
    "ModelState": "actorsnap.state.optim",
    "prime_optimizer": "actorsnap.state.optim",
    "RNGState": "actorsnap.state.stateful",
    "StateDict": "actorsnap.state.stateful",
    "Stateful": "actorsnap.state.stateful",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("actorsnap.release").RELEASE
    if name == "sync":
        return import_module("actorsnap.sync")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
