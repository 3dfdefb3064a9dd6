# SPDX-License-Identifier: Apache-2.0
"""Files that were made to harm, or damaged at random: an error of ours, soon, in little memory."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pickle
import random
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from actorsnap import Snapshot
from actorsnap.errors import ActorSnapError, FormatError, UsageError
from actorsnap.interop.formats import dcp_items
from actorsnap.interop.formats.dcp_metadata import decode_metadata
from tests.formats.checkpoints import training_state, write_repo, write_safetensors
from tests.formats.test_torchsnapshot import DATA

dcp: Any = torch.distributed.checkpoint  # its stubs export little

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

SPARSE_BYTES = 3 << 30
"""Of files that are mostly holes: more than ``LIMIT_BYTES``."""

LIMIT_BYTES = 1 << 30
"""Of memory that a child may take beyond what it has when it begins to read."""

_CHILD = """
import asyncio, resource, sys
from actorsnap import Snapshot
from actorsnap.errors import ActorSnapError

async def read(url):
    await Snapshot(sys.argv[1]).get_manifest()  # imports, threads
    taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + int(sys.argv[2]), -1))
    try:
        print(len(await Snapshot(url).get_manifest()), "entries")
    except ActorSnapError as error:
        print(type(error).__name__, error)

for url in sys.argv[3:]:
    asyncio.run(read(url))
"""


def read_in_child(tmp_path: Path, *urls: Path) -> list[str]:
    """Returns what reading each says, in a process with little memory."""
    write_safetensors(tmp_path / "first.safetensors", {"w": torch.ones(2)})
    command: list[Any] = [
        sys.executable,
        "-c",
        _CHILD,
        tmp_path / "first.safetensors",
        str(LIMIT_BYTES),
    ]
    done: Any = subprocess.run([*command, *urls], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    return str(done.stdout).splitlines()


def with_wide_record(path: Path, wide: str) -> Path:
    """Writes a file of ``torch.save`` again, whose record ``wide`` has ``SPARSE_BYTES``."""
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(2)}, buffer)
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(path, "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    data = path.read_bytes()
    directory = data.find(b"PK\x01\x02")
    ending = bytearray(data[directory:])
    at = ending.rfind(b"PK\x01\x02", 0, ending.find(wide.encode()))
    ending[at + 20 : at + 28] = struct.pack("<2L", SPARSE_BYTES, SPARSE_BYTES)
    with path.open("r+b") as file:
        file.seek(directory + SPARSE_BYTES)
        end = ending.rfind(b"PK\x05\x06")
        ending[end + 16 : end + 20] = struct.pack("<L", directory + SPARSE_BYTES)
        file.write(ending)
    return path


def with_wide_directory(path: Path) -> Path:
    torch.save({"w": torch.ones(2)}, path)
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(SPARSE_BYTES)
        ending = bytearray(data[data.rfind(b"PK\x05\x06") :])
        ending[12:20] = struct.pack("<2L", SPARSE_BYTES - 5000, 5000)
        file.write(ending)
    return path


def metadata_of(folder: Path, pickled: bytes) -> Path:
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickled)
    return folder


def with_wide_value(folder: Path) -> Path:
    """The item of a value is most of its file."""
    item = io.BytesIO()
    torch.save([1, 2], item)
    found = Metadata({"v": BytesStorageMetadata()})
    found.storage_data = {MetadataIndex("v"): _StorageInfo("a.distcp", 0, SPARSE_BYTES)}
    metadata_of(folder, pickle.dumps(found))
    (folder / "a.distcp").write_bytes(item.getvalue())
    os.truncate(folder / "a.distcp", SPARSE_BYTES)
    return folder


class Unknown:
    pass


def old_file(path: Path, state: Any) -> Path:
    torch.save(state, path, _use_new_zipfile_serialization=False)
    os.truncate(path, SPARSE_BYTES)
    return path


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Nothing of this is larger than some kilobytes on the disk."""
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo/model.safetensors.index.json").touch()
    os.truncate(tmp_path / "repo/model.safetensors.index.json", SPARSE_BYTES)
    texts = {
        with_wide_record(tmp_path / "pickle.pt", "data.pkl"): "'data.pkl' has|data.pkl.* has",
        with_wide_record(tmp_path / "order.pt", "byteorder"): "byteorder.* has",
        with_wide_directory(tmp_path / "directory.pt"): "its zip directory has",
        old_file(tmp_path / "refused.pt", {"x": Unknown()}): "too long",
        old_file(tmp_path / "long.pt", {"x": torch.ones(2)}): "too long",
        tmp_path / "repo": "which no index has",
        with_wide_value(tmp_path / "value"): "directory at its end is missing",
        # LONG_BINPUT, BYTEARRAY8: sizes that nothing follows.
        metadata_of(tmp_path / "memo", b"\x80\x02]r\xff\xff\xff\x7f."): "a list in place of",
        metadata_of(tmp_path / "array", b"\x80\x05\x96" + bytes(4) + b"\1\0\0\0."): "damaged",
    }
    said = read_in_child(tmp_path, *texts)
    for line, (path, text) in zip(said, texts.items(), strict=True):
        assert re.search(text, line), (path.name, line)


