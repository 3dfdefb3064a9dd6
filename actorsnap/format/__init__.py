"""What lies in storage: geometry, layout, schema and checksums. Pure data.

Nothing in this package does I/O, waits, knows the time, or knows torch. It implements
``docs/format.md``.
"""
