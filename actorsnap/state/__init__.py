"""Converts app states to leaves and entries, and back. Only this layer and staging use torch."""
