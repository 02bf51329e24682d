"""Attacks whose outcome could depend on the transport, over NIXL, with correct transfers in the background."""

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from typing import Any

import anyio.lowlevel
import pytest
from msgspec import structs

import kvflow
from benchmarks.resources import num_files
from kvflow.backends.metadata import PeerMetadata, RegisteredMemory
from kvflow.backends.nixl import endpoints as nixl_endpoints
from kvflow.backends.nixl import outgoing
from kvflow.backends.nixl.backend import FORMAT
from kvflow.gate import hellos
from kvflow.geometry.layout import KVLayout
from kvflow.geometry.memory import MemoryRange
from kvflow.geometry.routes import compile_routes
from kvflow.stages.context import agent_name
from kvflow.trust import ClientKeys
from kvflow.wire.messages import Failed, Goodbye, Hello, PeerId, RankId, Refuse, Welcome
from tests.attack.guarded import Attacker, Guarded, guarded, outcome, works
from tests.attack.insiders import UnderWay, hello_to, insider, num_hellos_rejected, under_way
from tests.support.cores import grant
from tests.support.instances import decode_config, make_pool
from tests.support.nixl_agents import NUM_BYTES, ForeignAgent, foreign_agents
from tests.support.pools import Pool
from tests.support.trusts import new_trust
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SLACK = 8
"""File descriptors that the attacker's connections and other parts of the process may use meanwhile."""

SIDE_PAGES = 64


def other(rank: int) -> PeerId:
    """Return a rank of the insider's instance."""
    return PeerId(RankId("other", rank), 99)


def layout_at(address: int) -> KVLayout:
    """Return a layout like those of the honest ranks, at an address of another process."""
    return Pool(make_pool().shape, 0, base=address, fingerprint="test-model").layout


def hello_of(deployment: Guarded, of: ForeignAgent, rank: int = 0, **changes: Any) -> Hello:
    """Return the Hello of an insider that wants everything written to an agent."""
    layout = changes.pop("layout", layout_at(of.address))
    route = compile_routes({0: deployment.prefill[0].layout}, layout, decode_rank=0)[0]
    fields = {"backend": "nixl", "backend_metadata": of.metadata, "layout": layout, "route": route}
    return hello_to(deployment, rank, **(fields | changes))


@asynccontextmanager
async def attacked(count: int, **options: Any) -> AsyncIterator[tuple[Guarded, UnderWay, list[ForeignAgent]]]:
    """Open a deployment over NIXL with transfers in the background, and agents of an insider."""
    names = [agent_name(other(rank)) for rank in range(count)]
    async with (
        guarded("other", backend="nixl", **options) as deployment,
        foreign_agents(names) as agents,
        under_way(deployment) as honest,
    ):
        await honest.go_on()
        yield deployment, honest, agents


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Blobs that have reached the library's parser."""
    blobs: list[bytes] = []
    check = nixl_endpoints._check_name

    def record(peer: str, blob: bytes) -> None:
        check(peer, blob)
        blobs.append(blob)

    monkeypatch.setattr(nixl_endpoints, "_check_name", record)
    return blobs


async def refusal(attacker: Attacker, hello: Hello) -> str:
    """Send a Hello, and return why it is refused."""
    attacker.heard.clear()
    attacker.say(hello)
    refused = await attacker.answer(Refuse, 5.0)
    assert isinstance(refused, Refuse)
    return refused.detail


async def come_and_go(deployment: Guarded, agent: ForeignAgent, rank: int) -> str:
    """Connect and disconnect an agent of an insider; return the detail if it is refused."""
    before = deployment.prefill[0].statistics().peers
    with closing(insider(deployment)) as attacker:
        attacker.say(hello_of(deployment, agent, rank))
        await until(lambda: [one for one in attacker.heard if isinstance(one, Welcome | Refuse)])
        answer = next(one for one in attacker.heard if isinstance(one, Welcome | Refuse))
        if isinstance(answer, Refuse):
            return answer.detail
        attacker.say(Goodbye(peer=other(rank)))
        await until(lambda: deployment.prefill[0].statistics().peers <= before)
    return ""


async def test_an_insider_with_ever_new_agents_uses_up_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_endpoints, "MAX_KEPT", 2)
    async with attacked(24) as (deployment, honest, agents):
        before = num_files()
        for rank, agent in enumerate(agents):
            assert await come_and_go(deployment, agent, rank) == ""
        await until(lambda: num_files() <= before + SLACK)
        await honest.go_on()
        assert deployment.prefill[0].statistics().anomalies.get("hello_refused", 0) == 0


