"""Decides what is garbage: leftovers of attempts that can no longer commit.

Implements "Crash windows" of ``docs/format.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from actorsnap.format.layout import Attempt

__all__ = ["MAX_ATTEMPT_S", "collectable"]

MAX_ATTEMPT_S = 24 * 3600
"""No attempt commits later than this after it began; the coordinator keeps to it."""


def collectable(
    attempts: Iterable[str],
    *,
    committed: str | None,
    now_s: float,
    host: str,
    is_alive: Callable[[int], bool],
    superseded: str | None = None,
) -> list[str]:
    """The attempts whose objects may be deleted.

    Args:
        attempts: Attempt folders found.
        committed: The one that the commit object names; never collectable.
        now_s: Seconds since the epoch.
        host: This host and process namespace, as in attempt names.
        is_alive: Whether a process id of this host is running.
        superseded: An attempt that the caller knows was committed and replaced.
    """
    garbage = []
    for name in attempts:
        if name == committed:
            continue
        attempt = Attempt.parse(name)
        if attempt is None:
            continue
        is_dead = attempt.host == host and not is_alive(attempt.pid)
        is_old = now_s - attempt.created_s > MAX_ATTEMPT_S
        if is_dead or is_old or name == superseded:
            garbage.append(name)
    return garbage
