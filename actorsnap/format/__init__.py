"""The stored data: geometry, layout, schema and checksums. Pure data.

No I/O, no waiting, no clock, no torch. Implements ``docs/format.md``.
"""
