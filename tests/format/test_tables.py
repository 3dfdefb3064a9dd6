# SPDX-License-Identifier: Apache-2.0
"""Rank manifests, older and with a table: round trips, golden bytes, damage, hostile documents."""

from __future__ import annotations

import gc
import json
import math
from contextlib import suppress
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorsnap.errors import ChecksumMismatch, FormatError, UsageError
from actorsnap.format import tables
from actorsnap.format.checksum import MAX_BLOCK_BYTES, choose_block_bytes, crc32c
from actorsnap.format.layout import dtype_itemsize, manifest_key
from actorsnap.format.manifest import (
    COMPOSITE_PARTS,
    BytesEntry,
    BytesType,
    CompositeEntry,
    CompositeLayout,
    ContainerEntry,
    ContainerType,
    Entry,
    ManifestRecord,
    ObjectRecord,
    RankManifest,
    SaveRecord,
    Stored,
    StoredChunk,
    TensorEntry,
    TensorType,
    ValueEntry,
    ViewEntry,
    features_in,
    seal,
)
from actorsnap.format.tables import (
    ManifestTable,
    decode_lone_rank_manifest,
    decode_rank_manifest,
    decode_table,
    encode_rank_manifest,
)
from tests.format.test_manifest import dims, json_noise, json_values, text
from tests.support.manifests import document_of, encoded

ATTEMPT = "20260131T120000-0123abcd-42-89abcdef"
KEY = manifest_key(ATTEMPT, 0)
SAVE = SaveRecord(world_size=4, features=("tables",), step=7, metadata={"a": [1]})

OLDER = RankManifest(
    attempt=ATTEMPT,
    rank=0,
    objects=(
        ObjectRecord(
            key=f"{ATTEMPT}/data/model/0-0.safetensors",
            size=4096 + 96,
            header_bytes=4096,
            header_crc32c=5,
        ),
    ),
    entries=(
        ContainerEntry(path="model", type="ordered_dict", attributes={"$": "dict", "v": []}),
        TensorEntry(
            path="model/w",
            dtype="float32",
            shape=(2, 4),
            data=Stored(0, 4096, 4128, (11,)),
            type="parameter",
            requires_grad=True,
            global_shape=(4, 4),
            offsets=(2, 0),
        ),
        TensorEntry(path="model/e", dtype="<f8", shape=(0,), data=Stored(0, 4128, 4128, ())),
        ViewEntry(path="model/v", of="model/w", dtype="int16", shape=(3,), strides=(2,), offset=2),
        CompositeEntry(
            path="model/s",
            layout="sparse_coo",
            dtype="float32",
            shape=(4, 4),
            parts=("indices", "values"),
            parameters={"is_coalesced": True},
        ),
        TensorEntry(
            path="model/s@indices", dtype="int64", shape=(2, 2), data=Stored(0, 4128, 4160, (12,))
        ),
        TensorEntry(
            path="model/s@values", dtype="float32", shape=(2,), data=Stored(0, 4160, 4168, (13,))
        ),
        ValueEntry(path="lr", value=1e-3, replicated=True),
        ValueEntry(path="none"),
        BytesEntry(path="blob", type="bytes", data=Stored(0, 4168, 4192, (14,))),
    ),
)

GOLDEN_OLDER = (
    b'{"attempt":"20260131T120000-0123abcd-42-89abcdef","rank":0,"block_bytes":1048576,'
    b'"objects":[{"key":"20260131T120000-0123abcd-42-89abcdef/data/model/0-0.safetensors",'
    b'"size":4192,"header_bytes":4096,"header_crc32c":5}],"entries":['
    b'{"kind":"container","path":"model","type":"ordered_dict",'
    b'"attributes":{"$":"dict","v":[]}},'
    b'{"kind":"tensor","path":"model/w","dtype":"float32","shape":[2,4],'
    b'"data":[0,4096,4128,[11]],"type":"parameter","requires_grad":true,'
    b'"global_shape":[4,4],"offsets":[2,0]},'
    b'{"kind":"tensor","path":"model/e","dtype":"<f8","shape":[0],"data":[0,4128,4128,[]]},'
    b'{"kind":"view","path":"model/v","of":"model/w","dtype":"int16","shape":[3],'
    b'"strides":[2],"offset":2},'
    b'{"kind":"composite","path":"model/s","layout":"sparse_coo","dtype":"float32",'
    b'"shape":[4,4],"parts":["indices","values"],"parameters":{"is_coalesced":true}},'
    b'{"kind":"tensor","path":"model/s@indices","dtype":"int64","shape":[2,2],'
    b'"data":[0,4128,4160,[12]]},'
    b'{"kind":"tensor","path":"model/s@values","dtype":"float32","shape":[2],'
    b'"data":[0,4160,4168,[13]]},'
    b'{"kind":"value","path":"lr","value":0.001,"replicated":true},'
    b'{"kind":"value","path":"none"},'
    b'{"kind":"bytes","path":"blob","type":"bytes","data":[0,4168,4192,[14]]}]}'
)


