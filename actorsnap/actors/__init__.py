# SPDX-License-Identifier: Apache-2.0
"""Actors: perform the decisions of the protocol. anyio only."""
