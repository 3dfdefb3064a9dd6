# SPDX-License-Identifier: Apache-2.0
"""First pass of a restore: compares the entries of a key with the leaves of its target.

Finds invalid entries, and missing, unexpected or mismatched leaves (``docs/format.md``, "Entries").
Allocates no memory and reads no bytes. It must not know how leaves are restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, TypeAlias

import msgspec
import numpy as np
import torch

from actorsnap.errors import UsageError
from actorsnap.format.manifest import (
    BytesEntry,
    CompositeEntry,
    ContainerEntry,
    TensorEntry,
    ValueEntry,
    ViewEntry,
)
from actorsnap.planning.index import AnyEntry, Elsewhere, ShardedEntry
from actorsnap.state import devices, objects
from actorsnap.state.distributed import Describer, Sharding, is_distributed
from actorsnap.state.records import FIELDS_HINT, HINT, Rebuild, class_name
from actorsnap.state.restore.aliasing import TARGET_TYPES, Target
from actorsnap.state.restore.checks import (
    NUMPY_KINDS,
    check_composite,
    check_part,
    check_sharded,
    check_tensor,
    check_view,
    fail,
)
from actorsnap.state.stateful import Matching
from actorsnap.state.tensors import DTYPE_NAMES, PLAIN_TYPES, address_of, refusal
from actorsnap.state.tree import (
    AS_RECORDS,
    Container,
    Skeleton,
    escape,
    flatten,
    part_path,
    unescape,
)

_TensorLike: TypeAlias = TensorEntry | ViewEntry | ShardedEntry | CompositeEntry
_MAX_LINES = 50
_ABSENT: Final[Any] = object()
_UNWANTED: Final[Any] = object()


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules for matching entries with a target.

    Attributes:
        root: Path of the target.
        strict_root: Path below which both sides must have the same leaves; or None.
        opaque: Paths of extra states below ``strict_root``, which may have any leaves.
    """

    root: str
    target: object | None
    matching: Matching
    strict_root: str | None = None
    opaque: frozenset[str] = frozenset()

    @classmethod
    def of(cls, root: str, target: Any, matching: Matching) -> Rules:
        strict_root: str | None = None
        names: Iterable[Any] = ()
        if target is not None and matching is Matching.LEAVES:
            strict_root, names = root, target if isinstance(target, dict) else ()
        elif matching is Matching.MODEL and isinstance(target, dict):
            strict_root, names = f"{root}/model", target["model"]
        opaque = frozenset(
            f"{strict_root}/{escape(name)}" for name in names if _is_extra_state(name)
        )
        return cls(root, target, matching, strict_root, opaque)

    def is_strict(self, path: str) -> bool:
        strict_root = self.strict_root
        if strict_root is None or not (path == strict_root or path.startswith(strict_root + "/")):
            return False
        if not self.opaque:
            return True
        below = len(strict_root) + 1
        return path[:below] + path[below:].partition("/")[0] not in self.opaque

    @property
    def keeps_keys(self) -> bool:
        """Whether dict keys that were not saved count as missing and keep their values."""
        return self.matching in (Matching.KEYS, Matching.MODEL)

    def is_kept(self, path: str, target: Target, kind: str) -> bool:
        """Whether a target that does not fit is kept, not replaced by a leaf of ``kind``."""
        is_same_kind = isinstance(target, np.ndarray) == (kind == "numpy array")
        return self.is_strict(path) or (self.keeps_keys and is_same_kind)

    def passes_over(self, path: str) -> bool:
        """Under ``MODEL``: whether a saved leaf of the optimizers is ignored.

        It may have no optimizers now, or the parameter is frozen or in another stage.
        """
        below = f"{self.root}/optim/"
        if not path.startswith(below):
            return False
        target: Any = self.target
        name = path.removeprefix(below).partition("/")[0]
        held = target.get("optim")
        if held is None:
            return True
        is_flat = "param_groups" not in held and name not in ("state", "param_groups")
        return is_flat and unescape(name) not in held

    def may_lack(self, path: str, skeleton: Skeleton) -> bool:
        """Whether the snapshot of a ``ModelState`` may lack a dict key.

        The model's leaves are compared one by one. The optimizers' state may be absent, or have the
        other form of hyperparameters (``flatten``).
        """
        if self.matching is not Matching.MODEL:
            return False
        optim = f"{self.root}/optim"
        sections = f"{optim}/state", f"{optim}/param_groups"
        is_other_form = path in sections or sections[1] in skeleton
        return (
            self.is_strict(path)
            or path == optim
            or (path.rpartition("/")[0] == optim and is_other_form)
        )


