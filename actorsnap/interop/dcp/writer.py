# SPDX-License-Identifier: Apache-2.0
"""A DCP ``StorageWriter`` that saves a snapshot.

DCP plans; each rank then turns its part of the plan into leaves, in ``write_data``, and saves them
with the others: one ordinary save, with the same outcome on all ranks. DCP does not inform a
``StorageWriter`` of failures on other ranks, so nothing is written outside of that save.
"""

from __future__ import annotations

import contextlib
import io
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from actorsnap.errors import ObjectExists, UsageError
from actorsnap.format.geometry import Box
from actorsnap.interop.dcp.catalog import containers_above, stored_path
from actorsnap.interop.dcp.stager import ActorsnapStager
from actorsnap.interop.formats.dcp_metadata import BYTES_IO, DcpMark
from actorsnap.options import Options
from actorsnap.runtime import taking
from actorsnap.runtime.host import Host, Script
from actorsnap.runtime.location import Location, make_location, open_location, resolve_options
from actorsnap.runtime.script import drive_sync
from actorsnap.state.capture import HeldLeaf, capture_leaves
from actorsnap.state.process_group import Group, global_rank, is_initialized, subgroup
from actorsnap.state.sources import Captured
from actorsnap.state.tree import join
from actorsnap.storage.registry import find_opener
from actorsnap.tracebacks import short_traceback

MARKER = ".metadata"
MARKER_TEXT = (
    "# actorsnap snapshot: read this folder with actorsnap.interop.dcp, not with a DCP reader.\n"
)


RAW = "actorsnap.raw"
"""Begins a pair with bytes that a planner made."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A rank's place in a save; sent to it by the coordinator, in its plan.

    A planner with a cache may return the plan of an earlier save, with its ticket. So places stay
    the same, but the nonce comes from the latest ticket.

    Attributes:
        ranks: Global ranks, in the order of the plans.
        nonce: Equal on all ranks. If a rank failed before ``write_data``, it distinguishes the next
            save from the one that the other ranks ended without this rank.
    """

    rank: int
    ranks: tuple[int, ...]
    nonce: str

    # DCP hands a plan, and its ticket, to the planner, which may drop both for an older one. So the
    # nonce is noted where the ticket arrives.
    def __reduce__(self) -> Any:
        return _receive, (self.rank, self.ranks, self.nonce)

    def __deepcopy__(self, memo: Any) -> Ticket:
        return self

    def latest_nonce(self) -> str:
        return _received.get(self.ranks, self.nonce)


def _receive(rank: int, ranks: tuple[int, ...], nonce: str) -> Ticket:
    _received[ranks] = nonce
    return Ticket(rank, ranks, nonce)


_received: dict[tuple[int, ...], str] = {}
"""The nonce of the ticket that came last, by its ranks."""


