# SPDX-License-Identifier: Apache-2.0
"""Looks at a root and marks its snapshots: what any process may do next to a running manager.

None of it takes a generation, so none of it stops a manager.
"""

from __future__ import annotations

import math
import reprlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, TypeAlias

from actorsnap.errors import (
    FormatError,
    ObjectNotFound,
    StorageError,
    UnsupportedFormat,
    UsageError,
)
from actorsnap.format.manifest import Commit
from actorsnap.format.requests import check_reason
from actorsnap.format.steps import (
    MANAGER_FOLDER,
    MarkKind,
    MarkName,
    MetricsMark,
    PinMark,
    RunRecord,
    StepName,
    decode_record,
    parse_run_key,
)
from actorsnap.manager.keeper import current_timeline, find_damage, find_step
from actorsnap.manager.results import StepInfo
from actorsnap.planning.keeping import metric_value
from actorsnap.planning.marks import Facts, Pin
from actorsnap.runtime.host import Script
from actorsnap.runtime.marks import own_holder, put_metrics, put_pin
from actorsnap.runtime.roots import Listing, Root, damage_of, stored_step
from actorsnap.runtime.source import MAX_SMALL_READS, OpenSource, Source
from actorsnap.storage.base import for_each
from actorsnap.storage.wire import is_unreachable

Until: TypeAlias = timedelta | datetime | None


def steps(
    root: Root,
    *,
    is_complete: bool,
    has_newer: bool = False,
    failed: dict[StepName, StorageError] | None = None,
) -> Script[list[StepInfo]]:
    """Returns committed steps of the timeline, oldest first; if complete, all others too.

    Args:
        has_newer: Include steps that a newer release saved, instead of raising
            ``UnsupportedFormat``.
        failed: Takes the errors of steps that cannot be read, instead of raising the first. These
            steps may be committed: they are in the result, as ``"not readable"``.
    """

    async def perform(opened: OpenSource) -> list[StepInfo]:
        listing = await root.list(opened)
        commits = await root.read_commits(opened, listing.names, has_newer=has_newer, failed=failed)
        facts = await root.read_facts(opened, listing)
        found = {**commits, **(failed or {})}
        run = {*current_timeline(listing, found)}
        return [
            _info(root, listing, name, found.get(name), facts.get(name, Facts()), name in run)
            for name in sorted(listing.names, key=lambda name: (name.generation, name.step))
            if is_complete or (name in run and not isinstance(found[name], FormatError))
        ]

    return (yield from root.source.perform("list", perform))


def to_restore(root: Root, step: int) -> Script[StepName]:
    """Returns the newest committed snapshot of a step of the run.

    Raises:
        UsageError: The run has no such step. The message names the steps that can be restored.
    """
    infos = yield from steps(root, is_complete=True)
    named = [info for info in infos if info.step == step]
    whole = [info for info in named if info.state == "committed"]
    if whole:
        return whole[-1].name
    known = ", ".join(str(i.step) for i in infos if i.state == "committed") or "none"
    what = f": it is {named[-1].state}" if named else ""
    hint = ""
    if named and named[-1].state == "abandoned":
        hint = f'. Snapshot("{named[-1].url}") can restore it'
    raise UsageError(
        f"{root.url} has no snapshot of step {step} to restore{what}. Steps: {known}{hint}"
    )


def latest(root: Root) -> Script[StepInfo | None]:
    """Returns the newest committed step.

    Raises:
        StorageError: A newer step cannot be read.
    """
    return (yield from _find_newest(root, None, {}))


def latest_valid(
    root: Root, level: str, damaged: dict[StepName, str] | None = None
) -> Script[StepInfo | None]:
    """Returns the newest step that is intact at one of the places, with the URL there.

    Args:
        damaged: Takes the damage of newer steps.

    Raises:
        StorageError: A newer step cannot be read.
    """
    return (yield from _find_newest(root, level, {} if damaged is None else damaged))


