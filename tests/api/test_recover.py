# SPDX-License-Identifier: Apache-2.0
"""A lost commit object is written again, or nothing is: never one that names damaged data."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import actorsnap
from actorsnap import (
    ActorSnapError,
    ChecksumMismatch,
    FormatError,
    NotASnapshot,
    ObjectExists,
    Options,
    StateDict,
    StorageError,
    UnsupportedFormat,
    UsageError,
)
from actorsnap.format.compression import Codec
from actorsnap.format.geometry import Box
from actorsnap.format.layout import Attempt, copy_claim_key, encode_copy_claim, manifest_key
from actorsnap.format.manifest import (
    COMMIT_KEY,
    COMMIT_KEYS,
    OLDER_COMMIT_KEY,
    Commit,
    decode_commit,
)
from actorsnap.runtime.process import host_id
from actorsnap.runtime.resources import Attempts
from actorsnap.runtime.verify import DataCheck
from actorsnap.storage.base import Storage, StorageContext
from actorsnap.storage.registry import open_storage
from actorsnap.sync import Snapshot
from actorsnap.testing import FaultyStorage, run_blocking_in_thread
from actorsnap.testing.faults import Verb
from tests.api.damage import flip_bit, rewrite_commit
from tests.api.facades import Facade, each_facade
from tests.api.faults import faulty, faulty_url
from tests.api.places import assert_whole, state
from tests.state.saved import ATTEMPT, Part, Saved
from tests.support.manifests import document_of, encoded
from tests.support.world import SimulatedSave

MIB = 1 << 20
FAST = Options(fsync=False)
GOLDEN = Path(__file__).parents[1] / "golden"
METADATA = {"run": "ü", "loss": [0.25, None], "large": (1 << 64) - 1}


def commit_path(folder: Path) -> Path:
    """Where the commit object is: earlier releases gave it another name."""
    return next(folder / key for key in COMMIT_KEYS if (folder / key).exists())


def commit_at(folder: Path) -> Commit:
    return decode_commit(commit_path(folder).read_bytes())


def lose_commit(folder: Path) -> Commit:
    """Removes the commit object; returns what it was."""
    commit = commit_at(folder)
    commit_path(folder).unlink()
    return commit


def files_in(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.fixture
def lost(tmp_path: Path) -> Path:
    """A snapshot without its commit object."""
    Snapshot.take(tmp_path / "s", state(1), metadata=METADATA, options=FAST)
    lose_commit(tmp_path / "s")
    return tmp_path / "s"


def refused(folder: Path, error: type[ActorSnapError], match: str, **how: Any) -> ActorSnapError:
    """Recovering raises the error, and changes nothing."""
    before = files_in(folder)
    with pytest.raises(error, match=match) as caught:
        Snapshot(folder).recover(**how)
    assert files_in(folder) == before
    return caught.value


# What was copied without hidden files


@each_facade
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_copy_without_its_commit_object(
    api: Facade, tmp_path: Path, compression: str | None
) -> None:
    options = Options(fsync=False, compression=compression)
    Snapshot.take(tmp_path / "s", state(1), metadata=METADATA, options=options)
    copied = Path(shutil.copytree(tmp_path / "s", tmp_path / "copied"))
    was = lose_commit(copied)
    snapshot = api.Snapshot(copied)
    with pytest.raises(NotASnapshot, match="actorsnap recover"):
        api.run(snapshot.verify())
    report = api.run(snapshot.recover())
    now = commit_at(copied)
    created = f"{was.created[:19]}.000000Z"
    assert (report.attempt, report.world_size, report.step) == (was.attempt, 1, None)
    assert report.created == now.created
    assert abs(int(created[17:19]) - int(now.created[17:19])) in (0, 1, 59)
    assert now == Commit(**{**fields(was), "created": now.created})
    assert not now.fsync
    assert api.run(snapshot.metadata) == METADATA
    asyncio.run(assert_whole(copied, 1))
    with pytest.raises(ObjectExists, match="nothing to recover"):
        api.run(snapshot.recover())
    with pytest.raises(ObjectExists, match="nothing to recover"):
        api.run(snapshot.recover(replace_damaged=True, force=True))


def fields(commit: Commit) -> dict[str, Any]:
    return {name: getattr(commit, name) for name in commit.__struct_fields__}


async def test_in_a_storage_that_is_no_file_system() -> None:
    url = "memory://recover"
    storage = open_storage(url, StorageContext(run_blocking=run_blocking_in_thread))
    await actorsnap.Snapshot.take(url, state(3), metadata=METADATA)
    before = {info.key: await storage.get(info.key) async for info in storage.list("")}
    await storage.delete([COMMIT_KEY])
    await actorsnap.Snapshot(url).recover()
    after = {info.key: await storage.get(info.key) async for info in storage.list("")}
    assert after.keys() == before.keys()
    await assert_whole(url, 3)
    await storage.aclose()


async def save_by_ranks(
    folder: Path, world_size: int = 4, attempt: str = ATTEMPT, **how: Any
) -> list[dict[str, StateDict]]:
    """Ranks save a tensor that all of them write, and one of their own."""
    context = StorageContext(run_blocking=run_blocking_in_thread, durable=False)
    storage = open_storage(str(folder), context)
    large = torch.arange(2 * MIB + 77, dtype=torch.int32)
    states = [
        {
            "model": StateDict(large=large.clone(), bias=torch.arange(7.0)),
            "own": StateDict(x=torch.full((5,), float(rank)), rank=rank),
        }
        for rank in range(world_size)
    ]
    world = SimulatedSave(
        storages=[storage] * world_size,
        states=states,
        run_blocking=run_blocking_in_thread,
        attempt=attempt,
        replicated=["model/**"],
        **how,
    )
    assert await world.run() == dict.fromkeys(range(world_size))
    await storage.aclose()
    return states


@pytest.mark.parametrize("codec", [None, Codec(name="zstd", level=1)])
async def test_many_ranks_wrote_it(tmp_path: Path, codec: Codec | None) -> None:
    how: dict[str, Any] = {"codec": codec, "step": 7, "metadata": METADATA}
    states = await save_by_ranks(tmp_path, **how)
    was, before = commit_at(tmp_path), files_in(tmp_path)
    assert len({key for key in before if "/manifest/" in key}) == 4
    (tmp_path / COMMIT_KEY).unlink()
    snapshot = actorsnap.Snapshot(tmp_path)
    report = await snapshot.recover(world_size=4)
    assert (report.world_size, report.step) == (4, 7)
    assert files_in(tmp_path) == before
    assert was.step == 7
    target = {
        "model": StateDict(large=torch.zeros_like(states[0]["model"]["large"]), bias=None),
        "own": StateDict(x=torch.zeros(5), rank=-1),
    }
    assert (await snapshot.restore(target)).is_complete
    assert torch.equal(target["model"]["large"], states[0]["model"]["large"])
    assert torch.equal(await snapshot.read_object("3/own/x"), torch.full((5,), 3.0))


def test_the_uploader_process_records_it_too(tmp_path: Path) -> None:
    """It lives on, but has told this process that the attempt is over."""
    options = Options(fsync=False, offload="process")
    Snapshot.async_take(tmp_path / "s", state(2), metadata=METADATA, options=options).wait()
    was = lose_commit(tmp_path / "s")
    Snapshot(tmp_path / "s").recover()
    assert commit_at(tmp_path / "s").metadata == METADATA
    assert commit_at(tmp_path / "s").manifests == was.manifests


# Damage: named, and nothing is written


def manifest_of(folder: Path, rank: int = 0) -> Path:
    return next(folder.glob(f"*/manifest/{rank}.json"))


def data_of(folder: Path, number: int = 0) -> Path:
    return sorted(folder.glob("*/data/*/*"))[number]


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_early(path: Path) -> None:
    flip_bit(path, 8 * 200)


def flip_late(path: Path) -> None:
    flip_bit(path, 8 * (path.stat().st_size - 20))


def rename(path: Path) -> None:
    path.rename(path.with_name(f"x{path.name}"))


@pytest.mark.parametrize(
    ("find", "damage", "error", "says"),
    [
        (manifest_of, remove, NotASnapshot, "ended before all data was stored"),
        (manifest_of, rename, NotASnapshot, "actorsnap rm --garbage .*` frees its space"),
        (manifest_of, cut, ChecksumMismatch, "bytes after its head, and"),
        (
            manifest_of,
            flip_early,
            ChecksumMismatch,
            "the checksum of its first line does not match",
        ),
        (manifest_of, flip_late, ChecksumMismatch, "page [0-9]+ is damaged"),
        (data_of, remove, ChecksumMismatch, "the object is missing"),
        (data_of, rename, ChecksumMismatch, "the object is missing"),
        (data_of, cut, ChecksumMismatch, "bytes, was written with"),
        (data_of, flip_early, ChecksumMismatch, "the safetensors header differs"),
        (data_of, flip_late, ChecksumMismatch, "differs from what was saved"),
    ],
)
def test_damage_is_named(
    lost: Path,
    find: Callable[[Path], Path],
    damage: Callable[[Path], None],
    error: type[ActorSnapError],
    says: str,
) -> None:
    path = find(lost)
    key = str(path.relative_to(lost))
    damage(path)
    found = refused(lost, error, says)
    if error is ChecksumMismatch:
        assert getattr(found, "key", "") == key
        assert any("nothing was written" in note for note in found.__notes__)


def test_a_manifest_under_the_name_of_another_rank(lost: Path) -> None:
    path = manifest_of(lost)
    path.rename(path.with_name("1.json"))
    refused(lost, FormatError, r"manifest/1.json: it is the manifest of rank 0 .* was renamed, ")


def test_all_damage_is_listed(lost: Path) -> None:
    for number in (0, 1):
        cut(data_of(lost, number))
    error = refused(lost, ChecksumMismatch, "bytes, was written with")
    keys = {str(data_of(lost, number).relative_to(lost)) for number in (0, 1)}
    said = [str(error), *error.__notes__]
    assert all(any(key in line for line in said) for key in keys)


def test_objects_that_were_swapped(tmp_path: Path) -> None:
    """Of one size, with headers alike."""
    tensors = [torch.full((MIB,), float(number)) for number in range(2)]
    app_state = {f"key{number}": StateDict(x=tensor) for number, tensor in enumerate(tensors)}
    Snapshot.take(tmp_path / "s", app_state, options=FAST)
    lose_commit(tmp_path / "s")
    paths = [data_of(tmp_path / "s", number) for number in range(2)]
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, reversed(contents), strict=True):
        path.write_bytes(content)
    error = refused(tmp_path / "s", ChecksumMismatch, "block 0 of 'key[01]/x'")
    assert len([note for note in error.__notes__ if "block 0" in note]) == 1


async def test_a_manifest_of_a_rank_is_missing_or_too_many(tmp_path: Path) -> None:
    await save_by_ranks(tmp_path)
    lose_commit(tmp_path)
    manifests = tmp_path / ATTEMPT / "manifest"
    shutil.copy(manifests / "3.json", manifests / "4.json")
    error = await asyncio.to_thread(refused, tmp_path, FormatError, "4 ranks saved")
    assert getattr(error, "key", None) == manifest_key(ATTEMPT, 4)
    (manifests / "4.json").unlink()
    (manifests / "notes.json").write_text("of somebody else")
    for rank in (3, 1, 0):
        (manifests / f"{rank}.json").rename(tmp_path / "aside")
        error = await asyncio.to_thread(refused, tmp_path, ChecksumMismatch, "4 ranks saved")
        assert getattr(error, "key", None) == manifest_key(ATTEMPT, rank)
        (tmp_path / "aside").rename(manifests / f"{rank}.json")
    await actorsnap.Snapshot(tmp_path).recover()


def rewrite_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = document_of(path.read_bytes())
    change(document)
    path.write_bytes(encoded(document))


async def test_ranks_of_two_saves(tmp_path: Path) -> None:
    """Somebody has put a folder together from two."""
    await save_by_ranks(tmp_path / "a", step=1)
    await save_by_ranks(tmp_path / "b", step=2)
    lose_commit(tmp_path / "a")
    for name in (f"{ATTEMPT}/manifest/1.json",):
        shutil.copy(tmp_path / "b" / name, tmp_path / "a" / name)
    error = await asyncio.to_thread(refused, tmp_path / "a", FormatError, "of another save")
    assert getattr(error, "key", None) == manifest_key(ATTEMPT, 1)


async def test_a_manifest_of_another_rank_or_attempt(tmp_path: Path) -> None:
    await save_by_ranks(tmp_path / "a")
    other = ATTEMPT.replace("89abcdef", "00000000")
    await save_by_ranks(tmp_path / "b", attempt=other)
    lose_commit(tmp_path / "a")
    path = tmp_path / "a" / manifest_key(ATTEMPT, 1)
    for source in (manifest_of(tmp_path / "a", 2), manifest_of(tmp_path / "b", 1)):
        shutil.copy(source, path)
        error = await asyncio.to_thread(refused, tmp_path / "a", FormatError, "it is the manifest")
        assert getattr(error, "key", None) == manifest_key(ATTEMPT, 1)


def test_features_that_this_release_does_not_know(lost: Path) -> None:
    rewrite_manifest(manifest_of(lost), lambda each: each["save"]["features"].append("delta"))
    refused(lost, UnsupportedFormat, "delta")


def test_a_tensor_with_a_hole(tmp_path: Path) -> None:
    boxes = [Box((2 * n,), (2,)) for n in (0, 2)]
    path = Saved([[Part("m/w", torch.zeros(2), box, (6,))] for box in boxes]).write(tmp_path / "s")
    lose_commit(path)
    refused(path, FormatError, "m/w: no shard has the elements from", world_size=2)


# The commit object


def test_a_damaged_commit_object(lost: Path) -> None:
    (lost / COMMIT_KEY).write_bytes(b"half")
    error = refused(lost, ChecksumMismatch, "the commit object is damaged")
    assert any(
        "--replace-damaged" in note and "replace_damaged=True" in note for note in error.__notes__
    )
    Snapshot(lost).recover(replace_damaged=True)
    asyncio.run(assert_whole(lost, 1))


def test_a_damaged_commit_object_under_the_older_name(lost: Path) -> None:
    """It goes: the next reader that lost the newer one would find it."""
    (lost / OLDER_COMMIT_KEY).write_bytes(b"half")
    error = refused(lost, ChecksumMismatch, "the commit object is damaged")
    assert getattr(error, "key", None) == OLDER_COMMIT_KEY
    Snapshot(lost).recover(replace_damaged=True)
    assert not (lost / OLDER_COMMIT_KEY).exists()
    asyncio.run(assert_whole(lost, 1))


def test_a_damaged_commit_object_next_to_an_older_one(lost: Path) -> None:
    """A crash in an overwrite may leave both."""
    (attempt,) = (path.name for path in lost.iterdir())
    shutil.copytree(GOLDEN / "v1", lost, dirs_exist_ok=True)
    (lost / COMMIT_KEY).write_bytes(b"half")
    how: dict[str, Any] = {"replace_damaged": True, "attempt": attempt}
    Snapshot(lost).recover(**how)
    assert commit_at(lost).attempt == attempt
    assert not (lost / OLDER_COMMIT_KEY).exists()
    asyncio.run(assert_whole(lost, 1, is_clean=False))


def test_a_commit_object_of_a_newer_release(tmp_path: Path) -> None:
    Snapshot.take(tmp_path, state(1), options=FAST)
    rewrite_commit(tmp_path, lambda commit: commit.update(version=2))
    refused(tmp_path, UnsupportedFormat, "version 2", replace_damaged=True, force=True)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_snapshot_that_is_committed_meanwhile_stays(
    lost: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_damaged: bool
) -> None:
    Snapshot.take(tmp_path / "other", state(2), options=FAST)
    other = (tmp_path / "other" / COMMIT_KEY).read_bytes()
    if is_damaged:
        (lost / COMMIT_KEY).write_bytes(b"half")
    run = DataCheck.run

    async def commit_then_run(check: DataCheck, *args: Any, **how: Any) -> Any:
        await asyncio.to_thread((lost / COMMIT_KEY).write_bytes, other)
        return await run(check, *args, **how)

    monkeypatch.setattr(DataCheck, "run", commit_then_run)
    with pytest.raises(ObjectExists):
        Snapshot(lost).recover(replace_damaged=is_damaged)
    assert (lost / COMMIT_KEY).read_bytes() == other


def test_a_commit_at_the_last_moment_stays(lost: Path, tmp_path: Path) -> None:
    Snapshot.take(tmp_path / "other", state(2), options=FAST)
    other = (tmp_path / "other" / COMMIT_KEY).read_bytes()

    async def commit(verb: Verb, key: str) -> None:
        if verb is Verb.PUT_IF_ABSENT:
            await asyncio.to_thread((lost / COMMIT_KEY).write_bytes, other)

    with (
        faulty(lambda inner: FaultyStorage(inner, before=commit)),
        pytest.raises(ObjectExists),
    ):
        Snapshot(faulty_url(lost)).recover()
    assert (lost / COMMIT_KEY).read_bytes() == other


@pytest.mark.few(1)
@pytest.mark.parametrize("when", ["before", "after"])
def test_any_operation_may_fail(lost: Path, when: str) -> None:
    """Nothing is written, or the snapshot is recovered."""
    before = files_in(lost)
    outcomes = []
    for k in itertools.count(1):
        wrappers: list[FaultyStorage] = []

        def wrap(inner: Storage) -> Storage:
            wrappers.append(FaultyStorage(inner, fail_at=k, fail_when=when))  # noqa: B023
            return wrappers[-1]  # noqa: B023

        with faulty(wrap):
            try:
                Snapshot(faulty_url(lost)).recover()
                error = None
            except StorageError as caught:
                error = caught
        has_commit = (lost / COMMIT_KEY).exists()
        outcomes.append((error is None, has_commit))
        assert has_commit or error is not None
        if sum(wrappers[0].counts.values()) < k:
            break
        if has_commit:
            asyncio.run(assert_whole(lost, 1))
            lose_commit(lost)
        assert files_in(lost) == before
    assert outcomes[-1] == (True, True)
    assert len(outcomes) > 8


# Which attempt


def take_as(folder: Path, attempt: Attempt, number: int) -> None:
    """Takes a snapshot in the name of another process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Attempts, "new", lambda _: attempt)
        Snapshot.take(folder, state(number), overwrite=True, options=FAST)


