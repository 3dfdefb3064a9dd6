# SPDX-License-Identifier: Apache-2.0
"""Calls of other checkpoint libraries, over actorsnap's own."""
