"""Registry and client over real sockets."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress

import anyio
import anyio.lowlevel
import pytest

from kvflow.errors import ConfigError, Unreachable
from kvflow.observe.logs import get_logger
from kvflow.registry import Registry, RegistryClient, client
from kvflow.wire.channel import Dialer, Listener
from kvflow.wire.codec import decode_frames, encode
from kvflow.wire.messages import Card, Cards, Lookup, Message, Ping, Register, Registered, Unregister
from tests.observe.lines import printed
from tests.registry.cards import card
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

APART = "tcp://127.7.7.7:0"
"""An address of this host that no other connection comes from, so that a port stays free between two registries."""


@asynccontextmanager
async def client_of(endpoint: str, *registered: Card) -> AsyncIterator[RegistryClient]:
    """A client that runs, and keeps some ranks registered."""
    with closing(RegistryClient(endpoint, get_logger())) as opened:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(opened.run)
            for mine in registered:
                tasks.start_soon(opened.keep_registered, mine)
            yield opened
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def open_again(endpoint: str) -> AsyncIterator[Registry]:
    """A registry where one was; its socket is given back in the background."""
    async with AsyncExitStack() as stack:
        opened: Registry | None = None
        while opened is None:
            with suppress(ConfigError):
                opened = await stack.enter_async_context(Registry(endpoint))
            await anyio.lowlevel.checkpoint()
        yield opened


async def ask(dialer: Dialer, message: Message) -> Message:
    dialer.send(encode(message))
    return decode_frames(await dialer.receive())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rounds and leases, so that what is repeated is repeated soon."""
    monkeypatch.setattr(client, "ROUND_S", 0.05)
    monkeypatch.setattr(client, "LEASE_S", 0.3)


async def test_ranks_are_found_in_order() -> None:
    cards = [card(engine_rank=rank, num_ranks=3) for rank in (2, 0, 1)]
    async with Registry() as registry, client_of(registry.endpoint, *cards), client_of(registry.endpoint) as seeker:
        found = await seeker.lookup("prefill", 30.0)
        assert [held.peer.rank.engine_rank for held in found] == [0, 1, 2]
        assert set(found) == set(cards)


async def test_lookup_before_anybody_is_registered() -> None:
    found: list[Card] = []

    async def look_up(seeker: RegistryClient) -> None:
        found.extend(await seeker.lookup("prefill", 30.0))

    async with Registry() as registry, client_of(registry.endpoint) as seeker, anyio.create_task_group() as tasks:
        tasks.start_soon(look_up, seeker)
        await anyio.wait_all_tasks_blocked()
        assert not found
        async with client_of(registry.endpoint, card()):
            await until(lambda: found)


async def test_lookup_before_there_is_a_registry(quick: None) -> None:
    async with Registry(APART) as gone:
        pass
    async with client_of(gone.endpoint, card()) as seeker, anyio.create_task_group() as tasks:
        found: list[Card] = []

        async def look_up() -> None:
            found.extend(await seeker.lookup("prefill", 30.0))

        tasks.start_soon(look_up)
        await anyio.wait_all_tasks_blocked()
        async with open_again(gone.endpoint):
            await until(lambda: found)


async def test_ranks_come_back_to_a_restarted_registry(quick: None) -> None:
    cards = [card(engine_rank=rank, num_ranks=2) for rank in range(2)]
    async with AsyncExitStack() as stack:
        async with Registry(APART) as first:
            seeker = await stack.enter_async_context(client_of(first.endpoint, *cards))
            assert len(await seeker.lookup("prefill", 30.0)) == 2
        async with open_again(first.endpoint):
            assert len(await seeker.lookup("prefill", 30.0)) == 2


async def test_silent_registry_is_logged_and_so_is_its_return(quick: None) -> None:
    async with Registry(APART) as gone:
        pass
    with printed() as lines:
        async with client_of(gone.endpoint, card()):
            await until(lambda: "registry_silent" in lines.getvalue())
            async with open_again(gone.endpoint):
                await until(lambda: '"registered"' in lines.getvalue())
    first = lines.named("registry_silent")[0]
    assert first.items() >= {"level": "warning", "registry": gone.endpoint, "was_registered": False}.items()


async def test_incomplete_instance_names_what_is_registered_and_needed() -> None:
    cards = [card(engine_rank=rank, num_ranks=4) for rank in (0, 2)]
    async with Registry() as registry, client_of(registry.endpoint, *cards) as seeker:
        await until(lambda: registry._table.num_ranks == 2)
        with pytest.raises(Unreachable, match="not all of its ranks") as caught:
            await seeker.lookup("prefill", 0.2)
        assert caught.value.values == {
            "registry": registry.endpoint,
            "instance": "prefill",
            "registered": [0, 2],
            "needed": 4,
            "timeout_s": 0.2,
        }


async def test_unknown_instance() -> None:
    async with Registry() as registry, client_of(registry.endpoint) as seeker:
        with pytest.raises(Unreachable, match="not registered") as caught:
            await seeker.lookup("prefil", 0.2)
        assert caught.value.values.items() >= {"instance": "prefil", "registered": [], "needed": "unknown"}.items()


