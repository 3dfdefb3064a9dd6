# SPDX-License-Identifier: Apache-2.0
"""torchtitan's checkpoint manager, over snapshots. See ``docs/integrations/torchtitan.md``.

    from actorsnap.interop.torchtitan import CheckpointManager

    config.checkpoint = CheckpointManager.Config(enable=True, interval=500)

torchtitan's manager keeps its policies: when to save, what the first and the last save have, what
an initial load may bring. Replaced is what it does with files: saving, loading, finding the latest
step, deleting. Written for torchtitan 0.3.
"""

from __future__ import annotations

import concurrent.futures
import copy
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from actorsnap.errors import ActorSnapError, NoValidSnapshot, UsageError, describe
from actorsnap.format.manifest import Commit
from actorsnap.interop import dcp
from actorsnap.interop.checkpoints import find_damage
from actorsnap.interop.dcp.calls import begin_save
from actorsnap.interop.dcp.writer import ActorsnapWriter
from actorsnap.protocol.messages import CallKind, Label
from actorsnap.runtime import taking
from actorsnap.runtime.host import Script
from actorsnap.runtime.location import make_location, resolve_options
from actorsnap.runtime.maintenance import collect, find_snapshots
from actorsnap.runtime.rounds import announce
from actorsnap.runtime.save import Save
from actorsnap.runtime.script import run_sync
from actorsnap.runtime.source import Source
from actorsnap.runtime.team import find_team
from actorsnap.sync import Snapshot

try:
    from torchtitan.components.checkpointer.base import MODEL
    from torchtitan.components.checkpointer.dcp import AsyncMode
    from torchtitan.components.checkpointer.dcp import CheckpointManager as _DcpManager
    from torchtitan.tools import filesystem
    from torchtitan.tools.utils import GarbageCollection
except ImportError as error:
    raise ImportError(
        "actorsnap.interop.torchtitan needs torchtitan 0.3 or newer: "
        "pip install 'actorsnap[torchtitan]'"
    ) from (None if error.name == "torchtitan" else error)

__all__ = ["CheckpointManager"]

logger = logging.getLogger(__name__)

_STEP_FOLDER = re.compile(r"step-(\d+)")


class _Found(NamedTuple):
    """A snapshot.

    Attributes:
        created: None if it was never committed, or is partly deleted.
    """

    step: int
    created: datetime | None
    path: str


