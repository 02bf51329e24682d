"""Registry and client over real sockets."""

import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import anyio.lowlevel
import pytest

from kvflow.control import dialer
from kvflow.directory import Directories, Registry, RegistryClient, client, service
from kvflow.errors import ConfigError, LocalProtocolError, Unreachable
from kvflow.gate import rates, shares
from kvflow.gate.rates import ListenerGate
from kvflow.observe.logs import get_logger
from kvflow.observe.trace import AnomalyLog
from kvflow.trust import Trust
from kvflow.wire.codec import decode, encode
from kvflow.wire.messages import (
    Lookup,
    Message,
    Ping,
    RankRecord,
    Records,
    Refuse,
    Register,
    Registered,
    SealedRegister,
    Unregister,
)
from tests.control.ends import Client, Server
from tests.directory.records import record, sealed
from tests.observe.lines import printed
from tests.support.reading import reading_context
from tests.support.waiting import POLL_S, until

pytestmark = pytest.mark.anyio

APART = "tcp://127.7.7.7:0"
"""A loopback address that no other connection uses: a port stays free between two registries."""


def unused() -> str:
    """Return an endpoint without a listener; a closed registry listens a little longer, and swallows messages."""
    with socket.socket() as bound:
        bound.bind(("127.7.7.7", 0))
        return f"tcp://127.7.7.7:{bound.getsockname()[1]}"


class Seeker:
    """A client that keeps the answers that it receives."""

    def __init__(self, endpoint: str, **values: object) -> None:
        self.found: list[tuple[str | None, tuple[RankRecord, ...]]] = []
        log = get_logger(**values)
        self.client = RegistryClient(endpoint, log, reading_context(log), self._take)

    def _take(self, instance: str | None, records: tuple[RankRecord, ...], number: int) -> None:
        self.found.append((instance, records))

    async def next(self) -> tuple[str | None, tuple[RankRecord, ...]]:
        await until(lambda: self.found)
        return self.found.pop(0)

    async def look_up(self, instance: str = "prefill") -> tuple[RankRecord, ...]:
        """Repeat the lookup until the registry has every rank; return their records."""
        while True:
            self.client.look_up(instance)
            _, records = await self.next()
            if records and len(records) == records[0].num_ranks:
                return records


@contextmanager
def client_of(endpoint: str, *published: RankRecord, **values: object) -> Iterator[Seeker]:
    """Open a client for each published rank, and yield the first one."""
    seekers = [Seeker(endpoint, **values) for _ in published or [None]]
    for seeker, mine in zip(seekers, published, strict=False):
        seeker.client.publish(mine)
    try:
        yield seekers[0]
    finally:
        for seeker in seekers:
            seeker.client.close()


@asynccontextmanager
async def open_again(endpoint: str) -> AsyncIterator[Registry]:
    """Open a registry at the endpoint of a closed one, whose socket is released in the background."""
    async with AsyncExitStack() as stack:
        opened: Registry | None = None
        while opened is None:
            with suppress(ConfigError):
                opened = await stack.enter_async_context(Registry(endpoint))
            await anyio.lowlevel.checkpoint()
        yield opened


async def ask(rogue: Client, message: Message) -> Message:
    rogue.send(encode(message))
    return decode(*await rogue.receive())


async def register(client: Client, mine: RankRecord) -> Message:
    return await ask(client, Register(record=mine, lease_s=9.0))


async def name_of(registry: Registry, client: Client) -> bytes:
    """Return the registry's name of a connection, with the help of a lookup that stays unanswered."""
    client.send(encode(Lookup(instance="unknown", timeout_s=60.0)))
    await until(lambda: registry._directory.table.num_waiting)
    (name,) = registry._directory.table._instances["unknown"].waiting
    return name