async def test_registry_that_says_nothing() -> None:
    with closing(Listener("tcp://127.0.0.1:0")) as silent:
        async with client_of(silent.endpoint) as seeker:
            with pytest.raises(Unreachable, match="registry did not answer") as caught:
                await seeker.lookup("prefill", 0.1)
        assert caught.value.values == {"registry": silent.endpoint, "timeout_s": 0.1}


async def test_two_lookups_of_one_instance_at_once() -> None:
    found: list[tuple[Card, ...]] = []

    async def look_up(seeker: RegistryClient) -> None:
        found.append(await seeker.lookup("prefill", 5.0))

    async with Registry() as registry, client_of(registry.endpoint) as seeker, anyio.create_task_group() as tasks:
        tasks.start_soon(look_up, seeker)
        tasks.start_soon(look_up, seeker)
        await anyio.wait_all_tasks_blocked()
        async with client_of(registry.endpoint, card()):
            await until(lambda: len(found) == 2)
    assert found == [(card(),), (card(),)]


async def test_cancelled_lookup_leaves_nothing_for_the_next() -> None:
    """An answer to a lookup that was given up must not be taken for the answer to a later one."""
    with closing(Listener("tcp://127.0.0.1:0")) as registry:
        async with client_of(registry.endpoint) as seeker:
            with anyio.move_on_after(0.05):
                await seeker.lookup("prefill", 30.0)
            name, _ = await registry.receive()
            registry.send(name, encode(Cards(instance="prefill", cards=(card(life=1),))))
            registry.send(name, encode(Registered(peer=card().peer)))
            await until(lambda: seeker._is_registered)
            with pytest.raises(Unreachable, match="registry did not answer"):
                await seeker.lookup("prefill", 0.1)


async def test_rank_that_leaves_is_forgotten_at_once() -> None:
    async with Registry() as registry, client_of(registry.endpoint, card()) as mine:
        await mine.lookup("prefill", 30.0)
        mine.unregister(card(life=99).peer)
        mine.unregister(card().peer)
        await until(lambda: registry._table.num_ranks == 0)


async def test_rank_that_falls_silent_is_forgotten(quick: None) -> None:
    async with Registry() as registry:
        async with client_of(registry.endpoint, card()) as mine:
            await mine.lookup("prefill", 30.0)
        await until(lambda: registry._table.num_ranks == 0)


GARBAGE = [
    b"",
    b"GET / HTTP/1.1",
    b"KVF\x02",
    b"KVF\x01" + b"\x91" * 2_000,
    b"KVF\x01\x81\xa4type\xa2\xff\xfe",
    encode(Ping(peer=card().peer)),
    encode(Registered(peer=card().peer)),
    encode(Register(card=card(), lease_s=9.0))[:-1],
    encode(Lookup(instance="prefill", timeout_s=1.0)) + b"\0",
]


@pytest.mark.parametrize("data", GARBAGE, ids=lambda data: repr(data[:12]))
async def test_garbage_does_not_stop_the_registry(data: bytes) -> None:
    async with Registry() as registry, client_of(registry.endpoint, card()) as seeker:
        with closing(Dialer(registry.endpoint)) as rogue, printed() as lines:
            rogue.send(data)
            await until(lines.getvalue)
            assert "message_rejected" in lines.getvalue()
            answer = await ask(rogue, Lookup(instance="prefill", timeout_s=30.0))
        assert isinstance(answer, Cards)
        assert await seeker.lookup("prefill", 30.0) == answer.cards


@pytest.mark.parametrize("data", GARBAGE, ids=lambda data: repr(data[:12]))
async def test_garbage_does_not_stop_the_client(data: bytes, quick: None) -> None:
    """A registry that speaks garbage first and sense afterwards."""
    with closing(Listener("tcp://127.0.0.1:0")) as registry:
        async with client_of(registry.endpoint) as seeker, anyio.create_task_group() as tasks:

            async def answer() -> None:
                name, _ = await registry.receive()
                registry.send(name, data)
                registry.send(name, encode(Unregister(peer=card().peer)))
                registry.send(name, encode(Cards(instance="not asked for", cards=())))
                registry.send(name, encode(Cards(instance="prefill", cards=(card(),))))

            tasks.start_soon(answer)
            assert await seeker.lookup("prefill", 30.0) == (card(),)
            tasks.cancel_scope.cancel()


async def test_asker_that_has_left_holds_up_nobody() -> None:
    async with Registry() as registry, client_of(registry.endpoint) as seeker:
        with closing(Dialer(registry.endpoint)) as leaver:
            leaver.send(encode(Lookup(instance="prefill", timeout_s=30.0)))
            await until(lambda: registry._table._waiting)
        async with client_of(registry.endpoint, card()):
            assert await seeker.lookup("prefill", 30.0) == (card(),)


async def test_address_in_use() -> None:
    async with Registry() as registry:
        with pytest.raises(ConfigError, match="cannot be bound"):
            async with Registry(registry.endpoint):
                pass


@pytest.mark.parametrize("bind", ["ipc:///tmp/kvflow-test-registry", "inproc://kvflow-test-registry"])
async def test_only_tcp_can_be_served(bind: str) -> None:
    """The endpoint that is given to others would be another address."""
    with pytest.raises(ConfigError):
        async with Registry(bind):
            pass
