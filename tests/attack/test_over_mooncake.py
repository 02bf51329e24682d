"""Attacks that only Mooncake permits, with correct transfers in the background."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing

import anyio
import anyio.abc
import pytest
from msgspec import structs

import kvflow
from kvflow.backends.metadata import PeerMetadata
from kvflow.backends.mooncake import MooncakeBackend
from kvflow.backends.mooncake.address import EndpointAddress
from kvflow.geometry.routes import compile_routes
from kvflow.stages.context import agent_name
from kvflow.wire.messages import Hello, PeerId, RankId, Refuse
from tests.attack.guarded import Guarded, guarded, works
from tests.attack.insiders import hello_to, insider, under_way
from tests.backends.endpoints import Endpoint, open_backend
from tests.support.instances import decode_config, make_pool
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

PATIENCE_S = 20.0
"""More than some transfers need, and less than the minute for which the library waits for a peer."""


class Tarpit:
    """A listener that forwards its first connection to a Mooncake endpoint, and never answers the others."""

    def __init__(self, endpoint: Endpoint, listener: anyio.abc.Listener[anyio.abc.SocketStream]) -> None:
        self.listener = listener
        self.num_silent = 0
        self._theirs = PeerMetadata.unpack(endpoint.backend.metadata(), backend="mooncake")
        self._real = EndpointAddress.unpack(self._theirs.agent, agent=endpoint.name, protocol="tcp")
        self._has_answered = False

    async def serve(self, client: anyio.abc.SocketStream) -> None:
        async with client:
            if self._has_answered:
                self.num_silent += 1
                await anyio.sleep_forever()
            self._has_answered = True
            host, _, port = self._real.session.rpartition(":")
            async with await anyio.connect_tcp(host, int(port)) as upstream, anyio.create_task_group() as tasks:
                tasks.start_soon(pump, upstream, client)
                await pump(client, upstream)

    def metadata_for(self, peer: PeerId) -> bytes:
        """Return the metadata of a rank that claims to be reached here."""
        port = self.listener.extra(anyio.abc.SocketAttribute.local_port)  # noqa: S610 - not Django's
        address = structs.replace(self._real, agent=agent_name(peer), session=f"127.0.0.1:{port}")
        return structs.replace(self._theirs, agent=address.pack()).pack()


async def pump(source: anyio.abc.SocketStream, target: anyio.abc.SocketStream) -> None:
    try:
        async for data in source:
            await target.send(data)
        await target.send_eof()
    except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
        pass


@asynccontextmanager
async def tarpits(count: int) -> AsyncIterator[list[Tarpit]]:
    """Open tarpits in front of one endpoint. At the end, close their connections, so that nothing waits for them."""
    async with open_backend(MooncakeBackend()) as endpoint, AsyncExitStack() as stack:
        pits = []
        for _ in range(count):
            listener = await stack.enter_async_context(await anyio.create_tcp_listener(local_host="127.0.0.1"))
            pits.append(Tarpit(endpoint, listener))
        async with anyio.create_task_group() as tasks:
            for pit in pits:
                tasks.start_soon(pit.listener.serve, pit.serve)
            try:
                yield pits
            finally:
                tasks.cancel_scope.cancel()


def hello_at(deployment: Guarded, pit: Tarpit, rank: int) -> Hello:
    """Return the Hello of an insider's rank whose session is a tarpit."""
    layout = make_pool().layout
    route = compile_routes({0: deployment.prefill[0].layout}, layout, decode_rank=0)[0]
    metadata = pit.metadata_for(PeerId(RankId("other", rank), 99))
    return hello_to(deployment, rank, backend_metadata=metadata, layout=layout, route=route)


@pytest.mark.slow
async def test_an_insider_that_does_not_answer_holds_up_no_other_instance() -> None:
    """The library waits for its answer under a lock that every write through the same engine needs."""
    async with guarded("other", backend="mooncake") as deployment, under_way(deployment) as honest, tarpits(3) as pits:
        await honest.go_on()
        with ExitStack() as stack:
            attackers = [stack.enter_context(closing(insider(deployment))) for _ in pits]
            for rank, (attacker, pit) in enumerate(zip(attackers, pits, strict=True)):
                attacker.say(hello_at(deployment, pit, rank))
            await until(lambda: sum(pit.num_silent for pit in pits))
            with anyio.fail_after(PATIENCE_S):
                await honest.go_on()
                config = decode_config(
                    deployment.registry.endpoint, backend="mooncake", trust=deployment.keys["decode"]
                )
                async with kvflow.DecodeRank(config, make_pool().layout):
                    await works(deployment, 78)
                for attacker in attackers:
                    refused = await attacker.answer(Refuse, PATIENCE_S)
                    assert isinstance(refused, Refuse)
                    assert "does not answer" in refused.detail
                await honest.go_on()
