"""The real ports of a rank: ZMQ sockets, the system's monotonic clock, worker threads and secure random bytes."""

import secrets
import time
from collections.abc import Callable
from typing import Final, TypeVar

import anyio

from kvflow.admin.incident_files import save_incident
from kvflow.admin.server import AdminSocket
from kvflow.aio.worker_threads import run_in_thread
from kvflow.control.channel import ZmqControl
from kvflow.ports import Ports

__all__ = ["MAX_THREADS", "system_ports"]

MAX_THREADS: Final = 64
"""Maximum number of functions in worker threads at once, most of which wait for a device. Others wait for a thread."""

Result = TypeVar("Result")


def system_ports() -> Ports:
    """Return the ports of a real rank. Several ranks on one event loop may share them."""
    limiter = anyio.CapacityLimiter(MAX_THREADS)  # not the one of the engine's own use of anyio

    async def run(function: Callable[[], Result], /, *, abandon_on_cancel: bool = False) -> Result:
        return await run_in_thread(function, limiter=limiter, abandon_on_cancel=abandon_on_cancel)

    return Ports(
        control=ZmqControl(),
        now=time.monotonic,
        run_in_thread=run,
        random_bytes=secrets.token_bytes,
        unix_time=time.time,  # noqa: TID251 - no deadline is derived from it
        open_admin=AdminSocket,
        save_incident=save_incident,
    )
