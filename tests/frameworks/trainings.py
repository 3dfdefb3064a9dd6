# SPDX-License-Identifier: Apache-2.0
"""Trainings with Hugging Face's Trainer, each in a process of its own: its warnings are no errors.

    python tests/frameworks/trainings.py NAME FOLDER

prints the result of one of the functions below as JSON, on the last line.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from actorsnap import Options
from actorsnap.errors import ActorSnapError, UsageError
from actorsnap.interop.transformers import ActorsnapTrainer
from actorsnap.sync import Snapshot

SLOW = Options(chunk_bytes=2 << 20, num_uploaders=1)


def llama(width: int = 16) -> Any:
    torch.manual_seed(7)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64 * width,
            hidden_size=width,
            intermediate_size=width,
            num_hidden_layers=1,
            num_attention_heads=2,
            attention_dropout=0.2,
            tie_word_embeddings=True,
        )
    )


def texts(count: int = 64) -> list[dict[str, torch.Tensor]]:
    starts = torch.randint(900, (count, 1), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in starts + torch.arange(8)]


def trainer(kind: type, folder: Path, *, width: int = 16, **arguments: Any) -> Any:
    torch.set_num_threads(1)
    callbacks = arguments.pop("callbacks", [])
    keywords = {} if kind is Trainer else {"snapshot_options": arguments.pop("options", None)}
    defaults = {
        "max_steps": 12,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 3,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
    }
    return kind(
        model=llama(width),
        args=TrainingArguments(str(folder), **(defaults | arguments)),
        train_dataset=texts(),
        eval_dataset=texts(6),
        callbacks=callbacks,
        **keywords,
    )


def outcome(trained: Any) -> dict[str, Any]:
    """What two equal trainings have in common, bit for bit."""
    crc = 0
    for parameter in trained.model.parameters():
        crc = zlib.crc32(parameter.detach().numpy().data, crc)
    losses = {str(log["step"]): log["loss"] for log in trained.state.log_history if "loss" in log}
    return {"weights": crc, "losses": losses}


def names(folder: Path) -> list[str]:
    return sorted([path.name for path in folder.iterdir()])


def state_of(folder: Path) -> Any:
    """``trainer_state.json`` without times and places."""
    state = json.loads((folder / "trainer_state.json").read_text())
    state["best_model_checkpoint"] = Path(state["best_model_checkpoint"] or "").name
    for log in state["log_history"]:
        for key in [key for key in log if key.endswith(("runtime", "per_second"))]:
            del log[key]
    return state


class Stop(TrainerCallback):  # type: ignore[misc]
    """Calls a function after each save from a step on."""

    def __init__(self, step: int, stop: Callable[[], None]) -> None:
        self.step = step
        self.stop = stop

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= self.step:
            self.stop()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def straight(folder: Path) -> Any:
    made = trainer(ActorsnapTrainer, folder)
    made.train()
    return outcome(made) | {"folders": names(folder)}


def killed_before_the_commit(folder: Path) -> Any:
    def kill_in_the_middle() -> None:
        until = time.monotonic() + 30
        while time.monotonic() < until and not any((folder / "tmp-checkpoint-6").rglob("*.s*")):
            pass  # until the first object is there
        kill()

    trainer(
        ActorsnapTrainer, folder, width=512, options=SLOW, callbacks=[Stop(6, kill_in_the_middle)]
    ).train()


def killed_after_the_commit(folder: Path) -> Any:
    """The snapshot of step 6 is committed, and the folder not renamed yet."""

    class Killed(ActorsnapTrainer):
        def _publish(self, folder: str, state: str) -> None:
            if folder.endswith("-6"):
                kill()
            super()._publish(folder, state)

    trainer(Killed, folder).train()


def resumed(folder: Path, *, width: int = 16) -> Any:
    before = names(folder)
    last = Path(get_last_checkpoint(str(folder)) or "none").name
    made = trainer(ActorsnapTrainer, folder, width=width)
    made.train(resume_from_checkpoint=True)
    first = made._initial_global_step
    found = {"before": before, "last": last, "first": first, "folders": names(folder)}
    return outcome(made) | found


def resumed_wide(folder: Path) -> Any:
    return resumed(folder, width=512)


def straight_wide(folder: Path) -> Any:
    made = trainer(ActorsnapTrainer, folder, width=512)
    made.train()
    return outcome(made)


def half_written(folder: Path) -> Any:
    """Newer folders that are not whole: without commit, truncated, one of the Trainer's own, and
    one of which only the commit is missing."""
    trainer(ActorsnapTrainer, folder).train()
    good = folder / "checkpoint-6"
    for step in (9, 12):
        shutil.rmtree(folder / f"checkpoint-{step}")
    for step in (7, 8, 10):
        shutil.copytree(good, folder / f"checkpoint-{step}")
    (folder / "checkpoint-7" / "actorsnap.json").unlink()
    (folder / "checkpoint-7" / "trainer_state.json").unlink()
    [data, *_] = sorted((folder / "checkpoint-8").rglob("*.safetensors"))
    os.truncate(data, data.stat().st_size - 1)
    (folder / "checkpoint-9").mkdir()
    (folder / "checkpoint-9" / "model.safetensors").write_bytes(b"")
    (folder / "checkpoint-10" / "actorsnap.json").unlink()
    refused = {}
    for step in (7, 8, 9, 10, 11):  # the last one is not there
        made = trainer(ActorsnapTrainer, folder)
        try:
            made.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
        except UsageError as error:
            refused[str(step)] = str(error)
    made = trainer(ActorsnapTrainer, folder)
    made.train(resume_from_checkpoint=True)
    return outcome(made) | {"refused": refused, "first": made._initial_global_step}


def like_the_trainer(folder: Path) -> Any:
    """Rotation, best model, evaluations, callbacks with a state: with both trainers."""
    found = []
    for kind in (Trainer, ActorsnapTrainer):
        for limit in (1, 2):
            at = folder / f"{kind.__name__}-{limit}"
            made = trainer(
                kind,
                at,
                save_total_limit=limit,
                eval_strategy="steps",
                eval_steps=3,
                learning_rate=0.5,  # so that the last model is not the best
                metric_for_best_model="loss",
                load_best_model_at_end=True,
                callbacks=[EarlyStoppingCallback(early_stopping_patience=50)],
            )
            made.train()
            at_end = {name: state_of(at / name) for name in names(at)}
            found.append(outcome(made) | {"folders": at_end})
    return found


def save_only_model(folder: Path) -> Any:
    """Resumed with a new optimizer, by both trainers."""
    found = []
    for kind in (Trainer, ActorsnapTrainer):
        at = folder / kind.__name__
        trainer(kind, at, max_steps=6, save_only_model=True).train()
        made = trainer(kind, at, save_only_model=True)
        torch.manual_seed(1)
        made.train(resume_from_checkpoint=str(at / "checkpoint-6"))
        found.append(outcome(made))
    keys = sorted({path.split("/")[1] for path in Snapshot(at / "checkpoint-6").get_manifest()})
    return {"found": found, "keys": keys}


def from_the_trainer(folder: Path) -> Any:
    """Begun by the Trainer itself."""
    made = trainer(Trainer, folder)
    made.train()
    shutil.rmtree(folder / "checkpoint-12")
    shutil.rmtree(folder / "checkpoint-9")
    (folder / "checkpoint-12").mkdir()
    return resumed(folder) | {"stock": outcome(made)}


def scaler(folder: Path) -> Any:
    """The scale of a gradient scaler goes on."""
    for init_scale, resume in ((8.0, None), (2.0, True)):
        made = trainer(ActorsnapTrainer, folder, max_steps=6 if resume else 3)
        made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
        made.train(resume_from_checkpoint=resume)
    return {"scale": made.accelerator.scaler.get_scale()}


def on_sigterm(folder: Path) -> Any:
    """The Trainer's own save on SIGTERM: at once, at any step; then the training ends."""
    made = trainer(ActorsnapTrainer, folder, enable_jit_checkpoint=True)
    [jit] = [each for each in made.callback_handler.callbacks if hasattr(each, "jit_manager")]

    class Request(TrainerCallback):  # type: ignore[misc]
        # The next hook is the beginning of a step. In its middle, random numbers are already drawn.
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            jit.jit_manager.is_checkpoint_requested = state.global_step == 4

    made.add_callback(Request())
    made.train()
    stopped = made.state.global_step
    return resumed(folder) | {"stopped": stopped}


