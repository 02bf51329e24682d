"""Lines between ranks: connections that delay, and, if told so, lose, repeat and reorder what they carry.

A line is dialled by a decode rank and ends at an address, as a ZMQ dealer does: when the process at the address dies,
the line stays and finds the next process there, under the same name, without what was on its way.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvflow.wire.messages import RankId

if TYPE_CHECKING:
    from kvflow.simulation.host import Host
    from kvflow.simulation.world import World

__all__ = ["Line", "Network"]

QUICK_S = 0.001
SLOW_S = 0.5
LATE_S = 0.2
RECONNECT_S = 0.05
LINGER = 0.5
"""Chance that what a process had sent before it died still arrives."""


class Line:
    """A connection from a decode rank to an address.

    Attributes:
        name: What the listener knows it by.
        dialer: The life of the decode rank that holds it.
        to: The rank at whose address it ends.
        server: The life that is connected now, or None.
        is_closed: The dialer gave it up.
    """

    __slots__ = ("dialer", "epochs", "is_closed", "latest", "name", "server", "take", "to", "unsent")

    def __init__(self, name: bytes, dialer: "Host", to: RankId, take: Callable[[bytes], None]) -> None:
        self.name = name
        self.dialer = dialer
        self.to = to
        self.take = take
        self.server: Host | None = None
        self.is_closed = False
        self.epochs = [0, 0]
        self.unsent: list[bytes] = []
        self.latest = [0.0, 0.0]


Link = tuple[RankId, RankId]


class Network:
    """Carries messages over lines.

    Args:
        world: Where time and chance come from.
    """

    def __init__(self, world: "World") -> None:
        self._world = world
        self._lines: list[Line] = []
        self._cut: dict[Link, list[Callable[[], None]]] = {}
        self.servers: dict[RankId, Host] = {}
        self.hold_message: Callable[[RankId, RankId, bytes, Callable[[], None]], bool] | None = None

    def dial(self, dialer: "Host", to: RankId, take: Callable[[bytes], None]) -> Line:
        """Open a line; it is connected as soon as somebody listens."""
        line = Line(b"line%d" % len(self._lines), dialer, to, take)
        self._lines.append(line)
        line.server = self.servers.get(to)
        return line

    def close(self, line: Line) -> None:
        """Give a line up; what was sent still leaves, what comes is lost, and the other end learns of it later."""
        line.is_closed = True
        if line.server is not None:
            self._world.schedule.after(self._delay(), self._notice_closed, line, line.server)

    def listen(self, server: "Host") -> None:
        """Take an address over; lines that end there find the new process after a while."""
        self.servers[server.me.rank] = server
        for line in self._lines:
            if line.to == server.me.rank and not line.is_closed:
                self._world.schedule.after(RECONNECT_S, self._connect, line, server)

    def vanish(self, host: "Host", *, is_orderly: bool = False) -> None:
        """A process is gone: its lines end; what it had sent still leaves if it was closed in order."""
        linger = 1.0 if is_orderly else LINGER
        if self.servers.get(host.me.rank) is host:
            del self.servers[host.me.rank]
        for line in self._lines:
            if line.dialer is host and not line.is_closed:
                self.close(line)
                line.epochs[0] += self._world.rng.random() >= linger
            elif line.server is host:
                self._disconnect(line, is_lost=self._world.rng.random() >= linger)

    def break_line(self, line: Line) -> None:
        """Lose a connection and what is on its way; the dialer connects again under the same name."""
        server = line.server
        self._disconnect(line, is_lost=True)
        if server is not None:
            self._world.schedule.after(RECONNECT_S, self._connect, line, server)

    def open_lines(self) -> list[Line]:
        """Lines that are connected."""
        return [line for line in self._lines if line.server is not None and not line.is_closed]

    def cut(self, source: RankId, target: RankId) -> None:
        """Let nothing through from one rank to another until `mend`; a TCP connection keeps what waits."""
        self._cut.setdefault((source, target), [])

    def mend(self, source: RankId, target: RankId) -> None:
        """Let messages through again."""
        for deliver in self._cut.pop((source, target), []):
            self._world.schedule.after(0.0, deliver)

    def mend_all(self) -> None:
        """Let everything through again."""
        for source, target in list(self._cut):
            self.mend(source, target)

    def is_cut(self, source: RankId, target: RankId) -> bool:
        """Say whether nothing comes through."""
        return (source, target) in self._cut

    def refuses(self, source: RankId, target: RankId) -> bool:
        """Say whether a host answers that nobody listens at an address of it."""
        is_silent = self.is_cut(source, target) or self.is_cut(target, source)
        return target not in self.servers and not is_silent

    def to_server(self, line: Line, data: bytes) -> None:
        """Send from the dialer; it waits while nobody is connected."""
        if line.server is None:
            line.unsent.append(data)
        else:
            self._send(line, 0, line.dialer.me.rank, line.to, data)

    def to_dialer(self, line: Line, data: bytes) -> None:
        """Send from the listener."""
        self._send(line, 1, line.to, line.dialer.me.rank, data)

    def _send(self, line: Line, way: int, source: RankId, target: RankId, data: bytes) -> None:
        faults, rng = self._world.faults, self._world.rng
        copies = 1
        if faults.is_lossy:
            if faults.drop and rng.random() < faults.drop:
                self._world.count("dropped message")
                return
            if faults.duplicate and rng.random() < faults.duplicate:
                self._world.count("duplicated message")
                copies = 2
        for copy in range(copies):
            deliver = functools.partial(self._arrive, line, way, line.server, line.epochs[way], data)
            if self.hold_message is None or not self.hold_message(source, target, data, deliver):
                self._carry(line, way, deliver, is_copy=copy > 0)

    def _carry(self, line: Line, way: int, deliver: Callable[[], None], *, is_copy: bool) -> None:
        """Deliver after a while: in the order of the line, or out of it and late."""
        world = self._world
        when = world.schedule.now + self._delay()
        faults = world.faults
        if is_copy or (faults.reorder and world.rng.random() < faults.reorder):
            world.count("reordered message")
            when += world.rng.random() * LATE_S
        else:
            when = line.latest[way] = max(when, line.latest[way])
        world.schedule.at(when, deliver)

    def _arrive(self, line: Line, way: int, server: "Host | None", epoch: int, data: bytes) -> None:
        """Hand a message over, unless its connection is gone; behind a cut it waits."""
        if line.epochs[way] != epoch or server is None:
            return
        ends = (line.dialer.me.rank, line.to)
        waiting = self._cut.get(ends if way == 0 else ends[::-1])
        if waiting is not None:
            waiting.append(lambda: self._arrive(line, way, server, epoch, data))
        elif way == 0:
            server.call(server.take_bytes, line, data)
        elif not line.is_closed:
            line.dialer.call(line.take, data)

    def _delay(self) -> float:
        world = self._world
        if world.faults.delay and world.rng.random() < world.faults.delay:
            world.count("delayed message")
            return world.rng.random() * SLOW_S
        return QUICK_S * (0.5 + world.rng.random())

    def _disconnect(self, line: Line, *, is_lost: bool) -> None:
        """End the connection of a line; what the listener had sent may still arrive."""
        line.server = None
        line.epochs[0] += 1
        line.epochs[1] += is_lost

    def _connect(self, line: Line, server: "Host") -> None:
        if line.is_closed or not line.dialer.is_alive or not server.is_alive or line.server is server:
            return
        line.server = server
        unsent, line.unsent = line.unsent, []
        for data in unsent:
            self.to_server(line, data)

    def _notice_closed(self, line: Line, server: "Host") -> None:
        server.call(server.line_closed, line)
