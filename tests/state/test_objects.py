# SPDX-License-Identifier: Apache-2.0
"""Leaves that are no tensors come back as what they were, or are refused by name."""

from __future__ import annotations

import json
import math
import struct
from base64 import b64encode
from collections import OrderedDict
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.errors import FormatError, UsageError
from actorsnap.format.manifest import BytesEntry, TensorEntry, ValueEntry
from actorsnap.state.objects import (
    NotInline,
    array_from_npy,
    array_to_npy,
    decode_inline,
    encode_inline,
)
from actorsnap.state.restore.build import prepare
from actorsnap.state.stateful import Matching
from tests.state.stored import round_trip, store
from tests.state.test_tree import same


def nan(bits: int) -> float:
    (value,) = struct.unpack(">d", bits.to_bytes(8, "big"))
    return float(value)


VALUES: list[Any] = [
    *(None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 10**3000),
    *(0.0, -0.0, 1.0, 1e22, 1e-320, 1.7976931348623157e308, math.inf, -math.inf),
    *("", "text", "\x00", "😀", "\ud800", "a\udfff", "$", '{"$": 1}', "x" * 4096, "x" * 4097),
    *("ä" * 2048, "ä" * 2049, "\ud800" * 5000),
    *(b"", b"\x00\xff", b"x" * 4096, b"x" * 4097, bytearray(), bytearray(b"ab" * 3000)),
    *(1j, complex(-0.0, math.inf)),
    *(torch.Size([]), torch.Size([2, 0]), torch.float8_e5m2, torch.bfloat16),
    *(torch.device("cpu"), torch.device("cuda", 1), torch.device("meta")),
    *(torch.strided, torch.sparse_csr, torch.channels_last, torch.preserve_format),
    *(np.dtype("f4"), np.dtype(">i2"), np.dtype("M8[ns]"), np.dtype("U5"), np.dtype("V3")),
    np.dtype([("a", "<i4"), ("b", "<f8", (2, 3)), ("c", [("d", "?")])]),
    np.dtype({"names": ["a"], "formats": ["i4"], "offsets": [4], "itemsize": 12}),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: f"{type(v).__name__} {v!r:.20}")
def test_values_come_back(value: Any) -> None:
    back = round_trip(value)
    assert same(back, value)


@given(st.integers(0, 2**64 - 1))
def test_floats_come_back_bit_by_bit(bits: int) -> None:
    back = round_trip(nan(bits))
    assert struct.pack(">d", back) == struct.pack(">d", nan(bits))


nested = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary()),
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers(), st.tuples(st.text())), children),
    ),
    max_leaves=10,
)


@given(nested)
def test_the_inline_encoding_is_json_and_comes_back(value: Any) -> None:
    encoded = encode_inline(value, "p")
    assert same(decode_inline(json.loads(json.dumps(encoded, allow_nan=False)), "p"), value)


def test_module_metadata_comes_back() -> None:
    state = torch.nn.BatchNorm1d(3).state_dict()
    assert state._metadata  # type: ignore[attr-defined]
    back = round_trip(state)
    assert type(back) is OrderedDict
    assert back._metadata == state._metadata  # type: ignore[attr-defined]
    assert list(back) == list(state)


@pytest.mark.parametrize(
    "encoded",
    [
        {},
        {"$": "int"},
        {"$": "int", "v": "x"},
        {"$": "int", "v": "1" * 5000},
        {"$": "int", "v": None},
        {"$": "float", "v": "00"},
        {"$": "float", "v": 3},
        {"$": "complex", "v": [1.0]},
        {"$": "bytes", "v": "!"},
        {"$": "str", "v": "//4="},
        {"$": "size", "v": ["a"]},
        {"$": "dtype", "v": "nn"},
        {"$": "device", "v": "nowhere:1:2"},
        {"$": "npdtype", "v": "O"},
        {"$": "npdtype", "v": [["a", "|O"]]},
        {"$": "npdtype", "v": {"a": 1}},
        {"$": "tuple", "v": 3},
        {"$": "dict", "v": [[1]]},
        {"$": "dict", "v": [[[1], 2]]},
        {"$": "os.system", "v": "x"},
        {"$": "int", "v": "1", "more": 1},
        {"$": ["int"], "v": 1},
    ],
)
def test_malformed_inline_values_are_format_errors(encoded: Any) -> None:
    with pytest.raises(FormatError, match="^k/p: "):
        decode_inline(encoded, "k/p")


