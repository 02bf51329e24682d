"""Addresses of ranks and of directories: what is accepted, and which need keys."""

import functools
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvflow.checks import check_integer, set_field
from kvflow.errors import ConfigError
from kvflow.trust import Trust

__all__ = [
    "SCHEME",
    "DirectoryURL",
    "Endpoint",
    "check_bind",
    "check_endpoint",
    "check_host",
    "check_needs_trust",
    "check_registry",
    "has_one_host",
    "is_loopback",
    "is_number",
    "join_address",
    "split_address",
    "split_bind",
    "split_hosts",
]

MAX_PORT: Final = 65_535
SCHEME: Final = "tcp://"
MAX_ZONE: Final = 15
"""Maximum length of an IPv6 zone, which is that of a network interface name. Python cannot resolve zones longer than 63
characters, and raises an error that is not an OSError.
"""

MAX_HOSTS: Final = 8
"""Hosts in one address. Each takes a second to try if it does not answer."""

ADDRESS: Final = re.compile(r"tcp://([^/]+):([0-9]{1,5})", re.ASCII)
PORTS: Final = re.compile(r"(.*:)([0-9]{1,5})-([0-9]{1,5})", re.ASCII)
HOST: Final = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)
IN_ADDRESS: Final = re.compile(r"\*|[A-Za-z0-9._-]+|\[[A-Za-z0-9:._%-]+\]", re.ASCII)
DIRECTORY: Final = re.compile(r"(?P<scheme>\w+)://(?P<hosts>[^/?]*)(?P<path>[^?]*)(\?(?P<options>.*))?", re.ASCII)
HOST_PORT: Final = re.compile(r"([A-Za-z0-9._-]+|\[[A-Za-z0-9:.%-]+\]):[0-9]{1,5}", re.ASCII)

DIRECTORY_OPTIONS: Final[Mapping[str, frozenset[str]]] = {
    "file": frozenset(),
    "etcd": frozenset({"ca", "cert", "key", "user", "password_file"}),
    "kubernetes": frozenset({"port"}),
}
"""Kinds of directories beside the registry, and the options of their URLs."""

HOSTS: Final = 1_024
"""Hosts that are remembered to be of a kind: a transfer looks at the same one five times."""


def split_address(setting: str, address: object) -> tuple[str, int]:
    """Split `tcp://host:port`, with the brackets of IPv6 addresses removed, or raise ConfigError with the setting.

    It may have several hosts, see `split_hosts`. ZMQ accepts ports above 65535 and silently uses different ones; they
    are rejected here.
    """
    match = ADDRESS.fullmatch(address) if isinstance(address, str) else None
    hosts = [] if match is None else match[1].split(",")
    if match is None or int(match[2]) > MAX_PORT or not all(map(IN_ADDRESS.fullmatch, hosts)):
        raise ConfigError("address must have the form tcp://HOST:PORT", setting=setting, value=address)
    if len(hosts) > MAX_HOSTS:
        raise ConfigError(f"address may have {MAX_HOSTS} hosts at most", setting=setting, value=address)
    if not all(_is_ipv6(host[1:-1]) for host in hosts if host.startswith("[")):
        raise ConfigError("only an IPv6 address may be in brackets", setting=setting, value=address)
    return ",".join(split_hosts(match[1])), int(match[2])


def split_hosts(host: str) -> list[str]:
    """Return the hosts of "host" or "host,host,...", the addresses of one rank, without brackets."""
    return [one.strip("[]") for one in host.split(",")]


def split_bind(bind: object) -> tuple[str, range]:
    """Split `tcp://host:port` or `tcp://host:first-last` as `split_address` does; return the ports in order.

    Raises:
        ConfigError: The address is malformed, or its ports are no range of ports that can be bound.
    """
    match = PORTS.fullmatch(bind) if isinstance(bind, str) else None
    if match is None:
        host, port = _split_one("bind", bind)
        return host, range(port, port + 1)
    host, first = _split_one("bind", match[1] + match[2])
    last = int(match[3])
    if not 1 <= first <= last <= MAX_PORT:
        raise ConfigError(
            "range of ports must go up from 1 or more, to 65535 at most",
            setting="bind",
            value=bind,
            first=first,
            last=last,
        )
    return host, range(first, last + 1)


def _split_one(setting: str, address: object) -> tuple[str, int]:
    host, port = split_address(setting, address)
    if "," in host:
        raise ConfigError("address must have one host", setting=setting, value=address)
    return host, port


def join_address(host: str, port: int | str) -> str:
    """Return `tcp://host:port`, with IPv6 addresses in brackets; the port may be a range, the host several."""
    hosts = ",".join(f"[{one}]" if ":" in one else one for one in split_hosts(host))
    return f"tcp://{hosts}:{port}"


def check_endpoint(setting: str, address: object) -> None:
    """Raise ConfigError, with the setting, unless an address can be connected to: no wildcard and not port 0."""
    host, port = split_address(setting, address)
    if port == 0 or any(map(_is_wildcard, split_hosts(host))):
        raise ConfigError(
            "address must name a host and a port that others can connect to", setting=setting, value=address
        )


def check_needs_trust(setting: str, address: str, trust: Trust | None) -> None:
    """Raise ConfigError, with the setting and the remedy, for a non-loopback address if no trust is configured."""
    host, _ = split_bind(address) if setting == "bind" else split_address(setting, address)
    if trust is None and not is_loopback(host):
        raise ConfigError(
            "address is not a loopback address: set trust=kvflow.load_trust(directory), or "
            "trust=kvflow.Trust.none() for plain transport",
            setting=setting,
            value=address,
        )


