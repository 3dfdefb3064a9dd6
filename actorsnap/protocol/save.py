# SPDX-License-Identifier: Apache-2.0
"""The decisions of a save, over ``protocol.rounds``.

0. *Joined*: Each rank sends a digest of its inventory. The coordinator asks one rank per unknown
digest for the content, then sends each rank its part of the plan. From the inventories it also
computes the owner index, which rank 0 stores.
1. *Opened* (only ranks that share objects): Objects with several writers are open. Each rank gets
the tokens of those that it joins.
2. *Written* (the same ranks): All chunks of shared objects are stored; these can be completed.
3. *ManifestStored*, the commit round: Each rank has stored its manifest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec

from actorsnap.format.manifest import SaveRecord, with_values
from actorsnap.format.owners import decode_owners, deflate_owners, encode_owners
from actorsnap.planning.inventory import (
    Inventory,
    Outline,
    Sharded,
    ShardedTable,
    check_sharded,
    on_several_meshes,
)
from actorsnap.planning.ownership import owners_of
from actorsnap.planning.packing import Item, PackingRules, RankPlan
from actorsnap.planning.save import SavePlan, plan_save
from actorsnap.protocol.failure import Failure, Stage
from actorsnap.protocol.rounds import AskMore, Continue, Decision

T = TypeVar("T")


class Joined(msgspec.Struct, frozen=True, array_like=True):
    """A rank takes part.

    Attributes:
        inventory: Digest of its inventory.
        plan: Digest of its plan in the previous save; empty if forgotten.
    """

    release: str
    inventory: bytes
    plan: bytes = b""


class Question(msgspec.Struct, frozen=True, array_like=True):
    """Requests the inventory, the item lists with these digests, and what else it names."""

    inventory: bool = False
    lists: tuple[bytes, ...] = ()
    sharded: bool = False
    outline: bool = False


class Details(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    inventory: Inventory | None = None
    lists: dict[bytes, tuple[Item, ...]] = {}
    sharded: ShardedTable | None = None
    outline: Outline | None = None


class Assignment(msgspec.Struct, frozen=True, array_like=True):
    """A rank's part of a save.

    Attributes:
        url, fsync, rules: The coordinator's; apply to all ranks. ``url`` is UTF-8 with
            ``surrogatepass``.
        plan: None if the rank remembers it.
        save: The part of the commit object that the rank's manifest repeats.
        resumed: Dead attempts, newest first. Their objects are not sent again.
        shares_objects: The rank takes part in rounds 1 and 2.
    """

    attempt: str
    url: bytes
    fsync: bool
    rules: PackingRules
    save: SaveRecord
    resumed: tuple[str, ...] = ()
    digest: bytes = b""
    plan: RankPlan | None = None
    shares_objects: bool = False


class Token(msgspec.Struct, frozen=True, array_like=True):
    """Input of ``Storage.join_writer``.

    Attributes:
        key: Without the attempt's folder; for a safetensors object also without ``data/`` and the
            suffix. Other keys begin with a slash.
        token: Empty if it equals the whole key.
    """

    key: str
    token: bytes = b""

    @classmethod
    def of(cls, attempt: str, key: str, token: bytes) -> Token:
        begin, end = f"{attempt}/data/", ".safetensors"
        is_data = key.startswith(begin) and key.endswith(end)
        short = key[len(begin) : -len(end)] if is_data else key.removeprefix(attempt)
        return cls(short, b"" if token == key.encode() else token)

    def opened(self, attempt: str) -> tuple[str, bytes]:
        short = self.key
        key = f"{attempt}{short}" if short[0] == "/" else f"{attempt}/data/{short}.safetensors"
        return key, self.token or key.encode()


class ManifestStored(msgspec.Struct, frozen=True, array_like=True):
    """``size`` in bytes."""

    size: int


_encoder = msgspec.msgpack.Encoder()


def encode(payload: object) -> bytes:
    return _encoder.encode(payload)


def decode(payload: bytes, kind: type[T]) -> T:
    return msgspec.msgpack.decode(payload, type=kind)


def manifest_sizes(payloads: Mapping[int, bytes]) -> list[int]:
    """Returns the size of each rank's manifest in bytes, from the commit round."""
    return [decode(payloads[rank], ManifestStored).size for rank in sorted(payloads)]


def aborted(reason: str, stage: Stage, rank: int | None) -> Failure:
    return Failure(reason=reason, stage=stage, rank=rank)


