"""Decides which leaves of a target must match, and which may be missing or left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from actorsnap.state.restore.aliasing import Target
from actorsnap.state.stateful import Matching
from actorsnap.state.tree import Skeleton, escape, unescape

__all__ = ["Rules"]


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules for matching entries with a target.

    Attributes:
        root: Path of the target.
        strict_root: Path below which both sides must have the same leaves; or None.
        opaque: Paths of extra states below ``strict_root``, which may have any leaves.
    """

    root: str
    target: object | None
    matching: Matching
    strict_root: str | None = None
    opaque: frozenset[str] = frozenset()

    @classmethod
    def of(cls, root: str, target: Any, matching: Matching) -> Rules:
        if target is None:
            return cls(root, target, matching)
        if matching is Matching.LEAVES:
            strict_root, strict = root, target
        elif matching is Matching.MODEL and isinstance(target, dict):
            strict_root, strict = f"{root}/model", target["model"]
        else:
            return cls(root, target, matching)
        names = strict if isinstance(strict, dict) else ()
        opaque = frozenset(
            f"{strict_root}/{escape(name)}" for name in names if _is_extra_state(name)
        )
        return cls(root, target, matching, strict_root, opaque)

    def is_strict(self, path: str) -> bool:
        strict_root = self.strict_root
        if strict_root is None or not (path == strict_root or path.startswith(strict_root + "/")):
            return False
        if not self.opaque:
            return True
        below = len(strict_root) + 1
        return path[:below] + path[below:].partition("/")[0] not in self.opaque

    @property
    def keeps_keys(self) -> bool:
        """Whether dict keys that were not saved count as missing and keep their values."""
        return self.matching in (Matching.KEYS, Matching.MODEL)

    def is_kept(self, path: str, target: Target, kind: str) -> bool:
        """Whether a target that does not fit is kept, not replaced by a leaf of ``kind``."""
        is_same_kind = isinstance(target, np.ndarray) == (kind == "numpy array")
        return self.is_strict(path) or (self.keeps_keys and is_same_kind)

    def passes_over(self, path: str) -> bool:
        """Whether a ``ModelState`` ignores a saved leaf of its optimizers.

        It may have no optimizers now, or the parameter is frozen or in another stage.
        """
        if self.matching is not Matching.MODEL:
            return False
        below = f"{self.root}/optim/"
        if not path.startswith(below):
            return False
        target: Any = self.target
        name = path.removeprefix(below).partition("/")[0]
        held = target.get("optim")
        if held is None:
            return True
        is_flat = "param_groups" not in held and name not in ("state", "param_groups")
        return is_flat and unescape(name) not in held

    def may_lack(self, path: str, skeleton: Skeleton) -> bool:
        """Whether the snapshot of a ``ModelState`` may lack a dict key.

        The model's leaves are compared one by one. The optimizers' state may be absent, or have the
        other form of hyperparameters (``flatten``).
        """
        if self.matching is not Matching.MODEL:
            return False
        optim = f"{self.root}/optim"
        sections = f"{optim}/state", f"{optim}/param_groups"
        is_other_form = path in sections or sections[1] in skeleton
        return (
            self.is_strict(path)
            or path == optim
            or (path.rpartition("/")[0] == optim and is_other_form)
        )


def _is_extra_state(name: object) -> bool:
    return isinstance(name, str) and f".{name}".endswith("._extra_state")
