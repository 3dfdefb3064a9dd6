# SPDX-License-Identifier: Apache-2.0
"""torchsnapshot's ``Snapshot``: the same calls, which are those of ``actorsnap.sync``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed

from actorsnap import sync
from actorsnap.errors import IncompatibleState, NotASnapshot, UsageError
from actorsnap.format.manifest import Commit, RankManifest
from actorsnap.interop.formats.torchsnapshot_records import METADATA_KEY, Metadata, Record
from actorsnap.interop.torchsnapshot.entries import Named, name_entries
from actorsnap.interop.torchsnapshot.statefuls import generator_held
from actorsnap.log import Log
from actorsnap.options import Options
from actorsnap.runtime.reading import each_manifest
from actorsnap.runtime.script import run_sync
from actorsnap.state.stateful import Stateful
from actorsnap.tracebacks import short_traceback

logger = Log(__name__)

T = TypeVar("T")

_distributed: Any = torch.distributed


class Snapshot:
    """A saved app state. Creating a handle does no I/O.

    Args:
        path: See ``actorsnap.Snapshot``. It may be a folder that torchsnapshot wrote.
        pg: The ranks that restore together. None: the default group.
        storage_options, options: See ``actorsnap.Snapshot``; torchsnapshot has no ``options``.
    """

    def __init__(
        self,
        path: str,
        pg: Any = None,
        storage_options: dict[str, Any] | None = None,
        *,
        options: Options | None = None,
    ) -> None:
        self.path = path
        self.pg = pg
        self._storage_options = storage_options
        self._options = options
        self._inner: sync.Snapshot | None = None
        self._named: Named | None = None

    @classmethod
    @short_traceback
    def take(
        cls,
        path: str,
        app_state: dict[str, Any],
        pg: Any = None,
        replicated: list[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        _custom_tensor_prepare_func: Callable[..., Any] | None = None,
        *,
        options: Options | None = None,
    ) -> Snapshot:
        """Saves ``app_state``; on return the snapshot is durable and visible, on all ranks.

        Another snapshot at ``path`` is replaced, and stays valid until then. Rank 0's ``path``
        counts. Calls collectives of ``pg``, as torchsnapshot does, before any ``state_dict``.

        Args:
            replicated: Globs, in which ``*`` also matches ``/``. Those that all ranks pass count.

        Raises:
            TypeError: A value of ``app_state`` is no ``Stateful``.
            RuntimeError: There are several ``RNGState``.
            ActorSnapError: See ``actorsnap.Snapshot.take``.
        """
        path, globs = _prepare(path, app_state, pg, replicated, _custom_tensor_prepare_func)
        with generator_held(app_state) as held:
            sync.Snapshot.take(
                path,
                held,
                replicated=globs,
                overwrite=True,
                storage_options=storage_options,
                options=options,
                group=pg,
            )
        return cls(path, pg, storage_options, options=options)

    @classmethod
    @short_traceback
    def async_take(
        cls,
        path: str,
        app_state: dict[str, Any],
        pg: Any = None,
        replicated: list[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        _custom_tensor_prepare_func: Callable[..., Any] | None = None,
        *,
        options: Options | None = None,
    ) -> PendingSnapshot:
        """Like ``take``, but returns when everything is copied, and continues in the background.

        Raises: As ``take``; later failures are raised by ``PendingSnapshot.wait``.
        """
        path, globs = _prepare(path, app_state, pg, replicated, _custom_tensor_prepare_func)
        with generator_held(app_state) as held:
            pending = sync.Snapshot.async_take(
                path,
                held,
                replicated=globs,
                overwrite=True,
                storage_options=storage_options,
                options=options,
                group=pg,
            )
        return PendingSnapshot(pending, cls(path, pg, storage_options, options=options))

    @short_traceback
    def restore(self, app_state: dict[str, Any], strict: bool = True) -> None:
        """Reads the snapshot into ``app_state``, in place wherever a tensor fits.

        Args:
            strict: See ``actorsnap.Snapshot.restore``.

        Raises:
            TypeError: A value of ``app_state`` is no ``Stateful``.
            RuntimeError: There is no snapshot, or there are several ``RNGState``.
            ActorSnapError: See ``actorsnap.Snapshot.restore``.
        """
        _check_app_state(app_state)
        with _as_torchsnapshot(), generator_held(app_state) as held:
            self._snapshot.restore(held, strict=strict, group=self.pg)

    @property
    @short_traceback
    def metadata(self) -> Metadata:
        """``world_size``, ``version``, and ``manifest``: see ``get_manifest``. Read once."""
        return self._read_named().metadata

    @short_traceback
    def get_manifest(self) -> dict[str, Record]:
        """Returns the entries of all ranks by ``"<rank>/<path>"``, in torchsnapshot's terms.

        Leaves that torchsnapshot would pickle are of the type ``object`` here, too.

        Raises:
            RuntimeError: There is no snapshot.
        """
        return dict(self.metadata.manifest)

    @short_traceback
    def read_object(
        self, path: str, obj_out: Any = None, memory_budget_bytes: int | None = None
    ) -> Any:
        """Reads one leaf.

        Args:
            path: A key of ``get_manifest``; with any rank that may read it.
            obj_out: A tensor to read into. Ignored if its dtype or shape is another one, or if the
                leaf is not a tensor.
            memory_budget_bytes: At least 1 MiB is used.

        Returns:
            ``obj_out``, or the value.

        Raises:
            RuntimeError: No such path, or no snapshot.
            ActorSnapError: See ``actorsnap.Snapshot.read_object``.
        """
        rank, _, name = path.partition("/")
        ours = self._read_named().paths.get(name)
        if ours is None or not rank.isdecimal():
            raise RuntimeError(
                f'The supplied path "{path}" does not exist in the snapshot\'s manifest. '
                "Please verify the available paths within the snapshot via "
                "`snapshot.get_manifest()`."
            ) from None
        budget = None if memory_budget_bytes is None else max(1 << 20, memory_budget_bytes)
        place = f"{rank}/{ours}"
        with _as_torchsnapshot():
            if isinstance(obj_out, torch.Tensor) or hasattr(obj_out, "local_shards"):
                try:
                    return self._snapshot.read_object(place, obj_out, memory_budget_bytes=budget)
                except IncompatibleState as error:
                    logger.warning("obj_out is not used: %s", error)
            return self._snapshot.read_object(place, memory_budget_bytes=budget)

    @short_traceback
    def get_state_dict_for_key(self, key: str, replicate_from_rank0: bool = False) -> Any:
        """Returns the state dict that was saved under ``key``, as this rank may read it.

        Sharded tensors are whole. Not collective.

        Args:
            replicate_from_rank0: As rank 0 may read it.

        Raises:
            AssertionError: This rank may not read such a key.
            RuntimeError: There is no snapshot.
        """
        rank = 0 if replicate_from_rank0 else _rank(self.pg)
        named = self._read_named()
        ours = named.paths.get(key.replace("%", "%25").replace("/", "%2F"))
        try:
            if ours is None:
                raise UsageError(f"its keys are {', '.join(_top_level(named))}")
            with _as_torchsnapshot():
                return self._snapshot.read_object(f"{rank}/{ours}")
        except UsageError as error:
            raise AssertionError(
                f"{key} is absent in both manifest and flattened: {error}"
            ) from error

    @property
    def _snapshot(self) -> sync.Snapshot:
        if self._inner is None:
            self._inner = sync.Snapshot(
                self.path, storage_options=self._storage_options, options=self._options
            )
        return self._inner

    def _read_named(self) -> Named:
        if self._named is None:
            manifests: list[RankManifest] = []

            def take(_: Commit, manifest: RankManifest) -> None:
                del manifests[manifest.rank :]  # of a snapshot that was replaced
                manifests.append(manifest)

            with _as_torchsnapshot():
                run_sync(each_manifest(self._snapshot._source, take), name="Snapshot.metadata")
            self._named = name_entries(manifests)
        return self._named


class PendingSnapshot:
    """A save in progress."""

    def __init__(self, pending: sync.PendingSnapshot, snapshot: Snapshot) -> None:
        self._pending = pending
        self._snapshot = snapshot

    @property
    def path(self) -> str:
        return self._snapshot.path

    @property
    def pg(self) -> Any:
        return self._snapshot.pg

    def done(self) -> bool:
        """Returns whether the outcome is known."""
        return self._pending.done()

    @short_traceback
    def wait(self) -> Snapshot:
        """Waits for the outcome.

        Raises:
            RuntimeError: The save failed; the cause is chained.
        """
        try:
            self._pending.wait()
        except Exception as error:
            raise RuntimeError(
                f"Encountered exception while taking snapshot asynchronously:\n{error}"
            ) from error
        return self._snapshot


def _prepare(
    path: str,
    app_state: Mapping[str, Any],
    pg: Any,
    replicated: Sequence[str] | None,
    prepare_tensor: Callable[..., Any] | None,
) -> tuple[str, list[str]]:
    """Returns rank 0's path, and the globs that all ranks have, as ours."""
    if prepare_tensor is not None:
        raise UsageError(
            "_custom_tensor_prepare_func is not supported: torchsnapshot calls it and stores the "
            "tensor as it was. Convert the tensors in a state_dict of yours"
        )
    _check_app_state(app_state)
    globs = list(replicated or ())
    if _distributed.is_available() and _distributed.is_initialized():
        ranks: list[Any] = [None] * _distributed.get_world_size(pg)
        _distributed.all_gather_object(ranks, (path, globs), group=pg)
        if ranks[0][0] != path:
            logger.warning(
                "rank 0 saves to %r, and this rank with it, not to %r", ranks[0][0], path
            )
        path = ranks[0][0]
        everywhere = set(globs).intersection(*[given for _, given in ranks])
        globs = [glob for glob in dict.fromkeys(ranks[0][1]) if glob in everywhere]
    return path, [_our_glob(glob) for glob in globs]


