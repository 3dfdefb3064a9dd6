# SPDX-License-Identifier: Apache-2.0
"""``torch.save`` and ``torch.load``, over snapshots.

    from actorsnap.interop.torch import load, save

replaces ``torch.save`` and ``torch.load``, for dicts, lists and tuples of tensors and plain values.
Each call concerns only its own process: even in a job of many ranks, it waits for no other rank.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from actorsnap import sync
from actorsnap.errors import UsageError, text_of
from actorsnap.interop.checkpoints import Held, read_whole
from actorsnap.interop.formats.describing import DEFAULT_KEY
from actorsnap.interop.formats.pickles import TorchMark, top_level
from actorsnap.options import Options
from actorsnap.state.process_group import Group
from actorsnap.tracebacks import short_traceback

__all__ = ["load", "save"]

MapLocation: TypeAlias = str | torch.device | Callable[[Any, str], Any] | None


@short_traceback
def save(
    obj: Any,
    f: str | os.PathLike[str],
    pickle_module: Any = None,
    pickle_protocol: int | None = None,
    _use_new_zipfile_serialization: bool = True,
    *,
    storage_options: Mapping[str, Any] | None = None,
    options: Options | None = None,
) -> None:
    """Saves ``obj`` as a snapshot. On return, the snapshot is durable and visible.

    Dicts below the top level are saved under their keys, as ``Snapshot.restore`` expects them.
    Everything else is under ``model``. A snapshot at ``f`` is replaced, and stays valid until the
    commit.

    Args:
        obj: A tensor, or plain containers of tensors and plain values
            (``docs/concepts/values.md``).
        f: A path or URL of a folder; see ``actorsnap.Snapshot``.
        pickle_module: Refused.
        pickle_protocol, _use_new_zipfile_serialization: Ignored.
        storage_options, options: See ``actorsnap.Snapshot``.

    Raises:
        UsageError: ``f`` is a file or a file object, or some values are neither tensors nor plain
            values. The error names all of them. Nothing was written.
        ActorSnapError: See ``actorsnap.Snapshot.take``.
    """
    _refuse_pickle_module(pickle_module)
    path = _check_path(f, "save")
    if os.path.isfile(path):
        raise UsageError(
            f"{path} is a file, and a snapshot is a folder: choose another path, or move the file "
            "away. If torch.save wrote it, actorsnap.interop.torch.load reads it where it is"
        )
    states = top_level(obj)
    sync.Snapshot.take(
        path,
        {key: Held(state) for key, state in states.items()},
        overwrite=True,
        metadata=TorchMark.of(obj, states).metadata(),
        storage_options=storage_options,
        options=options,
        group=Group.of_one(),
    )


@short_traceback
def load(
    f: str | os.PathLike[str],
    map_location: MapLocation = None,
    pickle_module: Any = None,
    *,
    weights_only: bool | None = None,
    mmap: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
    options: Options | None = None,
) -> Any:
    """Returns the object saved at ``f``, in new memory. Tensors that shared memory share it again.

    Args:
        f: A snapshot of ``save``, or a file of ``torch.save``. Any other snapshot is returned as a
            dict by key, as rank 0 sees it.
        map_location: A device. None: the CPU, because a snapshot does not record devices. A
            function gets each storage, on the CPU, and ``"cpu"``, and returns a storage, or None to
            keep the given one.
        pickle_module: Refused.
        weights_only: Always True. False is refused: ``Options(allow_pickle=True)`` reads pickles.
        mmap: Ignored.
        storage_options, options: See ``actorsnap.Snapshot``.

    Raises:
        UsageError: ``f`` is a file object, the device cannot be used, or an argument is refused.
        NotASnapshot: There is no checkpoint at ``f``.
        ActorSnapError: See ``actorsnap.Snapshot.restore``.
    """
    _refuse_pickle_module(pickle_module)
    if weights_only is False:
        raise UsageError(
            "weights_only=False would run code that the file contains, which is refused: leave the "
            "argument out. To read pickled values that you trust, pass "
            "options=actorsnap.Options(allow_pickle=True)"
        )
    mover = _mover(map_location)
    snapshot = sync.Snapshot(
        _check_path(f, "load"), storage_options=storage_options, options=options
    )
    mark = TorchMark.find(snapshot.metadata) or TorchMark()
    state: Any = read_whole(snapshot)
    if mark.whole:
        state = state[DEFAULT_KEY]
    else:
        ordered = [(key, state[key]) for key in mark.keys or state]
        state = OrderedDict(ordered) if mark.ordered else dict(ordered)
    return state if mover is None else mover.moved(state)


def _check_path(f: Any, name: str) -> str:
    """Raises UsageError for a file object."""
    if not isinstance(f, str | os.PathLike):
        raise UsageError(
            f"f must be a path or URL, not {type(f).__name__}: a snapshot is a folder. For a file "
            f"object call torch.{name}; for memory use memory://NAME"
        )
    return os.fspath(f)


def _refuse_pickle_module(module: Any) -> None:
    if module is not None:
        raise UsageError(
            "pickle_module has no use here: no value is pickled. Leave it out, or pass "
            "options=actorsnap.Options(allow_pickle=True) for objects that are not plain values"
        )


class _Mover:
    """Moves tensors; those that share a storage still do.

    Args:
        move: Returns the new storage for one on the CPU.
        device: Where sparse and quantized tensors go. None: they stay.
    """

    def __init__(self, move: Callable[[Any], Any], device: torch.device | None) -> None:
        self._move = move
        self._device = device
        self._moved: dict[int, Any] = {}
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # from, to

    def moved(self, value: Any) -> Any:
        """Changes containers in place where it can."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, dict):
            for key, item in value.items():
                value[key] = self.moved(item)
        elif type(value) is list:
            value[:] = map(self.moved, value)
        elif type(value) is tuple:
            return tuple(map(self.moved, value))
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = tensor, self._place(tensor)
        return self._tensors[id(tensor)][1]

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor if self._device is None else tensor.to(self._device)
        storage = tensor.untyped_storage()
        at = storage._cdata
        if at not in self._moved:
            self._moved[at] = storage, self._move(storage)  # keeps ``at`` unique
        to = self._moved[at][1]
        if to is storage:
            return tensor
        plain = torch.empty(0, dtype=tensor.dtype, device=to.device)
        plain.set_(to, tensor.storage_offset(), tensor.size(), tensor.stride())
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(plain, requires_grad=tensor.requires_grad)
            vars(made).update(vars(tensor))
            return made
        return plain.requires_grad_(tensor.requires_grad)


def _mover(map_location: MapLocation) -> _Mover | None:
    if map_location is None:
        return None
    if isinstance(map_location, str | torch.device):
        device = _usable(map_location)
        return None if device.type == "cpu" else _Mover(lambda s: _storage_on(s, device), device)
    if callable(map_location):
        function = map_location
        return _Mover(lambda storage: _chosen(function(storage, "cpu"), storage), None)
    raise UsageError(
        f"map_location must be a device or a function, not {type(map_location).__name__}: a "
        "snapshot does not name devices, so pass the one that you want"
    )


def _usable(name: str | torch.device) -> torch.device:
    """Raises UsageError for a device that this process cannot use, before anything is read."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except Exception as error:  # torch raises many kinds, also AssertionError
        why = (text_of(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"map_location={str(name)!r} is not a device that this process can use ({why:.200}): "
            'pass another one, or map_location="cpu"'
        ) from None
    return device


def _storage_on(storage: Any, device: torch.device) -> Any:
    bytes_there = torch.empty(0, dtype=torch.uint8).set_(storage).to(device)
    return bytes_there.untyped_storage()


def _chosen(result: Any, storage: Any) -> Any:
    if result is None:
        return storage
    return getattr(result, "_untyped_storage", result)  # of a TypedStorage
