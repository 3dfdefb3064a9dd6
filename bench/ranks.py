# SPDX-License-Identifier: Apache-2.0
"""Many ranks on one machine: are the writes balanced, the reads few, and how far are the peers?

As ``bench/local.py``: one JSON line per row (``ROWS``), contenders in turns, ratios between
medians of one run, and what was saved is loaded back and compared outside the clock. The time of
a save or load is from the first rank's begin to the last one's end.
"""

from __future__ import annotations

import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from crc32c import crc32c
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_by_dcp
from torch.distributed.checkpoint.storage import StorageWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from actorsnap import Options, StateDict
from actorsnap.format.manifest import BytesEntry, TensorEntry
from actorsnap.planning.inventory import build_inventory
from actorsnap.planning.packing import PackingRules
from actorsnap.planning.save import plan_save
from actorsnap.state.capture import capture
from actorsnap.storage.base import Storage, StorageContext, num_bytes
from actorsnap.storage.fs import open_fs
from actorsnap.storage.registry import register
from actorsnap.storage.wrapper import Wrapper, without_blocking_io
from actorsnap.sync import Snapshot
from actorsnap.testing import ThrottledStorage
from bench.limits import RawFiles
from bench.local import NOISY, OURS, RAW, Contest, Need, Setting, emit, folder, note, ratio
from bench.peers import Dcp, DcpTuned
from bench.state import llama
from bench.world import Here, Span, World, span_s

MIB = 1 << 20
MAX_PLANNING_S = 0.7
"""Of a whole save of 20,000 tensors by four ranks."""

RATE_MIB_S = 200

State = dict[str, torch.Tensor]


# Storage ------------------------------------------------------------------------------------


class Meter(Wrapper):
    """Counts what is read, all meters of a process together."""

    bytes_read: Counter[bool] = Counter()  # by whether it was of a data object

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.capabilities = without_blocking_io(inner.capabilities)

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        data = await self.inner.get(key, start, stop)
        self._count(key, len(data))
        return data

    async def read_into(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        await self.inner.read_into(key, offset, views)
        self._count(key, num_bytes(views))

    def _count(self, key: str, nbytes: int) -> None:
        self.bytes_read[key.endswith(".safetensors")] += nbytes


def _open_metered(url: str, context: StorageContext) -> Storage:
    return Meter(open_fs(url.removeprefix("metered://"), context))


def _open_throttled(url: str, context: StorageContext) -> Storage:
    path, _, rate_mib_s = url.removeprefix("throttled://").partition("@")
    return Meter(ThrottledStorage(open_fs(path, context), bytes_per_s=float(rate_mib_s) * MIB))


register("metered", _open_metered)
register("throttled", _open_throttled)


# States -------------------------------------------------------------------------------------


def real_layers(shrink: int = 1) -> State:
    """Two layers of Llama 2 7B with its embedding, in bfloat16: 1 GiB; all dims / ``shrink``."""
    hidden, ffn, vocab = 4096 // shrink, 11008 // shrink, 32000 // shrink
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (vocab, hidden)}
    for i in range(2):
        shapes |= {
            **{f"layers.{i}.attention.w{x}.weight": (hidden, hidden) for x in "qkvo"},
            f"layers.{i}.feed_forward.w1.weight": (ffn, hidden),
            f"layers.{i}.feed_forward.w2.weight": (hidden, ffn),
            f"layers.{i}.feed_forward.w3.weight": (ffn, hidden),
            f"layers.{i}.attention_norm.weight": (hidden,),
            f"layers.{i}.ffn_norm.weight": (hidden,),
        }
    generator = torch.Generator().manual_seed(20260103)
    return {
        name: torch.empty(shape, dtype=torch.bfloat16).uniform_(-1.0, 1.0, generator=generator)
        for name, shape in shapes.items()
    }


STATES: Mapping[str, Callable[[float], State]] = {
    "small layers": llama,
    "real layers": lambda gib: real_layers(max(1, round((1 / gib) ** 0.5))),
}


