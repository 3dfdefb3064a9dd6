# SPDX-License-Identifier: Apache-2.0
"""Names at a root round-trip exactly, nothing else parses, and damaged records are found."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from actorsnap.errors import ChecksumMismatch, FormatError
from actorsnap.format.manifest import seal
from actorsnap.format.steps import (
    MAX_STEP,
    DeleteIntent,
    MarkKind,
    MarkName,
    RunRecord,
    StepName,
    decode_record,
    encode_record,
    intent_key,
    is_rest,
    marked,
    marks_prefix,
    names_prefix,
    parse_intent_key,
    parse_run_key,
    parse_short_name,
    run_key,
)

steps = st.integers(0, MAX_STEP) | st.integers(0, 10**12)
generations = st.integers(1, MAX_STEP) | st.integers(1, 100)
names = st.builds(StepName, steps, generations)
texts = st.text(max_size=40) | st.from_regex(r"(\.manager/\w+/)?(step-)?[0-9.g]{0,30}(\.json)?\n?")

RUN = RunRecord(
    generation=8,
    created_s=1.5,
    host="a",
    pid=42,
    world_size=2,
    restored_from="step-0000000300.g7",
)
INTENT = DeleteIntent(attempt="20260131T120000-0123abcd-42-89abcdef", generation=8, reason="last 3")


def test_names() -> None:
    name = StepName(500, 8)
    assert str(name) == "step-0000000500.g8"
    assert run_key(8) == ".manager/runs/00000008.json"
    assert intent_key(name) == ".manager/deleting/step-0000000500.g8.json"
    assert str(StepName(MAX_STEP, 1)) == "step-9223372036854775807.g1"


@given(names)
@example(StepName(0, 1))
@example(StepName(10**10 - 1, 1))
@example(StepName(10**10, 1))
@example(StepName(MAX_STEP, MAX_STEP))
def test_names_round_trip(name: StepName) -> None:
    assert StepName.parse(str(name)) == name
    assert parse_intent_key(intent_key(name)) == name
    assert parse_run_key(run_key(name.generation)) == name.generation


@given(texts)
def test_only_round_trips_parse(text: str) -> None:
    name, intent, run = StepName.parse(text), parse_intent_key(text), parse_run_key(text)
    assert name is None or str(name) == text
    assert intent is None or intent_key(intent) == text
    assert run is None or run_key(run) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "step-", "step-500.g8", "step-00000000500.g8", "step-0000000500", "latest"),
        *("step-0000000500.g", "step-0000000500.g0", "step-0000000500.g08", "Step-0000000500.g8"),
        *("step-0000000500.g8\n", " step-0000000500.g8", "step-0000000500.g8/", "x-0000000500.g8"),
        *("step--000000500.g8", "step-+000000500.g8", "step-0000000_500.g8", "step-0000000500.g-1"),
        *("step-000000050\u0660.g8", "step-0000000500.g\u0668", "step-0000000500.g8.json"),
        *("step-9223372036854775808.g1", "step-0000000500.g9223372036854775808"),
    ],
)
def test_other_names(text: str) -> None:
    assert StepName.parse(text) is None
    assert parse_intent_key(f".manager/deleting/{text}.json") is None


@pytest.mark.parametrize("name", ["step-350", "step_350", "step350", "step-350.g7"])
def test_short_names(name: str) -> None:
    assert parse_short_name(name) == 350
    assert str(StepName(350, 7)).startswith(names_prefix(350))
    assert not str(StepName(3500, 7)).startswith(names_prefix(350))


@pytest.mark.parametrize("name", ["350", "step", "step-350.g", "step-350/", "xstep-350", "step--1"])
def test_no_short_names(name: str) -> None:
    assert parse_short_name(name) is None
    assert parse_short_name(f"step-{MAX_STEP}") == MAX_STEP
    assert parse_short_name(f"step-{MAX_STEP + 1}") is None


@pytest.mark.parametrize(
    "key",
    [
        *("", "00000008", "00000008.json", ".manager/runs/8.json", ".manager/runs/00000000.json"),
        *(".manager/runs/000000008.json", "/.manager/runs/00000008.json", ".manager/runs/.json"),
        *(".manager/runs/00000008.json.tmp", ".manager/runs/0000000x.json"),
        *(".manager/runs/9223372036854775808.json", ".manager/runs/00000008.json\n"),
        *(".manager/deleting/00000008.json", ".manager/runs/.manager/runs/00000008.json"),
    ],
)
def test_other_run_keys(key: str) -> None:
    assert parse_run_key(key) is None


@pytest.mark.parametrize("key", ["step-0000000500.g8", "step-0000000500.g8.json"])
def test_other_intent_keys(key: str) -> None:
    assert parse_intent_key(key) is None
    assert parse_intent_key(f".manager/runs/{key}") is None


def test_records_round_trip() -> None:
    data = encode_record(RUN)
    assert decode_record(data, RunRecord, "x") == RUN
    assert decode_record(memoryview(data), RunRecord, "x") == RUN
    assert decode_record(encode_record(INTENT), DeleteIntent, "x") == INTENT
    fresh = msgspec.structs.replace(RUN, restored_from=None)
    assert decode_record(encode_record(fresh), RunRecord, "x") == fresh
    assert json.loads(data)["restored_from"] == "step-0000000300.g7"


def test_each_damaged_byte_is_found() -> None:
    data = encode_record(RUN)
    for length in range(len(data)):
        with pytest.raises(ChecksumMismatch):
            decode_record(data[:length], RunRecord, "x")
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(ChecksumMismatch):
                decode_record(damaged, RunRecord, "x")


def test_errors_name_the_key() -> None:
    with pytest.raises(ChecksumMismatch, match=r"^\.manager/runs/00000008\.json: .*damaged"):
        decode_record(b"", RunRecord, run_key(8))
    with pytest.raises(FormatError, match=r"^\.manager/x: .*generation"):
        decode_record(seal(b'{"a":1}'), RunRecord, ".manager/x")


@pytest.mark.parametrize(
    "change",
    [{"generation": 0}, {"generation": "8"}, {"world_size": 0}, {"host": None}, {"pid": 1.5}],
)
def test_records_of_wrong_types(change: dict[str, object]) -> None:
    data = seal(json.dumps(msgspec.structs.asdict(RUN) | change).encode())
    with pytest.raises(FormatError) as caught:
        decode_record(data, RunRecord, "x")
    assert not isinstance(caught.value, ChecksumMismatch)


def test_a_record_is_not_of_another_kind() -> None:
    with pytest.raises(FormatError):
        decode_record(encode_record(INTENT), RunRecord, "x")


def test_fields_of_a_newer_release_are_skipped() -> None:
    data = seal(json.dumps(msgspec.structs.asdict(RUN) | {"policies": ["x"]}).encode())
    assert decode_record(data, RunRecord, "x") == RUN


# Marks

mark_names = st.builds(
    MarkName,
    names,
    st.sampled_from(MarkKind),
    st.integers(0, 10**9),
    st.from_regex("[0-9a-f]{16}", fullmatch=True),
)


@given(mark_names)
def test_marks_round_trip(mark: MarkName) -> None:
    assert MarkName.parse(mark.key) == mark
    assert marked(mark.key) == mark.of
    assert mark.key.startswith(marks_prefix(mark.of))


@given(texts)
def test_only_marks_parse(text: str) -> None:
    for key in (text, f".manager/marks/{text}", f".manager/marks/step-0000000500.g8/{text}"):
        mark = MarkName.parse(key)
        assert mark is None or mark.key == key


def test_the_key_of_a_mark() -> None:
    mark = MarkName(StepName(500, 8), MarkKind.PIN, 3, "0123456789abcdef")
    assert mark.key == ".manager/marks/step-0000000500.g8/pin-00000003-0123456789abcdef.json"
    temporary = mark.key.replace("pin", ".pin") + ".00ff.tmp"
    assert (MarkName.parse(temporary), marked(temporary)) == (None, StepName(500, 8))
    assert marked(run_key(8)) is None


@pytest.mark.parametrize(
    ("key", "is_one"),
    [
        (".manager/deleting/.step-0000000500.g8.json.0123456789abcdef.tmp", True),
        (".manager/deleting/step-0000000500.g8.json", False),
        (".manager/runs/.00000007.json.0123456789abcdef.tmp", True),
        # Somebody may be taking it now.
        (".manager/runs/.00000008.json.0123456789abcdef.tmp", False),
        (".manager/runs/.00000009.json.0123456789abcdef.tmp", False),
        (".manager/runs/00000007.json", False),
        (".manager/runs/notes.txt", False),
        (".manager/latest.tmp", False),
    ],
)
def test_rests(key: str, is_one: bool) -> None:
    assert is_rest(key, newest_generation=8) is is_one
