# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, what it ends with, and what it never does to a terminal."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import torch
from typer.core import TyperGroup
from typer.testing import CliRunner

from actorsnap import Options, RNGState, StateDict, cli, cli_app, cli_calls, cli_copies
from actorsnap.errors import ChecksumMismatch, FormatError
from actorsnap.format.geometry import Box
from actorsnap.format.layout import Attempt
from actorsnap.format.manifest import COMMIT_KEY, OLDER_COMMIT_KEY, decode_commit, encode_commit
from actorsnap.manager import every, keep
from actorsnap.manager.sync import CheckpointManager
from actorsnap.runtime import maintenance, reading
from actorsnap.runtime.location import make_location
from actorsnap.runtime.resources import Attempts
from actorsnap.runtime.script import run_async
from actorsnap.runtime.source import Source
from actorsnap.storage.base import Storage, StorageContext
from actorsnap.storage.fs import open_fs
from actorsnap.storage.registry import register
from actorsnap.storage.wrapper import Wrapper, without_blocking_io
from actorsnap.sync import Snapshot
from actorsnap.testing import FaultyStorage
from tests.api.faults import faulty, faulty_url
from tests.state.saved import Part, Saved
from tests.support import forker
from tests.support.cases import slow

pytestmark = pytest.mark.usefixtures("forker")

ROOT = Path(__file__).parents[1]
_DEAD_PID = (1 << 22) + 1
"""Above what Linux gives to any process."""

V1 = Path(__file__).parent / "golden" / "v1"


