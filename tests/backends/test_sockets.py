"""Proofs that nothing from an ended process is in flight any more."""

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from typing_extensions import override

from kvflow.backends import last_bytes, sockets
from kvflow.backends.base import Backend
from kvflow.backends.last_bytes import SocketDrainCheck, choose_elsewhere
from kvflow.backends.library_sockets import LibrarySockets
from kvflow.backends.memory import MemoryBackend
from kvflow.backends.mooncake import MooncakeBackend
from kvflow.backends.nixl import NixlBackend
from kvflow.backends.sockets import Connections, LibraryEnds
from kvflow.hosts import is_own_address
from tests.backends.endpoints import open_backend
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

NUM_BYTES = 300_000
"""More than the reader's buffer holds, so that the rest waits at the sender."""

SENDER = """
import socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.setblocking(False)
sent = 0
try:
    while sent < int(sys.argv[2]):
        sent += connection.send(bytes(int(sys.argv[2]) - sent))
except BlockingIOError:
    pass
print(sent, flush=True)
sys.stdin.read()
"""


class Sender:
    """A process that has written as much as it could, and lives until it is killed."""

    def __init__(self, listener: socket.socket, num_bytes: int) -> None:
        command = [sys.executable, "-c", SENDER, str(listener.getsockname()[1]), str(num_bytes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.num_bytes = int(self._process.stdout.readline())

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def listening(family: socket.AddressFamily = socket.AF_INET) -> Iterator[socket.socket]:
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8_192)
        listener.bind(("127.0.0.1" if family == socket.AF_INET else "::", 0))
        listener.listen()
        yield listener


@contextmanager
def sending(listener: socket.socket, num_bytes: int = NUM_BYTES) -> Iterator[Sender]:
    sender = Sender(listener, num_bytes)
    try:
        yield sender
    finally:
        sender.kill()


@contextmanager
def accept_one(listener: socket.socket) -> Iterator[socket.socket]:
    """Accept the connection of a process that has sent 1,000 bytes and lives."""
    with sending(listener, 1_000) as sender, listener.accept()[0] as connection:
        assert sender.num_bytes == 1_000
        yield connection


def accepted_at(listener: socket.socket) -> LibraryEnds:
    return LibraryEnds(frozenset(), frozenset({listener.getsockname()[1]}))


def read(connection: socket.socket, count: int) -> None:
    while count:
        count -= len(connection.recv(count))


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=str)
async def test_what_a_dead_process_has_sent_is_on_its_way_until_it_is_read(family: socket.AddressFamily) -> None:
    with listening(family) as listener, sending(listener) as sender, listener.accept()[0] as connection:
        sender.kill()
        connections = Connections(accepted_at(listener))
        assert not connections.are_dry()
        read(connection, sender.num_bytes - 1)
        assert not connections.are_dry()
        read(connection, 1)
        assert connection.recv(1) == b""
        await until(connections.are_dry)


async def test_closing_a_connection_is_as_good_as_reading_it() -> None:
    with listening() as listener, sending(listener) as sender:
        with listener.accept()[0]:
            sender.kill()
            connections = Connections(accepted_at(listener))
            assert not connections.are_dry()
        await until(connections.are_dry)


async def test_a_connection_that_nobody_has_accepted_yet_counts() -> None:
    with listening() as listener, sending(listener) as sender:
        sender.kill()
        connections = Connections(accepted_at(listener))
        assert not connections.are_dry()
        with listener.accept()[0] as connection:
            read(connection, sender.num_bytes)
            assert connection.recv(1) == b""
            await until(connections.are_dry)


async def test_a_connection_that_was_reset_counts_while_there_is_something_to_read() -> None:
    """The kernel lists it no more. The dead process had unread data, so the connection was reset."""
    with listening() as listener, sending(listener, 1_000) as sender, listener.accept()[0] as connection:
        connection.send(b"never read")
        sender.kill()
        connections = Connections(accepted_at(listener))
        assert not connections.are_dry()
        read(connection, sender.num_bytes)
        await until(connections.are_dry)


