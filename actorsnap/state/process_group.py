"""Which ranks save together, and the store that they share.

Finds the group of a call: a process group of torch.distributed, a store that the caller
hands in, or what torchrun left in the environment. It connects to nothing that is not
connected already: a store from the environment connects when it is cloned. The only module
that looks into torch.distributed's groups; public functions only, but for what ``_store_of``
says.
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

__all__ = [
    "Group",
    "StoreAddress",
    "StoreAt",
    "find_group",
    "find_prefix",
    "global_rank",
    "likely_ranks",
]

_CONNECT_S = 300.0
_HOST_S = 20.0
_PREFIX_KEY = "actorsnap/prefix"
_METHODS = ("clone", "queue_push", "queue_pop", "queue_len", "set_timeout")


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where a TCPStore listens, and the prefix of all keys."""

    host: str
    port: int
    prefix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that save together. There are at least two.

    Attributes:
        rank: Of this process, in the group.
        world_size: Of the group.
        ranks: All of them in the whole job, in the order of the group.
        store: Has queues (``transport.store.QueueStore``); to be cloned, not used.
        name: Of job and group: no two at one store have the same, and all ranks say the same.
        address: Of the store below all prefixes; None where it has none.
    """

    rank: int
    world_size: int
    ranks: tuple[int, ...]
    store: Any
    name: str
    address: StoreAddress | None = None


def global_rank() -> int:
    """This process' rank in the whole job, as meshes and process groups count them."""
    dist = _distributed()
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def likely_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """How many this process is likely to save together with, and itself. Connects to nothing."""
    dist = _distributed()
    if dist.is_available() and dist.is_initialized():
        return int(dist.get_world_size())
    text = environ.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() else 1


