"""A bare transport without kvflow, polled by the scheduler thread itself.

Instead of a grant, the decode side only announces that it waits for a room.
"""

from typing import Any, Final

import numpy as np

from benchmarks.bare.endpoint import BareEndpoint
from benchmarks.embedded.engines import News
from benchmarks.embedded.loads import LANES
from benchmarks.pair.loads import Tables

__all__ = ["BareDecode", "BarePrefill"]

NAP_S: Final = 50e-6


class BarePrefill:
    """A `PrefillEnd` over a connected endpoint."""

    nap_s = NAP_S
    is_quiet = True

    def __init__(self, endpoint: BareEndpoint, tables: list[list[int]], peers: list[list[int]]) -> None:
        self._endpoint = endpoint
        pairs = zip(tables, peers, strict=True)
        self._works = [endpoint.prepare(Tables(np.asarray(src), np.asarray(dst))) for src, dst in pairs]
        self._awaited: set[int] = set()
        self._asked: set[int] = set()
        self._running: dict[int, Any] = {}

    def send(self, room: int) -> None:
        """Start a request."""
        self._awaited.add(room)

    def chunk(self, room: int) -> None:
        """Do nothing: `finish` sends everything."""

    def finish(self, room: int, *, is_rest: bool) -> None:
        """Write all tokens."""
        self._running[room] = self._endpoint.start(self._works[room % LANES], room)

    def completed(self) -> list[News]:
        """Return what has changed since the last call."""
        ended = [room for room, write in self._running.items() if self._endpoint.is_done(write)]
        for room in ended:
            del self._running[room]
        if self._awaited:
            self._asked.update(self._endpoint.poll())
        granted = self._awaited & self._asked
        self._awaited -= granted
        self._asked -= granted
        return [
            *(News(room, granted=True) for room in granted),
            *(News(room, freed=True, ended=True) for room in ended),
        ]


class BareDecode:
    """A `DecodeEnd` over a connected endpoint."""

    nap_s = NAP_S

    def __init__(self, endpoint: BareEndpoint) -> None:
        self._endpoint = endpoint

    def receive(self, room: int) -> None:
        """Start a request."""
        self._endpoint.announce(room)

    def completed(self) -> list[News]:
        """Return what has changed since the last call."""
        return [News(room, ended=True) for room in self._endpoint.poll()]
