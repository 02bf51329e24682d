"""Staging memory, and copies between it and the pages of a rank (docs/packing.md)."""