def newer(root: Root, than: StepName) -> Script[dict[StepName, Commit | FormatError | None]]:
    """Returns the later steps of the run, oldest first: their commit objects, or the damage.

    None: There is no commit object. With one, it would be a step of the run.
    """

    async def perform(opened: OpenSource) -> dict[StepName, Commit | FormatError | None]:
        listing = await root.list(opened)
        failed: dict[StepName, StorageError] = {}
        commits = await root.read_commits(opened, listing.names, failed=failed)
        known = {*commits, *failed}
        after = [n for n in listing.names if (n.generation, n.step) > (than.generation, than.step)]
        return {
            name: commits.get(name)
            for name in sorted(after, key=lambda name: (name.generation, name.step))
            if name not in failed
            and name not in listing.records.intents
            and name in current_timeline(listing, {*known, name})
        }

    return (yield from root.source.perform("list", perform))


def _find_newest(
    root: Root, level: str | None, damaged: dict[StepName, str]
) -> Script[StepInfo | None]:
    failed: dict[StepName, StorageError] = {}
    infos = yield from steps(root, is_complete=False, failed=failed)
    newer: StorageError | None = None
    for info in reversed(infos):
        try:
            if info.name in failed:
                raise failed[info.name]
            found = info if level is None else (yield from _find_whole(root, info, level, damaged))
        except StorageError as error:
            if is_unreachable(error):
                raise
            newer = newer or error
            continue
        if found is not None and newer is not None:
            newer.add_note(f"the newest step that could be read is {found.url}")
            break
        if found is not None:
            return found
    if newer is not None:
        raise newer
    return None


def _find_whole(
    root: Root, info: StepInfo, level: str, damaged: dict[StepName, str]
) -> Script[StepInfo | None]:
    for place in root.places:
        problems = yield from find_damage(place, info.name, level)
        if not problems:
            return replace(info, url=place.url_of(info.name))
        damaged[info.name] = damage_of(problems[0])
    return None


def damaged_records(source: Source) -> Script[dict[str, str]]:
    """Returns the damaged records of a root by key: the damage, its effect and the remedy."""

    async def perform(opened: OpenSource) -> dict[str, str]:
        found: dict[str, str] = {}

        async def check(key: str) -> None:
            generation, mark = parse_run_key(key), MarkName.parse(key)
            if generation is not None:
                kind: type[RunRecord | PinMark | MetricsMark] = RunRecord
                advice = (
                    f"it is not known which snapshot generation {generation} continued, so steps "
                    "of earlier generations count as abandoned, and stay. Copy this file back "
                    "from a backup of the run"
                )
            elif mark is None:
                return
            elif mark.kind is MarkKind.PIN:
                kind = PinMark
                advice = f"{mark.of} counts as pinned, until `actorsnap unpin` removes the pin"
            else:
                kind = MetricsMark
                advice = (
                    f"these metrics of {mark.of} do not count. Copy this file back from a backup "
                    "of the run, or delete it and use `actorsnap record`"
                )
            try:
                decode_record(await opened.storage.get(key), kind, key)
            except ObjectNotFound:
                return  # unpinned meanwhile
            except FormatError as error:
                found[key] = f"{error.detail}: {advice}"

        keys = [info.key async for info in opened.storage.list(f"{MANAGER_FOLDER}/")]
        await for_each(keys, check, at_once=MAX_SMALL_READS)
        return dict(sorted(found.items()))

    return (yield from source.perform("verify", perform))


