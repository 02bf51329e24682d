"""The busy loops of both sides, which block their thread. Times are nanoseconds of the machine's monotonic clock."""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

from benchmarks.bare.endpoint import BareEndpoint
from kvflow.errors import BackendError

__all__ = ["Napper", "receive_announced", "receive_lanes", "send_announced", "send_lanes"]

PATIENCE_NS: Final = 240_000_000_000


class Napper:
    """What a loop does when there is nothing to do: nothing, or a short sleep.

    Args:
        nap_s: Length of the sleep; 0 to retry at once.
    """

    def __init__(self, nap_s: float) -> None:
        self._nap_s = nap_s
        self._give_up_ns = time.monotonic_ns() + PATIENCE_NS

    def rest(self) -> None:
        """Take one nap.

        Raises:
            BackendError: The loop has run for too long: the other side is gone.
        """
        if self._nap_s:
            time.sleep(self._nap_s)
        if time.monotonic_ns() > self._give_up_ns:
            raise BackendError("the other side of a bare transfer is gone", waited_s=PATIENCE_NS / 1e9)


def send_announced(endpoint: BareEndpoint, works: Sequence[Any], rooms: Iterable[int], napper: Napper) -> list[int]:
    """Send rooms one at a time, each when the receiver waits for it; return their start times."""
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
    """Receive rooms one at a time; return the arrival times of their notices."""
    arrived = []
    for room in rooms:
        endpoint.announce(room)
        while room not in endpoint.poll():
            napper.rest()
        arrived.append(time.monotonic_ns())
    return arrived


def send_lanes(endpoint: BareEndpoint, works: Sequence[Any], rooms: Sequence[int], lanes: int, napper: Napper) -> None:
    """Send rooms with `lanes` in flight at once; each lane starts its next room when its last one has ended."""
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
    """Receive rooms in any order; return the arrival times of notices, in that order."""
    arrived: list[int] = []
    missing = set(rooms)
    while missing:
        news = endpoint.poll()
        if not news:
            napper.rest()
        arrived.extend(time.monotonic_ns() for _ in news)
        missing.difference_update(news)
    return arrived
