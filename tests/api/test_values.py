# SPDX-License-Identifier: Apache-2.0
"""Values without pickle, through the calls of a program."""

from __future__ import annotations

import enum
from collections import defaultdict, deque
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import pytest
import torch
from typer.testing import CliRunner

from actorsnap import (
    IncompatibleState,
    NamedRecord,
    Options,
    StateDict,
    UnsupportedFormat,
    UsageError,
    cli,
    from_env,
)
from actorsnap.format import manifest
from actorsnap.format.manifest import COMMIT_KEY, BytesEntry, ContainerEntry, decode_commit
from actorsnap.sync import Snapshot
from tests.support.manifests import document_of


class Phase(enum.Enum):
    WARM = 1
    HOT = 2


@dataclass
class Config:
    lr: float
    weights: Any = None
    phase: Phase = Phase.WARM


class Point(NamedTuple):
    x: Any
    y: Any


CLASSES = Options(allowed_types=[Phase, Config, Point])


def state(at: float = 1.0) -> dict[str, Any]:
    return {
        "window": deque([torch.full((3,), at), at], maxlen=4),
        "table": defaultdict(list, {"a": [torch.full((2,), at)], 3: [at]}),
        "seen": {at, "x", (1, 2)},
        "path": PurePosixPath(f"/data/{at}"),
        "at": datetime(2026, 1, 2, int(at), tzinfo=UTC),
        "range": range(int(at)),
        "config": Config(at, torch.full((4,), at), Phase.HOT if at > 1 else Phase.WARM),
        "point": Point(torch.full((2,), at), {Phase.HOT}),
        "by phase": {Phase.HOT: at},
    }


def assert_state(found: Any, expected: Any) -> None:
    assert sorted(repr(found)) == sorted(repr(expected))  # sets have no order
    assert isinstance(found, deque) or found["seen"] == expected["seen"]


def test_a_restore_is_in_place_and_needs_the_classes(tmp_path: Path) -> None:
    Snapshot.take(tmp_path / "s", {"run": StateDict(state(2.0))})
    target = StateDict(state())
    held = target["window"][0], target["config"].weights, target["point"].x
    with pytest.raises(UsageError, match=r"(?s)allowed_types=.*'run/config' is a .*\.Config"):
        Snapshot(tmp_path / "s").restore({"run": target})
    assert_state(target.data, state())
    assert Snapshot(tmp_path / "s", options=CLASSES).restore({"run": target}).is_complete
    assert_state(target.data, state(2.0))
    assert held[0] is target["window"][0]
    assert held[1] is target["config"].weights
    assert held[2] is target["point"].x


def test_reading_shows_the_fields_without_the_classes(tmp_path: Path) -> None:
    snapshot = Snapshot.take(tmp_path / "s", {"run": StateDict(state(2.0))})
    assert snapshot.read_object("run/config/lr") == 2.0
    assert snapshot.read_object("run/config/phase").fields == {"name": "HOT", "value": 2}
    found = snapshot.get_state_dict_for_key("run")
    assert type(found["config"]) is NamedRecord
    assert (found["config"].module, found["config"].qualname) == (__name__, "Config")
    assert found["config"].fields["weights"].tolist() == [2.0] * 4
    assert_state(found["window"], state(2.0)["window"])
    known = Snapshot(tmp_path / "s", options=CLASSES)
    assert_state(known.get_state_dict_for_key("run"), state(2.0))
    assert known.read_object("run/config/phase") is Phase.HOT
    entry = snapshot.get_manifest()["0/run/config"]
    assert isinstance(entry, ContainerEntry)
    assert entry.attributes == [__name__, "Config"]


def test_commands_show_what_is_there(tmp_path: Path) -> None:
    for at, name in ((2.0, "a"), (2.0, "b"), (1.0, "c")):
        Snapshot.take(tmp_path / name, {"run": StateDict(state(at))})

    def told(*arguments: str, code: int = 0) -> str:
        done = CliRunner().invoke(cli.app, [*arguments])
        assert done.exit_code == code, done.output
        return done.output

    a, b, c = [str(tmp_path / name) for name in "abc"]
    shown = told("inspect", a)
    for line in (
        "window  (deque, 2 leaves, 12 B)",
        "table  (defaultdict, 2 leaves, 8 B)",
        f"config  ({__name__}.Config, 3 leaves, 16 B)",
        "lr  2.0",
        "path  PurePosixPath('/data/2.0')",
        "range  range(0, 2)",
    ):
        assert line in shown
    assert "Config(lr=2.0, weights=tensor([2., 2., 2., 2.])" in told("cat", a, "run/config")
    assert told("cat", a, "run/config/lr") == "2.0\n"
    told("diff", a, b)
    assert "run/config/lr" in told("diff", a, c, code=1)
    told("verify", "--full", a)
    told("cp", a, str(tmp_path / "copy"))
    assert_state(
        Snapshot(tmp_path / "copy", options=CLASSES).get_state_dict_for_key("run"), state(2.0)
    )


