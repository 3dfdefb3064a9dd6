"""From app state to leaves and entries, and back. The only layer but staging that knows torch."""

from actorsnap.state.optim import ModelState

__all__ = ["ModelState"]
