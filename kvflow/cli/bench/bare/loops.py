"""The straight loops of both sides. They block their thread; times are nanoseconds of the machine's monotonic clock."""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvflow.cli.bench.bare.endpoint import BareEndpoint
from kvflow.errors import BackendError

__all__ = ["Napper", "receive_announced", "receive_lanes", "send_announced", "send_lanes"]

PATIENCE_NS: Final = 240_000_000_000


class Napper:
    """What a loop does while there is nothing to do: nothing, or sleep a little.

    Args:
        nap_s: How long; 0 to try again at once.
    """

    def __init__(self, nap_s: float) -> None:
        self._nap_s = nap_s
        self._give_up_ns = time.monotonic_ns() + PATIENCE_NS

    def rest(self) -> None:
        """Be idle for once.

        Raises:
            BackendError: It has been going on for too long: the other side is gone.
        """
        if self._nap_s:
            time.sleep(self._nap_s)
        if time.monotonic_ns() > self._give_up_ns:
            raise BackendError("the other side of a bare transfer is gone", waited_s=PATIENCE_NS / 1e9)


def send_announced(endpoint: BareEndpoint, works: Sequence[Any], rooms: Iterable[int], napper: Napper) -> list[int]:
    """Send rooms one at a time, each when the receiver waits for it; give the times at which they began."""
    began, told = [], set[int]()
    for number, room in enumerate(rooms):
        while room not in told:
            told.update(endpoint.poll())
            if room not in told:
                napper.rest()
        began.append(time.monotonic_ns())
        write = endpoint.start(works[number % len(works)], room)
        while not endpoint.is_done(write):
            napper.rest()
    return began


def receive_announced(endpoint: BareEndpoint, rooms: Iterable[int], napper: Napper) -> list[int]:
    """Receive rooms one at a time; give the times at which their notices arrived."""
    arrived = []
    for room in rooms:
        endpoint.announce(room)
        while room not in endpoint.poll():
            napper.rest()
        arrived.append(time.monotonic_ns())
    return arrived


def send_lanes(endpoint: BareEndpoint, works: Sequence[Any], rooms: Sequence[int], lanes: int, napper: Napper) -> None:
    """Send rooms with so many under way at once; each lane takes its next room when its last one has ended."""
    waiting = deque(range(min(lanes, len(rooms))))
    running: dict[int, Any] = {}
    while waiting or running:
        while waiting:
            number = waiting.popleft()
            running[number] = endpoint.start(works[number % len(works)], rooms[number])
        ended = [number for number, write in running.items() if endpoint.is_done(write)]
        if not ended:
            napper.rest()
        for number in ended:
            del running[number]
            if number + lanes < len(rooms):
                waiting.append(number + lanes)


def receive_lanes(endpoint: BareEndpoint, rooms: Iterable[int], napper: Napper) -> list[int]:
    """Receive rooms in any order; give the times at which notices arrived, in that order."""
    arrived: list[int] = []
    missing = set(rooms)
    while missing:
        news = endpoint.poll()
        if not news:
            napper.rest()
        arrived.extend(time.monotonic_ns() for _ in news)
        missing.difference_update(news)
    return arrived
