# SPDX-License-Identifier: Apache-2.0
"""Sets, deques, dates, paths and named records come back as what they were, without pickle."""

from __future__ import annotations

import enum
import json
import subprocess
import sys
from collections import OrderedDict, defaultdict, deque
from dataclasses import InitVar, dataclass, field
from datetime import datetime, time, timedelta, timezone
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.errors import FormatError, UsageError
from actorsnap.format.manifest import BytesEntry, ContainerEntry
from actorsnap.state.capture import capture
from actorsnap.state.objects import decode_inline, encode_inline
from actorsnap.state.records import NamedRecord, Rebuild
from actorsnap.state.sources import Captured
from actorsnap.state.stateful import StateDict
from actorsnap.state.tree import flatten
from tests.state.stored import Memory, store


class Phase(enum.Enum):
    WARM = 1
    HOT = "hot"


class Level(enum.IntEnum):
    LOW = 1


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: Any
    y: Any = 0


@dataclass(frozen=True)
class Config:
    lr: Any
    name: Any = "adam"


@dataclass(slots=True)
class Counted:
    """Its constructor changes what it gets, and counts."""

    value: Any
    count: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.value = [self.value]
        self.count += 1


ALLOWED = Rebuild.of([Phase, Level, Rights, Point, Config, Counted], is_strict=True)


def back(memory: Memory, rebuild: Rebuild = ALLOWED) -> Any:
    return memory.restore("s", rebuild=rebuild)["v"]


