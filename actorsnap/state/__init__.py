# SPDX-License-Identifier: Apache-2.0
"""Converts app states to leaves and entries, and back."""