class Ended:
    """How a command ended: exit code, stdout and stderr."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


def run(*arguments: object, answer: str | None = None) -> Ended:
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments], input=answer)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ended(result.exit_code, result.stdout, result.stderr)


def command(*arguments: object) -> list[str]:
    return forker.command("-W", "error", "-m", "actorsnap", *map(str, arguments))


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def state() -> dict[str, Any]:
    weight = torch.arange(12.0).reshape(3, 4)
    return {
        "model": StateDict(
            w=weight, row=weight[1], big=torch.ones(300_000), sparse=torch.eye(2).to_sparse()
        ),
        "progress": StateDict(
            {"step": 7, "nan": float("nan"), "name": "run", "log": [1, 2], "blob": b"x" * 5000}
        ),
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    Snapshot.take(tmp_path / "s", state(), metadata={"step": 7})
    return tmp_path / "s"


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """What a killed process of another machine leaves."""
    attempt = tmp_path / "dead" / "20990101T000000-ffffffff-1-00000000" / "data" / "model"
    attempt.mkdir(parents=True)
    (attempt / "0-0.safetensors").write_bytes(b"half")
    return tmp_path / "dead"


# ls -------------------------------------------------------------------------------------------


def test_ls_of_a_snapshot(saved: Path) -> None:
    ended = run("ls", saved)
    assert ended.code == 0
    assert ended.lines == [
        "0/model/w\tfloat32[3, 4]\t48 B",
        "0/model/row\tfloat32[4]\tview of model/w",
        "0/model/big\tfloat32[300000]\t1.1 MiB",
        "0/model/sparse\tfloat32[2, 2]\t40 B\tsparse_coo",
        "0/progress/step\t7",
        "0/progress/nan\tnan",
        '0/progress/name\t"run"',
        "0/progress/log/0\t1",
        "0/progress/log/1\t2",
        "0/progress/blob\tbytes\t4.9 KiB",
    ]
    assert ended.err == ""


def test_several_shards_of_one_rank(tmp_path: Path) -> None:
    boxes = [Box((2 * n,), (2,)) for n in range(3)]
    parts = [Part("m/w", torch.full((2,), float(n)), boxes[n], (6,)) for n in range(3)]
    path = Saved([[parts[0], parts[2]], [parts[1]]]).write(tmp_path / "shards")
    lines = run("ls", path).lines
    assert [line.split()[0] for line in lines] == ["0/m/w@0", "0/m/w@4", "1/m/w"]
    assert "at (4,) of (6,)" in lines[1]
    shown = run("inspect", path).out
    assert "w@4" in shown
    assert "2 leaves, 16 B" in shown
    assert run("verify", path, "--full").code == 0
    assert "0., 0., 1., 1., 2., 2." in run("cat", path, "m/w").out


def test_ls_of_a_folder_of_snapshots(tmp_path: Path, unfinished: Path) -> None:
    for step in (10, 1, 2):
        Snapshot.take(tmp_path / f"step-{step}", state(), metadata={"x": step}, step=step)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "actorsnap.json").write_bytes(b"{}")
    (tmp_path / "notes.txt").write_text("something else")
    ended = run("ls", tmp_path)
    assert ended.code == 0
    rows = [line.split("\t") for line in ended.lines]
    assert [row[0] for row in rows] == ["broken", "dead", "step-1", "step-2", "step-10"]
    assert rows[0][1:3] == ["-", "2 B"]
    assert rows[0][3].startswith("damaged: ")
    assert rows[1][1:] == ["-", "4 B", "unfinished"]
    assert rows[2][3:] == ["world size 1", "step 1", '{"x": 1}']
    assert re.fullmatch(r"\d+ s old", rows[3][1])
    assert rows[3][2] == "1.2 MiB"


def test_newer_formats_are_not_damaged(saved: Path) -> None:
    commit = decode_commit((saved / COMMIT_KEY).read_bytes())
    newer = msgspec.structs.replace(commit, features=("delta",))
    (saved / COMMIT_KEY).write_bytes(encode_commit(newer))
    (line,) = run("ls", saved.parent).lines
    assert line.split("\t")[3].startswith(f"newer format: {COMMIT_KEY}: the snapshot needs the ")
    (found,) = json.loads(run("ls", saved.parent, "--json").out)
    assert found["state"] == "newer format"
    assert "Install a newer actorsnap" in found["detail"]
    ended = run("verify", "--all", saved.parent)
    assert ended.code == 4
    assert ended.out.startswith("s\tnewer format\t")
    assert run("verify", saved).code == 4


def test_numbers_in_names_are_sorted_by_value(tmp_path: Path) -> None:
    names = ["9", "10", "a", "run2-step9", "run2-step10", "run10", "step-02", "step-2", "step-3"]
    names += ["step-3-b", "step-3b", "step-" + "1" * 100]
    for name in reversed(names):
        (tmp_path / name).mkdir()
        (tmp_path / name / COMMIT_KEY).write_bytes(b"")
    assert [row["name"] for row in json.loads(run("ls", tmp_path, "--json").out)] == names


def test_ls_json(saved: Path, tmp_path: Path, unfinished: Path) -> None:
    objects = json.loads(run("ls", "--json", saved).out)
    assert [item["path"] for item in objects] == [
        line.split("\t")[0] for line in run("ls", saved).lines
    ]
    by_path = {item.pop("path"): item for item in objects}
    assert by_path["0/model/sparse"] == {
        **{"kind": "composite", "type": "tensor", "dtype": "float32", "shape": [2, 2]},
        "nbytes": 40,
    }
    assert by_path["0/progress/step"] == {"kind": "value", "value": 7, "nbytes": 0}
    assert by_path["0/progress/blob"] == {"kind": "bytes", "type": "bytes", "nbytes": 5000}
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "actorsnap.json").write_bytes(b"{}")
    found = {item["name"]: item for item in json.loads(run("ls", "--json", tmp_path).out)}
    assert {name: item["state"] for name, item in found.items()} == {
        **{"broken": "damaged", "dead": "unfinished", "s": "committed"}
    }
    assert (found["s"]["world_size"], found["s"]["metadata"]) == (1, {"step": 7})
    assert found["s"]["step"] is None
    nbytes = sum(path.stat().st_size for path in saved.glob("**/*") if path.is_file())
    assert found["s"]["nbytes"] == nbytes
    assert Snapshot(saved).nbytes == nbytes - (saved / COMMIT_KEY).stat().st_size
    assert (found["dead"]["nbytes"], found["broken"]["nbytes"]) == (4, 2)
    # Like `steps`, with leftovers.
    shutil.copytree(next(unfinished.iterdir()), saved / next(unfinished.iterdir()).name)
    found_again = json.loads(run("ls", "--json", tmp_path).out)
    assert {item["name"]: item["nbytes"] for item in found_again}["s"] == nbytes + 4


def test_all_commands_count_the_same_leaves(saved: Path) -> None:
    for path in (saved, V1):
        count = len(run("ls", path).lines)
        assert run("diff", path, path).out == f"equal: {count} leaves\n"
        tops = [line for line in run("inspect", path).lines if line[0] in "├└"]
        assert sum(map(int, re.findall(r"(\d+) lea(?:f|ves),", "\n".join(tops)))) == count


def test_ls_where_a_time_is_none(saved: Path, tmp_path: Path) -> None:
    """Such a snapshot can still be restored."""
    commit = decode_commit((saved / COMMIT_KEY).read_bytes())
    (saved / COMMIT_KEY).write_bytes(encode_commit(msgspec.structs.replace(commit, created="now")))
    assert run("ls", tmp_path).lines[0].startswith("s\t-\t1.2 MiB\tworld size 1")
    with pytest.raises(FormatError, match="created 'now' is not a time"):
        _ = Snapshot(saved).created
    assert Snapshot(saved).verify().ok


def test_ls_of_nothing(tmp_path: Path, unfinished: Path) -> None:
    for location, text in ((tmp_path / "no", "no files are there"), (unfinished, "unfinished")):
        ended = run("ls", location)
        assert ended.code == 3
        assert text in ended.err
        assert ended.out == ""


@pytest.mark.parametrize("step", [4, slow(1)])
def test_paths_of_ls_are_paths_of_cat(saved: Path, step: int) -> None:
    for line in run("ls", V1).lines[::step]:
        path = line.split("\t")[0]
        if "@" in path or "/pickled/" in path or "\\" in path:
            continue
        ended = run("cat", V1, path)
        if ended.code:
            # torch has dtypes that it does not print, and no bytes for packed elements.
            assert re.search("/(u?int|bits)[0-9x]+$|packed", path), ended.err
            assert "use --raw" in ended.err
            assert run("cat", V1, path, "--raw").code == 0, path


# inspect --------------------------------------------------------------------------------------


def test_inspect(saved: Path) -> None:
    ended = run("inspect", saved)
    assert ended.code == 0
    assert ended.lines[0] == f"{saved}  1.2 MiB in 2 data objects"
    assert re.fullmatch(r"created \S+Z, world size 1, format 1", ended.lines[1])
    assert ended.lines[2:] == [
        'metadata {"step": 7}',
        "├── model  (4 leaves, 1.1 MiB)",
        "│   ├── w  float32[3, 4]  48 B",
        "│   ├── row  float32[4]  view of model/w",
        "│   ├── big  float32[300000]  1.1 MiB",
        "│   └── sparse  float32[2, 2]  40 B  sparse_coo",
        "└── progress  (6 leaves, 4.9 KiB)",
        "    ├── step  7",
        "    ├── nan  nan",
        '    ├── name  "run"',
        "    ├── log  [1, 2]",
        "    └── blob  bytes  4.9 KiB",
    ]


def test_inspect_says_when_fsync_was_off_and_the_step_and_stops_at_a_depth(tmp_path: Path) -> None:
    Snapshot.take(tmp_path / "s", state(), options=Options(fsync=False), step=12)
    ended = run("inspect", tmp_path / "s", "--depth", 1)
    assert ended.lines[2:] == [
        "written with fsync=False: may not have survived a power loss",
        "step 12",
        "├── model  (4 leaves, 1.1 MiB)",
        "└── progress  (6 leaves, 4.9 KiB)",
    ]


def test_inspect_folds_what_optimizers_have_much_of(tmp_path: Path) -> None:
    layers = torch.nn.Sequential(*[torch.nn.Linear(n + 2, n + 3) for n in range(3)])
    optimizer = torch.optim.AdamW(layers.parameters())
    layers(torch.ones(2)).sum().backward()
    optimizer.step()
    history = [{"a": 1} if n < 4 else {"b": 1} for n in range(7)]
    Snapshot.take(tmp_path, {"o": optimizer, "s": StateDict(h=history, t=(1,), few=[{}, {}])})
    text = run("inspect", tmp_path).out
    shown = [line.lstrip(" │├└─") for line in text.splitlines()[2:]]
    assert shown[2:7] == [
        "0  (3 leaves, 52 B)",
        "step  float32[]  4 B",
        "exp_avg  float32[3, 2]  24 B",
        "exp_avg_sq  float32[3, 2]  24 B",
        "1 ... 5  (5 like 0, of other sizes, 15 leaves, 372 B)",
    ]
    assert "params  [0, 1, 2, 3, 4, 5]" in shown
    assert "betas  (0.9, 0.999)" in shown
    assert "t  (1,)" in shown
    # Four alike are folded, three of another kind are not.
    start = shown.index("h  (list, 7 leaves, 0 B)")
    assert shown[start + 1 : start + 4] == [
        "0  (1 leaf, 0 B)",
        "a  1",
        "1 ... 3  (3 like 0, 3 leaves, 0 B)",
    ]
    assert [line for line in shown[start + 4 :] if line.startswith(("4 ", "5 ", "6 "))] == [
        f"{n}  (1 leaf, 0 B)" for n in (4, 5, 6)
    ]
    whole = run("inspect", "--all", tmp_path).out
    assert " like " not in whole
    assert whole.count("exp_avg_sq") == 6
    assert str(Snapshot(tmp_path).tree()) == "\n".join(text.splitlines()[2:])


def test_inspect_json_is_for_scripts(saved: Path) -> None:
    ended = run("inspect", "--json", saved)
    assert ended.code == 0
    document = json.loads(ended.out)
    assert list(document) == [
        *("path", "format_version", "created", "world_size", "attempt", "fsync"),
        *("step", "metadata", "objects", "entries"),
    ]
    assert document["path"] == str(saved)
    assert document["metadata"] == {"step": 7}
    assert [set(record) for record in document["objects"]] == [
        {"key", "size", "header_bytes", "header_crc32c"}
    ] * 2
    entries = {entry["path"]: entry for entry in document["entries"]}
    weight = entries["model/w"]
    assert weight["kind"] == "tensor"
    assert (weight["rank"], weight["dtype"], weight["shape"]) == (0, "float32", [3, 4])
    assert entries["progress/step"] == {
        "rank": 0,
        "kind": "value",
        "path": "progress/step",
        "value": 7,
    }
    assert entries["progress/log"]["type"] == "list"


def test_deep_states(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(850):
        deep = {"x": deep}
    Snapshot.take(tmp_path, {"s": StateDict(deep)})
    ended = run("inspect", tmp_path)
    assert ended.code == 0
    assert ended.lines[-1].endswith("└── x  1")


# verify ---------------------------------------------------------------------------------------


def test_verify_of_a_whole_one(saved: Path) -> None:
    assert run("verify", saved).out == "ok: 2 data objects\n"
    ended = run("verify", "--full", saved)
    assert ended.out == "ok: 2 data objects, 1.2 MiB compared with checksums\n"
    assert (ended.code, ended.err) == (0, "")


def test_verify_counts_the_objects_of_other_attempts(saved: Path, unfinished: Path) -> None:
    found = json.loads(run("verify", saved, "--json").out)
    assert (found["num_unused"], found["unused_bytes"]) == (0, 0)
    (left,) = unfinished.iterdir()
    shutil.copytree(left, saved / left.name)
    ended = run("verify", saved)
    assert (ended.code, ended.err) == (0, "")
    assert ended.lines == [
        "ok: 2 data objects",
        f"1 unused object of other attempts, 4 B: `actorsnap rm --garbage {saved}` deletes those "
        "of saves that ended",
    ]
    found = json.loads(run("verify", saved, "--full", "--json").out)
    assert (found["num_unused"], found["unused_bytes"]) == (1, 4)
    assert run("rm", "--garbage", "--force", saved).code == 0
    assert run("verify", saved).lines == ["ok: 2 data objects"]


def test_verify_of_a_damaged_one(saved: Path) -> None:
    (data,) = saved.glob("*/data/model/*")
    raw = bytearray(data.read_bytes())
    raw[-50] ^= 1
    data.write_bytes(raw)
    assert run("verify", saved).code == 0  # sizes are right
    ended = run("verify", "--full", saved)
    assert (ended.code, ended.err) == (1, "")
    assert ended.out.startswith(f"{saved}\tdamaged\t")
    assert "data/model/0-0.safetensors" in ended.out
    assert "model/big" in ended.out
    data.unlink()
    (other,) = saved.glob("*/data/=small/*")
    other.write_bytes(other.read_bytes()[:-1])
    ended = run("verify", saved)
    assert ended.code == 1
    assert len(ended.out.splitlines()) == 2
    assert "the object is missing" in ended.out


def test_verify_where_the_index_is_damaged(saved: Path, tmp_path: Path) -> None:
    (manifest,) = saved.glob("*/manifest/0.json")
    manifest.write_bytes(manifest.read_bytes()[:-1])
    ended = run("verify", saved)
    assert ended.code == 1
    assert "manifest/0.json" in ended.out
    (saved / "actorsnap.json").write_bytes((saved / "actorsnap.json").read_bytes()[:-1])
    ended = run("verify", saved)
    assert ended.code == 1
    assert "its checksum does not match" in ended.err
    assert run("ls", saved).code == 4
    assert run("verify", tmp_path / "no").code == 3


# diff -----------------------------------------------------------------------------------------


def test_diff_of_equal_ones(saved: Path, tmp_path: Path) -> None:
    Snapshot.take(tmp_path / "t", state())
    ended = run("diff", saved, tmp_path / "t")
    assert (ended.code, ended.out, ended.err) == (0, "equal: 10 leaves\n", "")


def test_verify_finds_a_hole(tmp_path: Path) -> None:
    boxes = [Box((2 * n,), (2,)) for n in (0, 2)]
    parts = [[Part("m/w", torch.zeros(2), box, (6,))] for box in boxes]
    path = Saved(parts).write(tmp_path / "shards")
    for level in ([], ["--full"]):
        ended = run("verify", *level, path)
        assert ended.code == 1
        assert "m/w: no shard has the elements from (2,) up to (4,)" in ended.out


def test_ls_looks_one_level_deep(saved: Path, unfinished: Path) -> None:
    """Below the folders of snapshots there may be millions of objects."""

    async def find() -> dict[str, Any]:
        return await run_async(
            maintenance.find_snapshots(Source(make_location(url, None), Options()))
        )

    url = faulty_url(saved.parent)
    storages: list[FaultyStorage] = []

    def wrap(inner: Storage) -> Storage:
        storages.append(FaultyStorage(inner))
        return storages[-1]

    with faulty(wrap):
        found = anyio.run(find)
    assert {name: commit is None for name, commit in found.items()} == {"dead": True, "s": False}
    assert "list" not in {*storages[0].counts}


def test_diff(saved: Path, tmp_path: Path) -> None:
    other = state()
    other["model"]["big"][77] = 2.0
    other["model"]["w"] = torch.zeros(4, 4)
    other["progress"]["step"] = 8
    other["progress"]["log"] = (1, 2)
    del other["progress"]["name"]
    other["progress"]["new"] = []
    Snapshot.take(tmp_path / "t", other)
    ended = run("diff", saved, tmp_path / "t")
    assert ended.code == 1
    assert ended.lines == [
        "~ 0/model/big\tfloat32[300000]\t1.1 MiB\tother values",
        "! 0/model/row\tfloat32[4]  view of model/w -> float32[4]  16 B",
        "! 0/model/w\tfloat32[3, 4]  48 B -> float32[4, 4]  64 B",
        "! 0/progress/log\tlist -> tuple",
        '- 0/progress/name\t"run"',
        "+ 0/progress/new\tlist",
        "! 0/progress/step\t7 -> 8",
    ]
    assert ended.err == "7 differences in 10 leaves\n"
    assert run("diff", saved, tmp_path / "no").code == 3


def test_diff_of_parts_and_shared_memory(tmp_path: Path) -> None:
    for name, change in (("a", 0.0), ("b", 1.0)):
        x = torch.arange(20.0)
        x[8] += change
        sparse = torch.eye(3) * (1 + change)
        shared = {"left": x[:10], "right": x[6:], "sparse": sparse.to_sparse()}
        Snapshot.take(tmp_path / name, {"s": StateDict(shared)})
    ended = run("diff", tmp_path / "a", tmp_path / "b")
    assert ended.lines == [
        "~ 0/s/left\tfloat32[10]\t80 B\tview of s/left@storage\tother values in that memory",
        "~ 0/s/right\tfloat32[14]\tview of s/left@storage\tother values in that memory",
        "~ 0/s/sparse\tfloat32[3, 3]\t60 B\tsparse_coo\tother values",
    ]
    assert ended.err == "3 differences in 3 leaves\n"


# cat ------------------------------------------------------------------------------------------


def test_cat(saved: Path) -> None:
    assert run("cat", saved, "0/progress/step").out == "7\n"
    assert run("cat", saved, "progress/name").out == "run\n"
    assert run("cat", saved, "progress/log").out == "[1, 2]\n"
    assert run("cat", saved, "model/row").out == "tensor([4., 5., 6., 7.])\n"
    ended = run("cat", saved, "progress/stepp")
    assert ended.code == 2
    assert "no path 'progress/stepp'; did you mean 'progress/step'" in ended.err


def test_cat_raw(saved: Path) -> None:
    def raw(path: str) -> bytes:
        return CliRunner().invoke(cli.app, ["cat", str(saved), path, "--raw"]).stdout_bytes

    assert raw("model/w") == np.arange(12, dtype="<f4").tobytes()
    assert raw("model/row") == np.arange(4, 8, dtype="<f4").tobytes()
    assert raw("progress/blob") == b"x" * 5000
    assert raw("progress/name") == b"run"
    ended = run("cat", saved, "progress/step", "--raw")
    assert ended.code == 2
    assert "a value of type int has no raw bytes; leave out --raw" in ended.err


def test_cat_shows_the_beginning_of_long_bytes(saved: Path) -> None:
    shown = "b'xxxxxxxxxxxxxxx'... (4.9 KiB)"
    assert run("cat", saved, "progress/blob").out == f"{shown}\n"
    assert run("cat", saved, "progress").out == (
        f"{{'step': 7, 'nan': nan, 'name': 'run', 'log': [1, 2], 'blob': {shown}}}\n"
    )


def test_cat_of_a_pickled_leaf(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = run("cat", V1, "pickled/date")
    assert ended.code == 2
    assert "ACTORSNAP_ALLOW_PICKLE=true" in ended.err
    monkeypatch.setenv("ACTORSNAP_ALLOW_PICKLE", "true")
    assert run("cat", V1, "pickled/date").out == "datetime.date(2026, 1, 2)\n"


# cp -------------------------------------------------------------------------------------------


def test_cp(saved: Path, tmp_path: Path) -> None:
    to = tmp_path / "copy"
    ended = run("cp", saved, to)
    assert (ended.code, ended.err) == (0, "")
    assert re.fullmatch(r"copied 3 objects, 1\.\d MiB\n", ended.out)
    assert run("diff", saved, to).code == 0
    assert run("verify", "--full", to).code == 0
    for more in ([], ["--overwrite"]):
        ended = run("cp", *more, saved, to)
        assert "already holds this snapshot; nothing was changed: all objects exist" in ended.out
        assert f"`actorsnap verify --full {to}` compares their bytes; if it finds" in ended.out
        assert f"delete the copy (`actorsnap rm {to}`) and copy again" in ended.out


def test_cp_refuses_to_replace(saved: Path, tmp_path: Path) -> None:
    Snapshot.take(tmp_path / "other", state())
    ended = run("cp", saved, tmp_path / "other")
    assert ended.code == 4
    assert "--overwrite" in ended.err
    assert run("cp", "--overwrite", saved, tmp_path / "other").code == 0
    assert run("diff", saved, tmp_path / "other").code == 0


def test_cp_where_the_same_snapshot_is_damaged(saved: Path, tmp_path: Path) -> None:
    """It is not "that snapshot already"."""
    to = tmp_path / "copy"
    assert run("cp", saved, to).code == 0
    (data,) = to.glob("*/data/model/*.safetensors")
    data.unlink()
    for more in ([], ["--overwrite"]):
        ended = run("cp", *more, saved, to)
        assert (ended.code, ended.out) == (4, "")
        assert f"{data.relative_to(to)} is missing or of another size" in ended.err
        assert "Verify the source (`actorsnap verify --full`), delete the copy" in ended.err
    assert run("rm", "--yes", to).code == 0
    assert run("cp", saved, to).code == 0
    assert run("diff", saved, to).code == 0


def test_cp_to_what_another_program_copied(saved: Path, tmp_path: Path) -> None:
    """The remedies that the error names: one of them is enough."""
    to = Path(shutil.copytree(saved, tmp_path / "copy"))
    (to / COMMIT_KEY).unlink()
    before = sorted(to.rglob("*"))
    for _ in range(2):
        ended = run("cp", saved, to)
        assert (ended.code, ended.out) == (4, "")
        for remedy in ("`actorsnap recover`", "`actorsnap rm --garbage`"):
            assert remedy in ended.err
        assert sorted(to.rglob("*")) == before
    assert run("rm", "--garbage", "--yes", to).code == 0
    assert run("cp", saved, to).code == 0
    assert run("diff", saved, to).code == 0


def test_cp_json_is_a_line_for_each_event(saved: Path, tmp_path: Path) -> None:
    ended = run("cp", "--json", saved, tmp_path / "copy")
    events = [json.loads(line) for line in ended.lines]
    assert [event["kind"] for event in events] == [
        *("begun", "copied", "copied", "copied", "committed", "done")
    ]
    assert {*events[1]} == {"kind", "key", "nbytes", "done_bytes", "total_bytes"}
    assert events[3]["done_bytes"] <= events[0]["total_bytes"] == events[4]["done_bytes"]
    assert (events[-1]["num_copied"], events[-1]["was_there"]) == (3, False)
    (again,) = run("cp", "--json", saved, tmp_path / "copy").lines
    assert json.loads(again)["was_there"] is True


def test_cp_of_nothing(saved: Path, tmp_path: Path) -> None:
    ended = run("cp", tmp_path / "none", tmp_path / "copy")
    assert ended.code == 3
    assert "the copy's source" in ended.err
    (data,) = saved.glob("*/data/model/*.safetensors")
    data.write_bytes(data.read_bytes()[:-1])
    ended = run("cp", saved, tmp_path / "copy")
    assert ended.code == 4
    assert str(data.relative_to(saved)) in ended.err
    assert run("ls", tmp_path / "copy").code == 3


def test_what_a_failed_cp_leaves(saved: Path, tmp_path: Path) -> None:
    """Nothing, or what the next one needs."""
    to = tmp_path / "copy"
    (big, *_) = sorted(saved.glob("*/data/**/*.safetensors"), key=lambda p: -p.stat().st_size)
    whole = big.read_bytes()
    big.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for _ in range(2):
        ended = run("cp", saved, to)
        assert ended.code == 4
        left = [path for path in to.rglob("*") if path.is_file()]
        if any("data" in path.parts for path in left):
            assert "stay for the next copy" in ended.err
        else:
            assert left == []
    big.write_bytes(whole)
    assert run("cp", saved, to).code == 0
    assert run("diff", saved, to).code == 0


@pytest.mark.slow  # the bar is that of verify
def test_a_terminal_sees_how_far_a_copy_is(long: Path, tmp_path: Path) -> None:
    code, text = on_a_terminal("cp", long, tmp_path / "copy", first_s=0.0)
    assert code == 0
    assert "copying" in text
    assert "━" in text
    assert "copied 2 objects, 11.8 MiB" in text.replace("\r", "").splitlines()[-1]


def test_a_time_limit_has_a_remedy_for_the_shell(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACTORSNAP_TIMEOUT_S", "0.000001")
    ended = run("cp", saved, tmp_path / "copy")
    assert ended.code == 4
    assert "On the command line: set ACTORSNAP_TIMEOUT_S, in seconds" in ended.err


def test_converting_a_snapshot_does_not_claim_new_checksums(saved: Path, tmp_path: Path) -> None:
    ended = run("convert", saved, tmp_path / "copy")
    assert "\nevery byte has a checksum: restores compare them" in ended.out


# Options of storages --------------------------------------------------------------------------


class _Noting:
    """The storage ``optional://<path>``: notes what it is opened with."""

    seen: list[tuple[str, dict[str, Any]]] = []

    @classmethod
    def open(cls, url: str, context: StorageContext) -> Storage:
        path = url.removeprefix("optional://")
        cls.seen.append((path, dict(context.options)))
        return open_fs(path, replace(context, options={}))


