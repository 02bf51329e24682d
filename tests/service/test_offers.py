"""Pages for an instance that did not ask: offers, and transfers that follow them, over several hops."""

import dataclasses
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self

import anyio
import numpy as np
import pytest

import kvflow
import kvflow.blocking
from kvflow import Endpoint, OfferDeclined
from kvflow.errors import ConfigError, LocalProtocolError, PlanError, TicketError
from tests.support.instances import BACKENDS, PATIENT, anomalies_of, make_pool
from tests.support.pools import Pool
from tests.support.ports import unused_port
from tests.support.slow import MOONCAKE_SLOWLY
from tests.support.trusts import new_trust, trusting
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

ROOM = "a conversation"
TOKENS = (0, 8)


@dataclasses.dataclass
class Server:
    """An instance with both roles: one rank of each over the same pool."""

    name: str
    pool: Pool
    prefill: kvflow.PrefillRank
    decode: kvflow.DecodeRank

    @classmethod
    @asynccontextmanager
    async def open(
        cls, name: str, backend: str = "memory", *, takes_offers: bool = True, **settings: Any
    ) -> AsyncIterator[Self]:
        pool = make_pool()
        common: dict[str, Any] = {"instance": name, "backend": backend, "timeouts": PATIENT} | settings
        sending = kvflow.PrefillConfig(takes_offers=takes_offers, **common)
        receiving = kvflow.DecodeConfig(**common)
        async with (
            kvflow.PrefillRank(sending, pool.layout) as prefill,
            kvflow.DecodeRank(receiving, pool.layout) as decode,
        ):
            yield cls(name, pool, prefill, decode)

    @property
    def at(self) -> Endpoint:
        return Endpoint.parse(self.prefill.endpoint)

    def fill(self, pages: list[int], seed: int) -> None:
        rng = np.random.default_rng(seed)
        for buffer in self.pool.buffers:
            rows = buffer.reshape(2, self.pool.shape.num_pages, -1)
            rows[:, pages] = rng.integers(0, 255, rows[:, pages].shape, np.uint8)

    def content(self, pages: list[int]) -> list[bytes]:
        rows = [buffer.reshape(2, self.pool.shape.num_pages, -1) for buffer in self.pool.buffers]
        return [one[:, pages].tobytes() for one in rows]

    def offer(self, to: "Server", room: str = ROOM, **options: Any) -> kvflow.MadeOffer:
        ticket = self.prefill.ticket(room)
        return self.decode.offers.make_offer(ticket, to=to.at, tokens=TOKENS, **options)

    async def hand_over(self, to: "Server", pages: list[int], room: str = ROOM) -> None:
        """Send a room to a server that did not ask for it."""
        async with self.prefill.send(room, defer_lease=True) as sender:
            await sender.finish(TOKENS, {"kv": pages}, metadata=b"token 9")
            await self.offer(to, room, metadata=b"digest").accepted()
            sender.start_lease()

    async def take_over(self, pages: list[int], start: int = 0) -> kvflow.ReceivedOffer:
        """Accept the next offer, and receive its room."""
        offer = await self.prefill.offers.wait_for_offer()
        assert offer.accept()
        tokens = (start, offer.tokens[1])
        async with self.decode.receive(prefill=offer.ticket, tokens=tokens, pages={"kv": pages}) as receiver:
            assert (await receiver.done()).metadata == b"token 9"
        return offer


@asynccontextmanager
async def servers(*names: str, backend: str = "memory", **settings: Any) -> AsyncIterator[list[Server]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Server.open(name, backend, **settings)) for name in names]


@pytest.mark.parametrize("backend", MOONCAKE_SLOWLY)
async def test_pages_move_through_three_servers_and_back_to_the_first(backend: str) -> None:
    async with servers("a", "b", "c", backend=backend) as (a, b, c):
        a.fill([3, 9], seed=1)
        wanted = a.content([3, 9])
        at = {"a": [3, 9], "b": [5, 1], "c": [7, 2]}
        for source, target in ((a, b), (b, c), (c, a), (a, c)):
            if target is a:
                at["a"] = [20, 21]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(source.hand_over, target, at[source.name])
                offer = await target.take_over(at[target.name])
            assert (offer.room, offer.tokens, offer.metadata) == (ROOM, TOKENS, b"digest")
            assert offer.holder == f"{source.name}/0"
            assert target.content(at[target.name]) == wanted
        for server in (a, b, c):
            for rank in (server.prefill, server.decode):
                assert rank.quarantined() == []
                assert anomalies_of(rank.statistics()) == {}


async def test_only_what_is_lacking_moves() -> None:
    async with servers("a", "b") as (a, b):
        a.fill([3, 9], seed=1)
        b.fill([5, 1], seed=2)
        kept = b.content([5])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(a.hand_over, b, [3, 9])
            await b.take_over([1], start=4)
        assert (b.content([5]), b.content([1])) == (kept, a.content([9]))


