"""Mooncake's TransferEngine as a transport: `backend` is what kvflow sees, the rest are its parts."""

from kvflow.backends.mooncake.backend import MooncakeBackend

__all__ = ["MooncakeBackend"]
