"""Optimized transports without kvflow, which kvflow is compared with."""
