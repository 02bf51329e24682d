"""Options and orders for both processes of a way."""

from collections.abc import Container
from typing import Final, Literal

import msgspec

from benchmarks.sides import SideOptions

__all__ = ["ENGINES", "LANES", "EmbeddedOptions", "Load", "Way"]

ENGINES: Final = {
    "sleeps": "the other thread sleeps",
    "steps": "the other thread runs steps of 5 ms, 2 ms of them Python and 3 ms numpy",
    "python": "the other thread runs Python all the time",
}

LANES: Final = 16

Way = Literal["kvflow", "bare", "sglang", "adapter"]
"""What moves the bytes; `adapter` is kvflow behind SGLang's interfaces, `sglang` its own NIXL backend."""


class EmbeddedOptions(SideOptions, frozen=True, kw_only=True):
    """Options of one process.

    Attributes:
        way: Implementation that moves the bytes.
        shape: Name in `SHAPES`.
        tokens: Tokens of each request; whole pages.
        port: Port of SGLang's bootstrap server.
        is_traced: Record the steps of kvflow's handovers.
    """

    way: Way = "kvflow"
    shape: str = "llama3-8b"
    tokens: int = 16
    port: int = 0
    is_traced: bool = False


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """An order to transfer consecutive requests.

    Attributes:
        engine: Name in `ENGINES`.
        first_room: Room of the first request; the others follow.
        count: Number of requests.
        lanes: Requests in flight at once.
        gap_s: Time from the poll that reports the grant to the last chunk.
    """

    engine: str
    first_room: int
    count: int
    lanes: int = 1
    gap_s: float = 0.0

    @property
    def rooms(self) -> range:
        """Rooms of the requests, in order."""
        return range(self.first_room, self.first_room + self.count)

    def may_begin(self, room: int, ended: Container[int]) -> bool:
        """Return whether a room's pages are free: their previous room, `lanes` before, has ended."""
        previous = room - self.lanes
        return previous < self.first_room or previous in ended
