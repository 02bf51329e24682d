"""Transports with one fault each, and the suite on each of them: not collected, but run by `test_suite.py`."""

import functools
from collections.abc import Callable, Sequence

import anyio.lowlevel
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvflow.backends import Backend, BackendEvent, PostEnded
from kvflow.backends.memory import FaultScript, MemoryBackend
from kvflow.backends.metadata import PeerMetadata
from kvflow.errors import BackendError
from kvflow.geometry.layout import KVLayout, MemoryRange
from kvflow.geometry.plan import Descriptors
from kvflow.testing.contract import BackendContract


class Contract(BackendContract):
    backend = "memory"
    reaches_other_processes = False
    timeout_s = 0.5


class TestNothingIsWrong(Contract):
    pass


class EndsTwice(MemoryBackend):
    @override
    async def take_events(self) -> Sequence[BackendEvent]:
        return [event for event in await super().take_events() for _ in range(2)]


class LosesEnds(MemoryBackend):
    @override
    async def aclose(self) -> Sequence[BackendEvent]:
        await super().aclose()
        return ()


class NeverEnds(MemoryBackend):
    @override
    async def take_events(self) -> Sequence[BackendEvent]:
        return [event for event in await super().take_events() if not isinstance(event, PostEnded)]


class DoubtsAfterTheEnd(MemoryBackend):
    def __init__(self) -> None:
        super().__init__(faults=FaultScript(["doubt"] * 99))

    @override
    async def take_events(self) -> Sequence[BackendEvent]:
        doubts = [event for event in await super().take_events() if not isinstance(event, PostEnded)]
        return [*(PostEnded(post_id, None) for post_id in self._doubtful), *doubts]


class EndsBeforeItHasRead(MemoryBackend):
    @override
    def post(self, post_id: int, peer: str, descriptors: Descriptors, notice: bytes) -> None:
        super().post(post_id, peer, descriptors, notice)
        self._mailbox.put([PostEnded(post_id, None)])

    @override
    async def take_events(self) -> Sequence[BackendEvent]:
        if len(self._mailbox):
            return self._mailbox.take_nowait()[:1]
        return await super().take_events()


class NoticesFirst(MemoryBackend):
    @override
    def post(self, post_id: int, peer: str, descriptors: Descriptors, notice: bytes) -> None:
        super().post(post_id, peer, descriptors, b"")
        target = self._fabric.find(peer)
        if notice and target is not None:
            target.deliver(notice)


class NoticesTwice(MemoryBackend):
    @override
    def deliver(self, notice: bytes) -> None:
        super().deliver(notice)
        super().deliver(notice)


class LosesNotices(MemoryBackend):
    @override
    def deliver(self, notice: bytes) -> None:
        pass


class Corrupts(MemoryBackend):
    def __init__(self) -> None:
        super().__init__(faults=FaultScript(["corrupt"] * 99))


class ForgetsWhenCancelled(MemoryBackend):
    @override
    async def take_events(self) -> Sequence[BackendEvent]:
        events = await super().take_events()
        await anyio.lowlevel.checkpoint()
        return events


class RefusesLate(MemoryBackend):
    @override
    def post(self, post_id: int, peer: str, descriptors: Descriptors, notice: bytes) -> None:
        try:
            super().post(post_id, peer, descriptors, notice)
        except BackendError as error:
            self._mailbox.put([PostEnded(post_id, str(error))])


class TrustsMetadata(MemoryBackend):
    @override
    async def connect(self, peer: str, metadata: bytes) -> None:
        target = self._fabric.find(peer)
        if target is None or target._memory is None:
            raise BackendError("peer is not in this process", peer=peer)
        self._peers[peer] = PeerMetadata(self.name, peer.encode(), target._memory)


class NeverForgetsAPeer(MemoryBackend):
    @override
    async def disconnect(self, peer: str) -> None:
        pass


class WritesOnAfterClose(MemoryBackend):
    @override
    async def aclose(self) -> Sequence[BackendEvent]:
        left = list(self._writes)
        events = await super().aclose()
        loop = self._mailbox._loop
        for write in left:
            self._writes.append(write)
            loop.call_soon(functools.partial(self._move))
        return events


class RegistersAgain(MemoryBackend):
    @override
    async def register(self, layout: KVLayout) -> None:
        self._memory = None
        await super().register(layout)


class ViewsACopy(MemoryBackend):
    @override
    def view(self, memory: MemoryRange) -> NDArray[np.uint8]:
        return np.array(super().view(memory))


def suite_on(backend_class: Callable[[], Backend]) -> type[Contract]:
    def new_backend(_: Contract) -> Backend:
        return backend_class()

    return type("Suite", (Contract,), {"new_backend": new_backend})


TestEndsTwice = suite_on(EndsTwice)
TestLosesEnds = suite_on(LosesEnds)
TestNeverEnds = suite_on(NeverEnds)
TestDoubtsAfterTheEnd = suite_on(DoubtsAfterTheEnd)
TestEndsBeforeItHasRead = suite_on(EndsBeforeItHasRead)
TestNoticesFirst = suite_on(NoticesFirst)
TestNoticesTwice = suite_on(NoticesTwice)
TestLosesNotices = suite_on(LosesNotices)
TestCorrupts = suite_on(Corrupts)
TestForgetsWhenCancelled = suite_on(ForgetsWhenCancelled)
TestRefusesLate = suite_on(RefusesLate)
TestTrustsMetadata = suite_on(TrustsMetadata)
TestNeverForgetsAPeer = suite_on(NeverForgetsAPeer)
TestWritesOnAfterClose = suite_on(WritesOnAfterClose)
TestRegistersAgain = suite_on(RegistersAgain)
TestViewsACopy = suite_on(ViewsACopy)
