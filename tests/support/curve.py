"""CurveZMQ over a plain TCP socket, for what libzmq never does with a valid key, such as damaged messages.

It uses the libsodium that the wheel of pyzmq bundles.
"""

import ctypes
import ctypes.util
import itertools
import os
import socket
from functools import cache
from pathlib import Path
from typing import Final

import zmq

from kvflow.trust import Trust
from tests.support.zmtp import COMMAND, Wire, frame, properties

__all__ = ["CurveClient", "CurveEnd", "CurveListener"]

GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\x00")
GREETING_BYTES: Final = 64
KEY: Final = 32
AUTHENTICATOR: Final = 16


@cache
def _sodium() -> ctypes.CDLL:
    beside = next(Path(zmq.__file__).parents[1].glob("pyzmq.libs/libsodium*"), None)
    return ctypes.CDLL(ctypes.util.find_library("sodium") if beside is None else str(beside))


def _keypair() -> tuple[bytes, bytes]:
    public, secret = ctypes.create_string_buffer(KEY), ctypes.create_string_buffer(KEY)
    _sodium().crypto_box_keypair(public, secret)
    return public.raw, secret.raw


def _box(text: bytes, nonce: bytes, public: bytes, secret: bytes) -> bytes:
    boxed = ctypes.create_string_buffer(len(text) + AUTHENTICATOR)
    length = ctypes.c_ulonglong(len(text))
    assert _sodium().crypto_box_easy(boxed, text, length, nonce, public, secret) == 0
    return boxed.raw


def _unbox(boxed: bytes, nonce: bytes, public: bytes, secret: bytes) -> bytes:
    text = ctypes.create_string_buffer(len(boxed) - AUTHENTICATOR)
    length = ctypes.c_ulonglong(len(boxed))
    assert _sodium().crypto_box_open_easy(text, boxed, length, nonce, public, secret) == 0
    return text.raw


class CurveEnd(Wire):
    """A connection after its handshake, which can send anything."""

    _peer: bytes
    _own: bytes
    _prefix: bytes
    _numbers: "itertools.count[int]"

    def say(self, text: bytes, *, number: int | None = None, damage: int = 0) -> bool:
        """Send a message; return whether the connection was still open.

        Args:
            text: Only part of the message.
            number: Sequence number; the next one if None.
            damage: Value added to the last byte.
        """
        short = (next(self._numbers) if number is None else number).to_bytes(8)
        boxed = _box(b"\x00" + text, self._prefix + short, self._peer, self._own)
        return self.send(frame(b"\x07MESSAGE" + short + boxed[:-1] + bytes([(boxed[-1] + damage) % 256])))


class CurveClient(CurveEnd):
    """A connection to a listener with keys.

    Args:
        endpoint: Endpoint of the listener.
        own: Keys of the client.
        server: Public key of the listener.
        identity: Routing id that the client requests.
    """

    def __init__(self, endpoint: str, own: Trust, server: str, *, identity: bytes = b"") -> None:
        super().__init__(endpoint)
        self.line.sendall(GREETING + bytes(GREETING_BYTES - len(GREETING)))
        self.read(GREETING_BYTES)
        listener = bytes.fromhex(server)
        public, self._own = _keypair()
        self._numbers = itertools.count(1)
        self._prefix = b"CurveZMQMESSAGEC"
        short = next(self._numbers).to_bytes(8)
        boxed = _box(bytes(64), b"CurveZMQHELLO---" + short, listener, self._own)
        self.line.sendall(frame(b"\x05HELLO\x01\x00" + bytes(72) + public + short + boxed, COMMAND))
        welcome = self.read_frame()
        opened = _unbox(welcome[24:], b"WELCOME-" + welcome[8:24], listener, self._own)
        self._peer, cookie = opened[:KEY], opened[KEY:]
        random = os.urandom(16)
        vouch = _box(public + listener, b"VOUCH---" + random, self._peer, bytes.fromhex(own.secret))
        told = bytes.fromhex(own.public) + random + vouch + properties(b"DEALER", identity)
        short = next(self._numbers).to_bytes(8)
        boxed = _box(told, b"CurveZMQINITIATE" + short, self._peer, self._own)
        self.line.sendall(frame(b"\x08INITIATE" + cookie + short + boxed, COMMAND))
        assert self.read_frame().startswith(b"\x05READY")


class CurveListener:
    """A listener with keys, which accepts connections with any client key."""

    def __init__(self, own: Trust) -> None:
        self._own = bytes.fromhex(own.secret)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.settimeout(10.0)
        self.endpoint = f"tcp://127.0.0.1:{self._socket.getsockname()[1]}"

    def accept(self) -> CurveEnd:
        """Accept the next connection."""
        end = CurveEnd(self._socket.accept()[0])
        end.line.sendall(GREETING + b"\x01" + bytes(GREETING_BYTES - len(GREETING) - 1))
        end.read(GREETING_BYTES)
        client = end.read_frame()[80:112]
        public, end._own = _keypair()
        random = os.urandom(16)
        welcome = _box(public + bytes(96), b"WELCOME-" + random, client, self._own)
        end.line.sendall(frame(b"\x07WELCOME" + random + welcome, COMMAND))
        end.read_frame()
        end._peer, end._prefix, end._numbers = client, b"CurveZMQMESSAGES", itertools.count(1)
        short = next(end._numbers).to_bytes(8)
        boxed = _box(properties(b"ROUTER"), b"CurveZMQREADY---" + short, client, end._own)
        end.line.sendall(frame(b"\x05READY" + short + boxed, COMMAND))
        return end

    def close(self) -> None:
        self._socket.close()
