"""Calls of other checkpoint libraries, over actorsnap's own."""
