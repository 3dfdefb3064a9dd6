# SPDX-License-Identifier: Apache-2.0
"""The commands for a root: what they print, end with, delete and leave alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Awaitable, Callable, Generator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import anyio
import pytest
import torch
from msgspec.structs import replace as replace_field
from typer.testing import CliRunner

from actorsnap import (
    AccessDenied,
    StateDict,
    StorageError,
    Throttled,
    UsageError,
    cli,
    cli_damage,
    cli_deletion,
    cli_roots,
)
from actorsnap.cli_policies import parse_policies
from actorsnap.format.manifest import COMMIT_KEY, decode_commit, encode_commit
from actorsnap.format.steps import DeleteIntent, StepName, encode_record, intent_key
from actorsnap.manager import every, keep, keeper, looking
from actorsnap.manager.sync import CheckpointManager
from actorsnap.planning.keeping import KeepPolicy
from actorsnap.runtime.deletion import Deleter
from actorsnap.runtime.roots import Records, Root
from actorsnap.runtime.source import OpenSource
from actorsnap.storage.base import Storage
from actorsnap.storage.network import RetryPolicy, RetryStorage
from actorsnap.storage.wire import WireError
from actorsnap.storage.wrapper import Wrapper
from actorsnap.sync import Snapshot
from actorsnap.testing import FaultyStorage
from tests.api.faults import faulty, faulty_url

T = TypeVar("T")
P = ParamSpec("P")


class Ended:
    """How a command ended: exit code, stdout and stderr."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def rows(self) -> list[list[str]]:
        return [line.split("\t") for line in self.out.splitlines()]


def run(*arguments: object) -> Ended:
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ended(result.exit_code, result.stdout, result.stderr)


def manager(root: object, **settings: Any) -> CheckpointManager:
    state = {"train": StateDict(weight=torch.zeros(100), step=0)}
    return CheckpointManager(
        str(root), state, **{"save": every.steps(100), "keep": keep.all(), **settings}
    )


LOSSES = {0: 4.0, 100: 1.0, 200: 3.0, 300: 2.0}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run of four steps."""
    with manager(tmp_path / "run") as running:
        for step, loss in LOSSES.items():
            running.maybe_save(step, metrics={"loss": loss})
    return tmp_path / "run"


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("step-*"))


def name(step: int, generation: int = 1) -> str:
    return str(StepName(step, generation))


def damage(root: Path, which: str) -> None:
    (file,) = (root / which).glob("*/data/**/*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])


# steps ----------------------------------------------------------------------------------------


def test_steps(root: Path) -> None:
    ended = run("steps", root)
    assert (ended.code, ended.err) == (0, "")
    assert [row[0] for row in ended.rows] == [name(step) for step in LOSSES]
    assert [row[2] for row in ended.rows] == ["loss=4", "loss=1", "loss=3", "loss=2"]
    for row in ended.rows:
        assert re.fullmatch(r"\d+ s old", row[1])
        assert re.fullmatch(r"\d\.\d KiB", row[3])
        assert row[4:] == ["committed"]


def test_steps_and_ls_count_the_same_bytes(root: Path) -> None:
    rest = root / name(300) / "20990101T000000-ffffffff-1-00000000" / "data"
    rest.mkdir(parents=True)
    (rest / "half").write_bytes(bytes(1000))
    listed = [
        {item["name"]: item["nbytes"] for item in json.loads(run(command, root, "--json").out)}
        for command in ("ls", "steps")
    ]
    assert listed[0] == listed[1]
    files = (root / name(300)).glob("**/*")
    assert listed[0][name(300)] == sum(file.stat().st_size for file in files if file.is_file())


def test_steps_says_why(root: Path) -> None:
    ended = run("steps", root, "--keep", "last:1", "--keep", "best:loss:min", "--min-valid", 1)
    assert [row[5] for row in ended.rows] == [
        "goes: no policy keeps it",
        "stays: best loss (min): 1",
        "goes: no policy keeps it",
        "stays: last 1, newest, newest verified (sizes), one of 1 verified (sizes)",
    ]
    assert len(names(root)) == 4


def test_times_that_are_too_long(root: Path) -> None:
    far = "99999999999999999d"
    for until in ("9999999d", far):
        ended = run("pin", root, 200, "--reason", "paper", "--until", until)
        assert (ended.code, ended.out) == (2, "")
        assert ended.err.startswith(f"error: --until {until}")
        assert len(ended.err.splitlines()) == 1
    ended = run("steps", root, "--keep", f"newer_than:{far}")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == f"error: --keep newer_than:{far}: write newer_than:2d (or s, min, h)\n"


def test_a_pin_beyond_the_calendar(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As earlier releases accepted it."""
    with pytest.raises(UsageError, match="after the year 9999"), manager(root) as running:
        running.pin(200, "paper", until=timedelta(days=9_999_999))
    monkeypatch.setattr(looking, "_time_until", lambda until: until.total_seconds())
    with manager(root) as running:
        running.pin(200, "paper", until=timedelta(days=9_999_999))
    (pin,) = json.loads(run("steps", root, "--json").out)[2]["pins"]
    assert pin["until"] > 9_999_999 * 86400
    assert run("best", root, "loss", "--min", "--json").code == 0
    assert run("unpin", root, 200, "--json").code == 0
    ended = run("unpin", root, 200)
    assert ended.code == 2
    assert ended.err.endswith(f"{name(200)} is not pinned\n")


def test_times_of_json(root: Path) -> None:
    pinned = json.loads(run("pin", root, 0, "--reason", "x", "--until", "30d", "--json").out)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[0-9:.]+Z", pinned["until"])
    (first, *_) = json.loads(run("steps", root, "--json").out)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[0-9:.]+Z", first["created"])


@pytest.mark.parametrize(
    ("policy", "advice"),
    [
        ("last:0", "the number must be at least 1, as in last:3"),
        ("every:0", "the number must be at least 1, as in every:1000"),
        ("newer_than:0d", "the time must be more than 0, as in newer_than:2d (or s, min, h)"),
        ("last:x", "write last:3"),
    ],
)
def test_numbers_of_policies(policy: str, advice: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"--keep {policy}: {advice}") + "$"):
        parse_policies([policy])


def test_a_step_of_a_newer_release(root: Path) -> None:
    file = root / name(100) / COMMIT_KEY
    commit = replace_field(decode_commit(file.read_bytes(), ""), features=("delta",))
    file.write_bytes(encode_commit(commit))
    for more in ([], ["--keep", "last:1", "--all"]):
        ended = run("steps", root, *more)
        assert (ended.code, ended.out) == (4, "")
        assert f"(snapshot {root}/{name(100)})" in ended.err
    ended = run("steps", root, "--all")
    assert ended.code == 0
    assert [row[4] for row in ended.rows] == [
        "committed",
        "newer format",
        "committed",
        "committed",
    ]
    assert run("prune", root, "--keep", "last:1", "--min-valid", 1, "--yes").code == 4
    assert len(names(root)) == 4


