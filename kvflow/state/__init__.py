"""The protocol state machines: events in, effects out. Pure: no I/O, no clock, no randomness, no tasks."""
