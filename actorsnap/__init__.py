"""actorsnap (being assembled)."""
