"""What a prefill rank decides. Pure."""