MANIFEST = msgspec.structs.replace(OLDER, save=SAVE, optimizers={"optim": "torch.SGD"})

GOLDEN_MANIFEST = (
    b'{"crc32c":"3f257915","attempt":"20260131T120000-0123abcd-42-89abcdef","rank":0,"bloc'
    b'k_bytes":1048576,"objects":[{"key":"20260131T120000-0123abcd-42-89abcdef/data/model/'
    b'0-0.safetensors","size":4192,"header_bytes":4096,"header_crc32c":5}],"save":{"world_'
    b'size":4,"features":["tables"],"step":7,"metadata":{"a":[1]}},"optimizers":{"optim":"'
    b'torch.SGD"},"pages":[[964,2926103524,true]],"paths":"ybyxrlHa9bnJbZBIUlmeS05Nb37EFGs'
    b'Uu03UQErUwDKsYBVMVg417A=="}\n'
    b'{"kind":"container","path":"model","type":"ordered_dict","attributes":{"$":"dict","v'
    b'":[]}}\n'
    b'{"kind":"tensor","path":"model/w","dtype":"float32","shape":[2,4],"data":[0,4096,412'
    b'8,[11]],"type":"parameter","requires_grad":true,"global_shape":[4,4],"offsets":[2,0]'
    b"}\n"
    b'{"kind":"tensor","path":"model/e","dtype":"<f8","shape":[0],"data":[0,4128,4128,[]]}'
    b"\n"
    b'{"kind":"view","path":"model/v","of":"model/w","dtype":"int16","shape":[3],"strides"'
    b':[2],"offset":2}\n'
    b'{"kind":"composite","path":"model/s","layout":"sparse_coo","dtype":"float32","shape"'
    b':[4,4],"parts":["indices","values"],"parameters":{"is_coalesced":true}}\n'
    b'{"kind":"tensor","path":"model/s@indices","dtype":"int64","shape":[2,2],"data":[0,41'
    b"28,4160,[12]]}\n"
    b'{"kind":"tensor","path":"model/s@values","dtype":"float32","shape":[2],"data":[0,416'
    b"0,4168,[13]]}\n"
    b'{"kind":"value","path":"lr","value":0.001,"replicated":true}\n'
    b'{"kind":"value","path":"none"}\n'
    b'{"kind":"bytes","path":"blob","type":"bytes","data":[0,4168,4192,[14]]}\n'
)

MANY = msgspec.structs.replace(
    MANIFEST,
    entries=tuple([ValueEntry(path=f"model/{n}", value="x" * (n % 50)) for n in range(100)]),
)


def decode_older(data: bytes) -> RankManifest:
    """Decodes with an honest record."""
    record = ManifestRecord(key=KEY, size=len(data), crc32c=crc32c(data))
    return decode_rank_manifest(data, KEY, record)


def decode_each(document: Any) -> RankManifest:
    """Decodes a document in both forms, which must be the same, or raises the same error."""
    found: list[Any] = []
    table = {"save": msgspec.to_builtins(SAVE), "optimizers": {}}
    for data, decode in (
        (json.dumps(document).encode(), decode_older),
        (encoded(table | document), lambda data: decode_rank_manifest(data, KEY)),
    ):
        try:
            found.append(decode(data))
        except FormatError as error:
            found.append(error)
    older, newer = found
    if isinstance(older, FormatError):
        assert isinstance(newer, FormatError), newer
        raise older if type(newer) is FormatError else newer
    if isinstance(newer, FormatError):
        raise newer
    assert isinstance(newer, RankManifest)
    assert older.entries == newer.entries
    return newer


def table_of(data: bytes, key: str = KEY) -> ManifestTable:
    table = decode_table(data, key)
    assert table is not None
    return table


# Round trips


