"""NIXL as a transport. `backend` is the entry point; `agent` runs on the owner thread."""

from kvflow.backends.nixl.backend import NixlBackend

__all__ = ["NixlBackend"]