@dataclass(slots=True)
class PlanCache:
    """A coordinator's memory of the previous save, by digest.

    Attributes:
        tensors: ``Inventory.sharded``.
        agreed: ``sharded`` when ranks last agreed.
        several: See ``plan_save``.
    """

    inventories: dict[bytes, Inventory] = field(default_factory=dict)
    lists: dict[bytes, tuple[Item, ...]] = field(default_factory=dict)
    tensors: dict[bytes, tuple[Sharded, ...]] = field(default_factory=dict)
    outlines: dict[bytes, Outline] = field(default_factory=dict)
    agreed: dict[bytes, list[int]] = field(default_factory=dict)
    several: frozenset[str] = frozenset()
    _plan: tuple[object, SavePlan] | None = None
    _owners: tuple[object, tuple[int, bytes]] | None = None

    def copy(self) -> PlanCache:
        return replace(
            self,
            inventories=dict(self.inventories),
            lists=dict(self.lists),
            tensors=dict(self.tensors),
            outlines=dict(self.outlines),
        )

    def sharded(self, structures: Sequence[bytes]) -> dict[bytes, list[int]]:
        """Groups ranks by the digest of their sharded tensors; empty: none."""
        found: dict[bytes, list[int]] = {}
        for rank, structure in enumerate(structures):
            found.setdefault(self.inventories[structure].sharded, []).append(rank)
        return found

    def plan(self, structures: tuple[bytes, ...], rules: PackingRules) -> SavePlan:
        """Returns the plan for these inventories; forgets all others.

        Raises:
            UsageError: The inventories contradict each other.
        """
        several = self.several if self.sharded(structures) == self.agreed else frozenset()
        made_from = (structures, rules, several)
        if self._plan is None or self._plan[0] != made_from:
            inventories = [self.inventories[digest] for digest in structures]
            self._plan = made_from, plan_save(inventories, self.lists, rules, several)
        self.inventories = {digest: self.inventories[digest] for digest in set(structures)}
        used = {scope.digest for found in self.inventories.values() for scope in found.scopes}
        self.lists = {digest: held for digest, held in self.lists.items() if digest in used}
        used = {found.sharded for found in self.inventories.values()}
        self.tensors = {digest: held for digest, held in self.tensors.items() if digest in used}
        used = {found.outline for found in self.inventories.values()}
        self.outlines = {digest: held for digest, held in self.outlines.items() if digest in used}
        return self._plan[1]

    def owners(self, structures: tuple[bytes, ...], rules: PackingRules) -> tuple[int, bytes]:
        """Returns the owner index of the last plan, deflated. Takes long if the plan is new."""
        assert self._plan is not None
        made_from, plan = self._plan
        if self._owners is None or self._owners[0] is not made_from:
            inventories = [self.inventories[digest] for digest in structures]
            owners = owners_of(
                inventories, self.lists, self.tensors, self.outlines, plan.ranks, rules
            )
            self._owners = made_from, deflate_owners(owners)
        return self._owners[1]


