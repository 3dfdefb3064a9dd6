# SPDX-License-Identifier: Apache-2.0
"""From a URL to a storage, whose backend is loaded on first use.

Backends register as ``scheme = "module:factory"`` with a ``StorageFactory``: built-in ones in a
table, so that a source tree works uninstalled, others in the entry-point group
``actorsnap.storage`` or by ``register``. A scheme is looked up in ``register``'s, the table, the
entry points (a broken package breaks only its users), then fsspec's.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from importlib import import_module, metadata
from importlib.util import find_spec

from actorsnap.errors import MissingPackage, UsageError
from actorsnap.storage.base import Storage, StorageContext, StorageFactory
from actorsnap.storage.posix import working_folder
from actorsnap.tracebacks import short_traceback
from actorsnap.wording import did_you_mean, printable

ENTRY_POINT_GROUP = "actorsnap.storage"

_BUILT_IN = {
    "file": "actorsnap.storage.fs:open_fs",
    "fs": "actorsnap.storage.fs:open_fs",
    "gcs": "actorsnap.storage.gs:open_gs",
    "gs": "actorsnap.storage.gs:open_gs",
    "memory": "actorsnap.storage.memory:open_memory",
    "s3": "actorsnap.storage.s3:open_s3",
}

_EXTRAS = {"gcs": "gcs", "gs": "gcs", "s3": "s3"}
"""Extras with the packages of built-in backends, by scheme."""

_ALIASES = {"file": "fs", "gcs": "gs"}

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_COLLAPSED_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")

_HOME = re.compile("(fs://)?~", re.IGNORECASE)

_PASSWORD = re.compile("(?<=://)([^/:@]*):[^/]*@")

_registered: dict[str, StorageFactory] = {}
_lock = threading.Lock()


@short_traceback
def register(scheme: str, factory: StorageFactory) -> None:
    """Makes ``scheme://`` URLs open with ``factory`` in this process. Idempotent."""
    if not _SCHEME.fullmatch(f"{scheme}://"):
        raise UsageError(f"not a URL scheme: {scheme!r}")
    scheme = scheme.lower()
    with _lock:
        if scheme in _BUILT_IN or _registered.get(scheme, factory) is not factory:
            raise UsageError(f"the storage scheme {scheme!r} is taken")
        _registered[scheme] = factory


def known_schemes() -> tuple[str, ...]:
    """Returns the schemes of the built-in, registered and installed storages, sorted.

    Aliases such as ``file`` and the schemes of fsspec are not among them.
    """
    names = {point.name.lower() for point in metadata.entry_points(group=ENTRY_POINT_GROUP)}
    with _lock:
        return tuple(sorted({*_BUILT_IN, *_registered, *names}))


@short_traceback
def open_storage(url: str | os.PathLike[str], context: StorageContext) -> Storage:
    """Opens the storage of a URL or a local path. No I/O except imports.

    A string without ``scheme://`` and every ``os.PathLike`` is a local path. URLs are taken
    verbatim: ``%20`` is not a space.

    Raises:
        UsageError: The URL is malformed, its scheme is unknown, or its backend cannot be loaded or
            refuses the options.
    """
    return find_opener(url)(context)


def find_opener(url: str | os.PathLike[str]) -> Callable[[StorageContext], Storage]:
    """``open_storage`` in two steps: the first reads all files and imports all modules."""
    text = check_url(url)
    scheme, rest = _split(url, text)
    if scheme is None:
        scheme = "fs"
    else:
        text = f"{scheme}://{rest}"
    factory = _factory(scheme)
    return lambda context: _check_storage(scheme, factory(text, context))


def is_ready(url: str | os.PathLike[str]) -> bool:
    """Whether ``open_storage`` would read no file: an event loop may call it."""
    scheme = _split(url, check_url(url))[0] or "fs"
    with _lock:
        if scheme in _registered:
            return True
    module, _, name = _BUILT_IN.get(scheme, "").partition(":")
    # The factory is missing while another thread imports the module.
    return hasattr(sys.modules.get(module), name)


def is_shared(url: str) -> bool:
    """Whether other processes that open the URL find the same objects."""
    scheme = _split(url, url)[0]
    with _lock:
        return scheme != "memory" and scheme not in _registered


def _split(url: object, text: str) -> tuple[str | None, str]:
    """Returns scheme (None for a path) and rest."""
    match = _SCHEME.match(text)
    if match is None or not isinstance(url, str):
        return None, text
    return match[1].lower(), text[match.end() :]


def absolute(url: str) -> str:
    """Returns a URL that does not depend on the working folder."""
    scheme, path = ("fs://", url[5:]) if url.lower().startswith("fs://") else ("", url)
    if not path or path.startswith("/") or (not scheme and _SCHEME.match(url)):
        return url
    return f"{scheme}{working_folder(path)}/{path}"