def _is_extra_state(name: object) -> bool:
    return isinstance(name, str) and f".{name}".endswith("._extra_state")


def entries_by_key(entries: Sequence[AnyEntry]) -> dict[str, list[AnyEntry]]:
    """Returns the entries of each top-level key, then those of other keys that its views refer to.

    Raises:
        FormatError: A path does not begin with a top-level key.
    """
    by_path = {entry.path: entry for entry in entries}
    tokens: dict[str, list[AnyEntry]] = {}
    for entry in entries:
        tokens.setdefault(_token_of(entry.path), []).append(entry)
    keys: dict[str, list[AnyEntry]] = {}
    for token, own in tokens.items():
        key = unescape(token)
        if type(key) is not str:
            fail(token, "a top-level key is a str")
        bases = {entry.of: by_path.get(entry.of) for entry in own if type(entry) is ViewEntry}
        foreign = [base for path, base in bases.items() if base and _token_of(path) != token]
        keys[key] = own + foreign
    return keys


def _token_of(path: str) -> str:
    return path.partition("/")[0].partition("@")[0]


def leaves_of(root: str, target: object | None) -> dict[str, object]:
    if target is None:
        return {}
    return {
        path: value
        for path, value in zip(*flatten(root, target), strict=True)
        if type(value) is not Container
    }


def describe(value: object) -> str:
    """Returns the kind of a leaf, for messages."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return f"{str(value.layout).removeprefix('torch.')} tensor"
        return "tensor"
    if isinstance(value, np.ndarray):
        return "numpy array"
    return type(value).__qualname__


def _kind_of(entry: _TensorLike) -> str:
    if isinstance(entry, CompositeEntry):
        return f"{entry.layout} tensor" if entry.layout.startswith("sparse") else "tensor"
    return "numpy array" if entry.type in NUMPY_KINDS else "tensor"


def _difference(entry: _TensorLike, target: Target, sharding: Sharding | str | None) -> str | None:
    """Returns how a leaf of the app state differs from its entry; None if it fits.

    ``sharding`` describes a distributed target.
    """
    kind = _kind_of(entry)
    have, what = describe(target), "shape"
    why: str | None = None
    if sharding is not None:
        why = sharding if isinstance(sharding, str) else None
        have, what = "tensor" if kind == "tensor" else "distributed tensor", "global shape"
    elif isinstance(target, torch.Tensor) and not target.is_meta:
        why = refusal(target)
    if why is not None:
        return f"{kind} in the snapshot; the app state's {why}"
    if have != kind:
        return f"{kind} in the snapshot, {have} in the app state"
    dtype = target.dtype.str if isinstance(target, np.ndarray) else DTYPE_NAMES[target.dtype]
    lines = []
    if dtype != entry.dtype:
        lines.append(f"dtype {entry.dtype} in the snapshot, {dtype} in the app state")
    stored, shape = tuple(entry.shape), tuple(target.shape)
    if shape != stored:
        lines.append(f"{what} {stored} in the snapshot, {shape} in the app state")
    return "; ".join(lines) or None


def _plain_address(target: Any, dtype: torch.dtype | None, entry: TensorEntry) -> int | None:
    """Returns the address of the target's memory if it takes stored bytes as they are.

    Nearly always, it does.
    """
    calls = devices.calls
    if not (
        type(target) in PLAIN_TYPES
        and target.dtype is dtype
        and not target.is_nested
        and target.shape == entry.shape
        and target.layout is torch.strided
        and target.is_contiguous()
        and not (target.is_conj() or target.is_neg())
        and (target.is_cpu or calls.has(target))
    ):
        return None
    nbytes = entry.data.stop - entry.data.start
    start = address_of(target)
    has_memory = not nbytes or (start and target.untyped_storage().nbytes() >= nbytes)
    return start if has_memory else None


class Pair(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A stored leaf to restore, and its target.

    Attributes:
        dtype: dtype of a dense tensor; else None.
        target: A tensor or array that fits; None makes a fresh value.
        sharding: That of a distributed target; else None.
        address: Address of a target that is plain and in C order, like the stored bytes; else None.
        is_cast: The target is distributed, and of another dtype.
    """

    entry: AnyEntry
    dtype: torch.dtype | None
    target: Target | None
    sharding: Sharding | None = None
    address: int | None = None
    is_cast: bool = False


