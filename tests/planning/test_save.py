"""Shared items are written once, by the lightest rank, and every rank computes the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actorsnap.planning.packing import Item
from actorsnap.planning.save import plan_save


def item(path: str, nbytes: int, **more: object) -> Item:
    return Item(path, "uint8", (nbytes,), nbytes, 1, **more)  # type: ignore[arg-type]


@given(
    st.integers(1, 6),
    st.lists(st.integers(1, 1000), max_size=30),
    st.lists(st.lists(st.integers(1, 1000), max_size=5), max_size=6),
)
def test_replicated_once_private_always(
    world: int, shared: list[int], private: list[list[int]]
) -> None:
    inventories = [
        [item(f"m/{i}", n, replicated=True) for i, n in enumerate(shared)]
        + [item(f"p/{i}", n) for i, n in enumerate(private[r] if r < len(private) else [])]
        for r in range(world)
    ]
    skips = plan_save(inventories)
    writers: dict[str, int] = {}
    loads = []
    for inventory, skip in zip(inventories, skips, strict=True):
        assert list(skip) == sorted(set(skip))
        load = 0
        for index, held in enumerate(inventory):
            if index not in skip:
                load += held.nbytes
                if held.replicated:
                    writers[held.path] = writers.get(held.path, 0) + 1
            else:
                assert held.replicated
        loads.append(load)
    assert writers == {f"m/{i}": 1 for i in range(len(shared))}
    if shared and not any(private):
        assert max(loads) - min(loads) <= max(shared)


def test_the_same_shard_on_two_ranks_is_written_once() -> None:
    shard = item("m/w", 10, offsets=(0,), global_shape=(20,))
    other = item("m/w", 10, offsets=(10,), global_shape=(20,))
    assert plan_save([[shard], [shard], [other]]) == [(), (0,), ()]
