"""Connections that UCX keeps to removed peers that live must not use up file descriptors."""

import functools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest

from benchmarks.resources import num_files
from kvflow.backends import library_sockets
from kvflow.backends.nixl import NixlBackend, outgoing
from kvflow.backends.nixl import endpoints as nixl_endpoints
from kvflow.backends.nixl.endpoints import MAX_KEPT
from kvflow.errors import BackendError
from kvflow.geometry.plan import Descriptors
from tests.backends.endpoints import (
    Endpoint,
    copies,
    descriptors_of,
    fresh_name,
    make_layout,
    open_backend,
    open_endpoints,
    same,
)
from tests.support.nixl_agents import ForeignAgent, foreign_agents
from tests.support.slow import slow_except
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

SLACK = 4
"""Descriptors that other parts of the process may open meanwhile."""

NUM_BYTES = 4 * 2**20


def to(source: Endpoint, agent: ForeignAgent, length: int = 4_096) -> Descriptors:
    """Return one write to an agent in another process."""
    src = descriptors_of(source, [0], length)
    return Descriptors(src, np.array([[agent.address, length, 0]], np.uint64))


class Honest:
    """Writes to a target in this process all the time, and checks each write."""

    def __init__(self, source: Endpoint, target: Endpoint) -> None:
        self.count = 0
        self.is_over = False
        self._source, self._target = source, target

    async def write(self) -> None:
        while not self.is_over:
            number = 1_000_000 + self.count
            self._target.memory[:] = 0
            self._source.post(number, self._target, copies(self._source, self._target, length=NUM_BYTES), b"honest")
            assert (await self._source.take_end(number)).error is None
            assert same(self._source, self._target, 0, NUM_BYTES)
            self.count += 1


@asynccontextmanager
async def writing() -> AsyncIterator[tuple[Endpoint, Honest]]:
    """Open a source that writes to a target of its own all the time."""
    async with open_endpoints("nixl", NUM_BYTES) as (source, target), anyio.create_task_group() as tasks:
        honest = Honest(source, target)
        tasks.start_soon(honest.write)
        await until(lambda: honest.count > 2)
        try:
            yield source, honest
        finally:
            honest.is_over = True
    assert {end.error for end in source.ends()} == {None}


async def come_and_go(source: Endpoint, agents: Sequence[ForeignAgent], *, is_written_to: bool) -> None:
    """Connect and disconnect agents, one after another."""
    for number, agent in enumerate(agents):
        await source.backend.connect(agent.name, agent.metadata)
        if is_written_to:
            source.backend.post(number, agent.name, to(source, agent), b"")
            assert (await source.take_end(number)).error is None
        await source.backend.disconnect(agent.name)


