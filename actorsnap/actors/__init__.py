"""Actors: perform the decisions of the protocol. anyio only."""
