# SPDX-License-Identifier: Apache-2.0
"""A restore in three passes: from entries of a snapshot to a state for ``load_state_dict``.

``match`` compares entries with leaves, ``allocation`` finds memory to read into, and ``build``
builds the state. ``checks`` validates entries, ``aliasing`` finds shared memory, ``hints`` suggests
arguments, ``verification`` runs the first pass alone.
"""
