"""The thread that owns a native agent.

Native calls block, completions can only be polled, and the libraries are not thread-safe. So each agent has one thread,
which runs the commands sent by the event loop and polls in between: often while events are expected, rarely otherwise.

Waking the thread takes longer than a short call. While the thread is idle, the event loop may make such a call itself
(`run_now`), which excludes the thread from the agent for that time. The thread waits for the event loop, but the event
loop never waits for the thread.

An expected event may be a long time coming: a decode rank waits for the prefill of its request. So pauses between polls
grow in proportion to the time since the last event, and polling adds only a few hundredths to any wait. After an event,
the next poll waits until most of the shortest recent gap between events has passed.

A forked process has no such thread and must not touch the agent, whose locks, sockets and memory belong to the parent.
There, calls raise `BackendError`, stopping does nothing, and the agent is never destroyed.
"""

import asyncio
import atexit
import concurrent.futures
import ctypes
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from kvflow.errors import BackendError, BackendUnavailable

__all__ = ["OwnerThread", "PollIntervals", "Polled", "start_thread"]

Result = TypeVar("Result")

COMMANDS_PER_ROUND = 32
"""Commands run before the next poll, so that a burst of posts does not hold up completions."""

PAUSE_PER_WAIT: Final = 0.015
"""Length of a pause between polls, as a fraction of the time since anything last happened."""

LULL: Final = 0.8
"""Fraction of the shortest recent gap during which the agent is not polled after an event was found."""

GAPS: Final = 8
"""Number of recent gaps between successful polls; the shortest predicts how soon the next event may arrive."""

EXIT_TIMEOUT_S: Final = 5.0
"""How long process exit waits for a native call to return: longer than any call that does not hang."""

PR_SET_TIMERSLACK: Final = 29
TIMER_SLACK_NS: Final = 1_000


@dataclass(frozen=True)
class PollIntervals:
    """How often an agent is polled, in seconds between polls.

    Attributes:
        busy_s: While the agent is busy.
        quiet_s: While it is busy but has had no events for long; pauses grow from `busy_s` to this.
        idle_s: While it is not busy, unless it may sleep.
    """

    busy_s: float
    quiet_s: float
    idle_s: float


class Polled(Protocol):
    """An agent as its owner thread uses it."""

    def poll(self) -> bool:
        """Let the library make progress and deliver the resulting events. Return whether anything happened."""

    def is_busy(self) -> bool:
        """Return whether events are expected soon."""

    def may_sleep(self) -> bool:
        """Return whether it needs no polls before the next command, if it is not busy."""


