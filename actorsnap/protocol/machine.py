"""What machines that are tables have in common: a state, and one door.

Events go in by ``handle``, commands come out. Whoever holds a machine performs them; what they lead
to comes back as events. A table has a row for each state, with a rule for each event that can come
there. A rule is a method: it changes the machine, returns the commands, and does nothing else.

What a row does not have cannot happen in its state: it is a ``ProtocolViolation``. A state with an
empty row is final: whatever comes there is late, and harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Generic, TypeAlias, TypeVar

__all__ = ["Machine", "ProtocolViolation", "Row", "Table"]

StateT = TypeVar("StateT", bound=StrEnum)
EventT = TypeVar("EventT")
CommandT = TypeVar("CommandT")

Row: TypeAlias = Mapping[type, Callable[..., list[CommandT]]]
"""The rules of a state, by the type of the event."""

Table: TypeAlias = Mapping[StateT, Row[CommandT]]
"""The row of every state."""


class ProtocolViolation(AssertionError):
    """An event that cannot happen in this state: a defect, never an operating condition."""


class Machine(Generic[StateT, EventT, CommandT]):
    """Goes through the states of a table.

    Args:
        table: Its rules are methods of the machine.
        first: The state in which it begins.
    """

    def __init__(self, table: Table[StateT, CommandT], first: StateT) -> None:
        self.state = first
        self._table = table

    @property
    def is_final(self) -> bool:
        """Whether the outcome is there."""
        return not self._table[self.state]

    def handle(self, event: EventT) -> list[CommandT]:
        """Takes one event, returns what is to be done.

        Raises:
            ProtocolViolation: the table has no rule for it.
        """
        if self.is_final:
            return []
        rule = self._table[self.state].get(type(event))
        if rule is None:
            raise ProtocolViolation(f"{type(event).__name__} while {self.state}")
        commands = rule(self, event)
        self.validate()
        return commands

    def validate(self) -> None:
        """Asserts the invariants; called after each step, cheap."""

    def _ignore(self, event: EventT) -> list[CommandT]:
        return []
