"""Peers that use or send more than their share, against live ranks with transfers in the background."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing, suppress

import anyio
import anyio.lowlevel
import msgspec
import pytest

import kvflow
from kvflow.bounds import Bounds
from kvflow.errors import FailureReason, RemoteProtocolError
from kvflow.gate import rates, shares
from kvflow.gate.rates import HELLOS, REJECTIONS, Budget
from kvflow.gate.sizes import MAX_REQUEST_BYTES
from kvflow.geometry.layout import Region
from kvflow.trust import ClientKeys
from kvflow.wire.codec import HEADER, decode, encode
from kvflow.wire.messages import AnyMessage, Failed, Lookup, RankRecord, Records, Register, Unregister, Welcome
from tests.attack.guarded import BACKENDS, Attacker, Guarded, guarded, works
from tests.attack.insiders import hello_to, insider, num_hellos_rejected, under_way
from tests.support.cores import grant
from tests.support.instances import decode_config, deploy, make_pool
from tests.support.memory import resident_mib
from tests.support.pools import PagedShape, Pool
from tests.support.waiting import until
from tests.support.zmtp import MORE, RawZmtp, frame

pytestmark = pytest.mark.anyio

REGION = Region("k", 0, 2**40, 4, 1_024, 16, 64, (0, 1), 64, 64, "bfloat16")


def frame_of_regions(num_regions: int) -> bytes:
    """Return a hello without a valid field, of a size that once took seconds to refuse."""
    layout = {"components": [{"name": "kv", "regions": [REGION] * num_regions}]}
    return HEADER + msgspec.msgpack.encode({"type": "hello", "layout": layout})


@pytest.mark.parametrize("num_regions", [20_000, 400_000])
async def test_one_large_frame_stops_nobody(num_regions: int) -> None:
    """It is refused for its length or for that of a list in it, before a single region is parsed."""
    data = frame_of_regions(num_regions)
    with pytest.raises(RemoteProtocolError, match=r"length <= 4096|too long for its kind"):
        decode(data)
    async with deploy() as deployment, under_way(deployment) as honest:
        for endpoint in (deployment.prefill[0].endpoint, deployment.registry.endpoint):
            with RawZmtp(endpoint) as raw:
                await anyio.to_thread.run_sync(raw.send, frame(data))
                await honest.go_on()
        if len(data) < MAX_REQUEST_BYTES:
            assert deployment.prefill[0].statistics().anomalies["message_rejected"]


async def test_a_message_without_end_stops_nobody() -> None:
    part = frame(bytes(65_536), MORE) * 16
    async with deploy() as deployment, under_way(deployment) as honest:
        prefill = deployment.prefill[0]
        with RawZmtp(prefill.endpoint) as raw:
            while await anyio.to_thread.run_sync(raw.send, part):
                pass
        await until(lambda: prefill.statistics().anomalies.get("connection_cut"))
        await honest.go_on()


async def test_a_message_without_end_is_not_even_begun_without_a_key() -> None:
    async with guarded() as deployment, under_way(deployment):
        with RawZmtp(deployment.prefill[0].endpoint) as raw:
            sent = 0
            while await anyio.to_thread.run_sync(raw.send, frame(bytes(65_536), MORE)):
                sent += 65_536
                assert sent < 2**26
        await until(lambda: deployment.prefill[0].statistics().anomalies.get("key_refused"))


@pytest.mark.parametrize("backend", BACKENDS)
async def test_an_insider_who_says_hello_without_end_starves_only_itself(backend: str) -> None:
    async with guarded("other", backend=backend) as deployment, under_way(deployment) as honest:
        prefill = deployment.prefill[0]
        with closing(insider(deployment)) as attacker:
            num_said = 0
            for number in range(3 * HELLOS.at_once):
                with suppress(kvflow.Unreachable):
                    attacker.say(hello_to(deployment, number))
                    num_said += 1
                if number % 64 == 0:
                    await anyio.lowlevel.checkpoint()
            await until(lambda: num_hellos_rejected(prefill) >= num_said - 1)
            await honest.go_on()
            assert prefill.statistics().peers < 2 * HELLOS.at_once


@pytest.mark.parametrize("backend", BACKENDS)
async def test_an_insider_who_grants_without_end_starves_only_itself(backend: str) -> None:
    limits = Bounds(pending_grants=64)
    async with guarded("other", backend=backend, limits=limits) as deployment, under_way(deployment):
        prefill = deployment.prefill[0]
        with closing(insider(deployment)) as attacker:
            attacker.say(hello_to(deployment))
            assert await attacker.answer(Welcome, 5.0) is not None
            for room in range(500):
                attacker.say(grant(room=room + 5_000, generation=room + 1))
            failed = await attacker.answer(Failed, 5.0)
            assert isinstance(failed, Failed)
            assert failed.failure.reason is FailureReason.CAPACITY
            assert prefill.statistics().waiting_grants <= 33
            await works(deployment, 77)


async def test_what_is_not_for_a_listener_is_not_read() -> None:
    """Reading eight megabytes of records took seconds."""
    record = {"peer": [["other", 0], 1], "layout": {"components": [{"name": "kv", "regions": [REGION] * 4_096}]}}
    data = HEADER + msgspec.msgpack.encode({"type": "records", "instance": "x", "records": [record] * 10})
    assert len(data) < MAX_REQUEST_BYTES
    async with guarded("other") as deployment, under_way(deployment) as honest:
        prefill, registry = deployment.prefill[0], deployment.registry
        keys = deployment.keys["other"].for_registry()
        with closing(insider(deployment)) as attacker, closing(Attacker(registry.endpoint, keys)) as other:
            for connection in (attacker.connection, other.connection):
                with suppress(kvflow.Unreachable):  # the own end limits the unread bytes
                    for _ in range(12):
                        connection.send(data)
            await until(lambda: prefill.statistics().anomalies.get("connection_cut"))
            await until(lambda: registry._anomalies.counts.get("connection_cut"))
            await honest.go_on()


async def test_an_insider_whose_hellos_have_thousands_of_regions_starves_only_itself() -> None:
    """Most are not decoded, and later not even received."""
    large = Pool(PagedShape(16, 4, (0, 4), 8, num_layers=2_000), 0).layout
    async with guarded("other") as deployment, under_way(deployment) as honest:
        prefill = deployment.prefill[0]
        with closing(insider(deployment)) as attacker:
            hello = encode(hello_to(deployment, layout=large))
            while not prefill.statistics().anomalies.get("connection_cut"):
                with suppress(kvflow.Unreachable):  # the own end limits the unread bytes
                    attacker.connection.send(hello)
                await anyio.lowlevel.checkpoint()
            assert prefill.statistics().postponed["hello_over_budget"]
            await honest.go_on()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_nothing_is_kept_of_peers_that_are_forgotten() -> None:
    """Each peer has a large layout and its own name, and its lease expires."""
    large = Pool(PagedShape(16, 4, (0, 4), 8, num_layers=300), 0).layout
    async with guarded("other") as deployment, under_way(deployment) as honest:
        prefill = deployment.prefill[0]
        for number in range(300):
            with closing(insider(deployment)) as attacker:
                attacker.say(hello_to(deployment, number, layout=large, lease_s=0.2))
                assert isinstance(await attacker.answer(Welcome, 10.0), Welcome)
            await honest.go_on()
            if number == 100:
                resident = resident_mib()
        await until(lambda: prefill.statistics().peers == 1)
        assert resident_mib() < resident + 32


async def say_hello(attacker: Attacker, deployment: Guarded) -> None:
    """Say Hello until it is answered, as decode ranks do: one may be lost with the connection."""
    while not any(isinstance(one, Welcome) for one in attacker.heard):
        with suppress(kvflow.Unreachable):
            attacker.say(hello_to(deployment))
        await anyio.sleep(0.1)


def say_often(attacker: Attacker, message: bytes) -> None:
    for _ in range(2 * REJECTIONS.at_once):
        attacker.connection.send(message)


async def test_an_insider_whose_messages_are_malformed_is_cut_off_for_a_second() -> None:
    async with guarded("other") as deployment, under_way(deployment) as honest:
        prefill = deployment.prefill[0]
        with closing(insider(deployment)) as attacker:
            say_often(attacker, HEADER + b"nonsense")
            await until(lambda: prefill.statistics().anomalies.get("connection_cut"))
            await honest.go_on()
            await until(lambda: attacker.refused)
            await say_hello(attacker, deployment)
        assert prefill.statistics().anomalies["connection_cut"] == 1


@pytest.mark.parametrize(
    "message", [grant(room=7), Lookup(instance="prefill", timeout_s=1.0)], ids=lambda message: type(message).__name__
)
async def test_an_insider_who_speaks_without_a_hello_is_cut_off_for_a_second(message: AnyMessage) -> None:
    async with guarded("other") as deployment, under_way(deployment) as honest:
        prefill = deployment.prefill[0]
        with closing(insider(deployment)) as attacker:
            while not prefill.statistics().anomalies.get("connection_cut"):  # budgets grow while a busy machine reads
                for _ in range(16):  # few, so that hardly any are left to be sent after the cut
                    attacker.connection.send(encode(message))
                await anyio.lowlevel.checkpoint()
            assert prefill.statistics().anomalies["stranger_over_budget"] > 1_000
            await honest.go_on()
            await until(lambda: attacker.refused)
            await say_hello(attacker, deployment)


async def test_an_insider_whose_messages_the_registry_refuses_is_cut_off() -> None:
    async with guarded("other") as deployment, under_way(deployment):
        registry = deployment.registry
        with closing(Attacker(registry.endpoint, deployment.keys["other"].for_registry())) as attacker:
            say_often(attacker, encode(Unregister(peer=deployment.prefill[0].me)))
            await until(lambda: registry._anomalies.counts.get("connection_cut"))
            await until(lambda: attacker.refused)


async def test_long_registers_over_budget_cost_only_their_own_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of a principal repeat them when a registry has restarted."""
    monkeypatch.setattr(rates, "REGISTER_BYTES", Budget(2**14, 1))
    large = Pool(PagedShape(16, 4, (0, 4), 8, num_layers=2_000), 0).layout
    async with guarded("other") as deployment:
        registry, keys = deployment.registry, deployment.keys["other"].for_registry()
        own = hello_to(deployment, layout=large)
        record = RankRecord(peer=own.peer, num_ranks=1, endpoint=registry.endpoint, backend="nixl", layout=large)
        register = encode(Register(record=record, lease_s=60.0))
        with closing(Attacker(registry.endpoint, keys)) as first, closing(Attacker(registry.endpoint, keys)) as second:
            second.say(Lookup(instance="absent", timeout_s=0.001))
            assert await second.answer(Records, 10.0) is not None
            while not registry.statistics().anomalies.get("connection_cut"):
                with suppress(kvflow.Unreachable):  # the own end limits the unread bytes
                    first.connection.send(register)
                await anyio.lowlevel.checkpoint()
            second.heard.clear()
            second.connection.send(register)
            second.say(Lookup(instance="absent", timeout_s=0.001, number=2))
            assert await second.answer(Records, 10.0) is not None
            assert registry.statistics().anomalies["connection_cut"] == 1


