"""Parses messages in order without blocking the event loop: long ones in a thread.

A thread that parses a long message still competes for the GIL. But only one message is parsed at a time, and the event
loop runs in between.
"""

import functools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import anyio
import anyio.lowlevel

from kvflow.errors import RemoteProtocolError, ThreadShortage
from kvflow.gate.rates import QueuedMessages
from kvflow.gate.sizes import Unread
from kvflow.observe.trace import AnomalyLog
from kvflow.ports import Ports
from kvflow.wire.codec import Reader
from kvflow.wire.messages import Message

__all__ = ["OrderedReading", "ReadingContext"]

Read = TypeVar("Read", bound=Message)
Result = TypeVar("Result")


@dataclass(frozen=True)
class ReadingContext:
    """What the connections of a rank share, for example to parse long messages one at a time.

    Attributes:
        start_task: Starts a task that ends with the rank at the latest.
        turn: Lets one message be parsed at a time, in first-in, first-out order.
    """

    ports: Ports
    anomalies: AnomalyLog
    start_task: Callable[..., object]
    turn: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(1), kw_only=True)

    async def in_thread(self, function: Callable[[], Result]) -> Result:
        """Call a function in a worker thread, or on the event loop if no thread can be started."""
        result: Awaitable[Result] = self.ports.run_in_thread(function)
        try:
            return await result
        except ThreadShortage as error:
            self.anomalies.count("thread_shortage", detail=str(error))
            return function()


class OrderedReading(Generic[Read]):
    """Parses the messages of many connections, and delivers those of each connection in order of arrival.

    A short message is parsed immediately. A long one is parsed in a thread, and later messages of its connection are
    queued behind it. Only one long message is parsed at a time, and principals take turns.

    Args:
        principal_of: Returns the principal of a connection.
        on_message: Called with a connection, its next message and the message's size in bytes.
        on_refused: Called with a connection, the reason why its next message is malformed, and its size.
    """

    def __init__(
        self,
        reader: Reader[Read],
        context: ReadingContext,
        principal_of: Callable[[bytes], str],
        on_message: Callable[[bytes, Read, int], None],
        on_refused: Callable[[bytes, RemoteProtocolError, int], None],
    ) -> None:
        self._reader = reader
        self._context = context
        self._principal_of = principal_of
        self._on_message = on_message
        self._on_refused = on_refused
        self._lines: dict[str, QueuedMessages] = {}

    def parse_message(self, connection: bytes, unread: Unread) -> bool:
        """Parse a message, now or later; return False if it is dropped, because too many are queued.

        Exceptions of the callbacks propagate if it is parsed now.
        """
        if not self._lines and not unread.is_long:  # the common case
            self._read(connection, unread)
            return True
        principal = self._principal_of(connection)
        line = self._lines.get(principal)
        if not unread.is_long and (line is None or not line.connections[connection]):
            self._read(connection, unread)
            return True
        if line is None:
            line = self._lines[principal] = QueuedMessages()
            self._context.start_task(self._work_off, principal, line)
        verdict = line.add_message(connection, unread)
        return self._context.anomalies.carry_out(verdict, num_bytes=line.num_bytes)

    def _read(self, connection: bytes, unread: Unread) -> None:
        self._deliver(connection, unread, self._parse(unread))

    def _parse(self, unread: Unread) -> Read | RemoteProtocolError:
        try:
            return self._reader.read(unread)
        except RemoteProtocolError as error:
            return error

    def _deliver(self, connection: bytes, unread: Unread, parsed: Read | RemoteProtocolError) -> None:
        if isinstance(parsed, RemoteProtocolError):
            self._on_refused(connection, parsed, len(unread.data))
        else:
            self._on_message(connection, parsed, len(unread.data))

    async def _work_off(self, principal: str, line: QueuedMessages) -> None:
        while line.waiting:
            connection, unread = line.waiting[0]
            with suppress(RemoteProtocolError):  # a callback wants to close the connection; the next message does so
                if unread.is_long:
                    async with self._context.turn:
                        parsed = await self._context.in_thread(functools.partial(self._parse, unread))
                    self._deliver(connection, unread, parsed)
                else:
                    self._read(connection, unread)
            line.drop_first()
            await anyio.lowlevel.checkpoint()
        del self._lines[principal]
