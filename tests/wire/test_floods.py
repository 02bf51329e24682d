"""Peers that send too much at once lose their connection, and nobody else does; on real sockets."""

import anyio
import pytest

from kvflow.wire.codec import MAX_REQUEST_BYTES
from tests.support.waiting import until
from tests.support.zmtp import MORE, RawZmtp, frame
from tests.wire.ends import Client, Server

pytestmark = pytest.mark.anyio


async def flood(endpoint: str, data: bytes) -> int:
    """Send the same again and again until the connection is broken; give the number of bytes."""
    sent = 0
    with RawZmtp(endpoint) as raw:
        while await anyio.to_thread.run_sync(raw.send, data):
            sent += len(data)
            assert sent < 2**30
    return sent


async def still_served(server: Server) -> None:
    client = Client(server.endpoint)
    client.send(b"honest")
    assert (await server.receive())[1] == [b"honest"]
    client.close()


@pytest.mark.parametrize("part", [bytes(65_536), b""], ids=["large", "empty"])
async def test_a_message_that_never_ends_costs_its_sender_the_connection(part: bytes) -> None:
    server = Server()
    await flood(server.endpoint, frame(part, MORE) * (2**20 // (len(part) + 2)))
    await until(lambda: server.kinds == ["connection_cut"])
    assert server.received == []
    await still_served(server)
    server.close()


async def test_a_message_of_many_parts_is_cut_short_and_so_is_its_connection() -> None:
    server = Server()
    with RawZmtp(server.endpoint) as raw:
        raw.send(frame(b"x", MORE) * 10_000 + frame(b"end"))
        _, parts = await server.receive()
        assert parts == [b"x", b"x"]
        await until(lambda: server.kinds)
        await still_served(server)
    server.close()


async def test_a_frame_that_is_too_large_costs_its_sender_the_connection() -> None:
    server = Server()
    with RawZmtp(server.endpoint) as raw:
        raw.send(frame(bytes(MAX_REQUEST_BYTES + 1))[:100])
        assert await anyio.to_thread.run_sync(hung_up, raw)
    await still_served(server)
    server.close()


def hung_up(raw: RawZmtp) -> bool:
    while raw.line.recv(4096):
        pass
    return True


async def test_who_sends_much_in_messages_that_end_keeps_the_connection() -> None:
    server = Server()
    client = Client(server.endpoint)
    for number in range(60):
        client.send(bytes([number]) * 2**20)
        await server.receive()
        await anyio.sleep(0.01)
    client.send(b"end")
    assert (await server.receive())[1] == [b"end"]
    assert (client.num_lost, server.kinds) == (0, [])
    client.close()
    server.close()
