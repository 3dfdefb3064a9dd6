# SPDX-License-Identifier: Apache-2.0
"""A tier: a fast place for new snapshots of a root, which are copied to the root later.

The root is the authority: only the root has generations, marks and the fence between managers. A
tier has snapshots with the same names, and for each of its generations a copy of the root's run
record. The copy lets a manager recognise its tier and refuse that of another root. Programs that
know only the tier delete nothing there.

A snapshot is saved to the tier, verified there, and *drained*: copied to the root and verified
again. A snapshot that is not whole at the root is never deleted at the tier. The root keeps a
snapshot that the tier still has: otherwise, it would look like one to drain.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import anyio
import msgspec

from actorsnap.errors import (
    ActorSnapError,
    FormatError,
    NotASnapshot,
    ObjectExists,
    ObjectNotFound,
    RootTaken,
    StorageError,
    UsageError,
    describe,
)
from actorsnap.format.manifest import Commit
from actorsnap.format.steps import DeleteIntent, StepName, encode_record, run_key
from actorsnap.log import Log
from actorsnap.manager.events import EventBoard, EventKind
from actorsnap.manager.keeper import (
    MAX_PASS_S,
    Commits,
    Keeper,
    current_timeline,
    find_damage,
    make_intent,
    read_commits,
)
from actorsnap.options import Options
from actorsnap.planning.keeping import KeepPolicy, Verdict, leftovers
from actorsnap.runtime.copy import CopyEvent, CopyReport, copy
from actorsnap.runtime.deletion import Deleter, Deletions
from actorsnap.runtime.host import Call, Host, Script, wait_done
from actorsnap.runtime.location import Location, make_location
from actorsnap.runtime.offloaded_copy import RemoteCopy
from actorsnap.runtime.pacing import paced
from actorsnap.runtime.roots import Listing, Root
from actorsnap.runtime.save import Save
from actorsnap.runtime.script import run_on_loop
from actorsnap.runtime.source import OpenSource, Source
from actorsnap.runtime.uploader_client import find_usable_uploader
from actorsnap.storage.wire import is_unreachable

logger = Log(__name__)

_MAX_LOOK_S = 5.0
"""Time that a save waits for the root."""

_ASIDE_BYTES = 16 << 20
"""Smallest snapshot for which a drain starts a process, in bytes."""


def add_tier(root: Root, tiers: object, options: Options) -> Root:
    """Returns the root with its tier, if one is given.

    Raises:
        UsageError: An argument is invalid.
    """
    if isinstance(tiers, str | os.PathLike) or not isinstance(tiers, Sequence):
        raise UsageError(f'tiers must be a list like ["/nvme/run-7"], not {tiers!r}')
    if len(tiers) > 1:
        raise UsageError(f"tiers={tiers!r}: only one tier is supported. Name the fastest place")
    if not tiers:
        return root
    tier = Root(make_location(tiers[0], None), options)
    if tier.source.location.canonical == root.source.location.canonical:
        raise UsageError(f"tiers={tiers!r}: a tier must be another place than the root {root.url}")
    return TieredRoot(root, tier)


class TieredRoot(Root):
    """Reads a root and its tier as one: the snapshots of both, by name."""

    def __init__(self, root: Root, tier: Root) -> None:
        # What is open and was read belongs to both.
        self.source, self.marks = root.source, root.marks
        self._runs, self._commits = root._runs, root._commits
        self.root, self.tier = root, tier
        self._near: set[StepName] = set()

    @property
    def places(self) -> tuple[Root, ...]:
        return self.tier, self.root

    def is_durable(self, name: StepName) -> bool:
        return name not in self._near

    def url_of(self, name: StepName) -> str:
        return (self.root if self.is_durable(name) else self.tier).url_of(name)

    async def look(self, opened: OpenSource) -> Listing:
        listing = await super().look(opened)
        near = await self.list_tier(opened)
        return replace(listing, names={*listing.names, *near.names})

    async def list_tier(self, opened: OpenSource) -> Listing:
        """Lists the tier.

        Raises:
            UsageError: It has snapshots of another root, or is a root.
        """
        async with self.tier.source.opened(opened.host, "list") as near:
            listing = await self.tier.list(near)
        for generation in {name.generation for name in listing.names}:
            if generation not in self._runs:
                await self._read_run(opened, generation)
            copied, record = listing.runs.get(generation), self._runs.get(generation)
            if copied is not None and copied.tier_of is None:
                raise self._is_root(generation)
            if copied is None or msgspec.structs.replace(copied, tier_of=None) != record:
                raise self._foreign(generation)
        return listing

    async def read_commits(
        self,
        opened: OpenSource,
        names: Iterable[StepName],
        *,
        has_newer: bool = False,
        failed: dict[StepName, StorageError] | None = None,
    ) -> dict[StepName, Commit | FormatError]:
        names = [*names]
        found = await super().read_commits(opened, names, has_newer=has_newer, failed=failed)
        damaged = self.root.damaged
        others = [n for n in names if n in damaged or not isinstance(found.get(n), Commit)]
        there: dict[StepName, Commit | FormatError] = {}
        failed_near: dict[StepName, StorageError] | None = None if failed is None else {}
        if others:
            async with self.tier.source.opened(opened.host, "list") as near:
                there = await self.tier.read_commits(
                    near, others, has_newer=has_newer, failed=failed_near
                )
        whole = {
            name: commit
            for name, commit in there.items()
            if isinstance(commit, Commit)
            and not (name in damaged and name in found and name in self.tier.damaged)
        }
        self._near = (self._near - {*names}) | {*whole}
        if failed is not None:
            near_only = {n: why for n, why in (failed_near or {}).items() if n not in found}
            failed.update({**near_only, **failed})
            for name in whole:
                failed.pop(name, None)
        return {**there, **found, **whole}

    async def is_committed(self, opened: OpenSource, name: StepName) -> bool:
        async with self.tier.source.opened(opened.host, "look") as near:
            if await self.tier.is_committed(near, name):
                return True
        return await super().is_committed(opened, name)

    # A run

    async def claim_generation(
        self, opened: OpenSource, *, restored_from: StepName | None, world_size: int
    ) -> int:
        """Begins a run at both places.

        Raises:
            UsageError: It is the tier of another root.
        """
        await self.list_tier(opened)
        generation = await super().claim_generation(
            opened, restored_from=restored_from, world_size=world_size
        )
        key, record = run_key(generation), self.tier_record(generation)
        async with self.tier.source.opened(opened.host, "begin a run") as near:
            try:
                await near.storage.put_if_absent(key, record)
            except ObjectExists:
                found = await near.storage.get(key)
                if found == encode_record(self._runs[generation]):
                    raise self._is_root(generation) from None
                if found != record:
                    raise self._foreign(generation) from None
        return generation

    def tier_record(self, generation: int) -> bytes:
        """Returns the tier's copy of the record of a run."""
        return encode_record(msgspec.structs.replace(self._runs[generation], tier_of=self.url))

    def _is_root(self, generation: int) -> UsageError:
        return UsageError(
            f"{self.tier.url} is not a tier, but a root, perhaps {self.root.url} itself: run "
            f"{generation} was begun there. Delete nothing; name another place in tiers=[...], "
            "empty or that of this root's earlier runs"
        )

    def _foreign(self, generation: int) -> UsageError:
        return UsageError(
            f"{self.tier.url} has snapshots of another run than {self.url}: run {generation} is "
            "not the same. Give each root a tier of its own; if the root was deleted on purpose, "
            "delete the tier as well"
        )


