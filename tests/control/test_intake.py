"""Peers that send too much at once lose their connection, and no other peer does; on real sockets."""

import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing, suppress
from typing import Final

import anyio
import pytest
import zmq

from kvflow.control import channel, intake
from kvflow.control.intake import CONNECTION_CHECK_S, Intake
from kvflow.control.sockets import HEARTBEAT_MS, SILENCE_MS
from kvflow.gate.connections import MAX_ANSWERS_BYTES, MAX_WAITING_BYTES, MUCH_BYTES
from kvflow.gate.sizes import MAX_REQUEST_BYTES
from kvflow.trust import PLAIN, ClientKeys, Trust
from tests.control.ends import Client, Server
from tests.support.trusts import new_trust, trusting
from tests.support.waiting import POLL_S, until
from tests.support.zmtp import MORE, RawZmtp, frame

pytestmark = pytest.mark.anyio


async def flood(endpoint: str, data: bytes) -> int:
    """Send the same data repeatedly until the connection breaks; return the number of bytes sent."""
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


def trusts() -> tuple[Trust, Trust]:
    server, client = new_trust(), new_trust()
    return trusting(server, client=client), trusting(client, server=server)


@pytest.mark.parametrize("with_keys", [False, True], ids=["plain", "keys"])
async def test_what_was_taken_waits_no_longer(with_keys: bool) -> None:
    """The accounting is exact for any size: one byte of error per message would exceed the limit."""
    server_trust, client_trust = trusts() if with_keys else (PLAIN, PLAIN)
    keys = ClientKeys(client_trust, (server_trust.public,)) if with_keys else None
    with closing(Server(trust=server_trust)) as server, closing(Client(server.endpoint, keys)) as client:
        client.send(b"first")
        name, _ = await server.receive()
        for size in (1, 220, 221, 222, 223, 255, 256, 10_000) * 500:
            client.send(bytes(size))
            server.send(name, bytes(size))
        await until(lambda: len(server.received) == len(client.received) == 4_000)
        assert client.connection._line is not None
        for own in (server.listener._intake, client.connection._line._intake):
            own.unread._most = own.unread._most_in_all = 2_000
        await anyio.sleep(2 * CONNECTION_CHECK_S)
        assert (client.num_lost, server.kinds, client.refused) == (0, [], [])


def take_nothing(_: Intake) -> list[zmq.Frame]:
    raise zmq.Again


def send_mib(raw: RawZmtp, count: int) -> None:
    for _ in range(16 * count):
        raw.send(frame(bytes(65_536)))


@pytest.mark.parametrize("at_once", [1, intake.LOOKED_AT_ONCE])
async def test_who_sends_more_than_is_taken_loses_the_connection(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(Intake, "receive", take_nothing)
    monkeypatch.setattr(intake, "LOOKED_AT_ONCE", at_once)
    with closing(Server()) as server, RawZmtp(server.endpoint) as fast, RawZmtp(server.endpoint) as slow:
        await anyio.to_thread.run_sync(send_mib, slow, 12)
        await anyio.to_thread.run_sync(send_mib, fast, 20)
        await until(lambda: server.kinds)
        assert int(server.refused[0].split()[0]) > MAX_WAITING_BYTES
        assert await anyio.to_thread.run_sync(hung_up, fast)
        await anyio.to_thread.run_sync(send_mib, slow, 1)
        assert server.kinds == ["connection_cut"]


async def test_of_many_who_send_those_that_send_most_lose_their_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Intake, "receive", take_nothing)
    with closing(Server()) as server, ExitStack() as stack:
        raws = [stack.enter_context(RawZmtp(server.endpoint)) for _ in range(9)]
        sizes = (4, 5, 6, 7, 8, 9, 10, 13, 15)
        for raw, size in zip(raws, sizes, strict=True):
            await anyio.to_thread.run_sync(send_mib, raw, size)
        await until(lambda: server.kinds)
        assert server.kinds == ["connection_cut"]  # 62 of 77 MiB are left
        assert await anyio.to_thread.run_sync(hung_up, raws[-1])


async def test_what_waits_of_a_broken_connection_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Server()) as server, RawZmtp(server.endpoint) as raw:
        with monkeypatch.context() as patched:
            patched.setattr(Intake, "receive", take_nothing)
            await anyio.to_thread.run_sync(send_mib, raw, 20)
            await until(lambda: server.kinds)
        await still_served(server)


def take_while_the_event_loop_stands_still(server: Server) -> None:
    while not server.received:
        server.listener._inbox.read_messages()
        time.sleep(POLL_S)


async def test_who_connects_after_one_was_cut_is_heard_from_the_first_message_on() -> None:
    """Its connection reuses the descriptor of the broken one, and messages are read before connection events."""
    with closing(Server()) as server:
        with RawZmtp(server.endpoint) as raw:
            raw.send(frame(b"x", MORE) * 3 + frame(b"end"))
            await server.receive()
            await until(lambda: server.kinds)
            assert await anyio.to_thread.run_sync(hung_up, raw)
        with RawZmtp(server.endpoint) as honest:
            honest.send(frame(b"hello"))
            take_while_the_event_loop_stands_still(server)
            assert (await server.receive())[1] == [b"hello"]


