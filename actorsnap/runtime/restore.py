# SPDX-License-Identifier: Apache-2.0
"""The script of ``Snapshot.restore``."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import msgspec

from actorsnap.actors.trace import Wait, Work
from actorsnap.errors import (
    ActorSnapError,
    IncompatibleState,
    NotASnapshot,
    RestoreAborted,
    UsageError,
    call_user_code,
    describe,
)
from actorsnap.log import Log
from actorsnap.planning.index import Index, Wants
from actorsnap.planning.renaming import (
    Rename,
    check_used,
    function_of,
    origins_of,
    paths_of,
    renamed,
)
from actorsnap.planning.shared_reads import ReadMode, SharedReadPlan
from actorsnap.protocol.failure import Stage
from actorsnap.protocol.messages import CallKind, Label
from actorsnap.protocol.restore import (
    Alike,
    Comparison,
    ReadCost,
    Ready,
    RestoreDecisions,
    RestoreTotals,
)
from actorsnap.runtime.bars import Amount, shown
from actorsnap.runtime.comparison import Compared, compare, wanted_of
from actorsnap.runtime.host import Host, Script
from actorsnap.runtime.location import AppState, check_flag
from actorsnap.runtime.partial_index import PartialIndex
from actorsnap.runtime.rounds import Arrive, Rounds, call_together
from actorsnap.runtime.shared_reads import RestoreReads
from actorsnap.runtime.source import MAX_SMALL_READS, OpenSource, Source, begins_anew
from actorsnap.runtime.team import Team, find_team, label_of
from actorsnap.runtime.texts import count_of, preformatted, size_text
from actorsnap.runtime.tracing import Observation, observe
from actorsnap.state.restore.build import KeyRestore
from actorsnap.state.stateful import RNGState, loader, torch_complaints, validate_app_state
from actorsnap.state.tree import escape, join
from actorsnap.wording import did_you_mean, format_list, joined, printable

logger = Log(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreCall:
    """The arguments of ``Snapshot.restore``.

    Attributes:
        is_found: Rank 0 has found the snapshot: a rank that does not find it sees another storage.
        warns_of_keys: Log a warning of keys that only the snapshot has: a run that continues from
            it loses them.
    """

    app_state: AppState
    strict: bool = True
    keys: Collection[str] | None = None
    rename: Rename | None = None
    cast: bool = False
    group: Any = None
    store: Any = None
    progress: bool = False
    is_found: bool = False
    warns_of_keys: bool = False

    def __post_init__(self) -> None:
        check_flag("cast", self.cast)
        if self.rename is not None:
            function_of(self.rename)
        if isinstance(self.keys, str) or not isinstance(self.keys, Collection | None):
            raise UsageError(f"keys must be a list of keys of the app state, not {self.keys!r}")

    def selected(self) -> AppState:
        """Returns the part of the app state that ``keys`` selects.

        Raises:
            UsageError: An argument is invalid, or the app state has no such key.
        """
        check_flag("strict", self.strict)
        check_flag("progress", self.progress)
        app_state = self.app_state
        validate_app_state(app_state)
        if self.keys is None:
            return app_state
        for key in self.keys:
            if key not in app_state:
                hint = did_you_mean(key, app_state) or f"it has {', '.join(map(repr, app_state))}"
                raise UsageError(f"keys: the app state has no key {key!r}; {hint}")
        return {key: app_state[key] for key in app_state if key in self.keys}


_EVERY_LEAF = Wants(lambda path: True, {})


class _LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing, unexpected or mismatched."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        return "\n".join(
            [
                self._first_line(),
                *format_list("missing in the snapshot", self.missing),
                *format_list("unexpected in the snapshot", self.unexpected),
                *format_list("mismatched", self.mismatched),
            ]
        )

    def _first_line(self) -> str:
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return preformatted(str(self))


class RestoreReport(_LeftOut, frozen=True, kw_only=True):
    """The parts of the app state and of the snapshot that a restore left out.

    Attributes:
        missing: Paths of modules and ``StateDict``s that the snapshot lacks. They keep their
            values.
        unexpected: Paths of the snapshot that have no place in a module. They are not restored.
        mismatched: One line for each of these:

            - a leaf with another kind, dtype or shape, which keeps its value.
            - an optimizer that has another class or cannot use the state. It keeps its values.
            - two leaves of modules that share memory only in the app state. The last one wins.
        kept: One line for each ``RNGState`` whose generators are unchanged, because only other
            ranks saved theirs. Seed them. Does not make a strict restore fail.
        nbytes: Bytes read into the app state.
    """

    kept: tuple[str, ...] = ()
    nbytes: int = 0

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *format_list("kept", self.kept)])

    def _first_line(self) -> str:
        rest = "" if self.is_complete else ". Left out:"
        return f"restored; {size_text(self.nbytes)} read{rest}"


class RestorePlan(_LeftOut, frozen=True, kw_only=True):
    """A preview of a restore on all its ranks.

    Attributes:
        mode: ``"direct"``: every rank reads its own ranges. ``"shared"``: ranks read common ranges
            once and send them to each other.
        reason: Explanation of ``mode``: how many ranks need the same bytes, and how many bytes.
        bytes_needed: Bytes to restore into the app states.
        bytes_read: Bytes to read from the storage, in whole checksum blocks or compressed frames.
        num_requests: Number of read requests to the storage.
        bytes_read_by_rank: ``bytes_read`` of each rank.
        missing: Paths of modules and ``StateDict``s that the snapshot lacks. In these three tuples,
            a line that applies only to some ranks begins with the rank.
        unexpected: Paths of the snapshot that have no place in a module.
        mismatched: One line for each leaf or optimizer that does not fit.
    """

    mode: str
    reason: str
    bytes_needed: int
    bytes_read: int
    num_requests: int
    bytes_read_by_rank: tuple[int, ...]

    def _first_line(self) -> str:
        requests = count_of(self.num_requests, "request", "requests")
        return (
            f"{size_text(self.bytes_needed)} to restore, {size_text(self.bytes_read)} to read in "
            f"{requests}; mode {self.mode}: {self.reason}"
        )

    @property
    def read_amplification(self) -> float:
        """Bytes read per byte needed. Below 1 if ranks share bytes."""
        return self.bytes_read / self.bytes_needed if self.bytes_needed else 1.0


class Overwritten:
    """Keys of the app state that a restore may have written to.

    Leaving it with an error adds a note that names them.
    """

    def __init__(self) -> None:
        self._keys: dict[str, None] = {}

    def add(self, keys: Iterable[str]) -> None:
        self._keys.update(dict.fromkeys(keys))

    @property
    def text(self) -> str:
        """For example ``"model, optimizer may be partly overwritten"``. Empty without keys."""
        return f"{', '.join(self._keys)} may be partly overwritten" if self._keys else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and self.text:
            what = "failed" if isinstance(error, Exception) else "was interrupted"
            error.add_note(f"The restore {what}: {self.text}. Restore again before you use them.")


def note_arguments(
    error: IncompatibleState,
    url: str,
    call: str,
    lacks: Sequence[str] = ("strict=", "rename=", "cast=", "keys="),
) -> bool:
    """Adds a note: the error suggests arguments that the caller's ``call`` lacks.

    Returns False, and adds none, if it suggests none of them.
    """
    lacks = [name for name in lacks if name in str(error)]
    if not lacks:
        return False
    names, it = joined(lacks, "or"), "it" if len(lacks) == 1 else "them"
    there = f'Snapshot("{url}").restore'
    error.add_note(f"{call} has no {names}: to pass {it}, call {there} instead.")
    return True


def restore(source: Source, call: RestoreCall) -> Script[RestoreReport]:
    """Restores on all ranks together, in the rounds of ``protocol.restore``."""
    # Outside of the rounds: another rank's error arrives with that rank's notes.
    with Overwritten() as overwritten:
        return (yield from try_restore(source, call, overwritten))


@begins_anew
def try_restore(
    source: Source, call: RestoreCall, overwritten: Overwritten
) -> Script[RestoreReport]:
    """``restore`` whose failure the caller explains by ``overwritten``."""
    team = find_team(call.group, call.store)
    label = Label(CallKind.RESTORE, source.location.canonical)
    decisions = RestoreDecisions(mode=ReadMode(source.options.read_mode))

    def body(rounds: Rounds) -> Script[RestoreReport]:
        return restore_by(rounds, source, call, overwritten)

    return (yield from call_together(team, label, source.options, decisions, body))


def restore_by(
    rounds: Rounds, source: Source, call: RestoreCall, overwritten: Overwritten
) -> Script[RestoreReport]:
    """Runs this rank's part, observed."""
    observation, begun_s = observe("restore", source.options), time.monotonic()
    end = partial(
        observation.end,
        url=source.location.display_url,
        rank=rounds.rank,
        world_size=1 if rounds.team is None else rounds.team.world_size,
    )
    try:
        report = yield from _restore(rounds, source, call, overwritten, observation)
    except Exception as error:
        yield partial(end, outcome="failed", error=describe(error))
        raise
    except BaseException:
        # Python's end may close this script; no runtime can be started then.
        if (host := Host.running_here()) is not None:
            host.submit(end(host, outcome="cancelled"))
        raise
    yield partial(end, outcome="restored")
    url, seconds = source.location.log_url, time.monotonic() - begun_s
    for line in report.kept:
        logger.info(
            "snapshot %s rank %d attempt %s: %s. Seed them",
            *(url, rounds.rank, observation.attempt, line),
        )
    logger.info(
        "snapshot %s rank %d attempt %s: restored, %s in %.2f s",
        *(url, rounds.rank, observation.attempt, size_text(report.nbytes), seconds),
        extra={
            "snapshot": url,
            "attempt": observation.attempt,
            "rank": rounds.rank,
            "total_bytes": report.nbytes,
            "total_s": seconds,
        },
    )
    return report


