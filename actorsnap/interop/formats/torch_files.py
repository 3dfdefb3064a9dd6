# SPDX-License-Identifier: Apache-2.0
"""Reads files of ``torch.save``: zip files, and the format from before torch 1.6.

Of a zip file it reads the directory, the pickle and the local headers of the storages. The older
format has its pickles first: they are read until they are complete.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from io import BytesIO
from typing import Any

import msgspec
import torch

from actorsnap.actors.formats import Foreign, Place
from actorsnap.errors import ActorSnapError, FormatError, UsageError
from actorsnap.format.foreign import is_legacy_file
from actorsnap.format.manifest import Stored
from actorsnap.interop.formats.describing import Description
from actorsnap.interop.formats.pickles import (
    Ghosts,
    SavedStorage,
    StateDescriber,
    TorchMark,
    top_level,
    unpickle,
)
from actorsnap.interop.formats.zip_directory import (
    Reading,
    ZipRecord,
    answered,
    first_records,
    header_range,
    placed,
    read_directory,
    read_record,
)
from actorsnap.state.tree import escape

ZIP_MAGIC = b"PK\x03\x04"
_INNER = (torch.Tensor, dict, list, tuple)
_PICKLE = "/data.pkl"
_NAME = "pytorch_model.bin"
"""File name in old Hugging Face repos."""

_FIRST_BYTES = 1 << 20
"""Bytes that are read first, of the older format."""

_SMALL_BYTES = 64 << 10
"""A file that is read at once."""

_MAX_PICKLES_BYTES = 1 << 28
"""Most bytes that are read to find the end of the pickles of the older format."""

_COUNT_BYTES = 8
"""Before each storage of the older format: its number of elements."""


class SavedFile(msgspec.Struct, frozen=True, eq=False):
    """A file of ``torch.save`` without its data; ``starts``: where each storage begins."""

    key: str
    state: Any
    ghosts: Ghosts
    starts: Mapping[str, int]

    def stored(
        self, description: Description, saved: SavedStorage, start: int, stop: int
    ) -> Stored:
        """Returns the place of bytes ``[start, stop)`` of a storage."""
        begin = self.starts.get(saved.key, 0)
        return description.stored(self.key, begin + start, begin + stop)


async def read(place: Place) -> Foreign | None:
    """See ``actors.formats``."""
    key, head = place.file, place.head
    if not key:
        info = await place.find(_NAME)
        if info is None:
            return None
        key, head = _NAME, await place.get(_NAME, 0, min(info.size, 512))
    await place.find(key)
    if head.startswith(ZIP_MAGIC) and _PICKLE.encode() in head[:256]:
        saved = await read_zip(place, key, allow_pickle=place.allow_pickle, refuses_each=True)
    elif is_legacy_file(head):
        saved = await _read_legacy(place, key)
    elif place.file:
        return None
    else:
        detail = f"it is not a file of torch.save, or damaged; it has {place.used[key].size} bytes"
        raise FormatError(key=key, detail=f"{detail}. Copy it again, or use another")
    return await place.run_blocking(_describe, place, saved)


class Archive(msgspec.Struct, frozen=True):
    """A zip file of ``torch.save``.

    Attributes:
        pickle: Content of the record ``data.pkl``.
        storages: Records by the storage's name, with ``start`` still unknown; in the beginning of a
            file with ``start``, and perhaps without ``size`` (-1).
    """

    pickle: bytes
    storages: dict[str, ZipRecord]

    def record(self, saved: SavedStorage, key: str) -> ZipRecord:
        """Returns the record of a storage.

        Raises:
            FormatError: It is missing, or of another size.
        """
        record = self.storages.get(saved.key)
        if record is None or record.size not in (saved.nbytes, -1):
            has = "no" if record is None else f"{record.size} bytes of"
            detail = f"it has {has} data/{saved.key:.80}, which has {saved.nbytes} bytes"
            raise FormatError(key=key, detail=detail)
        return record


def read_archive(size: int, key: str, **tail_bytes: int) -> Reading[Archive]:
    """Reads a zip file of ``torch.save``, of ``size`` bytes; see ``read_directory``.

    Raises:
        UsageError: It is big-endian, or a TorchScript program.
        FormatError: It is damaged, or no such file.
    """
    records = yield from read_directory(size, key, **tail_bytes)
    pickles = [name for name in records if name.endswith(_PICKLE) and name.count("/") == 1]
    if len(pickles) != 1:
        raise FormatError(key=key, detail=f"it has {len(pickles)} records data.pkl")
    prefix = pickles[0].removesuffix("data.pkl")
    if f"{prefix}constants.pkl" in records:
        raise UsageError(
            f"{key} is a TorchScript program, not a checkpoint: load it with torch.jit.load, and "
            "save its state_dict()"
        )

    if order := records.get(f"{prefix}byteorder"):
        _check_order((yield from read_record(order, size, key)), key)
    pickled = yield from read_record(records[pickles[0]], size, key)
    begin = f"{prefix}data/"
    storages = {n.removeprefix(begin): r for n, r in records.items() if n.startswith(begin)}
    return Archive(pickled, storages)


def begin_archive(beginning: bytes, key: str) -> Archive | None:
    """Returns what the beginning of a zip file of ``torch.save`` shows, up to the first storage.

    Returns:
        None: More is needed.

    Raises:
        UsageError: It is big-endian.
        FormatError: It is not such a file.
    """
    pickled: bytes | None = None
    for record, content in first_records(beginning, key):
        _, _, name = record.name.partition("/")
        if name.startswith("data/"):
            found = {name.removeprefix("data/"): record}
            return None if pickled is None else Archive(pickled, found)
        if record.size < 0:
            return None
        if name == "byteorder":
            _check_order(content, key)
        elif f"/{name}" == _PICKLE:
            pickled = content
        elif name == ".data/serialization_id":  # the last one
            return None if pickled is None else Archive(pickled, {})
    return None


def check_state(state: Any, num_pickled: int, key: str) -> None:
    """Checks what a pickle of ``num_pickled`` bytes holds, before its tree is walked.

    Raises:
        UsageError: A tensor is a conjugate or negative view: its bytes are other numbers.
        FormatError: Containers share others, so that the tree is far larger than the pickle.
    """
    sizes: dict[int, int] = {}
    left: list[tuple[Any, bool]] = [(state, False)] if isinstance(state, _INNER) else []
    while left:
        value, is_known_below = left.pop()
        if isinstance(value, torch.Tensor):
            if value.is_conj() or value.is_neg():
                raise UsageError(
                    f"{key} has a conjugate or negative view of a tensor, whose bytes are other "
                    "numbers: load it with torch, and save tensor.resolve_conj().resolve_neg()"
                )
            continue
        items = _inner(value)
        if is_known_below:
            sizes[id(value)] = 1 + sum([sizes.get(id(item), 1) for item in items])
        elif id(value) not in sizes:
            sizes[id(value)] = 0  # what contains itself is refused later
            left.append((value, True))
            left += [(item, False) for item in items if isinstance(item, _INNER)]
    if sizes.get(id(state), 1) > 1000 + 4 * num_pickled:
        detail = f"damaged: its {num_pickled} bytes of pickle stand for {sizes[id(state)]} values"
        raise FormatError(key=key, detail=detail)


def _inner(value: Any) -> Sequence[Any]:
    if isinstance(value, OrderedDict):
        return [*value.values(), getattr(value, "_metadata", None)]
    return [*value.values()] if isinstance(value, dict) else value


async def read_zip(
    place: Place, key: str, *, allow_pickle: bool, refuses_each: bool = False
) -> SavedFile:
    """Reads a zip file that ``Place.find`` has found, all but its tensors.

    Args:
        refuses_each: See ``Ghosts``.

    Raises:
        UsageError: It needs something that is not allowed. Names it.
        FormatError: It is damaged.
    """
    size = place.used[key].size
    read_all = await _reader(place, key, size)

    async def read(start: int, stop: int) -> bytes:
        (data,) = await read_all([(start, stop)])
        return data

    archive = await answered(read_archive(size, key), read)
    ghosts = Ghosts(place.path_of(key), refuses_each=refuses_each)
    state = await place.run_blocking(
        partial(unpickle, BytesIO(archive.pickle), ghosts, key, allow_pickle=allow_pickle)
    )
    await place.run_blocking(check_state, state, len(archive.pickle), key)
    records = [archive.record(saved, key) for saved in ghosts.found.values()]
    headers = await read_all([header_range(record, size, key) for record in records])
    starts = {
        name: placed(record, header, size, key).start
        for name, record, header in zip(ghosts.found, records, headers, strict=True)
    }
    return SavedFile(key, state, ghosts, starts)


async def _reader(
    place: Place, key: str, size: int
) -> Callable[[list[tuple[int, int]]], Awaitable[list[bytes]]]:
    """Returns what reads ranges. A small file is read at once: most ranges have a few bytes."""
    data = await place.get(key, 0, size) if size <= _SMALL_BYTES else None

    async def read_all(ranges: list[tuple[int, int]]) -> list[bytes]:
        if data is None:
            return await place.get_all([(key, start, stop) for start, stop in ranges])
        return [data[start:stop] for start, stop in ranges]

    return read_all


def _check_order(order: bytes, key: str) -> None:
    if order.strip() != b"little":
        raise UsageError(
            f"{key} is of byte order {order[:20].decode('latin-1')!r}: load it with torch.load, "
            "and save it again on a little-endian machine"
        )


async def _read_legacy(place: Place, key: str) -> SavedFile:
    size = place.used[key].size
    data = b""
    while True:
        stop = min(size, max(_FIRST_BYTES, min(8 * len(data), _MAX_PICKLES_BYTES)))
        data += await place.get(key, len(data), stop)
        file, ghosts = BytesIO(data), Ghosts(place.path_of(key), refuses_each=True)
        try:
            state, starts = await place.run_blocking(
                _parse_legacy, file, ghosts, key, size, place.allow_pickle
            )
        except ActorSnapError as error:
            if file.tell() < stop or stop == size:
                raise
            if stop >= _MAX_PICKLES_BYTES:
                detail = f"damaged: its pickles do not end within {stop} bytes"
                raise FormatError(key=key, detail=detail) from error
        else:
            return SavedFile(key, state, ghosts, starts)


def _parse_legacy(
    file: BytesIO, ghosts: Ghosts, key: str, size: int, allow_pickle: bool
) -> tuple[Any, dict[str, int]]:
    """Returns the state, and where each storage begins.

    Raises:
        ActorSnapError: The file is damaged or refused; or the bytes of it that ``file`` has are too
            few, and all of them were read.
    """
    load: Callable[[], Any] = partial(unpickle, file, ghosts, key, allow_pickle=allow_pickle)
    _, version, system = load(), load(), load()
    if version != 1001 or not isinstance(system, dict):
        raise FormatError(key=key, detail=f"its format has the version {version!r:.80}")
    _check_order(b"little" if system.get("little_endian", True) else b"big", key)
    state = load()
    names = load()
    check_state(state, file.tell(), key)
    if not isinstance(names, list) or sorted(names) != sorted(ghosts.found):
        raise FormatError(key=key, detail="its storages are not those of its pickle")
    at = file.tell()
    starts: dict[str, int] = {}
    for name in names:
        starts[name] = at + _COUNT_BYTES
        at = starts[name] + ghosts.found[name].nbytes
    if at != size:
        what = "truncated" if at > size else "too long"
        detail = f"{what}: it has {size} bytes, and its tensors end at {at}"
        raise FormatError(key=key, detail=f"{detail}. Copy it again, or use another")
    return state, starts


def _describe(place: Place, saved: SavedFile) -> Foreign:
    description = Description(place)
    describer = StateDescriber(
        description,
        saved.key,
        saved.ghosts,
        partial(saved.stored, description),
        allow_pickle=place.allow_pickle,
    )
    states = top_level(saved.state)
    describer.add({escape(name): state for name, state in states.items()})
    mark = TorchMark.of(saved.state, states)
    return Foreign(
        format="torch.save", manifests=(description.manifest(),), metadata=mark.metadata()
    )
