"""NIXL as a transport: `backend` is what kvflow uses, and `agent` is what runs on the owner thread."""

from kvflow.backends.nixl.backend import NixlBackend

__all__ = ["NixlBackend"]
