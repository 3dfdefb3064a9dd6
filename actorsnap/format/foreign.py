"""Tells, from the keys alone, what lies at a URL that has no commit object."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence

from actorsnap.format.layout import Attempt
from actorsnap.format.manifest import COMMIT_KEY, COMMIT_KEYS, OLDER_COMMIT_KEY

__all__ = ["attempts_in", "recognize"]

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


def attempts_in(keys: Iterable[str]) -> dict[str, int]:
    """Returns the attempts among ``keys``, by name, with the number of their objects."""
    attempts: dict[str, int] = {}
    for key in keys:
        folder = key.partition("/")[0]
        if folder in attempts or Attempt.parse(folder) is not None:
            attempts[folder] = attempts.get(folder, 0) + 1
    return dict(sorted(attempts.items()))


def recognize(keys: Sequence[str], *, url: str, complete: Collection[str] = ()) -> tuple[str, str]:
    """Returns what is there.

    Args:
        keys: Some or all object keys under the URL.
        url: Named in the advice.
        complete: The attempts among them that lack nothing but a commit object.

    Returns:
        ``NotASnapshot.found``, and a sentence for people with what to do next.
    """
    if not keys:
        return "absent", "nothing is there; check the path"
    attempts = attempts_in(keys)
    if attempts:
        return "unfinished", _unfinished(attempts, url, complete)
    places = [key.rpartition("/") for key in keys]
    nested = {at for at, _, name in places if name in COMMIT_KEYS and at and "/" not in at}
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


def _unfinished(attempts: Mapping[str, int], url: str, complete: Collection[str]) -> str:
    def listed(names: Iterable[str]) -> str:
        return ", ".join([f"{name} ({attempts[name]} objects)" for name in names])

    if not complete:
        return (
            f"only unfinished attempts are there, no commit object: {listed(attempts)}. Restore "
            "an older snapshot; the next take to this path, or `actorsnap rm --garbage`, cleans up"
        )
    return (
        f"there is no commit object ({COMMIT_KEY}; {OLDER_COMMIT_KEY} in older snapshots), but a "
        f"complete attempt: {listed(sorted(complete))}. Either the save ended just before its "
        "commit, or a copy left the commit object out: `cp -r SRC/* DST` skips "
        f"{OLDER_COMMIT_KEY}. Copy that object, too, or run `actorsnap recover {shlex.quote(url)}`"
    )
