# SPDX-License-Identifier: Apache-2.0
"""What a handle tells about its snapshot, through both facades."""

from __future__ import annotations

import re
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from actorsnap import ChecksumMismatch, NotASnapshot, Options, StateDict, UsageError, sync
from actorsnap.format.manifest import COMMIT_KEY
from actorsnap.testing.faults import FaultyStorage
from tests.api.facades import Facade, each_facade
from tests.api.faults import faulty, faulty_url
from tests.state.saved import Part, Saved


def state() -> dict[str, Any]:
    return {"model": StateDict(w=torch.ones(300)), "a/b": StateDict(x=1)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A snapshot in a folder with others, sorted by number; one is damaged, one unfinished."""
    for number in (10, 9):
        path = tmp_path / f"step-{number}"
        sync.Snapshot.take(path, state(), step=number, metadata={"<b>": "é\n"})
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / COMMIT_KEY).write_bytes(b"{}")
    (tmp_path / "dead" / "20990101T000000-ffffffff-1-00000000").mkdir(parents=True)
    return tmp_path / "step-9"


@each_facade
def test_what_a_handle_tells(api: Facade, saved: Path) -> None:
    snapshot = api.Snapshot(saved)
    assert api.run(snapshot.exists()) is True
    created = api.run(snapshot.created)
    assert 0 <= (datetime.now(UTC) - created).total_seconds() < 600
    assert api.run(snapshot.world_size) == 1
    assert api.run(snapshot.keys()) == ["a/b", "model"]
    objects = [path for path in saved.rglob("*") if path.is_file() and path.name != COMMIT_KEY]
    assert api.run(snapshot.nbytes) == sum(path.stat().st_size for path in objects) > 1200
    # Another attempt's leftovers do not count.
    leftovers = saved / "20990101T000000-ffffffff-1-00000000" / "data"
    leftovers.mkdir(parents=True)
    (leftovers / "x").write_bytes(b"x" * 999)
    assert api.run(snapshot.nbytes) == sum(path.stat().st_size for path in objects)


@each_facade
def test_where_nothing_is(api: Facade, saved: Path) -> None:
    for path in (saved / "no", saved.parent / "dead", saved.parent):
        snapshot = api.Snapshot(path)
        assert api.run(snapshot.exists()) is False
        with pytest.raises(NotASnapshot):
            api.run(snapshot.nbytes)
        with pytest.raises(NotASnapshot):
            api.run(snapshot.keys())
    with pytest.raises(ChecksumMismatch):  # not False: it was there
        api.run(api.Snapshot(saved.parent / "broken").exists())


@each_facade
def test_another_programs_checkpoint(api: Facade, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    snapshot = api.Snapshot(tmp_path / "x.pt")
    assert api.run(snapshot.exists()) is True
    assert api.run(snapshot.nbytes) == (tmp_path / "x.pt").stat().st_size
    age = datetime.now(UTC) - api.run(snapshot.created)
    assert abs(age.total_seconds()) < 600


@each_facade
def test_list(api: Facade, saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = api.run(api.Snapshot.list(saved.parent))
    assert [type(snapshot) for snapshot in found] == [api.Snapshot] * 2
    assert [Path(snapshot.path).name for snapshot in found] == ["step-9", "step-10"]
    assert [record.getMessage() for record in caplog.records if "broken" in record.getMessage()]
    assert "dead" not in caplog.text
    assert "<td>10</td>" in found[1]._repr_html_()  # its commit object was read
    assert api.run(found[1].step) == 10
    target = {"model": StateDict(w=torch.zeros(300))}
    api.run(found[0].restore(target))
    assert target["model"]["w"].sum() == 300
    assert list(api.run(api.Snapshot.list(saved.parent / "no"))) == []
    with pytest.raises(UsageError):
        api.run(api.Snapshot.list(saved.parent, options=3))


@each_facade
def test_listed_handles_keep_options(api: Facade, saved: Path) -> None:
    options = Options(timeout_s=77)
    (first, _) = api.run(api.Snapshot.list(saved.parent, options=options))
    assert first._source.options is options


@each_facade
def test_a_notebook_shows_what_was_read_and_reads_nothing(api: Facade, saved: Path) -> None:
    with faulty(lambda inner: FaultyStorage(inner, fail_at=1)):
        url = faulty_url(str(saved))
        call = "call" if api.Snapshot is sync.Snapshot else "await"
        assert f"not read yet: {call} .tree()" in api.Snapshot(url)._repr_html_()
    snapshot = api.Snapshot(saved)
    assert api.run(snapshot.step) == 9
    shown = snapshot._repr_html_()
    assert "<th>step</th><td>9</td>" in shown
    assert "<th>size</th>" not in shown
    assert "{&quot;&lt;b&gt;&quot;: &quot;é\\n&quot;}" in shown
    assert f"not read yet: {call} .tree()" in shown
    api.run(snapshot.tree())
    assert "<th>keys</th><td>a/b (0 B), model (1.2 KiB)</td>" in snapshot._repr_html_()
    assert "not read yet" not in snapshot._repr_html_()
    size = api.run(snapshot.nbytes)
    shutil.rmtree(saved)
    assert f"<th>size</th><td>{size / 1024:.1f} KiB</td>" in snapshot._repr_html_()


@each_facade
def test_a_notebook_shows_what_was_saved(api: Facade, tmp_path: Path) -> None:
    state = {"b": StateDict(w=torch.zeros(300)), "a<": StateDict(x=1)}
    taken = api.run(api.Snapshot.take(tmp_path / "s", state, step=0, metadata={"run": 7}))
    pending = api.run(api.Snapshot.async_take(tmp_path / "t", state, step=0, metadata={"run": 7}))
    shutil.rmtree(tmp_path / "s")
    for snapshot in (taken, api.run(pending.wait())):
        shown = snapshot._repr_html_()
        assert "<th>step</th><td>0</td>" in shown
        assert re.search(r"<th>data</th><td>\d\.\d KiB</td>", shown)
        assert "<th>size</th>" not in shown  # which is ``nbytes``
        assert "<th>keys</th><td>a&lt;, b</td>" in shown
        assert "{&quot;run&quot;: 7}" in shown
    assert api.run(snapshot.step) == 0
    assert "<th>created</th>" in snapshot._repr_html_()  # as read
    packing = Options(fsync=False, compression="zstd")
    packed = api.run(api.Snapshot.take(tmp_path / "u", state, options=packing))
    shown = packed._repr_html_()
    assert re.search(r"<th>data</th><td>\d\.\d KiB before compression</td>", shown)
    size = api.run(packed.nbytes)
    assert f"<th>size</th><td>{size} B</td>" in packed._repr_html_()


@pytest.mark.parametrize("world_size", [2, 12])  # of more ranks the index is read in parts
def test_keys_of_all_ranks(tmp_path: Path, world_size: int) -> None:
    shared = Part("m/w", torch.ones(2), replicated=True)
    ranks = [[Part("every/x", torch.ones(1))] for _ in range(world_size)]
    ranks[0].append(shared)
    ranks[1].append(Part("a%2Fb/x", torch.ones(3)))
    path = Saved(ranks).write(tmp_path / "s")
    snapshot = sync.Snapshot(path)
    assert snapshot.keys() == ["a/b", "every", "m"]
    assert snapshot.world_size == world_size
    lines = str(snapshot.tree()).splitlines()
    assert lines[0].startswith("└── rank 0  (2 leaves")
    if world_size > 8:
        assert lines[-1] == f"ranks 3 to {world_size - 1}, each like rank 2  (1 leaf, 4 B)"
    assert str(snapshot.tree(rank=1)).splitlines()[0].startswith("└── rank 1  (2 leaves, 16 B)")


@each_facade
def test_tree(api: Facade, saved: Path) -> None:
    snapshot = api.Snapshot(saved)
    tree = api.run(snapshot.tree())
    assert str(tree) == repr(tree)
    assert str(tree).splitlines() == [
        "├── a%2Fb  (1 leaf, 0 B)",
        "│   └── x  1",
        "└── model  (1 leaf, 1.2 KiB)",
        "    └── w  float32[300]  1.2 KiB",
    ]
    assert len(str(api.run(snapshot.tree(depth=1))).splitlines()) == 2
    assert tree._repr_html_() == f"<pre>{tree}</pre>"
    assert str(api.run(snapshot.tree(rank=0))) == str(tree)
    for wrong in ({"depth": 0}, {"depth": "x"}, {"rank": 1}, {"rank": -1}, {"rank": True}):
        with pytest.raises(UsageError):
            api.run(snapshot.tree(**wrong))
