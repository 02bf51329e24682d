"""What a rank needs from the world besides a transport: sockets, a clock, threads and random bytes.

`kvflow.system` has those of the real world. The simulation (`kvflow.testing.simulation`) replaces these and the
transport, and nothing else.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvflow.trust import PLAIN, ClientKeys, Trust

__all__ = [
    "Connection",
    "ControlChannel",
    "Listener",
    "OnKindRefused",
    "OnRefused",
    "Ports",
    "RunInThread",
    "ignore_kind_refused",
    "ignore_refusal",
]

Result = TypeVar("Result")

OnRefused = Callable[[str], None]
OnKindRefused = Callable[[str, str], None]


def ignore_refusal(_detail: str) -> None:
    """Do nothing about a refusal."""


def ignore_kind_refused(_kind: str, _detail: str) -> None:
    """Do nothing about a refusal."""


class Connection(Protocol):
    """A connection to one listener; it is made in the background, and again after a break."""

    def send(self, payload: bytes) -> None:
        """Queue a message, also while there is no connection. Never waits.

        Raises:
            Unreachable: The queue is full; the message is lost.
        """

    def close(self) -> None:
        """Close it. Messages that were sent still leave within a bound; no callback follows."""

    def renew(self, keys: ClientKeys) -> None:
        """Connect with other keys from now on. If what it was made with is not among them, it breaks.

        It does nothing to a connection that was made without keys.
        """


class Listener(Protocol):
    """A bound socket that many connect to.

    Attributes:
        endpoint: Address under which others reach it.
    """

    endpoint: str

    def send(self, connection: bytes, payload: bytes) -> None:
        """Queue a message for one connection. Never waits.

        Raises:
            Unreachable: That connection is gone, or its queue is full; the message is lost.
        """

    def names_of(self, connection: bytes) -> tuple[str, ...]:
        """Give the instances that the other end of a connection may speak for: it has proved to have a key of theirs.

        A name with `*` at its end stands for every name that begins with the rest, so "*" for all if nobody is asked.
        """

    def renew(self, trust: Trust) -> None:
        """Let in who is listed now, and nobody else.

        If somebody is not listed any more, or the own key is another one, all connections break; who is listed makes
        them anew.

        Raises:
            ConfigError: Keys cannot be given up, or asked for, while it is open.
        """

    def close(self, *, keep_port: bool = False) -> None:
        """Close it. Messages that were sent still leave within a bound; no callback follows.

        Args:
            keep_port: Until this process has ended, nobody can bind the port, and nobody is refused there. Nobody is
                answered there either.
        """


class ControlChannel(Protocol):
    """Makes control sockets. Callbacks are called on the event loop, in order, one message each."""

    def listen(
        self,
        bind: str,
        advertise: str | None,
        on_message: Callable[[bytes, Sequence[bytes]], None],
        *,
        trust: Trust = PLAIN,
        on_refused: OnKindRefused = ignore_kind_refused,
    ) -> Listener:
        """Bind a socket.

        Args:
            bind: "tcp://host:port"; port 0 takes a free one.
            advertise: Host to give to others, if not the one bound.
            on_message: Takes the name of the connection and the frames of a message; ours have one. Two ends that
                may speak for different instances have different names. If it raises RemoteProtocolError, that
                connection is broken, and its key is not let in for a second.
            trust: Who may connect; everybody if it is plain.
            on_refused: Told of each attempt to connect that is refused, and of each connection that is broken here:
                what kind of refusal it is, and why.

        Raises:
            ConfigError: The address is malformed or cannot be bound.
        """

    def connect(
        self,
        endpoint: str,
        on_message: Callable[[Sequence[bytes]], None],
        on_lost: Callable[[], None],
        *,
        keys: ClientKeys | None = None,
        on_refused: OnRefused = ignore_refusal,
    ) -> Connection:
        """Connect to a listener.

        Args:
            endpoint: "tcp://host:port".
            on_message: Takes the frames of a message; ours have one.
            on_lost: Called whenever the connection has broken after it was made.
            keys: What it is made with; it is a plain one if None.
            on_refused: Told why the two ends will not have each other. It is tried again.

        Raises:
            ConfigError: The address is malformed or names no host.
            Unreachable: This process has no sockets left.
        """

    async def host_towards(self, endpoint: str) -> str | None:
        """Give the address of this host on the network that leads to an endpoint; None if that cannot be known."""

    async def is_refused(self, endpoint: str, timeout_s: float) -> bool:
        """Say whether the host of an address says that nobody listens there; silence says nothing.

        Args:
            endpoint: "tcp://host:port", of a process itself, not of a balancer in front of several.
            timeout_s: How long to wait for the host, in seconds.
        """


class RunInThread(Protocol):
    """Runs a function beside the event loop."""

    def __call__(self, function: Callable[[], Result], /) -> Awaitable[Result]:
        """Run it in a worker thread and wait for its result.

        Cancelling the wait does not stop the function; the wait goes on until it has ended.

        Raises:
            ThreadShortage: No thread could be started; the function was not called.
        """


@dataclass(frozen=True)
class Ports:
    """The world of one rank.

    Attributes:
        control: Makes control sockets.
        now: Gives monotonic seconds. Timers are the event loop's.
        run_in_thread: Runs a function beside the event loop.
        random_bytes: Gives so many unpredictable bytes.
        unix_time: Gives seconds of Unix time, for what other hosts have said when it ends. Nothing waits for it.
    """

    control: ControlChannel
    now: Callable[[], float]
    run_in_thread: RunInThread
    random_bytes: Callable[[int], bytes]
    unix_time: Callable[[], float]
