"""Parses messages in order without blocking the event loop: long ones in a thread.

Because of the GIL a long message still takes time from everything else. But only one is parsed at a time, and the event
loop runs in between.
"""

from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import anyio
import anyio.lowlevel

from kvflow.errors import RemoteProtocolError, ThreadShortage
from kvflow.ports import Ports
from kvflow.wire.codec import Reader, Unread
from kvflow.wire.messages import Message

__all__ = ["MAX_WAITING_BYTES", "OrderedReading", "ReadingContext"]

MAX_WAITING_BYTES: Final = 16 * 2**20
"""Of one principal: long messages, and what has come behind them."""

OVERHEAD_BYTES: Final = 256
"""Of each message that waits."""

Read = TypeVar("Read", bound=Message)


@dataclass(frozen=True)
class ReadingContext:
    """What a rank reads long messages with: one at a time, whatever connections there are.

    Attributes:
        ports: Have threads.
        count: Counts what was ignored, by its kind, with values that say more.
        start_task: Starts a task that lives no longer than the rank.
        turn: To be taken in order.
    """

    ports: Ports
    count: Callable[..., None]
    start_task: Callable[..., object]
    turn: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(1))


class _Line:
    """Messages of one principal that wait.

    Attributes:
        waiting: With their connections; the first one is being read.
        connections: How many there are of each connection.
        num_bytes: What they take together.
    """

    def __init__(self) -> None:
        self.waiting: deque[tuple[bytes, Unread]] = deque()
        self.connections: Counter[bytes] = Counter()
        self.num_bytes = 0

    def put(self, connection: bytes, unread: Unread) -> None:
        self.waiting.append((connection, unread))
        self.connections[connection] += 1
        self.num_bytes += len(unread.data) + OVERHEAD_BYTES

    def drop_first(self) -> None:
        connection, unread = self.waiting.popleft()
        self.connections[connection] -= 1
        self.num_bytes -= len(unread.data) + OVERHEAD_BYTES


class OrderedReading(Generic[Read]):
    """Reads what comes over many connections, and passes messages of each on in the order in which they came.

    Short ones are read at once. A long one is read in a thread, and what comes over its connection meanwhile waits for
    it. One is read at a time, and principals take turns.

    Args:
        reader: Reads.
        context: Has threads and tasks.
        principal_of: Says who is at the other end of a connection.
        on_message: Takes a connection, its next message, and the bytes of that.
        on_refused: Takes a connection, why its next message is none or is dropped, and the bytes of that.
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
        self._lines: dict[str, _Line] = {}

    def take(self, connection: bytes, unread: Unread) -> None:
        """Take a message. Raises what the callbacks raise, if it is read at once."""
        if not self._lines and not unread.is_long:  # as it is nearly always
            self._read(connection, unread)
            return
        principal = self._principal_of(connection)
        line = self._lines.get(principal)
        if not unread.is_long and (line is None or not line.connections[connection]):
            self._read(connection, unread)
            return
        if line is None:
            line = self._lines[principal] = _Line()
            self._context.start_task(self._work_off, principal, line)
        if line.num_bytes + len(unread.data) > MAX_WAITING_BYTES:
            error = RemoteProtocolError("too much waits behind long messages", num_bytes=line.num_bytes)
            self._on_refused(connection, error, len(unread.data))
            return
        line.put(connection, unread)

    def _read(self, connection: bytes, unread: Unread) -> None:
        try:
            message = self._reader.read(unread)
        except RemoteProtocolError as error:
            self._on_refused(connection, error, len(unread.data))
        else:
            self._on_message(connection, message, len(unread.data))

    async def _work_off(self, principal: str, line: _Line) -> None:
        while line.waiting:
            connection, unread = line.waiting[0]
            with suppress(RemoteProtocolError):  # says to break the connection; its next message does
                if unread.is_long:
                    await self._read_beside(connection, unread)
                else:
                    self._read(connection, unread)
            line.drop_first()
            await anyio.lowlevel.checkpoint()
        del self._lines[principal]

    async def _read_beside(self, connection: bytes, unread: Unread) -> None:
        try:
            async with self._context.turn:
                message = await self._read_in_thread(unread)
        except RemoteProtocolError as error:
            self._on_refused(connection, error, len(unread.data))
        else:
            self._on_message(connection, message, len(unread.data))

    async def _read_in_thread(self, unread: Unread) -> Read:
        """Read beside the event loop, or on it if no thread can be had.

        Raises:
            RemoteProtocolError: It is malformed.
        """
        result: Awaitable[Read] = self._context.ports.run_in_thread(lambda: self._reader.read(unread))
        try:
            return await result
        except ThreadShortage as error:
            self._context.count("thread_shortage", detail=str(error))
            return self._reader.read(unread)
