"""Effects of the network's faults on plain sockets."""

import sys
import time
from collections.abc import Iterator
from typing import Final

import pytest

from tests.hosts.hosts import HOST_NAMES, HostsUnavailable, TwoHosts, pipe, unavailable

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

PORT: Final = 7300

ECHO: Final = """
import socketserver, sys
class Echo(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            self.wfile.write(line)
            self.wfile.flush()
class Server(socketserver.ThreadingTCPServer):
    address_family = socketserver.socket.AF_INET6 if ":" in sys.argv[1] else socketserver.socket.AF_INET
server = Server((sys.argv[1], int(sys.argv[2])), Echo)
print("ready", flush=True)
server.serve_forever()
"""

CLIENT: Final = """
import socket, sys
lines = {}
for command in sys.stdin:
    name, timeout_s = command.split()
    try:
        if name not in lines:
            lines[name] = socket.create_connection((sys.argv[1], int(sys.argv[2])), float(timeout_s))
        line = lines[name]
        line.settimeout(float(timeout_s))
        line.sendall(b"x\\n")
        print("answered" if line.recv(64) else "closed", flush=True)
    except TimeoutError:
        print("silent", flush=True)
    except OSError as error:
        print(type(error).__name__, flush=True)
"""


class Talk:
    """An echo server on host A, and a client on host B that talks to it over named connections."""

    def __init__(self, net: TwoHosts) -> None:
        self.net = net
        self._server = net.a.spawn([sys.executable, "-c", ECHO, net.a.address, str(PORT)])
        assert pipe(self._server.stdout).readline() == "ready\n"
        self._client = net.b.spawn([sys.executable, "-c", CLIENT, HOST_NAMES["a"], str(PORT)])

    def ask(self, connection: str = "first", timeout_s: float = 20.0) -> str:
        """Send a line, and return the result: "answered", "closed", "silent" after the timeout, or an error's name."""
        stream = pipe(self._client.stdin)
        stream.write(f"{connection} {timeout_s}\n")
        stream.flush()
        return pipe(self._client.stdout).readline().strip()

    def num_unacknowledged(self) -> int:
        """Return the bytes that the server has sent without an acknowledgement from the client."""
        shown = self.net.a.namespace.run("ss", "-Htn", "state", "established", "sport", f":{PORT}")
        return sum(int(line.split()[1]) for line in shown.splitlines())

    def kill_server(self) -> None:
        self._server.kill()
        self._server.communicate()

    def close(self) -> None:
        self.kill_server()
        self._client.kill()
        self._client.communicate()


@pytest.fixture(params=["IPv4", "IPv6"])
def talk(request: pytest.FixtureRequest) -> Iterator[Talk]:
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    with TwoHosts(is_ipv6=request.param == "IPv6") as net:
        talk = Talk(net)
        try:
            yield talk
        finally:
            talk.close()


def test_partition_is_silent_and_heals(talk: Talk) -> None:
    assert talk.ask() == "answered"
    talk.net.cut()
    assert talk.ask(timeout_s=0.3) == "silent"
    talk.net.heal()
    assert talk.ask() == "answered"


@pytest.mark.parametrize("side", ["a", "b"])
def test_one_direction_is_cut(talk: Talk, side: str) -> None:
    assert talk.ask() == "answered"
    talk.net.cut(side)
    assert talk.ask(timeout_s=0.3) == "silent"
    # Either the server's answer is unacknowledged, or the request has not reached the server.
    assert talk.num_unacknowledged() == (2 if side == "a" else 0)


def test_one_connection_is_swallowed_and_others_are_not(talk: Talk) -> None:
    assert talk.ask("first") == "answered"
    (first,) = talk.net.connections([PORT])
    talk.net.swallow(first)
    assert talk.ask("first", timeout_s=0.3) == "silent"
    assert talk.ask("second") == "answered"
    assert len(talk.net.connections([PORT])) == 2


def test_killed_process_is_told_and_power_off_is_not(talk: Talk) -> None:
    assert talk.ask() == "answered"
    talk.net.cut()
    talk.kill_server()
    talk.net.power_off("a")
    talk.net.heal()
    assert talk.ask(timeout_s=0.3) == "silent"
    talk.net.power_on("a")
    assert talk.ask("second") == "ConnectionRefusedError"


def test_one_direction_is_delayed(talk: Talk) -> None:
    assert talk.ask() == "answered"
    try:
        talk.net.delay("a", 0.5)
    except HostsUnavailable as error:
        pytest.skip(str(error))
    started = time.monotonic()
    assert talk.ask() == "answered"
    assert time.monotonic() - started >= 0.5
    talk.net.remove_delay()
    assert talk.ask() == "answered"


def test_rate_is_limited(talk: Talk) -> None:
    talk.net.limit("200mbit")
    assert "rate 200Mbit" in talk.net._router.run("tc", "qdisc", "show", "dev", "to-b")
    assert talk.ask() == "answered"
    talk.net.remove_limit()


def test_processes_share_nothing(talk: Talk) -> None:
    show = "import os, socket; print(os.getpid(), socket.gethostname(), os.readlink('/proc/self/ns/ipc')); input()"
    both = [host.spawn([sys.executable, "-uc", show]) for host in (talk.net.a, talk.net.b)]
    seen = [
        pipe(process.stdout).readline().split() for process in both
    ]  # both live: a namespace's number is used again
    for process in both:
        process.communicate("\n")
    (a_pid, a_name, a_ipc), (b_pid, b_name, b_ipc) = seen
    assert (a_pid, b_pid) == ("1", "1")
    assert (a_name, b_name) == (HOST_NAMES["a"], HOST_NAMES["b"])
    assert a_ipc != b_ipc
