# SPDX-License-Identifier: Apache-2.0
"""Readers of other programs' checkpoints (``docs/decisions/0024-readers.md``)."""
