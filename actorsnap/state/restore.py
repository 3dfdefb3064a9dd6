"""From manifest entries back to a state dict: what fits, what is read into what, the result.

Decides, before any byte is read, which leaves match the app state, which memory each stored
range goes to, and how the state dict is put together (``docs/format.md``, "Entries"). It must
not know where bytes lie or how they are fetched, nor call ``load_state_dict``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from actorsnap.errors import (
    FormatError,
    UsageError,
    text_of,
)
from actorsnap.format.geometry import Box
from actorsnap.format.manifest import (
    BytesEntry,
    CompositeEntry,
    ContainerEntry,
    TensorEntry,
    ValueEntry,
    ViewEntry,
)
from actorsnap.format.validate import COMPOSITE_PARTS
from actorsnap.planning.index import AnyEntry, Shard, ShardedEntry
from actorsnap.state import objects, targets
from actorsnap.state.checks import (
    NUMPY_KINDS,
    TENSOR_KINDS,
    check_sharded,
    check_stored,
    check_tensor,
    check_view,
    fail,
)
from actorsnap.state.claims import Claim, claim
from actorsnap.state.composite import assemble, part_shape, take_apart
from actorsnap.state.distributed import Describer, Ranks, is_distributed
from actorsnap.state.members import Member, place, settle
from actorsnap.state.memory import MemorySink
from actorsnap.state.reshard import BoxTarget, Wanted, box_reads, cut, plan_shards
from actorsnap.state.stateful import Matching
from actorsnap.state.tensors import (
    DTYPES,
    address_of,
    c_strides,
    empty_tensor,
    sink_of_tensor,
)
from actorsnap.state.tree import (
    Container,
    Skeleton,
    escape,
    flatten,
    parent_of,
    part_path,
    unescape,
)

__all__ = ["KeyRestore", "Wanted", "entries_by_key"]

_ABSENT: Any = object()
_UNKNOWN_BYTES = 1 << 63  # of a base that comes later: then its views are checked again
_Leaf: TypeAlias = BytesEntry | CompositeEntry | ShardedEntry | TensorEntry | ValueEntry | ViewEntry
_TENSOR_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


def entries_by_key(entries: Iterable[AnyEntry]) -> dict[str, list[AnyEntry]]:
    """Returns the entries of each top-level key, in order.

    A key's list ends with the entries of other keys whose memory its views refer to.

    Raises:
        FormatError: A path does not begin with a top-level key.
    """
    tokens: dict[str, list[AnyEntry]] = {}
    by_path: dict[str, AnyEntry] = {}
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
    keys: dict[str, list[AnyEntry]] = {}
    for token, found in tokens.items():
        key = unescape(token)
        if type(key) is not str:
            fail(token, "a top-level key is a str")
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
        matching: What of ``target`` has to match. Under ``LEAVES`` what it lacks is not read.
        root: Escaped path to restore instead of the whole key.
        apart: Paths of leaves that get memory of their own instead of the target's.
        world_size: How many ranks saved. What one of several kept to itself, only the same rank
            is likely to want.
        is_trial: Only check the entries: no memory is taken, and there is nothing to build.
            Whether shards cover their tensor is left to ``planning.index.holes``.

    Attributes:
        missing: Paths of leaves or dict keys that the target has and the snapshot lacks.
        unexpected: Paths of leaves that the snapshot has and the target has no place for.
        unplaced: As ``unexpected``, of what is everybody's: another rank may have the place.
        mismatched: A line per tensor that the target's one cannot take; a distributed one that
            does not fit is never replaced. Or, of an optimizer, why it cannot take anything.
        on_meta: Paths of tensors on the meta device: fresh CPU tensors take their place,
            except under ``NOTHING``.
        claims: Memory of the target that is written to.
        reads: What to read into what. Nothing of a target is written before these are
            filled. A stored range may appear twice.
        surplus_bytes: Of ``reads``, those that belong to no box of the target, but to the same
            checksum blocks.

    Raises:
        UsageError: Pickled leaves, and ``allow_pickle`` is False. All are named.
        FormatError: Entries contradict themselves or each other. Nothing is allocated for
            an entry before it is checked.
        MemoryError: There is not so much memory; names the leaf.
    """

    def __init__(
        self,
        key: str,
        entries: Sequence[AnyEntry],
        *,
        target: object | None,
        allow_pickle: bool,
        matching: Matching = Matching.KEYS,
        root: str | None = None,
        apart: Iterable[str] = (),
        world_size: int = 1,
        is_trial: bool = False,
    ) -> None:
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.unplaced: list[str] = []
        self.mismatched: list[str] = []
        self.on_meta: list[str] = []
        self.claims: list[Claim] = []
        self.reads: list[Wanted] = []
        self.surplus_bytes = 0
        self._private: Ranks | None = None if world_size == 1 else ()
        self._root = escape(key) if root is None else root
        self._matching = matching
        self._allow_pickle = allow_pickle
        self._is_trial = is_trial
        self._pickles: list[str] = []
        self._skeleton = Skeleton(self._root)
        self._values: dict[str, object] = {}
        # What remains to do once all bytes are there, in this order.
        self._finishers: list[Callable[[], None]] = []
        self._copies: list[Callable[[], None]] = []
        self._target = target
        self._targets: dict[str, object] = {}
        # Below it, leaves have just the target's places; some names are opaque, with all in them.
        self._places: str | None = None
        self._opaque: set[str] = set()
        if target is not None:
            self._targets = {
                path: value
                for path, value in zip(*flatten(self._root, target), strict=True)
                if type(value) is not Container
            }
            if matching is Matching.LEAVES:
                self._places = self._root
                self._add_opaque(target)
            elif matching is Matching.MODEL and isinstance(target, dict):
                self._places = f"{self._root}/model"
                self._add_opaque(target["model"])
        for path in apart:
            lender: Any = self._targets[path]
            try:
                self._targets[path] = targets.stand_in(lender)
            except MemoryError as error:
                raise MemoryError(f"{path!r}: {error}") from error
        self._viewed = {
            entry.of for entry in entries if type(entry) is ViewEntry and self._has(entry.path)
        }
        self._dense: dict[str, TensorEntry | ViewEntry] = {}
        self._views: list[ViewEntry] = []
        self._bases: dict[str, TensorEntry] = {}
        self._members: dict[str, list[Member]] = {}
        self._composites: list[CompositeEntry] = []
        self._attributes: dict[str, dict[str, Any]] = {}
        self._describer = Describer()
        self._add_entries(entries)
        if self._root not in self._skeleton:
            fail(self._root, "the snapshot has no entries of it")
        self._check_views(entries)
        for composite in self._composites:
            held = self._parts_of_target(composite)
            for part in composite.parts:
                self._place_part(composite, part, held.get(part))
        for of, members in self._members.items():
            self._place(self._bases[of], members)
        self._finishers += self._copies
        for composite in self._composites:
            self._finishers.append(partial(self._assemble, composite))
        if self._pickles:
            lines = "\n".join(f"  {path!r}" for path in self._pickles)
            raise UsageError(
                f"{len(self._pickles)} leaves are pickled, and unpickling runs whatever code "
                "the snapshot holds; if you trust it, pass options=Options(allow_pickle=True). "
                f"Else restore other keys:\n{lines}"
            )
        self._keep_missing()
        if matching is Matching.GROUPS:
            self._compare_groups(entries)

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
        for path, attributes in self._attributes.items():
            value = self._values.get(path)
            if isinstance(value, torch.Tensor) and value is not self._targets.get(path):
                vars(value).update(attributes)
        if self._skeleton.is_leaf(self._root) and self._root not in self._values:
            return self._target  # an unexpected leaf that was not asked for
        return self._skeleton.build(self._values)

    # Entries, one by one

    def _has(self, path: str) -> bool:
        root = self._root
        return path == root or path.startswith((root + "/", root + "@"))

    def _add_entries(self, entries: Sequence[AnyEntry]) -> None:
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
                    fail(path, "two entries have this path, or it is no part of an entry")
                self._dense[path] = entry  # type: ignore[assignment]
                if kind is ViewEntry:
                    self._views.append(entry)  # type: ignore[arg-type]
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
                elif kind is ShardedEntry:
                    self._add_sharded(entry)  # type: ignore[arg-type]
                else:
                    self._add_composite(entry)  # type: ignore[arg-type]

    def _has_place(self, path: str) -> bool:
        """Whether a leaf has to match just the target's leaf at its path."""
        places = self._places
        if places is None or not (path == places or path.startswith(places + "/")):
            return False
        if not self._opaque:
            return True
        below = len(places) + 1
        return path[:below] + path[below:].partition("/")[0] not in self._opaque

    def _add_opaque(self, state: object) -> None:
        if isinstance(state, dict):
            names = (escape(name) for name in state if _is_extra_state(name))
            self._opaque.update(f"{self._places}/{name}" for name in names)

    def _find(self, entry: _Leaf) -> tuple[bool, object]:
        """Returns whether a stored leaf is wanted, and the target's leaf, or _ABSENT."""
        path = entry.path
        target = self._targets.get(path, _ABSENT)
        if target is _ABSENT and self._has_place(path):
            is_private = self._private is not None and not (
                isinstance(entry, ShardedEntry) or entry.replicated
            )
            (self.unexpected if is_private else self.unplaced).append(path)
            return False, _ABSENT
        return not self._is_passed_over(path), target

    def _is_passed_over(self, path: str) -> bool:
        """Whether a ``ModelState`` has no use for what optimizers had saved: it has none now, or
        these parameters are frozen, or of other stages."""
        below = f"{self._root}/optim/"
        if self._matching is not Matching.MODEL or not path.startswith(below):
            return False
        target: Any = self._target
        name = path.removeprefix(below).partition("/")[0]
        held = target.get("optim")
        if held is None:
            return True
        is_flat = "param_groups" not in held and name not in ("state", "param_groups")
        return is_flat and unescape(name) not in held

    def has_target(self, path: str) -> bool:
        """Whether the target has a leaf at ``path``; of no target that is not known: True."""
        return self._target is None or path in self._targets

    def _holders(self, entry: TensorEntry | BytesEntry) -> Ranks | None:
        return None if entry.replicated else self._private

    def _mismatch(self, path: str, target: object, detail: str) -> None:
        self.mismatched.append(f"{path}: {detail}")
        self._values[path] = target

    def _fit(
        self, path: str, target: object, kind: str, dtype: str, shape: Any
    ) -> tuple[bool, object]:
        """Returns whether a stored tensor or array is wanted, and a target that takes it.

        Notes a mismatch where a target that does not take it cannot be replaced either.
        """
        if not isinstance(target, torch.Tensor | np.ndarray):
            return True, target
        found = targets.difference(target, kind, dtype, tuple(shape))
        if found is None:
            if isinstance(target, torch.Tensor) and target.is_meta:
                self.on_meta.append(path)
                if self._matching in (Matching.MODEL, Matching.NOTHING):
                    # Nobody knows whether it would copy into that tensor, or replace it.
                    self._values[path] = target
                    return False, target
            return True, target
        is_same_kind = isinstance(target, np.ndarray) == (kind == "numpy array")
        is_kept = self._matching in (Matching.KEYS, Matching.MODEL)
        if self._has_place(path) or (is_kept and is_same_kind):
            self._mismatch(path, target, found)
            return False, target
        del self._targets[path]
        return True, _ABSENT

    def _add_value(self, entry: ValueEntry) -> None:
        path = entry.path
        value = objects.decode_inline(entry.value, path)
        is_wanted, target = self._find(entry)
        if isinstance(target, torch.Tensor | np.ndarray) and self._has_place(path):
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
        dtype = check_tensor(entry)
        if entry.attributes:
            self._attributes[path] = objects.decode_attributes(entry.attributes, path)
        if path in self._viewed:
            self._dense[path] = entry
        is_wanted, target = self._find(entry)
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
            start = address_of(target)
            if not nbytes or (start and target.untyped_storage().nbytes() >= nbytes):
                if nbytes:
                    sink = MemorySink(start, nbytes, target)
                    holders = None if entry.replicated else self._private
                    self.reads.append(Wanted(data, sink, holders))
                    self.claims.append(Claim(path, target, start, start + nbytes, path, start))
                self._values[path] = target
                return
        kind = "numpy array" if dtype is None else "tensor"
        if is_distributed(target):
            shard = Shard(Box.whole(shape), entry.data)
            self._add_boxes(path, kind, entry.dtype, shape, [shard], path, target)
            return
        is_wanted, target = self._fit(path, target, kind, entry.dtype, shape)
        if not is_wanted:
            return
        is_viewed = path in self._viewed
        has_memory = isinstance(target, torch.Tensor | np.ndarray) and not (
            isinstance(target, torch.Tensor) and target.is_meta
        )
        if dtype is not None and not is_viewed and not has_memory:
            self._values[path] = self._fresh(entry, dtype)
            return
        member = Member(
            path, entry.type, entry.dtype, shape, c_strides(shape), 0, entry.requires_grad, target
        )
        self.claims += claim(path, target, path, member)
        if is_viewed:
            self._members.setdefault(path, []).append(member)
        elif isinstance(target, torch.Tensor | np.ndarray) and targets.is_writable(target):
            # On a device, or strided.
            if entry.data.stop > entry.data.start:
                sink_of = targets.sink_of(target)
                self.reads.append(Wanted(entry.data, sink_of, self._holders(entry)))
            self._values[path] = target
        else:
            self._place(entry, [member])

    def _fresh(self, entry: TensorEntry, dtype: torch.dtype) -> object:
        if self._is_trial:
            return None
        try:
            tensor = empty_tensor(entry.shape, dtype, memory_format=entry.memory_format)
        except MemoryError as error:
            raise MemoryError(f"{entry.path!r}: {error}") from error
        if tensor.nbytes:
            sink = sink_of_tensor(tensor)
            self.reads.append(Wanted(entry.data, sink, self._holders(entry)))
        if entry.type == "tensor" and not entry.requires_grad:
            return tensor
        return targets.typed(tensor, entry.type, entry.requires_grad)

    # Boxes: the snapshot has shards, or the target is one

    def _add_sharded(self, entry: ShardedEntry) -> None:
        path, shape, shards = entry.path, entry.shape, entry.shards
        dtype = check_sharded(entry)
        if entry.attributes:
            self._attributes[path] = objects.decode_attributes(entry.attributes, path)
        is_wanted, target = self._find(entry)
        if not is_wanted:
            return
        kind = "numpy array" if dtype is None else "tensor"
        # Under two names a tensor is saved twice; what is equal may share memory.
        parts = frozenset((shard.box, shard.data.crc32c) for shard in shards)
        base = f"{entry.dtype} {hash(parts)}"
        if is_distributed(target):
            self._add_boxes(path, kind, entry.dtype, shape, shards, base, target)
            return
        is_wanted, target = self._fit(path, target, kind, entry.dtype, shape)
        if not is_wanted:
            return
        if self._is_trial:
            return
        # Before memory is taken: the manifest may claim any global shape.
        whole = Box.whole(shape)
        itemsize = (dtype or DTYPES[objects.NUMPY_DTYPES[entry.dtype][1]]).itemsize
        planned = plan_shards(path, shards, [whole], itemsize)
        into: torch.Tensor | None = None
        if isinstance(target, torch.Tensor | np.ndarray) and targets.is_writable(target):
            into = targets.tensor_over(target)
        if into is not None:
            self._values[path] = target
            self.claims += claim(path, target, base)
        else:
            into = self._whole(entry, dtype, target)
        self.reads += box_reads(planned, shards, [BoxTarget(whole, into, None)])

    def _whole(
        self, entry: ShardedEntry, dtype: torch.dtype | None, target: object
    ) -> torch.Tensor:
        """Returns fresh memory for all of a sharded tensor, which becomes the leaf's value."""
        path, shape = entry.path, entry.shape
        made = dtype or DTYPES[objects.NUMPY_DTYPES[entry.dtype][1]]
        try:
            tensor = empty_tensor(shape, made, memory_format=entry.memory_format)
        except MemoryError as error:
            raise MemoryError(f"{path!r}: {error}") from error
        fresh = tensor if dtype is not None else tensor.numpy()
        member = Member(
            path, entry.type, entry.dtype, shape, c_strides(shape), 0, entry.requires_grad, target
        )
        finish = settle(member, fresh, self._values)
        if finish is not None:
            self._finishers.append(finish)
        return tensor

    def _add_boxes(
        self,
        path: str,
        kind: str,
        dtype: str,
        shape: tuple[int, ...],
        shards: Sequence[Shard],
        base: str,
        target: Any,
    ) -> None:
        """Restores into a distributed target."""
        found = self._describer.describe(target)
        assert found is not None
        why = targets.box_difference(found, kind, dtype, shape)
        if isinstance(found, str) or why is not None:
            self._mismatch(path, target, why or "")
            return
        self._values[path] = target
        for piece in found.pieces:
            self.claims += claim(path, piece.tensor, base, origin=piece.box.offsets)
        into = [BoxTarget(piece.box, piece.tensor, piece.holders or ()) for piece in found.pieces]
        planned = plan_shards(path, shards, [each.box for each in into], DTYPES[dtype].itemsize)
        reads = box_reads(planned, shards, into)
        self.reads += reads
        self.surplus_bytes += sum(want.stored.stop - want.stored.start for want in reads)
        self.surplus_bytes -= sum(target.tensor.nbytes for target in into)

    def _add_view_of_boxes(self, entry: ViewEntry, kind: str, target: Any) -> None:
        """Restores memory that is shared in the snapshot into a distributed target.

        All of it is read, and copied: its checksums are the base's, and its strides any.
        """
        path = entry.path
        found = self._describer.describe(target)
        assert found is not None
        why = targets.box_difference(found, kind, entry.dtype, entry.shape)
        if isinstance(found, str) or why is not None:
            self._mismatch(path, target, why or "")
            return
        pieces = found.pieces
        for piece in pieces:
            self.claims += claim(path, piece.tensor, entry.of, origin=piece.box.offsets)
        self._add_member(entry, _ABSENT)

        def copy() -> None:
            whole: Any = self._values[path]
            for piece in pieces:
                targets.assign_box(piece.tensor, whole, piece.box)
            self._values[path] = target

        self._copies.append(copy)

    # Views, raw bytes, composites

    def _add_view(self, entry: ViewEntry) -> None:
        check_view(entry, _UNKNOWN_BYTES)
        self._views.append(entry)
        is_wanted, target = self._find(entry)
        kind = "numpy array" if entry.type in NUMPY_KINDS else "tensor"
        if is_wanted and is_distributed(target):
            self._add_view_of_boxes(entry, kind, target)
            return
        if is_wanted:
            is_wanted, target = self._fit(entry.path, target, kind, entry.dtype, entry.shape)
        if is_wanted:
            member = self._add_member(entry, target)
            self.claims += claim(entry.path, target, entry.of, member)

    def _add_member(self, entry: ViewEntry, target: object) -> Member:
        member = Member(
            entry.path,
            entry.type,
            entry.dtype,
            entry.shape,
            entry.strides,
            entry.offset,
            entry.requires_grad,
            target,
        )
        self._members.setdefault(entry.of, []).append(member)
        return member

    def _add_bytes(self, entry: BytesEntry) -> None:
        path, kind = entry.path, entry.type
        nbytes = check_stored(path, entry.data)
        if kind not in ("bytes", "bytearray", "str", "json", "pickle", "numpy"):
            fail(path, f"unknown type of bytes {kind!r}")
        is_wanted, target = self._find(entry)
        if not is_wanted:
            return
        if self._has_place(path) and (
            isinstance(target, torch.Tensor)
            or (isinstance(target, np.ndarray) and kind not in ("numpy", "pickle"))
        ):
            have = targets.describe(target)
            stored = "numpy array" if kind == "numpy" else kind
            self._mismatch(path, target, f"{stored} in the snapshot, {have} in the app state")
            return
        if kind == "pickle" and not self._allow_pickle:
            self._pickles.append(path)
            return
        if self._is_trial:
            return
        try:
            data = bytearray(nbytes)
        except MemoryError as error:
            raise MemoryError(f"{path!r}: no memory for {nbytes} bytes") from error
        if kind == "numpy":
            self.claims += claim(path, target, path)
        if nbytes:
            raw = np.frombuffer(data, np.uint8)
            sink = MemorySink(raw.ctypes.data, nbytes, raw)
            self.reads.append(Wanted(entry.data, sink, self._holders(entry)))

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
                    key=path, detail=f"its bytes are no {kind} value: {text_of(error)}"
                ) from error

        self._finishers.append(finish)

    def _add_composite(self, entry: CompositeEntry) -> None:
        path = entry.path
        layout = entry.layout
        if entry.type not in TENSOR_KINDS or COMPOSITE_PARTS.get(layout) != entry.parts:
            fail(path, f"no {layout!r} has type {entry.type!r} and parts {entry.parts!r:.200}")
        if entry.dtype not in DTYPES or min(entry.shape, default=0) < 0:
            fail(path, f"unknown dtype {entry.dtype!r:.80}, or a negative size {entry.shape}")
        is_wanted, target = self._find(entry)
        kind = f"{layout} tensor" if layout.startswith("sparse") else "tensor"
        if is_wanted and self._fit(path, target, kind, entry.dtype, entry.shape)[0]:
            self._composites.append(entry)

    # Composites and shared memory, once all entries are known

    def _check_views(self, entries: Sequence[AnyEntry]) -> None:
        if not self._views:
            return
        self._bases = {
            entry.path: entry
            for entry in entries
            if type(entry) is TensorEntry and entry.path in self._viewed
        }
        checked: set[str] = set()
        for view in self._views:
            base = self._bases.get(view.of)
            if base is None:
                fail(view.path, f"it is a view of {view.of!r}, which is no tensor entry")
            if view.of not in checked:
                check_tensor(base)
                checked.add(view.of)
            check_view(view, base.data.stop - base.data.start)

    def _parts_of_target(self, entry: CompositeEntry) -> dict[str, torch.Tensor]:
        target = self._targets.get(entry.path)
        if not isinstance(target, torch.Tensor) or target.is_meta:
            return {}
        found = take_apart(target)
        return {} if isinstance(found, str) else dict(found[2])

    def _place_part(self, entry: CompositeEntry, part: str, held: torch.Tensor | None) -> None:
        path = part_path(entry.path, part)
        dense = self._dense.get(path)
        if dense is None or dense.type != "tensor":
            fail(entry.path, f"it has no part {part!r}")
        try:
            must = part_shape(entry.dtype, entry.shape, part)
        except ValueError as error:
            fail(entry.path, str(error))
        if must is not None and must != (dense.dtype, dense.shape):
            fail(path, f"it is a {dense.dtype} {dense.shape}, not a {must[0]} {must[1]}")
        if isinstance(dense, ViewEntry):
            member = self._add_member(dense, _ABSENT)
            self.claims += claim(entry.path, held, dense.of, member)
            return
        dtype = check_tensor(dense)
        shape = dense.shape
        member = Member(path, "tensor", dense.dtype, shape, c_strides(shape), 0, False, _ABSENT)
        self.claims += claim(entry.path, held, path, member)
        if path in self._viewed:
            self._members.setdefault(path, []).append(member)
        elif dtype is not None:
            self._values[path] = self._fresh(dense, dtype)

    def _place(self, base: TensorEntry, members: list[Member]) -> None:
        """Finds memory for entries that share stored bytes, most often for just one."""
        if self._is_trial:
            return
        data = base.data
        try:
            nbytes = data.stop - data.start
            placed = place(nbytes, members, self._values, block_bytes=data.block_bytes)
        except MemoryError as error:
            raise MemoryError(f"{members[0].path!r}: {error}") from error
        except Exception as error:  # what torch and numpy refuse about dims
            raise FormatError(key=members[0].path, detail=f"no such tensor: {error}") from error
        if placed.sinks:
            data = cut(data, placed.start, placed.stop)
            holders = self._holders(base)
            self.reads.extend(Wanted(data, sink, holders) for sink in placed.sinks)
        if placed.finish is not None:
            self._finishers.append(placed.finish)

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
        """Notes what only the target has; keeps further keys of its dicts, with their values."""
        skeleton = self._skeleton
        if self._places is not None:
            self.missing = [
                path
                for path in self._targets
                if not skeleton.is_leaf(path) and self._has_place(path)
            ]
            self.missing += sorted(path for path in self._opaque if path not in skeleton)
        if self._matching in (Matching.KEYS, Matching.MODEL):
            for path, value in skeleton.further_keys(self._target):
                if self._may_lack(path):
                    continue
                self.missing.append(path)
                skeleton.add_leaf(path)
                self._values[path] = value

    def _may_lack(self, path: str) -> bool:
        """Whether it is no matter that a ``ModelState``'s snapshot does not have a dict key.

        The model's leaves are compared already. Of optimizers there may be nothing, or the
        hyperparameters may be kept in the other way (``flatten``), which torch can read.
        """
        if self._matching is not Matching.MODEL:
            return False
        optim = f"{self._root}/optim"
        sections = f"{optim}/state", f"{optim}/param_groups"
        is_other_form = path in sections or sections[1] in self._skeleton
        return (
            self._has_place(path)
            or path == optim
            or (path.rpartition("/")[0] == optim and is_other_form)
        )

    def _compare_groups(self, entries: Sequence[AnyEntry]) -> None:
        """Notes where an optimizer's parameter groups are first not as they were saved."""
        target: Any = self._target
        groups = target["param_groups"]
        root = f"{self._root}/param_groups"
        saved: int | str = self._skeleton.num_items(root)
        if saved != len(groups):
            self.mismatched.append(
                f"{self._root}: {saved} parameter groups in the snapshot, {len(groups)} in the "
                "app state"
            )
            return
        stored = {entry.path: entry.data for entry in entries if type(entry) is BytesEntry}
        for number, group in enumerate(groups):
            path = f"{root}/{number}/params"
            held = group["params"]
            if path in stored:
                # Not read yet. But as params are numbered through, as many take as many bytes.
                size = stored[path].stop - stored[path].start
                found = objects.bytes_of(held, path)
                is_same = found is not None and len(found[1]) == size
                saved = len(held) if is_same else "another number of"
            else:
                inline = self._values.get(path)
                saved = self._skeleton.num_items(path)
                if isinstance(inline, list):
                    saved = len(inline)
            if saved != len(held):
                self.mismatched.append(
                    f"{self._root}: {saved} params in parameter group {number} in the snapshot, "
                    f"{len(held)} in the app state"
                )
                return


def _is_extra_state(name: object) -> bool:
    """Whether a module's state dict has under ``name`` what ``get_extra_state`` returned."""
    return isinstance(name, str) and f".{name}".endswith("._extra_state")
