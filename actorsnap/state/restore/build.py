# SPDX-License-Identifier: Apache-2.0
"""Third pass of a restore: builds the state of a key from the bytes that were read.

``prepare`` and ``read_one`` run the first two passes. It must not know where or how bytes are
stored or fetched, nor call ``load_state_dict``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from actorsnap.errors import FormatError, IncompatibleState, UnsupportedFormat, UsageError, text_of
from actorsnap.format.manifest import BytesEntry, CompositeEntry
from actorsnap.planning.index import AnyEntry
from actorsnap.state import objects
from actorsnap.state.composite import assemble, is_composite
from actorsnap.state.distributed import is_distributed
from actorsnap.state.records import Rebuild
from actorsnap.state.restore.aliasing import TARGET_TYPES, Target, is_writable
from actorsnap.state.restore.allocation import (
    Allocation,
    Fresh,
    find_memory,
    lay_over,
    stand_in,
    typed,
)
from actorsnap.state.restore.match import Match, Pair, describe, leaves_of, match_key
from actorsnap.state.stateful import Matching
from actorsnap.state.tensors import bytes_of, carried, refusal, slices_of, tensor_type
from actorsnap.state.tree import AS_RECORDS, human, parent_of, part_path
from actorsnap.wording import did_you_mean, named_ranks


@dataclass(frozen=True, slots=True)
class KeyRestore:
    match: Match
    memory: Allocation

    def build(self) -> Any:
        """Returns the state for ``load_state_dict``. Call it once, after all reads.

        Containers come from the snapshot. Tensors restored in place are the target's own objects.
        Missing and mismatched leaves keep the target's values.

        Raises:
            FormatError: Bytes are no value of their entry's type.
            UsageError: A record cannot be rebuilt.
        """
        match, memory = self.match, self.memory
        values = match.values | memory.values
        for fresh in memory.fresh:
            values[fresh.entry.path] = _settle(fresh)
        for pair, data in memory.buffers:
            values[pair.entry.path] = _decode(pair, data, match.rebuild)
        for pair in memory.spread:
            values[pair.entry.path] = _spread(pair, values[pair.entry.path])
        for pair in match.composites:
            values[pair.entry.path] = _assemble(pair, values)
        for path, attributes in match.attributes.items():
            value = values.get(path)
            if isinstance(value, torch.Tensor) and value is not match.targets.get(path):
                vars(value).update(attributes)
        for path, target in match.casts.items():
            values[path] = _cast(memory, path, target, values[path])
        for write_back in memory.write_backs:
            write_back()
        for path, other in match.aliases.items():
            values[path] = values[other]
        root = match.rules.root
        if match.skeleton.is_leaf(root) and root not in values:
            return match.rules.target  # an unexpected leaf, which was not restored
        return match.skeleton.build(values, match.rebuild)


def prepare(
    root: str,
    entries: Sequence[AnyEntry],
    *,
    target: object | None,
    allow_pickle: bool,
    matching: Matching = Matching.KEYS,
    unshared: Iterable[str] = (),
    world_size: int = 1,
    casts: bool = False,
    rebuild: Rebuild = AS_RECORDS,
) -> KeyRestore:
    """Prepares the restore of a key, or of less. Does not write to the target.

    Args:
        root: Escaped path to restore.
        entries: In traversal order. Those outside of ``root`` are used only as bases of views.
        target: The current ``state_dict()``, whose tensors and writable arrays are restored in
            place. None builds everything fresh, on the CPU.
        allow_pickle: Whether to read pickled leaves, which runs any code in them.
        matching: Under ``LEAVES``, leaves that ``target`` lacks are not read.
        unshared: Paths of leaves that get fresh memory.
        world_size: Number of ranks that saved.
        casts, rebuild: See ``match_key``.

    Raises:
        UsageError: Leaves are pickled, without ``allow_pickle``; or records cannot be rebuilt.
            Names all of them.
        FormatError: Entries contradict themselves or each other. Precedes allocation of their
            memory.
        MemoryError: Names the leaf.
    """
    targets: dict[str, Any] = leaves_of(root, target)
    targets |= {path: stand_in(path, targets[path]) for path in unshared}
    match = match_key(
        root,
        entries,
        target,
        targets,
        allow_pickle=allow_pickle,
        matching=matching,
        world_size=world_size,
        casts=casts,
        rebuild=rebuild,
    )
    return KeyRestore(match, find_memory(match))


def read_one(
    entries: Sequence[AnyEntry],
    path: str,
    out: object | None,
    allow_pickle: bool,
    held_by_other_ranks: Mapping[str, Sequence[int]] = {},
    rebuild: Rebuild = AS_RECORDS,
) -> KeyRestore:
    """Prepares the restore of one leaf, or of everything below a path.

    Args:
        entries: Entries of one rank.
        path: A path of the manifest, or an unambiguous one as typed (``optim/state/0``).
        out: A tensor or array to restore a leaf into.
        held_by_other_ranks: For the message only.

    Raises:
        UsageError: The path does not exist, or is ambiguous; or ``out`` cannot take a value.
        IncompatibleState: ``out`` has another kind, dtype or shape.
        FormatError: See ``prepare``.
    """
    root = resolve(entries, path, held_by_other_ranks)
    if out is not None:
        _check_out(out)
    restore = prepare(
        root,
        entries,
        target=out,
        allow_pickle=allow_pickle,
        matching=Matching.LEAVES,
        rebuild=rebuild,
    )
    match = restore.match
    if out is not None and (
        match.missing or match.unexpected or match.unplaced or match.mismatched
    ):
        lines = match.mismatched or [f"{root}: a container in the snapshot, {describe(out)} as out"]
        lines = [line.replace(" in the app state", " in out") for line in lines]
        raise IncompatibleState(mismatched=lines, misfit="out")
    return restore


def _check_out(out: object) -> None:
    if not isinstance(out, TARGET_TYPES):
        raise UsageError(f"out must be a tensor or a numpy array, not {type(out).__name__}")
    if is_distributed(out):
        return
    why = refusal(out) if isinstance(out, torch.Tensor) else None
    if why is not None:
        raise UsageError(f"out {why}")
    if not (isinstance(out, torch.Tensor) and is_composite(out)) and not is_writable(out):
        raise UsageError("out is read-only, or its elements share memory; pass a copy")


def resolve(
    entries: Sequence[AnyEntry], path: str, held_by_other_ranks: Mapping[str, Sequence[int]]
) -> str:
    """Returns the manifest's form of a typed path.

    Raises:
        UsageError: No entry has this path, or several have it.
    """
    below = path + "/"
    meant: set[str] = set()
    seen: set[str] = set()
    for entry in entries:
        at = entry.path
        if "@" in at:
            continue
        if at == path or at.startswith(below):
            return path
        while at and at not in seen:
            seen.add(at)
            if "%" in at and human(at) == path:
                meant.add(at)
            at = at.rpartition("/")[0]
    if len(meant) == 1:
        return meant.pop()
    if meant:
        raise UsageError(
            f"{path!r} can mean several paths; pass one of them: "
            + ", ".join(map(repr, sorted(meant)[:5]))
        )
    if any(entry.path == path for entry in entries):
        raise UsageError(f"{path!r} is a part of {parent_of(path)!r}, which can be read")
    for other, ranks in held_by_other_ranks.items():
        if f"{other}/".startswith(below):
            raise UsageError(f"only {named_ranks(ranks)} saved {path!r}; read '{ranks[0]}/{path}'")
    hint = did_you_mean(path, sorted(seen)[:2000], limit=3, cutoff=0.5)
    if not hint:
        keys = list(dict.fromkeys(entry.path.partition("/")[0] for entry in entries))
        shown = ", ".join(map(repr, keys[:5])) or "no paths"
        hint = f"it has {shown}{', ...' * (len(keys) > 5)}"
    raise UsageError(f"the snapshot has no path {path!r}; {hint}")


def _settle(fresh: Fresh) -> object:
    """Returns a fresh leaf; or its target, if that takes a copy."""
    entry, target, value = fresh.entry, fresh.target, fresh.value
    if fresh.region is not None:
        value = lay_over(value.clone(), entry, fresh.region)
    if isinstance(target, np.ndarray):
        return _assign_array(target, value)
    if target is not None and _assign_tensor(target, value):
        return target
    if entry.type == "numpy_scalar":
        return value[()]
    if isinstance(value, np.ndarray):
        return value
    return typed(value, entry.type, entry.requires_grad)


def _decode(pair: Pair, data: bytearray, rebuild: Rebuild) -> object:
    entry = pair.entry
    assert isinstance(entry, BytesEntry)
    try:
        value = objects.decode(entry.type, data, rebuild)
    except UsageError as error:
        raise UsageError(f"{entry.path!r} {error}") from error
    except Exception as error:
        if entry.type == "pickle" and (lost := _lost_class(error)):
            raise UnsupportedFormat(
                key=entry.path,
                detail=f"it was pickled from {lost}, which cannot be found: define or import it "
                "before you restore, or restore other keys",
            ) from error
        raise FormatError(
            key=entry.path, detail=f"its bytes are no {entry.type} value: {text_of(error)}"
        ) from error
    return _assign_array(pair.target, value) if entry.type == "numpy" else value


def _lost_class(error: Exception) -> str | None:
    """Returns the class or module that a pickle refers to and Python does not find."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"the module {error.name}"
    found = _LOST.match(text_of(error)) if isinstance(error, AttributeError) else None
    return f"{found[2]}.{found[1]}" if found is not None else None