def folder_and_name(url: str) -> tuple[str, str] | None:
    """Returns the URL of a place's folder, and its name there; None without one."""
    scheme, rest = _split(url, url)
    folder, _, name = rest.rstrip("/").rpartition("/")
    if scheme is None:
        return (folder or "/", name) if name else None
    if not folder or not name or "?" in rest:
        return None
    return f"{url.removesuffix(rest)}{folder}", name


def without_secrets(url: str) -> str:
    """Returns the URL without password and, for fsspec, without the query: a signature."""
    match = _SCHEME.match(url)
    if match is None:
        return url
    shown = _PASSWORD.sub(r"\1@", url)
    with _lock:
        has_query = match[1].lower() not in {*_BUILT_IN, *_registered}
    return shown.partition("?")[0] if has_query else shown


def canonical(url: str) -> str:
    """Returns the same text for equal places, absolute and without secrets."""
    text = printable(without_secrets(absolute(url)))
    match = _SCHEME.match(text)
    scheme, path = ("fs", text) if match is None else (match[1].lower(), text[match.end() :])
    scheme = _ALIASES.get(scheme, scheme)
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if scheme != "fs":
        root = "/" if path.startswith("/") else ""
        return f"{scheme}://{root}{'/'.join(parts)}"
    if path.startswith("localhost/"):  # of file://
        del parts[0]
    return "/" + "/".join(parts)


def check_url(url: object) -> str:
    """Returns a URL or path as a string; refuses probable mistakes."""
    if isinstance(url, str):
        text = url
    elif isinstance(url, os.PathLike):
        text = os.fsdecode(url)
    else:
        raise UsageError(f"a URL or a path is needed, not {type(url).__name__}")
    if not text or "\0" in text:
        raise UsageError("a URL or a path must not be empty or contain NUL")
    if _HOME.match(text):
        raise UsageError(
            f"{text!r} begins with ~, which only shells expand, and only without quotes: pass an "
            "absolute path (in Python: os.path.expanduser(path))"
        )
    if _COLLAPSED_SCHEME.match(text):
        raise UsageError(
            f"{text!r} looks like a URL that lost a slash: local ones have three (file:///path), "
            "others two (in Python, pass a str: pathlib joins them). For a folder of that name, "
            "pass an absolute path"
        )
    return text


def _factory(scheme: str) -> StorageFactory:
    with _lock:
        registered = _registered.get(scheme)
    if registered is not None:
        return registered
    if scheme in _BUILT_IN:
        return _load(scheme, _BUILT_IN[scheme])
    points = [
        point
        for point in metadata.entry_points(group=ENTRY_POINT_GROUP)
        if point.name.lower() == scheme
    ]
    # A distribution may be on sys.path twice; only different factories conflict.
    values = sorted({point.value for point in points})
    if not values:
        return _fsspec_factory(scheme)
    if len(values) > 1:
        raise UsageError(
            f"several packages provide the storage scheme {scheme!r}: {', '.join(values)}. "
            "Uninstall all but one."
        )
    package = points[0].dist.name if points[0].dist is not None else ""
    return _load(scheme, values[0], package=package)


def _fsspec_factory(scheme: str) -> StorageFactory:
    advice = "pip install 'actorsnap[fsspec]' adds the schemes of fsspec"
    if find_spec("fsspec") is not None:
        advice = "fsspec, which is installed, does not know it either"
        module = import_module("actorsnap.storage.fsspec")
        if module.has_implementation(scheme):
            factory: StorageFactory = module.open_fsspec
            return factory
    known = known_schemes()
    hint = did_you_mean(scheme, known, cutoff=0.5)
    raise UsageError(
        f"unknown storage scheme {scheme!r}; {f'{hint} Known' if hint else 'known'} are: "
        f"{', '.join(known)}. {advice}. A package can add a scheme through the entry-point group "
        f"{ENTRY_POINT_GROUP!r}."
    )


def _load(scheme: str, value: str, package: str = "") -> StorageFactory:
    owner = f" of the package {package!r}" if package else ""
    what = f"the entry point {value!r}{owner} for the storage scheme {scheme!r}"
    module, _, attribute = value.partition(":")
    try:
        loaded: object = import_module(module.strip())
        for name in attribute.strip().split("."):
            loaded = getattr(loaded, name)
    # An import may raise anything.
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if not package and scheme in _EXTRAS and missing is not None:
            raise MissingPackage(
                f"{scheme}:// needs the package {missing.partition('.')[0]!r}, which is not "
                f"installed: pip install 'actorsnap[{_EXTRAS[scheme]}]'"
            ) from None
        raise UsageError(f"{what} cannot be loaded: {error!r}. Repair or uninstall it.") from error
    if not callable(loaded):
        raise UsageError(f"{what} is not a factory but {type(loaded).__name__}")
    factory: StorageFactory = loaded
    return factory


def _check_storage(scheme: str, storage: object) -> Storage:
    if not isinstance(storage, Storage):
        raise UsageError(
            f"the factory for the storage scheme {scheme!r} returned {type(storage).__name__}, "
            "which is not an actorsnap.storage.Storage"
        )
    return storage
