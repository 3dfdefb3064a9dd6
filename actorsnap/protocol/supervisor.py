"""Decides when a trainer has an uploader process, and the fate of saves when it dies.

1. A process is started for the first save, or earlier on request. Saves are sent when it is ready.
2. If it ends before that, another one is started, once. If that fails too, these and all later
   saves are made without a process: a slow snapshot is better than none.
3. A process that is silent for too long is killed: it was stopped, or hangs in a system call.
4. If it dies in a save whose chunks are all still in the arena, or not yet copied there, the next
   process gets the save, once, with the name of the dead attempt, which may have committed. Any
   other save is aborted. A save with other ranks is sent again only if the process had not begun
   it: otherwise the other ranks rely on the dead attempt.
5. Each requested save ends exactly once: finished, aborted, or made without a process.

``protocol.frames`` defines the messages between trainer and process.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TypeAlias

import msgspec

from actorsnap.protocol.failure import Failure, Stage

__all__ = [
    "AbortSave",
    "AskedToCancel",
    "AskedToEnd",
    "AskedToSave",
    "AskedToStart",
    "AttemptBegun",
    "KillProcess",
    "MemoryGone",
    "ProcessEnded",
    "ProcessReady",
    "ProcessSilent",
    "SaveEnded",
    "SaveHere",
    "SendCancel",
    "SendEnd",
    "SendSave",
    "StartProcess",
    "Supervisor",
    "SupervisorCommand",
    "SupervisorEvent",
    "SupervisorState",
]

# Events -------------------------------------------------------------------------------------


class AskedToSave(msgspec.Struct, frozen=True):
    """A save was requested.

    Attributes:
        rank: The trainer's rank in the save.
        is_shared: Other ranks take part.
    """

    number: int
    rank: int = 0
    is_shared: bool = False


class AskedToStart(msgspec.Struct, frozen=True):
    """Saves will follow."""


class AskedToCancel(msgspec.Struct, frozen=True):
    """The caller has cancelled the save."""

    number: int
    reason: str


class AskedToEnd(msgspec.Struct, frozen=True):
    """The save was ended for its team."""

    number: int
    failure: Failure


class ProcessReady(msgspec.Struct, frozen=True):
    """The process listens."""


class ProcessSilent(msgspec.Struct, frozen=True):
    """The process was silent for this long."""

    seconds: float


class ProcessEnded(msgspec.Struct, frozen=True):
    """The process has ended, or could not be started; ``reason`` is for people."""

    reason: str


class AttemptBegun(msgspec.Struct, frozen=True):
    """The process has begun the save; on rank 0 its attempt has a name, on other ranks later."""

    number: int
    attempt: str


class MemoryGone(msgspec.Struct, frozen=True):
    """A chunk of the save is no longer in the arena."""

    number: int


class SaveEnded(msgspec.Struct, frozen=True):
    """The process has reported the outcome."""

    number: int


# Commands -----------------------------------------------------------------------------------


class StartProcess(msgspec.Struct, frozen=True):
    """Start a process. Ends in ``ProcessReady`` or ``ProcessEnded``."""


class KillProcess(msgspec.Struct, frozen=True):
    """Kill the process. Ends in ``ProcessEnded``."""


class SendSave(msgspec.Struct, frozen=True):
    """Send the save; its staged chunks follow on request."""

    number: int
    after: str = ""


class SendCancel(msgspec.Struct, frozen=True):
    """Pass the cancellation on."""

    number: int
    reason: str


class SendEnd(msgspec.Struct, frozen=True):
    """Report to the process that the save was ended for its team."""

    number: int
    failure: Failure


class AbortSave(msgspec.Struct, frozen=True):
    """The save has ended without its process."""

    number: int
    failure: Failure


class SaveHere(msgspec.Struct, frozen=True):
    """Make the save without a process."""

    number: int


SupervisorEvent: TypeAlias = (
    AskedToSave
    | AskedToStart
    | AskedToCancel
    | AskedToEnd
    | ProcessReady
    | ProcessSilent
    | ProcessEnded
    | AttemptBegun
    | MemoryGone
    | SaveEnded
)
SupervisorCommand: TypeAlias = (
    StartProcess | KillProcess | SendSave | SendCancel | SendEnd | AbortSave | SaveHere
)

_MAX_STARTS = 2


class SupervisorState(StrEnum):
    """State of the process."""

    ABSENT = "absent"
    STARTING = "starting"
    READY = "ready"
    ENDING = "ending"
    UNUSABLE = "unusable"


class _Save(msgspec.Struct):
    rank: int
    is_shared: bool
    is_sent: bool = False
    has_begun: bool = False
    attempt: str = ""
    can_be_sent: bool = True
    num_deaths: int = 0
    cancel_reason: str | None = None
    failure: Failure | None = None


_S = SupervisorState


class Supervisor:
    """Supervises the successive uploader processes of one trainer."""

    def __init__(self) -> None:
        self.state = _S.ABSENT
        self._saves: dict[int, _Save] = {}
        self._num_failed_starts = 0

    @property
    def num_saves(self) -> int:
        """Number of saves that have not ended."""
        return len(self._saves)

    def handle(self, event: SupervisorEvent) -> list[SupervisorCommand]:
        """Handles one event; returns the commands to perform."""
        commands = _RULES[type(event)](self, event)
        self.validate()
        return commands

    def validate(self) -> None:
        if self.state in (_S.ABSENT, _S.UNUSABLE):
            assert not self._saves
        if self.state in (_S.STARTING,):
            assert not any(save.is_sent for save in self._saves.values())
        if self.state is _S.READY:
            assert all(save.is_sent for save in self._saves.values())

    # Saves

    def _on_asked(self, event: AskedToSave) -> list[SupervisorCommand]:
        if self.state is _S.UNUSABLE:
            return [SaveHere(event.number)]
        save = self._saves[event.number] = _Save(event.rank, event.is_shared)
        if self.state is _S.ABSENT:
            return [self._start()]
        if self.state is _S.READY:
            save.is_sent = True
            return [SendSave(event.number)]
        return []

    def _on_asked_to_start(self, event: AskedToStart) -> list[SupervisorCommand]:
        return [self._start()] if self.state is _S.ABSENT else []

    def _on_cancel(self, event: AskedToCancel) -> list[SupervisorCommand]:
        save = self._saves.get(event.number)
        if save is None or save.cancel_reason is not None:
            return []
        save.cancel_reason = event.reason
        if save.is_sent:
            return [SendCancel(event.number, event.reason)]
        return [self._abort(event.number, event.reason)]

    def _on_asked_to_end(self, event: AskedToEnd) -> list[SupervisorCommand]:
        save = self._saves.get(event.number)
        if save is None or save.failure is not None:
            return []
        save.failure = event.failure
        commands: list[SupervisorCommand] = []
        if save.is_sent:
            commands.append(SendEnd(event.number, event.failure))
        if not save.is_sent or not save.has_begun:
            # Nothing was staged for the process, which may still be starting.
            commands.append(self._abort(event.number, event.failure.reason))
        return commands

    def _on_begun(self, event: AttemptBegun) -> list[SupervisorCommand]:
        save = self._saves.get(event.number)
        if save is not None:
            save.has_begun, save.attempt = True, event.attempt
        return []

    def _on_memory_gone(self, event: MemoryGone) -> list[SupervisorCommand]:
        if event.number in self._saves:
            self._saves[event.number].can_be_sent = False
        return []

    def _on_save_ended(self, event: SaveEnded) -> list[SupervisorCommand]:
        self._saves.pop(event.number, None)
        return []

    # The process

    def _start(self) -> SupervisorCommand:
        self.state = _S.STARTING
        return StartProcess()

    def _on_ready(self, event: ProcessReady) -> list[SupervisorCommand]:
        self.state = _S.READY
        self._num_failed_starts = 0
        commands: list[SupervisorCommand] = []
        for number, save in self._saves.items():
            save.is_sent = True
            commands.append(SendSave(number, save.attempt))
        return commands

    def _on_silent(self, event: ProcessSilent) -> list[SupervisorCommand]:
        if self.state not in (_S.STARTING, _S.READY):
            return []
        self._num_failed_starts += self.state is _S.STARTING
        self.state = _S.ENDING
        return [KillProcess()]

    def _on_ended(self, event: ProcessEnded) -> list[SupervisorCommand]:
        self._num_failed_starts += self.state is _S.STARTING
        commands: list[SupervisorCommand] = []
        for number, save in list(self._saves.items()):
            commands += self._bury(number, save, event.reason)
        if self._num_failed_starts >= _MAX_STARTS:
            self.state = _S.UNUSABLE
            commands += self._give_up(event.reason)
        elif self._saves:
            commands.append(self._start())
        else:
            self.state = _S.ABSENT
        return commands

    def _bury(self, number: int, save: _Save, reason: str) -> list[SupervisorCommand]:
        """Ends or keeps a save after its process has died; keeps one that was not sent."""
        if not save.is_sent:
            return []
        save.is_sent = False
        save.num_deaths += 1
        if save.cancel_reason is not None:
            return [self._abort(number, save.cancel_reason)]
        is_lost = save.has_begun if save.is_shared else not save.can_be_sent
        if save.failure is None and not is_lost and save.num_deaths == 1:
            return []
        return [self._abort(number, reason)]

    def _give_up(self, reason: str) -> list[SupervisorCommand]:
        commands: list[SupervisorCommand] = []
        for number, save in list(self._saves.items()):
            if save.attempt:
                commands.append(self._abort(number, reason))
            else:
                del self._saves[number]
                commands.append(SaveHere(number))
        return commands

    def _abort(self, number: int, reason: str) -> AbortSave:
        save = self._saves.pop(number)
        if save.failure is not None:
            return AbortSave(number, save.failure)
        is_cancelled = save.cancel_reason is not None
        return AbortSave(
            number,
            Failure(
                reason=reason,
                stage=Stage.CANCEL if is_cancelled else Stage.STORE,
                rank=save.rank,
                # The dead process may have committed, and nobody has looked.
                may_be_visible=bool(save.attempt),
            ),
        )


_RULES: dict[type, Callable[..., list[SupervisorCommand]]] = {
    AskedToSave: Supervisor._on_asked,
    AskedToStart: Supervisor._on_asked_to_start,
    AskedToCancel: Supervisor._on_cancel,
    AskedToEnd: Supervisor._on_asked_to_end,
    AttemptBegun: Supervisor._on_begun,
    MemoryGone: Supervisor._on_memory_gone,
    SaveEnded: Supervisor._on_save_ended,
    ProcessReady: Supervisor._on_ready,
    ProcessSilent: Supervisor._on_silent,
    ProcessEnded: Supervisor._on_ended,
}