@pytest.mark.parametrize(
    "is_written_to", [pytest.param(True, id="written to"), pytest.param(False, id="unused", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("count", "most_kept"),
    [(10, 2), pytest.param(3 * MAX_KEPT, MAX_KEPT, marks=pytest.mark.slow)],
)
async def test_ever_new_agents_of_a_process_that_lives_use_up_no_descriptors(
    monkeypatch: pytest.MonkeyPatch, count: int, most_kept: int, is_written_to: bool
) -> None:
    monkeypatch.setattr(nixl_endpoints, "MAX_KEPT", most_kept)
    async with writing() as (source, honest), foreign_agents([fresh_name() for _ in range(count)]) as agents:
        before = num_files()
        await come_and_go(source, agents, is_written_to=is_written_to)
        await until(lambda: num_files() <= before + most_kept + SLACK)
        await until(lambda: not source.backend.unclosed())
        enough = honest.count + 3
        await until(lambda: honest.count >= enough)


@pytest.mark.slow
async def test_agents_that_never_answer_use_up_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX keeps trying to reach them."""
    monkeypatch.setattr(nixl_endpoints, "MAX_KEPT", 0)
    names = [fresh_name() for _ in range(16)]
    async with writing() as (source, honest), foreign_agents(names, is_silent=True) as agents:
        before = num_files()
        await come_and_go(source, agents, is_written_to=False)
        assert num_files() > before
        await until(lambda: num_files() <= before + SLACK)
        await until(lambda: not source.backend.unclosed())
        enough = honest.count + 3
        await until(lambda: honest.count >= enough)


@pytest.mark.parametrize("cut", slow_except([10], [10, 40, 100]))
async def test_blobs_that_the_library_refuses_half_way_use_up_no_descriptors(
    monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    monkeypatch.setattr(nixl_endpoints, "ANSWER_S", 0.3)
    async with open_backend(NixlBackend()) as source, foreign_agents([fresh_name() for _ in range(9)]) as agents:
        before = num_files()
        for agent in agents[1:]:
            with pytest.raises(BackendError, match="refused the peer's metadata"):
                await source.backend.connect(agent.name, agent.with_blob(agent.blob[:-cut]))
        assert num_files() > before
        await until(lambda: num_files() <= before + 1)
        await come_and_go(source, agents[:1], is_written_to=True)


async def test_a_blob_with_another_name_does_not_reach_the_library(monkeypatch: pytest.MonkeyPatch, api: Any) -> None:
    """A truncated blob would make the name unusable for its owner."""
    added: list[bytes] = []
    add = api.nixl_agent.add_remote_agent

    def record(agent: object, blob: bytes) -> object:
        added.append(blob)
        return add(agent, blob)

    monkeypatch.setattr(api.nixl_agent, "add_remote_agent", record)
    async with open_backend(NixlBackend()) as source, foreign_agents([fresh_name()]) as (agent,):
        for blob in (agent.blob, agent.blob[:-10]):
            with pytest.raises(BackendError, match="belongs to another agent"):
                await source.backend.connect("somebody", agent.with_blob(blob))
        assert added == []
        await come_and_go(source, [agent], is_written_to=True)
        assert added == [agent.blob]


@pytest.mark.parametrize("end", slow_except(["", "#2"], ["", "#2", "#4"]))
async def test_a_peer_with_the_name_of_an_own_agent_is_not_taken_for_it(end: str) -> None:
    """Otherwise kvflow would write to its own memory with this endpoint's layout once agent #2 has been started."""
    async with open_backend(NixlBackend()) as source:
        name = f"{source.name}{end}"
        async with foreign_agents([name]) as (agent,):
            with pytest.raises(BackendError, match="an own agent"):
                await source.backend.connect(name, agent.metadata)
        for peer in ("somebody", f"{source.name}#2"):
            with pytest.raises(BackendError, match="an own agent"):
                await source.backend.connect(peer, source.backend.metadata())


async def test_an_endpoint_writes_to_itself_also_with_metadata_of_earlier() -> None:
    async with open_backend(NixlBackend()) as source:
        before = source.backend.metadata()
        more = np.zeros(64, np.uint8)
        await source.backend.extend(make_layout(int(more.ctypes.data), more.nbytes))
        assert source.backend.metadata() != before
        for number, metadata in enumerate((before, source.backend.metadata())):
            await source.backend.connect(source.name, metadata)
            source.post(number, source, copies(source, source))
            assert (await source.take_end(number)).error is None
            await source.backend.disconnect(source.name)


async def test_a_peer_that_was_removed_is_reached_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_endpoints, "MAX_KEPT", 0)
    async with writing() as (source, _), foreign_agents([fresh_name()]) as agents:
        before = num_files()
        for number in range(8):
            await source.backend.connect(agents[0].name, agents[0].metadata)
            source.backend.post(number, agents[0].name, to(source, agents[0]), b"")
            assert (await source.take_end(number)).error is None
            await source.backend.disconnect(agents[0].name)
            if number % 2:
                await until(lambda: num_files() <= before + SLACK)


async def test_connections_to_the_address_of_a_live_peer_are_left_alone_until_it_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer can claim the address of another one for its agents."""
    monkeypatch.setattr(nixl_endpoints, "MAX_KEPT", 0)
    shut_down: list[object] = []
    closing = functools.partial(record_and_call, shut_down, library_sockets.shut_down)
    monkeypatch.setattr(outgoing, "shut_down", closing)
    async with open_backend(NixlBackend()) as source, foreign_agents([fresh_name()]) as (live,):
        await source.backend.connect(live.name, live.metadata)
        before = num_files()
        aliases = [live.alias(f"alias-{number}") for number in range(6)]
        for agent in aliases:
            await come_and_go(source, [agent], is_written_to=True)
            source.backend.post(99, live.name, to(source, live), b"")
            assert (await source.take_end(99)).error is None
            source.events.clear()
        await until(lambda: source.backend.unclosed() == {agent.name for agent in aliases})
        assert shut_down == []
        await source.backend.disconnect(live.name)
        await until(lambda: not source.backend.unclosed())
        assert num_files() < before


def record_and_call(calls: list[object], call: Any, argument: object) -> None:
    calls.append(argument)
    call(argument)


async def test_a_peer_that_writes_here_keeps_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes over the connection that this endpoint opened, which existed first."""
    monkeypatch.setattr(nixl_endpoints, "MAX_KEPT", 0)
    async with open_backend(NixlBackend(), seed=1) as one, open_backend(NixlBackend(), seed=2) as other:
        await one.connect(other)
        one.post(1, other, copies(one, other), b"to the other")
        await one.take_ends()
        await other.take_notices()
        await other.connect(one)
        other.post(1, one, copies(other, one), b"to the first")
        await other.take_ends()
        await one.take_notices()
        await one.backend.disconnect(other.name)
        await until(lambda: one.backend.unclosed() == {other.name})
        for number in range(2, 30):
            other.post(number, one, copies(other, one), b"again")
            assert (await other.take_end(number)).error is None
        await one.take_notices(29)
        assert one.backend.unclosed() == {other.name}
        await other.close()
        await until(lambda: not one.backend.unclosed())
