# SPDX-License-Identifier: Apache-2.0
"""Unpickles a saved state without its data, and describes it: of ``torch.save``, and what uses it.

Tensors are on the meta device: no byte of data is read or allocated. ``torch_pickles`` reads the
pickle and calls nothing but what rebuilds tensors, plain values and numbers of numpy. Anything else
is refused by name when it is restored or read, unless the caller allows pickles.
"""

from __future__ import annotations

import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import Any

import msgspec
import torch

from actorsnap.errors import FormatError, UsageError, describe, text_of
from actorsnap.format.geometry import extent_bytes
from actorsnap.format.manifest import CompositeEntry, Entry, Stored, TensorEntry, ViewEntry
from actorsnap.interop.formats.checked_pickles import Omitted, Refusal, WholeModule
from actorsnap.interop.formats.describing import DEFAULT_KEY, Description
from actorsnap.interop.formats.numpy_pickles import real
from actorsnap.interop.formats.torch_pickles import TorchUnpickler, is_allowed, module_name
from actorsnap.state import objects
from actorsnap.state.composite import is_composite, take_apart
from actorsnap.state.tensors import DTYPE_NAMES, tensor_type
from actorsnap.state.tree import Container, flatten, part_path

TORCH_MARK = "torch"
"""The key of a ``TorchMark`` in the ``metadata`` of a commit object."""

_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class SavedStorage(msgspec.Struct, frozen=True, eq=False):
    """A storage that a pickle refers to: its name, and its number of bytes."""

    key: str
    nbytes: int


class Ghosts:
    """The storages of a pickle, as memory on the meta device.

    Attributes:
        file: Path of the file for ``torch.load``, for messages. Of an object store: its name alone.
            Empty: ``torch.load`` does not read it.
        refuses_each: An object that needs permission is refused alone, not the whole pickle.
        found: By key, in order of appearance.
    """

    def __init__(self, file: str = "", *, refuses_each: bool = False) -> None:
        self.file = file
        self.refuses_each = refuses_each
        self.found: dict[str, SavedStorage] = {}
        self._held: dict[str, Any] = {}
        self._by_memory: dict[int, SavedStorage] = {}

    def load(self, saved_id: Any) -> Any:
        """Is the ``persistent_load`` of an unpickler.

        Raises:
            pickle.UnpicklingError: It is not a storage.
        """
        match saved_id:
            case ("storage" | b"storage", storage_type, str() | bytes() as key, _, int() as numel):
                pass
            case (_, storage_type, str() | bytes() as key, _, int() as numel, None):  # old files
                pass
            case ("module", kind, _, _):  # old files; with the source of a module's class
                return kind
            case _:
                raise pickle.UnpicklingError("a reference in it is to no storage of torch")
        if storage_type is torch.UntypedStorage:
            dtype = torch.uint8
        elif isinstance(storage_type, torch.serialization.StorageType):
            dtype = storage_type.dtype
        else:
            raise pickle.UnpicklingError("the storage of a tensor is of no type of torch")
        key = key if isinstance(key, str) else key.decode("ascii")
        nbytes = numel * dtype.itemsize
        saved = self.found.get(key)
        if saved is None:
            saved = self.found[key] = SavedStorage(key, nbytes)
            memory = self._held[key] = torch.UntypedStorage(nbytes, device="meta")
            self._by_memory[memory._cdata] = saved
        elif saved.nbytes != nbytes:
            raise pickle.UnpicklingError(
                f"the storage {key[:80]!r} has {saved.nbytes} bytes, then {nbytes}"
            )
        return torch.storage.TypedStorage(wrap_storage=self._held[key], dtype=dtype, _internal=True)

    def of(self, tensor: torch.Tensor) -> SavedStorage | None:
        return self._by_memory.get(tensor.untyped_storage()._cdata)


class _AnyUnpickler(pickle.Unpickler):
    """Runs whatever the pickle says."""

    def find_class(self, module: str, name: str) -> Any:
        if "Storage" in name and module.startswith("torch") and name != "UntypedStorage":
            return torch.serialization.StorageType(name)
        return super().find_class(module, name)