class Locked(Wrapper):
    """Refuses to read one step."""

    async def around(
        self, op: str, key: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if key.startswith(name(100)):
            raise AccessDenied(op=op, key=key, backend=self.url, detail="Permission denied")
        return await super().around(op, key, call, *args, **kwargs)


def test_a_step_that_cannot_be_read(root: Path) -> None:
    with faulty(Locked):
        ended = run("ls", faulty_url(root))
        assert ended.code == 4
        rows = {row[0]: row for row in ended.rows}
        assert rows.keys() == {name(step) for step in LOSSES}
        assert rows[name(100)][1:3] == ["-", "-"]
        assert rows[name(100)][3].startswith("not readable: Permission denied")
        listed = json.loads(run("ls", faulty_url(root), "--json").out)
        assert listed[1]["state"] == "not readable"
        ended = run("verify", "--all", faulty_url(root))
        assert ended.code == 4
        assert [row[:2] for row in ended.rows] == [
            [name(step), "not readable" if step == 100 else "ok"] for step in LOSSES
        ]
        damage(root, name(200))
        assert run("verify", "--all", faulty_url(root)).code == 1


@pytest.mark.parametrize("more", [[], ["--all"], ["--keep", "last:1", "--min-valid", 1]])
def test_steps_goes_on_after_one_that_cannot_be_read(root: Path, more: list[str]) -> None:
    with faulty(Locked):
        ended = run("steps", faulty_url(root), *more)
        assert ended.code == 4
        rows = {row[0]: row[1:] for row in ended.rows}
        assert [*rows] == [name(step) for step in LOSSES]
        assert rows[name(100)][:3] == ["-", "-", "-"]
        reason = rows[name(100)][-1].removeprefix("stays: ")
        assert reason.startswith("not readable: Permission denied")
        assert [rows[name(step)][3] for step in (0, 200, 300)] == ["committed"] * 3
        found = json.loads(run("steps", faulty_url(root), *more, "--json").out)[1]
        assert (found["state"], found["nbytes"]) == ("not readable", None)
        assert found["detail"].startswith("Permission denied")
        assert run("save-now", faulty_url(root)).code == 0


class LockedNewest(Wrapper):
    """Refuses to read the newest step, or only to list it."""

    verbs = frozenset({"get", "read_into", "stat", "list"})
    step = 300

    async def around(
        self, op: str, key: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if op in self.verbs and name(self.step) in f"{self.url}/{key}":
            raise AccessDenied(op=op, key=key, backend=self.url, detail="Permission denied")
        return await super().around(op, key, call, *args, **kwargs)


class LockedNewestList(LockedNewest):
    verbs = frozenset({"list", "stat"})


@pytest.mark.parametrize("more", [[], ["--valid"], ["--full"]])
def test_latest_does_not_skip_a_step_that_it_cannot_read(root: Path, more: list[str]) -> None:
    """A job would continue from an older step than the operator expects."""
    with faulty(LockedNewest):
        ended = run("latest", faulty_url(root), *more)
        assert (ended.code, ended.out) == (4, "")
        assert name(300) in ended.err
        newest = f"the newest step that could be read is {faulty_url(root)}/{name(200)}"
        assert newest in ended.err
        notes = json.loads(run("latest", faulty_url(root), *more, "--json").out)["error"]["notes"]
        assert notes == [newest]
    with faulty(LockedNewestList):
        ended = run("latest", faulty_url(root), *more)
        assert ended.code == (4 if more else 0)
    with faulty(Locked):  # an older one
        ended = run("latest", faulty_url(root), *more)
        assert (ended.code, ended.out) == (0, f"{faulty_url(root)}/{name(300)}\n")


def test_best_needs_all_steps_of_the_run(root: Path) -> None:
    """A step that cannot be read may be the best."""
    with faulty(Locked):
        ended = run("best", faulty_url(root), "loss", "--min")
        assert (ended.code, ended.out) == (4, "")
        assert name(100) in ended.err
        note = f"the best step that could be read is {faulty_url(root)}/{name(300)}"
        assert note in ended.err
        with manager(faulty_url(root)) as running, pytest.raises(AccessDenied) as raised:
            running.best("loss", "min")
        assert raised.value.__notes__ == [note]
    with manager(root) as running:
        running.restore(0)
        running.maybe_save(400, metrics={"loss": 5.0})
    with faulty(Locked):  # abandoned
        ended = run("best", faulty_url(root), "loss", "--min")
    assert (ended.code, ended.out) == (0, f"{faulty_url(root)}/{name(0)}\n")


def test_delete_does_not_need_to_read_the_others(root: Path) -> None:
    with faulty(Locked), manager(faulty_url(root)) as running:
        running.delete(200)
        with pytest.raises(AccessDenied):
            running.delete(100, force=True)
        running.delete(300)
        with pytest.raises(UsageError, match="only valid snapshot"):
            running.delete(0)
    assert names(root) == [name(0), name(100)]


def test_prune_goes_on_after_one_that_cannot_be_read(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = faulty_url(root)
    with faulty(Locked):
        ended = run("prune", url, "--keep", "last:1", "--min-valid", 1)
        assert ended.code == 4
        assert [row[1] for row in ended.rows] == [f"{url}/{name(0)}", f"{url}/{name(200)}"]
        assert f"kept {name(100)}: AccessDenied: Permission denied" in ended.err
        assert ended.err.endswith("1 step not readable\n")
        arguments = ["prune", url, "--keep", "last:1", "--min-valid", 1, "--yes", "--json"]
        ended = run(*arguments)
        assert ended.code == 4
        found = json.loads(ended.out)
        assert found["deleted"] == [f"{url}/{name(0)}", f"{url}/{name(200)}"]
        assert [*found["failed"]] == [f"{url}/{name(100)}"]
        assert (ended.err + caplog.text).count(f"{name(100)}: not deleted: ") == 1
    assert names(root) == [name(100), name(300)]
    assert run("verify", root / name(100), "--full").code == 0


@pytest.mark.parametrize("locked", [LockedNewest, LockedNewestList])
def test_prune_deletes_nothing_instead_of_a_step_that_it_cannot_read(
    root: Path, locked: type[Wrapper]
) -> None:
    """The newest step may be damaged: as many intact ones stay as without it."""
    with faulty(locked):
        ended = run("prune", faulty_url(root), "--keep", "last:1", "--min-valid", 2, "--yes")
    assert ended.code == 4
    assert names(root) == [name(100), name(200), name(300)]


def test_an_unreadable_step_of_an_older_run_is_no_leftover(root: Path) -> None:
    """A folder without a commit object goes; one whose commit object cannot be read does not."""
    with manager(root) as running:
        running.restore(300)
        running.maybe_save(400, metrics={"loss": 1.0})
    with faulty(Locked):
        ended = run("prune", faulty_url(root), "--keep", "last:5", "--yes")
    assert ended.code == 4
    assert len(names(root)) == 5
    assert run("verify", root / name(100), "--full").code == 0


def test_a_manager_deletes_the_others(root: Path) -> None:
    url = faulty_url(root)
    with faulty(Locked):
        with manager(url, keep=keep.last(1), min_valid=1) as running:
            running.restore_latest()
            running.maybe_save(400, metrics={"loss": 1.0})
            running.wait()
            report = running.prune(dry_run=True)
        assert [*report.failed] == [*running.status().failed_deletes] == [f"{url}/{name(100)}"]
    assert names(root) == [name(100), name(300), name(400, 2)]


def test_sizes_of_many_steps_of_which_one_cannot_be_listed(tmp_path: Path) -> None:
    with manager(tmp_path / "many", save=every.steps(1)) as running:
        for step in range(70):
            running.maybe_save(step)

    class LockedOne(LockedNewest):
        async def around(
            self,
            op: str,
            key: str,
            call: Callable[P, Awaitable[T]],
            *args: P.args,
            **kwargs: P.kwargs,
        ) -> T:
            if op == "list" and key in ("step-", f"{name(1)}/"):
                raise AccessDenied(op=op, key=key, backend=self.url, detail="Permission denied")
            return await Wrapper.around(self, op, key, call, *args, **kwargs)

    with faulty(LockedOne):
        found = json.loads(run("steps", faulty_url(tmp_path / "many"), "--json").out)
    assert [each["nbytes"] is None for each in found] == [step == 1 for step in range(70)]


class LockedFolder(Locked):
    """Refuses to list one step, and so everything from the root down."""

    async def around(
        self, op: str, key: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if op == "list" and not key:
            raise AccessDenied(op=op, key=key, backend=self.url, detail="Permission denied")
        return await super().around(op, key, call, *args, **kwargs)


class LockedData(Wrapper):
    """Refuses to list the data of one step."""

    async def around(
        self, op: str, key: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if op == "list" and key.startswith(name(100)):
            raise AccessDenied(op=op, key=key, backend=self.url, detail="Permission denied")
        return await super().around(op, key, call, *args, **kwargs)


def test_a_step_that_cannot_be_listed(root: Path) -> None:
    with faulty(LockedFolder):
        ended = run("ls", faulty_url(root), "--json")
        assert ended.code == 4
        listed = {each["name"]: each for each in json.loads(ended.out)}
    assert listed.keys() == {name(step) for step in LOSSES}
    assert listed[name(100)]["state"] == "not readable"
    assert listed[name(100)]["nbytes"] is None
    assert name(100) in listed[name(100)]["detail"]
    assert listed[name(0)]["state"] == "committed"
    with faulty(LockedData):
        ended = run("ls", faulty_url(root))
    assert ended.code == 0
    assert [row[2] == "-" for row in ended.rows] == [False, True, False, False]


def test_min_valid_without_a_policy(root: Path) -> None:
    ended = run("steps", root, "--min-valid", 1)
    assert (ended.code, ended.out) == (2, "")
    assert "--min-valid needs --keep" in ended.err
    row = run("steps", root, "--keep", "last:1").rows[2]
    assert row[5] == "stays: one of 2 verified (sizes)"  # by default


def test_steps_as_json(root: Path) -> None:
    with manager(root) as running:
        running.restore(100)
        running.maybe_save(200, metrics={"loss": float("nan")})
    found = json.loads(run("steps", root, "--all", "--json", "--keep", "last:1").out)
    assert [(each["name"], each["state"], each["keeps"]) for each in found] == [
        (name(0), "committed", False),
        (name(100), "committed", True),
        (name(200), "abandoned", True),
        (name(300), "abandoned", True),
        (name(200, 2), "committed", True),
    ]
    assert found[1]["reasons"] == ["restored from", "one of 2 verified (sizes)"][::-1]
    assert found[4]["metrics"] == {"loss": "nan"}
    assert found[0] == {
        "step": 0,
        "generation": 1,
        "name": name(0),
        "url": f"{root}/{name(0)}",
        "state": "committed",
        "created": found[0]["created"],
        "metrics": {"loss": 4.0},
        "pins": [],
        "nbytes": sum(f.stat().st_size for f in (root / name(0)).rglob("*") if f.is_file()),
        "keeps": False,
        "reasons": [],
    }


def test_all_steps(root: Path) -> None:
    (root / name(100) / "actorsnap.json").unlink()
    (root / name(200) / "actorsnap.json").write_text("{}")
    assert [row[0] for row in run("steps", root).rows] == [name(0), name(300)]
    rows = run("steps", root, "--all", "--keep", "last:1").rows
    assert [(row[0], row[4]) for row in rows] == [
        (name(0), "committed"),
        (name(100), "unfinished"),
        (name(200), "damaged"),
        (name(300), "committed"),
    ]
    assert rows[1][5] == "stays: unfinished: not judged"


def test_damage_is_found_before_it_is_judged(root: Path) -> None:
    damage(root, name(300))
    row = run("steps", root, "--keep", "last:1").rows[3]
    assert row[5].startswith("stays: damaged: ")


@pytest.mark.parametrize(
    "command",
    [
        *(
            ["steps"],
            ["latest"],
            ["best", "loss", "--min"],
            ["prune", "--keep", "last:1"],
            ["save-now"],
        ),
        *(["pin", "0", "--reason", "a"], ["unpin", "0"], ["record", "0", "a=1"]),
    ],
)
def test_a_file_is_no_root(tmp_path: Path, command: list[str]) -> None:
    file = tmp_path / "file"
    file.write_text("hello")
    ended = run(command[0], file, *command[1:])
    assert (ended.code, ended.out) == (3, "")
    assert ended.err == (
        f"error: {file}: this is a file; a snapshot is a folder, and so is a run: check the path\n"
    )


@pytest.mark.parametrize("command", [["steps"], ["latest"], ["best"], ["prune"], ["verify"]])
def test_nothing_there(tmp_path: Path, command: list[str]) -> None:
    more = {"best": ["loss", "--min"], "prune": ["--keep", "last:1"], "verify": ["--all"]}
    ended = run(*command, tmp_path, *more.get(command[0], []))
    assert (ended.code, ended.out) == (3, "")
    assert "error:" in ended.err


@pytest.mark.parametrize("command", [["steps"], ["latest"], ["best"], ["prune"], ["verify"]])
def test_a_misspelled_root(tmp_path: Path, command: list[str]) -> None:
    more = {"best": ["loss", "--min"], "prune": ["--keep", "last:1"], "verify": ["--all"]}
    ended = run(*command, tmp_path / "rnu", *more.get(command[0], []))
    assert (ended.code, ended.out) == (3, "")
    assert ended.err == f"error: {tmp_path}/rnu does not exist: check the path\n"


@pytest.mark.parametrize(
    "command",
    [
        ["pin", "3", "--reason", "x"],
        ["unpin", "3"],
        ["record", "3", "loss=1"],
        ["save-now"],
    ],
)
def test_a_misspelled_root_is_not_changed(tmp_path: Path, command: list[str]) -> None:
    name, *rest = command
    ended = run(name, tmp_path / "rnu", *rest)
    assert (ended.code, ended.out) == (3, "")
    assert ended.err == f"error: {tmp_path}/rnu does not exist: check the path\n"
    assert not (tmp_path / "rnu").exists()


# latest, best, verify -------------------------------------------------------------------------


def test_latest(root: Path) -> None:
    damage(root, name(300))
    assert run("latest", root).out == f"{root}/{name(300)}\n"
    assert run("latest", root, "--valid").out == f"{root}/{name(200)}\n"
    assert json.loads(run("latest", root, "--valid", "--json").out)["step"] == 200
    assert Snapshot(run("latest", root, "--valid").out.strip()).step == 200


def test_latest_reports_the_newer_steps_that_it_skips(root: Path) -> None:
    with manager(root) as running:
        running.restore_latest()
        for step in (400, 500, 600):
            running.maybe_save(step)
    damage(root, name(300))
    (root / name(400, 2) / COMMIT_KEY).write_bytes(b"{}")
    (root / name(500, 2) / COMMIT_KEY).unlink()
    (root / name(600, 2) / COMMIT_KEY).unlink()
    for manifest in (root / name(600, 2)).glob("*/manifest/*"):
        manifest.unlink()

    ended = run("latest", root, "--full")
    assert (ended.code, ended.out) == (0, f"{root}/{name(200)}\n")
    lines = ended.err.splitlines()
    skipped = [f"skipped {name(300)}, which is damaged: ", f"skipped {name(400, 2)}, which is "]
    skipped += [f"skipped {name(500, 2)}, which is complete: only the commit object is missing; "]
    skipped += [f"skipped {name(600, 2)}, which is unfinished: a save is in progress, or did not"]
    assert [line[: len(text)] for line, text in zip(lines, skipped, strict=True)] == skipped
    assert "bytes, was written with" in lines[0]
    for line, which in zip(lines[:2], (name(300), name(400, 2)), strict=True):
        assert line.endswith(f". `actorsnap verify --full {root}/{which}` shows all damage")
    assert f"`actorsnap recover {root}/{name(500, 2)}` writes it again" in lines[2]
    assert lines[2].endswith("before you restart the job")

    found = json.loads(run("latest", root, "--full", "--json").out)
    states = ["damaged", "damaged", "complete", "unfinished"]
    assert [each["state"] for each in found["skipped"]] == states
    ended = run("latest", root)  # of committed steps: one that is being saved is not skipped
    assert ended.out == f"{root}/{name(300)}\n"
    assert len(ended.err.splitlines()) == 2


def test_latest_does_not_report_what_the_run_left(root: Path) -> None:
    (root / name(300) / COMMIT_KEY).unlink()
    with manager(root) as running:
        running.restore_latest()
        running.save(250)
    ended = run("latest", root, "--full")
    assert (ended.out, ended.err) == (f"{root}/{name(250, 2)}\n", "")
    (root / name(250, 2) / COMMIT_KEY).unlink()  # recovered, step 300 would still be abandoned
    ended = run("latest", root, "--full")
    assert ended.out == f"{root}/{name(200)}\n"
    (line,) = ended.err.splitlines()
    assert line.startswith(f"skipped {name(250, 2)}, which is complete: ")


def test_a_recovery_reports_whether_the_run_continues_from_it(root: Path) -> None:
    (root / name(300) / COMMIT_KEY).unlink()
    restarted = Path(shutil.copytree(root, root.parent / "restarted", symlinks=True))
    ended = run("recover", root / name(300))
    assert ended.code == 0
    assert ended.err.startswith(f"a restart continues from {name(300)}. A job that has already")
    with manager(root) as running:
        assert running.restore_latest().step == 300  # type: ignore[union-attr]

    with manager(restarted) as running:
        assert running.restore_latest().step == 200  # type: ignore[union-attr]
        running.maybe_save(300)
    ended = run("recover", restarted / name(300))
    assert ended.code == 0
    assert ended.err.startswith(f"{name(300)} is abandoned: the run has continued from an older")
    assert "recover it before you restart the job" in ended.err
    with manager(restarted) as running:
        found = running.restore_latest()
        assert found is not None
        assert found.url.endswith(name(300, 2))


def test_nothing_intact(root: Path) -> None:
    for each in names(root):
        damage(root, each)
    ended = run("latest", root, "--valid")
    assert (ended.code, ended.out) == (3, "")


def test_advice_where_every_step_is_damaged(root: Path) -> None:
    for each in names(root):
        damage(root, each)
    ended = run("latest", root, "--full")
    assert ended.code == 3
    assert f"`actorsnap verify --all --full {root}` lists the damage" in ended.err


@pytest.mark.parametrize(
    "command",
    [["steps"], ["steps", "--json"], ["latest"], ["latest", "--valid"], ["prune"], ["verify"]],
)
def test_no_step_is_committed(root: Path, command: list[str]) -> None:
    for file in root.glob(f"*/{COMMIT_KEY}"):
        file.unlink()
    more = {"prune": ["--keep", "last:1"], "verify": ["--all"]}
    ended = run(*command, root, *more.get(command[0], []))
    assert ended.code == 3
    if command != ["verify"]:
        assert "has no committed step, only 4 other steps; `actorsnap steps --all`" in ended.err
    assert len(run("steps", root, "--all").rows) == 4


def test_a_snapshot_is_no_root(root: Path) -> None:
    snapshot = root / name(0)
    for command in (["steps"], ["latest"], ["best", "loss", "--min"], ["save-now"]):
        ended = run(command[0], snapshot, *command[1:])
        assert ended.code == 3
        assert f"{snapshot} is a snapshot, not the folder of a run" in ended.err
    ended = run("verify", "--all", snapshot)
    assert ended.code == 3
    assert "is one snapshot, not a folder of them: leave out --all" in ended.err
    ended = run("verify", "--all", root.parent)
    assert ended.code == 3
    assert f"some further down: {root.name}/{name(0)}" in ended.err


def test_best(root: Path) -> None:
    for modes in ((), ("--min", "--max")):
        ended = run("best", root, "loss", *modes)
        assert (ended.code, ended.out) == (2, "")
        assert "pass --min if the smallest loss is the best, or --max" in ended.err
    assert run("best", root, "loss", "--min").out == f"{root}/{name(100)}\n"
    assert run("best", root, "loss", "--max").out == f"{root}/{name(0)}\n"
    ended = run("best", root, "accuracy", "--min")
    assert (ended.code, ended.out) == (3, "")
    assert "there are: loss" in ended.err


def test_verify_all(root: Path) -> None:
    ended = run("verify", root, "--all")
    assert ended.code == 0
    assert ended.rows == [[name(step), "ok", "1 data object"] for step in LOSSES]
    damage(root, name(100))
    ended = run("verify", root, "--all", "--full")
    assert ended.code == 1
    assert [row[1] for row in ended.rows] == ["ok", "damaged", "ok", "ok"]
    found = json.loads(run("verify", root, "--all", "--json").out)
    assert [each["state"] for each in found] == ["ok", "damaged", "ok", "ok"]
    assert len(found[1]["problems"]) == 1


def test_verify_all_finds_a_lost_commit_object(root: Path) -> None:
    (root / name(100) / COMMIT_KEY).unlink()
    ended = run("verify", root, "--all")
    assert ended.code == 3
    assert [row[1] for row in ended.rows] == ["ok", "complete", "ok", "ok"]
    assert f"`actorsnap recover {root / name(100)}`" in ended.rows[1][2]
    found = json.loads(run("verify", root, "--all", "--json").out)
    assert (found[1]["state"], len(found[1]["problems"])) == ("complete", 1)
    listed = json.loads(run("ls", root, "--json").out)
    assert listed[1]["state"] == "unfinished"
    assert "no commit object" in listed[1]["detail"]
    damage(root, name(200))
    assert run("verify", root, "--all").code == 1
    assert run("recover", root / name(100)).code == 0


def test_verify_all_with_an_unfinished_step(root: Path) -> None:
    """A save in progress is no damage."""
    (root / name(300) / COMMIT_KEY).unlink()
    for manifest in (root / name(300)).glob("*/manifest/*"):
        manifest.unlink()
    ended = run("verify", root, "--all")
    assert (ended.code, ended.err) == (0, "")
    assert [row[1] for row in ended.rows] == ["ok", "ok", "ok", "unfinished"]
    assert ended.rows[3] == [name(300), "unfinished"]
    found = json.loads(run("verify", root, "--all", "--json").out)
    assert found[3] == {"name": name(300), "state": "unfinished", "problems": []}


@pytest.mark.parametrize("more", [[], ["--full"]])
def test_verify_all_checks_the_records_of_the_run(root: Path, more: list[str]) -> None:
    with manager(root) as running:
        running.restore_latest()
        running.maybe_save(400)
    run("pin", root, 100, "--reason", "paper")
    run("record", root, 200, "accuracy=0.5")
    assert run("verify", "--all", *more, root).code == 0
    run_file = root / ".manager" / "runs" / "00000002.json"
    intact = run_file.read_bytes()
    files = [run_file, *(root / ".manager" / "marks").glob("*/*.json")]
    for file in files:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)

    ended = run("verify", "--all", *more, root)
    assert ended.code == 1
    rows = {row[0]: row[1:] for row in ended.rows}
    assert [rows[each][0] for each in names(root)] == ["ok"] * 5
    details = [rows[str(file.relative_to(root))] for file in files]
    assert {state for state, _ in details} == {"damaged"}
    assert all("checksum does not match" in detail for _, detail in details)
    assert "which snapshot generation 2 continued, so steps of earlier generations" in details[0][1]
    assert "Copy this file back from a backup" in details[0][1]
    found = json.loads(run("verify", "--all", *more, root, "--json").out)
    assert [(each["name"], each["state"]) for each in found[5:]] == [
        (str(file.relative_to(root)), "damaged") for file in sorted(files)
    ]

    # What it does, and the remedies.
    assert [row[0] for row in run("steps", root).rows] == [name(400, 2)]
    run_file.write_bytes(intact)
    assert len(run("steps", root).rows) == 5
    assert run("unpin", root, 100).code == 0
    assert run("verify", "--all", *more, root).code == 1
    for file in (root / ".manager" / "marks" / name(200)).glob("*.json"):
        file.unlink()
    assert run("verify", "--all", *more, root).code == 0


def test_verify_as_json(root: Path) -> None:
    damage(root, name(100))
    assert json.loads(run("verify", root / name(0), "--json").out) == {
        "path": str(root / name(0)),
        "level": "quick",
        "state": "ok",
        "has_checksums": True,
        "num_objects": 1,
        "nbytes": 0,
        "problems": [],
        "num_unused": 0,
        "unused_bytes": 0,
    }
    found = json.loads(run("verify", root / name(0), "--full", "--json").out)
    assert found["level"] == "full"
    assert found["nbytes"] > 0
    file = root / name(300) / COMMIT_KEY
    intact = file.read_bytes()
    file.write_text("{}")
    for more in ([], ["--full"]):
        ended = run("verify", root / name(300), "--json", *more)
        found = json.loads(ended.out)
        assert (ended.code, found["state"], len(found["problems"])) == (1, "damaged", 1)
        assert found["level"] == ("full" if more else "quick")
        assert (found["num_objects"], found["nbytes"]) == (0, 0)
    assert json.loads(run("verify", root / "no", "--json").out)["error"]["type"] == "NotASnapshot"
    file.write_bytes(intact)
    ended = run("verify", root / name(100), "--json")
    assert ended.code == 1
    assert json.loads(ended.out)["state"] == "damaged"
    all_found = json.loads(run("verify", root, "--all", "--json").out)
    assert [each["nbytes"] for each in all_found] == [0] * len(LOSSES)
    assert {each["level"] for each in all_found} == {"quick"}
    assert all_found[0]["num_objects"] == 1


# cp --all -------------------------------------------------------------------------------------


def test_a_copied_run_continues_and_keeps_the_same(root: Path, tmp_path: Path) -> None:
    with manager(root) as running:
        running.restore(200)
        running.maybe_save(400, metrics={"loss": 5.0})
    run("pin", root, 0, "--reason", "paper")
    run("record", root, 200, "acc=0.5")
    copy = tmp_path / "copy"
    ended = run("cp", "--all", root, copy)
    assert (ended.code, ended.err) == (0, "")
    assert [row[:2] for row in ended.rows] == [[each, "copied"] for each in names(root)]
    assert names(copy) == names(root)
    listed = [json.loads(run("steps", "--all", "--json", url).out) for url in (root, copy)]
    assert [{**each, "url": ""} for each in listed[1]] == [
        {**each, "url": ""} for each in listed[0]
    ]
    assert run("verify", "--all", "--full", copy).code == 0
    with manager(copy, keep=keep.best("loss", "min"), min_valid=1) as running:
        restored = running.restore_latest()
        assert restored is not None
        assert (restored.step, restored.skipped) == (400, ())
        running.maybe_save(500, metrics={"loss": 6.0})
        running.wait()
        running.prune()
    # Pinned, the best, abandoned, restored from, the newest.
    assert names(copy) == [name(0), name(100), name(300), name(400, 2), name(500, 3)]
    assert len(names(root)) == 5


@pytest.mark.parametrize("where", ["", "/", "/sub", "/../link", "/../link/sub"])
def test_a_run_is_not_copied_to_itself(root: Path, where: str) -> None:
    (root.parent / "link").symlink_to(root)
    before = sorted(root.rglob("*"))
    ended = run("cp", "--all", root, f"{root}{where}")
    assert (ended.code, ended.out) == (2, "")
    assert "the source" in ended.err
    assert "name another folder for the copies" in ended.err
    assert sorted(root.rglob("*")) == before
    assert run("cp", "--all", root, f"{root}-copy").code == 0


def test_a_copied_pin_keeps_its_end(root: Path, tmp_path: Path) -> None:
    for step, until in (100, "1h"), (200, "2h"), (300, "10d"):
        assert run("pin", root, step, "--reason", "paper", "--until", until).code == 0
    assert run("pin", root, 0, "--reason", "forever").code == 0
    for mark in root.glob(".manager/marks/*/*"):
        pinned_s = mark.stat().st_mtime - 5400
        os.utime(mark, (pinned_s, pinned_s))
    copy = tmp_path / "copy"
    assert run("cp", "--all", root, copy).code == 0
    ends = [
        {
            pin["until"]
            for each in json.loads(run("steps", at, "--json").out)
            for pin in each["pins"]
        }
        for at in (root, copy)
    ]
    times = [
        sorted(datetime.fromisoformat(end).timestamp() for end in found if end is not None)
        for found in ends
    ]
    assert [len(found) for found in ends] == [3, 3]  # one has expired
    assert times[1] == pytest.approx(times[0], abs=5)
    assert not [*copy.glob(f".manager/marks/{name(100)}/*")]


def test_copying_a_run_again(root: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    damage(root, name(100))
    (root / name(200) / COMMIT_KEY).unlink()

    def wrap(inner: Storage) -> Storage:
        fails = name(0) in inner.url
        return FaultyStorage(inner, fail_at=1, fail_verbs={"writer"}) if fails else inner

    with faulty(wrap):
        ended = run("cp", "--all", root, faulty_url(copy))
    assert ended.code == 4
    assert [row[:2] for row in ended.rows] == [
        [name(0), "failed"],
        [name(100), "failed"],
        [name(200), "unfinished"],
        [name(300), "copied"],
    ]
    assert ended.rows[1][2].startswith("ChecksumMismatch: ")
    assert ended.rows[1][2].endswith(" bytes are needed, the object has 4495")
    lines = ended.err.splitlines()
    assert lines[0].startswith(f"{name(200)} is complete, but not copied: only the commit object")
    assert f"`actorsnap recover {root}/{name(200)}`" in lines[0]
    assert lines[1:] == [
        "1 snapshot was not copied; remove the cause, then run the command again",
        "1 snapshot was not copied; the source is damaged: `actorsnap verify --all --full "
        f"{root}` lists all damage",
    ]
    before = (copy / name(300) / COMMIT_KEY).stat().st_mtime_ns
    ended = run("cp", "--all", root, copy, "--json")
    assert ended.code == 4
    found = [json.loads(line) for line in ended.out.splitlines()]
    assert [each["state"] for each in found] == ["copied", "failed", "unfinished", "was there"]
    assert (copy / name(300) / COMMIT_KEY).stat().st_mtime_ns == before
    assert run("verify", copy / name(0), "--full").code == 0
    assert not (copy / name(100) / COMMIT_KEY).exists()


def test_what_may_succeed_later_is_copied_by_another_run_of_cp(root: Path, tmp_path: Path) -> None:
    busy = Throttled(op="writer", key="", backend="x", detail="slow down")

    def wrap(inner: Storage) -> Storage:
        fails = name(0) in inner.url
        storage = FaultyStorage(inner, fail_at=1, fail_verbs={"writer"}, error=busy)
        return storage if fails else inner

    with faulty(wrap):
        ended = run("cp", "--all", root, faulty_url(tmp_path / "copy"))
    assert ended.code == 4
    assert ended.err == "1 snapshot was not copied; run the command again to continue\n"


class LockedAnywhere(LockedNewest):
    step = 100


def test_a_step_that_cannot_be_read_does_not_end_a_copy(root: Path, tmp_path: Path) -> None:
    with faulty(LockedAnywhere):
        ended = run("cp", "--all", faulty_url(root), tmp_path / "copy")
    assert ended.code == 4
    assert [row[:2] for row in ended.rows] == [
        [name(step), "failed" if step == 100 else "copied"] for step in LOSSES
    ]


class Gone(Wrapper):
    """Reaches no storage from the data of one step on."""

    is_gone = False

    async def around(
        self, op: str, key: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if name(100) in self.url and op == "read_into":
            Gone.is_gone = True
        if Gone.is_gone:
            error = StorageError(op=op, key=key, backend=self.url, detail="refused", retryable=True)
            raise error from WireError("Connection refused")
        return await super().around(op, key, call, *args, **kwargs)


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> Generator[Callable[[], int]]:
    """While no storage answers: returns the number of tries that failed."""
    tries: list[float] = []
    policy = RetryPolicy(max_attempts=3, first_delay_s=0.001)
    monkeypatch.setattr(Gone, "is_gone", False)

    def wrap(inner: Storage) -> Storage:
        return RetryStorage(
            Gone(inner), policy=policy, on_retry=lambda _, delay_s: tries.append(delay_s)
        )

    with faulty(wrap):
        yield lambda: len(tries)


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_cp_stops_if_the_storage_is_gone(
    root: Path, tmp_path: Path, gone: Callable[[], int], more: list[str]
) -> None:
    ended = run("cp", "--all", faulty_url(root), tmp_path / "copy", *more)
    assert ended.code == 4
    found = [(name(0), "copied"), (name(100), "failed")]
    if more:
        found += [(name(200), "not looked at"), (name(300), "not looked at")]
        lines = map(json.loads, ended.out.splitlines())
        assert [(line["name"], line["state"]) for line in lines] == found
    else:
        assert [(row[0], row[1]) for row in ended.rows] == found
    stopped = f"2 snapshots were not looked at, from {name(200)} on"
    assert f"stopped: the storage cannot be reached; {stopped}\n" in ended.err
    assert gone() < 6


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_verify_stops_if_the_storage_is_gone(
    root: Path, gone: Callable[[], int], more: list[str]
) -> None:
    ended = run("verify", "--all", "--full", faulty_url(root), *more)
    assert ended.code == 4
    found = [(name(0), "ok"), (name(100), "not readable")]
    if more:
        found += [(name(200), "not looked at"), (name(300), "not looked at")]
        assert [(each["name"], each["state"]) for each in json.loads(ended.out)] == found
    else:
        assert [(row[0], row[1]) for row in ended.rows] == found
    assert f"2 snapshots were not looked at, from {name(200)} on" in ended.err


def test_verify_prints_each_step_when_it_is_done(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check of a run may take hours, and end early."""
    printed: list[str] = []
    check = cli_damage._check

    def look(place: str, which: str, *rest: Any) -> Any:
        printed.append(sys.stdout.buffer.getvalue().decode())  # type: ignore[union-attr]
        return check(place, which, *rest)

    monkeypatch.setattr(cli_damage, "_check", look)
    out = run("verify", "--all", root).out
    assert [text.count("\n") for text in printed] == [0, 1, 2, 3]
    assert all(out.startswith(text) for text in printed)


def test_a_copy_to_another_run(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with manager(other) as running:
        running.maybe_save(700)
    with manager(root) as running:
        running.restore_latest()
        running.maybe_save(400)
    before = sorted(other.rglob("*"))
    ended = run("cp", "--all", root, other)
    assert (ended.code, ended.out) == (4, "")
    assert "another run has saved there" in ended.err
    assert sorted(other.rglob("*")) == before


def test_what_is_no_folder_of_snapshots(root: Path, tmp_path: Path) -> None:
    ended = run("cp", "--all", root / name(0), tmp_path / "copy")
    assert ended.code == 3
    assert "is one snapshot, not a folder of them: leave out --all" in ended.err
    ended = run("cp", "--all", root.parent, tmp_path.with_name(f"{tmp_path.name}-copy"))
    assert ended.code == 3
    assert f"some further down: {root.name}/{name(0)}" in ended.err
    assert run("cp", "--all", tmp_path / "none", tmp_path / "copy").code == 3
    other = shutil.copytree(root / name(0), tmp_path / "other")
    ended = run("cp", "--all", root, other)
    assert (ended.code, ended.out) == (2, "")
    assert "is a snapshot: with --all, name the folder of the copies" in ended.err
    ended = run("cp", "--all", root, other / "copy")
    assert ended.code == 2
    assert "is in a snapshot, which would contain the copy" in ended.err
    assert not (tmp_path / "copy").exists()


def test_a_run_that_is_left_on_a_tier_only(tmp_path: Path) -> None:
    with manager(tmp_path / "run", tiers=[str(tmp_path / "near")]) as running:
        running.maybe_save(0)
        running.maybe_save(100)
    shutil.rmtree(tmp_path / "run")
    assert run("cp", "--all", tmp_path / "near", tmp_path / "copy").code == 0
    with manager(tmp_path / "copy", keep=keep.last(1)) as running:
        restored = running.restore_latest()
        assert restored is not None
        assert restored.step == 100
        running.prune()


# prune ----------------------------------------------------------------------------------------


def test_prune_is_a_dry_run_without_yes(root: Path) -> None:
    ended = run("prune", root, "--keep", "last:1", "--min-valid", 1)
    assert ended.code == 0
    assert [row[:2] for row in ended.rows] == [
        ["would delete", f"{root}/{name(step)}"] for step in (0, 100, 200)
    ]
    assert re.fullmatch(r"nothing was deleted: --yes deletes 3 steps, \d+\.\d KiB\n", ended.err)
    assert len(names(root)) == 4


def test_prune(root: Path) -> None:
    ended = run("prune", root, "--keep", "last:1", "--keep", "best:loss:min", "--yes")
    assert ended.code == 0
    assert [row[:2] for row in ended.rows] == [["deleted", f"{root}/{name(0)}"]]
    assert names(root) == [name(100), name(200), name(300)]
    assert not [*root.glob(".manager/deleting/*")]
    again = run("prune", root, "--keep", "last:1", "--keep", "best:loss:min", "--yes")
    assert (again.code, again.out) == (0, "")


def flip_a_byte(root: Path, which: str) -> None:
    (file,) = (root / which).glob("*/data/**/*.safetensors")
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_prune_compares_bytes_if_full(root: Path) -> None:
    for step in (200, 300):
        flip_a_byte(root, name(step))
    policy = ["--keep", "last:1"]
    # Two of four are whole: nothing older may go.
    ended = run("prune", root, *policy, "--full", "--yes")
    assert (ended.code, ended.out) == (0, "")
    for step in (200, 300):
        assert f"kept {name(step)}: damaged: " in ended.err
    assert len(names(root)) == 4

    ended = run("prune", root, *policy, "--min-valid", 1, "--full", "--yes")
    assert (ended.code, names(root)) == (0, [name(100), name(200), name(300)])
    (row,) = [row for row in run("steps", root, *policy, "--full").rows if row[0] == name(100)]
    assert row[-1].endswith("newest, newest verified, one of 2 verified, only 1 of 2 verified")


@pytest.mark.parametrize("more", [[], ["--yes"]])
def test_prune_names_the_command_that_shows_why(root: Path, more: list[str]) -> None:
    policy = ["--keep", "last:3", "--keep", "every:100", "--min-valid", "3"]
    ended = run("prune", root, *policy, *more)
    command = f"actorsnap steps {root} {' '.join(policy)}"
    assert (ended.code, ended.out) == (0, "")
    assert ended.err == f"nothing to delete; `{command}` shows why\n"
    assert run(*command.split()[1:]).code == 0


def test_prune_deletes_nothing_if_too_few_steps_are_whole(root: Path) -> None:
    for step in (100, 200, 300):
        flip_a_byte(root, name(step))
    ended = run("prune", root, "--keep", "last:1", "--full", "--yes")
    assert (ended.code, ended.out, len(names(root))) == (0, "", 4)


def test_prune_reads_each_step_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    find = keeper.find_damage

    def note(root: Root, name: StepName, level: str, **more: Any) -> Any:
        looked.append(level)
        return find(root, name, level, **more)

    monkeypatch.setattr(keeper, "find_damage", note)
    run("prune", root, "--keep", "last:1", "--full", "--yes")
    assert looked == ["full", "full"]
    assert names(root) == [name(200), name(300)]


@pytest.mark.parametrize("command", [["steps"], ["prune", "--yes"], ["prune"]])
def test_a_metric_that_no_step_has(root: Path, command: list[str]) -> None:
    name, *rest = command
    ended = run(name, root, *rest, "--keep", "best:los:min", "--keep", "last:1")
    assert (ended.code, ended.out) == (3, "")
    assert ended.err == "error: no step has the metric 'los'; there are: loss\n"


def test_prune_as_json(root: Path) -> None:
    for more, is_dry in ([], True), (["--yes"], False):
        found = json.loads(run("prune", root, "--keep", "last:1", "--json", *more).out)
        assert found == {
            "dry_run": is_dry,
            "is_superseded": False,
            "would_delete" if is_dry else "deleted": [f"{root}/{name(0)}", f"{root}/{name(100)}"],
            "kept": {},
            "left": [],
            "failed": {},
        }


def test_prune_where_deleting_fails(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line for each failure: the log has it."""

    def wrap(inner: Storage) -> Storage:
        return FaultyStorage(inner, fail_at=1, fail_verbs={"delete"}, is_lasting=True)

    with faulty(wrap):
        ended = run("prune", faulty_url(root), "--keep", "last:3", "--yes")
    assert ended.code == 4
    assert (ended.err + caplog.text).count(f"{name(0)}: not deleted: ") == 1
    assert "\n1 step was not deleted\n" in ended.err


def test_prune_reports_each_failed_deletion_once(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def wrap(inner: Storage) -> Storage:
        return FaultyStorage(inner, fail_at=1, fail_verbs={"delete"}, is_lasting=True)

    with faulty(wrap):
        ended = run("prune", faulty_url(root), "--keep", "last:1", "--min-valid", 1, "--yes")
    assert (ended.code, ended.out) == (4, "")
    lines = [*caplog.messages, *ended.err.splitlines()]
    for step in (0, 100, 200):
        (line,) = [line for line in lines if name(step) in line]
        assert f"{name(step)}: not deleted: " in line
    assert ended.err.endswith("deleted 0 steps, 0 B\n3 steps were not deleted\n")
    assert len(names(root)) == 4


def test_prune_needs_a_policy(root: Path) -> None:
    ended = run("prune", root, "--yes")
    assert ended.code == 2
    assert "name the steps to keep" in ended.err
    assert len(names(root)) == 4


def test_prune_beside_a_running_manager(root: Path) -> None:
    with manager(root) as running:
        running.restore_latest()
        running.maybe_save(400)
        running.wait()
        assert run("prune", root, "--keep", "last:1", "--min-valid", 1, "--yes").code == 0
        # What it continued stays, and it is not fenced.
        assert names(root) == [name(300), name(400, 2)]
        running.maybe_save(500)
        running.wait()
        assert running.all_steps() == [300, 400, 500]


def test_prune_finishes_a_deletion(root: Path) -> None:
    (root / name(0) / "actorsnap.json").unlink()
    intent = root / intent_key(StepName(0, 1))
    intent.parent.mkdir()
    intent.write_bytes(encode_record(DeleteIntent(attempt="a", generation=1, reason="test")))
    rows = run("steps", root, "--all").rows
    assert rows[0][4] == "deleting"
    assert run("prune", root, "--keep", "all", "--yes").code == 0
    assert names(root) == [name(100), name(200), name(300)]
    assert not intent.exists()


@pytest.mark.parametrize("is_late", [False, True])
def test_prune_stops_for_a_later_run(
    root: Path, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    read_commits, list_records = Root.read_commits, Root.list_records
    looks = []

    async def begin_another(self: Root, opened: OpenSource, names: Any, **more: Any) -> Any:
        await self.claim_generation(opened, restored_from=None, world_size=1)
        return await read_commits(self, opened, names, **more)

    async def look(self: Root, opened: OpenSource) -> Records:
        looks.append(1)
        records = await list_records(self, opened)
        if len(looks) < 3:  # the first are those of the judgement
            return records
        return replace(records, generations=records.generations | {9})

    def arm(*_: object) -> Generator[Any, Any, dict[StepName, int]]:
        # After the dry run: before the first or the second look for a later run.
        if is_late:
            monkeypatch.setattr(Root, "list_records", look)
        else:
            monkeypatch.setattr(Root, "read_commits", begin_another)
        yield from ()
        return {}

    monkeypatch.setattr("actorsnap.cli_roots._measure", arm)
    ended = run("prune", root, "--keep", "last:1", "--min-valid", 1, "--yes")
    assert ended.code == 5
    assert "another job has begun to save here" in ended.err
    assert len(names(root)) == 4
    assert not [*root.glob(".manager/deleting/*")]


def test_prune_while_a_job_saves(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that appear after the first look are neither listed nor deleted."""
    measure = cli_roots._measure
    with manager(root) as running:
        running.restore_latest()
        running.maybe_save(400)
        running.wait()

        def save_meanwhile(*args: Any) -> Any:
            for step in (500, 600):
                running.maybe_save(step)
                running.wait()
            return measure(*args)

        monkeypatch.setattr(cli_roots, "_measure", save_meanwhile)
        ended = run("prune", root, "--keep", "last:1", "--min-valid", 1, "--yes")
    assert ended.code == 0
    assert [row[:2] for row in ended.rows] == [
        ["deleted", f"{root}/{name(step)}"] for step in (0, 100, 200)
    ]
    assert all(row[2] != "0 B" for row in ended.rows)
    assert names(root) == [name(300), name(400, 2), name(500, 2), name(600, 2)]


@pytest.mark.parametrize("is_late", [False, True])
def test_prune_while_the_job_prunes(
    root: Path, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """The job deletes a step before the shell judges it again, or before it deletes it."""
    measure, look_again = cli_roots._measure, Deleter._look_again

    def delete() -> None:
        shutil.rmtree(root / name(0), ignore_errors=True)
        (root / intent_key(StepName(0, 1))).unlink(missing_ok=True)

    def delete_meanwhile(*args: Any) -> Any:
        delete()
        return measure(*args)

    async def look(self: Deleter) -> Records:
        await anyio.to_thread.run_sync(delete)
        return await look_again(self)

    if is_late:
        monkeypatch.setattr(Deleter, "_look_again", look)
    else:
        monkeypatch.setattr(cli_roots, "_measure", delete_meanwhile)
    ended = run("prune", root, "--keep", "last:1", "--min-valid", 1, "--yes")
    assert ended.code == 0
    assert [row[1] for row in ended.rows] == [f"{root}/{name(100)}", f"{root}/{name(200)}"]
    assert ended.err.startswith("deleted 2 steps, ")
    assert ended.err.endswith("1 step was already deleted, by the job\n")


def test_prune_spares_a_step_pinned_meanwhile(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = cli_roots._measure

    def pin_meanwhile(*args: Any) -> Any:
        assert run("pin", root, 0, "--reason", "paper").code == 0
        return measure(*args)

    monkeypatch.setattr(cli_roots, "_measure", pin_meanwhile)
    ended = run("prune", root, "--keep", "last:1", "--min-valid", 1, "--yes")
    assert ended.code == 0
    assert f"kept {name(0)}: pinned: paper" in ended.err
    assert names(root) == [name(0), name(300)]


def test_a_manager_does_not_count_what_the_shell_began_to_delete(root: Path) -> None:
    running = manager(root, keep=keep.all(), min_valid=1)
    running.restore_latest()
    running.maybe_save(400)
    running.wait()
    # It has read all commit objects; then another process is killed in a deletion.
    running.explain()
    assert running.all_steps() == [0, 100, 200, 300, 400]
    (root / name(200) / "actorsnap.json").unlink()
    intent = root / intent_key(StepName(200, 1))
    intent.parent.mkdir(exist_ok=True)
    intent.write_bytes(encode_record(DeleteIntent(attempt="a", generation=1, reason="test")))
    assert running.all_steps() == [0, 100, 300, 400]
    running.close()


# Marks ----------------------------------------------------------------------------------------


def test_pin_and_unpin(root: Path) -> None:
    assert run("pin", root, 0, "--reason", "paper", "--until", "30d").code == 0
    pinned = json.loads(run("pin", root, name(0), "--reason", "talk", "--json").out)
    assert (pinned["name"], pinned["reason"], pinned["until"]) == (name(0), "talk", None)
    shown = run("steps", root).out.splitlines()
    assert "pinned: paper" in shown[0]
    assert "pinned: talk" in shown[0]
    assert "pinned" not in shown[1]
    (first, *_) = json.loads(run("steps", root, "--json", "--keep", "last:1").out)
    assert [pin["reason"] for pin in first["pins"]] == ["paper", "talk"]
    assert first["keeps"]
    assert "pinned: paper" in str(first["reasons"])
    assert run("prune", root, "--keep", "last:1", "--min-valid", 1, "--yes").code == 0
    assert names(root) == [name(0), name(300)]
    ended = run("unpin", root, 0)
    assert "name the reason" in ended.err
    assert "--reason" in ended.err
    assert "write for example --reason 'for the paper'" in run("pin", root, 0, "--reason", "").err
    assert run("unpin", root, 0, "--reason", "talk").out.startswith(f"{name(0)}\tno longer pinned")
    (removed,) = json.loads(run("unpin", root, 0, "--json").out)
    assert removed["reason"] == "paper"
    assert run("prune", root, "--keep", "last:1", "--min-valid", 1, "--yes").code == 0
    assert names(root) == [name(300)]


class LockedCommits(Wrapper):
    """Refuses to read each commit object."""

    async def around(
        self, op: str, key: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if key.endswith(COMMIT_KEY):
            raise AccessDenied(op=op, key=key, backend=self.url, detail="Permission denied")
        return await super().around(op, key, call, *args, **kwargs)


@pytest.mark.parametrize("harm", ["locked", "damaged", "newer", "gone"])
@pytest.mark.parametrize("step", [100, name(100)])
def test_unpin_needs_no_commit_object(root: Path, harm: str, step: object) -> None:
    run("pin", root, 100, "--reason", "paper")
    file = root / name(100) / COMMIT_KEY
    if harm == "damaged":
        file.write_bytes(b"{")
    elif harm == "newer":
        commit = replace_field(decode_commit(file.read_bytes(), ""), features=("delta",))
        file.write_bytes(encode_commit(commit))
    elif harm == "gone":
        file.unlink()
    with faulty(LockedCommits if harm == "locked" else Wrapper):
        shown = {row[0]: row for row in run("steps", faulty_url(root), "--all").rows}
        assert shown[name(100)][-1] == run("steps", root, "--all").rows[1][-1]
        assert "pinned: paper" in shown[name(100)][-1]
        ended = run("unpin", faulty_url(root), step)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith(f"{name(100)}\tno longer pinned: paper")
    assert not [*root.glob(".manager/marks/**/pin-*")]


def test_unpin_of_a_step_of_two_runs(root: Path) -> None:
    """The step of the current run, also if no commit object can be read."""
    with manager(root) as running:
        running.restore(0)
        running.maybe_save(100, metrics={"loss": 1.0})
    for each in (name(100), name(100, 2)):
        run("pin", root, each, "--reason", each)
    with faulty(LockedCommits):
        assert run("unpin", faulty_url(root), 100).out.startswith(f"{name(100, 2)}\tno longer")
        assert f"{name(100, 2)} is not pinned" in run("unpin", faulty_url(root), 100).err
        assert run("unpin", faulty_url(root), name(100)).out.startswith(f"{name(100)}\tno longer")


def test_expired_pins_do_not_count(root: Path) -> None:
    run("pin", root, 0, "--reason", "old", "--until", "0.01s")
    run("pin", root, 0, "--reason", "new")
    assert run("unpin", root, 0).out.startswith(f"{name(0)}\tno longer pinned: new")
    ended = run("unpin", root, 0)
    assert ended.code == 2
    assert "is not pinned\n" in ended.err


@pytest.mark.parametrize("more", [[], ["--force"], ["--garbage"]])
def test_rm_refuses_a_link(root: Path, more: list[str]) -> None:
    for path in (f"{root}/latest", f"{root}/latest/"):
        ended = run("rm", "--yes", *more, root / name(0), path)
        assert (ended.code, ended.out) == (2, "")
        assert f"{path} is a link to {name(300)}, and nothing was deleted" in ended.err
    assert len(names(root)) == 4
    assert run("verify", root / name(300)).code == 0


@pytest.mark.parametrize("place", [name(0), f"{name(0)}/", "linked/" + name(0)])
def test_rm_spares_pinned_steps(root: Path, place: str) -> None:
    (root / "linked").symlink_to(".")
    run("pin", root, 0, "--reason", "paper")
    run("pin", root, 100, "--reason", "short", "--until", "0.01s")
    for given in ([f"{root}/{place}"], [root / name(100), f"{root}/{place}"]):
        ended = run("rm", "--yes", *given)
        assert (ended.code, ended.out) == (5, "")
        assert "pinned: paper" in ended.err
        assert "--force" in ended.err
        assert len(names(root)) == 4
    error = json.loads(run("rm", "--yes", "--json", root / name(0)).out)["error"]
    assert (error["type"], error["exit_code"]) == ("Pinned", 5)
    assert run("rm", "--yes", root / name(100)).code == 0  # the pin has expired
    assert run("rm", "--yes", "--force", root / name(0)).code == 0
    assert [info[0] for info in run("steps", root).rows] == [name(200), name(300)]


@pytest.mark.parametrize("is_late", [False, True])
def test_rm_that_is_denied_says_what_is_left(root: Path, is_late: bool) -> None:
    def wrap(inner: Storage) -> Storage:
        denied = AccessDenied(op="delete", key="", backend=inner.url, detail="Read-only")
        verbs = {"delete_folder"} if is_late else {"delete"}
        return FaultyStorage(inner, fail_at=1, fail_verbs=verbs, error=denied, is_lasting=True)

    with faulty(wrap):
        ended = run("rm", "--yes", faulty_url(root / name(0)))
    assert ended.code == 4
    assert (f"{name(0)} is unchanged\n" in ended.err) is not is_late
    assert ("`actorsnap rm --garbage --yes" in ended.err) is is_late
    assert run("verify", root / name(0)).code == (3 if is_late else 0)


def test_rm_looks_for_pins_after_the_question(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def confirm(question: str) -> bool:
        assert run("pin", root, 0, "--reason", "paper").code == 0
        return True

    monkeypatch.setattr(cli_deletion, "is_confirmed", confirm)
    assert run("rm", root / name(0)).code == 5
    assert len(names(root)) == 4


def test_record(root: Path) -> None:
    ended = run("record", root, 0, "val/acc=0.5", "val/top=nan")
    assert ended.out == f"{name(0)}\tval/acc=0.5, val/top=nan\n"
    assert json.loads(run("record", root, 100, "val/acc=0.75", "--json").out) == {"val/acc": 0.75}
    assert run("best", root, "val/acc", "--max").out.strip() == f"{root}/{name(100)}"
    assert "loss=4, val/acc=0.5, val/top=nan" in run("steps", root).out.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["pin", "x", "--reason", "a"], "'x' is not a step"),
        (["pin", "7", "--reason", "a"], "no snapshot of step 7"),
        (["pin", "0", "--reason", "a", "--until", "soon"], "write 30d"),
        (["unpin", "0"], "is not pinned"),
        (["record", "0", "loss"], "is not a metric"),
        (["record", "0", "loss=high"], "is not a metric"),
        (["record", "0", "=1"], "is not a metric"),
        (["record", "0", ""], "is not a metric"),
    ],
)
def test_what_is_no_mark(root: Path, arguments: list[str], text: str) -> None:
    command, *rest = arguments
    ended = run(command, root, *rest)
    assert ended.code != 0
    assert text in " ".join(ended.err.split())


def test_save_now_as_json(root: Path) -> None:
    ended = run("save-now", root, "--reason", "upgrade", "--json")
    assert ended.code == 0
    assert json.loads(ended.out) == {"root": str(root), "reason": "upgrade"}
    assert "watch_requests_s" in ended.err
    assert len([*root.glob(".manager/requests/*.json")]) == 1
    assert run("save-now", root).out == ""


def test_sizes_of_many_steps(tmp_path: Path) -> None:
    """One listing instead of one per snapshot."""
    root = tmp_path / "run"
    with manager(root, keep=keep.all(), save=every.steps(1)) as running:
        for step in range(20):
            running.maybe_save(step)
    found = json.loads(run("steps", root, "--json").out)
    assert [each["nbytes"] for each in found] == [
        sum(f.stat().st_size for f in (root / name(step)).rglob("*") if f.is_file())
        for step in range(20)
    ]


def test_latest_compares_bytes_if_full(root: Path) -> None:
    (file,) = (root / name(300)).glob("*/data/**/*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for options, step in (["--valid"], 300), (["--full"], 200), (["--valid", "--full"], 200):
        assert run("latest", root, *options).out == f"{root}/{name(step)}\n"


def test_a_link_to_the_latest_for_people(root: Path) -> None:
    link = root / "latest"
    assert str(link.readlink()) == name(300)
    with manager(root) as running:
        running.restore(100)
        running.maybe_save(200)
    assert str(link.readlink()) == name(200, 2)
    # What is not ours stays, and nothing reads the link.
    link.unlink()
    link.write_text("mine")
    with manager(root) as running:
        found = running.restore_latest()
        assert found is not None
        assert found.step == 200
        running.maybe_save(400)
    assert link.read_text() == "mine"
    assert [line.split()[0] for line in run("ls", root).out.splitlines()][-1] == name(400, 3)


@pytest.mark.parametrize("call", ["take", "async_take", "copy", "convert"])
@pytest.mark.parametrize("place", ["latest", "mine", ""])
def test_nothing_is_saved_through_a_link_to_a_step_or_over_the_root(
    root: Path, tmp_path: Path, call: str, place: str
) -> None:
    (root / "mine").symlink_to(name(100))
    to = root / place
    before = {each: each.stat().st_mtime_ns for each in root.rglob("*")}
    state = {"a": StateDict(x=1)}
    Snapshot.take(tmp_path / "other", state)
    torch.save({"x": 1}, tmp_path / "old.pt")
    calls: dict[str, Callable[[], object]] = {
        "take": lambda: Snapshot.take(to, state, overwrite=True),
        "async_take": lambda: Snapshot.async_take(to, state, overwrite=True).wait(),
        "copy": lambda: Snapshot(tmp_path / "other").copy_to(to, overwrite=True),
        "convert": lambda: Snapshot(tmp_path / "old.pt").copy_to(to),
    }
    with pytest.raises(UsageError) as refused:
        calls[call]()
    linked = {"latest": name(300), "mine": name(100)}
    if place:
        expected = f"{to} is a link to {linked[place]}, and a snapshot written there would replace"
    else:
        expected = f"{to} is the root of a CheckpointManager's run, and a snapshot there would hide"
    assert str(refused.value).startswith(expected)
    assert {each: each.stat().st_mtime_ns for each in root.rglob("*")} == before


def test_snapshots_are_saved_through_other_links_and_next_to_steps(
    root: Path, tmp_path: Path
) -> None:
    state = {"a": StateDict(x=1)}
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    for place in (tmp_path / "link", tmp_path / "link" / "below", root / "mine", root / name(100)):
        Snapshot.take(place, state, overwrite=True)
        assert Snapshot(place).keys() == ["a"]


# Policies -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "policy"),
    [
        (["all"], keep.all()),
        (["last:3"], keep.last(3)),
        (["best:loss:min"], keep.best("loss", "min")),
        (["best:val/top:5:max:2"], keep.best("val/top:5", "max", n=2)),
        (["every:1000", "last:1"], keep.every(steps=1000) | keep.last(1)),
        (["at:5,10"], keep.at([5, 10])),
        (["newer_than:2d"], keep.newer_than(timedelta(days=2))),
        (["newer_than:90min"], keep.newer_than(timedelta(minutes=90))),
        (["thinned:hourly=24,daily=7"], keep.thinned(hourly=24, daily=7)),
    ],
)
def test_policies(texts: list[str], policy: KeepPolicy) -> None:
    assert repr(parse_policies(texts)) == repr(policy)


@pytest.mark.parametrize(
    "text",
    [
        *("", "last", "last:", "last:x", "last:0", "lsat:3", "all:1", "best:loss", "best:loss:low"),
        *("every:0", "at:", "at:1,x", "newer_than:2", "newer_than:0s", "thinned:", "newer_than:.d"),
        *("thinned:hourly", "thinned:secondly=3", "thinned:daily=0"),
    ],
)
def test_what_is_no_policy(text: str) -> None:
    with pytest.raises(UsageError):
        parse_policies([text])


@pytest.mark.parametrize("text", ["last=2", "last(2)"])
def test_a_policy_with_another_sign(text: str) -> None:
    with pytest.raises(UsageError, match=r": write last:3$"):
        parse_policies([text])


@pytest.mark.parametrize("command", [[], ["steps"], ["cp"]])
def test_short_help(command: list[str]) -> None:
    assert run(*command, "-h").out == run(*command, "--help").out


@pytest.mark.parametrize("command", [["steps"], ["verify", "--all"]])
def test_a_url_that_lost_a_slash(command: list[str]) -> None:
    ended = run(*command, "s3:/my-bucket/runs/7")
    assert ended.code == 2
    assert "looks like a URL that lost a slash" in ended.err
