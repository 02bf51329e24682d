"""What a directory's URL opens. The libraries that some of them need are loaded only for those."""

from collections.abc import Callable

from kvflow.addresses import DirectoryURL
from kvflow.directory.following import Publication
from kvflow.directory.listings import LEASE_S, Directory, Listing
from kvflow.errors import ConfigError
from kvflow.observe.logs import BoundLogger
from kvflow.wire.messages import PeerId

__all__ = ["open_directory", "publish"]


def publish(
    url: DirectoryURL, log: BoundLogger, peer: PeerId, endpoint: str, start_task: Callable[..., object]
) -> Publication:
    """Start a task that keeps an instance listed at the endpoint of its first rank; raises as `open_directory`."""
    listing = Listing(endpoint=endpoint, identity=str(peer), lease_s=LEASE_S)
    publication = Publication(open_directory(url), log, peer.rank.instance, listing)
    start_task(publication.run)
    return publication


def open_directory(url: DirectoryURL) -> Directory:
    """Return the directory at a URL; it is not connected yet.

    Raises:
        ConfigError: It needs a package that is missing, or a file that cannot be used.
    """
    try:
        match url.scheme:
            case "etcd":
                from kvflow.directory.etcd import EtcdDirectory  # noqa: PLC0415

                return EtcdDirectory(url)
            case "kubernetes":
                from kvflow.directory.kubernetes import KubernetesDirectory  # noqa: PLC0415

                return KubernetesDirectory(url)
            case _:
                from kvflow.directory.file import FileDirectory  # noqa: PLC0415

                return FileDirectory(url)
    except ImportError as error:
        raise ConfigError(
            "package for this directory is missing: pip install kvflow[" + url.scheme + "]",
            setting="registry",
            value=url.url,
            package=error.name,
        ) from error
