"""Data in flight to this process from ended processes of this host, as shown by the kernel.

The bytes of a killed process may wait in the socket buffers of both ends, and the library writes them to memory when it
reads them. The kernel shows how many there are. A dead process sends nothing more, so a connection is dry for good once
its far end had nothing left to deliver and, later, its near end had nothing left to read. If the end of the stream has
already arrived, the far end does not matter.

It is unknown which of a library's connections belonged to ended processes, so every one of them must have been dry
once. Connections of live processes are dry between two writes. Other sockets of this process do not count: they bring
nothing to the pools, and maybe nobody reads them.

If the other process is on another host or in another network namespace, its end of the connection is not visible. Two
processes with the same `kernel_domain` see both ends of every connection between them.

If the kernel does not show what a function needs, that raises OSError.

Source: Mooncake, commit 0ab6a43, tcp_transport_session_impl.h: bytes for host memory are read from the socket to their
destination, those for device memory to a buffer first. UCX 1.23, tcp_ep.c: the same, and a message that was read is
handled before the call that read it returns. tcp_cm.c: a connection carries writes only after the side that accepted it
has registered it with its epoll instance and answered. Mooncake's may carry some earlier, so those count by their port.
"""

import array
import fcntl
import ipaddress
import os
import socket
import struct
import sys
import termios
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from kvflow.hosts import is_own_address

__all__ = [
    "INTERNET",
    "Connections",
    "Elsewhere",
    "LibraryEnds",
    "Row",
    "address_of",
    "domain_of_host",
    "host_addresses",
    "hosts_of",
    "is_same_kernel",
    "is_wet",
    "kernel_domain",
    "listening_ports",
    "remote_ends",
]

TABLES: Final = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
LOCAL_TABLE: Final = Path("/proc/self/net/unix")
DESCRIPTORS: Final = Path("/proc/self/fd")
BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
NETWORK: Final = Path("/proc/self/ns/net")
FIB: Final = Path("/proc/self/net/fib_trie")
IF_INET6: Final = Path("/proc/self/net/if_inet6")
INTERNET: Final = (socket.AF_INET, socket.AF_INET6)
LISTENS: Final = "0A"
MAY_BRING_MORE: Final = ("01", "03")
"""States of a connection whose far end has not closed it, as far as the near end can tell."""

HALF_CLOSED: Final = ("04", "05")
"""States of a connection that only this end has closed. It brings more only while a process holds it."""

CLOSED_BY_PEER: Final = "08"
"""State of a connection whose far end has closed. What is left to read ends with the end of file: one byte more."""

NETLINK_SOCK_DIAG: Final = 4
SOCK_DIAG_BY_FAMILY: Final = 20
NLM_F_DUMP_REQUEST: Final = 0x301
NLMSG_ERROR: Final = 2
NLMSG_DONE: Final = 3
MAX_ANSWER_BYTES: Final = 65_536
LISTED_STATES: Final = 0x1FFE
"""Those that the tables in `/proc` show: all but sockets that are bound and do nothing yet."""

NETLINK_HEADER: Final = struct.Struct("=IHHII")
SOCK_DIAG_REQUEST: Final = struct.Struct("=BBxxI48x")
SOCK_DIAG_MESSAGE: Final = struct.Struct("=xBxx4s16s16s16xII4xI")
MAPPED: Final = "0000000000000000FFFF0000"
"""Prefix of an IPv4 address in the kernel's table of IPv6 connections."""

MAX_DOMAIN_BYTES: Final = 256
"""As in `Backend.domain`; a host with too many addresses gives none."""

Ends = tuple[str, str]


@dataclass(frozen=True)
class Row:
    """One end of a connection.

    Attributes:
        ends: Local address and remote address.
        num_unsent: Bytes that the other end has not acknowledged.
        num_unread: Bytes received but not read; an unread end of file counts as one.
        inode: 0 if no process holds it, because it has not been accepted yet or its process has ended.
    """

    ends: Ends
    state: str
    num_unsent: int
    num_unread: int
    inode: int


def kernel_domain() -> str:
    """Identify the running kernel and this process's network namespace, for comparison with other processes."""
    network = NETWORK.stat()
    return f"{BOOT.read_text('ascii').strip()}/{network.st_dev}:{network.st_ino}"


@dataclass(frozen=True)
class LibraryEnds:
    """The ends of a library's connections.

    Attributes:
        inodes: Its sockets.
        ports: Ports on which it accepts connections, as far as they are known.
    """

    inodes: frozenset[int]
    ports: frozenset[int]

    def include(self, inode: int, port: int) -> bool:
        """Return whether a socket is one of these, or was accepted for them."""
        return inode in self.inodes or port in self.ports