@st.composite
def manifests(draw: st.DrawFn) -> RankManifest:
    """Valid manifests with every kind of entry, laid out one after another in two objects."""
    ends = [4096, 8192]
    entries: list[Entry] = []

    def stored(num_bytes: int) -> Stored:
        n = draw(st.integers(0, 1))
        start = ends[n]
        ends[n] += num_bytes
        block_bytes = choose_block_bytes(num_bytes, is_shard=draw(st.booleans()))
        count = -(-num_bytes // block_bytes)
        crcs = st.lists(st.integers(0, 2**32 - 1), min_size=count, max_size=count)
        return Stored(n, start, ends[n], tuple(draw(crcs)))

    def tensor(path: str) -> TensorEntry:
        dtype = draw(st.sampled_from(["float32", "bool", "complex128", "<U2", "unheard_of"]))
        shape = draw(dims)
        if draw(st.booleans()):
            shape = (*shape, draw(st.integers(0, MAX_BLOCK_BYTES)))
        offsets = tuple(draw(st.integers(0, 3)) for _ in shape) if draw(st.booleans()) else None
        return TensorEntry(
            path=path,
            dtype=dtype,
            shape=shape,
            data=stored(math.prod(shape) * (dtype_itemsize(dtype) or 3)),
            type=draw(st.sampled_from(get_args(TensorType))),
            requires_grad=draw(st.booleans()),
            global_shape=offsets and tuple(o + n for o, n in zip(offsets, shape, strict=True)),
            offsets=offsets,
            replicated=draw(st.booleans()),
        )

    for path in draw(st.lists(text, unique=True, max_size=6)):
        kind = draw(st.sampled_from(["container", "tensor", "view", "composite", "value", "bytes"]))
        if kind == "container":
            type_ = draw(st.sampled_from(get_args(ContainerType)))
            entries.append(ContainerEntry(path=path, type=type_, attributes=draw(json_values)))
        elif kind == "tensor":
            entries.append(tensor(f"t/{path}"))
        elif kind == "view":
            base = tensor(f"{path}@storage")
            size = base.data.stop - base.data.start
            offset = draw(st.integers(0, size))
            view = ViewEntry(
                path=f"v/{path}",
                of=base.path,
                dtype="uint8",
                shape=(2, size - offset),
                strides=(0, 1),
                offset=offset,
                type=draw(st.sampled_from(get_args(TensorType))),
            )
            entries.extend(draw(st.permutations([base, view])))
        elif kind == "composite":
            layout = draw(st.sampled_from(get_args(CompositeLayout)))
            parts = COMPOSITE_PARTS[layout]
            entries.append(
                CompositeEntry(
                    path=f"c/{path}",
                    layout=layout,
                    dtype="quint8",
                    shape=draw(dims),
                    parts=parts,
                    parameters=draw(st.dictionaries(text, json_values, max_size=2)),
                    requires_grad=draw(st.booleans()),
                )
            )
            entries.extend([tensor(f"c/{path}@{part}") for part in parts])
        elif kind == "value":
            entries.append(ValueEntry(path=f"x/{path}", value=draw(json_values)))
        else:
            type__ = draw(st.sampled_from(get_args(BytesType)))
            data = stored(draw(st.integers(0, 3 * MAX_BLOCK_BYTES)))
            entries.append(BytesEntry(path=f"b/{path}", type=type__, data=data))
    return RankManifest(
        attempt=ATTEMPT,
        rank=draw(st.integers(0, 3)),
        objects=tuple(
            ObjectRecord(
                key=f"{ATTEMPT}/data/=small/0-{n}.safetensors",
                size=ends[n],
                header_bytes=4096 * (n + 1),
                header_crc32c=n,
            )
            for n in range(2)
        ),
        entries=tuple(entries),
        save=SAVE,
        optimizers={},
    )


# Golden documents: what is written today is read for ever


def test_golden_manifest() -> None:
    assert encode_rank_manifest(MANIFEST) == GOLDEN_MANIFEST
    assert decode_rank_manifest(GOLDEN_MANIFEST, KEY) == MANIFEST
    assert document_of(GOLDEN_MANIFEST)["entries"] == json.loads(GOLDEN_OLDER)["entries"]
    assert encoded(document_of(GOLDEN_MANIFEST)) != GOLDEN_MANIFEST  # other order of members


def test_encoding_leaves_nothing_behind() -> None:
    """msgspec 0.22 never frees the iterator of a tuple of lines."""

    def count() -> int:
        gc.collect()
        return sum(type(each) is type(iter(())) for each in gc.get_objects())

    before = count()
    for _ in range(50):
        encode_rank_manifest(MANIFEST)
    assert count() < before + 50


def test_golden_older_manifest() -> None:
    assert decode_older(GOLDEN_OLDER) == OLDER
    sealed = seal(GOLDEN_OLDER[:-1] + b',"save":{"world_size":1},"optimizers":{}}')
    assert decode_older(sealed).save == SaveRecord(world_size=1)


@given(manifests())
@settings(max_examples=60)
def test_manifests_round_trip_to_the_same_bytes(manifest: RankManifest) -> None:
    data, key = encode_rank_manifest(manifest), manifest_key(ATTEMPT, manifest.rank)
    back = decode_rank_manifest(data, key)
    assert back == manifest
    # Defaults are left out by identity: what was decoded must be left out as well.
    assert encode_rank_manifest(back) == data
    for buffer in (bytearray(data), memoryview(data)):
        assert decode_rank_manifest(buffer, key) == manifest


@given(manifests(), st.data())
@settings(max_examples=60)
def test_what_is_read_by_pages_is_in_the_manifest(
    manifest: RankManifest, data: st.DataObject
) -> None:
    entries = tuple([e for n in range(7) for e in _renamed(manifest.entries, n)])
    manifest = msgspec.structs.replace(manifest, entries=entries)
    encoded, key = encode_rank_manifest(manifest), manifest_key(ATTEMPT, manifest.rank)
    table = table_of(encoded[: encoded.index(b"\n") + 1], key)
    assert table.offsets[-1] == len(encoded)
    wanted = data.draw(st.sets(st.sampled_from([e.path for e in entries] or ["none"])))
    pages: dict[int, memoryview] = {}
    for run in table.runs(table.pages_of(wanted), data.draw(st.integers(0, 9000))):
        pages.update(table.split(run.start, encoded[slice(*table.span(run))]))
    found = table.entries(pages, wanted.__contains__)
    assert found == [entry for entry in entries if entry.path in wanted]
    containers = [entry for entry in entries if isinstance(entry, ContainerEntry)]
    pages = {}
    for run in table.runs(table.container_pages, 0):
        pages.update(table.split(run.start, encoded[slice(*table.span(run))]))
    assert table.entries(pages, lambda path: False, wants_containers=True) == containers
    assert all(page in table.container_pages for page in pages)
    pages = dict(table.split(0, encoded[table.offsets[0] :]))
    assert tuple(table.entries(pages)) == entries


def _renamed(entries: tuple[Entry, ...], n: int) -> list[Entry]:
    """Returns copies that do not refer to each other's paths."""
    return [
        msgspec.structs.replace(entry, path=f"{entry.path}/{n}")
        for entry in entries
        if not isinstance(entry, ViewEntry | CompositeEntry)
    ]


def test_a_path_costs_one_page() -> None:
    data = encode_rank_manifest(MANY)
    table = table_of(data)
    assert len(table.head.pages) == 7
    assert table.pages_of(["model/17"]) == [1]
    assert table.pages_of(["model/99", "model/0", "nothing", "\ud800"]) == [0, 6]
    assert list(table.runs([0, 1, 2, 4], 0)) == [range(3), range(4, 5)]
    gap = table.offsets[4] - table.offsets[3]
    assert list(table.runs([0, 1, 2, 4], gap - 1)) == [range(3), range(4, 5)]
    assert list(table.runs([0, 1, 2, 4], gap)) == [range(5)]
    assert list(table.runs([], 1)) == []
    assert table.span(range(3, 5)) == (table.offsets[3], table.offsets[5])


def test_the_table_names_pages_with_containers() -> None:
    """No path leads to empty ones. An earlier table does not say: all pages may have some."""
    few = ContainerEntry(path="model/list", type="list")
    manifest = msgspec.structs.replace(MANY, entries=(*MANY.entries[:40], few, *MANY.entries[40:]))
    data = encode_rank_manifest(manifest)
    assert table_of(data).container_pages == [2]
    earlier = table_of(encoded(document_of(data)))
    assert earlier.container_pages == list(range(len(earlier.head.pages)))
    head, _, pages = data.partition(b"\n")
    denied = json.loads(head)
    denied.pop("crc32c")
    denied["pages"][2][2] = False
    damaged = seal(json.dumps(denied, separators=(",", ":")).encode()) + b"\n" + pages
    with pytest.raises(FormatError, match="page 2 has containers"):
        decode_rank_manifest(damaged, KEY)


def test_what_is_not_wanted_is_not_decoded() -> None:
    document = document_of(encode_rank_manifest(MANY))
    document["entries"][17]["kind"] = "surprise"
    data = encoded(document)
    table = table_of(data)
    pages = dict(table.split(1, data[slice(*table.span(range(1, 2)))]))
    found = table.entries(pages, lambda path: path.endswith("8"))
    assert [entry.path for entry in found] == ["model/18", "model/28"]
    with pytest.raises(FormatError, match="surprise"):
        table.entries(pages, lambda path: path.endswith("7"))


def test_an_entry_that_is_read_alone_is_checked() -> None:
    document = document_of(GOLDEN_MANIFEST)
    document["entries"][1]["data"][2] += 1
    data = encoded(document)
    table = table_of(data)
    with pytest.raises(FormatError, match="'model/w' of 33 bytes is not float32"):
        table.entries(dict(table.split(0, data[table.offsets[0] :])), "model/w".__eq__)


def test_a_prefix_without_the_whole_table() -> None:
    data = encode_rank_manifest(MANY)
    for length in range(data.index(b"\n") + 1):
        assert decode_table(data[:length], KEY) is None
    assert table_of(data[: data.index(b"\n") + 1]).offsets[-1] == len(data)


# Damage


def test_any_flipped_bit_is_found() -> None:
    for data in (GOLDEN_MANIFEST, GOLDEN_OLDER):
        record = ManifestRecord(key=KEY, size=len(data), crc32c=crc32c(data))
        for at in range(len(data) * 8):
            damaged = bytearray(data)
            damaged[at // 8] ^= 1 << (at % 8)
            with pytest.raises(ChecksumMismatch) as caught:
                decode_rank_manifest(damaged, KEY, record if data is GOLDEN_OLDER else None)
            assert caught.value.key == KEY


def test_any_flipped_bit_is_found_without_a_commit_object() -> None:
    sealed = seal(GOLDEN_OLDER[:-1] + b',"save":{"world_size":1}}')
    for data in (GOLDEN_MANIFEST, sealed):
        manifest, record = decode_lone_rank_manifest(data, KEY)
        assert (manifest.entries, record.size) == (MANIFEST.entries, len(data))
        assert record.crc32c == crc32c(data)
        for at in range(len(data) * 8):
            damaged = bytearray(data)
            damaged[at // 8] ^= 1 << (at % 8)
            with pytest.raises(FormatError) as caught:
                decode_lone_rank_manifest(bytes(damaged), KEY)
            assert caught.value.key == KEY
        for length in range(len(data)):
            with pytest.raises(FormatError):
                decode_lone_rank_manifest(data[:length], KEY)
    with pytest.raises(FormatError, match="its own checksum is missing"):
        decode_lone_rank_manifest(b"{" + sealed.partition(b",")[2], KEY)


def test_no_entry_comes_from_a_damaged_page() -> None:
    """Whatever is wanted: a damaged line of another path may hide the one that is."""
    data = encode_rank_manifest(MANY)
    table = table_of(data)
    start, stop = table.offsets[2], table.offsets[5]
    for at in range(start, stop, 37):
        damaged = bytearray(data[start:stop])
        damaged[at - start] ^= 1
        read: list[int] = []
        with pytest.raises(ChecksumMismatch) as caught:
            read.extend(number for number, _ in table.split(2, damaged))
        assert read == [n for n in (2, 3, 4) if table.offsets[n + 1] <= at]
        assert caught.value.key == KEY
    for part in (data[start : stop - 1], data[start : stop + 1], data[start + 1 : stop]):
        with pytest.raises(ChecksumMismatch):
            list(table.split(2, part))


def test_any_truncation_is_found() -> None:
    record = ManifestRecord(key=KEY, size=len(GOLDEN_OLDER), crc32c=crc32c(GOLDEN_OLDER))
    for length in range(len(GOLDEN_OLDER)):
        with pytest.raises(ChecksumMismatch, match=f"{length} bytes"):
            decode_rank_manifest(GOLDEN_OLDER[:length], KEY, record)
    data = encode_rank_manifest(MANY)
    for part in (data[:length] for length in range(len(data))):
        with pytest.raises(ChecksumMismatch):
            decode_rank_manifest(part, KEY)
    for extra in (b"\n", b"{}", GOLDEN_MANIFEST):
        with pytest.raises(ChecksumMismatch):
            decode_rank_manifest(data + extra, KEY)


def test_an_older_manifest_without_a_commit_object() -> None:
    assert decode_lone_rank_manifest(GOLDEN_OLDER, KEY)[0] == OLDER
    assert features_in([OLDER]) == ()
    blocks = Stored(0, 4096, 4096 + (2 << 20), (1,) * 32)
    small = TensorEntry(path="m/x", dtype="uint8", shape=(2 << 20,), data=blocks)
    chunked = msgspec.structs.replace(OLDER.objects[0], chunks=(StoredChunk(0, 4192, 1),))
    compressed = msgspec.structs.replace(OLDER, objects=(chunked,))
    assert features_in([OLDER, msgspec.structs.replace(OLDER, entries=(small,))]) == (
        "block_sizes",
    )
    assert features_in([compressed, OLDER]) == ("compression",)


# Manifests that are intact and well-typed, and lie

VALID = json.loads(GOLDEN_OLDER)


def manifest_with(
    *, entry: int | None = None, drop: int | None = None, obj: Any = None, **members: Any
) -> Any:
    """The golden manifest with members changed: of itself, of an entry, or of its object."""
    document = json.loads(GOLDEN_OLDER)
    target = document
    if entry is not None:
        target = document["entries"][entry]
    elif obj is not None:
        target = document["objects"][0]
    target.update(members)
    for name in [name for name, value in members.items() if value is ...]:
        del target[name]
    if drop is not None:
        del document["entries"][drop]
    return document


OBJECT = VALID["objects"][0]


@pytest.mark.parametrize(
    "change",
    [
        {"attempt": "x"},
        {"attempt": "x/y"},
        {"rank": 1},
        {"rank": -1},
        {"block_bytes": 0},
        {"block_bytes": 4096},
        {"more": 1},
        {"objects": []},
        {"objects": [OBJECT, OBJECT]},
        {"obj": True, "key": "elsewhere/x"},
        {"obj": True, "key": f"{ATTEMPT}/../x"},
        {"obj": True, "key": f"{ATTEMPT}"},
        {"obj": True, "size": -1},
        {"obj": True, "size": 4191},
        *[
            {"entries": [], "objects": [OBJECT | {"header_bytes": header, "size": size}]}
            for header, size in [(0, 4192), (4097, 4192), (8192, 4192), (1 << 30, 1 << 40)]
        ],
        {"obj": True, "header_crc32c": -1},
        {"entry": 0, "kind": "surprise"},
        {"entry": 0, "kind": ...},
        {"entry": 0, "path": ""},
        {"entry": 0, "path": "model/w"},
        {"entry": 0, "type": "set"},
        {"entry": 0, "dtype": "float32"},
        {"entry": 1, "dtype": "float64"},
        {"entry": 1, "shape": [2, 3]},
        {"entry": 1, "shape": [-2, -4]},
        {"entry": 1, "shape": [2**62, 2**62], "dtype": "unheard_of"},
        {"entry": 1, "shape": [2**70], "dtype": "unheard_of"},
        {"entry": 1, "type": "view"},
        {"entry": 1, "data": [1, 4096, 4128, [11]]},
        {"entry": 1, "data": [-1, 4096, 4128, [11]]},
        {"entry": 1, "data": [0, 4064, 4096, [11]]},
        {"entry": 1, "data": [0, 4176, 4208, [11]]},
        {"entry": 1, "data": [0, 4128, 4096, [11]]},
        {"entry": 1, "data": [0, 4096, 4128, []]},
        {"entry": 1, "data": [0, 4096, 4128, [11, 11]]},
        {"entry": 1, "data": [0, 4096, 4128, [2**32]]},
        {"entry": 1, "data": [0, 4096, 4128, [11], 0]},
        {"entry": 1, "offsets": ...},
        {"entry": 1, "global_shape": ...},
        {"entry": 1, "offsets": [2]},
        {"entry": 1, "offsets": [3, 0]},
        {"entry": 1, "offsets": [-2, 0]},
        {"entry": 1, "global_shape": [2**62, 2**62]},
        {"entry": 2, "shape": []},
        {"entry": 2, "data": [0, 4128, 4128, [0]]},
        {"entry": 3, "of": "model/x"},
        {"entry": 3, "of": "model/v"},
        {"entry": 3, "of": "blob"},
        {"entry": 3, "strides": [2, 1]},
        {"entry": 3, "strides": [-2]},
        {"entry": 3, "strides": [8]},
        {"entry": 3, "offset": -2},
        {"entry": 3, "offset": 24},
        {"entry": 3, "shape": [0], "offset": 33},
        {"entry": 3, "dtype": "unheard_of", "strides": [15], "offset": 2},
        {"entry": 3, "shape": [2**62, 2**62], "strides": [0, 0]},
        {"entry": 4, "parts": ["values"]},
        {"entry": 4, "layout": "sparse_dok"},
        {"entry": 4, "layout": "sparse_csr"},
        {"entry": 4, "shape": [2**62, 2**62]},
        {"entry": 5, "shape": [2**62, 2**62], "dtype": "unheard_of"},
        {"drop": 5},
        {"drop": 1},
        {"entry": 9, "data": [0, 4168, 4193, [14]]},
        {"entry": 9, "type": "text"},
    ],
    ids=str,
)
def test_intact_but_invalid_manifests_are_format_errors(change: dict[str, Any]) -> None:
    with pytest.raises(FormatError) as caught:
        decode_each(manifest_with(**change))
    assert type(caught.value) is FormatError
    assert caught.value.key == KEY


@pytest.mark.parametrize(
    "change",
    [
        {"entry": 3, "offset": 22},
        {"entry": 3, "strides": [7]},
        {"entry": 3, "shape": [0], "offset": 32},
        {"entry": 3, "shape": [5, 16], "strides": [0, 1], "offset": 0},
        {"entry": 1, "offsets": [1, 0]},
        {"entry": 1, "dtype": "unheard_of"},
    ],
    ids=str,
)
def test_limits_are_inclusive(change: dict[str, Any]) -> None:
    decode_each(manifest_with(**change))


def shards_of_one_path(*changes: dict[str, Any]) -> Any:
    """The golden manifest with shards of 2 x 4 elements, all of the path ``model/box``."""
    document = json.loads(GOLDEN_OLDER)
    for change in changes:
        shard = {
            "kind": "tensor",
            "path": "model/box",
            "dtype": "float32",
            "shape": [2, 4],
            "data": [0, 4096, 4128, [11]],
            "global_shape": [9, 4],
            "offsets": [0, 0],
        }
        shard.update(change)
        document["entries"].append({k: v for k, v in shard.items() if v is not None})
    return document


def test_shards_of_one_tensor_share_a_path() -> None:
    data = shards_of_one_path({}, {"offsets": [2, 0]}, {"offsets": [7, 0]})
    boxes = [entry for entry in decode_each(data).entries if entry.path == "model/box"]
    assert [entry.offsets for entry in boxes if isinstance(entry, TensorEntry)] == [
        (0, 0),
        (2, 0),
        (7, 0),
    ]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"offsets": None, "global_shape": None},
        {"offsets": [2, 0], "global_shape": [8, 4]},
        {"offsets": [2, 0], "dtype": "int32"},
        {"offsets": [2, 0], "type": "parameter"},
        {"offsets": [2, 0], "requires_grad": True},
        {"kind": "value", **dict.fromkeys(("dtype", "shape", "data", "global_shape", "offsets"))},
    ],
    ids=str,
)
def test_other_entries_of_one_path_are_format_errors(change: dict[str, Any]) -> None:
    for order in ([{}, change], [change, {}]):
        with pytest.raises(FormatError, match="model/box"):
            decode_each(shards_of_one_path(*order))


