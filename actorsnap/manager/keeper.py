# SPDX-License-Identifier: Apache-2.0
"""Rank 0's part of a manager: finds what can be restored, verifies saves, deletes what goes."""

from __future__ import annotations

import math
import re
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import anyio

from actorsnap.errors import (
    ActorSnapError,
    FormatError,
    NotASnapshot,
    NoValidSnapshot,
    RestoreAborted,
    RootTaken,
    StorageError,
    UsageError,
    describe,
)
from actorsnap.format.manifest import Commit
from actorsnap.format.steps import DeleteIntent, StepName
from actorsnap.log import Log
from actorsnap.manager.events import EventBoard, EventKind
from actorsnap.planning.keeping import (
    KeepPolicy,
    StoredStep,
    Verdict,
    current_generation,
    judge,
    leftovers,
    timeline,
    unmeasured,
    unread_run,
)
from actorsnap.planning.marks import Facts
from actorsnap.runtime import verify as verification
from actorsnap.runtime.deletion import Deleter, Deletions
from actorsnap.runtime.host import Call, Host, Script, wait_done
from actorsnap.runtime.roots import Listing, Root, damage_of, is_damage, stored_step
from actorsnap.runtime.save import Save
from actorsnap.runtime.script import run_on_loop
from actorsnap.runtime.source import OpenSource
from actorsnap.storage.wire import is_unreachable
from actorsnap.wording import joined

logger = Log(__name__)

Commits: TypeAlias = Mapping[StepName, Commit | FormatError | StorageError]
"""Commit objects, or why they cannot be read."""

MAX_PASS_S = 120.0
"""Time limit on the deletions of one pass, in seconds. The next pass continues."""


_MAX_NAMED = 4
"""Most steps that a log line names."""

_CHECKPOINT_NAME = re.compile(r"(checkpoint|ckpt|epoch|iter|step)\D*(\d+).*", re.IGNORECASE)

_BEFORE_A_SAVE = "if you stop this job before its next save"

_LOST_COMMIT = f"its commit object is gone: `actorsnap recover` writes it again, {_BEFORE_A_SAVE}"

_RECOVERS = f"adds it to the run {_BEFORE_A_SAVE}"


