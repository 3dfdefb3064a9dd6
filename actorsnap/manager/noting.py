# SPDX-License-Identifier: Apache-2.0
"""The metadata that a manager stores with a snapshot, and the metrics that it misses in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorsnap.errors import ActorSnapError, UsageError, describe
from actorsnap.format.manifest import Commit
from actorsnap.format.steps import StepName
from actorsnap.log import Log
from actorsnap.manager.looking import outlined, stored_metrics
from actorsnap.manager.results import Metrics
from actorsnap.planning.cadence import Improvements, SavePolicy, watched_metrics
from actorsnap.planning.keeping import KeepPolicy, kept_metrics
from actorsnap.runtime.host import Script
from actorsnap.runtime.location import check_metadata
from actorsnap.runtime.roots import METADATA_KEY, Root

logger = Log(__name__)


class MetricNames:
    """Warns of metrics that a policy names and does not get, once of each.

    A metric of ``every.improvement`` that the first metrics lack is misspelled. One of
    ``keep.best`` may be measured at some steps only; it is missed if these are not saved.
    """

    def __init__(self, url: str, save: SavePolicy, keep: KeepPolicy) -> None:
        self._url = url
        self._watched = dict.fromkeys(watched_metrics(save))
        self._kept = dict.fromkeys(kept_metrics(keep))
        self._dropped: dict[str, int] = {}  # the latest step with it, since the last save

    def look_at_step(self, metrics: Mapping[str, object]) -> None:
        """Looks for the metrics of the save policy. Costs next to nothing after the first."""
        if self._watched and metrics:
            for name in [*self._watched]:
                self._watched.pop(name)
                if name not in metrics:
                    logger.warning(
                        "%s: no metric %r in metrics=; there are: %s. every.improvement saves "
                        "nothing without it",
                        *(self._url, name, ", ".join(map(str, metrics))),
                    )

    def look_at_unsaved(self, step: int, metrics: Metrics) -> None:
        """Notes metrics of a step that is not saved. Does not call a callable."""
        if self._kept and isinstance(metrics, Mapping):
            for name in self._kept:
                if name in metrics:
                    self._dropped[name] = step

    def look_at_save(self, step: int, metrics: Mapping[str, object]) -> None:
        """Looks for the metrics of both policies."""
        self.look_at_step(metrics)
        for name, unsaved in self._dropped.items():
            # Most loops pass the same metrics at each step: nothing is missed.
            if name not in metrics:
                self._kept.pop(name)
                logger.warning(
                    "%s: the metrics of step %d are dropped: step %d is not saved, and step %d is "
                    "saved without %r. Pass it at a step that is saved, or use manager.record",
                    *(self._url, unsaved, unsaved, step, name),
                )
        self._dropped.clear()


def stored_metadata(
    reason: str,
    metrics: Metrics,
    common: Mapping[str, Any] | None,
    metadata: Mapping[str, Any] | None,
    best: Mapping[str, float],
) -> dict[str, Any]:
    """Returns the caller's metadata with the manager's entry.

    Args:
        common: The manager's, to which ``metadata`` is added.
        best: Values for ``recall_best``.

    Raises:
        UsageError: Bad metadata, or a metric that is not a number.
    """
    found = metrics() if callable(metrics) else metrics
    if not isinstance(found, Mapping | None):
        raise UsageError(f"metrics must be numbers by name, not {outlined(found)}")
    merged = {**(common or {}), **check_metadata(metadata)}
    if METADATA_KEY in merged:
        raise UsageError(f"metadata[{METADATA_KEY!r}] is the manager's own")
    noted: dict[str, Any] = {"reason": reason}
    if found:
        noted["metrics"] = stored_metrics(found)
    if best:
        noted["best"] = dict(best)
    return {**merged, METADATA_KEY: noted}


def recall_best(root: Root, name: StepName, improvements: Improvements) -> Script[None]:
    """Continues with the best values of the run that saved ``name``. Failures are logged."""
    try:
        commits = yield from root.source.perform(
            "read the best metrics", lambda opened: root.read_commits(opened, [name])
        )
    except ActorSnapError as error:
        logger.warning("%s: the best metrics are unknown: %s", root.url, describe(error))
        return
    commit = commits.get(name)
    noted = commit.metadata.get(METADATA_KEY) if isinstance(commit, Commit) else None
    best = noted.get("best") if isinstance(noted, dict) else None
    improvements.best = {
        str(key): float(value)
        for key, value in (best if isinstance(best, dict) else {}).items()
        if isinstance(value, int | float)
    }