@pytest.mark.parametrize("start", [4064, 4176, 4096 + (1 << 40)])
@pytest.mark.parametrize("between", [None, "int64"])
def test_a_tensor_like_another_one_is_checked_too(start: int, between: str | None) -> None:
    alike = {"offsets": None, "global_shape": None}
    changes: list[dict[str, Any]] = [alike | {"path": "model/p"}]
    if between is not None:
        changes.append(alike | {"path": "model/q", "dtype": between, "shape": [4]})
    good = alike | {"path": "model/r"}
    decode_each(shards_of_one_path(*changes, good))
    with pytest.raises(FormatError, match="model/r"):
        decode_each(shards_of_one_path(*changes, good | {"data": [0, start, start + 32, [11]]}))


def test_no_view_is_one_of_several_shards() -> None:
    document = shards_of_one_path({}, {"offsets": [2, 0]})
    view = {"kind": "view", "path": "model/z", "of": "model/box", "dtype": "float32"}
    document["entries"].append(view | {"shape": [1], "strides": [1]})
    with pytest.raises(FormatError, match="not a tensor entry"):
        decode_each(document)


def test_a_manifest_under_another_key_is_refused() -> None:
    with pytest.raises(FormatError, match="rank 0"):
        decode_rank_manifest(GOLDEN_MANIFEST, manifest_key(ATTEMPT, 1))