DEEP = 100_000


def test_deep_keys_do_not_end_the_process(tmp_path: Path) -> None:
    pickled = b"\x80\x02})" + b"\x85" * DEEP + b"Ns."
    said = read_in_child(tmp_path, metadata_of(tmp_path / "deep", pickled))
    assert "tuples in tuples" in said[0]


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def word(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def with_value(path: Path, value: bytes) -> Path:
    """Writes a file of ``torch.save`` whose only value has this pickle."""
    pickled = b"\x80\x02}" + word("model") + b"}" + word("w") + value + b"ss."
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data.pkl", pickled)
        file.writestr("x/data/0", bytes(4))
    return path


TUPLES = b")" + b"\x85" * DEEP
LISTS = b"]" * 5000 + b"a" * 4999
SHARED = b")" + b"\x86".join([b"q%ch%c" % (n, n) for n in range(60)]) + b"\x86"
"""2**60 tuples."""

SET, ORDERED = named("builtins", "set"), named("collections", "OrderedDict")
ENCODE, BYTES = named("_codecs", "encode"), named("builtins", "bytearray")
TEXT = word("x" * 500_000) + word("latin1") + b"\x86"
TWICE = b"h\x01h\x02" + word("hex") + b"\x86Rq\x02"
STORAGE = b"(" + word("storage") + named("torch", "FloatStorage") + b"%bNK\x01tQ"
TENSOR = named("torch._utils", "_rebuild_tensor_v2") + b"q\x01" + STORAGE % word("0") + b"q\x02"
DTYPE = named("numpy", "dtype")
ARRAY = named("numpy.core.multiarray", "_reconstruct") + named("numpy", "ndarray") + b"K\0\x85"
ARRAY += word("b") + b"\x87R(K\x01(%bt" + DTYPE + word("f4") + b"\x85R\x89"
ARRAY += named("builtins", "bytes") + b")Rtb"
NUMBERS = b"](%be" % b"".join([b"J" + struct.pack("<i", n) for n in range(20_000)])
OF_ONE_HASH = [b"\x8a\x0e" + (n * (2**61 - 1)).to_bytes(14, "little") for n in range(1, 30_000)]

MORE, NOT_HASHED = "would take far more memory or time", "tuples in tuples"

HOSTILE: dict[str, tuple[bytes, str]] = {
    "tuples as a key": (b"}" + TUPLES + b"Ns", NOT_HASHED),
    "tuples as keys": (b"}(" + TUPLES + b"Nu", NOT_HASHED),
    "tuples in a set": (SET + b"]" + TUPLES + b"a\x85R", NOT_HASHED),
    "tuples in pairs": (ORDERED + b"]" + TUPLES + b"N\x86a\x85R", NOT_HASHED),
    "tuples to count": (named("collections", "Counter") + b"((" + TUPLES + b"ttR", NOT_HASHED),
    "tuples in a state": (ORDERED + b")R]" + TUPLES + b"N\x86ab", "a list in place of items"),
    "tuples as a layout": (
        named("torch.serialization", "_get_layout") + TUPLES + b"\x85R",
        "no layout",
    ),
    "tuples as a dtype": (DTYPE + TUPLES + b"\x85R", "dtype of a tuple"),
    "shared tuples as a key": (b"}" + SHARED + b"Ns", MORE),
    "shared tuples in a set": (SET + b"]" + SHARED + b"a\x85R", MORE),
    "shared tuples as a value": (SHARED, "bytes of pickle stand for"),
    "shared tuples as metadata": (
        ORDERED + b")R}" + word("_metadata") + SHARED + b"sb",
        "bytes of pickle stand for",
    ),
    "shared tuples are called": (SHARED + b")R", "it calls a tuple"),
    "shared tuples are made": (SHARED + b")\x81", "it calls a tuple"),
    "shared tuples as a storage": (STORAGE % SHARED, "to no storage of torch"),
    "tuples as a value": (b")" + b"\x85" * 5000, "nest deeper than 900"),
    "lists as a value": (LISTS, "nest deeper than 900"),
    "lists in a leaf": (b"}K\x01K\x02\x86" + LISTS + b"s", "1 entries"),
    "a list in itself": (ORDERED + b")R}" + word("_metadata") + b"]q\x01h\x01asb", "itself"),
    "tensors as hooks": (
        b"]("
        + (TENSOR + b"h\x01(h\x02K\0))\x89NtRq\x03e")
        + b"h\x01(h\x02K\0))\x89h\x03tRq\x03a" * 5000,
        "5004 entries",
    ),
    "twice the bytes, 40 times": (
        b"]("
        + ENCODE
        + b"q\x01"
        + TEXT
        + b"Rq\x02"
        + b"h\x01h\x02X\3\0\0\0hex\x86Rq\x02" * 40
        + b"e",
        "encodes something else",
    ),
    "bytes again and again": (
        b"](" + BYTES + b"q\x01" + ENCODE + TEXT + b"R\x85q\x02" + b"h\x01h\x02R" * 3000 + b"e",
        MORE,
    ),
    "a set again and again": (
        b"](" + SET + b"q\x01" + NUMBERS + b"\x85q\x02" + b"h\x01h\x02R" * 3000 + b"e",
        MORE,
    ),
    "a long bytearray": (BYTES + b"J\0\0\0\x7f\x85R", "encodes something"),
    "a long tensor": (named("torch", "FloatTensor") + b"J\0\0\0\x7f\x85R", "1 entries"),
    "a tensor of an unknown class": (
        named("torch._tensor", "_rebuild_from_type_v2")
        + b"("
        + named("torch._utils", "_rebuild_tensor_v2")
        + named("x", "Y")
        + b"("
        + STORAGE % word("0")
        + b"K\0))\x89NtNtR",
        "needs x.Y.*not executed",
    ),
    "a huge list of an unknown class": (
        b"]("
        + named("x", "Y")
        + b")\x81q\x01"
        + NUMBERS
        + b"\x85q\x02"
        + b"h\x01h\x02b" * 3000
        + b"h\x01h\x02a" * 3000
        + b"e",
        "entries",
    ),
    "numbers of one hash": (b"}(" + b"N".join(OF_ONE_HASH) + b"Nu", "numbers of more than 64 bits"),
    "dims without an end": (ARRAY % ((b"\x8a\xff" + b"\x7f" * 255) * 20_000), "fit its shape"),
}


def test_no_pickle_ends_the_process(tmp_path: Path) -> None:
    """Nor hangs, nor takes more memory than a small multiple of the file."""
    files = {with_value(tmp_path / name, value): text for name, (value, text) in HOSTILE.items()}
    items = {
        "dcp": (b"}" + TUPLES + b"Ns", NOT_HASHED),
        "io of dcp": (named("_io", "BytesIO") + TUPLES + b"\x85R", "1 entries"),
    }
    for name, (value, text) in items.items():
        item = with_value(tmp_path / "item", value).read_bytes()
        found = Metadata({"v": BytesStorageMetadata()})
        found.storage_data = {MetadataIndex("v"): _StorageInfo("a.distcp", 0, len(item))}
        (metadata_of(tmp_path / name, pickle.dumps(found)) / "a.distcp").write_bytes(item)
        files[tmp_path / name] = text
    shutil.copytree(DATA / "slabs", tmp_path / "torchsnapshot")
    with_value(tmp_path / "torchsnapshot/0/values/complex", b"}" + TUPLES + b"Ns")
    files[tmp_path / "torchsnapshot"] = NOT_HASHED
    aliases = "world_size: 1\nmanifest:\n  0/a: &r\n    type: list\n  0/b: *r\n"
    for number, text in enumerate(["x: " + "[" * DEEP, "- " * DEEP, aliases]):
        folder = tmp_path / f"yaml {number}"
        folder.mkdir()
        (folder / ".snapshot_metadata").write_text(text)
        files[folder] = "it has aliases, or nests deeper|install PyYAML"
    said = read_in_child(tmp_path, *files)
    assert len(said) == len(files)
    for line, (path, text) in zip(said, files.items(), strict=True):
        assert re.search(text, line), (path.name, line)


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02})" + b"\x85" * 40 + b"K\x01s.",  # SETITEM
        b"\x80\x02}()" + b"\x85" * 40 + b"K\x01u.",  # SETITEMS
        b"\x80\x04\x8f()" + b"\x85" * 40 + b"\x90.",  # ADDITEMS
        b"\x80\x04()" + b"\x85" * 40 + b"\x91.",  # FROZENSET
        b"\x80\x02(K\x01K\x02d.",  # DICT
        b"\x80\x02\x82\x01.",  # EXT1
        b"\x80\x02ctorch\nSize\n(" + b"K\x01" * 65 + b"t\x85R.",
        b"\x80\x02cpathlib\nPosixPath\n(" + b"N" * 65 + b"tR.",
        b"\x80\x02ccollections\nOrderedDict\n]]\x85a\x85R.",
        b"\x80\x02]",
    ],
)
def test_what_metadata_never_has(pickled: bytes) -> None:
    with pytest.raises(FormatError, match="its pickle is damaged"):
        decode_metadata(pickled, ".metadata")


