# SPDX-License-Identifier: Apache-2.0
"""Distributed tensors of real models, in real processes over gloo (``dist_cases``)."""

from __future__ import annotations

import pytest

from tests.state.dist_world import run_worlds

NAMES = {
    2: ["ddp", "lazy_steps", "refusals", "tensor_parallel"],
    4: [
        "ddp_inside",
        "dtensors",
        "fsdp1",
        "fsdp1_flat",
        "fsdp2",
        "fsdp2_and_tensor_parallel",
        "fsdp2_other_dim",
        "hsdp",
        "restored",
        "sharded_tensors",
        "sub_meshes",
    ],
}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    return run_worlds(tmp_path_factory.mktemp("worlds"), NAMES)


@pytest.mark.parametrize(
    ("world", "name"), [(world, name) for world, names in NAMES.items() for name in names]
)
def test_real_ranks(worlds: dict[int, dict[str, str]], world: int, name: str) -> None:
    failures = worlds[world]
    assert failures.get("*", "") == ""
    if name not in failures:
        pytest.fail("the world stopped at an earlier case", pytrace=False)
    assert failures[name] == ""


def test_no_case_is_left_out(worlds: dict[int, dict[str, str]]) -> None:
    for world, names in NAMES.items():
        assert set(worlds[world]) <= set(names), "add it to NAMES"
