"""Base of machines that are tables: a state, and one method for all events.

``handle`` takes an event and returns commands. The machine's owner performs them and reports their
results as events. A table has a row for each state, with a rule for each event that can occur
there. A rule is a method: it changes the machine and returns commands, nothing else.

An event without a rule in its state is a ``ProtocolViolation``. A state with an empty row is final:
late events are ignored.
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
"""The rules of a state, by event type."""

Table: TypeAlias = Mapping[StateT, Row[CommandT]]
"""The row of every state."""


class ProtocolViolation(AssertionError):
    """An event that cannot happen in this state: a defect, never an operating condition."""


class Machine(Generic[StateT, EventT, CommandT]):
    """Base class of a machine with a table.

    Args:
        table: Its rules are methods of the machine.
        first: The initial state.
    """

    def __init__(self, table: Table[StateT, CommandT], first: StateT) -> None:
        self.state = first
        self._table = table

    @property
    def is_final(self) -> bool:
        """Whether the machine has ended."""
        return not self._table[self.state]

    def handle(self, event: EventT) -> list[CommandT]:
        """Handles one event; returns the commands to perform.

        Raises:
            ProtocolViolation: The table has no rule for it.
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
        """Asserts the invariants, cheaply; called after each event."""

    def _ignore(self, event: EventT) -> list[CommandT]:
        return []
