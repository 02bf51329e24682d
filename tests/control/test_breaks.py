"""Listeners that start late or return, and a network that breaks."""

import socket
from contextlib import closing
from typing import Final

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream, TaskStatus

from kvflow.control import sockets
from kvflow.control.sockets import HEARTBEAT_MS, SILENCE_MS
from kvflow.errors import ConfigError, Unreachable
from kvflow.gate.connections import MAX_SILENCE_MS
from tests.control.ends import LOCAL, Client, Server, meet
from tests.support.waiting import until
from tests.support.zmtp import COMMAND, RawZmtp, frame

pytestmark = pytest.mark.anyio

RECOVERED_S: Final = 10.0
"""Promised limit of the recovery time; without heartbeats there would be no recovery."""

PING: Final = frame(b"\x04PING" + (SILENCE_MS // 100).to_bytes(2), COMMAND)
"""A heartbeat of a dialer."""

APART: Final = "127.7.7.7"
"""A loopback address that no other connection uses: a port stays free between two servers."""


async def bind_again(endpoint: str) -> Server:
    """Listen at the endpoint of a closed server, whose socket is released in the background."""
    opened: list[Server] = []

    def bind() -> bool:
        try:
            opened.append(Server(endpoint))
        except ConfigError:
            return False
        return True

    await until(bind)
    return opened[0]


def free_endpoint() -> str:
    """Return an endpoint without a listener; a recently closed server would still accept messages."""
    with socket.socket() as held:
        held.bind((APART, 0))
        return f"tcp://{APART}:{held.getsockname()[1]}"


def is_answered(endpoint: str) -> bool:
    """Return whether an endpoint still accepts connections, as a closed server does for a moment."""
    host, port = endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=0.2) as line:
        try:
            return line.recv(1) != b""
        except TimeoutError:
            return False
        except ConnectionResetError:
            return True


async def test_client_may_be_first() -> None:
    endpoint = free_endpoint()
    with closing(Client(endpoint)) as client:
        client.send(b"early")
        with closing(Server(endpoint)) as server:
            name, frames = await server.receive()
            assert frames == [b"early"]
            server.send(name, b"late")
            assert await client.receive() == [b"late"]


async def test_client_keeps_its_name_when_the_server_is_restarted() -> None:
    first = Server(f"tcp://{APART}:0")
    with closing(Client(first.endpoint)) as client:
        name = await meet(first, client)
        first.close()
        with closing(await bind_again(first.endpoint)) as second:
            assert await meet_again(second, client) == name
            assert client.num_lost == 1  # once, not for each attempt to connect


async def test_a_client_of_a_port_that_is_kept_finds_who_binds_it_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody accepts at the kept port: each attempt fails in ZMQ's handshake, and does not count as a break."""
    monkeypatch.setattr(sockets, "HANDSHAKE_MS", 100)
    first = Server(f"tcp://{APART}:0")
    first.close(keep_port=True)
    await until(lambda: not is_answered(first.endpoint))
    with closing(Client(first.endpoint)) as client:
        client.send(b"early")
        await anyio.sleep(0.5)
        assert (client.received, client.num_lost) == ([], 0)
        with pytest.raises(ConfigError, match="cannot be bound") as caught:
            Server(first.endpoint)
        assert "in use" in str(caught.value.values["detail"])
        sockets.ports.close(first.listener._port_fd)  # as the exit of the process does
        with closing(await bind_again(first.endpoint)) as second:
            name, frames = await second.receive()
            assert frames == [b"early"]
            second.send(name, b"late")
            assert await client.receive() == [b"late"]
            assert client.num_lost == 0


async def meet_again(server: Server, client: Client) -> bytes:
    """Send until a message arrives: messages in flight at the break are lost."""
    received: list[bytes] = []

    async def receive() -> None:
        name, _ = await server.receive()
        received.append(name)

    def try_again() -> bool:
        client.send(b"again")
        return bool(received)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receive)
        await until(try_again)
    return received[0]


class Cable:
    """A relay between a client and a server whose connections can be cut; new ones work at once."""

    def __init__(self, endpoint: str) -> None:
        self._port = int(endpoint.rpartition(":")[2])
        self._streams: list[SocketStream] = []
        self._swallowed: set[SocketStream] = set()

    async def run(self, *, task_status: TaskStatus[str]) -> None:
        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as plug:
            task_status.started(f"tcp://127.0.0.1:{plug.extra(SocketAttribute.local_port)}")  # noqa: S610 - no Django
            await plug.serve(self._connect)

    async def cut(self) -> None:
        streams, self._streams = self._streams, []
        for stream in streams:
            await stream.aclose()

    def swallow(self) -> None:
        """Discard everything that the current connections carry, without closing them: they are half open."""
        self._swallowed.update(self._streams)

    async def _connect(self, near: SocketStream) -> None:
        async with near, await anyio.connect_tcp("127.0.0.1", self._port) as far, anyio.create_task_group() as tasks:
            self._streams += [near, far]
            tasks.start_soon(self._copy, near, far)
            tasks.start_soon(self._copy, far, near)

    async def _copy(self, source: SocketStream, target: SocketStream) -> None:
        try:
            async for data in source:
                if source not in self._swallowed:
                    await target.send(data)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            await target.aclose()


async def test_name_and_connection_survive_a_break_of_the_network() -> None:
    async with anyio.create_task_group() as tasks:
        with closing(Server(LOCAL)) as server:
            cable = Cable(server.endpoint)
            endpoint: str = await tasks.start(cable.run)
            with closing(Client(endpoint)) as client:
                name = await meet(server, client)
                await cable.cut()
                assert await meet_again(server, client) == name
                server.send(name, b"still you")
                assert await client.receive() == [b"still you"]
        tasks.cancel_scope.cancel()


async def test_half_open_connection_is_replaced() -> None:
    """A middlebox has lost the state of a connection: it passes nothing any more, and neither end closes it."""
    async with anyio.create_task_group() as tasks:
        with closing(Server(LOCAL)) as server:
            cable = Cable(server.endpoint)
            endpoint: str = await tasks.start(cable.run)
            with closing(Client(endpoint)) as client:
                name = await meet(server, client)
                cable.swallow()
                with anyio.fail_after(RECOVERED_S):
                    await until(lambda: client.num_lost)
                    assert await meet_again(server, client) == name
                    server.send(name, b"still you")
                    assert await client.receive() == [b"still you"]
                assert client.num_lost == 1
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("last", [frame(b"hello"), frame(b"hello") + PING], ids=["a message", "a heartbeat"])
async def test_a_client_that_falls_silent_is_disconnected(last: bytes) -> None:
    """Its process was stopped, or its host is gone: it sends nothing any more, and does not close the connection."""
    with closing(Server()) as server, RawZmtp(server.endpoint) as raw:
        raw.send(PING + last)
        name, _ = await server.receive()

        def is_gone() -> bool:
            try:
                server.send(name, b"")
            except Unreachable:
                return True
            return False

        assert not is_gone()
        with anyio.fail_after(RECOVERED_S):
            await until(is_gone)
        assert server.kinds == []


async def test_a_client_that_sends_nothing_but_heartbeats_stays_connected() -> None:
    with closing(Server()) as server, RawZmtp(server.endpoint) as raw:
        raw.send(frame(b"hello"))
        name, _ = await server.receive()
        for _ in range(2 * MAX_SILENCE_MS // HEARTBEAT_MS):
            await anyio.sleep(HEARTBEAT_MS / 1e3)
            assert raw.send(PING)
        server.send(name, b"")
