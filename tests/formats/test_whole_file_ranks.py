# SPDX-License-Identifier: Apache-2.0
"""Files of whole tensors, by ``torch.save`` or in safetensors, restored by real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.formats.checkpoints import write_repo, write_safetensors
from tests.formats.whole_file_ranks import make_tensors
from tests.support.cases import slow
from tests.worlds import Director

pytestmark = pytest.mark.usefixtures("forker")

NBYTES = sum([tensor.nbytes for tensor in make_tensors().values()])
SHARED_NBYTES = make_tensors()["shared"].nbytes


@pytest.fixture(scope="module")
def director() -> Iterator[Director]:
    with Director("tests.formats.whole_file_ranks") as director:
        yield director


def write(kind: str, folder: Path) -> Path:
    if kind == "repo":
        write_repo(folder, make_tensors())
        return folder
    if kind == "safetensors":
        write_safetensors(folder / "x.safetensors", make_tensors())
        return folder / "x.safetensors"
    is_zip = kind == "torch"
    torch.save(make_tensors(), folder / "x.pt", _use_new_zipfile_serialization=is_zip)
    return folder / "x.pt"


@pytest.mark.parametrize(
    ("kind", "num_ranks", "mode"),
    [
        ("torch", 2, "shared"),
        ("safetensors", 2, "shared"),
        slow("torch", 2, "direct"),
        slow("older torch", 3, "shared"),
        slow("repo", 3, "shared"),
        slow("repo", 2, "direct"),
    ],
)
def test_restores_dtensors(
    tmp_path: Path, director: Director, kind: str, num_ranks: int, mode: str
) -> None:
    path = str(write(kind, tmp_path))
    said = director.play("direct", num_ranks=num_ranks, path=path, mode=mode)
    assert all(found["is_complete"] and all(found["equal"]) for found in said)
    num_read = sum(found["num_read"] for found in said)
    if mode == "shared":  # each byte once, over all ranks; and the rest of blocks that are cut
        assert NBYTES <= num_read < 1.05 * NBYTES
        assert min(found["num_read"] for found in said) > 0
    else:
        assert num_read >= NBYTES + SHARED_NBYTES
