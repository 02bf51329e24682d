"""An event loop in its own thread."""

import asyncio
import logging
import os
import sys
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from threading import Thread
from types import TracebackType
from typing import Final, Self

import anyio
from anyio.from_thread import BlockingPortal

from kvflow.checks import check_duration
from kvflow.errors import ConfigError, LocalProtocolError
from kvflow.resources import report_accept_shortages

__all__ = ["LoopThread"]

SWITCH_INTERVAL_S: Final = 0.0005


class LoopThread:
    """An event loop in a thread that several ranks of a process can share. Use it as a context manager.

    A LoopThread that is left open does not delay process exit.

    Args:
        affinity: CPUs for this thread and the threads it starts (those of the transport and of libzmq). By default, the
            CPUs of the thread that enters the context. If your engine pins that thread to one CPU, pass other CPUs;
            otherwise kvflow's threads have to wait whenever the engine computes.
        switch_interval_s: Value for `sys.setswitchinterval` while a transfer of its ranks is open, unless it is already
            shorter; restored afterwards. With Python's default of 5 ms, each thread involved in a handover may wait
            that long for an engine that computes in Python. None leaves it unchanged.

    Raises:
        LocalProtocolError: On entry: it has already been entered. On exit: ranks still use it.
        ConfigError: The interval is not a valid duration. On entry: the CPUs do not exist, or the system does not
            support affinity.
    """

    def __init__(
        self,
        affinity: Collection[int] | None = None,
        *,
        switch_interval_s: float | None = SWITCH_INTERVAL_S,
    ) -> None:
        if switch_interval_s is not None:
            check_duration("switch_interval_s", switch_interval_s)
        self.switch_interval_s = switch_interval_s
        self._affinity = affinity
        self._portal: BlockingPortal | None = None
        self._num_users = 0

    @property
    def portal(self) -> BlockingPortal:
        """The portal that calls functions on the event loop; LocalProtocolError if the thread is not running."""
        if self._portal is None:
            raise LocalProtocolError("LoopThread must be entered before its ranks, and left after them")
        return self._portal

    @property
    def is_running(self) -> bool:
        """True if the thread is running in this process; False in a forked one."""
        return self._thread.is_alive()

    @contextmanager
    def use(self) -> Iterator[BlockingPortal]:
        """Use the event loop for the duration of the block; the context cannot be left before its end."""
        portal = self.portal
        self._num_users += 1
        try:
            yield portal
        finally:
            self._num_users -= 1

    def __enter__(self) -> Self:
        if self._portal is not None:
            raise LocalProtocolError("LoopThread can be entered only once")
        self._running: Future[None] = Future()
        self._thread = Thread(target=self._run, name="kvflow-loop", daemon=True)
        self._thread.start()
        self._running.result()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.is_running:
            self._portal = None
            return
        if self._num_users:
            raise LocalProtocolError("LoopThread still has open ranks; close them first", ranks=self._num_users)
        portal, self._portal = self.portal, None
        with suppress(RuntimeError):  # the event loop has already ended
            portal.call(portal.stop, exc_type is not None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._pin()
            anyio.run(self._serve)
        except Exception as error:
            if self._running.done():
                raise
            self._running.set_exception(error)

    def _pin(self) -> None:
        if self._affinity is None:
            return
        if sys.platform != "linux":
            raise ConfigError("system does not support CPU affinity", affinity=self._affinity)
        try:
            os.sched_setaffinity(0, self._affinity)  # pins only this thread
        except (OSError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError("affinity must consist of CPUs of this machine", affinity=self._affinity) from error

    async def _serve(self) -> None:
        report_accept_shortages(asyncio.get_running_loop(), logging.getLogger("kvflow").warning)
        async with BlockingPortal() as portal:
            self._portal = portal
            self._running.set_result(None)
            await portal.sleep_until_stopped()
