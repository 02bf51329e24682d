"""vLLM announces blocks that decode has received, so that routers find the prefixes that it has."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

pytest.importorskip("vllm")

from benchmarks.vllm_handover.client import MODEL, ask, hand_over, prompt_of
from tests.engines.vllm.deployment import Deployment
from tests.engines.vllm.events import KVEvents

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.timeout(900)]

BLOCK = 128
NUM_BLOCKS = 3
"""Whole blocks of the prompt."""


@pytest.fixture
async def events(
    pair: Deployment, event_addresses: dict[str, str], client: aiohttp.ClientSession
) -> AsyncIterator[dict[str, KVEvents]]:
    """Listen to both servers."""
    found = {name: KVEvents(address) for name, address in event_addresses.items()}
    try:
        for number, (name, server) in enumerate({"prefill": pair.prefill, "decode": pair.decode}.items()):
            for attempt in range(20):  # a server may not have noticed yet that someone listens
                await ask(client, server.url, prompt_of(860 + 40 * number + attempt, BLOCK), 1)
                if await found[name].some():
                    break
        yield found
    finally:
        for one in found.values():
            one.close()


async def test_received_blocks_are_announced_like_computed_ones(
    pair: Deployment, client: aiohttp.ClientSession, events: dict[str, KVEvents]
) -> None:
    prompt = prompt_of(850, NUM_BLOCKS * BLOCK + 10)
    async with client.post(f"{pair.prefill.url}/tokenize", json={"model": MODEL, "prompt": prompt}) as answer:
        tokens = (await answer.json())["tokens"]
    _, answered = await hand_over(client, pair.prefill.url, pair.decode.url, prompt, 2)
    assert answered is not None
    assert answered.status == 200
    for one in events.values():
        await one.until(lambda found: len(chain(found, tokens)) == NUM_BLOCKS)
    computed, received = (chain(events[name], tokens) for name in ("prefill", "decode"))
    assert received == computed
    hashes = {one.block_hashes[0] for one in received}
    assert not events["decode"].removed & hashes
    for number in range(4):  # as long as vLLM allows: they take all of decode's blocks
        await hand_over(client, pair.prefill.url, pair.decode.url, prompt_of(870 + number, 1850), 1)
    await events["decode"].until(lambda found: found.removed >= hashes)


def chain(found: KVEvents, tokens: list[int]) -> list[Any]:
    """Return the announced blocks that begin with some tokens, in order."""
    chained: list[Any] = []
    parent = None
    for start in range(0, len(tokens), BLOCK):
        wanted = (parent, tokens[start : start + BLOCK])
        block = next((one for one in found.stored.values() if (one.parent_block_hash, one.token_ids) == wanted), None)
        if block is None:
            break
        parent = block.block_hashes[0]
        chained.append(block)
    return chained
