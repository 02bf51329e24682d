"""Peers that do not read lose their connection, and no other peer does; on real sockets."""

import socket
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import Final

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from kvflow.errors import Unreachable
from kvflow.gate import connections
from kvflow.trust import PLAIN, ClientKeys
from tests.control.ends import Client, Server, meet
from tests.support.trusts import new_trust, trusting
from tests.support.waiting import until
from tests.support.zmtp import RawZmtp, frame

pytestmark = pytest.mark.anyio

MIB: Final = 2**20
LIMIT: Final = 4 * MIB
ENOUGH: Final = 14
"""MiB: more than the limit and the kernel's buffers together."""


class Silent(RawZmtp):
    """A connection that sends a hello to a server, and then reads nothing."""

    send_to: Callable[[bytes], None]

    @classmethod
    async def to(cls, server: Server) -> "Silent":
        line = socket.socket()
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        host, port = server.endpoint.removeprefix("tcp://").split(":")
        line.connect((host, int(port)))
        self = await anyio.to_thread.run_sync(cls, line)
        self.send(frame(b"hello"))
        name, _ = await server.receive()
        self.send_to = partial(server.send, name)
        return self


async def fill(mib: int, *sends: Callable[[bytes], None]) -> None:
    """Send `mib` MiB over each connection."""
    for _ in range(mib):
        for send in sends:
            send(bytes(MIB))
            await anyio.lowlevel.checkpoint()


async def test_who_takes_nothing_loses_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_UNSENT_BYTES", LIMIT)
    with closing(Server()) as server, await Silent.to(server) as silent, closing(Client(server.endpoint)) as honest:
        name = await meet(server, honest)
        with pytest.raises(Unreachable, match="queue to the peer is full"):
            await fill(ENOUGH, silent.send_to)
        assert server.kinds == ["connection_cut"]
        assert "waiting to be sent" in server.refused[0]
        server.send(name, b"still there")
        assert await honest.receive() == [b"still there"]
        with pytest.raises(Unreachable):
            await fill(1, silent.send_to)
        assert honest.num_lost == 0


@pytest.mark.parametrize("with_keys", [False, True])
async def test_who_takes_it_may_be_sent_much_more(monkeypatch: pytest.MonkeyPatch, with_keys: bool) -> None:
    monkeypatch.setattr(connections, "MAX_UNSENT_BYTES", MIB)
    monkeypatch.setattr(connections, "MAX_UNSENT_IN_ALL_BYTES", MIB)
    own, other = new_trust(), new_trust()
    trust, keys = (trusting(own, client=other), ClientKeys(other, (own.public,))) if with_keys else (PLAIN, None)
    with closing(Server(trust=trust)) as server, closing(Client(server.endpoint, keys)) as client:
        name = await meet(server, client)
        for size in (100_000, 1, 255, 256, 600_000) * 8:
            server.send(name, bytes(size))
            client.send(bytes(size))
            await client.receive()
            await server.receive()
        assert (server.kinds, client.refused, client.num_lost) == ([], [], 0)


async def test_of_many_who_take_nothing_those_with_most_lose_their_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_UNSENT_IN_ALL_BYTES", 40 * MIB)
    with closing(Server()) as server, ExitStack() as stack:
        few, *most = [stack.enter_context(await Silent.to(server)) for _ in range(3)]
        await fill(8, few.send_to)
        with pytest.raises(Unreachable):
            await fill(80, *(one.send_to for one in most))
        assert set(server.kinds) == {"connection_cut"}
        await fill(1, few.send_to)


async def test_a_listener_that_takes_nothing_loses_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_UNSENT_BYTES", LIMIT)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        with closing(Client(f"tcp://127.0.0.1:{listener.getsockname()[1]}")) as client:
            with await anyio.to_thread.run_sync(RawZmtp.accepted, listener) as silent:
                silent.send(frame(b"hello"))
                await client.receive()
                with pytest.raises(Unreachable, match="queue to the peer is full"):
                    await fill(ENOUGH, client.send)
                await until(lambda: client.num_lost)
            assert "waiting to be sent" in client.refused[0]
