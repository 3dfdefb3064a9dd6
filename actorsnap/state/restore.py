"""From manifest entries back to a state dict: what fits, what is read into what, the result.

Decides, before any byte is read, which leaves match the app state, which memory each stored
range goes to, and how the state dict is put together (``docs/format.md``, "Entries"). It must
not know where bytes lie or how they are fetched, nor call ``load_state_dict``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from math import prod
from typing import Any, NoReturn

import numpy as np
import torch

from actorsnap.errors import FormatError, IncompatibleState, UsageError
from actorsnap.format.manifest import (
    BLOCK_BYTES,
    BytesEntry,
    CompositeEntry,
    ContainerEntry,
    Entry,
    Stored,
    TensorEntry,
    ValueEntry,
    ViewEntry,
)
from actorsnap.format.validate import COMPOSITE_PARTS
from actorsnap.state import objects, targets
from actorsnap.state.composite import assemble, part_shape
from actorsnap.state.members import Member, place
from actorsnap.state.tensors import (
    DTYPES,
    QUANTIZED,
    ByteSink,
    MemorySink,
    c_strides,
    empty_tensor,
    extent_bytes,
    refusal,
)
from actorsnap.state.tree import (
    Container,
    Skeleton,
    escape,
    flatten,
    human,
    parent_of,
    part_path,
    unescape,
)

__all__ = ["KeyRestore", "entries_by_key", "read_one"]

_ABSENT: Any = object()
_MAX_BYTES = 1 << 62
_TENSOR_KINDS = frozenset({"tensor", "parameter", "buffer"})
_NUMPY_KINDS = frozenset({"numpy", "numpy_scalar"})
_TENSOR_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


def _fail(path: str, detail: str) -> NoReturn:
    raise FormatError(key=path, detail=detail)


def entries_by_key(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Returns the entries of each top-level key, in order.

    A key's list ends with the entries of other keys whose memory its views refer to.

    Raises:
        FormatError: A path does not begin with a top-level key.
    """
    tokens: dict[str, list[Entry]] = {}
    by_path: dict[str, Entry] = {}
    foreign: dict[str, dict[str, None]] = {}
    views: list[tuple[str, ViewEntry]] = []
    for entry in entries:
        token = parent_of(entry.path.partition("/")[0])
        tokens.setdefault(token, []).append(entry)
        by_path[entry.path] = entry
        if type(entry) is ViewEntry:
            views.append((token, entry))
    for token, view in views:
        if parent_of(view.of.partition("/")[0]) != token:
            foreign.setdefault(token, {})[view.of] = None
    for token, paths in foreign.items():
        tokens[token].extend(by_path[path] for path in paths if path in by_path)
    keys: dict[str, list[Entry]] = {}
    for token, found in tokens.items():
        key = unescape(token)
        if type(key) is not str:
            _fail(token, "a top-level key is a str")
        keys[key] = found
    return keys


