"""Models with different kinds of layers, whose blocks vLLM keeps in several groups."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import aiohttp
import pytest

pytest.importorskip("vllm")

from benchmarks.vllm_handover.client import ask, hand_over, prompt_of
from kvflow.cli.smollm2 import prepare_smollm2
from tests.engines.vllm.deployment import Deployment
from tests.engines.vllm.models import (
    WINDOW,
    make_gated_delta_model,
    make_mamba_model,
    make_windowed_model,
    prompt_of_tokens,
)

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS = 12
BLOCK = 32
STEP = 192
"""Most tokens per step, so that prompts are computed in chunks."""

CHUNKS = ("--max-num-batched-tokens", str(STEP))
UNCACHED = ("--no-enable-prefix-caching", *CHUNKS)
WINDOWS: Final = ("windows", "windows, 2 workers")
STATES: Final = ("Mamba-2", "Mamba-2, 2 workers")
MODELS: Final = {
    "windows": (make_windowed_model, 1, ("--block-size", str(BLOCK), *CHUNKS)),
    "windows, 2 workers": (make_windowed_model, 2, ("--block-size", str(BLOCK), *CHUNKS)),
    "Mamba-2": (make_mamba_model, 1, UNCACHED),
    "Mamba-2, 2 workers": (make_mamba_model, 2, UNCACHED),
    "gated delta nets": (make_gated_delta_model, 1, ("--dtype", "bfloat16", *UNCACHED)),
}
"""For each model: how it is made, the number of prefill workers (decode has one), and server arguments."""


@pytest.fixture(scope="module")
def mixed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    make, workers, arguments = MODELS[request.param]
    place: Path = tmp_path_factory.mktemp("models")
    model = make(place / "model", prepare_smollm2())
    with Deployment(place, model=model, arguments=arguments, prefill_workers=workers) as deployment:
        yield deployment


def models(*names: str) -> pytest.MarkDecorator:
    """Return a mark that runs a test with these models, each in servers of its own."""
    return pytest.mark.parametrize("mixed", names, indirect=True, scope="module")


async def compare(mixed: Deployment, client: aiohttp.ClientSession, prompts: Iterable[str]) -> None:
    for prompt in prompts:
        _, answer = await hand_over(client, mixed.prefill.url, mixed.decode.url, prompt, TOKENS)
        assert answer is not None
        assert (answer.status, answer.error) == (200, "")
        assert answer.text == await mixed.text(client, prompt, TOKENS), prompt
    await mixed.until_free(client)


@models(*WINDOWS, *STATES)
async def test_texts_are_those_of_one_server(mixed: Deployment, client: aiohttp.ClientSession) -> None:
    """Prompts shorter and longer than the window, ending at every position within a block."""
    words = [5, WINDOW - 10, 700, *range(300, 300 + BLOCK, 3)]
    await compare(mixed, client, (prompt_of(300 + number, count) for number, count in enumerate(words)))


@models("gated delta nets")
async def test_states_in_half_precision(mixed: Deployment, client: aiohttp.ClientSession) -> None:
    """In bf16, texts depend on how vLLM chunks a prompt, so these prompts are cut before the last token."""
    await compare(mixed, client, [prompt_of_tokens(count * STEP + 1) for count in (1, 2, 3)])


@models(*WINDOWS)
async def test_decode_has_a_prefix(mixed: Deployment, client: aiohttp.ClientSession) -> None:
    first = prompt_of(400, 250)
    await compare(mixed, client, [first, f"{first} and then they went home"])


@models(*MODELS)
@pytest.mark.parametrize("component", ["", "kv0"], ids=["all groups", "first group"])
async def test_a_wrong_page_gives_another_text(
    mixed: Deployment, client: aiohttp.ClientSession, component: str
) -> None:
    """The comparison can fail, even for a small window or a state."""
    prompt = prompt_of(401, 200)
    mixed.wrong_page.write_text(component)
    try:
        _, answer = await hand_over(client, mixed.prefill.url, mixed.decode.url, prompt, TOKENS)
    finally:
        mixed.wrong_page.unlink()
    assert answer is not None
    assert answer.text != await mixed.text(client, prompt, TOKENS)
    alone = await ask(client, mixed.decode.url, prompt_of(402, 200), TOKENS)
    assert alone.text == await mixed.text(client, prompt_of(402, 200), TOKENS)
