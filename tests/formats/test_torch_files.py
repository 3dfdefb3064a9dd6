# SPDX-License-Identifier: Apache-2.0
"""Snapshots of files that ``torch.save`` wrote, in both of its formats."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import random
import struct
import subprocess
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actorsnap import Options, Snapshot, UsageError
from actorsnap.errors import FormatError
from actorsnap.format.manifest import COMMIT_KEY, decode_commit
from tests.formats.checkpoints import is_same, make_model, training_state
from tests.support import forker

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant:UserWarning")

BOTH = pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])


def save(state: Any, path: Path, is_zip: bool = True) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=is_zip)


@BOTH
async def test_restores_in_place(tmp_path: Path, is_zip: bool) -> None:
    model, optimizer, saved = training_state(0)
    save(saved, tmp_path / "ckpt.pt", is_zip)
    other, another, _ = training_state(1)
    addresses = [parameter.data_ptr() for parameter in other.parameters()]
    snapshot = Snapshot(tmp_path / "ckpt.pt")
    assert (await snapshot.restore({"model": other, "optimizer": another})).is_complete
    assert [parameter.data_ptr() for parameter in other.parameters()] == addresses
    assert is_same(other, model)
    assert str(another.state_dict()) == str(optimizer.state_dict())
    assert await snapshot.read_object("epoch") == 3
    assert float(await snapshot.read_object("loss")) == 0.5


@BOTH
async def test_a_flat_state_dict_is_the_model(tmp_path: Path, is_zip: bool) -> None:
    saved, model = make_model(0), make_model(1)
    save(saved.state_dict(), tmp_path / "model.pth", is_zip)
    assert (await Snapshot(tmp_path / "model.pth").restore({"model": model})).is_complete
    assert is_same(model, saved)


async def test_an_extra_state_is_no_section(tmp_path: Path) -> None:
    save({"w": torch.ones(3), "fc._extra_state": {"a": 1}}, tmp_path / "model.pt")
    found = await Snapshot(tmp_path / "model.pt").get_state_dict_for_key("model")
    assert found["fc._extra_state"] == {"a": 1}


async def test_an_old_hugging_face_repo(tmp_path: Path) -> None:
    saved, model = make_model(0), make_model(1)
    save(saved.state_dict(), tmp_path / "pytorch_model.bin")
    await Snapshot(tmp_path).restore({"model": model})
    assert is_same(model, saved)


def kinds() -> dict[str, Any]:
    big = torch.arange(100.0).view(10, 10)
    return {
        "shared": [big, big, big.t(), big[2:4], big[:, 3]],
        "apart": list(torch.arange(12.0).split(4)),
        "strided": torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "expanded": torch.ones(1, 3).expand(5, 3),
        "empty": torch.ones(0, 3),
        "scalar": torch.tensor(7),
        "bf16": torch.ones(3, dtype=torch.bfloat16),
        "complex": torch.ones(3, dtype=torch.complex128),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "coo": torch.eye(4).to_sparse(),
        "csr": torch.eye(4).to_sparse_csr(),
        "values": {"a": [1, 2.5, None, True, "x", (3, b"y")], 4: {"b": torch.Size([1])}},
        "dtype": torch.float16,
    }


@BOTH
async def test_kinds_of_leaves(tmp_path: Path, is_zip: bool) -> None:
    saved = kinds()
    save({"s": saved}, tmp_path / "x.pt", is_zip)
    found = await Snapshot(tmp_path / "x.pt").get_state_dict_for_key("s")
    assert found.keys() == saved.keys()

    def check(a: Any, b: Any) -> None:
        assert type(a) is type(b)
        if isinstance(a, torch.Tensor):
            assert (a.dtype, a.shape, a.layout) == (b.dtype, b.shape, b.layout)
            assert a.requires_grad == b.requires_grad
            assert torch.equal(a.to_dense(), b.to_dense())
            if a.layout is torch.strided:
                assert a.stride() == b.stride()
        elif isinstance(a, dict):
            assert a.keys() == b.keys()
            for key in a:
                check(a[key], b[key])
        elif isinstance(a, list | tuple):
            assert len(a) == len(b)
            for x, y in zip(a, b, strict=True):
                check(x, y)
        else:
            assert a == b

    check(found, saved)
    memory = {tensor.untyped_storage().data_ptr() for tensor in found["shared"]}
    assert len(memory) == 1


async def test_only_the_bytes_of_a_slice(tmp_path: Path) -> None:
    """A slice keeps its whole storage in the file; the rest is not read."""
    whole = torch.arange(1 << 20, dtype=torch.float32)
    save({"s": {"part": whole[100:110]}}, tmp_path / "x.pt")
    snapshot = Snapshot(tmp_path / "x.pt")
    entry: Any = (await snapshot.get_manifest())["0/s/part"]
    assert entry.data.stop - entry.data.start == 40
    assert torch.equal(await snapshot.read_object("s/part"), whole[100:110])


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@BOTH
async def test_a_hostile_pickle_is_refused_by_name(tmp_path: Path, is_zip: bool) -> None:
    mark = tmp_path / "mark"
    save({"model": {"w": torch.ones(3)}, "x": Hostile(mark)}, tmp_path / "x.pt", is_zip)
    for call in ("get_manifest", "verify"):
        with pytest.raises(UsageError, match=r"x\.pt.*system.*not executed.*allow_pickle"):
            await getattr(Snapshot(tmp_path / "x.pt"), call)()
    assert not mark.exists()
    options = Options(allow_pickle=True)
    assert await Snapshot(tmp_path / "x.pt", options=options).read_object("x") == 0
    assert mark.exists()


@BOTH
async def test_other_objects_need_permission(tmp_path: Path, is_zip: bool) -> None:
    saved = {"args": argparse.Namespace(lr=0.1), "array": np.arange(3)}
    save({"model": {"w": torch.ones(3)}, **saved}, tmp_path / "x.pt", is_zip)
    snapshot = Snapshot(tmp_path / "x.pt")
    assert (await snapshot.read_object("model/w")).tolist() == [1, 1, 1]
    for call in (snapshot.read_object("args"), snapshot.copy_to(tmp_path / "copy")):
        with pytest.raises(UsageError, match=r"x\.pt, 'args': .*argparse.Namespace.*allow_pickle"):
            await call
    snapshot = Snapshot(tmp_path / "x.pt", options=Options(allow_pickle=True))
    assert await snapshot.read_object("args") == saved["args"]
    assert (await snapshot.read_object("array") == saved["array"]).all()


class Seen:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Rows(list[int]):
    pass


ARRAYS: dict[str, Any] = {
    "loss": np.float64(0.25),
    "flag": np.bool_(True),
    "half": np.float16(1.5),
    "complex": np.complex64(1 + 2j),
    "matrix": np.arange(6, dtype=np.int16).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "empty": np.zeros((0, 3), np.uint8),
    "swapped": np.arange(3, dtype=">i4"),
    "dtype": np.dtype("float32"),
    "nested": [{"x": (np.int64(7), np.ones(2))}],
}


def plain(value: Any) -> Any:
    if isinstance(value, dict | list | tuple):
        items = value.values() if isinstance(value, dict) else value
        return [plain(item) for item in items]
    if isinstance(value, np.ndarray | np.generic):
        return type(value), value.dtype.newbyteorder("="), value.shape, value.tolist()
    return value


@BOTH
async def test_numbers_of_numpy_need_no_permission(tmp_path: Path, is_zip: bool) -> None:
    save({"model": {"w": torch.ones(3)}, "log": ARRAYS}, tmp_path / "x.pt", is_zip)
    before = torch.serialization.get_safe_globals()
    snapshot = Snapshot(tmp_path / "x.pt")
    found = await snapshot.get_state_dict_for_key("log")
    assert plain(found) == plain(ARRAYS)
    found["matrix"][:] = 0
    assert (await snapshot.read_object("log/matrix")).tolist() == ARRAYS["matrix"].tolist()
    await snapshot.copy_to(tmp_path / "copy")
    copy = Snapshot(tmp_path / "copy")
    assert plain(await copy.get_state_dict_for_key("log")) == plain(ARRAYS)
    entry: Any = (await copy.get_manifest())["0/log/loss"]
    assert (entry.type, entry.dtype) == ("numpy_scalar", "<f8")
    assert torch.serialization.get_safe_globals() == before
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "x.pt", weights_only=True)


class Reduced:
    """A value with any pickle."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


