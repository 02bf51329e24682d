"""Keys for tests: each instance has its own, and all trust each other."""

from dataclasses import replace
from typing import Final

from kvflow.control.curve import new_keys
from kvflow.trust import Trust, TrustedKey

__all__ = ["new_trust", "trusting", "trusts"]


TICKET_KEYS: Final = (b"a secret of all ranks".ljust(32),)


def new_trust() -> Trust:
    """Return new keys without any trusted peers."""
    public, secret = new_keys()
    return Trust(public, secret, ticket_keys=TICKET_KEYS)


def trusting(own: Trust, registry: Trust | None = None, **instances: Trust) -> Trust:
    """Return the same keys with trusted peers by instance."""
    peers = tuple(TrustedKey(one.public, instance) for instance, one in instances.items())
    return replace(own, peers=peers, registry=() if registry is None else (registry.public,))


def trusts(*instances: str) -> tuple[Trust, dict[str, Trust]]:
    """Return the keys of a registry and of instances, which all trust each other."""
    registry, own = new_trust(), {name: new_trust() for name in instances}
    return trusting(registry, registry, **own), {name: trusting(one, registry, **own) for name, one in own.items()}
