"""Mooncake's TransferEngine as a transport. `backend` is the entry point; the other modules are its parts."""

from kvflow.backends.mooncake.backend import MooncakeBackend

__all__ = ["MooncakeBackend"]
