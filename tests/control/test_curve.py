"""Control sockets with keys: accepted and refused peers, and key changes while the sockets are open."""

from contextlib import closing
from dataclasses import replace

import anyio
import pytest

from kvflow.control import dialer
from kvflow.errors import ConfigError, Unreachable
from kvflow.trust import PRINCIPAL_DIGITS, ClientKeys, Trust, TrustedKey
from tests.control.ends import LOCAL, Client, Server, meet
from tests.support.trusts import new_trust, trusting
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


class Ends:
    """Keys of a listener and of a client that trust each other."""

    def __init__(self) -> None:
        server, client = new_trust(), new_trust()
        self.server = trusting(server, client=client)
        self.client = trusting(client, server=server)

    @property
    def keys(self) -> ClientKeys:
        return ClientKeys(self.client, (self.server.public,))


async def be_refused(server: Server, client: Client) -> None:
    """Say hello for the first time, and wait until the connection has been refused."""
    client.send(b"hello")
    await until(lambda: client.refused)
    assert not server.received


async def test_listed_key_gets_in_and_its_names_are_told() -> None:
    ends = Ends()
    with closing(Server(trust=ends.server)) as server, closing(Client(server.endpoint, ends.keys)) as client:
        name = await meet(server, client)
        assert server.listener.names_of(name) == ("client",)
        assert (server.refused, client.refused) == ([], [])


async def test_key_that_is_not_listed_is_refused_and_says_which() -> None:
    ends = Ends()
    stranger = ClientKeys(new_trust(), (ends.server.public,))
    with closing(Server(trust=ends.server)) as server, closing(Client(server.endpoint, stranger)) as client:
        await be_refused(server, client)
        assert client.refused[0] == f"key {stranger.trust.public[:12]} of this process is not listed in `peers` there"
        await until(lambda: f"key {stranger.trust.public[:12]} is not listed" in server.refused)


async def test_refused_key_gets_in_once_it_is_listed() -> None:
    ends = Ends()
    with (
        closing(Server(trust=replace(ends.server, peers=()))) as server,
        closing(Client(server.endpoint, ends.keys)) as client,
    ):
        await be_refused(server, client)
        server.listener.renew(ends.server)
        assert (await server.receive())[1] == [b"hello"]


async def test_listener_with_another_key_is_not_talked_to() -> None:
    ends = Ends()
    wrong = ClientKeys(ends.client, (new_trust().public,))
    with closing(Server(trust=ends.server)) as server, closing(Client(server.endpoint, wrong)) as client:
        await be_refused(server, client)
        assert client.refused[0].startswith("its key is not one of")
        await until(lambda: server.refused)


async def test_several_keys_are_tried_in_turn_and_nothing_is_lost() -> None:
    ends = Ends()
    keys = ClientKeys(ends.client, (new_trust().public, new_trust().public, ends.server.public))
    with closing(Server(trust=ends.server)) as server, closing(Client(server.endpoint, keys)) as client:
        await meet(server, client)
        assert client.refused == []


async def test_plain_client_is_not_heard() -> None:
    with closing(Server(trust=Ends().server)) as server, closing(Client(server.endpoint)) as client:
        await be_refused(server, client)
        assert client.refused[0] == "it requires a key, and this process has none"
        await until(lambda: server.refused)


async def test_client_with_keys_tells_a_plain_listener_nothing() -> None:
    with closing(Server()) as server, closing(Client(server.endpoint, Ends().keys)) as client:
        await be_refused(server, client)


async def test_nobody_to_answer_is_listed() -> None:
    ends = Ends()
    with (
        closing(Server(trust=ends.server)) as server,
        closing(Client(server.endpoint, ClientKeys(ends.client, ()))) as client,
    ):
        await be_refused(server, client)
        assert client.refused[0] == "no key is listed for it here"
        client.connection.renew(ends.keys)
        assert (await server.receive())[1] == [b"hello"]


async def test_listener_without_its_handler_lets_nobody_in() -> None:
    ends = Ends()
    with closing(Server(trust=ends.server)) as server:
        assert server.listener._authenticator is not None
        server.listener._authenticator.close()
        with closing(Client(server.endpoint, ends.keys)) as client:
            client.send(b"hello")
            with anyio.move_on_after(1.0):  # libzmq reports nothing
                await server.receive()
            assert not server.received


