"""Released routers from PyPI, in front of servers with kvflow's connector."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import aiohttp
import anyio
import pytest

from benchmarks.vllm_handover.client import MODEL, ask, metrics, prompt_of
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


def start_server(name: str, role: Role, place: Path, *arguments: str, **connector: str) -> Server:
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


@pytest.fixture
async def leaving(tmp_path: Path) -> AsyncIterator[tuple[Server, Server]]:
    """Start a prefill server that tells routers of its rank, and a decode server that computes what does not arrive."""
    prefill = start_server(LEAVING, "kv_producer", tmp_path, "--middleware", "kvflow.engines.vllm.health.RanksHealth")
    decode = start_server("decode-that-stays", "kv_consumer", tmp_path, kv_load_failure_policy="recompute")
    try:
        await prefill.wait_until_ready()
        await decode.wait_until_ready()
        yield prefill, decode
    finally:
        prefill.stop()
        decode.stop()


async def test_routers_leave_out_a_server_whose_rank_drains(
    pair: Deployment, client: aiohttp.ClientSession, leaving: tuple[Server, Server], tmp_path: Path
) -> None:
    """`kvflow drain` tells only the rank. No request fails before the routers know, and none goes there afterwards."""
    drained, decode = leaving
    prefills = [pair.prefill.url, drained.url]
    servers = {**dict.fromkeys(prefills, "prefill"), decode.url: "decode"}
    numbers = iter(range(240, 1_000))
    async with vllm_router(prefills, [decode.url], tmp_path) as static, smg(servers, tmp_path) as other:

        async def ask_both() -> None:
            for router in (static, other):
                prompt = prompt_of(next(numbers), 40)
                answer = await ask(client, router, prompt, 4)
                assert answer.status == 200, f"{answer.error}\n{decode.tail()}\n{drained.tail()}"
                assert answer.text == await pair.text(client, prompt, 4)

        async def is_left_out(router: str) -> bool:
            return not (await workers_of(client, router))[drained.url]["is_healthy"]

        for _ in range(4):
            await ask_both()
        assert (await num_answered(client, drained)) >= 4
        await anyio.run_process([sys.executable, "-m", "kvflow.cli", "drain", "--instance", LEAVING])
        async with client.get(f"{drained.url}/health") as heard:
            assert heard.status == 503
            assert (await heard.json())["ranks"] == {f"prefill {LEAVING}/0": "the rank is draining"}
        while not (await is_left_out(static) and await is_left_out(other)):
            await ask_both()
        before = await num_answered(client, drained)
        for _ in range(6):
            await ask_both()
        assert await num_answered(client, drained) == before
    await pair.until_free(client)


async def num_answered(client: aiohttp.ClientSession, server: Server) -> float:
    return (await metrics(client, server.url)).get("request_success_total", 0.0)
