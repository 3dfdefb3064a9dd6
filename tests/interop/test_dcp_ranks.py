# SPDX-License-Identifier: Apache-2.0
"""``torch.distributed.checkpoint`` over snapshots, by real ranks (``actorsnap.interop.dcp``)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actorsnap.sync import Snapshot
from tests.ranks.models import MODULES
from tests.support.cases import slow
from tests.worlds import Director

pytestmark = pytest.mark.usefixtures("forker")


@pytest.fixture(scope="module")
def director() -> Iterator[Director]:
    imports = ("torch.distributed.checkpoint.state_dict", "actorsnap.interop.dcp")
    with Director("tests.interop.dcp_ranks", *MODULES, *imports) as director:
        yield director


class Ranks:
    def __init__(self, director: Director, folder: Path) -> None:
        self._director = director
        self._folder = folder
        self.path = str(folder / "s")

    def __call__(self, num_ranks: int, name: str, store: str = "tcp", **arguments: Any) -> Any:
        return self._director.play(
            "direct",
            num_ranks=num_ranks,
            name=name,
            path=self.path,
            folder=str(self._folder),
            store=store,
            **arguments,
        )


@pytest.fixture
def ranks(director: Director, tmp_path: Path) -> Ranks:
    return Ranks(director, tmp_path)


@pytest.mark.parametrize(
    ("num_ranks", "kind", "others"),
    [
        (2, "fsdp2", 4),
        slow(4, "fsdp2", 2),
        slow(4, "hsdp", 2),
        slow(2, "ddp", 3),
        slow(4, "fsdp2_and_tp", 4),
    ],
)
def test_training_state_round_trips_and_reshards(
    ranks: Ranks, num_ranks: int, kind: str, others: int
) -> None:
    ranks(num_ranks, "train", kind=kind)
    snapshot = Snapshot(ranks.path)
    assert snapshot.verify("full").ok
    assert len(snapshot.read_object("model/0.weight")) == 37
    assert ranks(others, "load", kind="ddp" if kind == "ddp" else "fsdp2") == [True] * others


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        slow("fsdp2", 3),
        slow("fsdp2", 1),
        slow("fsdp2", 2),
        ("hsdp", 2),
        slow("hsdp", 3),
        slow("ddp", 3),
    ],
)
def test_folders_of_torchs_writer(ranks: Ranks, kind: str, others: int) -> None:
    """Restored in place by other numbers of ranks, loaded by DCP, and converted."""
    ranks(4, "torchs", kind=kind)
    folder, to = ranks.path, "ddp" if kind == "ddp" else "fsdp2"
    Snapshot(folder).copy_to(folder + "-copy")
    assert Snapshot(folder + "-copy").verify("full").has_checksums
    assert not Snapshot(folder).verify("full").has_checksums
    for ranks.path in (folder, folder + "-copy"):
        assert ranks(others, "restore", kind=to) == [True] * others
        assert ranks(others, "load", kind=to) == [True] * others
    # Without collectives each rank has what it saved itself.
    ranks.path = folder + "-alone"
    assert ranks(4, "restore", kind=kind) == [True] * 4
    assert ranks(4, "load", kind=kind) == [True] * 4


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_the_ranks_are_those_of_the_plans(ranks: Ranks, store: str) -> None:
    assert ranks(4, "groups", store) == [[0, 1], [0, 1], [2, 3], [2, 3]]


@pytest.mark.parametrize("store", ["tcp", slow("file")])
def test_without_collectives(ranks: Ranks, store: str) -> None:
    assert ranks(2, "alone", store) == [0, 1]


@pytest.mark.parametrize("store", ["tcp", slow("file")])
def test_cached_plans(ranks: Ranks, store: str) -> None:
    assert ranks(2, "cached", store) == [[0, 1, 2, 3]] * 2


def test_every_layout_into_every_other(ranks: Ranks) -> None:
    assert all(ranks(4, "reshard"))


@pytest.mark.parametrize(
    ("num_ranks", "kind", "store"),
    [(2, "fsdp2", "file"), slow(2, "fsdp2", "tcp"), slow(4, "hsdp", "tcp"), slow(2, "ddp", "tcp")],
)
def test_calls_without_collectives(ranks: Ranks, num_ranks: int, kind: str, store: str) -> None:
    assert ranks(num_ranks, "native", store, kind=kind) == [0] * num_ranks
    assert Snapshot(ranks.path).verify("full").ok
    ranks(3, "load", kind="ddp" if kind == "ddp" else "fsdp2")


@pytest.mark.parametrize(("num_ranks", "few"), [(4, 1), slow(18, None)])
def test_many_ranks_are_read_by_the_owner_index(
    ranks: Ranks, num_ranks: int, few: int | None
) -> None:
    ranks(num_ranks, "many_save")
    for begun in ranks(2, "many_load", saved_by=num_ranks, few=few):
        assert begun == 6
    for where in ("ours", "torch", "alone"):
        snapshot = Snapshot(f"{ranks.path}-{where}")
        assert snapshot.verify("full").ok
        assert snapshot.read_object("model/layer3")[1].tolist() == [3006.0 + n for n in range(6)]


@pytest.mark.parametrize("how", ["THREAD", slow("PROCESS")])
def test_torchs_async_save(ranks: Ranks, how: str) -> None:
    assert ranks(2, "asynchronous", how=how) == [True] * 2
    assert all(Snapshot(f"{ranks.path}-{number}").verify("full").ok for number in range(3))


def test_torchs_own_writer_leaves_a_mixture(ranks: Ranks) -> None:
    """If this fails, torch has been repaired, and docs/migrate/dcp.md is out of date."""
    assert ranks(2, "mixed") == [[1.0, 2.0]] * 2


OLD, NEW = [1.0], [2.0]


@pytest.mark.parametrize(
    ("hook", "rank", "left"),
    [
        ("set_up_storage_writer", 1, OLD),
        ("prepare_local_plan", 1, OLD),
        ("prepare_global_plan", 0, OLD),
        ("before_write_data", 1, OLD),
        slow("before_write_data", 0, OLD),
        slow("resolve_data", 1, OLD),
        ("resolve_data", 0, OLD),
        ("after_write_data", 1, NEW),
        ("finish", 0, NEW),
    ],
)
def test_a_rank_that_fails_leaves_a_whole_snapshot(
    ranks: Ranks, hook: str, rank: int, left: list[float]
) -> None:
    for said in ranks(2, "fault", hook=hook, rank=rank):
        assert rank in said["failed"]
        assert "injected" in said["errors"][str(rank)]
        assert said["numbers"] == left
        assert said["folders"] == 1  # nothing is left of the failed save


@pytest.mark.parametrize(
    ("way", "hook", "rank"),
    [
        ("torch", "set_up_planner", 1),
        slow("torch", "create_local_plan", 1),
        ("torch", "create_global_plan", 0),
        ("torch", "finish_plan", 1),
        slow("torch", "finish_plan", 0),
        slow("torch", "write_at", 1),
        ("torch", "put", 0),
        slow("ours", "finish_plan", 1),
        ("ours", "state_dict", 1),
        slow("ours", "state_dict", 0),
        ("ours", "write_at", 1),
        slow("ours", "put", 0),
        ("async", "state_dict", 1),
        ("async", "write_at", 1),
        slow("async", "finish_plan", 1),
    ],
)
def test_a_failure_of_planner_state_or_storage(
    ranks: Ranks, way: str, hook: str, rank: int
) -> None:
    for said in ranks(2, "fails", way=way, hook=hook, rank=rank):
        assert rank in said["failed"]
        assert re.search("injected|a scripted fault", said["errors"][str(rank)])
        assert said["numbers"] == OLD
        assert said["folders"] == 1


def test_cached_plans_after_a_failure(ranks: Ranks) -> None:
    assert ranks(2, "cached_fault") == [[0, 1, 1, 3, 4]] * 2


@pytest.mark.parametrize("way", ["torch", "ours"])
def test_a_killed_rank(director: Director, ranks: Ranks, tmp_path: Path, way: str) -> None:
    said = director.play("direct_dies", path=ranks.path, folder=str(tmp_path), way=way)
    # Through torch's function, DCP's own collective fails first.
    assert said == ({"1": "SnapshotAborted"} if way == "ours" else {"gloo": "RuntimeError"})
    snapshot = Snapshot(ranks.path)
    assert snapshot.verify("full").ok
    assert snapshot.read_object("a/n") == 1
    assert ranks(2, "fails", way="ours", hook="state_dict", rank=0)[0]["folders"] == 1


@pytest.mark.parametrize(
    ("hook", "failed", "kinds"),
    [
        ("read_metadata", [1], ["ValueError"]),
        ("read_data", [1], ["ValueError"]),
        ("no_snapshot", [0, 1], ["NotASnapshot"]),
        ("no_snapshot of ours", [0, 1], ["NotASnapshot"]),
    ],
)
def test_a_failed_load_fails_on_all_ranks(
    ranks: Ranks, hook: str, failed: list[int], kinds: list[str]
) -> None:
    said = ranks(2, "read_fault", hook=hook, rank=1)
    texts = [each.pop("text") for each in said]
    assert said == [{"failed": failed, "kinds": kinds}] * 2
    if hook == "no_snapshot of ours":  # once, not per rank
        assert [text.count("NotASnapshot: ") for text in texts] == [1, 1]
        assert "Traceback" not in "".join(texts)


def test_torchs_state_dicts_with_each_option(ranks: Ranks) -> None:
    cases = ranks(2, "state_dict_options")
    assert len(cases[0]) == 6
    assert all(all(case.values()) for case in cases), cases


def test_parts_of_a_model(ranks: Ranks) -> None:
    found = ranks(2, "submodules")
    part = [f"1.{name}" for name in ("up.weight", "down.weight", "down.bias", "norm.weight")]
    for of_rank in found:
        assert of_rank["True"] == of_rank["False"]
        assert set(part) <= set(of_rank["True"])
        assert "3.weight" not in of_rank["True"]


def test_ranks_that_load_one_torch_file_read_it_once(ranks: Ranks) -> None:
    """torch has BroadcastingTorchSaveReader and DynamicMetaLoadPlanner for that."""
    found = ranks(2, "torch_file")
    table = 8 << 20
    assert all(one["nbytes"] > table for one in found)
    assert sum(one["bytes_read"] for one in found) < 1.1 * found[0]["size"]
