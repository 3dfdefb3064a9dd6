"""Pure functions: inventory or manifest in, plan out. No torch."""
