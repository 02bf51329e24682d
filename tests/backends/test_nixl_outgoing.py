"""Ownership of the connections in a library's epoll instance, and which of them are shut down."""

import os
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvflow.backends.nixl.outgoing import QUIET_S, RETRY_S, InUse, OutgoingSockets, StaleConnections

pytestmark = pytest.mark.skipif(not hasattr(select, "epoll"), reason="needs Linux")

NEVER = b"", 0


class Library:
    """A fake of UCX: watches descriptors in an epoll instance."""

    def __init__(self, stack: ExitStack, family: socket.AddressFamily = socket.AF_INET) -> None:
        self.stack = stack
        self.family = family
        self.host = "::1" if family == socket.AF_INET6 else "127.0.0.1"
        self.epoll = stack.enter_context(select.epoll())
        self.own = self.listener()
        self.other = self.listener()
        self.sockets = OutgoingSockets([self.epoll.fileno()])
        self.foreign = self.other.getsockname()[:2]

    def listener(self) -> socket.socket:
        found = self.stack.enter_context(socket.socket(self.family))
        found.bind((self.host, 0))
        found.listen(0)
        return found

    def watch(self, found: socket.socket) -> int:
        """Watch a socket, and return its inode."""
        self.epoll.register(found.fileno())
        return os.fstat(found.fileno()).st_ino

    def connect(self, to: socket.socket) -> socket.socket:
        found = self.stack.enter_context(socket.socket(self.family))
        found.setblocking(False)
        found.connect_ex(to.getsockname())
        return found


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6], ids=str)
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    with ExitStack() as stack:
        found = Library(stack, request.param)
        yield found


def is_shut_down(found: socket.socket) -> bool:
    try:
        return found.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:  # the connection was not established yet
        return True


def test_only_what_the_library_has_opened_is_seen(library: Library) -> None:
    """Connections that peers have opened and descriptors that others watch do not count."""
    outgoing = library.connect(library.other)
    library.connect(library.own)
    accepted = library.stack.enter_context(library.own.accept()[0])
    one, other = socket.socketpair()
    reader, writer = os.pipe()
    with one, other, os.fdopen(reader), os.fdopen(writer):
        for found in (accepted, one):
            library.watch(found)
        library.epoll.register(reader)
        assert library.sockets.now() == {}
        inode = library.watch(outgoing)
        address = socket.inet_pton(library.family, library.host), library.foreign[1]
        assert library.sockets.now() == {inode: address}
        assert library.sockets.now() == {inode: address}
    outgoing.close()
    assert library.sockets.now() == {}


def test_a_connection_that_is_only_being_opened_is_seen(library: Library) -> None:
    """The listener's backlog is full."""
    for _ in range(8):
        outgoing = library.connect(library.other)
    with pytest.raises(OSError, match="not connected"):
        outgoing.getpeername()
    inode = library.watch(outgoing)
    assert library.sockets.now() == {inode: (socket.inet_pton(library.family, library.host), library.foreign[1])}


def test_a_descriptor_that_is_another_ones_by_now_is_not_touched(library: Library) -> None:
    """The library has closed it and the number was reused; a duplicate keeps it in the epoll instance."""
    outgoing, innocent = library.connect(library.other), library.connect(library.own)
    inode = library.watch(outgoing)
    assert inode in library.sockets.now()
    kept = library.stack.enter_context(outgoing.dup())
    os.dup2(innocent.fileno(), outgoing.fileno())
    library.sockets.shut_down([inode])
    assert not is_shut_down(innocent)
    assert not is_shut_down(kept)


def left(library: Library, found: socket.socket, **changes: bool) -> tuple[StaleConnections, int]:
    inode = library.watch(found)
    left_open = StaleConnections()
    options = {"is_written": False} | changes
    left_open.add("peer", library.sockets, library.sockets.now(), shut_from=10.0, **options)
    return left_open, inode


def test_what_is_left_is_shut_down_until_it_stays_closed(library: Library) -> None:
    outgoing, innocent = library.connect(library.other), library.connect(library.own)
    left_open, _ = left(library, outgoing)
    library.watch(innocent)
    left_open.shut_connections(9.9, {})
    assert not is_shut_down(outgoing)
    left_open.shut_connections(10.0, {})
    assert is_shut_down(outgoing)
    outgoing.close()
    again = library.connect(library.other)  # as UCX does while nothing answers
    library.watch(again)
    assert not left_open.is_due(10.0)
    left_open.shut_connections(10.0 + RETRY_S, {})
    assert is_shut_down(again)
    assert left_open.peers == {"peer"}
    again.close()
    left_open.shut_connections(11.0, {})
    assert not left_open.peers
    assert left_open.is_due(11.0 + QUIET_S)
    left_open.shut_connections(11.0 + QUIET_S, {})
    assert not left_open.is_due(1e9)
    assert not is_shut_down(innocent)


def test_what_is_in_use_is_left_alone(library: Library) -> None:
    outgoing = library.connect(library.other)
    left_open, inode = left(library, outgoing)
    address = library.sockets.now()[inode]
    for number, used in enumerate((InUse({address}), InUse(set(), {inode}))):
        left_open.shut_connections(20.0 + number, {library.sockets: used})
        assert not is_shut_down(outgoing)
        assert left_open.peers == {"peer"}
    left_open.shut_connections(30.0, {library.sockets: InUse({NEVER}, {0})})
    assert is_shut_down(outgoing)


def test_what_a_peer_writes_over_is_left_alone_until_it_closes_it(library: Library) -> None:
    outgoing = library.connect(library.other)
    left_open, _ = left(library, outgoing, is_written=True)
    assert not left_open.shut_down_of("peer", library.sockets)
    left_open.shut_connections(20.0, {})
    assert not is_shut_down(outgoing)
    outgoing.close()
    left_open.shut_connections(21.0, {})
    assert not left_open.peers


def test_what_a_peer_has_left_is_shut_down_before_it_is_added_anew(library: Library) -> None:
    outgoing = library.connect(library.other)
    left_open, _ = left(library, outgoing)
    assert not left_open.shut_down_of("somebody", library.sockets)
    assert not is_shut_down(outgoing)
    assert left_open.shut_down_of("peer", library.sockets)
    assert is_shut_down(outgoing)


def test_where_nothing_is_seen_nothing_is_left() -> None:
    sockets = OutgoingSockets([])
    left_open = StaleConnections()
    left_open.add("peer", sockets, sockets.now(), shut_from=0.0, is_written=False)
    assert not left_open.peers
    assert not left_open.is_due(1e9)
