"""Peers that send garbage get an error where possible, are counted, and affect no other peer."""

import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
import numpy as np
import pytest
import zmq
import zmq.asyncio

from kvflow.backends.memory import ENDPOINTS, MemoryBackend
from kvflow.backends.metadata import PeerMetadata, RegisteredMemory
from kvflow.errors import RemoteProtocolError
from kvflow.geometry import compile_routes
from kvflow.geometry.pages import WIRE_PAGES
from kvflow.geometry.routes import Route
from kvflow.wire.codec import decode, encode
from kvflow.wire.messages import (
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    Cancel,
    Goodbye,
    Hello,
    Message,
    Notice,
    PeerId,
    Ping,
    Pong,
    RankId,
    Refuse,
    StagingWindow,
    Welcome,
)
from tests.support.cores import ABORTED, grant
from tests.support.failures import catch, undisturbed
from tests.support.instances import Deployment, deploy, make_pool
from tests.support.pools import PagedShape, Pool
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

UNKNOWN = PeerId(RankId("unknown", 0), 99)
NOTHING = Route(engine_rank=0, slices=())


@pytest.fixture
async def deployment() -> AsyncIterator[Deployment]:
    async with deploy() as opened:
        yield opened
        await undisturbed(opened)


@contextmanager
def dealer(endpoint: str) -> Iterator[zmq.asyncio.Socket]:
    with zmq.asyncio.Context.instance().socket(zmq.DEALER, socket_class=zmq.asyncio.Socket) as line:
        line.setsockopt(zmq.LINGER, 0)
        line.connect(endpoint)
        yield line


async def ask(endpoint: str, *messages: Message) -> Message:
    """Send messages, and return the first answer."""
    with dealer(endpoint) as line:
        for message in messages:
            await line.send(encode(message))
        frames = await line.recv_multipart()
        return decode(frames[0])


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"", b""],
        [b"hello?"],
        [b"KVF"],
        [b"KVF\x02" + bytes(100)],
        [b"KVF\x01\x81\xa4type\xa5hello"],
        [b"KVF\x01" + b"\x91" * 2_000],
        [encode(Ping(peer=UNKNOWN)), b"one frame too many"],
        [encode(Ping(peer=UNKNOWN))[:-1]],
        [encode(Welcome(peer=UNKNOWN, attempt=0, version=3))],
        [bytes(1_000_000)],
    ],
    ids=lambda frames: f"{len(frames)}x{frames[0][:8]!r}",
)
async def test_frames_that_are_no_message(deployment: Deployment, frames: list[bytes]) -> None:
    prefill = deployment.prefill[0]
    with dealer(prefill.endpoint) as line:
        await line.send_multipart(frames)
        await until(lambda: prefill.statistics().anomalies.get("message_rejected"))
    await undisturbed(deployment, room=901)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 40, b"\xff" + bytes(8) + b"\x7f" * 99])
async def test_bytes_that_are_no_zmq(deployment: Deployment, data: bytes) -> None:
    host, port = deployment.prefill[0].endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(data)
        await undisturbed(deployment, room=901)


@pytest.mark.parametrize(
    "message",
    [
        Ping(peer=UNKNOWN),
        grant(room=1, pages={}),
        Cancel(room=1, generation=1, failure=ABORTED),
    ],
    ids=lambda message: type(message).__name__,
)
async def test_message_before_any_hello_is_refused(deployment: Deployment, message: Message) -> None:
    answer = await ask(deployment.prefill[0].endpoint, message)
    assert isinstance(answer, Refuse)
    assert "handshake required" in answer.detail


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"to": PeerId(RankId("prefill", 0), 1)}, ["Hello is for"]),
        ({"versions": (7, 9)}, ["no common protocol version: decode has 7-9"]),
        ({"versions": (0, 0)}, ["no common protocol version: decode has 0-0"]),
        ({"versions": (4, 3)}, ["no common protocol version: decode has 4-3"]),
        ({"backend_metadata": b"junk"}, ["metadata is damaged"]),
        ({"backend_metadata": b""}, ["metadata is damaged"]),
    ],
)
async def test_hello_that_does_not_fit_is_refused(
    deployment: Deployment, changes: dict[str, object], named: list[str]
) -> None:
    answer = await ask(deployment.prefill[0].endpoint, await a_hello(deployment, **changes))
    assert isinstance(answer, Refuse)
    assert answer.to == UNKNOWN
    for word in named:
        assert word in answer.detail


