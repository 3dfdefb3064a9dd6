"""Finds leftovers of attempts that can no longer commit, or that a save may resume.

Implements "Crash windows" of ``docs/format.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from actorsnap.format.layout import Attempt

__all__ = ["MAX_ATTEMPT_S", "collectable", "resumable", "unclaimed"]

MAX_ATTEMPT_S = 24 * 3600
"""Longest time from the start of an attempt to its commit, enforced by the coordinator."""


def collectable(
    attempts: Iterable[str],
    *,
    now_s: float,
    host: str,
    may_run: Callable[[Attempt], bool],
    superseded: Collection[str] = (),
) -> list[str]:
    """Returns the attempts whose objects may be deleted, except the committed one.

    Callers must read the commit object *after* this call, or they could miss a commit.

    Args:
        now_s: Since the epoch.
        host: This host and process namespace, as in attempt names.
        may_run: Whether an attempt of this host may still be under way.
        superseded: Attempts known to be committed and replaced.
    """
    garbage = []
    for name in attempts:
        attempt = Attempt.parse(name)
        if attempt is None:
            continue
        is_dead = attempt.host == host and not may_run(attempt)
        is_old = now_s - attempt.created_s > MAX_ATTEMPT_S
        if is_dead or is_old or name in superseded:
            garbage.append(name)
    return garbage


def unclaimed(garbage: Sequence[str], claims: Mapping[str, Collection[str]]) -> list[str]:
    """Returns the attempts in ``garbage`` that no running copy claims.

    Args:
        garbage: See ``collectable``; copies in it are not running.
        claims: By attempt, the copies that claim it.
    """
    dead = frozenset(garbage)
    return [name for name in garbage if dead.issuperset(claims.get(name, ()))]


def resumable(
    attempts: Iterable[str],
    *,
    host: str,
    may_run: Callable[[Attempt], bool],
    committed: str | None,
) -> list[str]:
    """Returns the attempts whose objects a resumed save may use, newest first.

    Includes those of other hosts: the caller asserts that their job is gone.
    """
    found = [attempt for name in attempts if (attempt := Attempt.parse(name)) is not None]
    dead = [each for each in found if each.host != host or not may_run(each)]
    names = [str(each) for each in sorted(dead, key=lambda each: (each.created_s, each.nonce))]
    return [name for name in reversed(names) if name != committed]
