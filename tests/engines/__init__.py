"""Adapters of engines."""
