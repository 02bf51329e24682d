"""Control sockets on a real network: both directions, immediate refusals, no hangs."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from typing import Any, NoReturn

import anyio
import anyio.to_thread
import pytest
import zmq
import zmq.asyncio

from benchmarks.resources import num_files
from kvflow.addresses import split_address
from kvflow.control import dialer, sockets
from kvflow.errors import ConfigError, RemoteProtocolError, Unreachable
from kvflow.wire.codec import decode
from tests.control.ends import LOCAL, Client, Server, connected, meet
from tests.support.machine import has_ipv6
from tests.support.ports import is_free
from tests.support.waiting import until
from tests.support.zmtp import RawZmtp, frame

pytestmark = pytest.mark.anyio


async def refused(send: Callable[[], None]) -> Unreachable:
    """Send until it fails; return the error."""
    errors: list[Unreachable] = []

    def fails() -> bool:
        try:
            send()
        except Unreachable as error:
            errors.append(error)
        return bool(errors)

    await until(fails)
    return errors[0]


def send_for_ever(server: Server, name: bytes) -> NoReturn:
    """Send without yielding to the event loop, which reads nothing meanwhile."""
    while True:
        server.send(name, bytes(100_000))


async def test_both_ways_in_order() -> None:
    with connected() as (server, client):
        for number in range(100):
            client.send(b"%d" % number)
        received = [await server.receive() for _ in range(100)]
        assert [frames for _, frames in received] == [[b"%d" % number] for number in range(100)]
        (name,) = {name for name, _ in received}
        for number in range(100):
            server.send(name, b"%d" % number)
        assert [await client.receive() for _ in range(100)] == [[b"%d" % number] for number in range(100)]


@pytest.mark.parametrize("payload", [b"", b"\0", bytes(2_000_000)], ids=len)
async def test_payload_of_any_length(payload: bytes) -> None:
    with connected() as (server, client):
        client.send(payload)
        name, frames = await server.receive()
        server.send(name, payload)
        assert frames == await client.receive() == [payload]


async def test_each_client_has_a_name_of_its_own() -> None:
    with connected() as (server, first), closing(Client(server.endpoint)) as second:
        names = [await meet(server, first), await meet(server, second)]
        assert len(set(names)) == 2
        server.send(names[0], b"for the first")
        server.send(names[1], b"for the second")
        assert (await first.receive(), await second.receive()) == ([b"for the first"], [b"for the second"])


async def test_port_zero_takes_a_free_one() -> None:
    with closing(Server(LOCAL)) as first, closing(Server(LOCAL)) as second:
        assert first.endpoint != second.endpoint
        for server in (first, second):
            assert int(server.endpoint.rpartition(":")[2]) > 0


async def test_advertised_host_with_the_real_port() -> None:
    with closing(Server("tcp://*:0", "127.0.0.1")) as server:
        assert server.endpoint.startswith("tcp://127.0.0.1:")
        with closing(Client(server.endpoint)) as client:
            await meet(server, client)


async def test_wildcard_takes_both_kinds_of_addresses() -> None:
    with closing(Server("tcp://*:0", "localhost")) as server:
        port = server.endpoint.rpartition(":")[2]
        hosts = ["127.0.0.1", "localhost", *(["[::1]"] if has_ipv6() else [])]
        for host in hosts:
            with closing(Client(f"tcp://{host}:{port}")) as client:
                await meet(server, client)


@pytest.mark.parametrize("advertise", [None, "::1", "[::1]"])
async def test_ipv6(advertise: str | None) -> None:
    if not has_ipv6():
        pytest.skip("this host has no IPv6")
    with closing(Server("tcp://[::1]:0", advertise)) as server:
        assert server.endpoint.startswith("tcp://[::1]:")
        with closing(Client(server.endpoint)) as client:
            await meet(server, client)


@pytest.mark.parametrize(
    ("bind", "host"), [(LOCAL, "127.0.0.1"), ("tcp://[::1]:0", "::1"), ("tcp://localhost:0", None)]
)
async def test_the_host_at_the_other_end_is_known_by_number(bind: str, host: str | None) -> None:
    if host == "::1" and not has_ipv6():
        pytest.skip("this host has no IPv6")
    with connected(bind) as (server, client):
        assert client.connection.peer_host == ""
        await meet(server, client)
        assert client.connection.peer_host in ([host] if host else ["127.0.0.1", "::1"])


async def test_name_with_an_ipv6_address_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def resolve(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        asked.append(host)
        if len(asked) == 1:
            raise socket.gaierror("not yet")
        return [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))]

    if not has_ipv6():
        pytest.skip("this host has no IPv6")
    with closing(Server("tcp://[::1]:0")) as server:
        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        monkeypatch.setattr(dialer, "RECONNECT_MAX_MS", 10)
        with closing(Client(server.endpoint.replace("[::1]", "moving.test"))) as client:
            await meet(server, client)
    assert asked == ["moving.test", "moving.test"]


async def test_addresses_of_a_name_are_tried_in_turn_until_one_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of IPv4 first; nobody listens at the first two."""
    found = ["::1", "127.0.0.7", "127.0.0.8", "127.0.0.1"]
    asked: list[str] = []
    dialled: list[str] = []
    real_dial = dialer.ZmqConnection._dial

    def resolve(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        asked.append(host)
        families = [socket.AF_INET6 if ":" in each else socket.AF_INET for each in found]
        return [(family, socket.SOCK_STREAM, 6, "", (each, 0)) for family, each in zip(families, found, strict=True)]

    def dial(connection: dialer.ZmqConnection, host: str) -> None:
        dialled.append(host)
        real_dial(connection, host)

    with closing(Server()) as server:
        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        monkeypatch.setattr(dialer.ZmqConnection, "_dial", dial)
        with closing(Client(server.endpoint.replace("127.0.0.1", "rails.test"))) as client:
            await meet(server, client)
            assert client.connection.peer_host == "127.0.0.1"
    assert dialled == ["127.0.0.7", "127.0.0.8", "127.0.0.1"]
    assert set(asked) == {"rails.test"}


async def test_name_that_libzmq_does_not_take_at_first_is_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in a callback would only reach the event loop, and the peer would never be dialled again."""
    monkeypatch.setattr(dialer, "RECONNECT_MAX_MS", 10)
    failures = [zmq.ZMQError(zmq.EMTHREAD), zmq.ZMQError(zmq.EINVAL)]
    real = sockets.ZmqSocket.connect

    def connect(one: sockets.ZmqSocket, address: str) -> object:
        if address.startswith("tcp://") and failures:
            raise failures.pop()
        return real(one, address)

    with closing(Server()) as server:
        monkeypatch.setattr(zmq.Socket, "connect", connect)
        with closing(Client(server.endpoint.replace("127.0.0.1", "localhost"))) as client:
            await meet(server, client)
    assert not failures


async def test_messages_wait_for_a_name_that_nobody_knows_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object, **__: object) -> object:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for module in (dialer, sockets):
        monkeypatch.setattr(module, "QUEUE_MESSAGES", 10)
    with closing(Client("tcp://no.such.host.invalid:5000")) as client:
        for _ in range(10):
            client.send(b"hello?")
        with pytest.raises(Unreachable, match="queue to the peer is full"):
            client.send(b"one too many")


@pytest.mark.parametrize(
    ("bind", "advertise"),
    [
        ("tcp://*:0", None),
        ("tcp://0.0.0.0:0", None),
        ("tcp://0:0", None),
        ("tcp://[::]:0", None),
        ("tcp://[::ffff:0.0.0.0]:0", None),
        (LOCAL, "tcp://x:1"),
        (LOCAL, "x:1"),
        (LOCAL, "*"),
        (LOCAL, ""),
        ("tcp://*:0", "[::]"),
    ],
)
async def test_endpoint_that_others_could_not_use(bind: str, advertise: str | None) -> None:
    with pytest.raises(ConfigError, match=r"must name a host|must be a host"):
        Server(bind, advertise)


async def test_address_in_use() -> None:
    with closing(Server(LOCAL)) as server:
        with pytest.raises(ConfigError, match="cannot be bound") as caught:
            Server(server.endpoint)
        assert caught.value.values["bind"] == server.endpoint
        assert "in use" in str(caught.value.values["detail"])


async def test_the_first_free_port_of_a_range_is_bound() -> None:
    with closing(Server(LOCAL)) as taken:
        first = split_address("endpoint", taken.endpoint)[1]
        with closing(Server(f"tcp://127.0.0.1:{first}-{first + 20}")) as server, closing(Client(server.endpoint)) as it:
            assert first < split_address("endpoint", server.endpoint)[1] <= first + 20
            await meet(server, it)


async def test_range_without_a_free_port() -> None:
    with closing(Server(LOCAL)) as taken, ExitStack() as stack:
        first = split_address("endpoint", taken.endpoint)[1]
        bind = f"tcp://127.0.0.1:{first}-{first + 1}"
        with suppress(ConfigError):  # another process has the second one
            stack.enter_context(closing(Server(bind)))
        before = num_files()
        with pytest.raises(ConfigError, match="no port of the range is free") as caught:
            Server(bind)
        assert caught.value.values == {"bind": bind, "first": first, "last": first + 1}
        await until(lambda: num_files() <= before)
    await until(lambda: is_free(first))
    with closing(Server(bind)) as again:
        assert again.endpoint == taken.endpoint


async def test_a_range_is_not_tried_further_if_the_host_is_wrong() -> None:
    with pytest.raises(ConfigError, match="cannot be bound") as caught:
        Server("tcp://192.0.2.1:5000-65535")
    assert caught.value.values["bind"] == "tcp://192.0.2.1:5000-65535"


async def test_the_event_loop_forgets_a_socket_that_could_not_be_bound() -> None:
    """Otherwise it mistakes the next socket with the same descriptor number for this one, and never polls it."""
    loop: Any = asyncio.get_running_loop()
    with closing(Server(LOCAL)) as server:
        known = set(loop._selector.get_map())
        with pytest.raises(ConfigError, match="cannot be bound"):
            Server(server.endpoint)
        assert set(loop._selector.get_map()) == known


BAD_ENDPOINTS = ["", "nonsense", "127.0.0.1:5000", "tcp://", "tcp://127.0.0.1", "http://x:1"]


@pytest.mark.parametrize("endpoint", [*BAD_ENDPOINTS, "tcp://192.0.2.1:5000", "tcp://no.such.host.invalid:5000"])
async def test_endpoint_that_cannot_be_bound(endpoint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Server(endpoint)
    assert endpoint in caught.value.values.values()


@pytest.mark.parametrize("endpoint", BAD_ENDPOINTS)
async def test_endpoint_that_cannot_be_dialled(endpoint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Client(endpoint)
    assert endpoint in caught.value.values.values()


@pytest.mark.parametrize("port", [65_536, 99_999, -1])
@pytest.mark.parametrize("kind", [Server, Client])
async def test_port_that_does_not_exist(kind: type[Server | Client], port: int) -> None:
    """The port must not be truncated to its low 16 bits."""
    with pytest.raises(ConfigError), closing(kind(f"tcp://127.0.0.1:{port}")):
        pass


async def test_connection_that_never_was() -> None:
    with closing(Server(LOCAL)) as server, pytest.raises(Unreachable, match="not connected") as caught:
        server.send(b"nobody", b"hello?")
    assert caught.value.values == {}  # routing ids are not for logs


async def test_connection_that_has_vanished() -> None:
    with connected() as (server, client):
        name = await meet(server, client)
        client.close()
        error = await refused(lambda: server.send(name, b"still there?"))
        assert error.values == {}
        with closing(Client(server.endpoint)) as other:
            await meet(server, other)


async def test_full_queue_of_a_client_whose_server_is_away(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    for module in (dialer, sockets):
        monkeypatch.setattr(module, "QUEUE_MESSAGES", 10)
    with closing(Client(f"tcp://127.0.0.1:{free_port}")) as client:
        for _ in range(10):
            client.send(b"hello?")
        with pytest.raises(Unreachable, match="queue to the peer is full") as caught:
            client.send(b"one too many")
        assert caught.value.values == {"endpoint": client.endpoint}


async def test_peer_that_reads_nothing_fills_its_own_queue_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dialer, sockets):
        monkeypatch.setattr(module, "QUEUE_MESSAGES", 10)
    with connected() as (server, busy), closing(Client(server.endpoint)) as idle:
        name = await meet(server, idle)
        with pytest.raises(Unreachable, match="queue to the peer is full"):
            send_for_ever(server, name)
        await meet(server, busy)


@pytest.mark.parametrize("frames", [[b"one", b"two"], [b"", b"two"], [b"x"] * 50], ids=len)
async def test_the_first_two_of_several_frames_arrive_as_they_are_and_are_refused(frames: list[bytes]) -> None:
    with (
        closing(Server(LOCAL)) as server,
        zmq.asyncio.Context.instance().socket(zmq.DEALER, socket_class=zmq.asyncio.Socket) as raw,
    ):
        raw.connect(server.endpoint)
        await raw.send_multipart(frames)
        _, received = await server.receive()
        assert received == frames[:2]
        with pytest.raises(RemoteProtocolError, match="one frame"):
            decode(*received)


async def test_close_gives_files_back() -> None:
    async def use() -> None:
        with connected() as (server, client):
            await meet(server, client)

    with connected():  # opens everything that is opened once per process
        await use()
        before = num_files()
        for _ in range(20):
            await use()
        await until(lambda: num_files() <= before)


async def test_failed_bind_gives_files_back() -> None:
    with closing(Server(LOCAL)) as server:
        before = num_files()
        for _ in range(20):
            with pytest.raises(ConfigError):
                Server(server.endpoint)
            with pytest.raises(ConfigError):
                Client("nonsense")
        await until(lambda: num_files() <= before)


async def test_who_connects_before_the_last_message_of_another_was_read_is_answered() -> None:
    server = Server()
    unused = socket.socket()  # in this process, too, so it must not take the descriptor that the listener closes
    with RawZmtp(server.endpoint) as former:  # the event loop stands still
        former.send(frame(b"former"))
        former.line.shutdown(socket.SHUT_WR)
        assert former.line.recv(1) == b""  # the listener has closed its end, so the next one has the same descriptor
        unused.connect(split_address("endpoint", server.endpoint))
        with RawZmtp(unused) as latter:
            latter.send(frame(b"latter"))
            names = {frames[0]: name for name, frames in [await server.receive(), await server.receive()]}
            server.send(names[b"latter"], b"answer")
            assert latter.read_frame() == b"answer"
            with pytest.raises(Unreachable):
                server.send(names[b"former"], b"answer")
    server.close()


async def test_heartbeats_set_no_timer_at_the_listener() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        client = Client(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        with await anyio.to_thread.run_sync(RawZmtp.accepted, listener) as raw:
            heartbeat = await anyio.to_thread.run_sync(raw.read_frame)
            assert heartbeat.startswith(b"\x04PING\0\0")
        client.close()
