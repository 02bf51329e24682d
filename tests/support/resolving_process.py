"""A decode instance with host names of its own: `python -m tests.support.resolving_process OPTIONS`.

The order `receive` receives a room, and reports `received`, or `failed` with the reason; then it reports `safe` once
the pages may be reused. The order `look` reports `memory`, the state of the pages of a room.
"""

import ctypes
import subprocess
import sys
from contextlib import suppress

import anyio
import anyio.to_thread
import msgspec

import kvflow
from benchmarks.processes import Line, run_child
from tests.support.instances import decode_config, make_pool
from tests.support.prefill_process import PAGES, TOKENS
from tests.support.waiting import until

__all__ = ["ResolvingOptions"]

CLONE_NEWNS = 0x20000


class ResolvingOptions(msgspec.Struct, frozen=True):
    """Options of the process.

    Attributes:
        hosts: File that it sees as /etc/hosts; empty for that of the system.
        address: Where it finds prefill.
        lease_s: As in `kvflow.Timeouts`.
        backend: Its transport.
    """

    hosts: str
    address: str
    lease_s: float = 1.0
    backend: str = "nixl"


def mount_hosts(path: str) -> None:
    """Replace /etc/hosts for this process and its children; raise OSError or CalledProcessError if that fails.

    Must be called before the process has other threads.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "a mount namespace cannot be made")
    for command in (["mount", "--make-rprivate", "/"], ["mount", "--bind", path, "/etc/hosts"]):
        subprocess.run(command, check=True)


class Receivers:
    """The rooms that were asked for, in the order of the orders."""

    def __init__(self, rank: kvflow.DecodeRank, address: str, line: Line) -> None:
        self._rank = rank
        self._prefill = kvflow.Endpoint.parse(address)
        self._line = line
        self._by_room: dict[int, kvflow.RoomReceiver] = {}

    async def receive(self, room: int) -> None:
        receiver = self._rank.receive(room, prefill=self._prefill, tokens=TOKENS, pages=PAGES_OF[room % len(PAGES_OF)])
        self._by_room[room] = receiver
        try:
            with suppress(kvflow.TransferFailed):
                async with receiver:
                    await receiver.done()
        finally:
            failure = receiver.failure
            reason = "" if failure is None else failure.reason.value
            self._line.report("failed" if failure else "received", room=room, reason=reason)
        await until(lambda: receiver.memory is kvflow.Memory.SAFE)
        self._line.report("safe", room=room)

    def memory_of(self, room: int) -> str:
        return self._by_room[room].memory.value


PAGES_OF = [PAGES, *({"kv": [first, first + 1]} for first in range(20, 40, 2))]
"""Pages of a room: those of one that has failed cannot be used again at once."""


async def main(options: ResolvingOptions, line: Line) -> None:
    timeouts = kvflow.Timeouts(handshake_s=60.0, lease_s=options.lease_s, drain_s=0.5)
    settings = decode_config(None, backend=options.backend, trust=kvflow.Trust.none(), timeouts=timeouts)
    async with kvflow.DecodeRank(settings, make_pool().layout) as rank, anyio.create_task_group() as tasks:
        receivers = Receivers(rank, options.address, line)
        line.report("ready")
        while (order := await anyio.to_thread.run_sync(line.receive))["do"] in ("receive", "look"):
            if order["do"] == "receive":
                tasks.start_soon(receivers.receive, order["room"])
            else:
                line.report("memory", room=order["room"], state=receivers.memory_of(order["room"]))
        tasks.cancel_scope.cancel()


def serve(options: ResolvingOptions, line: Line) -> None:
    if options.hosts:
        mount_hosts(options.hosts)
    anyio.run(main, options, line)


if __name__ == "__main__":
    sys.exit(run_child(serve, ResolvingOptions))