def test_deep_inline_values_are_refused_both_ways() -> None:
    value: Any = 1
    nested: Any = 1
    for _ in range(3000):
        value, nested = [value], {"a": nested}
    for each in (value, nested):
        with pytest.raises(UsageError, match="'k/p' nests too deep"):
            encode_inline(each, "k/p")
    deepest: Any = 1
    for _ in range(100):
        deepest = {"a": deepest}
    assert decode_inline(encode_inline(deepest, "k/p"), "k/p") == deepest
    with pytest.raises(FormatError, match="nests too deep"):
        decode_inline(value, "k/p")


# NumPy ----------------------------------------------------------------------------------------

ARRAYS = {
    **{
        dtype: np.arange(6).astype(dtype).reshape(2, 3)
        for dtype in "? i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 c8 c16 >f4 >i8 >c16 f16".split()
    },
    "0-d": np.array(2.5),
    "empty": np.zeros((2, 0, 3)),
    "reversed": np.arange(10)[::-1],
    "transposed": np.arange(6.0).reshape(2, 3).T,
    "strided": np.arange(20)[::3],
    "field": np.zeros(4, dtype=[("a", "i1"), ("b", "f4")])["b"],
    "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
    "read-only": np.frombuffer(b"abcdefgh", np.uint16),
    "unicode": np.array(["a", "bcd"]),
    "bytes": np.array([b"a", b"bcd"]),
    "datetime": np.array(["2020-01-01", "NaT"], dtype="M8[D]"),
    "struct": np.array([(1, 2.5, "x")], dtype=[("a", "i4"), ("b", "f8"), ("c", "U3")]),
    "unicode field": np.zeros(2, dtype=[("\u4f60", "i4")]),
    "fortran big": np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3)),
    "0-d datetime": np.array("2020-01-01", dtype="M8[D]"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_come_back(name: str) -> None:
    array = ARRAYS[name]
    memory = store({"v": array})
    back = memory.restore("s")["v"]
    assert type(back) is np.ndarray
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tobytes() == array.tobytes()
    assert back.flags.writeable
    target = np.zeros(array.shape, array.dtype)
    assert memory.restore("s", {"v": target})["v"] is target
    assert target.tobytes() == array.tobytes()
    frozen = np.zeros(array.shape, array.dtype)
    frozen.flags.writeable = False
    back = memory.restore("s", {"v": frozen})["v"]
    assert back is not frozen
    assert back.tobytes() == array.tobytes()


def test_strided_arrays_are_restored_in_place() -> None:
    memory = store({"v": np.arange(6, dtype="i2").reshape(2, 3)})
    for target in (np.zeros((3, 2), "i2").T, np.zeros((2, 3), "i2")[::-1], np.zeros((4, 6), "i2")):
        view = target[::2, ::2] if target.shape == (4, 6) else target
        assert memory.restore("s", {"v": view})["v"] is view
        assert view.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    "scalar",
    [np.float32(1.5), np.float64(2.5), np.int8(-3), np.bool_(True), np.complex64(1j)],
)
def test_scalars_are_no_arrays_and_no_python_numbers(scalar: Any) -> None:
    memory = store({"v": scalar, "a": np.asarray(scalar)})
    back = memory.restore("s")
    assert type(back["v"]) is type(scalar)
    assert back["v"] == scalar
    assert type(back["a"]) is np.ndarray
    assert back["a"].shape == ()
    assert type(memory.restore("s", {"v": scalar, "a": 0})["v"]) is type(scalar)


def test_what_is_stored_as_what() -> None:
    memory = store(
        {
            "native": np.arange(2.0),
            "big": np.arange(2.0).astype(">f8"),
            "long": "x" * 5000,
            "short": "x",
            "scalar": np.float32(1),
        }
    )
    kinds = {}
    for entry in memory.entries:
        kind = getattr(entry, "type", None)
        kinds[entry.path[2:]] = (type(entry), kind, getattr(entry, "dtype", None))
    assert kinds == {
        "native": (TensorEntry, "numpy", "<f8"),
        "big": (BytesEntry, "numpy", None),
        "long": (BytesEntry, "str", None),
        "short": (ValueEntry, None, None),
        "scalar": (TensorEntry, "numpy_scalar", "<f4"),
    }