class OwnerThread:
    """Runs commands for one agent, and polls it.

    Args:
        on_crash: Called when polling or a command fails; the agent is not polled again.

    Attributes:
        is_abandoned: True if this process was forked from the one that has the thread.

    Raises:
        BackendUnavailable: The system allows no more threads.
    """

    def __init__(self, name: str, on_crash: Callable[[Exception], None], intervals: PollIntervals) -> None:
        self.is_abandoned = False
        self._on_crash = on_crash
        self._intervals = intervals
        self._happened_at = 0.0
        self._found_at = 0.0
        self._gaps: deque[float] = deque([0.0], maxlen=GAPS)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._unfinished: deque[None] = deque()  # one for each command that has not run yet
        self._in_use = threading.RLock()
        self._agent: Polled | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._barrier = _ExitBarrier(self._thread, lambda: self._put_command(_nothing))
        try:
            start_thread(self._thread)
        except BackendUnavailable:
            self._barrier.cancel()
            raise
        _owners.add(self)

    def adopt(self, agent: Polled | None) -> None:
        """Poll this agent from now on; None for no agent. Call it on the owner thread."""
        self._agent = agent

    def submit(self, command: Callable[[], None]) -> None:
        """Run a command on the thread, in order. An exception counts as a crash, like one from polling.

        Does nothing in a forked process.
        """
        if not self.is_abandoned:
            self._put_command(command)

    def run_now(self, command: Callable[[], None]) -> bool:
        """Run a short command at once on the calling thread (the event loop's), and return whether it was run.

        It is not while the agent is in use, or other commands are waiting. An exception counts as in `submit`.
        """
        if self.is_abandoned or self._unfinished or not self._in_use.acquire(blocking=False):
            return False
        try:
            agent = self._agent
            if self._unfinished or agent is None or self._barrier.is_due:
                return False
            was_busy = agent.is_busy()
            self._guard(command)
            self._happened_at = time.monotonic()
            if not was_busy and agent.is_busy():
                self._put_command(_nothing)  # else the thread would sleep on
            return True
        finally:
            self._in_use.release()

    def poll_now(self) -> bool:
        """Poll as `run_now` runs a command. Return whether anything happened."""
        before = self._found_at
        return self.run_now(self._poll) and self._found_at != before

    async def call(self, function: Callable[[], Result]) -> Result:
        """Run a function on the thread, in order, and return its result or raise its exception, after `check`.

        Cancelling the wait does not stop a function that has started.
        """
        self.check()
        self._free()
        future: concurrent.futures.Future[Result] = concurrent.futures.Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - raised where the result is awaited
                future.set_exception(error)

        self._put_command(run)
        self._barrier.lift()
        return await asyncio.wrap_future(future)

    async def stop(self) -> None:
        """Run the queued commands, then end the thread. Call it on the thread that calls `run_now`."""
        if self.is_abandoned:
            return
        self._free()
        self._barrier.cancel()
        ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._put_command(lambda: ended.set_result(None))
        self._put_command(None)
        await asyncio.wrap_future(ended)
        self._thread.join()

    def check(self) -> None:
        """Raise BackendError if this process was forked from the one that has the thread."""
        if self.is_abandoned:
            raise BackendError("endpoint was opened before this process was forked; open another one here")

    def abandon(self) -> None:
        """Leave the agent to the parent process for good. Call it in a process that was just forked."""
        self.is_abandoned = True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))  # keeps the agent from being destroyed

    def _free(self) -> None:
        """Release the lock in case a signal handler raised in the middle of `run_now`."""
        with suppress(RuntimeError):  # not held, the usual case
            self._in_use.release()

    def _put_command(self, command: Callable[[], None] | None) -> None:
        self._unfinished.append(None)
        self._commands.put(command)

    def _run(self) -> None:
        _pause_precisely()
        while self._run_commands():
            if self._agent is not None:
                with self._in_use:
                    self._guard(self._poll)

    def _poll(self) -> None:
        if self._agent is not None and self._agent.poll():
            now = time.monotonic()
            self._gaps.append(now - self._found_at)
            self._found_at = self._happened_at = now

    def _guard(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - reported through `on_crash`; later commands must still run
            self._agent = None
            self._on_crash(error)

    def _run_commands(self) -> bool:
        """Wait for commands until the next poll is due, and run a few. Return False once the thread should end."""
        wait_s = self._interval_s()
        for _ in range(COMMANDS_PER_ROUND):
            if self._barrier.is_due:
                with self._in_use:  # no other thread is in a call now, and none can start one
                    self._barrier.wait()
            try:
                command = self._commands.get(timeout=wait_s)
            except queue.Empty:
                break
            if command is None:
                return False
            with self._in_use:
                self._guard(command)
                self._unfinished.popleft()
            self._happened_at = time.monotonic()
            wait_s = 0.0
        return True

    def _interval_s(self) -> float | None:
        if self._agent is None:
            return None
        if not self._agent.is_busy():
            return None if self._agent.may_sleep() else self._intervals.idle_s
        now = time.monotonic()
        lull_s = LULL * min(self._gaps) - (now - self._found_at)
        pause_s = max(lull_s, PAUSE_PER_WAIT * (now - self._happened_at))
        return max(self._intervals.busy_s, min(pause_s, self._intervals.quiet_s))


def start_thread(thread: threading.Thread) -> None:
    """Start a thread, or raise BackendUnavailable if the system allows no more."""
    try:
        thread.start()
    except RuntimeError as error:
        raise BackendUnavailable(
            "cannot start a thread; raise the process limit (`ulimit -u`, or the container's pids limit)",
            thread=thread.name,
        ) from error


def _pause_precisely() -> None:
    """Set the timer slack of this thread to 1 us; by default, Linux adds 50 us to each pause."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0)


def _nothing() -> None:
    """Do nothing. Queued only to wake the thread."""


class _ExitBarrier:
    """The point at which a daemon thread waits when the interpreter exits.

    Callers need not close a transport before the process exits. But during teardown, the interpreter unwinds every
    thread that returns to it, and if the thread returns from a native call, that ends the process with SIGABRT. So
    before teardown begins, the thread is made to wait outside of any native call. It must not end either: that would
    destroy the objects it refers to, and native libraries abort then too.

    Args:
        interrupt: Makes the thread check `is_due` soon.

    Attributes:
        is_due: True if the thread has to call `wait` now.
    """

    def __init__(self, thread: threading.Thread, interrupt: Callable[[], object]) -> None:
        self.is_due = False
        self._thread = thread
        self._interrupt = interrupt
        self._is_reached = threading.Event()
        self._is_lifted = threading.Event()
        atexit.register(self._at_exit)

    def wait(self) -> None:
        """Wait until `lift` is called, possibly forever. Call it on the thread."""
        self._is_reached.set()
        self._is_lifted.wait()

    def lift(self) -> None:
        """Let the waiting thread continue, because a function that runs at exit still has work for it."""
        if self.is_due:
            self.is_due = False
            self._is_lifted.set()

    def cancel(self) -> None:
        """Stop tracking the thread, because it is about to end or was never started."""
        self.lift()
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        if self._thread.is_alive():  # in a forked process, the parent's threads are not alive
            self.is_due = True
            self._interrupt()
            self._is_reached.wait(EXIT_TIMEOUT_S)


_owners: "weakref.WeakSet[OwnerThread]" = weakref.WeakSet()


def _abandon_all() -> None:
    for owner in list(_owners):
        owner.abandon()


os.register_at_fork(after_in_child=_abandon_all)
