# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of frameworks that gather all state into one dict, and let one process store it.

Such a dict is saved under its own keys, in the background, by this process alone: also in a job of
many ranks, it waits for no other rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from actorsnap import sync
from actorsnap.errors import ActorSnapError, NotASnapshot, describe
from actorsnap.format.manifest import Commit
from actorsnap.log import Log
from actorsnap.options import Options
from actorsnap.runtime.host import Script
from actorsnap.runtime.location import make_location, resolve_options
from actorsnap.runtime.maintenance import find_snapshots
from actorsnap.runtime.roots import is_damage
from actorsnap.runtime.script import run_sync
from actorsnap.runtime.source import Source
from actorsnap.runtime.verify import verify
from actorsnap.state.process_group import Group

logger = Log(__name__)

REPLACED = ".replaced"
"""Suffix of a file that a checkpoint replaces, until the checkpoint is committed."""

_FILES = (".ckpt", ".pt", ".pth")
"""Endings of files that ``torch.save`` wrote for a framework."""

_ALL = "all"


class Held:
    """Any state, as a stateful."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state_dict: Any) -> None:
        self.state = state_dict


def read_whole(snapshot: sync.Snapshot) -> dict[str, Any]:
    """Returns the states of a snapshot by key, as rank 0 sees them, in new CPU memory.

    Tensors that share memory, also those of several keys, do so again. Waits for no other rank.

    Raises:
        ActorSnapError: See ``Snapshot.restore``.
    """
    found = Held()
    everything = {_ALL: found}  # as one stateful: sharing ends at a key
    snapshot.restore(everything, rename=lambda path: f"{_ALL}/{path}", group=Group.of_one())
    states: dict[str, Any] = found.state
    return states


class Checkpoints:
    """Saves checkpoints in the background, one at a time, and removes old ones afterwards.

    A removal waits for the commit of the save in flight. If that fails, the old checkpoint stays.

    Args:
        storage_options, options: See ``actorsnap.Snapshot``.

    Attributes:
        pending: The latest save, until ``wait`` has seen its commit.
    """

    def __init__(
        self,
        *,
        storage_options: Mapping[str, Any] | None = None,
        options: Options | None = None,
    ) -> None:
        self.pending: sync.PendingSnapshot | None = None
        self._path = ""
        self._removals: list[str] = []
        self._storage_options = storage_options
        self._options = options

    def save(
        self, path: str | os.PathLike[str], checkpoint: Mapping[str, Any], *, step: object = None
    ) -> None:
        """Waits for the save before, copies ``checkpoint``, and returns.

        A snapshot at ``path`` is replaced, and stays valid until the commit. A local file there,
        such as an old checkpoint, is renamed until then. A symbolic link is replaced, not followed.

        Args:
            checkpoint: Any state by str key, see ``docs/concepts/values.md``.
            step: Noted if it is an integer of at least 0.

        Raises:
            UsageError: Some values cannot be saved; names all.
            ActorSnapError: The save before failed; then this one is not begun. Or see
                ``Snapshot.take``.
        """
        self.wait()
        self._path = os.fspath(path)
        _make_way(self._path)
        try:
            self.pending = sync.Snapshot.async_take(
                self._path,
                {key: Held(state) for key, state in checkpoint.items()},
                overwrite=True,
                step=step if type(step) is int and step >= 0 else None,
                storage_options=self._storage_options,
                options=self._options,
                group=Group.of_one(),
            )
        except Exception:
            _put_back(self._path)
            raise

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Deletes a checkpoint, once the save in flight is committed.

        Failures are logged, and training continues with less free space.
        """
        self._removals.append(os.fspath(path))
        if self.pending is None:
            self._make_removals()

    def wait(self) -> None:
        """Waits until the latest save is committed, and makes the removals.

        Raises:
            ActorSnapError: The save failed. Raised once; its removals are dropped.
        """
        if self.pending is not None:
            try:
                self.pending.wait()
            except ActorSnapError:
                self.pending = None
                self._removals.clear()
                _put_back(self._path)
                raise
            self.pending = None
            if os.path.isfile(self._path + REPLACED):
                os.remove(self._path + REPLACED)
        self._make_removals()

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Returns a checkpoint, with tensors in new CPU memory; waits for the save in flight.

        Args:
            path: Of a snapshot, or of another format in ``docs/migrate/index.md``.

        Raises:
            NotASnapshot: No checkpoint is at ``path``.
            ActorSnapError: The save in flight failed. Or see ``Snapshot.restore``.
        """
        self.wait()
        return read_checkpoint(path, storage_options=self._storage_options, options=self._options)

    def _make_removals(self) -> None:
        while self._removals:
            path = self._removals.pop(0)
            try:
                self._delete(path)
            except (ActorSnapError, OSError) as error:
                logger.warning("the checkpoint %s is not removed: %s", path, error)

    def _delete(self, path: str) -> None:
        if os.path.isfile(path + REPLACED):  # of a job that ended right after its commit
            os.remove(path + REPLACED)
        if os.path.islink(path) or os.path.isfile(path):
            os.remove(path)
            return
        snapshot = sync.Snapshot(path, storage_options=self._storage_options, options=self._options)
        snapshot.delete()


def read_checkpoint(
    path: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    options: Options | None = None,
) -> dict[str, Any]:
    """See ``Checkpoints.load``; waits for nothing."""
    name = os.fspath(path)
    try:
        return _read(name, storage_options, options)
    except NotASnapshot as error:
        if error.found not in ("absent", "unfinished") or not os.path.isfile(name + REPLACED):
            raise
    logger.warning("%s has no commit; %s is read, which it should replace", name, name + REPLACED)
    return _read(name + REPLACED, storage_options, options)


def latest(
    folder: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    options: Options | None = None,
) -> str | None:
    """Returns the path of the newest checkpoint in a folder that can be loaded; None without any.

    Passes over unfinished snapshots, and those that lack bytes, with a warning. In a local folder,
    files ending in ``.ckpt``, ``.pt`` or ``.pth`` count, by the time of their last change.

    Args:
        folder: A folder of checkpoints, or its URL.
        storage_options, options: See ``actorsnap.Snapshot``.

    Raises:
        StorageError: Reading failed.
    """
    url = os.fspath(folder)
    source = Source(make_location(url, storage_options), resolve_options(options))
    times = _times_of_files(url)
    snapshots: set[str] = set()
    for name, commit in run_sync(find_snapshots(source), name="latest").items():
        if isinstance(commit, Commit):
            snapshots.add(name)
            times[name] = datetime.fromisoformat(commit.created).timestamp()
        elif name not in times:
            found = "unfinished" if commit is None else f"damaged: {commit}"
            logger.warning("%s is skipped: it is %s", os.path.join(url, name), found)
    for name in sorted(times, key=times.__getitem__, reverse=True):
        path = os.path.join(url, name)
        if name not in snapshots:  # a file
            return path
        one = Source(make_location(path, storage_options), resolve_options(options))
        damage = run_sync(find_damage(one), name="latest")
        if damage == []:
            return path
        logger.warning(
            "%s is skipped: it is damaged: %s", path, "; ".join(map(describe, damage or ()))
        )
    return None


def find_damage(source: Source) -> Script[list[ActorSnapError] | None]:
    """Returns what a snapshot lacks, without reading its data; None if it was never committed.

    Raises:
        StorageError: Reading failed.
    """
    try:
        return [*(yield from verify(source, level="quick")).problems]
    except NotASnapshot:
        return None
    except ActorSnapError as error:
        if not is_damage(error):
            raise
        return [error]


def _read(
    path: str, storage_options: Mapping[str, Any] | None, options: Options | None
) -> dict[str, Any]:
    return read_whole(sync.Snapshot(path, storage_options=storage_options, options=options))


def _make_way(path: str) -> None:
    """Renames a file, and removes a link."""
    if os.path.islink(path):
        os.remove(path)
    elif os.path.isfile(path):
        os.replace(path, path + REPLACED)
        os.mkdir(path)  # programs that look for the name find it


def _put_back(path: str) -> None:
    """Undoes ``_make_way`` after a failed save, if that left nothing at the path."""
    if os.path.isfile(path + REPLACED):
        with suppress(OSError):  # ``read_checkpoint`` finds the file where it is, too
            if os.path.isdir(path):
                os.rmdir(path)
            os.replace(path + REPLACED, path)


def _times_of_files(folder: str) -> dict[str, float]:
    """Returns the seconds since the epoch of files' last changes, by the name to load."""
    times: dict[str, float] = {}
    if os.path.isdir(folder):
        with os.scandir(folder) as entries:
            for entry in entries:
                name = entry.name.removesuffix(REPLACED)
                if entry.is_file() and name.endswith(_FILES):
                    times[name] = entry.stat().st_mtime
    return times
