# SPDX-License-Identifier: Apache-2.0
"""Finds state that a training job forgets to save.

A trainer that is restored must go on exactly as one that was never interrupted. ``check_resume``
runs both and compares everything that it finds in the trainer's attributes, also what is not in
the app state: so forgotten state has a name.
"""

from __future__ import annotations

import fnmatch
import os
import random
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from actorsnap.errors import UsageError
from actorsnap.state.stateful import RNGState, Stateful
from actorsnap.sync import Snapshot
from actorsnap.tracebacks import short_traceback

_MAX_NAMED: Final = 4
"""Differences that a message names."""

_GENERATORS: Final = "random generators"
"""Path of the global generators."""


class Resumable(Protocol):
    """A trainer, as ``check_resume`` needs it. Other attributes are compared as well."""

    @property
    def app_state(self) -> Mapping[str, Any]:
        """Statefuls by key."""
        ...

    def step(self) -> Any:
        """Trains one step; returns what it used and computed: the batch, the loss."""
        ...


class _Value(NamedTuple):
    """A leaf, and its content for comparison."""

    text: str
    content: object


_ITERATOR: Final = _Value("an iterator", None)
"""Equal to anything: an iterator cannot be compared, and may not have been made yet."""

_ABSENT: Final = _Value("nothing", None)

_Values: TypeAlias = dict[str, _Value]


@short_traceback
def check_resume(
    make_trainer: Callable[[], Resumable],
    *,
    steps: int = 3,
    more: int = 3,
    ignore: Sequence[str] = (),
    path: str | os.PathLike[str] | None = None,
) -> None:
    """Fails unless a restored trainer continues bit for bit like one that was not interrupted.

    A trainer runs ``steps`` steps, is saved, and runs ``more`` steps. A second one is restored
    and compared with the first as it was saved. A third one is restored and runs ``more`` steps:
    each must return the same as in the first, and both trainers must be equal at the end.

    Compares the attributes of the trainers, recursively: objects with ``state_dict``, tensors,
    arrays, random generators, plain values, containers, and the attributes of other objects, except
    iterators, functions and modules. Global random generators are compared if the first steps draw
    from them. Choose ``steps`` and ``more`` so that an epoch ends in both.

    Args:
        make_trainer: Makes a new trainer, as a new process would.
        ignore: Globs of paths that may differ, for example ``["started_s"]``.
        path: Path of the snapshot, which stays. Required with several ranks, which all must call
            this. None: a temporary folder.

    Raises:
        AssertionError: The trainers differ. The message names the first difference, and since when.
        UsageError: An argument is invalid.
        ActorSnapError: See ``Snapshot.take`` and ``Snapshot.restore``.
    """
    for name, value in (("steps", steps), ("more", more)):
        if type(value) is not int or value < 1:
            raise UsageError(f"{name} must be an integer of at least 1, not {value!r}")
    if path is None:
        with tempfile.TemporaryDirectory(prefix="actorsnap-resume-") as folder:
            check_resume(
                make_trainer,
                steps=steps,
                more=more,
                ignore=ignore,
                path=os.path.join(folder, "snapshot"),
            )
            return

    first = make_trainer()
    unused = _values_of({}, ignore)
    for _ in range(steps):
        first.step()
    snapshot = Snapshot.take(path, dict(first.app_state))
    saved = _values_of(_everything_of(first), ignore)
    # A generator that was not drawn from need not be saved.
    unused = {key: value for key, value in unused.items() if saved.get(key) == value}
    saved = {key: value for key, value in saved.items() if key not in unused}
    returned = [_values_of({"step": first.step()}, ignore) for _ in range(more)]
    final = _values_of(_everything_of(first), ignore)

    # One of its own: to look may change a trainer. A data loader begins an epoch in state_dict().
    looked_at = make_trainer()
    snapshot.restore(dict(looked_at.app_state))
    found = _values_of(_everything_of(looked_at), ignore)
    _compare(saved, found, unused, "right after the restore", looked_at)
    second = make_trainer()
    snapshot.restore(dict(second.app_state))
    for number, expected in enumerate(returned, 1):
        result = _values_of({"step": second.step()}, ignore)
        _compare(expected, result, unused, f"at step {number} after the restore", second)
    found = _values_of(_everything_of(second), ignore)
    _compare(final, found, unused, f"{more} steps after the restore", second)


def _compare(
    expected: _Values, found: _Values, unused: _Values, when: str, trainer: Resumable
) -> None:
    paths = [
        path
        for path in {**expected, **found}
        if path not in unused
        and expected.get(path) != found.get(path)
        and _ITERATOR not in (expected.get(path), found.get(path))
    ]
    if not paths:
        return
    lines = [
        f"  {path}: {_difference(expected.get(path, _ABSENT), found.get(path, _ABSENT))}"
        for path in paths[:_MAX_NAMED]
    ]
    if len(paths) > _MAX_NAMED:
        lines.append(f"  and {len(paths) - _MAX_NAMED} more")
    raise AssertionError(
        f"the resumed trainer differs {when}, first at {paths[0]}:\n"
        + "\n".join(lines)
        + f"\n{_advice(paths, trainer)}"
    ) from None


def _difference(expected: _Value, found: _Value) -> str:
    if found.text == expected.text:
        return f"{found.text}, of other values"
    return f"{found.text}, not {expected.text}"


