"""Released routers from PyPI, in front of servers with kvflow's connector."""

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import anyio
import pytest

from benchmarks.vllm_handover.client import prompt_of
from tests.engines.vllm.deployment import Deployment
from tests.engines.vllm.routers import smg, vllm_router
from tests.support.ports import unused_port

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(params=["nixl", "mooncake"])
async def static(pair: Deployment, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """Run vLLM's router, in both dialects."""
    port = pair.mooncake_port if request.param == "mooncake" else None
    async with vllm_router(pair.prefill.url, pair.decode.url, tmp_path, mooncake_port=port) as url:
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
        async with client.get(f"{url}/workers") as answer:
            workers = (await answer.json())["workers"]
        (drained,) = (worker["id"] for worker in workers if worker["url"] == other)
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
