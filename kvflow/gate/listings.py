"""How much of what a directory lists is read. Pure."""

from typing import Final

__all__ = ["MAX_LISTED_INSTANCES", "MAX_LISTING_BYTES", "MAX_REPORT_BYTES"]

MAX_LISTED_INSTANCES: Final = 65_536
"""Maximum number of instances that are kept of a directory."""

MAX_LISTING_BYTES: Final = 4_096
"""Maximum length of a file that lists an instance. What is longer is cut, so that it cannot be read."""

MAX_REPORT_BYTES: Final = 16 * 2**20
"""Maximum length of one report of changes that were made at once."""
