"""A process's own keys and the public keys that it trusts. Pure; `kvflow.keys` handles files.

Keys are those of CurveZMQ (Curve25519), written as 64 hexadecimal digits.

A *principal* is the set of peers whose keys are listed for the same instances. A peer can invent rank names, and
instance names that match a `*`, but not principals. So limits apply to principals.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from kvflow.errors import ConfigError

__all__ = [
    "ANY",
    "HEX_DIGITS",
    "PLAIN",
    "PRINCIPAL_DIGITS",
    "SECRET_BYTES",
    "ClientKeys",
    "Trust",
    "TrustedKey",
    "is_key",
    "matches_instance",
    "short",
    "speaks_for",
]

HEX_DIGITS: Final = 64
SECRET_BYTES: Final = 32
ANY: Final = "*"
PRINCIPAL_DIGITS: Final = 32
NOBODY: Final = "0" * PRINCIPAL_DIGITS
"""The principal of a key that is not listed for any instance, such as the registry's."""
SHOWN: Final = 12


def is_key(text: object) -> bool:
    """Return whether a value is a key: 32 bytes as lower-case hexadecimal digits."""
    return isinstance(text, str) and len(text) == HEX_DIGITS and all(digit in "0123456789abcdef" for digit in text)


def short(key: str) -> str:
    """Return the start of a public key, long enough to find it in a list."""
    return key[:SHOWN]


def matches_instance(pattern: str, instance: str) -> bool:
    """Return whether an instance name matches a pattern; a trailing `*` matches any suffix."""
    if pattern.endswith(ANY):
        return instance.startswith(pattern.removesuffix(ANY))
    return instance == pattern


@dataclass(frozen=True)
class TrustedKey:
    """A public key, and the instance that may use it.

    Attributes:
        key: 64 hexadecimal digits.
        instance: Name of the instance. A trailing `*` matches any suffix, so the replicas of a deployment can share a
            key.

    Raises:
        ConfigError: The key or the name is malformed.
    """

    key: str
    instance: str

    def __post_init__(self) -> None:
        if not is_key(self.key):
            raise ConfigError("public key must have 64 hexadecimal digits", instance=self.instance, found=self.key)
        if not self.instance:
            raise ConfigError("public key needs the name of an instance", key=short(self.key))