# Tables that lie


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"paths": ""}, "7 pages for 0 bytes"),
        ({"paths": "AAAA"}, "7 pages for 3 bytes"),
        ({"paths": "AAAA" * 133 + "AAA="}, "7 pages for 401 bytes"),
        ({"paths": "!"}, "base64"),
        ({"pages": []}, "0 pages for 400 bytes"),
        ({"pages": [[-1, 0]] * 7}, "-1|>= 0"),
        ({"attempt": "x"}, "renamed"),
        ({"rank": 1}, "renamed"),
        ({"save": {"world_size": 1}}, "does not name the feature"),
        ({"save": ...}, "save"),
        ({"optimizers": ...}, "optimizers"),
        ({"entries": []}, "entries"),
        ({"more": 1}, "more"),
    ],
    ids=str,
)
def test_an_intact_but_invalid_table(change: dict[str, Any], says: str) -> None:
    head, _, rest = encode_rank_manifest(MANY).partition(b"\n")
    document = json.loads(head) | change
    del document["crc32c"]
    kept = {name: value for name, value in document.items() if value is not ...}
    data = seal(json.dumps(kept).encode()) + b"\n" + rest
    with pytest.raises(FormatError, match=says) as caught:
        decode_rank_manifest(data, KEY)
    assert type(caught.value) is FormatError
    assert caught.value.key == KEY