class Interest:
    """Tells which stored leaves a match with a target may want: these, and perhaps more.

    Args:
        target: None wants everything.
    """

    def __init__(self, root: str, target: Any, matching: Matching) -> None:
        self._rules = Rules.of(root, target, matching)
        self.targets = leaves_of(root, target)
        # Of containers of the target.
        self._above = {
            path[:at]
            for path in self.targets
            for at, character in enumerate(path)
            if character == "/"
        }

    def wants(self, path: str) -> bool:
        path = path.partition("@")[0]
        if path in self.targets or path in self._above:
            return True
        return not (self._rules.is_strict(path) or self._is_passed_over(path))

    def _is_passed_over(self, path: str) -> bool:
        return self._rules.matching is Matching.MODEL and self._rules.passes_over(path)


@dataclass(frozen=True, slots=True)
class Match:
    """Entries of a key, matched with the leaves of a target. Mappings are by path.

    Attributes:
        skeleton: Containers of the result.
        bases: Tensors that views refer to.
        world_size: Number of ranks that saved.
        pairs: Leaves with bytes to read, in order.
        composites: Leaves made of ``parts``, in order.
        values: Leaves that need no bytes: stored inline, or kept from the target.
        attributes: Attributes of fresh tensors.
        aliases: Leaves that only the target has, by path: each is the same tensor as the restored
            leaf with the given path (a tied weight under its second name).
        may_cast, rebuild: See ``match_key``.
        casts: Targets of another floating-point dtype than their leaves, by path.
        missing: Leaves or dict keys that only the target has.
        unexpected: Leaves that only the snapshot has.
        unplaced: Like ``unexpected``, but another rank may have them.
        mismatched: A line per tensor that does not fit, or optimizer with other groups.
        on_meta: Tensors on the meta device. Fresh CPU tensors replace them, except under ``MODEL``
            and ``NOTHING``.
    """

    rules: Rules
    targets: Mapping[str, object]
    skeleton: Skeleton
    bases: Mapping[str, TensorEntry]
    world_size: int
    may_cast: bool = False
    rebuild: Rebuild = AS_RECORDS
    describer: Describer = field(default_factory=Describer)
    casts: dict[str, torch.Tensor] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    composites: list[Pair] = field(default_factory=list)
    parts: dict[str, TensorEntry | ViewEntry] = field(default_factory=dict)
    values: dict[str, object] = field(default_factory=dict)
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    unplaced: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)
    on_meta: list[str] = field(default_factory=list)

    def has_target(self, path: str) -> bool:
        """Whether the target has a leaf at ``path``; True without a target."""
        return self.rules.target is None or path in self.targets

    @property
    def num_restored(self) -> int:
        """Number of leaves that the snapshot gives."""
        kept = {*self.missing, *self.targets}
        inline = [
            path
            for path, value in self.values.items()
            if path not in kept or (path in self.targets and value is not self.targets[path])
        ]
        return len(self.pairs) + len(self.composites) + len(inline)

    def keep(self, path: str, target: object, why: str) -> None:
        self.mismatched.append(f"{path}: {why}")
        self.values[path] = target


