"""Two hosts and a router between them, out of Linux namespaces, and the faults of such a network.

Each host is a network namespace of its own. A process on a host also gets its own IPC, UTS, mount and PID namespace, so
that no transport finds shared memory or a common machine, and all bytes go through the router::

    host A  10.77.1.2 --- 10.77.1.1  router  10.77.2.1 --- 10.77.2.2  host B

Faults are made in the router, where a network would make them: packets disappear without an answer, and neither host
sees its link go down. A namespace lives as long as a process that holds it, and the holder ends when its standard input
is closed. So nothing is left behind, however the test process ends.
"""

import dataclasses
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Final

__all__ = ["HOST_NAMES", "Connection", "Host", "HostsUnavailable", "TwoHosts", "unavailable"]

TOOLS: Final = ("ip", "tc", "ss", "nsenter", "unshare", "mount")

HOST_NAMES: Final = {"a": "kvflow-host-a", "b": "kvflow-host-b"}
"""Names that both hosts resolve to each other's address."""

SYSTEM_PATH: Final = "/usr/sbin:/sbin"

DELAY_TABLE: Final = "100"
DELAY_DEVICE: Final = "delay0"

BEFORE_ALL: Final = "10"
"""Preference of rules that drop packets: before those that delay or route them."""
BEFORE_ROUTING: Final = "20"

BURST: Final = "256k"
QUEUE: Final = "200ms"
"""What the rate limit lets pass at once, and how long packets may wait in its queue before they are dropped."""


OWN_MAC: Final = "02:00:00:00:00:02"
ROUTER_MAC: Final = "02:00:00:00:00:01"
"""Of the two ends of each link."""