def test_deep_lists_in_place_of_sizes() -> None:
    """``repr`` of such a list raises what is no error of ours."""
    pickled = (
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}"
        b"(X\x13\x00\x00\x00state_dict_metadata}X\x0c\x00\x00\x00storage_data"
        b"}ctorch.distributed.checkpoint.metadata\nMetadataIndex\n)\x81}"
        b"(X\x03\x00\x00\x00fqnX\x01\x00\x00\x00aX\x06\x00\x00\x00offset"
        + b"]" * 5000
        + b"a" * 4999
        + b"ubctorch.distributed.checkpoint.filesystem\n_StorageInfo\n)\x81}bsub."
    )
    with pytest.raises(FormatError, match=r"not metadata of torch.*recursion"):
        decode_metadata(pickled, ".metadata")


def test_compressed_values_are_small_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zstd = pytest.importorskip("backports.zstd")
    found = Metadata({})
    found.storage_data = {}
    data = b""
    for number in range(3):
        item = io.BytesIO()
        torch.save(["x" * 500_000, number], item)
        packed = zstd.compress(item.getvalue())
        found.state_dict_metadata[f"v{number}"] = BytesStorageMetadata()
        place = _StorageInfo("a.distcp", len(data), len(packed), ["stream.zstd/1"])
        found.storage_data[MetadataIndex(f"v{number}")] = place
        data += packed
    metadata_of(tmp_path / "c", pickle.dumps(found))
    (tmp_path / "c/a.distcp").write_bytes(data)
    asyncio.run(Snapshot(tmp_path / "c").get_manifest())
    monkeypatch.setattr(dcp_items, "_MAX_UNPACKED_BYTES", 1_200_000)
    with pytest.raises(FormatError, match=r"'v2' in a\.distcp.*more than"):
        asyncio.run(Snapshot(tmp_path / "c").get_manifest())


