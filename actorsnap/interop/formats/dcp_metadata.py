# SPDX-License-Identifier: Apache-2.0
"""Reads ``.metadata`` of torch.distributed.checkpoint (DCP) without its classes.

Every class in the file is replaced by an inert one, made for this file only. Its objects keep the
state that the pickle gives them. Nothing is called or imported, regardless of the pickle. Written
for torch 2.9 to 2.13; their files differ only in the modules of some classes.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping, Sequence
from io import BytesIO
from typing import Any, TypeAlias

import msgspec

from actorsnap.errors import FormatError, UsageError, text_of
from actorsnap.format.geometry import Box
from actorsnap.format.layout import is_well_formed_key
from actorsnap.interop.formats.checked_pickles import CheckedUnpickler
from actorsnap.state.tensors import DTYPES

Path: TypeAlias = tuple[str | int, ...]
"""Path of a leaf: str for dict keys, int for list positions."""

_DCP = "torch.distributed.checkpoint.metadata"
_TENSOR = "TensorStorageMetadata"
_VALUE = "BytesStorageMetadata"

_INERT = frozenset(
    [
        *[
            (_DCP, name)
            for name in (
                "Metadata",
                _TENSOR,
                _VALUE,
                "TensorProperties",
                "ChunkStorageMetadata",
                "MetadataIndex",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        ],
        ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),  # before 2.3
        ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        *[
            (module, name)
            for module in ("pathlib", "pathlib._local")  # the second by Python 3.13
            for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
        ],
        *[
            ("megatron.core.dist_checkpointing.strategies.torch", name)
            for name in ("MCoreSavePlan", "MCoreMetadata")
        ],
    ]
)
"""Module and name of the globals that become inert classes."""

_OF_BYTES_IO = frozenset([("_io", "BytesIO"), ("_codecs", "encode"), ("__builtin__", "bytes")])

_MAX_ARGUMENTS = 64
"""Most arguments of a call, or dims of a shape: a call of a few pickle bytes copies them."""

BYTES_IO = "actorsnap.BytesIO"
"""Begins a pair with the content of a ``BytesIO``, also in snapshots of ``interop.dcp``."""


TOP = "dcp"
"""The key of leaves at the top level of a state dict, in snapshots of ``interop.dcp``."""

MARK = "dcp"
"""The key of a ``DcpMark`` in the ``metadata`` of the commit object."""


class DcpMark(msgspec.Struct, frozen=True):
    """The snapshot has the state dict of a DCP call.

    Attributes:
        v: Version of this mark.
        flat: False: the planner did not flatten; all leaves are at the top level.
        key: Key of leaves at the top level of the state dict; empty if they keep their names.
            ``dcp_folders`` chooses another one.
    """

    v: int = 1
    flat: bool = True
    key: str = TOP

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> DcpMark | None:
        """Returns None for any other snapshot."""
        try:
            mark = msgspec.convert(metadata.get(MARK), cls)
        except msgspec.ValidationError:
            return None
        return mark if mark.v == 1 else None

    def metadata(self) -> dict[str, Any]:
        key = {} if self.key == TOP else {"key": self.key}
        return {MARK: {"v": self.v, "flat": self.flat, **key}}

    def keys_of(self, keys: Sequence[str | int]) -> Path:
        """Returns the keys of a leaf in the state dict, from those in the snapshot."""
        is_below = bool(self.key) and len(keys) > 1 and keys[0] == self.key
        return tuple(keys[1:] if is_below else keys)

    def state_dict_of(self, app_state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the state dict, from the state of all keys of the snapshot.

        Raises:
            UsageError: A leaf of the top level has the name of a key.
        """
        top = app_state.get(self.key) if self.key else None
        if not isinstance(top, Mapping):
            return dict(app_state)
        found = {key: state for key, state in app_state.items() if key != self.key}
        if twice := sorted([str(key) for key in top if key in found]):
            raise UsageError(
                f"{twice[0]!r} is a key of the snapshot, and of a leaf below {self.key!r}. In DCP, "
                "both are at the top level: rename one, or export one key"
            )
        return found | dict(top)


