# SPDX-License-Identifier: Apache-2.0
"""Readers whose snapshot is replaced or deleted under them: nothing is damaged then."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import pytest_asyncio

from actorsnap import Options, Snapshot, SnapshotReplaced
from actorsnap.storage.base import Storage
from actorsnap.storage.wrapper import Wrapper, without_blocking_io
from tests.api.faults import faulty, faulty_url
from tests.api.places import number_of, state

FAST = Options(fsync=False)
Change = Callable[[], Awaitable[Any]]


class Meddler(Wrapper):
    """Lets something happen just before an object whose key has ``word`` in it is read."""

    def __init__(self, inner: Storage, word: str, changes: Iterator[Change]) -> None:
        super().__init__(inner)
        self.capabilities = without_blocking_io(inner.capabilities)
        self._word = word
        self._changes = changes
        self._lock = anyio.Lock()

    async def _meddle(self, key: str) -> None:
        if self._word in key:
            # Of two reads at once the second one meddles later, also if the first has failed.
            with anyio.CancelScope(shield=True):
                async with self._lock:
                    for change in self._changes:
                        await change()
                        return

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        await self._meddle(key)
        return await self.inner.get(key, start, stop)

    async def read_into(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        await self._meddle(key)
        await self.inner.read_into(key, offset, views)

    async def stat(self, key: str) -> Any:
        await self._meddle(key)
        return await self.inner.stat(key)


def meddling(word: str, changes: Iterable[Change]) -> Any:
    left = iter(changes)
    return faulty(lambda inner: Meddler(inner, word, left))


def replace(url: str, number: int) -> Change:
    return lambda: Snapshot.take(url, state(number), overwrite=True, options=FAST)


@pytest_asyncio.fixture
async def url(tmp_path: Path) -> str:
    url = str(tmp_path / "s")
    await Snapshot.take(url, state(1), options=FAST)
    return url


async def restore(snapshot: Snapshot) -> int:
    target = state(-1)
    await snapshot.restore(target)
    return number_of(target)


READERS: dict[str, Callable[[Snapshot], Awaitable[int]]] = {
    "restore": restore,
    "read_object": lambda s: _then(s.read_object("0/progress/step"), int),
    "get_state_dict_for_key": lambda s: _then(
        s.get_state_dict_for_key("model"), lambda found: int(found["weight"][7])
    ),
    "get_manifest": lambda s: _then(s.get_manifest(), lambda m: m["0/progress/step"].value),
}


async def _then(call: Awaitable[Any], get: Callable[[Any], int]) -> int:
    return get(await call)


@pytest.mark.parametrize("word", ["/manifest/", "/data/"])
@pytest.mark.parametrize("reader", READERS)
async def test_a_reader_starts_over_from_what_replaced_it(url: str, word: str, reader: str) -> None:
    with meddling(word, [replace(url, 2), replace(url, 3)]):
        found = await READERS[reader](Snapshot(faulty_url(url)))
    is_read = word == "/manifest/" or reader in ("restore", "get_state_dict_for_key")
    assert found == (3 if is_read else 1)


@pytest.mark.parametrize("level", ["quick", "full"])
async def test_verification_starts_over_too(url: str, level: str) -> None:
    with meddling("/data/", [replace(url, 2)]):
        assert (await Snapshot(faulty_url(url)).verify(level)).ok


async def test_what_is_replaced_for_ever_is_given_up(url: str) -> None:
    with (
        meddling("/data/", [replace(url, number) for number in range(20)]),
        pytest.raises(SnapshotReplaced, match="was replaced while it was read") as caught,
    ):
        await restore(Snapshot(faulty_url(url)))
    assert not caught.value.is_deleted


@pytest.mark.parametrize("word", ["/manifest/", "/data/"])
@pytest.mark.parametrize("call", [restore, lambda s: s.verify("full")])
async def test_what_is_deleted_meanwhile(url: str, word: str, call: Any) -> None:
    with (
        meddling(word, [lambda: Snapshot(url).delete()]),
        pytest.raises(SnapshotReplaced, match="was deleted while it was read") as caught,
    ):
        await call(Snapshot(faulty_url(url)))
    assert caught.value.is_deleted


async def test_a_kept_handle_follows_its_path(url: str) -> None:
    kept, taken = Snapshot(url), await Snapshot.take(url, state(2), overwrite=True, options=FAST)
    assert await restore(kept) == 2
    await Snapshot.take(url, state(3), metadata={"n": 3}, overwrite=True, options=FAST)
    for handle in (kept, taken):
        assert await restore(handle) == 3
        assert await handle.metadata == {"n": 3}
        assert (await handle.get_manifest())["0/progress/step"].value == 3  # type: ignore[union-attr]
        assert await handle.read_object("progress/step") == 3


async def test_readers_on_one_handle_do_not_mix(url: str) -> None:
    """One is replaced under its hands, and another on the same handle has noticed before."""
    kept: list[Snapshot] = []

    async def replace_and_look() -> None:
        await replace(url, 2)()
        await kept[0].get_manifest()

    with meddling("/data/", [replace_and_look]):
        kept.append(Snapshot(faulty_url(url)))
        assert await restore(kept[0]) == 2
