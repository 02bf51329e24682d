"""Ranks with keys against peers without keys, with unknown keys, and with keys of another instance; on real sockets."""

from contextlib import AsyncExitStack, closing
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

import kvflow
from kvflow.errors import FailureReason, TransferFailed
from kvflow.trust import PRINCIPAL_DIGITS, ClientKeys
from kvflow.wire.messages import (
    Cancel,
    Failure,
    Grant,
    Hello,
    PeerId,
    RankRecord,
    Refuse,
    Register,
    Unregister,
    Welcome,
)
from tests.attack.guarded import BACKENDS, Attacker, Guarded, guarded, works
from tests.support.failures import catch
from tests.support.instances import QUICK, Deployment, anomalies_of, decode_config, deploy, make_pool, prefill_config
from tests.support.trusts import new_trust, trusting, trusts

pytestmark = pytest.mark.anyio


def hellos_of(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, Hello]]:
    """Return a list that collects the Hellos of decode ranks with their connections."""
    sniffed: list[tuple[bytes, Hello]] = []
    rank = deployment.prefill[0]
    real = rank._handle_request

    def handle_request(connection: bytes, message: Any, num_bytes: int) -> None:
        if isinstance(message, Hello):
            sniffed.append((connection, message))
        real(connection, message, num_bytes)

    monkeypatch.setattr(rank._reading, "_on_message", handle_request)
    return sniffed


@pytest.mark.parametrize("backend", ["memory", "nixl"])
async def test_transfers_work_with_keys(backend: str) -> None:
    async with guarded(backend=backend) as deployment:
        await works(deployment)
        assert [anomalies_of(statistics) for statistics in deployment.statistics()] == [{}, {}]


async def outsider(trust: kvflow.Trust | None, deployment: Guarded, prefill: str | kvflow.Endpoint) -> TransferFailed:
    """Receive a room with another decode rank, and return the failure."""
    config = decode_config(deployment.registry.endpoint, timeouts=QUICK, trust=trust)
    async with kvflow.DecodeRank(config, make_pool().layout) as decode:
        receive = decode.receive(9, prefill=prefill, tokens=(0, 4), pages={"kv": [1]})

        async def ask() -> None:
            async with receive as receiver:
                await receiver.done()

        failure = await catch(ask)
    assert failure is not None
    return failure


def at(rank: kvflow.PrefillRank) -> kvflow.Endpoint:
    return kvflow.Endpoint.parse(rank.endpoint)


async def test_nobody_is_served_without_a_key() -> None:
    async with guarded() as deployment:
        failure = await outsider(None, deployment, at(deployment.prefill[0]))
        assert "it requires a key, and this process has none" in failure.detail
        assert failure.reason is FailureReason.UNREACHABLE
        assert deployment.prefill[0].statistics().anomalies["key_refused"]
        await works(deployment)


async def test_nobody_is_served_with_a_key_that_is_not_listed() -> None:
    async with guarded() as deployment:
        own = new_trust()
        stranger = replace(deployment.keys["decode"], public=own.public, secret=own.secret)
        failure = await outsider(stranger, deployment, at(deployment.prefill[0]))
        assert f"key {stranger.public[:12]} of this process is not listed in `peers` there" in failure.detail
        assert deployment.prefill[0].statistics().anomalies["key_refused"]
        await works(deployment)


