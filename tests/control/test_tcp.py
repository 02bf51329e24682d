"""What a listener does to its port when this process has no descriptors left."""

import os
import resource
import socket
from contextlib import suppress

import pytest

from kvflow.control.tcp import accept_connects, ignore_connects

pytestmark = pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="needs a packet filter")


def test_connects_are_ignored_and_accepted_without_a_free_descriptor() -> None:
    with socket.create_server(("127.0.0.1", 0)) as port, socket.socket() as early, socket.socket() as late:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208 - only the names
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
        taken = []
        try:
            with suppress(OSError):
                while True:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
            assert ignore_connects(port.fileno())
            early.settimeout(0.05)
            with pytest.raises(TimeoutError):
                early.connect(port.getsockname())
            accept_connects(port.fileno())
            late.connect(port.getsockname())
        finally:
            for fd in taken:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
