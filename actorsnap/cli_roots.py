"""Commands for the root of a training run: see ``docs/manager.md``.

The shell never begins a generation, so it cannot stop a running manager. ``prune`` deletes under
the newest generation that exists, as its manager does: intents, then a second look for a later one.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape as quote

from actorsnap import cli_output as output
from actorsnap.cli_calls import (
    JsonOption,
    StorageOption,
    err,
    errors,
    make_source,
    options,
    parse_storage_options,
    progress,
    run,
)
from actorsnap.errors import FormatError, NotASnapshot, UsageError, describe
from actorsnap.format.manifest import Commit
from actorsnap.format.steps import StepName
from actorsnap.manager.body import ManagerBody, ManagerSettings, StepInfo
from actorsnap.manager.keeper import Keeper
from actorsnap.planning.cadence import every
from actorsnap.planning.keeping import KeepAnyOf, KeepPolicy, keep
from actorsnap.runtime import maintenance
from actorsnap.runtime import verify as verification
from actorsnap.runtime.host import Script
from actorsnap.runtime.roots import Root
from actorsnap.runtime.source import MAX_SMALL_READS, OpenSource
from actorsnap.storage.base import for_each

_POLICY_HELP = (
    "What stays; may be repeated. all, last:N, best:METRIC:min|max[:N], every:STEPS, "
    "at:STEP,STEP, newer_than:2d (s, min, h, d), thinned:hourly=N,daily=N,weekly=N,..."
)
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

RootArgument = Annotated[str, typer.Argument(help="The folder or URL of a run.", metavar="ROOT")]
KeepOption = Annotated[
    list[str] | None, typer.Option("--keep", metavar="POLICY", help=_POLICY_HELP)
]
MinValidOption = Annotated[
    int, typer.Option("--min-valid", min=1, help="Verified snapshots that stay in any case.")
]


def register(app: typer.Typer) -> None:
    for command in (steps, prune, best, latest):
        app.command()(command)


def steps(
    root: RootArgument,
    all: Annotated[
        bool,
        typer.Option("--all", help="Also abandoned, damaged, unfinished and half deleted ones."),
    ] = False,
    keep: KeepOption = None,
    min_valid: MinValidOption = 2,
    as_json: JsonOption = False,
    option: StorageOption = None,
) -> None:
    """List the steps of a run and, with --keep, which of them stay and why."""
    with errors():
        policy = parse_policies(keep) if keep else None
        body = _body(root, option)
        infos = run(body.steps(is_complete=True))
        _require(infos, root)
        verdicts = {} if policy is None else run(_judge(body.root, policy, min_valid)).verdicts
        shown = [info for info in infos if all or info.state == "committed"]
        sizes = run(_measure(body.root, [info.name for info in shown]))
        if as_json:
            output.print_json(
                [
                    _step_json(info) | {"nbytes": sizes[info.name]} | _verdict_json(info, verdicts)
                    for info in shown
                ]
            )
            return
        output.print_columns(_row(info, sizes[info.name], verdicts) for info in shown)


def prune(
    root: RootArgument,
    keep: KeepOption = None,
    min_valid: MinValidOption = 2,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Delete. Without it, only show what would go.")
    ] = False,
    as_json: JsonOption = False,
    option: StorageOption = None,
) -> None:
    """Delete the steps of a run that no policy keeps; only with --yes."""
    with errors():
        if not keep:
            raise UsageError("name what stays, for example --keep last:3")
        policy = parse_policies(keep)
        body = _body(root, option)
        infos = {info.name: info for info in run(body.steps(is_complete=True))}
        _require(infos, root)
        plan = run(_judge(body.root, policy, min_valid))
        sizes = run(_measure(body.root, plan.doomed))
        done = run(_judge(body.root, policy, min_valid, is_dry=False)) if yes else plan
        if as_json:
            output.print_json(
                {
                    "dry_run": not yes,
                    "is_superseded": done.is_superseded,
                    "deleted": [infos[name].url for name in done.doomed],
                    "failed": {infos[name].url: why for name, why in done.failed.items()},
                }
            )
        else:
            what = "deleted" if yes else "would go"
            output.print_columns(
                [what, infos[name].url, output.size_text(sizes.get(name, 0))]
                for name in done.doomed
            )
            sys.stdout.flush()
            _summarize(done, sizes, is_dry=not yes)
        for name, why in done.failed.items():
            err.print(f"[red]not deleted[/] {quote(output.visible(f'{name}: {why}'))}")
        if done.is_superseded:
            err.print("nothing was deleted: another job began to save here; look again")
            raise typer.Exit(1)
        if done.failed:
            raise typer.Exit(4)


def best(
    root: RootArgument,
    metric: Annotated[str, typer.Argument(help="A metric's name.")],
    max: Annotated[bool, typer.Option("--max", help="The greatest value, not the least.")] = False,
    as_json: JsonOption = False,
    option: StorageOption = None,
) -> None:
    """Print the URL of the step with the best value of a metric. Exit code 3 if none has it."""
    with errors():
        body = _body(root, option)
        found = run(body.best(metric, "max" if max else "min"))
        if found is None:
            infos = run(body.steps(is_complete=False))
            _require(infos, root)
            known = sorted({name for info in infos for name in info.metrics})
            _give_up(f"no step has the metric {metric!r}; there are: {', '.join(known) or 'none'}")
        else:
            _print_one(found, as_json)


def latest(
    root: RootArgument,
    valid: Annotated[
        bool, typer.Option("--valid", help="The newest that `verify` finds intact.")
    ] = False,
    as_json: JsonOption = False,
    option: StorageOption = None,
) -> None:
    """Print the URL of the newest step of a run. Exit code 3 if there is none."""
    with errors():
        body = _body(root, option)
        found = run(body.latest_valid("quick") if valid else body.latest())
        if found is None:
            what = "intact " if valid else ""
            _give_up(f"{body.root.url} has no {what}step that a manager saved")
        else:
            _print_one(found, as_json)


def verify_all(root: str, *, full: bool, as_json: bool, option: list[str] | None) -> None:
    """Checks every snapshot in a folder. Exit code 1 if one is damaged, 3 if there is none."""
    found = run(maintenance.find_snapshots(make_source(root, option)))
    checked = [_check(root, name, commit, full, option) for name, commit in found.items()]
    if as_json:
        output.print_json(
            [
                {"name": each.name, "state": each.state, "problems": each.problems}
                for each in checked
            ]
        )
    else:
        output.print_columns([each.name, each.state, *each.details] for each in checked)
    if any(each.state == "damaged" for each in checked):
        raise typer.Exit(1)
    if not any(each.state == "ok" for each in checked):
        _give_up(f"{root} has no committed snapshot")


@dataclass(frozen=True, slots=True)
class _Checked:
    """The result of checking one snapshot."""

    name: str
    state: Literal["ok", "damaged", "unfinished"]
    details: Sequence[str] = ()
    problems: Sequence[str] = ()


def _check(
    root: str, name: str, commit: Commit | FormatError | None, full: bool, option: list[str] | None
) -> _Checked:
    if commit is None:
        return _Checked(name, "unfinished")
    source = make_source(f"{root.rstrip('/')}/{name}", option)
    try:
        with progress(f"verifying {name}") as update:
            report = run(
                verification.verify(source, level="full", progress=update)
                if full
                else verification.verify(source, level="quick")
            )
    except NotASnapshot:  # deleted meanwhile
        return _Checked(name, "unfinished")
    except FormatError as error:
        return _Checked(name, "damaged", [str(error)], [str(error)])
    problems = [str(problem) for problem in report.problems]
    if problems:
        more = [f"and {len(problems) - 1} more"] if len(problems) > 1 else []
        return _Checked(name, "damaged", [problems[0], *more], problems)
    objects = output.count_of(report.num_objects, "data object", "data objects")
    compared = [f"{output.size_text(report.nbytes)} compared with checksums"] if full else []
    return _Checked(name, "ok", [objects, *compared])


# Policies


def parse_policies(texts: Iterable[str]) -> KeepPolicy:
    """Returns the policy that keeps each step that one of the texts keeps.

    Raises:
        UsageError: A text is no policy.
    """
    policies = [_parse_policy(text) for text in texts]
    return policies[0] if len(policies) == 1 else KeepAnyOf(tuple(policies))


def _parse_policy(text: str) -> KeepPolicy:
    kind, _, arguments = text.partition(":")
    parse = _PARSERS.get(kind)
    if parse is None:
        raise UsageError(f"--keep {text}: no such policy; there are {', '.join(_PARSERS)}")
    try:
        return parse(arguments)
    except ValueError as error:
        raise UsageError(f"--keep {text}: write {_EXAMPLES[kind]}") from error


def _parse_all(arguments: str) -> KeepPolicy:
    if arguments:
        raise ValueError(arguments)
    return keep.all()


def _parse_best(arguments: str) -> KeepPolicy:
    found = re.fullmatch(r"(.+):(min|max)(?::([0-9]+))?", arguments)
    if found is None:
        raise ValueError(arguments)
    mode: Literal["min", "max"] = "min" if found[2] == "min" else "max"
    return keep.best(found[1], mode, n=int(found[3] or 1))


def _parse_newer_than(arguments: str) -> KeepPolicy:
    found = re.fullmatch(r"([0-9.]+)(s|min|h|d)", arguments)
    if found is None:
        raise ValueError(arguments)
    return keep.newer_than(timedelta(seconds=float(found[1]) * _SECONDS[found[2]]))


def _parse_thinned(arguments: str) -> KeepPolicy:
    numbers: dict[str, int] = {}
    for part in arguments.split(","):
        period, _, number = part.partition("=")
        if period not in ("hourly", "daily", "weekly", "monthly", "yearly"):
            raise ValueError(period)
        numbers[period] = int(number)
    return keep.thinned(**numbers)


_PARSERS: Mapping[str, Callable[[str], KeepPolicy]] = {
    "all": _parse_all,
    "last": lambda text: keep.last(int(text)),
    "best": _parse_best,
    "every": lambda text: keep.every(steps=int(text)),
    "at": lambda text: keep.at([int(step) for step in text.split(",")]),
    "newer_than": _parse_newer_than,
    "thinned": _parse_thinned,
}
_EXAMPLES = {
    "all": "all",
    "last": "last:3",
    "best": "best:loss:min or best:accuracy:max:2",
    "every": "every:1000",
    "at": "at:500,1000",
    "newer_than": "newer_than:2d (or s, min, h)",
    "thinned": "thinned:hourly=24,daily=7",
}


# Judging


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """The result of a pass.

    Attributes:
        verdicts: Whether each judged step stays, with the reasons.
        doomed: Steps that are deleted or, in a dry run, would be.
        failed: Reasons why others were not deleted.
        is_superseded: A later run began meanwhile, so nothing was deleted.
    """

    verdicts: Mapping[StepName, tuple[bool, Sequence[str]]]
    doomed: Sequence[StepName]
    failed: Mapping[StepName, str]
    is_superseded: bool


def _judge(
    root: Root, policy: KeepPolicy, min_valid: int, *, is_dry: bool = True
) -> Script[_Outcome]:
    """Judges the steps of the current run and, unless ``is_dry``, deletes what goes."""
    listing = yield from root.source.perform("list", root.list)
    keeper = Keeper(root, policy, min_valid)
    keeper.generation = listing.newest_generation
    # Its manager may still need what it continued.
    keeper.restored = listing.parents.get(listing.newest_generation)
    verdicts, result = yield lambda _: keeper.run_pass(None, dry_run=is_dry)
    found = {verdict.name: (verdict.keeps, verdict.reasons) for verdict in verdicts}
    judged = {verdict.name for verdict in verdicts if not verdict.keeps}
    found |= {name: (True, (f"damaged: {why}",)) for name, why in keeper.damaged.items()}
    return _Outcome(
        verdicts=found,
        doomed=[name for name in found if name in result.deleted],
        failed={name: describe(error) for name, error in result.failed.items()},
        is_superseded=keeper.is_superseded or not judged <= {*result.deleted, *result.failed},
    )


def _measure(root: Root, names: Sequence[StepName]) -> Script[dict[StepName, int]]:
    """Returns the bytes that each snapshot occupies."""

    async def perform(opened: OpenSource) -> dict[StepName, int]:
        sizes: dict[StepName, int] = {}

        async def add(name: StepName) -> None:
            sizes[name] = sum([info.size async for info in opened.storage.list(f"{name}/")])

        await for_each(names, add, at_once=MAX_SMALL_READS)
        return sizes

    return (yield from root.source.perform("list", perform))


# Output


def _body(root: str, option: list[str] | None) -> ManagerBody:
    return ManagerBody(
        ManagerSettings(
            root=root,
            app_state=None,
            save=every.last(),
            keep=keep.all(),
            min_valid=1,
            max_pending=1,
            replicated=(),
            stage="eager",
            metadata=None,
            storage_options=parse_storage_options(option),
            options=options(),
            group=None,
            store=None,
        )
    )


def _require(infos: Iterable[object], root: str) -> None:
    if not any(True for _ in infos):
        _give_up(f"{root} has no step that a manager saved; `actorsnap ls` lists other snapshots")


def _give_up(text: str) -> None:
    err.print(f"[red]error:[/] {quote(output.visible(text))}")
    raise typer.Exit(3)


def _print_one(info: StepInfo, as_json: bool) -> None:
    if as_json:
        output.print_json(_step_json(info))
    else:
        output.write_lines([info.url])


def _row(
    info: StepInfo, nbytes: int, verdicts: Mapping[StepName, tuple[bool, Sequence[str]]]
) -> list[str]:
    metrics = [f"{name}={value:.6g}" for name, value in info.metrics.items()]
    is_committed = info.state in ("committed", "abandoned")
    cells = [
        str(info.name),
        f"{output.age_text(time.time() - info.created_s)} old" if is_committed else "-",
        ", ".join(metrics) or "-",
        output.size_text(nbytes),
        info.state,
    ]
    if verdicts:
        keeps, reasons = _verdict(info, verdicts)
        cells.append(f"stays: {', '.join(reasons)}" if keeps else "goes: no policy keeps it")
    return cells


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
    elif done.doomed:
        err.print(f"{number}, {total}; --yes deletes")
    else:
        err.print("nothing would go")


def _step_json(info: StepInfo) -> dict[str, Any]:
    is_committed = info.state in ("committed", "abandoned")
    created = datetime.fromtimestamp(info.created_s, UTC).isoformat() if is_committed else None
    return {
        "step": info.step,
        "generation": info.name.generation,
        "name": str(info.name),
        "url": info.url,
        "state": info.state,
        "created": created,
        # JSON has no NaN and infinities.
        "metrics": {
            name: value if math.isfinite(value) else repr(value)
            for name, value in info.metrics.items()
        },
    }


def _verdict_json(
    info: StepInfo, verdicts: Mapping[StepName, tuple[bool, Sequence[str]]]
) -> dict[str, Any]:
    if not verdicts:
        return {}
    keeps, reasons = _verdict(info, verdicts)
    return {"keeps": keeps, "reasons": [*reasons]}
