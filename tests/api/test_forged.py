# SPDX-License-Identifier: Apache-2.0
"""Documents that are intact, but lie: refused before memory is taken, and found by ``verify``."""

from __future__ import annotations

import copy
import functools
import itertools
import resource
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch

from actorsnap import FormatError, IncompatibleState, Options, StateDict, UsageError, sync
from actorsnap.errors import ActorSnapError
from actorsnap.format.geometry import Box
from actorsnap.format.manifest import (
    BytesEntry,
    CompositeEntry,
    ContainerEntry,
    TensorEntry,
    ValueEntry,
    ViewEntry,
)
from tests.api.damage import resign
from tests.state.saved import Part, Saved
from tests.support.cases import slow
from tests.support.manifests import document_of

FAST = Options(fsync=False)
Json: TypeAlias = Any


def rich() -> dict[str, Any]:
    """A state with every kind of entry."""
    base = torch.arange(24.0)
    return {
        "model": StateDict(
            weight=torch.nn.Parameter(torch.arange(6.0).view(2, 3)),
            ints=torch.arange(5),
            shared=base,
            tail=base[4:].view(4, 5),
            coo=torch.eye(3).to_sparse_coo(),
            csr=torch.eye(4).to_sparse_csr(),
            array=np.arange(7, dtype=np.int16),
            scalar=np.float32(2.5),
            dates=np.arange(3).astype("datetime64[D]"),
        ),
        "rest": StateDict(
            text="a long text " * 1000,
            numbers=list(range(3000)),
            nested=OrderedDict(a=[1, (2, 3)], b=Counter("aab")),
            inline=[torch.float16, torch.Size([2, 3]), 1 + 2j, b"raw", float("nan")],
            empty={},
        ),
    }


def quarters() -> Saved:
    """Two ranks that divide a tensor, share another and keep a third to themselves."""
    whole = torch.arange(16.0).view(4, 4)
    top, bottom = Box((0, 0), (2, 4)), Box((2, 0), (2, 4))
    return Saved(
        [
            [
                Part("model/w", whole[:2], top, (4, 4)),
                Part("model/all", torch.ones(3), replicated=True),
                Part("model/own", torch.zeros(2)),
            ],
            [Part("model/w", whole[2:], bottom, (4, 4)), Part("model/own", torch.ones(2))],
        ]
    )


# Global shapes --------------------------------------------------------------------------------


