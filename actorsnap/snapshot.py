# SPDX-License-Identifier: Apache-2.0
"""The public calls for async code; ``actorsnap.sync`` has the same for ordinary scripts."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Collection, Generator, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, Self

from actorsnap.actors.trace import Progress
from actorsnap.errors import name_methods
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


@async_call
async def warm_up(nbytes: int, *, options: Options | None = None) -> None:
    """Prepares this rank for asynchronous saves of ``nbytes``; else the first one is slower.

    Touches memory, up to ``Options.memory_budget_bytes``, and starts the uploader process if
    ``Options.offload`` asks for it.

    Raises:
        UsageError: Bad input.
        MemoryError: The memory could not be allocated.
    Cancellation: Touched memory is kept.

    Examples:
        >>> await warm_up(sum(p.nbytes for p in model.parameters()))
    """
    await run_async(taking.warm_up(nbytes, options))


class SnapshotHandle:
    """The part of ``Snapshot`` that both facades share."""

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
        """Shows in notebooks what earlier calls of this handle have read; reads nothing."""
        return outline.table_of(self._source)

    @property
    def path(self) -> str:
        """Without secrets."""
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
    """A saved app state at a URL. Creating a handle does no I/O.

    A handle refers to its path: each call reads the commit object again. If the snapshot is
    replaced during a call's reads, the call starts over, at most three times (it may call
    ``state_dict()`` again), and then raises ``SnapshotReplaced``, as for a deleted snapshot.
    ``Options.timeout_s`` bounds the reads of each call. Reads into tensors that the operating
    system has begun are always awaited.

    Args:
        path: A local path, ``fs://``, ``memory://`` or the URL of an installed backend.
        storage_options: Options for the backend.
        options: None uses the defaults and the ``ACTORSNAP_*`` variables.

    Raises:
        UsageError: A bad path or option.

    Examples:
        >>> snapshot = Snapshot("ckpt/step-1")
        >>> snapshot = Snapshot("ckpt/step-1", options=Options(timeout_s=3600))
    """

    _run = staticmethod(run_async)

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
        """Saves ``app_state``; on return the snapshot is durable and visible.

        Calls ``state_dict()`` on every stateful, in sorted key order, in this thread. CPU tensors
        are written directly from their memory: do not change them until this returns. If another
        task of the event loop trains, use ``async_take``. Device and non-contiguous tensors are
        copied through at most 48 MiB.

        With a torch.distributed process group, or under torchrun, all ranks call this together, in
        the same order as their other calls, and write one snapshot, shared data once. No collective
        is called, except by a ``state_dict`` of yours. All ranks return, or raise the same error,
        by ``Options.timeout_s``. ``path`` and ``step`` must be equal on all ranks; rank 0's
        ``metadata``, ``overwrite``, ``resume`` and storage-related options apply.

        Other programs' files are not touched. After the commit, garbage of older attempts is
        deleted, for at most 5 seconds of the call. If no snapshot was at ``path``, complete
        attempts are kept, with a warning: they may be copies without their commit object.

        Args:
            path: A URL without a committed snapshot.
            app_state: Statefuls by key.
            replicated: Globs, the same on all ranks, of paths with equal values, for example
                ``"model/**"``. Not needed for sharded tensors and modules in
                DistributedDataParallel.
            overwrite: Replace a committed snapshot at ``path``, which stays valid until the commit.
                Of several pending saves, the one called last remains.
            resume: Send only data that an earlier, dead save to ``path`` has not stored, if the
                storage can verify and copy it server-side (``s3://``, ``gs://``). You assert that
                no job still saves to ``path``: attempts of other hosts count as dead, and may fail
                if they are not. Any state may be saved.
            step: Training step of the state, returned by ``Snapshot.step``. Ranks compare it.
                Without it, a skipped save is not detected if all have one path.
            metadata: Any JSON object, returned by ``Snapshot.metadata``.
            storage_options: Options for the backend.
            options: None uses the defaults and the ``ACTORSNAP_*`` variables.
            group: The ``ProcessGroup`` whose ranks save together. None: the default group or, if
                none is initialised, the ranks that torchrun started.
            store: A c10d store (TCPStore, or a PrefixStore of it) that all ranks reach, used
                instead of the group's own. Without a process group, the environment variables RANK
                and WORLD_SIZE must be set.
            progress: Show on rank 0 how far the call is: bars on a terminal, else a log line every
                10 seconds. See ``docs/howto/observability.md``.

        Raises:
            UsageError: Bad input, or the ranks make different calls; nothing was written.
            ObjectExists: A snapshot is committed at ``path``, or was committed meanwhile.
            UnsupportedFormat: A newer release's snapshot would be overwritten.
            SnapshotAborted: Storage failed or time ran out; the cause is chained. Check its
                ``may_be_committed``.
        Cancellation: The attempt is aborted and its objects deleted before this raises, unless the
        commit was under way: then the snapshot is complete.

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
        """Copies ``app_state`` and returns; storing and committing continue in the background.

        The tensors may be overwritten after this returns. Copies take as much memory as the state,
        up to ``Options.memory_budget_bytes``; a larger state delays the return until the rest is
        stored.

        With ``stage="lazy"`` it returns once everything is copied that code other than an
        optimizer's step may change. The trainer must wait for the rest with
        ``PendingSnapshot.guard`` or ``PendingSnapshot.staged``. See ``docs/saving.md``.

        Failures after the return are raised by ``PendingSnapshot.wait``.

        Args:
            path: A URL without a committed snapshot.
            app_state: Statefuls by key.
            replicated, overwrite, resume, step, metadata, storage_options, options, group, store:
                See ``take``.
            stage: ``"eager"`` copies everything before this returns. ``"lazy"`` defers parameters
                that require gradients of an ``nn.Module`` in ``app_state``, the state tensors of a
                ``torch.optim.Optimizer``, and both for a ``ModelState``. Parameters that a fused
                SGD trains are deferred only if it was guarded in an earlier save: its steps cannot
                be noticed.
            progress: Shown while this call, ``PendingSnapshot.staged`` or ``wait`` waits.

        Raises:
            UsageError, ObjectExists, UnsupportedFormat, SnapshotAborted: See ``take``.
        Cancellation: See ``take``.

        Examples:
            >>> pending = await Snapshot.async_take("ckpt/step-2", app_state, step=2)
            >>> loss = model(batch).sum()  # the training goes on
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

        All ranks of a job, in any number, call it together; it ends in the same way on all.
        ``state_dict()`` and ``load_state_dict()``, which may be collective, are called in sorted
        key order on every rank, even after one raised. If ``Options.read_mode`` allows, data that
        several ranks want is read once and passed on, over separate connections.

        ``app_state`` may have fewer keys than the snapshot. Everything is compared before the first
        byte is read:

        - An ``nn.Module`` must match the snapshot leaf by leaf, in both directions. Its extra state
          is passed to it as saved. If leaves differ and the module has hooks or loading code of its
          own, everything is read into fresh tensors and its ``load_state_dict`` decides. Sharded or
          replicated leaves may belong to another rank now (pipelines).
        - A ``ModelState`` is compared like its module, and its optimizers' tensors must fit. Saved
          state of parameters that have no optimizer state now is left out.
        - A ``StateDict`` takes the structure of the snapshot. Its additional dict keys are missing;
          a tensor with another dtype or shape is mismatched. Lists get the saved length.
        - Other statefuls get exactly the saved state. The class of an optimizer, also in a
          ``ModelState``, must be the saved one, which may have moved to another module of yours, or
          your own subclass of it, unless ``Options.allow_optimizer_change``.

        A leaf without a matching tensor, or with one on the meta device, is read into a fresh CPU
        tensor; a module or ``StateDict`` adopts it in place of a meta tensor. A fresh tensor has
        the saved memory format (channels last) and a parameter's plain attributes; those that a
        module on meta has set on its parameters take precedence. A read-only array is replaced by a
        writable one.

        A plain tensor receives the whole of a tensor that ranks divided. A DTensor or ShardedTensor
        receives the part that this process holds, also from a plain tensor or another mesh. It is
        never replaced: its dtype and global shape must be the saved ones. An optimizer of such
        parameters must already have its state (``prime_optimizer``).

        Leaves that are neither sharded nor replicated are private to the rank that saved them. A
        rank that did not save gets those that all ranks saved with equal content; others are
        missing, explained in a line among the mismatched. Its ``RNGState`` leaves the generators
        unchanged (``RestoreReport.kept``): seed them.

        Of tensors that share memory but were saved as separate ones, a module's tensor keeps the
        memory, else the first; the others are replaced on the same device. A module's tensor that
        would be replaced is mismatched; with ``strict=False`` the memory then holds the value that
        the module loaded last.

        Args:
            app_state: Statefuls by key.
            strict: False restores leaves that fit, leaves the rest unchanged and reports it. If
                nothing fits, a warning is logged.
            keys: Keys of ``app_state`` to restore; None: all of them.
            rename: Changes the snapshot's paths (``"model/0.weight"``) before they are compared. A
                dict replaces the longest prefix that it has: ``{"state_dict": "model"}`` moves a
                key, ``{"model/module.": "model/"}`` drops a wrapper's name. A str is a prefix to
                drop from the names below all keys: ``"_orig_mod."``. A function gets each path,
                also those of containers, and returns the new one, or None to leave it out.
            cast: Convert between floating-point dtypes: a tensor of another one is read into
                memory of its own (of a DTensor, the part that this process holds), then copied.
            group, store, progress: See ``take``.

        Returns:
            The leaves that were left out on this rank.

        Raises:
            UsageError: Bad input, or the ranks make different calls.
            NotASnapshot: There is no committed snapshot; describes the contents of the path.
            IncompatibleState: With ``strict``: leaves are missing, unexpected or mismatched; names
                all. Nothing was changed, unless a module itself refused (``is_untouched``).
            Exception: Any error of a ``load_state_dict``, with a note that names its key and the
                keys loaded before. With many ranks it is the cause of a ``RestoreAborted``.
            RestoreAborted: Another rank failed with an error that this rank cannot raise, was not
                heard for ``Options.lost_after_s``, or had not joined by ``Options.timeout_s``.
            FormatError, ChecksumMismatch: The snapshot is damaged; names the object. Tensors may be
                partly overwritten.
            StorageError: Reading failed. Tensors may be partly overwritten.
            MemoryError: A fresh tensor could not be allocated; names it. Nothing was changed.
        Cancellation: Tensors may be partly overwritten.

        Examples:
            >>> report = await Snapshot("ckpt/step-1").restore({"model": model})
            >>> report = await snapshot.restore({"model": model}, rename="module.", strict=False)
            >>> report.missing
        """
        return await self._run(
            restore.restore(
                *(self._source, app_state),
                strict=strict,
                group=group,
                store=store,
                progress=progress,
                selection=restore.Selection(keys=keys, rename=rename, cast=cast),
            )
        )

    @async_call
    async def plan_restore(
        self,
        app_state: AppState,
        *,
        keys: Collection[str] | None = None,
        rename: Rename | None = None,
        cast: bool = False,
        group: Any = None,
        store: Any = None,
    ) -> RestorePlan:
        """Reports the reads of a ``restore`` and the leaves that do not fit; changes nothing.

        Called by all ranks together.

        Args:
            app_state, keys, rename, cast, group, store: See ``restore``.

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
                *(self._source, app_state),
                group=group,
                store=store,
                selection=restore.Selection(keys=keys, rename=rename, cast=cast),
            )
        )

    @async_call
    async def read_object(
        self, path: str, out: Any = None, *, memory_budget_bytes: int | None = None
    ) -> Any:
        """Reads one leaf, or everything below a path.

        Args:
            path: ``"3/model/layer.weight"`` as rank 3 sees it; without a rank, as rank 0 does.
                Sharded tensors are whole. Parts of a leaf (``sparse@indices``) and single shards
                cannot be read.
            out: A tensor or array of the same dtype and shape to read into, on any device. A
                DTensor receives the part that this process holds.
            memory_budget_bytes: Bound of the memory allocated in addition to the result, at least
                1 MiB.
                The process grows by at most this plus 4 MiB and the index, which is read once per
                ``Snapshot``. Not bounded with ``out``: a sparse or quantized tensor and an array
                with negative strides are filled by a copy; a view whose elements overlap or have
                odd addresses is read from its first byte to its last.

        Returns:
            ``out``, or the value. Tensors are fresh, on the CPU, in the saved memory format
                (channels last); parameters have their plain attributes. A view has only its own
                bytes.

        Raises:
            UsageError: No such path; names similar ones, or the ranks that have it.
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

        An entry takes about 1 KB of memory: all those of thousands of ranks take gigabytes. Several
        shards of a tensor that one rank stored are named ``"<rank>/<path>@<offsets>"``.

        Args:
            rank: Only this rank's entries.

        Raises:
            UsageError: No such rank.
            NotASnapshot, FormatError, StorageError: See ``restore``.

        Examples:
            >>> entries = await snapshot.get_manifest()
            >>> entries["0/model/weight"].shape
        """
        return await self._run(reading.get_manifest(self._source, rank))

    @async_call
    async def get_state_dict_for_key(self, key: str) -> Any:
        """Returns rank 0's view of the state dict saved under ``key``, with fresh CPU tensors.

        Sharded tensors are whole.

        Args:
            key: Of the app state.

        Raises:
            UsageError: No such key; names the existing keys, or the ranks that have it.
            NotASnapshot, FormatError, StorageError: See ``restore``.

        Examples:
            >>> state_dict = await snapshot.get_state_dict_for_key("model")
        """
        return await self._run(value_reading.get_state_dict_for_key(self._source, key))

    @async_call
    async def keys(self) -> list[str]:
        """Returns the keys of the app state that any rank saved, sorted.

        Raises:
            NotASnapshot, FormatError, StorageError: See ``restore``.

        Examples:
            >>> await snapshot.keys()
        """
        return await self._run(value_reading.find_keys(self._source))

    @async_call
    async def tree(self, *, depth: int | None = None, rank: int | None = None) -> SnapshotTree:
        """Draws what the snapshot holds: names, shapes, dtypes and sizes.

        Lists of values are one line. Groups of leaves alike are shown once and counted, as an
        optimizer has them, and so are ranks. ``get_manifest`` returns everything.

        Args:
            depth: Levels to show; below, sums only. None: all.
            rank: Only this rank.

        Returns:
            A drawing for ``print`` and for notebooks.

        Raises:
            UsageError: A bad argument, or no such rank.
            NotASnapshot, FormatError, StorageError: See ``restore``.

        Examples:
            >>> print(await snapshot.tree(depth=2))
        """
        return await self._run(outline.draw(self._source, depth=depth, rank=rank))

    @async_call
    async def exists(self) -> bool:
        """Returns whether there is something to restore: a committed snapshot, or a checkpoint of
        a format that is read. An unfinished save does not count.

        Raises:
            FormatError: What is there is damaged, or needs a newer release.
            StorageError: Reading failed; it is unknown.

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

        Of another program's checkpoint: the time of its newest file.

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
        """Returns the bytes that the snapshot takes in its storage (``await snapshot.nbytes``).

        With its index, and after compression. Lists its objects.

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
                refuse. It needs memory for the largest long value, array, sparse or quantized
                tensor. Pickled leaves are not unpickled.

        Raises:
            NotASnapshot, FormatError: There is no readable commit object. Other damage is in the
                report.
            UnsupportedFormat: Needs a newer release, or a package that is not installed.
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
        an interrupted copy completed are not sent again. Attempts running at ``path`` are not
        disturbed; garbage there is deleted after the commit. If the same snapshot is already
        committed there, nothing is done. The handle's ``Options`` apply to both sides;
        ``timeout_s`` bounds the whole copy.

        Args:
            path: The destination, in any storage.
            overwrite: Replace another committed snapshot at ``path``, which stays valid until the
                commit.
            storage_options: Options for the backend of ``path``.
            on_event: Called for each step, on a worker thread, one call at a time. Its error ends
                the copy.
            progress: See ``take``.

        Raises:
            UsageError: A bad path or option.
            ObjectExists: Another snapshot is committed at ``path``, or was committed meanwhile.
            UnsupportedFormat: A newer release's snapshot would be overwritten.
            NotASnapshot, FormatError, ChecksumMismatch: There is no snapshot here, or it is
                damaged; names the object. Nothing was committed.
            StorageError: Reading or writing failed (the message says which), or another copy of the
                snapshot to ``path`` is under way. Nothing was committed, unless the commit was not
                answered.
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
        key: str = "model",
        *,
        rename: Rename | None = None,
        dtype: Any = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        progress: bool = False,
    ) -> ExportReport:
        """Writes a model as Hugging Face's ``from_pretrained`` opens it: safetensors files.

        One file ``model.safetensors`` if the tensors take up to ``max_shard_bytes``, else several
        ``model-00001-of-00003.safetensors`` and, last, ``model.safetensors.index.json``. The
        configuration and the tokenizer are yours to add; other files at ``path`` are not touched.

        Sharded tensors are joined. Stored bytes are copied inside the storage where source and
        destination are in one file system, or are opened as one S3 server or one Google Cloud
        Storage; then nothing compares them with their checksums, unless the server tells its own
        (``docs/migrate/export.md``). The rest is read, compared, converted and sent, within
        ``Options.memory_budget_bytes``.

        Of tensors that are the same memory (tied weights) the first name is written. Plain values
        and other leaves that are no tensors are left out, and reported.

        Args:
            path: A folder, in any storage.
            key: The model's key in the app state, or a path below (``"train/model"``).
            rename: See ``restore``; before ``key`` is looked for.
            dtype: Floating-point dtype of 16 to 64 bits, to which tensors of another such dtype are
                converted: ``torch.bfloat16`` or ``"bfloat16"``.
            max_shard_bytes: Of tensors in one file. A larger tensor gets its own.
            overwrite: Delete an older export at ``path`` first.
            storage_options: Options for the backend of ``path``.
            progress: See ``take``.

        Raises:
            UsageError: Bad input; there is no such key; or safetensors cannot hold a leaf (a sparse
                or quantized tensor, a numpy array): names it. Nothing was written.
            ObjectExists: There is an export or a checkpoint at ``path``, perhaps a part of one.
            NotASnapshot, FormatError, ChecksumMismatch: There is no snapshot here, or it is
                damaged; names the object.
            StorageError: Reading or writing failed (the message says which).
        Cancellation: As after a failure, the files written are deleted. A process that dies leaves
        files that no program takes for a model: the index, or the header of a single file, is
        written last.

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
        """Writes a lost or damaged commit object again, for example after a copy without hidden
        files.

        Before anything is written, all rank manifests are read, and every byte of data is compared
        with its checksum. Only ``created`` differs: it is the start of the attempt. Durability
        after a power loss depends on the program that copied the files. Call it in one process,
        while no job saves to the path.

        Args:
            attempt: Name of the folder, if several attempts are complete.
            world_size: Used only if an older release did not record it; its metadata is lost.
            force: Also recover an attempt that may still be saved or copied: by a running process
                of this host, or from another host within the last 24 hours.
            replace_damaged: Replace a damaged commit object, which may have named another attempt.

        Raises:
            UsageError: A bad argument; or several attempts are complete, the world size is needed,
                or the attempt may still be running: names the argument.
            ObjectExists: A snapshot is committed here.
            NotASnapshot: There is no attempt with a rank manifest.
            ChecksumMismatch, FormatError: Data is missing or damaged; further problems are in the
                notes. Nothing was written.
            UnsupportedFormat: Needs a newer release, or a package that is not installed.
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
        Cancellation: The snapshot is there, or the remaining objects are garbage.

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

        Numbers in names count by value: ``step-9`` comes before ``step-10``. Unfinished saves are
        left out; so are damaged snapshots, with a warning in the log. A ``CheckpointManager`` knows
        more about those that it saved: ``manager.steps()``.

        Args:
            root: The folder's path or URL.
            storage_options: Options for the backend, also of the snapshots.
            options: Of the snapshots, too; see ``Snapshot``.

        Returns:
            Handles; none if there is no such folder.

        Raises:
            UsageError: A bad path or option.
            StorageError: Reading failed.

        Examples:
            >>> for snapshot in await Snapshot.list("ckpt"):
            ...     print(snapshot.path, await snapshot.step, await snapshot.created)
        """
        source = source_of(root, storage_options, options)
        return [cls._at(found) for found in await run_async(maintenance.list_snapshots(source))]


class PendingHandle:
    """The part of ``PendingSnapshot`` that both facades share."""

    def __init__(self, save: Save) -> None:
        self._save = save

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path!r}: {self._save.board.latest.phase}>"

    @property
    def path(self) -> str:
        """Without secrets."""
        return self._save.url

    def guard(self, *optimizers: Any) -> Guard:
        """Makes each optimizer's next step wait until the tensors that it changes are copied.

        For lazily staged saves; others never wait. The wait blocks the thread of the step before
        anything is changed. Awaited tensors are copied first, the others in the order of the
        guarded optimizers. The hooks remove themselves after the first step that finds everything
        copied or the save ended. A failed save does not affect the step.

        Args:
            optimizers: ``torch.optim.Optimizer`` instances that train the saved tensors.

        Returns:
            A handle that removes the hooks earlier.

        Raises:
            UsageError: An argument is not an optimizer, or this is a forked child.

        Examples:
            >>> guard = pending.guard(optimizer)
            >>> optimizer.step()  # waits, if it must
        """
        return taking.guard(self._save, optimizers)

    def done(self) -> bool:
        """Returns whether the outcome is known.

        Examples:
            >>> pending.done()
        """
        return self._save.is_done()

    def cancel(self) -> None:
        """Requests an abort and returns at once.

        ``wait`` then raises ``SnapshotAborted`` and the written objects are deleted, unless the
        commit was faster.

        Examples:
            >>> pending.cancel()
        """
        self._save.cancel("cancelled by the caller")