def module_of(state: State) -> nn.Module:
    """A module with these parameters: matrices are linear layers, but for the embedding."""
    root = nn.Module()
    for name, tensor in state.items():
        *parents, leaf, _ = name.split(".")
        above = root
        for parent in parents:
            if not hasattr(above, parent):
                above.add_module(parent, nn.Module())
            above = above.get_submodule(parent)
        made: nn.Module
        if tensor.ndim == 1:
            made = nn.RMSNorm(tensor.shape, device="meta")
        elif "embeddings" in leaf:
            made = nn.Embedding(tensor.shape[0], tensor.shape[1], device="meta")
        else:
            made = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False, device="meta")
        made.register_parameter("weight", nn.Parameter(tensor))
        above.add_module(leaf, made)
    return root


def layers_of(module: nn.Module) -> Iterable[nn.Module]:
    return module.get_submodule("layers").children()


def plain(module: nn.Module, _: Here) -> nn.Module:
    return module


def ddp(module: nn.Module, _: Here) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module, init_sync=False)


def fsdp(module: nn.Module, here: Here) -> nn.Module:
    return sharded(module, init_device_mesh("cpu", (here.num_ranks,)))


def two_d(module: nn.Module, here: Here) -> nn.Module:
    return tensor_parallel(module, (here.num_ranks // 2, 2))


def two_d_flat(module: nn.Module, here: Here) -> nn.Module:
    return tensor_parallel(module, (here.num_ranks, 1))


def tensor_parallel(module: nn.Module, shape: tuple[int, int]) -> nn.Module:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    columns = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
    rows = ("attention.wo", "feed_forward.w2")
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in rows}
    for layer in layers_of(module):
        parallelize_module(layer, mesh["tp"], plan)
    parallelize_module(module, mesh["tp"], {"tok_embeddings": RowwiseParallel()})
    return sharded(module, mesh["dp"])


def sharded(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in layers_of(module):
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


Parallel = Callable[[nn.Module, Here], nn.Module]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return local(tensor.detach()).contiguous().view(-1).view(torch.uint8)


# On a rank ----------------------------------------------------------------------------------


def hold(here: Here, of: str, gib: float, parallel: Parallel) -> int:
    """Makes the state that is saved and restored; returns its bytes on this rank."""
    module = parallel(module_of(STATES[of](gib)), here)
    module.eval()
    here.held["module"] = module
    here.held["sums"] = checksums(module)
    return sum(bytes_of(tensor).numel() for tensor in module.state_dict().values())


def checksums(module: nn.Module) -> dict[str, int]:
    return {name: crc32c(bytes_of(t).numpy().data) for name, t in module.state_dict().items()}


def scramble(here: Here) -> None:
    for tensor in here.held["module"].state_dict().values():
        local(tensor).fill_(-7.0)


def check(here: Here) -> None:
    """Raises unless every tensor has the bits it had at first."""
    found = checksums(here.held["module"])
    if wrong := [name for name, value in here.held["sums"].items() if found[name] != value]:
        raise RuntimeError(f"{len(wrong)} tensors differ from what was saved, {wrong[0]} first")


def take(here: Here, url: str) -> Span:
    app_state = {"model": here.held["module"]}
    options = Options(fsync=False)
    return here.timed(lambda: Snapshot.take(url, app_state, options=options))


@dataclass(frozen=True, slots=True)
class Restored:
    """By one rank; bytes where the storage has a meter."""

    span: Span
    data_bytes: int
    other_bytes: int


def restore(here: Here, url: str, options: Options) -> Restored:
    """Restores, and sees that all has the bits it had at first."""
    Meter.bytes_read.clear()
    scramble(here)
    app_state = {"model": here.held["module"]}
    span = here.timed(lambda: Snapshot(url, options=options).restore(app_state))
    check(here)
    return Restored(span, Meter.bytes_read[True], Meter.bytes_read[False])


def raw_save(here: Here, path: Path) -> Span:
    """What one process can write at all (``bench.limits``)."""
    state = {name: tensor.detach() for name, tensor in here.held["module"].state_dict().items()}
    raw = RawFiles(state)
    return here.timed(lambda: raw.save(state, path))


def torch_save(here: Here, path: Path) -> Span:
    def save() -> None:
        if here.rank == 0:
            torch.save(here.held["module"].state_dict(), path / "state.pt")
        dist.barrier()

    return here.timed(save)


def torch_load(here: Here, path: Path) -> None:
    scramble(here)
    here.held["module"].load_state_dict(torch.load(path / "state.pt", mmap=True))
    check(here)


def dcp_save(here: Here, peer: Dcp, path: Path) -> Span:
    peer.prepare()
    module = here.held["module"]
    return here.timed(lambda: peer.save(module.state_dict(), path, fsync=False))


def dcp_load(here: Here, peer: Dcp, path: Path) -> Span:
    peer.prepare()
    module = here.held["module"]
    # In place: what a user has to do with the state dict then is not counted.
    scramble(here)
    span = here.timed(lambda: peer.load(path, module.state_dict()))
    check(here)
    return span


# Rows ---------------------------------------------------------------------------------------


def facts_of(contest: Contest, place: str, nbytes: int, **facts: Any) -> dict[str, Any]:
    return {
        "place": place,
        "gib": round(nbytes / 2**30, 3),
        "runs": max((len(v) for v in contest.seconds.values()), default=0),
        "seconds": {name: round(s, 4) for name, s in contest.medians().items()},
        "seconds_min_max": {
            n: [round(min(v), 4), round(max(v), 4)] for n, v in contest.seconds.items()
        },
        "noisy": sorted(n for n, v in contest.seconds.items() if max(v) > NOISY * min(v)),
        **facts,
    }


def taken(world: World, root: Path, rate_mib_s: int | None = None) -> Callable[[], float]:
    """A save by all ranks, read back by all."""

    def run() -> float:
        with folder(root) as path:
            kept = path / "snapshot"
            url = f"throttled://{kept}@{rate_mib_s}" if rate_mib_s else str(kept)
            elapsed = span_s(world.call(take, url))
            world.call(restore, str(kept), Options())
            return elapsed

    return run


def row_balance(setting: Setting) -> None:
    note("balance")
    ratios: dict[str, float | None] = {}
    written: dict[str, list[int]] = {}
    missing: dict[str, str] = {}
    for num_ranks in (2, 4, 8):
        label = f"{num_ranks} ranks"
        try:
            with World(num_ranks) as world, folder(setting.tmpfs) as root:
                world.call(hold, "small layers", setting.gib / 4, ddp)
                world.call(take, str(root / "snapshot"))
                world.call(restore, str(root / "snapshot"), Options())
                written[label] = written_by_ranks(str(root / "snapshot"), num_ranks)
        except RuntimeError as error:
            missing[label] = str(error)[:200]
            continue
        ratios[label] = max(written[label]) / statistics.mean(written[label])
    emit(
        "bytes of the busiest rank / mean, DDP",
        ratios=ratios,
        needs={f"{n} ranks": Need(1.05, at_least=False) for n in (2, 4, 8)},
        missing=missing,
        bytes_written=written,
    )


def written_by_ranks(url: str, num_ranks: int) -> list[int]:
    """Bytes of tensors that each rank wrote, as its manifest says."""
    found = [0] * num_ranks
    for name, entry in Snapshot(url).get_manifest().items():
        if isinstance(entry, TensorEntry | BytesEntry):
            found[int(name.partition("/")[0])] += entry.data.stop - entry.data.start
    return found


def row_ddp(setting: Setting) -> None:
    note("DDP take, 2 ranks")
    contest = Contest()
    with World(1) as one, World(2) as two:
        nbytes = one.call(hold, "small layers", setting.gib, plain)[0]
        two.call(hold, "small layers", setting.gib, ddp)

        def peer() -> float:
            with folder(setting.tmpfs) as path:
                elapsed = span_s(two.call(torch_save, path))
                two.call(torch_load, path)
                return elapsed

        def limit() -> float:
            with folder(setting.tmpfs) as path:
                return span_s(one.call(raw_save, path))

        contest.add(RAW, limit)
        contest.add("one process", taken(one, setting.tmpfs))
        contest.add(OURS, taken(two, setting.tmpfs))
        contest.add("torch.save by rank 0", peer)
        contest.play(setting.repeat)
    medians = contest.medians()
    ours = medians.get(OURS)
    emit(
        "DDP take, 2 ranks",
        ratios={
            "x one process": ratio(medians.get("one process"), ours),
            "x torch.save": ratio(medians.get("torch.save by rank 0"), ours),
            "of raw": ratio(medians.get(RAW), ours),
        },
        needs={"x one process": Need(1.0), "x torch.save": Need(3.0)},
        missing=contest.missing,
        **facts_of(contest, "tmpfs", nbytes),
    )


def row_throttled(setting: Setting) -> None:
    note("DDP take, 4 ranks, throttled")
    contest = Contest()
    with World(1) as one, World(4) as four:
        nbytes = one.call(hold, "small layers", setting.gib, plain)[0]
        four.call(hold, "small layers", setting.gib, ddp)
        contest.add("1 rank", taken(one, setting.tmpfs, RATE_MIB_S))
        contest.add("4 ranks", taken(four, setting.tmpfs, RATE_MIB_S))
        contest.play(setting.repeat)
    medians = contest.medians()
    emit(
        "DDP take, 4 ranks, throttled",
        ratios={"x one rank": ratio(medians.get("1 rank"), medians.get("4 ranks"))},
        needs={"x one rank": Need(3.6)},
        missing=contest.missing,
        **facts_of(contest, f"tmpfs, {RATE_MIB_S} MiB/s a rank", nbytes),
    )


def row_shared(setting: Setting) -> None:
    with World(8) as world, folder(setting.tmpfs) as path:
        nbytes = world.call(hold, "small layers", setting.gib / 4, ddp)[0]
        world.call(take, str(path / "snapshot"))
        for rate_mib_s in (RATE_MIB_S, RATE_MIB_S // 4):
            row = f"DDP restore, 8 ranks, {rate_mib_s} MiB/s each"
            note(row)
            contest = Contest()
            read: dict[str, int] = {}

            def run(mode: str, rate_mib_s: int = rate_mib_s, read: dict[str, int] = read) -> float:
                url = f"throttled://{path}/snapshot@{rate_mib_s}"
                found = world.call(restore, url, Options(read_mode=mode))
                read[mode] = sum(one.data_bytes for one in found)
                return span_s([one.span for one in found])

            contest.add("direct", partial(run, "direct"))
            contest.add("shared", partial(run, "shared"))
            contest.play(setting.repeat)
            medians = contest.medians()
            emit(
                row,
                ratios={
                    "bytes read / state": ratio(read.get("shared"), nbytes),
                    "x direct": ratio(medians.get("direct"), medians.get("shared")),
                },
                # 1.0 of a state whose objects have headers of some KiB.
                needs={
                    "bytes read / state": Need(1.001, at_least=False),
                    "x direct": Need(1.0),
                },
                missing=contest.missing,
                **facts_of(contest, "tmpfs", nbytes, bytes_read=read),
            )


def row_reshard(setting: Setting) -> None:
    for of in STATES:
        note(f"resharding, {of}")
        ratios, metadata, nbytes = reshard(setting, of)
        emit(
            f"resharding, bytes read / needed, {of}",
            ratios=ratios,
            needs={n: Need(1.05, at_least=False) for n in ratios},
            missing={},
            gib=round(nbytes / 2**30, 3),
            metadata_bytes_read=metadata,
        )


def reshard(setting: Setting, of: str) -> tuple[dict[str, float | None], dict[str, int], int]:
    """Bytes read per byte needed, and those of metadata, by case; and the bytes of the state."""
    ratios: dict[str, float | None] = {}
    metadata: dict[str, int] = {}

    def measure(label: str, world: World, parallel: Parallel, url: str) -> None:
        needed = sum(world.call(hold, of, setting.gib, parallel))
        found = world.call(restore, url, Options(read_mode="direct"))
        read = sum(one.data_bytes for one in found)
        ratios[label] = read / needed
        metadata[label] = sum(one.other_bytes for one in found)
        note(f"  {label}: {read} of {needed} bytes")

    with World(1) as one, World(4) as four, folder(setting.tmpfs) as path:
        nbytes = sum(four.call(hold, of, setting.gib, fsdp))
        four.call(take, str(path / "fsdp"))
        with World(3) as three:
            measure("FSDP2 4 -> 3", three, fsdp, f"metered://{path}/fsdp")
        measure("FSDP2 4 -> one process", one, plain, f"metered://{path}/fsdp")
        four.call(hold, of, setting.gib, two_d)
        four.call(take, str(path / "two_d"))
        measure("2-D 2x2 -> 4x1", four, two_d_flat, f"metered://{path}/two_d")
        measure("2-D 2x2 -> one process", one, plain, f"metered://{path}/two_d")
    return ratios, metadata, nbytes


def row_dcp(setting: Setting) -> None:
    note("FSDP2, 2 ranks, against DCP")
    peers = (Dcp(), DcpTuned())
    saves, loads = Contest(), Contest()
    with World(2) as world, folder(setting.tmpfs) as kept:
        nbytes = sum(world.call(hold, "small layers", setting.gib, fsdp))

        def save(peer: Dcp) -> float:
            with folder(setting.tmpfs) as path:
                elapsed = span_s(world.call(dcp_save, peer, path))
                world.call(dcp_load, peer, path)
                return elapsed

        def load(peer: Dcp) -> float:
            return span_s(world.call(dcp_load, peer, kept / peer.name))

        def load_ours() -> float:
            found = world.call(restore, str(kept / "snapshot"), Options())
            return span_s([one.span for one in found])

        saves.add(OURS, taken(world, setting.tmpfs))
        loads.add(OURS, load_ours)
        world.call(take, str(kept / "snapshot"))
        for peer in peers:
            saves.add(peer.name, partial(save, peer))
            world.call(dcp_save, peer, kept / peer.name)
            loads.add(peer.name, partial(load, peer))
        saves.play(setting.repeat)
        loads.play(setting.repeat)
    for row, contest in (("FSDP2 take, 2 ranks", saves), ("FSDP2 restore, 2 ranks", loads)):
        medians = contest.medians()
        emit(
            row,
            ratios={f"x {p.name}": ratio(medians.get(p.name), medians.get(OURS)) for p in peers},
            needs={f"x {p.name}": Need(1.0) for p in peers},
            missing=contest.missing,
            **facts_of(contest, "tmpfs", nbytes),
        )


# Planning -----------------------------------------------------------------------------------


class Nowhere(StorageWriter):
    """Stores nothing, so that all a save of DCP does is to plan."""

    def reset(self, checkpoint_id: Any = None) -> None:
        return

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        return

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        stored: torch.futures.Future[list[Any]] = torch.futures.Future()
        stored.set_result([])
        return stored

    def finish(self, metadata: Metadata, results: Any) -> None:
        return

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def hold_tiny(here: Here, num_tensors: int, *, is_sharded: bool) -> None:
    """Many tensors of 64 bytes, whole on every rank or sharded over all."""
    tensors = [torch.full((16,), float(number)) for number in range(num_tensors)]
    if is_sharded:
        mesh = init_device_mesh("cpu", (here.num_ranks,))
        tensors = [
            DTensor.from_local(t.chunk(here.num_ranks)[here.rank].clone(), mesh, [Shard(0)])
            for t in tensors
        ]
    here.held["tensors"] = tensors


def tiny(here: Here, name: str) -> State:
    return {f"{name}.{n // 100}.{n % 100}": t for n, t in enumerate(here.held["tensors"])}


def take_tiny(here: Here, url: str, name: str) -> Span:
    app_state = {"model": StateDict(tiny(here, name))}
    options = Options(fsync=False)
    return here.timed(lambda: Snapshot.take(url, app_state, options=options, replicated=["**"]))


def dcp_plan(here: Here, *, caches: bool) -> Span:
    warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")
    state = {"model": tiny(here, "m")}
    planner = DefaultSavePlanner(enable_plan_caching=caches)
    return here.timed(lambda: save_by_dcp(state, storage_writer=Nowhere(), planner=planner))


def plan_alone(here: Here) -> Span:
    """From the state to what each rank is to write, but for what is sent between the ranks."""

    def plan() -> None:
        app_state = {"model": StateDict(tiny(here, "m"))}
        captured = capture(
            app_state, replicated=["**"], ranks=range(here.num_ranks), rank=here.rank
        )
        items = [leaf.item for leaf in captured.leaves]
        inventory, lists = build_inventory(items, captured.scopes.items())
        if here.rank == 0:  # equal on all
            rules = PackingRules(chunk_bytes=16 * MIB, max_objects=4, min_object_bytes=64 * MIB)
            plan_save([inventory] * here.num_ranks, lists, rules)

    return here.timed(plan)


def dcp_plan_alone(here: Here) -> Span:
    """The same of DCP's planner: its local and its global plan."""
    planner = DefaultSavePlanner()
    is_first = here.rank == 0

    def plan_local() -> None:
        planner.set_up_planner({"model": tiny(here, "m")}, is_coordinator=is_first)
        plans.append(planner.create_local_plan())

    plans: list[Any] = []
    one = here.timed(plan_local)
    gathered: list[Any] = [None] * here.num_ranks
    dist.all_gather_object(gathered, plans[0])
    two = here.timed(lambda: planner.create_global_plan(gathered) if is_first else None)
    return Span(two.begin_s - (one.end_s - one.begin_s), two.end_s)


def row_planning(setting: Setting) -> None:
    num_tensors = setting.small_count // 5
    for is_sharded in (False, True):
        row = (
            f"planning, {num_tensors} {'sharded' if is_sharded else 'replicated'} tensors, 4 ranks"
        )
        note(row)
        contest = Contest()
        # Each with ranks of its own: the plans that DCP caches slow down all that allocates.
        with World(4) as ours, World(4) as theirs:
            for world in (ours, theirs):
                world.call(hold_tiny, num_tensors, is_sharded=is_sharded)
            add_planners(contest, ours, theirs, setting.tmpfs)
            contest.play(setting.repeat)
        medians = contest.medians()
        pairs = {
            "whole save, x dcp's planning": ("dcp", OURS),
            "whole save again, x dcp's planning cached": ("dcp cached", f"{OURS} again"),
            "plan alone, x dcp's": ("dcp alone", f"{OURS} alone"),
        }
        emit(
            row,
            ratios={
                **{n: ratio(medians.get(a), medians.get(b)) for n, (a, b) in pairs.items()},
                "whole save, s": medians.get(OURS),
            },
            needs={
                **{name: Need(1.0) for name in pairs},
                "whole save, s": Need(MAX_PLANNING_S, at_least=False),
            },
            missing=contest.missing,
            **facts_of(contest, "tmpfs", 64 * num_tensors),
        )


def add_planners(contest: Contest, own: World, other: World, root: Path) -> None:
    """``own``: actorsnap's ranks; ``other``: those of DCP."""
    numbers = count()

    def ours(name: str) -> float:
        with folder(root) as path:
            return span_s(own.call(take_tiny, str(path / "snapshot"), name))

    def again() -> float:
        ours("m")  # what is remembered is the save before
        return ours("m")

    def theirs(*, caches: bool) -> float:
        return span_s(other.call(dcp_plan, caches=caches))

    # A name that was not there before: nothing of the structure is remembered.
    contest.add(OURS, lambda: ours(f"m{next(numbers)}"))
    contest.add(f"{OURS} again", again)
    contest.add("dcp", lambda: theirs(caches=False))
    contest.add("dcp cached", lambda: theirs(caches=True))
    contest.add(f"{OURS} alone", lambda: span_s(own.call(plan_alone)))
    contest.add("dcp alone", lambda: span_s(other.call(dcp_plan_alone)))


ROWS: dict[str, Callable[[Setting], None]] = {
    "ranks-balance": row_balance,
    "ranks-ddp": row_ddp,
    "ranks-throttled": row_throttled,
    "ranks-shared": row_shared,
    "ranks-reshard": row_reshard,
    "ranks-fsdp": row_dcp,
    "ranks-planning": row_planning,
}
