"""An untrusted registry: an address that it reports does not prove that a process has ended."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import anyio
import pytest
from msgspec import structs

import kvflow
from kvflow.state.effects import DecodeEffect
from kvflow.state.events import InstanceFound
from kvflow.wire.messages import PeerId
from tests.attack.guarded import guarded, outcome, works
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def relay(endpoint: str) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """Relay bytes to an endpoint and back until closed; after that its port refuses connections."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    writers: list[asyncio.StreamWriter] = []

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await source.read(65_536):
                target.write(chunk)
                await target.drain()
        target.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        above, below = await asyncio.open_connection(host, int(port))
        writers.extend((writer, below))
        await asyncio.gather(copy(reader, below), copy(above, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)

    def close() -> None:
        server.close()
        for writer in writers:
            writer.transport.abort()

    try:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", close
    finally:
        close()
        await server.wait_closed()


async def test_a_relay_that_closes_does_not_prove_that_prefill_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async with guarded() as deployment, relay(deployment.prefill[0].endpoint) as (address, close):
        prefill, decode = deployment.prefill[0], deployment.decode[0]
        found = decode._core.instances.found

        def lie(event: InstanceFound, now: float) -> list[DecodeEffect]:
            records = tuple(structs.replace(record, endpoint=address) for record in event.records)
            return found(structs.replace(event, records=records), now)

        monkeypatch.setattr(decode._core.instances, "found", lie)
        await works(deployment)
        request = deployment.request(2, 12)
        deployment.faults[0].hold()
        receiver = request.receiver()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(outcome, request.send)

            async def receive() -> None:
                async with receiver:
                    await receiver.done()

            tasks.start_soon(outcome, receive)
            await until(lambda: prefill.statistics().posted)
            probes: list[bool] = []
            finished = decode._core.peers.probe_finished

            def note(peer: PeerId, now: float, *, is_gone: bool) -> list[DecodeEffect]:
                probes.append(is_gone)
                return finished(peer, now, is_gone=is_gone)

            monkeypatch.setattr(decode._core.peers, "probe_finished", note)
            close()
            await until(lambda: len(probes) > 1)
            assert not any(probes)
            await until(lambda: receiver.memory is kvflow.Memory.QUARANTINED)
            deployment.faults[0].release()
            await until(lambda: receiver.memory is kvflow.Memory.SAFE)  # its notice came after the last byte
            tasks.cancel_scope.cancel()
