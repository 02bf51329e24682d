"""Connections that made libzmq 4.3.5 abort the process; each test attacks a real process.

See docs/decisions/0051. A process that aborts does so at its next heartbeat.
"""

import ctypes
import itertools
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Final

import anyio
import anyio.to_thread
import msgspec
import pytest

from kvflow.control.sockets import HEARTBEAT_MS, RAND_STATE_BYTES
from kvflow.trust import ClientKeys, Trust
from tests.control.ends import Client
from tests.support.curve import CurveClient, CurveListener
from tests.support.trusts import new_trust
from tests.support.wire_process import WireOptions
from tests.support.zmtp import RawZmtp, Wire, frame

pytestmark = pytest.mark.anyio

ROUNDS: Final = 5
HEARTBEATS_S: Final = 3 * HEARTBEAT_MS / 1e3

ZMTP_2: Final = b"\xff" + bytes(8) + b"\x7f\x01\x05" + frame(b"")
"""Greeting of a libzmq 3 DEALER, without a routing id."""


class Victim:
    """A process with one end of a control connection.

    Attributes:
        own: Its keys.
        other: Keys that it trusts, of both the attacker and an honest peer; None without keys.
    """

    def __init__(self, process: "subprocess.Popen[str]", own: Trust, other: Trust | None) -> None:
        self.own = own
        self.other = other
        self._process = process
        self.endpoint = ""

    def read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def do(self, order: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{order}\n")
        self._process.stdin.flush()
        assert self.read() == "done"

    def lives(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(HEARTBEATS_S)
        assert self._process.poll() is None

    def attacker(self, identity: bytes = b"") -> "RawZmtp | CurveClient":
        if self.other is None:
            return RawZmtp(self.endpoint, identity=identity)
        return CurveClient(self.endpoint, self.other, self.own.public, identity=identity)

    async def serves(self) -> None:
        """Check that the process still serves other peers."""
        keys = None if self.other is None else ClientKeys(self.other, (self.own.public,))
        with closing(Client(self.endpoint, keys)) as honest:
            honest.send(b"hello")
            assert await honest.receive() == [b"hello"]


@contextmanager
def victim(endpoint: str = "", *, own: Trust | None = None, other: Trust | None = None) -> Iterator[Victim]:
    own = own or new_trust()
    options = WireOptions(endpoint=endpoint)
    if other is not None:
        options = WireOptions(own.public, own.secret, other.public, endpoint)
    command = [sys.executable, "-m", "tests.support.wire_process", msgspec.json.encode(options).decode()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            one = Victim(process, own, other)
            if not endpoint:
                one.endpoint = one.read()
            yield one
        finally:
            process.kill()


@pytest.fixture(params=["plain", "keys"])
def listener(request: pytest.FixtureRequest) -> Iterator[Victim]:
    with victim(other=new_trust() if request.param == "keys" else None) as one:
        yield one


def say(attacker: "RawZmtp | CurveClient", text: bytes) -> None:
    assert attacker.say(text) if isinstance(attacker, CurveClient) else attacker.send(frame(text))


DAMAGED: Final = {
    "not what the key encrypts": {"damage": 1},
    "a number that was used": {"number": 1},
}


@pytest.mark.parametrize("how", DAMAGED.values(), ids=DAMAGED)
async def test_a_damaged_message_costs_only_its_connection(how: dict[str, int]) -> None:
    with victim(other=new_trust()) as one:
        for _ in range(ROUNDS):
            with one.attacker() as attacker:
                assert isinstance(attacker, CurveClient)
                assert attacker.say(b"x")
                assert attacker.say(b"x", **how)
        await anyio.to_thread.run_sync(one.lives)
        await one.serves()


@pytest.mark.parametrize("body", [b"", b"\x07MESSAGE", b"\x04PING", b"\xff"])
async def test_what_is_no_message_at_all_costs_only_its_connection(body: bytes) -> None:
    with victim(other=new_trust()) as one:
        for _ in range(ROUNDS):
            with one.attacker() as attacker:
                assert attacker.send(frame(body))
        await anyio.to_thread.run_sync(one.lives)
        await one.serves()


async def test_a_dialer_connects_again_after_a_damaged_message() -> None:
    own, other = new_trust(), new_trust()
    with closing(CurveListener(other)) as attacker, victim(attacker.endpoint, own=own, other=other) as one:
        for _ in range(ROUNDS):
            with await anyio.to_thread.run_sync(attacker.accept) as end:
                assert end.say(b"x")
                assert await anyio.to_thread.run_sync(one.read) == "heard"
                assert end.say(b"x", damage=1)
                assert await anyio.to_thread.run_sync(one.read) == "lost"
        await anyio.to_thread.run_sync(one.lives)


async def test_two_connections_with_one_routing_id(listener: Victim) -> None:
    for number in range(ROUNDS):
        first = listener.attacker(b"taken%d" % number)
        say(first, b"x")
        first.read_frame()  # now its routing id is known
        with listener.attacker(b"taken%d" % number) as second:
            say(second, b"x")
            await listener.serves()
            say(first, b"x")
            first.reset()
    await anyio.to_thread.run_sync(listener.lives)
    await listener.serves()


def predicted() -> list[bytes]:
    """Return the first routing ids of libzmq in a process that has not seeded C's `rand`."""
    libc = ctypes.CDLL(None)
    libc.initstate.restype = ctypes.c_void_p
    state = ctypes.create_string_buffer(RAND_STATE_BYTES)
    before = libc.initstate(1, state, ctypes.c_size_t(RAND_STATE_BYTES))
    numbers = [libc.rand() for _ in range(12)]
    libc.setstate(ctypes.c_void_p(before))
    firsts = [low | (high & 1) << 31 for low, high in itertools.pairwise(numbers)]
    return [b"\x00" + (first + more).to_bytes(4) for first in firsts for more in range(3)]


async def test_routing_ids_that_libzmq_would_give_next(listener: Victim) -> None:
    claimed = [listener.attacker(identity) for identity in predicted()]
    for _ in range(3):
        with listener.attacker() as attacker:
            say(attacker, b"x")
            attacker.read_frame()
    await listener.serves()
    for one in claimed:
        one.line.close()


def takes_little(line: socket.socket) -> None:
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)


def break_while_it_lingers(one: Victim, attacker: "RawZmtp | CurveClient", order: str) -> None:
    """Make the victim close a connection with a long queue; send a message that it no longer reads, and reset."""
    one.do("fill")
    one.do(order)
    say(attacker, b"x")
    attacker.reset()
    one.lives()


@pytest.mark.parametrize("order", ["close", "renew"])
async def test_a_connection_that_breaks_while_its_listener_closes_it(order: str) -> None:
    with victim(other=new_trust()) as one, one.attacker() as attacker:
        takes_little(attacker.line)
        say(attacker, b"x")
        attacker.read_frame()
        await anyio.to_thread.run_sync(break_while_it_lingers, one, attacker, order)


async def test_a_connection_that_breaks_while_its_dialer_closes_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        takes_little(server)
        with (
            victim(f"tcp://127.0.0.1:{server.getsockname()[1]}") as one,
            await anyio.to_thread.run_sync(RawZmtp.accepted, server) as attacker,
        ):
            say(attacker, b"x")
            assert await anyio.to_thread.run_sync(one.read) == "heard"
            await anyio.to_thread.run_sync(break_while_it_lingers, one, attacker, "close")


async def test_a_peer_that_speaks_the_zmtp_of_libzmq_3() -> None:
    """Its messages do not reveal their connection, which leaves kvflow no way to limit them."""
    with victim() as one, Wire(one.endpoint) as old:
        old.send(ZMTP_2)
        for _ in range(3):
            old.send(frame(b"x"))
        await one.serves()
