# SPDX-License-Identifier: Apache-2.0
"""Only attempts that can no longer commit are garbage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from actorsnap.format.layout import Attempt
from actorsnap.runtime import maintenance
from actorsnap.runtime.maintenance import (
    MAX_ATTEMPT_S,
    find_collectable,
    find_resumable,
    unclaimed,
)

T = TypeVar("T")

NOW = 1_800_000_000.0


class Host:
    """The part of a ``Host`` that is asked. The process with id 1 runs."""

    resources = SimpleNamespace(attempts=SimpleNamespace(may_run=lambda attempt: attempt.pid == 1))

    async def run_blocking(self, fn: Callable[..., T]) -> T:
        return fn()


HOST: Any = Host()


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "host_id", lambda: "a" * 8)
    monkeypatch.setattr(time, "time", lambda: NOW)


def name(*, age_s: int = 0, host: str = "aaaaaaaa", pid: int = 1) -> str:
    return str(Attempt(created_s=int(NOW) - age_s, host=host, pid=pid, nonce="00000000"))


def collect(*attempts: str, superseded: Collection[str] = ()) -> list[str]:
    return asyncio.run(find_collectable(HOST, attempts, superseded))


def test_a_running_attempt_is_kept() -> None:
    assert collect(name(pid=1)) == []


def test_a_dead_process_of_this_host_is_garbage() -> None:
    assert collect(name(pid=2)) == [name(pid=2)]


def test_another_hosts_process_is_kept_until_it_cannot_commit_any_more() -> None:
    young, old = name(host="b" * 8, pid=2), name(host="b" * 8, age_s=MAX_ATTEMPT_S + 1)
    assert collect(young, old) == [old]


def test_a_replaced_attempt_is_garbage_although_its_process_runs() -> None:
    assert collect(name(pid=1), superseded=[name(pid=1)]) == [name(pid=1)]


def test_what_is_no_attempt_is_never_touched() -> None:
    assert collect("my-files", "", "data") == []


def test_what_a_running_copy_claims_is_kept() -> None:
    copied, running, dead = name(host="b" * 8), name(pid=1), name(pid=2)
    garbage = [copied, dead]
    assert unclaimed(garbage, {}) == garbage
    assert unclaimed(garbage, {copied: [dead]}) == garbage
    assert unclaimed(garbage, {copied: [dead, running]}) == [dead]


def resume(*attempts: str, committed: str | None = None) -> list[str]:
    async def list_folders() -> list[str]:
        return list(attempts)

    storage: Any = SimpleNamespace(list_folders=list_folders)
    return list(asyncio.run(find_resumable(HOST, storage, committed)))


def test_dead_attempts_are_resumed_the_newest_first() -> None:
    old, new = name(pid=2, age_s=20), name(pid=2, age_s=10)
    assert resume(old, new) == resume(new, old) == [new, old]


def test_an_attempt_that_may_run_is_never_resumed() -> None:
    assert resume(name(pid=1)) == []


def test_attempts_of_other_hosts_are_resumed_on_the_callers_word() -> None:
    assert resume(name(host="b" * 8, pid=1)) == [name(host="b" * 8, pid=1)]


def test_neither_what_is_committed_nor_what_is_no_attempt_is_resumed() -> None:
    assert resume(name(pid=2), "step-1", committed=name(pid=2)) == []
