"""What the agent needs of an engine, whichever library is behind it."""

import abc
from collections.abc import Sequence

from kvflow.backends.mooncake.address import EndpointAddress
from kvflow.geometry.layout import MemoryRange

__all__ = ["WritingEngine"]


class WritingEngine(abc.ABC):
    """An engine that is ready. Only `probe` and `read_life` may be called on any thread.

    Attributes:
        session: What peers call it.
        num_users: Lines that write through it, and peers that are being met through it.
        num_departed: Lines that did and are gone.
    """

    session: str

    def __init__(self) -> None:
        self.num_users = 0
        self.num_departed = 0

    @abc.abstractmethod
    def register(self, ranges: Sequence[MemoryRange]) -> None:
        """Make memory readable and writable for peers.

        Raises:
            RegistrationError: The library refused; nothing is registered.
        """

    @abc.abstractmethod
    def probe(self, address: EndpointAddress) -> None:
        """See whether somebody answers at a peer's address. May block for a minute.

        Raises:
            BackendError: Nobody does, or this engine is closed.
        """

    @abc.abstractmethod
    def read_life(self, address: EndpointAddress) -> bytes | None:
        """Read the life of whoever answers for a peer's memory; None if nobody does. May block for seconds.

        Raises:
            BackendError: This engine is closed.
        """

    @abc.abstractmethod
    def submit(self, session: str, src: int, dst: int, num_bytes: int) -> int:
        """Start to write; 0 if it was refused, else an id."""

    @abc.abstractmethod
    def check(self, transfer_id: int) -> int:
        """Ask about an id: 0 while it runs, 1 if it is done, -1 if it failed, -2 if nobody knows.

        Never ask about an id again after anything but 0.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Destroy the engine: afterwards it reads and writes nothing any more."""
