# SPDX-License-Identifier: Apache-2.0
"""The runtime: loop thread, worker threads, memory."""
