"""A prefill process that advertises several hosts, of which the first accepts nothing."""

import signal
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
import pytest

import kvflow
from benchmarks.processes import ChildProcess
from tests.support.failures import catch
from tests.support.instances import decode_config, make_pool
from tests.support.machine import has_ipv6
from tests.support.ports import unused_port
from tests.support.prefill_client import give_ticket, hand_over, prefill_process
from tests.support.prefill_process import PAGES, TOKENS

pytestmark = pytest.mark.anyio

SILENT = "127.0.0.2"
"""Refuses connections, as nothing listens there."""

SERVING = "127.0.0.3"


def prefill_at(host: str, registry: str | None = None) -> AbstractAsyncContextManager[ChildProcess]:
    return prefill_process(registry, unused_port(), host=host, advertise=f"{SILENT},{host}")


@asynccontextmanager
async def decode_rank(registry: str | None = None) -> AsyncIterator[kvflow.DecodeRank]:
    timeouts = kvflow.Timeouts(lease_s=0.5, drain_s=0.5)
    settings = decode_config(registry, backend="nixl", trust=kvflow.Trust.none(), timeouts=timeouts)
    async with kvflow.DecodeRank(settings, make_pool().layout) as rank:
        yield rank


@pytest.mark.parametrize("host", [SERVING, "[::1]"])
async def test_the_host_of_a_ticket_that_can_be_reached_is_used(host: str) -> None:
    if host == "[::1]" and not has_ipv6():
        pytest.skip("this host has no IPv6")
    async with prefill_at(host) as prefill, decode_rank() as rank:
        for room in (1, 2):
            ticket = await give_ticket(prefill, room)
            assert f"//{SILENT},{host}:" in ticket["address"]
            await hand_over(rank, prefill, room, ticket)


async def test_records_of_a_registry_have_several_hosts() -> None:
    async with (
        kvflow.Registry("tcp://*:0", advertise=f"{SILENT},{SERVING}", trust=kvflow.Trust.none()) as registry,
        prefill_at(SERVING, registry.endpoint) as prefill,
        decode_rank(registry.endpoint) as rank,
    ):
        await hand_over(rank, prefill, 1)


async def test_only_the_host_that_a_process_has_spoken_from_proves_that_it_has_ended() -> None:
    """The first host refuses all the time, also while the process is stopped and may write."""
    async with prefill_at(SERVING) as prefill, decode_rank() as rank:
        ticket = await give_ticket(prefill, 1)
        async with rank.receive(1, prefill=ticket, tokens=TOKENS, pages=PAGES) as receiver:
            await prefill.tell("send", room=1)
            await prefill.expect("half", 1)
            await prefill.tell("wait")
            await prefill.expect("granted", 1)
            prefill.send_signal(signal.SIGSTOP)
            assert (await catch(receiver.done)).reason == "peer_lost"
        assert receiver.memory is kvflow.Memory.QUARANTINED
        prefill.send_signal(signal.SIGKILL)
        with anyio.fail_after(60):
            await receiver.until_safe()
