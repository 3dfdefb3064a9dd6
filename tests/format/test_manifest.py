# SPDX-License-Identifier: Apache-2.0
"""Commit objects: round trips, golden bytes, damage, hostile documents."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.errors import (
    ChecksumMismatch,
    FormatError,
    NotASnapshot,
    UnsupportedFormat,
    UsageError,
)
from actorsnap.format.checksum import crc32c
from actorsnap.format.layout import manifest_key
from actorsnap.format.manifest import (
    Commit,
    ManifestRecord,
    SaveRecord,
    check_json,
    decode_commit,
    encode_commit,
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


def sealed(document: object) -> bytes:
    """A commit object with the right checksum, whatever it says."""
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    body = b'{"crc32c":"00000000",' + text.lstrip()[1:]
    return body.replace(b"00000000", b"%08x" % crc32c(body), 1)


# Golden documents: what is written today is read for ever


def test_golden_commit() -> None:
    assert encode_commit(COMMIT) == GOLDEN_COMMIT
    assert decode_commit(GOLDEN_COMMIT) == COMMIT


def test_every_member_of_a_commit_that_is_not_default_is_written() -> None:
    document = json.loads(encode_commit(msgspec.structs.replace(COMMIT, fsync=False, metadata={})))
    assert document["fsync"] is False
    assert "metadata" not in document
    assert list(document)[:2] == ["crc32c", "format"]


def test_a_commit_object_of_many_ranks_is_small() -> None:
    save = SaveRecord(world_size=8192, features=("tables",), step=7)
    commit = save.commit(attempt=ATTEMPT, created=COMMIT.created)
    data = encode_commit(commit)
    assert decode_commit(data) == commit
    assert len(data) < 250
    assert (commit.record(5), COMMIT.record(1)) == (None, COMMIT.manifests[1])


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


@given(commits())
def test_commits_round_trip_to_the_same_bytes(commit: Commit) -> None:
    data = encode_commit(commit)
    back = decode_commit(data)
    assert back == commit
    assert encode_commit(back) == data
    assert decode_commit(memoryview(data)) == commit


# Damage


def test_any_flipped_bit_in_a_commit_object_is_found() -> None:
    for at in range(len(GOLDEN_COMMIT) * 8):
        damaged = bytearray(GOLDEN_COMMIT)
        damaged[at // 8] ^= 1 << (at % 8)
        with pytest.raises(ChecksumMismatch):  # not even "of a newer version"
            decode_commit(bytes(damaged))


def test_any_truncation_is_found() -> None:
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
        {"features": ["tables"]},
        {"features": ["tables"], "manifests": ..., "world_size": 2**20 + 1},
        {"features": ["tables"], "manifests": ..., "world_size": 2**60},
        {"features": ["tables"], "manifests": [], "world_size": 0},
        {"manifests": ...},
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


@pytest.mark.parametrize("depth", [100, 1_000, 100_000])
def test_deep_documents_end_in_a_refusal(depth: int) -> None:
    deep = b"[" * depth + b"]" * depth
    for data in (deep, sealed(GOLDEN_COMMIT[22:-1] + b',"z":' + deep + b"}")):
        with pytest.raises(REFUSALS):
            decode_commit(data)


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


# What the caller gives


@pytest.mark.parametrize(
    ("metadata", "place"),
    [
        ({"a": [0, math.nan]}, r"metadata\['a'\]\[1\] is nan, which JSON lacks: write it as text"),
        ({"a": {"b": b"x"}}, r"metadata\['a'\]\['b'\] is of type bytes"),
        ({"a": {1: 2}}, r"the key 1 in metadata\['a'\]"),
        ({"a": 2**64}, r"metadata\['a'\] is an integer"),
        ({"a": "\ud800"}, r"metadata\['a'\] is not Unicode"),
        ({"\ud800": 1}, r"the key '\\ud800' in metadata is not Unicode"),
        ({"a": {1, 2}}, r"metadata\['a'\] is of type set, which JSON"),
        (
            {"a": object()},
            r"metadata\['a'\] is of type object, which JSON lacks: make it a str, number",
        ),
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
