# SPDX-License-Identifier: Apache-2.0
"""torchtitan's checkpoint manager for TorchFT, over snapshots.

See ``docs/integrations/torchtitan.md``.
"""

from __future__ import annotations

from dataclasses import dataclass

from actorsnap.interop.torchtitan import OverSnapshots

try:
    from torchtitan.experiments.torchft.checkpoint import (
        TorchFTCheckpointManager as _TorchFTManager,
    )
except ImportError as error:
    raise ImportError(
        "actorsnap.interop.torchft needs torchtitan 0.3 or newer, with its experiment torchft: "
        "pip install 'actorsnap[torchtitan]'"
    ) from (None if error.name == "torchtitan" else error)

__all__ = ["TorchFTCheckpointManager"]


class TorchFTCheckpointManager(OverSnapshots, _TorchFTManager):  # type: ignore[misc]
    """torchtitan's manager for TorchFT, with snapshots in place of DCP checkpoints.

    The ranks of a replica save together; the replica with ``participating_rank() == 0`` saves the
    model, every replica its data loader.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_TorchFTManager.Config):  # type: ignore[misc]
        """torchtitan's options."""