class OverSnapshots:
    """File operations of a torchtitan manager. Derive from this first, then from the manager.

    Args:
        config, kwargs: Those of torchtitan's manager.
    """

    enable: bool
    folder: str
    keep_latest_k: int
    save_future: Any
    sd_adapter: Any
    stager: Any
    states: dict[str, Any]

    def __init__(self, config: Any, **kwargs: Any) -> None:
        # Without torchtitan's thread, which deletes whole folders by their names alone.
        manager: Any = super()
        without = copy.copy(config)
        without.keep_latest_k = 0
        manager.__init__(without, **kwargs)
        if not self.enable:
            return
        self.keep_latest_k = config.keep_latest_k
        self._whole: set[str] = set()
        self._saving = ""
        self._has_saved = False
        self._deleting = concurrent.futures.ThreadPoolExecutor(1, "actorsnap-torchtitan")
        self._purging: concurrent.futures.Future[None] | None = None
        if AsyncMode(config.async_mode) is AsyncMode.ASYNC_WITH_PINNED_MEM:
            self.stager = LazyStager(kwargs["model_parts"], kwargs["optimizers"])

    def __del__(self) -> None:
        """Replaces torchtitan's, which closes: a collected manager must not wait for a save."""

    def _close(self) -> None:
        """Waits for the save in flight, and for deletions."""
        if self._has_saved:
            try:
                self.maybe_wait_for_saving()  # type: ignore[attr-defined]
                self._saving = ""
                self._purge_stale_checkpoints()  # torchtitan's does not after the last step
            except CheckpointException as error:
                # Raised, it would hide the exception for which the trainer closes.
                logger.error("%s: the last save failed: %s", self.folder, error)
        self._wait_for_purge()

    def _wait_for_saving(self) -> None:
        """torchtitan's, which keeps a future that failed, and with it raises at every save."""
        manager: Any = super()
        try:
            manager._wait_for_saving()
        except CheckpointException:
            self.save_future = None
            raise

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Saves a snapshot. A model for Hugging Face (``to_hf``) is written by torchtitan.

        Returns:
            What torchtitan's manager returns: None, a future, or an ``AsyncSaveResponse``.
        """
        if to_hf:
            manager: Any = super()
            return manager.dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
        self._wait_for_purge()  # it may be at this very folder, from before a rewind
        self._whole.discard(checkpoint_id)
        self._saving = checkpoint_id
        self._has_saved = True
        result: Any = None
        if async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            result = async_save(state_dict, checkpoint_id=checkpoint_id, async_stager=self.stager)
        elif async_mode == AsyncMode.ASYNC:
            result = async_save(state_dict, checkpoint_id=checkpoint_id)
        else:
            save(state_dict, checkpoint_id=checkpoint_id)
            self._saving = ""
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return result

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Loads a snapshot, a DCP folder or a Hugging Face repo, in place.

        Quantized repos are read by torchtitan, which knows how to convert them.
        """
        if from_quantized:
            manager: Any = super()
            manager.dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        if from_hf:
            if self.sd_adapter is None:
                raise UsageError(
                    f"{checkpoint_id}: the model has no state_dict_adapter, so its names in "
                    "Hugging Face's format are unknown"
                )
            named = self.sd_adapter.to_hf(state_dict)
            load({MODEL: named}, checkpoint_id=checkpoint_id)
            state_dict = self.sd_adapter.from_hf(named)
        else:
            load(state_dict, checkpoint_id=checkpoint_id)
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)

    def _find_load_step(self, folder: str = "") -> int:
        """Returns the greatest step with an intact snapshot, the same on all ranks; -1 without one.

        Raises:
            NoValidSnapshot: There are snapshots, but all are damaged.
        """
        folder = folder or self.folder
        label = Label(CallKind.RESTORE_LATEST, make_location(folder, None).canonical)
        found: int = run_sync(
            announce(find_team(None, None), label, resolve_options(None), lambda: _latest(folder)),
            name="CheckpointManager.load",
        )
        return found

    def _purge_stale_checkpoints(self) -> None:
        """Deletes snapshots older than the ``keep_latest_k`` newest intact ones, in the background.

        A save in flight does not count. Only snapshots are deleted, the commit object first. After
        a rewind the greatest steps are not the latest: the newest by step stay, and by time.
        """
        if self._should_purge():  # type: ignore[attr-defined]
            self._purging = self._deleting.submit(self._purge)

    def _wait_for_purge(self) -> None:
        if self._purging is not None:
            self._purging.result()

    def _purge(self) -> None:
        try:
            found = [each for each in _snapshots(self.folder) if each.path != self._saving]
            committed = [each for each in found if each.created is not None]
            by_step = self._newest(committed, lambda each: each.step)
            by_time = self._newest(committed, lambda each: each.created)
        except Exception as error:
            logger.warning("%s: nothing is deleted: %s", self.folder, describe(error))
            return
        if len(by_step) < self.keep_latest_k:
            return
        for each in found:
            if each.step < by_step[-1].step and each not in by_time:
                try:
                    if each.created is not None:
                        Snapshot(each.path).delete()
                    else:
                        _collect(each.path)
                    logger.info("deleted %s", each.path)
                except Exception as error:
                    logger.warning("%s is not deleted: %s", each.path, describe(error))

    def _newest(self, committed: list[_Found], key: Callable[[_Found], Any]) -> list[_Found]:
        """Returns the ``keep_latest_k`` newest whole ones."""
        found: list[_Found] = []
        for each in sorted(committed, key=key, reverse=True):
            if len(found) < self.keep_latest_k and self._is_whole(each.path):
                found.append(each)
        return found

    def _is_whole(self, path: str) -> bool:
        if path not in self._whole:
            if run_sync(find_damage(_source(path)), name="CheckpointManager.save"):
                logger.warning("%s is damaged, and does not count as one of the latest", path)
                return False
            self._whole.add(path)
        return True


