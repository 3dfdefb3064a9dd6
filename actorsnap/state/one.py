"""One leaf of a snapshot, or everything below a path.

Decides which path a person means, and what can be restored into a tensor of theirs. It must not
know where bytes lie or how they are fetched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from actorsnap.errors import IncompatibleState, UsageError, did_you_mean
from actorsnap.planning.index import AnyEntry, named_ranks
from actorsnap.state import targets
from actorsnap.state.distributed import is_distributed
from actorsnap.state.restore import KeyRestore
from actorsnap.state.stateful import Matching
from actorsnap.state.tensors import refusal
from actorsnap.state.tree import human, parent_of

__all__ = ["read_one"]


def read_one(
    entries: Sequence[AnyEntry],
    path: str,
    out: object | None,
    allow_pickle: bool,
    elsewhere: Mapping[str, tuple[int, ...]] = {},
) -> KeyRestore:
    """Restores one leaf, or everything below a path.

    Args:
        entries: Of one rank.
        path: As the manifest has it; or as a person types it (``optim/state/0``), if only
            one path reads like that.
        out: None, or a tensor or array to restore a leaf into; of a distributed tensor, what
            this process holds.
        elsewhere: See ``Index``; for the message only.

    Returns:
        A restore whose ``build`` returns the value; ``out`` itself where that was given.

    Raises:
        UsageError: No path is like that, or several are; or ``out`` cannot take a value.
        IncompatibleState: ``out`` is of another kind, dtype or shape than the leaf.
        FormatError: As ``KeyRestore``.
    """
    root = _resolve(entries, path, elsewhere)
    if out is not None:
        if not isinstance(out, torch.Tensor | np.ndarray):
            raise UsageError(f"out must be a tensor or a numpy array, not {type(out).__name__}")
        is_plain = not is_distributed(out)
        why = refusal(out) if isinstance(out, torch.Tensor) and is_plain else None
        if why is not None:
            raise UsageError(f"out {why}")
        if is_plain and (isinstance(out, np.ndarray) or out.layout is torch.strided):
            if not targets.is_writable(out):
                raise UsageError("out is read-only, or its elements share memory; pass a copy")
    restore = KeyRestore(
        "",
        entries,
        target=out,
        allow_pickle=allow_pickle,
        matching=Matching.LEAVES,
        root=root,
    )
    if out is not None and (
        restore.missing or restore.unexpected or restore.unplaced or restore.mismatched
    ):
        lines = restore.mismatched or [
            f"{root}: a container in the snapshot, {targets.describe(out)} as out"
        ]
        raise IncompatibleState(mismatched=lines)
    return restore


def _resolve(
    entries: Sequence[AnyEntry], path: str, elsewhere: Mapping[str, tuple[int, ...]]
) -> str:
    below = path + "/"
    typed: dict[str, None] = {}
    seen: set[str] = set()
    for entry in entries:
        found = entry.path
        if "@" in found:
            continue
        if found == path or found.startswith(below):
            return path
        while found and found not in seen:
            seen.add(found)
            if "%" in found and human(found) == path:
                typed[found] = None
            found = found.rpartition("/")[0]
    if len(typed) == 1:
        return next(iter(typed))
    if typed:
        raise UsageError(
            f"{path!r} can mean several paths; pass one of them: "
            + ", ".join(repr(found) for found in sorted(typed)[:5])
        )
    if any(entry.path == path for entry in entries):
        raise UsageError(f"{path!r} is a part of {parent_of(path)!r}, which can be read")
    for found, ranks in elsewhere.items():
        if f"{found}/".startswith(below):
            raise UsageError(
                f"only {named_ranks(ranks)} saved {path!r}, each for itself; "
                f"read '{ranks[0]}/{path}'"
            )
    hint = did_you_mean(path, sorted(seen)[:2000], limit=3, cutoff=0.5)
    raise UsageError(f"the snapshot has no path {path!r}{hint and '; '}{hint}")