async def test_the_agent_of_a_living_rank_is_not_taken_over(deployment: Deployment) -> None:
    """Writes to the new rank would land in the memory of the other one."""
    await deployment.request(1, 8).hand_over()
    async with unknown_peer_metadata() as metadata:
        hello = await a_hello(deployment, backend_metadata=metadata, agent=str(deployment.decode[0].me))
        answer = await ask(deployment.prefill[0].endpoint, hello)
    assert isinstance(answer, Refuse)
    assert "another peer has the same transport agent, with different memory" in answer.detail


async def test_the_highest_version_in_common_is_spoken(deployment: Deployment) -> None:
    hello = await a_hello(deployment, versions=(0, PROTOCOL_VERSION + 5), route=NOTHING)
    answer = await ask(deployment.prefill[0].endpoint, hello)
    assert isinstance(answer, Welcome)
    assert (answer.version, answer.attempt) == (PROTOCOL_VERSION, hello.attempt)


@asynccontextmanager
async def unknown_peer_metadata() -> AsyncIterator[bytes]:
    """Yield the transport metadata of the unknown peer, which exists within the block."""
    async with MemoryBackend() as backend:
        await backend.open(str(UNKNOWN), lambda _: None, lambda _: None)
        await backend.register(make_pool().layout)
        yield backend.metadata()


async def a_hello(deployment: Deployment, **changes: object) -> Hello:
    """Return the Hello of a compatible decode rank, with some changes."""
    prefill, pool = deployment.prefill[0], make_pool()
    (route,) = compile_routes({0: prefill.layout}, pool.layout, decode_rank=0)
    fields: dict[str, object] = {
        "peer": UNKNOWN,
        "to": prefill.me,
        "attempt": 0,
        "versions": (OLDEST_VERSION, PROTOCOL_VERSION),
        "lease_s": 5.0,
        "backend": "memory",
        "backend_metadata": b"",
        "layout": pool.layout,
        "route": route,
    }
    return Hello(**(fields | changes))  # type: ignore[arg-type]


async def test_notices_from_nobody_count_for_nothing(deployment: Deployment) -> None:
    """Any process can write an in-band notice; it counts only with the token of the grant."""
    request = deployment.request(1, 8)
    rogue = MemoryBackend()
    await rogue.open("rogue", lambda _: None, lambda _: None)
    decode = deployment.decode[0]
    async with anyio.create_task_group() as tasks, request.receiver() as receiver:
        await until(lambda: deployment.prefill[0].statistics().waiting_grants)
        forged = Notice(
            room=1, generation=1, token=0, engine_rank=0, seq=0, ranges={"kv": (0, 8)}, num_bytes=8 * 192, last=True
        )
        target = ENDPOINTS[str(decode.me)]
        for payload in (b"junk", encode(forged), encode(Ping(peer=UNKNOWN)), b""):
            target.deliver(payload)
        await until(lambda: decode.statistics().anomalies.get("notice_rejected", 0) == 3)
        assert decode.statistics().anomalies["notice_with_wrong_token"] == 1
        assert receiver.outcome.value == "pending"
        tasks.start_soon(request.send)
        await receiver.done()
    request.assert_arrived()
    await rogue.aclose()


async def hear(line: zmq.asyncio.Socket) -> Message:
    return decode((await line.recv_multipart())[0])


