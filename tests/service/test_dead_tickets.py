"""Tickets of processes that are not there fail long before the handshake's deadline; whatever else waits goes on."""

import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import anyio
import pytest

import kvflow
from kvflow import Endpoint, FailureReason
from kvflow.wire.messages import PeerId, RankId
from kvflow.wire.ticket import Ticket
from tests.support.failures import catch
from tests.support.instances import decode_config, make_pool, prefill_config
from tests.support.machine import has_ipv6
from tests.support.ports import unused_port
from tests.support.prefill_client import give_ticket, hand_over, prefill_process
from tests.support.prefill_process import PAGES, TOKENS
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

NEVER = kvflow.Timeouts(handshake_s=1_000.0, lease_s=0.5, drain_s=0.5)
"""No test waits for this deadline."""

Prefill = str | Endpoint | Mapping[str, object]


@asynccontextmanager
async def decode_rank(
    registry: str | None = None, backend: str = "memory", timeouts: kvflow.Timeouts = NEVER
) -> AsyncIterator[kvflow.DecodeRank]:
    config = decode_config(registry, backend=backend, trust=kvflow.Trust.none(), timeouts=timeouts)
    async with kvflow.DecodeRank(config, make_pool().layout) as rank:
        yield rank


async def receive(
    rank: kvflow.DecodeRank, prefill: Prefill, room: int | None = None, pages: Mapping[str, list[int]] = PAGES
) -> None:
    async with rank.receive(room, prefill=prefill, tokens=TOKENS, pages=pages) as receiver:
        await receiver.done()


async def refusal(rank: kvflow.DecodeRank, ticket: Mapping[str, object]) -> kvflow.TransferFailed:
    """Return the failure of a room whose ticket has an address that refuses connections."""
    failure = await catch(lambda: receive(rank, ticket, pages={"kv": [4, 10]}))
    assert failure.reason is FailureReason.UNREACHABLE
    assert f"{ticket['address']} refuses connections" in failure.detail
    return failure


def ticket_for(hosts: str, room: int = 1) -> dict[str, object]:
    issuer = PeerId(RankId("prefill", 0), 7)
    address = f"tcp://{hosts}:{unused_port()}"
    return Ticket(room, address, issuer, make_pool().layout.fingerprint, own_address=True).as_dict()


@pytest.mark.parametrize("hosts", ["127.0.0.1", "127.0.0.1,127.0.0.2", "localhost", "[::1]", "127.0.0.2,[::1]"])
async def test_a_ticket_whose_address_refuses_fails_at_once(hosts: str) -> None:
    if "::" in hosts and not has_ipv6():
        pytest.skip("this host has no IPv6")
    async with decode_rank() as rank:
        assert "prefill/0" in (await refusal(rank, ticket_for(hosts))).detail
        assert "has ended" in (await refusal(rank, ticket_for(hosts, 2))).detail


async def test_an_announced_room_fails_at_once_as_well() -> None:
    async with decode_rank() as rank:

        async def announce() -> None:
            async with rank.announce(prefill=ticket_for("127.0.0.1")) as receiver:
                await receiver.done()

        assert "refuses connections" in (await catch(announce)).detail


@pytest.mark.parametrize("is_known", [False, True])
async def test_tickets_of_a_process_that_was_killed_fail_at_once(is_known: bool) -> None:
    async with decode_rank(backend="nixl") as rank, prefill_process(None, unused_port()) as prefill:
        tickets = [await give_ticket(prefill, room) for room in (1, 2, 3)]
        if is_known:
            await hand_over(rank, prefill, 1, tickets[0])
        prefill.send_signal(signal.SIGKILL)
        await until(lambda: not rank.statistics().peers)
        for ticket in tickets[1:]:
            await refusal(rank, ticket)


async def test_a_process_that_is_stopped_first_and_then_killed_is_noticed() -> None:
    async with decode_rank(backend="nixl") as rank, prefill_process(None, unused_port()) as prefill:
        ticket = await give_ticket(prefill, 1)
        prefill.send_signal(signal.SIGSTOP)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(refusal, rank, ticket)
            await until(lambda: rank.statistics().rooms)
            prefill.send_signal(signal.SIGKILL)


async def test_the_host_that_answers_is_found_beside_one_that_refuses() -> None:
    config = prefill_config(None, bind="tcp://127.0.0.3:0", advertise="127.0.0.2,127.0.0.3", trust=kvflow.Trust.none())
    async with kvflow.PrefillRank(config, make_pool().layout) as prefill, decode_rank() as rank:
        ticket = prefill.ticket(1)
        assert ticket["own_address"] is True
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive, rank, ticket)
            async with prefill.send(1) as sender:
                await sender.finish(TOKENS, PAGES)


async def test_an_address_is_waited_for_until_prefill_is_there() -> None:
    """Of an `Endpoint`, nobody has said that a process listens there."""
    port = unused_port()
    config = prefill_config(None, bind=f"tcp://127.0.0.1:{port}")
    async with decode_rank() as rank, anyio.create_task_group() as tasks:
        tasks.start_soon(receive, rank, Endpoint("127.0.0.1", port), 1)
        await until(lambda: rank.statistics().rooms)
        dead = Ticket(2, f"tcp://127.0.0.1:{port}", PeerId(RankId("prefill", 0), 7), make_pool().layout.fingerprint)
        await refusal(rank, {**dead.as_dict(), "own_address": True})
        async with kvflow.PrefillRank(config, make_pool().layout) as prefill, prefill.send(1) as sender:
            await sender.finish(TOKENS, PAGES)


async def test_a_ticket_with_the_address_of_a_registry_waits_for_the_registry() -> None:
    port = unused_port()
    async with (
        kvflow.PrefillRank(prefill_config(f"tcp://127.0.0.1:{port}"), make_pool().layout) as prefill,
        decode_rank() as rank,
        anyio.create_task_group() as tasks,
    ):
        ticket = prefill.ticket(1)
        assert "own_address" not in ticket
        tasks.start_soon(receive, rank, ticket)
        await until(lambda: rank.statistics().rooms)
        await refusal(rank, ticket_for("127.0.0.1", 2))  # so much time has passed
        async with kvflow.Registry(f"tcp://127.0.0.1:{port}"), prefill.send(1) as sender:
            await sender.finish(TOKENS, PAGES)
