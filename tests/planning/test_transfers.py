# SPDX-License-Identifier: Apache-2.0
"""Transfers follow what a link gives: on simulated links, without a clock."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.planning.restore import Range, Read, plan_reads
from actorsnap.planning.transfers import MAX_JOINED_BYTES, Climb, ReadQueue

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class Link:
    """Latency of a request; MiB/s of a connection, and of all together."""

    latency_s: float
    each: float
    all: float


@dataclass
class Transfer:
    size: int
    round: int
    begin_s: float
    latency_s: float
    left: float


LOOPBACK = Link(0.0, 2500, 5000)  # 40 Gbit
NEAR = Link(0.05, 200, 10_000)
FAR = Link(0.2, 20, 10_000)
FULL = Link(0.05, 200, 200)


def run(
    link: Link, nbytes: int, *, most: int = 32, chunk: int = 16 * MIB, joins: bool = True
) -> tuple[float, Climb, list[int]]:
    """Reads an object; returns the seconds, the climb, and the sizes in their order."""
    reads = plan_reads([Range("a", 0, nbytes)], chunk_bytes=chunk, max_gap_bytes=0)
    queue = ReadQueue(reads, may_join=lambda read: joins, max_gap_bytes=0)
    climb = Climb(first=8, most=most)
    running: list[Transfer] = []
    sizes: list[int] = []
    now = 0.0
    while True:
        while len(running) < climb.at_once and (read := queue.take(climb.at_once)):
            sizes.append(read.stop - read.start)
            running.append(Transfer(sizes[-1], climb.begin(), now, link.latency_s, sizes[-1]))
        if not running:
            return now, climb, sizes
        active = [each for each in running if each.latency_s <= 0]
        speed = min(link.each, link.all / max(1, len(active))) * MIB
        waits = [each.latency_s for each in running if each.latency_s > 0]
        step = min([each.left / speed for each in active] + waits)
        now += step
        for each in running:
            if each.latency_s > 0:
                each.latency_s -= step
            else:
                each.left -= speed * step
        ended = [each for each in running if each.latency_s < 1e-9 and each.left < 1]
        for each in running:
            each.latency_s = each.latency_s if each.latency_s > 1e-9 else 0.0
        for each in ended:
            running.remove(each)
            climb.end(each.round, each.size, now - each.begin_s)
            queue.end(each.size, now - each.begin_s)


@pytest.mark.parametrize(
    ("link", "least", "most"), [(LOOPBACK, 8, 8), (NEAR, 32, 32), (FAR, 32, 32), (FULL, 8, 8)]
)
def test_transfers_are_added_while_that_pays(link: Link, least: int, most: int) -> None:
    _, climb, _ = run(link, 8 * GIB)
    assert least <= climb.at_once <= most


@pytest.mark.parametrize("link", [LOOPBACK, NEAR, FAR, FULL])
def test_no_link_is_slower_than_with_eight_of_sixteen_mib(link: Link) -> None:
    for nbytes in (256 * MIB, GIB, 4 * GIB):
        fixed, _, _ = run(link, nbytes, most=8, joins=False)
        assert run(link, nbytes)[0] <= 1.1 * fixed


def test_a_far_link_is_three_times_as_fast_as_with_eight() -> None:
    assert run(FAR, 16 * GIB, most=8, joins=False)[0] > 3 * run(FAR, 16 * GIB)[0]


def test_the_bound_holds_and_one_at_a_time_stays_one() -> None:
    assert run(FAR, 4 * GIB, most=12)[1].at_once == 12
    assert run(FAR, GIB, most=1)[1].at_once == 1


def test_a_failed_increase_is_tried_again_when_the_link_may_have_changed() -> None:
    climb = Climb(first=8, most=32)
    speeds = {8: 100.0, 16: 50.0, 32: 25.0}
    seen: list[int] = []
    for number in range(400):
        if number == 200:
            speeds = dict.fromkeys(speeds, 100.0)
        seen.append(climb.at_once)
        climb.end(climb.begin(), 1000, 1000 / speeds[climb.at_once])
    assert seen[:8] == [8] * 8
    assert seen[8:24] == [16] * 16
    assert seen[24:160] == [8] * 136
    assert climb.at_once == 32


def test_what_began_before_a_change_says_nothing_about_it() -> None:
    climb = Climb(first=8, most=16)
    old = climb.begin()
    for _ in range(8):
        climb.end(climb.begin(), 100, 1.0)
    assert climb.at_once == 16
    for _ in range(16):
        climb.end(old, 100, 0.001)
    for _ in range(16):
        climb.end(climb.begin(), 100, 2.0)
    assert climb.at_once == 8


def test_reads_grow_on_a_quick_link_and_end_small() -> None:
    _, _, sizes = run(LOOPBACK, 2 * GIB, most=8)
    assert sizes[:8] == [16 * MIB] * 8
    assert max(sizes) == MAX_JOINED_BYTES
    assert sizes[-4:] == [16 * MIB] * 4
    assert len(sizes) < 64
    assert sum(sizes) == 2 * GIB


def test_reads_stay_small_on_a_slow_link() -> None:
    _, _, sizes = run(Link(0.2, 1, 10), 2 * GIB)
    assert set(sizes) == {16 * MIB}


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"), st.integers(0, 400), st.integers(1, 60), st.booleans()
        ).map(lambda t: Range(t[0], t[1] * 1000, (t[1] + t[2]) * 1000, t[3])),
        min_size=1,
        max_size=30,
    ),
    st.integers(0, 40_000),
)
def test_joined_reads_cover_what_the_planned_ones_do(requests: list[Range], max_gap: int) -> None:
    reads = plan_reads(requests, chunk_bytes=20_000, max_gap_bytes=max_gap)

    def may_join(read: Read) -> bool:
        return all(requests[part.request].in_place for part in read.parts)

    queue = ReadQueue(reads, may_join=may_join, max_gap_bytes=max_gap)
    queue.end(10**9, 1.0)
    found: list[Read] = []
    while (read := queue.take(1)) is not None:
        found.append(read)
    assert [part for read in found for part in read.parts] == [p for r in reads for p in r.parts]
    for read in found:
        assert len(read.gaps) == len(read.parts)
        assert max(read.gaps) <= max_gap
        inside = sum(read.gaps) + sum([part.stop - part.start for part in read.parts])
        assert inside == read.stop - read.start
        at = read.start
        for gap, part in zip(read.gaps, read.parts, strict=True):
            request = requests[part.request]
            assert (request.key, request.start + part.start) == (read.key, at + gap)
            at += gap + part.stop - part.start
        assert may_join(read) or read in reads
