"""Transports without kvflow, as good as they can be made: what kvflow is compared with."""