class StoredItem(msgspec.Struct, frozen=True, gc=False):
    """Bytes ``[start, stop)`` of a file: a tensor's box, or a value.

    Attributes:
        box: None for a value.
        transforms: Names of the transforms of the bytes, the last one applied first.
    """

    file: str
    start: int
    stop: int
    box: Box | None = None
    transforms: tuple[str, ...] = ()


class StoredLeaf(msgspec.Struct, frozen=True, gc=False):
    """A tensor or value of the state dict. ``shape`` is None for a value."""

    fqn: str
    path: Path
    shape: tuple[int, ...] | None
    items: tuple[StoredItem, ...]


class DcpMetadata(msgspec.Struct, frozen=True):
    """Attributes:
    leaves: In the order of the file.
    is_flat: Whether the planner flattened the state dict.
    """

    leaves: tuple[StoredLeaf, ...]
    is_flat: bool


class _Inert:
    state: Any = None

    def __init__(self, *args: object) -> None:
        if len(args) > _MAX_ARGUMENTS:
            raise pickle.UnpicklingError(f"a call with {len(args)} arguments")
        self.args = args

    def __call__(self, *args: object) -> _Inert:
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(CheckedUnpickler):
    """Knows the globals ``known``, or any, if that is None."""

    def __init__(self, data: bytes, known: Collection[tuple[str, str]] | None) -> None:
        super().__init__(BytesIO(data))
        self._known = known
        self._classes: dict[tuple[str, str], Any] = {}
        self.refused = ""

    def find_class(self, module: str, name: str) -> Any:
        place = module, name
        if place == ("torch", "Size"):
            return lambda sizes=(): _sizes(sizes)
        if place == ("collections", "OrderedDict"):
            return lambda: {}
        if module == "torch" and name in DTYPES:
            return name
        if self._known is not None and place not in self._known:
            self.refused = f"{module}.{name}"
            raise pickle.UnpicklingError(self.refused)
        # A class of its own: a pickle can change the attributes of classes.
        return self._classes.setdefault(place, type(name, (_Inert,), {}))


def decode_metadata(data: bytes, key: str, *, allow_pickle: bool = False) -> DcpMetadata:
    """Decodes a metadata file; errors name ``key``.

    Args:
        allow_pickle: Accept other classes, too, which planners may add. They are still inert.

    Raises:
        UsageError: It names another class or function.
        FormatError: It is damaged, or contradicts itself.
    """
    unpickler = _Unpickler(data, None if allow_pickle else _INERT)
    try:
        loaded = unpickler.load()
    except Exception as error:
        if unpickler.refused:
            raise UsageError(
                f"{key} names {unpickler.refused}, which metadata of torch.distributed.checkpoint "
                "does not have. Nothing of its pickle was executed. If a planner of yours stores "
                "such objects, pass options=Options(allow_pickle=True): they are ignored"
            ) from error
        raise FormatError(key=key, detail=f"its pickle is damaged: {text_of(error)}") from error
    try:
        return _metadata(loaded, key)
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        detail = f"it is not metadata of torch.distributed.checkpoint: {text_of(error)}"
        raise FormatError(key=key, detail=detail) from error


def bytes_io_of(pickled: bytes) -> bytes | None:
    """Returns the content of a pickled ``BytesIO``; None for any other pickle.

    DCP's planners take one for a value, and torch's weights-only unpickler refuses it.
    """
    if b"BytesIO" not in pickled[:32]:
        return None
    try:
        found = _Unpickler(pickled, _OF_BYTES_IO).load()
        match getattr(found, "state", None):
            case (_Inert(args=()), int(), None | {}):
                return b""
            case (_Inert(args=(str() as text, "latin1")), int(), None | {}):  # bytes, to Python 2
                return text.encode("latin-1")
            case (bytes() as content, int(), None | {}):
                return content
    except Exception:  # a pickle can raise anything; the other unpickler says what is wrong
        pass
    return None


def _state(found: Any, *names: str) -> dict[str, Any]:
    name = type(found).__name__
    if not isinstance(found, _Inert) or name not in names:
        raise TypeError(f"a {name} in place of a {names[0]}")
    state = found.state
    if state is None:  # a class without fields
        return {}
    if not isinstance(state, dict):
        raise TypeError(f"a {name} without fields")
    return state


