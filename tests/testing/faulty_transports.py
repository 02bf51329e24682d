"""Transports with one fault each, and the contract suite on each; not collected, but run by `test_suite.py`."""

import asyncio
import functools
import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvflow.backends import Backend, BackendEvent, OnBroken, OnEvents, PostEnded, PostInDoubt
from kvflow.backends.memory import ENDPOINTS, MemoryBackend
from kvflow.backends.metadata import PeerMetadata
from kvflow.errors import BackendError
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.memory import MemoryRange
from kvflow.geometry.plan import Descriptors
from kvflow.testing.contract import BackendContract
from tests.support.faulty_memory import FaultScript, FaultyMemoryBackend


class Contract(BackendContract):
    backend = "memory"
    reaches_other_processes = False
    timeout_s = 0.5


class TestNothingIsWrong(Contract):
    timeout_s = BackendContract.timeout_s  # no test waits in vain


class Altering(MemoryBackend):
    """Base of transports that deliver wrong events."""

    @override
    async def open(self, agent_name: str, on_events: OnEvents, on_broken: OnBroken) -> None:
        def alter(events: Sequence[BackendEvent]) -> None:
            altered = self.alter(events)
            if altered:
                on_events(altered)

        await super().open(agent_name, alter, on_broken)

    def alter(self, events: Sequence[BackendEvent]) -> Sequence[BackendEvent]:
        """Return the events to deliver instead."""
        raise NotImplementedError


class EndsTwice(Altering):
    @override
    def alter(self, events: Sequence[BackendEvent]) -> Sequence[BackendEvent]:
        return [event for event in events for _ in range(2)]


class LosesEnds(Altering):
    is_closing = False

    @override
    def alter(self, events: Sequence[BackendEvent]) -> Sequence[BackendEvent]:
        return () if self.is_closing else events

    @override
    async def aclose(self) -> None:
        self.is_closing = True
        await super().aclose()


class NeverEnds(Altering):
    @override
    def alter(self, events: Sequence[BackendEvent]) -> Sequence[BackendEvent]:
        return [event for event in events if not isinstance(event, PostEnded)]


class DoubtsAfterTheEnd(Altering, FaultyMemoryBackend):
    def __init__(self) -> None:
        super().__init__(faults=FaultScript(["doubt"] * 99))

    @override
    def alter(self, events: Sequence[BackendEvent]) -> Sequence[BackendEvent]:
        doubts = [event for event in events if isinstance(event, PostInDoubt)]
        return [*(PostEnded(event.post_id, None) for event in doubts), *doubts]


class EndsBeforeItHasRead(MemoryBackend):
    @override
    def post(self, post_id: int, peer: str, descriptors: Descriptors, notice: bytes) -> None:
        super().post(post_id, peer, descriptors, notice)
        assert self._delivery is not None
        self._delivery.deliver_soon([PostEnded(post_id, None)])


class CallsBack(MemoryBackend):
    """Base of transports that deliver events in an unusual way."""

    @override
    async def open(self, agent_name: str, on_events: OnEvents, on_broken: OnBroken) -> None:
        def call_back(events: Sequence[BackendEvent]) -> None:
            self.call_back(functools.partial(on_events, events))

        await super().open(agent_name, call_back, on_broken)

    def call_back(self, deliver: Callable[[], None]) -> None:
        """Deliver the events."""
        raise NotImplementedError


class DeliversInsidePost(MemoryBackend):
    @override
    def post(self, post_id: int, peer: str, descriptors: Descriptors, notice: bytes) -> None:
        super().post(post_id, peer, descriptors, notice)
        self._take_turn()


class DeliversInAnotherThread(CallsBack):
    @override
    def call_back(self, deliver: Callable[[], None]) -> None:
        thread = threading.Thread(target=deliver)
        thread.start()
        thread.join()


