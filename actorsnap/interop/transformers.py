# SPDX-License-Identifier: Apache-2.0
"""A ``transformers.Trainer`` that saves in the background, and resumes from whole saves only.

A save is made in ``tmp-checkpoint-N``. Once it is committed, ``trainer_state.json`` is added, and
the folder is renamed to ``checkpoint-N``. So no code that looks for such folders by name, in the
Trainer or elsewhere, sees one that is not whole.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from actorsnap import sync
from actorsnap.errors import ActorSnapError, IncompatibleState, UsageError
from actorsnap.format.foreign import attempts_in
from actorsnap.format.manifest import COMMIT_KEYS
from actorsnap.log import Log
from actorsnap.options import Options
from actorsnap.runtime import maintenance
from actorsnap.runtime.restore import note_arguments
from actorsnap.runtime.script import run_sync
from actorsnap.state.stateful import RNGState, StateDict, Stateful

try:
    import transformers
    from accelerate.utils import broadcast_object_list
    from transformers.trainer_callback import ExportableState, TrainerState
    from transformers.trainer_utils import sort_checkpoints
except ImportError as missing:
    raise ImportError(
        "actorsnap.interop.transformers needs transformers: pip install 'actorsnap[transformers]'"
    ) from (None if missing.name in ("accelerate", "transformers") else missing)

__all__ = ["ActorsnapTrainer"]

logger = Log(__name__)

_SAVING = "tmp-"
"""Prefix of a folder that is being saved, or is not renamed yet."""

_DELETING = "deleted-"
"""Prefix of a folder that is being deleted."""

_MARK = "transformers"
"""The key of a ``TrainerMark`` in the ``metadata`` of a snapshot."""

TRAINER_STATE_NAME = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-([0-9]+)")


class TrainerMark(msgspec.Struct, frozen=True):
    """The snapshot is a checkpoint of an ``ActorsnapTrainer``.

    Attributes:
        keys: Keys of the app state.
        ddp: Names of the model begin with ``module.``.
        v: Version of this mark.
    """

    keys: list[str]
    ddp: bool
    v: int = 1


class ActorsnapTrainer(transformers.Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` with asynchronous saves and safe resume.

    To extend another trainer class, put this class first:
    ``class Mine(ActorsnapTrainer, SFTTrainer)``.

    A save returns when the state is copied. The next save or the end of training waits until it is
    committed, and raises its error. Rotation (``save_total_limit``) follows each commit.
    ``train(resume_from_checkpoint=True)`` uses the newest complete checkpoint, including those that
    the Trainer itself wrote. All ranks must share ``output_dir``.

    Args:
        snapshot_options: See ``actorsnap.Snapshot``.

    Raises:
        UsageError: An argument, which the error names, is not supported.
    """

    def __init__(self, *args: Any, snapshot_options: Options | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._snapshot_options = snapshot_options
        self._saving: _Saving | None = None
        self._refuse_other_engines()

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """See ``transformers.Trainer.train``.

        Args:
            resume_from_checkpoint: A folder, or True for the newest complete checkpoint in
                ``output_dir``.

        Raises:
            ValueError: ``resume_from_checkpoint`` is True, and there is no checkpoint.
            UsageError: The folder is not a complete checkpoint.
            SnapshotAborted: A save failed.
        """
        folder = self._choose_start(resume_from_checkpoint)
        try:
            return super().train(folder, *args, **kwargs)
        except Exception:
            try:
                self._settle()
            except ActorSnapError as error:
                logger.error("the save in flight failed, too: %s", error)
            raise

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._settle_if_done()
        return super().training_step(*args, **kwargs)

    # Saving

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._settle_together()
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        run_dir = self._get_output_dir(trial=trial)
        folder = os.path.join(run_dir, f"checkpoint-{self.state.global_step}")
        best = os.path.join(run_dir, f"checkpoint-{self.state.best_global_step}")
        if best == folder or os.path.isdir(best):
            self.state.best_model_checkpoint = best
        app_state = self._app_state()
        mark = TrainerMark(keys=sorted(app_state), ddp=app_state["model"] is not self.model)
        state = self._state_text()
        # Of several ranks, one is read.
        app_state["trainer"] = StateDict(state=state if self.args.should_save else "")
        pending = sync.Snapshot.async_take(
            _prefixed(_SAVING, folder),
            app_state,
            replicated=[f"{key}/**" for key in ("scheduler", "scaler") if key in app_state],
            overwrite=True,
            step=self.state.global_step,
            metadata={_MARK: msgspec.to_builtins(mark)},
            options=self._snapshot_options,
        )
        self._saving = _Saving(pending, folder, state)
        if self.control.should_training_stop:  # nothing is left to do meanwhile
            self._settle_together()

    def _app_state(self) -> dict[str, Stateful]:
        wrapped = getattr(self.model_wrapped, "_orig_mod", self.model_wrapped)
        is_ddp = isinstance(wrapped, torch.nn.parallel.DistributedDataParallel)
        found: dict[str, Any] = {"model": wrapped if is_ddp else self.model}
        if not self.args.save_only_model:
            found |= self._rest_of_state() | {"rng": RNGState()}
        return found

    def _rest_of_state(self) -> dict[str, Stateful]:
        scaler = getattr(self.accelerator, "scaler", None)
        found: dict[str, Any] = {
            # Without Accelerate's wrapper: of a torch optimizer more is known.
            "optimizer": getattr(self.optimizer, "optimizer", self.optimizer),
            "scheduler": self.lr_scheduler,
        }
        return found if scaler is None else found | {"scaler": scaler}

    def _state_text(self) -> str:
        """Returns the content of ``trainer_state.json``."""
        callbacks = [*self.callback_handler.callbacks, self.control]
        exportable = [each for each in callbacks if isinstance(each, ExportableState)]
        fresh = TrainerState(stateful_callbacks=exportable)
        self.state.stateful_callbacks.update(fresh.stateful_callbacks)
        return json.dumps(dataclasses.asdict(self.state), indent=2, sort_keys=True) + "\n"

    def _settle_if_done(self) -> None:
        """Renames and rotates as soon as a step finds the save committed."""
        saving = self._saving
        if saving is None or not self.args.should_save or not saving.pending.done():
            return
        if not saving.has_failed:
            try:
                self._settle()
            except ActorSnapError:
                # All ranks raise at the same place: in the next save, or at the end.
                saving.has_failed = True
                self._saving = saving

    def _settle_together(self) -> None:
        """Waits until the save in flight is a checkpoint, on all ranks.

        Raises:
            SnapshotAborted: It failed.
        """
        self._settle()
        self.accelerator.wait_for_everyone()

    def _settle(self) -> None:
        saving, self._saving = self._saving, None
        if saving is None:
            return
        saving.pending.wait()
        if self.args.should_save:
            self._publish(saving.folder, saving.state)
            self._rotate(saving.folder)

    def _publish(self, folder: str, state: str) -> None:
        """Makes a committed snapshot a checkpoint."""
        made = _prefixed(_SAVING, folder)
        configs = [getattr(self.model, name, None) for name in ("config", "generation_config")]
        for each in (self.processing_class, *configs):
            if hasattr(each, "save_pretrained"):
                each.save_pretrained(made)
        with open(os.path.join(made, TRAINER_STATE_NAME), "w", encoding="utf-8") as file:
            file.write(state)
            file.flush()
            os.fsync(file.fileno())
        if os.path.isdir(folder):  # of an earlier run of this step
            _delete(folder)
        os.rename(made, folder)

    def _rotate(self, newest: str) -> None:
        """Deletes the oldest checkpoints, down to ``save_total_limit``."""
        limit = self.args.save_total_limit
        if not limit or limit < 0:
            return
        run_dir = os.path.dirname(newest)
        best = (self.state.best_model_checkpoint, f"checkpoint-{self.state.best_global_step}")
        kept = {os.path.basename(path) for path in (newest, *best) if path}
        found = sort_checkpoints(run_dir, use_mtime=True)
        excess = len(found) - max(limit, sum([os.path.basename(path) in kept for path in found]))
        for path in [path for path in found if os.path.basename(path) not in kept][
            : max(0, excess)
        ]:
            _delete(path)

    def _finalize_training(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
        self._settle_together()
        best = self.state.best_model_checkpoint
        if self.args.should_save and self.args.save_total_limit == 1 and best is not None:
            # What the Trainer does here, but by commit objects first.
            for path in sort_checkpoints(self._get_output_dir(trial)):
                if not os.path.samefile(path, best):
                    _delete(path)
        return super()._finalize_training(trial, *args, **kwargs)

    # Resuming

    def _choose_start(self, wanted: Any) -> str | None:
        """Returns the folder to resume from, the same on all ranks."""
        chosen: list[Any] = [None, None]
        if self.args.should_save:
            try:
                chosen[0] = self._find_start(wanted)
            except (ActorSnapError, ValueError, OSError) as error:
                chosen[1] = error
        chosen = broadcast_object_list(chosen)
        if chosen[1] is not None:
            raise chosen[1]
        start: str | None = chosen[0]
        return start

    def _find_start(self, wanted: Any) -> str | None:
        run_dir = self.args.output_dir
        self._finish_earlier_saves(run_dir)
        if wanted is None or wanted is False:
            return None
        if wanted is not True:
            folder: str = os.path.normpath(wanted)
            why = _fault(folder)
            if why is not None:
                newest = next(_whole_checkpoints(os.path.dirname(folder)), None)
                advice = f"; the newest whole one is {newest}" if newest else ""
                raise UsageError(f"cannot resume from {folder}: {why}{advice}")
            return folder
        newest = next(_whole_checkpoints(run_dir), None)
        if newest is None:
            raise ValueError(f"no whole checkpoint in {run_dir}: train without one, or check it")
        return newest

    def _finish_earlier_saves(self, run_dir: str) -> None:
        """Renames what a killed run had committed; deletes what it had not."""
        for name in sorted(os.listdir(run_dir)) if os.path.isdir(run_dir) else ():
            path = os.path.join(run_dir, name)
            if name.startswith(_DELETING):
                shutil.rmtree(path, ignore_errors=True)
            elif name.startswith(_SAVING) and _CHECKPOINT.fullmatch(name.removeprefix(_SAVING)):
                snapshot = sync.Snapshot(path, options=self._snapshot_options)
                if _has_commit(path):
                    state = snapshot.read_object("trainer/state")
                    self._publish(os.path.join(run_dir, name.removeprefix(_SAVING)), state)
                    continue
                found = run_sync(
                    maintenance.collect(snapshot._source, force=False),
                    name="ActorsnapTrainer.train",
                )
                if not found.left and not found.kept:
                    shutil.rmtree(path, ignore_errors=True)

    def _restore(self, folder: str, app_state: dict[str, Stateful]) -> bool:
        """Restores keys that were saved. Returns False if the Trainer itself wrote the folder."""
        mark = _find_mark(folder)
        if mark is None:
            return False
        snapshot = sync.Snapshot(folder, options=self._snapshot_options)
        wanted = {key: value for key, value in app_state.items() if key in mark.keys}
        if wanted:
            try:
                snapshot.restore(wanted, rename={"model/module.": "model/"} if mark.ddp else None)
            except IncompatibleState as error:
                note_arguments(error, snapshot.path, "A Trainer")
                raise
        if missing := sorted(app_state.keys() - wanted.keys()):
            logger.warning("%s has no %s: starts over", folder, ", ".join(missing))
        return True

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        target = self.model if model is None else model
        if not self._restore(resume_from_checkpoint, {"model": target}):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if not self._restore(self.state.best_model_checkpoint, {"model": self.model}):
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self._restore(checkpoint, self._rest_of_state()):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is None or _find_mark(checkpoint) is None:
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self._restore(checkpoint, {"rng": RNGState()}):
            super()._load_rng_state(checkpoint)

    def _refuse_other_engines(self) -> None:
        args = self.args
        refused = {
            "FSDP: use transformers.Trainer with actorsnap.interop.dcp.install() and "
            "SHARDED_STATE_DICT": self.is_fsdp_enabled or self.is_fsdp_xla_enabled,
            "DeepSpeed, which has a checkpoint engine of its own": self.is_deepspeed_enabled,
            "save_on_each_node=True: ranks save one snapshot, which all see": (
                args.save_on_each_node
            ),
            "push_to_hub at each save: choose hub_strategy='end'": (
                args.push_to_hub and args.hub_strategy != "end"
            ),
        }
        if found := [what for what, is_asked in refused.items() if is_asked]:
            raise UsageError(f"ActorsnapTrainer does not support {'; nor '.join(found)}")


@dataclasses.dataclass
class _Saving:
    """A save in flight.

    Attributes:
        folder: To rename it to.
        state: Content of ``trainer_state.json``.
        has_failed: Its error was seen, and is raised later.
    """

    pending: sync.PendingSnapshot
    folder: str
    state: str
    has_failed: bool = False


def _prefixed(prefix: str, folder: str) -> str:
    parent, name = os.path.split(folder)
    return os.path.join(parent, prefix + name)


def _delete(folder: str) -> None:
    """Deletes a checkpoint; from the first moment on, no name of one is left."""
    doomed = _prefixed(_DELETING, folder)
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(folder, doomed)
    if _has_commit(doomed):
        sync.Snapshot(doomed).delete()
    shutil.rmtree(doomed, ignore_errors=True)


def _has_commit(folder: str) -> bool:
    return any(os.path.isfile(os.path.join(folder, key)) for key in COMMIT_KEYS)


def _find_mark(folder: str) -> TrainerMark | None:
    """Returns None for a folder that the Trainer itself wrote."""
    if not _has_commit(folder):
        return None
    found = sync.Snapshot(folder).metadata.get(_MARK)
    return None if found is None else msgspec.convert(found, TrainerMark)


def _fault(folder: str) -> str | None:
    """Returns why a folder is not a whole checkpoint; None if it is one."""
    if not os.path.isdir(folder):
        return "there is no such folder"
    if not os.path.isfile(os.path.join(folder, TRAINER_STATE_NAME)):
        return f"it has no {TRAINER_STATE_NAME}, so its save did not end"
    if not _has_commit(folder):
        if attempts_in(os.listdir(folder)):
            return "it has parts of a snapshot, but no commit object"
        return None  # the Trainer writes that file last
    try:
        problems = sync.Snapshot(folder).verify("quick").problems
        return str(problems[0]) if problems else None
    except ActorSnapError as error:
        return str(error)


def _whole_checkpoints(run_dir: str) -> Iterator[str]:
    """Yields them, newest first; logs why others are skipped."""
    names = os.listdir(run_dir) if os.path.isdir(run_dir) else []
    matches = filter(None, map(_CHECKPOINT.fullmatch, names))
    for match in sorted(matches, key=lambda match: -int(match[1])):
        folder = os.path.join(run_dir, match[0])
        why = _fault(folder)
        if why is None:
            yield folder
        else:
            logger.warning("%s is skipped: %s", folder, why)