def unpickle(file: BytesIO, ghosts: Ghosts, key: str, *, allow_pickle: bool) -> Any:
    """Returns the next object of ``file``; ``key`` is for messages.

    Raises:
        UsageError: It needs something that is not allowed, or not installed. Names it.
        FormatError: It is damaged.
    """
    unpickler: Any
    if allow_pickle:
        unpickler = _AnyUnpickler(file, encoding="utf-8")
        unpickler.persistent_load = ghosts.load
    else:
        unpickler = TorchUnpickler(file, ghosts.load, omits=ghosts.refuses_each)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of typed storages
            return unpickler.load()
    except WholeModule as error:
        raise _whole_module(error.module, key, ghosts.file, is_all=error.is_all) from None
    except Refusal as error:
        raise _not_executed(key, error) from None
    except NotImplementedError as error:
        raise UsageError(
            f"{key} has a tensor that cannot be read without loading it "
            f"({text_of(error).splitlines()[0]:.200}). Load the file with torch.load, and save "
            "with actorsnap what it returns"
        ) from error
    except (AttributeError, ImportError) as error:
        if not allow_pickle:
            raise _damaged(key, error) from error
        raise UsageError(
            f"{key} has an object whose class cannot be imported here ({text_of(error):.200}). "
            "Install its package, or run this where the file was made"
        ) from error
    except Exception as error:
        raise _damaged(key, error) from error


def _not_executed(place: str, refusal: Refusal) -> UsageError:
    name = refusal.name
    by_name = f"{name} by torch.serialization.add_safe_globals, or everything by "
    return UsageError(
        f"{place}: {text_of(refusal)}. Its pickle was not executed. If you trust the file, allow "
        f"{by_name if name else 'that by '}options=Options(allow_pickle=True)"
    )


def _whole_module(name: str, key: str, file: str, *, is_all: bool) -> UsageError:
    if not file:
        return UsageError(
            f"{key} is or holds a whole module ({name}). Save its state_dict() instead, in the "
            "program that has its class"
        )
    load = f"torch.load({file!r}, weights_only=False)"
    trust = "If you trust the file" if "/" in file else "If you trust the file, download it"
    if is_all:
        return UsageError(
            f"{key} holds a whole module ({name}), not a state dict. {trust}: "
            f"torch.save({load}.state_dict(), 'state.pt')"
        )
    return UsageError(
        f"{key} holds a whole module ({name}) among its values. {trust}, load it "
        f"with {load}, replace the module by its state_dict(), and save it again"
    )


def _damaged(key: str, error: Exception) -> FormatError:
    what = text_of(error) if isinstance(error, pickle.UnpicklingError) else describe(error)
    detail = f"its pickle is damaged, or was made to harm: {what:.300}"
    return FormatError(key=key, detail=f"{detail}. Copy the file again, or use another")


def top_level(state: Any) -> dict[str, Any]:
    """Returns a saved object by top-level keys (``docs/migrate/index.md``, "Where a state is")."""
    if (
        isinstance(state, dict)
        and all(isinstance(key, str) for key in state)
        and any(_is_section(key, value) for key, value in state.items())
    ):
        return dict(state)
    return {DEFAULT_KEY: state}


