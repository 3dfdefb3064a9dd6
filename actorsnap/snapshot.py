"""The public calls for async code. ``actorsnap.sync`` has the same for ordinary scripts."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from typing import Any, Literal

from actorsnap.actors.trace import Progress
from actorsnap.format.manifest import Entry
from actorsnap.options import Options
from actorsnap.runtime import copying, inputs, reading, recovering, restoring, taking, upkeep
from actorsnap.runtime.async_call import async_call
from actorsnap.runtime.copying import CopyEvent, CopyReport
from actorsnap.runtime.guarding import Guard
from actorsnap.runtime.host import run_async, watch_async
from actorsnap.runtime.inputs import AppState
from actorsnap.runtime.job import Job
from actorsnap.runtime.place import Source
from actorsnap.runtime.recovering import RecoverCall, RecoverReport
from actorsnap.runtime.restoring import RestorePlan, RestoreReport
from actorsnap.runtime.upkeep import VerifyReport

__all__ = ["PendingSnapshot", "Snapshot", "warm_up"]


@async_call
async def warm_up(nbytes: int, *, options: Options | None = None) -> None:
    """Gets ready for asynchronous saves of ``nbytes`` on this rank, before the first one.

    Touches the memory for their copies, as much as ``Options.memory_budget_bytes`` lets, and starts
    the uploader process where ``Options.offload`` has it. Without it the first save takes longer
    than later ones.

    Raises:
        UsageError: bad input.
        MemoryError: the system has not so much.
    Cancellation: what is touched is kept.
    """
    await run_async(taking.warm_up(nbytes, options))


class Snapshot:
    """A saved app state at a URL. Creating one does no I/O.

    A handle stands for its path, also one that ``take`` returned: each call reads the commit
    object anew, and follows if another snapshot has replaced the one before. A call whose
    snapshot is replaced while it reads begins anew, three times at most (``state_dict()`` may
    be called again), and then raises ``SnapshotReplaced``; so it does if it was deleted.
    ``Options.timeout_s`` bounds each call's reading. Reads into tensors that have reached the
    operating system are waited for: they must not come late.

    Args:
        path: Where: a local path, ``fs://``, ``memory://`` or the URL of an installed backend.
        storage_options: For the backend.
        options: How to read; None takes defaults and ``ACTORSNAP_*`` variables.

    Raises:
        UsageError: a bad path or option.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        options: Options | None = None,
    ) -> None:
        self._source = Source(
            inputs.make_place(path, storage_options), inputs.resolve_options(options)
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"

    @property
    def path(self) -> str:
        """The URL, without secrets."""
        return self._source.place.url

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
    ) -> Snapshot:
        """Saves ``app_state``; when this returns, the snapshot is durable and visible.

        ``state_dict()`` is called on every stateful, in sorted key order, in this thread. CPU
        tensors are written straight from their memory, without a copy: do not change them
        before this returns (other tasks of your loop go on meanwhile; if one of them
        trains, use ``async_take``). Tensors on devices, or not contiguous, go through at most
        48 MiB of copies.

        Where a process group of torch.distributed is initialised, or torchrun has started the
        process, all ranks call this together, in the same order as their other calls, and it
        is one snapshot: what ranks share is written once, by all of them. No collective is
        called, but by a ``state_dict`` of yours. All ranks return, or raise the same error, by
        ``Options.timeout_s``, whatever happens to one of them. ``path`` and ``step`` must be equal
        on all ranks. ``metadata``, ``overwrite``, ``resume`` and the options that concern storing
        are those of rank 0.

        What other programs keep at ``path`` is not touched. The garbage of older attempts is
        deleted behind the commit; this waits for it 5 seconds at most. Where no snapshot was at
        ``path``, complete attempts stay, with a warning: a copy may have lost their commit object.

        Args:
            path: A URL at which no snapshot is committed yet.
            app_state: Statefuls by key.
            replicated: Globs of paths that are equal on all ranks: ``"model/**"``; the same on
                all ranks. Sharded tensors, and what DistributedDataParallel wraps, need none.
            overwrite: Replace a snapshot that is committed at ``path``. It stays valid until
                the new one is committed. Of several that are pending, the one called last stays.
            resume: Send only what a save to ``path`` whose processes have died has not stored
                yet, where the storage can tell and copy by itself (``s3://``, ``gs://``). You say
                by it that no job saves there any more: attempts of other hosts count as dead, and
                may fail if they are not. Checksums are compared, so any state may be saved.
            step: Training step of the state; comes back as ``Snapshot.step``. Ranks compare it.
                Without it, where all saves have one path, a rank that has skipped one is not found.
            metadata: Any JSON object; comes back as ``Snapshot.metadata``.
            storage_options: For the backend.
            options: See ``Options``.
            group: A ``ProcessGroup``: its ranks save together. None: the default one, or, where
                none is initialised, the ranks that torchrun has started.
            store: A c10d store (TCPStore, or a PrefixStore of it) that all ranks reach, instead
                of the group's own. Without a process group, RANK and WORLD_SIZE in the
                environment say the rest.

        Raises:
            UsageError: bad input, or the ranks make different calls; nothing was written.
            ObjectExists: a snapshot is committed at ``path``, or was meanwhile.
            UnsupportedFormat: a newer release's snapshot would be overwritten.
            SnapshotAborted: it failed, by storage or time; the cause is chained. Look at its
                ``may_be_committed``.
        Cancellation: the attempt is aborted and what it wrote deleted before this raises,
            unless the commit was already under way: then the snapshot is whole.
        """
        job = await run_async(
            taking.take(
                taking.TakeCall(
                    path=path,
                    app_state=app_state,
                    replicated=replicated,
                    overwrite=overwrite,
                    resume=resume,
                    step=step,
                    stage="eager",
                    metadata=metadata,
                    storage_options=storage_options,
                    options=options,
                    group=group,
                    store=store,
                ),
                is_async=False,
            )
        )
        return cls._of(job)

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
    ) -> PendingSnapshot:
        """Copies ``app_state`` and returns; storing and committing go on behind.

        What is saved is what the tensors held at the call, whatever is written to them after
        this has returned. Copies take as much memory as the state, up to the process' budget
        (``Options.memory_budget_bytes``); beyond it, this returns when the rest is stored.

        With ``stage="lazy"`` it returns as soon as that is copied which something else than an
        optimizer's step may change; the rest is copied behind, while forward and backward run.
        It is the trainer's to wait for it: by ``PendingSnapshot.guard`` or
        ``PendingSnapshot.staged``. See ``docs/saving.md``.

        Args, Raises and Cancellation: as ``take``; failures after this has returned are raised by
        ``PendingSnapshot.wait``.

        Args:
            stage: ``"eager"`` copies everything before this returns. ``"lazy"`` leaves until later
                the parameters that require gradients of the ``nn.Module`` in ``app_state``, and the
                state tensors of the ``torch.optim.Optimizer``, and of ``ModelState`` both. Not what
                a fused SGD trains, unless it was guarded in an earlier save: its steps cannot be
                noticed.
        """
        job = await run_async(
            taking.take(
                taking.TakeCall(
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
                ),
                is_async=True,
            )
        )
        return PendingSnapshot(job)

    @async_call
    async def restore(
        self, app_state: AppState, *, strict: bool = True, group: Any = None, store: Any = None
    ) -> RestoreReport:
        """Reads the snapshot into ``app_state``, in place wherever a tensor fits.

        All ranks of a job call it together, on as many ranks as they like: it ends on all of
        them in the same way. ``state_dict()`` and ``load_state_dict()`` are called in sorted
        key order on every rank, also behind one that raised: they may be collective. Where
        ``Options.read_mode`` has it, what several ranks want alike is read once and passed on
        among them, over connections of its own.

        ``app_state`` may have fewer keys than the snapshot. Everything is compared before
        the first byte is read. What has to match depends on the stateful:

        - An ``nn.Module`` has a place for each leaf of the snapshot, and the other way round.
          Its extra state is handed over as it was saved. If leaves differ and the module
          adapts what it loads (it has hooks, or loading code of its own), everything is read
          fresh and its ``load_state_dict`` decides.
          What is sharded or replicated may have its place on another rank (pipelines).
        - A ``ModelState`` is compared as its module is, and its optimizers' tensors have to fit;
          what was saved for parameters that have no optimizer state now is left out.
        - A ``StateDict`` takes the structure of the snapshot. Its further dict keys are
          missing, and a tensor that differs from the saved one in dtype or shape is
          mismatched; lists are taken over with the length that was saved.
        - Anything else (optimizers, schedulers) gets exactly what was saved. An optimizer, also
          in a ``ModelState``, has to be of the class that was saved, which may have moved to
          another module of yours, or of a class of your own that is derived from it; or
          ``Options.allow_optimizer_change``.

        What has no tensor to be read into is read into a fresh one on the CPU; so is what
        has one on the meta device, which a module or ``StateDict`` takes over as its own. A fresh
        tensor has the memory format that was saved (channels last) and a parameter's plain
        attributes; those that a module on meta has set on its parameters count before these. A
        read-only array is replaced by a writable one.
        What ranks divided among them is whole again in a plain tensor; a DTensor or ShardedTensor
        takes just what this process holds of it, whatever mesh saved it, also a plain tensor's. It
        is never replaced: its dtype and global shape must be those of the snapshot. An optimizer
        of such parameters must have its state before (``prime_optimizer``).
        What a rank saved that is neither sharded nor replicated is its own: the same rank gets it
        back. A rank that did not save gets what all had saved alike; what it lacks besides is
        missing, and a line among the mismatched says why. Its ``RNGState`` keeps the generators as
        they are (``RestoreReport.kept``): seed them.
        Tensors that share memory, but were saved as separate ones: a module's keeps it, else
        the first one; the others are replaced by tensors of their own, on the same device.
        A module's that would have to be replaced counts as mismatched; under ``strict=False``
        the memory then holds what the module loaded last.

        Args:
            app_state: Statefuls by key.
            strict: False restores what fits, leaves the rest as it is and reports it.
            group: The process group of the ranks that restore; the default one where None.
            store: See ``take``.

        Returns:
            What was left out on this rank.

        Raises:
            UsageError: bad input, or the ranks make different calls.
            NotASnapshot: there is no committed snapshot; says what is there.
            IncompatibleState: strict, and something is missing, unexpected or mismatched:
                all of it is named; nothing was changed, unless a module itself refused
                (``is_untouched``).
            Exception: whatever a ``load_state_dict`` raises, with a note that names its key
                and those that were loaded before. With many ranks it is the cause of a
                ``RestoreAborted``.
            RestoreAborted: another rank failed in a way that has no error here, was not heard
                for ``Options.lost_after_s``, or had not come by ``Options.timeout_s``.
            FormatError, ChecksumMismatch: the snapshot is damaged; names the object. Tensors
                may have been overwritten in part.
            StorageError: reading failed; the same holds.
            MemoryError: there is no room for a fresh tensor; names it. Nothing was changed.
        Cancellation: tensors may have been overwritten in part.
        """
        return await run_async(
            restoring.restore(self._source, app_state, strict=strict, group=group, store=store)
        )

    @async_call
    async def plan_restore(
        self, app_state: AppState, *, group: Any = None, store: Any = None
    ) -> RestorePlan:
        """Says what ``restore`` would read, and what does not fit; changes nothing.

        All ranks of a job call it together, as ``restore``.

        Args:
            app_state, group, store: See ``restore``.

        Raises:
            UsageError, NotASnapshot, FormatError, StorageError, MemoryError, RestoreAborted:
                see ``restore``.
            Exception: whatever a ``state_dict`` raises, as in ``restore``.
        """
        return await run_async(
            restoring.plan_restore(self._source, app_state, group=group, store=store)
        )

    @async_call
    async def read_object(
        self, path: str, out: Any = None, *, memory_budget_bytes: int | None = None
    ) -> Any:
        """Reads one leaf, or everything below a path.

        Args:
            path: ``"3/model/layer.weight"``: as rank 3 sees it; without a rank: as rank 0. A
                sharded tensor is whole to each rank. Not a part of a leaf
                (``"0/model/sparse@indices"``), nor one shard.
            out: A tensor or array of the same dtype and shape to read into, on any device. Of a
                DTensor, what this process holds is read.
            memory_budget_bytes: At least 1 MiB: bound of what is allocated besides the
                result itself. The process grows by at most this plus 4 MiB, and by the
                index, which is read once per ``Snapshot``. Not bounded: with ``out``, a sparse
                or quantized tensor is read beside it first; a view whose elements overlap
                (sliding windows) or lie at odd addresses is read from its first byte to its
                last, gaps included; an array with negative strides is copied into.

        Returns:
            ``out``, or the value: tensors fresh on the CPU, in the memory format that was saved
            (channels last), parameters with their plain attributes. A view of a larger tensor comes
            alone, with its own bytes.

        Raises:
            UsageError: no such path; names those near it, or the ranks that have it.
            IncompatibleState: ``out`` is of another kind, dtype or shape.
            NotASnapshot, FormatError, StorageError: see ``restore``.
        """
        return await run_async(
            reading.read_object(self._source, path, out, memory_budget_bytes=memory_budget_bytes)
        )

    @async_call
    async def get_manifest(self) -> dict[str, Entry]:
        """Every entry, by ``"<rank>/<path>"``.

        Of several shards that one rank stored of a tensor: by ``"<rank>/<path>@<offsets>"``.

        Raises:
            NotASnapshot, FormatError, StorageError: see ``restore``.
        """
        return await run_async(reading.get_manifest(self._source))

    @async_call
    async def get_state_dict_for_key(self, key: str) -> Any:
        """The state dict saved under the top-level ``key``, with fresh CPU tensors.

        As rank 0 sees it; sharded tensors are whole.

        Raises:
            UsageError: no such key; names those there are, or the ranks that have it.
            NotASnapshot, FormatError, StorageError: see ``restore``.
        """
        return await run_async(reading.get_state_dict_for_key(self._source, key))

    @property
    @async_call
    async def metadata(self) -> dict[str, Any]:
        """What was given to ``take`` as ``metadata`` (``await snapshot.metadata``).

        Raises:
            NotASnapshot, FormatError, StorageError: see ``restore``.
        """
        commit, _ = await run_async(reading.load_index(self._source))
        return commit.metadata

    @property
    @async_call
    async def step(self) -> int | None:
        """Returns the ``step`` given to ``take``, or None (``await snapshot.step``).

        Raises:
            NotASnapshot, FormatError, StorageError: see ``restore``.
        """
        commit, _ = await run_async(reading.load_index(self._source))
        return commit.step

    @async_call
    async def verify(self, level: str = "quick") -> VerifyReport:
        """Checks that the snapshot is whole.

        Args:
            level: ``"quick"`` reads the index and looks at objects' sizes; ``"full"`` also
                compares every byte with its checksum, and fails what a restore would refuse. It
                builds long values, arrays, sparse and quantized tensors, one at a time, and so
                takes as much memory as the largest. Pickled leaves are not unpickled.

        Raises:
            NotASnapshot, FormatError: there is no readable commit object. Other damage is
                in the report.
            UnsupportedFormat: it takes a newer release, or a package that is not installed, to
                read it.
            StorageError: reading failed.
        """
        return await run_async(upkeep.verify(self._source, level=level))

    @async_call
    async def copy_to(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        on_event: Callable[[CopyEvent], object] | None = None,
    ) -> CopyReport:
        """Copies the snapshot to another place, in any storage.

        The copy has the same objects, byte for byte, and is committed last. Every byte is
        compared with its checksum on the way, and at most ``Options.memory_budget_bytes`` are
        under way. What a copy that was interrupted has completed at ``path`` is not sent again.
        Attempts that run at ``path`` are not disturbed, and what lies there as garbage is deleted
        behind the commit, as ``take`` does. Copying what is committed there already does nothing.

        The handle's ``Options`` hold for both sides; ``timeout_s`` bounds the whole copy.

        Args:
            path: Where to.
            overwrite: Replace another snapshot that is committed at ``path``. It stays valid
                until the copy is committed.
            storage_options: For the backend of ``path``.
            on_event: Called for each step, on a worker thread, one call at a time. What it raises
                ends the copy.

        Raises:
            UsageError: a bad path or option.
            ObjectExists: another snapshot is committed at ``path``, or was meanwhile.
            UnsupportedFormat: a newer release's snapshot would be overwritten.
            NotASnapshot, FormatError, ChecksumMismatch: there is no snapshot here, or it is
                damaged; names the object. Nothing was committed.
            StorageError: reading, or writing, failed, and says which; or another copy of the
                snapshot to there is under way. Nothing was committed, unless the commit itself
                was not answered.
        Cancellation: nothing is committed, or the copy is whole; what is left is garbage, which
            the next copy uses.
        """
        to = inputs.make_place(path, storage_options)
        inputs.check_flag("overwrite", overwrite)
        return await run_async(
            copying.copy(self._source, to, overwrite=overwrite, on_event=on_event)
        )

    @async_call
    async def recover(
        self,
        *,
        attempt: str | None = None,
        world_size: int | None = None,
        force: bool = False,
        replace_damaged: bool = False,
    ) -> RecoverReport:
        """Writes the commit object again, where it was lost or damaged.

        For a copy without hidden files, say. Everything else has to be there: all rank manifests
        are read, and every byte of data is compared with its checksum before anything is written.
        The snapshot is then what it was, but for ``created``, which is when the attempt began.
        What the files of the copy are worth after a power loss depends on who copied them.

        Call it in one process, while nobody saves to the path.

        Args:
            attempt: Name of the folder, where several attempts are complete.
            world_size: Ranks that saved it. Needed, and believed, only where an older release
                saved it, which did not record that; its metadata is lost.
            force: Also an attempt that may still be saved or copied: by a process of this host that
                runs, or from another host within the last 24 hours.
            replace_damaged: Replace a commit object that is damaged. It may have named another
                attempt than the one that is recovered.

        Raises:
            UsageError: A bad argument; or several attempts are complete, the world size is needed,
                or the attempt may still be running: the message tells what to pass.
            ObjectExists: A snapshot is committed here.
            NotASnapshot: There is no attempt with a rank manifest.
            ChecksumMismatch, FormatError: Something is missing or damaged; further problems are
                in the notes. Nothing was written.
            UnsupportedFormat: It takes a newer release, or a package that is not installed, to
                read it.
            StorageError: Reading, or writing, failed.
        Cancellation: Nothing is written, or the snapshot is recovered.
        """
        call = RecoverCall(
            attempt=attempt, world_size=world_size, force=force, replace_damaged=replace_damaged
        )
        return await run_async(recovering.recover(self._source, call))

    @async_call
    async def delete(self) -> None:
        """Deletes the snapshot: first the commit object, then all that attempts left.

        Raises:
            NotASnapshot: there is none; nothing was deleted.
            StorageError: deleting failed; what is left is garbage.
        """
        await run_async(upkeep.delete(self._source))

    @classmethod
    def _of(cls, job: Job) -> Snapshot:
        snapshot = cls.__new__(cls)
        snapshot._source = job.source()
        return snapshot


