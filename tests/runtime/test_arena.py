# SPDX-License-Identifier: Apache-2.0
"""Staging memory is reused, bounded, and writable."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from actorsnap.runtime import arena as arenas
from actorsnap.runtime.arena import Arena, ArenaView
from tests.conftest import LeakCheck

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


# Shared


def file_bytes(arena: Arena) -> int:
    """Of memory that the arena's file takes now."""
    return os.fstat(arena.share()).st_blocks * 512


@pytest.fixture
def shared(no_leaks: LeakCheck) -> Iterator[Arena]:
    arena = Arena(8 * MIB)
    arena.share()
    yield arena
    arena.close()


def test_another_process_reads_what_is_written(shared: Arena) -> None:
    views = [shared.allocate(size) for size in (100_000, MIB, 5, 3 * MIB)]
    for number, view in enumerate(views, start=1):
        view[:] = bytes([number]) * len(view)
    wanted = [(shared.offset_of(view), len(view)) for view in views]
    script = (
        "import sys, json\n"
        "from actorsnap.runtime.arena import ArenaView\n"
        "arena = ArenaView(int(sys.argv[1]))\n"
        "for _ in range(2):\n"
        "    for offset, nbytes in json.loads(sys.argv[2]):\n"
        "        print(set(arena.view(offset, nbytes)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(shared.share()), json.dumps(wanted)],
        pass_fds=[shared.share()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["{1}", "{2}", "{3}", "{4}"] * 2
    for view in views:
        shared.free(view)


@pytest.mark.parametrize("order", [1, -1])
def test_blocks_of_any_size_lie_within_a_segment(
    order: int, no_leaks: LeakCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actorsnap.runtime.arena._SEGMENT_BYTES", 4 * MIB)
    arena = Arena(1 << 30)
    no_leaks.restart()
    reader = ArenaView(arena.share())
    views = [arena.allocate(MIB * size) for size in (1, 4, 16, 2, 8, 1, 32, 1, 2)[::order]]
    for number, view in enumerate(views, start=1):
        view[:] = bytes([number]) * len(view)
    for number, view in enumerate(views, start=1):
        seen = reader.view(arena.offset_of(view), len(view))
        assert len(seen) == len(view)
        assert seen == bytes([number]) * len(view)
    # The file itself, and a mapping per segment and end.
    assert len(no_leaks.leaked()) <= 1 + 2 * 6
    seen.release()
    del reader, seen
    for view in views:
        arena.free(view)
    arena.trim()
    assert file_bytes(arena) == 0
    del view
    views.clear()
    arena.close()


def test_a_reader_cannot_write(shared: Arena) -> None:
    view = shared.allocate(MIB)
    seen = ArenaView(shared.share()).view(shared.offset_of(view), MIB)
    assert seen.readonly
    shared.free(view)


def test_shared_blocks_are_lent_again_at_their_offset(shared: Arena) -> None:
    first = shared.allocate(MIB)
    offset = shared.offset_of(first)
    shared.free(first)
    again = shared.allocate(MIB - 5)
    assert shared.offset_of(again) == offset
    shared.free(again)


def test_trimmed_memory_is_given_back_also_where_others_map_it(shared: Arena) -> None:
    views = [shared.allocate(MIB) for _ in range(4)]
    reader = ArenaView(shared.share())
    for view in views:
        view[:] = b"\1" * MIB
        assert reader.view(shared.offset_of(view), MIB)[-1] == 1
        shared.free(view)
    assert file_bytes(shared) == 4 * MIB
    shared.trim()
    assert (shared.free_bytes, file_bytes(shared)) == (0, 0)
    # The ranges are used again: the file does not grow for ever.
    size = os.fstat(shared.share()).st_size
    for view in [shared.allocate(MIB) for _ in range(4)]:
        shared.free(view)
    assert os.fstat(shared.share()).st_size == size


def test_a_shared_arena_stays_within_its_limit() -> None:
    arena = Arena(2 * MIB)
    arena.share()
    views = [arena.allocate(MIB) for _ in range(5)]
    for view in views:
        view[:] = b"\1" * MIB
    for view in views:
        arena.free(view)
    assert (arena.free_bytes, file_bytes(arena)) == (2 * MIB, 2 * MIB)
    assert arena.peak_bytes == 5 * MIB
    arena.close()


def test_what_was_lent_before_the_sharing_is_private(shared: Arena) -> None:
    arena = Arena(8 * MIB)
    kept, lent = arena.allocate(MIB), arena.allocate(MIB)
    arena.free(kept)
    arena.share()
    assert arena.free_bytes == 0
    with pytest.raises(LookupError):
        arena.offset_of(lent)
    arena.free(lent)
    assert arena.free_bytes == 0  # or it would be lent again
    arena.close()


def test_warming_up_touches_each_page_once_and_keeps_to_the_limit(shared: Arena) -> None:
    shared.warm_up([3 * MIB] * 4)
    assert (file_bytes(shared), shared.free_bytes) == (6 * MIB, 8 * MIB)
    views = [shared.allocate(3 * MIB) for _ in range(2)]
    for view in views:
        view[:] = b"\1" * len(view)
    assert file_bytes(shared) == 6 * MIB
    for view in views:
        shared.free(view)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_what_a_forked_child_does_leaves_the_parents_memory_alone(shared: Arena) -> None:
    kept, lent = shared.allocate(MIB), shared.allocate(MIB)
    for view in (kept, lent):
        view[:] = b"\1" * MIB
    shared.free(kept)
    pid = os.fork()
    if pid == 0:
        shared.forget()
        shared.free(lent)
        shared.trim()
        shared.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert set(lent) == {1}
    assert file_bytes(shared) == 2 * MIB
    shared.free(lent)


def test_nothing_is_left_of_an_arena_that_is_closed(no_leaks: LeakCheck) -> None:
    arena = Arena(8 * MIB)
    before = os.listdir("/dev/shm")
    arena.share()
    lent = arena.allocate(MIB)
    assert os.listdir("/dev/shm") == before
    arena.close()
    lent[:] = b"\1" * MIB  # still good
    arena.free(lent)
    arena.close()


def test_no_memory_is_an_error_and_leaves_the_arena_usable(
    shared: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    with monkeypatch.context() as patched:
        patched.setattr("actorsnap.runtime.arena.mmap.mmap", refuse)
        with pytest.raises(MemoryError):
            shared.allocate(MIB)
    assert shared.lent_bytes == 0
    shared.free(shared.allocate(MIB))


# Pinned memory ------------------------------------------------------------------------------


class Pins:
    """What a device has pinned, by address."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.num_calls = 0
        self.refusal: OSError | None = None

    def pin(self, address: int, nbytes: int) -> None:
        self.num_calls += 1
        if self.refusal is not None:
            raise self.refusal
        assert address not in self.pinned
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]


@pytest.fixture(params=["private", "shared"])
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    arena = Arena(8 * MIB)
    if request.param == "shared":
        arena.share()
    yield arena
    arena.close()


def test_a_block_is_pinned_once_and_whole(arena: Arena) -> None:
    pins = Pins()
    view = arena.allocate(MIB - 5)
    arena.pin(view, pins)
    assert pins.pinned == {address(view): MIB}
    arena.free(view)
    again = arena.allocate(MIB)
    arena.pin(again, pins)
    assert pins.num_calls == 1
    assert arena.pinned_bytes == MIB
    arena.free(again)


def test_pinned_blocks_are_unpinned_when_they_are_given_up(arena: Arena) -> None:
    pins = Pins()
    views = [arena.allocate(2 * MIB) for _ in range(5)]
    for view in views:
        arena.pin(view, pins)
    for view in views:
        arena.free(view)
    assert sum(pins.pinned.values()) == arena.pinned_bytes == 8 * MIB
    other = arena.allocate(4 * MIB)  # of another size: the free ones make room
    assert pins.pinned == {}
    arena.pin(other, pins)
    arena.free(other)
    arena.trim()
    assert pins.pinned == {}
    assert arena.pinned_bytes == 0


def test_what_is_lent_when_an_arena_is_closed_is_unpinned_when_it_comes_back(arena: Arena) -> None:
    pins = Pins()
    view = arena.allocate(MIB)
    arena.pin(view, pins)
    arena.close()
    assert pins.pinned == {address(view): MIB}
    arena.free(view)
    assert pins.pinned == {}


def test_pages_are_unpinned_before_they_are_cut_out(shared: Arena) -> None:
    """A device would go on to write to pages that are nobody's."""
    file = shared.share()

    class Watching(Pins):
        def unpin(self, address: int) -> None:
            assert os.fstat(file).st_blocks * 512 == MIB
            super().unpin(address)

    pins = Watching()
    view = shared.allocate(MIB)
    view[:] = b"\1" * MIB
    shared.pin(view, pins)
    shared.free(view)
    shared.trim()
    assert (pins.pinned, file_bytes(shared)) == ({}, 0)


def test_a_refusal_is_logged_once_and_is_no_error(
    arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    pins = Pins()
    pins.refusal = OSError("no pages left")
    view = arena.allocate(MIB)
    for _ in range(3):
        arena.pin(view, pins)
    arena.free(view)
    assert pins.num_calls == 1
    assert [line for line in caplog.messages if "no pages left" in line] == caplog.messages
    assert arena.pinned_bytes == 0


def test_a_warm_up_pins_what_it_touches(arena: Arena) -> None:
    pins = Pins()
    arena.warm_up([3 * MIB] * 4, pins)
    assert sum(pins.pinned.values()) == 8 * MIB
    view = arena.allocate(3 * MIB)
    arena.pin(view, pins)
    assert pins.num_calls == 2
    arena.free(view)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_unpins_nothing(arena: Arena) -> None:
    pins = Pins()
    kept, lent = arena.allocate(MIB), arena.allocate(MIB)
    for view in (kept, lent):
        arena.pin(view, pins)
    arena.free(kept)
    pid = os.fork()
    if pid == 0:
        arena.forget()
        arena.free(lent)
        arena.trim()
        os._exit(len(pins.pinned))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    arena.free(lent)


def test_an_old_kernel_touches_the_pages_itself(
    shared: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Linux 5.14 it cannot be asked for them."""

    class OldKernel:
        @staticmethod
        def madvise(address: int, nbytes: int, advice: int) -> int:
            return -1

    kept = shared.allocate(MIB)
    kept[:] = b"\7" * MIB
    shared.free(kept)
    monkeypatch.setattr(arenas, "_libc", OldKernel())
    shared.warm_up([MIB] * 4)
    assert file_bytes(shared) == 4 * MIB
    views = [shared.allocate(MIB) for _ in range(4)]
    assert any(view == b"\7" * MIB for view in views), "bytes were changed"
    for view in views:
        shared.free(view)
