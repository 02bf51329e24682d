"""Whom an adapter trusts, by its two options."""

from kvflow import ConfigError, Trust, load_trust

__all__ = ["chosen_trust"]


def chosen_trust(keys: str | None, *, plain: bool) -> Trust | None:
    """Return the keys to go by; None if nothing was said.

    Args:
        keys: Their directory.
        plain: Plain transport is asked for.

    Raises:
        ConfigError: They cannot be read, or both are asked for.
    """
    if keys is not None and plain:
        raise ConfigError("keys and plain transport are mutually exclusive", setting="plain")
    if keys is not None:
        return load_trust(keys)
    return Trust.none() if plain else None
