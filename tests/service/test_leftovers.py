"""Nothing of peers that were killed stays in a process that goes on: shared memory, agents, descriptors."""

import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest

import kvflow
from benchmarks.processes import ChildProcess
from benchmarks.resources import num_files
from kvflow.backends.mooncake import agent as mooncake_agent
from kvflow.cli.tasks import open_tasks
from tests.support.failures import catch
from tests.support.instances import decode_config, make_pool, prefill_config
from tests.support.ports import unused_port
from tests.support.prefill_client import hand_over, prefill_process
from tests.support.prefill_process import PAGES, TOKENS
from tests.support.resolving_process import ResolvingOptions
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

KILLS = 5
SLACK = 2
"""Descriptors that other parts of the process may open meanwhile; fewer than one for each kill."""

MAX_DEPARTED = 2
LEFT_BY_DEPARTED = 4 * MAX_DEPARTED
"""Mooncake's engines keep connections to peers that have left, until the engine is replaced."""

QUICK = kvflow.Timeouts(handshake_s=15.0, transfer_s=30.0, drain_s=0.5, lease_s=1.0)


class Held(NamedTuple):
    """What this process has of others: mappings of shared memory, and open descriptors."""

    mappings: int
    files: int


def held() -> Held:
    permissions = [line.split()[1] for line in Path("/proc/self/maps").read_text("utf-8").splitlines()]
    return Held(sum("s" in each for each in permissions), num_files())


def is_no_more_than(before: Held, slack: int) -> Callable[[], bool]:
    def compare() -> bool:
        now = held()
        return now.mappings <= before.mappings and now.files <= before.files + slack

    return compare


def agents_written_to(rank: kvflow.PrefillRank) -> set[str]:
    """Return the peers of the library's agent: those in use, kept in case they come back, and former ones."""
    agent: Any = rank._backend
    agent = getattr(agent._agent, "_endpoints", agent._agent)
    return {*agent._connections, *(str(former) for former in agent._former)}


@asynccontextmanager
async def decode_process(prefill: kvflow.PrefillRank, backend: str) -> AsyncIterator[ChildProcess]:
    options = ResolvingOptions("", prefill.endpoint, backend=backend)
    async with (
        open_tasks() as tasks,
        ChildProcess("decode", "tests.support.resolving_process", options, tasks) as decode,
    ):
        await decode.expect("ready")
        yield decode


async def fail_to_receive(rank: kvflow.DecodeRank, prefill: ChildProcess, room: int, where: kvflow.Endpoint) -> None:
    """Kill a prefill process that was granted pages, and wait until these may be used again."""
    receiver = rank.receive(room, prefill=where, tokens=TOKENS, pages=PAGES)

    async def receive() -> None:
        async with receiver:
            await receiver.done()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(catch, receive)
        await prefill.tell("send", room=room)
        await prefill.expect("half", room)
        await prefill.tell("wait")
        await prefill.expect("granted", room)
        prefill.send_signal(signal.SIGKILL)
    await until(lambda: receiver.memory is kvflow.Memory.SAFE)


async def fail_to_send(rank: kvflow.PrefillRank, decode: ChildProcess, room: int) -> None:
    """Kill a decode process that has granted pages, and wait until those of this rank may be used again."""
    sender = rank.send(room)

    async def send() -> None:
        async with sender:
            await decode.tell("receive", room=room)
            await sender.granted()
            await sender.chunk((0, 4), {"kv": PAGES["kv"][:1]})
            decode.send_signal(signal.SIGKILL)
            await sender.delivered()

    await catch(send)
    await until(lambda: sender.memory is kvflow.Memory.SAFE)


async def serve(rank: kvflow.PrefillRank, decode: ChildProcess, room: int) -> None:
    await decode.tell("receive", room=room)
    async with rank.send(room) as sender:
        await sender.granted()
        await sender.finish(TOKENS, PAGES)
    await decode.expect("received", room)


@pytest.mark.parametrize("backend", ["nixl", pytest.param("mooncake", marks=pytest.mark.slow)])
async def test_a_decode_rank_keeps_nothing_of_killed_prefill_processes(backend: str) -> None:
    port = unused_port()
    where = kvflow.Endpoint("127.0.0.1", port)
    config = decode_config(None, backend=backend, timeouts=QUICK)
    async with kvflow.DecodeRank(config, make_pool().layout) as rank:
        before = held()
        for number in range(1 + KILLS):
            async with prefill_process(None, port, backend=backend) as prefill:
                await hand_over(rank, prefill, number, where)
                await until(lambda: rank.statistics().peers == 1)
                if number == 1:
                    before = held()
                elif number:
                    await until(is_no_more_than(before, SLACK))
                await fail_to_receive(rank, prefill, 100 + number, where)
        assert not rank.quarantined()


async def test_a_prefill_rank_keeps_nothing_of_killed_decode_processes() -> None:
    config = prefill_config(None, backend="nixl", timeouts=QUICK)
    async with kvflow.PrefillRank(config, make_pool().layout) as rank:
        before = held()
        for number in range(1 + KILLS):
            async with decode_process(rank, "nixl") as decode:
                await serve(rank, decode, number)
                await until(lambda: len(agents_written_to(rank)) == 1)
                if number == 1:
                    before = held()
                elif number:
                    await until(is_no_more_than(before, SLACK))
                await fail_to_send(rank, decode, 100 + number)
        await until(lambda: not agents_written_to(rank))


@pytest.mark.slow
async def test_a_prefill_rank_over_mooncake_keeps_no_more_than_its_engines_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library has no call that closes a connection; replacing its engine does."""
    monkeypatch.setattr(mooncake_agent, "MAX_DEPARTED", MAX_DEPARTED)
    config = prefill_config(None, backend="mooncake", timeouts=QUICK)
    async with kvflow.PrefillRank(config, make_pool().layout) as rank:
        before = held()
        for number in range(1 + MAX_DEPARTED + KILLS):
            async with decode_process(rank, "mooncake") as decode:
                await serve(rank, decode, number)
                await until(lambda: len(agents_written_to(rank)) == 1)
                if number == 1 + MAX_DEPARTED:
                    before = held()
                elif number > 1 + MAX_DEPARTED:
                    await until(is_no_more_than(before, LEFT_BY_DEPARTED))
                await fail_to_send(rank, decode, 100 + number)
        await until(lambda: not agents_written_to(rank))
