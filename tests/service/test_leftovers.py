"""Nothing of peers that were killed stays in a process that goes on: shared memory, agents, descriptors."""

import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest

import kvflow
from benchmarks.processes import ChildProcess
from benchmarks.resources import num_files, num_threads
from kvflow.backends.mooncake import agent as mooncake_agent
from kvflow.cli.tasks import open_tasks
from tests.support.failures import catch
from tests.support.instances import decode_config, make_pool, prefill_config
from tests.support.ports import unused_port
from tests.support.prefill_client import hand_over, prefill_process
from tests.support.prefill_process import PAGES, TOKENS
from tests.support.resolving_process import ResolvingOptions
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

KILLS = 5
SLACK = 2
"""Descriptors that other parts of the process may open meanwhile; fewer than one for each kill."""

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


def open_files() -> list[str]:
    """Return what the descriptors of this process are, such as "socket:[1234]"."""
    found = []
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(str(file.readlink()))
    return found


def connected_to(without: int = 0) -> set[str]:
    """Return the remote ends of this process's TCP connections, without those that were accepted at a port."""
    own = set(open_files())
    tables = [Path("/proc/self/net", name).read_text("ascii").splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return {
        remote
        for _, local, remote, *_, inode in [row[:10] for row in rows]
        if f"socket:[{inode}]" in own and not remote.endswith(":0000") and not local.endswith(f":{without:04X}")
    }


def held_besides_sockets() -> tuple[int, int, int]:
    """Return how many threads, mappings of shared memory, and descriptors of other kinds there are."""
    return num_threads(), held().mappings, sum(not name.startswith("socket:") for name in open_files())


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


async def test_a_prefill_rank_over_mooncake_keeps_the_connections_of_few_killed_decode_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Replacing the library's engine closes them, but for the first engine, whose address peers know.

    Only those of idle peers are left: the library closes a connection when it fails to write to it.
    """
    monkeypatch.setattr(mooncake_agent, "MAX_DEPARTED", 1)
    config = prefill_config(None, backend="mooncake", timeouts=QUICK)
    known = connected_to()
    async with kvflow.PrefillRank(config, make_pool().layout) as rank:
        port = kvflow.Endpoint.parse(rank.endpoint).port
        num_left, others = list[int](), list[tuple[int, int, int]]()
        for number in range(4):
            async with decode_process(rank, "mooncake") as decode:
                await serve(rank, decode, number)
                decode.send_signal(signal.SIGKILL)
            await until(lambda: not agents_written_to(rank))
            num_left.append(len(connected_to(without=port) - known))
            others.append(held_besides_sockets())
    assert max(num_left) == 2
    assert others[3] == others[1]