def kill(registry: Registry, client: Client, name: bytes) -> None:
    """Close a connection; return when the registry's socket has noticed, without reading anything from it."""
    client.close()
    assert registry._listener is not None
    while True:
        try:
            registry._listener.send(name, b"")
        except Unreachable as error:
            if error.message == "peer is not connected":
                return
        time.sleep(POLL_S)  # the event loop must not run meanwhile


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten waits and leases, which makes retries and renewals frequent."""
    monkeypatch.setattr(client, "LOOKUP_S", 0.05)
    monkeypatch.setattr(client, "LEASE_S", 1.0)


async def test_ranks_are_found_in_order() -> None:
    records = [record(engine_rank=rank, num_ranks=3) for rank in (2, 0, 1)]
    async with Registry() as registry:
        with client_of(registry.endpoint, *records), client_of(registry.endpoint) as seeker:
            found = await seeker.look_up()
    assert [held.peer.rank.engine_rank for held in found] == [0, 1, 2]
    assert set(found) == set(records)


async def test_lookup_before_anybody_is_registered_is_answered_when_somebody_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "LOOKUP_S", 60.0)
    async with Registry() as registry:
        with client_of(registry.endpoint) as seeker:
            seeker.client.look_up("prefill")
            await until(lambda: registry._directory.table.num_waiting)
            with client_of(registry.endpoint, record()):
                assert await seeker.next() == ("prefill", (record(),))


async def test_lookup_of_an_incomplete_instance_is_answered_with_what_there_is(quick: None) -> None:
    records = [record(engine_rank=rank, num_ranks=4) for rank in (0, 2)]
    async with Registry() as registry:
        with client_of(registry.endpoint, *records) as seeker:
            await until(lambda: registry._directory.table.num_ranks == 2)
            seeker.client.look_up("prefill")
            assert await seeker.next() == ("prefill", tuple(records))
            seeker.client.look_up("prefil")
            assert await seeker.next() == ("prefil", ())


async def test_lookup_before_there_is_a_registry() -> None:
    endpoint = unused()
    with client_of(endpoint, record()) as seeker:
        seeker.client.look_up("prefill")
        async with Registry(endpoint):
            assert await seeker.next() == ("prefill", (record(),))


async def test_ranks_are_back_at_once_in_a_registry_that_was_restarted() -> None:
    """They return long before their next renewal, which is three seconds away."""
    records = [record(engine_rank=rank, num_ranks=2) for rank in range(2)]
    async with AsyncExitStack() as stack:
        async with Registry(APART) as first:
            seeker = stack.enter_context(client_of(first.endpoint, *records))
            assert len(await seeker.look_up()) == 2
        async with open_again(first.endpoint) as second:
            await until(lambda: second._directory.table.num_ranks == 2)
            assert len(await seeker.look_up()) == 2


async def test_silence_and_return_of_the_registry_are_logged_once_each(quick: None) -> None:
    with printed() as lines:
        async with AsyncExitStack() as stack:
            async with Registry(APART) as first:
                seeker = stack.enter_context(client_of(first.endpoint, record()))
                await seeker.look_up()
                await until(lambda: lines.named("registered"))
            await until(lambda: lines.named("registry_silent"))
            async with open_again(first.endpoint):
                await until(lambda: lines.named("registry_back"))
                await seeker.look_up()
    told = [(line["event"], line["level"]) for line in lines.objects() if "registry" in line]
    assert told == [("registered", "info"), ("registry_silent", "warning"), ("registry_back", "info")]
    assert lines.named("registry_silent")[0]["was_registered"] is True
    assert lines.named("registered")[0]["registry"] == first.endpoint


async def test_registry_that_was_never_there_is_logged_as_such(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialer, "DIAGNOSE_AFTER_S", 0.0)
    endpoint = unused()
    with printed() as lines, client_of(endpoint, record()):
        await until(lambda: lines.named("registry_silent"))
        async with Registry(endpoint):
            await until(lambda: lines.named("registered"))
    (silent,) = lines.named("registry_silent")
    assert silent["was_registered"] is False
    assert "connection refused" in str(silent["detail"])
    assert not lines.named("registry_back")


async def test_renewals_are_not_logged(quick: None) -> None:
    renewals: list[bytes] = []
    with printed() as lines, closing(Server()) as server, client_of(server.endpoint, record()):
        while len(renewals) < 4:
            name, frames = await server.receive()
            renewals.append(frames[0])
            server.send(name, encode(Registered(peer=record().peer)))
        assert renewals == [encode(Register(record=record(), lease_s=1.0))] * 4
    assert [line["event"] for line in lines.objects()] == ["registered"]


async def test_rank_that_leaves_is_forgotten_at_once() -> None:
    async with Registry() as registry:
        with client_of(registry.endpoint, record()) as mine:
            await mine.look_up()
            mine.client._send(Unregister(peer=record(incarnation=99).peer))
            mine.client.withdraw(record().peer)
            await until(lambda: registry._directory.table.num_ranks == 0)


async def test_rank_that_falls_silent_is_forgotten(quick: None) -> None:
    async with Registry() as registry:
        with client_of(registry.endpoint, record()) as mine:
            await mine.look_up()
        await until(lambda: registry._directory.table.num_ranks == 0)


async def test_two_processes_with_one_name_are_told_and_the_first_one_wins(quick: None) -> None:
    first, second = record(incarnation=1), record(incarnation=2)
    async with Registry() as registry:
        with printed() as lines, client_of(registry.endpoint, first, process=1) as mine:
            await mine.look_up()
            with client_of(registry.endpoint, second, process=2):
                await until(
                    lambda: len([line for line in lines.named("registration_conflict") if "process" in line]) == 2
                )
                assert await mine.look_up() == (first,)
                mine.client.withdraw(first.peer)
                await until(lambda: lines.named("registered_after_conflict"))
                assert await mine.look_up() == (second,)
    told = {line["process"]: line for line in lines.named("registration_conflict") if "process" in line}
    assert told[1].items() >= {"level": "error", "refused": False, "other_endpoint": second.endpoint}.items()
    assert told[2].items() >= {"level": "error", "refused": True, "other_endpoint": first.endpoint}.items()
    assert len([line for line in lines.named("registration_conflict") if "process" in line]) == 2


@pytest.mark.parametrize("was_registered", [False, True])
async def test_what_a_killed_process_had_sent_does_not_count_when_its_successor_is_registered(
    was_registered: bool,
) -> None:
    dead, living = record(incarnation=1), record(incarnation=2)
    async with Registry() as registry:
        with printed() as lines, closing(Client(registry.endpoint)) as successor:
            with closing(Client(registry.endpoint)) as killed:
                name = await name_of(registry, killed)
                if was_registered:
                    assert await register(killed, dead) == Registered(peer=dead.peer)
                assert await register(successor, living) == Registered(peer=living.peer)
                for _ in range(2):
                    killed.send(encode(Register(record=dead, lease_s=9.0)))
                kill(registry, killed, name)
            await until(lambda: lines.named("answer_undeliverable"))
            for _ in range(3):
                assert await register(successor, living) == Registered(peer=living.peer)
            found = await ask(successor, Lookup(instance="prefill", timeout_s=60.0))
    assert found == Records(instance="prefill", records=(living,))
    assert not lines.named("registration_conflict")


async def test_rank_is_not_told_of_a_conflict_with_a_process_that_is_gone() -> None:
    """A second process had its name for some time, and was killed before the first one registered again."""
    first, second = record(incarnation=1), record(incarnation=2)
    async with Registry() as registry:
        with printed() as lines, closing(Client(registry.endpoint)) as stays:
            assert await register(stays, first) == Registered(peer=first.peer)
            with closing(Client(registry.endpoint)) as killed:
                name = await name_of(registry, killed)
                assert await register(killed, second) == Registered(peer=second.peer)
                kill(registry, killed, name)
            for _ in range(3):
                assert await register(stays, first) == Registered(peer=first.peer)
            found = await ask(stays, Lookup(instance="prefill", timeout_s=60.0))
    assert found == Records(instance="prefill", records=(first,))
    assert not lines.named("registration_conflict")


async def test_restart_is_no_conflict(quick: None) -> None:
    async with Registry() as registry:
        with printed() as lines:
            with client_of(registry.endpoint, record(incarnation=1)) as seeker:
                await seeker.look_up()
            with client_of(registry.endpoint, record(incarnation=2)) as seeker:
                while await seeker.look_up() != (record(incarnation=2),):
                    pass
                seeker.client.withdraw(record(incarnation=2).peer)
                await until(lambda: lines.named("rank_left"))
    assert not lines.named("registration_conflict")
    told = [(line["event"], line["peer"], line["endpoint"]) for line in lines.objects() if "endpoint" in line]
    first, second = (record(incarnation=number) for number in (1, 2))
    assert told == [
        ("rank_registered", str(first.peer), first.endpoint),
        ("rank_replaced", str(second.peer), second.endpoint),
        ("rank_left", str(second.peer), second.endpoint),
    ]


GARBAGE = [
    b"",
    b"GET / HTTP/1.1",
    b"KVF\x02",
    b"KVF\x01" + b"\x91" * 2_000,
    b"KVF\x01\x81\xa4type\xa2\xff\xfe",
    encode(Ping(peer=record().peer)),
    encode(Registered(peer=record().peer)),
    encode(Register(record=record(), lease_s=9.0))[:-1],
    encode(Register(record=record(), lease_s=9.0)).replace(b"\xb0tcp://10.0.0.1:1", b"\xa0"),
    encode(Register(record=record(), lease_s=9.0)).replace(b"\xb0tcp://10.0.0.1:1", b"\xa8ipc:///x"),
    encode(Lookup(instance="prefill", timeout_s=1.0)) + b"\0",
]


@pytest.mark.parametrize("data", GARBAGE, ids=lambda data: repr(data[:12]))
async def test_garbage_does_not_stop_the_registry(data: bytes) -> None:
    async with Registry() as registry:
        with client_of(registry.endpoint, record()) as seeker:
            await seeker.look_up()
            with closing(Client(registry.endpoint)) as rogue, printed() as lines:
                rogue.send(data)
                await until(lambda: lines.named("message_rejected"))
                answer = await ask(rogue, Lookup(instance="prefill", timeout_s=60.0))
            assert answer == Records(instance="prefill", records=(record(),))
            assert await seeker.look_up() == (record(),)


@pytest.mark.parametrize("data", GARBAGE, ids=lambda data: repr(data[:12]))
async def test_garbage_does_not_stop_the_client(data: bytes) -> None:
    """The registry sends garbage first, and valid messages afterwards."""
    with closing(Server()) as server, client_of(server.endpoint) as seeker:
        seeker.client.look_up("prefill")
        name, _ = await server.receive()
        server.send(name, data)
        server.send(name, encode(Unregister(peer=record().peer)))
        server.send(name, encode(Records(instance="prefill", records=(record(),))))
        assert await seeker.next() == ("prefill", (record(),))


async def test_records_that_are_too_long_for_an_answer_are_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry must not send them: they would break the client's connection each time."""
    monkeypatch.setattr(service, "MAX_RECORDS_BYTES", 100)
    async with Registry() as registry:
        with client_of(registry.endpoint, record()), closing(Client(registry.endpoint)) as asker:
            await until(lambda: registry._directory.table.num_ranks)
            answer = await ask(asker, Lookup(instance="prefill", timeout_s=9.0, number=5))
        assert answer == Records(instance="prefill", records=(), number=5)
        assert registry._anomalies.counts["answer_too_long"] == 1


