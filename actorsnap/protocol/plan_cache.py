"""A coordinator's memory of the previous save, by digest.

``protocol.save`` asks ranks for the content of unknown digests.
"""

from __future__ import annotations

from collections.abc import Sequence

from actorsnap.planning.inventory import Inventory
from actorsnap.planning.packing import Item, PackingRules
from actorsnap.planning.save import SavePlan, plan_save

__all__ = ["PlanCache"]


class PlanCache:
    """Memory of a group's last save; ``agreed``: ``sharded`` when ranks last agreed."""

    def __init__(self) -> None:
        self.inventories: dict[bytes, Inventory] = {}
        self.lists: dict[bytes, tuple[Item, ...]] = {}
        self.agreed: dict[bytes, list[int]] = {}
        self.several: frozenset[str] = frozenset()
        self._made_from: object = None
        self._plan: SavePlan | None = None

    def copy(self) -> PlanCache:
        other = PlanCache()
        other.inventories, other.lists = dict(self.inventories), dict(self.lists)
        other.agreed, other.several = self.agreed, self.several
        other._plan, other._made_from = self._plan, self._made_from
        return other

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