def _restore(
    rounds: Rounds,
    source: Source,
    call: RestoreCall,
    overwritten: Overwritten,
    observation: Observation,
) -> Script[RestoreReport]:
    """Compares, reads, then loads key by key."""
    note = observation.caller.note
    app_state, strict = call.selected(), call.strict
    compared, reads = yield from _compare(rounds, source, call, app_state, observation)
    plan = yield from _agree(rounds, compared, reads, strict=strict)
    note(Work.AGREE)
    loaders = {key: loader(app_state[key], strict=strict) for key in compared.parts}

    async def read(host: Host, arrive: Arrive) -> None:
        overwritten.add(compared.written_in_place)
        await reads.read(host, plan, arrive, rounds.scope)

    yield from shown(
        rounds.perform(read),
        lambda: [_amount_of(reads)],
        source.location.display_url,
        is_on=call.progress and rounds.rank == 0,
    )
    note(Wait.READS)
    states = compared.build()
    yield from rounds.arrive(then=Stage.LOAD)
    report = _load(
        *(compared, states, loaders, strict, reads.bytes_needed, rounds.team), overwritten
    )
    note(Work.LOAD)
    if not strict and not report.is_complete and not compared.num_restored:
        logger.warning(
            "%s: nothing was restored, because no leaf of the snapshot fits the app state. %s",
            label_of(source.location.log_url, rounds.team),
            _explain_nothing(report, compared.keys),
        )
    others = [key for key in compared.keys if key not in app_state]
    if call.warns_of_keys and others:
        logger.warning(
            "%s: the snapshot also has %s, which the app state lacks: not restored, and later "
            "saves will not have %s",
            label_of(source.location.log_url, rounds.team),
            joined([repr(key) for key in others]),
            "it" if len(others) == 1 else "them",
        )
    yield from rounds.arrive()
    return report


