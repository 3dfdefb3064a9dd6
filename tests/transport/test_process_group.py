# SPDX-License-Identifier: Apache-2.0
"""Which ranks save together (``state.process_group``). Real jobs are in ``test_ranks.py``."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from actorsnap import UsageError
from actorsnap.state.process_group import Group, StoreAddress, find_group, has_queues, likely_ranks
from actorsnap.transport.meeting import Meeting
from tests.support.store_server import serve_store

# Their stubs are not exported.
_dist: Any = dist
FileStore, HashStore = _dist.FileStore, _dist.HashStore
PrefixStore, TCPStore = _dist.PrefixStore, _dist.TCPStore

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def _ranks(rank: int, world_size: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(world_size)}


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process only."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_process_of_its_own() -> None:
    assert find_group(environ={}) is None
    assert find_group(environ={"RANK": "0", "WORLD_SIZE": "2"}) is None
    assert find_group(environ=TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert find_group(store=HashStore(), environ=_ranks(0, 1)) is None


@pytest.mark.usefixtures("alone")
def test_a_process_group_of_one() -> None:
    assert find_group(environ=TORCHRUN) is None
    assert find_group(dist.new_group([0])) is None


def test_a_group_that_was_destroyed(alone: None) -> None:
    group = dist.group.WORLD
    dist.destroy_process_group()
    with pytest.raises(UsageError, match="destroyed"):
        find_group(group)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


def test_the_environment_connects_to_nothing() -> None:
    found = find_group(environ=TORCHRUN)
    assert found is not None
    assert (found.rank, found.world_size, found.ranks) == (1, 4, (0, 1, 2, 3))
    port = int(TORCHRUN["MASTER_PORT"])
    assert found.address == StoreAddress(TORCHRUN["MASTER_ADDR"], port)
    assert likely_ranks(TORCHRUN) == int(TORCHRUN["WORLD_SIZE"])
    assert likely_ranks({}) == likely_ranks({"WORLD_SIZE": ""}) == 1
    assert find_group(environ=TORCHRUN) == found


def test_names_tell_jobs_and_starts_apart() -> None:
    def name(**variables: str) -> str:
        found = find_group(environ=TORCHRUN | variables)
        assert found is not None
        return found.name

    names = {
        name(),
        name(TORCHELASTIC_RUN_ID="a"),
        name(TORCHELASTIC_RUN_ID="b"),
        name(TORCHELASTIC_RUN_ID="a", TORCHELASTIC_RESTART_COUNT="1"),
    }
    assert len(names) == 4


def test_a_given_store() -> None:
    server = serve_store()
    store = PrefixStore("job", server)
    found = find_group(store=store, environ=_ranks(2, 3))
    assert found is not None
    assert (found.rank, found.ranks) == (2, (0, 1, 2))
    assert found.store is store
    assert found.address == StoreAddress("127.0.0.1", server.port)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group": "world"}, "must be a torch.distributed ProcessGroup, not str"),
        ({"group": dist.GroupMember.NON_GROUP_MEMBER}, "not a member"),
        ({"store": HashStore()}, "needs RANK in the environment"),
        ({"store": HashStore(), "environ": {"RANK": "0"}}, "needs WORLD_SIZE in the environment"),
        ({"store": HashStore(), "environ": _ranks(2, 2)}, r"rank 2 is not in \[0, 2\)"),
        ({"store": HashStore(), "environ": _ranks(0, 2)}, "known to one process only"),
        ({"store": {}, "environ": _ranks(0, 2)}, "must be a c10d store, not dict"),
        ({"environ": TORCHRUN | {"RANK": "4"}}, r"rank 4 is not in \[0, 4\)"),
        ({"environ": TORCHRUN | {"RANK": "x"}}, "RANK='x' in the environment is not an integer"),
    ],
)
def test_what_cannot_work(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_group(**({"environ": {}} | arguments))


def test_stores_without_queues(tmp_path: Path) -> None:
    for store in (
        FileStore(str(tmp_path / "s"), 2),
        PrefixStore("x", FileStore(str(tmp_path / "t"), 2)),
    ):
        found = find_group(store=store, environ=_ranks(0, 2))
        assert found is not None
        assert found.address is None
        assert not has_queues(found.store)
    old = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)
    with pytest.raises(UsageError, match="use_libuv"):
        find_group(store=old, environ=_ranks(0, 2))


def test_a_group_that_was_found_before() -> None:
    assert find_group(Group.of_one()) is None
    found = Group(1, 2, (3, 5), HashStore(), "name")
    assert find_group(found) is found


def test_ranks_meet_through_a_file_store(tmp_path: Path) -> None:
    stores = [FileStore(str(tmp_path / "s"), 2) for _ in range(2)]
    host, guest = [Meeting(store, name="a", rank=rank) for rank, store in enumerate(stores)]
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(guest.clone)
        here, there = host.clone(), waiting.result()
    here.queue_push("box", b"hello")
    assert there.queue_pop("box") == b"hello"
    assert host.clone().port == there.port


def test_rank_0_cannot_host() -> None:
    with socket.create_server(("", 0)) as taken:
        environ = TORCHRUN | {"RANK": "0", "MASTER_PORT": str(taken.getsockname()[1])}
        with pytest.raises(UsageError, match="cannot host a store at MASTER_ADDR:MASTER_PORT"):
            find_group(environ=environ)