async def test_live_connections_are_dry_between_two_writes() -> None:
    """Being dry once is enough: the check started after the peer's death."""
    with ExitStack() as stack:
        listener = stack.enter_context(listening())
        first, second = [stack.enter_context(accept_one(listener)) for _ in range(2)]
        connections = Connections(accepted_at(listener))
        read(first, 1_000)
        assert not connections.are_dry()
        stack.enter_context(accept_one(listener))  # never read
        read(second, 1_000)
        await until(connections.are_dry)
        assert not Connections(accepted_at(listener)).are_dry()


@pytest.mark.parametrize(
    ("state", "num_unread", "far", "is_wet"),
    [
        ("01", 0, 0, False),
        ("01", 0, 1, True),
        ("01", 0, None, True),  # on another host
        ("01", 1, 0, True),
        ("08", 0, 1, False),  # the end of the stream, which counts as one byte until it is read
        ("08", 0, None, False),
        ("08", 1, None, False),
        ("08", 2, None, True),
        ("06", 0, None, False),
    ],
)
async def test_an_open_connection_counts_if_its_far_end_cannot_be_seen(
    state: str, num_unread: int, far: int | None, is_wet: bool
) -> None:
    near = sockets.Row(("0100007F:0050", "0200007F:9C40"), state, 0, num_unread, 1)
    seen = {} if far is None else {("0200007F:9C40", "0100007F:0050"): far}
    assert sockets.is_wet(near, seen) is is_wet


async def test_connections_that_nobody_closes_do_not_count_once_the_other_side_has() -> None:
    """A library keeps those that it has opened until it writes over them again."""
    with listening() as listener:
        sender = Sender(listener, 1_000)
        with listener.accept()[0] as connection:
            connections = Connections(accepted_at(listener))
            sender.kill()
            assert not connections.are_dry()
            read(connection, 1_000)
            await until(connections.are_dry)
            assert Connections(accepted_at(listener)).are_dry()


async def test_connections_count_whoever_has_made_them() -> None:
    """A library may write over a connection that its peer has opened."""
    with (
        listening() as listener,
        socket.create_connection(listener.getsockname()) as outgoing,
        listener.accept()[0] as accepted,
    ):
        accepted.send(b"never read")
        ends = LibraryEnds(frozenset({os.fstat(outgoing.fileno()).st_ino}), frozenset())
        assert not Connections(ends).are_dry()
        outgoing.recv(100)
        await until(Connections(ends).are_dry)


@contextmanager
def unread_elsewhere() -> Iterator[socket.socket]:
    """Let sockets of this process have bytes that nobody reads: of each kind one, and a connection that was reset.

    Yields:
        The listener that has accepted the connections.
    """
    with (
        listening() as listener,
        accept_one(listener),
        sending(listener, 1_000) as sender,
        listener.accept()[0] as to_reset,
        socket.socket(type=socket.SOCK_DGRAM) as datagrams,
    ):
        to_reset.send(b"never read")
        sender.kill()
        datagrams.bind(("127.0.0.1", 0))
        datagrams.sendto(b"never read", datagrams.getsockname())
        yield listener


async def test_other_sockets_of_this_process_do_not_count() -> None:
    with listening() as listener, accept_one(listener) as connection, unread_elsewhere() as other:
        read(connection, 1_000)
        await until(Connections(accepted_at(listener)).are_dry)
        there = Connections(accepted_at(other))
        assert not there.are_dry()
        port = other.getsockname()[1]
        open_one, reset = there.describe_wet(4)
        assert open_one.startswith(f"127.0.0.1:{port} from 127.0.0.1:")
        assert reset == "one that was reset"
        assert there.describe_wet(1) == [open_one]


@pytest.mark.parametrize(
    ("digits", "is_own"),
    [
        ("0100007F", True),
        ("010200C0", False),  # 192.0.2.1, for documentation
        ("00000000000000000000000001000000", True),
        ("B80D0120000000000000000001000000", False),  # 2001:db8::1
    ],
)
def test_an_address_of_a_table_is_told_from_those_of_other_hosts(digits: str, is_own: bool) -> None:
    if sys.byteorder == "big":
        pytest.skip("the kernel prints words as they are in memory")
    assert is_own_address(sockets.address_of(digits)) is is_own


