# SPDX-License-Identifier: Apache-2.0
"""What is read out of a trace: shares, overlap, waits; and the page."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from actorsnap import cli
from actorsnap.actors.trace import Recorder, Row, Wait, Work
from actorsnap.runtime import tracefile
from actorsnap.runtime.tracefile import About, TraceFile

MS = 1_000_000
SECOND = 1_000_000


class Clock:
    """Nanoseconds that pass when told."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


def a_trace(*, rank: int = 0, url: str = "s", at_s: int = 1_700_000_000) -> TraceFile:
    """Staging from 0 to 40 ms; storing from 20 to 80; a wait of 30 ms in between."""
    clock = Clock()
    recorder = Recorder(clock)
    staging, uploader = recorder.add_row("staging"), recorder.add_row("uploader")

    def until(row: Row, ms: int, kind: Work | Wait, nbytes: int = 0) -> None:
        clock.ns = ms * MS
        row.note(kind, "a" if nbytes else "", 0, nbytes)

    until(uploader, 20, Wait.CHUNK)
    until(staging, 40, Work.STAGE, 4000)
    until(uploader, 60, Work.STORE, 3000)
    until(uploader, 80, Work.STORE, 1000)
    until(staging, 70, Wait.MEMORY)
    recorder.mark("retry", key="a")
    about = About(
        op="save",
        url=url,
        attempt="x",
        rank=rank,
        world_size=2,
        outcome="committed",
        begin_us=at_s * SECOND,
        end_us=at_s * SECOND + 100_000,
        retries=1,
    )
    return tracefile.trace_of(recorder, about, epoch_ns=at_s * SECOND * 1000)


def test_shares_overlap_and_waits() -> None:
    (summary,) = tracefile.summaries(a_trace())
    stage, store, *waits = summary.stages
    assert (stage.kind, stage.nbytes, stage.busy_s) == ("stage", 4000, 0.04)
    assert (store.kind, store.nbytes, store.busy_s) == ("store", 4000, 0.06)
    assert store.bytes_per_s == pytest.approx(4000 / 0.06)
    assert [wait.kind for wait in waits] == ["wait for memory", "wait for a chunk"]
    assert (summary.moving_s, summary.overlapping_s) == (0.08, 0.02)
    longest = summary.longest[0]
    assert (longest.actor, longest.seconds, longest.at_s) == ("staging 0", 0.03, 0.04)


def test_busy_counts_once_what_several_do_and_spent_each() -> None:
    clock = Clock()
    recorder = Recorder(clock)
    rows = [recorder.add_row("uploader") for _ in range(3)]
    clock.ns = 10 * MS
    for row in rows:
        row.note(Work.STORE, "a", 0, 1)
    about = msgspec.structs.replace(a_trace().abouts[0], begin_us=0, end_us=10_000)
    (summary,) = tracefile.summaries(tracefile.trace_of(recorder, about, epoch_ns=0))
    (store,) = summary.stages
    assert store.busy_s == 0.01
    assert store.spent_s == pytest.approx(0.03)
    assert summary.overlapping_s == 0  # of one kind only


def test_a_merged_trace_has_each_rank_beside_the_other(tmp_path: Path) -> None:
    merged = tracefile.merge([a_trace(rank=0), a_trace(rank=1, at_s=1_700_000_001)])
    tracefile.write(str(tmp_path / "t.json"), merged)
    again = tracefile.read(str(tmp_path / "t.json"))
    assert again == merged
    assert {event.pid for event in again.trace_events} == {0, 1}
    one, other = tracefile.summaries(again)
    assert one.stages == other.stages


def test_two_calls_of_a_rank_have_rows_of_their_own() -> None:
    merged = tracefile.merge([a_trace(), a_trace(at_s=1_700_000_001)])
    named = [event.tid for event in merged.trace_events if event.name == "thread_name"]
    assert named == [1, 2, 3, 4]
    one, other = tracefile.summaries(merged)
    assert one.stages == other.stages
    assert one.longest == other.longest


def test_calls_of_a_rank_that_overlap_count_for_themselves() -> None:
    merged = tracefile.merge([a_trace(), a_trace()])
    (alone,) = tracefile.summaries(a_trace())
    for summary in tracefile.summaries(merged):
        assert summary.stages == alone.stages
        assert summary.longest == alone.longest


