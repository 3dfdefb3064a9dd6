"""Pure functions: inventory or manifest in, plan out. No await, clock, torch or I/O."""