class Search:
    """Finds the newest whole snapshot of the current timeline, then older ones. On rank 0.

    A snapshot that is damaged at the nearest place may be whole at the next.
    """

    def __init__(self, root: Root, level: str, allow_fresh: bool) -> None:
        self._root = root
        self._level = level
        self._allow_fresh = allow_fresh
        self._listing: Listing | None = None
        self._current: StepName | None = None
        self._at = 0  # index of the place
        self._unfinished: set[StepName] = set()
        self._damaged: set[StepName] = set()
        self._skipped: dict[str, str] = {}

    def following(self, failure: Exception | None) -> Script[Any]:
        """Returns the next candidate. ``failure`` is the error of the previous one.

        Raises:
            NoValidSnapshot: There are snapshots, but none is whole.
            Exception: ``failure``, if an older snapshot would not help.
        """
        if failure is not None:
            if is_damage(failure):
                self._skip(damage_of(failure))
            # A rank that does not see it may have looked after its deletion.
            elif not isinstance(failure, RestoreAborted) or not (
                yield from self._is_damaged("quick")
            ):
                raise failure
        if self._listing is None:
            self._listing = yield from self._root.source.perform("find the latest", self._root.look)
        while True:
            # A fresh start that committed nothing abandons nothing.
            names = {*self._listing.names} - self._unfinished
            listing = self._listing = yield from self._read_back(self._listing, names)
            candidates = [n for n in current_timeline(listing, names) if n not in self._damaged]
            if not candidates:
                break
            self._current = candidates[-1]
            if not (yield from self._is_damaged()):
                if self._unfinished:
                    yield from self._root.source.perform(
                        "find the latest", self._look_at_unfinished
                    )
                return self._found()
        if not self._allow_fresh:
            yield from self._check_fresh([name for name in names if name not in self._damaged])
        if not self._listing.names:
            yield from self._root.source.perform("find the latest", _warn_of_other_checkpoints)
        return {"name": "", "is_empty": not self._listing.names, "skipped": self._pairs}

    def _found(self, *, is_last: bool = False) -> dict[str, Any]:
        # Counted from the end: another rank may know the root only, which is the last.
        place = self._at - len(self._root.places)
        found = {"name": str(self._current), "place": place, "is_last": is_last}
        return {**found, "skipped": self._pairs}

    def _is_damaged(self, level: str = "") -> Script[bool]:
        """Verifies the current candidate, and skips it unless it is whole. Empty: at own level."""
        assert self._current is not None
        place = self._root.places[self._at]
        level = level or self._level
        problems = yield from find_damage(place, self._current, level, is_anew=True)
        if problems and isinstance(problems[0], NotASnapshot):
            self._skip(None)
        elif problems:
            place.damaged[self._current] = _text_of(problems)
            self._skip(_text_of(problems))
        return bool(problems)

    def _skip(self, damage: str | None) -> None:
        """Moves to the next place, then to an older snapshot. None: it is not at this place."""
        name, places = self._current, self._root.places
        assert name is not None
        if damage is not None:
            self._skipped[places[self._at].url_of(name)] = damage
        self._at += 1
        if self._at == len(places):
            self._at = 0
            is_damaged = any(place.url_of(name) in self._skipped for place in places)
            (self._damaged if is_damaged else self._unfinished).add(name)

    def _read_back(self, listing: Listing, names: Collection[StepName]) -> Script[Listing]:
        """Reads the records of runs, from the newest on, until one has a candidate."""
        whole = {*names} - self._damaged
        while True:
            known = listing.records.generations
            generation = unread_run(names, known, listing.parents, wanted=whole)
            if generation is None:
                return listing
            listing = yield from self._root.source.perform(
                "find the latest",
                partial(self._root.read_run, listing=listing, generation=generation),
            )

    def _check_fresh(self, abandoned: list[StepName]) -> Script[None]:
        """Raises NoValidSnapshot if anything was committed."""
        if not self._skipped and abandoned:
            stored = yield from self._root.source.perform(
                "find the latest", lambda opened: self._root.read_commits(opened, abandoned)
            )
            why = "abandoned: the run continued another snapshot"
            self._skipped = {self._root.url_of(name): why for name in stored}
        if not self._skipped and self._unfinished:
            yield from self._root.source.perform("find the latest", self._look_at_unfinished)
        if self._skipped:
            raise NoValidSnapshot(url=self._root.url, skipped=self._pairs)

    async def _look_at_unfinished(self, opened: OpenSource) -> None:
        """Skips those that a run continued: they were committed. Warns of other complete ones."""
        listing = await self._root.list(opened)
        continued = {*listing.parents.values()}
        for place in self._root.places:
            async with place.source.opened(opened.host, "find the latest") as there:
                for name in self._unfinished:
                    if not await place.has_complete(there, name):
                        continue
                    if name in continued and name not in listing.records.intents:
                        self._skipped[place.url_of(name)] = _LOST_COMMIT
                    else:
                        await place.warn_of_complete(there, name, _RECOVERS)

    @property
    def _pairs(self) -> list[tuple[str, str]]:
        return [*self._skipped.items()]


async def _warn_of_other_checkpoints(opened: OpenSource) -> None:
    """Logs if the root of a new run is a checkpoint itself, or a folder of others."""
    url = opened.source.location.display_url
    try:
        await opened.reader.commit()
        found = url
    except ActorSnapError:
        names = await opened.storage.list_folders()
        numbers = {m[0]: int(m[2]) for m in map(_CHECKPOINT_NAME.fullmatch, names) if m}
        if not numbers:
            return
        found = f"{url}/{max(numbers, key=lambda name: numbers[name])}"
    logger.warning(
        "%s: a new run begins, although a checkpoint is at %s. To continue from it, call "
        "Snapshot(%r).restore(app_state) if restore_latest() returns None",
        *(url, found, found),
    )


