"""From app state to leaves and entries, and back. The only layer but staging that knows torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actorsnap.state.optim import ModelState

__all__ = ["ModelState"]


def __getattr__(name: str) -> Any:
    # As in the package itself: what is below must be importable without torch.
    if name != "ModelState":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("actorsnap.state.optim").ModelState