@pytest.mark.parametrize(
    "change",
    [
        lambda d: b"",
        lambda d: d[:-1],
        lambda d: d + b"x",
        lambda d: d.replace(b"(3,)", b"(9,)"),
        lambda d: d.replace(b"(3,)", b"(-3,"),
        lambda d: d.replace(b"'<U1'", b"'|O8'"),
        lambda d: d.replace(b"shape", b"shapf"),
        lambda d: b"\x93NUMPX" + d[6:],
        lambda d: d[:6] + b"\x04" + d[7:],
        lambda d: d[:8] + b"\xff\xff" + d[10:],
        lambda d: d.replace(b"(3,)", b"(1 << 60,)"),
    ],
)
def test_damaged_npy_is_refused_before_memory_is_taken(change: Any) -> None:
    data = array_to_npy(np.array(["a", "b", "c"]))
    assert array_from_npy(bytearray(data)).tolist() == ["a", "b", "c"]
    with pytest.raises((ValueError, SyntaxError, TypeError)):
        array_from_npy(bytearray(change(data)))


# Refusals and pickle --------------------------------------------------------------------------


class Text(str):
    pass


UNSAFE: dict[str, Any] = {
    "fraction": Fraction(1, 3),
    "str": Text("a"),
    "tuple keys": {(1, 2): torch.ones(2)},
    "objects": np.array([1, "a"], dtype=object),
    "datetime scalar": np.datetime64("2020-01-01"),
    "slice": slice(1, 2),
    "np.str_": np.str_("a"),
    "huge": 10**5000,
}


def test_all_leaves_outside_of_the_safe_set_are_named_with_both_remedies() -> None:
    with pytest.raises(UsageError) as caught:
        store({"good": 1, **UNSAFE})
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"{len(UNSAFE)} leaves")
    for name, value in UNSAFE.items():
        (line,) = (line for line in lines if line.startswith(f"  's/{name}' "))
        assert "convert it" in line
        assert "options=Options(allow_pickle=True)" in line
        assert type(value).__name__ in line or "numpy" in line or name == "huge"


def test_pickle_is_written_and_read_only_if_allowed() -> None:
    memory = store(UNSAFE, allow_pickle=True)
    back = memory.restore("s", allow_pickle=True)
    tensor = back["tuple keys"].pop((1, 2))
    assert torch.equal(tensor, torch.ones(2))
    assert back.pop("objects").tolist() == [1, "a"]
    for name, value in back.items():
        if name != "tuple keys":
            assert value == UNSAFE[name]
            assert type(value) is type(UNSAFE[name])
    with pytest.raises(UsageError) as caught:
        prepare("s", memory.key("s"), target=None, allow_pickle=False)
    assert "options=Options(allow_pickle=True)" in str(caught.value)
    for name in UNSAFE:
        assert repr(f"s/{name}") in str(caught.value)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("no way")


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises(UsageError, match=r"'s/a' has the type Unpicklable .*no way(.|\n)*'s/b'"):
        store({"a": Unpicklable(), "b": Unpicklable()}, allow_pickle=True)


def test_pickles_that_are_not_wanted_do_not_matter() -> None:
    memory = store({"a": Fraction(1), "b": 2}, allow_pickle=True)
    restore = prepare(
        "s", memory.key("s"), target={"b": 0}, allow_pickle=False, matching=Matching.LEAVES
    )
    assert restore.match.unplaced == ["s/a"]
    assert restore.build() == {"b": 2}


def test_not_inline_names_the_type() -> None:
    with pytest.raises(NotInline, match="^fractions.Fraction$"):
        encode_inline([Fraction(1)], "p")


def test_bytes_that_are_no_text_are_a_format_error() -> None:
    memory = store({"v": "x" * 5000})
    memory.data[4096] = 0xFF
    with pytest.raises(FormatError, match="s/v: its bytes are no str value"):
        memory.restore("s")


def test_base64_is_what_the_format_says() -> None:
    assert encode_inline(b"\x00\xff", "p") == {"$": "bytes", "v": b64encode(b"\x00\xff").decode()}
    assert encode_inline(math.nan, "p") == {"$": "float", "v": "7ff8000000000000"}
    assert encode_inline(torch.float32, "p") == {"$": "dtype", "v": "float32"}
