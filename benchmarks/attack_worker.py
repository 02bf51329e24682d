"""An attacker of prefill ranks, or a rank to attack: `python -m benchmarks.attack_worker OPTIONS`.

Orders name the target and the kind of attack, and end it. An attack runs as fast as one thread can.
"""

import itertools
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Final

import anyio
import msgspec
import zmq
from zmq.utils import z85

import kvflow
from benchmarks.attack import AttackerOptions
from benchmarks.processes import Line, next_order, run_child
from benchmarks.rooms import make_pool

__all__ = ["main"]

SILENT: Final = 500
"""Number of open connections that never send anything."""

STRANGERS: Final = 16
"""Number of concurrent connections with an unknown key."""

HEADER: Final = b"KVF\x01"
GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
Attack = Callable[[], object]
"""One step of an attack, called in a loop."""


def connect(endpoint: str) -> socket.socket:
    """Open a TCP connection without sending anything."""
    host, port = endpoint.removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), timeout=1.0)


class Knocks:
    """An attack with connections that send some bytes and are closed."""

    def __init__(self, endpoint: str, words: Iterator[bytes], keep: int = 0) -> None:
        self._endpoint = endpoint
        self._words = words
        self._keep = keep
        self._open: deque[socket.socket] = deque()

    def __call__(self) -> None:
        """Open a connection, and close the oldest if there are too many."""
        with suppress(OSError):  # refused, reset, no descriptor left
            self._open.append(connect(self._endpoint))
            self._open[-1].sendall(next(self._words))
        while len(self._open) > self._keep:
            self._open.popleft().close()


class Messages:
    """An attack with messages over one connection of an insider, as fast as the target reads them."""

    def __init__(self, stack: ExitStack, endpoint: str, own: kvflow.Trust, server: str, words: Iterator[bytes]) -> None:
        self._line = new_line(stack, endpoint, own, server)
        self._line.setsockopt(zmq.SNDTIMEO, 20)
        self._words = words

    def __call__(self) -> None:
        """Send a message."""
        with suppress(zmq.Again):
            self._line.send(next(self._words))


class Strangers:
    """An attack with connections whose key is unknown; libzmq reconnects when they are refused."""

    def __init__(self, stack: ExitStack, endpoint: str, server: str) -> None:
        public, secret = (z85.decode(key).hex() for key in zmq.curve_keypair())
        own = kvflow.Trust(public, secret)
        self._lines = [new_line(stack, endpoint, own, server) for _ in range(STRANGERS)]

    def __call__(self) -> None:
        """Wait while libzmq's thread reconnects."""
        self._lines[0].poll(20)


def new_line(stack: ExitStack, endpoint: str, own: kvflow.Trust, server: str) -> zmq.Socket[bytes]:
    """Open a DEALER socket with CURVE keys."""
    line: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    stack.callback(line.close, 0)
    line.setsockopt(zmq.SNDHWM, 100)
    line.setsockopt(zmq.RECONNECT_IVL, 1)
    line.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(own.secret))
    line.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(own.public))
    line.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(server))
    line.connect(endpoint)
    return line


def noise() -> Iterator[bytes]:
    """Yield random bytes."""
    while True:
        yield os.urandom(200)


def malformed() -> Iterator[bytes]:
    """Yield messages with a valid header and a random body."""
    while True:
        yield HEADER + os.urandom(100)


def grants() -> Iterator[bytes]:
    """Yield well-formed grants for unknown rooms, from a peer without a handshake."""
    for room in itertools.count():
        grant = {
            "type": "grant",
            "room": room,
            "generation": 1,
            "token": 1,
            "ranges": {"kv": (0, 16)},
            "pages": {"kv": bytes(4)},
            "num_decode_ranks": 1,
            "timeout_s": 60.0,
            "progress_s": 60.0,
            "priority": 0,
            "digest": False,
        }
        yield HEADER + msgspec.msgpack.encode(grant)


def attack_of(kind: str, endpoint: str, server: str, own: kvflow.Trust, stack: ExitStack) -> Attack:
    """Return an attack by kind."""
    match kind:
        case "silence":
            return Knocks(endpoint, itertools.repeat(b""), SILENT)
        case "noise":
            return Knocks(endpoint, noise())
        case "no key":
            return Knocks(endpoint, itertools.repeat(GREETING))
        case "wrong key":
            return Strangers(stack, endpoint, server)
        case "insider, malformed":
            return Messages(stack, endpoint, own, server, malformed())
    return Messages(stack, endpoint, own, server, grants())


def attack(options: AttackerOptions, line: Line) -> None:
    """Run attacks as ordered, until the order to exit."""
    own = kvflow.load_trust(options.keys)
    while (order := line.receive())["do"] != "leave":
        is_over = threading.Event()
        listener = threading.Thread(target=lambda stop: (line.receive(), stop.set()), args=(is_over,), daemon=True)
        listener.start()
        with ExitStack() as stack:
            step = attack_of(order["kind"], order["endpoint"], order["server"], own, stack)
            line.report("attacking")
            while not is_over.is_set():
                step()
        listener.join()
        line.report("stopped")


def be_attacked(options: AttackerOptions, line: Line) -> None:
    """Run an idle prefill rank."""

    async def listen() -> None:
        config = kvflow.PrefillConfig(
            instance=options.instance, backend=options.backend, trust=kvflow.load_trust(options.keys)
        )
        pool = make_pool()
        async with kvflow.PrefillRank(config, pool.layout) as rank:
            line.report("listening", endpoint=rank.endpoint)
            while (await next_order(line))["do"] != "leave":
                pass

    anyio.run(listen)


def serve(options: AttackerOptions, line: Line) -> None:
    """Run the role that the options select."""
    (be_attacked if options.backend else attack)(options, line)


def main() -> int:
    """Run the process, and return the exit code."""
    return run_child(serve, AttackerOptions)


if __name__ == "__main__":
    sys.exit(main())