register("optional", _Noting.open)


@pytest.mark.parametrize(
    "command", [["ls"], ["inspect"], ["verify"], ["cat", "progress/step"], ["rm", "--yes"]]
)
def test_options_reach_the_storage(saved: Path, command: list[str]) -> None:
    _Noting.seen.clear()
    given = ["--option", "region=eu=1", "--option", "path_style=true", "--option", "parts=3"]
    ended = run(command[0], f"optional://{saved}", *command[1:], *given)
    assert ended.code == 0, ended.err
    assert _Noting.seen
    for _, options in _Noting.seen:
        assert options == {"region": "eu=1", "path_style": True, "parts": 3}


def test_each_side_of_a_diff_has_options(saved: Path) -> None:
    _Noting.seen.clear()
    given = ["--option", "a=x", "--option", "b=x", "--a-option", "a=y", "--b-option", "b=z"]
    other = saved.parent / "other"
    shutil.copytree(saved, other)
    assert run("diff", f"optional://{saved}", f"optional://{other}", *given).code == 0
    assert dict(_Noting.seen) == {
        str(saved): {"a": "y", "b": "x"},
        str(other): {"a": "x", "b": "z"},
    }


def test_each_side_of_a_copy_has_options(saved: Path, tmp_path: Path) -> None:
    _Noting.seen.clear()
    source, to = f"optional://{saved}", f"optional://{tmp_path / 'copy'}"
    given = ["--option", "a=x", "--option", "b=x", "--src-option", "a=y", "--dst-option", "b=z"]
    assert run("cp", source, to, *given).code == 0
    assert dict(_Noting.seen) == {
        str(saved): {"a": "y", "b": "x"},
        str(tmp_path / "copy"): {"a": "x", "b": "z"},
        str(tmp_path): {"a": "x", "b": "z"},  # the copy must not be in a snapshot
    }


