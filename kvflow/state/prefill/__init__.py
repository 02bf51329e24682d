"""The state machine of a prefill rank. Pure."""
