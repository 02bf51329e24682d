"""Checks of single settings and arguments. Errors name the setting and its value."""

import operator
import re
from typing import Final

from kvflow.errors import ConfigError

__all__ = [
    "check_argument",
    "check_duration",
    "check_integer",
    "check_traceparent",
    "check_type",
    "is_traceparent",
    "set_field",
]

MAX_DURATION_S: Final = 86_400.0

TRACEPARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{,400})?"
)
"""W3C Trace Context; versions above 00 may append more."""


def check_type(setting: str, value: object, *kinds: type) -> None:
    """Raise ConfigError if a setting has the wrong type."""
    if not isinstance(value, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise ConfigError("setting has the wrong type", setting=setting, value=value, wanted=wanted)


def check_argument(argument: str, value: object, kind: type) -> None:
    """Raise ConfigError if an argument has the wrong type, without its value, which may be a large layout or tensor."""
    if not isinstance(value, kind):
        found, wanted = type(value).__name__, kind.__name__
        raise ConfigError("argument has the wrong type", argument=argument, found=found, wanted=wanted)


def check_duration(setting: str, value: object) -> float:
    """Convert a positive number of seconds, at most a day (the limit in messages), to a float, or raise ConfigError.

    An int would become a float in a recording, and so make its replay differ.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_DURATION_S:
        raise ConfigError(
            "setting must be a positive number of seconds, at most a day",
            setting=setting,
            value=value,
            maximum=MAX_DURATION_S,
        )
    return float(value)


def check_integer(setting: str, value: object, minimum: int, maximum: int) -> int:
    """Convert an integer of any type but bool to an int, or raise ConfigError if it is none within the bounds."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not minimum <= number <= maximum:
        raise ConfigError(
            "setting must be an integer in range", setting=setting, value=value, minimum=minimum, maximum=maximum
        )
    return number


def is_traceparent(text: str) -> bool:
    """Return whether a text is a `traceparent` of W3C Trace Context."""
    return TRACEPARENT.fullmatch(text) is not None and (len(text) == 55 or not text.startswith("00"))


def check_traceparent(value: object) -> str:
    """Return a `traceparent`, or an empty text for None; raise ConfigError for anything else."""
    if value is None:
        return ""
    if not isinstance(value, str) or not is_traceparent(value):
        raise ConfigError("traceparent is not one of W3C Trace Context", argument="traceparent", value=value)
    return value


def set_field(config: object, name: str, value: object) -> None:
    """Store a normalised setting in a frozen object that is being created."""
    object.__setattr__(config, name, value)