class KeyRestore:
    """One top-level key, or a part of it, on its way from entries back to a state dict.

    Args:
        key: The top-level key.
        entries: Its entries, in traversal order. Others may be among them; they count only
            where a view of this key refers to them.
        target: What the stateful's ``state_dict()`` returns now: its tensors and writable
            arrays are restored in place. None builds everything fresh, on the CPU.
        allow_pickle: Whether pickled leaves may be read, which runs whatever code they ask
            for.
        include_unexpected: Whether leaves that ``target`` lacks are read and built.
        root: Escaped path to restore instead of the whole key.

    Attributes:
        missing: Paths of leaves that the target has and the snapshot lacks.
        unexpected: Paths of leaves that the snapshot has and the target lacks.
        mismatched: A line per leaf whose kind, dtype or shape differs.
        reads: What to read into what. Nothing of a target is written before these are
            filled. A stored range may appear twice.

    Raises:
        UsageError: Pickled leaves, and ``allow_pickle`` is False. All are named.
        FormatError: Entries contradict themselves or each other. Nothing is allocated for
            an entry before it is checked.
    """

    def __init__(
        self,
        key: str,
        entries: Sequence[Entry],
        *,
        target: object | None,
        allow_pickle: bool,
        include_unexpected: bool = True,
        root: str | None = None,
    ) -> None:
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.mismatched: list[str] = []
        self.reads: list[tuple[Stored, ByteSink]] = []
        self._root = escape(key) if root is None else root
        self._include_unexpected = include_unexpected
        self._allow_pickle = allow_pickle
        self._pickles: list[str] = []
        self._skeleton = Skeleton(self._root)
        self._values: dict[str, object] = {}
        # What remains to do once all bytes are there, in this order.
        self._finishers: list[Callable[[], None]] = []
        self._has_target = target is not None
        self._targets: dict[str, object] = {}
        self._target_items: list[tuple[str, object]] = []
        if target is not None:
            paths, values = flatten(self._root, target)
            self._target_items = list(zip(paths, values, strict=True))
            self._targets = {
                path: value for path, value in self._target_items if type(value) is not Container
            }
        self._viewed = {entry.of for entry in entries if type(entry) is ViewEntry}
        self._dense: dict[str, TensorEntry | ViewEntry] = {}
        self._members: dict[str, list[Member]] = {}
        self._composites: list[CompositeEntry] = []
        self._add_entries(entries)
        self._place_composites()
        self._place_members(entries)
        if self._pickles:
            lines = "\n".join(f"  {path!r}" for path in self._pickles)
            raise UsageError(
                f"{len(self._pickles)} leaves are pickled, and unpickling runs whatever code "
                "the snapshot holds; if you trust it, pass options=Options(allow_pickle=True). "
                f"Else restore other keys:\n{lines}"
            )
        self._keep_missing()

    def build(self) -> Any:
        """Returns the state for ``load_state_dict``; call it once, after all reads.

        Containers, their types and their order are the snapshot's. Tensors that were
        restored in place are the target's own objects; missing and mismatched leaves have
        the target's values.

        Raises:
            FormatError: Bytes are not what their entry says.
        """
        finishers, self._finishers = self._finishers, []
        for finish in finishers:
            finish()
        return self._skeleton.build(self._values)

    # Entries, one by one

    def _add_entries(self, entries: Sequence[Entry]) -> None:
        root = self._root
        below, part = root + "/", root + "@"
        skeleton = self._skeleton
        for entry in entries:
            path = entry.path
            if not path.startswith(below) and path != root and not path.startswith(part):
                continue
            kind = type(entry)
            if "@" in path:
                if (kind is not TensorEntry and kind is not ViewEntry) or path in self._dense:
                    _fail(path, "two entries have this path, or it is no part of an entry")
                self._dense[path] = entry  # type: ignore[assignment]
            elif kind is ContainerEntry:
                assert isinstance(entry, ContainerEntry)
                metadata = objects.decode_inline(entry.attributes, path)
                skeleton.add_container(path, entry.type, metadata)
            else:
                skeleton.add_leaf(path)
                if kind is TensorEntry:
                    self._add_tensor(entry)  # type: ignore[arg-type]
                elif kind is ValueEntry:
                    self._add_value(entry)  # type: ignore[arg-type]
                elif kind is ViewEntry:
                    self._add_view(entry)  # type: ignore[arg-type]
                elif kind is BytesEntry:
                    self._add_bytes(entry)  # type: ignore[arg-type]
                else:
                    self._add_composite(entry)  # type: ignore[arg-type]

    def _find(self, path: str) -> tuple[bool, object]:
        """Returns whether a stored leaf is wanted, and the target's leaf, or _ABSENT."""
        target = self._targets.get(path, _ABSENT)
        if target is _ABSENT and self._has_target:
            self.unexpected.append(path)
            return self._include_unexpected, _ABSENT
        return True, target

    def _mismatch(self, path: str, target: object, detail: str) -> None:
        self.mismatched.append(f"{path}: {detail}")
        self._values[path] = target

    def _fits(self, path: str, target: object, kind: str, dtype: str, shape: Any) -> bool:
        """Whether the target takes a stored tensor or array; notes it where it does not."""
        if isinstance(target, torch.Tensor | np.ndarray):
            found = targets.difference(target, kind, dtype, tuple(shape))
            if found is not None:
                self._mismatch(path, target, found)
                return False
        return True

    def _add_value(self, entry: ValueEntry) -> None:
        path = entry.path
        value = objects.decode_inline(entry.value, path)
        is_wanted, target = self._find(path)
        if isinstance(target, torch.Tensor | np.ndarray):
            stored = type(value).__qualname__
            self._mismatch(
                path,
                target,
                f"{stored} in the snapshot, {targets.describe(target)} in the app state",
            )
        elif is_wanted:
            self._values[path] = value

    def _add_tensor(self, entry: TensorEntry) -> None:
        path = entry.path
        dtype = _check_tensor(entry)
        if path in self._viewed:
            self._dense[path] = entry
        is_wanted, target = self._find(path)
        if not is_wanted:
            return
        shape = entry.shape
        if (
            type(target) in _TENSOR_TYPES
            and path not in self._viewed
            and target.dtype is dtype  # type: ignore[attr-defined]
            and not target.is_nested  # type: ignore[attr-defined]
            and target.shape == shape  # type: ignore[attr-defined]
            and target.layout is torch.strided  # type: ignore[attr-defined]
            and target.is_cpu  # type: ignore[attr-defined]
            and target.is_contiguous()  # type: ignore[attr-defined]
            and not target.is_neg()  # type: ignore[attr-defined]
            and not target.is_conj()  # type: ignore[attr-defined]
        ):
            # Nearly every tensor of nearly every restore.
            assert isinstance(target, torch.Tensor)
            data = entry.data
            nbytes = data.stop - data.start
            if target.untyped_storage().nbytes() >= nbytes:
                if nbytes:
                    self.reads.append((data, MemorySink(target.data_ptr(), nbytes, target)))
                self._values[path] = target
                return
        kind = "numpy array" if dtype is None else "tensor"
        if not self._fits(path, target, kind, entry.dtype, shape):
            return
        is_target = isinstance(target, torch.Tensor | np.ndarray)
        if not is_target and dtype is not None and path not in self._viewed:
            self._values[path] = self._fresh(entry, dtype)
            return
        member = Member(
            path, entry.type, entry.dtype, shape, c_strides(shape), 0, entry.requires_grad, target
        )
        if path in self._viewed:
            self._members.setdefault(path, []).append(member)
        else:
            self._place(entry, [member])

    def _fresh(self, entry: TensorEntry, dtype: torch.dtype) -> torch.Tensor:
        try:
            tensor = empty_tensor(entry.shape, dtype)
        except (RuntimeError, TypeError, OverflowError) as error:
            raise FormatError(key=entry.path, detail=f"no such tensor: {error}") from error
        nbytes = tensor.nbytes
        if nbytes:
            self.reads.append((entry.data, MemorySink(tensor.data_ptr(), nbytes, tensor)))
        if entry.type == "tensor" and not entry.requires_grad:
            return tensor
        return targets.typed(tensor, entry.type, entry.requires_grad)

    def _add_view(self, entry: ViewEntry) -> None:
        _check_kind(entry)
        is_wanted, target = self._find(entry.path)
        kind = "numpy array" if entry.type in _NUMPY_KINDS else "tensor"
        if is_wanted and self._fits(entry.path, target, kind, entry.dtype, entry.shape):
            self._add_member(entry, target)

    def _add_member(self, entry: ViewEntry, target: object) -> None:
        self._members.setdefault(entry.of, []).append(
            Member(
                entry.path,
                entry.type,
                entry.dtype,
                entry.shape,
                entry.strides,
                entry.offset,
                entry.requires_grad,
                target,
            )
        )

    def _add_bytes(self, entry: BytesEntry) -> None:
        path, kind = entry.path, entry.type
        nbytes = _check_stored(path, entry.data)
        if kind not in ("bytes", "bytearray", "str", "pickle", "numpy"):
            _fail(path, f"unknown type of bytes {kind!r}")
        is_wanted, target = self._find(path)
        if not is_wanted:
            return
        if isinstance(target, torch.Tensor) or (
            isinstance(target, np.ndarray) and kind not in ("numpy", "pickle")
        ):
            have = targets.describe(target)
            stored = "numpy array" if kind == "numpy" else kind
            self._mismatch(path, target, f"{stored} in the snapshot, {have} in the app state")
            return
        if kind == "pickle" and not self._allow_pickle:
            self._pickles.append(path)
            return
        data = bytearray(nbytes)
        if nbytes:
            raw = np.frombuffer(data, np.uint8)
            self.reads.append((entry.data, MemorySink(raw.ctypes.data, nbytes, raw)))

        def finish() -> None:
            try:
                if kind == "numpy":
                    found = objects.array_from_npy(data)
                    self._values[path] = targets.assign_array(target, found)
                elif kind == "pickle":
                    self._values[path] = objects.unpickled(data)
                else:
                    self._values[path] = objects.value_of(kind, data)
            except Exception as error:
                raise FormatError(
                    key=path, detail=f"its bytes are no {kind} value: {error}"
                ) from error

        self._finishers.append(finish)

    def _add_composite(self, entry: CompositeEntry) -> None:
        path = entry.path
        layout = entry.layout
        if entry.type not in _TENSOR_KINDS or COMPOSITE_PARTS.get(layout) != entry.parts:
            _fail(path, f"no {layout!r} has type {entry.type!r} and parts {entry.parts!r:.200}")
        if entry.dtype not in DTYPES or min(entry.shape, default=0) < 0:
            _fail(path, f"unknown dtype {entry.dtype!r:.80}, or a negative size {entry.shape}")
        is_wanted, target = self._find(path)
        kind = f"{layout} tensor" if layout.startswith("sparse") else "tensor"
        if is_wanted and self._fits(path, target, kind, entry.dtype, entry.shape):
            self._composites.append(entry)

    # Composites and shared memory, once all entries are known

    def _place_composites(self) -> None:
        for entry in self._composites:
            for part in entry.parts:
                self._place_part(entry, part)
        # A part of an unwanted entry may be the base of a wanted view.

    def _place_part(self, entry: CompositeEntry, part: str) -> None:
        path = part_path(entry.path, part)
        dense = self._dense.get(path)
        if dense is None or dense.type != "tensor":
            _fail(entry.path, f"it has no part {part!r}")
        try:
            must = part_shape(entry.layout, entry.dtype, entry.shape, part)
        except ValueError as error:
            _fail(entry.path, str(error))
        if must is not None and must != (dense.dtype, dense.shape):
            _fail(path, f"it is a {dense.dtype} {dense.shape}, not a {must[0]} {must[1]}")
        if isinstance(dense, ViewEntry):
            _check_kind(dense)
            self._add_member(dense, _ABSENT)
            return
        _check_tensor(dense)
        shape = dense.shape
        member = Member(path, "tensor", dense.dtype, shape, c_strides(shape), 0, False, _ABSENT)
        if path in self._viewed:
            self._members.setdefault(path, []).append(member)
        else:
            self._place(dense, [member])

    def _place_members(self, entries: Sequence[Entry]) -> None:
        if self._members:
            bases = {
                entry.path: entry
                for entry in entries
                if type(entry) is TensorEntry and entry.path in self._viewed
            }
            for of, members in self._members.items():
                base = bases.get(of)
                if base is None:
                    _fail(members[0].path, f"it is a view of {of!r}, which is no tensor entry")
                nbytes = _check_stored(of, base.data)
                _check_tensor(base)
                for member in members:
                    _check_view(member, nbytes)
                self._place(base, members)
        for entry in self._composites:
            self._finishers.append(lambda entry=entry: self._assemble(entry))  # type: ignore[misc]

    def _place(self, base: TensorEntry, members: list[Member]) -> None:
        """Finds memory for entries that share stored bytes, most often for just one."""
        try:
            sinks, finish = place(base.data.stop - base.data.start, members, self._values)
        except (MemoryError, FormatError):
            raise
        except Exception as error:  # what torch and numpy refuse about dims
            raise FormatError(key=members[0].path, detail=f"no such tensor: {error}") from error
        if base.data.stop > base.data.start:
            self.reads.extend((base.data, sink) for sink in sinks)
        if finish is not None:
            self._finishers.append(finish)

    def _assemble(self, entry: CompositeEntry) -> None:
        parts: dict[str, Any] = {
            part: self._values.pop(part_path(entry.path, part)) for part in entry.parts
        }
        try:
            parameters = {
                name: objects.decode_inline(value, entry.path)
                for name, value in entry.parameters.items()
            }
            value = assemble(entry.layout, entry.dtype, entry.shape, parameters, parts)
            target = self._targets.get(entry.path)
            if isinstance(target, torch.Tensor) and not target.is_meta:
                result = targets.assign_composite(target, value)
            else:
                result = value
            if result is value:
                result = targets.typed(value, entry.type, entry.requires_grad)
        except Exception as error:
            raise FormatError(
                key=entry.path, detail=f"its parts make no {entry.layout} tensor: {error}"
            ) from error
        self._values[entry.path] = result

    def _keep_missing(self) -> None:
        """Keeps what only the target has, where the snapshot's containers leave room for it."""
        skeleton = self._skeleton
        for path, value in self._target_items:
            if isinstance(value, Container):
                if path not in skeleton:
                    self._try_add(path, value)
            elif not skeleton.is_leaf(path):
                self.missing.append(path)
                self._try_add(path, value)

    def _try_add(self, path: str, value: object) -> None:
        try:
            if isinstance(value, Container):
                self._skeleton.add_container(path, value.type, value.metadata)
            else:
                self._skeleton.add_leaf(path)
                self._values[path] = value
        except FormatError:
            return  # the snapshot has a leaf where the target has a container, or vice versa


