# SPDX-License-Identifier: Apache-2.0
"""From a URL to a storage."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path, PurePosixPath
from types import ModuleType

import pytest

from actorsnap.errors import UsageError
from actorsnap.storage import Storage, StorageContext, known_schemes, open_storage, register
from actorsnap.storage import registry as registry_module
from actorsnap.storage.fs import FsStorage
from actorsnap.storage.memory import MemoryStorage
from actorsnap.storage.registry import canonical, without_secrets
from actorsnap.testing import run_blocking_in_thread

CONTEXT = StorageContext(run_blocking=run_blocking_in_thread)
_numbers = itertools.count()


class MineStorage(MemoryStorage):
    """A third party's storage."""

    def __init__(self, url: str, context: StorageContext) -> None:
        super().__init__("mine")
        self.url = url
        self.context = context


def returns_nonsense(url: str, context: StorageContext) -> object:
    return url


no_factory = 1

PointsOf = Callable[..., None]


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> PointsOf:
    """Installs entry points of the group, for this process."""

    def install(**points: str) -> None:
        given = [
            metadata.EntryPoint(name, value, registry_module.ENTRY_POINT_GROUP)
            for name, value in points.items()
        ]

        def find(*, group: str) -> metadata.EntryPoints:
            assert group == "actorsnap.storage"
            return metadata.EntryPoints(given)

        monkeypatch.setattr(metadata, "entry_points", find)
        # Other tests of this process have registered schemes of their own.
        monkeypatch.setattr(registry_module, "_registered", {})

    return install


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that can be imported, with this module's contents."""
    name = f"storage_of_a_third_party_{next(_numbers)}"
    monkeypatch.setitem(sys.modules, name, sys.modules[__name__])
    return name


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("/a/b", "/a/b"),
        ("/a/b/", "/a/b"),
        (PurePosixPath("/a/b"), "/a/b"),
        ("fs:///a/b", "/a/b"),
        ("FS:///a/b", "/a/b"),
        ("file:///a/b", "/a/b"),
        ("file://localhost/a/b", "/a/b"),
        ("fs://a/b", f"{Path.cwd()}/a/b"),
        ("a/b", f"{Path.cwd()}/a/b"),
        ("step:10", f"{Path.cwd()}/step:10"),
        ("./step:/10", f"{Path.cwd()}/step:/10"),
        ("./~/x", f"{Path.cwd()}/~/x"),
        ("a/~b", f"{Path.cwd()}/a/~b"),
        ("/a%20b/c?d#e", "/a%20b/c?d#e"),
        ("file:///a%20b", "/a%20b"),
        ("/a://b", "/a:/b"),
    ],
)
def test_local_paths(url: str, root: str) -> None:
    storage = open_storage(url, CONTEXT)
    assert isinstance(storage, FsStorage)
    assert storage.root == storage.url == root
    # A URL in a message can be used again.
    assert open_storage(storage.url, CONTEXT).url == root


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("memory://name", "memory://name"),
        ("memory://name/a/b/", "memory://name/a/b"),
        ("MEMORY://Name", "memory://Name"),
    ],
)
def test_memory(url: str, shown: str) -> None:
    storage = open_storage(url, CONTEXT)
    assert isinstance(storage, MemoryStorage)
    assert storage.url == shown


@pytest.mark.parametrize("url", ["", "fs://", "file://", "file://host/a", "a\0b", "memory://"])
def test_malformed_urls(url: str) -> None:
    with pytest.raises(UsageError):
        open_storage(url, CONTEXT)


@pytest.mark.parametrize("url", [None, 3, b"/a"])
def test_what_is_no_url(url: object) -> None:
    with pytest.raises(UsageError, match=type(url).__name__):
        open_storage(url, CONTEXT)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "url", [PurePosixPath("mine://bucket/step-1"), "file:/tmp/x", "FILE:/x", "s3:/bucket/x"]
)
def test_a_url_that_lost_a_slash(url: str | PurePosixPath) -> None:
    with pytest.raises(UsageError, match=r"lost a slash: local ones have three \(file:///path\)"):
        open_storage(url, CONTEXT)


@pytest.mark.parametrize("url", ["~", "~/x", "~somebody/x", "fs://~/x", PurePosixPath("~/x")])
def test_a_home_folder_is_not_created_here(url: str | PurePosixPath) -> None:
    with pytest.raises(UsageError, match=r"os\.path\.expanduser"):
        open_storage(url, CONTEXT)


def test_known_schemes() -> None:
    assert {"file", "fs", "memory"} <= set(known_schemes())
    assert list(known_schemes()) == sorted(known_schemes())


def test_an_unknown_scheme_lists_the_known_ones_and_shows_no_secret(
    entry_points: PointsOf,
) -> None:
    entry_points(mine="m:f")
    with pytest.raises(UsageError) as raised:
        open_storage("nosuch://user:secret@host/x", CONTEXT)
    assert (
        "unknown storage scheme 'nosuch'; known are: file, fs, gcs, gs, memory, mine, s3."
        in str(raised.value)
    )
    assert "secret" not in str(raised.value)


def test_built_in_schemes_do_not_read_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*, group: str) -> metadata.EntryPoints:
        raise AssertionError("entry points were read")

    monkeypatch.setattr(metadata, "entry_points", fail)
    for url in ("/a", "fs:///a", "file:///a", "memory://a"):
        open_storage(url, CONTEXT)


