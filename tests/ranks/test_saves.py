# SPDX-License-Identifier: Apache-2.0
"""Snapshots that several real ranks take together, read by nothing but the format's page."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actorsnap.errors import IncompatibleState
from actorsnap.format.manifest import COMMIT_KEY, decode_commit
from actorsnap.sync import Snapshot
from tests.ranks.assembled import assemble
from tests.ranks.models import MODULES
from tests.support import forker
from tests.support.cases import slow
from tests.worlds import ROOT, Director

pytestmark = pytest.mark.usefixtures("forker")

LEAVES = """
import sys, torch
from actorsnap import StateDict
from actorsnap.sync import Snapshot
state = {"own": StateDict(x=torch.ones(10_000_000))}
pending = Snapshot.async_take(sys.argv[1], state)
"""


@pytest.fixture(scope="module")
def director() -> Iterator[Director]:
    with Director("tests.ranks.saves", *MODULES) as director:
        yield director


def _flat(value: Any, prefix: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return {
            k: v for name, item in value.items() for k, v in _flat(item, f"{prefix}/{name}").items()
        }
    return {prefix: value}


@pytest.mark.parametrize(
    ("num_ranks", "kind"),
    [
        (2, "ddp"),
        slow(4, "ddp"),
        slow(2, "zero"),
        slow(2, "fsdp2"),
        slow(4, "hsdp"),
        slow(2, "tensor_parallel"),
        (4, "fsdp2_and_tp"),
        (3, "sharded_tensor"),
        (2, "pipeline"),
    ],
)
def test_what_ranks_hold_is_what_is_stored(
    director: Director, tmp_path: Path, num_ranks: int, kind: str
) -> None:
    path = str(tmp_path / "snapshot")
    said = director.play(
        "direct_take", num_ranks=num_ranks, kind=kind, path=path, folder=str(tmp_path)
    )
    assert said == [{"path": path, "metadata": {"by": 0}, "again": path + "-again"}] * num_ranks
    for where in (path, path + "-again"):
        found = assemble(Path(where))
        # Norms under FSDP2 over tensor parallel lie on a mesh of each column.
        assert (found.num_duplicates > 0) == (kind == "fsdp2_and_tp")
        for rank in range(num_ranks):
            expected = torch.load(tmp_path / f"expected{rank}.pt")
            for leaf, value in _flat(expected, "").items():
                if not isinstance(value, torch.Tensor):
                    continue
                name = leaf[1:]
                if (rank, name) in found.private:
                    stored = found.private[rank, name]
                else:
                    stored = found.tensors[name]
                torch.testing.assert_close(stored, value, rtol=0, atol=0, msg=name)


def test_a_save_does_not_fail_for_its_owner_index(director: Director, tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    said = director.play("direct_take_without_index", num_ranks=2, path=str(path))
    assert said == [{"is_ok": True, "is_same": True}] * 2
    assert "owners" not in decode_commit((path / COMMIT_KEY).read_bytes()).features
    assert not [*path.rglob("owners.json")]


@pytest.mark.parametrize(
    ("kind", "offload"),
    [
        ("ddp", "thread"),
        slow("fsdp2", "thread"),
        ("fsdp2", "process"),
        slow("two_meshes", "thread"),
    ],
)
def test_ranks_train_on_while_they_are_staged_lazily(
    director: Director, tmp_path: Path, kind: str, offload: str
) -> None:
    path = str(tmp_path / "s")
    said = director.play(
        "direct_train_on",
        num_ranks=2,
        kind=kind,
        path=path,
        folder=str(tmp_path),
        is_guarded=True,
        offload=offload,
    )
    assert said == [{"hooks": 0}] * 2
    found = assemble(Path(path))
    for rank in range(2):
        for leaf, value in _flat(torch.load(tmp_path / f"expected{rank}.pt"), "").items():
            if isinstance(value, torch.Tensor):
                stored = found.private.get((rank, leaf[1:]))
                stored = found.tensors[leaf[1:]] if stored is None else stored
                torch.testing.assert_close(stored, value, rtol=0, atol=0, msg=leaf)


@pytest.mark.few(1)
@pytest.mark.parametrize("offload", ["thread", "process"])
def test_a_step_without_a_guard_ends_the_save_on_all_ranks(
    director: Director, tmp_path: Path, offload: str
) -> None:
    """Parameters of FSDP have no versions that move: the step's counters have."""
    said = director.play(
        "direct_train_on",
        num_ranks=2,
        kind="fsdp2",
        path=str(tmp_path / "s"),
        folder=str(tmp_path),
        is_guarded=False,
        offload=offload,
    )
    assert said[0] == said[1]
    kind, fields = said[0]["error"]
    assert kind == "StateChanged"
    assert fields["path"].partition("/")[0] in ("model", "optim")
    assert fields["rank"] in (0, 1)


