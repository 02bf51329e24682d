"""Where ranks find each other."""

from kvflow.directory.client import RegistryClient
from kvflow.directory.server import Registry

__all__ = ["Registry", "RegistryClient"]
