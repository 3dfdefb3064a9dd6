# SPDX-License-Identifier: Apache-2.0
"""Pure functions: inventory or manifest in, plan out. No torch."""
