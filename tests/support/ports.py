"""Ports of this machine."""

import socket

__all__ = ["unused_port"]


def unused_port() -> int:
    """A port that nobody had a moment ago."""
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        port: int = asked.getsockname()[1]
        return port