@pytest.mark.parametrize("command", ["cp", "convert", "export"])
def test_a_local_side_does_not_get_the_options_of_both(
    saved: Path, tmp_path: Path, command: str
) -> None:
    given = ["--to", "torch", "--leave-out", "model"] if command == "export" else []
    for source, to in (
        (f"optional://{saved}", f"{tmp_path / 'one'}"),
        (saved, f"optional://{tmp_path / 'two'}"),
    ):
        _Noting.seen.clear()
        ended = run(command, source, to, *given, "--option", "a=x")
        assert ended.code == 0, ended.err
        assert _Noting.seen
        assert all(options == {"a": "x"} for _, options in _Noting.seen)


def test_a_diff_with_a_local_side_has_options(saved: Path) -> None:
    assert run("diff", saved, f"optional://{saved}", "--option", "a=x").code == 0


@pytest.mark.parametrize("flag", ["--option", "--src-option", "--dst-option"])
@pytest.mark.parametrize("command", ["cp", "convert", "export"])
def test_an_option_that_no_side_takes(saved: Path, tmp_path: Path, command: str, flag: str) -> None:
    given = ["--to", "torch"] if command == "export" else []
    ended = run(command, saved, tmp_path / "copy", *given, flag, "region=x")
    assert ended.code == 2
    assert "takes no storage_options, but got: region" in ended.err


def test_options_are_checked_before_any_io(saved: Path) -> None:
    """The server of the destination is down: connecting to it would be tried for a minute."""
    _Noting.seen.clear()
    ended = run("cp", saved, f"optional://{saved}-2", "--src-option", "region=x")
    assert ended.code == 2
    assert "but got: region" in ended.err
    assert _Noting.seen == []


@pytest.mark.parametrize("flag", ["--option", "--src-option", "--dst-option"])
def test_an_option_without_a_value(saved: Path, flag: str) -> None:
    ended = run("cp", saved, f"{saved}-2", flag, "region")
    assert (ended.code, ended.err) == (2, f"error: {flag} region: write KEY=VALUE\n")


@pytest.mark.parametrize("given", ["hunter2", "=hunter2"])
def test_a_bad_option_is_not_repeated(saved: Path, given: str) -> None:
    ended = run("ls", saved, "--option", given)
    assert ended.code == 2
    assert "write KEY=VALUE" in ended.err
    assert "hunter2" not in ended.err + ended.out


def test_an_option_twice(saved: Path) -> None:
    ended = run("ls", saved, "--option", "key=hunter1", "--option", "key=hunter2")
    assert ended.code == 2
    assert "'key'" in ended.err
    assert "hunter" not in ended.err


# rm -------------------------------------------------------------------------------------------


def test_rm_asks(saved: Path) -> None:
    ended = run("rm", saved, answer="n\n")
    assert ended.code == 5
    assert "nothing was deleted" in ended.err
    assert f"Delete the snapshot {saved} (1.2 MiB, created 2" in ended.err
    assert Snapshot(saved).verify().ok
    assert run("rm", saved).code == 5  # nobody answers
    assert Snapshot(saved).verify().ok
    ended = run("rm", saved, answer="y\n")
    assert ended.code == 0
    assert ended.lines[-1].endswith(f"deleted {saved}")  # after the echo of the answer
    assert not saved.exists()
    assert run("rm", "--yes", saved).code == 3


def test_rm_of_several(saved: Path, tmp_path: Path, unfinished: Path) -> None:
    """One question for all, and none is deleted if one is not a snapshot."""
    other = Path(shutil.copytree(saved, tmp_path / "other"))
    ended = run("rm", "-y", saved, unfinished, other)
    assert (ended.code, ended.out) == (3, "")
    assert ended.err.endswith("\nnothing was deleted\n")
    ended = run("rm", saved, other, answer="n\n")
    assert ended.code == 5
    assert ended.err.count("Delete") == 1
    assert "Delete these 2?" in ended.err
    assert all(f"the snapshot {path} (1.2 MiB" in ended.err for path in (saved, other))
    assert Snapshot(saved).exists()
    assert Snapshot(other).exists()
    ended = run("rm", saved, other, saved, answer="y\n")
    assert ended.code == 0
    assert ended.lines[-2:] == [f"deleted {saved}", f"deleted {other}"]
    assert not saved.exists()
    assert not other.exists()


def test_rm_yes(saved: Path) -> None:
    (saved / "notes.txt").write_text("not ours")
    assert run("rm", "-y", saved).code == 0
    assert os.listdir(saved) == ["notes.txt"]


@pytest.mark.parametrize(
    ("damaged", "remedy"),
    [(COMMIT_KEY, "recover {} --replace-damaged"), ("*/manifest/0.json", "verify {} --full")],
)
def test_what_is_damaged_is_said_with_its_place(saved: Path, damaged: str, remedy: str) -> None:
    (path,) = saved.glob(damaged)
    path.write_bytes(b"x")
    with pytest.raises(ChecksumMismatch) as raised:
        Snapshot(saved).get_manifest()
    assert raised.value.url == str(saved)
    for text in (str(raised.value), run("ls", saved).err.replace("\n", "")):
        assert f"The snapshot {saved} is damaged: " in text
        assert f"`actorsnap {remedy.format(saved)}`" in text


def test_rm_of_a_damaged_one(saved: Path) -> None:
    (saved / "actorsnap.json").write_bytes((saved / "actorsnap.json").read_bytes()[:-1])
    ended = run("rm", saved, answer="y\n")
    assert ended.code == 0
    assert "the damaged snapshot" in ended.err


def test_rm_of_what_is_no_snapshot(tmp_path: Path, unfinished: Path) -> None:
    """It is refused before anybody is asked."""
    for location in (tmp_path / "no", unfinished):
        ended = run("rm", location, answer="y\n")
        assert ended.code == 3
        assert "Delete" not in ended.err
    assert list(unfinished.rglob("*.safetensors"))