class TorchMark(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the top-level keys of a snapshot make the object that ``torch.save`` was called with.

    Attributes:
        v: Version of this mark.
        keys: In the order of the object.
        whole: The object is the state of the only key.
        ordered: It is an ``OrderedDict``.
    """

    v: int = 1
    keys: tuple[str, ...] = ()
    whole: bool = False
    ordered: bool = False

    @classmethod
    def of(cls, obj: Any, states: Mapping[str, Any]) -> TorchMark:
        """``states``: of ``top_level``."""
        whole = states.get(DEFAULT_KEY) is obj
        return cls(
            keys=tuple(states), whole=whole, ordered=not whole and isinstance(obj, OrderedDict)
        )

    @classmethod
    def find(cls, metadata: Mapping[str, Any]) -> TorchMark | None:
        """Returns the mark in the ``metadata`` of a commit object, if any."""
        try:
            mark = msgspec.convert(metadata.get(TORCH_MARK), cls)
        except msgspec.ValidationError:
            return None
        return mark if mark.v == 1 else None

    def metadata(self) -> dict[str, Any]:
        fields = msgspec.to_builtins(self)
        return {TORCH_MARK: {"v": self.v, **fields, "keys": list(self.keys)}}


def _is_section(key: str, value: object) -> bool:
    # A module's extra state may be a dict next to its tensors.
    return isinstance(value, dict) and not key.endswith("_extra_state")


class _Dense(msgspec.Struct, frozen=True, eq=False):
    """A dense tensor, or a part of a composite; ``start`` and ``stop`` are bytes of its storage."""

    path: str
    tensor: torch.Tensor
    storage: SavedStorage
    start: int
    stop: int

    def fills(self, start: int, stop: int) -> bool:
        """Whether its elements are these bytes, in order."""
        return (self.start, self.stop) == (start, stop) and self.tensor.is_contiguous()


class _TensorInside(Exception):
    """An object holds a tensor."""


class _PartsPickler(pickle.Pickler):
    """Raises ``Refusal`` or ``_TensorInside`` for a part of an object that cannot be read."""

    def reducer_override(self, part: Any) -> Any:
        if isinstance(part, Omitted):
            raise part.refusal
        if isinstance(part, torch.Tensor | torch.UntypedStorage | torch.TypedStorage):
            raise _TensorInside
        return NotImplemented


class StateDescriber:
    """Describes a saved state. Tensors that overlap share their bytes, as in ``docs/format.md``.

    Args:
        key: Name of the file, for messages.
        ghosts: Ghosts of the pickle.
        locate: Returns the place of bytes ``[start, stop)`` of a storage.
        replicated: Whether all ranks may read it.
    """

    def __init__(
        self,
        description: Description,
        key: str,
        ghosts: Ghosts,
        locate: Callable[[SavedStorage, int, int], Stored],
        *,
        allow_pickle: bool,
        replicated: bool = False,
    ) -> None:
        self._description = description
        self._key = key
        self._ghosts = ghosts
        self._locate = locate
        self._allow_pickle = allow_pickle
        self._replicated = replicated
        self._dense: dict[str, list[_Dense]] = {}

    def add(self, states: Mapping[str, Any]) -> None:
        """Adds states by path. Call it once.

        Raises:
            UsageError: A tensor cannot be read without loading the file. Names it.
            FormatError: A tensor is not in its storage.
        """
        leaves: list[tuple[str, object]] = []
        for root, state in states.items():
            for path, value in zip(*flatten(root, state), strict=True):
                if isinstance(value, torch.Tensor):
                    leaves += self._dense_of(path, value)
                else:
                    leaves.append((path, value))
        self._check_all_described(leaves)
        tensors = self._tensor_entries()
        for path, value in leaves:
            if isinstance(value, _Dense):
                self._description.entries += tensors[path]
            elif isinstance(value, CompositeEntry):
                self._description.entries.append(value)
            elif isinstance(value, Container):
                attributes = objects.encode_inline(value.metadata, path)
                self._description.container(path, value.type, attributes=attributes)
            else:
                try:
                    self._add_value(path, value)
                except UsageError as error:
                    if not self._ghosts.refuses_each:
                        raise
                    self._description.refused(path, error)

    def _add_value(self, path: str, value: object) -> None:
        """Raises ``UsageError`` if the object's class is not allowed, or it has a tensor."""
        allow = self._allow_pickle
        if isinstance(value, Omitted):
            raise self._not_executed(path, value.refusal)
        if not allow and is_allowed(type(value)):
            self._check_parts(path, value)
            allow = True
        try:
            self._description.value(
                path, real(value), allow_pickle=allow, replicated=self._replicated
            )
        except UsageError as error:
            inner = error.__cause__
            if isinstance(inner, objects.NotInline) and isinstance(inner.value, Omitted):
                raise self._not_executed(path, inner.value.refusal) from None
            raise

    def _check_parts(self, path: str, value: object) -> None:
        """Checks an object whose class the program allowed."""
        try:
            _PartsPickler(BytesIO(), protocol=5).dump(value)
        except Refusal as refusal:
            raise self._not_executed(path, refusal) from None
        except _TensorInside:
            raise self._tensors_inside(f"{path!r} ({type(value).__qualname__})") from None

    def _not_executed(self, path: str, refusal: Refusal) -> UsageError:
        return _not_executed(f"{self._key}, {path!r}", refusal)

    def _dense_of(self, path: str, tensor: torch.Tensor) -> list[tuple[str, object]]:
        """Returns a dense tensor; or a composite, and its parts."""
        if type(tensor) not in _TENSOR_TYPES:
            raise UsageError(
                f"{path!r} is a {type(tensor).__qualname__}, and only plain tensors are read from "
                "a pickle: load it with torch, and save the plain tensors that it consists of"
            )
        if not is_composite(tensor):
            return [(path, self._add_dense(path, tensor))]
        try:
            apart = take_apart(tensor)
        except Exception as error:
            apart = text_of(error)
        if isinstance(apart, str):
            raise UsageError(
                f"{path!r} cannot be read without loading it: {apart}. Load it with torch, and "
                "save what it consists of"
            )
        layout, parameters, parts = apart
        entry = CompositeEntry(
            path=path,
            layout=layout,
            dtype=DTYPE_NAMES[tensor.dtype],
            shape=tuple(tensor.shape),
            parts=tuple([name for name, _ in parts]),
            parameters={
                name: objects.encode_inline(value, path) for name, value in parameters.items()
            },
            type=tensor_type(tensor),
            requires_grad=tensor.requires_grad,
            replicated=self._replicated,
        )
        named = [(part_path(path, name), part) for name, part in parts]
        return [(path, entry), *[(part, self._add_dense(part, value)) for part, value in named]]

    def _add_dense(self, path: str, tensor: torch.Tensor) -> _Dense:
        saved = self._ghosts.of(tensor)
        if saved is None:
            if tensor.numel():
                raise UsageError(
                    f"{path!r} has no data in the file: it was on the meta device when it was "
                    "saved. Leave it out, or initialize the model before it is saved"
                )
            saved = SavedStorage("", 0)
        itemsize = tensor.dtype.itemsize
        start = int(tensor.storage_offset()) * itemsize if tensor.numel() else 0
        stop = start + extent_bytes(tuple(tensor.shape), tensor.stride(), itemsize)
        if stop > saved.nbytes:
            detail = f"damaged: the tensor ends at byte {stop} of the {saved.nbytes} of its storage"
            raise FormatError(key=path, detail=detail)
        dense = _Dense(path, tensor, saved, start, stop)
        self._dense.setdefault(saved.key, []).append(dense)
        return dense

    def _check_all_described(self, leaves: Sequence[tuple[str, object]]) -> None:
        """Refuses objects with tensors: they would be without data."""
        if not self._allow_pickle or self._ghosts.found.keys() <= self._dense.keys():
            return
        odd: list[str] = []
        for path, value in leaves:
            if isinstance(value, torch.nn.Module) and next(value.parameters(), None) is not None:
                is_all = path == DEFAULT_KEY
                raise _whole_module(
                    module_name(type(value)), self._key, self._ghosts.file, is_all=is_all
                )
            if not isinstance(value, _Dense | CompositeEntry | Container):
                try:
                    objects.encode_inline(value, path)
                except objects.NotInline as error:
                    odd.append(f"{path!r} ({error.kind})")
        raise self._tensors_inside(" or ".join(odd[:5]))

    def _tensors_inside(self, what: str) -> UsageError:
        return UsageError(
            f"{self._key}: there are tensors inside of {what}, which cannot be read without "
            "loading the file: load it with torch.load, and save these tensors in dicts or lists"
        )

    def _tensor_entries(self) -> dict[str, list[Entry]]:
        """Returns the entries of each dense tensor, by path."""
        entries: dict[str, list[Entry]] = {}
        for members in self._dense.values():
            cluster: list[_Dense] = []
            end = 0
            for member in sorted(members, key=lambda member: (member.start, -member.stop)):
                if cluster and member.start >= end:
                    self._add_cluster(cluster, entries)
                    cluster = []
                cluster.append(member)
                end = max(end, member.stop) if len(cluster) > 1 else member.stop
            self._add_cluster(cluster, entries)
        return entries

    def _add_cluster(self, cluster: list[_Dense], entries: dict[str, list[Entry]]) -> None:
        """Adds the entries of tensors with common bytes."""
        start, stop = cluster[0].start, max([member.stop for member in cluster])
        stored = self._locate(cluster[0].storage, start, stop)
        base = next((member for member in cluster if member.fills(start, stop)), None)
        if base is None:
            of = part_path(cluster[0].path, "storage")
            whole = TensorEntry(
                path=of,
                dtype="uint8",
                shape=(stop - start,),
                data=stored,
                replicated=self._replicated,
            )
            entries[cluster[0].path] = [whole]
        else:
            of = base.path
            entries[of] = [
                TensorEntry(
                    path=of,
                    dtype=DTYPE_NAMES[base.tensor.dtype],
                    shape=tuple(base.tensor.shape),
                    data=stored,
                    type=tensor_type(base.tensor),
                    requires_grad=base.tensor.requires_grad,
                    replicated=self._replicated,
                )
            ]
        for member in cluster:
            if member is not base:
                view = ViewEntry(
                    path=member.path,
                    of=of,
                    dtype=DTYPE_NAMES[member.tensor.dtype],
                    shape=tuple(member.tensor.shape),
                    strides=tuple(member.tensor.stride()),
                    offset=member.start - start,
                    type=tensor_type(member.tensor),
                    requires_grad=member.tensor.requires_grad,
                    replicated=self._replicated,
                )
                entries.setdefault(member.path, []).append(view)
