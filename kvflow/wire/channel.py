"""Control sockets: the only module that knows ZMQ.

A `Listener` is bound and speaks to many; a `Dialer` is connected to one. Sending never waits: a peer that does not
take its messages fills its queue, and the send that finds it full fails, so that it cannot hold up anybody else.
"""

import asyncio
import secrets
from typing import Final

import zmq
import zmq.asyncio

from kvflow.config import check_address
from kvflow.errors import ConfigError, Unreachable
from kvflow.wire.codec import MAX_MESSAGE_BYTES

__all__ = ["Dialer", "Listener"]

QUEUE_MESSAGES: Final = 10_000
"""Messages queued for one peer; at three messages for a transfer, thousands of transfers."""

LINGER_MS: Final = 500
"""How long the last messages may take to leave after a socket was closed."""


class _Socket:
    def __init__(self, kind: int, address: str) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(kind)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.IPV6, "[" in address)

    def _send(self, frames: list[bytes], **values: object) -> None:
        sent = asyncio.ensure_future(self._socket.send_multipart(frames, flags=zmq.NOBLOCK))
        error = sent.exception()  # with NOBLOCK the future is done already
        if isinstance(error, zmq.Again):
            raise Unreachable("peer does not take its messages", **values) from error
        if error is not None:
            raise Unreachable("peer is not connected", **values) from error

    def close(self) -> None:
        """Stop; messages that were sent still leave within a bound."""
        self._socket.close()


class Listener(_Socket):
    """A bound socket.

    Args:
        bind: "tcp://host:port"; port 0 takes a free one.
        advertise: Host to give to others, if not the one bound.

    Attributes:
        endpoint: Address under which others reach it.

    Raises:
        ConfigError: The address is malformed or cannot be bound.
    """

    def __init__(self, bind: str, advertise: str | None = None) -> None:
        check_address("bind", bind)
        super().__init__(zmq.ROUTER, bind)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError("address cannot be bound", bind=bind, detail=str(error)) from error
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        host, _, port = bound.removeprefix("tcp://").rpartition(":")
        self.endpoint = f"tcp://{advertise or host}:{port}"

    async def receive(self) -> tuple[bytes, list[bytes]]:
        """Wait for a message.

        Returns:
            Who sent it (an opaque name of the connection), and its frames; a well-formed message has one.
        """
        frames = await self._socket.recv_multipart()
        return frames[0], frames[1:]

    def send(self, to: bytes, payload: bytes) -> None:
        """Queue a message.

        Raises:
            Unreachable: That connection is gone, or its queue is full.
        """
        self._send([to, payload], connection=to.hex())


class Dialer(_Socket):
    """A socket connected to one `Listener`; it connects in the background, and again after a break.

    Raises:
        ConfigError: The address is malformed or names no host.
    """

    def __init__(self, endpoint: str) -> None:
        check_address("endpoint", endpoint)
        super().__init__(zmq.DEALER, endpoint)
        self.endpoint = endpoint
        # An unguessable name of our own keeps the connection's identity over a break of the network.
        self._socket.setsockopt(zmq.ROUTING_ID, b"k" + secrets.token_bytes(16))
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError("address cannot be used", endpoint=endpoint, detail=str(error)) from error

    async def receive(self) -> list[bytes]:
        """Wait for a message; a well-formed one has a single frame."""
        frames: list[bytes] = await self._socket.recv_multipart()
        return frames

    def send(self, payload: bytes) -> None:
        """Queue a message, also while there is no connection.

        Raises:
            Unreachable: The queue is full.
        """
        self._send([payload], endpoint=self.endpoint)
