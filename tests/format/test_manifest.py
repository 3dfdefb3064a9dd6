"""Commit objects and rank manifests: round trips, golden bytes, damage, hostile documents."""

from __future__ import annotations

import json
import math
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorsnap.errors import (
    ChecksumMismatch,
    FormatError,
    NotASnapshot,
    UnsupportedFormat,
    UsageError,
)
from actorsnap.format import manifest
from actorsnap.format.checksum import MAX_BLOCK_BYTES, choose_block_bytes, crc32c
from actorsnap.format.layout import dtype_itemsize, manifest_key
from actorsnap.format.manifest import (
    COMPOSITE_PARTS,
    BytesEntry,
    BytesType,
    Commit,
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
    check_json,
    decode_commit,
    decode_lone_rank_manifest,
    decode_rank_manifest,
    encode_commit,
    encode_rank_manifest,
    features_in,
)

ATTEMPT = "20260131T120000-0123abcd-42-89abcdef"
REFUSALS = (ChecksumMismatch, FormatError, NotASnapshot, UnsupportedFormat)

COMMIT = Commit(
    version=1,
    world_size=2,
    attempt=ATTEMPT,
    created="2026-01-31T12:00:00.000000Z",
    manifests=tuple(
        ManifestRecord(key=manifest_key(ATTEMPT, rank), size=100 + rank, crc32c=rank)
        for rank in range(2)
    ),
    metadata={"step": 7, "b": [1.0, None, True, "ü"], "a": {}},
)

GOLDEN_COMMIT = (
    '{"crc32c":"50f52284","format":"actorsnap","version":1,"world_size":2,'
    '"attempt":"20260131T120000-0123abcd-42-89abcdef",'
    '"created":"2026-01-31T12:00:00.000000Z","manifests":['
    '{"key":"20260131T120000-0123abcd-42-89abcdef/manifest/0.json","size":100,"crc32c":0},'
    '{"key":"20260131T120000-0123abcd-42-89abcdef/manifest/1.json","size":101,"crc32c":1}],'
    '"metadata":{"a":{},"b":[1.0,null,true,"ü"],"step":7}}'
).encode()

MANIFEST = RankManifest(
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

GOLDEN_MANIFEST = (
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


def record_of(data: bytes, manifest: RankManifest = MANIFEST) -> ManifestRecord:
    """What an honest commit object says about a manifest's bytes."""
    key = manifest_key(manifest.attempt, manifest.rank)
    return ManifestRecord(key=key, size=len(data), crc32c=crc32c(data))


def decode(data: bytes) -> RankManifest:
    record = record_of(data)
    return decode_rank_manifest(data, record, record.key)


def sealed(document: object) -> bytes:
    """A commit object with the right checksum, whatever it says."""
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    body = b'{"crc32c":"00000000",' + text.lstrip()[1:]
    return body.replace(b"00000000", b"%08x" % crc32c(body), 1)


# Golden documents: what is written today is read for ever


def test_golden_commit() -> None:
    assert encode_commit(COMMIT) == GOLDEN_COMMIT
    assert decode_commit(GOLDEN_COMMIT) == COMMIT


def test_golden_manifest() -> None:
    assert encode_rank_manifest(MANIFEST) == GOLDEN_MANIFEST
    assert decode(GOLDEN_MANIFEST) == MANIFEST


def test_every_member_of_a_commit_that_is_not_default_is_written() -> None:
    document = json.loads(encode_commit(msgspec.structs.replace(COMMIT, fsync=False, metadata={})))
    assert document["fsync"] is False
    assert "metadata" not in document
    assert list(document)[:2] == ["crc32c", "format"]


# Round trips

text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text
)
json_values = st.recursive(
    scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(text, v, max_size=3), max_leaves=6
)
dims = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def commits(draw: st.DrawFn) -> Commit:
    world_size = draw(st.integers(1, 4))
    return Commit(
        version=1,
        world_size=world_size,
        attempt=ATTEMPT,
        created=draw(text),
        manifests=tuple(
            ManifestRecord(
                key=manifest_key(ATTEMPT, rank),
                size=draw(st.integers(0, 2**63 - 1)),
                crc32c=draw(st.integers(0, 2**32 - 1)),
            )
            for rank in range(world_size)
        ),
        fsync=draw(st.booleans()),
        metadata=draw(st.dictionaries(text, json_values, max_size=3)),
    )


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
    )


