"""The socket of a rank, served in callbacks on its event loop: no task, no thread, nothing while nobody asks.

A connection is for one request. Everything is bounded: connections, the length of a request, the length of an answer,
and how long a client may take.
"""

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final
from weakref import WeakSet

from kvflow.admin.messages import MAX_REQUEST_BYTES
from kvflow.admin.places import ENDING, choose_directory, remove_stale_sockets

__all__ = ["AdminSocket"]

MAX_CLIENTS: Final = 16
BACKLOG: Final = 64
CLIENT_S: Final = 5.0
"""Time for a client to send its request and to read the answer, in seconds."""

RETRY_S: Final = 1.0
"""When connections are accepted again after this process had no descriptor for one, in seconds."""

TOO_LONG: Final = b'{"v":1,"error":"request is too long"}\n'

SHORTAGES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class AdminSocket:
    """A Unix socket on which this user, and root, can ask one rank.

    Args:
        setting: The directory for it, see `choose_directory`.
        name: Distinguishes it from all others of this process.
        answer: Called with each request, a line; returns the answer, also a line.

    Raises:
        OSError: It cannot be made.

    Attributes:
        path: Where it is.
    """

    def __init__(self, setting: str | os.PathLike[str] | None, name: str, answer: Callable[[bytes], bytes]) -> None:
        directory = choose_directory(setting)
        self.path: Path = directory / f"{os.getpid()}-{name}{ENDING}"
        remove_stale_sockets(directory, {admin.path for admin in _open})  # to accept would take descriptors here
        self._answer = answer
        self._loop = asyncio.get_running_loop()
        self._clients: set[_Client] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._listener = _listen(self.path)
        self._loop.add_reader(self._listener, self._accept)
        _open.add(self)

    def _accept(self) -> None:
        """Accept one connection in a turn of the event loop."""
        try:
            accepted = self._listener.accept()[0]
        except OSError as error:
            if error.errno in SHORTAGES:
                self._loop.remove_reader(self._listener)
                self._retry = self._loop.call_later(RETRY_S, self._loop.add_reader, self._listener, self._accept)
            return
        if len(self._clients) < MAX_CLIENTS:
            self._clients.add(_Client(accepted, self._loop, self._answer, self._clients.discard))
        else:
            accepted.close()

    def close(self) -> None:
        """Remove the socket, and disconnect everybody."""
        if self not in _open:  # in a forked child, the rank is the parent's
            return
        _open.discard(self)
        with suppress(OSError):
            self.path.unlink()
        if self._retry is not None:
            self._retry.cancel()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._listener)
        self._listener.close()
        for client in list(self._clients):
            client.close()

    def abandon(self) -> None:
        """Close the descriptors in a forked child; the rank is the parent's."""
        self._listener.close()
        for client in self._clients:
            client.abandon()


class _Client:
    """One connection: a request, then an answer."""

    def __init__(
        self,
        accepted: socket.socket,
        loop: asyncio.AbstractEventLoop,
        answer: Callable[[bytes], bytes],
        on_closed: Callable[["_Client"], None],
    ) -> None:
        self._socket = accepted
        self._socket.setblocking(False)
        self._loop = loop
        self._answer = answer
        self._on_closed = on_closed
        self._request = b""
        self._left = memoryview(b"")
        self._timer = loop.call_later(CLIENT_S, self.close)
        loop.add_reader(accepted, self._read)

    def _read(self) -> None:
        try:
            received = self._socket.recv(MAX_REQUEST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:  # half a line, if any, is no request
            self.close()
            return
        self._request += received
        line, end, _ = self._request.partition(b"\n")
        if len(line) > MAX_REQUEST_BYTES:
            self._respond(lambda _: TOO_LONG)
        elif end:
            self._request = line
            self._respond(self._answer)

    def _respond(self, answer: Callable[[bytes], bytes]) -> None:
        self._loop.remove_reader(self._socket)
        try:
            self._left = memoryview(answer(self._request))
        except BaseException:
            self.close()
            raise
        self._write()

    def _write(self) -> None:
        try:
            num_bytes = self._socket.send(self._left)
        except BlockingIOError:
            num_bytes = 0
        except OSError:
            self.close()
            return
        self._left = self._left[num_bytes:]
        if self._left:
            self._loop.add_writer(self._socket, self._write)
        else:
            self.close()

    def close(self) -> None:
        """End the connection."""
        self._timer.cancel()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        self._socket.close()
        self._on_closed(self)

    def abandon(self) -> None:
        """Close the descriptor alone."""
        self._socket.close()


def _listen(path: Path) -> socket.socket:
    """Listen on a new socket that nobody else can open, and then give it its name."""
    before = path.with_name(f".{path.name}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        os.fchmod(listener.fileno(), 0o600)  # before it has a name; the file gets this mode
        listener.bind(str(before))
        listener.listen(BACKLOG)
        before.rename(path)
    except BaseException:
        listener.close()
        with suppress(OSError):
            before.unlink()
        raise
    return listener


_open: "WeakSet[AdminSocket]" = WeakSet()


def _abandon_all() -> None:
    for admin in list(_open):
        admin.abandon()
    _open.clear()


os.register_at_fork(after_in_child=_abandon_all)