@pytest.mark.parametrize("offload", ["thread", "process"])
def test_values_are_those_at_the_time_of_the_call(tmp_path: Path, offload: str) -> None:
    held = state(2.0)
    options = Options(offload=offload, allowed_types=CLASSES.allowed_types)
    pending = Snapshot.async_take(tmp_path / "s", {"run": StateDict(held)}, options=options)
    held["window"].append("later")
    held["window"][0].fill_(9)
    held["table"]["new"].append(1)
    held["seen"].clear()
    held["config"].lr = 9.0
    held["config"].weights.fill_(9)
    snapshot = pending.wait()
    assert_state(snapshot.get_state_dict_for_key("run"), state(2.0))


def test_only_snapshots_with_such_values_have_the_feature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Snapshot.take(tmp_path / "plain", {"run": StateDict(a=[1], b={"c": torch.ones(1)})})
    for name, value in {
        "value": {1},
        "container": deque([1]),
        "bytes": set(range(5000)),
        "record": Phase.HOT,
        "inside": {(1,): [range(3)]},
    }.items():
        Snapshot.take(tmp_path / name, {"run": StateDict(x=value)})
        commit = decode_commit((tmp_path / name / COMMIT_KEY).read_bytes())
        assert commit.features[-1] == "values"
        manifest_path = tmp_path / name / commit.attempt / "manifest" / "0.json"
        assert "values" in document_of(manifest_path.read_bytes())["save"]["features"]
    plain = decode_commit((tmp_path / "plain" / COMMIT_KEY).read_bytes())
    assert "values" not in plain.features
    known = tuple([each for each in manifest.FEATURES if each != "values"])
    monkeypatch.setattr(manifest, "FEATURES", known)  # an older release
    assert Snapshot(tmp_path / "plain").read_object("run/a/0") == 1
    with pytest.raises(UnsupportedFormat, match="needs the features values"):
        Snapshot(tmp_path / "value").read_object("run/x")


@dataclass
class Newer:
    lr: float
    decay: float = 0.5


def test_a_new_field_counts_as_missing(tmp_path: Path) -> None:
    older = NamedRecord(__name__, "Newer", {"lr": 2.0})
    Snapshot.take(tmp_path / "s", {"run": StateDict(config=older)})
    snapshot = Snapshot(tmp_path / "s", options=Options(allowed_types=[Newer]))
    target = StateDict(config=Newer(1.0, 0.75))
    with pytest.raises(IncompatibleState, match="run/config/decay"):
        snapshot.restore({"run": target})
    snapshot.restore({"run": target}, strict=False)
    assert target["config"] == Newer(2.0, 0.75)
    assert snapshot.read_object("run/config") == Newer(2.0, 0.5)


def test_another_class_in_the_app_state_is_replaced(tmp_path: Path) -> None:
    Snapshot.take(tmp_path / "s", {"run": StateDict(x=Point(1, 2), y=Config(3.0))})
    target = StateDict(x=Config(1.0), y={"lr": 1.0, "own": 2})
    Snapshot(tmp_path / "s", options=CLASSES).restore({"run": target})
    assert target.data == {"x": Point(1, 2), "y": Config(3.0)}


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ([int], "has <class 'int'>, which is not a dataclass"),
        (["Config"], "has 'Config'"),
        ("Config", "must be a list of classes"),
        ([Config, type("Config", (Config,), {"__module__": __name__})], "two classes"),
    ],
)
def test_options_refuse_what_is_no_class_of_records(types: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Options(allowed_types=types)


def test_the_environment_names_no_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORSNAP_ALLOWED_TYPES", "os.system")
    with pytest.raises(UsageError, match="can only be passed by the program"):
        from_env()


def test_pickle_is_the_last_resort(tmp_path: Path) -> None:
    options = Options(allow_pickle=True)
    Snapshot.take(tmp_path / "s", {"run": StateDict(x=Config(1.0), y=slice(3))}, options=options)
    found = Snapshot(tmp_path / "s").get_manifest()
    assert type(found["0/run/x"]) is ContainerEntry
    assert type(found["0/run/y"]) is BytesEntry
