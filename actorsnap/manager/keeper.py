"""Rank 0's part of a manager: finds what can be restored, verifies saves, deletes what goes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import anyio

from actorsnap.errors import ActorSnapError, FormatError, NotASnapshot, NoValidSnapshot, describe
from actorsnap.format.manifest import Commit
from actorsnap.format.steps import DeleteIntent, StepName
from actorsnap.log import Log
from actorsnap.planning.keeping import (
    KeepPolicy,
    StoredStep,
    Verdict,
    current_generation,
    judge,
    timeline,
)
from actorsnap.runtime import verify as verification
from actorsnap.runtime.host import Call, Host, Script, wait_done
from actorsnap.runtime.roots import Deletions, Listing, Root, damage_of, is_damage, stored_step
from actorsnap.runtime.save import Save
from actorsnap.runtime.script import run_on_loop
from actorsnap.runtime.source import OpenSource

logger = Log(__name__)


class Search:
    """Finds the newest whole snapshot of the current timeline, then older ones. On rank 0."""

    def __init__(self, root: Root, level: str, allow_fresh: bool) -> None:
        self._root = root
        self._level = level
        self._allow_fresh = allow_fresh
        self._listing: Listing | None = None
        self._current: StepName | None = None
        self._unfinished: set[StepName] = set()
        self._damaged: dict[StepName, str] = {}

    def following(self, failure: Exception | None) -> Script[Any]:
        """Returns the next candidate, after ``failure`` of the one before.

        Raises:
            NoValidSnapshot: There are snapshots, but none is whole.
            Exception: ``failure``, if an older snapshot would not help.
        """
        if failure is not None:
            if not is_damage(failure):
                raise failure
            assert self._current is not None
            self._damaged[self._current] = describe(failure)
        if self._listing is None:
            self._listing = yield from self._root.source.perform("find the latest", self._root.list)
        listing = self._listing
        while True:
            # A fresh start that committed nothing abandons nothing.
            names = {*listing.names} - self._unfinished
            candidates = [n for n in current_timeline(listing, names) if n not in self._damaged]
            if not candidates:
                break
            self._current = candidates[-1]
            why = yield from why_damaged(self._root, self._current, self._level)
            if not why:
                return {"name": str(self._current), "skipped": self._skipped}
            if why == UNFINISHED:
                self._unfinished.add(self._current)
            else:
                self._damaged[self._current] = why
        if not self._allow_fresh:
            yield from self._check_fresh([name for name in names if name not in self._damaged])
        return {"name": "", "skipped": self._skipped}

    def _check_fresh(self, abandoned: list[StepName]) -> Script[None]:
        """Raises NoValidSnapshot if anything was committed."""
        if not self._damaged and abandoned:
            stored = yield from self._root.source.perform(
                "find the latest", lambda opened: self._root.read_commits(opened, abandoned)
            )
            self._damaged = dict.fromkeys(stored, "abandoned: the run continued another snapshot")
        if self._damaged:
            raise NoValidSnapshot(url=self._root.url, skipped=self._skipped)

    @property
    def _skipped(self) -> list[tuple[str, str]]:
        return [
            (self._root.snapshot(name).location.display_url, why)
            for name, why in self._damaged.items()
        ]


class Keeper:
    """Verifies what was saved, then deletes what the policy gives up. On rank 0."""

    def __init__(self, root: Root, policy: KeepPolicy, min_valid: int) -> None:
        self._root = root
        self._policy = policy
        self._min_valid = min_valid
        self.generation: int | None = None
        self.restored: StepName | None = None
        self.is_superseded = False
        self.verified: int | None = None
        self.failed: dict[StepName, Exception] = {}
        self._in_flight: set[StepName] = set()
        self._valid: set[StepName] = set()
        self._damaged: dict[StepName, str] = {}
        self._unreported: list[str] = []
        self._verifying: set[Call[None]] = set()
        self._passes: set[Call[None]] = set()
        self._lock: anyio.Lock | None = None

    def watch(self, name: StepName, save: Save) -> None:
        """Verifies the save after its commit, and runs a pass."""
        self._in_flight.add(name)
        call = Host.get().submit(self._verify(name, save))
        self._verifying.add(call)
        call.future.add_done_callback(lambda _: self._verifying.discard(call))

    @property
    def damaged(self) -> Mapping[StepName, str]:
        """Committed steps that were found damaged, with the reasons."""
        return self._damaged

    def end_run(self) -> None:
        """After a restore: the next save begins another run, which supersedes all others."""
        self.generation = None
        self.is_superseded = False
        self._unreported = []

    async def _verify(self, name: StepName, save: Save) -> None:
        await wait_done(save.finished)
        self._in_flight.discard(name)
        if save.finished.exception() is not None:
            return
        host = Host.get()
        try:
            why = await run_on_loop(host, why_damaged(self._root, name, "quick"))
        except Exception as error:
            logger.warning("%s: not verified: %s", self._root.snapshot(name), describe(error))
            return
        if why:
            self._damaged[name] = why
            self._unreported.append(f"{name} was committed, but is damaged: {why}")
            logger.error("%s: %s", self._root.url, self._unreported[-1])
            return
        self._valid.add(name)
        self.verified = name.step
        call = host.submit(self._pass_quietly())
        self._passes.add(call)
        call.future.add_done_callback(lambda _: self._passes.discard(call))

    async def finish_verifying(self) -> None:
        for call in [*self._verifying]:
            await wait_done(call.future)

    def raise_damage(self) -> None:
        if self._unreported:
            problem, self._unreported = self._unreported[0], []
            raise NoValidSnapshot(url=self._root.url, skipped=[(self._root.url, problem)])

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
            await self.run_pass(None, dry_run=False)
        except Exception as error:
            logger.warning("%s: nothing was deleted: %s", self._root.url, describe(error))

    async def run_pass(
        self, policy: KeepPolicy | None, *, dry_run: bool
    ) -> tuple[list[Verdict], Deletions]:
        """Judges the steps of the timeline, and deletes what goes."""
        if self._lock is None:
            self._lock = anyio.Lock()
        async with self._lock, self._root.source.opened(Host.get(), "prune") as opened:
            return await self._run_pass(opened, policy or self._policy, dry_run)

    async def _run_pass(
        self, opened: OpenSource, policy: KeepPolicy, dry_run: bool
    ) -> tuple[list[Verdict], Deletions]:
        listing = await self._root.list(opened)
        commits = await self._root.read_commits(opened, listing.names)
        steps = [
            stored_step(name, commit)
            for name in current_timeline(listing, commits)
            if isinstance(commit := commits.get(name), Commit) and name not in self._damaged
        ]
        steps = await self._verify_newest(steps)
        protected = {} if self.restored is None else {self.restored: "restored from"}
        verdicts = judge(
            steps, policy, protected=protected, valid=self._valid, min_valid=self._min_valid
        )
        doomed = {v.name: _reason(policy) for v in verdicts if not v.keeps}
        if dry_run:
            return verdicts, Deletions(deleted=[*doomed])
        generation = self.generation
        if generation is None or listing.newest_generation > generation:
            self.is_superseded = self.is_superseded or generation is not None
            return verdicts, Deletions()
        intents: dict[StepName, DeleteIntent] = {}
        for name, reason in doomed.items():
            commit = commits[name]
            assert isinstance(commit, Commit)
            intents[name] = DeleteIntent(
                attempt=commit.attempt, generation=generation, reason=reason
            )
        rests = self._rests(listing, commits, generation) - {*doomed}
        result = await self._root.delete(opened, intents, rests, listing.intents, generation)
        if listing.temporaries and not result.is_superseded:
            await opened.storage.delete([*listing.temporaries])
        self.is_superseded = self.is_superseded or result.is_superseded
        self.failed = result.failed
        self._valid.difference_update(result.deleted)
        for name, error in result.failed.items():
            logger.warning("%s/%s: not deleted: %s", self._root.url, name, describe(error))
        return verdicts, result

    async def _verify_newest(self, steps: list[StoredStep]) -> list[StoredStep]:
        """Verifies the newest steps until enough are valid; leaves out damaged ones."""
        missing = self._min_valid
        damaged: set[StepName] = set()
        for stored in reversed(steps):
            if missing == 0:
                break
            if stored.name not in self._valid:
                why = await run_on_loop(Host.get(), why_damaged(self._root, stored.name, "quick"))
                if why:
                    damaged.add(stored.name)
                    self._damaged[stored.name] = why
                    continue
                self._valid.add(stored.name)
            missing -= 1
        return [stored for stored in steps if stored.name not in damaged]

    def _rests(
        self, listing: Listing, commits: Mapping[StepName, Commit | FormatError], generation: int
    ) -> set[StepName]:
        """Returns deletions and saves that did not end: no later save takes these names."""
        own = [name.step for name in commits if name.generation == generation]
        newest = (generation, max(own, default=-1))
        unfinished = {
            name
            for name in {*listing.names, *listing.intents} - {*commits} - self._in_flight
            if (name.generation, name.step) < newest
        }
        kept = {name for name in listing.intents if isinstance(commits.get(name), Commit)}
        return unfinished | kept


UNFINISHED = "unfinished"


def why_damaged(root: Root, name: StepName, level: str) -> Script[str]:
    """Returns why the snapshot cannot be restored; empty if it can.

    Raises:
        ActorSnapError: It could not be looked at, or needs a newer release.
    """
    try:
        report = yield from verification.verify(root.snapshot(name), level=level)
    except ActorSnapError as error:
        if not is_damage(error):
            raise
        # Only commit objects count, whatever else is there.
        return UNFINISHED if isinstance(error, NotASnapshot) else str(error)
    return "" if report.ok else damage_of(report.problems, name)


def current_timeline(listing: Listing, committed: Collection[StepName]) -> list[StepName]:
    """Returns the names of the current timeline, oldest first."""
    parents = listing.parents
    newest = current_generation(committed, parents)
    return [] if newest is None else timeline(committed, parents, newest)


def _reason(policy: KeepPolicy) -> str:
    return f"not in {policy}"
