# SPDX-License-Identifier: Apache-2.0
"""`make dist` runs it in an environment that has the wheel and no extra."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

import actorsnap
from actorsnap import Options, Snapshot, StateDict, UsageError, sync
from actorsnap.manager import every
from actorsnap.manager.sync import CheckpointManager

ABSENT = {
    "s3://bucket/x": "pip install 'actorsnap[s3]'",
    "gs://bucket/x": "pip install 'actorsnap[gcs]'",
    "abcd://x": "fsspec, which is installed, does not know it either",  # torch requires fsspec
}


def main(folder: str) -> None:
    assert Path(sys.prefix) in Path(actorsnap.__file__).parents, actorsnap.__file__
    assert metadata.version("actorsnap") == actorsnap.__version__
    assert metadata.files("actorsnap") is not None
    assert (Path(actorsnap.__file__).parent / "py.typed").exists()
    save_and_restore(folder)
    asyncio.run(save_and_restore_async(folder))
    manage(f"{folder}/run")
    miss_extras(folder)
    run_program(folder)
    print(f"actorsnap {actorsnap.__version__}: a plain install saves and restores")
    print("installed:", *sorted({each.name for each in metadata.distributions()}))


def state_of(seed: int) -> dict[str, object]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(30, 20)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(30)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "progress": StateDict(step=seed)}


def weight_of(state: dict[str, object]) -> torch.Tensor:
    model = state["model"]
    assert isinstance(model, torch.nn.Linear)
    return model.weight.detach()


def save_and_restore(folder: str) -> None:
    saved, other = state_of(1), state_of(2)
    snapshot = sync.Snapshot.take(f"{folder}/a", saved, step=1)
    sync.Snapshot.async_take(f"{folder}/b", other).wait()
    snapshot.restore(other)
    assert torch.equal(weight_of(other), weight_of(saved))
    assert snapshot.verify("full").ok
    assert snapshot.read_object("progress/step") == 1


async def save_and_restore_async(folder: str) -> None:
    saved, other = state_of(3), state_of(4)
    pending = await Snapshot.async_take(f"{folder}/c", saved, options=Options(offload="process"))
    await (await pending.wait()).restore(other)
    assert torch.equal(weight_of(other), weight_of(saved))


def manage(root: str) -> None:
    with CheckpointManager(root, state_of(5), save=every.steps(1)) as manager:
        manager.maybe_save(0)
        manager.wait()
        assert manager.restore_latest() is not None


def miss_extras(folder: str) -> None:
    for url, remedy in ABSENT.items():
        text = refusal_of(sync.Snapshot(url).get_manifest)
        assert remedy in text, text
        assert "\n" not in text, text
    options = Options(compression="zstd")
    take = partial(sync.Snapshot.take, f"{folder}/z", state_of(6), options=options)
    text = refusal_of(take)
    assert "pip install 'actorsnap[zstd]'" in text, text


def refusal_of(call: Callable[[], object]) -> str:
    try:
        call()
    except UsageError as error:
        return str(error)
    raise AssertionError("an extra is installed")


def run_program(folder: str) -> None:
    program = Path(sys.executable).with_name("actorsnap")
    done = subprocess.run(
        [program, "ls", folder], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 4, done
    assert done.stderr == "error: the command needs typer: pip install 'actorsnap[cli]'\n", done


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