def test_several_attempts_are_complete(tmp_path: Path) -> None:
    attempts = [
        Attempt(created_s=1_767_225_600 + number, host="ffffffff", pid=1, nonce="00000000")
        for number in range(3)
    ]
    for number, attempt in enumerate(attempts):
        take_as(tmp_path / str(attempt), attempt, number)
        shutil.copytree(tmp_path / str(attempt) / str(attempt), tmp_path / "s" / str(attempt))
    (tmp_path / "s" / str(attempts[2]) / "manifest" / "0.json").unlink()
    error = refused(tmp_path / "s", UsageError, "2 attempts in .* are complete.*--attempt")
    for attempt in attempts[:2]:
        assert f"{attempt}: " in str(error)
    assert str(attempts[2]) not in str(error)
    assert "hours old" in str(error)
    refused(tmp_path / "s", UsageError, "there is no attempt 'x'.*20260101", attempt="x")
    error = refused(tmp_path / "s", NotASnapshot, "cannot be recovered", attempt=str(attempts[2]))
    assert str(tmp_path / "s") in str(error)
    assert str(attempts[2]) in str(error)
    report = Snapshot(tmp_path / "s").recover(attempt=str(attempts[1]))
    assert report.attempt == str(attempts[1])
    assert report.created == "2026-01-01T00:00:01.000000Z"
    asyncio.run(assert_whole(tmp_path / "s", 1, is_clean=False))