SCALAR, RECONSTRUCT = (np.float64(0).__reduce__()[0], np.zeros(0).__reduce__()[0])
EMPTY = (np.ndarray, (0,), b"b")
DOUBLE = np.dtype("f8")


@pytest.mark.parametrize(
    "value",
    [
        np.array([print], dtype=object),
        np.array(["text"]),
        np.datetime64("2026-01-01"),
        np.zeros(1, [("a", "f8")]),
        Reduced(SCALAR, (DOUBLE, b"short")),
        Reduced(SCALAR, (DOUBLE, b"x" * 16)),
        Reduced(SCALAR, (7, b"x" * 8)),
        Reduced(np.dtype, ("O",)),
        Reduced(np.dtype, ("f8", False, True), (3, "<", None, ("a",), {}, -1, -1, 0)),
        Reduced(np.ndarray, ((1 << 20,),)),
        Reduced(RECONSTRUCT, (torch.Size, (0,), b"b")),
        Reduced(RECONSTRUCT, EMPTY, (1, (3,), DOUBLE, False, b"x" * 8)),
        Reduced(RECONSTRUCT, EMPTY, (1, (-1, -1), DOUBLE, False, b"x" * 8)),
        Reduced(RECONSTRUCT, EMPTY, (1, (1,), DOUBLE, False, [1])),
    ],
)
async def test_forged_numbers_of_numpy_are_refused(tmp_path: Path, value: Any) -> None:
    save({"model": {"w": torch.ones(3)}, "x": value}, tmp_path / "x.pt")
    with pytest.raises((UsageError, FormatError), match=r"x.pt: .*numpy"):
        await Snapshot(tmp_path / "x.pt").get_manifest()