def match_key(
    root: str,
    entries: Sequence[AnyEntry],
    target: object | None = None,
    targets: Mapping[str, object] | None = None,
    *,
    allow_pickle: bool,
    matching: Matching = Matching.KEYS,
    world_size: int = 1,
    casts: bool = False,
    rebuild: Rebuild = AS_RECORDS,
) -> Match:
    """Compares entries with a target; see ``prepare`` for other parameters.

    Args:
        root: Path of the target.
        entries: Entries outside of ``root`` are used only as bases of views.
        targets: Leaves of ``target``, or substitutes; ``leaves_of`` by default.
        casts: A tensor fits another floating-point dtype.
        rebuild: Which records become instances of their classes.

    Raises:
        UsageError, FormatError: See ``prepare``.
    """
    below, part = root + "/", root + "@"
    entries_of_key = [
        entry
        for entry in entries
        if (path := entry.path).startswith(below) or path == root or path.startswith(part)
    ]
    viewed = {entry.of for entry in entries_of_key if type(entry) is ViewEntry}
    found = Match(
        rules=Rules.of(root, target, matching),
        targets=leaves_of(root, target) if targets is None else targets,
        skeleton=Skeleton(root),
        bases={e.path: e for e in entries if type(e) is TensorEntry and e.path in viewed},
        world_size=world_size,
        may_cast=casts,
        rebuild=rebuild,
    )
    if rebuild.is_strict:
        _refuse_classes(entries_of_key, rebuild)
    for base in found.bases.values():
        check_tensor(base)
    for entry in entries_of_key:
        if "@" in entry.path:
            _add_part(found, entry)
        elif type(entry) is ContainerEntry:
            metadata = objects.decode_inline(entry.attributes, entry.path, rebuild)
            found.skeleton.add_container(entry.path, entry.type, metadata)
        else:
            found.skeleton.add_leaf(entry.path)
            _add_leaf(found, entry)
    if root not in found.skeleton:
        fail(root, "the snapshot has no entries of it")
    for pair in found.composites:
        assert isinstance(pair.entry, CompositeEntry)
        for name in pair.entry.parts:
            check_part(pair.entry, name, found.parts.get(part_path(pair.entry.path, name)))
    if not allow_pickle:
        _refuse_pickles(found.pairs)
    _add_missing(found)
    if lines := found.skeleton.refusals(rebuild):
        _refuse(lines, f"Change the class, or {FIELDS_HINT}")
    if matching is Matching.GROUPS:
        _compare_groups(found, entries_of_key)
    return found


def _add_part(found: Match, entry: AnyEntry) -> None:
    path = entry.path
    if not isinstance(entry, TensorEntry | ViewEntry) or path in found.parts:
        fail(path, "two entries have this path, or it is not part of an entry")
    if isinstance(entry, ViewEntry):
        check_view(entry, found.bases.get(entry.of))
    else:
        check_tensor(entry)
    found.parts[path] = entry


def _add_leaf(found: Match, entry: AnyEntry) -> None:
    path = entry.path
    match entry:
        case TensorEntry():
            _add_tensor(found, entry, check_tensor(entry), entry.attributes)
        case ShardedEntry():
            _add_tensor(found, entry, check_sharded(entry), entry.attributes)
        case ViewEntry():
            _add_tensor(found, entry, check_view(entry, found.bases.get(entry.of)))
        case CompositeEntry():
            check_composite(entry)
            _add_tensor(found, entry, None)
        case BytesEntry():
            target = _find_target(found, entry)
            stored = "numpy array" if entry.type == "numpy" else str(entry.type)
            if isinstance(target, np.ndarray) and entry.type in ("numpy", "pickle"):
                found.pairs.append(Pair(entry, None, target))
            elif target is not _UNWANTED and not _is_mismatch(found, path, stored, target):
                found.pairs.append(Pair(entry, None, None))
        case ValueEntry():
            value = objects.decode_inline(entry.value, path, found.rebuild)
            target = _find_target(found, entry)
            stored = type(value).__qualname__
            if target is not _UNWANTED and not _is_mismatch(found, path, stored, target):
                found.values[path] = value
        case Elsewhere():
            target = _find_target(found, entry)
            assert target is not _ABSENT, f"{path!r} is wanted, and was not in the index"
            if target is not _UNWANTED:  # it has no elements on this rank
                found.values[path] = target


def _find_target(found: Match, entry: AnyEntry) -> Any:
    """Returns ``_ABSENT`` without a leaf, ``_UNWANTED`` to skip the entry."""
    path, rules = entry.path, found.rules
    target = found.targets.get(path, _ABSENT)
    if target is _ABSENT and rules.is_strict(path):
        is_private = found.world_size > 1 and not getattr(entry, "replicated", True)
        (found.unexpected if is_private else found.unplaced).append(path)
        return _UNWANTED
    is_passed_over = rules.matching is Matching.MODEL and rules.passes_over(path)
    return _UNWANTED if is_passed_over else target


