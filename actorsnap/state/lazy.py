# SPDX-License-Identifier: Apache-2.0
"""Finds leaves that may be copied after the call returns, and detects changes to them.

Also installs the hooks that make an optimizer's step wait.

Only tensors that nothing but an optimizer's step changes are *lazy*: parameters that require
gradients, of modules in the app state, and the state of its optimizers. Leaves are matched by
memory, so any view counts. Others are *eager*.

Version counters, which views share, show in-place operations. Fused optimizers and DTensors do not
move the parameter's, but most move or create a step counter, so a parameter is watched with its
state. Tensors of optimizers that move no counter (``_uncounted_in``) are eager, unless an earlier
save guarded the optimizer. Addresses are compared, too: no counter shows a moved storage
(``share_memory_()``, ``resize_()``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain
from typing import Any, TypeAlias

import numpy as np
import torch

from actorsnap.errors import UsageError
from actorsnap.log import Log
from actorsnap.planning.lazy_order import set_aside
from actorsnap.planning.packing import Piece
from actorsnap.state.optim import parts_of, submodules_of
from actorsnap.state.sharing import Extents, Region, memory_of, touched_without_gaps
from actorsnap.state.sources import Gathering, HostMemory, Leaf, gather
from actorsnap.state.tensors import (
    PLAIN_TYPES,
    QUANTIZED,
    DeviceSource,
    FlatDeviceSource,
    StridedMemory,
    address_of,
)

_log = Log(__name__)

_MAX_ASIDE_BYTES = 8 << 20
"""Maximum bytes of eager leaves copied in the caller's thread. It then does not wait for whole
chunks because of statistics, counters and random generators."""


_WITH_TENSORS = (torch.Tensor, Mapping, list, tuple)

_States: TypeAlias = Mapping[torch.Tensor, Any]
"""``optimizer.state``."""


@dataclass(eq=False)
class LazyState:
    """The leaves that only optimizers' steps change. Keeps tensors alive.

    Attributes:
        eager: Numbers of the leaves that the caller waits for.
        must_wait: Optimizers with lazy leaves that no counter covers. Guard them before they step.
    """

    eager: frozenset[int]
    must_wait: Sequence[torch.optim.Optimizer]
    _extents: _ByDevice
    # By id of a tensor.
    _leaves_of: Mapping[int, Sequence[int]]
    # By leaf: its memory, and numbers of the tensors whose counters show its changes.
    _places: Mapping[int, Sequence[_Place]]
    _watched: Mapping[int, Sequence[int]]
    _tensors: Sequence[torch.Tensor]
    _versions: Sequence[int]
    _stateless: Mapping[int, Sequence[_States]]

    def touched_by(self, optimizer: Any) -> list[int]:
        """Returns the leaves that a step changes, in its order."""
        tensors = list(tensors_of(optimizer))
        leaves_of = self._leaves_of
        found = [leaves_of.get(id(tensor), ()) for tensor in tensors]
        if not all(found):  # not in the app state, but may share its memory
            others = [number for number, leaves in enumerate(found) if not leaves]
            extents = _extents_of([(number, tensors[number]) for number in others])
            for number, leaves in _Memory(self._extents).meeting(extents).items():
                found[number] = leaves
        return list(dict.fromkeys(chain.from_iterable(found)))

    def changed(self, leaves: Iterable[int]) -> int | None:
        """Returns a leaf that changed or lost its memory since the capture, or None."""
        for leaf in leaves:
            if any([address_of(owner) != start for owner, start in self._places.get(leaf, ())]):
                return leaf
            for number in self._watched.get(leaf, ()):
                tensor = self._tensors[number]
                if _version(tensor) != self._versions[number] or any(
                    [_has_state(states, tensor) for states in self._stateless.get(number, ())]
                ):
                    return leaf
        return None

    def release(self) -> None:
        """Drops all tensors. No leaf counts as touched or changed afterwards."""
        self._tensors, self._watched, self._places = (), {}, {}
        self._stateless = {}
        self._leaves_of, self._extents = {}, {}
        self.must_wait = ()


def find_lazy(
    app_state: Mapping[str, Any],
    leaves: Sequence[Leaf],
    *,
    is_guarded: Callable[[torch.optim.Optimizer], bool] = lambda optimizer: False,
) -> LazyState:
    """Finds the lazy leaves, and replaces small eager ones' sources by copies.

    Args:
        app_state: The captured app state.
        leaves: In order.
        is_guarded: Whether the steps of an optimizer can be made to wait.
    """
    parts = [parts_of(value) for value in app_state.values()]
    modules = [module for module, _ in parts if module is not None]
    optimizers = [optimizer for _, held in parts for optimizer in held]
    tensors, watched_with, stateless, others = _steady_tensors(modules, optimizers)
    must_wait = []
    for optimizer in optimizers:
        if uncounted := _uncounted_in(optimizer):
            if is_guarded(optimizer):
                must_wait.append(optimizer)
            else:
                others += uncounted
                _warn_of_uncounted(type(optimizer).__qualname__)
    extents = _extents_of_leaves(leaves)
    whole: dict[int, tuple[int, int]] = {}
    steady = _Memory(_extents_of(enumerate(tensors), whole)).meeting(extents)
    unsteady = _Memory(_extents_of(enumerate(others))).meeting(extents) if others else {}
    watched: dict[int, Sequence[int]] = {}
    places: dict[int, Sequence[_Place]] = {}
    eager: list[int] = []
    for number, leaf in enumerate(leaves):
        found = steady.get(number)
        source: Any = leaf.source
        if (
            found
            and number not in unsteady
            and (
                # Nearly all are the memory of a parameter.
                (
                    type(source) is HostMemory
                    and whole.get(found[0]) == (source.address, source.nbytes)
                )
                or _covers(tensors, found, leaf)
            )
        ):
            watched[number] = (
                watched_with[found[0]]
                if len(found) == 1
                else list(dict.fromkeys([n for each in found for n in watched_with[each]]))
            )
            places[number] = _places_of(source)
        elif leaf.item.nbytes:
            eager.append(number)
    aside = {eager[i] for i in set_aside([leaves[n].item.nbytes for n in eager], _MAX_ASIDE_BYTES)}
    if aside:
        _copy_aside([leaves[number] for number in sorted(aside)])
    leaves_of: dict[int, list[int]] = {}
    for number, members in steady.items():
        for member in members:
            leaves_of.setdefault(id(tensors[member]), []).append(number)
    return LazyState(
        eager=frozenset(eager) - aside,
        must_wait=must_wait,
        _extents=extents,
        _leaves_of=leaves_of,
        _places=places,
        _watched=watched,
        _tensors=tensors,
        _versions=[_version(tensor) for tensor in tensors],
        _stateless=stateless,
    )


def tensors_of(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yields what a step changes: parameters, each followed by its state."""
    # By id: the hash of a tensor is a call of Python code.
    states = {id(key): value for key, value in list(getattr(optimizer, "state", {}).items())}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            if isinstance(value := states.pop(id(parameter), None), _WITH_TENSORS):
                yield from _tensors_in(value)
    for value in states.values():
        if isinstance(value, _WITH_TENSORS):
            yield from _tensors_in(value)
    inner = getattr(optimizer, "optim", None)  # of a ZeroRedundancyOptimizer
    if hasattr(inner, "param_groups"):
        yield from tensors_of(inner)