def best(root: Root, metric: str, mode: str) -> Script[tuple[StepInfo | None, list[StepInfo]]]:
    """Returns the step with the least (``"min"``) or greatest (``"max"``) value of a metric, and
    all steps of the run.

    Raises:
        StorageError: A step of the run cannot be read: it may be the best.
    """
    sign = {"min": 1.0, "max": -1.0}.get(mode)
    if sign is None:
        raise UsageError(f'mode must be "min" or "max", not {mode!r}')
    if not isinstance(metric, str) or not metric:
        raise UsageError(f"metric must be a metric's name, not {metric!r}")
    failed: dict[StepName, StorageError] = {}
    infos = yield from steps(root, is_complete=False, failed=failed)
    known = [i for i in infos if not math.isnan(i.metrics.get(metric, math.nan))]
    found = min(known, key=lambda info: sign * info.metrics[metric], default=None)
    for info in infos:
        if info.name in failed:
            if found is not None:
                failed[info.name].add_note(f"the best step that could be read is {found.url}")
            raise failed[info.name]
    return found, infos


def missing_metric(infos: Iterable[StepInfo], metric: str) -> str:
    """Returns why no step is the best by a metric."""
    known = metrics_of(infos)
    if metric in known:
        return f"the metric {metric!r} is NaN in all steps that have it"
    return f"no step has the metric {metric!r}; there are: {', '.join(known) or 'none'}"


def metrics_of(infos: Iterable[StepInfo]) -> list[str]:
    """Returns the names of the metrics that steps have."""
    return sorted({name for info in infos for name in info.metrics})


def _info(
    root: Root,
    listing: Listing,
    name: StepName,
    commit: Commit | FormatError | StorageError | None,
    facts: Facts,
    is_in_run: bool,
) -> StepInfo:
    url = root.url_of(name)
    if not isinstance(commit, Commit):
        state = "unfinished" if commit is None else "damaged"
        state = "newer format" if isinstance(commit, UnsupportedFormat) else state
        state = "not readable" if isinstance(commit, StorageError) else state
        state = "deleting" if commit is None and name in listing.records.intents else state
        pins = facts.pins_at(time.time())
        return StepInfo(step=name.step, url=url, name=name, state=state, pins=pins)
    stored = stored_step(name, commit, facts)
    return StepInfo(
        step=name.step,
        url=url,
        name=name,
        state="committed" if is_in_run else "abandoned",
        created=commit.created_at(),
        metrics=stored.metrics,
        pins=facts.pins_at(time.time()),
        is_durable=root.is_durable(name),
    )


async def _find(
    root: Root, opened: OpenSource, step: int | StepName, *, needs_commit: bool = True
) -> tuple[StepName, Facts]:
    """Returns the snapshot of a step, and its marks.

    Reads the commit objects of that step only, unless there are several.

    Args:
        needs_commit: Raise an error unless the snapshot is committed and readable. If False, no
            commit object is read, except to choose among several snapshots of a step.
    """
    if not isinstance(step, StepName | int) or isinstance(step, bool):
        raise UsageError(f"a step is an integer or a name that steps() returned, not {step!r}")
    listing = await root.look(opened)
    wanted = [name for name in listing.names if step in (name, name.step)]
    if len(wanted) == 1 and not needs_commit:
        (name,) = wanted
    else:
        failed: dict[StepName, StorageError] | None = None if needs_commit else {}
        read = partial(root.read_commits, opened, has_newer=not needs_commit, failed=failed)
        commits = {**await read(wanted), **(failed or {})}
        if len(commits) > 1:
            listing = await root.list(opened)
            commits = {**await read(listing.names), **(failed or {})}
        name = find_step(root.url, listing, commits, step)
        if needs_commit and not isinstance(commits[name], Commit):
            raise UsageError(f"{root.url_of(name)} is damaged")
    facts = await root.marks.read(opened, {name: listing.records.marks.get(name, ())})
    return name, facts[name]


# Pins


