"""What an owner thread does while nobody looks."""

import queue
from collections.abc import Callable
from typing import Final

import pytest

import kvflow.backends.owner_thread

__all__ = ["Clock", "record_waits"]

Command = Callable[[], None] | None

LOOK_S: Final = 1e-4
"""How long a wait really takes that has a clock of its own."""


class Clock:
    """Stands for the module `time`: time passes while an owner thread waits in vain for a command, and only then.

    How long a poll takes, and how late a thread is woken, depends on the machine; here neither takes any time.
    """

    def __init__(self) -> None:
        self._now = 1_000.0

    def monotonic(self) -> float:
        return self._now

    def pass_by(self, seconds: float) -> None:
        self._now += seconds


class QueueModule:
    """Stands for the module `queue`: its queues note how long their taker is ready to wait."""

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
    """How long each look for a command is ready to wait, for owners made from now on; by a clock of theirs, if any."""
    module = QueueModule(clock)
    monkeypatch.setattr(kvflow.backends.owner_thread, "queue", module)
    if clock is not None:
        monkeypatch.setattr(kvflow.backends.owner_thread, "time", clock)
    return module.waits
