"""Servers hand over again after they slept: vLLM's calls of 0.33, made in the workers of real servers."""

import aiohttp
import pytest

from benchmarks.vllm_handover.client import hand_over, metrics, prompt_of
from kvflow.cli.serve.server import Server
from tests.engines.vllm.deployment import BROUGHT, Deployment

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS = 8


async def sleep_and_wake_up(client: aiohttp.ClientSession, server: Server) -> None:
    """Make the calls of vLLM's sleep and wake-up: of the scheduler's connector, and of the workers'."""
    for call in (
        client.post(f"{server.url}/reset_prefix_cache", params={"reset_external": "true"}),
        client.post(f"{server.url}/collective_rpc", json={"method": "unmap_caches"}),
        client.post(f"{server.url}/collective_rpc", json={"method": "map_caches"}),
    ):
        async with call as response:
            assert response.status == 200, server.tail()


@pytest.mark.parametrize("sleeps", ["prefill", "decode"])
async def test_servers_hand_over_after_one_slept(pair: Deployment, client: aiohttp.ClientSession, sleeps: str) -> None:
    sleeper: Server = getattr(pair, sleeps)
    number = 700 + 10 * (sleeps == "decode")
    await hand_over(client, pair.prefill.url, pair.decode.url, prompt_of(number, 100), TOKENS)
    await pair.until_free(client)
    await sleep_and_wake_up(client, sleeper)
    # If prefill slept, the first request ends with the step that brings the new ticket, and decode computes it.
    for prompt in (prompt_of(number + 1, 100), prompt_of(number + 2, 100)):
        before = (await metrics(client, pair.decode.url))[BROUGHT]
        _, answer = await hand_over(client, pair.prefill.url, pair.decode.url, prompt, TOKENS)
        assert answer is not None
        assert answer.text == await pair.text(client, prompt, TOKENS)
    assert (await metrics(client, pair.decode.url))[BROUGHT] > before
