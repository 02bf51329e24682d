"""What both processes of a way are told."""

from collections.abc import Container
from typing import Final, Literal

import msgspec

from kvflow.cli.bench.sides import SideOptions

__all__ = ["ENGINES", "LANES", "EmbeddedOptions", "Load", "Way"]

ENGINES: Final = {
    "sleeps": "the other thread sleeps",
    "steps": "the other thread runs steps of 5 ms, 2 ms of them Python and 3 ms numpy",
    "python": "the other thread runs Python all the time",
}

LANES: Final = 16

Way = Literal["kvflow", "bare", "sglang", "adapter"]
"""Who moves the bytes; `adapter` is kvflow behind SGLang's interfaces, `sglang` its own NIXL backend."""


class EmbeddedOptions(SideOptions, frozen=True, kw_only=True):
    """One process.

    Attributes:
        way: Who moves the bytes.
        shape: Of `SHAPES`.
        tokens: Of each request, whole pages.
        port: Where SGLang's bootstrap server listens.
        warm_up_s: `warm_up_interval_s` of kvflow's loop threads; 0 for none.
        is_traced: Steps of kvflow's handovers are noted.
    """

    way: Way = "kvflow"
    shape: str = "llama3-8b"
    tokens: int = 16
    port: int = 0
    warm_up_s: float = 0.0
    is_traced: bool = False


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Some requests.

    Attributes:
        engine: Of `ENGINES`.
        first_room: Room of the first one; the others follow.
        count: How many.
        lanes: Under way at once.
        gap_s: From when the scheduler sees that all is granted to the last chunk.
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
        """Whether its pages are free: the room that had them before, so many lanes ago, has ended."""
        previous = room - self.lanes
        return previous < self.first_room or previous in ended
