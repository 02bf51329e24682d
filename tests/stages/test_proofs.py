"""Waits for last bytes, and the sound connections that living ranks list meanwhile."""

from collections.abc import Callable, Collection, Coroutine
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup

from kvflow.aio.pulse import Pulse
from kvflow.backends.memory import MemoryBackend
from kvflow.config import DecodeConfig
from kvflow.observe.logs import get_logger
from kvflow.observe.times import StageTimes
from kvflow.observe.trace import AnomalyLog
from kvflow.stages.bootstrap import PeerProofs
from kvflow.stages.context import StageContext
from kvflow.state.effects import NoteEnds, WaitForFence, WaitForLanding
from kvflow.state.events import DecodeEvent, Landed, PeerFenced
from kvflow.system import system_ports
from kvflow.wire.messages import Drained
from tests.support.cores import DECODE, PREFILL, peer
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

OTHER = peer("prefill", 1)
DRAINED = Drained(room=7, generation=1, engine_rank=0, in_flight=b"elsewhere")


class Waits(MemoryBackend):
    """A transport on which last bytes land when told.

    Attributes:
        waits: What each call of `outlast` was passed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[tuple[bytes, Collection[bytes], bool]] = []
        self.have_landed = anyio.Event()

    async def outlast(self, domain: bytes, ends: Collection[bytes] = (), *, is_alive: bool = False) -> bool:
        self.waits.append((domain, ends, is_alive))
        await self.have_landed.wait()
        return True


class Proofs:
    def __init__(self, tasks: TaskGroup) -> None:
        self.events: list[DecodeEvent] = []
        self.backend = Waits()

        def start(function: Callable[..., Coroutine[Any, Any, None]], *args: object) -> None:
            tasks.start_soon(function, *args)

        log = get_logger()
        context = StageContext[DecodeEvent](
            me=DECODE,
            config=DecodeConfig(instance="decode"),
            ports=system_ports(),
            now=system_ports().now,
            dispatch=self.events.append,
            start_task=start,
            times=StageTimes(),
            anomalies=AnomalyLog(log, system_ports().now),
            pulse=Pulse(system_ports().now, lambda: False, lambda _: None),
        )
        self.stage = PeerProofs(context, self.backend)

    def note(self, number: int, *ends: bytes, of: Any = PREFILL) -> None:
        self.stage.note_ends(NoteEnds(of, number, ends))

    async def waits(self, number: int) -> list[set[bytes]]:
        await until(lambda: len(self.backend.waits) == number)
        return [set(ends) for _, ends, _ in self.backend.waits]


async def test_connections_that_are_made_after_drained_was_said_need_not_end() -> None:
    """Mooncake opens them while a partition heals; each Drained is repeated, but one wait is enough."""
    async with anyio.create_task_group() as tasks:
        proofs = Proofs(tasks)
        proofs.stage.await_landing(WaitForLanding(PREFILL, DRAINED, 1))
        assert await proofs.waits(1) == [set()]
        proofs.note(1, b"first")
        proofs.stage.await_landing(WaitForLanding(PREFILL, DRAINED, 2))
        proofs.note(2, b"first", b"made later")
        proofs.note(2, b"of another rank", of=OTHER)
        assert await proofs.waits(1) == [{b"first", b"made later", b"of another rank"}]
        proofs.note(3, b"made later")
        assert await proofs.waits(1) == [{b"made later", b"of another rank"}]
        proofs.backend.have_landed.set()
    assert proofs.events == [Landed(PREFILL, 7, 1)]
    proofs.note(4, b"nobody waits any more")


async def test_what_a_rank_has_listed_before_a_wait_began_does_not_count() -> None:
    """An end may have belonged to a living rank then, and to the ended one later."""
    async with anyio.create_task_group() as tasks:
        proofs = Proofs(tasks)
        proofs.stage.fence(WaitForFence(PREFILL, b"elsewhere", 1))
        proofs.stage.fence(WaitForFence(OTHER, b"elsewhere", 2))
        proofs.note(1, b"end")
        assert await proofs.waits(2) == [{b"end"}, set()]
        proofs.backend.have_landed.set()
    assert proofs.events == [PeerFenced(PREFILL), PeerFenced(OTHER)]
    assert [is_alive for *_, is_alive in proofs.backend.waits] == [False, False]


async def test_the_end_of_a_wait_takes_nothing_from_a_later_one_for_the_same_rank() -> None:
    async with anyio.create_task_group() as tasks:
        proofs = Proofs(tasks)
        first = proofs.backend.have_landed
        proofs.stage.fence(WaitForFence(PREFILL, b"elsewhere", 1))
        await proofs.waits(1)
        proofs.backend.have_landed = anyio.Event()
        proofs.stage.fence(WaitForFence(PREFILL, b"elsewhere", 2))
        await proofs.waits(2)
        first.set()
        await until(lambda: proofs.events)
        proofs.note(2, b"end", of=OTHER)
        assert await proofs.waits(2) == [set(), {b"end"}]
        proofs.backend.have_landed.set()
    assert proofs.events == [PeerFenced(PREFILL)] * 2