def _our_glob(glob: str) -> str:
    """Raises UsageError if ours has no such pattern."""
    if re.search(r"[?\[]", glob):
        raise UsageError(f"replicated={glob!r}: of wildcards only * is supported")
    # Ours crosses a slash by "**", and "**/" also matches nothing.
    return re.sub(r"\*+(/?)", lambda match: "***/" if match[1] else "**", glob)


def _check_app_state(app_state: Mapping[str, Any]) -> None:
    for key, stateful in app_state.items():
        if not isinstance(stateful, Stateful):
            raise TypeError(
                f"Expected Stateful in app_state for key {key}, got {type(stateful)}."
            ) from None


def _rank(pg: Any) -> int:
    if _distributed.is_available() and _distributed.is_initialized():
        return int(_distributed.get_rank(pg))
    return 0


def _top_level(named: Named) -> list[str]:
    return sorted([name for name in named.paths if "/" not in name])


@contextmanager
def _as_torchsnapshot() -> Iterator[None]:
    """Raises what torchsnapshot raises where there is no snapshot."""
    try:
        yield
    except NotASnapshot as error:
        raise RuntimeError(
            f"Failed to read {METADATA_KEY}. Ensure path to snapshot is correct, otherwise "
            f"snapshot is likely incomplete or corrupted. {error}"
        ) from error
