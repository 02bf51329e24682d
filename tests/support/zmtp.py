"""ZMTP over a plain TCP socket, for what libzmq never does, such as messages without an end."""

import socket
import struct
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

__all__ = ["COMMAND", "MORE", "RawZmtp", "Wire", "frame", "properties"]

MORE: Final = 1
LONG: Final = 2
COMMAND: Final = 4
GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\x00") + bytes(32)


def frame(body: bytes, flags: int = 0) -> bytes:
    """Return a frame: flags, length and body."""
    if len(body) > 255:
        return bytes([flags | LONG]) + len(body).to_bytes(8, "big") + body
    return bytes([flags, len(body)]) + body


def properties(kind: bytes, identity: bytes = b"") -> bytes:
    """Return the properties that a socket type sends in a handshake."""
    return _property(b"Socket-Type", kind) + _property(b"Identity", identity)


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


class Wire:
    """A TCP connection, accepted or opened to an endpoint."""

    def __init__(self, other_end: str | socket.socket) -> None:
        if isinstance(other_end, str):
            host, port = other_end.removeprefix("tcp://").split(":")
            other_end = socket.create_connection((host, int(port)))
        self.line = other_end
        self.line.settimeout(5.0)

    def read(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            part = self.line.recv(num_bytes - len(data))
            if not part:
                raise ConnectionResetError
            data += part
        return data

    def read_frame(self) -> bytes:
        """Return the body of the next frame."""
        (flags,) = self.read(1)
        return self.read(int.from_bytes(self.read(8 if flags & LONG else 1)))

    def send(self, data: bytes) -> bool:
        """Send bytes; return whether the connection was still open."""
        try:
            self.line.sendall(data)
        except OSError:
            return False
        return True

    def reset(self) -> None:
        """Reset the connection, as the kernel does for a killed process with unread data."""
        self.line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.line.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.line.close()


class RawZmtp(Wire):
    """A connection without keys after its handshake, as a DEALER, or as a ROUTER if it was accepted."""

    def __init__(self, other_end: str | socket.socket, *, kind: bytes = b"DEALER", identity: bytes = b"") -> None:
        super().__init__(other_end)
        with suppress(OSError):  # a listener with keys closes the connection
            self.line.sendall(GREETING)
            self.read(len(GREETING))
            self.line.sendall(frame(b"\x05READY" + properties(kind, identity), COMMAND))
            self.read_frame()  # later frames must not arrive during the handshake

    @classmethod
    def accepted(cls, listener: socket.socket) -> Self:
        """Accept the next connection of a listener."""
        return cls(listener.accept()[0], kind=b"ROUTER")