def _explain_nothing(report: RestoreReport, keys: Sequence[str]) -> str:
    if not report.missing:
        return f"Mismatched: {_few(report.mismatched)}"
    return (
        f"Missing: {_few(report.missing)}. The snapshot has: "
        f"{_few(report.unexpected) or _few(keys)}. If only the names differ, pass rename="
    )


def _amount_of(reads: RestoreReads) -> Amount:
    needed = reads.bytes_needed
    return Amount("reading", min(reads.count.done_bytes, needed), needed)


@begins_anew
def plan_restore(source: Source, call: RestoreCall) -> Script[RestorePlan]:
    """Runs ``restore`` without reading data; reports the plan, whether or not everything fits."""
    team = find_team(call.group, call.store)
    label = Label(CallKind.PLAN_RESTORE, source.location.canonical)
    decisions = RestoreDecisions(mode=ReadMode(source.options.read_mode), is_dry_run=True)

    def body(rounds: Rounds) -> Script[RestorePlan]:
        app_state = call.selected()
        compared, reads = yield from _compare(
            rounds, source, call, app_state, Observation("restore")
        )
        plan = yield from _agree(rounds, compared, reads, strict=True)
        weighed: ReadCost = yield lambda host: host.run_blocking(reads.weigh, host, plan)
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

    return (yield from call_together(team, label, source.options, decisions, body))


