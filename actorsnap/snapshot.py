# SPDX-License-Identifier: Apache-2.0
"""The public calls for async code. ``actorsnap.sync`` has the same calls for ordinary scripts."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Collection, Generator, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, Self

from actorsnap.actors.trace import Progress
from actorsnap.format.layout import MAX_SHARD_BYTES
from actorsnap.format.manifest import Entry
from actorsnap.options import Options
from actorsnap.planning.renaming import Rename
from actorsnap.runtime import (
    copy,
    hugging_face,
    location,
    maintenance,
    outline,
    reading,
    recover,
    restore,
    taking,
    value_reading,
    verify,
)
from actorsnap.runtime.copy import CopyEvent, CopyReport
from actorsnap.runtime.exporting import ExportReport
from actorsnap.runtime.location import AppState
from actorsnap.runtime.outline import SnapshotTree
from actorsnap.runtime.recover import RecoverCall, RecoverReport
from actorsnap.runtime.restore import RestorePlan, RestoreReport
from actorsnap.runtime.save import Save
from actorsnap.runtime.script import async_call, run_async, watch_async
from actorsnap.runtime.source import Source
from actorsnap.runtime.taking import Guard
from actorsnap.runtime.verify import VerifyReport
from actorsnap.tracebacks import name_methods, short_traceback


@async_call
async def warm_up(nbytes: int, *, options: Options | None = None) -> None:
    """Prepares this rank for asynchronous saves of ``nbytes``, so that the first one is not slower.

    Allocates and touches memory, up to ``Options.memory_budget_bytes``, and starts the uploader
    process if ``Options.offload`` asks for it.

    Raises:
        UsageError: An argument is invalid.
        MemoryError: The memory could not be allocated.
    Cancellation: The memory touched so far is kept.

    Examples:
        >>> await warm_up(sum(p.nbytes for p in model.parameters()))
    """
    await run_async(taking.warm_up(nbytes, options))


class SnapshotHandle:
    """The part of ``Snapshot`` that the async and the blocking class share."""

    _tree_call = "call .tree()"

    @short_traceback
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        options: Options | None = None,
    ) -> None:
        self._source = source_of(path, storage_options, options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"

    def _repr_html_(self) -> str:
        """Shows in notebooks what earlier calls have read or saved. Reads nothing itself."""
        return outline.table_of(self._source, self._tree_call)

    @property
    def path(self) -> str:
        """The path or URL, without secrets."""
        return self._source.location.display_url

    @classmethod
    def _of(cls, save: Save) -> Self:
        return cls._at(save.source())

    @classmethod
    def _at(cls, source: Source) -> Self:
        snapshot = cls.__new__(cls)
        snapshot._source = source
        return snapshot


def source_of(
    path: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None,
    options: Options | None,
) -> Source:
    return Source(location.make_location(path, storage_options), location.resolve_options(options))


name_methods(SnapshotHandle, "Snapshot")


class Snapshot(SnapshotHandle):
    """A handle to the saved app state at a URL. Creating a handle does no I/O.

    A handle refers to its path, so each call reads the commit object again. If the snapshot is
    replaced while a call reads it, the call starts over, at most three times, and may then call
    ``state_dict()`` again. After that, or if the snapshot was deleted, it raises
    ``SnapshotReplaced``. ``Options.timeout_s`` limits the reads of each call. A call always waits
    for reads into tensors that the operating system has begun.

    Args:
        path: A local path, or the URL of a storage, such as ``s3://bucket/run``.
        storage_options: Options of the storage.
        options: None uses the defaults and the ``ACTORSNAP_*`` variables.

    Raises:
        UsageError: The path or an option is invalid.

    Examples:
        >>> snapshot = Snapshot("ckpt/step-1")
        >>> snapshot = Snapshot("ckpt/step-1", options=Options(timeout_s=3600))
    """

    _run = staticmethod(run_async)
    _tree_call = "await .tree()"

    @classmethod
    @async_call
    async def take(
        cls,
        path: str | os.PathLike[str],
        app_state: AppState,
        *,
        replicated: Sequence[str] = (),
        overwrite: bool = False,
        resume: bool = False,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        options: Options | None = None,
        group: Any = None,
        store: Any = None,
        progress: bool = False,
    ) -> Snapshot:
        """Saves ``app_state``. On return, the snapshot is durable and visible.

        Calls ``state_dict()`` of every stateful in this thread, in sorted key order. CPU tensors
        are written directly from their memory, so do not change them until this returns. If another
        task on the event loop trains, use ``async_take``. Device tensors and non-contiguous tensors
        are copied through a buffer of at most 48 MiB.

        With a torch.distributed process group, or under torchrun, all ranks must call this, in the
        same order as their other calls. Together they write one snapshot, and store shared data
        once. No collective is called, except by your own ``state_dict`` methods. All ranks return,
        or raise the same error, by ``Options.timeout_s``. ``path`` and ``step`` must be equal on
        all ranks. Rank 0's ``metadata``, ``overwrite``, ``resume`` and storage-related options
        apply.

        Files of other programs are not touched. After the commit, the garbage of older attempts is
        deleted, which delays the return by at most 5 seconds. If ``path`` had no snapshot, complete
        attempts are kept, with a warning, because they may be copies that lack their commit object.

        Args:
            path: A URL without a committed snapshot.
            app_state: Statefuls by key.
            replicated: Globs of paths whose values are equal on all ranks, such as ``"model/**"``.
                Pass the same globs on all ranks. Not needed for sharded tensors, nor for modules in
                DistributedDataParallel.
            overwrite: Replace a committed snapshot at ``path``. It stays valid until the commit. If
                several saves are pending, the one called last remains.
            resume: Send only data that an earlier, killed save to ``path`` has not stored. Works
                for any app state, if the storage can verify and copy data on the server
                (``s3://``, ``gs://``). Pass it only if no other job saves to ``path``: attempts of
                other hosts count as dead, and may fail if they are not.
            step: Training step of the state, returned by ``Snapshot.step``. The ranks compare it.
                Without it, a save that one rank skips is not detected if all saves have the same
                path.
            metadata: Any JSON object, returned by ``Snapshot.metadata``.
            storage_options: Options of the storage.
            options: None uses the defaults and the ``ACTORSNAP_*`` variables.
            group: The ``ProcessGroup`` whose ranks save together. None: the default group or, if
                none is initialized, the ranks that torchrun started.
            store: A c10d store (a TCPStore, or a PrefixStore of one) that all ranks can reach,
                instead of the group's own. Without a process group, the environment variables RANK
                and WORLD_SIZE must be set.
            progress: Show the progress on rank 0: as bars on a terminal and in a notebook,
                otherwise as a line on stderr every 10 seconds.

        Raises:
            UsageError: An argument is invalid, the ranks make different calls, or the local
                ``path`` is the root of a manager's run, or a link to a step. Nothing was written.
            ObjectExists: A snapshot is committed at ``path``, or was committed meanwhile.
            UnsupportedFormat: The call would overwrite a snapshot of a newer release.
            SnapshotAborted: The storage failed or time ran out. The cause is chained. Check its
                ``may_be_committed``.
        Cancellation: The attempt is aborted and its objects are deleted before this raises. If the
        commit was under way, the snapshot is complete instead.

        Examples:
            >>> app_state = {"model": model, "optimizer": optimizer, "progress": StateDict(epoch=0)}
            >>> snapshot = await Snapshot.take("ckpt/step-1", app_state, step=1)
        """
        call = taking.TakeCall(
            path=path,
            app_state=app_state,
            replicated=replicated,
            overwrite=overwrite,
            resume=resume,
            step=step,
            metadata=metadata,
            storage_options=storage_options,
            options=options,
            group=group,
            store=store,
            progress=progress,
        )
        save = await run_async(taking.take(call, is_async=False))
        return cls._of(save)

    @classmethod
    @async_call
    async def async_take(
        cls,
        path: str | os.PathLike[str],
        app_state: AppState,
        *,
        replicated: Sequence[str] = (),
        overwrite: bool = False,
        resume: bool = False,
        step: int | None = None,
        stage: Literal["eager", "lazy"] = "eager",
        metadata: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        options: Options | None = None,
        group: Any = None,
        store: Any = None,
        progress: bool = False,
    ) -> PendingSnapshot:
        """Copies ``app_state`` and returns. The copy is stored and committed in the background.

        You may overwrite the tensors after this returns. The copies need as much memory as the
        state, up to ``Options.memory_budget_bytes``. If the state is larger, this returns later:
        part of it must be stored first.

        With ``stage="lazy"``, this returns once it has copied everything that may change outside of
        an optimizer's step. The trainer must wait for the rest with ``PendingSnapshot.guard`` or
        ``PendingSnapshot.staged``. See ``docs/saving.md``.

        ``PendingSnapshot.wait`` raises failures that happen after the return.

        Args:
            path: A URL without a committed snapshot.
            app_state: Statefuls by key.
            replicated, overwrite, resume, step, metadata, storage_options, options, group, store:
                See ``take``.
            stage: ``"eager"`` copies everything before this returns. ``"lazy"`` defers the copies
                of some tensors: of an ``nn.Module`` in ``app_state``, the parameters that require
                gradients; of a ``torch.optim.Optimizer``, the state tensors; of a ``ModelState``,
                both. Parameters that a fused SGD trains are deferred only if that optimizer was
                guarded in an earlier save, because its steps cannot be detected.
            progress: See ``take``. Shown while this call, ``PendingSnapshot.staged`` or ``wait``
                waits.

        Raises:
            UsageError, ObjectExists, UnsupportedFormat, SnapshotAborted: See ``take``.
        Cancellation: See ``take``.

        Examples:
            >>> pending = await Snapshot.async_take("ckpt/step-2", app_state, step=2)
            >>> loss = model(batch).sum()  # training continues
            >>> snapshot = await pending.wait()
        """
        call = taking.TakeCall(
            path=path,
            app_state=app_state,
            replicated=replicated,
            overwrite=overwrite,
            resume=resume,
            step=step,
            stage=stage,
            metadata=metadata,
            storage_options=storage_options,
            options=options,
            group=group,
            store=store,
            progress=progress,
        )
        save = await run_async(taking.take(call, is_async=True))
        return PendingSnapshot(save)

    @async_call
    async def restore(
        self,
        app_state: AppState,
        *,
        strict: bool = True,
        keys: Collection[str] | None = None,
        rename: Rename | None = None,
        cast: bool = False,
        group: Any = None,
        store: Any = None,
        progress: bool = False,
    ) -> RestoreReport:
        """Reads the snapshot into ``app_state``, in place wherever a tensor fits.

        All ranks of a job must call this. Their number may differ from that of the save. The call
        ends in the same way on all ranks. Every rank calls ``state_dict()`` and
        ``load_state_dict()`` in sorted key order, and continues even if one of them raises, because
        these methods may be collective. If ``Options.read_mode`` allows it, data that several ranks
        need is read once and exchanged over separate connections.

        ``app_state`` may have fewer keys than the snapshot. Everything is compared before the first
        byte is read:

        - An ``nn.Module`` must match the snapshot leaf by leaf, in both directions. The module gets
          its extra state as saved. If leaves differ and the module has hooks or its own loading
          code, everything is read into fresh tensors and its ``load_state_dict`` decides. Sharded
          or replicated leaves may have moved to another rank (pipelines).
        - A ``ModelState`` is compared like its module, and the tensors of its optimizers must fit.
          Saved optimizer state is left out for parameters that have none now.
        - A ``StateDict`` takes over the structure of the snapshot. Dict keys that only the
          ``StateDict`` has are missing. A tensor with another dtype or shape is mismatched. Lists
          get the saved length.
        - Other statefuls get exactly the saved state. An optimizer, also in a ``ModelState``, must
          have the saved class or be your own subclass of it; your class may have moved to another
          module. ``Options.allow_optimizer_change`` permits any class.

        A leaf without a matching tensor, or with one on the meta device, is read into a fresh CPU
        tensor. A module or ``StateDict`` adopts it in place of the meta tensor. A fresh tensor has
        the saved memory format (channels last), and a fresh parameter has the saved plain
        attributes; attributes that a module on meta has set on its parameters take precedence. A
        read-only array is replaced by a writable one.

        If ranks saved parts of a tensor, a plain tensor receives the whole. A DTensor or
        ShardedTensor receives the part that this process holds, even if a plain tensor or another
        mesh was saved. It is never replaced, so its dtype and global shape must be the saved ones.
        An optimizer of such parameters must already have its state (``prime_optimizer``).

        Leaves that are neither sharded nor replicated are private to the rank that saved them. A
        rank that did not save gets the private leaves that all saving ranks saved with equal
        content. Its other private leaves are missing, and a line in ``mismatched`` explains this.
        Its ``RNGState`` leaves the generators unchanged (``RestoreReport.kept``), so seed them.

        If tensors share memory but were saved separately, only one keeps that memory: a module's
        tensor if there is one, otherwise the first. The others get new memory on the same device. A
        module's tensor that would need new memory is mismatched; with ``strict=False``, the memory
        then holds the value that the module loaded last.

        Args:
            app_state: Statefuls by key.
            strict: False restores the leaves that fit, leaves the rest unchanged, and reports them.
                If nothing fits, a warning is logged.
            keys: Keys of ``app_state`` to restore. None: all of them.
            rename: Changes the snapshot's paths (``"model/0.weight"``) before they are compared. A
                dict replaces the longest prefix that ends where a name ends: ``{"state_dict":
                "model"}`` moves a key, ``{"model/fc1": "model/encoder"}`` a layer, ``{"model/fc1":
                "encoder"}`` makes a layer a key, ``{"encoder/": "model/fc1."}`` a key a layer, and
                ``{"model/module.": "model/"}`` drops a wrapper's name. Write ``/`` after a key and
                ``.`` after a layer. A prefix that matches no path is an error. A str is a prefix to
                drop from the names below all keys: ``"_orig_mod."``. A function gets each path,
                also of containers, and returns the new path, or None to leave it out.
            cast: Convert between floating-point dtypes. A tensor of another dtype is first read
                into separate memory (for a DTensor, the part that this process holds), then copied.
            group, store, progress: See ``take``.

        Returns:
            A report of the leaves that were left out on this rank.

        Raises:
            UsageError: An argument is invalid, or the ranks make different calls.
            NotASnapshot: There is no committed snapshot. The error describes what the path has.
            IncompatibleState: With ``strict``, leaves are missing, unexpected or mismatched. The
                attributes list all of them, the message up to 20 of each kind. Nothing was changed,
                unless a module itself refused (``is_untouched``).
            Exception: Any error of a ``load_state_dict``, with a note that names its key and the
                keys loaded before it. With several ranks, it is the cause of a ``RestoreAborted``.
            RestoreAborted: Another rank failed with an error that this rank cannot raise, was
                silent for ``Options.lost_after_s``, or had not joined by ``Options.timeout_s``.
            FormatError, ChecksumMismatch: The snapshot is damaged. The error names the object.
                Tensors may be partly overwritten.
            StorageError: Reading failed. Tensors may be partly overwritten.
            MemoryError: A fresh tensor could not be allocated. The error names it. Nothing was
                changed.
        Cancellation: Tensors may be partly overwritten. In this and other such cases, a note of the
        error names their keys.

        Examples:
            >>> report = await Snapshot("ckpt/step-1").restore({"model": model})
            >>> report = await snapshot.restore({"model": model}, rename="module.", strict=False)
            >>> report.missing
        """
        return await self._run(
            restore.restore(
                self._source,
                restore.RestoreCall(
                    app_state=app_state,
                    strict=strict,
                    keys=keys,
                    rename=rename,
                    cast=cast,
                    group=group,
                    store=store,
                    progress=progress,
                ),
            )
        )

    @async_call
    async def plan_restore(
        self,
        app_state: AppState,
        *,
        strict: bool = True,
        keys: Collection[str] | None = None,
        rename: Rename | None = None,
        cast: bool = False,
        group: Any = None,
        store: Any = None,
        progress: bool = False,
    ) -> RestorePlan:
        """Reports what a ``restore`` would read and which leaves do not fit. Changes nothing.

        All ranks must call this.

        Args:
            app_state, keys, rename, cast, group, store: See ``restore``.
            strict, progress: Accepted so that the arguments of a ``restore`` can be passed. They
                change nothing: a plan reports leaves that do not fit and never raises for them.

        Raises:
            UsageError, NotASnapshot, FormatError, StorageError, MemoryError, RestoreAborted: See
                ``restore``.
            Exception: Any error of a ``state_dict``.

        Examples:
            >>> plan = await snapshot.plan_restore({"model": model})
            >>> print(plan.bytes_read, plan.mismatched)
        """
        return await self._run(
            restore.plan_restore(
                self._source,
                restore.RestoreCall(
                    app_state=app_state,
                    strict=strict,
                    keys=keys,
                    rename=rename,
                    cast=cast,
                    group=group,
                    store=store,
                    progress=progress,
                ),
            )
        )

    @async_call
    async def read_object(
        self, path: str, out: Any = None, *, memory_budget_bytes: int | None = None
    ) -> Any:
        """Reads one leaf, or everything below a path.

        Args:
            path: A path with a rank, such as ``"3/model/layer.weight"``, is read as rank 3 sees it;
                without a rank, as rank 0 does. A layer, such as ``"model/backbone"``, is read as a
                dict of the names below it, which the layer's ``load_state_dict`` takes. Sharded
                tensors are returned whole. Parts of a leaf (``sparse@indices``) and single shards
                cannot be read.
            out: A tensor or array to read into, of the same dtype and shape, on any device. A
                DTensor receives the part that this process holds.
            memory_budget_bytes: Limit on the memory that is allocated in addition to the result, at
                least 1 MiB. The process grows by at most this limit plus 4 MiB and the index, which
                is read once per ``Snapshot``. Two kinds of ``out`` exceed the limit: a sparse or
                quantized tensor or an array with negative strides is filled by a copy, and a view
                whose elements overlap or have odd addresses is read from its first byte to its
                last.

        Returns:
            ``out``, or the value. Tensors are fresh, on the CPU, in the saved memory format
                (channels last). Parameters have their plain attributes. A view has only its own
                bytes.

        Raises:
            UsageError: There is no such path. The error names similar paths, or the ranks that have
                it.
            IncompatibleState: ``out`` has another kind, dtype or shape.
            NotASnapshot, FormatError, StorageError: See ``restore``.

        Examples:
            >>> weight = await snapshot.read_object("model/weight")
            >>> await snapshot.read_object("model/weight", out=model.weight.data)
        """
        return await self._run(
            value_reading.read_object(
                self._source, path, out, memory_budget_bytes=memory_budget_bytes
            )
        )

    @async_call
    async def get_manifest(self, *, rank: int | None = None) -> dict[str, Entry]:
        """Returns every entry by ``"<rank>/<path>"``.

        An entry takes about 1 KB of memory, so those of thousands of ranks take gigabytes. If
        one rank stored several shards of a tensor, they are named ``"<rank>/<path>@<offsets>"``.

        Args:
            rank: Return only this rank's entries.

        Raises:
            UsageError: There is no such rank.
            NotASnapshot, FormatError, StorageError: See ``restore``.

        Examples:
            >>> entries = await snapshot.get_manifest()
            >>> entries["0/model/weight"].shape
        """
        return await self._run(reading.get_manifest(self._source, rank))

    @async_call
    async def get_state_dict_for_key(self, key: str) -> Any:
        """Returns rank 0's view of the state dict saved under ``key``, with fresh CPU tensors.

        Sharded tensors are returned whole.

        Args:
            key: A key of the app state.

        Raises:
            UsageError: There is no such key. The error names the existing keys, or the ranks that
                have it.
            NotASnapshot, FormatError, StorageError: See ``restore``.

        Examples:
            >>> state_dict = await snapshot.get_state_dict_for_key("model")
        """
        return await self._run(value_reading.get_state_dict_for_key(self._source, key))

    @async_call
    async def keys(self) -> list[str]:
        """Returns the sorted keys of the app state, of all ranks that saved.

        Raises:
            NotASnapshot, FormatError, StorageError: See ``restore``.

        Examples:
            >>> await snapshot.keys()
        """
        return await self._run(value_reading.find_keys(self._source))

    @async_call
    async def tree(self, *, depth: int | None = None, rank: int | None = None) -> SnapshotTree:
        """Draws the contents of the snapshot: names, shapes, dtypes and sizes.

        A list of values takes one line. Groups of similar leaves, as in an optimizer, and similar
        ranks are shown once, with their number. ``get_manifest`` returns everything.

        Args:
            depth: Levels to show. Deeper levels are summed up. None: all levels.
            rank: Show only this rank.

        Returns:
            A drawing for ``print`` and for notebooks.

        Raises:
            UsageError: An argument is invalid, or there is no such rank.
            NotASnapshot, FormatError, StorageError: See ``restore``.

        Examples:
            >>> print(await snapshot.tree(depth=2))
        """
        return await self._run(outline.draw(self._source, depth=depth, rank=rank))

    @async_call
    async def exists(self) -> bool:
        """Returns whether the path has a committed snapshot, or a checkpoint in another format that
        actorsnap reads. An unfinished save does not count.

        Raises:
            FormatError: The snapshot or checkpoint is damaged, or needs a newer release.
            StorageError: Reading failed, so the answer is unknown.

        Examples:
            >>> if await Snapshot("ckpt/step-1").exists():
            ...     await Snapshot("ckpt/step-1").restore(app_state)
        """
        return await self._run(reading.exists(self._source))

    @property
    @async_call
    async def metadata(self) -> dict[str, Any]:
        """Returns the ``metadata`` passed to ``take`` (``await snapshot.metadata``).

        Raises:
            NotASnapshot, FormatError, StorageError: See ``restore``.

        Examples:
            >>> metadata = await snapshot.metadata
        """
        commit = await self._run(reading.load_commit(self._source))
        return commit.metadata

    @property
    @async_call
    async def step(self) -> int | None:
        """Returns the ``step`` passed to ``take``, or None (``await snapshot.step``).

        Raises:
            NotASnapshot, FormatError, StorageError: See ``restore``.

        Examples:
            >>> step = await snapshot.step
        """
        commit = await self._run(reading.load_commit(self._source))
        return commit.step

    @property
    @async_call
    async def created(self) -> datetime:
        """Returns the time of the save, in UTC (``await snapshot.created``).

        For a checkpoint of another program, this is the time of its newest file.

        Raises:
            NotASnapshot, FormatError, StorageError: See ``restore``.

        Examples:
            >>> age = datetime.now(UTC) - await snapshot.created
        """
        commit = await self._run(reading.load_commit(self._source))
        return commit.created_at()

    @property
    @async_call
    async def world_size(self) -> int:
        """Returns the number of ranks that saved (``await snapshot.world_size``).

        Raises:
            NotASnapshot, FormatError, StorageError: See ``restore``.

        Examples:
            >>> world_size = await snapshot.world_size
        """
        commit = await self._run(reading.load_commit(self._source))
        return commit.world_size

    @property
    @async_call
    async def nbytes(self) -> int:
        """Returns the number of bytes that the snapshot uses in its storage.

        Includes the index; compressed data counts as stored. Lists the objects of the snapshot. Use
        it as ``await snapshot.nbytes``.

        Raises:
            NotASnapshot, FormatError, StorageError: See ``restore``.

        Examples:
            >>> print(f"{await snapshot.nbytes / 2**20:.1f} MiB")
        """
        return await self._run(reading.measure(self._source))

    @async_call
    async def verify(self, level: str = "quick") -> VerifyReport:
        """Checks that the snapshot is intact.

        Args:
            level: ``"quick"`` reads the index and checks the sizes of objects. ``"full"`` also
                compares every byte with its checksum, and reports entries that a restore would
                refuse. It needs memory for the largest long value, array, sparse tensor or
                quantized tensor. Pickled leaves are not unpickled.

        Raises:
            NotASnapshot, FormatError: There is no readable commit object. The report lists all
                other damage.
            UnsupportedFormat: The snapshot needs a newer release, or a package that is not
                installed.
            StorageError: Reading failed.

        Examples:
            >>> report = await snapshot.verify("full")
            >>> print(report.ok, report.problems)
        """
        return await self._run(verify.verify(self._source, level=level))

    @async_call
    async def copy_to(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        on_event: Callable[[CopyEvent], object] | None = None,
        progress: bool = False,
    ) -> CopyReport:
        """Copies the snapshot to another place, in any storage.

        The copy has the same objects, byte for byte, and is committed last. Every byte is compared
        with its checksum, and at most ``Options.memory_budget_bytes`` are in flight. Objects that
        an interrupted copy has completed are not sent again. The call does not disturb attempts
        that are running at ``path``, and deletes garbage there after the commit. If the same
        snapshot is already committed there, it does nothing. The handle's ``Options`` apply to
        reading and to writing. ``timeout_s`` limits the whole copy.

        Args:
            path: The destination, in any storage.
            overwrite: Replace another committed snapshot at ``path``. It stays valid until the
                commit.
            storage_options: Options of the storage of ``path``.
            on_event: Called for each step, on a worker thread, one call at a time. If it raises,
                the copy ends.
            progress: See ``take``.

        Raises:
            UsageError: The path or an option is invalid.
            ObjectExists: Another snapshot is committed at ``path``, or was committed meanwhile.
            UnsupportedFormat: The call would overwrite a snapshot of a newer release.
            NotASnapshot, FormatError, ChecksumMismatch: There is no snapshot to copy, or it is
                damaged. The error names the object. Nothing was committed.
            StorageError: Reading or writing failed, as the message describes, or another copy of
                the snapshot to ``path`` is under way. Nothing was committed, unless the storage did
                not answer the commit.
        Cancellation: Nothing is committed, or the copy is complete. The next copy reuses leftovers.

        Examples:
            >>> report = await snapshot.copy_to("backup/step-1")
            >>> print(report.copied_bytes)
        """
        to = location.make_location(path, storage_options)
        location.check_flag("overwrite", overwrite)
        return await self._run(
            copy.copy(self._source, to, overwrite=overwrite, on_event=on_event, progress=progress)
        )

    @async_call
    async def export_hf(
        self,
        path: str | os.PathLike[str],
        key: str | None = None,
        *,
        rename: Rename | None = None,
        dtype: Any = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        progress: bool = False,
    ) -> ExportReport:
        """Exports a model as safetensors files for Hugging Face's ``from_pretrained``.

        If the tensors have at most ``max_shard_bytes``, writes one file, ``model.safetensors``.
        Otherwise, writes several, such as ``model-00001-of-00003.safetensors``, and
        ``model.safetensors.index.json`` last. Add the configuration and the tokenizer yourself.
        Other files at ``path`` are not touched.

        Sharded tensors are joined. Stored bytes are copied within the storage if source and
        destination are in one file system, or are opened as one S3 server or one Google Cloud
        Storage. Such a copy is not compared with the checksums, unless the server reports its own
        (``docs/migrate/export.md``). All other bytes are read, compared, converted and sent, within
        ``Options.memory_budget_bytes``.

        If tensors share the same memory (tied weights), only the first name is written. Plain
        values and other leaves that are not tensors are left out, and reported.

        Args:
            path: A folder, in any storage.
            key: The model's key in the app state, or a path below it (``"train/model"``,
                ``"model/encoder"``). None: ``"model"``; the report then lists the other keys in
                ``left_out``.
            rename: See ``restore``. Applied before ``key`` is looked up.
            dtype: Floating-point dtype of 16 to 64 bits, such as ``torch.bfloat16`` or
                ``"bfloat16"``. Tensors of other such dtypes are converted to it.
            max_shard_bytes: Largest size of the tensors in one file. A larger tensor gets a file of
                its own.
            overwrite: Delete an older export at ``path`` first.
            storage_options: Options of the storage of ``path``.
            progress: See ``take``.

        Raises:
            UsageError: An argument is invalid, there is no such key, or safetensors cannot hold a
                leaf (a sparse or quantized tensor, a numpy array), which the error names. Nothing
                was written.
            ObjectExists: ``path`` has an export or a checkpoint, or a part of one.
            NotASnapshot, FormatError, ChecksumMismatch: There is no snapshot to export, or it is
                damaged. The error names the object.
            StorageError: Reading or writing failed, as the message describes.
        Cancellation: The written files are deleted, as after a failure. If the process dies, the
        files that stay do not load as a model, because the index, or the header of a single file,
        is written last.

        Examples:
            >>> report = await snapshot.export_hf("exported", "model")
            >>> print(report.files)
        """
        to = location.make_location(path, storage_options)
        call = hugging_face.ExportCall(
            key=key,
            rename=rename,
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
            overwrite=overwrite,
        )
        return await self._run(hugging_face.export_hf(self._source, to, call, progress=progress))

    @async_call
    async def recover(
        self,
        *,
        attempt: str | None = None,
        world_size: int | None = None,
        force: bool = False,
        replace_damaged: bool = False,
    ) -> RecoverReport:
        """Writes a lost or damaged commit object again, for example after a copy that left out
        hidden files.

        Before anything is written, all rank manifests are read, and every byte of data is compared
        with its checksum. Only ``created`` may differ: it becomes the start of the attempt. Whether
        the data survives a power loss depends on the program that copied the files. Call this in
        one process, while no job saves to the path.

        Args:
            attempt: Name of the attempt's folder, if several attempts are complete.
            world_size: Number of ranks that saved. Used only for snapshots of development
                versions that did not record it; their metadata is lost.
            force: Also recover an attempt that may still be saved or copied, by a running process
                of this host, or from another host within the last 24 hours.
            replace_damaged: Replace a damaged commit object, which may have named another attempt.

        Raises:
            UsageError: An argument is invalid. Or an argument is missing, because several attempts
                are complete, the world size is unknown, or the attempt may still be running. The
                error names the argument.
            ObjectExists: A snapshot is already committed.
            NotASnapshot: There is no attempt with a rank manifest.
            ChecksumMismatch, FormatError: Data is missing or damaged. The notes list further
                problems. Nothing was written.
            UnsupportedFormat: The snapshot needs a newer release, or a package that is not
                installed.
            StorageError: Reading or writing failed.
        Cancellation: Nothing is written, or the snapshot is recovered.

        Examples:
            >>> report = await Snapshot("copied/step-1").recover()
        """
        call = RecoverCall(
            attempt=attempt, world_size=world_size, force=force, replace_damaged=replace_damaged
        )
        return await self._run(recover.recover(self._source, call))

    @async_call
    async def delete(self) -> None:
        """Deletes the commit object, then the objects of all attempts.

        Raises:
            NotASnapshot: There is no snapshot; nothing was deleted.
            StorageError: Deleting failed; the remaining objects are garbage.
        Cancellation: The snapshot still exists, or its remaining objects are garbage.

        Examples:
            >>> await Snapshot("ckpt/step-1").delete()
        """
        await self._run(maintenance.delete(self._source))

    # Last: in the rest of the class body, ``list`` would no longer be the type.
    @classmethod
    @async_call
    async def list(
        cls,
        root: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        options: Options | None = None,
    ) -> Sequence[Snapshot]:
        """Returns the committed snapshots in a folder, one level deep, ordered by name.

        Numbers in names are compared by value: ``step-9`` comes before ``step-10``. Unfinished
        saves are left out. Damaged snapshots are left out, too, with a warning in the log. For
        snapshots that a ``CheckpointManager`` saved, ``manager.steps()`` returns more details.

        Args:
            root: The folder's path or URL.
            storage_options: Options of the storage, for the folder and the snapshots.
            options: Options for this call and the snapshots; see ``Snapshot``.

        Returns:
            Handles of the snapshots. Empty if there is no such folder.

        Raises:
            UsageError: The path or an option is invalid.
            StorageError: Reading failed.

        Examples:
            >>> for snapshot in await Snapshot.list("ckpt"):
            ...     print(snapshot.path, await snapshot.step, await snapshot.created)
        """
        source = source_of(root, storage_options, options)
        return [cls._at(found) for found in await run_async(maintenance.list_snapshots(source))]


class PendingHandle:
    """The part of ``PendingSnapshot`` that the async and the blocking class share."""

    def __init__(self, save: Save) -> None:
        self._save = save

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path!r}: {self._save.board.latest.phase}>"

    @property
    def path(self) -> str:
        """The path or URL, without secrets."""
        return self._save.url

    @short_traceback
    def guard(self, *optimizers: Any) -> Guard:
        """Makes each optimizer's next step wait until the tensors that it changes are copied.

        Needed for lazily staged saves; with others, a step never waits. The wait blocks the thread
        of the step before anything is changed. Tensors that a step waits for are copied first, the
        others in the order of the guarded optimizers. The hooks remove themselves after the first
        step that finds everything copied or the save ended. A failed save does not affect the step.

        Args:
            optimizers: ``torch.optim.Optimizer`` instances that train the saved tensors.

        Returns:
            A handle that can remove the hooks earlier.

        Raises:
            UsageError: An argument is not an optimizer, or this is a forked child.

        Examples:
            >>> guard = pending.guard(optimizer)
            >>> optimizer.step()  # waits if necessary
        """
        return taking.guard(self._save, optimizers)

    def done(self) -> bool:
        """Returns whether the save has ended: committed or failed.

        Examples:
            >>> pending.done()
        """
        return self._save.is_done()

    @short_traceback
    def cancel(self) -> None:
        """Requests an abort and returns at once.

        Unless the commit comes first, the written objects are deleted and ``wait`` raises
        ``SnapshotAborted``.

        Examples:
            >>> pending.cancel()
        """
        self._save.cancel("cancelled by the caller")


name_methods(PendingHandle, "PendingSnapshot")


class PendingSnapshot(PendingHandle):
    """A save in progress. Await ``wait()`` for the result, or poll ``done()``.

    If you drop the handle, the save continues and a failure is logged as an error. At interpreter
    exit, ``Options.at_exit`` applies.
    """

    _run = staticmethod(run_async)

    @async_call
    async def staged(self) -> None:
        """Waits until everything is copied and the trainer may overwrite its tensors.

        Raises:
            ActorSnapError: The save failed before that.
        Cancellation: The save continues.

        Examples:
            >>> await pending.staged()
        """
        await self._run(taking.await_staged(self._save))

    @async_call
    async def wait(self) -> Snapshot:
        """Waits for the commit, and returns the snapshot.

        Raises:
            ObjectExists, SnapshotAborted: See ``Snapshot.take``.
            StateChanged: A tensor was changed before lazy staging had copied it.
        Cancellation: The save continues.

        Examples:
            >>> snapshot = await pending.wait()
        """
        await self._run(taking.await_pending(self._save, self._save.finished))
        return Snapshot._of(self._save)

    def __await__(self) -> Generator[Any, Any, Snapshot]:
        return self.wait().__await__()

    def events(self) -> AsyncIterator[Progress]:
        """Yields the progress of the save, from its latest state to ``committed`` or ``aborted``.

        A slow reader skips states. Never raises the error of the save.

        Examples:
            >>> async for progress in pending.events():
            ...     print(progress.phase, progress.stored_bytes, progress.total_bytes)
        """
        return watch_async(self._save.watched())
