"""Keys for tests: each instance has its own, and all list each other."""

from dataclasses import replace

from kvflow.trust import Trust, TrustedKey
from kvflow.wire.curve import new_keys

__all__ = ["new_trust", "trusting", "trusts"]


def new_trust() -> Trust:
    """Keys of somebody who lists nobody, and whom nobody lists."""
    public, secret = new_keys()
    return Trust(public, secret)


def trusting(own: Trust, registry: Trust | None = None, **instances: Trust) -> Trust:
    """The same keys, with a list of others by instance."""
    peers = tuple(TrustedKey(one.public, instance) for instance, one in instances.items())
    return replace(own, peers=peers, registry=() if registry is None else (registry.public,))


def trusts(*instances: str) -> tuple[Trust, dict[str, Trust]]:
    """Keys of a registry and of instances, of which each lists all."""
    registry, own = new_trust(), {name: new_trust() for name in instances}
    return trusting(registry, registry, **own), {name: trusting(one, registry, **own) for name, one in own.items()}
