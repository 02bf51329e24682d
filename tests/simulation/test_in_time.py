"""How long a refusal and a first contact take, in virtual time, where nothing else takes any."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import anyio
import pytest
from typing_extensions import override

import kvflow
from kvflow.config import Limits, Timeouts
from kvflow.errors import FailureReason, KvflowError, TransferFailed
from kvflow.gate.hellos import MAX_CONNECT_S
from kvflow.state.tables import Memory
from simulation import Process, World
from simulation.dataplane import DataPlane, SimulatedBackend
from tests.support.failures import catch
from tests.support.instances import make_pool

NEVER = Timeouts(handshake_s=600.0, transfer_s=600.0, grant_s=600.0, open_s=600.0)
"""Nothing ends by a timeout."""

PREFILL = "tcp://127.0.0.1:7200"
TOKENS = (0, 4)
PAGES = {"kv": [1]}


class SlowBackend(SimulatedBackend):
    """A transport that takes its time to connect."""

    def __init__(self, plane: DataPlane, process: Process, connect_s: float) -> None:
        super().__init__(plane, process)
        self._connect_s = connect_s

    @override
    async def connect(self, peer: str, metadata: bytes) -> None:
        await anyio.sleep(self._connect_s)
        await super().connect(peer, metadata)


@dataclass
class Ranks:
    """A prefill rank that sends room 1, and a decode rank.

    Attributes:
        sender: Sends room 1.
        is_free: Set as soon as the pages of that room are free.
    """

    prefill: kvflow.PrefillRank
    decode: kvflow.DecodeRank
    sender: kvflow.RoomSender
    is_free: anyio.Event = field(default_factory=anyio.Event)

    async def receive(self, room: int = 1, pages: dict[str, list[int]] = PAGES) -> None:
        async with self.decode.receive(room, prefill=PREFILL, tokens=TOKENS, pages=pages) as receiver:
            await receiver.done()

    async def send(self) -> None:
        with suppress(TransferFailed):
            async with self.sender:
                await self.sender.finish(TOKENS, PAGES)
        assert self.sender.memory is Memory.SAFE
        self.is_free.set()


async def with_ranks(
    world: World,
    process: Process,
    act: Callable[[Ranks], Awaitable[None]],
    *,
    timeouts: Timeouts = NEVER,
    connect_s: float = 0.0,
    transfers: int = 10,
    is_holding: bool = False,
    **pool: object,
) -> None:
    """Open the ranks, and act once the prefill rank offers room 1; decode may hold its page for another room."""
    config = kvflow.PrefillConfig(instance="prefill", backend="memory", bind=PREFILL, timeouts=NEVER)
    limits = Limits(transfers=transfers)
    receiving = kvflow.DecodeConfig(instance="decode", backend="memory", timeouts=timeouts, limits=limits)
    backends = SlowBackend(world.plane, process, connect_s), world.backend(process)
    layouts = make_pool().layout, make_pool(**pool).layout  # type: ignore[arg-type]
    ports = [world.ports(process) for _ in range(2)]
    async with (
        kvflow.PrefillRank(config, layouts[0], backends[0], ports=ports[0]) as prefill,
        kvflow.DecodeRank(receiving, layouts[1], backends[1], ports=ports[1]) as decode,
        anyio.create_task_group() as tasks,
    ):
        ranks = Ranks(prefill, decode, prefill.send(1))
        tasks.start_soon(ranks.send)
        if is_holding:
            tasks.start_soon(ranks.receive, 900)
        await anyio.sleep(1.0)
        await act(ranks)
        await ranks.is_free.wait()
        tasks.cancel_scope.cancel()


async def receive(ranks: Ranks) -> None:
    await ranks.receive()


async def receive_bad_pages(ranks: Ranks) -> None:
    await ranks.receive(pages={"kv": [10_000]})


async def receive_while_draining(ranks: Ranks) -> None:
    ranks.decode.start_drain()
    await ranks.receive()


async def announce(ranks: Ranks) -> None:
    async with ranks.decode.announce(1, prefill=PREFILL):
        pass


async def announce_while_draining(ranks: Ranks) -> None:
    ranks.decode.start_drain()
    await announce(ranks)


async def use_ticket(ranks: Ranks) -> None:
    ranks.decode.receive(prefill=ranks.prefill.ticket(1), tokens=TOKENS, pages=PAGES)


async def decline(ranks: Ranks) -> None:
    ranks.decode.decline(prefill=ranks.prefill.ticket(1), detail="its prompt is too long")


OTHER = {"fingerprint": "another model"}
FULL = {"is_holding": True, "transfers": 1}

REFUSALS = [
    pytest.param(receive, OTHER, FailureReason.REFUSED, id="handshake, model"),
    pytest.param(receive, {"head_bytes": 16}, FailureReason.REFUSED, id="handshake, cells"),
    pytest.param(receive, {"is_holding": True}, FailureReason.PAGES_IN_USE, id="receive, pages in use"),
    pytest.param(receive_bad_pages, {}, FailureReason.INVALID_PAGES, id="receive, invalid pages"),
    pytest.param(receive, FULL, FailureReason.CAPACITY, id="receive, capacity"),
    pytest.param(receive_while_draining, {}, FailureReason.PEER_CLOSED, id="receive, draining"),
    pytest.param(announce, FULL, FailureReason.CAPACITY, id="announce, capacity"),
    pytest.param(announce_while_draining, {}, FailureReason.PEER_CLOSED, id="announce, draining"),
    pytest.param(use_ticket, OTHER, FailureReason.REFUSED, id="ticket, model"),
    pytest.param(decline, {}, FailureReason.ABORTED, id="ticket, declined"),
]


@pytest.mark.parametrize(("refuse", "settings", "reason"), REFUSALS)
def test_pages_of_prefill_are_free_within_a_second_of_a_refusal(
    refuse: Callable[[Ranks], Awaitable[None]], settings: dict[str, object], reason: FailureReason
) -> None:
    took_s: list[float] = []

    async def act(ranks: Ranks) -> None:
        began = world.now
        with suppress(KvflowError):
            await refuse(ranks)
        await ranks.is_free.wait()
        took_s.append(world.now - began)
        assert ranks.sender.failure is not None
        assert ranks.sender.failure.reason is reason

    with World(3) as world:
        world.start("both", lambda process: with_ranks(world, process, act, **settings))  # type: ignore[arg-type]
        world.run(900.0)
    (free_s,) = took_s
    assert free_s < 1.0


def test_a_first_contact_may_take_as_long_as_a_handshake() -> None:
    took_s: list[float] = []

    async def act(ranks: Ranks) -> None:
        began = world.now
        await ranks.receive()
        took_s.append(world.now - began)

    timeouts = replace(NEVER, handshake_s=15.0)
    with World(3) as world:
        world.start("both", lambda process: with_ranks(world, process, act, timeouts=timeouts, connect_s=14.0))
        world.run(900.0)
    (contact_s,) = took_s
    assert 14.0 < contact_s < 15.0


def test_a_transport_that_does_not_answer_is_given_up_and_named_however_long_the_peer_would_wait() -> None:
    took_s: list[float] = []
    failures: list[TransferFailed] = []

    async def act(ranks: Ranks) -> None:
        began = world.now
        failures.append(await catch(ranks.receive))
        took_s.append(world.now - began)

    assert NEVER.handshake_s > MAX_CONNECT_S
    with World(3) as world:
        world.start("both", lambda process: with_ranks(world, process, act, connect_s=3_600.0))
        world.run(900.0)
    (failure,), (contact_s,) = failures, took_s
    assert contact_s == pytest.approx(MAX_CONNECT_S, abs=1.0)
    assert "transport of the peer does not answer" in failure.detail
    assert f"timeout_s={MAX_CONNECT_S}" in failure.detail
