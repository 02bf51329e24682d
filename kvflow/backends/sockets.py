"""Bytes on their way to this process from processes of this host that have ended, as the kernel shows them.

The bytes of a process that was killed may wait in the socket buffers of both ends, and the library writes them to
memory when it reads them. The kernel shows how many there are. Since a dead process sends nothing more, a connection is
dry for good once its far end had nothing left to deliver and, later, the near end nothing left to read. Where the end
of the stream has arrived already, the far end does not matter.

It is not known which connections belonged to ended processes, so every connection has to have been dry once. Those of
live processes are dry between two writes.

A process on another host, or in another network namespace, has its end of a connection where it cannot be seen. Two
processes with the same `kernel_domain` see both ends of every connection between them.

Source: Mooncake, commit 0ab6a43, tcp_transport_session_impl.h: bytes for host memory are read from the socket to their
place, those for device memory to a buffer first. UCX 1.23, tcp_ep.c: the same, and a message that was read is handled
before the call that read it returns.
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
"""States of a connection whose far end has not closed it, as far as the near end knows."""

CLOSED_BY_PEER: Final = "08"
"""State of a connection of which only the near end is open. What it has to read ends with the end of file."""

MAPPED: Final = "0000000000000000FFFF0000"
"""How a table of IPv6 begins an address of IPv4."""

Ends = tuple[str, str]


@dataclass(frozen=True)
class Row:
    """One end of a connection.

    Attributes:
        ends: The local address and the remote one.
        num_unsent: Bytes that the other end has not acknowledged.
        num_unread: Bytes that came and were not read; an end of file that was not read counts as one.
        inode: 0 if no process holds it: it was not accepted yet, or its process has ended.
    """

    ends: Ends
    state: str
    num_unsent: int
    num_unread: int
    inode: int


def kernel_domain() -> str:
    """Name the running kernel and this process's part of its network, so that others can compare it with theirs.

    Raises:
        OSError: The kernel does not tell.
    """
    network = NETWORK.stat()
    return f"{BOOT.read_text('ascii').strip()}/{network.st_dev}:{network.st_ino}"


class Connections:
    """The connections that others have to this process now; `are_dry` says whether they can bring nothing more.

    They never are dry if a far end is in another network namespace and has not closed.

    Args:
        of_domain: Take those with processes of the same `kernel_domain`, whoever made the connection, and only those.
            An end of file that was not read does not count: an engine may keep such connections for long.

    Raises:
        OSError: The kernel does not show them.
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
        """Look again, and say whether each of them has been dry since it was first looked at. Takes milliseconds.

        Raises:
            OSError: As above.
        """
        far = {row.ends: row.num_unsent for row in _rows()}
        rows = _rows()  # after the far ends: what those had is here by now
        near = {row.ends: row for row in rows}
        listed = {row.inode for row in rows} | _local_sockets()
        # A connection that was reset is in no table, and may still have bytes to be read.
        unread = any(_num_unread(fd) for inode, fd in _sockets().items() if inode not in listed)
        self._wet = [ends for ends in self._wet if (self._is_wet(near[ends], far) if ends in near else unread)]
        return not self._wet and not unread

    def _is_wet(self, row: Row, far: Mapping[Ends, int]) -> bool:
        return is_wet(row, far, counts_end=self._counts_end)


def is_wet(row: Row, far: Mapping[Ends, int], *, counts_end: bool = True) -> bool:
    """Return whether a near end has something to read, or may still get it, as it may if its far end cannot be seen.

    Args:
        row: The near end.
        far: What is unsent at the far ends that can be seen.
        counts_end: An end of file is something to read.
    """
    num_unread = row.num_unread - (not counts_end and row.state == CLOSED_BY_PEER)
    return num_unread > 0 or (row.state in MAY_BRING_MORE and far.get(row.ends[::-1], 1) > 0)


def listening_ports() -> frozenset[int]:
    """Return the ports at which this process listens.

    Raises:
        OSError: The kernel does not show them.
    """
    sockets = _sockets()
    return frozenset(int(_port(row.ends[0]), 16) for row in _rows() if row.state == LISTENS and row.inode in sockets)


def remote_ends(inodes: Collection[int]) -> dict[int, tuple[bytes, int]]:
    """Find the other ends of connections of this process, also of those that are only being opened.

    Args:
        inodes: Of their sockets.

    Returns:
        Address and port of those that are listed, by inode.

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
    """Turn an address of a table, which has words of 32 bits in the order of this machine, into that of the network."""
    words = [digits[at : at + 8] for at in range(0, len(digits), 8)]
    return b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)


def _local_sockets() -> set[int]:
    """Return the inodes of the Unix sockets of the host."""
    return {int(line.split()[6]) for line in LOCAL_TABLE.read_text("utf-8", "replace").splitlines()[1:]}


def _sockets() -> dict[int, int]:
    """Return the sockets of this process, as inode to file descriptor."""
    sockets = {}
    for descriptor in DESCRIPTORS.iterdir():
        try:
            kind, _, inode = str(descriptor.readlink()).partition(":")
        except FileNotFoundError:  # closed meanwhile
            continue
        if kind == "socket":
            sockets[int(inode.strip("[]"))] = int(descriptor.name)
    return sockets


def _num_unread(fd: int) -> int:
    count = array.array("i", [0])
    try:
        fcntl.ioctl(fd, termios.FIONREAD, count)
    except OSError:  # closed meanwhile, or a kind of socket that counts nothing
        return 0
    return count[0]