@dataclass(frozen=True)
class Elsewhere:
    """Connections with processes of another kernel or network namespace.

    Attributes:
        hosts: Only connections with these hosts count; empty for all.
        spared: Remote ends of connections that need not end, see `Backend.ends_to`. They may change.
    """

    hosts: frozenset[bytes] = frozenset()
    spared: Collection[bytes] = ()

    def includes(self, row: Row) -> bool:
        """Return whether a connection counts."""
        return not self.hosts or address_of(_host(row.ends[1])) in self.hosts

    def spares(self, ends: Ends) -> bool:
        """Return whether a connection need not end."""
        return address_of(_host(ends[1])) + _port(ends[1]).to_bytes(2, "big") in self.spared


def domain_of_host() -> bytes:
    """Return this process's `kernel_domain` and the addresses of its host, see `Backend.domain`."""
    hosts = ",".join(sorted(host.hex() for host in host_addresses()))
    domain = f"{kernel_domain()} {hosts}".encode()
    return domain if len(domain) <= MAX_DOMAIN_BYTES else kernel_domain().encode()


def is_same_kernel(domain: bytes, other: bytes) -> bool:
    """Return whether two results of `domain_of_host` are of the same kernel and network namespace."""
    return domain.partition(b" ")[0] == other.partition(b" ")[0]


def hosts_of(domain: bytes) -> frozenset[bytes]:
    """Return the host addresses in a result of `domain_of_host`, which is not trusted; empty if there are none."""
    try:
        return frozenset(bytes.fromhex(host) for host in domain.partition(b" ")[2].decode().split(",") if host)
    except ValueError:
        return frozenset()


def host_addresses() -> frozenset[bytes]:
    """Return the addresses of this host in its network namespace, in network byte order, without loopback."""
    lines = FIB.read_text("ascii").splitlines()
    found = [
        bytes(map(int, before.split()[-1].split("."))) for before, line in pairwise(lines) if "/32 host LOCAL" in line
    ]
    if IF_INET6.exists():
        found += [bytes.fromhex(line.split()[0]) for line in IF_INET6.read_text("ascii").splitlines()]
    return frozenset(address for address in found if address[0] != 127 and address != bytes(15) + b"\1")


class Connections:
    """The current connections of a library with other processes; `are_dry` reports when they can deliver nothing more.

    They never become dry if a far end is in another network namespace and has not closed.

    Args:
        library: Its ends.
        of_domain: Take only connections with processes of the same `kernel_domain`.
        elsewhere: Take only these connections, of those whose far ends cannot be seen.
    """

    def __init__(self, library: LibraryEnds, *, of_domain: bool = False, elsewhere: Elsewhere | None = None) -> None:
        self._library = library
        self._elsewhere = elsewhere
        self._has_unread = False
        rows = _rows()
        mine = [row for row in rows if row.state != LISTENS and library.include(row.inode, _port(row.ends[0]))]
        if elsewhere is not None:
            seen = {row.ends for row in rows}
            mine = [row for row in mine if row.ends[::-1] not in seen and elsewhere.includes(row)]
        elif of_domain:
            own = {host for host in {_host(row.ends[1]) for row in mine} if is_own_address(address_of(host))}
            mine = [row for row in mine if _host(row.ends[1]) in own]
        self._wet = [row.ends for row in mine]

    def are_dry(self) -> bool:
        """Check again, and return whether each connection has been dry since the first check. Takes milliseconds."""
        far = {row.ends: row.num_unsent for row in _rows()}
        rows = _rows()  # read after the far ends, so data that left them has arrived here
        near = {row.ends: row for row in rows}
        listed = {row.inode for row in rows} | _local_sockets()
        # A reset connection is in no table, but may still have bytes to read.
        self._has_unread = any(self._is_unread(fd, inode) for inode, fd in _sockets().items() if inode not in listed)
        self._wet = [ends for ends in self._wet if (is_wet(near[ends], far) if ends in near else self._has_unread)]
        if self._elsewhere is not None:
            self._wet = [ends for ends in self._wet if not self._elsewhere.spares(ends)]
        return not self._wet and not self._has_unread

    def describe_wet(self, maximum: int) -> list[str]:
        """Return up to `maximum` connections that were not dry at the last check, such as "127.0.0.1:80 from ..."."""
        found = [f"{_text(near)} from {_text(far)}" for near, far in self._wet]
        return (found + ["one that was reset"] * self._has_unread)[:maximum]

    def _is_unread(self, fd: int, inode: int) -> bool:
        """Return whether a socket is a TCP connection of the library with bytes to read. Needs no free descriptor."""
        try:
            found = socket.socket(fileno=fd)
        except OSError:  # closed in the meantime
            return False
        try:
            is_connection = found.family in INTERNET and found.type == socket.SOCK_STREAM
            return is_connection and self._library.include(inode, found.getsockname()[1]) and _num_unread(fd) > 0
        except OSError:  # closed in the meantime
            return False
        finally:
            found.detach()  # it is not ours to close


