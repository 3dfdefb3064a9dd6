# SPDX-License-Identifier: Apache-2.0
"""Pure machines: event in, commands out. No clock, no torch."""
