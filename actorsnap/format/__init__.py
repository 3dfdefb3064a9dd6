# SPDX-License-Identifier: Apache-2.0
"""The stored data (``docs/format.md``): geometry, layout, schema, checksums. No I/O, no torch."""
