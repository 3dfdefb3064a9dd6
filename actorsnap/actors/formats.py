# SPDX-License-Identifier: Apache-2.0
"""Finds the reader of a checkpoint that another program wrote, and what it must return.

A reader is an async function, registered in the entry-point group ``actorsnap.formats``. It looks
at a ``Place`` and returns the index of what is there, in the form of our rank manifests, with byte
ranges of the foreign files; or None, if that is not its format. It reads small parts of the files
and never the tensors. See ``docs/decisions/0024-readers.md``.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from hashlib import blake2b
from importlib import import_module, metadata
from typing import Any, TypeAlias

import msgspec

from actorsnap.errors import FormatError, ObjectNotFound
from actorsnap.format.manifest import Commit, RankManifest
from actorsnap.format.tables import check_disjoint, check_foreign_manifest
from actorsnap.log import Log
from actorsnap.storage.base import ObjectInfo, RunBlocking, Storage, for_each
from actorsnap.storage.joined import JoinedStorage, KeyRange
from actorsnap.storage.unpacked import Packed, UnpackedStorage
from actorsnap.storage.wrapper import unwrapped

logger = Log(__name__)

ENTRY_POINT_GROUP = "actorsnap.formats"

_BUILT_IN = {
    "dcp": "actorsnap.interop.formats.dcp_folders:read",
    "torchsnapshot": "actorsnap.interop.formats.torchsnapshot_folders:read",
    "safetensors": "actorsnap.interop.formats.safetensors_files:read",
    "torch": "actorsnap.interop.formats.torch_files:read",
}
"""Readers by format, in the order in which they are tried. Works in an uninstalled source tree."""

AT_ONCE = 16
"""Small reads at a time."""

MAX_LISTED = 10_000
"""Keys of a folder that are listed. Beyond them, files are found by name only."""

MAX_INDEX_BYTES = 2 << 30
"""Largest size of a file that is read whole, in bytes."""

NOT_OURS = 0
"""``Commit.version`` of other formats; their ``attempt`` is ``<format>-<digest>``, no folder."""


@dataclass(eq=False, repr=False)
class Place:
    """The files at a URL without a snapshot.

    Attributes:
        storage: Storage of the folder; of the file's folder, if the URL is one of a file.
        file: The file's key; empty for a folder.
        head: The file's first ``HEAD_BYTES``; empty for a folder.
        listed: The folder's first files, by key; or the file.
        allow_pickle: See ``Options``. Without it a reader executes nothing that files name.
    """

    storage: Storage
    run_blocking: RunBlocking
    listed: Mapping[str, ObjectInfo]
    file: str = ""
    head: bytes = b""
    allow_pickle: bool = False
    _used: dict[str, ObjectInfo] = field(default_factory=dict)

    async def find(self, key: str) -> ObjectInfo | None:
        """Returns size and time of a file, if it exists.

        A change of the file from now on is noticed: the call that reads it starts over.
        """
        info = self._used.get(key) or self.listed.get(key)
        # Listings are bounded, and those of a file system leave symbolic links out.
        is_partial = len(self.listed) >= MAX_LISTED
        if info is None and (is_partial or self.storage.capabilities.has_blocking_io):
            try:
                info = await self.storage.stat(key)
            except ObjectNotFound:
                return None
        if info is not None:
            self._used[key] = info
        return info

    async def need(self, key: str, why: str) -> ObjectInfo:
        """``find`` for a file that must exist; ``why`` ends the error ("..., which <why>").

        Raises:
            FormatError: There is no such file.
        """
        info = await self.find(key)
        if info is None:
            detail = f"the file is missing, which {why}: copy the checkpoint again, or use another"
            raise FormatError(key=key, detail=detail)
        return info

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Returns bytes of a file that ``find`` has found; see ``Storage.get``.

        Raises:
            FormatError: All of a file is wanted, and no index is so large.
        """
        assert key in self._used, f"{key!r} was read before it was looked for"
        if stop is None and self._used[key].size - start > MAX_INDEX_BYTES:
            detail = f"it has {self._used[key].size} bytes, which no index has"
            raise FormatError(key=key, detail=detail)
        return await self.storage.get(key, start, stop)

    async def get_all(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Returns many small ranges of files, given as key, start and stop, in order."""
        storage = self.storage
        found: dict[int, bytes] = {}

        def read(number: int, key: str, start: int, stop: int) -> None:
            data = bytearray(stop - start)
            storage.read_into_blocking(key, start, [[memoryview(data)]])
            found[number] = bytes(data)

        def read_all() -> None:
            for number, place in enumerate(ranges):
                read(number, *place)

        async def get(number: int) -> None:
            found[number] = await self.get(*ranges[number])

        if storage.capabilities.has_blocking_io:  # such reads take less than a switch of threads
            await self.run_blocking(read_all)
        else:
            await for_each(range(len(ranges)), get, at_once=AT_ONCE)
        return [found[number] for number in range(len(ranges))]

    def path_of(self, key: str) -> str:
        """Returns a file's path on this machine, for messages; of an object store: its name."""
        local = unwrapped(self.storage).capabilities.has_blocking_io
        return f"{self.storage.url}/{key}" if local else key.rpartition("/")[2]

    @property
    def used(self) -> Mapping[str, ObjectInfo]:
        return self._used


class Foreign(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint of another format, as its reader describes it.

    Attributes:
        format: Name of the format, for messages.
        manifests: In rank order, from 0 on. Keys of objects are those of ``Place.storage``; headers
            have 0 bytes; there are no checksums. ``attempt`` has no meaning.
        metadata: See ``Snapshot.metadata``; any JSON object.
        step: Training step, if the files record it.
        joined: Objects of the manifests that consist of pieces of files.
        packed: Which of these are compressed. Their sizes in the manifests are ``Packed.size``.
    """

    format: str
    manifests: tuple[RankManifest, ...]
    joined: Mapping[str, tuple[KeyRange, ...]] = {}
    packed: Mapping[str, Packed] = {}
    metadata: dict[str, Any] = {}
    step: int | None = None


def format_of(commit: Commit) -> str:
    """Returns the name of the format that a commit represents, for messages."""
    if commit.version == NOT_OURS:
        return commit.attempt.rpartition("-")[0]
    return f"format {commit.version}"


class OpenForeign(msgspec.Struct, frozen=True, kw_only=True):
    """A checked ``Foreign``.

    Attributes:
        commit: Substitute for a commit object.
        files: All that it consists of, as they were found.
        file: See ``Place``.
    """

    commit: Commit
    manifests: tuple[RankManifest, ...]
    files: Mapping[str, ObjectInfo]
    file: str
    joined: Mapping[str, tuple[KeyRange, ...]]
    packed: Mapping[str, Packed]

    def over(self, storage: Storage, run_blocking: RunBlocking) -> Storage:
        """Returns the storage of the manifests' objects.

        If there are ``packed`` ones, it must be closed: it makes temporary files.
        """
        if self.joined:
            storage = JoinedStorage(storage, self.joined)
        return UnpackedStorage(storage, self.packed, run_blocking) if self.packed else storage

    def is_still(self, place: Place) -> bool:
        """Whether nothing at the place has changed since, as far as its listing shows."""
        return place.file == self.file and all(
            [info.modified_s and place.listed.get(key) == info for key, info in self.files.items()]
        )

    async def has_changed(self, storage: Storage) -> bool:
        """Whether a file has another size or time than it had, or is gone."""
        # A listing of an object store has times of another precision than a request for one.
        slack_s = 0.0 if unwrapped(storage).capabilities.has_blocking_io else 1.0
        changed: list[str] = []

        async def look(key: str) -> None:
            if changed:
                return
            before, now = self.files[key], await _stat(storage, key)
            if (
                now is None
                or now.size != before.size
                or abs(now.modified_s - before.modified_s) > slack_s
            ):
                changed.append(key)

        await for_each(self.files, look, at_once=AT_ONCE)
        return bool(changed)


Reader: TypeAlias = Callable[[Place], Awaitable[Foreign | None]]


async def open_foreign(place: Place) -> OpenForeign | None:
    """Opens a place with the first reader that recognizes it; None if no reader does.

    Raises:
        FormatError: The format is known, but the files are damaged, or a reader refuses them.
        StorageError: Reading failed.
    """
    for name, value in (await place.run_blocking(_readers)).items():
        may_be = _SIGNS.get(name)
        if may_be is not None and not await may_be(place):
            continue
        reader = await place.run_blocking(_load, name, value)
        found = None if reader is None else await reader(place)
        if found is not None:
            logger.debug("%s: a checkpoint of the format %s", place.storage.url, name)
            return await place.run_blocking(_checked, found, place)
    return None


def _checked(found: Foreign, place: Place) -> OpenForeign:
    attempt = f"{found.format}-{_digest(found)}"
    manifests = tuple([msgspec.structs.replace(m, attempt=attempt) for m in found.manifests])
    for rank, manifest in enumerate(manifests):
        if manifest.rank != rank:
            raise FormatError(key=f"rank {rank}", detail=f"the reader returned {manifest.rank}")
        check_foreign_manifest(manifest)
    pieces = {
        key: [(piece.key, piece.start, piece.stop) for piece in pieces]
        for key, pieces in found.joined.items()
    }
    check_disjoint(manifests, pieces)
    newest_s = max([info.modified_s for info in place.used.values()], default=0.0)
    commit = Commit(
        version=NOT_OURS,
        world_size=len(manifests),
        attempt=attempt,
        created=f"{datetime.fromtimestamp(newest_s, UTC):%Y-%m-%dT%H:%M:%S.%fZ}",
        step=found.step,
        metadata=found.metadata,
    )
    return OpenForeign(
        commit=commit,
        manifests=manifests,
        files=dict(place.used),
        file=place.file,
        joined=found.joined,
        packed=found.packed,
    )


def _digest(found: Foreign) -> str:
    """Returns a name for the content of an index: ranks compare it."""
    # Times differ between copies of a file.
    try:
        encoded = msgspec.msgpack.encode(
            (found.manifests, found.joined, found.packed), enc_hook=repr
        )
    except OverflowError as error:
        detail = "it has a number of more than 64 bits among its shapes"
        raise FormatError(key=f"the index of {found.format}", detail=detail) from error
    return blake2b(encoded, digest_size=8).hexdigest()


async def _stat(storage: Storage, key: str) -> ObjectInfo | None:
    try:
        return await storage.stat(key)
    except ObjectNotFound:
        return None


@cache
def _readers() -> Mapping[str, str]:
    """Returns the places of the readers by name: ours, then other packages'. Blocks."""
    values = dict(_BUILT_IN)
    for point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        values.setdefault(point.name, point.value)
    return values


@cache
def _load(name: str, value: str) -> Reader | None:
    """Imports a reader; logs why it cannot be imported. Blocks."""
    module, _, attribute = value.partition(":")
    try:
        reader: Reader = getattr(import_module(module.strip()), attribute.strip())
    except Exception:
        # An import may raise anything, and a broken package must not break the other formats.
        logger.warning(
            "the entry point %r of the format %r cannot be loaded: repair or uninstall it",
            value,
            name,
            exc_info=True,
        )
        return None
    return reader


# Readers that import torch, which takes seconds, are imported only for what may be theirs.


async def _may_be_dcp(place: Place) -> bool:
    if place.file:
        return False
    return await place.find(".metadata") is not None or any(
        map(_METADATA_OF_RANK.fullmatch, place.listed)
    )


async def _may_be_torchsnapshot(place: Place) -> bool:
    return not place.file and await place.find(".snapshot_metadata") is not None


async def _may_be_torch(place: Place) -> bool:
    return bool(place.file) or await place.find("pytorch_model.bin") is not None


_METADATA_OF_RANK = re.compile(r"__[0-9]+\.metadata")
_SIGNS: Mapping[str, Callable[[Place], Awaitable[bool]]] = {
    "dcp": _may_be_dcp,
    "torchsnapshot": _may_be_torchsnapshot,
    "torch": _may_be_torch,
}