def is_wet(row: Row, far: Mapping[Ends, int]) -> bool:
    """Return whether a near end has data to read, or may still receive some. An unseen far end may always send.

    `far` has the unsent bytes of the visible far ends.
    """
    num_unread = row.num_unread - (row.state == CLOSED_BY_PEER)
    may_bring_more = row.state in MAY_BRING_MORE or (row.state in HALF_CLOSED and row.inode > 0)
    return num_unread > 0 or (may_bring_more and far.get(row.ends[::-1], 1) > 0)


def listening_ports(inodes: Collection[int] | None = None) -> frozenset[int]:
    """Return the ports on which this process listens, or only those of some of its sockets."""
    sockets = _sockets() if inodes is None else inodes
    return frozenset(_port(row.ends[0]) for row in _rows() if row.state == LISTENS and row.inode in sockets)


def remote_ends(inodes: Collection[int]) -> dict[int, tuple[bytes, int]]:
    """Return the remote address and port of connections of this process, also of those being opened, by inode."""
    return {row.inode: (address_of(_host(row.ends[1])), _port(row.ends[1])) for row in _rows() if row.inode in inodes}


def _rows() -> list[Row]:
    try:
        return [row for family in (socket.AF_INET, socket.AF_INET6) for row in _asked_for(family)]
    except OSError:  # the kernel has no sock_diag, or nobody may use it: the tables say the same, forty times slower
        return _listed()


def _asked_for(family: socket.AddressFamily) -> Iterator[Row]:
    """Ask the kernel for the TCP sockets of a family by sock_diag(7)."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG) as kernel:
        request = SOCK_DIAG_REQUEST.pack(family, socket.IPPROTO_TCP, LISTED_STATES)
        header = NETLINK_HEADER.pack(NETLINK_HEADER.size + len(request), SOCK_DIAG_BY_FAMILY, NLM_F_DUMP_REQUEST, 0, 0)
        kernel.sendall(header + request)
        while True:
            answer = memoryview(kernel.recv(MAX_ANSWER_BYTES))
            while answer:
                length, kind, _, _, _ = NETLINK_HEADER.unpack_from(answer)
                body, answer = answer[NETLINK_HEADER.size : length], answer[length + -length % 4 :]
                if kind == NLMSG_DONE:
                    return
                if kind == NLMSG_ERROR:
                    number = -int.from_bytes(body[:4], sys.byteorder, signed=True)
                    raise OSError(number, os.strerror(number))
                yield _answered(family, body)


def _answered(family: socket.AddressFamily, message: memoryview) -> Row:
    state, ports, near, far, unread, unsent, inode = SOCK_DIAG_MESSAGE.unpack_from(message)
    words = 1 if family == socket.AF_INET else 4
    ends = [
        "".join(f"{word:08X}" for word in struct.unpack_from(f"={words}I", address)).removeprefix(MAPPED)
        + f":{int.from_bytes(port, 'big'):04X}"
        for address, port in ((near, ports[:2]), (far, ports[2:]))
    ]
    return Row((ends[0], ends[1]), f"{state:02X}", unsent, unread, inode)


def _listed() -> list[Row]:
    rows = []
    for table in filter(Path.exists, TABLES):
        for line in table.read_text("ascii").splitlines()[1:]:
            fields = line.split()
            unsent, unread = fields[4].split(":")
            ends = (fields[1].removeprefix(MAPPED), fields[2].removeprefix(MAPPED))
            rows.append(Row(ends, fields[3], int(unsent, 16), int(unread, 16), int(fields[9])))
    return rows


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def address_of(digits: str) -> bytes:
    """Convert an address from a kernel table, which has 32-bit words in host byte order, to network byte order."""
    words = [digits[at : at + 8] for at in range(0, len(digits), 8)]
    return b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)


def _text(address: str) -> str:
    return f"{ipaddress.ip_address(address_of(_host(address)))}:{_port(address)}"


def _local_sockets() -> set[int]:
    """Return the inodes of the Unix sockets in this network namespace."""
    return {int(line.split()[6]) for line in LOCAL_TABLE.read_text("utf-8", "replace").splitlines()[1:]}


def _sockets() -> dict[int, int]:
    """Return the sockets of this process: file descriptor by inode."""
    sockets = {}
    for descriptor in DESCRIPTORS.iterdir():
        try:
            kind, _, inode = str(descriptor.readlink()).partition(":")
        except FileNotFoundError:  # closed in the meantime
            continue
        if kind == "socket":
            sockets[int(inode.strip("[]"))] = int(descriptor.name)
    return sockets


def _num_unread(fd: int) -> int:
    count = array.array("i", [0])
    try:
        fcntl.ioctl(fd, termios.FIONREAD, count)
    except OSError:  # closed in the meantime, or a socket type without a count
        return 0
    return count[0]
