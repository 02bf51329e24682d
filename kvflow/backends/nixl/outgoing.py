"""Connections that an agent of NIXL has opened, and those that it leaves open when their peer is removed.

UCX opens a TCP connection for each lane to a peer while the peer is added. When it is removed, UCX keeps them, because
the peer may write over them, until the peer's worker closes: for as long as its process lives. Whoever has a right key
could use up every descriptor so, with ever new agents of one process. A connection that the kernel is told to shut down
is closed by UCX itself, once it makes progress. What was measured:

* One over which a post has gone is closed at once, and the peer can be added anew. So it is with others that live,
  after 10 ms. Until its peer has answered, UCX tries again, up to 25 times, with new connections to the same address.
  So addresses are watched, and not only the connections that were there at first.
* To shut one down before its peer has answered has the peer open one in the other direction, which stays for 20 s,
  or for as long as the peer's process lives.
* A blob that the library refuses half-way leaves a connection, too.

A peer may write here over any connection that was opened to it. So none is shut down to the address of a peer that is
connected, and none of one that was heard to write here.

Source: nixl 1.5.1 (UCX 1.23) on Linux.
"""

import errno
import os
import re
import socket
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvflow.backends.sockets import listening_ports, remote_ends

__all__ = ["ANSWER_S", "Address", "InUse", "OutgoingSockets", "StaleConnections"]

DETAILS: Final = Path("/proc/self/fdinfo")
WATCHED: Final = re.compile(r"^tfd:\s*([0-9]+) .*\bino:([0-9a-f]+)", re.MULTILINE)
"""A descriptor that an epoll instance watches, and the inode of what it stands for."""

ANSWER_S: Final = 1.0
"""Time that a peer has to answer the first connection before that is shut down."""

QUIET_S: Final = 0.5
"""Time without a new connection after which UCX is taken to have given up."""

RETRY_S: Final = 10e-3
"""Between looks while connections are shut down."""

RARELY_S: Final = 0.5
"""Between looks while none may be."""

MAPPED: Final = bytes(10) + b"\xff\xff"
"""How an address of IPv6 begins that is one of IPv4."""

INTERNET: Final = (socket.AF_INET, socket.AF_INET6)

Address = tuple[bytes, int]
"""Of the other end: that of the host as the network has it, and the port."""


class OutgoingSockets:
    """The TCP connections that one agent of NIXL has opened and not yet closed.

    Args:
        epolls: In which UCX has them, as `find_epolls` gives them; not owned. None are seen without.
    """

    def __init__(self, epolls: Collection[int]) -> None:
        self._epolls = tuple(epolls)
        self._own_ports = _own_ports() if self._epolls else frozenset[int]()
        self._known: dict[int, Address | None] = {}

    def now(self) -> dict[int, Address]:
        """Return the inode of each connection, and its other end."""
        watched = self._watched()
        unknown = {inode: fd for inode, fd in watched.items() if inode not in self._known}
        self._known = {inode: self._known[inode] for inode in watched if inode in self._known} | self._look_up(unknown)
        return {inode: address for inode, address in self._known.items() if address is not None}

    def shut_down(self, inodes: Iterable[int]) -> None:
        """Shut connections down, so that UCX closes them at its next progress; those that are gone do not matter."""
        watched = self._watched()
        for inode in inodes:
            found = _dup(watched[inode], inode) if inode in watched else None
            if found is not None:
                with found:
                    _shut_down(found)

    def _watched(self) -> dict[int, int]:
        """Return the descriptors that UCX watches by inode, whatever they are."""
        try:
            texts = [(DETAILS / str(epoll)).read_text("ascii") for epoll in self._epolls]
        except OSError:  # closed with the agent, or a system that does not tell
            return {}
        return {int(inode, 16): int(fd) for text in texts for fd, inode in WATCHED.findall(text)}

    def _look_up(self, unknown: Mapping[int, int]) -> dict[int, Address | None]:
        """Find the other ends of connections by inode; None for what others have opened, or is no connection."""
        ends: dict[int, Address | None] = dict.fromkeys(unknown)
        connecting = []
        for inode, fd in unknown.items():
            found = _dup(fd, inode)
            if found is None:
                continue
            with found:
                if found.family in INTERNET and found.getsockname()[1] not in self._own_ports:
                    ends[inode] = _other_end(found)
                    if ends[inode] is None:
                        connecting.append(inode)
        for inode in connecting:
            del ends[inode]
        return ends | _ends_in_table(connecting)


