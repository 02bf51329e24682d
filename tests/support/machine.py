"""What this machine has."""

import socket

__all__ = ["has_ipv6"]


def has_ipv6() -> bool:
    """It has the IPv6 address of itself."""
    with socket.socket(socket.AF_INET6) as asked:
        try:
            asked.bind(("::1", 0))
        except OSError:
            return False
        return True
