# SPDX-License-Identifier: Apache-2.0
"""Ray Train: two workers that save snapshots together; one is killed, and both resume.

    pip install 'actorsnap[ray]'
    python examples/ray_train.py

starts a local cluster, and trains twice: straight, and with a worker that sends itself SIGKILL when
a checkpoint was reported. Ray then starts both workers again. The second run must end with the loss
and the weights of the first, bit for bit. Exit code 0 if it does, 1 if not.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def train(config: dict[str, Any]) -> None:
    """On each worker."""
    import ray.train

    from actorsnap.interop.ray import ActorsnapReporter

    torch.set_num_threads(1)
    torch.manual_seed(7)
    rank = ray.train.get_context().get_world_rank()
    layers = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
    model = nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    app_state = {"model": model, "optimizer": optimizer}

    reporter = ActorsnapReporter()
    restored = reporter.restore(app_state) or 0
    for step in range(restored + 1, config["num_steps"] + 1):
        # A function of the step and the rank, so that runs can be compared bit for bit.
        inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss: Tensor = (model(inputs) - inputs.sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            end = {"loss": loss.item(), "weights": fingerprint(model), "restored": restored}
            reporter.report(end, app_state, step=step)
        if config["kill_at"] == step and rank == 1 and not restored:
            ray.train.get_all_reported_checkpoints()  # waits for those above
            os.kill(os.getpid(), signal.SIGKILL)
    reporter.wait()


def fingerprint(model: nn.Module) -> int:
    """CRC-32 of all weights."""
    crc = 0
    for parameter in model.parameters():
        crc = zlib.crc32(parameter.detach().numpy().data, crc)
    return crc


def run(name: str, folder: str, num_steps: int, kill_at: int | None = None) -> dict[str, Any]:
    """One run of Ray Train; returns the metrics at its end."""
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        train,
        train_loop_config={"num_steps": num_steps, "kill_at": kill_at},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=folder,
            failure_config=ray.train.FailureConfig(max_failures=1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    metrics: dict[str, Any] = trainer.fit().metrics
    kept = sorted(path.name for path in Path(folder, name).iterdir() if path.is_dir())
    print(f"{name}: {metrics}, kept {', '.join(kept)}", flush=True)
    return metrics


def main() -> int:
    import ray

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="actorsnap-demo-") as folder:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        try:
            straight = run("straight", folder, args.steps)
            killed = run("killed", folder, args.steps, kill_at=args.steps // 2 + 2)
        finally:
            ray.shutdown()
    is_equal = all(straight[name] == killed[name] for name in ("loss", "weights"))
    print(f"straight and killed are {'equal, bit for bit' if is_equal else 'DIFFERENT'}")
    return 0 if is_equal and killed["restored"] else 1


if __name__ == "__main__":
    sys.exit(main())