async def test_who_asks_for_too_many_records_is_answered_later_and_others_now(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = record()
    monkeypatch.setattr(rates, "ANSWER_BYTES", rates.Budget(2 * sealed().num_bytes, 0))
    async with Registry() as registry:
        with (
            client_of(registry.endpoint, mine),
            closing(Client(registry.endpoint)) as asker,
            closing(Client(registry.endpoint)) as other,
        ):
            await until(lambda: registry._directory.table.num_ranks)
            lookup = Lookup(instance="prefill", timeout_s=9.0)
            for _ in range(2):
                assert await ask(asker, lookup) == Records(instance="prefill", records=(mine,))
            asker.send(encode(lookup))
            await until(lambda: registry._anomalies.postponed.get("lookup_over_budget") == 1)
            assert await ask(other, lookup) == Records(instance="prefill", records=(mine,))
        assert not registry._anomalies.counts, "it is honest"


async def test_a_registry_that_sends_too_many_records_costs_no_time_to_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "RECORDS_BYTES", rates.Budget(0, 0))
    many = Records(instance="prefill", records=tuple(record(engine_rank=rank, num_ranks=99) for rank in range(99)))
    with closing(Server()) as server, client_of(server.endpoint) as seeker:
        seeker.client.look_up("prefill")
        name, _ = await server.receive()
        server.send(name, encode(many))
        server.send(name, encode(Records(instance="prefill", records=(record(),))))
        assert await seeker.next() == ("prefill", (record(),))
        assert seeker.client._context.anomalies.postponed == {"records_over_budget": 1}


