"""Trust of an adapter, from its two options."""

from kvflow import ConfigError, Trust, load_trust

__all__ = ["chosen_trust"]


def chosen_trust(keys: str | None, *, plain: bool) -> Trust | None:
    """Return the trusted keys, or None if neither option is set.

    Args:
        keys: Directory of the keys.
        plain: Use plain transport.

    Raises:
        ConfigError: The keys cannot be read, or both options are set.
    """
    if keys is not None and plain:
        raise ConfigError("keys and plain transport are mutually exclusive", setting="plain")
    if keys is not None:
        return load_trust(keys)
    return Trust.none() if plain else None
