# SPDX-License-Identifier: Apache-2.0
"""What ranks and directors do in ``test_falls.py`` (see ``tests.worlds``).

A *fall* is a rank that is killed or stopped just before one event or one step of its work, in a
save or a restore of a trainer's state. What follows it shows whether the job can go on.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from actorsnap import Options, StateDict
from actorsnap.actors.checksum_ledger import ChecksumLedger
from actorsnap.actors.object_writers import RankObjects
from actorsnap.actors.saver import Saver
from actorsnap.format.manifest import COMMIT_KEY
from actorsnap.protocol.rounds import Coordinator, Participant
from actorsnap.runtime.team import find_team
from actorsnap.sync import Snapshot
from tests.ranks.assembled import assemble
from tests.ranks.models import STATES
from tests.ranks.troubles import outcome
from tests.worlds import LIMIT_S, Rank, World

__all__ = ["LOST_AFTER_S", "STEPS", "TIMEOUT_S", "Step", "direct_falls", "direct_given_up"]

LOST_AFTER_S = 3.0
TIMEOUT_S = 60.0
OPTIONS = Options(timeout_s=TIMEOUT_S, lost_after_s=LOST_AFTER_S, fsync=False, read_mode="shared")
_MIB = 1 << 20

_PLACES: dict[str, tuple[Any, str]] = {
    "rank": (Participant, "handle"),
    "coordinator": (Coordinator, "handle"),
    "chunk stored": (ChecksumLedger, "record"),
    "staged": (Saver, "_announce_staged"),
    "object released": (RankObjects, "release"),
    "object completed": (RankObjects, "complete"),
    "manifest": (Saver, "_store_manifest"),
}
"""Methods before which a rank falls."""

_LAST_ROUND = {"save": 3, "restore": 4}


class Step(NamedTuple):
    """Where a rank falls.

    Attributes:
        call: ``save`` or ``restore``.
        victim: The rank. Rank 0 coordinates.
        place: Of ``_PLACES``.
        event: The event that is about to be handled, at a machine.
        round: The machine's.
    """

    call: str
    victim: int
    place: str
    event: str = ""
    round: int = -1

    @property
    def is_save(self) -> bool:
        return self.call == "save"

    @property
    def is_decided(self) -> bool:
        """Whether the others have succeeded, or can."""
        is_end = self.event == "Proceed" or (self.event == "Continue" and self.is_save)
        return is_end and self.round == _LAST_ROUND[self.call]


STEPS = [
    # All have joined, opened their objects, written to the shared ones, stored.
    *(Step("save", 1, "rank", "Reached", number) for number in range(4)),
    *(Step("save", 1, "rank", "Proceed", number) for number in range(4)),
    Step("save", 1, "chunk stored"),
    Step("save", 1, "staged"),
    Step("save", 1, "object released"),
    Step("save", 1, "manifest"),
    Step("save", 0, "rank", "Ask", 0),
    Step("save", 0, "object completed"),
    *(Step("save", 0, "coordinator", "Arrived", number) for number in range(4)),
    Step("save", 0, "coordinator", "Continue", 3),
    # All are ready, have compared, have read a piece, have read all, have loaded.
    *(Step("restore", 1, "rank", "Reached", number) for number in range(5)),
    *(Step("restore", 1, "rank", "Proceed", number) for number in (2, 4)),
    *(Step("restore", 0, "coordinator", "Arrived", number) for number in range(5)),
]


# Ranks


def _trip(step: Step, signal_number: int) -> None:
    """Ends or stops this process when it comes there."""
    kind, name = _PLACES[step.place]
    method = getattr(kind, name)

    def tripping(self: Any, *args: Any, **more: Any) -> Any:
        is_event = not step.event or type(args[0]).__name__ == step.event
        if is_event and step.round in (-1, getattr(self, "round", -1)):
            setattr(kind, name, method)
            # This thread: the process' others could go on for a moment, with this one.
            signal.pthread_kill(threading.get_ident(), signal_number)
        return method(self, *args, **more)

    setattr(kind, name, tripping)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """This rank's memory of a state dict, in an order that a load does not change."""
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _tensors(value[key])
    elif hasattr(value, "local_shards"):
        yield from (shard.tensor for shard in value.local_shards())
    elif isinstance(value, torch.Tensor):
        yield getattr(value, "_local_tensor", value)


class Trainer:
    """The state of a trainer, and what makes a save take every step: tensors that all ranks have.

    Each number makes other values, and another structure, which has to be asked for.
    """

    def __init__(self, kind: str) -> None:
        self._app = STATES[kind]()
        self._first = [tensor.clone() for tensor in self._memory()]

    def _memory(self) -> list[torch.Tensor]:
        return [t for value in self._app.values() for t in _tensors(value.state_dict())]

    @torch.no_grad()
    def at(self, number: int) -> dict[str, Any]:
        """The app state, with the values of that number."""
        for tensor, first in zip(self._memory(), self._first, strict=True):
            tensor.copy_(first + number)
        table = {f"w{number}-{n}": torch.full((_MIB,), float(number + n)) for n in range(2)}
        return {**self._app, "table": StateDict(table)}

    def is_at(self, number: int, app: dict[str, Any]) -> bool:
        """Whether the app state has the values of that number, bit for bit."""
        pairs = zip(self._memory(), self._first, strict=True)
        table = [app["table"][f"w{number}-{n}"] for n in range(2)]
        return all(torch.equal(tensor, first + number) for tensor, first in pairs) and all(
            bool((tensor == number + n).all()) for n, tensor in enumerate(table)
        )

    def spoiled(self, number: int) -> dict[str, Any]:
        """An app state to restore that number into."""
        app = self.at(number)
        for value in app.values():
            for tensor in _tensors(value.state_dict()):
                with torch.no_grad():
                    tensor.fill_(-3)
        return app