def _is_mismatch(found: Match, path: str, stored: str, target: object) -> bool:
    """Whether a ``stored`` leaf of another kind must not replace a tensor or array."""
    if not isinstance(target, TARGET_TYPES) or not found.rules.is_strict(path):
        return False
    found.keep(path, target, f"{stored} in the snapshot, {describe(target)} in the app state")
    return True


def _add_tensor(
    found: Match,
    entry: _TensorLike,
    dtype: torch.dtype | None,
    attributes: dict[str, Any] | None = None,
) -> None:
    path = entry.path
    if attributes:
        found.attributes[path] = objects.decode_attributes(attributes, path, found.rebuild)
    target = _find_target(found, entry)
    if target is _UNWANTED:
        return
    address = _plain_address(target, dtype, entry) if type(entry) is TensorEntry else None
    if address is not None:
        found.pairs.append(Pair(entry, dtype, target, None, address))
        return
    pair = Pair(entry, dtype, None)
    if isinstance(target, TARGET_TYPES):
        sharding = found.describer.describe(target) if is_distributed(target) else None
        why = _difference(entry, target, sharding)
        if why is not None and found.may_cast and _can_cast(entry, target, dtype, sharding):
            assert isinstance(target, torch.Tensor)
            assert not isinstance(sharding, str)
            found.casts[path] = target
            if sharding is not None:
                pair = Pair(entry, dtype, target, sharding, is_cast=True)
            elif target.is_meta:
                found.on_meta.append(path)
        elif why is not None:
            # Other ranks hold the rest of a distributed tensor.
            if sharding is not None or found.rules.is_kept(path, target, _kind_of(entry)):
                if found.may_cast and why.startswith("dtype") and not _are_floating(dtype, target):
                    why = f"{why}; cast=True converts only floating-point dtypes of tensors"
                found.keep(path, target, why)
                # A parameter that is not initialized has no shape.
                if "shape" in why and tuple(entry.shape) != tuple(target.shape):
                    found.reshaped.append(path)
                return
        elif sharding is None and isinstance(target, torch.Tensor) and target.is_meta:
            found.on_meta.append(path)
            if found.rules.matching in (Matching.MODEL, Matching.NOTHING):
                # load_state_dict might copy into that tensor.
                found.values[path] = target
                return
        else:
            assert not isinstance(sharding, str)
            pair = Pair(entry, dtype, target, sharding)
    (found.composites if isinstance(entry, CompositeEntry) else found.pairs).append(pair)


def _can_cast(
    entry: _TensorLike,
    target: Target,
    dtype: torch.dtype | None,
    sharding: Sharding | str | None,
) -> bool:
    """Whether only the floating-point dtype differs."""
    if dtype is None or not isinstance(target, torch.Tensor) or isinstance(sharding, str):
        return False
    have = target.dtype
    if have is dtype or not _are_floating(dtype, target):
        return False
    twin = msgspec.structs.replace(entry, dtype=DTYPE_NAMES[have])
    return _difference(twin, target, sharding) is None


def _are_floating(dtype: torch.dtype | None, target: Target) -> bool:
    return (
        dtype is not None
        and dtype.is_floating_point
        and isinstance(target, torch.Tensor)
        and target.dtype.is_floating_point
    )


def _refuse_pickles(pairs: Iterable[Pair]) -> None:
    pickles = [
        pair.entry.path
        for pair in pairs
        if isinstance(pair.entry, BytesEntry) and pair.entry.type == "pickle"
    ]
    if pickles:
        lines = "\n".join(f"  {path!r}" for path in pickles)
        some = "1 leaf is" if len(pickles) == 1 else f"{len(pickles)} leaves are"
        raise UsageError(
            f"{some} pickled, and unpickling runs any code in "
            "the snapshot; if you trust it, pass options=Options(allow_pickle=True). "
            f"Otherwise restore other keys:\n{lines}"
        )


