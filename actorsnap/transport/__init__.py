# SPDX-License-Identifier: Apache-2.0
"""Messages of ``protocol.messages`` between ranks, never bulk bytes."""
