"""Servers with few blocks and the policy "recompute": decode computes a prompt if its cache does not arrive."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import anyio
import pytest

from benchmarks.vllm_handover.client import ask, prompt_of
from kvflow.cli.proxy.application import PREFILL_PARAMS
from tests.engines.vllm.deployment import GRANT_S, SETTLE_S, Deployment

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS = 8
FEW_BLOCKS = (
    *("--block-size", "32", "--num-gpu-blocks-override", "42", "--max-model-len", "1024"),
    *("--max-num-batched-tokens", "64", "--no-enable-prefix-caching"),
)


@pytest.fixture(scope="module")
def recomputing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    place: Path = tmp_path_factory.mktemp("recompute")
    settings = {"timeouts": {"open_s": 2.0}}
    with Deployment(place, load_failure_policy="recompute", extra_config=settings, arguments=FEW_BLOCKS) as deployment:
        yield deployment


async def test_two_servers_asked_in_opposite_order(recomputing: Deployment, client: aiohttp.ClientSession) -> None:
    """Decode has blocks for three requests that prefill cannot compute, and prefill has computed the three others."""
    asked = {uuid.uuid4().hex: prompt_of(600 + number, 300) for number in range(6)}
    expected = [await recomputing.text(client, prompt, TOKENS) for prompt in asked.values()]
    found: dict[str, str] = {}

    async def decode(name: str) -> None:
        params = {"do_remote_prefill": True, "transfer_id": name, "remote_engine_id": recomputing.prefill_address}
        answer = await ask(client, recomputing.decode.url, asked[name], TOKENS, params)
        found[name] = answer.text

    async def prefill(name: str) -> None:
        await ask(client, recomputing.prefill.url, asked[name], 1, {**PREFILL_PARAMS, "transfer_id": name})

    with anyio.fail_after(SETTLE_S):
        async with anyio.create_task_group() as tasks:
            for name in asked:
                tasks.start_soon(decode, name)
                await anyio.sleep(0.02)
            for name in reversed(asked):
                tasks.start_soon(prefill, name)
                await anyio.sleep(0.02)
    assert [found[name] for name in asked] == expected
    await recomputing.until_free(client)


async def test_blocks_that_nobody_asks_for_do_not_fill_prefill(
    recomputing: Deployment, client: aiohttp.ClientSession
) -> None:
    """As when decode is dead: the pool has room for three such requests, each of which waits for `grant_s`."""
    with anyio.fail_after(2 * SETTLE_S):
        for number in range(8):
            kept = await ask(client, recomputing.prefill.url, prompt_of(610 + number, 300), 1, PREFILL_PARAMS)
            assert kept.params is not None
    await recomputing.until_free(client, GRANT_S + SETTLE_S)


async def test_text_is_right_without_the_cache(recomputing: Deployment, client: aiohttp.ClientSession) -> None:
    """With a ticket that was used before, and after the death of the prefill server."""
    prompts = [prompt_of(500 + number, 200) for number in range(2)]
    expected = [await recomputing.text(client, prompt, TOKENS) for prompt in prompts]
    tickets = []
    for prompt in prompts:
        first = await ask(client, recomputing.prefill.url, prompt, 1, PREFILL_PARAMS)
        assert first.params is not None
        tickets.append(first.params)
    for _ in range(2):
        answer = await ask(client, recomputing.decode.url, prompts[0], TOKENS, tickets[0])
        assert (answer.status, answer.text) == (200, expected[0])
    recomputing.prefill.kill()
    answer = await ask(client, recomputing.decode.url, prompts[1], TOKENS, tickets[1])
    assert (answer.status, answer.text) == (200, expected[1])