def test_an_interrupted_rm(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it leaves is not taken for a snapshot to restore, and one command deletes it."""
    other = Path(shutil.copytree(saved, tmp_path / "other"))

    def interrupt(_: Source) -> None:
        os.unlink(saved / COMMIT_KEY)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(maintenance, "delete", interrupt)
        ended = run("rm", "--yes", "--json", saved, other)
    assert ended.code == 130
    rest = f"`actorsnap rm --garbage --yes {saved}` deletes the rest"
    assert ended.err.startswith("interrupted\n")
    assert rest in ended.err
    document = json.loads(ended.out)
    assert document["deleted"] == []
    assert document["error"]["notes"][-1] == f"not tried: {other}"
    ended = run("rm", "--yes", saved)
    assert ended.code == 3
    assert "there is no commit object, only 1 attempt" in ended.err
    assert f"`actorsnap rm --garbage --yes {saved}` deletes what is left" in ended.err
    assert "estore" not in ended.err
    assert "recover" not in ended.err
    assert "`actorsnap rm --garbage --yes` deletes" in run("verify", "--all", tmp_path).out
    (attempt,) = (path for path in saved.iterdir() if path.is_dir())
    begun, host, _, nonce = attempt.name.split("-")
    attempt.rename(saved / f"{begun}-{host}-{_DEAD_PID}-{nonce}")
    assert run("rm", "--garbage", "--yes", saved).code == 0
    assert not saved.exists()


def test_rm_of_several_of_which_one_fails(saved: Path, tmp_path: Path) -> None:
    paths = [saved, faulty_url(Path(shutil.copytree(saved, tmp_path / "b"))), tmp_path / "c"]
    shutil.copytree(saved, tmp_path / "c")
    with faulty(lambda inner: FaultyStorage(inner, fail_at=1, fail_verbs={"delete"})):
        ended = run("rm", "--yes", "--json", *paths)
    assert ended.code == 4
    document = json.loads(ended.out)
    assert document["deleted"] == [str(saved)]
    assert document["error"]["type"] == "StorageError"
    assert f"not tried: {tmp_path}/c" in ended.err
    assert Snapshot(tmp_path / "c").exists()


def test_rm_garbage(saved: Path, unfinished: Path, tmp_path: Path) -> None:
    (attempt,) = unfinished.iterdir()
    attempt.rename(saved / attempt.name)
    ended = run("rm", "--garbage", saved)
    assert (ended.code, ended.out) == (5, f"deleted 0 objects of unfinished attempts at {saved}\n")
    assert ended.err == f"left {saved}/{attempt.name}, 0 s old: it may be running (see --force)\n"
    shutil.copytree(saved, tmp_path / "b")
    ended = run("rm", "--garbage", "--force", saved, tmp_path / "b")
    assert (ended.code, ended.err) == (0, "")
    assert ended.lines == [
        f"deleted 1 object of unfinished attempts at {path}" for path in (saved, tmp_path / "b")
    ]
    assert Snapshot(saved).verify("full").ok
    assert run("rm", "--force", saved).code == 5  # not confirmed
    assert Snapshot(saved).verify("full").ok


def test_rm_garbage_where_nothing_is(tmp_path: Path, unfinished: Path) -> None:
    ended = run("rm", "--garbage", tmp_path / "nope")
    assert (ended.code, ended.out) == (3, "")
    assert "no files are there" in ended.err
    assert run("rm", "--garbage", unfinished).code == 5  # left, but seen


@pytest.fixture
def without_commit(saved: Path, tmp_path: Path) -> Path:
    """A copy that lost its commit object, and an incomplete attempt next to it."""
    to = tmp_path / "a copy"
    (attempt,) = (path for path in saved.iterdir() if path.is_dir())
    begun, host, _, nonce = attempt.name.split("-")
    shutil.copytree(attempt, to / f"{begun}-{host}-{_DEAD_PID}-{nonce}")
    incomplete = to / f"20260101T000000-{host}-{_DEAD_PID}-{nonce}" / "data"
    incomplete.mkdir(parents=True)
    (incomplete / "x").write_bytes(b"x" * 5000)
    return to


def test_rm_garbage_keeps_complete_attempts(without_commit: Path) -> None:
    incomplete, complete = sorted(os.listdir(without_commit))
    ended = run("rm", "--garbage", without_commit, answer="y\n")  # nobody is asked in a pipe
    at = f" at {without_commit}\n"
    assert (ended.code, ended.out) == (5, f"deleted 1 object of unfinished attempts{at}")
    listed, other, kept = ended.err.splitlines()
    assert re.fullmatch(rf"{without_commit}/{incomplete}  4\.9 KiB, \d+ d old, incomplete", listed)
    assert re.fullmatch(rf"{without_commit}/{complete}  1\.\d MiB, \d+ s old, complete", other)
    advice = (
        f"`actorsnap recover '{without_commit}'` makes a snapshot of it again; --yes deletes it"
    )
    assert kept == f"kept {without_commit}/{complete}: it is complete. {advice}"
    assert os.listdir(without_commit) == [complete]
    assert run("rm", "--garbage", "--force", without_commit).code == 5
    assert os.listdir(without_commit) == [complete]


def test_rm_garbage_deletes_complete_attempts_if_told(without_commit: Path) -> None:
    ended = run("rm", "--garbage", "--yes", without_commit)
    assert ended.code == 0
    assert re.fullmatch(r"deleted [4-9] objects of unfinished attempts at .*\n", ended.out)
    assert not without_commit.exists()


@pytest.mark.parametrize("damaged", ["commit object", "manifest"])
def test_rm_garbage_next_to_a_damaged_snapshot(
    saved: Path, without_commit: Path, damaged: str
) -> None:
    """Complete attempts stay, also with `--force` and `--yes`."""
    (named,) = (path.name for path in saved.iterdir() if path.is_dir())
    complete = next(p.parents[1] for p in without_commit.glob("*/manifest/0.json"))
    shutil.copytree(complete, saved / complete.name)
    if damaged == "manifest":
        (saved / named / "manifest" / "0.json").unlink()
        kept = [complete.name]
    else:
        (saved / COMMIT_KEY).write_bytes(b"half")
        kept = sorted([named, complete.name])
    before = sorted(saved.rglob("*"))
    advice = (
        "The snapshot here is damaged. Move the attempt's folder to another path and run "
        "`actorsnap recover` there; `actorsnap rm` without --garbage deletes all"
    )
    for more in ([], ["--force"], ["--yes", "--force"]):
        ended = run("rm", "--garbage", *more, saved)
        deleted = f"deleted 0 objects of unfinished attempts at {saved}\n"
        assert (ended.code, ended.out) == (5, deleted)
        assert sorted(ended.err.splitlines()) == [
            f"kept {saved}/{name}: it is complete. {advice}" for name in kept
        ]
        assert sorted(saved.rglob("*")) == before
    assert run("rm", "--yes", saved).code == 0
    assert not saved.exists()


@pytest.mark.few(1)
@pytest.mark.parametrize("answer", ["y", "n"])
def test_rm_garbage_asks_on_a_terminal(without_commit: Path, answer: str) -> None:
    incomplete, complete = sorted(os.listdir(without_commit))
    code, text = on_a_terminal("rm", "--garbage", without_commit, answer=f"{answer}\n")
    assert re.search(rf"{complete} +1\.\d MiB, \d+ s old, complete", text)
    assert "1 attempt is complete" in text
    assert "Delete what is complete, too?" in text
    assert code == (0 if answer == "y" else 5)
    assert not (without_commit / incomplete).exists()
    assert (without_commit / complete).exists() == (answer == "n")


# recover --------------------------------------------------------------------------------------


def test_recover(saved: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(saved, tmp_path / "copy"))
    (copied / COMMIT_KEY).unlink()
    ended = run("ls", copied)
    assert ended.code == 3
    assert f"run `actorsnap recover {copied}`" in ended.err
    ended = run("recover", copied)
    (attempt,) = [path.name for path in saved.iterdir() if path.is_dir()]
    assert ended.code == 0
    assert ended.lines[0] == f"recovered {copied}: {attempt}, world size 1"
    assert re.fullmatch(r"2 data objects, 1\.2 MiB compared with checksums", ended.lines[1])
    assert run("diff", saved, copied).code == 0
    assert Snapshot(copied).metadata == {"step": 7}
    ended = run("recover", copied)
    assert (ended.code, ended.out) == (4, "")
    assert "there is nothing to recover" in ended.err
    assert "verify --full" in ended.err
    assert "actorsnap rm" in ended.err


def test_recover_of_a_damaged_one(saved: Path) -> None:
    (saved / COMMIT_KEY).unlink()
    paths = sorted(saved.glob("*/data/*/*"))
    for path in paths:
        path.write_bytes(path.read_bytes()[:-1])
    ended = run("recover", saved)
    assert (ended.code, ended.out) == (1, "")
    for path in paths:
        assert path.name in ended.err
    assert f"recover of {saved}: nothing was written" in ended.err
    assert not (saved / COMMIT_KEY).exists()


def test_recover_where_the_commit_object_is_damaged(saved: Path) -> None:
    (saved / COMMIT_KEY).write_bytes(b"half")
    ended = run("recover", saved)
    assert (ended.code, ended.out) == (1, "")
    assert (
        "\nThe damaged commit object named one of the attempts there. --replace-damaged, or "
        "recover(replace_damaged=True) in Python, replaces it with one for the complete attempt\n"
        f"recover of {saved}: nothing was written\n"
    ) in ended.err
    assert run("recover", saved, "--replace-damaged").code == 0
    assert run("verify", "--full", saved).code == 0


class OverNetwork(Wrapper):
    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.capabilities = without_blocking_io(inner.capabilities)


def test_a_commit_object_that_is_damaged_over_a_network(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is read twice; then the remedy has the URL as the shell takes it."""
    url = faulty_url(saved.rename(saved.parent / "a copy"))
    file = saved.parent / "a copy" / COMMIT_KEY
    file.write_bytes(file.read_bytes()[:-1])
    with faulty(OverNetwork):
        ended = run("verify", url)
        assert ended.code == 1, ended.err
        damage = f"{COMMIT_KEY}: the commit object is damaged: its checksum does not match"
        assert {*caplog.messages} == {f"{saved.parent}/a copy: {damage}; reading it again"}
        remedy = f"recover '{url}' --replace-damaged"
        assert f"`actorsnap {remedy}` writes it again, if the rest is intact" in ended.err
        assert run(*shlex.split(remedy)).code == 0
        assert run("verify", "--full", url).code == 0


def test_recover_asks_for_what_it_cannot_know(tmp_path: Path) -> None:
    """Which attempt, how many ranks saved it, whether its job has ended."""
    copied = Path(shutil.copytree(V1, tmp_path / "v1"))
    (copied / OLDER_COMMIT_KEY).unlink()
    ended = run("recover", copied)
    assert (ended.code, ended.out) == (2, "")
    assert "--world-size 1" in ended.err
    elsewhere = Attempt(created_s=int(time.time()), host="ffffffff", pid=1, nonce="00000000")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Attempts, "new", lambda _: elsewhere)
        Snapshot.take(tmp_path / "s", state())
    shutil.copytree(tmp_path / "s" / str(elsewhere), copied / str(elsewhere))
    ended = run("recover", copied, "--world-size", "1")
    assert (ended.code, ended.out) == (2, "")
    assert "2 attempts" in ended.err
    assert "--attempt NAME" in ended.err
    ended = run("recover", copied, "--attempt", elsewhere)
    assert (ended.code, ended.out) == (2, "")
    assert "another host began 0.0 hours ago" in ended.err
    assert not (copied / COMMIT_KEY).exists()
    assert run("recover", copied, "--attempt", elsewhere, "--force").code == 0
    assert run("diff", copied, tmp_path / "s").code == 0


