"""Tells, from the keys alone, what lies at a URL that has no commit object."""

from __future__ import annotations

from collections.abc import Sequence

from actorsnap.format.layout import Attempt, manifest_key

__all__ = ["recognize"]

_SIGNS: tuple[tuple[str, str], ...] = (
    (".metadata", "a torch.distributed.checkpoint (DCP) checkpoint"),
    (".snapshot_metadata", "a torchsnapshot snapshot"),
    ("model.safetensors.index.json", "a Hugging Face checkpoint"),
    ("model.safetensors", "a Hugging Face checkpoint"),
    ("pytorch_model.bin", "a Hugging Face checkpoint"),
    ("_CHECKPOINT_METADATA", "an Orbax checkpoint"),
    ("latest_checkpointed_iteration.txt", "a Megatron-LM checkpoint folder"),
    ("checkpoint", "a TensorFlow checkpoint"),
)


def recognize(keys: Sequence[str]) -> tuple[str, str]:
    """Says what is there.

    Args:
        keys: Some or all object keys under the URL.

    Returns:
        ``NotASnapshot.found``, and a sentence for people with what to do next.
    """
    if not keys:
        return "absent", "nothing is there; check the path"
    attempts: dict[str, int] = {}
    nested = set()
    for key in keys:
        parts = key.split("/")
        if Attempt.parse(parts[0]) is not None:
            attempts[parts[0]] = attempts.get(parts[0], 0) + 1
        elif len(parts) == 2 and parts[1] == ".actorsnap":
            nested.add(parts[0])
    if attempts:
        listed = ", ".join(f"{name} ({n} objects)" for name, n in sorted(attempts.items()))
        if not {manifest_key(name, 0) for name in attempts}.isdisjoint(keys):
            listed += ". If the commit object was lost, `actorsnap recover` writes it again"
        return (
            "unfinished",
            f"only unfinished attempts are there, no commit: {listed}. Restore an older "
            "snapshot; the next take to this path, or `actorsnap rm --garbage`, cleans up",
        )
    present = set(keys)
    for sign, what in _SIGNS:
        if sign in present:
            return "foreign", f"this is {what}, not an actorsnap snapshot"
    if nested:
        some = ", ".join(sorted(nested)[:5])
        return "unknown", f"the snapshots are one level below: {some}"
    for key in keys:
        if key.endswith((".pt", ".pth", ".ckpt", ".distcp", ".bin", ".safetensors")):
            return (
                "foreign",
                f"there is no commit object, but {key!r}, which another program wrote",
            )
    return "unknown", f"there is no commit object, but other files, for example {keys[0]!r}"