class HostsUnavailable(Exception):
    """This machine cannot make the namespaces; the message says why."""


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
    """One host: a network namespace and what its processes need to know.

    Args:
        name: "a" or "b".
        address: Its only address besides the loopback.
        hosts_file: What its processes see as /etc/hosts.
    """

    def __init__(self, name: str, address: str, hosts_file: Path) -> None:
        self.name = name
        self.address = address
        self._hosts_file = hosts_file
        self.namespace = Namespace()

    @property
    def url_host(self) -> str:
        """The address as it stands in an endpoint."""
        return f"[{self.address}]" if ":" in self.address else self.address

    def spawn(self, command: Sequence[str], *, stderr: IO[str] | int | None = None) -> subprocess.Popen[str]:
        """Start a process on this host; SIGKILL to what is returned kills it with everything that it has started."""
        isolate = ["unshare", "--ipc", "--uts", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"]
        script = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'
        prepare = ["sh", "-c", script, "sh", str(self._hosts_file), HOST_NAMES[self.name]]
        return subprocess.Popen(
            [*self.namespace.enter(), *isolate, *prepare, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment(),
        )


class Namespace:
    """A network namespace, kept by a process that waits for the end of its standard input."""

    def __init__(self) -> None:
        self._holder = start(["unshare", "--net", "sh", "-c", "echo ready; exec cat"])
        if pipe(self._holder.stdout).readline() != "ready\n":
            _, error = self._holder.communicate()
            raise HostsUnavailable(f"a network namespace cannot be made: {error.strip()}")
        self.run("ip", "link", "set", "lo", "up")

    @property
    def pid(self) -> str:
        """The process that holds it, by which tools find it."""
        return str(self._holder.pid)

    def enter(self) -> list[str]:
        """Return the command that runs another one in this namespace."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", "--"]

    def run(self, *command: str) -> str:
        """Run a command in this namespace and give its output.

        Raises:
            HostsUnavailable: It failed.
        """
        return run([*self.enter(), *command])

    def close(self) -> None:
        """Let go of the namespace; it ends when nothing uses it any more."""
        self._holder.kill()
        self._holder.communicate()


class TwoHosts:
    """The network. Use it as a context manager.

    Args:
        is_ipv6: Give the hosts IPv6 addresses, and no IPv4 address besides 127.0.0.1.

    Attributes:
        a: One host.
        b: The other one.

    Raises:
        HostsUnavailable: On entry: this machine cannot make it.
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
        """Drop everything that comes from these hosts; from both by default, which is a partition."""
        for side in sides or HOST_NAMES:
            self._rule("add", "pref", BEFORE_ALL, "iif", f"to-{side}", "blackhole")

    def heal(self) -> None:
        """Let everything pass again that `cut` and `swallow` have dropped."""
        self._rule("flush_pref", BEFORE_ALL)

    def swallow(self, connection: Connection) -> None:
        """Drop the packets of one TCP connection, both ways, as a middlebox does that has forgotten it."""
        for source, target in itertools.permutations((connection.a_port, connection.b_port)):
            ports = ("sport", str(source), "dport", str(target))
            self._rule("add", "pref", BEFORE_ALL, "ipproto", "tcp", *ports, "blackhole")

    def limit(self, rate: str) -> None:
        """Limit what each host receives, and so what the other one can send; `rate` as tc takes it: "200mbit"."""
        for side in HOST_NAMES:
            bucket = ["tbf", "rate", rate, "burst", BURST, "latency", QUEUE]
            self._router.run("tc", "qdisc", "replace", "dev", f"to-{side}", "root", *bucket)

    def remove_limit(self) -> None:
        """Take the limit away."""
        for side in HOST_NAMES:
            self._router.run("tc", "qdisc", "delete", "dev", f"to-{side}", "root")

    def delay(self, side: str, seconds: float) -> None:
        """Hold back what comes from one host; the other direction stays quick. At most one delay at a time.

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
        """Let packets pass at once again; what is held back is lost."""
        while self._delays:
            process = self._delays.pop()
            process.kill()
            process.communicate()
            self._rule("flush_pref", BEFORE_ROUTING)

    def power_off(self, side: str) -> None:
        """Take a host away with its link and all that its kernel would still send; its processes are killed before.

        Processes of that host which still run keep running without a network, so the caller kills them first, while the
        host is cut off: otherwise its kernel tells the other host that they are gone.
        """
        self._router.run("ip", "link", "delete", f"to-{side}")
        self.host(side).namespace.close()

    def power_on(self, side: str) -> None:
        """Bring a host up with the address that it had; nothing else of the former one is left."""
        host = Host(side, self._address(side), self._hosts_file)
        router, outside = self._router_address(side), f"to-{side}"
        pair = ["address", OWN_MAC, "type", "veth", "peer", "name", outside]
        router_end = ["address", ROUTER_MAC, "netns", self._router.pid]
        host.namespace.run("ip", "link", "add", "eth0", *pair, *router_end)
        # Usable at once: nobody else has the address, so IPv6 need not ask.
        no_question = ["nodad"] if self._is_ipv6 else []
        prefix = "64" if self._is_ipv6 else "24"
        host.namespace.run("ip", "address", "add", f"{host.address}/{prefix}", "dev", "eth0", *no_question)
        self._router.run("ip", "address", "add", f"{router}/{prefix}", "dev", outside, *no_question)
        host.namespace.run("ip", "link", "set", "eth0", "up")
        self._router.run("ip", "link", "set", outside, "up")
        # Neighbours are known: asking for them can take seconds on a link that has just come up.
        host.namespace.run("ip", "neighbour", "add", router, "lladdr", ROUTER_MAC, "dev", "eth0")
        self._router.run("ip", "neighbour", "add", host.address, "lladdr", OWN_MAC, "dev", outside)
        host.namespace.run("ip", self._family, "route", "add", "default", "via", router)
        setattr(self, side, host)

    # What there is to see -------------------------------------------------------------------------------------------

    def connections(self, a_ports: Iterable[int] | None = None) -> list[Connection]:
        """List the established TCP connections between the hosts as host B sees them, by port on host A if given."""
        lines = self.b.namespace.run("ss", "-Htn", "state", "established", "dst", self.a.url_host).splitlines()
        ends = [line.split()[-2:] for line in lines]
        found = [Connection(port_of(far), port_of(near)) for near, far in ends]
        return [connection for connection in found if a_ports is None or connection.a_port in set(a_ports)]

    def num_bytes_from(self, side: str) -> int:
        """Bytes that the router has received from a host since its link came up."""
        output = self._router.run("cat", f"/proc/{self._router.pid}/net/dev")
        line = next(line for line in output.splitlines() if line.strip().startswith(f"to-{side}:"))
        return int(line.partition(":")[2].split()[0])

    # How it is built ------------------------------------------------------------------------------------------------

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
    """Return why two hosts cannot be made on this machine; None if they can."""
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
    """Run a command and give its output.

    Raises:
        HostsUnavailable: It failed.
    """
    done = subprocess.run(command, capture_output=True, check=False, text=True, env=environment())
    if done.returncode:
        raise HostsUnavailable(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def start(command: Sequence[str]) -> subprocess.Popen[str]:
    """Start a process that ends when its standard input does."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def environment() -> dict[str, str]:
    """The environment of this process, with the places where system tools are."""
    return os.environ | {"PATH": f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"}


def pipe(stream: IO[str] | None) -> IO[str]:
    """Return a stream that was asked for when the process was started."""
    if stream is None:
        raise ValueError("the process was started without this stream")
    return stream


def port_of(end: str) -> int:
    """The port of one end of a connection as `ss` prints it."""
    return int(end.rpartition(":")[2])
