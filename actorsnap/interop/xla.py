# SPDX-License-Identifier: Apache-2.0
"""PyTorch/XLA's ``CheckpointManager``: its calls, over ``actorsnap.manager``.

    from actorsnap.interop.xla import CheckpointManager, prime_optimizer

replaces the import from ``torch_xla.experimental.distributed_checkpoint``. torch_xla is not
imported. ``docs/manager.md`` lists the differences.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, MutableMapping
from typing import Any

from actorsnap.errors import UsageError
from actorsnap.log import Log
from actorsnap.manager import SavePolicy, Watcher, every, keep, notices, sync
from actorsnap.manager.results import check_training_step
from actorsnap.runtime.location import AppState, check_flag
from actorsnap.runtime.script import run_sync
from actorsnap.state.optim import prime_optimizer
from actorsnap.state.stateful import StateDict, Stateful
from actorsnap.tracebacks import short_traceback

__all__ = ["CheckpointManager", "prime_optimizer"]

logger = Log(__name__)


class CheckpointManager:
    """Saves a state dict every ``save_interval`` steps, and restores in place.

    Every rank creates a manager and makes the same calls. The snapshots are those of
    ``actorsnap.manager.CheckpointManager``, which can open the same folder.

    Args:
        path: A folder or URL for this run only.
        save_interval: Steps between saves; step 0 is saved.
        max_to_keep: Number of newest snapshots to keep, in addition to the restored one; 0 keeps
            all.
        max_pending_async: Saves in flight. ``save_async`` waits for the oldest of them first.
        num_of_threads: Has no effect: ``Options`` sizes the workers.
        process_group: The ranks that save together; see ``Snapshot.take``. No group is required.
        chkpt_on_preemption: Save once after a SIGTERM, at one step on all ranks. Needs the main
            thread; in other threads, a warning is logged, and signals are not watched.

    Raises:
        UsageError: An argument is invalid.
    """

    @short_traceback
    def __init__(
        self,
        path: str,
        save_interval: int,
        max_to_keep: int = 0,
        max_pending_async: int = 1,
        num_of_threads: int = 1,
        process_group: Any = None,
        chkpt_on_preemption: bool = True,
    ) -> None:
        for name, value, least in (
            ("save_interval", save_interval, 1),
            ("max_to_keep", max_to_keep, 0),
            ("max_pending_async", max_pending_async, 1),
        ):
            if type(value) is not int or value < least:
                raise UsageError(f"{name} must be an integer of at least {least}, not {value!r}")
        if not isinstance(path, str | os.PathLike):
            raise UsageError(f"path must be a folder or URL, not {path!r}")
        check_flag("chkpt_on_preemption", chkpt_on_preemption)
        self.base_path = os.path.join(path, "")
        self.save_interval = save_interval
        self.max_to_keep = max_to_keep
        self.num_of_threads = num_of_threads
        self.chkpt_on_preemption = chkpt_on_preemption
        save: SavePolicy = every.steps(save_interval)
        watched: list[Watcher] = []
        if chkpt_on_preemption and threading.current_thread() is threading.main_thread():
            save, watched = save | every.notice(), [notices.signals("SIGTERM")]
        elif chkpt_on_preemption:
            logger.warning("%s: SIGTERM is not watched outside of the main thread", path)
        self._manager = sync.CheckpointManager(
            path,
            save=save,
            keep=keep.last(max_to_keep) if max_to_keep else keep.all(),
            min_valid=min(max_to_keep, 2) or 2,
            max_pending=max_pending_async,
            # As in torch.distributed.checkpoint: values of one name are equal on all ranks.
            replicated=["**"],
            group=process_group,
            notices=watched,
        )
        self._body = self._manager._body
        self._body.asking.watch()
        for watcher in watched:
            weakref.finalize(self, watcher.stop)  # XLA's manager is never closed
        self._body.restart_steps()
        self._seen: int | None = None
        self._saved: int | None = None
        self._has_warned = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._manager.path!r}, {self.save_interval})"

    @short_traceback
    def should_save(self, step: int) -> bool:
        """Returns whether ``save`` and ``save_async`` save the step. No I/O."""
        step = check_training_step(step)
        is_preempted = self.chkpt_on_preemption and self.reached_preemption(step)
        return step % self.save_interval == 0 or is_preempted

    @short_traceback
    def save(self, step: int, state_dict: Mapping[str, Any], force: bool = False) -> bool:
        """Saves a due step; returns when it is committed and verified.

        Args:
            step: Of the training loop. Any, also one saved before.
            state_dict: Values by name: tensors, nested dicts and lists, plain values, statefuls.
            force: Save the step if it is not due.

        Returns:
            Whether it was saved.

        Raises:
            UsageError: No step, or no state dict.
            UsageError, RootTaken, SnapshotAborted, FormatError: See
                ``actorsnap.manager.CheckpointManager.save``.
        """
        is_taken = self.save_async(step, state_dict, force)
        if is_taken:
            self.join()
        return is_taken

    @short_traceback
    def save_async(self, step: int, state_dict: Mapping[str, Any], force: bool = False) -> bool:
        """Copies the state of a due step; the rest is stored in the background.

        Args and Returns: as ``save``.

        Raises:
            UsageError, RootTaken, SnapshotAborted: See
                ``actorsnap.manager.CheckpointManager.maybe_save``. Failures after the return are
                raised by the next due save or by ``join``.
        """
        step = check_training_step(step)
        app_state = _app_state(state_dict)
        is_due = force or step % self.save_interval == 0
        self._follow(step, is_due)
        if force:
            self._manager.async_save(step, app_state=app_state)
        elif not self._manager.maybe_save(step, app_state=app_state):
            return False
        self._saved = step
        return True

    @short_traceback
    def restore(self, step: int, state_dict: MutableMapping[str, Any]) -> None:
        """Reads a saved step into ``state_dict``, in place.

        Tensors are overwritten; dicts and lists are kept, and get the saved values. Only values
        that the dict has are restored. An empty dict below the top level gets everything that was
        saved there, so an optimizer need not be primed. The next save abandons later steps.

        Raises:
            UsageError: There is no such step; names those there are.
            IncompatibleState: The dict has a value that the step lacks, or a tensor of another
                dtype or shape. Nothing was changed.
            Exception: See ``Snapshot.restore``.
        """
        self._manager.restore(step, _app_state(state_dict))
        self._seen = self._saved = step

    @short_traceback
    def all_steps(self) -> list[int]:
        """Returns the saved steps, ascending. Each rank looks for itself.

        Raises:
            StorageError: Listing or reading failed.
        """
        return sorted({*self._manager.all_steps()})

    @short_traceback
    def join(self) -> None:
        """Waits until all saves are committed, and what goes is deleted.

        Raises:
            SnapshotAborted, RootTaken, FormatError: A save failed.
        """
        self._manager.wait()
        run_sync(self._body.finish_keeping(), name="CheckpointManager.join")

    @short_traceback
    def reached_preemption(self, step: int) -> bool:
        """Returns whether to end: a preemption was noticed, and the step was saved if there was
        time.

        Raises:
            UsageError: ``chkpt_on_preemption`` is off.
        """
        if not self.chkpt_on_preemption:
            raise UsageError(
                "preemptions are not watched: pass chkpt_on_preemption=True to CheckpointManager"
            )
        return self._manager.should_stop

    def _follow(self, step: int, is_due: bool) -> None:
        """Lets the manager take the step: its own steps only rise, these need not."""
        goes_back = self._seen is not None and step < self._seen
        if goes_back or (is_due and step == self._saved):
            self._body.restart_steps()
        if goes_back and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: step %d comes after step %s, so the greatest step is not the newest, and "
                "max(all_steps()) may restore an older state. Count steps on from the one restored",
                self._manager.path,
                step,
                self._seen,
            )
        self._seen = step


def _app_state(state_dict: Mapping[str, Any]) -> AppState:
    if not isinstance(state_dict, Mapping):
        raise UsageError(f"state_dict must be a dict of values by name, not {state_dict!r:.100}")
    return {
        key: value
        if isinstance(value, Stateful) and not isinstance(value, dict)
        else _Part(state_dict, key)
        for key, value in state_dict.items()
    }


class _Part(StateDict):
    """A value of a state dict, restored in place. A plain one is stored in a dict of its own."""

    def __init__(self, state_dict: Mapping[str, Any], key: str) -> None:
        super().__init__()
        self._owner = state_dict
        self._key = key
        value = state_dict[key]
        self.data = value if isinstance(value, dict) else {"value": value}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        _update(self.data, state_dict)
        if self.data is not self._owner[self._key]:
            assert isinstance(self._owner, MutableMapping)
            self._owner[self._key] = self.data["value"]


def _update(held: dict[Any, Any], saved: Mapping[Any, Any]) -> None:
    wanted = [key for key in saved if key in held] if held else [*saved]
    for key in wanted:
        mine, value = held.get(key), saved[key]
        if isinstance(mine, dict) and isinstance(value, Mapping):
            _update(mine, value)
        elif isinstance(mine, list) and isinstance(value, list):
            mine[:] = value
        else:
            held[key] = value