def test_backends_are_imported_only_when_asked_for() -> None:
    code = (
        "import sys, actorsnap.storage; "
        "print(sorted(m for m in sys.modules if m.startswith('actorsnap.storage.')))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout
    assert "registry" in shown
    assert "fs'" not in shown
    assert "memory" not in shown


# --- third parties ---------------------------------------------------------------------------


def test_an_entry_point(entry_points: PointsOf, mine: str) -> None:
    entry_points(mine=f"{mine}:MineStorage")
    storage = open_storage("Mine://host/a", CONTEXT)
    assert isinstance(storage, MineStorage)
    assert storage.url == "mine://host/a"
    assert storage.context is CONTEXT


def test_a_broken_entry_point_harms_only_its_own_scheme(entry_points: PointsOf, mine: str) -> None:
    entry_points(broken="no_such_module_at_all:f", mine=f"{mine}:MineStorage")
    assert isinstance(open_storage("mine://x", CONTEXT), Storage)
    assert "broken" in known_schemes()
    with pytest.raises(UsageError, match="'no_such_module_at_all:f'.*'broken'.*cannot be loaded"):
        open_storage("broken://x", CONTEXT)


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ("no_such_name", "cannot be loaded"),
        ("no_factory", "is not a factory but int"),
        ("returns_nonsense", "returned str"),
    ],
)
def test_entry_points_that_are_wrong(
    entry_points: PointsOf, mine: str, attribute: str, words: str
) -> None:
    entry_points(wrong=f"{mine}:{attribute}")
    with pytest.raises(UsageError, match=words) as raised:
        open_storage("wrong://x", CONTEXT)
    assert "'wrong'" in str(raised.value)


def test_two_packages_for_one_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    group = registry_module.ENTRY_POINT_GROUP
    points = metadata.EntryPoints(
        metadata.EntryPoint("two", value, group) for value in ("a:f", "b:f")
    )
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: points)
    with pytest.raises(UsageError, match="several packages.*a:f, b:f"):
        open_storage("two://x", CONTEXT)


def test_register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_registered", {})
    register("Mine", MineStorage)
    register("mine", MineStorage)
    assert isinstance(open_storage("mine://x", CONTEXT), MineStorage)
    assert "mine" in known_schemes()

    def other(url: str, context: StorageContext) -> Storage:
        return MineStorage(url, context)

    for scheme, words in (("mine", "taken"), ("fs", "taken"), ("no scheme", "not a URL scheme")):
        with pytest.raises(UsageError, match=words):
            register(scheme, other)


def test_a_loop_may_open_what_is_ready(
    entry_points: PointsOf, mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry_points(mine=f"{mine}:MineStorage")
    assert registry_module.is_ready("/a/b")
    assert registry_module.is_ready("memory://name")
    assert not registry_module.is_ready("mine://x")
    assert not registry_module.is_ready("nosuch://x")
    opener = registry_module.find_opener("mine://x")

    def fail(*, group: str) -> metadata.EntryPoints:
        raise AssertionError("entry points were read")

    monkeypatch.setattr(metadata, "entry_points", fail)
    assert opener(CONTEXT).url == "mine://x"
    monkeypatch.delitem(sys.modules, "actorsnap.storage.memory")
    assert not registry_module.is_ready("memory://name")
    unfinished = ModuleType("actorsnap.storage.memory")
    monkeypatch.setitem(sys.modules, unfinished.__name__, unfinished)
    assert not registry_module.is_ready("memory://name")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sftp://user:p@s:s@host:22/a", "sftp://user@host:22/a"),
        ("https://host/a?sig=secret", "https://host/a"),
        ("s3://key:secret@bucket/a", "s3://key@bucket/a"),
        ("s3://bucket/a?b", "s3://bucket/a?b"),
        ("http://host:80/a:b@c", "http://host:80/a:b@c"),
        ("a?b:c@d", "a?b:c@d"),
    ],
)
def test_secrets_in_urls_are_not_shown(url: str, shown: str) -> None:
    assert without_secrets(url) == shown


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("/a/b", "/a/b"),
        ("/a//b/", "/a/b"),
        ("//a/./b", "/a/b"),
        ("fs:///a/b", "/a/b"),
        ("FS:///a/b/", "/a/b"),
        ("file:///a/b", "/a/b"),
        ("file://localhost/a/b", "/a/b"),
        ("/a/../b", "/a/../b"),  # only the kernel knows where that is
        ("/localhost/a", "/localhost/a"),
        ("s3://bucket/a//b/", "s3://bucket/a/b"),
        ("gcs://bucket/a", "gs://bucket/a"),
        ("memory://name/a", "memory://name/a"),
        ("s3://key:secret@bucket/a/", "s3://key@bucket/a"),
        ("https://host/a/?sig=secret", "https://host/a"),
        ("/a/\udcff", "/a/\\udcff"),
    ],
)
def test_equal_places_have_equal_urls(url: str, shown: str) -> None:
    assert canonical(url) == shown


def test_a_relative_path_is_compared_as_an_absolute_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert canonical("ckpt/a") == canonical("fs://./ckpt//a") == f"{tmp_path}/ckpt/a"
