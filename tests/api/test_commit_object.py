# SPDX-License-Identifier: Apache-2.0
"""The commit object's two names, and complete attempts that lost theirs."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch

from actorsnap import NotASnapshot, ObjectExists, Options, Snapshot, StateDict, sync
from actorsnap.format.layout import Attempt
from actorsnap.format.manifest import COMMIT_KEY, OLDER_COMMIT_KEY, decode_commit
from actorsnap.runtime import maintenance
from actorsnap.runtime.location import make_location
from actorsnap.runtime.process import host_id
from actorsnap.runtime.script import run_async
from actorsnap.runtime.source import Source
from actorsnap.testing import FaultyStorage
from tests.api.faults import faulty, faulty_url
from tests.api.places import assert_whole, leftovers, make_both, make_older, number_at, state
from tests.api.test_replaced import meddling
from tests.support.cases import slow
from tests.support.manifests import document_of, encoded

FAST = Options(fsync=False)
_DEAD_PID = (1 << 22) + 1
"""Above what Linux gives to any process."""


async def take(url: object, number: int, **how: Any) -> None:
    await Snapshot.take(str(url), state(number), options=FAST, **how)


def names(folder: Path) -> set[str]:
    """What lies at a path, but for attempts."""
    return {name for name in os.listdir(folder) if Attempt.parse(name) is None}


def copy_without_commit(source: Path, to: Path, *, pid: int = _DEAD_PID, host: str = "") -> str:
    """What a copying program leaves that skips the commit object; returns the attempt.

    The attempt is that of another process, which has ended.
    """
    attempt = decode_commit((source / COMMIT_KEY).read_bytes()).attempt
    parsed = Attempt.parse(attempt)
    assert parsed is not None
    created_s = parsed.created_s - 10
    other = str(
        msgspec.structs.replace(parsed, created_s=created_s, pid=pid, host=host or host_id())
    )
    shutil.copytree(source / attempt, to / other)
    manifest = to / other / "manifest" / "0.json"
    manifest.write_bytes(manifest.read_bytes().replace(attempt.encode(), other.encode()))
    return other


@pytest_asyncio.fixture
async def saved(tmp_path: Path) -> Path:
    await take(tmp_path / "saved", 1)
    return tmp_path / "saved"


# Two names ------------------------------------------------------------------------------------


async def test_the_commit_object_is_no_dotfile(saved: Path) -> None:
    assert names(saved) == {"actorsnap.json"}


async def test_the_older_name_is_read(saved: Path) -> None:
    make_older(saved)
    await assert_whole(saved, 1)
    found = await run_async(maintenance.find_snapshots(source_at(saved.parent)))
    assert found["saved"] is not None


async def test_the_older_name_counts_as_taken(saved: Path, tmp_path: Path) -> None:
    make_older(saved)
    before = sorted(os.listdir(saved))
    with pytest.raises(ObjectExists) as caught:
        await take(saved, 2)
    assert str(caught.value).startswith(f"{saved} already has a snapshot. Save to another path")
    assert "actorsnap.json" not in str(caught.value)
    await take(tmp_path / "other", 2)
    with pytest.raises(ObjectExists, match="another snapshot is committed there"):
        await Snapshot(tmp_path / "other").copy_to(saved)
    assert sorted(os.listdir(saved)) == before


async def test_a_damaged_one_of_the_older_name_counts_as_taken(saved: Path) -> None:
    make_older(saved)
    (saved / OLDER_COMMIT_KEY).write_bytes(b"{}")
    with pytest.raises(ObjectExists, match=r"damaged snapshot \(\.actorsnap: "):
        await take(saved, 2)


async def test_the_newer_name_counts_where_both_are_there(saved: Path) -> None:
    await make_both(saved, 2)
    assert await number_at(saved) == 2
    with pytest.raises(ObjectExists):
        await take(saved, 3)
    (saved / COMMIT_KEY).write_bytes(b"{}")
    with pytest.raises(ObjectExists, match=r"damaged snapshot \(actorsnap\.json: "):
        await take(saved, 3)


@pytest.mark.parametrize("has_both", [False, True])
async def test_an_older_snapshot_is_replaced(saved: Path, has_both: bool) -> None:
    if has_both:
        await make_both(saved, 2)
    else:
        make_older(saved)
    await take(saved, 3, overwrite=True)
    await assert_whole(saved, 3)
    assert names(saved) == {COMMIT_KEY}


@pytest.mark.parametrize("has_both", [False, True])
async def test_an_older_snapshot_is_deleted(saved: Path, has_both: bool) -> None:
    if has_both:
        await make_both(saved, 2)
    else:
        make_older(saved)
    await Snapshot(saved).delete()
    assert not saved.exists()


@pytest.mark.parametrize("has_both", [False, True])
async def test_a_copy_has_the_newer_name(saved: Path, tmp_path: Path, has_both: bool) -> None:
    if has_both:
        await make_both(saved, 2)
        shutil.rmtree(saved / make_garbage_of(saved))
    else:
        make_older(saved)
    await take(tmp_path / "to", 7)
    make_older(tmp_path / "to")
    await Snapshot(saved).copy_to(tmp_path / "to", overwrite=True)
    await assert_whole(tmp_path / "to", 2 if has_both else 1)
    assert names(tmp_path / "to") == {COMMIT_KEY}
    assert (await Snapshot(saved).copy_to(tmp_path / "to")).was_there


def make_garbage_of(root: Path) -> str:
    return decode_commit((root / OLDER_COMMIT_KEY).read_bytes()).attempt


async def test_collecting_garbage_takes_the_older_name_first(saved: Path) -> None:
    older = await make_both(saved, 2)
    report = await collect(saved)
    assert all(key.startswith(f"{older}/") for key in report.deleted)
    assert not report.kept
    assert names(saved) == {COMMIT_KEY}
    await assert_whole(saved, 2)


async def test_a_damaged_newer_one_keeps_what_the_older_one_names(saved: Path) -> None:
    older = await make_both(saved, 2)
    (saved / older / "manifest" / "0.json").unlink()  # by which it would count as complete
    (saved / COMMIT_KEY).write_bytes(b"{}")
    assert (await collect(saved)).deleted == []
    assert names(saved) == {COMMIT_KEY, OLDER_COMMIT_KEY}
    assert (saved / older / "data").exists()


@pytest.mark.parametrize("how", ["restore", "verify"])
async def test_an_older_snapshot_is_replaced_between_two_reads(saved: Path, how: str) -> None:
    """The newer name is not there yet, the older one not any more."""
    make_older(saved)
    with meddling(OLDER_COMMIT_KEY, [lambda: take(saved, 2, overwrite=True)]):
        snapshot = Snapshot(faulty_url(saved))
        if how == "restore":
            target = state(-1)
            await snapshot.restore(target)
            assert target["progress"]["step"] == 2
        else:
            assert (await snapshot.verify("full")).ok


async def test_a_reader_of_an_older_snapshot_starts_over(saved: Path) -> None:
    make_older(saved)
    target = state(-1)
    with meddling("/data/", [lambda: take(saved, 2, overwrite=True)]):
        await Snapshot(faulty_url(saved)).restore(target)
    assert target["progress"]["step"] == 2


# Complete attempts without a commit object ----------------------------------------------------


def source_at(path: Path) -> Source:
    return Source(make_location(str(path), None), FAST)


async def collect(path: Path, **how: Any) -> maintenance.Collected:
    return await run_async(maintenance.collect(source_at(path), **{"force": False, **how}))


async def test_the_error_names_the_cause_and_the_way_out(saved: Path, tmp_path: Path) -> None:
    to = tmp_path / "a place"
    attempt = copy_without_commit(saved, to)
    with pytest.raises(NotASnapshot) as caught:
        await Snapshot(to).get_manifest()
    assert caught.value.found == "unfinished"
    assert "or a copy left actorsnap.json out." in str(caught.value)
    assert f"`actorsnap recover {shlex.quote(str(to))}`" in str(caught.value)
    assert attempt in str(caught.value)
    (to / attempt / "manifest" / "0.json").unlink()
    with pytest.raises(NotASnapshot, match="only unfinished attempts") as caught:
        await Snapshot(to).get_manifest()
    assert "recover" not in str(caught.value)


@pytest.mark.parametrize("overwrite", [False, True])
async def test_a_take_leaves_complete_attempts_alone(
    saved: Path, tmp_path: Path, overwrite: bool, caplog: pytest.LogCaptureFixture
) -> None:
    to = tmp_path / "to"
    complete = copy_without_commit(saved, to)
    incomplete = copy_without_commit(saved, to, pid=_DEAD_PID + 1)
    (to / incomplete / "manifest" / "0.json").unlink()
    with caplog.at_level(logging.WARNING, "actorsnap"):
        await take(to, 2, overwrite=overwrite)
    assert (to / complete / "manifest" / "0.json").exists()
    assert not (to / incomplete).exists()
    [line] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert complete in line
    assert incomplete not in line
    assert "`actorsnap recover`" in line
    assert await number_at(to) == 2
    # Now there is a commit object, and garbage is garbage.
    caplog.clear()
    with caplog.at_level(logging.WARNING, "actorsnap"):
        await take(to, 3, overwrite=True)
    assert not (to / complete).exists()
    assert not caplog.records


@pytest.mark.parametrize("by", [("process", "thread"), slow(("thread", "process"))])
async def test_pending_saves_to_a_fresh_path_are_no_matter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, by: tuple[str, str]
) -> None:
    """The later one has stored everything when the first commits."""
    states = {"m": StateDict(x=torch.ones(20 << 20))}, {"m": StateDict(x=torch.ones(1))}
    await Snapshot.take(tmp_path / "warm", states[1], options=Options(offload="process"))
    with caplog.at_level(logging.WARNING, "actorsnap"):
        pending = [
            await Snapshot.async_take(
                tmp_path / "s", state, overwrite=True, options=Options(offload=how)
            )
            for state, how in zip(states, by, strict=True)
        ]
        for each in pending:
            await each.wait()
    assert not caplog.records


async def test_a_complete_attempt_that_may_still_be_saved(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another machine, or a live process of this one, has stored all manifests."""
    to = tmp_path / "to"
    lost = copy_without_commit(saved, to)
    elsewhere = copy_without_commit(saved, to, host="f" * 8)
    alive = copy_without_commit(saved, to, pid=os.getppid())
    report = await collect(to)
    assert (report.deleted, report.kept) == ([], [lost])
    assert report.left == sorted([elsewhere, alive])
    with caplog.at_level(logging.WARNING, "actorsnap"):
        await take(to, 2)
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert [[name in line for name in (lost, elsewhere, alive)] for line in lines] == [
        [True, False, False],
        [False, True, True],
    ]
    assert ["may still be saved" in line for line in lines] == [False, True]
    for name in (lost, elsewhere, alive):
        assert (to / name / "manifest" / "0.json").exists()
    (to / COMMIT_KEY).unlink()
    # By force they are garbage, but for what keeps complete ones.
    report = await collect(to, force=True)
    assert report.deleted == []
    assert {lost, elsewhere, alive} < {*report.kept}
    assert report.left == []


