"""Released routers in front of a fleet under load: servers join, drain and leave, are killed and replaced."""

import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import anyio
import pytest

from tests.engines.vllm.routers import empty_smg, vllm_router, vllm_router_of_announced, workers_of
from tests.fleet.routed import RoutedFleet, open_routed
from tests.support.ports import unused_port

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]

AT_ONCE: Final = 4
NAMES: Final = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
JOINING: Final = ["prefill-2", "decode-2"]
LEAVING: Final = ["prefill-0", "decode-0"]
REPLACED: Final = ["prefill-1", "decode-1"]


@pytest.fixture
def place() -> Iterator[Path]:
    """Return a directory for sockets, whose paths have 107 bytes at most."""
    path = Path(tempfile.mkdtemp(prefix="kv-"))
    yield path
    shutil.rmtree(path)


@asynccontextmanager
async def loaded(fleet: RoutedFleet, router: str) -> AsyncIterator[None]:
    """Keep asking a router in the block, and check the answers; then wait until no pages are held."""
    fleet.router = router
    over = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fleet.load, AT_ONCE, over)
        try:
            await fleet.until_used(*NAMES)
            yield
        finally:
            over.set()
    await fleet.until_free()
    sys.stdout.write(f"{fleet.answered} answers, refused before: {dict(fleet.refusals)}\n")


async def replace(fleet: RoutedFleet, *names: str) -> None:
    """Kill servers under load, one at a time, and start each again at its address."""
    for name in names:
        fleet.kill(name)
        await fleet.start(name)
        await fleet.until_used(name)


async def test_smg(place: Path) -> None:
    """Servers join and leave at `/workers`, and it asks each for its health."""
    async with empty_smg(place) as router, open_routed(place, NAMES) as fleet, aiohttp.ClientSession() as client:

        async def add(name: str) -> None:
            own: dict[str, Any] = {"url": fleet.url_of(name), "worker_type": name.partition("-")[0]}
            if own["worker_type"] == "prefill":
                own |= {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
            async with client.post(f"{router}/workers", json=own) as answer:
                assert answer.status == 202, await answer.text()

        for name in NAMES:
            await add(name)
        async with loaded(fleet, router):
            for name in JOINING:
                await fleet.start(name)
                await add(name)
            await fleet.until_used(*JOINING)
            before = fleet.refusals.copy()
            for name in LEAVING:
                await fleet.drain(name)
                own = (await workers_of(client, router))[fleet.url_of(name)]
                async with client.delete(f"{router}/workers/{own['id']}") as answer:
                    assert answer.status < 300, await answer.text()
                await fleet.stop(name)
            assert fleet.refusals == before, "a server that leaves with notice costs no request"
            await replace(fleet, *REPLACED)


async def test_vllm_router(place: Path) -> None:
    """Its list of servers is fixed, so that those that left come back. It asks each for its health."""
    async with open_routed(place, NAMES) as fleet:
        prefills, decodes = ([fleet.url_of(name) for name in NAMES if name.startswith(role)] for role in ("pre", "de"))
        async with vllm_router(prefills, decodes, place) as router, loaded(fleet, router):
            before = fleet.refusals.copy()
            for name in LEAVING:
                await fleet.drain(name)
                await fleet.stop(name)
                await fleet.start(name)
                await fleet.until_used(name)
            assert fleet.refusals == before, "a server that leaves with notice costs no request"
            await replace(fleet, *REPLACED)


async def test_vllm_router_with_announced_servers(place: Path) -> None:
    """Servers announce themselves while they are ready, and it asks none for its health."""
    address = f"127.0.0.1:{unused_port()}"
    async with (
        open_routed(place, NAMES, announce=address) as fleet,
        vllm_router_of_announced(address, place) as router,  # healthy once it has heard of servers
        loaded(fleet, router),
    ):
        await fleet.start(*JOINING)
        await fleet.until_used(*JOINING)
        before = fleet.refusals.copy()
        for name in LEAVING:
            await fleet.drain(name)
            await fleet.stop(name)
        assert fleet.refusals == before, "a server that leaves with notice costs no request"
        await replace(fleet, *REPLACED)
