"""Capabilities: an insider with a valid key but no capability gets no room, and affects no other peer."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import pytest

import kvflow
from kvflow.errors import ConfigError, FailureReason, TicketError, TransferFailed
from kvflow.gate.capability import denial, sign
from tests.attack.guarded import outcome
from tests.support.instances import QUICK, Deployment, Request, decode_config, deploy, make_pool
from tests.support.trusts import trusts
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

KEY = bytes(range(32))
OTHER_KEY = bytes(32)
LATER = 4e9


def capability(room: int = 1, **changes: object) -> str:
    fields: dict[str, object] = {"prefill": "prefill", "decode": "decode", "lifetime_s": 60.0}
    return kvflow.make_capability(KEY, room, **(fields | changes))  # type: ignore[arg-type]


@asynccontextmanager
async def signed() -> AsyncIterator[Deployment]:
    """Open a deployment whose prefill rank requires capabilities."""
    registry, keys = trusts("prefill", "decode", "other")
    sending = {"trust": replace(keys["prefill"], capability_keys=(OTHER_KEY, KEY))}
    async with deploy(sending=sending, receiving={"trust": keys["decode"]}, registry_trust=registry) as deployment:
        insider = decode_config(deployment.registry.endpoint, instance="other", trust=keys["other"], timeouts=QUICK)
        async with kvflow.DecodeRank(insider, make_pool().layout) as other:
            deployment.decode.append(other)
            yield deployment


async def receive(request: Request, signature: str | None, rank: int = 0) -> TransferFailed | None:
    tokens = (0, request.num_tokens)

    async def ask() -> None:
        async with request.deployment.decode[rank].receive(
            request.room, prefill="prefill", tokens=tokens, pages=request.dst_pages(0, tokens), capability=signature
        ) as receiver:
            await receiver.done()

    return await outcome(ask)


async def test_a_room_is_given_for_a_capability_and_not_without() -> None:
    async with signed() as deployment:
        request = deployment.request(1, 12)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(request.send)
            for signature in (None, capability(2), capability(decode="other"), "!", ""):
                failure = await receive(request, signature)
                assert failure is not None
                assert (failure.reason, failure.quarantined) == (FailureReason.REFUSED, False)
                assert "capability" in failure.detail
            assert await receive(request, capability()) is None
        request.assert_arrived()
        assert deployment.prefill[0].statistics().anomalies["room_denied"] == 5


async def test_an_insider_neither_gets_nor_ends_the_room_of_another() -> None:
    async with signed() as deployment:
        request = deployment.request(1, 12)
        stolen = capability()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive, request, stolen)
            await until(lambda: deployment.prefill[0].statistics().waiting_grants)
            for signature in (None, stolen):
                failure = await receive(deployment.request(1, 12), signature, rank=1)
                assert failure is not None
                assert failure.reason is FailureReason.REFUSED
            await request.send()
        request.assert_arrived()


async def test_a_ticket_carries_a_capability() -> None:
    async with signed() as deployment:
        request = deployment.request(1, 12)
        ticket = deployment.prefill[0].ticket(1) | {"capability": capability()}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(request.send)
            async with deployment.decode[0].receive(
                prefill=ticket, tokens=(0, 12), pages=request.dst_pages(0, (0, 12))
            ) as receiver:
                await receiver.done()
        request.assert_arrived()
        with pytest.raises(TicketError, match="malformed"):
            deployment.decode[0].receive(prefill=ticket | {"capability": 5}, tokens=(0, 4), pages={"kv": [1]})


async def test_an_announced_room_needs_one_from_the_beginning_and_none_later() -> None:
    async with signed() as deployment:
        decode, prefill = deployment.decode[0], deployment.prefill[0]

        async def announce() -> None:
            async with decode.announce(1, prefill="prefill") as receiver:
                await receiver.done()

        failure = await outcome(announce)
        assert failure is not None
        assert failure.reason is FailureReason.REFUSED
        request = deployment.request(2, 12)
        async with (
            anyio.create_task_group() as tasks,
            decode.announce(2, prefill="prefill", capability=capability(2)) as receiver,
        ):
            await until(lambda: prefill.statistics().announced)
            prefill._trust = replace(prefill._trust, capability_keys=(OTHER_KEY,))
            tasks.start_soon(request.send)
            receiver.grant(tokens=(0, 12), pages=request.dst_pages(0, (0, 12)))
            await receiver.done()
        request.assert_arrived()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"room": "7"}, "different room"),
        ({"room": 8}, "different room"),
        ({"prefill": "q"}, "different instances"),
        ({"decode": "e"}, "different instances"),
        ({"now": LATER + 4}, ""),
        ({"now": LATER + 6}, "expired: 6.0 s ago"),
        ({"keys": (OTHER_KEY,)}, "invalid signature"),
        ({"keys": (OTHER_KEY, KEY)}, ""),
        ({"capability": ""}, "is required"),
        ({"capability": "*" * 10}, "invalid signature"),
        ({"capability": "abc"}, "malformed"),
        ({"capability": "ü"}, "malformed"),
    ],
)
def test_what_a_capability_is_good_for(changes: dict[str, object], why: str) -> None:
    fields: dict[str, object] = {
        "keys": (KEY,),
        "capability": sign(KEY, 7, prefill="p", decode="d", expires_at=LATER),
        "room": 7,
        "prefill": "p",
        "decode": "d",
        "now": 1e9,
    }
    found = denial(**(fields | changes))  # type: ignore[arg-type]
    assert found.endswith(why) if not why else why in found
    assert bool(found) is bool(why)


def test_a_capability_for_any_replica() -> None:
    text = sign(KEY, "room", prefill="p", decode="d-*", expires_at=LATER)
    assert denial([KEY], text, "room", prefill="p", decode="d-17", now=1.0) == ""
    assert denial([KEY], text, "room", prefill="p", decode="e-17", now=1.0)


def test_every_bit_is_signed() -> None:
    text = sign(KEY, 7, prefill="p", decode="d", expires_at=LATER)
    for place in range(len(text) - 4):
        changed = text[:place] + ("A" if text[place] != "A" else "B") + text[place + 1 :]
        assert denial([KEY], changed, 7, prefill="p", decode="d", now=1.0), place


async def test_misuse() -> None:
    for key, room, prefill in ((b"", 1, "p"), (KEY, -1, "p"), (KEY, 1, "p" * 5_000)):
        with pytest.raises(ConfigError):
            kvflow.make_capability(key, room, prefill=prefill, decode="d")
    with pytest.raises(ConfigError):
        capability(lifetime_s=0)
    async with deploy() as deployment:
        for text in (5, b"x", "x" * 5_000, "ü"):
            with pytest.raises(ConfigError, match="capability must be a string from"):
                deployment.decode[0].receive(
                    1,
                    prefill="prefill",
                    tokens=(0, 4),
                    pages={"kv": [1]},
                    capability=text,  # type: ignore[arg-type]
                )
