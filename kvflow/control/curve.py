"""CURVE on ZMQ sockets: keys, and who may connect to a listener.

libzmq asks the ZAP handler of the context (RFC 27) whether a key may connect. A context has one handler, so each
listener has its own context, and its handler runs on the event loop. Without a handler no peer can connect. A context
is never terminated, because that blocks; the next listener reuses it.
"""

import asyncio
import itertools
import os
import struct
from collections.abc import Callable, Sequence
from typing import Final

import zmq
from zmq.utils import z85

from kvflow.control.sockets import NOBLOCK, Context, Frames, Inbox, ZmqSocket, new_context, sockets
from kvflow.errors import ConfigError
from kvflow.gate.identity import KeyGate
from kvflow.trust import Trust

__all__ = ["ZapAuthenticator", "be_client", "be_server", "new_keys", "public_key_of"]

IDENTITY: Final = b"\x08Identity"
"""A property of the ZMTP handshake. In the ZAP reply it overrides the routing id that the client has chosen."""

ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
ZAP_VERSION: Final = b"1.0"
DOMAIN: Final = b"kvflow"

REFUSAL: Final = [b"400", b"", b"", b""]

LISTENER_HANDSHAKE_MS: Final = 5_000
"""Handshake timeout of listeners. It is longer than that of dialers, which can thus distinguish a listener that refuses
them from a busy one."""


def new_keys() -> tuple[str, str]:
    """Create a key pair, and return the public and the secret key."""
    _check_curve()
    public, secret = zmq.curve_keypair()
    return z85.decode(public).hex(), z85.decode(secret).hex()


def public_key_of(secret: str) -> str:
    """Return the public key of a secret key."""
    _check_curve()
    return z85.decode(zmq.curve_public(z85.encode(bytes.fromhex(secret)))).hex()


def _check_curve() -> None:
    if not zmq.has("curve"):
        raise ConfigError("this build of libzmq has no CURVE; install pyzmq from a wheel")


def be_server(socket: ZmqSocket, trust: Trust) -> None:
    """Make a socket accept only authenticated connections, from the next `bind` on."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(trust.secret))
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler, libzmq would let any key in
    socket.setsockopt(zmq.HANDSHAKE_IVL, LISTENER_HANDSHAKE_MS)


def be_client(socket: ZmqSocket, trust: Trust, server: str) -> None:
    """Make a socket use this process's keys and accept only the given server key, from the next `connect` on."""
    socket.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(trust.secret))
    socket.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(trust.public))
    socket.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(server))


_free_contexts: Final[list[Context]] = []
"""Contexts of listeners that have been closed. A forked child has none of their threads."""

os.register_at_fork(after_in_child=_free_contexts.clear)


class ZapAuthenticator:
    """A ZAP handler that decides on the event loop which keys may connect, and numbers the connections.

    A client may choose a routing id that is already in use, which can abort the process (docs/decisions/0051). So the
    reply gives each connection a unique one.

    Args:
        trust: The accepted keys.
        on_refused: Called with the reason of each refusal.

    Attributes:
        context: Context for the listener's socket.
        gate: Decides which keys may connect.
    """

    def __init__(self, trust: Trust, on_refused: Callable[[str], None]) -> None:
        self.gate = KeyGate(trust)
        self.context = _free_contexts.pop() if _free_contexts else new_context()
        self._on_refused = on_refused
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._socket = sockets.make(zmq.REP, self.context)
        try:
            self._socket.bind(ZAP_ADDRESS)
        except zmq.ZMQError:
            self._socket.close(0)
            raise
        self._inbox = Inbox(self._socket, self._answer)

    def keep_out(self, key: str) -> None:
        """Refuse a key for the next second."""
        self.gate.lock_out(key, self._loop.time())

    def close(self) -> None:
        """Stop answering: no peer can connect any more. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._socket.unbind(ZAP_ADDRESS)  # synchronous, whereas libzmq closes sockets in the background
        self._inbox.close(0)
        _free_contexts.append(self.context)

    def _answer(self, request: Frames) -> None:
        number = request[1] if len(request) > 1 else b""
        key = self._key(request)
        answer = [b"200", b"", key.encode(), IDENTITY + struct.pack("!IQ", 8, next(self._numbers))]
        if denied := self.gate.denial(key, self._loop.time()):
            answer = REFUSAL
            self._on_refused(denied)
        self._socket.send_multipart([ZAP_VERSION, number, *answer], NOBLOCK)

    @staticmethod
    def _key(request: Sequence[bytes]) -> str:
        """Return the key that the client has proved to own; empty if there is none."""
        if len(request) != 7 or (request[0], request[5]) != (ZAP_VERSION, b"CURVE"):
            return ""
        return request[6].hex()
