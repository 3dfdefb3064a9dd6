# SPDX-License-Identifier: Apache-2.0
"""Snapshots of thousands of ranks without their processes.

What a rank captures follows from its place in a mesh; from there on, ``SaveDecisions`` of one
coordinator and the packing and manifests of each rank run as in a save. All data is zeros: a
storage makes them up, counts what it is asked for, and makes manifests on the first request.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from actorsnap import StateDict
from actorsnap.actors.checksum_ledger import manifest_of
from actorsnap.errors import ObjectNotFound
from actorsnap.format.checksum import choose_block_bytes, crc32c
from actorsnap.format.geometry import Box
from actorsnap.format.layout import manifest_key
from actorsnap.format.manifest import (
    COMMIT_KEY,
    Commit,
    ObjectRecord,
    SaveRecord,
    Stored,
    encode_commit,
    features_of,
)
from actorsnap.format.owners import Grid, Layout, MeshCut, owners_key
from actorsnap.format.tables import decode_rank_manifest, encode_rank_manifest
from actorsnap.planning.inventory import (
    Inventory,
    Sharded,
    ShardedTable,
    build_inventory,
    digest_of,
    ranks_digest,
)
from actorsnap.planning.ownership import held_boxes
from actorsnap.planning.packing import Item, ObjectPlan, PackingRules, pack
from actorsnap.protocol.rounds import AskMore, Continue
from actorsnap.protocol.save import (
    Assignment,
    Details,
    Joined,
    PlanCache,
    Question,
    SaveDecisions,
    decode,
    encode,
)
from actorsnap.release import RELEASE
from actorsnap.state.capture import capture
from actorsnap.state.sources import Captured, HostMemory, Leaf
from actorsnap.storage.base import Capabilities, ObjectInfo, Storage, num_bytes
from actorsnap.storage.registry import register

__all__ = ["JOBS", "Asked", "Job", "SimulatedStorage", "Snapshots", "app_state"]

ATTEMPT = "20260101T000000-0123abcd-1-89abcdef"
RULES = PackingRules(chunk_bytes=16 << 20, max_objects=4, min_object_bytes=64 << 20)
NUM_TENSORS = 900
EVEN = (24_576, 480)
"""Of bfloat16, so 900 of them are 19.8 GiB; 8,192, 4,096, 3,072 and 1,024 ranks cut it evenly."""

TINY = (256, 4)

NUM_STAGES = 8
TP = 8
_FEATURES = features_of(is_compressed=False, has_owners=True)
_NOWHERE = HostMemory(0, 0, None)
_LLAMA = (
    ("q_proj", (8192, 8192)),
    ("k_proj", (1024, 8192)),
    ("v_proj", (1024, 8192)),
    ("o_proj", (8192, 8192)),
    ("gate_proj", (28_672, 8192)),
    ("up_proj", (28_672, 8192)),
    ("down_proj", (8192, 28_672)),
    ("input_norm", (8192,)),
    ("post_norm", (8192,)),
)


# Jobs ---------------------------------------------------------------------------------------


class Placed(NamedTuple):
    """A tensor, the ranks of its mesh by position, and what cuts it."""

    name: str
    shape: tuple[int, ...]
    mesh: Grid
    placements: tuple[Any, ...]

    @property
    def layout(self) -> Layout:
        cuts = [
            MeshCut(axis, placement.dim, int(getattr(placement, "split_factor", 1)))
            for axis, placement in enumerate(self.placements)
            if not isinstance(placement, Replicate)
        ]
        return Layout(self.mesh, tuple(cuts))


@dataclass(frozen=True)
class Job:
    """Ranks that hold a model in one of the ways of ``JOBS``.

    Attributes:
        shapes: ``even`` (all ``EVEN``), ``tiny``, or ``llama`` (100 layers of Llama 3 70B).
    """

    kind: str
    ranks: int
    shapes: str = "even"

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.ranks}-{self.shapes}"

    def tensors(self, rank: int) -> tuple[str, tuple[Placed, ...]]:
        """The key of what the rank trains, and its tensors."""
        stage = rank * NUM_STAGES // self.ranks if self.kind == "stages" else 0
        return _tensors(self, stage)

    def stages(self) -> Iterable[int]:
        """A rank of each stage."""
        count = NUM_STAGES if self.kind == "stages" else 1
        return range(0, self.ranks, self.ranks // count)


JOBS = ("fsdp", "hsdp", "tp", "stages")


@lru_cache
def _tensors(job: Job, stage: int) -> tuple[str, tuple[Placed, ...]]:
    ranks = job.ranks
    along: tuple[Any, ...] = (Shard(0),)
    across = along
    mesh = Grid(0, ((ranks, 1),))
    key = "model"
    if job.kind == "hsdp":
        mesh = Grid(0, ((2, ranks // 2), (ranks // 2, 1)))
        along = across = (Replicate(), Shard(0))
    elif job.kind == "tp":
        mesh = Grid(0, ((ranks // TP, TP), (TP, 1)))
        along = (_StridedShard(0, split_factor=TP), Shard(0))
        across = (Shard(0), Shard(1))
    elif job.kind == "stages":
        each = ranks // NUM_STAGES
        mesh = Grid(stage * each, ((each, 1),))
        key = f"stage{stage}"
    found = []
    for index in range(NUM_TENSORS):
        name, shape = _LLAMA[index % 9]
        shape = {"even": EVEN, "tiny": TINY}.get(job.shapes, shape)
        placements = across if name in ("o_proj", "down_proj") and len(shape) > 1 else along
        found.append(Placed(f"layers.{index // 9}.{name}", shape, mesh, placements))
    return key, tuple(found)


@lru_cache(maxsize=4096)
def _boxes(layout: Layout, shape: tuple[int, ...], position: tuple[int, ...]) -> list[Box]:
    return held_boxes(layout, shape, position)


@lru_cache
def _sharded(job: Job, stage_rank: int) -> tuple[Sharded, ...]:
    key, tensors = job.tensors(stage_rank)
    members = tuple(sorted(tensors[0].mesh))
    return tuple(
        Sharded(
            f"{key}/{each.name}",
            "bfloat16",
            each.shape,
            ranks_digest(members),
            len(members),
            each.layout,
        )
        for each in tensors
    )


def _holders(each: Placed, position: tuple[int, ...]) -> tuple[int, ...]:
    spans = [
        range(count) if isinstance(placement, Replicate) else (at,)
        for count, placement, at in zip(each.mesh.counts, each.placements, position, strict=True)
    ]
    steps = [step for _, step in each.mesh.axes]
    found = [
        each.mesh.start + sum(a * s for a, s in zip(at, steps, strict=True))
        for at in product(*spans)
    ]
    return tuple(sorted(found)) if len(found) > 1 else ()


def captured(job: Job, rank: int) -> Captured:
    """What ``state.capture.capture`` finds on a rank; ``bench.scale`` compares some of them."""
    key, tensors = job.tensors(rank)
    position = tensors[0].mesh.position(rank)
    assert position is not None
    small = capture(_small(rank), ranks=(0, 1), rank=0)
    parts: list[Any] = [part for part in small.parts if _path_of(part) < key]
    is_whole = len(tensors[0].mesh) < job.ranks
    holders: dict[tuple[Any, ...], tuple[int, ...]] = {}
    for each in tensors:
        if each.placements not in holders:
            holders[each.placements] = _holders(each, position)
        for box in _boxes(each.layout, each.shape, position):
            item = Item(
                f"{key}/{each.name}",
                "bfloat16",
                box.sizes,
                box.volume * 2,
                2,
                False,
                box.offsets,
                each.shape,
                is_whole,
            )
            parts.append(
                Leaf(item, _NOWHERE, "tensor", "bfloat16", holders=holders[each.placements])
            )
    parts += [part for part in small.parts if _path_of(part) >= key]
    stage_rank = next(first for first in reversed(list(job.stages())) if first <= rank)
    return Captured(parts, sharded=_sharded(job, stage_rank))


def _path_of(part: Any) -> str:
    path: str = part.item.path if isinstance(part, Leaf) else part.path
    return path


def _small(rank: int) -> dict[str, Any]:
    """Private to each rank: one leaf that differs, and one that is equal."""
    return {"loader": StateDict(position=rank), "progress": StateDict(step=10_000)}


def app_state(job: Job, rank: int, fill: float | None = None) -> dict[str, Any]:
    """What the rank passes to ``restore``: DTensors, of memory that was not touched."""
    key, tensors = job.tensors(rank)
    ranks = torch.tensor(list(tensors[0].mesh)).reshape(tensors[0].mesh.counts)
    mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)
    position = tensors[0].mesh.position(rank)
    assert position is not None
    model: dict[str, Any] = {}
    for each in tensors:
        boxes = _boxes(each.layout, each.shape, position)
        sizes = list(boxes[0].sizes if boxes else (0, *each.shape[1:]))
        for box in boxes[1:]:  # several runs of rows
            sizes[0] += box.sizes[0]
        local = torch.empty(sizes, dtype=torch.bfloat16)
        if fill is not None:
            local.fill_(fill)
        strides = torch.empty(each.shape, dtype=torch.bfloat16, device="meta").stride()
        meta = TensorMeta(torch.Size(each.shape), strides, torch.bfloat16)
        spec = DTensorSpec(mesh, each.placements, tensor_meta=meta)
        model[each.name] = DTensor(local, spec, requires_grad=False)
    return {key: StateDict(model), **_small(-1)}


# The save -----------------------------------------------------------------------------------


@lru_cache
def _zeros(nbytes: int) -> int:
    return crc32c(bytes(nbytes))


@dataclass
class _Ledger:
    """``ChecksumLedger`` of zeros."""

    plan: ObjectPlan

    def check_complete(self) -> None:
        pass

    def stored(self, item: int, number: int) -> Stored:
        start, end = self.plan.starts[item], self.plan.ends[item]
        block = choose_block_bytes(end - start, is_shard=True)
        sizes = [min(block, end - at) for at in range(start, end, block)]
        return Stored(number, start, end, tuple(map(_zeros, sizes)))

    def to_record(self) -> ObjectRecord:
        return ObjectRecord(
            key=self.plan.key,
            size=self.plan.size,
            header_bytes=len(self.plan.header),
            header_crc32c=crc32c(self.plan.header),
        )


class _Answers:
    """What the ranks send: inventories of few of them are made, the others follow."""

    def __init__(self, job: Job, has_owners: bool) -> None:
        self.job = job
        self._has_owners = has_owners
        self._made: dict[int, tuple[Inventory, Any, Any]] = {}
        self._alike: dict[object, Inventory] = {}

    def inventory(self, rank: int) -> Inventory:
        job = self.job
        if job.kind == "hsdp":
            return self._make(rank % (job.ranks // 2))[0]
        # No scopes: only the number of bytes differs between ranks of a stage.
        first = next(stage for stage in reversed(list(job.stages())) if stage <= rank)
        _, tensors = job.tensors(rank)
        position = tensors[0].mesh.position(rank)
        assert position is not None
        nbytes = 0
        kinds: dict[tuple[Any, ...], int] = {}
        for each in tensors:
            kind = (each.shape, each.placements)
            kinds[kind] = kinds.get(kind, 0) + 1
        for (shape, placements), count in kinds.items():
            layout = Placed("", shape, tensors[0].mesh, placements).layout
            nbytes += count * sum(box.volume * 2 for box in _boxes(layout, shape, position))
        same = first, nbytes
        if same not in self._alike:
            made = self._make(first)[0]
            self._alike[same] = msgspec.structs.replace(made, private_bytes=nbytes)
        return self._alike[same]

    def _make(self, rank: int) -> tuple[Inventory, Any, Any]:
        if rank not in self._made:
            held = captured(self.job, rank)
            outline = held.outline if self._has_owners else None
            inventory, lists = build_inventory(
                [leaf.item for leaf in held.leaves],
                held.scopes.items(),
                sharded=self._sharded(rank),
                outline=outline,
            )
            self._made[rank] = inventory, lists, outline
        return self._made[rank]

    def details(self, rank: int, question: Any) -> Details:
        job = self.job
        first = next(stage for stage in reversed(list(job.stages())) if stage <= rank)
        made = rank % (job.ranks // 2) if job.kind == "hsdp" else first
        _, lists, outline = self._make(made)
        return Details(
            inventory=self.inventory(rank) if question.inventory else None,
            lists={digest: lists[digest] for digest in question.lists},
            sharded=ShardedTable.of(self._sharded(first)) if question.sharded else None,
            outline=outline if question.outline else None,
        )

    def _sharded(self, rank: int) -> tuple[Sharded, ...]:
        first = next(stage for stage in reversed(list(self.job.stages())) if stage <= rank)
        found = _sharded(self.job, first)
        if self._has_owners:
            return found
        return tuple([msgspec.structs.replace(each, layout=None) for each in found])


@dataclass
class Coordinated:
    """A save's coordinator, which has all ranks' messages.

    Attributes:
        assignments: By rank, encoded.
        up, down: Bytes of what ranks and coordinator say in the first round.
        seconds: CPU time of decisions.
        owners_s: That of the owner index, while ranks store.
    """

    assignments: dict[int, bytes]
    owners: bytes = b""
    up: int = 0
    down: int = 0
    seconds: float = 0.0
    owners_s: float = 0.0


def coordinate(
    job: Job, memory: PlanCache | None = None, *, has_owners: bool = True, is_repeated: bool = False
) -> Coordinated:
    """Runs the coordinator of a save, until the ranks store.

    Args:
        has_owners: False: as before there was an owner index.
        is_repeated: The ranks remember their plans; ``memory`` is of the save before.
    """
    save = SaveRecord(world_size=job.ranks, features=_FEATURES)
    common = Assignment(attempt=ATTEMPT, url=b"sim://", fsync=True, rules=RULES, save=save)
    decisions = SaveDecisions(common, release=RELEASE, memory=memory)
    answers = _Answers(job, has_owners)
    digests: dict[Inventory, bytes] = {}
    remembered: dict[int, bytes] = {}
    if is_repeated:
        first = coordinate(job, has_owners=has_owners).assignments
        remembered = {rank: decode(each, Assignment).digest for rank, each in first.items()}

    def joined(rank: int) -> bytes:
        inventory = answers.inventory(rank)
        if inventory not in digests:
            digests[inventory] = digest_of(inventory)
        return encode(Joined(RELEASE, digests[inventory], remembered.get(rank, b"")))

    payloads = {rank: joined(rank) for rank in range(job.ranks)}
    done = Coordinated({})
    while True:
        done.up += sum(map(len, payloads.values()))
        begin_s = time.process_time()
        decision = decisions.decide(0, payloads)
        done.seconds += time.process_time() - begin_s
        if not isinstance(decision, AskMore):
            break
        done.down += sum(map(len, decision.questions.values()))
        payloads = {
            rank: encode(answers.details(rank, decode(payload, Question)))
            for rank, payload in decision.questions.items()
        }
    assert isinstance(decision, Continue), decision
    done.assignments = dict(decision.payloads)
    done.down += sum(map(len, done.assignments.values()))
    if has_owners:
        begin_s = time.process_time()
        done.owners = decisions.owners()
        done.owners_s = time.process_time() - begin_s
    return done


class Snapshots:
    """Snapshots in a folder, one per job; what is large is made when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_made = 0

    def place(self, job: Job) -> Path:
        """The folder of a job's snapshot: its plan and owner index are made."""
        place = self.folder / job.name
        if not (place / "plan").exists():
            place.mkdir(parents=True, exist_ok=True)
            made = coordinate(job)
            (place / "owners").write_bytes(made.owners)
            (place / "plan.new").write_bytes(pickle.dumps(made.assignments))
            (place / "plan.new").rename(place / "plan")
        return place

    def make(self, job: Job, ranks: Iterable[int]) -> None:
        """Makes rank manifests that are not there."""
        place = self.place(job)
        assignments: dict[int, bytes] = {}
        for rank in ranks:
            path = place / f"{rank}.json"
            if path.exists():
                continue
            assignments = assignments or pickle.loads((place / "plan").read_bytes())
            part = path.with_suffix(".part")
            part.write_bytes(_manifest(job, rank, decode(assignments[rank], Assignment)))
            part.rename(path)
            self.num_made += 1


