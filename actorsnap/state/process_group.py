# SPDX-License-Identifier: Apache-2.0
"""Finds the ranks that save together, and their store.

They come from a process group, the caller's store, or torchrun's environment variables, without
network access: a store from the environment connects when cloned.
"""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from actorsnap.errors import UsageError

_CONNECT_S = 300.0
_HOST_S = 20.0
_PREFIX_KEY = "actorsnap/prefix"
_METHODS = ("clone", "queue_push", "queue_pop", "queue_len", "set_timeout")


@dataclass(frozen=True, slots=True)
class StoreAddress:
    host: str
    port: int
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Two or more ranks that save together.

    Attributes:
        rank: Rank in the group.
        ranks: Global ranks, in the order of the group.
        store: Clone it before use. Has queues (``transport.store.QueueStore``), or is a FileStore:
            then ranks meet at another one (``transport.meeting``).
        name: Unique at one store and equal on all ranks.
        address: Address of the store below all prefixes, if any.
    """

    rank: int
    world_size: int
    ranks: tuple[int, ...]
    store: Any
    name: str
    address: StoreAddress | None = None

    @classmethod
    def of_one(cls) -> Group:
        """Returns a group of this process only, also in a job of many."""
        return cls(0, 1, (global_rank(),), None, "one")


def is_initialized() -> bool:
    """Whether there is a default process group."""
    dist = _distributed()
    return bool(dist.is_available() and dist.is_initialized())


def global_rank() -> int:
    return _distributed().get_rank() if is_initialized() else 0


def likely_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """Returns the likely number of ranks that save together, without a connection."""
    if is_initialized():
        return int(_distributed().get_world_size())
    text = environ.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() else 1


def find_group(
    group: Any = None, store: Any = None, *, environ: Mapping[str, str] = os.environ
) -> Group | None:
    """Returns the group of a call; None if it has one rank only.

    Args:
        group: A ``ProcessGroup`` with this process. None takes the default one if initialised, else
            torchrun's environment variables. Or a ``Group``.
        store: A c10d store of all ranks, instead of the group's own. Jobs that share one need a
            ``PrefixStore`` each.
        environ: Replaces the process environment.

    Raises:
        UsageError: This process is not in ``group``, the store has no queues, or ranks contradict
            each other.
    """
    if isinstance(group, Group):
        return group if group.world_size > 1 else None
    process_group = _process_group(group)
    if process_group is not None:
        return _of_process_group(process_group, store, environ)
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if store is None and not all(environ.get(name) for name in needed):
        return None
    rank, world_size = _variable("RANK", environ), _variable("WORLD_SIZE", environ)
    if world_size == 1:
        return None
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is not in [0, {world_size}), the ranks of this job")
    name = f"{_job(environ)}/given"
    if store is None:
        # As in torch/distributed/rendezvous.py: torchrun's agent hosts the store, else rank 0.
        is_host = rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
        port = _variable("MASTER_PORT", environ)
        store = _store_of_environment(os.getpid(), environ["MASTER_ADDR"], port, is_host)
        name = f"{_job(environ)}/env"
    return _group(rank, tuple(range(world_size)), store, name)


def subgroup(rank: int, ranks: tuple[int, ...]) -> Group:
    """Returns ranks of the default process group, which need no process group of their own.

    Args:
        rank: Position of this process in ``ranks``.

    Raises:
        UsageError: See ``find_group``.
    """
    store = _store_of(_distributed().group.WORLD)
    digest = hashlib.sha256(repr(ranks).encode()).hexdigest()[:12]
    return _group(rank, ranks, store, f"{_job(os.environ)}/ranks@{digest}")


def find_prefix(store: Any) -> str:
    """Returns the prefix that a store adds to all keys, or "".

    No method returns it. So one rank sets a random key, finds it among all keys, and publishes the
    prefix. Blocks, up to the store's timeout.

    Raises:
        RuntimeError: The store does not answer, or this torch cannot list its keys.
    """
    base = _without_prefixes(store)
    if base is store:
        return ""
    if store.add(f"{_PREFIX_KEY}/turn", 1) == 1:
        if not hasattr(base, "list_keys"):
            raise RuntimeError("this torch cannot list the keys of a store")
        key = f"{_PREFIX_KEY}/{secrets.token_hex(8)}"
        store.set(key, b"")
        [whole] = [other for other in base.list_keys() if other.endswith(key)]
        store.delete_key(key)
        store.set(_PREFIX_KEY, whole.removesuffix(key).rstrip("/"))
    prefix: bytes = store.get(_PREFIX_KEY)
    return prefix.decode()


def has_queues(store: Any) -> bool:
    return not isinstance(_without_prefixes(store), _distributed().FileStore)


def _without_prefixes(store: Any) -> Any:
    dist = _distributed()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _distributed() -> Any:
    """Untyped: the type stubs lack the stores."""
    import torch.distributed

    return torch.distributed


def _process_group(group: Any) -> Any:
    dist = _distributed()
    if group is None:
        return dist.group.WORLD if is_initialized() else None
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        if dist.is_available() and group == dist.GroupMember.NON_GROUP_MEMBER:
            raise UsageError(
                "this process is not a member of group: only members call take and restore with it"
            )
        raise UsageError(
            f"group must be a torch.distributed ProcessGroup, not {type(group).__name__}; of a "
            "DeviceMesh pass mesh.get_group()"
        )
    return group


def _of_process_group(group: Any, store: Any, environ: Mapping[str, str]) -> Group | None:
    dist = _distributed()
    try:
        rank = dist.get_rank(group)
        ranks = tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError) as error:
        raise UsageError(
            "the process group is not known to torch.distributed any more: it was destroyed"
        ) from error
    if rank < 0:
        raise UsageError("this process is not a member of group")
    if len(ranks) == 1:
        return None
    name = f"{_job(environ)}/{group.group_name}"
    if group is not dist.group.WORLD:
        # torch names groups by a counter, which may differ between ranks.
        name += "@" + hashlib.sha256(repr(ranks).encode()).hexdigest()[:12]
    return _group(rank, ranks, _store_of(group) if store is None else store, name)


def _group(rank: int, ranks: tuple[int, ...], store: Any, name: str) -> Group:
    address = _check_store(store)
    return Group(rank, len(ranks), ranks, store, name, address)


def _store_of(group: Any) -> Any:
    try:
        store = group.get_group_store()  # undocumented
    except (AttributeError, RuntimeError):
        store = None
    if store is None:
        raise UsageError(
            "this process group returns no store (MPI has none): pass store=, a TCPStore that all "
            "ranks share"
        )
    return store


def _check_store(store: Any) -> StoreAddress | None:
    """Raises ``UsageError`` without queues; returns the address, if any. No network access."""
    dist = _distributed()
    base = _without_prefixes(store)
    remedy = (
        "initialise the process group with init_method='env://' or 'tcp://', or pass store=, a "
        "torch.distributed.TCPStore that all ranks share"
    )
    if isinstance(store, StoreAt):
        return store.address
    if isinstance(base, dist.FileStore):
        return None
    if not all(hasattr(store, name) for name in _METHODS):
        raise UsageError(f"store must be a c10d store, not {type(store).__name__}; {remedy}")
    if isinstance(base, dist.HashStore):
        raise UsageError(f"a HashStore is known to one process only; {remedy}")
    if isinstance(base, dist.TCPStore) and not getattr(base, "libuvBackend", True):
        raise UsageError(
            "this TCPStore was made with use_libuv=False (or USE_LIBUV=0), and that kind has no "
            "queues, which messages need; leave it out"
        )
    return StoreAddress(base.host, base.port) if isinstance(base, dist.TCPStore) else None


def _job(environ: Mapping[str, str]) -> str:
    """Names the job and its restart count."""
    job = environ.get("TORCHELASTIC_RUN_ID", "")
    return f"{job}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}" if job else "job"


def _variable(name: str, environ: Mapping[str, str]) -> int:
    if not environ.get(name):
        raise UsageError(f"store= without a process group needs {name} in the environment")
    try:
        return int(environ[name])
    except ValueError as error:
        what = f"{name}={environ[name]!r} in the environment"
        raise UsageError(f"{what} is not an integer") from error


class StoreAt:
    """A TCPStore to connect. Keeps ``server`` alive."""

    def __init__(self, address: StoreAddress, server: Any = None) -> None:
        self.address = address
        self._server = server

    def clone(self) -> Any:
        """Connects; may block until the hosting process has started. Imports torch."""
        dist = _distributed()
        store = dist.TCPStore(
            self.address.host,
            self.address.port,
            is_master=False,
            timeout=timedelta(seconds=_CONNECT_S),
            wait_for_workers=False,
        )
        prefix = self.address.prefix
        return dist.PrefixStore(prefix, store) if prefix else store


@functools.cache
def _store_of_environment(pid: int, host: str, port: int, is_host: bool) -> StoreAt:
    """Returns the store of this process; a server that it hosts lives as long.

    ``pid`` keeps a forked child from using its parent's.
    """
    server = None
    if is_host:
        try:
            server = _distributed().TCPStore(
                host,
                port,
                is_master=True,
                timeout=timedelta(seconds=_HOST_S),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except RuntimeError as error:
            reason = str(error).split("\n", 1)[0]
            raise UsageError(
                f"rank 0 cannot host a store at MASTER_ADDR:MASTER_PORT ({host}:{port}): {reason}. "
                "Start the job with torchrun, or call init_process_group before the first save"
            ) from error
    return StoreAt(StoreAddress(host, port), server)
