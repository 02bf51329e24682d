"""Two hosts and a router between them, built from Linux namespaces, and faults of this network.

Each host is a network namespace. A process on a host also gets its own IPC, UTS, mount and PID namespace: no transport
finds shared memory or a common machine, and all bytes go through the router::

    host A  10.77.1.2 --- 10.77.1.1  router  10.77.2.1 --- 10.77.2.2  host B

The router injects the faults, as a network would: packets disappear without an answer, and neither host sees its link
go down. A namespace lives as long as the process that holds it, and this process exits when its standard input is
closed. Nothing is left behind, however the test process ends.
"""

import ctypes
import dataclasses
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Final

__all__ = ["HOST_NAMES", "Connection", "Host", "HostsUnavailable", "TwoHosts", "unavailable"]

TOOLS: Final = ("ip", "tc", "ss", "nsenter", "unshare", "mount")

HOST_NAMES: Final = {"a": "kvflow-host-a", "b": "kvflow-host-b"}
"""Host name of each side. Both hosts resolve both names."""

SYSTEM_PATH: Final = "/usr/sbin:/sbin"

DELAY_TABLE: Final = "100"
DELAY_DEVICE: Final = "delay0"

BEFORE_DROPPING: Final = "5"
BEFORE_ALL: Final = "10"
"""Preference of rules that drop packets; they precede the rules that delay or route packets."""
BEFORE_ROUTING: Final = "20"

BURST: Final = "256k"
QUEUE: Final = "200ms"
"""The largest burst that passes the rate limit, and how long a packet may wait in its queue before it is dropped."""


OWN_MAC: Final = "02:00:00:00:00:02"
ROUTER_MAC: Final = "02:00:00:00:00:01"
"""MAC addresses of the two ends of each link."""


class HostsUnavailable(Exception):
    """This machine cannot create the namespaces; the message gives the reason."""


@dataclasses.dataclass(frozen=True)
class Connection:
    """A TCP connection between the hosts.

    Attributes:
        a_port: Port on host A.
        b_port: Port on host B.
    """

    a_port: int
    b_port: int


