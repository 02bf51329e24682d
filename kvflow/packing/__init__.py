"""Staging memory, and what is copied between it and the pages of a rank (docs/packing.md)."""