def joined(folder: Path) -> Any:
    """The model of two ranks, in one process."""
    made = trainer(ActorsnapTrainer, folder)
    made._load_from_checkpoint(str(folder / "checkpoint-12"))
    return outcome(made)


def failed_save(folder: Path) -> Any:
    """An error of the storage is raised by the next save; older checkpoints stay."""
    made = trainer(ActorsnapTrainer, folder, width=512, options=SLOW)

    def cancel() -> None:
        made._saving.pending.cancel()

    made.add_callback(Stop(6, cancel))
    try:
        made.train()
    except ActorSnapError as error:
        return {
            "error": type(error).__name__,
            "step": made.state.global_step,
            "folders": [name for name in names(folder) if name.startswith("checkpoint")],
        }
    return {}


def refused(folder: Path) -> Any:
    class Offline(ActorsnapTrainer):
        def init_hf_repo(self, token: str | None = None) -> None:
            self.hub_model_id = "none"

    found = []
    for arguments in (
        {"save_on_each_node": True},
        {"push_to_hub": True, "hub_strategy": "checkpoint", "hub_token": "none"},
    ):
        try:
            trainer(Offline, folder, **arguments)
        except UsageError as error:
            found.append(str(error))
    return found


if __name__ == "__main__":
    result = globals()[sys.argv[1]](Path(sys.argv[2]))
    if os.environ.get("RANK", "0") == "0":
        print("\n" + json.dumps(result), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