class Host:
    """One host: a network namespace, and the address and names that its processes see.

    Args:
        name: "a" or "b".
        address: Its only address besides the loopback.
        hosts_file: File that its processes see as /etc/hosts.

    Attributes:
        clock_ahead_s: By how much the monotonic clock of processes that it starts is ahead of the machine's.
    """

    def __init__(self, name: str, address: str, hosts_file: Path) -> None:
        self.clock_ahead_s = 0
        self.name = name
        self.address = address
        self._hosts_file = hosts_file
        self.namespace = Namespace()

    @property
    def url_host(self) -> str:
        """The address as written in an endpoint, with brackets around IPv6."""
        return f"[{self.address}]" if ":" in self.address else self.address

    def spawn(self, command: Sequence[str], *, stderr: IO[str] | int | None = None) -> subprocess.Popen[str]:
        """Start a process on this host; SIGKILL to the returned process also kills everything that it has started.

        It takes precedence where it may: a host that has to share its cores with other tests would be late.
        """
        first = ["nice", "--adjustment=-10"]
        isolate = ["unshare", "--ipc", "--uts", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"]
        if self.clock_ahead_s:
            isolate += ["--time", "--monotonic", str(self.clock_ahead_s)]
        script = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'
        prepare = ["sh", "-c", script, "sh", str(self._hosts_file), HOST_NAMES[self.name]]
        return subprocess.Popen(
            [*self.namespace.enter(), *first, *isolate, *prepare, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment(),
        )


class Namespace:
    """A network namespace, held by a process that runs until its standard input is closed."""

    def __init__(self) -> None:
        self._holder = start(["unshare", "--net", "sh", "-c", "echo ready; exec cat"])
        if pipe(self._holder.stdout).readline() != "ready\n":
            _, error = self._holder.communicate()
            raise HostsUnavailable(f"a network namespace cannot be made: {error.strip()}")
        self.run("ip", "link", "set", "lo", "up")

    @property
    def pid(self) -> str:
        """PID of the process that holds the namespace, for tools that take a PID."""
        return str(self._holder.pid)

    def enter(self) -> list[str]:
        """Return the prefix that runs a command in this namespace."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", "--"]

    def run(self, *command: str) -> str:
        """Run a command in this namespace and return its output.

        Raises:
            HostsUnavailable: The command failed.
        """
        return run([*self.enter(), *command])

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let this thread, and the processes and threads that it starts, use this network in the block."""
        network = Path("ns/net")
        with ("/proc/thread-self" / network).open() as before, (Path("/proc", self.pid) / network).open() as there:
            _use_network(there.fileno())
            try:
                yield
            finally:
                _use_network(before.fileno())

    def close(self) -> None:
        """Release the namespace; the kernel removes it when no process uses it any more."""
        self._holder.kill()
        self._holder.communicate()


def _use_network(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, 0):
        raise HostsUnavailable(f"a network namespace cannot be entered: {os.strerror(ctypes.get_errno())}")


class TwoHosts:
    """The network. Use it as a context manager.

    Args:
        is_ipv6: Give the hosts IPv6 addresses, and no IPv4 address besides 127.0.0.1.

    Attributes:
        a: Host A.
        b: Host B.

    Raises:
        HostsUnavailable: On entry: this machine cannot create the network.
    """

    a: Host
    b: Host

    def __init__(self, *, is_ipv6: bool = False) -> None:
        self._is_ipv6 = is_ipv6
        self._resources = ExitStack()
        self._delays: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "TwoHosts":
        with ExitStack() as undo:
            folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="kvflow-hosts-")))
            self._hosts_file = folder / "hosts"
            names = [f"{self._address(side)} {name}" for side, name in HOST_NAMES.items()]
            self._hosts_file.write_text("\n".join(["127.0.0.1 localhost", *names, ""]), "utf-8")
            self._router = Namespace()
            undo.callback(self._router.close)
            self._forward()
            undo.callback(self._close_hosts)
            self.power_on("a")
            self.power_on("b")
            self._resources = undo.pop_all()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove_delay()
        self._resources.close()

    def host(self, side: str) -> Host:
        """Return the host called "a" or "b"."""
        return {"a": self.a, "b": self.b}[side]

    # Faults ---------------------------------------------------------------------------------------------------------

    def cut(self, *sides: str) -> None:
        """Drop everything that these hosts send; both by default, which is a partition."""
        for side in sides or HOST_NAMES:
            self._rule("add", "pref", BEFORE_ALL, "iif", f"to-{side}", "blackhole")

    def heal(self) -> None:
        """Remove the effects of `cut` and `swallow`."""
        self._rule("flush_pref", BEFORE_ALL)

    def swallow(self, connection: Connection) -> None:
        """Drop the packets of one TCP connection in both directions, as a middlebox that has lost its state does."""
        for source, target in itertools.permutations((connection.a_port, connection.b_port)):
            ports = ("sport", str(source), "dport", str(target))
            self._rule("add", "pref", BEFORE_ALL, "ipproto", "tcp", *ports, "blackhole")

    def pass_only(self, *a_ports: int) -> None:
        """Drop all TCP packets but those from and to some ports of host A, as a firewall does that allows no other."""
        for port, end in itertools.product(a_ports, ("sport", "dport")):
            self._rule("add", "pref", BEFORE_DROPPING, "ipproto", "tcp", end, str(port), "lookup", "main")
        self._rule("add", "pref", BEFORE_ALL, "ipproto", "tcp", "blackhole")

    def limit(self, rate: str) -> None:
        """Limit the rate at which each host receives, and so the other one sends; `rate` in tc's syntax: "200mbit"."""
        for side in HOST_NAMES:
            bucket = ["tbf", "rate", rate, "burst", BURST, "latency", QUEUE]
            self._router.run("tc", "qdisc", "replace", "dev", f"to-{side}", "root", *bucket)

    def remove_limit(self) -> None:
        """Remove the rate limit."""
        for side in HOST_NAMES:
            self._router.run("tc", "qdisc", "delete", "dev", f"to-{side}", "root")

    def delay(self, side: str, seconds: float) -> None:
        """Delay the packets from one host, but not those to it. At most one delay at a time.

        Raises:
            HostsUnavailable: The machine has no TUN devices.
        """
        command = [sys.executable, "-m", "tests.hosts.delay", DELAY_DEVICE, str(seconds)]
        process = start([*self._router.enter(), *command])
        if pipe(process.stdout).readline() != "ready\n":
            _, error = process.communicate()
            raise HostsUnavailable(f"packets cannot be delayed: {error.strip().splitlines()[-1:]}")
        self._delays.append(process)
        self._router.run("ip", "link", "set", DELAY_DEVICE, "up")
        self._ip("route", "replace", "default", "dev", DELAY_DEVICE, "table", DELAY_TABLE)
        self._rule("add", "pref", BEFORE_ROUTING, "iif", f"to-{side}", "lookup", DELAY_TABLE)

    def remove_delay(self) -> None:
        """Remove the delay; packets that are still held back are lost."""
        while self._delays:
            process = self._delays.pop()
            process.kill()
            process.communicate()
            self._rule("flush_pref", BEFORE_ROUTING)

    def power_off(self, side: str) -> None:
        """Remove a host with its link and everything that its kernel would still send.

        The caller kills the processes of the host first: otherwise they keep running, without a network. It cuts the
        host off before that: otherwise the kernel closes their connections, and the other host notices.
        """
        self._router.run("ip", "link", "delete", f"to-{side}")
        self.host(side).namespace.close()

    def power_on(self, side: str) -> None:
        """Bring up a new host at the address of the former one, of which nothing else is left."""
        host = Host(side, self._address(side), self._hosts_file)
        router, outside = self._router_address(side), f"to-{side}"
        pair = ["address", OWN_MAC, "type", "veth", "peer", "name", outside]
        router_end = ["address", ROUTER_MAC, "netns", self._router.pid]
        host.namespace.run("ip", "link", "add", "eth0", *pair, *router_end)
        # Usable at once: no other host has the address, so IPv6 can skip duplicate address detection.
        no_question = ["nodad"] if self._is_ipv6 else []
        prefix = "64" if self._is_ipv6 else "24"
        host.namespace.run("ip", "address", "add", f"{host.address}/{prefix}", "dev", "eth0", *no_question)
        self._router.run("ip", "address", "add", f"{router}/{prefix}", "dev", outside, *no_question)
        host.namespace.run("ip", "link", "set", "eth0", "up")
        self._router.run("ip", "link", "set", outside, "up")
        # Static neighbour entries: resolution can take seconds on a link that has just come up.
        host.namespace.run("ip", "neighbour", "replace", router, "lladdr", ROUTER_MAC, "dev", "eth0")
        self._router.run("ip", "neighbour", "replace", host.address, "lladdr", OWN_MAC, "dev", outside)
        host.namespace.run("ip", self._family, "route", "add", "default", "via", router)
        setattr(self, side, host)

    def add_rail(self, name: str) -> None:
        """Give host A a second address, which `cut_rail` cuts off, and a name that leads to both, that one first."""
        own, rail = self.a.address, f"{self.a.address[:-1]}3"
        prefix = "64" if self._is_ipv6 else "24"
        self.a.namespace.run("ip", "address", "add", f"{rail}/{prefix}", "dev", "eth0")
        self._router.run("ip", "neighbour", "replace", rail, "lladdr", OWN_MAC, "dev", "to-a")
        with self._hosts_file.open("a", encoding="utf-8") as stream:
            stream.write(f"{rail} {name}\n{own} {name}\n")

    def cut_rail(self) -> None:
        """Drop everything that is sent to the second address of host A."""
        self._rule("add", "pref", BEFORE_ALL, "to", f"{self.a.address[:-1]}3", "blackhole")

    # Observation ----------------------------------------------------------------------------------------------------

    def connections(self, a_ports: Iterable[int] | None = None) -> list[Connection]:
        """List the established TCP connections between the hosts as seen by host B; `a_ports` filters by port of A."""
        lines = self.b.namespace.run("ss", "-Htn", "state", "established", "dst", self.a.url_host).splitlines()
        ends = [line.split()[-2:] for line in lines]
        found = [Connection(port_of(far), port_of(near)) for near, far in ends]
        return [connection for connection in found if a_ports is None or connection.a_port in set(a_ports)]

    def num_bytes_from(self, side: str) -> int:
        """Return the bytes that the router has received from a host since its link came up."""
        output = self._router.run("cat", f"/proc/{self._router.pid}/net/dev")
        line = next(line for line in output.splitlines() if line.strip().startswith(f"to-{side}:"))
        return int(line.partition(":")[2].split()[0])

    # Setup ----------------------------------------------------------------------------------------------------------

    @property
    def _family(self) -> str:
        return "-6" if self._is_ipv6 else "-4"

    def _address(self, side: str) -> str:
        number = 1 + list(HOST_NAMES).index(side)
        return f"fd77:{number}::2" if self._is_ipv6 else f"10.77.{number}.2"

    def _router_address(self, side: str) -> str:
        return self._address(side)[:-1] + "1"

    def _forward(self) -> None:
        setting = "ipv6/conf/all/forwarding" if self._is_ipv6 else "ipv4/ip_forward"
        self._router.run("sh", "-c", f"echo 1 > /proc/sys/net/{setting}")

    def _ip(self, *arguments: str) -> None:
        self._router.run("ip", self._family, *arguments)

    def _rule(self, action: str, *arguments: str) -> None:
        if action == "add":
            self._ip("rule", "add", *arguments)
            return
        preference = arguments[-1]
        rules = self._router.run("ip", self._family, "rule", "show").splitlines()
        for _ in [rule for rule in rules if rule.startswith(f"{preference}:")]:
            self._ip("rule", "delete", "pref", preference)

    def _close_hosts(self) -> None:
        for side in HOST_NAMES:
            if hasattr(self, side):
                self.host(side).namespace.close()