async def look_up_over_the_share(stack: ExitStack, registry: kvflow.Registry, keys: ClientKeys | None) -> Attacker:
    """Ask 80 times on four connections where 64 lookups may wait in all; return the last connection."""
    for number in range(4):
        attacker = stack.enter_context(closing(Attacker(registry.endpoint, keys)))
        for question in range(20):
            attacker.say(Lookup(instance=f"{number}-{question}", timeout_s=60.0))
    await until(lambda: registry.statistics().postponed.get("lookup_over_share", 0) == 48)
    assert registry.statistics().waiting_lookups == 32
    return attacker


async def test_connections_of_one_key_share_the_lookups_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "MAX_LOOKUPS", 64)
    async with guarded("other") as deployment, under_way(deployment) as honest:
        registry, keys = deployment.registry, deployment.keys["other"].for_registry()
        with ExitStack() as stack:
            attacker = await look_up_over_the_share(stack, registry, keys)
            await honest.go_on()
            too_long = encode(Lookup(instance="x", timeout_s=60.0)).replace(
                msgspec.msgpack.encode(60.0), msgspec.msgpack.encode(61.0)
            )
            attacker.connection.send(too_long)
            await until(lambda: registry.statistics().anomalies.get("message_rejected"))


async def test_connections_of_one_host_share_the_lookups_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "MAX_LOOKUPS", 64)
    async with kvflow.Registry("tcp://127.0.0.1:0") as registry:
        with ExitStack() as stack:
            await look_up_over_the_share(stack, registry, None)


