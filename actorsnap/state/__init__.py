"""Converts app states to leaves and entries, and back."""
