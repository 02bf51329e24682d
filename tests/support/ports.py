"""Ports of this machine."""

import random
import socket
from contextlib import suppress
from typing import Final

__all__ = ["is_free", "unused_port"]

BELOW_EPHEMERAL: Final = range(20_000, 32_768)
"""Ports outside the system's ephemeral range: no connection takes one between two uses."""

ATTEMPTS: Final = 100


def unused_port() -> int:
    """Return a port that was free a moment ago.

    Raises:
        OSError: No free port was found.
    """
    for port in random.Random().sample(BELOW_EPHEMERAL, ATTEMPTS):  # noqa: S311 - not a secret
        with suppress(OSError), socket.socket() as asked:
            asked.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether a port can be bound; after a socket is closed this may take a moment."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as asked:
        asked.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            asked.bind((host, port))
        except OSError:
            return False
    return True