def _change_shards(**members: Json) -> Callable[[Json], None]:
    def change(manifest: Json) -> None:
        for entry in manifest["entries"]:
            if entry["path"] == "model/w":
                entry.update(members)

    return change


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Less address space than any of the forged tensors takes."""
    old = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, old)


@pytest.mark.parametrize("rows", [5, 1 << 40], ids=["a row", "terabytes"])
@pytest.mark.usefixtures("little_memory")
def test_a_global_shape_that_boxes_do_not_cover(tmp_path: Path, rows: int) -> None:
    """A manifest of a few hundred bytes must not make its reader ask for terabytes."""
    path = quarters().write(tmp_path / "s")
    for rank in (0, 1):
        resign(path, _change_shards(global_shape=[rows, 4]), rank)
    snapshot = sync.Snapshot(path, options=FAST)
    for read in (
        lambda: snapshot.read_object("model/w"),
        lambda: snapshot.read_object("1/model/w"),
        lambda: snapshot.get_state_dict_for_key("model"),
        lambda: snapshot.restore({"model": StateDict(w=None, all=torch.ones(3), own=None)}),
    ):
        with pytest.raises(FormatError, match=r"model/w: no shard has the elements from \(4, 0\)"):
            read()
    assert not snapshot.verify("full").ok


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"offsets": [3, 0]}, "no shard"),
        ({"offsets": [0, 1]}, "no shard"),
        ({"global_shape": [3, 4]}, "no shard"),
        ({"global_shape": [4]}, "no shard"),
        ({"offsets": [1, 0]}, "shards overlap|no shard has"),
    ],
)
def test_a_box_that_is_not_where_it_says(
    tmp_path: Path, members: dict[str, Json], says: str
) -> None:
    path = quarters().write(tmp_path / "s")
    resign(path, _change_shards(**members), 1)
    snapshot = sync.Snapshot(path, options=FAST)
    with pytest.raises(FormatError, match=says):
        snapshot.get_state_dict_for_key("model")
    assert not snapshot.verify("full").ok


# Verification ---------------------------------------------------------------------------------

SIZES = [0, 1, 3, 1 << 20, 1 << 40, (1 << 63) - 1]
SHAPES: list[Json] = [[], [0], [1], [2, 3], [3, 2], [1 << 40], [1 << 31, 1 << 31], [1] * 70]
STRANGE: dict[str, list[Json]] = {
    "path": ["model", "rest/x/y", "model/weight", "9", "other", "model/%zz", "model/new@part"],
    "kind": ["container", "value"],
    "type": [
        *("tensor", "parameter", "numpy", "numpy_scalar", "dict", "list", "tuple"),
        *("bytes", "str", "json", "numpy", "counter"),  # nobody unpickles to verify
    ],
    "dtype": ["float32", "int8", "quint8", "bool", "unheard_of", "<f4", "<f8", "complex64"],
    "shape": SHAPES,
    "strides": [[0], [1], [1, 1], [5, 1], [0, 0], [1 << 40, 1], [1 << 62, 1 << 62]],
    "offset": SIZES,
    "of": ["model/weight", "model/coo", "model/nothing", "rest/text"],
    "requires_grad": [True],
    "replicated": [True],
    "global_shape": SHAPES,
    "offsets": [[0], [0, 0], [1 << 40, 0]],
    "layout": ["sparse_coo", "sparse_csr", "sparse_bsc", "quantized_tensor"],
    "parts": [[], ["values"], ["indices", "values"], ["crow_indices", "col_indices", "values"]],
    "parameters": [{}, {"is_coalesced": None}, {"scale": 1.0, "zero_point": 0}, {"axis": 3}],
    "attributes": [
        *(7, {"$": "nothing", "v": 1}, {"$": "dict"}, [[]]),
        *({"a": {"$": "int", "v": "x"}}, {"a b": 1}, {"_": 1}, {"grad": 1}, {"": None}),
    ],
    "memory_format": ["channels_last", "channels_last_3d", "preserve_format", 7],
    "value": [
        *({}, {"$": "int", "v": "x"}, {"$": "dtype", "v": "float99"}, {"$": "size", "v": [-1]}),
        *({"$": "npdtype", "v": "O"}, {"$": "dict", "v": [[[], 1]]}, {"$": "float", "v": "00"}),
        *({"$": "device", "v": "nowhere"}, {"$": "bytes", "v": "!"}, {"$": 3, "v": 1}),
        *([[[[{"$": "tuple", "v": 5}]]]], {"$": "complex", "v": [1]}),
    ],
}


MEMBERS = {
    kind: {"kind", *struct.__struct_fields__}
    for kind, struct in {
        "container": ContainerEntry,
        "tensor": TensorEntry,
        "view": ViewEntry,
        "composite": CompositeEntry,
        "value": ValueEntry,
        "bytes": BytesEntry,
    }.items()
}


_GONE = object()


def edited(manifest: Json, *way: str | int, to: object) -> Json:
    """A copy of the manifest with another value at a place, or without what is there."""
    forged = copy.deepcopy(manifest)
    at = forged
    for step in way[:-1]:
        at = at[step]
    if to is _GONE:
        at.pop(way[-1])
    else:
        at[way[-1]] = to
    return forged


def forgeries(manifest: Json) -> Iterator[tuple[str, Json]]:
    """Yields a name and a changed manifest, each with one thing wrong, or only different."""
    entries = manifest["entries"]
    with_data = [entry for entry in entries if "data" in entry]
    for number, entry in enumerate(entries):
        path = entry["path"]
        for member, values in STRANGE.items():
            for value in values if member in MEMBERS[entry["kind"]] else values[:1]:
                if entry.get(member) != value:
                    forged = edited(manifest, "entries", number, member, to=value)
                    yield f"{path}: {member}={value}"[:120], forged
        for member in entry:
            yield f"{path}: no {member}", edited(manifest, "entries", number, member, to=_GONE)
        yield f"no {path}", edited(manifest, "entries", number, to=_GONE)
        yield f"{path} twice", edited(manifest, "entries", to=[*entries, entry])
        if "data" in entry:
            data = entry["data"]
            for at, more in ((0, 1), (1, 64), (1, -64), (2, 64), (2, -4), (2, 1 << 40)):
                forged = edited(manifest, "entries", number, "data", at, to=data[at] + more)
                yield f"{path}: data[{at}] += {more}", forged
            other = with_data[with_data.index(entry) - 1]
            forged = edited(manifest, "entries", number, "data", to=other["data"])
            yield f"{path} has the bytes of {other['path']}", forged
    for number, record in enumerate(manifest["objects"]):
        for member in ("size", "header_bytes", "header_crc32c"):
            for value in (0, 4096, 8192, record[member] + 1, 1 << 40):
                forged = edited(manifest, "objects", number, member, to=value)
                yield f"{record['key']}: {member}={value}", forged
    for member, value in (("rank", 1), ("attempt", "other"), ("block_bytes", 1), ("objects", [])):
        yield f"{member}={value}", edited(manifest, member, to=value)


def refusal(call: Callable[[], object]) -> str:
    """What of a snapshot a call refuses; empty if it does not, or only what is asked of it."""
    try:
        call()
    except (IncompatibleState, UsageError):
        return ""
    except ActorSnapError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def is_verified(snapshot: sync.Snapshot) -> bool:
    try:
        return snapshot.verify("full").ok
    except FormatError:
        return False


def readers(path: Path, rank: int, state: dict[str, Any]) -> list[Callable[[], object]]:
    snapshot = sync.Snapshot(path, options=FAST)
    found: list[Callable[[], object]] = [lambda: snapshot.restore(state, strict=False)]
    for key in state:
        found.append(functools.partial(snapshot.get_state_dict_for_key, key))
        found.append(functools.partial(snapshot.read_object, f"{rank}/{key}"))
    return found


def unlike(
    path: Path, rank: int, state: Callable[[], dict[str, Any]], step: int
) -> tuple[list[str], int]:
    """Every ``step``-th forgery: those that ``verify`` misses, and how many a reader refuses."""
    (file,) = path.glob(f"*/manifest/{rank}.json")
    manifest = document_of(file.read_bytes())
    missed, num_refused = [], 0
    for name, forged in itertools.islice(forgeries(manifest), 0, None, step):

        def forge(document: Json, forged: Json = forged) -> None:
            document.clear()
            document.update(forged)

        resign(path, forge, rank)
        try:
            refusals = [found for call in readers(path, rank, state()) if (found := refusal(call))]
            num_refused += bool(refusals)
            if refusals and is_verified(sync.Snapshot(path)):
                missed.append(f"{name}: {refusals[0]}")
        except Exception as error:
            missed.append(f"{name}: {error!r}")
    return missed, num_refused


each_step = pytest.mark.parametrize("step", [11, slow(1)])
"""Entries have many members: an interval has all kinds of forgeries, of other entries."""


@each_step
@pytest.mark.parametrize("key", ["model", "rest"])
def test_verify_fails_whatever_restore_refuses(tmp_path: Path, key: str, step: int) -> None:
    def state() -> dict[str, Any]:
        return {key: rich()[key]}

    sync.Snapshot.take(tmp_path / "s", state(), options=FAST)
    missed, num_refused = unlike(tmp_path / "s", 0, state, step)
    assert missed == []
    assert num_refused > 150 // step


@each_step
@pytest.mark.parametrize("rank", [0, 1])
def test_verify_fails_whatever_restore_refuses_of_many_ranks(
    tmp_path: Path, rank: int, step: int
) -> None:
    def state() -> dict[str, Any]:
        return {"model": StateDict(w=torch.empty(4, 4), all=torch.ones(3), own=torch.ones(2))}

    missed, num_refused = unlike(quarters().write(tmp_path / "s"), rank, state, step)
    assert missed == []
    assert num_refused > 75 // step


def test_verify_accepts_what_is_restored(tmp_path: Path) -> None:
    """Else the tests above say nothing."""
    sync.Snapshot.take(tmp_path / "s", rich(), options=FAST)
    for path in (tmp_path / "s", quarters().write(tmp_path / "q")):
        assert sync.Snapshot(path).verify("full").problems == ()


def test_manifests_out_of_rank_order(tmp_path: Path) -> None:
    """Each rank would get what another one kept to itself."""
    path = quarters().write(tmp_path / "s")
    first, second = [next(path.glob(f"*/manifest/{rank}.json")) for rank in range(2)]
    aside = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(aside)
    with pytest.raises(FormatError, match=r"it is the manifest of rank [01]"):
        sync.Snapshot(path).read_object("0/model/own")
