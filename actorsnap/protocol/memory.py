"""What a coordinator knows from the save before, so that ranks need not say it again.

Inventories, lists of items and the plan are remembered by digests: what a rank says again is the
digest. It says what is not known yet; ``coordinator`` decides when to ask for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from actorsnap.planning.inventory import Inventory
from actorsnap.planning.packing import Item, PackingRules
from actorsnap.planning.save import SavePlan, plan_save

__all__ = ["Memory"]


class Memory:
    """What the coordinator of a group remembers from its last save: bounded by one save.

    Attributes:
        inventories: By digest.
        lists: Item lists, by digest.
        agreed: What ``sharded`` returned when ranks were last seen to agree.
        several: What then lay on several meshes.
    """

    def __init__(self) -> None:
        self.inventories: dict[bytes, Inventory] = {}
        self.lists: dict[bytes, tuple[Item, ...]] = {}
        self.agreed: dict[bytes, list[int]] = {}
        self.several: frozenset[str] = frozenset()
        self._made_from: object = None
        self._plan: SavePlan | None = None

    def copy(self) -> Memory:
        """The same, for one save. It can be kept when that has planned."""
        other = Memory()
        other.inventories, other.lists = dict(self.inventories), dict(self.lists)
        other.agreed, other.several = self.agreed, self.several
        other._plan, other._made_from = self._plan, self._made_from
        return other

    def sharded(self, structures: Sequence[bytes]) -> dict[bytes, list[int]]:
        """What ranks with these inventories say of sharded tensors: digests, an empty one
        where there are none, and the ranks that say each, rising."""
        found: dict[bytes, list[int]] = {}
        for rank, structure in enumerate(structures):
            found.setdefault(self.inventories[structure].sharded, []).append(rank)
        return found

    def plan(self, structures: tuple[bytes, ...], rules: PackingRules) -> SavePlan:
        """The plan for ranks with these inventories; forgets what is not in it.

        Raises:
            UsageError: the inventories contradict each other.
        """
        several = self.several if self.sharded(structures) == self.agreed else frozenset()
        made_from = (structures, rules, several)
        if self._plan is None or self._made_from != made_from:
            self._plan = plan_save(
                [self.inventories[digest] for digest in structures],
                self.lists,
                rules,
                several,
            )
            self._made_from = made_from
        self.inventories = {digest: self.inventories[digest] for digest in set(structures)}
        used = {scope.digest for found in self.inventories.values() for scope in found.scopes}
        self.lists = {digest: held for digest, held in self.lists.items() if digest in used}
        return self._plan
