"""Delay packets: `python -m tests.hosts.delay DEVICE SECONDS` creates a TUN device that returns packets after a delay.

The router sends one direction through the device. The `netem` qdisc does the same, but not every kernel has it. Runs
until its standard input is closed.
"""

import fcntl
import os
import selectors
import struct
import sys
import time
from collections import deque
from typing import Final

TUNSETIFF: Final = 0x400454CA
IFF_TUN: Final = 0x0001
IFF_NO_PI: Final = 0x1000
MAX_PACKET: Final = 65_536


def main(device: str, delay_s: float) -> None:
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    held: deque[tuple[float, bytes]] = deque()
    with selectors.DefaultSelector() as selector:
        selector.register(tun, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            wait = max(0.0, held[0][0] - time.monotonic()) if held else None
            ready = [key.fileobj for key, _ in selector.select(wait)]
            if sys.stdin in ready:
                return
            if tun in ready:
                take(tun, delay_s, held)
            while held and held[0][0] <= time.monotonic():
                os.write(tun, held.popleft()[1])


def take(tun: int, delay_s: float, held: deque[tuple[float, bytes]]) -> None:
    """Read all packets that are available."""
    while True:
        try:
            packet = os.read(tun, MAX_PACKET)
        except BlockingIOError:
            return
        held.append((time.monotonic() + delay_s, packet))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