@dataclass(frozen=True)
class Trust:
    """An immutable set of keys: this process's own, and those it trusts.

    `kvflow.load_trust` reads one from a directory.

    Attributes:
        public: This process's public key; empty if there are no keys.
        secret: This process's secret key.
        peers: Public keys of instances. During a rotation an instance has two, the old and the new one.
        registry: Public keys of the registry.
        capability_keys: Secrets for signing capabilities. If there are any, a prefill rank sends a room only to decode
            ranks with a capability for it. The first one signs; all of them are accepted.
        ticket_keys: Secrets of 32 bytes that prefill and decode ranks share. Prefill ranks sign tickets with the first
            one; decode ranks accept all of them. They also work with plain transport.
        directory: The directory that the keys were read from, or None.
    """

    public: str = ""
    secret: str = field(default="", repr=False)
    peers: tuple[TrustedKey, ...] = ()
    registry: tuple[str, ...] = ()
    capability_keys: tuple[bytes, ...] = field(default=(), repr=False)
    ticket_keys: tuple[bytes, ...] = field(default=(), repr=False)
    directory: str | None = None

    def __post_init__(self) -> None:
        if bool(self.public) is not bool(self.secret):
            raise ConfigError("public and secret key must be given together", setting="trust")
        if self.public and not (is_key(self.public) and is_key(self.secret)):
            raise ConfigError("keys must have 64 hexadecimal digits", setting="trust", public=self.public)
        malformed = [key for key in self.registry if not is_key(key)]
        if malformed:
            raise ConfigError("registry keys must have 64 hexadecimal digits", found=malformed)
        if any(len(key) != SECRET_BYTES for key in self.ticket_keys):
            raise ConfigError("ticket keys must have 32 bytes", setting="trust")

    @classmethod
    def none(cls) -> "Trust":
        """Return a Trust for plain transport: anyone who reaches a port can read, write and end any transfer there."""
        return cls()

    @property
    def is_plain(self) -> bool:
        """True if there are no keys: traffic is not encrypted and peers are not authenticated."""
        return not self.public

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset([*(one.key for one in self.peers), *self.registry])

    def knows(self, key: str) -> bool:
        """Return whether a public key is listed."""
        return key in self._known

    def keeps(self, before: "Trust") -> bool:
        """Return whether existing connections may stay: no key has been removed, replaced, or listed differently."""
        is_same = before._principals.items() <= self._principals.items()
        return self.secret == before.secret and before._known <= self._known and is_same

    def principal(self, key: str) -> str:
        """Return a fixed-length identity for a key, shared by all keys that are listed for the same instances.

        So a rank keeps its identity when its key is rotated.
        """
        return self._principals.get(key, NOBODY)

    def names_of(self, principal: str) -> tuple[str, ...]:
        """Return the instances that a principal may act for, with `*` as in `TrustedKey`; empty if it is unknown."""
        return self._names.get(principal, ())

    @cached_property
    def _principals(self) -> dict[str, str]:
        names: dict[str, list[str]] = {}
        for one in self.peers:
            names.setdefault(one.key, []).append(one.instance)
        return {key: _digest(sorted(set(found))) for key, found in names.items()}

    @cached_property
    def _names(self) -> dict[str, tuple[str, ...]]:
        names: dict[str, dict[str, None]] = {}
        for one in self.peers:
            names.setdefault(self._principals[one.key], {})[one.instance] = None
        return {principal: tuple(found) for principal, found in names.items()}

    def keys_of(self, instance: str) -> tuple[str, ...]:
        """Return the keys that an instance may use."""
        return _distinct([one.key for one in self.peers if matches_instance(one.instance, instance)])

    def for_instance(self, instance: str) -> "ClientKeys | None":
        """Return the keys for connecting to a rank of an instance; None for plain transport."""
        return None if self.is_plain else ClientKeys(self, self.keys_of(instance))

    def for_registry(self) -> "ClientKeys | None":
        """Return the keys for connecting to the registry; None for plain transport.

        If no registry key is listed, any listed rank may act as the registry.
        """
        return None if self.is_plain else ClientKeys(self, self.registry or self._all)

    def for_address(self, instance: str | None) -> "ClientKeys | None":
        """Return the keys for connecting to an address that answers lookups; None for plain transport.

        The answers need not be trusted, because ranks authenticate themselves.

        Args:
            instance: The instance to look up there; None if unknown.
        """
        if self.is_plain:
            return None
        own = self._all if instance is None else self.keys_of(instance)
        return ClientKeys(self, _distinct([*own, *self.registry]))

    @property
    def _all(self) -> tuple[str, ...]:
        return _distinct([one.key for one in self.peers])


@dataclass(frozen=True)
class ClientKeys:
    """The keys for one connection.

    Attributes:
        trust: Contains this process's own keys.
        servers: Public keys, one of which the listener must have. If empty, no listener is accepted.
    """

    trust: Trust
    servers: tuple[str, ...]

    def after(self, server: str) -> str:
        """Return the key to try after a given one, or the first if that one is not in the list."""
        following = self.servers.index(server) + 1 if server in self.servers else 0
        return self.servers[following % len(self.servers)]


def _digest(names: Sequence[str]) -> str:
    lines = "".join(f"{len(name)} {name}\n" for name in names)
    return hashlib.blake2b(lines.encode(), digest_size=PRINCIPAL_DIGITS // 2).hexdigest()


def _distinct(keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(keys))


PLAIN: Final = Trust.none()


def speaks_for(names: tuple[str, ...], instance: str) -> bool:
    """Return whether an instance matches one of the names that a peer may act for."""
    return any(matches_instance(name, instance) for name in names)
