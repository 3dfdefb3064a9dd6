"""The body of ``Snapshot.restore``, as a script (see ``runtime.taking``).

``state_dict`` and ``load_state_dict`` run in the caller's thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from actorsnap.actors.trace import Wait, Work
from actorsnap.errors import (
    ActorSnapError,
    IncompatibleState,
    RestoreAborted,
    describe,
    did_you_mean,
    printable,
)
from actorsnap.format.manifest import TensorEntry, ViewEntry
from actorsnap.log import Log
from actorsnap.options import Options
from actorsnap.planning.index import AnyEntry, Index, ShardedEntry, named_ranks
from actorsnap.planning.shared_reads import ReadInterest, ReadMode, ReadPlan
from actorsnap.protocol.failure import Stage
from actorsnap.protocol.labels import CallKind, Label
from actorsnap.protocol.restore import Comparison, Ready, RestoreDecisions, RestoreTotals, Weighed
from actorsnap.runtime.host import Host, Script
from actorsnap.runtime.reading import begins_anew, load_view
from actorsnap.runtime.rounds import Rounds, call_together
from actorsnap.runtime.shared_reads import Reading
from actorsnap.runtime.source import Source
from actorsnap.runtime.team import Team, find_team
from actorsnap.runtime.tracing import Observation, error_text, observe
from actorsnap.runtime.validation import AppState, check_flag
from actorsnap.state.capture import optimizers_in
from actorsnap.state.distributed import is_distributed
from actorsnap.state.optim import class_names, takes_state_of
from actorsnap.state.restore import KeyRestore, entries_by_key, find_conflicts, prepare
from actorsnap.state.stateful import (
    Matching,
    RNGState,
    Stateful,
    adapts,
    can_assign,
    loader,
    matching_of,
    torch_complaints,
    validate_app_state,
)
from actorsnap.state.tree import escape, join, unescape

__all__ = [
    "RestorePlan",
    "RestoreReport",
    "plan_restore",
    "restore",
    "restore_by",
]

logger = Log(__name__)


class RestoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of the app state and the snapshot that a restore left out.

    Attributes:
        missing: Paths of modules and ``StateDict`` dicts that the snapshot lacks; they keep their
            values.
        unexpected: Paths of the snapshot without a place in a module; not restored.
        mismatched: One line each, for

            - a leaf of a module or ``StateDict`` with another kind, dtype or shape; it keeps its
              value.
            - an optimizer that cannot take the saved state, or was saved from another class; it
              keeps all its values.
            - two leaves of modules that share memory in the app state only; the last one wins.
        kept: A line per ``RNGState`` that keeps its generators' states, because only other ranks
            saved theirs: seed them. Does not fail a strict restore.
        nbytes: Bytes read into place.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    nbytes: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing, unexpected or mismatched."""
        return not (self.missing or self.unexpected or self.mismatched)


class RestorePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A preview of a restore, over all ranks that take part.

    Attributes:
        mode: ``"direct"``: every rank reads its own ranges; ``"shared"``: ranks read common ranges
            once and send them to each other.
        reason: Why this mode was chosen: how many ranks want how many bytes in common.
        bytes_needed: Bytes to put into the app states.
        bytes_read: Bytes to read from the storage, in whole checksum blocks or compressed frames.
        num_requests: Number of read requests to the storage.
        bytes_read_by_rank: Bytes to read, by rank.
        missing, unexpected, mismatched: See ``IncompatibleState``. Log that not all ranks have in
            common begin with the rank.
    """

    mode: str
    reason: str
    bytes_needed: int
    bytes_read: int
    num_requests: int
    bytes_read_by_rank: tuple[int, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()

    @property
    def read_amplification(self) -> float:
        """Bytes read per byte needed; below 1 if ranks share bytes."""
        return self.bytes_read / self.bytes_needed if self.bytes_needed else 1.0

    @property
    def is_complete(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)


@begins_anew
def restore(
    source: Source, app_state: AppState, *, strict: bool, group: Any, store: Any
) -> Script[RestoreReport]:
    """Restores on all ranks of a group together, in the rounds of ``protocol.restore``.

    Compares everything first, then reads everything, then loads key by key.
    """
    team = find_team(group, store)
    decisions = RestoreDecisions(mode=ReadMode(source.options.read_mode))

    def body(rounds: Rounds) -> Script[RestoreReport]:
        return _watched(rounds, source, app_state, strict=strict)

    label = Label(CallKind.RESTORE, source.location.canonical)
    return (yield from call_together(team, label, source.options, decisions, body))


def _watched(
    rounds: Rounds, source: Source, app_state: AppState, *, strict: bool
) -> Script[RestoreReport]:
    """``restore_by`` with an observation, for trace files and telemetry."""
    observation = observe("restore", source.options)
    end = functools.partial(
        observation.end,
        url=source.location.display_url,
        rank=rounds.rank,
        world_size=1 if rounds.team is None else rounds.team.world_size,
    )
    try:
        report = yield from restore_by(
            rounds, source, app_state, strict=strict, observation=observation
        )
    except Exception as error:
        yield functools.partial(end, outcome="failed", error=error_text(error))
        raise
    except BaseException:
        host = Host.get()
        host.submit(end(host, outcome="cancelled"))
        raise
    yield functools.partial(end, outcome="restored")
    return report


def restore_by(
    rounds: Rounds,
    source: Source,
    app_state: AppState,
    *,
    strict: bool,
    observation: Observation | None = None,
) -> Script[RestoreReport]:
    """Runs this rank's part of a restore."""
    check_flag("strict", strict)
    observation = observation or Observation("restore")
    compared, reading = yield from _compare(rounds, source, app_state, observation)
    wants = reading.wants(Host.get())
    try:
        plan = yield from _agree(rounds, compared.message(wants) if strict else Comparison(wants))
    except IncompatibleState as error:
        for hint in compared.hints:
            error.add_note(hint)
        raise
    observation.caller.note(Work.AGREE)
    loaders = {key: loader(app_state[key], strict=strict) for key in compared.parts}
    yield from rounds.perform(
        lambda host, arrive: reading.read(host, plan, arrive, rounds.scope),
    )
    observation.caller.note(Wait.READS)
    states = compared.build()
    yield from rounds.arrive(then=Stage.LOAD)
    report = load(
        compared, states, loaders, strict=strict, nbytes=reading.bytes_needed, team=rounds.team
    )
    observation.caller.note(Work.LOAD)
    yield from rounds.arrive()
    return report


@begins_anew
def plan_restore(
    source: Source, app_state: AppState, *, group: Any, store: Any
) -> Script[RestorePlan]:
    """Runs ``restore`` without reading data, and reports the plan."""
    team = find_team(group, store)
    decisions = RestoreDecisions(mode=ReadMode(source.options.read_mode), is_dry_run=True)

    def body(rounds: Rounds) -> Script[RestorePlan]:
        compared, reading = yield from _compare(rounds, source, app_state, Observation("restore"))
        plan = yield from _agree(rounds, compared.message(reading.wants(Host.get())))
        weighed: Weighed = yield lambda host: host.run_blocking(reading.weigh, host, plan)
        payload = yield from rounds.arrive(msgspec.msgpack.encode(weighed))
        totals = msgspec.msgpack.decode(payload, type=RestoreTotals)
        return RestorePlan(
            mode=str(plan.mode),
            reason=plan.reason,
            bytes_needed=sum(own.bytes_needed for own in totals.ranks),
            bytes_read=sum(own.bytes_read for own in totals.ranks),
            num_requests=sum(own.num_requests for own in totals.ranks),
            bytes_read_by_rank=tuple(own.bytes_read for own in totals.ranks),
            missing=totals.missing,
            unexpected=totals.unexpected,
            mismatched=totals.mismatched,
        )

    label = Label(CallKind.PLAN_RESTORE, source.location.canonical)
    return (yield from call_together(team, label, source.options, decisions, body))


def _compare(
    rounds: Rounds,
    source: Source,
    app_state: AppState,
    observation: Observation,
) -> Script[tuple[Compared, Reading]]:
    """Reads the index and, once all ranks have read the same one, compares."""
    validate_app_state(app_state)
    index = yield from load_view(source, rounds.rank)
    observation.attempt = index.attempt
    observation.caller.note(Work.INDEX)
    ready = Ready(printable(source.location.display_url), index.attempt)
    yield from rounds.arrive(msgspec.msgpack.encode(ready), then=Stage.COMPARE)
    states = state_dicts(app_state, rounds.team)
    compared = compare(index, app_state, states, rank=rounds.rank, options=source.options)
    # Escaped names, which can be sent to other ranks.
    parts = {escape(key): part for key, part in compared.parts.items()}
    observation.caller.note(Work.COMPARE)
    return compared, Reading(source, index, parts, rounds.team, observation)


def _agree(rounds: Rounds, message: Comparison) -> Script[ReadPlan]:
    """Sends this rank's mismatches and wants; returns the common read plan."""
    payload = yield from rounds.arrive(msgspec.msgpack.encode(message), then=Stage.READ)
    return msgspec.msgpack.decode(payload, type=ReadPlan)


