# SPDX-License-Identifier: Apache-2.0
"""Options of all calls, validated on construction, and the environment variables that set them.

Defines all defaults. No other module reads an ``ACTORSNAP_*`` variable.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from actorsnap.errors import UsageError
from actorsnap.format.compression import Codec
from actorsnap.tracebacks import short_traceback
from actorsnap.wording import did_you_mean

_MIB = 1 << 20
MIN_CHUNK_BYTES = 2 * _MIB
"""Smallest chunk, in bytes: two checksum blocks."""

MIN_LOST_AFTER_S = 0.5
"""Exclusive lower bound of ``lost_after_s``, because a busy machine may delay a thread."""

_MAX_TIMEOUT_S = 24 * 3600


_TRACE_FIELDS = {"rank": 0, "op": "save", "name": "step-1"}
"""Fields in braces that ``Options.trace`` may contain, with examples of their values."""

_CHOICES = {
    "offload": ("auto", "thread", "process"),
    "at_exit": ("wait", "abort"),
    "read_mode": ("auto", "direct", "shared"),  # planning.shared_reads.ReadMode
    "otel": ("auto", "on", "off"),
}

_ARGUMENTS = (
    *("group", "metadata", "overwrite", "progress", "replicated", "resume", "stage", "step"),
    *("storage_options", "store"),
)
"""Arguments of a save, which are no fields of ``Options``."""

_PREFIX = "ACTORSNAP_"
_MAY_BLOCK = "ALLOW_IN_RUNNING_LOOP"


class _CheckedMeta(msgspec.StructMeta):
    """Rejects unknown keyword arguments, and suggests similar ones."""

    if not TYPE_CHECKING:  # type checkers take the signature from the fields

        @short_traceback
        def __call__(cls, *args, **kwargs):
            if args:
                raise TypeError(f"name the fields: {cls.__name__}(name=value)") from None
            names = cls.__struct_fields__
            for name in kwargs:
                if name in _ARGUMENTS:
                    raise UsageError(
                        f"{name} is no field of {cls.__name__}, but an argument of the call, as in "
                        f"Snapshot.async_take(..., {name}=...)"
                    )
                if name not in names:
                    hint = did_you_mean(name, names) or f"it has: {', '.join(names)}"
                    raise UsageError(f"{cls.__name__} has no field {name!r}; {hint}")
            return super().__call__(*args, **kwargs)


class Options(msgspec.Struct, frozen=True, kw_only=True, metaclass=_CheckedMeta):
    """Configures how snapshots are saved and restored. Sizes are in bytes, times in seconds.

    Attributes:
        fsync: Wait until the data is on the disk before the commit. Use False only for scratch
            storage. The snapshot records this permanently. A save that replaces a snapshot taken
            with True always waits.
        verify: Verify the checksums of all data that is read.
        allow_pickle: Store and load objects that need pickle. Loading a pickle runs code chosen by
            its writer.
        allowed_types: Dataclasses, namedtuples and enums that a restore may create instances of.
            Saving them needs no option. A restore runs their constructors, and no other code that a
            snapshot names.
        allow_optimizer_change: Restore an optimizer from the state of another class. Its next step
            may fail if it cannot use the saved hyperparameters and state.
        timeout_s: Time limit of a call, at most a day. When it expires, a save, or a restore by
            several ranks, is aborted on all ranks; other reads and deletions raise
            ``StorageError``.
        lost_after_s: Silence after which a rank in a save or restore counts as lost. The call then
            fails on all other ranks.
        memory_budget_bytes: Limit on the memory for staging copies, at least 2 MiB. Each process
            has one budget: a new value applies to all its snapshots from then on. None keeps
            the current budget. The initial budget is 60 % of the memory that is free when the
            runtime starts, within the cgroup limits, and at most 64 GiB. The ranks that
            torchrun, Open MPI or Slurm starts on a machine have equal shares of it.
        chunk_bytes: Unit of staging and I/O, at least 2 MiB. Chunks are smaller if the budget is
            small. Reads over a network that need no staging memory use up to 64 MiB.
        num_uploaders: Largest number of chunks that are hashed and written, or fetched, at the same
            time. Over a network, transfers start with 8 and add more while that increases the
            speed. Local storages use at most 8.
        max_objects: Largest number of data objects that are written in parallel for each top-level
            key.
        min_object_bytes: Smallest size of a data object when a top-level key is split into several.
        read_mode: How ranks restore data that several of them need (all ranks, or the ranks with
            the same shards). ``"direct"``: each rank reads it. ``"shared"``: the ranks read each
            byte once and exchange it over gloo. ``"auto"``: shared if at least 8 ranks need the
            data, otherwise direct. Rank 0's value applies to all ranks.
        offload: What stores the copies that ``async_take`` made: a ``"thread"`` of this process, or
            a separate ``"process"``, which leaves the GIL to the trainer. ``"auto"`` uses a process
            for states of 64 MiB or more, if each rank of the machine has two cores, once the first
            such save or ``warm_up`` has started the process. Storages that only this process can
            open always use threads. Each rank decides separately, from its own part of the state.
        detach: Make a snapshot of ``async_take`` independent of this process once it is staged: it
            is committed even if this process is killed, and an exit does not wait for it. States of
            any size then use the uploader process; if none is available, an exit waits. All ranks
            must pass the same value. The commit needs the job's store, so the process that hosts
            the store waits when it exits.
        at_exit: When the interpreter exits, ``"wait"`` for pending snapshots, or ``"abort"`` them.
            The staged part of a detached snapshot continues in both cases.
        max_slowdown: Largest allowed slowdown of training steps while a snapshot of ``async_take``
            is stored: 0.02 is two percent. To meet this limit, the uploaders on this rank run more
            slowly, but at no less than a hundredth of their speed, and never so slowly that the
            save would need more than half of ``timeout_s``. Requires that the training steps are
            marked with ``actorsnap.step()``. None: no limit.
        compression: ``"zstd:1"`` (the same as ``"zstd"``) to ``"zstd:19"`` compresses the data
            chunk by chunk, on the threads that store it or in the uploader process. None: no
            compression. Rank 0's value applies to all ranks. Compressed data objects are not
            safetensors files. Saving and reading them needs the extra ``actorsnap[zstd]``.
        max_gap_bytes: Largest gap between two ranges that one request reads together.
        trace: File for a timeline of each save and restore, in Chrome's trace format. It is written
            when the call ends, even after a failure, and replaces an existing file. The fields
            ``{rank}``, ``{op}`` (save or restore) and ``{name}`` (the last part of the snapshot's
            path) are replaced. With several ranks, the rank is added to a name that lacks
            ``{rank}``.
        otel: Report saves and restores as OpenTelemetry spans and metrics: ``"on"``, ``"off"``, or
            ``"auto"``, which is on if the application has configured a provider.
    """

    fsync: bool = True
    verify: bool = True
    allow_pickle: bool = False
    allowed_types: Sequence[type[Any]] = ()
    allow_optimizer_change: bool = False
    timeout_s: float = 3600.0
    lost_after_s: float = 30.0
    memory_budget_bytes: int | None = None
    chunk_bytes: int = 16 * _MIB
    num_uploaders: int = 32
    max_objects: int = 4
    min_object_bytes: int = 64 * _MIB
    read_mode: str = "auto"
    offload: str = "auto"
    detach: bool = False
    max_slowdown: float | None = None
    at_exit: str = "wait"
    compression: str | None = None
    max_gap_bytes: int = 64 * 1024
    trace: str | None = None
    otel: str = "auto"

    def __post_init__(self) -> None:
        for name in ("fsync", "verify", "allow_pickle", "allow_optimizer_change", "detach"):
            if not isinstance(value := getattr(self, name), bool):
                raise UsageError(f"Options.{name} must be True or False, not {value!r}")
        self._check_types()
        self._check_seconds("timeout_s", 0.0)
        self._check_seconds("lost_after_s", MIN_LOST_AFTER_S)
        self._check("chunk_bytes", MIN_CHUNK_BYTES)
        self._check("num_uploaders", 1)
        self._check("max_objects", 1)
        self._check("min_object_bytes", 1)
        self._check("max_gap_bytes", 0)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                known = ", ".join(map(repr, choices))
                value = getattr(self, name)
                raise UsageError(f"Options.{name} must be one of {known}, not {value!r}")
        self._check_trace()
        if self.detach and self.offload == "thread":
            raise UsageError('Options.detach needs a process: offload="auto" or "process"')
        if self.max_slowdown is not None:
            value = self.max_slowdown
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0.0 < value <= 1.0:
                raise UsageError(
                    f"Options.max_slowdown must lie in (0, 1], not {value!r}: 0.02 lets steps take "
                    "2 % longer"
                )
        if self.compression is not None:
            Codec.parse(self.compression)
        if self.memory_budget_bytes is not None:
            self._check("memory_budget_bytes", MIN_CHUNK_BYTES)

    def _check_types(self) -> None:
        types = self.allowed_types
        if not isinstance(types, list | tuple):
            raise UsageError(f"Options.allowed_types must be a list of classes, not {types!r:.200}")
        seen: dict[tuple[str, str], type] = {}
        for kind in types:
            if not isinstance(kind, type) or not (
                issubclass(kind, Enum) or dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")
            ):
                raise UsageError(
                    f"Options.allowed_types has {kind!r:.200}, which is not a dataclass, "
                    "namedtuple or enum: pass the classes themselves"
                )
            name = kind.__module__, kind.__qualname__
            if seen.setdefault(name, kind) is not kind:
                raise UsageError(f"Options.allowed_types has two classes {'.'.join(name)}")

    def for_process(self) -> Options:
        """Returns the options for the uploader process, which does not rebuild objects."""
        return msgspec.structs.replace(self, trace=None, allowed_types=())

    def _check_trace(self) -> None:
        if self.trace is None:
            return
        if not isinstance(self.trace, str) or not self.trace:
            raise UsageError(f"Options.trace must be the path of a file, not {self.trace!r}")
        try:
            self.trace.format_map(_TRACE_FIELDS)
        except (ValueError, LookupError, AttributeError):
            fields = ", ".join(f"{{{name}}}" for name in _TRACE_FIELDS)
            raise UsageError(
                f"Options.trace={self.trace!r}: only {fields} are filled in; double a literal brace"
            ) from None

    def _check_seconds(self, name: str, above: float) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not above < value <= _MAX_TIMEOUT_S:
            raise UsageError(
                f"Options.{name} must lie in ({above:g}, {_MAX_TIMEOUT_S}], not {value!r}"
            )

    def _check(self, name: str, minimum: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise UsageError(
                f"Options.{name} must be an integer of at least {minimum}, not {value!r}"
            )


def chunk_within(chunk_bytes: int, budget_bytes: int) -> int:
    """Returns the largest chunk size up to ``chunk_bytes`` that fits into the budget."""
    if chunk_bytes <= budget_bytes:
        return chunk_bytes
    # Staging memory is allocated in powers of two.
    return max(MIN_CHUNK_BYTES, 1 << (budget_bytes.bit_length() - 1))


@cache
def _types_by_variable() -> Mapping[str, Any]:
    """Returns the type of each option by its variable's name.

    Cached: resolving the annotations takes longer than the rest of a ``Snapshot(url)``.
    """
    return {field.name.upper(): field.type for field in msgspec.structs.fields(Options)}


@short_traceback
def from_env(environ: Mapping[str, str] | None = None) -> Options:
    """Returns the options that ``ACTORSNAP_<NAME>`` variables set.

    Variables with this prefix that do not resemble an option are ignored.

    Raises:
        UsageError: A value is invalid, or a name is a misspelled option.
    """
    source = os.environ if environ is None else environ
    types = _types_by_variable()
    known = [*types, _MAY_BLOCK]
    values: dict[str, Any] = {}
    for variable, text in source.items():
        if not variable.startswith(_PREFIX):
            continue
        name = variable.removeprefix(_PREFIX).upper()
        if name == "ALLOWED_TYPES":
            raise UsageError(f"{variable}: classes can only be passed by the program")
        if name in types:
            values[name.lower()] = _convert(variable, text, types[name])
        elif name not in known:
            if hint := did_you_mean(name, known, cutoff=0.8, prefix=_PREFIX):
                raise UsageError(f"{variable} is unknown; {hint}")
    return Options(**values)


def may_block_running_loop(environ: Mapping[str, str] | None = None) -> bool:
    """Returns whether ``ACTORSNAP_ALLOW_IN_RUNNING_LOOP`` permits blocking a running event loop.

    Raises:
        UsageError: Its value is neither true nor false.
    """
    variable = _PREFIX + _MAY_BLOCK
    text = (os.environ if environ is None else environ).get(variable, "false")
    return bool(_convert(variable, text, bool))


def _convert(variable: str, text: str, to: Any) -> Any:
    try:
        return msgspec.convert(text, to, strict=False)
    except msgspec.ValidationError as error:
        why = "write true, false, 1 or 0" if to is bool else error
        raise UsageError(f"{variable}={text!r}: {why}") from None