@functools.lru_cache(HOSTS)
def is_number(host: str) -> bool:
    """Return whether a host is an IP address rather than a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def has_one_host(address: str) -> bool:
    """Return whether "tcp://host:port" leads to the same host always. A name may lead to another one later."""
    host, _ = split_address("address", address)
    return "," not in host and (is_number(host) or is_loopback(host))


@functools.lru_cache(HOSTS)
def is_loopback(host: str) -> bool:
    """Return whether a host is this one whoever asks: an address of the loopback interface, or "localhost".

    Of several, all are.
    """
    if "," in host:
        return all(map(is_loopback, split_hosts(host)))
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class Endpoint:
    """Address of the prefill rank that acts as the registry for its instance.

    Attributes:
        host: A host name, or an IPv4 or IPv6 address, with or without brackets; several with commas between them.
        port: Port of its control socket.

    Raises:
        ConfigError: The address cannot be connected to.
    """

    host: str
    port: int

    def __post_init__(self) -> None:
        check_host("host", self.host)
        set_field(self, "host", ",".join(split_hosts(self.host)))
        set_field(self, "port", check_integer("port", self.port, 1, MAX_PORT))

    def __str__(self) -> str:
        return join_address(self.host, self.port)

    @classmethod
    def parse(cls, address: str) -> "Endpoint":
        """Parse "tcp://host:port", the format of `PrefillRank.endpoint`.

        Raises:
            ConfigError: The address is malformed or cannot be connected to.
        """
        check_endpoint("address", address)
        return cls(*split_address("address", address))


@dataclass(frozen=True)
class DirectoryURL:
    """Where instances are listed by another system.

    Attributes:
        url: As it was given. It contains no secrets.
        scheme: A key of `DIRECTORY_OPTIONS`.
        hosts: `host:port` of servers, or the namespace of Kubernetes; empty for files.
        path: What follows, without the first slash except for files.
        options: By name.

    Raises:
        ConfigError: There is no such directory.
    """

    url: str
    scheme: str
    hosts: tuple[str, ...]
    path: str
    options: Mapping[str, str]

    @classmethod
    def parse(cls, setting: str, url: str) -> "DirectoryURL":
        """Parse a URL; the error has the setting."""
        parts = DIRECTORY.fullmatch(url)
        allowed = None if parts is None else DIRECTORY_OPTIONS.get(parts["scheme"])
        if parts is None or allowed is None:
            raise ConfigError(
                "address must have the form tcp://HOST:PORT, file:///DIRECTORY, etcd://HOST:PORT/PREFIX or "
                "kubernetes://NAMESPACE/SERVICE",
                setting=setting,
                value=url,
            )
        scheme, path = parts["scheme"], parts["path"]
        hosts = tuple(filter(None, parts["hosts"].split(",")))
        if "@" in parts["hosts"]:
            raise ConfigError("URL must not contain a password: name a password_file", setting=setting)
        options = dict(option.partition("=")[::2] for option in filter(None, (parts["options"] or "").split("&")))
        if not options.keys() <= allowed:
            raise ConfigError("URL has unknown options", setting=setting, value=url, options=sorted(allowed))
        if scheme == "file":
            is_complete = not hosts and path.startswith("/")
        else:
            path = path.strip("/")
            is_complete = bool(hosts) and (scheme == "etcd" or bool(path))
        if not is_complete or (scheme == "etcd" and not all(HOST_PORT.fullmatch(host) for host in hosts)):
            raise ConfigError("URL is incomplete", setting=setting, value=url)
        return cls(url, scheme, hosts, path, options)


def check_registry(setting: str, address: object, trust: Trust | None) -> None:
    """Raise ConfigError, with the setting, unless an address is that of a registry or another directory.

    A directory is never trusted, and needs no keys: the ranks that it names do.
    """
    if isinstance(address, str) and not address.startswith(SCHEME) and "://" in address:
        DirectoryURL.parse(setting, address)
    else:
        check_endpoint(setting, address)
        check_needs_trust(setting, str(address), trust)


def check_bind(bind: object, advertise: object) -> None:
    """Raise ConfigError unless an address can be bound, and peers can reach it.

    Args:
        bind: "tcp://host:port" or "tcp://host:first-last".
        advertise: Host to give to peers, or several, without a port; None for the host of `bind`, which then is no
            wildcard.
    """
    host, _ = split_bind(bind)
    if advertise is None:
        if _is_wildcard(host):
            raise ConfigError("`bind` is a wildcard, so `advertise` must name a host", setting="bind", value=bind)
    else:
        check_host("advertise", advertise)


def check_host(setting: str, host: object) -> None:
    """Raise ConfigError, with the setting, unless a value is a host, or several: no wildcard, no scheme, no port."""
    hosts = host.split(",") if isinstance(host, str) else []
    if not 1 <= len(hosts) <= MAX_HOSTS or not all(
        _is_host(one) and not _is_wildcard(one.strip("[]")) for one in hosts
    ):
        raise ConfigError("setting must be a host, without a scheme or a port", setting=setting, value=host)


@functools.lru_cache(HOSTS)
def _is_ipv6(host: str) -> bool:
    try:
        zone = ipaddress.IPv6Address(host).scope_id
    except ValueError:
        return False
    return zone is None or len(zone) <= MAX_ZONE


def _is_host(text: str) -> bool:
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return _is_ipv6(bare) or (bare == text and HOST.fullmatch(text) is not None)


@functools.lru_cache(HOSTS)
def _is_wildcard(host: str) -> bool:
    """Return whether a host stands for all addresses of this machine, as "0" and "0x0.0" also do."""
    if _is_ipv6(host):
        address = ipaddress.IPv6Address(host)
        return (address.ipv4_mapped or address).is_unspecified
    return host == "*" or not host.strip("0.xX")
