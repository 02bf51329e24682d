"""What an owner thread does while nobody looks."""

import queue
from collections.abc import Callable

import pytest

import kvflow.backends.owner_thread

__all__ = ["record_waits"]

Command = Callable[[], None] | None


class QueueModule:
    """Stands for the module `queue`: its queues note how long their taker is ready to wait."""

    Empty = queue.Empty

    def __init__(self) -> None:
        self.waits: list[float | None] = []

    def SimpleQueue(self) -> "RecordingQueue":
        return RecordingQueue(self.waits)


class RecordingQueue:
    def __init__(self, waits: list[float | None]) -> None:
        self._waits = waits
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def put(self, command: Command) -> None:
        self._queue.put(command)

    def get(self, timeout: float | None) -> Command:
        self._waits.append(timeout)
        return self._queue.get(timeout=timeout)


def record_waits(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """How long each look for a command is ready to wait, for owners made from now on."""
    module = QueueModule()
    monkeypatch.setattr(kvflow.backends.owner_thread, "queue", module)
    return module.waits