class CheckpointManager(OverSnapshots, _DcpManager):  # type: ignore[misc]
    """torchtitan's manager, with snapshots in place of DCP checkpoints."""

    @dataclass(kw_only=True, slots=True)
    class Config(_DcpManager.Config):  # type: ignore[misc]
        """torchtitan's options. Those of actorsnap are ``ACTORSNAP_*`` variables."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
        """``save`` returns when the snapshot is committed ("disabled"), when the state is copied
        ("async"), or at once ("async_with_pinned_mem"): then parameters and optimizer states are
        copied until ``maybe_wait_for_staging``, which the trainer calls before its next step."""


class LazyStager:
    """Names what a lazy save leaves in place: parameters, and states of optimizers."""

    def __init__(self, model_parts: list[torch.nn.Module], optimizers: Any) -> None:
        each = getattr(optimizers, "optimizers", ())
        self.trained: dict[str, Any] = {
            **{f"model {number}": part for number, part in enumerate(model_parts)},
            **{f"optimizer {number}": one for number, one in enumerate(each)},
        }

    def close(self) -> None:
        """torchtitan closes its stager."""


class _StagingFuture(concurrent.futures.Future[None]):
    """Ends when the optimizers may step."""

    def __init__(self, save: Save) -> None:
        super().__init__()
        self._save = save

    def done(self) -> bool:
        return self._save.staged.done()

    def result(self, timeout: float | None = None) -> None:
        """Speeds the copies up, and waits. ``timeout`` has no effect: ``Options.timeout_s`` has.

        The error of a save that failed is left to the next save.
        """
        try:
            waiting = taking.await_staged(self._save)
            run_sync(waiting, name="CheckpointManager.maybe_wait_for_staging")
        except ActorSnapError:
            if not self._save.staged.done():
                raise


def save(state_dict: dict[str, Any], *, checkpoint_id: str) -> None:
    dcp.save(state_dict, storage_writer=_writer(checkpoint_id))


def async_save(
    state_dict: dict[str, Any], *, checkpoint_id: str, async_stager: LazyStager | None = None
) -> Any:
    """Returns a future, or an ``AsyncSaveResponse`` with a stager."""
    writer = _writer(checkpoint_id)
    if async_stager is None:
        return dcp.async_save(state_dict, storage_writer=writer)
    saving, outcome = begin_save(writer, state_dict, trained=async_stager.trained)
    response: Any = AsyncSaveResponse
    return response(staging_completion=_StagingFuture(saving), upload_completion=outcome)


def load(state_dict: dict[str, Any], *, checkpoint_id: str) -> None:
    dcp.load(state_dict, checkpoint_id=checkpoint_id)


def _writer(path: str) -> ActorsnapWriter:
    found = _STEP_FOLDER.fullmatch(path.rpartition("/")[2])
    return ActorsnapWriter(path, step=None if found is None else int(found[1]))


def _step_folders(folder: str) -> list[tuple[int, str]]:
    """Returns steps and paths, the greatest step first."""
    if not filesystem.isdir(folder):
        return []
    # The whole name: step-500-best is the user's.
    named = [(_STEP_FOLDER.fullmatch(name), name) for name in filesystem.listdir(folder)]
    found = [(int(match[1]), filesystem.join(folder, name)) for match, name in named if match]
    return sorted(found, reverse=True)


def _snapshots(folder: str) -> list[_Found]:
    """Returns the snapshots with an undamaged commit object."""
    found: list[_Found] = []
    listed = run_sync(find_snapshots(_source(folder)), name="CheckpointManager.save")
    for name, commit in listed.items():
        match = _STEP_FOLDER.fullmatch(name)
        if match and (commit is None or isinstance(commit, Commit)):
            created = None if commit is None else datetime.fromisoformat(commit.created)
            found.append(_Found(int(match[1]), created, filesystem.join(folder, name)))
    return found


def _collect(path: str) -> None:
    """Deletes what a killed job left of a snapshot, unless it may still be saved."""
    kept = run_sync(collect(_source(path), force=False), name="CheckpointManager.save").kept
    if kept:  # complete: their commit object was deleted, or never written
        run_sync(collect(_source(path), force=False, deletable=kept), name="CheckpointManager.save")


def _source(path: str) -> Source:
    return Source(make_location(path, None), resolve_options(None))


def _latest(folder: str) -> Script[int]:
    skipped: list[tuple[str, str]] = []
    for step, path in _step_folders(folder):
        problems = yield from find_damage(_source(path))
        if problems is None:
            continue
        if not problems:
            for url, why in skipped:
                logger.warning("step %d is loaded, because %s is damaged: %s", step, url, why)
            return step
        skipped.append((path, "; ".join(map(describe, problems))))
    if skipped:
        error = NoValidSnapshot(url=folder, skipped=skipped)
        error.add_note("to start from nothing, choose another checkpoint.folder")
        raise error
    return -1
