# SPDX-License-Identifier: Apache-2.0
"""What is missing without an extra is said in one line, where it is needed."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import tomllib
import traceback
from importlib import import_module, metadata
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from actorsnap import MissingPackage, Options, StateDict, UsageError, __version__, testing
from actorsnap.runtime import bars
from actorsnap.sync import Snapshot

ROOT = Path(__file__).parents[1]

PACKAGES = {"s3": ("aiobotocore", "botocore"), "gcs": ("gcloud", "aiohttp")}


@pytest.fixture(params=[("s3", "s3"), ("gs", "gcs"), ("gcs", "gcs")], ids=lambda pair: pair[0])
def scheme(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """A scheme and its extra, whose packages are not installed."""
    found: tuple[str, str] = request.param
    name, extra = found
    for module in [*sys.modules]:
        backend = f"actorsnap.storage.{'s3' if extra == 's3' else 'gs'}"
        if module == backend or module.startswith(f"{backend}_"):
            monkeypatch.delitem(sys.modules, module)
        if module.partition(".")[0] in PACKAGES[extra]:
            monkeypatch.delitem(sys.modules, module)
    for package in PACKAGES[extra]:
        monkeypatch.setitem(sys.modules, package, None)
    return found


def test_a_storage_without_its_extra(scheme: tuple[str, str]) -> None:
    name, extra = scheme
    url = f"{name}://bucket/run/step-1"
    says = rf"^{name}:// needs the package '\w+', which is not installed: pip install "
    says += rf"'actorsnap\[{extra}\]'$"
    with pytest.raises(UsageError, match=says):
        Snapshot(url).get_manifest()
    with pytest.raises(UsageError, match=says) as raised:
        Snapshot.take(url, {"s": StateDict(w=torch.zeros(2))})
    assert len(traceback.format_exception(raised.value)) == 3  # no cause, and one frame


class Hidden(MetaPathFinder):
    """Hides an installed package."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == self.name:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


@pytest.mark.parametrize(
    "name", ["accelerate", "ignite", "ray", "torchtitan", "torchtnt", "transformers"]
)
def test_an_integration_without_its_framework(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [*sys.modules]:
        if module == f"actorsnap.interop.{name}" or module.partition(".")[0] == name:
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Hidden(name), *sys.meta_path])
    with pytest.raises(ImportError, match=rf"pip install 'actorsnap\[{name}\]'") as raised:
        import_module(f"actorsnap.interop.{name}")
    assert raised.value.__cause__ is None


def test_spans_without_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [*sys.modules]:
        if module.startswith("opentelemetry."):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(MissingPackage, match=r"needs OpenTelemetry: pip install") as raised:
        Snapshot.take("memory://s", {"s": StateDict(x=1)}, options=Options(otel="on"))
    assert raised.value.__cause__ is None


def test_conformance_without_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "actorsnap.testing.conformance", raising=False)
    monkeypatch.setitem(sys.modules, "pytest", None)
    says = "^StorageConformance needs pytest: pip install pytest hypothesis$"
    with pytest.raises(ModuleNotFoundError, match=says):
        _ = testing.StorageConformance


def run_without_typer(*args: str) -> subprocess.CompletedProcess[str]:
    script = (
        "import sys; sys.modules['typer'] = None\n"
        f"sys.argv = {['actorsnap', *args]}\n"
        "from actorsnap.__main__ import main; main()"
    )
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_the_program_without_its_extra() -> None:
    message = "the command needs typer: pip install 'actorsnap[cli]'"
    done = run_without_typer("ls", "nowhere")
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == f"error: {message}\n"
    done = run_without_typer("ls", "nowhere", "--json")
    assert (done.returncode, done.stderr) == (4, f"error: {message}\n")
    error = json.loads(done.stdout)["error"]
    assert (error["exit_code"], error["message"]) == (4, message)
    done = run_without_typer("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"actorsnap {__version__}\n", "")


@pytest.fixture
def no_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [*sys.modules]:
        if module == "rich" or module.startswith("rich."):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "rich", None)


@pytest.mark.usefixtures("no_rich")
def test_a_bar_without_rich_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bars, "_is_terminal", lambda: True)
    monkeypatch.setattr(bars, "_FIRST_S", 0.0)
    state = {"s": StateDict(w=torch.ones(100))}
    with caplog.at_level(logging.WARNING, logger="actorsnap.runtime.bars"):
        snapshot = Snapshot.take(tmp_path / "s", state, options=Options(fsync=False), progress=True)
    assert [record.getMessage() for record in caplog.records] == [
        "bars need rich, so progress is in plain lines: pip install 'actorsnap[cli]'"
    ]
    assert snapshot.verify().ok


def test_what_a_plain_install_brings() -> None:
    """Six packages besides torch and its own: see decision 0032."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    plain = {re.split("[>=<]", line)[0] for line in project["dependencies"]}
    assert plain == {"anyio", "crc32c", "msgspec", "numpy", "psutil", "torch"}
    brought = _with_dependencies(plain - {"torch"}) - _with_dependencies({"torch"})
    assert brought == {"anyio", "crc32c", "idna", "msgspec", "numpy", "psutil"}


def _with_dependencies(names: set[str]) -> set[str]:
    """Returns the names with all that they require on this machine, without extras."""
    found: set[str] = set()
    left = [*names]
    while left:
        name = canonicalize_name(left.pop())
        if name in found:
            continue
        found.add(name)
        for text in metadata.requires(name) or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                left.append(needed.name)
    return found


def test_all_has_every_extra_but_frameworks() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (everything,) = extras["all"]
    named = set(re.fullmatch(r"actorsnap\[(.*)\]", everything)[1].split(","))  # type: ignore[index]
    frameworks = {path.stem for path in (ROOT / "actorsnap" / "interop").glob("*.py")}
    assert named == {*extras} - frameworks - {"all", "dev", "docs", "release", "test"}