# Checks -------------------------------------------------------------------------------------


def _check_stored(path: str, data: Stored) -> int:
    start, stop = data.start, data.stop
    if not 0 <= start <= stop < _MAX_BYTES or len(data.crc32c) != -((start - stop) // BLOCK_BYTES):
        _fail(path, f"no bytes lie at [{start}, {stop}) with {len(data.crc32c)} checksums")
    return stop - start


def _check_kind(entry: TensorEntry | ViewEntry) -> torch.dtype | None:
    """Checks type and dtype; returns the torch dtype of a tensor, None for numpy's."""
    kind = entry.type
    dtype: torch.dtype | None
    if kind in _TENSOR_KINDS:
        dtype = DTYPES.get(entry.dtype)
        if dtype is None or dtype in QUANTIZED:
            _fail(entry.path, f"no dense tensor has dtype {entry.dtype!r:.80}")
        if entry.requires_grad and not (dtype.is_floating_point or dtype.is_complex):
            _fail(entry.path, f"a tensor of dtype {entry.dtype} cannot require gradients")
        return dtype
    if kind not in _NUMPY_KINDS or entry.dtype not in objects.NUMPY_DTYPES:
        _fail(entry.path, f"no {kind!r:.80} has dtype {entry.dtype!r:.80}")
    return None


def _check_tensor(entry: TensorEntry) -> torch.dtype | None:
    dtype = _check_kind(entry)
    data = entry.data
    nbytes = _check_stored(entry.path, data)
    if dtype is not None:
        itemsize = dtype.itemsize
    else:
        itemsize = objects.NUMPY_DTYPES[entry.dtype][0].itemsize
    shape = entry.shape
    if min(shape, default=0) < 0 or prod(shape) * itemsize != nbytes:
        _fail(entry.path, f"{nbytes} bytes are no {entry.dtype} of shape {shape}")
    if entry.type == "numpy_scalar" and shape:
        _fail(entry.path, f"a numpy scalar has no shape {shape}")
    if entry.offsets is not None or entry.global_shape is not None:
        _fail(entry.path, "it is a shard; sharded snapshots need a later release of actorsnap")
    # A product of zero says nothing about the other sizes.
    if nbytes == 0 and prod([size for size in shape if size]) >= _MAX_BYTES:
        _fail(entry.path, f"no tensor has shape {shape}")
    return dtype


def _check_view(member: Member, base_bytes: int) -> None:
    shape, strides = member.shape, member.strides
    itemsize = member.itemsize
    if (
        len(shape) != len(strides)
        or min(shape, default=0) < 0
        or min(strides, default=0) < 0
        or member.offset < 0
        or prod([size for size in shape if size]) * itemsize >= _MAX_BYTES
        or max(strides, default=0) >= _MAX_BYTES
        or member.offset + extent_bytes(shape, strides, itemsize) > base_bytes
    ):
        _fail(
            member.path,
            f"no view of {base_bytes} bytes has shape {shape}, strides {strides}, "
            f"offset {member.offset}",
        )


# A part of a key ------------------------------------------------------------------------------


def read_one(
    entries: Sequence[Entry], path: str, out: object | None, allow_pickle: bool
) -> KeyRestore:
    """Restores one leaf, or everything below a path.

    Args:
        entries: Of one rank.
        path: As the manifest has it; or as a person types it (``optim/state/0``), if only
            one path reads like that.
        out: None, or a tensor or array to restore a leaf into.

    Returns:
        A restore whose ``build`` returns the value; ``out`` itself where that was given.

    Raises:
        UsageError: No path is like that, or several are; or ``out`` cannot take a value.
        IncompatibleState: ``out`` is of another kind, dtype or shape than the leaf.
        FormatError: As ``KeyRestore``.
    """
    root = _resolve(entries, path)
    if out is not None:
        if not isinstance(out, torch.Tensor | np.ndarray):
            raise UsageError(f"out must be a tensor or a numpy array, not {type(out).__name__}")
        why = refusal(out) if isinstance(out, torch.Tensor) else None
        if why is not None:
            raise UsageError(f"out {why}")
        if out.layout is torch.strided if isinstance(out, torch.Tensor) else True:
            if not targets.is_writable(out):
                raise UsageError("out is read-only, or its elements share memory; pass a copy")
    restore = KeyRestore("", entries, target=out, allow_pickle=allow_pickle, root=root)
    if out is not None and (restore.missing or restore.unexpected or restore.mismatched):
        lines = restore.mismatched or [
            f"{root}: a container in the snapshot, {targets.describe(out)} as out"
        ]
        raise IncompatibleState(mismatched=lines)
    return restore


def _resolve(entries: Sequence[Entry], path: str) -> str:
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
    near = get_close_matches(path, sorted(seen)[:2000], n=3, cutoff=0.5)
    hint = f"; near it are {', '.join(map(repr, near))}" if near else ""
    raise UsageError(f"the snapshot has no path {path!r}{hint}")
