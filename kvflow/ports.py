"""A rank's external dependencies besides its transport: sockets, clocks, threads and random bytes.

`kvflow.system` has the real implementations. The simulation replaces these and the transport, and nothing else.
"""

import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from kvflow.trust import PLAIN, ClientKeys, Trust

__all__ = [
    "AdminPort",
    "Connection",
    "ControlChannel",
    "Listener",
    "OnKindRefused",
    "OnObstacle",
    "OnRefused",
    "OpenAdmin",
    "Ports",
    "RunInThread",
    "ignore",
]

Result = TypeVar("Result")

OnRefused = Callable[[str], None]
OnObstacle = Callable[[str, bool], None]
OnKindRefused = Callable[[str, str], None]


def ignore(*_: object) -> None:
    """Do nothing about a refusal or an obstacle."""


class Connection(Protocol):
    """A connection to one listener. It is established in the background and re-established if it breaks."""

    @property
    def peer_host(self) -> str:
        """The IP address of the host that the latest message has come from; empty if unknown.

        The name in an endpoint may lead to another host later.
        """

    def send(self, payload: bytes) -> None:
        """Queue a message, even while disconnected. Never blocks.

        Raises:
            Unreachable: The queue is full; the message is lost.
        """

    def close(self) -> None:
        """Close the connection. Queued messages are still sent, within a time limit. No callback is called any more."""

    def renew(self, keys: ClientKeys) -> None:
        """Use these keys from now on. If they do not include those in use, the connection breaks.

        Has no effect on a connection made without keys.
        """


class Listener(Protocol):
    """A bound socket that accepts many connections.

    Attributes:
        endpoint: Address at which others reach it.
    """

    endpoint: str

    def send(self, connection: bytes, payload: bytes) -> None:
        """Queue a message for one connection. Never waits.

        Raises:
            Unreachable: That connection is gone, or its queue is full; the message is lost.
        """

    def names_of(self, connection: bytes) -> tuple[str, ...]:
        """Return the instances that the other end of a connection may act for: it has proved that it has their key.

        A trailing `*` matches any suffix; without authentication this is "*", which matches every instance.
        """

    def host_of(self, connection: bytes) -> str:
        """Return the address of the host at the other end of a connection; empty if it is gone or unknown."""

    def renew(self, trust: Trust) -> None:
        """Accept the peers that are listed now, and no others.

        If a peer is no longer listed, or this process's own key has changed, all connections break; listed peers then
        reconnect.

        Raises:
            ConfigError: Authentication cannot be turned on or off while the listener is open.
        """

    def close(self, *, keep_port: bool = False) -> None:
        """Close the listener. Queued messages are still sent, within a time limit. No callback is called any more.

        Args:
            keep_port: Keep the port open until this process ends: no other process can bind it, and connections to it
                are neither refused nor answered.
        """


class ControlChannel(Protocol):
    """Creates control sockets. Callbacks run on the event loop, in order, once per message."""

    def reserve(self) -> None:
        """Start the threads, and reserve the descriptors, that the first connections need.

        Raises:
            Shortage: This process cannot have them.
        """

    def listen(
        self,
        bind: str,
        advertise: str | None,
        on_message: Callable[[bytes, Sequence[bytes]], None],
        *,
        trust: Trust = PLAIN,
        on_refused: OnKindRefused = ignore,
    ) -> Listener:
        """Bind a socket.

        Args:
            bind: "tcp://host:port"; port 0 picks a free port.
            advertise: Host to give to others, if not the one bound.
            on_message: Called with the connection's identity and the frames of a message (kvflow's messages have one).
                Peers that may act for different instances have different identities. If it raises RemoteProtocolError,
                the connection is closed and its key is locked out for a second.
            trust: Who may connect; anyone if it is plain.
            on_refused: Called with the kind and the reason of each refused connection attempt, and of each connection
                that this side closes.

        Raises:
            ConfigError: The address is malformed or cannot be bound.
            Shortage: This process lacks descriptors or threads.
        """

    def connect(
        self,
        endpoint: str,
        on_message: Callable[[Sequence[bytes]], None],
        on_lost: Callable[[], None],
        *,
        keys: ClientKeys | None = None,
        on_refused: OnRefused = ignore,
        on_obstacle: OnObstacle = ignore,
    ) -> Connection:
        """Connect to a listener.

        Args:
            endpoint: "tcp://host:port".
            on_message: Called with the frames of a message (kvflow's messages have one).
            on_lost: Called whenever an established connection breaks.
            keys: Keys to use; None for a plain connection.
            on_refused: Called with the reason if either end rejects the other. The connection is retried.
            on_obstacle: Called with the reason why there is no connection, whenever another one is found out, and with
                an empty text once there is one; and with whether this process lacks a resource for it.

        Raises:
            ConfigError: The address is malformed or names no host.
            Shortage: This process has no descriptors left.
        """

    async def host_towards(self, endpoint: str) -> str | None:
        """Return this host's address on the route to an endpoint, or None if it cannot be determined."""

    async def is_refused(self, endpoint: str, timeout_s: float) -> bool:
        """Return whether the host refuses connections to an address; of several, whether all do.

        No answer counts as False.

        Args:
            endpoint: "tcp://host:port" of the process itself, not of a load balancer.
            timeout_s: How long to wait for the host, in seconds.
        """


class RunInThread(Protocol):
    """Runs a function outside the event loop."""

    def __call__(self, function: Callable[[], Result], /, *, abandon_on_cancel: bool = False) -> Awaitable[Result]:
        """Run it in a worker thread and wait for its result.

        Cancelling does not stop the function. The call still waits until it has returned, unless `abandon_on_cancel`.

        Raises:
            ThreadShortage: No thread could be started; the function was not called.
        """


class AdminPort(Protocol):
    """A socket over which a person or a probe asks the rank, see `kvflow.admin`."""

    @property
    def path(self) -> os.PathLike[str]:
        """Where it is."""

    def close(self) -> None:
        """Remove it."""


class OpenAdmin(Protocol):
    """Opens such a socket."""

    def __call__(
        self, setting: str | os.PathLike[str] | None, name: str, answer: Callable[[bytes], bytes], /
    ) -> AdminPort:
        """Open a socket in a directory, or in the default one, under a name that no other rank has.

        Requests are answered on the event loop by calling `answer`.

        Raises:
            OSError: It cannot be made.
        """


class SaveIncident(Protocol):
    """Writes a file about an incident. May be called in any thread."""

    def __call__(self, path: Path, frames: Iterable[bytes], /) -> None:
        """Write a new file; raise OSError if that fails."""


@dataclass(frozen=True)
class Ports:
    """The external dependencies of one rank.

    Attributes:
        control: Creates control sockets.
        now: Returns monotonic time in seconds. Timers are those of the event loop.
        run_in_thread: Runs a function outside the event loop.
        random_bytes: Returns the given number of unpredictable bytes.
        unix_time: Returns Unix time in seconds. Used only to check expiry times set by other hosts, never to wait.
        open_admin: Opens the socket for `kvflow status` and its like; None if there is none.
        save_incident: Writes files for `kvflow incident`; None to keep no events.
    """

    control: ControlChannel
    now: Callable[[], float]
    run_in_thread: RunInThread
    random_bytes: Callable[[int], bytes]
    unix_time: Callable[[], float]
    open_admin: OpenAdmin | None = None
    save_incident: SaveIncident | None = None
