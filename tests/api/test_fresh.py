# SPDX-License-Identifier: Apache-2.0
"""What is restored into nothing has the strides and the attributes of what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from actorsnap import FormatError, ModelState, Options, StateDict
from actorsnap.format.tables import decode_rank_manifest
from actorsnap.storage.base import StorageContext
from actorsnap.storage.registry import open_storage
from actorsnap.sync import Snapshot
from actorsnap.testing import run_blocking_in_thread
from tests.api.facades import Facade, each_facade
from tests.state.saved import ATTEMPT
from tests.support.manifests import document_of, encoded
from tests.support.world import SimulatedSave

pytestmark = pytest.mark.blocking

FORMATS = {
    "channels_last": (torch.channels_last, (2, 3, 4, 5)),
    "channels_last_3d": (torch.channels_last_3d, (2, 3, 4, 5, 6)),
}


def strided(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    memory_format, shape = FORMATS[name]
    tensor = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    return tensor.contiguous(memory_format=memory_format)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, (4, 5))
        self.bias = nn.Parameter(torch.zeros(2))

    @staticmethod
    def on_meta() -> Net:
        with torch.device("meta"):
            return Net()


def same_strides(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found, expected) and found.stride() == expected.stride()


# Memory formats -------------------------------------------------------------------------------


@each_facade
@pytest.mark.parametrize("name", FORMATS)
def test_fresh_tensors_are_strided_as_saved(api: Facade, tmp_path: Path, name: str) -> None:
    saved = {
        "plain": strided(name),
        "half": strided(name, torch.bfloat16),
        "parameter": nn.Parameter(strided(name)),
        "row_major": strided(name).contiguous(),
        "part": strided(name)[:, 1:],
    }
    snapshot = api.run(api.Snapshot.take(tmp_path / "s", {"s": StateDict(saved)}))
    into = StateDict({key: None for key in saved} | {"plain": strided(name).to("meta")})
    api.run(snapshot.restore({"s": into}))
    found = api.run(snapshot.get_state_dict_for_key("s"))
    manifest = api.run(snapshot.get_manifest())
    for key, value in saved.items():
        expected = value.contiguous() if key == "part" else value
        for fresh in (found[key], into[key], api.run(snapshot.read_object(f"s/{key}"))):
            assert same_strides(fresh, expected), key
            assert type(fresh) is type(value)
        is_strided = key not in ("row_major", "part")
        assert manifest[f"0/s/{key}"].memory_format == (name if is_strided else None)
    # What is on disk is row-major all the same.
    (file,) = (tmp_path / "s").glob("*/data/=small/0-0.safetensors")
    stored = load_file(file)["s/plain"]
    assert stored.is_contiguous()
    assert torch.equal(stored, saved["plain"])


@pytest.mark.parametrize("offload", ["thread", "process"])
def test_a_module_on_meta_is_strided_as_saved(tmp_path: Path, offload: str) -> None:
    net = Net()
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    options = Options(offload=offload, fsync=False)
    snapshot = Snapshot.async_take(tmp_path / "s", {"net": net}, options=options).wait()
    fresh = Net.on_meta()
    snapshot.restore({"net": fresh})
    assert same_strides(fresh.conv.weight, net.conv.weight)
    assert not fresh.conv.weight.is_contiguous()


def test_places_that_exist_keep_their_strides(tmp_path: Path) -> None:
    snapshot = Snapshot.take(tmp_path / "s", {"s": StateDict(x=strided("channels_last"))})
    held = torch.zeros(2, 3, 4, 5)
    snapshot.restore({"s": StateDict(x=held)})
    assert same_strides(held, strided("channels_last").contiguous())


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_weight_is_strided_as_saved(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(strided("channels_last"), 0.5, 3, torch.qint8)
    snapshot = Snapshot.take(tmp_path / "s", {"s": StateDict(q=quantized)})
    found = snapshot.read_object("s/q")
    assert found.stride() == quantized.stride()
    assert torch.equal(found.int_repr(), quantized.int_repr())


def test_what_ranks_divide_is_strided_as_saved(tmp_path: Path) -> None:
    large = torch.randn(8, 16, 96, 96).contiguous(memory_format=torch.channels_last)
    state = {"s": StateDict(x=nn.Parameter(large))}
    state["s"]["x"].partition_dim = 1
    simulate(tmp_path, [state, state])
    manifests = [document_of(path.read_bytes()) for path in tmp_path.glob("*/manifest/*.json")]
    boxes = [entry for manifest in manifests for entry in manifest["entries"]]
    assert len(boxes) > 1, "it was divided"
    found = Snapshot(tmp_path).read_object("s/x")
    assert same_strides(found.detach(), large)
    assert found.partition_dim == 1


def simulate(folder: Path, states: list[dict[str, Any]]) -> None:
    async def save() -> None:
        context = StorageContext(run_blocking=run_blocking_in_thread, durable=False)
        storage = open_storage(folder, context)
        world = SimulatedSave(
            storages=[storage] * len(states),
            states=states,
            run_blocking=run_blocking_in_thread,
            attempt=ATTEMPT,
            replicated=["**"],
        )
        assert await world.run() == dict.fromkeys(range(len(states)))
        await storage.aclose()

    anyio.run(save)


def test_a_memory_format_of_other_dims_is_refused(tmp_path: Path) -> None:
    snapshot = Snapshot.take(tmp_path / "s", {"s": StateDict(x=strided("channels_last"))})
    (path,) = (tmp_path / "s").glob("*/manifest/0.json")
    document = document_of(path.read_bytes())
    (entry,) = [entry for entry in document["entries"] if "memory_format" in entry]
    entry["memory_format"] = "channels_last_3d"
    with pytest.raises(FormatError, match="is not channels_last_3d"):
        decode_rank_manifest(encoded(document), "/".join(path.parts[-3:]))
    assert snapshot.verify().ok


# Attributes -----------------------------------------------------------------------------------

PLAIN: dict[str, Any] = {
    "tensor_parallel": True,
    "partition_dim": 1,
    "scale": float("inf"),
    "name_of_it": "w",
    "nothing": None,
    "shape_before": (2, [3, 4]),
    "more": {"a": [1, 2.5], 3: "x"},
    "kept_as": torch.bfloat16,
}


def annotate(parameter: torch.Tensor) -> torch.Tensor:
    """Gives it attributes: those that are saved, and others."""
    vars(parameter).update(PLAIN)
    vars(parameter).update(
        weight_loader=lambda: None,
        main_grad=torch.ones(2),
        loop=Endless(),
        huge="x" * 5000,
        deep=[[object()]],
        _private=1,
    )
    return parameter


class Endless(list[Any]):
    """No plain list."""


def attributes(value: Any) -> dict[str, Any]:
    return dict(vars(value))


@each_facade
@pytest.mark.parametrize("wrap", [False, True], ids=["module", "ModelState"])
def test_parameters_of_a_module_keep_plain_attributes(
    api: Facade, tmp_path: Path, wrap: bool
) -> None:
    net = Net()
    annotate(net.conv.weight)
    compiled: Any = torch.compile(net, backend="eager")
    state = {"net": ModelState(compiled) if wrap else net}
    snapshot = api.run(api.Snapshot.take(tmp_path / "s", state))
    prefix = "net/model" if wrap else "net"
    found = api.run(snapshot.read_object(f"{prefix}/conv.weight"))
    assert attributes(found) == PLAIN
    assert isinstance(found.shape_before, tuple)
    assert attributes(api.run(snapshot.read_object(f"{prefix}/bias"))) == {}
    state_dict = api.run(snapshot.get_state_dict_for_key("net"))
    held = (state_dict["model"] if wrap else state_dict)["conv.weight"]
    assert attributes(held) == PLAIN
    # A parameter that is there keeps what it has.
    other = Net()
    other.conv.weight.partition_dim = 7  # type: ignore[attr-defined]
    api.run(snapshot.restore({"net": ModelState(other) if wrap else other}))
    assert attributes(other.conv.weight) == {"partition_dim": 7}


@pytest.mark.parametrize("offload", ["thread", "process"])
def test_parameters_of_a_stateful_keep_plain_attributes(tmp_path: Path, offload: str) -> None:
    held = annotate(nn.Parameter(torch.ones(3)))
    loose = torch.ones(3)
    loose.partition_dim = 1  # type: ignore[attr-defined]  # no parameter
    state = StateDict(held=held, loose=loose)
    options = Options(offload=offload, fsync=False)
    snapshot = Snapshot.async_take(tmp_path / "s", {"s": state}, options=options).wait()
    fresh = StateDict(held=None, loose=None)
    snapshot.restore({"s": fresh})
    assert type(fresh["held"]) is nn.Parameter
    assert attributes(fresh["held"]) == PLAIN
    assert attributes(fresh["loose"]) == {}


def test_a_module_on_meta_gets_those_that_it_lacks(tmp_path: Path) -> None:
    net = Net()
    annotate(net.conv.weight)
    Snapshot.take(tmp_path / "s", {"net": net})
    fresh = Net.on_meta()
    vars(fresh.conv.weight).update(partition_dim=0, weight_loader=print)
    Snapshot(tmp_path / "s").restore({"net": fresh})
    weight = fresh.conv.weight
    assert type(weight) is nn.Parameter
    assert torch.equal(weight, net.conv.weight)
    assert attributes(weight) == PLAIN | {"partition_dim": 0, "weight_loader": print}


def test_tied_parameters_share_memory_and_the_first_keeps_its_attributes(tmp_path: Path) -> None:
    first = annotate(nn.Parameter(torch.ones(4, 4)))
    snapshot = Snapshot.take(tmp_path / "s", {"s": StateDict(a=first, b=first)})
    found = snapshot.get_state_dict_for_key("s")
    assert found["a"].data_ptr() == found["b"].data_ptr()
    assert attributes(found["a"]) == PLAIN


@pytest.mark.parametrize("name", ["data", "backward", "__class__", "_private", "no name", "grad"])
def test_no_attribute_of_torch_is_written_or_replaced(tmp_path: Path, name: str) -> None:
    held = nn.Parameter(torch.ones(3))
    held.step = 1  # type: ignore[attr-defined]
    snapshot = Snapshot.take(tmp_path / "s", {"s": StateDict(x=held)})
    entry = snapshot.get_manifest()["0/s/x"]
    entry.attributes[name] = 1  # type: ignore[union-attr, index]
    found = Snapshot.read_object(snapshot, "s/x")
    assert attributes(found) == {"step": 1}
