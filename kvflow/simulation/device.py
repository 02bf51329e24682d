"""Devices of the simulation: they finish layers of a chunk when they get to it, and somebody waits for that."""

from collections import deque
from collections.abc import Callable

from typing_extensions import override

from kvflow.errors import LocalProtocolError
from kvflow.stages.enqueue import Enqueue
from kvflow.state.effects import EnqueueChunk
from kvflow.state.events import DeliveryId

__all__ = ["DeviceEvent", "SimEnqueue"]


class DeviceEvent:
    """Happens once."""

    def __init__(self) -> None:
        self._has_happened = False
        self._waiting: list[Callable[[], None]] = []

    def when(self, run: Callable[[], None]) -> None:
        """Run something as soon as it has happened."""
        if self._has_happened:
            run()
        else:
            self._waiting.append(run)

    def happen(self) -> None:
        """Let it happen."""
        self._has_happened = True
        waiting, self._waiting = self._waiting, []
        for run in waiting:
            run()

    def synchronize(self) -> None:
        """Nothing may block in virtual time."""
        if not self._has_happened:
            raise LocalProtocolError("a device event was waited for by blocking")


class SimEnqueue(Enqueue):
    """Waits for devices without threads."""

    @override
    async def _wait_for_devices(self, delivery: DeliveryId, line: deque[EnqueueChunk]) -> None:
        self._go_on(delivery, line)

    def _go_on(self, delivery: DeliveryId, line: deque[EnqueueChunk]) -> None:
        if self._not_ready.get(delivery) is not line:
            return
        ready = line[0].chunk.ready
        if isinstance(ready, DeviceEvent):
            ready.when(lambda: self._answered(delivery, line))
        else:
            self._answered(delivery, line)

    def _answered(self, delivery: DeliveryId, line: deque[EnqueueChunk]) -> None:
        self._device_answered(delivery, line, None)
        self._go_on(delivery, line)
