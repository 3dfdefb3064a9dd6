# SPDX-License-Identifier: Apache-2.0
"""What does a trace cost? A save with ``Options.trace`` beside one without, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actorsnap import Options, StateDict
from actorsnap.sync import Snapshot
from bench.local import Contest, Need, Setting, emit, folder, ratio
from bench.state import llama

__all__ = ["ROWS"]

_OFTEN = 4
"""So many times the repetitions of other rows: a difference of a percent is looked for."""


def row_trace(setting: Setting) -> None:
    """An async save until it is committed."""
    state: dict[str, Any] = {"model": StateDict(**llama(setting.gib))}
    with folder(setting.tmpfs) as root:
        contest = Contest()
        contest.add("off", timed(root, state, Options(fsync=False)))
        contest.add("on", timed(root, state, Options(fsync=False, trace=str(root / "t.json"))))
        contest.play(_OFTEN * setting.repeat)
        trace_bytes = (root / "t.json").stat().st_size
    medians = contest.medians()
    emit(
        "trace",
        ratios={"on/off": ratio(medians.get("on"), medians.get("off"))},
        needs={"on/off": Need(1.01, at_least=False)},
        missing=contest.missing,
        seconds=contest.seconds,
        trace_bytes=trace_bytes,
    )


def timed(root: Path, state: dict[str, Any], options: Options) -> Callable[[], float]:
    def run() -> float:
        begin = time.perf_counter()
        Snapshot.async_take(root / "s", state, overwrite=True, options=options).wait()
        return time.perf_counter() - begin

    return run


ROWS: dict[str, Callable[[Setting], None]] = {"trace": row_trace}
