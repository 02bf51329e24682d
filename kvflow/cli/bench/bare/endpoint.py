"""What the bare loops need of a transport, and which ones there are."""

import abc
from typing import Any

from kvflow.cli.bench.loads import Tables
from kvflow.cli.bench.sides import SideOptions
from kvflow.cli.pools import PagePool

__all__ = ["BareEndpoint", "open_endpoint"]


class BareEndpoint(abc.ABC):
    """One side of a transport without kvflow. One thread makes all calls.

    What moves is a room: its bytes first, then its number as a notice.
    """

    @abc.abstractmethod
    def address(self) -> bytes:
        """Return what the other side needs to write here."""

    @abc.abstractmethod
    def connect(self, address: bytes) -> None:
        """Get ready to write to the other side."""

    @abc.abstractmethod
    def prepare(self, tables: Tables) -> Any:
        """Work out as much of a request as can be known before it starts."""

    @abc.abstractmethod
    def start(self, work: Any, room: int) -> Any:
        """Start to write what was prepared; gives what `is_done` wants."""

    @abc.abstractmethod
    def is_done(self, started: Any) -> bool:
        """Make progress, and say whether a write has ended. Not asked again afterwards."""

    @abc.abstractmethod
    def announce(self, room: int) -> None:
        """Tell the other side that a room may come."""

    @abc.abstractmethod
    def poll(self) -> list[int]:
        """Make progress, and give the rooms whose notices have arrived."""

    @abc.abstractmethod
    def close(self) -> None:
        """End it; nothing is under way any more."""


def open_endpoint(options: SideOptions, pool: PagePool) -> BareEndpoint:
    """Open an endpoint on a transport, "nixl" or "mooncake", over a pool to write from or to.

    Raises:
        BackendUnavailable: The transport's library is missing or broken.
    """
    if options.backend == "mooncake":
        from kvflow.cli.bench.bare.mooncake import BareMooncake  # noqa: PLC0415 - only what is used is loaded

        return BareMooncake(pool)
    from kvflow.cli.bench.bare.nixl import BareNixl  # noqa: PLC0415 - as above

    return BareNixl(f"bare-{options.side}", pool)