def _metadata(loaded: Any, key: str) -> DcpMetadata:
    fields = _state(loaded, "Metadata", "MCoreMetadata")
    planned = fields.get("planner_data")
    paths = planned if isinstance(planned, dict) else {}
    items = _items(fields["storage_data"], key)
    leaves: list[StoredLeaf] = []
    for fqn, described in fields["state_dict_metadata"].items():
        _check_name(fqn)
        shape, boxes = _shape(described)
        if not boxes:
            raise FormatError(key=key, detail=f"{fqn!r:.200} has no data")
        found = tuple([_item(items, fqn, box, key) for box in boxes])
        leaves.append(StoredLeaf(fqn, _path(fqn, paths.get(fqn)), shape, found))
    return DcpMetadata(tuple(leaves), is_flat=bool(planned))


_Place: TypeAlias = tuple[str, tuple[int, ...] | None]
"""A leaf's fqn, and the offsets of a box of it."""

_Bytes: TypeAlias = tuple[str, int, int, tuple[str, ...]]
"""File, start, stop and transforms of a ``StoredItem``."""


def _check_name(fqn: object) -> None:
    if type(fqn) is not str:
        raise TypeError(f"a name of type {type(fqn).__name__}")


def _items(stored: Any, key: str) -> dict[_Place, _Bytes]:
    items: dict[_Place, _Bytes] = {}
    well_formed: set[str] = set()
    for index, info in stored.items():
        where, place = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
        offset = where.get("offset")
        _check_name(where["fqn"])
        at = where["fqn"], None if offset is None else _sizes(offset)
        file, start, length = place["relative_path"], place["offset"], place["length"]
        if type(file) is not str or (file not in well_formed and not is_well_formed_key(file)):
            raise FormatError(key=key, detail=f"{file!r:.200} is not a file in its folder")
        well_formed.add(file)
        start, length = _sizes((start, length))
        transforms = tuple(map(str, place.get("transform_descriptors") or ()))
        if at in items:
            raise FormatError(key=key, detail=f"{at[0]!r:.200} is stored twice at {at[1]}")
        items[at] = file, start, start + length, transforms
    return items


def _shape(described: Any) -> tuple[tuple[int, ...] | None, list[Box | None]]:
    """Returns shape and boxes of a tensor; of a value None, and no box."""
    if type(described).__name__ == _VALUE:
        return None, [None]
    fields = _state(described, _TENSOR)
    boxes: list[Box | None] = []
    filled: list[Box | None] = []
    for chunk in [_state(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]]:
        box = Box(_sizes(chunk["offsets"]), _sizes(chunk["sizes"]))
        (filled if box.volume else boxes).append(box)
    # Ranks without a part of the tensor add empty boxes.
    return _sizes(fields["size"]), filled or boxes[:1]


def _item(items: Mapping[_Place, _Bytes], fqn: str, box: Box | None, key: str) -> StoredItem:
    offsets = None if box is None else box.offsets
    found = items.get((fqn, offsets))
    if found is None:
        what = repr(fqn) if box is None else f"the part of {fqn!r:.200} at {offsets}"
        raise FormatError(key=key, detail=f"{what:.300} is in no file")
    file, start, stop, transforms = found
    return StoredItem(file, start, stop, box, transforms)


def _sizes(found: Any) -> tuple[int, ...]:
    is_sequence = type(found) in (tuple, list) and len(found) <= _MAX_ARGUMENTS
    if not is_sequence or not all([type(n) is int and n >= 0 for n in found]):
        raise TypeError(f"{found!r:.80} in place of sizes")
    return tuple(found)


def _path(fqn: str, path: Any) -> Path:
    """Returns the keys of a leaf; the fqn, if a planner has renamed it."""
    if (
        type(path) is tuple
        and all([type(key) is str or (type(key) is int and key >= 0) for key in path])
        and ".".join(map(str, path)) == fqn
    ):
        return path
    return (fqn,)