_LOST = re.compile("Can't get attribute '([^']+)' on <module '([^']+)'")


def _spread(pair: Pair, whole: Any) -> Target | None:
    """Copies what a distributed target holds."""
    assert pair.sharding is not None
    for piece in pair.sharding.pieces:
        if pair.is_cast:
            piece.tensor.copy_(whole[slices_of(piece.box)])
            continue
        _copy(piece.tensor, whole[slices_of(piece.box)])
    return pair.target


def _assemble(pair: Pair, values: dict[str, object]) -> object:
    entry, target = pair.entry, pair.target
    assert isinstance(entry, CompositeEntry)
    parts: dict[str, Any] = {part: values.pop(part_path(entry.path, part)) for part in entry.parts}
    try:
        parameters = {
            name: objects.decode_inline(value, entry.path)
            for name, value in entry.parameters.items()
        }
        value = assemble(entry.layout, entry.dtype, entry.shape, parameters, parts)
        if isinstance(target, torch.Tensor) and _assign_composite(target, value):
            return target
        return typed(value, entry.type, entry.requires_grad)
    except Exception as error:
        raise FormatError(
            key=entry.path, detail=f"its parts make no {entry.layout} tensor: {error}"
        ) from error


def _cast(memory: Allocation, path: str, target: torch.Tensor, value: Any) -> torch.Tensor:
    """Returns a target with the values of another floating-point dtype."""
    with torch.no_grad():
        if path in memory.casts:
            for local, stored in memory.casts[path]:
                local.copy_(stored)
            return target
        if target.is_meta:
            return typed(value.to(target.dtype), tensor_type(target), target.requires_grad)
        return target.copy_(value)