class DeliversAfterClose(CallsBack):
    @override
    def call_back(self, deliver: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(deliver)


class DeliversNothingAtAll(Altering):
    @override
    async def open(self, agent_name: str, on_events: OnEvents, on_broken: OnBroken) -> None:
        await super().open(agent_name, on_events, on_broken)
        on_events(())

    @override
    def alter(self, events: Sequence[BackendEvent]) -> Sequence[BackendEvent]:
        return events


class NoticesFirst(MemoryBackend):
    @override
    def post(self, post_id: int, peer: str, descriptors: Descriptors, notice: bytes) -> None:
        super().post(post_id, peer, descriptors, b"")
        target = ENDPOINTS.get(peer)
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


class Corrupts(FaultyMemoryBackend):
    def __init__(self) -> None:
        super().__init__(faults=FaultScript(["corrupt"] * 99))


class RefusesLate(MemoryBackend):
    @override
    def post(self, post_id: int, peer: str, descriptors: Descriptors, notice: bytes) -> None:
        try:
            super().post(post_id, peer, descriptors, notice)
        except BackendError as error:
            assert self._delivery is not None
            self._delivery.deliver_soon([PostEnded(post_id, str(error))])


class TrustsMetadata(MemoryBackend):
    @override
    async def connect(self, peer: str, metadata: bytes) -> None:
        target = ENDPOINTS.get(peer)
        if target is None or target._memory is None:
            raise BackendError("peer is not in this process", peer=peer)
        self._peers[peer] = PeerMetadata(self.name, peer.encode(), target._memory)


class NeverForgetsAPeer(MemoryBackend):
    @override
    async def disconnect(self, peer: str) -> None:
        pass


class WritesOnAfterClose(MemoryBackend):
    @override
    async def aclose(self) -> None:
        left, delivery = list(self._writes), self._delivery
        await super().aclose()
        for write in left:
            assert delivery is not None
            self._writes.append(write)
            asyncio.get_running_loop().call_soon(self._copy, delivery)


class RegistersAgain(MemoryBackend):
    @override
    async def register(self, layout: KVLayout) -> None:
        self._memory = None
        await super().register(layout)


class ViewsACopy(MemoryBackend):
    @override
    def view(self, memory: MemoryRange) -> NDArray[np.uint8]:
        return np.array(super().view(memory))


class TellsErrorsLast(Altering):
    """Delivers failures after later successes, which is allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[BackendEvent] = []

    @override
    async def open(self, agent_name: str, on_events: OnEvents, on_broken: OnBroken) -> None:
        self.tell = on_events
        await super().open(agent_name, on_events, on_broken)

    @override
    def alter(self, events: Sequence[BackendEvent]) -> Sequence[BackendEvent]:
        self.held += [event for event in events if is_error(event)]
        told = [event for event in events if not is_error(event)]
        return [*told, *self.let_go()] if told else []

    def let_go(self) -> list[BackendEvent]:
        held, self.held = self.held, []
        return held

    @override
    async def aclose(self) -> None:
        await super().aclose()
        if self.held:
            self.tell(self.let_go())


def is_error(event: BackendEvent) -> bool:
    return isinstance(event, PostEnded) and event.error is not None


def suite_on(backend_class: Callable[[], Backend], timeout_s: float = Contract.timeout_s) -> type[Contract]:
    def new_backend(_: Contract) -> Backend:
        return backend_class()

    return type("Suite", (Contract,), {"new_backend": new_backend, "timeout_s": timeout_s})


TestEndsTwice = suite_on(EndsTwice)
TestLosesEnds = suite_on(LosesEnds)
TestNeverEnds = suite_on(NeverEnds)
TestDoubtsAfterTheEnd = suite_on(DoubtsAfterTheEnd)
TestEndsBeforeItHasRead = suite_on(EndsBeforeItHasRead)
TestNoticesFirst = suite_on(NoticesFirst)
TestNoticesTwice = suite_on(NoticesTwice)
TestLosesNotices = suite_on(LosesNotices)
TestCorrupts = suite_on(Corrupts)
TestDeliversInsidePost = suite_on(DeliversInsidePost)
TestDeliversInAnotherThread = suite_on(DeliversInAnotherThread)
TestDeliversAfterClose = suite_on(DeliversAfterClose)
TestDeliversNothingAtAll = suite_on(DeliversNothingAtAll)
TestRefusesLate = suite_on(RefusesLate)
TestTrustsMetadata = suite_on(TrustsMetadata)
TestNeverForgetsAPeer = suite_on(NeverForgetsAPeer)
TestWritesOnAfterClose = suite_on(WritesOnAfterClose)
TestRegistersAgain = suite_on(RegistersAgain)
TestViewsACopy = suite_on(ViewsACopy)
TestTellsErrorsLast = suite_on(TellsErrorsLast, BackendContract.timeout_s)
