# SPDX-License-Identifier: Apache-2.0
"""Options from the environment, and the size of chunks under a budget."""

from __future__ import annotations

import inspect
import re

import pytest

from actorsnap import Options, Snapshot, UsageError
from actorsnap.options import MIN_CHUNK_BYTES, chunk_within, from_env
from actorsnap.planning.shared_reads import ReadMode

MIB = 1 << 20


@pytest.mark.parametrize("name", ["CKPT_DIR", "HOME", "LOG_LEVEL", "BENCH_ROOT", "RUN_ID", ""])
def test_foreign_variables_are_nobodys_business(name: str) -> None:
    found = from_env({f"ACTORSNAP_{name}": "x", "ACTORSNAP_TIMEOUT_S": "7"})
    assert found == Options(timeout_s=7)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("TIMEOUT", "TIMEOUT_S"),
        ("FSYNCH", "FSYNC"),
        ("CHUNK_BYTE", "CHUNK_BYTES"),
        ("MEMORY_BUDGET", "MEMORY_BUDGET_BYTES"),
        ("ALLOW_PICKEL", "ALLOW_PICKLE"),
        ("ALLOW_RUNNING_LOOP", "ALLOW_IN_RUNNING_LOOP"),
    ],
)
def test_misspelt_options_are_refused(name: str, meant: str) -> None:
    with pytest.raises(UsageError, match=rf"did you mean 'ACTORSNAP_{meant}'\?"):
        from_env({f"ACTORSNAP_{name}": "1"})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("compresion", "'compresion'; did you mean 'compression'?"),
        ("timeout", "'timeout'; did you mean 'timeout_s'?"),
        ("level", "'level'; it has: fsync, verify, allow_pickle, "),
    ],
)
def test_misspelt_keywords_are_refused(name: str, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"Options has no field {says}")):
        Options(**{name: "zstd"})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["overwrite", "stage", "storage_options"])
def test_arguments_of_a_save_are_no_options(name: str) -> None:
    says = f"{name} is no field of Options, but an argument of the call, as in Snapshot.async_take("
    with pytest.raises(UsageError, match=re.escape(says)):
        Options(**{name: "lazy"})  # type: ignore[arg-type]
    assert name in inspect.signature(Snapshot.async_take).parameters


def test_options_are_checked_by_the_type_checker() -> None:
    """The ignored errors are there: mypy reports ignores that nothing needs."""
    with pytest.raises(UsageError, match="compresion"):
        Options(compresion="zstd")  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="immutable"):
        Options().fsync = False  # type: ignore[misc]


@pytest.mark.parametrize("budget", ["64", 2.0 * MIB, True, MIN_CHUNK_BYTES - 1, -1])
def test_budgets_that_do_not_work_are_refused(budget: object) -> None:
    with pytest.raises(UsageError, match=f"memory_budget_bytes .*, not {budget!r}$"):
        Options(memory_budget_bytes=budget)  # type: ignore[arg-type]


def test_flags_and_times_that_do_not_work_are_refused() -> None:
    with pytest.raises(UsageError, match=r"Options\.fsync must be True or False, not 'no'"):
        Options(fsync="no")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"Options\.timeout_s must lie in .*, not -1$"):
        Options(timeout_s=-1)


def test_read_modes() -> None:
    assert from_env({"ACTORSNAP_READ_MODE": "shared"}) == Options(read_mode="shared")
    assert all(Options(read_mode=mode).read_mode == mode for mode in ReadMode)
    with pytest.raises(UsageError, match="one of 'auto', 'direct', 'shared', not 'both'"):
        Options(read_mode="both")


def test_slowdowns() -> None:
    assert from_env({"ACTORSNAP_MAX_SLOWDOWN": "0.02"}) == Options(max_slowdown=0.02)
    assert Options().max_slowdown is None
    assert Options(max_slowdown=1).max_slowdown == 1
    for value in (0, -0.1, 1.5, 2, True, "0.02", float("nan")):
        with pytest.raises(UsageError, match=r"max_slowdown must lie in \(0, 1\]"):
            Options(max_slowdown=value)  # type: ignore[arg-type]


def test_ways_to_exit() -> None:
    assert from_env({"ACTORSNAP_AT_EXIT": "abort"}) == Options(at_exit="abort")
    with pytest.raises(UsageError, match="one of 'wait', 'abort', not 'kill'"):
        Options(at_exit="kill")


@pytest.mark.parametrize(
    ("chunk_mib", "budget_bytes", "expected_mib"),
    [(16, 64 * MIB, 16), (16, 16 * MIB, 16), (16, 15 * MIB, 8), (16, 3 * MIB, 2), (3, MIB, 2)],
)
def test_chunks_fit_into_the_budget(chunk_mib: int, budget_bytes: int, expected_mib: int) -> None:
    assert chunk_within(chunk_mib * MIB, budget_bytes) == expected_mib * MIB
