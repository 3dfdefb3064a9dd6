# SPDX-License-Identifier: Apache-2.0
"""What the pages of integrations and migrations show is there; exports are run.

No framework is imported: names are looked up in the source of the adapters, which
``tests/frameworks`` runs.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict
from typer.testing import CliRunner

from actorsnap import RNGState, StateDict
from actorsnap.cli import app
from actorsnap.interop.exports import export_dcp
from actorsnap.manager import every
from actorsnap.manager.sync import CheckpointManager
from actorsnap.sync import Snapshot
from tests.pages import ROOT, blocks

PAGES = sorted(
    str(path.relative_to(ROOT / "docs"))
    for folder in ("integrations", "migrate")
    for path in (ROOT / "docs" / folder).glob("*.md")
)


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text()


def code_of(page: str) -> ast.Module:
    found = ast.Module(body=[], type_ignores=[])
    for block in blocks(text_of(page), "python"):
        name = f"{page}: {block[:60]!r}"
        compile(block, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        found.body += ast.parse(block, name).body
    return found


def source_of(module: str) -> ast.Module:
    spec = find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    return ast.parse(Path(spec.origin).read_text())


def names_in(body: list[ast.stmt]) -> Iterator[str]:
    """Names that a module has after its import."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Import() | ast.ImportFrom():
                yield from [alias.asname or alias.name for alias in node.names]
            case ast.Assign() | ast.AnnAssign() | ast.If() | ast.Try() | ast.With():
                for child in ast.walk(node):
                    if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                        yield child.id
                    elif isinstance(child, ast.alias):
                        yield child.asname or child.name


def test_what_examples_import_is_there() -> None:
    found = 0
    for node in (node for page in PAGES for node in ast.walk(code_of(page))):
        if not isinstance(node, ast.ImportFrom):
            continue
        module = node.module or ""
        if module.split(".")[0] != "actorsnap":
            continue
        defined = {*names_in(source_of(module).body)}
        for alias in node.names:
            found += 1
            is_module = alias.name not in defined and find_spec(f"{module}.{alias.name}")
            assert alias.name in defined or is_module, f"{module} has no {alias.name}"
    assert found >= 30


def keywords_of(module: str, name: str) -> set[str] | None:
    """Returns the parameters of a function, or of a class; None if it takes any, or inherits."""
    for node in source_of(module).body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if node.name != name:
            continue
        made: ast.AST = node
        if isinstance(node, ast.ClassDef):
            inits = [each for each in node.body if getattr(each, "name", "") == "__init__"]
            if not inits:
                return None
            made = inits[0]
        assert isinstance(made, ast.FunctionDef | ast.AsyncFunctionDef)
        if made.args.kwarg is not None:
            return None
        return {arg.arg for arg in [*made.args.args, *made.args.kwonlyargs]}
    return None


def checked_calls(page: str) -> int:
    """Compares the keywords of each call of an adapter; returns the number of these calls."""
    code = code_of(page)
    imported = {
        alias.name: node.module
        for node in ast.walk(code)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("actorsnap.interop")
        for alias in node.names
    }
    checked = 0
    for node in ast.walk(code):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name = node.func.id
            known = keywords_of(imported[name] or "", name) if name in imported else None
            if known is not None:
                checked += 1
                assert {each.arg for each in node.keywords} <= known, ast.unparse(node)
    return checked


def test_adapters_take_the_keywords_that_are_shown() -> None:
    assert sum(map(checked_calls, PAGES)) >= 8