async def test_asker_that_has_left_holds_up_nobody() -> None:
    async with Registry() as registry:
        with client_of(registry.endpoint) as seeker:
            with closing(Client(registry.endpoint)) as leaver:
                leaver.send(encode(Lookup(instance="prefill", timeout_s=60.0)))
                await until(lambda: registry._directory.table.num_waiting)
            with client_of(registry.endpoint, record()):
                assert await seeker.look_up() == (record(),)


async def test_address_in_use() -> None:
    async with Registry() as registry:
        with pytest.raises(ConfigError, match="cannot be bound"):
            async with Registry(registry.endpoint):
                pass


async def test_open_registry_cannot_be_opened_again_and_a_closed_one_can() -> None:
    registry = Registry()
    for _ in range(2):
        async with registry:
            with pytest.raises(LocalProtocolError, match="registry is already open"):
                await registry.__aenter__()
            with client_of(registry.endpoint, record()) as seeker:
                assert await seeker.look_up() == (record(),)


@pytest.mark.parametrize(
    "bind", ["ipc:///tmp/kvflow-test-registry", "inproc://kvflow-test-registry", "tcp://*:0", "tcp://0.0.0.0:0"]
)
def test_only_an_address_that_others_can_use_is_served(bind: str) -> None:
    """The advertised endpoint would be another address."""
    with pytest.raises(ConfigError):
        Registry(bind)