def unavailable() -> str | None:
    """Return why this machine cannot create two hosts; None if it can."""
    path = environment()["PATH"]
    missing = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    if missing:
        return f"two hosts need {', '.join(missing)} (iproute2, util-linux)"
    try:
        with TwoHosts() as net:
            true = net.a.spawn(["true"], stderr=subprocess.PIPE)
            _, error = true.communicate()
            if true.returncode:
                return f"two hosts need namespaces: {error.strip()}"
    except HostsUnavailable as error:
        return f"two hosts need namespaces: {error}"
    return None


def run(command: Sequence[str]) -> str:
    """Run a command and return its output.

    Raises:
        HostsUnavailable: The command failed.
    """
    done = subprocess.run(command, capture_output=True, check=False, text=True, env=environment())
    if done.returncode:
        raise HostsUnavailable(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def start(command: Sequence[str]) -> subprocess.Popen[str]:
    """Start a process with pipes for its standard input, output and error."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def environment() -> dict[str, str]:
    """Return the environment of this process, with the system tools on the PATH."""
    return os.environ | {"PATH": f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"}


def pipe(stream: IO[str] | None) -> IO[str]:
    """Return a pipe of a process, checked not to be None."""
    if stream is None:
        raise ValueError("the process was started without this stream")
    return stream


def port_of(end: str) -> int:
    """Return the port of one end of a connection as `ss` prints it."""
    return int(end.rpartition(":")[2])
