"""Readers of other programs' checkpoints (``docs/decisions/0024-readers.md``)."""