# The steps --------------------------------------------------------------------------------------


def _few(paths: Sequence[str]) -> str:
    return ", ".join(paths[:3]) + ("" if len(paths) <= 3 else f" and {len(paths) - 3} more")


def _compare(
    rounds: Rounds,
    source: Source,
    call: RestoreCall,
    app_state: AppState,
    observation: Observation,
) -> Script[tuple[Compared, RestoreReads]]:
    """Reads the index; compares once all ranks read the same."""
    num_ranks = 1 if rounds.team is None else rounds.team.world_size
    try:
        begun = yield from _begin_index(source, rounds.rank, num_ranks)
    except NotASnapshot as error:
        if not (call.is_found and rounds.rank and error.found == "absent"):
            raise
        raise RestoreAborted(
            reason=f"rank 0 finds {source.location.display_url}, and this rank does not see it: "
            "use a path on storage that all ranks share",
            rank=rounds.rank,
            stage=str(Stage.JOIN),
        ) from None
    attempt = begun.attempt if isinstance(begun, Index) else begun.commit.attempt
    observation.attempt = attempt
    observation.caller.note(Work.INDEX)
    contents = b"" if isinstance(begun, Index) else begun.contents()
    ready = Ready(printable(source.location.display_url), attempt, contents)
    payload = yield from rounds.arrive(msgspec.msgpack.encode(ready), then=Stage.COMPARE)
    states = _state_dicts(app_state, rounds.team)
    if isinstance(begun, Index):
        index = begun
    else:
        alike = msgspec.msgpack.decode(payload, type=Alike).leaves if payload else ()
        # Before the names are changed, nobody knows what is wanted.
        is_renamed = call.rename is not None
        wants = _EVERY_LEAF if is_renamed else wanted_of(app_state, states)
        index = yield from _complete_index(source, begun, wants, alike)
        observation.caller.note(Work.INDEX)
    stored = index
    if call.rename is not None:
        check_used(call.rename, paths_of(index))
        index = renamed(index, call.rename)
    compared = compare(
        *(index, app_state, states),
        rank=rounds.rank,
        options=source.options,
        casts=call.cast,
        rename=call.rename,
    )
    if call.rename is not None and compared.has_unexpected:
        compared.name_as_stored(origins_of(stored, call.rename))
    # Escaped names can be sent to other ranks.
    parts = {escape(key): part for key, part in compared.parts.items()}
    observation.caller.note(Work.COMPARE)
    return compared, RestoreReads(source, index, parts, rounds.team, observation)


@begins_anew
def _begin_index(source: Source, rank: int, num_ranks: int) -> Script[PartialIndex | Index]:
    begin = partial(source.begin_index, rank=rank, num_ranks=num_ranks)
    return (yield from source.perform("read", begin))


def _complete_index(
    source: Source, begun: PartialIndex, wants: Wants, alike: Sequence[int]
) -> Script[Index]:
    async def read(opened: OpenSource) -> Index:
        return await begun.complete(
            *(opened.reader, opened.errands.run_blocking, wants, alike), at_once=MAX_SMALL_READS
        )

    attempt = begun.commit.attempt
    return (yield from source.perform("read", read, attempt))