async def test_a_long_value_is_read(tmp_path: Path) -> None:
    """Of a value of more than one read only the ends and the pickle are read."""
    value = [b"x" * (5 << 20), 1]
    dcp_save = asyncio.to_thread(dcp.save, {"v": value}, checkpoint_id=tmp_path, no_dist=True)
    await dcp_save
    assert await Snapshot(tmp_path).read_object("model/v") == value


async def test_a_pickle_that_does_not_match_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"model": {"weight": torch.ones(2)}}, path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"weight", b"weighs", 1))
    with pytest.raises(FormatError, match=r"data\.pkl' do not match its checksum"):
        await Snapshot(path).get_manifest()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"model": {"weight": torch.ones(2)}}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert (await Snapshot(path).read_object("model/weight")).tolist() == [1, 1]


async def test_numbers_of_more_than_64_bits(tmp_path: Path) -> None:
    header = {"w": {"dtype": "F32", "shape": [10**30, 0], "data_offsets": [0, 0]}}
    encoded = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded)
    with pytest.raises(FormatError, match="more than 64 bits"):
        await Snapshot(tmp_path / "x.safetensors").get_manifest()


@pytest.mark.parametrize("name", ["a\0.safetensors", "..\\a.safetensors", "../a.safetensors"])
async def test_an_index_names_no_file(tmp_path: Path, name: str) -> None:
    index = {"weight_map": {"w": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match="which is not a file next to it"):
        await Snapshot(tmp_path).get_manifest()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
async def test_older_files_of_each_protocol(tmp_path: Path, protocol: int) -> None:
    """torch itself refuses protocols 4 and 5 without ``weights_only=False``."""
    path = tmp_path / "x.pt"
    saved = {"w": torch.arange(3)}
    torch.save(saved, path, _use_new_zipfile_serialization=False, pickle_protocol=protocol)
    if protocol < 4:
        assert (await Snapshot(path).read_object("model/w")).tolist() == [0, 1, 2]
    else:
        with pytest.raises(UsageError, match="was not executed.*allow_pickle"):
            await Snapshot(path).get_manifest()


@pytest.mark.parametrize("kind", ["zip", "legacy", "dcp", "value of dcp"])
async def test_a_conjugate_tensor(tmp_path: Path, kind: str) -> None:
    """Its bytes are those of another tensor."""
    tensor = torch.ones(3, dtype=torch.complex64).conj()
    url = tmp_path if "dcp" in kind else tmp_path / "x.pt"
    if "dcp" in kind:
        saved = {"model": {"w": (tensor, 1) if "value" in kind else tensor}}
        await asyncio.to_thread(dcp.save, saved, checkpoint_id=tmp_path, no_dist=True)
    else:
        torch.save({"w": tensor}, url, _use_new_zipfile_serialization=kind == "zip")
    with pytest.raises(UsageError, match=r"conjugate.*resolve_conj"):
        await Snapshot(url).read_object("model/w")


@pytest.mark.parametrize("is_zip", [True, False])
async def test_containers_that_share_others(tmp_path: Path, is_zip: bool) -> None:
    """The tree of this has 2**40 leaves."""
    lists: list[Any] = [1]
    for _ in range(40):
        lists = [lists, lists]
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(1), "x": lists}, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(FormatError, match=r"bytes of pickle stand for \d{13} values"):
        await Snapshot(path).get_manifest()
    cycle: dict[str, Any] = {"a": {}}
    cycle["a"]["b"] = cycle
    torch.save({"w": torch.ones(1), "x": cycle}, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(UsageError, match="contains itself"):
        await Snapshot(path).get_manifest()
    few = [0.5, 0.9]
    torch.save({"model": {"w": torch.ones(1)}, "x": [few] * 50, "y": few}, path)
    assert await Snapshot(path).read_object("y") == few


def _write(kind: str, folder: Path) -> Path:
    """Writes a small checkpoint; returns its URL."""
    model, _, state = training_state()
    folder.mkdir()
    if kind == "zip":
        torch.save(state, folder / "x.pt")
        return folder / "x.pt"
    if kind == "legacy":
        torch.save(state, folder / "x.pt", _use_new_zipfile_serialization=False)
        return folder / "x.pt"
    if kind == "repo":
        write_repo(folder, model.state_dict())
    elif kind == "torchsnapshot":
        shutil.copytree(DATA / "slabs", folder, dirs_exist_ok=True)
    else:
        ways = {"dcp": SerializationFormat.TORCH_SAVE, "dcp st": SerializationFormat.SAFETENSORS}
        writer = dcp.FileSystemWriter(folder, serialization_format=ways[kind])
        dcp.save(state, storage_writer=writer, no_dist=True)
    return folder


def _damage(data: bytearray, choose: random.Random) -> None:
    at = choose.randrange(len(data))
    change: Callable[[], None] = choose.choice(
        [
            lambda: data.__setitem__(at, data[at] ^ 1 << choose.randrange(8)),
            lambda: data.__setitem__(at, choose.randrange(256)),
            lambda: data.__delitem__(slice(at, at + choose.randrange(1, 9))),
            lambda: data.__setitem__(slice(at, at), choose.randbytes(choose.randrange(1, 9))),
        ]
    )
    change()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["zip", "legacy", "repo", "dcp", "dcp st", "torchsnapshot"])
def test_random_damage(tmp_path: Path, kind: str) -> None:
    """Names and values may differ where a format has no checksums; anything else is an error."""
    url = _write(kind, tmp_path / "c")
    files = {path: path.read_bytes() for path in (tmp_path / "c").rglob("*") if path.is_file()}
    small = sorted(files, key=lambda path: len(files[path]))
    choose = random.Random(17)

    async def read() -> None:
        snapshot = Snapshot(url)
        manifest = await snapshot.get_manifest()
        for key in sorted({path.split("/")[1] for path in manifest}):
            try:
                await snapshot.get_state_dict_for_key(key)
            except ActorSnapError:
                pass

    num_refused = 0
    for _ in range(2000):
        path = choose.choice(small if choose.random() < 0.5 else small[:2])
        data = bytearray(files[path])
        for _ in range(choose.choice([1, 1, 2])):
            _damage(data, choose)
        path.write_bytes(data)
        try:
            asyncio.run(asyncio.wait_for(read(), 30))
        except ActorSnapError:
            num_refused += 1
        path.write_bytes(files[path])
    assert num_refused > 500
