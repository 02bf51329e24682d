"""Transports from other distributions, found by their entry points."""

import importlib.metadata
import inspect
from collections.abc import Collection
from importlib.metadata import EntryPoint
from typing import Final

from kvflow.backends.base import Backend
from kvflow.errors import BackendUnavailable, ConfigError

__all__ = ["GROUP", "load_plugin", "plugin_names", "refuse_claims"]

GROUP: Final = "kvflow.backends"
"""Entry point group. Names are values of the `backend` setting; values are `module:Class`."""


def plugin_names() -> list[str]:
    """Return the names declared by installed distributions, sorted and without duplicates."""
    return sorted({entry_point.name for entry_point in importlib.metadata.entry_points(group=GROUP)})


def refuse_claims(name: str) -> None:
    """Raise ConfigError, with the distributions, if some declare the name of a built-in backend."""
    claims = _claims(name)
    if claims:
        raise ConfigError(
            "plugin claims the name of a built-in backend; uninstall it, or rename its entry point",
            backend=name,
            distributions=_distributions(claims),
        )


def load_plugin(name: str, *, built_in: Collection[str]) -> type[Backend]:
    """Import the backend that a distribution declares under a name.

    Raises:
        ConfigError: No distribution declares the name, or several do.
        BackendUnavailable: The plugin cannot be imported, or is not a backend.
    """
    claims = _claims(name)
    if not claims:
        raise ConfigError("unknown backend", backend=name, known=sorted({*built_in, *plugin_names()}))
    distributions = _distributions(claims)
    if len(claims) > 1:
        raise ConfigError(
            "several plugins claim the same backend; uninstall all but one", backend=name, distributions=distributions
        )
    (claim,) = claims
    try:
        loaded: object = claim.load()
    except Exception as error:
        raise BackendUnavailable(
            "backend plugin could not be imported",
            backend=name,
            distribution=distributions[0],
            detail=f"{type(error).__name__}: {error}",
        ) from error
    return _checked(loaded, claim, distributions[0])


def _checked(loaded: object, claim: EntryPoint, distribution: str) -> type[Backend]:
    facts = {"backend": claim.name, "distribution": distribution, "object": claim.value}
    if not (isinstance(loaded, type) and issubclass(loaded, Backend)):
        raise BackendUnavailable("backend plugin is not a subclass of kvflow.backends.Backend", **facts)
    if inspect.isabstract(loaded):
        missing = sorted(loaded.__abstractmethods__)
        raise BackendUnavailable(
            "backend plugin does not implement all methods of the contract", **facts, missing=missing
        )
    if getattr(loaded, "name", None) != claim.name:
        raise BackendUnavailable(
            "backend plugin has a different name than its entry point",
            **facts,
            calls_itself=getattr(loaded, "name", None),
        )
    return loaded


def _claims(name: str) -> list[EntryPoint]:
    return list(importlib.metadata.entry_points(group=GROUP, name=name))


def _distributions(claims: list[EntryPoint]) -> list[str]:
    """Return the distributions that declare entry points, as "name version"."""
    return sorted(f"{claim.dist.name} {claim.dist.version}" if claim.dist else "unknown" for claim in claims)