def test_recover_where_nothing_is(tmp_path: Path, unfinished: Path) -> None:
    for path in (tmp_path / "no", unfinished):
        ended = run("recover", path)
        assert (ended.code, ended.out) == (3, "")


def test_a_copy_to_a_folder_of_snapshots(saved: Path, tmp_path: Path) -> None:
    """``DST`` is the copy, not the folder above it, as it is for ``cp -r``."""
    backup = tmp_path / "backup"
    Snapshot.take(backup / "a", state())
    before = sorted(backup.rglob("*"))
    ended = run("cp", saved, backup)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == (
        f"error: {backup} has snapshots in it, such as a: name the copy itself, as in "
        f"{backup}/NAME\n"
    )
    assert run("cp", saved, backup, "--overwrite").code == 2
    for inside in (backup / "a" / "b", f"{backup}/a/b/"):
        ended = run("cp", saved, inside)
        assert (ended.code, ended.out) == (2, "")
        assert "is in a snapshot" in ended.err
    assert sorted(backup.rglob("*")) == before
    assert run("cp", saved, backup / "b").code == 0
    assert run("cp", saved, backup / "b").code == 0  # it is there
    (backup / "b" / "notes").write_text("mine")
    assert run("cp", saved, backup / "b").code == 0
    assert run("cp", saved, backup / "a", "--overwrite").code == 0


def test_a_copy_to_a_folder_of_other_files(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "notes").write_text("mine")
    ended = run("cp", saved, folder)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == (
        f"error: {folder} has other files in it, such as notes: name the copy itself, as in "
        f"{folder}/NAME\n"
    )
    assert run("cp", saved, folder, "--overwrite").code == 0
    assert (folder / "notes").read_text() == "mine"


def test_ls_of_folders_without_snapshots(saved: Path, tmp_path: Path) -> None:
    Snapshot.take(tmp_path / "runs" / "7" / "a", state())
    ended = run("ls", tmp_path / "runs")
    assert ended.code == 3
    assert ended.err == (
        f"error: {tmp_path}/runs: no snapshot is directly in this folder; there are some further "
        "down: 7/a\n"
    )
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "newest").symlink_to(saved)
    ended = run("ls", tmp_path / "links")
    assert ended.code == 3
    assert "does not follow symbolic links, such as newest" in ended.err


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_export_without_generators(tmp_path: Path, to: str) -> None:
    app_state = {"model": torch.nn.Linear(2, 1), "rng": RNGState()}
    Snapshot.take(tmp_path / "s", app_state)
    arguments = ("export", tmp_path / "s", tmp_path / "out", "--to", to)
    ended = run(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert "--leave-out rng" in ended.err
    ended = run(*arguments, "--leave-out", "rng", "--rename", "model=net")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("exported 2 tensors")
    if to == "torch":
        loaded = torch.load(tmp_path / "out", weights_only=True)
        assert [*loaded] == ["net"]
    ended = run(*arguments, "--overwrite", "--leave-out", "rng", "--leave-out", "rgn")
    assert (ended.code, ended.err) == (0, "--leave-out rgn: the snapshot has no such path\n")


def test_commands_for_a_folder_of_snapshots(saved: Path, tmp_path: Path) -> None:
    ended = run("verify", tmp_path)
    assert (ended.code, ended.out) == (3, "")
    assert f"`actorsnap verify --all {tmp_path}`" in ended.err
    ended = run("rm", "--garbage", tmp_path)
    assert ended.code == 3
    assert "takes the snapshots' paths" in ended.err
    ended = run("cp", tmp_path, tmp_path / "copy")
    assert ended.code == 3
    assert "To copy a whole run, add --all" in ended.err
    ended = run("inspect", saved, "--html", tmp_path / "page.html")
    assert (ended.code, ended.out) == (0, f"wrote {tmp_path}/page.html\n")


# Usage, terminals, pipes ----------------------------------------------------------------------


def test_bad_usage(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run().code == 2
    assert run("ls").code == 2
    assert run("lss", saved).code == 2
    ended = run("ls", "s4://bucket/x")
    assert ended.code == 2
    assert re.search(
        r"unknown storage scheme 's4'; did you mean 's3'\? Known are: .*file, .*fs, .*memory",
        ended.err,
    )
    assert "pip install" not in ended.err, "fsspec is installed"
    monkeypatch.setenv("ACTORSNAP_VERIFY", "perhaps")
    ended = run("ls", saved)
    assert ended.code == 2
    assert "ACTORSNAP_VERIFY='perhaps': write true, false, 1 or 0" in ended.err
    ended = run("export", saved, "out", "--to", "zip", "--json")
    assert ended.code == 2
    why = "Invalid value for '--to': 'zip' is not one of 'hf', 'torch', 'dcp'."
    assert json.loads(ended.out)["error"]["message"] == why
    assert "Value error" not in ended.err


def test_a_missing_package() -> None:
    ended = run("ls", "abfs://container/x")
    assert ended.code == 4
    assert "pip install adlfs" in ended.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("export A B --to safetensors", "not one of 'hf', 'torch', 'dcp'; did you mean 'hf'?"),
        ("export A B --to pt", "did you mean 'torch'?"),
        ("export A B --to dpc", "did you mean 'dcp'?"),
        ("export A B --to onnx", "'onnx' is not one of 'hf', 'torch', 'dcp'."),
        ("convert A B --to hf", "No such option: --to. It writes a snapshot"),
        ("prune A --dry-run", "No such option: --dry-run. Without --yes, it only lists"),
        ("rm A --dry-run", "No such option: --dry-run. Without --yes, it asks"),
        ("steps A --dry-run", "No such option: --dry-run"),
    ],
)
def test_what_users_type_instead(arguments: str, text: str) -> None:
    ended = run(*arguments.split(), "--json")
    assert ended.code == 2
    assert text in json.loads(ended.out)["error"]["message"]


def test_help_and_version() -> None:
    ended = run("--help")
    assert ended.code == 0
    for name in ("ls", "inspect", "verify", "diff", "cat", "cp", "recover", "rm"):
        assert re.search(rf"\b{name}\b", ended.out)
        assert run(name, "--help").code == 0
    assert re.fullmatch(r"actorsnap \d+\.\d+\.\d+\S*\n", run("--version").out)
    assert "Missing argument 'PATH'" in run("ls").err


ERRORS: list[tuple[list[str], int, str]] = [
    (["ls", "{}/no"], 3, "NotASnapshot"),
    (["inspect", "{}/no"], 3, "NotASnapshot"),
    (["verify", "{}/no"], 3, "NotASnapshot"),
    (["verify", "--all", "{}/no"], 3, "NothingFound"),
    (["diff", "{}", "{}/no"], 3, "NotASnapshot"),
    (["cat", "{}", "model/no"], 2, "UsageError"),
    (["cp", "{}/no", "{}-to"], 3, "NotASnapshot"),
    (["convert", "{}/no", "{}-to"], 3, "NotASnapshot"),
    (["export", "{}/no", "{}-to", "--to", "hf"], 3, "NotASnapshot"),
    (["recover", "{}"], 4, "ObjectExists"),
    (["rm", "{}/no"], 3, "NotASnapshot"),
    (["rm", "{}"], 5, "NotConfirmed"),
    (["trace", "{}/no"], 2, "UsageError"),
    (["latest", "{}/no"], 3, "NothingFound"),
    (["steps", "{}/no"], 3, "NothingFound"),
    (["best", "{}/no", "loss", "--min"], 3, "NothingFound"),
    (["prune", "{}/no"], 2, "UsageError"),
    (["save-now", "{}/no"], 3, "NothingFound"),
    (["pin", "{}/no", "1", "--reason", "x"], 3, "NothingFound"),
    (["unpin", "{}/no", "1"], 3, "NothingFound"),
    (["record", "{}/no", "1", "x"], 3, "NothingFound"),
]


@pytest.mark.parametrize(("arguments", "code", "kind"), ERRORS)
def test_errors_as_json(saved: Path, arguments: list[str], code: int, kind: str) -> None:
    ended = run(*[argument.format(saved) for argument in arguments], "--json")
    assert ended.code == code
    error = json.loads(ended.out)["error"]
    assert (error["type"], error["exit_code"]) == (kind, code)
    assert error["message"]
    assert "error: " in ended.err  # for people


