"""Transfers between the older version and this one, in either direction, over real processes and transports."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

import kvflow
from benchmarks.processes import Report
from kvflow.state.decode.offers import MAX_OFFERS
from tests.versions.rank_process import METADATA, NUM_TOKENS, Memory, RankOptions
from tests.versions.ranks import Ranks, make_key_directories, open_ranks
from tests.versions.version import NEWER, Version

pytestmark = pytest.mark.anyio

ROOM_BYTES: Final = NUM_TOKENS * 2 * 2 * 6 * 8
"""Bytes of a room: K and V of two layers, six heads."""

OFFER_S: Final = 4.0
"""How long offers wait. Repeated in each pause, which is 0.67 s here, they would be too many for the older version."""

ORDERS: Final = pytest.mark.parametrize("is_prefill_newer", [False, True], ids=["older prefill", "newer prefill"])


def in_order(older: Version, is_prefill_newer: bool) -> tuple[Version, Version]:
    return (NEWER, older) if is_prefill_newer else (older, NEWER)


def check_received(received: Report) -> None:
    assert received["why"] == ""
    assert received["is_right"]
    assert (received["metadata"], received["num_bytes"]) == (METADATA, ROOM_BYTES)


async def check_nothing_is_left(ranks: Ranks) -> None:
    for account in await ranks.accounts():
        assert (account["quarantined"], account["anomalies"]) == (0, {})


@ORDERS
@pytest.mark.parametrize("is_registry_newer", [False, True], ids=["older registry", "newer registry"])
@pytest.mark.parametrize("has_keys", [False, True], ids=["plain", "keys"])
async def test_pages_arrive_by_name_and_by_ticket(
    older: Version, is_prefill_newer: bool, is_registry_newer: bool, has_keys: bool, tmp_path: Path
) -> None:
    prefill, decode = in_order(older, is_prefill_newer)
    registry = NEWER if is_registry_newer else older
    keys = make_key_directories(tmp_path) if has_keys else None
    async with open_ranks(registry, prefill, decode, keys=keys) as ranks:
        for room in range(4):
            check_received(await ranks.hand_over(room, by_ticket=room % 2 == 1))
        await check_nothing_is_left(ranks)


@ORDERS
@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
async def test_pages_arrive_from_two_ranks_with_pages_of_another_size(
    older: Version, is_prefill_newer: bool, backend: str
) -> None:
    prefill, decode = in_order(older, is_prefill_newer)
    async with open_ranks(older, prefill, decode, tp=2, page_size=8, backend=backend) as ranks:
        for room in range(4):
            check_received(await ranks.hand_over(room, by_ticket=room % 2 == 1))
        await check_nothing_is_left(ranks)


@asynccontextmanager
async def open_holder(registry: str, memory: Memory) -> AsyncIterator[tuple[kvflow.PrefillRank, kvflow.DecodeRank]]:
    """Open an instance of this version that makes offers."""
    common = RankOptions(role="holder", registry=registry).common
    async with (
        kvflow.PrefillRank(kvflow.PrefillConfig(**common), memory.pool.layout) as prefill,
        kvflow.DecodeRank(kvflow.DecodeConfig(**common), memory.pool.layout) as decode,
    ):
        yield prefill, decode


async def test_offers_to_the_older_version_end_by_their_deadline_and_cost_nothing_else(older: Version) -> None:
    """It drops them. Other rooms go on meanwhile, and the pages are received with a ticket afterwards."""
    memory = Memory(RankOptions(role="holder"))
    async with open_ranks(older, older, older) as ranks, open_holder(ranks.at, memory) as (prefill, decode):
        source, target = memory.take_pages(), memory.take_pages()
        memory.compute(1, source)
        async with prefill.send("request 1", defer_lease=True) as sender:
            await sender.finish((0, NUM_TOKENS), {"kv": source}, metadata=METADATA.encode())
            ticket = prefill.ticket("request 1")
            made = [
                decode.offers.make_offer(ticket, to="prefill", tokens=(0, NUM_TOKENS), timeout_s=OFFER_S)
                for _ in range(MAX_OFFERS)
            ]
            async with decode.receive(2, prefill="prefill", tokens=(0, NUM_TOKENS), pages={"kv": target}) as receiver:
                await ranks.prefill[0].tell("send", room=2, is_text=False)
                assert (await receiver.done()).num_bytes == ROOM_BYTES
            assert not any(one.is_answered for one in made)
            for one in made:
                with pytest.raises(kvflow.OfferDeclined) as caught:
                    await one.accepted()
                assert caught.value.values["reason"] == kvflow.FailureReason.DEADLINE
            await ranks.receive(1, ticket, is_text=True)
            check_received(await ranks.decode.expect("received", 1))
        assert memory.is_right(2, target)
        addressee, other = await ranks.accounts()
    assert addressee["anomalies"].keys() == {"message_rejected"}, "it has had them, and has kept the connection"
    assert (addressee["quarantined"], other["quarantined"], other["anomalies"]) == (0, 0, {})
