# SPDX-License-Identifier: Apache-2.0
"""Reading over a network: few requests, several at once, no byte twice, and flipped bits mended."""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import anyio
import pytest
import torch

from actorsnap import ChecksumMismatch, Options, StateDict
from actorsnap.actors import fetcher
from actorsnap.storage.base import Storage, num_bytes
from actorsnap.storage.memory import forget_space
from actorsnap.storage.wrapper import Wrapper
from actorsnap.sync import Snapshot
from tests.api.faults import faulty, faulty_url

KIB, MIB = 1 << 10, 1 << 20
_names = itertools.count()


@pytest.fixture
def url() -> Iterator[str]:
    name = f"network-reads-{next(_names)}"
    yield faulty_url(f"memory://{name}/s")
    forget_space(name)


def random_tensors(num: int, nbytes: int) -> dict[str, torch.Tensor]:
    return {f"w{n}": torch.randint(0, 256, (nbytes,), dtype=torch.uint8) for n in range(num)}


class Counting(Wrapper):
    """Counts requests and bytes of data objects, and how many reads are in flight."""

    def __init__(self, inner: Storage, delay_s: float = 0.0) -> None:
        super().__init__(inner)
        self._delay_s = delay_s
        self.num_requests = self.data_bytes = self.num_running = self.max_running = 0
        self.has_two = threading.Event()

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self.num_requests += 1
        return await self.inner.get(key, start, stop)

    async def read_into(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        self.num_requests += 1
        self.data_bytes += num_bytes(views)
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        if self.num_requests > 3:
            self.has_two.set()
        await anyio.sleep(self._delay_s)
        await self.inner.read_into(key, offset, views)
        self.num_running -= 1


class Flipping(Wrapper):
    """Flips a bit of what is read, the first ``num_times`` times of each key and offset."""

    def __init__(self, inner: Storage, num_times: float) -> None:
        super().__init__(inner)
        self._num_times = num_times
        self.seen: Counter[tuple[str, int]] = Counter()

    def _flips(self, key: str, offset: int) -> bool:
        self.seen[key, offset] += 1
        return self.seen[key, offset] <= self._num_times

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        data = bytearray(await self.inner.get(key, start, stop))
        data[len(data) // 2] ^= self._flips(key, start)
        return bytes(data)

    async def read_into(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        await self.inner.read_into(key, offset, views)
        views[-1][-1] ^= self._flips(key, offset)


def counted(url: str, work: Callable[[], object], delay_s: float = 0.0) -> Counting:
    storages: list[Counting] = []

    def wrap(inner: Storage) -> Storage:
        storages.append(Counting(inner, delay_s))
        return storages[0]

    with faulty(wrap):
        work()
    return storages[0]


@pytest.mark.parametrize("nbytes", [4 * KIB, MIB, MIB + 4 * KIB])
def test_one_tensor_costs_three_requests_and_its_own_bytes(url: str, nbytes: int) -> None:
    tensors = random_tensors(64 * MIB // nbytes if nbytes >= MIB else 2000, nbytes)
    Snapshot.take(url, {"model": StateDict(tensors)})
    found: list[torch.Tensor] = []
    seen = counted(url, lambda: found.append(Snapshot(url).read_object("model/w33")))
    assert torch.equal(found[0], tensors["w33"])
    assert seen.num_requests == 3  # commit object, rank manifest, tensor
    assert seen.data_bytes == nbytes


def test_neighbours_share_a_request(url: str) -> None:
    tensors = random_tensors(2000, 4 * KIB)
    Snapshot.take(url, {"model": StateDict(tensors)})
    target = {"model": StateDict({name: torch.zeros_like(t) for name, t in tensors.items()})}
    seen = counted(url, lambda: Snapshot(url).restore(target))
    assert all(torch.equal(target["model"][name], t) for name, t in tensors.items())
    assert seen.num_requests <= 4
    assert seen.data_bytes == 2000 * 4 * KIB


def test_chunks_of_a_large_tensor_are_read_at_once(url: str) -> None:
    tensors = random_tensors(1, 32 * MIB)
    Snapshot.take(url, {"model": StateDict(tensors)})
    target = {"model": StateDict(w0=torch.zeros_like(tensors["w0"]))}
    options = Options(chunk_bytes=4 * MIB, num_uploaders=6)
    seen = counted(url, lambda: Snapshot(url, options=options).restore(target), delay_s=0.1)
    assert torch.equal(target["model"]["w0"], tensors["w0"])
    assert seen.max_running == 6
    assert seen.data_bytes == 32 * MIB


def test_a_chunk_is_verified_while_the_next_one_comes(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = random_tensors(1, 8 * MIB)
    Snapshot.take(url, {"model": StateDict(tensors)})
    target = {"model": StateDict(w0=torch.zeros_like(tensors["w0"]))}
    options = Options(chunk_bytes=2 * MIB, num_uploaders=2)
    verify = fetcher._verify_all
    storages: list[Counting] = []

    def verify_late(targets: Sequence[fetcher._Target]) -> None:
        assert storages[0].has_two.wait(60), "no read has begun meanwhile"
        verify(targets)

    def wrap(inner: Storage) -> Storage:
        storages.append(Counting(inner))
        return storages[0]

    monkeypatch.setattr(fetcher, "_verify_all", verify_late)
    with faulty(wrap):
        Snapshot(url, options=options).restore(target)
    assert torch.equal(target["model"]["w0"], tensors["w0"])


@pytest.mark.parametrize("is_strided", [False, True])
def test_bits_that_flip_on_the_way_are_read_again(url: str, is_strided: bool) -> None:
    tensors = random_tensors(3, 6 * MIB)
    Snapshot.take(url, {"model": StateDict(tensors)})
    width = 2 if is_strided else 1
    target = {
        "model": StateDict(
            {
                name: torch.zeros(t.numel(), width, dtype=t.dtype)[:, 0]
                for name, t in tensors.items()
            }
        )
    }
    flipping: list[Flipping] = []

    def wrap(inner: Storage) -> Storage:
        flipping.append(Flipping(inner, num_times=1))
        return flipping[0]

    with faulty(wrap):
        Snapshot(url).restore(target)
    assert all(torch.equal(target["model"][name], t) for name, t in tensors.items())
    assert len(flipping[0].seen) >= 4
    assert set(flipping[0].seen.values()) == {2}


def test_bits_that_always_flip_are_never_restored_as_good(url: str) -> None:
    Snapshot.take(url, {"model": StateDict(random_tensors(1, MIB))})
    target = {"model": StateDict(w0=torch.zeros(MIB, dtype=torch.uint8))}
    with (
        faulty(lambda inner: Flipping(inner, num_times=math.inf)),
        pytest.raises(ChecksumMismatch),
    ):
        Snapshot(url).restore(target)