async def test_key_that_is_listed_no_more_is_disconnected_and_others_are_heard_again() -> None:
    ends, other = Ends(), new_trust()
    trust = trusting(ends.server, client=ends.client, other=other)
    with (
        closing(Server(trust=trust)) as server,
        closing(Client(server.endpoint, ends.keys)) as client,
        closing(Client(server.endpoint, replace(ends.keys, trust=other))) as kept,
    ):
        await meet(server, client)
        name = await meet(server, kept)
        server.listener.renew(trusting(ends.server, other=other))
        await until(lambda: client.num_lost and kept.num_lost)
        await be_refused(server, client)
        await until(lambda: f"key {ends.client.public[:12]} is not listed" in server.refused)
        assert await meet(server, kept) == name


async def test_longer_list_breaks_nothing() -> None:
    ends = Ends()
    with closing(Server(trust=ends.server)) as server, closing(Client(server.endpoint, ends.keys)) as client:
        await meet(server, client)
        server.listener.renew(trusting(ends.server, client=ends.client, other=new_trust()))
        await meet(server, client)
        assert client.num_lost == 0


async def test_listener_changes_its_own_key() -> None:
    ends, other = Ends(), new_trust()
    both = ClientKeys(ends.client, (ends.server.public, other.public))
    with closing(Server(trust=ends.server)) as server, closing(Client(server.endpoint, both)) as client:
        name = await meet(server, client)
        server.listener.renew(replace(ends.server, public=other.public, secret=other.secret))
        await until(lambda: client.num_lost)
        assert await meet(server, client) == name
        with closing(Client(server.endpoint, ClientKeys(ends.client, (other.public,)))) as newcomer:
            await meet(server, newcomer)


async def test_client_changes_its_own_key() -> None:
    ends, other = Ends(), new_trust()
    peers = (TrustedKey(ends.client.public, "client"), TrustedKey(other.public, "client"))
    with (
        closing(Server(trust=replace(ends.server, peers=peers))) as server,
        closing(Client(server.endpoint, ends.keys)) as client,
    ):
        name = await meet(server, client)
        client.connection.renew(replace(ends.keys, trust=other))
        assert await meet(server, client) == name, "it is who it was"
        assert client.num_lost == 1


async def test_name_that_another_key_gives_itself_is_another_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    ends, insider = Ends(), new_trust()
    trust = trusting(ends.server, client=ends.client, insider=insider)
    with closing(Server(trust=trust)) as server, closing(Client(server.endpoint, ends.keys)) as client:
        name = await meet(server, client)
        monkeypatch.setattr(dialer, "new_name", lambda: name[PRINCIPAL_DIGITS:])
        with closing(Client(server.endpoint, ClientKeys(insider, (ends.server.public,)))) as thief:
            thief.send(b"in another's name")
            taken, _ = await server.receive()
            assert taken[PRINCIPAL_DIGITS:] == name[PRINCIPAL_DIGITS:]
            assert server.listener.names_of(taken) == ("insider",)
            assert taken != name
            server.send(name, b"for its owner")
            assert await client.receive() == [b"for its owner"]
            assert thief.received == []


async def test_lists_that_change_while_a_name_is_looked_up() -> None:
    """Its addresses may arrive when no key is left to connect with."""
    ends = Ends()
    with closing(Server(trust=ends.server)) as server:
        endpoint = server.endpoint.replace("127.0.0.1", "localhost")
        with closing(Client(endpoint, ends.keys)) as client:
            client.connection.renew(replace(ends.keys, servers=()))
            await until(lambda: client.refused)
            assert client.refused[0] == "no key is listed for it here"
            client.connection.renew(ends.keys)
            client.connection.renew(replace(ends.keys, servers=()))
            client.connection.renew(ends.keys)
            await meet(server, client)
            assert set(client.refused) == {"no key is listed for it here"}


async def test_contexts_are_used_again() -> None:
    ends = Ends()
    with closing(Server(trust=ends.server)) as first:
        assert first.listener._authenticator is not None
        context = first.listener._authenticator.context
    with closing(Server(trust=ends.server)) as second, closing(Client(second.endpoint, ends.keys)) as client:
        assert second.listener._authenticator is not None
        assert second.listener._authenticator.context is context
        await meet(second, client)


async def test_misuse() -> None:
    ends = Ends()
    with closing(Server(trust=ends.server)) as server, closing(Server()) as plain:
        for listener, trust in ((server.listener, Trust.none()), (plain.listener, ends.server)):
            with pytest.raises(ConfigError, match="listener cannot switch between plain transport"):
                listener.renew(trust)
        plain.listener.renew(Trust.none())
        with pytest.raises(Unreachable):
            server.send(b"nobody", b"")
    server.listener.renew(ends.server)
    with closing(Server(LOCAL)) as server, closing(Client(server.endpoint)) as client:
        client.connection.renew(ends.keys)  # this connection was created without keys
        await meet(server, client)
    client.connection.renew(ends.keys)
