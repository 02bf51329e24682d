"""Deployments without a registry: instances answer lookups themselves, by address or by ticket."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import anyio.to_thread
import pytest

import kvflow
import kvflow.blocking
from kvflow import Endpoint
from kvflow.addresses import join_address
from kvflow.directory import lookups
from kvflow.errors import ConfigError, FailureReason, LocalProtocolError, TicketError
from kvflow.wire.messages import PeerId, RankId
from kvflow.wire.ticket import Ticket
from tests.observe.lines import printed
from tests.support.failures import catch
from tests.support.instances import QUICK, anomalies_of, decode_config, make_pool, prefill_config
from tests.support.ports import is_free, unused_port
from tests.support.slow import MOONCAKE_SLOWLY
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

PAGES = {"kv": [3, 9]}
TOKENS = (0, 8)
FILL = 0x77

Prefill = str | Endpoint | Mapping[str, object]


@asynccontextmanager
async def prefill_ranks(num_ranks: int = 1, **settings: object) -> AsyncIterator[list[kvflow.PrefillRank]]:
    """Open an instance whose first rank answers lookups for all."""
    async with AsyncExitStack() as stack:
        ranks: list[kvflow.PrefillRank] = []
        for number in range(num_ranks):
            pool = make_pool(num_ranks, number)
            for buffer in pool.buffers:
                buffer[:] = FILL
            config = prefill_config(ranks[0].endpoint if ranks else None, number, num_ranks, **settings)
            ranks.append(await stack.enter_async_context(kvflow.PrefillRank(config, pool.layout)))
        yield ranks


@asynccontextmanager
async def decode_rank(registry: str | None = None, backend: str = "memory") -> AsyncIterator[kvflow.DecodeRank]:
    pool = make_pool()
    async with kvflow.DecodeRank(decode_config(registry, timeouts=QUICK, backend=backend), pool.layout) as rank:
        yield rank


async def send(rank: kvflow.PrefillRank, room: int) -> None:
    async with rank.send(room) as sender:
        await sender.finish(TOKENS, PAGES, metadata=b"token")


async def receive(rank: kvflow.DecodeRank, prefill: Prefill, room: int | None = None) -> None:
    async with rank.receive(room, prefill=prefill, tokens=TOKENS, pages=PAGES) as receiver:
        assert (await receiver.done()).metadata == b"token"


async def hand_over(ranks: list[kvflow.PrefillRank], decode: kvflow.DecodeRank, prefill: Prefill, room: int) -> None:
    async with anyio.create_task_group() as tasks:
        for rank in ranks:
            tasks.start_soon(send, rank, room)
        tasks.start_soon(receive, decode, prefill, room)


def through_a_router(ticket: dict[str, object]) -> dict[str, object]:
    handed: dict[str, object] = json.loads(json.dumps(ticket))
    return handed


@pytest.mark.parametrize("num_ranks", [1, 3])
async def test_an_instance_is_found_by_address_ticket_and_name_with_one_handshake(num_ranks: int) -> None:
    async with prefill_ranks(num_ranks) as ranks, decode_rank(ranks[0].endpoint) as decode:
        tickets = [through_a_router(rank.ticket(10 + number)) for number, rank in enumerate(ranks)]
        await hand_over(ranks, decode, Endpoint.parse(ranks[0].endpoint), 1)
        await hand_over(ranks, decode, "prefill", 2)
        for ticket in tickets:
            await hand_over(ranks, decode, ticket, int(str(ticket["room"])))
        assert decode.statistics().peers == num_ranks
        assert [anomalies_of(rank.statistics()) for rank in ranks] == [{}] * num_ranks


@pytest.mark.parametrize("backend", MOONCAKE_SLOWLY)
async def test_a_ticket_has_the_room_and_names_who_answers(backend: str) -> None:
    async with prefill_ranks(2, backend=backend) as ranks, decode_rank(backend=backend) as decode:
        tickets = [through_a_router(rank.ticket(7)) for rank in ranks]
        assert [ticket["engine_rank"] for ticket in tickets] == [0, 1]
        assert {ticket["address"] for ticket in tickets} == {ranks[0].endpoint}
        async with anyio.create_task_group() as tasks:
            for rank in ranks:
                tasks.start_soon(send, rank, 7)
            tasks.start_soon(receive, decode, tickets[1])


async def test_a_ticket_of_an_instance_in_a_registry_works_without_that_registry_in_the_settings() -> None:
    async with kvflow.Registry() as registry:
        config = prefill_config(registry.endpoint)
        async with kvflow.PrefillRank(config, make_pool().layout) as prefill, decode_rank() as decode:
            await hand_over([prefill], decode, prefill.ticket(1), 1)


@pytest.mark.parametrize("host", ["::1", "127.0.0.1"])
async def test_an_instance_restarts_at_its_address(host: str) -> None:
    port = unused_port()
    bind = join_address(host, port)
    async with decode_rank() as decode:
        async with prefill_ranks(bind=bind) as ranks:
            stale = ranks[0].ticket(2)
            await hand_over(ranks, decode, Endpoint.parse(bind), 1)
        await until(lambda: is_free(port, host))
        async with prefill_ranks(bind=bind) as ranks:
            failure = await catch(lambda: receive(decode, stale))
            assert failure.reason is FailureReason.STALE_TICKET
            assert "has restarted" in failure.detail
            await hand_over(ranks, decode, ranks[0].ticket(2), 2)
            await hand_over(ranks, decode, Endpoint.parse(bind), 3)


async def test_another_instance_answers_at_an_address() -> None:
    port = unused_port()
    bind = f"tcp://127.0.0.1:{port}"
    async with decode_rank() as decode:
        async with prefill_ranks(bind=bind) as ranks:
            stale = ranks[0].ticket(2)
            await hand_over(ranks, decode, Endpoint.parse(bind), 1)
        await until(lambda: is_free(port))
        async with prefill_ranks(bind=bind, instance="other") as ranks:
            failure = await catch(lambda: receive(decode, stale))
            assert failure.reason is FailureReason.STALE_TICKET
            assert "other has all of its ranks" in failure.detail
            await hand_over(ranks, decode, Endpoint.parse(bind), 2)


async def test_a_registry_has_no_instance_of_its_own() -> None:
    async with kvflow.Registry() as registry, decode_rank() as decode:
        failure = await catch(lambda: receive(decode, Endpoint.parse(registry.endpoint), 1))
        assert failure.reason is FailureReason.UNREACHABLE
        assert registry.endpoint in failure.detail


async def test_a_rank_that_has_a_registry_answers_for_nobody_and_says_so() -> None:
    async with kvflow.Registry() as registry:
        config = prefill_config(registry.endpoint)
        async with kvflow.PrefillRank(config, make_pool().layout) as prefill, decode_rank() as decode:
            with printed() as lines:
                failure = await catch(lambda: receive(decode, Endpoint.parse(prefill.endpoint), 1))
                assert (failure.reason, prefill.endpoint in failure.detail) == (FailureReason.UNREACHABLE, True)
                assert lines.named("lookup_refused")
                sibling = prefill_config(prefill.endpoint, 1, 2)
                async with kvflow.PrefillRank(sibling, make_pool(2, 1).layout):
                    await until(lambda: lines.named("registration_refused"))


async def test_who_answers_for_an_instance_registers_nobody_else() -> None:
    async with prefill_ranks(2) as ranks, AsyncExitStack() as stack:
        with printed() as lines:
            for changes in ({"instance": "other"}, {"num_ranks": 3}, {"rank": 0}):
                fields = {"rank": 1, "num_ranks": 2, **changes}
                config = prefill_config(ranks[0].endpoint, **fields)  # type: ignore[arg-type]
                await stack.enter_async_context(kvflow.PrefillRank(config, make_pool(2, 1).layout))
            await until(lambda: len(lines.named("registration_refused")) == 2)
            await until(lambda: any(line.get("refused") for line in lines.named("registration_conflict")))
        assert ranks[0].statistics().anomalies["registration_rejected"] >= 3
        async with decode_rank() as decode:
            await hand_over(ranks, decode, Endpoint.parse(ranks[0].endpoint), 1)


async def test_a_draining_instance_is_not_found_any_more() -> None:
    async with prefill_ranks() as ranks, decode_rank() as decode:
        ranks[0].start_drain()
        failure = await catch(lambda: receive(decode, Endpoint.parse(ranks[0].endpoint), 1))
        assert "none of its ranks is registered" in failure.detail


async def test_an_address_may_be_a_string() -> None:
    async with prefill_ranks() as ranks, decode_rank() as decode:
        await hand_over(ranks, decode, ranks[0].endpoint, 1)
        with pytest.raises(ConfigError, match="must have the form tcp://HOST:PORT") as error:
            await receive(decode, "tcp://127.0.0.1", 2)
        assert error.value.values == {"setting": "prefill", "value": "tcp://127.0.0.1"}


async def test_an_endpoint_is_known_once_the_rank_is_open() -> None:
    rank = kvflow.PrefillRank(prefill_config(None), make_pool().layout)
    with pytest.raises(LocalProtocolError, match="enter it with `async with` first"):
        _ = rank.endpoint
    with pytest.raises(LocalProtocolError, match="enter it with `async with` first"):
        rank.ticket(1)
    async with rank:
        endpoint = rank.endpoint
    assert rank.endpoint == endpoint
    with pytest.raises(LocalProtocolError, match="not open any more"):
        rank.ticket(1)


async def test_names_need_a_registry() -> None:
    async with decode_rank() as decode:
        with pytest.raises(ConfigError, match="requires `registry`"):
            decode.receive(1, prefill="prefill", tokens=TOKENS, pages=PAGES)
        with pytest.raises(LocalProtocolError, match="an instance name, an address"):
            decode.receive(1, prefill=7, tokens=TOKENS, pages=PAGES)  # type: ignore[arg-type]
        with pytest.raises(LocalProtocolError, match="come with a ticket"):
            decode.receive(prefill=Endpoint("::1", 1), tokens=TOKENS, pages=PAGES)


async def test_tickets_that_cannot_be_meant_are_refused_at_once() -> None:
    issuer = PeerId(RankId("prefill", 0), 1)
    good = Ticket(7, "tcp://127.0.0.1:1", issuer, make_pool().layout.fingerprint).as_dict()
    async with decode_rank() as decode:
        for room, changes in (
            (8, {}),
            (7, {"fingerprint": "another model"}),
            (7, {"versions": [99, 99]}),
            (7, {"incarnation": 1}),
            (None, {"room": "-1"}),
        ):
            with pytest.raises(TicketError):
                decode.receive(room, prefill={**good, **changes}, tokens=TOKENS, pages=PAGES)
        assert decode.statistics().rooms == 0


@pytest.mark.parametrize("room", [None, 7])
async def test_a_ticket_that_is_still_text_is_no_name(room: int | None) -> None:
    issuer = PeerId(RankId("prefill", 0), 1)
    text = json.dumps(Ticket(7, "tcp://127.0.0.1:1", issuer, make_pool().layout.fingerprint).as_dict())
    async with decode_rank("tcp://127.0.0.1:1") as decode:
        for ticket in (text, text.encode()):
            with pytest.raises(TicketError, match="JSON text"):
                decode.receive(room, prefill=ticket, tokens=TOKENS, pages=PAGES)  # type: ignore[arg-type]


async def test_tickets_need_an_open_rank() -> None:
    rank = kvflow.PrefillRank(prefill_config(None), make_pool().layout)
    with pytest.raises(LocalProtocolError, match="not open"):
        rank.ticket(1)
    async with rank:
        with pytest.raises(LocalProtocolError, match="room must be"):
            rank.ticket(-1)
    with pytest.raises(LocalProtocolError, match="not open"):
        rank.ticket(1)


async def test_connections_to_addresses_are_bounded_and_closed_when_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(lookups, "UNUSED_S", 0.5)
    async with prefill_ranks() as ranks, decode_rank() as decode:
        await hand_over(ranks, decode, ranks[0].ticket(1), 1)
        await hand_over(ranks, decode, Endpoint.parse(ranks[0].endpoint), 2)
        assert len(decode._directories._addresses._clients) <= 1
        await until(lambda: not decode._directories._addresses._clients)


def test_blocking_ranks_need_no_registry() -> None:
    source, target = make_pool(), make_pool()
    with (
        kvflow.blocking.PrefillRank(prefill_config(None), source.layout) as prefill,
        kvflow.blocking.DecodeRank(decode_config(None), target.layout) as decode,
    ):
        sender = prefill.send(7)
        receiver = decode.receive(prefill=prefill.ticket(7), tokens=TOKENS, pages=PAGES)
        sender.finish(TOKENS, PAGES, metadata=b"token")
        receiver.wait()
        assert receiver.result().metadata == b"token"
        with pytest.raises(LocalProtocolError, match="room must be"):
            prefill.ticket(-1)
        with pytest.raises(TicketError):
            decode.receive(8, prefill=prefill.ticket(7), tokens=TOKENS, pages=PAGES)
    with pytest.raises(LocalProtocolError, match="not open"):
        prefill.ticket(1)


async def test_a_stranger_cannot_fill_the_pages_of_a_deployment_that_signs_its_tickets() -> None:
    """Without keys, too: whoever writes the body of a request may name any process, and any room."""
    trust = kvflow.Trust(ticket_keys=(b"k" * 32,))
    pool = make_pool()
    config = decode_config(None, timeouts=QUICK, trust=trust, signed_tickets=True)
    async with (
        prefill_ranks(trust=trust) as ranks,
        prefill_ranks(instance="evil") as strangers,
        kvflow.DecodeRank(config, pool.layout) as decode,
    ):
        honest = ranks[0].ticket(1)
        for forged in (strangers[0].ticket(1), {**honest, "address": strangers[0].endpoint}, {**honest, "room": "2"}):
            with pytest.raises(TicketError, match="rejected"):
                await receive(decode, forged)
        await hand_over(ranks, decode, through_a_router(honest), 1)


async def test_addresses_are_limited_to_the_hosts_that_are_allowed() -> None:
    config = decode_config(None, timeouts=QUICK, allowed_hosts=("10.0.0.0/8",))
    async with prefill_ranks() as ranks, kvflow.DecodeRank(config, make_pool().layout) as decode:
        with pytest.raises(TicketError, match="allowed_hosts"):
            await receive(decode, ranks[0].ticket(1))
        with pytest.raises(ConfigError, match="allowed_hosts"):
            await receive(decode, ranks[0].endpoint, 1)


async def test_a_directory_cannot_send_a_decode_rank_to_a_host_that_is_not_allowed() -> None:
    async with kvflow.Registry() as registry:
        prefill = kvflow.PrefillRank(prefill_config(registry.endpoint), make_pool().layout)
        config = decode_config(registry.endpoint, timeouts=QUICK, allowed_hosts=("10.0.0.0/8",))
        async with prefill, kvflow.DecodeRank(config, make_pool().layout) as decode:
            failure = await catch(lambda: receive(decode, "prefill", 1))
            assert failure.reason is FailureReason.REFUSED
            assert "127.0.0.1 is not in `allowed_hosts`" in failure.detail