async def test_wildcard_is_served_under_the_name_that_is_advertised() -> None:
    async with Registry("tcp://*:0", advertise="localhost", trust=Trust.none()) as registry:
        assert registry.endpoint.startswith("tcp://localhost:")
        with client_of(registry.endpoint, record()) as seeker:
            assert await seeker.look_up() == (record(),)


async def test_a_decode_rank_says_that_its_registry_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialer, "DIAGNOSE_AFTER_S", 0.0)
    endpoint = unused()
    with printed() as lines:
        log = get_logger()
        directories = Directories(endpoint, log, reading_context(log), lambda *_: None)
        with closing(directories):
            directories.look_up("prefill", 1)
            await until(lambda: lines.named("registry_unreachable"))
            async with Registry(endpoint):
                await until(lambda: lines.named("registry_reached"))
    (unreachable,) = lines.named("registry_unreachable")
    assert unreachable["registry"] == endpoint
    assert "connection refused" in str(unreachable["detail"])


async def test_a_rank_over_the_share_of_its_principal_is_told_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "MAX_RANKS", 2)
    sent: list[bytes] = []
    anomalies = AnomalyLog(get_logger(), lambda: 0.0)
    listener: Any = SimpleNamespace(
        send=lambda _, data: sent.append(data), names_of=lambda _: ("prefill",), host_of=lambda _: ""
    )
    directory = service.DirectoryService(listener, ListenerGate(listener.names_of), lambda: 0.0, anomalies)
    directory.handle_message(b"a", SealedRegister(record=sealed(num_ranks=2), lease_s=60.0))
    second = sealed(engine_rank=1, num_ranks=2)
    with printed() as lines:
        directory.handle_message(b"b", SealedRegister(record=second, lease_s=60.0))
    refused = decode(sent[-1])
    assert isinstance(refused, Refuse)
    assert "too many ranks are registered: 1; at most 2" in refused.detail
    (line,) = lines.named("registry_full")
    assert (line["peer"], line["detail"]) == (str(second.peer), refused.detail)
    assert anomalies.counts == {}, "it may be honest"
