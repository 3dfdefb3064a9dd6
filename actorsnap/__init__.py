# SPDX-License-Identifier: Apache-2.0
"""An asyncio-native, actor-based checkpoint runtime for PyTorch.

Public names only. ``actorsnap.sync`` has the same calls for ordinary scripts.

Names are imported on first use: the uploader process, and other packages' storages in it, import
this module without torch. The command imports it before it can catch Ctrl-C.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from actorsnap import sync as sync
    from actorsnap.actors.trace import Phase, Progress
    from actorsnap.errors import (
        AccessDenied,
        ActorSnapError,
        ChecksumMismatch,
        FormatError,
        IncompatibleState,
        MissingPackage,
        NotASnapshot,
        NoValidSnapshot,
        ObjectExists,
        ObjectNotFound,
        RestoreAborted,
        RootTaken,
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
    from actorsnap.runtime.copy import CopyEvent, CopyEventKind, CopyReport
    from actorsnap.runtime.exporting import ExportReport
    from actorsnap.runtime.host import shutdown
    from actorsnap.runtime.outline import SnapshotTree
    from actorsnap.runtime.pacing import step
    from actorsnap.runtime.recover import RecoverReport
    from actorsnap.runtime.restore import RestorePlan, RestoreReport
    from actorsnap.runtime.taking import Guard
    from actorsnap.runtime.verify import VerifyReport
    from actorsnap.snapshot import PendingSnapshot, Snapshot, warm_up
    from actorsnap.state.optim import ModelState, prime_optimizer
    from actorsnap.state.records import NamedRecord
    from actorsnap.state.stateful import RNGState, StateDict, Stateful

__version__: str

_NAMES_BY_MODULE = {
    "actorsnap.actors.trace": ("Phase", "Progress"),
    "actorsnap.options": ("Options", "from_env"),
    "actorsnap.runtime.copy": ("CopyEvent", "CopyEventKind", "CopyReport"),
    "actorsnap.runtime.exporting": ("ExportReport",),
    "actorsnap.runtime.host": ("shutdown",),
    "actorsnap.runtime.outline": ("SnapshotTree",),
    "actorsnap.runtime.pacing": ("step",),
    "actorsnap.runtime.recover": ("RecoverReport",),
    "actorsnap.runtime.restore": ("RestorePlan", "RestoreReport"),
    "actorsnap.runtime.taking": ("Guard",),
    "actorsnap.runtime.verify": ("VerifyReport",),
    "actorsnap.snapshot": ("PendingSnapshot", "Snapshot", "warm_up"),
    "actorsnap.state.optim": ("ModelState", "prime_optimizer"),
    "actorsnap.state.records": ("NamedRecord",),
    "actorsnap.state.stateful": ("RNGState", "StateDict", "Stateful"),
}
"""The public names by module. All others are in ``actorsnap.errors``."""

_MODULES = ("errors", "manager", "storage", "sync", "testing")

__all__ = [
    "AccessDenied",
    "ActorSnapError",
    "ChecksumMismatch",
    "CopyEvent",
    "CopyEventKind",
    "CopyReport",
    "ExportReport",
    "FormatError",
    "Guard",
    "IncompatibleState",
    "MissingPackage",
    "ModelState",
    "NamedRecord",
    "NoValidSnapshot",
    "NotASnapshot",
    "ObjectExists",
    "ObjectNotFound",
    "Options",
    "PendingSnapshot",
    "Phase",
    "Progress",
    "RNGState",
    "RecoverReport",
    "RestoreAborted",
    "RestorePlan",
    "RestoreReport",
    "RootTaken",
    "Snapshot",
    "SnapshotAborted",
    "SnapshotReplaced",
    "SnapshotTree",
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


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("actorsnap.release").RELEASE
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = (home for home, names in _NAMES_BY_MODULE.items() if name in names)
    home = next(homes, f"{__name__}.errors")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
