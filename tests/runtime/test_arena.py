"""Staging memory is reused, bounded, and writable."""

from __future__ import annotations

from actorsnap.runtime.arena import Arena

MIB = 1 << 20


def address(view: memoryview) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def test_a_block_that_came_back_is_lent_again() -> None:
    arena = Arena(8 * MIB)
    first = arena.allocate(MIB)
    where = address(first)
    arena.free(first)
    assert arena.free_bytes == MIB
    again = arena.allocate(MIB - 5)
    assert address(again) == where
    assert len(again) == MIB - 5
    assert arena.free_bytes == 0


def test_two_loans_never_overlap() -> None:
    arena = Arena(8 * MIB)
    views = [arena.allocate(100_000) for _ in range(10)]
    for number, view in enumerate(views):
        view[:] = bytes([number]) * len(view)
    for number, view in enumerate(views):
        assert view[0] == view[-1] == number
    for view in views:
        arena.free(view)


def test_no_more_is_kept_than_the_limit() -> None:
    arena = Arena(2 * MIB)
    views = [arena.allocate(MIB) for _ in range(5)]
    for view in views:
        arena.free(view)
    assert arena.free_bytes == 2 * MIB
    arena.trim()
    assert arena.free_bytes == 0


def test_free_blocks_of_another_size_make_room() -> None:
    arena = Arena(4 * MIB)
    for view in [arena.allocate(MIB) for _ in range(4)]:
        arena.free(view)
    large = arena.allocate(4 * MIB)
    assert arena.free_bytes == 0
    arena.free(large)


def test_an_empty_loan_is_possible() -> None:
    arena = Arena(MIB)
    view = arena.allocate(0)
    assert len(view) == 0
    arena.free(view)