async def test_a_hello_that_comes_late_over_a_connection_given_up_changes_nothing(deployment: Deployment) -> None:
    early, late = [await a_hello(deployment, attempt=number, route=NOTHING) for number in (5, 6)]
    endpoint = deployment.prefill[0].endpoint
    with dealer(endpoint) as new, dealer(endpoint) as old:
        await new.send(encode(late))
        assert isinstance(await hear(new), Welcome)
        await old.send(encode(early))
        await old.send(encode(Ping(peer=UNKNOWN)))
        answer = await hear(old)
        assert isinstance(answer, Refuse)
        assert "handshake required" in answer.detail
        await new.send(encode(Ping(peer=UNKNOWN)))
        assert isinstance(await hear(new), Pong)
        await new.send(encode(Goodbye(peer=UNKNOWN)))


@pytest.mark.parametrize("is_queued", [False, True])
async def test_a_decode_rank_that_wants_other_cells_than_before_fails_what_it_was_promised_and_nothing_else(
    deployment: Deployment, is_queued: bool
) -> None:
    prefill = deployment.prefill[0]
    other = await a_hello(deployment, attempt=1, route=NOTHING)
    gate = threading.Event()
    ready = Ready(gate) if is_queued else None

    async def send() -> None:
        async with unknown_peer_metadata() as metadata:
            first = await a_hello(deployment, backend_metadata=metadata)
            with dealer(prefill.endpoint) as line:
                await send_over(line, first)

    async def send_over(line: zmq.asyncio.Socket, first: Hello) -> None:
        await line.send(encode(first))
        assert isinstance(await hear(line), Welcome)
        await line.send(encode(grant(room=1, pages={"kv": np.arange(2, dtype=WIRE_PAGES).tobytes()})))
        await until(lambda: prefill.statistics().waiting_grants)
        async with prefill.send(1) as sender:
            if is_queued:
                await sender.chunk((0, 4), {"kv": [0]}, ready=ready)
            await line.send(encode(other))
            await until(lambda: sender.failure)
            gate.set()
            await sender.finish((4, 8) if is_queued else (0, 8), {"kv": [1] if is_queued else [0, 1]})

    assert "wants different cells than before" in (await catch(send)).detail


class Ready:
    """A device event that a test sets."""

    def __init__(self, gate: threading.Event) -> None:
        self._authorizer = gate

    def synchronize(self) -> None:
        self._authorizer.wait()


@pytest.mark.parametrize("address", [2**62, 2**64 - 1])
async def test_a_window_at_an_address_that_cannot_be_is_no_message(deployment: Deployment, address: int) -> None:
    hello = await a_hello(deployment, staging=StagingWindow(address, 2**20, 4))
    with pytest.raises(RemoteProtocolError, match="malformed"):
        decode(encode(hello))


async def test_a_hello_with_the_agent_of_its_reader_is_refused(deployment: Deployment) -> None:
    """Writes for its grants would go to the pools of the prefill rank itself."""
    prefill = deployment.prefill[0]
    hello = await a_hello(deployment, agent=str(prefill.me), backend_metadata=prefill._backend.metadata())
    answer = await ask(prefill.endpoint, hello)
    assert isinstance(answer, Refuse)
    assert "agent of this process" in answer.detail


async def test_a_hello_that_names_memory_which_its_sender_has_not_registered_is_refused(
    deployment: Deployment,
) -> None:
    victim = Pool(PagedShape(8, 4, (0, 2), 8, 2), 1).layout
    async with unknown_peer_metadata():
        claimed = PeerMetadata("memory", str(UNKNOWN).encode(), RegisteredMemory.from_layout(victim)).pack()
        answer = await ask(deployment.prefill[0].endpoint, await a_hello(deployment, backend_metadata=claimed))
    assert isinstance(answer, Refuse)
    assert "memory that it has not registered" in answer.detail
