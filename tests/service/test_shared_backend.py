"""Both roles in one process: a prefill and a decode rank on one pool, over one endpoint of the transport."""

import functools
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass

import anyio
import numpy as np
import pytest
from typing_extensions import override

import kvflow
from kvflow import blocking
from kvflow.backends.memory import MemoryBackend
from kvflow.backends.shared import RankEndpoint
from kvflow.bounds import Bounds
from kvflow.errors import BackendUnavailable, ConfigError, LocalProtocolError
from tests.backends.endpoints import copies, open_backend
from tests.support.faulty_memory import FaultScript, FaultyMemoryBackend
from tests.support.instances import BACKENDS, PAGE_SIZE, anomalies_of, decode_config, make_pool, prefill_config
from tests.support.pools import Pool
from tests.support.registries import registry_in_thread
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

TOKENS = (0, 32)
NUM_PAGES = 8
PIECES = Bounds(bytes_per_post=1)
"""Limits that make each page a piece, for several pieces in flight in both directions."""


@dataclass
class Worker:
    """The equivalent of a process: one pool, one endpoint, both roles."""

    name: str
    registry: str
    pool: Pool
    shared: kvflow.SharedBackend
    backend: str
    prefill: kvflow.PrefillRank
    decode: kvflow.DecodeRank

    def new_prefill(self) -> kvflow.PrefillRank:
        config = prefill_config(self.registry, instance=self.name, backend=self.backend, limits=PIECES)
        return kvflow.PrefillRank(config, self.pool.layout, self.shared)

    def new_decode(self, staging_bytes: int | None = None) -> kvflow.DecodeRank:
        config = decode_config(self.registry, instance=self.name, backend=self.backend, staging_bytes=staging_bytes)
        return kvflow.DecodeRank(config, self.pool.layout, self.shared)


def a_worker(name: str, registry: str, backend: str, shared: kvflow.SharedBackend | None = None) -> Worker:
    pool = make_pool()
    shared = shared or kvflow.SharedBackend(backend)
    worker = Worker(name, registry, pool, shared, backend, None, None)  # type: ignore[arg-type]
    worker.prefill, worker.decode = worker.new_prefill(), worker.new_decode()
    return worker


@asynccontextmanager
async def workers(backend: str, *names: str, options: dict[str, object] | None = None) -> AsyncIterator[list[Worker]]:
    async with kvflow.Registry() as registry, AsyncExitStack() as stack:
        found = [a_worker(name, registry.endpoint, backend, kvflow.SharedBackend(backend, options)) for name in names]
        for worker in found:
            await stack.enter_async_context(worker.prefill)
            await stack.enter_async_context(worker.decode)
        yield found


