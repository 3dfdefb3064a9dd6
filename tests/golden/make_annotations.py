# SPDX-License-Identifier: Apache-2.0
"""Makes ``tests/golden/annotations``: format version 1 with the feature of that name.

A parameter that is strided as ``channels_last`` and has an attribute, an optimizer, a step and
metadata. As ``make_v1.py``: run once, and neither this file nor the snapshot is ever changed.

``python -m tests.golden.make_annotations FOLDER`` makes one again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from actorsnap import Options
from actorsnap.format.layout import Attempt
from actorsnap.runtime import local_engine
from actorsnap.runtime.resources import Attempts
from actorsnap.sync import Snapshot

STEP = 70
METADATA = {"loss": 0.25}


def app_state() -> dict[str, Any]:
    """Returns what the snapshot holds, made anew by each call."""
    model = nn.Conv2d(3, 2, 2, bias=False)
    weight = torch.arange(24, dtype=torch.float32).view(2, 3, 2, 2)
    model.weight = nn.Parameter(weight.to(memory_format=torch.channels_last))
    model.weight.partition_dim = 1  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    return {"model": model, "optim": optimizer}


def make(folder: Path) -> None:
    """Takes the snapshot."""
    attempt = Attempt(created_s=1_767_225_600, host="00000000", pid=1, nonce="00000000")
    with (
        mock.patch.object(Attempts, "new", return_value=attempt),
        mock.patch.object(local_engine, "utc", return_value="2026-01-01T00:00:00.000000Z"),
    ):
        options = Options(fsync=False)
        Snapshot.take(folder, app_state(), step=STEP, metadata=METADATA, options=options)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
