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
        threads: Threads of SGLang's own backend on prefill: NIXL's, and at most as many of SGLang's transfer workers.
        is_traced: Record the steps of kvflow's handovers.
    """

    way: Way = "kvflow"
    shape: str = "llama3-8b"
    tokens: int = 16
    port: int = 0
    threads: int = 8
    is_traced: bool = False


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """An order to transfer consecutive requests.

    Only ends over SGLang's interfaces have `chunks` and `prefix`.

    Attributes:
        engine: Name in `ENGINES`.
        first_room: Room of the first request; the others follow. `Player` fills it in.
        count: Number of requests.
        lanes: Requests in flight at once.
        gap_s: Time from the poll that reports the grant to the last chunk.
        is_fragmented: Pages are in random order, which differs between the sides.
        chunks: Chunks that a request is sent in, one right after the other.
        prefix: Pages of each request that decode has in its cache, and prefill does not send.
    """

    engine: str
    first_room: int = 0
    count: int
    lanes: int = 1
    gap_s: float = 0.0
    is_fragmented: bool = True
    chunks: int = 1
    prefix: int = 0

    @property
    def rooms(self) -> range:
        """Rooms of the requests, in order."""
        return range(self.first_room, self.first_room + self.count)

    def may_begin(self, room: int, ended: Container[int]) -> bool:
        """Return whether a room's pages are free: their previous room, `lanes` before, has ended."""
        previous = room - self.lanes
        return previous < self.first_room or previous in ended