def test_the_files_that_are_named_exist() -> None:
    text = "".join(map(text_of, PAGES))
    named = {*re.findall(r"\b(?:tests|examples|docs)/[\w./-]*\w", text)}
    assert len(named) >= 10
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def without_numbers(text: str) -> str:
    text = re.sub(r"\d+(\.\d)? ([KM]i)?B\b", "<size>", text)
    return re.sub(r"\b\d+ (tensor|value|file)s?\b", r"<number> \1", text)


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_from_a_dcp_folder_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run continues from an old job's folder, and exports one that the old job loads."""
    monkeypatch.chdir(tmp_path)

    def job() -> dict[str, Any]:
        model = torch.nn.Linear(2, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    def state_of(job: dict[str, Any], step: int) -> dict[str, Any]:
        model, optimizer = get_state_dict(job["model"], job["optimizer"])
        scheduler = job["scheduler"].state_dict()
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": step}

    old, new, back = job(), job(), job()
    old["model"](torch.ones(1, 2)).sum().backward()
    old["optimizer"].step()
    old["scheduler"].step()
    saved = state_of(old, 40)
    state_dict_saver.save(saved, checkpoint_id="ckpt", no_dist=True)
    (block,) = [
        each for each in blocks(text_of("migrate/dcp-folders.md"), "python") if "progress" in each
    ]
    exec(compile(block, "dcp-folders.md", "exec"), names := {**new})
    assert names["progress"]["step"] == 40
    assert str(state_of(new, 40)) == str(saved)

    Snapshot.take("runs/7/step-0000000900.g1", names["app_state"])
    found = re.findall(r"```python\n(  names = .*?)  ```", text_of("migrate/export.md"), re.DOTALL)
    exec(textwrap.dedent(found[0]), {"Snapshot": Snapshot, "export_dcp": export_dcp})
    loaded = state_of(back, 0)
    state_dict_loader.load(loaded, checkpoint_id="old-names", no_dist=True)
    assert str(loaded) == str(saved)


def test_a_run_continues_from_an_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = [
        each for each in blocks(text_of("migrate/index.md"), "python") if "num_steps" in each
    ]
    old = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(old.parameters()).state_dict()
    Path("old").mkdir()
    torch.save({"model": old.state_dict(), "optimizer": optimizer, "step": 40}, "old/ckpt.pt")
    steps: list[int] = []
    for num_steps in (250, 260):
        model = torch.nn.Linear(2, 3)
        names: dict[str, Any] = {
            "CheckpointManager": CheckpointManager,
            "RNGState": RNGState,
            "Snapshot": Snapshot,
            "StateDict": StateDict,
            "every": every,
            "model": model,
            "num_steps": num_steps,
            "optimizer": torch.optim.AdamW(model.parameters()),
            "train_step": lambda: steps.append(1),
        }
        exec(compile(block, "index.md", "exec"), names)
        assert torch.equal(model.weight, old.weight)
        assert names["progress"]["step"] == num_steps - 1
    assert len(steps) == (250 - 41) + (260 - 201)  # after the old step, and the newest of the run


def test_the_page_of_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = text_of("migrate/export.md")
    state = {"module.weight": torch.ones(3, 2), "module.bias": torch.zeros(3)}
    Snapshot.take("ckpt/step-100", {"model": StateDict(state)})
    (block,) = blocks(text, "python")
    exec(compile(block, "export.md", "exec"), {})
    assert {*torch.load("step-100.pt")["model"]} == {*state}
    assert (tmp_path / "step-100-dcp" / ".metadata").is_file()
    assert b'"weight"' in (tmp_path / "hf" / "model.safetensors").read_bytes()

    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "old.pt")
    run = {"model": model, "optimizer": optimizer, "rng": RNGState()}
    Snapshot.take("runs/7/step-0000000900.g1", run)
    (tmp_path / "hf" / "model.safetensors").unlink()
    (tmp_path / "hf").rmdir()
    shown = [block.removeprefix("$ ").split("\n$ ") for block in blocks(text)]
    for session in chain.from_iterable(shown):
        command, _, expected = session.partition("\n")
        program, *arguments = command.split()
        assert program == "actorsnap"
        found = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert (found.exit_code, found.stderr) == (0, ""), command
        assert without_numbers(found.stdout).rstrip() == without_numbers(expected).rstrip()
