# SPDX-License-Identifier: Apache-2.0
"""The pace of uploaders, under a virtual clock."""

from __future__ import annotations

import anyio
import pytest
import trio.testing

from actorsnap.actors.items import Pace


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


class Work:
    """Uploaders that work whenever they may, in chunks of some time each."""

    def __init__(self, pace: Pace, num_uploaders: int, chunk_s: float) -> None:
        self.pace = pace
        self.worked_s = 0.0
        self.busy_s = 0.0
        self._num_uploaders = num_uploaders
        self._chunk_s = chunk_s
        self._num_busy = 0
        self._busy_since_s = 0.0

    async def go_on(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            async with anyio.create_task_group() as tasks:
                for number in range(self._num_uploaders):
                    tasks.start_soon(self._upload, 1.0 + 0.1 * number)

    async def _upload(self, factor: float) -> None:
        while True:
            async with self.pace.working():
                if self._num_busy == 0:
                    self._busy_since_s = anyio.current_time()
                self._num_busy += 1
                try:
                    await anyio.sleep(self._chunk_s * factor)
                finally:
                    self._num_busy -= 1
                    if self._num_busy == 0:
                        self.busy_s += anyio.current_time() - self._busy_since_s


@pytest.mark.few
@pytest.mark.parametrize("chunk_s", [0.005, 0.2, 3.0])
@pytest.mark.parametrize("num_uploaders", [1, 8])
@pytest.mark.parametrize("duty", [1.0, 0.5, 0.1])
async def test_they_work_for_the_share_that_is_set(
    duty: float, num_uploaders: int, chunk_s: float
) -> None:
    pace = Pace()
    pace.set(duty)
    work = Work(pace, num_uploaders, chunk_s)
    seconds = max(5.0, 200.0 * chunk_s)
    await work.go_on(seconds)
    assert work.busy_s / seconds == pytest.approx(duty, rel=0.12)


async def test_they_rest_until_it_is_changed() -> None:
    pace = Pace()
    pace.set(0.0)
    work = Work(pace, 2, 0.01)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work.go_on, 20.0)
        await anyio.sleep(10.0)
        assert work.busy_s == 0.0
        pace.set(1.0)
    assert work.busy_s == pytest.approx(10.0, rel=0.1)


async def test_a_long_rest_ends_when_the_pace_is_raised() -> None:
    pace = Pace()
    pace.set(0.02)
    work = Work(pace, 1, 10.0)  # and a rest of 490
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work.go_on, 100.0)
        await anyio.sleep(40.0)
        assert work.busy_s == pytest.approx(10.0)
        pace.set(1.0)
    assert work.busy_s == pytest.approx(70.0)


async def test_one_that_is_cancelled_leaves_the_others_working() -> None:
    pace = Pace()
    pace.set(0.5)
    with anyio.move_on_after(0.005):
        async with pace.working():
            await anyio.sleep(1.0)
    work = Work(pace, 2, 0.01)
    await work.go_on(10.0)
    assert work.busy_s == pytest.approx(5.0, rel=0.1)
