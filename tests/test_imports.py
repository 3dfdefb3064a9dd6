"""What ``import actorsnap`` brings along. How long it takes is a row of the benchmarks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
    assert {*actorsnap.__all__} == {"__version__", *in_table}
    asynchronous = {name for name in dir(actorsnap.Snapshot) if not name.startswith("_")}
    blocking = {name for name in dir(actorsnap.sync.Snapshot) if not name.startswith("_")}
    assert asynchronous == blocking
    pending = {name for name in dir(actorsnap.PendingSnapshot) if not name.startswith("_")}
    assert pending == {n for n in dir(actorsnap.sync.PendingSnapshot) if not n.startswith("_")}
