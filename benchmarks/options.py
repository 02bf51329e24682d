"""Options of benchmarks, parsed."""

import argparse

__all__ = ["counts"]


def counts(text: str) -> tuple[int, ...]:
    """Parse an option with several positive numbers.

    Raises:
        ArgumentTypeError: It is not a list of positive numbers.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"expected positive numbers separated by commas, not {text!r}")
    return tuple(map(int, parts))