async def test_a_listener_that_sends_more_than_is_taken_loses_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Intake, "receive", take_nothing)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        closing(Client(f"tcp://127.0.0.1:{listener.getsockname()[1]}")) as client,
        await anyio.to_thread.run_sync(RawZmtp.accepted, listener) as raw,
    ):
        await anyio.to_thread.run_sync(send_mib, raw, 140)
        while not client.refused:
            raw.send(frame(b"still here"))
            await anyio.sleep(SILENCE_MS / 4e3)
        assert int(client.refused[0].split()[3]) > MAX_ANSWERS_BYTES


BUSY: Final = """
import asyncio, sys
from kvflow.control.channel import ZmqControl

async def main():
    control = ZmqControl()
    if sys.argv[1] == "listens":
        end = control.listen("tcp://127.0.0.1:0", None, lambda name, frames: taken.append(name))
        print(end.endpoint, flush=True)
    else:
        end = control.connect(sys.argv[1], taken.append, lambda: None)
    sys.stdin.readline()  # the event loop stands still
    while len(taken) < 20_000:
        await asyncio.sleep(0.01)

taken = []
asyncio.run(main())
"""


@pytest.mark.parametrize("way", ["accepted", "made"])
def test_a_connection_that_breaks_while_much_waits_ends_no_process(way: str) -> None:
    """If the queue has a limit, libzmq 4.3.5 aborts at the next heartbeat."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = "listens" if way == "accepted" else f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with subprocess.Popen(
            [sys.executable, "-c", BUSY, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            raw = RawZmtp(process.stdout.readline().strip()) if way == "accepted" else RawZmtp.accepted(listener)
            assert raw.send(frame(b"x" * 100) * 20_000)
            with suppress(subprocess.TimeoutExpired):
                process.wait(HEARTBEAT_MS / 1e3)
            raw.reset()
            with suppress(subprocess.TimeoutExpired):
                process.wait(3 * HEARTBEAT_MS / 1e3)
            with suppress(BrokenPipeError):
                process.stdin.write("go on\n")
                process.stdin.flush()
            assert process.wait(30) == 0


async def test_nobody_is_accepted_while_what_others_have_left_is_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is connected already stays connected."""
    monkeypatch.setattr(channel, "MAX_PAUSE_S", 3_600.0)
    with closing(Server()) as server, closing(Client(server.endpoint)) as early:
        early.send(b"early")
        await server.receive()
        with monkeypatch.context() as patched:
            patched.setattr(Intake, "receive", take_nothing)
            with RawZmtp(server.endpoint) as raw:
                await anyio.to_thread.run_sync(send_mib, raw, 1)
            await until(lambda: server.listener._is_paused)
            host, port = server.endpoint.removeprefix("tcp://").split(":")
            with pytest.raises(TimeoutError):
                socket.create_connection((host, int(port)), 0.3)
            early.send(b"still here")
        await until(lambda: [b"still here"] in [frames for _, frames in server.received])
        await until(lambda: not server.listener._is_paused)
        server.received.clear()
        await still_served(server)


@pytest.mark.parametrize("is_cut", [False, True], ids=["ended", "cut"])
async def test_nobody_is_accepted_from_the_moment_that_much_is_left(
    monkeypatch: pytest.MonkeyPatch, is_cut: bool
) -> None:
    monkeypatch.setattr(channel, "GRACE_S", 3_600.0)
    monkeypatch.setattr(Intake, "receive", take_nothing)
    with closing(Server()) as server, RawZmtp(server.endpoint) as raw:
        intake = server.listener._intake
        await anyio.to_thread.run_sync(send_mib, raw, 2)
        await until(lambda: any(left > MUCH_BYTES for left in intake.unread._left.values()))
        assert not server.listener._is_paused
        if is_cut:
            intake.cut(next(iter(intake.unread.num_read)), "a reason")
        else:
            raw.reset()
        await until(lambda: server.listener._is_paused)


async def test_memory_of_what_was_left_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it was read so soon that no connection was refused."""
    given_back: list[bool] = []
    monkeypatch.setattr(channel, "give_back_memory", lambda: given_back.append(True))
    monkeypatch.setattr(channel, "GRACE_S", 3_600.0)
    monkeypatch.setattr(channel, "MUCH_BYTES", 2**30)
    with closing(Server()) as server:
        with monkeypatch.context() as patched:
            patched.setattr(Intake, "receive", take_nothing)
            with RawZmtp(server.endpoint) as raw:
                await anyio.to_thread.run_sync(send_mib, raw, 9)
            await until(lambda: server.listener._pause is not None)
        await until(lambda: bool(given_back))


async def test_after_a_while_others_are_accepted_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_PAUSE_S", 0.1)
    monkeypatch.setattr(Intake, "receive", take_nothing)
    with closing(Server()) as server:
        with RawZmtp(server.endpoint) as raw:
            await anyio.to_thread.run_sync(send_mib, raw, 1)
        await until(lambda: server.listener._is_paused)
        with closing(Client(server.endpoint)):
            await until(lambda: server.listener._intake.unread.num_read)
