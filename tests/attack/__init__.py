"""Attacks over the network, and their limits."""