def test_every_command_has_json(saved: Path) -> None:
    names = {command.name or command.callback.__name__ for command in cli.app.registered_commands}  # type: ignore[union-attr]
    assert {arguments[0] for arguments, _, _ in ERRORS} == {n.replace("_", "-") for n in names}
    for arguments in (["ls"], ["nope", saved], ["ls", saved, "--nope"]):
        ended = run(*arguments, "--json")
        assert (ended.code, json.loads(ended.out)["error"]["exit_code"]) == (2, 2)


def test_results_as_json(saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    Snapshot.take(other, {"model": StateDict(w=torch.zeros(3, 4))})
    found = json.loads(run("diff", saved, other, "--json").out)
    assert (found["equal"], found["num_leaves"]) == (False, 10)
    assert {row["path"]: row["change"] for row in found["differences"]}["0/model/w"] == (
        "other values"
    )
    assert json.loads(run("diff", saved, saved, "--json").out)["differences"] == []
    assert json.loads(run("cat", saved, "model/row", "--json").out) == {
        **{"dtype": "float32", "shape": [4], "data": [4.0, 5.0, 6.0, 7.0]}
    }
    shown = json.loads(run("cat", saved, "progress", "--json").out)
    assert (shown["nan"], shown["log"], set(shown["blob"])) == ("nan", [1, 2], {"base64"})
    assert run("cat", saved, "progress", "--json", "--raw").code == 2
    torch.save({"w": torch.ones(2), "n": 1}, tmp_path / "x.pt")
    converted = json.loads(run("convert", tmp_path / "x.pt", tmp_path / "y", "--json").out)
    assert (converted["num_tensors"], converted["num_values"], converted["nbytes"]) == (1, 1, 8)
    (other / COMMIT_KEY).unlink()
    recovered = json.loads(run("recover", "--force", other, "--json").out)
    assert recovered["world_size"] == 1
    assert json.loads(run("rm", "-y", other, "--json").out) == {"deleted": [str(other)]}
    (collected,) = json.loads(run("rm", "--garbage", saved, "--json").out)
    assert collected["path"] == str(saved)
    assert collected["deleted"] == []


def fields_on_the_page() -> dict[str, set[str]]:
    text = (ROOT / "docs" / "reference" / "cli.md").read_text()
    rows = re.findall(
        r"^\| (`.*`) \| (.*) \|$",
        text.partition("| an error")[2].partition("\n\n")[0],
        re.MULTILINE,
    )
    return {
        name: {*re.findall(r"`(\w+)`", fields)}
        for names, fields in rows
        for name in names.split(", ")
    }


def keys_in(out: str) -> set[str]:
    documents = (
        [json.loads(line) for line in out.splitlines()] if out[:2] == '{"' else [json.loads(out)]
    )
    if isinstance(documents[0], list):
        documents = documents[0]
    return {key for document in documents for key in document}


def test_fields_are_in_the_docs(saved: Path, tmp_path: Path) -> None:
    pages = fields_on_the_page()
    assert {name.strip("`").split()[0] for name in pages} == {*cli_app.COMMANDS}
    other, run_folder = tmp_path / "other", tmp_path / "runs"
    with CheckpointManager(run_folder, state(), save=every.steps(1), keep=keep.all()) as manager:
        manager.save(1)
    trace = tmp_path / "trace.json"
    Snapshot.take(tmp_path / "a" / "s", state(), options=Options(trace=str(trace)))
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    commands: dict[str, list[object]] = {
        "ls": [saved],
        "ls FOLDER": [tmp_path / "a"],
        "inspect": [saved],
        "inspect --html": [tmp_path / "page", saved],
        "verify": [saved],
        "verify --all": [tmp_path / "a"],
        "diff": [saved, saved],
        "cp": [saved, other],
        "cp --all": [run_folder, tmp_path / "copies"],
        "convert": [tmp_path / "x.pt", tmp_path / "converted"],
        "export": [tmp_path / "converted", tmp_path / "out", "--to", "torch"],
        "rm --garbage": [saved],
        "rm": ["--yes", other],
        "trace": [trace],
        "trace --html": [tmp_path / "page", trace, "--merged", tmp_path / "merged"],
        "steps": [run_folder, "--keep", "last:1"],
        "prune": [run_folder, "--keep", "last:1"],
        "latest": [run_folder],
        "pin": [run_folder, "1", "--reason", "x"],
        "unpin": [run_folder, "1"],
        "save-now": [run_folder],
    }
    for command, arguments in commands.items():
        ended = run(*command.replace(" FOLDER", "").split(), *arguments, "--json")
        assert ended.code == 0, ended.err
        assert keys_in(ended.out) <= pages[f"`{command}`"], command


def test_a_bug_is_no_damage(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would end with 1, on which a script might delete a snapshot."""

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("all of it is used")

    monkeypatch.setattr(cli_calls, "run_sync", fail)
    ended = run("verify", saved, "--json")
    assert ended.code == 70
    assert json.loads(ended.out)["error"]["type"] == "MemoryError"
    assert "Traceback" in ended.err


def test_exit_codes_are_in_the_help_and_the_docs() -> None:
    text = " ".join(run("--help").out.split())
    pages = [path.read_text() for path in (ROOT / "docs").rglob("*.md")]
    (page,) = [page for page in pages if "| exit code |" in page]
    for code, meaning in cli_app.EXIT_CODES.items():
        assert f"{code}: {meaning}" in text
        assert f"| {code} | {meaning} |" in page


def test_shell_completion() -> None:
    request = {"_ACTORSNAP_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    ended = CliRunner().invoke(
        cli.app, env={**request, "COMP_WORDS": "actorsnap in"}, prog_name="actorsnap"
    )
    assert (ended.exit_code, ended.stdout.split()) == (0, ["inspect"])


def test_an_interrupt(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_calls, "run_sync", interrupt)
    ended = run("verify", saved)
    assert (ended.code, ended.err) == (130, "interrupted\n")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(saved: Path) -> None:
    saved.chmod(0)
    try:
        ended = run("ls", saved)
    finally:
        saved.chmod(0o700)
    assert ended.code == 4
    assert ended.err.startswith("error: ")


def test_a_file_instead_of_a_folder(saved: Path) -> None:
    ended = run("ls", saved / "actorsnap.json")
    assert ended.code in (3, 4)
    assert ended.err.startswith("error: ")


def test_nothing_steers_the_terminal(tmp_path: Path) -> None:
    """A snapshot may come from anybody; its keys and values are text, not commands."""
    evil = "\x1b[2J\x07new\nline[red]:smile:\u202e"
    state = {evil: StateDict({evil: evil, "x": [evil]})}
    Snapshot.take(tmp_path / "a", state, metadata={evil: evil})
    Snapshot.take(tmp_path / "b", {evil: StateDict({evil: 1})})
    for arguments in (
        ("ls", tmp_path / "a"),
        ("ls", tmp_path),
        ("inspect", tmp_path / "a"),
        ("inspect", "--json", tmp_path / "a"),
        ("diff", tmp_path / "a", tmp_path / "b"),
        ("cat", tmp_path / "a", evil),
    ):
        ended = run(*arguments)
        text = ended.out + ended.err
        assert not set("\x1b\x07\u202e") & set(text), arguments
        if arguments[1] != tmp_path and arguments[0] != "cat":
            assert "[red]:smile:" in text, arguments
    assert len(run("ls", tmp_path / "a").lines) == 2
    ended = run("cat", tmp_path / "a", "no" + evil)
    assert ended.code == 2
    assert "\x1b" not in ended.err


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot whose listing is longer than any pipe."""
    folder = tmp_path_factory.mktemp("cli")
    values = {f"a-rather-long-name-of-a-leaf-{n:06}": n for n in range(5_000)}
    tensors = {"w": torch.ones(3_000_000)}
    Snapshot.take(folder / "s", {"k": StateDict({**values, **tensors})})
    return folder / "s"


@pytest.mark.slow  # as in the next test, but for its reader
def test_a_real_process(long: Path) -> None:
    done = subprocess.run(
        command("ls", long), env=ENVIRONMENT, capture_output=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(done.stdout.splitlines()) == 5_001


def test_nobody_reads_on(long: Path) -> None:
    """``actorsnap ls X | head -1``"""
    with subprocess.Popen(
        command("ls", long), env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"0/k/a-rather")
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr.read() == b""


INTERRUPTED = """
import os, signal, sys

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "actorsnap.cli":
            sys.meta_path.remove(Finder)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder)
from actorsnap.__main__ import main
sys.argv[1:] = ["ls", "nothing"]
main()
"""


def test_an_interrupt_of_the_parser(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Typer exits with 130 and prints nothing."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for name in ("make_context", "invoke"):
        with monkeypatch.context() as patch:
            patch.setattr(TyperGroup, name, interrupt)
            ended = run("verify", saved, "--json")
        assert (ended.code, ended.err) == (130, "interrupted\n")
        assert json.loads(ended.out)["error"]["type"] == "KeyboardInterrupt"


@pytest.mark.parametrize("module", ["actorsnap.cli_streams", "actorsnap.errors", "actorsnap.cli"])
def test_an_interrupt_of_imports(module: str) -> None:
    """Also of the first ones: no traceback."""
    program = INTERRUPTED.replace("actorsnap.cli", module)
    command = [sys.executable, "-c"]  # not forked from a process that has imported all
    ended = subprocess.run([*command, program], env=ENVIRONMENT, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"interrupted\n")
    ended = subprocess.run(
        [*command, program.replace('"nothing"', '"nothing", "--json"')],
        env=ENVIRONMENT,
        capture_output=True,
        check=False,
    )
    assert json.loads(ended.stdout)["error"]["type"] == "KeyboardInterrupt"


def test_an_interrupted_copy(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_copies, "run", interrupted)
    ended = run("cp", saved, tmp_path / "b")
    assert (ended.code, ended.out) == (130, "")
    assert ended.err == "interrupted; run the command again to continue\n"


def without_reader(*arguments: object, both: bool = False) -> int:
    """Runs a command whose output nobody reads, and returns its exit code."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as out:
        done = subprocess.run(
            command(*arguments),
            env=ENVIRONMENT,
            stdout=out,
            stderr=out if both else subprocess.PIPE,
            timeout=300,
            check=False,
        )
    assert both or b"Traceback" not in done.stderr
    return done.returncode


def test_changes_that_nobody_reads_about(saved: Path, tmp_path: Path) -> None:
    assert without_reader("cp", saved, tmp_path / "b", "--json") == 0
    assert run("verify", "--full", tmp_path / "b").code == 0
    assert [each.name for each in (tmp_path / "b").iterdir() if each.is_dir()] == [
        each.name for each in saved.iterdir() if each.is_dir()
    ]
    shutil.copytree(saved, tmp_path / "c")
    assert without_reader("rm", "--yes", tmp_path / "b", tmp_path / "c") == 0
    assert not (tmp_path / "b").exists()
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("both", [False, True], ids=["stdout", "both"])
def test_verdicts_that_nobody_reads(saved: Path, tmp_path: Path, both: bool) -> None:
    other = state()
    other["model"]["w"][0] = 7
    Snapshot.take(tmp_path / "other", other)
    for more in ([], ["--json"]):
        assert without_reader("diff", saved, tmp_path / "other", *more, both=both) == 1
    (file, *_) = saved.glob("*/data/**/*.safetensors")
    file.unlink()
    assert without_reader("verify", saved, "--json", both=both) == 1
    assert without_reader("verify", saved, both=True) == 1
    assert without_reader("latest", saved, both=True) == 3


@pytest.mark.parametrize("arguments", ["verify", "verify --json", "ls", "inspect", "rm", "--help"])
def test_a_full_disk(long: Path, arguments: str) -> None:
    """1 would mean that the snapshot is damaged."""
    path = f"{long}-nope" if arguments == "rm" else long
    paths = [path] * (arguments != "--help")
    more = ["--json"] * (arguments == "rm")  # its error is JSON
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command(*arguments.split(), *paths, *more),
            env=ENVIRONMENT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 4
    expected = "error: the output cannot be written: No space left on device"
    assert done.stderr.splitlines()[-1] == expected
    assert len(done.stderr.splitlines()) == 1 + len(more)


def closed(line: str, *arguments: object) -> Any:
    """Runs a command whose streams the shell closes."""
    return subprocess.run(
        ["sh", "-c", line, "sh", sys.executable, "-m", "actorsnap", *map(str, arguments)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.few
@pytest.mark.parametrize(
    ("line", "said"), [('exec "$@" >&-', "error: stdout is closed\n"), ('exec "$@" 2>&-', "")]
)
def test_a_closed_stream(saved: Path, line: str, said: str) -> None:
    """The next file that is opened would become the stream."""
    done = closed(line, "rm", "--yes", saved)
    assert (done.returncode, done.stdout, done.stderr) == (4, "", said)
    assert run("ls", saved).code == 0


def test_no_stdin(saved: Path) -> None:
    done = closed('exec "$@" <&-', "rm", saved)
    assert done.returncode == 5
    assert "not confirmed" in done.stderr


@pytest.mark.parametrize("command", ["inspect", "trace"])
def test_a_page_on_a_full_disk(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Half a page would look like a page."""
    out, source = tmp_path / "page.html", saved
    if command == "trace":
        source = tmp_path / "trace.json"
        Snapshot.take(tmp_path / "traced", state(), options=Options(trace=str(source)))
    ended = run(command, source, "--html", "/dev/full")
    assert ended.code == 4
    assert ended.err == "error: No space left on device (write of /dev/full)\n"

    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            super().write(data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cli, "open", lambda path, mode: Full(path, mode), raising=False)
    ended = run(command, source, "--html", out)
    assert ended.code == 4
    assert ended.err == f"error: No space left on device (write of {out})\n"
    assert not out.exists()
    monkeypatch.undo()
    ended = run(command, source, "--html", tmp_path / "no" / "page.html")
    assert ended.code == 4
    assert ended.err == f"error: No such file or directory (write of {tmp_path}/no/page.html)\n"
    out.write_text("<html>")
    assert run(command, source, "--html", out, "--json").out == f'{{\n  "written": "{out}"\n}}\n'


def test_traces_are_not_overwritten(tmp_path: Path) -> None:
    """``trace --html traces/*.json``"""
    traces = [tmp_path / "0.json", tmp_path / "1.json"]
    for file in traces:
        Snapshot.take(f"{file}.s", state(), options=Options(trace=str(file)))
    before = [file.read_bytes() for file in traces]
    for option in ("--html", "--merged"):
        for given in traces:
            ended = run("trace", option, given, traces[1])
            assert (ended.code, ended.out) == (2, "")
            text = f"error: {given} is a trace, and would be lost: write to another file\n"
            assert ended.err == text
    out = tmp_path / "out"
    assert run("trace", "--html", out, "--merged", out, *traces).code == 2
    assert [file.read_bytes() for file in traces] == before
    ended = run("trace", "--html", out, "--merged", tmp_path / "all.json", *traces, "--json")
    assert json.loads(ended.out) == {"written": str(out), "merged": f"{tmp_path}/all.json"}


def test_damage_on_a_full_disk(saved: Path) -> None:
    (file, *_) = saved.glob("*/data/**/*.safetensors")
    file.unlink()
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command("verify", saved, "--json"),
            env=ENVIRONMENT,
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=300,
            check=False,
        )
    assert done.returncode == 4
    assert done.stderr.count(b"\n") == 1


BARS_AFTER = """
from actorsnap.__main__ import main
from actorsnap.runtime import bars

bars._FIRST_S = {first_s}
main()
"""


def on_a_terminal(
    *arguments: object, answer: str = "", first_s: float | None = None
) -> tuple[int, str]:
    """Exit code, and all that a terminal of 100 columns was sent.

    Args:
        first_s: Time before a command gets bars, instead of the real one.
    """
    words = command(*arguments)
    if first_s is not None:
        words = forker.command("-c", BARS_AFTER.format(first_s=first_s), *map(str, arguments))
    ours, theirs = pty.openpty()
    environment = {**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "100", "LC_ALL": "C.UTF-8"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(words, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.write(ours, answer.encode())
    received = bytearray()
    with open(ours, "rb", buffering=0) as terminal:
        while True:
            try:
                data = terminal.read(65536)
            except OSError:  # Linux' way to say that the other end is closed
                break
            if not data:
                break
            received += data
    return process.wait(60), received.decode()


def test_short_work_draws_no_bar(saved: Path, tmp_path: Path) -> None:
    """It would vanish at once."""
    for arguments in (
        ["verify", "--full", saved],
        ["inspect", saved],
        ["cp", saved, tmp_path / "copy"],
    ):
        code, text = on_a_terminal(*arguments, first_s=60.0)
        assert code == 0
        assert "\x1b[2K" not in text
        assert "━" not in text


def test_a_terminal_sees_a_progress_bar(long: Path) -> None:
    code, text = on_a_terminal("verify", "--full", long, first_s=0.0)
    assert code == 0
    assert "verifying" in text
    assert "━" in text
    # The sum is known from the start, and the bar is gone in the end.
    assert "11.4 MiB" in text
    assert "ok: 1 data object, 11.4 MiB compared" in text.replace("\r", "").splitlines()[-1]


def test_a_command_in_a_cell_draws_no_bar(long: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython gives it a terminal; the cell would keep each frame."""
    monkeypatch.setitem(ENVIRONMENT, "JPY_PARENT_PID", "1")
    code, text = on_a_terminal("verify", "--full", long, first_s=0.0)
    assert code == 0
    assert "\x1b[" not in text
    assert "verifying" not in text


def test_a_terminal_sees_no_unknown_total(saved: Path) -> None:
    code, text = on_a_terminal("verify", saved, first_s=0.0)
    assert code == 0
    assert "verifying" in text
    assert "━" in text
    assert "?" not in re.sub(r"\x1b\[\?", "", text)


def test_a_terminal_sees_columns() -> None:
    code, text = on_a_terminal("ls", V1)
    assert code == 0
    assert "\t" not in text
    lines = text.replace("\r", "").splitlines()
    starts = {re.match(r"0/dense/\S+ +", line).end() for line in lines if "0/dense/float" in line}  # type: ignore[union-attr]
    assert len(starts) == 1


def test_commands_are_patient_unless_the_environment_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts: list[float] = []
    each = reading.each_manifest

    def noted(source: Source, *looks: Any, **how: Any) -> Any:
        timeouts.append(source.options.timeout_s)
        return each(source, *looks, **how)

    monkeypatch.setattr(reading, "each_manifest", noted)
    for _ in range(2):
        assert run("inspect", tmp_path).code == 3
        monkeypatch.setenv("ACTORSNAP_TIMEOUT_S", "7.5")
    assert timeouts == [86400, 7.5]
