# SPDX-License-Identifier: Apache-2.0
"""What ``import actorsnap`` brings along. How long it takes is a row of the benchmarks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from actorsnap import RNGState, StateDict
from actorsnap.manager import every
from actorsnap.manager.sync import CheckpointManager
from actorsnap.sync import Snapshot
from tests.support import forker

pytestmark = pytest.mark.usefixtures("forker")

ROOT = Path(__file__).parents[1]

HEAVY = (
    *("aiobotocore", "aiohttp", "boto3", "botocore", "fsspec", "gcloud", "google.cloud"),
    *("rich", "typer", "click", "safetensors", "pytest", "hypothesis", "trio"),
    # Parts of torch that cost seconds, and that saving does not need.
    *("torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "triton"),
)


def run(script: str, *, has_torch: bool = True) -> str:
    """What a fresh process prints."""
    command = ["-W", "error", "-c", script]
    done = subprocess.run(
        forker.command(*command) if has_torch else [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def added_by(statement: str) -> set[str]:
    """Modules that a statement loads in a process that has torch and numpy."""
    script = (
        "import sys, torch, numpy\n"
        "before = set(sys.modules)\n"
        f"{statement}\n"
        "print('\\n'.join(set(sys.modules) - before))"
    )
    return set(run(script).split())


@pytest.mark.parametrize(
    "statement",
    [
        "import actorsnap, actorsnap.sync, actorsnap.testing\nfrom actorsnap import *",
        # Also what opens a storage and saves has no need of other backends.
        "import actorsnap, actorsnap.sync\n"
        "state = {'s': actorsnap.StateDict(x=torch.ones(3))}\n"
        "actorsnap.sync.Snapshot.take('memory://x', state).restore(state)",
    ],
    ids=["import", "use"],
)
def test_only_what_is_needed_is_imported(statement: str) -> None:
    added = added_by(statement)
    assert "actorsnap.runtime.local_engine" in added
    heavy = {
        name for name in added if any(name == root or name.startswith(f"{root}.") for root in HEAVY)
    }
    assert heavy == set()


def test_the_uploader_process_needs_no_torch() -> None:
    """Nor does a storage of another package that it opens."""
    output = run(
        "import sys\n"
        "import actorsnap.runtime.local_engine, actorsnap.storage.fs\n"
        "from actorsnap import Options, StorageError, __version__\n"
        "print('torch' in sys.modules, 'asyncio' in sys.modules)\n",
        has_torch=False,
    )
    assert output.split() == ["False", "True"]


def test_the_command_line_brings_its_own() -> None:
    """The test above would notice."""
    assert {"rich", "typer"} <= added_by("import actorsnap.cli")


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_an_outline_of_the_program_imports_no_command(option: str) -> None:
    script = (
        f"import sys; sys.argv = ['actorsnap', {option!r}]\n"
        "from actorsnap.__main__ import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "print(*sys.modules)"
    )
    modules = set(run(script, has_torch=False).splitlines()[-1].split())
    assert "typer" in modules
    assert modules & {"torch", "numpy", "anyio", "asyncio", "actorsnap.cli"} == set()


def test_the_outline_is_that_of_the_commands() -> None:
    """Each command, with the first line of its docstring."""
    text = "import sys\nfrom actorsnap.cli_app import add_outlines, app\n{}\napp(['--help'])"
    outline, whole = (
        run(text.format(line), has_torch=False)
        for line in ("add_outlines()", "import actorsnap.cli")
    )
    assert outline == whole
    assert "save-now" in whole


def test_commands_without_tensors_import_no_torch(tmp_path: Path) -> None:
    """One process runs them all; it names the first one that imports torch."""
    state = {"s": StateDict(x=torch.ones(3), log=[1, 2.5, (3,)], lr={"a": float("nan")})}
    Snapshot.take(tmp_path / "all" / "one", {**state, "rng": RNGState()}, metadata={"a": 1})
    root = str(tmp_path / "root")
    with CheckpointManager(root, state, save=every.steps(1)) as manager:
        for step in range(3):
            manager.maybe_save(step, metrics={"loss": step})
    one, copy = str(tmp_path / "all" / "one"), str(tmp_path / "copy")
    (tmp_path / "empty").mkdir()
    commands: list[list[str]] = [
        *(["ls", one], ["ls", str(tmp_path / "all")], ["ls", "--json", one]),
        *(["inspect", one], ["inspect", "--json", one]),
        *(["cat", one, "s/log/1"], ["cat", "--json", one, "0/s/log/0"]),
        *(["verify", one], ["verify", "--all", str(tmp_path / "all")]),
        *(["diff", one, one], ["cp", one, copy], ["rm", "--yes", copy], ["rm", "--garbage", one]),
        *(["ls", str(tmp_path / "empty")], ["rm", "--yes", str(tmp_path / "empty")]),
        *(["steps", root], ["prune", root, "--keep", "last:2", "--yes"], ["latest", root]),
        *(["latest", "--valid", root], ["best", root, "loss", "--min"], ["save-now", root]),
        *(["pin", root, "2", "--reason", "paper"], ["unpin", root, "2"]),
        *(["record", root, "2", "f1=0.5"], ["recover", one]),
        ["verify", "--full", str(tmp_path / "empty")],
    ]
    script = (
        "import contextlib, io, sys\n"
        "from actorsnap.cli import app\n"
        f"for command in {commands!r}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()), "
        "contextlib.redirect_stderr(io.StringIO()):\n"
        "        code = app(command, standalone_mode=False)\n"
        "    print(command[0], code, 'torch' in sys.modules)\n"
    )
    lines = [line.split() for line in run(script, has_torch=False).splitlines()]
    assert [line[0] for line in lines] == [command[0] for command in commands]
    assert [line for line in lines if line[2] == "True"] == []
    # Nothing is there.
    assert {tuple(line[:2]) for line in lines if line[1] not in ("None", "0")} == {
        ("ls", "3"),
        ("rm", "3"),
        ("verify", "3"),
        ("recover", "4"),
    }


def test_importing_starts_nothing() -> None:
    output = run(
        "import os, threading, torch\n"
        "threads, files = threading.active_count(), os.listdir('/proc/self/fd')\n"
        "import signal, sys\n"
        "handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]\n"
        "import actorsnap, actorsnap.sync, actorsnap.cli\n"
        "print(threading.active_count() - threads)\n"
        "print(len(os.listdir('/proc/self/fd')) - len(files))\n"
        "print(handlers == [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)])\n"
        "from actorsnap.runtime.host import Host\n"
        "print(Host._instance)\n"
        "print('asyncio' in sys.modules and __import__('asyncio')._get_running_loop())\n"
    )
    assert output.split() == ["0", "0", "True", "None", "None"]


def test_nothing_public_is_missing() -> None:
    import actorsnap
    import actorsnap.sync

    for module in (actorsnap, actorsnap.sync):
        for name in module.__all__:
            assert getattr(module, name) is not None
    # Type checkers read the list, ``__getattr__`` the table.
    in_table = {name for names in actorsnap._NAMES_BY_MODULE.values() for name in names}
    assert {*actorsnap.__all__} == {"__version__", *actorsnap.errors.__all__, *in_table}
    asynchronous = {name for name in dir(actorsnap.Snapshot) if not name.startswith("_")}
    blocking = {name for name in dir(actorsnap.sync.Snapshot) if not name.startswith("_")}
    assert asynchronous == blocking
    pending = {name for name in dir(actorsnap.PendingSnapshot) if not name.startswith("_")}
    assert pending == {n for n in dir(actorsnap.sync.PendingSnapshot) if not n.startswith("_")}
