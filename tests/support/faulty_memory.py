"""The in-process transport with faults, and with memory at other addresses than its real ones."""

import asyncio
import ctypes
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

from kvflow.backends.base import OnBroken, OnEvents, PostEnded, PostInDoubt
from kvflow.backends.delivery import EventDelivery
from kvflow.backends.memory import ENDPOINTS, MemoryBackend, MemoryWrite
from kvflow.geometry.plan import Descriptors

__all__ = ["FaultScript", "FaultyMemoryBackend", "MappedMemoryBackend"]

Fault = Literal["fail", "doubt", "lose_notice", "corrupt", "overtake"]
"""The post fails, stays in doubt, loses its notice, corrupts the first byte that it writes, or its notice arrives at
once, before its bytes, which may be held."""


class FaultScript:
    """Faults to inject, post by post; shared by a test and the backend under test.

    Attributes:
        plan: Faults for the next posts, in order; None for a post that works.
        posted: Posts that were started, in order, as (peer, number of bytes).
        is_holding: Posts start, but nothing is copied.
        wake: Called by `release`.
    """

    def __init__(self, plan: Iterable[Fault | None] = ()) -> None:
        self.plan: deque[Fault | None] = deque(plan)
        self.posted: list[tuple[str, int]] = []
        self.is_holding = False
        self.wake: list[Callable[[], None]] = []

    def hold(self) -> None:
        """Let posts start, but copy nothing until `release`."""
        self.is_holding = True

    def release(self) -> None:
        """Copy the held posts. Can be called from any thread."""
        self.is_holding = False
        for wake in self.wake:
            wake()


class FaultyMemoryBackend(MemoryBackend):
    """A transport whose posts have the faults of a script.

    Args:
        faults: Faults to inject into this endpoint's posts.
    """

    def __init__(self, *, faults: FaultScript) -> None:
        super().__init__()
        self._faults = faults
        self._fault_of: dict[int, tuple[Fault | None, int]] = {}
        self._in_doubt: list[int] = []

    @override
    async def open(self, agent_name: str, on_events: OnEvents, on_broken: OnBroken) -> None:
        await super().open(agent_name, on_events, on_broken)
        loop = asyncio.get_running_loop()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._take_turn)

        self._faults.wake.append(wake)

    @override
    def post(self, post_id: int, peer: str, descriptors: Descriptors, notice: bytes) -> None:
        super().post(post_id, peer, descriptors, notice)
        self._faults.posted.append((peer, descriptors.num_bytes))
        fault = self._faults.plan.popleft() if self._faults.plan else None
        _, first_byte, _ = self._writes[-1].descriptors[0]
        self._fault_of[post_id] = fault, first_byte
        if fault == "overtake":
            ENDPOINTS[peer].deliver(notice)
            self._writes[-1].notice = b""

    @override
    def _take_turn(self) -> None:
        if self._faults.is_holding:
            self._has_turn = False
        else:
            super()._take_turn()

    @override
    def _copy(self, delivery: EventDelivery) -> None:
        if self._fault_of[self._writes[0].post_id][0] != "fail":
            super()._copy(delivery)
            return
        delivery.deliver_soon([PostEnded(self._writes.popleft().post_id, "scripted failure")])

    @override
    def _end_write(self, write: MemoryWrite, target: MemoryBackend, delivery: EventDelivery) -> None:
        fault, first_byte = self._fault_of[write.post_id]
        if fault == "doubt":
            self._in_doubt.append(write.post_id)
            delivery.deliver_soon([PostInDoubt(write.post_id, "scripted doubt")])
            return
        if fault == "corrupt":
            ctypes.c_ubyte.from_address(target.real_address(first_byte)).value ^= 0xFF
        if fault == "lose_notice":
            write.notice = b""
        super()._end_write(write, target, delivery)

    @override
    async def aclose(self) -> None:
        if self._delivery is not None:
            ends = [PostEnded(post_id, "stopped by closing the endpoint") for post_id in self._in_doubt]
            self._delivery.deliver_soon(ends)
        await super().aclose()


@dataclass
class MappedMemoryBackend(MemoryBackend):
    """A transport that finds the bytes of one range elsewhere, for example to give it addresses with bit 63.

    Attributes:
        address: First address of the range.
        length: Its bytes.
        real: Where its first byte is.
    """

    address: int
    length: int
    real: int

    def __post_init__(self) -> None:
        super().__init__()

    @override
    def real_address(self, address: int) -> int:
        is_mapped = self.address <= address < self.address + self.length
        return self.real + (address - self.address) if is_mapped else address