def _advice(paths: Sequence[str], trainer: Resumable) -> str:
    keys = ", ".join(map(repr, sorted(trainer.app_state)))
    path = paths[0]
    name = path.partition("/")[0]
    if name == "step" and any(each.startswith(_GENERATORS) for each in paths):
        name = _GENERATORS
    if name == _GENERATORS and any(isinstance(s, RNGState) for s in trainer.app_state.values()):
        return (
            "RNGState() is in the app state, so a restored trainer draws more or fewer numbers. A "
            "data loader draws one when it begins to iterate: let it begin in a load_state_dict, "
            "which comes before the generators'"
        )
    if name == _GENERATORS:
        return f"Put RNGState() into the app state, which has {keys}"
    if name == "step":
        return (
            "The attributes of the trainers were equal: what is lacking is not in one, but for "
            f"example in an iterator. The app state has {keys}"
        )
    if name == "app_state":
        key: str | None = path.split("/")[1]
    else:
        held = getattr(trainer, name, None)
        key = next((key for key, value in trainer.app_state.items() if value is held), None)
    if key is not None:
        return f"It is {key!r} of the app state: its state_dict or load_state_dict leaves this out"
    return (
        f"Put trainer.{name} into the app state, which has {keys}. If it may differ, pass "
        f"ignore=[{path!r}]"
    )


def _everything_of(trainer: Resumable) -> dict[str, Any]:
    own = {name: value for name, value in vars(trainer).items() if value is not trainer.app_state}
    # Last: most of it is under the name of an attribute.
    return {**own, "app_state": trainer.app_state}


def _values_of(things: Mapping[str, Any], ignore: Sequence[str]) -> _Values:
    """Returns all values by path, last those of the global generators, which stay as they are."""
    seen: dict[int, Any] = {}
    generators = RNGState().state_dict()
    try:
        values = [pair for name in things for pair in _walk(name, things[name], seen)]
    finally:
        RNGState().load_state_dict(generators)
    values.extend(_walk(_GENERATORS, generators, seen))
    return {
        path: value
        for path, value in values
        if not any(fnmatch.fnmatchcase(path, glob) for glob in ignore)
    }


def _walk(path: str, thing: Any, seen: dict[int, Any]) -> Iterator[tuple[str, _Value]]:
    """Yields paths and values. ``seen`` keeps objects alive, so that ids stay unique."""
    value = _leaf(thing)
    if value is not None:
        yield path, value
        return
    if id(thing) in seen or isinstance(thing, type | RNGState):
        return
    if callable(getattr(thing, "__next__", None)):
        yield path, _ITERATOR
        return
    seen[id(thing)] = thing
    parts: Mapping[Any, Any]
    if isinstance(thing, Stateful):
        parts = thing.state_dict()
    elif isinstance(thing, Mapping):
        parts = thing
    elif isinstance(thing, list | tuple | deque):
        parts = dict(enumerate(thing))
    elif isinstance(thing, set | frozenset):
        parts = dict(enumerate(sorted(thing, key=repr)))
    elif type(thing).__module__.partition(".")[0] not in _FOREIGN:
        parts = getattr(thing, "__dict__", {})
    else:
        parts = {}
    for key, part in parts.items():
        yield from _walk(f"{path}/{key}", part, seen)


_FOREIGN: Final = frozenset(
    {"builtins", "threading", "_thread", "logging", "io", "_io", "queue", "multiprocessing"}
    | {"concurrent", "asyncio", "socket", "ssl", "weakref", "types", "subprocess", "pathlib"}
)
"""Packages whose objects hold no training state."""


def _leaf(thing: Any) -> _Value | None:
    """Returns a value that can be compared; None for anything with parts."""
    if isinstance(thing, torch.Tensor):
        text = f"{str(thing.dtype).removeprefix('torch.')} tensor {tuple(thing.shape)}"
        if thing.is_meta:
            return _Value(text, text)
        local = thing.to_local() if hasattr(thing, "to_local") else thing
        dense = local if local.layout is torch.strided else local.to_dense()
        flat = dense.detach().cpu().contiguous().flatten()
        if flat.numel() == 1:
            text = f"{text} of {flat[0].item()!r}"
        return _Value(text, (text, flat.view(torch.uint8).numpy().tobytes()))
    if isinstance(thing, np.ndarray):
        text = f"{thing.dtype} array {thing.shape}"
        return _Value(text, (text, thing.tobytes()))
    if isinstance(thing, torch.Generator):
        return _Value("torch.Generator", thing.get_state().numpy().tobytes())
    if isinstance(thing, random.Random):
        return _Value("random.Random", thing.getstate())
    if isinstance(thing, np.random.Generator):
        return _Value("numpy.random.Generator", repr(thing.bit_generator.state))
    if isinstance(thing, np.random.RandomState):
        return _Value("numpy.random.RandomState", repr(thing.get_state(legacy=False)))
    if thing is None or isinstance(thing, bool | int | float | complex | str | bytes | np.generic):
        text = repr(thing)
        return _Value(text if len(text) < 60 else f"{text[:57]}...", (type(thing).__name__, text))
    if isinstance(thing, torch.dtype | torch.device | torch.Size):
        return _Value(repr(thing), repr(thing))
    return None
