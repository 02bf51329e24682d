"""Where ranks find each other."""

from kvflow.registry.client import RegistryClient
from kvflow.registry.server import Registry

__all__ = ["Registry", "RegistryClient"]
