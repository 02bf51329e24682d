"""Sockets of the control plane: `channel` listens, `dialer` connects; the others are what these are made of."""
