# SPDX-License-Identifier: Apache-2.0
"""A root of many snapshots on a server, and what a manager asks about it."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote

import torch

from actorsnap import StateDict
from actorsnap.format.steps import RunRecord, StepName, encode_record, run_key
from actorsnap.sync import Snapshot
from tests.servers.base import S3Server
from tests.support.proxy import Exchange

__all__ = ["app_state", "fill", "requests_of"]


def fill(server: S3Server, bucket: str, *, num_snapshots: int, num_runs: int) -> None:
    """Each run continues the last snapshot of the run before."""
    with tempfile.TemporaryDirectory() as folder:
        Snapshot.take(f"{folder}/a", app_state())
        objects = {
            str(path.relative_to(f"{folder}/a")): path.read_bytes()
            for path in Path(folder, "a").rglob("*")
            if path.is_file()
        }
    names = [StepName(10 * n, 1 + n * num_runs // num_snapshots) for n in range(num_snapshots)]
    client = server.client()
    puts = [(f"{name}/{key}", data) for name in names for key, data in objects.items()]
    for generation in range(1, num_runs + 1):
        last = max([name.step for name in names if name.generation < generation], default=None)
        record = RunRecord(
            generation=generation,
            created_s=0.0,
            host="bench",
            pid=1,
            world_size=1,
            restored_from=None if last is None else str(StepName(last, generation - 1)),
        )
        puts.append((run_key(generation), encode_record(record)))

    def put(one: tuple[str, bytes]) -> None:
        client.put_object(Bucket=bucket, Key=f"run/{one[0]}", Body=one[1])

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(put, puts))


def app_state() -> dict[str, StateDict]:
    return {"train": StateDict(weight=torch.zeros(1000), step=0)}


def kind_of(exchange: Exchange) -> str:
    target = unquote(exchange.target)
    if "uploads" in target and exchange.method == "GET":
        return "LIST uploads"
    if "list-type" in target:
        if "delimiter=/" in target:
            return "LIST with delimiter"
        return "LIST .manager/" if ".manager/" in target else "LIST of objects"
    if exchange.method == "POST" and "delete" in target:
        return "DELETE of many"
    what = ".manager/" if ".manager/" in target else ""
    what = what or ("commit object" if "/actorsnap.json" in target else "object")
    return f"{exchange.method} {what}"


def requests_of(exchanges: Iterable[Exchange]) -> dict[str, int]:
    return dict(sorted(Counter(map(kind_of, exchanges)).items()))
