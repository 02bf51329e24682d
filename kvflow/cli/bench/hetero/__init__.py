"""Two processes whose ranks keep the same cache differently: direct writes, packed ones, and what kvflow chooses."""