class PendingSnapshot:
    """A snapshot on its way. Await it, or poll ``done()``.

    Dropping the handle does not stop the save; a failure is then logged as an error. At
    interpreter exit it is waited for, or aborted: ``Options.at_exit``.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path!r}: {self._job.board.latest.phase}>"

    @property
    def path(self) -> str:
        """The URL, without secrets."""
        return self._job.url

    @async_call
    async def staged(self) -> None:
        """Waits until the trainer may overwrite its tensors.

        Raises:
            ActorSnapError: the save failed before.
        Cancellation: the save goes on.
        """
        await run_async(taking.await_staged(self._job))

    def guard(self, *optimizers: Any) -> Guard:
        """Makes the next step of each optimizer wait until what it changes is copied.

        Of a lazily staged save; with another one there is nothing to wait for. The wait blocks
        the thread of the step, and comes before anything is changed. What a step waits for is
        copied first, else in the order of the guarded optimizers. The hooks take themselves out
        behind the first step that finds everything copied, or the save ended: a failure of it does
        not concern the step, ``wait`` raises it.

        Args:
            optimizers: ``torch.optim.Optimizer`` that train what is saved.

        Returns:
            What takes the hooks out earlier.

        Raises:
            UsageError: something is no optimizer; or this is a forked child.
        """
        return taking.guard(self._job, optimizers)

    def done(self) -> bool:
        """Whether the outcome is known; ``wait`` then returns at once."""
        return self._job.is_done()

    @async_call
    async def wait(self) -> Snapshot:
        """Waits for the outcome.

        Raises:
            ObjectExists, SnapshotAborted: see ``Snapshot.take``.
            StateChanged: a tensor was changed before its lazy staging had ended.
        Cancellation: the save goes on.
        """
        await run_async(taking.await_pending(self._job, self._job.finished))
        return Snapshot._of(self._job)

    def __await__(self) -> Generator[Any, Any, Snapshot]:
        return self.wait().__await__()

    def cancel(self) -> None:
        """Asks for an abort and returns at once. ``wait`` then raises ``SnapshotAborted``, or
        returns if the commit was faster. What was written is deleted."""
        self._job.cancel("cancelled by the caller")

    def events(self) -> AsyncIterator[Progress]:
        """The save's progress, the latest state first, ending with ``committed`` or
        ``aborted``. A slow reader skips states. Never raises the save's error."""
        return watch_async(self._job.watched())
