"""The TCP connections of a transport library, found through the epoll instances that watch them.

Libraries wait for TCP to report that a connection is dead, which takes the sender about 15 minutes if a middlebox
swallows the connection, and the receiver for ever. So kvflow turns on the kernel's keepalive, and closes connections
whose data is retransmitted without any acknowledgement. A process that is stopped or busy still acknowledges: its
kernel does, or reports a full buffer, and then nothing is in flight. After that the kernels of both hosts have closed
their ends, so nothing can land over the connection any more.

Source: nixl 1.5.1 (UCX 1.23) and Mooncake 0.3.13.post1 on Linux.
"""

import errno
import ipaddress
import os
import re
import socket
import struct
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from kvflow.backends.sockets import INTERNET, listening_ports

__all__ = [
    "CHECK_S",
    "SILENT_S",
    "Address",
    "Carried",
    "LibrarySockets",
    "find_epolls",
    "opened",
    "remote_end",
    "shut_down",
]

Made = TypeVar("Made")

Address = tuple[bytes, int]
"""An end of a connection: the host in network byte order, and the port."""

DESCRIPTORS: Final = Path("/proc/self/fd")
DETAILS: Final = Path("/proc/self/fdinfo")
EPOLL: Final = "anon_inode:[eventpoll]"
WATCHED: Final = re.compile(r"^tfd:\s*([0-9]+) .*\bino:([0-9a-f]+)", re.MULTILINE)
"""Matches a descriptor that an epoll instance watches, and its inode."""

REGISTERED: Final = re.compile(r"^tfd:\s*([0-9]+) .*\bdata:\s*([0-9a-f]+)", re.MULTILINE)
"""Matches such a descriptor, and what was registered with it."""

MAPPED: Final = bytes(10) + b"\xff\xff"
"""Prefix of an IPv6 address that maps an IPv4 address."""

CHECK_S: Final = 0.5
"""Seconds between two checks."""

SILENT_S: Final = 4.0
"""How long sent data may go unacknowledged: longer than the lease, after which transfers have failed anyway."""

KEEPALIVE: Final = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}
"""An idle connection is probed after 2 s, and closed when it has not answered for 3 s."""

INFO: Final = struct.Struct("=BxB21xI28xI60xQ")
"""Fields of Linux's `tcp_info`: the state, consecutive retransmissions, unacknowledged segments, milliseconds since the
last acknowledgement, and acknowledged bytes."""

ESTABLISHED: Final = 1
CLOSE_WAIT: Final = 8

MIN_RETRANSMITS: Final = 2

ABORT: Final = struct.pack("ii", 1, 0)
"""SO_LINGER: drop what is unsent when the socket is closed."""


_turns: Final[dict[int, threading.Lock]] = {}
"""Held while a library creates an object, so that two threads do not find each other's instances. By process, because a
forked one inherits a lock that is held."""


class Carried(NamedTuple):
    """What a connection has carried to its other end.

    Attributes:
        host: Remote address in network byte order.
        port: Remote port.
        num_bytes: Acknowledged bytes.
    """

    host: bytes
    port: int
    num_bytes: int

    @property
    def address(self) -> str:
        """Remote address, like "10.0.0.1:4000"."""
        return f"{ipaddress.ip_address(self.host)}:{self.port}"


