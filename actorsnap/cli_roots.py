# SPDX-License-Identifier: Apache-2.0
"""Commands for the root of a training run: see ``docs/manager.md``.

The shell never begins a generation, so it cannot stop a running manager. ``prune`` deletes under
the newest generation that exists, as its manager does: intents, then a second look for a later one.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape as quote

from actorsnap import cli_output as output
from actorsnap.cli_calls import (
    JsonOption,
    NothingFound,
    StorageOption,
    err,
    errors,
    opened_root,
    run,
    why_unfinished,
)
from actorsnap.cli_policies import parse_policies, parse_time
from actorsnap.errors import ActorSnapError, StorageError, UsageError, describe
from actorsnap.format.manifest import Commit
from actorsnap.format.steps import StepName
from actorsnap.manager import looking
from actorsnap.manager.inbox import put_request
from actorsnap.manager.keeper import MAX_PASS_S, Keeper
from actorsnap.manager.results import StepInfo
from actorsnap.planning.keeping import KeepPolicy, StoredStep, kept_metrics
from actorsnap.planning.marks import Pin
from actorsnap.runtime import reading
from actorsnap.runtime.host import Script
from actorsnap.runtime.roots import Root, damage_of
from actorsnap.runtime.source import MAX_SMALL_READS, OpenSource
from actorsnap.storage.base import for_each, size_below

_POLICY_HELP = (
    "Steps to keep. Repeatable. One of all, last:N, best:METRIC:min|max[:N], every:STEPS, "
    "at:STEP,STEP, newer_than:2d (s, min, h, d), thinned:hourly=N,daily=N,weekly=N,..."
)

RootArgument = Annotated[str, typer.Argument(help="The folder or URL of a run.", metavar="ROOT")]
KeepOption = Annotated[
    list[str] | None, typer.Option("--keep", metavar="POLICY", help=_POLICY_HELP)
]
MinValidOption = Annotated[
    int,
    typer.Option(
        "--min-valid",
        min=1,
        help="Minimum number of steps to keep whose objects all exist, with the right sizes. If "
        "there are fewer, nothing is deleted.",
    ),
]

_VERIFIED = re.compile("^(newest|one of [0-9]+|only [0-9]+ of [0-9]+) verified$")


def register(app: typer.Typer) -> None:
    for command in (steps, prune, best, latest, pin, unpin, record, save_now):
        app.command()(command)


def steps(
    root: RootArgument,
    all: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Include abandoned, unfinished and half-deleted steps, those whose commit object "
            "is damaged, and steps saved by a newer release. Checks no data: see verify --all.",
        ),
    ] = False,
    keep: KeepOption = None,
    min_valid: Annotated[
        int | None,
        typer.Option("--min-valid", min=1, help="As for prune. Needs --keep. Default: 2."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="As for prune. Needs --keep.")] = False,
    as_json: JsonOption = False,
    option: StorageOption = None,
) -> None:
    """List the steps of a run. With --keep, show which steps would stay, and why."""
    with errors():
        if not keep and (full or min_valid is not None):
            raise UsageError(f"{'--full' if full else '--min-valid'} needs --keep")
        policy = parse_policies(keep) if keep else None
        with opened_root(root, option) as opened:
            # A newer release may mean more by a step: no policy judges this run.
            has_newer = all and policy is None
            failed: dict[StepName, StorageError] = {}
            infos = run(looking.steps(opened, is_complete=True, has_newer=has_newer, failed=failed))
            _require(infos, opened)
            if not all:
                _require_committed(infos, opened)
            if policy is not None:
                _require_metrics(infos, policy)
            judged = None
            if policy is not None:
                level = "full" if full else "quick"
                keeper = Keeper(opened, policy, min_valid or 2, level=level)
                judged = run(_judge(keeper, opened, policy))
            verdicts = {} if judged is None else judged.verdicts
            # What cannot be read may be committed.
            shown = [info for info in infos if all or info.state in ("committed", "not readable")]
            sizes = run(_measure(opened, [info.name for info in shown]))
        if as_json:
            output.print_json(
                [
                    _step_json(info)
                    | {"nbytes": sizes.get(info.name)}
                    | ({"detail": str(failed[info.name])} if info.name in failed else {})
                    | _verdict_json(info, verdicts)
                    for info in shown
                ]
            )
        else:
            output.print_columns(
                _row(info, sizes.get(info.name), failed.get(info.name), verdicts) for info in shown
            )
        if failed or (judged is not None and judged.failed):
            raise typer.Exit(4)


def prune(
    root: RootArgument,
    keep: KeepOption = None,
    min_valid: MinValidOption = 2,
    full: Annotated[
        bool,
        typer.Option(
            "--full", help="For --min-valid, verify all checksums. Without it: sizes only."
        ),
    ] = False,
    yes: Annotated[
        bool,
        typer.Option("--yes", "-y", help="Delete. Without --yes, only list the steps to delete."),
    ] = False,
    as_json: JsonOption = False,
    option: StorageOption = None,
) -> None:
    """Delete the steps of a run that no policy keeps. Needs --yes."""
    with errors():
        if not keep:
            raise UsageError("name the steps to keep, for example --keep last:3")
        policy = parse_policies(keep)
        with opened_root(root, option) as opened:
            infos = run(looking.steps(opened, is_complete=True, failed={}))
            _require(infos, opened)
            if {info.state for info in infos} == {"unfinished"}:
                _require_committed(infos, opened)
            _require_metrics(infos, policy)
            keeper = Keeper(opened, policy, min_valid, level="full" if full else "quick")
            plan = run(_judge(keeper, opened, policy))
            sizes = run(_measure(opened, plan.doomed))
            done = plan
            if yes:
                # A job may save meanwhile: what was not measured stays.
                policy = policy | _KeepOthers(frozenset(plan.doomed))
                done = run(_judge(keeper, opened, policy, is_dry=False))
            kept = {name: f"damaged: {why}" for name, why in keeper.damaged.items()}
            kept |= {} if done is plan else _kept(plan, done)
        if as_json:
            output.print_json(
                {
                    "dry_run": not yes,
                    "is_superseded": done.is_superseded,
                    "deleted" if yes else "would_delete": [*map(opened.url_of, done.doomed)],
                    "kept": {opened.url_of(name): why for name, why in kept.items()},
                    "left": [*map(opened.url_of, done.left)],
                    "failed": {opened.url_of(name): why for name, why in done.failed.items()},
                }
            )
        else:
            what = "deleted" if yes else "would delete"
            output.print_columns(
                [what, opened.url_of(name), _size_text(sizes.get(name))] for name in done.doomed
            )
            sys.stdout.flush()
            if plan.doomed:
                _summarize(done, sizes, is_dry=not yes)
            else:
                words = ["actorsnap", "steps", output.one_line(root)]
                words += [word for each in keep for word in ("--keep", each)]
                words += ["--min-valid", str(min_valid)] * (min_valid != 2) + ["--full"] * full
                err.print(f"nothing to delete; `{quote(shlex.join(words))}` shows why")
        for name, why in kept.items():
            err.print(f"kept {quote(output.visible(f'{name}: {why}'))}")
        if done.is_superseded:
            rest = "the others were not" if done.doomed else "nothing was"
            err.print(f"{rest} deleted: another job has begun to save here; run the command again")
            raise typer.Exit(5)
        gone = {*plan.doomed}.difference(done.doomed, done.failed, done.left, kept)
        if gone:
            number = output.count_of(len(gone), "step was", "steps were")
            err.print(f"{number} already deleted, by the job")
        if done.failed and not yes:
            for name, why in done.failed.items():
                err.print(f"kept {quote(output.visible(f'{name}: {why}'))}")
            err.print(f"[red]{output.count_of(len(done.failed), 'step', 'steps')} not readable[/]")
            raise typer.Exit(4)
        if done.failed:  # logged with the reasons
            number = output.count_of(len(done.failed), "step was", "steps were")
            err.print(f"[red]{number} not deleted[/]")
            raise typer.Exit(4)
        if done.left:
            number = output.count_of(len(done.left), "step is", "steps are")
            err.print(f"{number} left after {MAX_PASS_S:.0f} s; run the command again to continue")
            raise typer.Exit(5)


def best(
    root: RootArgument,
    metric: Annotated[str, typer.Argument(help="Name of the metric.", metavar="METRIC")],
    min: Annotated[bool, typer.Option("--min", help="The smallest value is the best.")] = False,
    max: Annotated[bool, typer.Option("--max", help="The largest value is the best.")] = False,
    as_json: JsonOption = False,
    option: StorageOption = None,
) -> None:
    """Print the URL of the step with the best value of a metric. Exit code 3 if no step has it."""
    with errors():
        if min == max:
            raise UsageError(
                f"best: pass --min if the smallest {metric} is the best, or --max if the largest is"
            )
        with opened_root(root, option) as opened:
            found, infos = run(looking.best(opened, metric, "max" if max else "min"))
            if found is None:
                _require(infos, opened)
        if found is None:
            _raise_unknown(infos, metric)
        _print_one(found, as_json)


def latest(
    root: RootArgument,
    valid: Annotated[
        bool,
        typer.Option("--valid", help="Newest step whose objects all exist, with the right sizes."),
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Like --valid, but also verify all checksums.")
    ] = False,
    as_json: JsonOption = False,
    option: StorageOption = None,
) -> None:
    """Print the URL of the newest step of a run. Exit code 3 if there is none."""
    with errors():
        damaged: dict[StepName, str] = {}
        with opened_root(root, option) as opened:
            level = "full" if full else "quick"
            found = run(
                looking.latest_valid(opened, level, damaged)
                if valid or full
                else looking.latest(opened)
            )
            if found is None:
                infos = run(looking.steps(opened, is_complete=True, failed={}))
                _require(infos, opened)
                _require_committed(infos, opened)
                command = f"verify --all{' --full' * full} {shlex.quote(output.one_line(root))}"
                raise NothingFound(
                    f"{opened.url} has no intact step: `actorsnap {command}` lists the damage"
                )
            skipped = [
                each
                for each in _skipped(opened, found.name, damaged)
                if valid or full or each["state"] != "unfinished"  # maybe a save in progress
            ]
        if as_json:
            output.print_json({**_step_json(found), "skipped": skipped})
        else:
            output.write_lines([found.url])
        for each in skipped:
            text = f"skipped {each['name']}, which is {each['state']}: {each['detail']}"
            err.print(quote(output.visible(text)))


def _skipped(
    root: Root, found: StepName, damaged: Mapping[StepName, str]
) -> Iterator[dict[str, str]]:
    """Yields the steps after the newest one that was found, with the reasons."""
    for name, commit in run(looking.newer(root, found)).items():
        url = root.url_of(name)
        if commit is None:
            state, detail = why_unfinished(root.snapshot(name), url)
        else:
            what = damaged.get(name) if isinstance(commit, Commit) else damage_of(commit)
            if what is None:
                continue  # committed meanwhile
            command = f"verify --full {shlex.quote(output.one_line(url))}"
            state, detail = "damaged", f"{what}. `actorsnap {command}` shows all damage"
        yield {"name": str(name), "state": state, "detail": detail}


def save_now(
    root: RootArgument,
    reason: Annotated[
        str, typer.Option("--reason", help="Reason to store with the snapshot.")
    ] = "save-now",
    as_json: JsonOption = False,
    option: StorageOption = None,
) -> None:
    """Ask the job that saves to ROOT to save soon. Its manager needs watch_requests_s."""
    with errors(), opened_root(root, option) as opened:
        infos = run(looking.steps(opened, is_complete=True, has_newer=True, failed={}))
        _require(infos, opened)
        run(opened.source.perform("request", lambda source: put_request(source, reason)))
        if as_json:
            output.print_json({"root": opened.url, "reason": reason})
        err.print(
            "the job saves after its next check for requests, if its CheckpointManager has "
            "watch_requests_s"
        )


StepArgument = Annotated[
    str, typer.Argument(help="A step, or a name as `steps --all` prints it.", metavar="STEP")
]


def pin(
    root: RootArgument,
    step: StepArgument,
    reason: Annotated[
        str, typer.Option("--reason", help="Reason, shown in listings. unpin selects pins by it.")
    ],
    until: Annotated[
        str | None,
        typer.Option(
            "--until", help="Lifetime of the pin, such as 30d (s, min, h, d). Default: forever."
        ),
    ] = None,
    as_json: JsonOption = False,
    option: StorageOption = None,
) -> None:
    """Protect a step from deletion."""
    with errors(), opened_root(root, option) as opened:
        if not reason.strip():
            raise UsageError("--reason is empty: write for example --reason 'for the paper'")
        pinned = run(looking.pin(opened, _parse_step(step), reason, _parse_time(until)))
        if as_json:
            output.print_json(_pin_json(pinned))
        else:
            output.print_columns([[str(pinned.name), str(pinned)]])


def unpin(
    root: RootArgument,
    step: StepArgument,
    reason: Annotated[
        str | None,
        typer.Option(
            "--reason", help="Remove only pins with this reason. Required if reasons differ."
        ),
    ] = None,
    as_json: JsonOption = False,
    option: StorageOption = None,
) -> None:
    """Remove the pins of a step."""
    with errors(), opened_root(root, option) as opened:
        removed = run(looking.unpin(opened, _parse_step(step), reason))
        if as_json:
            output.print_json([_pin_json(each) for each in removed])
        else:
            output.print_columns([str(each.name), f"no longer {each}"] for each in removed)


def record(
    root: RootArgument,
    step: StepArgument,
    metrics: Annotated[
        list[str], typer.Argument(help="Metrics, such as val/loss=0.25.", metavar="NAME=VALUE...")
    ],
    as_json: JsonOption = False,
    option: StorageOption = None,
) -> None:
    """Add metrics to a saved step."""
    with errors(), opened_root(root, option) as opened:
        numbers = dict(map(_parse_metric, metrics))
        name = run(looking.record(opened, _parse_step(step), numbers))
        if as_json:
            output.print_json(looking.stored_metrics(numbers))
        else:
            output.print_columns([[str(name), _metrics_text(numbers)]])


def _parse_step(text: str) -> int | StepName:
    name = StepName.parse(text)
    if name is not None:
        return name
    if not re.fullmatch("[0-9]{1,19}", text):
        raise UsageError(f"{text!r} is not a step: write 500, or step-0000000500.g2")
    return int(text)


def _parse_time(text: str | None) -> timedelta | None:
    if text is None:
        return None
    try:
        time = parse_time(text)
    except ValueError as error:
        raise UsageError(f"--until {text}: write 30d (or s, min, h)") from error
    try:
        datetime.now(UTC) + time
    except OverflowError as error:
        raise UsageError(
            f"--until {text} is after the year 9999: a pin without --until never expires"
        ) from error
    return time


def _parse_metric(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    try:
        if name:
            return name, float(value)
    except ValueError:
        pass
    raise UsageError(f"{text!r} is not a metric: write val/loss=0.25")


# Judging


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """The result of a pass.

    Attributes:
        verdicts: Whether each judged step stays, with the reasons.
        doomed: Steps that are deleted or, in a dry run, would be.
        failed: Reasons why others were not deleted.
        spared: Reasons why others stay, although no policy keeps them.
        left: Others that the pass had no time to delete.
        is_superseded: A later run began meanwhile, so the others were not deleted.
    """

    verdicts: Mapping[StepName, tuple[bool, Sequence[str]]]
    doomed: Sequence[StepName]
    failed: Mapping[StepName, str]
    spared: Mapping[StepName, str]
    left: Sequence[StepName]
    is_superseded: bool


@dataclass(frozen=True, slots=True)
class _KeepOthers(KeepPolicy):
    """Keeps every step except those that an earlier pass chose to delete."""

    doomed: frozenset[StepName]

    def judge(self, steps: Sequence[StoredStep]) -> dict[StepName, str]:
        return {step.name: "new" for step in steps if step.name not in self.doomed}

    def __repr__(self) -> str:  # for the record of a deletion
        return "what was saved meanwhile"


def _kept(plan: _Outcome, done: _Outcome) -> dict[StepName, str]:
    """Returns the steps of ``plan`` that stay after all, with the reasons."""
    judged = {name: done.verdicts[name] for name in plan.doomed if name in done.verdicts}
    kept = {name: ", ".join(reasons) for name, (keeps, reasons) in judged.items() if keeps}
    return {**kept, **done.spared}


def _judge(
    keeper: Keeper, root: Root, policy: KeepPolicy, *, is_dry: bool = True
) -> Script[_Outcome]:
    """Judges the steps of the current run and, unless ``is_dry``, deletes what goes."""
    listing = yield from root.source.perform("list", root.look)
    keeper.end_run()  # of the pass before: this one is under the newest generation
    keeper.generation = listing.newest_generation
    verdicts, result = yield lambda _: keeper.run_pass(policy, dry_run=is_dry)
    checked = r"\g<0>" if keeper.level == "full" else r"\g<0> (sizes)"
    found = {
        verdict.name: (verdict.keeps, [_VERIFIED.sub(checked, why) for why in verdict.reasons])
        for verdict in verdicts
    }
    found |= {name: (True, [f"damaged: {why}"]) for name, why in keeper.damaged.items()}

    async def look(opened: OpenSource) -> dict[StepName, str]:
        spared = {name: ", ".join(map(str, pins)) for name, pins in result.spared.items()}
        for name, why in spared.items():
            # Without a pin, it changed: another process has deleted it, or saved it again.
            if not why and await root.is_committed(opened, name):
                spared[name] = "it was saved again meanwhile"
        return {name: why for name, why in spared.items() if why}

    spared = {}
    if result.spared and not keeper.is_superseded:
        spared = yield from root.source.perform("list", look)
    return _Outcome(
        verdicts=found,
        doomed=[name for name in found if name in result.deleted],
        failed={name: describe(error) for name, error in result.failed.items()},
        spared=spared,
        left=result.left,
        is_superseded=keeper.is_superseded,
    )


def _measure(root: Root, names: Sequence[StepName]) -> Script[dict[StepName, int]]:
    """Returns the bytes that each snapshot occupies: by one listing, if there are many. Leaves out
    what cannot be listed.
    """

    async def perform(opened: OpenSource) -> dict[StepName, int]:
        if len(names) > MAX_SMALL_READS:
            sizes = dict.fromkeys(names, 0)
            with suppress(StorageError):
                async for info in opened.storage.list("step-"):
                    name = StepName.parse(info.key.partition("/")[0])
                    if name in sizes:
                        sizes[name] += info.size
                return sizes
        sizes = {}

        async def measure(name: StepName) -> None:
            with suppress(StorageError):
                sizes[name] = await size_below(opened.storage, f"{name}/")

        await for_each(names, measure, at_once=MAX_SMALL_READS)
        return sizes

    return (yield from root.source.perform("list", perform))


# Output


def _require(infos: Iterable[object], root: Root) -> None:
    if any(True for _ in infos):
        return
    with suppress(ActorSnapError):
        run(reading.load_commit(root.source))
        raise NothingFound(f"{root.url} is a snapshot, not the folder of a run: name that folder")
    raise NothingFound(
        f"{root.url} has no step that a manager saved; `actorsnap ls` lists other snapshots"
    )


def _require_committed(infos: Sequence[StepInfo], root: Root) -> None:
    if not any(info.state in ("committed", "not readable") for info in infos):
        others = output.count_of(len(infos), "other step", "other steps")
        raise NothingFound(
            f"{root.url} has no committed step, only {others}; `actorsnap steps --all` lists them"
        )


def _require_metrics(infos: Sequence[StepInfo], policy: KeepPolicy) -> None:
    """Raises ``NothingFound`` for a misspelled metric: its policy would keep every step."""
    if any(info.state == "not readable" for info in infos):
        return  # only these may have it
    known = looking.metrics_of(infos)
    for metric in kept_metrics(policy):
        if metric not in known:
            _raise_unknown(infos, metric)


def _raise_unknown(infos: Sequence[StepInfo], metric: str) -> NoReturn:
    raise NothingFound(looking.missing_metric(infos, metric))


def _print_one(info: StepInfo, as_json: bool) -> None:
    if as_json:
        output.print_json(_step_json(info))
    else:
        output.write_lines([info.url])


def _row(
    info: StepInfo,
    nbytes: int | None,
    failure: StorageError | None,
    verdicts: Mapping[StepName, tuple[bool, Sequence[str]]],
) -> list[str]:
    created = info.created
    cells = [
        str(info.name),
        "-" if created is None else f"{output.age_text(time.time() - created.timestamp())} old",
        _metrics_text(info.metrics) or "-",
        _size_text(nbytes),
        info.state if failure is None or info.name in verdicts else f"{info.state}: {failure}",
    ]
    if verdicts:
        keeps, reasons = _verdict(info, verdicts)  # with the pins
        cells.append(f"stays: {', '.join(reasons)}" if keeps else "goes: no policy keeps it")
    elif info.pins:
        cells.append(", ".join(map(str, info.pins)))
    return cells


def _size_text(nbytes: int | None) -> str:
    return "-" if nbytes is None else output.size_text(nbytes)


def _metrics_text(metrics: Mapping[str, float]) -> str:
    return ", ".join([f"{name}={value:.6g}" for name, value in metrics.items()])


def _verdict(
    info: StepInfo, verdicts: Mapping[StepName, tuple[bool, Sequence[str]]]
) -> tuple[bool, Sequence[str]]:
    """A step that is not of the run, or not committed, is never deleted by a policy."""
    return verdicts.get(info.name) or (True, [f"{info.state}: not judged"])


def _summarize(done: _Outcome, sizes: Mapping[StepName, int], *, is_dry: bool) -> None:
    total = output.size_text(sum(sizes.get(name, 0) for name in done.doomed))
    number = output.count_of(len(done.doomed), "step", "steps")
    if not is_dry:
        err.print(f"deleted {number}, {total}")
    else:
        err.print(f"nothing was deleted: --yes deletes {number}, {total}")


def _step_json(info: StepInfo) -> dict[str, Any]:
    created = info.created
    return {
        "step": info.step,
        "generation": info.name.generation,
        "name": str(info.name),
        "url": info.url,
        "state": info.state,
        "created": None if created is None else _time_json(created.timestamp()),
        # JSON has no NaN and infinities.
        "metrics": {
            name: value if math.isfinite(value) else repr(value)
            for name, value in info.metrics.items()
        },
        "pins": [_pin_json(each) for each in info.pins],
    }


def _time_json(time_s: float) -> str | float | None:
    """Returns the seconds if the year is not in 1 to 9999."""
    try:
        return datetime.fromtimestamp(time_s, UTC).isoformat().replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return time_s if math.isfinite(time_s) else None


def _pin_json(pin: Pin) -> dict[str, Any]:
    until = None if pin.until_s is None else _time_json(pin.until_s)
    return {"name": str(pin.name), "reason": pin.reason, "holder": pin.holder, "until": until}


def _verdict_json(
    info: StepInfo, verdicts: Mapping[StepName, tuple[bool, Sequence[str]]]
) -> dict[str, Any]:
    if not verdicts:
        return {}
    keeps, reasons = _verdict(info, verdicts)
    return {"keeps": keeps, "reasons": [*reasons]}
