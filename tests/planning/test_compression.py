"""When ``"auto"`` compresses: only where saves become faster, and it notices when links change."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorsnap.planning.compression import (
    NUM_SAMPLES,
    CompressionChoice,
    Sampled,
    sample_bytes,
    shrinks,
)

MIB = 1 << 20


@dataclass
class World:
    """A link, a codec, and a state; bytes per second.

    A save goes at the pace of whichever is slower, with what is compressed being less.
    """

    link: float
    codec: float
    ratio: float
    state_bytes: int = 512 * MIB
    overhead_s: float = 0.0

    def seconds(self, is_compressed: bool) -> float:
        if not is_compressed:
            return self.state_bytes / self.link + self.overhead_s
        slower = min(self.codec, self.link * self.ratio)
        return self.state_bytes / slower + self.overhead_s

    def save(self, choice: CompressionChoice) -> bool:
        """Makes a save; returns whether it was compressed."""
        is_compressed = choice.decide()
        sampled = None
        if not is_compressed and choice.wants_sample:
            nbytes = NUM_SAMPLES * sample_bytes(self.state_bytes)
            compressed = max(1, round(nbytes / self.ratio))
            sampled = Sampled(
                nbytes=nbytes,
                compressed_bytes=compressed,
                seconds=2 * nbytes / self.codec,
                num_threads=2,
            )
        choice.learn(
            is_compressed=is_compressed,
            state_bytes=self.state_bytes,
            seconds=self.seconds(is_compressed),
            sampled=sampled,
        )
        return is_compressed


def test_it_begins_plain() -> None:
    choice = CompressionChoice()
    assert not choice.decide()
    assert choice.wants_sample


@given(st.floats(1e6, 1e10), st.floats(1e7, 1e10), st.floats(0.99, 20), st.floats(0, 5))
def test_only_what_becomes_faster_is_compressed(
    link: float, codec: float, ratio: float, overhead_s: float
) -> None:
    world = World(link=link, codec=codec, ratio=ratio, overhead_s=overhead_s)
    choice = CompressionChoice()
    saves = [world.save(choice) for _ in range(60)]
    assert not any(saves[:2])
    gain = world.seconds(False) / world.seconds(True)
    if gain < 1.05:
        # What is always there beside the link may mislead the first one, and no other.
        assert sum(saves) <= 3
    sure = World(link=link, codec=codec / 1.5, ratio=ratio, overhead_s=overhead_s)
    if sure.seconds(False) / sure.seconds(True) > 1.15:
        assert sum(saves) >= 50


def test_a_fast_link_is_never_compressed() -> None:
    choice = CompressionChoice()
    world = World(link=3e9, codec=1e9, ratio=1.4)
    assert not any(world.save(choice) for _ in range(100))


def test_a_link_that_becomes_fast_is_noticed() -> None:
    choice = CompressionChoice()
    world = World(link=1e8, codec=1e9, ratio=1.4)
    assert sum(world.save(choice) for _ in range(18)) >= 15
    world.link = 5e9
    assert sum(world.save(choice) for _ in range(100)) <= 20
    world.link = 1e8
    assert sum(world.save(choice) for _ in range(20)) >= 15


def test_a_save_that_is_slow_for_another_reason_is_none_of_the_links() -> None:
    """The first of a process, or one beside other work."""
    choice = CompressionChoice()
    world = World(link=3e9, codec=1e9, ratio=1.4, overhead_s=30)
    assert not world.save(choice)
    world.overhead_s = 0
    assert not world.save(choice)
    world.overhead_s = 30
    assert not world.save(choice)
    assert not choice.decide()


def test_what_does_not_shrink_is_not_compressed() -> None:
    choice = CompressionChoice()
    world = World(link=1e8, codec=1e9, ratio=1.02)
    assert not any(world.save(choice) for _ in range(100))


@pytest.mark.parametrize("state_bytes", [0, 1 * MIB, 16 * MIB, 1 << 30, 1 << 40])
def test_samples_are_a_small_part(state_bytes: int) -> None:
    nbytes = sample_bytes(state_bytes)
    assert nbytes <= MIB
    assert nbytes * NUM_SAMPLES <= state_bytes / 250
    assert (nbytes > 0) == (state_bytes >= 16 * MIB)


@pytest.mark.parametrize(
    ("done", "packed", "num_frames", "expected"),
    [
        (1, 1, 1, True),  # too early to tell
        (3, 3, 3, True),
        (4, 4, 4, False),
        (4, 3, 4, True),
        (16, 15.5, 16, True),
        (16, 15.6, 16, False),
        (16, 16.1, 16, False),  # longer than what it is made of
    ],
)
def test_a_chunk_that_does_not_shrink(
    done: float, packed: float, num_frames: int, expected: bool
) -> None:
    found = shrinks(int(done * MIB), int(packed * MIB), num_frames, of_bytes=16 * MIB)
    assert found is expected


def test_a_chunk_of_one_frame_is_tried_at_its_end() -> None:
    assert not shrinks(MIB, MIB, 1, of_bytes=MIB)
    assert shrinks(MIB, MIB // 2, 1, of_bytes=MIB)