class StepSearch(Search):
    """Finds the nearest whole copy of one snapshot. On rank 0.

    Does not check the root's own copy: restoring it reports the damage.
    """

    def __init__(self, root: Root, find: Callable[[], Script[StepName]]) -> None:
        super().__init__(root, "quick", allow_fresh=False)
        self._find = find

    def following(self, failure: Exception | None) -> Script[Any]:
        """Returns the nearest copy. ``failure`` is the error of the previous one.

        Raises:
            Exception: ``failure``, if another copy would not help.
        """
        last = len(self._root.places) - 1
        if failure is not None:
            if self._at == last or not is_damage(failure):
                raise failure
            self._skip(damage_of(failure))
        if self._current is None:
            self._current = yield from self._find()
        while self._at < last and (yield from self._is_damaged()):
            pass
        return self._found(is_last=self._at == last)


class Keeper:
    """Verifies what was saved, then deletes what the policy gives up. On rank 0.

    Attributes:
        level: ``"quick"`` or ``"full"``: the check of the steps that count as verified.
        num_left: Number of steps that a pass had no time to delete, although no policy keeps them.
        failed: Those that it could not delete, with the reasons.
        failed_pass: Why the last pass deleted nothing.
        waiting: Snapshots that are at a tier, but not at the root yet, oldest first.
        failed_drains: Reasons by URL; the next drains try again.
    """

    def __init__(
        self,
        root: Root,
        policy: KeepPolicy,
        min_valid: int,
        events: EventBoard | None = None,
        *,
        level: str = "quick",
    ) -> None:
        self._events = events or EventBoard()
        self.level = level
        self._root = root
        self._policy = policy
        self._min_valid = min_valid
        self.generation: int | None = None
        self.restored: StepName | None = None
        self.is_newest = False  # ``restored`` was the newest step
        self.found_none = False  # the last restore
        self.is_superseded = False
        self.verified: int | None = None
        self.num_left = 0
        self.failed: dict[StepName, Exception] = {}
        self.failed_pass: Exception | None = None
        self.waiting: list[StepName] = []
        self.failed_drains: dict[str, Exception] = {}
        self._in_flight: set[StepName] = set()
        self._valid: set[StepName] = set()
        self._unreported: list[ActorSnapError] = []
        self._verifying: set[Call[None]] = set()
        self._passes: set[Call[None]] = set()
        self._lock: anyio.Lock | None = None
        self._saved_to = root
        self._held: Collection[StepName] = ()  # at a tier too
        self._reported: set[str] = set()  # metrics
        self._looked_back: int | None = None  # the generation

    def watch(self, name: StepName, save: Save) -> None:
        """Verifies the save after its commit, and runs a pass."""
        self._in_flight.add(name)
        call = Host.get().submit(self._verify(name, save))
        self._verifying.add(call)
        call.future.add_done_callback(lambda _: self._verifying.discard(call))

    @property
    def damaged(self) -> Mapping[StepName, str]:
        """Committed steps that were found damaged, with the reasons."""
        return self._root.damaged

    def end_run(self) -> None:
        """After a restore: the next save begins another run, which supersedes all others."""
        self.generation = None
        self.is_superseded = False
        self._unreported = []

    async def look_for_successor(self, generation: int) -> None:
        """Looks for a later run.

        Raises:
            ActorSnapError: The root could not be looked at.
        """
        if not self.is_superseded:
            async with self._root.source.opened(Host.get(), "look for a later run") as opened:
                look = self._root.is_superseded
                self.is_superseded = await opened.errands.run(look, opened, generation)

    def make_room(self) -> None:
        """After a save that failed at once, from any thread: a pass may make room for the next."""

    async def _verify(self, name: StepName, save: Save) -> None:
        await wait_done(save.finished)
        self._in_flight.discard(name)
        if save.finished.exception() is not None:
            return
        host = Host.get()
        try:
            problems = await run_on_loop(host, find_damage(self._saved_to, name, "quick"))
        except Exception as error:
            logger.warning("%s: not verified: %s", self._saved_to.url_of(name), describe(error))
            return
        if problems:
            why = self._saved_to.damaged[name] = _text_of(problems)
            problem = problems[0]
            if isinstance(problem, FormatError):
                problem.name_snapshot(self._saved_to.url_of(name))
            self._unreported.append(problem)
            logger.error("%s is committed, but damaged: %s", name, why)
            self._events.post(EventKind.FAILED, name.step, why)
            return
        self.verified = name.step
        self._events.post(EventKind.VERIFIED, name.step)
        await self._keep_new(name)

    async def _keep_new(self, name: StepName) -> None:
        """After its commit and verification."""
        host = Host.get()
        self._valid.add(name)
        await host.run_blocking(self._root.link_latest, name)
        call = host.submit(self._pass_quietly())
        self._passes.add(call)
        call.future.add_done_callback(lambda _: self._passes.discard(call))

    async def finish_verifying(self) -> None:
        for call in [*self._verifying]:
            await wait_done(call.future)

    def raise_damage(self) -> None:
        if self._unreported:
            problem, self._unreported = self._unreported[0], []
            raise problem

    async def settle(self) -> None:
        """Ends all deletions that have begun: a restore must not lose what it reads."""
        await self.finish(math.inf)

    async def finish(self, timeout_s: float) -> None:
        """Waits for passes that have begun; the next manager finishes deletions."""
        with anyio.move_on_after(timeout_s):
            await self.finish_verifying()  # which begins passes
            for call in [*self._passes]:
                await wait_done(call.future)
        for call in [*self._passes]:
            call.cancel()

    async def _pass_quietly(self) -> None:
        try:
            async with self._opened("prune") as opened:
                await self._run_pass(opened, self._policy, dry_run=False)
            self.failed_pass = None
        except Exception as error:
            self.failed_pass = error
            logger.warning("%s: nothing was deleted: %s", self._root.url, describe(error))
            self._events.post(EventKind.DELETE_FAILED, detail=describe(error))

    async def run_pass(
        self, policy: KeepPolicy | None, *, dry_run: bool
    ) -> tuple[list[Verdict], Deletions]:
        """Judges the steps of the timeline, and deletes what goes."""
        async with self._opened("prune") as opened:
            return await self._run_pass(opened, policy or self._policy, dry_run)

    @asynccontextmanager
    async def _opened(self, op: str) -> AsyncIterator[OpenSource]:
        """Opens the root for one pass at a time."""
        if self._lock is None:
            self._lock = anyio.Lock()
        async with self._lock, self._root.source.opened(Host.get(), op) as opened:
            yield opened

    async def _run_pass(
        self, opened: OpenSource, policy: KeepPolicy, dry_run: bool
    ) -> tuple[list[Verdict], Deletions]:
        listing = await self._root.list(opened)
        self._check_is_root(listing)
        failed: dict[StepName, StorageError] = {}  # not judged: these stay
        commits = await self._root.read_commits(opened, listing.names, failed=failed)
        facts = await self._root.read_facts(opened, listing)
        run = current_timeline(listing, {*commits, *failed})
        steps = [
            stored_step(name, commit, facts.get(name))
            for name in run
            if isinstance(commit := commits.get(name), Commit) and name not in self.damaged
        ]
        steps = await self._verify_newest(steps, failed)
        held = dict.fromkeys(self._held, "still at the tier")
        verdicts = judge(
            steps,
            policy,
            protected={**held, **self._protected(listing, facts)},
            valid=self._valid,
            min_valid=self._min_valid,
        )
        verdicts = self._with_others(verdicts, run, commits, failed)
        doomed = {v.name: _reason(policy) for v in verdicts if not v.keeps}
        result = Deletions(failed={**failed})
        if dry_run:
            result.deleted = [*doomed]
            return verdicts, result
        generation = self.generation
        if generation is None or self._looks_superseded(listing):
            return verdicts, result
        self._report_abandoned(listing, commits, generation)
        self._report_unmeasured(policy, verdicts, steps)
        rests = leftovers(
            {*listing.names}.difference(self._in_flight, self._held),
            listing.records.intents,
            committed={name for name, each in commits.items() if isinstance(each, Commit)},
            damaged={n for n, each in commits.items() if not isinstance(each, Commit)} | {*failed},
            generation=generation,
        ) - {*doomed}
        intents = {
            name: make_intent(commits[name], generation, reason) for name, reason in doomed.items()
        }
        # Marks of what is at a tier only are no rests.
        listing = replace(listing, names={*listing.names, *self._held})
        await self._delete(opened, listing, generation, intents, rests, result)
        return verdicts, result

    def _report_abandoned(
        self, listing: Listing, commits: Mapping[StepName, Commit | FormatError], generation: int
    ) -> None:
        """Warns, after the first commit of a run, of the steps that it does not continue."""
        if self._looked_back == generation or generation not in listing.parents:
            return
        self._looked_back = generation
        parent = listing.parents[generation]
        if parent is not None:
            later = [
                str(name.step)
                for name, commit in commits.items()
                if isinstance(commit, Commit) and name not in self.damaged
                if name.generation == parent.generation and name.step > parent.step
            ]
            if later and self.is_newest:
                was, it_is, it = ("was", "it is", "it") if len(later) == 1 else _PLURAL
                logger.warning(
                    "%s: %s %s committed after this run had restored step %d, so %s abandoned: "
                    "restore_latest() does not find %s. Close a manager before you begin the next "
                    "one",
                    *(self._root.url, _some_steps(later), was, parent.step, it_is, it),
                )
            return
        earlier = [
            name
            for name, commit in commits.items()
            if isinstance(commit, Commit) and name.generation < generation
        ]
        steps = [str(name.step) for name in current_timeline(listing, earlier)]
        if steps and self.found_none:
            logger.warning(
                "%s: this run began from nothing, because restore_latest() found no intact step, "
                "so it abandons %s. If another job has saved here since, give each its own root",
                *(self._root.url, _some_steps(steps)),
            )
        elif steps:
            logger.warning(
                "%s: this run began without restore_latest(), so it abandons what was saved "
                "before: %s. To continue that run, call restore_latest() first, with await in "
                "async code",
                *(self._root.url, _some_steps(steps)),
            )

    def _report_unmeasured(
        self, policy: KeepPolicy, verdicts: Sequence[Verdict], steps: Sequence[StoredStep]
    ) -> None:
        """Warns once of each metric that many steps lack."""
        known = sorted({name for step in steps for name in step.metrics})
        there_are = f" (there are: {', '.join(known)})" if known else ""
        for metric, count in unmeasured(policy, verdicts).items():
            if metric not in self._reported:
                self._reported.add(metric)
                logger.warning(
                    "%s: %d saved steps lack the metric %r%s, so keep.best deletes none of them: "
                    "pass it to maybe_save at a step that is saved, or use manager.record",
                    *(self._root.url, count, metric),
                    "" if metric in known else there_are,
                )

    def _with_others(
        self,
        verdicts: Sequence[Verdict],
        run: Sequence[StepName],
        commits: Mapping[StepName, Commit | FormatError],
        failed: Mapping[StepName, StorageError],
    ) -> list[Verdict]:
        """Adds the damaged and unreadable steps of the run: they stay, no policy judges them."""
        found = {verdict.name: verdict for verdict in verdicts}
        for name in run:
            if name in failed:
                found[name] = Verdict(name, True, (f"not readable: {failed[name]}",))
            elif name not in found:
                why = self.damaged.get(name) or commits[name]
                found[name] = Verdict(name, True, (f"damaged: {why}",))
        return [found[name] for name in run]

    def _protected(self, listing: Listing, facts: Mapping[StepName, Facts]) -> dict[StepName, str]:
        """Returns the steps that every policy keeps, with the reasons."""
        # The manager of the newest run may still need what it continued.
        continued = listing.parents.get(listing.newest_generation)
        protected = {
            name: ["restored from"] for name in (self.restored, continued) if name is not None
        }
        for name, known in facts.items():
            protected.setdefault(name, []).extend(map(str, known.pins_at(time.time())))
        return {name: ", ".join(reasons) for name, reasons in protected.items() if reasons}

    def _check_is_root(self, listing: Listing) -> None:
        """Raises UsageError for a tier: its snapshots may be nowhere else."""
        for run in listing.runs.values():
            if run.tier_of is not None:
                raise UsageError(
                    f"{self._root.url} is a tier of {run.tier_of}: the manager with tiers=[...] "
                    "deletes there what is at the root. Prune the root instead"
                )

    def _looks_superseded(self, listing: Listing) -> bool:
        if self.generation is not None and listing.newest_generation > self.generation:
            self.is_superseded = True
        return self.is_superseded

    async def _delete(
        self,
        opened: OpenSource,
        listing: Listing,
        generation: int,
        intents: Mapping[StepName, DeleteIntent],
        rests: Collection[StepName],
        result: Deletions,
        *,
        heeds_pins: bool = True,
        before: Callable[[StepName], Awaitable[None]] | None = None,
    ) -> None:
        """Deletes for a limited time. The next pass continues."""
        deleter = Deleter(
            *(self._root, opened, listing, generation, result),
            heeds_pins=heeds_pins,
            before=before,
        )

        async def delete() -> None:
            await deleter.delete(intents, rests)
            if not result.is_superseded:
                await deleter.end_marks()

        try:
            with anyio.move_on_after(MAX_PASS_S):
                await opened.errands.run(delete)
        finally:
            self.is_superseded = self.is_superseded or result.is_superseded
            self.num_left, self.failed = len(result.left), result.failed
            self._valid.difference_update(result.deleted)
            for name, error in result.failed.items():
                logger.warning("%s/%s: not deleted: %s", self._root.url, name, describe(error))
                self._events.post(EventKind.DELETE_FAILED, name.step, describe(error))
            for name in result.deleted:
                why = intents[name].reason if name in intents else ""
                self._events.post(EventKind.PRUNED, name.step, why)

    async def delete(self, step: int | StepName, *, force: bool) -> None:
        """Deletes one snapshot, by the intent of a pass. Without a generation, under the newest.

        Raises:
            RootTaken: A later manager has begun a run.
            UsageError: It may not be deleted.
            Exception: It could not be deleted.
        """
        async with self._opened("delete") as opened:
            listing, commits = await self._look(opened)
            self._check_is_root(listing)
            if self._looks_superseded(listing):
                raise RootTaken(url=self._root.url, generation=self.generation or 0)
            name = find_step(self._root.url, listing, commits, step)
            commit = commits[name]
            if isinstance(commit, StorageError):
                raise commit
            facts = await self._root.read_facts(opened, listing)
            if not force:
                await self._check_expendable(listing, commits, facts, name)
            generation = self.generation or listing.newest_generation
            intents = {name: make_intent(commit, generation, "delete()")}
            result = Deletions()
            await self._delete(
                *(opened, listing, generation, intents, (), result),
                heeds_pins=not force,
                before=partial(self._delete_near, intent=intents[name]),
            )
        if result.is_superseded:
            raise RootTaken(url=self._root.url, generation=generation)
        if name in result.failed:
            raise result.failed[name]
        if name not in result.deleted:
            raise UsageError(f"{self._root.url}/{name} was not deleted: it was pinned meanwhile")

    async def _look(self, opened: OpenSource) -> tuple[Listing, Commits]:
        listing = await self._root.list(opened)
        return listing, await read_commits(self._root, opened, listing.names)

    async def _delete_near(self, name: StepName, intent: DeleteIntent) -> None:
        """Deletes the copy at a tier: before that at the root, or it would come back."""

    def failed_deletes(self) -> dict[str, Exception]:
        """Returns errors by URL; that of a whole pass by the root's."""
        failed = {self._root.url_of(name): error for name, error in self.failed.items()}
        return failed if self.failed_pass is None else {self._root.url: self.failed_pass, **failed}

    async def _check_expendable(
        self,
        listing: Listing,
        commits: Commits,
        facts: Mapping[StepName, Facts],
        name: StepName,
    ) -> None:
        """Raises UsageError for a pinned snapshot, and for the only valid one of the run."""
        url, instead = self._root.url_of(name), "pass force=True to delete it"
        pins = facts.get(name, Facts()).pins_at(time.time())
        if pins:
            raise UsageError(f"{url} is {', '.join(map(str, pins))}: unpin it, or {instead}")
        run = current_timeline(listing, commits)
        if name not in run:
            return
        for other in reversed(run):
            if other == name or not isinstance(commits.get(other), Commit):
                continue
            look = find_damage(self._root, other, "quick")
            try:
                if not await run_on_loop(Host.get(), look):
                    return
            except StorageError as error:
                if is_unreachable(error):
                    raise
        raise UsageError(f"{url} is the only valid snapshot of the run: {instead}")

    async def _verify_newest(
        self, steps: list[StoredStep], failed: dict[StepName, StorageError]
    ) -> list[StoredStep]:
        """Verifies the newest steps until enough are valid; leaves out damaged ones, and those
        that cannot be read, which ``failed`` gets.
        """
        missing = self._min_valid
        damaged: set[StepName] = set()
        for stored in reversed(steps):
            if missing == 0:
                break
            if stored.name not in self._valid:
                look = find_damage(self._root, stored.name, self.level)
                try:
                    problems = await run_on_loop(Host.get(), look)
                except StorageError as error:
                    if is_unreachable(error):
                        raise
                    failed[stored.name] = error
                    continue
                if problems:
                    damaged.add(stored.name)
                    self._root.damaged[stored.name] = _text_of(problems)
                    continue
                self._valid.add(stored.name)
            missing -= 1
        return [stored for stored in steps if stored.name not in {*damaged, *failed}]