def _state_dicts(app_state: AppState, team: Team | None) -> dict[str, Any]:
    """Calls every ``state_dict()``, in the same order on all ranks.

    Generators come last: other loads may draw numbers. Theirs is not called: a generator of this
    process only must not fail other ranks.
    """
    states: dict[str, Any] = {}

    def call(key: str) -> None:
        stateful, states[key] = app_state[key], None
        if isinstance(stateful, RNGState):
            return
        try:
            states[key] = call_user_code(stateful.state_dict)
        except Exception as error:
            error.add_note(f"actorsnap: state_dict() of {key!r} in the app state raised this")
            raise

    keys = sorted(app_state, key=lambda key: (isinstance(app_state[key], RNGState), key))
    _call_by_key(keys, call, team, Stage.COMPARE)
    return states


def _agree(
    rounds: Rounds, compared: Compared, reads: RestoreReads, *, strict: bool
) -> Script[SharedReadPlan]:
    interest = reads.interest(Host.get())
    message = compared.message(interest) if strict else Comparison(interest)
    payload = yield from rounds.arrive(msgspec.msgpack.encode(message), then=Stage.READ)
    return msgspec.msgpack.decode(payload, type=SharedReadPlan)


def _load(
    compared: Compared,
    states: Mapping[str, Any],
    loaders: Mapping[str, Callable[[Any], Any]],
    strict: bool,
    nbytes: int,
    team: Team | None,
    overwritten: Overwritten,
) -> RestoreReport:
    """Calls every ``load_state_dict``.

    Raises:
        IncompatibleState: A module that adapts refuses the state.
        Exception: Of a ``load_state_dict``, with a note of its key.
    """
    missing, unexpected = list(compared.missing), list(compared.unexpected)
    if not strict:  # if strict, other ranks have places
        unexpected += [path for paths in compared.unplaced.values() for path in paths]
    mismatched = list(compared.mismatched)
    loaded: list[str] = []

    def call(key: str) -> None:
        overwritten.add([escape(key)])
        try:
            if key in compared.adapting:
                left_out = call_user_code(
                    _load_adapting,
                    *(key, loaders[key], states[key], compared.adapting[key]),
                    strict=strict,
                )
                missing.extend(left_out.missing)
                unexpected.extend(left_out.unexpected)
                mismatched.extend(left_out.mismatched)
            else:
                call_user_code(loaders[key], states[key])
        except Exception as error:
            error.add_note(
                f"actorsnap: load_state_dict() of {key!r} in the app state raised this; "
                f"keys that were loaded before: {', '.join(map(repr, loaded)) or 'none'}"
            )
            raise
        loaded.append(key)

    _call_by_key(states, call, team, Stage.LOAD)
    return RestoreReport(
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        mismatched=tuple(mismatched),
        kept=tuple(compared.kept),
        nbytes=nbytes,
    )


def _call_by_key(
    keys: Iterable[str], call: Callable[[str], None], team: Team | None, stage: Stage
) -> None:
    """Calls into statefuls; raises the first error.

    With several ranks, an error skips no key: these calls may be collective.
    """
    first: ActorSnapError | None = None
    for key in keys:
        try:
            call(key)
        except Exception as error:
            if team is None:
                raise
            logger.debug("rank %d, key %r", team.rank, key, exc_info=True)
            if first is not None:
                continue
            if isinstance(error, ActorSnapError):
                first = error
                continue
            first = RestoreAborted(
                reason=describe(error), rank=team.rank, stage=str(stage), key=escape(key)
            )
            first.__cause__ = error
    if first is not None:
        raise first


def _load_adapting(
    key: str, load: Callable[[Any], Any], state: Any, compared: KeyRestore, *, strict: bool
) -> RestoreReport:
    """Loads a module that adapts the state; returns what it left out.

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
        # torch has loaded all that fits.
        return RestoreReport(
            missing=tuple(compared.match.missing),
            unexpected=(*compared.match.unexpected, *compared.match.unplaced),
            mismatched=tuple(complaints),
        )
    return RestoreReport(
        missing=tuple(join(key, name) for name in getattr(keys, "missing_keys", ())),
        unexpected=tuple(join(key, name) for name in getattr(keys, "unexpected_keys", ())),
    )
