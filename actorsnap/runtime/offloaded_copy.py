# SPDX-License-Identifier: Apache-2.0
"""Copies a snapshot in the uploader process, where a trainer's steps hardly notice it.

In the trainer's process a copy wants the GIL, and cores at the trainer's own priority. It is
supervised as a save is (``protocol/supervisor.py``): if the process dies, the next one resumes it,
once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio
import msgspec

from actorsnap.errors import StorageError
from actorsnap.options import Options
from actorsnap.protocol import uploader as frames
from actorsnap.protocol.failure import Failure, decode, encode
from actorsnap.runtime.copy import CopyEvent, CopyReport, copy
from actorsnap.runtime.host import Host, wait_done
from actorsnap.runtime.location import Location
from actorsnap.runtime.script import run_on_loop
from actorsnap.runtime.source import Source

if TYPE_CHECKING:
    from actorsnap.runtime.uploader_client import Uploader
    from actorsnap.runtime.uploader_process import UploaderService


class RemoteCopy:
    """The trainer's half: ``OffloadedWork``."""

    is_detached = False

    def __init__(
        self, uploader: Uploader, source: Source, to: Location, note: Callable[[int, int], object]
    ) -> None:
        self._uploader = uploader
        self._source = source
        self._to = to
        self._note = note
        self._number = uploader.new_number()
        self._ended = anyio.Event()
        self._result: CopyReport | Exception | None = None

    async def run(self) -> CopyReport | None:
        """Copies. On the runtime's loop.

        Returns:
            None: No process can be started, and nothing was done.

        Raises:
            ActorSnapError: See ``copy``.
            StorageError: Two processes died.
        Cancellation: Ends the copy, which a later one resumes.
        """
        self._uploader.add(self._number, self, rank=0, is_shared=False)
        try:
            await self._ended.wait()
        finally:
            with anyio.CancelScope(shield=True):
                self._uploader.cancel(self._number, "the copy was cancelled")
                await self._ended.wait()
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    def begin(self, previous_attempt: str) -> None:
        options = self._source.options
        self._uploader.send_environment()
        self._uploader.send(
            frames.BeginCopy(
                number=self._number,
                source=self._source.location.place,
                to=self._to.place,
                options=msgspec.msgpack.encode(options.for_process()),
                is_paced=options.max_slowdown is not None,
            )
        )

    def deliver(self, frame: frames.FromSave) -> None:
        match frame:
            case frames.CopyMoved():
                self._note(frame.done_bytes, frame.total_bytes)
            case frames.CopyEnded(error=None):
                self._end(msgspec.msgpack.decode(frame.report, type=CopyReport))
            case frames.CopyEnded():
                assert frame.error is not None
                self._end(decode(frame.error))

    def abort(self, failure: Failure) -> None:
        url = self._to.display_url
        self._end(StorageError(op="copy", key="", backend=url, detail=failure.reason))

    def make_here(self) -> None:
        self._end(None)

    def let_go(self) -> None: ...

    def close_mailbox(self) -> None: ...

    def _end(self, result: CopyReport | Exception | None) -> None:
        self._result = result
        self._ended.set()


class ServedCopy:
    """The half in the uploader process."""

    is_detached = False
    call_number = -1

    def __init__(self, host: Host, trainer: UploaderService, frame: frames.BeginCopy) -> None:
        self._trainer = trainer
        self._number = frame.number
        self._latest: CopyEvent | None = None
        self._sent: CopyEvent | None = None
        script = copy(
            Source(Location.at(frame.source), msgspec.msgpack.decode(frame.options, type=Options)),
            Location.at(frame.to),
            overwrite=False,
            on_event=self._note,
            pace=host.resources.pace if frame.is_paced else None,
        )
        self._call = host.submit(run_on_loop(host, script))
        host.submit(self._end())

    def deliver(self, frame: frames.ToSave) -> None:
        if isinstance(frame, frames.CancelSave):
            self._call.cancel()

    def cancel(self, reason: str) -> None:
        self._call.cancel()

    def leave_trainer(self) -> None: ...

    def break_off(self, reason: str) -> None: ...

    def report_progress(self) -> None:
        event = self._latest
        if event is not None and event is not self._sent:
            self._sent = event
            self._trainer.send(frames.CopyMoved(self._number, event.done_bytes, event.total_bytes))

    def _note(self, event: CopyEvent) -> None:
        self._latest = event

    async def _end(self) -> None:
        await wait_done(self._call.future)
        error = self._call.future.exception()
        if error is not None:
            self._trainer.finish(frames.CopyEnded(self._number, encode(error)))
        else:
            report = msgspec.msgpack.encode(self._call.future.result())
            self._trainer.finish(frames.CopyEnded(self._number, None, report))
