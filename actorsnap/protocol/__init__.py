"""Pure machines: event in, commands out. No await, no clock, no randomness, no torch."""
