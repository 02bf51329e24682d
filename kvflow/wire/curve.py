"""CURVE on ZMQ sockets: keys, and who may connect to a listener.

libzmq asks a handler of the context whether a key may connect (ZAP, RFC 27). One context has one handler, so each
listener has a context of its own, and its handler runs on the event loop. If the handler is gone, nobody can connect.
A context is never ended, since that waits; the next listener takes it.
"""

import asyncio
import itertools
import os
import struct
from collections.abc import Callable, Sequence
from typing import Final

import zmq
from zmq.utils import z85

from kvflow.errors import ConfigError
from kvflow.trust import Trust, short
from kvflow.wire.sockets import NOBLOCK, Context, Frames, Inbox, ZmqSocket, new_context, sockets

__all__ = ["ZapAuthenticator", "be_client", "be_server", "new_keys", "public_key_of"]

IDENTITY: Final = b"\x08Identity"
"""A property of ZMTP's handshake. In the answer to libzmq's question it replaces the one that the client has given."""

ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
ZAP_VERSION: Final = b"1.0"
DOMAIN: Final = b"kvflow"

REFUSAL: Final = [b"400", b"", b"", b""]

LISTENER_HANDSHAKE_MS: Final = 5_000
"""How long a handshake may take as the listener sees it. It is longer than for who connects, who thus knows a listener
that refuses from one that is busy."""

KEPT_OUT_S: Final = 1.0


def new_keys() -> tuple[str, str]:
    """Make a public key and its secret.

    Raises:
        ConfigError: This build of libzmq has no CURVE.
    """
    if not zmq.has("curve"):
        raise ConfigError("this build of libzmq has no CURVE; install pyzmq from a wheel")
    public, secret = zmq.curve_keypair()
    return z85.decode(public).hex(), z85.decode(secret).hex()


def public_key_of(secret: str) -> str:
    """Return the public key that belongs to a secret.

    Raises:
        ConfigError: As in `new_keys`.
    """
    if not zmq.has("curve"):
        raise ConfigError("this build of libzmq has no CURVE; install pyzmq from a wheel")
    return z85.decode(zmq.curve_public(z85.encode(bytes.fromhex(secret)))).hex()


def be_server(socket: ZmqSocket, trust: Trust) -> None:
    """Let a socket take connections with keys only, from the next `bind` on."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(trust.secret))
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler, libzmq would let any key in
    socket.setsockopt(zmq.HANDSHAKE_IVL, LISTENER_HANDSHAKE_MS)


def be_client(socket: ZmqSocket, trust: Trust, server: str) -> None:
    """Let a socket connect with own keys to who has the given one, from the next `connect` on."""
    socket.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(trust.secret))
    socket.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(trust.public))
    socket.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(server))


class _Contexts:
    """Contexts of listeners; those that none has are kept for the next one."""

    def __init__(self) -> None:
        self._free: list[Context] = []
        os.register_at_fork(after_in_child=self._forget)

    def take(self) -> Context:
        return self._free.pop() if self._free else new_context()

    def give_back(self, context: Context) -> None:
        self._free.append(context)

    def _forget(self) -> None:
        self._free = []


_contexts: Final = _Contexts()


class ZapAuthenticator:
    """Answers libzmq's question who may connect to a listener, on the event loop, and numbers the connections.

    A client may give a routing id of its own to the socket, such as one that is taken, for which libzmq is not made
    (docs/decisions/0051). The answer gives each connection another one.

    Args:
        trust: Whose keys are known; may be replaced at any time.
        on_refused: Told of each key that is refused.

    Attributes:
        context: For the listener's socket.

    Raises:
        zmq.ZMQError: This process has no descriptors left.
    """

    def __init__(self, trust: Trust, on_refused: Callable[[str], None]) -> None:
        self.trust = trust
        self.context = _contexts.take()
        self._on_refused = on_refused
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._kept_out: dict[str, float] = {}
        self._numbers = itertools.count()
        self._socket = sockets.make(zmq.REP, self.context)
        try:
            self._socket.bind(ZAP_ADDRESS)
        except zmq.ZMQError:
            self._socket.close(0)
            raise
        self._inbox = Inbox(self._socket, self._answer)

    def keep_out(self, key: str) -> None:
        """Refuse a key for a second."""
        self._kept_out[key] = self._loop.time() + KEPT_OUT_S

    def close(self) -> None:
        """Let nobody in any more. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._socket.unbind(ZAP_ADDRESS)  # at once, while closing is left to libzmq
        self._inbox.close(0)
        _contexts.give_back(self.context)

    def _answer(self, request: Frames) -> None:
        number = request[1] if len(request) > 1 else b""
        key = self._key(request)
        if self._kept_out.get(key, 0.0) > self._loop.time():
            answer = REFUSAL
            self._on_refused(f"key {short(key)} is locked out for a second")
        elif self.trust.knows(key):
            answer = [b"200", b"", key.encode(), IDENTITY + struct.pack("!IQ", 8, next(self._numbers))]
        else:
            answer = REFUSAL
            self._on_refused(f"key {short(key)} is not listed" if key else "handshake without a key")
        self._socket.send_multipart([ZAP_VERSION, number, *answer], NOBLOCK)

    @staticmethod
    def _key(request: Sequence[bytes]) -> str:
        """Return the key that a handshake has proved; empty if it has none."""
        if len(request) != 7 or (request[0], request[5]) != (ZAP_VERSION, b"CURVE"):
            return ""
        return request[6].hex()