def _refuse_classes(entries: Iterable[AnyEntry], rebuild: Rebuild) -> None:
    """Refuses records of classes that are not allowed, before any constructor runs."""
    lines: list[str] = []
    for entry in entries:
        encoded: object = None
        if type(entry) is ContainerEntry:
            encoded = entry.attributes
            if entry.type == "record":
                encoded = {"$": "record", "v": [*(entry.attributes or ()), []]}
        elif type(entry) is ValueEntry:
            encoded = entry.value
        if type(encoded) in (dict, list):
            for module, qualname in objects.classes_in(encoded):
                if (module, qualname) not in rebuild.types:
                    lines.append(f"{entry.path!r} is a {class_name(module, qualname)}")
    if lines:
        _refuse([f"{line}, which is not in allowed_types" for line in dict.fromkeys(lines)], HINT)


def _refuse(lines: Sequence[str], hint: str) -> NoReturn:
    shown = "\n".join([f"  {line}" for line in lines[:_MAX_LINES]])
    further = f"\n  and {len(lines) - _MAX_LINES} more" if len(lines) > _MAX_LINES else ""
    some = "a record" if len(lines) == 1 else f"{len(lines)} records"
    raise UsageError(f"{some} cannot be rebuilt. {hint}:\n{shown}{further}")


def _add_missing(found: Match) -> None:
    """Adds leaves that only the target has; keeps additional dict keys."""
    rules, skeleton = found.rules, found.skeleton
    if rules.strict_root is not None:
        missing = [
            path for path in found.targets if not skeleton.is_leaf(path) and rules.is_strict(path)
        ]
        found.aliases.update(_find_aliases(found, missing))
        for path in found.aliases:
            skeleton.add_leaf(path)
        found.missing.extend(path for path in missing if path not in found.aliases)
        found.missing.extend(sorted(path for path in rules.opaque if path not in skeleton))
    if rules.keeps_keys:
        for path, value in skeleton.further_keys(rules.target):
            if not rules.may_lack(path, skeleton):
                found.missing.append(path)
                skeleton.add_leaf(path)
                found.values[path] = value


def _find_aliases(found: Match, missing: Sequence[str]) -> dict[str, str]:
    """Returns missing leaves that are the tensor of another leaf, which the snapshot has.

    Other programs store tied weights under one name.
    """
    if not missing:
        return {}
    held: dict[object, str] = {}
    for pair in (*found.pairs, *found.composites):
        path = pair.entry.path
        if (memory := _memory_of(found.targets.get(path))) is not None:
            held.setdefault(memory, path)
    aliases: dict[str, str] = {}
    for path in missing:
        memory = _memory_of(found.targets[path])
        if memory is not None and memory in held:
            aliases[path] = held[memory]
    return aliases


def _memory_of(target: object) -> object:
    """Returns equal values for views of the same elements; None for what has no memory."""
    if not isinstance(target, torch.Tensor):
        return None
    local = getattr(target, "_local_tensor", target)  # of a DTensor
    if type(local) not in PLAIN_TYPES or local.layout is not torch.strided or not local.numel():
        return None
    storage = local.untyped_storage()._cdata
    return storage, local.storage_offset(), local.dtype, local.shape, local.stride(), target.shape


def _compare_groups(found: Match, entries: Iterable[AnyEntry]) -> None:
    """Adds the first difference between saved and current parameter groups."""
    target: Any = found.rules.target
    root = found.rules.root
    groups = target["param_groups"]
    saved: int | str = found.skeleton.num_items(f"{root}/param_groups")
    if saved != len(groups):
        found.mismatched.append(
            f"{root}: {saved} parameter group{'' if saved == 1 else 's'} in the snapshot, "
            f"{len(groups)} in the app state"
        )
        return
    stored = {entry.path: entry.data for entry in entries if type(entry) is BytesEntry}
    for number, group in enumerate(groups):
        path = f"{root}/param_groups/{number}/params"
        held = group["params"]
        inline = found.values.get(path)
        if path in stored:
            # Not read yet. Params are numbered consecutively, so equal sizes mean equal counts.
            size = stored[path].stop - stored[path].start
            kind, encoded = objects.encode(held, path)
            is_same = kind is not None and len(encoded) == size
            saved = len(held) if is_same else "another number of"
        elif isinstance(inline, list):
            saved = len(inline)
        else:
            saved = found.skeleton.num_items(path)
        if saved != len(held):
            found.mismatched.append(
                f"{root}: {saved} params in parameter group {number} in the snapshot, "
                f"{len(held)} in the app state"
            )
            return