def same(a: Any, b: Any) -> bool:
    """Compares types and order, too, and tensors by value."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, defaultdict) and a.default_factory is not b.default_factory:
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all([same(a[key], b[key]) for key in a])
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all([same(x, y) for x, y in zip(a, b, strict=True)])
    if isinstance(a, Config):
        return same([a.lr, a.name], [b.lr, b.name])
    if isinstance(a, Counted):
        return same([a.value, a.count], [b.value, b.count])
    if isinstance(a, datetime | time):
        return (a.replace(tzinfo=None), a.fold) == (b.replace(tzinfo=None), b.fold) and repr(
            a.tzinfo
        ) == repr(b.tzinfo)
    return bool(a == b)


# Round trips ----------------------------------------------------------------------------------

ZONES = st.none() | st.builds(
    timezone,
    st.timedeltas(timedelta(hours=-23), timedelta(hours=23)),
    st.text(max_size=3).filter(lambda text: text.isprintable()),
)
HASHABLE: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.binary(max_size=4),
        st.floats(allow_nan=False),
        st.datetimes(timezones=ZONES) | st.dates() | st.times() | st.timedeltas(),
        ZONES,
        st.builds(PurePosixPath, st.text("ab/.\x00\udcff", max_size=5)),
        st.builds(PureWindowsPath, st.text("ab\\c:", max_size=5)),
        st.builds(Path, st.text("ab/\\é", max_size=5)),
        st.builds(range, st.integers(), st.integers(), st.integers().filter(bool)),
        st.sampled_from([*Phase, *Level, *Rights, Rights.READ | Rights.WRITE, Rights(0)]),
    ),
    lambda inner: (
        st.frozensets(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.builds(Point, inner, inner)
        | st.builds(Config, inner, inner)
    ),
    max_leaves=6,
)
ANY: st.SearchStrategy[Any] = st.recursive(
    HASHABLE | st.sets(HASHABLE, max_size=4) | st.integers(0, 4).map(torch.arange),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.builds(deque, st.lists(inner, max_size=3), st.none() | st.integers(0, 5))
        | st.builds(
            defaultdict,
            st.sampled_from([None, int, list, dict, set, OrderedDict]),
            st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
        )
        | st.builds(Point, inner, inner)
        | st.builds(Config, inner, inner)
        | st.builds(Counted, inner)
    ),
    max_leaves=10,
)


@given(value=ANY)
def test_any_nesting_comes_back(value: Any) -> None:
    assert same(back(store({"v": value})), value)


@given(value=ANY)
def test_without_classes_records_keep_their_fields_and_are_stored_again_alike(value: Any) -> None:
    memory = store({"v": value})
    loose = back(memory, Rebuild())
    again = store({"v": loose})
    if not any(isinstance(each, Phase | Level | Rights) for each in _members(value)):
        assert [entry.path for entry in again.entries] == [entry.path for entry in memory.entries]
    assert same(back(again), value)


def _members(value: Any) -> list[Any]:
    return flatten("v", value)[1]


def test_sets_are_encoded_alike_in_every_process() -> None:
    script = (
        "from actorsnap.state.objects import encode_inline\n"
        "print(encode_inline({'a', 'b', 'c', 1, (2, 'd'), None, frozenset('xyz')}, 'v'))"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1


def test_tensors_in_containers_are_leaves() -> None:
    value = deque([torch.ones(2), defaultdict(list, a=[torch.zeros(1)]), Config(torch.ones(3))])
    memory = store({"v": value})
    assert [(e.path, getattr(e, "type", None)) for e in memory.entries] == [
        ("s/v", "deque"),
        ("s/v/0", "tensor"),
        ("s/v/1", "defaultdict"),
        ("s/v/1/a", "list"),
        ("s/v/1/a/0", "tensor"),
        ("s/v/2", "record"),
        ("s/v/2/lr", "tensor"),
        ("s/v/2/name", None),
    ]
    found = back(memory)
    assert same(found, value)
    assert found[1]["new"] == []


@pytest.mark.parametrize(
    "value", [set(range(3000)), frozenset(map(str, range(3000))), deque(range(3000), 4000)]
)
def test_long_values_do_not_lie_in_the_manifest(value: Any) -> None:
    memory = store({"v": value})
    (entry,) = memory.entries
    assert isinstance(entry, BytesEntry)
    assert entry.type == "values"
    assert captured(value).has_values
    assert same(back(memory), value)


def captured(value: Any) -> Captured:
    return capture({"s": StateDict(v=value)})


def test_classes_in_long_values_are_refused_when_they_are_read() -> None:
    memory = store({"v": {(number, Phase.HOT) for number in range(500)}})
    assert len(back(memory)) == 500
    assert len(back(memory, Rebuild())) == 500
    with pytest.raises(UsageError, match=r"'s/v' is a .*\.Phase, which is not in allowed_types"):
        back(memory, Rebuild(is_strict=True))


def test_attributes_of_parameters_are_no_records() -> None:
    """No restore may need a class for them: they are kept if they can be."""
    parameter = torch.nn.Parameter(torch.ones(1))
    vars(parameter).update(mode=Phase.HOT, modes=[Phase.HOT], axes={0, 1})
    found = back(store({"v": parameter}), Rebuild(is_strict=True))
    assert vars(found) == {"axes": {0, 1}}
    assert captured(parameter).has_values
    del parameter.axes  # type: ignore[attr-defined]
    assert not captured(parameter).has_values


def test_what_needs_no_feature_has_none() -> None:
    plain = {"a": 1, "b": [1.5], "c": {(1, 2): "x"}, "d": OrderedDict(x={}), "e": [0.1] * 1000}
    assert not captured(plain).has_values


# Records --------------------------------------------------------------------------------------


def test_fields_have_the_saved_values_whatever_the_constructor_does() -> None:
    value = Counted(1)
    value.value, value.count = "later", 7
    found = back(store({"v": value}))
    assert (found.value, found.count) == ("later", 7)


def test_a_field_with_a_default_may_be_absent() -> None:
    memory = store({"v": NamedRecord(__name__, "Config", {"lr": 1})})
    assert back(memory) == Config(1)
    assert back(store({"v": NamedRecord(__name__, "Point", {"x": 1})})) == Point(1)


def test_a_member_is_found_by_its_name() -> None:
    record = NamedRecord(__name__, "Level", {"name": "LOW", "value": 99})
    assert back(store({"v": record})) is Level.LOW


class Module(torch.nn.Linear):
    pass


@dataclass(eq=False)
class DataModule(torch.nn.Module):
    size: int = 1

    def __post_init__(self) -> None:
        super().__init__()


@dataclass
class DataDict(dict[str, int]):
    size: int = 1


@dataclass(init=False)
class Unset:
    size: int


@pytest.mark.parametrize("value", [DataModule(), DataDict(), Unset()])
def test_classes_that_are_more_than_their_fields_are_refused(value: object) -> None:
    with pytest.raises(UsageError, match=f"'s/v' has the type .*{type(value).__name__}[,;]"):
        store({"v": value})


@dataclass
class Raises:
    x: int

    def __post_init__(self) -> None:
        raise KeyboardInterrupt if self.x < 0 else RuntimeError("no such x")


@dataclass
class Needs:
    x: int
    seed: InitVar[int]


class Other:
    pass


@dataclass
class Returns:
    x: int

    def __new__(cls, x: int) -> Any:
        return Other()


def _record(kind: str, **fields: Any) -> NamedRecord:
    return NamedRecord(__name__, kind, fields)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (_record("Config", lr=1, extra=2), "no longer has the field 'extra': add it back"),
        (_record("Config"), "needs the field 'lr', which has no saved value: make it"),
        (_record("Config", a=1, b=2), "longer has the fields 'a', 'b'.*needs the field 'lr'"),
        (_record("Point", y=1), "needs the field 'x', which has no"),
        (_record("Point", x=1, z=1), "no longer has the field 'z'"),
        (_record("Phase", name="COLD"), "ValueError: there is no Phase named .COLD"),
        (_record("Phase", name=["HOT"]), "there is no Phase"),
        (_record("Phase", value=1), "needs the field 'name'"),
        (_record("Phase", name="HOT", lr=1), "no longer has the field 'lr'"),
        (_record("Rights", value=64), "cannot be rebuilt"),
        (_record("Rights", value="READ"), "cannot be rebuilt"),
        (_record("Raises", x=1), "RuntimeError: no such x"),
        (_record("Needs", x=1), "cannot be rebuilt .*seed"),
        (_record("Returns", x=1), "the constructor returned a Other"),
        (_record("Elsewhere", x=1), "which is not in allowed_types"),
    ],
)
@pytest.mark.parametrize("is_inline", [False, True])
def test_records_that_do_not_fit_are_refused(
    record: NamedRecord, message: str, is_inline: bool
) -> None:
    kinds = [Phase, Rights, Point, Config, Raises, Needs, Returns]
    rebuild = Rebuild.of(kinds, is_strict=True)
    value = {(0,): record} if is_inline else record
    with pytest.raises(UsageError, match=rf"(?s)'s/v'.*{message}"):
        back(store({"v": value}), rebuild)


def test_an_interrupt_in_a_constructor_passes() -> None:
    with pytest.raises(KeyboardInterrupt):
        back(store({"v": _record("Raises", x=-1)}), Rebuild.of([Raises], is_strict=True))


def test_all_classes_that_are_not_allowed_are_named_before_any_code_of_them_runs() -> None:
    value = {"a": Config(1), "b": {Phase.HOT}, "c": {(0,): Point(1)}, "d": _record("Raises", x=1)}
    memory = store({"v": value})
    with pytest.raises(UsageError) as caught:
        back(memory, Rebuild.of([Raises], is_strict=True))
    text = str(caught.value)
    assert text.startswith("3 records cannot be rebuilt. Pass the classes in options=Options(allo")
    for line in ("'s/v/a' is a {}.Config", "'s/v/b' is a {}.Phase", "'s/v/c' is a {}.Point"):
        assert line.format(__name__) in text


@pytest.mark.parametrize("record", [_record("\x1b[2J\n", x=1), _record("Phase", name="\x1b[2J\n")])
def test_names_in_a_snapshot_do_not_control_a_terminal(record: NamedRecord) -> None:
    with pytest.raises(UsageError, match="'s/v' is a ") as caught:
        back(store({"v": record}), Rebuild.of([Phase], is_strict=True))
    for text in (str(caught.value), repr(record)):
        assert "\x1b" not in text
        assert "\\x1b[2J\\n" in text


# Forged values --------------------------------------------------------------------------------

DEEP: Any = 1
for _ in range(200):
    DEEP = {"$": "set", "v": [DEEP]}


@pytest.mark.parametrize(
    "encoded",
    [
        {"$": "set", "v": [1, 1]},
        {"$": "set", "v": [[1]]},
        {"$": "set", "v": "ab"},
        {"$": "frozenset", "v": {"$": "set", "v": []}},
        {"$": "deque", "v": [[1, 2], 1]},
        {"$": "deque", "v": [[], -1]},
        {"$": "deque", "v": [[], "1"]},
        {"$": "deque", "v": [[], 2**64]},
        {"$": "deque", "v": "ab"},
        {"$": "defaultdict", "v": [[], "eval"]},
        {"$": "defaultdict", "v": [[], ["list"]]},
        {"$": "defaultdict", "v": [[]]},
        {"$": "range", "v": [0, 1, 0]},
        {"$": "range", "v": [0, 1]},
        {"$": "range", "v": [0, True, 1]},
        {"$": "range", "v": [0, {"$": "int", "v": "9" * 100_000}, 1]},
        {"$": "path", "v": 1},
        {"$": "path", "v": {"$": "bytes", "v": ""}},
        {"$": "date", "v": "20260101"},
        {"$": "date", "v": "2026-02-30"},
        {"$": "time", "v": ["12:00:00+01:00", 0, None]},
        {"$": "datetime", "v": ["2026-01-01T00:00:00", 2, None]},
        {"$": "datetime", "v": ["2026-01-01", 0, None]},
        {"$": "datetime", "v": ["2026-01-01T00:00:00", 0, [10**30]]},
        {"$": "datetime", "v": ["2026-01-01T00:00:00", 0, "UTC"]},
        {"$": "timezone", "v": None},
        {"$": "timezone", "v": [0.5]},
        {"$": "timedelta", "v": [1.5, 0, 0]},
        {"$": "timedelta", "v": [10**12, 0, 0]},
        {"$": "record", "v": ["os", "system"]},
        {"$": "record", "v": [1, "system", []]},
        {"$": "record", "v": ["m", "C", [["a", 1], ["a", 2]]]},
        {"$": "record", "v": ["m", "C", [[1, 1]]]},
        DEEP,
    ],
    ids=lambda encoded: json.dumps(encoded)[:50],
)
def test_forged_values_are_format_errors(encoded: Any) -> None:
    with pytest.raises(FormatError, match="s/v"):
        decode_inline(encoded, "s/v")


@pytest.mark.parametrize(
    ("kind", "attributes"),
    [
        *[("deque", each) for each in (-1, "1", 2**64, True, [1])],
        *[("defaultdict", each) for each in ("eval", 1, ["list"])],
        *[("record", each) for each in (None, "m", ["m"], ["m", 1], ["m", "C", 1])],
    ],
)
def test_forged_containers_are_format_errors(kind: Any, attributes: Any) -> None:
    memory = store({"v": deque([1])})
    forged = ContainerEntry(path="s/v", type=kind, attributes=attributes)
    memory.entries = [forged, *memory.entries[1:]]
    with pytest.raises(FormatError, match="s/v"):
        back(memory, Rebuild())


def test_a_deque_with_more_items_than_it_holds_is_a_format_error() -> None:
    memory = store({"v": deque([torch.ones(1), torch.ones(1)])})
    forged = ContainerEntry(path="s/v", type="deque", attributes=1)
    memory.entries = [forged, *memory.entries[1:]]
    with pytest.raises(FormatError, match="at most 1 items has 2"):
        back(memory)


def test_a_huge_range_takes_no_memory() -> None:
    value = range(10**18, -(10**30), -3)
    assert decode_inline(encode_inline(value, "v"), "v") == value


def test_nothing_is_imported() -> None:
    before = set(sys.modules)
    memory = store({"v": NamedRecord("this", "Zen", {"x": 1})})
    for rebuild in (Rebuild(), ALLOWED):
        try:
            back(memory, rebuild)
        except UsageError:
            assert rebuild is ALLOWED
    assert set(sys.modules) == before