@dataclass
class InUse:
    """What must not be shut down.

    Attributes:
        addresses: Of peers that are added and used, or write here.
        inodes: Connections that were opened for any peer that is added.
    """

    addresses: set[Address] = field(default_factory=set)
    inodes: set[int] = field(default_factory=set)


@dataclass(eq=False)
class _Left:
    """What is open although its peer was removed.

    Attributes:
        inodes: Connections that were opened while the peer was added.
        addresses: Their other ends.
        shut_from: Not before this time.
        is_written: The peer writes here.
        look_at: When to look again.
        quiet_from: When nothing of it was open any more; None if something is.
    """

    peer: str
    sockets: OutgoingSockets
    inodes: frozenset[int]
    addresses: frozenset[Address]
    shut_from: float
    is_written: bool
    look_at: float = float("-inf")
    quiet_from: float | None = None

    def look(self, now: float, found: Mapping[int, Address], used: InUse) -> bool:
        """Shut down what can be; False if nothing has been open for long."""
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
    """Connections to peers that were removed, until they are closed.

    Attributes:
        peers: Those who have some. May be read in any thread.
    """

    def __init__(self) -> None:
        self.peers: frozenset[str] = frozenset()
        self._left: list[_Left] = []
        self._look_at = float("inf")

    def add(
        self, peer: str, sockets: OutgoingSockets, opened: Mapping[int, Address], *, shut_from: float, is_written: bool
    ) -> None:
        """Note what was opened for a peer that is removed now.

        Args:
            peer: Its name.
            sockets: Of the agent that had it.
            opened: Connections and their other ends, by inode.
            shut_from: When to shut the connections down.
            is_written: Never do that: the peer writes here.
        """
        if opened:
            left = _Left(peer, sockets, frozenset(opened), frozenset(opened.values()), shut_from, is_written)
            self._left.append(left)
            self._look_at = left.look_at
            self.peers |= {peer}

    def shut_down_of(self, peer: str, sockets: OutgoingSockets) -> bool:
        """Shut down what a peer has left, since it is about to be added anew; say whether there was something."""
        found = [it for it in self._left if it.peer == peer and it.sockets is sockets and not it.is_written]
        for left in found:
            sockets.shut_down(left.inodes)
        return bool(found)

    def is_due(self, now: float) -> bool:
        """Return whether to look again."""
        return now >= self._look_at

    def look(self, now: float, used: Mapping[OutgoingSockets, InUse]) -> None:
        """Shut down what can be, and forget what is closed.

        Args:
            now: Monotonic seconds.
            used: What is in use, by agent.
        """
        unused = InUse()
        due = [left for left in self._left if now >= left.look_at]
        open_now = {sockets: sockets.now() for sockets in {left.sockets for left in due}}
        over = [it for it in due if not it.look(now, open_now[it.sockets], used.get(it.sockets, unused))]
        self._left = [left for left in self._left if left not in over]
        self._look_at = min((left.look_at for left in self._left), default=float("inf"))
        self.peers = frozenset(left.peer for left in self._left if left.quiet_from is None)


def _dup(fd: int, inode: int) -> socket.socket | None:
    """Duplicate a descriptor, unless it is not what it was: another thread has closed it; or it is no socket."""
    try:
        copy = os.dup(fd)
    except OSError:
        return None
    try:
        if os.fstat(copy).st_ino == inode:
            return socket.socket(fileno=copy)
    except OSError:  # no socket
        pass
    os.close(copy)
    return None


def _shut_down(found: socket.socket) -> None:
    try:
        found.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        if error.errno != errno.ENOTCONN:  # it has ended
            raise


def _other_end(found: socket.socket) -> Address | None:
    """Return the other end of a connection; None while it is being opened."""
    try:
        host, port = found.getpeername()[:2]
    except OSError:
        return None
    return socket.inet_pton(found.family, host.partition("%")[0]).removeprefix(MAPPED), port


def _ends_in_table(connecting: Collection[int]) -> dict[int, Address]:
    """Find the other ends of connections that are being opened, by inode; without those that have just failed.

    Only the kernel's table says it, which is long where there are many connections.
    """
    if not connecting:
        return {}
    try:
        return remote_ends(connecting)
    except OSError:
        return {}


def _own_ports() -> frozenset[int]:
    """Return the ports at which this process listens: connections that others have made to it have one of these."""
    try:
        return listening_ports()
    except OSError:
        return frozenset()
