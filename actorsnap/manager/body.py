# SPDX-License-Identifier: Apache-2.0
"""The calls of a manager, as scripts for both facades.

Each rank decides alone whether a step is due (``planning.cadence``): no message is sent until one
is. Rank 0 alone looks at the root, takes the generation, verifies and deletes; it does the last two
on the runtime's loop, after the commit. Ranks learn names from it in a call of one round.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from actorsnap.errors import (
    ActorSnapError,
    IncompatibleState,
    RestoreAborted,
    RootTaken,
    StorageError,
    UsageError,
    describe,
)
from actorsnap.format.steps import StepName
from actorsnap.log import Log
from actorsnap.manager import looking
from actorsnap.manager.asking import Asking, AskSettings
from actorsnap.manager.events import EventBoard, EventKind
from actorsnap.manager.inbox import take_requests
from actorsnap.manager.keeper import Keeper, Search, StepSearch, current_timeline
from actorsnap.manager.noting import MetricNames, recall_best, stored_metadata
from actorsnap.manager.pending import PendingSaves
from actorsnap.manager.results import (
    Given,
    ManagerSettings,
    PruneReport,
    Restored,
    Status,
    StepInfo,
    check_keep,
    check_training_step,
)
from actorsnap.manager.tiers import TieredKeeper, TieredRoot, add_tier, check_tier
from actorsnap.planning.cadence import SaveAnyOf
from actorsnap.planning.keeping import (
    KeepPolicy,
)
from actorsnap.protocol.failure import Failure, Stage
from actorsnap.protocol.messages import CallKind, Label
from actorsnap.runtime import restore, taking
from actorsnap.runtime.bars import Output
from actorsnap.runtime.host import Host, Script, wait_done
from actorsnap.runtime.location import (
    AppState,
    check_flag,
    make_location,
    resolve_options,
)
from actorsnap.runtime.restore import Overwritten, RestoreReport
from actorsnap.runtime.roots import METADATA_KEY, Root, damage_of, is_damage
from actorsnap.runtime.rounds import Topic, announce
from actorsnap.runtime.save import Save
from actorsnap.runtime.source import OpenSource
from actorsnap.runtime.team import Team, find_team, label_of
from actorsnap.state.process_group import is_initialized

logger = Log(__name__)


@contextmanager
def _aborts_save() -> Iterator[None]:
    """Raises ``SnapshotAborted`` for a ``StorageError`` on rank 0, before any rank stores."""
    try:
        yield
    except StorageError as error:
        failure = Failure.caused_by(error, stage=Stage.JOIN, rank=0)
        raise failure.to_error() from error


class ManagerBody:
    """One manager; its scripts run in the thread of the caller, one at a time."""

    def __init__(self, settings: ManagerSettings) -> None:
        self._settings = settings
        self._options = resolve_options(settings.options)
        self.root = Root(make_location(settings.root, settings.storage_options), self._options)
        self.places = add_tier(self.root, settings.tiers, self._options)
        self._label_url = self.root.source.location.canonical
        self._generation: int | None = None
        self._restored: StepName | None = None
        self._seen: int | None = None
        self._saved: int | None = None
        self._pending = PendingSaves(lambda: self._label)
        self._given: tuple[int, Given] | None = None  # with the last step, until it is saved
        self._keeper: Keeper | None = None
        self._is_closed = False
        self._continues_newest = False
        self._superseded: int | None = None
        self._is_newest = False  # what was restored last
        self._found_none = False
        self._output = Output()
        self._pid = os.getpid()
        self._saving = threading.Lock()
        self._last_team: Team | None = None
        self._has_group = False
        _unclosed.add(self)
        self.events = EventBoard()
        self._topic = Topic()
        self._metric_names = MetricNames(self.root.url, settings.save, settings.keep)
        self.asking = Asking(
            settings.save,
            self._label_url,
            self.events,
            AskSettings(
                find=self._team,
                take_requests=partial(take_requests, self.root),
                notices=settings.notices,
                watch_requests_s=settings.watch_requests_s,
                options=self._options,
                look_at_metrics=self._metric_names.look_at_step,
                topic=self._topic,
            ),
        )

    # When

    def due(self, step: int, given: Given) -> str | None:
        """Returns why the step must be saved, or None. No I/O, no message."""
        if self._is_closed:
            self._check_open("maybe_save")
        step = check_training_step(step)
        self._note_unsaved(step)
        self._given = step, given
        is_first = self._seen is None
        if is_first and self._settings.save == SaveAnyOf(()):
            logger.warning(
                "%s: maybe_save saves only on request: this manager has no save=, such as "
                "every.steps(500)",
                label_of(self.root.url, self._team()),
            )
        objection = self._see(step)
        reason = "" if step == self._saved else self._settings.save.due(step, is_first=is_first)
        has_more = self.asking.enter(given.metrics, is_due=bool(reason))
        if reason or has_more:
            return reason
        if objection is not None:
            raise objection  # else by ``save``, on all ranks: the others are about to save
        return None

    def _note_unsaved(self, step: int) -> None:
        """Notes the metrics of the call before, unless its step was saved."""
        if self._given is not None:
            last, given = self._given
            if given.metrics is not None and last not in (step, self._saved):
                self._metric_names.look_at_unsaved(last, given.metrics)

    def _see(self, step: int) -> UsageError | None:
        """Takes the step for the newest, or returns why it must not be."""
        seen = self._seen
        if seen is None or step >= seen:
            self._seen = step
            return None
        return UsageError(
            f"step {step} after step {seen}: steps must not go back. Count them across all epochs. "
            "To continue from an earlier step, call restore(step) first"
        )

    def maybe_save(self, step: int, reason: str, given: Given) -> Script[tuple[str, Save | None]]:
        """Saves if ``due`` gave a ``reason``, or rank 0 asks for a save."""
        step = check_training_step(step)
        asked = yield from self.asking.serve(given.metrics, is_due=bool(reason))
        reason = ", ".join(filter(None, [reason, asked]))
        if not reason or step == self._saved:
            objection = self._see(step)
            if objection is not None:
                raise objection
            return "", None
        save = yield from self.save(step, given, reason=reason, is_async=True, method="maybe_save")
        return reason, save

    def save(
        self, step: int, given: Given, *, reason: str, is_async: bool, method: str
    ) -> Script[Save]:
        """Saves on all ranks. If async, returns when staged, else when committed and verified.

        Raises the failure of an earlier save at the end: a save that failed must not cost another.

        Args:
            method: See ``Label``.
        """
        self._check_open("save")
        step = check_training_step(step)
        objection = self._see(step)
        if step == self._saved:
            raise UsageError(
                f"step {step} is already saved by this run. Save each step once, or call "
                "restore(step) to begin again there"
            )
        if not self._saving.acquire(blocking=False):
            raise UsageError(
                f"step {step}: another thread or task saves to {self.root.url} with this manager. "
                "One at a time may call it"
            )
        try:
            begun_s = self.asking.begin_save(step, reason)
            try:
                noted = partial(self._noted, step, reason, given)
                save = yield from self._save(
                    step, is_async, method, objection, noted, given.app_state
                )
            except BaseException as error:
                self.asking.abandon_save(step, error)
                raise
            self.asking.has_begun(save, step, begun_s)
        finally:
            self._saving.release()
        if is_async:
            self._pending.raise_failure()
        else:
            yield from self.wait()
        return save

    def _noted(self, step: int, reason: str, given: Given) -> dict[str, Any]:
        best, common = self.asking.improvements.best, self._settings.metadata
        noted = stored_metadata(reason, given.metrics, common, given.metadata, best)
        if self._is_keeper:
            self._metric_names.look_at_save(step, noted[METADATA_KEY].get("metrics", {}))
        return noted

    def _save(
        self,
        step: int,
        is_async: bool,
        method: str,
        objection: UsageError | None,
        make_metadata: Callable[[], dict[str, Any]],
        app_state: AppState | None,
    ) -> Script[Save]:
        yield from self._pending.wait_until(self._settings.max_pending - 1)
        if self._generation is None:
            self._generation = yield from self._begin_run(step, method)
        name = StepName(step, self._generation)
        refusal: Exception | None = objection or (yield from self._look_for_successor())
        noted: dict[str, Any] = {}
        try:
            noted = make_metadata()
            app_state = self._app_state(app_state)
        except Exception as error:
            # The other ranks must not wait for this one.
            refusal = refusal or error
        target = self.places.places[0].snapshot(name).location
        call = taking.TakeCall(
            path=target.url,
            app_state={} if app_state is None else app_state,
            replicated=self._settings.replicated,
            overwrite=False,
            resume=False,
            step=step,
            # A caller that gets an error gets no ``PendingSnapshot`` to guard its optimizers with.
            stage=self._settings.stage if is_async and self._pending.failure is None else "eager",
            metadata=noted,
            storage_options=target.storage_options,
            options=self._options,
            group=self._settings.group,
            store=self._settings.store,
            refusal=refusal,
            progress=self._settings.progress,
            output=self._output,
            # Ranks that stage at different speeds raise a failure together, in a later call.
            returns_failed=is_async and self._world_size > 1,
            topic=self._topic.name,
            method=method,
        )
        before, self._saved = self._saved, step
        try:
            save = yield from taking.take(call, is_async=is_async)
        except BaseException:
            self._saved = before if objection is not None else None
            if self._keeper is not None:
                self._keeper.make_room()
            raise
        self._pending.add(name, save)
        _saves[save] = self._label_url
        self._given = None
        if self._is_keeper:
            self._find_keeper().watch(name, save)
        return save

    def request(self, reason: str) -> None:
        self._check_open("request")
        self.asking.request(reason)

    def restart_steps(self) -> None:
        """Lets the next step be any. The next save begins a generation that continues what was
        restored, or else the newest snapshot at the root.
        """
        self._seen = self._saved = None
        if self._generation is not None:
            self._superseded, self._generation, self._restored = self._generation, None, None
        self._continues_newest = True

    def _begin_run(self, step: int, method: str) -> Script[int]:
        restored_from = self._restored
        is_continuing = restored_from is None and self._continues_newest
        if is_continuing:
            yield from self._pending.wait_until(0)

        places = self.places

        def claim() -> Script[Any]:
            if is_continuing:
                # Its passes must not take the new generation for another manager's.
                yield from self.finish_keeping()

            async def perform(opened: OpenSource) -> tuple[int, bytes]:
                parent = restored_from
                if is_continuing:
                    parent = await self._find_newest(opened)
                generation = await places.claim_generation(
                    opened, restored_from=parent, world_size=self._world_size
                )
                if not isinstance(places, TieredRoot):
                    return generation, b""
                return generation, places.tier_record(generation)

            with _aborts_save():
                return (yield from self.root.source.perform("begin a run", perform))

        label = Label(CallKind.BEGIN_RUN, self._label_url, step, method=method)
        generation, record = yield from self._announce(label, claim)
        if record:
            refusal = yield from check_tier(places, generation, record, self._rank)
            yield from self._announce(label, _nothing, refusal)
        return int(generation)

    async def _find_newest(self, opened: OpenSource) -> StepName | None:
        """Returns the newest committed name.

        Raises:
            RootTaken: A later manager has begun a run since this one's last generation.
        """
        last = self._superseded
        if last is not None and await self.root.is_superseded(opened, last):
            raise RootTaken(url=self.root.url, generation=last)
        listing = await self.places.list(opened)
        commits = await self.places.read_commits(opened, listing.names)
        return [None, *current_timeline(listing, commits)][-1]

    def _look_for_successor(self) -> Script[ActorSnapError | None]:
        """Returns on rank 0 why nothing may be saved."""
        if not self._is_keeper:
            return None
        generation = self._generation
        assert generation is not None
        keeper = self._find_keeper()
        try:
            with _aborts_save():
                yield lambda _: keeper.look_for_successor(generation)
        except ActorSnapError as error:
            return error
        if not keeper.is_superseded:
            return None
        self.events.post(EventKind.FENCED, detail=self.root.url)
        return RootTaken(url=self.root.url, generation=generation)

    # The end

    def wait(self) -> Script[None]:
        """Waits until pending saves are committed and, on rank 0, verified.

        Raises:
            ActorSnapError: The first failure. The others are logged.
        """
        yield from self._pending.wait()
        if self._keeper is not None:
            keeper = self._keeper
            yield lambda _: keeper.finish_verifying()
            keeper.raise_damage()

    def close(
        self, *, error: BaseException | None = None, timeout_s: float = math.inf
    ) -> Script[None]:
        """Waits for pending saves, and for deletions at most ``timeout_s``.

        Args:
            error: Ends the program: nothing is saved at the end, and failed saves are only logged.
        """
        is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
        if not (is_number and timeout_s >= 0):
            raise UsageError(f"timeout_s must be a number of at least 0, not {timeout_s!r}")
        if self._is_closed or self.is_forked:  # the saves are its parent's
            return
        try:
            try:
                asked = yield from self.asking.close(has_failed=error is not None)
                if error is None:
                    yield from self._save_at_end(asked)
            finally:
                self._topic.leave(self._ending(error))
            yield from self.wait()
        except ActorSnapError as failure:
            if error is None:
                raise
            # A background failure is logged as an error when it happens.
            logger.debug("%s: %s", self._label, describe(failure))
        finally:
            self._is_closed = True
            _unclosed.discard(self)
            if self._is_unsaved or self._seen is None:
                yield lambda _: self.asking.report_unserved()
            if self._keeper is not None:
                keeper = self._keeper
                yield lambda _: keeper.finish(timeout_s)
            yield self._close_places
            self.events.close()

    def _ending(self, error: BaseException | None) -> str:
        """Returns what this rank has done, for the others."""
        where = "before its first step" if self._seen is None else f"after step {self._seen}"
        if error is None:
            return f"closed its manager {where}"
        return f"left its manager with an error {where}: {describe(error)}"

    def report_unclosed(self) -> None:
        """Logs, at exit, the saves that only ``close`` would have made."""
        lost = [*self.asking.waiting]
        if self._is_unsaved:
            lost += filter(None, [self._settings.save.at_end()])
        if lost and not self.is_forked:
            logger.warning(
                "%s: the manager was not closed, so these saves were not made: %s. Use it in a "
                "with block, or call close() at the end",
                self._label,
                ", ".join(lost),
            )

    async def _close_places(self, _: Host) -> None:
        for place in self.places.places:
            await place.source.close()

    def _save_at_end(self, asked: str) -> Script[None]:
        """Saves the last step if a policy or a request asks for it."""
        calls = self.asking.calls
        at_end = "" if calls.is_late else self._settings.save.at_end()
        reason = ", ".join(filter(None, [at_end, asked]))
        if (self._is_unsaved and not reason and not calls.is_late) or calls.agreed:
            asked = yield from self.asking.agree_at_end()
            reason = ", ".join(filter(None, [reason, asked]))
        if reason and self._seen is not None and self._is_unsaved:
            step, given = self._given or (self._seen, Given())
            given = given if step == self._seen else Given()
            yield from self.save(self._seen, given, reason=reason, is_async=False, method="close")

    @property
    def _is_unsaved(self) -> bool:
        """Whether the last step is not saved."""
        return self._seen is not None and self._seen != self._saved

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
        self._check_open("restore_latest")
        check_flag("strict", strict)
        check_flag("allow_fresh", allow_fresh)
        state, refusal = self._try_app_state(app_state)
        # A partial restore of a damaged snapshot would leave its values in the app state.
        level = valid if strict else "full"
        yield from self._pending.wait()
        yield from self._wait_for_earlier()
        search = Search(self.places, level, allow_fresh)
        return (yield from self._search(CallKind.RESTORE_LATEST, search, state, refusal, strict))

    def _wait_for_earlier(self) -> Script[None]:
        """Waits for saves of managers of this process that were not closed, as in a notebook."""
        host = Host.get()  # another one in a fork
        earlier = [s for s, url in _saves.items() if url == self._label_url and s.host is host]
        for save in earlier:
            yield partial(_wait_done, save)

    def restore(self, step: int, app_state: AppState | None, *, strict: bool) -> Script[Restored]:
        """Restores a step of the current timeline; later steps are abandoned by the next save."""
        self._check_open("restore")
        step = check_training_step(step)
        state, refusal = self._try_app_state(app_state)
        yield from self._pending.wait()

        search = StepSearch(self.places, lambda: looking.to_restore(self.places, step))
        found = yield from self._search(CallKind.RESTORE_STEP, search, state, refusal, strict)
        assert found is not None
        return found

    def _search(
        self,
        kind: CallKind,
        search: Search,
        state: AppState,
        refusal: Exception | None,
        strict: bool,
    ) -> Script[Restored | None]:
        """Restores what rank 0 finds, on all ranks; after a failure, what it finds then."""
        with Overwritten() as overwritten:
            found = yield from self._search_by(kind, search, state, refusal, strict, overwritten)
        if found is None and overwritten.text:
            logger.warning(
                "%s: no intact snapshot was found; a damaged one was tried, so %s: make them again "
                "before you start from nothing",
                *(self._label, overwritten.text),
            )
        return found

    def _search_by(
        self,
        kind: CallKind,
        search: Search,
        state: AppState,
        refusal: Exception | None,
        strict: bool,
        overwritten: Overwritten,
    ) -> Script[Restored | None]:
        failure: Exception | None = None
        label = Label(kind, self._label_url)
        is_latest = kind is CallKind.RESTORE_LATEST
        while True:

            def find(failure: Exception | None = failure) -> Script[Any]:
                yield from self.finish_keeping()
                return (yield from search.following(failure))

            found = yield from self._announce(label, find, refusal)
            name = StepName.parse(found["name"])
            if name is None:
                if found["is_empty"]:
                    yield from self._announce(label, _nothing, (yield from self._see_others()))
                    if self._settings.save == SaveAnyOf(()) and self._is_keeper:
                        self.root.warn_once(
                            f"{self.root.url} has no committed step, so nothing was restored: "
                            "check the path"
                        )
                self._found_none = True
                return None
            skipped = tuple((url, why) for url, why in found["skipped"])
            places = self.places.places
            place = places[max(found["place"], -len(places))]
            try:
                report = yield from self._restore(
                    place, name, state, strict, overwritten, is_latest=is_latest
                )
            except Exception as error:
                if isinstance(error, IncompatibleState):
                    call = "restore_latest" if is_latest else "restore"
                    _note_arguments(error, place.url_of(name), call)
                if is_damage(error):
                    place.damaged[name] = damage_of(error)
                # All ranks have the same error, and no other snapshot fits better.
                if found["is_last"] or isinstance(error, IncompatibleState):
                    raise
                # Rank 0 decides whether another copy or an older step may help.
                failure = error
                continue
            place.damaged.pop(name, None)
            self._is_newest = is_latest
            return self._continue_from(place, name, report, skipped)

    def _see_others(self) -> Script[Exception | None]:
        """Returns why the ranks must not begin from nothing, although rank 0 has found nothing."""
        root = self.root
        # Objects are the same for all ranks: no request.
        if not self._rank or not self._label_url.startswith("/"):
            return None

        async def look(opened: OpenSource) -> bool:
            listing = await root.look(opened)
            return bool(await root.read_commits(opened, listing.names))

        try:
            if not (yield from root.source.perform("find the latest", look)):
                return None
        except ActorSnapError as error:
            return error
        return RestoreAborted(
            reason=f"this rank sees snapshots at {root.url}, and rank 0 does not: use a path on "
            "storage that all ranks share",
            rank=self._rank,
            stage=str(Stage.JOIN),
        )

    def finish_keeping(self) -> Script[None]:
        """Waits for deletions, which must not hit the snapshot to restore."""
        if self._keeper is not None:
            keeper = self._keeper
            yield lambda _: keeper.settle()

    def _restore(
        self,
        place: Root,
        name: StepName,
        state: AppState,
        strict: bool,
        overwritten: Overwritten,
        *,
        is_latest: bool,
    ) -> Script[RestoreReport]:
        settings = self._settings
        call = restore.RestoreCall(
            app_state=state,
            strict=strict,
            group=settings.group,
            store=settings.store,
            progress=settings.progress,
            # A tier may be lost on one rank's machine.
            is_found=place is self.places.places[-1],
            # An earlier step may be restored in part, to look at it.
            warns_of_keys=is_latest and self._is_keeper and settings.save != SaveAnyOf(()),
        )
        report = yield from restore.try_restore(place.snapshot(name), call, overwritten)
        if self.asking.improvements and self._is_keeper:
            yield from recall_best(place, name, self.asking.improvements)
        return report

    def _continue_from(
        self,
        place: Root,
        name: StepName,
        report: RestoreReport,
        skipped: tuple[tuple[str, str], ...],
    ) -> Restored:
        url = place.url_of(name)
        for other, why in skipped:
            logger.warning("%s: restored %s; %s is damaged: %s", self._label, url, other, why)
        self._generation, self._restored = None, name
        self._seen = self._saved = name.step
        if self._keeper is not None:
            self._keeper.end_run()
        return Restored(step=name.step, url=url, report=report, skipped=skipped)

    # Looking

    def steps(self, *, is_complete: bool) -> Script[list[StepInfo]]:
        """Returns committed steps of the timeline, oldest first; if complete, all others too."""
        found = yield from looking.steps(self.places, is_complete=is_complete)
        self._warn_if_none(found)
        return found

    def latest(self) -> Script[StepInfo | None]:
        found = yield from looking.latest(self.places)
        self._warn_if_none(found)
        return found

    def latest_valid(self, level: str) -> Script[StepInfo | None]:
        return (yield from looking.latest_valid(self.places, level))

    def best(self, metric: str, mode: str) -> Script[StepInfo | None]:
        found, infos = yield from looking.best(self.places, metric, mode)
        if found is None and looking.metrics_of(infos):
            logger.warning("%s: %s", self.root.url, looking.missing_metric(infos, metric))
        self._warn_if_none(infos)
        return found

    def _warn_if_none(self, found: object) -> None:
        """Warns if a manager that only looks at a root finds nothing there."""
        if not found and self._settings.app_state is None and self._seen is None:
            self.root.warn_once(f"{self.root.url} has no committed step: check the path")

    # Keeping

    def prune(self, policy: KeepPolicy | None, *, dry_run: bool) -> Script[PruneReport]:
        """Runs one pass now. Only rank 0 deletes."""
        if policy is not None:
            check_keep(policy)
        if not dry_run:
            self._check_deletes("prune")
        keeper = self._find_keeper()
        verdicts, result = yield lambda _: keeper.run_pass(policy, dry_run=dry_run)
        return PruneReport(
            verdicts=tuple(verdicts),
            deleted=tuple(self.root.url_of(name) for name in result.deleted),
            failed={
                self.root.url_of(name): describe(error) for name, error in result.failed.items()
            },
        )

    def delete(self, step: int | StepName, *, force: bool) -> Script[None]:
        """Deletes one snapshot now."""
        self._check_deletes("delete")
        yield from self.finish_keeping()  # a save that is being verified would count as damaged
        keeper = self._find_keeper()
        yield lambda _: keeper.delete(step, force=force)

    def record(self, step: int | StepName, metrics: Mapping[str, Any]) -> Script[None]:
        """Adds metrics to a snapshot, also to one that is still being saved."""
        pending = [name for name in self._pending.names if step in (name, name.step)]
        yield from looking.record(
            self.places, pending[-1] if pending else step, metrics, is_saved=not pending
        )

    def status(self) -> Status:
        keeper = self._keeper
        return Status(
            generation=self._generation,
            committed=self._pending.committed,
            verified=None if keeper is None else keeper.verified,
            pending=tuple(name.step for name in self._pending.names),
            failed_deletes={} if keeper is None else _reasons(keeper.failed_deletes()),
            num_deletes_left=0 if keeper is None else keeper.num_left,
            is_superseded=keeper is not None and keeper.is_superseded,
            draining=() if keeper is None else tuple(name.step for name in keeper.waiting),
            failed_drains={} if keeper is None else _reasons(keeper.failed_drains),
            due_in_s=self.asking.due_in_s,
            requests=self.asking.waiting,
            last_agreement=self.asking.outcome,
        )

    # Parts

    def _find_keeper(self) -> Keeper:
        if self._keeper is None:
            settings = self._settings
            kept = settings.keep, settings.min_valid, self.events
            if isinstance(self.places, TieredRoot):
                self._keeper = TieredKeeper(self.places, *kept)
            else:
                self._keeper = Keeper(self.root, *kept)
        self._keeper.generation = self._generation
        self._keeper.restored = self._restored
        self._keeper.is_newest = self._is_newest
        self._keeper.found_none = self._found_none
        return self._keeper

    def _team(self) -> Team | None:
        had_group = self._has_group and self._last_team is not None
        self._has_group = self._settings.store is None and is_initialized()
        if had_group and not (self._has_group or self._is_closed):
            logger.warning(
                "%s: destroy_process_group() was called before the manager was closed: call it "
                "after the with block, or saves fail",
                self._label,
            )
        self._last_team = find_team(self._settings.group, self._settings.store)
        return self._last_team

    @property
    def _label(self) -> str:
        # Makes no new team: the store may be gone.
        return label_of(self.root.url, self._last_team)

    @property
    def _is_keeper(self) -> bool:
        return self._rank == 0

    @property
    def _rank(self) -> int:
        team = self._team()
        return 0 if team is None else team.rank

    @property
    def _world_size(self) -> int:
        team = self._team()
        return 1 if team is None else team.world_size

    def _check_deletes(self, call: str) -> None:
        if not self._is_keeper:
            raise UsageError(f"only rank 0 deletes: call {call}() there alone")

    def _announce(
        self,
        label: Label,
        work: Callable[[], Script[Any]],
        refusal: Exception | None = None,
    ) -> Script[Any]:
        team, topic = self._team(), self._topic
        return (yield from announce(team, label, self._options, work, refusal, topic=topic))

    def _app_state(self, app_state: AppState | None) -> AppState:
        found = self._settings.app_state if app_state is None else app_state
        if found is None:
            raise UsageError("no app state: pass app_state to CheckpointManager or to this call")
        return found

    def _try_app_state(self, app_state: AppState | None) -> tuple[AppState, Exception | None]:
        """Also starts the watchers: a restore may take long, and is the first call of most jobs."""
        try:
            self.asking.watch()
            return self._app_state(app_state), None
        except Exception as error:
            return {}, error

    def _check_open(self, call: str) -> None:
        if self._is_closed:
            raise UsageError(
                f"the manager of {self.root.url} is closed: call {call} inside the `with` block, "
                "or make a new manager"
            )

    @property
    def is_forked(self) -> bool:
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raises UsageError in a fork of the manager's process."""
        if self.is_forked:
            raise UsageError(
                f"the manager of {self.root.url} belongs to process {self._pid}; this one was "
                "forked from. Save only there; to look at the root here, make another manager"
            )


_unclosed: weakref.WeakSet[ManagerBody] = weakref.WeakSet()

_saves: weakref.WeakKeyDictionary[Save, str] = weakref.WeakKeyDictionary()
"""Saves of this process, with their roots."""


@atexit.register
def _report_unclosed() -> None:
    for body in [*_unclosed]:
        body.report_unclosed()


async def _wait_done(save: Save, _: Host) -> None:
    await wait_done(save.finished)


def _nothing() -> Script[None]:
    yield from ()


def _note_arguments(error: IncompatibleState, url: str, call: str) -> None:
    lacks = ("rename=", "cast=", "keys=")
    if restore.note_arguments(error, url, f"A manager's {call}()", lacks):
        error.add_note(
            "The next save then begins a new run, which abandons the snapshots at this root."
        )


def _reasons(errors: Mapping[str, Exception]) -> dict[str, str]:
    return {url: describe(error) for url, error in errors.items()}