async def test_an_insider_whose_descriptors_stay_open_starves_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_endpoints, "MAX_KEPT", 0)
    monkeypatch.setattr(hellos, "MAX_UNCLOSED", 8)
    monkeypatch.setattr(outgoing, "shut_down", lambda _: None)
    async with attacked(12) as (deployment, honest, agents):
        prefill = deployment.prefill[0]
        answers = [await come_and_go(deployment, agent, rank) for rank, agent in enumerate(agents)]
        assert answers[:4] == [""] * 4
        assert "too many disconnected transport agents still" in answers[-1]
        assert prefill.statistics().anomalies["hello_refused"] == len([answer for answer in answers if answer])
        assert len(prefill._backend.unclosed()) <= 5
        assert await come_and_go(deployment, agents[0], 0) in ("", f"{other(0)} has said goodbye")
        await honest.go_on()
        config = decode_config(deployment.registry.endpoint, backend="nixl", trust=deployment.keys["decode"])
        async with kvflow.DecodeRank(config, make_pool().layout):
            await works(deployment, 78)


async def test_an_insider_gets_nothing_with_metadata_or_agents_of_others(added: list[bytes]) -> None:
    async with attacked(2) as (deployment, honest, agents):
        prefill, decode = deployment.prefill[0], deployment.decode[0]
        known, theirs = list(added), decode._backend.metadata()
        with closing(insider(deployment)) as attacker:
            for hello, why in (
                (hello_of(deployment, agents[0], backend_metadata=theirs), "belongs to another agent"),
                (hello_of(deployment, agents[0], backend_metadata=prefill._backend.metadata()), "of an own agent"),
                (hello_of(deployment, agents[1], rank=0), "belongs to another agent"),
                (hello_of(deployment, agents[0], agent=agent_name(prefill.me)), "transport agent of this process"),
                (hello_of(deployment, agents[0], agent=f"{agent_name(prefill.me)}#2"), "agent of this process"),
                (hello_of(deployment, agents[0], agent=agent_name(decode.me)), "another peer has the same transport"),
                (hello_of(deployment, agents[0], instance="decode"), "listed for other, not for decode"),
            ):
                assert why in await refusal(attacker, hello)
                await honest.go_on()
        assert added == known
        assert prefill.statistics().peers == 1


async def test_metadata_of_somebody_without_a_key_never_reaches_the_parser(added: list[bytes]) -> None:
    """With one changed byte and a matching checksum, the metadata may crash the library."""
    async with attacked(1) as (deployment, honest, agents):
        known, prefill = list(added), deployment.prefill[0]
        unlisted = ClientKeys(new_trust(), (deployment.keys["prefill"].public,))
        for keys in (None, unlisted):
            with closing(Attacker(prefill.endpoint, keys)) as attacker:
                for place in range(0, len(agents[0].blob), 7):
                    with suppress(kvflow.Unreachable):
                        attacker.say(hello_of(deployment, agents[0], backend_metadata=mutated(agents[0], place)))
                await until(lambda: prefill.statistics().anomalies.get("key_refused"))
                await honest.go_on()
                assert not attacker.heard
        assert added == known


def mutated(agent: ForeignAgent, place: int) -> bytes:
    """Return metadata with one changed byte in the library's blob, and a matching checksum."""
    blob = bytearray(agent.blob)
    blob[place] ^= 0x41
    return agent.with_blob(bytes(blob))


async def test_metadata_that_is_damaged_never_reaches_the_parser(added: list[bytes]) -> None:
    async with attacked(1) as (deployment, honest, agents):
        known, metadata = list(added), agents[0].metadata
        with closing(insider(deployment)) as attacker:
            for place in range(0, len(metadata), 37):
                damaged = metadata[:place] + bytes([metadata[place] ^ 1]) + metadata[place + 1 :]
                hello = hello_of(deployment, agents[0], backend_metadata=damaged, attempt=place)
                assert "metadata is damaged" in await refusal(attacker, hello)
        await honest.go_on()
        assert added == known


def claiming(agent: ForeignAgent, *ranges: MemoryRange, **changes: Any) -> bytes:
    """Return metadata that claims other registered memory than the library's blob."""
    memory = RegisteredMemory(ranges, "DRAM", 0)
    return PeerMetadata(FORMAT, agent.blob, structs.replace(memory, **changes)).pack()