def _steady_tensors(
    modules: Iterable[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[list[torch.Tensor], list[tuple[int, ...]], dict[int, list[_States]], list[torch.Tensor]]:
    """Sorts tensors by what may change them.

    Returns:
        Tensors that only steps change; for each, the tensors whose counters show that; for those
            without state, the states in which it will appear; and all others.
    """
    parameters: dict[int, torch.Tensor] = {}
    others: list[torch.Tensor] = []
    averaged = torch.optim.swa_utils.AveragedModel
    for part in submodules_of(modules):
        if isinstance(part, averaged):
            others += part.parameters()  # changed between steps
        if part._buffers:
            others += [buffer for buffer in part._buffers.values() if buffer is not None]
        for parameter in part._parameters.values():
            if parameter is None:
                continue
            if parameter.requires_grad:
                parameters[id(parameter)] = parameter
            else:
                others.append(parameter)  # changed outside of steps, if at all
    tensors = list(parameters.values())
    number_of = {key: number for number, key in enumerate(parameters)}
    watched_with: list[tuple[int, ...]] = [(number,) for number in range(len(tensors))]
    for optimizer in optimizers:
        for key, value in optimizer.state.items():
            if not isinstance(value, _WITH_TENSORS):
                continue
            first = len(tensors)
            tensors += _tensors_in(value)
            together = tuple(range(first, len(tensors)))
            watched_with += [together] * len(together)
            if id(key) in number_of:
                watched_with[number_of[id(key)]] += together
    stateless: dict[int, list[_States]] = {}
    for optimizer in optimizers:
        for parameter in [one for group in optimizer.param_groups for one in group["params"]]:
            number = number_of.get(id(parameter))
            if number is not None and not _has_state(optimizer.state, parameter):
                stateless.setdefault(number, []).append(optimizer.state)
    return tensors, watched_with, stateless, others


_COUNT_FUSED_STEPS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
"""Their fused steps move the counter of ``step`` in the state, or create the state."""


def _uncounted_in(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Returns tensors that a step changes without moving any counter.

    Candidates are fused steps of other classes than ``_COUNT_FUSED_STEPS``, and foreach SGD of
    DTensors.
    """
    found: list[torch.Tensor] = []
    defaults = getattr(optimizer, "defaults", {})
    for group in optimizer.param_groups:
        is_silent = group.get("fused", defaults.get("fused")) and not isinstance(
            optimizer, _COUNT_FUSED_STEPS
        )
        is_silent_if_distributed = (
            isinstance(optimizer, torch.optim.SGD) and group.get("foreach") is not False
        )
        for parameter in group["params"]:
            if is_silent or (is_silent_if_distributed and _local(parameter) is not parameter):
                found.append(parameter)
                if isinstance(state := optimizer.state.get(parameter), _WITH_TENSORS):
                    found += _tensors_in(state)
    return found


@cache
def _warn_of_uncounted(kind: str) -> None:
    _log.warning(
        'stage="lazy": the tensors that %s trains were copied before async_take returned. Its '
        "steps change no version counter, so actorsnap could not detect a step that comes too "
        "early. Call pending.guard(optimizer): later saves then copy them lazily, and guard it "
        "themselves",
        kind,
    )


def _has_state(states: _States, parameter: torch.Tensor) -> bool:
    """Reading can create an empty state."""
    state = states.get(parameter)
    return isinstance(state, _WITH_TENSORS) and next(_tensors_in(state), None) is not None


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    for item in value.values() if isinstance(value, Mapping) else value:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, _WITH_TENSORS):
            yield from _tensors_in(item)


def _version(tensor: torch.Tensor) -> int:
    """Returns a number that changes with the tensor, or a DTensor's local tensor."""
    try:
        if type(tensor) in PLAIN_TYPES:
            return tensor._version
        return tensor._version + _local(tensor)._version
    except RuntimeError:  # inference tensors
        return 0


_CPU = torch.device("cpu")
_ByDevice: TypeAlias = dict[torch.device, Extents]
_Place: TypeAlias = tuple[torch.Tensor, int]


def _places_of(source: Any) -> Sequence[_Place]:
    if type(source) is HostMemory and isinstance(source.owner, torch.Tensor):
        return ((source.owner, source.address),)  # nearly all
    return [(owner, address_of(owner)) for owner in _owners(source)]


def _owners(source: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors that own a leaf's memory; several for a group of views."""
    if isinstance(source.owner, torch.Tensor):
        yield source.owner
    elif isinstance(source.owner, list):
        for member in source.owner:
            yield from _owners(member)


def _extents_of(
    tensors: Iterable[tuple[int, torch.Tensor]],
    whole: dict[int, tuple[int, int]] | None = None,
) -> _ByDevice:
    """``whole`` gets address and size of the tensors without gaps, in C order."""
    found: _ByDevice = defaultdict(Extents)
    for number, tensor in tensors:
        if type(tensor) not in PLAIN_TYPES:
            tensor = _local(tensor)
        if tensor.layout is torch.strided and not tensor.is_nested:
            _add(found, number, tensor, whole)
    return found


def _extents_of_leaves(leaves: Sequence[Leaf]) -> _ByDevice:
    found: _ByDevice = defaultdict(Extents)
    cpu = found[_CPU]
    for number, leaf in enumerate(leaves):
        source: Any = leaf.source
        if isinstance(source.owner, np.ndarray):
            continue
        if isinstance(source, HostMemory):
            if source.nbytes:
                cpu.add(number, source.address, source.address + source.nbytes)
        else:
            _add(found, number, source.owner)
    return found


def _add(
    found: _ByDevice,
    number: int,
    tensor: torch.Tensor,
    whole: dict[int, tuple[int, int]] | None = None,
) -> None:
    start, nbytes = address_of(tensor), tensor.nbytes
    if not nbytes or not start or tensor.dtype in QUANTIZED:
        return
    extents = found[_CPU if tensor.is_cpu else tensor.device]
    if not tensor.is_contiguous():
        extents.add(number, start, memory_of(tensor).stop)
        return
    extents.add(number, start, start + nbytes)
    if whole is not None:
        whole[number] = (start, nbytes)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if type(tensor) in PLAIN_TYPES else getattr(tensor, "_local_tensor", tensor)


def _covers(tensors: Sequence[torch.Tensor], found: Sequence[int], leaf: Leaf) -> bool:
    """Whether every byte of the leaf certainly belongs to the tensors numbered ``found``."""
    source = leaf.source
    if isinstance(source, HostMemory):
        held = Region(source.address, 1, (source.nbytes,), (1,))
    else:
        assert isinstance(source, StridedMemory | FlatDeviceSource)
        held = memory_of(source.owner)
    regions = [memory_of(_local(tensors[number])) for number in found]
    return any([held.layout == region.layout for region in regions]) or touched_without_gaps(
        regions, held.start, held.stop
    )


class _Memory:
    def __init__(self, extents: _ByDevice) -> None:
        self._devices: dict[torch.device, tuple[Any, Any, list[int], list[int]]] = {}
        for device, found in extents.items():
            low, high = np.array(found.starts, np.uint64), np.array(found.stops, np.uint64)
            order = np.argsort(low, kind="stable")
            low, high = low[order], high[order]
            numbers = np.array(found.numbers, np.int64)[order].tolist()
            # The highest stop among members that begin no later.
            reach = np.maximum.accumulate(high)
            self._devices[device] = low, reach, high.tolist(), numbers

    def meeting(self, extents: _ByDevice) -> dict[int, list[int]]:
        """Returns the members that overlap each extent, in order of memory."""
        result: dict[int, list[int]] = {}
        for device, asked in extents.items():
            if device not in self._devices:
                continue
            low, reach, stops, numbers = self._devices[device]
            first = np.searchsorted(reach, np.array(asked.starts, np.uint64), "right").tolist()
            last = np.searchsorted(low, np.array(asked.stops, np.uint64), "left").tolist()
            for number, start, at, end in zip(
                asked.numbers, asked.starts, first, last, strict=True
            ):
                found = [numbers[at]] if end - at == 1 else []
                if end - at > 1:
                    found = [numbers[i] for i in range(at, end) if stops[i] > start]
                if found:
                    result[number] = found
        return result


def _copy_aside(leaves: Sequence[Leaf]) -> None:
    """Replaces sources by copies, on the same device."""
    others = [leaf for leaf in leaves if not _copy_on_device(leaf)]
    sizes = [leaf.item.nbytes for leaf in others]
    memory: Any = np.empty(sum(sizes), np.uint8)
    pieces = [Piece(number, 0, nbytes) for number, nbytes in enumerate(sizes)]
    sources = [leaf.source for leaf in others]
    gather([Gathering(sources, pieces, memoryview(memory), lambda pinner: None)])
    starts = accumulate(sizes, initial=int(memory.ctypes.data))
    for leaf, start, nbytes in zip(others, starts, sizes, strict=False):
        leaf.source = HostMemory(start, nbytes, memory)
    for lane in {leaf.source.copier for leaf in leaves if isinstance(leaf.source, _ON_DEVICES)}:
        lane.mark()


_ON_DEVICES = DeviceSource, FlatDeviceSource


def _copy_on_device(leaf: Leaf) -> bool:
    source = leaf.source
    if not isinstance(source, _ON_DEVICES):
        return False
    try:
        leaf.source = type(source)(source.copier.twin(source.owner), source.copier)
    except torch.OutOfMemoryError:
        return False  # the model fills the device
    return True


def check_optimizer(optimizer: Any) -> None:
    """Raises ``UsageError`` if it takes no step hooks."""
    is_bare = isinstance(optimizer, torch.optim.Optimizer) and not hasattr(
        optimizer, "_optimizer_step_pre_hooks"
    )  # a wrapper that has not initialised its base class
    if (
        is_bare
        or not callable(getattr(optimizer, "register_step_pre_hook", None))
        or not hasattr(optimizer, "param_groups")
    ):
        raise UsageError(
            f"guard takes torch.optim.Optimizers, not {type(optimizer).__qualname__}; guard "
            "the optimizer inside of it, or wait for staged() before its step"
        )


class StepHook:
    """Calls ``before`` before each step of an optimizer, until it returns True.

    Hooks must not be removed while torch iterates over them. So a post-step hook removes the
    pre-step hook, and the last one removes all post-step hooks.

    Args:
        optimizer: Passes ``check_optimizer``.
        before: Runs in the thread of the step. If it raises, so does the step, before any change.
    """

    def __init__(self, optimizer: Any, before: Callable[[], bool]) -> None:
        self._before: Callable[[], bool] | None = before
        self._post_handle: Any = None
        # Compiled steps call the hook uncompiled.
        hook = torch.compiler.disable(self._before_step)
        self._handle = optimizer.register_step_pre_hook(hook)

    def remove(self) -> None:
        """The optimizer must not step meanwhile."""
        self._before = None
        self._handle.remove()
        if self._post_handle is not None:
            self._post_handle.remove()

    def _before_step(self, optimizer: Any, args: object, kwargs: object) -> None:
        before = self._before
        if before is not None and before():
            self._before = before = None
        if before is None and self._post_handle is None:
            after = torch.compiler.disable(self._after_step)
            after.actorsnap_hook = self
            self._post_handle = optimizer.register_step_post_hook(after)

    def _after_step(self, optimizer: Any, args: object, kwargs: object) -> None:
        self._handle.remove()
        hooks = optimizer._optimizer_step_post_hooks
        if next(reversed(hooks), None) == self._post_handle.id:
            # The iteration ends here, so all can be removed.
            for after in list(hooks.values()):
                if (hook := getattr(after, "actorsnap_hook", None)) is not None:
                    hook._post_handle.remove()