class SaveDecisions:
    """Decides the rounds of one save; see ``actors.rounds.Decisions``.

    Args:
        common: The fields that are equal on all ranks; only rank 0 gets the metadata in ``save``.
        memory: Memory of the previous save; no other save may use it.

    Attributes:
        has_values: The snapshot needs the feature ``values``. Known with the plan.
    """

    def __init__(
        self, common: Assignment, *, release: str, memory: PlanCache | None = None
    ) -> None:
        self.stage = Stage.JOIN
        self._common = common
        self._save_of_others = msgspec.structs.replace(common.save, metadata={})
        self._release = release
        self._memory = memory or PlanCache()
        self._joined: dict[int, Joined] = {}
        self._plan: SavePlan | None = None
        self.has_values = False

    def decide(self, round: int, payloads: Mapping[int, bytes]) -> Decision:
        """Decides any round but the commit round.

        Raises:
            UsageError: The inventories contradict each other.
        """
        if round == 0:
            return self._on_joined(payloads) if not self._joined else self._on_answers(payloads)
        if round == 1:
            return self._on_opened(payloads)
        return Continue(commits_next=True)

    def owners(self) -> bytes:
        """Returns the owner index. Once ranks may store; blocks, for a worker thread.

        Raises:
            FormatError: It exceeds a limit of the format: no reader would take it.
        """
        common = self._common
        deflated = self._memory.owners(self._structures, common.rules)
        data = encode_owners(common.attempt, len(self._joined), deflated)
        decode_owners(data, attempt=common.attempt, world_size=len(self._joined))
        return data

    @property
    def _structures(self) -> tuple[bytes, ...]:
        return tuple([self._joined[rank].inventory for rank in sorted(self._joined)])

    def _on_joined(self, payloads: Mapping[int, bytes]) -> Decision:
        for rank in sorted(payloads):
            joined = decode(payloads[rank], Joined)
            if joined.release != self._release:
                return Failure(
                    reason=f"rank {rank} runs actorsnap {joined.release}, the coordinator "
                    f"{self._release}; install the same release on all ranks",
                    stage=Stage.JOIN,
                    rank=rank,
                )
            self._joined[rank] = joined
        digests = {rank: joined.inventory for rank, joined in self._joined.items()}
        unknown = _firsts(digests.items(), self._memory.inventories)
        if unknown:
            return _ask(dict.fromkeys(unknown.values(), Question(inventory=True)))
        return self._plan_if_known()

    def _on_answers(self, payloads: Mapping[int, bytes]) -> Decision:
        memory = self._memory
        for rank, payload in payloads.items():
            answer = decode(payload, Details)
            if answer.inventory is not None:
                memory.inventories[self._joined[rank].inventory] = answer.inventory
            memory.lists.update(answer.lists)
            if answer.sharded is not None:
                memory.tensors[self._inventory(rank).sharded] = answer.sharded.tensors()
            if answer.outline is not None:
                memory.outlines[self._inventory(rank).outline] = answer.outline
        return self._plan_if_known()

    def _inventory(self, rank: int) -> Inventory:
        return self._memory.inventories[self._joined[rank].inventory]

    def _plan_if_known(self) -> Decision:
        memory = self._memory
        questions = self._unknown()
        if questions:
            return _ask(questions)
        self.stage = Stage.PLAN
        structures = self._structures
        holders = memory.sharded(structures)
        if len(holders) > 1 and holders != memory.agreed:
            lists = [(ranks, memory.tensors[digest]) for digest, ranks in holders.items() if digest]
            check_sharded(lists, self._unsharded)
            memory.agreed, memory.several = holders, on_several_meshes(lists)
        plan = self._plan = memory.plan(structures, self._common.rules)
        self.has_values = any([found.has_values for found in memory.inventories.values()])
        self.stage = Stage.STORE
        alone = [rank for rank, own in enumerate(plan.ranks) if not own.is_shared]
        is_shared = len(alone) < len(plan.ranks)
        return Continue(
            payloads=self._assignments(plan),
            skips=dict.fromkeys(alone, 2) if is_shared else {},
            commits_next=not is_shared,
        )

    def _unsharded(self, paths: Collection[str]) -> dict[str, list[int]]:
        """See ``check_sharded``."""
        memory = self._memory
        ranks: dict[str, list[int]] = {}
        for rank in sorted(self._joined):
            inventory = self._inventory(rank)
            found: set[str] = set()
            if inventory.outline:
                outline = memory.outlines[inventory.outline]
                found |= {*outline.private, *outline.common}
            for scope in inventory.scopes:
                found |= {i.path for i in memory.lists[scope.digest] if i.global_shape is None}
            sharded = {tensor.path for tensor in memory.tensors.get(inventory.sharded, ())}
            for path in found.intersection(paths) - sharded:
                ranks.setdefault(path, []).append(rank)
        return ranks

    def _unknown(self) -> dict[int, Question]:
        """Returns questions for what inventories name: each goes to one rank."""
        memory = self._memory
        firsts: dict[bytes, int] = {}
        for rank, joined in self._joined.items():
            firsts.setdefault(joined.inventory, rank)
        held = [(rank, memory.inventories[digest]) for digest, rank in firsts.items()]
        scopes = [(rank, scope.digest) for rank, found in held for scope in found.scopes]
        lists: dict[int, tuple[bytes, ...]] = {}
        for digest, rank in _firsts(scopes, memory.lists).items():
            lists[rank] = (*lists.get(rank, ()), digest)
        tensors = _firsts([(rank, found.sharded) for rank, found in held], memory.tensors)
        outlines = _firsts([(rank, found.outline) for rank, found in held], memory.outlines)
        asked = {*lists, *tensors.values(), *outlines.values()}
        return {
            rank: Question(
                lists=lists.get(rank, ()),
                sharded=rank in tensors.values(),
                outline=rank in outlines.values(),
            )
            for rank in sorted(asked)
        }

    def _assignments(self, plan: SavePlan) -> dict[int, bytes]:
        """Encodes equal assignments once: in a large job most are."""
        encoded: dict[tuple[bytes, bytes, bool], bytes] = {}
        payloads: dict[int, bytes] = {}
        for rank, joined in self._joined.items():
            made_from = plan.digests[rank], joined.plan, rank == 0
            if made_from not in encoded:
                encoded[made_from] = encode(self._assignment(rank, plan))
            payloads[rank] = encoded[made_from]
        return payloads

    def _assignment(self, rank: int, plan: SavePlan) -> Assignment:
        is_known = self._joined[rank].plan == plan.digests[rank]
        save = self._common.save if rank == 0 else self._save_of_others
        if self.has_values:
            save = msgspec.structs.replace(save, features=with_values(save.features))
        return msgspec.structs.replace(
            self._common,
            digest=plan.digests[rank],
            plan=None if is_known else plan.ranks[rank],
            save=save,
            shares_objects=plan.ranks[rank].is_shared,
        )

    def _on_opened(self, payloads: Mapping[int, bytes]) -> Continue:
        assert self._plan is not None
        tokens: dict[int, list[Token]] = {}
        for rank, payload in payloads.items():
            opened = decode(payload, tuple[Token, ...])
            for token, joiners in zip(opened, self._plan.joiners[rank], strict=True):
                for joiner in joiners:
                    tokens.setdefault(joiner, []).append(token)
        return Continue(
            payloads={rank: encode(found) for rank, found in tokens.items()}, common=encode([])
        )


def _firsts(
    digests: Iterable[tuple[int, bytes]], known: Mapping[bytes, object]
) -> dict[bytes, int]:
    """Returns the first rank with each unknown digest; an empty one stands for nothing."""
    found: dict[bytes, int] = {}
    for rank, digest in digests:
        if digest and digest not in known:
            found.setdefault(digest, rank)
    return found


def _ask(questions: Mapping[int, Question]) -> AskMore:
    return AskMore({rank: encode(question) for rank, question in questions.items()})
