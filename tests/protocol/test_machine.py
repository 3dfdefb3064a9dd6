"""What all machines have in common, of one that is as small as can be; and all tables."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import Any

import pytest

from actorsnap.protocol import rounds
from actorsnap.protocol.rounds import Machine, ProtocolViolation, Table


class DoorState(StrEnum):
    OPEN = "open"
    CLOSED = "closed"
    LOCKED = "locked"


class Pushed: ...


class KeyTurned: ...


class Door(Machine[DoorState, Pushed | KeyTurned, str]):
    def __init__(self) -> None:
        super().__init__(DOOR, DoorState.OPEN)
        self.validated: list[DoorState] = []

    def validate(self) -> None:
        self.validated.append(self.state)

    def _on_pushed(self, event: Pushed) -> list[str]:
        self.state = DoorState.CLOSED
        return ["click"]

    def _on_turned(self, event: KeyTurned) -> list[str]:
        self.state = DoorState.LOCKED
        return ["clack", "beep"]


DOOR: Table[DoorState, str] = {
    DoorState.OPEN: {Pushed: Door._on_pushed},
    DoorState.CLOSED: {Pushed: Door._ignore, KeyTurned: Door._on_turned},
    DoorState.LOCKED: {},
}


def test_the_row_of_the_state_says_what_an_event_leads_to() -> None:
    door = Door()
    assert door.handle(Pushed()) == ["click"]
    assert door.handle(Pushed()) == []
    assert door.handle(KeyTurned()) == ["clack", "beep"]
    assert door.state is DoorState.LOCKED


def test_what_the_row_lacks_is_a_defect_and_changes_nothing() -> None:
    door = Door()
    with pytest.raises(ProtocolViolation, match=r"^KeyTurned while open$"):
        door.handle(KeyTurned())
    assert (door.state, door.validated) == (DoorState.OPEN, [])


def test_invariants_are_asserted_after_each_step() -> None:
    door = Door()
    door.handle(Pushed())
    door.handle(Pushed())
    door.handle(KeyTurned())
    assert door.validated == [DoorState.CLOSED, DoorState.CLOSED, DoorState.LOCKED]


def test_whatever_is_late_is_harmless() -> None:
    door = Door()
    finals = [door.is_final]
    for event in (Pushed(), KeyTurned(), KeyTurned(), Pushed()):
        door.handle(event)
        finals.append(door.is_final)
    assert finals == [False, False, True, True, True]
    assert len(door.validated) == 2


@pytest.mark.parametrize(
    ("table", "states", "finals"),
    [
        (rounds._COORDINATOR, rounds.CoordinatorState, set()),
        (rounds._PARTICIPANT, rounds.ParticipantState, {"ended"}),
    ],
)
def test_a_table_has_a_row_for_each_state_and_the_outcomes_are_final(
    table: Table[Any, Any], states: Collection[StrEnum], finals: set[str]
) -> None:
    assert table.keys() == set(states)
    assert {state for state, row in table.items() if not row} == finals
