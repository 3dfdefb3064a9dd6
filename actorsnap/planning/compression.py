"""Decides whether a save is compressed, where ``Options.compression`` is ``"auto"``, and which of
its chunks stay as they are.

What counts is when a save is stored. A plain one goes at the pace of the link. A compressed one
goes at that of the codec, or at the link's times the ratio, whichever is less: both work at the
same time. So plain saves tell the link's pace, and of a few samples of the state the codec's and
the ratio; and when a compressed save has been made, its own pace. Either kind is tried anew now and
then, because links change. A save may be slow for other reasons, the first of a process mostly is:
of the last plain ones the fastest counts. It must not know clocks, storages, or the codec.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

__all__ = ["NUM_SAMPLES", "CompressionChoice", "Sampled", "sample_bytes", "shrinks"]

NUM_SAMPLES = 8
"""Of as many chunks: kinds of tensors differ, and lie side by side."""

_MIN_GAIN = 1.1
"""Compressed, a save must be so much faster: reading costs time, too, and so does the CPU."""

_CODEC_MARGIN = 1.5
"""By so much the codec may be slower beside all that goes on in a save."""

_NUM_PLAIN = 2
"""So many plain saves come first."""

_KEPT_PLAIN = 3

_TRY_AGAIN = 16
"""Every so many saves the other kind is measured again."""

_MAX_WAIT = 1024

_MIN_SAVED = 1 / 32
"""Of a chunk; for less it is not worth decompressing it."""

_TRIAL_FRAMES = 4
"""When so many have not shrunk, the rest of the chunk is not tried."""

_MIN_STATE_BYTES = 16 << 20
_MAX_SAMPLE_BYTES = 512 << 10


def sample_bytes(state_bytes: int) -> int:
    """Returns the size of each of the samples of a state; 0: it is too small to be compressed.

    All together cost less than a hundredth of the save's time on two cores and any link.
    """
    if state_bytes < _MIN_STATE_BYTES:
        return 0
    return min(state_bytes >> 11, _MAX_SAMPLE_BYTES)


def shrinks(done_bytes: int, packed_bytes: int, num_frames: int, *, of_bytes: int) -> bool:
    """Whether a chunk of ``of_bytes`` may be stored compressed, by its frames up to here.

    Args:
        done_bytes: What went into them.
        packed_bytes: What became of it.
    """
    if packed_bytes > of_bytes:
        return False
    is_tried = num_frames >= _TRIAL_FRAMES or done_bytes == of_bytes
    return not is_tried or packed_bytes <= done_bytes * (1 - _MIN_SAVED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What compressing samples of a state has shown.

    Attributes:
        nbytes: Of the samples.
        compressed_bytes: What became of them.
        seconds: Of CPU time it took.
        num_threads: So many will compress at once.
    """

    nbytes: int
    compressed_bytes: int
    seconds: float
    num_threads: int

    @property
    def ratio(self) -> float:
        return self.nbytes / self.compressed_bytes

    @property
    def bytes_per_s(self) -> float:
        """Of the state, on all threads, each with a core of its own."""
        return self.nbytes * self.num_threads / max(self.seconds, 1e-9)


class CompressionChoice:
    """What the saves to one place have shown, and what follows for the next one."""

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=_KEPT_PLAIN)
        self._compressed_bytes_s: float | None = None
        self._sampled: Sampled | None = None
        self._was_compressed = False
        self._num_alike = 0
        self._wait = _TRY_AGAIN

    @property
    def wants_sample(self) -> bool:
        """Whether a plain save is to compress samples."""
        return self._sampled is None or self._num_alike % _TRY_AGAIN == 0

    def decide(self) -> bool:
        """Whether the next save is compressed."""
        if len(self._plain) < _NUM_PLAIN or self._sampled is None:
            return False
        if self._compressed_bytes_s is not None:
            if self._is_better(self._compressed_bytes_s):
                # How fast is the link now?
                return not self._was_compressed or self._num_alike < _TRY_AGAIN
            if self._was_compressed or self._num_alike < self._wait:
                return False
        codec = self._sampled.bytes_per_s / _CODEC_MARGIN
        return self._is_better(min(codec, self._sampled.ratio * max(self._plain)))

    def learn(
        self, *, is_compressed: bool, state_bytes: int, seconds: float, sampled: Sampled | None
    ) -> None:
        """Takes notice of a save.

        Args:
            state_bytes: What it stored, before compression.
            seconds: From the first byte to the last.
            sampled: If it was plain and has compressed samples.
        """
        pace = state_bytes / max(seconds, 1e-9)
        self._num_alike = self._num_alike + 1 if is_compressed == self._was_compressed else 1
        self._was_compressed = is_compressed
        if not is_compressed:
            self._plain.append(pace)
            self._sampled = sampled or self._sampled
            return
        self._compressed_bytes_s = pace
        # What has disappointed is tried more and more seldom.
        self._wait = _TRY_AGAIN if self._is_better(pace) else min(2 * self._wait, _MAX_WAIT)

    def _is_better(self, bytes_s: float) -> bool:
        return bytes_s >= _MIN_GAIN * max(self._plain, default=0.0)
