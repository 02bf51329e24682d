"""Directories of other systems, which list instances: what they say of one, and what each kind of them does.

A directory names the rank that answers for an instance, and nothing else: what others need to know of the instance,
that rank tells them itself. So a listing is short, and a directory that lies can at most name a wrong address, where
keys do not fit.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Final

import msgspec

from kvflow.addresses import DirectoryURL, check_endpoint
from kvflow.errors import ConfigError

__all__ = [
    "LEASE_S",
    "REMOVE_S",
    "RENEW_S",
    "UNREADABLE",
    "Directory",
    "DirectoryDown",
    "Listing",
    "ListingTaken",
    "Listings",
    "read_listing",
]

REMOVE_S: Final = 1.0
"""Time to end a listing; later, its lease does."""

LEASE_S: Final = 9.0
"""How long an instance stays listed without a renewal."""

RENEW_S: Final = LEASE_S / 3


class Listing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a directory says of an instance.

    Attributes:
        endpoint: "tcp://host:port" of the rank that answers for it.
        identity: Differs between processes that are listed under the same name; empty if the directory does not say.
        draining: It takes no new requests.
        lease_s: Without a renewal in this time, it is gone; None if it stays until it is removed.
    """

    endpoint: Annotated[str, msgspec.Meta(max_length=512)]
    identity: Annotated[str, msgspec.Meta(max_length=512)] = ""
    draining: bool = False
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] | None = None


UNREADABLE: Final = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What code raises that reads an answer of another shape than it expects: a directory may answer anything."""

Listings = Mapping[str, Listing]
"""By name of the instance."""


class DirectoryDown(Exception):
    """A directory does not answer, or not as it should."""


class ListingTaken(Exception):
    """Another process is listed under the same name."""

    def __init__(self, other: Listing) -> None:
        super().__init__(f"{other.endpoint} is listed under this name")
        self.other = other


class Directory(ABC):
    """One directory. Its methods raise at the first trouble; whoever calls them tries again.

    Args:
        url: Where it is.
    """

    def __init__(self, url: DirectoryURL) -> None:
        self.url = url

    @abstractmethod
    def watch(self) -> AsyncGenerator[Listings, None]:
        """Yield all listings, and again whenever one has changed. Each is a value of its own.

        Raises:
            DirectoryDown: Changes may have been missed. Watch again, which begins with all listings.
        """

    @abstractmethod
    def keep(self, instance: str, listing: Listing, may_replace: bool) -> AsyncGenerator[None, None]:
        """List an instance, and yield at each renewal, until closed. The listing then stays for what its lease leaves.

        Args:
            instance: Its name.
            listing: What is listed of it.
            may_replace: Whether it may take the place of another process, such as its predecessor.

        Raises:
            DirectoryDown: It may not be listed any more.
            ListingTaken: Another process is listed under this name.
        """

    @abstractmethod
    async def remove(self, instance: str, listing: Listing) -> None:
        """End a listing, unless another process has taken its place.

        Raises:
            DirectoryDown: It may still be listed.
        """


def read_listing(text: bytes) -> Listing | None:
    """Return a listing that somebody has written; None if it is none."""
    try:
        listing = msgspec.json.decode(text, type=Listing)
        check_endpoint("endpoint", listing.endpoint)
    except (msgspec.MsgspecError, UnicodeDecodeError, ConfigError):
        return None
    return listing
