"""A refusal ends the request on both sides at once, whoever decided it: no side waits for a timeout of the other."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import anyio
import pytest

import kvflow
import kvflow.blocking
from kvflow.config import Limits, Timeouts
from kvflow.errors import (
    CapacityExceeded,
    FailureReason,
    KvflowError,
    LocalProtocolError,
    PagesInUse,
    PlanError,
    RankDraining,
    TicketError,
    TransferFailed,
)
from kvflow.state.tables import Memory
from tests.support.failures import catch
from tests.support.instances import Deployment, anomalies_of, decode_config, deploy, make_pool, prefill_config
from tests.support.trusts import trusts
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

NEVER = Timeouts(handshake_s=600.0, transfer_s=600.0, grant_s=600.0, open_s=600.0)
"""Nothing ends by a timeout."""

PAGES = {"kv": [1]}
TOKENS = (0, 4)
KEY = bytes(32)


async def sending_fails(rank: kvflow.PrefillRank, room: int, failures: list[TransferFailed]) -> None:
    """Send a room, and store its failure; its pages are free by then."""
    sender = rank.send(room)

    async def send() -> None:
        async with sender:
            await sender.finish(TOKENS, PAGES)

    failures.append(await catch(send))
    assert sender.memory is Memory.SAFE


async def receive(decode: kvflow.DecodeRank, prefill: kvflow.decode.Prefill, room: int | None = None) -> None:
    async with decode.receive(room, prefill=prefill, tokens=TOKENS, pages=PAGES) as receiver:
        await receiver.done()


@asynccontextmanager
async def instances(num_ranks: int = 1, **settings: object) -> AsyncIterator[list[kvflow.PrefillRank]]:
    """Open prefill ranks of the model "test-model", of which the first answers lookups."""
    first_config = prefill_config(None, 0, num_ranks, timeouts=NEVER, **settings)
    async with kvflow.PrefillRank(first_config, make_pool(num_ranks, 0).layout) as first:
        if num_ranks == 1:
            yield [first]
            return
        config = prefill_config(first.endpoint, 1, num_ranks, timeouts=NEVER, **settings)
        async with kvflow.PrefillRank(config, make_pool(num_ranks, 1).layout) as second:
            yield [first, second]


def other_model(trust: kvflow.Trust | None = None) -> kvflow.DecodeRank:
    config = decode_config(None, timeouts=NEVER, trust=trust)
    return kvflow.DecodeRank(config, make_pool(fingerprint="another model").layout)


@pytest.mark.parametrize("model", ["test-model", "another model"])
async def test_a_failed_handshake_fails_the_rooms_of_every_prefill_rank(model: str) -> None:
    """Either the fingerprints or the cells differ. Later rooms fail at once, and prefill learns of them as well."""
    layout = make_pool(fingerprint=model, head_bytes=16 if model == "test-model" else 8).layout
    async with (
        instances(2) as prefill,
        kvflow.DecodeRank(decode_config(None, timeouts=NEVER), layout) as decode,
    ):
        for room, reason in enumerate([FailureReason.REFUSED, FailureReason.PEER_FAILING], 1):
            failures: list[TransferFailed] = []

            async with anyio.create_task_group() as tasks:
                for rank in prefill:
                    tasks.start_soon(sending_fails, rank, room, failures)
                failed = await catch(partial(receive, decode, prefill[0].endpoint, room))
            assert [failure.reason for failure in (failed, *failures)] == 3 * [reason]
            assert {failure.detail for failure in failures} == {failed.detail}
            assert {failure.detected_by for failure in failures} == {"decode/0"}
        assert anomalies_of(decode.statistics()) == {}
        for rank in prefill:
            assert anomalies_of(rank.statistics()) == {}


async def hold(deployment: Deployment) -> kvflow.RoomReceiver:
    """Hold the pages of a room that nobody sends."""
    receiver = deployment.decode[0].receive(900, prefill="prefill", tokens=TOKENS, pages=PAGES)
    await receiver.__aenter__()
    return receiver


async def pages_in_use(deployment: Deployment) -> None:
    receiver = await hold(deployment)
    try:
        await receive(deployment.decode[0], "prefill", 1)
    finally:
        await receiver.__aexit__(None, None, None)


async def bad_pages(deployment: Deployment) -> None:
    deployment.decode[0].receive(1, prefill="prefill", tokens=TOKENS, pages={"kv": [10_000]})


async def too_many(deployment: Deployment) -> None:
    receiver = await hold(deployment)
    try:
        await receive(deployment.decode[0], "prefill", 1)
    finally:
        await receiver.__aexit__(None, None, None)


async def draining(deployment: Deployment) -> None:
    deployment.decode[0].start_drain()
    await receive(deployment.decode[0], "prefill", 1)


REFUSED = [
    (pages_in_use, PagesInUse, FailureReason.PAGES_IN_USE, 10),
    (bad_pages, PlanError, FailureReason.INVALID_PAGES, 10),
    (too_many, CapacityExceeded, FailureReason.CAPACITY, 1),
    (draining, RankDraining, FailureReason.PEER_CLOSED, 10),
]


@pytest.mark.parametrize(("refused", "error", "reason", "transfers"), REFUSED)
async def test_a_receive_that_is_refused_here_fails_the_room_on_prefill(
    refused: Callable[[Deployment], object], error: type[KvflowError], reason: FailureReason, transfers: int
) -> None:
    receiving = {"limits": Limits(transfers=transfers)}
    async with deploy(timeouts=NEVER, receiving=receiving) as deployment, anyio.create_task_group() as tasks:
        failures: list[TransferFailed] = []
        tasks.start_soon(sending_fails, deployment.prefill[0], 1, failures)
        with pytest.raises(error) as caught:
            await refused(deployment)  # type: ignore[misc]
        await until(lambda: failures)
        assert (failures[0].reason, failures[0].detail) == (reason, str(caught.value))


async def test_a_room_that_is_being_received_is_not_declined_when_it_is_requested_twice() -> None:
    async with deploy() as deployment:
        request = deployment.request(1, 4)
        async with request.receiver() as receiver:
            with pytest.raises(LocalProtocolError, match="already being received"):
                async with request.receiver():
                    pass
            deployment.decode[0].decline(1, prefill="prefill", detail="by mistake")
            await request.send()
            await receiver.done()


async def test_a_ticket_for_another_model_is_declined() -> None:
    async with instances() as [prefill], other_model() as decode, anyio.create_task_group() as tasks:
        failures: list[TransferFailed] = []
        tasks.start_soon(sending_fails, prefill, 1, failures)
        with pytest.raises(TicketError, match="different model"):
            decode.receive(prefill=prefill.ticket(1), tokens=TOKENS, pages=PAGES)
        await until(lambda: failures)
        assert failures[0].reason is FailureReason.REFUSED
        assert "different model" in failures[0].detail


@pytest.mark.parametrize("model", ["test-model", "another model"])
async def test_an_engine_declines_a_request_that_it_rejects(model: str) -> None:
    config = decode_config(None, timeouts=NEVER)
    async with instances() as [prefill], anyio.create_task_group() as tasks:
        failures: list[TransferFailed] = []
        tasks.start_soon(sending_fails, prefill, 1, failures)
        decode = kvflow.blocking.DecodeRank(config, make_pool(fingerprint=model).layout)
        await anyio.to_thread.run_sync(decode.open)
        try:
            decode.decline(prefill=prefill.ticket(1), detail="its prompt is too long")
            await until(lambda: failures)
        finally:
            await anyio.to_thread.run_sync(decode.close)
        assert (failures[0].reason, failures[0].detail) == (FailureReason.ABORTED, "its prompt is too long")


@pytest.mark.parametrize("sender_of_decline", ["has a capability", "has none", "has the key of another instance"])
async def test_a_decline_without_a_handshake_is_authorized_like_a_grant(sender_of_decline: str) -> None:
    _, keys = trusts("prefill", "decode", "other")
    own = keys["other" if sender_of_decline == "has the key of another instance" else "decode"]
    capability = kvflow.make_capability(KEY, 1, prefill="prefill", decode="decode")
    async with (
        instances(trust=replace(keys["prefill"], capability_keys=(KEY,))) as [prefill],
        other_model(trust=own) as decode,
    ):
        sender = prefill.send(1)
        async with anyio.create_task_group() as tasks:

            async def sent() -> None:
                async with sender:
                    await sender.finish(TOKENS, PAGES)
                    await sender.delivered()

            tasks.start_soon(catch, sent)
            decode.decline(
                1,
                prefill=prefill.endpoint,
                detail="no",
                capability="not signed" if sender_of_decline == "has none" else capability,
            )
            if sender_of_decline == "has a capability":
                await until(lambda: sender.failure)
            else:
                await until(lambda: prefill.statistics().anomalies.get("room_denied"))
                assert sender.failure is None
                sender.abort()


async def test_a_send_that_is_refused_here_fails_the_room_on_decode() -> None:
    async with deploy(timeouts=NEVER, sending={"limits": Limits(transfers=1)}) as deployment:
        [prefill], [decode] = deployment.prefill, deployment.decode
        async with prefill.send(900) as held, anyio.create_task_group() as tasks:
            early, late = (decode.receive(1, prefill="prefill", tokens=TOKENS, pages=PAGES) for _ in range(2))

            async def done(receiver: kvflow.RoomReceiver) -> None:
                async with receiver:
                    await receiver.done()

            async def failing() -> None:
                for receiver in (early, late):
                    failure = await catch(partial(done, receiver))
                    assert failure.reason is FailureReason.CAPACITY

            tasks.start_soon(failing)
            await until(lambda: prefill.statistics().waiting_grants)
            with pytest.raises(CapacityExceeded):
                await prefill.send(1).__aenter__()
            await until(lambda: early.failure)
            with pytest.raises(CapacityExceeded):
                await prefill.send(1).__aenter__()
            await until(lambda: late.failure)
            held.abort()