async def test_a_snapshot_of_this_process_that_lost_its_commit_object(saved: Path) -> None:
    attempt = attempt_at(saved)
    (saved / COMMIT_KEY).unlink()
    await take(saved, 2)
    assert (saved / attempt / "manifest" / "0.json").exists()


def attempt_at(folder: Path) -> str:
    return decode_commit((folder / COMMIT_KEY).read_bytes()).attempt


@pytest.mark.parametrize("how", ["take", "copy_to", "collect"])
async def test_a_copy_of_a_deleted_snapshot(saved: Path, tmp_path: Path, how: str) -> None:
    """It has the same attempt, of which nothing is needed where it was deleted."""
    await take(tmp_path / "other", 2)
    attempt, copied = attempt_at(saved), tmp_path / "copied"
    shutil.copytree(saved / attempt, copied / attempt)
    before = files_in(copied)
    await Snapshot(saved).delete()
    if how == "take":
        await take(copied, 3)
    elif how == "copy_to":
        await Snapshot(tmp_path / "other").copy_to(copied)
    else:
        assert (await collect(copied)).kept == [attempt]
    after = files_in(copied)
    assert before.items() <= after.items()
    if how == "collect":
        assert after == before


async def test_a_deleted_snapshot_that_is_copied_back(saved: Path, tmp_path: Path) -> None:
    attempt = attempt_at(saved)
    shutil.copytree(saved, tmp_path / "kept")
    await Snapshot(saved).delete()
    shutil.copytree(tmp_path / "kept" / attempt, saved / attempt)
    report = await collect(saved)
    assert (report.deleted, report.kept) == ([], [attempt])
    await Snapshot(saved).recover()
    await assert_whole(saved, 1)