def check_tier(root: Root, generation: int, record: bytes, rank: int) -> Script[Exception | None]:
    """Returns why this rank cannot use rank 0's tier.

    Args:
        record: The run record that rank 0 stored there.
    """
    must_be = "A tier must be seen by all ranks: one machine's, or a shared file system"
    if not isinstance(root, TieredRoot):
        return UsageError(f"rank {rank} has no tier, but rank 0 has one. {must_be}")

    async def perform(near: OpenSource) -> bytes | None:
        try:
            return await near.storage.get(run_key(generation))
        except ObjectNotFound:
            return None

    try:
        found = yield from root.tier.source.perform("look for the tier", perform)
    except ActorSnapError as error:
        return error
    if found == record:
        return None
    return UsageError(
        f"rank {rank} does not see at {root.tier.url} what rank 0 wrote to its tier. {must_be}"
    )


class TieredKeeper(Keeper):
    """Drains snapshots from the tier to the root, then deletes at both. On rank 0."""

    def __init__(
        self, places: TieredRoot, policy: KeepPolicy, min_valid: int, events: EventBoard
    ) -> None:
        super().__init__(places.root, policy, min_valid, events)
        self._places = places
        self._tier = self._saved_to = places.tier
        self._failed_near: dict[str, Exception] = {}
        self._draining: Call[None] | None = None
        self._has_news = False
        self._run: list[StepName] = []  # the timeline when last looked at

    def make_room(self) -> None:
        Host.get().call_soon(self._begin_draining)

    async def look_for_successor(self, generation: int) -> None:
        """Looks for a bounded time: while the root does not answer, saves go on.

        This is safe: nothing is written to the root without another look.
        """
        try:
            with anyio.fail_after(_MAX_LOOK_S):
                await super().look_for_successor(generation)
        except (ActorSnapError, TimeoutError) as error:
            why = describe(error) if isinstance(error, ActorSnapError) else "no answer"
            logger.warning("%s: saving to the tier only: %s", self._root.url, why)

    async def _verify(self, name: StepName, save: Save) -> None:
        await super()._verify(name, save)
        # Also after a failure: a pass may make room for the next save.
        self._begin_draining()

    async def _keep_new(self, name: StepName) -> None:
        if name not in self.waiting:
            self.waiting.append(name)

    # Drains

    def _begin_draining(self) -> None:
        self._has_news = True
        if self._draining is not None:
            return
        call = self._draining = Host.get().submit(self._drain_all())
        self._passes.add(call)

        def end(_: object) -> None:
            self._passes.discard(call)
            self._draining = None

        call.future.add_done_callback(end)

    async def _stop_draining(self) -> None:
        """Cancels drains and their passes. Later ones continue."""
        if self._draining is not None:
            self._draining.cancel()
            await wait_done(self._draining.future)

    async def settle(self) -> None:
        await self.finish_verifying()
        await self._stop_draining()
        await super().settle()

    async def finish(self, timeout_s: float) -> None:
        await super().finish(timeout_s)
        if self.waiting and not self.is_superseded:
            logger.warning(
                "%s: not copied to %s yet: steps %s. The next manager with this tier continues",
                self._tier.url,
                self._root.url,
                ", ".join(str(name.step) for name in self.waiting),
            )

    async def _drain_all(self) -> None:
        while self._has_news:
            self._has_news = has_passed = False
            tried: set[StepName] = set()
            try:
                while name := await self._next_to_drain(tried):
                    tried.add(name)
                    if not await self._drain(name):
                        continue
                    # A fresh start abandons the earlier run by its own first snapshot at the root:
                    # until then its policy must not judge that run.
                    if self.restored is not None or name.generation == self.generation:
                        await self._pass_quietly()
                        has_passed = True
                self.failed_drains.pop(self._root.url, None)
            except Exception as error:
                self._note_failure(self._root.url, None, error)
            if not has_passed:
                await self._clear_quietly()

    async def _next_to_drain(self, tried: Collection[StepName]) -> StepName | None:
        """Returns the newest one of the run that waits: it is worth most."""
        if self.generation is None:
            return None
        async with self._root.source.opened(Host.get(), "drain") as opened:
            await opened.errands.run(self._find_waiting, opened, self.generation)
        return next((name for name in reversed(self.waiting) if name not in tried), None)

    async def _find_waiting(self, opened: OpenSource, generation: int) -> None:
        if self.is_superseded or await self._root.is_superseded(opened, generation):
            self.is_superseded = True
            self.waiting = []
            return
        listing, commits = await self._look(opened)
        self._run = current_timeline(listing, commits)
        self.waiting = [
            name
            for name in self._run
            if not self._places.is_durable(name) and name not in self._tier.damaged
        ]

    async def _drain(self, name: StepName) -> bool:
        """Copies a snapshot to the root, unless it fails."""
        source, target = self._tier.snapshot(name), self._root.snapshot(name)
        host, url = Host.get(), self._tier.url_of(name)
        try:
            report = await copy_aside(host, source, target.location)
            if not report.was_there:
                self._root.forget(name)
            elif name in self._root.damaged:
                raise self._damaged_at_root(name)
            problems = await run_on_loop(host, find_damage(self._root, name, "quick"))
            if problems:
                raise problems[0]
        except Exception as error:
            self._note_failure(url, name.step, error)
            return False
        self.failed_drains.pop(url, None)
        logger.info("%s: copied to %s", url, self._root.url)
        self._events.post(EventKind.DRAINED, name.step)
        self._valid.add(name)
        if name == self._run[-1]:
            await host.run_blocking(self._root.link_latest, name)
        return True

    def _damaged_at_root(self, name: StepName) -> FormatError:
        url, why = self._root.url_of(name), self._root.damaged[name]
        remedy = f"`actorsnap rm {url}` deletes it, then it is copied again"
        return FormatError(key=str(name), detail=f"the root's copy is damaged ({why}): {remedy}")

    def _note_failure(self, url: str, step: int | None, error: Exception) -> None:
        self.failed_drains[url] = error
        logger.warning("%s: not copied to %s: %s", url, self._root.url, describe(error))
        self._events.post(EventKind.DRAIN_FAILED, step, describe(error))

    # Deletions

    def failed_deletes(self) -> dict[str, Exception]:
        return {**super().failed_deletes(), **self._failed_near}

    async def _look(self, opened: OpenSource) -> tuple[Listing, Commits]:
        listing = await self._places.list(opened)
        return listing, await read_commits(self._places, opened, listing.names)

    async def run_pass(
        self, policy: KeepPolicy | None, *, dry_run: bool
    ) -> tuple[list[Verdict], Deletions]:
        verdicts, deletions = await super().run_pass(policy, dry_run=dry_run)
        async with self._opened("prune") as opened:
            run = current_timeline(*await self._look(opened))
        judged = {verdict.name for verdict in verdicts}
        near = [
            Verdict(name, True, ("not at the root yet",))
            for name in run
            if name not in judged and not self._places.is_durable(name)
        ]
        return [*verdicts, *near], deletions

    async def _run_pass(
        self, opened: OpenSource, policy: KeepPolicy, dry_run: bool
    ) -> tuple[list[Verdict], Deletions]:
        if not dry_run:
            await self._clear_tier(opened)
        self._held = {*(await self._places.list_tier(opened)).names}
        return await super()._run_pass(opened, policy, dry_run)

    async def _clear_quietly(self) -> None:
        try:
            async with self._opened("prune") as opened:
                await self._clear_tier(opened)
        except Exception as error:
            logger.warning("%s: nothing was deleted: %s", self._tier.url, describe(error))

    async def _clear_tier(self, opened: OpenSource) -> None:
        """Deletes the tier's snapshots that are whole at the root, except the newest of the run."""
        generation = self.generation
        listing = await self._root.list(opened)
        if generation is None or self._looks_superseded(listing):
            return
        durable = await read_commits(self._root, opened, listing.names)
        facts = await self._root.read_facts(opened, listing)
        near = await self._places.list_tier(opened)
        async with self._tier.source.opened(opened.host, "prune") as at_tier:
            commits = await read_commits(self._tier, at_tier, near.names)
            drained = {
                name: commit
                for name, commit in commits.items()
                if isinstance(commit, Commit) and commit == durable.get(name)
            }
            run = [name for name in current_timeline(listing, durable) if name in drained]
            kept = {*run[-1:], *self._protected(listing, facts), *self._in_flight}
            whole = {n for n in drained if n in kept & self._valid or await self._is_whole(n)}
            intents = {
                name: make_intent(commit, generation, "at the root")
                for name, commit in drained.items()
                if name in whole - kept
            }
            rests = leftovers(
                {*near.names} - self._in_flight,
                near.records.intents,
                committed={n for n, commit in commits.items() if isinstance(commit, Commit)},
                damaged={n for n, commit in commits.items() if not isinstance(commit, Commit)},
                generation=generation,
            ) - {*intents}
            result = await self._delete_at_tier(at_tier, near, generation, intents, rests)
        self.is_superseded = self.is_superseded or result.is_superseded
        self._failed_near = {self._tier.url_of(n): error for n, error in result.failed.items()}
        for url, error in self._failed_near.items():
            logger.warning("%s: not deleted: %s", url, describe(error))

    async def _is_whole(self, name: StepName) -> bool:
        """Returns whether the snapshot is whole at the root, now: others may delete there.

        A damaged one counts as not drained.
        """
        try:
            problems = await run_on_loop(Host.get(), find_damage(self._root, name, "quick"))
        except StorageError as error:
            if is_unreachable(error):
                raise
            logger.warning("%s: not verified: %s", self._root.url_of(name), describe(error))
            return False
        if problems and not isinstance(problems[0], NotASnapshot):
            self._root.damaged.setdefault(name, str(problems[0]))
        return not problems

    async def _delete_at_tier(
        self,
        at_tier: OpenSource,
        listing: Listing,
        generation: int,
        intents: Mapping[StepName, DeleteIntent],
        rests: Collection[StepName],
    ) -> Deletions:
        result = Deletions()
        # Pins are at the root: those that are known were heeded.
        deleter = Deleter(self._tier, at_tier, listing, generation, result, heeds_pins=False)

        async def delete() -> None:
            await deleter.delete(intents, rests)
            if not result.is_superseded:
                await deleter.end_marks()

        with anyio.move_on_after(MAX_PASS_S):
            await at_tier.errands.run(delete)
        return result

    async def delete(self, step: int | StepName, *, force: bool) -> None:
        try:
            await super().delete(step, force=force)
        finally:
            if self.generation is not None:
                self._begin_draining()

    async def _delete_near(self, name: StepName, intent: DeleteIntent) -> None:
        async with self._tier.source.opened(Host.get(), "delete") as at_tier:
            near = await self._tier.look(at_tier)
            if name not in near.names:
                return
            result = await self._delete_at_tier(
                at_tier, near, intent.generation, {name: intent}, ()
            )
        if name not in result.deleted:
            taken = RootTaken(url=self._root.url, generation=intent.generation)
            raise result.failed.get(name, taken)


async def copy_aside(host: Host, source: Source, to: Location) -> CopyReport:
    """Copies a snapshot where a trainer notices it least: in its uploader process.

    With ``offload="auto"`` it does not wait for the process: the first large copy is made here.

    Raises:
        ActorSnapError: See ``copy``.
    Cancellation: Ends the copy, which a later one resumes.
    """
    share = 0.0
    uploader = find_usable_uploader(host, [source.location, to], source.options)

    def note(done_bytes: int, total_bytes: int) -> None:
        nonlocal share
        share = done_bytes / max(1, total_bytes)

    def note_event(event: CopyEvent) -> None:
        note(event.done_bytes, event.total_bytes)
        if uploader is not None and event.total_bytes >= _ASIDE_BYTES:
            host.call_soon(uploader.start)

    with paced(source.options, lambda: share) as pace:
        if uploader is not None and (source.options.offload == "process" or uploader.is_ready):
            report = await RemoteCopy(uploader, source, to, note).run()
            if report is not None:
                return report
        copying = copy(source, to, overwrite=False, on_event=note_event, pace=pace)
        return await run_on_loop(host, copying)
