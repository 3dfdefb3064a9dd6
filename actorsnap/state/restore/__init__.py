"""A restore in three passes: from entries of a snapshot to a state for ``load_state_dict``.

``match`` compares entries with leaves, ``allocation`` finds memory to read into, and ``build``
builds the state. ``checks`` validates entries, ``rules`` decides which leaves must match,
``aliasing`` finds shared memory.
"""

from actorsnap.state.restore.aliasing import (
    Destination,
    destination,
    find_conflicts,
    mark_written,
)
from actorsnap.state.restore.allocation import Wanted, slice_stored
from actorsnap.state.restore.build import KeyRestore, prepare, read_one
from actorsnap.state.restore.match import Match, entries_by_key, match_key

__all__ = [
    "Destination",
    "KeyRestore",
    "Match",
    "Wanted",
    "destination",
    "entries_by_key",
    "find_conflicts",
    "mark_written",
    "match_key",
    "prepare",
    "read_one",
    "slice_stored",
]
