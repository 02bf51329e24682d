"""Reads messages from sockets, counts what is sent, and closes connections that the gate cuts (`kvflow.gate`).

Receive queues have no limit, because libzmq 4.3.5 aborts the process when a connection with a full queue breaks. A
multipart message has no limit either: libzmq buffers its parts until the last one. So the gate compares the bytes read
from each connection with those that the kernel has received (`control/tcp`). Without its counters nothing is detected.

Dialers send heartbeats, so a live connection to a listener is never silent for long. The kernel measures the silence,
because libzmq 4.3.5 measures it only after a heartbeat, and stops when a message arrives.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

import zmq

from kvflow.control.sockets import NOBLOCK, ZmqSocket
from kvflow.control.tcp import Tcp, is_listener
from kvflow.gate.connections import UnreadBytes, UnsentBytes
from kvflow.gate.verdict import Cut
from kvflow.ports import OnKindRefused

__all__ = ["Intake"]

LISTENER_CHECK_S: Final = 0.25
CONNECTION_CHECK_S: Final = 1.0
"""Longer than for listeners, because there is one such socket per peer, and this process has chosen those peers."""

DROPPED_AT_ONCE: Final = 1_024
"""Message parts that are dropped before yielding to the event loop."""

LOOK_S: Final = 0.005
LOOK_SHARE: Final = 50
"""How often the kernel is asked while messages are read how much is left of the connections, in seconds and as a
multiple of the time that it takes: when a connection has ended, it is too late."""

LOOKED_AT_ONCE: Final = 128
"""Number of connections that the kernel is asked about before yielding to the event loop."""

MAX_BROKEN: Final = 4_096
"""Maximum number of closed connections whose unread messages are recognised."""

SRCFD: Final = int(zmq.SRCFD)


class Intake:
    """Reads the single-part messages of a socket, and watches its connections.

    A connection is closed, and its unread messages are dropped, if the gate cuts it, or it sends a multipart message.
    Nothing is checked while the event loop is blocked.

    Messages are attributed to connections by routing id, because descriptors are reused while messages wait.

    Args:
        zmq_socket: A DEALER with one connection, or a ROUTER.
        tcp: The socket's connections, as the kernel sees them.
        on_refused: Called with the kind and the reason when a connection is cut, or a message rejected.
        take_news: Called before a message is delivered, to handle connection events that precede it.

    Attributes:
        num_bytes: Total size of the messages that were read or dropped.
        unread: The connections that exist and have not been closed from this side, and their unread bytes.
        fd: Descriptor of the connection that the latest message arrived on; -1 if that has ended.
    """

    def __init__(
        self,
        zmq_socket: ZmqSocket,
        tcp: Tcp,
        on_refused: OnKindRefused,
        take_news: Callable[[], None] = lambda: None,
    ) -> None:
        self.fd = -1
        self._socket = zmq_socket
        self._tcp = tcp
        self._on_refused = on_refused
        self._take_news = take_news
        has_ids = is_listener(zmq_socket)
        self._num_ids = int(has_ids)
        self.unread = UnreadBytes(is_listener=has_ids)
        self._unsent = UnsentBytes(self._acked)
        self._check_s = LISTENER_CHECK_S if has_ids else CONNECTION_CHECK_S
        self._loop = asyncio.get_running_loop()
        self._owners: dict[int, bytes] = {}
        self._broken: OrderedDict[bytes, None] = OrderedDict()
        self._nameless: set[int] = set()  # closed before a message of it was read
        self._doubtful: set[int] = set()  # used before by a connection that ended before a message of it was read
        self.num_bytes = 0
        self._name = b""
        self._look_at = 0.0
        self._next_fds: list[int] = []
        self._timer: asyncio.Handle | None = None
        self._is_in_rest = False

    def receive(self) -> list[zmq.Frame]:
        """Read the next message: one part, preceded by a routing id if the socket is a ROUTER.

        If the message has further parts, the second one is included and the others are dropped. If there is no message,
        or `DROPPED_AT_ONCE` message parts were dropped, raise zmq.Again.
        """
        for _ in range(DROPPED_AT_ONCE):
            frames = self._read_message()
            if frames:
                return frames
        raise zmq.Again

    def _read_message(self) -> list[zmq.Frame]:
        """Read a message; empty if a part of a message was dropped. If there is none, raise zmq.Again."""
        try:
            frame = self._socket.recv(NOBLOCK, copy=False)
        except zmq.Again:
            self.unread.ended.clear()  # nothing is left of connections that have ended
            for fd in self._doubtful:
                self._owners.pop(fd, None)
            self._doubtful.clear()
            raise
        if self._is_in_rest:
            self._is_in_rest = frame.more
            self.num_bytes += len(frame)
            return []
        name = frame.bytes if self._num_ids else b""
        if name in self._broken:
            self._is_in_rest = frame.more
            return []
        try:
            fd = int(frame.get(SRCFD))
        except zmq.ZMQError:  # libzmq does not report it with ZMTP 2
            self._is_in_rest = frame.more
            self._on_refused("message_rejected", "it was sent with ZMTP 2 or older")
            return []
        self._take_news()  # the descriptor may belong to a new connection by now
        if fd in self._nameless and name not in self.unread.ended:
            self._broken[name] = None
            self._is_in_rest = frame.more
            return []
        self._name, self.fd = name, self._live(fd, name)
        frames = [frame]
        while frames[-1].more:
            frames.append(self._socket.recv(NOBLOCK, copy=False))
            if len(frames) > self._num_ids + 1:
                self._is_in_rest = frames[-1].more
                self.cut_sender("it sent a multipart message")
                break
        self._count(frames[self._num_ids :])
        return frames

    def _live(self, fd: int, name: bytes) -> int:
        """Return the descriptor of a message's connection; -1 if it has ended, and another one may have its number.

        While that is in doubt, both count as the connection, so that the one that exists is answered.
        """
        owner = self._owners.get(fd)
        if (owner is None or fd in self._doubtful) and fd in self.unread.num_read and name not in self.unread.ended:
            owner = self._owners[fd] = name
        return fd if owner == name else -1

    def _count(self, parts: list[zmq.Frame]) -> None:
        """Count the bytes of a message that was read."""
        num_bytes = 0
        for part in parts:
            num_bytes += self._tcp.bytes_on_wire(len(part))
        self.num_bytes += num_bytes
        if self.fd in self.unread.num_read:
            self.unread.note_read(self.fd, num_bytes)
            if self._loop.time() >= self._look_at:
                self._look_at_some()
        elif self._name in self.unread.ended:
            self.unread.ended[self._name] = max(self.unread.ended[self._name] - num_bytes, 0)

    def watch(self, fd: int) -> None:
        """Watch a new connection, by its descriptor."""
        self.forget(fd)
        self._nameless.discard(fd)
        self.unread.watch(fd)
        self._unsent.watch(fd)
        if self._timer is None:
            self._timer = self._loop.call_later(self._check_s, self._check)

    def may_send(self, fd: int) -> bool:
        """Return whether another message may be sent over a connection. Closes those whose peers do not read."""
        self._carry_out(self._unsent.excessive(fd))
        return fd in self._unsent.waiting

    def note_sent(self, fd: int, length: int) -> None:
        """Record that a message of `length` bytes was queued for a connection."""
        self._unsent.note_sent(fd, self._tcp.bytes_on_wire(length))

    def forget(self, fd: int) -> int:
        """Stop watching a connection, which has ended. What it has sent still counts until it is read.

        Return how many bytes of it are unread, as far as known.
        """
        name = self._owners.pop(fd, None)
        if fd in self.unread.num_read and name is None:
            self._doubtful.add(fd)
        left = self.unread.forget(fd)
        self._unsent.forget(fd)
        if name is not None and name not in self._broken:
            self.unread.ended[name] = left
        return left

    def cut(self, fd: int, why: str) -> None:
        """Close a connection, and drop its unread messages."""
        if fd in self.unread.num_read and self._tcp.shut(fd):
            name = self._owners.get(fd)
            if name is None:
                self._nameless.add(fd)
            self._break(name, why)
            self.unread.keep_left(fd, self.forget(fd))

    def _carry_out(self, cuts: Sequence[Cut]) -> None:
        for one, why in cuts:
            if isinstance(one, int):
                self.cut(one, why)
            else:
                self._break(one, why)

    def cut_sender(self, why: str) -> None:
        """Close the connection of the latest message, and drop its unread messages. It may have ended."""
        if self.fd in self.unread.num_read:
            self.cut(self.fd, why)
        elif self._name not in self._broken:
            self._break(self._name, why)

    def _break(self, name: bytes | None, why: str) -> None:
        if name is not None:
            self._broken[name] = None
            self.unread.ended.pop(name, None)
            while len(self._broken) > MAX_BROKEN:
                self._broken.popitem(last=False)
        self._on_refused("connection_cut", why)

    def close(self) -> None:
        """Stop watching all connections."""
        if self._timer is not None:
            self._timer.cancel()
        for fd in list(self.unread.num_read):
            self.unread.forget(fd)

    def _check(self) -> None:
        self._check_some(list(self.unread.num_read))

    def _check_some(self, fds: list[int]) -> None:
        """Look at some connections, and at the others in later turns; then close those over their limits."""
        for fd in fds[:LOOKED_AT_ONCE]:
            if fd in self.unread.num_read:
                self.unread.allow_commands(fd)
                if self._note_unread(fd):
                    self._tcp.shut(fd)  # libzmq then reports its end
        if len(fds) > LOOKED_AT_ONCE:
            self._timer = self._loop.call_soon(self._check_some, fds[LOOKED_AT_ONCE:])
            return
        self._carry_out(self.unread.excessive())
        is_needed = self.unread.num_read or self.unread.ended
        self._timer = self._loop.call_later(self._check_s, self._check) if is_needed else None

    def _look_at_some(self) -> None:
        """Look at the connections whose turn it is, and note when the next ones have theirs."""
        start = self._loop.time()
        if not self._next_fds:
            self._next_fds = list(self.unread.num_read)
        now, self._next_fds = self._next_fds[:LOOKED_AT_ONCE], self._next_fds[LOOKED_AT_ONCE:]
        for fd in now:
            if fd in self.unread.num_read:
                self._note_unread(fd)
        end = self._loop.time()
        self._look_at = end + max(LOOK_S, LOOK_SHARE * (end - start))

    def _note_unread(self, fd: int) -> bool:
        """Note how many received bytes of a connection are unread; return whether it has been silent for too long."""
        counts = self._tcp.counts(fd)
        return counts is not None and self.unread.note_received(fd, counts.received, counts.silence_ms)

    def _acked(self, fd: int) -> int | None:
        counts = self._tcp.counts(fd)
        return None if counts is None else counts.acked
