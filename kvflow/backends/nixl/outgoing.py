"""TCP connections opened by a NIXL agent, including those left open after their peer was removed.

UCX opens a TCP connection for each lane while a peer is added. After the peer is removed, UCX keeps the connections
until the peer's worker closes, because the peer may write over them: for as long as the peer's process lives. A client
with a valid key could thus exhaust this process's file descriptors by connecting ever new agents of one process. If a
connection is shut down at the socket level, UCX closes it the next time it makes progress. Measurements:

* A connection that has carried a post is closed at once, and the peer can be added again. The same holds for other live
  connections, after 10 ms. Until its peer has answered, UCX retries up to 25 times, with new connections to the same
  address. So addresses are watched, not only the connections that were opened first.
* If a connection is shut down before its peer has answered, the peer opens one in the other direction, which stays open
  for 20 s, or for as long as the peer's process lives.
* A blob that the library rejects half-way also leaves a connection.

A peer may write here over any connection that was opened to it. Therefore no connection is shut down whose address
belongs to a connected peer, or whose peer is known to write here.

Source: nixl 1.5.1 (UCX 1.23) on Linux.
"""

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from kvflow.backends.library_sockets import Address, LibrarySockets, opened, remote_end, shut_down
from kvflow.backends.sockets import INTERNET, listening_ports, remote_ends

__all__ = ["ANSWER_S", "InUse", "OutgoingSockets", "StaleConnections"]

ANSWER_S: Final = 1.0
"""Seconds a peer has to answer the first connection before that connection is shut down."""

QUIET_S: Final = 0.5
"""Seconds without a new connection after which UCX is assumed to have given up."""

RETRY_S: Final = 10e-3
"""Seconds between checks while connections are being shut down."""

RARELY_S: Final = 0.5
"""Seconds between checks while no connection may be shut down."""


class OutgoingSockets(LibrarySockets):
    """The TCP connections that one NIXL agent has opened and not yet closed."""

    def __init__(self, epolls: Collection[int]) -> None:
        super().__init__(epolls)
        self._own_ports = _own_ports() if self.epolls else frozenset[int]()
        self._known: dict[int, Address | None] = {}

    def now(self) -> dict[int, Address]:
        """Return the remote address of each open connection, by inode."""
        watched = self.watched()
        unknown = {inode: fd for inode, fd in watched.items() if inode not in self._known}
        self._known = {inode: self._known[inode] for inode in watched if inode in self._known} | self._look_up(unknown)
        return {inode: address for inode, address in self._known.items() if address is not None}

    def shut_down(self, inodes: Iterable[int]) -> None:
        """Shut connections down, so that UCX closes them when it next makes progress. Closed ones are ignored."""
        watched = self.watched()
        for inode in inodes:
            with opened(watched.get(inode, -1), inode) as found:
                if found is not None:
                    shut_down(found)

    def _look_up(self, unknown: Mapping[int, int]) -> dict[int, Address | None]:
        """Return the remote addresses of connections, by inode; None for non-sockets and for accepted connections."""
        ends: dict[int, Address | None] = dict.fromkeys(unknown)
        connecting = []
        for inode, fd in unknown.items():
            with opened(fd, inode) as found:
                if found is not None and found.family in INTERNET and found.getsockname()[1] not in self._own_ports:
                    ends[inode] = remote_end(found)
                    if ends[inode] is None:
                        connecting.append(inode)
        for inode in connecting:
            del ends[inode]
        return ends | _ends_in_table(connecting)


@dataclass
class InUse:
    """Connections that must not be shut down.

    Attributes:
        addresses: Addresses of peers that are in use or that write here.
        inodes: Connections opened for any added peer.
    """

    addresses: set[Address] = field(default_factory=set)
    inodes: set[int] = field(default_factory=set)


@dataclass(eq=False)
class _Left:
    """Connections left open by one removed peer.

    Attributes:
        inodes: Connections opened while the peer was being added.
        addresses: Their remote addresses.
        shut_from: Earliest time to shut them down.
        is_written: True if the peer writes here; then they are never shut down.
        look_at: When to check again.
        quiet_from: Since when none of them is open; None while one is.
    """

    peer: str
    sockets: OutgoingSockets
    inodes: frozenset[int]
    addresses: frozenset[Address]
    shut_from: float
    is_written: bool
    look_at: float = float("-inf")
    quiet_from: float | None = None

    def shut_connections(self, now: float, found: Mapping[int, Address], used: InUse) -> bool:
        """Shut down the connections that may be. Return False once none has been open for `QUIET_S`."""
        addresses = self.addresses - used.addresses
        mine = {inode for inode, address in found.items() if address in addresses and inode not in used.inodes}
        if not mine and not self.inodes & found.keys():
            self.quiet_from = now if self.quiet_from is None else self.quiet_from
            self.look_at = now + RETRY_S
            return now < self.quiet_from + QUIET_S
        self.quiet_from = None
        if not mine or self.is_written:
            self.look_at = now + RARELY_S
        elif now < self.shut_from:
            self.look_at = min(now + RARELY_S, self.shut_from)
        else:
            self.sockets.shut_down(mine)
            self.look_at = now + RETRY_S
        return True


class StaleConnections:
    """Connections to removed peers that are not closed yet.

    Attributes:
        peers: Peers with such connections. Can be read from any thread.
    """

    def __init__(self) -> None:
        self.peers: frozenset[str] = frozenset()
        self._left: list[_Left] = []
        self._look_at = float("inf")

    def add(
        self, peer: str, sockets: OutgoingSockets, opened: Mapping[int, Address], *, shut_from: float, is_written: bool
    ) -> None:
        """Track the connections of a peer that is being removed; see `_Left`."""
        if opened:
            left = _Left(peer, sockets, frozenset(opened), frozenset(opened.values()), shut_from, is_written)
            self._left.append(left)
            self._look_at = left.look_at
            self.peers |= {peer}

    def shut_down_of(self, peer: str, sockets: OutgoingSockets) -> bool:
        """Shut down the connections left by a peer that is about to be added again. Return whether there were any."""
        found = [it for it in self._left if it.peer == peer and it.sockets is sockets and not it.is_written]
        for left in found:
            sockets.shut_down(left.inodes)
        return bool(found)

    def is_due(self, now: float) -> bool:
        """Return whether `look` should be called."""
        return now >= self._look_at

    def shut_connections(self, now: float, used: Mapping[OutgoingSockets, InUse]) -> None:
        """Shut down the connections that may be, and forget those that are closed."""
        unused = InUse()
        due = [left for left in self._left if now >= left.look_at]
        open_now = {sockets: sockets.now() for sockets in {left.sockets for left in due}}
        over = [it for it in due if not it.shut_connections(now, open_now[it.sockets], used.get(it.sockets, unused))]
        self._left = [left for left in self._left if left not in over]
        self._look_at = min((left.look_at for left in self._left), default=float("inf"))
        self.peers = frozenset(left.peer for left in self._left if left.quiet_from is None)


def _ends_in_table(connecting: Collection[int]) -> dict[int, Address]:
    """Return the remote addresses of connections that are being opened, by inode, without those that have just failed.

    They are only listed in the kernel's table, which is long if the host has many connections.
    """
    with suppress(OSError):
        return remote_ends(connecting) if connecting else {}
    return {}


def _own_ports() -> frozenset[int]:
    """Return the ports on which this process listens: accepted connections have one of these as their local port."""
    with suppress(OSError):
        return listening_ports()
    return frozenset()