async def declined(made: kvflow.MadeOffer) -> Mapping[str, object]:
    with pytest.raises(OfferDeclined) as caught:
        await made.accepted()
    assert made.is_answered
    assert not made.is_accepted
    return caught.value.values


async def test_an_offer_is_declined_with_a_reason() -> None:
    async with servers("a", "b") as (a, b):
        made = a.offer(b)
        offer = await b.prefill.offers.wait_for_offer()
        assert offer.decline("no free pages")
        assert not offer.accept()
        values = await declined(made)
        assert (values["room"], values["reason"], values["detected_by"]) == (ROOM, "aborted", "b/0")
        assert values["detail"] == "no free pages"


async def test_a_server_that_takes_no_offers_declines_at_once() -> None:
    async with servers("a") as (a,), servers("b", takes_offers=False) as (b,):
        values = await declined(a.offer(b))
        assert (values["reason"], values["detail"]) == ("refused", "b/0 takes no offers")


async def test_a_server_that_is_not_there_is_unreachable() -> None:
    async with servers("a") as (a,):
        made = a.decode.offers.make_offer(
            a.prefill.ticket(1), to=f"tcp://127.0.0.1:{unused_port()}", tokens=TOKENS, timeout_s=0.3
        )
        assert (await declined(made))["reason"] == "unreachable"


async def test_a_server_that_does_not_decide_in_time_is_given_up() -> None:
    async with servers("a", "b") as (a, b):
        made = a.offer(b, timeout_s=0.3)
        offer = await b.prefill.offers.wait_for_offer()
        assert (await declined(made))["reason"] == "deadline"
        await until(lambda: not offer.accept())


async def test_the_end_of_the_other_server_is_an_answer() -> None:
    async with servers("a") as (a,):
        async with servers("b") as (b,):
            made = a.offer(b, timeout_s=60.0)
            await b.prefill.offers.wait_for_offer()
        assert (await declined(made))["reason"] == "peer_closed"


async def test_a_draining_server_declines_offers_and_may_make_some() -> None:
    async with servers("a", "b") as (a, b):
        made = a.offer(b)
        offer = await b.prefill.offers.wait_for_offer()
        b.prefill.start_drain()
        assert (await declined(made))["reason"] == "peer_closed"
        assert not offer.accept()
        assert (await declined(a.offer(b)))["reason"] == "peer_closed"
        b.decode.start_drain()
        back = b.offer(a)
        assert (await a.prefill.offers.wait_for_offer()).accept()
        await back.accepted()


async def test_an_offer_of_a_server_that_has_left_is_withdrawn() -> None:
    async with servers("b") as (b,):
        async with servers("a") as (a,):
            a.offer(b)
            await until(lambda: b.prefill.offers._waiting)
        await until(lambda: not b.prefill.offers._waiting)
        assert b.prefill.offers.take_offers() == []


async def test_cancelling_the_wait_withdraws_the_offer() -> None:
    async with servers("a", "b") as (a, b):
        made = a.offer(b)
        offer = await b.prefill.offers.wait_for_offer()
        with anyio.move_on_after(0.01):
            await made.accepted()
        assert offer.accept()
        other = a.offer(b)
        assert (await b.prefill.offers.wait_for_offer()).accept()
        await other.accepted()
        assert not made.is_answered


async def test_closing_answers_all_offers_and_ends_every_wait() -> None:
    waits: list[BaseException] = []

    async def wait(server: Server) -> None:
        with pytest.raises(LocalProtocolError) as caught:
            await server.prefill.offers.wait_for_offer()
        waits.append(caught.value)

    async with servers("b") as (b,), anyio.create_task_group() as tasks:
        async with servers("a") as (a,):
            tasks.start_soon(wait, a)
            tasks.start_soon(wait, a)
            made = a.offer(b)
            await b.prefill.offers.wait_for_offer()
        assert (await declined(made))["reason"] == "peer_closed"
    assert len(waits) == 2


async def test_bad_arguments_make_no_offer() -> None:
    async with servers("a", "b") as (a, b):
        make, ticket = a.decode.offers.make_offer, a.prefill.ticket(1)
        with pytest.raises(TicketError, match="long"):
            make(
                ticket | {"capability": "x" * 4_096, "address": f"tcp://{'h' * 1_000}:1", "fingerprint": "f" * 1_000},
                to=b.at,
                tokens=TOKENS,
            )
        with pytest.raises(LocalProtocolError):
            make(ticket, to="", tokens=TOKENS)
        with pytest.raises(TicketError):
            make({"room": "1"}, to=b.at, tokens=TOKENS)
        with pytest.raises(PlanError):
            make(ticket, to=b.at, tokens=(8, 0))
        with pytest.raises(PlanError):
            make(ticket, to=b.at, tokens=TOKENS, metadata=bytes(1_025))
        with pytest.raises(ConfigError):
            make(ticket, to=b.at, tokens=TOKENS, timeout_s=0)
        with pytest.raises(ConfigError, match="registry"):
            make(ticket, to="b", tokens=TOKENS)
        assert len(a.decode._core.offers) == 0
    with pytest.raises(LocalProtocolError, match="open"):
        make(ticket, to=b.at, tokens=TOKENS)


