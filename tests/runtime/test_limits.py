# SPDX-License-Identifier: Apache-2.0
"""What a cgroup leaves to its processes, from fake trees of files; and cores for them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from actorsnap.runtime import process
from actorsnap.runtime.process import cgroup_free_bytes

GIB = 1 << 30
V1_UNLIMITED = 0x7FFFFFFFFFFFF000


def group(folder: Path, limit: int | str, used: int, stat: str = "", *, v1: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if v1
        else ("memory.max", "memory.current")
    )
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(stat)


def free_bytes(tmp_path: Path, membership: str) -> int | None:
    (tmp_path / "membership").write_text(membership)
    return cgroup_free_bytes(tmp_path / "membership", tmp_path / "fs")


@pytest.mark.parametrize("limited", ["", "a", "a/b", "a/b/leaf"])
def test_the_limit_of_any_ancestor_counts(tmp_path: Path, limited: str) -> None:
    root = tmp_path / "fs"
    for path in ("a", "a/b", "a/b/leaf"):
        group(root / path, "max", GIB)
    group(root / limited, 2 * GIB, GIB)
    assert free_bytes(tmp_path, "0::/a/b/leaf\n") == GIB


def test_the_least_of_several_counts(tmp_path: Path) -> None:
    group(tmp_path / "fs/a", 8 * GIB, 7 * GIB)
    group(tmp_path / "fs/a/b", 4 * GIB, GIB)
    assert free_bytes(tmp_path, "0::/a/b\n") == GIB


def test_the_page_cache_is_not_used_memory(tmp_path: Path) -> None:
    stat = f"anon 5\ninactive_file {GIB}\nactive_file {GIB // 2}\ninactive_anon 7\n"
    group(tmp_path / "fs/a", 4 * GIB, 4 * GIB, stat)
    assert free_bytes(tmp_path, "0::/a\n") == GIB + GIB // 2


def test_v1_with_its_ancestors_and_cache(tmp_path: Path) -> None:
    memory = tmp_path / "fs/memory"
    stat = f"inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file 0\n"
    group(memory / "a", 3 * GIB, 2 * GIB, stat, v1=True)
    group(memory / "a/leaf", V1_UNLIMITED, GIB, v1=True)
    assert free_bytes(tmp_path, "5:cpu:/a/leaf\n4:memory,hugetlb:/a/leaf\n0::/\n") == 2 * GIB


def test_a_path_of_the_host_in_a_container(tmp_path: Path) -> None:
    group(tmp_path / "fs", 2 * GIB, GIB)
    assert free_bytes(tmp_path, "0::/docker/0123\n") == GIB


@pytest.mark.parametrize("membership", ["", "0::/a\n", "1:cpu:/\n"])
def test_no_limit(tmp_path: Path, membership: str) -> None:
    group(tmp_path / "fs/a", "max", GIB)
    assert free_bytes(tmp_path, membership) is None
    assert cgroup_free_bytes(tmp_path / "none", tmp_path / "none") is None


@pytest.mark.parametrize(
    ("environ", "gib"),
    [
        ({}, 12),
        ({"LOCAL_WORLD_SIZE": "1"}, 12),
        ({"LOCAL_WORLD_SIZE": "4"}, 3),
        ({"SLURM_NTASKS_PER_NODE": "2"}, 6),
        ({"LOCAL_WORLD_SIZE": "100000"}, 1 / 16),
        ({"WORLD_SIZE": "4"}, 12),  # perhaps on four machines
    ],
)
def test_the_ranks_of_a_machine_share_its_memory(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], gib: float
) -> None:
    memory = SimpleNamespace(available=20 * GIB)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    monkeypatch.setattr(process, "cgroup_free_bytes", lambda: None)
    assert process.default_budget_bytes(environ) == gib * GIB


@pytest.mark.parametrize(
    ("num_cores", "num_ranks", "environ", "has"),
    [
        (2, 1, {}, True),
        (1, 1, {}, False),
        (4, 2, {}, True),
        (3, 2, {}, False),
        (16, 1024, {}, False),  # all of them may be here
        (16, 1024, {"LOCAL_WORLD_SIZE": "8"}, True),
        (15, 1024, {"LOCAL_WORLD_SIZE": "8"}, False),
        (16, 1024, {"SLURM_NTASKS_PER_NODE": "8"}, True),
        (16, 1024, {"SLURM_NTASKS_PER_NODE": "8(x2)"}, False),
        (2, 1, {"LOCAL_WORLD_SIZE": "0"}, True),
    ],
)
def test_each_rank_here_has_a_core_for_a_process(
    monkeypatch: pytest.MonkeyPatch,
    num_cores: int,
    num_ranks: int,
    environ: dict[str, str],
    has: bool,
) -> None:
    monkeypatch.setattr(process, "usable_cores", lambda: num_cores)
    assert process.has_cores(num_ranks, environ) == has
