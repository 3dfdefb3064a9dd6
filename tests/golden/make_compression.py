# SPDX-License-Identifier: Apache-2.0
"""Makes ``tests/golden/compression``: format version 1 with the feature of that name.

A chunk of several frames, one that is stored as it is, one that has leaves of several item sizes,
and a frame that does not shrink among others that do. As ``make_v1.py``: run once, and neither
this file nor the snapshot is ever changed. (Releases of zstd need not compress to the same bytes;
all must read them.)

``python -m tests.golden.make_compression FOLDER`` makes one again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from actorsnap import Options, StateDict
from actorsnap.format.layout import Attempt
from actorsnap.runtime import local_engine
from actorsnap.runtime.resources import Attempts
from actorsnap.sync import Snapshot

MIB = 1 << 20


def app_state() -> dict[str, StateDict]:
    """What the snapshot holds; built anew by each call."""
    noise = np.random.default_rng(15).integers(0, 256, MIB // 4, dtype=np.uint8)
    steps = torch.arange(MIB // 2, dtype=torch.float32)
    return {
        "leaves": StateDict(
            complex=torch.complex(steps[:999].double(), steps[:999].double() / 3),
            double=steps[:777].double(),
            float=steps,
            half=(steps[: MIB // 4] / 1000).to(torch.bfloat16),
            bytes=(steps[:12345] % 7).to(torch.uint8),
            empty=torch.empty(0, 3),
            number=15,
        ),
        # Behind a header of 4096 bytes the second one begins with a frame.
        "tail": StateDict(
            a=torch.zeros(MIB - 4096, dtype=torch.uint8), b=torch.from_numpy(noise[:10_000].copy())
        ),
        "noise": StateDict(noise=torch.from_numpy(noise)),
    }


def make(folder: Path) -> None:
    """Takes the snapshot."""
    attempt = Attempt(created_s=1_767_225_600, host="00000000", pid=1, nonce="00000000")
    with (
        mock.patch.object(Attempts, "new", return_value=attempt),
        mock.patch.object(local_engine, "utc", return_value="2026-01-01T00:00:00.000000Z"),
    ):
        options = Options(fsync=False, chunk_bytes=2 << 20, compression="zstd:6")
        Snapshot.take(folder, app_state(), options=options)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