class _Turns:
    """Calls into statefuls, key by key. These calls may be collective. So with several ranks, an
    error in one key does not skip the calls of the other keys."""

    def __init__(self, team: Team | None, stage: Stage) -> None:
        self._team = team
        self._stage = stage
        self._error: ActorSnapError | None = None

    @contextmanager
    def of(self, key: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self._team is None:
                raise
            logger.debug("rank %d, key %r", self._team.rank, key, exc_info=True)
            if self._error is None:
                self._error = self._named(error, key, self._team.rank)

    def _named(self, error: Exception, key: str, rank: int) -> ActorSnapError:
        if isinstance(error, ActorSnapError):
            return error
        named = RestoreAborted(
            reason=describe(error), rank=rank, stage=str(self._stage), key=escape(key)
        )
        named.__cause__ = error
        return named

    def end(self) -> None:
        """Raises the first error."""
        if self._error is not None:
            raise self._error


def state_dicts(app_state: AppState, team: Team | None) -> dict[str, Any]:
    """Calls every ``state_dict()``, in the same order on all ranks.

    Generators come last, because other loads may draw numbers. Their ``state_dict()`` is not
    called: a generator that only this process has must not fail the other ranks.
    """
    turns = _Turns(team, Stage.COMPARE)
    states: dict[str, Any] = {}
    for key in sorted(app_state, key=lambda key: (isinstance(app_state[key], RNGState), key)):
        stateful = app_state[key]
        with turns.of(key):
            states[key] = None if isinstance(stateful, RNGState) else stateful.state_dict()
    turns.end()
    return states


@dataclass(slots=True)
class Compared:
    """The result of comparing an app state with a snapshot.

    Attributes:
        parts: The restorable part of each key, in load order.
            adapting: The comparison with each module that adapts the loaded state itself.
        missing, unexpected, mismatched, kept: See ``RestoreReport``.
        without_optim: Keys of each ``ModelState`` whose optimizers keep their values.
        unplaced: Paths without a place here, by escaped key. Other ranks may have a place, as with
            layers of other pipeline stages.
        hints: A line per missing key that resembles a key of the snapshot.
    """

    parts: dict[str, KeyRestore] = field(default_factory=dict)
    adapting: dict[str, KeyRestore] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    unplaced: dict[str, tuple[str, ...]] = field(default_factory=dict)
    hints: list[str] = field(default_factory=list)
    without_optim: list[str] = field(default_factory=list)

    def build(self) -> dict[str, Any]:
        """Returns the restored states, by key, for ``load_state_dict``."""
        states = {key: part.build() for key, part in self.parts.items()}
        for key in self.without_optim:
            if key in states:
                states[key].pop("optim", None)
        return states

    def message(self, wants: ReadInterest) -> Comparison:
        return Comparison(
            wants,
            tuple(self.missing),
            tuple(self.unexpected),
            tuple(self.mismatched),
            self.unplaced,
        )


def compare(
    index: Index,
    app_state: AppState,
    states: Mapping[str, Any],
    *,
    rank: int,
    options: Options,
) -> Compared:
    """Compares an app state with a snapshot; reads no data and changes nothing.

    Args:
        index: The index of the snapshot, as ``rank`` sees it.
        states: The states of ``app_state``, in load order.
        rank: This process' rank in its group.

    Raises:
        UsageError, FormatError, MemoryError: See ``prepare``.
    """
    by_key = entries_by_key(index.entries)
    elsewhere: dict[str, list[str]] = {}
    for path in index.elsewhere:
        elsewhere.setdefault(path.partition("/")[0], []).append(path)
    found = Compared()
    changed = {} if options.allow_optimizer_change else _changed_optimizers(app_state, index)
    found.without_optim = [key for key in states if join(key, "optim") in changed]
    states = {
        key: {name: value for name, value in state.items() if name != "optim"}
        if key in found.without_optim
        else state
        for key, state in states.items()
    }

    def open_key(key: str, *, is_fresh: bool = False, apart: Iterable[str] = ()) -> KeyRestore:
        return prepare(
            key,
            by_key[key],
            target=None if is_fresh else states[key],
            allow_pickle=options.allow_pickle,
            matching=Matching.KEYS if is_fresh else matching_of(app_state[key]),
            unshared=apart,
            world_size=index.world_size,
        )

    for key in states:
        private = elsewhere.get(escape(key), [])
        if isinstance(app_state[key], RNGState) and (
            private or (rank >= index.world_size and _is_each_ranks_own(by_key.get(key, ())))
        ):
            ranks = sorted({rank for path in private for rank in index.elsewhere[path]})
            ranks = ranks or list(range(index.world_size))
            found.kept.append(
                f"{escape(key)}: rank {rank} keeps the states of its random generators, because "
                f"only {named_ranks(ranks)} of {index.world_size} saved theirs, each for itself"
            )
            continue
        if key not in by_key:
            found.missing.append(escape(key))
            if hint := did_you_mean(key, by_key.keys() - states.keys()):
                found.hints.append(f"the snapshot has no key {key!r}; {hint}")
            found.mismatched += _explain_private(key, private, index, rank)
            continue
        stateful = app_state[key]
        if escape(key) in changed:
            found.mismatched.append(changed[escape(key)])
            continue
        if key in found.without_optim:
            found.mismatched.append(changed[join(key, "optim")])
        if unprimed := _unprimed(key, stateful, by_key[key], states[key]):
            found.mismatched += unprimed
            continue
        part = open_key(key)
        private = [path for path in private if part.has_target(path)]
        found.mismatched += _explain_private(key, private, index, rank)
        if private and matching_of(stateful) in (Matching.GROUPS, Matching.NOTHING):
            continue  # its state would have holes
        stuck = _stuck_on_meta(key, stateful, part)
        found.mismatched += stuck
        if isinstance(stateful, torch.optim.Optimizer) and (stuck or part.mismatched):
            found.mismatched += part.mismatched
            continue  # an optimizer loads all of its state or none
        differs = part.missing or part.unexpected or part.unplaced or part.mismatched
        if differs and adapts(stateful):
            found.adapting[key] = part
            # Into fresh memory: a module that adapts may move a leaf to another name.
            part = open_key(key, is_fresh=True)
        found.missing += part.missing
        found.unexpected += part.unexpected
        found.unplaced[escape(key)] = tuple(part.unplaced)
        found.mismatched += part.mismatched
        found.parts[key] = part
    shared, apart = _settle(app_state, found.parts)
    found.mismatched += shared
    for key, paths in apart.items():
        found.parts[key] = open_key(key, apart=paths)
    return found


def load(
    compared: Compared,
    states: Mapping[str, Any],
    loaders: Mapping[str, Callable[[Any], Any]],
    *,
    strict: bool,
    nbytes: int,
    team: Team | None,
) -> RestoreReport:
    """Loads the restored states, key by key.

    Args:
        states: The restored states, by key.
        loaders: ``load_state_dict`` by key.
        strict: As in the comparison.
        nbytes: Bytes read into place.

    Raises:
        IncompatibleState: A module that adapts what it loads refuses it.
        Exception: Any error of a ``load_state_dict``, with a note that names its key.
    """
    missing, unexpected = list(compared.missing), list(compared.unexpected)
    if not strict:  # in a strict restore, other ranks have a place for them
        unexpected += [path for paths in compared.unplaced.values() for path in paths]
    mismatched = list(compared.mismatched)
    turns = _Turns(team, Stage.LOAD)
    for number, (key, state) in enumerate(states.items()):
        with turns.of(key):
            try:
                if key in compared.adapting:
                    left_out = _load_adapting(
                        key, loaders[key], state, compared.adapting[key], strict=strict
                    )
                    missing.extend(left_out.missing)
                    unexpected.extend(left_out.unexpected)
                    mismatched.extend(left_out.mismatched)
                else:
                    loaders[key](state)
            except Exception as error:
                loaded = ", ".join(map(repr, list(states)[:number])) or "none"
                error.add_note(
                    f"actorsnap: load_state_dict() of {key!r} in the app state raised this; "
                    f"keys that were loaded before: {loaded}"
                )
                raise
    turns.end()
    return RestoreReport(
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        mismatched=tuple(mismatched),
        kept=tuple(compared.kept),
        nbytes=nbytes,
    )


def _explain_private(key: str, paths: Sequence[str], index: Index, rank: int) -> list[str]:
    """Returns a line per set of ranks with private leaves that the app state wants."""
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for path in paths:
        by_ranks.setdefault(index.elsewhere[path], []).append(path)
    return [
        f"{escape(key)}: rank {rank} wants what {named_ranks(ranks)} of {index.world_size} saved, "
        f"each for itself: {', '.join(found[:3])}{', ...' if len(found) > 3 else ''}. Only the "
        "same rank gets it back. If it is equal on all ranks, name it in replicated=[...] at the "
        "next take; else leave the key out, or restore with strict=False"
        for ranks, found in by_ranks.items()
    ]


def _is_each_ranks_own(entries: Iterable[AnyEntry]) -> bool:
    """Returns whether ranks saved private leaves."""
    return not all([getattr(entry, "replicated", True) for entry in entries])


def _changed_optimizers(app_state: AppState, index: Index) -> dict[str, str]:
    """Returns, by path, a line per state that was saved from optimizers of another class."""
    return {
        path: f"{path}: saved from {saved}, the app state has {class_names(optimizers)}; "
        "Options(allow_optimizer_change=True) restores it nevertheless"
        for path, optimizers in optimizers_in(app_state).items()
        if (saved := index.optimizers.get(path)) and not takes_state_of(optimizers, saved)
    }


def _unprimed(key: str, stateful: Stateful, entries: Sequence[AnyEntry], state: Any) -> list[str]:
    """Returns a line if an optimizer of distributed parameters has no state to restore into."""
    if not isinstance(stateful, torch.optim.Optimizer):
        return []
    held = [p for group in stateful.param_groups for p in group["params"]]
    if not any(map(is_distributed, held)):
        return []
    below = f"{escape(key)}/state/"
    for entry in entries:
        if isinstance(entry, TensorEntry | ShardedEntry | ViewEntry) and entry.shape:
            number = entry.path.removeprefix(below).partition("/")[0]
            if entry.path.startswith(below) and not state["state"].get(unescape(number)):
                return [
                    f"{escape(key)}: the optimizer has no state yet, and its parameters are "
                    "distributed tensors; call prime_optimizer(optimizer) before"
                ]
    return []


def _stuck_on_meta(key: str, stateful: Stateful, part: KeyRestore) -> list[str]:
    """Returns a line per leaf on the meta device that its stateful cannot replace."""
    if can_assign(stateful):
        return []
    if isinstance(stateful, torch.optim.Optimizer):
        held = [p for group in stateful.param_groups for p in group["params"]]
        if any(parameter.is_meta for parameter in held):
            return [
                f"{escape(key)}: its parameters are on the meta device, and its state would go "
                "there; make the optimizer after the module was restored"
            ]
    kind = type(stateful).__qualname__
    return [
        f"{path}: it is on the meta device, and a {kind} cannot take over another tensor; "
        "materialise it with to_empty(...)"
        for path in part.on_meta
    ]


def _settle(
    app_state: AppState, parts: Mapping[str, KeyRestore]
) -> tuple[list[str], dict[str, set[str]]]:
    """Finds memory that leaves share in the app state but not in the snapshot.

    A module's parameters keep the memory, because the module computes with it. Among other leaves
    the first keeps it.

    Returns:
        A line per conflict with a leaf of a module; and, by key, the paths that get separate
        memory.
    """
    # Of two modules' leaves the last wins, as when load_state_dict copies.
    in_modules = [key for key in parts if isinstance(app_state[key], torch.nn.Module)]
    others = [key for key in parts if key not in in_modules]
    # load_state_dict copies a module's leaves into the module's own memory.
    fixed = [each for key in in_modules for each in parts[key].destinations]
    destinations = [each for key in others for each in parts[key].destinations]
    lines: dict[str, None] = {}
    apart: dict[str, set[str]] = {}
    key_of = {escape(key): key for key in parts}
    for owner, other in find_conflicts(destinations, fixed):
        key = key_of[other.path.partition("/")[0]]
        apart.setdefault(key, set()).add(other.path)
        if key in in_modules:
            lines[
                f"{owner.path}, {other.path}: they share memory in the app state, but not in the "
                "snapshot"
            ] = None
    return list(lines), apart


def _load_adapting(
    key: str, load: Callable[[Any], Any], state: Any, compared: KeyRestore, *, strict: bool
) -> RestoreReport:
    """Loads a module that adapts the state itself; returns the parts that it left out.

    Raises:
        IncompatibleState: strict, and torch reports a mismatch.
    """
    try:
        keys = load(state)
    except RuntimeError as error:
        complaints = [f"{key}: {line}" for line in torch_complaints(error)]
        if not complaints:
            raise
        if strict:
            raise IncompatibleState(mismatched=complaints, is_untouched=False) from error
        # torch reports no details, but has loaded all that fits.
        return RestoreReport(
            missing=tuple(compared.missing),
            unexpected=(*compared.unexpected, *compared.unplaced),
            mismatched=tuple(complaints),
        )
    return RestoreReport(
        missing=tuple(join(key, name) for name in getattr(keys, "missing_keys", ())),
        unexpected=tuple(join(key, name) for name in getattr(keys, "unexpected_keys", ())),
    )
