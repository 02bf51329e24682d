"""Control sockets on a real network: both ways, refusals at once, and never a hang."""

import asyncio
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from kvflow.errors import ConfigError, RemoteProtocolError, Unreachable
from kvflow.wire import channel
from kvflow.wire.channel import Dialer, Listener
from kvflow.wire.codec import decode_frames
from tests.support.waiting import until
from tests.wire.lines import LOCAL, connected, meet

pytestmark = pytest.mark.anyio


async def refused(send: Callable[[], None]) -> Unreachable:
    """Send until it fails."""
    errors: list[Unreachable] = []

    def fails() -> bool:
        try:
            send()
        except Unreachable as error:
            errors.append(error)
        return bool(errors)

    await until(fails)
    return errors[0]


async def test_both_ways_in_order() -> None:
    with connected() as (listener, dialer):
        for number in range(100):
            dialer.send(b"%d" % number)
        received = [await listener.receive() for _ in range(100)]
        assert [frames for _, frames in received] == [[b"%d" % number] for number in range(100)]
        (name,) = {name for name, _ in received}
        for number in range(100):
            listener.send(name, b"%d" % number)
        assert [await dialer.receive() for _ in range(100)] == [[b"%d" % number] for number in range(100)]


@pytest.mark.parametrize("payload", [b"", b"\0", bytes(5_000_000)], ids=len)
async def test_payload_of_any_length(payload: bytes) -> None:
    with connected() as (listener, dialer):
        dialer.send(payload)
        name, frames = await listener.receive()
        listener.send(name, payload)
        assert frames == await dialer.receive() == [payload]


async def test_each_dialer_has_a_name_of_its_own() -> None:
    with connected() as (listener, first), closing(Dialer(listener.endpoint)) as second:
        names = [await meet(listener, first), await meet(listener, second)]
        assert len(set(names)) == 2
        listener.send(names[0], b"for the first")
        listener.send(names[1], b"for the second")
        assert (await first.receive(), await second.receive()) == ([b"for the first"], [b"for the second"])


async def test_port_zero_takes_a_free_one() -> None:
    with closing(Listener(LOCAL)) as first, closing(Listener(LOCAL)) as second:
        assert first.endpoint != second.endpoint
        for listener in (first, second):
            assert int(listener.endpoint.rpartition(":")[2]) > 0


async def test_advertised_host_with_the_real_port() -> None:
    with closing(Listener("tcp://*:0", "127.0.0.1")) as listener:
        assert listener.endpoint.startswith("tcp://127.0.0.1:")
        with closing(Dialer(listener.endpoint)) as dialer:
            await meet(listener, dialer)


def has_ipv6() -> bool:
    addresses = Path("/proc/net/if_inet6")
    return addresses.exists() and " lo\n" in addresses.read_text()


async def test_ipv6_where_the_machine_has_it() -> None:
    if has_ipv6():
        with connected("tcp://[::1]:0") as (listener, dialer):
            assert listener.endpoint.startswith("tcp://[::1]:")
            await meet(listener, dialer)
    else:
        with pytest.raises(ConfigError, match="cannot be bound"):
            Listener("tcp://[::1]:0")


async def test_address_in_use() -> None:
    with closing(Listener(LOCAL)) as listener:
        with pytest.raises(ConfigError, match="cannot be bound") as caught:
            Listener(listener.endpoint)
        assert caught.value.values["bind"] == listener.endpoint
        assert "in use" in str(caught.value.values["detail"])


async def test_the_event_loop_forgets_a_socket_that_could_not_be_bound() -> None:
    """Else it takes the next socket, whose descriptor has the same number, for this one and never looks at it."""
    loop: Any = asyncio.get_running_loop()
    with closing(Listener(LOCAL)) as listener:
        known = set(loop._selector.get_map())
        with pytest.raises(ConfigError, match="cannot be bound"):
            Listener(listener.endpoint)
        assert set(loop._selector.get_map()) == known


