"""Discovery of ranks."""

from kvflow.directory.client import RegistryClient
from kvflow.directory.following import Publication
from kvflow.directory.listings import LEASE_S, Listing
from kvflow.directory.lookups import Directories
from kvflow.directory.opening import open_directory
from kvflow.directory.server import Registry, RegistryStatistics
from kvflow.directory.service import DIRECTORY_KINDS, DirectoryMessage, DirectoryService

__all__ = [
    "DIRECTORY_KINDS",
    "LEASE_S",
    "Directories",
    "DirectoryMessage",
    "DirectoryService",
    "Listing",
    "Publication",
    "Registry",
    "RegistryClient",
    "RegistryStatistics",
    "open_directory",
]
