"""Connections in virtual time behave, and break, like those of ZMQ over TCP."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import anyio
import pytest

from kvflow.errors import ConfigError, Shortage, Unreachable
from kvflow.ports import Connection, Listener
from simulation import Faults, Process, World
from simulation.network import HEARTBEAT_S, QUEUE_MESSAGES

ENDPOINT = "tcp://127.0.0.1:5000"


@pytest.fixture
def world() -> Iterator[World]:
    with World() as one:
        yield one


class Server:
    """Echoes each message."""

    listener: Listener

    def __init__(self, world: World, name: str = "server") -> None:
        self.heard: list[bytes] = []
        self.connections: list[bytes] = []
        self._world = world
        self.process = world.start(name, self._run)
        world.run(0.0)

    async def _run(self, process: Process) -> None:
        self.listener = self._world.ports(process).control.listen(ENDPOINT, None, self._on_message)
        await forever()

    def _on_message(self, connection: bytes, frames: Sequence[bytes]) -> None:
        self.heard += frames
        self.connections.append(connection)
        self.listener.send(connection, b"re " + frames[0])


class Client:
    """Sends messages, and records replies and lost connections."""

    connection: Connection

    def __init__(self, world: World, name: str = "client") -> None:
        self.heard: list[bytes] = []
        self.num_lost = 0
        self._world = world
        self.process = world.start(name, self._run)
        world.run(0.0)

    async def _run(self, process: Process) -> None:
        self.connection = self._world.ports(process).control.connect(ENDPOINT, self._on_message, self._on_lost)
        await forever()

    def _on_message(self, frames: Sequence[bytes]) -> None:
        self.heard += frames

    def _on_lost(self) -> None:
        self.num_lost += 1

    def send(self, payload: bytes) -> None:
        self.process.call(self.connection.send, payload)


async def connect(world: World, process: Process) -> None:
    world.ports(process).control.connect(ENDPOINT, lambda _: None, lambda: None)


async def forever() -> None:
    await anyio.sleep_forever()


def answer_to(world: World, call: Callable[[], Any]) -> list[Any]:
    """Run a coroutine in a process of its own, and return its result in a list."""
    found: list[Any] = []

    async def main(_: Process) -> None:
        found.append(await call())

    world.start("asker", main)
    world.run(3.0)
    return found


def test_messages_arrive_in_order_and_are_answered(world: World) -> None:
    server, client = Server(world), Client(world)
    for number in range(20):
        client.send(b"%d" % number)
    world.run(0.1)
    assert server.heard == [b"%d" % number for number in range(20)]
    assert client.heard == [b"re %d" % number for number in range(20)]
    assert client.num_lost == 0


def test_what_is_sent_before_anybody_listens_waits(world: World) -> None:
    client = Client(world)
    client.send(b"early")
    world.run(5.0)
    server = Server(world)
    world.run(0.5)
    assert server.heard == [b"early"]


def test_a_full_queue_refuses(world: World) -> None:
    client = Client(world)
    for _ in range(QUEUE_MESSAGES):
        client.connection.send(b"x")
    with pytest.raises(Unreachable):
        client.connection.send(b"x")


def test_a_short_cut_delays_and_loses_nothing(world: World) -> None:
    server, client = Server(world), Client(world)
    world.run(0.5)
    world.network.cut("client", "server")
    client.send(b"one")
    world.run(HEARTBEAT_S / 2)
    assert server.heard == []
    world.network.mend("client", "server")
    world.run(0.1)
    assert server.heard == [b"one"]
    assert client.num_lost == 0


def test_a_long_cut_breaks_the_connection_and_it_is_made_anew(world: World) -> None:
    server, client = Server(world), Client(world)
    world.run(0.5)
    world.network.cut("server", "client")
    client.send(b"one")
    world.run(2 * HEARTBEAT_S)
    assert client.num_lost == 1
    client.send(b"two")
    world.run(5.0)
    world.network.mend("server", "client")
    world.run(0.5)
    assert server.heard == [b"one", b"two"]
    assert client.heard == [b"re two"]
    assert len(set(server.connections)) == 1


def test_a_half_open_connection_swallows_until_heartbeats_notice(world: World) -> None:
    server, client = Server(world), Client(world)
    world.run(0.5)
    (session,) = world.network.sessions()
    world.network.swallow(session)
    client.send(b"one")
    world.run(HEARTBEAT_S - 0.1)
    assert (server.heard, client.num_lost) == ([], 0)
    world.run(1.0)
    client.send(b"two")
    world.run(0.5)
    assert (server.heard, client.num_lost) == ([b"two"], 1)


def test_the_death_of_a_listener_is_noticed_at_once_and_its_successor_found(world: World) -> None:
    server, client = Server(world), Client(world)
    world.run(0.5)
    server.process.kill()
    world.run(0.01)
    assert client.num_lost == 1
    client.send(b"to whoever comes")
    world.run(1.0)
    again = Server(world)
    world.run(0.5)
    assert (server.heard, again.heard) == ([], [b"to whoever comes"])


def test_the_death_of_a_host_is_noticed_by_heartbeats_only(world: World) -> None:
    server, client = Server(world), Client(world)
    world.run(0.5)
    server.process.kill(vanish=True)
    world.run(HEARTBEAT_S - 0.1)
    assert client.num_lost == 0
    world.run(1.0)
    assert client.num_lost == 1


def test_a_listener_refuses_to_send_over_a_connection_that_is_gone(world: World) -> None:
    server, client = Server(world), Client(world)
    client.send(b"one")
    world.run(0.5)
    client.process.kill()
    with pytest.raises(Unreachable):
        server.listener.send(server.connections[0], b"too late")


def test_a_stopped_process_hears_later_and_loses_its_connections(world: World) -> None:
    server, client = Server(world), Client(world)
    world.run(0.5)
    world.pause(server.process)
    client.send(b"one")
    world.run(2 * HEARTBEAT_S)
    assert (server.heard, client.num_lost) == ([], 1)
    world.resume(server.process)
    world.run(0.1)
    assert server.heard == [b"one"]


def test_a_blocked_event_loop_keeps_its_connections(world: World) -> None:
    server, client = Server(world), Client(world)
    world.run(0.5)
    world.pause(server.process, stalls=False)
    client.send(b"one")
    world.run(2 * HEARTBEAT_S)
    world.resume(server.process)
    world.run(0.1)
    assert (server.heard, client.heard, client.num_lost) == ([b"one"], [b"re one"], 0)


def test_only_the_host_itself_says_that_nobody_listens(world: World) -> None:
    server, client = Server(world), Client(world)
    control = world.ports(client.process).control

    def ask() -> list[bool]:
        return answer_to(world, lambda: control.is_refused(ENDPOINT, 1.0))

    assert ask() == [False]
    world.pause(server.process)
    assert ask() == [False]
    world.resume(server.process)
    server.process.kill()
    world.network.cut("server", "client")
    assert ask() == [False]
    world.network.heal()
    assert ask() == [True]
    Server(world).process.kill(vanish=True)
    assert ask() == [False]


def test_a_port_that_is_kept_is_neither_refused_nor_free_until_its_process_ends(world: World) -> None:
    server, client = Server(world), Client(world)
    world.run(0.5)
    control = world.ports(client.process).control

    def is_refused() -> bool:
        (answer,) = answer_to(world, lambda: control.is_refused(ENDPOINT, 1.0))
        return bool(answer)

    server.listener.close(keep_port=True)
    world.run(0.5)
    assert client.num_lost == 1
    assert not is_refused()
    with pytest.raises(ConfigError, match="in use"):
        world.ports(client.process).control.listen(ENDPOINT, None, lambda *_: None)
    server.process.kill()
    assert is_refused()
    client.send(b"to whoever comes")
    again = Server(world)
    world.run(0.5)
    assert (server.heard, again.heard) == ([], [b"to whoever comes"])


def test_a_port_belongs_to_one_process_at_a_time(world: World) -> None:
    server = Server(world)
    with pytest.raises(ConfigError, match="in use"):
        world.ports(server.process).control.listen(ENDPOINT, None, lambda *_: None)


def test_the_first_free_port_of_a_range_is_bound(world: World) -> None:
    control = world.ports(Server(world).process).control
    assert control.listen("tcp://127.0.0.1:5000-5001", None, lambda *_: None).endpoint == "tcp://127.0.0.1:5001"
    with pytest.raises(ConfigError, match="in use"):
        control.listen("tcp://127.0.0.1:5000-5001", None, lambda *_: None)


def test_sockets_run_out_if_that_is_drawn(world: World) -> None:
    world.faults = Faults(connect_fails=1.0)
    process = world.start("client", lambda process: connect(world, process))
    world.run(0.0)
    assert isinstance(process.exit, Shortage)