def test_entries_that_are_not_those_of_the_table() -> None:
    """Else what is found by its path would not be what is in the whole."""
    document = document_of(encode_rank_manifest(MANY))
    head, _, _ = encode_rank_manifest(MANY).partition(b"\n")
    paths = json.loads(head)["paths"]
    entries = document["entries"]
    for change in (entries[1:] + entries[:1], entries[:16] + entries[15:-1], entries[:-1]):
        data = encoded(document | {"entries": change, "paths": paths})
        with pytest.raises(FormatError, match="not those of the table|pages for"):
            decode_rank_manifest(data, KEY)
        table = table_of(data) if len(change) == 100 else None
        if table is not None:
            with pytest.raises(FormatError, match="not those of the table"):
                table.entries(dict(table.split(0, data[table.offsets[0] :])), lambda path: False)


def test_the_feature_and_the_form_agree() -> None:
    older = GOLDEN_OLDER[:-1] + b',"save":{"world_size":1,"features":["tables"]}}'
    for read in (decode_older, lambda data: decode_lone_rank_manifest(data, KEY)):
        with pytest.raises(FormatError, match="it has no table"):
            read(seal(older))
    with pytest.raises(ChecksumMismatch):
        decode_rank_manifest(GOLDEN_OLDER, KEY)
    with pytest.raises(FormatError):
        decode_older(GOLDEN_MANIFEST)


