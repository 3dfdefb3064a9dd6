# SPDX-License-Identifier: Apache-2.0
"""Decides when a trainer has an uploader process, and the fate of saves when it dies.

1. The first save, or an earlier request, starts a process. Saves are sent when it is ready.
2. If it ends before that, another one is started, once. If that fails too, these and all later
saves are made without a process: a slow snapshot is better than none.
3. A process that is silent for too long is killed: it was stopped, or hangs in a system call.
4. If it dies in a save whose chunks are all in the arena or not yet copied, the next process gets
the save, once, with the name of the dead attempt, which may have committed. Any other save is
aborted. A save with other ranks is sent again only if the process had not begun it: otherwise they
rely on the dead attempt.
5. Each save ends exactly once: finished, aborted, or made without a process.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

import msgspec

from actorsnap.protocol.failure import Failure, Stage
from actorsnap.protocol.uploader import CancelSave


class ProcessCommand(StrEnum):
    START = "start"
    """Leads to ``note_ready`` or ``note_process_ended``."""
    KILL = "kill"
    """Leads to ``note_process_ended``."""


class SendSave(msgspec.Struct, frozen=True):
    """Send the save; its staged chunks follow on request."""

    number: int
    previous_attempt: str = ""


class AbortSave(msgspec.Struct, frozen=True):
    number: int
    failure: Failure


class SaveHere(msgspec.Struct, frozen=True):
    number: int


SupervisorCommand: TypeAlias = ProcessCommand | SendSave | CancelSave | AbortSave | SaveHere
"""``CancelSave``: send it."""

_MAX_STARTS = 2


class SupervisorState(StrEnum):
    ABSENT = "absent"
    STARTING = "starting"
    READY = "ready"
    ENDING = "ending"
    UNUSABLE = "unusable"


class _Supervised(msgspec.Struct):
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
    """Supervises the successive uploader processes of one trainer.

    Events are methods that return the commands to perform.
    """

    def __init__(self) -> None:
        self.state = _S.ABSENT
        self._saves: dict[int, _Supervised] = {}
        self._num_failed_starts = 0

    def add_save(
        self, number: int, *, rank: int = 0, is_shared: bool = False
    ) -> list[SupervisorCommand]:
        if self.state is _S.UNUSABLE:
            return [SaveHere(number)]
        save = self._saves[number] = _Supervised(rank, is_shared)
        if self.state is _S.READY:
            save.is_sent = True
            return [SendSave(number)]
        return self.start()

    def cancel_save(self, number: int, reason: str) -> list[SupervisorCommand]:
        save = self._saves.get(number)
        if save is None or save.cancel_reason is not None:
            return []
        save.cancel_reason = reason
        return [CancelSave(number, reason) if save.is_sent else self._abort(number, reason)]

    def conclude_save(self, number: int, failure: Failure) -> list[SupervisorCommand]:
        save = self._saves.get(number)
        if save is None or save.failure is not None:
            return []
        save.failure = failure
        commands: list[SupervisorCommand] = []
        if save.is_sent:
            commands.append(CancelSave(number, failure.reason, is_concluded=True))
        if not save.is_sent or not save.has_begun:
            # Nothing was staged for the process, which may still be starting.
            commands.append(self._abort(number, failure.reason))
        return commands

    def note_begun(self, number: int, attempt: str) -> None:
        save = self._saves.get(number)
        if save is not None:
            save.has_begun, save.attempt = True, attempt

    def note_memory_gone(self, number: int) -> None:
        if number in self._saves:
            self._saves[number].can_be_sent = False

    def note_save_ended(self, number: int) -> None:
        self._saves.pop(number, None)

    def start(self) -> list[SupervisorCommand]:
        if self.state is not _S.ABSENT:
            return []
        self.state = _S.STARTING
        return [ProcessCommand.START]

    def note_ready(self) -> list[SupervisorCommand]:
        self.state = _S.READY
        self._num_failed_starts = 0
        commands: list[SupervisorCommand] = []
        for number, save in self._saves.items():
            save.is_sent = True
            commands.append(SendSave(number, save.attempt))
        return commands

    def note_silent(self) -> list[SupervisorCommand]:
        if self.state not in (_S.STARTING, _S.READY):
            return []
        self._num_failed_starts += self.state is _S.STARTING
        self.state = _S.ENDING
        return [ProcessCommand.KILL]

    def note_process_ended(self, reason: str) -> list[SupervisorCommand]:
        self._num_failed_starts += self.state is _S.STARTING
        commands: list[SupervisorCommand] = []
        for number, save in list(self._saves.items()):
            commands += self._on_process_lost(number, save, reason)
        if self._num_failed_starts >= _MAX_STARTS:
            self.state = _S.UNUSABLE
            return commands + self._give_up(reason)
        self.state = _S.ABSENT
        if self._saves:
            commands += self.start()
        return commands

    def _on_process_lost(
        self, number: int, save: _Supervised, reason: str
    ) -> list[SupervisorCommand]:
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
                # The dead process may have committed; this process has not looked. Of several
                # ranks, rank 0 commits.
                may_be_visible=bool(save.attempt) and (not save.is_shared or save.rank == 0),
            ),
        )
