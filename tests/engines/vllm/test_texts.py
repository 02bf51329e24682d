"""Two servers together generate the same texts as a single one."""

from pathlib import Path

import aiohttp
import anyio
import pytest

from benchmarks.vllm_handover.client import ask, hand_over, metrics, prompt_of, prompts
from kvflow.cli.proxy.application import serve_proxy
from tests.engines.vllm.deployment import BROUGHT, KNOWN, Deployment
from tests.engines.vllm.routers import vllm_router

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS = 12


@pytest.mark.parametrize(("at_once", "router"), [(1, "vllm-router"), (4, "vllm-router"), (4, "proxy")])
async def test_texts_are_those_of_one_server(
    pair: Deployment, client: aiohttp.ClientSession, tmp_path: Path, *, at_once: int, router: str
) -> None:
    """Prompts of 5 to 1,200 tokens; decode receives all but the last token from prefill."""
    asked = [f"{at_once} {router} {prompt}" for prompt in prompts(12, 4, 900)]
    before = await metrics(client, pair.decode.url)
    found: dict[str, str] = {}
    routing = (
        serve_proxy([pair.prefill.url], [pair.decode.url], "127.0.0.1", 0)
        if router == "proxy"
        else vllm_router([pair.prefill.url], [pair.decode.url], tmp_path)
    )
    async with routing as url:
        slots = anyio.Semaphore(at_once)

        async def one(prompt: str) -> None:
            async with slots:
                answer = await ask(client, url, prompt, TOKENS, stream=True)
                assert (answer.status, answer.error) == (200, "")
                found[prompt] = answer.text

        async with anyio.create_task_group() as tasks:
            for prompt in asked:
                tasks.start_soon(one, prompt)
    after = await metrics(client, pair.decode.url)
    assert found == {prompt: await pair.text(client, prompt, TOKENS) for prompt in asked}
    assert after[BROUGHT] - before[BROUGHT] > sum(len(prompt.split()) for prompt in asked)
    await pair.until_free(client)


async def test_only_missing_blocks_are_asked_for(pair: Deployment, client: aiohttp.ClientSession) -> None:
    """Decode holds whole blocks of 128 tokens of an earlier prompt, and requests the tokens behind them."""
    first = prompt_of(50, 400)
    for prompt in (first, f"{first} and then"):
        before = await metrics(client, pair.decode.url)
        _, answer = await hand_over(client, pair.prefill.url, pair.decode.url, prompt, TOKENS)
        assert answer is not None
        assert answer.text == await pair.text(client, prompt, TOKENS)
    after = await metrics(client, pair.decode.url)
    assert after[KNOWN] - before[KNOWN] >= 384
    assert 0 < after[BROUGHT] - before[BROUGHT] < 256
    await pair.until_free(client)


async def test_a_wrong_page_gives_another_text(pair: Deployment, client: aiohttp.ClientSession) -> None:
    """The comparison can fail, so decode does use the cache that it receives."""
    lengths = {60: 20, 62: 25, 65: 30, 67: 35}  # their words do not alternate, so none can be guessed
    asked = [prompt_of(number, num_words) for number, num_words in lengths.items()]
    pair.wrong_page.touch()
    try:
        answers = [await hand_over(client, pair.prefill.url, pair.decode.url, prompt, TOKENS) for prompt in asked]
    finally:
        pair.wrong_page.unlink()
    for prompt, (_, answer) in zip(asked, answers, strict=True):
        assert answer is not None
        assert answer.error == ""
        assert answer.text != await pair.text(client, prompt, TOKENS), prompt


async def test_a_request_without_a_ticket_is_answered(pair: Deployment, client: aiohttp.ClientSession) -> None:
    """Decode computes the prompt itself, as vLLM does without a connector."""
    prompt = prompt_of(52, 30)
    answer = await ask(client, pair.decode.url, prompt, TOKENS)
    assert (answer.status, answer.text) == (200, await pair.text(client, prompt, TOKENS))