def _manifest(job: Job, rank: int, assignment: Assignment) -> bytes:
    held = captured(job, rank)
    assert assignment.plan is not None
    plans = pack(
        [leaf.item for leaf in held.leaves],
        attempt=ATTEMPT,
        rank=rank,
        rules=assignment.rules,
        scopes=list(held.scopes.values()),
        plan=assignment.plan,
    )
    ledgers: list[Any] = [_Ledger(each) for each in plans]
    made = manifest_of(held, ledgers, attempt=ATTEMPT, rank=rank, save=assignment.save)
    return encode_rank_manifest(made)


@dataclass
class Asked:
    """What a storage was asked for.

    Attributes:
        index, data: Requests, and their bytes: of commit object, owner index and manifests; of
            data objects. A page of 1,000 listed objects is a request.
        before_data: Requests before the first one for data.
        first_data_s: By ``time.perf_counter``; of that one. ``on_data`` is called before it.
        manifests: Ranks whose manifests were read, in whole or in part.
    """

    index: int = 0
    index_bytes: int = 0
    data: int = 0
    data_bytes: int = 0
    before_data: int = 0
    first_data_s: float = 0.0
    manifests: set[int] = field(default_factory=set)
    on_data: Any = None

    def of(self, key: str, nbytes: int) -> None:
        if "/data/" not in key:
            self.index += 1
            self.index_bytes += nbytes
            return
        if not self.data:
            self.before_data = self.index
            self.first_data_s = time.perf_counter()
            if self.on_data is not None:
                self.on_data()
        self.data += 1
        self.data_bytes += nbytes