async def read_commits(root: Root, opened: OpenSource, names: Iterable[StepName]) -> Commits:
    """Returns commit objects, or why they cannot be read. Leaves out unfinished saves.

    Raises:
        StorageError: The storage cannot be reached.
        UnsupportedFormat: A newer release saved one.
    """
    failed: dict[StepName, StorageError] = {}
    found = await root.read_commits(opened, names, failed=failed)
    return {**found, **failed}


def find_damage(
    root: Root, name: StepName, level: str, *, is_anew: bool = False
) -> Script[Sequence[ActorSnapError]]:
    """Returns why the snapshot cannot be restored; empty if it can.

    A ``NotASnapshot`` if it was never committed: only commit objects count. Else a snapshot that
    was found damaged stays so until a full look, or a restore, finds it whole.

    Args:
        is_anew: Only what a look finds now counts.

    Raises:
        ActorSnapError: It could not be looked at, or needs a newer release.
    """
    try:
        report = yield from verification.verify(root.snapshot(name), level=level)
        problems: Sequence[ActorSnapError] = report.problems
    except ActorSnapError as error:
        if not is_damage(error):
            raise
        problems = [error]
    if level == "full":
        root.damaged.pop(name, None)
        if problems and not isinstance(problems[0], NotASnapshot):
            root.damaged[name] = _text_of(problems)
    elif not problems and not is_anew and name in root.damaged:
        problems = [FormatError(key=str(name), detail=f"found before: {root.damaged[name]}")]
    return problems


