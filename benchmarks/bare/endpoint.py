"""The interface that the bare loops require of a transport, and its implementations."""

import abc
from typing import Any

from benchmarks.pair.loads import Tables
from benchmarks.pools import PagePool
from benchmarks.sides import SideOptions

__all__ = ["BareEndpoint", "open_endpoint"]


class BareEndpoint(abc.ABC):
    """One side of a transport without kvflow. All calls are made on one thread.

    It moves rooms: first the bytes of a room, then its number as a notice.
    """

    @abc.abstractmethod
    def address(self) -> bytes:
        """Return what the other side needs to write here."""

    @abc.abstractmethod
    def connect(self, address: bytes) -> None:
        """Prepare to write to the other side."""

    @abc.abstractmethod
    def prepare(self, tables: Tables) -> Any:
        """Compute as much of a request as can be known before it starts."""

    @abc.abstractmethod
    def start(self, work: Any, room: int) -> Any:
        """Start to write what was prepared; return the argument for `is_done`."""

    @abc.abstractmethod
    def is_done(self, started: Any) -> bool:
        """Make progress, and return whether a write has ended. Not called again after that."""

    @abc.abstractmethod
    def announce(self, room: int) -> None:
        """Tell the other side that a room can be sent."""

    @abc.abstractmethod
    def poll(self) -> list[int]:
        """Make progress, and return the rooms whose notices have arrived."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the endpoint; no write is in flight."""


def open_endpoint(options: SideOptions, pool: PagePool) -> BareEndpoint:
    """Open an endpoint on a transport, "nixl" or "mooncake", over a pool to write from or to.

    Raises:
        BackendUnavailable: The transport's library is missing or broken.
    """
    if options.backend == "mooncake":
        from benchmarks.bare.mooncake import BareMooncake  # noqa: PLC0415 - only what is used is loaded

        return BareMooncake(pool)
    from benchmarks.bare.nixl import BareNixl  # noqa: PLC0415 - as above

    return BareNixl(f"bare-{options.side}", pool)