async def test_an_insider_makes_no_instance_incomplete() -> None:
    """It tries to register another rank of the prefill instance, and to unregister the existing one."""
    async with guarded("other") as deployment, under_way(deployment):
        prefill, registry = deployment.prefill[0], deployment.registry
        forged = RankRecord(
            peer=prefill.me._replace(rank=prefill.me.rank._replace(engine_rank=1)),
            num_ranks=2,
            endpoint=prefill.endpoint,
            backend="memory",
            layout=make_pool().layout,
        )
        keys = deployment.keys["other"].for_registry()
        with closing(Attacker(registry.endpoint, keys)) as attacker:
            attacker.say(Register(record=forged, lease_s=600.0))
            attacker.say(Unregister(peer=prefill.me))
            await until(lambda: registry._anomalies.counts.get("message_rejected", 0) == 2)
        config = decode_config(registry.endpoint, trust=deployment.keys["decode"])
        async with kvflow.DecodeRank(config, make_pool().layout):
            await works(deployment, 78)


@asynccontextmanager
async def sniffer(endpoint: str) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Relay connections to a listener; yield the endpoint and the recorded bytes to the listener."""
    host, port = endpoint.removeprefix("tcp://").split(":")
    said: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(host, int(port))

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter, kept: list[bytes] | None) -> None:
            with suppress(OSError):
                while data := await source.read(65_536):
                    if kept is not None:
                        kept.append(data)
                    target.write(data)
                    await target.drain()
            target.close()

        await asyncio.gather(copy(reader, up_writer, said), copy(up_reader, writer, None))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", said
    server.close()


@pytest.mark.parametrize("backend", BACKENDS)
async def test_what_was_sniffed_is_of_no_use(backend: str) -> None:
    async with guarded("other", backend=backend) as deployment, under_way(deployment):
        prefill = deployment.prefill[0]
        await works(deployment)
        async with sniffer(prefill.endpoint) as (endpoint, said):
            keys = ClientKeys(deployment.keys["other"], (deployment.keys["prefill"].public,))
            with closing(Attacker(endpoint, keys)) as attacker:
                attacker.say(hello_to(deployment, instance="other"))
                assert await attacker.answer(Welcome, 5.0) is not None
        assert prefill.statistics().peers == 2
        assert b"other" not in b"".join(said)
        before = prefill.statistics().anomalies.get("key_refused", 0)
        host, port = prefill.endpoint.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(b"".join(said))
            await until(lambda: prefill.statistics().anomalies.get("key_refused", 0) > before)
        assert prefill.statistics().peers == 2
