# SPDX-License-Identifier: Apache-2.0
"""What the pages about object storage show works, and the tables have each option."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from actorsnap.storage.gs_client import GsOptions
from actorsnap.storage.s3_client import S3Options
from tests.pages import ROOT, all_blocks, blocks, play, shell, timeless
from tests.servers.ceph import CephServer
from tests.servers.fake_gcs import FakeGcsServer
from tests.support.scripts import run_script

TEXT = (ROOT / "docs/storage.md").read_text()
OPTIONS = (ROOT / "docs/reference/storage-options.md").read_text()


def test_its_python_runs(
    ceph: CephServer,
    bucket: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in ceph.env().items():
        monkeypatch.setenv(name, value)
    model = torch.nn.Linear(8, 8)
    names: dict[str, Any] = {
        "bucket": bucket,
        "endpoint": ceph.storage_options()["endpoint_url"],
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters()),
    }
    shown = [
        (kind, block)
        for kind, block in all_blocks(TEXT + OPTIONS)
        if kind == "python" or "$" not in block
    ]
    assert [kind for kind, _ in shown] == ["python", "", "python", "python"]
    for n, (kind, block) in enumerate(shown):
        if kind:
            exec(compile(block, f"block {n}", "exec"), names)  # noqa: S102
            printed = capsys.readouterr().out
        else:
            assert printed == block


@pytest.mark.usefixtures("forker")
def test_step_6_of_the_tutorial(
    ceph: CephServer, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in ceph.env().items():
        monkeypatch.setenv(name, value)
    before, _, step = (ROOT / "docs/tutorial.md").read_text().partition("\n## 6. ")
    (script,) = [block for block in blocks(before, "python") if "sys.argv" in block]
    Path("train.py").write_text(script)
    (sessions,) = blocks(step.replace("my-bucket", bucket))
    for session in sessions.removeprefix("$ ").split("\n$ "):
        line, _, expected = session.partition("\n")
        found = run_script(line, tmp_path) if line.startswith("python ") else shell(line)
        if expected:
            assert timeless(found) == timeless(expected), line


@pytest.mark.blocking
def test_the_page_about_s3(ceph: CephServer, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ceph.env().items():
        monkeypatch.setenv(name, value)
    names: dict[str, Any] = {
        "bucket": bucket,
        "endpoint": ceph.storage_options()["endpoint_url"],
        "app_state": {"model": torch.nn.Linear(8, 8)},
    }
    assert play((ROOT / "docs/howto/s3.md").read_text(), names, "s3.md") == 3
    assert names["snapshot"].path == f"s3://{bucket}/run-7/step-200"


@pytest.mark.blocking
def test_the_page_about_gcs(fake_gcs: FakeGcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = fake_gcs.make_bucket()
    for name, value in fake_gcs.env().items():
        monkeypatch.setenv(name, value)
    text = (ROOT / "docs/howto/gcs.md").read_text().replace("gs://bucket", f"gs://{bucket}")
    names: dict[str, Any] = {"app_state": {"model": torch.nn.Linear(8, 8)}}
    assert play(text, names, "gcs.md") == 1
    assert names["snapshot"].verify("full").ok


@pytest.mark.parametrize(("scheme", "kind"), [("s3", S3Options), ("gs", GsOptions)])
def test_each_option_stands_there_with_its_default(scheme: str, kind: type[msgspec.Struct]) -> None:
    section = OPTIONS.split(f"\n## Options of `{scheme}://`\n")[1].split("\n## ")[0]
    found: dict[str, str] = {}
    for names, default in re.findall(r"^\| (`.*?`) \| (.*?) \|", section, flags=re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            found[name] = default.replace('"', "'")
    options = kind()
    assert found == {name: repr(getattr(options, name)) for name in kind.__struct_fields__}
