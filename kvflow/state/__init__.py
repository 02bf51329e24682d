"""What may happen, and what follows. Pure: no I/O, no clock, no randomness, no task."""