def pin(root: Root, step: int | StepName, reason: str, until: Until) -> Script[Pin]:
    """Protects a snapshot from all deletions."""
    reason = check_reason(reason, 'pin(300, "for the paper")')
    for_s = None if until is None else _time_until(until)
    holder = own_holder()

    async def perform(opened: OpenSource) -> Pin:
        name, _ = await _find(root, opened, step)
        return await put_pin(
            opened.storage,
            root.url,
            name,
            reason=reason,
            holder=holder,
            for_s=for_s,
            is_committed=partial(root.is_committed, opened, name),
        )

    return (yield from root.source.perform("pin", perform))


def _time_until(until: object) -> float:
    """Returns seconds."""
    if isinstance(until, datetime):
        if until.tzinfo is None:
            raise UsageError(f"until={until!r} has no time zone: write datetime.now(UTC) + ...")
        until = until - datetime.now(UTC)
    if not isinstance(until, timedelta) or until <= timedelta():
        raise UsageError(f"until={until!r}: write timedelta(days=30), or a datetime to come")
    try:
        datetime.now(UTC) + until
    except OverflowError:
        raise UsageError(
            f"until={until!r} is after the year 9999: a pin without until never expires"
        ) from None
    return until.total_seconds()


def unpin(root: Root, step: int | StepName | Pin, reason: str | None) -> Script[list[Pin]]:
    """Returns the pins that were removed.

    Raises:
        UsageError: The step has no such pin; or it has pins for several reasons, and none is given.
    """

    async def perform(opened: OpenSource) -> list[Pin]:
        if isinstance(step, Pin):
            await opened.storage.delete([step.key])
            return [step]
        name, facts = await _find(root, opened, step, needs_commit=False)
        pins = facts.pins_at(time.time())
        found = [pin for pin in pins if reason in (None, pin.reason)]
        if not found:
            others = f"; it is {', '.join(map(str, pins))}" if pins else ""
            what = "is not pinned" if reason is None else "has no such pin"
            raise UsageError(f"{root.url_of(name)} {what}{others}")
        if len({pin.reason for pin in found}) > 1:
            raise UsageError(
                f"{root.url_of(name)} is {', '.join(map(str, found))}: name the reason of the pin "
                "that should go, with reason=, or --reason on the command line"
            )
        await opened.storage.delete([pin.key for pin in found])
        return found

    return (yield from root.source.perform("unpin", perform))


# Metrics


def record(
    root: Root, step: int | StepName, metrics: object, *, is_saved: bool = True
) -> Script[StepName]:
    """Adds metrics to a snapshot, and returns its name.

    Args:
        is_saved: False: ``step`` is the name of one that is being saved.

    Raises:
        UsageError: There are no metrics, or one has no name or is no number.
    """
    noted = stored_metrics(metrics)
    if not noted or "" in noted:
        raise UsageError(f"record {metrics!r}: name each metric, such as {{'val/loss': 0.25}}")

    async def perform(opened: OpenSource) -> StepName:
        if is_saved or not isinstance(step, StepName):
            name, _ = await _find(root, opened, step)
        else:
            name = step
        await put_metrics(opened.storage, name, noted)
        return name

    return (yield from root.source.perform("record", perform))


def stored_metrics(metrics: object) -> dict[str, float | str]:
    """Returns numbers by name, as JSON holds them.

    Raises:
        UsageError: A value is not a number.
    """
    if not isinstance(metrics, Mapping):
        raise UsageError(f"metrics must be numbers by name, not {outlined(metrics)}")
    return {str(key): _stored_metric(key, metrics[key]) for key in metrics}


def _stored_metric(name: object, value: Any) -> float | str:
    """JSON has no NaN and infinities: they are stored as text."""
    try:
        number = metric_value(value)
    except (TypeError, ValueError, UsageError):
        raise UsageError(f"metric {name!r} must be a number, not {outlined(value)}") from None
    return number if math.isfinite(number) else repr(number)


def outlined(value: object) -> str:
    """Returns the text of a value for a message; of tensors and arrays, what they are."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return reprlib.repr(value)
    kind = type(value).__name__
    return f"a {kind} of shape {tuple(shape)} and dtype {dtype}"
