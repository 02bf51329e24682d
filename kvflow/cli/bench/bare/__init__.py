"""The transports without kvflow: the straightest loops that move the same bytes, to hold kvflow against."""