def now_by(host: str, pid: int, hours_ago: float = 0) -> Attempt:
    created_s = int(time.time() - 3600 * hours_ago)
    return Attempt(created_s=created_s, host=host, pid=pid, nonce="00000000")


@pytest.mark.parametrize(
    ("host", "pid", "hours_ago", "says"),
    [
        ("ffffffff", 1, 23, r"another host began 23\.0 hours ago"),
        ("ffffffff", 1, 25, ""),
        ("this", os.getppid(), 23, f"process {os.getppid()} of this host is running"),
        ("this", os.getppid(), 25, ""),
        ("this", (1 << 22) + 1, 0, ""),
    ],
    ids=["elsewhere", "elsewhere, long ago", "alive", "alive, long ago", "dead"],
)
def test_an_attempt_that_may_be_running(
    tmp_path: Path, host: str, pid: int, hours_ago: float, says: str
) -> None:
    take_as(tmp_path, now_by(host_id() if host == "this" else host, pid, hours_ago), 1)
    lose_commit(tmp_path)
    if says:
        match = f" in {re.escape(str(tmp_path))} may still be saved: .*{says}.*--force"
        refused(tmp_path, UsageError, match)
    Snapshot(tmp_path).recover(force=bool(says))
    asyncio.run(assert_whole(tmp_path, 1))