async def test_what_the_program_allowed(tmp_path: Path) -> None:
    save({"model": {"w": torch.ones(3)}, "from": Path("a/b")}, tmp_path / "x.pt")
    with pytest.raises(UsageError, match=r"needs pathlib.*allow pathlib\.\S+ by torch\.serial"):
        await Snapshot(tmp_path / "x.pt").read_object("from")
    with torch.serialization.safe_globals([type(Path())]):
        assert await Snapshot(tmp_path / "x.pt").read_object("from") == Path("a/b")


@BOTH
async def test_an_allowed_object_that_is_not_plain(tmp_path: Path, is_zip: bool) -> None:
    saved = {
        "args": argparse.Namespace(lr=0.1),
        "tensors": argparse.Namespace(t=torch.ones(2)),
        "other": argparse.Namespace(seen=[Seen(torch.ones(2))]),
        "rows": Rows([1]),
    }
    save({"model": {"w": torch.ones(3)}, **saved}, tmp_path / "x.pt", is_zip)
    snapshot = Snapshot(tmp_path / "x.pt")
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert await snapshot.read_object("args") == saved["args"]
        for name, why in {
            "tensors": "tensors inside of 'tensors' .Namespace",
            "other": r"'other': its pickle needs \S+\.Seen",
            "rows": r"'rows': its pickle needs \S+\.Rows",
        }.items():
            with pytest.raises(UsageError, match=why):
                await snapshot.read_object(name)
    save(saved["args"], tmp_path / "args.pt", is_zip)
    with torch.serialization.safe_globals([argparse.Namespace]):
        with pytest.raises(UsageError, match="only stores as a pickle.*allow_pickle=True"):
            await Snapshot(tmp_path / "args.pt").copy_to(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


async def test_long_numbers(tmp_path: Path) -> None:
    save({"model": {"w": torch.ones(3)}, "x": {2**100: 2**2000}}, tmp_path / "x.pt")
    assert await Snapshot(tmp_path / "x.pt").get_state_dict_for_key("x") == {2**100: 2**2000}
    save({"model": {"w": torch.ones(3)}, "x": 2**3000}, tmp_path / "x.pt")
    with pytest.raises(UsageError, match=r"more than 255 bytes.*allow that by options="):
        await Snapshot(tmp_path / "x.pt").get_manifest()


async def test_torch_is_left_alone(tmp_path: Path) -> None:
    """torch checks sparse tensors at the end of ``torch.load``, and ours have no data."""
    save({"w": torch.eye(3).to_sparse()}, tmp_path / "x.pt")
    await Snapshot(tmp_path / "x.pt").get_manifest()
    with torch.sparse.check_sparse_tensor_invariants():
        assert torch.load(tmp_path / "x.pt")["w"].is_sparse


def damaged_files() -> dict[str, tuple[bytes, str]]:
    files: dict[str, bytes] = {}
    for name, is_zip in {"zip": True, "legacy": False}.items():
        file = io.BytesIO()
        torch.save({"w": torch.ones(300)}, file, _use_new_zipfile_serialization=is_zip)
        files[name] = file.getvalue()
    return {
        "cut.pt": (files["zip"][:-500], "truncated.*copy it again"),
        "cut.pth": (files["legacy"][:-500], r"truncated: it has \d+ bytes, and its tensors end at"),
        "stub.pt": (files["legacy"][:60], "its pickle is damaged.*it is truncated"),
        "empty.pt": (b"", "this file is empty: a save or a copy did not end"),
        "zeros.pt": (bytes(600), "no format that actorsnap reads.*damaged"),
        "lfs.safetensors": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        "pytorch_model.bin": (b"", "it is not a file of torch.save.*0 bytes"),
    }


@pytest.mark.parametrize("name", damaged_files())
async def test_damage_in_a_line(tmp_path: Path, name: str) -> None:
    content, text = damaged_files()[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FormatError, match=f"{name}: .*{text}") as raised:
        await Snapshot(tmp_path if name.endswith(".bin") else tmp_path / name).restore(
            {"model": make_model()}
        )
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("forker")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_file_that_may_not_be_read() -> None:
    child = (
        "import os, sys, torch\nfrom actorsnap.sync import Snapshot\nos.chdir(sys.argv[1])\n"
        "os.setuid(65534)\ntry:\n Snapshot('x.pt').get_manifest()\n"
        "except PermissionError as error:\n print(error)"
    )
    with tempfile.TemporaryDirectory() as name:  # no folder of pytest's lets other users in
        Path(name).chmod(0o755)
        save({"w": torch.ones(3)}, Path(name) / "x.pt")
        (Path(name) / "x.pt").chmod(0)
        command = forker.command("-c", child, name)
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert "Permission denied" in done.stdout, done.stderr[-500:]
    assert "'x.pt'" in done.stdout


async def test_a_copy_has_the_feature_that_its_values_need(tmp_path: Path) -> None:
    for name, value in {"plain": [1], "values": {1, 2}}.items():
        save({"model": {"w": torch.ones(3)}, "x": value}, tmp_path / f"{name}.pt")
        await Snapshot(tmp_path / f"{name}.pt").copy_to(tmp_path / name)
        assert await Snapshot(tmp_path / name).read_object("x") == value
        commit = decode_commit((tmp_path / name / COMMIT_KEY).read_bytes())
        assert ("values" in commit.features) == (name == "values")


async def test_tensors_inside_of_objects(tmp_path: Path) -> None:
    save(make_model(), tmp_path / "x.pt")
    with pytest.raises(UsageError, match="Sequential"):
        await Snapshot(tmp_path / "x.pt").get_manifest()
    with pytest.raises(UsageError, match=r"x\.pt holds a whole module.*state_dict"):
        await Snapshot(tmp_path / "x.pt", options=Options(allow_pickle=True)).get_manifest()


@pytest.mark.filterwarnings("ignore")
async def test_torchscript(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "x.pt")
    with pytest.raises(UsageError, match="TorchScript"):
        await Snapshot(tmp_path / "x.pt").get_manifest()


def rewrite(path: Path, change: Any, **kwargs: Any) -> None:
    """Writes the zip file again with what ``change`` makes of each record."""
    with zipfile.ZipFile(path) as archive:
        records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w", **kwargs) as archive:
        for name, data in records:
            if (changed := change(name, data)) is not None:
                archive.writestr(name, changed)


def is_data(name: str) -> bool:
    return "/data/" in name


FAULTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "compressed": (
        lambda name, data: data,
        {"compression": zipfile.ZIP_DEFLATED},
        "is compressed: torch.save does not",
    ),
    "big-endian": (
        lambda name, data: b"big" if name.endswith("byteorder") else data,
        {},
        "byte order 'big'",
    ),
    "no data": (lambda name, data: None if is_data(name) else data, {}, "no data/0"),
    "short data": (lambda name, data: data[:-1] if is_data(name) else data, {}, "bytes of data/0"),
    "no pickle": (
        lambda name, data: None if name.endswith(".pkl") else data,
        {},
        "there is no commit object|0 records data.pkl|this file is of no format",
    ),
    "torn pickle": (
        lambda name, data: data[:-1] if name.endswith(".pkl") else data,
        {},
        "pickle is damaged",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_damaged_zip(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "x.pt"
    save({"w": torch.ones(3)}, path)
    change, kwargs, match = FAULTS[fault]
    rewrite(path, change, **kwargs)
    with pytest.raises((FormatError, UsageError), match=match):
        await Snapshot(path).get_manifest()


@BOTH
async def test_every_truncation_is_an_error(tmp_path: Path, is_zip: bool) -> None:
    path = tmp_path / "x.pt"
    save({"w": torch.arange(5.0), "b": torch.ones(3)}, path, is_zip)
    data = path.read_bytes()
    random.seed(0)
    for size in [*random.sample(range(len(data)), 40), len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises((FormatError, UsageError)):
            await Snapshot(path).get_manifest()


async def test_more_than_the_older_format_has(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    save({"w": torch.arange(5.0)}, path, is_zip=False)
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(FormatError, match="too long"):
        await Snapshot(path).get_manifest()


async def test_a_tensor_beyond_its_storage(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    save({"w": torch.arange(5.0)}, path)

    def longer(name: str, data: bytes) -> bytes:
        # BININT1 5, in the tuple of sizes.
        return data.replace(b"K\x05\x85", b"K\x06\x85") if name.endswith(".pkl") else data

    rewrite(path, longer)
    with pytest.raises(FormatError, match=r"ends at byte 24 of the 20 of its storage"):
        await Snapshot(path).get_manifest()


@pytest.mark.slow
async def test_a_long_pickle_of_the_older_format(tmp_path: Path) -> None:
    """Longer than what is read at first."""
    state = {f"{number}{'x' * 100}": torch.tensor([number]) for number in range(9000)}
    save(state, tmp_path / "x.pt", is_zip=False)
    found = await Snapshot(tmp_path / "x.pt").get_state_dict_for_key("model")
    assert [int(value) for value in found.values()] == list(range(9000))


async def test_a_plain_pickle_is_none(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(pickle.dumps({"w": 1}))
    with pytest.raises(FormatError, match="this is a pickle file"):
        await Snapshot(tmp_path / "x.pt").get_manifest()


async def test_zip64(tmp_path: Path) -> None:
    """The directory of a file with an end in the format for large files, as ``torch.save`` writes.

    The first fields say "look into the other one".
    """
    path = tmp_path / "x.pt"
    save({"w": torch.arange(5.0)}, path)
    data = bytearray(path.read_bytes())
    end = data.rfind(b"PK\x05\x06")
    assert data[end - 20 : end - 16] == b"PK\x06\x07"
    data[end + 8 : end + 12] = b"\xff" * 4
    data[end + 12 : end + 20] = struct.pack("<2L", 0xFFFFFFFF, 0xFFFFFFFF)
    path.write_bytes(data)
    assert torch.equal(await Snapshot(path).read_object("model/w"), torch.arange(5.0))
