"""The calls of a manager, as scripts for both facades.

Each rank decides alone whether a step is due (``planning.cadence``): no message is sent until one
is. Rank 0 alone looks at the root, takes the generation, verifies and deletes; it does the last two
on the runtime's loop, after the commit. Ranks learn names from it in a call of one round.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from actorsnap.errors import (
    ActorSnapError,
    FormatError,
    RootTaken,
    UsageError,
    describe,
)
from actorsnap.format.manifest import Commit
from actorsnap.format.steps import StepName
from actorsnap.log import Log
from actorsnap.manager.keeper import Keeper, Search, current_timeline, why_damaged
from actorsnap.options import Options
from actorsnap.planning.cadence import SavePolicy
from actorsnap.planning.keeping import (
    KeepPolicy,
    StoredStep,
    Verdict,
    metric_value,
)
from actorsnap.protocol.failure import Stage
from actorsnap.protocol.messages import CallKind, Label
from actorsnap.protocol.rounds import Continue
from actorsnap.runtime import maintenance, restore, taking
from actorsnap.runtime.host import Script
from actorsnap.runtime.location import (
    AppState,
    check_flag,
    check_metadata,
    check_step,
    make_location,
    resolve_options,
)
from actorsnap.runtime.restore import RestoreReport
from actorsnap.runtime.roots import (
    METADATA_KEY,
    Listing,
    Root,
    stored_step,
)
from actorsnap.runtime.rounds import Rounds, call_together
from actorsnap.runtime.save import Save
from actorsnap.runtime.source import OpenSource
from actorsnap.runtime.team import find_team

logger = Log(__name__)

Metrics = Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None
"""Numbers by name; a callable is called on every rank, and only for a step that is saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """A snapshot at the root.

    Attributes:
        created_s: Since 1970; 0 unless committed.
        metrics: See ``CheckpointManager.maybe_save``.
        state: ``"committed"``; ``"abandoned"``: committed, but the run went on from an earlier
            step; ``"damaged"``: its commit object cannot be read; ``"unfinished"``: never
            committed; ``"deleting"``.
    """

    step: int
    url: str
    name: StepName
    state: str
    created_s: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The result of a restore.

    Attributes:
        skipped: URLs of newer snapshots that are damaged, with the reasons.
    """

    step: int
    url: str
    report: RestoreReport
    skipped: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """The result of ``prune``.

    Attributes:
        verdicts: On each committed step of the run, oldest first.
        deleted: URLs; with ``dry_run`` those that would be deleted.
        failed: Reasons by URL. A later pass tries again.
    """

    verdicts: tuple[Verdict, ...]
    deleted: tuple[str, ...]
    failed: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What this rank knows.

    Attributes:
        generation: Of this run; None before its first save.
        committed: The last step known to be committed.
        verified: The last step that was also verified. Rank 0 only.
        pending: Steps in flight.
        failed_deletes: Reasons by URL. Rank 0 only.
        is_superseded: Another manager has begun a run at the root: this one deletes nothing.
    """

    generation: int | None
    committed: int | None
    verified: int | None
    pending: tuple[int, ...]
    failed_deletes: Mapping[str, str]
    is_superseded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerSettings:
    """The arguments of ``CheckpointManager``."""

    root: Any
    app_state: AppState | None
    save: SavePolicy
    keep: KeepPolicy
    min_valid: int
    max_pending: int
    replicated: Sequence[str]
    stage: str
    metadata: Mapping[str, Any] | None
    storage_options: Mapping[str, Any] | None
    options: Options | None
    group: Any
    store: Any


