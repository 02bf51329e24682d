"""Released routers from PyPI, in front of servers with kvflow's connector."""

import itertools
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import anyio
import pytest

from benchmarks.vllm_handover.client import MODEL, ask, metrics, prompt_of
from kvflow.cli.proxy.application import PREFILL_PARAMS
from kvflow.cli.serve.server import Server
from kvflow.cli.serve.vllm import CPU_ARGUMENTS, KVFLOW, Role, VllmServer, halves_of_cpus, vllm_server
from kvflow.cli.smollm2 import prepare_smollm2
from tests.engines.vllm.deployment import QUIET, Deployment
from tests.engines.vllm.routers import smg, vllm_router, workers_of
from tests.support.ports import unused_port

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(params=["nixl", "mooncake"])
async def static(pair: Deployment, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """Run vLLM's router, in both dialects."""
    port = pair.mooncake_port if request.param == "mooncake" else None
    async with vllm_router([pair.prefill.url], [pair.decode.url], tmp_path, mooncake_port=port) as url:
        yield url


@pytest.fixture
async def with_a_dead_decode(pair: Deployment, tmp_path: Path) -> AsyncIterator[str]:
    """Run SGLang's router with two decode servers, one of which does not exist."""
    dead = f"http://127.0.0.1:{unused_port()}"
    async with smg({pair.prefill.url: "prefill", pair.decode.url: "decode", dead: "decode"}, tmp_path) as url:
        yield url


async def test_vllm_router(pair: Deployment, client: aiohttp.ClientSession, static: str) -> None:
    for number in range(6):
        await pair.hands_over(client, static, prompt_of(200 + number, 10 + 60 * number))
    await pair.until_free(client)


async def test_smg_drains_a_worker(pair: Deployment, client: aiohttp.ClientSession, tmp_path: Path) -> None:
    """The two workers are one decode server under two names; requests continue meanwhile, and no resources leak."""
    other = pair.decode.url.replace("127.0.0.1", "localhost")
    servers = {pair.prefill.url: "prefill", pair.decode.url: "decode", other: "decode"}
    async with smg(servers, tmp_path) as url:
        drained = (await workers_of(client, url))[other]["id"]
        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(pair.hands_over, client, url, prompt_of(220 + number, 10 + 60 * number))
            await anyio.sleep(0.2)
            async with client.delete(f"{url}/workers/{drained}") as answer:
                assert answer.status < 300, await answer.text()
        await pair.hands_over(client, url, prompt_of(230, 100))
    await pair.until_free(client)


async def test_smg_with_a_dead_decode(pair: Deployment, client: aiohttp.ClientSession, with_a_dead_decode: str) -> None:
    """The router retries the whole pair, so prefill receives the request again."""
    for number in range(6):
        await pair.hands_over(client, with_a_dead_decode, prompt_of(210 + number, 10 + 60 * number))
    await pair.until_free(client)


LEAVING: Final = "prefill-that-leaves"
LIMITED: Final = "prefill-with-few-rooms"
MOST_ROOMS: Final = 4
KEPT_S: Final = 60.0
"""How long prefill keeps what nobody fetches: longer than it takes both routers to leave it out."""


def start_server(name: str, role: Role, place: Path, *arguments: str, **connector: Any) -> Server:
    """Start a server with the CPUs of the first one."""
    server = vllm_server(
        VllmServer(
            name=name,
            model=str(prepare_smollm2()),
            served_name=MODEL,
            port=unused_port(),
            role=role,
            connector={**KVFLOW, "engine_id": name, **connector},
            cpus=halves_of_cpus()[0],
            arguments=(*CPU_ARGUMENTS, *arguments),
            environment=QUIET,
        ),
        place,
    )
    server.start()
    return server


class Behind:
    """Two routers, each with two prefill servers and a decode server that computes what does not arrive.

    Attributes:
        own: The prefill server of this test. It tells routers of its rank.
        routers: URLs of vLLM's router and of SGLang's.
    """

    def __init__(self, pair: Deployment, client: aiohttp.ClientSession, own: Server, decode: Server) -> None:
        self._pair, self._client, self.own, self._decode = pair, client, own, decode
        self._numbers = itertools.count(240)
        self.routers: list[str] = []

    @asynccontextmanager
    async def running(self, place: Path) -> AsyncIterator[None]:
        """Run the routers, and use all servers."""
        prefills = [self._pair.prefill.url, self.own.url]
        servers = {**dict.fromkeys(prefills, "prefill"), self._decode.url: "decode"}
        async with vllm_router(prefills, [self._decode.url], place) as static, smg(servers, place) as other:
            self.routers = [static, other]
            for _ in range(4):
                await self.ask_both()
            assert await self.num_answered() >= 4
            yield

    async def ask(self, router: str) -> None:
        """Check an answer."""
        prompt = prompt_of(next(self._numbers), 40)
        answer = await ask(self._client, router, prompt, 4)
        assert answer.status == 200, f"{answer.error}\n{self._decode.tail()}\n{self.own.tail()}"
        assert answer.text == await self._pair.text(self._client, prompt, 4)

    async def ask_both(self) -> None:
        """Check an answer of each router."""
        for router in self.routers:
            await self.ask(router)

    async def until_left_out(self) -> None:
        """Go on asking until both routers have left out this test's server, and check that none asks it then."""
        while any([await self._is_used(router) for router in self.routers]):
            await self.ask_both()
        before = await self.num_answered()
        for _ in range(6):
            await self.ask_both()
        assert await self.num_answered() == before

    async def until_used(self) -> None:
        """Go on asking until both routers use it again."""
        for router in self.routers:
            before = await self.num_answered()
            while await self.num_answered() == before:
                await self.ask(router)

    async def _is_used(self, router: str) -> bool:
        return bool((await workers_of(self._client, router))[self.own.url]["is_healthy"])

    async def num_answered(self) -> float:
        return (await metrics(self._client, self.own.url)).get("request_success_total", 0.0)

    async def health(self, path: str = "/health") -> tuple[int, list[str]]:
        """Return what this test's server answers, and what it says of its rank."""
        async with self._client.get(f"{self.own.url}{path}") as heard:
            return heard.status, [] if heard.status == 200 else list((await heard.json())["ranks"].values())


@pytest.fixture
async def behind(
    pair: Deployment, client: aiohttp.ClientSession, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Behind]:
    """Start a prefill server of the name that the test gives, and a decode server."""
    extra = {"limits": {"transfers": MOST_ROOMS}, "timeouts": {"grant_s": KEPT_S}} if request.param == LIMITED else {}
    middleware = ("--middleware", "kvflow.engines.vllm.health.RanksHealth")
    own = start_server(request.param, "kv_producer", tmp_path, *middleware, kv_connector_extra_config=extra)
    decode = start_server("decode-that-stays", "kv_consumer", tmp_path, kv_load_failure_policy="recompute")
    try:
        await own.wait_until_ready()
        await decode.wait_until_ready()
        behind = Behind(pair, client, own, decode)
        async with behind.running(tmp_path):
            yield behind
        await pair.until_free(client)
    finally:
        own.stop()
        decode.stop()


@pytest.mark.parametrize("behind", [LEAVING], indirect=True)
async def test_routers_leave_out_a_server_whose_rank_drains(behind: Behind) -> None:
    """`kvflow drain` tells only the rank. No request fails before the routers know, and none goes there afterwards."""
    await anyio.run_process([sys.executable, "-m", "kvflow.cli", "drain", "--instance", LEAVING])
    while await behind.health() == (200, []):  # answers are kept for a second
        await behind.ask_both()
    assert await behind.health() == (503, ["the rank is draining"])
    await behind.until_left_out()


@pytest.mark.parametrize("behind", [LIMITED], indirect=True)
async def test_routers_leave_out_a_server_while_it_has_too_many_rooms(
    behind: Behind, client: aiohttp.ClientSession
) -> None:
    """Nobody fetches them, so that prefill gives them up after a while. Then the routers use it again."""
    for number in range(MOST_ROOMS):
        first = await ask(client, behind.own.url, prompt_of(1_000 + number, 40), 1, PREFILL_PARAMS)
        assert first.params is not None
    while await behind.health() == (200, []):
        await behind.ask_both()
    full = (503, [f"{MOST_ROOMS} rooms are open: limits.transfers is {MOST_ROOMS}"])
    assert await behind.health() == full
    await behind.until_left_out()
    assert await behind.health() == full
    assert await behind.health("/livez") == (200, [])
    while await behind.health() == full:  # noqa: ASYNC110 - it depends on another process
        await anyio.sleep(0.5)
    await behind.until_used()
    assert await behind.health() == (200, [])
