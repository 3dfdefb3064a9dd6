# SPDX-License-Identifier: Apache-2.0
"""Calls that read or delete end at ``timeout_s`` where the storage does not answer."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from actorsnap import Options, Snapshot, StorageError, sync
from actorsnap.actors import abandonable
from actorsnap.runtime.host import Host
from actorsnap.testing.faults import FaultyStorage
from tests.api.faults import faulty, faulty_url
from tests.api.places import number_at, state
from tests.support.cases import mostly_slow

CALLS: dict[str, tuple[str, Callable[[Snapshot], Any]]] = {
    "restore": ("get", lambda s: s.restore(state(-1))),
    "restore-data": ("read_into", lambda s: s.restore(state(-1))),
    "read_object": ("read_into", lambda s: s.read_object("model/weight")),
    "get_manifest": ("get", lambda s: s.get_manifest()),
    "verify": ("list", lambda s: s.verify()),
    "verify-full": ("read_into", lambda s: s.verify("full")),
    "delete": ("delete", lambda s: s.delete()),
}


@pytest.mark.parametrize("call", CALLS)
async def test_a_storage_that_does_not_answer(tmp_path: Path, call: str) -> None:
    url = str(tmp_path / "s")
    await Snapshot.take(url, state(1), options=Options(fsync=False))
    verb, run = CALLS[call]
    with (
        faulty(lambda inner: FaultyStorage(inner, latency_s={verb: math.inf})),
        anyio.fail_after(60),
    ):
        snapshot = Snapshot(faulty_url(url), options=Options(timeout_s=0.3))
        with pytest.raises(StorageError, match=r"timeout_s=0\.3 has passed") as caught:
            await run(snapshot)
    assert url in str(caught.value)
    assert caught.value.op == {"verify-full": "verify"}.get(
        call, call if call in ("verify", "delete") else "read"
    )
    assert caught.value.retryable
    assert await number_at(url) == 1


SYSTEM_CALLS: dict[str, tuple[str, Callable[[sync.Snapshot], Any]]] = {
    "restore": ("open", lambda s: s.restore(state(-1))),
    "get_manifest": ("open", lambda s: s.get_manifest()),
    "verify": ("scandir", lambda s: s.verify()),
    "verify-full": ("preadv", lambda s: s.verify("full")),
    "read_object": ("preadv", lambda s: s.read_object("model/weight")),
    "get_state_dict_for_key": ("preadv", lambda s: s.get_state_dict_for_key("model")),
    "delete": ("unlink", lambda s: s.delete()),
    "delete-garbage": ("scandir", lambda s: s.delete()),
}


@pytest.mark.blocking
@pytest.mark.parametrize(
    "call",
    mostly_slow(SYSTEM_CALLS, "restore", "verify", "read_object", "delete", "delete-garbage"),
)
def test_a_system_call_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    url = str(tmp_path / "s")
    sync.Snapshot.take(url, state(1), options=Options(fsync=False))
    monkeypatch.setattr(abandonable, "_GRACE_S", 0.3)
    name, run = SYSTEM_CALLS[call]
    system_call, recovered, hung = getattr(os, name), threading.Event(), threading.Event()

    def hanging(path: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name.startswith("actorsnap"):
            hung.set()
            assert recovered.wait(120)
        return system_call(path, *args, **kwargs)

    began = time.monotonic()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, name, hanging)
            with pytest.raises(StorageError, match=r"timeout_s=0\.5 has passed"):
                run(sync.Snapshot(url, options=Options(timeout_s=0.5)))
            assert hung.is_set()
            assert time.monotonic() - began < 60  # it was: never
    finally:
        recovered.set()
        while Host.get()._calls:
            assert time.monotonic() - began < 120, "what hung has not ended"
            time.sleep(0.01)
    assert Host.get().resources.budget.leased_bytes == 0
