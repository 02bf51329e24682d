"""Adapters for inference engines, each in a package of its own, on kvflow's public names."""
