"""The bare calls as an engine makes them: from an event loop, through the thread that owns the endpoint.

There is nothing of kvflow between the two but its owner thread, so what this takes longer than the straight loops is
the price of an event loop and a thread on each side, and what kvflow takes longer than this is its own.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio

from kvflow.backends.owner import OwnerThread
from kvflow.cli.bench.bare.endpoint import BareEndpoint

__all__ = ["receive_embedded", "send_embedded"]

POLL_S: Final = 50e-6
"""As often as kvflow's own threads poll at most."""


class _Owned:
    """An endpoint whose calls are all made by one thread; everything else runs on the event loop."""

    def __init__(self, endpoint: BareEndpoint) -> None:
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._arrivals: defaultdict[int, asyncio.Future[None]] = defaultdict(self._loop.create_future)
        self._ends: defaultdict[int, asyncio.Future[None]] = defaultdict(self._loop.create_future)
        self._writes: dict[int, Any] = {}
        self._error: Exception | None = None
        intervals = {"busy_interval_s": POLL_S, "quiet_interval_s": POLL_S, "idle_interval_s": POLL_S}
        self.thread = OwnerThread("bare-owner", self._break, **intervals)
        self.thread.submit(lambda: self.thread.adopt(self))

    async def write(self, work: Any, room: int) -> None:
        """Write a room; errors as in `arrival`."""
        self.thread.submit(lambda: self._writes.__setitem__(room, self._endpoint.start(work, room)))
        await self._wait(self._ends, room)

    def announce(self, room: int) -> None:
        """Tell the other side that a room may come."""
        self.thread.submit(lambda: self._endpoint.announce(room))

    async def arrival(self, room: int) -> None:
        """Wait for the notice of a room.

        Raises:
            Exception: Whatever the transport has raised.
        """
        await self._wait(self._arrivals, room)

    async def _wait(self, of: defaultdict[int, asyncio.Future[None]], room: int) -> None:
        if self._error is not None:
            raise self._error
        try:
            await of[room]
        finally:
            del of[room]

    def poll(self) -> bool:
        """On the thread: look for what has arrived and what has ended."""
        arrived = self._endpoint.poll()
        ended = [room for room, write in self._writes.items() if self._endpoint.is_done(write)]
        for room in ended:
            del self._writes[room]
        if arrived or ended:
            self._loop.call_soon_threadsafe(self._tell, arrived, ended)
        return bool(arrived or ended)

    def is_busy(self) -> bool:
        """On the thread: something is expected."""
        return True

    def _tell(self, arrived: Iterable[int], ended: Iterable[int]) -> None:
        for futures, rooms in ((self._arrivals, arrived), (self._ends, ended)):
            for room in rooms:
                futures[room].set_result(None)

    def _break(self, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: Exception) -> None:
        self._error = error
        for future in [*self._arrivals.values(), *self._ends.values()]:
            if not future.done():
                future.set_exception(error)


@asynccontextmanager
async def _own(endpoint: BareEndpoint) -> AsyncIterator[_Owned]:
    owned = _Owned(endpoint)
    try:
        yield owned
    finally:
        owned.thread.submit(lambda: owned.thread.adopt(None))
        await owned.thread.stop()


async def send_embedded(
    endpoint: BareEndpoint, works: Sequence[Any], rooms: Sequence[int], lanes: int, *, is_announced: bool
) -> list[int]:
    """Send rooms, so many at once; give the times at which they began, in order of the rooms.

    Args:
        endpoint: Whose calls to make.
        works: What to write, in turn.
        rooms: To send.
        lanes: Rooms under way at once; each lane takes its next one when its last one has ended.
        is_announced: A room begins when the receiver waits for it.
    """
    began = [0] * len(rooms)
    async with _own(endpoint) as owned:

        async def send_lane(lane: int) -> None:
            for number in range(lane, len(rooms), lanes):
                if is_announced:
                    await owned.arrival(rooms[number])
                began[number] = time.monotonic_ns()
                await owned.write(works[number % len(works)], rooms[number])

        async with anyio.create_task_group() as group:
            for lane in range(lanes):
                group.start_soon(send_lane, lane)
    return began


async def receive_embedded(
    endpoint: BareEndpoint, rooms: Sequence[int], lanes: int, *, is_announced: bool
) -> list[int]:
    """Receive rooms; give the times at which their notices arrived, in order of the rooms. Arguments as above."""
    arrived = [0] * len(rooms)
    async with _own(endpoint) as owned:

        async def receive_lane(lane: int) -> None:
            for number in range(lane, len(rooms), lanes):
                if is_announced:
                    owned.announce(rooms[number])
                await owned.arrival(rooms[number])
                arrived[number] = time.monotonic_ns()

        async with anyio.create_task_group() as group:
            for lane in range(lanes):
                group.start_soon(receive_lane, lane)
    return arrived