def write(pool: Pool, pages: list[int], value: int) -> None:
    for token in range(*TOKENS):
        for tensor in "kv":
            for layer in range(2):
                for head in range(6):
                    pool.cell(tensor, layer, pages[token // PAGE_SIZE], token % PAGE_SIZE, head)[:] = value + token


def holds(pool: Pool, pages: list[int], value: int) -> bool:
    expected = make_pool()
    write(expected, pages, value)
    return all(
        np.array_equal(
            pool.cell(tensor, layer, pages[token // PAGE_SIZE], token % PAGE_SIZE, head),
            expected.cell(tensor, layer, pages[token // PAGE_SIZE], token % PAGE_SIZE, head),
        )
        for token in range(*TOKENS)
        for tensor in "kv"
        for layer in range(2)
        for head in range(6)
    )


def pages_from(first: int) -> list[int]:
    return list(range(first, first + NUM_PAGES))


async def hand_over(room: int, source: Worker, target: Worker, first: int, to: int, value: int) -> None:
    """Send pages of one worker to pages of another worker, or to others of its own."""
    write(source.pool, pages_from(first), value)

    async def send() -> None:
        async with source.prefill.send(room) as sender:
            await sender.finish(TOKENS, {"kv": pages_from(first)}, metadata=b"token %d" % room)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send)
        async with target.decode.receive(
            room, prefill=source.name, tokens=TOKENS, pages={"kv": pages_from(to)}
        ) as receiver:
            assert (await receiver.done()).metadata == b"token %d" % room
    assert holds(target.pool, pages_from(to), value)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_bytes_go_both_ways_at_once_and_a_second_turn_comes_back(backend: str) -> None:
    async with workers(backend, "one", "other") as (one, other):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hand_over, 1, one, other, 0, 40, 1)
            tasks.start_soon(hand_over, 2, other, one, 0, 40, 60)
        # decode's pages go back to their source, with the tokens of the next turn
        await hand_over(3, other, one, 40, 20, 100)
        # from one role to the other within a process
        await hand_over(4, one, one, 20, 50, 120)
        assert anomalies_of(one.prefill.statistics()) == anomalies_of(one.decode.statistics()) == {}
        names = [thread.name for thread in threading.enumerate()]
        assert len([name for name in names if name.startswith("kvflow-")]) == (0 if backend == "memory" else 2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("staging_bytes", [0, 2**25])
async def test_a_role_is_left_and_taken_up_while_the_other_one_goes_on(backend: str, staging_bytes: int) -> None:
    """With staging memory, each decode rank registers more memory, which its peers must learn about."""
    async with workers(backend, "one", "other") as (one, other), AsyncExitStack() as stack:
        await hand_over(1, one, other, 0, 40, 1)
        await other.decode.__aexit__(None, None, None)
        await hand_over(2, other, one, 0, 40, 30)
        other.decode = await stack.enter_async_context(other.new_decode(staging_bytes))
        await hand_over(3, one, other, 0, 20, 60)
        await one.prefill.__aexit__(None, None, None)
        await hand_over(4, other, one, 0, 40, 90)
        one.prefill = await stack.enter_async_context(one.new_prefill())
        await hand_over(5, one, other, 0, 20, 120)


async def test_the_endpoint_closes_with_its_last_rank_and_opens_again() -> None:
    async with kvflow.Registry() as registry:
        worker = a_worker("one", registry.endpoint, "nixl")
        for _ in range(2):
            async with worker.decode:
                agent = agent_of(worker)
                async with worker.prefill:
                    assert agent_of(worker) == agent == str(worker.decode.me)
                await hand_back(worker)
            assert agent_of(worker) is None
            worker.prefill, worker.decode = worker.new_prefill(), worker.new_decode()


def agent_of(worker: Worker) -> str | None:
    return worker.shared.agent


async def hand_back(worker: Worker) -> None:
    """Check that the endpoint still works, with a transfer from a worker to itself."""
    async with worker.new_prefill() as prefill:
        worker.prefill = prefill
        await hand_over(1, worker, worker, 0, 20, 7)


async def test_what_has_not_ended_proves_nothing_while_the_agent_lives() -> None:
    """A prefill rank closes in the middle of its writes, which the agent continues."""
    faults = FaultScript()
    async with kvflow.Registry() as registry, AsyncExitStack() as stack:
        shared = kvflow.SharedBackend(functools.partial(FaultyMemoryBackend, faults=faults))
        one = a_worker("one", registry.endpoint, "memory", shared)
        one.shared.close_timeout_s = 0.05
        other = a_worker("other", registry.endpoint, "memory")
        for rank in (one.decode, other.decode, other.prefill):
            await stack.enter_async_context(rank)
        await one.prefill.__aenter__()
        faults.hold()
        receiver = other.decode.receive(1, prefill="one", tokens=TOKENS, pages={"kv": pages_from(40)})
        sender = one.prefill.send(1)
        sender._open_room()
        receiver._open_room()
        await sender.finish(TOKENS, {"kv": pages_from(0)})
        await until(lambda: one.prefill.statistics().posted == NUM_PAGES)
        await one.prefill.__aexit__(None, None, None)
        assert (sender.outcome, sender.memory) == (kvflow.Outcome.ABORTED, kvflow.Memory.QUARANTINED)
        await until(lambda: receiver.memory is kvflow.Memory.QUARANTINED)  # it may be written to when the writes go on
        assert receiver.outcome is kvflow.Outcome.FAILED
        faults.release()
        await until(lambda: receiver.memory is kvflow.Memory.SAFE)  # the notices came with the last bytes
        assert sender.memory is kvflow.Memory.QUARANTINED, "its rank is closed, and hears of nothing any more"
        await hand_over(2, other, one, 0, 40, 30)


async def test_an_agent_is_not_taken_from_another_rank() -> None:
    """A rank that claims another rank's agent must know its memory; otherwise writes would go to the wrong place."""
    async with workers("memory", "one", "other") as (one, other):
        await hand_over(1, one, other, 0, 40, 1)
        agents = one.prefill._submit._agents
        theirs = other.decode.me
        stranger = theirs._replace(incarnation=theirs.incarnation + 1)
        assert other.shared.agent is not None
        with pytest.raises(kvflow.BackendError, match="another peer has the same transport"):
            agents.add(stranger, other.shared.agent, b"mine")
        with pytest.raises(kvflow.BackendError, match="a different transport agent"):
            agents.add(theirs, "somebody", b"mine")
        assert agents.find_name(theirs) == other.shared.agent


class NotesPrincipals(MemoryBackend):
    """A transport that records the principals of its peers."""

    def __init__(self) -> None:
        super().__init__()
        self.principals: list[str] = []

    @override
    async def connect_authenticated(self, peer: str, metadata: bytes, principal: str) -> None:
        self.principals.append(principal)
        await super().connect_authenticated(peer, metadata, principal)


async def test_a_shared_transport_learns_the_principals_of_peers() -> None:
    transport = NotesPrincipals()
    shared = kvflow.SharedBackend(lambda: transport)
    async with open_backend(RankEndpoint(shared)) as source, open_backend(MemoryBackend()) as target:
        await source.backend.connect_authenticated(target.name, target.backend.metadata(), "decode")
        await source.connect(target)
        source.post(1, target, copies(source, target))
        assert (await source.take_end(1)).error is None
    assert transport.principals == ["decode"]


async def test_misuse_is_told() -> None:
    with pytest.raises(ConfigError):
        kvflow.SharedBackend("carrier pigeon")
    with pytest.raises(ConfigError, match="options"):
        kvflow.SharedBackend("memory", {"speed": "high"})
    async with kvflow.Registry() as registry:
        worker = a_worker("one", registry.endpoint, "memory")
        async with worker.decode:
            other = worker.new_prefill()

            async def enter() -> None:
                await other.__aenter__()

            with pytest.raises(LocalProtocolError, match="one event loop"):
                await anyio.to_thread.run_sync(lambda: anyio.run(enter))
        elsewhere = Worker("two", registry.endpoint, make_pool(), worker.shared, "memory", None, None)  # type: ignore[arg-type]
        async with worker.new_decode(), elsewhere.new_prefill():
            pass  # other memory is added


def is_broken(rank: kvflow.PrefillRank | kvflow.DecodeRank) -> bool:
    try:
        rank._check_open()
    except kvflow.RankBroken:
        return True
    return False


async def test_a_breakdown_breaks_every_rank() -> None:
    async with kvflow.Registry() as registry:
        worker = a_worker("one", registry.endpoint, "memory")
        ranks = (worker.prefill, worker.decode)
        for rank in ranks:
            await rank.__aenter__()
        worker.shared._break_down(kvflow.BackendError("broken"))
        await until(lambda: all(is_broken(rank) for rank in ranks))
        newcomer = worker.new_decode()
        with pytest.raises(BackendUnavailable, match="has failed"):
            await newcomer.__aenter__()
        for rank in ranks:
            with pytest.raises(ExceptionGroup):
                await rank.__aexit__(None, None, None)
        assert worker.shared.agent is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scheduler_has_both_roles_on_one_thread(backend: str) -> None:
    pool = make_pool()
    write(pool, pages_from(0), 9)
    with registry_in_thread() as endpoint, ExitStack() as stack:
        loop = stack.enter_context(blocking.LoopThread())
        shared = kvflow.SharedBackend(backend)
        prefill = stack.enter_context(
            blocking.PrefillRank(prefill_config(endpoint, backend=backend), pool.layout, shared, loop=loop)
        )
        decode = stack.enter_context(
            blocking.DecodeRank(decode_config(endpoint, backend=backend), pool.layout, shared, loop=loop)
        )
        receiver = decode.receive(1, prefill="prefill", tokens=TOKENS, pages={"kv": pages_from(30)})
        sender = prefill.send(1)
        sender.finish(TOKENS, {"kv": pages_from(0)})
        assert (receiver.wait(20), sender.wait(20)) == (blocking.Outcome.SUCCESS, blocking.Outcome.SUCCESS)
        assert holds(pool, pages_from(30), 9)