def test_calls_that_end_at_once_may_write_to_one_path(tmp_path: Path) -> None:
    path, trace = tmp_path / "t.json", a_trace()

    def write(_: int) -> None:
        for _ in range(100):
            tracefile.write(str(path), trace)
            assert tracefile.read(str(path)) == trace

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "device"
    os.mkfifo(path)
    with pytest.raises(OSError, match="no regular file"):
        tracefile.write(str(path), a_trace())
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_beyond_the_bound_spans_are_counted_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorsnap.actors.trace.MAX_SPANS", 2)
    row = Recorder(Clock()).add_row("uploader")
    for _ in range(5):
        row.note(Work.STORE, "a", 0, 10)
    record = row.record
    assert (len(record.spans), record.num_dropped, record.totals[Work.STORE].nbytes) == (2, 3, 50)


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, ["trace", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_shows_a_table(tmp_path: Path) -> None:
    tracefile.write(str(tmp_path / "t.json"), a_trace())
    code, out, _ = run(tmp_path / "t.json")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == (
        "save s rank 0: committed after 0.100 s, 25% of 0.080 s with bytes overlap, 1 retry"
    )
    assert lines[2] == "stage\t0.040 s\t40%\t0.040 s\t3.9 KiB\t97.7 KiB"
    assert "staging 0\tmemory\t0.030 s\t0.040 s" in lines


def test_the_page_needs_nothing_else_and_runs_nothing_of_the_trace(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>/*data*/null<!--tables-->"
    files = [tmp_path / "0.json", tmp_path / "1.json"]
    for rank, file in enumerate(files):
        tracefile.write(str(file), a_trace(rank=rank, url=evil))
    page_file = tmp_path / "t.html"
    assert run(*files, "--html", page_file) == (0, f"wrote {page_file}\n", "")
    page = (tmp_path / "t.html").read_text()
    assert not re.search(r"(src|href)\s*=|https?://|@import", page)
    assert page.count("<script>") == page.count("</script>") == 1
    events = re.search(r"const events = (.*);\n", page)
    assert events is not None
    shown = json.loads(events[1])
    assert {event["pid"] for event in shown} == {0, 1}
    assert evil in shown[0]["args"]["name"]
    assert page.count("<table>") == 4


# As much of a browser as the page uses; says what is drawn.
BROWSER = """
const drawn = [], heard = {};
const context = new Proxy({ fillRect(...at) { drawn.push([this.fillStyle, ...at]) } }, {
  get: (all, name) => all[name] || (() => 0),
  set: (all, name, value) => (all[name] = value, true) });
const element = () => ({ style: {}, clientWidth: 1170, append() {}, getContext: () => context,
  addEventListener(name, call) { heard[name] = call } });
const elements = {};
globalThis.document = { createElement: element, getElementById: id => elements[id] ||= element() };
globalThis.addEventListener = () => {};
globalThis.devicePixelRatio = 1;
"""
POINT = """
heard.mousemove({ offsetX: 500, offsetY: 50, clientX: 0, clientY: 0 });
heard.wheel({ offsetX: 500, deltaY: -100, preventDefault() {} });
heard.dblclick();
console.log(JSON.stringify([drawn, elements.tip.textContent]));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no JavaScript here")
def test_the_page_draws_the_spans(tmp_path: Path) -> None:
    page = tracefile.page(a_trace(), [])
    script = tmp_path / "page.js"
    source = page.partition("<script>")[2].partition("</script>")[0]
    script.write_text(BROWSER + source.replace('"use strict";', "") + POINT)
    done = subprocess.run(["node", script], check=True, capture_output=True, text=True)
    drawn, tip = json.loads(done.stdout)
    # 80 ms are 1000 pixels, to the right of the names.
    staging, storing = "#1f77b4", "#ff7f0e"
    rects = [(color, x, width) for color, x, _, width, _ in drawn]
    assert (staging, 170, 500) in rects
    assert (storing, 420, 500) in rects
    assert tip.splitlines() == ["stage  40.000 ms", "at 0 µs", "key: a", "offset: 0", "bytes: 4000"]


def test_merging_writes_what_can_be_read_again(tmp_path: Path) -> None:
    for rank in (0, 1):
        tracefile.write(str(tmp_path / f"{rank}.json"), a_trace(rank=rank))
    out = tmp_path / "all.json"
    assert run(tmp_path / "0.json", tmp_path / "1.json", "--merged", out)[0] == 0
    assert [about.rank for about in tracefile.read(str(out)).abouts] == [0, 1]


DEEP = b'{"traceEvents": [{"ph": "X", "name": "", "pid": 0, "tid": 0, "args": {"": ' + b"[" * 9999
HUGE = msgspec.json.encode(a_trace()).replace(b'"nbytes":4000', b'"nbytes":4' + 400 * b"0")


@pytest.mark.parametrize(
    "content", [None, b"{", b"{}", b'{"traceEvents": []}', b"\xff", DEEP, HUGE]
)
def test_what_is_no_trace_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "t.json"
    if content is not None:
        file.write_bytes(content)
    code, _, err = run(file)
    assert code == 2
    assert str(file) in err.replace("\n", "")
