# SPDX-License-Identifier: Apache-2.0
"""Compressed snapshots: every call reads them, damage is found, and nothing waits for ever."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import anyio.lowlevel
import pytest
import torch
from typer.testing import CliRunner

import actorsnap.sync
from actorsnap import (
    ActorSnapError,
    ChecksumMismatch,
    FormatError,
    Options,
    Snapshot,
    StateDict,
    UnsupportedFormat,
    UsageError,
    cli,
)
from actorsnap.format import compression, manifest
from actorsnap.format.compression import FRAME_BYTES
from actorsnap.format.manifest import COMMIT_KEY
from actorsnap.options import chunk_within, from_env
from actorsnap.runtime.host import Host
from actorsnap.storage.base import Storage
from actorsnap.storage.memory import forget_space
from actorsnap.testing import FaultyStorage
from tests.api.damage import flip_bit, resign
from tests.api.facades import Facade, each_facade, each_place
from tests.api.faults import Barrier, BarrierStorage, faulty, faulty_url
from tests.api.places import assert_idle, assert_whole, leftovers, number_at, number_of, state
from tests.api.same import assert_same
from tests.api.states import dense, sparse
from tests.servers.fake_gcs import FakeGcsServer
from tests.servers.moto import MotoServer

MIB = 1 << 20
ZSTD = Options(compression="zstd", chunk_bytes=2 * MIB, fsync=False, offload="thread")
PLAIN = Options(chunk_bytes=2 * MIB, fsync=False, offload="thread")
_numbers = itertools.count()


def app_state(seed: int = 0) -> dict[str, StateDict]:
    """What shrinks and what does not, of all item sizes, in large leaves and small ones."""
    numbers = torch.Generator().manual_seed(seed)
    weight = torch.randn(700, 1000, generator=numbers)
    model = {
        "weight": weight,
        "half": (weight[:, :600] * 0.02).to(torch.bfloat16),
        "noise": torch.randint(0, 256, (3 * MIB + 17,), dtype=torch.uint8, generator=numbers),
        "double": weight[:100].double(),
        "complex": weight[:50].to(torch.complex128),
        "empty": torch.empty(0, 3),
        "row": weight[3],
        "text": "x" * 9000,
        **sparse(),
        **{f"small{n}": dense(torch.int16, n * 37 % 501, seed=n) for n in range(200)},
    }
    return {"model": StateDict(model), "progress": StateDict(step=seed)}


def blank() -> dict[str, StateDict]:
    return {
        key: StateDict(
            {
                name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
                for name, value in part.items()
            }
        )
        for key, part in app_state(1).items()
    }


@pytest.fixture
def place(scheme: str, tmp_path: Path) -> Iterator[str]:
    name = f"compression-{next(_numbers)}"
    yield f"memory://{name}/s" if scheme == "memory" else str(tmp_path / "s")
    forget_space(name)


@pytest.fixture
def own_budget() -> Iterator[None]:
    """The budget belongs to the process: tests that change it put it back."""
    host = Host.get()
    before = host.resources.budget.limit_bytes
    yield
    host.resources.set_budget(before)
    host.submit(anyio.lowlevel.checkpoint()).future.result()


def chunks_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/data/*/*.chunks/*"), key=lambda path: int(path.name))


def sizes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# Reading --------------------------------------------------------------------------------------


@pytest.mark.few
@each_facade
@each_place
@pytest.mark.parametrize("compression", ["zstd:1", "zstd:7"])
def test_every_call_reads_it(api: Facade, scheme: str, place: str, compression: str) -> None:
    options = Options(compression=compression, chunk_bytes=2 * MIB, fsync=False)
    snapshot = api.run(api.Snapshot.take(place, app_state(), options=options))
    expected = app_state()["model"].data
    assert_same(api.run(snapshot.get_state_dict_for_key("model")), expected)
    for options in (PLAIN, Options(verify=False, chunk_bytes=4 * MIB), Options(num_uploaders=1)):
        target = blank()
        report = api.run(api.Snapshot(place, options=options).restore(target))
        assert report.is_complete
        assert_same(target["model"].data, expected)
    plan = api.run(snapshot.plan_restore(blank()))
    assert plan.read_amplification < 0.95
    for name in ("weight", "noise", "row", "text", "small77", "coo", "empty"):
        assert_same(api.run(snapshot.read_object(f"0/model/{name}")), expected[name])
    out = torch.zeros(700, 1000)
    assert api.run(snapshot.read_object("0/model/weight", out)) is out
    assert torch.equal(out, expected["weight"])
    few = api.run(snapshot.read_object("model/noise", memory_budget_bytes=MIB))
    assert torch.equal(few, expected["noise"])
    report = api.run(snapshot.verify("full"))
    assert report.ok, report.problems
    assert report.nbytes > 8 * MIB
    assert api.run(snapshot.verify()).ok


@pytest.mark.few
@each_facade
@pytest.mark.parametrize("offload", ["thread", "process"])
def test_an_asynchronous_save(api: Facade, tmp_path: Path, offload: str) -> None:
    options = Options(compression="zstd", chunk_bytes=2 * MIB, fsync=False, offload=offload)
    held = app_state()

    async def save() -> None:
        pending = await Snapshot.async_take(tmp_path, held, options=options)
        held["model"]["weight"].zero_()  # staged: the snapshot does not see it
        await pending.wait()

    if api.name == "async":
        anyio.run(save)
    else:
        pending = actorsnap.sync.Snapshot.async_take(tmp_path, held, options=options)
        held["model"]["weight"].zero_()
        pending.wait()
    target = blank()
    api.run(api.Snapshot(tmp_path).restore(target))
    assert_same(target["model"].data, app_state()["model"].data)
    assert chunks_in(tmp_path)
    assert_idle()


def test_boxes_of_a_tensor_and_strided_targets(tmp_path: Path) -> None:
    snapshot = actorsnap.sync.Snapshot.take(tmp_path, app_state(), options=ZSTD)
    target = blank()
    target["model"]["weight"] = torch.zeros(1000, 700).t()
    target["model"]["half"] = torch.zeros(700, 900, dtype=torch.bfloat16)[:, 100:700]
    assert snapshot.restore(target).is_complete
    expected = app_state()["model"]
    for name in ("weight", "half"):
        assert torch.equal(target["model"][name], expected[name])


def test_what_lies_there(tmp_path: Path) -> None:
    actorsnap.sync.Snapshot.take(tmp_path / "plain", app_state(), options=PLAIN)
    actorsnap.sync.Snapshot.take(tmp_path / "zstd", app_state(), options=ZSTD)
    assert not list(tmp_path.glob("zstd/**/*.safetensors"))
    always = ["annotations", "block_sizes"]
    for name, features in (
        ("plain", [*always, "tables"]),
        ("zstd", [*always, "compression", "tables"]),
    ):
        assert json.loads((tmp_path / name / COMMIT_KEY).read_bytes())["features"] == features
    (document,) = (tmp_path / "zstd").glob("*/manifest/0.json")
    head = json.loads(document.read_bytes().splitlines()[0])
    records = {record["key"]: record for record in head["objects"]}
    large = next(r for key, r in records.items() if "/model/" in key)
    stored = [
        path.stat().st_size for path in chunks_in(tmp_path / "zstd") if path.parts[-3] == "model"
    ]
    assert stored == [sum(frames) or stop - start for start, stop, _, frames in large["chunks"]]
    # Noise is not worth decompressing.
    assert any(frames == [] for *_, frames in large["chunks"])
    # Half of the state is noise.
    assert sizes_in(tmp_path / "zstd") < 0.9 * sizes_in(tmp_path / "plain")


def test_a_snapshot_that_is_plain_says_nothing_of_compression(tmp_path: Path) -> None:
    actorsnap.sync.Snapshot.take(tmp_path, app_state(), options=PLAIN)
    (document,) = tmp_path.glob("*/manifest/0.json")
    assert b"chunks" not in document.read_bytes()


# Other calls ----------------------------------------------------------------------------------


def test_a_copy_has_the_same_bytes(tmp_path: Path) -> None:
    name = f"compression-{next(_numbers)}"
    snapshot = actorsnap.sync.Snapshot.take(tmp_path / "a", app_state(), options=ZSTD)
    snapshot.copy_to(f"memory://{name}")
    actorsnap.sync.Snapshot(f"memory://{name}").copy_to(tmp_path / "b")
    forget_space(name)
    found = {path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*")}
    assert {path.relative_to(tmp_path / "b") for path in (tmp_path / "b").rglob("*")} == found
    for path in found:
        if (tmp_path / "a" / path).is_file():
            assert (tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes()
    target = blank()
    actorsnap.sync.Snapshot(tmp_path / "b").restore(target)
    assert_same(target["model"].data, app_state()["model"].data)


def test_a_copy_notices_damage(tmp_path: Path) -> None:
    snapshot = actorsnap.sync.Snapshot.take(tmp_path / "a", app_state(), options=ZSTD)
    flip_bit(chunks_in(tmp_path / "a")[1], 999)
    with pytest.raises(ChecksumMismatch):
        snapshot.copy_to(tmp_path / "b")


def test_the_command_line_reads_it(tmp_path: Path) -> None:
    url = str(tmp_path / "s")
    actorsnap.sync.Snapshot.take(url, app_state(), options=ZSTD)
    run = CliRunner().invoke
    shown = run(cli.app, ["inspect", url, "--depth", "1"])
    assert shown.exit_code == 0, shown.output
    assert "compressed" in shown.stdout
    for arguments in (["verify", url], ["verify", "--full", url], ["cp", url, f"{url}-copy"]):
        done = run(cli.app, arguments)
        assert done.exit_code == 0, done.output
    assert run(cli.app, ["cat", url, "progress/step"]).stdout == "0\n"
    assert run(cli.app, ["diff", url, f"{url}-copy"]).exit_code == 0
    actorsnap.sync.Snapshot.take(f"{url}-plain", app_state(), options=PLAIN)
    assert run(cli.app, ["diff", url, f"{url}-plain"]).exit_code == 0
    assert run(cli.app, ["rm", "--yes", url]).exit_code == 0
    assert not list((tmp_path / "s").rglob("*"))


async def test_it_replaces_and_is_replaced(tmp_path: Path) -> None:
    url = tmp_path / "s"
    for number, options in enumerate([PLAIN, ZSTD, ZSTD, PLAIN]):
        await Snapshot.take(url, state(number), options=options, overwrite=True)
        await assert_whole(url, number)


@pytest.mark.parametrize("options", [ZSTD, PLAIN])
async def test_leftovers_of_the_other_kind_are_ignored(tmp_path: Path, options: Options) -> None:
    """Resuming uses what is plain on both sides; the rest is garbage as ever."""
    older = PLAIN if options is ZSTD else ZSTD
    name = f"compression-{next(_numbers)}"
    for url in (str(tmp_path / "s"), f"memory://{name}/s"):
        with faulty(lambda inner: FaultyStorage(inner, fail_at=1, fail_verbs={"put_if_absent"})):
            with pytest.raises(ActorSnapError):
                with mock.patch("actorsnap.actors.object_writers.RankObjects.delete"):
                    await Snapshot.take(faulty_url(url), state(1), options=older)
        assert await leftovers(url)
        await Snapshot.take(url, state(2), options=options, resume=True)
        assert await number_at(url) == 2
    forget_space(name)


async def test_progress_counts_the_state(tmp_path: Path) -> None:
    pending = await Snapshot.async_take(tmp_path, app_state(), options=ZSTD)
    *_, last = [progress async for progress in pending.events()]
    assert last.phase == "committed"
    assert last.stored_bytes == last.hashed_bytes == last.total_bytes > 6 * MIB


async def test_a_trace_shows_both_codecs(tmp_path: Path) -> None:
    trace = str(tmp_path / "{op}.json")
    options = Options(compression="zstd", fsync=False, offload="thread", trace=trace)
    snapshot = await Snapshot.take(tmp_path / "s", app_state(), options=options)
    await snapshot.restore(blank())
    for op, work in (("save", "compress"), ("restore", "decompress")):
        assert f'"name":"{work}"' in (tmp_path / f"{op}.json").read_text().replace(" ", "")


# Memory ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("own_budget")
@pytest.mark.parametrize("budget", [2 * MIB, 5 * MIB, 9 * MIB])
async def test_a_small_budget_is_enough(tmp_path: Path, budget: int) -> None:
    """Staged chunks hold all of it when the first is to be compressed."""
    options = Options(
        compression="zstd", memory_budget_bytes=budget, fsync=False, offload="thread", timeout_s=60
    )
    held = state(7, num_floats=6 * MIB)
    lent = Host.get().resources.budget
    lent.peak_bytes = 0
    with anyio.fail_after(60):
        pending = await Snapshot.async_take(tmp_path, held, options=options)
        await pending.wait()
        target = state(-1, num_floats=6 * MIB)
        await Snapshot(tmp_path, options=options).restore(target)
    assert number_of(target) == 7
    # One lease goes beyond: a chunk's, or what is read of one.
    chunk_bytes = chunk_within(options.chunk_bytes, budget)
    assert lent.peak_bytes <= budget + chunk_bytes + FRAME_BYTES
    assert_idle()


@pytest.mark.usefixtures("own_budget")
async def test_reading_does_not_wait_for_a_save_that_hangs(tmp_path: Path) -> None:
    """It holds all memory; what cannot be read in place takes two leases."""
    await Snapshot.take(tmp_path, app_state(), options=ZSTD)
    host = Host.get()
    options = Options(memory_budget_bytes=4 * MIB)
    host.resources.set_budget(4 * MIB)
    held = host.submit(host.resources.budget.lease(4 * MIB)).future.result()
    target = blank()
    target["model"]["weight"] = torch.zeros(1000, 700).t()
    with anyio.fail_after(60):
        await Snapshot(tmp_path, options=options).restore(target)
    assert torch.equal(target["model"]["weight"], app_state()["model"]["weight"])
    host.call_soon(held.release)


# Damage ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "s"
    actorsnap.sync.Snapshot.take(folder, app_state(), options=ZSTD)
    return folder


def problem_of(folder: Path) -> ActorSnapError:
    report = actorsnap.sync.Snapshot(folder).verify("full")
    assert len(report.problems) == 1, report.problems
    with pytest.raises(FormatError) as raised:
        actorsnap.sync.Snapshot(folder).restore(blank())
    assert isinstance(raised.value, FormatError)
    return report.problems[0]


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(12))
def test_any_flipped_bit_is_found(saved: Path, tmp_path: Path, seed: int) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "s"))
    found = chunks_in(folder)
    path = found[seed % len(found)]
    nbits = 8 * path.stat().st_size
    # Early, where heads are, and anywhere.
    flip_bit(path, seed * 7919 % min(nbits, 48 if seed % 2 else nbits))
    error = problem_of(folder)
    assert isinstance(error, ChecksumMismatch)
    assert actorsnap.sync.Snapshot(folder).verify("quick").ok


def test_damage_is_named_by_object_and_leaf(tmp_path: Path) -> None:
    weights = {"up": torch.randn(700, 1000), "down": torch.randn(800, 1000)}
    snapshot = actorsnap.sync.Snapshot.take(tmp_path, {"model": StateDict(weights)}, options=ZSTD)
    target = StateDict({name: torch.zeros(value.shape) for name, value in weights.items()})
    strided = StateDict(up=torch.zeros(1000, 700).t(), down=torch.zeros(1000, 800).t())
    path = chunks_in(tmp_path)[-1]  # of what is stored last
    flip_bit(path, 8 * path.stat().st_size - 1)
    (problem,) = snapshot.verify("full").problems
    found = [str(problem)]
    calls: list[Callable[[], Any]] = [
        lambda: snapshot.restore({"model": target}),
        lambda: snapshot.restore({"model": strided}),
        lambda: snapshot.get_state_dict_for_key("model"),
    ]
    for call in calls:
        with pytest.raises(ChecksumMismatch) as caught:
            call()
        found.append(str(caught.value))
    for said in found:
        assert str(path.relative_to(tmp_path)) in said
        assert ("'model/up'" in said) != ("'model/down'" in said), said


@pytest.mark.parametrize("cut", [0, 1, 1000])
def test_a_chunk_that_is_cut_or_gone_is_named(saved: Path, tmp_path: Path, cut: int) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "s"))
    path = chunks_in(folder)[0]
    if cut:
        os.truncate(path, path.stat().st_size - cut)
    else:
        path.unlink()
    error = problem_of(folder)
    assert isinstance(error, ChecksumMismatch)
    assert error.key == str(path.relative_to(folder))
    assert not actorsnap.sync.Snapshot(folder).verify("quick").ok


def manifest_of(root: Path) -> dict[str, Path]:
    """As ``damage.files``, which looks for plain objects."""
    return {"manifest": next(root.glob("*/manifest/0.json"))}


def _wrong_chunks() -> list[tuple[str, Any]]:
    def last(chunks: list[Any]) -> None:
        del chunks[-1]

    def gap(chunks: list[Any]) -> None:
        chunks[1][0] += 1

    def empty(chunks: list[Any]) -> None:
        chunks[0][1] = chunks[0][0]

    def none(chunks: list[Any]) -> None:
        chunks.clear()

    def beyond(chunks: list[Any]) -> None:
        chunks[-1][1] += 1

    def few_frames(chunks: list[Any]) -> None:
        del chunks[0][3][-1]

    def large_frame(chunks: list[Any]) -> None:
        chunks[0][3][0] = 1 << 62

    def small_frame(chunks: list[Any]) -> None:
        chunks[0][3][0] = 5

    return [
        (change.__name__, change)
        for change in (last, gap, empty, none, beyond, few_frames, large_frame, small_frame)
    ]


@pytest.mark.parametrize(("name", "change"), _wrong_chunks())
def test_a_manifest_that_contradicts_itself_is_refused(
    saved: Path, tmp_path: Path, name: str, change: Any
) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "s"))

    def wrong(document: dict[str, Any]) -> None:
        record = next(r for r in document["objects"] if "/model/" in r["key"])
        change(record["chunks"])

    with mock.patch("tests.api.damage.files", manifest_of):
        resign(folder, wrong)
    with pytest.raises(FormatError) as raised:
        actorsnap.sync.Snapshot(folder).restore(blank())
    assert raised.value.key.endswith("manifest/0.json")


def test_bytes_that_are_in_no_chunk_are_told(saved: Path, tmp_path: Path) -> None:
    """Whoever restores does not want them; who verifies or copies wants to know."""
    folder = Path(shutil.copytree(saved, tmp_path / "s"))

    def longer(document: dict[str, Any]) -> None:
        document["objects"][0]["size"] += 1

    with mock.patch("tests.api.damage.files", manifest_of):
        resign(folder, longer)
    (problem,) = actorsnap.sync.Snapshot(folder).verify("quick").problems
    assert "no chunk begins at" in str(problem)
    with pytest.raises(FormatError, match="no chunk begins at"):
        actorsnap.sync.Snapshot(folder).copy_to(tmp_path / "copy")


def test_plain_objects_with_chunks_are_refused(tmp_path: Path) -> None:
    actorsnap.sync.Snapshot.take(tmp_path, state(1), options=PLAIN)
    resign(tmp_path, lambda d: d["objects"][0].update(chunks=[[0, d["objects"][0]["size"], 0, []]]))
    with pytest.raises(FormatError, match="1 chunks"):
        actorsnap.sync.Snapshot(tmp_path).restore(state(0))


def test_an_older_release_refuses_it(saved: Path) -> None:
    with mock.patch.object(manifest, "FEATURES", ("annotations", "block_sizes")):
        with pytest.raises(UnsupportedFormat, match="compression"):
            actorsnap.sync.Snapshot(saved).restore(blank())


# Faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["fs", "memory"])
async def test_any_failed_write_leaves_nothing(scheme: str, place: str) -> None:
    """A chunk, the manifest and the commit object: all of them are put."""
    for k in itertools.count(1):

        def wrap(inner: Storage, k: int = k) -> Storage:
            return FaultyStorage(inner, fail_at=k, fail_verbs={"put", "put_if_absent"})

        with faulty(wrap):
            try:
                await Snapshot.take(faulty_url(place), state(k), options=ZSTD)
            except ActorSnapError:
                await assert_whole(place, None)
            else:
                break
    assert k > 4
    await assert_whole(place, k)
    assert_idle()


async def test_a_cancelled_save_leaves_nothing(tmp_path: Path) -> None:
    barrier = Barrier(2, verbs=frozenset({"put"}))
    with faulty(lambda inner: BarrierStorage(inner, barrier)):
        pending = await Snapshot.async_take(faulty_url(tmp_path), app_state(), options=ZSTD)
        await asyncio.to_thread(barrier.wait_reached)
        pending.cancel()
        barrier.release()
        with pytest.raises(ActorSnapError):
            await pending.wait()
    await assert_whole(tmp_path, None)
    assert_idle()


# Options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", ["", "zstd:0", "zstd:20", "zstd:", "zstd:1 ", "gzip", "auto", 3, True]
)
def test_other_words_are_refused(value: Any) -> None:
    with pytest.raises(UsageError, match='None, "zstd" or "zstd:1" to "zstd:19", not '):
        Options(compression=value)


def test_the_environment_says_it() -> None:
    assert from_env({"ACTORSNAP_COMPRESSION": "zstd:3"}).compression == "zstd:3"


@pytest.fixture
def without_zstd(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compression, "_MODULE", "no_such_zstd")
    compression._zstd.cache_clear()
    yield
    compression._zstd.cache_clear()


@each_facade
@pytest.mark.usefixtures("without_zstd")
def test_without_the_library_nothing_is_saved(api: Facade, tmp_path: Path) -> None:
    url = tmp_path / "s"
    with pytest.raises(UsageError, match=r"pip install 'actorsnap\[zstd\]'"):
        api.run(api.Snapshot.take(url, state(1), options=Options(compression="zstd")))
    assert not url.exists()


@each_facade
@pytest.mark.usefixtures("without_zstd")
def test_without_the_library_nothing_is_read(api: Facade, saved: Path) -> None:
    target = blank()
    with pytest.raises(UnsupportedFormat, match=r"pip install 'actorsnap\[zstd\]'"):
        api.run(api.Snapshot(saved, options=PLAIN).restore(target))
    for name in ("weight", "noise"):  # the latter did not shrink
        assert not target["model"][name].any()


@each_facade
@pytest.mark.usefixtures("without_zstd")
def test_without_the_library_nobody_says_damaged(api: Facade, saved: Path) -> None:
    assert api.run(api.Snapshot(saved).verify()).ok
    with pytest.raises(UnsupportedFormat, match=r"pip install 'actorsnap\[zstd\]'"):
        api.run(api.Snapshot(saved).verify("full"))
    done = CliRunner().invoke(cli.app, ["verify", "--full", str(saved)])
    assert done.exit_code == 4
    assert "damaged" not in done.output


# An object store ------------------------------------------------------------------------------


@pytest.mark.few
@each_facade
@pytest.mark.parametrize("name", ["moto", "fake_gcs"])
def test_on_an_object_store(api: Facade, name: str, request: pytest.FixtureRequest) -> None:
    server: MotoServer | FakeGcsServer = request.getfixturevalue(name)
    url, storage_options = server.url(server.make_bucket(), "runs/1"), server.storage_options()
    snapshot = api.run(
        api.Snapshot.take(url, app_state(), options=ZSTD, storage_options=storage_options)
    )
    target = blank()
    opened = api.Snapshot(url, storage_options=storage_options)
    assert api.run(opened.restore(target)).is_complete
    assert_same(target["model"].data, app_state()["model"].data)
    assert api.run(opened.verify("full")).ok
    noise = api.run(snapshot.read_object("0/model/noise"))
    assert torch.equal(noise, app_state()["model"]["noise"])
