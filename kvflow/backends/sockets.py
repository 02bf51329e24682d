"""Data in flight to this process from ended processes of this host, as shown by the kernel.

The bytes of a killed process may wait in the socket buffers of both ends, and the library writes them to memory when it
reads them. The kernel shows how many there are. A dead process sends nothing more, so a connection is dry for good once
its far end had nothing left to deliver and, later, its near end had nothing left to read. If the end of the stream has
already arrived, the far end does not matter.

It is unknown which connections belonged to ended processes, so every connection must have been dry once. Connections of
live processes are dry between two writes.

If the other process is on another host or in another network namespace, its end of the connection is not visible. Two
processes with the same `kernel_domain` see both ends of every connection between them.

Source: Mooncake, commit 0ab6a43, tcp_transport_session_impl.h: bytes for host memory are read from the socket to their
destination, those for device memory to a buffer first. UCX 1.23, tcp_ep.c: the same, and a message that was read is
handled before the call that read it returns.
"""

import array
import fcntl
import sys
import termios
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvflow.wire.hosts import is_own_address

__all__ = ["Connections", "Row", "address_of", "is_wet", "kernel_domain", "listening_ports", "remote_ends"]

TABLES: Final = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
LOCAL_TABLE: Final = Path("/proc/self/net/unix")
DESCRIPTORS: Final = Path("/proc/self/fd")
BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
NETWORK: Final = Path("/proc/self/ns/net")
LISTENS: Final = "0A"
MAY_BRING_MORE: Final = ("01", "03")
"""States of a connection whose far end has not closed it, as far as the near end can tell."""

CLOSED_BY_PEER: Final = "08"
"""State of a connection whose far end has closed. The data left to read ends with the end of file."""

MAPPED: Final = "0000000000000000FFFF0000"
"""Prefix of an IPv4 address in the kernel's table of IPv6 connections."""

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
    """Identify the running kernel and this process's network namespace, for comparison with other processes.

    Raises:
        OSError: The kernel does not show them.
    """
    network = NETWORK.stat()
    return f"{BOOT.read_text('ascii').strip()}/{network.st_dev}:{network.st_ino}"


class Connections:
    """The current connections from other processes; `are_dry` reports when they can deliver nothing more.

    They never become dry if a far end is in another network namespace and has not closed.

    Args:
        of_domain: Take only connections with processes of the same `kernel_domain`, whichever side opened them. Unread
            ends of file are then ignored, because an engine may keep such connections for long.

    Raises:
        OSError: The kernel does not show the connections.
    """

    def __init__(self, *, of_domain: bool = False) -> None:
        rows, sockets = _rows(), _sockets()
        ports = {_port(row.ends[0]) for row in rows if row.state == LISTENS and row.inode in sockets}
        mine = [
            row.ends
            for row in rows
            if row.state != LISTENS and (_port(row.ends[0]) in ports or (of_domain and row.inode in sockets))
        ]
        if of_domain:
            own = {host for host in {_host(far) for _, far in mine} if is_own_address(address_of(host))}
            mine = [ends for ends in mine if _host(ends[1]) in own]
        self._wet = mine
        self._counts_end = not of_domain

    def are_dry(self) -> bool:
        """Check again, and return whether each connection has been dry since the first check. Takes milliseconds.

        Raises:
            OSError: As above.
        """
        far = {row.ends: row.num_unsent for row in _rows()}
        rows = _rows()  # read after the far ends, so data that left them has arrived here
        near = {row.ends: row for row in rows}
        listed = {row.inode for row in rows} | _local_sockets()
        # A reset connection is in no table, but may still have bytes to read.
        unread = any(_num_unread(fd) for inode, fd in _sockets().items() if inode not in listed)
        self._wet = [ends for ends in self._wet if (self._is_wet(near[ends], far) if ends in near else unread)]
        return not self._wet and not unread

    def _is_wet(self, row: Row, far: Mapping[Ends, int]) -> bool:
        return is_wet(row, far, counts_end=self._counts_end)


def is_wet(row: Row, far: Mapping[Ends, int], *, counts_end: bool = True) -> bool:
    """Return whether a near end has data to read, or may still receive some. An unseen far end may always send.

    Args:
        row: The near end.
        far: Unsent bytes of the visible far ends.
        counts_end: Count an end of file as data to read.
    """
    num_unread = row.num_unread - (not counts_end and row.state == CLOSED_BY_PEER)
    return num_unread > 0 or (row.state in MAY_BRING_MORE and far.get(row.ends[::-1], 1) > 0)


def listening_ports() -> frozenset[int]:
    """Return the ports on which this process listens.

    Raises:
        OSError: The kernel does not show them.
    """
    sockets = _sockets()
    return frozenset(int(_port(row.ends[0]), 16) for row in _rows() if row.state == LISTENS and row.inode in sockets)


def remote_ends(inodes: Collection[int]) -> dict[int, tuple[bytes, int]]:
    """Return the remote ends of connections of this process, including those being opened.

    Args:
        inodes: Inodes of their sockets.

    Returns:
        Address and port of the listed connections, by inode.

    Raises:
        OSError: The kernel does not show them.
    """
    return {
        row.inode: (address_of(_host(row.ends[1])), int(_port(row.ends[1]), 16))
        for row in _rows()
        if row.inode in inodes
    }


def _rows() -> list[Row]:
    rows = []
    for table in TABLES:
        if table.exists():
            lines = table.read_text("ascii").splitlines()[1:]
            rows += [_row(line.split()) for line in lines]
    return rows


def _row(fields: list[str]) -> Row:
    unsent, unread = fields[4].split(":")
    ends = (fields[1].removeprefix(MAPPED), fields[2].removeprefix(MAPPED))
    return Row(ends, fields[3], int(unsent, 16), int(unread, 16), int(fields[9]))


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def address_of(digits: str) -> bytes:
    """Convert an address from a kernel table, which has 32-bit words in host byte order, to network byte order."""
    words = [digits[at : at + 8] for at in range(0, len(digits), 8)]
    return b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)


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