@given(st.data())
def test_mutated_documents_never_raise_anything_else(data: st.DataObject) -> None:
    """Replaces any one node of a valid document by any JSON: refused, or well-formed."""

    def mutate(node: Any) -> Any:
        if isinstance(node, dict | list) and node and data.draw(st.integers(0, 4)):
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            at = data.draw(st.sampled_from(keys))
            node[at] = mutate(node[at])
            return node
        return data.draw(json_noise)

    head, *lines = [json.loads(line) for line in GOLDEN_MANIFEST.splitlines()]
    del head["crc32c"]
    documents: list[Any] = [json.loads(GOLDEN_OLDER), head, *lines]
    at = data.draw(st.integers(0, len(documents) - 1))
    documents[at] = mutate(documents[at])
    older, head, *lines = documents
    rest = b"".join([json.dumps(line).encode() + b"\n" for line in lines])
    if isinstance(head, dict) and data.draw(st.booleans()):
        head["pages"] = [[len(rest), crc32c(rest)]]
    with suppress(FormatError):
        decode_older(json.dumps(older).encode())
    with suppress(FormatError):
        decode_rank_manifest(seal(json.dumps(head).encode()) + b"\n" + rest, KEY)


@given(st.binary(max_size=60))
def test_arbitrary_bytes_never_raise_anything_else(data: bytes) -> None:
    for document in (data, GOLDEN_MANIFEST[:-20] + data, seal(b"{" + data) + b"\n" + data):
        with pytest.raises(FormatError):
            decode_rank_manifest(document, KEY)
    for document in (data, GOLDEN_OLDER[:-20] + data):
        with pytest.raises(FormatError):
            decode_older(document)


