# SPDX-License-Identifier: Apache-2.0
"""Objects that consist of pieces of others."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actorsnap.errors import ChecksumMismatch, ObjectNotFound
from actorsnap.storage import Storage, StorageContext, open_storage
from actorsnap.storage.joined import JoinedStorage, KeyRange
from actorsnap.testing import run_blocking_in_thread

FILES = {"a": bytes(range(50)), "b/c": bytes(range(100, 140)), "empty": b""}


@pytest.fixture(params=["memory", "fs"])
async def inner(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Storage]:
    url = f"memory://{tmp_path.name}" if request.param == "memory" else str(tmp_path)
    storage = open_storage(url, StorageContext(run_blocking=run_blocking_in_thread, durable=False))
    for key, data in FILES.items():
        await storage.put(key, [memoryview(data)])
    yield storage
    await storage.aclose()


@st.composite
def _pieces(draw: st.DrawFn) -> KeyRange:
    key = draw(st.sampled_from(sorted(FILES)))
    cut = sorted(draw(st.tuples(*[st.integers(0, len(FILES[key]))] * 2)))
    return KeyRange(key, *cut)


@given(
    pieces=st.lists(_pieces(), max_size=6),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    cuts=st.lists(st.integers(0, 40), max_size=6),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_reads_what_the_pieces_have(
    inner: Storage, pieces: list[KeyRange], ends: tuple[float, float], cuts: list[int]
) -> None:
    whole = b"".join([FILES[piece.key][piece.start : piece.stop] for piece in pieces])
    start, stop = sorted([round(end * len(whole)) for end in ends])
    storage = JoinedStorage(inner, {"j/0": tuple(pieces)})
    assert await storage.get("j/0") == whole
    assert await storage.get("j/0", start, stop) == whole[start:stop]
    assert (await storage.stat("j/0")).size == len(whole)
    for is_blocking in (False, True):
        if is_blocking and not inner.capabilities.has_blocking_io:
            continue
        memory = bytearray(stop - start)
        bounds = sorted({0, len(memory), *[cut for cut in cuts if cut < len(memory)]})
        views = [memoryview(memory)[a:b] for a, b in itertools.pairwise(bounds)]
        if is_blocking:
            batches = [views[:1], views[1:3], views[3:]]
            await run_blocking_in_thread(storage.read_into_blocking, "j/0", start, batches)
        else:
            await storage.read_into("j/0", start, views)
        assert memory == whole[start:stop]


async def test_other_objects_and_ends(inner: Storage) -> None:
    storage = JoinedStorage(inner, {"j": (KeyRange("a", 40, 50), KeyRange("b/c", 0, 1))})
    assert await storage.get("a") == FILES["a"]
    memory = bytearray(3)
    await storage.read_into("b/c", 1, [memoryview(memory)])
    assert memory == FILES["b/c"][1:4]
    assert (await storage.stat("a")).size == 50
    assert [info.key async for info in storage.list("")] == sorted(FILES)
    assert (await storage.stat("j")).modified_s >= (await storage.stat("a")).modified_s
    for start, stop in ((0, 12), (12, None), (12, 12)):
        with pytest.raises(ChecksumMismatch, match="truncated"):
            await storage.get("j", start, stop)
    with pytest.raises(ChecksumMismatch, match="truncated"):
        await storage.read_into("j", 9, [memoryview(memory)])
    await inner.delete(["b/c"])
    for call in (storage.stat("j"), storage.get("j")):
        with pytest.raises(ObjectNotFound):
            await call