def find_group(
    group: Any = None,
    store: Any = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> Group | None:
    """The group of a call; None where there is but one rank.

    Args:
        group: A ``ProcessGroup`` that this process is a member of. None: the default one, if
            it is initialised, else what torchrun says in the environment.
        store: A c10d store that all ranks share, instead of the group's own. Two jobs that
            use one need a ``PrefixStore`` each.
        rank: With ``store`` and without a process group: this process' rank; None takes
            ``RANK``.
        world_size: Likewise, and ``WORLD_SIZE``.
        environ: Instead of the process' environment.

    Raises:
        UsageError: this process is not in ``group``, the store has no queues, or the ranks
            are contradictory.
    """
    environ = os.environ if environ is None else environ
    if store is None and (rank is not None or world_size is not None):
        raise UsageError(
            "rank= and world_size= go with store=: pass the store that all ranks share"
        )
    process_group = _process_group(group)
    if process_group is not None:
        if rank is not None or world_size is not None:
            raise UsageError(
                "torch.distributed is initialised: rank and world size are the process group's; "
                "leave rank= and world_size= out"
            )
        return _of_process_group(process_group, store, environ)
    if store is not None:
        own = _given_or_variable("rank", rank, "RANK", environ)
        size = _given_or_variable("world_size", world_size, "WORLD_SIZE", environ)
        return _of_ranks(own, size, store, f"{_job(environ)}/given")
    if not all(environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return None
    own = _variable("RANK", environ)
    size = _variable("WORLD_SIZE", environ)
    if size == 1:
        return None
    return _of_ranks(own, size, _store_of_environment(own, environ), f"{_job(environ)}/env")


def find_prefix(store: Any) -> str:
    """Returns the prefix that a store adds to all keys; "" if none.

    No method of a store returns it. One rank finds it by a key of its own among all keys, which may
    be many, and leaves it in the store for the others. Blocks, up to the timeout of the store.

    Raises:
        RuntimeError: the store does not answer, or this torch cannot list its keys.
    """
    dist = _distributed()
    base = store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    if base is store:
        return ""
    if store.add(f"{_PREFIX_KEY}/turn", 1) == 1:
        if not hasattr(base, "list_keys"):
            raise RuntimeError("this torch cannot list the keys of a store")
        key = f"{_PREFIX_KEY}/{secrets.token_hex(8)}"
        store.set(key, b"")
        [found] = [other for other in base.list_keys() if other.endswith(key)]
        store.delete_key(key)
        store.set(_PREFIX_KEY, found.removesuffix(key).rstrip("/"))
    prefix: bytes = store.get(_PREFIX_KEY)
    return prefix.decode()


def _distributed() -> Any:
    """``torch.distributed``; its type stubs lack the stores."""
    import torch.distributed

    return torch.distributed


def _process_group(group: Any) -> Any:
    """``group``, or the default process group; None if there is none."""
    dist = _distributed()

    if group is None:
        if not dist.is_available() or not dist.is_initialized():
            return None
        return dist.group.WORLD
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
        # Names count the groups that were made; these ranks may not have made the same ones.
        name += "@" + hashlib.sha256(repr(ranks).encode()).hexdigest()[:12]
    if store is None:
        store = _store_of(group)
    return Group(
        rank=rank,
        world_size=len(ranks),
        ranks=ranks,
        store=store,
        name=name,
        address=_check_store(store),
    )


def _of_ranks(rank: int, world_size: int, store: Any, name: str) -> Group | None:
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is not in [0, {world_size}), the ranks of this job")
    if world_size == 1:
        return None
    return Group(
        rank=rank,
        world_size=world_size,
        ranks=tuple(range(world_size)),
        store=store,
        name=name,
        address=_check_store(store),
    )


def _store_of(group: Any) -> Any:
    """The store of a process group. The method is public, but in no page of torch's manual."""
    try:
        found = group.get_group_store()
    except (AttributeError, RuntimeError) as error:
        raise UsageError(
            "this torch does not tell the store of a process group: pass store=, a TCPStore that "
            "all ranks share"
        ) from error
    if found is None:
        raise UsageError(
            "this process group has no store (MPI has none): pass store=, a TCPStore that all "
            "ranks share"
        )
    return found


def _check_store(store: Any) -> StoreAddress | None:
    """Raises ``UsageError`` for a store without queues; asks nothing over the network. Returns
    where other processes find it, if they can."""
    dist = _distributed()

    base = store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    remedy = (
        "initialise the process group with init_method='env://' or 'tcp://', or pass store=, a "
        "torch.distributed.TCPStore that all ranks share"
    )
    missing = [name for name in _METHODS if not hasattr(store, name)]
    if missing and isinstance(store, dist.Store):
        raise UsageError(
            f"stores of this torch have no queues: install torch 2.9 or newer; {remedy}"
        )
    if isinstance(store, StoreAt):
        return store.address
    if missing:
        raise UsageError(f"store must be a c10d store, not {type(store).__name__}; {remedy}")
    if isinstance(base, dist.FileStore):
        raise UsageError(f"a FileStore has no queues, which messages need; {remedy}")
    if isinstance(base, dist.HashStore):
        raise UsageError(f"a HashStore is known to one process only; {remedy}")
    if isinstance(base, dist.TCPStore) and not getattr(base, "libuvBackend", True):
        raise UsageError(
            "this TCPStore was made with use_libuv=False (or USE_LIBUV=0), and that kind has no "
            "queues, which messages need; leave it out"
        )
    return StoreAddress(base.host, base.port) if isinstance(base, dist.TCPStore) else None


def _job(environ: Mapping[str, str]) -> str:
    """What tells this job, and this start of it, from others at the same store."""
    job = environ.get("TORCHELASTIC_RUN_ID", "")
    return f"{job}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}" if job else "job"


def _given_or_variable(
    name: str, given: int | None, variable: str, environ: Mapping[str, str]
) -> int:
    if given is not None:
        return given
    if not environ.get(variable):
        raise UsageError(
            f"store= without a process group needs {name}= too, or {variable} in the environment"
        )
    return _variable(variable, environ)


def _variable(name: str, environ: Mapping[str, str]) -> int:
    try:
        return int(environ[name])
    except ValueError as error:
        raise UsageError(f"{name}={environ[name]!r} in the environment is no integer") from error


class StoreAt:
    """A TCPStore to be cloned. That connects, which may take as long as the process that hosts it
    takes to start; and imports torch, in a process that has not yet.

    Args:
        server: Must live as long.
    """

    def __init__(self, address: StoreAddress, server: Any = None) -> None:
        self.address = address
        self._server = server

    def clone(self) -> Any:
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


def _store_of_environment(rank: int, environ: Mapping[str, str]) -> StoreAt:
    # As in torch/distributed/rendezvous.py: torchrun's agent hosts the store, or else rank 0 does,
    # on the same port for all that ask for it in that process.
    is_agents = environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return _environment_store(
        os.getpid(),
        environ["MASTER_ADDR"],
        _variable("MASTER_PORT", environ),
        rank == 0 and not is_agents,
    )


@functools.cache
def _environment_store(pid: int, host: str, port: int, is_host: bool) -> StoreAt:
    """One per process: the server that rank 0 hosts lives as long as the process."""
    dist = _distributed()

    server = None
    if is_host:
        try:
            server = dist.TCPStore(
                host,
                port,
                is_master=True,
                timeout=timedelta(seconds=_HOST_S),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except RuntimeError as error:
            said = str(error).split("\n", 1)[0]
            raise UsageError(
                f"rank 0 cannot host a store at MASTER_ADDR:MASTER_PORT ({host}:{port}): {said}. "
                "Start the job with torchrun, or call init_process_group before the first save"
            ) from error
    return StoreAt(StoreAddress(host, port), server)
