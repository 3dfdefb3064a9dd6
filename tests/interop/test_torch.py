# SPDX-License-Identifier: Apache-2.0
"""``actorsnap.interop.torch``: one import in place of ``torch.save`` and ``torch.load``."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from actorsnap import Options
from actorsnap.errors import ActorSnapError, NotASnapshot, UsageError
from actorsnap.interop.torch import load, save
from actorsnap.sync import Snapshot
from tests.pages import ROOT, all_blocks


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def checkpoint() -> dict[str, Any]:
    """The usual one, with memory shared within and across its keys; not in the order of keys."""
    model, optimizer = trained()
    base = torch.arange(12.0)
    return {
        "step": 3,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "shared": {"base": base, "part": base[2:5]},
        "elsewhere": {"rest": base[6:].view(2, 3)},
        "args": ("a", 1.5, None, b"x"),
    }


def same(left: Any, right: Any) -> bool:
    """Equal bit for bit, of the same types, in the same order."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return torch.equal(left, right) and left.dtype == right.dtype
    if isinstance(left, dict):
        metadata = [getattr(each, "_metadata", None) for each in (left, right)]
        keys = list(left) == list(right) and metadata[0] == metadata[1]
        return keys and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


TENSOR = torch.arange(6.0)


@pytest.mark.parametrize(
    "obj",
    [
        checkpoint(),
        checkpoint()["model"],
        OrderedDict(z={"x": 1}, a=TENSOR),
        {"model": {"w": TENSOR}},
        {1: {"w": TENSOR}, "b": 2},
        [TENSOR, {"again": TENSOR}, ()],
        (1, "x"),
        TENSOR,
        5,
        None,
        {},
        {"none": None, "empty": {}},
        {"a/b": {"%": TENSOR}, "0": {"": 1}},
    ],
    ids=lambda obj: f"{type(obj).__name__}-{str(obj)[:12]}",
)
def test_what_is_saved_is_loaded(tmp_path: Path, obj: Any) -> None:
    save(obj, tmp_path / "ckpt")
    assert same(load(tmp_path / "ckpt"), obj)
    torch.save(obj, tmp_path / "ckpt.pt")
    assert same(load(tmp_path / "ckpt.pt"), obj)  # what torch.save wrote, where it is
    Snapshot(tmp_path / "ckpt.pt").copy_to(tmp_path / "converted")
    assert same(load(tmp_path / "converted"), obj)


@pytest.mark.parametrize(
    "map_location", [None, "cpu", lambda storage, _: storage.clone(), lambda *_: None]
)
@pytest.mark.parametrize("write", [save, torch.save])
def test_shared_memory_is_shared_again(
    tmp_path: Path, write: Callable[..., None], map_location: Any
) -> None:
    write(checkpoint(), tmp_path / "ckpt")
    loaded = load(tmp_path / "ckpt", map_location)
    shared, rest = loaded["shared"], loaded["elsewhere"]["rest"]
    assert memory(shared["base"]) == memory(shared["part"]) == memory(rest)
    shared["base"].fill_(9)
    assert shared["part"].tolist() == [9.0] * 3
    assert rest.tolist() == [[9.0] * 3] * 2


def test_map_location_moves_every_tensor(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    state = {"a": [weight, (weight,)], "sparse": torch.eye(2).to_sparse()}
    save(state, tmp_path / "ckpt")
    loaded = load(tmp_path / "ckpt", "meta")
    [parameter, (again,)] = loaded["a"]
    assert type(parameter) is nn.Parameter
    assert parameter.requires_grad
    assert parameter.is_meta
    assert again.is_meta
    assert loaded["sparse"].is_meta
    called: list[str] = []
    load(tmp_path / "ckpt", lambda storage, location: called.append(location))
    assert called == ["cpu"]


def test_statefuls_restore_what_was_saved(tmp_path: Path) -> None:
    model, optimizer = trained()
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "both")
    save(model.state_dict(), tmp_path / "flat")
    for name in ("both", "flat"):
        other = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        Snapshot(tmp_path / name).restore({"model": other})
        assert same(other.state_dict(), model.state_dict())
    assert Snapshot(tmp_path / "both").verify("full").ok
    Snapshot.take(tmp_path / "taken", {"model": model, "optimizer": optimizer})
    loaded = load(tmp_path / "taken")
    assert same(loaded["model"], model.state_dict())


def test_a_failed_save_leaves_the_older_snapshot(tmp_path: Path) -> None:
    save({"step": 1}, tmp_path)
    with pytest.raises(UsageError, match="'model/bad'"):
        save({"step": 2, "bad": object()}, tmp_path)
    assert load(tmp_path) == {"step": 1}
    save({"step": 3}, tmp_path)
    assert load(tmp_path) == {"step": 3}


def test_what_is_refused(tmp_path: Path) -> None:
    torch.save(TENSOR, tmp_path / "file.pt")
    before = (tmp_path / "file.pt").read_bytes()
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: save(TENSOR, io.BytesIO()), "torch.save"),  # type: ignore[arg-type]
        (lambda: load(io.BytesIO()), "torch.load"),  # type: ignore[arg-type]
        (lambda: save(TENSOR, tmp_path / "file.pt"), "is a file"),
        (lambda: save(TENSOR, tmp_path / "new", pickle_module=io), "pickle_module"),
        (lambda: load(tmp_path / "file.pt", pickle_module=io), "pickle_module"),
        (lambda: load(tmp_path / "file.pt", weights_only=False), "allow_pickle"),
        (lambda: load(tmp_path / "file.pt", {"cuda:0": "cpu"}), "map_location"),  # type: ignore[arg-type]
    ]
    for call, text in refused:
        with pytest.raises(UsageError, match=text):
            call()
    with pytest.raises(NotASnapshot):
        load(tmp_path / "nothing")
    for device in ("cuda:99", "abacus"):  # before anything is looked for
        with pytest.raises(UsageError, match=f"'{device}' is not a device that"):
            load(tmp_path / "nothing", device)
    assert (tmp_path / "file.pt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["file.pt"]


class Custom:
    def __eq__(self, other: object) -> bool:
        return type(other) is Custom


def test_objects_need_allow_pickle(tmp_path: Path) -> None:
    options = Options(allow_pickle=True)
    save({"obj": Custom()}, tmp_path / "ckpt", options=options)
    assert load(tmp_path / "ckpt", options=options) == {"obj": Custom()}
    with pytest.raises(ActorSnapError, match="allow_pickle"):
        load(tmp_path / "ckpt")


def test_one_rank_alone_waits_for_nobody(tmp_path: Path) -> None:
    """As in ``if rank == 0: torch.save(...)``; there is no rank 0 here that could answer."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        options = Options(timeout_s=20.0)
        save(checkpoint(), tmp_path / "ckpt", options=options)
        assert same(load(tmp_path / "ckpt", options=options), checkpoint())
    finally:
        dist.destroy_process_group()


def test_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old").mkdir()
    torch.save({"step": 7}, "old/ckpt.pt")
    text = (ROOT / "docs/migrate/torch-save.md").read_text()
    model, optimizer = trained()
    (_, code), (_, printed) = all_blocks(text)
    exec(compile(code, "torch-save.md", "exec"), {"model": model, "optimizer": optimizer})
    assert capsys.readouterr().out == printed
    assert Snapshot("ckpt/latest").verify("full").ok
