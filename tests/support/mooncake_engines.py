"""Engines of the Mooncake transport without the library."""

from collections.abc import Sequence

from typing_extensions import override

from kvflow.backends.mooncake.address import EndpointAddress
from kvflow.backends.mooncake.engine import WritingEngine
from kvflow.geometry.memory import MemoryRange

__all__ = ["OpenEngine"]


class OpenEngine(WritingEngine):
    """An engine to which every peer answers. A subclass says what its writes do."""

    session = "me:1"

    def __init__(self) -> None:
        super().__init__()
        self.is_closed = False

    @override
    def register(self, ranges: Sequence[MemoryRange]) -> None:
        """Accept any ranges."""

    @override
    def probe(self, address: EndpointAddress) -> None:
        """Accept any address, as if a peer answered."""

    @override
    def open_session(self, session: str) -> bool:
        return True

    @override
    def read_incarnation(self, address: EndpointAddress) -> bytes | None:
        return address.incarnation

    @override
    def close(self) -> None:
        self.is_closed = True