async def test_an_insider_is_not_served_in_the_name_of_another_instance() -> None:
    async with guarded("other") as deployment:
        failure = await outsider(deployment.keys["other"], deployment, "prefill")
        assert failure.reason is FailureReason.REFUSED
        assert "its key is listed for other, not for decode" in failure.detail
        assert deployment.prefill[0].statistics().anomalies["hello_denied"] == 1
        await works(deployment)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_sniffed_hello_is_refused_under_another_key(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    async with guarded("other", backend=backend) as deployment:
        sniffed = hellos_of(deployment, monkeypatch)
        await works(deployment)
        _, hello = sniffed[0]
        prefill = deployment.prefill[0]
        keys = ClientKeys(deployment.keys["other"], (deployment.keys["prefill"].public,))
        with closing(Attacker(prefill.endpoint, keys)) as attacker:
            attacker.say(hello)
            refused = await attacker.answer(Refuse, 5.0)
            assert isinstance(refused, Refuse)
            assert "listed for other, not for decode" in refused.detail
            attacker.say(structs.replace(hello, attempt=2**32 - 1))
            assert not [one for one in attacker.heard if isinstance(one, Welcome)]
        await works(deployment, 2)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_connection_that_another_key_names_like_its_own_speaks_for_nobody(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    async with guarded("other", backend=backend) as deployment:
        sniffed = hellos_of(deployment, monkeypatch)
        await works(deployment)
        connection, hello = sniffed[0]
        prefill, peers = deployment.prefill[0], deployment.prefill[0].statistics().peers
        monkeypatch.setattr("kvflow.control.dialer.new_name", lambda: connection[PRINCIPAL_DIGITS:])
        keys = ClientKeys(deployment.keys["other"], (deployment.keys["prefill"].public,))
        with closing(Attacker(prefill.endpoint, keys)) as attacker:
            monkeypatch.undo()
            failure = Failure(FailureReason.ABORTED, kvflow.Stage.ENQUEUE, "decode/0", "stolen")
            attacker.say(Cancel(room=1, generation=1, failure=failure))
            refused = await attacker.answer(Refuse, 5.0)
            assert isinstance(refused, Refuse)
            assert refused.detail == "handshake required"
            assert prefill.statistics().peers == peers == 1
            assert hello.peer == deployment.decode[0].me
        await works(deployment, 2)


async def test_only_the_own_key_registers_and_unregisters_an_instance() -> None:
    async with guarded("other") as deployment:
        registry, prefill = deployment.registry, deployment.prefill[0]
        keys = ClientKeys(deployment.keys["other"], (deployment.keys["registry"].public,))
        pool = make_pool()
        forged = RankRecord(
            peer=PeerId(prefill.me.rank, 99),
            num_ranks=1,
            endpoint="tcp://127.0.0.1:9",
            backend="memory",
            layout=pool.layout,
        )
        with closing(Attacker(registry.endpoint, keys)) as attacker:
            attacker.say(Unregister(peer=prefill.me))
            refused = await attacker.answer(Refuse, 5.0)
            assert isinstance(refused, Refuse)
            attacker.heard.clear()
            attacker.say(Register(record=forged, lease_s=9.0))
            assert await attacker.answer(Refuse, 5.0) is not None
        await works(deployment)


async def test_a_registry_that_lies_leads_nobody_to_a_prefill_rank_without_the_key() -> None:
    """Decode checks its own list of keys: the prefill rank must have a key of the instance."""
    registry, keys = trusts("prefill", "decode", "other")
    gullible = trusting(registry, registry, decode=keys["decode"], prefill=keys["other"])
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(kvflow.Registry(trust=gullible))
        impostor = replace(keys["other"], peers=trusting(registry, decode=keys["decode"]).peers)
        await stack.enter_async_context(
            kvflow.PrefillRank(prefill_config(served.endpoint, trust=impostor), make_pool().layout)
        )
        decode = await stack.enter_async_context(
            kvflow.DecodeRank(decode_config(served.endpoint, trust=keys["decode"], timeouts=QUICK), make_pool().layout)
        )

        async def ask() -> None:
            async with decode.receive(1, prefill="prefill", tokens=(0, 4), pages={"kv": [1]}) as receiver:
                await receiver.done()

        failure = await catch(ask)
        assert failure is not None
        assert failure.reason is FailureReason.REFUSED
        assert "its key is not one of" in failure.detail
        assert decode.statistics().anomalies["connection_refused"]


async def test_a_hello_in_the_name_of_its_reader_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with deploy() as deployment:
        sniffed: list[tuple[bytes, Hello]] = hellos_of(deployment, monkeypatch)
        await works(deployment)
        prefill = deployment.prefill[0]
        with closing(Attacker(prefill.endpoint, None)) as attacker:
            attacker.say(structs.replace(sniffed[0][1], peer=prefill.me))
            refused = await attacker.answer(Refuse, 5.0)
            assert isinstance(refused, Refuse)
            assert refused.detail == "Hello names this rank as its sender"
            assert await attacker.answer(Grant, 0.1) is None