def _obey(me: Rank, kind: str) -> None:
    """Saves and restores, as the director says."""
    me.join_gloo()
    trainer = Trainer(kind)
    while True:
        order = me.hear()
        signal.alarm(LIMIT_S)
        if order["step"] is not None:
            step = Step(*order["step"])
            if me.rank == step.victim:
                _trip(step, order["signal"])
        me.say(_call(trainer, order["is_save"], order["path"], order["number"]))


def _call(trainer: Trainer, is_save: bool, path: str, number: int) -> dict[str, Any]:
    if is_save:
        app = trainer.at(number)
        globs = ["table/**"]
        return outcome(
            lambda: Snapshot.take(path, app, overwrite=True, replicated=globs, options=OPTIONS)
        )
    app = trainer.spoiled(number)
    said = outcome(lambda: Snapshot(path, options=OPTIONS).restore(app))
    return {**said, "is_equal": trainer.is_at(number, app)}


def _give_up(me: Rank, path: str) -> dict[str, Any]:
    """Rank 0 is stopped for longer than ``lost_after_s``; the others give it up and end."""
    me.join_gloo()
    if me.rank == 0:
        _trip(Step("save", 0, "manifest"), signal.SIGSTOP)
    app = {"own": StateDict(x=torch.ones(3))}
    said = outcome(lambda: Snapshot.take(path, app, options=OPTIONS))
    if me.rank:
        # As at the exit of the process.
        team = find_team(None, None)
        assert team is not None
        team.port.close(5.0)
    return said


# Director


def direct_given_up(num_ranks: int, path: str) -> list[Any]:
    world = World(num_ranks, _give_up, path=path)
    try:
        others = [rank.result() for rank in world.ranks[1:]]
        world.ranks[0].kill(signal.SIGCONT)
        return [world.ranks[0].result(), *others]
    finally:
        world.end()


def _order(
    world: World,
    is_save: bool,
    path: Path,
    number: int,
    step: Step | None = None,
    how: int = signal.SIGKILL,
) -> list[Any]:
    """What the ranks say to an order; those that have not fallen in it."""
    signal.alarm(2 * LIMIT_S)
    world.num_keys()  # the server may live on
    order = {"is_save": is_save, "path": str(path), "number": number, "step": step, "signal": how}
    for rank in world.ranks:
        rank.tell(order)
    others = [r for n, r in enumerate(world.ranks) if step is None or n != step.victim]
    answers = [rank.hear() for rank in others]
    for said in answers:
        assert "seconds" in said, said["error"]
    return answers


def direct_falls(
    num_ranks: int, kind: str, path: str, how: str, is_first: bool, steps: Sequence[Any]
) -> list[dict[str, Any]]:
    """A rank falls at one step after the other, and each time the job goes on.

    Where a rank is killed the job starts anew, where it is stopped it goes on when that one does.

    Args:
        is_first: Whether the saves in which it falls are the first ones to their paths. Else they
            are to replace a snapshot.

    Returns:
        For each step what the others said (``others``), who was stopped (``victim``), whether
        there is a snapshot at the path then (``is_committed``), what all said of a restore
        (``restored``) and of a save to that path (``saved``), and how many bytes each wrote in
        that (``nbytes``).
    """
    signal_number = signal.SIGSTOP if how == "stop" else signal.SIGKILL
    world = World(num_ranks, _obey, kind=kind)
    found = []
    last, number = Path(path), 1
    try:
        begun = _order(world, True, last, number)
        assert not any(rank["error"] for rank in begun), begun
        for count, step in enumerate(map(Step._make, steps)):
            where = Path(f"{path}-{count}") if step.is_save and is_first else last
            falls_in = number + 1 if step.is_save else number
            try:
                said: dict[str, Any] = {
                    "others": _order(world, step.is_save, where, falls_in, step, signal_number)
                }
                victim = world.ranks[step.victim]
                if how == "stop":
                    # It may come there later than the others are done.
                    os.waitpid(victim.pid, os.WUNTRACED)
                    victim.kill(signal.SIGCONT)
                    said["victim"] = victim.hear()
                else:
                    assert victim.dies()
                    world.end()
                    world = World(num_ranks, _obey, kind=kind)
                said["is_committed"] = (where / COMMIT_KEY).exists()
                valid = (where, falls_in) if step.is_decided else (last, number)
                said["restored"] = _order(world, False, *valid)
                number = falls_in + 1
                said["saved"] = _order(world, True, where, number)
                said["nbytes"] = assemble(where).nbytes
            except Exception as error:
                error.add_note(f"at {step}")
                raise
            found.append(said)
            if where != last:
                shutil.rmtree(last)
                last = where
    finally:
        world.end()
    return found
