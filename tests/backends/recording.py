"""Recorders of how long an owner thread waits for its next command."""

import queue
from collections.abc import Callable
from typing import Final

import pytest

import kvflow.backends.owner_thread

__all__ = ["Clock", "record_waits"]

Command = Callable[[], None] | None

LOOK_S: Final = 1e-4
"""Duration of each real wait of a queue that has a fake clock."""


class Clock:
    """A fake of the module `time` whose time passes only while an owner thread waits in vain for a command.

    Polls and wake-ups, whose duration depends on the machine, take no time.

    How long a poll takes, and how late a thread is woken, depends on the machine; here neither takes any time.
    """

    def __init__(self) -> None:
        self._now = 1_000.0

    def monotonic(self) -> float:
        return self._now

    def pass_by(self, seconds: float) -> None:
        self._now += seconds


class QueueModule:
    """A fake of the module `queue` whose queues record the timeout of each `get`."""

    Empty = queue.Empty

    def __init__(self, clock: Clock | None) -> None:
        self.waits: list[float | None] = []
        self._clock = clock

    def SimpleQueue(self) -> "RecordingQueue":
        return RecordingQueue(self.waits, self._clock)


class RecordingQueue:
    def __init__(self, waits: list[float | None], clock: Clock | None) -> None:
        self._waits = waits
        self._clock = clock
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def put(self, command: Command) -> None:
        self._queue.put(command)

    def get(self, timeout: float | None) -> Command:
        self._waits.append(timeout)
        if self._clock is None or timeout is None:
            return self._queue.get(timeout=timeout)
        try:
            return self._queue.get(timeout=min(timeout, LOOK_S))
        except queue.Empty:
            self._clock.pass_by(timeout)
            raise


def record_waits(monkeypatch: pytest.MonkeyPatch, clock: Clock | None = None) -> list[float | None]:
    """Record the timeout of each wait for a command by owner threads created from now on; give them `clock`, if any."""
    module = QueueModule(clock)
    monkeypatch.setattr(kvflow.backends.owner_thread, "queue", module)
    if clock is not None:
        monkeypatch.setattr(kvflow.backends.owner_thread, "time", clock)
    return module.waits
