"""The observation of a call: its recorder, and the export of the recording at its end.

Sinks are a file (``Options.trace``) and OpenTelemetry (``Options.otel``); in the uploader process,
the trainer. Errors of a sink are logged and never fail the call.
"""

from __future__ import annotations

import functools
import os
import string
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

import anyio

from actorsnap.actors.trace import NULL_RECORDER, Record, Recorder
from actorsnap.errors import (
    StorageError,
    UsageError,
    describe,
    printable,
)
from actorsnap.log import Log
from actorsnap.options import Options
from actorsnap.runtime import telemetry, tracefile
from actorsnap.runtime.host import Host, wait_done
from actorsnap.runtime.tracefile import About

__all__ = ["Observation", "Sink", "error_text", "observe"]

logger = Log(__name__)

Sink: TypeAlias = Callable[[Recorder, About, int], None]
"""Exports a recording, given the call and the offset of the recorder's clock to the epoch in
nanoseconds. Called on a worker thread."""

_PATIENCE_S = 5.0


def observe(op: str, options: Options) -> Observation:
    """Begins to observe a call if the options ask for it. In the caller's thread.

    Raises:
        UsageError: ``Options.otel`` is ``"on"``, and OpenTelemetry is not installed.
    """
    sinks: list[Sink] = []
    if options.trace is not None:
        sinks.append(functools.partial(_write_trace, _working_folder(), options.trace))
    try:
        found = telemetry.find(op, options.otel)
    except UsageError:
        raise
    except Exception:  # any error of a provider's import
        logger.warning("OpenTelemetry is not used for this %s", op, exc_info=True)
        found = None
    if found is not None:
        sinks.append(found.export)
    return Observation(op, sinks)


class Observation:
    """The observation of one call on one rank.

    Args:
        op: ``save`` or ``restore``.
        sinks: Targets of the recording. Without any, nothing is recorded.

    Attributes:
        is_watched: Whether anything is recorded.
        recorder: For the call's actors.
        caller: The row of the caller's thread.
        attempt: The attempt written or read, once known.
    """

    def __init__(self, op: str, sinks: Sequence[Sink] = ()) -> None:
        self.is_watched = bool(sinks)
        self.recorder = Recorder(time.monotonic_ns) if sinks else NULL_RECORDER
        self.caller = self.recorder.add_row("caller")
        self.attempt = ""
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._num_retries = 0
        self._op = op
        self._sinks = sinks

    def on_retry(self, error: StorageError, delay_s: float) -> None:
        """See ``StorageContext``."""
        self._num_retries += 1
        self.recorder.mark(
            "retry",
            op=error.op,
            key=error.key,
            error=type(error).__name__,
            delay_s=round(delay_s, 6),
        )

    def adopt(self, record: Record, num_retries: int) -> None:
        """Adds the recording of another process."""
        self.recorder.adopt(record)
        self._num_retries += num_retries

    async def end(
        self,
        host: Host,
        *,
        url: str,
        rank: int,
        world_size: int,
        outcome: str,
        error: str = "",
    ) -> None:
        """Exports the recording before the outcome is reported, so that the file exists by then.
        Never raises. Waits only for a limited time for a disk or exporter that hangs.

        Args:
            url, rank, world_size, outcome, error: See ``About``.
        Cancellation: ignored.
        """
        if not self.is_watched:
            return
        about = About(
            op=self._op,
            url=printable(url),
            attempt=self.attempt,
            rank=rank,
            world_size=world_size,
            outcome=outcome,
            error=printable(error),
            begin_us=(self.recorder.begin_ns + self._epoch_ns) // 1000,
            end_us=(time.monotonic_ns() + self._epoch_ns) // 1000,
            retries=self._num_retries,
        )
        call = host.submit(host.run_blocking(self._hand_over, about))
        with anyio.move_on_after(_PATIENCE_S, shield=True):
            await wait_done(call.future)

    def _hand_over(self, about: About) -> None:
        for sink in self._sinks:
            try:
                sink(self.recorder, about, self._epoch_ns)
            except (Exception, SystemExit):  # any error of an exporter
                logger.warning("%s: what was recorded of it is lost", about.url, exc_info=True)
        # The recording may be referenced for long by handles of the call and its storage.
        self.recorder.clear()


def error_text(error: BaseException) -> str:
    """Returns the text of an error for ``About``. The error itself would keep the app state."""
    return describe(error)


def _working_folder() -> str:
    with suppress(OSError):  # the folder may be deleted
        return os.getcwd()
    return ""


def _write_trace(
    folder: str, template: str, recorder: Recorder, about: About, epoch_ns: int
) -> None:
    """Writes a trace file; ``folder`` is the working folder at the time of the call."""
    trace = tracefile.trace_of(recorder, about, epoch_ns=epoch_ns)
    tracefile.write(os.path.join(folder, _path(template, about)), trace)


def _path(template: str, about: About) -> str:
    name = about.url.rstrip("/").rpartition("/")[2]
    named = {field for _, field, _, _ in string.Formatter().parse(template)}
    if about.world_size > 1 and "rank" not in named:
        stem, suffix = os.path.splitext(template)
        template = f"{stem}-{{rank}}{suffix}"
    return template.format_map({"rank": about.rank, "op": about.op, "name": name})
