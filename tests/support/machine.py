"""Features of this machine."""

import socket

__all__ = ["has_ipv6"]


def has_ipv6() -> bool:
    """Return whether the IPv6 loopback address exists."""
    with socket.socket(socket.AF_INET6) as asked:
        try:
            asked.bind(("::1", 0))
        except OSError:
            return False
        return True
