# SPDX-License-Identifier: Apache-2.0
"""What does compression cost, and what does it bring? Saves and restores with and without it.

As ``bench/local.py``: one JSON line per row (``ROWS``), ratios between medians of one run. The
state is that of a small network behind some steps of Adam: weights in fp32 and bf16, and both
moments. It is saved to a tmpfs, and to the same through a link that lets so many bytes pass per
second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import torch

from actorsnap import Options, StateDict
from actorsnap.storage.base import ObjectWriter, Storage, StorageContext, num_bytes
from actorsnap.storage.registry import open_storage, register
from actorsnap.storage.wrapper import Wrapper, WriterWrapper, without_blocking_io
from actorsnap.sync import Snapshot
from bench.local import Contest, Need, Setting, emit, folder, note, ratio
from bench.state import State, compare, scramble, state_bytes

__all__ = ["ROWS", "trained"]

_WAYS: dict[str, str | None] = {
    "off": None,
    "zstd:1": "zstd:1",
    "zstd:3": "zstd:3",
}
_LINK_BYTES_S = 100 << 20


def trained(gib: float, num_steps: int = 20) -> dict[str, State]:
    """Weights of a network that has learnt for some steps, and the moments of its optimizer: about
    ``gib`` GiB, by what they are."""
    # Weights and two moments in fp32, weights in bf16: 14 bytes each.
    hidden = max(64, round((gib * 2**30 / 14 / 4) ** 0.5 / 64) * 64)
    torch.manual_seed(20260103)
    model = torch.nn.Sequential(
        torch.nn.Linear(hidden, 2 * hidden), torch.nn.GELU(), torch.nn.Linear(2 * hidden, hidden)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    teacher = torch.randn(hidden, hidden)
    for _ in range(num_steps):
        x = torch.randn(32, hidden)
        loss = (model(x) - (x @ teacher).tanh()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weights = {name: value.detach() for name, value in model.named_parameters()}
    moments = optimizer.state_dict()["state"]
    return {
        "fp32": weights,
        "bf16": {name: value.to(torch.bfloat16) for name, value in weights.items()},
        "exp_avg": {str(n): held["exp_avg"] for n, held in moments.items()},
        "exp_avg_sq": {str(n): held["exp_avg_sq"] for n, held in moments.items()},
    }


class _Link:
    """Lets so many bytes pass per second, whoever sends or receives them."""

    def __init__(self, bytes_s: float) -> None:
        self._bytes_s = bytes_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    async def carry(self, nbytes: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._free_s = max(self._free_s, now) + nbytes / self._bytes_s
            wait_s = self._free_s - now
        await anyio.sleep(wait_s)


class _BehindLink(Wrapper):
    def __init__(self, inner: Storage, link: _Link) -> None:
        super().__init__(inner)
        self.capabilities = without_blocking_io(inner.capabilities)
        self.link = link

    async def put(self, key: str, views: Sequence[memoryview]) -> None:
        await self.link.carry(num_bytes(views))
        await super().put(key, views)

    def wrap_writer(self, inner: ObjectWriter) -> ObjectWriter:
        return _WriterBehindLink(self, inner)

    async def read_into(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        await self.link.carry(num_bytes(views))
        await super().read_into(key, offset, views)


class _WriterBehindLink(WriterWrapper):
    storage: _BehindLink

    async def write_at(
        self, offset: int, views: Sequence[memoryview], crc32c: int | None = None
    ) -> None:
        await self.storage.link.carry(num_bytes(views))
        await self.inner.write_at(offset, views, crc32c)


def _open_slow(url: str, context: StorageContext) -> Storage:
    return _BehindLink(open_storage(url.removeprefix("slow://"), context), _Link(_LINK_BYTES_S))


def row_compression(setting: Setting) -> None:
    """Blocking saves and restores, on a tmpfs and behind a link."""
    register("slow", _open_slow)
    parts = trained(min(setting.gib, 0.25))
    state: dict[str, Any] = {name: StateDict(**part) for name, part in parts.items()}
    nbytes = sum(map(state_bytes, parts.values()))
    expected = {name: {k: v.clone() for k, v in part.items()} for name, part in parts.items()}
    facts: dict[str, Any] = {"gib": round(nbytes / 2**30, 3), "link_mib_s": _LINK_BYTES_S >> 20}
    ratios: dict[str, float | None] = {}
    missing: dict[str, str] = {}
    for place, prefix in (("tmpfs", ""), ("link", "slow://")):
        with folder(setting.tmpfs) as root:
            saving, restoring = Contest(), Contest()
            cpu_s: dict[str, float] = {}
            for way, compression in _WAYS.items():
                url = f"{prefix}{root}/{way}/s"
                options = Options(fsync=False, compression=compression)
                saving.add(way, _saving(url, state, options, cpu_s, way))
                restoring.add(way, _restoring(url, parts, state, expected))
            saving.play(setting.repeat)
            restoring.play(setting.repeat)
            taken, restored = saving.medians(), restoring.medians()
            missing |= {f"{place} {way}": why for way, why in saving.missing.items()}
            for way in _WAYS:
                if way != "off":
                    ratios[f"{way}/off take {place}"] = ratio(taken.get(way), taken.get("off"))
                    ratios[f"{way}/off restore {place}"] = ratio(
                        restored.get(way), restored.get("off")
                    )
            facts[f"{place}_seconds"] = {"take": saving.seconds, "restore": restoring.seconds}
            facts[f"{place}_cpu_s_per_gib"] = {
                way: round(seconds / nbytes * 2**30, 2) for way, seconds in cpu_s.items()
            }
            if place == "tmpfs":
                facts["stored"] = {way: round(_stored(root / way) / nbytes, 3) for way in _WAYS}
    facts["ratio_by_kind"] = {
        f"{name} {compression}": round(_ratio_of(part, compression, setting.tmpfs), 3)
        for name, part in parts.items()
        for compression in ("zstd:1", "zstd:3", "zstd:9")
    }
    emit(
        "compression",
        ratios=ratios,
        needs={"zstd:1/off take link": Need(0.9, at_least=False)},
        missing=missing,
        **facts,
    )


def _saving(
    url: str, state: dict[str, Any], options: Options, cpu_s: dict[str, float], way: str
) -> Callable[[], float]:
    def run() -> float:
        begin, cpu = time.perf_counter(), time.process_time()
        Snapshot.take(url, state, overwrite=True, options=options)
        cpu_s[way] = time.process_time() - cpu
        return time.perf_counter() - begin

    return run


def _restoring(
    url: str, parts: dict[str, State], state: dict[str, Any], expected: dict[str, State]
) -> Callable[[], float]:
    def run() -> float:
        for part in parts.values():
            scramble(part)
        begin = time.perf_counter()
        Snapshot(url).restore(state)
        seconds = time.perf_counter() - begin
        for name, part in parts.items():
            compare(expected[name], part)
        return seconds

    return run


def _stored(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def _ratio_of(part: State, compression: str, root: Path) -> float:
    with folder(root) as place:
        note(f"  {compression}")
        options = Options(fsync=False, compression=compression)
        Snapshot.take(place / "s", {"part": StateDict(**part)}, options=options)
        return state_bytes(part) / _stored(place)


ROWS: dict[str, Callable[[Setting], None]] = {"compression": row_compression}
