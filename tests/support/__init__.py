"""What several tests use: pools on real memory, a slow oracle, instances of ranks."""
