# SPDX-License-Identifier: Apache-2.0
"""Object keys, and data objects opened by safetensors itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.format import layout
from actorsnap.format.layout import (
    DATA_ALIGNMENT,
    MAX_HEADER_BYTES,
    SAFETENSORS_DTYPES,
    Attempt,
    Slot,
    data_key,
    dtype_itemsize,
    header_cost,
    is_well_formed_key,
    lay_out,
    manifest_key,
    safe_name,
    shard_name,
)

safetensors = pytest.importorskip("safetensors", minversion="0.6")
safetensors_torch = pytest.importorskip("safetensors.torch")

ATTEMPT = Attempt(1769860800, "0123abcd", 42, "89abcdef")
FOLDER = "20260131T120000-0123abcd-42-89abcdef"

ALL_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


def write(path: Path, slots: list[Slot], payloads: list[bytes]) -> Path:
    """Writes a data object as the uploader does: header first, then each slot at its start."""
    laid = lay_out(slots)
    with path.open("wb") as file:
        file.truncate(laid.size)
        file.write(laid.header)
        for start, payload in zip(laid.starts, payloads, strict=True):
            file.seek(start)
            file.write(payload)
    return path


def described_in(header: bytes) -> dict[str, Any]:
    """The tensors of a data object, in stored order."""
    found: dict[str, Any] = json.loads(header[8:])
    del found["__metadata__"]
    return found


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy())


def sample(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    dtype = ALL_DTYPES[name]
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    data = torch.arange(num_bytes, dtype=torch.int64).to(torch.uint8)
    if dtype == torch.bool:
        data = data % 2
    return data.view(dtype).reshape(shape)


# Data objects


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
def test_safetensors_loads_every_dtype_as_it_was(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensors = {name: sample(name, shape) for name in SAFETENSORS_DTYPES}
    slots = [Slot(name, name, shape, t.numel() * t.itemsize) for name, t in tensors.items()]
    path = write(tmp_path / "all.safetensors", slots, [raw(t) for t in tensors.values()])
    loaded = safetensors_torch.load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        if name == "float4_e2m1fn_x2" and not shape:
            assert loaded[name].dtype == torch.uint8  # it has no dim that could be doubled
            continue
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert raw(loaded[name]) == raw(tensor)


def test_every_dtype_of_torch_has_the_itemsize_that_torch_gives_it() -> None:
    assert {name: dtype_itemsize(name) for name in ALL_DTYPES} == {
        name: dtype.itemsize for name, dtype in ALL_DTYPES.items()
    }


def test_dtypes_that_safetensors_lacks_are_bytes(tmp_path: Path) -> None:
    others = ALL_DTYPES.keys() - SAFETENSORS_DTYPES.keys()
    assert {"complex128", "complex32", "quint8"} <= others
    slots = [Slot(name, name, (2, 3), 6 * ALL_DTYPES[name].itemsize) for name in sorted(others)]
    payloads = [bytes(range(slot.nbytes)) for slot in slots]
    loaded = safetensors_torch.load_file(write(tmp_path / "x.safetensors", slots, payloads))
    for slot, payload in zip(slots, payloads, strict=True):
        assert loaded[slot.name].dtype == torch.uint8
        assert bytes(loaded[slot.name].numpy()) == payload


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["__metadata__", 'a"b\\c', "a/b@0,8", "\x00", "\x7f", "ü", "𝄞", " "]
)


@given(
    st.dictionaries(
        names,
        st.tuples(st.sampled_from(sorted(ALL_DTYPES)), st.lists(st.integers(0, 3), max_size=3)),
        max_size=8,
    )
)
def test_any_names_are_found_by_safetensors(members: dict[str, tuple[str, list[int]]]) -> None:
    slots = [
        Slot(name, dtype, tuple(shape), torch.Size(shape).numel() * ALL_DTYPES[dtype].itemsize)
        for name, (dtype, shape) in members.items()
    ]
    laid = lay_out(slots)
    assert laid.starts == tuple(
        len(laid.header) + sum(slot.nbytes for slot in slots[:i]) for i in range(len(slots))
    )
    data_bytes = sum(slot.nbytes for slot in slots)
    assert len(laid.header) % DATA_ALIGNMENT == 0
    assert laid.size == len(laid.header) + data_bytes
    parsed = dict(safetensors.deserialize(laid.header + bytes(data_bytes)))
    expected = {s.name if s.name != "__metadata__" else "%5F_metadata__" for s in slots}
    assert parsed.keys() == expected
    own = described_in(laid.header)
    assert list(own) == [s.name if s.name != "__metadata__" else "%5F_metadata__" for s in slots]
    for slot, start, member in zip(slots, laid.starts, own.values(), strict=True):
        first = start - len(laid.header)
        assert member["data_offsets"] == [first, first + slot.nbytes]
        other = parsed[slot.name if slot.name != "__metadata__" else "%5F_metadata__"]
        assert (other["dtype"], other["shape"]) == (member["dtype"], member["shape"])
    assert sum(map(cost, slots)) >= len(laid.header.rstrip()) - 8 or not slots


def cost(slot: Slot) -> int:
    return header_cost(slot.name, len(slot.shape))


def test_safe_open_reads_slices(tmp_path: Path) -> None:
    tensor = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    slot = Slot(shard_name("w", (0, 6)), "float32", (4, 6), 96)
    path = write(tmp_path / "x.safetensors", [slot], [raw(tensor)])
    with safetensors.safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert list(file.keys()) == ["w@0,6"]
        assert torch.equal(file.get_slice("w@0,6")[1:3, ::2], tensor[1:3, ::2])


def test_golden_header() -> None:
    laid = lay_out([Slot("w", "bfloat16", (2, 3), 12), Slot("z", "complex128", (1,), 16)])
    text = (
        b'{"__metadata__":{"format":"pt"},'
        b'"w":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},'
        b'"z":{"dtype":"U8","shape":[16],"data_offsets":[12,28]}}'
    )
    assert laid.header == (4088).to_bytes(8, "little") + text.ljust(4088)
    assert laid.starts == (4096, 4108)
    assert laid.size == 4124


@pytest.mark.parametrize("count", [1, 255, 256, 257, 600])
def test_a_header_names_each_of_many_tensors_once(count: int) -> None:
    """Members are encoded in groups."""
    laid = lay_out([Slot(f"w{number}", "int8", (number,), number) for number in range(count)])
    pairs = json.loads(laid.header[8:], object_pairs_hook=list)
    assert [name for name, _ in pairs] == ["__metadata__", *[f"w{n}" for n in range(count)]]
    ends = [dict(member)["data_offsets"][1] for _, member in pairs[1:]]
    assert ends == [sum(range(number + 1)) for number in range(count)]


def test_no_slots_give_a_valid_object() -> None:
    laid = lay_out([])
    assert laid.size == len(laid.header) == DATA_ALIGNMENT
    assert safetensors.deserialize(laid.header) == []
    assert described_in(laid.header) == {}


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([Slot("a", "uint8", (1,), 1)] * 2, "'a' is twice"),
        ([Slot(n, "uint8", (1,), 1) for n in ("__metadata__", "%5F_metadata__")], "is twice"),
        ([Slot("a", "float32", (2,), 4)], "not those of float32"),
        ([Slot("a", "float32", (-1, -1), 4)], "not those of float32"),
        ([Slot("a", "complex128", (1,), -16)], "-16 bytes"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(slots: list[Slot], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lay_out(slots)


def test_a_header_that_is_too_long_is_refused_and_costs_foresee_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert MAX_HEADER_BYTES == 64 << 20  # safetensors reads up to 100 MB
    limit = 50_000
    monkeypatch.setattr(layout, "MAX_HEADER_BYTES", limit)
    slots = [Slot(f"{i}" * 500, "uint8", (1,), 1) for i in range(10, 99)]
    assert sum(map(cost, slots)) > limit
    with pytest.raises(ValueError, match="further object"):
        lay_out(slots)
    while sum(map(cost, slots)) > limit:
        slots.pop()
    assert len(described_in(lay_out(slots).header)) == len(slots)


@pytest.mark.parametrize("character", ["a", '"', "\\", "\x00", "\x7f", "ü", "𝄞"])
def test_costs_are_at_least_what_the_header_takes(character: str) -> None:
    slot = Slot(character * 1000, "float8_e4m3fnuz", (0, 2**62, 2**62), 0)
    assert cost(slot) >= len(lay_out([slot]).header.rstrip()) - 8


# Names and keys


def test_keys_of_the_documented_form() -> None:
    assert str(ATTEMPT) == FOLDER
    assert data_key(FOLDER, "model/x", 3, 1) == f"{FOLDER}/data/model=2Fx/3-1.safetensors"
    assert data_key(FOLDER, None, 3, 0) == f"{FOLDER}/data/=small/3-0.safetensors"
    assert manifest_key(FOLDER, 3) == f"{FOLDER}/manifest/3.json"
    assert shard_name("w", (0, 128)) == "w@0,128"


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("model", "model"),
        ("a b/c", "a=20b=2Fc"),
        (".hidden.x", "=2Ehidden.x"),
        ("..", "=2E."),
        ("", "="),
        ("=small", "=3Dsmall"),
        ("ü", "=C3=BC"),
        ("\ud800", "=ED=A0=80"),
        ("a" * 120, "a" * 120),
        ("a" * 121, "a" * 100 + "=~e9615320128cc7a3"),
    ],
)
def test_safe_names(key: str, name: str) -> None:
    assert safe_name(key) == name


long_or_short = st.text(max_size=10) | st.builds(
    lambda middle, n: "a" * n + middle + "a" * n, st.text("aä.", max_size=2), st.integers(50, 62)
)


@given(st.lists(long_or_short, min_size=2, max_size=4, unique=True))
def test_safe_names_differ_and_are_safe(keys: list[str]) -> None:
    found = {safe_name(key) for key in keys}
    assert len(found) == len(keys)
    assert "=small" not in found
    for name in found:
        assert re.fullmatch(r"(?!\.)[A-Za-z0-9._=~-]{1,120}", name)
        assert is_well_formed_key(name)


attempts = st.builds(
    Attempt,
    st.integers(0, 253402300799),
    st.from_regex(r"[0-9a-f]{8}", fullmatch=True),
    st.integers(0, 2**63),
    st.from_regex(r"[0-9a-f]{8}", fullmatch=True),
)


@given(attempts)
def test_attempts_round_trip(attempt: Attempt) -> None:
    folder = str(attempt)
    assert Attempt.parse(folder) == attempt
    assert is_well_formed_key(folder)


@given(st.text() | st.from_regex(r"[0-9]{8}T[0-9]{6}-[0-9a-f]{8}-[0-9]{1,4}-[0-9a-f]{8}"))
def test_parse_takes_nothing_but_what_str_gives(text: str) -> None:
    attempt = Attempt.parse(text)
    assert attempt is None or str(attempt) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "20260131T120000-0123abcd-42",
        "20260131T120000-0123ABCD-42-89abcdef",
        "20260131T120000-0123abcd-042-89abcdef",
        "20260231T120000-0123abcd-42-89abcdef",
        "20260131T120060-0123abcd-42-89abcdef",
        "19691231T235959-0123abcd-42-89abcdef",
        "20260131T120000-0123abcd-42-89abcdef\n",
        "٢0260131T120000-0123abcd-42-89abcdef",
    ],
)
def test_other_folders_are_no_attempts(text: str) -> None:
    assert Attempt.parse(text) is None


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("a", True),
        ("a/b.c/=small", True),
        ("a/..b", True),
        ("", False),
        ("/a", False),
        ("a/", False),
        ("a//b", False),
        (".", False),
        ("a/./b", False),
        ("a/../b", False),
        ("a\\b", False),
        ("a\0b", False),
    ],
)
def test_well_formed_keys(key: str, expected: bool) -> None:
    assert is_well_formed_key(key) is expected


@pytest.mark.parametrize(
    ("name", "itemsize"),
    [("<f8", 8), ("|b1", 1), (">i2", 2), ("<U3", 12), ("<M8[ns]", 8), ("|V0", 0)],
)
def test_itemsizes_of_numpy_dtypes(name: str, itemsize: int) -> None:
    assert dtype_itemsize(name) == itemsize


@pytest.mark.parametrize("name", ["", "float7", "<q8", "f8]", "float99999", "<f8\n"])
def test_unknown_dtypes_have_no_itemsize(name: str) -> None:
    assert dtype_itemsize(name) is None
