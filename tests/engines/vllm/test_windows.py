"""A model whose layers see different numbers of tokens: vLLM keeps their blocks in several groups."""

from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

pytest.importorskip("vllm")

from benchmarks.vllm_handover.client import ask, hand_over, prompt_of
from kvflow.cli.demo.models import prepare_smollm2
from tests.engines.vllm.deployment import Deployment
from tests.engines.vllm.models import WINDOW, make_windowed_model

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS = 12
BLOCK = 32


@pytest.fixture(scope="module", params=[1, 2], ids=["1 worker", "2 workers"])
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One decode worker takes over what one prefill worker has computed, or what two have that share the heads."""
    place: Path = tmp_path_factory.mktemp("windows")
    model = make_windowed_model(place / "model", prepare_smollm2())
    arguments = ("--block-size", str(BLOCK), "--max-num-batched-tokens", "192")
    deployment = Deployment(place, model=model, arguments=arguments, prefill_workers=request.param)
    try:
        deployment.start()
        yield deployment
    finally:
        deployment.stop()


async def test_texts_are_those_of_one_server(windowed: Deployment, client: aiohttp.ClientSession) -> None:
    """Prompts shorter and longer than the window, and of each length within a block."""
    for number, words in enumerate([5, WINDOW - 10, 700, *range(300, 300 + BLOCK, 3)]):
        prompt = prompt_of(300 + number, words)
        _, answer = await hand_over(client, windowed.prefill.url, windowed.decode.url, prompt, TOKENS)
        assert answer is not None
        assert (answer.status, answer.error) == (200, "")
        assert answer.text == await windowed.text(client, prompt, TOKENS), words
    await windowed.until_free(client)


async def test_decode_has_a_prefix(windowed: Deployment, client: aiohttp.ClientSession) -> None:
    first = prompt_of(400, 250)
    for prompt in (first, f"{first} and then they went home"):
        _, answer = await hand_over(client, windowed.prefill.url, windowed.decode.url, prompt, TOKENS)
        assert answer is not None
        assert answer.text == await windowed.text(client, prompt, TOKENS)
    await windowed.until_free(client)


async def test_a_wrong_page_gives_another_text(windowed: Deployment, client: aiohttp.ClientSession) -> None:
    """The comparison can fail, for the small window too."""
    prompt = prompt_of(401, 200)
    windowed.wrong_page.touch()
    try:
        _, answer = await hand_over(client, windowed.prefill.url, windowed.decode.url, prompt, TOKENS)
    finally:
        windowed.wrong_page.unlink()
    assert answer is not None
    assert answer.text != await windowed.text(client, prompt, TOKENS)
    alone = await ask(client, windowed.decode.url, prompt_of(402, 200), TOKENS)
    assert alone.text == await windowed.text(client, prompt_of(402, 200), TOKENS)
