"""Options of benchmarks, parsed."""

import argparse
from collections.abc import Collection

from kvflow.errors import ConfigError

__all__ = ["cases_of", "counts", "names"]


def counts(text: str) -> tuple[int, ...]:
    """Parse an option with several positive numbers.

    Raises:
        ArgumentTypeError: It is not a list of positive numbers.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"expected positive numbers separated by commas, not {text!r}")
    return tuple(map(int, parts))


def names(text: str) -> tuple[str, ...]:
    """Parse an option with several names."""
    return tuple(text.split(","))


def cases_of(chosen: tuple[str, ...], known: Collection[str]) -> tuple[str, ...]:
    """Return the cases that were chosen by name, or all.

    Args:
        chosen: Names from the user.
        known: All names.

    Raises:
        ConfigError: There is no such case.
    """
    unknown = [case for case in chosen if case not in known and case != "all"]
    if unknown:
        raise ConfigError("unknown case", unknown=unknown, known=list(known))
    return tuple(known) if "all" in chosen else chosen
