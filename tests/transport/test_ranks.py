# SPDX-License-Identifier: Apache-2.0
"""The store transport between real processes, while their trainers run collectives."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.cases import slow
from tests.worlds import ROOT, Director


@pytest.fixture(scope="module")
def director() -> Iterator[Director]:
    with Director("tests.transport.ranks") as director:
        yield director


@pytest.mark.parametrize(
    ("num_ranks", "how"),
    [(2, "gloo"), slow(4, "gloo"), (2, "given"), (3, "agent"), (3, "env")],
)
def test_saves_beside_a_trainer(director: Director, num_ranks: int, how: str) -> None:
    found = director.play("direct_saves", num_ranks=num_ranks, how=how)
    for rank in found["ranks"]:
        assert rank["answers"] == [50, 50]
        assert rank["ranks"] == list(range(num_ranks))
        assert rank["name"] == found["ranks"][0]["name"]
        assert rank["threads"] == []
        if how == "gloo":
            whole = sum(range(num_ranks))
            assert rank["sums"] == [whole + num_ranks * step for step in range(40)]
    # Two saves of 50 questions; the coordinator answers and ends; its own do not count.
    sent = [rank["sent"] for rank in found["ranks"]]
    assert sent == [102 * (num_ranks - 1), *[100] * (num_ranks - 1)]
    if how in ("gloo", "given"):
        # What torch itself keeps there aside, the store is as empty as before.
        assert found["keys"] == director.play("direct_keys", num_ranks=num_ranks, how=how)


def test_two_groups_at_once(director: Director) -> None:
    found = director.play("direct_sub_groups")
    for rank, said in enumerate(found):
        assert said["answers"] == [20, 20]
        assert said["ranks"] == [[0, 2], [1, 3]][rank % 2]
        assert said["rank"] == rank // 2
        assert "not a member of group" in said["refused"]
    assert found[0]["name"] == found[2]["name"] != found[1]["name"] == found[3]["name"]


@pytest.mark.slow  # as in tests/ranks/test_rounds.py
def test_a_rank_is_killed(director: Director) -> None:
    found = director.play("direct_trouble", num_ranks=3, whom="2", how="kill")
    coordinator, other = found["ranks"]
    assert coordinator["lost"] == 2
    assert 1.2 < coordinator["at"] - found["began"] < 60
    assert coordinator["silent_s"] > 2.4
    assert other["done"]
    assert coordinator["threads"] == other["threads"] == []


def test_the_coordinator_is_killed(director: Director) -> None:
    found = director.play("direct_trouble", num_ranks=3, whom="0", how="kill")
    assert [rank["lost"] for rank in found["ranks"]] == [0, 0]
    assert [rank["threads"] for rank in found["ranks"]] == [[], []]


@pytest.mark.few(1)
@pytest.mark.parametrize("whom", ["0", "1"])
def test_a_rank_is_stopped_and_comes_back(director: Director, whom: str) -> None:
    found = director.play("direct_trouble", num_ranks=2, whom=whom, how="stop")
    still_there = found["ranks"][1 - int(whom)]
    assert still_there["lost"] == int(whom)
    # It sends what belongs to a save that has ended; the next one does not notice.
    assert [rank["again"] for rank in found["ranks"]] == [10, 10]


def test_the_store_is_killed(director: Director) -> None:
    found = director.play("direct_trouble", num_ranks=3, whom="server", how="kill")
    for rank in found["ranks"]:
        assert "the job's store stopped working" in rank["broken"]
        assert "frame #" not in rank["broken"]
        assert rank["at"] - found["began"] < 60
        assert rank["threads"] == []


def test_a_fork_does_not_use_the_parents_connections(director: Director) -> None:
    for said in director.play("direct_fork"):
        assert "which this process was forked from" in said["said"]
        assert said["status"] == 0
        assert said["answers"] == 5


@pytest.mark.few(1)
@pytest.mark.parametrize("ending", ["", "raise KeyboardInterrupt"])
def test_a_process_may_exit_without_closing(ending: str) -> None:
    script = f"""
import sys, asyncio, threading, time
from actorsnap.transport.store import StorePort
from tests.support.store_server import serve_store
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
store = serve_store()
port = StorePort(store, namespace="job", rank=0, world_size=2,
                 call_soon=loop.call_soon_threadsafe)
save = port.begin()
while not port.is_connected:
    time.sleep(0.01)
{ending}
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == (-signal.SIGINT if ending else 0)
    assert ending or done.stderr == ""