class LibrarySockets:
    """The TCP connections that a library's epoll instances watch. Used on one thread.

    Attributes:
        epolls: From `find_epolls`; not owned. If empty, no connection is found.
        ports: Ports on which connections from peers were accepted.
        hosts: Remote hosts of all connections so far, in network byte order.
        is_sending: Whether data was unacknowledged when `close_silent` last looked.
        carried: What each connection had carried by then; None if that is unknown.
    """

    def __init__(self, epolls: Collection[int]) -> None:
        self.ports: set[int] = set()
        self.hosts: set[bytes] = set()
        self.is_sending = False
        self.carried: list[Carried] | None = None
        self.epolls = tuple(epolls)
        self._prepared: set[int] = set()

    def watched(self) -> dict[int, int]:
        """Return the descriptors of any kind that the library watches, by inode."""
        try:
            return self.listed()
        except OSError:  # closed with the library, not supported by this system, or no descriptor is free
            return {}

    def listed(self) -> dict[int, int]:
        """Return what `watched` does, for a proof that depends on them all, or raise OSError."""
        if not self.epolls:
            raise OSError(errno.ENOTSUP, "the sockets of the library are not known")
        texts = [(DETAILS / str(epoll)).read_text("ascii") for epoll in self.epolls]
        return {int(inode, 16): int(fd) for text in texts for fd, inode in WATCHED.findall(text)}

    def local_ends(self, inodes: Iterable[int]) -> tuple[bytes, ...]:
        """Return the local ends of established connections, see `Backend.ends_to`."""
        watched = self.watched()
        ends = []
        for inode in inodes:
            with opened(watched.get(inode, -1), inode) as found:
                if found is not None and found.family in INTERNET and _info(found)[0] == ESTABLISHED:
                    ends.append(_packed(found.family, found.getsockname()))
        return tuple(ends)

    def close_silent(self) -> list[tuple[str, float]]:
        """Turn on keepalive for new connections, and close those whose other end acknowledges nothing.

        Returns:
            Of each that was closed, the remote address, like "10.0.0.1:4000", and the seconds since it was last heard.
        """
        if not hasattr(socket, "TCP_INFO"):
            return []
        watched = self.watched()
        self._prepared &= watched.keys()
        closed = []
        self.is_sending = False
        carried = []
        for inode, fd in watched.items():
            with opened(fd, inode) as found:
                if found is None or found.family not in INTERNET:
                    continue
                if inode not in self._prepared and self._prepare(found):
                    self._prepared |= {inode}
                state, retransmits, num_unacked, silent_ms, num_acked = _info(found)
                end = remote_end(found)
                if end is not None:
                    carried.append(Carried(*end, num_acked))
                if state not in (ESTABLISHED, CLOSE_WAIT) or not num_unacked:
                    continue
                self.is_sending = True
                is_silent = retransmits >= MIN_RETRANSMITS and silent_ms >= SILENT_S * 1e3
                if is_silent and end is not None:
                    closed.append((carried[-1].address, silent_ms / 1e3))
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
                    shut_down(found)
        self.carried = carried if watched else None
        return closed

    def carried_to(self, host: str) -> list[Carried]:
        """Return what was carried over the connections with a host; over all if it is a name."""
        wanted = _packed_host(host)
        return [one for one in self.carried or () if wanted in (b"", one.host)]

    def ends_at(self, host: str) -> tuple[bytes, ...]:
        """Return the local ends of established connections with a host; of all if it is a name."""
        return tuple(
            _packed(found.family, found.getsockname()) for found in self._with(host) if _info(found)[0] == ESTABLISHED
        )

    def abort_to(self, host: str) -> None:
        """Close the connections opened to a host, and drop what they have not sent; all of them if it is a name."""
        for found in self._with(host):
            if found.getsockname()[1] not in self.ports:
                found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
                shut_down(found)

    def _with(self, host: str) -> Iterator[socket.socket]:
        wanted = _packed_host(host)
        for inode, fd in self.watched().items():
            with opened(fd, inode) as found:
                if found is None or found.family not in INTERNET:
                    continue
                end = remote_end(found)
                if end is not None and wanted in (b"", end[0]):
                    yield found

    def _prepare(self, found: socket.socket) -> bool:
        """Turn on keepalive, and note the other end. Return False if there is none yet."""
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        try:
            self.hosts.add(_packed(found.family, found.getpeername())[:-2])
            if found.getsockname()[1] in listening_ports():
                self.ports.add(found.getsockname()[1])
        except OSError:  # not connected yet
            return False
        return True


