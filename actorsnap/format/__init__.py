"""The stored data (``docs/format.md``): geometry, layout, schema, checksums. No I/O, no torch."""
