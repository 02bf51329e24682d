"""Texts of two servers are those of one, whatever the blocks, workers, prompts and number of requests at a time.

Blocks of 16 tokens are not tested: on CPUs, vLLM accepts multiples of 32 only.
Pipeline parallelism is not tested: vLLM 0.32.0 fails its first request on CPUs, also without a connector.
"""

import json
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
import anyio
import pytest

pytest.importorskip("vllm")

from benchmarks.vllm_handover.client import hand_over, metrics, prompt_of, prompts
from kvflow.cli.smollm2 import prepare_smollm2
from tests.engines.vllm.deployment import BROUGHT, KNOWN, Deployment
from tests.engines.vllm.models import make_windowed_model

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.timeout(1800)]

TOKENS: Final = 12
NGRAM: Final = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
SERVED: Final = re.compile(r'^vllm:request_success_total\{engine="(\d)",.*\} ([1-9].*)$', re.MULTILINE)


class Case(NamedTuple):
    """How two servers are started: with the small model, or with a tiny one of even numbers of heads."""

    arguments: Sequence[str]
    prefill_workers: int = 1
    divided_by: str = "tensor"
    is_tiny: bool = False


def chunks(block_size: int) -> tuple[str, ...]:
    return "--block-size", str(block_size), "--max-num-batched-tokens", "64"


CASES: Final = {
    "TP 2 to 1, blocks of 32": Case(chunks(32), prefill_workers=2, is_tiny=True),
    "DP 2 to 1, ngram speculation, blocks of 64": Case(
        (*chunks(64), "--speculative-config", json.dumps(NGRAM)), prefill_workers=2, divided_by="data"
    ),
    "blocks of 128": Case(chunks(128)),
}
QUICK: Final = "TP 2 to 1, blocks of 32"


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in CASES]
)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def served(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    place: Path = tmp_path_factory.mktemp("matrix")
    with Deployment(
        place,
        model=make_windowed_model(place / "model", prepare_smollm2()) if case.is_tiny else None,
        arguments=("--max-num-seqs", "16", *case.arguments),
        prefill_workers=case.prefill_workers,
        divided_by=case.divided_by,
    ) as deployment:
        yield deployment


def conversations() -> list[list[str]]:
    """Return 60 turns: prompts of 1 to 2,000 tokens, prompts with the same beginning, and chats of three turns."""
    single = ["One", *prompts(29, 2, 1950)]
    prefix = prompt_of(100, 300)
    alike = [f"{prefix} {prompt_of(101 + number, 2 + 5 * number)}" for number in range(15)]
    chats = [[turn(f"{question} {subject}?") for question in QUESTIONS] for subject in SUBJECTS]
    return [*([prompt] for prompt in single + alike), *chats]


QUESTIONS: Final = ("What is", "Who first wrote about", "Where would I find")
SUBJECTS: Final = ("a lighthouse", "the tide", "a sextant", "the polar star", "an albatross")


def turn(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


async def answers(ask_one: Callable[[str], Awaitable[str]], turns: Sequence[str]) -> dict[str, str]:
    """Ask turn after turn, each with all that was said before; return the answers."""
    said, found = "", {}
    for each in turns:
        said += each
        found[said] = await ask_one(said)
        said += f"{found[said]}<|im_end|>\n"
    return found


@pytest.mark.parametrize("at_once", [1, 4, 16])
async def test_texts_are_those_of_one_server(
    served: Deployment, case: Case, client: aiohttp.ClientSession, at_once: int
) -> None:
    asked, slots, found = conversations(), anyio.Semaphore(at_once), dict[str, str]()

    async def received(prompt: str) -> str:
        _, answer = await hand_over(client, served.prefill.url, served.decode.url, prompt, TOKENS)
        assert answer is not None
        assert (answer.status, answer.error) == (200, "")
        return answer.text

    async def one(turns: Sequence[str]) -> None:
        async with slots:
            found.update(await answers(received, turns))

    before = await metrics(client, served.decode.url)
    async with anyio.create_task_group() as tasks:
        for turns in asked:
            tasks.start_soon(one, turns)
    after = await metrics(client, served.decode.url)
    expected: dict[str, str] = {}
    for turns in asked:
        expected |= await answers(lambda prompt: served.text(client, prompt, TOKENS), turns)
    assert len(found) == 60
    assert found == expected
    moved = after[BROUGHT] + after[KNOWN] - before[BROUGHT] - before[KNOWN]
    assert moved > sum(len(prompt.split()) for prompt in found)
    await served.until_free(client)
    async with client.get(f"{served.prefill.url}/metrics") as response:
        engines = {engine for engine, _ in SERVED.findall(await response.text())}
    assert len(engines) == (case.prefill_workers if case.divided_by == "data" else 1)


async def test_a_wrong_page_gives_another_text(served: Deployment, client: aiohttp.ClientSession) -> None:
    """The comparison can fail in each of the cases."""
    asked = [prompt_of(200 + number, 150 + 20 * number) for number in range(4)]
    served.wrong_page.touch()
    answers = [await hand_over(client, served.prefill.url, served.decode.url, prompt, TOKENS) for prompt in asked]
    served.wrong_page.unlink()
    found = {prompt: answer.text for prompt, (_, answer) in zip(asked, answers, strict=True) if answer is not None}
    assert len(found) == len(asked)
    assert [prompt for prompt in asked if found[prompt] != await served.text(client, prompt, TOKENS)]