@given(commits())
def test_commits_round_trip_to_the_same_bytes(commit: Commit) -> None:
    data = encode_commit(commit)
    back = decode_commit(data)
    assert back == commit
    assert encode_commit(back) == data
    assert decode_commit(memoryview(data)) == commit


@given(manifests())
@settings(max_examples=60)
def test_manifests_round_trip_to_the_same_bytes(manifest: RankManifest) -> None:
    data = encode_rank_manifest(manifest)
    record = record_of(data, manifest)
    back = decode_rank_manifest(data, record, record.key)
    assert back == manifest
    # Defaults are left out by identity: what was decoded must be left out as well.
    assert encode_rank_manifest(back) == data


# Damage


def test_any_flipped_bit_in_a_commit_object_is_found() -> None:
    for at in range(len(GOLDEN_COMMIT) * 8):
        damaged = bytearray(GOLDEN_COMMIT)
        damaged[at // 8] ^= 1 << (at % 8)
        with pytest.raises(ChecksumMismatch):  # not even "of a newer version"
            decode_commit(bytes(damaged))


def test_any_flipped_bit_in_a_rank_manifest_is_found() -> None:
    record = record_of(GOLDEN_MANIFEST)
    for at in range(len(GOLDEN_MANIFEST) * 8):
        damaged = bytearray(GOLDEN_MANIFEST)
        damaged[at // 8] ^= 1 << (at % 8)
        with pytest.raises(ChecksumMismatch) as caught:
            decode_rank_manifest(damaged, record, record.key)
        assert caught.value.key == record.key


SEALED = msgspec.structs.replace(
    MANIFEST, save=SaveRecord(world_size=1, features=("annotations",), step=7, metadata={"a": [1]})
)


def test_a_manifest_that_repeats_the_commit_object_has_a_checksum_of_its_own() -> None:
    data = encode_rank_manifest(SEALED)
    assert data == sealed(data.partition(b",")[2].join([b"{", b""]))
    assert decode(data) == SEALED
    key = manifest_key(ATTEMPT, 0)
    for buffer in (bytearray(data), memoryview(data)):
        assert decode_rank_manifest(buffer, record_of(data), key) == SEALED
    assert decode_lone_rank_manifest(data, key) == (SEALED, record_of(data))


def test_any_flipped_bit_is_found_without_a_commit_object() -> None:
    data, key = encode_rank_manifest(SEALED), manifest_key(ATTEMPT, 0)
    for at in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[at // 8] ^= 1 << (at % 8)
        with pytest.raises(FormatError) as caught:
            decode_lone_rank_manifest(bytes(damaged), key)
        assert caught.value.key == key
    for length in range(len(data)):
        with pytest.raises(FormatError):
            decode_lone_rank_manifest(data[:length], key)
    with pytest.raises(FormatError, match="its own checksum is missing"):
        decode_lone_rank_manifest(b"{" + data.partition(b",")[2], key)


def test_an_older_manifest_without_a_commit_object() -> None:
    key = manifest_key(ATTEMPT, 0)
    assert decode_lone_rank_manifest(GOLDEN_MANIFEST, key) == (MANIFEST, record_of(GOLDEN_MANIFEST))
    assert features_in([MANIFEST]) == ()
    blocks = Stored(0, 4096, 4096 + (2 << 20), (1,) * 32)
    small = TensorEntry(path="m/x", dtype="uint8", shape=(2 << 20,), data=blocks)
    chunked = msgspec.structs.replace(MANIFEST.objects[0], chunks=(StoredChunk(0, 4192, 1),))
    compressed = msgspec.structs.replace(MANIFEST, objects=(chunked,))
    assert features_in([MANIFEST, msgspec.structs.replace(MANIFEST, entries=(small,))]) == (
        "block_sizes",
    )
    assert features_in([compressed, MANIFEST]) == ("compression",)


def test_any_truncation_is_found() -> None:
    record = record_of(GOLDEN_MANIFEST)
    for length in range(len(GOLDEN_MANIFEST)):
        with pytest.raises(ChecksumMismatch, match=f"{length} bytes"):
            decode_rank_manifest(GOLDEN_MANIFEST[:length], record, record.key)
    for length in range(len(GOLDEN_COMMIT)):
        with pytest.raises(ChecksumMismatch):
            decode_commit(GOLDEN_COMMIT[:length])
    with pytest.raises(ChecksumMismatch):
        decode_commit(GOLDEN_COMMIT + b"\n")


# What is looked at before the rest is believed


@pytest.mark.parametrize(
    "data", [b"", b"PK\x03\x04", b"{}", b'{"format":"other"}', b"[1]", b"\xff", b"null"]
)
def test_what_never_was_a_commit_object_is_damage(data: bytes) -> None:
    with pytest.raises(ChecksumMismatch) as caught:
        decode_commit(data)
    assert caught.value.key == "actorsnap.json"


def test_an_intact_document_of_another_format_is_no_snapshot() -> None:
    with pytest.raises(NotASnapshot, match="'other'"):
        decode_commit(sealed({"format": "other", "version": 1}))


@pytest.mark.parametrize("version", [2, 17, 2**70])
@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_newer_version_is_named_whatever_else_it_changed(version: int, is_sealed: bool) -> None:
    document = {"format": "actorsnap", "version": version, "features": 5, "world_size": {}}
    data = sealed(document) if is_sealed else json.dumps(document).encode()
    with pytest.raises(UnsupportedFormat, match=f"format version {version}, .* version 1"):
        decode_commit(data)


def test_unknown_features_are_named_before_the_rest_is_decoded() -> None:
    document = {"format": "actorsnap", "version": 1, "features": ["zstd", "aes"], "new": 1}
    with pytest.raises(
        UnsupportedFormat, match="features aes, zstd, and .* knows annotations, block_sizes"
    ):
        decode_commit(sealed(document))
    with pytest.raises(ChecksumMismatch):  # of this version, so the checksum must fit first
        decode_commit(json.dumps(document).encode())


VALID_COMMIT = json.loads(GOLDEN_COMMIT)


def commit_with(**members: Any) -> bytes:
    document = {k: v for k, v in VALID_COMMIT.items() if k != "crc32c"} | members
    return sealed({k: v for k, v in document.items() if v is not ...})


def records(*keys: str) -> list[dict[str, object]]:
    return [{"key": key, "size": 1, "crc32c": 1} for key in keys]


@pytest.mark.parametrize(
    "members",
    [
        {"version": ...},
        {"version": 0},
        {"version": -1},
        {"version": "1"},
        {"version": True},
        {"version": 1.5},
        {"version": [[[]]]},
        {"features": "zstd"},
        {"features": {"zstd": 1}},
        {"features": [1]},
        {"world_size": ...},
        {"world_size": 3},
        {"world_size": -2},
        {"world_size": 0, "manifests": []},
        {"world_size": 2**80},
        {"attempt": ""},
        {"attempt": ".."},
        {"attempt": "a/b"},
        {"attempt": "a\\b"},
        {"attempt": "another"},
        {"unknown": 1},
        {"metadata": []},
        {"created": 5},
        {"manifests": {}},
        {"manifests": records(f"{ATTEMPT}/manifest/0.json")},
        {"manifests": records(*[f"{ATTEMPT}/manifest/0.json"] * 2)},
        {"manifests": records(f"{ATTEMPT}/a", f"/{ATTEMPT}/b")},
        {"manifests": records(f"{ATTEMPT}/a", f"{ATTEMPT}/../b")},
        {"manifests": records(f"{ATTEMPT}/a", f"{ATTEMPT}//b")},
        {"manifests": records(f"{ATTEMPT}/a", f"{ATTEMPT}/./b")},
        {"manifests": records(f"{ATTEMPT}/a", f"{ATTEMPT}/b\\c")},
        {"manifests": records(f"{ATTEMPT}/a", f"{ATTEMPT}/b\0")},
        {"manifests": records(f"{ATTEMPT}/a", f"{ATTEMPT}/")},
        {"manifests": records(f"{ATTEMPT}/a", ATTEMPT)},
        {"manifests": records(f"{ATTEMPT}/a", "")},
        {"manifests": records(f"{ATTEMPT}/a", f"x{ATTEMPT}/b")},
        {"manifests": [*records(f"{ATTEMPT}/a"), {"key": "b", "size": -1, "crc32c": 1}]},
        {"manifests": [*records(f"{ATTEMPT}/a"), {"key": "b", "size": 1, "crc32c": 2**32}]},
        {"manifests": [*records(f"{ATTEMPT}/a"), {"key": "b", "size": 2**63, "crc32c": 1}]},
    ],
    ids=str,
)
def test_intact_but_invalid_commits_are_format_errors(members: dict[str, Any]) -> None:
    with pytest.raises(FormatError) as caught:
        decode_commit(commit_with(**members))
    assert type(caught.value) is FormatError
    assert caught.value.key == "actorsnap.json"


def test_the_helpers_of_these_tests_make_valid_documents() -> None:
    assert decode_commit(commit_with()) == COMMIT
    assert decode(manifest_with()) == MANIFEST


@pytest.mark.parametrize("depth", [100, 1_000, 100_000])
def test_deep_documents_end_in_a_refusal(depth: int) -> None:
    deep = b"[" * depth + b"]" * depth
    for data in (deep, sealed(GOLDEN_COMMIT[22:-1] + b',"z":' + deep + b"}")):
        with pytest.raises(REFUSALS):
            decode_commit(data)
    data = GOLDEN_MANIFEST[:-2] + b',{"kind":"value","path":"z","value":' + deep + b"}]}"
    if depth < 900:
        assert len(decode(data).entries) == len(MANIFEST.entries) + 1
    else:
        with pytest.raises(FormatError):
            decode(data)


# Manifests that are intact and well-typed, and lie

VALID_MANIFEST = json.loads(GOLDEN_MANIFEST)


def manifest_with(
    *, entry: int | None = None, drop: int | None = None, obj: Any = None, **members: Any
) -> bytes:
    """The golden manifest with members changed: of itself, of an entry, or of its object."""
    document = json.loads(GOLDEN_MANIFEST)
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
    return json.dumps(document).encode()


OBJECT = VALID_MANIFEST["objects"][0]


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
        decode(manifest_with(**change))
    assert type(caught.value) is FormatError
    assert caught.value.key == manifest_key(ATTEMPT, 0)


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
    decode(manifest_with(**change))


def shards_of_one_path(*changes: dict[str, Any]) -> bytes:
    """The golden manifest with shards of 2 x 4 elements, all of the path ``model/box``."""
    document = json.loads(GOLDEN_MANIFEST)
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
    return json.dumps(document).encode()


def test_shards_of_one_tensor_share_a_path() -> None:
    data = shards_of_one_path({}, {"offsets": [2, 0]}, {"offsets": [7, 0]})
    boxes = [entry for entry in decode(data).entries if entry.path == "model/box"]
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
            decode(shards_of_one_path(*order))


def test_no_view_is_one_of_several_shards() -> None:
    document = json.loads(shards_of_one_path({}, {"offsets": [2, 0]}))
    view = {"kind": "view", "path": "model/z", "of": "model/box", "dtype": "float32"}
    document["entries"].append(view | {"shape": [1], "strides": [1]})
    with pytest.raises(FormatError, match="no tensor entry"):
        decode(json.dumps(document).encode())


def test_a_manifest_under_another_key_is_refused() -> None:
    record = record_of(GOLDEN_MANIFEST)
    with pytest.raises(FormatError, match="rank 0"):
        decode_rank_manifest(GOLDEN_MANIFEST, record, manifest_key(ATTEMPT, 1))


json_noise = st.recursive(
    scalars | st.sampled_from([-1, 0, 2**63, 2**64, "actorsnap", ATTEMPT, "tensor", "view"]),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(text, v, max_size=3),
    max_leaves=8,
)


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

    try:
        decode(json.dumps(mutate(json.loads(GOLDEN_MANIFEST))).encode())
    except FormatError:
        pass
    document = mutate(json.loads(GOLDEN_COMMIT))
    if isinstance(document, dict):
        document.pop("crc32c", None)
    try:
        decode_commit(sealed(document))
    except FormatError:
        pass


@given(st.binary(max_size=60))
def test_arbitrary_bytes_never_raise_anything_else(data: bytes) -> None:
    for document in (data, GOLDEN_COMMIT[:20] + data, sealed(GOLDEN_COMMIT[21:60] + data)):
        with pytest.raises(REFUSALS):
            decode_commit(document)
    with pytest.raises(FormatError):
        decode(GOLDEN_MANIFEST[:-20] + data)
    with pytest.raises(FormatError):
        decode(data)


# What the caller gives


@pytest.mark.parametrize(
    ("metadata", "place"),
    [
        ({"a": [0, math.nan]}, r"metadata\['a'\]\[1\] is nan"),
        ({"a": {"b": b"x"}}, r"metadata\['a'\]\['b'\] is a bytes"),
        ({"a": {1: 2}}, r"the key 1 in metadata\['a'\]"),
        ({"a": 2**64}, r"metadata\['a'\] is an integer"),
        ({"a": "\ud800"}, r"metadata\['a'\] is no Unicode"),
        ({"\ud800": 1}, r"the key '\\ud800' in metadata is no Unicode"),
        ({"a": {1, 2}}, r"metadata\['a'\] is a set"),
        ({"a": object()}, r"metadata\['a'\] is a object"),
    ],
)
def test_metadata_that_is_not_json_is_the_callers_mistake(
    metadata: dict[str, Any], place: str
) -> None:
    with pytest.raises(UsageError, match=place):
        check_json(metadata, "metadata")


def test_metadata_that_never_ends_is_the_callers_mistake() -> None:
    endless: dict[str, Any] = {}
    endless["again"] = endless
    with pytest.raises(UsageError, match="deeper than 500$"):
        check_json(endless, "metadata")


def test_metadata_as_deep_as_allowed_comes_back() -> None:
    deep: Any = 1
    for _ in range(499):
        deep = [deep]
    commit = msgspec.structs.replace(COMMIT, metadata={"deep": deep})
    check_json(commit.metadata, "metadata")
    assert decode_commit(encode_commit(commit)) == commit
    with pytest.raises(UsageError, match="deeper than 500$"):
        check_json({"deep": [deep]}, "metadata")


def test_a_value_that_cannot_be_encoded_is_named_by_its_path() -> None:
    entries = (*MANIFEST.entries, ValueEntry(path="opt/state", value=object()))
    with pytest.raises(UsageError, match="'opt/state'"):
        encode_rank_manifest(msgspec.structs.replace(MANIFEST, entries=entries))


def test_a_hostile_shape_costs_no_time() -> None:
    assert manifest._volume([2**62] * 1_000_000) > 2**63
    assert manifest._volume([2**62] * 1_000_000 + [0]) == 0