FAR = 2**40


@pytest.mark.parametrize("case", ["layout beyond it", "claim beyond it", "claim of nothing there", "device memory"])
async def test_grants_of_memory_that_is_not_registered_fail_alone(case: str) -> None:
    async with attacked(1) as (deployment, honest, agents):
        agent, prefill = agents[0], deployment.prefill[0]
        whole = MemoryRange(agent.address, NUM_BYTES)
        layout, metadata = {
            "layout beyond it": (layout_at(agent.address + NUM_BYTES), agent.metadata),
            "claim beyond it": (
                layout_at(agent.address + NUM_BYTES),
                claiming(agent, MemoryRange(agent.address, 2 * NUM_BYTES)),
            ),
            "claim of nothing there": (layout_at(FAR), claiming(agent, MemoryRange(FAR, NUM_BYTES))),
            "device memory": (
                structs.replace(layout_at(agent.address), memory_kind="VRAM"),
                claiming(agent, whole, memory_kind="VRAM"),
            ),
        }[case]
        with closing(insider(deployment)) as attacker:
            attacker.say(hello_of(deployment, agent, layout=layout, backend_metadata=metadata))
            assert await attacker.answer(Welcome, 5.0) is not None
            failures = []
            for room in range(5):
                request = deployment.request(room, 4)
                attacker.say(grant(room, room + 1, (0, 4), pages={"kv": struct.pack("<I", 1)}))
                failures.append(await outcome(request.send))
                deployment.give_back(request)
            assert None not in failures
            assert await attacker.answer(Failed, 5.0) is not None
            await honest.go_on()
        assert prefill.statistics().peers >= 1


async def test_grants_of_pages_that_do_not_exist_fail_alone() -> None:
    async with attacked(1) as (deployment, honest, agents):
        with closing(insider(deployment)) as attacker:
            attacker.say(hello_of(deployment, agents[0]))
            assert await attacker.answer(Welcome, 5.0) is not None
            for room, page in enumerate((SIDE_PAGES, 2**31, 2**32 - 1)):
                request = deployment.request(room, 4)
                attacker.heard.clear()
                attacker.say(grant(room, room + 1, (0, 4), pages={"kv": struct.pack("<I", page)}))
                failure = await outcome(request.send)
                deployment.give_back(request)
                assert failure is not None
                assert await attacker.answer(Failed, 5.0) is not None
            await honest.go_on()


async def test_a_hello_of_another_instance_is_refused_however_often_it_is_replayed(
    monkeypatch: pytest.MonkeyPatch, added: list[bytes]
) -> None:
    async with guarded("other", backend="nixl") as deployment:
        prefill, sniffed = deployment.prefill[0], list[Hello]()
        start = prefill._hellos.start

        def sniff(connection: bytes, hello: Hello) -> None:
            sniffed.append(hello)
            start(connection, hello)

        monkeypatch.setattr(prefill._hellos, "start", sniff)
        await works(deployment)
        known = list(added)
        async with under_way(deployment) as honest:
            with closing(insider(deployment)) as attacker:
                for attempt in (0, 1, 2**31):
                    replayed = structs.replace(sniffed[0], attempt=attempt)
                    assert "listed for other, not for decode" in await refusal(attacker, replayed)
                    await honest.go_on()
        assert prefill.statistics().peers == 1
        assert added == known


async def test_a_flood_of_hellos_starves_only_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_endpoints, "MAX_KEPT", 2)
    async with attacked(1, limits=kvflow.Limits(peers=32)) as (deployment, honest, agents):
        prefill, before = deployment.prefill[0], num_files()
        attackers = [insider(deployment) for _ in range(40)]
        num_said = 0
        for attempt in range(40):
            for number, attacker in enumerate(attackers):
                rank = number + 40 * attempt
                with suppress(kvflow.Unreachable):
                    attacker.say(hello_of(deployment, agents[0].alias(agent_name(other(rank))), rank))
                    num_said += 1
            await anyio.lowlevel.checkpoint()

        await until(lambda: num_hellos_rejected(prefill) >= num_said - 16)
        await honest.go_on()
        assert prefill.statistics().peers <= 17
        for attacker in attackers:
            attacker.close()
        await until(lambda: prefill.statistics().peers == 1)
        await until(lambda: num_files() <= before + SLACK)
        await honest.go_on()