@pytest.mark.parametrize("depth", [100, 1_000, 100_000])
def test_deep_values_end_in_a_refusal(depth: int) -> None:
    line = b'{"kind":"value","path":"lr","value":' + b"[" * depth + b"]" * depth + b"}"
    older = GOLDEN_OLDER[:-2] + b"," + line.replace(b"lr", b"z") + b"]}"
    head, *lines = GOLDEN_MANIFEST.splitlines()
    lines = [line if b'"lr"' in each else each for each in lines]
    page = b"".join([each + b"\n" for each in lines])
    document = json.loads(head) | {"pages": [[len(page), crc32c(page)]]}
    del document["crc32c"]
    table = seal(json.dumps(document).encode()) + b"\n" + page
    if depth < 900:
        assert len(decode_older(older).entries) == len(OLDER.entries) + 1
        assert len(decode_rank_manifest(table, KEY).entries) == len(OLDER.entries)
    else:
        with pytest.raises(FormatError):
            decode_older(older)
        with pytest.raises(FormatError):
            decode_rank_manifest(table, KEY)


# What the caller gives


def test_a_value_that_cannot_be_encoded_is_named_by_its_path() -> None:
    entries = (*MANIFEST.entries, ValueEntry(path="opt/state", value=object()))
    with pytest.raises(UsageError, match="'opt/state'"):
        encode_rank_manifest(msgspec.structs.replace(MANIFEST, entries=entries))


def test_a_hostile_shape_costs_no_time() -> None:
    assert tables._volume([2**62] * 1_000_000) > 2**63
    assert tables._volume([2**62] * 1_000_000 + [0]) == 0