def test_a_copy_that_is_under_way(lost: Path) -> None:
    """The copier claims the attempt, whose own process is long gone."""
    (attempt,) = [path.name for path in lost.iterdir()]
    for copier, says in [(now_by("ffffffff", 1), "may still be copied: another host"), (None, "")]:
        owner = str(copier or now_by(host_id(), (1 << 22) + 1))
        claim = lost / copy_claim_key(owner, attempt)
        claim.parent.mkdir(parents=True)
        claim.write_bytes(encode_copy_claim([]))
        if says:
            refused(lost, UsageError, f"{attempt} in {re.escape(str(lost))} {says}")
            shutil.rmtree(lost / owner)
        else:
            Snapshot(lost).recover()


def test_nothing_to_recover(tmp_path: Path) -> None:
    with pytest.raises(NotASnapshot, match="no files are there") as caught:
        Snapshot(tmp_path / "no").recover()
    assert caught.value.found == "absent"
    (tmp_path / ".metadata").write_bytes(b"of DCP")
    error = refused(tmp_path, NotASnapshot, "DCP")
    assert getattr(error, "found", None) == "foreign"
    attempt = tmp_path / "dead" / str(now_by("ffffffff", 1)) / "data" / "model"
    attempt.mkdir(parents=True)
    (attempt / "0-0.safetensors").write_bytes(b"half")
    error = refused(tmp_path / "dead", NotASnapshot, "cannot be recovered")
    assert getattr(error, "found", None) == "unfinished"