@pytest.mark.parametrize("backend", BACKENDS[:1])
def test_schedulers_make_and_take_offers_without_waiting(backend: str) -> None:
    pools = [make_pool(), make_pool()]
    configs = [kvflow.PrefillConfig(instance=name, backend=backend, takes_offers=True) for name in "ab"]
    with (
        kvflow.blocking.PrefillRank(configs[0], pools[0].layout) as sending,
        kvflow.blocking.DecodeRank(kvflow.DecodeConfig(instance="a", backend=backend), pools[0].layout) as offering,
        kvflow.blocking.PrefillRank(configs[1], pools[1].layout) as offered,
    ):
        ticket = sending.ticket(1)
        made = offering.ask(lambda rank: rank.offers.make_offer(ticket, to=offered.endpoint, tokens=TOKENS)).result()
        while not offered.has_offers:
            pass
        taken = offered.ask(lambda rank: rank.offers.take_offers()).result()
        assert offered.ask(lambda rank: rank.offers.is_empty).result()
        assert offered.ask(lambda _: taken[0].accept()).result()
        while not made.is_answered:
            pass
        assert made.is_accepted


@asynccontextmanager
async def with_keys(**known: tuple[str, ...]) -> AsyncIterator[dict[str, Server]]:
    """Open servers with keys of their own; each trusts the keys of those that are named, as listed there."""
    keys = {name: new_trust() for name in known}
    async with AsyncExitStack() as stack:
        found = {}
        for name, others in known.items():
            trust = trusting(keys[name], **{other: keys[other] for other in others})
            found[name] = await stack.enter_async_context(Server.open(name, trust=trust))
        yield found


async def test_servers_with_keys_offer_each_other_rooms() -> None:
    async with with_keys(a=("b",), b=("a",)) as found:
        a, b = found["a"], found["b"]
        a.fill([3, 9], seed=1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(a.hand_over, b, [3, 9])
            await b.take_over([5, 1])
        assert b.content([5, 1]) == a.content([3, 9])


async def test_nobody_offers_the_room_of_another_server() -> None:
    """Otherwise it could make the engine fetch a room that it has no right to, or wait for a stranger."""
    async with with_keys(a=("b",), b=("a", "c"), c=("b",)) as found:
        a, b, c = found["a"], found["b"], found["c"]
        made = a.decode.offers.make_offer(c.prefill.ticket(ROOM), to=b.at, tokens=TOKENS)
        values = await declined(made)
        assert (values["reason"], values["detected_by"]) == ("refused", "b/0")
        assert "not for c" in str(values["detail"])
        assert b.prefill.statistics().anomalies["offer_denied"] == 1
        assert b.prefill.offers.take_offers() == []


async def test_a_forged_ticket_in_an_offer_is_of_no_use() -> None:
    """The sender may speak for its own instance, but the signature covers what its engine would be led to."""
    async with with_keys(a=("b",), b=("a",)) as found:
        a, b = found["a"], found["b"]
        ticket = a.prefill.ticket(ROOM) | {"address": "tcp://127.0.0.1:1"}
        a.decode.offers.make_offer(ticket, to=b.at, tokens=TOKENS)
        offer = await b.prefill.offers.wait_for_offer()
        with pytest.raises(TicketError, match="rejected"):
            b.decode.receive(prefill=offer.ticket, tokens=TOKENS, pages={"kv": [5, 1]})


async def test_many_offers_displace_no_transfer() -> None:
    async with servers("a", "b") as (a, b):
        for number in range(256):
            a.decode.offers.make_offer(a.prefill.ticket(number), to=b.at, tokens=TOKENS)
        await until(lambda: len(b.prefill.offers._waiting) >= 128)
        b.fill([3, 9], seed=1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send, b, "wanted", [3, 9])
            ticket = b.prefill.ticket("wanted")
            async with a.decode.receive(prefill=ticket, tokens=TOKENS, pages={"kv": [5, 1]}) as receiver:
                await receiver.done()
        assert a.content([5, 1]) == b.content([3, 9])


async def send(server: Server, room: str, pages: list[int]) -> None:
    async with server.prefill.send(room) as sender:
        await sender.finish(TOKENS, {"kv": pages})
