"""vLLM's policy "recompute": decode computes the prompt itself if the cache does not arrive."""

from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from benchmarks.vllm_handover.client import ask, prompt_of
from kvflow.cli.proxy.application import PREFILL_PARAMS
from tests.engines.vllm.deployment import Deployment

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS = 8


@pytest.fixture(scope="module")
def recomputing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    place: Path = tmp_path_factory.mktemp("recompute")
    with Deployment(place, load_failure_policy="recompute", extra_config={"timeouts": {"open_s": 2.0}}) as deployment:
        yield deployment


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