def test_a_lost_rank_lets_the_others_step(director: Director, tmp_path: Path) -> None:
    (said,) = director.play("direct_lose", num_ranks=2, path=str(tmp_path / "s"))
    assert "snapshot aborted" in said["error"]
    assert 0 < said["waited_s"] < 30
    assert said["hooks"] == 0


def test_what_nobody_waits_for_is_saved_before_the_ranks_exit(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            forker.command("-c", LEAVES, str(path)),
            cwd=ROOT,
            env={**os.environ, **job, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    assert not any("aborted" in each for each in said), said
    assert sorted(assemble(path).private) == [(0, "own/x"), (1, "own/x")]


def test_tensors_of_one_name_on_several_meshes(director: Director, tmp_path: Path) -> None:
    """Each rank's own ones are stored, and only who saved them can have them."""
    path = str(tmp_path / "s")
    director.play("direct_take", num_ranks=4, kind="experts", path=path, folder=str(tmp_path))
    snapshot = Snapshot(path)
    assert snapshot.verify("full").ok
    expected = torch.load(tmp_path / "expected0.pt")
    found = snapshot.get_state_dict_for_key("shared")
    assert torch.equal(found["w.weight"], expected["shared"]["w.weight"])
    with pytest.raises(IncompatibleState, match="ranks stored different values"):
        snapshot.get_state_dict_for_key("own")


def test_an_embedding_that_two_stages_share_is_one_tensor(
    director: Director, tmp_path: Path
) -> None:
    """Each of them stores its own; whoever reads it finds that they are equal."""
    path = str(tmp_path / "s")
    director.play("direct_take", num_ranks=4, kind="tied", path=path, folder=str(tmp_path))
    expected: dict[str, torch.Tensor] = {}
    for rank in range(4):
        expected |= _flat(torch.load(tmp_path / f"expected{rank}.pt"), "")
    shards = {leaf[1:]: value for leaf, value in expected.items() if "scale" not in leaf}
    for where in (path, path + "-again"):
        assert Snapshot(where).verify("full").ok
        found = assemble(Path(where))
        assert found.num_duplicates == 2, "a part by each rank of the other stage"
        assert found.tensors.keys() == shards.keys()
        for name, value in shards.items():
            assert torch.equal(found.tensors[name], value), name
            assert torch.equal(Snapshot(where).read_object(name), value), name


@pytest.mark.parametrize("offload", ["thread", slow("process")])
def test_ranks_save_and_restore_values(director: Director, tmp_path: Path, offload: str) -> None:
    path = tmp_path / "s"
    for said in director.play("direct_values", path=str(path), offload=offload):
        assert said == [
            "'equal/settings' is a tests.ranks.saves.Settings, which is not in allowed_types"
        ]
    assert decode_commit((path / COMMIT_KEY).read_bytes()).features[-1] == "values"
    assert Snapshot(path).read_object("2/own/settings/name") == "2"
