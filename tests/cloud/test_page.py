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
from tests.pages import ROOT, all_blocks
from tests.servers.ceph import CephServer

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


@pytest.mark.parametrize(("scheme", "kind"), [("s3", S3Options), ("gs", GsOptions)])
def test_each_option_stands_there_with_its_default(scheme: str, kind: type[msgspec.Struct]) -> None:
    section = OPTIONS.split(f"\n## Options of `{scheme}://`\n")[1].split("\n## ")[0]
    found: dict[str, str] = {}
    for names, default in re.findall(r"^\| (`.*?`) \| (.*?) \|", section, flags=re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            found[name] = default.replace('"', "'")
    options = kind()
    assert found == {name: repr(getattr(options, name)) for name in kind.__struct_fields__}
