# SPDX-License-Identifier: Apache-2.0
"""Recognizes data without a commit object: from the keys, the URL or a file's head."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence

from actorsnap.format.layout import Attempt
from actorsnap.format.manifest import COMMIT_KEY, COMMIT_KEYS

HEAD_BYTES = 512
"""Bytes that ``recognize_file`` needs."""

CONTAINS_SNAPSHOTS = "this folder contains snapshots. Open one of them, such as "
"""Beginning of what ``recognize`` returns for a folder of snapshots."""

_SIGNS: tuple[tuple[str, str, str], ...] = (
    (
        ".metadata",
        "a torch.distributed.checkpoint (DCP) checkpoint",
        "torch.distributed.checkpoint.load",
    ),
    (".snapshot_metadata", "a torchsnapshot snapshot", "torchsnapshot.Snapshot.restore"),
    ("model.safetensors.index.json", "a Hugging Face checkpoint", "from_pretrained"),
    ("model.safetensors", "a Hugging Face checkpoint", "from_pretrained"),
    ("pytorch_model.bin", "a Hugging Face checkpoint", "from_pretrained"),
    ("_CHECKPOINT_METADATA", "an Orbax checkpoint", "orbax.checkpoint"),
    ("latest_checkpointed_iteration.txt", "a Megatron-LM checkpoint folder", "Megatron-LM"),
    ("checkpoint", "a TensorFlow checkpoint", "tf.train.load_checkpoint"),
)

_READERS: Mapping[str, str] = {
    ".pt": "torch.load",
    ".pth": "torch.load",
    ".ckpt": "torch.load",
    ".bin": "torch.load",
    ".safetensors": "safetensors.torch.load_file",
}
"""Suffix of another program's file -> its reader."""

_NUMBER = "(?:0|[1-9][0-9]*)"
_OWN = re.compile(
    rf"(?:.*/)?(?:manifest/{_NUMBER}\.json|{_NUMBER}-{_NUMBER}\.(?:safetensors|chunks/[0-9]+))"
)
"""Keys of rank manifests and data objects, below any folder."""

_MAX_NAMED = 5

_LEGACY_MAGIC = re.compile(
    rb"\x80[\x02-\x05](?:\x95.{8})?\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19\.", re.DOTALL
)


def attempts_in(keys: Iterable[str]) -> dict[str, int]:
    """Returns the number of objects of each attempt among ``keys``."""
    attempts: dict[str, int] = {}
    for key in keys:
        folder = key.partition("/")[0]
        if folder in attempts or Attempt.parse(folder) is not None:
            attempts[folder] = attempts.get(folder, 0) + 1
    return dict(sorted(attempts.items()))


def is_of_snapshot(key: str) -> bool:
    """Returns whether a snapshot's writer can have stored this key below its folder."""
    return key in COMMIT_KEYS or Attempt.parse(key.partition("/")[0]) is not None


def recognize(keys: Sequence[str], *, url: str, complete: Collection[str] = ()) -> tuple[str, str]:
    """Returns ``NotASnapshot.found``, and a sentence with the user's next step.

    Args:
        keys: Some or all object keys under the URL.
        complete: The attempts that lack only a commit object.
    """
    inside = _snapshot_around(url)
    if inside:
        return "part", f"this is inside the snapshot {inside}: open that"
    if not keys:
        return "absent", "no files are there; check the path"
    attempts = attempts_in(keys)
    if attempts:
        return "unfinished", _unfinished(attempts, url, complete)
    snapshots: dict[str, None] = {}
    unfinished: dict[str, None] = {}
    for key in keys:
        folder, _, name = key.rpartition("/")
        if folder and name in COMMIT_KEYS:
            snapshots[folder] = None
        elif inside := _snapshot_around(key):
            unfinished[inside] = None
    present = set(keys)
    for sign, what, reader in _SIGNS:
        if sign in present:
            return "foreign", f"this is {what}, not an actorsnap snapshot: {reader} reads it"
    if snapshots:
        return (
            "unknown",
            f"{CONTAINS_SNAPSHOTS}{_some(snapshots)}",
        )
    if unfinished:
        return "unfinished", f"only unfinished attempts are there, in {_some(unfinished)}"
    if any(map(_OWN.fullmatch, keys)):
        return (
            "part",
            f"these files are a part of an actorsnap snapshot, without its {COMMIT_KEY}: open the "
            "folder that they came from, or copy all of it with `actorsnap cp`",
        )
    checkpoints = {key.rpartition("/")[0]: None for key in keys if key.endswith("/.metadata")}
    if checkpoints:
        return (
            "foreign",
            "this folder contains checkpoints of torch.distributed.checkpoint (DCP). Open one of "
            f"them, such as {_some(checkpoints)}",
        )
    for key in keys:
        if key.endswith(".distcp"):
            return (
                "foreign",
                f"{key!r} is of torch.distributed.checkpoint (DCP), and the .metadata that names "
                "it is missing: the save did not end, or a copy left it out",
            )
        reader = _READERS.get(f".{key.rpartition('.')[2]}", "")
        if reader:
            return (
                "foreign",
                f"there is no commit object, but {key!r}, which another program wrote: open the "
                f"file by its own path; or use {reader}",
            )
    return "unknown", f"there is no commit object, but other files, for example {keys[0]!r}"


