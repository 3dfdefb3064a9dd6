# SPDX-License-Identifier: Apache-2.0
"""The saves in flight of a manager, and the failure that one of its next calls raises."""

from __future__ import annotations

import collections
from collections.abc import Callable

from actorsnap.errors import ActorSnapError, SnapshotAborted, describe
from actorsnap.format.steps import StepName
from actorsnap.log import Log
from actorsnap.runtime import taking
from actorsnap.runtime.host import Script
from actorsnap.runtime.save import Save

logger = Log(__name__)


class PendingSaves:
    """The saves in flight, oldest first.

    Args:
        label: Returns the beginning of log lines.

    Attributes:
        names: Names of the saves in flight.
        committed: The step of the last save that was awaited and is committed.
        failure: The first failure that was not raised yet.
    """

    def __init__(self, label: Callable[[], str]) -> None:
        self.committed: int | None = None
        self.failure: ActorSnapError | None = None
        self._label = label
        self._saves: collections.deque[tuple[StepName, Save]] = collections.deque()

    @property
    def names(self) -> list[StepName]:
        return [name for name, _ in self._saves]

    def add(self, name: StepName, save: Save) -> None:
        self._saves.append((name, save))

    def wait(self) -> Script[None]:
        """Waits for all saves. Ends in the same way on all ranks.

        Raises:
            ActorSnapError: The first failure. The others are logged.
        """
        yield from self.wait_until(0)
        self.raise_failure()

    def wait_until(self, num_left: int) -> Script[None]:
        """Waits for the oldest saves until ``num_left`` are in flight. Keeps failures."""
        while len(self._saves) > num_left:
            yield from self._wait_for_oldest()

    def _wait_for_oldest(self) -> Script[None]:
        name, save = self._saves[0]
        try:
            yield from taking.await_pending(save, save.finished)
            self.committed = name.step
        except ActorSnapError as error:
            if not save.finished.done():
                raise  # a fork
            if isinstance(error, SnapshotAborted):
                error.name_step(name.step)  # a later call raises it
            if self.failure is not None:
                logger.error("%s: %s", self._label(), describe(error))
            self.failure = self.failure or error
        finally:
            if save.finished.done() and (name, save) in self._saves:
                self._saves.remove((name, save))

    def raise_failure(self) -> None:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