LIST_PAGE = 1000


class SimulatedStorage(Storage):
    """One job's snapshot, without latency; cannot be written.

    Args:
        is_filled: Reads of data write zeros; else they leave memory untouched.
    """

    def __init__(self, snapshots: Snapshots, job: Job, asked: Asked, *, is_filled: bool) -> None:
        self.url = f"sim://{job.name}"
        self.capabilities = Capabilities()
        self._snapshots = snapshots
        self._job = job
        self._asked = asked
        self._is_filled = is_filled
        self._place = snapshots.place(job)
        self._commit = encode_commit(
            Commit(
                version=1,
                features=_FEATURES,
                world_size=job.ranks,
                attempt=ATTEMPT,
                created="2026-01-01T00:00:00.000000Z",
            )
        )

    @cached_property
    def _objects(self) -> dict[str, int]:
        """Sizes of data objects."""
        path = self._place / "objects"
        if not path.exists():
            found: dict[str, int] = {}
            for rank in range(self._job.ranks):
                key = manifest_key(ATTEMPT, rank)
                manifest = decode_rank_manifest(self._whole(key), key)
                found.update((record.key, record.size) for record in manifest.objects)
            path.write_bytes(pickle.dumps(dict(sorted(found.items()))))
        sizes: dict[str, int] = pickle.loads(path.read_bytes())
        return sizes

    def _file(self, key: str) -> Path:
        if key == owners_key(ATTEMPT):
            return self._place / "owners"
        rank = key.rpartition("/")[2].removesuffix(".json")
        if key != COMMIT_KEY and not (
            rank.isdecimal()
            and int(rank) < self._job.ranks
            and key == manifest_key(ATTEMPT, int(rank))
        ):
            raise ObjectNotFound(op="get", key=key, backend=self.url)
        path = self._place / f"{int(rank)}.json"
        if not path.exists():
            self._snapshots.make(self._job, [int(rank)])
        self._asked.manifests.add(int(rank))
        return path

    def _whole(self, key: str) -> bytes:
        return self._commit if key == COMMIT_KEY else self._file(key).read_bytes()

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if "/data/" in key:
            assert stop is not None
            self._asked.of(key, stop - start)
            return bytes(stop - start)
        if key == COMMIT_KEY:
            data = self._commit[start:stop]
        else:
            with self._file(key).open("rb") as file:
                file.seek(start)
                data = file.read(-1 if stop is None else stop - start)
        self._asked.of(key, len(data))
        return data

    async def read_into(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        self._asked.of(key, num_bytes(views))
        if "/data/" not in key:
            data = memoryview(self._whole(key))[offset:]
            for view in views:
                view[:], data = data[: len(view)], data[len(view) :]
        elif self._is_filled:
            for view in views:
                view[:] = bytes(len(view))

    async def stat(self, key: str) -> ObjectInfo:
        self._asked.of(key, 0)
        if "/data/" in key:
            if key not in self._objects:
                raise ObjectNotFound(op="stat", key=key, backend=self.url)
            return ObjectInfo(key=key, size=self._objects[key])
        size = len(self._commit) if key == COMMIT_KEY else self._file(key).stat().st_size
        return ObjectInfo(key=key, size=size)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        ranks = range(self._job.ranks)
        index = [COMMIT_KEY, owners_key(ATTEMPT), *[manifest_key(ATTEMPT, r) for r in ranks]]
        found = [(key, -1) for key in index if key.startswith(prefix)]
        if prefix.startswith(f"{ATTEMPT}/data") or f"{ATTEMPT}/data".startswith(prefix):
            found += [each for each in self._objects.items() if each[0].startswith(prefix)]
        for number, (key, size) in enumerate(sorted(found)):
            if number % LIST_PAGE == 0:
                self._asked.of("", 0)
            if size < 0:
                size = len(self._commit) if key == COMMIT_KEY else self._file(key).stat().st_size
            yield ObjectInfo(key=key, size=size)

    async def put(self, key: str, views: Sequence[memoryview]) -> None:
        raise NotImplementedError

    async def put_if_absent(self, key: str, data: bytes) -> None:
        raise NotImplementedError

    async def writer(self, key: str, size: int, *, older: Sequence[str] = ()) -> Any:
        raise NotImplementedError

    async def join_writer(self, token: bytes) -> Any:
        raise NotImplementedError

    async def delete(self, keys: Sequence[str]) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        pass


@dataclass
class _Scheme:
    """``sim://<job's name>``."""

    snapshots: Snapshots | None = None
    asked: Asked = field(default_factory=Asked)
    is_filled: bool = True

    def __call__(self, url: str, context: object) -> Storage:
        kind, ranks, shapes = url.removeprefix("sim://").split("-")
        assert self.snapshots is not None
        job = Job(kind, int(ranks), shapes)
        return SimulatedStorage(self.snapshots, job, self.asked, is_filled=self.is_filled)


scheme = _Scheme()
register("sim", scheme)
