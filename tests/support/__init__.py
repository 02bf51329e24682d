"""Shared helpers of the tests: pools on real memory, a slow oracle, instances of ranks."""