UNKNOWN_PROTOCOL = 31
"""A netlink protocol that no kernel has."""


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET6, "127.0.0.1")]
)
async def test_the_kernel_answers_what_its_tables_list(
    family: socket.AddressFamily, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows() -> set[sockets.Row]:
        """Return the rows of this test; other processes may use the port of the listener, too, at another address."""
        found = {row for row in sockets._rows() if row.inode == inode or ports_of(row) in connections}
        # A listener sends nothing; sock_diag tells the length of its queue instead.
        return {replace(row, num_unsent=0) if row.state == sockets.LISTENS else row for row in found}

    def asked() -> set[sockets.Row]:
        with monkeypatch.context() as patch:
            patch.setattr(sockets, "TABLES", ())
            return rows()

    def listed() -> set[sockets.Row]:
        with monkeypatch.context() as patch:
            patch.setattr(sockets, "NETLINK_SOCK_DIAG", UNKNOWN_PROTOCOL)
            return rows()

    def ports_of(row: sockets.Row) -> set[int]:
        return {int(end.rpartition(":")[2], 16) for end in row.ends}

    with listening(family) as listener, ExitStack() as opened:
        port = listener.getsockname()[1]
        far, half_closed, unaccepted, ended = (
            opened.enter_context(socket.create_connection((host, port))) for _ in range(4)
        )
        inode = os.fstat(listener.fileno()).st_ino
        connections = [{port, one.getsockname()[1]} for one in (far, half_closed, unaccepted, ended)]
        _near, _other = (opened.enter_context(listener.accept()[0]) for _ in range(2))
        far.sendall(b"unread")
        half_closed.shutdown(socket.SHUT_WR)
        unaccepted.sendall(bytes(NUM_BYTES))
        ended.close()
        await until(lambda: asked() == listed())
        found = asked()
    assert len(found) == 9
    assert {row.state for row in found} == {sockets.LISTENS, "01", "05", "08"}
    assert {6, 1} <= {row.num_unread for row in found}
    assert any(row.num_unsent for row in found)


FAR_ENDS = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 02024D0A:4038 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 11 1 0 100 0 0 10 0
   1: 02024D0A:4038 02014D0A:8BA8 01 00000000:00000000 00:00000000 00000000     0        0 12 1 0 20 4 30 10 -1
   2: 02024D0A:4038 02014D0A:9300 01 00000000:00000000 00:00000000 00000000     0        0 13 1 0 20 4 30 10 -1
   3: 02024D0A:4038 02034D0A:9300 01 00000000:00000000 00:00000000 00000000     0        0 14 1 0 20 4 30 10 -1
"""
"""A kernel's table of idle connections with two processes on 10.77.1.2, and with one on another host."""


def test_connections_with_another_host_need_not_end_once_a_living_process_lists_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    table = tmp_path / "tcp"
    table.write_text(FAR_ENDS)
    monkeypatch.setattr(sockets, "TABLES", (table,))
    monkeypatch.setattr(sockets, "NETLINK_SOCK_DIAG", UNKNOWN_PROTOCOL)
    spared: set[bytes] = set()
    host = socket.inet_aton("10.77.1.2")
    library: Any = SimpleNamespace(hosts={host})
    elsewhere = choose_elsewhere([library], domain=b"kernel " + host.hex().encode(), spared=spared)
    ends = LibraryEnds(frozenset(), frozenset({0x4038}))
    assert Connections(ends, of_domain=True).are_dry(), "none is with this host"
    connections = Connections(ends, elsewhere=elsewhere)
    assert not connections.are_dry()
    spared.add(host + 0x8BA8.to_bytes(2, "big"))
    assert not connections.are_dry()
    table.write_text(FAR_ENDS.replace("9300 01", "9300 08"))  # closed by the far end, and read
    assert connections.are_dry()


@pytest.mark.parametrize("made", [MooncakeBackend, NixlBackend])
async def test_a_transport_does_not_wait_for_other_sockets_of_its_process(made: Callable[[], Backend]) -> None:
    with unread_elsewhere():
        assert await outlast(made())


async def test_the_port_of_a_mooncake_engine_is_known_before_anybody_connects() -> None:
    """A connection that it has just accepted may bring bytes before its socket is known."""
    backend = MooncakeBackend()
    async with open_backend(backend):
        ends = await backend._call(lambda agent: last_bytes.ends_of(agent.look_at_sockets()))
        assert ends.ports
        assert ends.ports <= sockets.listening_ports()
        assert last_bytes.accepted_ends(ends) == LibraryEnds(frozenset(), ends.ports)
    with pytest.raises(OSError, match="port"):
        last_bytes.accepted_ends(LibraryEnds(ends.inodes, frozenset()))


async def outlast(backend: Backend, domain: bytes | None = None) -> bool:
    async with open_backend(backend):
        return await backend.outlast(backend.domain() if domain is None else domain)


async def test_a_transport_that_can_see_it_says_so_when_nothing_lands_any_more() -> None:
    assert await outlast(MooncakeBackend())
    assert await outlast(MemoryBackend())
    assert await outlast(NixlBackend())
    assert not await outlast(NixlBackend(), b"")
    assert await outlast(NixlBackend(), b"another kernel")  # there are no connections with it
    assert await outlast(NixlBackend(ends_with_process=True), b"another kernel")


@pytest.mark.parametrize("made", [MooncakeBackend, NixlBackend])
async def test_connections_that_cannot_be_listed_for_want_of_a_descriptor_may_still_bring_bytes(
    made: Callable[[], Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, refused, answers = LibrarySockets.listed, list[int](), list[bool]()
    is_short = True

    def listed(self: LibrarySockets) -> dict[int, int]:
        if is_short:
            refused.append(errno.EMFILE)
            raise OSError(errno.EMFILE, "no descriptor is free")
        return original(self)

    async def ask() -> None:
        answers.append(await backend.outlast(b"another kernel"))

    backend = made()
    async with open_backend(backend), anyio.create_task_group() as tasks:
        monkeypatch.setattr(LibrarySockets, "listed", listed)
        refused.clear()
        tasks.start_soon(ask)
        await until(lambda: len(refused) >= 8)
        assert not answers
        is_short = False
    assert answers == [True]


class Looks:
    """Fakes of `Connections`: the first `num_dry` instances are dry."""

    def __init__(self) -> None:
        self.made: list[Looks.One] = []
        self.num_dry = 0

    class One(Connections):
        """One of them."""

        def __init__(self, number: int, looks: "Looks") -> None:
            self._number, self._looks = number, looks

        @override
        def are_dry(self) -> bool:
            return self._number < self._looks.num_dry

        @override
        def describe_wet(self, maximum: int) -> list[str]:
            return [f"one of {maximum}"]

    async def list_connections(self) -> Connections:
        self.made.append(self.One(len(self.made), self))
        return self.made[-1]


async def test_one_look_at_the_connections_answers_everybody_who_has_asked() -> None:
    """Otherwise a rank whose peers keep their connections open would check once for each peer that dies."""
    looks = Looks()
    dry, answers = SocketDrainCheck("test", looks.list_connections), list[int]()

    async def ask(number: int) -> None:
        await dry.wait()
        answers.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(ask, number)
        await until(lambda: len(looks.made) == 1)
        tasks.start_soon(ask, 3)
        await until(lambda: len(looks.made) == 2)
        assert answers == []
        looks.num_dry = 2
    assert sorted(answers) == [0, 1, 2, 3]
    assert len(looks.made) == 2


async def test_somebody_who_gives_up_waiting_leaves_it_to_the_others() -> None:
    looks = Looks()
    dry = SocketDrainCheck("test", looks.list_connections)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(dry.wait)
            await until(lambda: len(looks.made) == 1)
            scope.cancel()
    looks.num_dry = 10
    await dry.wait()


async def test_connections_that_do_not_become_empty_are_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(last_bytes, "AWAITED_S", 0.0)
    looks = Looks()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(SocketDrainCheck("test", looks.list_connections).wait)
        await until(lambda: caplog.records)
        looks.num_dry = 1
    [record] = caplog.records
    assert "last_bytes_awaited" in record.getMessage()
    assert "one of 4" in record.getMessage()


async def test_a_shortage_of_descriptors_is_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing about the connections."""
    answers = iter([OSError(errno.EMFILE, "none"), OSError(errno.ENFILE, "none"), None])
    looks = Looks()
    looks.num_dry = 1
    look = Looks.One.are_dry

    def short(one: Looks.One) -> bool:
        if (error := next(answers)) is not None:
            raise error
        return look(one)

    monkeypatch.setattr(Looks.One, "are_dry", short)
    await SocketDrainCheck("test", looks.list_connections).wait()
    assert next(answers, "all were used") == "all were used"
