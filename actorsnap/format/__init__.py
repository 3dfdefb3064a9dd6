"""The stored data (``docs/format.md``): geometry, layout, schema and checksums. No I/O, no torch."""
