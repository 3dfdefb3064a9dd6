"""From app state to leaves and entries, and back. The only layer but staging that knows torch."""