def files_in(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


async def test_what_this_process_aborted_is_kept_elsewhere(tmp_path: Path) -> None:
    """A copy of the aborted attempt, made before the next take deletes it."""
    url, copied = tmp_path / "s", tmp_path / "copied"
    await abort_at_commit(url)
    shutil.copytree(url, copied)
    before = files_in(copied)
    assert (await collect(copied)).deleted == []
    assert files_in(copied) == before
    await take(url, 2)
    assert await leftovers(url) == []


async def abort_at_commit(url: Path) -> None:
    """A storage that fails from the commit on: the complete attempt is left there."""
    fault = {"fail_at": 1, "fail_verbs": ["put_if_absent", "delete"], "is_lasting": True}
    with (
        faulty(lambda inner: FaultyStorage(inner, **fault)),  # type: ignore[arg-type]
        pytest.raises(Exception, match="a scripted fault"),
    ):
        await take(faulty_url(url), 1)
    assert list(url.glob("*/manifest/0.json"))


async def test_what_this_process_aborted_is_deleted(tmp_path: Path) -> None:
    url = tmp_path / "s"
    await abort_at_commit(url)
    await take(url, 2)
    assert await leftovers(url) == []


async def test_a_copy_leaves_complete_attempts_alone(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    to = tmp_path / "to"
    complete = copy_without_commit(saved, to)
    with caplog.at_level(logging.WARNING, "actorsnap"):
        await Snapshot(saved).copy_to(to)
    assert (to / complete / "manifest" / "0.json").exists()
    assert complete in caplog.text


@pytest.mark.parametrize("world_size", [2, 3])
async def test_every_rank_of_the_recorded_world_size_counts(
    saved: Path, tmp_path: Path, world_size: int
) -> None:
    """Two manifests are there."""
    attempt = copy_without_commit(saved, tmp_path / "to")
    path = tmp_path / "to" / attempt / "manifest" / "0.json"
    manifest = document_of(path.read_bytes())
    manifest["save"]["world_size"] = world_size
    path.write_bytes(encoded(manifest))
    path.with_name("1.json").write_bytes(encoded(manifest | {"rank": 1}))
    await take(tmp_path / "to", 2)
    assert path.exists() == (world_size == 2)


async def test_collecting_keeps_complete_attempts(saved: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    complete = copy_without_commit(saved, to)
    incomplete = copy_without_commit(saved, to, pid=_DEAD_PID + 1)
    (to / incomplete / "manifest" / "0.json").unlink()
    found = await run_async(maintenance.find_leftovers(source_at(to)))
    assert {each.attempt: each.is_complete for each in found} == {complete: True, incomplete: False}
    report = await collect(to)
    assert (report.kept, report.left) == ([complete], [])
    assert report.deleted
    assert not (to / incomplete).exists()
    assert (await collect(to, force=True)).kept == [complete]
    report = await collect(to, deletable=[complete])
    assert len(report.deleted) == 3
    assert not to.exists()


def test_a_deleted_snapshot_leaves_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = tmp_path / "s"
    sync.Snapshot.take(url, state(1), options=FAST)
    removed, unlink = [], os.unlink

    def logged(path: Any, **how: Any) -> None:
        removed.append(str(path))
        unlink(path, **how)

    monkeypatch.setattr(os, "unlink", logged)
    sync.Snapshot(url).delete()
    kinds = [os.path.basename(path) for path in removed]
    assert kinds[:2] == [COMMIT_KEY, "0.json"]
    assert len(kinds) == 4