class ActorsnapWriter(ActorsnapStager, StorageWriter):
    """Saves snapshots for ``torch.distributed.checkpoint.save`` and ``async_save``.

    All ranks of DCP's call save together, as in ``Snapshot.take``: all commit or all fail, and an
    older snapshot at the path stays valid until the commit. It uses no collectives. The job's store
    may be a FileStore.

    Takes the arguments of ``FileSystemWriter``, in the same order. Those not listed here have no
    effect, except ``_extensions``: ``ZStandard`` sets ``Options.compression``, others are refused.

    Args:
        path: A folder or URL. None: DCP's calls pass ``checkpoint_id``.
        overwrite: Replace a snapshot at the path.
        storage_options, options: See ``Snapshot``.
        step, metadata: See ``Snapshot.take``.
        process_group: The ranks that save together with ``use_collectives=False``, because DCP does
            not pass them to a writer. None: the default group.
        marker: After the commit, write a file ``.metadata``, for programs that look for it.

    Attributes:
        save_id: After a save, the snapshot's attempt.

    Raises:
        UsageError: An argument is invalid.
    """

    @short_traceback
    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Any = None,
        serialization_format: Any = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        options: Options | None = None,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        process_group: Any = None,
        marker: bool = False,
    ) -> None:
        super().__init__()
        if path is not None:
            make_location(path, storage_options)
        if any(type(each) is not ZStandard for each in _extensions or ()):
            # It may encrypt: without it, plain text would be stored.
            raise UsageError(
                "actorsnap cannot pass its data through _extensions "
                f"({', '.join([type(each).__name__ for each in _extensions])}); it compresses with "
                "ZStandard, or Options(compression=...)"
            )
        resolved = resolve_options(options)
        if _extensions and resolved.compression is None:
            options = msgspec.structs.replace(resolved, compression="zstd")
        self.path = path
        self.overwrite = overwrite
        self.storage_options = storage_options
        self.options = options
        self.step = step
        self.metadata = dict(metadata or {})
        self.process_group = process_group
        self.marker = marker
        self.save_id = uuid.uuid4().hex
        self._rank: int | None = None
        self._uses_collectives = True

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        return self.path

    # DCP calls the following in this order. torch 2.9 resets twice in ``async_save``.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = checkpoint_id
        self.save_id = uuid.uuid4().hex

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return can_open(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.path, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        # DCP passes these if a parameter is named kwargs.
        self._rank = kwargs.get("rank")
        self._uses_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return replace(plan, storage_data=global_rank())

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        ranks, nonce = _ranks_of(plans), uuid.uuid4().hex
        _received[ranks] = nonce
        return [
            replace(plan, storage_data=Ticket(rank, ranks, nonce))
            for rank, plan in enumerate(plans)
        ]

    @short_traceback
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Saves the plans of all ranks. Returns when the snapshot is committed.

        Raises:
            ObjectExists, SnapshotAborted, UsageError: See ``Snapshot.take``. DCP raises a
                ``CheckpointException`` with these in ``failures``.
        """
        if self.path is None:
            raise UsageError("ActorsnapWriter has no path: pass it, or checkpoint_id=")
        ticket: Ticket = plan.storage_data
        sizes: dict[Any, int] = {}
        options = resolve_options(self.options)
        call = taking.TakeCall(
            path=self.path,
            app_state={},
            replicated=(),
            overwrite=self.overwrite,
            resume=False,
            step=self.step,
            metadata=self.metadata | DcpMark(flat=plan.planner_data is not None).metadata(),
            storage_options=self.storage_options,
            options=self.options,
            group=self._group(ticket),
            store=None,
            capture=partial(
                _capture,
                *(plan, planner, sizes),
                replicated=self._uses_collectives,
                allow_pickle=options.allow_pickle,
            ),
            # A rank may fail between the plan and this call.
            joins_promptly=True,
            nonce=ticket.latest_nonce() if self._uses_collectives else "",
        )
        with telling_overwrite(self.overwrite):
            self.save_id = drive_sync(_saved(call, in_process=options.offload == "process"))
        results = [
            WriteResult(item.index, sizes.get(item.index, 0), str(self.path)) for item in plan.items
        ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Completes the metadata that DCP returns. The snapshot is already committed."""
        metadata.storage_data = {
            result.index: result.storage_data for written in results for result in written
        }
        metadata.storage_meta = self.storage_meta()
        if self.marker and (self._uses_collectives or not self._rank):
            drive_sync(self.mark())

    def mark(self) -> Script[None]:
        """Writes the marker."""
        assert self.path is not None
        location = make_location(self.path, self.storage_options)
        yield lambda host: write_marker(host, location)

    def _group(self, ticket: Ticket) -> Any:
        """Returns the ``group`` of ``Snapshot.take``."""
        if not is_initialized():
            return Group.of_one()
        if not self._uses_collectives:
            # Every rank planned alone, so tickets know one rank.
            return self.process_group
        if len(ticket.ranks) == 1:
            return Group.of_one()
        return subgroup(ticket.rank, ticket.ranks)


@contextlib.contextmanager
def telling_overwrite(overwrite: bool) -> Iterator[None]:
    """Adds DCP's words to the error, for code that looks for them."""
    try:
        yield
    except ObjectExists as error:
        error.add_note(f"Checkpoint already exists and self.overwrite={overwrite}.")
        raise


def _saved(call: taking.TakeCall, *, in_process: bool) -> Script[str]:
    """Returns the attempt."""
    save = yield from taking.take(call, is_async=in_process)
    if in_process:  # only asynchronous saves are offloaded
        yield from taking.await_pending(save, save.finished)
    return save.attempt


async def write_marker(host: Host, location: Location) -> None:
    storage = await open_location(host, location, fsync=True)
    try:
        await storage.put(MARKER, [memoryview(MARKER_TEXT.encode())])
    finally:
        await storage.aclose()


def can_open(checkpoint_id: Any) -> bool:
    """Whether actorsnap has a storage for a path or URL."""
    try:
        find_opener(checkpoint_id)
    except UsageError:
        return False
    return True


_coordinated: dict[tuple[int, ...], None] = {}
"""The ranks of saves that this process coordinated, the latest last."""


def _ranks_of(plans: Sequence[SavePlan]) -> tuple[int, ...]:
    """Returns the global ranks of the plans.

    A planner with a cache returns empty plans for unchanged ones; their ranks are those of before.
    """
    told = [plan.storage_data if type(plan.storage_data) is int else None for plan in plans]
    if len(plans) == 1:
        return (global_rank(),)
    found = tuple([rank for rank in told if rank is not None])
    if len(found) < len(plans):
        for known in reversed(_coordinated):
            if len(known) == len(told) and all(
                mine in (None, theirs) for mine, theirs in zip(told, known, strict=True)
            ):
                found = known
                break
        else:
            if len(plans) != dist.get_world_size():
                raise UsageError(
                    "the planner drops SavePlan.storage_data, so the ranks of this process group "
                    "are unknown: keep it (dataclasses.replace), or save with all ranks"
                )
            found = tuple(range(len(plans)))
    _coordinated.pop(found, None)
    _coordinated[found] = None
    return found


def _capture(
    plan: SavePlan,
    planner: SavePlanner,
    sizes: dict[Any, int],
    ranks: Sequence[int],
    rank: int,
    *,
    replicated: bool,
    allow_pickle: bool,
) -> Captured:
    """Turns a plan into leaves; ``sizes`` gets their bytes."""
    known = plan.planner_data or {}
    if not isinstance(known, Mapping) or not all(type(path) is tuple for path in known.values()):
        raise UsageError(
            f"{type(planner).__name__} has planner_data of its own, which a snapshot cannot keep; "
            "it may have paths by name, as DefaultSavePlanner does, or None"
        )
    leaves: list[HeldLeaf] = []
    paths = []
    for item in plan.items:
        fqn = item.index.fqn
        path = stored_path(fqn, known.get(fqn))
        leaf = _leaf_of(item, join(*path), planner)
        if leaf is not None:
            paths.append(path)
            leaves.append(leaf)
            sizes[item.index] = getattr(leaf.value, "nbytes", 0)
    leaves.sort(key=lambda leaf: leaf.path.partition("/")[0])
    return capture_leaves(
        leaves, containers_above(paths), replicated=replicated, allow_pickle=allow_pickle
    )


def _leaf_of(item: WriteItem, path: str, planner: SavePlanner) -> HeldLeaf | None:
    """Returns None for an empty part of a tensor."""
    if item.type is WriteItemType.BYTE_IO:
        return HeldLeaf(path, _object_of(item, planner))
    data = item.tensor_data
    tensor = planner.resolve_data(item)
    if data is None or not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{item.index.fqn!r}: the planner resolved a tensor to {type(tensor)}")
    if isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad:
        tensor = tensor.detach()
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    shape = tuple(data.size)
    if tuple(tensor.shape) != box.sizes:
        raise UsageError(
            f"{item.index.fqn!r}: the planner planned the shape {box.sizes}, but resolved "
            f"{tuple(tensor.shape)}"
        )
    if 0 in shape:
        return HeldLeaf(path, tensor.new_empty(shape))
    if box.is_empty:
        return None
    if item.type is WriteItemType.TENSOR and box == Box.whole(shape):
        return HeldLeaf(path, tensor)
    return HeldLeaf(path, tensor, box, shape)


def _object_of(item: WriteItem, planner: SavePlanner) -> object:
    """Returns the object itself, not DCP's pickle of it."""
    kind: Any = type(planner)
    if (
        isinstance(planner, DefaultSavePlanner)
        and kind.resolve_data is DefaultSavePlanner.resolve_data
        and kind.transform_object is DefaultSavePlanner.transform_object
    ):
        value = planner.lookup_object(item.index)
    else:
        data = planner.resolve_data(item)
        try:
            value = torch.load(data, weights_only=True) if isinstance(data, io.BytesIO) else data
        except Exception:
            # The planner's own bytes, or a pickle of other objects: kept as they are.
            assert isinstance(data, io.BytesIO)
            return (RAW, data.getvalue())
    if type(value) is io.BytesIO:
        return (BYTES_IO, value.getvalue())
    return value
