"""Discovery of ranks."""

from kvflow.directory.client import RegistryClient
from kvflow.directory.lookups import Directories
from kvflow.directory.opening import open_directory, publish
from kvflow.directory.server import Registry, RegistryStatistics
from kvflow.directory.service import DIRECTORY_KINDS, DirectoryMessage, DirectoryService

__all__ = [
    "DIRECTORY_KINDS",
    "Directories",
    "DirectoryMessage",
    "DirectoryService",
    "Registry",
    "RegistryClient",
    "RegistryStatistics",
    "open_directory",
    "publish",
]
