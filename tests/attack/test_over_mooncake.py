"""Attacks that only Mooncake permits, with correct transfers in the background."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

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

    def __init__(self, endpoint: Endpoint) -> None:
        self.theirs = PeerMetadata.unpack(endpoint.backend.metadata(), backend="mooncake")
        self.real = EndpointAddress.unpack(self.theirs.agent, agent=endpoint.name, protocol="tcp")
        self.num_accepted = 0
        self.port = 0
        self._release = anyio.Event()

    @property
    def num_silent(self) -> int:
        """Connections that were accepted and not answered."""
        return max(self.num_accepted - 1, 0)

    async def serve(self, client: anyio.abc.SocketStream) -> None:
        self.num_accepted += 1
        async with client:
            if self.num_accepted > 1:
                await self._release.wait()
                return
            host, _, port = self.real.session.rpartition(":")
            async with await anyio.connect_tcp(host, int(port)) as upstream, anyio.create_task_group() as tasks:
                tasks.start_soon(pump, upstream, client)
                await pump(client, upstream)

    def release(self) -> None:
        """Close the connections that are not answered, so that nothing waits for them any more."""
        self._release.set()

    def metadata_for(self, peer: PeerId) -> bytes:
        """Return the metadata of a rank that claims to be reached here."""
        session = f"127.0.0.1:{self.port}"
        address = structs.replace(self.real, agent=agent_name(peer), session=session)
        return structs.replace(self.theirs, agent=address.pack()).pack()


async def pump(source: anyio.abc.SocketStream, target: anyio.abc.SocketStream) -> None:
    try:
        async for data in source:
            await target.send(data)
        await target.send_eof()
    except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
        pass


@asynccontextmanager
async def tarpit() -> AsyncIterator[Tarpit]:
    async with open_backend(MooncakeBackend()) as endpoint:
        pit = Tarpit(endpoint)
        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(listener.serve, pit.serve)
            pit.port = listener.extra(anyio.abc.SocketAttribute.local_port)  # noqa: S610 - not Django's
            try:
                yield pit
            finally:
                pit.release()
                tasks.cancel_scope.cancel()


def hello_at(deployment: Guarded, pit: Tarpit, rank: int) -> Hello:
    """Return the Hello of an insider's rank whose session is the tarpit."""
    layout = make_pool().layout
    route = compile_routes({0: deployment.prefill[0].layout}, layout, decode_rank=0)[0]
    metadata = pit.metadata_for(PeerId(RankId("other", rank), 99))
    return hello_to(deployment, rank, backend_metadata=metadata, layout=layout, route=route)


async def test_an_insider_that_does_not_answer_holds_up_no_other_instance() -> None:
    """The library waits for its answer under a lock that every write through the same engine needs."""
    async with (
        guarded("other", backend="mooncake") as deployment,
        tarpit() as pit,
        under_way(deployment) as honest,
    ):
        try:
            await honest.go_on()
            with closing(insider(deployment)) as attacker:
                for rank in range(3):
                    attacker.say(hello_at(deployment, pit, rank))
                await until(lambda: pit.num_silent)
                with anyio.fail_after(PATIENCE_S):
                    await honest.go_on()
                    config = decode_config(
                        deployment.registry.endpoint, backend="mooncake", trust=deployment.keys["decode"]
                    )
                    async with kvflow.DecodeRank(config, make_pool().layout):
                        await works(deployment, 78)
                refused = await attacker.answer(Refuse, PATIENCE_S)
                assert isinstance(refused, Refuse)
                assert "does not answer" in refused.detail
                with anyio.fail_after(PATIENCE_S):
                    await honest.go_on()
        finally:
            pit.release()