def find_epolls(make: Callable[[], Made]) -> tuple[Made, tuple[int, ...]]:
    """Create an object of a library, and find the epoll instances that it has created for its sockets.

    Other threads may create some at the same time. Those of Python's and libuv's event loops, and the one of UCX's own
    thread, register each descriptor under its number; those for a library's sockets, under a pointer. Of the empty
    ones, only those count that another instance watches, as UCX's thread does.

    Returns:
        The object, and duplicated descriptors of the instances, owned by the caller; none if the system does not list
        them.
    """
    if sys.platform != "linux":
        return make(), ()
    with _turns.setdefault(os.getpid(), threading.Lock()):
        before = _epolls()
        made = make()
        after = _epolls()
        watched = {number for fd in after for number, _ in _registered_with(fd)}
        found = tuple(copy for fd in sorted(after - before) for copy in _duplicate(fd, is_watched=fd in watched))
    return made, found


@contextmanager
def opened(fd: int, inode: int) -> Iterator[socket.socket | None]:
    """Duplicate a socket's descriptor for the block; None if it is not a socket, or was closed in the meantime."""
    found = None
    try:
        copy = os.dup(fd)
    except OSError:
        yield None
        return
    try:
        if os.fstat(copy).st_ino == inode:
            found = socket.socket(fileno=copy)
    except OSError:  # not a socket
        pass
    if found is None:
        os.close(copy)
        yield None
        return
    with found:
        yield found


def shut_down(found: socket.socket) -> None:
    """Shut a connection down, so that the library closes it when it next makes progress."""
    try:
        found.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        if error.errno != errno.ENOTCONN:  # the connection has already ended
            raise


def remote_end(found: socket.socket) -> Address | None:
    """Return the remote end of a connection; None if there is none, or none yet."""
    try:
        end = _packed(found.family, found.getpeername())
    except OSError:
        return None
    return end[:-2], int.from_bytes(end[-2:], "big")


def _info(found: socket.socket) -> tuple[int, int, int, int, int]:
    """Return the fields of `INFO`; zeros if the kernel does not show them."""
    info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO.size) if hasattr(socket, "TCP_INFO") else b""
    return INFO.unpack(info) if len(info) == INFO.size else (0, 0, 0, 0, 0)


def _packed_host(host: str) -> bytes:
    """Return an address in network byte order; empty if it is a name."""
    try:
        return ipaddress.ip_address(host.strip("[]")).packed.removeprefix(MAPPED)
    except ValueError:
        return b""


def _packed(family: int, address: tuple[str, int]) -> bytes:
    """Return an address in network byte order, and the port in two bytes."""
    host = socket.inet_pton(family, address[0].partition("%")[0]).removeprefix(MAPPED)
    return host + address[1].to_bytes(2, "big")


def _epolls() -> set[int]:
    found = set()
    for entry in DESCRIPTORS.iterdir():
        try:
            if str(entry.readlink()) == EPOLL:
                found.add(int(entry.name))
        except OSError:  # closed in the meantime
            continue
    return found


def _duplicate(fd: int, *, is_watched: bool) -> list[int]:
    """Duplicate the descriptor of an epoll instance, if that is for a library's sockets, and still open."""
    try:
        copy = os.dup(fd)
    except OSError:
        return []
    registered = _registered_with(copy)
    if all(number != data for number, data in registered) and (registered or is_watched):
        return [copy]
    os.close(copy)
    return []


def _registered_with(fd: int) -> list[tuple[int, int]]:
    """Return each descriptor that an epoll instance watches, and the number under which it was registered."""
    try:
        text = (DETAILS / str(fd)).read_text("ascii")
    except OSError:  # closed in the meantime
        return []
    return [(int(number), int(data, 16) & 0xFFFFFFFF) for number, data in REGISTERED.findall(text)]