BAD_ENDPOINTS = ["", "nonsense", "127.0.0.1:5000", "tcp://", "tcp://127.0.0.1", "http://x:1"]


@pytest.mark.parametrize("endpoint", [*BAD_ENDPOINTS, "tcp://192.0.2.1:5000", "tcp://no.such.host.invalid:5000"])
async def test_endpoint_that_cannot_be_bound(endpoint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Listener(endpoint)
    assert endpoint in caught.value.values.values()


@pytest.mark.parametrize("endpoint", BAD_ENDPOINTS)
async def test_endpoint_that_cannot_be_dialled(endpoint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Dialer(endpoint)
    assert endpoint in caught.value.values.values()


@pytest.mark.parametrize("port", [65_536, 99_999, -1])
@pytest.mark.parametrize("kind", [Listener, Dialer])
async def test_port_that_does_not_exist(kind: type[Listener | Dialer], port: int) -> None:
    """Not another port, which is what the low 16 bits would name."""
    with pytest.raises(ConfigError), closing(kind(f"tcp://127.0.0.1:{port}")):
        pass


async def test_connection_that_never_was() -> None:
    with closing(Listener(LOCAL)) as listener, pytest.raises(Unreachable, match="not connected") as caught:
        listener.send(b"nobody", b"hello?")
    assert caught.value.values == {"connection": b"nobody".hex()}


async def test_connection_that_has_vanished() -> None:
    with connected() as (listener, dialer):
        name = await meet(listener, dialer)
        dialer.close()
        error = await refused(lambda: listener.send(name, b"still there?"))
        assert error.values == {"connection": name.hex()}
        with closing(Dialer(listener.endpoint)) as other:
            await meet(listener, other)


async def test_full_queue_of_a_dialer_whose_listener_is_away(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    monkeypatch.setattr(channel, "QUEUE_MESSAGES", 10)
    with closing(Dialer(f"tcp://127.0.0.1:{free_port}")) as dialer:
        for _ in range(10):
            dialer.send(b"hello?")
        with pytest.raises(Unreachable, match="does not take its messages") as caught:
            dialer.send(b"one too many")
        assert caught.value.values == {"endpoint": dialer.endpoint}


async def test_peer_that_reads_nothing_fills_its_own_queue_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "QUEUE_MESSAGES", 10)
    with connected() as (listener, busy), closing(Dialer(listener.endpoint)) as idle:
        name = await meet(listener, idle)
        error = await refused(lambda: listener.send(name, bytes(100_000)))
        assert "does not take its messages" in str(error)
        await meet(listener, busy)


@pytest.mark.parametrize("frames", [[b"one", b"two"], [b"", b"two"], [b"x"] * 50], ids=len)
async def test_several_frames_arrive_as_they_are_and_are_refused(frames: list[bytes]) -> None:
    with (
        closing(Listener(LOCAL)) as listener,
        zmq.asyncio.Context.instance().socket(zmq.DEALER, socket_class=zmq.asyncio.Socket) as raw,
    ):
        raw.connect(listener.endpoint)
        await raw.send_multipart(frames)
        _, received = await listener.receive()
        assert received == frames
        with pytest.raises(RemoteProtocolError, match="one frame"):
            decode_frames(received)


def num_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_close_gives_files_back() -> None:
    async def use() -> None:
        with connected() as (listener, dialer):
            await meet(listener, dialer)

    with connected():  # whatever is opened once for the whole process is open now
        await use()
        before = num_files()
        for _ in range(20):
            await use()
        await until(lambda: num_files() <= before)


async def test_failed_bind_gives_files_back() -> None:
    with closing(Listener(LOCAL)) as listener:
        before = num_files()
        for _ in range(20):
            with pytest.raises(ConfigError):
                Listener(listener.endpoint)
            with pytest.raises(ConfigError):
                Dialer("nonsense")
        await until(lambda: num_files() <= before)
