"""Pure machines: event in, commands out. No clock, no torch."""
