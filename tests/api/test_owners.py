# SPDX-License-Identifier: Apache-2.0
"""The owner index of a snapshot of several ranks: verified, copied, recovered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

import actorsnap
from actorsnap import StateDict
from actorsnap.errors import ChecksumMismatch, FormatError
from actorsnap.format.manifest import COMMIT_KEY, decode_commit
from actorsnap.format.owners import decode_owners, deflate_owners, encode_owners
from tests.api.test_recover import files_in, save_by_ranks

ATTEMPT = "20260101T000000-0123abcd-1-89abcdef"
KEY = f"{ATTEMPT}/owners.json"
RANKS = 4


async def saved_at(tmp_path: Path) -> Path:
    await save_by_ranks(tmp_path / "s", RANKS)
    return tmp_path / "s"


def flipped(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


def of_another_attempt(data: bytes) -> bytes:
    owners = decode_owners(data, attempt=ATTEMPT, world_size=RANKS)
    return encode_owners(ATTEMPT.replace("2026", "2025"), RANKS, deflate_owners(owners))


def contradicting(data: bytes) -> bytes:
    """Says that nobody has entries of its own."""
    owners = decode_owners(data, attempt=ATTEMPT, world_size=RANKS)
    changed = msgspec.structs.replace(owners, private=())
    return encode_owners(ATTEMPT, RANKS, deflate_owners(changed))


BAD: dict[str, tuple[Callable[[bytes], bytes], type[FormatError]]] = {
    "a flipped bit": (flipped, ChecksumMismatch),
    "empty": (lambda data: b"", ChecksumMismatch),
    "of another attempt": (of_another_attempt, FormatError),
}


async def test_verify_checks_it(tmp_path: Path) -> None:
    saved = await saved_at(tmp_path)
    snapshot = actorsnap.Snapshot(saved)
    for level in ("quick", "full"):
        assert (await snapshot.verify(level)).ok
    good = (saved / KEY).read_bytes()
    for damage, kind in BAD.values():
        (saved / KEY).write_bytes(damage(good))
        (problem,) = (await snapshot.verify("quick")).problems
        assert isinstance(problem, kind)
        assert getattr(problem, "key", "") == KEY
    (saved / KEY).unlink()
    (problem,) = (await snapshot.verify("quick")).problems
    assert "the owner index is missing" in str(problem)
    (saved / KEY).write_bytes(contradicting(good))
    for level in ("quick", "full"):
        problems = (await snapshot.verify(level)).problems
        assert len(problems) == RANKS
        assert "does not have" in str(problems[0])


async def test_a_copy_has_it(tmp_path: Path) -> None:
    saved = await saved_at(tmp_path)
    await actorsnap.Snapshot(saved).copy_to(tmp_path / "copy")
    assert files_in(tmp_path / "copy") == files_in(saved)
    assert (await actorsnap.Snapshot(tmp_path / "copy").verify("full")).ok


@pytest.mark.parametrize("what", BAD)
async def test_a_bad_one_is_not_copied(tmp_path: Path, what: str) -> None:
    saved = await saved_at(tmp_path)
    damage, kind = BAD[what]
    (saved / KEY).write_bytes(damage((saved / KEY).read_bytes()))
    with pytest.raises(kind, match=r"owners\.json"):
        await actorsnap.Snapshot(saved).copy_to(tmp_path / "copy")
    assert not (tmp_path / "copy" / COMMIT_KEY).exists()


@pytest.mark.parametrize("what", [None, "missing", *BAD])
async def test_a_recovered_snapshot_has_it_if_it_is_intact(
    tmp_path: Path, what: str | None
) -> None:
    saved = await saved_at(tmp_path)
    (saved / COMMIT_KEY).unlink()
    if what == "missing":
        (saved / KEY).unlink()
    elif what is not None:
        (saved / KEY).write_bytes(BAD[what][0]((saved / KEY).read_bytes()))
    snapshot = actorsnap.Snapshot(saved)
    await snapshot.recover()
    features = decode_commit((saved / COMMIT_KEY).read_bytes()).features
    assert ("owners" in features) == (what is None)
    assert (await snapshot.verify("full")).ok
    assert torch.equal(await snapshot.read_object("3/own/x"), torch.full((5,), 3.0))


async def test_one_rank_needs_none(tmp_path: Path) -> None:
    await actorsnap.Snapshot.take(tmp_path, {"a": StateDict(x=torch.ones(3))})
    commit = decode_commit((tmp_path / COMMIT_KEY).read_bytes())
    assert "owners" not in commit.features
    assert not list(tmp_path.rglob("owners.json"))