def _copy(target: torch.Tensor, value: torch.Tensor) -> None:
    into = carried(target)
    into.copy_(value if into.dtype is value.dtype else carried(value))


def _assign_tensor(target: torch.Tensor, value: torch.Tensor) -> bool:
    """Copies ``value``, unless elements repeat in ``target``."""
    if is_writable(target):
        _copy(target, value)
        return True
    base, part = target, value
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if size > 1 and stride == 0:
            base, part = base.narrow(dim, 0, 1), part.narrow(dim, 0, 1)
    if not is_writable(base) or bytes_of(value) != bytes_of(part.expand(value.shape)):
        return False
    _copy(base, part)
    return True


def _assign_array(target: object, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns ``target`` with a copy of ``value``, if that fits."""
    if (
        type(target) is np.ndarray
        and target.dtype == value.dtype
        and target.shape == value.shape
        and is_writable(target)
    ):
        np.copyto(target, value)
        return target
    return value


def _assign_composite(target: torch.Tensor, value: torch.Tensor) -> bool:
    """Copies ``value`` if torch can."""
    try:
        # A detached sparse tensor would not keep the copy. Inference tensors can only be written in
        # inference mode; leaving that mode turns gradients on.
        with torch.inference_mode(target.is_inference()), torch.no_grad():
            target.copy_(value)
    except (NotImplementedError, RuntimeError):
        # Another number of elements or quantization scheme, or packed elements.
        return False
    return True