@pytest.mark.parametrize(
    "how",
    [
        {"attempt": 3},
        {"world_size": 0},
        {"world_size": True},
        {"world_size": "2"},
        {"force": 1},
        {"replace_damaged": "yes"},
    ],
)
def test_bad_arguments(lost: Path, how: dict[str, Any]) -> None:
    refused(lost, UsageError, next(iter(how)), **how)


def test_another_world_size_than_was_recorded(lost: Path) -> None:
    match = f" in {re.escape(str(lost))} was saved with world_size=1, not 2: leave out world_size"
    refused(lost, UsageError, match, world_size=2)


# Snapshots of older releases


def entries_of(folder: Path) -> Sequence[Any]:
    found: list[Any] = document_of(manifest_of(folder).read_bytes())["entries"]
    return found


@pytest.mark.parametrize("name", ["v1", "block_sizes", "compression"])
def test_an_older_release_did_not_record_it(tmp_path: Path, name: str) -> None:
    copied = Path(shutil.copytree(GOLDEN / name, tmp_path / name))
    was = lose_commit(copied)
    match = rf" in {re.escape(str(copied))} .* There are 1 rank manifests; .*--world-size 1\)"
    refused(copied, UsageError, match)
    refused(copied, ChecksumMismatch, "manifest/1.json: the rank manifest is missing", world_size=2)
    Snapshot(copied).recover(world_size=1)
    now = commit_at(copied)
    assert (now.attempt, now.created, now.manifests) == (was.attempt, was.created, was.manifests)
    needed = set(was.features) - ({"block_sizes"} if name == "compression" else set())
    assert set(now.features) == needed
    assert (now.fsync, now.step, now.metadata) == (True, None, {})
    assert entries_of(copied) == entries_of(GOLDEN / name)
    found, golden = Snapshot(copied).get_manifest(), Snapshot(GOLDEN / name).get_manifest()
    assert found == golden
    assert Snapshot(copied).verify("full").ok


async def test_older_and_newer_manifests_are_not_mixed(tmp_path: Path) -> None:
    await save_by_ranks(tmp_path)
    lose_commit(tmp_path)

    rewrite_manifest(tmp_path / manifest_key(ATTEMPT, 2), lambda each: each.pop("save"))
    error = await asyncio.to_thread(refused, tmp_path, FormatError, "of another save")
    assert getattr(error, "key", None) == manifest_key(ATTEMPT, 2)
