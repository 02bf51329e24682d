"""Control sockets: the only module that knows ZMQ.

A `Listener` is bound and speaks to many; a `Dialer` is connected to one. Sending never waits: a peer that does not
take its messages fills its queue, and the send that finds it full fails, so that it cannot hold up anybody else.

Sockets are plain ones that never block. Messages that are there are taken without going through the event loop, and
sending is a plain call; `zmq.asyncio` makes futures for both, which costs several times as much. ZMQ's file descriptor
tells of changes, not of messages, so whoever has used the socket looks whether there are messages by now.
"""

import asyncio
import secrets
from typing import Final

import zmq

from kvflow.config import check_address
from kvflow.errors import ConfigError, Unreachable
from kvflow.wire.codec import MAX_MESSAGE_BYTES

__all__ = ["Dialer", "Listener"]

QUEUE_MESSAGES: Final = 10_000
"""Messages queued for one peer; at three messages for a transfer, thousands of transfers."""

LINGER_MS: Final = 500
"""How long the last messages may take to leave after a socket was closed."""

# As numbers: zmq's own flags are enums, and each operation with one costs as much as looking at the socket.
NOBLOCK: Final = int(zmq.NOBLOCK)
NOBLOCK_MORE: Final = NOBLOCK | int(zmq.SNDMORE)
POLLIN: Final = int(zmq.POLLIN)

MESSAGES_AT_ONCE: Final = 16
"""Messages taken before the event loop gets its turn."""


class _Socket:
    def __init__(self, kind: int, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._look)
        self._has_messages: asyncio.Future[None] | None = None
        self._num_at_once = 0
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.IPV6, "[" in address)

    def _send(self, frames: list[bytes], **values: object) -> None:
        try:
            for frame in frames[:-1]:
                self._socket.send(frame, NOBLOCK_MORE)
            self._socket.send(frames[-1], NOBLOCK)
        except zmq.Again as error:
            raise Unreachable("peer does not take its messages", **values) from error
        except zmq.ZMQError as error:
            raise Unreachable("peer is not connected", **values) from error
        finally:
            if self._has_messages is not None:
                self._look()

    async def _receive(self) -> list[bytes]:
        """Wait for a message; one caller at a time. Cancelling the wait loses nothing."""
        while True:
            if self._num_at_once >= MESSAGES_AT_ONCE:
                self._num_at_once = 0
                await asyncio.sleep(0)
            try:
                frames = self._socket.recv_multipart(NOBLOCK)
            except zmq.Again:
                self._num_at_once = 0
                await self._wait()
            else:
                self._num_at_once += 1
                return frames

    async def _wait(self) -> None:
        self._has_messages = self._loop.create_future()
        try:
            self._look()  # what came while nobody waited
            await self._has_messages
        finally:
            self._has_messages = None

    def _look(self) -> None:
        """Wake whoever waits if there are messages; looking also makes the file descriptor quiet again."""
        has_messages = int(self._socket.getsockopt(zmq.EVENTS)) & POLLIN
        if has_messages and self._has_messages is not None and not self._has_messages.done():
            self._has_messages.set_result(None)

    def close(self) -> None:
        """Stop; messages that were sent still leave within a bound.

        The event loop has to forget the descriptor before its number is given to another socket: it would take that one
        for known, and never look at it.
        """
        if self._has_messages is not None:
            self._has_messages.cancel()
        if not self._socket.closed and not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
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
            self.close()
            raise ConfigError("address cannot be bound", bind=bind, detail=str(error)) from error
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        host, _, port = bound.removeprefix("tcp://").rpartition(":")
        self.endpoint = f"tcp://{advertise or host}:{port}"

    async def receive(self) -> tuple[bytes, list[bytes]]:
        """Wait for a message.

        Returns:
            Who sent it (an opaque name of the connection), and its frames; a well-formed message has one.
        """
        frames = await self._receive()
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
            self.close()
            raise ConfigError("address cannot be used", endpoint=endpoint, detail=str(error)) from error

    async def receive(self) -> list[bytes]:
        """Wait for a message; a well-formed one has a single frame."""
        return await self._receive()

    def send(self, payload: bytes) -> None:
        """Queue a message, also while there is no connection.

        Raises:
            Unreachable: The queue is full.
        """
        self._send([payload], endpoint=self.endpoint)