name_methods(PendingHandle, "PendingSnapshot")


class PendingSnapshot(PendingHandle):
    """A save in progress. Await it, or poll ``done()``.

    Without the handle the save continues, and a failure is logged as an error. At interpreter exit
    ``Options.at_exit`` applies.
    """

    _run = staticmethod(run_async)

    @async_call
    async def staged(self) -> None:
        """Waits until the trainer may overwrite its tensors.

        Raises:
            ActorSnapError: The save failed before.
        Cancellation: The save continues.

        Examples:
            >>> await pending.staged()
        """
        await self._run(taking.await_staged(self._save))

    @async_call
    async def wait(self) -> Snapshot:
        """Waits for the outcome.

        Raises:
            ObjectExists, SnapshotAborted: See ``Snapshot.take``.
            StateChanged: A tensor was changed before its lazy staging ended.
        Cancellation: The save continues.

        Examples:
            >>> snapshot = await pending.wait()
        """
        await self._run(taking.await_pending(self._save, self._save.finished))
        return Snapshot._of(self._save)

    def __await__(self) -> Generator[Any, Any, Snapshot]:
        return self.wait().__await__()

    def events(self) -> AsyncIterator[Progress]:
        """Yields the save's progress, latest state first, up to ``committed`` or ``aborted``.

        A slow reader skips states. Never raises the save's error.

        Examples:
            >>> async for progress in pending.events():
            ...     print(progress.phase, progress.stored_bytes, progress.total_bytes)
        """
        return watch_async(self._save.watched())