def _text_of(problems: Sequence[ActorSnapError]) -> str:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{problems[0]}{more}"


def current_timeline(listing: Listing, committed: Collection[StepName]) -> list[StepName]:
    """Returns the names of the current timeline, oldest first."""
    parents = listing.parents
    newest = current_generation(committed, parents)
    return [] if newest is None else timeline(committed, parents, newest)


def find_step(
    url: str,
    listing: Listing,
    commits: Commits,
    step: int | StepName,
) -> StepName:
    """Returns the snapshot of a step: of the run, else the abandoned or damaged one.

    Raises:
        UsageError: There is none, or there are several and none is of the run.
    """
    if isinstance(step, StepName):
        found = [step] if step in commits else []
    else:
        named = sorted((n for n in commits if n.step == step), key=lambda name: name.generation)
        whole = {name for name in named if isinstance(commits[name], Commit)}
        run = [name for name in current_timeline(listing, commits) if name in named]
        found = [name for name in run if name in whole] or run or named
    if not found:
        raise UsageError(f"{url} has no snapshot of step {step}")
    if len(found) > 1:
        names = ", ".join(map(str, found))
        raise UsageError(
            f"{url} has several abandoned snapshots of step {step}: name one of {names}"
        )
    return found[0]


def make_intent(commit: Commit | FormatError, generation: int, reason: str) -> DeleteIntent:
    attempt = commit.attempt if isinstance(commit, Commit) else ""
    return DeleteIntent(attempt=attempt, generation=generation, reason=reason)


_PLURAL = "were", "they are", "them"


def _some_steps(steps: Sequence[str]) -> str:
    """Returns for example ``"steps 100, 200 and 300"``."""
    if len(steps) <= _MAX_NAMED:
        return f"{'step' if len(steps) == 1 else 'steps'} {joined(steps)}"
    return f"steps {', '.join(steps[: _MAX_NAMED - 1])}, ..., {steps[-1]} ({len(steps)} in all)"


def _reason(policy: KeepPolicy) -> str:
    return f"not in {policy}"
