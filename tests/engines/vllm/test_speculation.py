"""Speculative decoding with a draft model: decode continues from the caches of both models."""

import json
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

pytest.importorskip("vllm")

from benchmarks.vllm_handover.client import ask, hand_over, metrics, prompt_of
from kvflow.cli.serve.server import Server
from kvflow.cli.smollm2 import prepare_smollm2
from tests.engines.vllm.deployment import Deployment

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = 24
PROMPTS = [prompt_of(900 + number, num_words) for number, num_words in enumerate((5, 31, 90, 150, 300, 420))]


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    place: Path = tmp_path_factory.mktemp("drafts")
    # The model drafts for itself, so that all drafts are right while it has the cache.
    speculation = {"method": "draft_model", "model": str(prepare_smollm2()), "num_speculative_tokens": 3}
    arguments = ("--block-size", "32", "--no-enable-prefix-caching", "--speculative-config", json.dumps(speculation))
    with Deployment(place, arguments=arguments) as deployment:
        yield deployment


async def accepted(client: aiohttp.ClientSession, server: Server) -> float:
    return (await metrics(client, server.url))["spec_decode_num_accepted_tokens_total"]


async def received(drafting: Deployment, client: aiohttp.ClientSession, prompt: str) -> tuple[str, float]:
    """Hand over a request; return its text, and how many drafts decode has accepted."""
    before = await accepted(client, drafting.decode)
    _, answer = await hand_over(client, drafting.prefill.url, drafting.decode.url, prompt, TOKENS)
    assert answer is not None
    assert (answer.status, answer.error) == (200, "")
    await drafting.until_free(client)
    return answer.text, await accepted(client, drafting.decode) - before


async def test_decode_accepts_as_many_drafts_as_one_server(drafting: Deployment, client: aiohttp.ClientSession) -> None:
    """Unless the cache of the draft model is lost, which changes no text."""
    expected, found, without = [], [], []
    for prompt in PROMPTS:
        before = await accepted(client, drafting.prefill)
        alone = await ask(client, drafting.prefill.url, prompt, TOKENS)
        expected.append((alone.text, await accepted(client, drafting.prefill) - before))
        found.append(await received(drafting, client, prompt))
        drafting.lost_drafts.touch()
        without.append(await received(drafting, client, prompt))
        drafting.lost_drafts.unlink()
    assert found == expected
    assert [text for text, _ in without] == [text for text, _ in expected]
    assert sum(count for _, count in without) < sum(count for _, count in expected) / 2