def recognize_file(head: bytes, url: str) -> tuple[str, str]:
    """``recognize`` for a file; ``head`` is its first ``HEAD_BYTES``, or all of it."""
    inside = _snapshot_around(url)
    if inside:
        return "part", f"this file is inside the snapshot {inside}: open that"
    folder, _, name = url.rpartition("/")
    if name in COMMIT_KEYS and head.startswith(b'{"crc32c":'):
        return "part", f"this file is the commit object of the snapshot {folder}: open that"
    if name == ".metadata" or name.endswith(".distcp"):
        return "part", f"this file is a part of the DCP folder {folder}: open that"
    if head.startswith(b"PK\x03\x04") and b"/data.pkl" in head[:256]:
        return "foreign", "this is a file that torch.save wrote, not a snapshot"
    if is_legacy_file(head):
        return "foreign", "this is a file that an old torch.save wrote, not a snapshot"
    if head[8:10] == b'{"' and 2 <= int.from_bytes(head[:8], "little") < 1 << 32:
        return "foreign", "this is a safetensors file, not a snapshot"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "foreign", "this is a pickle file: pickle.load reads it, if you trust it"
    if not head and url.endswith(tuple(_READERS)):
        return "unknown", "this file is empty: a save or a copy did not end; use another"
    if head.startswith(b"version https://git-lfs"):
        return "unknown", "this is a pointer of Git LFS, not the file: run `git lfs pull` there"
    if url.endswith(tuple(_READERS)):
        return (
            "unknown",
            "this file is of no format that actorsnap reads, whatever its name: it is damaged, a "
            "download went wrong, or another program wrote it",
        )
    return "unknown", "this is a file; a snapshot is a folder, and so is a run: check the path"


def is_legacy_file(head: bytes) -> bool:
    """Whether a file is of ``torch.save`` from before zip archives, by any pickle protocol."""
    return _LEGACY_MAGIC.match(head) is not None


def _snapshot_around(path: str) -> str:
    """Returns ``path`` before the first attempt's name, or an empty string."""
    parts = path.split("/")
    for index, part in enumerate(parts):
        if Attempt.parse(part) is not None:
            return "/".join(parts[:index])
    return ""


def _some(names: Mapping[str, None]) -> str:
    shown = ", ".join(sorted(names)[:_MAX_NAMED])
    return f"{shown}, ..." if len(names) > _MAX_NAMED else shown


def _unfinished(attempts: Mapping[str, int], url: str, complete: Collection[str]) -> str:
    def listed(names: Iterable[str]) -> str:
        return ", ".join(
            [f"{n} ({attempts[n]} object{'s' if attempts[n] != 1 else ''})" for n in names]
        )

    if not complete:
        return (
            f"only unfinished attempts are there, no commit object: {listed(attempts)}. If a save "
            "to this path is in progress, wait for it. Otherwise, restore an older snapshot; the "
            "next take to this path, or `actorsnap rm --garbage`, cleans up"
        )
    return (
        f"there is no commit object ({COMMIT_KEY}), but a complete attempt: "
        f"{listed(sorted(complete))}. Either the save ended just before its commit, or a copy "
        f"left {COMMIT_KEY} out. Copy that object, too, or run "
        f"`actorsnap recover {shlex.quote(url)}`"
    )
