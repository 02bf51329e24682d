"""A proxy in front of prefill and decode servers."""
