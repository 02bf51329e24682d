"""What a directory's URL opens. The libraries that some of them need are loaded only for those."""

from kvflow.addresses import DirectoryURL
from kvflow.directory.listings import Directory
from kvflow.errors import ConfigError

__all__ = ["open_directory"]


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