class ManagerBody:
    """One manager; its scripts run in the thread of the caller, one at a time."""

    def __init__(self, settings: ManagerSettings) -> None:
        if not isinstance(settings.save, SavePolicy):
            raise UsageError(f"save must be a policy like every.steps(500), not {settings.save!r}")
        if not isinstance(settings.keep, KeepPolicy):
            raise UsageError(f"keep must be a policy like keep.last(3), not {settings.keep!r}")
        for name in ("min_valid", "max_pending"):
            value = getattr(settings, name)
            if type(value) is not int or value < 1:
                raise UsageError(f"{name} must be an integer of at least 1, not {value!r}")
        check_metadata(settings.metadata)
        self._settings = settings
        self._options = resolve_options(settings.options)
        self.root = Root(make_location(settings.root, settings.storage_options), self._options)
        self._label_url = self.root.source.location.canonical
        self._generation: int | None = None
        self._restored: StepName | None = None
        self._seen: int | None = None
        self._saved: int | None = None
        self._committed: int | None = None
        self._pending: collections.deque[tuple[StepName, Save]] = collections.deque()
        self._keeper: Keeper | None = None
        self._is_closed = False

    # When

    def due(self, step: int) -> str:
        """Returns why the step is to be saved; empty if it is not. No I/O, no message."""
        if type(step) is not int or step < 0:
            check_step(step)
            raise UsageError("maybe_save needs the training step: an integer of at least 0")
        seen = self._seen
        if seen is not None and step < seen:
            raise UsageError(
                f"step {step} after step {seen}: steps must not go back. To continue from an "
                "earlier step, call restore(step) first"
            )
        self._seen = step
        if step == self._saved:
            return ""
        return self._settings.save.due(step, is_first=seen is None)

    def save(
        self,
        step: int,
        *,
        reason: str,
        is_async: bool,
        metrics: Metrics = None,
        app_state: AppState | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Script[Save]:
        """Saves on all ranks. If async, returns when staged, else when committed and verified."""
        self._check_open()
        self.due(step)
        if step == self._saved:
            raise UsageError(
                f"step {step} is already saved by this run. Save each step once, or call "
                "restore(step) to begin again there"
            )
        while len(self._pending) >= self._settings.max_pending:
            yield from self._wait_for_oldest()
        if self._generation is None:
            self._generation = yield from self._begin_run()
        name = StepName(step, self._generation)
        refusal: Exception | None = yield from self._look_for_successor()
        noted: dict[str, Any] = {}
        try:
            noted = self._metadata(reason, metrics, metadata)
            app_state = self._app_state(app_state)
        except Exception as error:
            # The other ranks must not wait for this one.
            refusal = refusal or error
        call = taking.TakeCall(
            path=self.root.snapshot(name).location.url,
            app_state={} if app_state is None else app_state,
            replicated=self._settings.replicated,
            overwrite=False,
            resume=False,
            step=step,
            stage=self._settings.stage if is_async else "eager",
            metadata=noted,
            storage_options=self._settings.storage_options,
            options=self._options,
            group=self._settings.group,
            store=self._settings.store,
            refusal=refusal,
        )
        self._saved = step
        try:
            save = yield from taking.take(call, is_async=is_async)
        except BaseException:
            self._saved = None
            raise
        self._pending.append((name, save))
        if self._is_keeper:
            self._find_keeper().watch(name, save)
        if not is_async:
            yield from self.wait()
        return save

    def _begin_run(self) -> Script[int]:
        restored_from = self._restored

        def claim() -> Script[Any]:
            async def perform(opened: OpenSource) -> int:
                return await self.root.claim_generation(
                    opened, restored_from=restored_from, world_size=self._world_size
                )

            return (yield from self.root.source.perform("begin a run", perform))

        generation: int = yield from self._announce(CallKind.BEGIN_RUN, claim)
        return generation

    def _look_for_successor(self) -> Script[ActorSnapError | None]:
        """Returns on rank 0 why nothing may be saved."""
        if not self._is_keeper:
            return None
        generation = self._generation
        assert generation is not None
        keeper = self._find_keeper()
        if not keeper.is_superseded:
            try:
                keeper.is_superseded = yield from self.root.source.perform(
                    "look for a later run",
                    lambda opened: self.root.is_superseded(opened, generation),
                )
            except ActorSnapError as error:
                return error
        return RootTaken(url=self.root.url, generation=generation) if keeper.is_superseded else None

    def _metadata(
        self, reason: str, metrics: Metrics, metadata: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        found = metrics() if callable(metrics) else metrics
        merged = {**(self._settings.metadata or {}), **check_metadata(metadata)}
        if METADATA_KEY in merged:
            raise UsageError(f"metadata[{METADATA_KEY!r}] is the manager's own")
        noted: dict[str, Any] = {"reason": reason}
        if found:
            noted["metrics"] = {str(key): _stored_metric(key, found[key]) for key in found}
        return {**merged, METADATA_KEY: noted}

    # Pending saves

    def wait(self) -> Script[None]:
        """Waits until pending saves are committed and, on rank 0, verified.

        Raises:
            ActorSnapError: The first failure. The others are logged.
        """
        yield from self._wait_for_pending()
        if self._keeper is not None:
            keeper = self._keeper
            yield lambda _: keeper.finish_verifying()
            keeper.raise_damage()

    def _wait_for_pending(self) -> Script[None]:
        """Waits for the saves only. Ends alike on all ranks."""
        failure: ActorSnapError | None = None
        for _ in [*self._pending]:  # one that is not over, as in a fork, stays
            try:
                yield from self._wait_for_oldest()
            except ActorSnapError as error:
                if failure is not None:
                    logger.error("%s: %s", self.root.url, describe(error))
                failure = failure or error
        if failure is not None:
            raise failure

    def _wait_for_oldest(self) -> Script[None]:
        name, save = self._pending[0]
        try:
            yield from taking.await_pending(save, save.finished)
        finally:
            if save.finished.done():
                self._pending.popleft()
        self._committed = name.step

    def close(self, *, has_failed: bool = False, timeout_s: float = math.inf) -> Script[None]:
        """Waits for pending saves, and for deletions at most ``timeout_s``.

        Args:
            has_failed: The program ends with an error: nothing is saved at the end, and failed
                saves are only logged.
        """
        if self._is_closed:
            return
        try:
            reason = "" if has_failed else self._settings.save.at_end()
            if reason and self._seen is not None and self._seen != self._saved:
                yield from self.save(self._seen, reason=reason, is_async=False)
            yield from self.wait()
        except ActorSnapError as error:
            if not has_failed:
                raise
            logger.error("%s: %s", self.root.url, describe(error))
        finally:
            self._is_closed = True
            if self._keeper is not None:
                keeper = self._keeper
                yield lambda _: keeper.finish(timeout_s)

    # Restoring

    def restore_latest(
        self,
        app_state: AppState | None,
        *,
        strict: bool,
        valid: str,
        allow_fresh: bool,
    ) -> Script[Restored | None]:
        """Restores the newest whole snapshot of the current timeline, on all ranks."""
        self._check_open()
        check_flag("strict", strict)
        check_flag("allow_fresh", allow_fresh)
        state = self._app_state(app_state)
        # A partial restore of a damaged snapshot would leave its values in the app state.
        level = valid if strict else "full"
        yield from self._wait_for_pending()
        search = Search(self.root, level, allow_fresh)
        failure: Exception | None = None
        while True:

            def find(failure: Exception | None = failure) -> Script[Any]:
                yield from self._finish_keeping()
                return (yield from search.following(failure))

            found = yield from self._announce(CallKind.RESTORE_LATEST, find)
            name = StepName.parse(found["name"])
            if name is None:
                return None
            skipped = tuple((url, why) for url, why in found["skipped"])
            try:
                report = yield from self._restore(name, state, strict)
            except Exception as error:
                # Rank 0 decides whether an older one may help.
                failure = error
                continue
            return self._continue_from(name, report, skipped)

    def restore(self, step: int, app_state: AppState | None, *, strict: bool) -> Script[Restored]:
        """Restores a step of the current timeline; later steps are abandoned by the next save."""
        self._check_open()
        check_step(step)
        state = self._app_state(app_state)
        yield from self._wait_for_pending()

        def find() -> Script[Any]:
            yield from self._finish_keeping()
            infos = yield from self.steps(is_complete=True)
            named = [info for info in infos if info.step == step]
            whole = [info for info in named if info.state == "committed"]
            if not whole:
                known = ", ".join(str(i.step) for i in infos if i.state == "committed") or "none"
                what = f": it is {named[-1].state}" if named else ""
                raise UsageError(
                    f"{self.root.url} has no snapshot of step {step} to restore{what}. Steps: "
                    f"{known}. An abandoned one can be restored by its URL with Snapshot"
                )
            return str(whole[-1].name)

        name = StepName.parse((yield from self._announce(CallKind.RESTORE_STEP, find)))
        assert name is not None
        report = yield from self._restore(name, state, strict)
        return self._continue_from(name, report, ())

    def _finish_keeping(self) -> Script[None]:
        """What will be restored must not be deleted in the meantime."""
        if self._keeper is not None:
            keeper = self._keeper
            yield lambda _: keeper.finish(math.inf)

    def _restore(self, name: StepName, state: AppState, strict: bool) -> Script[RestoreReport]:
        settings = self._settings
        return restore.restore(
            self.root.snapshot(name),
            state,
            strict=strict,
            group=settings.group,
            store=settings.store,
        )

    def _continue_from(
        self, name: StepName, report: RestoreReport, skipped: tuple[tuple[str, str], ...]
    ) -> Restored:
        url = self.root.snapshot(name).location.display_url
        for other, why in skipped:
            logger.warning("restored %s, because %s is damaged: %s", url, other, why)
        self._generation, self._restored = None, name
        self._seen = self._saved = name.step
        if self._keeper is not None:
            self._keeper.end_run()
        return Restored(step=name.step, url=url, report=report, skipped=skipped)

    # Looking

    def steps(self, *, is_complete: bool) -> Script[list[StepInfo]]:
        """Returns committed steps of the timeline, oldest first; if complete, all others too."""

        async def perform(opened: OpenSource) -> list[StepInfo]:
            listing = await self.root.list(opened)
            commits = await self.root.read_commits(opened, listing.names)
            run = {*current_timeline(listing, commits)}
            found = [
                self._info(name, commits.get(name), name in run, name in listing.intents)
                for name in _ordered(listing)
            ]
            return [info for info in found if is_complete or info.state == "committed"]

        return (yield from self.root.source.perform("list", perform))

    def _info(
        self, name: StepName, commit: Commit | FormatError | None, is_in_run: bool, is_doomed: bool
    ) -> StepInfo:
        url = self.root.snapshot(name).location.display_url
        if not isinstance(commit, Commit):
            state = "unfinished" if commit is None else "damaged"
            state = "deleting" if commit is None and is_doomed else state
            return StepInfo(step=name.step, url=url, name=name, state=state)
        stored = stored_step(name, commit)
        return StepInfo(
            step=name.step,
            url=url,
            name=name,
            state="committed" if is_in_run else "abandoned",
            created_s=stored.created_s,
            metrics=stored.metrics,
        )

    def latest(self) -> Script[StepInfo | None]:
        infos = yield from self.steps(is_complete=False)
        return infos[-1] if infos else None

    def latest_valid(self, level: str) -> Script[StepInfo | None]:
        infos = yield from self.steps(is_complete=False)
        for info in reversed(infos):
            why = yield from why_damaged(self.root, info.name, level)
            if not why:
                return info
        return None

    def best(self, metric: str, mode: str) -> Script[StepInfo | None]:
        infos = yield from self.steps(is_complete=False)
        by_name = {info.name: info for info in infos}
        stored = [
            StoredStep(name=info.name, created_s=info.created_s, metrics=info.metrics)
            for info in infos
            if metric in info.metrics and not math.isnan(info.metrics[metric])
        ]
        if not stored:
            return None
        sign = {"min": 1.0, "max": -1.0}.get(mode)
        if sign is None:
            raise UsageError(f'mode must be "min" or "max", not {mode!r}')
        return by_name[min(stored, key=lambda each: sign * each.metrics[metric]).name]

    # Keeping

    def prune(self, policy: KeepPolicy | None, *, dry_run: bool) -> Script[PruneReport]:
        """Runs one pass now. Rank 0 only."""
        keeper = self._find_keeper()
        verdicts, result = yield lambda _: keeper.run_pass(policy, dry_run=dry_run)
        return PruneReport(
            verdicts=tuple(verdicts),
            deleted=tuple(self._url(name) for name in result.deleted),
            failed={self._url(name): describe(error) for name, error in result.failed.items()},
        )

    def delete(self, step: int, *, force: bool) -> Script[None]:
        """Deletes one step now. Rank 0 only."""
        infos = yield from self.steps(is_complete=True)
        named = [info for info in infos if info.step == step and info.state != "deleting"]
        if not named:
            raise UsageError(f"{self.root.url} has no snapshot of step {step}")
        others = [i for i in infos if i.state == "committed" and i.step != step]
        if not others and not force:
            raise UsageError(
                f"step {step} is the only snapshot at {self.root.url}: pass force=True to delete it"
            )
        for info in named:
            yield from maintenance.delete(self.root.snapshot(info.name))

    def status(self) -> Status:
        keeper = self._keeper
        return Status(
            generation=self._generation,
            committed=self._committed,
            verified=None if keeper is None else keeper.verified,
            pending=tuple(name.step for name, _ in self._pending),
            failed_deletes={}
            if keeper is None
            else {self._url(name): describe(error) for name, error in keeper.failed.items()},
            is_superseded=keeper is not None and keeper.is_superseded,
        )

    # Parts

    def _find_keeper(self) -> Keeper:
        if self._keeper is None:
            settings = self._settings
            self._keeper = Keeper(self.root, settings.keep, settings.min_valid)
        self._keeper.generation = self._generation
        self._keeper.restored = self._restored
        return self._keeper

    @property
    def _is_keeper(self) -> bool:
        team = find_team(self._settings.group, self._settings.store)
        return team is None or team.rank == 0

    @property
    def _world_size(self) -> int:
        team = find_team(self._settings.group, self._settings.store)
        return 1 if team is None else team.world_size

    def _announce(self, kind: CallKind, work: Callable[[], Script[Any]]) -> Script[Any]:
        """Runs ``work`` on rank 0 and returns its result on all ranks, or its error."""
        team = find_team(self._settings.group, self._settings.store)
        label = Label(kind, self._label_url)

        def body(rounds: Rounds) -> Script[Any]:
            payload = b""
            if rounds.rank == 0:
                payload = msgspec.msgpack.encode((yield from work()))
            return msgspec.msgpack.decode((yield from rounds.arrive(payload)))

        return (yield from call_together(team, label, self._options, _Announcement(), body))

    def _app_state(self, app_state: AppState | None) -> AppState:
        found = self._settings.app_state if app_state is None else app_state
        if found is None:
            raise UsageError("no app state: pass app_state to CheckpointManager or to this call")
        return found

    def _url(self, name: StepName) -> str:
        return self.root.snapshot(name).location.display_url

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError(f"the manager of {self.root.url} is closed")


class _Announcement:
    """Sends rank 0's payload to all."""

    stage = Stage.JOIN

    def decide(self, round: int, payloads: Mapping[int, bytes]) -> Continue:
        return Continue(common=payloads[0], is_last=True)


def _ordered(listing: Listing) -> Iterable[StepName]:
    return sorted(listing.names, key=lambda name: (name.generation, name.step))


def _stored_metric(name: object, value: Any) -> float | str:
    """JSON has no NaN and infinities: they are stored as text."""
    try:
        number = metric_value(value)
    except (TypeError, ValueError, UsageError) as error:
        raise UsageError(f"metric {name!r} must be a number, not {value!r}") from error
    return number if math.isfinite(number) else repr(number)
